//! What the descriptors have: events of connections, of completion queues and of devices.

use roce_verbs::{
    AsyncEvent, Qpn,
    provider::{CqId, DeviceIx, Event, QpId, VerbsError},
};

use crate::{
    advice,
    device::{HwDevice, Source},
    sys::{AsyncNews, Element, Nodes},
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
        let mut ready = std::mem::take(&mut self.ready);
        self.watched.ready(&mut ready).map_err(failed)?;
        for token in &ready {
            match Source::of(*token) {
                Source::Connections => self.poll_connections()?,
                Source::Nodes => {
                    self.nodes.iter().for_each(Nodes::drain);
                    self.nodes_changed();
                }
                Source::Completions(device) => self.poll_channel(device)?,
                Source::Device(device) => self.poll_device(device),
            }
        }
        let any = !ready.is_empty();
        self.ready = ready;
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
            let Some(open) = &self.devices[device].open else {
                return Ok(());
            };
            let told = open.channel.event();
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
            let Some(open) = &self.devices[device].open else { return };
            let news = match open.context.async_event() {
                Ok(Some(news)) => news,
                Ok(None) => return,
                // The descriptor of a device that is gone has nothing any more.
                Err(e) => {
                    tracing::debug!("taking an event of {}: {e}", self.devices[device].name);
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
            && let Some(open) = self.devices[device]
                .open
                .as_ref()
                .filter(|_| !self.devices[device].gone)
            && let Ok(addrs) = open.context.addresses(self.devices[device].port)
        {
            (self.caps[device].addrs, self.devices[device].ports) = addrs.into_iter().unzip();
            self.anchor(device);
            self.listen_again();
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
