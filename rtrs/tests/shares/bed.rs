//! A server in shares, each with a fabric of its own with a device at each of two addresses, letters that take their time, and clients by hand.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::StdRng};
use roce_bth::Packet;
use roce_cm::{
    cma,
    mad::{Mad, Message},
};
use roce_local::{Fabric, FabricConfig, Several, Usage};
use roce_mem::{MemoryTable, Pages};
use roce_port::{QpnSlot, RxMeta, TxBatch, TxConfig};
use roce_verbs::{DeviceLimits, Instant, provider::Provider};
use rtrs::{
    admission::Admission,
    cx::Cx,
    proto::{ConnReq, Uuid},
    server::{
        Server, ServerConfig, Share,
        letter::Letter,
        request::{Output, Request, RequestKey, SessionKey},
    },
};

use crate::{
    devices,
    peer::{Peer, fabric},
};

/// Last bytes of the server's addresses.
pub(crate) const SERVERS: [u8; 2] = [1, 2];
pub(crate) const DEPTH: u32 = 8;
/// Top bits of a number that name its share.
const BITS: u8 = 2;

pub(crate) fn config() -> ServerConfig {
    let [first, second] = SERVERS.map(|last| IpAddr::from([192, 0, 2, last]));
    ServerConfig {
        addr: first,
        further: vec![SocketAddr::new(second, 1234)],
        queue_depth: DEPTH,
        max_chunk_size: 8192,
        ..ServerConfig::default()
    }
}

pub(crate) struct Host {
    pub(crate) fabric: Fabric<Several>,
    pub(crate) server: Server,
    /// What the user has been told, but for requests.
    pub(crate) told: Vec<Output>,
    /// Requests that are with the user.
    pub(crate) requests: Vec<Request>,
}

/// See the module.
pub(crate) struct Bed {
    pub(crate) now: Instant,
    pub(crate) shares: Vec<Host>,
    pub(crate) peers: Vec<Peer>,
    /// Homes of sessions; others are the first share's.
    pub(crate) homes: BTreeMap<Uuid, usize>,
    letters: BTreeMap<(usize, usize), VecDeque<Letter>>,
    /// Letters stay where they are.
    pub(crate) hold_letters: bool,
    /// The server gets no memory.
    pub(crate) no_memory: bool,
    dice: StdRng,
    batch: TxBatch,
}

fn cx(now: Instant, provider: &mut Fabric<Several>) -> Cx<'_> {
    fn dice(_: &mut [u8]) {
        panic!("the server throws no dice");
    }
    provider.set_now(now);
    Cx {
        now,
        provider,
        // What has no size leaks nothing.
        random: Box::leak(Box::new(dice)),
    }
}

impl Bed {
    pub(crate) fn new(shares: usize, config: &ServerConfig, keys: FabricConfig, seed: u64) -> Self {
        let usual = (DeviceLimits::software(1), false);
        Self::with(config, keys, seed, &vec![usual; shares])
    }

    /// With a share for each of these limits, some with memory tables of their own.
    pub(crate) fn with(config: &ServerConfig, keys: FabricConfig, seed: u64, limits: &[(DeviceLimits, bool)]) -> Self {
        let now = Instant::from_nanos(1_000_000_000);
        let count = limits.len();
        // One for each device.
        let tables = || SERVERS.map(|last| Arc::new(MemoryTable::new([last; 32], &DeviceLimits::software(1))));
        let shared = tables();
        let share = |(index, (limits, foreign)): (usize, &(DeviceLimits, bool))| {
            let mem = if *foreign { tables() } else { shared.clone() };
            let slot = QpnSlot {
                bits: BITS,
                slot: index as u16,
            };
            let mut fabric = fabric(&SERVERS, &mem, limits, Some(slot), keys);
            let share = Share::new(index, count).unwrap();
            let admission = Admission::new(config.limits(), config.allow.clone());
            let mut cx = cx(now, &mut fabric);
            let listening = Server::listen_share(&mut cx, config.clone(), Box::new(admission), share);
            Host {
                server: listening.unwrap().0,
                fabric,
                told: Vec::new(),
                requests: Vec::new(),
            }
        };
        Self {
            now,
            shares: limits.iter().enumerate().map(share).collect(),
            peers: Vec::new(),
            homes: BTreeMap::new(),
            letters: BTreeMap::new(),
            hold_letters: false,
            no_memory: false,
            dice: StdRng::seed_from_u64(seed),
            batch: TxBatch::new(TxConfig::default()),
        }
    }

    /// A path from an address of its own to the server's first; its number.
    pub(crate) fn peer(&mut self, session: u8, connections: u16) -> usize {
        self.peer_at(0, session, connections)
    }

    /// The same, to the address of that device.
    pub(crate) fn peer_at(&mut self, device: usize, session: u8, connections: u16) -> usize {
        let n = self.peers.len() as u8 + 10;
        let mut peer = Peer::new(n, SERVERS[device], session, connections);
        peer.tick(self.now);
        self.peers.push(peer);
        self.peers.len() - 1
    }

    pub(crate) fn home(&mut self, session: u8, home: usize) {
        self.homes.insert(Uuid([session; 16]), home);
    }

    /// Makes all connections of a path and asks for the chunks.
    pub(crate) fn open(&mut self, who: usize, connections: u16, name: &str) {
        for cid in 0..connections {
            self.peers[who].connect(cid);
            self.settle();
        }
        assert!(self.peers[who].is_connected(), "{:?}", self.peers[who].refused);
        self.peers[who].inform(name);
        self.settle();
    }

    pub(crate) fn roll(&mut self, below: usize) -> usize {
        self.dice.random_range(0..below)
    }

    /// Everything that may happen happens, in some order, until nothing more does. Acknowledgements are held for less than that
    /// takes.
    pub(crate) fn settle(&mut self) {
        let mut quiet = 0;
        let end = self.now + Duration::from_millis(1);
        for _ in 0..100_000 {
            let moved = self.step();
            quiet = if moved { 0 } else { quiet + 1 };
            if quiet < 40 {
                continue;
            }
            // Chance may have left something out; and what a port does without sending shows in the next turn.
            let moved = self.sweep() | self.sweep();
            if !moved && !self.deliver() {
                match self.due().filter(|due| *due <= end) {
                    Some(due) => self.set_now(due.max(self.now + Duration::from_micros(10))),
                    None => return,
                }
            }
            quiet = 0;
        }
        panic!("it does not come to rest");
    }

    /// A turn of everybody, without letters. True: something happened.
    fn sweep(&mut self) -> bool {
        let mut moved = false;
        for index in 0..self.shares.len() {
            moved |= self.turn(index) | self.carry_from_server(index);
        }
        for who in 0..self.peers.len() {
            moved |= self.carry_from_peer(who) | self.peers[who].look();
        }
        moved
    }

    /// When a port wants to be called.
    fn due(&mut self) -> Option<Instant> {
        let shares = self.shares.iter_mut().map(|host| &mut host.fabric);
        let all = shares.chain(self.peers.iter_mut().map(|peer| &mut peer.fabric));
        all.filter_map(|fabric| devices::poll_timeout(fabric.ports())).min()
    }

    fn set_now(&mut self, now: Instant) {
        self.now = now;
        self.peers.iter_mut().for_each(|peer| peer.tick(now));
    }

    /// Something that may happen. True: it did.
    pub(crate) fn step(&mut self) -> bool {
        let shares = self.shares.len();
        match self.roll(8) {
            0 | 1 => {
                let index = self.roll(shares);
                self.turn(index)
            }
            2 | 3 => {
                let index = self.roll(shares);
                self.carry_from_server(index)
            }
            4 if !self.peers.is_empty() => {
                let who = self.roll(self.peers.len());
                self.carry_from_peer(who)
            }
            5 if !self.peers.is_empty() => {
                let who = self.roll(self.peers.len());
                self.peers[who].look()
            }
            _ => self.deliver(),
        }
    }

    /// A letter comes, the oldest of some pair of shares.
    pub(crate) fn deliver(&mut self) -> bool {
        if self.hold_letters {
            return false;
        }
        let waiting: Vec<_> = self.letters.iter().filter(|(_, queue)| !queue.is_empty()).collect();
        if waiting.is_empty() {
            return false;
        }
        let (from, to) = *waiting[self.dice.random_range(0..waiting.len())].0;
        let letter = self.letters.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        if let Some(letter) = letter {
            self.call(to, |server, cx| server.letter(cx, from, letter));
        }
        true
    }

    /// Calls a share.
    pub(crate) fn call<T>(&mut self, index: usize, f: impl FnOnce(&mut Server, &mut Cx<'_>) -> T) -> T {
        let host = &mut self.shares[index];
        let out = f(&mut host.server, &mut cx(self.now, &mut host.fabric));
        self.listen(index);
        out
    }

    /// Takes what a share has to tell. True: there was something.
    fn listen(&mut self, index: usize) -> bool {
        let (now, no_memory) = (self.now, self.no_memory);
        let host = &mut self.shares[index];
        let mut told = false;
        while let Some(output) = host.server.poll_output() {
            told = true;
            match output {
                Output::Allocate { ticket, bytes } => {
                    let bytes = if no_memory { 0 } else { bytes };
                    let mut cx = cx(now, &mut host.fabric);
                    host.server.ready(&mut cx, ticket, Pages::allocate(bytes.max(1)));
                }
                Output::Request(request) => host.requests.push(request),
                output => host.told.push(output),
            }
        }
        while let Some((to, letter)) = host.server.poll_letter() {
            told = true;
            assert_ne!(to, index, "{letter:?}");
            self.letters.entry((index, to)).or_default().push_back(letter);
        }
        told
    }

    /// A turn of a share's loop. True: something happened.
    pub(crate) fn turn(&mut self, index: usize) -> bool {
        let now = self.now;
        let host = &mut self.shares[index];
        devices::timers(host.fabric.ports(), now);
        let mut wcs = Vec::new();
        host.fabric.poll_completions(&mut wcs, 1000).unwrap();
        for (qp, wc) in &wcs {
            assert!(host.server.completion(&mut cx(now, &mut host.fabric), *qp, wc));
        }
        let mut moved = !wcs.is_empty();
        if wcs.is_empty() {
            while let Some(event) = host.fabric.poll_event() {
                moved = true;
                host.server.event(&mut cx(now, &mut host.fabric), &event);
            }
        }
        host.server.timeout(&mut cx(now, &mut host.fabric));
        moved |= self.listen(index);
        let host = &mut self.shares[index];
        host.server.end_batch(&mut cx(now, &mut host.fabric));
        moved | self.listen(index)
    }

    fn carry_from_peer(&mut self, who: usize) -> bool {
        let packets = drain(self.now, &mut self.peers[who].fabric, &mut self.batch);
        for (meta, bytes) in &packets {
            let index = self.route(bytes);
            devices::receive(self.shares[index].fabric.ports(), self.now, meta, bytes);
        }
        !packets.is_empty()
    }

    fn carry_from_server(&mut self, index: usize) -> bool {
        let packets = drain(self.now, &mut self.shares[index].fabric, &mut self.batch);
        for (meta, bytes) in &packets {
            let IpAddr::V4(to) = meta.local else { unreachable!() };
            if let Some(peer) = self.peers.get_mut(usize::from(to.octets()[3]) - 10) {
                devices::receive(peer.fabric.ports(), self.now, meta, bytes);
            }
        }
        !packets.is_empty()
    }

    /// Whose a packet is: by numbers, and connection requests by session and connection.
    fn route(&self, bytes: &[u8]) -> usize {
        let packet = Packet::parse(bytes).unwrap();
        let qpn = packet.header.bth.dest_qp.value();
        if qpn != 1 {
            return (qpn >> (24 - BITS)) as usize;
        }
        let id = match Mad::parse(packet.payload).unwrap().message {
            Message::Req(m) => {
                let req = *ConnReq::parse(&m.private_data[cma::HEADER_LEN..]).unwrap();
                let home = self.homes.get(&req.session_uuid).copied().unwrap_or(0);
                let home = Share::new(home, self.shares.len()).unwrap();
                return home.of_connection(req.cid.get());
            }
            Message::Rej(m) => m.remote_comm_id,
            Message::Mra(m) => m.remote_comm_id,
            Message::Rep(m) => m.remote_comm_id,
            Message::Rtu(m) => m.remote_comm_id,
            Message::Dreq(m) => m.remote_comm_id,
            Message::Drep(m) => m.remote_comm_id,
            other => panic!("{other:?}"),
        };
        ((id >> (32 - BITS)) as usize).min(self.shares.len() - 1)
    }

    /// The user of a share answers a request; what was read is the request's header, over and over.
    pub(crate) fn answer(&mut self, index: usize, request: &Request, errno: i32) {
        if request.direction == rtrs::Direction::Read {
            let data: Vec<u8> = request
                .header
                .iter()
                .copied()
                .cycle()
                .take(request.data_len as usize)
                .collect();
            self.shares[index].server.write_data(request.key, 0, &data).unwrap();
        }
        self.call(index, |server, cx| server.answer(cx, request.key, errno));
    }

    /// The one request that is with a user, taken out, and its share.
    pub(crate) fn request(&mut self) -> (usize, Request) {
        let mut all = self.all_requests();
        assert_eq!(all.len(), 1, "{all:?}");
        let (index, key) = all.remove(0);
        (index, self.take(index, key))
    }

    /// Requests that are with users, by share.
    pub(crate) fn all_requests(&self) -> Vec<(usize, RequestKey)> {
        let of = |(index, host): (usize, &Host)| host.requests.iter().map(move |r| (index, r.key)).collect::<Vec<_>>();
        self.shares.iter().enumerate().flat_map(of).collect()
    }

    pub(crate) fn take(&mut self, index: usize, key: RequestKey) -> Request {
        let requests = &mut self.shares[index].requests;
        let at = requests.iter().position(|r| r.key == key).unwrap();
        requests.remove(at)
    }

    /// Time passes, with all that is due.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.settle();
            let servers = self.shares.iter().filter_map(|host| host.server.next_timeout()).min();
            let next = [Some(end), servers, self.due()]
                .into_iter()
                .flatten()
                .min()
                .unwrap_or(end);
            let least = self.now + Duration::from_micros(10);
            self.set_now(next.max(least).min(end.max(least)));
        }
        self.settle();
    }

    /// What a share's user was told of sessions, as words; taken out.
    pub(crate) fn news(&mut self, index: usize) -> Vec<String> {
        let word = |output| match output {
            Output::SessionOpened(s) => format!("opened {}", s.name),
            Output::SessionClosed { why, .. } => format!("closed: {why}"),
            Output::PathUp { .. } => "path up".into(),
            Output::PathDown { why, .. } => format!("path down: {why}"),
            Output::Free(_) => "free".into(),
            other => panic!("{other:?}"),
        };
        self.shares[index].told.drain(..).map(word).collect()
    }

    pub(crate) fn sessions(&self, index: usize) -> Vec<SessionKey> {
        self.shares[index].server.sessions().iter().map(|s| s.session).collect()
    }

    /// All shares stop, the users answer what they have, and nothing is left.
    pub(crate) fn end(&mut self) {
        self.hold_letters = false;
        for index in 0..self.shares.len() {
            self.call(index, Server::stop);
        }
        for _ in 0..100 {
            self.pass(Duration::from_secs(1));
            for (index, key) in self.all_requests() {
                let request = self.take(index, key);
                self.answer(index, &request, 0);
            }
            if self.shares.iter().all(|host| host.server.is_idle()) {
                break;
            }
        }
        self.settle();
        for (index, host) in self.shares.iter().enumerate() {
            assert!(host.server.is_idle(), "share {index}: {:?}", host.server);
            assert_eq!(host.fabric.usage(), Usage::default(), "share {index}");
        }
    }
}

fn drain(now: Instant, from: &mut Fabric<Several>, batch: &mut TxBatch) -> Vec<(RxMeta, Vec<u8>)> {
    let mut packets = Vec::new();
    devices::drain(from.ports(), now, batch, |meta, bytes| {
        packets.push((*meta, bytes.to_vec()))
    });
    packets
}
