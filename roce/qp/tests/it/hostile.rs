//! Peers that send anything: nothing panics, nothing is touched that was not opened, and nothing grows.

use std::sync::Arc;

use proptest::prelude::*;
use roce_bth::{
    Aeth, AtomicEth, Deth, Feth, Opcode, Placement, Psn, QKey, Qpn, Reth, Selectivity, Srqn, Syndrome, XrcEth,
};
use roce_qp::{CompletionQueue, SharedReceiveQueue, SrqConfig, XrcDomain};
use roce_verbs::mem::{Region, WindowKind};
use roce_verbs::{
    AccessFlags, Mtu, QpState, QpType, RKey, RecvWr, SendOp, SrqAttr, SrqType, Target, WcStatus, wr::BindWindow,
};

use crate::harness::*;

const OPEN: AccessFlags = ALL.union(AccessFlags::FLUSH_GLOBAL);

/// A victim with receives, sends outstanding, an open region, a window on a part of another, and a region that is closed
/// to peers.
struct Victim {
    side: Side,
    open: Arc<Region>,
    part: Arc<Region>,
    window: RKey,
    closed: Arc<Region>,
    psns: [u32; 2],
    _queues: Vec<Arc<SharedReceiveQueue>>,
}

fn victim(qp_type: QpType) -> Victim {
    let setup = Setup {
        mtu: Mtu::B256,
        access: OPEN,
        ..Setup::default()
    };
    let domain = XrcDomain::new();
    let mut side = Side::with(B, &setup, |c| {
        c.qp_type = qp_type;
        c.xrcd = (qp_type == QpType::XrcTgt).then(|| domain.clone());
    });
    let psns = [7, 0x00ff_fffa];
    side.bring_up(&setup, A, psns[0], psns[1]);
    let srq = SharedReceiveQueue::new(SrqConfig {
        handle: 1,
        number: Srqn::new(1),
        pd: side.pd,
        srq_type: SrqType::Xrc,
        attr: SrqAttr {
            max_wr: 64,
            max_sge: 2,
            limit: 0,
        },
        cq: Some(CompletionQueue::new(7, 256, None)),
    });
    assert!(domain.attach(&srq));
    let open = side.mem.alloc_region(side.pd, 1024, OPEN).unwrap();
    let part = side.mem.alloc_region(side.pd, 1024, OPEN).unwrap();
    let closed = side.mem.alloc_region(side.pd, 4096, AccessFlags::LOCAL_WRITE).unwrap();
    closed.write(0, &pattern(4096, 3)).unwrap();
    part.write(0, &pattern(1024, 4)).unwrap();
    let window = side.mem.alloc_window(side.pd, WindowKind::Type2).unwrap();
    let bind = BindWindow {
        key: window.rkey().next(),
        lkey: part.lkey(),
        addr: part.addr() + 256,
        length: 256,
        access: AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ,
    };
    side.mem.bind_window(side.pd, Qpn::new(B), &bind).unwrap();
    let inbox = side.region(1 << 16);
    for wr_id in 0..16 {
        let sges = [sge(&inbox, wr_id as usize * 1000, 1000)];
        let wr = RecvWr { wr_id, sges: &sges };
        if qp_type.receives() {
            side.recv(wr_id, &sges);
        }
        srq.post(&wr).unwrap();
    }
    let own = side.region(4096);
    let sges = [sge(&own, 0, 700)];
    match qp_type {
        QpType::Rc => {
            side.send(1, SendOp::Read(at(&own, 0)), &sges);
            side.send(2, SendOp::Send, &sges);
        }
        QpType::XrcIni => {
            side.send_to(1, SendOp::Read(at(&own, 0)), &sges, Target::Srq(Srqn::new(5)));
            side.send_to(2, SendOp::Write(at(&own, 0)), &sges, Target::Srq(Srqn::new(5)));
        }
        _ => {}
    }
    side.drain();
    Victim {
        side,
        open,
        part,
        window: window.rkey(),
        closed,
        psns,
        _queues: vec![srq],
    }
}

/// Parts of a packet; numbers are chosen near the right ones.
#[derive(Clone, Debug)]
struct Blow {
    opcode: Opcode,
    near: (bool, i32),
    key: u8,
    offset: i64,
    len: u32,
    payload: usize,
    word: u64,
    flags: u8,
}

fn blow() -> impl Strategy<Value = Blow> {
    let offset = prop_oneof![0i64..1024, -64i64..1100, any::<i64>()];
    let len = prop_oneof![0u32..1100, Just(8), Just(256), any::<u32>()];
    let payload = prop_oneof![Just(0usize), Just(8), Just(256), 0usize..300, Just(4096)];
    (
        proptest::sample::select(Opcode::ALL),
        (
            any::<bool>(),
            prop_oneof![4 => 0i32..4, 1 => -20i32..20, 1 => any::<i32>()],
        ),
        0u8..6,
        offset,
        len,
        payload,
        any::<u64>(),
        any::<u8>(),
    )
        .prop_map(|(opcode, near, key, offset, len, payload, word, flags)| Blow {
            opcode,
            near,
            key,
            offset,
            len,
            payload,
            word,
            flags,
        })
}

impl Victim {
    fn packet(&self, b: &Blow, next: &mut u32) -> Vec<u8> {
        let (va, rkey) = match b.key {
            0 | 1 => (self.open.addr(), self.open.rkey()),
            2 => (self.part.addr(), self.window),
            3 => (self.closed.addr(), self.closed.rkey()),
            4 => (self.part.addr(), RKey(self.part.rkey().0 ^ 1)),
            _ => (b.word, RKey(b.word as u32)),
        };
        let va = va.wrapping_add_signed(b.offset);
        let base = if b.near.0 { *next } else { self.psns[1] };
        let psn = Psn::new(base.wrapping_add_signed(b.near.1));
        if b.near.0 && b.near.1 == 0 {
            *next += 1;
        }
        let payload = if b.opcode.info().payload { b.payload } else { 0 };
        let mut raw = Raw::new(b.opcode, B, psn.value()).payload(&vec![0xc5; payload]);
        let h = &mut raw.header;
        h.bth.ack_req = b.flags & 1 != 0;
        h.bth.solicited = b.flags & 2 != 0;
        h.reth = Some(Reth {
            va,
            rkey,
            dma_len: b.len,
        });
        h.atomic_eth = Some(AtomicEth {
            va,
            rkey,
            swap_add: b.word,
            compare: 0,
        });
        h.aeth = Some(Aeth {
            syndrome: Syndrome::from_byte(b.flags),
            msn: roce_bth::Msn::new(b.word as u32),
        });
        h.deth = Some(Deth {
            qkey: QKey(if b.flags & 4 == 0 { QKEY } else { b.len }),
            reserved: 0,
            src_qp: Qpn::new(b.len),
        });
        h.xrceth = Some(XrcEth {
            reserved: 0,
            srqn: Srqn::new(u32::from(b.flags & 8 == 0)),
        });
        h.feth = Some(Feth {
            placement: Placement::from_bits_retain(b.flags & 0xf),
            selectivity: Selectivity::from_bits(b.flags >> 4),
            reserved: 0,
        });
        h.atomic_ack = Some(b.word);
        h.imm = Some(b.len);
        h.ieth = Some(rkey);
        raw.bytes()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn anything_may_come(which in 0usize..6, blows in prop::collection::vec(blow(), 1..60)) {
        let qp_type = QpType::ALL[which];
        let mut v = victim(qp_type);
        let mut next = v.psns[0];
        for b in &blows {
            let bytes = v.packet(b, &mut next);
            v.side.handle(&bytes);
            if b.flags & 0x10 == 0 {
                v.side.drain();
            }
            if b.flags & 0x60 == 0 {
                v.side.now = v.side.now + std::time::Duration::from_millis(70);
                v.side.timeout();
            }
        }
        v.side.drain();
        // Outside what was opened nothing has changed.
        prop_assert_eq!(bytes(&v.closed, 0, 4096), pattern(4096, 3));
        let outside = [bytes(&v.part, 0, 256), bytes(&v.part, 512, 512)].concat();
        let before = pattern(1024, 4);
        prop_assert_eq!(outside, [&before[..256], &before[512..]].concat());
        // Services without acknowledgements never fail by what comes in, and never answer.
        if !qp_type.is_reliable() {
            prop_assert_eq!(v.side.qp.state(), QpState::Rts);
            prop_assert!(v.side.received().iter().all(|c| c.status == WcStatus::Success));
        }
        prop_assert!(v.side.events.len() <= 2, "{:?}", v.side.events);
        prop_assert!(v.side.completions().len() + v.side.received().len() <= 18);
    }
}
