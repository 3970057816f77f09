//! Requests as they are sent: which of them ask for acknowledgements, which are solicited, and how many may be outstanding.

use roce_bth::{Header, Packet};
use roce_qp::{WaitReason, WindowConfig};
use roce_verbs::{Mtu, Payload, QpAttr, QpCaps, QpState, SendFlags, SendOp, SendWr, Sge, wr::PostError};

use crate::harness::*;

/// Payload of a packet, and its weight in the window.
const MTU: usize = 256;
const PACKET: usize = MTU + 512;

fn fixed(bytes: usize) -> Setup {
    Setup {
        mtu: Mtu::B256,
        window: WindowConfig {
            initial: bytes,
            min: bytes,
            max: bytes,
        },
        ..Setup::default()
    }
}

/// Posts a WRITE of so many packets, and returns what is sent.
fn write(p: &mut Pair, packets: usize) -> Vec<Header> {
    let len = packets * MTU;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    p.a.headers()
}

#[test]
fn an_acknowledgement_is_asked_for_four_times_a_window_every_16_to_64_packets() {
    for (window, interval) in [(40, 16), (64, 16), (80, 20), (100, 25), (256, 64), (1000, 64)] {
        let mut p = Pair::new(fixed(window * PACKET));
        let sent = write(&mut p, window.min(200) / 2);
        let asking: Vec<usize> = (1..=sent.len()).filter(|n| sent[n - 1].bth.ack_req).collect();
        let last = [sent.len()];
        let expected = (1..)
            .map(|n| n * interval)
            .take_while(|n| *n < sent.len())
            .chain(last)
            .collect::<Vec<_>>();
        assert_eq!(asking, expected, "a window of {window}");
    }
}

/// On a lossy path one lost acknowledgement must not cause a timeout.
#[test]
fn each_packet_of_a_window_below_eight_asks_for_an_acknowledgement() {
    for (window, asks) in [(8 * PACKET - 1, true), (8 * PACKET, false)] {
        let mut p = Pair::new(fixed(window));
        let sent = write(&mut p, 20);
        assert_eq!((sent.len(), sent[0].bth.ack_req), (window / PACKET, asks));
    }
}

#[test]
fn the_last_packet_of_a_message_that_takes_a_receive_is_solicited() {
    let remote = |p: &Pair| at(&p.b.region(600), 0);
    type Op = fn(roce_verbs::RemoteAddr) -> SendOp;
    let cases: [(Op, bool); 5] = [
        (|_| SendOp::Send, true),
        (|_| SendOp::SendWithImm(7), true),
        (|to| SendOp::WriteWithImm(to, 7), true),
        (SendOp::Write, false),
        (SendOp::Read, false),
    ];
    for (op, solicited) in cases {
        for flags in [SendFlags::SOLICITED, SendFlags::empty()] {
            let mut p = Pair::new(fixed(64 << 10));
            let (src, op) = (p.a.filled(600, 1), op(remote(&p)));
            p.a.send_flags(1, op, &[sge(&src, 0, 600)], flags);
            let sent: Vec<bool> = p.a.headers().iter().map(|h| h.bth.solicited).collect();
            let (last, rest) = sent.split_last().unwrap();
            let expected = solicited && flags == SendFlags::SOLICITED;
            assert_eq!((*last, rest.contains(&true)), (expected, false), "{op:?}");
        }
    }
}

#[test]
fn beyond_a_gap_no_more_is_sent_than_the_peer_buffers() {
    let mut p = Pair::new(Setup {
        keeps: true,
        ..fixed(16 << 20)
    });
    let sent = |p: &mut Pair| p.a.drain().into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>();
    let len = 9000 * MTU;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, len)]);
    p.a.sink.room = Some(5000);
    while p.a.sink.sent.len() < 5000 {
        p.a.poll_transmit();
    }
    p.a.sink.room = None;
    // Without a gap there is no such limit, and with one it begins at the gap.
    let flight: Vec<_> = p.a.sink.sent.drain(..).map(|(_, bytes)| bytes).collect();
    let mut psns = flight.iter().map(|bytes| Packet::parse(bytes).unwrap().header.bth.psn);
    assert_eq!(psns.next_back(), Some(roce_bth::Psn::new(p.setup.psn).add(4999)));
    flight[..2000].iter().for_each(|bytes| p.b.handle(bytes));
    flight[2001..2010].iter().for_each(|bytes| p.b.handle(bytes));
    p.b.drain().iter().for_each(|(_, bytes)| p.a.handle(bytes));
    assert_eq!(sent(&mut p).len(), 1 + 2000 + 4096 - 5000, "the lost one, and new ones");
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Psn);
}

#[test]
fn it_is_told_why_nothing_is_sent() {
    let mut p = Pair::new(fixed(4 * PACKET));
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Empty);
    assert_eq!(write(&mut p, 2).len(), 2);
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Acks);
    assert_eq!(write(&mut p, 20).len(), 2);
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Window);
    p.a.drain();
    p.a.modify(&QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    });
    assert_eq!(p.a.qp.wait_reason(), WaitReason::State(QpState::Err));
}

#[test]
fn a_post_has_as_many_bytes_as_its_operation_and_the_queue_pair_take() {
    let mut p = Pair::new(Setup {
        caps: QpCaps {
            max_inline_data: 16,
            max_send_sge: 2,
            ..QpCaps::default()
        },
        ..Setup::default()
    });
    let region = p.a.filled(64, 1);
    let sges: Vec<Sge> = (0..3).map(|n| sge(&region, n, 1)).collect();
    let invalidate = SendOp::LocalInvalidate(region.rkey());
    let flags = SendFlags::SIGNALED;
    let data = [0; 17];
    for (op, payload, expected) in [
        (SendOp::Send, Payload::Inline(&data[..16]), Ok(())),
        (
            SendOp::Send,
            Payload::Inline(&data),
            Err(PostError::InlineTooLong { given: 17, max: 16 }),
        ),
        (SendOp::Send, Payload::Sges(&sges[..2]), Ok(())),
        (
            SendOp::Send,
            Payload::Sges(&sges),
            Err(PostError::TooManySges { given: 3, max: 2 }),
        ),
        (invalidate, Payload::Sges(&sges[..1]), Err(PostError::Length(1))),
        (invalidate, Payload::Sges(&[]), Ok(())),
    ] {
        let wr = SendWr {
            wr_id: 1,
            op,
            flags,
            payload,
        };
        assert_eq!(p.a.try_send(&wr), expected, "{op:?}");
    }
}
