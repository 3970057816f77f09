//! Events of the descriptors: of connections, of completion queues and of devices.

use roce_local::{HardwareEvent, Object};
use roce_verbs::{
    AsyncEvent, Qpn,
    provider::{CmRef, CqId, VerbsError},
};

use crate::{
    advice,
    cm::Cm,
    device::{HwDevice, Source, device_of},
    sys::{AsyncNews, Element, News, Nodes},
};

/// `IBV_EVENT_DEVICE_FATAL`, `IBV_EVENT_GID_CHANGE`.
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
        (3, Element::Qp(n)) => Some(A::QpAccessError(qpn(n))),
        (4, Element::Qp(n)) => Some(A::CommunicationEstablished(qpn(n))),
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
    /// Reads the descriptors, and queues the events. Returns whether there was anything.
    ///
    /// # Errors
    /// If the system fails.
    pub(crate) fn poll_descriptors(&mut self) -> Result<bool, VerbsError> {
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
                Some(news) => self.cm_news(news),
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
            self.events.push_back(HardwareEvent::Completions(CqId(cookie as u32)));
        }
    }

    fn cm_news(&mut self, mut news: News) {
        if let Some(raw) = news.request.take() {
            // One on a device that is not in use is dropped, which rejects it.
            if let Some(device) = device_of(&self.devices, &raw) {
                self.events.push_back(HardwareEvent::Request {
                    listener: CmRef(news.token as u32),
                    device,
                    cm: Object::new(Cm::of_request(raw, device, &self.devices, &news.reply)),
                    private_data: news.reply.private_data,
                    initiator_depth: news.reply.initiator_depth,
                    responder_resources: news.reply.responder_resources,
                });
            }
            return;
        }
        if let Some(device) = Self::anchored(news.token) {
            if news.is_removal() && device < self.devices.len() {
                self.device_gone(device);
            }
            return;
        }
        let id = CmRef(news.token as u32);
        let event = Object::new(news);
        self.events.push_back(HardwareEvent::Cm { id, event });
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
            self.events.push_back(HardwareEvent::Changed);
        }
        if let Some(event) = event(news) {
            self.events.push_back(HardwareEvent::Async(device, event));
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
