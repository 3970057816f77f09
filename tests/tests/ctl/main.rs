//! `ferroce ctl`, and the control sockets that it uses.

mod connections;
mod metrics;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use ferroce_tests::{
    as_user,
    device::{image, map, serve},
    eventually, fresh_address,
    nbd::Client,
    pattern,
    process::{Finished, Running, TIMEOUT, run},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const BLOCK: usize = 4096;
const BLOCKS: usize = 64;
const EACCES: i32 = 13;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const EMSGSIZE: i32 = 90;
const EOPNOTSUPP: i32 = 95;
const ETIMEDOUT: i32 = 110;

/// A server of two devices, of which one is mapped, each with a control socket.
struct Lab {
    dir: tempfile::TempDir,
    client: Ipv4Addr,
    server: Ipv4Addr,
    serve: Running,
    map: Running,
}

impl Lab {
    fn new() -> Self {
        Self::with(&[], &[])
    }

    fn with(serve_more: &[&str], map_more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let exports = ["disk", "other"].map(|name| {
            let image = image(dir.path(), &format!("{name}.img"), &vec![0; BLOCK * BLOCKS]);
            format!("{name}={}", image.display())
        });
        let (server, client) = (fresh_address(), fresh_address());
        let socket = |name: &str| dir.path().join(name).display().to_string();
        let (of_serve, of_map) = (socket("serve.ctl"), socket("map.ctl"));
        let (serve, _) = serve(server, &exports, &[&["--control", &of_serve], serve_more].concat());
        let usual = ["--control", &of_map, "--reconnect-delay", "0.2", "--on-loss", "queue"];
        let (map, _) = map(
            client,
            &server.to_string(),
            &dir.path().join("nbd"),
            &[&usual, map_more].concat(),
        );
        Self {
            dir,
            client,
            server,
            serve,
            map,
        }
    }

    fn socket(&self, of: &str) -> PathBuf {
        self.dir.path().join(format!("{of}.ctl"))
    }

    fn try_ctl(&self, of: &str, args: &[&str]) -> Finished {
        let socket = self.socket(of).display().to_string();
        run(&[&["ctl", "--socket", &socket], args].concat())
    }

    /// What `ferroce ctl` says of it.
    fn ctl(&self, of: &str, args: &[&str]) -> String {
        let done = self.try_ctl(of, args);
        assert_eq!(done.code, Some(0), "{args:?}: {}", done.stderr);
        done.stdout
    }

    fn json(&self, of: &str, args: &[&str]) -> Value {
        let text = self.ctl(of, &[args, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{args:?}: {text}: {e}"))
    }

    /// Why it does not do it, and its exit status.
    fn refused(&self, of: &str, args: &[&str], code: i32, why: &str) {
        let done = self.try_ctl(of, args);
        assert_eq!(done.code, Some(code), "{args:?}: {} {}", done.stdout, done.stderr);
        assert!(done.stderr.contains(why), "{args:?}: {}", done.stderr);
    }

    fn path(&self) -> String {
        format!("ip:{}@ip:{}", self.client, self.server)
    }

    /// The only mapping.
    fn mapping(&self) -> Value {
        self.json("map", &["list"])["mappings"][0].clone()
    }

    fn path_state(&self) -> String {
        self.mapping()["paths"][0]["state"].as_str().unwrap().to_owned()
    }

    fn nbd(&self) -> Client {
        Client::connect(&self.dir.path().join("nbd")).unwrap()
    }

    fn connect(&self, of: &str) -> Line {
        Line::to(&self.socket(of))
    }

    fn end(self) {
        let map = self.map.stop();
        assert_eq!(map.code, Some(0), "{}", map.stderr);
        let serve = self.serve.stop();
        assert_eq!(serve.code, Some(0), "{}", serve.stderr);
    }
}

/// A connection to a control socket, line by line.
struct Line {
    stream: BufReader<UnixStream>,
}

impl Line {
    fn to(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let stream = BufReader::new(stream);
        Self { stream }
    }

    /// The process may have closed it already.
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.get_mut().write_all(bytes);
    }

    /// The next line; null at the end.
    fn next(&mut self) -> Value {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) | Err(_) => Value::Null,
            Ok(_) => serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}")),
        }
    }

    fn ask(&mut self, request: Value) -> Value {
        self.send(format!("{request}\n").as_bytes());
        self.next()
    }

    fn hello(mut self) -> Self {
        let hello = self.ask(json!({ "id": "a", "do": "hello", "version": 1 }));
        assert_eq!((&hello["ok"], &hello["id"]), (&json!(true), &json!("a")), "{hello}");
        self
    }
}

#[test]
fn what_there_is_is_listed_and_shown() {
    let lab = Lab::new();
    let mut client = lab.nbd();
    client.write(0, &pattern(1, BLOCK)).unwrap();
    assert!(client.read(0, BLOCK).unwrap() == pattern(1, BLOCK));
    let path = lab.path();
    let listed = lab.ctl("map", &["list"]);
    for part in [
        "DEVICE",
        "disk",
        "rnbd0",
        "test",
        "open",
        "256.0 KiB",
        "min-inflight",
        "1 of 1 up",
        &path,
    ] {
        assert!(listed.contains(part), "{part}: {listed}");
    }
    assert!(!lab.ctl("map", &["list", "devices"]).contains(&path));
    // A heartbeat between the two changes the latency.
    eventually("the same list", || {
        lab.ctl("map", &["path", "list"]) == lab.ctl("map", &["list", "paths"])
    });
    assert!(lab.ctl("map", &["session", "list"]).contains("POLICY"));
    let mapping = lab.mapping();
    let device = &mapping["devices"][0];
    assert_eq!(
        (&device["state"], &device["reads"], &device["writes"]),
        (&json!("open"), &json!(1), &json!(1))
    );
    assert_eq!(lab.json("map", &["list", "devices"])["mappings"][0].get("paths"), None);

    let served = lab.ctl("serve", &["list"]);
    let image = lab.dir.path().join("disk.img").display().to_string();
    for part in ["OPEN DEVICE", &image, "CLIENT SESSION", "2 of 2", &path] {
        assert!(served.contains(part), "{part}: {served}");
    }
    let sessions = lab.json("serve", &["list", "sessions"]);
    assert_eq!(sessions["sessions"][0]["name"], "test");
    assert_eq!(sessions.get("devices"), None);

    // By each of their names.
    for name in ["disk", "rnbd0", "disk@test"] {
        let shown = lab.ctl("map", &["show", name]);
        assert!(shown.contains("read         4.0 KiB"), "{name}: {shown}");
        assert_eq!(lab.json("map", &["show", name])["name"], "disk");
    }
    for name in [
        &path,
        &format!("{},{}", lab.client, lab.server),
        &lab.server.to_string(),
    ] {
        let shown = lab.json("map", &["path", "show", name]);
        assert_eq!(
            (&shown["path"], &shown["state"]),
            (&json!(path), &json!("connected")),
            "{name}"
        );
        let shown = lab.json("serve", &["path", "show", name]);
        assert_eq!(shown["state"], "connected", "{name}");
    }
    assert_eq!(lab.json("map", &["session", "show", "test"])["policy"], "min-inflight");
    assert!(lab.ctl("serve", &["show", "disk"]).contains(&image));
    assert!(lab.ctl("serve", &["show", "test"]).contains("client session"));
    lab.refused("map", &["show", "nothing"], 1, "there is no \"nothing\"");

    let stats = lab.json("map", &["stats"]);
    assert!(
        stats["loops"]["session test"]["packets_sent"].as_u64().unwrap() > 0,
        "{stats}"
    );
    assert!(lab.ctl("map", &["stats"]).contains("packets_sent"));
    assert!(lab.ctl("serve", &["stats"]).contains(&path));
    client.disconnect().unwrap();
    lab.end();
}

#[test]
fn devices_come_and_go() {
    let lab = Lab::new();
    assert_eq!(
        lab.ctl("map", &["map", "other", "from", "test", "ro"]),
        "mapped other from test\n"
    );
    let devices = lab.mapping()["devices"].clone();
    assert_eq!(
        (&devices[1]["name"], &devices[1]["mode"]),
        (&json!("other"), &json!("ro"))
    );
    lab.refused("map", &["map", "other"], 1, "mapped already");
    lab.refused("map", &["map", "nowhere"], 1, "");
    // Another session is another process's.
    lab.refused("map", &["map", "disk", "from", "another"], 1, "no path to open it");
    lab.refused(
        "map",
        &["map", "disk", "from", "another", "path", "127.0.0.1"],
        1,
        "this process has only the session \"test\"",
    );
    lab.refused(
        "serve",
        &["map", "disk", "from", "another", "path", "127.0.0.1"],
        1,
        "maps nothing",
    );

    lab.ctl("map", &["resize", "other", "64"]);
    lab.ctl("map", &["resize", "disk", "128K"]);
    let sizes: Vec<Value> = (0..2).map(|n| lab.mapping()["devices"][n]["bytes"].clone()).collect();
    assert_eq!(sizes, [json!(128 << 10), json!(64 * 512)]);
    eventually("clients see it", || lab.nbd().size == 128 << 10);

    assert!(lab.ctl("map", &["remap", "disk"]).contains("is open"));
    let client = lab.nbd();
    lab.refused("map", &["unmap", "disk"], 1, "busy");
    client.disconnect().unwrap();
    assert_eq!(lab.ctl("map", &["unmap", "rnbd1"]), "unmapped other\n");
    lab.refused("map", &["unmap", "other"], 1, "no device \"other\" is mapped");
    lab.refused("map", &["remap", "disk", "force"], 1, "its mapping would end with it");
    lab.ctl("map", &["map", "other"]);
    let forced = lab.ctl("map", &["remap", "other", "force"]);
    assert_eq!(forced, "unmapped other\nmapped other from test\n");

    // The server closes what somebody has open: its client does not know until it is connected again.
    assert_eq!(
        lab.ctl("serve", &["close", "other", "test"]),
        "closed other for session test\n"
    );
    lab.refused("serve", &["close", "other"], 1, "no client has \"other\" open");
    lab.refused("map", &["close", "other"], 1, "nothing is served");
    lab.refused("serve", &["unmap", "other"], 1, "nothing is mapped");

    // With the last device a mapping ends.
    let done = lab.ctl("map", &["session", "delete", "test", "--force"]);
    assert_eq!(done, "unmapped disk\nunmapped other\n");
    let Lab { map, serve, .. } = lab;
    assert_eq!(map.end().code, Some(0));
    assert_eq!(serve.stop().code, Some(0));
}

#[test]
fn paths_and_sessions_are_taken_down_and_brought_up() {
    let mut lab = Lab::new();
    let path = lab.path();
    let both = format!("{},{}", lab.client, lab.server);
    assert_eq!(
        lab.ctl("map", &["path", "disconnect", &both]),
        format!("path {path} is down\n")
    );
    lab.map.event("path_closed");
    assert_eq!(lab.path_state(), "closed");
    assert_eq!(
        lab.ctl("map", &["path", "reconnect", "test", &path]),
        format!("path {path} is up\n")
    );
    assert_eq!(lab.path_state(), "connected");
    lab.refused("map", &["path", "add", &both], 1, "already");
    lab.refused(
        "map",
        &["path", "add", "wrong", &both],
        1,
        "there is no session \"wrong\"",
    );
    lab.refused("map", &["path", "disconnect", "127.0.0.9"], 1, "there is no path");
    lab.refused(
        "map",
        &["path", "add", "nowhere.invalid"],
        1,
        "can't resolve nowhere.invalid",
    );
    let elsewhere = format!("192.0.2.1,{}", lab.server);
    lab.refused(
        "map",
        &["path", "add", &elsewhere],
        1,
        "192.0.2.1 is not an address of this host",
    );

    // From an address that the mapping was not started with; then the first goes.
    let later = format!("ip:{}@ip:{}", fresh_address(), lab.server);
    assert_eq!(
        lab.ctl("map", &["path", "add", &later]),
        format!("path {later} is up\n")
    );
    lab.ctl("map", &["path", "delete", &path]);
    let device = &lab.mapping()["devices"][0];
    assert_eq!((&device["state"], &device["failed"]), (&json!("open"), &json!(0)));
    let mut client = lab.nbd();
    assert!(client.read(0, BLOCK).unwrap() == [0; BLOCK]);
    client.disconnect().unwrap();
    lab.ctl("map", &["path", "add", &path]);
    lab.ctl("map", &["path", "delete", &later]);

    assert_eq!(
        lab.ctl("map", &["path", "delete", &path]),
        format!("path {path} is deleted\n")
    );
    assert_eq!(lab.mapping()["paths"], json!([]));
    assert_eq!(
        lab.ctl("map", &["path", "add", "test", &both]),
        format!("path {both} is up\n")
    );
    let readded = lab.ctl("map", &["path", "readd", &path]);
    assert_eq!(readded, format!("path {path} is deleted\npath {path} is up\n"));
    assert_eq!(lab.ctl("map", &["path", "recover", &path]), "nothing to do\n");

    lab.ctl("map", &["session", "disconnect"]);
    assert_eq!(lab.path_state(), "closed");
    assert!(lab.ctl("map", &["recover"]).contains(&format!("path {path} is up")));
    eventually("the device is back", || lab.mapping()["devices"][0]["state"] == "open");
    assert_eq!(lab.ctl("map", &["session", "recover", "test"]), "nothing to do\n");
    lab.ctl("map", &["session", "disconnect", "test"]);
    lab.ctl("map", &["path", "recover", &path]);
    assert!(lab.ctl("map", &["session", "reconnect"]).contains("is up"));
    eventually("the device is back", || lab.mapping()["devices"][0]["state"] == "open");
    assert_eq!(lab.ctl("map", &["session", "remap"]), "disk is open\n");
    lab.refused(
        "map",
        &["session", "reconnect", "wrong"],
        1,
        "there is no session \"wrong\"",
    );

    // At the server they are its clients', who come back.
    for (args, event) in [
        (&["path", "disconnect", path.as_str()][..], "path_down"),
        (&["session", "disconnect", "test"], "session_closed"),
    ] {
        let reconnects = |lab: &Lab| lab.mapping()["paths"][0]["reconnects"].as_i64().unwrap();
        let before = reconnects(&lab);
        assert!(lab.ctl("serve", args).starts_with("disconnected"));
        lab.serve.event(event);
        eventually("it is back", || {
            reconnects(&lab) > before && lab.mapping()["devices"][0]["state"] == "open"
        });
    }
    lab.refused(
        "serve",
        &["session", "disconnect", "wrong"],
        1,
        "there is no session \"wrong\"",
    );
    lab.refused("serve", &["session", "disconnect"], 2, "name one");
    lab.refused("serve", &["path", "add", &both], 1, "nothing is mapped");
    lab.end();
}

#[test]
fn policies_losses_and_counters_are_set() {
    let lab = Lab::new();
    assert_eq!(lab.ctl("map", &["policy"]), "min-inflight\n");
    assert_eq!(lab.ctl("map", &["policy", "RR"]), "session test: round-robin\n");
    lab.ctl("map", &["policy", "min-latency", "test"]);
    assert_eq!(lab.json("map", &["policy"])["policy"], "min-latency");
    lab.refused("map", &["policy", "best"], 2, "no policy `best`");
    lab.refused("map", &["policy", "rr", "wrong"], 1, "there is no session \"wrong\"");

    let set = [
        "session",
        "set",
        "test",
        "--max-reconnects",
        "7",
        "--on-loss",
        "queue=1.5",
    ];
    lab.ctl("map", &set);
    let mapping = lab.mapping();
    // What was not named stays.
    assert_eq!(
        (&mapping["max_reconnects"], &mapping["reconnect_delay"]),
        (&json!(7), &json!(0.2))
    );
    assert_eq!(mapping["devices"][0]["on_loss"], "queue=1.5");
    lab.ctl(
        "map",
        &["session", "set", "--reconnect-delay", "3", "--on-loss", "error"],
    );
    let mapping = lab.mapping();
    assert_eq!(
        (&mapping["max_reconnects"], &mapping["reconnect_delay"]),
        (&json!(7), &json!(3.0))
    );
    assert_eq!(mapping["devices"][0]["on_loss"], "error");
    lab.refused("map", &["session", "set"], 2, "nothing to set");
    lab.refused("map", &["session", "set", "--max-reconnects", "10000"], 2, "");

    let reads = |of: &str| match of {
        "map" => lab.mapping()["paths"][0]["reads"].as_u64().unwrap(),
        _ => lab.json("serve", &["list"])["sessions"][0]["paths"][0]["reads"]
            .as_u64()
            .unwrap(),
    };
    assert!(reads("map") > 0 && reads("serve") > 0);
    assert!(
        lab.ctl("map", &["stats", "reset", &lab.path(), "--which", "reconnects"])
            .contains("counters reset")
    );
    assert!(reads("map") > 0);
    lab.ctl("map", &["stats", "reset"]);
    lab.ctl("serve", &["stats", "reset", &lab.path()]);
    assert_eq!((reads("map"), reads("serve")), (0, 0));
    lab.refused(
        "serve",
        &["stats", "reset", "--which", "reconnects"],
        2,
        "have no such counters",
    );
    lab.refused("map", &["stats", "reset", "127.0.0.9"], 1, "there is no path");
    lab.end();
}

#[test]
fn the_tree_is_read_and_written() {
    let lab = Lab::new();
    let session = "class/rtrs-client/test";
    let top = lab.ctl("map", &["ls"]);
    assert_eq!(top, "0755 block/\n0755 class/\n0755 module/\n");
    let files = lab.ctl("map", &["ls", session]);
    assert!(
        files.contains("0644 mpath_policy\n") && files.contains("0777 mp_policy -> mpath_policy\n"),
        "{files}"
    );
    assert!(!lab.ctl("map", &["ls", session, "--strict"]).contains("mp_policy"));
    let documents = format!("{session}/mp_policy");
    assert_eq!(lab.ctl("map", &["cat", &documents]), "min-inflight (MI: 1)\n");
    lab.refused("map", &["cat", "--strict", &documents], 1, "there is no");
    lab.ctl("map", &["write", &format!("{session}/mpath_policy"), "rr"]);
    assert_eq!(
        lab.json("map", &["cat", &format!("{session}/mpath_policy")])["text"],
        "round-robin (RR: 0)\n"
    );
    let path = format!("{session}/paths/{}", lab.path());
    lab.ctl("map", &["write", &format!("{path}/disconnect"), "1"]);
    assert_eq!(lab.ctl("map", &["cat", &format!("{path}/state")]), "disconnected\n");
    lab.ctl("map", &["write", &format!("{path}/reconnect"), "1"]);
    assert_eq!(lab.ctl("map", &["cat", &format!("{path}/state")]), "connected\n");
    assert!(
        lab.ctl("map", &["cat", &format!("{path}/hca_name")])
            .starts_with("ferroce")
    );
    let attempts = format!("{session}/max_reconnect_attempts");
    lab.ctl("map", &["write", &attempts, "-1"]);
    lab.refused("map", &["write", &attempts, "-2"], 1, "-1 (no limit) to 9999");
    lab.refused("map", &["cat", &format!("{path}/nothing")], 1, "there is no");
    lab.refused("map", &["write", &format!("{path}/state"), "1"], 1, "read-only");
    eventually("the device is back", || lab.mapping()["devices"][0]["state"] == "open");
    lab.ctl(
        "map",
        &[
            "write",
            "class/rnbd-client/ctl/map_device",
            "sessname=test device_path=other access_mode=ro",
        ],
    );
    assert_eq!(
        lab.ctl(
            "map",
            &["cat", "class/rnbd-client/ctl/devices/other@test/rnbd/access_mode"]
        ),
        "ro\n"
    );
    lab.ctl("map", &["write", "block/rnbd1/rnbd/unmap_device", "normal"]);

    let served = format!("class/rtrs-server/test/paths/{}", lab.path());
    assert_eq!(
        lab.ctl("serve", &["cat", &format!("{served}/src_addr")]),
        format!("ip:{}\n", lab.client)
    );
    let open = "class/rnbd-server/ctl/devices/disk/sessions/test/mapping_path";
    assert_eq!(lab.ctl("serve", &["cat", open]), "disk\n");
    assert_eq!(
        lab.ctl("serve", &["cat", "module/rnbd_server/parameters/port_nr"]),
        "1234\n"
    );
    lab.end();
}

/// `ferroce ctl events`, once it has subscribed.
fn events(lab: &mut Lab, more: &[&str]) -> Running {
    let socket = lab.socket("map").display().to_string();
    let mut events = Running::start(&[&["ctl", "--socket", &socket, "events"], more].concat());
    // Until something is told that happens again and again.
    eventually("it hears", || {
        lab.ctl("map", &["resize", "disk", "64"]);
        lab.map.event("resized");
        lab.ctl("map", &["resize", "disk", "128"]);
        lab.map.event("resized");
        events.new_line().is_some()
    });
    events
}

#[test]
fn events_are_told_until_somebody_wants_no_more() {
    let mut lab = Lab::new();
    let mut hearing = events(&mut lab, &["--json"]);
    lab.ctl("map", &["path", "disconnect", &lab.path()]);
    let closed = hearing.event("path_closed");
    assert_eq!((&closed["path"], closed.get("text")), (&json!(lab.path()), None));
    hearing.signal(Signal::SIGINT);
    let left = hearing.end();
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));

    // To the end of the process, of which it hears.
    lab.ctl("map", &["recover"]);
    eventually("the device is back", || lab.mapping()["devices"][0]["state"] == "open");
    let hearing = events(&mut lab, &[]);
    lab.ctl("map", &["path", "reconnect", &lab.path()]);
    eventually("the device is back", || lab.mapping()["devices"][0]["state"] == "open");
    assert_eq!(lab.map.stop().code, Some(0));
    let left = hearing.end();
    assert_eq!(left.code, Some(0), "{}", left.stderr);
    assert!(
        left.stdout.contains("is up again") && left.stdout.contains("packets sent"),
        "{}",
        left.stdout
    );

    let socket = lab.dir.path().join("serve.ctl").display().to_string();
    let hearing = Running::start(&["ctl", "--socket", &socket, "events"]);
    lab.serve.signal(Signal::SIGKILL);
    let left = hearing.end();
    assert_eq!(left.code, Some(1), "{}", left.stdout);
}

#[test]
fn what_is_asked_is_answered_before_the_end() {
    let lab = Lab::with(&[], &["--connect-timeout", "5"]);
    let mut line = lab.connect("map").hello();
    lab.serve.signal(Signal::SIGSTOP);
    let path = lab.path();
    line.send(format!("{}\n", json!({ "id": 1, "do": "disconnect", "path": path })).as_bytes());
    assert_eq!(line.next()["ok"], true);
    // It takes as long as connecting does, and others are not held up.
    line.send(format!("{}\n", json!({ "id": 2, "do": "reconnect", "path": path })).as_bytes());
    eventually("it is being connected", || {
        let state = line.ask(json!({ "id": 3, "do": "list" }))["paths"][0]["state"].clone();
        state == "connecting"
    });
    assert_eq!(
        line.ask(json!({ "id": 4, "do": "reconnect", "path": path }))["errno"],
        EBUSY
    );
    lab.map.signal(Signal::SIGTERM);
    let answer = line.next();
    assert_eq!((&answer["id"], &answer["ok"]), (&json!(2), &json!(false)), "{answer}");
    assert_eq!(line.next(), Value::Null);
    lab.serve.signal(Signal::SIGCONT);
    let Lab { map, serve, .. } = lab;
    // What was to be flushed could not be.
    assert_eq!(map.end().code, Some(1));
    assert_eq!(serve.stop().code, Some(0));
}

#[test]
#[ignore = "needs root, to be other users"]
fn one_member_of_the_group_does_not_hold_the_places_of_others() {
    const GROUP: u32 = 54321;
    let lab = Lab::with(&["--control-group", &GROUP.to_string()], &[]);
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = lab.socket("serve");
    let connect = |user: u32, count: usize| -> Vec<Line> {
        let connect = || (0..count).map(|_| Line::to(&socket)).collect();
        as_user(user, GROUP, connect)
    };
    let is_served = |line: Line| line.hello();
    // Neither by saying nothing,
    let silent = connect(65533, 100);
    let mut held: Vec<Line> = connect(65532, 1).into_iter().map(is_served).collect();
    // nor by saying hello.
    let greeted: Vec<Value> = (0..20)
        .flat_map(|_| connect(65533, 1))
        .map(|mut line| {
            let answer = line.ask(json!({ "do": "hello", "version": 1 }));
            held.push(line);
            answer
        })
        .collect();
    assert_eq!(greeted.iter().filter(|answer| answer["ok"] == true).count(), 8);
    let refused = greeted.iter().find(|answer| answer["ok"] == false).unwrap();
    assert_eq!(refused["errno"], EBUSY);
    let why = refused["error"].as_str().unwrap();
    assert!(why.contains("user 65533 has 8 connections open already"), "{why}");
    held.extend(connect(65532, 1).into_iter().map(is_served));
    // All members together leave places for root.
    for user in 65500..65510 {
        held.extend((0..8).flat_map(|_| connect(user, 1)).map(|mut line| {
            line.ask(json!({ "do": "hello", "version": 1 }));
            line
        }));
    }
    let root: Vec<Line> = (0..7).map(|_| lab.connect("serve").hello()).collect();
    assert_eq!(lab.try_ctl("serve", &["list"]).code, Some(0));
    drop((silent, held, root));
    lab.end();
}

#[test]
#[ignore = "needs root, to be other users"]
fn a_socket_is_its_owners_and_its_groups() {
    const NOBODY: &str = "65534";
    const GROUP: &str = "54321";
    let lab = Lab::with(&["--control-group", GROUP], &[]);
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(lab.dir.path(), 0o755);
    let mode_and_group = |of: &str| {
        let meta = lab.socket(of).metadata().unwrap();
        (meta.mode() & 0o777, meta.gid())
    };
    assert_eq!(mode_and_group("serve"), (0o660, 54321));
    assert_eq!(mode_and_group("map"), (0o660, nix::unistd::getegid().as_raw()));
    // The program may be where only root may look.
    let program = lab.dir.path().join("ferroce");
    fs::copy(ferroce_tests::ferroce(), &program).unwrap();
    open(&program, 0o755);
    let by = |groups: &[&str], of: &str| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", NOBODY, "--regid", NOBODY])
            .args(groups)
            .arg(&program);
        command
            .args(["ctl", "--socket"])
            .arg(lab.socket(of))
            .args(["list", "sessions"]);
        Running::start_command(command, "ferroce ctl of nobody".into()).end()
    };
    let (alone, member) = (["--clear-groups"], ["--groups", GROUP]);
    for of in ["serve", "map"] {
        let refused = by(&alone, of);
        assert_eq!(refused.code, Some(1), "{}", refused.stdout);
        assert!(refused.stderr.contains("you are user 65534"), "{}", refused.stderr);
    }
    let allowed = by(&member, "serve");
    assert_eq!(allowed.code, Some(0), "{}", allowed.stderr);
    assert!(allowed.stdout.contains("test"), "{}", allowed.stdout);
    assert_eq!(by(&member, "map").code, Some(1));
    // Whatever becomes of the file's mode.
    open(&lab.socket("serve"), 0o666);
    let refused = by(&alone, "serve");
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    let why = "user 65534 is neither root, nor the owner (user 0), nor a member of group 54321";
    assert!(refused.stderr.contains(why), "{}", refused.stderr);
    assert_eq!(by(&member, "serve").code, Some(0));
    lab.end();
}

#[test]
#[ignore = "needs root, to be another user"]
fn a_socket_that_another_user_serves_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let socket = dir.path().join("ctl");
    let listener = as_user(65533, 65533, || UnixListener::bind(&socket).unwrap());
    let by = |args: &[&str]| {
        let mut command = Command::new(ferroce_tests::ferroce());
        command.args(args).env("FERROCE_CONTROL", &socket);
        Running::start_command(command, format!("ferroce {args:?}")).end()
    };
    let why = "user 65533 serves it, who is neither root, nor you (user 0), nor the owner of its folder (user 0)";
    for (args, code) in [(&["ctl", "list"][..], 1), (&["run", "--", "true"], 0)] {
        let done = by(args);
        assert_eq!(done.code, Some(code), "{}", done.stderr);
        assert!(done.stderr.contains(why), "{args:?}: {}", done.stderr);
        let mut asked = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut asked).unwrap();
        assert_eq!(asked, b"", "{args:?}");
    }
    // In its own folder it is that user's, for those who name it.
    nix::unistd::chown(dir.path(), Some(65533.into()), None).unwrap();
    let answers = thread::spawn(move || {
        let mut line = BufReader::new(listener.accept().unwrap().0);
        line.read_line(&mut String::new()).unwrap();
    });
    let done = by(&["ctl", "list"]);
    assert!(done.stderr.contains("closed the connection"), "{}", done.stderr);
    answers.join().unwrap();
}

#[test]
fn a_socket_has_one_process_and_goes_with_it() {
    let lab = Lab::new();
    let socket = lab.socket("map").display().to_string();
    let args = [
        "serve",
        "--addr",
        &fresh_address().to_string(),
        "--export",
        "a=/dev/null",
        "--control",
        &socket,
    ];
    let second = run(&args);
    assert_eq!(second.code, Some(1));
    assert!(
        second.stderr.contains("another server listens there"),
        "{}",
        second.stderr
    );
    assert_eq!(lab.try_ctl("map", &["list"]).code, Some(0));
    lab.map.signal(Signal::SIGKILL);
    let Lab {
        dir,
        server,
        map,
        serve,
        ..
    } = lab;
    map.end();
    let gone = run(&["ctl", "--socket", &socket, "list"]);
    assert_eq!(gone.code, Some(1));
    assert!(
        gone.stderr.contains("the process that had it is gone"),
        "{}",
        gone.stderr
    );
    // What was left is taken over.
    let more = ["--control", &socket, "--session", "next", "--device", "other"];
    let (next, _) = self::map(fresh_address(), &server.to_string(), &dir.path().join("next"), &more);
    assert_eq!(run(&["ctl", "--socket", &socket, "list"]).code, Some(0));
    assert_eq!(next.stop().code, Some(0));
    assert!(!Path::new(&socket).exists());
    let missing = run(&["ctl", "--socket", &socket, "list"]);
    assert!(
        missing.code == Some(1) && missing.stderr.contains("--control"),
        "{}",
        missing.stderr
    );
    assert_eq!(serve.stop().code, Some(0));
}

#[test]
fn wrong_words_are_wrong_usage() {
    for args in [
        &["ctl"][..],
        &["ctl", "dance"],
        &["ctl", "list", "everything"],
        &["ctl", "resize", "disk"],
        &["ctl", "resize", "disk", "big"],
        &["ctl", "unmap", "disk", "now"],
        &["ctl", "path", "add"],
        &["ctl", "path", "add", "a", "b", "c"],
        &["ctl", "policy", "best"],
        &["ctl", "stats", "reset", "--which", "latency"],
        &[
            "serve",
            "--addr",
            "127.0.0.1",
            "--export",
            "a=/dev/null",
            "--metrics",
            "here",
        ],
        &[
            "serve",
            "--addr",
            "127.0.0.1",
            "--export",
            "a=/dev/null",
            "--control-group",
            "0",
        ],
    ] {
        let done = run(args);
        assert_eq!(done.code, Some(2), "{args:?}: {}", done.stderr);
    }
    let lab = Lab::new();
    lab.refused("map", &["map", "other", "to", "test"], 2, "is none of: from SESSION");
    lab.refused("map", &["map", "other", "path", "127.0.0.1"], 2, "from SESSION");
    lab.end();
}

#[test]
fn the_socket_is_found_by_the_environment() {
    let lab = Lab::new();
    let by = |variable: &str, value: &Path| {
        let mut command = Command::new(ferroce_tests::ferroce());
        command.args(["ctl", "policy"]).env_remove("FERROCE_CONTROL");
        command.env(variable, value);
        Running::start_command(command, "ferroce ctl".into()).end()
    };
    let found = by("FERROCE_CONTROL", &lab.socket("map"));
    assert_eq!(
        (found.code, found.stdout.as_str()),
        (Some(0), "min-inflight\n"),
        "{}",
        found.stderr
    );
    let usual = lab.dir.path().join("ferroce");
    fs::create_dir(&usual).unwrap();
    std::os::unix::fs::symlink(lab.socket("map"), usual.join("control.sock")).unwrap();
    let found = by("XDG_RUNTIME_DIR", lab.dir.path());
    assert_eq!(found.code, Some(0), "{}", found.stderr);
    lab.end();
}
