//! NBD: fixed newstyle negotiation, TLS, simple and structured replies, extended headers, several connections and many requests in
//! flight on each
//! (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>).

mod connection;
mod handshake;
mod memory;
mod meta;
mod parse;
mod payload;
pub mod proto;
mod reply;
mod request;
mod state;
mod tls;
mod transmission;

pub use connection::{Connection, Want};
pub use handshake::{Export, Exports, transmission_flags};
pub use memory::Memory;
pub use reply::Piece;
pub use request::{Backend, RequestPart};
pub use state::{End, PHASES, Phase, PhaseAction, PhaseEvent, Stall};
pub use tls::TlsMode;
