//! Devices, and the objects on them.

use core::net::{IpAddr, SocketAddr};
use std::{
    collections::{HashMap, VecDeque},
    hash::BuildHasherDefault,
    sync::Arc,
};

use roce_fault::{Faults, PostStep, Posted, Posting, QpRef};
use roce_mem::{MemError, MemoryTable, PdHandle, Region};
use roce_port::{CmEventKind, ConnId, ListenId, Port, PortChange, QpInit};
use roce_qp::CompletionQueue;
use roce_verbs::{
    AccessFlags, AsyncEvent, Completion, DeviceLimits, Instant, NumberHasher, QpAttr, QpState, QpType, Qpn, RecvWr,
    SendWr, WcStatus,
    provider::{
        CmRef, ConnParams, CqId, DeviceCaps, DeviceIx, Event, GrantOf, Granted, KeyId, KeyKind, Lent, MrId, MrInfo,
        PdId, Provider, QpId, QpSpec, Registration, RejectReason, Revoked, Slots, VerbsError,
    },
    wr::PostError,
};

use crate::objects::{Cm, Key};

/// First port number when the user does not care.
pub(crate) const FIRST_PORT: u16 = 49152;

/// The ports of a fabric: each is a device.
pub trait Ports {
    /// How many there are. Others may come behind them, and are told of by [`Fabric::add_device`]; none goes.
    fn count(&self) -> usize;
    /// A port.
    fn port(&mut self, index: usize) -> &mut Port;
    /// The table of a port's keys.
    fn memory(&self, index: usize) -> &Arc<MemoryTable>;
    /// The port that leads to a peer, and our address there.
    ///
    /// # Errors
    /// When the source address is not ours, or there is no way.
    fn route(&self, src: Option<IpAddr>, dst: IpAddr) -> Result<(usize, IpAddr), VerbsError>;
    /// Connect requests to a port number of RDMA_CM, at one address or (`None`) all of a port, are going to be taken: others that share
    /// the address are to know.
    ///
    /// # Errors
    /// When another has it.
    fn claim(&mut self, _index: usize, _addr: Option<IpAddr>, _port: u16) -> Result<(), VerbsError> {
        Ok(())
    }
    /// They are not taken any more.
    fn release(&mut self, _index: usize, _addr: Option<IpAddr>, _port: u16) {}
    /// A port has changed for the processes that share its address.
    fn port_change(&mut self, _index: usize, _change: PortChange) {}
}

/// How a fabric handles keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FabricConfig {
    /// Keys are granted and taken back at once. Otherwise by work requests, as hardware does it.
    pub instant_keys: bool,
    /// There are fast registrations.
    pub fast_registration: bool,
    /// There are memory windows.
    pub windows: bool,
    /// Value of [`DeviceCaps::tells_invalidated`]: no, as of rdma_rxe.
    pub tells_invalidated: bool,
}

impl Default for FabricConfig {
    fn default() -> Self {
        Self {
            instant_keys: true,
            fast_registration: true,
            windows: true,
            tells_invalidated: true,
        }
    }
}

pub(crate) struct Mr {
    pub(crate) pd: PdId,
    pub(crate) region: Arc<Region>,
    /// Another loop made it.
    pub(crate) borrowed: bool,
}

pub(crate) struct Pd {
    pub(crate) device: usize,
    pub(crate) handle: PdHandle,
    /// Another loop made it.
    pub(crate) borrowed: bool,
}

struct Qp {
    pd: PdId,
    device: usize,
    qpn: Qpn,
    /// The peer used a key, address or right that it does not have.
    violated: bool,
}

type ByQpn = HashMap<u32, QpId, BuildHasherDefault<NumberHasher>>;

/// State of a device.
struct Device {
    /// All completions of it: one queue for all that a loop polls.
    cq: Arc<CompletionQueue>,
    qps: ByQpn,
    pub(crate) listeners: HashMap<ListenId, CmRef>,
    pub(crate) conns: HashMap<ConnId, CmRef>,
}

/// How many objects there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct Usage {
    pub pds: usize,
    pub mrs: usize,
    pub keys: usize,
    pub cqs: usize,
    pub qps: usize,
    pub cms: usize,
}

impl Usage {
    /// Adds those of another loop.
    pub fn add(&mut self, other: &Self) {
        self.pds += other.pds;
        self.mrs += other.mrs;
        self.keys += other.keys;
        self.cqs += other.cqs;
        self.qps += other.qps;
        self.cms += other.cms;
    }
}

/// All ports of a loop as one provider.
pub struct Fabric<P> {
    pub(crate) ports: P,
    pub(crate) config: FabricConfig,
    /// Faults of verbs on demand.
    faults: Option<Faults>,
    pub(crate) now: Instant,
    pub(crate) caps: Vec<DeviceCaps>,
    devices: Vec<Device>,
    pub(crate) pds: Slots<Pd>,
    pub(crate) mrs: Slots<Mr>,
    pub(crate) keys: Slots<Key>,
    cqs: Slots<usize>,
    qps: Slots<Qp>,
    pub(crate) cms: Slots<Cm>,
    pub(crate) events: VecDeque<Event>,
    /// Connection events that the user has not taken, with their devices.
    pub(crate) cm_events: VecDeque<(usize, CmEventKind)>,
    /// Completions on their way out.
    taken: Vec<Completion>,
    /// The last port that was given to a listener which did not name one.
    pub(crate) next_port: u16,
}

pub(crate) fn gone(what: &str) -> VerbsError {
    VerbsError::Invalid(format!("no such {what}"))
}

pub(crate) fn mem_error(e: MemError) -> VerbsError {
    match e {
        MemError::Limit(what) => VerbsError::Limit(what),
        MemError::Busy(what) => VerbsError::Busy(what),
        other => VerbsError::Invalid(other.to_string()),
    }
}

/// Moves a queue pair to the error state.
fn fail(port: &mut Port, now: Instant, qpn: Qpn) {
    let attr = QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    };
    // In RESET nothing changes.
    let _ = port.modify_qp(now, qpn, &attr);
}

pub(crate) const FULL: VerbsError = VerbsError::Limit("objects of a loop");

impl<P: Ports> Fabric<P> {
    /// A fabric on these ports, of which device *i* is port *i*. `limits` and addresses are what it says of each.
    pub fn new(ports: P, config: FabricConfig, devices: Vec<(DeviceLimits, Vec<IpAddr>)>) -> Self {
        let mut this = Self {
            devices: Vec::new(),
            ports,
            config,
            faults: None,
            now: Instant::ZERO,
            caps: Vec::new(),
            pds: Slots::default(),
            mrs: Slots::default(),
            keys: Slots::default(),
            cqs: Slots::default(),
            qps: Slots::default(),
            cms: Slots::default(),
            events: VecDeque::new(),
            cm_events: VecDeque::new(),
            taken: Vec::new(),
            next_port: FIRST_PORT,
        };
        for (limits, addrs) in devices {
            this.add_device(limits, addrs);
        }
        this
    }

    /// Sets the rules of faults on demand, for verbs.
    pub fn set_faults(&mut self, faults: Option<Faults>) {
        self.faults = faults;
    }

    fn verb_faults(&self) -> Option<&Faults> {
        self.faults.as_ref().filter(|faults| faults.concern_verbs())
    }

    /// Posts, with the faults that rules demand.
    #[inline]
    fn post<T>(
        &mut self,
        verb: Posting,
        qp: QpId,
        wrs: &[T],
        post: impl Fn(&mut Port, Instant, Qpn, &[T]) -> Posted,
    ) -> Posted {
        let (device, qpn, _) = self.qp(qp).ok_or((0, PostError::NoQueuePair))?;
        let faults = self.verb_faults().cloned();
        let (port, now) = (self.ports.port(device), self.now);
        let Some(faults) = faults else {
            return post(port, now, qpn, wrs);
        };
        let serial = port.qp_serial(qpn).unwrap_or(0);
        let qp = QpRef {
            qpn: qpn.value(),
            serial,
        };
        faults.post(verb, qp, wrs, false, |step| match step {
            PostStep::Post(wrs) => post(port, now, qpn, wrs),
            PostStep::Fail => {
                fail(port, now, qpn);
                port.push_event(AsyncEvent::QpFatal(qpn));
                Ok(())
            }
        })
    }

    /// Replaces the statuses of completions as rules demand. The queue pair of such a completion moves to the error state.
    fn replace_statuses(&mut self, completions: &mut [(QpId, Completion)]) {
        let Some(faults) = self.verb_faults().cloned() else {
            return;
        };
        for (qp, completion) in completions {
            let Some((device, qpn, _)) = self.qp(*qp) else { continue };
            let port = self.ports.port(device);
            let serial = port.qp_serial(qpn).unwrap_or(0);
            if faults.complete(serial, completion) {
                fail(port, self.now, qpn);
            }
        }
    }

    /// There is one more port, which is the next device. Listeners at all addresses that were there before are not at its own.
    pub fn add_device(&mut self, limits: DeviceLimits, addrs: Vec<IpAddr>) -> DeviceIx {
        let index = self.devices.len();
        debug_assert!(index < self.ports.count());
        self.devices.push(Device {
            cq: CompletionQueue::new(index as u32, limits.max_cqe, None),
            qps: ByQpn::default(),
            listeners: HashMap::new(),
            conns: HashMap::new(),
        });
        let config = self.config;
        self.caps.push(DeviceCaps {
            name: None,
            limits,
            fast_registration: config.fast_registration,
            window_1: config.windows,
            window_2: config.windows,
            tells_invalidated: config.tells_invalidated,
            instant_keys: config.instant_keys,
            scattered_keys: config.instant_keys && config.fast_registration,
            zero_based: true,
            iova: true,
            addrs,
        });
        DeviceIx(index as u16)
    }

    /// Tells what time it is: for every turn of the loop once.
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// The ports, to be received on and sent from.
    pub fn ports(&mut self) -> &mut P {
        &mut self.ports
    }

    /// How many objects there are.
    pub fn usage(&self) -> Usage {
        Usage {
            pds: self.pds.len(),
            mrs: self.mrs.len(),
            keys: self.keys.len(),
            cqs: self.cqs.len(),
            qps: self.qps.len(),
            cms: self.cms.len(),
        }
    }

    pub(crate) fn pd(&self, pd: PdId) -> Result<(usize, PdHandle), VerbsError> {
        let pd = self.pds.get(pd).ok_or_else(|| gone("protection domain"))?;
        Ok((pd.device, pd.handle))
    }

    /// Device, number and protection domain of a queue pair.
    pub(crate) fn qp(&self, qp: QpId) -> Option<(usize, Qpn, PdHandle)> {
        let qp = self.qps.get(qp)?;
        Some((qp.device, qp.qpn, self.pds.get(qp.pd)?.handle))
    }

    pub(crate) fn listeners(&mut self, device: usize) -> &mut HashMap<ListenId, CmRef> {
        &mut self.devices[device].listeners
    }

    pub(crate) fn conns(&mut self, device: usize) -> &mut HashMap<ConnId, CmRef> {
        &mut self.devices[device].conns
    }

    fn make_qp(&mut self, spec: &QpSpec) -> Result<(usize, Qpn), VerbsError> {
        let (device, pd) = self.pd(spec.pd)?;
        if self.cqs.get(spec.cq) != Some(&device) {
            return Err(gone("completion queue of the device"));
        }
        let cq = self.devices[device].cq.clone();
        let init = QpInit {
            pd,
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq,
            caps: spec.caps,
            signal_all: spec.signal_all,
            srq: None,
            xrcd: None,
        };
        let (now, port) = (self.now, self.ports.port(device));
        port.set_now(now);
        let qpn = port.create_qp(init)?;
        let ready = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC),
            ..QpAttr::default()
        };
        if let Err(e) = port.modify_qp(now, qpn, &ready) {
            let _ = port.destroy_qp(now, qpn);
            return Err(e);
        }
        Ok((device, qpn))
    }

    fn async_event(&mut self, device: usize, event: AsyncEvent) -> Option<Event> {
        if let AsyncEvent::QpAccessError(qpn) = event
            && let Some(id) = self.devices[device].qps.get(&qpn.value())
            && let Some(qp) = self.qps.get_mut(*id)
        {
            qp.violated = true;
        }
        Some(Event::Async(DeviceIx(device as u16), event))
    }
}

impl<P: Ports> Provider for Fabric<P> {
    fn devices(&self) -> &[DeviceCaps] {
        &self.caps
    }

    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        let device = usize::from(device.0);
        if device >= self.devices.len() {
            return Err(gone("device"));
        }
        let handle = self.ports.memory(device).alloc_pd().map_err(mem_error)?;
        let pd = Pd {
            device,
            handle,
            borrowed: false,
        };
        self.pds.insert(pd).ok_or(FULL)
    }

    fn free_pd(&mut self, pd: PdId) {
        if let Some(pd) = self.pds.remove(pd).filter(|pd| !pd.borrowed)
            && let Err(e) = self.ports.memory(pd.device).dealloc_pd(pd.handle)
        {
            tracing::error!("releasing a protection domain failed: {e}");
        }
    }

    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        let (device, handle) = self.pd(pd)?;
        let end = what.offset.checked_add(what.len);
        let end = end.ok_or_else(|| VerbsError::Invalid("a range that wraps".into()))?;
        if let Some(errno) = self.verb_faults().and_then(Faults::registering) {
            return Err(VerbsError::Io {
                context: "registering memory (refused by a fault rule)".into(),
                source: std::io::Error::from_raw_os_error(errno),
            });
        }
        let mem = self.ports.memory(device);
        let region = mem
            .register_memory(handle, &what.memory, what.offset..end, what.iova, what.access)
            .map_err(mem_error)?;
        self.number_mr(pd, region, false)
    }

    fn deregister(&mut self, mr: MrId) {
        let Some(mr) = self.mrs.remove(mr).filter(|mr| !mr.borrowed) else {
            return;
        };
        if let Ok((device, _)) = self.pd(mr.pd)
            && let Err(e) = self.ports.memory(device).revoke(&mr.region)
        {
            tracing::error!("deregistering memory failed: {e}");
        }
    }

    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        let key = self.make_key(pd, kind)?;
        self.keys.insert(key).ok_or(FULL)
    }

    fn free_key(&mut self, key: KeyId) {
        if let Some(key) = self.keys.remove(key) {
            self.end_key(&key);
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
        let device = usize::from(device.0);
        let caps = self.caps.get(device).ok_or_else(|| gone("device"))?;
        if entries > caps.limits.max_cqe {
            return Err(VerbsError::Limit("entries of a completion queue"));
        }
        self.cqs.insert(device).ok_or(FULL)
    }

    fn destroy_cq(&mut self, cq: CqId) {
        self.cqs.remove(cq);
    }

    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        let (device, qpn) = self.make_qp(spec)?;
        let qp = Qp {
            pd: spec.pd,
            device,
            qpn,
            violated: false,
        };
        let Some(id) = self.qps.insert(qp) else {
            let _ = self.ports.port(device).destroy_qp(self.now, qpn);
            return Err(FULL);
        };
        self.devices[device].qps.insert(qpn.value(), id);
        Ok(id)
    }

    fn destroy_qp(&mut self, qp: QpId) {
        let Some(old) = self.qps.remove(qp) else { return };
        let device = &mut self.devices[old.device];
        device.qps.remove(&old.qpn.value());
        if let Err(e) = self.ports.port(old.device).destroy_qp(self.now, old.qpn) {
            tracing::error!("destroying a queue pair failed: {e}");
        }
        self.devices[old.device].cq.forget(old.qpn);
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.qps.get(qp).map(|qp| qp.qpn)
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.post(Posting::Send, qp, wrs, |port, now, qpn, wrs| {
            port.post_send(now, qpn, wrs)
        })
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.post(Posting::Recv, qp, wrs, |port, now, qpn, wrs| {
            port.post_recv(now, qpn, wrs)
        })
    }

    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        self.grant_key(qp, key, grant, wr_id)
    }

    fn grant_list(&mut self, qp: QpId, key: KeyId, pieces: &[GrantOf]) -> Result<Granted, PostError> {
        self.grant_pieces(qp, key, pieces)
    }

    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        self.revoke_key(qp, key, wr_id)
    }

    fn close_key(&mut self, key: KeyId) {
        self.shut_key(key);
    }

    fn drain(&mut self, qp: QpId) {
        let Some((device, qpn, _)) = self.qp(qp) else { return };
        let port = self.ports.port(device);
        if port.qp_state(qpn) != Some(QpState::Err) {
            let attr = QpAttr {
                state: Some(QpState::Err),
                ..QpAttr::default()
            };
            if let Err(e) = port.modify_qp(self.now, qpn, &attr) {
                tracing::error!(%qpn, "a queue pair could not be moved to error: {e}");
            }
        }
        // All of its completions are in the queue, and come before the events.
        self.events.push_back(Event::Drained(qp));
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

    fn cm_disconnect_by(&mut self, id: CmRef, ways: &[CmRef]) {
        self.disconnect_by(id, ways);
    }

    fn cm_destroy(&mut self, id: CmRef) {
        self.forget(id);
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)> {
        self.cms.get(id).map(Cm::addrs)
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        self.take_cm_events();
        let before = out.len();
        for device in &self.devices {
            let room = max - (out.len() - before);
            self.taken.clear();
            let polled = device.cq.poll(&mut self.taken, room);
            let known = |wc: &Completion| Some((*device.qps.get(&wc.qpn.value())?, *wc));
            let from = out.len();
            out.extend(self.taken.iter().filter_map(known));
            // A refused WRITE that has taken a receive is told by that, and not by an event.
            for (qp, _) in out[from..]
                .iter()
                .filter(|(_, wc)| wc.status == WcStatus::LocalAccessError)
            {
                if let Some(qp) = self.qps.get_mut(*qp) {
                    qp.violated = true;
                }
            }
            if polled.is_err() {
                return Err(VerbsError::State("a completion queue has overflowed".into()));
            }
        }
        if self.faults.is_some() {
            self.replace_statuses(&mut out[before..]);
        }
        Ok(out.len() - before)
    }

    fn poll_event(&mut self) -> Option<Event> {
        while let Some(event) = self.events.pop_front() {
            // Its object may have been destroyed since.
            let is_live = match &event {
                Event::Drained(qp) => self.qps.get(*qp).is_some(),
                Event::Cm { id, .. } => self.cms.get(*id).is_some(),
                _ => true,
            };
            if is_live {
                return Some(event);
            }
        }
        self.take_cm_events();
        if let Some(event) = self.next_cm_event() {
            return Some(event);
        }
        for device in 0..self.devices.len() {
            if let Some(event) = self.ports.port(device).poll_async_event() {
                return self.async_event(device, event);
            }
        }
        None
    }
}
