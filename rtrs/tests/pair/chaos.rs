//! Sessions that open, lose paths, devices and requests, and close at any moment.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use roce_bth::Qpn;
use roce_verbs::{
    QpAttr, QpState,
    provider::{DeviceIx, Event, Provider as _, QpId},
};
use rtrs::{
    Direction,
    client::{ConType, Output, PathCommand, PathId, PathNews, Policy, Submission, state::PathState},
};

use crate::{
    host::KeyMode,
    hosts::{Pair, addresses},
    server,
};

impl Pair {
    /// A turn of each host, and one trip of what is on the wire.
    fn round(&mut self) -> bool {
        let mut moved = self.client_turn();
        moved |= self.server_turn();
        moved | self.carry()
    }

    fn ask_close(&mut self) {
        let (session, client) = (self.session(), &mut self.client);
        self.near.with(self.now, |cx| client.close(cx, session));
    }

    /// One of the client's queue pairs fails, if one is connected.
    fn break_one(&mut self) {
        let (now, fabric) = (self.now, &mut self.near.fabric);
        let ids = (0..16).flat_map(|slot| (0..200).map(move |generation| QpId(generation << QpId::SLOT_BITS | slot)));
        let mut qpns: Vec<Qpn> = ids.filter_map(|id| fabric.qpn(id)).collect();
        qpns.reverse();
        let failed = QpAttr {
            state: Some(QpState::Err),
            ..QpAttr::default()
        };
        let _any = fabric.ports().all().any(|port| {
            let connected = qpns.iter().find(|qpn| port.qp_state(**qpn) == Some(QpState::Rts));
            connected.is_some_and(|qpn| port.modify_qp(now, *qpn, &failed).is_ok())
        });
    }

    fn remove_device(&mut self, device: DeviceIx) {
        let client = &mut self.client;
        self.near
            .with(self.now, |cx| client.event(cx, &Event::DeviceRemoved(device)));
    }
}

/// Between any two moments of opening and closing.
#[test]
fn closing_crosses_with_everything_that_opens_a_session() {
    for after in 0..40 {
        let mut pair = Pair::new(KeyMode::Instant, server(true));
        pair.ask_open(|config| config.connections = 3);
        for _ in 0..after {
            pair.round();
        }
        pair.ask_close();
        pair.settle();
        let told = std::mem::take(&mut pair.told);
        assert!(
            matches!(told[..], [Output::Closed(_)] | [Output::Opened(..), Output::Closed(_)]),
            "after {after} rounds: {told:?}"
        );
        pair.assert_empty();
    }
}

/// As with hardware that is taken away: nothing of the session stays on it, and its path comes back when there is a device again.
#[test]
fn a_path_whose_device_is_gone_comes_back_by_another_try() {
    for keys in KeyMode::ALL {
        let mut pair = Pair::over(2, keys, server(true));
        pair.open_ways(2, |config| config.policy = Policy::RoundRobin);
        let objects = |pair: &Pair| {
            let usage = pair.near.usage();
            (usage.pds, usage.qps, usage.cqs)
        };
        let before = objects(&pair);
        pair.remove_device(DeviceIx(1));
        pair.pass(Duration::from_millis(100));
        assert_eq!(pair.states(), [PathState::Connected, PathState::Reconnecting]);
        assert_eq!(pair.near.usage().pds, 1, "nothing is left on the device");
        // Buffers of a size that there were none of are not registered there.
        pair.store(0, 12_000);
        pair.request(Direction::Write, 0, Some(&[7; 12_000]), 12_000).0.unwrap();
        pair.pass(Duration::from_secs(30));
        assert_eq!(pair.states(), [PathState::Connected; 2]);
        assert_eq!(objects(&pair), before);
        for _ in 0..2 {
            let (result, back) = pair.request(Direction::Read, 0, None, 12_000);
            assert!(result.is_ok() && back == [7; 12_000]);
        }
        assert!(pair.told.is_empty(), "a path was up all the time");
        pair.close();
        pair.assert_empty();
    }
}

#[test]
fn each_io_connection_carries_requests() {
    for connections in [1, 3, 5] {
        let mut pair = Pair::new(KeyMode::Instant, server(true));
        pair.open(|config| config.connections = connections);
        assert_eq!(pair.near.usage().qps, usize::from(connections) + 1);
        pair.store(0, 512);
        for tag in 0..10 {
            let data = pair.buffer(512);
            let (con, direction) = (ConType::Io(tag as usize), Direction::Read);
            let header = [0].into_iter().collect();
            let request = Submission {
                tag,
                con,
                direction,
                header,
                data,
            };
            pair.submit(request);
        }
        pair.settle();
        pair.assert_done(0..10);
        pair.close();
        pair.assert_empty();
    }
}

/// Events of a session that its user has seen so far.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Seen {
    Nothing,
    Open,
    Down,
    Over,
}

impl Seen {
    fn meet(self, output: &Output) -> Self {
        match (self, output) {
            (Self::Nothing, Output::Opened(..)) | (Self::Down, Output::Up(..)) => Self::Open,
            (Self::Open, Output::Down(..)) => Self::Down,
            (Self::Nothing, Output::OpenFailed(..)) => Self::Over,
            (Self::Nothing | Self::Open | Self::Down, Output::Closed(_)) => Self::Over,
            (seen, output) => panic!("{output:?} when {seen:?}"),
        }
    }
}

/// A session with which everything happens at any time.
struct Chaos {
    pair: Pair,
    rng: u64,
    seen: Seen,
    /// Requests that have not ended.
    in_flight: BTreeSet<u64>,
    next: u64,
    /// Commands that have not ended.
    asked: Vec<(PathId, PathCommand)>,
    /// How often what was reported.
    told: BTreeMap<&'static str, usize>,
}

impl Chaos {
    fn new(seed: u64) -> Self {
        let keys = KeyMode::ALL[seed as usize % KeyMode::ALL.len()];
        let devices = 1 + (seed / 7 % 3) as usize;
        let mut pair = Pair::over(devices, keys, server((seed / 12).is_multiple_of(2)));
        let reconnects = (seed / 24 % 3) as u32;
        let paths = pair.ways(1 + (seed / 72 % 3) as usize);
        pair.ask_open(|config| {
            config.policy = Policy::ALL[seed as usize % 3];
            config.paths = paths;
            config.connect_any = seed.is_multiple_of(5);
            config.connections = 1 + (seed / 4 % 3) as u16 * 2;
            config.max_reconnects = reconnects;
            config.connect_timeout = Duration::from_secs(10);
            config.reconnect_delay = Duration::from_secs(1);
        });
        pair.store(0, 512);
        Self {
            pair,
            rng: seed,
            seen: Seen::Nothing,
            in_flight: BTreeSet::new(),
            next: 0,
            asked: Vec::new(),
            told: BTreeMap::new(),
        }
    }

    /// A random number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        self.rng = self
            .rng
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.rng >> 33) % n
    }

    fn submit(&mut self) {
        let (session, client) = (self.pair.session(), &mut self.pair.client);
        let taken = self
            .pair
            .near
            .with(self.pair.now, |cx| client.take_buffer(cx, session, 512));
        let Ok(data) = taken else { return };
        let tag = self.next;
        self.next += 1;
        let direction = [Direction::Read, Direction::Write][tag as usize % 2];
        let request = Submission {
            tag,
            con: ConType::Io(tag as usize),
            direction,
            header: [0].into_iter().collect(),
            data: Some(data),
        };
        self.pair.submit(request);
        self.in_flight.insert(tag);
    }

    fn look(&mut self) {
        for (path, news) in std::mem::take(&mut self.pair.news) {
            match news {
                PathNews::Done(command, result) => {
                    self.count(if result.is_ok() { "command" } else { "no command" });
                    let at = self.asked.iter().position(|asked| *asked == (path, command));
                    self.asked
                        .remove(at.unwrap_or_else(|| panic!("{command:?} of {path:?} was not asked for")));
                }
                PathNews::TookOver(_) => self.count("taken over"),
                PathNews::Up { again: true } => self.count("path up again"),
                _ => {}
            }
        }
        for (tag, result, buffer) in std::mem::take(&mut self.pair.done) {
            self.count(if result.is_ok() { "done" } else { "failed" });
            assert!(self.in_flight.remove(&tag), "{tag} ends");
            self.pair.give(buffer);
        }
        for output in std::mem::take(&mut self.pair.told) {
            self.seen = self.seen.meet(&output);
            self.count(match output {
                Output::Opened(..) => "opened",
                Output::OpenFailed(..) => "not opened",
                Output::Down(..) => "down",
                Output::Up(..) => "up",
                _ => "closed",
            });
            if self.seen == Seen::Over {
                assert_eq!(self.pair.near.usage(), self.pair.empty[0], "it is over");
            }
        }
    }

    /// Asks something for a path; what it may not be asked is refused.
    fn command(&mut self) {
        let session = self.pair.session();
        let way = self.pair.ways(3)[self.below(3) as usize];
        let policy = Policy::ALL[self.below(3) as usize];
        let paths = self.pair.client.paths(session);
        let which = self.below(paths.len().max(1) as u64) as usize;
        let path = paths.get(which).map(|path| path.id);
        let command = match self.below(5) {
            0 => PathCommand::Remove,
            1 => PathCommand::Disconnect,
            2 | 3 => PathCommand::Reconnect,
            _ => {
                let client = &mut self.pair.client;
                let added = self.pair.near.with(self.pair.now, |cx| {
                    // An error says that there is no session at the moment.
                    let _ = client.set_policy(cx, session, policy);
                    client.add_path(cx, session, way)
                });
                self.asked.extend(added.map(|path| (path, PathCommand::Add)));
                return;
            }
        };
        let Some(path) = path else { return };
        let client = &mut self.pair.client;
        let taken = self
            .pair
            .near
            .with(self.pair.now, |cx| client.path_command(cx, session, path, command));
        if taken.is_ok() {
            self.asked.push((path, command));
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.told.entry(what).or_default() += 1;
    }

    fn server_closes_all(&mut self) {
        let keys: Vec<_> = self.pair.server.sessions().iter().map(|s| s.session).collect();
        let server = &mut self.pair.server;
        for key in keys {
            self.pair.far.with(self.pair.now, |cx| server.close_session(cx, key));
        }
    }

    fn act(&mut self) {
        match self.below(400) {
            0..120 => self.submit(),
            120..122 => self.pair.break_one(),
            122 => self.server_closes_all(),
            123 => self.pair.ask_close(),
            124..126 => self.pair.cut = true,
            126..136 => self.pair.cut = false,
            136 => self.pair.remove_device(DeviceIx(0)),
            140..144 => self.pair.hold = true,
            144..150 => self.pair.release(),
            150..155 => {
                let ms = self.below(8000);
                self.pair.pass(Duration::from_millis(ms));
            }
            155..159 => {
                // One of the client's addresses can't be reached.
                let ways = addresses(1);
                let way = self.below(ways.len() as u64) as usize;
                self.pair.cut_off.push(ways[way]);
            }
            159..162 => self.pair.cut_off.clear(),
            162..168 => self.command(),
            _ => drop(self.pair.round()),
        }
        self.look();
    }

    /// Everything comes back.
    fn end(mut self, seed: u64) -> BTreeMap<&'static str, usize> {
        (self.pair.cut, self.pair.hold) = (false, false);
        self.pair.cut_off.clear();
        self.pair.settle();
        self.pair.release();
        self.look();
        self.pair.ask_close();
        self.pair.pass(Duration::from_secs(60));
        self.look();
        assert_eq!(self.seen, Seen::Over, "seed {seed}");
        assert!(self.in_flight.is_empty(), "seed {seed}");
        assert_eq!(self.asked, [], "seed {seed}");
        self.pair.release();
        self.pair.assert_empty();
        self.told
    }
}

#[test]
fn whatever_happens_every_request_ends_once_and_nothing_is_left() {
    let mut told: BTreeMap<&str, usize> = BTreeMap::new();
    for seed in 0..432 {
        let mut chaos = Chaos::new(seed);
        for _ in 0..600 {
            chaos.act();
        }
        for (what, count) in chaos.end(seed) {
            *told.entry(what).or_default() += count;
        }
    }
    // It is not always the same that happens.
    for what in [
        "opened",
        "not opened",
        "down",
        "up",
        "closed",
        "done",
        "failed",
        "command",
        "no command",
        "taken over",
        "path up again",
    ] {
        let count = told.get(what).copied().unwrap_or(0);
        assert!(count >= 20, "{what}: {told:?}");
    }
}
