use rnbd::server::disk::StoreId;

use super::*;

const LEN: u64 = 1 << 20;

fn image() -> Arc<Image> {
    sized(LEN)
}

fn sized(len: u64) -> Arc<Image> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    Arc::new(Image::from_file(file, true, "test").unwrap())
}

fn begin(image: &Arc<Image>, op: BlockOp, offset: u64, len: u64) -> Result<Option<Task>, Errno> {
    let memory = Pages::allocate(LEN as usize).unwrap();
    let op = DiskOp {
        store: StoreId(0),
        op,
        offset,
        len,
        data: 0,
    };
    Task::new(image, &op, Some(&memory), &mut Look::default())
}

fn task(image: &Arc<Image>, op: BlockOp, offset: u64, len: u64) -> Task {
    begin(image, op, offset, len).unwrap().unwrap()
}

const FUA: BlockOp = BlockOp::Write { fua: true };
const PLAIN: BlockOp = BlockOp::Write { fua: false };

fn transfer(call: &Call) -> (u64, usize) {
    match *call {
        Call::Read { offset, len, .. } | Call::Write { offset, len, .. } => (offset, len),
        _ => panic!("no transfer: {call:?}"),
    }
}

#[test]
fn short_transfers_go_on_where_they_stopped() {
    let i = image();
    for op in [BlockOp::Read, PLAIN, FUA] {
        let mut t = task(&i, op, 4096, 8192);
        let memory = t.data.as_ref().unwrap().memory.as_ptr() as usize;
        assert_eq!(transfer(&t.call()), (4096, 8192));
        assert_eq!(t.returned(Ok(1000)), None);
        assert_eq!(t.returned(Err(Errno::EINTR)), None);
        assert_eq!(transfer(&t.call()), (5096, 7192));
        let at = match t.call() {
            Call::Read { to, .. } => to as usize,
            Call::Write { from, .. } => from as usize,
            _ => 0,
        };
        assert_eq!(at - memory, 1000);
        assert_eq!(t.returned(Ok(7192)), Some(Ok(())), "{op:?}");
    }
}

#[test]
fn the_end_of_the_file_is_an_error() {
    let i = image();
    for op in [BlockOp::Read, PLAIN] {
        let mut t = task(&i, op, 0, 4096);
        assert_eq!(t.returned(Ok(512)), None);
        assert_eq!(t.returned(Ok(0)), Some(Err(Errno::EIO)));
    }
}

#[test]
fn what_can_not_be_done_now_is_insisted_on_once() {
    let i = image();
    let mut t = task(&i, BlockOp::Read, 0, 4096);
    assert!(!t.insists());
    assert_eq!(t.returned(Err(Errno::EAGAIN)), None);
    assert!(t.insists());
    assert_eq!(t.returned(Err(Errno::EAGAIN)), Some(Err(Errno::EAGAIN)));
}

#[test]
fn a_failed_sync_fails_all_that_come_after() {
    let i = image();
    let mut t = task(&i, BlockOp::Flush, 0, 0);
    assert_eq!(t.returned(Err(Errno::EIO)), Some(Err(Errno::EIO)));
    let zeroes = |fua| BlockOp::WriteZeroes { fua, may_unmap: true };
    for op in [BlockOp::Flush, FUA, zeroes(true)] {
        assert_eq!(begin(&i, op, 0, 512).unwrap_err(), Errno::EIO, "{op:?}");
    }
    for op in [BlockOp::Read, PLAIN, zeroes(false), BlockOp::Discard] {
        assert!(begin(&i, op, 0, 512).is_ok(), "{op:?}");
    }
}

/// The system may have told the other one of what this one would have had to save.
#[test]
fn what_ends_well_beside_a_failed_sync_has_failed() {
    for op in [BlockOp::Flush, FUA, PLAIN] {
        let i = image();
        let (mut t, mut other) = (task(&i, op, 0, 4096), task(&i, BlockOp::Flush, 0, 0));
        assert_eq!(other.returned(Err(Errno::EIO)), Some(Err(Errno::EIO)));
        let expected = if op == PLAIN { Ok(()) } else { Err(Errno::EIO) };
        assert_eq!(t.returned(Ok(4096)), Some(expected), "{op:?}");
    }
}

#[test]
fn a_durable_write_that_fails_in_its_sync_fails_all_that_come_after() {
    for (op, e, lost) in [
        (FUA, Errno::EIO, true),
        (FUA, Errno::ENOSPC, false),
        (PLAIN, Errno::EIO, false),
    ] {
        let i = image();
        let mut t = task(&i, op, 0, 4096);
        assert_eq!(t.returned(Err(e)), Some(Err(e)));
        assert_eq!(begin(&i, BlockOp::Flush, 0, 0).is_err(), lost, "{op:?}, {e}");
    }
}

#[test]
fn without_dsync_a_sync_follows() {
    let i = image();
    let mut t = task(&i, FUA, 0, 4096);
    assert!(matches!(t.call(), Call::Write { dsync: true, .. }));
    assert_eq!(t.returned(Ok(512)), None);
    assert_eq!(t.returned(Err(Errno::EOPNOTSUPP)), None);
    assert!(matches!(
        t.call(),
        Call::Write {
            dsync: false,
            offset: 512,
            ..
        }
    ));
    assert_eq!(t.returned(Ok(3584)), None);
    assert!(matches!(t.call(), Call::Sync));
    assert_eq!(t.returned(Ok(0)), Some(Ok(())));
    // It is not tried again.
    let t = task(&i, FUA, 0, 4096);
    assert!(matches!(t.call(), Call::Write { dsync: false, .. }));
}

#[test]
fn zeroes_fall_back_to_writing_them() {
    let i = image();
    let op = BlockOp::WriteZeroes {
        fua: true,
        may_unmap: true,
    };
    let mut t = task(&i, op, 4096, 300 << 10);
    for expected in [PUNCH, ZERO] {
        assert!(matches!(t.call(), Call::Allocate { mode, offset: 4096, .. } if mode == expected));
        assert_eq!(t.returned(Err(Errno::EOPNOTSUPP)), None);
    }
    assert_eq!(transfer(&t.call()), (4096, 256 << 10));
    assert_eq!(t.returned(Ok(256 << 10)), None);
    assert_eq!(transfer(&t.call()), (4096 + (256 << 10), 44 << 10));
    assert_eq!(t.returned(Ok(44 << 10)), None);
    assert!(matches!(t.call(), Call::Sync));
    assert_eq!(t.returned(Ok(0)), Some(Ok(())));
    let t = task(&i, op, 0, 512);
    assert!(matches!(t.call(), Call::Write { .. }), "neither is tried again");
}

#[test]
fn an_error_of_a_short_way_to_zeroes_is_an_error() {
    let i = image();
    let op = BlockOp::WriteZeroes {
        fua: false,
        may_unmap: false,
    };
    let mut t = task(&i, op, 0, 4096);
    assert!(matches!(t.call(), Call::Allocate { mode: ZERO, .. }));
    assert_eq!(t.returned(Err(Errno::ENOSPC)), Some(Err(Errno::ENOSPC)));
    assert!(matches!(task(&i, op, 0, 4096).call(), Call::Allocate { .. }));
}

#[test]
fn long_holes_are_made_piece_by_piece() {
    let i = sized(1 << 30);
    let mut t = task(&i, BlockOp::Discard, 4096, (80 << 20) + 4096);
    let mut at = 4096;
    for piece in [32 << 20, 32 << 20, (16 << 20) + 4096] {
        let Call::Allocate { mode, offset, len } = t.call() else {
            panic!("{t:?}");
        };
        assert_eq!((mode, offset, len), (PUNCH, at, piece));
        at += piece;
        let over = (at == 4096 + (80 << 20) + 4096).then_some(Ok(()));
        assert_eq!(t.returned(Ok(0)), over);
    }
}

#[test]
fn a_size_is_looked_at_once() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN).unwrap();
    let i = Arc::new(Image::from_file(file.try_clone().unwrap(), true, "test").unwrap());
    let op = |offset| DiskOp {
        store: StoreId(0),
        op: BlockOp::Discard,
        offset,
        len: 4096,
        data: 0,
    };
    let mut look = Look::default();
    assert!(Task::new(&i, &op(8192), None, &mut look).is_ok());
    file.set_len(4096).unwrap();
    assert!(Task::new(&i, &op(8192), None, &mut look).is_ok(), "as of this look");
    let again = Task::new(&i, &op(8192), None, &mut Look::default());
    assert_eq!(again.unwrap_err(), Errno::EIO);
}

#[test]
fn a_flush_leaves_the_close_nothing_to_sync() {
    let i = image();
    let mut write = task(&i, PLAIN, 0, 4096);
    let mut early = task(&i, BlockOp::Flush, 0, 0);
    assert_eq!(write.returned(Ok(4096)), Some(Ok(())));
    assert_eq!(early.returned(Ok(0)), Some(Ok(())));
    assert!(i.sync().wants_sync(), "the write had not ended when this flush began");
    let mut flush = task(&i, BlockOp::Flush, 0, 0);
    assert_eq!(flush.returned(Ok(0)), Some(Ok(())));
    assert!(!i.sync().wants_sync());
    let mut write = task(&i, PLAIN, 0, 4096);
    assert_eq!(write.returned(Err(Errno::ENOSPC)), Some(Err(Errno::ENOSPC)));
    assert!(i.sync().wants_sync(), "a failed write may have written a part");
}

#[test]
fn a_durable_write_leaves_the_close_nothing_to_sync() {
    let i = image();
    let mut direct = task(&i, FUA, 0, 4096);
    assert_eq!(direct.returned(Ok(4096)), Some(Ok(())));
    assert!(!i.sync().wants_sync());
    let mut synced = task(&i, FUA, 0, 4096);
    assert_eq!(synced.returned(Err(Errno::EOPNOTSUPP)), None);
    assert_eq!(synced.returned(Ok(4096)), None);
    assert_eq!(synced.returned(Ok(0)), Some(Ok(())));
    assert!(!i.sync().wants_sync());
}
