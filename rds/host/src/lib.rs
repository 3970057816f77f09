//! RDS (Reliable Datagram Sockets) for Rust programs, without the kernel's module.
//!
//! An [`RdsNode`] owns an address of this host for RDS: it has the connections to all peers, in a thread of its own. Its [`Socket`]s send
//! messages of up to 1 MiB to sockets of other nodes, of kernels too. Messages of one socket to another come once and in order.
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! use rds_host::{NodeOptions, RdsNode};
//!
//! let node = RdsNode::open(NodeOptions::new("192.0.2.1".parse().unwrap()))?;
//! let socket = node.socket()?;
//! socket.bind("192.0.2.1:4000".parse().unwrap())?;
//! socket.send_to(b"question", "192.0.2.7:4000".parse().unwrap())?;
//! let answer = socket.recv()?;
//! println!("{} bytes from {}", answer.data.len(), answer.from);
//! # Ok(())
//! # }
//! ```
//!
//! The protocol is [`rds`], and its thread one of [`roce_host`].
#![forbid(unsafe_code)]

mod machine;
mod node;
mod rdma;
mod socket;
mod thread;

pub use node::{NodeOptions, RdsNode};
pub use rdma::{Buffer, Pending, Rdma, Region};
pub use rds::{Config, ConnectionInfo, Message, PairKey, RegionRights, proto::RdmaCookie};
pub use socket::Socket;
