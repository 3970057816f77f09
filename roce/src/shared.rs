//! Devices that share their address with other processes, through a broker (`roce_broker`).

use std::{
    net::IpAddr,
    sync::{Arc, Weak},
};

use roce_port::{PortChange, RxMeta};
use roce_verbs::{Mtu, provider::VerbsError};

use crate::{
    broker::{self, Inbox, JoinConfig, JoinError, Membership, Report, StartError},
    device::{Device, DeviceConfig, DeviceInner, DeviceStats, Services},
    joined::Joining,
    open,
};

pub(crate) fn join_error(e: JoinError) -> VerbsError {
    match e {
        JoinError::Io { context, source } => VerbsError::Io {
            context: context.into(),
            source,
        },
        JoinError::Start(StartError::Io { context, source }) => VerbsError::Io { context, source },
        other => VerbsError::Address(other.to_string()),
    }
}

/// Tells the broker for what this process takes connect requests. It keeps the membership as well.
#[derive(Debug)]
pub(crate) struct Listeners(pub(crate) Arc<Membership>);

impl Services for Listeners {
    fn claim(&self, service_id: u64, addr: Option<IpAddr>) -> Result<(), VerbsError> {
        self.0.listen(service_id, addr).map_err(join_error)
    }

    fn release(&self, service_id: u64, addr: Option<IpAddr>) {
        if let Err(e) = self.0.unlisten(service_id, addr) {
            tracing::debug!("the broker is not told that a listener is gone: {e}");
        }
    }

    fn reserve(&self, service_id: u64, addr: Option<IpAddr>, reuse: bool) -> Result<u64, VerbsError> {
        self.0.bind(service_id, addr, reuse).map_err(join_error)
    }

    fn unreserve(&self, service_id: u64, addr: Option<IpAddr>) {
        if let Err(e) = self.0.unbind(service_id, addr) {
            tracing::debug!("the broker is not told that a port is free: {e}");
        }
    }

    fn closing(&self, report: Report) {
        self.0.report_last(report);
    }

    fn port_change(&self, change: PortChange) {
        self.0.port_change(&change);
    }

    fn hand_over(&self, meta: &RxMeta, bytes: &[u8]) {
        // Lost if the broker has no room: the sender sends it again.
        self.0.hand_over(meta, bytes);
    }
}

/// Takes what the broker has for one of the device's engines.
struct Post {
    device: Weak<DeviceInner>,
    index: usize,
}

impl Inbox for Post {
    fn datagram(&self, meta: &RxMeta, bytes: &[u8]) {
        if let Some(inner) = self.device.upgrade() {
            // A device that is closed takes nothing any more.
            let _ = inner.engines.get(self.index).inject(bytes, meta);
        }
    }

    fn report(&self) -> Option<Report> {
        Some(self.device.upgrade()?.report(self.index))
    }
}

/// A report of these addresses.
pub(crate) fn report(
    addrs: &[IpAddr],
    mtu: Mtu,
    queue_pairs: usize,
    counters: impl Iterator<Item = (&'static str, u64)>,
) -> Report {
    let addrs = addrs.iter().filter(|a| !a.is_unspecified());
    let counters = counters.map(|(name, value)| (name.to_owned(), value));
    Report {
        addrs: addrs.copied().collect(),
        mtu: mtu.bytes() as u32,
        queue_pairs: queue_pairs as u64,
        counters: counters.collect(),
    }
}

impl DeviceInner {
    /// Returns the report about one of the device's engines for other processes: each is a process of its own to them.
    pub(crate) fn report(&self, index: usize) -> Report {
        let driver = self.engines.get(index);
        // A process that ends is asked for its last report: with this call goes what its queue pairs owe.
        let queue_pairs = driver.with(|port, _| port.queue_pairs()).unwrap_or(0);
        let link_downed = if index == 0 { self.link_downed() } else { 0 };
        let stats = DeviceStats::from(driver.counters());
        report(&[self.addr], self.mtu, queue_pairs, stats.reported(link_downed))
    }
}

/// How to join the broker that has this address open, if there is one.
pub(crate) fn holder(addr: IpAddr) -> Option<JoinConfig> {
    let how = JoinConfig::from_env()?;
    let open = broker::statistics(&how.dir).ok()??.addrs;
    let addr = addr.to_canonical();
    let covers = |a: &IpAddr| *a == addr || (a.is_unspecified() && a.is_ipv4() == addr.is_ipv4());
    open.iter().any(covers).then_some(how)
}

impl Device {
    /// Opens a device at an address that other processes of this user may use at the same time: becomes a member of the
    /// broker's, which is started if none runs.
    ///
    /// # Errors
    /// As [`Device::open`], and when there is no broker and none can be started.
    pub fn open_shared(config: DeviceConfig, how: &JoinConfig) -> Result<Self, VerbsError> {
        open::check_shards(config.shards)?;
        let joining = (0..config.shards).map(|_| Joining::join(how));
        let joining = joining.collect::<Result<Vec<_>, _>>()?;
        let opened = joining.iter().map(|joining| {
            let sockets = joining.sockets(config.addr).map_err(join_error)?;
            let config = joining.config(&config, sockets);
            let path = open::datapath(&config)?.map_err(open::error)?;
            Ok((config, path))
        });
        let device = Self::start(opened.collect::<Result<_, VerbsError>>()?)?;
        for (index, joining) in joining.iter().enumerate() {
            let device = Arc::downgrade(&device.0);
            joining.set_inbox(Arc::new(Post { device, index }));
        }
        Ok(device)
    }
}
