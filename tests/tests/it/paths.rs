//! Mappings that outlive their server, and such over several paths.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    thread,
};

use ferroce_tests::{
    device::{image, map, map_args, serve},
    eventually, fresh_address,
    nbd::{self, Client, EIO},
    pattern,
    process::run,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const BLOCK: usize = 32 << 10;
const BLOCKS: usize = 400;

/// An image of zeroes, and how it is exported.
fn exported(dir: &Path) -> (PathBuf, [String; 1]) {
    let image = image(dir, "disk.img", &vec![0; BLOCK * BLOCKS]);
    let export = [format!("disk={}", image.display())];
    (image, export)
}

#[test]
fn a_copy_goes_on_when_its_server_was_killed_and_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let (image, export) = exported(dir.path());
    let server = fresh_address();
    let (mut serving, _) = serve(server, &export, &[]);
    let socket = dir.path().join("nbd");
    let more = ["--on-loss", "queue", "--reconnect-delay", "0.2"];
    let (mut map, mapped) = map(fresh_address(), &server.to_string(), &socket, &more);
    assert_eq!(mapped["paths"].as_array().unwrap().len(), 1);
    let (go, come) = mpsc::channel();
    let writer = thread::spawn(move || {
        let mut client = Client::connect(&socket).unwrap();
        for n in 0..BLOCKS {
            let offset = (n * BLOCK) as u64;
            let done = client.write(offset, &pattern(n as u64 + 1, BLOCK));
            done.unwrap_or_else(|e| panic!("block {n}: {e:?}"));
            if n % 7 == 0 {
                client.flush().unwrap();
            }
            if n % 100 == 50 {
                go.send(()).unwrap();
            }
            let back = client.read(offset, BLOCK).unwrap();
            assert!(back == pattern(n as u64 + 1, BLOCK), "block {n}");
        }
        client.flush().unwrap();
    });
    for _ in 0..3 {
        come.recv().unwrap();
        serving.signal(Signal::SIGKILL);
        map.event("session_lost");
        serving.wait();
        serving = serve(server, &export, &[]).0;
        map.event("session_back");
        map.event("remapped");
    }
    come.recv().unwrap();
    writer.join().unwrap();
    assert_eq!(map.stop().code, Some(0));
    assert_eq!(serving.stop().code, Some(0));
    let bytes = fs::read(&image).unwrap();
    for (n, block) in bytes.chunks(BLOCK).enumerate() {
        assert!(block == pattern(n as u64 + 1, BLOCK), "block {n} of the image");
    }
}

#[test]
fn without_a_queue_requests_fail_meanwhile_and_work_again_later() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), "disk.img", &[7; BLOCK]);
    let export = [format!("disk={}", image.display())];
    let server = fresh_address();
    let (mut serving, _) = serve(server, &export, &[]);
    let socket = dir.path().join("nbd");
    let more = ["--reconnect-delay", "0.2"];
    let (mut map, _) = map(fresh_address(), &server.to_string(), &socket, &more);
    let mut client = Client::connect(&socket).unwrap();
    serving.signal(Signal::SIGKILL);
    map.event("session_lost");
    assert!(matches!(client.read(0, 4096), Err(nbd::Error::Refused(EIO))));
    serving.wait();
    let (serving, _) = serve(server, &export, &[]);
    map.event("remapped");
    assert_eq!(client.read(0, 4096).unwrap(), [7; 4096]);
    client.write(0, &[8; 4096]).unwrap();
    client.disconnect().unwrap();
    assert_eq!(map.stop().code, Some(0));
    assert_eq!(serving.stop().code, Some(0));
    assert_eq!(fs::read(&image).unwrap()[..4096], [8; 4096]);
}

#[test]
fn a_session_has_as_many_as_128_paths() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), "disk.img", &vec![0; BLOCK * 256]);
    let servers = [(); 8].map(|()| fresh_address().to_string());
    let also: Vec<&str> = servers[1..].iter().flat_map(|addr| ["--addr", addr]).collect();
    let export = [format!("disk={}", image.display())];
    let (serve, _) = serve(servers[0].parse().unwrap(), &export, &also);
    let ours = [(); 16].map(|()| fresh_address());
    let ways = ours
        .iter()
        .flat_map(|src| servers.iter().map(move |dst| format!("{src},{dst}")));
    let ways: Vec<String> = ways.collect();
    let mut more = vec!["--policy", "round-robin"];
    more.extend(ways[1..].iter().flat_map(|way| ["--path", way]));
    let socket = dir.path().join("nbd");
    let (map, mapped) = map(ours[0], &servers[0], &socket, &more);
    assert_eq!(mapped["paths"].as_array().unwrap().len(), 128);
    let mut client = Client::connect(&socket).unwrap();
    for n in 0..256 {
        client.write((n * BLOCK) as u64, &pattern(n as u64, BLOCK)).unwrap();
    }
    client.disconnect().unwrap();
    assert_eq!(map.stop().code, Some(0));
    assert_eq!(serve.stop().code, Some(0));
    let bytes = fs::read(&image).unwrap();
    for (n, block) in bytes.chunks(BLOCK).enumerate() {
        assert!(block == pattern(n as u64, BLOCK), "block {n} of the image");
    }
    // One more is too many.
    let one_more = format!("{},{}", fresh_address(), servers[0]);
    more.extend(["--path", &one_more]);
    let refused = run(&map_args(ours[0], &servers[0], &socket, &more));
    assert_ne!(refused.code, Some(0));
    assert!(refused.stderr.contains("128 paths"), "{}", refused.stderr);
}

#[test]
fn paths_from_several_addresses_carry_load_together() {
    for policy in ["round-robin", "mi", "min-latency"] {
        let dir = tempfile::tempdir().unwrap();
        let image = image(dir.path(), "disk.img", &vec![0; BLOCK * 32]);
        let server = fresh_address();
        let (mut serving, _) = serve(server, &[format!("disk={}", image.display())], &[]);
        let socket = dir.path().join("nbd");
        let ours = [(); 2].map(|()| fresh_address());
        let second = format!("{},{server}", ours[1]);
        let more = ["--path", &second, "--policy", policy];
        let (map, mapped) = map(ours[0], &server.to_string(), &socket, &more);
        let paths = ours.map(|addr| json!(format!("ip:{addr}@ip:{server}")));
        assert_eq!(mapped["paths"], json!(paths));
        let mut client = Client::connect(&socket).unwrap();
        for n in 0..32 {
            client.write((n * BLOCK) as u64, &pattern(n as u64, BLOCK)).unwrap();
        }
        client.disconnect().unwrap();
        assert_eq!(map.stop().code, Some(0));
        let gone = serving.event("session_closed");
        assert_eq!(gone["session"], "test");
        let end = serving.stop();
        assert_eq!(end.code, Some(0));
        // Each is told of once, within its session.
        let told = end.json();
        let at = |event: &str, path: &Value| {
            let is =
                |e: &Value| e["event"] == event && (path.is_null() || e["path"] == *path) && e["session"] == "test";
            let at: Vec<_> = (0..told.len()).filter(|n| is(&told[*n])).collect();
            assert_eq!(at.len(), 1, "{event} {path}: {told:?}");
            at[0]
        };
        let (opened, closed) = (at("session_opened", &Value::Null), at("session_closed", &Value::Null));
        for path in &paths {
            let (up, down) = (at("path_up", path), at("path_down", path));
            assert!(opened < up && up < down && down < closed, "{told:?}");
            assert_eq!(told[down]["why"], "the peer disconnected");
        }
        let bytes = fs::read(&image).unwrap();
        for (n, block) in bytes.chunks(BLOCK).enumerate() {
            assert!(block == pattern(n as u64, BLOCK), "block {n}");
        }
    }
}

#[test]
fn ctrl_c_ends_a_mapping_whose_requests_wait_for_a_server() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), "disk.img", &[7; BLOCK]);
    let server = fresh_address();
    let (mut serving, _) = serve(server, &[format!("disk={}", image.display())], &[]);
    let socket = dir.path().join("nbd");
    let (mut map, _) = map(fresh_address(), &server.to_string(), &socket, &["--on-loss", "queue"]);
    let mut client = Client::connect(&socket).unwrap();
    serving.signal(Signal::SIGKILL);
    serving.wait();
    map.event("session_lost");
    let waiting = thread::spawn(move || client.read(0, 4096));
    let done = map.stop();
    // What was written may not be durable: that is no good end.
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(waiting.join().unwrap().is_err());
    assert!(!socket.exists());
}

#[test]
fn what_can_not_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd");
    let (src, dst) = (fresh_address(), fresh_address().to_string());
    let again = format!("{src},{dst}");
    for (more, word) in [
        (&["--path", &again][..], "twice"),
        (&["--policy", "best"], "min-inflight"),
        (&["--max-reconnects", "10000"], "9999"),
        (&["--max-reconnects", "-2"], "-1"),
        (&["--on-loss", "wait"], "queue"),
        (&["--reconnect-delay", "0"], "0"),
    ] {
        let done = run(&map_args(src, &dst, &socket, more));
        assert_eq!(done.code, Some(2), "{more:?}: {}", done.stderr);
        assert!(done.stderr.contains(word), "{more:?}: {}", done.stderr);
    }
}

#[test]
fn a_server_that_is_back_before_all_paths_are_known_to_be_lost_is_another() {
    let dir = tempfile::tempdir().unwrap();
    let (_, export) = exported(dir.path());
    let server = fresh_address();
    let (mut serving, _) = serve(server, &export, &[]);
    let socket = dir.path().join("nbd");
    let paths = [(); 3].map(|()| format!("{},{server}", fresh_address()));
    let mut more = vec!["--on-loss", "queue", "--reconnect-delay", "0.01"];
    paths.iter().for_each(|p| more.extend(["--path", p]));
    let (mut map, _) = map(fresh_address(), &server.to_string(), &socket, &more);
    let stop = Arc::new(AtomicBool::new(false));
    let written = Arc::new(AtomicUsize::new(0));
    let (asked, counted) = (stop.clone(), written.clone());
    let writer = thread::spawn(move || {
        let mut client = Client::connect(&socket).unwrap();
        let mut n = 0;
        while !asked.load(Relaxed) {
            n = (n + 1) % BLOCKS;
            client.write((n * BLOCK) as u64, &pattern(n as u64, BLOCK)).unwrap();
            counted.fetch_add(1, Relaxed);
        }
    });
    for round in 0..3 {
        // The paths are up again, and carry load.
        if round > 0 {
            (0..=paths.len()).for_each(|_| drop(map.event("path_up")));
        }
        let before = written.load(Relaxed);
        eventually("the load", || {
            assert!(!writer.is_finished(), "round {round}: {}", map.stderr());
            written.load(Relaxed) > before + BLOCKS
        });
        if round < 2 {
            serving.signal(Signal::SIGKILL);
            serving.wait();
            serving = serve(server, &export, &[]).0;
        }
    }
    stop.store(true, Relaxed);
    writer.join().unwrap();
    assert_eq!(map.stop().code, Some(0));
    assert_eq!(serving.stop().code, Some(0));
}
