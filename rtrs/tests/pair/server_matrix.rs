//! The wire matrix of the handshake: which connection requests and information requests are taken in which state, and what a client
//! is told. What the kernel's server does is said where ours does something else.

use core::time::Duration;

use rtrs::{
    admission::AccessList,
    errno,
    proto::Imm,
    server::{ServerConfig, state::PathState},
};

use crate::{
    bed::{Bed, OTHER_ADDRESS, config},
    hand::{Client, name},
};

const RESET: Result<(), i32> = Err(errno::ECONNRESET);

/// Where a path is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    HalfOpen,
    Opening,
    Up,
    /// Its user has a request still.
    Closing,
}

const STATES: [At; 4] = [At::HalfOpen, At::Opening, At::Up, At::Closing];

/// A path that has come so far.
fn path_at(bed: &mut Bed, at: At) -> Client {
    let mut client = Client::new(1);
    match at {
        At::HalfOpen => {
            client.ask(bed, 0, client.request(0)).unwrap();
        }
        At::Opening => client.connect(bed, 0).unwrap(),
        At::Up | At::Closing => client.open(bed, "s1"),
    }
    if at == At::Closing {
        client.send_write(bed, 4, b"data", b"header");
        client.leave(bed);
    }
    client
}

/// The user is done with the request of a path that is closing.
fn finish(bed: &mut Bed, at: At) {
    if at == At::Closing {
        let request = bed.request();
        bed.answer(request.key, 0);
    }
}

/// A repetition of the request, or a client that was restored from a copy.
#[test]
fn a_path_that_is_known_is_refused_in_each_state() {
    for at in STATES {
        let mut bed = Bed::new(config());
        let client = path_at(&mut bed, at);
        for attempt in [0, 1] {
            let mut again = Client {
                attempt,
                ..client.clone()
            };
            assert_eq!(again.connect(&mut bed, 0), RESET, "{at:?}, attempt {attempt}");
        }
        let state = bed.server.listing().first().map(|s| s.paths[0].state);
        let expected = match at {
            At::HalfOpen => None,
            At::Opening => Some(PathState::Connecting),
            At::Up => Some(PathState::Connected),
            At::Closing => Some(PathState::Closing),
        };
        assert_eq!(state, expected, "nothing has become of it");
        finish(&mut bed, at);
        assert_eq!(bed.server.counters().paths_given_up, 0);
    }
}

/// The kernel's server refuses until its heartbeat or a disconnect tells it.
#[test]
fn a_client_that_has_lost_its_path_finds_the_way_free_with_the_next_attempt() {
    for at in STATES {
        let mut bed = Bed::new(config());
        let client = path_at(&mut bed, at);
        let mut next = client.once_more();
        assert_eq!(next.connect(&mut bed, 0), RESET, "{at:?}");
        assert!(client.is_gone(&bed) || at == At::Closing);
        assert_eq!(bed.server.counters().paths_given_up, u64::from(at != At::Closing));
        // As long as requests of before are worked on it would be in their way.
        let mut more = next.once_more();
        if at == At::Closing {
            assert_eq!(more.connect(&mut bed, 0), RESET);
            finish(&mut bed, at);
            more = more.once_more();
        }
        more.open(&mut bed, "s1");
        assert_eq!(bed.server.sessions().len(), 1);
        bed.stop();
    }
}

/// Two attempts, of which the path survives one that is late.
#[test]
fn attempts_are_counted_modulo() {
    let mut bed = Bed::new(config());
    let mut client = Client {
        attempt: u16::MAX,
        ..Client::new(1)
    };
    client.open(&mut bed, "s1");
    for late in [u16::MAX - 1, u16::MAX - 20_000] {
        let mut late = Client {
            attempt: late,
            ..client.clone()
        };
        assert_eq!(late.connect(&mut bed, 0), RESET);
        assert!(!client.is_gone(&bed));
    }
    let mut next = Client {
        attempt: 0,
        ..client.clone()
    };
    assert_eq!(next.connect(&mut bed, 0), RESET);
    assert!(client.is_gone(&bed), "0 comes after the highest number");
}

/// With requests of before under way, and another path that has survived: nothing of the session is lost.
#[test]
fn a_path_that_was_given_up_takes_nothing_of_its_session_along() {
    let mut bed = Bed::new(config());
    let first = Client::opened(&mut bed, 1, "s1");
    let mut second = first.second_path(2);
    second.open(&mut bed, "s1");
    bed.outputs.clear();
    first.send_write(&mut bed, 4, b"data", b"header");
    let request = bed.request();
    let mut again = first.once_more();
    assert_eq!(again.connect(&mut bed, 0), RESET);
    again = again.once_more();
    assert_eq!(again.connect(&mut bed, 0), RESET, "its request is still worked on");
    bed.answer(request.key, 0);
    assert_eq!(bed.news(), ["path down: the client has given the path up"]);
    again = again.once_more();
    again.open(&mut bed, "s1");
    assert_eq!(bed.news(), ["path up"]);
    assert_eq!(bed.server.sessions()[0].paths, 2);
}

#[test]
fn a_session_is_made_for_a_first_path_only() {
    let mut bed = Bed::new(config());
    let mut added = Client {
        first: false,
        ..Client::new(1)
    };
    assert_eq!(added.connect(&mut bed, 0), Err(errno::ENXIO), "it is another server's");
    bed.is_clean();
    Client::opened(&mut bed, 1, "s1");
    // To a session that is known it makes no difference.
    for (n, first) in [(2, false), (3, true)] {
        let mut path = Client {
            first,
            ..Client::new(1).second_path(n)
        };
        path.open(&mut bed, "s1");
    }
    assert_eq!(bed.server.sessions()[0].paths, 3);
}

#[test]
fn two_paths_between_the_same_addresses_are_refused_in_each_state() {
    for at in STATES {
        let mut bed = Bed::new(config());
        let client = path_at(&mut bed, at);
        let mut twin = client.second_path(2);
        twin.peer = client.peer;
        // A path of which nobody knows whether there is a client has no session yet.
        let expected = if at == At::HalfOpen {
            errno::ENXIO
        } else {
            errno::EEXIST
        };
        assert_eq!(twin.connect(&mut bed, 0), Err(expected), "{at:?}");
        finish(&mut bed, at);
        twin.local.set_ip(OTHER_ADDRESS);
        if matches!(at, At::Opening | At::Up) {
            assert_eq!(twin.connect(&mut bed, 0), Ok(()), "to another address of ours: {at:?}");
        }
    }
}

#[test]
fn a_session_has_128_paths_at_most() {
    let mut bed = Bed::new(ServerConfig {
        max_paths: 200,
        ..config()
    });
    let mut first = Client::new(1);
    first.open(&mut bed, "s1");
    let mut last = first.clone();
    for n in 2..=128 {
        last = first.second_path(n);
        last.connect(&mut bed, 0).unwrap();
    }
    assert_eq!(first.second_path(129).connect(&mut bed, 0), RESET);
    assert_eq!(bed.server.counters().refused_paths, 1);
    last.leave(&mut bed);
    first.second_path(129).connect(&mut bed, 0).unwrap();
    bed.stop();
}

/// The kernel's server makes a path for any of its connections; ours needs the service connection first, behind which it knows a
/// client. Clients of both begin with it.
#[test]
fn connections_come_in_any_order_after_the_first_and_once() {
    let mut bed = Bed::new(config());
    let mut client = Client {
        connections: 4,
        ..Client::new(1)
    };
    assert_eq!(client.connect(&mut bed, 2), RESET, "of no path");
    client.connect(&mut bed, 0).unwrap();
    for cid in [3, 1] {
        client.connect(&mut bed, cid).unwrap();
    }
    for (what, cid, connections) in [
        ("a second time", 3, 4),
        ("above the count", 4, 4),
        ("another count", 2, 5),
        ("another count", 2, 3),
    ] {
        let mut other = Client {
            connections,
            ..client.clone()
        };
        assert_eq!(other.connect(&mut bed, cid), RESET, "{what}");
    }
    client.connect(&mut bed, 2).unwrap();
    client.inform(&mut bed, &name("s1"));
    assert!(client.informed(&mut bed));
    assert_eq!(client.clone().connect(&mut bed, 2), RESET, "after the handshake");
    assert!(!client.is_gone(&bed));
}

#[test]
fn a_client_with_many_processors_and_a_deep_queue_gets_in() {
    let mut bed = Bed::new(ServerConfig {
        queue_depth: 4096,
        ..config()
    });
    let mut client = Client {
        connections: 257,
        ..Client::new(1)
    };
    assert_eq!(client.connect(&mut bed, 0), Ok(()));
}

#[test]
fn names_that_are_refused_end_the_path_after_it_was_accepted() {
    for (what, text) in [("a slash", &b"a/b"[..]), ("a dot", b"a.b"), ("none", b"")] {
        let mut bed = Bed::new(config());
        let mut client = Client::new(1);
        client.connect_all(&mut bed);
        let mut bytes = name("abc");
        let at = bytes.windows(3).position(|b| b == b"abc").unwrap();
        bytes[at..at + 3].fill(0);
        bytes[at..at + text.len()].copy_from_slice(text);
        client.inform(&mut bed, &bytes);
        assert!(client.is_gone(&bed), "{what}");
        bed.is_clean();
    }
    // Another session has it, as long as one of its paths lives.
    let mut bed = Bed::new(config());
    let holder = Client::opened(&mut bed, 1, "db");
    let mut second = holder.second_path(2);
    second.open(&mut bed, "db");
    let newcomer = |bed: &mut Bed, n| {
        let mut newcomer = Client::new(n);
        newcomer.connect_all(bed);
        newcomer.inform(bed, &name("db"));
        newcomer.informed(bed)
    };
    assert!(!newcomer(&mut bed, 3));
    holder.send_write(&mut bed, 4, b"data", b"header");
    holder.leave(&mut bed);
    assert!(!newcomer(&mut bed, 3));
    second.send_write(&mut bed, 5, b"data", b"header");
    second.leave(&mut bed);
    // Its paths are stopped, though their requests are still worked on: the client may be back under another number.
    assert!(newcomer(&mut bed, 3));
    let requests = bed.requests();
    assert_eq!(requests.len(), 2);
    requests.iter().for_each(|request| bed.answer(request.key, 0));
}

/// The kernel's server drops requests that come so early, and goes on.
#[test]
fn nothing_but_the_name_may_come_before_the_handshake_is_done() {
    for imm in [Imm::HbMsg, Imm::HbAck, Imm::IoReq(0)] {
        let mut bed = Bed::new(config());
        let mut client = Client::new(1);
        client.connect_all(&mut bed);
        let cid = u16::from(matches!(imm, Imm::IoReq(_)));
        client.imm(&mut bed, cid, imm.encode());
        assert!(client.is_gone(&bed), "{imm:?}");
        assert_eq!(bed.server.counters().protocol_errors, 1);
        bed.is_clean();
    }
}

/// A client that repeats a request by another path while both paths live, as the kernel's does when it believes one to be dead.
#[test]
fn requests_of_two_paths_in_one_chunk_are_both_answered_one_after_the_other() {
    let mut bed = Bed::new(config());
    let mut first = Client::opened(&mut bed, 1, "s1");
    let mut second = first.second_path(2);
    second.open(&mut bed, "s1");
    bed.outputs.clear();
    first.send_write(&mut bed, 4, b"data", b"one");
    second.send_write(&mut bed, 4, b"data", b"two");
    for (client, header) in [(&mut first, b"one"), (&mut second, b"two")] {
        let request = bed.request();
        assert_eq!(&request.header[..], header);
        bed.answer(request.key, 0);
        let replies = client.answers(&mut bed, 1);
        assert_eq!((replies.len(), replies[0].msg_id), (1, 4));
    }
    // A second one of the same path is a fault.
    first.send_write(&mut bed, 5, b"data", b"one");
    let offset = b"data".len() + b"one".len();
    first.announce(&mut bed, 5, offset as u32);
    let request = bed.request();
    bed.answer(request.key, 0);
    assert!(first.is_gone(&bed) && !second.is_gone(&bed));
    bed.wait(Duration::from_secs(1));
    bed.stop();
}

#[test]
fn names_and_addresses_are_looked_up() {
    let allow = AccessList::new(["db=10.0.0.1", "10.0.0.2/31"].map(|rule| rule.parse().unwrap()));
    let mut bed = Bed::new(ServerConfig { allow, ..config() });
    assert_eq!(Client::new(9).connect(&mut bed, 0), Err(errno::EACCES));
    let mut thief = Client::new(2);
    thief.connect_all(&mut bed);
    thief.inform(&mut bed, &name("db"));
    assert!(thief.is_gone(&bed));
    Client::opened(&mut bed, 1, "db");
    let counters = bed.server.counters();
    assert_eq!((counters.refused_address, counters.refused_name), (1, 1));
    // Who knows its UUID may not join it from elsewhere.
    let mut thief = Client::new(1).second_path(2);
    assert_eq!(thief.connect(&mut bed, 0), Err(errno::EACCES));
    assert_eq!(bed.server.counters().refused_name, 2);
}
