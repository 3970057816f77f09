//! Addresses that loops get while they run.

use std::{collections::HashMap, io, net::IpAddr, os::fd::BorrowedFd, sync::Arc};

use parking_lot::Mutex;
use roce_fault::Faults;
use roce_net::{OpenError, OpenSockets, iface};
use roce_port::Placement;
use roce_verbs::provider::VerbsError;

use crate::{
    broker::{self, proto::Refusal},
    config::DeviceConfig,
    joined::{Sharing, join_error},
    open,
    shards::Member,
    tap::{SharedTap, WeakTap},
};

/// Addresses that loops have at most: as many as a session has paths.
const MAX_ADDRESSES: usize = 128;

/// A device that is open, for one loop: [`LocalDevice::attach`](crate::LocalDevice::attach) takes it.
pub struct NewDevice(pub(crate) Member);

impl NewDevice {
    /// Returns its address.
    pub fn addr(&self) -> IpAddr {
        self.0.addr
    }

    /// Returns the descriptors to watch, once it is attached.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.0.descriptors().collect()
    }
}

debug!(NewDevice, "NewDevice", |this| addr: this.addr());

/// Opens further addresses for loops that run, as those were opened that they began with: with the same settings, for all of the loops,
/// and beside other processes if these are. It is for any thread that may wait, and keeps nothing alive of the loops. What it has
/// opened stays so until they end.
#[derive(Clone)]
pub struct Opener(Arc<Inner>);

struct Inner {
    usual: DeviceConfig,
    sharing: Sharing,
    /// Of connect requests, if there are several loops.
    placement: Option<Arc<dyn Placement>>,
    /// The capture of the loops' devices.
    tap: Option<WeakTap>,
    /// Open, or being opened.
    addrs: Mutex<Vec<IpAddr>>,
    /// Addresses of the loop's RDMA devices, which need not be opened.
    hardware: Mutex<Vec<IpAddr>>,
    /// Sockets that the broker has given to some of the loops, when it has refused others.
    given: Mutex<HashMap<IpAddr, Vec<OpenSockets>>>,
}

debug!(Opener, "Opener", |this| addrs: this.0.addrs);

/// Error of an address that can't be used, with this kind of reason.
fn refused(addr: IpAddr, kind: io::ErrorKind, why: impl Into<String>) -> VerbsError {
    VerbsError::Io {
        context: format!("opening {addr}"),
        source: io::Error::new(kind, why.into()),
    }
}

impl Opener {
    /// Returns the rules of faults on demand.
    pub(crate) fn faults(&self) -> Option<Faults> {
        self.0.usual.faults.clone()
    }

    pub(crate) fn new(
        configs: &[DeviceConfig],
        taps: &[Option<SharedTap>],
        sharing: Sharing,
        placement: Option<Arc<dyn Placement>>,
    ) -> Self {
        let usual = DeviceConfig {
            // Of one address each.
            guid: None,
            sockets: None,
            qpn_slot: None,
            qpn_parts: None,
            services: None,
            ..configs.first().cloned().unwrap_or_default()
        };
        Self(Arc::new(Inner {
            usual,
            sharing,
            placement,
            tap: taps.first().and_then(Option::as_ref).map(SharedTap::weak),
            addrs: Mutex::new(configs.iter().map(|config| config.addr.to_canonical()).collect()),
            hardware: Mutex::default(),
            given: Mutex::default(),
        }))
    }

    pub(crate) fn set_hardware(&self, addrs: Vec<IpAddr>) {
        *self.0.hardware.lock() = addrs;
    }

    /// Returns the addresses that are open, or being opened.
    pub fn addrs(&self) -> Vec<IpAddr> {
        self.0.addrs.lock().clone()
    }

    /// Returns whether packets may leave from an address: it is open, or all are, or an RDMA device has it.
    pub fn has(&self, addr: IpAddr) -> bool {
        let addr = addr.to_canonical();
        let has = |open: &IpAddr| *open == addr || open.is_unspecified() && open::serves(*open, addr);
        self.0.addrs.lock().iter().any(has) || self.0.hardware.lock().contains(&addr)
    }

    /// Opens an address: a device for each of the loops, in their order. It takes as long as the broker does to answer, half a minute at
    /// most for each loop.
    ///
    /// # Errors
    /// [`VerbsError::Io`], whose source is of the kind `AddrNotAvailable` when the address is not ours, `AddrInUse` when somebody has its
    /// port (the text says who) and `TimedOut` when the broker does not answer. [`VerbsError::Closed`] when the loops have ended;
    /// [`VerbsError::Limit`] when they have 128 addresses. And when it is open already, or the system refuses.
    pub fn open(&self, addr: IpAddr) -> Result<Vec<NewDevice>, VerbsError> {
        let config = DeviceConfig {
            addr: addr.to_canonical(),
            ..self.0.usual.clone()
        };
        self.reserve(&config)?;
        self.opened(&config).inspect_err(|_| {
            self.0.addrs.lock().retain(|open| *open != config.addr);
        })
    }

    fn reserve(&self, config: &DeviceConfig) -> Result<(), VerbsError> {
        let mut addrs = self.0.addrs.lock();
        open::check_apart(addrs.iter().copied().chain([config.addr]))?;
        if addrs.len() >= MAX_ADDRESSES {
            return Err(VerbsError::Limit("addresses of a loop"));
        }
        addrs.push(config.addr);
        Ok(())
    }

    fn opened(&self, config: &DeviceConfig) -> Result<Vec<NewDevice>, VerbsError> {
        let addr = config.addr;
        let elsewhere = io::ErrorKind::AddrNotAvailable;
        if iface::path_mtus(addr).is_err_and(|e| e.kind() == elsewhere) {
            return Err(refused(addr, elsewhere, OpenError::NotLocal(addr).to_string()));
        }
        let mut given = self.0.given.lock().remove(&addr).unwrap_or_default();
        let opened = match self.0.sharing.ask(addr, &mut given) {
            Ok(()) => self.members(config, &given),
            Err(e) => Err(not_given(addr, e)),
        };
        // The broker gives sockets once: those of a failed attempt are for the next, if there can be one.
        let again = matches!(&opened, Err(e) if !matches!(e, VerbsError::Closed));
        if again && !given.is_empty() {
            self.0.given.lock().insert(addr, given);
        }
        Ok(opened?.into_iter().map(NewDevice).collect())
    }

    fn members(&self, config: &DeviceConfig, given: &[OpenSockets]) -> Result<Vec<Member>, VerbsError> {
        let tap = match &self.0.tap {
            Some(tap) => Some(tap.upgrade().ok_or(VerbsError::Closed)?),
            None => None,
        };
        let bound = self.0.sharing.bind(config, given);
        let opened = bound.and_then(|bound| Member::all(bound, self.0.placement.as_ref(), tap.as_ref()));
        opened.map_err(|e| match e {
            VerbsError::Address(why) => refused(config.addr, io::ErrorKind::AddrInUse, why),
            e => e,
        })
    }
}

fn not_given(addr: IpAddr, e: broker::Error) -> VerbsError {
    match e {
        broker::Error::Timeout => refused(addr, io::ErrorKind::TimedOut, e.to_string()),
        broker::Error::Refused {
            why: Refusal::Address,
            text,
        } => refused(addr, io::ErrorKind::AddrInUse, text),
        e => join_error(e),
    }
}
