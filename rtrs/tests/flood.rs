//! Connection requests that nobody stands behind: they get little, keep nobody out, and a client that has lost a message of
//! its handshake still gets in. Measures the process, so its tests run one at a time.

mod support;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use roce_port::CmEventKind;
use rtrs::{
    proto::{ConnReq, InfoReq},
    server::ServerConfig,
};
use support::{
    raw::Client,
    stranger::{REQ, Stranger},
    *,
};
use zerocopy::IntoBytes;

static ONE: Mutex<()> = Mutex::new(());

/// No other test runs, and the servers of those before are gone.
fn alone() -> MutexGuard<'static, ()> {
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    eventually("the end of the servers before", || held().threads == 0);
    one
}

/// A connection request of a new session.
fn hello() -> Vec<u8> {
    ConnReq::new(0, 2, 1, uuid(), uuid(), true).as_bytes().to_vec()
}

/// What the process has.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Of hosts: the harness has threads as well, which come and go.
    threads: usize,
    descriptors: usize,
    /// Address space that may be written to, bytes: chunks are in it from the moment when they are allocated, what the
    /// allocator sets aside for threads is not.
    bytes: usize,
}

fn held() -> Held {
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let is_server = |task: std::fs::DirEntry| {
        // Gone meanwhile: none.
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        name.starts_with("rig")
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let writable = maps.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let address = |hex| usize::from_str_radix(hex, 16).unwrap();
        rest.starts_with("rw-p").then(|| address(end) - address(start))
    });
    Held {
        threads: tasks.flatten().map(is_server).filter(|is| *is).count(),
        descriptors: count("/proc/self/fd"),
        bytes: writable.sum(),
    }
}

/// Loopback addresses of nobody.
fn strangers(count: usize) -> Vec<IpAddr> {
    let mut all = Vec::new();
    while all.len() < count {
        let n = (count - all.len()).min(250) as u8;
        let first = ferroce_loopback::addresses(n).to_bits();
        all.extend((0..u32::from(n)).map(|i| IpAddr::V4(Ipv4Addr::from_bits(first + i))));
    }
    all
}

/// Sends a request in the name of each address, and waits until the server has dealt with all but few.
fn forge(bed: &Bed, addresses: &[IpAddr]) {
    let dealt = || {
        let c = bed.server.counters();
        c.connections_accepted + c.connections_refused
    };
    for some in addresses.chunks(16) {
        let before = dealt();
        for addr in some {
            let mut s = Stranger::forger(*addr);
            s.connect(bed.path.dst, hello());
            s.work();
            s.release();
        }
        let until = Instant::now() + Duration::from_secs(2);
        while dealt() < before + some.len() as u64 && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The kernel's sizes: sessions of 64 MiB with 512 regions.
fn usual() -> ServerConfig {
    ServerConfig {
        heartbeat: config().heartbeat,
        ..ServerConfig::default()
    }
}

#[test]
fn sixteen_requests_in_a_clients_name_do_not_lock_it_out() {
    let _one = alone();
    let bed = Bed::new(usual());
    let client = bed.path.src.unwrap();
    forge(&bed, &[client; 16]);
    let session = bed.open("s1", 1);
    write(&session, 0, b"here").result.unwrap();
}

#[test]
fn strangers_get_little_and_lock_nobody_out() {
    let _one = alone();
    let bed = Bed::new(usual());
    bed.client();
    // A thread names itself when it first runs: two hosts, each with a loop and a helper.
    eventually("the hosts", || held().threads == 4);
    let before = held();
    for count in [64, 512, 1536] {
        forge(&bed, &strangers(count));
        let after = held();
        println!("{count} strangers: {before:?}, then {after:?}");
        assert!(after.threads <= before.threads, "{count}: {after:?}");
        assert!(after.descriptors <= before.descriptors + 256 + 32, "{count}: {after:?}");
        // Less than the chunks of one session.
        assert!(after.bytes < before.bytes + (64 << 20), "{count}: {after:?}");
        assert!(bed.server.sessions().is_empty());
        let session = bed.open("s1", 2);
        write(&session, 0, b"here").result.unwrap();
        session.close();
        let over = || bed.server.sessions().is_empty() && held().threads <= before.threads;
        eventually("its end", over);
    }
    assert!(bed.server.counters().half_open_gave_way > 1000);
}

#[test]
fn a_client_gets_in_while_strangers_come() {
    let _one = alone();
    let bed = Bed::new(usual());
    let mut flood: Vec<_> = strangers(300).into_iter().map(Stranger::forger).collect();
    let over = AtomicBool::new(false);
    /// Also when the test fails.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    thread::scope(|scope| {
        let _end = End(&over);
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for some in flood.chunks_mut(10) {
                    for s in some {
                        s.connect(bed.path.dst, hello());
                        s.work();
                        s.release();
                    }
                    // A thousand in a second: ten times what stopped a server before.
                    thread::sleep(Duration::from_millis(10));
                }
            }
        });
        eventually("the flood", || bed.server.counters().half_open_gave_way > 100);
        for i in 0..5 {
            let session = bed.open(&format!("s{i}"), 2);
            write(&session, 0, b"here").result.unwrap();
        }
    });
    println!("{:?}", bed.server.counters());
}

/// Connection 1 asked for while the server does not know yet that connection 0 stands: it gets nothing, and waits.
#[test]
fn a_lost_message_of_the_handshake_is_made_up_for() {
    let _one = alone();
    let bed = Bed::new(config());
    let mut s = Stranger::new(strangers(1)[0]);
    let (session, path) = (uuid(), uuid());
    let request = |cid| ConnReq::new(cid, 2, 1, path, session, true).as_bytes().to_vec();
    let (zero, service) = s.connect(bed.path.dst, request(0));
    s.work();
    s.release_only(REQ);
    let deadline = Instant::now() + PATIENCE;
    while !matches!(s.event(), Some(CmEventKind::Established { conn, .. }) if conn == zero) {
        assert!(Instant::now() < deadline, "no answer");
        s.work();
    }
    // Its RTU is not sent; so to the server it may be anybody.
    let before = held();
    let (one, _) = s.connect(bed.path.dst, request(1));
    s.work();
    s.release_only(REQ);
    eventually("the request", || bed.server.counters().requests_held == 1);
    assert!(bed.server.sessions().is_empty());
    assert_eq!(
        (held().threads, held().descriptors),
        (before.threads, before.descriptors)
    );
    assert!(s.event().is_none());
    // The server repeats its answer; the RTU is repeated for it, or comes late.
    s.until("connection 1", |s| {
        s.event()
            .filter(|e| matches!(e, CmEventKind::Established { conn, .. } if *conn == one))
    });
    let (out, back) = (s.region(4096), s.region(4096));
    s.receive(service, &back);
    s.send(service, &out, InfoReq::new("late").unwrap().as_bytes());
    s.until("the session", |_| (bed.disk.opened.lock().len() == 1).then_some(()));
}

/// A handshake has one deadline, however many connections it makes on the way.
#[test]
fn a_slow_handshake_ends() {
    let _one = alone();
    let bed = Bed::new(ServerConfig {
        handshake_timeout: Duration::from_secs(2),
        ..config()
    });
    let mut c = Client::new(bed.stranger(), bed.path.src.unwrap(), bed.path.dst);
    let mut made = 0;
    while made < 60 && c.connect(c.request(made, 60)).is_ok() {
        made += 1;
        thread::sleep(Duration::from_millis(200));
    }
    assert!((2..60).contains(&made), "{made} connections");
    eventually("its end", || bed.server.sessions().is_empty());
    assert_eq!(bed.server.counters().handshakes_lost, 1);
}

/// A request that names the session and the path of another, from elsewhere or from the same address, changes nothing.
#[test]
fn a_request_with_anothers_uuids_changes_nothing() {
    let _one = alone();
    let bed = Bed::new(config());
    let mut c = Client::new(bed.stranger(), bed.path.src.unwrap(), bed.path.dst);
    let forge = |c: &Client, from: IpAddr, cid| {
        let mut s = Stranger::forger(from);
        s.connect(bed.path.dst, c.request(cid, 3));
        s.work();
        s.release();
    };
    let elsewhere = strangers(1)[0];
    let dealt = |n: u64| {
        eventually("the forged request", || {
            let c = bed.server.counters();
            c.connections_accepted + c.connections_refused >= n
        });
    };
    // Before it comes, while it shakes hands, and when it is up.
    forge(&c, elsewhere, 0);
    dealt(1);
    c.connect(c.request(0, 3)).unwrap();
    forge(&c, elsewhere, 1);
    forge(&c, bed.path.src.unwrap(), 0);
    dealt(3);
    c.connect(c.request(1, 3)).unwrap();
    c.connect(c.request(2, 3)).unwrap();
    assert!(c.information(InfoReq::new("mine").unwrap().as_bytes()));
    for cid in 0..3 {
        forge(&c, bed.path.src.unwrap(), cid);
    }
    dealt(8);
    let SocketAddr::V4(_) = bed.server.sessions()[0].peer else {
        panic!("an IPv4 session")
    };
    assert_eq!(bed.server.sessions().len(), 1);
    let header = Ask::Count.header(0);
    let message = rtrs::proto::RdmaWrite::new(header.len() as u16);
    let bytes = [&header[..], message.as_bytes()].concat();
    c.io(1, 0, 0, &bytes, header.len() as u32);
    assert!(c.end.next(&c.cons[1].qp).is_some(), "an answer");
}
