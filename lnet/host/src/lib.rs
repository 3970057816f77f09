//! LNet over RDMA (o2iblnd) for Rust programs, without the kernel's modules.
//!
//! An [`LnetNode`] is a NID of this host: it has the connections to all peers, in a thread of its own, and answers pings and discovery
//! whatever the program does. It pings other nodes, of kernels too, moves data by PUT and GET, and lets peers use memory by match bits.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use lnet_host::{LnetNode, NodeOptions};
//!
//! let node = LnetNode::open(NodeOptions::new("192.0.2.1@o2ib".parse()?))?;
//! let reply = node.ping("192.0.2.7@o2ib".parse()?)?.wait()?;
//! for interface in reply.interfaces {
//!     println!("{}", interface.nid);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The protocol is [`lnet`], and its thread one of [`roce_host`].
#![forbid(unsafe_code)]

mod counts;
mod entry;
mod error;
mod machine;
mod node;
mod pending;
mod queue;
mod selftest;

pub use counts::EntryCounts;
pub use entry::{Attached, EntryEvent};
pub use error::Error;
pub use lnet::{
    Buffer, Config, ConnectionInfo, Counters, CreditInfo, Entry, EntryId, EntryOptions, Failure, Get, Negotiated,
    Output, Put, Refusal, Rejected, Rejects, Served, TieBreak,
    proto::{Features, NiStatus, Nid, STATUS_DOWN, STATUS_UP, Why},
    selftest::{
        NodeCounters, RunCounts, RunError, RunEvent, RunPlan, TargetConfig,
        proto::{Body as SelfTestBody, Parameters, Pattern, RpcCounters},
    },
};
pub use node::{LnetNode, NodeOptions, NodeStats};
pub use pending::{Pending, PendingPing, PingReply};
pub use selftest::SelfTest;
