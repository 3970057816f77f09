//! IPv6, and addresses that come and go: in a network namespace of its own, as loopback has one IPv6 address only.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use ferroce_tests::{device::image, nbd::Client, network::Namespace, pattern, process::Running};

/// With two addresses of each IP version.
fn namespace() -> Namespace {
    let addresses = ["fd00::1/128", "fd00::2/128", "10.0.0.1/32", "10.0.0.2/32"];
    let setup = addresses.map(|address| format!("addr add {address} dev lo"));
    Namespace::new(&setup.each_ref().map(String::as_str))
}

#[test]
#[ignore = "needs the right to make a network namespace"]
fn a_device_over_ipv6() {
    let namespace = namespace();
    let dir = tempfile::tempdir().unwrap();
    let want = pattern(1, 8 << 20);
    let export = format!("disk={}", image(dir.path(), "disk.img", &want).display());
    let mut serve = namespace.run(&["serve", "--json", "--addr", "fd00::1", "--export", &export]);
    serve.event("listening");
    let socket = dir.path().join("nbd.sock");
    let nbd = socket.to_str().unwrap();
    let path = ["--path", "ip:fd00::2,ip:fd00::1"];
    let args = ["map", "--json", "--session", "s", "--device", "disk", "--nbd", nbd];
    let mut map = namespace.run(&[&args[..], &path[..]].concat());
    map.event("mapped");
    let mut client = Client::connect(&socket).unwrap();
    assert!(client.read(0, want.len()).unwrap() == want);
    client.write(4096, &pattern(2, 1 << 20)).unwrap();
    client.flush().unwrap();
    assert!(client.read(4096, 1 << 20).unwrap() == pattern(2, 1 << 20));
    let done = map.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let summary = done.json().pop().unwrap();
    assert_eq!(summary["icrc_errors"], 0);
    assert_eq!(serve.stop().code, Some(0));
}

/// Waits for an event of this path, whatever comes of others.
fn wait_for(map: &mut Running, name: &str, path: &str) {
    loop {
        let event = map.next_event();
        let of = event["path"].as_str().unwrap_or_default();
        if event["event"] == name && of.contains(path) {
            return;
        }
        assert_ne!(event["event"], "session_lost", "{event}");
    }
}

/// A path over IPv4 and one over IPv6, each of which loses an end while the other carries all.
#[test]
#[ignore = "needs the right to make a network namespace"]
fn addresses_of_both_ip_versions_come_and_go_at_several_loops() {
    const PART: usize = 256 << 10;
    let namespace = namespace();
    let dir = tempfile::tempdir().unwrap();
    let file = image(dir.path(), "disk.img", &vec![0; 3 * PART]);
    let export = format!("disk={}", file.display());
    let listen = ["--addr", "10.0.0.1", "--addr", "fd00::1", "--threads", "2"];
    let mut serve = namespace.run(&[&["serve", "--json", "--export", &export], &listen[..]].concat());
    serve.event("listening");
    let socket = dir.path().join("nbd.sock");
    let nbd = socket.to_str().unwrap();
    let args = ["map", "--json", "--session", "s", "--device", "disk", "--nbd", nbd];
    let paths = ["--path", "ip:10.0.0.2,ip:10.0.0.1", "--path", "ip:fd00::2,ip:fd00::1"];
    let more = [
        "--connections",
        "3",
        "--policy",
        "round-robin",
        "--reconnect-delay",
        "0.3",
    ];
    let mut map = namespace.run(&[&args[..], &paths[..], &more[..]].concat());
    map.event("mapped");
    let stop = AtomicBool::new(false);
    let rounds: Vec<u64> = thread::scope(|scope| {
        let writers = [0, 1, 2].map(|n| {
            let (socket, stop) = (&socket, &stop);
            scope.spawn(move || {
                let mut client = Client::connect(socket).unwrap();
                let mut round = 0;
                while !stop.load(Relaxed) {
                    round += 1;
                    let bytes = pattern(round * 3 + n, PART);
                    client.write(n * PART as u64, &bytes).unwrap();
                    assert!(client.read(n * PART as u64, PART).unwrap() == bytes);
                }
                client.flush().unwrap();
                round
            })
        });
        for (addr, prefix, path) in [
            ("fd00::1", "/128", "fd00::1"),
            ("10.0.0.2", "/32", "10.0.0.1"),
            ("fd00::2", "/128", "fd00::1"),
        ] {
            let whole = format!("{addr}{prefix}");
            namespace.ip(&format!("addr del {whole} dev lo"));
            wait_for(&mut map, "path_down", path);
            namespace.ip(&format!("addr add {whole} dev lo"));
            wait_for(&mut map, "path_up", path);
        }
        stop.store(true, Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    let done = map.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    for done in [done, serve.stop()] {
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let summary = done.json().pop().unwrap();
        let addresses = summary["addresses"].as_array().unwrap();
        assert_eq!(addresses.len(), 2, "{summary}");
        assert!(
            addresses.iter().all(|one| one["packets_received"].as_u64() > Some(0)),
            "{summary}"
        );
        assert_eq!(summary["icrc_errors"], 0, "{summary}");
    }
    let there = fs::read(file).unwrap();
    for ((n, round), part) in (0..).zip(rounds).zip(there.chunks(PART)) {
        assert!(part == pattern(round * 3 + n, PART), "part {n} of the image");
    }
}
