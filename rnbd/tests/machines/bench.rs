//! Bench that the machines run on.

use std::collections::BTreeMap;

use rnbd::{block::Geometry, client::memory::SessionBuffers};
use roce_verbs::Instant;
use rtrs::{
    client::{buffers::Buffers, config::SessionInfo, request::SessionId},
    cx::Cx,
};

use crate::provider::Scripted;

pub(crate) const MIB: u64 = 1 << 20;
/// Data of a request at most.
pub(crate) const MAX_IO: u32 = 124 << 10;

/// Runs `f` with a context that has no device: buffers need none before a path leads through one.
pub(crate) fn with_cx<T>(f: impl FnOnce(&mut Cx<'_>) -> T) -> T {
    with_cx_at(Instant::ZERO, f)
}

/// The same, at this time.
pub(crate) fn with_cx_at<T>(now: Instant, f: impl FnOnce(&mut Cx<'_>) -> T) -> T {
    f(&mut Cx {
        now,
        provider: &mut Scripted::new(&[]),
        random: &mut |bytes: &mut [u8]| bytes.fill(0),
    })
}

/// The buffers of sessions.
#[derive(Default)]
pub(crate) struct Pools(pub(crate) BTreeMap<SessionId, Buffers>);

impl SessionBuffers for Pools {
    fn buffers(&mut self, session: SessionId) -> Option<&mut Buffers> {
        self.0.get_mut(&session)
    }
}

pub(crate) fn session_info() -> SessionInfo {
    SessionInfo {
        max_io_size: MAX_IO,
        queue_depth: 64,
        session_depth: 64,
        max_segments: 1,
        max_user_header: 320,
        new_rkeys: true,
    }
}

pub(crate) fn geometry(size: u64) -> Geometry {
    Geometry {
        size,
        logical_block_size: 512,
        physical_block_size: 4096,
        max_transfer: 1 << 20,
        max_discard: 1 << 30,
        discard_granularity: 4096,
        read_only: false,
        write_cache: true,
        fua: true,
        max_write_zeroes: 1 << 30,
        queue_depth: 64,
    }
}
