//! The device.

use std::{
    net::IpAddr,
    num::NonZeroU64,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use roce_cm::DropReason;
use roce_fault::Faults;
use roce_mem::{MemError, MemoryTable};
use roce_net::{Closed, DatapathCounters, OpenError, OpenSockets, SpinMode, UdpConfig, UdpDatapath, iface};
use roce_port::{PortChange, PortCounters, QpnParts, QpnSlot, RxMeta, Steering};
use roce_qp::{FreePaces, WindowConfig};
use roce_verbs::{AsyncEvent, DeviceLimits, Mtu, provider::VerbsError};

use crate::{
    broker::{COUNTERS, Snapshot},
    engines::Engines,
    open::{self, Parts},
    port::PortView,
    queue::EventQueue,
    router::Router,
    shared,
    tap::SharedTap,
};

/// How a device is opened.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Our address. Unspecified: all addresses of this IP version, and `::` means IPv4 too.
    pub addr: IpAddr,
    /// Path MTU to offer at most; `None`: the largest that the interface carries.
    pub mtu: Option<Mtu>,
    /// Receive buffer to ask the system for, bytes.
    pub socket_buffer: usize,
    /// Send several packets with one call (UDP_SEGMENT).
    pub gso: bool,
    /// Receive several packets with one call (UDP_GRO).
    pub gro: bool,
    /// Run a background thread. Without one nothing moves but while the program posts, polls and waits: peers that
    /// read or write memory meanwhile are not answered.
    pub background: bool,
    /// How long a thread that waits for completions ([`Channel`](crate::Channel)) looks for packets before it sleeps. If it is a number, the
    /// background thread does so too.
    pub spin: SpinMode,
    /// Bounds of the bytes in flight towards one peer; `None`: chosen by the receive buffer.
    pub window: Option<WindowConfig>,
    /// Bytes per second towards one address of the services that nobody acknowledges (UC, UD); `None`: no limit.
    pub unreliable_rate: Option<NonZeroU64>,
    /// Write all packets sent and received to this file.
    pub pcap: Option<PathBuf>,
    /// Add to that file if it exists, instead of starting it again.
    pub pcap_append: bool,
    /// Identifies the device to connection managers; `None`: random. No two live devices may share one, unless they
    /// have distinct slots.
    pub guid: Option<u64>,
    /// Receive on these sockets instead of opening some. `addr` says what the device is called, and must be theirs.
    pub sockets: Option<OpenSockets>,
    /// Engines of a [`Device`]: each has a socket, a lock and a thread of its own, and a part of the reliable connected queue pairs. Those
    /// whose completion queues are polled without a channel stay together, queue by queue, because the threads that poll advance them;
    /// others are spread. 1 to [`MAX_SHARDS`](Self::MAX_SHARDS).
    pub shards: usize,
    /// Our part of the queue pair numbers and communication IDs, when several processes share the address.
    pub qpn_slot: Option<QpnSlot>,
    /// Which of them are drawn from, if the slot is a whole one.
    pub qpn_parts: Option<QpnParts>,
    /// Told of the services that this device listens for, when several processes share the address.
    pub services: Option<Arc<dyn Services>>,
    /// Faults on demand, which may change at any time; `None`: there are none, and none can be demanded.
    pub faults: Option<Faults>,
}

/// Who listens for what among several processes behind one address.
pub trait Services: Send + Sync + core::fmt::Debug {
    /// This process is going to take connect requests for a service ID on one address or (`None`) all. Called with no
    /// lock of the device held.
    ///
    /// # Errors
    /// When another has it ([`VerbsError::Address`]).
    fn claim(&self, service_id: u64, addr: Option<IpAddr>) -> Result<(), VerbsError>;
    /// It no longer does. Called with no lock of the device held.
    fn release(&self, service_id: u64, addr: Option<IpAddr>);
    /// Keeps a port for this process before it listens; port 0 in the service ID stands for any that is free. Returns the
    /// service ID with the port: with 0 when nobody keeps ports. `reuse`: it may be shared with others who allow that.
    /// Called with no lock of the device held.
    ///
    /// # Errors
    /// When another has it ([`VerbsError::Address`]).
    fn reserve(&self, service_id: u64, _addr: Option<IpAddr>, _reuse: bool) -> Result<u64, VerbsError> {
        Ok(service_id)
    }
    /// It is not kept any more. Called with no lock of the device held.
    fn unreserve(&self, _service_id: u64, _addr: Option<IpAddr>) {}
    /// A packet for another of the processes, which came merged behind one for this one. Called under the lock of the
    /// device, so it must not wait.
    fn hand_over(&self, _meta: &RxMeta, _bytes: &[u8]) {}
    /// The port has changed for the others. Called under the lock of the device, so it must not wait.
    fn port_change(&self, _change: PortChange) {}
    /// Publishes status and counters of the device to the others. Called under the lock of the device, so it must not wait; for the last
    /// time when the device closes.
    fn publish(&self, _status: &Snapshot) {}
}

impl Default for DeviceConfig {
    fn default() -> Self {
        let udp = UdpConfig::default();
        Self {
            addr: udp.addr,
            mtu: None,
            socket_buffer: udp.receive_buffer,
            gso: true,
            gro: true,
            background: true,
            spin: SpinMode::default(),
            window: None,
            unreliable_rate: FreePaces::USUAL,
            pcap: None,
            pcap_append: false,
            guid: None,
            sockets: None,
            shards: 1,
            qpn_slot: None,
            qpn_parts: None,
            services: None,
            faults: None,
        }
    }
}

impl DeviceConfig {
    /// The most engines of a device.
    pub const MAX_SHARDS: usize = Steering::MAX_SHARDS;

    /// The usual settings for a device at an address.
    pub fn new(addr: IpAddr) -> Self {
        Self {
            addr,
            ..Self::default()
        }
    }
}

/// Counters of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceStats {
    /// Packets, drops and the transport.
    pub port: PortCounters,
    /// System calls and sockets.
    pub path: DatapathCounters,
}

impl From<(PortCounters, DatapathCounters)> for DeviceStats {
    fn from((port, path): (PortCounters, DatapathCounters)) -> Self {
        Self { port, path }
    }
}

impl DeviceStats {
    /// Adds what another device has counted.
    pub fn add(&mut self, other: &Self) {
        self.port.add(&other.port);
        self.path.add(&other.path);
    }

    /// The hardware counters that rdma_rxe has, by its names and in its order (`rxe_hw_counters.c`); the device's link has gone down
    /// so many times.
    pub(crate) fn hw_counters(&self, link_downed: u64) -> [(&'static str, u64); 15] {
        let (t, path) = (&self.port.transport, &self.path);
        let lost = path.tx_too_long + path.tx_no_buffers + path.tx_unreachable + path.tx_forbidden + path.tx_errors;
        [
            ("sent_pkts", self.port.tx_packets),
            ("rcvd_pkts", self.port.rx_packets),
            ("duplicate_request", t.duplicate_request),
            ("out_of_seq_request", t.out_of_seq_request),
            ("rcvd_rnr_err", t.rcvd_rnr_err),
            ("send_rnr_err", t.send_rnr_err),
            ("rcvd_seq_err", t.rcvd_seq_err),
            ("ack_deferred", t.ack_deferred),
            ("retry_exceeded_err", t.retry_exceeded_err),
            ("retry_rnr_exceeded_err", t.retry_rnr_exceeded_err),
            ("completer_retry_err", t.completer_retry_err),
            ("send_err", t.send_err + lost),
            ("link_downed", link_downed),
            ("rdma_sends", t.rdma_sends),
            ("rdma_recvs", t.rdma_recvs),
        ]
    }

    /// Returns the counters for other processes: the hardware counters, and connect requests that were dropped because a listener's
    /// backlog was full.
    fn published(&self, link_downed: u64) -> impl Iterator<Item = (&'static str, u64)> {
        let full = [DropReason::Backlog, DropReason::BacklogPeer].map(|reason| self.port.cm.dropped(reason));
        let more = [("cm_drop_backlog", full.iter().sum())];
        self.hw_counters(link_downed).into_iter().chain(more)
    }

    /// Returns the status that other processes get, whose counters are known by their places.
    pub(crate) fn snapshot(&self, mtu: Mtu, queue_pairs: usize, link_downed: u64) -> Snapshot {
        let mut counters = [0; COUNTERS.len()];
        for (place, (_, value)) in counters.iter_mut().zip(self.published(link_downed)) {
            *place = value;
        }
        Snapshot {
            mtu: mtu.bytes() as u32,
            queue_pairs: queue_pairs as u64,
            counters,
        }
    }

    /// Packets that were sent more than once.
    pub fn retransmits(&self) -> u64 {
        self.port.tx_retransmissions
    }

    /// Packets dropped because of their ICRC.
    pub fn icrc_errors(&self) -> u64 {
        self.port.icrc_errors + self.port.icrc_implausible
    }
}

/// A RoCE device on UDP sockets. Cheap to clone; it closes when the last clone and the last object made from it are gone.
#[derive(Clone)]
pub struct Device(pub(crate) Arc<DeviceInner>);

/// State shared by all objects of a device.
pub(crate) struct DeviceInner {
    pub(crate) engines: Arc<Engines>,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) router: Arc<Router>,
    pub(crate) limits: DeviceLimits,
    pub(crate) background: bool,
    pub(crate) spin: SpinMode,
    pub(crate) services: Option<Arc<dyn Services>>,
    pub(crate) faults: Option<Faults>,
    pub(crate) cqs: AtomicU32,
    pub(crate) ahs: AtomicU32,
    pub(crate) srqs: AtomicU32,
    pub(crate) xrcds: AtomicU32,
    pub(crate) next_srq: AtomicU32,
    next_cq: AtomicU32,
    pub(crate) addr: IpAddr,
    pub(crate) mtu: Mtu,
}

impl core::fmt::Debug for Device {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Device")
            .field("addr", &self.0.addr)
            .field("mtu", &self.0.mtu)
            .finish_non_exhaustive()
    }
}

pub(crate) fn closed(_: Closed) -> VerbsError {
    VerbsError::Closed
}

pub(crate) fn mem_error(e: MemError) -> VerbsError {
    match e {
        MemError::Limit(what) => VerbsError::Limit(what),
        MemError::Busy(what) => VerbsError::Busy(what),
        other => VerbsError::Invalid(other.to_string()),
    }
}

pub(crate) fn io_error(context: &str) -> impl Fn(std::io::Error) -> VerbsError {
    move |source| VerbsError::Io {
        context: context.into(),
        source,
    }
}

impl Device {
    /// Opens a device: binds UDP port 4791 of the address. If a broker has that, for processes that share the address,
    /// the device is one of theirs ([`Device::open_shared`]).
    ///
    /// # Errors
    /// When the port is taken (the text says by whom and what to do), the address is not ours, or the system refuses.
    pub fn open(config: DeviceConfig) -> Result<Self, VerbsError> {
        let paths = open::datapaths(&config)?;
        if let (Err(OpenError::PortTaken { .. }), None) = (&paths, &config.sockets)
            && let Some(how) = shared::holder(config.addr)
        {
            return Self::open_shared(config, &how);
        }
        let paths = paths.map_err(open::error)?.into_iter().enumerate();
        let steering = Steering::new(config.shards);
        let configs = paths.map(|(shard, path)| {
            let qpn_slot = steering.and_then(|s| s.slot(shard)).or(config.qpn_slot);
            let config = DeviceConfig {
                qpn_slot,
                ..config.clone()
            };
            (config, path)
        });
        Self::start(configs.collect())
    }

    /// Sets in motion what has sockets: an engine for each configuration, which all are the device's with what is an engine's own.
    pub(crate) fn start(all: Vec<(DeviceConfig, UdpDatapath)>) -> Result<Self, VerbsError> {
        let (config, _) = all
            .first()
            .ok_or_else(|| VerbsError::Invalid("a device of no shards".into()))?;
        let config = config.clone();
        let router = Arc::new(Router::new(
            EventQueue::new().map_err(io_error("making an event queue"))?,
            PortView::new(config.addr.to_canonical(), config.mtu),
        ));
        let tap = SharedTap::of(std::slice::from_ref(&config))?.pop().flatten();
        let all = Parts::sharing_memory(all.into_iter(), tap.as_ref())?;
        let (_, Parts { mem, limits, mtu, .. }) = &all[0];
        let (mem, limits, mtu) = (mem.clone(), limits.clone(), *mtu);
        Ok(Self(Arc::new(DeviceInner {
            engines: Engines::start(all, &router)?,
            mem,
            router,
            limits,
            background: config.background,
            spin: config.spin,
            services: config.services,
            faults: config.faults,
            cqs: AtomicU32::new(0),
            ahs: AtomicU32::new(0),
            srqs: AtomicU32::new(0),
            xrcds: AtomicU32::new(0),
            next_srq: AtomicU32::new(1),
            next_cq: AtomicU32::new(1),
            addr: config.addr,
            mtu,
        })))
    }

    /// Returns the limits.
    pub fn limits(&self) -> DeviceLimits {
        self.0.limits.clone()
    }

    /// Our address, as it was given.
    pub fn addr(&self) -> IpAddr {
        self.0.addr
    }

    /// The largest path MTU that holds from every address of the device.
    pub fn mtu(&self) -> Mtu {
        self.0.mtu
    }

    /// The largest path MTU from one of the device's addresses, as its interface is now.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn mtu_from(&self, local: IpAddr) -> Result<Mtu, VerbsError> {
        self.0
            .engines
            .first()
            .with_quiet(|port, _| port.path_mtu(local))
            .map_err(closed)
    }

    /// Identifies the device to connection managers.
    pub fn guid(&self) -> u64 {
        self.0.limits.node_guid
    }

    /// Returns the counters.
    pub fn stats(&self) -> DeviceStats {
        self.0.stats()
    }

    /// Sets the receive buffer of the sockets, bytes, and returns what the system granted (as it counts: twice the
    /// bytes, for its own overhead).
    ///
    /// # Errors
    /// When the system refuses.
    pub fn set_socket_buffer(&self, bytes: usize) -> Result<usize, VerbsError> {
        let granted = self
            .0
            .engines
            .all()
            .iter()
            .map(|driver| driver.set_receive_buffer(bytes));
        let granted = granted.collect::<std::io::Result<Vec<_>>>();
        let granted = granted.map_err(io_error("setting the receive buffer"))?;
        Ok(granted.into_iter().min().unwrap_or(0))
    }

    /// Takes one asynchronous event. See [`Device::async_fd`].
    ///
    /// # Errors
    /// When none is left and the device is closed.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        if self.is_inherited() {
            return Err(VerbsError::Closed);
        }
        self.0.router.async_events().pop()
    }

    /// Readable while an asynchronous event waits.
    pub fn async_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.router.async_events().as_fd()
    }

    /// Takes a datagram that another process of the same address received for us, as if the network had brought it.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn inject(&self, datagram: &[u8], meta: &RxMeta) -> Result<(), VerbsError> {
        self.0.engines.inject(datagram, meta).map_err(closed)
    }

    /// Advances the device by the calling thread: for programs that poll memory and run no background thread.
    pub fn progress(&self) {
        self.0.engines.progress();
    }

    /// Whether this is a process that was forked from the one that opened the device. Nothing works here: calls fail, and
    /// drops do nothing, so that the device stays the other process's.
    pub fn is_inherited(&self) -> bool {
        self.0.engines.is_inherited()
    }

    /// Whether it is closed, by [`Device::close`] or because it failed.
    pub fn is_closed(&self) -> bool {
        self.0.engines.is_closed()
    }

    /// Closes the device now: whoever waits on a channel is woken, and every later call fails.
    pub fn close(&self) {
        self.0.engines.close();
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        if self.engines.is_inherited() {
            return;
        }
        self.engines.close();
    }
}

impl DeviceInner {
    pub(crate) fn stats(&self) -> DeviceStats {
        let mut all = DeviceStats::default();
        for driver in self.engines.all() {
            all.add(&driver.counters().into());
        }
        all
    }

    /// The local address for a peer when the program named none.
    pub(crate) fn local_for(&self, remote: IpAddr) -> Result<IpAddr, VerbsError> {
        if !self.addr.is_unspecified() {
            return Ok(self.addr);
        }
        iface::route_to(remote).map_err(|e| VerbsError::Address(format!("no way to {remote}: {e}")))
    }

    pub(crate) fn new_cq_handle(&self) -> u32 {
        self.next_cq.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(all(test, feature = "broker"))]
mod tests {
    use super::*;

    #[test]
    fn published_counters_have_the_places_that_the_broker_names() {
        let names: Vec<_> = DeviceStats::default().published(0).map(|(name, _)| name).collect();
        assert_eq!(names, COUNTERS);
    }
}
