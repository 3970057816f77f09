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

/// Rings of a front end at most.
pub(crate) const MAX_QUEUES: u16 = 64;
