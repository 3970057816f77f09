//! Connection requests without a client behind them: they get little, and keep nobody out. Measures the process, so its tests run
//! one at a time.

mod support;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use roce::{ConnParams, QpCaps};
use roce_port::{Port, PortConfig, QpInit, TxBatch, TxConfig};
use roce_qp::CompletionQueue;
use roce_verbs::mem::{MemoryTable, PdHandle};
use roce_verbs::{Mtu, QpType};
use rtrs::{
    proto::{ConnReq, Uuid},
    server::ServerConfig,
};
use support::*;
use zerocopy::IntoBytes;

static ONE: Mutex<()> = Mutex::new(());

/// No other test runs, and the servers of those before are gone.
fn alone() -> MutexGuard<'static, ()> {
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    eventually("the end of the servers before", || held().threads == 0);
    one
}

fn uuid() -> Uuid {
    Uuid(rand::random())
}

/// A connection request of a new session.
fn hello() -> Vec<u8> {
    ConnReq::new(0, 2, 1, uuid(), uuid(), true).as_bytes().to_vec()
}

/// A port that sends requests in the name of an address, and hears no answer.
struct Forger {
    socket: UdpSocket,
    port: Port,
    pd: PdHandle,
    cq: Arc<CompletionQueue>,
    batch: TxBatch,
}

impl Forger {
    fn new(addr: IpAddr) -> Self {
        let socket = UdpSocket::bind(SocketAddr::new(addr, 0)).unwrap();
        let seed: [u8; 32] = rand::random();
        let mut config = PortConfig::new(vec![addr], Mtu::B1024, rand::random());
        config.src_ports = vec![socket.local_addr().unwrap().port()];
        let mem = Arc::new(MemoryTable::new(seed, &config.limits));
        Self {
            socket,
            pd: mem.alloc_pd().unwrap(),
            port: Port::new(config, mem, seed),
            cq: CompletionQueue::new(0, 1000, None),
            batch: TxBatch::new(TxConfig {
                gso: false,
                capacity: 0,
                ..TxConfig::default()
            }),
        }
    }

    /// Sends the request of a new session.
    fn send(&mut self, addr: IpAddr, to: SocketAddr) {
        let init = QpInit {
            pd: self.pd,
            qp_type: QpType::Rc,
            send_cq: self.cq.clone(),
            recv_cq: self.cq.clone(),
            caps: QpCaps::default(),
            signal_all: true,
            srq: None,
            xrcd: None,
        };
        let qpn = self.port.create_qp(init).unwrap();
        let params = ConnParams {
            private_data: hello(),
            ..ConnParams::default()
        };
        let now = roce_verbs::Instant::ZERO;
        let from = SocketAddr::new(addr, 0);
        self.port.connect_qp(now, from, to, qpn, params).unwrap();
        loop {
            let more = self.port.poll_transmit(now, &mut self.batch);
            for train in self.batch.trains() {
                for packet in train.packets() {
                    self.socket.send_to(packet, train.remote).unwrap();
                }
            }
            self.batch.clear();
            if !more {
                return;
            }
        }
    }
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
            Forger::new(*addr).send(*addr, bed.path.dst);
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
    assert!(bed.server.counters().half_open_evicted > 1000);
}

#[test]
fn a_client_gets_in_while_strangers_come() {
    let _one = alone();
    let bed = Bed::new(usual());
    let mut flood: Vec<_> = strangers(300)
        .into_iter()
        .map(|addr| (addr, Forger::new(addr)))
        .collect();
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
                    for (addr, forger) in some {
                        forger.send(*addr, bed.path.dst);
                    }
                    // A thousand in a second: ten times what stopped a server before.
                    thread::sleep(Duration::from_millis(10));
                }
            }
        });
        eventually("the flood", || bed.server.counters().half_open_evicted > 100);
        for i in 0..5 {
            let session = bed.open(&format!("s{i}"), 2);
            write(&session, 0, b"here").result.unwrap();
        }
    });
    println!("{:?}", bed.server.counters());
}
