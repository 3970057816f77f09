//! RDMA devices of the host as a backend of a [`Fabric`](roce_local::Fabric), over libibverbs and librdmacm: [`HwDevice`].
//!
//! For hosts with RDMA hardware, rdma_rxe, or `ferroce run`'s library in their place. Without the feature `hardware` the crate is empty,
//! and needs neither library.
//!
//! It knows the two libraries, the devices, and how its objects work. It must not know numbers of objects, which belong to the fabric,
//! or software devices. One loop drives it, without a thread or a lock, and nothing waits.
//!
//! Differences of hardware from the software device:
//! - Keys are memory windows, which are bound and closed by work requests. A type 1 window's next key is the library's choice.
//! - A queue pair is created before its connection's route is known and is not librdmacm's: the backend moves it through its states
//!   with the attributes that the connection manager has for it (`rdma_init_qp_attr`, `rdma_establish`).
//! - The connection manager is the kernel's. It knows one reason for a rejection, [`CONSUMER`], and its own times.
//! - A send that makes no completion holds its place in the queue until a later one that does has completed.
//!
//! [`CONSUMER`]: roce_verbs::provider::RejectReason::CONSUMER
#![cfg_attr(
    not(feature = "hardware"),
    allow(
        rustdoc::broken_intra_doc_links,
        reason = "what the links lead to is not there either"
    )
)]

#[cfg(feature = "hardware")]
mod advice;
#[cfg(feature = "hardware")]
mod backend;
#[cfg(feature = "hardware")]
mod caps;
#[cfg(feature = "hardware")]
mod cm;
#[cfg(feature = "hardware")]
mod device;
#[cfg(feature = "hardware")]
mod events;
#[cfg(feature = "hardware")]
mod hotplug;
#[cfg(feature = "hardware")]
mod keys;
#[cfg(feature = "hardware")]
mod post;
#[cfg(feature = "hardware")]
mod qp;
#[cfg(feature = "hardware")]
mod sys;

#[cfg(feature = "hardware")]
pub use device::{HwConfig, HwDevice, open};
