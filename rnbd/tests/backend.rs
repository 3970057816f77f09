//! Image files as block devices.

mod common;

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::Arc,
};

use common::{MIB, read, write};
use rnbd::{
    Errno,
    backend::{Image, LocalDevice, Pool},
    block::{BlockDevice, BlockRequest, IoBuffer},
};

fn image(dir: &Path, len: u64) -> (std::path::PathBuf, Image) {
    let path = dir.join("i");
    File::create(&path).unwrap().set_len(len).unwrap();
    let i = Image::open(&path, true).unwrap();
    (path, i)
}

#[test]
fn what_is_written_is_read_with_and_without_fua() {
    let t = tempfile::tempdir().unwrap();
    let (path, i) = image(t.path(), MIB);
    for (n, fua) in [(0u8, false), (1, true)] {
        let data: Vec<u8> = (0..8192u32).map(|x| (x % 251) as u8 ^ n).collect();
        write(&i, 4096, &data, fua).unwrap();
        assert_eq!(read(&i, 4096, 8192).unwrap(), data);
        i.flush().unwrap();
        assert_eq!(&fs::read(&path).unwrap()[4096..12288], data);
    }
    assert_eq!(read(&i, 0, 4096).unwrap(), vec![0; 4096]);
}

#[test]
fn nothing_beyond_the_end() {
    let t = tempfile::tempdir().unwrap();
    let (path, i) = image(t.path(), MIB);
    for offset in [MIB - 512, MIB, u64::MAX - 511, u64::MAX - 1023] {
        assert_eq!(read(&i, offset, 1024).unwrap_err(), Errno::EIO, "{offset}");
        assert_eq!(
            write(&i, offset, &[1; 1024], false).unwrap_err(),
            Errno::EIO,
            "{offset}"
        );
        assert_eq!(i.discard(offset, 1024).unwrap_err(), Errno::EIO, "{offset}");
        assert_eq!(
            i.write_zeroes(offset, 1024, false, true).unwrap_err(),
            Errno::EIO,
            "{offset}"
        );
    }
    assert_eq!(fs::metadata(path).unwrap().len(), MIB);
}

#[test]
fn an_odd_size_is_rounded_down() {
    let t = tempfile::tempdir().unwrap();
    let (_, i) = image(t.path(), 1000);
    assert_eq!(i.geometry().size, 512);
}

#[test]
fn read_only_images_refuse_every_change() {
    let t = tempfile::tempdir().unwrap();
    let (path, _) = image(t.path(), MIB);
    let i = Image::open(&path, false).unwrap();
    assert!(i.geometry().read_only);
    assert_eq!(i.geometry().max_discard, 0);
    assert_eq!(write(&i, 0, &[1; 512], false).unwrap_err(), Errno::EROFS);
    assert_eq!(i.discard(0, 512).unwrap_err(), Errno::EROFS);
    assert_eq!(i.write_zeroes(0, 512, false, true).unwrap_err(), Errno::EROFS);
    i.flush().unwrap();
    assert_eq!(read(&i, 0, 512).unwrap(), vec![0; 512]);
}

#[test]
fn an_image_that_grew_is_used_to_its_new_end() {
    let t = tempfile::tempdir().unwrap();
    let (path, i) = image(t.path(), MIB);
    assert_eq!(read(&i, MIB, 512).unwrap_err(), Errno::EIO);
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(2 * MIB + 100)
        .unwrap();
    write(&i, 2 * MIB - 512, &[7; 512], true).unwrap();
    assert_eq!(read(&i, 2 * MIB - 512, 512).unwrap(), [7; 512]);
    assert_eq!(i.geometry().size, 2 * MIB);
    assert_eq!(write(&i, 2 * MIB, &[7; 512], false).unwrap_err(), Errno::EIO);
}

#[test]
fn a_truncated_image_gives_errors_and_does_not_grow_again() {
    let t = tempfile::tempdir().unwrap();
    let (path, i) = image(t.path(), MIB);
    write(&i, 0, &[7; 4096], false).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(6000).unwrap();
    assert_eq!(read(&i, 0, 4096).unwrap(), vec![7; 4096]);
    assert_eq!(read(&i, 4096, 4096).unwrap_err(), Errno::EIO);
    assert_eq!(read(&i, 8192, 512).unwrap_err(), Errno::EIO);
    for fua in [false, true] {
        assert_eq!(write(&i, 8192, &[1; 512], fua).unwrap_err(), Errno::EIO);
    }
    assert_eq!(i.discard(8192, 4096).unwrap_err(), Errno::EIO);
    assert_eq!(i.write_zeroes(8192, 4096, false, false).unwrap_err(), Errno::EIO);
    assert_eq!(fs::metadata(&path).unwrap().len(), 6000);
    write(&i, 0, &[8; 512], false).unwrap();
    i.flush().unwrap();
}

#[test]
fn discarded_ranges_read_zero_and_give_space_back() {
    let t = tempfile::tempdir().unwrap();
    let (path, i) = image(t.path(), MIB);
    assert!(
        i.geometry().max_discard > 0,
        "this file system makes no holes: run the tests elsewhere"
    );
    write(&i, 0, &vec![9; MIB as usize], true).unwrap();
    let before = fs::metadata(&path).unwrap().blocks();
    i.discard(256 << 10, 512 << 10).unwrap();
    assert_eq!(read(&i, 256 << 10, 512 << 10).unwrap(), vec![0; 512 << 10]);
    assert_eq!(read(&i, 0, 256 << 10).unwrap(), vec![9; 256 << 10]);
    i.flush().unwrap();
    assert!(fs::metadata(&path).unwrap().blocks() < before);
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB);
    i.discard(0, 0).unwrap();
}

#[test]
fn zeroes_are_zero_however_they_come() {
    let t = tempfile::tempdir().unwrap();
    let (_, i) = image(t.path(), MIB);
    for (may_unmap, fua) in [(false, false), (true, false), (false, true), (true, true)] {
        write(&i, 0, &vec![9; MIB as usize], false).unwrap();
        i.write_zeroes(512, MIB - 1024, fua, may_unmap).unwrap();
        let all = read(&i, 0, MIB as usize).unwrap();
        assert!(all[..512].iter().chain(&all[MIB as usize - 512..]).all(|b| *b == 9));
        assert!(all[512..MIB as usize - 512].iter().all(|b| *b == 0));
    }
}

/// In a file system of 1 MiB that only this thread sees.
#[test]
#[ignore = "needs the right to mount a file system"]
fn a_full_disk_is_an_error_and_what_was_flushed_stays() {
    let t = tempfile::tempdir().unwrap();
    let target = std::ffi::CString::new(t.path().to_str().unwrap()).unwrap();
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let null = std::ptr::null();
    // SAFETY: NUL-terminated strings.
    let mounted = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(c"none".as_ptr(), c"/".as_ptr(), null, private, null.cast()) == 0
            && libc::mount(
                c"tmpfs".as_ptr(),
                target.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                c"size=1m".as_ptr().cast(),
            ) == 0
    };
    assert!(mounted, "{}", std::io::Error::last_os_error());
    let (path, i) = image(t.path(), 8 * MIB);
    write(&i, 0, &vec![5; 512 << 10], true).unwrap();
    let mut failed = None;
    for n in 1..16 {
        if let Err(e) = write(&i, n * (512 << 10), &vec![6; 512 << 10], false) {
            failed = Some(e);
            break;
        }
    }
    assert_eq!(failed, Some(Errno::ENOSPC));
    i.flush().unwrap();
    assert_eq!(read(&i, 0, 512 << 10).unwrap(), vec![5; 512 << 10]);
    i.discard(512 << 10, MIB).unwrap();
    write(&i, MIB, &[7; 4096], true).unwrap();
    drop(i);
    let mut back = vec![0; 512 << 10];
    File::open(&path).unwrap().read_exact_at(&mut back, 0).unwrap();
    assert_eq!(back, vec![5; 512 << 10]);
    // SAFETY: a NUL-terminated string.
    unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
}

#[test]
fn only_files_and_block_devices() {
    let t = tempfile::tempdir().unwrap();
    assert_eq!(Image::open(t.path(), false).unwrap_err(), Errno::ENOTBLK);
    assert_eq!(Image::open(Path::new("/dev/zero"), false).unwrap_err(), Errno::ENOTBLK);
    assert_eq!(Image::open(&t.path().join("none"), false).unwrap_err(), Errno::ENOENT);
}

#[test]
fn the_device_completes_what_it_is_given() {
    let t = tempfile::tempdir().unwrap();
    let path = t.path().join("i");
    File::create(&path).unwrap().write_all(&vec![3; MIB as usize]).unwrap();
    let d = LocalDevice::new(Image::open(&path, true).unwrap(), Arc::new(Pool::new(3).unwrap()));
    let (tx, rx) = std::sync::mpsc::channel();
    for n in 0..64u64 {
        let buffer = d.buffer(4096).unwrap();
        // SAFETY: the buffer's own bytes.
        unsafe { std::ptr::write_bytes(buffer.as_ptr(), n as u8, 4096) };
        let tx = tx.clone();
        let done = move |r, b: Option<_>| tx.send((r, b.is_some())).unwrap();
        d.submit(
            BlockRequest::Write {
                offset: n * 8192,
                buffer,
                fua: n % 8 == 0,
            },
            Box::new(done),
        );
    }
    for _ in 0..64 {
        assert_eq!(rx.recv().unwrap(), (Ok(()), true));
    }
    drop(d);
    let all = fs::read(&path).unwrap();
    for n in 0..64 {
        assert_eq!(all[n * 8192..][..4096], [n as u8; 4096]);
        assert_eq!(all[n * 8192 + 4096..][..4096], [3; 4096]);
    }
}

#[test]
fn a_device_lends_as_many_buffers_as_its_depth() {
    let t = tempfile::tempdir().unwrap();
    let (_, i) = image(t.path(), MIB);
    let depth = i.geometry().queue_depth;
    let max = i.geometry().max_transfer as usize;
    let d = LocalDevice::new(i, Arc::new(Pool::new(1).unwrap()));
    assert_eq!(d.buffer(0).unwrap_err(), Errno::EINVAL);
    assert_eq!(d.buffer(max + 1).unwrap_err(), Errno::EINVAL);
    let mut all: Vec<_> = (0..depth).map(|_| d.try_buffer(512).unwrap().unwrap()).collect();
    assert!(d.try_buffer(512).unwrap().is_none());
    all.pop();
    assert_eq!(d.buffer(max).unwrap().len(), max);
}
