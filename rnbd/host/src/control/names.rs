//! Names of states, as the kernel and JSON have them.

use rnbd::client::state::DeviceState;
use rtrs::{
    client::{PathCounters, state::PathState},
    server::state::PathState as ServerPathState,
};

/// State of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskState {
    /// Not up yet.
    Starting,
    /// Up.
    Up,
    /// Waits for its restart.
    Failed,
    /// Being stopped.
    Stopping,
    /// Exited; its last device was unmapped.
    Exited,
}

/// A value that has a name.
pub trait Named: Copy + 'static {
    /// All values.
    const ALL: &'static [Self];
    /// Returns the name.
    fn name(self) -> &'static str;
}

macro_rules! named {
    ($type:ty { $($value:ident $name:literal,)* }) => {
        impl Named for $type {
            const ALL: &'static [Self] = &[$(Self::$value),*];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)*
                }
            }
        }
    };
}

named!(PathState {
    Connecting "connecting",
    ConnectingErr "connecting_err",
    Reconnecting "reconnecting",
    Connected "connected",
    Closing "closing",
    Closed "closed",
    Dead "dead",
});

named!(ServerPathState {
    Connecting "connecting",
    Connected "connected",
    Closing "closing",
    Closed "closed",
});

named!(DeviceState {
    Init "init",
    Mapped "open",
    MappedDisconnected "closed",
    Unmapped "unmapped",
});

named!(PathCounters {
    Rdma "rdma",
    Reconnects "reconnects",
    CpuMigration "cpu_migration",
    All "all",
});

named!(TaskState {
    Starting "starting",
    Up "up",
    Failed "failed",
    Stopping "stopping",
    Exited "exited",
});
