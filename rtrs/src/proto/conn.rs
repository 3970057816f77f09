//! Connection messages: private data of the CM's REQ, REP and REJ. 56 bytes each.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32},
};

use super::{
    common::{MAGIC, MAX_CONNECTIONS, MsgFlags, ProtoError, Uuid, VERSION, VERSION_MAJOR, take},
    imm::ChunkLayout,
};

/// Client to server, with the CM's REQ (`struct rtrs_msg_conn_req`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnReq {
    /// Belongs to the RDMA_CM on InfiniBand addressing: 0.
    pub cma_version: u8,
    /// Likewise.
    pub ip_version: u8,
    magic: U16,
    version: U16,
    /// Number of this connection; 0 is the service connection.
    pub cid: U16,
    /// Connections of the path.
    pub cid_num: U16,
    /// Counts the path's connection attempts.
    pub recon_cnt: U16,
    /// The path.
    pub path_uuid: Uuid,
    /// The session.
    pub session_uuid: Uuid,
    first_conn: u8,
    reserved: [u8; 11],
}

impl ConnReq {
    /// Bytes.
    pub const LEN: usize = size_of::<Self>();

    /// A request of this version.
    pub fn new(cid: u16, cid_num: u16, recon_cnt: u16, path: Uuid, session: Uuid, first_conn: bool) -> Self {
        Self {
            cma_version: 0,
            ip_version: 0,
            magic: MAGIC.into(),
            version: VERSION.into(),
            cid: cid.into(),
            cid_num: cid_num.into(),
            recon_cnt: recon_cnt.into(),
            path_uuid: path,
            session_uuid: session,
            first_conn: u8::from(first_conn),
            reserved: [0; 11],
        }
    }

    /// Reads and checks a request; bytes behind it (padding of the CM) are not looked at.
    ///
    /// # Errors
    /// Too short, not RTRS, another major version, or impossible connection numbers.
    pub fn parse(bytes: &[u8]) -> Result<&Self, ProtoError> {
        let (msg, _) = take::<Self>("connection request", bytes)?;
        check_head(msg.magic, msg.version)?;
        let (cid, cid_num) = (msg.cid.get(), msg.cid_num.get());
        if cid_num > MAX_CONNECTIONS {
            return Err(ProtoError::field("number of connections", cid_num, "at most 4096"));
        }
        if cid >= cid_num {
            return Err(ProtoError::field(
                "connection number",
                cid,
                "not below the number of connections",
            ));
        }
        Ok(msg)
    }

    /// This is a path of a new session, which the server shall make. Otherwise the session must exist.
    pub fn first_conn(&self) -> bool {
        self.first_conn & 1 != 0
    }
}

/// Server to client, with the CM's REP, or with a REJ and an error number (`struct rtrs_msg_conn_rsp`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnRsp {
    magic: U16,
    version: U16,
    errno: U16,
    /// Chunks of the session.
    pub queue_depth: U16,
    /// Largest data of a request, bytes.
    pub max_io_size: U32,
    /// Room behind that for headers, bytes.
    pub max_hdr_size: U32,
    flags: U32,
    reserved: [u8; 36],
}

impl ConnRsp {
    /// Bytes.
    pub const LEN: usize = size_of::<Self>();

    /// Creates the private data of an accept.
    pub fn accept(queue_depth: u16, max_io_size: u32, max_hdr_size: u32, flags: MsgFlags) -> Self {
        Self {
            magic: MAGIC.into(),
            version: VERSION.into(),
            errno: 0.into(),
            queue_depth: queue_depth.into(),
            max_io_size: max_io_size.into(),
            max_hdr_size: max_hdr_size.into(),
            flags: flags.bits().into(),
            reserved: [0; 36],
        }
    }

    /// Creates the private data of a reject. `errno` is positive; the wire carries it negated (16 bits).
    pub fn reject(errno: i32) -> Self {
        let mut msg = Self::accept(0, 0, 0, MsgFlags::empty());
        msg.errno = (errno.wrapping_neg() as u16).into();
        msg
    }

    /// Reads a response and checks magic and version.
    ///
    /// # Errors
    /// Too short, not RTRS, or another major version.
    pub fn parse(bytes: &[u8]) -> Result<&Self, ProtoError> {
        let (msg, _) = take::<Self>("connection response", bytes)?;
        check_head(msg.magic, msg.version)?;
        Ok(msg)
    }

    /// 0, or a positive error number.
    pub fn errno(&self) -> i32 {
        i32::from(self.errno.get() as i16).abs()
    }

    /// Flags; unknown bits are kept.
    pub fn flags(&self) -> MsgFlags {
        MsgFlags::from_bits_retain(self.flags.get())
    }

    /// The session's chunks, with the sizes checked.
    ///
    /// # Errors
    /// When the sizes can't be.
    pub fn layout(&self) -> Result<ChunkLayout, ProtoError> {
        let (io, hdr) = (self.max_io_size.get(), self.max_hdr_size.get());
        if io == 0 || hdr == 0 {
            return Err(ProtoError::field("max_io_size or max_hdr_size", 0u32, "at least 1"));
        }
        let size = io
            .checked_add(hdr)
            .ok_or(ProtoError::field("max_io_size", io, "chunk above 4 GiB"))?;
        ChunkLayout::new(self.queue_depth.get().into(), size)
    }
}

fn check_head(magic: U16, version: U16) -> Result<(), ProtoError> {
    if magic.get() != MAGIC {
        return Err(ProtoError::Magic(magic.get()));
    }
    if version.get() >> 8 != VERSION_MAJOR.into() {
        return Err(ProtoError::Version(version.get()));
    }
    Ok(())
}

const _: () = assert!(ConnReq::LEN == 56 && ConnRsp::LEN == 56);
