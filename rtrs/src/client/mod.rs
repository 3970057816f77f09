//! The client: sessions, their paths, and requests.

mod buffer;
mod handshake;
mod path;
mod permit;
mod post;
mod session;

pub use buffer::IoBuffer;
pub use permit::Permit;
pub use session::{ConType, OpenArgs, Outcome, Session, SessionInfo};
