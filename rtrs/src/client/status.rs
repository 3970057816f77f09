//! What a session's user learns of its paths, and asks of them.

use core::time::Duration;

use roce_verbs::provider::DeviceIx;

use super::state::PathState;
use crate::{Error, PathError, addr::PathAddr, proto::Uuid, stats::RdmaStats};

/// A path of a session. No other of the session has had the number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PathId(pub(super) u32);

impl PathId {
    /// The path that a session was opened with, counted from 0.
    pub const fn of_opening(index: u16) -> Self {
        Self(index as u32)
    }

    /// Its number, for reports.
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// What can be asked for a path while its session is open.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PathCommand {
    /// Connect it, as a new one. If that fails it goes again.
    Add,
    /// Take it down, and off the list; the last one too.
    Remove,
    /// Take it down, until it is asked for.
    Disconnect,
    /// Connect it anew, at once. If that fails, further attempts follow by themselves.
    Reconnect,
}

/// What happens to a path.
#[derive(Debug)]
pub enum PathNews {
    /// It carries requests; `again` if it has done so before.
    Up {
        /// See above.
        again: bool,
    },
    /// It does so no longer, and why.
    Down(PathError),
    /// It is taken down for good, or until it is asked for: there are no attempts left, its device is gone, or somebody wanted it.
    Closed(PathError),
    /// It has taken over requests of a path that is down, so many.
    TookOver(u32),
    /// An attempt to connect it failed.
    AttemptFailed(Error),
    /// A command has ended.
    Done(PathCommand, Result<(), Error>),
}

/// Counters of a path at a share (`rtrs_clt_stats`, `rtrs-clt-stats.c`). A request counts when it is sent, again if it is sent again.
///
/// All are 0 after a reset, but not at the beginning (`rtrs_clt_reset_all_stats`). What is in flight is none of them, and stays.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PathStats {
    /// What went by it.
    pub rdma: RdmaStats,
    /// Requests that came from a path that was lost.
    pub failovers: u64,
    /// Times that it came back: -1 until it is up for the first time. After a reset it counts from 0 each time that it comes up
    /// (`successful_cnt`). The first share counts.
    pub reconnects: i32,
    /// Attempts that failed, but for a path's first one (`fail_cnt`). The first share counts.
    pub failed_reconnects: u32,
}

impl PathStats {
    /// Of a path that has not been up (`rtrs_clt_init_stats`).
    pub(super) fn of_new_path() -> Self {
        Self {
            reconnects: -1,
            ..Self::default()
        }
    }

    /// Together with another share's.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let mut rdma = self.rdma;
        rdma.add(&other.rdma);
        Self {
            rdma,
            failovers: self.failovers + other.failovers,
            reconnects: self.reconnects.max(other.reconnects),
            failed_reconnects: self.failed_reconnects.max(other.failed_reconnects),
        }
    }
}

/// A path as it is at the moment.
#[derive(Clone, Debug)]
pub struct PathStatus {
    /// Its number.
    pub id: PathId,
    /// Where it leads.
    pub addr: PathAddr,
    /// The server knows it by this.
    pub uuid: Uuid,
    /// Its state.
    pub state: PathState,
    /// The device that it leads through, while it is up or being connected.
    pub device: Option<DeviceIx>,
    /// Round trip of the last heartbeat; `None`: not measured since it is up.
    pub latency: Option<Duration>,
    /// Requests in flight at this share.
    pub in_flight: u32,
    /// Counters of this share.
    pub stats: PathStats,
}
