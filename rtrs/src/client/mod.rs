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
pub mod letter;
mod machine;
mod path;
pub mod permits;
mod post;
pub mod request;
mod session;
mod share;
pub mod state;
mod terms;

pub use buffers::{Buffer, Buffers};
pub use config::{ConType, SessionConfig, SessionInfo};
pub use letter::Letter;
pub use machine::Client;
pub use request::{Output, SessionId, Submission};
