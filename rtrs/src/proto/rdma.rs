//! Requests, written into a chunk behind the user's header, and the key that comes back with a response.
//!
//! A chunk holds, from its start: the data (`data_len` bytes; for a read only reserved), the user's header (`usr_len`
//! bytes), and the message. The immediate value says where the message starts, so `data_len = offset - usr_len`.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32},
};

use super::{
    common::{Direction, MsgFlags, MsgType, ProtoError, SgDesc, take},
    info::check_type,
};

/// A write request: its data and user header lie before it (`struct rtrs_msg_rdma_write`), 4 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RdmaWrite {
    kind: U16,
    /// Bytes of the user's header.
    pub usr_len: U16,
}

impl RdmaWrite {
    /// Bytes.
    pub const LEN: usize = size_of::<Self>();

    /// A request with a user header of this length.
    pub fn new(usr_len: u16) -> Self {
        Self {
            kind: (MsgType::Write as u16).into(),
            usr_len: usr_len.into(),
        }
    }
}

/// Head of a read request (`struct rtrs_msg_rdma_read`), 8 bytes; the descriptors follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RdmaRead {
    kind: U16,
    /// Bytes of the user's header.
    pub usr_len: U16,
    flags: U16,
    /// Descriptors that follow.
    pub sg_cnt: U16,
}

impl RdmaRead {
    /// Bytes without descriptors.
    pub const LEN: usize = size_of::<Self>();
    /// Bytes with one descriptor.
    pub const LEN_ONE: usize = Self::LEN + size_of::<SgDesc>();

    /// A request. `flags`: only [`MsgFlags::NEED_INVAL`] is meant here.
    pub fn new(usr_len: u16, flags: MsgFlags, sg_cnt: u16) -> Self {
        Self {
            kind: (MsgType::Read as u16).into(),
            usr_len: usr_len.into(),
            flags: (flags.bits() as u16).into(),
            sg_cnt: sg_cnt.into(),
        }
    }

    /// Flags; unknown bits are kept.
    pub fn flags(&self) -> MsgFlags {
        MsgFlags::from_bits_retain(self.flags.get().into())
    }
}

/// A request as the server sees it, checked against the chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Whether data and header are there, or data is wanted.
    pub direction: Direction,
    /// Bytes of the user's header.
    pub usr_len: u16,
    /// Bytes of data at the start of the chunk; for a read only reserved.
    pub data_len: u32,
    /// Destination of a read at the client; `None` when only a status is wanted.
    pub dest: Option<SgDesc>,
    /// The client wants the destination's key revoked.
    pub need_inval: bool,
}

impl Request {
    /// Bytes at the message's offset that [`Request::parse`] can make use of.
    pub const MAX_LEN: usize = RdmaRead::LEN_ONE;

    /// Reads a request out of `msg`, a *copy* of what lies at `offset` of a chunk, up to the chunk's end and at most
    /// [`Request::MAX_LEN`] bytes. A read must name at most one piece, as the kernel's server demands.
    ///
    /// # Errors
    /// When the message is cut off, unknown, or its lengths don't fit `offset`.
    pub fn parse(msg: &[u8], offset: u32, max_hdr_size: u32) -> Result<Self, ProtoError> {
        let (kind, _) = take::<U16>("request", msg)?;
        if kind.get() == MsgType::Write as u16 {
            let (m, _) = take::<RdmaWrite>("write request", msg)?;
            let (usr_len, data_len) = split(m.usr_len, offset, max_hdr_size)?;
            return Ok(Self {
                direction: Direction::Write,
                usr_len,
                data_len,
                dest: None,
                need_inval: false,
            });
        }
        if kind.get() != MsgType::Read as u16 {
            return Err(ProtoError::Type {
                what: "request",
                got: kind.get(),
            });
        }
        let (m, rest) = take::<RdmaRead>("read request", msg)?;
        let (usr_len, data_len) = split(m.usr_len, offset, max_hdr_size)?;
        let dest = match m.sg_cnt.get() {
            0 => None,
            1 => Some(*take::<SgDesc>("descriptor of a read request", rest)?.0),
            n => return Err(ProtoError::field("descriptors of a read request", n, "at most 1")),
        };
        Ok(Self {
            direction: Direction::Read,
            usr_len,
            data_len,
            need_inval: dest.is_some() && m.flags().contains(MsgFlags::NEED_INVAL),
            dest,
        })
    }
}

fn split(usr_len: U16, offset: u32, max_hdr_size: u32) -> Result<(u16, u32), ProtoError> {
    let usr_len = usr_len.get();
    if u32::from(usr_len) > max_hdr_size {
        return Err(ProtoError::field(
            "user header",
            usr_len,
            "longer than the room for headers",
        ));
    }
    let data_len = offset.checked_sub(usr_len.into());
    let data_len = data_len.ok_or(ProtoError::field(
        "user header",
        usr_len,
        "longer than what lies before the message",
    ))?;
    Ok((usr_len, data_len))
}

/// Server to client: the new key of the chunk whose request is answered (`struct rtrs_msg_rkey_rsp`), 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RkeyRsp {
    kind: U16,
    /// The chunk.
    pub buf_id: U16,
    /// Its key from now on.
    pub rkey: U32,
}

impl RkeyRsp {
    /// Bytes.
    pub const LEN: usize = size_of::<Self>();

    /// A new key for a chunk.
    pub fn new(buf_id: u16, rkey: u32) -> Self {
        Self {
            kind: (MsgType::RkeyRsp as u16).into(),
            buf_id: buf_id.into(),
            rkey: rkey.into(),
        }
    }

    /// Reads the message and checks its type.
    ///
    /// # Errors
    /// Too short or another type.
    pub fn parse(bytes: &[u8]) -> Result<&Self, ProtoError> {
        let (msg, _) = take::<Self>("key response", bytes)?;
        check_type("key response", msg.kind, MsgType::RkeyRsp)?;
        Ok(msg)
    }
}

const _: () = assert!(RdmaWrite::LEN == 4 && RdmaRead::LEN == 8 && RkeyRsp::LEN == 8);
