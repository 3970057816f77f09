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

use roce_local::{Completed, Drain, Hardware, HardwareEvent, Object, Registered};
use roce_verbs::{
    Completion, Mtu, Qpn, RecvWr, SendWr, WcStatus,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, MrId, PdId,
        QpId, QpSpec, Registration, RejectReason, Revoked, VerbsError,
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

/// Number of an object at the station.
#[derive(Clone, Copy)]
enum Number {
    Pd(PdId),
    Mr(MrId),
    Key(KeyId),
    Cq(CqId),
    Qp(QpId),
    Cm(CmRef),
}

/// Object of a card.
struct Held {
    number: Number,
    station: Shared,
    /// Its count is that of objects.
    _objects: Arc<()>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut station = lock(&self.station);
        let provider = station.provider();
        match self.number {
            Number::Pd(id) => provider.free_pd(id),
            Number::Mr(id) => provider.deregister(id),
            Number::Key(id) => provider.free_key(id),
            Number::Cq(id) => provider.destroy_cq(id),
            Number::Qp(id) => provider.destroy_qp(id),
            Number::Cm(id) => provider.cm_destroy(id),
        }
    }
}

macro_rules! numbers {
    ($($get:ident: $kind:ident -> $id:ty;)*) => {$(
        fn $get(object: &Object) -> $id {
            match object.get() {
                Held { number: Number::$kind(id), .. } => *id,
                _ => panic!("an object of another kind"),
            }
        }
    )*};
}

numbers! {
    pd_of: Pd -> PdId;
    mr_of: Mr -> MrId;
    key_of: Key -> KeyId;
    cq_of: Cq -> CqId;
    qp_of: Qp -> QpId;
    cm_of: Cm -> CmRef;
}

/// Switch of a card, for tests.
#[derive(Default)]
pub(crate) struct Slot {
    /// The device is gone.
    pub(crate) is_empty: AtomicBool,
    /// The backend has closed the device since it went.
    pub(crate) is_closed: AtomicBool,
}

/// Backend whose only device is that of a station.
pub(crate) struct Card {
    station: Shared,
    slot: Arc<Slot>,
    /// The fabric knows that the device is gone.
    gone: bool,
    caps: Vec<DeviceCaps>,
    addrs: Vec<IpAddr>,
    /// Receives that have not completed.
    receives: HashMap<QpId, Vec<u64>>,
    /// Queue pairs that wait for the end of a drain.
    draining: Vec<QpId>,
    objects: Arc<()>,
    /// Connections and listeners of the station, and their numbers in the fabric.
    cms: HashMap<CmRef, CmRef>,
    events: VecDeque<HardwareEvent>,
    polled: Vec<(QpId, Completion)>,
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Card")
    }
}

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
            receives: HashMap::new(),
            draining: Vec::new(),
            objects: Arc::default(),
            cms: HashMap::new(),
            events: VecDeque::new(),
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
        self.events.push_back(match gone {
            true => HardwareEvent::Removed(0),
            false => HardwareEvent::Changed,
        });
        true
    }

    fn held(&self, number: Number) -> Object {
        Object::new(Held {
            number,
            station: self.station.clone(),
            _objects: self.objects.clone(),
        })
    }

    /// Reports an event of the station, if it is for the fabric.
    fn take(&mut self, event: Event) {
        let event = match event {
            Event::Cm {
                id,
                kind:
                    CmKind::ConnectRequest {
                        listener,
                        device,
                        private_data,
                        initiator_depth,
                        responder_resources,
                    },
            } => {
                let Some(listener) = self.cms.get(&listener).copied() else {
                    return;
                };
                HardwareEvent::Request {
                    listener,
                    device: usize::from(device.0),
                    cm: self.held(Number::Cm(id)),
                    private_data,
                    initiator_depth,
                    responder_resources,
                }
            }
            Event::Cm { id, kind } => {
                let Some(id) = self.cms.get(&id).copied() else { return };
                let event = Object::new(kind);
                HardwareEvent::Cm { id, event }
            }
            Event::Async(device, event) => HardwareEvent::Async(usize::from(device.0), event),
            // A drain is done at once.
            Event::Drained(_) | Event::DeviceRemoved(_) => return,
        };
        self.events.push_back(event);
    }
}

impl Hardware for Card {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn mtu(&self, _: IpAddr) -> io::Result<Mtu> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn close_removed(&mut self) {
        let is_unused = Arc::strong_count(&self.objects) == 1;
        if self.is_gone() && is_unused {
            self.slot.is_closed.store(true, Ordering::Relaxed);
        }
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn poll(&mut self) -> Result<bool, VerbsError> {
        let events: Vec<_> = {
            let mut station = self.station();
            let provider = station.provider();
            std::iter::from_fn(|| provider.poll_event()).collect()
        };
        let any = self.look_at_slot() || !events.is_empty();
        if !self.gone {
            events.into_iter().for_each(|event| self.take(event));
        }
        Ok(any)
    }

    fn next_event(&mut self) -> Option<HardwareEvent> {
        self.events.pop_front()
    }

    fn alloc_pd(&mut self, device: usize) -> Result<Object, VerbsError> {
        if self.is_gone() {
            return Err(VerbsError::Invalid("the device is gone".into()));
        }
        let id = self.station().provider().alloc_pd(DeviceIx(device as u16))?;
        Ok(self.held(Number::Pd(id)))
    }

    fn register(&mut self, pd: &Object, what: &Registration) -> Result<Registered, VerbsError> {
        let info = self.station().provider().register(pd_of(pd), what)?;
        Ok(Registered {
            object: self.held(Number::Mr(info.id)),
            addr: info.addr,
            lkey: info.lkey,
            rkey: info.rkey,
        })
    }

    fn alloc_key(&mut self, pd: &Object, kind: KeyKind) -> Result<Object, VerbsError> {
        let id = self.station().provider().alloc_key(pd_of(pd), kind)?;
        Ok(self.held(Number::Key(id)))
    }

    fn create_cq(&mut self, device: usize, entries: u32, _: CqId) -> Result<Object, VerbsError> {
        let id = self.station().provider().create_cq(DeviceIx(device as u16), entries)?;
        Ok(self.held(Number::Cq(id)))
    }

    fn create_qp(&mut self, pd: &Object, cq: &Object, spec: &QpSpec) -> Result<(Object, Qpn), VerbsError> {
        let (pd, cq) = (pd_of(pd), cq_of(cq));
        let mut station = self.station();
        let provider = station.provider();
        let id = provider.create_qp(&QpSpec { pd, cq, ..*spec })?;
        let qpn = provider.qpn(id).expect("it was just created");
        drop(station);
        Ok((self.held(Number::Qp(id)), qpn))
    }

    fn post_send(&mut self, qp: &mut Object, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.station().provider().post_send(qp_of(qp), wrs)
    }

    fn post_recv(&mut self, qp: &mut Object, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let id = qp_of(qp);
        self.station().provider().post_recv(id, wrs)?;
        let receives = self.receives.entry(id).or_default();
        receives.extend(wrs.iter().map(|wr| wr.wr_id));
        Ok(())
    }

    fn grant(
        &mut self,
        qp: &mut Object,
        key: &mut Object,
        mr: &Object,
        grant: &GrantOf,
        wr_id: u64,
    ) -> Result<Granted, PostError> {
        let grant = GrantOf {
            mr: mr_of(mr),
            ..*grant
        };
        self.station().provider().grant(qp_of(qp), key_of(key), &grant, wr_id)
    }

    fn revoke(
        &mut self,
        qp: &mut Object,
        key: &mut Object,
        _: Option<&Object>,
        wr_id: u64,
    ) -> Result<Revoked, PostError> {
        self.station().provider().revoke(qp_of(qp), key_of(key), wr_id)
    }

    fn invalidated(&mut self, _: &mut Object) {}

    fn replace_key(&mut self, key: &mut Object) {
        self.station().provider().close_key(key_of(key));
    }

    fn drain(&mut self, qp: &mut Object) -> Drain {
        if self.is_gone() {
            self.draining.push(qp_of(qp));
            return Drain::Dead;
        }
        self.station().provider().drain(qp_of(qp));
        Drain::Done
    }

    fn is_draining(&self, qp: &Object) -> bool {
        self.draining.contains(&qp_of(qp))
    }

    fn abandon(&mut self, qp: &mut Object) -> Vec<u64> {
        let id = qp_of(qp);
        self.draining.retain(|of| *of != id);
        self.receives.remove(&id).unwrap_or_default()
    }

    fn poll_cq(&mut self, _: &mut Object, out: &mut Vec<Completion>, max: usize) -> Result<usize, VerbsError> {
        if self.is_gone() {
            return Ok(0);
        }
        let mut polled = mem::take(&mut self.polled);
        let count = self.station().provider().poll_completions(&mut polled, max);
        out.extend(polled.drain(..).map(|(_, wc)| wc));
        self.polled = polled;
        count
    }

    fn complete(&mut self, qp: &mut Object, completion: &mut Completion) -> Completed {
        if let Some(receives) = self.receives.get_mut(&qp_of(qp)) {
            receives.retain(|wr_id| *wr_id != completion.wr_id);
        }
        Completed {
            is_users: true,
            drained: false,
            violated: completion.status == WcStatus::LocalAccessError,
        }
    }

    fn arm(&mut self, _: &mut Object) -> Result<(), VerbsError> {
        Ok(())
    }

    fn disarm(&mut self, _: &mut Object) {}

    fn listen(&mut self, addr: SocketAddr, backlog: u32, id: CmRef) -> Result<(Object, SocketAddr), VerbsError> {
        let mut station = self.station();
        let provider = station.provider();
        let listener = provider.cm_listen(addr, backlog)?;
        let (addr, _) = provider.cm_addrs(listener).expect("it was just created");
        drop(station);
        self.cms.insert(listener, id);
        Ok((self.held(Number::Cm(listener)), addr))
    }

    fn listen_again(&mut self, _: &mut Object) {}

    fn lose_listener(&mut self, _: &mut Object, _: usize) {}

    fn resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr, id: CmRef) -> Result<Object, VerbsError> {
        let cm = self.station().provider().cm_resolve(src, dst)?;
        self.cms.insert(cm, id);
        Ok(self.held(Number::Cm(cm)))
    }

    fn number_request(&mut self, cm: &mut Object, id: CmRef) {
        self.cms.insert(cm_of(cm), id);
    }

    fn connect(&mut self, cm: &mut Object, qp: &Object, params: &ConnParams) -> Result<(), VerbsError> {
        self.station().provider().cm_connect(cm_of(cm), qp_of(qp), params)
    }

    fn accept(&mut self, cm: &mut Object, qp: &mut Object, params: &ConnParams) -> Result<(), VerbsError> {
        self.station().provider().cm_accept(cm_of(cm), qp_of(qp), params)
    }

    fn reject(&mut self, cm: &mut Object, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        self.station().provider().cm_reject(cm_of(cm), reason, private_data)
    }

    fn disconnect(&mut self, cm: &mut Object, _: Option<&mut Object>) {
        self.station().provider().cm_disconnect(cm_of(cm));
    }

    fn cm_event(&mut self, _: &mut Object, _: Option<&mut Object>, event: Object) -> Option<CmKind> {
        Some(event.into_inner())
    }

    fn communication_established(&mut self, _: &mut Object) {}

    fn cm_addrs(&self, cm: &Object) -> (SocketAddr, Option<SocketAddr>) {
        let addrs = self.station().provider().cm_addrs(cm_of(cm));
        addrs.expect("the fabric has it")
    }
}
