//! The trait, whose calls go to the backend of the object.

use core::net::{IpAddr, SocketAddr};

use roce_fault::Posting;
use roce_verbs::{
    Completion, Qpn, RecvWr, SendWr,
    provider::{
        CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, Lent, MrId, MrInfo,
        PdId, Provider, QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

use crate::{
    fabric::{Backend, Fabric},
    hard::Hard,
    hardware::Object,
    ports::Ports,
    slots::Slots,
    tables::{Cm, Cq, FULL, HardKey, Key, Mr, Pd, Qp, QpOf, gone},
};

/// Returns the RDMA devices: of an object or device that is theirs, there are some.
fn hard(hard: &mut Option<Hard>) -> Result<&mut Hard, VerbsError> {
    hard.as_mut().ok_or_else(|| gone("device"))
}

/// Returns the object of a queue pair that is to be used with an object of an RDMA device.
fn qp_object(qps: &mut Slots<Qp>, id: QpId) -> Result<&mut Object, VerbsError> {
    let qp = qps.get_mut(id).ok_or_else(|| gone("queue pair"))?;
    let foreign = || VerbsError::Invalid("the queue pair belongs to another device".into());
    qp.hard().ok_or_else(foreign)
}

impl<P: Ports> Provider for Fabric<P> {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        let pd = match self.backend(device)? {
            Backend::Soft(port) => self.alloc_soft_pd(port)?,
            Backend::Hard(device) => Pd::Hard {
                device,
                object: hard(&mut self.hard)?.backend.alloc_pd(device)?,
            },
        };
        self.tables.pds.insert(pd).ok_or(FULL)
    }

    fn free_pd(&mut self, pd: PdId) {
        if let Some(Pd::Soft {
            port,
            handle,
            borrowed: false,
        }) = self.tables.pds.remove(pd)
            && let Err(e) = self.ports.memory(port).dealloc_pd(handle)
        {
            tracing::error!("releasing a protection domain failed: {e}");
        }
    }

    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        match self.tables.pds.get(pd).ok_or_else(|| gone("protection domain"))? {
            Pd::Soft { port, handle, .. } => self.register_soft(*port, *handle, what),
            Pd::Hard { object, .. } => {
                let made = hard(&mut self.hard)?.backend.register(object, what)?;
                Ok(MrInfo {
                    id: self.tables.mrs.insert(Mr::Hard(made.object)).ok_or(FULL)?,
                    addr: made.addr,
                    len: what.len,
                    lkey: made.lkey,
                    rkey: made.rkey,
                })
            }
        }
    }

    fn deregister(&mut self, mr: MrId) {
        match (self.tables.mrs.get(mr), &mut self.hard) {
            (Some(Mr::Hard(_)), Some(hard)) => hard.deregister(&mut self.tables, mr),
            _ => self.deregister_soft(mr),
        }
    }

    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        let key = match self.tables.pds.get(pd).ok_or_else(|| gone("protection domain"))? {
            Pd::Soft { port, handle, .. } => Key::Soft(self.alloc_soft_key(*port, *handle, kind)?),
            Pd::Hard { device, object } => Key::Hard(HardKey {
                device: *device,
                kind,
                object: hard(&mut self.hard)?.backend.alloc_key(object, kind)?,
                mr: None,
                qp: None,
                open: None,
            }),
        };
        self.tables.keys.insert(key).ok_or(FULL)
    }

    fn free_key(&mut self, key: KeyId) {
        match (self.tables.keys.remove(key), &mut self.hard) {
            (Some(Key::Hard(mut key)), Some(hard)) => hard.forget_window(&mut key),
            (Some(Key::Soft(key)), _) => self.free_soft_key(&key),
            _ => {}
        }
    }

    fn lend_pd(&mut self, pd: PdId) -> Result<Lent, VerbsError> {
        self.lent_pd(pd)
    }

    fn borrow_pd(&mut self, device: DeviceIx, pd: &Lent) -> Result<PdId, VerbsError> {
        self.borrowed_pd(device, pd)
    }

    fn lend_mr(&mut self, mr: MrId) -> Result<Lent, VerbsError> {
        self.lent_mr(mr)
    }

    fn borrow_mr(&mut self, pd: PdId, mr: &Lent) -> Result<MrInfo, VerbsError> {
        self.borrowed_mr(pd, mr)
    }

    fn lend_key(&mut self, key: KeyId) -> Result<Lent, VerbsError> {
        self.lent_key(key)
    }

    fn borrow_key(&mut self, pd: PdId, key: &Lent) -> Result<KeyId, VerbsError> {
        self.borrowed_key(pd, key)
    }

    fn create_cq(&mut self, device: DeviceIx, entries: u32) -> Result<CqId, VerbsError> {
        let backend = self.backend(device)?;
        if entries > self.caps[usize::from(device.0)].limits.max_cqe {
            return Err(VerbsError::Limit("entries of a completion queue"));
        }
        let device = match backend {
            Backend::Soft(port) => return self.tables.cqs.insert(Cq::Soft { port }).ok_or(FULL),
            Backend::Hard(device) => device,
        };
        let (hard, mut failed) = (hard(&mut self.hard)?, None);
        let id = self.tables.cqs.insert_with(|id| {
            let made = hard.backend.create_cq(device, entries, id);
            let object = made.map_err(|e| failed = Some(e)).ok()?;
            Some(Cq::Hard { device, object })
        });
        hard.polling.extend(id);
        id.ok_or_else(|| failed.unwrap_or(FULL))
    }

    fn destroy_cq(&mut self, cq: CqId) {
        self.tables.cqs.remove(cq);
        if let Some(hard) = &mut self.hard {
            hard.polling.retain(|of| *of != cq);
        }
    }

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        let (device, pd) = match self.tables.pds.get(spec.pd).ok_or_else(|| gone("protection domain"))? {
            Pd::Soft { port, handle, .. } => return self.create_soft_qp(*port, *handle, spec),
            Pd::Hard { device, object } => (*device, object),
        };
        let cq = match self.tables.cqs.get(spec.cq) {
            Some(Cq::Hard { device: of, object }) if *of == device => object,
            _ => return Err(gone("completion queue of the device")),
        };
        let hard = hard(&mut self.hard)?;
        let (object, qpn) = hard.backend.create_qp(pd, cq, spec)?;
        let qp = Qp {
            qpn,
            violated: false,
            of: QpOf::Hard { device, object },
        };
        let id = self.tables.qps.insert(qp).ok_or(FULL)?;
        hard.devices[device].qps.insert(qpn.value(), id);
        Ok(id)
    }

    fn destroy_qp(&mut self, qp: QpId) {
        match (self.tables.qps.get(qp), &mut self.hard) {
            (
                Some(Qp {
                    of: QpOf::Hard { device, .. },
                    ..
                }),
                Some(hard),
            ) => {
                let device = *device;
                hard.destroy_qp(&mut self.tables, (device, qp));
            }
            (
                Some(Qp {
                    of: QpOf::Soft { port, .. },
                    qpn,
                    ..
                }),
                _,
            ) => self.destroy_soft_qp((*port, *qpn), qp),
            _ => {}
        }
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.tables.qps.get(qp).map(|qp| qp.qpn)
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        if let Some(hard) = &mut self.hard
            && let Some(object) = self.tables.qps.get_mut(qp).and_then(Qp::hard)
        {
            return hard.backend.post_send(object, wrs);
        }
        self.post(Posting::Send, qp, wrs, |port, now, qpn, wrs| {
            port.post_send(now, qpn, wrs)
        })
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        if let Some(hard) = &mut self.hard
            && let Some(object) = self.tables.qps.get_mut(qp).and_then(Qp::hard)
        {
            return hard.backend.post_recv(object, wrs);
        }
        self.post(Posting::Recv, qp, wrs, |port, now, qpn, wrs| {
            port.post_recv(now, qpn, wrs)
        })
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        match (self.soft_qp(qp), &mut self.hard) {
            (None, Some(hard)) => hard.grant(&mut self.tables, (qp, key), grant, wr_id),
            _ => self.grant_key(qp, key, grant, wr_id),
        }
    }

    fn grant_list(&mut self, qp: QpId, key: KeyId, pieces: &[GrantOf]) -> Result<Granted, PostError> {
        match self.tables.qps.get(qp).map(|qp| &qp.of) {
            Some(QpOf::Hard { .. }) => Err(PostError::Invalid("the device's keys open one piece of memory")),
            _ => self.grant_pieces(qp, key, pieces),
        }
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        match (self.soft_qp(qp), &mut self.hard) {
            (None, Some(hard)) => hard.revoke(&mut self.tables, qp, key, wr_id),
            _ => self.revoke_key(qp, key, wr_id),
        }
    }

    fn close_key(&mut self, key: KeyId) {
        match (self.tables.keys.get_mut(key), &mut self.hard) {
            (Some(Key::Hard(key)), Some(hard)) => hard.close_key(key),
            _ => self.shut_key(key),
        }
    }

    fn drain(&mut self, qp: QpId) {
        match (self.soft_qp(qp), &mut self.hard) {
            (Some((port, qpn, _)), _) => self.drain_soft(port, qpn, qp),
            (None, Some(hard)) => hard.drain(&mut self.tables, qp),
            (None, None) => {}
        }
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.tables.qps.get(qp).is_some_and(|qp| qp.violated)
    }

    fn cm_listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        self.listen(addr, backlog)
    }

    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        self.resolve(src, dst)
    }

    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        match (self.tables.cms.get_mut(id), &mut self.hard) {
            (Some(Cm::Hard { object, qp: of }), Some(hard)) => {
                let connecting = qp_object(&mut self.tables.qps, qp)?;
                hard.backend.connect(object, connecting, params)?;
                *of = Some(qp);
                Ok(())
            }
            _ => self.connect(id, qp, params),
        }
    }

    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        match (self.tables.cms.get_mut(id), &mut self.hard) {
            (Some(Cm::Hard { object, qp: of }), Some(hard)) => {
                let accepting = qp_object(&mut self.tables.qps, qp)?;
                hard.backend.accept(object, accepting, params)?;
                *of = Some(qp);
                Ok(())
            }
            _ => self.accept(id, qp, params),
        }
    }

    fn cm_reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        match (self.tables.cms.get_mut(id), &mut self.hard) {
            (Some(Cm::Hard { object, .. }), Some(hard)) => hard.backend.reject(object, reason, private_data)?,
            _ => self.reject(id, reason, private_data)?,
        }
        self.forget(id);
        Ok(())
    }

    fn cm_disconnect(&mut self, id: CmRef) {
        match (self.tables.cms.get_mut(id), &mut self.hard) {
            (Some(Cm::Hard { object, qp }), Some(hard)) => {
                let qp = qp.and_then(|qp| self.tables.qps.get_mut(qp)).and_then(Qp::hard);
                hard.backend.disconnect(object, qp);
            }
            _ => self.disconnect(id),
        }
    }

    fn cm_disconnect_by(&mut self, id: CmRef, ways: &[CmRef]) {
        self.cm_disconnect(id);
        self.disconnect_by(id, ways);
    }

    fn cm_destroy(&mut self, id: CmRef) {
        self.forget(id);
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        match self.tables.cms.get(id)? {
            Cm::Listener { addr, .. } => Some((*addr, None)),
            Cm::Resolved { local, remote, .. } | Cm::Conn { local, remote, .. } => Some((*local, Some(*remote))),
            Cm::Hard { object, .. } => Some(self.hard.as_ref()?.backend.cm_addrs(object)),
        }
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        self.take_cm_events();
        self.poll_all(out, max)
    }

    fn poll_event(&mut self) -> Option<Event> {
        let of_hard = |hard: &mut Option<Hard>| hard.as_mut()?.events.pop_front();
        while let Some(event) = self.events.pop_front().or_else(|| of_hard(&mut self.hard)) {
            if self.is_live(&event) {
                return Some(event);
            }
        }
        self.take_cm_events();
        self.next_cm_event().or_else(|| self.next_async_event())
    }
}
