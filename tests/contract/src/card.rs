//! Backend for RDMA devices in the place of libibverbs: the device of another fabric.

use std::{
    collections::{HashMap, VecDeque},
    fmt, io, mem,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use roce_port::fabric::{Backend, Connections, Hardware, Keys, NewCm, Table};
use roce_verbs::{
    Completion, Mtu, Qpn, RecvWr, SendWr, WcStatus,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo,
        PdId, QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

use crate::wire::Station;

/// A station that a card and the network use.
pub(crate) type Shared = Arc<Mutex<Station>>;

/// Returns the station. What panics elsewhere fails its own test.
pub(crate) fn lock(station: &Shared) -> MutexGuard<'_, Station> {
    station.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Switch of a card, for tests.
#[derive(Default)]
pub(crate) struct Slot {
    /// The device is gone.
    pub(crate) is_empty: AtomicBool,
    /// The backend has closed the device since it went.
    pub(crate) is_closed: AtomicBool,
}

/// Queue pair of the fabric.
struct Qp {
    /// Its number at the station.
    id: QpId,
    /// Receives that have not completed.
    receives: Vec<u64>,
}

/// Backend whose only device is that of a station. Its objects are numbers of the station.
pub(crate) struct Card {
    station: Shared,
    slot: Arc<Slot>,
    /// The fabric knows that the device is gone.
    gone: bool,
    caps: Vec<DeviceCaps>,
    addrs: Vec<IpAddr>,
    pds: Table<PdId, PdId>,
    mrs: Table<MrId, MrId>,
    keys: Table<KeyId, KeyId>,
    cqs: Table<CqId, CqId>,
    qps: Table<QpId, Qp>,
    cms: Table<CmRef, CmRef>,
    /// Numbers of the fabric.
    qps_of: HashMap<QpId, QpId>,
    cms_of: HashMap<CmRef, CmRef>,
    events: VecDeque<Event>,
    /// Completions of queue pairs that were drained without the device.
    flushed: Vec<(QpId, Completion)>,
    polled: Vec<(QpId, Completion)>,
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Card")
    }
}

const THERE: &str = "the fabric has it";

impl Card {
    pub(crate) fn new(station: Shared, slot: Arc<Slot>) -> Self {
        let mut caps = lock(&station).provider().devices().to_vec();
        // A backend has no call for it.
        caps.iter_mut().for_each(|caps| caps.scattered_keys = false);
        Self {
            station,
            slot,
            gone: false,
            addrs: caps[0].addrs.clone(),
            caps,
            pds: Table::default(),
            mrs: Table::default(),
            keys: Table::default(),
            cqs: Table::default(),
            qps: Table::default(),
            cms: Table::default(),
            qps_of: HashMap::new(),
            cms_of: HashMap::new(),
            events: VecDeque::new(),
            flushed: Vec::new(),
            polled: Vec::new(),
        }
    }

    fn station(&self) -> MutexGuard<'_, Station> {
        lock(&self.station)
    }

    fn is_gone(&self) -> bool {
        self.slot.is_empty.load(Ordering::Relaxed)
    }

    /// Reports that the device is gone, or has come back. Returns whether it has.
    fn look_at_slot(&mut self) -> bool {
        let gone = self.is_gone();
        if gone == mem::replace(&mut self.gone, gone) {
            return false;
        }
        self.slot.is_closed.store(false, Ordering::Relaxed);
        self.caps[0].addrs = if gone { Vec::new() } else { self.addrs.clone() };
        if gone {
            self.events.push_back(Event::DeviceRemoved(DeviceIx(0)));
        }
        true
    }

    /// Closes the device if it is gone, and nothing of it is left.
    fn close_removed(&mut self) {
        let objects = self.pds.iter_mut().count()
            + self.mrs.iter_mut().count()
            + self.keys.iter_mut().count()
            + self.cqs.iter_mut().count()
            + self.qps.iter_mut().count()
            + self.cms.iter_mut().count();
        if self.is_gone() && objects == 0 {
            self.slot.is_closed.store(true, Ordering::Relaxed);
        }
    }

    /// Reports an event of the station, if it is for the fabric.
    fn take(&mut self, event: Event, new: NewCm<'_>) {
        match event {
            Event::Cm { id, mut kind } => {
                if let CmKind::ConnectRequest { listener, .. } = &mut kind {
                    let (Some(at), Some(number)) = (self.cms_of.get(listener).copied(), new()) else {
                        return;
                    };
                    *listener = at;
                    self.insert_cm(number, id);
                }
                if let Some(id) = self.cms_of.get(&id).copied() {
                    self.events.push_back(Event::Cm { id, kind });
                }
            }
            Event::Async(..) => self.events.push_back(event),
            // A drain is done at once.
            Event::Drained(_) | Event::DeviceRemoved(_) => {}
        }
    }

    fn insert_cm(&mut self, number: CmRef, id: CmRef) {
        self.cms.insert(number, id);
        self.cms_of.insert(id, number);
    }

    fn qp(&self, qp: QpId) -> QpId {
        self.qps.get(qp).expect(THERE).id
    }

    fn cm(&self, cm: CmRef) -> CmRef {
        *self.cms.get(cm).expect(THERE)
    }
}

impl Hardware for Card {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn mtu(&self, _: IpAddr) -> io::Result<Mtu> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn poll(&mut self, new: NewCm<'_>) -> Result<bool, VerbsError> {
        let events: Vec<_> = {
            let mut station = self.station();
            let provider = station.provider();
            std::iter::from_fn(|| provider.poll_event()).collect()
        };
        let any = self.look_at_slot() || !events.is_empty();
        if !self.gone {
            events.into_iter().for_each(|event| self.take(event, new));
        }
        Ok(any)
    }

    fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        Ok(())
    }

    fn listen(&mut self, addr: SocketAddr, backlog: u32, id: CmRef) -> Result<SocketAddr, VerbsError> {
        let mut station = self.station();
        let provider = station.provider();
        let listener = provider.cm_listen(addr, backlog)?;
        let (addr, _) = provider.cm_addrs(listener).expect("it was just created");
        drop(station);
        self.insert_cm(id, listener);
        Ok(addr)
    }

    fn resolve(&mut self, src: IpAddr, dst: SocketAddr, id: CmRef) -> Result<(), VerbsError> {
        let cm = self.station().provider().cm_resolve(Some(src), dst)?;
        self.insert_cm(id, cm);
        Ok(())
    }
}

impl Backend for Card {
    fn alloc_pd(&mut self, device: usize, id: PdId) -> Result<(), VerbsError> {
        if self.is_gone() {
            return Err(VerbsError::Invalid("the device is gone".into()));
        }
        let made = self.station().provider().alloc_pd(DeviceIx(device as u16))?;
        self.pds.insert(id, made);
        Ok(())
    }

    fn free_pd(&mut self, pd: PdId) {
        let pd = self.pds.remove(pd).expect(THERE);
        self.station().provider().free_pd(pd);
    }

    fn register(&mut self, pd: PdId, what: &Registration, id: MrId) -> Result<MrInfo, VerbsError> {
        let pd = *self.pds.get(pd).expect(THERE);
        let info = self.station().provider().register(pd, what)?;
        self.mrs.insert(id, info.id);
        Ok(MrInfo { id, ..info })
    }

    fn deregister(&mut self, mr: MrId) {
        let mr = self.mrs.remove(mr).expect(THERE);
        self.station().provider().deregister(mr);
    }

    fn create_cq(&mut self, device: usize, entries: u32, id: CqId) -> Result<(), VerbsError> {
        let made = self.station().provider().create_cq(DeviceIx(device as u16), entries)?;
        self.cqs.insert(id, made);
        Ok(())
    }

    fn destroy_cq(&mut self, cq: CqId) {
        let cq = self.cqs.remove(cq).expect(THERE);
        self.station().provider().destroy_cq(cq);
    }

    fn create_qp(&mut self, spec: &QpSpec, id: QpId) -> Result<(), VerbsError> {
        let (pd, cq) = (
            *self.pds.get(spec.pd).expect(THERE),
            *self.cqs.get(spec.cq).expect(THERE),
        );
        let made = self.station().provider().create_qp(&QpSpec { pd, cq, ..*spec })?;
        self.qps_of.insert(made, id);
        let qp = Qp {
            id: made,
            receives: Vec::new(),
        };
        self.qps.insert(id, qp);
        Ok(())
    }

    fn destroy_qp(&mut self, qp: QpId) {
        self.flushed.retain(|(of, _)| *of != qp);
        let qp = self.qps.remove(qp).expect(THERE);
        self.qps_of.remove(&qp.id);
        self.station().provider().destroy_qp(qp.id);
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.station().provider().qpn(self.qp(qp))
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.station().provider().access_violated(self.qp(qp))
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.station().provider().post_send(self.qp(qp), wrs)
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.station().provider().post_recv(self.qp(qp), wrs)?;
        let receives = &mut self.qps.get_mut(qp).expect(THERE).receives;
        receives.extend(wrs.iter().map(|wr| wr.wr_id));
        Ok(())
    }

    fn drain(&mut self, qp: QpId) {
        let id = self.qp(qp);
        if self.is_gone() {
            let receives = mem::take(&mut self.qps.get_mut(qp).expect(THERE).receives);
            self.flushed.extend(receives.into_iter().map(|wr_id| {
                let flushed = Completion {
                    wr_id,
                    status: WcStatus::FlushError,
                    ..Completion::default()
                };
                (qp, flushed)
            }));
        } else {
            self.station().provider().drain(id);
        }
        self.events.push_back(Event::Drained(qp));
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<(), VerbsError> {
        self.close_removed();
        let flushed = self.flushed.len().min(max);
        out.extend(self.flushed.drain(..flushed));
        if self.is_gone() {
            return Ok(());
        }
        let mut polled = mem::take(&mut self.polled);
        let done = self.station().provider().poll_completions(&mut polled, max - flushed);
        for (qp, wc) in polled.drain(..) {
            let Some(id) = self.qps_of.get(&qp).copied() else {
                continue;
            };
            let receives = &mut self.qps.get_mut(id).expect(THERE).receives;
            receives.retain(|wr_id| *wr_id != wc.wr_id);
            out.push((id, wc));
        }
        self.polled = polled;
        done.map(drop)
    }
}

impl Keys for Card {
    fn alloc_key(&mut self, pd: PdId, kind: KeyKind, id: KeyId) -> Result<(), VerbsError> {
        let pd = *self.pds.get(pd).expect(THERE);
        let made = self.station().provider().alloc_key(pd, kind)?;
        self.keys.insert(id, made);
        Ok(())
    }

    fn free_key(&mut self, key: KeyId) {
        let key = self.keys.remove(key).expect(THERE);
        self.station().provider().free_key(key);
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        let grant = GrantOf {
            mr: *self.mrs.get(grant.mr).expect(THERE),
            ..*grant
        };
        let key = *self.keys.get(key).expect(THERE);
        self.station().provider().grant(self.qp(qp), key, &grant, wr_id)
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        let key = *self.keys.get(key).expect(THERE);
        self.station().provider().revoke(self.qp(qp), key, wr_id)
    }

    fn close_key(&mut self, key: KeyId) {
        let key = *self.keys.get(key).expect(THERE);
        self.station().provider().close_key(key);
    }
}

impl Connections for Card {
    fn connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.station().provider().cm_connect(self.cm(id), self.qp(qp), params)
    }

    fn accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        self.station().provider().cm_accept(self.cm(id), self.qp(qp), params)
    }

    fn reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        self.station().provider().cm_reject(self.cm(id), reason, private_data)
    }

    fn disconnect(&mut self, id: CmRef) {
        self.station().provider().cm_disconnect(self.cm(id));
    }

    fn destroy_cm(&mut self, id: CmRef) {
        if let Some(cm) = self.cms.remove(id) {
            self.cms_of.remove(&cm);
            self.station().provider().cm_destroy(cm);
        }
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, SocketAddr)> {
        let (local, remote) = self.station().provider().cm_addrs(self.cm(id))?;
        Some((local, remote?))
    }
}
