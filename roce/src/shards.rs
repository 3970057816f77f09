//! Several loops at one address: each has a shard of it, and what reaches one for another is handed over. Loops that have several
//! addresses have a shard of each.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::Mutex;
use roce_bth::{Packet, Qpn};
use roce_cm::{
    cma::{HEADER_LEN, ServiceId},
    mad::{Mad, Message, Req},
};
use roce_net::{EventFd, LocalDriver};
use roce_port::{RxMeta, Steering};
use roce_verbs::{Instant, provider::VerbsError};

use crate::device::io_error;

/// Packets that may wait for a loop: what comes by the wrong socket, and management datagrams. Both come again if they are lost.
const MAX_WAITING: usize = 1024;
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

struct Letter {
    meta: RxMeta,
    bytes: Vec<u8>,
}

/// What others have for a shard.
struct Inbox {
    letters: Mutex<VecDeque<Letter>>,
    /// There are letters.
    full: AtomicBool,
    /// Readable when there are.
    bell: EventFd,
}

impl Inbox {
    fn new() -> Result<Self, VerbsError> {
        Ok(Self {
            letters: Mutex::default(),
            full: AtomicBool::new(false),
            bell: EventFd::new().map_err(io_error("making an event descriptor"))?,
        })
    }

    /// False: too much waits already.
    fn send(&self, letter: Letter) -> bool {
        let mut letters = self.letters.lock();
        if letters.len() >= MAX_WAITING {
            return false;
        }
        letters.push_back(letter);
        let first = letters.len() == 1;
        drop(letters);
        if first {
            self.full.store(true, SeqCst);
            self.bell.raise();
        }
        true
    }

    fn take(&self) -> VecDeque<Letter> {
        if !self.full.swap(false, SeqCst) {
            return VecDeque::new();
        }
        // Before the letters are taken: the first that comes afterwards rings again.
        self.bell.clear();
        std::mem::take(&mut *self.letters.lock())
    }
}

/// Who sent a connect request, as its repetitions say it again: address and communication ID.
type Sender = (IpAddr, u32);

/// Where a request went.
struct Placed {
    /// The sender's channel adapter.
    guid: u64,
    shard: usize,
}

/// Which shard a management datagram is for.
struct Router {
    steering: Steering,
    placement: Arc<dyn Placement>,
    remembered: HashMap<Sender, Placed>,
    order: VecDeque<(Instant, Sender)>,
}

impl Router {
    fn new(steering: Steering, placement: Arc<dyn Placement>) -> Self {
        Self {
            steering,
            placement,
            remembered: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// What can't be read is the first shard's, which counts it.
    fn route(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) -> usize {
        let Ok(packet) = Packet::parse(bytes) else { return 0 };
        let Ok(mad) = Mad::parse(packet.payload) else { return 0 };
        let by_id = |id: u32| self.steering.of_comm_id(id);
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
        let shard = if shard < self.steering.shards() { shard } else { 0 };
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

/// A loop's part in an address that it shares with others.
pub(crate) struct Shard {
    steering: Steering,
    index: usize,
    /// Of all shards.
    inboxes: Arc<[Inbox]>,
    /// Of the first shard.
    router: Option<RefCell<Router>>,
}

impl Shard {
    /// One for each.
    pub(crate) fn all(steering: Steering, placement: Arc<dyn Placement>) -> Result<Vec<Self>, VerbsError> {
        let inboxes = (0..steering.shards()).map(|_| Inbox::new());
        let inboxes: Arc<[Inbox]> = inboxes.collect::<Result<Vec<_>, _>>()?.into();
        let mut router = Some(RefCell::new(Router::new(steering, placement)));
        Ok((0..steering.shards())
            .map(|index| Self {
                steering,
                index,
                inboxes: inboxes.clone(),
                router: router.take(),
            })
            .collect())
    }

    /// Readable when there is something for this shard.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.inboxes[self.index].bell.as_fd()
    }

    /// Receives about `budget` packets, and what others have for this shard. True: more is waiting.
    pub(crate) fn receive(&self, driver: &mut LocalDriver, now: Instant, budget: usize) -> bool {
        // What the sockets bring is not this shard's alone, and the port is in use meanwhile.
        let (mine, lost) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let handed_over = Cell::new(0);
        let pass_on = |meta: &RxMeta, bytes: &[u8]| {
            let (target, management) = self.target(now, meta, bytes);
            let letter = Letter {
                meta: *meta,
                bytes: bytes.to_vec(),
            };
            if target == self.index {
                mine.borrow_mut().push(letter);
            } else if !self.inboxes[target].send(letter) {
                lost.borrow_mut().push(bytes.len());
            } else if !management {
                handed_over.set(handed_over.get() + 1);
            }
        };
        let more = driver.receive(now, budget, &pass_on);
        let letters = self.inboxes[self.index].take();
        for letter in mine.into_inner().into_iter().chain(letters) {
            self.take(driver, now, &letter);
        }
        driver.port().count_handed_over(handed_over.get());
        let lost = lost.into_inner();
        lost.into_iter().for_each(|len| driver.port().count_lost(len));
        more
    }

    /// Whose a packet is, and whether it is a management datagram that the first shard passes on.
    fn target(&self, now: Instant, meta: &RxMeta, bytes: &[u8]) -> (usize, bool) {
        let qpn = qpn_of(bytes);
        match &self.router {
            Some(router) if qpn == Qpn::GSI => (router.borrow_mut().route(now, meta, bytes), true),
            _ => (self.steering.of_qpn(qpn), false),
        }
    }

    /// Takes what another loop has handed over. That a management datagram came by another's socket, merged behind something
    /// else, is possible: the first shard says whose it is.
    fn take(&self, driver: &mut LocalDriver, now: Instant, letter: &Letter) {
        let Letter { meta, bytes } = letter;
        let (target, _) = match self.router {
            Some(_) => self.target(now, meta, bytes),
            None => (self.index, true),
        };
        if target == self.index {
            return driver.handed_over(now, bytes, meta);
        }
        let letter = Letter {
            meta: *meta,
            bytes: bytes.clone(),
        };
        if !self.inboxes[target].send(letter) {
            driver.port().count_lost(bytes.len());
        }
    }
}

/// The destination of a packet; QP0, which nobody has, of what is too short to be one.
fn qpn_of(packet: &[u8]) -> Qpn {
    match packet.first_chunk() {
        Some([_, _, _, _, _, a, b, c]) => Qpn::new(u32::from_be_bytes([0, *a, *b, *c])),
        None => Qpn::SMI,
    }
}
