//! Addresses that loops get while they run.

use std::{io, net::IpAddr, os::fd::BorrowedFd, sync::Arc};

use parking_lot::Mutex;
use roce_fault::Faults;
use roce_net::{OpenError, OpenSockets, iface};
use roce_port::{Placement, Steering};
use roce_verbs::{DeviceLimits, provider::VerbsError};

use crate::{
    broker::{JoinError, proto::Refusal},
    device::DeviceConfig,
    joined::{Joining, WeakJoining},
    member::{Member, Opened},
    open,
    shared::join_error,
    tap::{SharedTap, WeakTap},
};

/// Addresses that loops have at most: as many as a session has paths.
const MAX_ADDRESSES: usize = 128;

/// A device that is open, for one loop: [`LocalDevice::attach`](crate::LocalDevice::attach) takes it.
pub struct NewDevice(Opened);

impl NewDevice {
    /// Its address.
    pub fn addr(&self) -> IpAddr {
        self.0.0.addr
    }

    /// Returns the descriptors to watch, once it is attached.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.0.0.descriptors().collect()
    }

    pub(crate) fn into_opened(self) -> (Member, (DeviceLimits, Vec<IpAddr>)) {
        self.0
    }
}

impl core::fmt::Debug for NewDevice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("NewDevice")
            .field("addr", &self.addr())
            .finish_non_exhaustive()
    }
}

/// Opens further addresses for loops that run, as those were opened that they began with: with the same settings, for all of the loops,
/// and beside other processes if these are. It is for any thread that may wait, and keeps nothing alive of the loops. What it has
/// opened stays so until they end.
#[derive(Clone)]
pub struct Opener(Arc<Inner>);

struct Inner {
    usual: DeviceConfig,
    how: How,
    /// The capture of the loops' devices.
    tap: Option<WeakTap>,
    /// Open, or being opened.
    addrs: Mutex<Vec<IpAddr>>,
    /// Addresses of the loop's RDMA devices, which need not be opened.
    hardware: Mutex<Vec<IpAddr>>,
    /// Sockets that the broker has given to some of the loops, when it has refused others.
    given: Mutex<Vec<(IpAddr, Vec<OpenSockets>)>>,
}

/// Whose addresses are.
enum How {
    /// A single loop's.
    One,
    /// Of several loops.
    Shards(Steering, Arc<dyn Placement>),
    /// Of loops that are members of the broker's.
    Members(Vec<WeakJoining>, Arc<dyn Placement>),
}

impl core::fmt::Debug for Opener {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Opener")
            .field("addrs", &self.0.addrs)
            .finish_non_exhaustive()
    }
}

/// Error of an address that can't be used, with this kind of reason.
fn refused(addr: IpAddr, kind: io::ErrorKind, why: impl Into<String>) -> VerbsError {
    VerbsError::Io {
        context: format!("opening {addr}"),
        source: io::Error::new(kind, why.into()),
    }
}

impl Opener {
    pub(crate) fn of_one(configs: &[DeviceConfig], taps: &[Option<SharedTap>]) -> Self {
        Self::new(configs, taps, How::One)
    }

    pub(crate) fn of_shards(
        configs: &[DeviceConfig],
        taps: &[Option<SharedTap>],
        steering: Steering,
        placement: &Arc<dyn Placement>,
    ) -> Self {
        Self::new(configs, taps, How::Shards(steering, placement.clone()))
    }

    pub(crate) fn of_members(
        configs: &[DeviceConfig],
        taps: &[Option<SharedTap>],
        joining: &[Joining],
        placement: &Arc<dyn Placement>,
    ) -> Self {
        let joining = joining.iter().map(Joining::downgrade).collect();
        Self::new(configs, taps, How::Members(joining, placement.clone()))
    }

    /// Returns the rules of faults on demand.
    pub(crate) fn faults(&self) -> Option<Faults> {
        self.0.usual.faults.clone()
    }

    fn new(configs: &[DeviceConfig], taps: &[Option<SharedTap>], how: How) -> Self {
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
            how,
            tap: taps.first().and_then(Option::as_ref).map(SharedTap::weak),
            addrs: Mutex::new(configs.iter().map(|config| config.addr.to_canonical()).collect()),
            hardware: Mutex::default(),
            given: Mutex::default(),
        }))
    }

    pub(crate) fn set_hardware(&self, addrs: Vec<IpAddr>) {
        *self.0.hardware.lock() = addrs;
    }

    /// The addresses that are open, or being opened.
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
        let mut all: Vec<_> = addrs.iter().map(|addr| DeviceConfig::new(*addr)).collect();
        all.push(config.clone());
        open::check_apart(&all)?;
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
        let tap = match &self.0.tap {
            Some(tap) => Some(tap.get().ok_or(VerbsError::Closed)?),
            None => None,
        };
        let opened = match &self.0.how {
            How::One => open::datapath(config)
                .and_then(|path| path.map_err(open::error))
                .and_then(|path| Ok(vec![Member::single(config, path, tap)?])),
            How::Shards(steering, placement) => open::shard_datapaths(config, *steering)
                .and_then(|paths| paths.map_err(open::error))
                .and_then(|paths| Member::shards(config, paths, *steering, placement, tap.as_ref())),
            How::Members(joining, placement) => {
                let joining: Option<Vec<_>> = joining.iter().map(WeakJoining::upgrade).collect();
                let joining = joining.ok_or(VerbsError::Closed)?;
                let sockets = self.sockets(addr, &joining)?;
                let opened = Member::joined(config, &joining, sockets.clone(), placement, tap.as_ref());
                opened.inspect_err(|_| self.0.given.lock().push((addr, sockets)))
            }
        };
        let opened = opened.map_err(|e| match e {
            VerbsError::Address(why) => refused(addr, io::ErrorKind::AddrInUse, why),
            e => e,
        })?;
        Ok(opened.into_iter().map(NewDevice).collect())
    }

    /// Returns the sockets of each loop. If one is refused, the others' are kept for the next attempt: the broker gives them once.
    fn sockets(&self, addr: IpAddr, joining: &[Joining]) -> Result<Vec<OpenSockets>, VerbsError> {
        let mut sockets = {
            let mut given = self.0.given.lock();
            let kept = given.iter().position(|(of, _)| *of == addr);
            kept.map_or_else(Vec::new, |index| given.swap_remove(index).1)
        };
        for joining in joining.iter().skip(sockets.len()) {
            match joining.sockets(addr) {
                Ok(some) => sockets.push(some),
                Err(e) => {
                    self.0.given.lock().push((addr, sockets));
                    return Err(not_given(addr, e));
                }
            }
        }
        Ok(sockets)
    }
}

fn not_given(addr: IpAddr, e: JoinError) -> VerbsError {
    match e {
        JoinError::Timeout => refused(addr, io::ErrorKind::TimedOut, e.to_string()),
        JoinError::Refused {
            why: Refusal::Address,
            text,
        } => refused(addr, io::ErrorKind::AddrInUse, text),
        e => join_error(e),
    }
}
