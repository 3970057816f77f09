//! Packets of a hostile peer for a queue pair of every service, amid work of its own and as time goes by: no panic, no write outside
//! what is open.

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{Arc, LazyLock},
    time::Duration,
};

use roce_bth::{Packet, Psn, Qpn, RnrTimer};
use roce_qp::{
    CompletionQueue, Counters, Ctx, DatagramSource, FreePaces, Poll, QpConfig, QueuePair, SharedReceiveQueue,
    SrqConfig, TxKind, TxSink, Window, WindowConfig, XrcDomain,
};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{
    AccessFlags, AddressVector, DeviceLimits, Instant, Mtu, Payload, QpAttr, QpAttrMask as M, QpCaps, QpState, QpType,
    RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, SrqAttr, SrqType, Srqn, Target, legal,
};

const RIGHTS: AccessFlags = AccessFlags::all().difference(AccessFlags::ZERO_BASED.union(AccessFlags::FLUSH_PERSISTENT));
static HERE: LazyLock<IpAddr> = LazyLock::new(|| IpAddr::from([10, 0, 0, 1]));

/// Takes packets and forgets them.
struct Sink(Vec<u8>);

impl TxSink for Sink {
    fn reserve(&mut self, _: TxKind, len: usize) -> Option<&mut [u8]> {
        self.0.resize(len, 0);
        Some(&mut self.0)
    }

    fn commit(&mut self) {}
}

/// What a transition needs.
fn attributes(required: M, to: QpState) -> QpAttr {
    let has = |m| required.contains(m);
    QpAttr {
        state: Some(to),
        pkey_index: has(M::PKEY_INDEX).then_some(0),
        port: has(M::PORT).then_some(1),
        access: has(M::ACCESS_FLAGS).then_some(RIGHTS),
        qkey: has(M::QKEY).then_some(0),
        av: has(M::AV).then(|| AddressVector::new(*HERE, *HERE)),
        path_mtu: has(M::PATH_MTU).then_some(Mtu::B256),
        dest_qpn: has(M::DEST_QPN).then_some(Qpn::new(5)),
        rq_psn: has(M::RQ_PSN).then_some(Psn::new(0)),
        max_dest_rd_atomic: has(M::MAX_DEST_RD_ATOMIC).then_some(4),
        min_rnr_timer: has(M::MIN_RNR_TIMER).then_some(RnrTimer::new(1)),
        timeout: has(M::TIMEOUT).then_some(14),
        retry_cnt: has(M::RETRY_CNT).then_some(7),
        rnr_retry: has(M::RNR_RETRY).then_some(7),
        sq_psn: has(M::SQ_PSN).then_some(Psn::new(0)),
        max_rd_atomic: has(M::MAX_RD_ATOMIC).then_some(4),
        ..QpAttr::default()
    }
}

/// What two bytes before a packet mean: its length, a time that goes by, or work that is posted.
const PACKET: u16 = 0;
const TIME: u16 = 1;
const POST: u16 = 2;
/// In the first byte: both sides keep packets beyond a gap.
const KEEPS: u8 = 0x80;

/// A work request of each kind that is sent in packets.
fn work(kind: u16, sges: &[Sge]) -> SendWr<'_> {
    let remote = RemoteAddr {
        addr: 0x1000,
        rkey: RKey(7),
    };
    let (op, sges) = match kind {
        0 => (SendOp::Send, sges),
        1 => (SendOp::Write(remote), sges),
        2 => (SendOp::Read(remote), sges),
        _ => (SendOp::FetchAdd { remote, add: 1 }, sges),
    };
    SendWr {
        wr_id: 7,
        op,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(sges),
    }
}

/// See the module.
pub fn run(data: &[u8]) {
    let Some((first, mut rest)) = data.split_first() else {
        return;
    };
    let qp_type = QpType::ALL[usize::from(*first & !KEEPS) % QpType::ALL.len()];
    let mem = MemoryTable::new([0; 32], &DeviceLimits::software(1));
    let Ok(pd) = mem.alloc_pd() else { return };
    // The same keys in every run, so that the fuzzer can find them.
    let Ok(region) = mem.alloc_region(pd, 4096, RIGHTS) else {
        return;
    };
    let cq = CompletionQueue::new(1, 256, None);
    let domain = XrcDomain::new();
    let srq = SharedReceiveQueue::new(SrqConfig {
        handle: 1,
        number: Srqn::new(1),
        pd,
        srq_type: SrqType::Xrc,
        attr: SrqAttr {
            max_wr: 8,
            max_sge: 1,
            limit: 2,
        },
        cq: Some(cq.clone()),
    });
    domain.attach(&srq);
    let config = QpConfig {
        qpn: Qpn::new(2),
        pd,
        qp_type,
        send_cq: cq.clone(),
        recv_cq: cq,
        caps: QpCaps::default(),
        signal_all: true,
        max_msg_size: 1 << 20,
        port_mtu: Mtu::B1024,
        srq: None,
        xrcd: (qp_type == QpType::XrcTgt).then_some(domain),
    };
    let Ok(mut qp) = QueuePair::new(config) else { return };
    let (mut window, mut events, mut counters) = (
        Window::new(WindowConfig::default()),
        VecDeque::new(),
        Counters::default(),
    );
    let mut ctx = Ctx {
        now: Instant::ZERO,
        mem: &mem,
        window: &mut window,
        paces: &mut FreePaces::default(),
        events: &mut events,
        counters: &mut counters,
    };
    let states = [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts];
    for step in states.windows(2) {
        let (from, to) = (step[0], step[1]);
        let transition = legal::transition(qp_type, from, to).expect("a transition of every service");
        if qp.state() == from {
            qp.modify(&mut ctx, &attributes(transition.required, to))
                .expect("the table's own attributes");
            if to == QpState::Rtr && *first & KEEPS != 0 {
                qp.enable_selective_ack(&Arc::default());
            }
        }
    }
    let sges = [Sge {
        addr: region.addr(),
        length: 2048,
        lkey: region.lkey(),
    }];
    for wr_id in 0..8 {
        let wr = RecvWr { wr_id, sges: &sges };
        let _ = qp.post_recv(&mut ctx, &wr);
        let _ = srq.post(&wr);
    }
    let source = DatagramSource::new(*HERE, *HERE);
    let mut sink = Sink(Vec::new());
    // Each packet behind two bytes of length, whose first two bits have another meaning if they are set.
    while let Some((head, tail)) = rest.split_first_chunk::<2>() {
        let value = u16::from_be_bytes(*head);
        let (what, value) = (value >> 14, value & 0x3fff);
        let len = if what == PACKET {
            usize::from(value).min(tail.len())
        } else {
            0
        };
        let (bytes, tail) = tail.split_at(len);
        rest = tail;
        match what {
            PACKET => {}
            TIME => {
                ctx.now = ctx.now + Duration::from_micros(u64::from(value) * 64);
                qp.handle_timeout(&mut ctx);
            }
            POST => {
                let length = u32::from(value & 0xfff);
                let sges = [Sge { length, ..sges[0] }];
                let _ = qp.post_send(&mut ctx, &work(value >> 12, &sges), Target::Peer, usize::MAX);
            }
            _ => {
                let _ = qp.post_recv(&mut ctx, &RecvWr { wr_id: 9, sges: &sges });
            }
        }
        if let Some(packet) = Packet::parse(bytes).ok().filter(|_| what == PACKET) {
            match qp_type.is_datagram() {
                true => qp.handle_datagram(&mut ctx, &packet, &source),
                false => qp.handle_packet(&mut ctx, &packet),
            }
        }
        for _ in 0..64 {
            if qp.poll_transmit(&mut ctx, &mut sink) != Poll::More {
                break;
            }
        }
    }
}
