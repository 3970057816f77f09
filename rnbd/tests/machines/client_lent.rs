//! Operations whose data is in memory that was lent to the session.

use rnbd::{
    Errno,
    block::BlockOp,
    client::{OnLoss, output::DeviceKey},
};
use roce_verbs::mem::Pages;
use rtrs::client::{Buffer, LentId, LentPiece, MAX_PIECES};
use zerocopy::IntoBytes;

use crate::{
    bench::{Submission, with_cx_at},
    client_bench::{Bench, S, io, open_rsp_of},
};

const PAGE: usize = 4096;
const WRITE: BlockOp = BlockOp::Write { fua: false };

/// Memory of a guest, every second page of which is used.
fn lend(bench: &mut Bench, pages: usize) -> LentId {
    let memory = Pages::allocate(2 * pages * PAGE).unwrap();
    for page in 0..pages {
        memory.write(2 * page * PAGE, &[page as u8; PAGE]).unwrap();
    }
    let buffers = bench.client.rtrs_mut().pools.get_mut(&S).unwrap();
    with_cx_at(bench.now, |cx| buffers.lend(cx, memory)).unwrap()
}

fn scattered(memory: LentId, pages: usize, len: u32) -> Buffer {
    let piece = |page| LentPiece {
        memory,
        offset: 2 * page * PAGE,
        len,
    };
    Buffer::of_lent((0..pages).map(piece)).unwrap()
}

/// Returns the address of a request, and the first byte of its data.
fn place(bench: &Bench, submission: &Submission) -> (u64, u8) {
    let mut first = [0];
    let data = submission.data.as_ref().unwrap();
    bench.client.rtrs().pools[&S].read(data, 0, &mut first).unwrap();
    assert_eq!(data.len(), io(submission).bi_size.get() as usize);
    (io(submission).sector.get() * 512, first[0])
}

fn start(op: BlockOp, pages: usize, len: u32) -> (Bench, u64) {
    let (bench, device) = Bench::mapped();
    start_on(bench, device, op, pages, len)
}

fn start_on(mut bench: Bench, device: DeviceKey, op: BlockOp, pages: usize, len: u32) -> (Bench, u64) {
    let memory = lend(&mut bench, pages);
    let data = scattered(memory, pages, len);
    let bytes = data.len() as u64;
    let user = bench.submit_with(device, op, 0, bytes, Some(data));
    (bench, user)
}

#[test]
fn parts_of_it_go_together_and_each_has_its_own_pieces() {
    for op in [BlockOp::Read, WRITE] {
        let pages = 100;
        let (mut bench, user) = start(op, pages, PAGE as u32);
        let sent = bench.sent();
        assert!(sent.len() > 1, "one after the other");
        let mut covered = 0;
        for submission in &sent {
            let (at, first) = place(&bench, submission);
            assert_eq!((at, first), (covered, (covered / PAGE as u64) as u8), "{op:?}");
            let data = submission.data.as_ref().unwrap();
            assert!(data.is_lent() && data.len() <= MAX_PIECES * PAGE);
            covered += data.len() as u64;
        }
        assert_eq!(covered, (pages * PAGE) as u64);
        // The last to come back ends it.
        for submission in sent.into_iter().rev() {
            assert!(bench.outputs().is_empty());
            bench.answer(submission, Ok(()));
        }
        assert_eq!(bench.done(user), Ok(()));
        assert_eq!(bench.lent(), 0);
    }
}

#[test]
fn no_request_has_more_pieces_than_there_may_be_and_none_is_cut_within_a_block() {
    // Eleven bytes more than a third of a block in each piece: no end of a piece is the end of a block.
    let pages = 512;
    let (mut bench, user) = start(WRITE, pages, 182);
    let mut covered = 0;
    loop {
        let sent = bench.sent();
        if sent.is_empty() {
            break;
        }
        for submission in sent {
            let (at, _) = place(&bench, &submission);
            assert_eq!((at, io(&submission).bi_size.get() % 512), (covered, 0));
            covered += u64::from(io(&submission).bi_size.get());
            bench.answer(submission, Ok(()));
        }
    }
    assert_eq!((covered, bench.done(user)), (512 * 182, Ok(())));
}

#[test]
fn what_is_lost_is_sent_again_from_where_it_lies() {
    // The rest of it, or all of it if the server has lost what it had acknowledged.
    for (boot, first) in [("1", 1), ("2", 0)] {
        let mut bench = Bench::up();
        let device = bench.map("disk", &open_rsp_of(7, "1"));
        bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
        let (mut bench, user) = start_on(bench, device, WRITE, 60, PAGE as u32);
        let mut sent = bench.sent();
        let places: Vec<_> = sent.iter().map(|s| place(&bench, s)).collect();
        bench.answer(sent.remove(0), Ok(()));
        bench.lose_all(sent);
        assert_eq!(bench.ends(), []);
        let open = bench.come_back();
        bench.answer_with(open, open_rsp_of(9, boot).as_bytes());
        let again = bench.sent();
        let mut places_again: Vec<_> = again.iter().map(|s| place(&bench, s)).collect();
        places_again.sort_unstable();
        assert_eq!(places_again, places[first..]);
        for submission in again {
            bench.answer(submission, Ok(()));
        }
        assert_eq!(bench.ends(), [(user, Ok(()))]);
    }
}

#[test]
fn an_error_ends_it_when_nothing_of_it_is_under_way() {
    let (mut bench, user) = start(BlockOp::Read, 100, PAGE as u32);
    let mut sent = bench.sent();
    bench.answer(sent.remove(0), Err(rtrs::IoError::Remote(-5)));
    assert!(bench.outputs().is_empty());
    for submission in sent {
        bench.answer(submission, Ok(()));
    }
    assert_eq!(bench.done(user), Err(Errno::EIO));
}
