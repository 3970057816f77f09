//! The trait: a number of the fabric, and a call of the backend that has the object.

use core::net::{IpAddr, SocketAddr};

use roce_verbs::{
    Completion, Qpn, RecvWr, SendWr,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo,
        PdId, Provider, QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

use super::{Cm, Device, Fabric, Kind};
use crate::fabric::{backend::Backend, ports::Ports, soft::gone};

impl<P: Ports> Fabric<P> {
    fn pd(&self, pd: PdId) -> Result<Device, VerbsError> {
        let device = self.pds.get(pd).copied();
        device.ok_or_else(|| gone("protection domain"))
    }

    fn qp(&mut self, qp: QpId) -> Option<&mut dyn Backend> {
        Some(self.backends.of(self.qps.get(qp)?.kind))
    }

    fn qp_ref(&self, qp: QpId) -> Option<&dyn Backend> {
        Some(self.backends.of_ref(self.qps.get(qp)?.kind))
    }

    /// Returns the device of a queue pair, a key and registrations.
    fn together(&self, qp: QpId, key: KeyId, pieces: &[GrantOf]) -> Result<Device, PostError> {
        let device = *self.qps.get(qp).ok_or(PostError::NoQueuePair)?;
        if self.keys.get(key) != Some(&device) {
            return Err(PostError::Invalid("no such key on the device"));
        }
        if pieces.iter().any(|piece| self.mrs.get(piece.mr) != Some(&device)) {
            return Err(PostError::Invalid("no such registration on the device"));
        }
        Ok(device)
    }
}

impl<P: Ports> Provider for Fabric<P> {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        let device = self.device(device)?;
        self.pds.make(device, |id| {
            self.backends.of(device.kind).alloc_pd(device.index, id).map(|()| id)
        })
    }

    fn free_pd(&mut self, pd: PdId) {
        if let Some(device) = self.pds.remove(pd) {
            self.backends.of(device.kind).free_pd(pd);
        }
    }

    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        let device = self.pd(pd)?;
        self.mrs
            .make(device, |id| self.backends.of(device.kind).register(pd, what, id))
    }

    fn deregister(&mut self, mr: MrId) {
        if let Some(device) = self.mrs.remove(mr) {
            self.backends.of(device.kind).deregister(mr);
        }
    }

    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        let device = self.pd(pd)?;
        self.keys.make(device, |id| {
            self.backends.of(device.kind).alloc_key(pd, kind, id).map(|()| id)
        })
    }

    fn free_key(&mut self, key: KeyId) {
        if let Some(device) = self.keys.remove(key) {
            self.backends.of(device.kind).free_key(key);
        }
    }

    fn create_cq(&mut self, ix: DeviceIx, entries: u32) -> Result<CqId, VerbsError> {
        let device = self.device(ix)?;
        if entries > self.caps[usize::from(ix.0)].limits.max_cqe {
            return Err(VerbsError::Limit("entries of a completion queue"));
        }
        self.cqs.make(device, |id| {
            self.backends
                .of(device.kind)
                .create_cq(device.index, entries, id)
                .map(|()| id)
        })
    }

    fn destroy_cq(&mut self, cq: CqId) {
        if let Some(device) = self.cqs.remove(cq) {
            self.backends.of(device.kind).destroy_cq(cq);
        }
    }

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        let device = self.pd(spec.pd)?;
        if self.cqs.get(spec.cq) != Some(&device) {
            return Err(gone("completion queue of the device"));
        }
        self.qps.make(device, |id| {
            self.backends.of(device.kind).create_qp(spec, id).map(|()| id)
        })
    }

    fn destroy_qp(&mut self, qp: QpId) {
        if let Some(device) = self.qps.remove(qp) {
            self.backends.of(device.kind).destroy_qp(qp);
        }
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.qp_ref(qp)?.qpn(qp)
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        let backend = self.qp(qp).ok_or((0, PostError::NoQueuePair))?;
        backend.post_send(qp, wrs)
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let backend = self.qp(qp).ok_or((0, PostError::NoQueuePair))?;
        backend.post_recv(qp, wrs)
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        let device = self.together(qp, key, std::slice::from_ref(grant))?;
        self.backends.of(device.kind).grant(qp, key, grant, wr_id)
    }

    fn grant_list(&mut self, qp: QpId, key: KeyId, pieces: &[GrantOf]) -> Result<Granted, PostError> {
        match self.together(qp, key, pieces)?.kind {
            Kind::Soft => self.backends.soft.grant_list(qp, key, pieces),
            Kind::Hard => Err(PostError::Invalid("the device's keys open one piece of memory")),
        }
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        let device = self.together(qp, key, &[])?;
        self.backends.of(device.kind).revoke(qp, key, wr_id)
    }

    fn close_key(&mut self, key: KeyId) {
        if let Some(device) = self.keys.get(key).copied() {
            self.backends.of(device.kind).close_key(key);
        }
    }

    fn drain(&mut self, qp: QpId) {
        if let Some(backend) = self.qp(qp) {
            backend.drain(qp);
        }
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.qp_ref(qp).is_some_and(|backend| backend.access_violated(qp))
    }

    fn cm_listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        self.listen(addr, backlog)
    }

    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        self.resolve(src, dst)
    }

    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.conn_with(id, qp)?.connect(id, qp, params)
    }

    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.conn_with(id, qp)?.accept(id, qp, params)
    }

    fn cm_reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        self.conn(id)?.reject(id, reason, private_data)?;
        self.forget(id);
        Ok(())
    }

    fn cm_disconnect(&mut self, id: CmRef) {
        if let Ok(backend) = self.conn(id) {
            backend.disconnect(id);
        }
    }

    fn cm_disconnect_by(&mut self, id: CmRef, ways: &[CmRef]) {
        self.cm_disconnect(id);
        self.backends.soft.disconnect_by(id, ways);
    }

    fn cm_destroy(&mut self, id: CmRef) {
        self.forget(id);
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        let addrs = match self.cms.get(id)? {
            Cm::Listener(addr) => return Some((*addr, None)),
            Cm::Conn(kind) => self.backends.of_ref(*kind).cm_addrs(id)?,
        };
        Some((addrs.0, Some(addrs.1)))
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        self.take_cm_events();
        let before = out.len();
        // By turns, so that neither starves the other.
        self.hard_first = !self.hard_first;
        for is_hard in [self.hard_first, !self.hard_first] {
            let room = max - (out.len() - before);
            match &mut self.backends.hard {
                Some(hard) if is_hard => hard.backend.poll_completions(out, room)?,
                _ if is_hard => {}
                _ => self.backends.soft.poll_completions(out, room)?,
            }
        }
        Ok(out.len() - before)
    }

    /// Returns the next event of an object that exists. Rejects a connect request whose listener does not.
    fn poll_event(&mut self) -> Option<Event> {
        loop {
            let mut new = || self.cms.insert(Cm::Conn(Kind::Soft)).ok();
            let (mut event, kind) = match self.backends.soft.next_event(&mut new) {
                Some(event) => (event, Kind::Soft),
                None => (self.backends.hard.as_mut()?.backend.next_event()?, Kind::Hard),
            };
            if let Event::Async(ix, _)
            | Event::DeviceRemoved(ix)
            | Event::Cm {
                kind: CmKind::Resolved { device: ix } | CmKind::ConnectRequest { device: ix, .. },
                ..
            } = &mut event
            {
                let index = usize::from(ix.0);
                *ix = self.ix(Device { kind, index }).unwrap_or(*ix);
            }
            let is_live = match &event {
                Event::Drained(qp) => self.qps.get(*qp).is_some(),
                Event::Cm {
                    id,
                    kind: CmKind::ConnectRequest { listener, .. },
                } if self.cms.get(*listener).is_none() => {
                    self.forget(*id);
                    false
                }
                Event::Cm { id, .. } => self.cms.get(*id).is_some(),
                _ => true,
            };
            if is_live {
                return Some(event);
            }
        }
    }
}
