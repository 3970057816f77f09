//! Captures of what a device sends and receives.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use roce_net::Tap;
use roce_verbs::provider::VerbsError;

use crate::{config::DeviceConfig, error::io_error};

#[cfg_attr(not(feature = "pcap"), path = "tap/without.rs")]
mod file;

use file::PcapTap;

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
                None => capture(config)?.map(|tap| Self(Arc::new(Mutex::new(tap)))),
            };
            taps.push(tap);
        }
        Ok(taps)
    }

    /// Returns a reference for devices that come later, which does not keep the file open.
    pub(crate) fn weak(&self) -> WeakTap {
        Arc::downgrade(&self.0)
    }

    /// Returns the capture, as long as devices write to it.
    pub(crate) fn upgrade(weak: &WeakTap) -> Option<Self> {
        weak.upgrade().map(Self)
    }
}

/// Capture of loops, as long as they live.
pub(crate) type WeakTap = Weak<Mutex<PcapTap>>;

impl Tap for SharedTap {
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]) {
        self.0.lock().packet(from, to, index, bytes);
    }
}

/// Opens the capture of a device's packets, if one is wanted.
fn capture(config: &DeviceConfig) -> Result<Option<PcapTap>, VerbsError> {
    let create = |file: &PathBuf| {
        PcapTap::create(file, config.pcap_append).map_err(io_error(&format!("creating {}", file.display())))
    };
    config.pcap.as_ref().map(create).transpose()
}
