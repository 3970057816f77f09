//! RDMA devices of the host as a backend: what the fabric knows of them beside their objects.

use core::net::IpAddr;
use std::{
    collections::{HashMap, VecDeque},
    hash::BuildHasherDefault,
    io,
};

use roce_verbs::{
    AsyncEvent, Completion, NumberHasher, WcFlags, WcStatus,
    provider::{
        CmKind, CmRef, CqId, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, QpId, Revoked, VerbsError,
    },
    wr::PostError,
};

use crate::{
    hardware::{Drain, Hardware, HardwareEvent, Object},
    tables::{Cm, Cq, HardKey, Key, Mr, NO_KEY, NO_MR, Qp, Tables},
};

type ByNumber<T> = HashMap<u32, T, BuildHasherDefault<NumberHasher>>;

/// State of an RDMA device.
pub(crate) struct HardDevice {
    /// Its index in the fabric.
    pub(crate) ix: DeviceIx,
    pub(crate) qps: ByNumber<QpId>,
    /// Type 2 windows that are open, by key.
    windows: ByNumber<KeyId>,
}

impl HardDevice {
    pub(crate) fn new(ix: DeviceIx) -> Self {
        Self {
            ix,
            qps: ByNumber::default(),
            windows: ByNumber::default(),
        }
    }
}

/// The RDMA devices of a fabric.
pub(crate) struct Hard {
    pub(crate) backend: Box<dyn Hardware>,
    pub(crate) devices: Vec<HardDevice>,
    /// Returns the local address of the route to a peer.
    pub(crate) route: fn(IpAddr) -> io::Result<IpAddr>,
    /// Completion queues in the order in which they are polled.
    pub(crate) polling: Vec<CqId>,
    pub(crate) events: VecDeque<Event>,
    /// Completions that no device makes any more.
    flushed: VecDeque<(QpId, Completion)>,
    polled: Vec<Completion>,
}

impl Hard {
    pub(crate) fn new(backend: Box<dyn Hardware>, route: fn(IpAddr) -> io::Result<IpAddr>) -> Self {
        Self {
            backend,
            devices: Vec::new(),
            route,
            polling: Vec::new(),
            events: VecDeque::new(),
            flushed: VecDeque::new(),
            polled: Vec::new(),
        }
    }

    /// Returns whether a device can listen at all addresses of a family. The unspecified address of IPv6 includes IPv4.
    pub(crate) fn serves(&self, family: IpAddr) -> bool {
        let mut addrs = self.backend.devices().iter().map(|caps| &caps.addrs);
        addrs.any(|addrs| family.is_ipv6() || addrs.is_empty() || addrs.iter().any(IpAddr::is_ipv4))
    }

    /// Ends a registration. Closes its windows first: it can't end with one.
    pub(crate) fn deregister(&mut self, t: &mut Tables, mr: MrId) {
        self.close_keys(t, |key| key.mr == Some(mr));
        t.mrs.remove(mr);
    }

    /// Destroys a queue pair. Closes the type 2 windows that were bound through it first: rdma_rxe waits for them, for 50 s.
    pub(crate) fn destroy_qp(&mut self, t: &mut Tables, (device, id): (usize, QpId)) {
        self.close_keys_through(t, id);
        if let Some(qp) = t.qps.remove(id) {
            self.devices[device].qps.remove(&qp.qpn.value());
        }
        self.flushed.retain(|(of, _)| *of != id);
    }

    pub(crate) fn grant(
        &mut self,
        t: &mut Tables,
        (qp, id): (QpId, KeyId),
        grant: &GrantOf,
        wr_id: u64,
    ) -> Result<Granted, PostError> {
        let object = t.qps.get_mut(qp).and_then(Qp::hard).ok_or(PostError::NoQueuePair)?;
        let Some(Mr::Hard(mr)) = t.mrs.get(grant.mr) else {
            return Err(NO_MR);
        };
        let Some(Key::Hard(key)) = t.keys.get_mut(id) else {
            return Err(NO_KEY);
        };
        let granted = self.backend.grant(object, &mut key.object, mr, grant, wr_id)?;
        (key.mr, key.qp) = (Some(grant.mr), Some(qp));
        if key.kind == KeyKind::Window2 {
            self.forget_window(key);
            key.open = Some(granted.rkey().0);
            self.devices[key.device].windows.insert(granted.rkey().0, id);
        }
        Ok(granted)
    }

    pub(crate) fn revoke(&mut self, t: &mut Tables, qp: QpId, id: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        let object = t.qps.get_mut(qp).and_then(Qp::hard).ok_or(PostError::NoQueuePair)?;
        let Some(Key::Hard(key)) = t.keys.get_mut(id) else {
            return Err(NO_KEY);
        };
        let mr = key.mr.and_then(|mr| t.mrs.get(mr)).and_then(|mr| match mr {
            Mr::Hard(object) => Some(object),
            Mr::Soft { .. } => None,
        });
        let revoked = self.backend.revoke(object, &mut key.object, mr, wr_id)?;
        self.forget_window(key);
        Ok(revoked)
    }

    /// Removes a window from the index of open windows.
    pub(crate) fn forget_window(&mut self, key: &mut HardKey) {
        if let Some(open) = key.open.take() {
            self.devices[key.device].windows.remove(&open);
        }
    }

    /// Closes a key whatever has become of its queue pair. The work request that was to take it back may have been flushed.
    pub(crate) fn close_key(&mut self, key: &mut HardKey) {
        if key.mr.take().is_some() {
            key.qp = None;
            self.forget_window(key);
            self.backend.replace_key(&mut key.object);
        }
    }

    fn close_keys(&mut self, t: &mut Tables, which: impl Fn(&HardKey) -> bool) {
        for key in t.keys.iter_mut() {
            if let Key::Hard(key) = key
                && which(key)
            {
                self.close_key(key);
            }
        }
    }

    fn close_keys_through(&mut self, t: &mut Tables, qp: QpId) {
        self.close_keys(t, |key| key.qp == Some(qp) && key.kind == KeyKind::Window2);
    }

    pub(crate) fn drain(&mut self, t: &mut Tables, id: QpId) {
        let Some(qp) = t.qps.get_mut(id).and_then(Qp::hard) else {
            return;
        };
        match self.backend.drain(qp) {
            Drain::Pending => {}
            Drain::Done => self.events.push_back(Event::Drained(id)),
            Drain::Dead => self.abandon(t, id),
        }
    }

    /// Flushes the work requests of a queue pair of which the device reports nothing any more. The device's queue pair is destroyed
    /// first, so that nothing uses their memory.
    fn abandon(&mut self, t: &mut Tables, id: QpId) {
        // Completions may be in the queues, and finish the drain.
        let mut polled = Vec::new();
        let _ = self.poll(t, &mut polled, usize::MAX);
        self.flushed.extend(polled);
        self.close_keys_through(t, id);
        let Some(qp) = t.qps.get_mut(id) else { return };
        let qpn = qp.qpn;
        let Some(object) = qp.hard().filter(|qp| self.backend.is_draining(qp)) else {
            return;
        };
        for wr_id in self.backend.abandon(object) {
            let flushed = Completion {
                wr_id,
                status: WcStatus::FlushError,
                qpn,
                ..Completion::default()
            };
            self.flushed.push_back((id, flushed));
        }
        self.events.push_back(Event::Drained(id));
    }

    /// Appends at most `max` completions of all queues.
    pub(crate) fn poll(
        &mut self,
        t: &mut Tables,
        out: &mut Vec<(QpId, Completion)>,
        max: usize,
    ) -> Result<(), VerbsError> {
        let before = out.len();
        let ready = self.flushed.len().min(max);
        out.extend(self.flushed.drain(..ready));
        let mut polled = core::mem::take(&mut self.polled);
        let mut result = Ok(());
        for i in 0..self.polling.len() {
            while let Some(Cq::Hard { device, object }) = t.cqs.get_mut(self.polling[i]) {
                let (device, room) = (*device, max - (out.len() - before));
                polled.clear();
                match self.backend.poll_cq(object, &mut polled, room) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(e) => {
                        result = Err(e);
                        break;
                    }
                }
                for wc in &polled {
                    out.extend(self.completed(t, device, *wc));
                }
            }
        }
        self.polled = polled;
        result
    }

    /// Returns a completion for the user. `None` of one that is not the user's.
    fn completed(&mut self, t: &mut Tables, device: usize, mut wc: Completion) -> Option<(QpId, Completion)> {
        let device = &mut self.devices[device];
        let id = *device.qps.get(&wc.qpn.value())?;
        let qp = t.qps.get_mut(id)?;
        let completed = self.backend.complete(qp.hard()?, &mut wc);
        qp.violated |= completed.violated;
        if completed.drained {
            // The user gets it after this completion: events are polled after completions.
            self.events.push_back(Event::Drained(id));
        }
        if !completed.is_users {
            return None;
        }
        if wc.is_ok() && wc.flags.contains(WcFlags::WITH_INV) {
            let closed = device.windows.remove(&wc.invalidated.0);
            if let Some(Key::Hard(key)) = closed.and_then(|id| t.keys.get_mut(id)) {
                key.open = None;
                self.backend.invalidated(&mut key.object);
            }
        }
        Some((id, wc))
    }

    /// Requests an event for the next completion of each queue.
    pub(crate) fn arm(&mut self, t: &mut Tables) -> Result<(), VerbsError> {
        for id in &self.polling {
            if let Some(Cq::Hard { object, .. }) = t.cqs.get_mut(*id) {
                self.backend.arm(object)?;
            }
        }
        Ok(())
    }

    /// Processes an event of the backend.
    pub(crate) fn process(&mut self, t: &mut Tables, event: HardwareEvent) {
        match event {
            HardwareEvent::Cm { id, event } => self.cm_event(t, id, event),
            HardwareEvent::Request {
                listener,
                device,
                mut cm,
                private_data,
                initiator_depth,
                responder_resources,
            } => {
                let Some(Cm::Listener { .. }) = t.cms.get(listener) else {
                    return;
                };
                let id = t.cms.insert_with(|id| {
                    self.backend.number_request(&mut cm, id);
                    Some(Cm::Hard { object: cm, qp: None })
                });
                let kind = CmKind::ConnectRequest {
                    listener,
                    device: self.devices[device].ix,
                    private_data,
                    initiator_depth,
                    responder_resources,
                };
                self.events.extend(id.map(|id| Event::Cm { id, kind }));
            }
            HardwareEvent::Completions(cq) => {
                // An event of a queue that is gone has gone with it.
                if let Some(Cq::Hard { object, .. }) = t.cqs.get_mut(cq) {
                    self.backend.disarm(object);
                }
            }
            HardwareEvent::Async(device, event) => self.async_event(t, device, event),
            HardwareEvent::Removed(device) => self.device_removed(t, device),
            HardwareEvent::Changed => {
                for cm in t.cms.iter_mut() {
                    if let Cm::Listener { hard: Some(object), .. } = cm {
                        self.backend.listen_again(object);
                    }
                }
            }
        }
    }

    fn cm_event(&mut self, t: &mut Tables, id: CmRef, event: Object) {
        let mut kind = match t.cms.get_mut(id) {
            Some(Cm::Hard { object, qp }) => {
                let qp = qp.and_then(|qp| t.qps.get_mut(qp)).and_then(Qp::hard);
                self.backend.cm_event(object, qp, event)
            }
            Some(Cm::Listener { hard: Some(object), .. }) => self.backend.cm_event(object, None, event),
            _ => None,
        };
        if let Some(CmKind::Resolved { device }) = &mut kind {
            *device = self.devices[usize::from(device.0)].ix;
        }
        self.events.extend(kind.map(|kind| Event::Cm { id, kind }));
    }

    fn async_event(&mut self, t: &mut Tables, device: usize, event: AsyncEvent) {
        let device = &self.devices[device];
        match event {
            AsyncEvent::QpAccessError(qpn) => {
                let id = device.qps.get(&qpn.value());
                if let Some(qp) = id.and_then(|id| t.qps.get_mut(*id)) {
                    qp.violated = true;
                }
            }
            AsyncEvent::CommunicationEstablished(qpn) => {
                let id = device.qps.get(&qpn.value());
                for cm in t.cms.iter_mut() {
                    if let Cm::Hard { object, qp: Some(qp) } = cm
                        && Some(&*qp) == id
                    {
                        self.backend.communication_established(object);
                    }
                }
            }
            _ => {}
        }
        self.events.push_back(Event::Async(device.ix, event));
    }

    /// Ends what waits for a device that is gone. Its listeners keep their numbers, and nothing of the device.
    fn device_removed(&mut self, t: &mut Tables, device: usize) {
        self.events.push_back(Event::DeviceRemoved(self.devices[device].ix));
        for cm in t.cms.iter_mut() {
            if let Cm::Listener { hard: Some(object), .. } = cm {
                self.backend.lose_listener(object, device);
            }
        }
        let qps: Vec<QpId> = self.devices[device].qps.values().copied().collect();
        for id in qps {
            let qp = t.qps.get_mut(id).and_then(Qp::hard);
            if qp.is_some_and(|qp| self.backend.is_draining(qp)) {
                self.abandon(t, id);
            }
        }
    }
}
