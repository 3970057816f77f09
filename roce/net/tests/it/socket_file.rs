//! Files of Unix sockets: who may connect, and whose folders they may be in.

use std::{
    fs,
    io::ErrorKind,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown, symlink},
        net::{UnixListener, UnixStream},
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use roce_net::socket_file::{Access, Kind, SocketFile};

/// Another user.
const OTHER: u32 = 65533;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().mode() & 0o7777
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn the_file_has_the_mode_that_was_asked_for_and_goes_with_the_socket() {
    let dir = folder();
    let path = dir.path().join("s");
    for (access, wanted) in [
        (Access::Owner, 0o600),
        (Access::Group(None), 0o660),
        (Access::Mode(0o666), 0o666),
    ] {
        for kind in [Kind::Stream, Kind::Records] {
            let file = SocketFile::bind(&path, kind, access).unwrap();
            assert_eq!(mode(&path), wanted, "{access:?}");
            drop(file);
            assert!(!path.exists());
        }
    }
    // Another's file stays.
    let file = SocketFile::bind(&path, Kind::Stream, Access::Owner).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "precious").unwrap();
    drop(file);
    assert_eq!(fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_dead_servers_file_is_taken_over_and_nothing_else() {
    let dir = folder();
    let path = dir.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    let file = SocketFile::bind(&path, Kind::Stream, Access::Owner).unwrap();
    UnixStream::connect(&path).unwrap();
    for kind in [Kind::Stream, Kind::Records] {
        let e = SocketFile::bind(&path, kind, Access::Owner).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::AddrInUse, "{e}");
    }
    drop(file);
    let (target, link) = (dir.path().join("target"), dir.path().join("link"));
    fs::write(&target, "precious").unwrap();
    set_mode(&target, 0o640);
    symlink(&target, &link).unwrap();
    for other in [&target, &link] {
        let e = SocketFile::bind(other, Kind::Stream, Access::Group(None)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::AlreadyExists, "{e}");
    }
    assert_eq!((fs::read(&target).unwrap(), mode(&target)), (b"precious".into(), 0o640));
    let long = dir.path().join("x".repeat(120));
    let e = SocketFile::bind(&long, Kind::Stream, Access::Owner).unwrap_err();
    assert!(e.to_string().contains("longer than 107"), "{e}");
}

#[test]
fn a_folder_that_everybody_can_write_to_is_sticky() {
    let dir = folder();
    let inner = dir.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let path = inner.join("s");
    for (of_dir, of_inner, allowed) in [
        (0o777, 0o755, false),
        (0o755, 0o777, false),
        (0o1777, 0o1777, true),
        (0o775, 0o775, true),
    ] {
        set_mode(dir.path(), of_dir);
        set_mode(&inner, of_inner);
        match SocketFile::bind(&path, Kind::Stream, Access::Owner) {
            Ok(_) => assert!(allowed, "{of_dir:o} {of_inner:o}"),
            Err(e) => {
                assert!(!allowed && e.kind() == ErrorKind::PermissionDenied, "{e}");
                assert!(e.to_string().contains("everybody can write to the folder"), "{e}");
            }
        }
    }
}

/// Becomes another user, in this thread alone: libc's functions would change all threads.
fn become_other() {
    let other = libc::c_long::from(OTHER);
    // SAFETY: no pointers are passed but one to no group.
    let done = unsafe {
        [
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()),
            libc::syscall(libc::SYS_setresgid, other, other, other),
            libc::syscall(libc::SYS_setresuid, other, other, other),
        ]
    };
    assert_eq!(done, [0; 3]);
}

#[test]
#[ignore = "needs root, to be another user"]
fn another_users_folder_is_refused_and_no_link_of_that_user_is_followed() {
    let dir = folder();
    set_mode(dir.path(), 0o755);
    let [ours, victim, theirs, own, link] =
        ["ours", "ours/s", "theirs", "theirs/own", "theirs/link"].map(|name| dir.path().join(name));
    for folder in [&ours, &victim, &theirs, &own] {
        fs::create_dir(folder).unwrap();
    }
    set_mode(&victim, 0o700);
    symlink(&ours, &link).unwrap();
    for path in [&theirs, &own] {
        chown(path, Some(OTHER), Some(OTHER)).unwrap();
    }
    let end = Instant::now() + Duration::from_secs(1);
    let exchange = || {
        become_other();
        // At each name there is that user's folder now, and a link to root's then.
        while Instant::now() < end {
            renameat2(AT_FDCWD, &own, AT_FDCWD, &link, RenameFlags::RENAME_EXCHANGE).unwrap();
        }
    };
    thread::scope(|scope| {
        scope.spawn(exchange);
        while Instant::now() < end {
            let bound = SocketFile::bind(&own.join("s"), Kind::Stream, Access::Group(Some(OTHER)));
            let meta = victim.metadata().unwrap();
            assert_eq!((meta.mode() & 0o7777, meta.gid()), (0o700, 0), "{bound:?}");
            let refused = bound.expect_err("a folder of another user").kind();
            assert!(matches!(refused, ErrorKind::PermissionDenied), "{refused:?}");
        }
    });
    let e = SocketFile::bind(&theirs.join("s"), Kind::Stream, Access::Owner).unwrap_err();
    assert!(e.to_string().contains("user 65533 can write to the folder"), "{e}");
    // What is its own is fine.
    let group = SocketFile::bind(&victim.join("s"), Kind::Stream, Access::Group(Some(OTHER))).unwrap();
    let meta = victim.join("s").metadata().unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.gid()), (0o660, OTHER));
    drop(group);
}
