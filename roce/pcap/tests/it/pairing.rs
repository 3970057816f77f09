//! Which packets are one conversation, when no message of the connection manager says it.

use roce_bth::{Bth, Deth, Header, Opcode, Psn, QKey, Qpn, Syndrome};
use roce_pcap::judge::Endpoint;
use roce_port::cm::mad::{Mad, Rep, Req};

use crate::common::wire::{A, B, QP_A, QP_B, Wire, ack, answer, request};

fn send(psn: u32) -> Header {
    request(Opcode::RcSendOnly, psn)
}

/// Returns the packets of each conversation, by sender.
fn packets(wire: &Wire) -> Vec<[u64; 2]> {
    wire.judge.conversations().iter().map(|c| c.packets).collect()
}

/// Returns the queue pairs of each conversation.
fn queue_pairs(wire: &Wire) -> Vec<[Option<u32>; 2]> {
    let all = wire.judge.conversations();
    all.iter().map(|c| c.ends.map(|end| end.qpn)).collect()
}

/// An answer comes first, then the requests that it does not belong to, then one that shows which those are.
#[test]
fn a_conversation_of_answers_is_joined_with_that_of_its_requests() {
    let mut wire = Wire::new();
    wire.b(answer(Opcode::RcAcknowledge, 5, Syndrome::Reserved(0x80), 0), 0);
    wire.ecn = 3;
    wire.a(request(Opcode::RcSendFirst, 10), 1024);
    // Shorter than the path MTU: an error. Other bytes for the same PSN: a warning.
    wire.a(request(Opcode::RcSendMiddle, 11), 1020);
    wire.a(request(Opcode::RcSendMiddle, 11), 1024);
    for psn in 12..80 {
        wire.a(request(Opcode::RcSendMiddle, psn), 1024);
    }
    wire.ecn = 0;
    assert_eq!(packets(&wire), [[1, 0], [71, 0]]);
    assert_eq!((wire.judge.conversation_of(0), wire.judge.conversation_of(1)), (0, 1));
    wire.b(ack(79, 0), 0);
    assert_eq!((wire.judge.conversation_of(0), wire.judge.conversation_of(1)), (0, 0));
    assert_eq!(wire.judge.endpoint_of(0, 1), (0, 1));
    assert_eq!([0, 1].map(|sender| wire.judge.endpoint_of(1, sender)), [(0, 1), (0, 0)]);
    let ends = [(B, QP_B), (A, QP_A)].map(|(addr, qpn)| Endpoint {
        addr: addr.parse().unwrap(),
        qpn: Some(qpn),
    });
    assert_eq!(wire.judge.ends(0), Some(ends));
    let found = wire.found();
    let rules: Vec<_> = found.iter().map(|f| f.split(' ').nth(1).unwrap()).collect();
    assert_eq!(
        rules,
        ["syndrome", "payload-length", "repeat-differs", "ecn-unanswered"]
    );
    let summary = wire.summary();
    assert_eq!(
        (summary.packets, summary.mtu, summary.ends),
        ([2, 71], Some(1024), ends)
    );
    assert_eq!((summary.errors, summary.warnings), (2, 2));
    assert_eq!(summary.time_ns[0], 1_010_000);
}

/// Answers that belong to a conversation with known queue pairs are its own, even if another one's requests fit.
#[test]
fn a_conversation_with_both_queue_pairs_takes_no_other_in() {
    for requests in [0, 1] {
        let mut wire = Wire::stated();
        for _ in 0..requests {
            wire.a(send(10), 8);
        }
        wire.send(wire.us + 10, QP_B + 1, send(10), 8);
        wire.b(ack(10, 1), 0);
        assert_eq!(packets(&wire), [[requests, 1], [1, 0]]);
    }
}

#[test]
fn a_queue_pair_that_is_paired_takes_no_other_answers() {
    let mut wire = Wire::new();
    wire.a(send(10), 8);
    wire.b(ack(10, 1), 0);
    wire.a(send(11), 8);
    // To another queue pair of A.
    wire.send(wire.us + 10, QP_A + 1, ack(11, 2), 0);
    assert_eq!(packets(&wire), [[2, 1], [1, 0]]);
    // Neither does one whose connection was replaced.
    let mut wire = Wire::new();
    wire.a(send(10), 8);
    wire.state(None, None, None);
    wire.send(wire.us + 10, QP_A + 1, ack(10, 1), 0);
    assert_eq!(packets(&wire), [[1, 0], [1, 0]]);
}

/// Both queue pairs are of the same host, and answer each other.
#[test]
fn a_host_talks_to_itself() {
    let mut wire = Wire::new();
    wire.peer = A;
    wire.a(send(10), 8);
    wire.b(send(10), 8);
    wire.a(ack(10, 1), 0);
    wire.b(ack(10, 1), 0);
    assert_eq!(queue_pairs(&wire), [[Some(QP_A), Some(QP_B)]]);
    assert_eq!(packets(&wire), [[2, 2]]);
}

fn datagram(src_qp: u32) -> Header {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::new(0), Psn::new(0)));
    header.deth = Some(Deth {
        qkey: QKey(0),
        reserved: 0,
        src_qp: Qpn::new(src_qp),
    });
    header
}

#[test]
fn datagrams_between_the_same_two_queue_pairs_are_a_conversation() {
    let mut wire = Wire::new();
    wire.a(datagram(QP_A), 4096);
    // From another queue pair, to another one, and between the same two.
    wire.b(datagram(QP_B + 1), 8);
    wire.send(wire.us + 10, QP_A + 1, datagram(QP_B), 8);
    wire.b(datagram(QP_B), 4100);
    let found = wire.found();
    assert_eq!(found, ["4 datagram-length B: 4100 bytes"]);
    assert_eq!(wire.judge.conversations().len(), 3);
}

#[test]
fn a_notification_answers_packets_that_experienced_congestion() {
    for notified in [false, true] {
        let mut wire = Wire::stated();
        wire.ecn = 3;
        for psn in 0..64 {
            wire.a(send(psn), 8);
        }
        wire.ecn = 0;
        wire.b(ack(63, 64), 0);
        if notified {
            wire.b(Header::new(Bth::new(Opcode::Cnp, Qpn::new(0), Psn::new(0))), 0);
        }
        let found = wire.found();
        assert_eq!(found.len(), usize::from(!notified), "{found:?}");
    }
}

/// A queue pair that was answered, and whose peer answers to another one after a pause.
fn after(pause_us: u64, between: fn(&mut Wire)) -> Vec<[Option<u32>; 2]> {
    let mut wire = Wire::new();
    between(&mut wire);
    wire.a(send(10), 8);
    wire.b(ack(10, 1), 0);
    wire.send(wire.us + pause_us, QP_A + 1, ack(500, 1), 0);
    queue_pairs(&wire)
}

#[test]
fn answers_to_another_queue_pair_after_a_pause_are_of_the_same_one() {
    let first = [Some(QP_A), Some(QP_B)];
    assert_eq!(after(500_001, |_| ()), [first, [Some(QP_B), Some(QP_A + 1)]]);
    assert_eq!(after(500_000, |_| ()), [first, [None, Some(QP_A + 1)]]);
    // Another host's conversation is none of the candidates.
    let found = after(500_001, |w| {
        w.peer = "10.0.0.3";
        w.send(10, QP_B, send(70), 8);
        w.b(ack(70, 1), 0);
        w.peer = B;
    });
    assert_eq!(found[1..], [first, [Some(QP_B), Some(QP_A + 1)]]);
    // The second endpoint's requests.
    let mut wire = Wire::new();
    wire.a(send(10), 8);
    wire.b(ack(10, 1), 0);
    wire.b(send(20), 8);
    wire.a(ack(20, 1), 0);
    wire.send(wire.us + 600_000, QP_B + 1, ack(500, 1), 0);
    assert_eq!(queue_pairs(&wire), [first, [Some(QP_A), Some(QP_B + 1)]]);
    // An endpoint that sent no requests gets no answers.
    let mut wire = Wire::new();
    wire.a(send(10), 8);
    wire.b(ack(10, 1), 0);
    wire.send(wire.us + 600_000, QP_B + 1, ack(500, 1), 0);
    assert_eq!(queue_pairs(&wire), [first, [None, Some(QP_B + 1)]]);
}

/// A queue pair number with another source port and other PSNs has another owner, after a pause.
#[test]
fn a_queue_pair_number_has_a_new_owner_after_a_pause() {
    for (pause_us, missing) in [(500_000, 1), (500_001, 0)] {
        let mut wire = Wire::new();
        wire.a(send(10), 8);
        wire.b(ack(10, 1), 0);
        wire.port += 1;
        wire.send(wire.us + pause_us, QP_B, send(100), 8);
        wire.b(ack(100, 1), 0);
        wire.found();
        let unknown = wire.summary().not_checked;
        let missed = unknown.iter().filter(|text| text.contains("missing in the capture"));
        assert_eq!(missed.count(), missing, "{unknown:?}");
    }
}

#[test]
fn conversations_beyond_those_that_are_remembered_are_counted() {
    const MAX: u32 = 1 << 16;
    let mut wire = Wire::new();
    for qpn in QP_B..QP_B + MAX + 2 {
        wire.send(wire.us + 10, qpn, send(10), 8);
    }
    wire.a(send(11), 8);
    assert_eq!(wire.judge.not_followed(), 2);
    assert_eq!(wire.judge.conversations().len(), 1 << 16);
    assert_eq!(wire.judge.conversations()[0].packets, [2, 0]);
    // Neither are connections.
    let mad = Mad::new(
        1,
        Req {
            local_comm_id: 5,
            local_qpn: Qpn::new(QP_A),
            path_mtu: 3,
            ..Req::default()
        },
    );
    wire.mad(true, &mad.emit());
    let rep = Rep {
        local_comm_id: 6,
        remote_comm_id: 5,
        local_qpn: Qpn::new(QP_B),
        ..Rep::default()
    };
    wire.mad(false, &Mad::new(1, rep).emit());
    assert_eq!(wire.judge.connection_messages().count(), 0);
}
