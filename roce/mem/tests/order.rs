//! In which order bytes of a peer become visible.

use std::{
    sync::atomic::{AtomicU32, Ordering, fence},
    thread,
};

use roce_mem::MemoryTable;
use roce_verbs::{AccessFlags, DeviceLimits};

/// Copies of each length.
const ROUNDS: u8 = 250;

/// As `ib_write_lat` waits for a message; uDAPL's `dtest -WDa` also looks at what is before its last byte.
#[test]
fn who_sees_the_last_byte_sees_all() {
    let table = MemoryTable::new([9; 32], &DeviceLimits::software(1));
    let pd = table.alloc_pd().unwrap();
    let region = table.alloc_region(pd, 4096, AccessFlags::LOCAL_WRITE).unwrap();
    let seen = AtomicU32::new(0);
    // Lengths grow: the last byte is 0 before the first round of each.
    let lengths = || (1..=512).chain([1024, 2048, 4096]);
    let rounds = || lengths().flat_map(|len| (1..=ROUNDS).map(move |round| (len, round)));
    thread::scope(|scope| {
        scope.spawn(|| {
            for (n, (len, round)) in (1..).zip(rounds()) {
                region.write(0, &vec![round; len]).unwrap();
                while seen.load(Ordering::Acquire) < n {
                    thread::yield_now();
                }
            }
        });
        for (n, (len, round)) in (1..).zip(rounds()) {
            let mut last = [0];
            while last[0] != round {
                region.read(len - 1, &mut last).unwrap();
            }
            fence(Ordering::Acquire);
            let mut all = vec![0; len];
            region.read(0, &mut all).unwrap();
            let whole = all.iter().all(|b| *b == round);
            // The other thread must end first.
            seen.store(if whole { n } else { u32::MAX }, Ordering::Release);
            assert!(whole, "{len} bytes, round {round}: {all:?}");
        }
    });
}
