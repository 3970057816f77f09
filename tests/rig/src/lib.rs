//! RTRS for tests: a host whose loop runs on a thread, sessions and servers on it, and calls that wait for their end.
//!
//! Programs drive the machines by a loop of their own; a test wants to write one step after the other. Besides, [`block`] devices
//! and [`certificates`].

pub mod block;
pub mod certificates;
mod host;
mod server;
mod session;

pub use host::Host;
pub use server::{Request, Server, ServerOps, SessionHandle};
pub use session::{IoBuffer, Outcome, Session};
