//! Addresses that loops get while they run.

use std::{net::IpAddr, sync::Arc};

use parking_lot::Mutex;
use roce::{NewDevice, verbs::provider::VerbsError};

/// Addresses of the RDMA devices of a loop, for other threads.
#[derive(Clone, Default, Debug)]
pub(crate) struct Hardware(Arc<Mutex<Vec<IpAddr>>>);

impl Hardware {
    pub(crate) fn tell(&self, addrs: Vec<IpAddr>) {
        *self.0.lock() = addrs;
    }

    fn has(&self, addr: IpAddr) -> bool {
        self.0.lock().contains(&addr)
    }
}

/// [`roce::Opener`], which opens further addresses for loops that run, knowing those of RDMA devices beside it, which need none of that.
#[derive(Clone, Debug)]
pub struct Opener {
    pub(crate) soft: roce::Opener,
    pub(crate) hardware: Hardware,
}

impl Opener {
    /// Whether packets may leave from an address: it is open, or all are, or it is an RDMA device's.
    pub fn has(&self, addr: IpAddr) -> bool {
        let addr = addr.to_canonical();
        self.soft.has(addr) || self.hardware.has(addr)
    }

    /// Opens an address in software: a device for each of the loops, in their order.
    ///
    /// # Errors
    /// As [`roce::Opener::open`].
    pub fn open(&self, addr: IpAddr) -> Result<Vec<NewDevice>, VerbsError> {
        self.soft.open(addr)
    }
}
