//! The server: accepts sessions, keeps their chunks, and hands requests to its user.

mod branches;
mod cells;
mod chunks;
mod config;
mod conn;
mod counters;
mod desk;
mod domains;
mod effects;
mod half_open;
mod home;
pub mod letter;
pub mod listing;
mod log;
mod others;
mod path;
mod path_id;
mod post;
pub mod request;
#[allow(clippy::module_inception, reason = "the server itself")]
mod server;
mod session;
mod share;
mod silence;
pub mod state;

pub use config::ServerConfig;
pub use counters::ServerCounters;
pub use server::Server;
pub use share::Share;
