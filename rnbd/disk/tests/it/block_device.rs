//! Block devices, and what of the data is on them when, over every way. Loop devices need privilege, so these tests are
//! ignored by default:
//!
//! ```sh
//! sudo -E cargo test -p rnbd-disk --test it block_device -- --include-ignored
//! ```

use std::path::Path;

use crate::common::{MIB, Rig, WAYS};
use ferroce_rig::block::{Loop, dirty_pages, stays_in_memory};
use rnbd::server::disk::Disks as _;
use rnbd::{Errno, block::Extent, proto::AccessMode};
use rnbd_disk::{Caching, ExportSpec, Exports, Image};

fn open(path: &Path, caching: Caching) -> Image {
    Image::open(path, true, caching).unwrap()
}

/// Every way, with and without the page cache, each on a new device.
fn everywhere(options: &[&str], test: impl Fn(&Path, Rig)) {
    for way in WAYS {
        for caching in [Caching::PageCache, Caching::Direct] {
            println!("{way:?}, {caching:?}");
            let l = Loop::new(options);
            test(l.path(), Rig::new(way, open(l.path(), caching)));
        }
    }
}

#[test]
#[ignore = "needs the right to set up loop devices"]
fn a_block_device_has_its_own_geometry() {
    everywhere(&["--sector-size", "4096"], |_, mut i| {
        let g = i.geometry();
        assert_eq!(
            (g.size, g.logical_block_size, g.physical_block_size),
            (8 * MIB, 4096, 4096)
        );
        assert!(g.max_discard > 0 && g.discard_granularity >= 4096);
        assert_eq!(i.read(4096, 8192).unwrap(), vec![7; 8192]);
        assert_eq!(i.read(8 * MIB, 4096).unwrap_err(), Errno::EIO);
    });
}

#[test]
#[ignore = "needs the right to set up loop devices"]
fn a_block_device_is_written_discarded_and_zeroed() {
    everywhere(&[], |_, mut i| {
        i.write(512, &[1; 1024], false).unwrap();
        assert_eq!(
            i.read(0, 2048).unwrap(),
            [vec![7; 512], vec![1; 1024], vec![7; 512]].concat()
        );
        i.discard(MIB, MIB).unwrap();
        assert_eq!(i.read(MIB, MIB as usize).unwrap(), vec![0; MIB as usize]);
        for (n, may_unmap) in [(3, true), (5, false)] {
            i.zero(n * MIB + 512, 4096, true, may_unmap).unwrap();
            assert_eq!(i.read(n * MIB + 512, 4096).unwrap(), vec![0; 4096]);
            assert_eq!(i.read(n * MIB, 512).unwrap(), vec![7; 512]);
        }
        assert_eq!(i.discard(8 * MIB, 512).unwrap_err(), Errno::EIO);
        i.flush().unwrap();
    });
}

/// The file system of its name knows nothing of it.
#[test]
#[ignore = "needs the right to set up loop devices"]
fn of_a_block_device_all_is_data() {
    everywhere(&[], |_, mut i| {
        i.discard(0, 8 * MIB).unwrap();
        assert_eq!(i.extents(0, 8 * MIB, 9).unwrap(), [Extent::data(8 * MIB)]);
        assert_eq!(i.extents(4096, 8192, 1).unwrap(), [Extent::data(8192)]);
    });
}

#[test]
#[ignore = "needs the right to set up loop devices"]
fn a_read_only_block_device_is_not_opened_for_writing() {
    for caching in [Caching::PageCache, Caching::Direct] {
        let l = Loop::new(&["--read-only"]);
        let e = Image::open(l.path(), true, caching).unwrap_err();
        assert!(matches!(e, Errno::EACCES | Errno::EPERM), "{e:?}");
        let i = Image::open(l.path(), false, caching).unwrap();
        assert!(i.geometry().read_only);
    }
}

#[test]
#[ignore = "needs the right to set up loop devices"]
fn two_names_of_one_block_device_have_one_writer() {
    let l = Loop::new(&[]);
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(l.path(), &link).unwrap();
    let spec = |name: &str, path: &Path| ExportSpec {
        name: name.into(),
        path: path.into(),
        ..ExportSpec::default()
    };
    let ex = Exports::new([spec("a", l.path()), spec("b", &link)], None, Caching::PageCache).unwrap();
    let _w = ex.open("s", b"a", AccessMode::ReadWrite).unwrap();
    assert_eq!(ex.open("t", b"b", AccessMode::ReadWrite).unwrap_err(), Errno::EPERM);
}

#[test]
#[ignore = "needs the right to set up loop devices, and Linux 6.5"]
fn flush_and_fua_leave_nothing_behind_in_memory() {
    for way in WAYS {
        println!("{way:?}");
        let l = Loop::new(&[]);
        let mut i = Rig::new(way, open(l.path(), Caching::PageCache));
        i.flush().unwrap();
        assert_eq!(dirty_pages(l.path()), 0);
        stays_in_memory(l.path(), || i.write(0, &[1; 65536], false).unwrap());
        i.flush().unwrap();
        assert_eq!(dirty_pages(l.path()), 0, "flush");
        i.write(MIB, &[2; 65536], true).unwrap();
        assert_eq!(dirty_pages(l.path()), 0, "FUA");
        i.zero(2 * MIB + 512, 512, true, false).unwrap();
        assert_eq!(dirty_pages(l.path()), 0, "zeroes with FUA");
        stays_in_memory(l.path(), || i.write(3 * MIB, &[3; 65536], false).unwrap());
        drop(i.disk.take(i.store).unwrap());
        assert_eq!(dirty_pages(l.path()), 0, "close");
    }
}

#[test]
#[ignore = "needs the right to set up loop devices"]
fn a_block_device_that_is_open_has_the_size_that_it_has() {
    for way in WAYS {
        for caching in [Caching::PageCache, Caching::Direct] {
            println!("{way:?}, {caching:?}");
            let l = Loop::new(&[]);
            let mut i = Rig::new(way, open(l.path(), caching));
            for size in [12 * MIB, 4 * MIB, 6 * MIB] {
                l.resize(size);
                i.look_at_sizes();
                assert_eq!(i.disk.poll_resized(), Some((i.store, size)));
                i.write(size - 512, &[1; 512], true).unwrap();
                assert_eq!(i.read(size - 512, 512).unwrap(), vec![1; 512]);
                assert_eq!(i.write(size, &[1; 512], false).unwrap_err(), Errno::EIO);
                assert_eq!(i.read(size - 512, 1024).unwrap_err(), Errno::EIO);
                assert_eq!(open(l.path(), caching).geometry().size, size, "opened anew");
            }
            // Between two looks: what the system says.
            l.resize(2 * MIB);
            assert!(i.write(4 * MIB, &[1; 512], true).is_err());
            assert!(i.read(4 * MIB, 512).is_err());
        }
    }
}

#[test]
#[ignore = "needs the right to mount a file system, and Linux 6.5"]
fn closing_an_image_file_makes_it_durable() {
    let l = Loop::new(&[]);
    let made = std::process::Command::new("mkfs.ext4")
        .arg("-q")
        .arg(l.path())
        .status()
        .unwrap();
    assert!(made.success());
    let dir = tempfile::tempdir().unwrap();
    let c = |p: &Path| std::ffi::CString::new(p.to_str().unwrap()).unwrap();
    let (source, target) = (c(l.path()), c(dir.path()));
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let null = std::ptr::null();
    // SAFETY: NUL-terminated strings.
    let mounted = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(c"none".as_ptr(), c"/".as_ptr(), null, private, null.cast()) == 0
            && libc::mount(source.as_ptr(), target.as_ptr(), c"ext4".as_ptr(), 0, null.cast()) == 0
    };
    assert!(mounted, "{}", std::io::Error::last_os_error());
    let path = dir.path().join("i");
    for way in WAYS {
        std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
        let mut i = Rig::new(way, open(&path, Caching::PageCache));
        stays_in_memory(&path, || i.write(0, &[1; 65536], false).unwrap());
        drop(i);
        assert_eq!(dirty_pages(&path), 0, "{way:?}");
    }
    // SAFETY: a NUL-terminated string.
    unsafe { libc::umount2(target.as_ptr(), 0) };
}
