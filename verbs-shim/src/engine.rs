//! The transport behind the devices: one per process, opened with the first object that needs it.

use std::{
    cell::RefCell,
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread::JoinHandle,
};

use roce::{AsyncEvent, Device, DeviceConfig, JoinConfig, VerbsError, verbs::EventSource};

use crate::{
    abi::{c_enum, event},
    config,
    device::{self, VerbsDevice},
    events::{Entry, Target},
    fork,
    qp::SharedTarget,
    ret::{Errno, Result},
};

/// The transport, and the thread that hands its events to the contexts.
pub(crate) struct Engine {
    pub(crate) device: Device,
    objects: Mutex<Objects>,
    stop: OwnedFd,
    thread: Mutex<Option<JoinHandle<()>>>,
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
    /// Contexts, for what concerns the port.
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

/// The tables of the process. `std` locks: they need nothing that a fork could leave half done.
static ENGINE: Mutex<Option<(u32, Weak<Engine>)>> = Mutex::new(None);
static DEVICES: Mutex<Vec<&'static VerbsDevice>> = Mutex::new(Vec::new());

fn lock<T>(table: &'static Mutex<T>) -> MutexGuard<'static, T> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

type Held = (
    MutexGuard<'static, Option<(u32, Weak<Engine>)>>,
    MutexGuard<'static, Vec<&'static VerbsDevice>>,
);

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Before a fork: nobody else is in the tables.
pub(crate) fn hold_tables() {
    let held = (lock(&ENGINE), lock(&DEVICES));
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

/// The address to bind: the only one, or all.
fn bind_address() -> IpAddr {
    match device::selected().as_slice() {
        [one] => *one,
        _ => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Opens the device, shared with other processes unless that is switched off, or nobody could be the broker.
fn open_device(wanted: DeviceConfig) -> std::result::Result<Device, VerbsError> {
    let Some(how) = JoinConfig::from_env() else {
        return Device::open(wanted);
    };
    match Device::open_shared(wanted.clone(), &how) {
        Err(e) if how.program.is_none() => {
            tracing::debug!("no broker: {e}");
            Device::open(wanted)
        }
        done => done,
    }
}

impl Engine {
    /// The engine of this process.
    ///
    /// # Errors
    /// When the port can't be had; the reason is on standard error.
    pub(crate) fn get() -> Result<Arc<Self>> {
        let mut slot = lock(&ENGINE);
        let now = fork::generation();
        if let Some((born, weak)) = &*slot
            && *born == now
            && let Some(engine) = weak.upgrade()
        {
            return Ok(engine);
        }
        let engine = Self::open()?;
        if let Some((_, old)) = slot.replace((now, Arc::downgrade(&engine))) {
            // A weak reference from before a fork: its count is shared with nobody in this process.
            drop(old);
        }
        Ok(engine)
    }

    fn open() -> Result<Arc<Self>> {
        let mut wanted = DeviceConfig::new(bind_address());
        wanted.mtu = config::mtu();
        wanted.pcap = config::pcap();
        if let Some(rate) = config::unreliable_rate() {
            wanted.unreliable_rate = rate;
        }
        let device = open_device(wanted).map_err(|e| {
            config::complain(format_args!("{e}"));
            Errno::from(e)
        })?;
        // SAFETY: makes a descriptor, or fails.
        let stop = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if stop < 0 {
            return Err(Errno::last());
        }
        // SAFETY: just made and ours alone.
        let stop = unsafe { OwnedFd::from_raw_fd(stop) };
        let ends = (device.async_fd().try_clone_to_owned()?, stop.try_clone()?);
        let engine = Arc::new(Self {
            device,
            objects: Mutex::default(),
            stop,
            thread: Mutex::new(None),
        });
        let weak = Arc::downgrade(&engine);
        let thread = std::thread::Builder::new().name("ferroce events".into());
        let thread = thread.spawn(move || hand_out(&weak, &ends.0, &ends.1))?;
        *engine.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(engine)
    }

    /// The tables of objects.
    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let one = 1u64;
        // SAFETY: writes eight bytes of a local.
        unsafe { libc::write(self.stop.as_raw_fd(), (&raw const one).cast(), 8) };
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Sleeps until the device has events. False: it shall end.
fn wait(events: &OwnedFd, stop: &OwnedFd) -> bool {
    let entry = |fd: &OwnedFd| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut fds = [entry(events), entry(stop)];
    // SAFETY: two entries on the stack.
    let got = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
    got < 0 || fds[1].revents == 0
}

/// The events thread.
fn hand_out(engine: &Weak<Engine>, events: &OwnedFd, stop: &OwnedFd) {
    while wait(events, stop) {
        let Some(engine) = engine.upgrade() else { return };
        loop {
            match engine.device.async_event() {
                Ok(Some(event)) => engine.deliver(event),
                Ok(None) => break,
                Err(_) => {
                    engine.to_contexts(event::DEVICE_FATAL);
                    return;
                }
            }
        }
    }
}

impl Engine {
    fn deliver(&self, event: AsyncEvent) {
        tracing::debug!("asynchronous event {event:?}");
        let (kind, source) = event.describe();
        let kind = kind as c_enum;
        let objects = self.objects();
        let targets = match source {
            EventSource::Cq(n) => objects.cqs.get(&n).map(slice::from_ref),
            EventSource::Qp(n) => objects.qps.get(&n.value()).map(Vec::as_slice),
            EventSource::Srq(n) => objects.srqs.get(&n).map(slice::from_ref),
            EventSource::Port | EventSource::Device => {
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
