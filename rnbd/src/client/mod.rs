//! The client: devices of a server over an RTRS session.

#[expect(clippy::module_inception, reason = "the machine itself, beside its parts")]
mod client;
mod closed;
pub mod device;
pub mod error;
mod flight;
mod hold;
mod losses;
pub mod memory;
mod messages;
mod operation;
pub mod output;
pub mod patience;
mod session;
pub mod state;
mod status;
mod transport;
mod work;

pub use client::{Client, Unmap};
pub use flight::Request;
pub use losses::{Opener, Parts};
pub use patience::OnLoss;
pub use transport::Transport;
