//! Every operation, without faults.

use std::time::Duration;

use roce_bth::{Class, NakCode, Opcode, Position, Psn, Syndrome};
use roce_qp::{Ctx, Poll, WaitReason, WindowConfig};
use roce_verbs::mem::{Region, WindowKind};
use roce_verbs::{
    AccessFlags, LKey, Mtu, Payload, QpCaps, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode,
    WcStatus,
    wr::{BindWindow, FastRegister, PostError},
};

use crate::harness::*;

fn setup(mtu: Mtu) -> Setup {
    Setup {
        mtu,
        ..Setup::default()
    }
}

#[test]
fn a_send_lands_in_the_scattered_receive() {
    for mtu in Mtu::ALL {
        let m = mtu.bytes();
        for len in [0, 1, 3, m - 1, m, m + 1, 3 * m, 5 * m + 17] {
            let mut p = Pair::new(setup(mtu));
            let (src, dst) = (p.a.filled(len + 8, 1), p.b.region(len + 64));
            let cut = len / 3;
            p.b.recv(7, &[sge(&dst, 5, cut), sge(&dst, 20 + cut, len - cut)]);
            p.a.send(
                9,
                SendOp::Send,
                &[sge(&src, 2, len / 2), sge(&src, 2 + len / 2, len - len / 2)],
            );
            p.run();
            let (c, r) = (p.a.completions(), p.b.received());
            assert_eq!((c.len(), r.len()), (1, 1), "{len} at {mtu:?}");
            assert_eq!(
                (c[0].wr_id, c[0].status, c[0].opcode),
                (9, WcStatus::Success, WcOpcode::Send)
            );
            assert_eq!(
                (r[0].wr_id, r[0].byte_len, r[0].opcode),
                (7, len as u32, WcOpcode::Recv)
            );
            assert_eq!(r[0].flags, WcFlags::empty());
            let want = &pattern(len + 8, 1)[2..2 + len];
            assert_eq!(bytes(&dst, 5, cut), want[..cut]);
            assert_eq!(bytes(&dst, 20 + cut, len - cut), want[cut..]);
        }
    }
}

#[test]
fn the_key_of_an_element_without_bytes_is_not_checked() {
    let mut p = Pair::new(setup(Mtu::B1024));
    let no_key = Sge {
        lkey: LKey(0x1234_5678),
        ..Sge::default()
    };
    p.b.recv(7, &[no_key]);
    p.a.send(9, SendOp::Send, &[no_key]);
    p.run();
    let status = |completions: Vec<roce_verbs::Completion>| completions.iter().map(|c| c.status).collect::<Vec<_>>();
    assert_eq!(status(p.a.completions()), [WcStatus::Success]);
    assert_eq!(status(p.b.received()), [WcStatus::Success]);
}

#[test]
fn write_and_read_move_bytes_both_ways_at_every_mtu() {
    for mtu in Mtu::ALL {
        let m = mtu.bytes();
        for len in [1, m, m + 1, 20 * m + 3] {
            let mut p = Pair::new(setup(mtu));
            let (src, dst, back) = (p.a.filled(len, 3), p.b.region(len + 9), p.a.region(len));
            p.a.send(1, SendOp::Write(at(&dst, 9)), &[sge(&src, 0, len)]);
            p.a.send(2, SendOp::Read(at(&dst, 9)), &[sge(&back, 0, len)]);
            p.run();
            let c = p.a.completions();
            assert_eq!(
                c.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>(),
                [(1, WcStatus::Success), (2, WcStatus::Success)]
            );
            assert_eq!(
                (c[0].opcode, c[1].opcode, c[1].byte_len),
                (WcOpcode::RdmaWrite, WcOpcode::RdmaRead, len as u32)
            );
            assert_eq!(bytes(&dst, 9, len), pattern(len, 3));
            assert_eq!(bytes(&back, 0, len), pattern(len, 3));
            assert!(p.b.received().is_empty());
        }
    }
}

#[test]
fn immediate_data_and_solicitation_arrive() {
    let mut p = Pair::new(setup(Mtu::B256));
    let (src, dst) = (p.a.filled(1000, 1), p.b.region(1000));
    p.b.recv(1, &[sge(&dst, 0, 1000)]);
    p.b.recv(2, &[]);
    p.b.recv(3, &[]);
    p.a.send_flags(
        1,
        SendOp::SendWithImm(0xdead_beef),
        &[sge(&src, 0, 600)],
        SendFlags::SOLICITED,
    );
    p.a.send(2, SendOp::WriteWithImm(at(&dst, 0), 77), &[sge(&src, 0, 1000)]);
    p.a.send(3, SendOp::WriteWithImm(RemoteAddr::default(), 78), &[]);
    p.run();
    let r = p.b.received();
    assert_eq!(
        r.iter()
            .map(|c| (c.wr_id, c.opcode, c.imm, c.byte_len, c.solicited))
            .collect::<Vec<_>>(),
        [
            (1, WcOpcode::Recv, 0xdead_beef, 600, true),
            (2, WcOpcode::RecvRdmaWithImm, 77, 1000, false),
            (3, WcOpcode::RecvRdmaWithImm, 78, 0, false),
        ]
    );
    assert!(r.iter().all(|c| c.flags == WcFlags::WITH_IMM));
    assert_eq!(bytes(&dst, 0, 1000), pattern(1000, 1));
    assert_eq!(p.a.completions().len(), 3);
}

#[test]
fn atomics_return_the_former_value() {
    let mut p = Pair::new(Setup::default());
    let (word, old) = (p.b.region(64), p.a.region(64));
    word.write(8, &100u64.to_ne_bytes()).unwrap();
    let remote = at(&word, 8);
    p.a.send(1, SendOp::FetchAdd { remote, add: 5 }, &[sge(&old, 0, 8)]);
    p.a.send(
        2,
        SendOp::CompareSwap {
            remote,
            compare: 105,
            swap: 7,
        },
        &[sge(&old, 8, 8)],
    );
    p.a.send(
        3,
        SendOp::CompareSwap {
            remote,
            compare: 105,
            swap: 9,
        },
        &[sge(&old, 16, 8)],
    );
    p.a.send(4, SendOp::FetchAdd { remote, add: u64::MAX }, &[sge(&old, 24, 8)]);
    p.run();
    let c = p.a.completions();
    assert_eq!(
        c.iter().map(|c| (c.wr_id, c.status, c.opcode)).collect::<Vec<_>>(),
        [
            (1, WcStatus::Success, WcOpcode::FetchAdd),
            (2, WcStatus::Success, WcOpcode::CompareSwap),
            (3, WcStatus::Success, WcOpcode::CompareSwap),
            (4, WcStatus::Success, WcOpcode::FetchAdd),
        ]
    );
    let values: Vec<u64> = bytes(&old, 0, 32)
        .chunks(8)
        .map(|c| u64::from_ne_bytes(c.try_into().unwrap()))
        .collect();
    assert_eq!(values, [100, 105, 7, 7]);
    assert_eq!(bytes(&word, 8, 8), 6u64.to_ne_bytes());
}

#[test]
fn inline_data_is_copied_when_posted() {
    let mut p = Pair::new(Setup::default());
    let dst = p.b.region(300);
    let mut data = pattern(200, 8);
    p.a.try_send(&SendWr {
        wr_id: 1,
        op: SendOp::Write(at(&dst, 1)),
        flags: SendFlags::empty(),
        payload: Payload::Inline(&data),
    })
    .unwrap();
    data.fill(0);
    p.run();
    assert_eq!(bytes(&dst, 1, 200), pattern(200, 8));
}

#[test]
fn unsignalled_successes_make_no_completion_unless_the_queue_signals_all() {
    for signal_all in [false, true] {
        let mut p = Pair::new(Setup {
            signal_all,
            ..Setup::default()
        });
        let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
        for i in 0..6 {
            let flags = if i == 4 {
                SendFlags::SIGNALED
            } else {
                SendFlags::empty()
            };
            p.a.send_flags(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)], flags);
        }
        p.run();
        let ids: Vec<u64> = p.a.completions().iter().map(|c| c.wr_id).collect();
        assert_eq!(ids, if signal_all { vec![0, 1, 2, 3, 4, 5] } else { vec![4] });
        assert_eq!(p.a.qp.send_queue_len(), 0);
    }
}

#[test]
fn packets_look_as_the_specification_says() {
    let mut p = Pair::new(setup(Mtu::B256));
    let (src, dst) = (p.a.filled(1000, 1), p.b.region(1000));
    p.a.send_flags(
        1,
        SendOp::WriteWithImm(at(&dst, 4), 5),
        &[sge(&src, 0, 700)],
        SendFlags::SOLICITED,
    );
    p.a.send(2, SendOp::Read(at(&dst, 8)), &[sge(&src, 0, 600)]);
    p.a.send(3, SendOp::SendWithInv(roce_verbs::RKey(9)), &[sge(&src, 0, 5)]);
    let h = p.a.headers();
    let opcodes: Vec<Opcode> = h.iter().map(|h| h.bth.opcode).collect();
    assert_eq!(
        opcodes,
        [
            Opcode::RcWriteFirst,
            Opcode::RcWriteMiddle,
            Opcode::RcWriteLastImm,
            Opcode::RcReadRequest,
            Opcode::RcSendOnlyInv
        ]
    );
    // The READ takes three PSNs.
    let psns: Vec<u32> = h.iter().map(|h| h.bth.psn.value() & 0xff).collect();
    assert_eq!(psns, [0xf0, 0xf1, 0xf2, 0xf3, 0xf6]);
    let reth = h[0].reth.unwrap();
    assert_eq!((reth.va, reth.rkey, reth.dma_len), (dst.addr() + 4, dst.rkey(), 700));
    assert_eq!(h[3].reth.unwrap().dma_len, 600);
    assert_eq!((h[2].imm, h[4].ieth), (Some(5), Some(roce_verbs::RKey(9))));
    assert_eq!(
        h.iter().map(|h| h.bth.ack_req).collect::<Vec<_>>(),
        [false, false, true, true, true]
    );
    assert_eq!(
        h.iter().map(|h| h.bth.solicited).collect::<Vec<_>>(),
        [false, false, true, false, false]
    );
    assert_eq!(h[4].bth.pad, 3);
    assert!(h.iter().all(|h| h.bth.dest_qp.value() == B));
}

#[test]
fn read_responses_are_segmented_and_carry_the_acknowledgement() {
    let mut p = Pair::new(setup(Mtu::B256));
    let (src, dst) = (p.b.filled(700, 1), p.a.region(700));
    p.a.send(2, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 700)]);
    for (_, b) in p.a.drain() {
        p.b.handle(&b);
    }
    let h = p.b.headers();
    assert_eq!(
        h.iter().map(|h| h.bth.opcode.info().position).collect::<Vec<_>>(),
        [Position::First, Position::Middle, Position::Last]
    );
    assert!(h.iter().all(|h| h.bth.opcode.info().class == Class::ReadResponse));
    let syndromes: Vec<Option<u8>> = h.iter().map(|h| h.aeth.map(|a| a.syndrome.to_byte())).collect();
    assert_eq!(syndromes, [Some(0x1f), None, Some(0x1f)]);
    assert_eq!(h[0].aeth.unwrap().msn.value(), 1);
    assert_eq!(h[2].bth.psn, h[0].bth.psn.add(2));
}

#[test]
fn one_acknowledgement_stands_for_a_batch() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    for i in 0..20 {
        p.a.send(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    }
    for (_, b) in p.a.drain() {
        p.b.handle(&b);
    }
    let acks = p.b.headers();
    assert_eq!(acks.len(), 1);
    assert_eq!(acks[0].aeth.unwrap().msn.value(), 20);
    assert_eq!(acks[0].bth.psn.value(), (0x00ff_fff0 + 19) & 0x00ff_ffff);
    assert_eq!(p.b.counters.ack_deferred, 19);
}

/// The longest wait of an acknowledgement.
const HOLD: Duration = Duration::from_micros(20);

/// Prompt answers in a row that let acknowledgements wait.
const PROMPT: u32 = 16;

/// Connects two sides; the right one has answered [`PROMPT`] messages promptly, so that its acknowledgements wait for its answers.
fn ping_pong(mtu: Mtu) -> Pair {
    let setup = setup(mtu);
    let mut p = Pair::up(setup.clone(), Side::new(A, &setup), Side::new(B, &setup));
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    let (back, there) = (p.b.filled(64, 1), p.a.region(64));
    for _ in 0..PROMPT {
        write_from_a(&mut p, &src, &dst, 1);
        p.b.send(0, SendOp::Write(at(&there, 0)), &[sge(&back, 0, 64)]);
        for (_, packet) in p.b.drain() {
            p.a.handle(&packet);
        }
        for (_, packet) in p.a.drain() {
            p.b.handle(&packet);
        }
    }
    p.a.completions();
    p.b.completions();
    p
}

fn write_from_a(p: &mut Pair, src: &Region, dst: &Region, n: u64) {
    for i in 0..n {
        p.a.send(i, SendOp::Write(at(dst, 0)), &[sge(src, 0, 64)]);
        for (_, b) in p.a.drain() {
            p.b.handle(&b);
        }
    }
}

fn classes(p: &mut Pair) -> Vec<Class> {
    p.b.headers().iter().map(|h| h.bth.opcode.info().class).collect()
}

#[test]
fn an_acknowledgement_leaves_at_once_unless_answers_are_prompt() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    write_from_a(&mut p, &src, &dst, 1);
    assert_eq!(classes(&mut p), [Class::Acknowledge]);
}

#[test]
fn an_acknowledgement_waits_for_a_write_and_follows_it_in_one_train() {
    let mut p = ping_pong(Mtu::B1024);
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    write_from_a(&mut p, &src, &dst, 1);
    assert!(p.b.headers().is_empty());
    assert_eq!(p.b.qp.next_timeout(), Some(p.b.now + HOLD));
    let (back, there) = (p.b.filled(64, 1), p.a.region(64));
    p.b.send(1, SendOp::Write(at(&there, 0)), &[sge(&back, 0, 64)]);
    assert_eq!(classes(&mut p), [Class::Write, Class::Acknowledge]);
}

/// Programs take an answer as proof that what it answers is done.
#[test]
fn an_acknowledgement_leaves_ahead_of_an_answer_that_completes_a_receive() {
    for op in [SendOp::Send, SendOp::SendWithImm(7)] {
        for mut p in [Pair::new(Setup::default()), ping_pong(Mtu::B1024)] {
            let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
            let back = p.b.filled(64, 1);
            p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
            for (_, packet) in p.a.drain() {
                p.b.handle(&packet);
            }
            p.b.send(1, op, &[sge(&back, 0, 64)]);
            assert_eq!(classes(&mut p), [Class::Acknowledge, Class::Send]);
        }
    }
}

#[test]
fn an_answer_waits_until_responses_ahead_of_its_acknowledgement_are_sent() {
    let mut p = Pair::new(Setup::default());
    let (big, there) = (p.b.filled(20 * 1024, 1), p.a.region(20 * 1024));
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    p.a.send(1, SendOp::Read(at(&big, 0)), &[sge(&there, 0, 20 * 1024)]);
    p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    for (_, packet) in p.a.drain() {
        p.b.handle(&packet);
    }
    p.b.send(1, SendOp::Send, &[sge(&src, 0, 0)]);
    let sent = classes(&mut p);
    assert_eq!(sent[sent.len() - 2..], [Class::Acknowledge, Class::Send]);
    assert!(sent[..sent.len() - 2].iter().all(|class| *class == Class::ReadResponse));
}

#[test]
fn an_acknowledgement_waits_for_its_time_at_most() {
    let mut p = ping_pong(Mtu::B1024);
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    write_from_a(&mut p, &src, &dst, 1);
    p.b.now = p.b.now + HOLD / 2;
    write_from_a(&mut p, &src, &dst, 1);
    p.b.timeout();
    assert!(p.b.headers().is_empty());
    p.b.now = p.b.now + HOLD / 2;
    p.b.timeout();
    let acks = p.b.headers();
    assert_eq!(acks.len(), 1, "the second does not make the first wait longer");
    assert_eq!(acks[0].aeth.unwrap().msn.value(), PROMPT + 2);
    assert_eq!(p.b.qp.next_timeout(), None);
}

#[test]
fn the_peers_window_is_not_kept_closed() {
    let mut p = ping_pong(Mtu::B1024);
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    write_from_a(&mut p, &src, &dst, 7);
    assert!(p.b.headers().is_empty());
    write_from_a(&mut p, &src, &dst, 1);
    assert_eq!(p.b.headers().len(), 1);
    write_from_a(&mut p, &src, &dst, 7);
    assert!(p.b.headers().is_empty(), "counted from the last acknowledgement");
}

#[test]
fn who_was_told_of_a_gap_hears_at_once() {
    let mut p = ping_pong(Mtu::B1024);
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    for i in 0..2 {
        p.a.send(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    }
    let sent = p.a.drain();
    p.b.handle(&sent[1].1);
    let nak = p.b.headers();
    assert_eq!(nak[0].aeth.unwrap().syndrome, Syndrome::Nak(NakCode::PsnSequenceError));
    p.b.handle(&sent[0].1);
    assert_eq!(p.b.headers().len(), 1, "it waits for the word that it may go on");
}

#[test]
fn who_is_refused_hears_at_once() {
    let mut p = ping_pong(Mtu::B1024);
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    write_from_a(&mut p, &src, &dst, 1);
    assert!(p.b.headers().is_empty(), "it is held");
    // The key is not one that a peer may invalidate: the SEND is acknowledged, and B fails (IBA 9.9.3, class J).
    let buffer = p.b.region(64);
    for id in [10, 11] {
        p.b.recv(id, &[sge(&buffer, 0, 64)]);
        p.a.send(id, SendOp::SendWithInv(RKey(0x1234)), &[]);
    }
    let sent = p.a.drain();
    // The gap is closed before its report went out.
    p.b.handle(&sent[1].1);
    p.b.handle(&sent[0].1);
    let told = p.b.headers();
    assert_eq!(told.len(), 1);
    let aeth = told[0].aeth.unwrap();
    assert_eq!(
        (aeth.msn.value(), told[0].bth.psn),
        (PROMPT + 2, roce_bth::Packet::parse(&sent[0].1).unwrap().header.bth.psn)
    );
    assert!(matches!(aeth.syndrome, Syndrome::Ack(_)));
}

#[test]
fn an_acknowledgement_follows_close_behind_its_request() {
    // A full turn, and a sink that has room for the request alone.
    for (len, room) in [(128 * 256, None), (64, Some(1))] {
        let mut p = ping_pong(Mtu::B256);
        let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
        write_from_a(&mut p, &src, &dst, 1);
        assert!(p.b.headers().is_empty(), "it is held");
        let (back, there) = (p.b.filled(len, 1), p.a.region(len));
        p.b.send(1, SendOp::Write(at(&there, 0)), &[sge(&back, 0, len)]);
        p.b.sink.room = room;
        let classes: Vec<Class> = p.b.headers().iter().map(|h| h.bth.opcode.info().class).collect();
        let place = classes.iter().position(|c| *c == Class::Acknowledge);
        assert!(
            place.is_some_and(|n| (1..=16).contains(&n)),
            "{len} bytes, room {room:?}: {place:?}"
        );
    }
}

#[test]
fn long_messages_ask_for_four_acknowledgements_in_each_window() {
    let mut p = Pair::new(setup(Mtu::B256));
    let (src, dst) = (p.a.filled(256 * 100, 1), p.b.region(256 * 100));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 256 * 100)]);
    let h = p.a.headers();
    let gaps: Vec<usize> = h.split_inclusive(|h| h.bth.ack_req).map(<[_]>::len).collect();
    let quarter = WindowConfig::default().initial / 4;
    assert!(gaps.len() >= 2 && gaps.iter().all(|g| *g * 256 <= quarter), "{gaps:?}");
}

#[test]
fn fast_registration_opens_a_region_and_invalidation_closes_it() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(4096, 1), p.b.region(4096));
    let fast = p.b.mem.alloc_fast(p.b.pd).unwrap();
    let key = fast.rkey().next();
    let register = FastRegister {
        key,
        lkey: dst.lkey(),
        addr: dst.addr() + 100,
        length: 1000,
        iova: 0x5000,
        access: AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::LOCAL_WRITE,
    };
    p.b.send(1, SendOp::FastRegister(register), &[]);
    // The key works locally as soon as the queue gets there.
    let local = roce_verbs::Sge {
        addr: 0x5000,
        length: 10,
        lkey: LKey(key.0),
    };
    let other = p.a.region(64);
    p.b.send(2, SendOp::Write(at(&other, 0)), &[local]);
    p.run();
    assert_eq!(
        p.b.completions()
            .iter()
            .map(|c| (c.status, c.opcode))
            .collect::<Vec<_>>(),
        [
            (WcStatus::Success, WcOpcode::FastRegister),
            (WcStatus::Success, WcOpcode::RdmaWrite)
        ]
    );
    let remote = RemoteAddr {
        addr: 0x5000,
        rkey: key,
    };
    p.a.send(1, SendOp::Write(remote), &[sge(&src, 0, 1000)]);
    p.run();
    assert!(p.a.completions()[0].is_ok());
    assert_eq!(bytes(&dst, 100, 1000), pattern(1000, 1));
    // The peer takes it back with a SEND.
    p.b.recv(5, &[]);
    p.a.send(2, SendOp::SendWithInv(key), &[]);
    p.run();
    let r = p.b.received();
    assert_eq!((r[0].flags, r[0].invalidated), (WcFlags::WITH_INV, key));
    p.b.send(
        3,
        SendOp::FastRegister(FastRegister {
            key: key.next(),
            ..register
        }),
        &[],
    );
    p.b.send(4, SendOp::LocalInvalidate(key.next()), &[]);
    p.run();
    assert!(p.b.completions().iter().all(|c| c.is_ok()));
    let remote = RemoteAddr {
        addr: 0x5000,
        rkey: key.next(),
    };
    p.a.send(3, SendOp::Write(remote), &[sge(&src, 0, 8)]);
    p.run();
    assert_eq!(p.a.completions().last().unwrap().status, WcStatus::RemoteAccessError);
}

#[test]
fn a_type_2_window_opens_a_part_of_a_region_to_its_queue_pair() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(4096, 1), p.b.region(4096));
    let window = p.b.mem.alloc_window(p.b.pd, WindowKind::Type2).unwrap();
    let key = window.rkey().next();
    let bind = BindWindow {
        key,
        lkey: dst.lkey(),
        addr: dst.addr() + 64,
        length: 128,
        access: AccessFlags::REMOTE_WRITE,
    };
    p.b.send(1, SendOp::BindWindow(bind), &[]);
    p.run();
    let remote = RemoteAddr {
        addr: dst.addr() + 64,
        rkey: key,
    };
    p.a.send(1, SendOp::Write(remote), &[sge(&src, 0, 128)]);
    p.run();
    assert!(p.a.completions()[0].is_ok());
    assert_eq!(bytes(&dst, 64, 128), pattern(128, 1));
    // One byte further is outside.
    p.a.send(2, SendOp::Write(remote), &[sge(&src, 0, 129)]);
    p.run();
    assert_eq!(p.a.completions()[0].status, WcStatus::RemoteAccessError);
}

#[test]
fn a_fence_waits_for_reads() {
    let mut p = Pair::new(Setup::default());
    let (remote, local) = (p.b.filled(5000, 1), p.a.region(5000));
    p.a.send(1, SendOp::Read(at(&remote, 0)), &[sge(&local, 0, 5000)]);
    p.a.send(2, SendOp::Write(at(&remote, 0)), &[sge(&local, 0, 10)]);
    p.a.send_flags(
        3,
        SendOp::Write(at(&remote, 0)),
        &[sge(&local, 0, 10)],
        SendFlags::FENCE | SendFlags::SIGNALED,
    );
    let opcodes: Vec<Opcode> = p.a.headers().iter().map(|h| h.bth.opcode).collect();
    assert_eq!(opcodes, [Opcode::RcReadRequest, Opcode::RcWriteOnly]);
    assert_eq!(p.a.qp.wait_reason(), roce_qp::WaitReason::Fence);
    p.run();
    assert_eq!(p.a.completions().len(), 3);
}

#[test]
fn a_fenced_invalidation_waits_for_everything_before_it() {
    for fenced in [true, false] {
        let mut p = Pair::new(Setup::default());
        let (from, dst) = (p.a.filled(3000, 1), p.b.region(3000));
        let fast = p.a.mem.alloc_fast(p.a.pd).unwrap();
        let key = fast.rkey().next();
        let register = FastRegister {
            key,
            lkey: from.lkey(),
            addr: from.addr(),
            length: 3000,
            iova: 0,
            access: AccessFlags::LOCAL_WRITE,
        };
        let through = Sge {
            addr: 0,
            length: 3000,
            lkey: LKey(key.0),
        };
        p.a.send(1, SendOp::FastRegister(register), &[]);
        p.a.send(2, SendOp::Write(at(&dst, 0)), &[through]);
        let flags = SendFlags::SIGNALED | if fenced { SendFlags::FENCE } else { SendFlags::empty() };
        p.a.send_flags(3, SendOp::LocalInvalidate(key), &[], flags);
        p.a.send(4, SendOp::Write(at(&dst, 0)), &[sge(&from, 0, 8)]);
        // All that goes out at first is lost, and must be read from the same memory again.
        let lost = p.a.drain().len();
        if fenced {
            assert_eq!((lost, p.a.qp.wait_reason()), (3, WaitReason::Local));
        }
        p.run();
        let done: Vec<_> = p.a.completions().iter().map(|c| (c.wr_id, c.is_ok())).collect();
        if fenced {
            assert_eq!(done, [(1, true), (2, true), (3, true), (4, true)]);
            assert_eq!(bytes(&dst, 0, 3000), pattern(3000, 1));
        } else {
            // The program took the memory back from under its own WRITE.
            assert_eq!(done[..2], [(1, true), (2, false)]);
        }
    }
}

#[test]
fn no_more_psns_are_outstanding_than_half_of_the_circle() {
    // One READ of 2 GiB less a packet, at the smallest MTU, into the same memory over and over.
    let mut p = Pair::new(Setup {
        mtu: Mtu::B256,
        caps: QpCaps {
            max_send_sge: 32,
            ..QpCaps::default()
        },
        window: WindowConfig {
            initial: 1 << 40,
            min: 1 << 30,
            max: 1 << 40,
        },
        ..Setup::default()
    });
    let local = p.a.region(64 << 20);
    let mut sges = [sge(&local, 0, 64 << 20); 32];
    sges[31].length -= 256;
    let remote = RemoteAddr::default();
    p.a.send(1, SendOp::Read(remote), &sges);
    p.a.send(2, SendOp::Write(remote), &[sge(&local, 0, 256)]);
    p.a.send(3, SendOp::Write(remote), &[sge(&local, 0, 1)]);
    let h = p.a.headers();
    let next = Psn::new(p.setup.psn).add((1 << 23) - 1);
    assert_eq!(
        h.last().map(|h| (h.bth.opcode, h.bth.psn)),
        Some((Opcode::RcWriteOnly, next))
    );
    assert_eq!(h.iter().filter(|h| h.bth.opcode == Opcode::RcWriteOnly).count(), 1);
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Psn);
    // A message of 2 GiB takes exactly that many PSNs, and a byte more is no message.
    let mut p = Pair::new(p.setup.clone());
    let local = p.a.region(64 << 20);
    let mut sges = [sge(&local, 0, 64 << 20); 32];
    p.a.send(1, SendOp::Write(remote), &sges);
    assert_eq!(p.a.poll_transmit(), Poll::More);
    assert_eq!(p.a.qp.wait_reason(), WaitReason::Ready);
    sges[0].length += 1;
    let wr = SendWr {
        wr_id: 2,
        op: SendOp::Write(remote),
        flags: SendFlags::empty(),
        payload: Payload::Sges(&sges),
    };
    assert_eq!(p.a.try_send(&wr), Err(PostError::Length((1 << 31) + 1)));
}

#[test]
fn no_more_reads_than_agreed_are_outstanding() {
    let mut p = Pair::new(Setup {
        rd_atomic: 2,
        ..Setup::default()
    });
    let (remote, local) = (p.b.filled(5000, 1), p.a.region(5000));
    for i in 0..5 {
        p.a.send(i, SendOp::Read(at(&remote, 0)), &[sge(&local, 0, 5000)]);
    }
    assert_eq!(p.a.headers().len(), 2);
    assert_eq!(p.a.qp.wait_reason(), roce_qp::WaitReason::RdAtomic);
    p.run();
    assert_eq!(p.a.completions().iter().filter(|c| c.is_ok()).count(), 5);
}

#[test]
fn a_full_sink_loses_nothing() {
    let mut p = Pair::new(setup(Mtu::B256));
    let (src, dst, back) = (p.a.filled(20_000, 1), p.b.region(20_000), p.a.region(20_000));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 20_000)]);
    p.a.send(2, SendOp::Read(at(&dst, 0)), &[sge(&back, 0, 20_000)]);
    p.a.sink.room = Some(3);
    p.b.sink.room = Some(1);
    p.run();
    assert_eq!(p.a.completions().len(), 2);
    assert_eq!(bytes(&back, 0, 20_000), pattern(20_000, 1));
    assert_eq!(p.a.counters.retransmits, 0);
}

#[test]
fn requests_and_responses_share_the_turn() {
    let mut p = Pair::new(setup(Mtu::B256));
    let (src, dst) = (p.a.filled(100_000, 1), p.b.region(100_000));
    let (there, here) = (p.a.filled(100_000, 2), p.b.region(100_000));
    // A answers a long READ and has a long WRITE of its own.
    p.b.send(1, SendOp::Read(at(&there, 0)), &[sge(&here, 0, 100_000)]);
    for (_, b) in p.b.drain() {
        p.a.handle(&b);
    }
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 100_000)]);
    p.a.poll_transmit();
    let classes: Vec<Class> =
        p.a.sink
            .sent
            .iter()
            .map(|(_, b)| roce_bth::Packet::parse(b).unwrap().header.bth.opcode.info().class)
            .collect();
    let first = &classes[..64];
    assert_eq!(first.iter().filter(|c| **c == Class::Write).count(), 32);
    assert_eq!(first.iter().filter(|c| **c == Class::ReadResponse).count(), 32);
    p.run();
}

#[test]
fn a_read_shows_memory_as_it_is_when_sent() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.b.filled(4096, 1), p.a.region(4096));
    p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 4096)]);
    for (_, b) in p.a.drain() {
        p.b.handle(&b);
    }
    p.b.sink.room = Some(2);
    p.b.poll_transmit();
    src.write(0, &[0; 4096]).unwrap();
    p.b.sink.room = None;
    p.run();
    for (_, b) in std::mem::take(&mut p.b.sink.sent) {
        p.a.handle(&b);
    }
    let got = bytes(&dst, 0, 4096);
    assert_eq!(got[..2048], pattern(4096, 1)[..2048]);
    assert_eq!(got[2048..], [0; 2048]);
    let _ = ctx!(p.a);
}
