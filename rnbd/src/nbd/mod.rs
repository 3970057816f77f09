//! An NBD server on a unix socket, for any [`BlockDevice`](crate::block::BlockDevice): fixed newstyle negotiation,
//! simple replies, several connections and many requests in flight on each
//! (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>).
//!
//! Write payload goes from the socket straight into the device's buffers, read payload from them straight into the
//! socket.

mod connection;
mod handshake;
mod input;
mod outbox;
pub mod proto;
mod request;
mod server;
mod socket;

pub use server::{NbdConfig, NbdExport, NbdServer, StopHandle};

/// Serves one client on a socket that is connected already, until it leaves. For the fuzz target `nbd`.
///
/// # Errors
/// Why the connection was ended: the client broke the protocol, or the socket failed.
#[doc(hidden)]
pub fn serve_stream<D: crate::block::BlockDevice>(
    stream: &std::os::unix::net::UnixStream,
    exports: &[NbdExport<D>],
) -> std::io::Result<()> {
    connection::serve(stream, exports)
}
