//! The server: accepts sessions, keeps their chunks, and hands requests to its user.

mod accept;
mod chunks;
mod config;
mod conn;
mod counters;
mod domains;
mod effects;
mod half_open;
mod keepalive;
mod life;
pub mod listing;
mod liveness;
mod path;
mod post;
pub mod request;
#[allow(clippy::module_inception, reason = "the server itself")]
mod server;
mod session;
pub mod state;

pub use config::ServerConfig;
pub use counters::ServerCounters;
pub use server::Server;
