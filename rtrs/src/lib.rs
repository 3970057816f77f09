//! RTRS 2.0 (RDMA transport), client and server, generic over a verbs [`Provider`](roce_verbs::provider::Provider).
//!
//! Wire-compatible with Linux's `rtrs-client` and `rtrs-server` modules (`drivers/infiniband/ulp/rtrs`). A *session*
//! belongs to one client and one set of memory chunks on the server; it consists of *paths*, each with its own
//! connections (queue pairs): number 0 carries user messages and heartbeats, the others carry I/O.
//!
//! - [`proto`]: every message and the immediate values;
//! - [`addr`]: path addresses as the kernel writes them;
//! - [`admission`]: who gets into a server, without I/O;
//! - [`client`]: [`client::Session`], registered I/O buffers, permits, requests;
//! - [`server`]: [`server::Server`] and the [`server::ServerOps`] that its user implements.
#![forbid(unsafe_code)]

pub mod addr;
pub mod admission;
pub mod client;
mod conn;
mod error;
pub mod heartbeat;
mod poller;
pub mod proto;
pub mod server;
pub mod throttle;

pub use error::{Error, IoError, PathError};
pub use proto::errno;

/// Which way the data of a request goes, seen from the client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From the server's chunk into the client's buffer.
    Read,
    /// From the client's buffer into the server's chunk.
    Write,
}
