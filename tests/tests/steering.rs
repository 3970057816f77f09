//! Commands for mappings and servers that run, one by one.

use std::{
    fs,
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use ferroce_tests::{
    device::{image, map_args, serve_args},
    eventually, fresh_address,
    nbd::{Client, EIO, Error},
    pattern,
    process::Running,
};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::signal::Signal,
    unistd::Pid,
};
use serde_json::{Value, json};

const BLOCK: usize = 4096;
const BLOCKS: usize = 64;

fn steered(args: &[String], first: &str) -> (Running, Value) {
    let mut running = Running::steered(args);
    let event = running.event(first);
    (running, event)
}

const ENOENT: i32 = 2;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const EINVAL: i32 = 22;
const ENOTCONN: i32 = 107;
const ENXIO: i32 = 6;
const EALREADY: i32 = 114;
const EADDRINUSE: i32 = 98;
const EADDRNOTAVAIL: i32 = 99;

/// A server and a mapping over one path, both steered.
struct Lab {
    dir: tempfile::TempDir,
    client: std::net::Ipv4Addr,
    server: std::net::Ipv4Addr,
    serve: Running,
    map: Running,
    path: String,
}

impl Lab {
    fn new(threads: &str, more: &[&str]) -> Self {
        Self::at_port(1234, threads, more)
    }

    fn at_port(port: u16, threads: &str, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = image(dir.path(), "disk.img", &vec![0; BLOCK * BLOCKS]);
        let server = fresh_address();
        let export = [format!("disk={}", image.display())];
        let at = format!("{server}:{port}");
        let listens = ["--addr", &at, "--threads", threads];
        let also = if port == 1234 { &listens[2..] } else { &listens[..] };
        let (serve, _) = steered(&serve_args(server, &export, also), "listening");
        let client = fresh_address();
        let mut all = vec!["--connections", threads, "--reconnect-delay", "0.2"];
        all.extend(more);
        let args = map_args(client, &at, &dir.path().join("nbd"), &all);
        let (map, _) = steered(&args, "mapped");
        let path = format!("ip:{client}@ip:{server}");
        Self {
            dir,
            client,
            server,
            serve,
            map,
            path,
        }
    }

    fn nbd(&self) -> Client {
        Client::connect(&self.dir.path().join("nbd")).unwrap()
    }

    fn path_command(&self, what: &str) -> Value {
        json!({ "do": what, "path": self.path })
    }

    /// Connects the path again.
    fn reconnect(&mut self) {
        let reconnect = self.path_command("reconnect");
        self.map.done(reconnect);
        assert_eq!(self.list()["paths"][0]["state"], "connected");
    }

    fn list(&mut self) -> Value {
        self.map.done(json!({ "do": "list" }))
    }

    fn sessions(&mut self) -> Vec<Value> {
        let answer = self.serve.done(json!({ "do": "sessions" }));
        answer["sessions"].as_array().unwrap().clone()
    }

    fn end(self) {
        assert_eq!(self.map.stop().code, Some(0));
        assert_eq!(self.serve.stop().code, Some(0));
    }
}

#[test]
fn what_is_listed_is_of_all_loops() {
    for threads in ["1", "3"] {
        let mut lab = Lab::new(threads, &[]);
        let mut clients = [(); 3].map(|()| lab.nbd());
        for n in 0..30 {
            let client = &mut clients[n % 3];
            client.write((n * BLOCK) as u64, &pattern(n as u64, BLOCK)).unwrap();
        }
        for n in 0..9 {
            let read = clients[n % 3].read((n * BLOCK) as u64, BLOCK).unwrap();
            assert!(read == pattern(n as u64, BLOCK));
        }
        let listing = lab.list();
        let device = &listing["devices"][0];
        assert_eq!(device["state"], "open");
        assert_eq!((&device["completed"], &device["failed"]), (&json!(39), &json!(0)));
        assert_eq!(device["written_bytes"], 30 * BLOCK);
        assert_eq!(device["clients"], 3);
        let path = &listing["paths"][0];
        assert_eq!((&path["state"], &path["path"]), (&json!("connected"), &json!(lab.path)));
        // With the messages that opened the device.
        assert!(
            path["writes"].as_u64().unwrap() >= 30 && path["reads"].as_u64().unwrap() >= 9,
            "{path}"
        );
        assert_eq!(path["in_flight"], 0);

        let sessions = lab.sessions();
        assert_eq!((sessions.len(), &sessions[0]["name"]), (1, &json!("test")));
        let at_server = &sessions[0]["paths"][0];
        for what in ["reads", "writes", "read_bytes", "write_bytes"] {
            assert_eq!(
                at_server[what], path[what],
                "{what} with {threads} loops: {at_server} {path}"
            );
        }
        assert_eq!(at_server["established"], at_server["connections"]);
        let devices = lab.serve.done(json!({ "do": "devices" }));
        assert_eq!(devices["devices"].as_array().unwrap().len(), 1);
        assert_eq!(devices["devices"][0]["name"], "disk");
        assert_eq!(devices["devices"][0]["bytes"], BLOCK * BLOCKS);

        let reset = lab.path_command("reset_path_stats");
        lab.map.done(reset);
        assert_eq!(lab.list()["paths"][0]["writes"], 0);
        let (session, path) = (&sessions[0]["session"], &at_server["path"]);
        lab.serve
            .done(json!({ "do": "reset_server_path_stats", "session": session, "path": path }));
        assert_eq!(lab.sessions()[0]["paths"][0]["writes"], 0);
        drop(clients);
        lab.end();
    }
}

/// Binds the only loop of a process to a processor.
fn bind(process: &Running, cpu: usize) {
    let mut tasks = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
    let is_loop = |task: &fs::DirEntry| fs::read_to_string(task.path().join("comm")).is_ok_and(|s| s == "ferroce-io\n");
    let task = tasks.find_map(|task| task.ok().filter(is_loop)).unwrap();
    let thread = task.file_name().to_str().unwrap().parse().unwrap();
    let mut one = CpuSet::new();
    one.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(thread), &one).unwrap();
}

/// Stops a process. The signal alone does not wait for a thread that is at work.
fn stop(process: &Running) {
    process.signal(Signal::SIGSTOP);
    eventually("it is stopped", || {
        let mut tasks = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
        let is_stopped = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
        tasks.all(|task| fs::read_to_string(task.unwrap().path().join("stat")).is_ok_and(is_stopped))
    });
}

#[test]
fn answers_that_a_loop_takes_on_another_processor_are_counted() {
    let ours = sched_getaffinity(Pid::this()).unwrap();
    let mut cpus = (0..CpuSet::count()).filter(|cpu| ours.is_set(*cpu).unwrap());
    let (Some(sent), Some(taken)) = (cpus.next(), cpus.next()) else {
        panic!("this needs two processors");
    };
    let mut lab = Lab::new("1", &[]);
    bind(&lab.map, sent);
    let reset = lab.path_command("reset_path_stats");
    lab.map.done(reset);
    let mut client = lab.nbd();
    for n in 0..20 {
        client.write(n * BLOCK as u64, &pattern(n, BLOCK)).unwrap();
    }
    let path = &lab.list()["paths"][0];
    assert_eq!((&path["cpu_migration_from"], &path["writes"]), (&json!([]), &json!(20)));
    assert_eq!(path["cpu_migration_to"], json!([]));

    stop(&lab.serve);
    let reading = thread::spawn(move || {
        assert!(client.read(0, BLOCK).unwrap() == pattern(0, BLOCK));
        client
    });
    eventually("it is sent", || lab.list()["paths"][0]["in_flight"] == 1);
    bind(&lab.map, taken);
    lab.serve.signal(Signal::SIGCONT);
    reading.join().unwrap().disconnect().unwrap();
    let path = &lab.list()["paths"][0];
    let only = |cpu: usize| Value::from((0..=cpu).map(|n| u64::from(n == cpu)).collect::<Vec<_>>());
    assert_eq!(path["cpu_migration_from"], only(sent));
    assert_eq!(path["cpu_migration_to"], only(taken));

    // Each kind is reset by itself.
    let reset = |which: &str| json!({ "do": "reset_path_stats", "path": lab.path.clone(), "which": which });
    let [rdma, moved, wrong] = ["rdma", "cpu_migration", "latency"].map(reset);
    lab.map.done(rdma);
    let path = &lab.list()["paths"][0];
    assert_eq!((&path["writes"], &path["cpu_migration_to"]), (&json!(0), &only(taken)));
    lab.map.done(moved);
    assert_eq!(lab.list()["paths"][0]["cpu_migration_to"], json!([]));
    lab.map.refused(wrong, EINVAL);
    lab.end();
}

#[test]
fn a_path_is_taken_down_and_connected_again() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &["--on-loss", "queue"]);
        let mut client = lab.nbd();
        client.write(0, &pattern(1, BLOCK)).unwrap();
        let disconnect = lab.path_command("disconnect");
        lab.map.done(disconnect.clone());
        lab.map.event("path_closed");
        assert_eq!(lab.list()["paths"][0]["state"], "closed");
        // It is so already.
        lab.map.done(disconnect);
        // Nobody connects it of himself, and the mapping waits.
        let waiting = thread::spawn(move || {
            client.write(0, &pattern(2, BLOCK)).unwrap();
            client
        });
        eventually("it waits", || lab.list()["devices"][0]["waiting"] == 1);
        assert_eq!(lab.list()["paths"][0]["state"], "closed");
        assert!(!waiting.is_finished() && !lab.map.has_ended());
        lab.reconnect();
        let mut client = waiting.join().unwrap();
        // One that is up is connected again.
        lab.reconnect();
        assert!(client.read(0, BLOCK).unwrap() == pattern(2, BLOCK));
        let listing = lab.list();
        assert_eq!(listing["paths"][0]["reconnects"], 2);
        assert_eq!(listing["devices"][0]["failed"], 0);
        client.disconnect().unwrap();
        lab.end();
    }
}

#[test]
fn a_path_goes_by_its_addresses_whatever_its_port() {
    let mut lab = Lab::at_port(1300, "2", &["--on-loss", "queue"]);
    // As it is listed: the kernel's names of paths have no port.
    assert_eq!(lab.list()["paths"][0]["path"], lab.path);
    let disconnect = lab.path_command("disconnect");
    lab.map.done(disconnect);
    lab.map.event("path_closed");
    lab.reconnect();
    let reset = lab.path_command("reset_path_stats");
    lab.map.done(reset);
    // From another address of ours there is none.
    let other = format!("ip:{}@ip:{}", fresh_address(), lab.server);
    lab.map.refused(json!({ "do": "disconnect", "path": other }), ENOENT);
    // One that is named with its port is that one.
    let whole = format!("{}:1300", lab.server);
    lab.map.done(json!({ "do": "disconnect", "path": whole }));
    lab.map.event("path_closed");
    lab.reconnect();
    lab.end();
}

#[test]
fn a_mapping_moves_to_an_address_that_it_was_not_started_with() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &["--on-loss", "queue"]);
        let stop = Arc::new(AtomicBool::new(false));
        let (asked, mut client) = (stop.clone(), lab.nbd());
        let writer = thread::spawn(move || {
            let mut round = 0;
            while !asked.load(Relaxed) {
                round += 1;
                for n in 0..BLOCKS {
                    let block = pattern(round * 1000 + n as u64, BLOCK);
                    client.write((n * BLOCK) as u64, &block).unwrap();
                    assert!(client.read((n * BLOCK) as u64, BLOCK).unwrap() == block, "block {n}");
                }
            }
            client.flush().unwrap();
            client.disconnect().unwrap();
            round
        });
        let second = format!("ip:{}@ip:{}", fresh_address(), lab.server);
        let first = lab.path.clone();
        let mut most = None;
        for (come, go) in [(&second, &first), (&first, &second), (&second, &first)] {
            lab.map.done(json!({ "do": "add_path", "path": come }));
            assert_eq!(lab.list()["paths"].as_array().unwrap().len(), 2);
            lab.map.refused(json!({ "do": "add_path", "path": come }), EEXIST);
            lab.map.done(json!({ "do": "remove_path", "path": go }));
            let paths = lab.list()["paths"].clone();
            assert_eq!((paths.as_array().unwrap().len(), &paths[0]["path"]), (1, &json!(come)));
            let writes = |lab: &mut Lab| lab.list()["paths"][0]["writes"].as_u64().unwrap();
            let before = writes(&mut lab);
            eventually("requests go on", || writes(&mut lab) > before + 20);
            // An address stays open, but once.
            let own = |what: &str| fs::read_dir(format!("/proc/{}/{what}", lab.map.id())).unwrap().count();
            let [files, threads] = *most.get_or_insert_with(|| ["fd", "task"].map(own));
            eventually("nothing more is open", || own("fd") <= files && own("task") <= threads);
        }
        stop.store(true, Relaxed);
        let round = writer.join().unwrap();
        assert_eq!(lab.list()["devices"][0]["failed"], 0);
        let bytes = fs::read(lab.dir.path().join("disk.img")).unwrap();
        for (n, block) in bytes.chunks(BLOCK).enumerate() {
            assert!(
                block == pattern(round * 1000 + n as u64, BLOCK),
                "block {n} of the image"
            );
        }
        lab.end();
    }
}

/// The other requests of the process are answered meanwhile; they go by the same connection here.
#[test]
fn a_path_from_an_address_that_can_not_be_opened_is_refused() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &[]);
        let pid = lab.map.id();
        let own = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
        let [files, threads] = ["fd", "task"].map(own);
        // A documentation network (RFC 5737).
        let path = format!("192.0.2.1,{}", lab.server);
        let answer = lab.map.ask(json!({ "do": "add_path", "path": path }));
        assert_eq!(answer["errno"], EADDRNOTAVAIL, "{answer}");
        let text = answer["error"].as_str().unwrap_or_default();
        assert!(text.contains("192.0.2.1 is not an address of this host"), "{answer}");
        // One whose port somebody has.
        let taken = fresh_address();
        let holder = UdpSocket::bind((taken, 4791)).unwrap();
        let path = format!("{taken},{}", lab.server);
        let answer = lab.map.ask(json!({ "do": "add_path", "path": path }));
        assert_eq!(answer["errno"], EADDRINUSE, "{answer}");
        let text = answer["error"].as_str().unwrap_or_default();
        assert!(text.contains("UDP port 4791") && text.contains("taken"), "{answer}");
        assert_eq!(lab.list()["paths"].as_array().unwrap().len(), 1);
        eventually("nothing is left of them", || {
            own("fd") <= files && own("task") <= threads
        });
        drop(holder);
        lab.map.done(json!({ "do": "add_path", "path": path }));
        assert_eq!(lab.list()["paths"].as_array().unwrap().len(), 2);
        lab.end();
    }
}

#[test]
fn the_last_path_is_removed_and_another_added() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &["--on-loss", "queue"]);
        let mut client = lab.nbd();
        client.write(0, &pattern(1, BLOCK)).unwrap();
        let (add, remove) = (lab.path_command("add_path"), lab.path_command("remove_path"));
        lab.map.refused(add.clone(), EEXIST);
        lab.map.done(remove.clone());
        assert_eq!(lab.list()["paths"], json!([]));
        lab.map.refused(remove, ENOENT);
        let reconnect = lab.path_command("reconnect");
        lab.map.refused(reconnect, ENOENT);
        eventually("the server's session ends", || lab.sessions().is_empty());
        let waiting = thread::spawn(move || {
            client.write(0, &pattern(2, BLOCK)).unwrap();
            client
        });
        eventually("the request waits", || lab.list()["devices"][0]["waiting"] == 1);
        lab.map.done(add);
        let mut client = waiting.join().unwrap();
        assert!(client.read(0, BLOCK).unwrap() == pattern(2, BLOCK));
        client.flush().unwrap();
        client.disconnect().unwrap();
        let bytes = fs::read(lab.dir.path().join("disk.img")).unwrap();
        assert!(bytes[..BLOCK] == pattern(2, BLOCK));
        lab.end();
    }
}

#[test]
fn a_path_to_another_server_is_refused_and_nothing_is_written_there() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &[]);
        let other_image = image(lab.dir.path(), "other.img", &vec![9; BLOCK * BLOCKS]);
        let other = fresh_address();
        let export = [format!("disk={}", other_image.display())];
        let (mut stranger, _) = steered(&serve_args(other, &export, &["--threads", threads]), "listening");
        let strange = format!("{},{other}", lab.client);
        lab.map.refused(json!({ "do": "add_path", "path": strange }), ENXIO);
        // It is gone again, and can be tried again.
        assert_eq!(lab.list()["paths"].as_array().unwrap().len(), 1);
        lab.map.refused(json!({ "do": "add_path", "path": strange }), ENXIO);
        let mut client = lab.nbd();
        for n in 0..BLOCKS {
            client.write((n * BLOCK) as u64, &pattern(n as u64, BLOCK)).unwrap();
        }
        client.flush().unwrap();
        client.disconnect().unwrap();
        let sessions = stranger.done(json!({ "do": "sessions" }));
        assert_eq!(sessions["sessions"], json!([]));
        assert_eq!(stranger.stop().code, Some(0));
        assert!(fs::read(&other_image).unwrap() == vec![9; BLOCK * BLOCKS]);
        lab.end();
    }
}

#[test]
fn what_can_not_be_reached_is_not_connected() {
    let mut lab = Lab::new("1", &["--on-loss", "queue", "--connect-timeout", "3"]);
    // Nobody listens at this port.
    let nowhere = format!("{},{}:1235", lab.client, lab.server);
    let answer = lab.map.ask(json!({ "do": "add_path", "path": nowhere }));
    assert_eq!(
        (&answer["ok"], &answer["errno"]),
        (&json!(false), &json!(104)),
        "{answer}"
    );
    // While a path is being connected it can't be asked for that.
    lab.serve.signal(Signal::SIGSTOP);
    let disconnect = lab.path_command("disconnect");
    let reconnect = lab.path_command("reconnect");
    lab.map.done(disconnect.clone());
    let begun = lab.map.begin(reconnect.clone());
    eventually("it is being connected", || {
        lab.list()["paths"][0]["state"] == "connecting"
    });
    lab.map.refused(reconnect.clone(), EBUSY);
    let answer = lab.map.answer(begun);
    assert_eq!(answer["errno"], ENOTCONN, "{answer}");
    lab.serve.signal(Signal::SIGCONT);
    // Further attempts have followed by themselves.
    eventually("it is up", || lab.list()["paths"][0]["state"] == "connected");
    eventually("the device is back", || lab.list()["devices"][0]["state"] == "open");
    lab.map.refused(json!({ "do": "policy", "policy": "best" }), EINVAL);
    lab.end();
}

#[test]
fn policy_and_reconnects_are_set() {
    let mut lab = Lab::new("2", &[]);
    lab.map.done(json!({ "do": "policy", "policy": "rr" }));
    lab.map.done(json!({ "do": "reconnects", "attempts": 7, "delay": 1.5 }));
    lab.map
        .refused(json!({ "do": "reconnects", "attempts": 10_000, "delay": 1 }), EINVAL);
    let listing = lab.list();
    assert_eq!(listing["policy"], "round-robin");
    assert_eq!(
        (&listing["max_reconnects"], &listing["reconnect_delay"]),
        (&json!(7), &json!(1.5))
    );
    lab.end();
}

#[test]
fn a_device_has_another_size_for_new_clients() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &[]);
        let size = (BLOCK * BLOCKS) as u64;
        assert_eq!(lab.nbd().size, size);
        lab.map
            .done(json!({ "do": "resize", "device": "disk", "sectors": size / 512 / 2 }));
        assert_eq!(lab.map.event("resized")["bytes"], size / 2);
        // Of any loop.
        for _ in 0..3 {
            eventually("clients see it", || lab.nbd().size == size / 2);
        }
        lab.map
            .refused(json!({ "do": "resize", "device": "disk", "sectors": u64::MAX }), EINVAL);
        // Until it is opened again.
        lab.reconnect();
        lab.map.event("remapped");
        eventually("clients see it", || lab.nbd().size == size);
        lab.end();
    }
}

#[test]
fn a_device_that_was_closed_is_opened_again() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &[]);
        lab.map.refused(json!({ "do": "remap", "device": "disk" }), EALREADY);
        let devices = lab.serve.done(json!({ "do": "devices" }));
        let device = &devices["devices"][0];
        let close = json!({ "do": "force_close", "session": device["session"], "device": device["device"] });
        let mut client = lab.nbd();
        client.write(0, &pattern(1, BLOCK)).unwrap();
        lab.serve.done(close.clone());
        lab.serve.refused(close, ENOENT);
        assert_eq!(lab.serve.done(json!({ "do": "devices" }))["devices"], json!([]));
        // The server does not know it any more; the client does not know that.
        assert!(matches!(client.write(0, &pattern(2, BLOCK)), Err(Error::Refused(EIO))));
        client.disconnect().unwrap();
        // Connected again it is opened again.
        lab.reconnect();
        lab.map.event("remapped");
        let mut client = lab.nbd();
        client.write(0, &pattern(3, BLOCK)).unwrap();
        assert!(client.read(0, BLOCK).unwrap() == pattern(3, BLOCK));
        client.disconnect().unwrap();
        lab.end();
    }
}

#[test]
fn a_device_that_the_server_has_not_is_opened_by_hand() {
    let mut lab = Lab::new("1", &[]);
    let (image, away) = (lab.dir.path().join("disk.img"), lab.dir.path().join("away"));
    fs::rename(&image, &away).unwrap();
    lab.reconnect();
    lab.map.event("not_remapped");
    lab.map.refused(json!({ "do": "remap", "device": "disk" }), ENOENT);
    lab.map
        .refused(json!({ "do": "resize", "device": "disk", "sectors": 8 }), ENOENT);
    let mut client = lab.nbd();
    assert!(matches!(client.read(0, BLOCK), Err(Error::Refused(EIO))));
    fs::rename(&away, &image).unwrap();
    lab.map.done(json!({ "do": "remap", "device": "disk" }));
    assert!(client.read(0, BLOCK).unwrap() == [0; BLOCK]);
    client.disconnect().unwrap();
    lab.end();
}

#[test]
fn the_server_ends_paths_and_sessions() {
    for threads in ["1", "3"] {
        let mut lab = Lab::new(threads, &["--on-loss", "queue"]);
        let mut client = lab.nbd();
        for (n, what) in ["close_path", "close_session"].into_iter().enumerate() {
            client.write(0, &pattern(n as u64, BLOCK)).unwrap();
            let session = lab.sessions().remove(0);
            let mut request = json!({ "do": what, "session": session["session"] });
            if what == "close_path" {
                request["path"] = session["paths"][0]["path"].clone();
            }
            lab.serve.done(request.clone());
            let down = lab.serve.event("path_down");
            assert_eq!((&down["path"], &down["why"]), (&json!(lab.path), &json!("closed")));
            lab.serve.event("session_closed");
            lab.serve.refused(request, ENOENT);
            lab.map.event("session_lost");
            lab.map.event("remapped");
            assert!(client.read(0, BLOCK).unwrap() == pattern(n as u64, BLOCK));
        }
        client.disconnect().unwrap();
        lab.end();
    }
}

#[test]
fn a_mapping_is_ended() {
    for threads in ["1", "2"] {
        let mut lab = Lab::new(threads, &[]);
        let mut client = lab.nbd();
        client.write(0, &pattern(1, BLOCK)).unwrap();
        lab.map.refused(json!({ "do": "unmap", "device": "disk" }), EBUSY);
        client.disconnect().unwrap();
        eventually("the client is gone", || lab.list()["devices"][0]["clients"] == 0);
        eventually("it is unmapped", || {
            lab.map.ask(json!({ "do": "unmap", "device": "disk" }))["ok"] == true
        });
        let end = lab.map.end();
        assert_eq!(end.code, Some(0), "{}", end.stderr);
        lab.serve.event("session_closed");
        let devices = lab.serve.done(json!({ "do": "devices" }));
        assert_eq!(devices["devices"], json!([]));
        assert_eq!(lab.serve.stop().code, Some(0));
    }
}

#[test]
fn a_mapping_is_ended_at_any_price() {
    for threads in ["1", "2"] {
        for lost in [false, true] {
            let mut lab = Lab::new(threads, &["--on-loss", "queue"]);
            let mut client = lab.nbd();
            client.write(0, &pattern(1, BLOCK)).unwrap();
            let waiting = lost.then(|| {
                let disconnect = lab.path_command("disconnect");
                lab.map.done(disconnect);
                thread::spawn(move || client.read(0, BLOCK))
            });
            if lost {
                eventually("the request waits", || lab.list()["devices"][0]["waiting"] == 1);
            }
            lab.map.done(json!({ "do": "unmap", "device": "disk", "force": true }));
            let end = lab.map.end();
            assert_eq!(end.code, Some(0), "{}", end.stderr);
            if let Some(waiting) = waiting {
                assert!(waiting.join().unwrap().is_err());
            }
            assert!(!lab.dir.path().join("nbd").exists());
            lab.serve.event("session_closed");
            assert_eq!(lab.serve.stop().code, Some(0));
        }
    }
}
