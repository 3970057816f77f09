//! A host: the fabric of a loop, whose packets a test carries.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_port::fabric::{Fabric, FabricConfig, Several, Usage};
use roce_port::{Port, PortConfig, RxMeta, TxBatch, TxConfig};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{
    DeviceLimits, Instant, Mtu,
    provider::{DeviceCaps, Provider},
};
use rtrs::Cx;

use crate::faulty::Faulty;

/// Ways in which the devices invalidate keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum KeyMode {
    /// Everything, at once.
    Instant,
    /// Everything, by work requests.
    Queued,
    /// Windows only, by work requests.
    Windows,
    /// The same, without reports of windows that a peer has closed.
    SilentWindows,
    /// Nothing.
    Static,
}

impl KeyMode {
    pub(crate) const ALL: [Self; 5] = [
        Self::Instant,
        Self::Queued,
        Self::Windows,
        Self::SilentWindows,
        Self::Static,
    ];
    /// Modes with keys that can be invalidated.
    pub(crate) const CLOSABLE: [Self; 3] = [Self::Instant, Self::Queued, Self::Windows];

    fn config(self) -> FabricConfig {
        FabricConfig {
            instant_keys: matches!(self, Self::Instant),
            fast_registration: matches!(self, Self::Instant | Self::Queued),
            windows: !matches!(self, Self::Static),
            tells_invalidated: !matches!(self, Self::SilentWindows),
        }
    }

    pub(crate) fn caps(self) -> DeviceCaps {
        let host = Host::new(self, &[vec![[192, 0, 2, 1].into()]], 1);
        host.fabric.devices()[0].clone()
    }
}

/// Fabric of a loop with software devices.
pub(crate) struct Host {
    pub(crate) fabric: Faulty,
    batch: TxBatch,
    rng: u64,
}

impl Host {
    /// One device for each list of addresses. Hosts of different seeds have different numbers.
    pub(crate) fn new(keys: KeyMode, devices: &[Vec<IpAddr>], seed: u64) -> Self {
        let (mut ports, mut limits) = (Vec::new(), Vec::new());
        for (device, addrs) in devices.iter().enumerate() {
            let guid = seed + 10_000 * device as u64;
            let config = PortConfig::new(addrs.clone(), Mtu::B1024, guid);
            let mut random = [seed as u8; 32];
            random[..8].copy_from_slice(&guid.to_le_bytes());
            let mem = Arc::new(MemoryTable::new(random, &config.limits));
            ports.push((Port::new(config, mem.clone(), random), mem, addrs.clone()));
            limits.push((DeviceLimits::software(guid), addrs.clone()));
        }
        Self {
            fabric: Faulty::new(Fabric::new(Several::new(ports), keys.config(), limits)),
            batch: TxBatch::new(TxConfig::default()),
            rng: seed,
        }
    }

    pub(crate) fn usage(&self) -> Usage {
        self.fabric.usage()
    }

    /// Returns when a port wants to be called.
    pub(crate) fn poll_timeout(&mut self) -> Option<Instant> {
        let ports = self.fabric.ports().all();
        ports.filter_map(|port| port.poll_timeout()).min()
    }

    /// Runs the timers of ports that are due.
    pub(crate) fn timers(&mut self, now: Instant) {
        for port in self.fabric.ports().all() {
            if port.poll_timeout().is_some_and(|at| at <= now) {
                port.handle_timeout(now);
            }
        }
    }

    /// Receives a packet.
    pub(crate) fn receive(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) {
        let port = self.fabric.ports().at(meta.local);
        let port = port.unwrap_or_else(|| panic!("no port has {}", meta.local));
        port.handle_datagram(now, meta, bytes);
    }

    /// Sends everything: `sent` gets it as the other side sees it.
    pub(crate) fn drain(&mut self, now: Instant, mut sent: impl FnMut(&RxMeta, &[u8])) {
        for port in self.fabric.ports().all() {
            loop {
                let more = port.poll_transmit(now, &mut self.batch);
                for train in self.batch.trains() {
                    let meta = RxMeta {
                        segment_len: train.segment_len,
                        ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
                    };
                    sent(&meta, train.bytes);
                }
                self.batch.clear();
                if !more {
                    break;
                }
            }
        }
    }

    /// Calls a machine with the context of this host.
    pub(crate) fn with<T>(&mut self, now: Instant, f: impl FnOnce(&mut Cx<'_>) -> T) -> T {
        self.fabric.set_now(now);
        let rng = &mut self.rng;
        let mut random = |out: &mut [u8]| {
            for byte in out {
                *rng = rng
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                *byte = (*rng >> 33) as u8;
            }
        };
        f(&mut Cx {
            now,
            provider: &mut self.fabric,
            random: &mut random,
        })
    }
}
