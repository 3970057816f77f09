//! The device.

use std::{
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use roce_net::{DatapathKind, Driver, OpenError, iface};
use roce_port::RxMeta;
use roce_verbs::mem::MemoryTable;
use roce_verbs::{AsyncEvent, DeviceLimits, Mtu, provider::VerbsError};

use crate::{
    broker::{self, JoinConfig},
    config::DeviceConfig,
    engines::Engines,
    error::io_error,
    joined::{self, Sharing},
    open::{self, Bound, Memory, Parts},
    queue::EventQueue,
    router::Router,
    stats::DeviceStats,
    tap::SharedTap,
    view::PortView,
};

/// A RoCE device on sockets. Cheap to clone; it closes when the last clone and the last object made from it are gone.
#[derive(Clone, Debug)]
pub struct Device(pub(crate) Arc<DeviceInner>);

/// State shared by all objects of a device.
pub(crate) struct DeviceInner {
    pub(crate) engines: Arc<Engines>,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) router: Arc<Router>,
    pub(crate) limits: DeviceLimits,
    pub(crate) config: DeviceConfig,
    pub(crate) cqs: Count,
    pub(crate) ahs: Count,
    pub(crate) srqs: Count,
    pub(crate) xrcds: Count,
    pub(crate) next_srq: AtomicU32,
    pub(crate) next_cq: AtomicU32,
    pub(crate) mtu: Mtu,
}

debug!(DeviceInner, "Device", |this| addr: this.config.addr, mtu: this.mtu);

/// Returns how to join the broker that has this address open, if there is one.
pub(crate) fn holder(addr: IpAddr) -> Option<JoinConfig> {
    let how = JoinConfig::from_env()?;
    let open = broker::statistics(&how.dir).ok()??.addrs;
    let addr = addr.to_canonical();
    let covers = |a: &IpAddr| *a == addr || (a.is_unspecified() && a.is_ipv4() == addr.is_ipv4());
    open.iter().any(covers).then_some(how)
}

/// Number of a device's objects of one kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Count(Arc<AtomicU32>);

impl Count {
    /// Counts one more object, as long as a clone of the result lives.
    ///
    /// # Errors
    /// If there are `most` already.
    pub(crate) fn take(&self, most: u32, objects: &'static str) -> Result<Arc<Counted>, VerbsError> {
        let counted = Arc::new(Counted(self.clone()));
        match self.0.fetch_add(1, Ordering::Relaxed) < most {
            true => Ok(counted),
            false => Err(VerbsError::Limit(objects)),
        }
    }
}

/// Object that counts.
#[derive(Debug)]
pub(crate) struct Counted(Count);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Device {
    /// Opens a device: binds UDP port 4791 of the address. If a broker has that, for processes that share the address,
    /// the device is one of theirs ([`Device::open_shared`]).
    ///
    /// # Errors
    /// When the port is taken (the text says by whom and what to do), the address is not ours, or the system refuses.
    pub fn open(config: DeviceConfig) -> Result<Self, VerbsError> {
        let steering = open::check_shards(config.shards)?;
        open::check(&config, steering)?;
        match open::bind(&config, steering) {
            Err(OpenError::PortTaken { .. })
                if config.sockets.is_none()
                    && config.datapath == DatapathKind::Udp
                    && let Some(how) = holder(config.addr) =>
            {
                Self::open_shared(config, &how)
            }
            bound => Self::start(bound.map_err(open::error)?),
        }
    }

    /// Opens a device at an address that other processes of this user may use at the same time: becomes a member of the
    /// broker's, which is started if none runs.
    ///
    /// # Errors
    /// As [`Device::open`], and when there is no broker and none can be started.
    pub fn open_shared(config: DeviceConfig, how: &JoinConfig) -> Result<Self, VerbsError> {
        open::check_shards(config.shards)?;
        open::check_shareable(&config)?;
        let members = joined::join(how, config.shards)?;
        let device = Self::start(Sharing::of(&members).open(&config)?)?;
        for (index, member) in members.iter().enumerate() {
            let device = Arc::downgrade(&device.0);
            member.set_inbox(Box::new(move |meta, bytes| {
                if let Some(inner) = device.upgrade() {
                    // A closed device takes nothing any more.
                    let _ = inner.engines.get(index).inject(bytes, meta);
                }
            }));
        }
        Ok(device)
    }

    /// Starts an engine for each configuration. They have the address and settings in common.
    pub(crate) fn start(bound: Bound) -> Result<Self, VerbsError> {
        let first = bound.first().map(|(config, _)| config.clone());
        let config = first.ok_or_else(|| VerbsError::Invalid("a device of no shards".into()))?;
        let router = Arc::new(Router::new(
            EventQueue::new().map_err(io_error("making an event queue"))?,
            PortView::new(config.addr.to_canonical(), config.mtu),
        ));
        let tap = SharedTap::of(std::slice::from_ref(&config))?.pop().flatten();
        let all = Parts::all(bound, tap.as_ref(), Memory::Shared)?;
        let Parts { mem, limits, mtu, .. } = &all[0];
        let (mem, limits, mtu) = (mem.clone(), limits.clone(), *mtu);
        Ok(Self(Arc::new(DeviceInner {
            engines: Engines::start(all, &router)?,
            mem,
            router,
            limits,
            // The datapaths have the sockets.
            config: DeviceConfig {
                sockets: None,
                ..config
            },
            cqs: Count::default(),
            ahs: Count::default(),
            srqs: Count::default(),
            xrcds: Count::default(),
            next_srq: AtomicU32::new(1),
            next_cq: AtomicU32::new(1),
            mtu,
        })))
    }

    /// Returns the limits.
    pub fn limits(&self) -> DeviceLimits {
        self.0.limits.clone()
    }

    /// Our address, as it was given.
    pub fn addr(&self) -> IpAddr {
        self.0.config.addr
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
        let engine = self.0.engines.first();
        Ok(engine.with_quiet(|port, _| port.path_mtu(local))?)
    }

    /// Identifies the device to connection managers.
    pub fn guid(&self) -> u64 {
        self.0.limits.node_guid
    }

    /// Returns the counters.
    pub fn stats(&self) -> DeviceStats {
        DeviceStats::sum(self.0.engines.all().iter().map(Driver::counters))
    }

    /// Returns the hardware counters that rdma_rxe has, by its names and in its order (`rxe_hw_counters.c`).
    pub fn hw_counters(&self) -> [(&'static str, u64); 15] {
        self.stats().hw_counters(self.0.router.port.link_downed())
    }

    /// Takes one asynchronous event. See [`Device::async_fd`].
    ///
    /// # Errors
    /// When none is left and the device is closed.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        self.0.live()?;
        self.0.router.async_events().pop()
    }

    /// Readable while an asynchronous event waits.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.0.router.async_events().as_fd()
    }

    /// Takes a datagram that another process of the same address received for us, as if the network had brought it.
    ///
    /// # Errors
    /// When the device is closed.
    pub fn inject(&self, datagram: &[u8], meta: &RxMeta) -> Result<(), VerbsError> {
        Ok(self.0.engines.inject(datagram, meta)?)
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
        self.engines.close();
    }
}

impl DeviceInner {
    /// Returns the engines. A fork of the process that opened the device gets none: it must touch nothing of the device, whose locks
    /// other threads may have held.
    pub(crate) fn live(&self) -> Result<&Engines, VerbsError> {
        match self.engines.is_inherited() {
            true => Err(VerbsError::Closed),
            false => Ok(&self.engines),
        }
    }

    /// The local address for a peer when the program named none.
    pub(crate) fn local_for(&self, remote: IpAddr) -> Result<IpAddr, VerbsError> {
        if !self.config.addr.is_unspecified() {
            return Ok(self.config.addr);
        }
        iface::route_to(remote).map_err(|e| VerbsError::Address(format!("no way to {remote}: {e}")))
    }

    /// Checks that an object is of this device.
    pub(crate) fn check(self: &Arc<Self>, owner: &Arc<Self>, object: &str) -> Result<(), VerbsError> {
        match Arc::ptr_eq(self, owner) {
            true => Ok(()),
            false => Err(VerbsError::Invalid(format!("the {object} is another device's"))),
        }
    }
}
