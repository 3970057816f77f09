//! RNBD 2.0 (network block device over RTRS), wire-compatible with the Linux kernel's `rnbd-client` and `rnbd-server`:
//! server back ends and client front ends.
//!
//! - [`proto`]: the messages.
//! - [`backend`]: image files and block devices, exports, I/O threads.
//! - [`block`]: the [`block::BlockDevice`] trait between devices and front ends.
//! - [`nbd`]: an NBD server on a unix socket for any block device.

pub mod backend;
pub mod block;
mod errno;
pub mod nbd;
pub mod proto;

pub use errno::Errno;
