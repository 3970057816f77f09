//! Network side of a host.

use std::{collections::VecDeque, net::IpAddr, sync::Arc};

use roce_port::fabric::{Fabric, FabricConfig, Ports as _, Several};
use roce_port::{Port, PortConfig, TxBatch};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{DeviceLimits, Instant};

use super::late::{Lag, Late};
use crate::{Frame, HostPlan, Rng};

/// A host's network side.
pub struct Node {
    /// Its devices.
    pub fabric: Fabric<Several>,
    /// Calls of its provider that take time.
    pub lag: Lag,
    pub(super) plan: HostPlan,
    /// By network.
    pub(super) addrs: Vec<IpAddr>,
    pub(super) keys: FabricConfig,
    pub(super) batch: Option<TxBatch>,
    pub(super) rx: VecDeque<Frame>,
    pub(super) rx_bytes: usize,
    /// Its life, from 0.
    pub boot: u32,
    /// It runs.
    pub alive: bool,
    /// The next turn, if one is planned.
    pub(super) turn_at: Option<u64>,
    /// Time until which it stands still.
    pub(super) stopped_until: u64,
}

/// The address that a host has in a network; the first has the one that it was drawn with.
pub fn address(addr: IpAddr, network: usize) -> IpAddr {
    match addr {
        IpAddr::V4(a) => (u32::from(a) | (network as u32) << 8).to_be_bytes().into(),
        IpAddr::V6(a) => (u128::from(a) | (network as u128) << 64).to_be_bytes().into(),
    }
}

pub(super) fn fabric(
    plan: &HostPlan,
    addrs: &[IpAddr],
    keys: FabricConfig,
    guid: u64,
    rng: &mut Rng,
) -> Fabric<Several> {
    let guid = if plan.keeps {
        roce_port::cm::guid::keeping(guid)
    } else {
        guid
    };
    let mut config = PortConfig::new(addrs.to_vec(), plan.mtu, guid);
    config.window = plan.window;
    config.turn_packets = plan.turn_packets;
    let mem = Arc::new(MemoryTable::new(rng.seed(), &config.limits));
    let port = Port::new(config, mem.clone(), rng.seed());
    let devices = vec![(DeviceLimits::software(guid), addrs.to_vec())];
    Fabric::new(Several::new(vec![(port, mem, addrs.to_vec())]), keys, devices)
}

impl Node {
    pub(super) fn guid(index: usize, boot: u32) -> u64 {
        0x0200_0000_0000_0000 | (index as u64) << 24 | u64::from(boot)
    }

    /// When the port, or its lag, wants a turn.
    pub fn next_timeout(&mut self) -> Option<Instant> {
        let port = self.fabric.ports().port(0).poll_timeout();
        port.into_iter().chain(self.lag.next_timeout()).min()
    }

    /// Returns the provider of its state machines.
    pub fn provider(&mut self, now: Instant) -> Late<'_, Several> {
        self.fabric.set_now(now);
        Late::new(&mut self.fabric, &mut self.lag, now)
    }
}
