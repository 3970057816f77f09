//! Captures of what a device sends and receives.

use std::{
    fs::File,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Weak},
    time::{SystemTime, UNIX_EPOCH},
};

use parking_lot::Mutex;
use roce_icrc::{Flow, Recovery};
use roce_net::Tap;
use roce_pcap::{Writer, create_private};
use roce_verbs::provider::VerbsError;

use crate::{device::DeviceConfig, open};

/// Writes packets to a file until the first error. Nothing is held back: the capture of a process that is killed is whole.
pub(crate) struct PcapTap(Option<Writer<File>>);

impl PcapTap {
    pub(crate) fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self(Some(Writer::new(create_private(path)?)?)))
    }
}

impl Tap for PcapTap {
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]) {
        let Some(writer) = &mut self.0 else { return };
        // The Identification of a received packet is not seen; the ICRC tells it.
        let id = match Flow::try_from((from, to)).map(|flow| flow.recover(bytes, index)) {
            Ok(Recovery::Exact(id)) => id,
            _ => index,
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Err(e) = writer.write(since.as_nanos() as u64, from, to, bytes, id) {
            tracing::error!("writing the capture failed, it ends here: {e}");
            self.0 = None;
        }
    }
}

/// One capture of several loops and devices.
#[derive(Clone)]
pub(crate) struct SharedTap(Arc<Mutex<PcapTap>>);

impl SharedTap {
    /// What writes the packets of each of these devices to its file, if that is wanted: of the same file once.
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
