//! Our engine without I/O: a fabric at each end of a wire that loses nothing, under a clock that jumps to the next timer when nothing
//! is under way.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_local::{Fabric, FabricConfig, Ports, Single};
use roce_mem::MemoryTable;
use roce_port::{Port, PortConfig, RxMeta, TxBatch, TxConfig};
use roce_verbs::{DeviceLimits, Instant, Mtu, provider::Provider};

use crate::{Pair, Side};

/// Two fabrics.
pub struct Wire {
    hosts: [Fabric<Single>; 2],
    batch: TxBatch,
    now: Instant,
}

fn ip(side: Side) -> IpAddr {
    IpAddr::from([192, 0, 2, 1 + side as u8])
}

impl Wire {
    /// Hosts that handle keys like this.
    pub fn new(config: FabricConfig) -> Self {
        let host = |side: Side| {
            let (seed, addr) = (side as u8 + 1, ip(side));
            let limits = DeviceLimits::software(seed.into());
            let mem = Arc::new(MemoryTable::new([seed; 32], &limits));
            let port = PortConfig::new(vec![addr], Mtu::B1024, seed.into());
            let port = Port::new(port, mem.clone(), [seed; 32]);
            Fabric::new(Single::new(port, mem, vec![addr]), config, vec![(limits, vec![addr])])
        };
        Self {
            hosts: Side::ALL.map(host),
            batch: TxBatch::new(TxConfig::default()),
            now: Instant::from_nanos(1_000_000),
        }
    }

    fn carry(&mut self, from: Side) -> bool {
        let mut moved = false;
        loop {
            let port = self.hosts[from as usize].ports().port(0);
            let more = port.poll_transmit(self.now, &mut self.batch);
            let to = self.hosts[from.other() as usize].ports().port(0);
            for train in self.batch.trains() {
                moved = true;
                let meta = RxMeta {
                    segment_len: train.segment_len,
                    ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
                };
                if train.remote.ip() == ip(from.other()) {
                    to.handle_datagram(self.now, &meta, train.bytes);
                }
            }
            self.batch.clear();
            if !more {
                return moved;
            }
        }
    }

    /// Lets time pass until the next timer is due.
    fn sleep(&mut self) {
        let due = |host: &mut Fabric<Single>| host.ports().port(0).poll_timeout();
        let Some(next) = self.hosts.iter_mut().filter_map(due).min() else {
            return;
        };
        self.now = self.now.max(next);
        for host in &mut self.hosts {
            host.set_now(self.now);
            host.ports().port(0).handle_timeout(self.now);
        }
    }
}

impl Pair for Wire {
    fn provider(&mut self, side: Side) -> &mut dyn Provider {
        &mut self.hosts[side as usize]
    }

    fn addr(&self, side: Side) -> IpAddr {
        ip(side)
    }

    fn turn(&mut self) {
        if !(self.carry(Side::A) | self.carry(Side::B)) {
            self.sleep();
        }
    }
}
