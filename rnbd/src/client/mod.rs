//! The client: devices of a server over an RTRS session.

#[expect(clippy::module_inception, reason = "the machine itself, beside its parts")]
mod client;
pub mod device;
pub mod error;
mod loss_policy;
mod losses;
pub mod memory;
mod messages;
mod operation;
mod operations;
pub mod output;
mod recovery;
mod session;
pub mod state;
mod status;
mod transport;

pub use client::{Client, Unmap};
pub use loss_policy::OnLoss;
pub use losses::{Opener, Parts};
pub use operation::Request;
pub use transport::Transport;
