//! Registered memory that is unmapped, protected, or behind the end of its file.

use std::{ptr, sync::Arc, thread};

use ferroce_pages::{Loss, PAGE, Pages};
use roce_verbs::mem::{AccessError, AtomicError, MemoryTable, PdHandle, Region, SgList, Span, fault::Fault};
use roce_verbs::{AccessFlags, DeviceLimits, LKey, Qpn, RKey, Sge};

const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);
const FAULT: AccessError = AccessError::Fault(Fault);

fn table() -> (MemoryTable, PdHandle) {
    let table = MemoryTable::new([7; 32], &DeviceLimits::software(1));
    let pd = table.alloc_pd().unwrap();
    (table, pd)
}

/// Pages, and a region of them that starts at address 0.
fn register(table: &MemoryTable, pd: PdHandle, pages: usize) -> (Arc<Pages>, Arc<Region>) {
    let memory = Pages::new(pages).unwrap();
    let region = table.register_memory(pd, &memory.memory(), 0..pages * PAGE, Some(0), ALL);
    (memory, region.unwrap())
}

fn span(table: &MemoryTable, region: &Region, at: usize, len: usize) -> Span {
    let sge = Sge {
        addr: at as u64,
        length: len as u32,
        lkey: LKey(region.lkey().0),
    };
    table.resolve_local(region.pd(), &sge, AccessFlags::empty()).unwrap()
}

/// Every kind of access to a page that is lost; what is before it stays in use.
#[test]
fn every_access_to_a_lost_page_fails_and_none_before_it() {
    for loss in Loss::ALL {
        let (table, pd) = table();
        let (pages, region) = register(&table, pd, 3);
        let all = span(&table, &region, 0, 3 * PAGE);
        let word = |at| span(&table, &region, at, 8);
        all.write(0, &[1; 3 * PAGE]).unwrap();
        pages.lose(2..3, loss);
        let reads = if loss.is_readable() { Ok(()) } else { Err(FAULT) };
        for len in [1, 2, 7, 8, 15, 16, 33, 64, 65, 255, 256, 300, 1024, PAGE] {
            let mut out = vec![0; len];
            // All of it, its last byte alone, and all but its first byte behind the edge.
            for at in [2 * PAGE, 2 * PAGE - (len - 1), 2 * PAGE - usize::from(len > 1)] {
                assert_eq!(all.read(at, &mut out), reads, "{loss:?} {len} at {at}");
                assert_eq!(all.write(at, &vec![2; len]), Err(FAULT), "{loss:?} {len} at {at}");
            }
            all.write(2 * PAGE - len, &vec![3; len]).unwrap();
            all.read(2 * PAGE - len, &mut out).unwrap();
            assert_eq!(out, vec![3; len]);
        }
        let fault = AtomicError::Access(FAULT);
        assert_eq!(word(2 * PAGE).store([9; 8]), Err(fault));
        assert_eq!(word(2 * PAGE).fetch_add(1), Err(fault));
        assert_eq!(word(2 * PAGE).compare_swap(1, 2), Err(fault));
        assert_eq!(word(2 * PAGE).compare_swap(u64::from_ne_bytes([1; 8]), 2), Err(fault));
        word(PAGE).store(5u64.to_ne_bytes()).unwrap();
        assert_eq!(word(PAGE).fetch_add(2), Ok(5));
        assert_eq!(word(PAGE).compare_swap(7, 8), Ok(7));
        assert_eq!(word(PAGE).compare_swap(7, 9), Ok(8));
        // A list's first span is written, its second is not.
        let mut list = SgList::new();
        list.push(span(&table, &region, 0, 100));
        list.push(span(&table, &region, 2 * PAGE, 100));
        assert_eq!(list.write_at(0, &[4; 200]), Err(FAULT));
        assert_eq!(list.write_at(0, &[4; 100]), Ok(()));
        assert_eq!(list.read_at(0, &mut [0; 200]), reads);
        // What programs read by the region's own calls.
        assert_eq!(region.read(2 * PAGE, &mut [0]).is_ok(), reads.is_ok());
        assert!(region.write(2 * PAGE, &[0]).is_err() && region.write(0, &[0]).is_ok());
        let remote = table.resolve_remote(
            pd,
            Qpn::new(1),
            RKey(region.rkey().0),
            2 * PAGE as u64,
            8,
            AccessFlags::REMOTE_WRITE,
        );
        assert_eq!(remote.unwrap().write(0, &[0; 8]), Err(FAULT), "checked when it is used");
        table.deregister(&region).unwrap();
        assert_eq!(all.write(2 * PAGE, &[0]), Err(AccessError::Revoked));
    }
}

/// Copies of every length and alignment copy their bytes and nothing else.
#[test]
fn copies_are_exact() {
    let (table, pd) = table();
    let region = table.alloc_region(pd, 4 * PAGE, ALL).unwrap();
    let pattern: Vec<u8> = (0..2 * PAGE).map(|i| (i * 7 + i / 251) as u8).collect();
    let mut before = vec![0; 4 * PAGE];
    for len in (0..=700).chain([1023, 1024, 1025, 2048, 4095, 4096, 5000]) {
        for shift in [0, 1, 3, 8, 17, 31, 32, 63] {
            let (from, at) = (shift * 5 % 67, PAGE + shift);
            region.write(0, &vec![0xee; 4 * PAGE]).unwrap();
            region.write(at, &pattern[from..from + len]).unwrap();
            region.read(0, &mut before).unwrap();
            assert!(
                before[..at].iter().chain(&before[at + len..]).all(|b| *b == 0xee),
                "{len} {shift}"
            );
            assert_eq!(before[at..at + len], pattern[from..from + len], "{len} {shift}");
            let mut out = vec![0xdd; len + 2];
            region.read(at, &mut out[1..=len]).unwrap();
            assert_eq!((out[0], out[len + 1]), (0xdd, 0xdd), "{len} {shift}");
            assert_eq!(out[1..=len], pattern[from..from + len], "{len} {shift}");
        }
    }
}

/// A fault in a thread that blocks the signals would end the process.
#[test]
fn threads_that_block_all_signals_survive() {
    let (table, pd) = table();
    let (pages, region) = register(&table, pd, 2);
    pages.lose(1..2, Loss::Truncated);
    let block = || {
        // SAFETY: plain data of this frame.
        unsafe {
            let mut all = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            assert_eq!(
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, ptr::null_mut()),
                0
            );
        }
    };
    let access = |at, count| {
        for _ in 0..count {
            let _ = span(&table, &region, at, 8).write(0, &[0; 8]);
        }
    };
    thread::scope(|scope| {
        // Before its first access.
        scope.spawn(|| {
            block();
            access(PAGE, 1);
        });
        // After some, which is noticed a little later.
        scope.spawn(|| {
            access(0, 10);
            block();
            access(0, 1100);
            access(PAGE, 1);
        });
    });
}

/// Threads that copy while another takes the memory away and gives it back: no copy ends the process, and each copies all or fails.
#[test]
fn memory_comes_and_goes_under_load() {
    let (table, pd) = table();
    let (pages, region) = register(&table, pd, 8);
    thread::scope(|scope| {
        let copying: Vec<_> = (0..3u8)
            .map(|n| {
                let (table, region) = (&table, &region);
                scope.spawn(move || {
                    let whole = span(table, region, 0, 8 * PAGE);
                    let (mut copied, mut failed) = (0, 0);
                    while copied < 2000 || failed < 200 {
                        let data = [n; 3000];
                        match whole.write(usize::from(n) * 2 * PAGE + 3000, &data) {
                            Ok(()) => copied += 1,
                            Err(e) => {
                                assert_eq!(e, FAULT);
                                failed += 1;
                            }
                        }
                    }
                })
            })
            .collect();
        while copying.iter().any(|thread| !thread.is_finished()) {
            for loss in Loss::ALL {
                pages.lose(1..8, loss);
                thread::yield_now();
                pages.restore();
                thread::yield_now();
            }
        }
    });
}
