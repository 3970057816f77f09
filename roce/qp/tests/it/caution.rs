//! Retransmission after a silence, an RNR NAK or a gap: what is sent again and when, and what that does to timers and the window.

use std::time::Duration;

use roce_bth::{Aeth, Credits, Msn, NakCode, Opcode, Packet, Psn, Reth, RnrTimer, Syndrome};
use roce_qp::{Loss, WaitReason, WindowConfig};
use roce_verbs::{Mtu, SendOp, WcStatus};

use crate::harness::*;

const MTU: usize = 256;
const PACKET: usize = MTU + 512;
const MS: Duration = Duration::from_millis(1);

/// A pair that has measured a round trip, and has so many bytes of another queue pair in the window.
fn warm(keeps: bool, others: usize) -> Pair {
    let window = 128 * PACKET;
    let mut p = Pair::new(Setup {
        mtu: Mtu::B256,
        keeps,
        timeout: 20,
        window: WindowConfig {
            initial: window,
            min: 8 * PACKET,
            max: window,
        },
        ..Setup::default()
    });
    write(&mut p, 9, 1);
    p.run();
    assert_eq!(p.a.completions().len(), 1);
    p.a.window.on_sent(others);
    p
}

fn write(p: &mut Pair, id: u64, packets: usize) {
    let len = packets * MTU;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(id, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
}

fn read(p: &mut Pair, id: u64, packets: usize) {
    let len = packets * MTU;
    let (src, dst) = (p.b.filled(len, 1), p.a.region(len));
    p.a.send(id, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, len)]);
}

fn packets(side: &mut Side) -> Vec<Vec<u8>> {
    side.drain().into_iter().map(|(_, bytes)| bytes).collect()
}

/// PSNs of packets, from the first one after the warm-up on.
fn psns(p: &Pair, packets: &[Vec<u8>]) -> Vec<u32> {
    let first = Psn::new(p.setup.psn).next();
    let psn = |bytes: &Vec<u8>| Packet::parse(bytes).expect("a packet").header.bth.psn;
    packets.iter().map(|bytes| psn(bytes).offset_from(first)).collect()
}

fn sent(p: &mut Pair) -> Vec<u32> {
    let sent = packets(&mut p.a);
    psns(p, &sent)
}

/// Lets the next timer of A expire, and returns what A sends.
fn expire(p: &mut Pair) -> Vec<u32> {
    p.a.now = p.a.qp.next_timeout().expect("a timer").max(p.a.now);
    p.a.timeout();
    sent(p)
}

/// An answer of the peer to the packet `n`.
fn answer(p: &mut Pair, n: u32, syndrome: Syndrome) {
    let psn = Psn::new(p.setup.psn).add(n + 1);
    let aeth = Aeth {
        syndrome,
        msn: Msn::new(1),
    };
    p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, psn.value()).aeth(aeth).bytes());
}

const ACK: Syndrome = Syndrome::Ack(Credits::INVALID);
const GAP: Syndrome = Syndrome::Nak(NakCode::PsnSequenceError);

/// Bytes in flight of the queue pair, and in the window of all.
fn in_flight(p: &Pair) -> [usize; 2] {
    [p.a.qp.in_flight(), p.a.window.in_flight()]
}

#[test]
fn after_a_silence_one_packet_is_sent_at_a_time_until_the_peer_answers() {
    for keeps in [false, true] {
        let mut p = warm(keeps, 0);
        p.a.sink.room = Some(1);
        write(&mut p, 1, 3);
        p.a.poll_transmit();
        p.a.sink.sent.clear();
        p.a.sink.room = Some(0);
        // A probe for which there is no room, and then it goes back.
        while p.a.counters.completer_retry_err == 0 {
            p.a.now = p.a.qp.next_timeout().unwrap();
            p.a.timeout();
            p.a.poll_transmit();
        }
        p.a.sink.room = None;
        assert_eq!(sent(&mut p), [0], "what may be lost, and nothing new; keeps {keeps}");
        assert_eq!(p.a.qp.wait_reason(), WaitReason::Acks);
        answer(&mut p, 0, ACK);
        assert_eq!(sent(&mut p), [1, 2], "keeps {keeps}");
    }
}

#[test]
fn a_peer_that_reports_a_gap_after_a_silence_gets_all_behind_it() {
    for keeps in [false, true] {
        let mut p = warm(keeps, 0);
        write(&mut p, 1, 6);
        assert_eq!(sent(&mut p), [0, 1, 2, 3, 4, 5]);
        assert_eq!(expire(&mut p), [5], "a probe");
        assert_eq!(expire(&mut p), [0], "one packet");
        p.a.now = p.a.now + MS;
        answer(&mut p, 0, GAP);
        assert_eq!(sent(&mut p), [0, 1, 2, 3, 4, 5], "keeps {keeps}");
    }
}

#[test]
fn a_late_acknowledgement_calls_off_what_was_to_be_sent_again_and_counts_the_rest_as_in_flight() {
    let others = 10 * PACKET;
    let mut p = warm(false, others);
    for (id, packets) in [(1, 4), (2, 6), (3, 6)] {
        write(&mut p, id, packets);
    }
    assert_eq!(sent(&mut p).len(), 16);
    while p.a.counters.timeouts == 0 {
        expire(&mut p);
    }
    assert_eq!(in_flight(&p), [PACKET, others + PACKET]);
    let reduced = p.a.window.size();
    // More than was sent again: the first transmission has arrived.
    answer(&mut p, 6, ACK);
    assert_eq!(in_flight(&p), [9 * PACKET, others + 9 * PACKET]);
    assert_eq!((sent(&mut p), p.a.counters.spurious_timeouts), (vec![], 1));
    assert!(p.a.window.size() > reduced);
    answer(&mut p, 15, ACK);
    assert_eq!(in_flight(&p), [0, others]);
    assert_eq!(p.a.completions().len(), 3);
}

#[test]
fn a_late_report_takes_a_timeout_back() {
    let mut p = warm(true, 0);
    write(&mut p, 1, 10);
    let flight = packets(&mut p.a);
    let size = p.a.window.size();
    while p.a.counters.timeouts == 0 {
        expire(&mut p);
    }
    assert!(p.a.window.size() < size);
    // The first transmission of all but one packet arrives.
    flight[1..].iter().for_each(|bytes| p.b.handle(bytes));
    packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
    assert_eq!((p.a.counters.spurious_timeouts, p.a.window.size()), (1, size));
    p.b.handle(&flight[0]);
    packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
    assert_eq!((in_flight(&p), p.a.completions().len()), ([0, 0], 1));
    // A loss that is reported is no silence.
    let mut p = warm(true, 0);
    write(&mut p, 1, 10);
    let flight = packets(&mut p.a);
    [1, 2, 3, 4, 5].iter().for_each(|n| p.b.handle(&flight[*n]));
    packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
    assert_eq!(sent(&mut p), [0]);
    flight[6..].iter().for_each(|bytes| p.b.handle(bytes));
    packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
    assert_eq!(p.a.counters.spurious_timeouts, 0);
}

#[test]
fn without_a_receive_only_the_refused_packet_is_sent_again_if_the_peer_buffers() {
    for (keeps, again) in [(false, vec![2]), (true, vec![2])] {
        let mut p = warm(keeps, 0);
        for id in 0..6 {
            let src = p.a.filled(MTU, 1);
            p.a.send(id, SendOp::Send, &[sge(&src, 0, MTU)]);
        }
        assert_eq!(sent(&mut p), [0, 1, 2, 3, 4, 5]);
        answer(&mut p, 2, Syndrome::Rnr(RnrTimer::new(1)));
        assert_eq!(p.a.completions().len(), 2);
        // Those behind it are in the peer's buffer, or dropped.
        let left = if keeps { 3 } else { 0 };
        assert_eq!(in_flight(&p), [left * PACKET; 2], "keeps {keeps}");
        assert_eq!(p.a.qp.wait_reason(), WaitReason::Rnr);
        assert_eq!(expire(&mut p), again, "keeps {keeps}");
        answer(&mut p, 2, ACK);
        let rest = if keeps { vec![] } else { vec![3, 4, 5] };
        assert_eq!(sent(&mut p), rest, "keeps {keeps}");
    }
}

/// The other queue pair's part is not taken for this one's.
#[test]
fn a_gap_costs_one_packet_and_empties_the_window_of_the_rest() {
    let others = 40 * PACKET;
    let mut p = warm(false, others);
    p.a.sink.room = Some(8);
    write(&mut p, 1, 12);
    p.a.poll_transmit();
    p.a.sink.sent.clear();
    p.a.sink.room = Some(0);
    p.a.now = p.a.now + MS;
    answer(&mut p, 3, GAP);
    assert_eq!(in_flight(&p), [0, others]);
    p.a.sink.room = None;
    assert_eq!(sent(&mut p), [3, 4, 5, 6, 7, 8, 9, 10, 11]);
    assert_eq!(in_flight(&p), [9 * PACKET, others + 9 * PACKET]);
}

#[test]
fn the_timeout_of_what_is_sent_again_later_counts_from_then() {
    let mut p = warm(false, 0);
    write(&mut p, 1, 4);
    assert_eq!(sent(&mut p).len(), 4);
    let begun = p.a.now;
    let probe = p.a.qp.next_timeout().unwrap().saturating_since(begun);
    // Later packets don't put it off.
    p.a.now = begun + MS;
    write(&mut p, 2, 1);
    assert_eq!(sent(&mut p), [4]);
    assert_eq!(p.a.qp.next_timeout(), Some(begun + probe));
    p.a.now = begun + MS * 2;
    answer(&mut p, 0, GAP);
    let waits = p.a.qp.next_timeout();
    assert_eq!(waits, None, "there is nothing to wait for yet");
    // After a reported loss silences are shorter: at most 4 ms.
    let probe = probe.min(MS * 4);
    p.a.sink.room = Some(1);
    p.a.now = begun + MS * 10;
    p.a.poll_transmit();
    assert_eq!(p.a.qp.next_timeout(), Some(begun + MS * 10 + probe));
    p.a.sink.room = None;
    p.a.now = begun + MS * 11;
    assert_eq!(sent(&mut p), [0, 1, 2, 3, 4]);
    assert_eq!(p.a.qp.next_timeout(), Some(begun + MS * 10 + probe));
    // What is sent after a pause does not count from before it.
    answer(&mut p, 4, ACK);
    p.a.now = begun + Duration::from_secs(1);
    write(&mut p, 3, 1);
    assert_eq!(sent(&mut p), [5]);
    let next = p.a.qp.next_timeout().unwrap();
    assert!(next > p.a.now && next <= p.a.now + MS * 100, "{next:?}");
}

/// It completes in its turn, and once.
#[test]
fn a_lost_packet_whose_memory_is_gone_fails_its_work_request_after_those_before_it() {
    for keeps in [false, true] {
        let mut p = warm(keeps, 0);
        write(&mut p, 1, 2);
        let (src, dst) = (p.a.filled(MTU, 1), p.b.region(MTU));
        p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, MTU)]);
        write(&mut p, 3, 1);
        assert_eq!(sent(&mut p), [0, 1, 2, 3]);
        p.a.mem.deregister(&src).unwrap();
        p.a.now = p.a.now + MS;
        // With selective ACKs all count as lost after a timeout.
        if !keeps {
            answer(&mut p, 0, GAP);
        }
        let mut again = sent(&mut p);
        while keeps && p.a.counters.timeouts == 0 {
            again = expire(&mut p);
        }
        for n in 0..2 {
            assert!(!again.contains(&2), "keeps {keeps}");
            assert!(p.a.completions().is_empty(), "keeps {keeps}");
            if n == 0 {
                answer(&mut p, 0, ACK);
                again = sent(&mut p);
            }
        }
        assert_eq!(p.a.qp.wait_reason(), WaitReason::Local, "keeps {keeps}");
        answer(&mut p, 1, ACK);
        sent(&mut p);
        let done: Vec<_> = p.a.completions().iter().map(|c| (c.wr_id, c.status)).collect();
        let expected = [
            (1, WcStatus::Success),
            (2, WcStatus::LocalProtectionError),
            (3, WcStatus::FlushError),
        ];
        assert_eq!((done, p.a.counters.send_err), (expected.to_vec(), 1), "keeps {keeps}");
        assert_eq!(in_flight(&p), [0, 0]);
    }
}

fn reth(bytes: &[u8]) -> Option<Reth> {
    Packet::parse(bytes).expect("a packet").header.reth()
}

/// Other queue pairs have losses, so that the window has become small: 8 packets, and parts of READs of 16.
#[test]
fn a_long_read_is_asked_for_again_in_parts_that_fit_the_window() {
    let parts = |p: &mut Pair| {
        let asked = packets(&mut p.a);
        asked.iter().for_each(|bytes| p.b.handle(bytes));
        let parts = asked.iter().filter_map(|bytes| reth(bytes));
        parts.map(|part| part.dma_len as usize / MTU).collect::<Vec<_>>()
    };
    // A peer that goes back is asked for twice as much when nothing else is in flight, one part after the other.
    for (keeps, expected) in [(false, &[32, 26][..]), (true, &[16, 16, 16])] {
        let mut p = warm(keeps, 0);
        read(&mut p, 1, 60);
        assert_eq!(parts(&mut p), [60]);
        for _ in 0..20 {
            p.a.window.on_loss(p.a.now, Loss::Gap, 128 * PACKET);
        }
        p.a.now = p.a.now + MS;
        let answers = packets(&mut p.b);
        [0, 1, 59].iter().for_each(|n| p.a.handle(&answers[*n]));
        for part in expected {
            assert_eq!(parts(&mut p), [*part], "keeps {keeps}");
            p.a.now = p.a.now + MS * 3;
            packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
        }
        p.run();
        assert_eq!(p.a.completions().len(), 1);
        assert_eq!(in_flight(&p), [0, 0]);
    }
}

/// After a silence all counts as lost: also a READ, whose responses are late. If the memory of what the peer expects is gone, the rest
/// goes on.
#[test]
fn what_the_peer_expects_goes_before_what_is_older() {
    for (gone, expected) in [(false, &[3, 0][..]), (true, &[0])] {
        let mut p = warm(true, 0);
        read(&mut p, 1, 3);
        let (src, dst) = (p.a.filled(8 * MTU, 1), p.b.region(8 * MTU));
        p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 8 * MTU)]);
        let flight = packets(&mut p.a);
        assert_eq!(flight.len(), 9);
        p.a.sink.room = Some(0);
        while p.a.counters.timeouts == 0 {
            p.a.now = p.a.qp.next_timeout().unwrap();
            p.a.timeout();
            p.a.poll_transmit();
        }
        p.a.sink.room = None;
        p.b.handle(&flight[0]);
        assert_eq!(packets(&mut p.b).len(), 3);
        flight[2..].iter().for_each(|bytes| p.b.handle(bytes));
        packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
        if gone {
            p.a.mem.deregister(&src).unwrap();
        }
        assert_eq!(sent(&mut p), expected);
    }
}

/// A third of all data: more than a path loses at random.
#[test]
fn a_lost_request_of_a_read_is_one_packet_and_lost_responses_are_all_of_theirs() {
    for (lost_request, shrinks) in [(true, false), (false, true)] {
        let mut p = warm(true, 0);
        let before = p.a.window.size();
        for _ in 0..12 {
            (0..3).for_each(|id| read(&mut p, id, 40));
            let asked = packets(&mut p.a);
            assert_eq!(asked.len(), 3);
            for (n, bytes) in asked.iter().enumerate() {
                if lost_request && n == 1 {
                    continue;
                }
                p.b.handle(bytes);
                for (m, (_, bytes)) in p.b.drain().iter().enumerate() {
                    if lost_request || n != 1 || m == 0 {
                        p.a.handle(bytes);
                    }
                }
            }
            p.run();
            assert_eq!(p.a.completions().len(), 3);
        }
        assert_eq!(p.a.window.size() < before, shrinks, "{}", p.a.window.size());
        assert_eq!(in_flight(&p), [0, 0]);
    }
}

#[test]
fn what_is_sent_again_counts_against_the_rate_too() {
    let us = Duration::from_micros;
    let mut p = warm(false, 0);
    p.a.qp.handle_notification(p.a.now);
    write(&mut p, 1, 64);
    assert_eq!(sent(&mut p).len(), 64);
    p.a.now = p.a.now + us(10);
    answer(&mut p, 0, GAP);
    assert_eq!(sent(&mut p).len(), 64);
    p.a.now = p.a.now + us(90);
    p.a.qp.handle_notification(p.a.now);
    write(&mut p, 2, 1);
    assert!(sent(&mut p).is_empty());
    // Half of 128 packets in 100 us: 16,000 bytes in 33 us.
    let wait = p.a.qp.next_timeout().unwrap().saturating_since(p.a.now);
    assert!((us(30)..us(36)).contains(&wait), "{wait:?}");
}

/// The last of three packets asks for an acknowledgement and is reported after 200 ms, which makes the silence before the next probe longer
/// than the usual 16 ms.
#[test]
fn a_packet_beyond_a_gap_measures_a_round_trip_unless_it_was_taken_for_lost() {
    for (late, measured) in [(false, true), (true, false)] {
        let mut p = warm(true, 0);
        write(&mut p, 1, 3);
        let flight = packets(&mut p.a);
        if late {
            p.a.sink.room = Some(0);
            while p.a.counters.timeouts == 0 {
                p.a.now = p.a.qp.next_timeout().unwrap();
                p.a.timeout();
                p.a.poll_transmit();
            }
            p.a.sink.room = None;
        }
        for n in [1, 2, 0] {
            p.a.now = p.a.now + MS * 100;
            p.b.handle(&flight[n]);
            packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
        }
        assert_eq!(p.a.completions().len(), 1);
        write(&mut p, 2, 1);
        sent(&mut p);
        let silence = p.a.qp.next_timeout().unwrap().saturating_since(p.a.now);
        assert_eq!(
            silence > MS * 200 && silence < MS * 300,
            measured,
            "late {late}: {silence:?}"
        );
    }
}

/// Its responses may end at any packet: to the peer a part is a request like another.
#[test]
fn the_next_part_of_a_read_is_asked_for_when_all_of_the_one_before_has_come() {
    let mut p = warm(false, 0);
    read(&mut p, 1, 60);
    let asked = packets(&mut p.a);
    asked.iter().for_each(|bytes| p.b.handle(bytes));
    // A window of 30 packets, and parts of 32.
    for _ in 0..4 {
        p.a.window.on_loss(p.a.now, Loss::Gap, 128 * PACKET);
    }
    p.a.now = p.a.now + MS;
    let answers = packets(&mut p.b);
    [0, 1, 59].iter().for_each(|n| p.a.handle(&answers[*n]));
    let part = packets(&mut p.a);
    assert_eq!(psns(&p, &part), [2]);
    part.iter().for_each(|bytes| p.b.handle(bytes));
    let answers = packets(&mut p.b);
    assert_eq!(answers.len(), 32);
    answers[..31].iter().for_each(|bytes| p.a.handle(bytes));
    assert!(p.a.window.available() >= 20 * PACKET);
    assert!(sent(&mut p).is_empty());
    p.a.handle(&answers[31]);
    assert_eq!(sent(&mut p), [34]);
}

#[test]
fn reads_that_were_taken_for_lost_are_not_in_flight_until_they_are_sent_again() {
    let others = 10 * PACKET;
    let mut p = warm(true, others);
    read(&mut p, 1, 1);
    read(&mut p, 2, 2);
    write(&mut p, 3, 6);
    let flight = packets(&mut p.a);
    assert_eq!(in_flight(&p), [9 * PACKET, others + 9 * PACKET]);
    flight[2..].iter().for_each(|bytes| p.b.handle(bytes));
    packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
    assert_eq!(in_flight(&p), [0, others]);
    p.b.handle(&flight[1]);
    packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
    assert_eq!(in_flight(&p), [0, others]);
    assert_eq!(sent(&mut p), [0, 1]);
    assert_eq!(in_flight(&p), [3 * PACKET, others + 3 * PACKET]);
    p.run();
    assert_eq!((p.a.completions().len(), in_flight(&p)), (3, [0, others]));
}
