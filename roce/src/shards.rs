//! A loop that shares its address, with other loops, other processes, or both: each has a part of it, and what reaches one for another
//! is handed over. Loops that have several addresses have a part of each.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use parking_lot::RwLock;
use roce_bth::{Packet, Qpn};
use roce_cm::{
    cma::{HEADER_LEN, ServiceId},
    mad::{Mad, Message, Req},
};
use roce_net::LocalDriver;
use roce_port::{ConnChange, QpnSlot, RxMeta, Steering};
use roce_verbs::{Instant, provider::VerbsError};

use crate::{
    device::{Services, io_error},
    open::serves,
};

/// Connect requests of which is remembered where they went, and for how long: RDMA_CM repeats them for a minute.
const MAX_REMEMBERED: usize = 4096;
const REMEMBERED: Duration = Duration::from_secs(90);

/// A connect request, of which nothing is verified: anybody may send one, with any source address.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// Our address.
    pub local: IpAddr,
    /// Whose it says it is.
    pub remote: IpAddr,
    /// What is wanted.
    pub service: ServiceId,
    /// What the peer's program says: 56 bytes, zero-padded.
    pub private_data: &'a [u8],
}

/// Says which loop is to have a connection.
pub trait Placement: Send + Sync {
    /// The number of the shard that a connect request is for; one that does not exist stands for the first. It is asked in the
    /// first loop's thread, once for a request however often that is repeated, and must not wait.
    fn place(&self, arrival: &Arrival<'_>) -> usize;
}

/// A packet.
pub(crate) struct Letter {
    meta: RxMeta,
    bytes: Vec<u8>,
    /// It came by a socket of one of the loops, so that their capture has it.
    captured: bool,
}

impl Letter {
    /// A packet that another process has received.
    pub(crate) fn forwarded(meta: &RxMeta, bytes: &[u8]) -> Self {
        Self {
            meta: *meta,
            bytes: bytes.to_vec(),
            captured: false,
        }
    }
}

/// What others have for a loop's part of an address.
pub(crate) type Inbox = roce_net::Inbox<Letter>;

/// Who sent a connect request, as its repetitions say it again: address and communication ID.
type Sender = (IpAddr, u32);

/// Where a request went.
struct Placed {
    /// The sender's channel adapter.
    guid: u64,
    shard: usize,
}

/// Which numbers the loops of an address have.
#[derive(Clone)]
pub(crate) enum Numbers {
    /// Together all. What is nobody's is the first loop's.
    All(Steering),
    /// Those of these places; others are other processes'.
    Places(Arc<[QpnSlot]>),
}

impl Numbers {
    fn loops(&self) -> usize {
        match self {
            Self::All(steering) => steering.shards(),
            Self::Places(places) => places.len(),
        }
    }

    /// Which loop has a queue pair number.
    pub(crate) fn of_qpn(&self, qpn: Qpn) -> Option<usize> {
        let has = |slot: &QpnSlot| (slot.qpns().first..=slot.qpns().last).contains(&qpn.value());
        match self {
            Self::All(steering) => Some(steering.of_qpn(qpn)),
            Self::Places(places) => places.iter().position(has),
        }
    }

    /// Which loop a management datagram with one of our communication IDs is for. What is nobody's is the first loop's, which counts it.
    fn of_comm_id(&self, id: u32) -> usize {
        let has = |slot: &QpnSlot| {
            let (first, last) = slot.comm_ids();
            (first..=last).contains(&id)
        };
        match self {
            Self::All(steering) => steering.of_comm_id(id),
            Self::Places(places) => places.iter().position(has).unwrap_or(0),
        }
    }
}

/// Which loop a management datagram is for.
struct Router {
    numbers: Numbers,
    placement: Arc<dyn Placement>,
    remembered: HashMap<Sender, Placed>,
    order: VecDeque<(Instant, Sender)>,
}

impl Router {
    fn new(numbers: Numbers, placement: Arc<dyn Placement>) -> Self {
        Self {
            numbers,
            placement,
            remembered: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// What can't be read is the first loop's, which counts it.
    fn route(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) -> usize {
        let Ok(packet) = Packet::parse(bytes) else { return 0 };
        let Ok(mad) = Mad::parse(packet.payload) else { return 0 };
        let by_id = |id: u32| self.numbers.of_comm_id(id);
        match &mad.message {
            Message::Req(m) => self.place(now, meta, m),
            // It may have given up a request before it was answered.
            Message::Rej(m) if m.remote_comm_id == 0 => {
                let sender = (meta.remote.ip().to_canonical(), m.local_comm_id);
                self.remembered.get(&sender).map_or(0, |placed| placed.shard)
            }
            Message::Rej(m) => by_id(m.remote_comm_id),
            Message::Mra(m) => by_id(m.remote_comm_id),
            Message::Rep(m) => by_id(m.remote_comm_id),
            Message::Rtu(m) => by_id(m.remote_comm_id),
            Message::Dreq(m) => by_id(m.remote_comm_id),
            Message::Drep(m) => by_id(m.remote_comm_id),
            Message::SidrRep(m) => by_id(m.request_id),
            Message::SidrReq(_) => 0,
        }
    }

    fn place(&mut self, now: Instant, meta: &RxMeta, req: &Req) -> usize {
        self.forget(now);
        let remote = meta.remote.ip().to_canonical();
        let (sender, guid) = ((remote, req.local_comm_id), req.local_ca_guid);
        if let Some(placed) = self.remembered.get(&sender).filter(|placed| placed.guid == guid) {
            return placed.shard;
        }
        let arrival = Arrival {
            local: meta.local.to_canonical(),
            remote,
            service: ServiceId(req.service_id),
            private_data: &req.private_data[HEADER_LEN..],
        };
        let shard = self.placement.place(&arrival);
        let shard = if shard < self.numbers.loops() { shard } else { 0 };
        if self.remembered.insert(sender, Placed { guid, shard }).is_none() {
            self.order.push_back((now, sender));
        }
        shard
    }

    /// Makes room for one more.
    fn forget(&mut self, now: Instant) {
        while let Some((since, sender)) = self.order.front() {
            if self.order.len() < MAX_REMEMBERED && now.saturating_since(*since) < REMEMBERED {
                return;
            }
            self.remembered.remove(sender);
            self.order.pop_front();
        }
    }
}

/// Whose a packet is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// A loop's of this process.
    Loop(usize),
    /// Another process's.
    Elsewhere,
}

/// Where packets to one address go.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) addr: IpAddr,
    /// Of all loops.
    inboxes: Arc<[Inbox]>,
    /// Of these the loop's.
    index: usize,
}

impl Door {
    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inboxes[self.index]
    }
}

/// A loop's addresses. Others may come while it runs.
#[derive(Default)]
pub(crate) struct Doors(RwLock<Vec<Door>>);

impl Doors {
    fn add(&self, door: Door) {
        self.0.write().push(door);
    }

    fn first(&self) -> Option<Door> {
        self.0.read().first().cloned()
    }

    /// That of an address itself.
    fn at(&self, addr: IpAddr) -> Option<Door> {
        self.0.read().iter().find(|door| door.addr == addr).cloned()
    }

    /// The one that a packet to an address is for.
    pub(crate) fn of(&self, local: IpAddr) -> Option<Door> {
        let has = |door: &&Door| door.addr.is_unspecified() && serves(door.addr, local);
        self.at(local).or_else(|| self.0.read().iter().find(has).cloned())
    }

    /// Has the loop take a turn. False: it has no address.
    pub(crate) fn ring(&self) -> bool {
        let first = self.first();
        first.iter().for_each(|door| door.inbox().ring());
        first.is_some()
    }
}

/// A loop's part in an address that it shares with others.
pub(crate) struct Shard {
    /// The loop's addresses, this one and others, if other processes may have them too.
    doors: Arc<Doors>,
    /// This one, likewise.
    addr: Option<IpAddr>,
    numbers: Numbers,
    index: usize,
    /// Of all loops of this process.
    inboxes: Arc<[Inbox]>,
    /// Of the first loop, if there are others.
    router: Option<RefCell<Router>>,
    /// Other processes at the address.
    processes: Option<Arc<dyn Services>>,
}

/// Inboxes for so many loops.
fn inboxes(loops: usize) -> Result<Arc<[Inbox]>, VerbsError> {
    let inboxes = (0..loops).map(|_| Inbox::new().map_err(io_error("making an event descriptor")));
    Ok(inboxes.collect::<Result<Vec<_>, _>>()?.into())
}

impl Shard {
    /// One for each of several loops, which have the address for themselves.
    pub(crate) fn all(steering: Steering, placement: Arc<dyn Placement>) -> Result<Vec<Self>, VerbsError> {
        let nobody = (0..steering.shards()).map(|_| None).collect();
        Self::several(&Numbers::All(steering), nobody, placement)
    }

    /// One for each of the loops that have these places; `placement` is asked if there are several.
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
        let loops = numbers.loops();
        let inboxes = inboxes(loops)?;
        let mut router = (loops > 1).then(|| RefCell::new(Router::new(numbers.clone(), placement)));
        let shards = processes.into_iter().enumerate().map(|(index, processes)| Self {
            doors: Arc::default(),
            addr: None,
            numbers: numbers.clone(),
            index,
            inboxes: inboxes.clone(),
            router: router.take(),
            processes,
        });
        Ok(shards.collect())
    }

    /// Readable when there is something for this loop.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.inboxes[self.index].as_fd()
    }

    /// It is at this address, where what others have for the loop comes, and what comes here for one of the loop's others goes through
    /// the door of that. Other processes may have opened all addresses before: then one socket brings what is for each.
    pub(crate) fn beside(&mut self, addr: IpAddr, doors: &Arc<Doors>) {
        doors.add(Door {
            addr,
            inboxes: self.inboxes.clone(),
            index: self.index,
        });
        (self.addr, self.doors) = (Some(addr), doors.clone());
    }

    /// The loop's other address that a packet is for.
    fn other_door(&self, local: IpAddr) -> Option<Door> {
        let local = local.to_canonical();
        self.addr.filter(|addr| *addr != local)?;
        self.doors.at(local)
    }

    /// The other processes, to be told of the services that connections are taken for: the first loop gets the requests of all.
    pub(crate) fn registry(&self) -> Option<&dyn Services> {
        self.processes.as_deref().filter(|_| self.index == 0)
    }

    /// A connection of this loop has been established, or is over.
    pub(crate) fn conn_change(&self, change: ConnChange) {
        if let Some(processes) = &self.processes {
            processes.conn_change(change);
        }
    }

    /// Receives about `budget` packets, and what others have for this loop. True: more is waiting.
    pub(crate) fn receive(&self, driver: &mut LocalDriver, now: Instant, budget: usize) -> bool {
        // What the sockets bring is not this loop's alone, and the port is in use meanwhile.
        let (mine, lost) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let (handed_over, strays) = (Cell::new(0), RefCell::new(Vec::new()));
        let pass_on = |meta: &RxMeta, bytes: &[u8]| {
            let (whose, management) = self.whose(now, meta, bytes);
            let letter = || Letter {
                meta: *meta,
                bytes: bytes.to_vec(),
                captured: true,
            };
            match whose {
                Whose::Loop(target) if target == self.index => match self.other_door(meta.local) {
                    None => mine.borrow_mut().push(letter()),
                    Some(door) if door.inbox().send(letter()) => handed_over.set(handed_over.get() + 1),
                    Some(_) => lost.borrow_mut().push(bytes.len()),
                },
                Whose::Loop(target) if !self.inboxes[target].send(letter()) => lost.borrow_mut().push(bytes.len()),
                Whose::Loop(_) if management => {}
                Whose::Loop(_) => handed_over.set(handed_over.get() + 1),
                Whose::Elsewhere => {
                    strays.borrow_mut().push(bytes.len());
                    if let Some(processes) = &self.processes {
                        processes.hand_over(meta, bytes);
                    }
                }
            }
        };
        let more = driver.receive(now, budget, &pass_on);
        let inbox = &self.inboxes[self.index];
        let letters = inbox.take();
        for letter in mine.into_inner().into_iter().chain(letters) {
            self.take(driver, now, letter);
        }
        let port = driver.port();
        port.count_handed_over(handed_over.get());
        strays.into_inner().into_iter().for_each(|len| port.count_stray(len));
        lost.into_inner().into_iter().for_each(|len| port.count_lost(len));
        // Of those only the number is known.
        (0..inbox.take_lost()).for_each(|_| port.count_lost(0));
        more
    }

    /// Whose a packet is that a socket brought, and whether it is a management datagram that the first loop passes on.
    fn whose(&self, now: Instant, meta: &RxMeta, bytes: &[u8]) -> (Whose, bool) {
        let qpn = qpn_of(bytes);
        match (&self.router, &self.processes) {
            _ if qpn != Qpn::GSI => (self.numbers.of_qpn(qpn).map_or(Whose::Elsewhere, Whose::Loop), false),
            // QP1 is the broker's, who looks at a datagram before anybody is given it.
            (_, Some(_)) => (Whose::Elsewhere, false),
            (Some(router), None) => (Whose::Loop(router.borrow_mut().route(now, meta, bytes)), true),
            (None, None) => (Whose::Loop(0), false),
        }
    }

    /// Takes what another loop has handed over, or another process. That a management datagram came by another's socket, merged
    /// behind something else, is possible: the first loop says whose it is.
    fn take(&self, driver: &mut LocalDriver, now: Instant, letter: Letter) {
        let Letter { meta, bytes, captured } = &letter;
        let target = match &self.router {
            Some(router) if qpn_of(bytes) == Qpn::GSI => router.borrow_mut().route(now, meta, bytes),
            _ => self.index,
        };
        let door = self.other_door(meta.local);
        let other = match &door {
            Some(door) => Some(door.inbox()),
            None => (target != self.index).then(|| &self.inboxes[target]),
        };
        if let Some(inbox) = other {
            let len = bytes.len();
            if !inbox.send(letter) {
                driver.port().count_lost(len);
            }
        } else if *captured {
            driver.handed_over(now, bytes, meta);
        } else {
            driver.inject(now, bytes, meta);
        }
    }
}

/// The destination of a packet; QP0, which nobody has, of what is too short to be one.
pub(crate) fn qpn_of(packet: &[u8]) -> Qpn {
    match packet.first_chunk() {
        Some([_, _, _, _, _, a, b, c]) => Qpn::new(u32::from_be_bytes([0, *a, *b, *c])),
        None => Qpn::SMI,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    /// Everything is the second loop's.
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

    fn to(qpn: u32) -> [u8; 12] {
        let [_, a, b, c] = qpn.to_be_bytes();
        [0x64, 0, 0xff, 0xff, 0, a, b, c, 0, 0, 0, 0]
    }

    fn meta() -> RxMeta {
        let addr = IpAddr::from([192, 0, 2, 1]);
        RxMeta::new(addr, SocketAddr::new(addr, 4791))
    }

    fn whose(shard: &Shard, qpn: Qpn) -> Whose {
        shard.whose(roce_net::now(), &meta(), &to(qpn.value())).0
    }

    #[test]
    fn a_packet_goes_to_the_loop_that_has_its_number_or_to_other_processes() {
        let places = [3, 9].map(|slot| (QpnSlot { bits: 7, slot }, Arc::new(Others) as Arc<dyn Services>));
        let shards = Shard::of_places(&places, Arc::new(Second)).unwrap();
        for shard in &shards {
            for (n, (slot, _)) in places.iter().enumerate() {
                for qpn in [slot.qpns().first, slot.qpns().last] {
                    assert!(whose(shard, Qpn::new(qpn)) == Whose::Loop(n), "{qpn:#x}");
                }
            }
            let elsewhere = [Qpn::new(places[0].0.qpns().last + 1), Qpn::SMI, Qpn::GSI];
            assert!(elsewhere.map(|qpn| whose(shard, qpn)) == [Whose::Elsewhere; 3]);
        }
        let steering = Steering::new(2).unwrap();
        let shards = Shard::all(steering, Arc::new(Second)).unwrap();
        assert!(shards.iter().all(|shard| whose(shard, Qpn::GSI) == Whose::Loop(0)));
    }

    #[test]
    fn communication_ids_name_the_loop() {
        let places: Vec<_> = [3, 9].map(|slot| QpnSlot { bits: 7, slot }).into();
        let numbers = Numbers::Places(places.clone().into());
        for (n, slot) in places.iter().enumerate() {
            let (first, last) = slot.comm_ids();
            assert_eq!([first, last].map(|id| numbers.of_comm_id(id)), [n; 2]);
        }
        assert_eq!(numbers.of_comm_id(0), 0, "it counts what nobody has");
    }

    #[test]
    fn only_the_first_loop_tells_others_of_services() {
        let places = [3, 9].map(|slot| (QpnSlot { bits: 7, slot }, Arc::new(Others) as Arc<dyn Services>));
        let shards = Shard::of_places(&places, Arc::new(Second)).unwrap();
        assert!(shards.iter().map(|s| s.registry().is_some()).eq([true, false]));
    }
}
