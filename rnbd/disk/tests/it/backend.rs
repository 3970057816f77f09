//! Image files, over every way.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};

use crate::common::{Case, MIB, WAYS, everywhere, is_ready};
use rnbd::server::disk::Disks as _;
use rnbd::{Errno, block::BlockOp};
use rnbd_disk::{Budget, Caching, Image};

#[test]
fn what_is_written_is_read_with_and_without_fua() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        for (n, fua) in [(0u8, false), (1, true)] {
            let data: Vec<u8> = (0..8192u32).map(|x| (x % 251) as u8 ^ n).collect();
            i.write(4096, &data, fua).unwrap();
            assert_eq!(i.read(4096, 8192).unwrap(), data);
            i.flush().unwrap();
            assert_eq!(&fs::read(case.path()).unwrap()[4096..12288], data);
        }
        assert_eq!(i.read(0, 4096).unwrap(), vec![0; 4096]);
    });
}

#[test]
fn nothing_beyond_the_end() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        for offset in [MIB - 512, MIB, u64::MAX - 511, u64::MAX - 1023] {
            assert_eq!(i.read(offset, 1024).unwrap_err(), Errno::EIO, "{offset}");
            assert_eq!(i.write(offset, &[1; 1024], false).unwrap_err(), Errno::EIO, "{offset}");
            assert_eq!(i.discard(offset, 1024).unwrap_err(), Errno::EIO, "{offset}");
            assert_eq!(i.zero(offset, 1024, false, true).unwrap_err(), Errno::EIO, "{offset}");
        }
        assert_eq!(fs::metadata(case.path()).unwrap().len(), MIB);
    });
}

#[test]
fn nothing_outside_the_sessions_memory() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        for data in [crate::common::ROOM - 511, crate::common::ROOM, usize::MAX - 100] {
            for op in [BlockOp::Read, BlockOp::Write { fua: false }] {
                let ticket = i.start(op, 0, 512, data);
                assert_eq!(i.result(ticket), Err(Errno::EINVAL), "{op:?} at {data}");
            }
        }
        let ticket = i.start(BlockOp::Read, 0, 512, crate::common::ROOM - 512);
        assert_eq!(i.result(ticket), Ok(()));
    });
}

#[test]
fn an_odd_size_is_rounded_down() {
    for (bytes, size) in [(1000, 512), (511, 0)] {
        let t = tempfile::tempdir().unwrap();
        let path = t.path().join("i");
        File::create(&path).unwrap().set_len(bytes).unwrap();
        let i = Image::open(&path, true, Caching::PageCache).unwrap();
        assert_eq!(i.geometry().size, size);
    }
}

#[test]
fn read_only_images_refuse_every_change() {
    everywhere(|case| {
        drop(case.image(MIB));
        let mut i = case.open(&case.path(), false);
        assert!(i.geometry().read_only);
        assert_eq!(i.geometry().max_discard, 0);
        assert_eq!(i.write(0, &[1; 512], false).unwrap_err(), Errno::EROFS);
        assert_eq!(i.discard(0, 512).unwrap_err(), Errno::EROFS);
        assert_eq!(i.zero(0, 512, false, true).unwrap_err(), Errno::EROFS);
        i.flush().unwrap();
        assert_eq!(i.read(0, 512).unwrap(), vec![0; 512]);
    });
}

#[test]
fn an_image_that_grew_is_used_to_its_new_end() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        assert_eq!(i.read(MIB, 512).unwrap_err(), Errno::EIO);
        File::options()
            .write(true)
            .open(case.path())
            .unwrap()
            .set_len(2 * MIB + 100)
            .unwrap();
        assert_eq!(i.disk.poll_resized(), None);
        i.write(2 * MIB - 512, &[7; 512], true).unwrap();
        assert_eq!(i.read(2 * MIB - 512, 512).unwrap(), [7; 512]);
        assert_eq!(i.geometry().size, 2 * MIB);
        assert_eq!(i.disk.poll_resized(), Some((i.store, 2 * MIB)));
        assert_eq!(i.disk.poll_resized(), None);
        assert_eq!(i.write(2 * MIB, &[7; 512], false).unwrap_err(), Errno::EIO);
    });
}

#[test]
fn another_size_is_seen_without_an_operation() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        let file = File::options().write(true).open(case.path()).unwrap();
        for size in [2 * MIB, MIB / 2, MIB] {
            file.set_len(size).unwrap();
            assert_eq!(i.disk.poll_resized(), None);
            i.look_at_sizes();
            assert_eq!(i.disk.poll_resized(), Some((i.store, size)));
            assert_eq!((i.disk.poll_resized(), i.geometry().size), (None, size));
            i.write(size - 512, &[7; 512], false).unwrap();
            for at in [size - 512, size, 4 * MIB] {
                assert_eq!(i.write(at, &[7; 1024], false).unwrap_err(), Errno::EIO);
                assert_eq!(i.read(at, 1024).unwrap_err(), Errno::EIO);
            }
            assert_eq!(fs::metadata(case.path()).unwrap().len(), size);
        }
        i.look_at_sizes();
        assert_eq!(i.disk.poll_resized(), None, "nothing has changed");
        // Between two looks a file that was cut ends where it ends.
        file.set_len(4096).unwrap();
        assert_eq!(i.write(MIB / 2, &[7; 512], false).unwrap_err(), Errno::EIO);
        assert_eq!(fs::metadata(case.path()).unwrap().len(), 4096);
    });
}

#[test]
fn a_truncated_image_gives_errors_and_does_not_grow_again() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        i.write(0, &[7; 4096], false).unwrap();
        let file = File::options().write(true).open(case.path()).unwrap();
        file.set_len(6000).unwrap();
        assert_eq!(i.read(0, 4096).unwrap(), vec![7; 4096]);
        assert_eq!(i.read(4096, 4096).unwrap_err(), Errno::EIO);
        assert_eq!(i.read(8192, 512).unwrap_err(), Errno::EIO);
        for fua in [false, true] {
            assert_eq!(i.write(8192, &[1; 512], fua).unwrap_err(), Errno::EIO);
        }
        assert_eq!(i.discard(8192, 4096).unwrap_err(), Errno::EIO);
        assert_eq!(i.zero(8192, 4096, false, false).unwrap_err(), Errno::EIO);
        assert_eq!(fs::metadata(case.path()).unwrap().len(), 6000);
        i.write(0, &[8; 512], false).unwrap();
        i.flush().unwrap();
    });
}

#[test]
fn discarded_ranges_read_zero_and_give_space_back() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        assert!(
            i.geometry().max_discard > 0,
            "this file system makes no holes: run the tests elsewhere"
        );
        i.write(0, &vec![9; MIB as usize], true).unwrap();
        let before = fs::metadata(case.path()).unwrap().blocks();
        i.discard(256 << 10, 512 << 10).unwrap();
        assert_eq!(i.read(256 << 10, 512 << 10).unwrap(), vec![0; 512 << 10]);
        assert_eq!(i.read(0, 256 << 10).unwrap(), vec![9; 256 << 10]);
        i.flush().unwrap();
        assert!(fs::metadata(case.path()).unwrap().blocks() < before);
        assert_eq!(fs::metadata(case.path()).unwrap().len(), MIB);
        i.discard(0, 0).unwrap();
    });
}

#[test]
fn zeroes_are_zero_however_they_come() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        for (may_unmap, fua) in [(false, false), (true, false), (false, true), (true, true)] {
            i.write(0, &vec![9; MIB as usize], false).unwrap();
            i.zero(4096, MIB - 8192, fua, may_unmap).unwrap();
            let all = i.read(0, MIB as usize).unwrap();
            let (edge, rest) = (4096, MIB as usize - 4096);
            assert!(all[..edge].iter().chain(&all[rest..]).all(|b| *b == 9));
            assert!(all[edge..rest].iter().all(|b| *b == 0));
        }
    });
}

#[test]
fn zeroes_need_no_whole_pages() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        i.write(0, &[9; 16384], false).unwrap();
        let block = u64::from(i.geometry().logical_block_size);
        i.zero(block, 8192 - block, false, false).unwrap();
        let all = i.read(0, 16384).unwrap();
        let zeroes = block as usize..8192;
        assert!((0..16384).all(|at| all[at] == if zeroes.contains(&at) { 0 } else { 9 }));
    });
}

#[test]
fn an_operation_of_no_bytes_is_none() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        i.read(MIB, 0).unwrap();
        i.write(MIB, &[], true).unwrap();
        i.zero(0, 0, true, true).unwrap();
        assert_eq!(i.read(MIB + 1, 0).unwrap_err(), Errno::EIO);
    });
}

/// With direct I/O these go through memory of the disk's own.
#[test]
fn data_that_is_aligned_to_nothing_gets_where_it_belongs() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        i.write(0, &[1; 16384], false).unwrap();
        // Memory that is not aligned, and ranges within and across blocks.
        for (at, offset, len) in [(3, 4096, 4096), (0, 100, 50), (7, 4000, 5000), (4096, 12289, 1)] {
            let data: Vec<u8> = (0..len).map(|x| (x + at) as u8 | 0x80).collect();
            let before = i.read(0, 16384).unwrap();
            i.write_from(at, offset as u64, &data, true).unwrap();
            assert_eq!(
                i.read_to(at, offset as u64, len).unwrap(),
                data,
                "{at}, {offset}, {len}"
            );
            let mut expected = before;
            expected[offset..offset + len].copy_from_slice(&data);
            assert!(i.read(0, 16384).unwrap() == expected, "{at}, {offset}, {len}");
        }
    });
}

/// Writes of parts of one block: with direct I/O each reads the block and writes it back.
#[test]
fn parts_of_one_block_do_not_overwrite_each_other() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        for part in 0..64usize {
            i.memory.write(part * 64, &[part as u8 + 1; 64]).unwrap();
        }
        i.memory.write(8192, &[0xaa; 4096]).unwrap();
        for part in 0..64 {
            i.start(BlockOp::Write { fua: false }, part * 64, 64, part as usize * 64);
            // Whole blocks beside them.
            i.start(BlockOp::Write { fua: false }, 4096 + part * 4096, 4096, 8192);
        }
        i.settle();
        assert!(i.done.iter().all(|(_, result)| result.is_ok()));
        let block = i.read(0, 4096).unwrap();
        assert!((0..4096).all(|at| block[at] == (at / 64) as u8 + 1));
        assert_eq!(i.read(4096, 64 * 4096).unwrap(), vec![0xaa; 64 * 4096]);
    });
}

#[test]
fn a_disk_whose_writes_waited_for_each_other_has_nothing_to_do_afterwards() {
    everywhere(|case| {
        let mut i = case.image(MIB);
        for at in 0..32 {
            i.start(BlockOp::Write { fua: false }, at * 64, 64, 0);
        }
        i.settle();
        assert!(!i.pump(&mut Budget::default()));
        assert!(!is_ready(&i.disk), "{:?}", i.disk);
    });
}

/// In a file system of 1 MiB that only this thread sees.
#[test]
#[ignore = "needs the right to mount a file system"]
fn a_full_disk_is_an_error_and_what_was_flushed_stays() {
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let null = std::ptr::null();
    // SAFETY: NUL-terminated strings.
    let alone = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(c"none".as_ptr(), c"/".as_ptr(), null, private, null.cast()) == 0
    };
    assert!(alone, "{}", std::io::Error::last_os_error());
    for way in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let target = std::ffi::CString::new(dir.path().to_str().unwrap()).unwrap();
        // SAFETY: NUL-terminated strings.
        let mounted = unsafe {
            libc::mount(
                c"tmpfs".as_ptr(),
                target.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                c"size=1m".as_ptr().cast(),
            ) == 0
        };
        assert!(mounted, "{}", std::io::Error::last_os_error());
        full_disk(&Case {
            way,
            dir,
            caching: Caching::PageCache,
        });
        // SAFETY: a NUL-terminated string.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

fn full_disk(case: &Case) {
    let mut i = case.image(8 * MIB);
    i.write(0, &vec![5; 512 << 10], true).unwrap();
    let failed = (1..16).find_map(|n| i.write(n * (512 << 10), &vec![6; 512 << 10], false).err());
    assert_eq!(failed, Some(Errno::ENOSPC));
    i.flush().unwrap();
    assert_eq!(i.read(0, 512 << 10).unwrap(), vec![5; 512 << 10]);
    i.discard(512 << 10, MIB).unwrap();
    i.write(MIB, &[7; 4096], true).unwrap();
    drop(i);
    let mut back = vec![0; 512 << 10];
    File::open(case.path()).unwrap().read_exact_at(&mut back, 0).unwrap();
    assert_eq!(back, vec![5; 512 << 10]);
}

#[test]
fn only_files_and_block_devices() {
    let t = tempfile::tempdir().unwrap();
    for caching in [Caching::PageCache, Caching::Direct] {
        let open = |path: &Path| Image::open(path, false, caching).unwrap_err();
        assert_eq!(open(t.path()), Errno::ENOTBLK);
        assert_eq!(open(Path::new("/dev/zero")), Errno::ENOTBLK);
        assert_eq!(open(&t.path().join("none")), Errno::ENOENT);
    }
}
