//! A mapping on several loops: a session in shares, and NBD clients at all of them.

mod common;

use std::{
    fs,
    io::Read,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    thread,
    time::Duration,
};

use common::{Client, Lab, MIB, Mapped, eventually};
use rnbd::{
    Errno,
    client::error::MapError,
    nbd::proto::{cmd, cmd_flag},
    proto::AccessMode,
};
use rnbd_host::{
    listen::Listen,
    map::{MapConfig, MapFailure},
};

const EIO: u32 = 5;

fn map(lab: &Lab, loops: usize, change: impl FnOnce(&mut MapConfig)) -> Result<Mapped, MapFailure> {
    let mut config = lab.config("spread", "disk");
    change(&mut config);
    lab.try_map_on(loops, config)
}

/// NBD clients, so many at each loop.
fn clients(map: &mut Mapped, loops: usize, each: usize) -> Vec<Client> {
    let clients = (0..loops * each).map(|_| map.client()).collect();
    assert_eq!(map.mapping.stats().clients, vec![each; loops]);
    clients
}

/// Data that a client writes at an offset.
fn stamp(client: usize, at: u64, len: usize) -> Vec<u8> {
    let word = ((client as u64) << 56) | at;
    (0..len as u64 / 8).flat_map(|n| (word + n).to_le_bytes()).collect()
}

fn data_is_what_it_should_be(loops: usize, at_the_server: usize) {
    const EACH: usize = 2;
    let lab = Lab::on_loops(at_the_server, |_| {});
    let mut map = map(&lab, loops, |_| {}).unwrap();
    let mut nbd = clients(&mut map, loops, EACH);
    let part = (8 * MIB / nbd.len() as u64) & !0xffff;
    let before = fs::read(lab.image("disk")).unwrap();
    thread::scope(|scope| {
        for (n, client) in nbd.iter_mut().enumerate() {
            let before = &before;
            scope.spawn(move || {
                let first = n as u64 * part;
                for at in (first..first + part).step_by(0x10000) {
                    let there = client.read(at, 0x10000).unwrap();
                    assert!(there == before[at as usize..][..0x10000], "{n} at {at}");
                    assert_eq!(client.write(at, &stamp(n, at, 0x10000), 0), 0);
                }
                // Many small ones at a time.
                for k in 0..16 {
                    client.send(cmd::WRITE, 0, first + k * 4096, 4096, &stamp(n + 100, k, 4096));
                }
                assert!((0..16).all(|_| client.reply().0 == 0));
            });
        }
    });
    assert_eq!(nbd[loops - 1].call(cmd::FLUSH, 0, 0, 0, &[]), 0);
    let expected = |n: usize, at: u64| {
        let first = n as u64 * part;
        let mut bytes = stamp(n, at, 0x10000);
        if at == first {
            bytes = (0..16).flat_map(|k| stamp(n + 100, k, 4096)).collect();
        }
        bytes
    };
    // Each reads what all have written, and it is in the image.
    let image = fs::read(lab.image("disk")).unwrap();
    for n in 0..nbd.len() {
        let first = n as u64 * part;
        for at in (first..first + part).step_by(0x10000) {
            let expected = expected(n, at);
            let reader = (n + 1 + at as usize / 0x10000) % (loops * EACH);
            assert!(nbd[reader].read(at, 0x10000).unwrap() == expected, "{reader} at {at}");
            assert!(image[at as usize..][..0x10000] == expected, "{at}");
        }
    }
    let stats = map.mapping.stats();
    let all = (loops * EACH) as u64;
    assert_eq!(stats.device.written_bytes, all * (part + 16 * 4096));
    assert_eq!(stats.device.read_bytes, 2 * all * part);
    assert_eq!(stats.requests.iter().sum::<u64>(), stats.device.completed);
    assert!(stats.requests.iter().all(|n| *n > 20), "{:?}", stats.requests);
    assert_eq!((stats.device.failed, stats.turned_away), (0, 0));
    let port = stats.turns.device().port;
    assert_eq!((port.icrc_errors, port.drop_handed_over), (0, 0));
    let sessions: usize = lab.stats().sessions.iter().sum();
    assert_eq!(sessions, 1, "they are shares of one session");
    drop(nbd);
    eventually("they are gone", || map.mapping.stats().clients == vec![0; loops]);
    map.mapping.stop();
    map.until_ended().unwrap();
    // What all have done is counted, also at the end.
    assert_eq!(map.mapping.stats().device.read_bytes, 2 * all * part);
    assert!(!map.socket.exists());
}

#[test]
fn two_loops_at_a_server_of_one() {
    data_is_what_it_should_be(2, 1);
}

#[test]
fn two_loops_at_a_server_of_two() {
    data_is_what_it_should_be(2, 2);
}

#[test]
fn three_loops_at_a_server_of_one() {
    data_is_what_it_should_be(3, 1);
}

#[test]
fn three_loops_at_a_server_of_two() {
    data_is_what_it_should_be(3, 2);
}

#[test]
fn there_may_be_more_connections_than_loops_or_fewer_asked_for() {
    for connections in [1, 2, 7] {
        let lab = Lab::new();
        let mut map = map(&lab, 3, |c| c.session.connections = connections).unwrap();
        for client in &mut clients(&mut map, 3, 3) {
            assert_eq!(client.write(4096, &[7; 4096], cmd_flag::FUA), 0);
            assert_eq!(client.read(4096, 4096).unwrap(), [7; 4096]);
        }
        map.end().unwrap();
    }
}

/// A write that was answered is covered by a flush wherever that comes from, and seen by a read.
#[test]
fn a_connection_sees_and_flushes_what_another_loops_has_written() {
    let lab = Lab::on_loops(2, |_| {});
    let mut map = map(&lab, 2, |_| {}).unwrap();
    let mut nbd = clients(&mut map, 2, 1);
    for turn in 0..200u64 {
        let (a, b) = ((turn % 2) as usize, 1 - (turn % 2) as usize);
        let data = [turn as u8; 4096];
        assert_eq!(nbd[a].write(turn % 7 * 4096, &data, 0), 0);
        assert_eq!(nbd[b].call(cmd::FLUSH, 0, 0, 0, &[]), 0);
        assert_eq!(nbd[b].read(turn % 7 * 4096, 4096).unwrap(), data);
    }
    map.end().unwrap();
}

#[test]
fn clients_are_counted_at_all_loops_together() {
    let lab = Lab::new();
    let mut map = map(&lab, 2, |c| c.max_clients = 3).unwrap();
    let mut nbd: Vec<Client> = (0..3).map(|_| map.client()).collect();
    for _ in 0..20 {
        assert!(Client::raw(&map.socket).closed());
    }
    let stats = map.mapping.stats();
    assert_eq!((stats.clients, stats.turned_away), (vec![2, 1], 20));
    // Of the second loop.
    nbd.remove(1);
    eventually("the end of one", || map.mapping.stats().clients == [2, 0]);
    eventually("room for another", || {
        let mut client = Client::raw(&map.socket);
        let mut hello = [0; 18];
        let welcome = client.s.read_exact(&mut hello).is_ok();
        if welcome {
            assert_eq!(map.mapping.stats().clients, [2, 1]);
        }
        welcome
    });
    map.end().unwrap();
}

#[test]
fn stopping_answers_what_has_arrived_at_each_loop() {
    for loops in [2, 3] {
        let lab = Lab::new();
        let mut map = map(&lab, loops, |_| {}).unwrap();
        let mut nbd = clients(&mut map, loops, 2);
        for (c, client) in (0u64..).zip(&mut nbd) {
            for n in 0..32 {
                let at = (c * 32 + n) * 4096;
                client.send(cmd::WRITE, 0, at, 4096, &stamp(0, at, 4096));
            }
        }
        map.mapping.stop();
        for client in &mut nbd {
            let mut answered = 0;
            while let Ok((e, _)) = client.try_reply() {
                assert_eq!(e, 0);
                answered += 1;
            }
            assert_eq!(answered, 32);
        }
        map.end().unwrap();
        let image = fs::read(lab.image("disk")).unwrap();
        for at in (0..nbd.len() * 32 * 4096).step_by(4096) {
            assert!(image[at..][..4096] == stamp(0, at as u64, 4096), "{at}");
        }
        // The device was closed, and the session is over.
        lab.map("another", "disk").end().unwrap();
    }
}

#[test]
fn stopping_waits_for_no_client_that_reads_nothing() {
    let lab = Lab::new();
    let mut map = map(&lab, 2, |c| c.grace = Duration::from_millis(300)).unwrap();
    let mut nbd = clients(&mut map, 2, 1);
    // At the second loop.
    for n in 0..64 {
        nbd[1].send(cmd::READ, 0, (n % 8) << 20, 1 << 20, &[]);
    }
    map.end().unwrap();
}

/// Returns the errors that clients at all loops get who write without end, when the server ends.
fn errors_at_the_servers_end(loops: usize) -> Vec<u32> {
    let mut lab = Lab::on_loops(2, |_| {});
    let mut map = map(&lab, loops, |_| {}).unwrap();
    let nbd = clients(&mut map, loops, 2);
    let written = AtomicU64::new(0);
    let errors: Vec<u32> = thread::scope(|scope| {
        let threads: Vec<_> = (0u64..)
            .zip(nbd)
            .map(|(t, mut c)| {
                let written = &written;
                scope.spawn(move || {
                    let mut errors = Vec::new();
                    // One that has no request in flight only sees that the connection is over.
                    while let Ok(cookie) = c.try_send(cmd::WRITE, 0, t * MIB, 8192, &[t as u8; 8192]) {
                        let (e, answered) = c.try_reply().expect("what could be sent is answered");
                        assert_eq!(answered, cookie);
                        errors.extend((e != 0).then_some(e));
                        written.fetch_add(1, SeqCst);
                    }
                    errors
                })
            })
            .collect();
        eventually("all work", || written.load(SeqCst) > 100);
        lab.end();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    assert!(matches!(map.until_ended(), Err(MapFailure::Lost(_))));
    assert!(!map.socket.exists());
    errors
}

#[test]
fn requests_at_each_loop_end_when_the_server_does() {
    for loops in [2, 3] {
        // On a busy machine there may be none in flight at that moment.
        let mut attempts = (0..20).map(|_| errors_at_the_servers_end(loops));
        let errors = attempts.find(|errors| !errors.is_empty());
        let errors = errors.expect("requests that were in flight are answered");
        assert!(
            errors.iter().all(|e| *e == EIO),
            "NBD knows no better error: {errors:?}"
        );
    }
}

#[test]
fn what_can_not_be_mapped_ends_all_loops() {
    let lab = Lab::new();
    let writer = lab.map("writer", "disk");
    let refused = map(&lab, 2, |_| {}).map(drop);
    assert!(
        matches!(&refused, Err(MapFailure::Map { error: MapError::Refused { errno, .. }, .. }) if *errno == Errno::EPERM),
        "{refused:?}"
    );
    let reader = map(&lab, 2, |c| c.devices[0].mode = AccessMode::ReadOnly).unwrap();
    assert_eq!(reader.client().write(0, &[0; 512], 0), 1, "EPERM");
    let taken = map(&lab, 2, |c| {
        (c.session.name, c.devices[0].mode) = ("third".into(), AccessMode::ReadOnly);
    });
    let taken = taken.map(drop);
    assert!(matches!(taken, Err(MapFailure::Socket(_))), "{taken:?}");
    // The name of a session that is there.
    let refused = map(&lab, 2, |c| c.listen = vec![Listen::Unix(lab.dir.path().join("other"))]).map(drop);
    assert!(matches!(refused, Err(MapFailure::Session(_))), "{refused:?}");
    reader.end().unwrap();
    writer.end().unwrap();
    map(&lab, 2, |_| {}).unwrap().end().unwrap();
}

#[test]
fn a_server_that_takes_fewer_requests_than_there_are_loops_is_refused() {
    let lab = Lab::with(|c| c.rtrs.queue_depth = 2, None);
    let refused = map(&lab, 3, |_| {}).map(drop);
    let Err(MapFailure::Session(e)) = refused else {
        panic!("{refused:?}")
    };
    let text = e.to_string();
    assert!(text.contains("3 loops") && text.contains("takes 2"), "{text}");
    // One for each is enough, if little.
    let mut map = map(&lab, 2, |_| {}).unwrap();
    for client in &mut clients(&mut map, 2, 2) {
        assert_eq!(client.write(0, &[1; 8192], 0), 0);
        assert_eq!(client.read(0, 8192).unwrap(), [1; 8192]);
    }
    map.end().unwrap();
}

#[test]
fn one_that_is_not_open_yet_can_be_stopped() {
    let lab = Lab::new();
    // Nobody is there.
    let config = MapConfig {
        session: rtrs::client::SessionConfig {
            paths: vec![rtrs::addr::PathAddr {
                src: lab.path().src,
                dst: (std::net::IpAddr::from(ferroce_loopback::address()), 1234).into(),
            }],
            ..lab.config("s", "disk").session
        },
        ..lab.config("s", "disk")
    };
    let mut map = lab.begin(2, config);
    thread::sleep(Duration::from_millis(50));
    map.mapping.stop();
    let ended = map.until_ended();
    assert!(!matches!(ended, Err(MapFailure::Loop(_))), "{ended:?}");
}
