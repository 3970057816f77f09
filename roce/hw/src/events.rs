//! What the descriptors have: events of connections, of completion queues and of devices.

use roce_verbs::{
    AsyncEvent, Qpn,
    provider::{CqId, DeviceIx, Event, QpId, VerbsError},
};

use crate::{
    advice,
    device::HwDevice,
    qp::Drain,
    sys::{self, AsyncNews, Element},
};

/// `IBV_EVENT_QP_ACCESS_ERR`, `IBV_EVENT_COMM_EST`, `IBV_EVENT_DEVICE_FATAL`, `IBV_EVENT_GID_CHANGE`.
const QP_ACCESS_ERR: u32 = 3;
const COMM_EST: u32 = 4;
const DEVICE_FATAL: u32 = 8;
const GID_CHANGE: u32 = 18;

/// An event as ours; `None` of what RoCE does not have, and of what we do not use.
fn event(news: AsyncNews) -> Option<AsyncEvent> {
    use AsyncEvent as A;
    let qpn = |number| Qpn::new(number);
    match (news.kind, news.element) {
        (0, Element::Cq(cookie)) => Some(A::CqError(cookie as u32)),
        (1, Element::Qp(n)) => Some(A::QpFatal(qpn(n))),
        (2, Element::Qp(n)) => Some(A::QpRequestError(qpn(n))),
        (QP_ACCESS_ERR, Element::Qp(n)) => Some(A::QpAccessError(qpn(n))),
        (COMM_EST, Element::Qp(n)) => Some(A::CommunicationEstablished(qpn(n))),
        (5, Element::Qp(n)) => Some(A::SqDrained(qpn(n))),
        (6, Element::Qp(n)) => Some(A::PathMigrated(qpn(n))),
        (7, Element::Qp(n)) => Some(A::PathMigrationError(qpn(n))),
        (9, _) => Some(A::PortActive),
        (10, _) => Some(A::PortError),
        (12, _) => Some(A::PkeyChange),
        (16, Element::Qp(n)) => Some(A::LastWqeReached(qpn(n))),
        (GID_CHANGE, _) => Some(A::GidChange),
        _ => None,
    }
}

impl HwDevice {
    /// Takes what the descriptors have. Then completions are to be asked for, and then events. Returns whether there was anything.
    ///
    /// # Errors
    /// When the system fails.
    pub fn poll(&mut self) -> Result<bool, VerbsError> {
        let failed = |e| advice::failed("looking for events", e);
        let mut readable = std::mem::take(&mut self.readable);
        sys::readable(&self.descriptors(), &mut readable).map_err(failed)?;
        let any = readable.contains(&true);
        if readable.first() == Some(&true) {
            self.poll_connections()?;
        }
        for (device, ready) in readable.iter().skip(1).collect::<Vec<_>>().chunks(2).enumerate() {
            if ready.first() == Some(&&true) {
                self.poll_channel(device)?;
            }
            if ready.get(1) == Some(&&true) && !self.devices[device].gone {
                self.poll_device(device);
            }
        }
        self.readable = readable;
        Ok(any)
    }

    fn poll_connections(&mut self) -> Result<(), VerbsError> {
        let channel = self.channel.clone();
        loop {
            let news = channel.event();
            match news.map_err(|e| advice::failed("taking an event of the connection manager", e))? {
                Some(news) => self.cm_event(news),
                None => return Ok(()),
            }
        }
    }

    fn poll_channel(&mut self, device: usize) -> Result<(), VerbsError> {
        loop {
            let told = self.devices[device].channel.event();
            let Some(cookie) = told.map_err(|e| advice::failed("taking an event of a completion queue", e))? else {
                return Ok(());
            };
            // That of a queue that is gone has gone with it.
            if let Some(cq) = self.cqs.get_mut(CqId(cookie as u32)) {
                cq.raw.told();
                cq.armed = false;
            }
        }
    }

    fn poll_device(&mut self, device: usize) {
        loop {
            let news = match self.devices[device].context.async_event() {
                Ok(Some(news)) => news,
                Ok(None) => return,
                // The descriptor of a device that is gone has nothing any more.
                Err(e) => {
                    tracing::debug!("taking an event of {}: {e}", self.devices[device].context.name());
                    self.device_gone(device);
                    return;
                }
            };
            self.async_event(device, news);
        }
    }

    fn async_event(&mut self, device: usize, news: AsyncNews) {
        if news.kind == DEVICE_FATAL {
            self.device_gone(device);
            return;
        }
        if news.kind == GID_CHANGE
            && let Ok(addrs) = self.devices[device].context.addresses(self.devices[device].port)
        {
            (self.caps[device].addrs, self.devices[device].ports) = addrs.into_iter().unzip();
        }
        if let Element::Qp(number) = news.element
            && let Some(id) = self.devices[device].qps.get(&number).copied()
        {
            match news.kind {
                QP_ACCESS_ERR => self.violated(id),
                COMM_EST => self.peer_talks(id),
                _ => {}
            }
        }
        if let Some(event) = event(news) {
            self.events.push_back(Event::Async(DeviceIx(device as u16), event));
        }
    }

    fn violated(&mut self, id: QpId) {
        if let Some(qp) = self.qps.get_mut(id) {
            qp.violated = true;
        }
    }

    /// Nothing completes on a device any more. Told once. What waits for its drain has waited in vain.
    pub(crate) fn device_gone(&mut self, device: usize) {
        if std::mem::replace(&mut self.devices[device].gone, true) {
            return;
        }
        tracing::warn!(
            "the RDMA device {} is gone, or has failed",
            self.devices[device].context.name()
        );
        self.events.push_back(Event::DeviceRemoved(DeviceIx(device as u16)));
        let qps = self.devices[device].qps.values().copied();
        let waits = |id: &QpId| self.qps.get(*id).is_some_and(|qp| qp.drain == Drain::Waiting);
        for id in qps.filter(waits).collect::<Vec<_>>() {
            self.abandon(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_the_librarys_numbers() {
        for kind in 0..32 {
            for element in [Element::Qp(7), Element::Cq(9), Element::Device] {
                if let Some(event) = event(AsyncNews { kind, element }) {
                    assert_eq!(event.describe().0, kind, "{event:?}");
                }
            }
        }
    }
}
