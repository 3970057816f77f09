//! Open devices.

use std::{collections::HashMap, hash::BuildHasherDefault, io, net::SocketAddr, path::Path, sync::Arc};

use roce_port::fabric::DeviceName;
use roce_verbs::{
    NumberHasher,
    provider::{DeviceCaps, KeyId},
};

use crate::{
    caps,
    sys::{self, CmId, Context, EventChannel, Found, NODES, Watched},
};

/// Tokens of descriptors: of connections, of the folder of device files, and from here on two for each device.
pub(crate) const CONNECTIONS: u64 = 0;
pub(crate) const FILES: u64 = 1;
pub(crate) const DEVICES: u64 = 2;
/// Bit of the token of a device's [anchor](Device::anchor); connections have 32 bits.
const ANCHOR: u64 = 1 << 32;

/// Device.
pub(crate) struct Device {
    pub(crate) name: String,
    /// Its device file, where there is one.
    pub(crate) file: Option<String>,
    /// `None`: it is gone, and no object on it is left.
    pub(crate) context: Option<Arc<Context>>,
    /// Id of the connection manager on the device, which is notified when the device is removed.
    pub(crate) anchor: Option<CmId>,
    /// The port that is used; `None`: all.
    pub(crate) port: Option<u8>,
    /// The ports of its addresses.
    pub(crate) ports: Vec<u8>,
    pub(crate) atomics: bool,
    /// It is gone, or has failed for good: nothing completes any more.
    pub(crate) gone: bool,
    /// Type 2 windows that are open, by key.
    pub(crate) windows: HashMap<u32, KeyId, BuildHasherDefault<NumberHasher>>,
}

impl Device {
    /// Opens a device, and queries its capabilities.
    pub(crate) fn open(found: Found, wanted: &[DeviceName]) -> io::Result<(Self, DeviceCaps)> {
        let port = wanted.iter().find(|d| d.name == found.name).and_then(|d| d.port);
        let context = Arc::new(found.opened?);
        let (mut caps, ports, atomics) = caps::query(&context, port)?;
        caps.name = Some(found.name.as_str().into());
        let device = Self {
            name: found.name,
            file: Some(file(&found.file)).filter(|file| Path::new(file).exists()),
            context: Some(context),
            anchor: None,
            port,
            ports,
            atomics,
            gone: false,
            windows: HashMap::default(),
        };
        Ok((device, caps))
    }

    /// Returns its context, unless it is gone.
    pub(crate) fn usable(&self) -> Option<&Arc<Context>> {
        self.context.as_ref().filter(|_| !self.gone)
    }

    /// Watches its descriptors, as those of the device of this index.
    pub(crate) fn watch(&self, watched: &Watched, index: usize) -> io::Result<()> {
        let Some(context) = &self.context else { return Ok(()) };
        let token = DEVICES + 2 * index as u64;
        watched.add(context.channel_fd(), token)?;
        watched.add(context.async_fd(), token + 1)
    }

    /// Binds its anchor to the first of its addresses.
    pub(crate) fn anchor(&mut self, channel: &Arc<EventChannel>, index: usize, caps: &DeviceCaps) {
        let Some(addr) = caps.addrs.first().filter(|_| self.anchor.is_none()) else {
            return;
        };
        let made = CmId::create(channel, ANCHOR | index as u64);
        match made.and_then(|id| id.bind(SocketAddr::new(*addr, 0)).map(|()| id)) {
            Ok(id) => self.anchor = Some(id),
            Err(e) => tracing::debug!("binding to {addr}: {e}"),
        }
    }
}

/// Protection domain.
pub(crate) struct Pd {
    pub(crate) device: usize,
    pub(crate) raw: Arc<sys::Pd>,
}

/// Returns the device whose anchor has a token.
pub(crate) const fn anchored(token: u64) -> Option<usize> {
    match token & ANCHOR {
        0 => None,
        _ => Some((token & !ANCHOR) as usize),
    }
}

/// Returns the path of a device file.
pub(crate) fn file(name: &str) -> String {
    format!("{NODES}/{name}")
}

/// Returns the device of a connection, if it is one of these and not gone.
pub(crate) fn device_of(devices: &[Device], id: &CmId) -> Option<usize> {
    let name = id.device()?;
    devices.iter().position(|d| d.name == name && !d.gone)
}
