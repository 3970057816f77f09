//! NBD: fixed newstyle negotiation, TLS, simple and structured replies, extended headers, several connections and many requests in
//! flight on each
//! (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>).

mod connection;
mod copy;
mod framing;
mod handshake;
mod meta;
mod parse;
mod payload;
mod pending;
pub mod proto;
mod reply;
mod state;
mod tls;
mod transmission;

pub use connection::{Connection, Want};
pub use copy::BufferCopy;
pub use handshake::{Export, Exports, transmission_flags};
pub use pending::{NbdRequest, PendingKey};
pub use reply::Piece;
pub use state::{End, PHASES, Phase, PhaseAction, PhaseEvent, Stall};
pub use tls::TlsMode;
