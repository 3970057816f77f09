//! RNBD 2.0 (network block device over RTRS), wire-compatible with the Linux kernel's `rnbd-client` and `rnbd-server`:
//! server back ends and client front ends.
//!
//! - [`proto`]: the messages.
//! - [`backend`]: image files and block devices, exports, I/O threads.
//! - [`block`]: the [`block::BlockDevice`] trait between devices and front ends.
//! - [`server`]: exports served to clients.
//! - [`client`]: devices of a server as block devices.
//! - [`nbd`]: an NBD server on a unix socket for any block device.

pub mod backend;
pub mod block;
pub mod client;
mod errno;
pub mod nbd;
pub mod proto;
pub mod server;

pub use errno::Errno;
