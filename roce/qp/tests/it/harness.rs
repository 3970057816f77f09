//! Two queue pairs joined by vectors of packets, under explicit time, with a script that decides each packet's fate.

use std::{
    collections::VecDeque,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use roce_bth::{Aeth, AtomicEth, Bth, Header, Opcode, Packet, Psn, Qpn, Reth, RnrTimer};
use roce_qp::{
    CompletionQueue, Counters, Ctx, DatagramSource, FreePaces, PersistJob, Poll, QpConfig, QueuePair, ReorderBudget,
    SharedReceiveQueue, SrqConfig, TxKind, TxSink, Window, WindowConfig,
};
use roce_verbs::mem::{MemoryTable, PdHandle, Region};
use roce_verbs::{
    AccessFlags, AddressVector, AsyncEvent, Completion, Datagram, DeviceLimits, Instant, LKey, Mtu, Payload, QKey,
    QpAttr, QpCaps, QpState, QpType, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, SrqAttr, SrqType, Srqn,
    Target, wr::PostError,
};

pub(crate) const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);

/// How a pair is set up.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) mtu: Mtu,
    pub(crate) psn: u32,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) rd_atomic: u8,
    pub(crate) caps: QpCaps,
    pub(crate) signal_all: bool,
    pub(crate) access: AccessFlags,
    pub(crate) window: WindowConfig,
    pub(crate) cqe: u32,
    pub(crate) max_msg_size: u32,
    /// Both keep packets beyond a gap and say which.
    pub(crate) keeps: bool,
    /// Both keep packets beyond a gap and don't tell.
    pub(crate) quiet: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mtu: Mtu::B1024,
            psn: 0x00ff_fff0,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            rd_atomic: 4,
            caps: QpCaps::default(),
            signal_all: true,
            access: ALL,
            window: WindowConfig {
                initial: 256 << 10,
                min: 16 << 10,
                max: 1 << 20,
            },
            cqe: 4096,
            max_msg_size: 1 << 31,
            keeps: false,
            quiet: false,
        }
    }
}

/// Keeps packets, with room for an ICRC that nobody checks here.
#[derive(Default)]
pub(crate) struct VecSink {
    pub(crate) sent: VecDeque<(TxKind, Vec<u8>)>,
    pending: Option<(TxKind, Vec<u8>)>,
    pub(crate) room: Option<usize>,
    /// Destination of the last datagram.
    pub(crate) directed: Option<(IpAddr, Qpn)>,
    /// There is no way to anybody.
    pub(crate) unroutable: bool,
}

impl TxSink for VecSink {
    fn reserve(&mut self, kind: TxKind, len: usize) -> Option<&mut [u8]> {
        if self.room.is_some_and(|r| self.sent.len() >= r) {
            return None;
        }
        self.pending = Some((kind, vec![0xee; len]));
        self.pending.as_mut().map(|(_, b)| b.as_mut_slice())
    }

    fn commit(&mut self) {
        let (kind, mut bytes) = self.pending.take().expect("commit without reserve");
        bytes.extend([0; 4]);
        self.sent.push_back((kind, bytes));
    }

    fn direct(&mut self, to: &AddressVector, dest: Qpn) -> bool {
        self.directed = Some((to.remote, dest));
        !self.unroutable
    }
}

pub(crate) struct Side {
    pub(crate) mem: MemoryTable,
    pub(crate) pd: PdHandle,
    pub(crate) qp: QueuePair,
    pub(crate) window: Window,
    pub(crate) paces: FreePaces,
    pub(crate) events: VecDeque<AsyncEvent>,
    pub(crate) counters: Counters,
    pub(crate) send_cq: Arc<CompletionQueue>,
    pub(crate) recv_cq: Arc<CompletionQueue>,
    pub(crate) sink: VecSink,
    pub(crate) now: Instant,
    /// Memory becomes persistent only when the test says so.
    pub(crate) is_slow: bool,
    /// The peer names its port, [`PORT`].
    pub(crate) names_port: bool,
}

macro_rules! ctx {
    ($side:expr) => {
        &mut Ctx {
            now: $side.now,
            mem: &$side.mem,
            window: &mut $side.window,
            paces: &mut $side.paces,
            events: &mut $side.events,
            counters: &mut $side.counters,
        }
    };
}

impl Side {
    pub(crate) fn new(qpn: u32, setup: &Setup) -> Self {
        Self::with(qpn, setup, |_| {})
    }

    /// A queue pair as `adjust` wants it.
    pub(crate) fn with(qpn: u32, setup: &Setup, adjust: impl FnOnce(&mut QpConfig)) -> Self {
        let mem = MemoryTable::new([qpn as u8; 32], &DeviceLimits::software(1));
        let pd = mem.alloc_pd().unwrap();
        let send_cq = CompletionQueue::new(1, setup.cqe, None);
        let recv_cq = CompletionQueue::new(2, setup.cqe, None);
        let mut config = QpConfig {
            qpn: Qpn::new(qpn),
            pd,
            qp_type: QpType::Rc,
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            caps: setup.caps,
            signal_all: setup.signal_all,
            max_msg_size: setup.max_msg_size,
            port_mtu: setup.mtu,
            srq: None,
            xrcd: None,
        };
        adjust(&mut config);
        let qp = QueuePair::new(config);
        Self {
            mem,
            pd,
            qp: qp.unwrap(),
            window: Window::new(setup.window),
            paces: FreePaces::default(),
            events: VecDeque::new(),
            counters: Counters::default(),
            send_cq,
            recv_cq,
            sink: VecSink::default(),
            now: Instant::from_nanos(1_000_000),
            is_slow: false,
            names_port: true,
        }
    }

    pub(crate) fn modify(&mut self, attr: &QpAttr) {
        self.qp.modify(ctx!(self), attr).unwrap();
        if attr.state == Some(QpState::Rtr) && self.names_port {
            self.qp.set_peer_source(PORT);
        }
    }

    fn way(setup: &Setup, peer: u32, rq_psn: u32, sq_psn: u32) -> QpAttr {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        QpAttr {
            access: Some(setup.access),
            qkey: Some(QKEY),
            rq_psn: Some(Psn::new(rq_psn)),
            sq_psn: Some(Psn::new(sq_psn)),
            max_dest_rd_atomic: Some(setup.rd_atomic),
            max_rd_atomic: Some(setup.rd_atomic),
            min_rnr_timer: Some(RnrTimer::new(setup.min_rnr_timer)),
            timeout: Some(setup.timeout),
            retry_cnt: Some(setup.retry_cnt),
            rnr_retry: Some(setup.rnr_retry),
            ..QpAttr::to_rts(AddressVector::new(here, here), setup.mtu, Qpn::new(peer))
        }
    }

    pub(crate) fn enter_rtr(&mut self, setup: &Setup, peer: u32, psn: u32) {
        let way = Self::way(setup, peer, psn, 0);
        for to in [QpState::Init, QpState::Rtr] {
            self.modify(&way.step(self.qp.config().qp_type, to));
        }
        if setup.keeps {
            self.qp.enable_selective_ack(&Arc::new(ReorderBudget::default()));
        }
        if setup.quiet {
            self.qp.enable_reorder(&Arc::new(ReorderBudget::default()));
        }
    }

    pub(crate) fn enter_rts(&mut self, setup: &Setup, psn: u32) {
        self.modify(&Self::way(setup, 0, 0, psn).step(QpType::Rc, QpState::Rts));
    }

    /// From RESET to RTS with what each transition of the queue pair's service needs.
    pub(crate) fn bring_up(&mut self, setup: &Setup, peer: u32, rq_psn: u32, sq_psn: u32) {
        let way = Self::way(setup, peer, rq_psn, sq_psn);
        for attr in way.steps(self.qp.config().qp_type) {
            self.modify(&attr);
        }
    }

    pub(crate) fn try_send_to(&mut self, wr: &SendWr<'_>, target: Target) -> Result<(), PostError> {
        self.qp.post_send(ctx!(self), wr, target, usize::MAX)
    }

    pub(crate) fn send_to(&mut self, wr_id: u64, op: SendOp, sges: &[Sge], target: Target) {
        let wr = SendWr {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(sges),
        };
        self.try_send_to(&wr, target).unwrap();
    }

    pub(crate) fn region(&self, len: usize) -> Arc<Region> {
        self.mem.alloc_region(self.pd, len, ALL).unwrap()
    }

    pub(crate) fn filled(&self, len: usize, salt: u8) -> Arc<Region> {
        let region = self.region(len);
        region.write(0, &pattern(len, salt)).unwrap();
        region
    }

    pub(crate) fn try_send(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.qp.post_send(ctx!(self), wr, Target::Peer, usize::MAX)
    }

    pub(crate) fn send(&mut self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.send_flags(wr_id, op, sges, SendFlags::SIGNALED);
    }

    pub(crate) fn send_flags(&mut self, wr_id: u64, op: SendOp, sges: &[Sge], flags: SendFlags) {
        let payload = Payload::Sges(sges);
        self.try_send(&SendWr {
            wr_id,
            op,
            flags,
            payload,
        })
        .unwrap();
    }

    pub(crate) fn recv(&mut self, wr_id: u64, sges: &[Sge]) {
        self.qp.post_recv(ctx!(self), &RecvWr { wr_id, sges }).unwrap();
    }

    pub(crate) fn poll_transmit(&mut self) -> Poll {
        self.qp.poll_transmit(ctx!(self), &mut self.sink)
    }

    pub(crate) fn handle(&mut self, bytes: &[u8]) {
        let packet = Packet::parse(bytes).expect("the engine made a packet that does not parse");
        match self.qp.config().qp_type.is_datagram() {
            true => self.qp.handle_datagram(ctx!(self), &packet, &SOURCE),
            false => self.qp.handle_packet(ctx!(self), &packet),
        }
        if !self.is_slow {
            while self.persist() {}
        }
    }

    /// Does what is to be made persistent. False: there is nothing.
    pub(crate) fn persist(&mut self) -> bool {
        let job = self.qp.take_persist_job();
        if let Some(job) = &job {
            self.end_persist_job(job);
        }
        job.is_some()
    }

    pub(crate) fn end_persist_job(&mut self, job: &PersistJob) {
        let result = job.run();
        self.qp.persisted(ctx!(self), job, result);
    }

    pub(crate) fn timeout(&mut self) {
        self.qp.handle_timeout(ctx!(self));
    }

    pub(crate) fn completions(&self) -> Vec<Completion> {
        let mut out = Vec::new();
        let _ = self.send_cq.poll(&mut out, usize::MAX);
        out
    }

    pub(crate) fn received(&self) -> Vec<Completion> {
        let mut out = Vec::new();
        let _ = self.recv_cq.poll(&mut out, usize::MAX);
        out
    }

    /// Everything that the queue pair sends now, parsed.
    pub(crate) fn drain(&mut self) -> Vec<(TxKind, Vec<u8>)> {
        let mut out = Vec::new();
        loop {
            let more = self.poll_transmit() == Poll::More;
            out.extend(self.sink.sent.drain(..));
            if !more {
                return out;
            }
        }
    }

    /// Everything that the queue pair sends now, as opcodes and PSNs.
    pub(crate) fn headers(&mut self) -> Vec<Header> {
        self.drain()
            .iter()
            .map(|(_, b)| Packet::parse(b).unwrap().header.into())
            .collect()
    }
}

pub(crate) fn sge(region: &Region, offset: usize, length: usize) -> Sge {
    Sge {
        addr: region.addr() + offset as u64,
        length: length as u32,
        lkey: region.lkey(),
    }
}

pub(crate) fn at(region: &Region, offset: usize) -> RemoteAddr {
    RemoteAddr {
        addr: region.addr() + offset as u64,
        rkey: region.rkey(),
    }
}

pub(crate) fn bytes(region: &Region, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    region.read(offset, &mut out).unwrap();
    out
}

pub(crate) fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[1] ^ salt)
        .collect()
}

/// Which way a packet goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Dir {
    AtoB,
    BtoA,
}

/// Fate of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    Deliver,
    Drop,
    Twice,
    /// Arrives after as many later packets.
    Late(usize),
}

pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
    pub(crate) setup: Setup,
    pub(crate) now: Instant,
    /// One way.
    pub(crate) delay: Duration,
    wire: VecDeque<(Instant, Dir, Vec<u8>)>,
    late: Vec<(usize, Dir, Vec<u8>)>,
}

/// The queue key of every datagram queue pair.
pub(crate) const QKEY: u32 = 0x1111_1111;
/// Source of datagrams.
pub(crate) const SOURCE: DatagramSource = DatagramSource {
    src: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
    dst: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
    traffic_class: 0x68,
    hop_limit: 63,
    identification: 0x1234,
};

/// The target of a datagram to a queue pair.
pub(crate) fn datagram(qpn: u32, qkey: u32) -> Target {
    Target::Datagram(Datagram {
        av: AddressVector::new(SOURCE.src, SOURCE.dst),
        qpn: Qpn::new(qpn),
        qkey: QKey(qkey),
    })
}

/// UDP source port of every peer.
pub(crate) const PORT: u16 = 0xc0de;
pub(crate) const A: u32 = 0x11;
pub(crate) const B: u32 = 0x22;

impl Pair {
    pub(crate) fn new(setup: Setup) -> Self {
        let mut a = Side::new(A, &setup);
        let mut b = Side::new(B, &setup);
        let (pa, pb) = (setup.psn, setup.psn ^ 0x5555);
        a.enter_rtr(&setup, B, pb);
        b.enter_rtr(&setup, A, pa);
        a.enter_rts(&setup, pa);
        b.enter_rts(&setup, pb);
        Self::join(setup, a, b)
    }

    /// Two queue pairs of a service.
    pub(crate) fn of(qp_type: QpType, setup: Setup) -> Self {
        let a = Side::with(A, &setup, |c| c.qp_type = qp_type);
        let b = Side::with(B, &setup, |c| c.qp_type = qp_type);
        Self::up(setup, a, b)
    }

    /// Brings up two queue pairs as each other's peers.
    pub(crate) fn up(setup: Setup, mut a: Side, mut b: Side) -> Self {
        let (pa, pb) = (setup.psn, setup.psn ^ 0x5555);
        a.bring_up(&setup, B, pb, pa);
        b.bring_up(&setup, A, pa, pb);
        Self::join(setup, a, b)
    }

    fn join(setup: Setup, a: Side, b: Side) -> Self {
        let now = a.now;
        Self {
            a,
            b,
            setup,
            now,
            delay: Duration::from_micros(20),
            wire: VecDeque::new(),
            late: Vec::new(),
        }
    }

    fn set_now(&mut self, now: Instant) {
        self.now = now;
        self.a.now = now;
        self.b.now = now;
    }

    /// Runs without faults until nothing happens any more.
    pub(crate) fn run(&mut self) {
        self.run_with(Duration::from_secs(60), |_, _| Fate::Deliver);
    }

    /// Runs until nothing happens any more, or `limit` of virtual time has gone by.
    pub(crate) fn run_with(&mut self, limit: Duration, mut fate: impl FnMut(Dir, &Packet<'_>) -> Fate) {
        let end = self.now + limit;
        loop {
            self.collect(&mut fate);
            let next = [
                self.wire.front().map(|w| w.0),
                self.a.qp.next_timeout(),
                self.b.qp.next_timeout(),
            ];
            let Some(next) = next.into_iter().flatten().min() else {
                break;
            };
            if next > end {
                break;
            }
            let now = self.now.max(next);
            self.set_now(now);
            while self.wire.front().is_some_and(|w| w.0 <= now) {
                let (_, dir, bytes) = self.wire.pop_front().unwrap();
                match dir {
                    Dir::AtoB => self.b.handle(&bytes),
                    Dir::BtoA => self.a.handle(&bytes),
                }
            }
            self.a.timeout();
            self.b.timeout();
        }
    }

    fn collect(&mut self, fate: &mut impl FnMut(Dir, &Packet<'_>) -> Fate) {
        let due = self.now + self.delay;
        for dir in [Dir::AtoB, Dir::BtoA] {
            let side = if dir == Dir::AtoB { &mut self.a } else { &mut self.b };
            for (_, bytes) in side.drain() {
                for late in &mut self.late {
                    late.0 = late.0.saturating_sub(1);
                }
                match fate(dir, &Packet::parse(&bytes).unwrap()) {
                    Fate::Deliver => self.wire.push_back((due, dir, bytes)),
                    Fate::Drop => {}
                    Fate::Twice => {
                        self.wire.push_back((due, dir, bytes.clone()));
                        self.wire.push_back((due, dir, bytes));
                    }
                    Fate::Late(n) => self.late.push((n, dir, bytes)),
                }
                let ready = self.late.extract_if(.., |l| l.0 == 0);
                self.wire.extend(ready.map(|(_, dir, bytes)| (due, dir, bytes)));
            }
        }
        if self.wire.is_empty() {
            // Nothing is coming that a late packet could wait for.
            self.wire
                .extend(self.late.drain(..).map(|(_, dir, bytes)| (due, dir, bytes)));
        }
    }
}

/// A hand-made packet.
#[derive(Clone, Debug)]
pub(crate) struct Raw {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

impl Raw {
    pub(crate) fn new(opcode: Opcode, qpn: u32, psn: u32) -> Self {
        Self {
            header: Header::new(Bth::new(opcode, Qpn::new(qpn), Psn::new(psn))),
            payload: Vec::new(),
        }
    }

    pub(crate) fn ack_req(mut self) -> Self {
        self.header.bth.ack_req = true;
        self
    }

    pub(crate) fn payload(mut self, payload: &[u8]) -> Self {
        self.payload = payload.to_vec();
        self.header.bth.pad = (payload.len().wrapping_neg() & 3) as u8;
        self
    }

    pub(crate) fn reth(mut self, va: u64, rkey: RKey, dma_len: u32) -> Self {
        self.header.reth = Some(Reth { va, rkey, dma_len });
        self
    }

    pub(crate) fn atomic(mut self, eth: AtomicEth) -> Self {
        self.header.atomic_eth = Some(eth);
        self
    }

    pub(crate) fn aeth(mut self, aeth: Aeth) -> Self {
        self.header.aeth = Some(aeth);
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.header.wire_len()];
        self.header.emit(&mut out);
        out.extend(&self.payload);
        out.extend(vec![0; usize::from(self.header.bth.pad) + 4]);
        out
    }
}

pub(crate) const NO_KEY: LKey = LKey(0);

/// A basic shared receive queue of four receives with one element each.
pub(crate) fn shared_queue(pd: PdHandle) -> Arc<SharedReceiveQueue> {
    SharedReceiveQueue::new(SrqConfig {
        handle: 5,
        number: Srqn::new(5),
        pd,
        srq_type: SrqType::Basic,
        attr: SrqAttr {
            max_wr: 4,
            max_sge: 1,
            limit: 0,
        },
        cq: None,
    })
}
