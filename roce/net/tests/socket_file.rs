//! Files of Unix sockets: who may connect, and whose folders they may be in.

use std::{
    fs,
    io::ErrorKind,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown, symlink},
        net::{UnixListener, UnixStream},
    },
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

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

/// A process of another user, ended when it is dropped.
struct Other(Child);

impl Other {
    /// Runs a shell script in a loop.
    fn repeats(script: &str) -> Self {
        let id = OTHER.to_string();
        let script = format!("while :; do {script}; done 2>/dev/null");
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "sh", "-c", &script]);
        Self(command.spawn().unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs root, to be another user"]
fn another_users_folder_is_refused_and_no_link_of_his_is_followed() {
    let dir = folder();
    set_mode(dir.path(), 0o755);
    let [victim, theirs] = ["victim", "theirs"].map(|name| dir.path().join(name));
    for folder in [&victim, &theirs] {
        fs::create_dir(folder).unwrap();
    }
    set_mode(&victim, 0o700);
    chown(&theirs, Some(OTHER), Some(OTHER)).unwrap();
    // A folder of root's in another user's, which that user can move.
    let inner = theirs.join("inner");
    fs::create_dir(&inner).unwrap();
    let (socket, moved) = (theirs.join("s"), theirs.join("moved"));
    let swaps = Other::repeats(&format!("ln -sfn {} {}", victim.display(), socket.display()));
    let moves = Other::repeats(&format!(
        "mv -T {inner} {moved}; ln -sfn {victim} {inner}; rm {inner}; mv -T {moved} {inner}",
        inner = inner.display(),
        moved = moved.display(),
        victim = victim.display(),
    ));
    let end = Instant::now() + Duration::from_secs(1);
    while Instant::now() < end {
        for path in [&socket, &inner.join("s")] {
            let bound = SocketFile::bind(path, Kind::Stream, Access::Group(Some(OTHER)));
            let meta = victim.metadata().unwrap();
            assert_eq!((meta.mode() & 0o7777, meta.gid()), (0o700, 0), "{bound:?}");
        }
    }
    drop((swaps, moves));
    let e = SocketFile::bind(&theirs.join("t"), Kind::Stream, Access::Owner).unwrap_err();
    assert!(e.to_string().contains("user 65533 can write to the folder"), "{e}");
    // What is its own is fine, also below what is root's.
    let group = SocketFile::bind(&victim.join("s"), Kind::Stream, Access::Group(Some(OTHER))).unwrap();
    let meta = victim.join("s").metadata().unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.gid()), (0o660, OTHER));
    drop(group);
}
