//! Messages of o2iblnd (`struct kib_msg`): 48 bytes and a body.

use zerocopy::{FromBytes, IntoBytes};

use super::{
    checksum::{Checksum, checksum, judge},
    conn::ConnParams,
    consts::{HEAD_LEN, MAGIC, MAX_MSG, VERSION_1, VERSION_2},
    desc::RdmaDesc,
    error::ProtoError,
    hdr::LnetHdr,
    nid::Nid,
    order::{ByteOrder, Reader, Writer},
};

/// Bytes of data in an IMMEDIATE at most: 3976.
pub const MAX_IMMEDIATE: usize = MAX_MSG - HEAD_LEN - LnetHdr::LEN;
const WHAT: &str = "o2iblnd message";

macro_rules! types {
    ($($(#[$doc:meta])* $name:ident = $number:literal $text:literal;)*) => {
        /// Type of a message.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum MsgType {
            $($(#[$doc])* $name = $number,)*
        }

        impl MsgType {
            /// All types.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Name in the kernel (`IBLND_MSG_…`).
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Type with this number.
            pub const fn from_wire(number: u8) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }
        }
    };
}

types! {
    /// Connection request, private data of a REQ.
    ConnReq = 0xc0 "CONNREQ";
    /// Connection answer, private data of a REP.
    ConnAck = 0xc1 "CONNACK";
    /// Nothing but credits; also the keepalive.
    Noop = 0xd0 "NOOP";
    /// LNet header and all data.
    Immediate = 0xd1 "IMMEDIATE";
    /// LNet header of a PUT or REPLY whose data follows by RDMA WRITE.
    PutReq = 0xd2 "PUT_REQ";
    /// Refusal of a `PutReq`.
    PutNak = 0xd3 "PUT_NAK";
    /// Memory for the data of a `PutReq`.
    PutAck = 0xd4 "PUT_ACK";
    /// All data of a `PutReq` is written.
    PutDone = 0xd5 "PUT_DONE";
    /// LNet header of a GET, and memory for its data.
    GetReq = 0xd6 "GET_REQ";
    /// All data of a `GetReq` is written.
    GetDone = 0xd7 "GET_DONE";
}

/// Beginning of a message, which all versions share.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Peek {
    /// Byte order of the sender.
    pub order: ByteOrder,
    /// Version.
    pub version: u16,
    /// Type; see [`MsgType::from_wire`].
    pub kind: u8,
}

/// Reads the beginning of a message of any version.
///
/// # Errors
/// Too short, or no magic.
pub fn peek(bytes: &[u8]) -> Result<Peek, ProtoError> {
    let Some([m0, m1, m2, m3, v0, v1, kind]) = bytes.first_chunk() else {
        return Err(ProtoError::Short {
            what: WHAT,
            len: bytes.len(),
            need: 7,
        });
    };
    let magic = [*m0, *m1, *m2, *m3];
    let order = ByteOrder::of(MAGIC, magic).ok_or(ProtoError::Magic {
        what: WHAT,
        found: u32::from_le_bytes(magic),
    })?;
    let version = match order {
        ByteOrder::Little => u16::from_le_bytes([*v0, *v1]),
        ByteOrder::Big => u16::from_be_bytes([*v0, *v1]),
    };
    Ok(Peek {
        order,
        version,
        kind: *kind,
    })
}

/// End of a transfer (`struct kib_completion_msg`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Completion {
    /// Cookie of the request or, in a PUT_DONE, of the memory.
    pub cookie: u64,
    /// Bytes, or a negative error number.
    pub status: i32,
}

/// Body of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body<'a> {
    /// Parameters that the sender proposes.
    ConnReq(ConnParams),
    /// Parameters that the sender accepts.
    ConnAck(ConnParams),
    /// Nothing.
    Noop,
    /// Whole LNet message.
    Immediate {
        /// Header.
        hdr: &'a LnetHdr,
        /// Data, as far as the message reaches.
        payload: &'a [u8],
    },
    /// PUT or REPLY whose data follows.
    PutReq {
        /// Header.
        hdr: &'a LnetHdr,
        /// Cookie of the sender.
        cookie: u64,
    },
    /// Refusal.
    PutNak(Completion),
    /// Memory of the sender.
    PutAck {
        /// Cookie of the PUT_REQ.
        src_cookie: u64,
        /// Cookie of the sender, for the PUT_DONE.
        dst_cookie: u64,
        /// Memory.
        desc: RdmaDesc<'a>,
    },
    /// End of a PUT or REPLY.
    PutDone(Completion),
    /// GET, and memory of the sender.
    GetReq {
        /// Header.
        hdr: &'a LnetHdr,
        /// Cookie of the sender.
        cookie: u64,
        /// Memory.
        desc: RdmaDesc<'a>,
    },
    /// End of a GET.
    GetDone(Completion),
}

impl<'a> Body<'a> {
    /// Type of the message.
    pub const fn kind(&self) -> MsgType {
        match self {
            Self::ConnReq(_) => MsgType::ConnReq,
            Self::ConnAck(_) => MsgType::ConnAck,
            Self::Noop => MsgType::Noop,
            Self::Immediate { .. } => MsgType::Immediate,
            Self::PutReq { .. } => MsgType::PutReq,
            Self::PutNak(_) => MsgType::PutNak,
            Self::PutAck { .. } => MsgType::PutAck,
            Self::PutDone(_) => MsgType::PutDone,
            Self::GetReq { .. } => MsgType::GetReq,
            Self::GetDone(_) => MsgType::GetDone,
        }
    }

    /// LNet header of the message, if its type has one.
    pub const fn hdr(&self) -> Option<&'a LnetHdr> {
        match self {
            Self::Immediate { hdr, .. } | Self::PutReq { hdr, .. } | Self::GetReq { hdr, .. } => Some(hdr),
            _ => None,
        }
    }

    /// Reads a body. Returns the bytes behind it, too.
    fn read(kind: MsgType, order: ByteOrder, bytes: &'a [u8]) -> Result<(Self, &'a [u8]), ProtoError> {
        let mut fields = Reader::new(kind.name(), order, bytes);
        let completion = |fields: &mut Reader<'_>| -> Result<Completion, ProtoError> {
            let (cookie, status) = (fields.u64()?, fields.u32()? as i32);
            Ok(Completion { cookie, status })
        };
        let hdr = |fields: &mut Reader<'a>| -> Result<&'a LnetHdr, ProtoError> {
            let bytes = fields.take(LnetHdr::LEN)?;
            LnetHdr::ref_from_bytes(bytes).map_err(|_| ProtoError::Short {
                what: "LNet header",
                len: bytes.len(),
                need: LnetHdr::LEN,
            })
        };
        let body = match kind {
            MsgType::ConnReq => Self::ConnReq(ConnParams::read(&mut fields)?),
            MsgType::ConnAck => Self::ConnAck(ConnParams::read(&mut fields)?),
            MsgType::Noop => Self::Noop,
            MsgType::Immediate => {
                let hdr = hdr(&mut fields)?;
                let payload = fields.rest();
                return Ok((Self::Immediate { hdr, payload }, &[]));
            }
            MsgType::PutReq => Self::PutReq {
                hdr: hdr(&mut fields)?,
                cookie: fields.u64()?,
            },
            MsgType::PutNak => Self::PutNak(completion(&mut fields)?),
            MsgType::PutAck => Self::PutAck {
                src_cookie: fields.u64()?,
                dst_cookie: fields.u64()?,
                desc: RdmaDesc::read(order, &mut fields)?,
            },
            MsgType::PutDone => Self::PutDone(completion(&mut fields)?),
            MsgType::GetReq => Self::GetReq {
                hdr: hdr(&mut fields)?,
                cookie: fields.u64()?,
                desc: RdmaDesc::read(order, &mut fields)?,
            },
            MsgType::GetDone => Self::GetDone(completion(&mut fields)?),
        };
        Ok((body, fields.rest()))
    }

    fn write(&self, out: &mut Writer) {
        match self {
            Self::ConnReq(params) | Self::ConnAck(params) => params.write(out),
            Self::Noop => {}
            Self::Immediate { hdr, payload } => {
                out.bytes(hdr.as_bytes());
                out.bytes(payload);
            }
            Self::PutReq { hdr, cookie } => {
                out.bytes(hdr.as_bytes());
                out.u64(*cookie);
            }
            Self::PutNak(done) | Self::PutDone(done) | Self::GetDone(done) => {
                out.u64(done.cookie);
                out.u32(done.status as u32);
            }
            Self::PutAck {
                src_cookie,
                dst_cookie,
                desc,
            } => {
                out.u64(*src_cookie);
                out.u64(*dst_cookie);
                desc.write(out);
            }
            Self::GetReq { hdr, cookie, desc } => {
                out.bytes(hdr.as_bytes());
                out.u64(*cookie);
                desc.write(out);
            }
        }
    }
}

/// Message of version 2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message<'a> {
    /// Byte order of the sender.
    pub order: ByteOrder,
    /// Receive buffers that are given back.
    pub credits: u8,
    /// Checksum; 0: none. See [`Message::judge_checksum`].
    pub checksum: u32,
    /// Sender.
    pub src: Nid,
    /// Incarnation of the sender.
    pub src_stamp: u64,
    /// Receiver.
    pub dst: Nid,
    /// Incarnation of the receiver, as the sender knows it; 0 in the first CONNREQ.
    pub dst_stamp: u64,
    /// Body.
    pub body: Body<'a>,
    /// Bytes behind the body that the message counts as its own. Kernels send none and ignore them.
    pub trailing: &'a [u8],
}

impl<'a> Message<'a> {
    /// Reads a message. Bytes beyond its length (padding of the CM) are ignored, and a wrong checksum is no error here.
    ///
    /// # Errors
    /// No magic, another version than 2, an unknown type, fewer bytes than the message or its type needs, or a descriptor of 0 or more
    /// than 257 fragments.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ProtoError> {
        let Peek { order, version, kind } = peek(bytes)?;
        match version {
            VERSION_2 => {}
            VERSION_1 => return Err(ProtoError::Version1),
            other => return Err(ProtoError::Version(other)),
        }
        let mut fields = Reader::new(WHAT, order, bytes);
        fields.take(7)?;
        let credits = fields.u8()?;
        let nob = fields.u32()? as usize;
        let checksum = fields.u32()?;
        let (src, src_stamp) = (Nid(fields.u64()?), fields.u64()?);
        let (dst, dst_stamp) = (Nid(fields.u64()?), fields.u64()?);
        let kind = MsgType::from_wire(kind).ok_or(ProtoError::Type {
            what: WHAT,
            found: kind.into(),
        })?;
        let short = ProtoError::Short {
            what: WHAT,
            len: bytes.len(),
            need: nob,
        };
        let too_small = ProtoError::Field {
            field: "length of the message",
            value: nob as u64,
            why: "at least 48",
        };
        let bytes = bytes.get(..nob).ok_or(short)?;
        let body = bytes.get(HEAD_LEN..).ok_or(too_small)?;
        let (body, trailing) = Body::read(kind, order, body)?;
        Ok(Self {
            order,
            credits,
            checksum,
            src,
            src_stamp,
            dst,
            dst_stamp,
            body,
            trailing,
        })
    }

    /// Returns a little-endian message without credits, checksum and stamps.
    pub const fn new(src: Nid, dst: Nid, body: Body<'a>) -> Self {
        Self {
            order: ByteOrder::Little,
            credits: 0,
            checksum: 0,
            src,
            src_stamp: 0,
            dst,
            dst_stamp: 0,
            body,
            trailing: &[],
        }
    }

    /// Bytes to send, with the checksum that [`Message::checksum`] says.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new(self.order);
        out.u32(MAGIC);
        out.u16(VERSION_2);
        out.u8(self.body.kind() as u8);
        out.u8(self.credits);
        let mut body = Writer::new(self.order);
        self.body.write(&mut body);
        body.bytes(self.trailing);
        out.u32(u32::try_from(HEAD_LEN + body.out.len()).unwrap_or(u32::MAX));
        out.u32(self.checksum);
        out.u64(self.src.0);
        out.u64(self.src_stamp);
        out.u64(self.dst.0);
        out.u64(self.dst_stamp);
        out.bytes(&body.out);
        out.out
    }

    /// Sets the checksum, as a kernel with such `char`s makes it.
    pub fn seal(&mut self, signed: bool) {
        self.checksum = checksum(&self.to_bytes(), signed);
    }

    /// Checks the checksum, if the message has one.
    ///
    /// # Errors
    /// It is wrong.
    pub(crate) fn check_checksum(&self) -> Result<(), ProtoError> {
        match self.judge_checksum() {
            Checksum::Wrong => Err(ProtoError::Field {
                field: "checksum",
                value: self.checksum.into(),
                why: "not that of the message",
            }),
            _ => Ok(()),
        }
    }

    /// Judges the checksum.
    pub fn judge_checksum(&self) -> Checksum {
        match self.checksum {
            0 => Checksum::None,
            found => {
                let payload = matches!(self.body, Body::Immediate { .. }).then_some(HEAD_LEN + LnetHdr::LEN);
                judge(found, &self.to_bytes(), payload)
            }
        }
    }
}
