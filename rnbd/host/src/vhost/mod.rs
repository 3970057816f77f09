//! The back end of a vhost-user-blk device: a front end, QEMU for example, has a virtual machine, and hands us its memory and its rings.
//!
//! The guest's memory is registered with the session, so that the server's RDMA goes to the guest's own buffers. All of the guest's is
//! untrusted: what its descriptors say is checked whenever it is read, and read once.

mod chain;
mod front;
pub mod fuzz;
mod inflight;
mod mapped;
mod memory;
mod messages;
mod requests;
mod ring;
mod wire;

pub(crate) use front::{Front, Surroundings, Watched};
pub(crate) use memory::Lender;
pub(crate) use requests::FrontRequest;

/// Maximum number of rings of a front end.
pub(crate) const MAX_QUEUES: u16 = 64;
/// Maximum number of descriptors of a ring.
pub(crate) const MAX_RING: u16 = 1024;
