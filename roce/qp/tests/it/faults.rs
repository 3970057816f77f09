//! Loss, duplication, reordering and timeouts.

use std::time::Duration;

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use roce_bth::{Aeth, AtomicEth, Class, Credits, Msn, NakCode, Opcode, Packet, Psn, RKey, Syndrome};
use roce_qp::{TxKind, WaitReason};
use roce_verbs::{Mtu, QpAttr, QpState, SendFlags, SendOp, WcStatus};

use crate::harness::*;

const LONG: Duration = Duration::from_secs(600);

fn small() -> Setup {
    Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    }
}

/// Drops the nth packet that matches.
fn drop_nth(n: usize, matches: impl Fn(Dir, &Packet<'_>) -> bool) -> impl FnMut(Dir, &Packet<'_>) -> Fate {
    let mut seen = 0;
    move |dir, packet| {
        if !matches(dir, packet) {
            return Fate::Deliver;
        }
        seen += 1;
        if seen == n + 1 { Fate::Drop } else { Fate::Deliver }
    }
}

#[test]
fn a_gap_is_reported_once_and_resent_from_there() {
    let mut p = Pair::new(small());
    let (src, dst) = (p.a.filled(256 * 20, 1), p.b.region(256 * 20));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256 * 20)]);
    let sent = p.a.drain();
    assert_eq!(sent.len(), 20);
    for (i, (_, bytes)) in sent.iter().enumerate() {
        if i != 7 {
            p.b.handle(bytes);
        }
    }
    let naks = p.b.headers();
    assert_eq!(naks.len(), 1);
    assert_eq!(naks[0].aeth.unwrap().syndrome, Syndrome::Nak(NakCode::PsnSequenceError));
    assert_eq!(naks[0].bth.psn, Psn::new(p.setup.psn + 7));
    assert_eq!(
        (p.b.counters.out_of_seq_request, p.b.counters.dropped_requests),
        (1, 11)
    );
    let nak = Raw::new(Opcode::RcAcknowledge, A, p.setup.psn + 7).aeth(naks[0].aeth.unwrap());
    p.a.handle(&nak.bytes());
    let again = p.a.drain();
    assert_eq!(again.len(), 13);
    assert!(again.iter().all(|(k, _)| *k == TxKind::Retransmission));
    assert_eq!(p.a.counters.rcvd_seq_err, 1);
    for (_, bytes) in again {
        p.b.handle(&bytes);
    }
    p.run();
    assert_eq!(bytes(&dst, 0, 256 * 20), pattern(256 * 20, 1));
    assert!(p.a.completions()[0].is_ok());
}

#[test]
fn every_single_loss_is_survived() {
    for (dir, class) in [
        (Dir::AtoB, Class::Write),
        (Dir::AtoB, Class::Send),
        (Dir::AtoB, Class::ReadRequest),
        (Dir::AtoB, Class::Atomic),
        (Dir::BtoA, Class::Acknowledge),
        (Dir::BtoA, Class::ReadResponse),
        (Dir::BtoA, Class::AtomicAcknowledge),
    ] {
        for n in 0..8 {
            let mut p = Pair::new(small());
            let (src, dst, back) = (p.a.filled(2000, 1), p.b.region(4000), p.a.region(2000));
            for i in 0..2u64 {
                p.b.recv(i, &[sge(&dst, 2000, 1000)]);
                let add = SendOp::FetchAdd {
                    remote: at(&dst, 3200),
                    add: 1,
                };
                p.a.send(4 * i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 1000)]);
                p.a.send(4 * i + 1, SendOp::Read(at(&dst, 0)), &[sge(&back, 0, 1000)]);
                p.a.send(4 * i + 2, add, &[sge(&back, 1000 + 8 * i as usize, 8)]);
                p.a.send(4 * i + 3, SendOp::Send, &[sge(&src, 0, 1000)]);
            }
            p.run_with(
                LONG,
                drop_nth(n, |d, packet| {
                    d == dir && packet.header.bth.opcode.info().class == class
                }),
            );
            let c = p.a.completions();
            assert_eq!(
                c.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>(),
                (0..8).map(|i| (i, WcStatus::Success)).collect::<Vec<_>>(),
                "{class:?} {n}"
            );
            assert_eq!(p.b.received().len(), 2);
            assert_eq!(bytes(&back, 0, 1000), pattern(2000, 1)[..1000]);
            assert_eq!(
                bytes(&back, 1000, 16),
                [0u64.to_ne_bytes(), 1u64.to_ne_bytes()].concat(),
                "{class:?} {n}"
            );
            assert_eq!(
                bytes(&dst, 3200, 8),
                2u64.to_ne_bytes(),
                "an atomic is done once: {class:?} {n}"
            );
            assert_eq!((p.a.window.in_flight(), p.b.window.in_flight()), (0, 0));
        }
    }
}

#[test]
fn a_read_is_asked_for_again_from_the_lowest_missing_byte_to_its_end() {
    let mut p = Pair::new(small());
    let (src, dst) = (p.b.filled(2560, 1), p.a.region(2560));
    p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 2560)]);
    for (_, b) in p.a.drain() {
        p.b.handle(&b);
    }
    for (i, (_, b)) in p.b.drain().iter().enumerate() {
        if i != 3 {
            p.a.handle(b);
        }
    }
    // The rest of the stream skipped one: it is asked for once, although six packets said so.
    let again = p.a.headers();
    assert_eq!(again.len(), 1);
    let reth = again[0].reth.unwrap();
    assert_eq!((reth.va, reth.dma_len), (src.addr() + 3 * 256, 7 * 256));
    assert_eq!(again[0].bth.psn, Psn::new(p.setup.psn + 3));
    // rdma_rxe answers a partial retry with MIDDLE and LAST; both forms must do.
    let data = pattern(2560, 1);
    for i in 3..10usize {
        let (opcode, aeth) = match i {
            9 => (Opcode::RcReadResponseLast, true),
            _ => (Opcode::RcReadResponseMiddle, false),
        };
        let mut raw = Raw::new(opcode, A, p.setup.psn + i as u32).payload(&data[i * 256..(i + 1) * 256]);
        if aeth {
            raw = raw.aeth(ack());
        }
        p.a.handle(&raw.bytes());
    }
    assert!(p.a.completions()[0].is_ok());
    assert_eq!(bytes(&dst, 0, 2560), data);
}

fn ack() -> Aeth {
    Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn: Msn::new(0),
    }
}

#[test]
fn an_acknowledgement_past_a_read_means_that_its_response_was_lost() {
    let mut p = Pair::new(small());
    let (src, dst) = (p.b.filled(600, 1), p.a.region(600));
    p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 600)]);
    p.a.send(2, SendOp::Write(at(&src, 0)), &[sge(&dst, 0, 10)]);
    p.a.drain();
    p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, p.setup.psn + 3).aeth(ack()).bytes());
    let again = p.a.headers();
    assert_eq!(
        again.iter().map(|h| h.bth.opcode).collect::<Vec<_>>(),
        [Opcode::RcReadRequest, Opcode::RcWriteOnly]
    );
    assert!(p.a.completions().is_empty());
}

#[test]
fn ghosts_are_ignored() {
    let mut p = Pair::new(small());
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    // Nothing sent yet.
    p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, p.setup.psn).aeth(ack()).bytes());
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
    p.a.drain();
    for psn in [p.setup.psn + 3, p.setup.psn + 1000, p.setup.psn - 1] {
        for syndrome in [
            ack().syndrome,
            Syndrome::Nak(NakCode::PsnSequenceError),
            Syndrome::Nak(NakCode::RemoteAccessError),
            Syndrome::Rnr(roce_bth::RnrTimer::new(1)),
        ] {
            let aeth = Aeth { syndrome, ..ack() };
            p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, psn).aeth(aeth).bytes());
        }
    }
    assert_eq!(p.a.counters.dropped_responses, 13);
    assert!(p.a.completions().is_empty() && p.a.drain().is_empty());
    assert_eq!(p.a.qp.state(), QpState::Rts);
}

#[test]
fn an_acknowledgement_of_what_is_being_resent_moves_the_resending_on() {
    let mut p = Pair::new(small());
    let (src, dst) = (p.a.filled(2560, 1), p.b.region(2560));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 2560)]);
    p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256)]);
    p.a.drain();
    let nak = Syndrome::Nak(NakCode::PsnSequenceError);
    p.a.handle(
        &Raw::new(Opcode::RcAcknowledge, A, p.setup.psn + 2)
            .aeth(Aeth { syndrome: nak, ..ack() })
            .bytes(),
    );
    p.a.sink.room = Some(2);
    p.a.poll_transmit();
    p.a.sink.room = None;
    // Meanwhile the originals turn out to have arrived up to the seventh.
    p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, p.setup.psn + 6).aeth(ack()).bytes());
    let psns: Vec<u32> =
        p.a.headers()
            .iter()
            .map(|h| h.bth.psn.offset_from(Psn::new(p.setup.psn)))
            .collect();
    assert_eq!(psns, [2, 3, 7, 8, 9, 10]);
    p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, p.setup.psn + 10).aeth(ack()).bytes());
    assert_eq!(p.a.completions().len(), 2);
    assert_eq!(p.a.window.in_flight(), 0);
}

#[test]
fn silence_fails_the_work_request_after_the_promised_time() {
    for retry_cnt in [0, 2] {
        let mut p = Pair::new(Setup {
            retry_cnt,
            timeout: 15,
            ..small()
        });
        let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
        p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
        p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
        let start = p.now;
        p.run_with(LONG, |_, _| Fate::Drop);
        let c = p.a.completions();
        assert_eq!(
            c.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>(),
            [(1, WcStatus::RetryExceeded), (2, WcStatus::FlushError)]
        );
        assert_eq!(p.a.qp.state(), QpState::Err);
        // IBA 9.7.6.1.3: no sooner than the attribute says, and no later than four times that.
        let least = Duration::from_nanos(4096 << 15) * (u32::from(retry_cnt) + 1);
        let took = p.now.saturating_since(start);
        assert!((least..=least * 4).contains(&took), "{took:?}");
        assert_eq!(p.a.counters.retry_exceeded_err, 1);
        assert_eq!(p.a.window.in_flight(), 0);
        assert!(p.a.counters.retransmits > 0);
    }
}

#[test]
fn timeout_zero_never_fails_and_still_recovers() {
    let mut p = Pair::new(Setup {
        timeout: 0,
        retry_cnt: 0,
        ..small()
    });
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
    p.run_with(Duration::from_secs(3600), |_, _| Fate::Drop);
    assert!(p.a.completions().is_empty());
    p.run_with(LONG, |_, _| Fate::Deliver);
    assert!(p.a.completions()[0].is_ok());
}

#[test]
fn progress_gives_retries_back() {
    let mut p = Pair::new(Setup {
        retry_cnt: 1,
        timeout: 12,
        ..small()
    });
    let (src, dst) = (p.a.filled(256 * 10, 1), p.b.region(256 * 10));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256 * 10)]);
    // Every packet needs a second attempt, one timeout later: ten intervals in all, where two without progress fail.
    let mut expected = Psn::new(p.setup.psn);
    let mut attempts = 0;
    p.run_with(LONG, |dir, packet| {
        if dir == Dir::BtoA {
            return Fate::Deliver;
        }
        let psn = packet.header.bth.psn;
        if psn != expected {
            return if psn.is_before(expected) {
                Fate::Deliver
            } else {
                Fate::Drop
            };
        }
        attempts += 1;
        if attempts < 2 {
            return Fate::Drop;
        }
        attempts = 0;
        expected = expected.next();
        Fate::Deliver
    });
    assert_eq!(
        p.a.completions().iter().map(|c| c.status).collect::<Vec<_>>(),
        [WcStatus::Success]
    );
}

#[test]
fn a_lost_tail_is_probed_before_the_timeout() {
    let mut p = Pair::new(small());
    let (src, dst) = (p.a.filled(256 * 10, 1), p.b.region(256 * 10));
    for i in 0..5 {
        p.a.send(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256)]);
        p.run();
    }
    p.a.completions();
    let start = p.now;
    p.a.send(9, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 2560)]);
    p.run_with(LONG, drop_nth(9, |d, _| d == Dir::AtoB));
    assert!(p.a.completions()[0].is_ok());
    assert_eq!((p.a.counters.tail_probes, p.a.counters.timeouts), (1, 0));
    assert!(p.now.saturating_since(start) < Duration::from_millis(18));
    assert_eq!(p.a.counters.retransmits, 1);
}

#[test]
fn a_missing_receive_makes_the_peer_wait_its_time() {
    let mut p = Pair::new(Setup {
        min_rnr_timer: 14,
        ..small()
    });
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    p.a.send(1, SendOp::Send, &[sge(&src, 0, 600)]);
    p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 10)]);
    for (_, b) in p.a.drain() {
        p.b.handle(&b);
    }
    let naks = p.b.headers();
    assert_eq!(naks.len(), 1, "what comes behind is dropped in silence");
    assert_eq!(
        naks[0].aeth.unwrap().syndrome,
        Syndrome::Rnr(roce_bth::RnrTimer::new(14))
    );
    p.a.handle(
        &Raw::new(Opcode::RcAcknowledge, A, p.setup.psn)
            .aeth(naks[0].aeth.unwrap())
            .bytes(),
    );
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Rnr);
    assert!(p.a.drain().is_empty());
    assert_eq!(
        p.a.qp.next_timeout().unwrap().saturating_since(p.now),
        Duration::from_micros(1280)
    );
    p.b.recv(1, &[sge(&dst, 0, 600)]);
    p.run();
    assert_eq!(p.a.completions().len(), 2);
    assert_eq!((p.a.counters.rcvd_rnr_err, p.b.counters.send_rnr_err), (1, 1));
    assert_eq!(p.b.received()[0].byte_len, 600);
}

/// A receiver that has no time to post receives for long: what is in flight is sent again once, not at every try.
#[test]
fn a_receiver_that_is_not_ready_is_asked_with_one_packet() {
    let mut p = Pair::new(Setup {
        mtu: Mtu::B1024,
        ..Setup::default()
    });
    let (src, dst) = (p.a.filled(16 * 1024, 1), p.b.region(16 * 1024));
    for i in 0..4 {
        p.a.send(i, SendOp::Send, &[sge(&src, 0, 16 * 1024)]);
    }
    p.run_with(Duration::from_millis(100), |_, _| Fate::Deliver);
    let (tries, again) = (p.a.counters.rcvd_rnr_err, p.a.counters.retransmits);
    assert!(tries > 100, "{tries}");
    assert!(again <= tries, "{again} packets sent again for {tries} tries");
    for i in 0..4 {
        p.b.recv(i, &[sge(&dst, 0, 16 * 1024)]);
    }
    p.run();
    assert_eq!(p.a.completions().len(), 4);
    assert_eq!(p.b.received().len(), 4);
    let more = p.a.counters.retransmits - again;
    assert!(more <= 4 * 16 + 1, "{more} packets sent again at the end");
}

#[test]
fn rnr_retries_run_out_unless_they_are_seven() {
    for rnr_retry in [0u8, 3, 7] {
        let mut p = Pair::new(Setup { rnr_retry, ..small() });
        let src = p.a.filled(600, 1);
        p.a.send(1, SendOp::Send, &[sge(&src, 0, 600)]);
        p.run_with(Duration::from_millis(100), |_, _| Fate::Deliver);
        let c = p.a.completions();
        if rnr_retry == 7 {
            assert!(c.is_empty());
            assert!(p.a.counters.rcvd_rnr_err > 100);
            let dst = p.b.region(600);
            p.b.recv(1, &[sge(&dst, 0, 600)]);
            p.run();
            assert!(p.a.completions()[0].is_ok());
        } else {
            assert_eq!(c[0].status, WcStatus::RnrRetryExceeded);
            assert_eq!(p.a.counters.rcvd_rnr_err, u64::from(rnr_retry) + 1);
            assert_eq!(p.a.qp.state(), QpState::Err);
        }
    }
}

#[test]
fn retries_given_while_drained_count_at_once() {
    let mut p = Pair::new(Setup {
        retry_cnt: 1,
        rnr_retry: 1,
        timeout: 15,
        ..small()
    });
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
    let interval = Duration::from_nanos(4096 << 15);
    p.run_with(interval, |_, _| Fate::Drop);
    let state = |state| QpAttr {
        state: Some(state),
        ..QpAttr::default()
    };
    p.a.modify(&state(QpState::Sqd));
    p.a.modify(&QpAttr {
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        ..state(QpState::Sqd)
    });
    // As long as four retries take at least, which are more than there were.
    p.run_with(interval * 4, |_, _| Fate::Drop);
    assert_eq!((p.a.qp.state(), p.a.counters.retry_exceeded_err), (QpState::Sqd, 0));
    p.run();
    p.a.modify(&state(QpState::Rts));
    assert!(p.a.completions()[0].is_ok());
    // Progress gives as many back; RNR retries are without end now.
    p.a.send(2, SendOp::Send, &[sge(&src, 0, 600)]);
    p.run_with(Duration::from_millis(100), |_, _| Fate::Deliver);
    assert!(p.a.completions().is_empty());
}

#[test]
fn write_with_immediate_waits_for_a_receive_only_at_its_end() {
    let mut p = Pair::new(small());
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    p.a.send(1, SendOp::WriteWithImm(at(&dst, 0), 5), &[sge(&src, 0, 600)]);
    for (_, b) in p.a.drain() {
        p.b.handle(&b);
    }
    let h = p.b.headers();
    assert_eq!(h[0].bth.psn, Psn::new(p.setup.psn + 2));
    assert!(matches!(h[0].aeth.unwrap().syndrome, Syndrome::Rnr(_)));
    assert_eq!(bytes(&dst, 0, 512), pattern(600, 1)[..512]);
    p.b.recv(1, &[]);
    p.run();
    assert_eq!(p.b.received()[0].byte_len, 600);
}

#[test]
fn duplicates_are_answered_and_not_executed_again() {
    let mut p = Pair::new(small());
    let (src, dst, old) = (p.a.filled(600, 1), p.b.region(600), p.a.region(8));
    p.b.recv(1, &[sge(&dst, 0, 600)]);
    p.b.recv(2, &[sge(&dst, 0, 600)]);
    let add = SendOp::FetchAdd {
        remote: at(&dst, 0),
        add: 1,
    };
    p.a.send(1, SendOp::Send, &[sge(&src, 0, 600)]);
    p.a.send(2, add, &[sge(&old, 0, 8)]);
    p.a.send(3, SendOp::Read(at(&dst, 0)), &[sge(&src, 0, 600)]);
    let packets = p.a.drain();
    for (_, b) in &packets {
        p.b.handle(b);
    }
    let first = p.b.drain();
    dst.write(0, &[9; 600]).unwrap();
    for (_, b) in &packets {
        p.b.handle(b);
    }
    let second = p.b.drain();
    let opcodes = |v: &[(TxKind, Vec<u8>)]| -> Vec<Opcode> {
        v.iter()
            .map(|(_, b)| Packet::parse(b).unwrap().header.bth.opcode)
            .collect()
    };
    let atomic = |v: &[(TxKind, Vec<u8>)]| {
        v.iter()
            .find_map(|(_, b)| Packet::parse(b).unwrap().header.atomic_ack())
    };
    assert_eq!(
        opcodes(&first)[..2],
        [Opcode::RcAtomicAcknowledge, Opcode::RcReadResponseFirst]
    );
    // The SEND is acknowledged again, the atomic answered from the saved value, the READ done again.
    assert_eq!(
        opcodes(&second)[..3],
        [
            Opcode::RcAcknowledge,
            Opcode::RcAtomicAcknowledge,
            Opcode::RcReadResponseFirst
        ]
    );
    assert_eq!(atomic(&first), atomic(&second));
    assert_eq!(Packet::parse(&second[2].1).unwrap().payload, [9; 256]);
    assert!(
        second
            .iter()
            .all(|(k, _)| matches!(k, TxKind::Ack | TxKind::Repetition))
    );
    assert_eq!(p.b.received().len(), 1);
    assert_eq!(p.b.counters.duplicate_request, 5);
}

#[test]
fn as_many_atomics_as_agreed_are_answered_again_and_older_ones_not() {
    let mut p = Pair::new(Setup {
        rd_atomic: 4,
        ..small()
    });
    let word = p.b.region(8);
    let first = Psn::new(p.setup.psn);
    let add = |i: u32| {
        let eth = AtomicEth {
            va: word.addr(),
            rkey: word.rkey(),
            swap_add: 1,
            compare: 0,
        };
        Raw::new(Opcode::RcFetchAdd, B, first.add(i).value())
            .atomic(eth)
            .bytes()
    };
    let results = |p: &mut Pair| -> Vec<(u32, u64)> {
        let h = p.b.headers();
        h.iter()
            .filter_map(|h| Some((h.bth.psn.offset_from(first), h.atomic_ack?)))
            .collect()
    };
    for i in 0..6 {
        p.b.handle(&add(i));
        assert_eq!(results(&mut p), [(i, u64::from(i))]);
    }
    for i in 0..6 {
        p.b.handle(&add(i));
    }
    assert_eq!(results(&mut p), [(2, 2), (3, 3), (4, 4), (5, 5)]);
    assert_eq!((p.b.counters.duplicate_request, p.b.counters.dropped_requests), (6, 2));
    assert_eq!(bytes(&word, 0, 8), 6u64.to_ne_bytes());
}

#[test]
fn a_duplicate_is_acknowledged_itself_and_nothing_beyond_it() {
    // rdma_rxe must not be acknowledged beyond what it has resent.
    let mut p = Pair::new(small());
    let (src, dst) = (p.a.filled(2560, 1), p.b.region(2560));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 2560)]);
    let packets = p.a.drain();
    for (_, b) in &packets {
        p.b.handle(b);
    }
    let offset = |h: &roce_bth::Header| h.bth.psn.offset_from(Psn::new(Setup::default().psn));
    assert_eq!(p.b.headers().iter().map(offset).collect::<Vec<_>>(), [9]);
    for (_, b) in &packets[2..5] {
        p.b.handle(b);
    }
    let h = p.b.headers();
    assert_eq!(h.iter().map(offset).collect::<Vec<_>>(), [4]);
    assert_eq!(
        (h[0].aeth.unwrap().syndrome, h[0].aeth.unwrap().msn),
        (ack().syndrome, Msn::new(1))
    );
}

#[test]
fn a_duplicate_read_must_be_part_of_the_first() {
    let mut p = Pair::new(small());
    let src = p.b.filled(2560, 1);
    let ask = |psn: u32, va: u64, len: u32| {
        Raw::new(Opcode::RcReadRequest, B, psn)
            .reth(va, src.rkey(), len)
            .bytes()
    };
    let psn = p.setup.psn;
    p.b.handle(&ask(psn, src.addr(), 2560));
    assert_eq!(p.b.drain().len(), 10);
    // Part of it, from a packet's start.
    p.b.handle(&ask(psn + 4, src.addr() + 1024, 1536));
    assert_eq!(p.b.drain().len(), 6);
    // And once more, lower: what was asked for first still counts.
    p.b.handle(&ask(psn + 2, src.addr() + 512, 2048));
    assert_eq!(p.b.drain().len(), 8);
    // Longer, elsewhere, or another key.
    p.b.handle(&ask(psn + 4, src.addr() + 1024, 1537));
    p.b.handle(&ask(psn + 4, src.addr() + 1023, 100));
    p.b.handle(
        &Raw::new(Opcode::RcReadRequest, B, psn)
            .reth(src.addr(), src.rkey().next(), 2560)
            .bytes(),
    );
    assert!(p.b.drain().is_empty());
    assert_eq!(p.b.counters.dropped_requests, 3);
    assert_eq!(p.b.qp.state(), QpState::Rts);
}

/// Duplicates are answered in the order of their PSNs, whatever order they come in (IBA C9-110).
#[test]
fn an_earlier_duplicate_ends_the_answer_to_a_later_one() {
    let mut p = Pair::new(small());
    let src = p.b.filled(2560, 1);
    let first = p.setup.psn;
    let read = |psn: u32| {
        Raw::new(Opcode::RcReadRequest, B, psn)
            .reth(src.addr(), src.rkey(), 2560)
            .bytes()
    };
    let offsets = |p: &mut Pair| -> Vec<i32> {
        let h = p.b.headers();
        h.iter()
            .map(|h| h.bth.psn.offset_from(Psn::new(first)) as i32)
            .collect()
    };
    for psn in [first, first + 10] {
        p.b.handle(&read(psn));
    }
    assert_eq!(offsets(&mut p), (0..20).collect::<Vec<_>>());
    // The later one again; when three packets of its answer are sent, the earlier one comes.
    p.b.sink.room = Some(3);
    p.b.handle(&read(first + 10));
    p.b.poll_transmit();
    p.b.handle(&read(first));
    p.b.sink.room = None;
    let all = offsets(&mut p);
    let expected = (10..13).chain(0..10).chain(13..20);
    assert_eq!(all, expected.collect::<Vec<_>>());
}

#[test]
fn a_read_of_no_bytes_is_answered_again_whatever_its_key() {
    let mut p = Pair::new(small());
    let src = p.b.filled(8, 1);
    for (psn, rkey) in (p.setup.psn..).zip([src.rkey(), src.rkey().next(), RKey(0)]) {
        let request = Raw::new(Opcode::RcReadRequest, B, psn)
            .reth(src.addr(), rkey, 0)
            .bytes();
        for _ in 0..3 {
            p.b.handle(&request);
            let h = p.b.headers();
            let [answer] = &h[..] else {
                panic!("key {rkey:?} is answered with {h:?}");
            };
            assert_eq!(
                (answer.bth.opcode, answer.bth.psn.value(), answer.aeth.unwrap().syndrome),
                (Opcode::RcReadResponseOnly, psn, ack().syndrome)
            );
        }
    }
    assert_eq!(p.b.counters.duplicate_request, 6);
    assert_eq!(p.b.qp.state(), QpState::Rts);
}

#[test]
fn the_window_limits_what_is_in_flight_and_reads_count() {
    let mut p = Pair::new(Setup {
        mtu: Mtu::B1024,
        window: roce_qp::WindowConfig {
            initial: 20_000,
            min: 20_000,
            max: 20_000,
        },
        ..Setup::default()
    });
    let (src, dst) = (p.a.filled(100_000, 1), p.b.region(100_000));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 100_000)]);
    assert_eq!(p.a.poll_transmit(), roce_qp::Poll::Blocked);
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Window);
    assert!(p.a.window.in_flight() <= 20_000 && p.a.window.in_flight() > 18_000);
    // The packet that closes the window asks for the acknowledgement that opens it.
    let last = p.a.sink.sent.back().unwrap();
    assert!(Packet::parse(&last.1).unwrap().header.bth.ack_req);
    p.run();
    for (_, b) in std::mem::take(&mut p.a.sink.sent) {
        p.b.handle(&b);
    }
    p.run();
    assert_eq!(bytes(&dst, 0, 100_000), pattern(100_000, 1));
    // Two READs that don't fit together go one after the other, each larger than the window.
    let back = p.a.region(100_000);
    p.a.send(2, SendOp::Read(at(&dst, 0)), &[sge(&back, 0, 50_000)]);
    p.a.send(3, SendOp::Read(at(&dst, 50_000)), &[sge(&back, 50_000, 50_000)]);
    assert_eq!(p.a.headers().len(), 1);
    p.run();
}

#[test]
fn heavy_random_loss_does_not_starve_a_transfer() {
    // rdma_rxe falls to 0.03 MB/s here; go-back-N with a window as long as the runs between losses need not.
    for (loss, mbytes_per_s) in [(0.01, 500.0), (0.04, 100.0), (0.1, 10.0)] {
        let mut p = Pair::new(Setup {
            mtu: Mtu::B4096,
            window: roce_qp::WindowConfig::default(),
            ..Setup::default()
        });
        let len = 1 << 20;
        let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
        for i in 0..8 {
            p.a.send(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
        }
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let start = p.now;
        p.run_with(LONG, |_, _| {
            if rng.random_bool(loss) {
                Fate::Drop
            } else {
                Fate::Deliver
            }
        });
        assert_eq!(p.a.completions().iter().filter(|c| c.is_ok()).count(), 8);
        let rate = 8.0 * len as f64 / p.now.saturating_since(start).as_secs_f64() / 1e6;
        assert!(rate > mbytes_per_s, "{rate} MB/s of virtual time at a loss of {loss}");
    }
}

#[test]
fn a_retransmission_that_is_lost_too_is_repeated_before_the_timeout() {
    let mut p = Pair::new(small());
    let (src, dst) = (p.a.filled(2560, 1), p.b.region(2560));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256)]);
    p.run();
    let start = p.now;
    p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 2560)]);
    let lost = Psn::new(p.setup.psn + 5);
    let mut losses = 0;
    p.run_with(LONG, |dir, packet| {
        if dir == Dir::AtoB && packet.header.bth.psn == lost && losses < 2 {
            losses += 1;
            return Fate::Drop;
        }
        Fate::Deliver
    });
    assert_eq!(p.a.completions().len(), 2);
    // The peer reported the gap only once.
    assert_eq!((p.a.counters.rcvd_seq_err, p.a.counters.timeouts), (1, 0));
    assert!(p.now.saturating_since(start) < Duration::from_millis(6));
}

/// Work request of a random test, with enough to check it.
#[derive(Clone, Debug)]
enum Op {
    Write { from: usize, to: usize, len: usize },
    WriteImm { from: usize, to: usize, len: usize },
    Read { from: usize, len: usize },
    Add { word: usize, by: u64 },
    Swap { word: usize, compare: u64, swap: u64 },
    Send { from: usize, len: usize },
}

const SIZE: usize = 6000;

fn op() -> impl Strategy<Value = Op> {
    let range = (0..SIZE / 2, 0..SIZE / 2, 0..SIZE / 2);
    prop_oneof![
        range.clone().prop_map(|(from, to, len)| Op::Write { from, to, len }),
        range.clone().prop_map(|(from, to, len)| Op::WriteImm { from, to, len }),
        range.prop_map(|(from, _, len)| Op::Read { from, len }),
        (0..20usize, any::<u64>()).prop_map(|(word, by)| Op::Add { word, by }),
        (0..3usize, 0..3u64, 0..3u64).prop_map(|(word, compare, swap)| Op::Swap { word, compare, swap }),
        (0..SIZE / 2, 0..SIZE / 2).prop_map(|(from, len)| Op::Send { from, len }),
    ]
}

/// Runs operations over a bad wire and beside a model, and compares.
fn against_the_model(ops: &[Op], seed: u64, mtu: Mtu, rd_atomic: u8, loss: f64) {
    let mut p = Pair::new(Setup {
        mtu,
        rd_atomic,
        psn: seed as u32,
        timeout: 18,
        ..Setup::default()
    });
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Sources never change, so the order of READs and later local changes does not matter.
    let (src, dst) = (p.a.filled(SIZE, 1), p.b.filled(SIZE, 2));
    let (words, sunk) = (p.b.region(160), p.b.region(SIZE * ops.len().max(1)));
    let landed = p.a.region((SIZE + 8) * ops.len().max(1));
    let (mut m_dst, mut m_words) = (pattern(SIZE, 2), [0u64; 20]);
    let (mut m_landed, mut m_sunk) = (Vec::new(), Vec::new());
    let source = pattern(SIZE, 1);
    let mut place = 0;
    let mut read_ranges: Vec<std::ops::Range<usize>> = Vec::new();
    for (i, op) in ops.iter().enumerate() {
        let id = i as u64;
        match *op {
            Op::Write { from, to, len } | Op::WriteImm { from, to, len } => {
                let imm = matches!(op, Op::WriteImm { .. });
                if imm {
                    p.b.recv(id, &[]);
                    m_sunk.push((id, len, None));
                }
                let to_addr = at(&dst, to);
                let what = if imm {
                    SendOp::WriteWithImm(to_addr, i as u32)
                } else {
                    SendOp::Write(to_addr)
                };
                // An RDMA WRITE may overtake a READ unless it is fenced (IBA table 79).
                let mut flags = SendFlags::SIGNALED;
                flags.set(
                    SendFlags::FENCE,
                    read_ranges.iter().any(|r| r.start < to + len && to < r.end),
                );
                let sges = [sge(&src, from, len / 2), sge(&src, from + len / 2, len - len / 2)];
                p.a.send_flags(id, what, &sges, flags);
                m_dst[to..to + len].copy_from_slice(&source[from..from + len]);
            }
            Op::Read { from, len } => {
                p.a.send(id, SendOp::Read(at(&dst, from)), &[sge(&landed, place, len)]);
                m_landed.push((place, m_dst[from..from + len].to_vec()));
                read_ranges.push(from..from + len);
                place += len.next_multiple_of(8);
            }
            Op::Add { word, by } => {
                let remote = at(&words, word * 8);
                p.a.send(id, SendOp::FetchAdd { remote, add: by }, &[sge(&landed, place, 8)]);
                m_landed.push((place, m_words[word].to_ne_bytes().to_vec()));
                m_words[word] = m_words[word].wrapping_add(by);
                place += 8;
            }
            Op::Swap { word, compare, swap } => {
                let remote = at(&words, word * 8);
                p.a.send(
                    id,
                    SendOp::CompareSwap { remote, compare, swap },
                    &[sge(&landed, place, 8)],
                );
                m_landed.push((place, m_words[word].to_ne_bytes().to_vec()));
                if m_words[word] == compare {
                    m_words[word] = swap;
                }
                place += 8;
            }
            Op::Send { from, len } => {
                p.b.recv(id, &[sge(&sunk, SIZE * i, len)]);
                p.a.send(id, SendOp::Send, &[sge(&src, from, len)]);
                m_sunk.push((id, len, Some((SIZE * i, source[from..from + len].to_vec()))));
            }
        }
    }
    p.run_with(LONG, |_, _| match rng.random::<f64>() {
        x if x < loss => Fate::Drop,
        x if x < loss * 1.5 => Fate::Twice,
        x if x < loss * 2.0 => Fate::Late(rng.random_range(1..6)),
        _ => Fate::Deliver,
    });
    let done: Vec<_> = p.a.completions().iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(
        done,
        (0..ops.len() as u64)
            .map(|i| (i, WcStatus::Success))
            .collect::<Vec<_>>()
    );
    let got: Vec<_> = p.b.received().iter().map(|c| (c.wr_id, c.byte_len as usize)).collect();
    assert_eq!(got, m_sunk.iter().map(|s| (s.0, s.1)).collect::<Vec<_>>());
    assert_eq!(
        bytes(&words, 0, 160),
        m_words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<_>>()
    );
    for (place, want) in m_landed {
        assert_eq!(bytes(&landed, place, want.len()), want);
    }
    for (place, want) in m_sunk.into_iter().filter_map(|s| s.2) {
        assert_eq!(bytes(&sunk, place, want.len()), want);
    }
    assert_eq!(bytes(&dst, 0, SIZE), m_dst);
    assert_eq!((p.a.window.in_flight(), p.b.window.in_flight()), (0, 0));
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Empty);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn memory_is_as_in_a_simple_model_whatever_the_wire_does(
        ops in prop::collection::vec(op(), 0..30),
        seed in any::<u64>(),
        mtu in 0usize..5,
        rd_atomic in 1u8..5,
        loss in prop_oneof![Just(0.0), Just(0.01), Just(0.05), Just(0.2)],
    ) {
        against_the_model(&ops, seed, Mtu::ALL[mtu], rd_atomic, loss);
    }
}
