//! The server gives up a path that is silent while its client answers by another.

use core::time::Duration;
use std::net::IpAddr;

use roce_port::cm::DropReason;
use roce_port::fabric::Ports;
use rtrs::{
    Direction, PathError,
    client::{Policy, state::PathState},
    heartbeat::HeartbeatConfig,
    server::request,
};

use crate::{
    host::KeyMode,
    hosts::{Pair, addresses},
    server,
};

/// As long after the last request the server may take; our client, which has none under way, takes longer by far.
const SOON: Duration = Duration::from_secs(6);

/// Of a path, the service connection included.
const CONNECTIONS: u16 = 2;

/// A session over so many ways by each of which a request went just now.
fn carried(ways: usize) -> Pair {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(ways, |config| {
        config.policy = Policy::RoundRobin;
        config.connections = CONNECTIONS - 1;
        config.heartbeat = HeartbeatConfig::default();
    });
    pair.answer_with = Some(0);
    pair.send(0..4, Direction::Write);
    pair.settle();
    pair.assert_done(0..4);
    pair.server_told.clear();
    pair
}

/// What the server has said of paths that are down.
fn down(pair: &Pair) -> Vec<(IpAddr, PathError)> {
    let told = pair.server_told.iter().filter_map(|output| match output {
        request::Output::PathDown { peer, why, .. } => Some((peer.ip(), why.clone())),
        _ => None,
    });
    told.collect()
}

/// DREQs that have come to the client by another network than their connection's.
fn strays(pair: &mut Pair) -> u64 {
    let counters = pair.near.fabric.ports().port(0).counters();
    counters.cm.dropped(DropReason::WrongAddress)
}

fn end(mut pair: Pair) {
    pair.cut_off.clear();
    pair.pass(Duration::from_secs(60));
    assert!(pair.states().iter().all(|state| *state == PathState::Connected));
    pair.close();
    pair.assert_empty();
}

#[test]
fn the_silent_path_is_closed_and_the_client_told_by_the_other_network() {
    let mut pair = carried(2);
    pair.cut_off = vec![addresses(1)[0]];
    assert_eq!(strays(&mut pair), 0);
    pair.pass(SOON);
    let lost = down(&pair);
    assert!(
        matches!(lost[..], [(peer, PathError::HeartbeatLost(_))] if peer == addresses(1)[0]),
        "{lost:?}"
    );
    assert_eq!(pair.states(), [PathState::Connected; 2], "the client has not noticed");
    // Our client does not take DREQs from there.
    assert!(strays(&mut pair) >= u64::from(CONNECTIONS));
    pair.pass(Duration::from_secs(20));
    let all = strays(&mut pair);
    assert!(all <= 4 * u64::from(CONNECTIONS), "each is sent four times at most");
    end(pair);
}

#[test]
fn without_requests_it_takes_a_heartbeat_longer() {
    let mut pair = carried(2);
    let interval = HeartbeatConfig::default().interval;
    pair.pass(2 * interval);
    pair.cut_off = vec![addresses(1)[0]];
    pair.pass(interval + SOON);
    assert_eq!(down(&pair).len(), 1);
    end(pair);
}

#[test]
fn a_client_that_is_silent_altogether_keeps_its_paths() {
    let mut pair = carried(2);
    pair.cut = true;
    pair.pass(Duration::from_secs(12));
    pair.cut = false;
    // One path may come to itself sooner than the other.
    pair.pass(Duration::from_secs(12));
    assert_eq!(down(&pair).len(), 0);
    assert_eq!(pair.states(), [PathState::Connected; 2]);
    end(pair);
}

#[test]
fn an_only_path_has_all_the_time_of_its_heartbeat() {
    let mut pair = carried(1);
    pair.cut = true;
    pair.pass(Duration::from_secs(12));
    pair.cut = false;
    pair.pass(Duration::from_secs(12));
    assert_eq!(down(&pair).len(), 0);
    end(pair);
}

/// Of two networks that die together neither is the way to tell of the other.
#[test]
fn two_of_three_paths_are_told_of_by_the_third() {
    let mut pair = carried(3);
    pair.cut_off = vec![addresses(1)[0], addresses(1)[1]];
    pair.pass(SOON);
    assert_eq!(down(&pair).len(), 2);
    assert!(strays(&mut pair) >= 2 * u64::from(CONNECTIONS));
    end(pair);
}

/// The server's answers are held back, and nothing else is sent: questions alone keep the paths.
#[test]
fn requests_may_take_as_long_as_they_like() {
    let mut pair = carried(2);
    pair.hold = true;
    pair.send(4..8, Direction::Write);
    pair.pass(Duration::from_secs(60));
    assert_eq!(down(&pair).len(), 0);
    pair.release();
    pair.settle();
    pair.assert_done(4..8);
    end(pair);
}
