//! Holes of image files, over every way.

use std::{
    cell::Cell,
    fs::File,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
};

use crate::common::{Case, MIB, Rig, everywhere};
use rnbd::{
    Errno,
    block::{BlockOp, Extent},
};
use rnbd_disk::{Caching, DiskConfig, Image};

const KIB: u64 = 1 << 10;

/// Whether the file system of a folder tells holes from data.
fn tells_holes(dir: &Path) -> bool {
    let file = tempfile::tempfile_in(dir).unwrap();
    file.set_len(MIB).unwrap();
    // SAFETY: a plain call.
    let found = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_DATA) };
    if found >= 0 {
        println!("{}: holes are told as data", dir.display());
    }
    found < 0
}

/// Data at 1 MiB and at 3 MiB, 64 KiB each, and holes around them.
fn sparse(case: &Case, len: u64) -> Vec<Extent> {
    let file = File::create(case.path()).unwrap();
    file.set_len(len).unwrap();
    for at in [MIB, 3 * MIB] {
        file.write_all_at(&[7; 64 << 10], at).unwrap();
    }
    let (hole, data) = (Extent::hole, Extent::data);
    match tells_holes(case.dir.path()) {
        true => vec![
            hole(MIB),
            data(64 * KIB),
            hole(2 * MIB - 64 * KIB),
            data(64 * KIB),
            hole(len - 3 * MIB - 64 * KIB),
        ],
        false => vec![data(len)],
    }
}

/// Every way with a sparse file, on file systems that tell holes.
fn where_holes_are_told(len: u64, test: impl Fn(&Case)) {
    let told = Cell::new(false);
    everywhere(|case| {
        if sparse(case, len).len() > 1 {
            told.set(true);
            test(case);
        }
    });
    assert!(told.get(), "no file system here tells holes: run the tests elsewhere");
}

#[test]
fn holes_are_found_whoever_may_only_read() {
    everywhere(|case| {
        let all = sparse(case, 8 * MIB);
        for writable in [true, false] {
            let mut i = case.open(&case.path(), writable);
            assert_eq!(i.extents(0, 8 * MIB, 510).unwrap(), all);
            for most in 1..=all.len() {
                assert_eq!(i.extents(0, 8 * MIB, most as u32).unwrap(), all[..most]);
            }
            if all.len() > 1 {
                let part = [Extent::data(32 * KIB), Extent::hole(8 * KIB)];
                assert_eq!(i.extents(MIB + 32 * KIB, 40 * KIB, 510).unwrap(), part);
                assert_eq!(i.extents(2 * MIB, 4096, 510).unwrap(), [Extent::hole(4096)]);
                assert_eq!(i.extents(3 * MIB + 4096, 8192, 1).unwrap(), [Extent::data(8192)]);
            }
        }
    });
}

#[test]
fn what_is_written_and_given_back_is_seen() {
    where_holes_are_told(8 * MIB, |case| {
        let mut i = case.open(&case.path(), true);
        i.write(5 * MIB, &[1; 64 << 10], false).unwrap();
        let found = i.extents(4 * MIB, 2 * MIB, 9).unwrap();
        assert_eq!(
            found,
            [Extent::hole(MIB), Extent::data(64 * KIB), Extent::hole(MIB - 64 * KIB)]
        );
        i.discard(MIB, 64 * KIB).unwrap();
        assert_eq!(i.extents(0, 3 * MIB, 9).unwrap(), [Extent::hole(3 * MIB)]);
    });
}

#[test]
fn nothing_is_told_of_what_is_beyond_the_end_or_put_outside_the_memory() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        for offset in [MIB - 512, MIB, u64::MAX - 1023] {
            assert_eq!(i.extents(offset, 1024, 4).unwrap_err(), Errno::EIO, "{offset}");
        }
        // An answer with one extent has 24 bytes.
        for (at, result) in [
            (crate::common::ROOM - 24, Ok(())),
            (crate::common::ROOM - 23, Err(Errno::EINVAL)),
            (usize::MAX - 3, Err(Errno::EINVAL)),
        ] {
            let ticket = i.start(BlockOp::BlockStatus { most: 1 }, 0, 4096, at);
            assert_eq!(i.result(ticket), result, "{at}");
        }
    });
}

#[test]
fn a_file_may_have_grown_or_been_cut() {
    where_holes_are_told(4 * MIB, |case| {
        let mut i = case.open(&case.path(), true);
        let file = File::options().write(true).open(case.path()).unwrap();
        // A part of a block at the end belongs to no device.
        file.set_len(5 * MIB + 100).unwrap();
        let rest = 2 * MIB - 64 * KIB;
        assert_eq!(i.extents(3 * MIB + 64 * KIB, rest, 9).unwrap(), [Extent::hole(rest)]);
        assert_eq!(i.geometry().size, 5 * MIB);
        // Nobody has looked at its size since: nothing that is gone is told of as zeroes.
        file.set_len(2 * MIB).unwrap();
        let found = i.extents(MIB + 64 * KIB, 3 * MIB, 9).unwrap();
        assert_eq!(found, [Extent::data(3 * MIB)]);
    });
}

#[test]
fn the_loop_does_not_look_for_holes() {
    for folder in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        let dir = tempfile::tempdir_in(folder).unwrap();
        let path = dir.path().join("i");
        File::create(&path).unwrap().set_len(MIB).unwrap();
        let image = Image::open(&path, false, Caching::PageCache).unwrap();
        let mut i = Rig::with(DiskConfig::default(), image);
        i.extents(0, MIB, 3).unwrap();
        let c = i.disk.counters();
        assert_eq!((c.pool, c.in_place, c.at_once, c.ring), (1, 0, 0, 0), "{folder}");
    }
}
