//! Two managers over a link that loses, duplicates, delays and reorders, with consumers that do everything at every
//! time. Afterwards, on a quiet link, both sides must agree about every connection, and nothing may be left over.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use crate::common::{CLIENT, Faults, Rng, SERVER, World, ms};
use roce_port::cm::{
    AcceptArgs, CmConfig, ConnId, ConnParams, ConnectArgs, Event, Manager, RejectReason, state::State,
};
use roce_verbs::{Instant, Mtu, Psn, Qpn};

const PORT: u16 = 1234;
const CHAOS: Duration = Duration::from_secs(20);

/// Next action of a consumer.
#[derive(Clone, Copy, Debug)]
enum Act {
    Connect,
    Accept,
    Reject,
    QpReady,
    QpFailed,
    Data,
    Disconnect,
    Destroy,
}

/// Events of a connection that a consumer has had.
#[derive(Debug, Default)]
struct Seen {
    /// The number that the active side put into its private data.
    pair: u32,
    passive: bool,
    replied: bool,
    established: bool,
    /// Our own disconnect, reject or failure: an end without one of the peer's.
    ended_by_us: bool,
    ends: u32,
    timewait_exits: u32,
    destroyed: bool,
}

impl Seen {
    fn is_up(&self) -> bool {
        self.established && self.ends == 0 && !self.ended_by_us && !self.destroyed
    }
}

struct Consumers {
    seed: u64,
    /// Per side.
    seen: [BTreeMap<ConnId, Seen>; 2],
    plan: BTreeMap<(Instant, u64), (usize, Option<ConnId>, Act)>,
    order: u64,
    next_qpn: u32,
    next_pair: u32,
    /// Queue pair number to the pairs that use it.
    users: BTreeMap<u32, Vec<u32>>,
    /// Pairs that a consumer ended.
    ended: BTreeSet<u32>,
    /// Pairs of which the client, told to wait by an MRA, got none of three REPs.
    unheard: BTreeSet<u32>,
    /// Chaos is over: consumers only finish what has begun.
    calm: bool,
}

impl Consumers {
    fn later(&mut self, w: &mut World, side: usize, conn: Option<ConnId>, max_ms: u64, act: Act) {
        self.order += 1;
        let at = w.now + ms(w.rng.below(max_ms) + 1);
        self.plan.insert((at, self.order), (side, conn, act));
    }

    fn connect(&mut self, w: &mut World, side: usize) {
        let (here, there) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
        self.next_qpn += 1;
        self.next_pair += 1;
        // Now and then a queue pair number is used again, as after a restart.
        let qpn = if w.rng.chance(5) {
            self.next_qpn - w.rng.below(3) as u32
        } else {
            self.next_qpn
        };
        let mut args = ConnectArgs::new(
            SocketAddr::new(here, 0),
            SocketAddr::new(there, PORT),
            Qpn::new(0x100 + qpn),
            Psn::new(qpn),
            Mtu::B1024,
        );
        args.params.private_data = self.next_pair.to_be_bytes().to_vec();
        self.users.entry(qpn).or_default().push(self.next_pair);
        let conn = w.m[side].connect(w.now, &args).unwrap();
        let seen = Seen {
            pair: self.next_pair,
            ..Seen::default()
        };
        self.seen[side].insert(conn, seen);
        if w.rng.chance(20) {
            self.later(w, side, Some(conn), 15_000, Act::Disconnect);
        }
        if w.rng.chance(10) {
            self.later(w, side, Some(conn), 15_000, Act::Destroy);
        }
    }

    fn act(&mut self, w: &mut World, side: usize, conn: Option<ConnId>, act: Act) {
        let Some(id) = conn else {
            self.connect(w, side);
            return;
        };
        let now = w.now;
        // Data only comes from a queue pair that is ready to send.
        let pair = self.seen[side][&id].pair;
        let peer_sends = self.seen[1 - side].values().any(|s| s.pair == pair && s.established);
        if matches!(act, Act::Reject | Act::QpFailed | Act::Disconnect | Act::Destroy) {
            self.ended.insert(pair);
        }
        let m = &mut w.m[side];
        let seen = self.seen[side].get_mut(&id).unwrap();
        match act {
            Act::Connect => unreachable!(),
            Act::Accept => {
                self.next_qpn += 1;
                self.users.entry(self.next_qpn).or_default().push(pair);
                let qpn = 0x100 + self.next_qpn;
                let _ = m.accept(
                    now,
                    id,
                    &AcceptArgs::new(Qpn::new(qpn), Psn::new(qpn), ConnParams::default()),
                );
            }
            Act::Reject => seen.ended_by_us |= m.reject(now, id, RejectReason::CONSUMER, b"no").is_ok(),
            Act::QpReady => seen.established |= m.qp_ready(now, id).is_ok(),
            Act::QpFailed => seen.ended_by_us |= m.reject(now, id, RejectReason::NO_QP, &[]).is_ok(),
            Act::Data if !peer_sends => {}
            Act::Data => m.communication_established(now, id),
            Act::Disconnect => m.disconnect(now, id),
            Act::Destroy => {
                m.destroy(now, id);
                seen.destroyed = true;
            }
        }
    }

    fn events(&mut self, w: &mut World) {
        for side in 0..2 {
            while let Some(e) = w.m[side].poll_event() {
                self.event(w, side, e);
            }
        }
    }

    /// Checks an event against what may come, and plans the answer.
    fn event(&mut self, w: &mut World, side: usize, e: Event) {
        let conn = e.conn();
        let context = format!("seed {}: {e:?}", self.seed);
        if let Event::Request { private_data, .. } = &e {
            let pair = u32::from_be_bytes(private_data[..4].try_into().unwrap());
            let seen = Seen {
                pair,
                passive: true,
                ..Seen::default()
            };
            assert!(self.seen[side].insert(conn, seen).is_none(), "{context}");
            let delay = if self.calm { 1000 } else { 12_000 };
            let act = if w.rng.chance(15) { Act::Reject } else { Act::Accept };
            self.later(w, side, Some(conn), delay, act);
            if w.rng.chance(10) {
                self.later(w, side, Some(conn), 8000, Act::Data);
            }
            if !self.calm && w.rng.chance(20) {
                let act = if w.rng.chance(50) {
                    Act::Disconnect
                } else {
                    Act::Destroy
                };
                self.later(w, side, Some(conn), 15_000, act);
            }
            return;
        }
        let seen = self.seen[side].get_mut(&conn).unwrap_or_else(|| panic!("{context}"));
        let mut answer = None;
        assert!(!seen.destroyed, "after destroy: {context}");
        match e {
            Event::Request { .. } | Event::SidrRequest { .. } | Event::Resolved { .. } | Event::Failed { .. } => {
                unreachable!()
            }
            Event::Reply { .. } => {
                assert!(!seen.passive && !seen.replied && seen.ends == 0, "{context}");
                seen.replied = true;
                let delay = if self.calm { 500 } else { 6000 };
                let act = if w.rng.chance(10) { Act::QpFailed } else { Act::QpReady };
                answer = Some((delay, act));
            }
            Event::Established { .. } => {
                assert!(seen.passive && !seen.established && seen.ends == 0, "{context}");
                seen.established = true;
            }
            Event::Rejected { .. } | Event::Unreachable { .. } => {
                if seen.passive && matches!(e, Event::Unreachable { .. }) {
                    self.unheard.insert(seen.pair);
                }
                assert!(
                    !seen.established,
                    "an established connection is disconnected, not rejected: {context}"
                );
                seen.ends += 1;
            }
            Event::Disconnected { .. } => seen.ends += 1,
            Event::TimewaitExit { .. } => {
                assert!(seen.ends == 1, "{context}");
                seen.timewait_exits += 1;
            }
        }
        assert!(seen.ends <= 1 && seen.timewait_exits <= 1, "{context}");
        if let Some((delay, act)) = answer {
            self.later(w, side, Some(conn), delay, act);
        }
    }

    /// Runs until nothing is planned, under way or timed.
    fn run(&mut self, w: &mut World, until: Option<Instant>) {
        for _ in 0..1_000_000 {
            self.events(w);
            let planned = self.plan.keys().next().map(|(at, _)| *at);
            let Some(at) = w.next_event().into_iter().chain(planned).min() else {
                return;
            };
            if until.is_some_and(|end| at > end) {
                return;
            }
            w.advance(at);
            while let Some(e) = self.plan.first_entry().filter(|e| e.key().0 <= w.now) {
                let (side, conn, act) = e.remove();
                self.act(w, side, conn, act);
            }
        }
        panic!("seed {}: never comes to rest", self.seed);
    }

    /// Clients use what they hold to be connected: data reaches the server's queue pair, or nothing answers, and they end it.
    /// (A server that hears nothing after three REPs says no more.) False: every connection has both its ends.
    fn use_connections(&mut self, w: &mut World) -> bool {
        let mut used = false;
        for side in 0..2 {
            let up = self.seen[side].iter().filter(|(_, s)| s.is_up() && !s.passive);
            let up: Vec<_> = up.map(|(id, s)| (*id, s.pair)).collect();
            for (id, pair) in up {
                let theirs = self.seen[1 - side].iter().find(|(_, s)| s.passive && s.pair == pair);
                let theirs = theirs.map(|(id, s)| (*id, s.is_up()));
                let state = theirs.and_then(|(id, _)| w.m[1 - side].state(id));
                match (theirs, state) {
                    (Some((_, true)), _) => continue,
                    (Some((id, _)), Some(s)) if s.is_half_open() => {
                        self.later(w, 1 - side, Some(id), 1000, Act::Data);
                    }
                    _ => self.later(w, side, Some(id), 1000, Act::Disconnect),
                }
                used = true;
            }
        }
        used
    }

    /// Both sides must hold the same connections to be established.
    fn agree(&self, w: &World) {
        let up = |side: usize, passive: bool| -> Vec<u32> {
            let mut pairs: Vec<_> = self.seen[side]
                .values()
                .filter(|s| s.is_up() && s.passive == passive)
                .map(|s| s.pair)
                .collect();
            pairs.sort_unstable();
            pairs
        };
        for active in 0..2 {
            assert_eq!(
                up(active, false),
                up(1 - active, true),
                "seed {}: active side {active}",
                self.seed
            );
        }
        // What nobody ended stands, unless it had to share a queue pair number.
        let shared: BTreeSet<u32> = self.users.values().filter(|u| u.len() > 1).flatten().copied().collect();
        let excused = |p: &u32| self.ended.contains(p) || shared.contains(p) || self.unheard.contains(p);
        for pair in (1..=self.next_pair).filter(|p| !excused(p)) {
            let stands = self
                .seen
                .iter()
                .flat_map(BTreeMap::values)
                .filter(|s| s.pair == pair && s.is_up())
                .count();
            assert_eq!(stands, 2, "seed {}: pair {pair} should stand", self.seed);
        }
        for side in 0..2 {
            for (id, s) in &self.seen[side] {
                let state = w.m[side].state(*id);
                let rest = matches!(state, None | Some(State::Established | State::Over));
                assert!(rest, "seed {}: {s:?} rests in {state:?}", self.seed);
                assert_eq!(
                    state == Some(State::Established),
                    s.is_up(),
                    "seed {}: {s:?} {state:?}",
                    self.seed
                );
            }
        }
    }
}

fn config(guid: u64) -> CmConfig {
    // Longer than the chaos: giving up is tested elsewhere, here everything that can be settled must be.
    CmConfig {
        give_up: Duration::from_secs(60),
        ..CmConfig::new(guid, Mtu::B4096)
    }
}

/// Returns how many pairs there were, and how many of them went unheard.
fn run(seed: u64) -> (u32, usize) {
    let mut w = World::new(seed, config);
    w.rng = Rng(seed);
    for m in &mut w.m {
        m.listen(None, PORT, 4).unwrap();
    }
    w.faults = Faults {
        loss: w.rng.below(31),
        duplication: w.rng.below(21),
        max_delay_ms: w.rng.below(800),
    };
    let mut c = Consumers {
        seed,
        seen: Default::default(),
        plan: BTreeMap::new(),
        order: 0,
        next_qpn: 10,
        next_pair: 0,
        users: BTreeMap::new(),
        ended: BTreeSet::new(),
        unheard: BTreeSet::new(),
        calm: false,
    };
    for _ in 0..12 {
        let side = w.rng.below(2) as usize;
        c.later(&mut w, side, None, 10_000, Act::Connect);
    }
    let end = w.now + CHAOS;
    c.run(&mut w, Some(end));
    w.faults = Faults::default();
    c.calm = true;
    while c.use_connections(&mut w) {
        c.run(&mut w, None);
    }
    c.run(&mut w, None);
    while c.use_connections(&mut w) {
        c.run(&mut w, None);
    }
    c.agree(&w);

    // Everything that stands is ended, by one side or by both at once, under faults again.
    w.faults.loss = 20;
    for side in 0..2 {
        let up: Vec<_> = c.seen[side]
            .iter()
            .filter(|(_, s)| s.is_up())
            .map(|(id, _)| *id)
            .collect();
        for id in up {
            if w.rng.chance(60) || side == 1 {
                c.later(&mut w, side, Some(id), 20, Act::Disconnect);
            }
        }
    }
    c.run(&mut w, None);
    for side in 0..2 {
        for (id, s) in &c.seen[side] {
            assert!(!s.is_up(), "seed {seed}: {s:?} is still up");
            assert!(
                s.destroyed || s.ends == 1 || s.ended_by_us,
                "seed {seed}: {s:?} never ended"
            );
            w.m[side].destroy(w.now, *id);
        }
        assert_eq!(w.m[side].usage().connections, 0, "seed {seed}");
        assert_eq!(w.m[side].next_timeout(), None, "seed {seed}");
        // There was an answer to everything in the end, except to what was said but once to a peer that had not shown
        // that it hears.
        let c = w.m[side].counters();
        assert!(c.timeouts <= c.withheld, "seed {seed}: {c:?}");
    }
    (c.next_pair, c.unheard.len())
}

#[test]
fn both_sides_agree_in_the_end() {
    let (mut pairs, mut unheard) = (0, 0);
    for seed in 0..1500 {
        let (all, some) = run(seed);
        (pairs, unheard) = (pairs + all as usize, unheard + some);
    }
    assert!(unheard * 100 < pairs, "{unheard} of {pairs}");
}

/// A single client connects to a busy server and disconnects for ever: nothing may pile up.
#[test]
fn nothing_piles_up() {
    let mut w = World::new(3, |guid| CmConfig {
        max_lingering: 8,
        ..config(guid)
    });
    w.m[1].listen(None, PORT, 4).unwrap();
    for i in 0..200 {
        let args = ConnectArgs::new(
            SocketAddr::new(CLIENT, 0),
            SocketAddr::new(SERVER, PORT),
            Qpn::new(0x100 + i),
            Psn::new(i),
            Mtu::B1024,
        );
        let c = w.m[0].connect(w.now, &args).unwrap();
        w.settle();
        let Some(Event::Request { conn: s, .. }) = w.m[1].poll_event() else {
            panic!("no request")
        };
        w.m[1]
            .accept(
                w.now,
                s,
                &AcceptArgs::new(Qpn::new(0x200), Psn::new(0), ConnParams::default()),
            )
            .unwrap();
        w.settle();
        let Some(Event::Reply { .. }) = w.m[0].poll_event() else {
            panic!("no reply")
        };
        w.m[0].qp_ready(w.now, c).unwrap();
        w.settle();
        w.m[1].destroy(w.now, s);
        w.settle();
        w.m[0].destroy(w.now, c);
        w.settle();
        assert!(w.m.iter().all(|m: &Manager| m.usage().connections <= 9));
        // Queue pair 0x200 is used again at once.
        assert_eq!(w.m[0].counters().stale, 0);
    }
}
