//! Receive work requests hidden from one packet, a fault on demand: a packet that takes one is refused as by a receiver that is not ready,
//! and nothing else changes.

use roce_bth::{NakCode, Opcode as O, Packet, Psn, RnrTimer, Syndrome};
use roce_verbs::{AccessFlags, Mtu, QpState, QpType};

use crate::harness::*;

const FULL: [u8; 256] = [7; 256];

/// Answer to the packet from which the receives were hidden.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    NotReady,
    Acknowledged,
    Refused(NakCode),
    None,
}

struct Case {
    name: &'static str,
    /// Packets that come before, with the receives shown.
    before: Vec<Raw>,
    packet: Raw,
    answer: Answer,
    /// Receives that are completed then.
    received: usize,
}

fn setup() -> Setup {
    Setup {
        mtu: Mtu::B256,
        min_rnr_timer: 5,
        quiet: true,
        ..Setup::default()
    }
}

fn raw(opcode: O, psn: u32) -> Raw {
    Raw::new(opcode, B, Psn::new(setup().psn).add(psn).value()).ack_req()
}

/// Hides the receives from a packet.
fn handle(b: &mut Side, raw: &Raw) {
    let bytes = raw.bytes();
    b.qp.hide_receives(Some(&Packet::parse(&bytes).unwrap()));
    b.handle(&bytes);
    b.qp.hide_receives(None);
}

/// Returns the last acknowledgement that B sends now.
fn answer(b: &mut Side) -> Answer {
    let mut aeths = b.headers().into_iter().filter_map(|h| h.aeth.map(|aeth| aeth.syndrome));
    match aeths.next_back() {
        Some(Syndrome::Rnr(timer)) => {
            assert_eq!(timer, RnrTimer::new(5));
            Answer::NotReady
        }
        Some(Syndrome::Nak(code)) => Answer::Refused(code),
        Some(_) => Answer::Acknowledged,
        None => Answer::None,
    }
}

fn received(b: &Side) -> usize {
    b.received().iter().filter(|c| c.is_ok()).count()
}

fn cases(write: impl Fn(O, u32, u32) -> Raw) -> Vec<Case> {
    let case = |name, before: &[Raw], packet: Raw, answer, received| Case {
        name,
        before: before.to_vec(),
        packet,
        answer,
        received,
    };
    let first = raw(O::RcSendFirst, 0).payload(&FULL);
    let last = raw(O::RcSendLast, 1).payload(&[1]);
    let begun = write(O::RcWriteFirst, 0, 300);
    use Answer as A;
    vec![
        case("a SEND", &[], raw(O::RcSendOnly, 0), A::NotReady, 0),
        case("the first packet of a SEND", &[], first.clone(), A::NotReady, 0),
        case(
            "the last packet of a SEND",
            std::slice::from_ref(&first),
            last.clone(),
            A::Acknowledged,
            1,
        ),
        case(
            "a WRITE with immediate",
            &[],
            write(O::RcWriteOnlyImm, 0, 8),
            A::NotReady,
            0,
        ),
        case(
            "the last packet of a WRITE with immediate",
            std::slice::from_ref(&begun),
            raw(O::RcWriteLastImm, 1).payload(&[1; 44]),
            A::NotReady,
            0,
        ),
        case("a WRITE", &[], write(O::RcWriteOnly, 0, 8), A::Acknowledged, 0),
        case(
            "a SEND in the middle of a WRITE",
            &[begun],
            raw(O::RcSendOnly, 1),
            A::Refused(NakCode::InvalidRequest),
            0,
        ),
        case(
            "a SEND again",
            &[raw(O::RcSendOnly, 0)],
            raw(O::RcSendOnly, 0),
            A::Acknowledged,
            1,
        ),
        case(
            "a SEND beyond a gap",
            &[],
            raw(O::RcSendOnly, 1),
            A::Refused(NakCode::PsnSequenceError),
            0,
        ),
        case(
            "a WRITE that closes the gap before a SEND",
            &[raw(O::RcSendOnly, 1)],
            write(O::RcWriteOnly, 0, 8),
            A::Acknowledged,
            1,
        ),
    ]
}

#[test]
fn only_a_packet_that_takes_a_receive_finds_none() {
    for drained in [true, false] {
        let count = cases(|opcode, psn, _| raw(opcode, psn)).len();
        for n in 0..count {
            let mut p = Pair::new(setup());
            let dst = p.b.region(512);
            (0..2).for_each(|id| p.b.recv(id, &[sge(&dst, 0, 512)]));
            let write = |opcode, psn, len: u32| {
                let payload = vec![1; len.min(256) as usize];
                raw(opcode, psn).reth(dst.addr(), dst.rkey(), len).payload(&payload)
            };
            let case = cases(write).remove(n);
            case.before.iter().for_each(|raw| p.b.handle(&raw.bytes()));
            if drained {
                // Otherwise the answer to these packets may still be due.
                p.b.drain();
            }
            handle(&mut p.b, &case.packet);
            assert_eq!(answer(&mut p.b), case.answer, "{}", case.name);
            assert_eq!(received(&p.b), case.received, "{}", case.name);
            if case.answer == Answer::NotReady {
                assert_eq!(
                    (p.b.qp.state(), p.b.qp.recv_queue_len()),
                    (QpState::Rts, 2),
                    "{}",
                    case.name
                );
                p.b.handle(&case.packet.bytes());
                let completes = usize::from(case.packet.header.bth.opcode.info().position.ends());
                assert_eq!(received(&p.b), completes, "{}: sent again", case.name);
            }
        }
    }
}

#[test]
fn what_is_not_permitted_is_refused_as_that() {
    let mut p = Pair::new(Setup {
        access: AccessFlags::LOCAL_WRITE,
        ..setup()
    });
    let dst = p.b.region(512);
    p.b.recv(1, &[sge(&dst, 0, 512)]);
    let packet = raw(O::RcWriteOnlyImm, 0)
        .reth(dst.addr(), dst.rkey(), 8)
        .payload(&[1; 8]);
    handle(&mut p.b, &packet);
    assert_eq!(answer(&mut p.b), Answer::Refused(NakCode::InvalidRequest));
}

/// There is nobody to be told that the receiver is not ready.
#[test]
fn unreliable_connections_find_their_receives() {
    let mut p = Pair::of(QpType::Uc, setup());
    let dst = p.b.region(512);
    p.b.recv(1, &[sge(&dst, 0, 512)]);
    let packet = Raw::new(O::UcSendOnly, B, setup().psn).payload(&[1; 8]);
    handle(&mut p.b, &packet);
    assert_eq!(p.b.received().len(), 1);
}
