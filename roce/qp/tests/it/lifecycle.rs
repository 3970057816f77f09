//! States, attributes, posting rules, flushing, draining, completion queues.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use roce_qp::{
    CompletionQueue, CqOverflow, CreateError, Ctx, ModifyError, Notify, QpConfig, QueuePair, SharedReceiveQueue,
    SrqConfig, WaitReason, XrcDomain,
};
use roce_verbs::{
    AddressVector, AsyncEvent, Completion, Mtu, PathMigState, Payload, Psn, QpAttr, QpAttrMask as M, QpCaps, QpState,
    QpType, Qpn, RecvWr, RnrTimer, SendFlags, SendOp, SendWr, SrqAttr, SrqType, Srqn, WcStatus, wr::PostError,
};

use crate::harness::*;

const STATES: [QpState; 7] = [
    QpState::Reset,
    QpState::Init,
    QpState::Rtr,
    QpState::Rts,
    QpState::Sqd,
    QpState::Sqe,
    QpState::Err,
];

fn av() -> AddressVector {
    let addr = "10.0.0.1".parse().unwrap();
    AddressVector::new(addr, addr)
}

/// Valid values for a set of attributes.
fn attrs(mask: M, state: Option<QpState>, cur: QpState) -> QpAttr {
    let has = |m| mask.contains(m);
    QpAttr {
        state,
        cur_state: has(M::CUR_STATE).then_some(cur),
        en_sqd_async_notify: has(M::EN_SQD_ASYNC_NOTIFY).then_some(true),
        access: has(M::ACCESS_FLAGS).then_some(ALL),
        pkey_index: has(M::PKEY_INDEX).then_some(0),
        port: has(M::PORT).then_some(1),
        qkey: has(M::QKEY).then_some(1),
        av: has(M::AV).then_some(av()),
        path_mtu: has(M::PATH_MTU).then_some(Mtu::B1024),
        timeout: has(M::TIMEOUT).then_some(14),
        retry_cnt: has(M::RETRY_CNT).then_some(7),
        rnr_retry: has(M::RNR_RETRY).then_some(7),
        rq_psn: has(M::RQ_PSN).then_some(Psn::new(1)),
        max_rd_atomic: has(M::MAX_RD_ATOMIC).then_some(1),
        min_rnr_timer: has(M::MIN_RNR_TIMER).then_some(RnrTimer::new(1)),
        sq_psn: has(M::SQ_PSN).then_some(Psn::new(2)),
        max_dest_rd_atomic: has(M::MAX_DEST_RD_ATOMIC).then_some(1),
        dest_qpn: has(M::DEST_QPN).then_some(Qpn::new(5)),
        path_mig_state: has(M::PATH_MIG_STATE).then_some(PathMigState::Migrated),
        sq_draining: false,
    }
}

const INIT: M = M::PKEY_INDEX.union(M::PORT).union(M::ACCESS_FLAGS);
const RTR: M = M::AV
    .union(M::PATH_MTU)
    .union(M::DEST_QPN)
    .union(M::RQ_PSN)
    .union(M::MAX_DEST_RD_ATOMIC)
    .union(M::MIN_RNR_TIMER);
const RTS: M = M::TIMEOUT
    .union(M::RETRY_CNT)
    .union(M::RNR_RETRY)
    .union(M::SQ_PSN)
    .union(M::MAX_RD_ATOMIC);

/// Table for RC by the man page of ibv_modify_qp and the kernel, written down independently: required and
/// optional attributes of every legal transition. Attributes that RoCE does not have are left out.
fn expected(from: QpState, to: QpState) -> Option<(M, M)> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let none = M::empty();
    let run = M::CUR_STATE | M::ACCESS_FLAGS | M::MIN_RNR_TIMER;
    Some(match (from, to) {
        (_, Reset) => (none, none),
        (Reset, Err) => return None,
        (_, Err) => (none, none),
        (Reset, Init) => (INIT, none),
        (Init, Init) => (none, INIT),
        (Init, Rtr) => (RTR, M::ACCESS_FLAGS | M::PKEY_INDEX),
        (Rtr, Rts) => (RTS, run),
        (Rts, Rts) | (Sqd, Rts) => (none, run),
        (Rts, Sqd) => (none, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => {
            let path = M::AV | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_RD_ATOMIC | M::MAX_DEST_RD_ATOMIC;
            (
                none,
                path | M::PORT | M::ACCESS_FLAGS | M::PKEY_INDEX | M::MIN_RNR_TIMER,
            )
        }
        (Sqe, Rts) => (none, none),
        _ => return None,
    })
}

/// A side in the given state; SQE can't be reached by a reliable connection.
fn in_state(state: QpState) -> Option<Side> {
    let setup = Setup::default();
    let mut s = Side::new(A, &setup);
    let path: &[QpState] = match state {
        QpState::Reset => &[],
        QpState::Init => &[QpState::Init],
        QpState::Rtr => &[QpState::Init, QpState::Rtr],
        QpState::Rts => &[QpState::Init, QpState::Rtr, QpState::Rts],
        QpState::Sqd => &[QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd],
        QpState::Err => &[QpState::Init, QpState::Err],
        QpState::Sqe => return None,
    };
    for to in path {
        let required = expected(s.qp.state(), *to).unwrap().0;
        let attr = attrs(required, Some(*to), s.qp.state());
        s.modify(&attr);
    }
    assert_eq!(s.qp.state(), state);
    Some(s)
}

/// All attributes that [`QpAttr`] can carry, beside the state.
const SETTABLE: [M; 17] = [
    M::CUR_STATE,
    M::EN_SQD_ASYNC_NOTIFY,
    M::ACCESS_FLAGS,
    M::PKEY_INDEX,
    M::PORT,
    M::QKEY,
    M::AV,
    M::PATH_MTU,
    M::TIMEOUT,
    M::RETRY_CNT,
    M::RNR_RETRY,
    M::RQ_PSN,
    M::MAX_RD_ATOMIC,
    M::MIN_RNR_TIMER,
    M::SQ_PSN,
    M::MAX_DEST_RD_ATOMIC,
    M::DEST_QPN,
];

#[test]
fn every_transition_takes_exactly_the_attributes_of_the_table() {
    for from in STATES {
        let Some(_) = in_state(from) else { continue };
        for to in STATES {
            let rule = expected(from, to);
            // All sets of attributes, 2^17 each, where a transition exists; else a few.
            let sets = if rule.is_some() { 1u32 << SETTABLE.len() } else { 64 };
            let mut side = in_state(from).unwrap();
            for bits in 0..sets {
                let bit = |i: usize| if bits >> i & 1 == 1 { SETTABLE[i].bits() } else { 0 };
                let mask = M::from_bits_retain((0..SETTABLE.len()).fold(0, |m, i| m | bit(i)));
                let legal = rule.is_some_and(|(req, opt)| mask.contains(req) && (req | opt).contains(mask));
                let attr = attrs(mask, Some(to), from);
                let result = side.qp.modify(ctx!(side), &attr);
                assert_eq!(result.is_ok(), legal, "{from:?} to {to:?} with {mask:?}: {result:?}");
                if legal {
                    assert_eq!(side.qp.state(), to);
                    side = in_state(from).unwrap();
                } else {
                    assert_eq!(side.qp.state(), from);
                }
            }
        }
    }
}

#[test]
fn attributes_without_a_state_follow_the_rules_of_staying() {
    for from in STATES {
        let Some(mut side) = in_state(from) else { continue };
        let before = side.qp.query();
        let attr = attrs(M::ACCESS_FLAGS, None, from);
        let result = side.qp.modify(ctx!(side), &attr);
        let legal = expected(from, from).is_some_and(|(_, opt)| opt.contains(M::ACCESS_FLAGS));
        assert_eq!(result.is_ok(), legal, "{from:?}");
        if !legal {
            assert_eq!(side.qp.query(), before);
        }
    }
}

#[test]
fn values_out_of_range_change_nothing() {
    let mut side = in_state(QpState::Reset).unwrap();
    let good = attrs(INIT, Some(QpState::Init), QpState::Reset);
    for (bad, which) in [
        (QpAttr { port: Some(2), ..good }, M::PORT),
        (
            QpAttr {
                pkey_index: Some(1),
                ..good
            },
            M::PKEY_INDEX,
        ),
    ] {
        assert_eq!(side.qp.modify(ctx!(side), &bad), Err(ModifyError::Value(which)));
        assert_eq!(side.qp.state(), QpState::Reset);
        assert_eq!(side.qp.query().port, None);
    }
    let mut side = in_state(QpState::Rtr).unwrap();
    let good = attrs(RTS, Some(QpState::Rts), QpState::Rtr);
    for (bad, which) in [
        (
            QpAttr {
                timeout: Some(32),
                ..good
            },
            M::TIMEOUT,
        ),
        (
            QpAttr {
                retry_cnt: Some(8),
                ..good
            },
            M::RETRY_CNT,
        ),
        (
            QpAttr {
                rnr_retry: Some(8),
                ..good
            },
            M::RNR_RETRY,
        ),
        (
            QpAttr {
                max_rd_atomic: Some(200),
                ..good
            },
            M::MAX_RD_ATOMIC,
        ),
    ] {
        assert_eq!(side.qp.modify(ctx!(side), &bad), Err(ModifyError::Value(which)));
    }
    let wrong = QpAttr {
        cur_state: Some(QpState::Sqd),
        ..good
    };
    assert_eq!(
        side.qp.modify(ctx!(side), &wrong),
        Err(ModifyError::CurrentState(QpState::Rtr))
    );
    let mut side = in_state(QpState::Init).unwrap();
    let mixed = AddressVector::new("10.0.0.1".parse().unwrap(), "::1".parse().unwrap());
    let bad = QpAttr {
        av: Some(mixed),
        ..attrs(RTR, Some(QpState::Rtr), QpState::Init)
    };
    assert_eq!(side.qp.modify(ctx!(side), &bad), Err(ModifyError::Value(M::AV)));
}

#[test]
fn query_returns_what_was_set() {
    let side = in_state(QpState::Rts).unwrap();
    let q = side.qp.query();
    assert_eq!(
        (q.state, q.timeout, q.dest_qpn),
        (Some(QpState::Rts), Some(14), Some(Qpn::new(5)))
    );
    assert_eq!((q.sq_psn, q.rq_psn), (Some(Psn::new(2)), Some(Psn::new(1))));
    assert_eq!(side.qp.remote(), Some((av(), Qpn::new(5))));
    assert_eq!(in_state(QpState::Init).unwrap().qp.remote(), None);
}

#[test]
fn type_shared_queue_and_domain_must_go_together() {
    let side = Side::new(A, &Setup::default());
    let srq = |srq_type| {
        SharedReceiveQueue::new(SrqConfig {
            handle: 1,
            number: Srqn::new(1),
            pd: side.pd,
            srq_type,
            attr: SrqAttr::default(),
            cq: Some(side.recv_cq.clone()),
        })
    };
    for qp_type in QpType::ALL {
        for (srq, basic) in [
            (None, false),
            (Some(srq(SrqType::Basic)), true),
            (Some(srq(SrqType::Xrc)), false),
        ] {
            for xrcd in [None, Some(XrcDomain::new())] {
                let with_domain = xrcd.is_some();
                let config = QpConfig {
                    qp_type,
                    srq: srq.clone(),
                    xrcd,
                    ..side.qp.config().clone()
                };
                let expected = if srq.is_some() && !(basic && qp_type.receives()) {
                    Err(CreateError::SharedReceiveQueue(qp_type))
                } else if with_domain != (qp_type == QpType::XrcTgt) {
                    Err(CreateError::XrcDomain)
                } else {
                    Ok(())
                };
                assert_eq!(QueuePair::new(config).map(|_| ()), expected, "{qp_type:?}");
            }
        }
    }
}

#[test]
fn posting_follows_the_state() {
    for state in STATES {
        let Some(mut s) = in_state(state) else { continue };
        let wr = SendWr {
            wr_id: 3,
            op: SendOp::Send,
            flags: SendFlags::empty(),
            payload: Payload::Sges(&[]),
        };
        let sent = s.try_send(&wr);
        let received = s.qp.post_recv(ctx!(s), &RecvWr { wr_id: 4, sges: &[] });
        let may_send = !matches!(state, QpState::Reset | QpState::Init | QpState::Rtr);
        assert_eq!(sent, if may_send { Ok(()) } else { Err(PostError::State(state)) });
        assert_eq!(received.is_ok(), state != QpState::Reset);
        let flushed = |c: Vec<Completion>| c.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>();
        if state == QpState::Err {
            assert_eq!(flushed(s.completions()), [(3, WcStatus::FlushError)]);
            assert_eq!(flushed(s.received()), [(4, WcStatus::FlushError)]);
        } else {
            assert!(s.completions().is_empty() && s.received().is_empty());
        }
    }
}

#[test]
fn work_requests_that_don_t_fit_are_not_queued() {
    let mut p = Pair::new(Setup {
        caps: QpCaps {
            max_send_wr: 2,
            max_recv_wr: 1,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline_data: 16,
        },
        ..Setup::default()
    });
    let region = p.a.region(64);
    let one = sge(&region, 0, 8);
    fn post(p: &mut Pair, op: SendOp, payload: Payload<'_>) -> Result<(), PostError> {
        p.a.try_send(&SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::empty(),
            payload,
        })
    }
    let remote = at(&region, 0);
    let add = SendOp::FetchAdd { remote, add: 1 };
    let big = roce_verbs::Sge { length: 1 << 31, ..one };
    assert_eq!(
        post(&mut p, SendOp::Send, Payload::Sges(&[one; 3])),
        Err(PostError::TooManySges { given: 3, max: 2 })
    );
    assert_eq!(
        post(&mut p, SendOp::Send, Payload::Inline(&[0; 17])),
        Err(PostError::InlineTooLong { given: 17, max: 16 })
    );
    assert!(matches!(
        post(&mut p, SendOp::Read(remote), Payload::Inline(&[0; 8])),
        Err(PostError::Invalid(_))
    ));
    assert!(matches!(
        post(&mut p, add, Payload::Inline(&[0; 8])),
        Err(PostError::Invalid(_))
    ));
    assert_eq!(
        post(&mut p, SendOp::Send, Payload::Sges(&[big, one])),
        Err(PostError::Length((1 << 31) + 8))
    );
    assert!(post(&mut p, SendOp::Send, Payload::Sges(&[one])).is_ok());
    assert!(post(&mut p, SendOp::Send, Payload::Sges(&[one])).is_ok());
    assert_eq!(
        post(&mut p, SendOp::Send, Payload::Sges(&[one])),
        Err(PostError::QueueFull)
    );
    let recv = |p: &mut Pair, sges: &[roce_verbs::Sge]| p.a.qp.post_recv(ctx!(p.a), &RecvWr { wr_id: 1, sges });
    assert_eq!(
        recv(&mut p, &[one; 2]),
        Err(PostError::TooManySges { given: 2, max: 1 })
    );
    assert!(recv(&mut p, &[one]).is_ok());
    assert_eq!(recv(&mut p, &[one]), Err(PostError::QueueFull));
}

#[test]
fn without_read_depth_reads_can_t_be_posted() {
    let mut p = Pair::new(Setup {
        rd_atomic: 0,
        ..Setup::default()
    });
    let region = p.a.region(64);
    let wr = SendWr {
        wr_id: 1,
        op: SendOp::Read(at(&region, 0)),
        flags: SendFlags::empty(),
        payload: Payload::Sges(&[]),
    };
    assert!(matches!(p.a.try_send(&wr), Err(PostError::Invalid(_))));
}

#[test]
fn the_error_state_flushes_both_queues_in_order() {
    let mut p = Pair::new(Setup {
        signal_all: false,
        ..Setup::default()
    });
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    for i in 0..5 {
        p.a.send_flags(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)], SendFlags::empty());
        p.a.recv(10 + i, &[]);
    }
    p.a.drain();
    p.a.modify(&QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    });
    let ids = |c: Vec<Completion>| {
        assert!(
            c.iter()
                .all(|c| c.status == WcStatus::FlushError && c.qpn == Qpn::new(A))
        );
        c.iter().map(|c| c.wr_id).collect::<Vec<_>>()
    };
    assert_eq!(ids(p.a.completions()), [0, 1, 2, 3, 4]);
    assert_eq!(ids(p.a.received()), [10, 11, 12, 13, 14]);
    assert_eq!(p.a.window.in_flight(), 0);
    // It neither sends nor takes anything, and has no timer.
    assert!(p.a.drain().is_empty());
    assert_eq!(p.a.qp.next_timeout(), None);
    p.b.send(1, SendOp::Send, &[]);
    for (_, b) in p.b.drain() {
        p.a.handle(&b);
    }
    assert_eq!(p.a.counters.dropped_state, 1);
    assert!(p.a.events.is_empty());
}

#[test]
fn a_half_received_send_is_flushed_first() {
    let mut p = Pair::new(Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    });
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    p.b.recv(1, &[sge(&dst, 0, 600)]);
    p.b.recv(2, &[]);
    p.a.send(1, SendOp::Send, &[sge(&src, 0, 600)]);
    let first = p.a.drain().swap_remove(0);
    p.b.handle(&first.1);
    p.b.modify(&QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    });
    assert_eq!(p.b.received().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn reset_forgets_everything_and_the_queue_pair_can_be_used_again() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    p.a.recv(1, &[]);
    p.a.drain();
    for s in [&mut p.a, &mut p.b] {
        s.modify(&QpAttr {
            state: Some(QpState::Reset),
            ..QpAttr::default()
        });
    }
    assert_eq!(
        (p.a.qp.send_queue_len(), p.a.qp.recv_queue_len(), p.a.window.in_flight()),
        (0, 0, 0)
    );
    assert!(p.a.completions().is_empty() && p.a.received().is_empty());
    let setup = Setup::default();
    p.a.enter_rtr(&setup, B, 100);
    p.b.enter_rtr(&setup, A, 200);
    p.a.enter_rts(&setup, 200);
    p.b.enter_rts(&setup, 100);
    p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    p.run();
    assert!(p.a.completions()[0].is_ok());
}

#[test]
fn destroying_returns_the_window() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    p.a.drain();
    assert!(p.a.window.in_flight() > 64);
    p.a.qp.destroy(ctx!(p.a));
    assert_eq!(p.a.window.in_flight(), 0);
    assert!(p.a.completions().is_empty());
}

#[test]
fn a_draining_queue_finishes_what_has_started_and_says_so() {
    let mut p = Pair::new(Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    });
    let (src, dst) = (p.a.filled(2000, 1), p.b.region(2000));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 2000)]);
    p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 2000)]);
    p.a.sink.room = Some(3);
    p.a.poll_transmit();
    p.a.sink.room = None;
    p.a.modify(&QpAttr {
        state: Some(QpState::Sqd),
        en_sqd_async_notify: Some(true),
        ..QpAttr::default()
    });
    assert!(p.a.events.is_empty());
    p.run();
    assert_eq!(p.a.completions().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [1]);
    assert_eq!(p.a.events, [AsyncEvent::SqDrained(Qpn::new(A))]);
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Draining);
    // Receiving goes on.
    p.a.recv(8, &[]);
    p.b.send(1, SendOp::Send, &[]);
    p.run();
    assert_eq!(p.a.received().len(), 1);
    p.a.modify(&QpAttr {
        state: Some(QpState::Rts),
        ..QpAttr::default()
    });
    p.run();
    assert_eq!(p.a.completions().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [2]);
    assert_eq!(p.a.events.len(), 1);
}

#[test]
fn an_idle_queue_is_drained_at_once_each_time() {
    let mut p = Pair::new(Setup::default());
    for times in 1..3 {
        p.a.modify(&QpAttr {
            state: Some(QpState::Sqd),
            en_sqd_async_notify: Some(true),
            ..QpAttr::default()
        });
        assert_eq!(p.a.events, vec![AsyncEvent::SqDrained(Qpn::new(A)); times]);
        p.a.modify(&QpAttr {
            state: Some(QpState::Rts),
            ..QpAttr::default()
        });
    }
}

#[test]
fn the_first_packet_in_rtr_is_an_event() {
    let setup = Setup::default();
    let mut p = Pair::new(setup.clone());
    p.b.modify(&QpAttr {
        state: Some(QpState::Reset),
        ..QpAttr::default()
    });
    p.b.enter_rtr(&setup, A, setup.psn);
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    for i in 0..3 {
        p.a.send(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    }
    p.run();
    assert_eq!(p.b.events, [AsyncEvent::CommunicationEstablished(Qpn::new(B))]);
    // A responder acknowledges in RTR already.
    assert_eq!(p.a.completions().len(), 3);
}

#[test]
fn an_overflowing_completion_queue_is_an_error_of_queue_and_queue_pair() {
    let mut p = Pair::new(Setup {
        cqe: 3,
        ..Setup::default()
    });
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    for i in 0..5 {
        p.a.send(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    }
    p.run();
    assert_eq!(p.a.qp.state(), QpState::Err);
    assert_eq!(p.a.events, [AsyncEvent::CqError(1), AsyncEvent::QpFatal(Qpn::new(A))]);
    assert_eq!(p.a.completions().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(p.a.send_cq.poll(&mut Vec::new(), 9), Err(CqOverflow));
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Notify for Count {
    fn notify(&self, cq_handle: u32) {
        assert_eq!(cq_handle, 7);
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn completion(status: WcStatus, solicited: bool) -> Completion {
    Completion {
        status,
        solicited,
        ..Completion::default()
    }
}

#[test]
fn an_armed_queue_notifies_once() {
    let count = Arc::new(Count::default());
    let cq = CompletionQueue::new(7, 100, Some(count.clone()));
    let n = || count.0.load(Ordering::SeqCst);
    let plain = completion(WcStatus::Success, false);
    cq.push(plain).unwrap();
    assert_eq!(n(), 0, "not armed");
    cq.arm(false);
    assert_eq!(n(), 0, "what came before does not count");
    cq.push(plain).unwrap();
    cq.push(plain).unwrap();
    assert_eq!(n(), 1);
    cq.arm(true);
    cq.push(plain).unwrap();
    assert_eq!(n(), 1);
    cq.push(completion(WcStatus::Success, true)).unwrap();
    assert_eq!(n(), 2);
    cq.arm(true);
    cq.push(completion(WcStatus::FlushError, false)).unwrap();
    assert_eq!(n(), 3, "errors count as solicited");
    // Arming for everything is not weakened.
    cq.arm(false);
    cq.arm(true);
    cq.push(plain).unwrap();
    assert_eq!(n(), 4);
    assert_eq!(cq.len(), 7);
}

#[test]
fn threads_lose_no_completion_and_miss_no_notification() {
    const EACH: u64 = 20_000;
    const WRITERS: u64 = 3;
    let count = Arc::new(Count::default());
    let cq = CompletionQueue::new(7, (EACH * WRITERS) as u32, Some(count.clone()));
    let mut seen = vec![0u64; WRITERS as usize];
    thread::scope(|s| {
        for w in 0..WRITERS {
            let cq = &cq;
            s.spawn(move || {
                for i in 0..EACH {
                    cq.push(Completion {
                        wr_id: w << 32 | i,
                        ..Completion::default()
                    })
                    .unwrap();
                }
            });
        }
        // Arm, poll once more, and only then wait: the pattern that must never hang.
        let (mut total, mut out) = (0, Vec::new());
        while total < EACH * WRITERS {
            let notified = count.0.load(Ordering::SeqCst);
            cq.arm(false);
            out.clear();
            if cq.poll(&mut out, 64).unwrap() == 0 {
                while count.0.load(Ordering::SeqCst) == notified {
                    thread::yield_now();
                }
            }
            for c in &out {
                let writer = (c.wr_id >> 32) as usize;
                assert_eq!(c.wr_id & 0xffff_ffff, seen[writer], "each writer's stay in order");
                seen[writer] += 1;
            }
            total += out.len() as u64;
        }
    });
    assert_eq!(seen, [EACH; WRITERS as usize]);
}
