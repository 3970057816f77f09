//! Shared receive queues.

use std::{sync::Arc, thread, time::Duration};

use roce_bth::{Class, Syndrome};
use roce_qp::{CompletionQueue, SharedReceiveQueue, SrqConfig, SrqError, XrcDomain};
use roce_verbs::{
    AsyncEvent, Completion, QpAttr, QpState, Qpn, RecvWr, SendOp, SrqAttr, SrqModify, SrqType, Srqn, WcStatus,
    wr::PostError,
};

use crate::harness::*;

const HANDLE: u32 = 77;

fn srq(pd: roce_verbs::mem::PdHandle, max_wr: u32, limit: u32) -> Arc<SharedReceiveQueue> {
    SharedReceiveQueue::new(SrqConfig {
        handle: HANDLE,
        number: Srqn::new(0x123),
        pd,
        srq_type: SrqType::Basic,
        attr: SrqAttr {
            max_wr,
            max_sge: 2,
            limit,
        },
        cq: None,
    })
}

fn pair(max_wr: u32, limit: u32) -> (Pair, Arc<SharedReceiveQueue>) {
    let setup = Setup::default();
    let a = Side::new(A, &setup);
    let b = Side::with(B, &setup, |c| c.srq = Some(srq(c.pd, max_wr, limit)));
    let queue = b.qp.config().srq.clone().unwrap();
    (Pair::up(setup, a, b), queue)
}

fn post(queue: &SharedReceiveQueue, wr_id: u64) -> Result<(), PostError> {
    queue.post(&RecvWr { wr_id, sges: &[] })
}

fn ids(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

#[test]
fn receives_come_from_the_shared_queue() {
    let (mut p, queue) = pair(8, 0);
    let (src, dst) = (p.a.filled(3000, 1), p.b.region(3000));
    let sges = [sge(&dst, 0, 1000), sge(&dst, 1000, 2000)];
    queue.post(&RecvWr { wr_id: 5, sges: &sges }).unwrap();
    post(&queue, 6).unwrap();
    p.a.send(1, SendOp::Send, &[sge(&src, 0, 3000)]);
    p.a.send(2, SendOp::WriteWithImm(at(&dst, 0), 9), &[]);
    p.run();
    assert_eq!(ids(&p.b.received()), [(5, WcStatus::Success), (6, WcStatus::Success)]);
    assert_eq!(bytes(&dst, 0, 3000), pattern(3000, 1));
    assert!(queue.is_empty());
    // The queue pair has none of its own.
    let refused = p.b.qp.post_recv(
        &mut roce_qp::Ctx {
            now: p.b.now,
            mem: &p.b.mem,
            window: &mut p.b.window,
            paces: &mut p.b.paces,
            events: &mut p.b.events,
            counters: &mut p.b.counters,
        },
        &RecvWr { wr_id: 1, sges: &[] },
    );
    assert!(matches!(refused, Err(PostError::Invalid(_))));
}

#[test]
fn an_empty_queue_makes_reliable_senders_wait() {
    let (mut p, queue) = pair(8, 0);
    p.a.send(1, SendOp::Send, &[]);
    let mut rnr = 0;
    p.run_with(Duration::from_micros(100), |_, packet| {
        let aeth = packet
            .header
            .aeth()
            .filter(|_| packet.header.bth.opcode.info().class == Class::Acknowledge);
        rnr += u32::from(matches!(aeth.map(|a| a.syndrome), Some(Syndrome::Rnr(_))));
        Fate::Deliver
    });
    assert!(rnr > 0 && p.a.completions().is_empty());
    post(&queue, 3).unwrap();
    p.run();
    assert_eq!(ids(&p.a.completions()), [(1, WcStatus::Success)]);
    assert_eq!(ids(&p.b.received()), [(3, WcStatus::Success)]);
}

#[test]
fn the_limit_is_reported_once_until_it_is_armed_again() {
    let (mut p, queue) = pair(8, 2);
    for wr_id in 0..4 {
        post(&queue, wr_id).unwrap();
    }
    let send = |p: &mut Pair| {
        p.a.send(1, SendOp::Send, &[]);
        p.run();
        std::mem::take(&mut p.b.events)
    };
    let reached = [AsyncEvent::SrqLimitReached(HANDLE)];
    assert_eq!(send(&mut p), []);
    assert_eq!(send(&mut p), [], "as many as the limit");
    assert_eq!(send(&mut p), reached);
    assert_eq!(queue.query().limit, 0);
    assert_eq!(send(&mut p), [], "not armed any more");
    for wr_id in 0..3 {
        post(&queue, wr_id).unwrap();
    }
    let arm = |limit| {
        queue.modify(&SrqModify {
            limit: Some(limit),
            ..SrqModify::default()
        })
    };
    assert_eq!(arm(3), Ok(None));
    assert_eq!(send(&mut p), reached);
    // Passed when it is armed: reported at once.
    assert_eq!(arm(3), Ok(Some(reached[0])));
    assert_eq!(queue.query().limit, 0);
    assert_eq!(arm(2), Ok(None));
    assert_eq!(arm(0), Ok(None));
    assert_eq!(send(&mut p), []);
}

#[test]
fn sizes_are_kept() {
    let (p, queue) = pair(3, 0);
    for wr_id in 0..3 {
        post(&queue, wr_id).unwrap();
    }
    assert_eq!(post(&queue, 3), Err(PostError::QueueFull));
    let size = |max_wr| {
        queue.modify(&SrqModify {
            max_wr: Some(max_wr),
            limit: None,
        })
    };
    assert_eq!(size(2), Err(SrqError::Size { held: 3, asked: 2 }));
    assert_eq!(size(4), Ok(None));
    post(&queue, 3).unwrap();
    assert_eq!(post(&queue, 4), Err(PostError::QueueFull));
    let limit = SrqModify {
        max_wr: None,
        limit: Some(5),
    };
    assert_eq!(queue.modify(&limit), Err(SrqError::Limit { limit: 5, size: 4 }));
    assert_eq!((queue.query().max_wr, queue.query().limit, queue.len()), (4, 0, 4));
    let dst = p.b.region(8);
    let sges = [sge(&dst, 0, 1), sge(&dst, 0, 1), sge(&dst, 0, 1)];
    let refused = queue.post(&RecvWr { wr_id: 1, sges: &sges });
    assert_eq!(refused, Err(PostError::TooManySges { given: 3, max: 2 }));
}

#[test]
fn a_queue_pair_in_error_says_that_it_takes_no_more() {
    let (mut p, queue) = pair(8, 0);
    let dst = p.b.region(5000);
    let sges = [sge(&dst, 0, 5000)];
    queue.post(&RecvWr { wr_id: 1, sges: &sges }).unwrap();
    post(&queue, 2).unwrap();
    let src = p.a.filled(5000, 1);
    p.a.send(1, SendOp::Send, &[sge(&src, 0, 5000)]);
    // Half of a message: its receive is taken.
    for (_, packet) in p.a.drain().iter().take(2) {
        p.b.handle(packet);
    }
    assert_eq!(queue.len(), 1);
    p.b.modify(&QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    });
    assert_eq!(ids(&p.b.received()), [(1, WcStatus::FlushError)]);
    assert_eq!(p.b.events, [AsyncEvent::LastWqeReached(Qpn::new(B))]);
    assert_eq!(queue.len(), 1, "what is in the shared queue stays there");
    p.b.modify(&QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    });
    assert_eq!(p.b.events.len(), 1);
}

#[test]
fn many_threads_take_each_receive_once() {
    const EACH: u64 = 2000;
    let mem = roce_verbs::mem::MemoryTable::new([1; 32], &roce_verbs::DeviceLimits::software(1));
    let queue = srq(mem.alloc_pd().unwrap(), 64, 0);
    let senders: Vec<_> = (0..3u32)
        .map(|n| {
            let queue = queue.clone();
            thread::spawn(move || {
                let setup = Setup::default();
                let a = Side::new(A, &setup);
                let b = Side::with(B, &setup, |c| c.srq = Some(queue));
                let mut p = Pair::up(setup, a, b);
                let mut got = Vec::new();
                for _ in 0..EACH {
                    p.a.send(u64::from(n), SendOp::Send, &[]);
                    while p.b.qp.state() == QpState::Rts {
                        p.run_with(Duration::from_millis(1), |_, _| Fate::Deliver);
                        if !p.a.completions().is_empty() {
                            break;
                        }
                        thread::yield_now();
                    }
                    got.extend(p.b.received().iter().map(|c| c.wr_id));
                }
                got
            })
        })
        .collect();
    let mut next = 0;
    while next < 3 * EACH {
        match post(&queue, next) {
            Ok(()) => next += 1,
            Err(_) => thread::yield_now(),
        }
    }
    let mut all: Vec<u64> = senders.into_iter().flat_map(|t| t.join().unwrap()).collect();
    all.sort_unstable();
    assert_eq!(all, (0..3 * EACH).collect::<Vec<_>>());
    assert!(queue.is_empty());
}

#[test]
fn a_limit_may_be_as_large_as_the_queue_and_no_larger() {
    let (p, queue) = pair(4, 0);
    let limit = |limit| SrqModify {
        limit: Some(limit),
        ..SrqModify::default()
    };
    assert!(queue.is_empty());
    (0..4).for_each(|id| post(&queue, id).unwrap());
    assert!(!queue.is_empty());
    assert_eq!(queue.modify(&limit(4)), Ok(None));
    assert_eq!(queue.modify(&limit(5)), Err(SrqError::Limit { limit: 5, size: 4 }));
    drop(p);
}

#[test]
fn a_completion_queue_shrinks_to_what_it_holds_and_forgets_a_queue_pair() {
    let setup = Setup::default();
    let mut p = Pair::new(setup.clone());
    let cq = p.a.send_cq.clone();
    assert!(cq.is_empty());
    let (src, dst) = (p.a.filled(8, 1), p.b.region(8));
    for id in 0..3 {
        p.a.send(id, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 8)]);
    }
    p.run();
    assert!(!cq.is_empty());
    assert_eq!((cq.peek(2), cq.peek(9)), (2, 3));
    assert!(cq.resize(2).is_err() && cq.resize(0).is_err());
    assert_eq!(cq.capacity(), setup.cqe);
    assert!(cq.resize(3).is_ok());
    assert_eq!(cq.capacity(), 3);
    cq.forget(Qpn::new(B));
    assert_eq!(cq.len(), 3);
    cq.forget(Qpn::new(A));
    assert_eq!(cq.len(), 0);
    assert!(cq.resize(0).is_err());
}

#[test]
fn a_completion_queue_that_overflows_says_so_once() {
    let cq = CompletionQueue::new(7, 1, None);
    assert_eq!(cq.handle(), 7);
    assert_eq!(cq.push(Completion::default()), Ok(()));
    assert_eq!(cq.push(Completion::default()), Err(Some(AsyncEvent::CqError(7))));
    assert_eq!(cq.push(Completion::default()), Err(None));
    let _ = cq.poll(&mut Vec::new(), 9);
    assert_eq!(cq.push(Completion::default()), Err(None), "it is of no use any more");
}

#[test]
fn the_number_of_a_queue_that_is_gone_is_free_in_its_domain() {
    let setup = Setup::default();
    let side = Side::new(A, &setup);
    let queue = || {
        let basic = srq(side.pd, 4, 0);
        SharedReceiveQueue::new(SrqConfig {
            srq_type: SrqType::Xrc,
            cq: Some(side.recv_cq.clone()),
            ..basic.config().clone()
        })
    };
    let domain = XrcDomain::new();
    assert!(domain.is_empty());
    let first = queue();
    assert!(domain.attach(&first) && !domain.is_empty());
    assert!(!domain.attach(&queue()), "taken");
    assert!(!domain.attach(&srq(side.pd, 4, 0)), "no queue of XRC");
    drop(first);
    assert!(domain.is_empty());
    assert!(domain.attach(&queue()));
}
