//! The client: sessions, their paths, and requests.

mod answer;
pub mod buffers;
pub mod config;
mod conn;
mod env;
mod handshake;
mod idle;
mod inflight;
mod keepalive;
mod machine;
mod memory;
mod path;
mod paths;
pub mod permits;
pub mod policy;
mod post;
pub mod request;
mod session;
mod stage;
pub mod state;
pub mod status;
mod terms;

pub use buffers::{Buffer, Buffers, LentId, LentPiece, MAX_PIECES};
pub use config::{ConType, SessionConfig, SessionInfo};
pub use machine::Client;
pub use policy::Policy;
pub use request::{Output, SessionId, Submission};
pub use status::{CpuMigration, PathCommand, PathCounters, PathId, PathNews, PathStats, PathStatus};
