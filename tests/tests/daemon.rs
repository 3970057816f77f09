//! `ferroce daemon`, and who controls it.

use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Write},
    os::unix::{
        fs::{PermissionsExt, chown, symlink},
        net::{UnixDatagram, UnixStream},
    },
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use ferroce_rig::certificates::Authority;
use ferroce_tests::{
    as_user,
    device::{image, serve},
    eventually, ferroce, fresh_address,
    nbd::Client,
    pattern,
    process::{Finished, Running, TIMEOUT},
};
use lnet_host::{LnetNode, NodeOptions};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const MIB: usize = 1 << 20;
const EACCES: i32 = 13;
const EINVAL: i32 = 22;

/// A daemon with a server and what it maps of that.
struct Lab {
    dir: tempfile::TempDir,
    server: std::net::Ipv4Addr,
}

impl Lab {
    fn new() -> Self {
        let lab = Self {
            dir: tempfile::tempdir().unwrap(),
            server: fresh_address(),
        };
        for name in ["one", "two", "three"] {
            image(lab.dir.path(), name, &pattern(7, MIB));
        }
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A server of these images.
    fn serves(&self, names: &[&str]) -> String {
        let exports: Vec<String> = names
            .iter()
            .map(|n| format!("\"{n}={}\"", self.path(n).display()))
            .collect();
        format!(
            "[serve.images]\naddr = \"{}\"\nexport = [{}]\n",
            self.server,
            exports.join(", ")
        )
    }

    /// A path to the server, from its own address.
    fn to_server(&self) -> String {
        format!("{0},{0}", self.server)
    }

    /// A mapping of these.
    fn maps(&self, task: &str, names: &[&str]) -> String {
        let devices: Vec<String> = names.iter().map(|n| format!("\"{n}\"")).collect();
        let socket = self.path(&format!("{task}.sock"));
        format!(
            "[map.{task}]\npath = \"{}\"\ndevice = [{}]\nnbd = \"{}\"\n",
            self.to_server(),
            devices.join(", "),
            socket.display()
        )
    }

    fn write(&self, config: &[String]) {
        fs::write(self.path("ferroce.toml"), config.concat()).unwrap();
    }

    fn command(&self) -> Command {
        let mut command = Command::new(ferroce());
        let (config, control) = (self.path("ferroce.toml"), self.path("ctl"));
        command.args(["daemon", "--json", "--config"]).arg(config);
        command
            .arg("--control")
            .arg(control)
            .arg("--nbd-dir")
            .arg(self.dir.path());
        command
    }

    fn daemon(&self) -> Running {
        Running::start_command(self.command(), "ferroce daemon".into())
    }

    fn run(&self, args: &[&str]) -> Finished {
        let mut command = Command::new(ferroce());
        command
            .args(args)
            .env("FERROCE_CONTROL", self.path("ctl"))
            .current_dir(self.dir.path());
        let mut running = Running::start_command(command, format!("ferroce {args:?}"));
        running.wait();
        running.end()
    }

    fn ctl(&self, args: &[&str]) -> Value {
        let done = self.run(&[&["ctl", "--json"], args].concat());
        assert_eq!(done.code, Some(0), "{args:?}: {}", done.stderr);
        serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{}: {e}", done.stdout))
    }

    fn state(&self, task: &str) -> Option<String> {
        let tasks = self.ctl(&["tasks"]);
        let found = tasks["tasks"]
            .as_array()
            .unwrap()
            .iter()
            .find(|t| t["task"] == task)?
            .clone();
        Some(found["state"].as_str().unwrap().to_owned())
    }

    fn is_listening(&self) {
        eventually("a control socket", || UnixStream::connect(self.path("ctl")).is_ok());
    }

    fn is_up(&self, task: &str) {
        self.is_listening();
        eventually(task, || self.state(task).as_deref() == Some("up"));
    }
}

fn reads(socket: &Path, name: &str) {
    let mut client = Client::connect_to(socket, name, TIMEOUT).unwrap();
    assert!(client.read(0, MIB).unwrap() == pattern(7, MIB), "{name}");
}

/// Asks for something over a new connection.
fn ask(socket: &Path, request: &Value) -> Value {
    let mut stream = BufReader::new(UnixStream::connect(socket).unwrap());
    let mut answer = String::new();
    for request in [&json!({ "do": "hello", "version": 1 }), request] {
        writeln!(stream.get_mut(), "{request}").unwrap();
        answer.clear();
        stream.read_line(&mut answer).unwrap();
    }
    serde_json::from_str(&answer).unwrap()
}

#[test]
#[ignore = "needs root, to be another user"]
fn members_of_the_group_start_what_the_file_allows() {
    const GROUP: u32 = 54321;
    const OF_THE_BROKER: u32 = 54320;
    let lab = Lab::new();
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let [images, captures, secret] = ["images", "captures", "secret"].map(|name| lab.path(name));
    for folder in [&images, &captures] {
        fs::create_dir(folder).unwrap();
    }
    fs::write(&secret, pattern(1, MIB)).unwrap();
    image(&images, "disk", &pattern(7, MIB));
    symlink(&secret, images.join("link")).unwrap();
    lab.write(&[]);
    let mut command = lab.command();
    command.args(["--control-group", &GROUP.to_string()]);
    let daemon = Running::start_command(command, "ferroce daemon".into());
    lab.is_listening();
    let control = lab.path("ctl");
    let start = |task: &str, options: &[&str]| {
        let request = json!({ "do": "start", "task": task, "options": options });
        as_user(65533, GROUP, || ask(&control, &request))
    };
    let denied = |task: &str, options: &[&str], remedy: &str| {
        let answer = start(task, options);
        assert_eq!(answer["errno"], EACCES, "{options:?}: {answer}");
        let text = answer["error"].as_str().unwrap();
        assert!(text.contains(remedy), "{options:?}: {text}");
        assert!(fs::read(&secret).unwrap() == pattern(1, MIB), "{options:?}");
    };
    let shown = |path: &Path| path.display().to_string();
    let listen = format!("--addr={}", lab.server);
    let [disk, link, of_secret, all] = [
        format!("--export=disk={}", shown(&images.join("disk"))),
        format!("--export=disk={}", shown(&images.join("link"))),
        format!("--export=disk={}", shown(&secret)),
        "--export-dir=/".to_owned(),
    ];
    let emptied = format!("--pcap={}", shown(&secret));
    let mapping = ["--session=s", "--path=192.0.2.7", "--device=d"];
    let elsewhere = format!("--nbd={}", shown(&captures.join("s")));

    // Nothing of the daemon's user, while the file is silent.
    for export in [&disk, &of_secret, &all] {
        denied("serve.x", &[&listen, export], "add `export = [\"");
    }
    denied(
        "map.x",
        &[&mapping[..], &[&elsewhere]].concat(),
        "--nbd-dir of the daemon",
    );
    denied(
        "map.x",
        &[&mapping[..], &["--nbd-listen=127.0.0.1"]].concat(),
        "add `nbd-listen = true`",
    );
    let order = json!({ "do": "map", "device": "d", "session": "../escape", "paths": ["192.0.2.7"] });
    let answer = as_user(65533, GROUP, || ask(&control, &order));
    assert_eq!(answer["errno"], EINVAL, "{answer}");
    // The group of the broker is another one.
    let other = as_user(65532, OF_THE_BROKER, || UnixStream::connect(&control).map(drop));
    assert_eq!(other.unwrap_err().kind(), ErrorKind::PermissionDenied);

    // What it allows, and no more.
    let allow = format!(
        "[control]\nexport = \"{}\"\npcap = \"{}\"\n",
        shown(&images),
        shown(&captures)
    );
    lab.write(&[allow]);
    lab.ctl(&["reload"]);
    for more in [&of_secret, &all] {
        denied("serve.x", &[&listen, more], "add `export = [\"");
    }
    denied("serve.x", &[&listen, &disk, &emptied], "add `pcap = [\"");
    assert_eq!(start("serve.link", &[&listen, &link])["ok"], true);
    eventually("the link is not followed", || {
        lab.state("serve.link").as_deref() == Some("failed")
    });
    lab.ctl(&["stop", "serve.link"]);
    let capture = format!("--pcap={}", shown(&captures.join("x.pcap")));
    assert_eq!(start("serve.x", &[&listen, &disk, &capture])["ok"], true);
    lab.is_up("serve.x");
    assert!(captures.join("x.pcap").exists());
    lab.ctl(&["stop", "serve.x"]);
    // Root needs no file.
    let done = lab.run(&["serve", "--daemon", &listen, &of_secret]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(daemon.stop().code, Some(0));
}

/// As its unit has it: with the user's own files and no capabilities.
#[test]
#[ignore = "needs root, to be other users"]
fn the_daemon_runs_as_a_user_of_its_own() {
    const USER: u32 = 64998;
    const ADMINS: u32 = 54321;
    const OF_THE_BROKER: u32 = 54320;
    let lab = Lab::new();
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let [run, program] = ["run", "ferroce"].map(|name| lab.path(name));
    // The program may be where only root may look.
    fs::copy(ferroce(), &program).unwrap();
    fs::create_dir(&run).unwrap();
    chown(&run, Some(USER), Some(USER)).unwrap();
    // One image is the user's, one a group's of it, one root's.
    chown(lab.path("one"), Some(USER), None).unwrap();
    chown(lab.path("two"), None, Some(USER)).unwrap();
    for (name, mode) in [("one", 0o600), ("two", 0o660), ("three", 0o600)] {
        fs::set_permissions(lab.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let theirs = format!(
        "[serve.theirs]\naddr = \"{}\"\nexport = \"three={}\"\n",
        fresh_address(),
        lab.path("three").display()
    );
    let maps = lab.maps("a", &["one", "two"]).replace("a.sock", "run/a.sock");
    lab.write(&[lab.serves(&["one", "two"]), theirs, maps]);
    let control = run.join("control.sock");
    let mut command = Command::new("setpriv");
    let (user, admins) = (USER.to_string(), ADMINS.to_string());
    command.args(["--reuid", &user, "--regid", &user, "--groups", &admins]);
    command.args(["--no-new-privs", "--bounding-set", "-all", "env"]);
    command.arg(format!("FERROCE_BROKER={}", program.display()));
    command.arg(&program).args(["daemon", "--json", "--config"]);
    command.arg(lab.path("ferroce.toml")).arg("--control").arg(&control);
    command.args(["--control-group", &admins, "--nbd-dir"]).arg(&run);
    command.env("XDG_RUNTIME_DIR", &run);
    let daemon = Running::start_command(command, "ferroce daemon".into());
    eventually("a control socket", || UnixStream::connect(&control).is_ok());
    let state = |task: &str| {
        let tasks = as_user(65533, ADMINS, || ask(&control, &json!({ "do": "tasks" })));
        let found = tasks["tasks"]
            .as_array()
            .unwrap()
            .iter()
            .find(|t| t["task"] == task)
            .cloned();
        found.map(|task| (task["state"].as_str().unwrap().to_owned(), task["why"].to_string()))
    };
    eventually("the mapping", || state("map.a").is_some_and(|(state, _)| state == "up"));
    reads(&run.join("a.sock"), "two");
    let (state, why) = state("serve.theirs").unwrap();
    assert!(state == "failed" && why.contains("Permission denied"), "{state}: {why}");
    // Root's ctl and a member's trust it, as the folder is its own.
    let ctl = |groups: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65533", "--regid", "65533"]).args(groups);
        command
            .arg(&program)
            .args(["ctl", "--socket"])
            .arg(&control)
            .arg("tasks");
        Running::start_command(command, format!("ferroce ctl of {groups:?}")).end()
    };
    assert_eq!(
        lab.run(&["ctl", "--socket", &control.display().to_string(), "tasks"])
            .code,
        Some(0)
    );
    let member = ctl(&["--groups", &admins]);
    assert_eq!(member.code, Some(0), "{}", member.stderr);
    let other = ctl(&["--groups", &OF_THE_BROKER.to_string()]);
    assert!(
        other.code == Some(1) && other.stderr.contains("Permission denied"),
        "{}",
        other.stderr
    );
    assert_eq!(daemon.stop().code, Some(0));
}

#[test]
fn a_reload_changes_what_has_changed_and_nothing_else() {
    let lab = Lab::new();
    lab.write(&[
        lab.serves(&["one", "two"]),
        lab.maps("a", &["one"]),
        lab.maps("b", &["two"]),
    ]);
    let daemon = lab.daemon();
    ["serve.images", "map.a", "map.b"]
        .into_iter()
        .for_each(|task| lab.is_up(task));
    reads(&lab.path("a.sock"), "");
    // Clients that stay.
    let mut a = Client::connect(&lab.path("a.sock")).unwrap();
    let mut b = Client::connect(&lab.path("b.sock")).unwrap();
    let sessions = |lab: &Lab| {
        let all = lab.ctl(&["list", "sessions"]);
        let ids = all["sessions"].as_array().into_iter().flatten();
        ids.map(|s| (s["name"].clone(), s["session"].clone()))
            .collect::<Vec<_>>()
    };
    let before = sessions(&lab);

    // One more export and device, another mapping.
    lab.write(&[
        lab.serves(&["one", "two", "three"]),
        lab.maps("a", &["one", "three"]),
        lab.maps("b", &["two"]),
        lab.maps("c", &["three"]).replace("[\"three\"]", "\"three,ro\""),
    ]);
    let done = lab.ctl(&["reload"]);
    assert_eq!(done["changed"], json!(["serve.images", "map.a"]), "{done}");
    assert_eq!(done["started"], json!(["map.c"]), "{done}");
    assert_eq!(done["unchanged"], json!(["map.b"]), "{done}");
    reads(&lab.path("a.sock"), "three");
    lab.is_up("map.c");
    for client in [&mut a, &mut b] {
        assert!(client.read(0, MIB).unwrap() == pattern(7, MIB));
    }
    let after = sessions(&lab);
    assert!(
        before.iter().all(|session| after.contains(session)),
        "{before:?} {after:?}"
    );

    // Nothing; then a mistake, which changes nothing; then a mapping less, by a signal.
    let done = lab.ctl(&["reload"]);
    assert_eq!(done["unchanged"].as_array().unwrap().len(), 4, "{done}");
    let good = fs::read_to_string(lab.path("ferroce.toml")).unwrap();
    lab.write(&[good.clone(), "nonsense = 1\n".into()]);
    let refused = lab.run(&["ctl", "reload"]);
    let line = good.lines().count() + 1;
    assert_eq!(refused.code, Some(1));
    assert!(
        refused
            .stderr
            .contains(&format!("ferroce.toml:{line}: unknown key `nonsense`")),
        "{}",
        refused.stderr
    );
    lab.is_up("map.c");
    lab.write(&[
        lab.serves(&["one", "two", "three"]),
        lab.maps("a", &["one", "three"]),
        lab.maps("b", &["two"]),
    ]);
    daemon.signal(Signal::SIGHUP);
    eventually("map.c has ended", || lab.state("map.c").is_none());
    assert!(a.read(0, 4096).is_ok() && b.read(0, 4096).is_ok());
    // What can't be changed while it runs begins again.
    lab.write(&[
        lab.serves(&["one", "two", "three"]),
        lab.maps("a", &["one", "three"]),
        lab.maps("b", &["two"]) + "connections = 2\n",
    ]);
    assert_eq!(lab.ctl(&["reload"])["restarted"], json!(["map.b"]));
    assert!(a.read(0, 4096).is_ok());
    lab.is_up("map.b");
    reads(&lab.path("b.sock"), "");
    eventually("a server and two mappings, each with a loop of its own", || {
        let tasks = fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap();
        let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| name.trim() == "ferroce-io").count() == 3
    });
    drop((a, b));
    let ended = daemon.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!lab.path("a.sock").exists() && !lab.path("ctl").exists());
}

#[test]
fn a_reload_adds_a_path_from_another_address() {
    let lab = Lab::new();
    let config = |paths: &[String]| {
        let maps = lab.maps("a", &["one"]);
        let paths: Vec<String> = paths.iter().map(|path| format!("\"{path}\"")).collect();
        let path = format!("path = \"{}\"", lab.to_server());
        [
            lab.serves(&["one"]),
            maps.replace(&path, &format!("path = [{}]", paths.join(", "))),
        ]
    };
    lab.write(&config(&[lab.to_server()]));
    let daemon = lab.daemon();
    ["serve.images", "map.a"].into_iter().for_each(|task| lab.is_up(task));
    let mut client = Client::connect(&lab.path("a.sock")).unwrap();
    let paths = || {
        let listed = lab.ctl(&["list"]);
        let of_client = listed["mappings"][0]["paths"].as_array().unwrap().clone();
        let mut paths: Vec<String> = of_client
            .iter()
            .map(|path| path["path"].as_str().unwrap().to_owned())
            .collect();
        paths.sort_unstable();
        paths
    };
    let as_listed = |path: &str| {
        let (src, dst) = path.split_once(',').unwrap();
        format!("ip:{src}@ip:{dst}")
    };
    let others = [(); 2].map(|()| format!("{},{}", fresh_address(), lab.server));
    // One of the paths can't be: the others are there, and the next reload tries again.
    let nowhere = format!("192.0.2.1,{}", lab.server);
    lab.write(&config(&[lab.to_server(), others[0].clone(), nowhere]));
    let failed = lab.run(&["ctl", "--json", "reload"]);
    assert_eq!(failed.code, Some(1), "{}", failed.stdout);
    let done: Value = serde_json::from_str(&failed.stdout).unwrap();
    let why = done["failed"][0].as_str().unwrap();
    assert!(
        why.contains("map.a") && why.contains("192.0.2.1 is not an address"),
        "{done}"
    );
    lab.write(&config(&others));
    let done = lab.ctl(&["reload"]);
    assert_eq!(done["changed"], json!(["map.a"]), "{done}");
    let mut expected = others.each_ref().map(|path| as_listed(path));
    expected.sort_unstable();
    assert_eq!(paths(), expected);
    // The mapping has not begun again.
    assert!(client.read(0, MIB).unwrap() == pattern(7, MIB));
    client.disconnect().unwrap();
    let ended = daemon.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn a_reload_that_failed_half_way_is_finished_by_the_next() {
    let lab = Lab::new();
    lab.write(&[lab.serves(&["one", "two"]), lab.maps("a", &["one", "two"])]);
    let daemon = lab.daemon();
    ["serve.images", "map.a"].into_iter().for_each(|task| lab.is_up(task));
    // One device goes, and one can't be had.
    let wanted = lab.maps("a", &["one", "two,ro", "three"]);
    lab.write(&[lab.serves(&["one", "two"]), wanted.clone()]);
    for _ in 0..2 {
        let failed = lab.run(&["ctl", "--json", "reload"]);
        assert_eq!(failed.code, Some(1), "{}", failed.stdout);
        let done: Value = serde_json::from_str(&failed.stdout).unwrap();
        let why = done["failed"][0].as_str().unwrap();
        assert!(why.contains("map.a") && why.contains("three"), "{done}");
    }
    lab.write(&[lab.serves(&["one", "two", "three"]), wanted]);
    let done = lab.ctl(&["reload"]);
    assert_eq!(done["changed"], json!(["serve.images", "map.a"]), "{done}");
    for name in ["one", "two", "three"] {
        reads(&lab.path("a.sock"), name);
    }
    let ended = daemon.stop();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn a_reload_takes_renewed_certificates() {
    let lab = Lab::new();
    let folder = lab.path("pki");
    let authority = Authority::new("ours");
    authority.server(&folder);
    let mapping = |names: &[&str]| {
        let tls = format!("tls-certificates = \"{}\"\n", folder.display());
        [lab.maps("a", names), tls].concat()
    };
    lab.write(&[
        lab.serves(&["one", "two", "three"]),
        mapping(&["one"]),
        lab.maps("b", &["two"]),
    ]);
    let daemon = lab.daemon();
    lab.is_up("map.a");
    lab.is_up("map.b");
    let mut there = Client::connect_to(&lab.path("a.sock"), "one", TIMEOUT).unwrap();
    let all = json!(["serve.images", "map.a", "map.b"]);
    assert_eq!(lab.ctl(&["reload"])["unchanged"], all);

    authority.server(&folder);
    let done = lab.ctl(&["reload"]);
    assert_eq!(done["changed"], json!(["map.a"]), "{done}");
    assert_eq!(done["unchanged"], json!(["serve.images", "map.b"]), "{done}");

    // Nothing is done of a change that comes with certificates that are wrong, until they are right.
    fs::write(folder.join("server-key.pem"), "no key").unwrap();
    lab.write(&[
        lab.serves(&["one", "two", "three"]),
        mapping(&["one", "three"]),
        lab.maps("b", &["two"]),
    ]);
    for _ in 0..2 {
        let failed = lab.run(&["ctl", "reload"]);
        assert_eq!(failed.code, Some(1), "{}", failed.stdout);
        assert!(
            failed.stdout.contains("failed: map.a (TLS: ") && failed.stdout.contains("server-key.pem"),
            "{}",
            failed.stdout
        );
    }
    assert!(Client::connect_to(&lab.path("a.sock"), "three", TIMEOUT).is_err());
    authority.server(&folder);
    assert_eq!(lab.ctl(&["reload"])["changed"], json!(["map.a"]));
    reads(&lab.path("a.sock"), "three");
    assert!(there.read(0, MIB).unwrap() == pattern(7, MIB));
    drop(there);
    assert_eq!(daemon.stop().code, Some(0));
}

#[test]
fn mappings_end_before_the_servers_that_they_are_of() {
    for by_reload in [false, true] {
        let lab = Lab::new();
        lab.write(&[lab.serves(&["one"]), lab.maps("a", &["one"])]);
        let daemon = lab.daemon();
        lab.is_up("map.a");
        let mut client = Client::connect_to(&lab.path("a.sock"), "one", TIMEOUT).unwrap();
        client.write(0, &pattern(9, MIB)).unwrap();
        if by_reload {
            lab.write(&[]);
            assert_eq!(lab.ctl(&["reload"])["stopped"], json!(["serve.images", "map.a"]));
            eventually("the end of all", || lab.ctl(&["tasks"])["tasks"] == json!([]));
        }
        let ended = daemon.stop();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(fs::read(lab.path("one")).unwrap() == pattern(9, MIB));
        let events = ended.json();
        let of_mapping: Vec<_> = events.iter().filter(|e| e["task"] == "map.a").collect();
        let summary = of_mapping.iter().find(|e| e["event"] == "summary").expect("an end");
        assert_eq!(summary["failed_requests"], 0, "{summary}");
        let well = |e: &Value| e["event"] != "task_exited" || e["why"].is_null();
        assert!(of_mapping.iter().all(|e| well(e)), "{of_mapping:?}");
        assert!(!ended.stderr.contains("flush"), "{}", ended.stderr);
    }
}

#[test]
fn a_task_that_fails_begins_anew() {
    let lab = Lab::new();
    lab.write(&[lab.maps("a", &["one"])]);
    let mut daemon = lab.daemon();
    let failed = daemon.event("task_failed");
    assert_eq!(failed["task"], "map.a");
    let export = format!("one={}", lab.path("one").display());
    let (_serve, _) = serve(lab.server, &[export], &[]);
    lab.is_up("map.a");
    reads(&lab.path("a.sock"), "");
    assert_eq!(daemon.stop().code, Some(0));
}

#[test]
fn tasks_come_and_go_by_order() {
    let lab = Lab::new();
    lab.write(&[lab.serves(&["one", "two", "three"])]);
    let daemon = lab.daemon();
    lab.is_listening();
    lab.is_up("serve.images");
    let server = lab.to_server();
    // Paths are from where the command runs.
    let map = [
        "map",
        "--session",
        "s",
        "--path",
        &server,
        "--device",
        "one",
        "--nbd",
        "s.sock",
        "--daemon",
    ];
    let handed = lab.run(&map);
    assert_eq!(handed.code, Some(0), "{}", handed.stderr);
    lab.is_up("map.s");
    reads(&lab.path("s.sock"), "");
    let again = lab.run(&map);
    assert!(
        again.code == Some(1) && again.stderr.contains("map.s"),
        "{}",
        again.stderr
    );
    lab.ctl(&["stop", "map.s"]);
    assert_eq!(lab.state("map.s"), None);
    assert!(!lab.path("s.sock").exists());
    assert_eq!(lab.run(&["ctl", "stop", "map.s"]).code, Some(1));
    // A session of its own; its socket has its name.
    lab.ctl(&["map", "two", "from", "other", "path", &server]);
    reads(&lab.path("other.sock"), "");
    let refused = lab.run(&["ctl", "map", "none", "from", "third", "path", &server]);
    assert!(
        refused.code == Some(1) && refused.stderr.contains("none"),
        "{}",
        refused.stderr
    );
    assert_eq!(lab.state("map.third"), None, "it is not tried again");
    assert_eq!(daemon.stop().code, Some(0));
}

#[test]
fn several_servers_are_told_apart() {
    let lab = Lab::new();
    let (server, port) = (
        format!("addr = \"{}\"", lab.server),
        format!("addr = \"{}:1235\"", lab.server),
    );
    let other = lab
        .serves(&["three"])
        .replace("images", "other")
        .replace(&server, &port);
    let map = |task: &str, port: u16, device: &str| {
        lab.maps(task, &[device])
            .replace(&format!(",{}\"", lab.server), &format!(",{}:{port}\"", lab.server))
    };
    lab.write(&[
        lab.serves(&["one"]),
        other,
        map("a", 1234, "one"),
        map("b", 1235, "three"),
    ]);
    let daemon = lab.daemon();
    ["serve.images", "serve.other", "map.a", "map.b"]
        .into_iter()
        .for_each(|task| lab.is_up(task));
    let all = lab.ctl(&["list"]);
    let names = |what: &str| {
        let all = all[what].as_array().unwrap().iter();
        let mut names: Vec<_> = all.map(|one| (one["server"].clone(), one["name"].clone())).collect();
        names.sort_by_key(|(server, _)| server.as_u64());
        names
    };
    assert_eq!(names("sessions").len(), 2, "{all}");
    assert!(names("sessions")[0].0 == 0 && names("sessions")[1].0 == 1, "{all}");
    assert_eq!(lab.ctl(&["stats"])["loops"].as_object().unwrap().len(), 4);
    // The device of the one, not that of the other, whose numbers may be the same.
    lab.ctl(&["close", "three"]);
    reads(&lab.path("a.sock"), "");
    eventually("closed", || {
        let devices = lab.ctl(&["list"])["devices"].clone();
        devices.as_array().unwrap().iter().all(|d| d["name"] == "one")
    });
    assert_eq!(daemon.stop().code, Some(0));
}

#[test]
fn a_second_daemon_says_who_the_first_is() {
    let lab = Lab::new();
    lab.write(&[]);
    let daemon = lab.daemon();
    lab.is_listening();
    let mut second = lab.daemon();
    second.wait();
    let second = second.end();
    assert_eq!(second.code, Some(1));
    assert!(
        second.stderr.contains(&format!("process {}", daemon.id())),
        "{}",
        second.stderr
    );
    assert_eq!(daemon.stop().code, Some(0));
    // Nobody steers a process that is no daemon so.
    for (config, word) in [("[serve.a]\nx = 1\n", ":2: "), ("[serve", ":1: ")] {
        fs::write(lab.path("ferroce.toml"), config).unwrap();
        let mut wrong = lab.daemon();
        wrong.wait();
        let wrong = wrong.end();
        assert!(wrong.code == Some(2) && wrong.stderr.contains(word), "{}", wrong.stderr);
    }
}

#[test]
fn a_file_is_checked_without_being_run() {
    let lab = Lab::new();
    let check = |more: &[&str]| {
        let args = [&["daemon", "--config", "ferroce.toml", "--check"], more].concat();
        lab.run(&args)
    };
    let daemon = "[daemon]\nmetrics = 9100\n".to_owned();
    lab.write(&[daemon.clone(), lab.serves(&["one"]), lab.maps("a", &["one"])]);
    let checked = check(&[]);
    assert_eq!(checked.code, Some(0), "{}", checked.stderr);
    let lines: Vec<&str> = checked.stdout.lines().collect();
    let server = format!("serve.images: ferroce serve --addr={} --export=one=", lab.server);
    assert_eq!(lines[0], "daemon: ferroce daemon --metrics=9100");
    assert!(
        lines[2].starts_with("map.a: ferroce map --device=one "),
        "{}",
        checked.stdout
    );
    assert!(lines[1].starts_with(&server) && lines.len() == 3, "{}", checked.stdout);
    let json = &check(&["--json"]).json()[0];
    assert_eq!(json["event"], "checked");
    assert_eq!(json["tasks"][0]["task"], "serve.images");
    assert_eq!(json["daemon"], json!(["--metrics=9100"]));

    // Nothing of this could start here: each is named.
    let twice = lab.maps("b", &["one"]).replace("b.sock", "a.sock");
    lab.write(&[
        lab.serves(&["one", "missing"]),
        lab.maps("a", &["one", "one"]),
        twice.clone(),
        twice.replace(".b]", ".c]"),
    ]);
    let checked = check(&[]);
    assert_eq!(checked.code, Some(1), "{}", checked.stdout);
    for word in [
        "serve.images: ",
        "missing",
        "map.a: ",
        "map.c: ",
        "a.sock is used by map.b, too",
    ] {
        assert!(checked.stderr.contains(word), "{word}: {}", checked.stderr);
    }

    lab.write(&[lab.serves(&["one"]), "thread = 2\n".to_owned()]);
    let checked = check(&[]);
    assert_eq!(checked.code, Some(2), "{}", checked.stdout);
    let error = "ferroce.toml:4: unknown key `thread` of serve.images: did you mean `threads`?";
    assert!(checked.stderr.contains(error), "{}", checked.stderr);
    assert_eq!(lab.run(&["daemon", "--check"]).code, Some(2), "which file?");
}

#[test]
fn the_file_has_options_of_the_daemon() {
    let lab = Lab::new();
    let daemon = |control: &str| format!("[daemon]\ncontrol = \"{}\"\njson = true\n", lab.path(control).display());
    lab.write(&[daemon("ctl"), lab.serves(&["one"])]);
    let start = |more: &[&str]| {
        let mut command = Command::new(ferroce());
        command
            .arg("daemon")
            .arg("--config")
            .arg(lab.path("ferroce.toml"))
            .args(more);
        Running::start_command(command, "ferroce daemon".into())
    };
    let mut running = start(&[]);
    running.event("task_started");
    assert!(lab.run(&["ctl", "tasks"]).stdout.contains("serve.images"));
    // They hold from the start on: who changes them is told.
    lab.write(&[daemon("other"), lab.serves(&["one"])]);
    let reloaded = lab.run(&["ctl", "reload"]);
    assert_eq!(reloaded.code, Some(1), "{}", reloaded.stdout);
    assert!(reloaded.stdout.contains("failed: [daemon]"), "{}", reloaded.stdout);
    assert!(
        reloaded.stdout.contains("unchanged: serve.images"),
        "{}",
        reloaded.stdout
    );
    assert_eq!(running.stop().code, Some(0));
    // The command line takes precedence.
    let own = lab.path("ctl");
    let mut running = start(&["--control", own.to_str().unwrap()]);
    running.event("task_started");
    assert!(lab.run(&["ctl", "tasks"]).stdout.contains("serve.images"));
    assert!(!lab.path("other").exists());
    assert_eq!(running.stop().code, Some(0));
}

#[test]
fn a_daemon_without_tasks_says_how_they_come() {
    let lab = Lab::new();
    let control = lab.path("ctl");
    let first_line = |more: &[&str]| {
        let mut command = Command::new(ferroce());
        command.arg("daemon").arg("--control").arg(&control).args(more);
        command.current_dir(lab.dir.path());
        let daemon = Running::start_command(command, "ferroce daemon".into());
        lab.is_listening();
        assert_eq!(lab.run(&["ctl", "tasks"]).code, Some(0));
        let done = daemon.stop();
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        done.stdout.lines().next().unwrap_or_default().to_owned()
    };
    let line = first_line(&[]);
    for word in [
        "no --config FILE",
        "`ferroce serve`, `map`, `rds node` and `lnet serve` with --daemon",
        &control.display().to_string(),
    ] {
        assert!(line.contains(word), "{word}: {line}");
    }
    lab.write(&[]);
    let line = first_line(&["--config", "ferroce.toml"]);
    assert!(line.contains("ferroce.toml has no [serve.NAME]"), "{line}");
    let json: Value = serde_json::from_str(&first_line(&["--json"])).unwrap();
    assert_eq!(json["event"], "idle");
    assert_eq!(json["control"], control.display().to_string());
}

#[test]
fn a_service_manager_is_told() {
    let lab = Lab::new();
    lab.write(&[lab.serves(&["one"]), lab.maps("a", &["one"])]);
    let socket = UnixDatagram::bind(lab.path("notify")).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let told = || {
        let mut buffer = [0; 256];
        let len = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..len]).into_owned()
    };
    let mut command = lab.command();
    command
        .env("NOTIFY_SOCKET", lab.path("notify"))
        .env("WATCHDOG_USEC", Duration::from_millis(200).as_micros().to_string());
    let daemon = Running::start_command(command, "ferroce daemon".into());
    while told() != "READY=1" {}
    assert_eq!(lab.state("map.a").as_deref(), Some("up"), "{}", lab.ctl(&["tasks"]));
    while told() != "WATCHDOG=1" {}
    daemon.signal(Signal::SIGTERM);
    while told() != "STOPPING=1" {}
    assert_eq!(daemon.end().code, Some(0));
}

#[test]
fn an_rds_node_is_a_task() {
    let lab = Lab::new();
    let home = lab.path("home");
    fs::create_dir(&home).unwrap();
    let of_user = |mut command: Command| {
        command.env("XDG_RUNTIME_DIR", &home);
        Running::start_command(command, "ferroce".into())
    };
    let (own, more) = (fresh_address().to_string(), fresh_address().to_string());
    let table = |addrs: &[&str], rest: &str| format!("[rds.node]\naddr = {}\n{rest}\n", json!(addrs));
    lab.write(&[table(&[&own], "")]);
    let mut daemon = of_user(lab.command());
    lab.is_up("rds.node");
    let ping = |from: &str| {
        let mut command = Command::new(ferroce());
        command.args(["rds", "ping", "-c", "1", "-I", from, &own]);
        let mut running = of_user(command);
        running.wait();
        running.end()
    };
    let answered = ping(&own);
    assert_eq!(answered.code, Some(0), "{}{}", answered.stdout, answered.stderr);
    let metrics = lab.run(&["ctl", "metrics"]).stdout;
    for line in ["ferroce_rds_recv_ping_total 1\n", "ferroce_rds_sockets "] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert!(
        metrics.contains(&format!("ferroce_roce_tx_packets_total{{address=\"{own}\"}}")),
        "{metrics}"
    );
    // Addresses and limits change while it runs.
    lab.write(&[table(&[&own, &more], "max-sockets = 1")]);
    assert_eq!(lab.ctl(&["reload"])["changed"], json!(["rds.node"]));
    eventually("a second address", || daemon.event("rds_opened")["address"] == more);
    assert_eq!(ping(&more).code, Some(0));
    let connection = daemon.event("rds_up");
    assert_eq!(connection["task"], "rds.node");
    assert!(
        lab.run(&["ctl", "metrics"])
            .stdout
            .contains("ferroce_rds_connection_up{local=")
    );
    lab.write(&[table(&[&more], "max-sockets = 1")]);
    assert_eq!(lab.ctl(&["reload"])["restarted"], json!(["rds.node"]));
    lab.is_up("rds.node");
    // Nobody else gets the address.
    let rival = Lab::new();
    rival.write(&[table(&[&more], "")]);
    let mut other = Running::start_command(rival.command(), "ferroce daemon".into());
    let failed = other.event("task_failed");
    assert!(
        failed["why"].as_str().unwrap().contains("another RDS node has it"),
        "{failed}"
    );
    lab.write(&[
        table(&[&more], ""),
        table(&[&own], "").replace("rds.node", "rds.second"),
    ]);
    let mut check = lab.command();
    check.arg("--check");
    let mut check = of_user(check);
    check.wait();
    let check = check.end();
    assert!(
        check.code == Some(1) && check.stdout.contains("of an RDS node is used by rds.node"),
        "{}",
        check.stdout
    );
    daemon.signal(Signal::SIGTERM);
    daemon.wait();
    let ended = daemon.end();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn an_lnet_node_is_a_task() {
    let lab = Lab::new();
    let [nid, other] = [(); 2].map(|()| format!("{}@o2ib", fresh_address()));
    let table = |nid: &str, rest: &str| format!("[lnet.fs]\nnid = {nid:?}\n{rest}\n");
    lab.write(&[table(&nid, "peer-credits = 4")]);
    let mut daemon = lab.daemon();
    lab.is_up("lnet.fs");
    let node = LnetNode::open(NodeOptions::new(format!("{}@o2ib", fresh_address()).parse().unwrap())).unwrap();
    let ping = |nid: &str| node.ping(nid.parse().unwrap()).unwrap().wait().unwrap();
    ping(&nid);
    let up = daemon.event("lnet_up");
    assert_eq!(
        (&up["task"], &up["queue_depth"], &up["peer"]),
        (&"lnet.fs".into(), &4.into(), &node.nid().to_string().into())
    );
    let metrics = lab.run(&["ctl", "metrics"]).stdout;
    for line in [
        format!("ferroce_lnet_pings_total{{nid=\"{nid}\"}} 1\n"),
        format!("ferroce_lnet_rejects_sent_total{{nid=\"{nid}\",reason=\"MSG_QUEUE_SIZE\"}} 1\n"),
        format!(
            "ferroce_lnet_peer_connections{{nid=\"{nid}\",peer=\"{}\"}} 1\n",
            node.nid()
        ),
        format!(
            "ferroce_roce_tx_packets_total{{address=\"{}\"}}",
            nid.trim_end_matches("@o2ib")
        ),
    ] {
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    let page = fs::read_to_string(ferroce_tests::root().join("docs/reference/metrics.md")).unwrap();
    let names = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ferroce_lnet_"));
    for name in names.filter_map(|line| line.split(' ').next()) {
        assert!(
            page.contains(&format!("| `ferroce_lnet_{name}` |")),
            "metrics.md lacks {name}"
        );
    }
    let stat = lab.run(&["stat"]).stdout;
    let line = format!("lnet {nid} peer {} up queue_depth 4 fragments 257 credits ", node.nid());
    assert!(stat.contains(&line), "{stat}");

    assert_eq!(lab.ctl(&["reload"])["unchanged"], json!(["lnet.fs"]));
    lab.write(&[table(&other, "")]);
    assert_eq!(lab.ctl(&["reload"])["restarted"], json!(["lnet.fs"]));
    eventually("its other address", || daemon.event("lnet_listening")["nid"] == other);
    assert_eq!(ping(&other).count, 2);
    let handed = lab.run(&["lnet", "serve", "--daemon", "--sink", "60:4k", &nid]);
    assert_eq!(handed.code, Some(0), "{}", handed.stderr);
    lab.is_up(&format!("lnet.{nid}"));
    assert_eq!(ping(&nid).count, 2);
    let second = lab.run(&["lnet", "serve", "--daemon", &nid]);
    assert!(
        second.code == Some(1) && second.stderr.contains("exists already"),
        "{second:?}"
    );
    daemon.signal(Signal::SIGTERM);
    daemon.wait();
    let ended = daemon.end();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}
