//! Which packets a queue pair expects, as it tells its driver, and what only those may change.

use roce_bth::{Aeth, Credits, Msn, Opcode, Packet, Syndrome};
use roce_verbs::{AsyncEvent, QpAttr, QpState, QpType, Qpn, SendOp};

use crate::harness::*;

fn expects(side: &Side, raw: &Raw) -> bool {
    side.qp.expects(&Packet::parse(&raw.bytes()).unwrap())
}

fn ack(qpn: u32, psn: u32) -> Raw {
    Raw::new(Opcode::RcAcknowledge, qpn, psn).aeth(Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn: Msn::new(0),
    })
}

#[test]
fn requests_are_expected_near_the_next_psn() {
    // The default start is close to the wrap.
    let setup = Setup::default();
    let p = Pair::new(setup.clone());
    for opcode in [Opcode::RcSendOnly, Opcode::RcWriteMiddle, Opcode::RcReadRequest] {
        for (ahead, expected) in [
            (0, true),
            (1023, true),
            (1024, false),
            (1 << 23, false),
            ((1 << 24) - 1024, true),
            ((1 << 24) - 1025, false),
        ] {
            let raw = Raw::new(opcode, B, setup.psn.wrapping_add(ahead));
            assert_eq!(expects(&p.b, &raw), expected, "{ahead}");
        }
    }
    assert!(!expects(&p.b, &Raw::new(Opcode::Cnp, B, setup.psn)));
}

#[test]
fn responses_are_expected_to_what_is_outstanding() {
    let setup = Setup::default();
    let mut p = Pair::new(setup.clone());
    assert!(!expects(&p.a, &ack(A, setup.psn)), "nothing was sent");
    let (src, dst) = (p.a.filled(3000, 1), p.b.region(3000));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 3000)]);
    assert!(!expects(&p.a, &ack(A, setup.psn)), "nothing was sent");
    assert_eq!(p.a.drain().len(), 3);
    // A selective ACK may acknowledge nothing more than was acknowledged before.
    for (ahead, expected) in [(-2, false), (-1, true), (0, true), (2, true), (3, false)] {
        let raw = Raw::new(Opcode::SelectiveAck, A, setup.psn.wrapping_add_signed(ahead));
        assert_eq!(expects(&p.a, &raw), expected, "{ahead}");
    }
    for (ahead, expected) in [(-1, false), (0, true), (2, true), (3, false), (1 << 20, false)] {
        let raw = ack(A, setup.psn.wrapping_add_signed(ahead));
        assert_eq!(expects(&p.a, &raw), expected, "{ahead}");
        // One that is not, acknowledges nothing.
        if !expected {
            p.a.handle(&raw.bytes());
            assert!(!p.a.qp.heard());
        }
    }
    assert_eq!(p.a.counters.dropped_responses, 3);
    p.a.handle(&ack(A, setup.psn + 2).bytes());
    assert!(p.a.qp.heard());
    assert_eq!(p.a.completions().len(), 1);
    assert!(!expects(&p.a, &ack(A, setup.psn + 2)), "it was answered");
}

#[test]
fn a_queue_pair_that_takes_no_packets_expects_none() {
    let setup = Setup::default();
    let request = Raw::new(Opcode::RcSendOnly, B, setup.psn);
    let mut p = Pair::new(setup.clone());
    assert!(expects(&p.b, &request));
    for state in [QpState::Err, QpState::Reset] {
        p.b.modify(&QpAttr {
            state: Some(state),
            ..QpAttr::default()
        });
        assert!(!expects(&p.b, &request), "{state:?}");
    }
    // An XRC initiator receives nothing but answers.
    let mut side = Side::with(B, &setup, |c| c.qp_type = QpType::XrcIni);
    side.bring_up(&setup, A, setup.psn, 0);
    assert!(!expects(&side, &Raw::new(Opcode::XrcSendOnly, B, setup.psn)));
}

#[test]
fn an_unreliable_connection_expects_what_follows_its_last_packet() {
    let setup = Setup::default();
    let mut p = Pair::of(QpType::Uc, setup.clone());
    p.b.recv(1, &[]);
    let raw = |ahead: u32| Raw::new(Opcode::UcSendOnly, B, setup.psn.wrapping_add(ahead));
    assert!(expects(&p.b, &raw(5)) && !expects(&p.b, &raw(100_000)));
    p.b.handle(&raw(100_000).bytes());
    assert!(!p.b.qp.heard(), "it may be anybody's");
    assert!(expects(&p.b, &raw(100_001)) && !expects(&p.b, &raw(5)));
    p.b.handle(&raw(100_001).bytes());
    assert!(p.b.qp.heard());
}

#[test]
fn only_a_packet_at_its_place_establishes_a_connection() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let opcode = match qp_type {
            QpType::Rc => Opcode::RcSendOnly,
            _ => Opcode::UcSendOnly,
        };
        let setup = Setup::default();
        let mut p = Pair::of(qp_type, setup.clone());
        p.b.modify(&QpAttr {
            state: Some(QpState::Reset),
            ..QpAttr::default()
        });
        p.b.enter_rtr(&setup, A, setup.psn);
        p.b.recv(1, &[]);
        for ahead in [100_000, 1 << 23, 5_000_000] {
            let raw = Raw::new(opcode, B, setup.psn.wrapping_add(ahead));
            p.b.handle(&raw.bytes());
            assert!(p.b.events.is_empty() && !p.b.qp.heard(), "{qp_type:?} {ahead}");
        }
        let psn = match qp_type {
            QpType::Rc => setup.psn,
            _ => setup.psn.wrapping_add(5_000_001),
        };
        p.b.handle(&Raw::new(opcode, B, psn).bytes());
        assert_eq!(p.b.events, [AsyncEvent::CommunicationEstablished(Qpn::new(B))]);
        assert!(p.b.qp.heard());
    }
}
