//! Messages between programs that use RDS sockets and the node that owns their address.
//!
//! A node process listens at `rds.sock` in the broker's directory. A program has:
//!
//! - a **control connection** to it (`AF_UNIX`, `SOCK_SEQPACKET`; one [`Request`], one [`Answer`] at a time; as many connections as a
//!   program wants, as one that waits is busy);
//! - for each RDS socket one end of a `SOCK_SEQPACKET` pair, which is the program's descriptor. A packet to the node is a [`SendHeader`],
//!   an [`Op`] and data; one from the node is a [`RecvHeader`] and data. Full buffers, polling, time-outs and closing are the kernel's;
//! - for each RDS socket a [`Page`] of shared memory with what `sendmsg` has to know before it queues.
//!
//! Descriptors of RDS sockets are known by the [name](SocketKey::of_peer) of the node's end, also after `exec` or when another process has
//! passed them on; then [`Request::Attach`] gives the page.
//!
//! All integers have the host's byte order. The node trusts no byte of a program, and a program not those of another user:
//! [`connect`] checks who serves the socket.

mod addr;
mod client;
mod control;
mod data;
mod error;
pub mod info;
mod key;
mod limits;
mod op;
mod page;
mod record;
mod start;

pub use addr::RawAddr;
pub use client::{Control, Received, Socket};
pub use control::{Answer, Request, SocketOption};
pub use data::{RecvHeader, RecvKind, SendHeader};
pub use error::ProtocolError;
pub use key::SocketKey;
pub use limits::{MAGIC, MAX_MESSAGE, SOCKET};
pub use op::{AtomicKind, AtomicOp, MAX_LOCAL, Op, RdmaOp};
pub use page::{Page, SocketFlags};
pub use record::{MAX_FDS, Record, connect, memory_file, read_memory_file, receive, send, unread};
pub use start::{NODE, connect_or_start, directory};
