//! All devices of a loop, and the objects on them.

use std::{
    collections::VecDeque,
    io,
    net::IpAddr,
    path::Path,
    sync::{Arc, Once},
};

use roce_local::{DeviceName, Hardware, HardwareEvent};
use roce_verbs::{
    AccessFlags, Mtu,
    provider::{CqId, DeviceCaps, DeviceIx, Registration, VerbsError},
};

use crate::{
    advice,
    caps::{self, Known},
    sys::{self, Channel, CmId, Context, EventChannel, Found, Nodes, Polled, RecvList, SendList, Watched},
};

/// Which devices to use.
#[derive(Clone, Debug, Default)]
pub struct HwConfig {
    /// Names; none: all devices that can be opened.
    pub devices: Vec<DeviceName>,
}

/// Source of events of all devices, and its token.
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

/// Handles of an open device.
pub(crate) struct Open {
    pub(crate) context: Arc<Context>,
    /// Of all its completion queues.
    pub(crate) channel: Arc<Channel>,
    /// See [`HwDevice::anchor`].
    pub(crate) anchor: Option<CmId>,
}

impl Open {
    /// Returns whether no object on the device is left. All hold the context, or the channel.
    pub(crate) fn is_unused(&self) -> bool {
        // The channel has the context too.
        Arc::strong_count(&self.channel) == 1 && Arc::strong_count(&self.context) == 2
    }
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
    pub(crate) atomics: bool,
    /// It is gone, or has failed for good: nothing completes any more, or is to.
    pub(crate) gone: bool,
}

/// Protection domain.
pub(crate) struct Pd {
    pub(crate) device: usize,
    pub(crate) raw: Arc<sys::Pd>,
}

impl Pd {
    pub(crate) fn alloc(device: usize, open: &Open) -> Result<Self, VerbsError> {
        let raw = sys::Pd::alloc(&open.context).map_err(|e| advice::failed("making a protection domain", e))?;
        Ok(Self { device, raw })
    }
}

/// Registration of memory.
pub(crate) struct Mr {
    pub(crate) device: usize,
    pub(crate) raw: sys::Mr,
    pub(crate) addr: u64,
    pub(crate) len: usize,
}

impl Mr {
    /// Registers memory with the device of this name.
    pub(crate) fn register(pd: &Pd, name: &str, what: &Registration) -> Result<Self, VerbsError> {
        let end = what.offset.checked_add(what.len);
        let range = end
            .filter(|end| *end <= what.memory.len())
            .map(|end| what.offset..end)
            .ok_or_else(|| VerbsError::Invalid("the range is outside the memory".into()))?;
        let zero_based = what.access.contains(AccessFlags::ZERO_BASED);
        let iova = if zero_based { Some(0) } else { what.iova };
        let addr = iova.unwrap_or(what.memory.as_ptr() as u64 + what.offset as u64);
        let registered = sys::Mr::register(&pd.raw, &what.memory, range, iova, what.access);
        Ok(Self {
            device: pd.device,
            raw: registered.map_err(|e| advice::not_registered(name, what.len, e))?,
            addr,
            len: what.len,
        })
    }
}

/// Completion queue.
pub(crate) struct Cq {
    pub(crate) device: usize,
    pub(crate) raw: Arc<sys::Cq>,
    /// An event will report the next completion.
    pub(crate) armed: bool,
}

impl Cq {
    /// Creates a queue, whose number is its cookie.
    pub(crate) fn create(device: usize, open: &Open, entries: u32, id: CqId) -> Result<Self, VerbsError> {
        let raw = sys::Cq::create(&open.channel, entries.max(1), id.0.into());
        Ok(Self {
            device,
            raw: raw.map_err(|e| advice::failed("making a completion queue", e))?,
            armed: false,
        })
    }

    pub(crate) fn arm(&mut self) -> io::Result<()> {
        self.raw.arm()?;
        self.armed = true;
        Ok(())
    }
}

/// The RDMA devices of the host as a backend of a [`Fabric`](roce_local::Fabric), without a thread or a lock.
///
/// An iteration of the loop that owns the fabric:
///
/// ```no_run
/// # use roce_hw::{HwConfig, HwDevice};
/// # use roce_local::{Fabric, FabricConfig, Several};
/// # use roce_verbs::provider::{Provider, VerbsError};
/// # fn wait(_: Vec<std::os::fd::BorrowedFd<'_>>) {}
/// # fn route(_: std::net::IpAddr) -> std::io::Result<std::net::IpAddr> { Err(std::io::ErrorKind::Unsupported.into()) }
/// # fn main() -> Result<(), VerbsError> {
/// let mut fabric = Fabric::new(Several::new(Vec::new()), FabricConfig::default(), Vec::new());
/// fabric.set_hardware(Box::new(HwDevice::open(&HwConfig::default())?), route);
/// let mut completions = Vec::new();
/// let mut spin = 0;
/// loop {
///     fabric.poll_hardware()?;
///     fabric.poll_completions(&mut completions, 1024)?;
///     let busy = !completions.is_empty();
///     for (_qp, _completion) in completions.drain(..) {
///         // Post what follows of it.
///     }
///     while let Some(_event) = fabric.poll_event() {}
///     spin = if busy { 0 } else { spin + 1 };
///     match spin {
///         // What has completed before this is not reported: poll once more.
///         1000 => fabric.arm_hardware()?,
///         n if n > 1000 => {
///             wait(fabric.hardware().expect("set above").descriptors());
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
    pub(crate) events: VecDeque<HardwareEvent>,
    /// Number of queue pairs created so far.
    pub(crate) made: u16,
    pub(crate) polled: Vec<Polled>,
    pub(crate) sends: SendList,
    pub(crate) recvs: RecvList,
    /// Tokens of the descriptors that are readable.
    pub(crate) ready: Vec<u64>,
    pub(crate) watched: Watched,
    /// `None` where there are no device files.
    pub(crate) nodes: Option<Nodes>,
    /// Which devices are wanted, also later.
    pub(crate) config: HwConfig,
}

impl std::fmt::Debug for HwDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HwDevice")
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

/// Returns the device of a connection, if it is one of these and not gone.
pub(crate) fn device_of(devices: &[Device], id: &CmId) -> Option<usize> {
    let name = id.device()?;
    devices.iter().position(|d| d.name == name && !d.gone)
}

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

impl Device {
    /// Opens a device, and asks what it can do.
    pub(crate) fn open(found: Found, port: Option<u8>) -> io::Result<(Self, DeviceCaps)> {
        let context = Arc::new(found.opened?);
        let channel = Channel::create(&context)?;
        let Known { caps, ports, atomics } = caps::ask(&context, port, &channel)?;
        let device = Self {
            name: found.name,
            file: Some(found.file).filter(|file| Path::new(file).exists()),
            open: Some(Open {
                context,
                channel,
                anchor: None,
            }),
            port,
            ports,
            atomics,
            gone: false,
        };
        Ok((device, caps))
    }

    /// Returns what keeps it open.
    pub(crate) fn context(&self) -> Option<Arc<Context>> {
        self.open.as_ref().map(|open| open.context.clone())
    }

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
            match Device::open(found, port) {
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
            config: config.clone(),
            caps,
            devices,
            channel,
            events: VecDeque::new(),
            made: 0,
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

    /// Returns the largest path MTU of connections from an address.
    ///
    /// # Errors
    /// If no device has the address, or the device does not report it.
    pub(crate) fn mtu_of(&self, addr: IpAddr) -> io::Result<Mtu> {
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

    /// Returns the handles of a device, unless it is gone.
    pub(crate) fn opened(&self, device: usize) -> Result<&Open, VerbsError> {
        let device = self.devices.get(device).filter(|device| !device.gone);
        device
            .and_then(|device| device.open.as_ref())
            .ok_or_else(|| VerbsError::Invalid("no such device".into()))
    }
}

/// Opens devices for a loop; all that there are if none is named.
///
/// # Errors
/// As [`HwDevice::open`].
pub fn open(devices: &[DeviceName]) -> Result<Box<dyn Hardware>, VerbsError> {
    let config = HwConfig {
        devices: devices.to_vec(),
    };
    Ok(Box::new(HwDevice::open(&config)?))
}
