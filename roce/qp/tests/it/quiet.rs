//! Packets beyond a gap are kept of peers that know nothing of it, and go back: rdma_rxe, hardware.

use std::time::Duration;

use roce_bth::{Header, NakCode, Opcode, Syndrome};
use roce_qp::TxKind;
use roce_verbs::{Mtu, RKey, RemoteAddr, SendOp};

use crate::harness::*;

const MTU: usize = 256;

fn quiet() -> Setup {
    Setup {
        mtu: Mtu::B256,
        psn: 100,
        quiet: true,
        ..Setup::default()
    }
}

/// Answers to a script's peer: PSNs of acknowledgements, and of NAKs.
fn heard(side: &mut Side) -> Vec<(u32, Option<NakCode>)> {
    let said = |h: Header| match h.aeth.map(|a| a.syndrome) {
        Some(Syndrome::Ack(_)) => (h.bth.psn.value(), None),
        Some(Syndrome::Nak(code)) => (h.bth.psn.value(), Some(code)),
        other => panic!("{other:?}"),
    };
    side.headers().into_iter().map(said).collect()
}

/// One of the packets of a WRITE of ten.
fn part(key: RKey, va: u64, at: u32, salt: u8) -> Vec<u8> {
    let opcode = match at {
        0 => Opcode::RcWriteFirst,
        9 => Opcode::RcWriteLast,
        _ => Opcode::RcWriteMiddle,
    };
    let all = pattern(10 * MTU, salt);
    let raw = Raw::new(opcode, B, 100 + at).payload(&all[at as usize * MTU..][..MTU]);
    match at {
        0 => raw.reth(va, key, 10 * MTU as u32).ack_req(),
        _ => raw.ack_req(),
    }
    .bytes()
}

/// Brings it, and returns what is said to it.
fn give_part(side: &mut Side, to: RemoteAddr, at: u32) -> Vec<(u32, Option<NakCode>)> {
    side.handle(&part(to.rkey, to.addr, at, 3));
    heard(side)
}

#[test]
fn a_peer_that_goes_back_is_acknowledged_no_further_than_it_has_come() {
    let mut p = Pair::new(quiet());
    let dst = p.b.region(10 * MTU);
    let to = at(&dst, 0);
    let give = |side: &mut Side, at: u32| give_part(side, to, at);
    let ack = |at: u32| vec![(100 + at, None)];
    assert_eq!(give(&mut p.b, 0), ack(0));
    assert_eq!(give(&mut p.b, 2), [(101, Some(NakCode::PsnSequenceError))]);
    // One is lost for good, which nobody is told of yet.
    for at in [3, 4, 6, 7] {
        assert_eq!(give(&mut p.b, at), [], "a gap is reported once");
    }
    assert_eq!(give(&mut p.b, 1), ack(1));
    // The one after it is lost once more, and not missed.
    assert_eq!(give(&mut p.b, 3), ack(3));
    assert_eq!(give(&mut p.b, 4), ack(4));
    assert_eq!(give(&mut p.b, 5), ack(5));
    assert_eq!(give(&mut p.b, 7), ack(7));
    assert_eq!(give(&mut p.b, 8), ack(8));
    assert_eq!(give(&mut p.b, 9), ack(9));
    assert_eq!(bytes(&dst, 0, 10 * MTU), pattern(10 * MTU, 3));
    assert_eq!(p.b.counters.naks_sent, 0, "a gap is no refusal");
}

#[test]
fn a_second_gap_is_reported_when_the_first_is_closed() {
    let mut p = Pair::new(quiet());
    let dst = p.b.region(10 * MTU);
    let to = at(&dst, 0);
    let give = |side: &mut Side, at: u32| give_part(side, to, at);
    for at in [0, 2, 4] {
        give(&mut p.b, at);
    }
    assert_eq!(give(&mut p.b, 1), [(101, None)]);
    assert_eq!(give(&mut p.b, 4), [(103, Some(NakCode::PsnSequenceError))]);
    assert_eq!(give(&mut p.b, 3), [(103, None)]);
    assert_eq!(give(&mut p.b, 5), [(105, None)]);
}

#[test]
fn a_kept_message_without_a_receive_is_refused_in_its_turn() {
    let mut p = Pair::new(quiet());
    let dst = p.b.region(MTU);
    p.b.recv(1, &[sge(&dst, 0, MTU)]);
    let send = |at: u32| {
        Raw::new(Opcode::RcSendOnly, B, 100 + at)
            .payload(&[at as u8; 8])
            .ack_req()
            .bytes()
    };
    p.b.handle(&send(1));
    assert_eq!(heard(&mut p.b), [(100, Some(NakCode::PsnSequenceError))]);
    p.b.handle(&send(0));
    assert_eq!(heard(&mut p.b), [(100, None)], "nothing of the second");
    p.b.handle(&send(1));
    let said = p.b.headers();
    assert!(
        matches!(said[..], [h] if h.bth.psn.value() == 101 && matches!(h.aeth.unwrap().syndrome, Syndrome::Rnr(_)))
    );
    p.b.recv(2, &[sge(&dst, 0, MTU)]);
    p.b.handle(&send(1));
    assert_eq!(heard(&mut p.b), [(101, None)]);
    assert_eq!(p.b.received().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn a_read_is_not_answered_before_it_comes_in_its_turn() {
    let mut p = Pair::new(quiet());
    let dst = p.b.filled(MTU, 5);
    let to = at(&dst, 0);
    let read = Raw::new(Opcode::RcReadRequest, B, 101)
        .reth(to.addr, to.rkey, 64)
        .bytes();
    let write = Raw::new(Opcode::RcWriteOnly, B, 100)
        .reth(to.addr, to.rkey, 8)
        .payload(&[1; 8])
        .bytes();
    p.b.handle(&read);
    assert_eq!(heard(&mut p.b), [(100, Some(NakCode::PsnSequenceError))]);
    p.b.handle(&write);
    assert_eq!(heard(&mut p.b), [(100, None)]);
    p.b.handle(&read);
    let answered = p.b.drain();
    assert!(matches!(&answered[..], [(TxKind::Response, bytes)] if bytes.len() >= 64));
}

#[test]
fn what_is_far_away_is_not_kept() {
    let mut p = Pair::new(quiet());
    let dst = p.b.region(MTU);
    let to = at(&dst, 0);
    let write = |psn: u32, byte: u8| {
        let raw = Raw::new(Opcode::RcWriteOnly, B, psn).reth(to.addr, to.rkey, 8);
        raw.payload(&[byte; 8]).bytes()
    };
    // Somebody who guesses PSNs has no better chance than with a mark.
    p.b.handle(&write(100 + 1024, 9));
    for psn in 100..100 + 1024 {
        p.b.handle(&write(psn, 1));
    }
    assert_eq!(bytes(&dst, 0, 8), [1; 8]);
    p.b.handle(&write(100 + 1024, 2));
    assert_eq!(bytes(&dst, 0, 8), [2; 8]);
}

/// Packets that a WRITE of `len` bytes takes when every `nth` is lost.
fn packets(setup: Setup, len: usize, nth: u64) -> u64 {
    let mut p = Pair::new(setup);
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    let mut sent = 0;
    p.run_with(Duration::from_secs(600), |dir, _| {
        sent += u64::from(dir == Dir::AtoB);
        match dir == Dir::AtoB && sent % nth == nth / 2 {
            true => Fate::Drop,
            false => Fate::Deliver,
        }
    });
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!(bytes(&dst, 0, len), bytes(&src, 0, len));
    sent
}

#[test]
fn a_go_back_n_requester_sends_less_to_one_that_keeps() {
    let len = 400 * MTU;
    let strict = Setup {
        quiet: false,
        ..quiet()
    };
    let (kept, dropped) = (packets(quiet(), len, 7), packets(strict, len, 7));
    assert!(kept < dropped, "{kept} {dropped}");
}
