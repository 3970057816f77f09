//! Which packets a queue pair expects, as it tells its driver, and what only those may change.

use roce_bth::{Aeth, Credits, Msn, Opcode, Packet, Syndrome};
use roce_qp::Origin;
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

fn origin(side: &Side, raw: &Raw, port: u16) -> Origin {
    side.qp.origin(&Packet::parse(&raw.bytes()).unwrap(), port)
}

fn learn(side: &mut Side, raw: &Raw, port: u16) -> bool {
    side.qp.learn_source(&Packet::parse(&raw.bytes()).unwrap(), port)
}

/// Two queue pairs whose peers have named no port.
fn anonymous(qp_type: QpType, setup: &Setup) -> Pair {
    let [mut a, mut b] = [A, B].map(|qpn| Side::with(qpn, setup, |c| c.qp_type = qp_type));
    (a.names_port, b.names_port) = (false, false);
    Pair::up(setup.clone(), a, b)
}

/// Distance from the expected PSN, port, and whose the packet is.
type Origins = &'static [(i32, u16, Origin)];

fn check_origins(side: &Side, opcode: Opcode, expected: u32, cases: Origins) {
    for (ahead, port, origin_) in cases {
        let raw = match opcode {
            Opcode::RcAcknowledge => ack(A, expected.wrapping_add_signed(*ahead)),
            _ => Raw::new(opcode, B, expected.wrapping_add_signed(*ahead)),
        };
        assert_eq!(origin(side, &raw, *port), *origin_, "{opcode:?} {ahead} from {port}");
    }
}

#[test]
fn a_port_is_learned_from_a_packet_at_the_expected_psn() {
    use Origin::*;
    let setup = Setup::default();
    let mut p = anonymous(QpType::Rc, &setup);
    let opcode = Opcode::RcSendOnly;
    check_origins(
        &p.b,
        opcode,
        setup.psn,
        &[(0, 1, Unproven), (1, 1, Stranger), (-1, 1, Stranger)],
    );
    assert!(!learn(&mut p.b, &Raw::new(opcode, B, setup.psn + 1), 1), "a stranger's");
    assert!(learn(&mut p.b, &Raw::new(opcode, B, setup.psn), 1));
    check_origins(
        &p.b,
        opcode,
        setup.psn,
        &[(0, 1, Peer), (9, 1, Peer), (0, 2, Unproven), (9, 2, Stranger)],
    );
    // A peer that has changed its port sends the packet again.
    assert!(!learn(&mut p.b, &Raw::new(opcode, B, setup.psn), 2));
    assert!(learn(&mut p.b, &Raw::new(opcode, B, setup.psn), 2));
    check_origins(&p.b, opcode, setup.psn, &[(9, 2, Peer), (9, 1, Stranger)]);
}

#[test]
fn a_port_of_responses_is_learned_from_one_to_the_oldest_request() {
    use Origin::*;
    let setup = Setup::default();
    let mut p = anonymous(QpType::Rc, &setup);
    let opcode = Opcode::RcAcknowledge;
    check_origins(&p.a, opcode, setup.psn, &[(0, 1, Stranger)]);
    let (src, dst) = (p.a.filled(3000, 1), p.b.region(3000));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 3000)]);
    assert_eq!(p.a.drain().len(), 1, "one packet until the peer's port is known");
    check_origins(&p.a, opcode, setup.psn, &[(0, 1, Unproven), (1, 1, Stranger)]);
    assert!(learn(&mut p.a, &ack(A, setup.psn), 1));
    assert_eq!(p.a.drain().len(), 2);
    check_origins(
        &p.a,
        opcode,
        setup.psn,
        &[(2, 1, Peer), (0, 2, Unproven), (2, 2, Stranger)],
    );
}

/// Its messages may begin at any PSN.
#[test]
fn the_first_port_of_an_unreliable_connection_is_the_peers() {
    use Origin::*;
    let setup = Setup::default();
    let mut p = anonymous(QpType::Uc, &setup);
    let opcode = Opcode::UcSendOnly;
    check_origins(
        &p.b,
        opcode,
        setup.psn,
        &[(0, 1, Unproven), (900, 1, Peer), (900, 2, Peer)],
    );
    assert!(learn(&mut p.b, &Raw::new(opcode, B, setup.psn), 1));
    check_origins(
        &p.b,
        opcode,
        setup.psn,
        &[(900, 1, Peer), (0, 2, Unproven), (900, 2, Stranger)],
    );
}

#[test]
fn a_named_port_is_the_only_one() {
    use Origin::*;
    let setup = Setup::default();
    let mut p = Pair::new(setup.clone());
    let opcode = Opcode::RcSendOnly;
    check_origins(
        &p.b,
        opcode,
        setup.psn,
        &[(0, PORT, Peer), (9000, PORT, Peer), (0, 1, Stranger)],
    );
    for (port, trusted) in [(1, false), (PORT, true), (1, false)] {
        assert_eq!(learn(&mut p.b, &Raw::new(opcode, B, setup.psn), port), trusted);
    }
}

#[test]
fn congestion_notifications_name_a_recent_packet() {
    use Origin::*;
    let setup = Setup::default();
    let mut p = Pair::new(setup.clone());
    let (src, dst) = (p.a.filled(3000, 1), p.b.region(3000));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 3000)]);
    assert_eq!(p.a.drain().len(), 3);
    // Of requests, three of which are outstanding.
    let cases: Origins = &[
        (-1025, PORT, Stranger),
        (-1024, PORT, Peer),
        (0, PORT, Peer),
        (2, PORT, Peer),
        (2, 1, Stranger),
        (3, PORT, Stranger),
    ];
    check_origins(&p.a, Opcode::Cnp, setup.psn, cases);
    // Of responses, as far back as one reply may reach.
    let cases: Origins = &[
        (-4097, PORT, Stranger),
        (-4096, PORT, Peer),
        (-1, PORT, Peer),
        (-1, 1, Stranger),
        (0, PORT, Stranger),
        (1, PORT, Stranger),
    ];
    check_origins(&p.a, Opcode::Cnp, setup.psn ^ 0x5555, cases);
    let p = anonymous(QpType::Rc, &setup);
    check_origins(&p.a, Opcode::Cnp, setup.psn, &[(-1, 1, Stranger), (-1, PORT, Stranger)]);
}
