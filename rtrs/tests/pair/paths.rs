//! Sessions over several paths.

use core::{net::SocketAddr, time::Duration};

use roce_verbs::{
    AsyncEvent,
    provider::{DeviceIx, Event, Provider as _},
};
use rtrs::{
    Direction, Error, PathError,
    addr::PathAddr,
    client::{
        ConType, Output, PathCommand, PathId, PathNews, PathStatus, Policy, SessionConfig, Submission, state::PathState,
    },
};

use crate::{
    host::KeyMode,
    hosts::{Pair, addresses},
    server,
};

/// Longer than anything takes that is under way.
pub(crate) const LONG: Duration = Duration::from_secs(120);

impl Pair {
    /// A path for each of our addresses; to one of the server's, or if it has several devices, to another each.
    pub(crate) fn ways(&self, count: usize) -> Vec<PathAddr> {
        let one = self.far.fabric.devices().len() == 1;
        let to = |(src, dst)| PathAddr {
            src: Some(src),
            dst: match one {
                true => self.path().dst,
                false => SocketAddr::new(dst, self.path().dst.port()),
            },
        };
        let ways = addresses(1).into_iter().zip(addresses(2));
        ways.take(count).map(to).collect()
    }

    pub(crate) fn open_ways(&mut self, count: usize, change: impl FnOnce(&mut SessionConfig)) {
        let paths = self.ways(count);
        self.open(|config| {
            config.paths = paths;
            config.max_reconnects = SessionConfig::FOREVER;
            change(config);
        });
    }

    pub(crate) fn statuses(&self) -> Vec<PathStatus> {
        self.client.paths(self.session())
    }

    pub(crate) fn states(&self) -> Vec<PathState> {
        self.statuses().iter().map(|path| path.state).collect()
    }

    pub(crate) fn command(&mut self, path: PathId, command: PathCommand) -> Result<(), Error> {
        let (session, client) = (self.session(), &mut self.client);
        let taken = self
            .near
            .with(self.now, |cx| client.path_command(cx, session, path, command));
        self.client_turn();
        taken
    }

    pub(crate) fn add(&mut self, addr: PathAddr) -> Result<PathId, Error> {
        let (session, client) = (self.session(), &mut self.client);
        self.near.with(self.now, |cx| client.add_path(cx, session, addr))
    }

    /// How a command ended, of those that have.
    pub(crate) fn outcome(&mut self, of: PathCommand) -> Option<Result<(), Error>> {
        let at = self
            .news
            .iter()
            .position(|(_, news)| matches!(news, PathNews::Done(command, _) if *command == of))?;
        match self.news.remove(at).1 {
            PathNews::Done(_, result) => Some(result),
            _ => None,
        }
    }

    /// Sends requests, which the server holds.
    pub(crate) fn send(&mut self, tags: core::ops::Range<u64>, direction: Direction) {
        self.store(0, 512);
        for tag in tags {
            let data = self.buffer(512);
            self.submit(Submission {
                tag,
                con: ConType::Io(0),
                direction,
                header: [0].into_iter().collect(),
                data,
            });
        }
        self.settle();
    }

    /// All of these have ended well, once.
    pub(crate) fn assert_done(&mut self, tags: core::ops::Range<u64>) {
        let mut done = std::mem::take(&mut self.done);
        done.sort_by_key(|(tag, ..)| *tag);
        assert_eq!(
            done.iter().map(|(tag, ..)| *tag).collect::<Vec<_>>(),
            tags.collect::<Vec<_>>()
        );
        for (tag, result, buffer) in done {
            assert!(result.is_ok(), "{tag}: {result:?}");
            self.give(buffer);
        }
    }

    pub(crate) fn in_flight(&self) -> Vec<u32> {
        self.statuses().iter().map(|path| path.in_flight).collect()
    }
}

#[test]
fn each_policy_spreads_as_it_says() {
    for (policy, expected) in [
        (Policy::RoundRobin, [4, 4, 4]),
        (Policy::MinInflight, [4, 4, 4]),
        // They are equally far, or were not measured: the first.
        (Policy::MinLatency, [12, 0, 0]),
    ] {
        let mut pair = Pair::new(KeyMode::Instant, server(true));
        pair.open_ways(3, |config| config.policy = policy);
        assert_eq!(pair.states(), [PathState::Connected; 3]);
        assert_eq!(pair.server.sessions()[0].paths, 3);
        pair.hold = true;
        pair.send(0..12, Direction::Write);
        assert_eq!(pair.in_flight(), expected, "{policy}");
        pair.release();
        pair.assert_done(0..12);
        assert_eq!(pair.in_flight(), [0; 3]);
        let stats: Vec<_> = pair.statuses().iter().map(|path| path.stats.rdma.writes).collect();
        assert_eq!(stats, expected.map(u64::from));
        pair.close();
        pair.assert_empty();
    }
}

#[test]
fn a_policy_is_changed_while_requests_are_under_way() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |config| config.policy = Policy::MinLatency);
    pair.hold = true;
    pair.send(0..4, Direction::Read);
    assert_eq!(pair.in_flight(), [4, 0]);
    let (session, client) = (pair.session(), &mut pair.client);
    pair.near
        .with(pair.now, |cx| client.set_policy(cx, session, Policy::MinInflight))
        .unwrap();
    pair.send(4..8, Direction::Read);
    assert_eq!(pair.in_flight(), [4, 4]);
    pair.release();
    pair.assert_done(0..8);
    assert_eq!(pair.client.policy(session), Some(Policy::MinInflight));
}

#[test]
fn requests_of_a_lost_path_go_by_the_others_any_number_of_times() {
    for keys in KeyMode::ALL {
        for direction in [Direction::Write, Direction::Read] {
            let mut pair = Pair::new(keys, server(true));
            pair.open_ways(3, |config| config.policy = Policy::RoundRobin);
            pair.hold = true;
            pair.send(0..9, direction);
            assert_eq!(pair.in_flight(), [3; 3]);
            let ways = addresses(1);
            // What is lost with one path meets the next loss on another.
            pair.cut_off = vec![ways[1]];
            pair.pass(LONG);
            assert_eq!(pair.in_flight().iter().sum::<u32>(), 9);
            assert_eq!(pair.in_flight()[1], 0);
            pair.cut_off = vec![ways[1], ways[2]];
            pair.pass(LONG);
            assert_eq!(pair.in_flight(), [9, 0, 0]);
            assert!(pair.told.is_empty(), "{:?}", pair.told);
            pair.release();
            pair.settle();
            pair.assert_done(0..9);
            let stats: Vec<_> = pair.statuses().iter().map(|path| path.stats.failovers).collect();
            assert!(stats[0] >= 6 && stats[1] == 0, "{stats:?}");
            let took: u32 = pair
                .news
                .iter()
                .filter_map(|(_, news)| match news {
                    PathNews::TookOver(requests) => Some(*requests),
                    _ => None,
                })
                .sum();
            assert_eq!(u64::from(took), stats.iter().sum::<u64>());
            pair.cut_off.clear();
            pair.pass(LONG);
            assert_eq!(pair.states(), [PathState::Connected; 3], "all come back");
            pair.close();
            pair.assert_empty();
        }
    }
}

/// A path through each of three devices, on both sides.
#[test]
fn requests_of_a_lost_path_go_by_another_device() {
    for keys in KeyMode::ALL {
        for direction in [Direction::Write, Direction::Read] {
            let mut pair = Pair::over(3, keys, server(true));
            pair.open_ways(3, |config| config.policy = Policy::RoundRobin);
            let listing = pair.server.listing();
            let there: Vec<_> = listing[0].paths.iter().map(|path| path.device.0).collect();
            assert_eq!(there, [0, 1, 2]);
            let usage = [&pair.near, &pair.far].map(|host| host.fabric.usage().pds);
            assert_eq!(usage, [3, 3], "a protection domain on each");
            pair.hold = true;
            pair.send(0..9, direction);
            pair.cut_off = vec![addresses(2)[1]];
            pair.pass(LONG);
            assert_eq!((pair.in_flight().iter().sum::<u32>(), pair.in_flight()[1]), (9, 0));
            assert!(pair.told.is_empty(), "{:?}", pair.told);
            pair.release();
            pair.assert_done(0..9);
            pair.cut_off.clear();
            pair.pass(LONG);
            assert_eq!(pair.states(), [PathState::Connected; 3]);
            pair.send(9..18, direction);
            pair.assert_done(9..18);
            pair.close();
            pair.assert_empty();
        }
    }
}

#[test]
fn a_path_whose_port_goes_down_is_left_at_once_if_there_is_another() {
    let mut pair = Pair::over(2, KeyMode::Instant, server(true));
    pair.open_ways(2, |config| config.policy = Policy::RoundRobin);
    pair.hold = true;
    pair.send(0..8, Direction::Write);
    let down = |pair: &mut Pair, device: u16| {
        pair.cut_off.push(addresses(1)[usize::from(device)]);
        let (client, event) = (&mut pair.client, Event::Async(DeviceIx(device), AsyncEvent::PortError));
        pair.near.with(pair.now, |cx| client.event(cx, &event));
        pair.settle();
    };
    // No time passes.
    down(&mut pair, 1);
    assert!(pair.states()[0] == PathState::Connected && pair.states()[1] != PathState::Connected);
    let lost = |(_, news): &(_, PathNews)| matches!(news, PathNews::Down(PathError::PortDown));
    assert!(pair.news.iter().any(lost), "{:?}", pair.news);
    assert_eq!(pair.in_flight(), [8, 0]);
    // Nothing is gained by leaving the last one.
    down(&mut pair, 0);
    assert_eq!(pair.states()[0], PathState::Connected);
    pair.cut_off.clear();
    pair.release();
    pair.pass(LONG);
    pair.assert_done(0..8);
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    assert!(pair.told.is_empty(), "{:?}", pair.told);
    pair.close();
    pair.assert_empty();
}

/// There may be no end of paths from ever other addresses.
#[test]
fn what_a_session_has_on_a_device_goes_with_the_last_path_there() {
    for keys in KeyMode::ALL {
        let mut pair = Pair::over(3, keys, server(true));
        pair.open_ways(1, |config| config.policy = Policy::RoundRobin);
        let ways = pair.ways(3);
        pair.send(0..4, Direction::Write);
        pair.assert_done(0..4);
        let one = pair.near.usage();
        for next in [1, 2, 0, 1, 0] {
            let last = pair.statuses()[0].id;
            pair.add(ways[next]).unwrap();
            pair.pass(Duration::from_secs(1));
            assert!(matches!(pair.outcome(PathCommand::Add), Some(Ok(()))));
            assert_eq!(pair.near.usage().pds, one.pds + 1);
            // Those of the path that goes take the other, with keys of the other device.
            pair.hold = true;
            pair.send(0..8, Direction::Read);
            pair.command(last, PathCommand::Remove).unwrap();
            pair.pass(Duration::from_secs(3));
            assert!(matches!(pair.outcome(PathCommand::Remove), Some(Ok(()))));
            assert_eq!(pair.in_flight().iter().sum::<u32>(), 8);
            pair.release();
            pair.pass(Duration::from_secs(3));
            pair.assert_done(0..8);
            assert_eq!(pair.near.usage(), one, "{keys:?}");
        }
        // One that can't be connected leaves nothing behind either.
        let mut nowhere = ways[2];
        nowhere.dst.set_port(9);
        pair.add(nowhere).unwrap();
        pair.pass(Duration::from_secs(3));
        assert!(matches!(pair.outcome(PathCommand::Add), Some(Err(_))));
        assert_eq!(pair.near.usage(), one, "{keys:?}");
        pair.close();
        pair.assert_empty();
    }
}

#[test]
fn a_path_comes_back_and_carries_load_again() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |config| config.policy = Policy::RoundRobin);
    let before = pair.statuses();
    for round in 1..=20 {
        pair.cut_off = vec![addresses(1)[1]];
        pair.pass(LONG);
        assert!(pair.states()[0] == PathState::Connected && pair.states()[1] != PathState::Connected);
        pair.cut_off.clear();
        pair.pass(LONG);
        let now = pair.statuses();
        assert_eq!(now[1].state, PathState::Connected, "{:?}", pair.news);
        assert_eq!((now[1].id, now[1].uuid), (before[1].id, before[1].uuid));
        assert_eq!(now[1].stats.reconnects, round);
        assert!(now[1].stats.failed_reconnects > 0);
        assert_eq!(pair.server.sessions()[0].paths, 2);
    }
    pair.send(0..10, Direction::Write);
    pair.assert_done(0..10);
    let writes: Vec<_> = pair.statuses().iter().map(|path| path.stats.rdma.writes).collect();
    assert_eq!(writes, [5, 5]);
    assert!(pair.told.is_empty(), "a path was up all the time: {:?}", pair.told);
    pair.close();
    pair.assert_empty();
}

#[test]
fn without_any_path_requests_end_and_with_the_first_one_the_session_is_back() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |_| ());
    pair.hold = true;
    pair.send(0..4, Direction::Write);
    pair.cut = true;
    pair.pass(LONG);
    let done = std::mem::take(&mut pair.done);
    assert_eq!(done.len(), 4);
    for (_, result, buffer) in done {
        assert!(matches!(result, Err(rtrs::IoError::Path(_))), "{result:?}");
        pair.give(buffer);
    }
    assert!(matches!(pair.told[..], [Output::Down(..)]), "{:?}", pair.told);
    pair.cut = false;
    pair.release();
    pair.pass(LONG);
    assert!(
        matches!(pair.told[..], [Output::Down(..), Output::Up(..)]),
        "{:?}",
        pair.told
    );
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    pair.send(4..8, Direction::Write);
    pair.assert_done(4..8);
    pair.close();
    pair.assert_empty();
}

/// It has none of the session's devices open: its user has to know, though a path of the session seems to be up all the time.
#[test]
fn a_server_that_was_started_anew_is_not_taken_for_the_old_one() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(3, |config| config.reconnect_delay = Duration::from_millis(10));
    pair.cut_off = vec![addresses(1)[0]];
    pair.pass(LONG);
    assert!(pair.states()[0] != PathState::Connected && pair.states()[1] == PathState::Connected);
    pair.restart_server(KeyMode::Instant, server(true));
    pair.cut_off.clear();
    pair.pass(Duration::from_millis(500));
    assert_ne!(pair.states()[0], PathState::Connected, "beside those of the old server");
    pair.pass(LONG);
    let told = std::mem::take(&mut pair.told);
    assert!(matches!(told[..], [Output::Down(..), Output::Up(..)]), "{told:?}");
    assert_eq!(pair.states(), [PathState::Connected; 3], "{:?}", pair.news);
    assert_eq!(pair.server.sessions()[0].paths, 3);
    pair.send(0..6, Direction::Write);
    pair.assert_done(0..6);
    pair.close();
    pair.assert_empty();
}

/// The first is up with the server that was, while the other's request, to make the session, is still under way to the next one.
#[test]
fn a_request_that_comes_late_makes_no_second_session() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |_| ());
    pair.cut = true;
    pair.pass(LONG);
    pair.cut = false;
    pair.cut_off = vec![addresses(1)[1]];
    for path in pair.statuses() {
        pair.command(path.id, PathCommand::Reconnect).unwrap();
    }
    pair.settle();
    assert_eq!(pair.states(), [PathState::Connected, PathState::Connecting]);
    pair.restart_server(KeyMode::Instant, server(true));
    pair.cut_off.clear();
    pair.pass(LONG);
    let told = std::mem::take(&mut pair.told);
    assert!(
        matches!(
            told[..],
            [Output::Down(..), Output::Up(..), Output::Down(..), Output::Up(..)]
        ),
        "{told:?}"
    );
    assert_eq!(pair.states(), [PathState::Connected; 2], "{:?}", pair.news);
    let outcomes = [(); 2].map(|()| pair.outcome(PathCommand::Reconnect));
    let refused = |e: &Error| matches!(e, Error::Rejected { errno: Some(6), .. });
    assert!(
        matches!(&outcomes, [Some(Ok(())), Some(Err(e))] if refused(e)),
        "{outcomes:?}"
    );
    pair.close();
    pair.assert_empty();
}

#[test]
fn what_was_asked_for_paths_is_answered_before_the_session_ends() {
    for command in [PathCommand::Reconnect, PathCommand::Remove, PathCommand::Disconnect] {
        let mut pair = Pair::new(KeyMode::Instant, server(true));
        pair.open_ways(2, |_| ());
        for path in pair.statuses() {
            pair.command(path.id, command).unwrap();
        }
        pair.close();
        for _ in 0..2 {
            assert!(pair.outcome(command).is_some(), "{command:?}: {:?}", pair.news);
        }
        pair.assert_empty();
    }
}

#[test]
fn one_path_that_can_not_be_connected_fails_the_open_as_in_the_kernel() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    let mut paths = pair.ways(2);
    paths[1].dst.set_port(9);
    let error = pair.open_fails(|config| config.paths = paths);
    assert!(error.contains("refused"), "{error}");
    pair.assert_empty();
}

#[test]
fn with_any_path_the_session_opens_and_the_rest_follows() {
    for cut in [0, 1] {
        let mut pair = Pair::new(KeyMode::Instant, server(true));
        let paths = pair.ways(2);
        pair.cut_off = vec![addresses(1)[cut]];
        pair.ask_open(|config| {
            config.paths = paths;
            config.connect_any = true;
            config.max_reconnects = SessionConfig::FOREVER;
        });
        pair.pass(LONG);
        assert!(matches!(pair.told[..], [Output::Opened(..)]), "{:?}", pair.told);
        assert_eq!(pair.statuses()[1 - cut].state, PathState::Connected);
        assert_ne!(pair.statuses()[cut].state, PathState::Connected);
        pair.send(0..4, Direction::Write);
        pair.assert_done(0..4);
        pair.cut_off.clear();
        pair.pass(LONG);
        assert_eq!(pair.states(), [PathState::Connected; 2]);
        assert_eq!((pair.server.sessions().len(), pair.server.sessions()[0].paths), (1, 2));
        pair.told.clear();
        pair.close();
        pair.assert_empty();
    }
    // None.
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    let paths = pair.ways(2);
    pair.cut = true;
    pair.ask_open(|config| {
        config.paths = paths;
        config.connect_any = true;
    });
    pair.pass(LONG);
    assert!(matches!(pair.told[..], [Output::OpenFailed(..)]), "{:?}", pair.told);
}

#[test]
fn paths_come_and_go_while_requests_are_under_way() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(1, |config| config.policy = Policy::RoundRobin);
    pair.hold = true;
    pair.send(0..4, Direction::Write);
    let ways = pair.ways(3);
    assert!(matches!(pair.add(ways[0]), Err(Error::PathExists(_))), "it is there");
    let added = pair.add(ways[1]).unwrap();
    assert!(matches!(pair.command(added, PathCommand::Reconnect), Err(Error::Busy)));
    // The server asks whether the client knows of what is at work.
    pair.pass(Duration::from_secs(1));
    assert!(matches!(pair.outcome(PathCommand::Add), Some(Ok(()))));
    pair.send(4..8, Direction::Write);
    assert_eq!(pair.in_flight(), [6, 2]);
    // The first goes, with its requests.
    let first = pair.statuses()[0].id;
    pair.command(first, PathCommand::Remove).unwrap();
    pair.pass(Duration::from_secs(3));
    assert!(matches!(pair.outcome(PathCommand::Remove), Some(Ok(()))));
    assert_eq!(pair.in_flight(), [8]);
    assert!(matches!(
        pair.command(first, PathCommand::Reconnect),
        Err(Error::NoPath)
    ));
    // One that takes its place is another. The server lets it in when it is done with what came by the first.
    let third = pair.add(ways[2]).unwrap();
    pair.settle();
    assert!(third != first && third != added);
    assert!(pair.outcome(PathCommand::Add).is_none());
    pair.release();
    pair.settle();
    assert!(matches!(pair.outcome(PathCommand::Add), Some(Ok(()))));
    pair.assert_done(0..8);
    assert!(pair.told.is_empty(), "{:?}", pair.told);
    // One that can't be connected leaves nothing behind.
    let mut nowhere = ways[0];
    nowhere.dst.set_port(9);
    pair.add(nowhere).unwrap();
    pair.settle();
    pair.pass(Duration::from_secs(3));
    assert!(matches!(
        pair.outcome(PathCommand::Add),
        Some(Err(Error::Rejected { .. }))
    ));
    assert_eq!(pair.statuses().len(), 2);
    pair.close();
    pair.assert_empty();
}

#[test]
fn a_path_that_was_disconnected_stays_so_until_it_is_asked_for() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |config| config.policy = Policy::RoundRobin);
    let path = pair.statuses()[0].id;
    pair.hold = true;
    pair.send(0..4, Direction::Read);
    pair.command(path, PathCommand::Disconnect).unwrap();
    pair.pass(LONG);
    assert!(matches!(pair.outcome(PathCommand::Disconnect), Some(Ok(()))));
    assert_eq!(pair.states(), [PathState::Closed, PathState::Connected]);
    assert_eq!(pair.in_flight(), [0, 4]);
    pair.command(path, PathCommand::Disconnect).unwrap();
    assert!(matches!(pair.outcome(PathCommand::Disconnect), Some(Ok(()))), "it is");
    pair.release();
    pair.settle();
    pair.assert_done(0..4);
    pair.command(path, PathCommand::Reconnect).unwrap();
    pair.settle();
    pair.pass(Duration::from_secs(3));
    assert!(matches!(pair.outcome(PathCommand::Reconnect), Some(Ok(()))));
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    // The way is cut: the first attempt is told of, and others follow by themselves.
    pair.cut_off = vec![addresses(1)[0]];
    pair.command(path, PathCommand::Reconnect).unwrap();
    pair.pass(LONG);
    assert!(matches!(pair.outcome(PathCommand::Reconnect), Some(Err(_))));
    pair.cut_off.clear();
    pair.pass(LONG);
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    pair.close();
    pair.assert_empty();
}

#[test]
fn the_last_path_may_go_and_another_come() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(1, |_| ());
    let path = pair.statuses()[0].id;
    pair.command(path, PathCommand::Remove).unwrap();
    pair.pass(Duration::from_secs(3));
    assert!(matches!(pair.outcome(PathCommand::Remove), Some(Ok(()))));
    assert!(
        matches!(pair.told[..], [Output::Down(_, PathError::Closed)]),
        "{:?}",
        pair.told
    );
    assert!(pair.statuses().is_empty() && pair.server.sessions().is_empty());
    let data = pair.client.state(pair.session());
    assert!(data.is_err());
    let way = pair.ways(2)[1];
    pair.add(way).unwrap();
    pair.settle();
    assert!(matches!(pair.told[..], [_, Output::Up(..)]), "{:?}", pair.told);
    pair.send(0..4, Direction::Write);
    pair.assert_done(0..4);
    pair.close();
    pair.assert_empty();
}

#[test]
fn min_latency_goes_by_the_last_heartbeat() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |config| config.policy = Policy::MinLatency);
    let heartbeat = SessionConfig::new("x", pair.path()).heartbeat;
    pair.pass(heartbeat.interval);
    assert!(
        pair.statuses().iter().all(|path| path.latency.is_some()),
        "{:?}",
        pair.statuses()
    );
    // Measured again when it is up again.
    let path = pair.statuses()[0].id;
    pair.command(path, PathCommand::Reconnect).unwrap();
    pair.settle();
    pair.pass(Duration::from_millis(1));
    assert!(pair.statuses()[0].latency.is_some());
    pair.pass(Duration::from_secs(2));
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    assert!(pair.statuses()[0].latency.is_some());
}

#[test]
fn a_path_is_tried_as_often_as_it_may_be() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |config| config.max_reconnects = 3);
    let path = pair.statuses()[1].id;
    for round in 1..=2 {
        pair.news.clear();
        pair.cut_off = vec![addresses(1)[1]];
        pair.pass(5 * LONG);
        assert_eq!(pair.states(), [PathState::Connected, PathState::Closed]);
        let failed = |(of, news): &&(PathId, PathNews)| *of == path && matches!(news, PathNews::AttemptFailed(_));
        assert_eq!(pair.news.iter().filter(failed).count(), 3, "{:?}", pair.news);
        assert_eq!(pair.statuses()[1].stats.failed_reconnects, 3 * round);
        pair.cut_off.clear();
        pair.pass(LONG);
        assert_eq!(pair.states()[1], PathState::Closed, "it is not tried again by itself");
        // By hand it is, and then has all of its attempts again.
        pair.command(path, PathCommand::Reconnect).unwrap();
        pair.pass(LONG);
        assert!(matches!(pair.outcome(PathCommand::Reconnect), Some(Ok(()))));
        assert_eq!(pair.states(), [PathState::Connected; 2]);
    }
    pair.close();
    pair.assert_empty();
}

/// As with the kernel's client: what was up once is connected again, and the session opens with the others.
#[test]
fn a_path_that_is_lost_while_another_is_being_connected_is_no_reason_to_give_up() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    let (paths, ours) = (pair.ways(3), addresses(1));
    pair.cut_off = vec![ours[2]];
    pair.ask_open(|config| {
        config.paths = paths;
        config.max_reconnects = SessionConfig::FOREVER;
        config.heartbeat.interval = Duration::from_secs(1);
    });
    pair.settle();
    let [up, begun] = [PathState::Connected, PathState::Connecting];
    assert_eq!(pair.states(), [up, up, begun]);
    pair.cut_off = vec![ours[0], ours[2]];
    pair.pass(Duration::from_secs(8));
    assert_eq!(pair.states()[1..], [up, begun]);
    assert_ne!(pair.states()[0], up);
    pair.cut_off = vec![ours[0]];
    pair.pass(Duration::from_secs(15));
    assert_eq!(pair.states()[1..], [up; 2]);
    let opened = pair.told.iter().any(|told| matches!(told, Output::Opened(..)));
    assert!(opened && pair.states()[0] != up, "{:?}", pair.told);
    pair.cut_off.clear();
    pair.pass(LONG);
    assert_eq!(pair.states(), [up; 3]);
}

#[test]
fn what_can_not_be_is_refused_at_once() {
    let pair = Pair::new(KeyMode::Instant, server(true));
    let path = pair.path();
    let with = |change: fn(&mut SessionConfig)| {
        let mut config = SessionConfig::new("s", path);
        change(&mut config);
        config.check()
    };
    assert!(with(|_| ()).is_ok());
    assert!(with(|c| c.name = "a/b".into()).is_err());
    assert!(with(|c| c.name = String::new()).is_err());
    assert!(with(|c| c.connections = 0).is_err());
    assert!(with(|c| c.paths.clear()).is_err());
    assert!(with(|c| c.paths = vec![c.paths[0]; 2]).is_err());
    assert!(with(|c| c.paths = (1..=128).map(|port| port_of(c, port)).collect()).is_ok());
    assert!(with(|c| c.paths = (1..=129).map(|port| port_of(c, port)).collect()).is_err());
    assert!(with(|c| c.max_reconnects = 9999).is_ok());
    assert!(with(|c| c.max_reconnects = 10_000).is_err());
    assert!(with(|c| c.max_reconnects = SessionConfig::FOREVER).is_ok());
}

fn port_of(config: &SessionConfig, port: u16) -> PathAddr {
    let mut path = config.paths[0];
    path.dst.set_port(port);
    path
}
