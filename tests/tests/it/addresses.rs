//! Servers and mappings with several addresses of their own, on one loop and on several.

use std::{collections::BTreeMap, fs, net::Ipv4Addr, path::Path, thread};

use ferroce_tests::{
    device::{image, map, serve, serve_args},
    fresh_address,
    nbd::Client,
    pattern,
    process::{Running, run},
};
use nix::sys::signal::Signal;
use serde_json::Value;

const MIB: usize = 1 << 20;
const CLIENTS: usize = 4;

/// A mapping and its server, each with two addresses, and the paths from each to each.
struct Ways {
    near: [Ipv4Addr; 2],
    far: [Ipv4Addr; 2],
    serve: Running,
    listening: Value,
    map: Running,
    mapped: Value,
    dir: tempfile::TempDir,
}

impl Ways {
    /// Loops of the server, and I/O connections of each path.
    fn start([loops, connections]: [usize; 2], serve_more: &[&str], map_more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = image(dir.path(), "disk.img", &vec![0; CLIENTS * MIB]);
        let (near, far) = ([(); 2].map(|()| fresh_address()), [(); 2].map(|()| fresh_address()));
        let (there, here) = (loops.to_string(), connections.to_string());
        let second = far[1].to_string();
        let more = [&["--addr", &second, "--threads", &there][..], serve_more].concat();
        let (serve, listening) = serve(far[0], &[format!("disk={}", file.display())], &more);
        let second = format!("{},{}", near[1], far[1]);
        let usual = ["--path", &second, "--connections", &here, "--policy", "round-robin"];
        let more = [&usual[..], map_more].concat();
        let (map, mapped) = map(near[0], &far[0].to_string(), &dir.path().join("s"), &more);
        Self {
            near,
            far,
            serve,
            listening,
            map,
            mapped,
            dir,
        }
    }

    /// Each of several clients writes its part of the device and reads it back.
    fn exchange(&self, seed: u64) {
        let socket = self.dir.path().join("s");
        thread::scope(|scope| {
            for n in 0..CLIENTS {
                let socket = &socket;
                scope.spawn(move || {
                    let mut client = Client::connect(socket).unwrap();
                    let bytes = pattern(seed + n as u64, MIB);
                    for at in (0..MIB).step_by(64 << 10) {
                        let piece = &bytes[at..at + (64 << 10)];
                        client.write((n * MIB + at) as u64, piece).unwrap();
                    }
                    client.flush().unwrap();
                    assert!(client.read((n * MIB) as u64, MIB).unwrap() == bytes, "client {n}");
                });
            }
        });
        let there = fs::read(self.dir.path().join("disk.img")).unwrap();
        for (n, part) in there.chunks(MIB).enumerate() {
            assert!(part == pattern(seed + n as u64, MIB), "part {n} of the image");
        }
    }
}

/// Packets received at each address, and in all.
fn received(summary: &Value) -> (BTreeMap<String, u64>, u64) {
    let addresses = summary["addresses"].as_array().unwrap();
    let of = |one: &Value| {
        let text = one["address"].as_str().unwrap().to_owned();
        (text, one["packets_received"].as_u64().unwrap())
    };
    let all = summary["packets_received"].as_u64().unwrap();
    (addresses.iter().map(of).collect(), all)
}

/// Both addresses have had a good part of what came.
fn assert_both(summary: &Value, addrs: [Ipv4Addr; 2]) {
    let (received, all) = received(summary);
    assert_eq!(received.len(), 2, "{summary}");
    assert_eq!(received.values().sum::<u64>(), all, "{summary}");
    for addr in addrs {
        assert!(received[&addr.to_string()] > all / 10, "{addr}: {summary}");
    }
    assert_eq!(summary["icrc_errors"], 0, "{summary}");
}

fn carries(loops: usize, connections: usize) {
    let dir = tempfile::tempdir().unwrap();
    let trace = |name: &str| dir.path().join(name).display().to_string();
    let (far_trace, near_trace) = (trace("far.pcap"), trace("near.pcap"));
    let mut ways = Ways::start([loops, connections], &["--pcap", &far_trace], &["--pcap", &near_trace]);
    let listens: Vec<&str> = ways.listening["addresses"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["address"].as_str().unwrap())
        .collect();
    assert_eq!(listens, ways.far.map(|addr| format!("{addr}:1234")));
    assert_eq!(ways.mapped["paths"].as_array().unwrap().len(), 2);
    let opened = ways.serve.event("session_opened");
    assert_eq!(opened["connections"], 1 + connections);
    ways.exchange(7);
    ways.exchange(70);
    let done = ways.map.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_both(done.json().last().unwrap(), ways.near);
    assert_eq!(ways.serve.event("session_closed")["session"], "test");
    ways.serve.signal(Signal::SIGINT);
    let done = ways.serve.end();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_both(done.json().last().unwrap(), ways.far);
    for trace in [far_trace, near_trace] {
        let check = run(&["pcap", "check", &trace]);
        assert_eq!(check.code, Some(0), "{}{}", check.stdout, check.stderr);
    }
}

#[test]
fn two_addresses_each_on_one_loop() {
    carries(1, 1);
}

#[test]
fn two_addresses_each_on_two_loops_by_three_connections() {
    carries(2, 3);
}

#[test]
fn two_addresses_each_on_three_loops_by_one_connection() {
    carries(3, 1);
}

#[test]
fn ctrl_c_ends_a_server_with_its_clients_at_all_addresses() {
    let ways = Ways::start([2, 3], &[], &["--max-reconnects", "0"]);
    ways.exchange(1);
    ways.serve.signal(Signal::SIGINT);
    let done = ways.serve.end();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let events = done.json();
    let closed: Vec<_> = events.iter().filter(|e| e["event"] == "session_closed").collect();
    assert_eq!(closed.len(), 1, "{events:?}");
    let done = ways.map.end();
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(!ways.dir.path().join("s").exists());
}

#[test]
fn a_server_that_is_back_at_both_addresses_gets_both_paths_again() {
    let mut ways = Ways::start([2, 3], &[], &["--on-loss", "queue", "--reconnect-delay", "0.2"]);
    ways.exchange(1);
    ways.serve.signal(Signal::SIGKILL);
    ways.serve.wait();
    let file = ways.dir.path().join("disk.img");
    let second = ways.far[1].to_string();
    let more = ["--addr", &second, "--threads", "3"];
    ways.serve = serve(ways.far[0], &[format!("disk={}", file.display())], &more).0;
    // The path that is connected second waits until the first has made the session.
    let mut up = 0;
    while up < 2 {
        let event = ways.map.next_event();
        up += usize::from(event["event"] == "path_up");
    }
    ways.exchange(40);
    let done = ways.map.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let done = ways.serve.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_both(done.json().last().unwrap(), ways.far);
}

#[test]
fn a_path_whose_server_address_never_was_does_not_hold_up_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let file = image(dir.path(), "disk.img", &pattern(3, MIB));
    let (near, far) = ([(); 2].map(|()| fresh_address()), fresh_address());
    let (serve, _) = serve(far, &[format!("disk={}", file.display())], &["--threads", "2"]);
    let socket = dir.path().join("s");
    let second = format!("{},{}", near[1], fresh_address());
    let more = [
        "--path",
        &second,
        "--connections",
        "3",
        "--connect-any",
        "--connect-timeout",
        "2",
    ];
    let (map, _) = map(near[0], &far.to_string(), &socket, &more);
    let mut client = Client::connect(&socket).unwrap();
    assert!(client.read(0, MIB).unwrap() == pattern(3, MIB));
    client.disconnect().unwrap();
    assert_eq!(map.stop().code, Some(0));
    assert_eq!(serve.stop().code, Some(0));
}

fn refused(dir: &Path, first: Ipv4Addr, second: &str, threads: &str) -> (Option<i32>, String) {
    let export = format!("disk={}", image(dir, "i", &[0; 4096]).display());
    let done = run(&serve_args(first, &[export], &["--addr", second, "--threads", threads]));
    (done.code, done.stderr)
}

#[test]
fn addresses_that_can_not_be_two_devices_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = fresh_address();
    for threads in ["1", "2"] {
        for (second, code, word) in [
            (first.to_string(), 2, "given twice"),
            ("0.0.0.0".to_owned(), 1, "one includes the other"),
            ("::".to_owned(), 1, "one includes the other"),
            // Nobody's, by RFC 5737.
            ("192.0.2.1".to_owned(), 1, "192.0.2.1"),
        ] {
            let (got, text) = refused(dir.path(), first, &second, threads);
            assert_eq!(got, Some(code), "{second}: {text}");
            assert!(text.contains(word), "{second}: {text}");
        }
    }
}

/// Two ports of one address are one device.
#[test]
fn an_address_may_have_two_ports() {
    let dir = tempfile::tempdir().unwrap();
    let file = image(dir.path(), "disk.img", &pattern(3, MIB));
    let far = fresh_address();
    let second = format!("{far}:4321");
    let more = ["--addr", &second, "--threads", "2"];
    let (serve, listening) = serve(far, &[format!("disk={}", file.display())], &more);
    assert_eq!(listening["addresses"].as_array().unwrap().len(), 2);
    for (port, session) in [(1234, "one"), (4321, "two")] {
        let socket = dir.path().join(session);
        let more = ["--session", session, "--ro", "--connections", "2"];
        let (map, _) = map(fresh_address(), &format!("{far}:{port}"), &socket, &more);
        let mut client = Client::connect(&socket).unwrap();
        assert!(client.read(0, MIB).unwrap() == pattern(3, MIB));
        assert_eq!(map.stop().code, Some(0));
    }
    // From the server's own address.
    let socket = dir.path().join("itself");
    let (map, _) = map(far, &far.to_string(), &socket, &["--ro"]);
    let mut client = Client::connect(&socket).unwrap();
    assert!(client.read(0, MIB).unwrap() == pattern(3, MIB));
    assert_eq!(map.stop().code, Some(0));
    assert_eq!(serve.stop().code, Some(0));
}
