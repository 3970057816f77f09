//! Captures of what a device sends and receives.

use std::{
    net::SocketAddr,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use roce_net::Tap;
use roce_verbs::provider::VerbsError;

use crate::{device::DeviceConfig, open};

#[cfg_attr(not(feature = "pcap"), path = "tap/without.rs")]
mod file;

pub(crate) use file::PcapTap;

/// One capture of several loops and devices.
#[derive(Clone)]
pub(crate) struct SharedTap(Arc<Mutex<PcapTap>>);

impl SharedTap {
    /// Opens the captures of these devices, where they are wanted: one for each file.
    pub(crate) fn of(configs: &[DeviceConfig]) -> Result<Vec<Option<Self>>, VerbsError> {
        let mut taps: Vec<Option<Self>> = Vec::new();
        for (index, config) in configs.iter().enumerate() {
            let same = configs[..index].iter().position(|other| other.pcap == config.pcap);
            let tap = match same {
                Some(other) => taps[other].clone(),
                None => open::tap(config)?.map(|tap| Self(Arc::new(Mutex::new(tap)))),
            };
            taps.push(tap);
        }
        Ok(taps)
    }

    pub(crate) fn boxed(self) -> Box<dyn Tap> {
        Box::new(self)
    }

    /// For devices that come later. It does not keep the file open.
    pub(crate) fn weak(&self) -> WeakTap {
        WeakTap(Arc::downgrade(&self.0))
    }
}

/// The capture of loops, as long as they are there.
pub(crate) struct WeakTap(Weak<Mutex<PcapTap>>);

impl WeakTap {
    pub(crate) fn get(&self) -> Option<SharedTap> {
        self.0.upgrade().map(SharedTap)
    }
}

impl Tap for SharedTap {
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]) {
        self.0.lock().packet(from, to, index, bytes);
    }
}
