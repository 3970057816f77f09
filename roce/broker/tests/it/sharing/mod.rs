//! Processes that share an address, through the facade: the other processes are this test program again, in [`member`].

mod ended;
mod hostile;
mod later;
mod member;
mod numbers;
mod settling;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::IpAddr,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::{MetadataExt, PermissionsExt},
            net::UnixDatagram,
        },
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use crate::raw::{Raw, deposited};
use roce::{Device, DeviceConfig};
use roce_broker::{
    Error, JoinConfig, Membership, Statistics, join,
    proto::{MAX_SHOWN, Reply, Request, ToBroker},
    statistics,
};

/// Time after which an expected event counts as missing.
const TIMEOUT: Duration = Duration::from_secs(180);
/// The broker of this crate, in the place of `ferroce broker`.
const BROKER: &str = env!("CARGO_BIN_EXE_roce-broker");

impl Drop for Place {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = fs::read_to_string(self.broker_dir().join("broker.log"));
            eprintln!("the brokers' log: {}", log.unwrap_or_default());
        }
    }
}

/// Makes a program, by another process: were the file open in this one, a child that is started meanwhile would have it
/// open too, and it could not be run (ETXTBSY).
fn write_program(script: &str, program: &Path, argument: &Path) {
    let script = format!("{script} && chmod 755 \"$0\"");
    let status = Command::new("sh")
        .args(["-c", &script])
        .args([program, argument])
        .status();
    assert!(status.unwrap().success());
}

/// A directory for a broker, and how to join that.
struct Place {
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The broker ends soon when nobody is left.
        let program = dir.path().join("broker");
        let text = format!("#!/bin/sh\nFERROCE_BROKER_LINGER=0.5 exec {BROKER} \"$@\"\n");
        write_program("printf %s \"$1\" > \"$0\"", &program, text.as_ref());
        Self { dir, program }
    }

    fn broker_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn how(&self) -> JoinConfig {
        JoinConfig {
            dir: self.broker_dir(),
            program: Some(self.program.clone()),
            name: "test".into(),
        }
    }

    fn join(&self) -> Membership {
        join(&self.how()).unwrap()
    }

    fn statistics(&self) -> Statistics {
        statistics(&self.broker_dir()).unwrap().expect("a broker")
    }

    /// Waits until the broker says so.
    fn until(&self, what: &str, holds: impl Fn(&Statistics) -> bool) -> Statistics {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            // Between two brokers there is none.
            if let Ok(Some(s)) = statistics(&self.broker_dir())
                && holds(&s)
            {
                return s;
            }
            assert!(
                Instant::now() < deadline,
                "never: {what}: {:?}",
                statistics(&self.broker_dir())
            );
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn until_gone(&self) {
        let socket = self.broker_dir().join("broker.sock");
        wait_until("the broker has ended", || !socket.exists());
    }

    fn start(&self, addr: &str, alone: bool) -> Process {
        Process::start(self, addr, alone)
    }
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn kill(pid: u32) {
    let status = Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(status.success());
}

/// Another process with a device.
struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    broker_dir: PathBuf,
}

impl Process {
    fn start(place: &Place, addr: &str, alone: bool) -> Self {
        Self::of(Command::new(std::env::current_exe().unwrap()), place, addr, alone)
    }

    fn of(mut command: Command, place: &Place, addr: &str, alone: bool) -> Self {
        let mut child = command
            .args(["sharing::member::member", "--exact", "--ignored", "--nocapture"])
            .env("FERROCE_BROKER", &place.program)
            .env("FERROCE_BROKER_DIR", place.broker_dir())
            .env(member::ADDR, addr)
            .env(member::ALONE, if alone { "1" } else { "" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tx, lines) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if let Some(at) = line.find(member::MARK) {
                    let _ = tx.send(line[at + member::MARK.len()..].to_owned());
                }
            }
        });
        Self {
            stdin: child.stdin.take(),
            child,
            lines,
            broker_dir: place.broker_dir(),
        }
    }

    fn say(&mut self, text: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{text}").unwrap();
    }

    fn line(&self) -> String {
        match self.lines.recv_timeout(TIMEOUT) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                let counters = statistics(&self.broker_dir).map(|s| s.map(|s| s.counters));
                panic!("the process says nothing; the broker has counted {counters:?}")
            }
            Err(RecvTimeoutError::Disconnected) => panic!("the process has ended"),
        }
    }

    /// Waits for a line that starts so; passes over events. Returns the rest of it.
    fn expect(&self, start: &str) -> String {
        loop {
            let line = self.line();
            if let Some(rest) = line.strip_prefix(start) {
                return rest.trim().to_owned();
            }
            let passing = ["event", "ended"].iter().any(|p| line.starts_with(p));
            assert!(passing, "waiting for {start}: {line}");
        }
    }

    fn ask(&mut self, text: &str, answer: &str) -> String {
        self.say(text);
        self.expect(answer)
    }

    fn rounds(&mut self) -> u64 {
        self.ask("rounds", "rounds").parse().unwrap()
    }

    /// Waits until so many more rounds are done.
    fn more_rounds(&mut self, n: u64) {
        let start = self.rounds();
        let deadline = Instant::now() + TIMEOUT;
        while self.rounds() < start + n {
            assert!(Instant::now() < deadline, "no more rounds");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it end in order.
    fn quit(mut self) {
        self.stdin = None;
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process with the address open.
fn open(place: &Place, addr: &str) -> Process {
    let process = place.start(addr, false);
    process.expect("open");
    process
}

/// A server and a client of it, connected.
fn pair(place: &Place, addr: &str, port: u16) -> (Process, Process) {
    let (mut server, mut client) = (open(place, addr), open(place, addr));
    server.ask(&format!("listen {port}"), "listening");
    client.ask(&format!("connect {addr} {port}"), "event Established");
    (server, client)
}

#[test]
fn sixty_four_processes_go_on_when_the_broker_is_killed_and_then_any_of_them() {
    const PAIRS: u16 = 32;
    const ADDR: &str = "127.45.0.1";
    let place = Place::new();
    // All at once: many find no broker.
    let mut all: Vec<Process> = (0..2 * PAIRS).map(|_| place.start(ADDR, false)).collect();
    for p in &all {
        p.expect("open");
    }
    let first = place.until("64 members", |s| s.processes.len() == usize::from(2 * PAIRS));
    let slots: std::collections::HashSet<u8> = first.processes.iter().map(|p| p.place.slot).collect();
    assert_eq!(slots.len(), usize::from(2 * PAIRS), "each has a slot of its own");
    let mut clients = all.split_off(PAIRS.into());
    for (i, (server, client)) in all.iter_mut().zip(&mut clients).enumerate() {
        let port = 7000 + i;
        server.ask(&format!("listen {port}"), "listening");
        client.ask(&format!("connect {ADDR} {port}"), "event Established");
    }
    for client in &mut clients {
        client.more_rounds(3);
    }
    kill(first.pid);
    for client in &mut clients {
        client.more_rounds(3);
    }
    let second = place.until("64 members of the next broker", |s| {
        // They have told it of their connections as well, which comes after joining.
        s.pid != first.pid && s.processes.iter().filter(|p| p.connections == 1).count() == usize::from(2 * PAIRS)
    });
    let places = |s: &Statistics| -> Vec<_> { s.processes.iter().map(|p| (p.pid, p.place)).collect() };
    assert_eq!(places(&first), places(&second), "everybody has its place again");
    // A server is killed: its client is told by the new broker, which knows the connection from its members.
    let victim = all.swap_remove(5);
    let widow = clients.swap_remove(5);
    victim.kill();
    widow.expect("event Disconnected");
    widow.quit();
    // Others leave in order, wherever their sockets are in the group.
    for index in [0, 11, 20] {
        all.swap_remove(index).quit();
        let client = clients.swap_remove(index);
        client.expect("event Disconnected");
        client.quit();
    }
    for client in &mut clients {
        client.more_rounds(3);
    }
    // New connections are made by the new broker.
    let (server, mut client) = pair(&place, ADDR, 6999);
    client.more_rounds(3);
    for p in all.into_iter().chain(clients).chain([server, client]) {
        p.quit();
    }
    place.until_gone();
}

#[test]
fn the_peer_of_a_killed_process_is_told_and_its_numbers_rest() {
    const ADDR: &str = "127.45.0.2";
    let place = Place::new();
    let (server, mut client) = pair(&place, ADDR, 7000);
    client.more_rounds(2);
    let pid = server.pid();
    let before = place.statistics();
    let old = before.processes.iter().find(|p| p.pid == pid).unwrap().place;
    server.kill();
    client.expect("event Disconnected");
    // The port is free again, the place is not.
    let mut server = place.start(ADDR, false);
    server.expect("open");
    server.ask("listen 7000", "listening");
    let now = place.until("one server less", |s| s.processes.iter().all(|p| p.pid != pid));
    assert!(now.processes.iter().all(|p| p.place != old));
    client.quit();
    server.quit();
    place.until_gone();
}

#[test]
fn the_client_of_a_service_that_nobody_has_is_told_at_once() {
    const ADDR: &str = "127.45.0.3";
    let place = Place::new();
    let mut client = place.start(ADDR, false);
    client.expect("open");
    assert!(
        client
            .ask(&format!("connect {ADDR} 7009"), "event")
            .starts_with("Rejected")
    );
    client.quit();
}

#[test]
fn two_processes_can_not_listen_on_one_port_whatever_happens_to_the_broker() {
    const ADDR: &str = "127.45.0.4";
    let place = Place::new();
    let mut one = place.start(ADDR, false);
    one.expect("open");
    one.ask("listen 7000", "listening");
    let mut two = place.start(ADDR, false);
    two.expect("open");
    assert!(two.ask("listen 7000", "refused").contains("7000"));
    let broker = place.statistics().pid;
    kill(broker);
    assert!(two.ask("listen 7000", "refused").contains("7000"));
    place.until("another broker", |s| s.pid != broker && s.processes.len() == 2);
    one.quit();
    two.ask("listen 7000", "listening");
    two.quit();
}

#[test]
fn over_ipv6_as_well() {
    let _only = ferroce_loopback::only_one();
    let place = Place::new();
    let (server, mut client) = pair(&place, "::1", 7000);
    client.more_rounds(3);
    server.kill();
    client.expect("event Disconnected");
    client.quit();
}

#[test]
fn a_device_that_would_have_the_port_alone_joins_and_one_that_has_it_is_named() {
    const ADDR: &str = "127.45.0.5";
    let place = Place::new();
    let (server, client) = pair(&place, ADDR, 7000);
    let mut third = place.start(ADDR, true);
    third.expect("open");
    third.ask(&format!("connect {ADDR} 7000"), "event Established");
    third.more_rounds(2);
    assert_eq!(place.statistics().processes.len(), 3);
    for p in [third, client, server] {
        p.quit();
    }
    place.until_gone();
    // The other way round there is nothing to join.
    let alone = place.start(ADDR, true);
    alone.expect("open");
    let refused = place.start(ADDR, false).expect("failed");
    assert!(refused.contains("4791") && refused.contains("taken"), "{refused}");
    alone.quit();
}

#[test]
fn many_starters_make_one_broker() {
    let place = Place::new();
    let members: Vec<Membership> = thread::scope(|s| {
        let all: Vec<_> = (0..24).map(|_| s.spawn(|| place.join())).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(place.statistics().processes.len(), 24);
    drop(members);
    place.until_gone();
    // And after it has gone, another.
    drop(place.join());
}

#[test]
fn ports_are_kept_for_all_processes() {
    const TCP: u64 = 0x0106_0000;
    let place = Place::new();
    let (a, b) = (place.join(), place.join());
    let any: IpAddr = [127, 45, 0, 6].into();
    let port = a.bind(TCP, Some(any), false).unwrap();
    assert!(port & 0xffff >= 32_768);
    let taken = b.bind(port, None, false).unwrap_err();
    assert!(taken.to_string().contains(&(port as u16).to_string()), "{taken}");
    let broker = place.statistics().pid;
    kill(broker);
    assert!(b.bind(port, None, false).is_err(), "the next broker knows it too");
    a.unbind(port, Some(any)).unwrap();
    assert_eq!(b.bind(port, None, false).unwrap(), port);
}

#[test]
fn statistics_can_be_had_however_many_ports_a_process_has() {
    const TCP: u64 = 0x0106_0000;
    let place = Place::new();
    let all: Vec<Membership> = (0..3).map(|_| place.join()).collect();
    for member in &all {
        for _ in 0..1500 {
            member.bind(TCP, None, false).unwrap();
        }
    }
    let shown = place.statistics().processes;
    let ports: Vec<usize> = shown.iter().map(|p| p.bindings.len()).collect();
    assert_eq!(ports, [MAX_SHOWN; 3]);
}

/// More than one record tells.
#[test]
fn a_thousand_ports_outlive_the_broker() {
    const TCP: u64 = 0x0106_0000;
    let place = Place::new();
    let member = place.join();
    let all: Vec<u64> = (0..1500).map(|_| member.bind(TCP, None, false).unwrap()).collect();
    let broker = place.statistics().pid;
    kill(broker);
    let other = place.join();
    for port in [0, 255, 256, 511, 512, 1499].map(|n| all[n]) {
        assert!(other.bind(port, None, false).is_err(), "port {port:#x}");
    }
    assert_ne!(place.statistics().pid, broker);
    member.unbind(all[1499], None).unwrap();
    assert_eq!(other.bind(all[1499], None, false).unwrap(), all[1499]);
}

#[test]
fn an_address_is_free_again_when_its_last_process_is_gone() {
    let place = Place::new();
    let other = place.join();
    other.open("127.45.0.8".parse().unwrap()).unwrap();
    let member = place.join();
    member.open("127.45.0.7".parse().unwrap()).unwrap();
    assert!(member.open("192.0.2.1".parse().unwrap()).is_err());
    drop(member);
    wait_until("the port is free", || {
        std::net::UdpSocket::bind("127.45.0.7:4791").is_ok()
    });
    assert!(std::net::UdpSocket::bind("127.45.0.8:4791").is_err());
}

#[test]
fn a_stale_socket_and_a_stale_lock_are_no_obstacle() {
    let place = Place::new();
    let dir = place.broker_dir();
    fs::create_dir(&dir).unwrap();
    drop(std::os::unix::net::UnixListener::bind(dir.join("broker.sock")).unwrap());
    fs::write(dir.join("broker.lock"), "").unwrap();
    fs::write(dir.join("places.json"), "{").unwrap();
    drop(place.join());
    place.until_gone();
}

/// Two packets of equal size in one send, to two queue pair numbers.
fn send_merged(to: IpAddr, qpns: [u32; 2]) {
    const LEN: usize = 64;
    let mut bytes = vec![];
    for qpn in qpns {
        let mut packet = [0; LEN];
        // RC SEND ONLY; nobody gets as far as its ICRC.
        packet[0] = 0x04;
        packet[2..4].copy_from_slice(&[0xff; 2]);
        packet[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
        bytes.extend(packet);
    }
    let socket = std::net::UdpSocket::bind((to, 0)).unwrap();
    let (level, name) = (libc::SOL_UDP, libc::UDP_SEGMENT);
    let value = LEN as libc::c_int;
    // SAFETY: an integer on the stack, and its size.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of_val(&value) as u32,
        )
    };
    assert_eq!(rc, 0);
    socket.send_to(&bytes, (to, 4791)).unwrap();
}

#[test]
fn a_packet_that_was_merged_behind_another_process_is_handed_over() {
    let place = Place::new();
    let addr: IpAddr = [127, 45, 0, 9].into();
    let open = || Device::open_shared(DeviceConfig::new(addr), &place.how()).unwrap();
    let (one, two) = (open(), open());
    let places = place.statistics().processes;
    let qpn = |i: usize| places[i].place.numbers().qpns().first + 7;
    let qpns = [qpn(0), qpn(1)];
    // Neither has such a queue pair, which it counts; the kernel gives both packets to one of them.
    send_merged(addr, qpns);
    wait_until("both have got theirs", || {
        let (a, b) = (one.stats().port, two.stats().port);
        (a.drop_no_qp, b.drop_no_qp) == (1, 1) && a.handed_over + b.handed_over == 1
    });
    // One behind a packet for the broker as well.
    send_merged(addr, [1, qpns[0]]);
    wait_until("the broker forwards it", || {
        one.stats().port.drop_no_qp + two.stats().port.drop_no_qp == 3
    });
    // And one for the broker behind a member's.
    send_merged(addr, [qpns[1], 1]);
    place.until("the broker has got it", |s| s.counters.get("drop_bad_mad") == Some(&2));
}

fn directory_error(how: &JoinConfig) -> String {
    match join(how) {
        Err(e) => e.to_string(),
        Ok(other) => panic!("{other:?}"),
    }
}

#[test]
fn a_directory_that_others_can_write_or_own_is_refused() {
    let place = Place::new();
    let dir = place.broker_dir();
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(directory_error(&place.how()).contains("chmod"));
    fs::remove_dir(&dir).unwrap();
    fs::write(&dir, "").unwrap();
    assert!(directory_error(&place.how()).contains("not a directory"));
    fs::remove_file(&dir).unwrap();
    std::os::unix::fs::symlink(place.dir.path(), &dir).unwrap();
    assert!(
        directory_error(&place.how()).contains("not a directory"),
        "a link may lead anywhere"
    );
    fs::remove_file(&dir).unwrap();
    let nowhere = JoinConfig {
        dir: place.dir.path().join("a/b"),
        ..place.how()
    };
    assert!(directory_error(&nowhere).contains("FERROCE_BROKER_DIR"));
    if is_root() {
        fs::create_dir(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(65_534), None).unwrap();
        assert!(directory_error(&place.how()).contains("65534"));
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

#[test]
#[ignore = "only root can be two users"]
fn a_broker_of_another_user_is_not_trusted() {
    let place = Place::new();
    let dir = place.broker_dir();
    fs::create_dir(&dir).unwrap();
    std::os::unix::fs::chown(&dir, Some(65_534), None).unwrap();
    fs::set_permissions(place.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let broker = readable_copy(BROKER);
    let mut theirs = Command::new("setpriv")
        .args(["--reuid", "65534", "--clear-groups", "--"])
        .arg(broker.path().join("program"))
        .args(["broker", "--dir"])
        .arg(&dir)
        .env("FERROCE_BROKER_LINGER", "600")
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("their broker listens", || dir.join("broker.sock").exists());
    let text = directory_error(&place.how());
    assert!(text.contains("65534") && text.contains("trust"), "{text}");
    theirs.kill().unwrap();
    theirs.wait().unwrap();
}

/// A program where every user may run it.
fn readable_copy(program: impl AsRef<Path>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    write_program("cp \"$1\" \"$0\"", &dir.path().join("program"), program.as_ref());
    dir
}

/// A broker for all users, as systemd would start it.
fn system_broker(dir: &Path, notify: &Path, kept: Option<OwnedFd>, options: &[&str]) -> Child {
    let count = if kept.is_some() { "1" } else { "0" };
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ exec \"$0\" \"$@\"";
    Command::new("sh")
        .args(["-c", script, BROKER, "broker", "--shared", "--dir"])
        .arg(dir)
        .args(options)
        .env("LISTEN_FDS", count)
        .env("NOTIFY_SOCKET", notify)
        .stdin(kept.map_or_else(Stdio::null, Stdio::from))
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn a_system_broker_serves_other_users_and_gets_its_sockets_back_from_systemd() {
    serves_other_users("127.45.0.10", &[]);
}

/// As where it may not load programs.
#[test]
fn a_system_broker_does_so_too_whose_members_must_trust_each_other() {
    serves_other_users("127.45.0.11", &["--trust-domain"]);
}

fn serves_other_users(addr: &str, options: &[&str]) {
    // Only root can be two users.
    if !is_root() {
        return;
    }
    let place = Place::new();
    fs::set_permissions(place.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (dir, notify) = (place.broker_dir(), place.dir.path().join("notify"));
    let systemd = UnixDatagram::bind(&notify).unwrap();
    let mut broker = system_broker(&dir, &notify, None, options);
    place.until("the broker serves", |_| true);
    let program = readable_copy(std::env::current_exe().unwrap());
    let start = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--clear-groups", "--"]);
        command.arg(program.path().join("program"));
        let process = Process::of(command, &place, addr, false);
        process.expect("open");
        process
    };
    let (mut server, mut client) = (start(), start());
    server.ask("listen 7000", "listening");
    client.ask(&format!("connect {addr} 7000"), "event Established");
    client.more_rounds(2);
    let kept = deposited(&systemd);
    broker.kill().unwrap();
    broker.wait().unwrap();
    client.more_rounds(2);
    let mut broker = system_broker(&dir, &notify, Some(kept), options);
    let now = place.until("both are back", |s| s.processes.len() == 2);
    assert!(now.processes.iter().all(|p| p.uid == 65_534));
    let mut other = start();
    other.ask(&format!("connect {addr} 7000"), "event Established");
    other.more_rounds(2);
    client.more_rounds(2);
    server.kill();
    for client in [client, other] {
        client.expect("event Disconnected");
        client.quit();
    }
    broker.kill().unwrap();
    broker.wait().unwrap();
}

#[test]
fn a_program_that_is_no_broker_is_named() {
    let place = Place::new();
    let how = |program: &str| JoinConfig {
        program: Some(program.into()),
        ..place.how()
    };
    for program in ["/nonexistent/ferroce", "/bin/true"] {
        let text = directory_error(&how(program));
        assert!(text.contains(program), "{text}");
    }
    assert!(statistics(&place.broker_dir()).unwrap().is_none());
    assert!(statistics(Path::new("/nonexistent")).unwrap().is_none());
}

/// A broker that no member can start again.
struct ByHand {
    place: Place,
    broker: Child,
}

impl ByHand {
    /// Started as `wrapper … broker`.
    fn new(wrapper: &[&str]) -> Self {
        let mut place = Place::new();
        place.program = "/bin/false".into();
        let broker = Self::broker(&place, wrapper);
        Self { place, broker }
    }

    fn broker(place: &Place, wrapper: &[&str]) -> Child {
        let words = [wrapper, &[BROKER, "broker", "--dir"]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(place.broker_dir()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        place.until("the broker serves", |_| true);
        child
    }

    fn kill(&mut self) {
        self.broker.kill().unwrap();
        self.broker.wait().unwrap();
        wait_until("it is dead", || {
            matches!(statistics(&self.place.broker_dir()), Ok(None))
        });
    }

    fn start_again(&mut self, wrapper: &[&str]) {
        self.broker = Self::broker(&self.place, wrapper);
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = self.broker.kill();
        let _ = self.broker.wait();
    }
}

#[test]
fn ports_are_given_back_while_there_is_no_broker() {
    const TCP: u64 = 0x0106_0000;
    let mut hand = ByHand::new(&["env"]);
    let member = hand.place.join();
    let (kept, over) = (
        member.bind(TCP, None, false).unwrap(),
        member.bind(TCP, None, false).unwrap(),
    );
    member.listen(over, None).unwrap();
    hand.kill();
    // Were it to wait for a broker, it would fail.
    member.unlisten(over, None).unwrap();
    member.unbind(over, None).unwrap();
    hand.start_again(&["env"]);
    let now = hand.place.until("it is back", |s| {
        s.processes.len() == 1 && !s.processes[0].bindings.is_empty()
    });
    let ports: Vec<u64> = now.processes[0].bindings.iter().map(|b| b.service).collect();
    assert_eq!(ports, [kept]);
    assert_eq!(hand.place.join().bind(over, None, false).unwrap(), over);
}

/// As in a container, or with `hidepid`.
#[test]
#[ignore = "makes a process namespace"]
fn a_process_that_the_broker_can_not_see_gets_its_place_again() {
    const APART: [&str; 5] = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let mut hand = ByHand::new(&APART);
    let member = hand.place.join();
    let port = member.bind(0x0106_0000, None, false).unwrap();
    for _ in 0..2 {
        hand.kill();
        hand.start_again(&APART);
        let now = hand
            .place
            .until("it is back", |s| s.processes.iter().any(|p| !p.bindings.is_empty()));
        let there: Vec<_> = now
            .processes
            .iter()
            .map(|p| (p.pid, p.place, p.bindings[0].service))
            .collect();
        assert_eq!(there, [(0, member.place(), port)]);
    }
}

#[test]
fn who_waited_while_the_broker_had_no_descriptors_is_served_when_it_has() {
    const LIMIT: usize = 40;
    let log = tempfile::NamedTempFile::new().unwrap();
    let script = format!("ulimit -n {LIMIT}; exec \"$0\" \"$@\" 2>{}", log.path().display());
    let hand = ByHand::new(&["sh", "-c", &script]);
    let crowd: Vec<Raw> = (0..LIMIT + 20).map(|_| Raw::at(&hand.place.broker_dir())).collect();
    wait_until("the broker is out of descriptors", || {
        let text = fs::read_to_string(log.path()).unwrap();
        text.lines()
            .any(|l| l.contains("can't be accepted") && l.contains(&format!("os error {}", libc::EMFILE)))
    });
    let waits = Raw::at(&hand.place.broker_dir());
    waits.say(&ToBroker::Request {
        seq: 1,
        request: Request::Statistics,
    });
    drop(crowd);
    assert!(matches!(waits.reply(), Reply::Statistics { .. }));
}
