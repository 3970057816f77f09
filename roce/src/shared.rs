//! Devices that share their address with other processes, through a broker (`roce_broker`).

use std::{net::IpAddr, sync::Arc};

use roce_port::{PortChange, RxMeta};
use roce_verbs::provider::VerbsError;

use crate::{
    broker::{self, JoinConfig, JoinError, Membership, Snapshot, StartError},
    device::{Device, DeviceConfig, Services},
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

    fn publish(&self, status: &Snapshot) {
        self.0.publish(status);
    }

    fn port_change(&self, change: PortChange) {
        self.0.port_change(&change);
    }

    fn hand_over(&self, meta: &RxMeta, bytes: &[u8]) {
        // Lost if the broker has no room: the sender sends it again.
        self.0.hand_over(meta, bytes);
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
            joining.set_inbox(Box::new(move |meta, bytes| {
                if let Some(inner) = device.upgrade() {
                    // A device that is closed takes nothing any more.
                    let _ = inner.engines.get(index).inject(bytes, meta);
                }
            }));
        }
        Ok(device)
    }
}
