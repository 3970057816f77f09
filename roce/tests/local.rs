//! Devices that the test's own loop drives, with a device that has a thread, and with each other.

mod common;

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use common::{ALL, PATIENCE, Side, address, open};
use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use roce::{
    CmEventKind, CmId, Completion, ConnParams, DeviceConfig, Flush, LocalDevice, MemoryRegion, Pages, Payload, QpCaps,
    QueuePair, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, VerbsDevice, WcStatus,
    verbs::provider::{CmKind, CmRef, CqId, DeviceIx, Event, MrInfo, PdId, QpId, QpSpec, Registration},
};

const SERVICE: u16 = 7000;
const LEN: usize = 4 << 20;

/// A loop with one device, and what most tests need on it.
struct Loop {
    device: LocalDevice,
    addr: IpAddr,
    poll: Poll,
    pages: Arc<Pages>,
    pd: PdId,
    cq: CqId,
    mr: MrInfo,
    completions: Vec<(QpId, Completion)>,
    events: Vec<Event>,
}

impl Loop {
    fn new() -> Self {
        let addr = address();
        let mut device = LocalDevice::open(&[DeviceConfig::new(addr)]).unwrap();
        let poll = Poll::new().unwrap();
        for (i, fd) in device.descriptors().iter().enumerate() {
            let fd = fd.as_raw_fd();
            let registry = poll.registry();
            registry
                .register(&mut SourceFd(&fd), Token(i), Interest::READABLE)
                .unwrap();
        }
        let pages = Pages::allocate(LEN).unwrap();
        let provider = device.provider();
        let pd = provider.alloc_pd(DeviceIx(0)).unwrap();
        let cq = provider.create_cq(DeviceIx(0), 1000).unwrap();
        let whole = Registration {
            memory: pages.clone(),
            offset: 0,
            len: LEN,
            iova: None,
            access: ALL,
        };
        let mr = provider.register(pd, &whole).unwrap();
        Self {
            device,
            addr,
            poll,
            pages,
            pd,
            cq,
            mr,
            completions: Vec::new(),
            events: Vec::new(),
        }
    }

    fn qp(&mut self) -> QpId {
        let spec = QpSpec {
            pd: self.pd,
            cq: self.cq,
            caps: QpCaps::default(),
            signal_all: false,
        };
        self.device.provider().create_qp(&spec).unwrap()
    }

    /// One turn, which waits for a moment if there is nothing to do.
    fn turn(&mut self) {
        let more = self.device.receive(roce::now(), 128);
        self.device.run_timers(roce::now(), more);
        let provider = self.device.provider();
        let polled = provider.poll_completions(&mut self.completions, 1000).unwrap();
        while let Some(event) = provider.poll_event() {
            self.events.push(event);
        }
        let flushed = self.device.flush(roce::now());
        if !more && polled == 0 && flushed == Flush::Done {
            let wait = self.device.next_timeout(roce::now()).unwrap_or(PATIENCE);
            let wait = wait.clamp(Duration::from_millis(1), Duration::from_millis(5));
            self.poll.poll(&mut Events::with_capacity(8), Some(wait)).unwrap();
        }
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.events);
            self.turn();
        }
    }

    /// Begins a connection.
    fn connect(&mut self, to: SocketAddr) -> (CmRef, QpId) {
        let id = self.device.provider().cm_resolve(None, to).unwrap();
        let qp = self.qp();
        self.until("resolved", |l| {
            l.events
                .iter()
                .any(|e| matches!(e, Event::Cm { id: of, kind: CmKind::Resolved { .. } } if *of == id))
        });
        let done = self.device.provider().cm_connect(id, qp, &ConnParams::default());
        done.unwrap();
        (id, qp)
    }

    fn is_up(&self, id: CmRef) -> bool {
        let up = |e: &Event| matches!(e, Event::Cm { id: of, kind: CmKind::Established { .. } } if *of == id);
        self.events.iter().any(up)
    }

    fn is_over(&self, id: CmRef) -> bool {
        let over = |e: &Event| matches!(e, Event::Cm { id: of, kind: CmKind::Disconnected } if *of == id);
        self.events.iter().any(over)
    }

    fn send(&mut self, qp: QpId, op: SendOp, len: usize) {
        let sges = [Sge {
            addr: self.mr.addr,
            length: len as u32,
            lkey: self.mr.lkey,
        }];
        let wr = SendWr {
            wr_id: 5,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.device.provider().post_send(qp, &[wr]).unwrap();
    }

    fn done(&self) -> usize {
        let good = |(_, wc): &&(QpId, Completion)| wc.status == WcStatus::Success;
        self.completions.iter().filter(good).count()
    }
}

#[test]
fn a_loop_writes_to_and_reads_from_a_device_with_a_thread() {
    let (mut l, b) = (Loop::new(), Side::new(open()));
    let mr = b.mr(LEN);
    let to = SocketAddr::new(b.addr(), SERVICE);
    let _listener = b.device.listen(&b.channel, to, 1).unwrap();
    let (id, qp) = l.connect(to);
    l.device.flush(roce::now());
    let CmEventKind::ConnectRequest { id: theirs, .. } = b.event().kind else {
        panic!("not a request");
    };
    assert_eq!(theirs.peer_addr().unwrap().ip(), l.addr);
    let qb = b.qp();
    theirs.accept(&qb, ConnParams::default()).unwrap();
    l.until("established", |l| l.is_up(id));
    let data: Vec<u8> = (0..LEN).map(|i| (i / 3) as u8).collect();
    l.pages.write(0, &data).unwrap();
    let remote = RemoteAddr {
        addr: mr.addr(),
        rkey: mr.rkey(),
    };
    l.send(qp, SendOp::Write(remote), LEN);
    l.until("written", |l| l.done() == 1);
    let mut there = vec![0; LEN];
    mr.read(0, &mut there).unwrap();
    assert!(there == data);
    mr.write(0, &vec![7; LEN]).unwrap();
    l.send(qp, SendOp::Read(remote), LEN);
    l.until("read", |l| l.done() == 2);
    l.pages.read(0, &mut there).unwrap();
    assert!(there.iter().all(|b| *b == 7));
    theirs.disconnect().unwrap();
    l.until("disconnected", |l| l.is_over(id));
    let stats = l.device.stats(0).unwrap();
    assert_eq!(stats.icrc_errors(), 0);
}

#[test]
fn nothing_leaves_before_the_flush_and_then_all_at_once() {
    let (mut l, b) = (Loop::new(), Side::new(open()));
    let to = SocketAddr::new(b.addr(), SERVICE);
    let _listener = b.device.listen(&b.channel, to, 1).unwrap();
    let (id, qp) = l.connect(to);
    l.device.flush(roce::now());
    let CmEventKind::ConnectRequest { id: theirs, .. } = b.event().kind else {
        panic!("not a request");
    };
    let qb = b.qp();
    let mr = b.mr(4096);
    let sge = [mr.sge(0, 64)];
    let recv = RecvWr { wr_id: 1, sges: &sge };
    qb.post_recv(&[recv; 8]).unwrap();
    theirs.accept(&qb, ConnParams::default()).unwrap();
    l.until("established", |l| l.is_up(id));
    for _ in 0..3 {
        l.turn();
    }
    let before = l.device.stats(0).unwrap().path;
    for _ in 0..8 {
        l.send(qp, SendOp::Send, 64);
    }
    assert_eq!(l.device.stats(0).unwrap().path.tx_calls, before.tx_calls);
    assert_eq!(l.device.flush(roce::now()), Flush::Done);
    let after = l.device.stats(0).unwrap().path;
    assert_eq!(after.tx_calls, before.tx_calls + 1);
    assert_eq!(b.good(8).len(), 8);
}

#[test]
fn two_loops_listen_connect_and_end() {
    let (mut a, mut b) = (Loop::new(), Loop::new());
    let to = SocketAddr::new(b.addr, SERVICE);
    let listener = b.device.provider().cm_listen(to, 1).unwrap();
    let (id, qp) = a.connect(to);
    a.device.flush(roce::now());
    let request = |l: &Loop| {
        l.events.iter().find_map(|e| match e {
            Event::Cm {
                id,
                kind: CmKind::ConnectRequest { .. },
            } => Some(*id),
            _ => None,
        })
    };
    b.until("a request", |l| request(l).is_some());
    let theirs = request(&b).unwrap();
    let their_qp = b.qp();
    let done = b.device.provider().cm_accept(theirs, their_qp, &ConnParams::default());
    done.unwrap();
    b.device.flush(roce::now());
    a.until("established", |l| l.is_up(id));
    a.device.flush(roce::now());
    b.until("established", |l| l.is_up(theirs));
    let provider = a.device.provider();
    provider.cm_disconnect(id);
    a.device.flush(roce::now());
    b.until("disconnected", |l| l.is_over(theirs));
    b.device.flush(roce::now());
    a.until("disconnected", |l| l.is_over(id));
    for (l, qp, ids) in [(&mut a, qp, vec![id]), (&mut b, their_qp, vec![theirs, listener])] {
        let provider = l.device.provider();
        provider.drain(qp);
        provider.destroy_qp(qp);
        ids.into_iter().for_each(|id| provider.cm_destroy(id));
        let usage = l.device.usage();
        assert_eq!((usage.qps, usage.cms, usage.mrs), (0, 0, 1));
    }
}
