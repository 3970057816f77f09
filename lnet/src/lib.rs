//! LNet over RDMA, wire-compatible with Lustre's `ko2iblnd`.
//!
//! - [`proto`]: messages of o2iblnd, headers of LNet, ping information, private data of connections.
//! - [`Node`]: connections, portals, PUT, GET and ping over the devices of a [`Provider`](roce_verbs::provider::Provider). It is sans-IO:
//!   time and randomness are arguments.
//! - [`selftest`]: the tests of `lnet_selftest`, for both sides.
//!
//! LNet has no authentication: portals are open to every peer that can send from its address, and so are sinks to whoever knows a key.
#![forbid(unsafe_code)]

mod buffer;
mod config;
mod conn;
mod credits;
mod event;
mod handshake;
mod info;
mod node;
mod operation;
mod peer;
mod planted;
mod portal;
pub mod proto;
pub mod selftest;

pub use buffer::Buffer;
pub use config::{Config, TieBreak};
pub use credits::CreditError;
pub use event::{EntryId, Failure, JobId, Output, Served};
pub use handshake::{BadAnswer, Refusal, Rejected};
pub use info::{ConnectionInfo, Counters, CreditInfo, Negotiated, Rejects};
pub use node::Node;
pub use operation::{Get, Put};
#[cfg(feature = "planted")]
pub use planted::Planted;
pub use portal::{Entry, EntryOptions};
