//! Fabric: devices of both kinds, and the numbers of the objects on them.

use core::net::{IpAddr, SocketAddr};
use std::io;

use roce_fault::Faults;
use roce_verbs::{
    DeviceLimits, Instant,
    provider::{CmRef, CqId, DeviceCaps, DeviceIx, KeyId, MrId, PdId, QpId, VerbsError},
};

use crate::fabric::{
    backend::{Backend, Hardware},
    ports::Ports,
    slots::Slots,
    soft::{FabricConfig, Soft, gone},
};

mod cm;
mod verbs;

/// Backend of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Software: devices are ports.
    Soft,
    /// RDMA devices of the host.
    Hard,
}

/// Device: its index at its backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Device {
    kind: Kind,
    index: usize,
}

/// Listener or connection.
#[derive(Clone, Copy)]
enum Cm {
    /// Each backend that listens has a part of it.
    Listener(SocketAddr),
    Conn(Kind),
}

/// RDMA devices of the host.
struct Hard {
    backend: Box<dyn Hardware>,
    /// Returns the local address of the route to a peer.
    route: fn(IpAddr) -> io::Result<IpAddr>,
}

/// Backends of a fabric.
struct Backends<P> {
    soft: Soft<P>,
    hard: Option<Hard>,
}

impl<P: Ports> Backends<P> {
    fn of(&mut self, kind: Kind) -> &mut dyn Backend {
        match (kind, &mut self.hard) {
            (Kind::Hard, Some(hard)) => &mut *hard.backend,
            _ => &mut self.soft,
        }
    }

    fn of_ref(&self, kind: Kind) -> &dyn Backend {
        match (kind, &self.hard) {
            (Kind::Hard, Some(hard)) => &*hard.backend,
            _ => &self.soft,
        }
    }
}

/// All devices of a loop as one provider: software devices, each on a port, and RDMA devices of the host.
pub struct Fabric<P> {
    devices: Vec<Device>,
    /// By device.
    caps: Vec<DeviceCaps>,
    backends: Backends<P>,
    pds: Slots<PdId, Device>,
    mrs: Slots<MrId, Device>,
    keys: Slots<KeyId, Device>,
    cqs: Slots<CqId, Device>,
    qps: Slots<QpId, Device>,
    cms: Slots<CmRef, Cm>,
    /// RDMA devices are polled first, the next time.
    hard_first: bool,
    /// The last port number that was given to a listener which did not name one.
    next_port: u16,
}

impl<P: Ports> Fabric<P> {
    /// A fabric on these ports, one device for each. `devices` are their limits and addresses.
    pub fn new(ports: P, config: FabricConfig, devices: Vec<(DeviceLimits, Vec<IpAddr>)>) -> Self {
        let mut this = Self {
            devices: Vec::new(),
            caps: Vec::new(),
            backends: Backends {
                soft: Soft::new(ports, config),
                hard: None,
            },
            pds: Slots::default(),
            mrs: Slots::default(),
            keys: Slots::default(),
            cqs: Slots::default(),
            qps: Slots::default(),
            cms: Slots::default(),
            hard_first: false,
            next_port: cm::FIRST_PORT,
        };
        for (limits, addrs) in devices {
            this.add_device(limits, addrs);
        }
        this
    }

    /// Adds a software device for the next port. Listeners at all addresses that were there before are not at its own.
    pub fn add_device(&mut self, limits: DeviceLimits, addrs: Vec<IpAddr>) -> DeviceIx {
        let index = self.soft_caps().count();
        let caps = self.backends.soft.add_device(limits, addrs);
        let kind = Kind::Soft;
        self.push_device(Device { kind, index }, caps)
    }

    fn push_device(&mut self, device: Device, caps: DeviceCaps) -> DeviceIx {
        self.devices.push(device);
        self.caps.push(caps);
        DeviceIx(self.devices.len() as u16 - 1)
    }

    /// Adds the RDMA devices of the host, of which there were none. `route` returns the local address of the route to a peer. An address
    /// that a software device has too is the software device's.
    pub fn set_hardware(&mut self, backend: Box<dyn Hardware>, route: fn(IpAddr) -> io::Result<IpAddr>) {
        debug_assert!(self.backends.hard.is_none());
        self.backends.hard = Some(Hard { backend, route });
        self.refresh_hardware();
    }

    /// Returns the RDMA devices of the host.
    pub fn hardware(&self) -> Option<&dyn Hardware> {
        self.backends.hard.as_ref().map(|hard| &*hard.backend)
    }

    /// Updates the capabilities of RDMA devices, and adds new devices.
    fn refresh_hardware(&mut self) {
        let caps = self.hardware().map(|hard| hard.devices().to_vec()).unwrap_or_default();
        for (index, caps) in caps.into_iter().enumerate() {
            let kind = Kind::Hard;
            match self.ix(Device { kind, index }) {
                Some(ix) => self.caps[usize::from(ix.0)] = caps,
                None => drop(self.push_device(Device { kind, index }, caps)),
            }
        }
    }

    /// Reads the descriptors of RDMA devices without waiting. Then completions must be polled, and then events. Returns whether there
    /// was anything.
    ///
    /// # Errors
    /// If the system fails.
    pub fn poll_hardware(&mut self) -> Result<bool, VerbsError> {
        let Some(hard) = &mut self.backends.hard else {
            return Ok(false);
        };
        let polled = hard.backend.poll(&mut || self.cms.insert(Cm::Conn(Kind::Hard)).ok());
        self.refresh_hardware();
        polled
    }

    /// Requests that the descriptors of RDMA devices report the next completion. Completions before that are not reported: poll once
    /// more before waiting.
    ///
    /// # Errors
    /// If a completion queue has failed.
    pub fn arm_hardware(&mut self) -> Result<(), VerbsError> {
        match &mut self.backends.hard {
            Some(hard) => hard.backend.arm(),
            None => Ok(()),
        }
    }

    /// Sets the fault rules for verbs of software devices.
    pub fn set_faults(&mut self, faults: Option<Faults>) {
        self.backends.soft.set_faults(faults);
    }

    /// Sets the time: once in each iteration of the loop.
    pub fn set_now(&mut self, now: Instant) {
        self.backends.soft.set_now(now);
    }

    /// Returns the ports, to receive and send.
    pub fn ports(&mut self) -> &mut P {
        self.backends.soft.ports()
    }

    /// Moves queue pairs as the ports' connection events demand. Polling for completions begins with it.
    pub fn take_cm_events(&mut self) {
        self.backends.soft.take_cm_events();
    }

    /// Returns whether a software device's key opens memory for writes of peers: for tests of who grants and takes back.
    pub fn opens(&self, key: KeyId) -> bool {
        self.backends.soft.opens(key)
    }

    /// Returns the capabilities of the software devices, by port.
    fn soft_caps(&self) -> impl Iterator<Item = &DeviceCaps> {
        let all = self.devices.iter().zip(&self.caps);
        all.filter(|(device, _)| device.kind == Kind::Soft)
            .map(|(_, caps)| caps)
    }

    fn device(&self, ix: DeviceIx) -> Result<Device, VerbsError> {
        let device = self.devices.get(usize::from(ix.0));
        device.copied().ok_or_else(|| gone("device"))
    }

    fn ix(&self, device: Device) -> Option<DeviceIx> {
        let at = self.devices.iter().position(|of| *of == device);
        at.map(|at| DeviceIx(at as u16))
    }
}

macro_rules! usage {
    ($($name:ident)*) => {
        /// Number of objects of each kind.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[allow(missing_docs)]
        pub struct Usage {
            $(pub $name: usize,)*
        }

        impl Usage {
            /// Adds those of another loop.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }

        impl<P: Ports> Fabric<P> {
            /// Returns the number of objects of each kind.
            pub fn usage(&self) -> Usage {
                Usage { $($name: self.$name.len(),)* }
            }
        }
    };
}

usage! { pds mrs keys cqs qps cms }
