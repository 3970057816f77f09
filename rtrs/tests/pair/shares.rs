//! Sessions in shares.

use core::time::Duration;
use std::collections::BTreeMap;

use roce_local::Usage;
use roce_verbs::provider::{DeviceIx, Event};
use rtrs::{
    Direction, Error, IoError, PathError,
    client::{
        Client, ConType, Output, PathCommand, PathId, PathNews, Policy, SessionConfig, Submission, state::PathState,
    },
    server::request,
};

use crate::{
    hosts::{KeyMode, addresses},
    server,
    spread::Spread,
};

#[test]
fn every_share_has_permits_and_connections_of_its_own() {
    for (shares, connections, qps) in [(2, 1, vec![2, 1]), (3, 3, vec![2, 1, 1]), (3, 7, vec![4, 2, 2])] {
        let mut spread = Spread::new(shares, KeyMode::Instant, server(true), 1);
        let infos = spread.open(|config| config.connections = connections);
        let depths: Vec<u32> = infos.iter().map(|info| info.queue_depth).collect();
        let expected = if shares == 2 { vec![8, 8] } else { vec![5, 5, 6] };
        assert_eq!(depths, expected);
        assert!(
            infos
                .iter()
                .all(|i| i.max_io_size == infos[0].max_io_size && i.new_rkeys)
        );
        let made: Vec<usize> = spread.usage().iter().map(|usage| usage.qps).collect();
        assert_eq!(made, qps, "{connections} connections asked for");
        spread.close(0);
        spread.assert_empty();
    }
}

#[test]
fn data_goes_over_and_back_at_every_share() {
    for keys in KeyMode::ALL {
        for always_invalidate in [true, false] {
            for invalidate_reads in [true, false] {
                let mut spread = Spread::new(3, keys, server(always_invalidate), 2);
                spread.open(|config| {
                    config.invalidate_reads = invalidate_reads;
                    config.connections = 5;
                });
                for len in [1, 512, 4096, 12 << 10] {
                    for share in spread.shares() {
                        let bytes: Vec<u8> = (0..len).map(|b| (b * 7 + usize::from(share)) as u8).collect();
                        spread.exchange(share, &bytes);
                    }
                }
                spread.close(0);
                spread.assert_empty();
            }
        }
    }
}

#[test]
fn each_share_has_as_many_requests_under_way_as_permits() {
    let mut spread = Spread::new(3, KeyMode::Instant, server(true), 3);
    spread.open(|config| config.buffer_bytes = Some(12 << 20));
    let session = spread.pair.session();
    for share in spread.shares() {
        let limit = spread.with(share, |client, _| client.buffers(session).unwrap().limit());
        assert_eq!(limit, 4 << 20, "all may have 12 MiB");
    }
    spread.pair.hold = true;
    for share in spread.shares() {
        spread.pair.store(share.into(), 512);
        for tag in 0..40 {
            let buffer = spread.buffer(share, 512);
            let direction = [Direction::Read, Direction::Write][tag as usize % 2];
            spread.begin(share, tag, direction, tag as usize, buffer);
        }
        spread.settle();
        let held = spread.pair.held.len();
        assert_eq!(held, [5, 10, 16][usize::from(share)]);
        let session = spread.pair.session();
        let held = spread.with(share, |client, _| client.permits(session));
        assert_eq!(held, [5, 5, 6][usize::from(share)]);
    }
    spread.release();
    spread.settle();
    for share in spread.shares() {
        let mut tags = Vec::new();
        for (tag, result, buffer) in spread.done(share) {
            result.unwrap();
            spread.give(share, buffer);
            tags.push(tag);
        }
        tags.sort_unstable();
        assert_eq!(tags, (0..40).collect::<Vec<_>>());
    }
    spread.close(2);
    spread.assert_empty();
}

/// Submits a request of each share, which the server holds; their tags are the shares' numbers.
fn hold_one_each(spread: &mut Spread) {
    spread.pair.hold = true;
    for share in spread.shares() {
        let buffer = spread.buffer(share, 512);
        spread.begin(share, share.into(), Direction::Read, 0, buffer);
    }
    spread.settle();
    assert_eq!(spread.pair.held.len(), spread.shares().len());
}

/// The path was lost: every share has ended its request, and says why.
fn all_lost(spread: &mut Spread) {
    for share in spread.shares() {
        let mut done = spread.done(share);
        assert!(
            matches!(done[..], [(tag, Err(IoError::Path(_)), Some(_))] if tag == u64::from(share)),
            "share {share}: {done:?}"
        );
        spread.give(share, done.remove(0).2);
    }
}

#[test]
fn a_connection_that_is_lost_at_one_share_is_the_end_of_the_path_at_all() {
    for keys in KeyMode::ALL {
        for at in 0..3 {
            let mut spread = Spread::new(3, keys, server(true), 4);
            spread.open(|_| {});
            hold_one_each(&mut spread);
            assert!(spread.break_one(at));
            // A queue pair that fails by itself is given time for an explanation.
            spread.pass(Duration::from_secs(3));
            all_lost(&mut spread);
            for share in spread.shares() {
                let told = spread.told(share);
                // Others may hear it from the server before they have the letter.
                let why = match &told[..] {
                    [Output::Down(_, why)] => why,
                    told => panic!("lost at {at}, share {share}: {told:?}"),
                };
                assert!(share != at || matches!(why, PathError::Flushed), "lost at {at}: {why}");
            }
            spread.release();
            spread.close(at);
            spread.assert_empty();
        }
    }
}

#[test]
fn a_share_that_can_not_reach_the_server_ends_the_path() {
    for at in 0..3 {
        let mut spread = Spread::new(3, KeyMode::Instant, server(true), 5);
        spread.open(|_| {});
        spread.cut.insert(at);
        let buffer = spread.buffer(at, 512);
        spread.begin(at, 1, Direction::Write, 0, buffer);
        spread.pass(Duration::from_secs(30));
        let mut done = spread.done(at);
        assert!(matches!(done[..], [(1, Err(IoError::Path(_)), _)]), "{done:?}");
        spread.give(at, done.remove(0).2);
        for share in spread.shares() {
            let told = spread.told(share);
            assert!(matches!(told[..], [Output::Down(..)]), "share {share}: {told:?}");
        }
        spread.close(0);
        spread.assert_empty();
    }
}

#[test]
fn a_path_that_was_lost_is_connected_again_by_all_shares() {
    for at in 0..3 {
        let mut spread = Spread::new(3, KeyMode::Queued, server(true), 6);
        spread.open(|config| config.max_reconnects = 5);
        for round in 0..3 {
            hold_one_each(&mut spread);
            assert!(spread.break_one(at));
            spread.pass(Duration::from_secs(3));
            all_lost(&mut spread);
            spread.release();
            spread.pass(Duration::from_secs(60));
            for share in spread.shares() {
                let told = spread.told(share);
                assert!(
                    matches!(told[..], [Output::Down(..), Output::Up(..)]),
                    "round {round}, lost at {at}, share {share}: {told:?}"
                );
                spread.exchange(share, &[7; 3000]);
            }
        }
        let all = (1..=4).flat_map(|attempt| (0..4).map(move |cid| (attempt, cid, 4)));
        assert!(spread.asked.iter().copied().eq(all), "{:?}", spread.asked);
        spread.close(0);
        spread.assert_empty();
    }
}

#[test]
fn the_server_closes_and_requests_end_at_every_share() {
    let mut spread = Spread::new(4, KeyMode::Instant, server(false), 7);
    spread.open(|_| {});
    hold_one_each(&mut spread);
    spread.server_closes();
    spread.settle();
    all_lost(&mut spread);
    spread.release();
    spread.settle();
    let closed = |o: &request::Output| matches!(o, request::Output::SessionClosed { .. });
    assert!(spread.pair.server_told.iter().any(closed));
    for share in spread.shares() {
        assert!(matches!(spread.told(share)[..], [Output::Down(..)]));
    }
    spread.close(3);
    spread.assert_empty();
}

#[test]
fn an_idle_session_lives_by_the_heartbeats_of_its_first_share() {
    let mut spread = Spread::new(3, KeyMode::Instant, server(true), 8);
    spread.open(|_| {});
    spread.pass(Duration::from_secs(300));
    for share in spread.shares() {
        let told = spread.told(share);
        assert!(told.is_empty(), "share {share}: {told:?}");
        spread.exchange(share, &[1; 100]);
    }
    spread.close(1);
    spread.assert_empty();
}

#[test]
fn a_silent_server_is_given_up_at_every_share() {
    let mut spread = Spread::new(2, KeyMode::Instant, server(true), 9);
    spread.open(|_| {});
    spread.pair.deaf = true;
    let patience = SessionConfig::new("x", spread.pair.path()).heartbeat.patience();
    spread.pass(patience + Duration::from_secs(6));
    for share in spread.shares() {
        let told = spread.told(share);
        assert!(
            matches!(told[..], [Output::Down(_, PathError::HeartbeatLost(_))]),
            "share {share}: {told:?}"
        );
    }
}

#[test]
fn a_server_that_takes_fewer_requests_than_there_are_shares_is_not_connected() {
    let config = rtrs::server::ServerConfig {
        queue_depth: 2,
        ..server(true)
    };
    let mut spread = Spread::new(3, KeyMode::Instant, config, 10);
    spread.pair.ask_open(|_| {});
    spread.settle();
    spread.pass(Duration::from_secs(5));
    match &spread.told(0)[..] {
        [Output::OpenFailed(_, error)] => {
            let text = error.to_string();
            assert!(
                text.contains("over 3 loops") && text.contains("takes 2 at a time"),
                "{text}"
            );
        }
        told => panic!("{told:?}"),
    }
    for share in 1..3 {
        assert!(matches!(spread.told(share)[..], [Output::OpenFailed(..)]));
    }
    spread.assert_empty();
}

#[test]
fn nobody_listens_and_every_share_hears_of_it() {
    let mut spread = Spread::new(3, KeyMode::Instant, server(true), 11);
    spread.pair.ask_open(|config| config.paths[0].dst.set_port(9));
    spread.settle();
    for share in spread.shares() {
        match &spread.told(share)[..] {
            [Output::OpenFailed(_, error)] => assert!(error.to_string().contains("nobody listens there"), "{error}"),
            told => panic!("share {share}: {told:?}"),
        }
    }
    spread.assert_empty();
}

#[test]
fn a_share_that_can_not_connect_is_why_the_session_does_not_open() {
    for at in 1..3 {
        let mut spread = Spread::new(3, KeyMode::Instant, server(true), 12);
        spread.cut.insert(at);
        spread
            .pair
            .ask_open(|config| config.connect_timeout = Duration::from_secs(5));
        // Long before the server gives it up.
        spread.pass(Duration::from_secs(10));
        for share in spread.shares() {
            let told = spread.told(share);
            match &told[..] {
                [Output::OpenFailed(_, Error::Unreachable(_))] if share == 0 => {}
                [Output::OpenFailed(..)] if share > 0 => {}
                told => panic!("share {share}: {told:?}"),
            }
        }
        spread.assert_empty();
    }
}

#[test]
fn user_messages_and_new_sessions_belong_to_the_first_share() {
    let mut spread = Spread::new(2, KeyMode::Instant, server(true), 13);
    spread.open(|_| {});
    let message = || Submission {
        tag: 5,
        con: ConType::Admin,
        direction: Direction::Write,
        header: [0].into_iter().collect(),
        data: None,
    };
    let (back, error) = spread.submit(1, message()).unwrap_err();
    assert!(matches!(error, IoError::NoService) && back.tag == 5, "{error:?}");
    spread.pair.store(0, 0);
    spread.submit(0, message()).unwrap();
    spread.settle();
    assert!(matches!(spread.done(0)[..], [(5, Ok(()), None)]));
    let config = SessionConfig::new("other", spread.pair.path());
    let refused = spread.with(1, |client, cx| client.open(cx, config));
    assert!(matches!(refused, Err(Error::Config(_))), "{refused:?}");
    assert!(Client::share(2, 2).is_err() && Client::share(0, 0).is_err());
    spread.close(1);
    spread.assert_empty();
}

/// Between any two moments of opening and closing.
#[test]
fn closing_crosses_with_everything_that_opens_a_session() {
    for at in 0..3 {
        for after in 0..40 {
            let mut spread = Spread::new(3, KeyMode::Instant, server(true), 14 + after);
            spread.pair.ask_open(|_| {});
            for _ in 0..after {
                spread.round();
            }
            spread.ask_close(at);
            spread.settle();
            let mut closed = Vec::new();
            for share in spread.shares() {
                let told = spread.told(share);
                closed.push(told.last().is_some_and(|o| matches!(o, Output::Closed(_))));
                assert!(
                    matches!(
                        told[..],
                        [] | [Output::Closed(_)]
                            | [Output::Opened(..)]
                            | [Output::Opened(..), Output::Closed(_)]
                            | [Output::Opened(..), Output::Down(..), Output::Closed(_)]
                    ),
                    "after {after} rounds, share {share}: {told:?}"
                );
            }
            // Who does not know of the session yet can't close it.
            assert!(closed == [true; 3] || (closed == [false; 3] && at > 0), "{closed:?}");
            if !closed[0] {
                spread.close(0);
            }
            spread.assert_empty();
        }
    }
}

/// The information comes to home, and a share loses its connection before it has heard that the path is up.
#[test]
fn a_path_may_be_lost_at_a_share_that_does_not_know_yet_that_it_is_up() {
    let mut spread = Spread::new(2, KeyMode::Instant, server(true), 15);
    spread.pair.ask_open(|config| config.max_reconnects = 3);
    while !spread.pair.told.iter().any(|o| matches!(o, Output::Opened(..))) {
        spread.round();
    }
    spread.hold_mail = true;
    assert!(spread.break_one(1));
    spread.pass(Duration::from_secs(4));
    spread.hold_mail = false;
    spread.pass(Duration::from_secs(60));
    let told = spread.told(0);
    assert!(
        matches!(told[..], [Output::Opened(..), Output::Down(..), Output::Up(..)]),
        "{told:?}"
    );
    let told = spread.told(1);
    assert!(matches!(told[..], [Output::Opened(..)]), "{told:?}");
    for share in spread.shares() {
        spread.exchange(share, &[3; 5000]);
    }
    spread.close(0);
    spread.assert_empty();
}

#[test]
fn the_device_goes_at_a_share() {
    for at in 0..3 {
        let mut spread = Spread::new(3, KeyMode::Instant, server(true), 16);
        spread.open(|_| {});
        hold_one_each(&mut spread);
        spread.with(at, |client, cx| client.event(cx, &Event::DeviceRemoved(DeviceIx(0))));
        spread.pass(Duration::from_secs(3));
        all_lost(&mut spread);
        for share in spread.shares() {
            let told = spread.told(share);
            assert!(
                matches!(told[..], [Output::Down(..)]),
                "gone at {at}, share {share}: {told:?}"
            );
        }
        spread.release();
        spread.close(0);
        spread.assert_empty();
    }
}

/// A share may still have connections of the last attempt.
#[test]
fn no_attempt_begins_before_all_shares_are_done_with_the_last() {
    let mut spread = Spread::new(3, KeyMode::Instant, server(true), 17);
    spread.open(|config| config.max_reconnects = 1);
    spread.hold_mail = true;
    assert!(spread.break_one(0));
    spread.pass(Duration::from_secs(100));
    assert!(matches!(spread.told(0)[..], [Output::Down(..)]));
    assert!(
        spread.asked.iter().all(|(attempt, ..)| *attempt == 1),
        "{:?}",
        spread.asked
    );
    spread.hold_mail = false;
    spread.pass(Duration::from_secs(60));
    assert!(matches!(spread.told(0)[..], [Output::Up(..)]));
    for share in spread.shares() {
        spread.exchange(share, &[9; 700]);
        spread.told(share);
    }
    spread.close(0);
    spread.assert_empty();
}

/// Three shares with two devices each, and a path through either to another of the server's.
fn over_two_devices(keys: KeyMode, seed: u64) -> Spread {
    let mut spread = Spread::over(2, 3, keys, server(true), seed);
    let paths = spread.pair.ways(2);
    spread.open(|config| {
        config.paths = paths;
        config.policy = Policy::RoundRobin;
        config.max_reconnects = SessionConfig::FOREVER;
    });
    spread
}

fn states(spread: &Spread) -> Vec<PathState> {
    let session = spread.pair.session();
    let paths = spread.pair.client.paths(session);
    paths.iter().map(|path| path.state).collect()
}

#[test]
fn every_share_uses_every_device() {
    for keys in KeyMode::ALL {
        let mut spread = over_two_devices(keys, 18);
        let made: Vec<_> = spread.usage().iter().map(|u| (u.pds, u.qps)).collect();
        assert_eq!(
            made,
            [(2, 4), (2, 2), (2, 2)],
            "a domain on each device, a path through it"
        );
        for round in 0..4 {
            for share in spread.shares() {
                spread.exchange(share, &[round * 3 + share as u8; 3000]);
            }
        }
        let listing = spread.pair.server.listing();
        let came: Vec<_> = listing[0]
            .paths
            .iter()
            .map(|p| (p.device.0, p.rdma.writes, p.rdma.reads))
            .collect();
        // A write and a read each time, by turns.
        assert_eq!(came.iter().map(|(device, ..)| *device).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(
            came.iter().map(|(_, writes, reads)| writes + reads).collect::<Vec<_>>(),
            [12, 12]
        );
        spread.close(0);
        spread.assert_empty();
    }
}

#[test]
fn requests_at_every_share_go_by_the_other_device_when_one_is_cut_off() {
    for keys in KeyMode::ALL {
        for cut in [addresses(1)[1], addresses(2)[0]] {
            let mut spread = over_two_devices(keys, 19);
            spread.pair.hold = true;
            for share in spread.shares() {
                spread.pair.store(share.into(), 512);
                for tag in 0..4 {
                    let buffer = spread.buffer(share, 512);
                    let direction = [Direction::Read, Direction::Write][usize::from(tag > 1)];
                    spread.begin(share, tag, direction, 0, buffer);
                }
            }
            spread.settle();
            assert_eq!(spread.pair.held.len(), 12);
            spread.pair.cut_off = vec![cut];
            spread.pass(Duration::from_secs(60));
            let up = states(&spread).iter().filter(|s| **s == PathState::Connected).count();
            assert_eq!(up, 1, "{:?}", states(&spread));
            let took = spread
                .pair
                .news
                .iter()
                .any(|(_, news)| matches!(news, PathNews::TookOver(2)));
            assert!(took, "{:?}", spread.pair.news);
            spread.release();
            spread.pass(Duration::from_secs(1));
            // The copies that came by the other path were kept from the chunks until then.
            spread.release();
            spread.settle();
            for share in spread.shares() {
                let mut tags = Vec::new();
                for (tag, result, buffer) in spread.done(share) {
                    result.unwrap();
                    spread.give(share, buffer);
                    tags.push(tag);
                }
                tags.sort_unstable();
                assert_eq!(tags, [0, 1, 2, 3], "share {share}");
                assert!(spread.told(share).is_empty(), "a path was up all the time");
            }
            spread.pair.cut_off.clear();
            spread.pass(Duration::from_secs(120));
            assert_eq!(states(&spread), [PathState::Connected; 2]);
            for share in spread.shares() {
                spread.exchange(share, &[5; 100]);
            }
            spread.close(0);
            spread.assert_empty();
        }
    }
}

#[test]
fn a_device_that_goes_at_a_share_takes_no_path_of_the_other() {
    for at in 0..3 {
        let mut spread = over_two_devices(KeyMode::Instant, 20);
        spread.with(at, |client, cx| client.event(cx, &Event::DeviceRemoved(DeviceIx(1))));
        spread.pass(Duration::from_secs(3));
        assert_eq!(states(&spread)[0], PathState::Connected, "gone at {at}");
        let downs = spread
            .pair
            .news
            .iter()
            .filter(|(_, news)| matches!(news, PathNews::Down(_)));
        assert_eq!(downs.count(), 1, "gone at {at}: {:?}", spread.pair.news);
        for share in spread.shares() {
            assert!(spread.told(share).is_empty(), "gone at {at}, share {share}");
            spread.exchange(share, &[share as u8; 700]);
        }
        spread.close(0);
        spread.assert_empty();
    }
}

/// As with hardware that is taken away: nothing of the session stays on it, and its path comes back when there is a device again.
#[test]
fn a_path_whose_device_is_gone_comes_back_by_another_try() {
    for keys in KeyMode::ALL {
        let mut spread = over_two_devices(keys, 21);
        let before = spread.usage();
        for share in spread.shares() {
            spread.with(share, |client, cx| client.event(cx, &Event::DeviceRemoved(DeviceIx(1))));
        }
        spread.settle();
        spread.pass(Duration::from_millis(100));
        assert_eq!(states(&spread), [PathState::Connected, PathState::Reconnecting]);
        let domains: Vec<_> = spread.usage().iter().map(|usage| usage.pds).collect();
        assert_eq!(domains, [1; 3], "nothing is left on the device");
        for share in spread.shares() {
            // Buffers of a size that there were none of are not registered there.
            spread.exchange(share, &[share as u8; 12_000]);
        }
        spread.pass(Duration::from_secs(30));
        assert_eq!(states(&spread), [PathState::Connected; 2]);
        let objects = |usage: &[Usage]| usage.iter().map(|u| (u.pds, u.qps, u.cqs)).collect::<Vec<_>>();
        assert_eq!(objects(&spread.usage()), objects(&before));
        for share in spread.shares() {
            spread.exchange(share, &[share as u8; 700]);
            assert!(spread.told(share).is_empty(), "a path was up all the time");
        }
        spread.close(0);
        spread.assert_empty();
    }
}

/// What a share has told so far.
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
    spread: Spread,
    seen: Vec<Seen>,
    /// By share: requests that have not ended.
    under_way: Vec<BTreeMap<u64, ()>>,
    next: u64,
    /// Commands that have not ended.
    asked: Vec<(PathId, PathCommand)>,
    /// How often a share told what.
    told: BTreeMap<&'static str, usize>,
}

impl Chaos {
    fn new(seed: u64) -> Self {
        let keys = KeyMode::ALL[seed as usize % KeyMode::ALL.len()];
        let shares = 2 + (seed / 4 % 3) as u16;
        let devices = 1 + (seed / 7 % 3) as usize;
        let mut spread = Spread::over(devices, shares, keys, server((seed / 12).is_multiple_of(2)), seed);
        let reconnects = (seed / 24 % 3) as u32;
        let paths = spread.pair.ways(1 + (seed / 72 % 3) as usize);
        spread.pair.ask_open(|config| {
            config.policy = Policy::ALL[seed as usize % 3];
            config.paths = paths;
            config.connect_any = seed.is_multiple_of(5);
            config.connections = 5;
            config.max_reconnects = reconnects;
            config.connect_timeout = Duration::from_secs(10);
            config.reconnect_delay = Duration::from_secs(1);
        });
        for file in spread.shares() {
            spread.pair.store(file.into(), 512);
        }
        Self {
            seen: vec![Seen::Nothing; usize::from(shares)],
            under_way: vec![BTreeMap::new(); usize::from(shares)],
            spread,
            next: 0,
            asked: Vec::new(),
            told: BTreeMap::new(),
        }
    }

    fn submit(&mut self, share: u16) {
        let session = self.spread.pair.session();
        let taken = self
            .spread
            .with(share, |client, cx| client.take_buffer(cx, session, 512));
        let Ok(data) = taken else { return };
        let tag = self.next;
        self.next += 1;
        let direction = [Direction::Read, Direction::Write][tag as usize % 2];
        let request = Submission {
            tag,
            con: ConType::Io(tag as usize),
            direction,
            header: [share as u8].into_iter().collect(),
            data: Some(data),
        };
        match self.spread.submit(share, request) {
            Ok(()) => drop(self.under_way[usize::from(share)].insert(tag, ())),
            Err((back, _)) => self.spread.give(share, back.data),
        }
    }

    fn look(&mut self) {
        self.look_at_news();
        for share in self.spread.shares() {
            let at = usize::from(share);
            for (tag, result, buffer) in self.spread.done(share) {
                self.count(if result.is_ok() { "done" } else { "failed" });
                assert!(self.under_way[at].remove(&tag).is_some(), "{tag} ends at {share}");
                self.spread.give(share, buffer);
            }
            for output in self.spread.told(share) {
                self.seen[at] = self.seen[at].meet(&output);
                self.count(match output {
                    Output::Opened(..) => "opened",
                    Output::OpenFailed(..) => "not opened",
                    Output::Down(..) => "down",
                    Output::Up(..) => "up",
                    _ => "closed",
                });
            }
        }
    }

    /// One of our addresses can't be reached any more.
    fn cut_off(&mut self) {
        let ways = addresses(1);
        let way = self.spread.below(ways.len() as u64) as usize;
        self.spread.pair.cut_off.push(ways[way]);
    }

    /// Asks something for a path; what it may not be asked is refused.
    fn command(&mut self) {
        let session = self.spread.pair.session();
        let ways = self.spread.pair.ways(3);
        let way = ways[self.spread.below(3) as usize];
        let policy = Policy::ALL[self.spread.below(3) as usize];
        let paths = self.spread.pair.client.paths(session);
        let which = self.spread.below(paths.len().max(1) as u64) as usize;
        let path = paths.get(which).map(|path| path.id);
        let command = match self.spread.below(5) {
            0 => PathCommand::Remove,
            1 => PathCommand::Disconnect,
            2 | 3 => PathCommand::Reconnect,
            _ => {
                let added = self.spread.with(0, |client, cx| {
                    // An error says that there is no session at the moment.
                    let _ = client.set_policy(cx, session, policy);
                    client.add_path(cx, session, way)
                });
                self.asked.extend(added.map(|path| (path, PathCommand::Add)));
                return;
            }
        };
        let Some(path) = path else { return };
        let taken = self
            .spread
            .with(0, |client, cx| client.path_command(cx, session, path, command));
        if taken.is_ok() {
            self.asked.push((path, command));
        }
    }

    /// Every command ends once.
    fn look_at_news(&mut self) {
        for (path, news) in std::mem::take(&mut self.spread.pair.news) {
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
    }

    fn count(&mut self, what: &'static str) {
        *self.told.entry(what).or_default() += 1;
    }

    fn act(&mut self) {
        let shares = u64::from(self.spread.shares().end);
        let share = self.spread.below(shares) as u16;
        match self.spread.below(400) {
            0..120 => self.submit(share),
            120..122 => drop(self.spread.break_one(share)),
            122 => self.spread.server_closes(),
            123 => self.spread.ask_close(share),
            124..128 => drop(self.spread.cut.insert(share)),
            128..136 => self.spread.cut.clear(),
            136..140 => self.spread.hold_mail = !self.spread.hold_mail,
            140..144 => self.spread.pair.hold = true,
            155..159 => self.cut_off(),
            159..162 => self.spread.pair.cut_off.clear(),
            162..168 => self.command(),
            144..150 => self.spread.release(),
            150..155 => {
                let ms = self.spread.below(8000);
                self.spread.pass(Duration::from_millis(ms));
            }
            _ => drop(self.spread.round()),
        }
        self.look();
    }

    /// All comes back at every share.
    fn end(mut self, seed: u64) -> BTreeMap<&'static str, usize> {
        (self.spread.hold_mail, self.spread.pair.hold) = (false, false);
        self.spread.cut.clear();
        self.spread.pair.cut_off.clear();
        self.spread.settle();
        self.spread.release();
        self.look();
        self.spread.ask_close(0);
        self.spread.pass(Duration::from_secs(60));
        self.look();
        for share in self.spread.shares() {
            let at = usize::from(share);
            assert_eq!(self.seen[at], Seen::Over, "seed {seed}, share {share}");
            assert!(self.under_way[at].is_empty(), "seed {seed}, share {share}");
        }
        assert_eq!(self.asked, [], "seed {seed}");
        self.spread.release();
        self.spread.assert_empty();
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
