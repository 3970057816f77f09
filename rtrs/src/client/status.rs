//! Status of paths, and commands for them.

use core::time::Duration;
use std::sync::Arc;

use roce_verbs::provider::{DeviceIx, KeyStrategy};

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

/// Command for a path while its session is open.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PathCommand {
    /// Connect it, as a new one. If that fails it goes again.
    Add,
    /// Take it down, and off the list; the last one too.
    Remove,
    /// Take it down, until it is asked for.
    Disconnect,
    /// Connect it again, at once. If that fails, further attempts follow by themselves.
    Reconnect,
}

/// Event of a path, for its user.
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

/// Counters of a path (`rtrs_clt_stats`, `rtrs-clt-stats.c`). A request counts when it is sent, again if it is sent again.
///
/// All are 0 after a reset, but not at the beginning (`rtrs_clt_reset_all_stats`). What is in flight is none of them, and stays.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PathStats {
    /// Traffic of the path.
    pub rdma: RdmaStats,
    /// Requests that came from a path that was lost.
    pub failovers: u64,
    /// Times that it came back: -1 until it is up for the first time. After a reset it counts from 0 each time that it comes up
    /// (`successful_cnt`).
    pub reconnects: i32,
    /// Attempts that failed, but for a path's first one (`fail_cnt`).
    pub failed_reconnects: u32,
    /// Answers that came on another processor.
    pub cpu_migration: CpuMigration,
}

impl PathStats {
    /// Statistics of a path that has not been up (`rtrs_clt_init_stats`).
    pub(super) fn of_new_path() -> Self {
        Self {
            reconnects: -1,
            ..Self::default()
        }
    }

    pub(super) fn reset(&mut self, which: PathCounters) {
        let Self {
            rdma,
            failovers,
            reconnects,
            failed_reconnects,
            cpu_migration,
        } = self;
        if matches!(which, PathCounters::Rdma | PathCounters::All) {
            (*rdma, *failovers) = (RdmaStats::default(), 0);
        }
        if matches!(which, PathCounters::Reconnects | PathCounters::All) {
            (*reconnects, *failed_reconnects) = (0, 0);
        }
        if matches!(which, PathCounters::CpuMigration | PathCounters::All) {
            *cpu_migration = CpuMigration::default();
        }
    }
}

/// Counters of a path that are reset together, as by the kernel's files of these names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathCounters {
    /// Requests, their bytes, and failovers (`stats/rdma`).
    Rdma,
    /// Reconnects, and attempts that failed (`stats/reconnects`).
    Reconnects,
    /// Answers on another processor (`stats/cpu_migration_from`, `stats/cpu_migration_to`).
    CpuMigration,
    /// All (`stats/reset_all`).
    All,
}

/// Answers that the loop took on another processor than it had sent the request on (`rtrs_clt_update_wc_stats`).
///
/// The kernel compares with the processor that it has given the connection to. A connection here belongs to a loop, which takes
/// all of its answers; what moves is the loop, and that is not at all if its thread is bound to a processor.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct CpuMigration {
    /// By the processor that the request was sent on (`cpu_migration_from`). Those beyond the end have none.
    pub from: Vec<u64>,
    /// By the processor that the answer was taken on (`cpu_migration_to`). Those beyond the end have none.
    pub to: Vec<u64>,
}

impl CpuMigration {
    /// An answer was taken.
    pub(super) fn count(&mut self, sent: u16, taken: u16) {
        if sent != taken {
            *place(&mut self.from, sent.into()) += 1;
            *place(&mut self.to, taken.into()) += 1;
        }
    }
}

/// A processor's place, which is made if there is none.
fn place(counts: &mut Vec<u64>, cpu: usize) -> &mut u64 {
    if counts.len() <= cpu {
        counts.resize(cpu + 1, 0);
    }
    &mut counts[cpu]
}

/// A path as it is at the moment.
#[derive(Clone, Debug)]
pub struct PathStatus {
    /// Its number.
    pub id: PathId,
    /// Addresses of the path.
    pub addr: PathAddr,
    /// The server knows it by this.
    pub uuid: Uuid,
    /// Its state.
    pub state: PathState,
    /// The device that it leads through, while it is up or being connected.
    pub device: Option<DeviceIx>,
    /// Name of the device, if it is one of the system's RDMA devices.
    pub hca: Option<Arc<str>>,
    /// Strategy of the keys that open the buffers of reads to the server.
    pub keys: Option<KeyStrategy>,
    /// Round trip of the last heartbeat; `None`: not measured since it is up.
    pub latency: Option<Duration>,
    /// Requests in flight.
    pub in_flight: u32,
    /// Counters of the path.
    pub stats: PathStats,
}
