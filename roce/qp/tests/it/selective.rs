//! Peers that keep packets beyond a gap and say which.

use std::{collections::BTreeSet, time::Duration};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use roce_bth::{Aeth, Class, Credits, Header, Msn, NakCode, Opcode, Packet, Psn, Syndrome};
use roce_qp::{TxKind, WaitReason, WindowConfig};
use roce_verbs::{Mtu, QpState, SendOp, WcStatus};

use crate::harness::*;

const LONG: Duration = Duration::from_secs(600);

fn keeping() -> Setup {
    Setup {
        mtu: Mtu::B256,
        keeps: true,
        ..Setup::default()
    }
}

/// Delivers all packets but these to B; how many there were.
fn deliver_but(p: &mut Pair, lost: &[usize]) -> usize {
    let sent = p.a.drain();
    for (n, (_, bytes)) in sent.iter().enumerate() {
        if !lost.contains(&n) {
            p.b.handle(bytes);
        }
    }
    sent.len()
}

fn psns(sent: &[(TxKind, Vec<u8>)]) -> Vec<Psn> {
    let psn = |bytes: &Vec<u8>| Packet::parse(bytes).expect("a packet").header.bth.psn;
    sent.iter().map(|(_, bytes)| psn(bytes)).collect()
}

#[test]
fn what_is_missing_is_sent_again_and_nothing_else() {
    let mut p = Pair::new(keeping());
    let len = 256 * 20;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    assert_eq!(deliver_but(&mut p, &[7, 12]), 20);
    let said = p.b.drain();
    assert_eq!(said.len(), 1, "one word of all that came in a turn");
    let packet = Packet::parse(&said[0].1).expect("a packet");
    assert_eq!(packet.header.bth.opcode, Opcode::SelectiveAck);
    assert_eq!(packet.header.bth.psn, Psn::new(p.setup.psn + 6));
    assert_eq!(p.b.counters.out_of_seq_request, 11);
    p.a.handle(&said[0].1);
    let again = p.a.drain();
    assert_eq!(psns(&again), [Psn::new(p.setup.psn + 7), Psn::new(p.setup.psn + 12)]);
    assert!(again.iter().all(|(kind, _)| *kind == TxKind::Retransmission));
    p.b.handle(&again[1].1);
    p.b.handle(&again[0].1);
    assert_eq!(bytes(&dst, 0, len), bytes(&src, 0, len));
    let done = p.b.drain();
    let last = Packet::parse(&done.last().expect("an acknowledgement").1).expect("a packet");
    assert_eq!(last.header.bth.opcode, Opcode::RcAcknowledge);
    assert_eq!(last.header.bth.psn, Psn::new(p.setup.psn + 19));
    done.iter().for_each(|(_, bytes)| p.a.handle(bytes));
    p.run();
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!(p.a.counters.retransmits, 2);
    assert_eq!((p.a.qp.in_flight(), p.a.window.in_flight()), (0, 0));
}

#[test]
fn before_anything_is_executed_nothing_is_acknowledged() {
    let mut p = Pair::new(keeping());
    let (src, dst) = (p.b.filled(512, 1), p.a.region(512));
    for n in 0..2 {
        p.a.send(n, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 256)]);
    }
    let sent = p.a.drain();
    // The second one comes first, and its gap is closed before it is reported.
    p.b.handle(&sent[1].1);
    p.b.handle(&sent[0].1);
    let said = p.b.drain();
    let opcode = |(_, bytes): &(TxKind, Vec<u8>)| Packet::parse(bytes).expect("a packet").header.bth.opcode;
    let opcodes: Vec<Opcode> = said.iter().map(opcode).collect();
    // The PSN before the first one acknowledges nothing that was ever sent.
    assert_eq!(opcodes, [Opcode::RcReadResponseOnly; 2]);
    said.iter().for_each(|(_, bytes)| p.a.handle(bytes));
    p.run();
    assert_eq!(p.a.completions().len(), 2);
}

/// The window is closed by other queue pairs, and a READ is longer than the packet that a queue pair may always send.
#[test]
fn a_probe_requests_a_lost_read_for_which_the_window_has_no_room() {
    let mut p = Pair::new(keeping());
    let (src, dst) = (p.a.filled(256, 1), p.b.filled(1024, 2));
    let into = p.a.region(1024);
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256)]);
    p.a.send(2, SendOp::Read(at(&dst, 0)), &[sge(&into, 0, 1024)]);
    assert_eq!(deliver_but(&mut p, &[0, 1]), 2);
    let timeout = |a: &mut Side| {
        a.now = a.qp.next_timeout().expect("a timer");
        a.timeout();
        a.drain()
    };
    let probe = timeout(&mut p.a);
    assert_eq!(
        psns(&probe),
        [Psn::new(p.setup.psn)],
        "a READ behind the oldest packet is no probe"
    );
    let again = timeout(&mut p.a);
    assert_eq!(psns(&again), [Psn::new(p.setup.psn)], "one packet at a time");
    p.b.handle(&again[0].1);
    p.b.drain().iter().for_each(|(_, bytes)| p.a.handle(bytes));
    p.a.window.on_sent(p.a.window.available());
    assert!(p.a.drain().is_empty());
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Window);
    assert_eq!(psns(&timeout(&mut p.a)), [Psn::new(p.setup.psn + 1)]);
}

#[test]
fn messages_beyond_a_gap_complete_in_their_order() {
    let mut p = Pair::new(keeping());
    let (src, dst) = (p.a.filled(1024, 3), p.b.region(1024));
    for n in 0..4 {
        p.b.recv(n, &[sge(&dst, 256 * n as usize, 256)]);
        p.a.send(n, SendOp::SendWithImm(n as u32), &[sge(&src, 256 * n as usize, 256)]);
    }
    deliver_but(&mut p, &[0]);
    assert!(p.b.received().is_empty(), "nothing completes before the first");
    p.run();
    let received: Vec<_> = p.b.received().iter().map(|c| (c.wr_id, c.imm)).collect();
    assert_eq!(received, [(0, 0), (1, 1), (2, 2), (3, 3)]);
    assert_eq!(bytes(&dst, 0, 1024), bytes(&src, 0, 1024));
    assert_eq!(p.a.completions().len(), 4);
}

#[test]
fn a_kept_message_without_a_receive_waits_for_one() {
    let mut p = Pair::new(keeping());
    let (src, dst) = (p.a.filled(512, 5), p.b.region(512));
    p.b.recv(0, &[sge(&dst, 0, 256)]);
    for n in 0..2 {
        p.a.send(n, SendOp::Send, &[sge(&src, 256 * n as usize, 256)]);
    }
    deliver_but(&mut p, &[0]);
    // The second one is kept, and then there is no receive for it.
    p.run_with(Duration::from_millis(50), |_, _| Fate::Deliver);
    assert_eq!(p.b.received().len(), 1);
    assert!(p.b.counters.send_rnr_err > 0);
    p.b.recv(1, &[sge(&dst, 256, 256)]);
    p.run();
    assert_eq!(p.b.received().len(), 1);
    assert_eq!((p.a.completions().len(), p.a.qp.state()), (2, QpState::Rts));
    assert_eq!(bytes(&dst, 0, 512), bytes(&src, 0, 512));
}

#[test]
fn a_request_beyond_a_gap_that_is_refused_is_refused_in_its_turn() {
    let mut p = Pair::new(keeping());
    let (src, dst) = (p.a.filled(512, 7), p.b.region(256));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256)]);
    // Beyond its end.
    p.a.send(2, SendOp::Write(at(&dst, 128)), &[sge(&src, 0, 256)]);
    deliver_but(&mut p, &[0]);
    assert_eq!(p.b.qp.state(), QpState::Rts);
    p.run();
    let ended: Vec<_> = p.a.completions().iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(ended, [(1, WcStatus::Success), (2, WcStatus::RemoteAccessError)]);
    assert_eq!((p.a.qp.state(), p.b.qp.state()), (QpState::Err, QpState::Err));
}

#[test]
fn a_side_that_has_not_heard_of_it_goes_on_by_acknowledgements() {
    let mut p = Pair::new(Setup {
        keeps: false,
        ..keeping()
    });
    // B keeps packets, and A does not know what that means.
    let mut b = Side::new(B, &p.setup);
    b.enter_rtr(&keeping(), A, p.setup.psn);
    b.enter_rts(&keeping(), p.setup.psn ^ 0x5555);
    p.b = b;
    p.b.now = p.a.now;
    let len = 256 * 30;
    let (src, dst) = (p.a.filled(len, 9), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    let mut count = 0;
    p.run_with(LONG, |dir, _| {
        count += 1;
        match dir == Dir::AtoB && count % 9 == 5 {
            true => Fate::Drop,
            false => Fate::Deliver,
        }
    });
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!(bytes(&dst, 0, len), bytes(&src, 0, len));
}

#[test]
fn words_that_make_no_sense_change_nothing() {
    let mut p = Pair::new(keeping());
    let len = 256 * 12;
    let (src, dst) = (p.a.filled(len, 11), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    deliver_but(&mut p, &[3]);
    let first = p.setup.psn;
    let ack = Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn: Msn::new(0),
    };
    let word = |psn: u32, payload: &[u8]| {
        let raw = Raw::new(Opcode::SelectiveAck, A, psn).aeth(ack);
        raw.payload(payload).bytes()
    };
    // Nothing, too little, a PSN that was never sent, and one that is not expected after what is acknowledged.
    p.a.handle(&word(first + 2, &[]));
    p.a.handle(&word(first + 2, &[0; 3]));
    p.a.handle(&word(first + 12, &[0; 12]));
    let beyond = (first + 4000).to_be_bytes();
    p.a.handle(&word(first + 2, &[&beyond[..], &[0xff; 520]].concat()));
    assert_eq!(p.a.counters.dropped_responses, 4);
    // Too much: more than was sent is said to be there.
    let expected = ((first + 3) & 0x00ff_ffff).to_be_bytes();
    p.a.handle(&word(first + 2, &[&expected[..], &[0xff; 520]].concat()));
    p.run();
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!(bytes(&dst, 0, len), bytes(&src, 0, len));
    assert_eq!(p.a.window.in_flight(), 0);
}

#[test]
fn a_gap_is_not_told_by_a_nak() {
    let mut p = Pair::new(keeping());
    let len = 256 * 40;
    let (src, dst) = (p.a.filled(len, 2), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut naks = 0;
    p.run_with(LONG, |dir, packet| {
        let aeth = packet.header.aeth().map(|aeth| aeth.syndrome);
        naks += u32::from(aeth == Some(Syndrome::Nak(NakCode::PsnSequenceError)));
        match dir == Dir::AtoB && rng.random_bool(0.2) {
            true => Fate::Drop,
            false => Fate::Deliver,
        }
    });
    assert_eq!(naks, 0);
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!(bytes(&dst, 0, len), bytes(&src, 0, len));
}

/// Under any losses, copies and delays everything arrives, and little more is sent again than was lost.
#[test]
fn no_more_is_sent_again_than_was_lost() {
    for seed in 0..40 {
        let mut p = Pair::new(Setup {
            mtu: Mtu::B1024,
            ..keeping()
        });
        let len = 1024 * 200;
        let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
        for n in 0..4 {
            p.a.send(n, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
        }
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut lost, mut acks) = (0, BTreeSet::new());
        p.run_with(LONG, |dir, packet| {
            let header = &Header::from(packet.header);
            acks.insert(header.bth.opcode.info().class == Class::SelectiveAcknowledge);
            if dir == Dir::AtoB && rng.random_bool(0.03) {
                lost += 1;
                return Fate::Drop;
            }
            Fate::Deliver
        });
        assert_eq!(p.a.completions().len(), 4);
        assert_eq!(bytes(&dst, 0, len), bytes(&src, 0, len));
        assert!(acks.contains(&true));
        let again = p.a.counters.retransmits;
        assert!(
            again <= lost * 3 / 2 + 4,
            "seed {seed}: {again} sent again, {lost} lost"
        );
    }
}

/// Delivers all of B's packets but these to A.
fn answer_but(p: &mut Pair, lost: &[usize]) {
    for (n, (_, bytes)) in p.b.drain().iter().enumerate() {
        if !lost.contains(&n) {
            p.a.handle(bytes);
        }
    }
}

#[test]
fn an_answer_that_is_lost_twice_is_asked_for_when_later_ones_have_come() {
    let mut p = Pair::new(keeping());
    let len = 256 * 40;
    let (src, dst) = (p.b.filled(len, 1), p.a.region(len));
    p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, len)]);
    deliver_but(&mut p, &[]);
    answer_but(&mut p, &[3, 6, 9, 12, 15, 18]);
    let again = p.a.drain();
    let psn = p.setup.psn;
    assert_eq!(psns(&again), [3, 6, 9, 12, 15, 18].map(|n| Psn::new(psn + n)));
    again.iter().for_each(|(_, bytes)| p.b.handle(bytes));
    // No time passes.
    answer_but(&mut p, &[0]);
    let again = p.a.drain();
    assert_eq!(psns(&again), [Psn::new(psn + 3)]);
    again.iter().for_each(|(_, bytes)| p.b.handle(bytes));
    answer_but(&mut p, &[]);
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!(bytes(&dst, 0, len), bytes(&src, 0, len));
    assert_eq!(p.a.counters.retransmits, 7);
}

#[test]
fn a_read_whose_request_is_lost_has_lost_one_packet() {
    let mut p = Pair::new(keeping());
    let len = 256 * 80;
    let (src, dst) = (p.b.filled(len, 1), p.a.region(len));
    let before = p.a.window.size();
    for round in 0..12 {
        for n in 0..3 {
            p.a.send(n, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, len)]);
        }
        assert_eq!(deliver_but(&mut p, &[1]), 3, "round {round}");
        p.run();
        assert_eq!(p.a.completions().len(), 3);
    }
    // A third of the bytes would be more than a path loses at random.
    assert!(p.a.window.size() >= before, "{} of {before}", p.a.window.size());
    assert_eq!((p.a.qp.in_flight(), p.a.window.in_flight()), (0, 0));
}

/// A lost request for more than the window holds keeps what is missing before it from being asked for: until the path has been silent.
#[test]
fn a_probe_that_is_answered_tells_of_all_answers_that_are_missing() {
    const PACKET: usize = 256 + 512;
    let mut p = Pair::new(Setup {
        window: WindowConfig {
            initial: 42 * PACKET,
            min: 42 * PACKET,
            max: 42 * PACKET,
        },
        ..keeping()
    });
    let lens = [256 * 40, 256 * 80];
    let places = lens.map(|len| (p.b.filled(len, 1), p.a.region(len)));
    for (id, ((src, dst), len)) in (0..).zip(places.iter().zip(lens)) {
        p.a.send(id, SendOp::Read(at(src, 0)), &[sge(dst, 0, len)]);
    }
    let (mut requests, mut answers) = (0, 0);
    p.run_with(LONG, |dir, _| {
        let n = match dir {
            Dir::AtoB => &mut requests,
            Dir::BtoA => &mut answers,
        };
        *n += 1;
        let lost = match dir {
            Dir::AtoB => *n == 2,
            Dir::BtoA => *n <= 36 && *n % 3 == 0,
        };
        if lost { Fate::Drop } else { Fate::Deliver }
    });
    assert_eq!(p.a.completions().len(), 2);
    for ((src, dst), len) in places.iter().zip(lens) {
        assert_eq!(bytes(dst, 0, len), bytes(src, 0, len));
    }
    assert_eq!((p.a.counters.tail_probes, p.a.counters.timeouts), (1, 0));
    assert_eq!((p.a.qp.in_flight(), p.a.window.in_flight()), (0, 0));
}
