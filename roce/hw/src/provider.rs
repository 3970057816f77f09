//! The trait.

use std::net::{IpAddr, SocketAddr};

use roce_verbs::{
    Completion, Qpn, RecvWr, SendWr,
    provider::{
        CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo, PdId,
        Provider, QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

use crate::{cm::Cm, device::HwDevice};

impl Provider for HwDevice {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        self.make_pd(device)
    }

    fn free_pd(&mut self, pd: PdId) {
        self.pds.remove(pd);
    }

    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        self.add_mr(pd, what)
    }

    fn deregister(&mut self, mr: MrId) {
        self.end_mr(mr);
    }

    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        self.make_key(pd, kind)
    }

    fn free_key(&mut self, key: KeyId) {
        self.end_key(key);
    }

    fn create_cq(&mut self, device: DeviceIx, entries: u32) -> Result<CqId, VerbsError> {
        self.make_cq(device, entries)
    }

    fn destroy_cq(&mut self, cq: CqId) {
        self.end_cq(cq);
    }

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        self.make_qp(spec)
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.end_qp(qp);
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.qps.get(qp).map(|qp| qp.qpn)
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.send(qp, wrs)
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.receive(qp, wrs)
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        self.grant_key(qp, key, grant, wr_id)
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        self.revoke_key(qp, key, wr_id)
    }

    fn close_key(&mut self, key: KeyId) {
        self.shut_key(key);
    }

    fn drain(&mut self, qp: QpId) {
        self.drain_qp(qp);
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.qps.get(qp).is_some_and(|qp| qp.violated)
    }

    fn cm_listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        self.listen(addr, backlog)
    }

    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        self.resolve(src, dst)
    }

    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.connect(id, qp, params)
    }

    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.accept(id, qp, params)
    }

    fn cm_reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        self.reject(id, reason, private_data)
    }

    fn cm_disconnect(&mut self, id: CmRef) {
        self.disconnect(id);
    }

    fn cm_destroy(&mut self, id: CmRef) {
        self.forget(id);
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        self.cms.get(id).map(Cm::addrs)
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        // What was given back since may have been the last.
        self.close_gone();
        self.take_completions(out, max)
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}
