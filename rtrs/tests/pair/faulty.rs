//! Fabric whose calls fail, or wait, when a test says so, and which records what is posted.

use core::{
    net::{IpAddr, SocketAddr},
    ops::{Deref, DerefMut},
};

use roce_bth::Qpn;
use roce_port::fabric::{Fabric, Several};
use roce_verbs::{
    Completion, RecvWr, SendOp, SendWr,
    provider::{
        CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo, PdId,
        Provider, QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

/// Calls that fail, each once it is reached.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Number of keys that can still be made.
    pub(crate) keys: Option<usize>,
    /// Number of registrations that can still be made.
    pub(crate) registrations: Option<usize>,
    /// Number of queue pairs that can still be made.
    pub(crate) qps: Option<usize>,
    /// The next accept fails.
    pub(crate) accept: bool,
    /// The next posted send is refused.
    pub(crate) post: Option<PostError>,
}

/// Work requests that were posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Posted {
    /// A send; sends of one call have one number.
    Send { call: u32, op: SendOp },
    /// Receives of one call.
    Recvs(usize),
}

/// The fabric of a host, and what is wrong with it.
pub(crate) struct Faulty {
    fabric: Fabric<Several>,
    pub(crate) faults: Faults,
    /// Queue pairs are drained when the test says so, with [`finish_drain`](Self::finish_drain).
    pub(crate) hold_drains: bool,
    /// Queue pairs whose drain is held up.
    pub(crate) draining: Vec<QpId>,
    /// Queue pairs of accepted connections.
    pub(crate) accepted: Vec<QpId>,
    /// Work requests posted since the test last emptied it; `None` records nothing.
    pub(crate) log: Option<Vec<Posted>>,
    calls: u32,
}

/// Counts down to a fault.
fn spend(left: &mut Option<usize>) -> Result<(), VerbsError> {
    match left {
        Some(0) => Err(VerbsError::Limit("a fault of the test's")),
        Some(n) => {
            *n -= 1;
            Ok(())
        }
        None => Ok(()),
    }
}

impl Faulty {
    pub(crate) fn new(fabric: Fabric<Several>) -> Self {
        Self {
            fabric,
            faults: Faults::default(),
            hold_drains: false,
            draining: Vec::new(),
            accepted: Vec::new(),
            log: None,
            calls: 0,
        }
    }

    /// Drains a queue pair whose drain was held up.
    pub(crate) fn finish_drain(&mut self, qp: QpId) {
        self.draining.retain(|of| *of != qp);
        self.fabric.drain(qp);
    }

    fn note(&mut self, posted: impl IntoIterator<Item = Posted>) {
        if let Some(log) = &mut self.log {
            log.extend(posted);
        }
    }
}

impl Deref for Faulty {
    type Target = Fabric<Several>;

    fn deref(&self) -> &Self::Target {
        &self.fabric
    }
}

impl DerefMut for Faulty {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.fabric
    }
}

impl Provider for Faulty {
    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        spend(&mut self.faults.registrations)?;
        self.fabric.register(pd, what)
    }

    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        spend(&mut self.faults.keys)?;
        self.fabric.alloc_key(pd, kind)
    }

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        spend(&mut self.faults.qps)?;
        self.fabric.create_qp(spec)
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.draining.retain(|of| *of != qp);
        self.accepted.retain(|of| *of != qp);
        self.fabric.destroy_qp(qp);
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        if let Some(fault) = self.faults.post.take() {
            return Err((0, fault));
        }
        self.calls += 1;
        let call = self.calls;
        self.note(wrs.iter().map(|wr| Posted::Send { call, op: wr.op }));
        self.fabric.post_send(qp, wrs)
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.note([Posted::Recvs(wrs.len())]);
        self.fabric.post_recv(qp, wrs)
    }

    fn drain(&mut self, qp: QpId) {
        assert!(!self.draining.contains(&qp), "drained twice");
        match self.hold_drains {
            true => self.draining.push(qp),
            false => self.fabric.drain(qp),
        }
    }

    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        if core::mem::take(&mut self.faults.accept) {
            return Err(VerbsError::State("a fault of the test's".into()));
        }
        self.accepted.push(qp);
        self.fabric.cm_accept(id, qp, params)
    }

    fn devices(&self) -> &[DeviceCaps] {
        self.fabric.devices()
    }

    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        self.fabric.alloc_pd(device)
    }

    fn free_pd(&mut self, pd: PdId) {
        self.fabric.free_pd(pd);
    }

    fn deregister(&mut self, mr: MrId) {
        self.fabric.deregister(mr);
    }

    fn free_key(&mut self, key: KeyId) {
        self.fabric.free_key(key);
    }

    fn create_cq(&mut self, device: DeviceIx, entries: u32) -> Result<CqId, VerbsError> {
        self.fabric.create_cq(device, entries)
    }

    fn destroy_cq(&mut self, cq: CqId) {
        self.fabric.destroy_cq(cq);
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        Provider::qpn(&self.fabric, qp)
    }

    fn grant_list(&mut self, qp: QpId, key: KeyId, pieces: &[GrantOf]) -> Result<Granted, PostError> {
        self.fabric.grant_list(qp, key, pieces)
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        self.fabric.grant(qp, key, grant, wr_id)
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        self.fabric.revoke(qp, key, wr_id)
    }

    fn close_key(&mut self, key: KeyId) {
        self.fabric.close_key(key);
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.fabric.access_violated(qp)
    }

    fn cm_listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        self.fabric.cm_listen(addr, backlog)
    }

    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        self.fabric.cm_resolve(src, dst)
    }

    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.fabric.cm_connect(id, qp, params)
    }

    fn cm_reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        self.fabric.cm_reject(id, reason, private_data)
    }

    fn cm_disconnect(&mut self, id: CmRef) {
        self.fabric.cm_disconnect(id);
    }

    fn cm_disconnect_by(&mut self, id: CmRef, ways: &[CmRef]) {
        self.fabric.cm_disconnect_by(id, ways);
    }

    fn cm_destroy(&mut self, id: CmRef) {
        self.fabric.cm_destroy(id);
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        self.fabric.cm_addrs(id)
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        self.fabric.poll_completions(out, max)
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.fabric.poll_event()
    }
}
