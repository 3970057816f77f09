//! The server: accepts sessions, keeps their chunks, and hands requests to its user.

mod accept;
mod awaited;
mod chunks;
mod config;
mod conn;
mod counters;
mod domains;
mod effects;
mod life;
pub mod listing;
mod log;
mod path;
mod phase;
mod post;
mod probe;
pub mod request;
#[allow(clippy::module_inception, reason = "the server itself")]
mod server;
mod session;
mod signs;
mod silence;
pub mod state;

pub use config::ServerConfig;
pub use counters::ServerCounters;
pub use server::Server;
