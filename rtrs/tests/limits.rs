//! Who may do what, and how much of it: each limit refuses, is counted, and gives back what ends.

mod support;

use std::net::IpAddr;

use roce::{Device, Provider};
use rtrs::{Error, PathError, admission::AccessList, client::Session, errno, server::ServerConfig};
use support::{raw::Client, *};

/// Another host.
fn host() -> (Device, IpAddr) {
    let (ip, _) = addresses();
    (device(ip), ip)
}

fn client(bed: &Bed) -> Client {
    Client::new(&bed.client_dev, bed.path.src.unwrap(), bed.path.dst)
}

fn rules(rules: &[String]) -> AccessList {
    AccessList::new(rules.iter().map(|r| r.parse().unwrap()))
}

#[test]
fn a_name_is_only_for_its_addresses() {
    let (mine, ip) = host();
    let bed = Bed::new(ServerConfig {
        allow: rules(&[format!("db={ip}")]),
        ..config()
    });
    // Not from the bed's client.
    let e = Session::open(&bed.client_dev, bed.args("db", 1)).unwrap_err();
    assert!(matches!(e, Error::Path(PathError::PeerDisconnected)), "{e}");
    eventually("its end", || bed.server.sessions().is_empty());
    assert_eq!(bed.server.counters().refused_name, 1);
    let other = bed.open("web", 1);

    let args = rtrs::client::OpenArgs {
        paths: vec![rtrs::addr::PathAddr {
            src: Some(ip),
            ..bed.path
        }],
        ..bed.args("db", 1)
    };
    let session = Session::open(&mine, args).unwrap();
    write(&session, 0, b"db").result.unwrap();

    // Who knows its UUID may not join it from elsewhere.
    let uuid = bed.server.sessions().iter().find(|s| s.name() == "db").unwrap().uuid();
    let mut thief = client(&bed);
    thief.session = uuid;
    assert_eq!(thief.connect(thief.request(0, 2)), Err(errno::EACCES));
    assert_eq!(bed.server.counters().refused_name, 2);
    write(&session, 0, b"db").result.unwrap();
    write(&other, 0, b"web").result.unwrap();
}

#[test]
fn a_named_address_may_connect_beside_the_plain_ones() {
    let (mine, ip) = host();
    let bed = Bed::new(ServerConfig {
        allow: rules(&["192.0.2.0/24".into(), format!("db={ip}")]),
        ..config()
    });
    let mut c = Client::new(&mine, ip, bed.path.dst);
    c.open("db");
    let mut c = client(&bed);
    assert_eq!(c.connect(c.request(0, 2)), Err(errno::EACCES));
    assert_eq!(bed.server.counters().refused_address, 1);
}

#[test]
fn one_client_has_so_many_sessions_and_another_gets_in() {
    let bed = Bed::new(ServerConfig {
        max_sessions_per_client: 3,
        ..config()
    });
    let mut held: Vec<_> = (0..3).map(|i| bed.open(&format!("s{i}"), 1)).collect();
    let mut c = client(&bed);
    assert_eq!(c.connect(c.request(0, 2)), Err(errno::EUSERS));
    assert_eq!(bed.server.counters().refused_sessions_of_client, 1);
    let (other, ip) = host();
    Client::new(&other, ip, bed.path.dst).open("other");
    held.pop().unwrap().close();
    eventually("its end", || bed.server.sessions().iter().all(|s| s.name() != "s2"));
    client(&bed).open("again");
}

#[test]
fn paths_and_connections_have_limits() {
    let bed = Bed::new(ServerConfig {
        max_paths: 2,
        max_connections: 4,
        ..config()
    });
    let _first = bed.open("first", 3);
    let mut c = client(&bed);
    assert_eq!(c.connect(c.request(0, 5)), Err(errno::ECONNRESET));
    let _second = bed.open("second", 1);
    assert_eq!(c.connect(c.request(0, 2)), Err(errno::EUSERS));
    let counters = bed.server.counters();
    assert_eq!((counters.refused_connections, counters.refused_paths), (1, 1));
    assert_eq!(counters.connections_refused, 2);
}

/// The device has no regions left: the path that needs them ends, and leaves nothing behind.
#[test]
fn a_session_that_there_is_no_room_for_ends() {
    let bed = Bed::new(config());
    let pd = bed.server_dev.alloc_pd().unwrap();
    let hog = || {
        let mut regions = Vec::new();
        while let Ok(region) = bed.server_dev.alloc_revocable(&pd) {
            regions.push(region);
        }
        regions
    };
    let mut regions = hog();
    let all = regions.len();
    // Half of what a session takes.
    regions.truncate(all - 16);
    for n in 1..4 {
        let mut c = client(&bed);
        // Its first connection stands before the server has allocated.
        let _ = c.connect(c.request(0, 2));
        eventually("the end", || bed.server.counters().no_resources == n);
        assert!(bed.server.sessions().is_empty());
        drop(c);
    }
    regions.extend(hog());
    assert_eq!(regions.len(), all, "nothing is lost");
    drop(regions);
    let session = bed.open("good", 1);
    write(&session, 0, b"room").result.unwrap();
}
