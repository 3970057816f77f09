//! Hosts with two providers as one: those of our engine, joined as software and RDMA devices of a loop are.

use std::{io, net::IpAddr};

use roce_devices::{Joint, Side as HalfOf};
use roce_local::FabricConfig;
use roce_verbs::provider::Provider;

use crate::{
    Pair, Side,
    wire::{Network, Station},
};

/// A host.
pub type Host = Joint<Station, Station>;

/// Two hosts of two halves each.
pub struct Halves {
    hosts: [Host; 2],
    /// Whose address a host is known by.
    known_by: HalfOf,
    network: Network,
}

/// The number of a half's device; those of the second have bit 4.
const fn number(side: Side, half: HalfOf) -> u8 {
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
    /// Hosts that handle keys like this, and are known by the address of one half: the other has nothing to do.
    pub fn new(config: FabricConfig, known_by: HalfOf) -> Self {
        let host = |side| {
            let station = |half| Station::new(number(side, half), config);
            Joint::new(station(HalfOf::A), station(HalfOf::B), route)
        };
        Self {
            hosts: Side::ALL.map(host),
            known_by,
            network: Network::default(),
        }
    }

    /// A host.
    pub fn host(&mut self, side: Side) -> &mut Host {
        &mut self.hosts[side as usize]
    }

    /// The address of a half of a host.
    pub fn addr_of(&self, side: Side, half: HalfOf) -> IpAddr {
        let host = &self.hosts[side as usize];
        match half {
            HalfOf::A => host.a().addr(),
            HalfOf::B => host.b().addr(),
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
        let ((a, b), (c, d)) = (one.halves_mut(), two.halves_mut());
        self.network.turn(&mut [a, b, c, d]);
    }
}
