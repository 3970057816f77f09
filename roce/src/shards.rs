//! Loops that share addresses with other loops, other processes, or both. Each loop owns a shard of every address: a range of
//! queue pair numbers and communication IDs. A packet that reaches one loop's socket for another shard is handed over.

use std::{
    cell::RefCell,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use parking_lot::RwLock;
use roce_bth::Qpn;
use roce_net::{LocalConfig, LocalDriver};
use roce_port::{
    Forwarded, GsiRouter, HandedOver, Placement, PortChange, Recipient, Recipients, RxMeta, ToShard, dest_qpn,
};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{DeviceLimits, Instant, Mtu, provider::VerbsError};

use crate::{
    config::{DeviceConfig, Services},
    error::io_error,
    open::{self, Bound, Memory, Parts, serves},
    tap::SharedTap,
};

/// Queue of a loop's messages.
pub(crate) type Inbox = roce_net::Inbox<ToShard>;

/// Creates the inboxes of so many loops or engines.
pub(crate) fn inboxes(count: usize) -> Result<Arc<[Arc<Inbox>]>, VerbsError> {
    let inboxes = (0..count).map(|_| Inbox::new().map(Arc::new));
    inboxes
        .collect::<Result<_, _>>()
        .map_err(io_error("creating an event descriptor"))
}

/// One address of a loop, and its inbox there.
#[derive(Clone)]
pub(crate) struct Endpoint {
    addr: IpAddr,
    pub(crate) inbox: Arc<Inbox>,
}

/// Addresses of a loop; more may be added while it runs.
#[derive(Default)]
pub(crate) struct Endpoints(RwLock<Vec<Endpoint>>);

impl Endpoints {
    fn add(&self, endpoint: Endpoint) {
        self.0.write().push(endpoint);
    }

    /// Returns the endpoint at exactly this address.
    fn at(&self, addr: IpAddr) -> Option<Endpoint> {
        self.0.read().iter().find(|endpoint| endpoint.addr == addr).cloned()
    }

    /// Returns the endpoint that takes packets to an address: its own, or that of all addresses.
    pub(crate) fn of(&self, local: IpAddr) -> Option<Endpoint> {
        let has = |endpoint: &&Endpoint| endpoint.addr.is_unspecified() && serves(endpoint.addr, local);
        self.at(local).or_else(|| self.0.read().iter().find(has).cloned())
    }
}

/// A loop's share of an address that others have, too.
pub(crate) struct Shard {
    /// All addresses of the loop, if it shares them with other processes.
    endpoints: Arc<Endpoints>,
    /// The shard's address, if the loop shares it with other processes.
    addr: Option<IpAddr>,
    recipients: Recipients,
    index: usize,
    /// Inboxes of all loops of this process.
    inboxes: Arc<[Arc<Inbox>]>,
    /// Present in the first of several loops.
    router: Option<RefCell<GsiRouter>>,
    /// Other processes at the address.
    processes: Option<Arc<dyn Services>>,
}

impl Shard {
    /// Creates the shards of the loops that have these configurations at one address; `None` for a loop that has it alone. Several loops
    /// have `placement`.
    pub(crate) fn all(
        loops: &[&DeviceConfig],
        placement: Option<&Arc<dyn Placement>>,
    ) -> Result<Vec<Option<Self>>, VerbsError> {
        let Some(numbers) = open::numbers(loops) else {
            return Ok(loops.iter().map(|_| None).collect());
        };
        let inboxes = inboxes(loops.len())?;
        let several = placement.filter(|_| loops.len() > 1);
        let mut router = several.map(|placement| RefCell::new(GsiRouter::new(numbers.clone(), placement.clone())));
        let shards = loops.iter().enumerate().map(|(index, config)| {
            // Another address may be opened for a loop of several processes later: packets are filtered by address.
            let filter = config.services.is_some() && !config.addr.is_unspecified();
            let addr = filter.then(|| config.addr.to_canonical());
            Some(Self {
                endpoints: Arc::default(),
                addr: None,
                recipients: Recipients::new(numbers.clone(), index, addr),
                index,
                inboxes: inboxes.clone(),
                router: router.take(),
                processes: config.services.clone(),
            })
        });
        Ok(shards.collect())
    }

    /// Returns the recipients of the packets that the shard's socket receives.
    pub(crate) fn recipients(&self) -> &Recipients {
        &self.recipients
    }

    /// Returns a descriptor that is readable when packets have been handed over to this loop.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.inboxes[self.index].as_fd()
    }

    /// Adds the shard's address to the loop's endpoints. Packets that come here for another of them are handed over to that:
    /// where other processes have opened all addresses, one socket receives what is for each.
    pub(crate) fn add_address(&mut self, addr: IpAddr, endpoints: &Arc<Endpoints>) {
        let inbox = self.inboxes[self.index].clone();
        endpoints.add(Endpoint { addr, inbox });
        (self.addr, self.endpoints) = (Some(addr), endpoints.clone());
    }

    /// Returns the loop's other endpoint that a packet is for.
    fn other_endpoint(&self, local: IpAddr) -> Option<Endpoint> {
        let local = local.to_canonical();
        self.addr.filter(|addr| *addr != local)?;
        self.endpoints.at(local)
    }

    /// Returns the registry of services that is shared with other processes. Only the first loop has it: it gets all requests.
    pub(crate) fn registry(&self) -> Option<&dyn Services> {
        self.processes.as_deref().filter(|_| self.index == 0)
    }

    /// Reports a change that other processes at the address have to know.
    pub(crate) fn port_change(&self, change: PortChange) {
        if let Some(processes) = &self.processes {
            processes.port_change(change);
        }
    }

    /// Receives about `budget` packets, and those that others hand over to this loop. Returns true if more are waiting.
    pub(crate) fn receive(&self, driver: &mut LocalDriver, now: Instant, budget: usize) -> bool {
        let forward = |to, meta: &RxMeta, bytes: &[u8]| self.forward(now, to, meta, bytes, true);
        let received = driver.receive(now, budget, &forward);
        let inbox = &self.inboxes[self.index];
        for message in inbox.take() {
            match message {
                ToShard::Packet(packet) => self.take(driver, now, &packet),
                // Each loop has a connection manager for its queue pairs.
                ToShard::Command(_) | ToShard::Report(_) => {}
            }
        }
        // Only the number of these is known.
        (0..inbox.take_lost()).for_each(|_| driver.port().count_forwarded(Forwarded::Lost, 0));
        received.more
    }

    /// Forwards a packet from this loop's socket or inbox.
    fn forward(&self, now: Instant, to: Recipient, meta: &RxMeta, bytes: &[u8], captured: bool) -> Forwarded {
        let target = match (to, &self.router) {
            (Recipient::Shard(index), _) => index,
            (Recipient::This, _) | (Recipient::Gsi, None) => self.index,
            (Recipient::Gsi, Some(router)) => match router.borrow_mut().route(now, meta, bytes) {
                Some(index) => index,
                None => return Forwarded::Refused,
            },
            (Recipient::Process, _) => {
                if let Some(processes) = &self.processes {
                    processes.hand_over(meta, bytes);
                }
                return Forwarded::Process;
            }
        };
        let endpoint = self.other_endpoint(meta.local).filter(|_| target == self.index);
        let inbox = match &endpoint {
            Some(endpoint) => &endpoint.inbox,
            None if target == self.index => return Forwarded::Back,
            None => &self.inboxes[target],
        };
        let packet = HandedOver::new(meta, bytes, captured);
        match (inbox.send(ToShard::Packet(packet)), to) {
            (false, _) => Forwarded::Lost,
            (true, Recipient::Gsi) => Forwarded::Placed,
            (true, _) => Forwarded::Shard,
        }
    }

    /// Processes a packet that another loop or process has handed over. It may be a management datagram that the kernel merged
    /// behind a packet for another loop's socket: the first loop routes that.
    fn take(&self, driver: &mut LocalDriver, now: Instant, packet: &HandedOver) {
        let is_routed = self.router.is_some() && dest_qpn(&packet.bytes) == Some(Qpn::GSI);
        let to = if is_routed { Recipient::Gsi } else { Recipient::This };
        match self.forward(now, to, &packet.meta, &packet.bytes, packet.captured) {
            Forwarded::Back => driver.handed_over(now, packet),
            // The loop whose socket received it has counted it.
            Forwarded::Shard => {}
            forwarded => driver.port().count_forwarded(forwarded, packet.bytes.len()),
        }
    }
}

/// Driver, memory and shard of one address of a loop.
pub(crate) struct Member {
    pub(crate) driver: LocalDriver,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) addr: IpAddr,
    pub(crate) mtu: Mtu,
    limits: DeviceLimits,
    /// Shard of an address used by several loops or processes.
    pub(crate) shard: Option<Shard>,
}

impl Member {
    /// Creates the members of the loops that have an address. Several loops have `placement`.
    pub(crate) fn all(
        bound: Bound,
        placement: Option<&Arc<dyn Placement>>,
        tap: Option<&SharedTap>,
    ) -> Result<Vec<Self>, VerbsError> {
        let all = Parts::all(bound, tap, Memory::Separate)?;
        let shards = Shard::all(&all.iter().map(|parts| &parts.config).collect::<Vec<_>>(), placement)?;
        let members = all.into_iter().zip(shards).map(|(parts, shard)| {
            let local = LocalConfig {
                recipients: shard.as_ref().map(|shard| shard.recipients().clone()),
                ..parts.local
            };
            Self {
                driver: LocalDriver::new(parts.port, parts.path, local),
                mem: parts.mem,
                addr: parts.config.addr.to_canonical(),
                mtu: parts.mtu,
                limits: parts.limits,
                shard,
            }
        });
        Ok(members.collect())
    }

    /// Returns the limits and the addresses of the device.
    pub(crate) fn device(&self) -> (DeviceLimits, Vec<IpAddr>) {
        (self.limits.clone(), open::addresses(self.addr))
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
            None => driver.receive(now, budget, &|_, _, _| Forwarded::Process).more,
            Some(shard) => shard.receive(driver, now, budget),
        }
    }

    /// Returns the descriptors to poll.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let shard = self.shard.as_ref().map(Shard::descriptor);
        self.driver.descriptors().into_iter().chain(shard)
    }
}

#[cfg(test)]
mod tests {
    use roce_port::{Arrival, QpnSlot};

    use super::*;

    /// Places everything on the second loop.
    struct Second;

    impl Placement for Second {
        fn place(&self, _: &Arrival<'_>) -> usize {
            1
        }
    }

    #[derive(Debug)]
    struct Others;

    impl Services for Others {
        fn claim(&self, _: u64, _: Option<IpAddr>) -> Result<(), VerbsError> {
            Ok(())
        }

        fn release(&self, _: u64, _: Option<IpAddr>) {}
    }

    #[test]
    fn only_the_first_loop_tells_others_of_services() {
        let loops = [3, 9].map(|slot| DeviceConfig {
            qpn_slot: Some(QpnSlot { bits: 7, slot }),
            services: Some(Arc::new(Others)),
            ..DeviceConfig::default()
        });
        let second: Arc<dyn Placement> = Arc::new(Second);
        let shards = Shard::all(&loops.each_ref(), Some(&second)).unwrap();
        assert!(
            shards
                .iter()
                .flatten()
                .map(|s| s.registry().is_some())
                .eq([true, false])
        );
    }
}
