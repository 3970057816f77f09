//! A provider in memory that does nothing by itself: it records what is posted, and the test says what comes of it.
//!
//! Keys and registrations are real ([`MemoryTable`]), so that a test sees what a peer may write. Misuse panics: an object that is
//! freed while others are in it, memory that ends while a queue pair still has it, more posted than a queue holds.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_verbs::mem::{FastRegion, KeyError, MemoryTable, PdHandle, PostedKey, Region, Span, Window, WindowKind};
use roce_verbs::{
    AccessFlags, Completion, DeviceLimits, LKey, Payload, QpCaps, Qpn, RKey, RecvWr, SendFlags, SendOp, SendWr, Sge,
    WcFlags, WcOpcode, WcStatus,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo,
        PdId, Provider, QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
    wr::{BindWindow, FastRegister, PostError},
};

/// How a device handles keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Keys {
    /// At once.
    pub(crate) instant: bool,
    /// There are fast registrations.
    pub(crate) fast: bool,
    /// There are windows.
    pub(crate) windows: bool,
}

impl Keys {
    /// As the software device's.
    pub(crate) const INSTANT: Self = Self {
        instant: true,
        fast: true,
        windows: true,
    };
    /// As hardware's, with fast registrations.
    pub(crate) const QUEUED: Self = Self {
        instant: false,
        ..Self::INSTANT
    };
    /// As hardware's in userspace.
    pub(crate) const WINDOWS: Self = Self {
        fast: false,
        ..Self::QUEUED
    };
    /// None.
    pub(crate) const STATIC: Self = Self {
        instant: false,
        fast: false,
        windows: false,
    };
}

/// A work request, or what counts as one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Posted {
    /// Of [`Provider::post_send`]; requests of one call have one number.
    Send {
        /// The call.
        call: u32,
        /// The mark.
        wr_id: u64,
        /// What.
        op: SendOp,
        /// It makes a completion.
        signaled: bool,
        /// The bytes as they were when it was posted.
        data: Vec<u8>,
    },
    /// So many receives at once.
    Recvs(usize),
    /// A key was granted.
    Grant(KeyId, RKey),
    /// A key was taken back.
    Revoke(KeyId),
}

/// A send work request that is under way.
#[derive(Debug)]
struct Outstanding {
    wr_id: u64,
    opcode: WcOpcode,
    signaled: bool,
    lkeys: Vec<LKey>,
}

#[derive(Debug)]
struct Qp {
    pd: PdId,
    cq: CqId,
    caps: QpCaps,
    sends: VecDeque<Outstanding>,
    recvs: VecDeque<(u64, Vec<Sge>)>,
    failed: bool,
    violated: bool,
}

#[derive(Debug)]
enum Object {
    Fast(Arc<FastRegion>),
    Window(Arc<Window>),
}

#[derive(Debug)]
struct Key {
    pd: PdId,
    kind: KeyKind,
    object: Object,
    posted: PostedKey,
}

/// A connection or a listener.
#[derive(Clone, Debug)]
pub(crate) struct Cm {
    /// Our address.
    pub(crate) local: SocketAddr,
    /// The peer's.
    pub(crate) peer: Option<SocketAddr>,
    /// The queue pair that it was accepted or connected with.
    pub(crate) qp: Option<QpId>,
    /// What went with the accept or connect.
    pub(crate) params: Option<ConnParams>,
    /// We have disconnected.
    pub(crate) disconnected: bool,
}

/// What is to go wrong, each once it is reached.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// So many keys can be made still.
    pub(crate) keys: Option<usize>,
    /// So many registrations can be made still.
    pub(crate) registrations: Option<usize>,
    /// So many queue pairs can be made still.
    pub(crate) qps: Option<usize>,
    /// The next accept fails.
    pub(crate) accept: bool,
    /// The next posted send is refused.
    pub(crate) post: Option<PostError>,
}

/// How many objects there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) pds: usize,
    pub(crate) mrs: usize,
    pub(crate) keys: usize,
    pub(crate) cqs: usize,
    pub(crate) qps: usize,
    pub(crate) cms: usize,
}

/// See the module.
pub(crate) struct Scripted {
    /// What the devices can do, to be changed before anything is made.
    pub(crate) caps: Vec<DeviceCaps>,
    tables: Vec<MemoryTable>,
    pds: BTreeMap<PdId, (usize, PdHandle)>,
    mrs: BTreeMap<MrId, (PdId, Arc<Region>)>,
    keys: BTreeMap<KeyId, Key>,
    cqs: BTreeMap<CqId, u32>,
    qps: BTreeMap<QpId, Qp>,
    /// Connections and listeners.
    pub(crate) cms: BTreeMap<CmRef, Cm>,
    next: u32,
    calls: u32,
    /// What is to be polled; the test may add to both.
    pub(crate) completions: VecDeque<(QpId, Completion)>,
    pub(crate) events: VecDeque<Event>,
    /// All that was posted, until the test takes it.
    pub(crate) log: Vec<(QpId, Posted)>,
    /// What was refused, with the private data.
    pub(crate) rejected: Vec<(CmRef, Vec<u8>)>,
    /// Queue pairs that are to be drained, until the test lets them.
    pub(crate) draining: Vec<QpId>,
    /// Sends complete when completions are polled.
    pub(crate) auto_complete: bool,
    /// Queue pairs are drained at once.
    pub(crate) auto_drain: bool,
    pub(crate) faults: Faults,
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

fn ended(wr_id: u64, status: WcStatus, opcode: WcOpcode) -> Completion {
    Completion {
        wr_id,
        status,
        opcode,
        ..Completion::default()
    }
}

fn window(key: RKey, lkey: LKey, addr: u64, length: u64, access: AccessFlags) -> BindWindow {
    BindWindow {
        key,
        lkey,
        addr,
        length,
        access,
    }
}

impl Scripted {
    /// One device for each.
    pub(crate) fn new(devices: &[Keys]) -> Self {
        let caps = devices.iter().enumerate().map(|(i, keys)| DeviceCaps {
            name: None,
            limits: DeviceLimits::software(i as u64),
            fast_registration: keys.fast,
            window_1: keys.windows,
            window_2: keys.windows,
            tells_invalidated: true,
            instant_keys: keys.instant,
            scattered_keys: false,
            zero_based: true,
            iova: true,
            addrs: vec![IpAddr::from([192, 0, 2, i as u8 + 1])],
        });
        let caps: Vec<_> = caps.collect();
        let tables = caps
            .iter()
            .map(|caps| MemoryTable::new([7; 32], &caps.limits))
            .collect();
        Self {
            caps,
            tables,
            pds: BTreeMap::new(),
            mrs: BTreeMap::new(),
            keys: BTreeMap::new(),
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            cms: BTreeMap::new(),
            next: 1,
            calls: 0,
            completions: VecDeque::new(),
            events: VecDeque::new(),
            log: Vec::new(),
            rejected: Vec::new(),
            draining: Vec::new(),
            auto_complete: true,
            auto_drain: true,
            faults: Faults::default(),
        }
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage {
            pds: self.pds.len(),
            mrs: self.mrs.len(),
            keys: self.keys.len(),
            cqs: self.cqs.len(),
            qps: self.qps.len(),
            cms: self.cms.len(),
        }
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// Takes what was posted so far.
    pub(crate) fn take_log(&mut self) -> Vec<(QpId, Posted)> {
        core::mem::take(&mut self.log)
    }

    /// The sends of a queue pair so far, taken off the log; receives go with them.
    pub(crate) fn take_sends(&mut self, qp: QpId) -> Vec<(SendOp, Vec<u8>)> {
        let send = |(_, posted)| match posted {
            Posted::Send { op, data, .. } => Some((op, data)),
            _ => None,
        };
        let mine = self.log.extract_if(.., |(of, _)| *of == qp);
        mine.filter_map(send).collect()
    }

    /// The queue pair of a connection.
    pub(crate) fn qp_of(&self, cm: CmRef) -> QpId {
        self.cms[&cm].qp.expect("a connection with a queue pair")
    }

    /// The queue pair of a connection, as long as messages come over it.
    pub(crate) fn live(&self, cm: CmRef) -> Option<QpId> {
        let id = self.cms.get(&cm).filter(|cm| !cm.disconnected)?.qp?;
        let qp = self.qps.get(&id)?;
        (!qp.failed).then_some(id)
    }

    fn place(&self, qp: QpId) -> (usize, PdHandle) {
        self.pds[&self.qps[&qp].pd]
    }

    /// Receives that wait for messages.
    pub(crate) fn recvs(&self, qp: QpId) -> usize {
        self.qps[&qp].recvs.len()
    }

    /// Slots of a send queue that are taken.
    pub(crate) fn slots(&self, qp: QpId) -> usize {
        self.qps[&qp].sends.len()
    }

    /// Somebody wants to connect.
    pub(crate) fn ask(
        &mut self,
        listener: CmRef,
        device: u16,
        local: SocketAddr,
        peer: SocketAddr,
        private_data: Vec<u8>,
    ) -> CmRef {
        let id = self.make_cm(local, Some(peer));
        let kind = CmKind::ConnectRequest {
            listener,
            device: DeviceIx(device),
            private_data,
            initiator_depth: 0,
            responder_resources: 0,
        };
        self.tell(id, kind);
        id
    }

    fn make_cm(&mut self, local: SocketAddr, peer: Option<SocketAddr>) -> CmRef {
        let id = CmRef(self.number());
        let made = Cm {
            local,
            peer,
            qp: None,
            params: None,
            disconnected: false,
        };
        self.cms.insert(id, made);
        id
    }

    fn forget_events(&mut self, id: CmRef) {
        let of_it = |event: &Event| matches!(event, Event::Cm { id: of, .. } if *of == id);
        self.events.retain(|event| !of_it(event));
    }

    /// Something happens to a connection.
    pub(crate) fn tell(&mut self, id: CmRef, kind: CmKind) {
        self.events.push_back(Event::Cm { id, kind });
    }

    /// What the peer may write to with a key.
    pub(crate) fn reach(&self, qp: QpId, rkey: RKey, addr: u64, len: u32) -> Result<Span, KeyError> {
        let (device, pd) = self.place(qp);
        let qpn = Qpn::new(qp.0);
        self.tables[device].resolve_remote(pd, qpn, rkey, addr, len, AccessFlags::REMOTE_WRITE)
    }

    /// The peer writes into our memory.
    pub(crate) fn peer_write(&mut self, qp: QpId, rkey: RKey, addr: u64, bytes: &[u8]) -> Result<(), KeyError> {
        let found = self.reach(qp, rkey, addr, bytes.len() as u32);
        let span = found.inspect_err(|_| self.violate(qp))?;
        span.write(0, bytes).map_err(|_| KeyError::Closed)
    }

    /// The peer has done what it has no right to.
    pub(crate) fn violate(&mut self, qp: QpId) {
        if let Some(qp) = self.qps.get_mut(&qp) {
            qp.violated = true;
        }
    }

    fn take_recv(&mut self, qp: QpId) -> (u64, Vec<Sge>) {
        let recv = self.qps.get_mut(&qp).expect("a queue pair").recvs.pop_front();
        recv.expect("a receive for the peer's message")
    }

    /// The peer's SEND, perhaps with immediate data, meets a receive.
    pub(crate) fn deliver(&mut self, qp: QpId, bytes: &[u8], imm: Option<u32>) {
        let (device, pd) = self.place(qp);
        let (wr_id, sges) = self.take_recv(qp);
        let mut wc = ended(wr_id, WcStatus::Success, WcOpcode::Recv);
        wc.byte_len = bytes.len() as u32;
        if let Some(imm) = imm {
            (wc.imm, wc.flags) = (imm, WcFlags::WITH_IMM);
        }
        let room: usize = sges.iter().map(|sge| sge.length as usize).sum();
        if bytes.len() > room {
            wc.status = WcStatus::LocalLengthError;
        } else if let Some(sge) = sges.first() {
            let need = AccessFlags::LOCAL_WRITE;
            let span = self.tables[device].resolve_local(pd, sge, need).unwrap();
            span.write(0, bytes).unwrap();
        }
        self.completions.push_back((qp, wc));
    }

    /// The peer's RDMA WRITE with immediate data meets a receive.
    pub(crate) fn deliver_imm(&mut self, qp: QpId, imm: u32) {
        let (wr_id, _) = self.take_recv(qp);
        let wc = Completion {
            imm,
            flags: WcFlags::WITH_IMM,
            ..ended(wr_id, WcStatus::Success, WcOpcode::RecvRdmaWithImm)
        };
        self.completions.push_back((qp, wc));
    }

    /// What was sent is done, as far as a completion tells: unsignalled requests behind the last signalled one stay.
    pub(crate) fn complete_sends(&mut self, qp: QpId) {
        let Some(of) = self.qps.get_mut(&qp) else { return };
        let last = of.sends.iter().rposition(|wr| wr.signaled);
        let done = last.map_or(0, |last| last + 1);
        for wr in of.sends.drain(..done).filter(|wr| wr.signaled) {
            self.completions
                .push_back((qp, ended(wr.wr_id, WcStatus::Success, wr.opcode)));
        }
    }

    /// All of a queue pair's work requests fail, the first with this status.
    pub(crate) fn fail_qp(&mut self, qp: QpId, first: WcStatus) {
        let Some(of) = self.qps.get_mut(&qp) else { return };
        of.failed = true;
        let ids = of.sends.drain(..).map(|wr| wr.wr_id);
        let ids = ids.chain(of.recvs.drain(..).map(|(id, _)| id));
        let mut status = first;
        for wr_id in ids {
            self.completions.push_back((qp, ended(wr_id, status, WcOpcode::Send)));
            status = WcStatus::FlushError;
        }
    }

    /// A queue pair whose draining the test has held up.
    pub(crate) fn finish_drain(&mut self, qp: QpId) {
        self.draining.retain(|of| *of != qp);
        self.fail_qp(qp, WcStatus::FlushError);
        self.events.push_back(Event::Drained(qp));
    }

    fn post_one(&mut self, id: QpId, call: u32, wr: &SendWr<'_>) -> Result<(), PostError> {
        if let Some(fault) = self.faults.post.take() {
            return Err(fault);
        }
        let (device, pd) = self.place(id);
        let (data, lkeys) = match wr.payload {
            Payload::Inline(bytes) => {
                assert!(bytes.len() <= self.qps[&id].caps.max_inline_data as usize);
                (bytes.to_vec(), Vec::new())
            }
            Payload::Sges(sges) => {
                let mut data = Vec::new();
                for sge in sges {
                    let at = data.len();
                    data.resize(at + sge.length as usize, 0);
                    let span = self.tables[device].resolve_local(pd, sge, AccessFlags::empty());
                    span.expect("what is sent").read(0, &mut data[at..]).unwrap();
                }
                (data, sges.iter().map(|sge| sge.lkey).collect())
            }
        };
        let opcode = match wr.op {
            SendOp::Write(_) | SendOp::WriteWithImm(..) => WcOpcode::RdmaWrite,
            _ => WcOpcode::Send,
        };
        let signaled = wr.flags.contains(SendFlags::SIGNALED);
        self.take_slot(id, wr.wr_id, opcode, signaled, lkeys);
        let posted = Posted::Send {
            call,
            wr_id: wr.wr_id,
            op: wr.op,
            signaled,
            data,
        };
        self.log.push((id, posted));
        Ok(())
    }

    /// Takes a slot of a send queue; of one that has failed everything is flushed at once.
    fn take_slot(&mut self, id: QpId, wr_id: u64, opcode: WcOpcode, signaled: bool, lkeys: Vec<LKey>) {
        let qp = self.qps.get_mut(&id).expect("a queue pair");
        if qp.failed {
            return self
                .completions
                .push_back((id, ended(wr_id, WcStatus::FlushError, opcode)));
        }
        assert!(qp.sends.len() < qp.caps.max_send_wr as usize, "the send queue is full");
        qp.sends.push_back(Outstanding {
            wr_id,
            opcode,
            signaled,
            lkeys,
        });
    }

    /// What waits to be polled fits into its queue.
    fn check_cqs(&self) {
        let mut waiting = BTreeMap::new();
        for (qp, _) in &self.completions {
            if let Some(qp) = self.qps.get(qp) {
                *waiting.entry(qp.cq).or_insert(0) += 1;
            }
        }
        for (cq, count) in waiting {
            assert!(
                count <= self.cqs[&cq],
                "{count} completions in a queue of {}",
                self.cqs[&cq]
            );
        }
    }

    fn is_instant(&self, qp: QpId) -> bool {
        self.caps[self.place(qp).0].instant_keys
    }

    /// Closes what a key opens now.
    fn shut(&mut self, id: KeyId, qpn: Qpn) {
        let key = self.keys.get_mut(&id).expect("a key");
        let (device, pd) = self.pds[&key.pd];
        let mem = &self.tables[device];
        if key.kind == KeyKind::Window1 {
            key.posted.key = key.posted.next(mem);
            let nothing = window(key.posted.key, LKey::default(), 0, 0, AccessFlags::empty());
            mem.bind_window(pd, qpn, &nothing).expect("a window is unbound");
        } else {
            // The peer may have done it.
            let _ = mem.invalidate(pd, qpn, key.posted.key);
        }
        key.posted.granted = false;
    }
}

impl Provider for Scripted {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        let device = usize::from(device.0);
        let handle = self.tables[device].alloc_pd().unwrap();
        let id = PdId(self.number());
        self.pds.insert(id, (device, handle));
        Ok(id)
    }

    fn free_pd(&mut self, pd: PdId) {
        let (device, handle) = self.pds.remove(&pd).expect("a protection domain");
        assert!(self.qps.values().all(|qp| qp.pd != pd), "a domain with queue pairs");
        self.tables[device].dealloc_pd(handle).unwrap();
    }

    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        spend(&mut self.faults.registrations)?;
        let (device, handle) = self.pds[&pd];
        let range = what.offset..what.offset + what.len;
        let made = self.tables[device].register_memory(handle, &what.memory, range, what.iova, what.access);
        let region = made.map_err(|e| VerbsError::Invalid(e.to_string()))?;
        let info = MrInfo {
            id: MrId(self.number()),
            addr: region.addr(),
            len: region.len(),
            lkey: region.lkey(),
            rkey: region.rkey(),
        };
        self.mrs.insert(info.id, (pd, region));
        Ok(info)
    }

    fn deregister(&mut self, mr: MrId) {
        let (pd, region) = self.mrs.remove(&mr).expect("a registration");
        let lkey = region.lkey();
        for qp in self.qps.values().filter(|qp| qp.pd == pd && !qp.failed) {
            let received = qp.recvs.iter().flat_map(|(_, sges)| sges).any(|sge| sge.lkey == lkey);
            let sent = qp.sends.iter().any(|wr| wr.lkeys.contains(&lkey));
            assert!(!received && !sent, "memory that a queue pair still has");
        }
        let (device, _) = self.pds[&pd];
        self.tables[device].deregister(&region).unwrap();
    }

    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        spend(&mut self.faults.keys)?;
        let (device, handle) = self.pds[&pd];
        let (caps, mem) = (&self.caps[device], &self.tables[device]);
        let window = |kind| Object::Window(mem.alloc_window(handle, kind).unwrap());
        let (there, object) = match kind {
            KeyKind::FastRegistration => (caps.fast_registration, Object::Fast(mem.alloc_fast(handle).unwrap())),
            KeyKind::Window1 => (caps.window_1, window(WindowKind::Type1)),
            KeyKind::Window2 => (caps.window_2, window(WindowKind::Type2)),
        };
        assert!(there, "a key that the device does not have");
        let rkey = match &object {
            Object::Fast(fast) => fast.rkey(),
            Object::Window(window) => window.rkey(),
        };
        let key = Key {
            pd,
            kind,
            object,
            posted: PostedKey::new(rkey),
        };
        let id = KeyId(self.number());
        self.keys.insert(id, key);
        Ok(id)
    }

    fn free_key(&mut self, key: KeyId) {
        let key = self.keys.remove(&key).expect("a key");
        let (device, _) = self.pds[&key.pd];
        match &key.object {
            Object::Fast(fast) => self.tables[device].dealloc_fast(fast).unwrap(),
            Object::Window(window) => self.tables[device].dealloc_window(window).unwrap(),
        }
    }

    fn create_cq(&mut self, device: DeviceIx, entries: u32) -> Result<CqId, VerbsError> {
        let most = self.caps[usize::from(device.0)].limits.max_cqe;
        assert!((1..=most).contains(&entries), "{entries} entries");
        let id = CqId(self.number());
        self.cqs.insert(id, entries);
        Ok(id)
    }

    fn destroy_cq(&mut self, cq: CqId) {
        assert!(self.qps.values().all(|qp| qp.cq != cq), "a completion queue in use");
        self.cqs.remove(&cq).expect("a completion queue");
    }

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        spend(&mut self.faults.qps)?;
        assert!(self.pds.contains_key(&spec.pd) && self.cqs.contains_key(&spec.cq));
        let qp = Qp {
            pd: spec.pd,
            cq: spec.cq,
            caps: spec.caps,
            sends: VecDeque::new(),
            recvs: VecDeque::new(),
            failed: false,
            violated: false,
        };
        let id = QpId(self.number());
        self.qps.insert(id, qp);
        Ok(id)
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.qps.remove(&qp).expect("a queue pair");
        self.draining.retain(|of| *of != qp);
        self.completions.retain(|(of, _)| *of != qp);
        self.events
            .retain(|event| !matches!(event, Event::Drained(of) if *of == qp));
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.qps.contains_key(&qp).then(|| Qpn::new(qp.0))
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        assert!(!wrs.is_empty(), "nothing is posted");
        self.calls += 1;
        let call = self.calls;
        for (i, wr) in wrs.iter().enumerate() {
            self.post_one(qp, call, wr).map_err(|e| (i, e))?;
        }
        Ok(())
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let of = self.qps.get_mut(&qp).expect("a queue pair");
        if of.failed {
            let flushed = |wr: &RecvWr<'_>| (qp, ended(wr.wr_id, WcStatus::FlushError, WcOpcode::Recv));
            self.completions.extend(wrs.iter().map(flushed));
            return Ok(());
        }
        of.recvs.extend(wrs.iter().map(|wr| (wr.wr_id, wr.sges.to_vec())));
        assert!(
            of.recvs.len() <= of.caps.max_recv_wr as usize,
            "the receive queue is full"
        );
        self.log.push((qp, Posted::Recvs(wrs.len())));
        Ok(())
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        let (instant, qpn) = (self.is_instant(qp), Qpn::new(qp.0));
        if !instant {
            let slots = 1 + usize::from(self.keys[&key].posted.granted && self.keys[&key].kind != KeyKind::Window1);
            for i in 1..=slots {
                self.take_slot(qp, wr_id, WcOpcode::FastRegister, i == slots, Vec::new());
            }
        }
        if self.keys[&key].posted.granted {
            self.shut(key, qpn);
        }
        let (_, region) = &self.mrs[&grant.mr];
        let of = self.keys.get_mut(&key).expect("a key");
        let (device, pd) = self.pds[&of.pd];
        let mem = &self.tables[device];
        let next = of.posted.next(mem);
        let addr = region.addr() + grant.offset as u64;
        let bind = window(next, region.lkey(), addr, grant.len as u64, grant.access);
        let done = match of.object {
            Object::Window(_) => mem.bind_window(pd, qpn, &bind),
            Object::Fast(_) => mem.fast_register(
                pd,
                &FastRegister {
                    key: next,
                    lkey: bind.lkey,
                    addr,
                    length: bind.length,
                    iova: grant.iova.unwrap_or(addr),
                    access: grant.access,
                },
            ),
        };
        done.expect("a grant");
        (of.posted.key, of.posted.granted) = (next, true);
        self.log.push((qp, Posted::Grant(key, next)));
        let held = if instant { Granted::Now } else { Granted::Queued };
        Ok(held(next))
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        let instant = self.is_instant(qp);
        self.log.push((qp, Posted::Revoke(key)));
        if !self.keys[&key].posted.granted {
            return Ok(Revoked::Now);
        }
        self.shut(key, Qpn::new(qp.0));
        if instant {
            return Ok(Revoked::Now);
        }
        self.take_slot(qp, wr_id, WcOpcode::LocalInvalidate, true, Vec::new());
        Ok(Revoked::Queued)
    }

    fn close_key(&mut self, key: KeyId) {
        if self.keys[&key].posted.granted {
            self.shut(key, Qpn::default());
        }
    }

    fn drain(&mut self, qp: QpId) {
        assert!(self.qps.contains_key(&qp) && !self.draining.contains(&qp));
        self.draining.push(qp);
        if self.auto_drain {
            self.finish_drain(qp);
        }
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.qps.get(&qp).is_some_and(|qp| qp.violated)
    }

    fn cm_listen(&mut self, addr: SocketAddr, _backlog: u32) -> Result<CmRef, VerbsError> {
        Ok(self.make_cm(addr, None))
    }

    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        let local = src.unwrap_or(self.caps[0].addrs[0]);
        Ok(self.make_cm(SocketAddr::new(local, 0), Some(dst)))
    }

    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        assert!(self.qps.contains_key(&qp));
        let cm = self.cms.get_mut(&id).expect("a connection");
        assert!(cm.qp.is_none(), "connected twice");
        (cm.qp, cm.params) = (Some(qp), Some(params.clone()));
        Ok(())
    }

    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        if core::mem::take(&mut self.faults.accept) {
            return Err(VerbsError::State("a fault of the test's".into()));
        }
        self.cm_connect(id, qp, params)
    }

    fn cm_reject(&mut self, id: CmRef, _reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        let cm = self.cms.remove(&id).expect("a connection");
        assert!(cm.qp.is_none(), "an accepted connection is refused");
        self.rejected.push((id, private_data.to_vec()));
        self.forget_events(id);
        Ok(())
    }

    fn cm_disconnect(&mut self, id: CmRef) {
        if let Some(cm) = self.cms.get_mut(&id) {
            cm.disconnected = true;
        }
    }

    fn cm_destroy(&mut self, id: CmRef) {
        if self.cms.remove(&id).is_some() {
            self.forget_events(id);
        }
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        self.cms.get(&id).map(|cm| (cm.local, cm.peer))
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        if self.auto_complete {
            let qps: Vec<QpId> = self.qps.keys().copied().collect();
            for qp in qps {
                self.complete_sends(qp);
            }
        }
        self.check_cqs();
        let count = max.min(self.completions.len());
        out.extend(self.completions.drain(..count));
        Ok(count)
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}
