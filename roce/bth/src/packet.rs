//! Packets: checked views of received ones, headers of those to send.

use thiserror::Error;

use crate::{
    aeth::Aeth,
    header::{AtomicEth, Bth, Deth, Feth, Reth, XrcEth},
    ids::RKey,
    opcode::{ExtHeader, Opcode, OpcodeInfo},
    wire::{BTH_LEN, ICRC_LEN, MAX_HEADER_LEN, Wire},
};

/// Reason why bytes are not a RoCEv2 packet: the check that failed.
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

macro_rules! extended_headers {
    ($( $(#[$doc:meta])* $name:ident: $type:ty = $header:ident; )*) => {
        /// Headers of a packet to send: the BTH and the extended headers of its opcode.
        ///
        /// [`Header::emit`] writes exactly the headers that the opcode's row names; a missing one is written as zeros.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub struct Header {
            /// Base transport header.
            pub bth: Bth,
            $( $(#[$doc])* pub $name: Option<$type>, )*
        }

        impl Header {
            /// Creates a header with the BTH alone.
            pub const fn new(bth: Bth) -> Self {
                Self { bth, $( $name: None, )* }
            }

            /// Writes the headers to the front of `out` and returns how many bytes they are.
            ///
            /// # Panics
            /// If `out` is shorter than [`Header::wire_len`]: a bug of the caller.
            pub fn emit(&self, out: &mut [u8]) -> usize {
                let mut writer = HeaderWriter::new(&self.bth, out);
                $(
                    if let Some(value) = self.$name {
                        writer.$name(value);
                    }
                )*
                writer.written()
            }
        }

        impl HeaderWriter<'_> {
            $(
                $(#[$doc])*
                #[inline]
                pub fn $name(&mut self, value: $type) {
                    self.put(ExtHeader::$header, value);
                }
            )*
        }

        impl HeaderView<'_> {
            $(
                $(#[$doc])*
                #[inline]
                pub fn $name(&self) -> Option<$type> {
                    self.get(ExtHeader::$header)
                }
            )*
        }

        impl From<HeaderView<'_>> for Header {
            fn from(view: HeaderView<'_>) -> Self {
                Self { bth: view.bth, $( $name: view.$name(), )* }
            }
        }
    };
}

extended_headers! {
    /// Datagram header.
    deth: Deth = Deth;
    /// Extended reliable connection header.
    xrceth: XrcEth = Xrceth;
    /// FLUSH header.
    feth: Feth = Feth;
    /// RDMA header.
    reth: Reth = Reth;
    /// Atomic header.
    atomic_eth: AtomicEth = AtomicEth;
    /// ACK header.
    aeth: Aeth = Aeth;
    /// Original value that an atomic acknowledgement returns.
    atomic_ack: u64 = AtomicAckEth;
    /// Immediate data: the wire's four bytes read big-endian.
    imm: u32 = Imm;
    /// Key to invalidate.
    ieth: RKey = Ieth;
}

/// Writer of a packet's headers. Each method writes one extended header, if the opcode has it; the others stay zero.
#[derive(Debug)]
pub struct HeaderWriter<'a> {
    info: &'static OpcodeInfo,
    bytes: &'a mut [u8],
}

impl<'a> HeaderWriter<'a> {
    /// Writes the BTH to the front of `out`, and zeros for the extended headers.
    ///
    /// # Panics
    /// If `out` is shorter than the headers: a bug of the caller.
    #[inline]
    pub fn new(bth: &Bth, out: &'a mut [u8]) -> Self {
        let info = bth.opcode.info();
        let bytes = &mut out[..info.header_len];
        let (first, extended) = bytes.split_at_mut(BTH_LEN);
        first.copy_from_slice(&bth.write());
        match <&mut [u8; Reth::LEN]>::try_from(&mut *extended) {
            // Most requests have a RETH alone: stores of a number are no call of `memset`.
            Ok(reth) => *reth = 0u128.to_ne_bytes(),
            Err(_) => extended.fill(0),
        }
        Self { info, bytes }
    }

    /// Returns the length of the headers, bytes.
    pub const fn written(&self) -> usize {
        self.info.header_len
    }

    #[inline]
    fn put<T: Wire<N>, const N: usize>(&mut self, header: ExtHeader, value: T) {
        if let Some(at) = self.info.offset(header) {
            self.bytes[at..at + N].copy_from_slice(&value.write());
        }
    }
}

impl Header {
    /// Returns the bytes on the wire.
    pub const fn wire_len(&self) -> usize {
        self.bth.opcode.info().header_len
    }

    /// Writes the headers to `buf` and returns a view of them.
    pub fn view<'a>(&self, buf: &'a mut [u8; MAX_HEADER_LEN]) -> HeaderView<'a> {
        let len = self.emit(buf);
        HeaderView::new(self.bth, &buf[..len])
    }
}

/// View of a packet's headers. Reads extended headers from the packet's bytes on demand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeaderView<'a> {
    /// Base transport header.
    pub bth: Bth,
    bytes: &'a [u8],
}

impl<'a> HeaderView<'a> {
    /// Creates the view of headers in wire format, of which `bth` is the first.
    pub const fn new(bth: Bth, bytes: &'a [u8]) -> Self {
        Self { bth, bytes }
    }

    /// Reads the BTH of a packet of which a capture kept only the first bytes. Extended headers that are not there read as missing.
    ///
    /// # Errors
    /// Fewer bytes than the BTH, an unknown opcode, another version.
    pub fn of_cut(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let Some(bth) = bytes.first_chunk::<BTH_LEN>() else {
            return Err(ParseError::TooShort {
                need: BTH_LEN,
                have: bytes.len(),
            });
        };
        let opcode = Opcode::from_byte(bth[0]).ok_or(ParseError::UnknownOpcode(bth[0]))?;
        let bth = Bth::read(bth, opcode);
        if bth.version != 0 {
            return Err(ParseError::Version(bth.version));
        }
        let len = opcode.info().header_len.min(bytes.len());
        Ok(Self::new(bth, &bytes[..len]))
    }

    /// Returns the headers in wire format.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    #[inline]
    fn get<T: Wire<N>, const N: usize>(&self, header: ExtHeader) -> Option<T> {
        let at = self.bth.opcode.info().offset(header)?;
        self.bytes.get(at..)?.first_chunk().map(T::read)
    }
}

/// Parsed packet: views of headers and payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// The headers.
    pub header: HeaderView<'a>,
    /// Payload without pad.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Checks and reads a UDP payload: headers, payload, pad and ICRC (which is not verified here).
    ///
    /// # Errors
    /// The first check that fails.
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
        Ok(Self {
            header: HeaderView::new(bth, head),
            payload,
        })
    }
}
