//! RTRS 2.0 (RDMA transport), client and server, as state machines without I/O over a verbs
//! [`Provider`](roce_verbs::provider::Provider).
//!
//! [`client::Client`] and [`server::Server`] have no thread, clock, lock or socket. Whoever drives them, in turns of one loop,
//!
//! - gives each call the time, the provider and random bytes ([`Cx`]);
//! - hands them completions and events of the provider, the user's requests or answers, and calls `timeout` when `next_timeout` says
//!   so;
//! - takes what they tell from `poll_output` until there is nothing more;
//! - calls `end_batch` at the end of the turn: it posts what the turn has brought, many work requests with one call.
//!
//! Buffers of a client and requests of a server are values to be given back or answered: nothing does that when they are dropped.
//!
//! Wire-compatible with Linux's `rtrs-client` and `rtrs-server` modules (`drivers/infiniband/ulp/rtrs`). A *session*
//! belongs to one client and one set of memory chunks on the server; it consists of *paths*, each with its own
//! connections (queue pairs): number 0 carries user messages and heartbeats, the others carry I/O.
//!
//! - [`proto`]: every message and the immediate values;
//! - [`addr`]: path addresses as the kernel writes them;
//! - [`admission`]: admission control of a server;
//! - [`client`]: [`client::Client`], its sessions, registered I/O buffers, permits, requests;
//! - [`server`]: [`server::Server`], its sessions, their chunks, requests.
#![forbid(unsafe_code)]

pub mod addr;
pub mod admission;
pub mod client;
mod error;
pub mod heartbeat;
pub mod mark;
pub mod proto;
#[cfg(test)]
#[path = "../tests/support/provider.rs"]
mod provider;
pub mod sendq;
pub mod server;
pub mod stats;
pub mod table;
pub mod throttle;

use core::time::Duration;

pub use error::{Error, IoError, PathError};
pub use proto::{Direction, errno};
pub use roce_verbs::provider::Cx;

/// How long a packet may be under way (`CMA_IBOE_PACKET_LIFETIME`, `cma.c`: 4.096 us * 2^16). What a lost path has sent last may come,
/// and be done, so much later than its queue pairs stopped.
pub const PACKET_LIFETIME: Duration = Duration::from_nanos(4096 << 16);
