//! Many processes on one RoCE address.
//!
//! One UDP port per address is all that RoCE has, so processes that share an address share a reuseport group of sockets:
//! a classic BPF program looks at the destination queue pair number of each packet, and its top bits (the *slot*) choose
//! the socket. A small program, the **broker**, opens the group, hands one socket to each process, and keeps slot 0: it
//! receives the management datagrams of all (they go to QP1), and forwards each to the process that it concerns, by
//! service ID, communication ID or transaction ID. It also keeps the port numbers of RDMA_CM's port spaces, so that no
//! two processes bind one.
//!
//! * A process calls [`join`], which starts a broker if none runs, and gives a [`Membership`].
//! * The broker is [`server::run`]; it exits when no process needs it any more.
//! * If the broker dies, all connections go on. Each member holds a reference to the whole group (the
//!   vault, see `group.rs`), and one of them starts another broker, which gets the group back from there.
//! * A member keeps its counters in a [page](COUNTERS) that it shares with the broker, which reads them there, also after the member has
//!   ended.
//! * If a member dies, its numbers are quarantined for a minute; the broker disconnects its connections from their peers (DREQ), as
//!   a kernel does for a process that exits.
//!
//! The protocol between the two is in [`proto`]. The broker knows management datagrams and the numbers in use, and trusts no member:
//! it must not know what a connection is for, and no packet of a queue pair passes through it.

mod bpf;
mod client;
mod error;
mod group;
pub mod helper;
mod page;
pub mod proto;
pub mod server;
mod start;
mod sys;
mod track;
mod wire;

pub use client::{Inbox, Membership, join, running_broker, statistics};
pub use error::Error;
pub use page::{COUNTERS, MAX_ADDRS, Report, Snapshot};
pub use proto::{Ended, Isolation, Place, ProcessReport, Statistics, Translated};
#[doc(hidden)]
pub use server::fuzz;
pub use start::{JoinConfig, PRIVATE, make_home, prepare_dir, private_dir, runtime_dir};
pub use sys::peer_credentials;
