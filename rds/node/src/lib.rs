//! The process that owns RDS addresses.
//!
//! Kernels know a connection by its addresses, so one process has to have all connections of an address. It listens at `rds.sock`, gives
//! programs sockets ([`rds_local`] is how they talk), opens an address at the first bind to it, and ends some seconds after the last
//! program. One loop does everything: it never waits for a program, a peer or a disk.
//!
//! - [`start`] runs it in a thread of its own, [`run`] in this one until it ends;
//! - [`Config`] has the limits of a process and of all;
//! - a [`StateFile`] for each address keeps the sequence numbers of its connections, so that messages come neither twice nor in another
//!   order when the process was killed.
#![forbid(unsafe_code)]

mod address;
mod config;
mod control;
mod errno;
mod event;
mod info;
mod memory;
mod opening;
mod operation;
mod program;
mod quota;
mod regions;
mod run;
mod server;
mod service;
mod state;
mod stats;

pub use config::{Config, Limits};
pub use event::NodeEvent;
pub use rds::{Broken, ConnectionInfo, PairKey, Refused};
pub use run::{NodeControl, Running, run, start};
pub use state::{StateError, StateFile};
pub use stats::NodeStats;
