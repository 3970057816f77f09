//! Counts of packets: late ones are not sent again, and a lost one costs few others.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use roce_bth::{Class, Header, Opcode, Packet, Psn, Syndrome};
use roce_qp::{TxKind, WindowConfig};
use roce_verbs::mem::Region;
use roce_verbs::{Instant, Mtu, SendOp};

use crate::harness::*;

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);

/// A pair that has measured some round trips.
fn warm(setup: Setup) -> Pair {
    let mut p = Pair::new(setup);
    let (src, dst) = (p.a.filled(4096, 1), p.b.region(4096));
    for i in 0..8 {
        p.a.send(1000 + i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 4096)]);
        p.run();
    }
    assert_eq!(p.a.completions().len(), 8);
    p
}

/// Only the clock of one side runs, and nothing comes to it. Returns what it sends.
fn silence(side: &mut Side, time: Duration) -> Vec<Vec<u8>> {
    let end = side.now + time;
    let mut sent = Vec::new();
    while let Some(next) = side.qp.next_timeout().filter(|at| *at <= end) {
        side.now = side.now.max(next);
        side.timeout();
        sent.extend(side.drain().into_iter().map(|(_, bytes)| bytes));
    }
    side.now = end;
    sent
}

/// Brings packets to the other side and its answers back.
fn deliver(p: &mut Pair, packets: impl IntoIterator<Item = Vec<u8>>) {
    for bytes in packets {
        p.b.handle(&bytes);
    }
    for (_, bytes) in p.b.drain() {
        p.a.handle(&bytes);
    }
}

#[test]
fn a_peer_that_is_not_scheduled_for_a_while_costs_a_few_probes() {
    let mut p = warm(Setup::default());
    let len = 100 << 10;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    let sent: Vec<_> = p.a.drain().into_iter().map(|(_, b)| b).collect();
    assert_eq!(sent.len(), 100);
    let extra = silence(&mut p.a, MS * 30);
    assert_eq!(p.a.counters.timeouts, 0);
    assert!(extra.len() <= 5, "{} packets sent again", extra.len());
    p.b.now = p.a.now;
    deliver(&mut p, sent.into_iter().chain(extra));
    p.run();
    assert!(p.a.completions()[0].is_ok());
    assert!(p.a.counters.retransmits <= 5, "{}", p.a.counters.retransmits);
}

#[test]
fn a_timeout_resends_one_packet_and_a_late_acknowledgement_calls_it_off() {
    let mut p = warm(Setup {
        timeout: 20,
        ..Setup::default()
    });
    let len = 100 << 10;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    let size = p.a.window.size();
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    let sent: Vec<_> = p.a.drain().into_iter().map(|(_, b)| b).collect();
    let extra = silence(&mut p.a, MS * 300);
    assert!(p.a.counters.timeouts > 0);
    assert!(extra.len() <= 10, "{} packets sent again", extra.len());
    assert!(p.a.window.size() < size);
    // The peer wakes up, and answers half of it at first.
    p.b.now = p.a.now;
    let mut sent = sent.into_iter();
    deliver(&mut p, sent.by_ref().take(48));
    assert!(p.a.drain().is_empty(), "the rest is on its way");
    assert_eq!((p.a.counters.spurious_timeouts, p.a.window.size() >= size), (1, true));
    deliver(&mut p, sent.chain(extra));
    p.run();
    assert!(p.a.completions()[0].is_ok());
    assert_eq!(p.a.window.in_flight(), 0);
    assert!(p.a.counters.retransmits <= 10, "{}", p.a.counters.retransmits);
}

#[test]
fn when_a_whole_flight_is_lost_it_is_sent_again_once() {
    for reads in [false, true] {
        let mut p = warm(Setup::default());
        let len = 100 << 10;
        let (src, dst) = (p.a.filled(len, 1), p.b.filled(len, 1));
        let (op, from) = match reads {
            true => (SendOp::Read(at(&dst, 0)), p.a.region(len)),
            false => (SendOp::Write(at(&dst, 0)), src),
        };
        p.a.send(1, op, &[sge(&from, 0, len)]);
        let flight = p.a.drain();
        assert!(!flight.is_empty());
        let mut data = 0;
        p.run_with(LONG, |_, packet| {
            data += u64::from(!packet.payload.is_empty());
            Fate::Deliver
        });
        assert!(data <= 104, "{data} packets for 100");
        assert!(p.a.completions()[0].is_ok());
        assert_eq!(
            (bytes(&dst, 0, len), bytes(&from, 0, len)),
            (pattern(len, 1), pattern(len, 1))
        );
    }
}

fn lossy(p: &mut Pair, loss: f64, seed: u64) -> u64 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut data = 0;
    p.run_with(LONG, |_, packet| {
        data += u64::from(!packet.payload.is_empty());
        match rng.random_bool(loss) {
            true => Fate::Drop,
            false => Fate::Deliver,
        }
    });
    data
}

#[test]
fn a_lossy_path_is_not_filled_with_what_is_dropped_behind_a_gap() {
    for (loss, most) in [(0.01, 2.0), (0.04, 2.6), (0.1, 3.5)] {
        for reads in [false, true] {
            let mut p = Pair::new(Setup {
                mtu: Mtu::B4096,
                timeout: 20,
                window: WindowConfig::default(),
                ..Setup::default()
            });
            let len = 1 << 20;
            let (here, there) = (p.a.filled(len, 1), p.b.filled(len, 1));
            for i in 0..16 {
                let op = match reads {
                    true => SendOp::Read(at(&there, 0)),
                    false => SendOp::Write(at(&there, 0)),
                };
                p.a.send(i, op, &[sge(&here, 0, len)]);
            }
            let sent = lossy(&mut p, loss, 1);
            assert_eq!(p.a.completions().iter().filter(|c| c.is_ok()).count(), 16);
            let share = sent as f64 / (16.0 * 256.0);
            assert!(
                share < most,
                "{share} times the data sent at a loss of {loss}, reads: {reads}"
            );
            assert_eq!((p.a.window.in_flight(), p.b.window.in_flight()), (0, 0));
        }
    }
}

#[test]
fn a_read_longer_than_the_window_is_asked_for_in_pieces_that_fit() {
    let mut p = Pair::new(Setup {
        window: WindowConfig {
            initial: 64 << 10,
            min: 16 << 10,
            max: 64 << 10,
        },
        ..Setup::default()
    });
    let len = 1 << 20;
    let (src, dst) = (p.b.filled(len, 3), p.a.region(len));
    p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, len)]);
    let (mut asked, mut next) = (0, Psn::new(p.setup.psn));
    let mut in_flight = 0i64;
    p.run_with(LONG, |dir, packet| {
        let header = packet.header;
        if dir == Dir::AtoB {
            let reth = header.reth().unwrap();
            assert_eq!((header.bth.psn, reth.va), (next, src.addr() + asked));
            asked += u64::from(reth.dma_len);
            next = next.add(reth.dma_len.div_ceil(1024));
            in_flight += i64::from(reth.dma_len);
            assert!(in_flight <= 96 << 10, "{in_flight}");
        } else {
            in_flight -= packet.payload.len() as i64;
        }
        Fate::Deliver
    });
    assert_eq!(asked, len as u64);
    assert_eq!(bytes(&dst, 0, len), pattern(len, 3));
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!((p.a.counters.retransmits, p.a.window.in_flight()), (0, 0));
}

#[test]
fn a_read_in_pieces_takes_no_more_of_the_peer_than_agreed() {
    for rd_atomic in [1, 2] {
        let mut p = Pair::new(Setup {
            rd_atomic,
            window: WindowConfig {
                initial: 16 << 10,
                min: 16 << 10,
                max: 256 << 10,
            },
            ..Setup::default()
        });
        let len = 1 << 20;
        let (src, dst) = (p.b.filled(len, 3), p.a.region(2 * len));
        p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, len)]);
        p.a.send(2, SendOp::Read(at(&src, 0)), &[sge(&dst, len, len)]);
        let sent = lossy(&mut p, 0.02, 7);
        assert!(p.a.completions().iter().all(|c| c.is_ok()));
        assert_eq!(
            (bytes(&dst, 0, len), bytes(&dst, len, len)),
            (pattern(len, 3), pattern(len, 3))
        );
        assert_eq!(p.b.counters.naks_sent, 0);
        assert!(sent < 3 * 2048, "{sent}");
    }
}

#[test]
fn reads_of_many_queue_pairs_share_the_window() {
    let setup = Setup {
        window: WindowConfig {
            initial: 64 << 10,
            min: 16 << 10,
            max: 64 << 10,
        },
        ..Setup::default()
    };
    let (mut p, mut q) = (Pair::new(setup.clone()), Pair::new(setup));
    let len = 200 << 10;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    let (from, to) = (q.b.filled(len, 2), q.a.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    q.a.send(1, SendOp::Read(at(&from, 0)), &[sge(&to, 0, len)]);
    let full = p.a.drain();
    // Both send to the same peer, that is, with the same window.
    std::mem::swap(&mut p.a.window, &mut q.a.window);
    assert!(
        q.a.drain().is_empty(),
        "nothing is in flight of it, but it would be far too much"
    );
    std::mem::swap(&mut p.a.window, &mut q.a.window);
    deliver(&mut p, full.into_iter().take(20).map(|(_, b)| b));
    std::mem::swap(&mut p.a.window, &mut q.a.window);
    assert_eq!(q.a.drain().len(), 1, "it can't be kept out for ever either");
}

/// A pair with sixteen READs of one packet each posted, and the regions.
fn short_reads() -> (Pair, [Arc<Region>; 2]) {
    let mut p = warm(Setup {
        rd_atomic: 16,
        ..Setup::default()
    });
    let (src, dst) = (p.b.filled(16 * 1024, 1), p.a.region(16 * 1024));
    for i in 0..16 {
        let place = 1024 * i as usize;
        p.a.send(i, SendOp::Read(at(&src, place)), &[sge(&dst, place, 1024)]);
    }
    (p, [src, dst])
}

#[test]
fn short_reads_whose_answers_are_late_are_not_all_asked_for_again() {
    let (mut p, _regions) = short_reads();
    let asked = p.a.drain();
    assert_eq!(asked.len(), 16);
    let again = silence(&mut p.a, MS * 18);
    assert_eq!(again.len(), 1);
    p.b.now = p.a.now;
    for (_, bytes) in asked {
        p.b.handle(&bytes);
    }
    // One after the other, and time to send between them.
    for (_, bytes) in p.b.drain() {
        p.a.handle(&bytes);
        assert!(p.a.drain().is_empty());
    }
    assert_eq!(p.a.completions().len(), 16);
    assert_eq!(p.a.counters.retransmits, 1);
}

#[test]
fn when_all_answers_of_short_reads_are_lost_they_are_asked_for_again_after_two_silences() {
    let (mut p, _regions) = short_reads();
    assert_eq!(p.a.drain().len(), 16);
    p.run();
    assert_eq!(p.a.completions().len(), 16);
    assert!(p.a.counters.retransmits <= 17, "{}", p.a.counters.retransmits);
    assert_eq!((p.a.counters.tail_probes, p.a.counters.timeouts), (1, 0));
}

/// A requester like rdma_rxe behind a queue: it asks for everything at once, and for the rest when nothing has come for
/// 67 ms.
struct Greedy {
    queue: VecDeque<Psn>,
    drained: Instant,
    expected: Psn,
    progress: Instant,
}

#[test]
fn responses_find_a_pace_that_a_greedy_requester_can_take() {
    const QUEUE: usize = 1000;
    const PACKETS: u32 = 8192;
    let per_packet = Duration::from_micros(25);
    let mut b = Pair::new(Setup::default()).b;
    let src = b.filled(PACKETS as usize * 1024, 1);
    let first = Psn::new(Setup::default().psn);
    let end = first.add(PACKETS);
    let mut peer = Greedy {
        queue: VecDeque::new(),
        drained: b.now,
        expected: first,
        progress: b.now,
    };
    let ask = |side: &mut Side, from: Psn| {
        let offset = from.offset_from(first) as usize * 1024;
        let raw = Raw::new(Opcode::RcReadRequest, B, from.value());
        let reth = raw.reth(
            src.addr() + offset as u64,
            src.rkey(),
            (PACKETS as usize * 1024 - offset) as u32,
        );
        side.handle(&reth.bytes());
    };
    ask(&mut b, first);
    let mut sent = 0;
    while peer.expected != end {
        b.now = b.now + per_packet;
        if b.qp.next_timeout().is_some_and(|at| at <= b.now) {
            b.timeout();
        }
        for (kind, bytes) in b.drain() {
            let header = Header::from(Packet::parse(&bytes).unwrap().header);
            assert_eq!(header.bth.opcode.info().class, Class::ReadResponse);
            assert!(matches!(kind, TxKind::Response | TxKind::Repetition));
            sent += 1;
            if peer.queue.len() < QUEUE {
                peer.queue.push_back(header.bth.psn);
            }
        }
        while peer.drained + per_packet <= b.now {
            peer.drained = peer.drained + per_packet;
            if peer.queue.pop_front() == Some(peer.expected) {
                peer.expected = peer.expected.next();
                peer.progress = b.now;
            }
        }
        if peer.progress + MS * 67 < b.now {
            peer.progress = b.now;
            ask(&mut b, peer.expected);
        }
        assert!(sent < 10 * PACKETS);
    }
    assert!(sent < PACKETS * 5 / 2, "{sent} packets for {PACKETS}");
}

#[test]
fn progress_after_a_gap_is_acknowledged_unasked() {
    let mut p = Pair::new(Setup::default());
    let len = 10 << 10;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    let sent: Vec<_> = p.a.drain().into_iter().map(|(_, b)| b).collect();
    let lost = 3;
    let asks = |bytes: &[u8]| Packet::parse(bytes).unwrap().header.bth.ack_req;
    assert!(
        !asks(&sent[lost]) && !asks(&sent[lost + 1]),
        "else the test shows nothing"
    );
    for bytes in &sent[..lost] {
        p.b.handle(bytes);
    }
    let psn = |i: usize| Packet::parse(&sent[i]).unwrap().header.bth.psn;
    let mut answer = |i: usize| {
        p.b.handle(&sent[i]);
        let mut out = p.b.drain().into_iter().map(|(_, bytes)| {
            let header = Header::from(Packet::parse(&bytes).unwrap().header);
            (
                header.bth.psn,
                matches!(header.aeth.unwrap().syndrome, Syndrome::Ack(_)),
            )
        });
        (out.next(), out.next())
    };
    assert_eq!(answer(lost + 1), (Some((psn(lost), false)), None));
    assert_eq!(answer(lost + 2), (None, None), "a gap is reported once");
    assert_eq!(answer(lost), (Some((psn(lost), true)), None));
    assert_eq!(answer(lost + 1), (None, None), "the next goes without");
}
