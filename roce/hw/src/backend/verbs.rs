//! Verbs: calls of the library for objects by the fabric's numbers.

use std::net::SocketAddr;

use roce_port::fabric::{Backend, Connections, Keys};
use roce_verbs::{
    AccessFlags, Completion, Qpn, RecvWr, SendWr, WcFlags,
    provider::{
        CmRef, ConnParams, CqId, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo, PdId, QpId, QpSpec,
        Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

use super::{Cq, HwDevice};
use crate::{
    advice,
    cm::Cm,
    device::{Device, Pd},
    keys::{Key, NO_KEY},
    qp::{Qp, qp_of},
    sys,
};

/// Returns the error of an object that is not there.
fn gone(what: &str) -> VerbsError {
    VerbsError::Invalid(format!("no such {what}"))
}

/// Closes a key that may be open.
fn close(devices: &mut [Device], key: &mut Key) {
    if key.mr.is_some() {
        devices[key.device].windows.remove(&key.rkey().0);
        key.replace();
    }
}

impl HwDevice {
    fn pd(&self, pd: PdId) -> Result<&Pd, VerbsError> {
        self.pds.get(pd).ok_or_else(|| gone("protection domain"))
    }

    fn close_keys(&mut self, which: impl Fn(&Key) -> bool) {
        let keys = self.keys.iter_mut().map(|(_, key)| key);
        keys.filter(|key| which(key))
            .for_each(|key| close(&mut self.devices, key));
    }

    /// Closes the type 2 windows that were bound through a queue pair.
    pub(super) fn close_keys_of(&mut self, qp: QpId) {
        self.close_keys(|key| key.qp == Some(qp) && key.is_window_2());
    }

    /// Appends at most `max` completions of all queues.
    pub(super) fn poll_queues(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<(), VerbsError> {
        let before = out.len();
        let ready = self.flushed.len().min(max);
        out.extend(self.flushed.drain(..ready));
        let mut cqs = std::mem::take(&mut self.cqs);
        let mut polled = std::mem::take(&mut self.polled);
        let mut result = Ok(());
        for (_, cq) in cqs.iter_mut() {
            loop {
                polled.clear();
                match cq.raw.poll(&mut polled, max - (out.len() - before)) {
                    Ok(0) => break,
                    Ok(_) => out.extend(polled.drain(..).filter_map(|wc| self.completed(wc))),
                    Err(e) => {
                        result = Err(VerbsError::State(e.to_string()));
                        break;
                    }
                }
            }
        }
        (self.cqs, self.polled) = (cqs, polled);
        result
    }

    /// Returns a completion for the user. `None` of one that is not the user's.
    fn completed(&mut self, mut wc: Completion) -> Option<(QpId, Completion)> {
        let id = qp_of(wc.wr_id);
        let qp = self.qps.get_mut(id)?;
        let is_users = qp.complete(&mut wc);
        if qp.finish_drain() {
            // The user gets it after this completion: events are polled after completions.
            self.events.push_back(Event::Drained(id));
        }
        if !is_users {
            return None;
        }
        if wc.is_ok() && wc.flags.contains(WcFlags::WITH_INV) {
            let closed = self.devices[qp.device()].windows.remove(&wc.invalidated.0);
            if let Some(key) = closed.and_then(|id| self.keys.get_mut(id)) {
                key.invalidated();
            }
        }
        Some((id, wc))
    }
}

impl Backend for HwDevice {
    fn alloc_pd(&mut self, device: usize, id: PdId) -> Result<(), VerbsError> {
        let raw = sys::Pd::alloc(self.context(device)?);
        let raw = raw.map_err(|e| advice::failed("making a protection domain", e))?;
        self.pds.insert(id, Pd { device, raw });
        Ok(())
    }

    fn free_pd(&mut self, pd: PdId) {
        self.pds.remove(pd);
    }

    fn register(&mut self, pd: PdId, what: &Registration, id: MrId) -> Result<MrInfo, VerbsError> {
        let pd = self.pd(pd)?;
        let end = what
            .offset
            .checked_add(what.len)
            .filter(|end| *end <= what.memory.len());
        let end = end.ok_or_else(|| VerbsError::Invalid("the range is outside the memory".into()))?;
        let zero_based = what.access.contains(AccessFlags::ZERO_BASED);
        let iova = if zero_based { Some(0) } else { what.iova };
        let mr = sys::Mr::register(&pd.raw, &what.memory, what.offset..end, iova, what.access);
        let mr = mr.map_err(|e| advice::not_registered(&self.devices[pd.device].name, what.len, e))?;
        let (addr, len, (lkey, rkey)) = (mr.addr(), mr.len(), mr.keys());
        self.mrs.insert(id, mr);
        Ok(MrInfo {
            id,
            addr,
            len,
            lkey,
            rkey,
        })
    }

    fn deregister(&mut self, mr: MrId) {
        // It can't end with a window.
        self.close_keys(|key| key.mr == Some(mr));
        self.mrs.remove(mr);
    }

    fn create_cq(&mut self, device: usize, entries: u32, id: CqId) -> Result<(), VerbsError> {
        let raw = sys::Cq::create(self.context(device)?, entries.max(1), id.0.into());
        let cq = Cq {
            device,
            raw: raw.map_err(|e| advice::failed("making a completion queue", e))?,
            armed: false,
        };
        self.cqs.insert(id, cq);
        Ok(())
    }

    fn destroy_cq(&mut self, cq: CqId) {
        self.cqs.remove(cq);
    }

    fn create_qp(&mut self, spec: &QpSpec, id: QpId) -> Result<(), VerbsError> {
        let pd = self.pd(spec.pd)?;
        let cq = self.cqs.get(spec.cq).ok_or_else(|| gone("completion queue"))?;
        let (device, limits) = (&self.devices[pd.device], &self.caps[pd.device].limits);
        let qp = Qp::create(pd, &cq.raw, device, limits, spec, id)?;
        self.qps.insert(id, qp);
        Ok(())
    }

    /// rdma_rxe waits for the type 2 windows that are bound through it, for 50 s.
    fn destroy_qp(&mut self, qp: QpId) {
        self.close_keys_of(qp);
        self.qps.remove(qp);
        self.flushed.retain(|(of, _)| *of != qp);
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.qps.get(qp).map(Qp::qpn)
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.qps.get(qp).is_some_and(Qp::is_violated)
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        let qp = self.qps.get_mut(qp).ok_or((0, PostError::NoQueuePair))?;
        qp.post_send(&mut self.sends, wrs)
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let qp = self.qps.get_mut(qp).ok_or((0, PostError::NoQueuePair))?;
        qp.post_recv(&mut self.recvs, wrs)
    }

    fn drain(&mut self, id: QpId) {
        let Some(qp) = self.qps.get_mut(id) else { return };
        if !qp.drain(self.devices[qp.device()].gone, &mut self.sends) {
            self.abandon(id);
        } else if qp.finish_drain() {
            self.events.push_back(Event::Drained(id));
        }
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<(), VerbsError> {
        self.close_gone();
        self.poll_queues(out, max)
    }
}

impl Keys for HwDevice {
    fn alloc_key(&mut self, pd: PdId, kind: KeyKind, id: KeyId) -> Result<(), VerbsError> {
        let pd = self.pd(pd)?;
        let key = Key::alloc(pd, &self.caps[pd.device], kind)?;
        self.keys.insert(id, key);
        Ok(())
    }

    fn free_key(&mut self, key: KeyId) {
        if let Some(key) = self.keys.remove(key) {
            self.devices[key.device].windows.remove(&key.rkey().0);
        }
    }

    fn grant(&mut self, through: QpId, id: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        let qp = self.qps.get_mut(through).ok_or(PostError::NoQueuePair)?;
        let (Some(key), Some(mr)) = (self.keys.get_mut(id), self.mrs.get(grant.mr)) else {
            return Err(NO_KEY);
        };
        let former = key.rkey();
        let granted = key.grant(qp, mr, &mut self.sends, grant, wr_id)?;
        (key.mr, key.qp) = (Some(grant.mr), Some(through));
        if key.is_window_2() {
            let windows = &mut self.devices[key.device].windows;
            windows.remove(&former.0);
            windows.insert(granted.rkey().0, id);
        }
        Ok(granted)
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        let qp = self.qps.get_mut(qp).ok_or(PostError::NoQueuePair)?;
        let key = self.keys.get_mut(key).ok_or(NO_KEY)?;
        let mr = key.mr.and_then(|mr| self.mrs.get(mr));
        let revoked = key.revoke(qp, mr, &mut self.sends, wr_id)?;
        if key.is_window_2() {
            self.devices[key.device].windows.remove(&key.rkey().0);
        }
        Ok(revoked)
    }

    fn close_key(&mut self, key: KeyId) {
        if let Some(key) = self.keys.get_mut(key) {
            close(&mut self.devices, key);
        }
    }
}

impl Connections for HwDevice {
    fn connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let cm = self.cms.get_mut(id).ok_or_else(|| gone("connection"))?;
        let of = self.qps.get(qp).ok_or_else(|| gone("queue pair"))?;
        cm.connect((qp, of), params)
    }

    fn accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let cm = self.cms.get_mut(id).ok_or_else(|| gone("connection"))?;
        let of = self.qps.get_mut(qp).ok_or_else(|| gone("queue pair"))?;
        cm.accept((qp, of), params)
    }

    fn reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        let cm = self.cms.get_mut(id).ok_or_else(|| gone("connection"))?;
        cm.reject(reason, private_data)
    }

    fn disconnect(&mut self, id: CmRef) {
        if let Some(cm) = self.cms.get_mut(id) {
            let qp = cm.qp().and_then(|qp| self.qps.get_mut(qp));
            cm.disconnect(qp);
        }
    }

    fn destroy_cm(&mut self, id: CmRef) {
        self.cms.remove(id);
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, SocketAddr)> {
        self.cms.get(id).map(Cm::addrs)
    }
}
