//! Who may do what, and how much of it: each limit refuses, is counted, and gives back what ends.

use std::net::IpAddr;

use crate::support::{raw::Client, *};
use ferroce_rig::Session;
use roce::Device;
use roce_verbs::provider::{DeviceIx, KeyId, KeyKind, Provider};
use rtrs::{
    Error, PathError, addr::PathAddr, admission::AccessList, client::SessionConfig, errno, server::ServerConfig,
};

/// Another address, and a device there.
fn elsewhere() -> (Device, IpAddr) {
    let (ip, _) = addresses();
    (device(ip), ip)
}

fn client(bed: &Bed) -> Client {
    Client::new(bed.stranger(), bed.path.src.unwrap(), bed.path.dst)
}

fn rules(rules: &[String]) -> AccessList {
    AccessList::new(rules.iter().map(|r| r.parse().unwrap()))
}

#[test]
fn a_name_is_only_for_its_addresses() {
    let (ip, _) = addresses();
    let mine = host(ip);
    let bed = Bed::new(ServerConfig {
        allow: rules(&[format!("db={ip}")]),
        ..config()
    });
    // Not from the bed's client.
    let e = Session::open(bed.client(), bed.args("db", 1)).unwrap_err();
    assert!(matches!(e, Error::Path(PathError::PeerDisconnected)), "{e}");
    eventually("its end", || bed.server.sessions().is_empty());
    assert_eq!(bed.server.counters().refused_name, 1);
    let other = bed.open("web", 1);

    let args = SessionConfig {
        paths: vec![PathAddr {
            src: Some(ip),
            ..bed.path
        }],
        ..bed.args("db", 1)
    };
    let session = Session::open(&mine, args).unwrap();
    write(&session, 0, b"db").result.unwrap();

    // Who knows its UUID may not join it from elsewhere.
    let (dev, thief_ip) = elsewhere();
    let mut thief = Client::new(&dev, thief_ip, bed.path.dst);
    let sessions = bed.server.sessions();
    thief.session = sessions.iter().find(|s| s.name == "db").unwrap().uuid;
    assert_eq!(thief.connect(thief.request(0, 2)), Err(errno::EACCES));
    assert_eq!(bed.server.counters().refused_name, 2);
    write(&session, 0, b"db").result.unwrap();
    write(&other, 0, b"web").result.unwrap();
}

#[test]
fn a_named_address_may_connect_beside_the_plain_ones() {
    let (mine, ip) = elsewhere();
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
    let opened = |name: &str| {
        let mut c = client(&bed);
        c.open(name);
        c
    };
    let mut held: Vec<_> = (0..3).map(|i| opened(&format!("s{i}"))).collect();
    let mut c = client(&bed);
    assert_eq!(c.connect(c.request(0, 2)), Err(errno::EUSERS));
    assert_eq!(bed.server.counters().refused_sessions_of_client, 1);
    let (other, ip) = elsewhere();
    Client::new(&other, ip, bed.path.dst).open("other");
    drop(held.pop());
    eventually("its end", || bed.server.sessions().iter().all(|s| s.name != "s2"));
    client(&bed).open("again");
}

#[test]
fn paths_and_connections_have_limits() {
    let bed = Bed::new(ServerConfig {
        max_paths: 2,
        max_connections: 4,
        ..config()
    });
    let mut first = client(&bed);
    first.open("first");
    let mut c = client(&bed);
    assert_eq!(c.connect(c.request(0, 5)), Err(errno::ECONNRESET));
    let mut second = client(&bed);
    second.open("second");
    assert_eq!(c.connect(c.request(0, 2)), Err(errno::EUSERS));
    let counters = bed.server.counters();
    assert_eq!((counters.refused_connections, counters.refused_paths), (1, 1));
    assert_eq!(counters.connections_refused, 2);
}

/// The device has no regions left: the path that needs them ends, and leaves nothing behind.
#[test]
fn a_session_that_there_is_no_room_for_ends() {
    let bed = Bed::new(config());
    let pd = bed.server_host.provider(|p| p.alloc_pd(DeviceIx(0)).unwrap());
    let hog = move |p: &mut dyn Provider| {
        let mut keys: Vec<KeyId> = Vec::new();
        while let Ok(key) = p.alloc_key(pd, KeyKind::FastRegistration) {
            keys.push(key);
        }
        keys
    };
    let mut keys = bed.server_host.provider(hog);
    let all = keys.len();
    // Half of what a session takes.
    let some = keys.split_off(all - 16);
    let free = |keys: Vec<KeyId>| {
        bed.server_host
            .provider(move |p| keys.into_iter().for_each(|key| p.free_key(key)));
    };
    free(some);
    for n in 1..4 {
        let mut c = client(&bed);
        // Its first connection stands before the server has allocated.
        let _ = c.connect(c.request(0, 2));
        eventually("the end", || bed.server.counters().no_resources == n);
        eventually("nothing of it", || bed.server.sessions().is_empty());
        drop(c);
    }
    keys.extend(bed.server_host.provider(hog));
    assert_eq!(keys.len(), all, "nothing is lost");
    free(keys);
    let session = bed.open_elsewhere("good");
    write(&session, 0, b"room").result.unwrap();
}
