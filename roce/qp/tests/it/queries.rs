//! Answers of a queue pair to its caller: work and packets outstanding, attributes, options, and room in its queues.

use std::{sync::Arc, time::Duration};

use roce_bth::{Class, Psn};
use roce_qp::{ReorderBudget, WaitReason, WindowConfig};
use roce_verbs::{
    Mtu, PathMigState, Payload, QpAttr, QpCaps, QpState, QpType, SendFlags, SendOp, SendWr, Target, wr::PostError,
};

use crate::harness::*;

/// Weight of a packet in the window besides its payload, bytes.
const OVERHEAD: usize = 512;

fn setup() -> Setup {
    Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    }
}

fn to(state: QpState) -> QpAttr {
    QpAttr {
        state: Some(state),
        ..QpAttr::default()
    }
}

/// Work requests and packets outstanding, bytes in flight, whether it has nothing to send, and the oldest PSN that is not acknowledged,
/// from the first one on.
fn busy(p: &Pair) -> (usize, u64, usize, bool, Option<u32>) {
    let qp = &p.a.qp;
    let first = Psn::new(p.setup.psn);
    (
        qp.send_queue_len(),
        qp.outstanding_packets(),
        qp.in_flight(),
        qp.is_idle(),
        qp.acknowledged().map(|psn| psn.offset_from(first)),
    )
}

#[test]
fn work_is_outstanding_from_its_post_to_its_completion() {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    assert_eq!(busy(&p), (0, 0, 0, true, Some(0)));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
    p.a.send(2, SendOp::Read(at(&dst, 0)), &[sge(&src, 0, 500)]);
    assert_eq!(busy(&p), (2, 5, 0, false, Some(0)));
    let sent = p.a.drain();
    assert_eq!(busy(&p), (2, 5, 1100 + 5 * OVERHEAD, false, Some(0)));
    assert!(p.b.qp.is_idle());
    p.b.handle(&sent[0].1);
    sent[1..3].iter().for_each(|(_, bytes)| p.b.handle(bytes));
    assert!(!p.b.qp.is_idle(), "an acknowledgement is due");
    p.b.drain().iter().for_each(|(_, bytes)| p.a.handle(bytes));
    assert!(p.b.qp.is_idle());
    assert_eq!(busy(&p), (1, 2, 500 + 2 * OVERHEAD, false, Some(3)));
    p.b.handle(&sent[3].1);
    assert!(!p.b.qp.is_idle(), "a response is due");
    p.b.drain().iter().for_each(|(_, bytes)| p.a.handle(bytes));
    assert_eq!(busy(&p), (0, 0, 0, true, Some(5)));
    assert_eq!(p.a.completions().len(), 2);
}

#[test]
fn acknowledged_is_what_a_sender_of_a_reliable_service_knows() {
    for (qp_type, state, known) in [
        (QpType::Rc, QpState::Rts, true),
        (QpType::Rc, QpState::Sqd, true),
        (QpType::Rc, QpState::Err, false),
        (QpType::Rc, QpState::Reset, false),
        (QpType::Uc, QpState::Rts, false),
        (QpType::Ud, QpState::Rts, false),
    ] {
        let mut p = Pair::of(qp_type, setup());
        if state != QpState::Rts {
            p.a.modify(&to(state));
        }
        assert_eq!(p.a.qp.acknowledged().is_some(), known, "{qp_type:?} {state:?}");
    }
}

#[test]
fn a_query_tells_the_state_and_that_no_path_migrates() {
    let mut p = Pair::new(setup());
    for state in [QpState::Rts, QpState::Sqd] {
        p.a.modify(&to(state));
        let attr = p.a.qp.query();
        assert_eq!((attr.state, attr.cur_state), (Some(state), Some(state)));
        assert_eq!(attr.path_mig_state, Some(PathMigState::Migrated));
    }
}

#[test]
fn the_send_queue_is_draining_until_what_was_begun_has_ended() {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
    let sent = p.a.drain();
    assert!(!p.a.qp.query().sq_draining);
    p.a.modify(&to(QpState::Sqd));
    assert!(p.a.qp.query().sq_draining);
    sent.iter().for_each(|(_, bytes)| p.b.handle(bytes));
    p.b.drain().iter().for_each(|(_, bytes)| p.a.handle(bytes));
    assert_eq!((p.a.qp.state(), p.a.qp.query().sq_draining), (QpState::Sqd, false));
}

#[test]
fn the_peers_reads_are_limited_as_agreed() {
    for rd_atomic in [0, 1, 7, 128] {
        let mut p = Pair::new(Setup { rd_atomic, ..setup() });
        assert_eq!(p.a.qp.max_reads(), rd_atomic);
        p.a.modify(&to(QpState::Reset));
        assert_eq!(p.a.qp.max_reads(), 0);
    }
}

#[test]
fn selective_acks_are_for_reliable_connections_that_have_not_begun() {
    let budget = Arc::new(ReorderBudget::default());
    let none = |_: &mut Pair| {};
    let post = |p: &mut Pair| {
        let (src, dst) = (p.a.filled(8, 1), p.b.region(8));
        p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 8)]);
    };
    let drain = |p: &mut Pair| p.a.modify(&to(QpState::Sqd));
    type Begin = fn(&mut Pair);
    let cases: [(&str, QpType, Begin, bool); 5] = [
        ("connection", QpType::Rc, none, true),
        ("busy connection", QpType::Rc, post, false),
        ("connection that drains", QpType::Rc, drain, false),
        ("unreliable connection", QpType::Uc, none, false),
        ("datagrams", QpType::Ud, none, false),
    ];
    for (name, qp_type, begin, enabled) in cases {
        let mut p = Pair::of(qp_type, setup());
        begin(&mut p);
        assert!(!p.a.qp.uses_selective_ack());
        p.a.qp.enable_selective_ack(&budget);
        assert_eq!(p.a.qp.uses_selective_ack(), enabled, "{name}");
    }
    let mut side = Side::new(A, &setup());
    side.qp.enable_selective_ack(&budget);
    assert!(!side.qp.uses_selective_ack(), "in RESET");
    side.enter_rtr(&setup(), B, 0);
    side.qp.enable_selective_ack(&budget);
    assert!(side.qp.uses_selective_ack(), "in RTR");
}

/// Only a peer that was told of selective ACKs expects them.
#[test]
fn packets_are_buffered_only_where_it_was_asked_for_in_rtr() {
    let buffered = |enable: fn(&mut Side)| {
        let mut p = Pair::new(setup());
        enable(&mut p.b);
        let (src, dst) = (p.a.filled(512, 1), p.b.region(512));
        p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 512)]);
        let sent = p.a.drain();
        p.b.handle(&sent[1].1);
        p.b.handle(&sent[0].1);
        bytes(&dst, 0, 512) == bytes(&src, 0, 512)
    };
    assert!(!buffered(|_| {}));
    assert!(!buffered(|b| b.qp.enable_reorder(&Arc::default())), "in RTS");
    assert!(buffered(|b| b.qp.enable_selective_ack(&Arc::default())));
}

#[test]
fn room_in_the_send_queue_is_told_ahead_of_the_posts() {
    let mut p = Pair::new(Setup {
        caps: QpCaps {
            max_send_wr: 4,
            ..QpCaps::default()
        },
        ..setup()
    });
    let wr = SendWr {
        wr_id: 1,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&[]),
    };
    for queued in 0..=4 {
        for ahead in 0..6 {
            let expected = match queued + ahead < 4 {
                true => Ok(()),
                false => Err(PostError::QueueFull),
            };
            assert_eq!(
                p.a.qp.check_post(&wr, &Target::Peer, ahead),
                expected,
                "{queued} {ahead}"
            );
        }
        let posted = p.a.try_send(&wr);
        assert_eq!(posted.is_ok(), queued < 4);
    }
    // Flushed at once, they occupy nothing.
    p.a.modify(&to(QpState::Err));
    assert_eq!(p.a.qp.check_post(&wr, &Target::Peer, 9), Ok(()));
    p.a.modify(&to(QpState::Reset));
    assert_eq!(
        p.a.qp.check_post(&wr, &Target::Peer, 0),
        Err(PostError::State(QpState::Reset))
    );
}

/// Two congestion notifications: the first one begins to measure the rate, the second one cuts it.
#[test]
fn congestion_notifications_slow_requests_and_responses_but_no_acknowledgement() {
    let us = Duration::from_micros;
    for reads in [false, true] {
        let mut p = Pair::new(Setup {
            window: WindowConfig {
                initial: 4 << 20,
                min: 4 << 20,
                max: 4 << 20,
            },
            ..Setup::default()
        });
        let len = 1 << 20;
        let (here, there) = (p.a.filled(len, 1), p.b.filled(len, 1));
        // The data comes from A in either case.
        let send = |p: &mut Pair, len: usize| match reads {
            false => p.a.send(1, SendOp::Write(at(&there, 0)), &[sge(&here, 0, len)]),
            true => {
                p.b.send(1, SendOp::Read(at(&here, 0)), &[sge(&there, 0, len)]);
                p.b.drain().iter().for_each(|(_, bytes)| p.a.handle(bytes));
            }
        };
        p.a.qp.handle_notification(p.a.now);
        send(&mut p, 64 << 10);
        let first = p.a.drain();
        assert_eq!(first.len(), 64, "one notification slows nothing");
        p.a.now = p.a.now + us(100);
        p.a.qp.handle_notification(p.a.now);
        send(&mut p, len);
        assert!(p.a.drain().is_empty());
        if !reads {
            assert_eq!(p.a.qp.wait_reason(), WaitReason::Pace);
        }
        // A message to A is acknowledged all the same.
        p.a.recv(1, &[sge(&here, 0, 8)]);
        p.b.send(9, SendOp::Send, &[sge(&there, 0, 8)]);
        p.b.drain().iter().for_each(|(_, bytes)| p.a.handle(bytes));
        let classes: Vec<Class> = p.a.headers().iter().map(|h| h.bth.opcode.info().class).collect();
        assert_eq!(
            classes,
            [Class::Acknowledge; 1][..usize::from(!reads)],
            "reads: {reads}"
        );
        // Half of 64 packets in 100 us, with their overhead: 10 to 11 packets in 32 us.
        let again = p.a.qp.next_timeout().expect("a time to go on");
        let wait = again.saturating_since(p.a.now);
        assert!((us(20)..us(50)).contains(&wait), "{wait:?}");
        // Called early, it waits on.
        p.a.timeout();
        assert_eq!(p.a.qp.next_timeout(), Some(again));
        p.a.now = again;
        p.a.timeout();
        assert!(p.a.qp.next_timeout().is_none_or(|at| at > again));
        let next = p.a.drain().iter().filter(|(_, bytes)| bytes.len() > 1000).count();
        assert!((8..=20).contains(&next), "{next} packets");
    }
}

/// Packets sent before a notification show nothing of the cut that follows.
#[test]
fn the_rate_stays_for_a_round_trip_after_a_cut() {
    let us = Duration::from_micros;
    let len = 1 << 20;
    let mut p = Pair::new(Setup {
        window: WindowConfig {
            initial: 8 << 20,
            min: 8 << 20,
            max: 8 << 20,
        },
        ..Setup::default()
    });
    let (here, there) = (p.a.filled(len, 1), p.b.region(len));
    let send = |p: &mut Pair, len: usize| p.a.send(1, SendOp::Write(at(&there, 0)), &[sge(&here, 0, len)]);
    // A round trip of 2 ms.
    p.delay = us(1000);
    send(&mut p, 8);
    p.run();
    p.a.qp.handle_notification(p.a.now);
    send(&mut p, 64 << 10);
    assert_eq!(p.a.drain().len(), 64);
    let begun = p.a.now;
    for after in [100, 500] {
        p.a.now = begun + us(after);
        p.a.qp.handle_notification(p.a.now);
    }
    send(&mut p, len);
    let mut sent = p.a.drain().len();
    while let Some(next) = p.a.qp.next_timeout().filter(|at| *at < begun + us(1500)) {
        p.a.now = next;
        p.a.timeout();
        sent += p.a.drain().len();
    }
    // Half of 64 packets in 100 us, and what was earned before, at most 64,000 bytes.
    assert!((300..=380).contains(&sent), "{sent}");
}
