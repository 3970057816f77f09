//! One address of a loop.

use std::{net::IpAddr, os::fd::BorrowedFd, sync::Arc};

use roce_mem::MemoryTable;
use roce_net::{LocalConfig, LocalDriver, OpenSockets, Own, UdpDatapath};
use roce_port::{RxMeta, Steering};
use roce_verbs::{DeviceLimits, Instant, Mtu, provider::VerbsError};

use crate::{
    device::DeviceConfig,
    joined::Joining,
    open::{self, Parts},
    shards::{Arrival, Endpoints, Placement, Shard},
    tap::SharedTap,
};

/// What a loop has of one address.
pub(crate) struct Member {
    pub(crate) driver: LocalDriver,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) addr: IpAddr,
    pub(crate) mtu: Mtu,
    /// What it has of an address that others share: loops of this process, or other processes.
    pub(crate) shard: Option<Shard>,
}

/// A member, and what state machines are told of it.
pub(crate) type Opened = (Member, (DeviceLimits, Vec<IpAddr>));

impl Member {
    fn new(config: &DeviceConfig, parts: Parts, own: Option<Own>, shard: Option<Shard>) -> Opened {
        let local = LocalConfig {
            tap: parts.tap,
            own,
            ..LocalConfig::default()
        };
        let addr = config.addr.to_canonical();
        let member = Self {
            driver: LocalDriver::new(parts.port, Box::new(parts.path), local),
            mem: parts.mem,
            addr,
            mtu: parts.mtu,
            shard,
        };
        (member, (parts.limits, addresses(addr)))
    }

    /// That of a single loop, which nobody shares the address with but whom the configuration names.
    pub(crate) fn whole(
        config: &DeviceConfig,
        path: UdpDatapath,
        tap: Option<SharedTap>,
    ) -> Result<Opened, VerbsError> {
        let places: Vec<_> = config.qpn_slot.zip(config.services.clone()).into_iter().collect();
        let shard = Shard::of_places(&places, Arc::new(OnlyOne))?.pop();
        let own = |qpns| {
            if shard.is_some() {
                Own::Loop(qpns, None)
            } else {
                Own::Process(qpns)
            }
        };
        let own = config.qpn_slot.map(|slot| own(slot.qpns()));
        let parts = Parts::new(config, path, tap.map(SharedTap::boxed), None)?;
        Ok(Self::new(config, parts, own, shard))
    }

    /// Those of several loops, which have the address for themselves.
    pub(crate) fn shards(
        config: &DeviceConfig,
        paths: Vec<UdpDatapath>,
        steering: Steering,
        placement: &Arc<dyn Placement>,
        tap: Option<&SharedTap>,
    ) -> Result<Vec<Opened>, VerbsError> {
        let shards = Shard::all(steering, placement.clone())?;
        let parts = shards.into_iter().zip(paths).enumerate().map(|(index, (shard, path))| {
            let config = DeviceConfig {
                qpn_slot: steering.slot(index),
                ..config.clone()
            };
            (config, path, Own::Shard(steering, index), shard)
        });
        Self::several(parts, tap)
    }

    /// Those of loops that are members of the broker's, which has given each its sockets.
    pub(crate) fn joined(
        config: &DeviceConfig,
        joining: &[Joining],
        sockets: Vec<OpenSockets>,
        placement: &Arc<dyn Placement>,
        tap: Option<&SharedTap>,
    ) -> Result<Vec<Opened>, VerbsError> {
        let places: Vec<_> = joining.iter().map(Joining::place).collect();
        let shards = Shard::of_places(&places, placement.clone())?;
        let mut parts = Vec::new();
        for ((joining, shard), sockets) in joining.iter().zip(shards).zip(sockets) {
            let config = joining.config(config, sockets);
            let path = open::datapath(&config)?.map_err(open::error)?;
            // The loop may get another address at any time.
            let addr = Some(config.addr.to_canonical()).filter(|addr| !addr.is_unspecified());
            let own = Own::Loop(joining.place().0.qpns(), addr);
            parts.push((config, path, own, shard));
        }
        Self::several(parts.into_iter(), tap)
    }

    /// Those of several loops, which have a table of memory in common. Each has its configuration.
    fn several(
        loops: impl Iterator<Item = (DeviceConfig, UdpDatapath, Own, Shard)>,
        tap: Option<&SharedTap>,
    ) -> Result<Vec<Opened>, VerbsError> {
        let [a, b, c, d, e, f, g, h, ..] = open::random()?;
        let guid = roce_cm::guid::keeping(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
        let (mut parts, mut places) = (Vec::new(), Vec::new());
        for (config, path, own, shard) in loops {
            let guid = config.guid.or(Some(guid));
            parts.push((DeviceConfig { guid, ..config }, path));
            places.push((own, shard));
        }
        let parts = Parts::sharing_memory(parts.into_iter(), tap)?;
        let members = parts.into_iter().zip(places);
        let members = members.map(|((config, parts), (own, shard))| Self::new(&config, parts, Some(own), Some(shard)));
        Ok(members.collect())
    }

    /// It is one of the addresses of a loop that other processes may have too.
    pub(crate) fn enter(&mut self, endpoints: &Arc<Endpoints>) {
        if let Some(shard) = &mut self.shard {
            shard.add_address(self.addr, endpoints);
        }
    }

    /// Receives about `budget` packets. True: more is waiting.
    pub(crate) fn receive(&mut self, now: Instant, budget: usize) -> bool {
        let driver = &mut self.driver;
        match &self.shard {
            None => driver.receive(now, budget, &|_: &RxMeta, _: &[u8]| ()),
            Some(shard) => shard.receive(driver, now, budget),
        }
    }

    /// What to watch.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let shard = self.shard.as_ref().map(Shard::descriptor);
        self.driver.descriptors().into_iter().chain(shard)
    }
}

/// Where there is one loop, it gets everything.
struct OnlyOne;

impl Placement for OnlyOne {
    fn place(&self, _: &Arrival<'_>) -> usize {
        0
    }
}

/// The addresses that a device has now.
fn addresses(addr: IpAddr) -> Vec<IpAddr> {
    match addr.is_unspecified() {
        true => Vec::new(),
        false => vec![addr],
    }
}
