//! Members of several users at one broker, one of whom is hostile. As root only, who can be several users and load programs.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{IpAddr, UdpSocket},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{fs::PermissionsExt, net::UnixDatagram},
    },
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::raw::{Raw, deposited};
use roce_broker::{
    Isolation, JoinConfig, Statistics, join,
    proto::{Place as Number, Reply, Request, ToBroker},
    statistics,
};

/// Time after which an expected event counts as missing.
const TIMEOUT: Duration = Duration::from_secs(60);
const BROKER: &str = env!("CARGO_BIN_EXE_roce-broker");
/// The address to open, for a member's process.
const ADDR: &str = "TEST_ADDR";
const MARK: &str = "@ ";
/// Two users.
const ONE: &str = "65534";
const OTHER: &str = "65533";
/// Packets of one attempt, each from another port.
const PACKETS: usize = 32;

/// A directory with a broker for all users in it.
struct Place {
    dir: tempfile::TempDir,
    broker: Child,
}

impl Place {
    fn new(wrapper: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let broker = Self::start(&dir, wrapper);
        let this = Self { dir, broker };
        this.wait_for_socket();
        this
    }

    fn start(dir: &tempfile::TempDir, wrapper: &[&str]) -> Child {
        let words = [wrapper, &[BROKER, "broker", "--shared", "--dir"]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(dir.path().join("run"));
        command.env("FERROCE_BROKER_LINGER", "1");
        command.stderr(fs::File::create(dir.path().join("log")).unwrap());
        command.spawn().unwrap()
    }

    fn wait_for_socket(&self) {
        wait_until("the broker listens", || Raw::try_at(&self.broker_dir()).is_ok());
    }

    fn broker_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn how(&self) -> JoinConfig {
        JoinConfig {
            dir: self.broker_dir(),
            program: Some("/bin/false".into()),
            name: "test".into(),
        }
    }

    fn statistics(&self) -> Statistics {
        statistics(&self.broker_dir()).unwrap().expect("a broker")
    }

    fn restart(&mut self) {
        self.broker.kill().unwrap();
        self.broker.wait().unwrap();
        fs::remove_file(self.broker_dir().join("broker.sock")).unwrap();
        self.broker = Self::start(&self.dir, &["env"]);
        self.wait_for_socket();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.broker.kill();
        let _ = self.broker.wait();
        if thread::panicking() {
            eprintln!(
                "the broker's log: {}",
                fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
            );
        }
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A member in a process of another user.
struct Member {
    child: Child,
    stdin: ChildStdin,
    out: BufReader<ChildStdout>,
    number: Number,
}

impl Member {
    fn start(place: &Place, uid: &str, addr: IpAddr) -> Self {
        let program = place.dir.path().join("program");
        if !program.exists() {
            // By another process, as this one's children would have it open for writing.
            let status = Command::new("cp")
                .arg(std::env::current_exe().unwrap())
                .arg(&program)
                .status();
            assert!(status.unwrap().success());
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut child = Command::new("setpriv")
            .args(["--reuid", uid, "--clear-groups", "--"])
            .arg(program)
            .args(["isolation::member", "--exact", "--ignored", "--nocapture"])
            .env("FERROCE_BROKER", "/bin/false")
            .env("FERROCE_BROKER_DIR", place.broker_dir())
            .env(ADDR, addr.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut this = Self {
            stdin: child.stdin.take().unwrap(),
            out: BufReader::new(child.stdout.take().unwrap()),
            child,
            number: Number { slot: 0, generation: 0 },
        };
        let given = this.line();
        let numbers: Vec<u8> = given.split(' ').map(|n| n.parse().unwrap()).collect();
        this.number = Number {
            slot: numbers[0],
            generation: numbers[1],
        };
        this
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.out.read_line(&mut line).unwrap() > 0, "the process has ended");
            if let Some(at) = line.find(MARK) {
                return line[at + MARK.len()..].trim().to_owned();
            }
        }
    }

    fn ask(&mut self, text: &str) -> String {
        writeln!(self.stdin, "{text}").unwrap();
        self.line()
    }

    /// How many packets its socket has received since the last time.
    fn received(&mut self) -> usize {
        self.ask("read").parse().unwrap()
    }

    /// The same, once so many have come: a busy machine delivers later.
    fn receives(&mut self, count: usize) -> usize {
        let mut received = 0;
        wait_until("the packets come", || {
            received += self.received();
            received >= count
        });
        received
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn option(socket: BorrowedFd<'_>, name: i32, value: &[u8]) -> i32 {
    // SAFETY: the value lives for the call, and its length is passed.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            value.as_ptr().cast(),
            value.len() as u32,
        )
    };
    if rc == 0 {
        0
    } else {
        std::io::Error::last_os_error().raw_os_error().unwrap()
    }
}

/// A classic program that returns a constant, as an option.
fn returns(value: u32, option: impl FnOnce(&[u8]) -> i32) -> i32 {
    let mut code = [libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: value,
    }];
    let program = libc::sock_fprog {
        len: 1,
        filter: code.as_mut_ptr(),
    };
    // SAFETY: plain numbers and a pointer, without gaps that matter to who reads them as bytes.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const program).cast::<u8>(), size_of_val(&program)) };
    option(bytes)
}

/// Connects a socket, or with nowhere to connect to disconnects it.
fn connect(socket: BorrowedFd<'_>, to: Option<std::net::SocketAddr>) -> i32 {
    let socket = UdpSocket::from(socket.try_clone_to_owned().unwrap());
    let result = match to {
        Some(to) => socket.connect(to),
        None => {
            let unspecified = [0u8; 16];
            // SAFETY: an address of AF_UNSPEC, which is zero, and its length.
            match unsafe { libc::connect(socket.as_raw_fd(), unspecified.as_ptr().cast(), 16) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        }
    };
    result.err().map_or(0, |e| e.raw_os_error().unwrap())
}

/// Reads all that waits.
fn drain(socket: BorrowedFd<'_>) -> usize {
    let socket = UdpSocket::from(socket.try_clone_to_owned().unwrap());
    socket.set_nonblocking(true).unwrap();
    std::iter::from_fn(|| socket.recv(&mut [0; 64]).ok()).count()
}

#[test]
#[ignore = "a process that the other tests start"]
fn member() {
    let Ok(addr) = std::env::var(ADDR) else { return };
    let mut membership = Some(join(&JoinConfig::from_env().unwrap()).unwrap());
    let number = membership.as_ref().unwrap().place();
    let opened = membership.as_ref().unwrap().open(addr.parse().unwrap()).unwrap();
    let socket: OwnedFd = opened.receivers[0].try_clone().unwrap();
    let socket = socket.as_fd();
    println!("{MARK}{} {}", number.slot, number.generation);
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let (attach, own) = (libc::SO_ATTACH_REUSEPORT_CBPF, libc::SO_ATTACH_FILTER);
        // Errors are numbers; 0 is none.
        let answer = match words.as_slice() {
            ["read"] => drain(socket) as i32,
            ["steer", index] => returns(index.parse().unwrap(), |p| option(socket, attach, p)),
            ["filter"] => returns(u32::MAX, |p| option(socket, own, p)),
            ["no-filter"] => option(socket, libc::SO_DETACH_FILTER, &[0; 4]),
            ["unlock"] => option(socket, libc::SO_LOCK_FILTER, &[0; 4]),
            ["detach"] => option(socket, libc::SO_DETACH_REUSEPORT_BPF, &[0; 4]),
            ["connect", to] => connect(socket, Some(to.parse().unwrap())),
            ["disconnect"] => connect(socket, None),
            ["leave"] => {
                membership = None;
                0
            }
            other => panic!("{other:?}"),
        };
        println!("{MARK}{answer}");
    }
    drop(membership);
}

/// Sends packets to a member's queue pairs, from as many ports.
fn send(addr: IpAddr, to: Number) {
    let mut packet = [0; 64];
    packet[5..8].copy_from_slice(&(to.numbers().qpns().first + 7).to_be_bytes()[1..]);
    for _ in 0..PACKETS {
        let socket = UdpSocket::bind((addr, 0)).unwrap();
        socket.send_to(&packet, (addr, 4791)).unwrap();
    }
}

/// Returns the packets that two members receive of those sent to one of them, at once.
fn delivered(addr: IpAddr, to: &mut Member, other: &mut Member) -> (usize, usize) {
    to.received();
    other.received();
    send(addr, to.number);
    (to.received(), other.received())
}

const ALL: (usize, usize) = (PACKETS, 0);

/// The member receives all that is sent to it, and the other nothing.
fn all_delivered(addr: IpAddr, to: &mut Member, other: &mut Member, what: &str) {
    to.received();
    other.received();
    send(addr, to.number);
    assert_eq!((to.receives(PACKETS), other.received()), ALL, "{what}");
}

#[test]
#[ignore = "needs root"]
fn a_member_can_not_receive_what_is_anothers() {
    let addr: IpAddr = [127, 45, 3, 1].into();
    let place = Place::new(&["env"]);
    let (mut victim, mut thief) = (Member::start(&place, ONE, addr), Member::start(&place, OTHER, addr));
    all_delivered(addr, &mut victim, &mut thief, "at first");
    for index in 0..4 {
        let refused = thief.ask(&format!("steer {index}"));
        let what = format!("by steering to {index}: {refused}");
        all_delivered(addr, &mut victim, &mut thief, &what);
    }
    for attack in ["filter", "no-filter", "unlock"] {
        assert_eq!(thief.ask(attack), libc::EPERM.to_string());
        all_delivered(addr, &mut victim, &mut thief, attack);
    }
    // The kernel lets anybody detach the program. Then packets go anywhere, until the broker has attached it again, but none
    // is received that is another's.
    assert_eq!(thief.ask("detach"), "0");
    wait_until("the program is back", || {
        let (got, stolen) = delivered(addr, &mut victim, &mut thief);
        assert_eq!(stolen, 0);
        got == PACKETS
    });
    // So it is with a sender's packets to whoever has connected its socket to that.
    let sender = UdpSocket::bind((addr, 0)).unwrap();
    let at = sender.local_addr().unwrap();
    for attack in [format!("connect {at}"), "disconnect".to_owned(), "detach".to_owned()] {
        thief.ask(&attack);
        let mut packet = [0; 64];
        packet[5..8].copy_from_slice(&(victim.number.numbers().qpns().first).to_be_bytes()[1..]);
        for _ in 0..PACKETS {
            sender.send_to(&packet, (addr, 4791)).unwrap();
        }
        assert_eq!(thief.received(), 0, "{attack}");
        assert_eq!(delivered(addr, &mut victim, &mut thief).1, 0, "{attack}");
    }
    // Nor what is for QP1.
    let mut to_qp1 = [0; 64];
    to_qp1[7] = 1;
    sender.send_to(&to_qp1, (addr, 4791)).unwrap();
    assert_eq!(thief.received(), 0);
    assert_eq!(place.statistics().isolation, Isolation::Isolated);
}

/// Delivery depends on chance: packets that go to the socket of the member that did it tell nobody.
#[test]
#[ignore = "needs root"]
fn a_member_that_detaches_the_program_stops_others_for_a_moment() {
    let addr: IpAddr = [127, 45, 3, 8].into();
    let place = Place::new(&["env"]);
    let (mut victim, mut thief) = (Member::start(&place, ONE, addr), Member::start(&place, OTHER, addr));
    let mut packet = [0; 64];
    packet[5..8].copy_from_slice(&victim.number.numbers().qpns().first.to_be_bytes()[1..]);
    let (mut stopped, mut longest) = (0, Duration::ZERO);
    // The kernel gives the packets of a sender to one socket then, by its port.
    for _ in 0..16 {
        let sender = UdpSocket::bind((addr, 0)).unwrap();
        let mut reaches = || {
            sender.send_to(&packet, (addr, 4791)).unwrap();
            victim.received() > 0
        };
        // Its packets may reach the victim without the program, too.
        wait_until("the program is there to be detached", || thief.ask("detach") == "0");
        let since = Instant::now();
        stopped += usize::from(!reaches());
        wait_until("the victim receives again", &mut reaches);
        longest = longest.max(since.elapsed());
    }
    eprintln!("{stopped} of 16 senders were stopped, for {longest:?} at most");
    assert!(stopped > 0);
}

#[test]
#[ignore = "needs root"]
fn a_former_member_that_keeps_its_socket_receives_nothing_of_the_next_owners() {
    let addr: IpAddr = [127, 45, 3, 2].into();
    let place = Place::new(&["env"]);
    let mut former = Member::start(&place, ONE, addr);
    assert_eq!(former.ask("leave"), "0");
    wait_until("it has left", || place.statistics().processes.is_empty());
    // Nor what comes late for itself.
    former.received();
    send(addr, former.number);
    assert_eq!(former.received(), 0);
    // The slot's next owner.
    let next = (0..200).find_map(|_| {
        let member = join(&place.how()).unwrap();
        (member.place().slot == former.number.slot).then_some(member)
    });
    let next = next.unwrap();
    let sockets = next.open(addr).unwrap();
    assert_ne!(next.place(), former.number);
    for attack in ["read", "steer 0", "detach", "disconnect"] {
        former.ask(attack);
        wait_until("the next owner receives", || {
            former.received();
            send(addr, next.place());
            let got = drain(sockets.receivers[0].as_fd());
            assert_eq!(former.received(), 0, "{attack}");
            got == PACKETS
        });
    }
    // It keeps nobody from the address either, when that was closed meanwhile.
    drop((next, sockets));
    wait_until("the address is closed", || place.statistics().addrs.is_empty());
    let mut new = Member::start(&place, OTHER, addr);
    all_delivered(addr, &mut new, &mut former, "a new member");
    let log = fs::read_to_string(place.dir.path().join("log")).unwrap();
    assert!(!log.contains("can't be emptied"), "{log}");
}

#[test]
#[ignore = "needs root"]
fn members_get_their_packets_again_when_the_broker_is_killed_and_nobody_kept_the_array() {
    let addr: IpAddr = [127, 45, 3, 3].into();
    let mut place = Place::new(&["env"]);
    let (mut one, mut other) = (Member::start(&place, ONE, addr), Member::start(&place, OTHER, addr));
    for _ in 0..3 {
        place.restart();
        wait_until("both are back", || {
            assert_eq!(delivered(addr, &mut one, &mut other).1, 0);
            place.statistics().processes.len() == 2
        });
        wait_until("both have their sockets", || {
            delivered(addr, &mut one, &mut other) == ALL && delivered(addr, &mut other, &mut one) == ALL
        });
    }
    assert_eq!(place.statistics().isolation, Isolation::Isolated);
}

#[test]
#[ignore = "needs root"]
fn no_packet_is_lost_while_a_broker_restarts_whose_array_systemd_keeps() {
    let addr: IpAddr = [127, 45, 3, 5].into();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let notify = UnixDatagram::bind(&path).unwrap();
    let socket = format!("NOTIFY_SOCKET={}", path.display());
    let mut place = Place::new(&["env", &socket]);
    let mut member = Member::start(&place, ONE, addr);
    let kept = deposited(&notify);
    assert_eq!(member.received(), 0);
    let try_some = |member: &mut Member| {
        send(addr, member.number);
        assert_eq!(member.receives(PACKETS), PACKETS);
    };
    try_some(&mut member);
    place.broker.kill().unwrap();
    place.broker.wait().unwrap();
    try_some(&mut member);
    // As systemd starts it again, with what it has kept.
    let script = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" \"$@\"";
    fs::remove_file(place.broker_dir().join("broker.sock")).unwrap();
    place.broker = Command::new("sh")
        .args(["-c", script, BROKER, "broker", "--shared", "--dir"])
        .arg(place.broker_dir())
        .env("NOTIFY_SOCKET", &path)
        .stdin(Stdio::from(kept))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the member is back", || {
        try_some(&mut member);
        matches!(statistics(&place.broker_dir()), Ok(Some(s)) if s.processes.len() == 1 && !s.addrs.is_empty())
    });
    for _ in 0..10 {
        try_some(&mut member);
    }
}

fn socket(given: &std::sync::Arc<std::os::fd::OwnedFd>) -> UdpSocket {
    let socket = UdpSocket::from(given.try_clone().unwrap());
    socket.set_nonblocking(true).unwrap();
    socket
}

/// In a network namespace, as all addresses are everybody's.
#[test]
#[ignore = "needs root"]
fn all_addresses_are_those_that_others_have_and_the_rest() {
    // SAFETY: no memory is passed; it is this thread, and what it starts, that leaves the namespace.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(up.unwrap().success());
    let place = Place::new(&["env"]);
    let (one, other, late) = (
        join(&place.how()).unwrap(),
        join(&place.how()).unwrap(),
        join(&place.how()).unwrap(),
    );
    let single = |last: u8| IpAddr::from([127, 0, 0, last]);
    for last in 1..9 {
        one.open(single(last)).unwrap();
    }
    let all: IpAddr = std::net::Ipv6Addr::UNSPECIFIED.into();
    // A socket of each single address, and those of both IP versions.
    let sockets: Vec<UdpSocket> = other.open(all).unwrap().receivers.iter().map(socket).collect();
    assert_eq!(sockets.len(), 8 + 2);
    // What has no socket of its own by then is all addresses', for whoever asks and however often.
    let open = |last| late.open(single(last)).unwrap().receivers;
    assert_eq!([open(8).len(), open(9).len(), open(10).len()], [1; 3]);
    assert_eq!(place.statistics().addrs.len(), 8 + 2);
    // A packet to a queue pair of a member, whichever address it comes to.
    let sender = UdpSocket::bind((single(1), 0)).unwrap();
    let mut bytes = [0; 24];
    bytes[5..8].copy_from_slice(&other.numbers().qpns().first.to_be_bytes()[1..]);
    for last in 1..12 {
        bytes[23] = last;
        sender.send_to(&bytes, (single(last), 4791)).unwrap();
    }
    let mut seen = std::collections::BTreeSet::new();
    wait_until("all have come", || {
        for socket in &sockets {
            let mut got = [0; 64];
            while let Ok(len) = socket.recv(&mut got) {
                seen.insert(got[len - 1]);
            }
        }
        seen.len() == 11
    });
    // They last as long as somebody has them all.
    drop((one, late));
    assert_eq!(other.open(single(20)).unwrap().receivers.len(), 1);
    assert_eq!(place.statistics().addrs.len(), 8 + 2);
}

#[test]
#[ignore = "needs root"]
fn a_run_with_one_address_leaves_nothing_to_who_takes_all_when_it_is_over() {
    // SAFETY: as above.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(up.unwrap().success());
    let place = Place::new(&["env"]);
    let (one, other) = (join(&place.how()).unwrap(), join(&place.how()).unwrap());
    for last in 1..9 {
        one.open([127, 0, 0, last].into()).unwrap();
    }
    drop(one);
    wait_until("it is over", || place.statistics().processes.len() == 1);
    let all: IpAddr = std::net::Ipv6Addr::UNSPECIFIED.into();
    assert_eq!(other.open(all).unwrap().receivers.len(), 2, "one for each IP version");
    assert_eq!(place.statistics().addrs.len(), 2, "and no other");
}

#[test]
#[ignore = "needs root"]
fn without_the_right_to_load_programs_the_broker_says_that_members_must_trust_each_other() {
    let place = Place::new(&[
        "setpriv",
        "--bounding-set",
        "-bpf,-sys_admin",
        "--inh-caps",
        "-bpf,-sys_admin",
        "--",
    ]);
    assert_eq!(place.statistics().isolation, Isolation::TrustDomain);
    let log = fs::read_to_string(place.dir.path().join("log")).unwrap();
    assert!(
        log.contains("can read the packets of all others") && log.contains("CAP_BPF"),
        "{log}"
    );
}

/// Rights of the unit, and no others.
#[test]
#[ignore = "needs root"]
fn the_right_to_load_programs_is_enough_to_isolate() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let program = dir.path().join("broker");
    assert!(Command::new("cp").arg(BROKER).arg(&program).status().unwrap().success());
    let run = dir.path().join("run");
    let broker = Command::new("setpriv")
        .args([
            "--reuid",
            "64999",
            "--clear-groups",
            "--inh-caps",
            "-all,+bpf",
            "--ambient-caps",
            "-all,+bpf",
        ])
        .args(["--bounding-set", "-all,+bpf", "--no-new-privs", "--"])
        .arg(&program)
        .args(["broker", "--shared", "--dir"])
        .arg(&run)
        .stderr(Stdio::null())
        .spawn();
    let place = Place {
        dir,
        broker: broker.unwrap(),
    };
    place.wait_for_socket();
    let asks = Raw::at(&run);
    asks.say(&ToBroker::Request {
        seq: 1,
        request: Request::Statistics,
    });
    match asks.reply() {
        Reply::Statistics { part, .. } => assert_eq!(part.isolation, Isolation::Isolated),
        other => panic!("{other:?}"),
    }
    // And to open an address.
    let own = asks.hello(None);
    asks.say(&ToBroker::Request {
        seq: 2,
        request: Request::Open {
            addr: [127, 45, 3, 4].into(),
            again: false,
        },
    });
    assert!(matches!(asks.reply(), Reply::Opened { vault: false, .. }), "{own:?}");
    fs::write(place.dir.path().join("log"), "").unwrap();
}
