//! Device of a loop: the loop's shard of one address.

use std::{net::IpAddr, os::fd::BorrowedFd, sync::Arc};

use roce_mem::MemoryTable;
use roce_net::{LocalConfig, LocalDriver, OpenSockets, UdpDatapath};
use roce_port::{Arrival, Forwarded, Numbers, Placement, Recipients, Steering};
use roce_verbs::{DeviceLimits, Instant, Mtu, provider::VerbsError};

use crate::{
    device::DeviceConfig,
    joined::Joining,
    open::{self, Parts},
    shards::{Endpoints, Shard},
    tap::SharedTap,
};

/// Driver, memory and shard of one address of a loop.
pub(crate) struct Member {
    pub(crate) driver: LocalDriver,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) addr: IpAddr,
    pub(crate) mtu: Mtu,
    /// Shard of an address used by several loops or processes.
    pub(crate) shard: Option<Shard>,
}

/// Member with its limits and addresses.
pub(crate) type Opened = (Member, (DeviceLimits, Vec<IpAddr>));

impl Member {
    fn new(config: &DeviceConfig, parts: Parts, recipients: Option<Recipients>, shard: Option<Shard>) -> Opened {
        let local = LocalConfig {
            tap: parts.tap,
            faults: parts.faults,
            recipients,
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

    /// Creates the member of a single loop. Other processes share the address only if the configuration says so.
    pub(crate) fn single(
        config: &DeviceConfig,
        path: UdpDatapath,
        tap: Option<SharedTap>,
    ) -> Result<Opened, VerbsError> {
        let places: Vec<_> = config.qpn_slot.zip(config.services.clone()).into_iter().collect();
        let shard = Shard::of_places(&places, Arc::new(SingleLoop))?.pop();
        let numbers = config.qpn_slot.map(|slot| Numbers::Places([slot].into()));
        let recipients = numbers.map(|numbers| Recipients::new(numbers, 0, None));
        let parts = Parts::new(config, path, tap.map(SharedTap::boxed), None)?;
        Ok(Self::new(config, parts, recipients, shard))
    }

    /// Creates the members of several loops that share the address with no other process.
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
            (config, path, shard)
        });
        Self::sharing_memory(parts, tap)
    }

    /// Creates the members of loops that have joined the broker, with the sockets that it handed out.
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
            // Another address may be opened for the loop later: the shard's packets are filtered by address.
            let addr = Some(config.addr.to_canonical()).filter(|addr| !addr.is_unspecified());
            parts.push((config, path, shard.filtering(addr)));
        }
        Self::sharing_memory(parts.into_iter(), tap)
    }

    /// Creates the members of several loops with one memory table.
    fn sharing_memory(
        loops: impl Iterator<Item = (DeviceConfig, UdpDatapath, Shard)>,
        tap: Option<&SharedTap>,
    ) -> Result<Vec<Opened>, VerbsError> {
        let [a, b, c, d, e, f, g, h, ..] = open::random()?;
        let guid = roce_cm::guid::keeping(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
        let (mut parts, mut shards) = (Vec::new(), Vec::new());
        for (config, path, shard) in loops {
            let guid = config.guid.or(Some(guid));
            parts.push((DeviceConfig { guid, ..config }, path));
            shards.push(shard);
        }
        let parts = Parts::sharing_memory(parts.into_iter(), tap)?;
        let members = parts.into_iter().zip(shards);
        let members = members.map(|((config, parts), shard)| {
            let recipients = shard.recipients().clone();
            Self::new(&config, parts, Some(recipients), Some(shard))
        });
        Ok(members.collect())
    }

    /// Registers the address for packets that the broker forwards.
    pub(crate) fn register(&mut self, endpoints: &Arc<Endpoints>) {
        if let Some(shard) = &mut self.shard {
            shard.add_address(self.addr, endpoints);
        }
    }

    /// Receives about `budget` packets. Returns whether more are waiting.
    pub(crate) fn receive(&mut self, now: Instant, budget: usize) -> bool {
        let driver = &mut self.driver;
        match &self.shard {
            // Packets for other processes, with which nobody connects us.
            None => driver.receive(now, budget, &|_, _, _| Forwarded::Process),
            Some(shard) => shard.receive(driver, now, budget),
        }
    }

    /// Returns the descriptors to poll.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let shard = self.shard.as_ref().map(Shard::descriptor);
        self.driver.descriptors().into_iter().chain(shard)
    }
}

/// Placement with a single loop.
struct SingleLoop;

impl Placement for SingleLoop {
    fn place(&self, _: &Arrival<'_>) -> usize {
        0
    }
}

/// Returns a device's addresses: none if it is open at the unspecified address.
fn addresses(addr: IpAddr) -> Vec<IpAddr> {
    match addr.is_unspecified() {
        true => Vec::new(),
        false => vec![addr],
    }
}
