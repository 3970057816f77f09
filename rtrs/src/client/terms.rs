//! Terms of a server's accept.

use crate::{
    Error,
    client::config::SessionInfo,
    proto::{ChunkLayout, ConnRsp, MsgFlags, ProtoError, RdmaRead},
};

/// The server's answer to a connection request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Terms {
    pub(super) layout: ChunkLayout,
    pub(super) max_io_size: u32,
    pub(super) max_hdr_size: u32,
    pub(super) flags: MsgFlags,
}

impl Terms {
    pub(super) fn parse(private_data: &[u8]) -> Result<Self, Error> {
        let protocol = |source| Error::Protocol {
            what: "connection response",
            source,
        };
        let rsp = ConnRsp::parse(private_data).map_err(protocol)?;
        if rsp.errno() != 0 {
            return Err(protocol(ProtoError::field(
                "errno",
                rsp.errno() as u64,
                "0 in an accept",
            )));
        }
        Ok(Self {
            layout: rsp.layout().map_err(protocol)?,
            max_io_size: rsp.max_io_size.get(),
            max_hdr_size: rsp.max_hdr_size.get(),
            flags: rsp.flags(),
        })
    }

    /// Whether paths with these and those may be up together: requests go from one to another.
    pub(super) fn agree_with(&self, other: &Self) -> bool {
        let sizes = |t: &Self| {
            (
                t.layout.queue_depth(),
                t.layout.chunk_size(),
                t.max_io_size,
                t.max_hdr_size,
            )
        };
        sizes(self) == sizes(other)
    }

    /// Each answer brings a new key for its chunk.
    pub(super) fn new_rkeys(&self) -> bool {
        self.flags.contains(MsgFlags::NEW_RKEY)
    }

    /// Abilities of a session over such a path, if its user's headers are at most so long.
    pub(super) fn info(&self, max_user_header: u16) -> SessionInfo {
        let room = self.max_hdr_size.saturating_sub(RdmaRead::LEN_ONE as u32);
        SessionInfo {
            max_io_size: self.max_io_size,
            queue_depth: self.layout.queue_depth(),
            max_segments: 1,
            max_user_header: u32::from(max_user_header).min(room),
            new_rkeys: self.new_rkeys(),
        }
    }
}
