//! The client: sessions, their paths, and requests.

mod answer;
pub mod buffers;
pub mod config;
mod conn;
mod env;
mod flight;
mod handshake;
mod headers;
mod lane;
mod machine;
mod path;
pub mod permits;
mod post;
pub mod request;
mod session;
pub mod state;
mod terms;

pub use buffers::{Buffer, Buffers};
pub use config::{ConType, SessionConfig, SessionInfo};
pub use machine::Client;
pub use request::{Output, SessionId, Submission};
