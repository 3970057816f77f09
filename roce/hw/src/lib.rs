//! RDMA devices of the host as a backend of a [`Fabric`](roce_port::fabric::Fabric), over libibverbs and librdmacm: [`open`].
//!
//! For hosts with RDMA hardware, rdma_rxe, or `ferroce run`'s library in their place. Without the feature `hardware` the crate is empty,
//! and needs neither library.
//!
//! It knows the two libraries, the devices, and their objects by the fabric's numbers, which it must not give itself. It must not know
//! software devices. One loop drives it, without a thread or a lock, and nothing waits.
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
#![cfg(feature = "hardware")]

mod advice;
mod backend;
mod caps;
mod cm;
mod device;
mod keys;
mod qp;
mod sys;

use roce_port::fabric::{DeviceName, Hardware};
use roce_verbs::provider::VerbsError;

/// Opens devices as a backend of a [`Fabric`](roce_port::fabric::Fabric); all that there are if none is named.
///
/// An iteration of the loop that owns the fabric:
///
/// ```no_run
/// # use roce_port::fabric::{Fabric, FabricConfig, Several};
/// # use roce_verbs::provider::{Provider, VerbsError};
/// # fn wait(_: Vec<std::os::fd::BorrowedFd<'_>>) {}
/// # fn route(_: std::net::IpAddr) -> std::io::Result<std::net::IpAddr> { Err(std::io::ErrorKind::Unsupported.into()) }
/// # fn main() -> Result<(), VerbsError> {
/// let mut fabric = Fabric::new(Several::new(Vec::new()), FabricConfig::default(), Vec::new());
/// fabric.set_hardware(roce_hw::open(&[])?, route);
/// let mut completions = Vec::new();
/// let mut spin = 0;
/// loop {
///     fabric.poll_hardware()?;
///     fabric.poll_completions(&mut completions, 1024)?;
///     let busy = !completions.is_empty();
///     for (_qp, _completion) in completions.drain(..) {
///         // Post the next requests.
///     }
///     while let Some(_event) = fabric.poll_event() {}
///     spin = if busy { 0 } else { spin + 1 };
///     match spin {
///         // What has completed before this is not reported: poll once more.
///         1000 => fabric.arm_hardware()?,
///         n if n > 1000 => {
///             wait(fabric.hardware().expect("set above").descriptors());
///             spin = 0;
///         }
///         _ => {}
///     }
/// }
/// # }
/// ```
///
/// # Errors
/// If there is no device, or one that is named can't be opened: the text says what to do.
pub fn open(devices: &[DeviceName]) -> Result<Box<dyn Hardware>, VerbsError> {
    Ok(Box::new(backend::HwDevice::open(devices)?))
}
