//! The client: devices of a server over an RTRS session.

#[expect(clippy::module_inception, reason = "the machine itself, beside its parts")]
mod client;
pub mod device;
pub mod error;
mod flight;
pub mod letter;
pub mod memory;
mod operation;
pub mod output;
mod session;
pub mod state;
mod work;

pub use client::Client;
pub use letter::Letter;
