//! Acknowledged writes that a server has lost: the next flush fails, and only then.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
};

use ferroce_tests::{
    device::{image, map_args, serve_args},
    ferroce, fresh_address,
    nbd::{Client, EIO, Error},
    pattern,
    preload::compile,
    process::Running,
    vhost::{BUFFERS, Guest, kind},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const LEN: usize = 64 << 10;

/// A library that reads the boot ID from `$BOOT_ID`, and whose `fdatasync` fails as long as `$SYNC_FAILS` exists.
const MACHINE: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
static int do_open(const char *path, int flags, int mode) {
    if (!strcmp(path, "/proc/sys/kernel/random/boot_id"))
        path = getenv("BOOT_ID");
    return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); return do_open(path, flags, mode); }
OPEN(open)
OPEN(open64)
int fdatasync(int fd) {
    if (!access(getenv("SYNC_FAILS"), F_OK)) {
        errno = EIO;
        return -1;
    }
    return syscall(SYS_fdatasync, fd);
}
"#;

/// A server on a machine that can crash, and a mapping.
struct Lab {
    dir: tempfile::TempDir,
    image: PathBuf,
    library: PathBuf,
    server: Ipv4Addr,
    serve: Option<Running>,
    map: Running,
}

impl Lab {
    fn start(on_loss: &str, map_more: &[&str]) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = image(dir.path(), "disk.img", &vec![0; 1 << 20]);
        let library = compile(dir.path(), MACHINE);
        fs::write(dir.path().join("boot"), "1\n").unwrap();
        let server = fresh_address();
        let serve = Some(start(dir.path(), &library, server, &image));
        let vhost = format!("disk={}/vhost", dir.path().display());
        let more = ["--on-loss", on_loss, "--reconnect-delay", "0.2", "--vhost-user", &vhost];
        let more = [&more, map_more].concat();
        let args = map_args(fresh_address(), &server.to_string(), &dir.path().join("nbd"), &more);
        let mut map = Running::steered(&args);
        map.event("mapped");
        Self {
            dir,
            image,
            library,
            server,
            serve,
            map,
        }
    }

    fn client(&self) -> Client {
        Client::connect(&self.dir.path().join("nbd")).unwrap()
    }

    /// kill -9, and the mapping has noticed.
    fn kill(&mut self) {
        let mut serve = self.serve.take().unwrap();
        serve.signal(Signal::SIGKILL);
        serve.wait();
        self.map.event("session_lost");
    }

    fn restart(&mut self) {
        self.serve = Some(start(self.dir.path(), &self.library, self.server, &self.image));
    }

    /// The server's machine crashes, and is back with what was in the image before.
    fn crash(&mut self, before: &[u8]) {
        self.kill();
        // The same file as before, as it would be after a crash.
        fs::write(&self.image, before).unwrap();
        let boot = fs::read_to_string(self.dir.path().join("boot")).unwrap();
        fs::write(self.dir.path().join("boot"), format!("{}\n", boot.trim().len() + 1)).unwrap();
        self.restart();
    }

    fn lost(&mut self) -> Value {
        let list = self.map.ask(json!({ "do": "list" }));
        list["devices"][0]["lost"].clone()
    }

    /// Ends both; what they have told.
    fn end(self) -> (String, String) {
        let map = self.map.stop();
        assert_eq!(map.code, Some(0), "{}", map.stderr);
        assert_eq!(self.serve.unwrap().stop().code, Some(0));
        (map.stdout, map.stderr)
    }
}

fn start(dir: &Path, library: &Path, server: Ipv4Addr, image: &Path) -> Running {
    let export = format!("disk={}", image.display());
    let mut command = Command::new(ferroce());
    command
        .args(serve_args(server, &[export], &[]))
        .env("LD_PRELOAD", library)
        .env("BOOT_ID", dir.join("boot"))
        .env("SYNC_FAILS", dir.join("fails"));
    let mut serve = Running::steered_by(command, "serve".into());
    serve.event("listening");
    serve
}

fn is_eio(result: Result<(), Error>) -> bool {
    matches!(result, Err(Error::Refused(EIO)))
}

#[test]
fn a_flush_fails_after_the_servers_machine_has_crashed() {
    for (on_loss, more) in [("queue", &[][..]), ("error", &[]), ("queue", &["--connections", "2"])] {
        let mut lab = Lab::start(on_loss, more);
        let before = fs::read(&lab.image).unwrap();
        let mut clients = [lab.client(), lab.client()];
        clients[0].write(0, &pattern(1, LEN)).unwrap();
        assert!(clients[1].read(0, LEN).unwrap() == pattern(1, LEN));
        lab.crash(&before);
        let told = lab.map.event("writes_lost");
        assert_eq!(
            (&told["device"], &told["why"]),
            (&json!("disk"), &json!("another_instance"))
        );
        assert_eq!(told["writes"], lab.lost(), "{told}");
        lab.map.event("remapped");
        for client in &mut clients {
            assert!(client.read(0, LEN).unwrap() == vec![0; LEN], "it is lost");
            assert!(is_eio(client.write_fua(512 << 10, &pattern(2, 4096))));
            client.write_fua(512 << 10, &pattern(3, 4096)).unwrap();
            assert!(is_eio(client.flush()), "{on_loss} {more:?}");
            client.flush().unwrap();
        }
        // Those who come now can't have had anything to do with it.
        lab.client().flush().unwrap();
        let (_, log) = lab.end();
        assert!(log.contains("may be lost"), "{log}");
    }
}

#[test]
fn a_virtual_machine_is_told_as_well() {
    const OK: (u8, u32) = (0, 1);
    const IOERR: (u8, u32) = (1, 1);
    let mut lab = Lab::start("queue", &[]);
    let before = fs::read(&lab.image).unwrap();
    let mut guest = Guest::connect(&lab.dir.path().join("vhost"), 0);
    guest.start();
    let mut client = lab.client();
    guest.write(0, 0, &[(BUFFERS, 4096)], &pattern(1, 4096));
    lab.crash(&before);
    lab.map.event("remapped");
    let mut flush = || guest.run(0, kind::FLUSH, 0, &[], &[]);
    assert_eq!((flush(), flush()), (IOERR, OK));
    assert!(is_eio(client.flush()));
    client.flush().unwrap();
    lab.end();
}

#[test]
fn a_flush_fails_that_waits_for_a_server_that_has_crashed() {
    let mut lab = Lab::start("queue", &[]);
    let before = fs::read(&lab.image).unwrap();
    let mut client = lab.client();
    client.write(0, &pattern(1, LEN)).unwrap();
    lab.kill();
    let flushing = std::thread::spawn(move || {
        let result = client.flush();
        (client, result)
    });
    fs::write(&lab.image, before).unwrap();
    fs::write(lab.dir.path().join("boot"), "2\n").unwrap();
    lab.restart();
    let (mut client, result) = flushing.join().unwrap();
    assert!(is_eio(result));
    client.write(0, &pattern(1, LEN)).unwrap();
    client.flush().unwrap();
    assert!(fs::read(&lab.image).unwrap()[..LEN] == pattern(1, LEN));
    lab.end();
}

#[test]
fn a_server_process_that_dies_loses_nothing() {
    let mut lab = Lab::start("queue", &[]);
    let mut client = lab.client();
    client.write(0, &pattern(1, LEN)).unwrap();
    lab.kill();
    lab.restart();
    lab.map.event("remapped");
    client.flush().unwrap();
    client.write_fua(0, &pattern(2, LEN)).unwrap();
    assert!(client.read(0, LEN).unwrap() == pattern(2, LEN));
    // What is flushed is not lost with the machine either.
    let before = fs::read(&lab.image).unwrap();
    lab.crash(&before);
    lab.map.event("remapped");
    client.flush().unwrap();
    assert_eq!(lab.lost(), 0);
    let (events, _) = lab.end();
    assert!(!events.contains("writes_lost"), "{events}");
}

/// The session is lost while the server lives: it syncs at the close, and nobody is left to hear that this fails.
#[test]
fn a_flush_fails_after_a_sync_has_failed_at_a_close() {
    let mut lab = Lab::start("queue", &[]);
    let mut client = lab.client();
    client.write(0, &pattern(1, LEN)).unwrap();
    let fails = lab.dir.path().join("fails");
    fs::write(&fails, "").unwrap();
    let serve = lab.serve.as_mut().unwrap();
    let sessions = serve.ask(json!({ "do": "sessions" }));
    let session = sessions["sessions"][0]["session"].clone();
    serve.done(json!({ "do": "close_session", "session": session }));
    assert_eq!(lab.map.event("writes_lost")["why"], "another_instance");
    fs::remove_file(&fails).unwrap();
    assert!(is_eio(client.flush()));
    client.flush().unwrap();
    lab.end();
}

/// The end of a mapping flushes as a user of its own: if nobody else was told, it fails.
#[test]
fn a_mapping_ends_with_an_error_if_nobody_was_told() {
    let mut lab = Lab::start("queue", &[]);
    let before = fs::read(&lab.image).unwrap();
    lab.client().write(0, &pattern(1, LEN)).unwrap();
    lab.crash(&before);
    lab.map.event("remapped");
    let map = lab.map.stop();
    assert_eq!(map.code, Some(1), "{}", map.stderr);
    assert!(map.stderr.contains("flush of device disk"), "{}", map.stderr);
    lab.serve.unwrap().stop();
}
