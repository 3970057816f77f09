//! A path that is silent while the server answers by another.

use core::time::Duration;

use rtrs::{
    Direction,
    client::{Policy, state::PathState},
};

use crate::{
    host::KeyMode,
    hosts::{Pair, addresses},
    server,
};

/// A session over two ways with requests in flight on each, whose answers the server holds back.
fn busy() -> Pair {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |config| config.policy = Policy::RoundRobin);
    pair.hold = true;
    pair.send(0..4, Direction::Write);
    pair.pass(Duration::from_millis(500));
    assert_eq!(pair.in_flight(), [2, 2], "requests may take as long as they like");
    pair
}

fn end(mut pair: Pair) {
    pair.release();
    pair.settle();
    // What went by a lost path may be under way for so long.
    pair.pass(Duration::from_millis(300));
    pair.assert_done(0..4);
    pair.close();
    pair.assert_empty();
}

#[test]
fn requests_go_by_the_other_path_within_a_second() {
    let mut pair = busy();
    pair.cut_off = vec![addresses(1)[0]];
    pair.pass(Duration::from_millis(700));
    assert_eq!(pair.in_flight(), [0, 4]);
    assert_ne!(pair.states()[0], PathState::Connected);
    end(pair);
}

#[test]
fn a_server_that_is_silent_altogether_keeps_its_paths() {
    let mut pair = busy();
    pair.cut = true;
    pair.pass(Duration::from_secs(4));
    pair.cut = false;
    // One path may come to itself sooner than the other.
    pair.pass(Duration::from_secs(4));
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    assert_eq!(pair.in_flight(), [2, 2]);
    end(pair);
}

#[test]
fn without_requests_nobody_is_asked_so_often() {
    let mut pair = busy();
    pair.release();
    pair.settle();
    pair.pass(Duration::from_secs(1));
    pair.assert_done(0..4);
    pair.cut_off = vec![addresses(1)[0]];
    pair.pass(Duration::from_secs(3));
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    pair.cut_off.clear();
    pair.close();
    pair.assert_empty();
}

/// Questions that come together are all answered: else each answer would be taken for that of an older one from then on.
#[test]
fn round_trips_are_measured_after_a_silence_as_before() {
    let mut pair = busy();
    pair.cut = true;
    pair.pass(Duration::from_secs(2));
    pair.cut = false;
    pair.pass(Duration::from_secs(4));
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    pair.release();
    pair.settle();
    pair.pass(Duration::from_secs(1));
    pair.assert_done(0..4);
    for path in pair.statuses() {
        assert_eq!(path.latency, Some(Duration::ZERO), "{path:?}");
    }
    // Nothing is owed, so nobody is asked before the next heartbeat.
    let asked = pair.client.next_timeout().unwrap().saturating_since(pair.now);
    assert!(asked > Duration::from_millis(100), "{asked:?}");
    pair.close();
    pair.assert_empty();
}
