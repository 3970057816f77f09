//! Devices of a node that is replayed: they keep what it posts, and hand it what its captured peer has sent.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_bth::{Qpn, RKey};
use roce_verbs::{
    AccessFlags, Completion, DeviceLimits, Instant, Payload, RecvWr, SendFlags, SendWr, Sge, WcFlags, WcOpcode,
    WcStatus,
    mem::{MemoryTable, PdHandle, Region},
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo,
        PdId, Provider, QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

/// The only device.
pub(super) const DEVICE: DeviceIx = DeviceIx(0);

/// Addresses of a connection of the connection manager: ours, and the peer's.
type Ends = (SocketAddr, Option<SocketAddr>);

/// Queue pair: its domain, and the receives that wait.
type Receives = (PdId, VecDeque<(u64, Vec<Sge>)>);

/// Devices of a node that is replayed.
#[derive(Debug)]
pub(super) struct Recorded {
    caps: [DeviceCaps; 1],
    table: Arc<MemoryTable>,
    domains: BTreeMap<PdId, PdHandle>,
    regions: BTreeMap<MrId, Arc<Region>>,
    qps: BTreeMap<QpId, Receives>,
    ids: BTreeMap<CmRef, Ends>,
    number: u32,
    /// Connections that the node wants to begin.
    pub(super) resolving: Vec<CmRef>,
    /// Private data, queue pair and connection of its requests to connect, and of its answers.
    pub(super) calls: Vec<(CmRef, QpId, Vec<u8>)>,
    /// SENDs.
    pub(super) posted: Vec<(QpId, Vec<u8>)>,
    /// It has refused a request.
    pub(super) rejected: bool,
    completions: VecDeque<(QpId, Completion)>,
    events: VecDeque<Event>,
}

impl Recorded {
    pub(super) fn new(addr: IpAddr) -> Self {
        let limits = DeviceLimits::software(1);
        Self {
            table: Arc::new(MemoryTable::new([7; 32], &limits)),
            caps: [DeviceCaps {
                name: None,
                limits,
                fast_registration: true,
                window_1: true,
                window_2: true,
                tells_invalidated: true,
                instant_keys: false,
                scattered_keys: true,
                zero_based: true,
                iova: true,
                addrs: vec![addr],
            }],
            domains: BTreeMap::new(),
            regions: BTreeMap::new(),
            qps: BTreeMap::new(),
            ids: BTreeMap::new(),
            number: 0,
            resolving: Vec::new(),
            calls: Vec::new(),
            posted: Vec::new(),
            rejected: false,
            completions: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    fn number(&mut self) -> u32 {
        self.number += 1;
        self.number
    }

    /// Returns whether there are events or completions.
    pub(super) fn has_news(&self) -> bool {
        !self.events.is_empty() || !self.completions.is_empty()
    }

    pub(super) fn next_completion(&mut self) -> Option<(QpId, Completion)> {
        self.completions.pop_front()
    }

    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// An event of a connection.
    pub(super) fn event(&mut self, id: CmRef, kind: CmKind) {
        self.events.push_back(Event::Cm { id, kind });
    }

    /// A peer's request to connect.
    pub(super) fn request(&mut self, local: SocketAddr, peer: SocketAddr, private_data: Vec<u8>) -> Option<CmRef> {
        let (listener, _) = self.ids.iter().find(|(_, ends)| **ends == (local, None))?;
        let listener = *listener;
        let id = CmRef::from(self.number());
        self.ids.insert(id, (local, Some(peer)));
        let kind = CmKind::ConnectRequest {
            listener,
            device: DEVICE,
            private_data,
            initiator_depth: 128,
            responder_resources: 128,
        };
        self.event(id, kind);
        Some(id)
    }

    /// A SEND of the peer. Returns whether a receive waited for it.
    pub(super) fn deliver(&mut self, qp: QpId, bytes: &[u8]) -> bool {
        let Some((pd, receives)) = self.qps.get_mut(&qp) else {
            return false;
        };
        let Some((wr_id, sges)) = receives.pop_front() else {
            return false;
        };
        let [sge] = &sges[..] else { return false };
        let span = self
            .table
            .resolve_local(self.domains[pd], sge, AccessFlags::LOCAL_WRITE);
        if !span.is_ok_and(|span| span.write(0, bytes).is_ok()) {
            return false;
        }
        let wc = completion(wr_id, WcOpcode::Recv, bytes.len() as u32);
        self.completions.push_back((qp, wc));
        true
    }

    fn send(&mut self, qp: QpId, wr: &SendWr<'_>) -> Option<()> {
        let (pd, _) = self.qps.get(&qp)?;
        let Payload::Sges(sges) = wr.payload else { return None };
        let mut bytes = Vec::new();
        for sge in sges {
            let at = bytes.len();
            bytes.resize(at + sge.length as usize, 0);
            let span = self
                .table
                .resolve_local(self.domains[pd], sge, AccessFlags::empty())
                .ok()?;
            span.read(0, &mut bytes[at..]).ok()?;
        }
        self.posted.push((qp, bytes));
        if wr.flags.contains(SendFlags::SIGNALED) {
            let wc = completion(wr.wr_id, WcOpcode::Send, 0);
            self.completions.push_back((qp, wc));
        }
        Some(())
    }
}

fn completion(wr_id: u64, opcode: WcOpcode, byte_len: u32) -> Completion {
    Completion {
        wr_id,
        status: WcStatus::Success,
        opcode,
        vendor_err: 0,
        byte_len,
        imm: 0,
        invalidated: RKey(0),
        qpn: Qpn::new(0),
        src_qp: Qpn::new(0),
        pkey_index: 0,
        sl: 0,
        timestamp: Instant::ZERO,
        flags: WcFlags::empty(),
        solicited: false,
    }
}

fn nothing<T>() -> Result<T, VerbsError> {
    Err(VerbsError::Invalid("a node that is replayed has no such thing".into()))
}

impl Provider for Recorded {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn alloc_pd(&mut self, _: DeviceIx) -> Result<PdId, VerbsError> {
        let Ok(handle) = self.table.alloc_pd() else {
            return nothing();
        };
        let id = PdId::from(self.number());
        self.domains.insert(id, handle);
        Ok(id)
    }

    fn free_pd(&mut self, _: PdId) {}

    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        let range = what.offset..what.offset + what.len;
        let made = self
            .table
            .register_memory(self.domains[&pd], &what.memory, range, what.iova, what.access);
        let Ok(region) = made else { return nothing() };
        let id = MrId::from(self.number());
        let info = MrInfo {
            id,
            addr: region.addr(),
            len: region.len(),
            lkey: region.lkey(),
            rkey: region.rkey(),
        };
        self.regions.insert(id, region);
        Ok(info)
    }

    fn deregister(&mut self, mr: MrId) {
        self.regions.remove(&mr);
    }

    fn alloc_key(&mut self, _: PdId, _: KeyKind) -> Result<KeyId, VerbsError> {
        nothing()
    }

    fn free_key(&mut self, _: KeyId) {}

    fn create_cq(&mut self, _: DeviceIx, _: u32) -> Result<CqId, VerbsError> {
        Ok(CqId::from(self.number()))
    }

    fn destroy_cq(&mut self, _: CqId) {}

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        let id = QpId::from(self.number());
        self.qps.insert(id, (spec.pd, VecDeque::new()));
        Ok(id)
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.qps.remove(&qp);
        self.completions.retain(|(of, _)| *of != qp);
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.qps.contains_key(&qp).then(|| Qpn::new(qp.0))
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        for (n, wr) in wrs.iter().enumerate() {
            self.send(qp, wr)
                .ok_or((n, PostError::Invalid("memory that is not registered")))?;
        }
        Ok(())
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let (_, receives) = self.qps.get_mut(&qp).ok_or((0, PostError::Invalid("no queue pair")))?;
        receives.extend(wrs.iter().map(|wr| (wr.wr_id, wr.sges.to_vec())));
        Ok(())
    }

    fn grant(&mut self, _: QpId, _: KeyId, _: &GrantOf, _: u64) -> Result<Granted, PostError> {
        Err(PostError::Invalid("no keys"))
    }

    fn revoke(&mut self, _: QpId, _: KeyId, _: u64) -> Result<Revoked, PostError> {
        Err(PostError::Invalid("no keys"))
    }

    fn close_key(&mut self, _: KeyId) {}

    fn drain(&mut self, qp: QpId) {
        self.events.push_back(Event::Drained(qp));
    }

    fn access_violated(&self, _: QpId) -> bool {
        false
    }

    fn cm_listen(&mut self, addr: SocketAddr, _: u32) -> Result<CmRef, VerbsError> {
        let id = CmRef::from(self.number());
        self.ids.insert(id, (addr, None));
        Ok(id)
    }

    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        let Some(src) = src else { return nothing() };
        let id = CmRef::from(self.number());
        self.ids.insert(id, ((src, 0).into(), Some(dst)));
        self.resolving.push(id);
        Ok(id)
    }

    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.calls.push((id, qp, params.private_data.clone()));
        Ok(())
    }

    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.calls.push((id, qp, params.private_data.clone()));
        Ok(())
    }

    fn cm_reject(&mut self, id: CmRef, _: RejectReason, _: &[u8]) -> Result<(), VerbsError> {
        self.rejected = true;
        self.ids.remove(&id);
        Ok(())
    }

    fn cm_disconnect(&mut self, _: CmRef) {}

    fn cm_destroy(&mut self, id: CmRef) {
        self.ids.remove(&id);
        self.resolving.retain(|of| *of != id);
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        self.ids.get(&id).copied()
    }

    fn poll_completions(&mut self, _: &mut Vec<(QpId, Completion)>, _: usize) -> Result<usize, VerbsError> {
        Ok(0)
    }

    fn poll_event(&mut self) -> Option<Event> {
        None
    }
}
