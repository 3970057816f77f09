//! Work requests and their completions.

use roce_verbs::{
    LKey, Payload, QpState, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode, WcStatus,
    provider::ConnParams, wr::PostError,
};

use super::cases;
use crate::{Bed, Side};

cases![
    a_send_is_received,
    a_send_is_scattered,
    writes_land_in_their_order,
    a_write_with_immediate_takes_a_receive,
    a_read_brings_what_is_there,
    a_large_message_arrives_whole,
    atomics_return_what_was_there,
    inline_data_is_copied_at_once,
    only_what_is_signalled_completes,
    all_complete_if_the_queue_pair_says_so,
    a_receiver_that_is_not_ready_is_waited_for,
    or_given_up_when_that_was_agreed,
    a_fence_waits_for_a_read,
    a_queue_is_full,
    a_list_stops_at_what_is_refused,
    what_a_queue_pair_was_not_made_for,
    nothing_is_sent_before_there_is_a_connection,
];

const A: Side = Side::A;
const B: Side = Side::B;

fn a_send_is_received(bed: &mut Bed) {
    let link = bed.connect();
    let (qa, qb) = (link.qp(A), link.qp(B));
    let sge = bed.sge(B, 100, 64);
    for n in 0..3 {
        bed.receive(B, qb, 10 + n, &[sge]);
    }
    bed.post(A, qa, 1, SendOp::Send, Payload::Inline(b"first"));
    bed.post(A, qa, 2, SendOp::SendWithImm(0x0102_0304), Payload::Inline(b"second"));
    bed.post(A, qa, 3, SendOp::Send, Payload::Sges(&[]));
    let first = bed.success(B, qb, 10);
    assert_eq!((first.opcode, first.byte_len), (WcOpcode::Recv, 5));
    assert!(!first.flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV));
    let second = bed.success(B, qb, 11);
    assert_eq!(
        (second.opcode, second.byte_len, second.imm),
        (WcOpcode::Recv, 6, 0x0102_0304)
    );
    assert!(second.flags.contains(WcFlags::WITH_IMM));
    assert_eq!(Some(second.qpn), bed.provider(B).qpn(qb));
    let third = bed.success(B, qb, 12);
    assert_eq!(third.byte_len, 0);
    assert_eq!(bed.bytes(B, 100, 6), b"second");
    for n in 1..=3 {
        assert_eq!(bed.success(A, qa, n).opcode, WcOpcode::Send);
    }
    bed.give_back(link);
}

fn a_send_is_scattered(bed: &mut Bed) {
    let link = bed.connect();
    bed.fill(A, 0, b"abcdef");
    let parts = [bed.sge(A, 0, 2), bed.sge(A, 3, 3)];
    let places = [bed.sge(B, 1000, 1), bed.sge(B, 2000, 100)];
    bed.receive(B, link.qp(B), 7, &places);
    bed.post(A, link.qp(A), 1, SendOp::Send, Payload::Sges(&parts));
    assert_eq!(bed.success(B, link.qp(B), 7).byte_len, 5);
    assert_eq!(
        (bed.bytes(B, 1000, 2), bed.bytes(B, 2000, 5)),
        (b"a\0".to_vec(), b"bdef\0".to_vec())
    );
    bed.success(A, link.qp(A), 1);
}

fn writes_land_in_their_order(bed: &mut Bed) {
    let link = bed.connect();
    let to = bed.remote(B, 5000);
    for n in 0..8 {
        bed.post(A, link.qp(A), n, SendOp::Write(to), Payload::Inline(&[n as u8; 16]));
    }
    for n in 0..8 {
        let (of, wc) = bed.wait("a completion", |bed| {
            let all = &mut bed.at(A).completions;
            (!all.is_empty()).then(|| all.remove(0))
        });
        assert_eq!((of, wc.wr_id, wc.opcode), (link.qp(A), n, WcOpcode::RdmaWrite));
    }
    assert_eq!(bed.bytes(B, 5000, 17), [&[7; 16][..], &[0]].concat());
    assert!(bed.at(B).completions.is_empty(), "the peer is not told");
}

fn a_write_with_immediate_takes_a_receive(bed: &mut Bed) {
    let link = bed.connect();
    bed.receive(B, link.qp(B), 20, &[]);
    bed.receive(B, link.qp(B), 21, &[]);
    let to = bed.remote(B, 300);
    let nowhere = RemoteAddr::default();
    bed.post(A, link.qp(A), 1, SendOp::WriteWithImm(to, 77), Payload::Inline(b"data"));
    bed.post(A, link.qp(A), 2, SendOp::WriteWithImm(nowhere, 78), Payload::Sges(&[]));
    for (wr_id, imm, len) in [(20, 77, 4), (21, 78, 0)] {
        let wc = bed.success(B, link.qp(B), wr_id);
        assert_eq!((wc.opcode, wc.imm, wc.byte_len), (WcOpcode::RecvRdmaWithImm, imm, len));
        assert!(wc.flags.contains(WcFlags::WITH_IMM));
    }
    assert_eq!(bed.bytes(B, 300, 4), b"data");
    assert_eq!(bed.success(A, link.qp(A), 1).opcode, WcOpcode::RdmaWrite);
    bed.success(A, link.qp(A), 2);
}

fn a_read_brings_what_is_there(bed: &mut Bed) {
    let link = bed.connect();
    bed.fill(B, 40, b"what is there");
    let (from, into) = (bed.remote(B, 40), bed.sge(A, 9000, 13));
    bed.post(A, link.qp(A), 1, SendOp::Read(from), Payload::Sges(&[into]));
    let wc = bed.success(A, link.qp(A), 1);
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::RdmaRead, 13));
    assert_eq!(bed.bytes(A, 9000, 13), b"what is there");
}

fn a_large_message_arrives_whole(bed: &mut Bed) {
    const LEN: usize = 300_001;
    let link = bed.connect();
    let data: Vec<u8> = (0..LEN).map(|i| (i / 7) as u8 ^ (i >> 11) as u8).collect();
    bed.fill(A, 0, &data);
    let (to, from) = (bed.remote(B, 0), bed.sge(A, 0, LEN));
    bed.post(A, link.qp(A), 1, SendOp::Write(to), Payload::Sges(&[from]));
    bed.success(A, link.qp(A), 1);
    assert!(bed.bytes(B, 0, LEN) == data);
    let into = bed.sge(A, 400_000, LEN);
    bed.post(A, link.qp(A), 2, SendOp::Read(to), Payload::Sges(&[into]));
    bed.success(A, link.qp(A), 2);
    assert!(bed.bytes(A, 400_000, LEN) == data);
}

fn atomics_return_what_was_there(bed: &mut Bed) {
    let link = bed.connect();
    bed.fill(B, 800, &41u64.to_ne_bytes());
    let (remote, into) = (bed.remote(B, 800), bed.sge(A, 0, 8));
    let swap = |compare, swap| SendOp::CompareSwap { remote, compare, swap };
    for (n, op, before, opcode) in [
        (1, SendOp::FetchAdd { remote, add: 1 }, 41, WcOpcode::FetchAdd),
        (2, swap(42, 7), 42, WcOpcode::CompareSwap),
        (3, swap(42, 8), 7, WcOpcode::CompareSwap),
    ] {
        bed.post(A, link.qp(A), n, op, Payload::Sges(&[into]));
        assert_eq!(bed.success(A, link.qp(A), n).opcode, opcode);
        assert_eq!(bed.bytes(A, 0, 8), u64::to_ne_bytes(before));
    }
    assert_eq!(bed.bytes(B, 800, 8), 7u64.to_ne_bytes());
}

fn inline_data_is_copied_at_once(bed: &mut Bed) {
    let link = bed.connect();
    let to = bed.remote(B, 0);
    let mut data = [3; 32];
    bed.post(A, link.qp(A), 1, SendOp::Write(to), Payload::Inline(&data));
    data.fill(4);
    bed.success(A, link.qp(A), 1);
    assert_eq!((bed.bytes(B, 0, 32), data), (vec![3; 32], [4; 32]));
    let long = SendWr {
        wr_id: 2,
        op: SendOp::Write(to),
        flags: SendFlags::SIGNALED,
        payload: Payload::Inline(&[0; 33]),
    };
    let refused = bed.provider(A).post_send(link.qp(A), &[long]);
    assert_eq!(refused, Err((0, PostError::InlineTooLong { given: 33, max: 32 })));
}

fn only_what_is_signalled_completes(bed: &mut Bed) {
    let link = bed.connect();
    let to = bed.remote(B, 0);
    let wr = |wr_id, flags| SendWr {
        wr_id,
        op: SendOp::Write(to),
        flags,
        payload: Payload::Inline(b"x"),
    };
    // Far more than the queue holds at a time.
    for round in 0..10 {
        let mut wrs: Vec<_> = (0..7).map(|n| wr(n, SendFlags::empty())).collect();
        wrs.push(wr(100 + round, SendFlags::SIGNALED));
        bed.provider(A)
            .post_send(link.qp(A), &wrs)
            .expect("there is room again");
        bed.success(A, link.qp(A), 100 + round);
    }
    assert!(bed.at(A).completions.is_empty(), "{:?}", bed.at(A).completions);
}

fn all_complete_if_the_queue_pair_says_so(bed: &mut Bed) {
    let (listener, to) = bed.listen();
    let id = bed.resolve(to);
    let mut spec = bed.spec(A);
    spec.signal_all = true;
    let qp = bed.provider(A).create_qp(&spec).expect("a queue pair");
    bed.provider(A)
        .cm_connect(id, qp, &ConnParams::default())
        .expect("a request");
    let (theirs, their_qp) = (bed.request(listener), bed.qp(B));
    bed.provider(B)
        .cm_accept(theirs, their_qp, &ConnParams::default())
        .expect("an accept");
    bed.established(A, id);
    let quiet = SendWr {
        wr_id: 5,
        op: SendOp::Write(bed.remote(B, 0)),
        flags: SendFlags::empty(),
        payload: Payload::Inline(b"x"),
    };
    bed.provider(A).post_send(qp, &[quiet]).expect("a work request");
    bed.success(A, qp, 5);
}

fn a_receiver_that_is_not_ready_is_waited_for(bed: &mut Bed) {
    let link = bed.connect();
    bed.post(A, link.qp(A), 1, SendOp::Send, Payload::Inline(b"hello"));
    bed.turns(5);
    assert!(bed.at(A).completions.is_empty());
    let sge = bed.sge(B, 0, 5);
    bed.receive(B, link.qp(B), 2, &[sge]);
    bed.success(B, link.qp(B), 2);
    bed.success(A, link.qp(A), 1);
    assert_eq!(bed.bytes(B, 0, 5), b"hello");
}

fn or_given_up_when_that_was_agreed(bed: &mut Bed) {
    let params = ConnParams {
        rnr_retry_count: 0,
        ..ConnParams::default()
    };
    let link = bed.connect_with(&params);
    bed.post(A, link.qp(A), 1, SendOp::Send, Payload::Inline(b"hello"));
    assert_eq!(bed.completion(A, link.qp(A), 1).status, WcStatus::RnrRetryExceeded);
    bed.give_back(link);
}

fn a_fence_waits_for_a_read(bed: &mut Bed) {
    let link = bed.connect();
    bed.fill(B, 0, b"old");
    let (there, into) = (bed.remote(B, 0), bed.sge(A, 0, 3));
    bed.post(A, link.qp(A), 1, SendOp::Read(there), Payload::Sges(&[into]));
    let fenced = SendWr {
        wr_id: 2,
        op: SendOp::Write(bed.remote(B, 100)),
        flags: SendFlags::SIGNALED | SendFlags::FENCE,
        payload: Payload::Sges(&[into]),
    };
    bed.provider(A)
        .post_send(link.qp(A), &[fenced])
        .expect("a work request");
    bed.success(A, link.qp(A), 1);
    bed.success(A, link.qp(A), 2);
    assert_eq!(bed.bytes(B, 100, 3), b"old", "what the READ has brought");
}

fn a_queue_is_full(bed: &mut Bed) {
    let link = bed.connect();
    let recv = RecvWr { wr_id: 1, sges: &[] };
    let refused = bed.provider(B).post_recv(link.qp(B), &[recv; 17]);
    assert_eq!(refused, Err((16, PostError::QueueFull)));
    // Nobody takes these.
    let send = SendWr {
        wr_id: 2,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&[]),
    };
    let refused = bed.provider(B).post_send(link.qp(B), &[send; 17]);
    assert_eq!(refused, Err((16, PostError::QueueFull)));
    bed.give_back(link);
    let flushed = bed.at(B).completions.iter().filter(|(_, wc)| !wc.is_ok());
    assert_eq!(flushed.count(), 32, "each that was accepted has come back");
}

fn a_list_stops_at_what_is_refused(bed: &mut Bed) {
    let link = bed.connect();
    let (to, sge) = (bed.remote(B, 0), bed.sge(A, 0, 1));
    bed.fill(A, 0, b"z");
    let (one, three) = ([sge], [sge; 3]);
    let wr = |wr_id, sges| SendWr {
        wr_id,
        op: SendOp::Write(to),
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(sges),
    };
    let wrs = [wr(1, &one[..]), wr(2, &one), wr(3, &three), wr(4, &one)];
    let refused = bed.provider(A).post_send(link.qp(A), &wrs);
    assert_eq!(refused, Err((2, PostError::TooManySges { given: 3, max: 2 })));
    bed.success(A, link.qp(A), 1);
    bed.success(A, link.qp(A), 2);
    bed.turns(10);
    assert!(bed.at(A).completions.is_empty(), "nothing behind it was posted");
    let recv = |wr_id, sges| RecvWr { wr_id, sges };
    let recvs = [recv(1, &one[..]), recv(2, &three)];
    let refused = bed.provider(A).post_recv(link.qp(A), &recvs);
    assert_eq!(refused, Err((1, PostError::TooManySges { given: 3, max: 2 })));
}

fn what_a_queue_pair_was_not_made_for(bed: &mut Bed) {
    let link = bed.connect();
    let read = SendWr {
        wr_id: 1,
        op: SendOp::Read(bed.remote(B, 0)),
        flags: SendFlags::SIGNALED,
        payload: Payload::Inline(b"x"),
    };
    let refused = bed.provider(A).post_send(link.qp(A), &[read]);
    assert!(matches!(refused, Err((0, PostError::Invalid(_)))), "{refused:?}");
    // Memory that is not registered fails in its turn.
    let sge = Sge {
        lkey: LKey(0x00ff_ff01),
        ..bed.sge(A, 0, 4)
    };
    let to = bed.remote(B, 0);
    bed.post(A, link.qp(A), 2, SendOp::Write(to), Payload::Sges(&[sge]));
    let status = bed.completion(A, link.qp(A), 2).status;
    // The second is what rdma_rxe of Linux 6.1 says, the third of 6.12 (`specs/kernel.md`).
    let local = [
        WcStatus::LocalProtectionError,
        WcStatus::LocalQpOperationError,
        WcStatus::FlushError,
    ];
    assert!(local.contains(&status), "{status:?}");
    bed.give_back(link);
}

fn nothing_is_sent_before_there_is_a_connection(bed: &mut Bed) {
    let qp = bed.qp(A);
    let sge = bed.sge(A, 0, 8);
    bed.receive(A, qp, 1, &[sge]);
    let send = SendWr {
        wr_id: 2,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&[]),
    };
    let refused = bed.provider(A).post_send(qp, &[send]);
    assert_eq!(refused, Err((0, PostError::State(QpState::Init))));
    // A receive that was posted before is there when it is connected.
    let (listener, to) = bed.listen();
    let id = bed.resolve(to);
    bed.provider(A)
        .cm_connect(id, qp, &ConnParams::default())
        .expect("a request");
    let (theirs, their_qp) = (bed.request(listener), bed.qp(B));
    bed.provider(B)
        .cm_accept(theirs, their_qp, &ConnParams::default())
        .expect("an accept");
    bed.established(B, theirs);
    bed.post(B, their_qp, 3, SendOp::Send, Payload::Inline(b"early"));
    bed.success(A, qp, 1);
    assert_eq!(bed.bytes(A, 0, 5), b"early");
}
