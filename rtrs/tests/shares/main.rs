//! A server whose sessions are spread over several shares: what one share could get wrong that another knows of.

mod bed;
mod chaos;
#[path = "../support/devices.rs"]
mod devices;
mod peer;

use core::time::Duration;

use bed::{Bed, DEPTH, SERVERS, config};
use roce_cm::DropReason;
use roce_local::{FabricConfig, Ports as _};
use roce_verbs::DeviceLimits;
use rtrs::{
    Direction, errno,
    server::{ServerConfig, listing::SessionListing, request::Output, state::PathState},
    stats::RdmaStats,
};

fn kinds() -> [FabricConfig; 4] {
    let instant = FabricConfig::default();
    let queued = FabricConfig {
        instant_keys: false,
        ..instant
    };
    let windows = FabricConfig {
        fast_registration: false,
        ..queued
    };
    let none = FabricConfig {
        windows: false,
        ..windows
    };
    [instant, queued, windows, none]
}

/// Three shares, of which the second is home, and a path with two I/O connections for each.
fn opened(seed: u64) -> Bed {
    let mut bed = Bed::new(3, &config(), FabricConfig::default(), seed);
    bed.home(1, 1);
    let who = bed.peer(1, 7);
    bed.open(who, 7, "s1");
    assert_eq!(bed.peers[who].chunks.len(), DEPTH as usize);
    bed
}

/// A write and a read over that connection, in that chunk.
fn exchange(bed: &mut Bed, who: usize, cid: u16, chunk: u16, round: u8) {
    bed.peers[who].write(cid, chunk, b"to", &[round; 300]);
    bed.settle();
    let (index, request) = bed.request();
    assert_eq!((request.direction, request.connection), (Direction::Write, cid));
    assert_eq!((&request.header[..], request.key.chunk), (&b"to"[..], chunk));
    let mut data = [0; 300];
    let memory = bed.shares[index].server.memory(request.key.session).unwrap();
    memory.read(request.data_offset, &mut data).unwrap();
    assert_eq!(data, [round; 300]);
    bed.answer(index, &request, 0);
    bed.settle();
    let answered = bed.peers[who].answers();
    assert!(
        matches!(answered[..], [(by, reply)] if by == cid && reply.msg_id == chunk.into() && reply.errno == 0),
        "{answered:?}"
    );

    bed.peers[who].read(cid, chunk, &[round ^ 0xff], 500);
    bed.settle();
    let (there, request) = bed.request();
    assert_eq!((there, request.direction), (index, Direction::Read));
    bed.answer(there, &request, 0);
    bed.settle();
    assert_eq!(bed.peers[who].answers().len(), 1);
    assert_eq!(bed.peers[who].data(chunk, 500), [round ^ 0xff; 500]);
}

#[test]
fn any_chunk_is_used_over_any_connection_with_each_kind_of_keys() {
    for keys in kinds() {
        for always_invalidate in [true, false] {
            let config = ServerConfig {
                always_invalidate,
                ..config()
            };
            let mut bed = Bed::new(3, &config, keys, 1);
            bed.home(1, 1);
            let who = bed.peer(1, 7);
            bed.open(who, 7, "s1");
            assert_eq!(bed.news(1), ["opened s1", "path up"]);
            assert_eq!([bed.news(0), bed.news(2)], [["opened s1"], ["opened s1"]]);
            let key = bed.sessions(1);
            assert_eq!((key.len(), bed.sessions(0).len()), (1, 0));
            let mut shares = [0; 3];
            for round in 0..40 {
                let (cid, chunk) = (1 + bed.roll(6) as u16, bed.roll(3) as u16);
                exchange(&mut bed, who, cid, chunk, round);
                shares[usize::from(cid % 3)] += 1;
            }
            assert!(shares.iter().all(|n| *n > 0), "{shares:?}");
            assert!(bed.shares.iter().all(|host| host.server.memory(key[0]).is_some()));
            bed.peers[who].disconnect(0);
            bed.settle();
            let why = "the peer disconnected";
            let (down, closed) = (format!("path down: {why}"), format!("closed: {why}"));
            assert_eq!(bed.news(1), [&down[..], &closed[..], "free"]);
            for index in [0, 2] {
                assert_eq!(bed.news(index), [&closed[..], "free"]);
            }
            bed.end();
        }
    }
}

#[test]
fn a_request_stays_where_its_connection_is() {
    let mut bed = opened(2);
    for cid in 0..7 {
        bed.peers[0].write(cid, cid, b"h", b"data");
    }
    bed.settle();
    let mut all = bed.all_requests();
    assert_eq!(all.len(), 7);
    let mut where_is = Vec::new();
    for (index, key) in all.drain(..) {
        let request = bed.take(index, key);
        where_is.push((request.connection, index));
        bed.answer(index, &request, 0);
    }
    where_is.sort_unstable();
    assert_eq!(where_is, [(0, 1), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2), (6, 0)]);
    bed.hold_letters = true;
    bed.settle();
    assert_eq!(bed.peers[0].answers().len(), 7, "no letter is needed for that");
    bed.end();
}

/// What each share has of a session, put together.
fn listing(bed: &Bed) -> SessionListing {
    let shares = bed.shares.iter().map(|host| host.server.listing());
    let mut sessions = SessionListing::merge(shares);
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    sessions.remove(0)
}

#[test]
fn an_operator_sees_and_ends_a_path_at_any_share() {
    for at in 0..3 {
        let mut bed = opened(11);
        let (session, path) = (listing(&bed).session, listing(&bed).paths[0].path);
        for cid in 1..7 {
            bed.peers[0].write(cid, cid, b"h", &[1; 99]);
        }
        bed.settle();
        let seen = listing(&bed);
        let all = &seen.paths[0];
        assert_eq!((seen.name.as_str(), all.made, all.requests), ("s1", 7, 6));
        assert_eq!((all.rdma.writes, all.rdma.write_bytes, all.rdma.reads), (6, 600, 0));
        assert!(bed.shares[at].server.reset_stats(session, path));
        assert_eq!(listing(&bed).paths[0].rdma.writes, 4, "two came by each");
        for host in &mut bed.shares {
            host.server.reset_stats(session, path);
        }
        assert_eq!(listing(&bed).paths[0].rdma, RdmaStats::default());

        assert!(bed.call(at, |server, cx| server.close_path(cx, session, path)));
        bed.settle();
        assert!(bed.peers[0].broken);
        assert_eq!(listing(&bed).paths[0].state, PathState::Closing);
        for (index, key) in bed.all_requests() {
            let request = bed.take(index, key);
            bed.answer(index, &request, 0);
        }
        bed.settle();
        assert_eq!(bed.news(1)[2..4], ["path down: closed", "closed: closed"]);
        assert!(!bed.call(at, |server, cx| server.close_path(cx, session, path)));
        bed.end();
    }
}

/// Whichever connection is lost, the path ends at all shares, and only when all users have answered.
#[test]
fn a_path_ends_with_any_of_its_connections() {
    for cid in 0..7 {
        for how in 0..3 {
            let mut bed = opened(3);
            for chunk in 0..3 {
                bed.peers[0].write(1 + chunk, chunk, b"h", b"data");
            }
            bed.settle();
            match how {
                0 => bed.peers[0].disconnect(cid),
                1 => bed.peers[0].violate(cid),
                _ if cid > 0 => bed.peers[0].beat(cid),
                _ => continue,
            }
            bed.pass(Duration::from_secs(3));
            assert!(bed.peers[0].broken, "{cid}");
            let all = bed.all_requests();
            assert_eq!(all.len(), 3, "their users are still at work");
            for (left, (index, key)) in (0..3).rev().zip(all) {
                assert_eq!(bed.sessions(1).len(), 1, "{left} more");
                let request = bed.take(index, key);
                bed.answer(index, &request, 0);
                bed.settle();
            }
            assert_eq!(bed.sessions(1), []);
            let counters = bed.shares[1].server.counters();
            assert_eq!(counters.access_errors, u64::from(how == 1), "{cid}");
            assert_eq!(counters.protocol_errors, u64::from(how == 2), "{cid}");
            for index in 0..3 {
                let news = bed.news(index);
                assert!(news[news.len() - 2].starts_with("closed: "), "{index}: {news:?}");
            }
            bed.end();
        }
    }
}

/// G1: two paths' requests are never at work in a chunk at once, wherever they come.
#[test]
fn a_chunk_that_another_path_has_at_another_share_is_waited_for() {
    let mut bed = opened(4);
    let second = bed.peer(1, 7);
    bed.open(second, 7, "s1");
    bed.peers[0].write(2, 5, b"first", b"data");
    bed.settle();
    bed.peers[second].write(3, 5, b"second", b"data");
    bed.settle();
    let (index, first) = bed.request();
    assert_eq!((index, &first.header[..]), (2, &b"first"[..]));
    assert_eq!(bed.shares[0].server.counters().requests_parked, 1);
    // It is free at once, and the share that waits hears of it by a letter.
    bed.hold_letters = true;
    bed.answer(2, &first, 0);
    bed.settle();
    assert_eq!(bed.all_requests(), []);
    bed.hold_letters = false;
    bed.settle();
    let (index, waited) = bed.request();
    assert_eq!((index, &waited.header[..]), (0, &b"second"[..]));
    bed.answer(0, &waited, 0);
    bed.settle();
    assert_eq!(
        (bed.peers[0].answers().len(), bed.peers[second].answers().len()),
        (1, 1)
    );

    // Of a path that is lost the user keeps the chunk until it is done.
    bed.peers[0].read(2, 6, b"slow", 100);
    bed.settle();
    bed.peers[0].disconnect(0);
    bed.settle();
    // The client sends it again, by the other path.
    bed.peers[second].read(3, 6, b"slow", 100);
    bed.settle();
    let (index, slow) = bed.request();
    assert_eq!(index, 2);
    bed.answer(2, &slow, 0);
    bed.settle();
    let (index, again) = bed.request();
    assert_eq!((index, &again.header[..], again.connection), (0, &b"slow"[..], 3));
    bed.answer(0, &again, 0);
    bed.end();
}

/// A second path, to another address of the server.
fn opened_over_two_devices(seed: u64, keys: FabricConfig) -> (Bed, usize) {
    let mut bed = Bed::new(3, &config(), keys, seed);
    bed.home(1, 1);
    for device in 0..2 {
        let who = bed.peer_at(device, 1, 7);
        bed.open(who, 7, "s1");
        assert_eq!(bed.peers[who].chunks.len(), DEPTH as usize);
    }
    (bed, 1)
}

#[test]
fn a_session_has_its_chunks_on_each_device_at_each_share() {
    for keys in kinds() {
        let (mut bed, second) = opened_over_two_devices(20, keys);
        let listing = bed.shares[1].server.listing();
        let there: Vec<_> = listing[0]
            .paths
            .iter()
            .map(|path| (path.server, path.device.0))
            .collect();
        assert_eq!(
            there,
            SERVERS.map(|last| ([192, 0, 2, last].into(), u16::from(last) - 1))
        );
        for (index, host) in bed.shares.iter().enumerate() {
            let usage = host.fabric.usage();
            assert_eq!(usage.pds, 2, "share {index}");
        }
        for (round, cid) in (1..7).enumerate() {
            exchange(&mut bed, 0, cid, cid, round as u8);
            exchange(&mut bed, second, cid, cid, round as u8 + 100);
        }
        // Both paths use the same memory.
        bed.peers[0].write(1, 3, b"one", &[1; 200]);
        bed.settle();
        let (index, request) = bed.request();
        bed.answer(index, &request, 0);
        bed.settle();
        bed.peers[second].read(2, 3, b"two", 200);
        bed.settle();
        let (there, request) = bed.request();
        assert_ne!(there, index);
        let mut bytes = [0; 100];
        let memory = bed.shares[there].server.memory(request.key.session).unwrap();
        memory.read(request.data_offset, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 100], "what came by the first path");
        bed.answer(there, &request, 0);
        bed.end();
    }
}

#[test]
fn a_chunk_that_a_path_has_on_one_device_is_waited_for_on_the_other() {
    for keys in kinds() {
        let (mut bed, second) = opened_over_two_devices(21, keys);
        bed.peers[0].write(2, 5, b"first", b"data");
        bed.settle();
        bed.peers[second].write(3, 5, b"second", b"data");
        bed.settle();
        let (index, first) = bed.request();
        assert_eq!((index, &first.header[..]), (2, &b"first"[..]));
        // The first path goes, and its device is not the session's any more; the user has its chunk until it is done.
        bed.peers[0].disconnect(0);
        bed.pass(Duration::from_secs(1));
        assert_eq!(bed.all_requests(), []);
        bed.answer(index, &first, 0);
        bed.settle();
        let (index, waited) = bed.request();
        assert_eq!((index, &waited.header[..]), (0, &b"second"[..]));
        for host in &bed.shares {
            assert_eq!(host.fabric.usage().pds, 1);
        }
        bed.answer(index, &waited, 0);
        bed.settle();
        assert_eq!(bed.peers[second].answers().len(), 1);
        exchange(&mut bed, second, 4, 5, 9);
        // It comes back by the device that it had.
        let third = bed.peer_at(0, 1, 7);
        bed.open(third, 7, "s1");
        exchange(&mut bed, third, 3, 5, 11);
        bed.end();
    }
}

#[test]
fn the_key_of_a_chunk_on_one_device_opens_nothing_on_the_other() {
    let (mut bed, second) = opened_over_two_devices(22, FabricConfig::default());
    let theirs = bed.peers[0].chunks.clone();
    bed.peers[second].chunks = theirs;
    bed.peers[second].write(3, 5, b"second", b"data");
    bed.pass(Duration::from_secs(3));
    assert!(bed.peers[second].broken && !bed.peers[0].broken);
    assert_eq!(bed.all_requests(), []);
    assert_eq!(bed.shares[1].server.counters().access_errors, 1);
    exchange(&mut bed, 0, 3, 5, 1);
    bed.end();
}

#[test]
fn two_requests_of_a_path_in_a_chunk_end_it_whichever_shares_they_come_to() {
    let mut bed = opened(5);
    bed.peers[0].write(2, 5, b"one", b"data");
    bed.settle();
    // Its key is closed; the announcement alone is what a client can still send.
    bed.peers[0].announce(3, 5);
    bed.settle();
    let (index, request) = bed.request();
    assert_eq!((index, &request.header[..]), (2, &b"one"[..]));
    assert!(bed.peers[0].broken);
    bed.answer(2, &request, 0);
    bed.settle();
    assert_eq!(bed.shares[1].server.counters().protocol_errors, 1);
    bed.end();
}

/// G2: who connects anew may not write before all that came before is answered, at every share.
#[test]
fn a_new_path_waits_for_the_requests_of_a_lost_one_at_all_shares() {
    for cid in [1, 2, 3] {
        let mut bed = opened(6);
        bed.peers[0].write(cid, 0, b"late", b"data");
        bed.settle();
        bed.peers[0].disconnect(0);
        bed.settle();
        let second = bed.peer(1, 7);
        bed.open(second, 7, "s1");
        assert!(bed.peers[second].chunks.is_empty());
        assert_eq!(bed.shares[1].server.counters().paths_held, 1);
        let (index, request) = bed.request();
        bed.hold_letters = true;
        bed.answer(index, &request, 0);
        bed.settle();
        // Other shares are asked too before the client hears anything.
        assert!(bed.peers[second].chunks.is_empty());
        bed.hold_letters = false;
        bed.settle();
        exchange(&mut bed, second, 3, 0, 9);
        bed.end();
    }
}

/// A request that a share has received, but not seen when home learns that its path is lost, still counts as one of before.
#[test]
fn a_share_that_does_not_know_of_the_loss_holds_up_the_new_path() {
    let mut bed = opened(7);
    bed.hold_letters = true;
    bed.peers[0].disconnect(0);
    bed.settle();
    bed.peers[0].write(2, 3, b"late", b"data");
    bed.settle();
    let (index, request) = bed.request();
    assert_eq!(index, 2);
    let second = bed.peer(1, 2);
    bed.open(second, 2, "s1");
    assert!(bed.peers[second].chunks.is_empty());
    bed.hold_letters = false;
    bed.settle();
    assert!(bed.peers[second].chunks.is_empty());
    bed.answer(2, &request, 0);
    bed.settle();
    assert!(!bed.peers[second].chunks.is_empty());
    bed.end();
}

#[test]
fn connections_that_home_has_not_heard_of_wait_and_strangers_are_refused() {
    let mut bed = Bed::new(3, &config(), FabricConfig::default(), 8);
    bed.home(1, 2);
    let who = bed.peer(1, 4);
    bed.peers[who].connect(0);
    while !bed.peers[who].stands(0) {
        bed.step();
    }
    // All at once, before home knows that the first stands.
    for cid in 1..4 {
        bed.peers[who].connect(cid);
    }
    bed.settle();
    assert!(bed.peers[who].is_connected(), "{:?}", bed.peers[who].refused);
    bed.peers[who].inform("s1");
    bed.settle();
    assert!(!bed.peers[who].chunks.is_empty());

    for cid in 1..4 {
        let stranger = bed.peer(9, 4);
        bed.peers[stranger].connect(cid);
        bed.settle();
        assert_eq!(bed.peers[stranger].refused, [Some(errno::ECONNRESET)], "{cid}");
    }
    let refused: u64 = bed.shares.iter().map(|h| h.server.counters().connections_refused).sum();
    assert_eq!(refused, 3);
    // A client that gives up before home has decided.
    let hasty = bed.peer(1, 4);
    bed.hold_letters = true;
    bed.peers[hasty].connect(2);
    bed.settle();
    bed.peers[hasty].forget();
    bed.settle();
    bed.hold_letters = false;
    bed.settle();
    bed.end();
}

#[test]
fn a_share_without_room_or_without_the_same_memory_ends_the_path() {
    for foreign in [false, true] {
        let (usual, mut limits) = (DeviceLimits::software(1), DeviceLimits::software(1));
        if !foreign {
            limits.max_qp = 0;
        }
        let all = [(usual.clone(), false), (limits, foreign), (usual, false)];
        let mut bed = Bed::with(&config(), FabricConfig::default(), 9, &all);
        let who = bed.peer(1, 4);
        for cid in 0..4 {
            bed.peers[who].connect(cid);
            bed.settle();
        }
        assert!(bed.peers[who].broken);
        assert!(bed.shares.iter().all(|host| host.server.sessions().is_empty()));
        // Others, who do not need that share, get in.
        let small = bed.peer(2, 2);
        bed.open(small, 2, "small");
        exchange(&mut bed, small, 1, 0, 1);
        bed.end();
    }
}

#[test]
fn sessions_of_different_homes_have_different_numbers() {
    let mut bed = Bed::new(3, &config(), FabricConfig::default(), 10);
    let mut seen = Vec::new();
    for n in 0..6 {
        bed.home(n, usize::from(n % 3));
        let who = bed.peer(n, 3);
        bed.open(who, 3, &format!("s{n}"));
    }
    for index in 0..3 {
        seen.extend(bed.sessions(index));
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 6);
    // A share closes any session that it has a part of.
    for key in seen {
        let known = bed.shares[0].server.memory(key).is_some();
        assert_eq!(bed.call(0, |server, cx| server.close_session(cx, key)), known);
    }
    bed.settle();
    let left = [0, 1, 2].map(|index| bed.sessions(index).len());
    assert_eq!(left, [0, 2, 0], "the second's connections are its and the third's");
    bed.end();
}

#[test]
fn a_session_that_gets_no_memory_ends_at_all_shares() {
    let mut bed = Bed::new(3, &config(), FabricConfig::default(), 11);
    bed.no_memory = true;
    let who = bed.peer(1, 4);
    for cid in 0..4 {
        bed.peers[who].connect(cid);
        bed.settle();
    }
    assert!(bed.peers[who].broken);
    for index in 0..3 {
        assert!(
            !bed.shares[index]
                .told
                .iter()
                .any(|o| matches!(o, Output::SessionOpened(_))),
            "{index}"
        );
    }
    bed.end();
}

#[test]
fn an_idle_path_lives_by_the_heartbeats_of_its_home() {
    let mut bed = opened(12);
    for _ in 0..60 {
        bed.pass(Duration::from_secs(5));
        bed.peers[0].answer_beats();
    }
    exchange(&mut bed, 0, 3, 1, 7);
    // The client says nothing more.
    bed.pass(Duration::from_secs(60));
    assert_eq!(bed.shares[1].server.counters().heartbeats_lost, 1);
    assert_eq!(bed.sessions(1), []);
    bed.end();
}

/// Home looks at the paths of a session whose requests come to other shares.
#[test]
fn a_path_that_is_silent_beside_another_ends_at_all_shares() {
    let (mut bed, second) = opened_over_two_devices(22, FabricConfig::default());
    let strays = |bed: &mut Bed| {
        let counters = bed.peers[0].fabric.ports().port(0).counters();
        counters.cm.dropped(DropReason::UnknownConnection)
    };
    let before = strays(&mut bed);
    bed.peers[0].write(2, 5, b"to", b"data");
    bed.settle();
    let (index, request) = bed.request();
    assert_ne!(index, 1, "not at home");
    bed.answer(index, &request, 0);
    // Before the first heartbeat of either.
    let patience = config().heartbeat.interval - Duration::from_millis(100);
    for _ in 0..patience.as_millis() / 100 {
        bed.pass(Duration::from_millis(100));
        bed.peers[0].answer_beats();
    }
    assert!(bed.peers[second].broken && !bed.peers[0].broken);
    assert_eq!(bed.shares[1].server.counters().heartbeats_lost, 1);
    for (index, host) in bed.shares.iter().enumerate() {
        let paths = host.server.listing()[0].paths.len();
        assert_eq!(paths, 1, "share {index}");
    }
    let told = strays(&mut bed) - before;
    assert!(told >= 7, "{told} of 7 connections' DREQs by the other network");
    bed.end();
}
