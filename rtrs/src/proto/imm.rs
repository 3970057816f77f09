//! Immediate values: 4 bits of type, 28 bits of payload (`rtrs_to_imm`).

use super::{
    common::{MAX_QUEUE_DEPTH, ProtoError},
    errno,
};

/// Bits of payload.
pub const PAYLOAD_BITS: u32 = 28;
/// Mask of the payload.
pub const PAYLOAD_MASK: u32 = (1 << PAYLOAD_BITS) - 1;
/// Bits of a response's message number.
const MSG_ID_BITS: u32 = 19;
const MSG_ID_MASK: u32 = (1 << MSG_ID_BITS) - 1;
const ERRNO_MASK: u32 = 0x1ff;

const IO_REQ: u32 = 0;
const IO_RSP: u32 = 1;
const IO_RSP_W_INV: u32 = 2;
const HB_MSG: u32 = 8;
const HB_ACK: u32 = 9;

/// The payload of a response: 9 bits of error number above 19 bits of message number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct IoReply {
    /// The request (chunk) that is answered.
    pub msg_id: u32,
    /// 0, or a positive error number up to 511.
    pub errno: u16,
    /// The key that the request named has been revoked.
    pub invalidated: bool,
}

impl IoReply {
    /// A reply for a status as programs give it: the sign does not matter, and what does not fit in 9 bits becomes EIO.
    pub fn new(msg_id: u32, status: i32, invalidated: bool) -> Self {
        let errno = u16::try_from(status.unsigned_abs())
            .ok()
            .filter(|e| u32::from(*e) <= ERRNO_MASK);
        Self {
            msg_id: msg_id & MSG_ID_MASK,
            errno: errno.unwrap_or(errno::EIO as u16),
            invalidated,
        }
    }
}

/// An immediate value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Imm {
    /// Client to server: a request lies in a chunk; payload as in [`ChunkLayout`].
    IoReq(u32),
    /// Server to client: a request is done.
    IoRsp(IoReply),
    /// Are you there?
    HbMsg,
    /// I am.
    HbAck,
}

impl Imm {
    /// The 32 bits (a number; big-endian on the wire like all immediate data).
    pub fn encode(self) -> u32 {
        let (kind, payload) = match self {
            Self::IoReq(payload) => (IO_REQ, payload),
            Self::IoRsp(r) => (
                if r.invalidated { IO_RSP_W_INV } else { IO_RSP },
                (u32::from(r.errno) & ERRNO_MASK) << MSG_ID_BITS | r.msg_id & MSG_ID_MASK,
            ),
            Self::HbMsg => (HB_MSG, 0),
            Self::HbAck => (HB_ACK, 0),
        };
        kind << PAYLOAD_BITS | payload & PAYLOAD_MASK
    }

    /// Reads the 32 bits. The payload of heartbeats is not looked at, as in the kernel.
    ///
    /// # Errors
    /// When the type is unknown.
    pub fn decode(imm: u32) -> Result<Self, ProtoError> {
        let payload = imm & PAYLOAD_MASK;
        match imm >> PAYLOAD_BITS {
            IO_REQ => Ok(Self::IoReq(payload)),
            kind @ (IO_RSP | IO_RSP_W_INV) => Ok(Self::IoRsp(IoReply {
                msg_id: payload & MSG_ID_MASK,
                errno: (payload >> MSG_ID_BITS) as u16,
                invalidated: kind == IO_RSP_W_INV,
            })),
            HB_MSG => Ok(Self::HbMsg),
            HB_ACK => Ok(Self::HbAck),
            kind => Err(ProtoError::field("immediate type", kind, "unknown")),
        }
    }
}

/// Bits that number `n` things (`ilog2(n - 1) + 1` in the kernel).
fn bits_for(n: u32) -> u32 {
    u32::BITS - n.saturating_sub(1).leading_zeros()
}

/// How the payload of [`Imm::IoReq`] splits into chunk number and offset: as many high bits as number all chunks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ChunkLayout {
    queue_depth: u32,
    chunk_size: u32,
    mem_bits: u32,
}

impl ChunkLayout {
    /// For `queue_depth` chunks of `chunk_size` bytes.
    ///
    /// # Errors
    /// When either is zero or too large, or the two don't fit in 28 bits together.
    pub fn new(queue_depth: u32, chunk_size: u32) -> Result<Self, ProtoError> {
        if queue_depth == 0 || queue_depth > MAX_QUEUE_DEPTH {
            return Err(ProtoError::field("queue depth", queue_depth, "1 to 65535"));
        }
        let chunk_bits = bits_for(queue_depth);
        if chunk_size == 0 || chunk_bits + bits_for(chunk_size) > PAYLOAD_BITS {
            return Err(ProtoError::field(
                "chunk size",
                chunk_size,
                "chunk number and offset share 28 bits",
            ));
        }
        Ok(Self {
            queue_depth,
            chunk_size,
            mem_bits: PAYLOAD_BITS - chunk_bits,
        })
    }

    /// Chunks.
    pub fn queue_depth(&self) -> u32 {
        self.queue_depth
    }

    /// Bytes of a chunk.
    pub fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    /// Payload for a message at `offset` of chunk `msg_id`.
    pub fn pack(&self, msg_id: u32, offset: u32) -> u32 {
        (msg_id << self.mem_bits) + offset
    }

    /// Chunk and offset of a payload.
    ///
    /// # Errors
    /// When either is out of bounds.
    pub fn unpack(&self, payload: u32) -> Result<(u32, u32), ProtoError> {
        // With one chunk mem_bits is 28 and the payload is all offset.
        let payload = payload & PAYLOAD_MASK;
        let (msg_id, offset) = (payload >> self.mem_bits, payload & ((1 << self.mem_bits) - 1));
        if msg_id >= self.queue_depth {
            return Err(ProtoError::field("message number", msg_id, "not below the queue depth"));
        }
        if offset >= self.chunk_size {
            return Err(ProtoError::field("message offset", offset, "outside the chunk"));
        }
        Ok((msg_id, offset))
    }
}
