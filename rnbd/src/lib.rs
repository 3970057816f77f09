//! RNBD 2.0 (network block device over RTRS), wire-compatible with the Linux kernel's `rnbd-client` and `rnbd-server`, as
//! state machines without I/O.
//!
//! - [`proto`]: the messages.
//! - [`block`]: what a block device is like, and what is done with it.
//! - [`server`]: [`server::Server`], which offers disks to clients; whose disks, and how, is its loop's business.
//! - [`client`]: [`client::Client`], whose sessions map devices of servers.
//! - [`nbd`]: [`nbd::Connection`], a client of an NBD server for any block device.
//! - [`virtio_blk`]: the virtio block device that a virtual machine sees.
//!
//! Server and client run on one loop with the machines of [`rtrs`]. The client owns RTRS's ([`client::Client::rtrs`]), and its user's
//! operations come back by [`client::Client::poll_output`]. What RTRS reports to the server goes to [`server::Server::rtrs`]. The crate
//! `rnbd-host` has both loops.

pub mod block;
pub mod client;
mod errno;
pub mod nbd;
pub mod proto;
pub mod server;
mod slab;
pub mod virtio_blk;

pub use errno::Errno;
