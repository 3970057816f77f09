//! How queue pairs end.

use roce_verbs::{
    Payload, RKey, RecvWr, SendFlags, SendOp, SendWr, WcStatus,
    provider::{Event, QpId},
};

use super::cases;
use crate::{Bed, Side};

cases![
    a_drain_gives_everything_back,
    a_drain_of_nothing_is_over_too,
    a_drain_before_there_is_a_connection,
    what_was_posted_is_flushed_when_the_peer_leaves,
    a_refused_access_ends_both,
    a_message_that_does_not_fit_ends_both,
    what_is_destroyed_tells_nothing_more,
    queue_pairs_come_and_go,
];

const A: Side = Side::A;
const B: Side = Side::B;

const QUIET: SendFlags = SendFlags::empty();

fn send(wr_id: u64, flags: SendFlags) -> SendWr<'static> {
    SendWr {
        wr_id,
        op: SendOp::Send,
        flags,
        payload: Payload::Sges(&[]),
    }
}

fn recv(wr_id: u64) -> RecvWr<'static> {
    RecvWr { wr_id, sges: &[] }
}

/// The marks of a queue pair's completions so far, all of which have failed.
fn failed(bed: &mut Bed, side: Side, qp: QpId) -> Vec<u64> {
    let all = std::mem::take(&mut bed.at(side).completions);
    let of: Vec<_> = all.into_iter().filter(|(of, _)| *of == qp).collect();
    assert!(of.iter().all(|(_, wc)| !wc.is_ok()), "{of:?}");
    let mut marks: Vec<u64> = of.into_iter().map(|(_, wc)| wc.wr_id).collect();
    marks.sort_unstable();
    marks
}

fn a_drain_gives_everything_back(bed: &mut Bed) {
    let link = bed.connect();
    // Nobody receives these, so that all are under way; those without a signal come back, too.
    let wrs = [
        send(1, SendFlags::SIGNALED),
        send(2, QUIET),
        send(3, SendFlags::SIGNALED),
        send(4, QUIET),
    ];
    bed.provider(A).post_send(link.qp(A), &wrs).expect("work requests");
    bed.provider(A)
        .post_recv(link.qp(A), &[recv(11), recv(12)])
        .expect("receives");
    bed.turns(3);
    bed.provider(A).drain(link.qp(A));
    bed.drained(A, link.qp(A));
    // Before the end is told, not some time later.
    assert_eq!(failed(bed, A, link.qp(A)), [1, 2, 3, 4, 11, 12]);
    bed.turns(10);
    assert!(bed.at(A).completions.is_empty());
    bed.give_back_after(link);
}

fn a_drain_of_nothing_is_over_too(bed: &mut Bed) {
    let link = bed.connect();
    let to = bed.remote(B, 0);
    // What has completed without a signal is not told again.
    let quiet = SendWr {
        op: SendOp::Write(to),
        payload: Payload::Inline(b"quiet"),
        ..send(1, QUIET)
    };
    bed.provider(A).post_send(link.qp(A), &[quiet]).expect("a work request");
    bed.post(A, link.qp(A), 2, SendOp::Write(to), Payload::Inline(b"told"));
    bed.success(A, link.qp(A), 2);
    for side in Side::ALL {
        bed.provider(side).drain(link.qp(side));
        bed.drained(side, link.qp(side));
        assert!(bed.at(side).completions.is_empty(), "{:?}", bed.at(side).completions);
    }
    bed.give_back_after(link);
}

fn a_drain_before_there_is_a_connection(bed: &mut Bed) {
    let qp = bed.qp(A);
    bed.provider(A).post_recv(qp, &[recv(1), recv(2)]).expect("receives");
    bed.provider(A).drain(qp);
    bed.drained(A, qp);
    assert_eq!(failed(bed, A, qp), [1, 2]);
    bed.provider(A).destroy_qp(qp);
}

fn what_was_posted_is_flushed_when_the_peer_leaves(bed: &mut Bed) {
    let link = bed.connect();
    bed.provider(B)
        .post_recv(link.qp(B), &[recv(1), recv(2)])
        .expect("receives");
    bed.provider(A).cm_disconnect(link.cm(A));
    for wr_id in [1, 2] {
        assert_eq!(bed.completion(B, link.qp(B), wr_id).status, WcStatus::FlushError);
    }
    bed.give_back(link);
}

fn a_refused_access_ends_both(bed: &mut Bed) {
    let link = bed.connect();
    bed.provider(B).post_recv(link.qp(B), &[recv(1)]).expect("a receive");
    bed.provider(A).post_recv(link.qp(A), &[recv(6)]).expect("a receive");
    let nowhere = bed.remote_by(B, 0, RKey(0x00ff_ff01));
    bed.post(
        A,
        link.qp(A),
        5,
        SendOp::WriteWithImm(nowhere, 1),
        Payload::Inline(b"x"),
    );
    assert_eq!(bed.completion(A, link.qp(A), 5).status, WcStatus::RemoteAccessError);
    assert_eq!(bed.completion(A, link.qp(A), 6).status, WcStatus::FlushError);
    let theirs = bed.completion(B, link.qp(B), 1).status;
    assert_ne!(theirs, WcStatus::Success);
    bed.wait("the violation", |bed| {
        bed.provider(B).access_violated(link.qp(B)).then_some(())
    });
    assert!(!bed.provider(A).access_violated(link.qp(A)), "that was the other one");
    bed.give_back(link);
}

fn a_message_that_does_not_fit_ends_both(bed: &mut Bed) {
    let link = bed.connect();
    let sge = bed.sge(B, 0, 3);
    bed.receive(B, link.qp(B), 1, &[sge]);
    bed.post(A, link.qp(A), 2, SendOp::Send, Payload::Inline(b"four"));
    let ends = [bed.completion(B, link.qp(B), 1), bed.completion(A, link.qp(A), 2)].map(|wc| wc.status);
    let specified = [WcStatus::LocalLengthError, WcStatus::RemoteInvalidRequestError];
    // As rdma_rxe has it (`specs/kernel.md`).
    let kernels = [WcStatus::LocalQpOperationError, WcStatus::RemoteOperationError];
    assert!([specified, kernels].contains(&ends), "{ends:?}");
    bed.give_back(link);
}

fn what_is_destroyed_tells_nothing_more(bed: &mut Bed) {
    let link = bed.connect();
    bed.provider(A).post_recv(link.qp(A), &[recv(1)]).expect("a receive");
    bed.post(A, link.qp(A), 2, SendOp::Send, Payload::Sges(&[]));
    bed.provider(A).drain(link.qp(A));
    bed.provider(A).destroy_qp(link.qp(A));
    bed.turns(20);
    let of = link.qp(A);
    let end = bed.at(A);
    assert!(
        !end.completions.iter().any(|(qp, _)| *qp == of),
        "{:?}",
        end.completions
    );
    assert!(
        !end.events.iter().any(|e| matches!(e, Event::Drained(qp) if *qp == of)),
        "{:?}",
        end.events
    );
    // One that takes its place is not it.
    let next = bed.qp(A);
    assert_ne!(next, of);
    bed.turns(5);
    assert!(bed.at(A).completions.is_empty());
    bed.provider(A).cm_destroy(link.cm(A));
}

fn queue_pairs_come_and_go(bed: &mut Bed) {
    for round in 0..12u8 {
        let link = bed.connect();
        let to = bed.remote(B, usize::from(round));
        bed.post(A, link.qp(A), 1, SendOp::Write(to), Payload::Inline(&[round + 1]));
        bed.success(A, link.qp(A), 1);
        assert_eq!(bed.bytes(B, round.into(), 1), [round + 1]);
        bed.give_back(link);
    }
}
