//! Our engine without I/O: fabrics on a network that loses nothing, under a clock that jumps to the next timer when nothing is
//! under way.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_port::fabric::{Fabric, FabricConfig, Ports, Several};
use roce_port::{Port, PortConfig, RxMeta, TxBatch, TxConfig};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{DeviceLimits, Instant, Mtu, provider::Provider};

use crate::{Pair, Side};

/// A device on the network.
pub struct Station {
    addr: IpAddr,
    fabric: Fabric<Several>,
}

impl Station {
    /// The device with this number, which is a part of its address, and keys that are handled like this.
    pub fn new(number: u8, config: FabricConfig) -> Self {
        Self::at(IpAddr::from([192, 0, 2, number]), number, config)
    }

    /// The same at another address.
    pub fn at(addr: IpAddr, number: u8, config: FabricConfig) -> Self {
        let seed = [number; 32];
        let limits = DeviceLimits::software(number.into());
        let mem = Arc::new(MemoryTable::new(seed, &limits));
        let port = PortConfig::new(vec![addr], Mtu::B1024, number.into());
        let port = Port::new(port, mem.clone(), seed);
        let ports = Several::new(vec![(port, mem, vec![addr])]);
        let fabric = Fabric::new(ports, config, vec![(limits, vec![addr])]);
        Self { addr, fabric }
    }

    /// Its address.
    pub const fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Its devices.
    pub fn provider(&mut self) -> &mut dyn Provider {
        &mut self.fabric
    }

    pub(crate) fn fabric(&mut self) -> &mut Fabric<Several> {
        &mut self.fabric
    }

    fn port(&mut self) -> &mut Port {
        self.fabric.ports().port(0)
    }
}

/// Network between devices, and the time.
pub(crate) struct Network {
    batch: TxBatch,
    now: Instant,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            batch: TxBatch::new(TxConfig::default()),
            now: Instant::from_nanos(1_000_000),
        }
    }
}

impl Network {
    /// Moves what is under way, or lets time pass if nothing is.
    pub(crate) fn turn(&mut self, stations: &mut [&mut Station]) {
        let mut moved = false;
        for from in 0..stations.len() {
            moved |= self.carry(stations, from);
        }
        if !moved {
            self.sleep(stations);
        }
    }

    fn carry(&mut self, stations: &mut [&mut Station], from: usize) -> bool {
        let mut moved = false;
        loop {
            let more = stations[from].port().poll_transmit(self.now, &mut self.batch);
            for train in self.batch.trains() {
                moved = true;
                let meta = RxMeta {
                    segment_len: train.segment_len,
                    ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
                };
                if let Some(to) = stations.iter_mut().find(|to| to.addr == train.remote.ip()) {
                    to.port().handle_datagram(self.now, &meta, train.bytes);
                }
            }
            self.batch.clear();
            if !more {
                return moved;
            }
        }
    }

    /// Lets time pass until the next timer is due.
    fn sleep(&mut self, stations: &mut [&mut Station]) {
        let due = stations.iter_mut().filter_map(|station| station.port().poll_timeout());
        let Some(next) = due.min() else { return };
        self.now = self.now.max(next);
        for station in stations {
            station.fabric.set_now(self.now);
            station.port().handle_timeout(self.now);
        }
    }
}

/// Two fabrics.
pub struct Wire {
    hosts: [Station; 2],
    network: Network,
}

impl Wire {
    /// Hosts that handle keys like this.
    pub fn new(config: FabricConfig) -> Self {
        Self {
            hosts: Side::ALL.map(|side| Station::new(1 + side as u8, config)),
            network: Network::default(),
        }
    }
}

impl Pair for Wire {
    fn provider(&mut self, side: Side) -> &mut dyn Provider {
        self.hosts[side as usize].provider()
    }

    fn addr(&self, side: Side) -> IpAddr {
        self.hosts[side as usize].addr
    }

    fn turn(&mut self) {
        let [a, b] = &mut self.hosts;
        self.network.turn(&mut [a, b]);
    }
}
