//! Acknowledgements: their length, what they report of packets beyond a gap, and what is counted of them.

use roce_bth::{Aeth, Credits, Msn, NakCode, Opcode, Packet, Psn, Syndrome};
use roce_qp::{Counters, WindowConfig};
use roce_verbs::{Mtu, QpState, SendOp};

use crate::harness::*;

fn setup() -> Setup {
    Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    }
}

fn keeping() -> Setup {
    Setup { keeps: true, ..setup() }
}

/// Delivers the packets that one side sends now to the other side, except those that `lost` has.
fn deliver(from: &mut Side, to: &mut Side, lost: &[usize]) -> usize {
    let sent = from.drain();
    for (n, (_, bytes)) in sent.iter().enumerate() {
        if !lost.contains(&n) {
            to.handle(bytes);
        }
    }
    sent.len()
}

/// An acknowledgement that waits for a prompt answer leaves in one train with it, which needs packets of one length. Only a selective ACK may
/// be padded.
#[test]
fn an_acknowledgement_is_as_long_as_the_short_answer_that_it_waits_for() {
    const PLAIN: usize = 12 + 4 + 4;
    let mut p = Pair::new(Setup {
        mtu: Mtu::B1024,
        ..keeping()
    });
    let regions = [p.a.filled(1000, 1), p.b.filled(1000, 2)];
    let mut exchange = |len: usize| {
        p.a.recv(1, &[sge(&regions[0], 0, 1000)]);
        p.b.recv(1, &[sge(&regions[1], 0, 1000)]);
        p.a.send(1, SendOp::Send, &[sge(&regions[0], 0, 8)]);
        deliver(&mut p.a, &mut p.b, &[]);
        p.b.send(1, SendOp::Send, &[sge(&regions[1], 0, len)]);
        let sent = p.b.drain();
        sent.iter().for_each(|(_, bytes)| p.a.handle(bytes));
        p.run();
        sent.iter().map(|(_, bytes)| bytes.len()).collect::<Vec<_>>()
    };
    // As often as makes an answer count as prompt.
    (0..16).for_each(|_| drop(exchange(8)));
    for (len, expected) in [
        (0, PLAIN),
        (4, PLAIN),
        (5, 24),
        (8, 24),
        (100, 116),
        (101, 120),
        (244, 260),
        (245, PLAIN),
        (1000, PLAIN),
    ] {
        assert_eq!(
            exchange(len),
            [expected, 12 + len.next_multiple_of(4) + 4],
            "{len} bytes"
        );
    }
}

/// Returns the report that B sends after packets, of `count`, were lost: expected PSN from the first one on, and the bitmap.
fn report(count: usize, lost: &[usize]) -> (Pair, u32, Vec<u8>) {
    let mut p = Pair::new(Setup {
        window: WindowConfig {
            initial: 4 << 20,
            min: 4 << 20,
            max: 4 << 20,
        },
        ..keeping()
    });
    let (src, dst) = (p.a.filled(256 * count, 1), p.b.region(256 * count));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256 * count)]);
    while deliver(&mut p.a, &mut p.b, lost) > 0 {}
    let said = p.b.drain();
    let packet = Packet::parse(&said.last().expect("a report").1).expect("a packet");
    assert_eq!(packet.header.bth.opcode, Opcode::SelectiveAck);
    let (expected, bitmap) = packet.payload.split_at(4);
    let expected = Psn::new(u32::from_be_bytes(expected.try_into().unwrap()));
    let bitmap = bitmap.to_vec();
    let first = Psn::new(p.setup.psn);
    (p, expected.offset_from(first), bitmap)
}

#[test]
fn a_report_has_a_word_for_each_64_packets_and_fits_into_a_packet() {
    // The first PSN is 16 before a multiple of 64.
    for (count, lost, words) in [
        (12, 3, 1),
        (16, 3, 1),
        (17, 3, 2),
        (80, 20, 1),
        (81, 20, 2),
        (300, 3, 6),
        (2500, 3, 31),
    ] {
        let (_, expected, bitmap) = report(count, &[lost]);
        assert_eq!((expected as usize, bitmap.len()), (lost, 8 * words), "{count} packets");
        // All packets behind the lost one have arrived, as far as the report goes.
        let base = (lost + 48) / 64 * 64;
        for bit in 0..bitmap.len() * 8 {
            let n = (base + bit) as isize - 48;
            let arrived = bitmap[bit / 8] >> (bit % 8) & 1 == 1;
            let expected = n > lost as isize && n < count as isize;
            assert_eq!(arrived, expected, "packet {n} of {count}");
        }
    }
}

/// Name, what makes a counter 2, and the counter.
type Count = (&'static str, fn(&mut Pair), fn(&Pair) -> u64);

fn two_sends(p: &mut Pair) -> Vec<Vec<u8>> {
    let (src, dst) = (p.a.filled(8, 1), p.b.region(8));
    (0..2).for_each(|id| p.b.recv(id, &[sge(&dst, 0, 8)]));
    (0..2).for_each(|id| p.a.send(id, SendOp::Send, &[sge(&src, 0, 8)]));
    let sent: Vec<_> = p.a.drain().into_iter().map(|(_, bytes)| bytes).collect();
    sent.iter().for_each(|bytes| p.b.handle(bytes));
    p.b.drain();
    p.b.counters = Counters::default();
    sent
}

/// A selective ACK of A's packets up to `psn`, after which B expects the packet `expected`.
fn selective_ack(p: &mut Pair, psn: u32, expected: u32) {
    let at = |n: u32| Psn::new(p.setup.psn).add(n).value();
    let aeth = Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn: Msn::new(0),
    };
    let raw = Raw::new(Opcode::SelectiveAck, A, at(psn)).aeth(aeth);
    p.a.handle(&raw.payload(&at(expected).to_be_bytes()).bytes());
}

#[test]
fn what_happens_twice_is_counted_twice() {
    let counts: [Count; 7] = [
        (
            "acknowledgements of duplicates that one stands for",
            |p| {
                let sent = two_sends(p);
                let again = [&sent[0], &sent[1], &sent[1]];
                again.iter().for_each(|bytes| p.b.handle(bytes));
                let acks = p.b.headers();
                assert_eq!(acks.len(), 1);
                assert_eq!(acks[0].bth.psn, Psn::new(p.setup.psn).next());
            },
            |p| p.b.counters.ack_deferred,
        ),
        (
            "acknowledgements that a response stands for",
            |p| {
                let (src, dst) = (p.a.filled(8, 1), p.b.region(8));
                for id in 0..2 {
                    p.a.send(2 * id, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 8)]);
                    p.a.send(2 * id + 1, SendOp::Read(at(&dst, 0)), &[sge(&src, 0, 8)]);
                }
                deliver(&mut p.a, &mut p.b, &[]);
                let answers: Vec<Opcode> = p.b.headers().iter().map(|h| h.bth.opcode).collect();
                assert_eq!(answers, [Opcode::RcReadResponseOnly; 2]);
            },
            |p| p.b.counters.ack_deferred,
        ),
        (
            "selective ACKs",
            |p| {
                for lost in [3, 1] {
                    let (src, dst) = (p.a.filled(2560, 1), p.b.region(2560));
                    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 2560)]);
                    deliver(&mut p.a, &mut p.b, &[lost]);
                    assert_eq!(deliver(&mut p.b, &mut p.a, &[]), 1);
                    p.run();
                }
                assert_eq!(p.a.completions().len(), 2);
            },
            |p| p.a.counters.selective_acks - p.b.counters.selective_acks,
        ),
        (
            "selective ACKs of what was never sent, or of nothing",
            |p| {
                // Nothing is outstanding.
                selective_ack(p, 0, 0);
                let (src, dst) = (p.a.filled(2560, 1), p.b.region(2560));
                p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 2560)]);
                assert_eq!(deliver(&mut p.a, &mut p.b, &[]), 10);
                selective_ack(p, 10, 10);
                assert!(p.a.completions().is_empty());
                assert_eq!(p.a.counters.selective_acks, 0);
            },
            |p| p.a.counters.dropped_responses,
        ),
        (
            "selective ACKs in a state that sends nothing",
            |p| {
                p.a.modify(&roce_verbs::QpAttr {
                    state: Some(QpState::Err),
                    ..Default::default()
                });
                (0..2).for_each(|_| selective_ack(p, 0, 1));
            },
            |p| p.a.counters.dropped_state,
        ),
        (
            "parts of a READ that are asked for while it is sent",
            |p| {
                let src = p.b.filled(2560, 1);
                let ask = |p: &mut Pair, n: u32| {
                    let raw = Raw::new(Opcode::RcReadRequest, B, Psn::new(p.setup.psn).add(n).value());
                    let rest = 2560 - 256 * n;
                    p.b.handle(&raw.reth(src.addr() + u64::from(256 * n), src.rkey(), rest).bytes());
                };
                ask(p, 0);
                p.b.sink.room = Some(6);
                p.b.poll_transmit();
                p.b.sink.room = None;
                // What is still to be sent is not sent twice.
                [6, 3, 2].into_iter().for_each(|n| ask(p, n));
                let first = Psn::new(p.setup.psn);
                let answers: Vec<u32> = p.b.headers().iter().map(|h| h.bth.psn.offset_from(first)).collect();
                let expected: Vec<u32> = (0..10).chain(3..10).chain(2..10).collect();
                assert_eq!(answers, expected);
            },
            |p| p.b.counters.duplicate_parts,
        ),
        (
            "packets beyond a gap",
            |p| {
                let (src, dst) = (p.a.filled(768, 1), p.b.region(768));
                p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 768)]);
                deliver(&mut p.a, &mut p.b, &[0]);
            },
            |p| p.b.counters.out_of_seq_request,
        ),
    ];
    // Without selective ACKs duplicates are answered otherwise.
    let others = [(setup(), counts[0])];
    for (setup, (what, happen, count)) in counts.map(|count| (keeping(), count)).into_iter().chain(others) {
        let mut p = Pair::new(setup);
        happen(&mut p);
        assert_eq!(count(&p), 2, "{what}");
    }
}

/// The peer may have had the data before the memory was taken back.
#[test]
fn memory_taken_back_while_it_is_read_again_refuses_only_that_read() {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.b.filled(1024, 1), p.a.region(1024));
    p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 1024)]);
    let request = p.a.drain().remove(0).1;
    p.b.handle(&request);
    assert_eq!(p.b.drain().len(), 4);
    p.b.handle(&request);
    p.b.sink.room = Some(2);
    p.b.poll_transmit();
    p.b.sink.sent.clear();
    p.b.sink.room = None;
    p.b.mem.deregister(&src).unwrap();
    let answers = p.b.headers();
    let [refusal] = &answers[..] else {
        panic!("{} answers", answers.len())
    };
    let syndrome = refusal.aeth.map(|aeth| aeth.syndrome);
    assert_eq!(syndrome, Some(Syndrome::Nak(NakCode::RemoteAccessError)));
    assert_eq!((p.b.qp.state(), p.b.counters.naks_sent), (QpState::Rts, 1));
    let none = Counters::default();
    assert_eq!(p.b.counters.qp_failures, none.qp_failures);
}

/// After prompt answers an acknowledgement waits for the next one, 20 us.
#[test]
fn an_acknowledgement_that_waits_is_sent_when_its_time_is_over() {
    let mut p = Pair::new(setup());
    let regions = [p.a.filled(8, 1), p.b.filled(8, 2)];
    let deliver_one = |p: &mut Pair| {
        p.b.recv(1, &[sge(&regions[1], 0, 8)]);
        p.a.send(1, SendOp::Send, &[sge(&regions[0], 0, 8)]);
        deliver(&mut p.a, &mut p.b, &[]);
    };
    for _ in 0..16 {
        p.a.recv(1, &[sge(&regions[0], 0, 8)]);
        deliver_one(&mut p);
        p.b.send(1, SendOp::Send, &[sge(&regions[1], 0, 8)]);
        p.run();
    }
    deliver_one(&mut p);
    assert!(p.b.headers().is_empty());
    let due = p.b.qp.next_timeout().expect("a time to send it");
    assert_eq!(due.saturating_since(p.b.now).as_micros(), 20);
    p.b.timeout();
    assert!(p.b.headers().is_empty(), "too early");
    p.b.now = due;
    p.b.timeout();
    assert_eq!(p.b.headers().len(), 1);
    assert_eq!(p.b.qp.next_timeout(), None);
}

#[test]
fn a_gap_that_is_closed_before_it_is_reported_is_not_reported() {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.a.filled(1024, 1), p.b.region(1024));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 1024)]);
    let sent = p.a.drain();
    [0, 2, 1].iter().for_each(|n: &usize| p.b.handle(&sent[*n].1));
    let answers: Vec<_> =
        p.b.headers()
            .iter()
            .map(|h| (h.bth.psn, h.aeth.unwrap().syndrome))
            .collect();
    let second = Psn::new(p.setup.psn).next();
    assert_eq!(answers, [(second, Syndrome::Ack(Credits::INVALID))]);
}

/// Half of what arrived goes out at once, and as much in each 20 ms.
#[test]
fn after_an_overflow_responses_are_counted_against_the_pace() {
    let mut p = Pair::new(Setup {
        mtu: Mtu::B1024,
        ..setup()
    });
    let len = 4 << 20;
    let src = p.b.filled(len, 1);
    let silence = std::time::Duration::from_millis(67);
    p.b.window.on_response_loss(p.b.now, silence, 600 * 1536, 4 << 20);
    let request = Raw::new(Opcode::RcReadRequest, B, p.setup.psn);
    p.b.handle(&request.reth(src.addr(), src.rkey(), len as u32).bytes());
    assert_eq!(p.b.drain().len(), 300, "with their overhead");
    let due = p.b.qp.next_timeout().expect("a time to go on");
    p.b.timeout();
    assert_eq!(p.b.qp.next_timeout(), Some(due), "too early");
    p.b.now = due;
    p.b.timeout();
    assert_eq!(p.b.qp.next_timeout(), None);
    assert!(!p.b.drain().is_empty());
}

#[test]
fn a_receive_tells_who_sent_the_message() {
    let mut p = Pair::new(setup());
    p.b.recv(1, &[]);
    p.a.send(1, SendOp::Send, &[]);
    p.run();
    assert_eq!(p.b.received()[0].src_qp, roce_verbs::Qpn::new(A));
}

fn send(n: u32) -> Vec<u8> {
    let psn = Psn::new(setup().psn).add(n);
    Raw::new(Opcode::RcSendOnly, B, psn.value()).ack_req().bytes()
}

/// Refused once it is expected, and reported as arrived after that: the sender learns that it must come again though the refusal is lost.
#[test]
fn a_buffered_message_without_a_receive_is_refused_at_once_and_stays_reported() {
    let mut p = Pair::new(keeping());
    p.b.recv(1, &[]);
    [1, 0].iter().for_each(|n| p.b.handle(&send(*n)));
    let answers = p.b.headers();
    let refused = |h: &roce_bth::Header| matches!(h.aeth.map(|aeth| aeth.syndrome), Some(Syndrome::Rnr(_)));
    assert!(answers.iter().any(refused), "{answers:?}");
    p.b.handle(&send(2));
    let said = p.b.drain();
    let packet = Packet::parse(&said[0].1).unwrap();
    assert_eq!((said.len(), packet.header.bth.opcode), (1, Opcode::SelectiveAck));
    // The PSN of the first one is 48 beyond a multiple of 64.
    let word = u64::from_le_bytes(packet.payload[4..12].try_into().unwrap());
    assert_eq!(word, 0b110 << 48);
}

#[test]
fn a_refusal_that_is_due_is_sent_whatever_arrives_beyond_it() {
    let mut p = Pair::new(keeping());
    [0, 1].iter().for_each(|n| p.b.handle(&send(*n)));
    let answers = p.b.headers();
    let syndromes: Vec<_> = answers.iter().map(|h| h.aeth.unwrap().syndrome).collect();
    assert!(matches!(syndromes[..], [Syndrome::Rnr(_)]), "{syndromes:?}");
}

#[test]
fn as_much_is_buffered_as_the_peer_had_outstanding_before() {
    let mut p = Pair::new(keeping());
    let len = 256 * 300;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    for lost in [300, 0] {
        p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
        let sent = p.a.drain();
        if lost == 0 {
            // 200 PSNs ahead, more than the 64 of the beginning.
            p.b.handle(&sent[200].1);
            break;
        }
        sent.iter().for_each(|(_, bytes)| p.b.handle(bytes));
        p.run();
    }
    assert_eq!((p.b.counters.out_of_seq_request, p.b.counters.dropped_requests), (1, 0));
}

#[test]
fn packets_that_are_buffered_are_kept_when_selective_acks_begin() {
    let mut p = Pair::new(Setup { quiet: true, ..setup() });
    (0..2).for_each(|id| p.b.recv(id, &[]));
    p.b.handle(&send(1));
    p.b.qp.enable_selective_ack(&std::sync::Arc::default());
    assert!(p.b.qp.uses_selective_ack());
    p.b.handle(&send(0));
    assert_eq!(p.b.received().len(), 2);
}
