//! Hosts with a software device and an RDMA device: the latter is that of another fabric of our engine.

use std::{
    io,
    net::IpAddr,
    sync::{Arc, Mutex, atomic::Ordering},
};

use roce_port::fabric::FabricConfig;
use roce_verbs::provider::Provider;

use crate::{
    Pair, Side,
    card::{Card, Shared, Slot, lock},
    wire::{Network, Station},
};

/// Device of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Half {
    /// In software.
    Soft,
    /// RDMA device.
    Hard,
}

impl Half {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Soft, Self::Hard];
}

/// A host: the fabric of its software device has the RDMA device as a backend.
pub struct Host {
    soft: Station,
    hard: Shared,
    slot: Arc<Slot>,
}

impl Host {
    /// Adds the device of one station to the fabric of the other. `route` returns the local address of the route to a peer.
    pub fn new(mut soft: Station, hard: Station, route: fn(IpAddr) -> io::Result<IpAddr>) -> Self {
        let hard = Arc::new(Mutex::new(hard));
        let slot = Arc::<Slot>::default();
        let card = Card::new(hard.clone(), slot.clone());
        soft.fabric().set_hardware(Box::new(card), route);
        Self { soft, hard, slot }
    }

    /// Removes the RDMA device, or puts it back.
    pub fn set_removed(&self, removed: bool) {
        self.slot.is_empty.store(removed, Ordering::Relaxed);
    }

    /// Returns whether the fabric has closed the RDMA device since it was removed.
    pub fn is_closed(&self) -> bool {
        self.slot.is_closed.load(Ordering::Relaxed)
    }

    /// Its devices.
    pub fn provider(&mut self) -> &mut dyn Provider {
        self.soft.provider()
    }
}

/// Two hosts of two devices each.
pub struct Halves {
    hosts: [Host; 2],
    /// Device by whose address a host is known.
    known_by: Half,
    network: Network,
}

/// The number of a device; those of RDMA devices have bit 4.
const fn number(side: Side, half: Half) -> u8 {
    1 + side as u8 + 16 * half as u8
}

/// The way to a device leads from the half that is to its peer what it is to this host.
fn route(to: IpAddr) -> io::Result<IpAddr> {
    match to {
        IpAddr::V4(to) => {
            let [a, b, c, number] = to.octets();
            let other = (number - 1) ^ 1;
            Ok(IpAddr::from([a, b, c, 1 + other]))
        }
        IpAddr::V6(_) => Err(io::ErrorKind::NetworkUnreachable.into()),
    }
}

impl Halves {
    /// Hosts that handle keys like this, and are known by the address of one device: the other has nothing to do.
    pub fn new(config: FabricConfig, known_by: Half) -> Self {
        let host = |side| {
            let station = |half| Station::new(number(side, half), config);
            Host::new(station(Half::Soft), station(Half::Hard), route)
        };
        Self {
            hosts: Side::ALL.map(host),
            known_by,
            network: Network::default(),
        }
    }

    /// The devices of a host.
    pub fn host(&mut self, side: Side) -> &mut dyn Provider {
        self.hosts[side as usize].provider()
    }

    /// A host.
    pub const fn of(&self, side: Side) -> &Host {
        &self.hosts[side as usize]
    }

    /// The address of a device of a host.
    pub fn addr_of(&self, side: Side, half: Half) -> IpAddr {
        let host = &self.hosts[side as usize];
        match half {
            Half::Soft => host.soft.addr(),
            Half::Hard => lock(&host.hard).addr(),
        }
    }
}

impl Pair for Halves {
    fn provider(&mut self, side: Side) -> &mut dyn Provider {
        self.host(side)
    }

    fn addr(&self, side: Side) -> IpAddr {
        self.addr_of(side, self.known_by)
    }

    fn turn(&mut self) {
        let [one, two] = &mut self.hosts;
        let (mut b, mut d) = (lock(&one.hard), lock(&two.hard));
        self.network.turn(&mut [&mut one.soft, &mut b, &mut two.soft, &mut d]);
        drop((b, d));
        for host in &mut self.hosts {
            host.soft.fabric().poll_hardware().expect("events");
        }
    }
}
