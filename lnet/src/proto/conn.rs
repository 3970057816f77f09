//! Connection parameters and rejects: private data of the connection manager's REQ, REP and REJ.

use core::fmt;

use super::{
    consts::{MAGIC, VERSION_2},
    error::ProtoError,
    order::{ByteOrder, Reader, Writer},
};

/// Parameters of a connection (`struct kib_connparams`), 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ConnParams {
    /// Messages that may be in flight in one direction.
    pub queue_depth: u16,
    /// Fragments of a descriptor at most.
    pub max_frags: u16,
    /// Bytes of a message at most.
    pub max_msg_size: u32,
}

impl ConnParams {
    pub(crate) fn read(fields: &mut Reader<'_>) -> Result<Self, ProtoError> {
        Ok(Self {
            queue_depth: fields.u16()?,
            max_frags: fields.u16()?,
            max_msg_size: fields.u32()?,
        })
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.u16(self.queue_depth);
        out.u16(self.max_frags);
        out.u32(self.max_msg_size);
    }
}

/// Reason of a reject.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Why(pub u8);

impl Why {
    /// Both sides connect at once, and this side's attempt wins.
    pub const CONN_RACE: Self = Self(1);
    /// No memory or queue pair.
    pub const NO_RESOURCES: Self = Self(2);
    /// A request that can't be accepted; retries are useless.
    pub const FATAL: Self = Self(3);
    /// Incompatible version; never on the wire.
    pub const CONN_UNCOMPAT: Self = Self(4);
    /// The request names a former incarnation.
    pub const CONN_STALE: Self = Self(5);
    /// Too many fragments; the reject has the limit.
    pub const RDMA_FRAGS: Self = Self(6);
    /// Too deep a queue; the reject has the limit.
    pub const MSG_QUEUE_SIZE: Self = Self(7);
    /// No such service; never on the wire.
    pub const INVALID_SRV_ID: Self = Self(8);
    /// The network interface is not ready yet.
    pub const EARLY: Self = Self(9);

    /// Reasons that have names: 1 to this.
    pub const KNOWN: usize = 9;

    /// Name in the kernel (`IBLND_REJECT_…`), if it has one.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::CONN_RACE => "CONN_RACE",
            Self::NO_RESOURCES => "NO_RESOURCES",
            Self::FATAL => "FATAL",
            Self::CONN_UNCOMPAT => "CONN_UNCOMPAT",
            Self::CONN_STALE => "CONN_STALE",
            Self::RDMA_FRAGS => "RDMA_FRAGS",
            Self::MSG_QUEUE_SIZE => "MSG_QUEUE_SIZE",
            Self::INVALID_SRV_ID => "INVALID_SRV_ID",
            Self::EARLY => "EARLY",
            _ => return None,
        })
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match *self {
            Self::CONN_RACE => "both sides connect at once",
            Self::NO_RESOURCES => "no resources",
            Self::FATAL => "request not acceptable",
            Self::CONN_UNCOMPAT => "incompatible version",
            Self::CONN_STALE => "wrong incarnation",
            Self::RDMA_FRAGS => "too many fragments",
            Self::MSG_QUEUE_SIZE => "queue too deep",
            Self::INVALID_SRV_ID => "no such service",
            Self::EARLY => "network interface not ready",
            Self(number) => return write!(f, "reason {number}"),
        };
        write!(f, "{words} ({})", self.name().unwrap_or_default())
    }
}

/// Private data of a REJ with reason 28 (`struct kib_rej`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Reject {
    /// Byte order of the sender.
    pub order: ByteOrder,
    /// Version of the sender.
    pub version: u16,
    /// Reason.
    pub why: Why,
    /// Padding, as it came.
    pub padding: u8,
    /// Incarnation of the sender; 0 if it knows no such network interface.
    pub incarnation: u64,
    /// Parameters that the sender accepts.
    pub params: ConnParams,
}

impl Reject {
    /// Bytes.
    pub const LEN: usize = 24;
    /// Bytes that count at least. Version 1 has no more.
    const LEN_MIN: usize = 8;

    /// Returns a reject of this side.
    pub const fn new(why: Why, incarnation: u64, params: ConnParams) -> Self {
        Self {
            order: ByteOrder::Little,
            version: VERSION_2,
            why,
            padding: 0,
            incarnation,
            params,
        }
    }

    /// Reads a reject of any version. As in the kernel, bytes that are missing behind the reason count as zeros.
    ///
    /// # Errors
    /// Too short for a reason, or no magic.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtoError> {
        const WHAT: &str = "o2iblnd reject";
        let (Some(magic), true) = (bytes.first_chunk::<4>(), bytes.len() >= Self::LEN_MIN) else {
            return Err(ProtoError::Short {
                what: WHAT,
                len: bytes.len(),
                need: Self::LEN_MIN,
            });
        };
        let order = ByteOrder::of(MAGIC, *magic).ok_or(ProtoError::Magic {
            what: WHAT,
            found: u32::from_le_bytes(*magic),
        })?;
        let mut all = [0; Self::LEN];
        let there = bytes.len().min(Self::LEN);
        all[..there].copy_from_slice(&bytes[..there]);
        let mut fields = Reader::new(WHAT, order, &all[4..]);
        Ok(Self {
            order,
            version: fields.u16()?,
            why: Why(fields.u8()?),
            padding: fields.u8()?,
            incarnation: fields.u64()?,
            params: ConnParams::read(&mut fields)?,
        })
    }

    /// Bytes to send.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new(self.order);
        out.u32(MAGIC);
        out.u16(self.version);
        out.u8(self.why.0);
        out.u8(self.padding);
        out.u64(self.incarnation);
        self.params.write(&mut out);
        out.out
    }
}
