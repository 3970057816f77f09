//! The transport behind the devices: one per process, opened with the first object that needs it.

use std::{
    cell::RefCell,
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
    slice,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
};

use roce::{AsyncEvent, Device, DeviceConfig, FaultControl, JoinConfig, VerbsError, verbs::EventSource};

use crate::{
    abi::{c_enum, event},
    config,
    device::{self, VerbsDevice},
    events::{Entry, Target},
    fork::Own,
    links::Links,
    live, log,
    qp::SharedTarget,
    rebind,
    ret::{self, Errno, Result},
    worker::{Next, Worker},
};

/// The transport, and the thread that hands its events to the contexts.
pub(crate) struct Engine {
    pub(crate) device: Device,
    /// Lets `ferroce fault` change the rules.
    _faults: Option<FaultControl>,
    objects: Mutex<Objects>,
    /// Set once, right after it is made.
    worker: Mutex<Option<Worker>>,
}

/// Who gets which events.
#[derive(Default)]
pub(crate) struct Objects {
    /// By number; several objects of one target queue pair.
    pub(crate) qps: HashMap<u32, Vec<Target>>,
    /// Target queue pairs that can be opened once more.
    pub(crate) targets: HashMap<u32, SharedTarget>,
    pub(crate) cqs: HashMap<u32, Target>,
    pub(crate) srqs: HashMap<u32, Target>,
    /// XRC domains that were opened by file: device and inode, and how often.
    pub(crate) xrcds: HashMap<(u64, u64), (roce::Xrcd, usize)>,
    /// Contexts, for what concerns the device.
    pub(crate) contexts: Vec<Weak<crate::context::Core>>,
}

impl Objects {
    /// Takes an object of a queue pair out; with the last one goes the queue pair.
    pub(crate) fn forget_qp(&mut self, number: u32, element: usize) -> Option<Target> {
        let all = self.qps.get_mut(&number)?;
        let at = all.iter().position(|t| t.element() == element)?;
        let target = all.swap_remove(at);
        if all.is_empty() {
            self.qps.remove(&number);
            self.targets.remove(&number);
        }
        Some(target)
    }

    /// Adds a context. Those that are closed go, so that a program that opens devices again and again leaves nothing.
    pub(crate) fn watch(&mut self, context: &Arc<crate::context::Core>) {
        self.contexts.retain(|c| c.strong_count() > 0);
        self.contexts.push(Arc::downgrade(context));
    }
}

/// Object of which a process has one while somebody uses it.
struct Sole<T> {
    slot: Mutex<Slot<T>>,
    /// It was opened, or that failed.
    changed: Condvar,
}

enum Slot<T> {
    Empty,
    /// A thread opens it, without the lock: it may have to start a broker first.
    Opening,
    Open(Weak<T>),
}

/// The tables of the process. `std` locks: they need nothing that a fork could leave half done.
static ENGINE: Own<Sole<Engine>> = Own::new(Sole::new);
static LINKS: Own<Sole<Links>> = Own::new(Sole::new);
static DEVICES: Mutex<Vec<&'static VerbsDevice>> = Mutex::new(Vec::new());

fn lock<T>(table: &Mutex<T>) -> MutexGuard<'_, T> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Sole<T> {
    fn new() -> Self {
        Self {
            slot: Mutex::new(Slot::Empty),
            changed: Condvar::new(),
        }
    }

    /// The one that there is.
    fn current(&self) -> Option<Arc<T>> {
        match &*lock(&self.slot) {
            Slot::Open(weak) => weak.upgrade(),
            _ => None,
        }
    }

    /// The one of this process, made if there is none. Who comes while it is made waits for that.
    fn get(&self, open: impl FnOnce() -> Result<Arc<T>>) -> Result<Arc<T>> {
        let mut slot = lock(&self.slot);
        loop {
            match &*slot {
                Slot::Opening => {
                    slot = self.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                Slot::Open(weak) => {
                    if let Some(one) = weak.upgrade() {
                        return Ok(one);
                    }
                }
                Slot::Empty => {}
            }
            break;
        }
        *slot = Slot::Opening;
        drop(slot);
        let opened = ret::run(open);
        let mut slot = lock(&self.slot);
        *slot = opened
            .as_ref()
            .map_or(Slot::Empty, |one| Slot::Open(Arc::downgrade(one)));
        self.changed.notify_all();
        opened
    }
}

type Held = (MutexGuard<'static, Vec<&'static VerbsDevice>>, MutexGuard<'static, ()>);

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Before a fork: nobody else is in the list of devices.
pub(crate) fn hold_tables() {
    let held = (lock(&DEVICES), live::hold());
    HELD.with(|h| *h.borrow_mut() = Some(held));
}

/// After a fork, in both processes.
pub(crate) fn release_tables() {
    HELD.with(|h| h.borrow_mut().take());
}

/// All devices that were ever listed; they are never freed, since programs keep pointers to them.
pub(crate) fn devices() -> MutexGuard<'static, Vec<&'static VerbsDevice>> {
    lock(&DEVICES)
}

/// Returns the source of port events, if the system has one.
pub(crate) fn links() -> Option<Arc<Links>> {
    let got = LINKS.get().get(Links::open);
    got.map_err(|e| tracing::info!("changes of interfaces are not seen: {e:?}"))
        .ok()
}

/// The address to bind: the only one, or all.
fn bind_address() -> Result<IpAddr> {
    Ok(match device::selected()?.as_slice() {
        [one] => *one,
        _ => Ipv6Addr::UNSPECIFIED.into(),
    })
}

/// The program `ferroce` that this library was installed with, or built with: `ferroce run` names it, other ways of loading
/// don't.
fn own_program() -> Option<PathBuf> {
    let library = rebind::own_path()?;
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

/// Opens the device, shared with other processes unless that is switched off, or nobody could be the broker.
fn open_device(wanted: DeviceConfig) -> std::result::Result<Device, VerbsError> {
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

/// The engine of this process if there is one.
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
        let mut wanted = DeviceConfig::new(bind_address()?);
        wanted.mtu = config::mtu();
        if let Some((file, begun)) = config::pcap() {
            (wanted.pcap, wanted.pcap_append) = (Some(file), begun);
        }
        if let Some(rate) = config::unreliable_rate() {
            wanted.unreliable_rate = rate;
        }
        if let Some(shards) = config::shards() {
            wanted.shards = shards;
        }
        if let Some(spin) = config::spin() {
            wanted.spin = spin;
        }
        wanted.faults = config::faults();
        let faults = wanted.faults.as_ref().and_then(|faults| {
            let control = FaultControl::start(&program_name(), faults);
            control
                .map_err(|e| config::complain(format_args!("faults can't be changed while the program runs: {e}")))
                .ok()
        });
        let device = open_device(wanted).map_err(|e| {
            config::complain(format_args!("{e}"));
            Errno::from(e)
        })?;
        let events = device.async_fd().try_clone_to_owned()?;
        let engine = Arc::new(Self {
            device,
            _faults: faults,
            objects: Mutex::default(),
            worker: Mutex::default(),
        });
        let weak = Arc::downgrade(&engine);
        let worker = Worker::start("ferroce events", events, move || {
            match weak.upgrade().is_some_and(|engine| engine.hand_out()) {
                true => Next::Ready,
                false => Next::End,
            }
        })?;
        *engine.worker.lock().unwrap_or_else(PoisonError::into_inner) = Some(worker);
        Ok(engine)
    }

    /// The tables of objects.
    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Its thread ends before the device closes.
        drop(self.worker.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Engine {
    /// Takes the events that there are; false: there will be no more.
    fn hand_out(&self) -> bool {
        loop {
            match self.device.async_event() {
                Ok(Some(event)) => self.deliver(event),
                Ok(None) => return true,
                Err(_) => {
                    self.to_contexts(event::DEVICE_FATAL);
                    return false;
                }
            }
        }
    }

    fn deliver(&self, event: AsyncEvent) {
        tracing::debug!("asynchronous event {event:?}");
        if let EventSource::Qp(number) = event.describe().1 {
            log::queue_pair(self, number.value());
        }
        let (kind, source) = event.describe();
        let kind = kind as c_enum;
        let objects = self.objects();
        let targets = match source {
            EventSource::Cq(n) => objects.cqs.get(&n).map(slice::from_ref),
            EventSource::Qp(n) => objects.qps.get(&n.value()).map(Vec::as_slice),
            EventSource::Srq(n) => objects.srqs.get(&n).map(slice::from_ref),
            // Of all interfaces together; `links` tells what happens to each.
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
        let mut objects = self.objects();
        objects.contexts.retain(|c| c.strong_count() > 0);
        for context in objects.contexts.iter().filter_map(Weak::upgrade) {
            context.events.push(Entry::of_port(kind));
        }
    }
}
