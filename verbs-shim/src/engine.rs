//! The transport behind the devices: one per process, opened with the first object that needs it.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
    slice,
    sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError, Weak},
};

use roce::{
    AsyncEvent, Completion, DatapathKind, Device, DeviceConfig, FaultControl, JoinConfig, VerbsError, WcStatus,
    ring::{RingConfig, RingControl, Written},
    verbs::EventSource,
};

use crate::{
    abi::{c_enum, event},
    config,
    errno::{self, Errno, Result},
    events::{AsyncEvents, Entry, Target},
    fork::{self, Own},
    gids,
    singleton::Singleton,
    symbols,
    worker::{Next, Worker},
};

/// The transport, and the thread that hands its events to the contexts.
pub(crate) struct Engine {
    /// Set once, right after it is made. Dropped first: its thread ends before the device closes.
    worker: OnceLock<Worker>,
    pub(crate) device: Device,
    /// Lets `ferroce fault` change the rules.
    _faults: Option<FaultControl>,
    /// Writes the ring of packets. Dropped after the device.
    ring: Option<RingControl>,
    objects: Mutex<Objects>,
}

/// Destinations of events, and objects that several handles share.
#[derive(Default)]
pub(crate) struct Objects {
    /// By number.
    qps: HashMap<u32, QpEntry>,
    pub(crate) cqs: HashMap<u32, Target>,
    pub(crate) srqs: HashMap<u32, Target>,
    /// XRC domains that were opened by file: device and inode, and how often.
    pub(crate) xrcds: HashMap<(u64, u64), (roce::Xrcd, usize)>,
    /// Contexts, for events of the device.
    contexts: Vec<Weak<AsyncEvents>>,
}

/// A queue pair with the destinations of its events: several of an XRC target.
struct QpEntry {
    inner: roce::Qp,
    /// The domain of an XRC target.
    xrcd: Option<roce::Xrcd>,
    targets: Vec<Target>,
}

impl Objects {
    /// Adds a handle of a queue pair; `xrcd` is the domain of an XRC target.
    pub(crate) fn add_qp(&mut self, inner: roce::Qp, xrcd: Option<&roce::Xrcd>, target: Target) {
        let entry = self.qps.entry(inner.qpn().value()).or_insert_with(|| QpEntry {
            inner,
            xrcd: xrcd.cloned(),
            targets: Vec::new(),
        });
        entry.targets.push(target);
    }

    /// Returns an XRC target of this process by its number and domain.
    pub(crate) fn xrc_target(&self, number: u32, xrcd: &roce::Xrcd) -> Option<roce::Qp> {
        let entry = self.qps.get(&number)?;
        let same = entry.xrcd.as_ref().is_some_and(|own| own.is(xrcd));
        same.then(|| entry.inner.clone())
    }

    /// Takes out the handle of a queue pair at an address, and the queue pair with its last one.
    pub(crate) fn forget_qp(&mut self, number: u32, element: usize) -> Option<Target> {
        let all = &mut self.qps.get_mut(&number)?.targets;
        let at = all.iter().position(|t| t.is_of(element))?;
        let target = all.swap_remove(at);
        if all.is_empty() {
            self.qps.remove(&number);
        }
        Some(target)
    }

    /// Adds a context. Closed ones are removed, so that a program that opens devices again and again leaves nothing.
    pub(crate) fn watch(&mut self, context: &Arc<AsyncEvents>) {
        self.contexts.retain(|c| c.strong_count() > 0);
        self.contexts.push(Arc::downgrade(context));
    }
}

static ENGINE: Own<Singleton<Engine>> = Own::new(Singleton::new);

/// The address to bind: the only one, or all.
fn bind_address() -> Result<IpAddr> {
    Ok(match gids::selected()?.as_slice() {
        [one] => *one,
        _ => Ipv6Addr::UNSPECIFIED.into(),
    })
}

/// The program `ferroce` that this library was installed with, or built with: `ferroce run` names it, other ways of loading
/// don't.
fn own_program() -> Option<PathBuf> {
    let library = symbols::own_path()?;
    let dir = library.parent()?;
    let places = [".", "../bin", "../../bin"];
    let mut programs = places.iter().map(|place| dir.join(place).join("ferroce"));
    programs.find(|program| program.is_file())
}

/// Returns the name of the process.
fn program_name() -> String {
    let exe = std::env::current_exe().unwrap_or_default();
    exe.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Opens the device, shared with other processes unless that is switched off, there is no program to be the broker, or the datapath
/// can't be shared.
fn open_device(wanted: DeviceConfig) -> std::result::Result<Device, VerbsError> {
    if wanted.datapath != DatapathKind::Udp {
        tracing::info!("the {} datapath: this process has its addresses alone", wanted.datapath);
        return Device::open(wanted);
    }
    let Some(mut how) = JoinConfig::from_env() else {
        tracing::info!("no broker (FERROCE_BROKER=off): this process has its addresses alone");
        return Device::open(wanted);
    };
    how.program = how.program.or_else(own_program);
    match Device::open_shared(wanted.clone(), &how) {
        Err(e) if how.program.is_none() => {
            tracing::info!("no broker, so that this process has its addresses alone: {e}");
            Device::open(wanted)
        }
        done => done,
    }
}

/// Starts the ring of packets that is wanted.
fn start_ring(wanted: &mut DeviceConfig) -> Option<RingControl> {
    let name = program_name();
    let (ring, file, on_bad) = config::ring(&name)?;
    let control = RingControl::start(
        &ring,
        RingConfig {
            name,
            file,
            on_bad,
            // Signals are the program's.
            signals: None,
            report: Box::new(report_ring),
        },
    );
    let failed = |e: &io::Error| config::complain(format_args!("no ring of packets is kept: {e}"));
    let control = control.inspect_err(failed).ok()?;
    wanted.ring = Some(ring);
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| fork::at_exit(at_exit));
    Some(control)
}

/// Reports a file of the ring to the user.
fn report_ring(written: &Written) {
    let Written { cause, result } = written;
    match result {
        Ok((path, packets)) => {
            config::complain(format_args!(
                "wrote the last {packets} packets to {}: {cause}",
                path.display()
            ));
        }
        Err(e) => config::complain(format_args!("the last packets can't be written: {e}")),
    }
}

/// Lets the ring be written that a failure is the reason of, before the program that has seen the failure ends.
extern "C" fn at_exit() {
    // A child by vfork has its parent's memory.
    let Some(engine) = fork::owns_memory().then(current).flatten() else {
        return;
    };
    if let Some(ring) = &engine.ring {
        // Waits for a thread that drives the device: it may be about to report the failure.
        engine.device.stats();
        ring.finish();
    }
}

/// Returns the engine of this process if there is one.
pub(crate) fn current() -> Option<Arc<Engine>> {
    ENGINE.get().current()
}

impl Engine {
    /// The engine of this process.
    ///
    /// # Errors
    /// When the port can't be had; the reason is on standard error.
    pub(crate) fn get() -> Result<Arc<Self>> {
        ENGINE.get().get(Self::open)
    }

    fn open() -> Result<Arc<Self>> {
        let mut wanted = config::device(bind_address()?);
        let faults = wanted.faults.as_ref().and_then(|faults| {
            let control = FaultControl::start(&program_name(), faults);
            control
                .map_err(|e| config::complain(format_args!("faults can't be changed while the program runs: {e}")))
                .ok()
        });
        let ring = start_ring(&mut wanted);
        let device = open_device(wanted).map_err(|e| {
            config::complain(format_args!("{e}"));
            Errno::from(e)
        })?;
        let events = device.async_fd().try_clone_to_owned()?;
        let engine = Arc::new(Self {
            worker: OnceLock::new(),
            device,
            _faults: faults,
            ring,
            objects: Mutex::default(),
        });
        let worker = Worker::on("ferroce events", events, &engine, Self::hand_out)?;
        let _ = engine.worker.set(worker);
        Ok(engine)
    }

    /// Locks the tables of objects.
    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out the events that there are.
    fn hand_out(&self) -> Next {
        loop {
            match self.device.async_event() {
                Ok(Some(event)) => self.deliver(event),
                Ok(None) => return Next::Ready,
                Err(_) => {
                    self.to_contexts(event::DEVICE_FATAL);
                    return Next::End;
                }
            }
        }
    }

    fn deliver(&self, event: AsyncEvent) {
        tracing::debug!("asynchronous event {event:?}");
        let (kind, source) = event.describe();
        if let EventSource::Qp(number) = source {
            self.log_failure(number.value());
        }
        let kind = kind as c_enum;
        let objects = self.objects();
        let targets = match source {
            EventSource::Cq(n) => objects.cqs.get(&n).map(slice::from_ref),
            EventSource::Qp(n) => objects.qps.get(&n.value()).map(|qp| &*qp.targets),
            EventSource::Srq(n) => objects.srqs.get(&n).map(slice::from_ref),
            // Of all interfaces together; `port_events` reports each one's.
            EventSource::Port => return,
            EventSource::Device => {
                drop(objects);
                return self.to_contexts(kind);
            }
        };
        // Pushed under the lock of the tables, so that an object that was taken out gets nothing more.
        for target in targets.unwrap_or_default() {
            target.push(kind);
        }
    }

    fn to_contexts(&self, kind: c_enum) {
        for events in self.objects().contexts.iter().filter_map(Weak::upgrade) {
            events.push(Entry::of_port(kind));
        }
    }

    /// Logs the completions that are errors; of the work requests that a failed queue pair flushes only its failure.
    pub(crate) fn log_completions(&self, completions: &[Completion]) {
        for completion in completions.iter().filter(|c| !c.is_ok()) {
            let explained = self.log_failure(completion.qpn.value());
            if !explained && completion.status != WcStatus::FlushError {
                let Completion { wr_id, status, qpn, .. } = completion;
                tracing::info!("work request {wr_id:#x} of QP {:#x} failed: {status}", qpn.value());
            }
        }
    }

    /// Logs why a queue pair has failed, if it has and that was not logged before. Returns whether it did.
    fn log_failure(&self, number: u32) -> bool {
        errno::is_logged() && self.objects().qps.get(&number).is_some_and(|qp| log_failure(&qp.inner))
    }
}

/// Logs why a queue pair has failed, if it has and that was not logged before. Returns whether it did.
pub(crate) fn log_failure(qp: &roce::Qp) -> bool {
    let failure = qp.take_failure();
    if let Some(failure) = &failure {
        tracing::info!("{failure}");
    }
    failure.is_some()
}
