//! Clients, users and devices that do anything at any time: whatever happens, each request reaches the user alone in its chunk,
//! and in the end nothing is left.

use core::time::Duration;
use std::collections::BTreeSet;

use proptest::prelude::*;
use roce_verbs::{Instant, RemoteAddr, SendOp};
use rtrs::{
    PACKET_LIFETIME,
    proto::{Imm, RdmaWrite},
    server::{
        ServerConfig,
        request::{Output, RequestKey},
    },
};
use zerocopy::IntoBytes;

use crate::{
    bed::{Bed, address, config},
    faulty::Faults,
    hand::{Client, name},
    host::KeyMode,
};

#[derive(Clone, Copy, Debug)]
enum Op {
    Ask,
    Establish,
    Inform,
    Write,
    Read,
    Imm(u32),
    Leave,
    Fail(bool),
    Violate,
    /// A request where one of the same path is under way.
    Again,
    Answer(bool),
    Drained,
    Memory(bool),
    Wait(u64),
    Close,
    Fault(u8),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => Just(Op::Ask),
        12 => Just(Op::Establish),
        12 => Just(Op::Inform),
        24 => Just(Op::Write),
        12 => Just(Op::Read),
        1 => prop_oneof![Just(0x8000_0000), Just(0x9000_0000), any::<u32>()].prop_map(Op::Imm),
        1 => Just(Op::Leave),
        1 => any::<bool>().prop_map(Op::Fail),
        1 => prop_oneof![Just(Op::Violate), Just(Op::Again)],
        10 => any::<bool>().prop_map(Op::Answer),
        8 => Just(Op::Drained),
        4 => proptest::bool::weighted(0.8).prop_map(Op::Memory),
        1 => (0u64..8000).prop_map(Op::Wait),
        1 => prop_oneof![3 => (0u8..3).prop_map(Op::Fault), 1 => Just(Op::Close)],
    ]
}

/// Three paths of one session, and two other sessions.
fn clients() -> Vec<Client> {
    let first = Client::new(1);
    let mut second = first.second_path(2);
    second.first = true;
    let mut third = first.second_path(3);
    third.first = true;
    third.local.set_ip(address(1));
    vec![first, second, third, Client::new(4), Client::new(5)]
}

struct World {
    bed: Bed,
    clients: Vec<Client>,
    /// Chunks of each client with a request under way.
    under_way: [BTreeSet<u16>; 5],
    /// Clients that have given their name, and when.
    asked: [Option<Instant>; 5],
    /// Requests that the user had when each client gave its name, of its session; but for those of clients that have shown since that
    /// they live.
    before: [BTreeSet<RequestKey>; 5],
    /// Requests, and the clients that they are of.
    with_user: Vec<(RequestKey, usize)>,
    /// The user takes its time.
    slow: bool,
    seen: BTreeSet<RequestKey>,
    opened: usize,
    closed: usize,
}

impl World {
    fn new(keys: KeyMode, always_invalidate: bool) -> Self {
        let config = ServerConfig {
            always_invalidate,
            ..config()
        };
        let mut bed = Bed::over(config, keys, 2);
        bed.host.fabric.hold_drains = true;
        bed.hold_memory = true;
        Self {
            bed,
            clients: clients(),
            under_way: Default::default(),
            asked: [None; 5],
            before: Default::default(),
            with_user: Vec::new(),
            slow: false,
            seen: BTreeSet::new(),
            opened: 0,
            closed: 0,
        }
    }

    /// A connection of a client by which messages get to the server.
    fn is_open(&mut self, who: usize, cid: u16) -> bool {
        let client = &self.clients[who];
        !client.has_lost(&self.bed, cid) && client.accepted(&mut self.bed, cid).is_some()
    }

    fn step(&mut self, who: usize, arg: u16, op: Op) {
        let (bed, chunk) = (&mut self.bed, arg % 3);
        let client = &mut self.clients[who];
        if client.is_gone(bed) {
            client.cons.clear();
            client.chunks.clear();
            self.under_way[who].clear();
            self.asked[who] = None;
        }
        match op {
            Op::Ask if client.cons.len() < 2 => {
                let cid = client.cons.len() as u16;
                let _ = client.ask(bed, cid, client.request(cid));
            }
            Op::Establish => client.establish(bed),
            Op::Leave if client.cons.contains_key(&0) => client.leave(bed),
            Op::Answer(oldest) if !self.with_user.is_empty() && (!self.slow || arg.is_multiple_of(4)) => {
                let last = self.with_user.len() - 1;
                let (key, _) = self.with_user.remove(if oldest { 0 } else { last });
                bed.answer(key, i32::from(arg % 3));
            }
            Op::Drained if !bed.host.fabric.draining.is_empty() => {
                let draining = &bed.host.fabric.draining;
                let qp = draining[usize::from(arg) % draining.len()];
                bed.host.fabric.finish_drain(qp);
            }
            Op::Memory(there) if bed.outputs.iter().any(|o| matches!(o, Output::Allocate { .. })) => {
                bed.memory(there);
            }
            Op::Wait(ms) => bed.wait(Duration::from_millis(ms)),
            Op::Close => {
                let session = bed.server.sessions().get(who % 3).map(|s| s.session);
                if let Some(session) = session {
                    bed.call(|server, cx| server.close_session(cx, session));
                }
            }
            Op::Fault(what) => {
                let left = Some(usize::from(arg % 12));
                let faults = &mut bed.host.fabric.faults;
                *[&mut faults.keys, &mut faults.registrations, &mut faults.qps][usize::from(what)] = left;
            }
            _ => self.send(who, chunk, op),
        }
        self.bed.turn();
        if !matches!(op, Op::Fault(_)) {
            self.bed.host.fabric.faults = Faults::default();
        }
        self.look();
    }

    /// Sends on a connection, if it is up.
    fn send(&mut self, who: usize, chunk: u16, op: Op) {
        let (service, io) = (self.is_open(who, 0), self.is_open(who, 1));
        let (bed, client) = (&mut self.bed, &self.clients[who]);
        let ready = io && !client.chunks.is_empty();
        // Requests of several paths may wait in a chunk: each path has a place of its own there, or headers would be another's.
        let (read_at, write_at) = (64 * (who as u32 + 1), 512 + 16 * who as u32);
        match op {
            Op::Inform if service && io && self.asked[who].is_none() => {
                self.asked[who] = Some(bed.now);
                let session = client.session;
                let same = self
                    .with_user
                    .iter()
                    .filter(|(_, of)| self.clients[*of].session == session);
                self.before[who] = same.map(|(key, _)| *key).collect();
                client.inform(bed, &name(&format!("s{}", client.session)));
            }
            Op::Again if service && !ready => client.inform(bed, b"again"),
            // A connection whose WRITE the transport refuses has failed.
            Op::Write if ready && self.under_way[who].insert(chunk) => {
                let bytes = [&[who as u8], RdmaWrite::new(1).as_bytes()].concat();
                if client.write(bed, chunk, write_at, &bytes) {
                    client.announce(bed, chunk, write_at + 1);
                }
            }
            Op::Read if ready && self.under_way[who].insert(chunk) && client.write(bed, chunk, read_at, b"x") => {
                client.send_read(bed, chunk, read_at, &[who as u8], chunk == 2);
            }
            Op::Again if ready => client.announce(bed, chunk, write_at + 1),
            Op::Imm(imm) if service => {
                client.imm(bed, 0, imm);
                if Imm::decode(imm) == Ok(Imm::HbAck) {
                    self.lives(who);
                }
            }
            Op::Imm(imm) if io => client.imm(bed, 1, imm),
            Op::Fail(silent) if io => {
                let last = bed.host.fabric.accepted.last().copied();
                match last.filter(|_| silent) {
                    Some(qp) => bed.break_qp(qp),
                    None => drop(client.send(bed, 1, SendOp::Send, b"too long")),
                }
            }
            Op::Violate if io => drop(client.send(bed, 1, SendOp::Write(RemoteAddr::default()), b"evil")),
            _ => {}
        }
    }

    /// A client answers a question. Whoever asked for the chunks so long before that the answer was given since then need not wait for
    /// its requests.
    fn lives(&mut self, who: usize) {
        let now = self.bed.now;
        let long_ago = |asked: &Option<Instant>| asked.is_some_and(|at| now.saturating_since(at) >= PACKET_LIFETIME);
        let spared = self.asked.iter().map(long_ago);
        for (before, _) in self.before.iter_mut().zip(spared).filter(|(_, spared)| *spared) {
            let of_others = |key: &RequestKey| self.with_user.iter().all(|(mine, of)| mine != key || *of != who);
            before.retain(of_others);
        }
    }

    /// What the server tells, and what the clients get.
    fn look(&mut self) {
        for request in self.bed.requests() {
            let key = request.key;
            assert!(self.seen.insert(key), "{key:?} comes twice");
            let mut others = self.with_user.iter().map(|(other, _)| other);
            let same = |other: &RequestKey| (other.session, other.chunk) == (key.session, key.chunk);
            assert!(!others.any(same), "two requests in a chunk: {key:?}");
            self.with_user.push((key, usize::from(request.header[0])));
        }
        let (wanted, told) = core::mem::take(&mut self.bed.outputs)
            .into_iter()
            .partition(|o| matches!(o, Output::Allocate { .. }));
        self.bed.outputs = wanted;
        let told: Vec<Output> = told;
        for output in told {
            match output {
                Output::SessionOpened(_) => self.opened += 1,
                Output::SessionClosed { .. } => self.closed += 1,
                _ => {}
            }
            assert!(self.closed <= self.opened);
        }
        for who in 0..self.clients.len() {
            if self.is_open(who, 0) && self.clients[who].chunks.is_empty() {
                let is_in = self.clients[who].informed(&mut self.bed);
                assert!(
                    !is_in || !self.has_late_requests(who),
                    "{who} may write where the user is at work"
                );
                let mut before = self.with_user.iter().filter(|(key, _)| self.before[who].contains(key));
                assert!(
                    !is_in || before.next().is_none(),
                    "{who} may write where the user was at work when it asked"
                );
            }
            if self.is_open(who, 1) && !self.clients[who].chunks.is_empty() {
                for reply in self.clients[who].answers(&mut self.bed, 1) {
                    self.under_way[who].remove(&(reply.msg_id as u16));
                }
            }
        }
    }

    /// Whether the user has requests of lost paths of a client's session.
    fn has_late_requests(&self, who: usize) -> bool {
        let session = self.clients[who].session;
        let late = |of: usize| self.clients[of].session == session && self.clients[of].has_lost(&self.bed, 1);
        self.with_user.iter().any(|(_, of)| late(*of))
    }

    /// The server stops, and the user and the devices do what they owe.
    fn end(&mut self) {
        self.bed.call(|server, cx| server.stop(cx));
        self.look();
        while !self.bed.host.fabric.draining.is_empty() {
            self.bed.finish_drains();
            self.look();
        }
        for (key, _) in core::mem::take(&mut self.with_user) {
            self.bed.answer(key, 0);
        }
        self.look();
        assert!(self.bed.server.is_idle(), "{:?}", self.bed.server.sessions());
        assert_eq!(self.bed.host.usage(), Default::default());
        assert_eq!(self.opened, self.closed);
    }
}

const OPEN: [Op; 6] = [
    Op::Ask,
    Op::Establish,
    Op::Memory(true),
    Op::Ask,
    Op::Establish,
    Op::Inform,
];

fn play(steps: Vec<(usize, u16, Op)>, keys: KeyMode, always_invalidate: bool, open: usize, slow: bool) {
    let mut world = World::new(keys, always_invalidate);
    world.slow = slow;
    for who in 0..open {
        OPEN.into_iter().for_each(|op| world.step(who, 0, op));
    }
    for (who, arg, op) in steps {
        world.step(who, arg, op);
    }
    world.end();
}

/// A client that answers 268 ms after another path has asked has not given up its requests.
#[test]
fn who_lives_is_not_waited_for() {
    let mut world = World::new(KeyMode::Instant, false);
    OPEN.into_iter().for_each(|op| world.step(0, 0, op));
    world.step(0, 0, Op::Write);
    for op in [
        Op::Ask,
        Op::Establish,
        Op::Ask,
        Op::Establish,
        Op::Inform,
        Op::Wait(267),
    ] {
        world.step(2, 0, op);
    }
    let ack = Op::Imm(Imm::HbAck.encode());
    world.step(0, 0, ack);
    assert!(world.clients[2].chunks.is_empty(), "it may have been under way");
    world.step(2, 0, Op::Wait(2));
    world.step(0, 0, ack);
    assert!(!world.clients[2].chunks.is_empty());
    world.end();
}

/// How often the interesting things happen, so that the steps do not wear out unnoticed.
#[test]
fn the_steps_get_somewhere() {
    let mut world = World::new(KeyMode::Instant, true);
    for who in 0..3 {
        OPEN.into_iter().for_each(|op| world.step(who, 0, op));
        assert!(!world.clients[who].chunks.is_empty(), "path {who}");
    }
    for who in 0..3 {
        world.step(who, 1, Op::Write);
    }
    assert_eq!(
        (world.with_user.len(), world.bed.server.counters().requests_parked),
        (1, 2)
    );
    world.step(0, 0, Op::Leave);
    world.step(0, 0, Op::Answer(true));
    assert!(world.with_user.is_empty());
    world.step(0, 0, Op::Drained);
    world.step(0, 0, Op::Drained);
    assert_eq!(world.with_user.len(), 1);
    world.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_nothing_is_lost(
        steps in proptest::collection::vec((0usize..5, any::<u16>(), op()), 1..300),
        keys in proptest::sample::select(&KeyMode::ALL[..]),
        always_invalidate in any::<bool>(),
        open in 0usize..4,
        slow in any::<bool>(),
    ) {
        play(steps, keys, always_invalidate, open, slow);
    }
}
