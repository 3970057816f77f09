//! Captures of what a device sends and receives: to a file, or to a ring in memory.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use roce_net::Tap;
use roce_verbs::provider::VerbsError;

#[cfg(feature = "pcap")]
use crate::ring::Ring;
use crate::{config::DeviceConfig, error::io_error};

#[cfg_attr(not(feature = "pcap"), path = "tap/without.rs")]
mod file;

use file::PcapTap;

/// One capture of several loops and devices.
#[derive(Clone)]
pub(crate) enum SharedTap {
    File(Arc<Mutex<PcapTap>>),
    #[cfg(feature = "pcap")]
    Ring(Ring),
}

/// Reference to a capture, which does not keep a file open.
pub(crate) enum WeakTap {
    File(Weak<Mutex<PcapTap>>),
    #[cfg(feature = "pcap")]
    Ring(Ring),
}

impl SharedTap {
    /// Opens the captures of these devices, where they are wanted: one for each file.
    pub(crate) fn of(configs: &[DeviceConfig]) -> Result<Vec<Option<Self>>, VerbsError> {
        let mut taps: Vec<Option<Self>> = Vec::new();
        for (index, config) in configs.iter().enumerate() {
            #[cfg(feature = "pcap")]
            if let Some(ring) = &config.ring {
                if config.pcap.is_some() {
                    return Err(VerbsError::Invalid("a capture is a file or a ring, not both".into()));
                }
                taps.push(Some(Self::Ring(ring.clone())));
                continue;
            }
            let same = configs[..index].iter().position(|other| other.pcap == config.pcap);
            let tap = match same {
                Some(other) => taps[other].clone(),
                None => capture(config)?.map(|tap| Self::File(Arc::new(Mutex::new(tap)))),
            };
            taps.push(tap);
        }
        Ok(taps)
    }

    /// Returns a reference for devices that come later.
    pub(crate) fn weak(&self) -> WeakTap {
        match self {
            Self::File(tap) => WeakTap::File(Arc::downgrade(tap)),
            #[cfg(feature = "pcap")]
            Self::Ring(ring) => WeakTap::Ring(ring.clone()),
        }
    }

    /// Returns the capture for a driver.
    pub(crate) fn to_tap(&self) -> Box<dyn Tap> {
        match self {
            Self::File(tap) => Box::new(FileTap(tap.clone())),
            #[cfg(feature = "pcap")]
            Self::Ring(ring) => Box::new(ring.clone()),
        }
    }
}

impl WeakTap {
    /// Returns the capture, as long as devices write to it.
    pub(crate) fn upgrade(&self) -> Option<SharedTap> {
        match self {
            Self::File(tap) => tap.upgrade().map(SharedTap::File),
            #[cfg(feature = "pcap")]
            Self::Ring(ring) => Some(SharedTap::Ring(ring.clone())),
        }
    }
}

struct FileTap(Arc<Mutex<PcapTap>>);

impl Tap for FileTap {
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]) {
        self.0.lock().packet(from, to, index, bytes);
    }
}

/// Opens the capture file of a device, if one is wanted.
fn capture(config: &DeviceConfig) -> Result<Option<PcapTap>, VerbsError> {
    let create = |file: &PathBuf| {
        PcapTap::create(file, config.pcap_append).map_err(io_error(&format!("creating {}", file.display())))
    };
    config.pcap.as_ref().map(create).transpose()
}
