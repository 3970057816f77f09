//! Unreliable connections.

use proptest::prelude::*;
use roce_bth::{Class, Opcode};
use roce_verbs::{
    AccessFlags, AsyncEvent, Completion, Mtu, QpState, QpType, Qpn, RecvWr, SendOp, WcFlags, WcOpcode, WcStatus,
};

use crate::harness::*;

fn small() -> Setup {
    Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    }
}

fn pair() -> Pair {
    Pair::of(QpType::Uc, small())
}

fn ids(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

#[test]
fn messages_arrive_whole_and_nothing_is_acknowledged() {
    for len in [0, 1, 255, 256, 257, 1000] {
        let mut p = pair();
        let (src, dst) = (p.a.filled(1000, 1), p.b.region(3000));
        p.b.recv(1, &[sge(&dst, 0, 1000)]);
        p.b.recv(2, &[]);
        let sges = [sge(&src, 0, len)];
        p.a.send(10, SendOp::SendWithImm(7), &sges);
        p.a.send(11, SendOp::Write(at(&dst, 1000)), &sges);
        p.a.send(12, SendOp::WriteWithImm(at(&dst, 2000), 8), &sges);
        let mut back = 0;
        p.run_with(std::time::Duration::from_secs(1), |dir, packet| {
            back += u32::from(dir == Dir::BtoA);
            assert!(!packet.header.bth.ack_req);
            Fate::Deliver
        });
        assert_eq!(back, 0);
        let sent = p.a.completions();
        assert_eq!(ids(&sent), [10, 11, 12].map(|id| (id, WcStatus::Success)));
        let got: Vec<_> =
            p.b.received()
                .iter()
                .map(|c| (c.wr_id, c.opcode, c.byte_len, c.imm, c.flags))
                .collect();
        assert_eq!(
            got,
            [
                (1, WcOpcode::Recv, len as u32, 7, WcFlags::WITH_IMM),
                (2, WcOpcode::RecvRdmaWithImm, len as u32, 8, WcFlags::WITH_IMM),
            ]
        );
        for offset in [0, 1000, 2000] {
            assert_eq!(bytes(&dst, offset, len), pattern(1000, 1)[..len]);
        }
        assert_eq!(p.a.qp.next_timeout(), None);
    }
}

#[test]
fn a_lost_packet_costs_its_message_and_no_other() {
    // Three messages of 4 packets each.
    for lost in 0..12 {
        let mut p = pair();
        let (src, dst) = (p.a.filled(1024, 1), p.b.region(4096));
        for wr_id in 0..3 {
            p.b.recv(wr_id, &[sge(&dst, wr_id as usize * 1024, 1024)]);
        }
        for wr_id in 0..3 {
            p.a.send(wr_id, SendOp::SendWithImm(wr_id as u32), &[sge(&src, 0, 1024)]);
        }
        for (i, (_, packet)) in p.a.drain().iter().enumerate() {
            if i != lost {
                p.b.handle(packet);
            }
        }
        let left: Vec<u32> = (0..3).filter(|m| *m != lost as u32 / 4).collect();
        let got = p.b.received();
        assert_eq!(got.iter().map(|c| c.imm).collect::<Vec<_>>(), left, "packet {lost}");
        // The broken message's receive serves the next one.
        assert_eq!(ids(&got), [(0, WcStatus::Success), (1, WcStatus::Success)]);
        // The last message may still be waiting for its end.
        let waiting = usize::from(lost == 11);
        assert_eq!((p.b.qp.recv_queue_len(), p.b.qp.state()), (1 - waiting, QpState::Rts));
        assert_eq!(bytes(&dst, 0, 2048), [pattern(1024, 1), pattern(1024, 1)].concat());
        assert!(p.b.events.is_empty());
        assert!(p.b.drain().is_empty(), "no NAK");
    }
}

#[test]
fn a_message_starts_with_any_number_but_goes_on_only_with_the_next() {
    let mut p = pair();
    let dst = p.b.region(512);
    p.b.recv(1, &[sge(&dst, 0, 512)]);
    p.b.recv(2, &[sge(&dst, 0, 512)]);
    let part = [1; 256];
    let send = |opcode, psn| Raw::new(opcode, B, psn).payload(&part).bytes();
    p.b.handle(&send(Opcode::UcSendFirst, 500));
    p.b.handle(&send(Opcode::UcSendLast, 502));
    p.b.handle(&send(Opcode::UcSendLast, 501));
    assert!(p.b.received().is_empty(), "broken off by the gap");
    p.b.handle(&send(Opcode::UcSendFirst, 900));
    p.b.handle(&send(Opcode::UcSendLast, 901));
    assert_eq!(ids(&p.b.received()), [(1, WcStatus::Success)]);
    // A new beginning ends what was under way.
    p.b.handle(&send(Opcode::UcSendFirst, 902));
    p.b.handle(&send(Opcode::UcSendOnly, 903));
    assert_eq!(ids(&p.b.received()), [(2, WcStatus::Success)]);
    assert_eq!(p.b.counters.dropped_messages, 2);
}

#[test]
fn writes_that_are_not_allowed_vanish() {
    let setup = Setup {
        access: AccessFlags::LOCAL_WRITE,
        ..small()
    };
    for (setup, key_ok) in [(setup, true), (small(), false)] {
        let mut p = Pair::of(QpType::Uc, setup);
        let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
        let mut to = at(&dst, 0);
        to.rkey.0 ^= if key_ok { 0 } else { 0x100 };
        p.b.recv(1, &[]);
        p.a.send(1, SendOp::WriteWithImm(to, 1), &[sge(&src, 0, 600)]);
        p.run();
        assert_eq!(ids(&p.a.completions()), [(1, WcStatus::Success)]);
        assert_eq!(bytes(&dst, 0, 600), vec![0; 600]);
        assert!(p.b.received().is_empty() && p.b.events.is_empty());
        assert_eq!((p.b.qp.state(), p.b.qp.recv_queue_len()), (QpState::Rts, 1));
        assert_eq!(p.b.counters.dropped_messages, 1);
        // And the next message is not affected.
        p.a.send(2, SendOp::SendWithImm(5), &[]);
        p.run();
        assert_eq!(p.b.received()[0].imm, 5);
    }
}

#[test]
fn without_a_receive_a_message_is_lost() {
    let mut p = pair();
    let src = p.a.filled(600, 1);
    p.a.send(1, SendOp::Send, &[sge(&src, 0, 600)]);
    p.run();
    p.b.recv(1, &[]);
    // Too short: the receive stays.
    p.a.send(2, SendOp::Send, &[sge(&src, 0, 1)]);
    p.a.send(3, SendOp::Send, &[]);
    p.run();
    assert_eq!(ids(&p.b.received()), [(1, WcStatus::Success)]);
    assert_eq!((p.b.counters.dropped_no_receive, p.b.counters.dropped_length), (1, 1));
    assert_eq!(p.a.completions().len(), 3);
}

#[test]
fn a_shared_queues_receive_comes_back_when_its_message_breaks_off() {
    let setup = small();
    let a = Side::with(A, &setup, |c| c.qp_type = QpType::Uc);
    let b = Side::with(B, &setup, |c| {
        c.qp_type = QpType::Uc;
        c.srq = Some(shared_queue(c.pd));
    });
    let mut p = Pair::up(setup, a, b);
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    let srq = p.b.qp.config().srq.clone().unwrap();
    for wr_id in [1, 2] {
        let sges = [sge(&dst, 0, 600)];
        srq.post(&RecvWr { wr_id, sges: &sges }).unwrap();
    }
    p.a.send(1, SendOp::Send, &[sge(&src, 0, 600)]);
    p.a.send(2, SendOp::Send, &[sge(&src, 0, 600)]);
    let packets = p.a.drain();
    for i in [0, 2, 3, 4, 5] {
        p.b.handle(&packets[i].1);
    }
    assert_eq!(
        ids(&p.b.received()),
        [(1, WcStatus::RemoteInvalidRequestError), (2, WcStatus::Success)]
    );
    assert_eq!(p.b.qp.state(), QpState::Rts);
}

#[test]
fn a_failing_send_puts_the_send_queue_in_error() {
    let mut p = pair();
    let gone = p.a.region(10);
    let bad = sge(&gone, 0, 10);
    p.a.mem.deregister(&gone).unwrap();
    p.a.send(1, SendOp::Send, &[bad]);
    p.a.send(2, SendOp::Send, &[]);
    p.run();
    assert_eq!(
        ids(&p.a.completions()),
        [(1, WcStatus::LocalProtectionError), (2, WcStatus::FlushError)]
    );
    assert_eq!(p.a.qp.state(), QpState::Sqe);
}

#[test]
fn packets_that_unreliable_connections_lack_are_dropped() {
    let mut p = pair();
    for opcode in Opcode::ALL {
        let info = opcode.info();
        if info.service != roce_bth::Service::Uc {
            p.b.handle(&Raw::new(*opcode, B, 0).bytes());
        }
    }
    assert!(p.b.drain().is_empty() && p.b.events.is_empty());
    assert_eq!(p.b.qp.state(), QpState::Rts);
}

#[test]
fn the_first_packet_establishes_the_connection() {
    let setup = small();
    let mut b = Side::with(B, &setup, |c| c.qp_type = QpType::Uc);
    let mut other = Side::with(A, &setup, |c| c.qp_type = QpType::Uc);
    b.bring_up(&setup, A, 5, 6);
    other.bring_up(&setup, B, 6, 5);
    let mut waiting = Side::with(B, &setup, |c| c.qp_type = QpType::Uc);
    waiting.bring_up(&setup, A, 5, 6);
    assert!(waiting.events.is_empty());
    other.send(1, SendOp::Write(Default::default()), &[]);
    for (_, packet) in other.drain() {
        b.handle(&packet);
    }
    // In RTS already: no event.
    assert_eq!(b.events, [] as [AsyncEvent; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Under any losses and swaps messages arrive whole, each with the bytes of its sender, and nothing is answered.
    #[test]
    fn what_arrives_is_whole(fates in prop::collection::vec(0u8..10, 60), lens in prop::collection::vec(0usize..900, 12)) {
        let mut p = pair();
        let src = p.a.region(900 * 12);
        let dst = p.b.region(900 * 12);
        for (i, len) in lens.iter().enumerate() {
            src.write(i * 900, &pattern(900, i as u8)).unwrap();
            p.b.recv(i as u64, &[sge(&dst, i * 900, 900)]);
            p.a.send(i as u64, SendOp::SendWithImm(i as u32), &[sge(&src, i * 900, *len)]);
        }
        let mut packets: Vec<_> = p.a.drain().into_iter().map(|(_, b)| b).collect();
        for (i, fate) in fates.iter().enumerate().take(packets.len()) {
            match fate {
                0 => packets[i].clear(),
                1 if i > 0 => packets.swap(i, i - 1),
                _ => {}
            }
        }
        for packet in packets.iter().filter(|b| !b.is_empty()) {
            p.b.handle(packet);
        }
        prop_assert!(p.b.drain().is_empty());
        let got = p.b.received();
        for (place, c) in got.iter().enumerate() {
            prop_assert_eq!(c.status, WcStatus::Success);
            prop_assert_eq!(c.wr_id, place as u64, "receives are used in order, none is skipped");
            let message = c.imm as usize;
            prop_assert_eq!(c.byte_len as usize, lens[message]);
            prop_assert_eq!(bytes(&dst, place * 900, lens[message]), &pattern(900, message as u8)[..lens[message]]);
        }
        // One may be waiting for the rest of its message.
        let kept = p.b.qp.recv_queue_len() + got.len();
        prop_assert!(kept == 12 || kept == 11, "{}", kept);
        prop_assert_eq!(p.a.completions().len(), 12);
    }
}

#[test]
fn the_wire_is_that_of_unreliable_connections() {
    let mut p = pair();
    let src = p.a.filled(600, 1);
    p.a.send(1, SendOp::WriteWithImm(at(&src, 0), 3), &[sge(&src, 0, 600)]);
    let opcodes: Vec<_> = p.a.headers().iter().map(|h| (h.bth.opcode, h.bth.dest_qp)).collect();
    let to = Qpn::new(B);
    assert_eq!(
        opcodes,
        [
            (Opcode::UcWriteFirst, to),
            (Opcode::UcWriteMiddle, to),
            (Opcode::UcWriteLastImm, to)
        ]
    );
    assert!(opcodes.iter().all(|(o, _)| o.info().class == Class::Write));
}

#[test]
fn long_messages_go_out_at_a_pace_that_a_socket_can_take() {
    let mut p = pair();
    let len = 1 << 20;
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.b.recv(1, &[sge(&dst, 0, len)]);
    p.a.send(1, SendOp::Send, &[sge(&src, 0, len)]);
    let first = p.a.drain();
    let bytes_out: usize = first.iter().map(|(_, b)| b.len()).sum();
    assert!(bytes_out <= 128 << 10, "{bytes_out} bytes at once");
    assert_eq!(p.a.qp.wait_reason(), roce_qp::WaitReason::Pace);
    for (_, packet) in &first {
        p.b.handle(packet);
    }
    let begin = p.now;
    p.run();
    assert_eq!(ids(&p.b.received()), [(1, WcStatus::Success)]);
    assert_eq!(bytes(&dst, 0, len), pattern(len, 1));
    // 4096 packets of 256 bytes weigh three times as much.
    let took = p.now.saturating_since(begin);
    assert!(took > std::time::Duration::from_millis(8), "{took:?}");
    assert!(took < std::time::Duration::from_millis(40), "{took:?}");
}
