//! All devices of a loop, and the objects on them.

use std::{
    collections::{HashMap, VecDeque},
    hash::BuildHasherDefault,
    io,
    net::IpAddr,
    os::fd::BorrowedFd,
    path::Path,
    sync::{Arc, Once},
};

use roce_devices::DeviceName;
use roce_verbs::{
    AccessFlags, Completion, Mtu, NumberHasher,
    provider::{CqId, DeviceCaps, DeviceIx, Event, KeyId, MrId, MrInfo, PdId, QpId, Registration, Slots, VerbsError},
};

use crate::{
    advice,
    caps::{self, Known},
    cm::Cm,
    keys::Key,
    qp::Qp,
    sys::{self, Channel, CmId, Context, EventChannel, Found, Nodes, Polled, RecvList, SendList, Watched},
};

/// Which devices to use.
#[derive(Clone, Debug, Default)]
pub struct HwConfig {
    /// Those that are wanted; none: all that can be opened.
    pub devices: Vec<DeviceName>,
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

pub(crate) type ByNumber<T> = HashMap<u32, T, BuildHasherDefault<NumberHasher>>;

/// What is watched of all devices, and its token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    Connections,
    /// The folder of device files.
    Nodes,
    /// Of a device.
    Completions(usize),
    Device(usize),
}

impl Source {
    const fn token(self) -> u64 {
        match self {
            Self::Connections => 0,
            Self::Nodes => 1,
            Self::Completions(device) => 2 + 2 * device as u64,
            Self::Device(device) => 3 + 2 * device as u64,
        }
    }

    pub(crate) const fn of(token: u64) -> Self {
        match token {
            0 => Self::Connections,
            1 => Self::Nodes,
            n if n % 2 == 0 => Self::Completions((n / 2 - 1) as usize),
            n => Self::Device((n / 2 - 1) as usize),
        }
    }
}

/// What a device is open by.
pub(crate) struct Open {
    pub(crate) context: Arc<Context>,
    /// Of all its completion queues.
    pub(crate) channel: Arc<Channel>,
    /// See [`HwDevice::anchor`].
    pub(crate) anchor: Option<CmId>,
}

/// A device.
pub(crate) struct Device {
    pub(crate) name: String,
    /// Its device file, where there is one.
    pub(crate) file: Option<String>,
    /// `None`: it is gone, and nobody has anything of it any more.
    pub(crate) open: Option<Open>,
    /// The port that is used; `None`: all.
    pub(crate) port: Option<u8>,
    /// The ports of its addresses.
    pub(crate) ports: Vec<u8>,
    pub(crate) qps: ByNumber<QpId>,
    pub(crate) atomics: bool,
    /// It is gone, or has failed for good: nothing completes any more, or is to.
    pub(crate) gone: bool,
}

pub(crate) struct Pd {
    pub(crate) device: usize,
    pub(crate) raw: Arc<sys::Pd>,
}

pub(crate) struct Mr {
    pub(crate) device: usize,
    pub(crate) raw: sys::Mr,
    pub(crate) addr: u64,
    pub(crate) len: usize,
}

pub(crate) struct Cq {
    pub(crate) device: usize,
    pub(crate) raw: Arc<sys::Cq>,
    /// An event will tell of the next completion.
    pub(crate) armed: bool,
}

/// RDMA devices as a [`Provider`](roce_verbs::provider::Provider), without a thread or a lock: the caller's loop takes what they
/// have to tell, and between that uses them.
///
/// The turns of such a loop:
///
/// ```no_run
/// # use roce_hw::{HwConfig, HwDevice};
/// # use roce_verbs::provider::{Provider, VerbsError};
/// # fn wait(_: Vec<std::os::fd::BorrowedFd<'_>>) {}
/// # fn main() -> Result<(), VerbsError> {
/// let mut device = HwDevice::open(&HwConfig::default())?;
/// let mut completions = Vec::new();
/// let mut spin = 0;
/// loop {
///     device.poll()?;
///     device.poll_completions(&mut completions, 1024)?;
///     let busy = !completions.is_empty();
///     for (_qp, _completion) in completions.drain(..) {
///         // Post what follows of it.
///     }
///     while let Some(_event) = device.poll_event() {}
///     spin = if busy { 0 } else { spin + 1 };
///     match spin {
///         // What has completed before this is not told: one more look.
///         1000 => device.arm()?,
///         n if n > 1000 => {
///             wait(device.descriptors());
///             spin = 0;
///         }
///         _ => {}
///     }
/// }
/// # }
/// ```
pub struct HwDevice {
    pub(crate) caps: Vec<DeviceCaps>,
    pub(crate) devices: Vec<Device>,
    pub(crate) channel: Arc<EventChannel>,
    pub(crate) pds: Slots<Pd>,
    pub(crate) mrs: Slots<Mr>,
    pub(crate) keys: Slots<Key>,
    /// The type 2 windows that are open, by their keys.
    pub(crate) opened: ByNumber<KeyId>,
    pub(crate) cqs: Slots<Cq>,
    /// Those in use, in the order in which they are polled.
    pub(crate) polling: Vec<CqId>,
    pub(crate) qps: Slots<Qp>,
    /// Tells the completions of a queue pair from those of one that had its number before.
    pub(crate) made: u16,
    pub(crate) cms: Slots<Cm>,
    pub(crate) events: VecDeque<Event>,
    /// Completions that no device will make any more.
    pub(crate) flushed: VecDeque<(QpId, Completion)>,
    pub(crate) polled: Vec<Polled>,
    pub(crate) sends: SendList,
    pub(crate) recvs: RecvList,
    /// Those of which [`poll`](Self::poll) has to look.
    pub(crate) ready: Vec<u64>,
    pub(crate) watched: Watched,
    /// `None` where there are no device files.
    pub(crate) nodes: Option<Nodes>,
    /// A device that is gone is open still.
    pub(crate) closing: bool,
    /// Which devices are wanted, also later.
    pub(crate) config: HwConfig,
}

impl std::fmt::Debug for HwDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HwDevice")
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

pub(crate) fn gone(what: &str) -> VerbsError {
    VerbsError::Invalid(format!("no such {what}"))
}

pub(crate) const FULL: VerbsError = VerbsError::Limit("objects of a loop");

/// Children of the process are not to have registered memory copied from under the device. What registers memory before us, or has
/// set this up itself, has decided that already.
fn fork_init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(e) = Context::fork_init() {
            tracing::warn!("children of this process may disturb registered memory: ibv_fork_init: {e}");
        }
    });
}

/// Opens a device, and asks what it can do.
pub(crate) fn open(found: Found, port: Option<u8>) -> io::Result<(Device, DeviceCaps)> {
    let context = Arc::new(found.opened?);
    let channel = Channel::create(&context)?;
    let Known { caps, ports, atomics } = caps::ask(&context, port, &channel)?;
    let device = Device {
        name: found.name,
        file: Some(found.file).filter(|file| Path::new(file).exists()),
        open: Some(Open {
            context,
            channel,
            anchor: None,
        }),
        port,
        ports,
        qps: ByNumber::default(),
        atomics,
        gone: false,
    };
    Ok((device, caps))
}

impl Device {
    /// Has its descriptors watched, as those of the device of this number.
    pub(crate) fn watch(&self, watched: &Watched, index: usize) -> io::Result<()> {
        let Some(open) = &self.open else { return Ok(()) };
        watched.add(open.channel.fd(), Source::Completions(index).token())?;
        watched.add(open.context.async_fd(), Source::Device(index).token())
    }
}

/// Watches everything that there is.
fn watch(channel: &EventChannel, nodes: Option<&Nodes>, devices: &[Device]) -> io::Result<Watched> {
    let watched = Watched::new()?;
    watched.add(channel.fd(), Source::Connections.token())?;
    if let Some(nodes) = nodes {
        watched.add(nodes.fd(), Source::Nodes.token())?;
    }
    for (index, device) in devices.iter().enumerate() {
        device.watch(&watched, index)?;
    }
    Ok(watched)
}

impl HwDevice {
    /// Opens devices. The order is that of the system.
    ///
    /// # Errors
    /// When there is none, or one that is named can't be opened: the text says what to do.
    pub fn open(config: &HwConfig) -> Result<Self, VerbsError> {
        fork_init();
        let all = config.devices.is_empty();
        let mut there = Vec::new();
        let wanted = |name: &str| {
            there.push(name.to_owned());
            all || config.devices.iter().any(|d| d.name == name)
        };
        // Before they are opened: what goes between is told.
        let nodes = Nodes::watch();
        let (mut devices, mut caps, mut failed) = (Vec::new(), Vec::new(), None);
        for found in Context::open_all(wanted).map_err(advice::no_list)? {
            let port = config
                .devices
                .iter()
                .find(|d| d.name == found.name)
                .and_then(|d| d.port);
            let (name, file) = (found.name.clone(), found.file.clone());
            match open(found, port) {
                Ok((device, can)) => {
                    devices.push(device);
                    caps.push(can);
                }
                Err(e) if all => {
                    let e = advice::not_opened(&name, &file, e);
                    tracing::warn!("{e}");
                    failed.get_or_insert(e);
                }
                Err(e) => return Err(advice::not_opened(&name, &file, e)),
            }
        }
        let lacks = |wanted: &&DeviceName| !devices.iter().any(|d: &Device| d.name == wanted.name);
        let lacking: Vec<String> = config.devices.iter().filter(lacks).map(|d| d.name.clone()).collect();
        if devices.is_empty() || !lacking.is_empty() {
            return Err(failed.unwrap_or_else(|| advice::no_device(&lacking, &there)));
        }
        let channel = EventChannel::create().map_err(advice::no_cm)?;
        let watched = watch(&channel, nodes.as_ref(), &devices);
        let mut this = Self {
            watched: watched.map_err(|e| advice::failed("watching the RDMA devices", e))?,
            nodes,
            closing: false,
            config: config.clone(),
            caps,
            devices,
            channel,
            pds: Slots::default(),
            mrs: Slots::default(),
            keys: Slots::default(),
            opened: ByNumber::default(),
            cqs: Slots::default(),
            polling: Vec::new(),
            qps: Slots::default(),
            made: 0,
            cms: Slots::default(),
            events: VecDeque::new(),
            flushed: VecDeque::new(),
            polled: Vec::new(),
            sends: SendList::default(),
            recvs: RecvList::default(),
            ready: Vec::new(),
        };
        (0..this.devices.len()).for_each(|index| this.anchor(index));
        Ok(this)
    }

    /// A device's name.
    pub fn name(&self, device: DeviceIx) -> Option<&str> {
        self.devices.get(usize::from(device.0)).map(|d| d.name.as_str())
    }

    /// The device that has an address now.
    pub fn owner(&self, addr: IpAddr) -> Option<DeviceIx> {
        let addr = addr.to_canonical();
        let found = self.caps.iter().position(|caps| caps.addrs.contains(&addr));
        found.map(|device| DeviceIx(device as u16))
    }

    /// The addresses of all devices.
    pub fn addrs(&self) -> impl Iterator<Item = IpAddr> {
        self.caps.iter().flat_map(|caps| caps.addrs.iter().copied())
    }

    /// Path MTU at most of connections from an address now.
    ///
    /// # Errors
    /// When it is no device's, or the device does not say.
    pub fn mtu(&self, addr: IpAddr) -> io::Result<Mtu> {
        let addr = addr.to_canonical();
        let port_of = |(caps, device): (&DeviceCaps, _)| {
            let at = caps.addrs.iter().position(|of| *of == addr)?;
            Some((device, at))
        };
        let found = self.caps.iter().zip(&self.devices).find_map(port_of);
        let (device, at): (&Device, _) = found.ok_or(io::ErrorKind::AddrNotAvailable)?;
        let number = device.ports.get(at).copied().unwrap_or(1);
        let open = device.open.as_ref().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let code = open.context.port(number)?.active_mtu;
        let mtu = u8::try_from(code).ok().and_then(Mtu::from_code);
        mtu.ok_or_else(|| io::ErrorKind::InvalidData.into())
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

    /// What to watch, for reading: [`poll`](Self::poll) takes what they have. Always the same.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.watched.fd()]
    }

    /// Has the descriptors tell of the next completion. What completed before is not told: look once more before you wait.
    ///
    /// # Errors
    /// When a completion queue has failed.
    pub fn arm(&mut self) -> Result<(), VerbsError> {
        for cq in self.cqs.iter_mut().filter(|cq| !cq.armed) {
            if self.devices[cq.device].gone {
                continue;
            }
            cq.raw
                .arm()
                .map_err(|e| advice::failed("arming a completion queue", e))?;
            cq.armed = true;
        }
        Ok(())
    }

    pub(crate) fn pd(&self, pd: PdId) -> Result<&Pd, VerbsError> {
        self.pds.get(pd).ok_or_else(|| gone("protection domain"))
    }

    /// A device that has not gone.
    fn opened(&self, device: usize) -> Result<&Open, VerbsError> {
        let device = self.devices.get(device).filter(|device| !device.gone);
        device
            .and_then(|device| device.open.as_ref())
            .ok_or_else(|| gone("device"))
    }

    pub(crate) fn make_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError> {
        let device = usize::from(device.0);
        let raw = sys::Pd::alloc(&self.opened(device)?.context)
            .map_err(|e| advice::failed("making a protection domain", e))?;
        self.pds.insert(Pd { device, raw }).ok_or(FULL)
    }

    pub(crate) fn add_mr(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError> {
        let Pd { device, raw } = self.pd(pd)?;
        let end = what.offset.checked_add(what.len);
        let range = end
            .filter(|end| *end <= what.memory.len())
            .map(|end| what.offset..end)
            .ok_or_else(|| VerbsError::Invalid("the range is outside the memory".into()))?;
        let zero_based = what.access.contains(AccessFlags::ZERO_BASED);
        let iova = if zero_based { Some(0) } else { what.iova };
        let addr = iova.unwrap_or(what.memory.as_ptr() as u64 + what.offset as u64);
        let registered = sys::Mr::register(raw, &what.memory, range, iova, what.access);
        let name = &self.devices[*device].name;
        let raw = registered.map_err(|e| advice::not_registered(name, what.len, e))?;
        let (device, len) = (*device, what.len);
        let (lkey, rkey) = (raw.lkey(), raw.rkey());
        let mr = Mr { device, raw, addr, len };
        let id = self.mrs.insert(mr).ok_or(FULL)?;
        Ok(MrInfo {
            id,
            addr,
            len,
            lkey,
            rkey,
        })
    }

    /// Windows on it are closed first: a registration with one does not end.
    pub(crate) fn end_mr(&mut self, mr: MrId) {
        self.close_keys_of(mr);
        self.mrs.remove(mr);
    }

    pub(crate) fn make_cq(&mut self, device: DeviceIx, entries: u32) -> Result<CqId, VerbsError> {
        let device = usize::from(device.0);
        let caps = self.caps.get(device).ok_or_else(|| gone("device"))?;
        if entries > caps.limits.max_cqe {
            return Err(VerbsError::Limit("entries of a completion queue"));
        }
        let channel = self.opened(device)?.channel.clone();
        // Its number is its cookie, so it gets one first.
        let mut failed = None;
        let id = self.cqs.insert_with(|id: CqId| {
            let made = sys::Cq::create(&channel, entries.max(1), id.0.into());
            let made = made.map_err(|e| failed = Some(e)).ok()?;
            Some(Cq {
                device,
                raw: made,
                armed: false,
            })
        });
        let why = |e| advice::failed("making a completion queue", e);
        let id = id.ok_or_else(|| failed.map_or(FULL, why))?;
        self.polling.push(id);
        Ok(id)
    }

    pub(crate) fn end_cq(&mut self, cq: CqId) {
        if self.cqs.remove(cq).is_some() {
            self.polling.retain(|of| *of != cq);
        }
    }
}
