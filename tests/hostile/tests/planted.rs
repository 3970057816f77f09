//! Attackers that know the queue pair numbers of a session of `ferroce serve` and `ferroce map`, and send packets to them from
//! ordinary sockets on the hosts' addresses. Nothing of theirs is stored or read, the session goes on, and the address that
//! they use is not refused.

use std::{
    fs,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use ferroce_hostile::{
    aim::Aim,
    attack::Sent,
    load::Load,
    origin::Origin,
    planted::{MARK, Plant, QueuePair, queue_pairs, sweep},
};
use ferroce_tests::{
    device::{Pair, map},
    process::TIMEOUT,
};

const DISK: usize = 64 << 20;
/// Session data goes over several queue pairs; those with bulk data have payloads as long as this.
const BULK: usize = 1024;

/// Runs a session with a load, plants packets with its server and its client, and checks that nothing came of it.
fn nothing_comes_of(at_server: &[Plant], at_client: &[Plant]) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let capture = dir.path().join("seen.pcap");
    let pair = Pair::start(&vec![0; DISK], "", &["--pcap", &capture.display().to_string()], &[]);
    let load = Load::start(&pair.socket, 2).unwrap();
    // Queue pair numbers are no secret. Here a capture shows them.
    let bulk = |qp: &&QueuePair| qp.longest >= BULK && qp.packets > 64;
    let until = Instant::now() + TIMEOUT;
    let known = loop {
        let known = queue_pairs(&capture).unwrap_or_default();
        let ends = [pair.server, pair.client].map(|end| known.iter().filter(bulk).any(|qp| qp.local == end));
        if ends == [true; 2] {
            break known;
        }
        assert!(Instant::now() < until, "no bulk data: {known:?}");
        std::thread::sleep(Duration::from_millis(100));
    };
    let mut sent = Sent::default();
    let started = Instant::now();
    'rounds: for round in 0..4 {
        for (local, peer, plants) in [
            (pair.server, pair.client, at_server),
            (pair.client, pair.server, at_client),
        ] {
            for qp in known.iter().filter(bulk).filter(|qp| qp.local == local) {
                let origin = Origin::bind(Aim::LOOPBACK, peer.into()).unwrap();
                for plant in plants {
                    sent += sweep(&origin, qp, *plant, round * 1000).unwrap();
                    if load.error().is_some() {
                        break 'rounds;
                    }
                }
            }
        }
    }
    let took = started.elapsed();
    // The gaps ahead of planted packets close.
    load.rate(Duration::from_secs(2));
    let done = load.finish();
    println!("{} packets in {:.1} s: {done:?}", sent.packets, took.as_secs_f64());
    let moved = done.unwrap_or_else(|e| panic!("{e}\n{}\n{}", pair.map.stderr(), pair.serve.stderr()));
    assert!(moved > 0);
    let stopped = pair.map.stop();
    assert_eq!(stopped.code, Some(0), "{}", stopped.stderr);
    // No penalty for the address.
    let again = pair.dir.path().join("again.sock");
    let (again, _) = map(pair.client, &pair.server.to_string(), &again, &["--session", "again"]);
    assert_eq!(again.stop().code, Some(0));
    let stopped = pair.serve.stop();
    assert_eq!(stopped.code, Some(0), "{}", stopped.stderr);
    let events = stopped.json();
    let of_test = |event: &str| {
        let named = events.iter().filter(|e| e["event"] == event && e["session"] == "test");
        named.count()
    };
    assert_eq!(
        (of_test("session_opened"), of_test("session_closed")),
        (1, 1),
        "{events:?}"
    );
    let stored = fs::read(&pair.image).unwrap();
    let mut run = 0;
    let planted = stored.iter().position(|byte| {
        run = if *byte == MARK { run + 1 } else { 0 };
        run == 16
    });
    assert_eq!(planted, None, "bytes of a stranger are stored");
}

#[test]
fn middles_of_writes_are_not_stored() {
    nothing_comes_of(&[Plant::WriteMiddle], &[]);
}

#[test]
fn middles_of_writes_and_read_responses_are_not_read() {
    nothing_comes_of(&[], &[Plant::WriteMiddle, Plant::ReadResponse]);
}

#[test]
fn packets_of_twenty_bytes_end_nothing() {
    nothing_comes_of(&[Plant::Short], &[Plant::Short]);
}

#[test]
fn wrong_keys_have_nobody_refused() {
    nothing_comes_of(&[Plant::WrongKey], &[Plant::WrongKey]);
}

#[test]
fn sends_and_acknowledgements_and_notifications_do_nothing() {
    let plants = [Plant::Send, Plant::Nak, Plant::Acknowledge, Plant::Notification];
    nothing_comes_of(&plants, &plants);
}
