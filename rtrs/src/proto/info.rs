//! Session information, exchanged with SENDs over the service connection once all connections stand.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U16};

use super::{
    common::{MsgType, NAME_MAX, ProtoError, SgDesc, take},
    imm::ChunkLayout,
};

/// Client to server: the session's name (`struct rtrs_msg_info_req`), 272 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct InfoReq {
    kind: U16,
    pathname: [u8; NAME_MAX],
    reserved: [u8; 15],
}

/// Checks a session name by the kernel's rules: no slash, no dot, 1 to 254 bytes. Of our own: no control characters, which
/// would act on the terminals and in the logs of those who read it.
///
/// # Errors
/// Names the rule.
pub fn check_name(name: &str) -> Result<(), ProtoError> {
    match name {
        "" => Err(ProtoError::Name("empty")),
        n if n.len() >= NAME_MAX => Err(ProtoError::Name("longer than 254 bytes")),
        n if n.contains(['/', '.']) => Err(ProtoError::Name("must not contain '/' or '.'")),
        n if n.contains('\0') => Err(ProtoError::Name("contains a zero byte")),
        n if n.contains(char::is_control) => Err(ProtoError::Name("contains a control character")),
        _ => Ok(()),
    }
}

impl InfoReq {
    /// Bytes.
    pub const LEN: usize = size_of::<Self>();

    /// A request for this session name.
    ///
    /// # Errors
    /// See [`check_name`].
    pub fn new(name: &str) -> Result<Self, ProtoError> {
        check_name(name)?;
        let mut pathname = [0; NAME_MAX];
        pathname[..name.len()].copy_from_slice(name.as_bytes());
        Ok(Self {
            kind: (MsgType::InfoReq as u16).into(),
            pathname,
            reserved: [0; 15],
        })
    }

    /// Reads a request and checks its type.
    ///
    /// # Errors
    /// Too short or another type.
    pub fn parse(bytes: &[u8]) -> Result<&Self, ProtoError> {
        let (msg, _) = take::<Self>("information request", bytes)?;
        check_type("information request", msg.kind, MsgType::InfoReq)?;
        Ok(msg)
    }

    /// The session's name.
    ///
    /// # Errors
    /// See [`check_name`]; also when it has no end or is not UTF-8.
    pub fn name(&self) -> Result<&str, ProtoError> {
        let end = self
            .pathname
            .iter()
            .position(|b| *b == 0)
            .ok_or(ProtoError::Name("has no end"))?;
        let name = core::str::from_utf8(&self.pathname[..end]).map_err(|_| ProtoError::Name("is not UTF-8"))?;
        check_name(name)?;
        Ok(name)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct InfoRspHead {
    kind: U16,
    sg_cnt: U16,
    reserved: [u8; 4],
}

/// Server to client: where the chunks are (`struct rtrs_msg_info_rsp`), 8 bytes and 16 per piece.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InfoRsp {
    head: InfoRspHead,
    desc: Vec<SgDesc>,
}

/// A chunk of the server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ChunkAddr {
    /// Address of its first byte.
    pub addr: u64,
    /// Key.
    pub rkey: u32,
}

impl InfoRsp {
    /// Bytes of a response with `n` pieces.
    pub const fn len_for(n: usize) -> usize {
        size_of::<InfoRspHead>() + n * size_of::<SgDesc>()
    }

    /// A response with these pieces, at most 65535.
    pub fn new(desc: Vec<SgDesc>) -> Self {
        let head = InfoRspHead {
            kind: (MsgType::InfoRsp as u16).into(),
            sg_cnt: u16::try_from(desc.len()).unwrap_or(u16::MAX).into(),
            reserved: [0; 4],
        };
        Self { head, desc }
    }

    /// Reads a response and checks type and length.
    ///
    /// # Errors
    /// Too short or another type.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtoError> {
        let (head, rest) = take::<InfoRspHead>("information response", bytes)?;
        check_type("information response", head.kind, MsgType::InfoRsp)?;
        let n = usize::from(head.sg_cnt.get());
        let (desc, _) = <[SgDesc]>::ref_from_prefix_with_elems(rest, n).map_err(|_| ProtoError::Short {
            what: "information response",
            len: bytes.len(),
            need: Self::len_for(n),
        })?;
        Ok(Self {
            head: *head,
            desc: desc.to_vec(),
        })
    }

    /// The bytes to send.
    pub fn to_bytes(&self) -> Vec<u8> {
        [self.head.as_bytes(), self.desc.as_bytes()].concat()
    }

    /// The pieces.
    pub fn descriptors(&self) -> &[SgDesc] {
        &self.desc
    }

    /// Cuts the pieces into the session's chunks.
    ///
    /// # Errors
    /// When they are not exactly as many whole chunks as the queue depth says.
    pub fn chunks(&self, layout: &ChunkLayout) -> Result<Vec<ChunkAddr>, ProtoError> {
        let (depth, size) = (layout.queue_depth(), layout.chunk_size());
        let n = self.head.sg_cnt.get();
        if n == 0 || !depth.is_multiple_of(n.into()) {
            return Err(ProtoError::field("number of pieces", n, "must divide the queue depth"));
        }
        let mut chunks = Vec::with_capacity(depth as usize);
        for d in &self.desc {
            let len = d.len.get();
            if len == 0 || !len.is_multiple_of(size) {
                return Err(ProtoError::field("length of a piece", len, "must be whole chunks"));
            }
            let count = len / size;
            if count as usize > depth as usize - chunks.len() || d.addr.get().checked_add(len.into()).is_none() {
                return Err(ProtoError::field(
                    "length of a piece",
                    len,
                    "more chunks than the queue depth",
                ));
            }
            chunks.extend((0..count).map(|i| ChunkAddr {
                addr: d.addr.get() + u64::from(i) * u64::from(size),
                rkey: d.key.get(),
            }));
        }
        if chunks.len() != depth as usize {
            return Err(ProtoError::field(
                "number of chunks",
                chunks.len() as u64,
                "fewer than the queue depth",
            ));
        }
        Ok(chunks)
    }
}

pub(super) fn check_type(what: &'static str, got: U16, want: MsgType) -> Result<(), ProtoError> {
    if got.get() != want as u16 {
        return Err(ProtoError::Type { what, got: got.get() });
    }
    Ok(())
}

const _: () = assert!(InfoReq::LEN == 272 && InfoRsp::len_for(1) == 24);
