//! Devices that go and come back.
//!
//! A kernel driver that can take a device from under programs says so by an event. Others (rdma_rxe) wait until nobody has it open:
//! what shows then is that its device file is gone. Either way everything on the device is given back, it is closed, and opened
//! again under its old number when there is one of its name.

use std::{net::SocketAddr, path::Path};

use roce_local::HardwareEvent;
use roce_verbs::provider::DeviceCaps;

use crate::{
    device::{Device, HwDevice},
    sys::{self, CmId, Context},
};

/// Of the token of a device's own id; connections have 32 bits.
const ANCHOR: u64 = 1 << 32;

impl HwDevice {
    /// Reports, once, that nothing completes on a device any more.
    pub(crate) fn device_gone(&mut self, index: usize) {
        if std::mem::replace(&mut self.devices[index].gone, true) {
            return;
        }
        tracing::warn!("the RDMA device {} is gone, or has failed", self.devices[index].name);
        self.caps[index].addrs.clear();
        self.events.push_back(HardwareEvent::Removed(index));
    }

    /// Looks at the device files, after some have come or gone.
    pub(crate) fn nodes_changed(&mut self) {
        for index in 0..self.devices.len() {
            let device = &self.devices[index];
            if !device.gone && device.file.as_deref().is_some_and(|file| !Path::new(file).exists()) {
                self.device_gone(index);
            }
        }
        self.reopen();
        self.events.push_back(HardwareEvent::Changed);
    }

    /// Closes devices that are gone, and of which no object is left: some drivers wait for that.
    pub(crate) fn close_gone(&mut self) {
        for device in self.devices.iter_mut().filter(|device| device.gone) {
            let Some(open) = device.open.take_if(|open| open.is_unused()) else {
                continue;
            };
            tracing::info!("the RDMA device {} is closed", device.name);
            if let Some(anchor) = open.anchor {
                sys::close_dead_device(anchor);
            }
        }
    }

    /// An id of the connection manager on a device, by which its end is told, and which is there till then.
    pub(crate) fn anchor(&mut self, index: usize) {
        let addr = self.caps[index].addrs.first().copied();
        let Some(open) = self.devices[index].open.as_mut().filter(|open| open.anchor.is_none()) else {
            return;
        };
        let Some(addr) = addr else { return };
        let token = ANCHOR | index as u64;
        let made = CmId::create(&self.channel, token).and_then(|id| {
            id.bind(SocketAddr::new(addr, 0))?;
            Ok(id)
        });
        match made {
            Ok(id) => open.anchor = Some(id),
            Err(e) => tracing::debug!("binding to {addr}: {e}"),
        }
    }

    /// The device that an event's token names as its [anchor](Self::anchor)'s.
    pub(crate) const fn anchored(token: u64) -> Option<usize> {
        match token & ANCHOR {
            0 => None,
            _ => Some((token & !ANCHOR) as usize),
        }
    }

    /// Opens devices that have come: those that are wanted.
    fn reopen(&mut self) {
        let all = self.config.devices.is_empty();
        let config = &self.config.devices;
        let devices = &self.devices;
        let wanted = |name: &str| {
            let open = devices.iter().any(|d| d.name == name && !d.gone);
            !open && (all || config.iter().any(|d| d.name == name))
        };
        let found = match Context::open_all(wanted) {
            Ok(found) => found,
            Err(e) => {
                tracing::debug!("listing the RDMA devices: {e}");
                return;
            }
        };
        for found in found {
            let name = found.name.clone();
            let port = self.config.devices.iter().find(|d| d.name == name).and_then(|d| d.port);
            match Device::open(found, port) {
                Ok((device, caps)) => self.comes(device, caps),
                // It is tried again when its device file changes.
                Err(e) => tracing::debug!("opening the RDMA device {name}: {e}"),
            }
        }
    }

    /// A device has come, or come back: then it has the number that it had.
    fn comes(&mut self, device: Device, caps: DeviceCaps) {
        let before = self
            .devices
            .iter()
            .position(|d| d.name == device.name && d.open.is_none());
        let index = before.unwrap_or(self.devices.len());
        if let Err(e) = device.watch(&self.watched, index) {
            tracing::warn!("watching the RDMA device {}: {e}", device.name);
            return;
        }
        tracing::info!("the RDMA device {} has come", device.name);
        match before {
            Some(index) => (self.devices[index], self.caps[index]) = (device, caps),
            None => {
                self.devices.push(device);
                self.caps.push(caps);
            }
        }
        self.anchor(index);
    }
}
