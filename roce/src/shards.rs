//! Loops that share addresses with other loops, other processes, or both. Each loop owns a shard of every address: a range of
//! queue pair numbers and communication IDs. A packet that reaches one loop's socket for another shard is handed over.

use std::{
    cell::RefCell,
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
    requests::{RequestLimits, Requests},
};
use roce_icrc::IdSolver;
use roce_net::LocalDriver;
use roce_port::{
    Forwarded, HandedOver, Numbers, PortChange, QpnSlot, Recipient, Recipients, RxMeta, Steering, ToShard, check_gsi,
    dest_qpn,
};
use roce_verbs::{Instant, provider::VerbsError};

use crate::{
    device::{Services, io_error},
    open::serves,
};

/// Time for which the loop of a connect request is remembered: RDMA_CM repeats requests for a minute.
const REMEMBERED: Duration = Duration::from_secs(90);

/// Connect request with a sound ICRC. Nothing else of it is verified: anybody may send one, with any source address.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// Our address.
    pub local: IpAddr,
    /// Source address.
    pub remote: IpAddr,
    /// Requested service.
    pub service: ServiceId,
    /// Private data of the peer's program: 56 bytes, zero-padded.
    pub private_data: &'a [u8],
}

/// Chooses the loop of each connection.
pub trait Placement: Send + Sync {
    /// Returns the shard that a connect request is for; a number out of range means the first. Called in the first loop's
    /// thread, once for a request and its repetitions, after ICRC and per-host limit. It must not block.
    fn place(&self, arrival: &Arrival<'_>) -> usize;
}

/// Queue of a loop's messages.
pub(crate) type Inbox = roce_net::Inbox<ToShard>;

/// Loop that a connect request was placed on.
struct Placed {
    /// GUID of the sender's channel adapter.
    guid: u64,
    shard: usize,
}

/// Routes management datagrams to loops.
struct Router {
    numbers: Numbers,
    placement: Arc<dyn Placement>,
    placed: Requests<Placed>,
    solver: IdSolver,
}

impl Router {
    fn new(numbers: Numbers, placement: Arc<dyn Placement>) -> Self {
        Self {
            numbers,
            placement,
            placed: Requests::new(RequestLimits::new(REMEMBERED)),
            solver: IdSolver::default(),
        }
    }

    /// Returns the loop that a management datagram is for, or none if it is refused. What can't be read and what has a wrong
    /// ICRC is the first loop's, whose port counts it.
    fn route(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) -> Option<usize> {
        let mad = Packet::parse(bytes).ok().and_then(|packet| check_gsi(&packet).ok()?);
        let Some(mad) = mad.and_then(|mad| Mad::parse(mad).ok()) else {
            return Some(0);
        };
        let by_id = |id: u32| Some(self.numbers.of_comm_id(id));
        match &mad.message {
            Message::Req(_) if !meta.is_sound(&mut self.solver, bytes) => Some(0),
            Message::Req(m) => self.place(now, meta, m),
            // The peer may withdraw a request before we answer it.
            Message::Rej(m) if m.remote_comm_id == 0 => {
                let key = (meta.remote.ip().to_canonical(), m.local_comm_id);
                Some(self.placed.get(now, key).map_or(0, |placed| placed.shard))
            }
            Message::Rej(m) => by_id(m.remote_comm_id),
            Message::Mra(m) => by_id(m.remote_comm_id),
            Message::Rep(m) => by_id(m.remote_comm_id),
            Message::Rtu(m) => by_id(m.remote_comm_id),
            Message::Dreq(m) => by_id(m.remote_comm_id),
            Message::Drep(m) => by_id(m.remote_comm_id),
            Message::SidrRep(m) => by_id(m.request_id),
            Message::SidrReq(_) => Some(0),
        }
    }

    /// Returns the loop of a connect request: the same one for each repetition. None: its host is at its limit.
    fn place(&mut self, now: Instant, meta: &RxMeta, req: &Req) -> Option<usize> {
        let remote = meta.remote.ip().to_canonical();
        let (key, guid) = ((remote, req.local_comm_id), req.local_ca_guid);
        if let Some(placed) = self.placed.get(now, key).filter(|placed| placed.guid == guid) {
            return Some(placed.shard);
        }
        // Another adapter's request with the same key takes the place of the first.
        self.placed.remove(key);
        self.placed.admit(now, remote).ok()?;
        let arrival = Arrival {
            local: meta.local.to_canonical(),
            remote,
            service: ServiceId(req.service_id),
            private_data: &req.private_data[HEADER_LEN..],
        };
        let shard = self.placement.place(&arrival);
        let shard = if shard < self.numbers.shards() { shard } else { 0 };
        self.placed.insert(now, key, Placed { guid, shard }).ok()?;
        Some(shard)
    }
}

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

    fn first(&self) -> Option<Endpoint> {
        self.0.read().first().cloned()
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

    /// Wakes the loop up. Returns false if it has no address.
    pub(crate) fn wake(&self) -> bool {
        let first = self.first();
        first.iter().for_each(|endpoint| endpoint.inbox().ring());
        first.is_some()
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
    router: Option<RefCell<Router>>,
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
        let mut router = (loops > 1).then(|| RefCell::new(Router::new(numbers.clone(), placement)));
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
    use std::{
        net::SocketAddr,
        sync::atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use roce_bth::{Bth, Deth, Header, Opcode, Psn, QKey, ROCE_UDP_PORT};
    use roce_icrc::Flow;

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

    /// Counts the requests that it is asked to place.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Placement for Counting {
        fn place(&self, _: &Arrival<'_>) -> usize {
            self.0.fetch_add(1, Relaxed);
            1
        }
    }

    /// Flaw of a REQ.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Flaw {
        None,
        Icrc,
        QKey,
    }

    /// Routes a REQ from an address and returns its loop.
    fn request(router: &mut Router, now: Instant, remote: IpAddr, id: u32, flaw: Flaw) -> Option<usize> {
        let req = Req {
            local_comm_id: id,
            ..Req::default()
        };
        let mad = Mad::new(1, Message::from(req));
        let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(1)));
        header.deth = Some(Deth {
            qkey: if flaw == Flaw::QKey { QKey(17) } else { QKey::GSI },
            reserved: 0,
            src_qp: Qpn::GSI,
        });
        let mut bytes = vec![0; roce_bth::MAX_HEADER_LEN];
        let at = header.emit(&mut bytes);
        bytes.truncate(at);
        bytes.extend(mad.emit());
        bytes.extend([0; roce_bth::ICRC_LEN]);
        let local = match remote {
            IpAddr::V4(_) => IpAddr::from([192, 0, 2, 1]),
            IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        };
        let meta = RxMeta::new(local, SocketAddr::new(remote, 50_000));
        let flow = Flow::try_from((meta.remote, SocketAddr::new(local, ROCE_UDP_PORT))).unwrap();
        flow.seal(0, &mut bytes);
        if flaw == Flaw::Icrc {
            // The length of the packet decides which Identifications may explain a difference: two bits can't.
            let last = bytes.len() - 1;
            bytes[last] ^= 0x81;
        }
        router.route(now, &meta, &bytes)
    }

    fn router() -> (Router, Arc<Counting>) {
        let counting = Arc::<Counting>::default();
        let numbers = Numbers::All(Steering::new(2).unwrap());
        (Router::new(numbers, counting.clone()), counting)
    }

    #[test]
    fn requests_that_the_port_drops_are_neither_placed_nor_remembered() {
        let (mut router, counting) = router();
        let peer = IpAddr::from([192, 0, 2, 2]);
        for id in 0..100 {
            for flaw in [Flaw::Icrc, Flaw::QKey] {
                assert_eq!(request(&mut router, Instant::ZERO, peer, id, flaw), Some(0), "{flaw:?}");
            }
        }
        assert_eq!((counting.0.load(Relaxed), router.placed.len()), (0, 0));
        assert_eq!(request(&mut router, Instant::ZERO, peer, 1, Flaw::None), Some(1));
        assert_eq!(
            request(&mut router, Instant::ZERO, peer, 1, Flaw::None),
            Some(1),
            "again"
        );
        assert_eq!((counting.0.load(Relaxed), router.placed.len()), (1, 1));
    }

    #[test]
    fn one_host_does_not_push_out_the_requests_of_another() {
        let networks = [0x2001_0db8_0000_0001_u128, 0x2001_0db8_0000_0002].map(|n| n << 64);
        let v6 = |network: u128, low: u32| IpAddr::from(std::net::Ipv6Addr::from_bits(network | u128::from(low)));
        let v4 = |low: u32| IpAddr::from(std::net::Ipv4Addr::from_bits(0xc000_0200 | low));
        for (peer, flooding) in [
            (v4(2), vec![v4(3)]),
            (v6(networks[0], 2), (3..100).map(|n| v6(networks[1], n)).collect()),
        ] {
            let (mut router, counting) = router();
            assert_eq!(request(&mut router, Instant::ZERO, peer, 1, Flaw::None), Some(1));
            let mut refused = 0;
            for id in 0..20_000 {
                let from = flooding[id as usize % flooding.len()];
                refused += u32::from(request(&mut router, Instant::ZERO, from, id, Flaw::None).is_none());
            }
            let placed = counting.0.load(Relaxed);
            assert_eq!((placed, refused), (1025, 20_000 - 1024), "refused ones are not placed");
            assert_eq!(request(&mut router, Instant::ZERO, peer, 1, Flaw::None), Some(1));
            assert_eq!(counting.0.load(Relaxed), placed, "the peer's request is still known");
        }
    }

    #[test]
    fn only_the_first_loop_tells_others_of_services() {
        let places = [3, 9].map(|slot| (QpnSlot { bits: 7, slot }, Arc::new(Others) as Arc<dyn Services>));
        let shards = Shard::of_places(&places, Arc::new(Second)).unwrap();
        assert!(shards.iter().map(|s| s.registry().is_some()).eq([true, false]));
    }
}
