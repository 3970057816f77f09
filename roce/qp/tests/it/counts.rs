//! Events that counters count: each happens once, or is another thing that the counter leaves out.

use std::sync::Arc;

use roce_bth::{Aeth, Credits, Msn, Opcode, Psn, Selectivity, Syndrome};
use roce_verbs::{AsyncEvent, Mtu, QpState, QpType, Qpn, SendOp, WcStatus};

use crate::{
    harness::*,
    memory_placement::{Log, PERSISTENT, all, flush, persistent},
};

fn setup() -> Setup {
    Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    }
}

fn keeping() -> Setup {
    Setup { keeps: true, ..setup() }
}

fn raw(opcode: Opcode, ahead: u32) -> Raw {
    Raw::new(opcode, B, Psn::new(setup().psn).add(ahead).value())
}

/// Posts a WRITE of some bytes, and returns its packets.
fn write(p: &mut Pair, len: usize) -> Vec<Vec<u8>> {
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    p.a.drain().into_iter().map(|(_, bytes)| bytes).collect()
}

/// The second completion is one more than the queue holds.
fn overflow(count: fn(&Pair) -> u64) -> u64 {
    let mut p = Pair::new(Setup { cqe: 1, ..setup() });
    (0..2).for_each(|_| drop(write(&mut p, 8)));
    p.run();
    assert_eq!(p.a.qp.state(), QpState::Err);
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!(p.a.events, [AsyncEvent::CqError(1), AsyncEvent::QpFatal(Qpn::new(A))]);
    count(&p)
}

/// A WRITE whose memory is gone before its packet is made.
fn gone(count: fn(&Pair) -> u64) -> u64 {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.a.filled(512, 1), p.b.region(512));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 512)]);
    p.a.sink.room = Some(1);
    p.a.poll_transmit();
    p.a.mem.deregister(&src).unwrap();
    p.a.sink.room = None;
    p.run();
    assert_eq!(p.a.completions()[0].status, WcStatus::LocalProtectionError);
    count(&p)
}

fn duplicate_read_of_nothing() -> u64 {
    let mut p = Pair::new(setup());
    p.b.recv(1, &[]);
    let src = p.b.filled(8, 1);
    p.b.handle(&raw(Opcode::RcSendOnly, 0).bytes());
    p.b.handle(&raw(Opcode::RcReadRequest, 0).reth(src.addr(), src.rkey(), 8).bytes());
    assert_eq!(p.b.qp.state(), QpState::Rts);
    p.b.counters.dropped_requests
}

/// A FLUSH that is under way, the packet of the FLUSH, and one behind it.
fn flushing() -> (Pair, [Vec<u8>; 2]) {
    let mut p = Pair::new(Setup {
        access: all(),
        ..setup()
    });
    p.b.is_slow = true;
    let dst = persistent(&p.b, 4096, all(), &Arc::new(Log::default()));
    p.a.send(1, flush(&dst, 0, 64, PERSISTENT, Selectivity::Range), &[]);
    let sent = p.a.drain().remove(0).1;
    p.b.handle(&sent);
    (p, [sent, raw(Opcode::RcSendOnly, 1).bytes()])
}

fn too_long_a_datagram() -> u64 {
    let long = Setup {
        mtu: Mtu::B1024,
        ..setup()
    };
    let [a, b] = [A, B].map(|qpn| Side::with(qpn, &long, |c| c.qp_type = QpType::Ud));
    let mut p = Pair::up(long.clone(), a, b);
    let mut short = Side::with(B, &setup(), |c| c.qp_type = QpType::Ud);
    short.bring_up(&setup(), A, 0, 0);
    let (src, dst) = (p.a.filled(512, 1), short.region(600));
    short.recv(1, &[sge(&dst, 0, 600)]);
    p.a.send_to(1, SendOp::Send, &[sge(&src, 0, 512)], datagram(B, QKEY));
    p.a.drain().iter().for_each(|(_, bytes)| short.handle(bytes));
    assert!(short.received().is_empty());
    short.counters.dropped_length
}

/// Two READs; the response to the second comes first, with so many bytes.
fn early(len: usize, times: usize) -> u64 {
    let mut p = Pair::new(keeping());
    let (src, dst) = (p.b.filled(512, 1), p.a.region(512));
    (0..2).for_each(|id| p.a.send(id, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 256)]));
    p.a.drain();
    let ack = Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn: Msn::new(2),
    };
    let second = Raw::new(Opcode::RcReadResponseOnly, A, setup().psn + 1).aeth(ack);
    let second = second.payload(&vec![7; len]).bytes();
    (0..times).for_each(|_| p.a.handle(&second));
    assert_eq!(p.a.qp.state(), QpState::Rts);
    p.a.counters.dropped_responses
}

type Count = (&'static str, fn() -> u64, u64);

const COUNTS: &[Count] = &[
    ("lost completions", || overflow(|p| p.a.counters.cq_overflow), 1),
    (
        "queue pairs that fail by a lost completion",
        || overflow(|p| p.a.counters.qp_failures),
        1,
    ),
    (
        "queue pairs that fail by a work request",
        || gone(|p| p.a.counters.qp_failures),
        1,
    ),
    ("packets that could not be built", || gone(|p| p.a.counters.send_err), 1),
    (
        "packets of another service",
        || {
            let mut p = Pair::new(setup());
            p.b.handle(&raw(Opcode::UcSendOnly, 0).bytes());
            p.b.counters.dropped_opcode
        },
        1,
    ),
    ("duplicates of a READ that there was not", duplicate_read_of_nothing, 1),
    (
        "duplicates that are no part of the READ",
        || {
            let mut p = Pair::new(setup());
            let src = p.b.filled(16, 1);
            let read = |len| raw(Opcode::RcReadRequest, 0).reth(src.addr(), src.rkey(), len).bytes();
            p.b.handle(&read(8));
            p.b.handle(&read(9));
            p.b.counters.dropped_requests
        },
        1,
    ),
    (
        "FLUSHes that come again while they run",
        || {
            let (mut p, [flush, _]) = flushing();
            p.b.handle(&flush);
            p.b.counters.duplicate_request
        },
        1,
    ),
    (
        "packets behind a FLUSH that nothing keeps",
        || {
            let (mut p, [_, next]) = flushing();
            p.b.handle(&next);
            p.b.counters.dropped_requests
        },
        1,
    ),
    ("datagrams longer than the MTU", too_long_a_datagram, 1),
    (
        "packets further beyond a gap than the peer can have sent",
        || {
            let mut p = Pair::new(keeping());
            p.b.handle(&raw(Opcode::RcSendOnly, 5000).bytes());
            p.b.counters.dropped_requests
        },
        1,
    ),
    ("early responses of the wrong length", || early(255, 1), 1),
    ("early responses, though they come twice", || early(256, 2), 0),
];

#[test]
fn each_event_is_counted_once() {
    for (what, count, expected) in COUNTS {
        assert_eq!(count(), *expected, "{what}");
    }
}
