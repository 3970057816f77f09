//! Software devices: the objects on a fabric's ports.

use core::net::IpAddr;
use std::{
    collections::{HashMap, VecDeque},
    hash::BuildHasherDefault,
    io,
    sync::Arc,
};

use crate::{CmEventKind, ConnId, ListenId, Port, QpInit};
use roce_fault::{Faults, PostStep, Posted, Posting, QpRef};
use roce_qp::CompletionQueue;
use roce_verbs::mem::{MemError, PdHandle, Region};
use roce_verbs::{
    AsyncEvent, Completion, DeviceLimits, Instant, NumberHasher, QpType, Qpn, RecvWr, SendWr, WcStatus,
    provider::{
        CmRef, CqId, DeviceCaps, DeviceIx, Event, KeyId, MrId, MrInfo, PdId, QpId, QpSpec, Registration, VerbsError,
    },
    wr::PostError,
};

use crate::fabric::{
    backend::{Backend, NewCm},
    ports::Ports,
    slots::Table,
};

mod cm;
mod keys;

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

/// State of a device, by port.
struct Device {
    /// Completion queue of all queue pairs.
    cq: Arc<CompletionQueue>,
    qps: HashMap<u32, QpId, BuildHasherDefault<NumberHasher>>,
    listeners: HashMap<ListenId, CmRef>,
    conns: HashMap<ConnId, CmRef>,
}

/// Object of a port's memory table.
struct Of<T> {
    port: usize,
    object: T,
}

/// Queue pair.
#[derive(Clone, Copy)]
struct Qp {
    port: usize,
    qpn: Qpn,
    pd: PdHandle,
    /// The peer used a key, address or right that it does not have.
    violated: bool,
}

/// Software devices, each a port of the loop. Indices of devices are those of ports.
pub(crate) struct Soft<P> {
    ports: P,
    config: FabricConfig,
    faults: Option<Faults>,
    now: Instant,
    devices: Vec<Device>,
    pds: Table<PdId, Of<PdHandle>>,
    mrs: Table<MrId, Of<Arc<Region>>>,
    keys: Table<KeyId, keys::Key>,
    qps: Table<QpId, Qp>,
    cms: Table<CmRef, cm::Cm>,
    events: VecDeque<Event>,
    /// Connection events that the user has not taken, with their ports.
    cm_events: VecDeque<(usize, CmEventKind)>,
    /// Completions of one queue, between calls empty.
    polled: Vec<Completion>,
}

fn mem_error(e: MemError) -> VerbsError {
    match e {
        MemError::Limit(what) => VerbsError::Limit(what),
        MemError::Busy(what) => VerbsError::Busy(what),
        other => VerbsError::Invalid(other.to_string()),
    }
}

/// Logs the failure of a release, which has no other place to go.
fn log_failed(what: &str, done: Result<(), impl core::fmt::Display>) {
    if let Err(e) = done {
        tracing::error!("{what} failed: {e}");
    }
}

impl<P: Ports> Soft<P> {
    pub(crate) fn new(ports: P, config: FabricConfig) -> Self {
        Self {
            ports,
            config,
            faults: None,
            now: Instant::ZERO,
            devices: Vec::new(),
            pds: Table::default(),
            mrs: Table::default(),
            keys: Table::default(),
            qps: Table::default(),
            cms: Table::default(),
            events: VecDeque::new(),
            cm_events: VecDeque::new(),
            polled: Vec::new(),
        }
    }

    /// Adds a device for the next port. Returns its capabilities.
    pub(crate) fn add_device(&mut self, limits: DeviceLimits, addrs: Vec<IpAddr>) -> DeviceCaps {
        let (port, config) = (self.devices.len(), self.config);
        debug_assert!(port < self.ports.count());
        self.devices.push(Device {
            cq: CompletionQueue::new(port as u32, limits.max_cqe, None),
            qps: HashMap::default(),
            listeners: HashMap::new(),
            conns: HashMap::new(),
        });
        DeviceCaps {
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
        }
    }

    pub(crate) fn ports(&mut self) -> &mut P {
        &mut self.ports
    }

    pub(crate) fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    pub(crate) fn set_faults(&mut self, faults: Option<Faults>) {
        self.faults = faults;
    }

    fn verb_faults(&self) -> Option<&Faults> {
        self.faults.as_ref().filter(|faults| faults.concern_verbs())
    }

    /// Posts, with the faults that rules demand.
    fn post<T>(
        &mut self,
        verb: Posting,
        qp: QpId,
        wrs: &[T],
        post: impl Fn(&mut Port, Instant, Qpn, &[T]) -> Posted,
    ) -> Posted {
        let Qp { port, qpn, .. } = *self.qps.get(qp).ok_or((0, PostError::NoQueuePair))?;
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
                port.fail_qp(now, qpn);
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
            let Some(Qp { port, qpn, .. }) = self.qps.get(*qp) else {
                continue;
            };
            let port = self.ports.port(*port);
            let serial = port.qp_serial(*qpn).unwrap_or(0);
            if faults.complete(serial, completion) {
                port.fail_qp(self.now, *qpn);
            }
        }
    }

    fn pd(&self, pd: PdId) -> Result<&Of<PdHandle>, VerbsError> {
        self.pds.get(pd).ok_or_else(|| gone("protection domain"))
    }

    fn insert_mr(&mut self, id: MrId, mr: Of<Arc<Region>>) -> MrInfo {
        let region = &mr.object;
        let info = MrInfo {
            id,
            addr: region.addr(),
            len: region.len(),
            lkey: region.lkey(),
            rkey: region.rkey(),
        };
        self.mrs.insert(id, mr);
        info
    }

    /// Returns the next event. `new` gives numbers to connect requests.
    pub(crate) fn next_event(&mut self, new: NewCm<'_>) -> Option<Event> {
        let event = self.events.pop_front();
        event.or_else(|| {
            self.take_cm_events();
            self.next_cm_event(new).or_else(|| self.next_async_event())
        })
    }

    fn next_async_event(&mut self) -> Option<Event> {
        for (port, device) in self.devices.iter().enumerate() {
            let Some(event) = self.ports.port(port).poll_async_event() else {
                continue;
            };
            if let AsyncEvent::QpAccessError(qpn) = event
                && let Some(id) = device.qps.get(&qpn.value())
                && let Some(qp) = self.qps.get_mut(*id)
            {
                qp.violated = true;
            }
            return Some(Event::Async(DeviceIx(port as u16), event));
        }
        None
    }
}

/// Error of a number without an object.
pub(crate) fn gone(what: &str) -> VerbsError {
    VerbsError::Invalid(format!("no such {what}"))
}

impl<P: Ports> Backend for Soft<P> {
    fn alloc_pd(&mut self, port: usize, id: PdId) -> Result<(), VerbsError> {
        let pd = self.ports.memory(port).alloc_pd().map_err(mem_error)?;
        self.pds.insert(id, Of { port, object: pd });
        Ok(())
    }

    fn free_pd(&mut self, pd: PdId) {
        if let Some(pd) = self.pds.remove(pd) {
            let done = self.ports.memory(pd.port).dealloc_pd(pd.object);
            log_failed("releasing a protection domain", done);
        }
    }

    fn register(&mut self, pd: PdId, what: &Registration, id: MrId) -> Result<MrInfo, VerbsError> {
        let &Of { port, object: pd, .. } = self.pd(pd)?;
        let end = what.offset.checked_add(what.len);
        let end = end.ok_or_else(|| VerbsError::Invalid("a range that wraps".into()))?;
        if let Some(errno) = self.verb_faults().and_then(Faults::registering) {
            return Err(VerbsError::Io {
                context: "registering memory (refused by a fault rule)".into(),
                source: io::Error::from_raw_os_error(errno),
            });
        }
        let mem = self.ports.memory(port);
        let region = mem.register_memory(pd, &what.memory, what.offset..end, what.iova, what.access);
        let object = region.map_err(mem_error)?;
        Ok(self.insert_mr(id, Of { port, object }))
    }

    fn deregister(&mut self, mr: MrId) {
        if let Some(mr) = self.mrs.remove(mr) {
            log_failed("deregistering memory", self.ports.memory(mr.port).revoke(&mr.object));
        }
    }

    // All of a port are one queue.
    fn create_cq(&mut self, _: usize, _: u32, _: CqId) -> Result<(), VerbsError> {
        Ok(())
    }

    fn destroy_cq(&mut self, _: CqId) {}

    fn create_qp(&mut self, spec: &QpSpec, id: QpId) -> Result<(), VerbsError> {
        let &Of { port, object: pd, .. } = self.pd(spec.pd)?;
        let cq = self.devices[port].cq.clone();
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
        let (now, at) = (self.now, self.ports.port(port));
        at.set_now(now);
        let qpn = at.create_qp(init)?;
        at.init_qp(now, qpn).inspect_err(|_| drop(at.destroy_qp(now, qpn)))?;
        self.devices[port].qps.insert(qpn.value(), id);
        let qp = Qp {
            port,
            qpn,
            pd,
            violated: false,
        };
        self.qps.insert(id, qp);
        Ok(())
    }

    fn destroy_qp(&mut self, qp: QpId) {
        let Some(Qp { port, qpn, .. }) = self.qps.remove(qp) else {
            return;
        };
        self.devices[port].qps.remove(&qpn.value());
        log_failed(
            "destroying a queue pair",
            self.ports.port(port).destroy_qp(self.now, qpn),
        );
        self.devices[port].cq.forget(qpn);
    }

    fn qpn(&self, qp: QpId) -> Option<Qpn> {
        self.qps.get(qp).map(|qp| qp.qpn)
    }

    fn access_violated(&self, qp: QpId) -> bool {
        self.qps.get(qp).is_some_and(|qp| qp.violated)
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

    fn drain(&mut self, id: QpId) {
        let Some(Qp { port, qpn, .. }) = self.qps.get(id) else {
            return;
        };
        self.ports.port(*port).fail_qp(self.now, *qpn);
        // All of its completions are in the queue, and come before the events.
        self.events.push_back(Event::Drained(id));
    }

    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<(), VerbsError> {
        let before = out.len();
        for device in &self.devices {
            let room = max - (out.len() - before);
            self.polled.clear();
            let polled = device.cq.poll(&mut self.polled, room);
            for wc in &self.polled {
                let Some(id) = device.qps.get(&wc.qpn.value()) else {
                    continue;
                };
                // A refused WRITE that has consumed a receive is reported by its completion, not by an event.
                if wc.status == WcStatus::LocalAccessError
                    && let Some(qp) = self.qps.get_mut(*id)
                {
                    qp.violated = true;
                }
                out.push((*id, *wc));
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
}
