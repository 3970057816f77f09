//! Devices that share their address with other processes, through a broker (`roce_broker`).

use std::{
    net::IpAddr,
    sync::{Arc, Weak},
};

use roce_broker::{Inbox, JoinConfig, JoinError, Membership, Report};
use roce_port::{ConnChange, RxMeta};
use roce_verbs::{Mtu, provider::VerbsError};

use crate::device::{Device, DeviceConfig, DeviceInner, Services};

pub(crate) fn join_error(e: JoinError) -> VerbsError {
    match e {
        JoinError::Io { context, source } => VerbsError::Io {
            context: context.into(),
            source,
        },
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

    fn conn_change(&self, change: ConnChange) {
        self.0.conn_change(&change);
    }

    fn hand_over(&self, meta: &RxMeta, bytes: &[u8]) {
        // Lost if the broker has no room: the sender sends it again.
        self.0.hand_over(meta, bytes);
    }
}

/// Takes what the broker has for the device.
struct Post(Weak<DeviceInner>);

impl Inbox for Post {
    fn datagram(&self, meta: &RxMeta, bytes: &[u8]) {
        if let Some(inner) = self.0.upgrade() {
            // A device that is closed takes nothing any more.
            let _ = inner.driver.inject(bytes, meta);
        }
    }

    fn report(&self) -> Option<Report> {
        self.0.upgrade().map(|inner| inner.report())
    }
}

/// A report of these addresses.
pub(crate) fn report(addrs: &[IpAddr], mtu: Mtu, queue_pairs: usize, counters: [(&str, u64); 15]) -> Report {
    let addrs = addrs.iter().filter(|a| !a.is_unspecified());
    let counters = counters.into_iter().map(|(name, value)| (name.to_owned(), value));
    Report {
        addrs: addrs.copied().collect(),
        mtu: mtu.bytes() as u32,
        queue_pairs: queue_pairs as u64,
        counters: counters.collect(),
    }
}

impl DeviceInner {
    /// What other processes may know about the device.
    pub(crate) fn report(&self) -> Report {
        // A process that ends is asked for its last report: with this call goes what its queue pairs owe.
        let queue_pairs = self.driver.with(|port, _| port.queue_pairs()).unwrap_or(0);
        report(&[self.addr], self.mtu, queue_pairs, self.hw_counters())
    }
}

/// How to join the broker that has this address open, if there is one.
pub(crate) fn holder(addr: IpAddr) -> Option<JoinConfig> {
    let how = JoinConfig::from_env()?;
    let open = roce_broker::statistics(&how.dir).ok()??.addrs;
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
    pub fn open_shared(mut config: DeviceConfig, how: &JoinConfig) -> Result<Self, VerbsError> {
        let membership = Arc::new(roce_broker::join(how).map_err(join_error)?);
        config.sockets = Some(membership.open(config.addr).map_err(join_error)?);
        config.qpn_slot = Some(membership.numbers());
        config.services = Some(Arc::new(Listeners(membership.clone())));
        let device = Self::open(config)?;
        membership.set_inbox(Arc::new(Post(Arc::downgrade(&device.0))));
        Ok(device)
    }
}
