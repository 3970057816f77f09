//! In which order bytes of a peer become visible.

use std::{
    sync::atomic::{AtomicU32, Ordering, fence},
    thread,
};

use roce_verbs::mem::MemoryTable;
use roce_verbs::{AccessFlags, DeviceLimits};

/// Copies in a row.
const COPIES: u8 = 250;
/// Rows of each length.
const ROWS: usize = 10;

fn wait_for(counter: &AtomicU32, n: u32) {
    while counter.load(Ordering::Acquire) < n {
        thread::yield_now();
    }
}

/// As `ib_write_lat` waits for a message; uDAPL's `dtest -WDa` also looks at what is before its last byte.
#[test]
fn who_sees_the_last_byte_sees_all() {
    let table = MemoryTable::new([9; 32], &DeviceLimits::software(1));
    let pd = table.alloc_pd().unwrap();
    let region = table.alloc_region(pd, 4096, AccessFlags::LOCAL_WRITE).unwrap();
    // Rows that have been begun, and read to the end.
    let (begun, seen) = (AtomicU32::new(0), AtomicU32::new(0));
    let lengths = || (1..=512).chain([1024, 2048, 4096]);
    let rows = || (1..).zip(lengths().flat_map(|len| [len; ROWS]));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![0; 4096];
            for (n, len) in rows() {
                for copy in 0..=COPIES {
                    bytes[..len].fill(copy);
                    region.write(0, &bytes[..len]).unwrap();
                    begun.store(n, Ordering::Release);
                }
                wait_for(&seen, n);
            }
        });
        let mut all = vec![0; 4096];
        for (n, len) in rows() {
            wait_for(&begun, n);
            let (mut last, mut whole) = ([0], true);
            while whole && last[0] < COPIES {
                region.read(len - 1, &mut last).unwrap();
                fence(Ordering::Acquire);
                region.read(0, &mut all[..len]).unwrap();
                // Of a later copy there may be some.
                whole = all[..len].iter().all(|b| *b >= last[0]);
            }
            // The other thread must end first.
            seen.store(if whole { n } else { u32::MAX }, Ordering::Release);
            assert!(whole, "{len} bytes, {last:?}: {:?}", &all[..len]);
        }
    });
}
