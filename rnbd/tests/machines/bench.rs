//! Bench that the machines run on.

use std::collections::{BTreeMap, VecDeque};

use rnbd::{
    block::Geometry,
    client::{Request, Transport, memory::SessionBuffers},
};
use roce_verbs::Instant;
use rtrs::{
    Cx,
    client::{
        buffers::Buffers,
        config::SessionInfo,
        request::{self, SessionId},
    },
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

/// A request, with RNBD's part.
pub(crate) type Submission = request::Submission<Request<u64>>;
/// An output of RTRS's client.
pub(crate) type RtrsOutput = request::Output<Request<u64>>;

/// RTRS's client of a test, which takes requests and reports what the test says.
#[derive(Default)]
pub(crate) struct Script {
    /// The buffers of sessions.
    pub(crate) pools: BTreeMap<SessionId, Buffers>,
    /// Requests that the test has not looked at.
    pub(crate) sent: VecDeque<(SessionId, Submission)>,
    /// Outputs that RNBD has not taken.
    pub(crate) told: VecDeque<RtrsOutput>,
}

impl SessionBuffers for Script {
    fn buffers(&mut self, session: SessionId) -> Option<&mut Buffers> {
        self.pools.get_mut(&session)
    }
}

impl Transport<u64> for Script {
    fn submit(&mut self, _: &mut Cx<'_>, session: SessionId, request: Submission) {
        self.sent.push_back((session, request));
    }

    fn poll_output(&mut self) -> Option<RtrsOutput> {
        self.told.pop_front()
    }
}

pub(crate) fn session_info() -> SessionInfo {
    SessionInfo {
        max_io_size: MAX_IO,
        queue_depth: 64,
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
