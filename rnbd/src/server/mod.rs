//! The server: offers exports to RNBD clients over RTRS.

pub mod action;
mod device;
pub mod disk;
pub mod fair_queue;
mod limits;
pub mod listing;
mod request;
#[expect(clippy::module_inception, reason = "the machine itself, beside its parts")]
mod server;
mod session;
pub mod sync;
pub mod transport;

pub use limits::{Limits, ServerCounters};
pub use server::Server;
