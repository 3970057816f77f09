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
use roce_net::LocalDriver;
use roce_port::{
    Forwarded, GsiRouter, HandedOver, Numbers, Placement, PortChange, QpnSlot, Recipient, Recipients, RxMeta, Steering,
    ToShard, dest_qpn,
};
use roce_verbs::{Instant, provider::VerbsError};

use crate::{
    device::{Services, io_error},
    open::serves,
};

/// Queue of a loop's messages.
pub(crate) type Inbox = roce_net::Inbox<ToShard>;

/// One address of a loop, and the inboxes of the loops that share it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(crate) addr: IpAddr,
    inboxes: Arc<[Inbox]>,
    /// The loop's own place among the inboxes.
    index: usize,
}

impl Endpoint {
    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inboxes[self.index]
    }
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
    inboxes: Arc<[Inbox]>,
    /// Present in the first of several loops.
    router: Option<RefCell<GsiRouter>>,
    /// Other processes at the address.
    processes: Option<Arc<dyn Services>>,
}

/// Creates an inbox for each loop.
fn inboxes(loops: usize) -> Result<Arc<[Inbox]>, VerbsError> {
    let inboxes = (0..loops).map(|_| Inbox::new().map_err(io_error("making an event descriptor")));
    Ok(inboxes.collect::<Result<Vec<_>, _>>()?.into())
}

impl Shard {
    /// Creates the shards of loops that have an address for themselves.
    pub(crate) fn all(steering: Steering, placement: Arc<dyn Placement>) -> Result<Vec<Self>, VerbsError> {
        let processes = (0..steering.shards()).map(|_| None).collect();
        Self::several(&Numbers::All(steering), processes, placement)
    }

    /// Creates the shards of the loops that have these places. `placement` is asked if there are several loops.
    pub(crate) fn of_places(
        places: &[(QpnSlot, Arc<dyn Services>)],
        placement: Arc<dyn Placement>,
    ) -> Result<Vec<Self>, VerbsError> {
        let numbers = Numbers::Places(places.iter().map(|(slot, _)| *slot).collect());
        let processes = places.iter().map(|(_, services)| Some(services.clone())).collect();
        Self::several(&numbers, processes, placement)
    }

    fn several(
        numbers: &Numbers,
        processes: Vec<Option<Arc<dyn Services>>>,
        placement: Arc<dyn Placement>,
    ) -> Result<Vec<Self>, VerbsError> {
        let loops = numbers.shards();
        let inboxes = inboxes(loops)?;
        let mut router = (loops > 1).then(|| RefCell::new(GsiRouter::new(numbers.clone(), placement)));
        let shards = processes.into_iter().enumerate().map(|(index, processes)| Self {
            endpoints: Arc::default(),
            addr: None,
            recipients: Recipients::new(numbers.clone(), index, None),
            index,
            inboxes: inboxes.clone(),
            router: router.take(),
            processes,
        });
        Ok(shards.collect())
    }

    /// Returns the shard with packets to other addresses than `addr` filtered out.
    pub(crate) fn filtering(self, addr: Option<IpAddr>) -> Self {
        Self {
            recipients: Recipients::new(self.recipients.numbers().clone(), self.index, addr),
            ..self
        }
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
        endpoints.add(Endpoint {
            addr,
            inboxes: self.inboxes.clone(),
            index: self.index,
        });
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
        let more = driver.receive(now, budget, &|to, meta, bytes| self.forward(now, to, meta, bytes, true));
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
        more
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
            Some(endpoint) => endpoint.inbox(),
            None if target == self.index => return Forwarded::Back,
            None => &self.inboxes[target],
        };
        let packet = HandedOver {
            captured,
            ..HandedOver::captured(meta, bytes)
        };
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

#[cfg(test)]
mod tests {
    use roce_port::Arrival;

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
        let places = [3, 9].map(|slot| (QpnSlot { bits: 7, slot }, Arc::new(Others) as Arc<dyn Services>));
        let shards = Shard::of_places(&places, Arc::new(Second)).unwrap();
        assert!(shards.iter().map(|s| s.registry().is_some()).eq([true, false]));
    }
}
