//! Servers with several loops, mappings with several connections, and daemons with several mappings, as processes.

use std::{fs, os::unix::fs::FileExt, sync::mpsc, thread};

use ferroce_tests::{
    device::{image, map, map_when_free, serve},
    fresh_address,
    nbd::Client,
    pattern,
    process::{Running, run},
};
use nix::sys::signal::Signal;

const MIB: usize = 1 << 20;

/// Names of a process's threads.
fn threads(process: &Running) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
    let mut names: Vec<String> = tasks
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| name.starts_with("ferroce-io"))
        .collect();
    names.sort();
    names
}

/// What they are called if there are so many loops.
fn names(loops: usize) -> Vec<String> {
    let name = |n| match n {
        0 => "ferroce-io".to_owned(),
        n => format!("ferroce-io-{n}"),
    };
    (0..loops).map(name).collect()
}

fn several_clients(loops: usize) {
    let dir = tempfile::tempdir().unwrap();
    let server = fresh_address();
    let clients = 2 * loops;
    let images: Vec<_> = (0..clients)
        .map(|n| {
            let bytes = pattern(n as u64, 4 * MIB);
            (image(dir.path(), &format!("i{n}"), &bytes), bytes)
        })
        .collect();
    let exports: Vec<String> = images
        .iter()
        .enumerate()
        .map(|(n, (path, _))| format!("disk{n}={}", path.display()))
        .collect();
    let pcap = dir.path().join("trace.pcap");
    let (count, trace) = (loops.to_string(), pcap.display().to_string());
    let (mut serve, listening) = serve(server, &exports, &["--threads", &count, "--pcap", &trace]);
    assert_eq!(listening["threads"], loops);
    assert_eq!(threads(&serve), names(loops));
    let maps: Vec<_> = (0..clients)
        .map(|n| {
            let socket = dir.path().join(format!("s{n}"));
            let (session, device) = (format!("client{n}"), format!("disk{n}"));
            // All at one loop.
            let connections = (1 + n % 2 * loops).to_string();
            let more = [
                "--max-reconnects",
                "0",
                "--session",
                &session,
                "--device",
                &device,
                "--connections",
                &connections,
            ];
            let (map, _) = map(fresh_address(), &server.to_string(), &socket, &more);
            let opened = serve.event("session_opened");
            assert_eq!(opened["session"], session);
            assert_eq!(opened["connections"], 2 + n % 2 * loops);
            (map, socket)
        })
        .collect();
    thread::scope(|scope| {
        for ((_, socket), (path, bytes)) in maps.iter().zip(&images) {
            scope.spawn(move || {
                let mut client = Client::connect(socket).unwrap();
                for at in (0..4 * MIB).step_by(MIB) {
                    assert!(client.read(at as u64, MIB).unwrap() == bytes[at..at + MIB]);
                    let inverted: Vec<u8> = bytes[at..at + MIB].iter().map(|b| !b).collect();
                    client.write(at as u64, &inverted).unwrap();
                }
                client.flush().unwrap();
                let inverted: Vec<u8> = bytes.iter().map(|b| !b).collect();
                assert!(fs::read(path).unwrap() == inverted);
            });
        }
    });
    // It ends in good order with clients there.
    serve.signal(Signal::SIGINT);
    let done = serve.end();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let events = done.json();
    let count = |event: &str| events.iter().filter(|e| e["event"] == event).count();
    assert_eq!((count("session_opened"), count("session_closed")), (clients, clients));
    let summary = events.iter().find(|e| e["event"] == "summary").unwrap();
    assert_eq!(summary["bytes_read"], clients * 4 * MIB, "{summary}");
    assert_eq!(summary["bytes_written"], clients * 4 * MIB, "{summary}");
    assert_eq!(summary["icrc_errors"], 0, "{summary}");
    for (map, _) in maps {
        map.end();
    }
    // What all loops have sent and received is in the file, once, and sound.
    let check = run(&["pcap", "check", &trace]);
    assert_eq!(check.code, Some(0), "{}{}", check.stdout, check.stderr);
}

#[test]
fn two_loops_serve_several_processes() {
    several_clients(2);
}

#[test]
fn three_loops_serve_several_processes() {
    several_clients(3);
}

#[test]
fn a_port_of_an_address_has_one_server() {
    let dir = tempfile::tempdir().unwrap();
    let export = format!("disk={}", image(dir.path(), "i", &[0; 4096]).display());
    let addr = fresh_address();
    let (first, _) = serve(addr, std::slice::from_ref(&export), &["--threads", "2"]);
    for threads in ["1", "2"] {
        let listen = addr.to_string();
        let args = ["serve", "--addr", &listen, "--export", &export, "--threads", threads];
        let done = run(&args);
        assert_eq!(done.code, Some(1), "{}", done.stdout);
        assert!(done.stderr.contains("port 1234"), "{}", done.stderr);
        assert!(done.stderr.contains("is taken by ferroce (process"), "{}", done.stderr);
    }
    assert_eq!(first.stop().code, Some(0));
}

#[test]
fn the_number_of_loops_is_checked() {
    for threads in ["0", "65", "x"] {
        let args = [
            "serve",
            "--addr",
            "127.0.0.1",
            "--export",
            "a=/dev/null",
            "--threads",
            threads,
        ];
        assert_eq!(run(&args).code, Some(2), "{threads}");
    }
}

#[test]
fn what_was_written_before_a_server_is_killed_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "i", &vec![0; MIB]);
    let addr = fresh_address();
    let (serve, _) = serve(addr, &[format!("disk={}", path.display())], &["--threads", "2"]);
    let socket = dir.path().join("s");
    let (map, _) = map(fresh_address(), &addr.to_string(), &socket, &[]);
    let mut client = Client::connect(&socket).unwrap();
    client.write_fua(4096, &pattern(1, 4096)).unwrap();
    serve.signal(Signal::SIGKILL);
    serve.end();
    let mut there = vec![0; 4096];
    fs::File::open(&path).unwrap().read_exact_at(&mut there, 4096).unwrap();
    assert!(there == pattern(1, 4096));
    map.signal(Signal::SIGTERM);
    map.end();
}

#[test]
fn a_client_is_killed_and_its_device_is_free_at_all_loops() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "i", &vec![0; 8 * MIB]);
    let addr = fresh_address();
    let more = ["--threads", "3", "--heartbeat", "1"];
    let (mut serve, _) = serve(addr, &[format!("disk={}", path.display())], &more);
    let socket = dir.path().join("s");
    let (first, _) = map(fresh_address(), &addr.to_string(), &socket, &["--connections", "5"]);
    let mut clients: Vec<Client> = (0..4).map(|_| Client::connect(&socket).unwrap()).collect();
    let (go, killer) = mpsc::channel();
    let flushed: Vec<usize> = thread::scope(|scope| {
        let writers: Vec<_> = clients
            .iter_mut()
            .enumerate()
            .map(|(n, client)| {
                let go = go.clone();
                scope.spawn(move || {
                    let mut flushed = 0;
                    loop {
                        let at = (n * 2 * MIB + flushed % 16 * 4096) as u64;
                        let done = client.write(at, &pattern(flushed as u64, 4096));
                        if done.and_then(|()| client.flush()).is_err() {
                            return flushed;
                        }
                        flushed += 1;
                        if flushed == 20 {
                            go.send(()).unwrap();
                        }
                    }
                })
            })
            .collect();
        (0..4).for_each(|_| killer.recv().unwrap());
        first.signal(Signal::SIGKILL);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    first.end();
    assert_eq!(serve.event("session_closed")["session"], "test");
    let there = fs::read(&path).unwrap();
    for (n, flushed) in flushed.into_iter().enumerate() {
        // That of one more write may be there.
        for turn in flushed - 15..flushed {
            let at = n * 2 * MIB + turn % 16 * 4096;
            assert!(there[at..at + 4096] == pattern(turn as u64, 4096), "{n} in {turn}");
        }
    }
    // The writer's right is free as soon as all loops have closed the image.
    let (second, _) = map_when_free(fresh_address(), &addr.to_string(), &socket, &[]);
    Client::connect(&socket).unwrap().write(0, &pattern(99, 4096)).unwrap();
    assert_eq!(second.stop().code, Some(0));
    let done = serve.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let events = done.json();
    let count = |event: &str| events.iter().filter(|e| e["event"] == event).count();
    assert_eq!(count("session_opened"), count("session_closed"));
}

/// A mapping with several NBD clients, which is stopped while they are connected, or whose server dies.
fn mapping(connections: usize, at_the_server: usize, killed: bool) {
    let dir = tempfile::tempdir().unwrap();
    let before = pattern(5, 8 * MIB);
    let path = image(dir.path(), "i", &before);
    let addr = fresh_address();
    let (loops_there, count) = (at_the_server.to_string(), connections.to_string());
    let export = [format!("disk={}", path.display())];
    let (mut serve, _) = serve(addr, &export, &["--threads", &loops_there]);
    let (socket, pcap) = (dir.path().join("s"), dir.path().join("trace.pcap"));
    let trace = pcap.display().to_string();
    let more = [
        "--connections",
        &count,
        "--heartbeat",
        "1",
        "--pcap",
        &trace,
        "--max-reconnects",
        "0",
    ];
    let (map, mapped) = map(fresh_address(), &addr.to_string(), &socket, &more);
    assert_eq!(mapped["queue_depth"], 512);
    assert_eq!(threads(&map), names(1));
    assert_eq!(serve.event("session_opened")["connections"], 1 + connections);
    let mut clients: Vec<Client> = (0..4).map(|_| Client::connect(&socket).unwrap()).collect();
    thread::scope(|scope| {
        for (n, client) in clients.iter_mut().enumerate() {
            let before = &before;
            scope.spawn(move || {
                for at in (n * 2 * MIB..(n + 1) * 2 * MIB).step_by(MIB) {
                    assert!(client.read(at as u64, MIB).unwrap() == before[at..at + MIB]);
                    client.write(at as u64, &pattern(n as u64, MIB)).unwrap();
                }
            });
        }
    });
    clients[1].flush().unwrap();
    assert!(clients[0].read(7 * MIB as u64, MIB).unwrap() == pattern(3, MIB));
    let events = match killed {
        true => {
            serve.signal(Signal::SIGKILL);
            serve.end();
            // The flush is not answered, or with an error.
            assert!(clients[2].flush().is_err());
            let done = map.end();
            assert_eq!(done.code, Some(1), "{}", done.stderr);
            assert!(done.stderr.contains("lost"), "{}", done.stderr);
            done.json()
        }
        false => {
            let done = map.stop();
            assert_eq!(done.code, Some(0), "{}", done.stderr);
            assert_eq!(serve.stop().code, Some(0));
            done.json()
        }
    };
    assert!(clients.iter_mut().all(|client| client.flush().is_err()) && !socket.exists());
    let of = |event: &str| events.iter().filter(|e| e["event"] == event).collect::<Vec<_>>();
    assert_eq!((of("mapped").len(), of("error").len()), (1, usize::from(killed)));
    let [summary] = of("summary")[..] else {
        panic!("{events:?}")
    };
    assert_eq!(summary["bytes_read"], 9 * MIB, "{summary}");
    assert_eq!(summary["bytes_written"], 8 * MIB, "{summary}");
    assert_eq!(
        (&summary["icrc_errors"], &summary["nbd_turned_away"]),
        (&0.into(), &0.into())
    );
    let after: Vec<u8> = (0..8).flat_map(|n| pattern(n / 2, MIB)).collect();
    assert!(fs::read(path).unwrap() == after);
    let check = run(&["pcap", "check", &trace]);
    assert_eq!(check.code, Some(0), "{}{}", check.stdout, check.stderr);
}

#[test]
fn a_mapping_with_one_connection() {
    mapping(1, 1, false);
}

#[test]
fn a_mapping_with_three_connections_at_a_server_of_two_loops() {
    mapping(3, 2, false);
}

#[test]
fn a_mapping_whose_server_of_two_loops_is_killed() {
    mapping(2, 2, true);
}
