//! Devices that go and come back.
//!
//! A kernel driver that can take a device from under programs reports it by an event. Others (rdma_rxe) wait until no process has it
//! open: then only its device file is gone. Either way everything on the device is given back, it is closed, and opened again under
//! its former index when there is one of its name.

use std::{path::Path, sync::Arc};

use roce_verbs::{
    Completion, WcStatus,
    provider::{DeviceCaps, DeviceIx, Event, QpId},
};

use super::{HwDevice, is_wanted};
use crate::{
    device::Device,
    sys::{Context, close_dead_device},
};

impl HwDevice {
    /// Reports, once, that nothing completes on a device any more, and finishes its drains. Its listeners keep their numbers, and
    /// nothing of the device.
    pub(super) fn device_gone(&mut self, index: usize) {
        let device = &mut self.devices[index];
        if std::mem::replace(&mut device.gone, true) {
            return;
        }
        tracing::warn!("the RDMA device {} is gone, or has failed", device.name);
        self.caps[index].addrs.clear();
        self.events.push_back(Event::DeviceRemoved(DeviceIx(index as u16)));
        for (_, cm) in self.cms.iter_mut() {
            cm.lose(&self.channel, &device.name);
        }
        let draining = self
            .qps
            .iter_mut()
            .filter(|(_, qp)| qp.device() == index && qp.is_draining());
        let draining: Vec<QpId> = draining.map(|(id, _)| id).collect();
        draining.into_iter().for_each(|id| self.abandon(id));
    }

    /// Flushes the work requests of a queue pair of which the device reports nothing any more. The device's queue pair is destroyed
    /// first, so that nothing uses their memory.
    pub(super) fn abandon(&mut self, id: QpId) {
        // Completions may be in the queues, and finish the drain.
        let mut polled = Vec::new();
        let _ = self.poll_queues(&mut polled, usize::MAX);
        self.flushed.extend(polled);
        self.close_keys_of(id);
        let Some(qp) = self.qps.get_mut(id).filter(|qp| qp.is_draining()) else {
            return;
        };
        let qpn = qp.qpn();
        let flushed = qp.abandon().into_iter().map(|wr_id| Completion {
            wr_id,
            status: WcStatus::FlushError,
            qpn,
            ..Completion::default()
        });
        self.flushed.extend(flushed.map(|wc| (id, wc)));
        self.events.push_back(Event::Drained(id));
    }

    /// Looks for devices that have gone or come, after device files have.
    pub(super) fn files_changed(&mut self) {
        if let Some(files) = &self.files {
            files.drain();
        }
        for index in 0..self.devices.len() {
            let file = self.devices[index].file.as_deref();
            if file.is_some_and(|file| !Path::new(file).exists()) {
                self.device_gone(index);
            }
        }
        self.reopen();
        self.listen_again();
    }

    /// Starts listening again where a listener's device was lost and is back.
    pub(super) fn listen_again(&mut self) {
        for (_, cm) in self.cms.iter_mut() {
            cm.listen_again(&self.channel);
        }
    }

    /// Closes devices that are gone, and of which no object is left: some drivers wait for that.
    pub(super) fn close_gone(&mut self) {
        for device in self.devices.iter_mut().filter(|device| device.gone) {
            // All objects hold the context.
            if device
                .context
                .take_if(|context| Arc::strong_count(context) == 1)
                .is_none()
            {
                continue;
            }
            tracing::info!("the RDMA device {} is closed", device.name);
            if let Some(anchor) = device.anchor.take() {
                close_dead_device(anchor);
            }
        }
    }

    /// Opens devices that have come, if they are wanted.
    fn reopen(&mut self) {
        let (wanted, devices) = (&self.wanted, &self.devices);
        let is_new = |name: &str| is_wanted(wanted, name) && !devices.iter().any(|d| d.name == name && !d.gone);
        let found = match Context::open_all(is_new) {
            Ok(found) => found,
            Err(e) => {
                tracing::debug!("listing the RDMA devices: {e}");
                return;
            }
        };
        for found in found {
            let name = found.name.clone();
            match Device::open(found, &self.wanted) {
                Ok((device, caps)) => self.add(device, caps),
                // It is tried again when its device file changes.
                Err(e) => tracing::debug!("opening the RDMA device {name}: {e}"),
            }
        }
    }

    /// Adds a device that has come, or come back: then under its former index.
    fn add(&mut self, device: Device, caps: DeviceCaps) {
        let mut former = self.devices.iter();
        let former = former.position(|d| d.name == device.name && d.context.is_none());
        let index = former.unwrap_or(self.devices.len());
        if let Err(e) = device.watch(&self.watched, index) {
            tracing::warn!("watching the RDMA device {}: {e}", device.name);
            return;
        }
        tracing::info!("the RDMA device {} has come", device.name);
        match former {
            Some(index) => (self.devices[index], self.caps[index]) = (device, caps),
            None => {
                self.devices.push(device);
                self.caps.push(caps);
            }
        }
        self.anchor(index);
    }
}
