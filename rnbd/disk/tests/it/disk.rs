//! Disk between its stores and its sessions.

use std::{
    fs::{self, File},
    io,
    sync::Arc,
};

use crate::common::{MIB, ROOM, Rig, SESSION, WAYS, config, everywhere, operation, take, wait};
use rnbd::{
    Errno,
    block::BlockOp,
    server::{
        disk::{DiskOp, Disks as _, StoreId},
        fair_queue::QueueLimits,
    },
};
use rnbd_disk::{Budget, Caching, Disk, DiskConfig, Image, Ring, Way, Ways};
use roce_verbs::mem::Pages;
use rtrs::server::request::SessionKey;

fn image(dir: &tempfile::TempDir, len: u64) -> Image {
    let path = dir.path().join("i");
    fs::write(&path, vec![3; len as usize]).unwrap();
    Image::open(&path, true, Caching::PageCache).unwrap()
}

fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

const WRITE: BlockOp = BlockOp::Write { fua: false };

#[test]
fn every_request_ends_once_and_the_bytes_are_there() {
    everywhere(|case| {
        let mut i = case.image(8 * MIB);
        i.memory.write(0, &vec![0x55; MIB as usize]).unwrap();
        let mut asked = Vec::new();
        for n in 0..500u64 {
            let fua = n % 7 == 0;
            asked.push(i.start(BlockOp::Write { fua }, n * 8192, 4096, n as usize * 512));
            if n % 5 == 0 {
                asked.push(i.start(BlockOp::Flush, 0, 0, 0));
                asked.push(i.start(BlockOp::Read, n * 16384 % (8 * MIB), 16384, 2 << 20));
            }
            if n % 50 == 0 {
                let may_unmap = n % 100 == 0;
                let zero = BlockOp::WriteZeroes { fua, may_unmap };
                asked.push(i.start(zero, n * 8192 + 4096, 4096, 0));
                i.pump(&mut Budget::default());
            }
        }
        i.settle();
        let mut ended: Vec<_> = i.done.iter().map(|(ticket, _)| *ticket).collect();
        ended.sort();
        assert_eq!(ended, asked);
        assert!(i.done.iter().all(|(_, result)| result.is_ok()));
        let all = fs::read(case.path()).unwrap();
        assert!((0..500).all(|n| all[n * 8192..][..4096] == [0x55; 4096]));
        assert!((0..500).all(|n| all[n * 8192 + 4096..][..4096] == [0; 4096]));
    });
}

#[test]
fn files_go_the_way_that_they_need() {
    let (memory, disk) = (in_memory(), on_disk());
    let mut i = Rig::with(DiskConfig::default(), image(&memory, MIB));
    let in_place = Ways {
        status: Way::Pool,
        ..Ways::all(Way::InPlace)
    };
    assert_eq!(i.disk.ways(i.store), Some(in_place));
    i.read(0, 4096).unwrap();
    i.write(0, &[1; 4096], true).unwrap();
    i.flush().unwrap();
    let c = i.disk.counters();
    assert_eq!((c.in_place, c.at_once, c.ring, c.pool), (3, 0, 0, 0));
    let mut i = Rig::with(DiskConfig::default(), image(&disk, MIB));
    let ways = i.disk.ways(i.store).unwrap();
    assert!(
        [Way::Ring, Way::Pool].contains(&ways.write) && ways.flush == ways.write,
        "{ways:?}"
    );
    i.write(0, &[1; 4096], false).unwrap();
    i.flush().unwrap();
    assert_eq!(i.read(0, 4096).unwrap(), [1; 4096]);
    let c = i.disk.counters();
    assert_eq!(c.in_place, 0);
    assert_eq!(c.at_once + c.ring + c.pool, 3, "{c:?}");
}

#[test]
fn without_io_uring_threads_do_it() {
    let refusals: [fn(u32) -> io::Result<Ring>; 2] = [
        |_| Err(io::Error::from_raw_os_error(libc::ENOSYS)),
        |_| Err(io::Error::from_raw_os_error(libc::EPERM)),
    ];
    for ring in refusals {
        let dir = on_disk();
        let config = DiskConfig {
            ring,
            ..config(Way::Ring)
        };
        let mut i = Rig::with(config, image(&dir, MIB));
        i.write(0, &[1; 4096], true).unwrap();
        assert_eq!(
            i.read(0, 8192).unwrap()[4000..5000],
            [[1; 96].as_slice(), &[3; 904]].concat()
        );
        i.flush().unwrap();
        let c = i.disk.counters();
        assert_eq!((c.ring, c.ring_calls, c.pool), (0, 0, 3));
    }
}

#[test]
fn no_ring_is_opened_for_files_in_memory() {
    let dir = in_memory();
    let config = DiskConfig {
        ring: |_| panic!("nobody needs it"),
        ..DiskConfig::default()
    };
    let mut i = Rig::with(config, image(&dir, MIB));
    i.write(0, &[1; 512], true).unwrap();
}

/// Two sessions of one disk; returns how many operations of the one with many were over before the other's.
fn overtaken(way: Way, folder: &tempfile::TempDir) -> usize {
    let limits = QueueLimits {
        slots: 8,
        ..QueueLimits::default()
    };
    let mut disk = Disk::new(DiskConfig { limits, ..config(way) }).unwrap();
    let store = disk.add(image(folder, MIB).into());
    let memory = Pages::allocate(ROOM).unwrap();
    let op = |len| DiskOp {
        store,
        op: BlockOp::Read,
        offset: 0,
        len,
        data: 0,
    };
    for n in 0..2000 {
        disk.submit(operation(SessionKey(1), n, op(128 << 10), &memory));
    }
    disk.submit(operation(SessionKey(2), u32::MAX, op(4096), &memory));
    let mut done = Vec::new();
    loop {
        let more = disk.pump(&mut Budget::default());
        done.extend(take(&mut disk));
        if let Some(at) = done.iter().position(|(ticket, _)| *ticket == u32::MAX) {
            return at;
        }
        if !more {
            wait(&disk);
        }
    }
}

#[test]
fn one_sessions_flood_does_not_starve_another() {
    for way in WAYS {
        for folder in [in_memory(), on_disk()] {
            let first = overtaken(way, &folder);
            // Those that are under way already, and as many again when one of those is slow.
            assert!(first <= 32, "{way:?}: {first} came first");
        }
    }
}

#[test]
fn a_turn_does_not_do_more_than_its_budget() {
    let dir = in_memory();
    let mut i = Rig::new(Way::InPlace, image(&dir, MIB));
    for _ in 0..200 {
        i.start(BlockOp::Read, 0, 512, 0);
    }
    let mut budget = Budget::default();
    assert!(i.pump(&mut budget), "there is more to do");
    assert!(budget.is_spent());
    assert_eq!(i.done.len(), 64);
    assert!(i.pump(&mut budget));
    assert_eq!(i.done.len(), 64, "nothing is left of it");
    i.done.clear();
    i.settle();
    for _ in 0..16 {
        i.start(BlockOp::Read, 0, 256 << 10, 0);
    }
    i.done.clear();
    assert!(i.pump(&mut Budget::default()));
    assert_eq!(i.done.len(), 4, "1 MiB");
}

#[test]
fn a_long_operation_in_place_does_not_keep_the_loop() {
    let dir = in_memory();
    let mut i = Rig::new(Way::InPlace, image(&dir, 64 * MIB));
    // tmpfs has no way to zeroes without holes but to write them.
    let zero = BlockOp::WriteZeroes {
        fua: false,
        may_unmap: false,
    };
    let long = i.start(zero, 0, 64 * MIB, 0);
    let short = i.start(BlockOp::Read, 0, 512, 0);
    let mut turns = 0;
    while i.pump(&mut Budget::default()) {
        turns += 1;
    }
    let order: Vec<_> = i.done.iter().map(|(ticket, _)| *ticket).collect();
    assert_eq!(order, [short, long]);
    assert!(turns >= 32, "{turns}");
    assert!(fs::read(dir.path().join("i")).unwrap().iter().all(|b| *b == 0));
}

#[test]
fn flushes_that_wait_together_are_one() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        i.write(0, &[1; 4096], false).unwrap();
        let flushes: Vec<_> = (0..5).map(|_| i.start(BlockOp::Flush, 0, 0, 0)).collect();
        for flush in flushes {
            assert_eq!(i.result(flush), Ok(()));
        }
        assert_eq!(i.disk.counters().flushes, 1);
    });
}

#[test]
fn a_flush_covers_a_write_that_was_over_when_it_was_asked_for() {
    let dir = in_memory();
    let mut i = Rig::new(Way::InPlace, image(&dir, MIB));
    let first = i.start(BlockOp::Flush, 0, 0, 0);
    let write = i.start(WRITE, 0, 4096, 0);
    let mut one = Budget {
        operations: 1,
        ..Budget::default()
    };
    i.pump(&mut one);
    assert_eq!(i.done, [(write, Ok(()))], "data comes first");
    // The first flush was asked for before the write was over, so that it is not known to cover it.
    let second = i.start(BlockOp::Flush, 0, 0, 0);
    let third = i.start(BlockOp::Flush, 0, 0, 0);
    for flush in [first, second, third] {
        assert_eq!(i.result(flush), Ok(()));
    }
    assert_eq!(i.disk.counters().flushes, 2);
}

#[test]
fn a_store_is_given_back_when_nothing_of_it_is_under_way() {
    for way in WAYS {
        let dir = on_disk();
        let mut i = Rig::new(way, image(&dir, MIB));
        let ticket = i.start(WRITE, 0, 4096, 0);
        assert!(i.disk.take(i.store).is_none());
        i.result(ticket).unwrap();
        let export = i.disk.take(i.store).unwrap();
        assert_eq!(export.image().geometry().size, MIB);
        assert!(i.disk.take(i.store).is_none());
        assert_eq!(i.run(BlockOp::Read, 0, 512), Err(Errno::ENXIO));
        let next = i.disk.add(export);
        assert_ne!(next, i.store, "a number is no other's");
        assert_eq!(i.run(BlockOp::Read, 0, 512), Err(Errno::ENXIO));
    }
}

#[test]
fn a_disk_that_goes_waits_for_what_is_under_way() {
    for way in WAYS {
        let dir = on_disk();
        let mut i = Rig::new(way, image(&dir, 8 * MIB));
        for n in 0..200 {
            i.start(BlockOp::Read, n * 4096, 4096, n as usize * 4096);
            i.start(WRITE, n * 4096, 4096, n as usize * 4096);
        }
        i.pump(&mut Budget::default());
        let Rig { disk, memory, .. } = i;
        let weak = Arc::downgrade(&memory);
        drop(memory);
        drop(disk);
        assert!(weak.upgrade().is_none(), "{way:?}: nobody has the memory any more");
    }
}

#[test]
fn memory_that_is_registered_is_used_and_let_go() {
    let dir = on_disk();
    let path = dir.path().join("i");
    fs::write(&path, vec![3; 4 << 20]).unwrap();
    let direct = Image::open(&path, true, Caching::Direct).unwrap();
    let is_direct = direct.is_direct();
    println!("direct: {is_direct}");
    let mut i = Rig::new(Way::Ring, direct);
    for round in 0..3u8 {
        for n in 0..8 {
            let at = n * (512 << 10);
            i.write_from(at, at as u64, &vec![round; 512 << 10], false).unwrap();
            assert_eq!(i.read_to(at, at as u64, 512 << 10).unwrap(), vec![round; 512 << 10]);
        }
        // Across the border of what is registered together.
        let at = (1 << 20) - 4096;
        assert_eq!(i.read_to(at, 0, 8192).unwrap(), vec![round; 8192]);
        i.disk.forget(SESSION);
    }
    let c = i.disk.counters();
    println!("{c:?}");
    // A system without io_uring, a small limit of locked memory, or a file system without direct I/O: then it is not.
    assert!(c.ring_fixed == 0 || (is_direct && c.ring_fixed < c.ring), "{c:?}");
    // Another session's memory under the same number.
    i.memory = Pages::allocate(ROOM).unwrap();
    assert_eq!(i.read(0, 4096).unwrap(), vec![2; 4096]);
    i.memory = Pages::allocate(ROOM).unwrap();
    assert_eq!(i.read(0, 4096).unwrap(), vec![2; 4096]);
}

#[test]
fn stores_of_different_ways_share_a_disk() {
    let (memory, disk_dir) = (in_memory(), on_disk());
    let mut i = Rig::with(DiskConfig::default(), image(&memory, MIB));
    let first = i.store;
    let second = i.disk.add(image(&disk_dir, 2 * MIB).into());
    for (store, value) in [(first, 1), (second, 2)] {
        i.store = store;
        i.write(4096, &[value; 4096], true).unwrap();
    }
    for (store, value) in [(first, 1), (second, 2)] {
        i.store = store;
        assert_eq!(i.read(4096, 4096).unwrap(), [value; 4096]);
    }
    i.store = StoreId(77);
    assert_eq!(i.read(0, 512).unwrap_err(), Errno::ENXIO);
}

#[test]
fn an_anonymous_file_is_an_image_too() {
    let file: File = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(MIB).unwrap();
    let image = Image::from_file(file, true, "anonymous").unwrap();
    let config = DiskConfig {
        ways: Some(Ways::all(Way::InPlace)),
        ..DiskConfig::default()
    };
    let mut i = Rig::with(config, image);
    i.write(512, &[4; 512], false).unwrap();
    assert_eq!(
        i.read(0, 1024).unwrap()[500..520],
        [[0; 12].as_slice(), &[4; 8]].concat()
    );
}
