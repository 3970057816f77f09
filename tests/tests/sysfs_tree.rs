//! The attributes as a mounted file system (`--sysfs`), and programs that look for them under /sys (`ferroce run`).

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::{Ipv4Addr, UdpSocket},
    os::unix::{
        fs::{FileExt, MetadataExt, PermissionsExt, symlink},
        net::UnixStream,
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use ferroce_tests::{
    as_user,
    attributes::{Names, ROOTS, TAKEN, WRITES, is_known, without_numbers},
    device::image,
    eventually, ferroce, fresh_address,
    process::{Running, TIMEOUT},
};
use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    signal::{Signal, kill},
};
use serde_json::{Value, json};

const EACCES: i32 = 13;
const ECONNRESET: i32 = 104;
const EEXIST: i32 = 17;
const EINVAL: i32 = 22;
const ENOENT: i32 = 2;
const EPERM: i32 = 1;
const ERANGE: i32 = 34;
const ENXIO: i32 = 6;

/// What the kernel's tree was found to have in the laboratory (`cargo xtask interop attributes`), Debian's 6.1.
const KERNEL: &str = include_str!("../data/kernel-attributes.txt");

/// A daemon that serves two images and maps one of them over two paths, with its tree.
struct Lab {
    dir: tempfile::TempDir,
    clients: [Ipv4Addr; 2],
    servers: [Ipv4Addr; 2],
}

impl Lab {
    fn new() -> Self {
        let lab = Self {
            dir: tempfile::tempdir().unwrap(),
            clients: [fresh_address(), fresh_address()],
            servers: [fresh_address(), fresh_address()],
        };
        let exports = ["disk", "other"].map(|name| {
            let image = image(lab.dir.path(), &format!("{name}.img"), &vec![0; 1 << 18]);
            format!("\"{name}={}\"", image.display())
        });
        let paths = [0, 1].map(|i| format!("\"{},{}\"", lab.clients[i], lab.servers[i]));
        let listen = lab.servers.map(|server| format!("\"{server}\""));
        let config = format!(
            "[serve.images]\naddr = [{}]\nexport = [{}]\nalways-invalidate = false\n\
             [map.test]\npath = [{}]\ndevice = \"disk\"\nnbd = \"{}\"\non-loss = \"queue\"\n\
             connect-timeout = 600\n",
            listen.join(", "),
            exports.join(", "),
            paths.join(", "),
            lab.path("nbd.sock").display(),
        );
        fs::write(lab.path("ferroce.toml"), config).unwrap();
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// In the tree.
    fn tree(&self, file: &str) -> PathBuf {
        self.path("sys").join(file)
    }

    fn rtrs_path(&self, i: usize) -> String {
        format!("ip:{}@ip:{}", self.clients[i], self.servers[i])
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(ferroce());
        command
            .args(["daemon", "--json", "--config"])
            .arg(self.path("ferroce.toml"));
        command.arg("--control").arg(self.path("ctl"));
        command.arg("--sysfs").arg(self.path("sys")).args(more);
        command
    }

    fn daemon(&self, more: &[&str]) -> Running {
        let mut daemon = Running::start_command(self.command(more), "ferroce daemon".into());
        daemon.event("mapped");
        // Both paths are to be there.
        let paths = self.tree("class/rtrs-client/test/paths");
        eventually("both paths are connected", || {
            let state = |i| fs::read_to_string(paths.join(self.rtrs_path(i)).join("state")).ok();
            [0, 1].iter().all(|i| state(*i).as_deref() == Some("connected\n"))
        });
        daemon
    }

    fn connect(&self) -> Line {
        Line::to(&self.path("ctl"))
    }

    fn is_mounted(&self) -> bool {
        let at = format!(
            " {} ",
            self.path("sys").canonicalize().unwrap_or(self.path("sys")).display()
        );
        fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&at)
    }

    /// Ends the daemon; nothing stays mounted.
    fn end(&self, daemon: Running) {
        assert!(self.is_mounted());
        let ended = daemon.stop();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(!self.is_mounted());
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Of a test that has failed.
        if self.is_mounted() {
            let _ = Command::new("umount").arg("-l").arg(self.path("sys")).status();
        }
    }
}

/// A control socket.
struct Line(BufReader<UnixStream>);

impl Line {
    fn to(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut this = Self(BufReader::new(stream));
        this.ask(json!({ "do": "hello", "version": 1 }));
        this
    }

    fn ask(&mut self, request: Value) -> Value {
        writeln!(self.0.get_mut(), "{request}").unwrap();
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{request}: {line}: {e}"))
    }

    /// All files from here on: kind and mode, and a link's target or a file's text.
    fn tree(&mut self, at: &str, found: &mut BTreeSet<String>) {
        let stat = self.ask(json!({ "do": "stat", "file": at }));
        let mode = stat["mode"].as_str().unwrap().trim_start_matches('0').to_owned();
        match stat["kind"].as_str().unwrap() {
            "dir" => {
                found.insert(format!("dir {mode} {at}"));
                let listed = self.ask(json!({ "do": "ls", "file": at }));
                for entry in listed["entries"].as_array().unwrap() {
                    self.tree(&below(at, entry["name"].as_str().unwrap()), found);
                }
            }
            "file" => {
                let read = self.ask(json!({ "do": "read", "file": at }));
                found.insert(format!(
                    "file {mode} {at} {}",
                    settled(at, read["text"].as_str().unwrap())
                ));
            }
            _ => {
                found.insert(format!("link {mode} {at} {}", stat["target"].as_str().unwrap()));
            }
        }
    }
}

fn below(at: &str, name: &str) -> String {
    format!("{at}/{name}").trim_start_matches('/').to_owned()
}

/// A text, but for what is another one the next time.
fn settled(file: &str, text: &str) -> String {
    match file.rsplit('/').next() {
        Some("cur_latency") => "LATENCY".to_owned(),
        _ => text.replace('\n', "|"),
    }
}

/// The same of a mounted tree.
fn mounted(root: &Path, at: &str, found: &mut BTreeSet<String>) {
    let path = root.join(at);
    let meta = path.symlink_metadata().unwrap();
    let mode = format!("{:o}", meta.mode() & 0o7777);
    if meta.is_dir() {
        found.insert(format!("dir {mode} {at}"));
        for entry in path.read_dir().unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.file_type().unwrap(), entry.metadata().unwrap().file_type());
            mounted(root, &below(at, entry.file_name().to_str().unwrap()), found);
        }
    } else if meta.is_file() {
        assert_eq!(meta.len(), 4096, "{at}");
        let text = settled(at, &fs::read_to_string(&path).unwrap());
        found.insert(format!("file {mode} {at} {text}"));
    } else {
        let target = path.read_link().unwrap();
        assert!(path.exists(), "{at} leads nowhere");
        found.insert(format!("link {mode} {at} {}", target.display()));
    }
}

/// As `echo` of a shell.
fn echo(file: &Path, text: &str) -> std::io::Result<()> {
    let mut file = fs::File::options().write(true).truncate(true).open(file)?;
    file.write_all(format!("{text}\n").as_bytes())
}

fn refused(file: &Path, text: &str, errno: i32) {
    let e = echo(file, text).expect_err(text);
    assert_eq!(e.raw_os_error(), Some(errno), "{}: {text:.80}: {e}", file.display());
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn the_mounted_tree_is_what_ctl_shows() {
    let lab = Lab::new();
    let daemon = lab.daemon(&[]);
    let (mut told, mut found) = (BTreeSet::new(), BTreeSet::new());
    lab.connect().tree("", &mut told);
    mounted(&lab.path("sys"), "", &mut found);
    let differ: Vec<_> = told.symmetric_difference(&found).collect();
    assert!(differ.is_empty(), "{differ:#?}");
    for file in ["mp_policy", "paths"] {
        assert!(lab.tree("class/rtrs-client/test").join(file).exists(), "{file}");
    }
    // Each file has a number of its own, which stays.
    let number = |file: &str| lab.tree(file).symlink_metadata().unwrap().ino();
    let numbers = || ["class", "block", "class/rtrs-client/test", "class/rtrs-server/test"].map(number);
    let once = numbers();
    assert_eq!(BTreeSet::from(once).len(), once.len());
    assert_eq!(numbers(), once);
    // A text that is read in pieces is one text, and again from its beginning.
    let file = fs::File::open(lab.tree("class/rtrs-client/test/mpath_policy")).unwrap();
    let piece = |at| {
        let mut bytes = [0; 7];
        let n = file.read_at(&mut bytes, at).unwrap();
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    };
    assert_eq!((&*piece(7), &*piece(0)), ("light (", "min-inf"));
    echo(&lab.tree("class/rtrs-client/test/mpath_policy"), "rr").unwrap();
    assert_eq!((&*piece(14), &*piece(0), &*piece(4096)), ("MI: 1)\n", "round-r", ""));
    lab.end(daemon);
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn the_mounted_tree_is_the_kernels() {
    let lab = Lab::new();
    let daemon = lab.daemon(&["--sysfs-strict"]);
    let names = Names {
        session: "test",
        path: lab.rtrs_path(0),
        device: "disk",
        served: "test",
        served_path: lab.rtrs_path(0),
        export: "disk",
        asked: "disk",
    };
    let second = lab.rtrs_path(1);
    let mut lines = Vec::new();
    for root in ROOTS {
        let mut found = BTreeSet::new();
        mounted(&lab.path("sys"), &names.fill(root), &mut found);
        for line in found {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            match words[..] {
                ["file", mode, file, text] => {
                    lines.push(format!("file {mode} {file}"));
                    let text = if file.ends_with("cur_latency") { "0 ns|" } else { text };
                    lines.push(format!("text {file} {text}"));
                }
                ["link", _, file, target] => lines.push(format!("file link {file} {target}")),
                _ => {}
            }
        }
    }
    for (i, (file, text)) in WRITES.into_iter().chain(TAKEN).enumerate() {
        let (file, text) = (names.fill(file), names.fill(text));
        let how = match echo(&lab.tree(&file), &text) {
            Ok(()) => "taken".to_owned(),
            Err(e) => e.to_string().split(" (os error").next().unwrap_or_default().to_owned(),
        };
        lines.push(format!("write {file} [{text}] {how}"));
        if i >= WRITES.len() {
            let shown = fs::read_to_string(lab.tree(&file)).unwrap().replace('\n', "|");
            lines.push(format!("then {file} [{text}] {shown}"));
        }
    }
    let plain = |line: &String| without_numbers(&names.plain(line.replace(&second, "PATH").trim_end()));
    let ours: BTreeSet<String> = lines.iter().map(plain).collect();
    let kernels: BTreeSet<String> = KERNEL.lines().map(str::to_owned).collect();
    let differ = ours.symmetric_difference(&kernels).filter(|line| !is_known(line));
    let differ: Vec<_> = differ.collect();
    assert!(differ.is_empty(), "{differ:#?}");
    lab.end(daemon);
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn writes_are_orders_and_nothing_can_be_made() {
    let lab = Lab::new();
    let daemon = lab.daemon(&[]);
    let session = lab.tree("class/rtrs-client/test");
    refused(&session.join("mpath_policy"), "best", EINVAL);
    refused(&session.join("max_reconnect_attempts"), "99999999999", ERANGE);
    refused(&session.join("add_path"), &lab.rtrs_path(0), EEXIST);
    let map_device = lab.tree("class/rnbd-client/ctl/map_device");
    refused(&map_device, "sessname=none device_path=x", ENXIO);
    // A session of its own that comes to nothing, by what the server says and by what keeps it from being opened.
    let path = lab.rtrs_path(0);
    refused(
        &map_device,
        &format!("sessname=new path={path} device_path=none"),
        ENOENT,
    );
    refused(
        &map_device,
        &format!("dest_port=9 sessname=new path={path} device_path=disk"),
        ECONNRESET,
    );
    refused(&map_device, &"x".repeat(4096), EINVAL);
    refused(&map_device, &"x".repeat(300_000), EINVAL);
    refused(&session.join("paths").join(lab.rtrs_path(0)).join("state"), "1", EACCES);

    // A shell's.
    let shell = |script: &str| {
        let script = format!("cd '{}' && {script}", session.display());
        Command::new("sh").args(["-c", &script]).output().unwrap()
    };
    let done = |script: &str| {
        let out = shell(script);
        assert!(
            out.status.success(),
            "{script}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        String::from_utf8(out.stdout).unwrap()
    };
    assert_eq!(
        done("echo rr > mpath_policy; cat mpath_policy"),
        "round-robin (RR: 0)\n"
    );
    assert_eq!(done("echo ml >> mp_policy; cat mpath_policy"), "min-latency (ML: 2)\n");
    assert_eq!(
        done("printf 7 | tee max_reconnect_attempts; cat max_reconnect_attempts"),
        "77\n"
    );
    assert!(!shell("echo 3 > mpath_policy").status.success());
    // A device more, and none: both show at once.
    echo(&map_device, "sessname=test device_path=other access_mode=ro").unwrap();
    let device = lab.tree("class/rnbd-client/ctl/devices/other@test");
    assert_eq!(
        device.canonicalize().unwrap(),
        lab.tree("block/rnbd1").canonicalize().unwrap()
    );
    assert_eq!(fs::read_to_string(device.join("rnbd/access_mode")).unwrap(), "ro\n");
    let kept = fs::File::open(device.join("size")).unwrap();
    echo(&device.join("rnbd/unmap_device"), "normal").unwrap();
    assert_eq!(device.symlink_metadata().unwrap_err().kind(), ErrorKind::NotFound);
    let gone = (&kept).read(&mut [0; 8]).unwrap_err();
    assert_eq!(
        gone.raw_os_error(),
        Some(nix::libc::ENODEV),
        "what was open has no device any more"
    );

    let errno = |result: std::io::Result<()>| result.unwrap_err().raw_os_error();
    assert_eq!(errno(fs::write(session.join("new"), "")), Some(EACCES));
    assert_eq!(errno(fs::create_dir(session.join("new"))), Some(EPERM));
    assert_eq!(errno(fs::remove_file(session.join("add_path"))), Some(EPERM));
    assert_eq!(errno(fs::remove_dir(session.join("paths"))), Some(EPERM));
    assert_eq!(
        errno(fs::rename(session.join("add_path"), session.join("x"))),
        Some(EPERM)
    );
    assert_eq!(errno(symlink("a", session.join("b"))), Some(EPERM));
    let open = fs::Permissions::from_mode(0o666);
    assert_eq!(errno(fs::set_permissions(session.join("add_path"), open)), Some(EPERM));
    lab.end(daemon);
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn a_write_that_waits_holds_up_nobody_and_can_be_interrupted() {
    let lab = Lab::new();
    let daemon = lab.daemon(&[]);
    let session = lab.tree("class/rtrs-client/test");
    // Something that never answers has the port.
    let (from, to) = (lab.clients[0], fresh_address());
    let _deaf = UdpSocket::bind((to, 4791)).unwrap();
    let add = |from: Ipv4Addr, to: Ipv4Addr| -> Child {
        let script = format!("echo ip:{from}@ip:{to} > '{}'", session.join("add_path").display());
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut waiting = add(from, to);
    let added = session.join("paths").join(format!("ip:{from}@ip:{to}"));
    eventually("the path is connected to", || added.is_dir());
    assert_eq!(
        fs::read_to_string(session.join("mpath_policy")).unwrap(),
        "min-inflight (MI: 1)\n"
    );
    echo(&session.join("mpath_policy"), "rr").unwrap();
    mounted(&lab.path("sys"), "", &mut BTreeSet::new());
    assert!(waiting.try_wait().unwrap().is_none(), "it waits");
    kill(nix::unistd::Pid::from_raw(waiting.id() as i32), Signal::SIGINT).unwrap();
    let mut ended = None;
    eventually("who waits is interrupted", || {
        ended = waiting.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().signal(), Some(Signal::SIGINT as i32));
    assert_eq!(
        fs::read_to_string(added.join("state")).unwrap(),
        "disconnected\n",
        "it is still tried"
    );
    assert_eq!(
        fs::read_to_string(session.join("mpath_policy")).unwrap(),
        "round-robin (RR: 0)\n"
    );
    lab.end(daemon);
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn the_place_is_taken_over_from_the_dead_and_from_nobody_else() {
    let lab = Lab::new();
    let mut first = lab.daemon(&[]);
    let try_there = |dir: &Path| {
        let mut command = Command::new(ferroce());
        command
            .args(["daemon", "--control"])
            .arg(lab.path("other.ctl"))
            .arg("--sysfs")
            .arg(dir);
        Running::start_command(command, "ferroce daemon".into()).end()
    };
    let second = try_there(&lab.path("sys"));
    assert_eq!(second.code, Some(1), "{}", second.stderr);
    assert!(
        second.stderr.contains("something is mounted there"),
        "{}",
        second.stderr
    );
    let full = try_there(lab.dir.path());
    assert!(full.stderr.contains("not empty"), "{}", full.stderr);
    assert_eq!(
        fs::read_dir(lab.path("sys")).unwrap().count(),
        3,
        "the first is as it was"
    );

    first.signal(Signal::SIGKILL);
    first.wait();
    let dead = fs::metadata(lab.path("sys")).unwrap_err();
    assert_eq!(dead.kind(), ErrorKind::NotConnected);
    let again = lab.daemon(&[]);
    assert!(lab.tree("class/rtrs-client/test").is_dir());
    // Who stands in it does not keep it.
    let mut guest = Command::new("sleep")
        .arg("60")
        .current_dir(lab.path("sys"))
        .spawn()
        .unwrap();
    lab.end(again);
    guest.kill().unwrap();
    guest.wait().unwrap();
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn a_tree_is_its_owners_and_its_groups() {
    const NOBODY: &str = "65534";
    const GROUP: &str = "54321";
    let lab = Lab::new();
    let daemon = lab.daemon(&["--control-group", GROUP]);
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = lab.tree("class/rtrs-client/test/mpath_policy");
    assert_eq!(file.metadata().unwrap().gid(), 54321);
    let by = |groups: &[&str], program: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY]).args(groups);
        command.args(program).arg(&file).output().unwrap()
    };
    let said = |out: &Output| String::from_utf8_lossy(&out.stderr).into_owned();
    for program in [&["cat"][..], &["stat"], &["sh", "-c", "echo rr > $0"]] {
        let refused = by(&["--clear-groups"], program);
        assert!(
            !refused.status.success() && said(&refused).contains("denied"),
            "{program:?}: {}",
            said(&refused)
        );
        let member = by(&["--groups", GROUP], program);
        assert!(member.status.success(), "{program:?}: {}", said(&member));
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "round-robin (RR: 0)\n");
    lab.end(daemon);
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn one_member_leaves_open_files_for_others() {
    const GROUP: u32 = 54321;
    let lab = Lab::new();
    let daemon = lab.daemon(&["--control-group", &GROUP.to_string()]);
    fs::set_permissions(lab.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = lab.tree("class/rtrs-client/test/mpath_policy");
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(16_384), hard).unwrap();
    let open = |user: u32, count: usize| {
        let open = || (0..count).map(|_| fs::File::open(&file)).collect::<Vec<_>>();
        as_user(user, GROUP, open)
    };
    let held = open(65533, 4096);
    assert_eq!(held.iter().filter(|opened| opened.is_ok()).count(), 1024);
    assert_eq!(
        held.last().unwrap().as_ref().unwrap_err().raw_os_error(),
        Some(24),
        "EMFILE"
    );
    assert!(open(65532, 1).iter().all(Result::is_ok), "another member");
    // All members together leave some for root.
    let all: Vec<_> = (65500..65504).map(|user| open(user, 1024)).collect();
    assert_eq!(fs::read_to_string(&file).unwrap(), "min-inflight (MI: 1)\n");
    drop((held, all));
    eventually("they come back", || open(65533, 1024).iter().all(Result::is_ok));
    lab.end(daemon);
}

/// Runs a program under `ferroce run`.
fn under_run(envs: &[(&str, &Path)], program: &[&str]) -> Output {
    if std::env::var_os("FERROCE_BIN").is_none() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(ferroce_tests::root());
        assert!(
            cargo
                .args(["build", "-q", "-p", "verbs-shim"])
                .status()
                .unwrap()
                .success()
        );
    }
    let mut command = Command::new(ferroce());
    command.args(["run", "--"]).args(program);
    command.env_remove("FERROCE_SYS").env_remove("FERROCE_CONTROL");
    command.envs(envs.iter().copied()).output().unwrap()
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn programs_find_the_tree_under_sys() {
    let lab = Lab::new();
    let daemon = lab.daemon(&[]);
    let (control, tree, own) = (lab.path("ctl"), lab.path("sys"), lab.path("no runtime"));
    let by_socket = [("FERROCE_CONTROL", &*control)];
    let by_name = [("FERROCE_SYS", &*tree)];
    let said = |envs: &[(&str, &Path)], program: &[&str]| {
        let out = under_run(envs, program);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{program:?}: {stderr}");
        String::from_utf8(out.stdout).unwrap()
    };
    let policy = "/sys/class/rtrs-client/test/mpath_policy";
    for how in [by_socket, by_name] {
        assert_eq!(said(&how, &["cat", policy]), "min-inflight (MI: 1)\n");
    }
    let ls = said(&by_socket, &["ls", "/sys/class/rtrs-client/test/paths"]);
    assert_eq!(ls.lines().count(), 2, "{ls}");
    assert!(ls.contains(&lab.rtrs_path(1)), "{ls}");
    let link = "/sys/class/rnbd-client/ctl/devices/disk@test";
    for program in [&["readlink", "-f", link][..], &["realpath", link]] {
        assert_eq!(said(&by_socket, program), "/sys/block/rnbd0\n", "{program:?}");
    }
    assert_eq!(said(&by_socket, &["readlink", link]), "../../../../block/rnbd0\n");
    assert_eq!(
        said(&by_socket, &["stat", "-c", "%a %s %F", policy]),
        "644 4096 regular file\n"
    );
    assert_eq!(said(&by_socket, &["cat", "/sys/block/rnbd0/rnbd/state"]), "open\n");
    let port = "/sys/module/rnbd_server/parameters/port_nr";
    assert_eq!(said(&by_socket, &["cat", port]), "1234\n");
    said(
        &by_socket,
        &["sh", "-c", &format!("test -w {policy} && echo rr > {policy}")],
    );
    assert_eq!(said(&by_socket, &["head", "-n", "1", policy]), "round-robin (RR: 0)\n");
    // What others have there is theirs.
    let real: BTreeSet<_> = fs::read_dir("/sys/class")
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    let shown = said(&by_socket, &["ls", "/sys/class"]);
    assert_eq!(shown.lines().count(), real.len());
    lab.end(daemon);

    // Without a tree it is said once, and only to who looks for it.
    let nothing = [("FERROCE_CONTROL", &*control), ("XDG_RUNTIME_DIR", &*own)];
    if !Path::new("/run/ferroce-daemon/sys/class").exists() && !Path::new(policy).exists() {
        let out = under_run(&nothing, &["cat", policy, policy]);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(
            stderr.matches("no attributes of ferroce are mounted").count(),
            1,
            "{stderr}"
        );
        assert_eq!(out.status.code(), Some(1));
        let other = under_run(&nothing, &["cat", "/proc/self/comm"]);
        assert_eq!((&*other.stdout, &*other.stderr), (&b"cat\n"[..], &b""[..]));
    }
}
