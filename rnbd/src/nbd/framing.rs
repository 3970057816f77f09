//! Heads of replies: what goes before a read's data, or is the whole reply.

use smallvec::SmallVec;

use crate::{
    block::Extent,
    nbd::proto::{self, Framing, chunk, cmd, state},
};

/// Bytes before the data of a reply. The longest is that of extents in an extended chunk.
pub(crate) type Head = SmallVec<[u8; 40]>;

/// Answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// It is done.
    Done,
    /// It has failed: an error of the protocol, not 0.
    Failed(u32),
    /// So many bytes follow, from the request's offset on.
    Data { len: u64 },
    /// So many extents of the context that was chosen follow, from the request's offset on.
    Status { extents: usize },
}

/// The client's number for the context `base:allocation`.
pub(crate) const ALLOCATION_ID: u32 = 1;

/// The request that is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Asked {
    pub(crate) framing: Framing,
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
}

/// The head of the reply to a request. A reply is one chunk: so `NBD_CMD_FLAG_DF` is always obeyed.
pub(crate) fn head(asked: Asked, answer: Answer) -> Head {
    let Asked {
        framing,
        cookie,
        offset,
        ..
    } = asked;
    let in_chunks = match framing {
        Framing::Simple => false,
        Framing::Structured => matches!(asked.command, cmd::READ | cmd::BLOCK_STATUS),
        Framing::Extended => true,
    };
    if !in_chunks {
        let error = if let Answer::Failed(error) = answer { error } else { 0 };
        return simple(cookie, error);
    }
    let extended = framing == Framing::Extended;
    let mut body = Head::new();
    let (kind, behind) = match answer {
        Answer::Done => (chunk::NONE, 0),
        Answer::Failed(error) => {
            body.extend_from_slice(&error.to_be_bytes());
            // No text.
            body.extend_from_slice(&[0; 2]);
            (chunk::ERROR, 0)
        }
        Answer::Data { len } => {
            body.extend_from_slice(&offset.to_be_bytes());
            (chunk::OFFSET_DATA, len)
        }
        Answer::Status { extents } => {
            body.extend_from_slice(&ALLOCATION_ID.to_be_bytes());
            let kind = if extended {
                body.extend_from_slice(&(extents as u32).to_be_bytes());
                chunk::BLOCK_STATUS_EXT
            } else {
                chunk::BLOCK_STATUS
            };
            (kind, (extents * extent_len(framing)) as u64)
        }
    };
    let len = body.len() as u64 + behind;
    let mut head = Head::new();
    let magic = if extended {
        proto::EXTENDED_REPLY_MAGIC
    } else {
        proto::STRUCTURED_REPLY_MAGIC
    };
    head.extend_from_slice(&magic.to_be_bytes());
    head.extend_from_slice(&proto::CHUNK_DONE.to_be_bytes());
    head.extend_from_slice(&kind.to_be_bytes());
    head.extend_from_slice(&cookie.to_be_bytes());
    if extended {
        head.extend_from_slice(&offset.to_be_bytes());
        head.extend_from_slice(&len.to_be_bytes());
    } else {
        head.extend_from_slice(&(len as u32).to_be_bytes());
    }
    head.extend_from_slice(&body);
    head
}

fn simple(cookie: u64, error: u32) -> Head {
    let mut head = Head::new();
    head.extend_from_slice(&proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
    head.extend_from_slice(&error.to_be_bytes());
    head.extend_from_slice(&cookie.to_be_bytes());
    head
}

/// Bytes of an extent.
const fn extent_len(framing: Framing) -> usize {
    match framing {
        Framing::Simple | Framing::Structured => 8,
        Framing::Extended => 16,
    }
}

/// The extents of a reply. A compact request is never longer than a compact extent can be.
pub(crate) fn extents(framing: Framing, extents: &[Extent]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(extents.len() * extent_len(framing));
    for extent in extents {
        let flags = [(extent.hole, state::HOLE), (extent.zero, state::ZERO)];
        let set = flags.iter().filter(|(is_set, _)| *is_set);
        let flags = set.fold(0, |all, (_, flag)| all | flag);
        if framing == Framing::Extended {
            bytes.extend_from_slice(&extent.len.to_be_bytes());
            bytes.extend_from_slice(&u64::from(flags).to_be_bytes());
        } else {
            bytes.extend_from_slice(&u32::try_from(extent.len).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(&flags.to_be_bytes());
        }
    }
    bytes
}
