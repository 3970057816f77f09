//! Sharing an address with other processes, through the broker.

use std::{
    net::IpAddr,
    sync::{Arc, Weak},
};

use roce::{DeviceConfig, RxMeta, Services, VerbsError};
use roce_broker::{Inbox, JoinConfig, JoinError, Membership, Report, StartError};

use crate::{
    config,
    engine::Engine,
    ret::{Errno, Result},
};

fn errno(e: &JoinError) -> Errno {
    match e {
        JoinError::Io { source, .. } => Errno(source.raw_os_error().unwrap_or(libc::EIO)),
        JoinError::Refused { .. } => Errno(libc::EADDRNOTAVAIL),
        _ => Errno::IO,
    }
}

/// Takes a place among the processes of an address, and has the device use what belongs to it. `None`: there is no
/// broker to be had, or none is wanted, and the device is this process's alone.
///
/// # Errors
/// When the broker refuses; the reason is on standard error.
pub(crate) fn join(wanted: &mut DeviceConfig) -> Result<Option<Arc<Membership>>> {
    let Some(how) = JoinConfig::from_env() else {
        return Ok(None);
    };
    let membership = match roce_broker::join(&how) {
        Ok(membership) => Arc::new(membership),
        Err(JoinError::Start(StartError::NoProgram)) => return Ok(None),
        Err(e) => {
            config::complain(format_args!("{e}"));
            return Err(errno(&e));
        }
    };
    let sockets = membership.open(wanted.addr).map_err(|e| {
        config::complain(format_args!("{e}"));
        errno(&e)
    })?;
    wanted.sockets = Some(sockets);
    wanted.qpn_slot = Some(membership.numbers());
    wanted.services = Some(Arc::new(Listeners(membership.clone())));
    Ok(Some(membership))
}

/// Tells the broker for what this process takes connect requests.
#[derive(Debug)]
struct Listeners(Arc<Membership>);

impl Services for Listeners {
    fn claim(&self, service_id: u64, addr: Option<IpAddr>) -> std::result::Result<(), VerbsError> {
        let done = self.0.listen(service_id, addr);
        done.map_err(|e| VerbsError::Address(e.to_string()))
    }

    fn release(&self, service_id: u64, addr: Option<IpAddr>) {
        if let Err(e) = self.0.unlisten(service_id, addr) {
            tracing::debug!("{e}");
        }
    }
}

/// What the broker has for this process.
struct Post(Weak<Engine>);

impl Inbox for Post {
    fn datagram(&self, meta: &RxMeta, bytes: &[u8]) {
        if let Some(engine) = self.0.upgrade() {
            // A device that is closed takes nothing any more.
            let _ = engine.device.inject(bytes, meta);
        }
    }

    fn report(&self) -> Report {
        let Some(engine) = self.0.upgrade() else {
            return Report::default();
        };
        let counters = engine.device.hw_counters().into_iter();
        Report {
            addrs: Some(engine.device.addr())
                .filter(|a| !a.is_unspecified())
                .into_iter()
                .collect(),
            mtu: engine.device.mtu().bytes() as u32,
            queue_pairs: engine.objects().qps.len() as u64,
            counters: counters.map(|(name, value)| (name.to_owned(), value)).collect(),
        }
    }
}

/// Has the broker's packets delivered to an engine.
pub(crate) fn deliver_to(membership: &Membership, engine: Weak<Engine>) {
    membership.set_inbox(Arc::new(Post(engine)));
}
