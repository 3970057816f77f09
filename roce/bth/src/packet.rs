//! A whole packet: checked view on receive, header description on send.

use thiserror::Error;

use crate::{
    BTH_LEN, ICRC_LEN,
    aeth::Aeth,
    header::{AtomicEth, Bth, Deth, Feth, Reth, XrcEth},
    ids::RKey,
    opcode::Opcode,
};

/// Why bytes are not a RoCEv2 packet. Each names the check that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Error)]
pub enum ParseError {
    /// Fewer bytes than the BTH and the ICRC take.
    #[error("{have} bytes are too few for a BTH and an ICRC ({need})")]
    TooShort {
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// The opcode is not in the table.
    #[error("opcode {0:#04x} is not defined")]
    UnknownOpcode(u8),
    /// The transport header version is not 0.
    #[error("transport header version {0} is not 0")]
    Version(u8),
    /// Fewer bytes than the opcode's extended headers take.
    #[error("{have} bytes are too few for the headers of {opcode} ({need})")]
    HeaderTruncated {
        /// The packet's opcode.
        opcode: Opcode,
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// The pad count is more than the bytes behind the headers.
    #[error("pad count {pad} is more than the {have} bytes of payload")]
    PadTooLong {
        /// Pad count of the BTH.
        pad: u8,
        /// Bytes behind the headers.
        have: usize,
    },
    /// Payload and pad do not fill whole 4-byte words (IBTA 9.2.3).
    #[error("payload and pad of {0} bytes are not a multiple of 4")]
    Unaligned(usize),
    /// The opcode carries no payload, but some is there.
    #[error("{opcode} carries no payload, but {len} bytes follow")]
    UnexpectedPayload {
        /// The packet's opcode.
        opcode: Opcode,
        /// Bytes behind the headers.
        len: usize,
    },
}

/// Everything before the payload: the BTH and the extended headers that its opcode has.
///
/// [`Header::emit`] writes exactly the headers that the opcode's row names; a missing one is written as zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Header {
    /// Base transport header.
    pub bth: Bth,
    /// Datagram header.
    pub deth: Option<Deth>,
    /// Extended reliable connection header.
    pub xrceth: Option<XrcEth>,
    /// FLUSH header.
    pub feth: Option<Feth>,
    /// RDMA header.
    pub reth: Option<Reth>,
    /// Atomic header.
    pub atomic_eth: Option<AtomicEth>,
    /// ACK header.
    pub aeth: Option<Aeth>,
    /// The original value that an atomic acknowledgement returns.
    pub atomic_ack: Option<u64>,
    /// Immediate data: the wire's four bytes read big-endian.
    pub imm: Option<u32>,
    /// The rkey to invalidate.
    pub ieth: Option<RKey>,
}

impl Header {
    /// A header with the BTH alone.
    pub const fn new(bth: Bth) -> Self {
        Self {
            bth,
            deth: None,
            xrceth: None,
            feth: None,
            reth: None,
            atomic_eth: None,
            aeth: None,
            atomic_ack: None,
            imm: None,
            ieth: None,
        }
    }

    /// Bytes on the wire.
    pub const fn wire_len(&self) -> usize {
        self.bth.opcode.info().header_len
    }

    /// Writes the headers to the front of `out` and returns how many bytes they are.
    ///
    /// # Panics
    /// When `out` is shorter than [`Header::wire_len`]: the caller's bug.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let info = self.bth.opcode.info();
        let out = &mut out[..info.header_len];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&self.bth.write());
        if info.deth {
            put(&self.deth.map_or([0; 8], |h| h.write()));
        }
        if info.xrceth {
            put(&self.xrceth.map_or([0; 4], |h| h.write()));
        }
        if info.feth {
            put(&self.feth.map_or([0; 4], |h| h.write()));
        }
        if info.reth {
            put(&self.reth.map_or([0; 16], |h| h.write()));
        }
        if info.atomic_eth {
            put(&self.atomic_eth.map_or([0; 28], |h| h.write()));
        }
        if info.aeth {
            put(&self.aeth.map_or([0; 4], Aeth::write));
        }
        if info.atomic_ack_eth {
            put(&self.atomic_ack.unwrap_or(0).to_be_bytes());
        }
        if info.imm {
            put(&self.imm.unwrap_or(0).to_be_bytes());
        }
        if info.ieth {
            put(&self.ieth.map_or(0, |k| k.0).to_be_bytes());
        }
        out[at..].fill(0);
        info.header_len
    }
}

/// A parsed packet: headers by value, payload by reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// The headers.
    pub header: Header,
    /// Payload without pad.
    pub payload: &'a [u8],
}

fn take<const N: usize>(b: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = b.split_first_chunk::<N>()?;
    *b = tail;
    Some(*head)
}

impl<'a> Packet<'a> {
    /// Checks and reads a UDP payload: headers, payload, pad and ICRC (which is not verified here).
    ///
    /// # Errors
    /// Names the first check that fails.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let need = BTH_LEN + ICRC_LEN;
        let have = bytes.len();
        let (Some(bth), true) = (bytes.first_chunk::<12>(), have >= need) else {
            return Err(ParseError::TooShort { need, have });
        };
        let opcode = Opcode::from_byte(bth[0]).ok_or(ParseError::UnknownOpcode(bth[0]))?;
        let bth = Bth::read(bth, opcode);
        if bth.version != 0 {
            return Err(ParseError::Version(bth.version));
        }
        let info = opcode.info();
        let body = &bytes[..have - ICRC_LEN];
        let Some((head, tail)) = body.split_at_checked(info.header_len) else {
            let need = info.header_len + ICRC_LEN;
            return Err(ParseError::HeaderTruncated { opcode, need, have });
        };
        if !tail.len().is_multiple_of(4) {
            return Err(ParseError::Unaligned(tail.len()));
        }
        if !info.payload && !tail.is_empty() {
            return Err(ParseError::UnexpectedPayload {
                opcode,
                len: tail.len(),
            });
        }
        let payload = match tail.len().checked_sub(usize::from(bth.pad)) {
            Some(len) => &tail[..len],
            None => {
                return Err(ParseError::PadTooLong {
                    pad: bth.pad,
                    have: tail.len(),
                });
            }
        };
        let mut ext = &head[BTH_LEN..];
        let e = &mut ext;
        let header = Header {
            bth,
            deth: if info.deth {
                take(e).map(|b| Deth::read(&b))
            } else {
                None
            },
            xrceth: if info.xrceth {
                take(e).map(|b| XrcEth::read(&b))
            } else {
                None
            },
            feth: if info.feth {
                take(e).map(|b| Feth::read(&b))
            } else {
                None
            },
            reth: if info.reth {
                take(e).map(|b| Reth::read(&b))
            } else {
                None
            },
            atomic_eth: if info.atomic_eth {
                take(e).map(|b| AtomicEth::read(&b))
            } else {
                None
            },
            aeth: if info.aeth {
                take(e).map(|b| Aeth::read(&b))
            } else {
                None
            },
            atomic_ack: if info.atomic_ack_eth {
                take(e).map(u64::from_be_bytes)
            } else {
                None
            },
            imm: if info.imm {
                take(e).map(u32::from_be_bytes)
            } else {
                None
            },
            ieth: if info.ieth {
                take(e).map(|b| RKey(u32::from_be_bytes(b)))
            } else {
                None
            },
        };
        Ok(Self { header, payload })
    }
}
