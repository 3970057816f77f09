//! A fabric: devices of both kinds, and the objects on them.

use core::net::IpAddr;
use std::{
    collections::{HashMap, VecDeque},
    hash::BuildHasherDefault,
    io,
    sync::Arc,
};

use roce_fault::{Faults, PostStep, Posted, Posting, QpRef};
use roce_mem::{MemError, PdHandle};
use roce_port::{CmEventKind, ConnId, ListenId, Port, QpInit};
use roce_qp::CompletionQueue;
use roce_verbs::{
    AccessFlags, AsyncEvent, Completion, DeviceLimits, Instant, NumberHasher, QpAttr, QpState, QpType, Qpn, WcStatus,
    provider::{CmRef, DeviceCaps, DeviceIx, Event, MrId, MrInfo, QpId, QpSpec, Registration, VerbsError},
    wr::PostError,
};

use crate::{
    hard::{Hard, HardDevice},
    hardware::Hardware,
    ports::Ports,
    tables::{Cq, FULL, Mr, Pd, Qp, QpOf, Tables, Usage, gone},
};

/// First port number when the user does not care.
pub(crate) const FIRST_PORT: u16 = 49152;

/// How a fabric handles keys of software devices.
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

/// Backend of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backend {
    /// Software: index of its port.
    Soft(usize),
    /// RDMA device of the host: its index there.
    Hard(usize),
}

type ByQpn = HashMap<u32, QpId, BuildHasherDefault<NumberHasher>>;

/// State of a software device, by port.
struct SoftDevice {
    /// Its index in the fabric.
    ix: DeviceIx,
    /// Completion queue of all queue pairs.
    cq: Arc<CompletionQueue>,
    qps: ByQpn,
    listeners: HashMap<ListenId, CmRef>,
    conns: HashMap<ConnId, CmRef>,
}

/// All devices of a loop as one provider: software devices, each on a port, and RDMA devices of the host.
pub struct Fabric<P> {
    pub(crate) ports: P,
    pub(crate) config: FabricConfig,
    /// Fault rules for the verbs of software devices.
    faults: Option<Faults>,
    pub(crate) now: Instant,
    pub(crate) caps: Vec<DeviceCaps>,
    /// By device.
    backends: Vec<Backend>,
    soft: Vec<SoftDevice>,
    pub(crate) hard: Option<Hard>,
    pub(crate) tables: Tables,
    pub(crate) events: VecDeque<Event>,
    /// Connection events that the user has not taken, with their ports.
    pub(crate) cm_events: VecDeque<(usize, CmEventKind)>,
    /// Completions on their way out.
    taken: Vec<Completion>,
    /// RDMA devices are polled first, the next time.
    hard_first: bool,
    /// The last port number that was given to a listener which did not name one.
    pub(crate) next_port: u16,
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

impl<P: Ports> Fabric<P> {
    /// A fabric on these ports, one device for each. `devices` are their limits and addresses.
    pub fn new(ports: P, config: FabricConfig, devices: Vec<(DeviceLimits, Vec<IpAddr>)>) -> Self {
        let mut this = Self {
            ports,
            config,
            faults: None,
            now: Instant::ZERO,
            caps: Vec::new(),
            backends: Vec::new(),
            soft: Vec::new(),
            hard: None,
            tables: Tables::default(),
            events: VecDeque::new(),
            cm_events: VecDeque::new(),
            taken: Vec::new(),
            hard_first: false,
            next_port: FIRST_PORT,
        };
        for (limits, addrs) in devices {
            this.add_device(limits, addrs);
        }
        this
    }

    /// Adds the RDMA devices of the host, of which there were none. `route` returns the local address of the route to a peer. An address
    /// that a software device has too is the software device's.
    pub fn set_hardware(&mut self, backend: Box<dyn Hardware>, route: fn(IpAddr) -> io::Result<IpAddr>) {
        debug_assert!(self.hard.is_none());
        self.hard = Some(Hard::new(backend, route));
        self.refresh_hardware();
    }

    /// Returns the RDMA devices of the host.
    pub fn hardware(&self) -> Option<&dyn Hardware> {
        self.hard.as_ref().map(|hard| &*hard.backend)
    }

    /// Takes over what the RDMA devices have become, and new ones.
    fn refresh_hardware(&mut self) {
        let Some(hard) = &mut self.hard else { return };
        for (index, caps) in hard.backend.devices().iter().enumerate() {
            match hard.devices.get(index) {
                Some(device) => self.caps[usize::from(device.ix.0)].clone_from(caps),
                None => {
                    hard.devices.push(HardDevice::new(DeviceIx(self.caps.len() as u16)));
                    self.backends.push(Backend::Hard(index));
                    self.caps.push(caps.clone());
                }
            }
        }
    }

    /// Reads the descriptors of RDMA devices without waiting. Then completions must be polled, and then events. Returns whether there
    /// was anything.
    ///
    /// # Errors
    /// If the system fails.
    pub fn poll_hardware(&mut self) -> Result<bool, VerbsError> {
        let Some(hard) = &mut self.hard else { return Ok(false) };
        let polled = hard.backend.poll();
        self.refresh_hardware();
        if let Some(hard) = &mut self.hard {
            while let Some(event) = hard.backend.next_event() {
                hard.process(&mut self.tables, event);
            }
        }
        polled
    }

    /// Requests that the descriptors of RDMA devices report the next completion. Completions before that are not reported: poll once
    /// more before waiting.
    ///
    /// # Errors
    /// If a completion queue has failed.
    pub fn arm_hardware(&mut self) -> Result<(), VerbsError> {
        match &mut self.hard {
            Some(hard) => hard.arm(&mut self.tables),
            None => Ok(()),
        }
    }

    /// Sets the fault rules for verbs of software devices.
    pub fn set_faults(&mut self, faults: Option<Faults>) {
        self.faults = faults;
    }

    fn verb_faults(&self) -> Option<&Faults> {
        self.faults.as_ref().filter(|faults| faults.concern_verbs())
    }

    /// Posts to a software device, with the faults that rules demand.
    #[inline]
    pub(crate) fn post<T>(
        &mut self,
        verb: Posting,
        qp: QpId,
        wrs: &[T],
        post: impl Fn(&mut Port, Instant, Qpn, &[T]) -> Posted,
    ) -> Posted {
        let (port, qpn, _) = self.soft_qp(qp).ok_or((0, PostError::NoQueuePair))?;
        let faults = self.verb_faults().cloned();
        let (port, now) = (self.ports.port(port), self.now);
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
            let Some((port, qpn, _)) = self.soft_qp(*qp) else {
                continue;
            };
            let port = self.ports.port(port);
            let serial = port.qp_serial(qpn).unwrap_or(0);
            if faults.complete(serial, completion) {
                fail(port, self.now, qpn);
            }
        }
    }

    /// Adds a software device for the next port. Listeners at all addresses that were there before are not at its own.
    pub fn add_device(&mut self, limits: DeviceLimits, addrs: Vec<IpAddr>) -> DeviceIx {
        let (port, ix) = (self.soft.len(), DeviceIx(self.backends.len() as u16));
        debug_assert!(port < self.ports.count());
        self.backends.push(Backend::Soft(port));
        self.soft.push(SoftDevice {
            ix,
            cq: CompletionQueue::new(port as u32, limits.max_cqe, None),
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
        ix
    }

    /// Sets the time: once in each iteration of the loop.
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// Returns the ports, to receive and send.
    pub fn ports(&mut self) -> &mut P {
        &mut self.ports
    }

    /// Returns the number of objects of each kind.
    pub fn usage(&self) -> Usage {
        self.tables.usage()
    }

    pub(crate) fn backend(&self, device: DeviceIx) -> Result<Backend, VerbsError> {
        let backend = self.backends.get(usize::from(device.0));
        backend.copied().ok_or_else(|| gone("device"))
    }

    /// Returns the index of a port's device.
    pub(crate) fn ix(&self, port: usize) -> DeviceIx {
        self.soft[port].ix
    }

    /// Returns the capabilities of the software devices, by port.
    pub(crate) fn soft_caps(&self) -> impl Iterator<Item = &DeviceCaps> {
        self.soft.iter().map(|device| &self.caps[usize::from(device.ix.0)])
    }

    /// Returns port, number and protection domain of a software device's queue pair.
    pub(crate) fn soft_qp(&self, qp: QpId) -> Option<(usize, Qpn, PdHandle)> {
        match self.tables.qps.get(qp)? {
            Qp {
                qpn,
                of: QpOf::Soft { port, pd },
                ..
            } => Some((*port, *qpn, *pd)),
            _ => None,
        }
    }

    pub(crate) fn listeners(&mut self, port: usize) -> &mut HashMap<ListenId, CmRef> {
        &mut self.soft[port].listeners
    }

    pub(crate) fn conns(&mut self, port: usize) -> &mut HashMap<ConnId, CmRef> {
        &mut self.soft[port].conns
    }

    pub(crate) fn alloc_soft_pd(&mut self, port: usize) -> Result<Pd, VerbsError> {
        let handle = self.ports.memory(port).alloc_pd().map_err(mem_error)?;
        Ok(Pd::Soft {
            port,
            handle,
            borrowed: false,
        })
    }

    pub(crate) fn register_soft(
        &mut self,
        port: usize,
        pd: PdHandle,
        what: &Registration,
    ) -> Result<MrInfo, VerbsError> {
        let end = what.offset.checked_add(what.len);
        let end = end.ok_or_else(|| VerbsError::Invalid("a range that wraps".into()))?;
        if let Some(errno) = self.verb_faults().and_then(Faults::registering) {
            return Err(VerbsError::Io {
                context: "registering memory (refused by a fault rule)".into(),
                source: io::Error::from_raw_os_error(errno),
            });
        }
        let mem = self.ports.memory(port);
        let region = mem
            .register_memory(pd, &what.memory, what.offset..end, what.iova, what.access)
            .map_err(mem_error)?;
        self.number_mr(port, region, false)
    }

    pub(crate) fn deregister_soft(&mut self, mr: MrId) {
        if let Some(Mr::Soft {
            port,
            region,
            borrowed: false,
        }) = self.tables.mrs.remove(mr)
            && let Err(e) = self.ports.memory(port).revoke(&region)
        {
            tracing::error!("deregistering memory failed: {e}");
        }
    }

    /// Creates a queue pair of a software device, in INIT.
    fn make_qp(&mut self, port: usize, pd: PdHandle, spec: &QpSpec) -> Result<Qpn, VerbsError> {
        let cq = self.soft[port].cq.clone();
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
        let (now, port) = (self.now, self.ports.port(port));
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
        Ok(qpn)
    }

    pub(crate) fn create_soft_qp(&mut self, port: usize, pd: PdHandle, spec: &QpSpec) -> Result<QpId, VerbsError> {
        if !matches!(self.tables.cqs.get(spec.cq), Some(Cq::Soft { port: of }) if *of == port) {
            return Err(gone("completion queue of the device"));
        }
        let qpn = self.make_qp(port, pd, spec)?;
        let qp = Qp {
            qpn,
            violated: false,
            of: QpOf::Soft { port, pd },
        };
        let Some(id) = self.tables.qps.insert(qp) else {
            let _ = self.ports.port(port).destroy_qp(self.now, qpn);
            return Err(FULL);
        };
        self.soft[port].qps.insert(qpn.value(), id);
        Ok(id)
    }

    pub(crate) fn destroy_soft_qp(&mut self, (port, qpn): (usize, Qpn), id: QpId) {
        self.tables.qps.remove(id);
        self.soft[port].qps.remove(&qpn.value());
        if let Err(e) = self.ports.port(port).destroy_qp(self.now, qpn) {
            tracing::error!("destroying a queue pair failed: {e}");
        }
        self.soft[port].cq.forget(qpn);
    }

    pub(crate) fn drain_soft(&mut self, port: usize, qpn: Qpn, qp: QpId) {
        let port = self.ports.port(port);
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

    /// Appends at most `max` completions of all devices.
    pub(crate) fn poll_all(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError> {
        let before = out.len();
        if self.hard.is_none() {
            self.poll_soft(out, max)?;
            return Ok(out.len() - before);
        }
        // By turns, so that neither starves the other.
        self.hard_first = !self.hard_first;
        for is_hard in [self.hard_first, !self.hard_first] {
            let room = max - (out.len() - before);
            match is_hard {
                true => self.poll_hard(out, room)?,
                false => self.poll_soft(out, room)?,
            }
        }
        Ok(out.len() - before)
    }

    fn poll_hard(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<(), VerbsError> {
        let Some(hard) = &mut self.hard else { return Ok(()) };
        hard.backend.close_removed();
        hard.poll(&mut self.tables, out, max)
    }

    fn poll_soft(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<(), VerbsError> {
        let before = out.len();
        for device in &self.soft {
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
                if let Some(qp) = self.tables.qps.get_mut(*qp) {
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
        Ok(())
    }

    /// Returns the next event of a software device itself.
    pub(crate) fn next_async_event(&mut self) -> Option<Event> {
        for (port, device) in self.soft.iter().enumerate() {
            let Some(event) = self.ports.port(port).poll_async_event() else {
                continue;
            };
            if let AsyncEvent::QpAccessError(qpn) = event
                && let Some(id) = device.qps.get(&qpn.value())
                && let Some(qp) = self.tables.qps.get_mut(*id)
            {
                qp.violated = true;
            }
            return Some(Event::Async(device.ix, event));
        }
        None
    }

    /// Number of software devices.
    pub(crate) fn soft_count(&self) -> usize {
        self.soft.len()
    }
}
