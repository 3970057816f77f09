//! Extended reliable connections (IBTA Annex A14).

use std::{sync::Arc, time::Duration};

use roce_bth::{Class, NakCode, Opcode, Service, Syndrome};
use roce_qp::{CompletionQueue, SharedReceiveQueue, SrqConfig, XrcDomain};
use roce_verbs::mem::PdHandle;
use roce_verbs::{
    AsyncEvent, Completion, Mtu, Payload, QpState, QpType, Qpn, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr,
    SrqAttr, SrqType, Srqn, Target, WcOpcode, WcStatus,
};

use crate::harness::*;

/// An initiator, a target, and what the target's domain has.
struct Extended {
    p: Pair,
    domain: Arc<XrcDomain>,
}

struct Queue {
    srq: Arc<SharedReceiveQueue>,
    cq: Arc<CompletionQueue>,
    pd: PdHandle,
}

fn extended() -> Extended {
    let setup = Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    };
    let domain = XrcDomain::new();
    let a = Side::with(A, &setup, |c| c.qp_type = QpType::XrcIni);
    let b = Side::with(B, &setup, |c| {
        c.qp_type = QpType::XrcTgt;
        c.xrcd = Some(domain.clone());
    });
    Extended {
        p: Pair::up(setup, a, b),
        domain,
    }
}

impl Extended {
    /// A queue in a protection domain of its own.
    fn queue(&self, number: u32) -> Queue {
        let pd = self.p.b.mem.alloc_pd().unwrap();
        let cq = CompletionQueue::new(100 + number, 64, None);
        let srq = SharedReceiveQueue::new(SrqConfig {
            handle: number,
            number: Srqn::new(number),
            pd,
            srq_type: SrqType::Xrc,
            attr: SrqAttr {
                max_wr: 16,
                max_sge: 1,
                limit: 0,
            },
            cq: Some(cq.clone()),
        });
        assert!(self.domain.attach(&srq));
        Queue { srq, cq, pd }
    }
}

impl Queue {
    fn received(&self) -> Vec<Completion> {
        let mut out = Vec::new();
        self.cq.poll(&mut out, usize::MAX).unwrap();
        out
    }

    fn target(&self) -> Target {
        Target::Srq(self.srq.number())
    }
}

fn ids(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

#[test]
fn one_connection_delivers_to_many_queues() {
    let mut x = extended();
    let queues = [x.queue(7), x.queue(9)];
    let src = x.p.a.filled(700, 1);
    for (i, q) in queues.iter().enumerate() {
        let dst = x.p.b.mem.alloc_region(q.pd, 700, ALL).unwrap();
        for wr_id in 0..2 {
            let sges = [sge(&dst, 0, 700)];
            q.srq.post(&RecvWr { wr_id, sges: &sges }).unwrap();
        }
        for n in 0..2 {
            let imm = (10 * i + n) as u32;
            x.p.a.send_to(
                u64::from(imm),
                SendOp::SendWithImm(imm),
                &[sge(&src, 0, 700)],
                q.target(),
            );
        }
        x.p.run();
        assert_eq!(bytes(&dst, 0, 700), pattern(700, 1));
    }
    for (i, q) in queues.iter().enumerate() {
        let got: Vec<_> = q
            .received()
            .iter()
            .map(|c| (c.wr_id, c.imm as usize, c.qpn, c.byte_len))
            .collect();
        assert_eq!(got, [(0, 10 * i, Qpn::new(B), 700), (1, 10 * i + 1, Qpn::new(B), 700)]);
    }
    assert_eq!(x.p.a.completions().len(), 4);
    assert!(
        x.p.b.received().is_empty(),
        "nothing completes in the queue pair's own queue"
    );
}

#[test]
fn every_request_names_the_queue_and_responses_do_not() {
    let mut x = extended();
    let q = x.queue(7);
    let dst = x.p.b.mem.alloc_region(q.pd, 2000, ALL).unwrap();
    let src = x.p.a.filled(2000, 3);
    let back = x.p.a.region(2000);
    q.srq.post(&RecvWr { wr_id: 4, sges: &[] }).unwrap();
    let word = x.p.a.region(8);
    let add = SendOp::FetchAdd {
        remote: at(&dst, 1992),
        add: 1,
    };
    x.p.a
        .send_to(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 700)], q.target());
    x.p.a.send_to(
        2,
        SendOp::WriteWithImm(at(&dst, 1000), 5),
        &[sge(&src, 0, 300)],
        q.target(),
    );
    x.p.a
        .send_to(3, SendOp::Read(at(&dst, 0)), &[sge(&back, 0, 1300)], q.target());
    x.p.a.send_to(4, add, &[sge(&word, 0, 8)], q.target());
    let mut seen = Vec::new();
    x.p.run_with(Duration::from_secs(1), |dir, packet| {
        let info = packet.header.bth.opcode.info();
        assert_eq!(info.service, Service::Xrc);
        let named = packet.header.xrceth().map(|h| h.srqn);
        assert_eq!(named, (dir == Dir::AtoB).then_some(Srqn::new(7)), "{}", info.name);
        seen.push(packet.header.bth.opcode);
        Fate::Deliver
    });
    assert_eq!(
        ids(&x.p.a.completions()),
        [1, 2, 3, 4].map(|id| (id, WcStatus::Success))
    );
    assert_eq!(bytes(&back, 0, 700), pattern(2000, 3)[..700]);
    assert_eq!(bytes(&back, 1000, 300), pattern(2000, 3)[..300]);
    let got = q.received();
    assert_eq!(
        (got[0].wr_id, got[0].opcode, got[0].imm),
        (4, WcOpcode::RecvRdmaWithImm, 5)
    );
    for opcode in [
        Opcode::XrcWriteMiddle,
        Opcode::XrcReadResponseLast,
        Opcode::XrcAtomicAcknowledge,
    ] {
        assert!(seen.contains(&opcode), "{opcode}");
    }
}

#[test]
fn keys_are_those_of_the_queues_protection_domain() {
    let mut x = extended();
    let (mine, other) = (x.queue(7), x.queue(9));
    let dst = x.p.b.mem.alloc_region(mine.pd, 100, ALL).unwrap();
    let src = x.p.a.filled(100, 1);
    x.p.a
        .send_to(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 100)], mine.target());
    x.p.run();
    assert_eq!(ids(&x.p.a.completions()), [(1, WcStatus::Success)]);
    x.p.a
        .send_to(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 100)], other.target());
    x.p.run();
    assert_eq!(ids(&x.p.a.completions()), [(2, WcStatus::RemoteAccessError)]);
    assert_eq!(x.p.b.events, [AsyncEvent::QpAccessError(Qpn::new(B))]);
}

#[test]
fn an_unknown_queue_is_refused() {
    for detach in [false, true] {
        let mut x = extended();
        let q = x.queue(7);
        let number = match detach {
            true => {
                x.domain.detach(Srqn::new(7));
                7
            }
            false => 8,
        };
        q.srq.post(&RecvWr { wr_id: 1, sges: &[] }).unwrap();
        x.p.a.send_to(1, SendOp::Send, &[], Target::Srq(Srqn::new(number)));
        let mut naks = Vec::new();
        x.p.run_with(Duration::from_secs(1), |_, packet| {
            naks.extend(packet.header.aeth().map(|a| a.syndrome));
            Fate::Deliver
        });
        assert_eq!(naks, [Syndrome::Nak(NakCode::InvalidRequest)]);
        assert_eq!(ids(&x.p.a.completions()), [(1, WcStatus::RemoteInvalidRequestError)]);
        assert_eq!(x.p.b.events, [AsyncEvent::QpAccessError(Qpn::new(B))]);
        assert_eq!((x.p.b.qp.state(), q.srq.len()), (QpState::Err, 1));
    }
}

#[test]
fn a_queue_that_is_gone_is_unknown() {
    let x = extended();
    let q = x.queue(7);
    assert!(
        !x.domain.attach(&SharedReceiveQueue::new(q.srq.config().clone())),
        "the number is taken"
    );
    assert_eq!(x.domain.len(), 1);
    drop(q.srq);
    assert!(x.domain.is_empty() && x.domain.find(Srqn::new(7)).is_none());
    let basic = SrqConfig {
        srq_type: SrqType::Basic,
        ..x.queue(8).srq.config().clone()
    };
    assert!(!x.domain.attach(&SharedReceiveQueue::new(basic)));
}

#[test]
fn losses_are_made_good() {
    let mut x = extended();
    let q = x.queue(7);
    let dst = x.p.b.mem.alloc_region(q.pd, 4000, ALL).unwrap();
    let src = x.p.a.filled(4000, 1);
    let back = x.p.a.region(4000);
    for wr_id in 0..4 {
        let sges = [sge(&dst, wr_id as usize * 1000, 1000)];
        q.srq.post(&RecvWr { wr_id, sges: &sges }).unwrap();
    }
    for n in 0..4 {
        x.p.a
            .send_to(n, SendOp::Send, &[sge(&src, n as usize * 1000, 1000)], q.target());
    }
    x.p.a
        .send_to(9, SendOp::Read(at(&dst, 0)), &[sge(&back, 0, 4000)], q.target());
    let mut n = 0;
    x.p.run_with(Duration::from_secs(60), |_, _| {
        n += 1;
        if n % 5 == 0 { Fate::Drop } else { Fate::Deliver }
    });
    assert_eq!(
        ids(&x.p.a.completions()),
        [0, 1, 2, 3, 9].map(|id| (id, WcStatus::Success))
    );
    assert_eq!(bytes(&back, 0, 4000), pattern(4000, 1));
    assert_eq!(ids(&q.received()), [0, 1, 2, 3].map(|id| (id, WcStatus::Success)));
}

#[test]
fn an_empty_queue_makes_the_initiator_wait() {
    let mut x = extended();
    let (empty, full) = (x.queue(7), x.queue(9));
    full.srq.post(&RecvWr { wr_id: 1, sges: &[] }).unwrap();
    x.p.a.send_to(1, SendOp::Send, &[], empty.target());
    x.p.a.send_to(2, SendOp::Send, &[], full.target());
    x.p.run_with(Duration::from_millis(2), |_, _| Fate::Deliver);
    assert!(x.p.a.completions().is_empty());
    empty.srq.post(&RecvWr { wr_id: 2, sges: &[] }).unwrap();
    x.p.run();
    assert_eq!(ids(&x.p.a.completions()), [1, 2].map(|id| (id, WcStatus::Success)));
    assert_eq!(
        (ids(&empty.received()), ids(&full.received())),
        (vec![(2, WcStatus::Success)], vec![(1, WcStatus::Success)])
    );
}

#[test]
fn each_end_has_its_half() {
    let mut x = extended();
    let q = x.queue(7);
    let wr = SendWr {
        wr_id: 1,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&[]),
    };
    assert!(x.p.b.try_send_to(&wr, q.target()).is_err(), "a target sends nothing");
    assert!(x.p.a.try_send(&wr).is_err(), "a message must name a queue");
    // Local operations name none.
    let local = SendWr {
        op: SendOp::LocalInvalidate(RKey(1)),
        ..wr
    };
    assert!(x.p.a.try_send(&local).is_ok());
    // Responses to a target and requests to an initiator are dropped.
    let mut x = extended();
    let ack = Raw::new(Opcode::XrcAcknowledge, B, 0).bytes();
    x.p.b.handle(&ack);
    x.p.a.handle(&Raw::new(Opcode::XrcSendOnly, A, 0).bytes());
    assert_eq!((x.p.a.counters.dropped_opcode, x.p.b.counters.dropped_opcode), (1, 1));
    for opcode in Opcode::ALL.iter().filter(|o| o.info().service != Service::Xrc) {
        x.p.a.handle(&Raw::new(*opcode, A, 0).bytes());
        x.p.b.handle(&Raw::new(*opcode, B, 0).bytes());
    }
    assert!(x.p.a.drain().is_empty() && x.p.b.drain().is_empty());
    assert_eq!((x.p.a.qp.state(), x.p.b.qp.state()), (QpState::Rts, QpState::Rts));
}

#[test]
fn a_read_asked_for_again_is_checked_against_the_domain_of_its_queue() {
    let mut x = extended();
    let (q, other) = (x.queue(7), x.queue(9));
    let dst = x.p.b.mem.alloc_region(q.pd, 600, ALL).unwrap();
    let back = x.p.a.region(600);
    x.p.a
        .send_to(1, SendOp::Read(at(&dst, 0)), &[sge(&back, 0, 600)], q.target());
    let request = x.p.a.drain().remove(0).1;
    x.p.b.handle(&request);
    assert_eq!(x.p.b.drain().len(), 3);
    // The same again is answered again; in the name of another queue the key is wrong.
    x.p.b.handle(&request);
    assert_eq!(x.p.b.drain().len(), 3);
    let RemoteAddr { addr, rkey } = at(&dst, 0);
    let mut forged = Raw::new(Opcode::XrcReadRequest, B, x.p.setup.psn).reth(addr, rkey, 600);
    for (number, answers) in [(other.srq.number(), 1), (Srqn::new(55), 0)] {
        forged.header.xrceth = Some(roce_bth::XrcEth {
            reserved: 0,
            srqn: number,
        });
        x.p.b.handle(&forged.bytes());
        let sent = x.p.b.headers();
        assert_eq!(sent.len(), answers);
        assert!(sent.iter().all(|h| h.bth.opcode.info().class == Class::Acknowledge));
    }
    assert_eq!(x.p.b.counters.dropped_requests, 1);
    assert_eq!(x.p.b.qp.state(), QpState::Rts);
}
