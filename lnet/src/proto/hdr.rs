//! Header of LNet: 72 bytes, always little-endian.

use core::fmt;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use super::{
    error::ProtoError,
    nid::Nid,
    order::{ByteOrder, Reader, Writer},
};

/// Bytes of data of a message at most (`LNET_MAX_PAYLOAD`).
pub const MAX_PAYLOAD: u32 = 1 << 20;
/// Process ID of kernels (`LNET_PID_LUSTRE`). Those of user space have bit 31.
pub const PID_LUSTRE: u32 = 12345;

const ACK: u32 = 0;
const PUT: u32 = 1;
const GET: u32 = 2;
const REPLY: u32 = 3;
const HELLO: u32 = 4;
/// Bytes of the fields of an operation.
const OPERATION_LEN: usize = 40;

/// Name of a peer's memory descriptor, which an answer repeats (`struct lnet_handle_wire`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle {
    /// Number of the interface's start.
    pub interface: u64,
    /// Number of the object.
    pub object: u64,
}

impl Handle {
    /// Handle of a PUT that wants no acknowledgement.
    pub const NONE: Self = Self {
        interface: u64::MAX,
        object: u64::MAX,
    };
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NONE => f.write_str("none"),
            Self { interface, object } => write!(f, "{interface:x}.{object:x}"),
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({self})")
    }
}

/// Operation of a header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Acknowledgement of a PUT.
    Ack {
        /// Handle of the PUT.
        dst_md: Handle,
        /// Match bits of the PUT.
        match_bits: u64,
        /// Bytes that were accepted.
        mlength: u32,
    },
    /// Data for a portal.
    Put {
        /// Handle for the acknowledgement, or [`Handle::NONE`].
        ack_md: Handle,
        /// Match bits.
        match_bits: u64,
        /// Data for the receiving program.
        hdr_data: u64,
        /// Portal.
        portal: u32,
        /// Offset in the receiver's memory.
        offset: u32,
    },
    /// Request for the data of a portal.
    Get {
        /// Handle for the reply.
        return_md: Handle,
        /// Match bits.
        match_bits: u64,
        /// Portal.
        portal: u32,
        /// Offset in the receiver's memory.
        src_offset: u32,
        /// Bytes that the sender has room for.
        sink_length: u32,
    },
    /// Data that a GET asked for.
    Reply {
        /// Handle of the GET.
        dst_md: Handle,
    },
    /// Greeting of TCP connections; never sent by o2iblnd.
    Hello {
        /// Incarnation of the sender.
        incarnation: u64,
        /// Type of the connection.
        kind: u32,
    },
}

impl Operation {
    /// Name in the specification of Portals.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Ack { .. } => "ACK",
            Self::Put { .. } => "PUT",
            Self::Get { .. } => "GET",
            Self::Reply { .. } => "REPLY",
            Self::Hello { .. } => "HELLO",
        }
    }

    const fn number(&self) -> u32 {
        match self {
            Self::Ack { .. } => ACK,
            Self::Put { .. } => PUT,
            Self::Get { .. } => GET,
            Self::Reply { .. } => REPLY,
            Self::Hello { .. } => HELLO,
        }
    }

    fn read(number: u32, fields: &[u8; OPERATION_LEN]) -> Result<Self, ProtoError> {
        let mut at = Reader::new("LNet header", ByteOrder::Little, fields);
        let handle = |at: &mut Reader<'_>| -> Result<Handle, ProtoError> {
            let (interface, object) = (at.u64()?, at.u64()?);
            Ok(Handle { interface, object })
        };
        Ok(match number {
            ACK => Self::Ack {
                dst_md: handle(&mut at)?,
                match_bits: at.u64()?,
                mlength: at.u32()?,
            },
            PUT => Self::Put {
                ack_md: handle(&mut at)?,
                match_bits: at.u64()?,
                hdr_data: at.u64()?,
                portal: at.u32()?,
                offset: at.u32()?,
            },
            GET => Self::Get {
                return_md: handle(&mut at)?,
                match_bits: at.u64()?,
                portal: at.u32()?,
                src_offset: at.u32()?,
                sink_length: at.u32()?,
            },
            REPLY => Self::Reply {
                dst_md: handle(&mut at)?,
            },
            HELLO => Self::Hello {
                incarnation: at.u64()?,
                kind: at.u32()?,
            },
            found => {
                return Err(ProtoError::Type {
                    what: "LNet header",
                    found,
                });
            }
        })
    }

    fn write(&self) -> [u8; OPERATION_LEN] {
        let mut out = Writer::new(ByteOrder::Little);
        let handle = |out: &mut Writer, h: Handle| {
            out.u64(h.interface);
            out.u64(h.object);
        };
        match *self {
            Self::Ack {
                dst_md,
                match_bits,
                mlength,
            } => {
                handle(&mut out, dst_md);
                out.u64(match_bits);
                out.u32(mlength);
            }
            Self::Put {
                ack_md,
                match_bits,
                hdr_data,
                portal,
                offset,
            } => {
                handle(&mut out, ack_md);
                out.u64(match_bits);
                out.u64(hdr_data);
                out.u32(portal);
                out.u32(offset);
            }
            Self::Get {
                return_md,
                match_bits,
                portal,
                src_offset,
                sink_length,
            } => {
                handle(&mut out, return_md);
                out.u64(match_bits);
                out.u32(portal);
                out.u32(src_offset);
                out.u32(sink_length);
            }
            Self::Reply { dst_md } => handle(&mut out, dst_md),
            Self::Hello { incarnation, kind } => {
                out.u64(incarnation);
                out.u32(kind);
            }
        }
        let mut fields = [0; OPERATION_LEN];
        fields[..out.out.len()].copy_from_slice(&out.out);
        fields
    }
}

/// Header (`struct lnet_hdr_nid4`), 72 bytes. Bytes that the operation does not use are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LnetHdr {
    dst: U64,
    src: U64,
    /// Process ID of the receiver.
    pub dst_pid: U32,
    /// Process ID of the sender.
    pub src_pid: U32,
    kind: U32,
    /// Bytes of data.
    pub payload_length: U32,
    fields: [u8; OPERATION_LEN],
}

impl LnetHdr {
    /// Bytes.
    pub const LEN: usize = size_of::<Self>();

    /// Returns a header between kernels: both have [`PID_LUSTRE`].
    pub fn new(dst: Nid, src: Nid, payload_length: u32, operation: &Operation) -> Self {
        Self {
            dst: dst.0.into(),
            src: src.0.into(),
            dst_pid: PID_LUSTRE.into(),
            src_pid: PID_LUSTRE.into(),
            kind: operation.number().into(),
            payload_length: payload_length.into(),
            fields: operation.write(),
        }
    }

    /// Final receiver, which differs from the message's if a router is between.
    pub fn dst(&self) -> Nid {
        Nid(self.dst.get())
    }

    /// First sender.
    pub fn src(&self) -> Nid {
        Nid(self.src.get())
    }

    /// Operation.
    ///
    /// # Errors
    /// An unknown type.
    pub fn operation(&self) -> Result<Operation, ProtoError> {
        Operation::read(self.kind.get(), &self.fields)
    }

    /// Checks as a receiver does (`lnet_parse`), and returns the operation.
    ///
    /// # Errors
    /// An unknown type, one that o2iblnd does not carry, data with an ACK or GET, or more than [`MAX_PAYLOAD`].
    pub fn check(&self) -> Result<Operation, ProtoError> {
        let operation = self.operation()?;
        let payload = self.payload_length.get();
        let (most, why) = match operation {
            Operation::Ack { .. } | Operation::Get { .. } => (0, "an ACK or GET has no data"),
            Operation::Put { .. } | Operation::Reply { .. } => (MAX_PAYLOAD, "at most 1 MiB"),
            Operation::Hello { .. } => {
                return Err(ProtoError::Type {
                    what: "LNet header over o2iblnd",
                    found: HELLO,
                });
            }
        };
        match payload > most {
            false => Ok(operation),
            true => Err(ProtoError::Field {
                field: "payload length",
                value: payload.into(),
                why,
            }),
        }
    }
}

const _: () = assert!(LnetHdr::LEN == 72);
