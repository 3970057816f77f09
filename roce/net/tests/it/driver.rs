//! The driver with datapaths that misbehave.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use roce_bth::ROCE_UDP_PORT;
use roce_net::{
    Capabilities, Closed, Datapath, DatapathCounters, Driver, DriverConfig, EventSink, LocalConfig, Received, Sent,
    Tap, Train, UdpConfig, UdpDatapath,
};
use roce_port::{CmEventKind, ListenArgs, Port, PortConfig, QpInit, RxMeta};
use roce_qp::CompletionQueue;
use roce_verbs::mem::{MemoryTable, PdHandle, Region};
use roce_verbs::{
    AccessFlags, AddressVector, AsyncEvent, Completion, Mtu, Payload, Psn, QpAttr, QpCaps, QpState, QpType, Qpn,
    RemoteAddr, SendFlags, SendOp, SendWr, Sge, provider::ConnParams,
};

const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Sink {
    closed: AtomicBool,
    /// Packets sent, as published last, and how often something was published.
    published: AtomicU64,
    publications: AtomicU64,
}

impl EventSink for Sink {
    fn cm_event(&self, _event: CmEventKind) -> bool {
        false
    }

    fn async_event(&self, _event: AsyncEvent) {}

    fn closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    fn publish(&self, port: &Port, _path: &DatapathCounters) {
        self.published.store(port.counters().tx_packets, Ordering::Release);
        self.publications.fetch_add(1, Ordering::AcqRel);
    }
}

/// Loopback with oddities.
struct Odd {
    inner: UdpDatapath,
    oddity: Oddity,
}

enum Oddity {
    None,
    /// Takes one train of each second send, and says that its buffer is full. Counts sends.
    Narrow(u32),
    /// Has packets to hand over, but not yet, as often as it is told.
    Hesitant(Arc<AtomicU32>),
    /// The thread does not run for a while before it looks. When it did, nanoseconds.
    Suspended(Arc<AtomicU64>),
}

impl Datapath for Odd {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn send(&mut self, trains: &mut dyn Iterator<Item = Train<'_>>) -> Sent {
        let Oddity::Narrow(calls) = &mut self.oddity else {
            return self.inner.send(trains);
        };
        *calls += 1;
        if calls.is_multiple_of(2) {
            return self.inner.send(trains);
        }
        let sent = self.inner.send(&mut trains.take(1));
        Sent { blocked: true, ..sent }
    }

    fn receive(&mut self, budget: usize, handle: &mut dyn FnMut(&RxMeta, &[u8])) -> Received {
        match &self.oddity {
            Oddity::Hesitant(times) if times.load(Ordering::Acquire) > 0 => {
                times.fetch_sub(1, Ordering::AcqRel);
                return Received {
                    datagrams: 0,
                    more: true,
                };
            }
            Oddity::Suspended(looked) => {
                thread::sleep(Duration::from_millis(2));
                looked.store(roce_net::now().as_nanos(), Ordering::Release);
            }
            _ => {}
        }
        self.inner.receive(budget, handle)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.inner.descriptors()
    }

    fn counters(&self) -> DatapathCounters {
        self.inner.counters()
    }
}

struct Host {
    driver: Driver,
    addr: IpAddr,
    region: Arc<Region>,
    cq: Arc<CompletionQueue>,
    qpn: Qpn,
    /// Queue pair in RESET.
    spare: Qpn,
    sink: Arc<Sink>,
}

fn host(oddity: Oddity, driver: DriverConfig) -> Host {
    let addr = ferroce_loopback::address().into();
    let udp = UdpDatapath::open(&UdpConfig {
        addr,
        ..UdpConfig::default()
    })
    .unwrap();
    let mut config = PortConfig::new(vec![addr], Mtu::B4096, 7);
    config.src_ports = udp.capabilities().src_ports;
    let mem = Arc::new(MemoryTable::new([3; 32], &config.limits));
    let pd: PdHandle = mem.alloc_pd().unwrap();
    let region = mem.alloc_region(pd, 1 << 20, ALL).unwrap();
    let cq = CompletionQueue::new(1, 64, None);
    let mut port = Port::new(config, mem, [5; 32]);
    let init = || QpInit {
        pd,
        qp_type: QpType::Rc,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        caps: QpCaps::default(),
        signal_all: true,
        srq: None,
        xrcd: None,
    };
    let [qpn, spare] = [(); 2].map(|()| port.create_qp(init()).unwrap());
    let sink = Arc::new(Sink::default());
    let path = Odd { inner: udp, oddity };
    Host {
        driver: Driver::new(port, Box::new(path), sink.clone(), driver).unwrap(),
        addr,
        region,
        cq,
        qpn,
        spare,
        sink,
    }
}

/// Waits until that is so.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "it does not come");
        thread::sleep(Duration::from_millis(1));
    }
}

fn plain() -> Host {
    host(Oddity::None, DriverConfig::default())
}

/// Of a device that nobody but the test advances.
fn still() -> DriverConfig {
    DriverConfig {
        background: false,
        ..DriverConfig::default()
    }
}

impl Host {
    fn raise(&self, peer: &Self) {
        let way = QpAttr {
            access: Some(ALL.difference(AccessFlags::LOCAL_WRITE)),
            rq_psn: Some(Psn::new(9)),
            sq_psn: Some(Psn::new(9)),
            ..QpAttr::to_rts(AddressVector::new(self.addr, peer.addr), Mtu::B4096, peer.qpn)
        };
        for attr in way.steps(QpType::Rc) {
            let done = self.driver.with(|port, now| port.modify_qp(now, self.qpn, &attr));
            done.unwrap().unwrap();
        }
    }

    fn write(&self, peer: &Self) -> Result<(), Closed> {
        self.write_some(peer, 1 << 20)
    }

    fn write_some(&self, peer: &Self, length: u32) -> Result<(), Closed> {
        let sges = [Sge {
            addr: self.region.addr(),
            length,
            lkey: self.region.lkey(),
        }];
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Write(RemoteAddr {
                addr: peer.region.addr(),
                rkey: peer.region.rkey(),
            }),
            flags: SendFlags::empty(),
            payload: Payload::Sges(&sges),
        };
        let posted = self.driver.with(|port, now| port.post_send(now, self.qpn, &[wr]))?;
        posted.unwrap();
        Ok(())
    }

    /// Waits, without making a call, for completions.
    fn completions(&self, n: usize) -> Vec<Completion> {
        let mut out = vec![];
        wait_until(|| {
            self.cq.poll(&mut out, n).unwrap();
            out.len() >= n
        });
        out
    }
}

#[test]
fn a_full_send_buffer_delays_and_loses_nothing() {
    let (a, b) = (host(Oddity::Narrow(0), DriverConfig::default()), plain());
    a.raise(&b);
    b.raise(&a);
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i >> 5) as u8).collect();
    a.region.write(0, &data).unwrap();
    for _ in 0..4 {
        a.write(&b).unwrap();
    }
    assert!(a.completions(4).iter().all(Completion::is_ok));
    let mut seen = vec![0; 1 << 20];
    b.region.read(0, &mut seen).unwrap();
    assert!(seen == data);
}

#[test]
fn counters_are_published_in_pauses_and_while_nothing_happens_they_are_not() {
    let publishes = DriverConfig {
        publishes: true,
        ..DriverConfig::default()
    };
    let (a, b) = (host(Oddity::None, publishes), plain());
    let publications = |host: &Host| host.sink.publications.load(Ordering::Acquire);
    assert_eq!(publications(&a), 1, "a device shows itself");
    a.raise(&b);
    b.raise(&a);
    a.write(&b).unwrap();
    assert!(a.completions(1)[0].is_ok());
    wait_until(|| a.sink.published.load(Ordering::Acquire) == a.driver.counters().0.tx_packets);
    let before = publications(&a);
    thread::sleep(Duration::from_millis(500));
    assert!(publications(&a) <= before + 1, "without a timer of its own");
    assert_eq!(publications(&b), 0);
    a.write_some(&b, 64).unwrap();
    a.driver.close();
    assert_eq!(
        a.sink.published.load(Ordering::Acquire),
        a.driver.counters().0.tx_packets
    );
}

#[test]
fn a_refusal_leaves_in_the_pass_that_brought_the_request() {
    const SERVICE: u16 = 7471;
    let (a, b) = (host(Oddity::None, still()), host(Oddity::None, still()));
    let listening = b
        .driver
        .with(|port, _| port.cm_listen(&ListenArgs::new(None, SERVICE, 1)));
    listening.unwrap().unwrap();
    let (local, remote) = (SocketAddr::new(a.addr, 0), SocketAddr::new(b.addr, SERVICE));
    let asked = a
        .driver
        .with(|port, now| port.connect_qp(now, local, remote, a.qpn, ConnParams::default()));
    asked.unwrap().unwrap();
    let counters = || b.driver.counters().1;
    wait_until(|| {
        b.driver.poll();
        counters().rx_datagrams > 0
    });
    // The sink takes no request.
    assert_eq!(counters().tx_bursts, 1);
}

#[test]
fn a_timer_waits_until_the_packets_that_wait_are_handled() {
    let times = Arc::new(AtomicU32::new(0));
    let a = host(Oddity::Hesitant(times.clone()), still());
    let b = plain();
    a.raise(&b);
    b.raise(&a);
    a.write(&b).unwrap();
    let sent = a.driver.counters().0.tx_packets;
    wait_until(|| b.driver.counters().0.rx_packets >= sent);
    // This process was busy with other things: acknowledgements of all of it wait, and the timer has run out.
    thread::sleep(Duration::from_millis(200));
    times.store(1, Ordering::Release);
    a.driver.poll();
    assert_eq!(times.load(Ordering::Acquire), 0);
    assert_eq!(a.driver.counters().0.transport.retransmits, 0);
    a.driver.poll();
    let counters = a.driver.counters().0;
    assert!(counters.rx_packets > 0);
    assert_eq!((counters.transport.retransmits, counters.transport.timeouts), (0, 0));
}

#[test]
fn what_comes_while_the_thread_is_suspended_is_not_taken_for_older() {
    let looked = Arc::new(AtomicU64::new(0));
    let a = host(Oddity::Suspended(looked.clone()), still());
    let b = plain();
    a.raise(&b);
    b.raise(&a);
    a.write(&b).unwrap();
    let mut done = vec![];
    wait_until(|| {
        a.driver.poll();
        a.cq.poll(&mut done, 1).unwrap();
        !done.is_empty()
    });
    assert!(done[0].timestamp.as_nanos() >= looked.load(Ordering::Acquire));
}

/// One that nobody advances and that has sent a write, and its peer; the acknowledgement has come.
fn acknowledged() -> (Host, Host) {
    let (a, b) = (host(Oddity::None, still()), plain());
    a.raise(&b);
    b.raise(&a);
    a.write_some(&b, 64).unwrap();
    wait_until(|| b.driver.counters().0.tx_packets > 0);
    assert_eq!(a.cq.len(), 0);
    (a, b)
}

#[test]
fn what_came_before_a_forwarded_datagram_is_handled_before_it() {
    let (a, b) = acknowledged();
    let meta = RxMeta::new(a.addr, SocketAddr::new(b.addr, ROCE_UDP_PORT));
    a.driver.inject(&[0; 40], &meta).unwrap();
    assert!(a.completions(1)[0].is_ok());
}

#[test]
fn a_queue_pair_that_a_program_stops_has_what_came_before() {
    let (a, _b) = acknowledged();
    let stop = QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    };
    let stopped = a.driver.with_arrived(|port, now| port.modify_qp(now, a.qpn, &stop));
    stopped.unwrap().unwrap();
    assert!(a.completions(1)[0].is_ok());
}

struct Bomb;

impl Tap for Bomb {
    fn packet(&mut self, _from: SocketAddr, _to: SocketAddr, _index: u16, _bytes: &[u8]) {
        panic!("a bug of ours, in the thread that handles packets (this panic is part of the test)");
    }
}

#[test]
fn a_panic_in_the_background_thread_closes_the_device() {
    let config = DriverConfig {
        local: LocalConfig {
            tap: Some(Box::new(Bomb)),
            ..LocalConfig::default()
        },
        ..DriverConfig::default()
    };
    let (a, b) = (plain(), host(Oddity::None, config));
    a.raise(&b);
    b.raise(&a);
    a.write(&b).unwrap();
    wait_until(|| b.sink.closed.load(Ordering::Acquire));
    assert!(b.driver.is_closed());
    assert_eq!(b.write(&a), Err(Closed));
    assert_eq!(b.driver.with_quiet(|_, _| ()), Err(Closed));
    b.driver.poll();
    b.driver.close();
}

/// Uses the device when it is dropped, as queue pairs and connections do.
struct Last<'a>(&'a Driver);

impl Drop for Last<'_> {
    fn drop(&mut self) {
        self.0.with(|_, _| ()).unwrap();
    }
}

#[test]
fn a_panic_of_the_program_elsewhere_leaves_the_device_open() {
    let a = plain();
    thread::scope(|s| {
        let thread = s.spawn(|| {
            let _last = Last(&a.driver);
            panic!("a bug of the program, outside of the port (this panic is part of the test)");
        });
        assert!(thread.join().is_err());
    });
    assert!(!a.driver.is_closed());
    assert_eq!(a.driver.with_quiet(|_, _| ()), Ok(()));
}

/// Time from a peer's request to its completion: above the lease of a poller, below the port's timers, which take seconds.
const TAKE_OVER: Duration = Duration::from_millis(100);

/// Writes to a program that polls an empty completion queue and then makes no call. A busy machine delays some writes, and none is quick
/// if the progress thread sleeps until a timer expires.
fn writes_after_polls(a: &Host, b: &Host, polls: u32) {
    let is_quick = || {
        (0..polls).for_each(|_| b.driver.poll());
        let start = Instant::now();
        a.write(b).unwrap();
        assert!(a.completions(1)[0].is_ok());
        start.elapsed() < TAKE_OVER
    };
    assert!(
        (0..21).any(|_| is_quick()),
        "none of 21 within {TAKE_OVER:?} after {polls} polls"
    );
}

#[test]
fn the_progress_thread_takes_over_from_a_program_that_stops_polling() {
    let (a, b) = (plain(), plain());
    a.raise(&b);
    b.raise(&a);
    for polls in [1, 20, 100] {
        writes_after_polls(&a, &b, polls);
    }
}

#[test]
fn it_takes_over_as_soon_while_a_timer_is_pending() {
    let (a, b) = (plain(), plain());
    a.raise(&b);
    b.raise(&a);
    // An unanswered connect request is repeated after seconds.
    let nobody = SocketAddr::new(ferroce_loopback::address().into(), 7471);
    let local = SocketAddr::new(b.addr, 0);
    let asked = b
        .driver
        .with(|port, now| port.connect_qp(now, local, nobody, b.spare, ConnParams::default()));
    asked.unwrap().unwrap();
    thread::sleep(Duration::from_millis(50));
    writes_after_polls(&a, &b, 20);
}

#[test]
fn acknowledgements_leave_in_the_pass_that_received() {
    let [a, b] = [(); 2].map(|()| host(Oddity::None, still()));
    a.raise(&b);
    b.raise(&a);
    for _ in 0..40 {
        a.write_some(&b, 64).unwrap();
        let before = b.driver.counters().0;
        wait_until(|| {
            b.driver.poll();
            b.driver.counters().0.rx_packets > before.rx_packets
        });
        assert!(b.driver.counters().0.tx_packets > before.tx_packets);
        // On a busy machine the write is sent again.
        wait_until(|| {
            [&a, &b].iter().for_each(|host| host.driver.poll());
            !a.cq.is_empty()
        });
        assert!(a.completions(1)[0].is_ok());
    }
}
