//! RDS (Reliable Datagram Sockets) over RDMA, wire-compatible with Linux's `rds_rdma`.
//!
//! It knows the messages, the connections to peers, and sockets with their congestion. It knows nothing of the operating system: [`Node`]
//! is a state machine over a [`Provider`](roce_verbs::provider::Provider), which a loop or the simulator drives. Time, the provider and
//! random bytes come with each call.
//!
//! - [`proto`]: headers, extension headers, congestion maps, private data of connections;
//! - [`Node`]: all sockets and connections of some addresses.
#![forbid(unsafe_code)]

mod addr;
mod config;
mod conn;
mod counters;
mod error;
mod key;
mod node;
pub mod proto;
mod rdma;
mod socket;

pub use addr::{check_peer, is_unicast};
pub use config::{Config, Rings};
pub use conn::{Broken, Refused};
pub use counters::Counters;
pub use error::Error;
pub use key::PairKey;
pub use node::{ConnectionInfo, MessageInfo, Node, Output, PairState};
pub use rdma::{Attachment, Operation, OperationFlags, OperationKind, RdmaNotice, RdmaStatus, RegionRights};
pub use socket::{Message, Readiness, Received, SocketId};
