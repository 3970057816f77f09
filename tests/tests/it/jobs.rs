//! A slow file, or a reader of standard output that does not read, blocks no other client.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use ferroce_tests::{
    device::{image, map, serve_args},
    ferroce, fresh_address,
    nbd::Client,
    preload::compile,
    process::{Running, TIMEOUT},
};
use nix::{sys::signal::Signal, sys::stat::Mode, unistd::mkfifo};

/// A library whose `fdatasync` of files called slow* hangs as long as `$SYNC_HELD` exists, and logs its beginning and its end, with the
/// thread's name, in `$SYNC_LOG`.
const HOLD: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
static void note(const char *what) {
    char name[16];
    int log = open(getenv("SYNC_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    prctl(PR_GET_NAME, name);
    dprintf(log, "%s %s\n", what, name);
    close(log);
}
int fdatasync(int fd) {
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    char *name = strrchr(path, '/');
    if (!name || strncmp(name, "/slow", 5))
        return syscall(SYS_fdatasync, fd);
    note("begins");
    while (!access(getenv("SYNC_HELD"), F_OK))
        usleep(5000);
    int result = syscall(SYS_fdatasync, fd);
    note("ends");
    return result;
}
"#;

/// A server with slow files.
struct Slow {
    dir: tempfile::TempDir,
    addr: std::net::Ipv4Addr,
    serve: Running,
}

impl Slow {
    /// Exports "disk", "other" and "slow0" and so on, all in one folder.
    fn start(slow: usize) -> Self {
        // Not in memory: files there are synced in the loop, which takes no time.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let library = compile(dir.path(), HOLD);
        let names = ["disk".to_owned(), "other".to_owned()];
        let names = names.into_iter().chain((0..slow).map(|n| format!("slow{n}")));
        let exports: Vec<String> = names
            .map(|name| format!("{name}={}", image(dir.path(), &name, &[0; 8192]).display()))
            .collect();
        let addr = fresh_address();
        let mut command = Command::new(ferroce());
        command.args(serve_args(addr, &exports, &[]));
        command
            .env("LD_PRELOAD", library)
            .env("SYNC_LOG", dir.path().join("log"))
            .env("SYNC_HELD", dir.path().join("held"));
        File::create(dir.path().join("held")).unwrap();
        let mut serve = Running::start_command(command, "serve with slow files".into());
        serve.event("listening");
        Self { dir, addr, serve }
    }

    /// Names of the threads that have begun or ended slow syncs.
    fn log(&self, what: &str) -> Vec<String> {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let lines = log.lines().filter_map(|line| line.strip_prefix(what));
        lines.map(|name| name.trim().to_owned()).collect()
    }

    fn map(&self, session: &str, devices: &[String]) -> (Running, PathBuf) {
        let socket = self.dir.path().join(format!("{session}.sock"));
        let devices = devices.iter().flat_map(|name| ["--device", name.as_str()]);
        let options: Vec<&str> = ["--session", session].into_iter().chain(devices).collect();
        let (running, _) = map(fresh_address(), &self.addr.to_string(), &socket, &options);
        (running, socket)
    }

    /// Maps slow files, writes to each, and leaves them without a flush: each is synced when it is closed.
    fn write_and_leave(&self, count: usize) -> Running {
        let names: Vec<String> = (0..count).map(|n| format!("slow{n}")).collect();
        let (mut slow, socket) = self.map("slow", &names);
        for _ in 1..count {
            slow.event("mapped");
        }
        for name in &names {
            let mut client = Client::connect_to(&socket, name, TIMEOUT).unwrap();
            client.write(0, &[1; 512]).unwrap();
        }
        slow.signal(Signal::SIGKILL);
        let until = Instant::now() + TIMEOUT;
        while self.log("begins").is_empty() {
            assert!(Instant::now() < until, "no sync at close");
            thread::sleep(Duration::from_millis(5));
        }
        slow
    }

    fn release(&self) {
        fs::remove_file(self.dir.path().join("held")).unwrap();
    }
}

#[test]
fn clients_of_other_files_do_not_wait_for_a_slow_one() {
    let slow = Slow::start(1);
    let _left = slow.write_and_leave(1);
    for (session, name) in [("b", "disk"), ("c", "other")] {
        let (mapped, socket) = slow.map(session, &[name.to_owned()]);
        let mut client = Client::connect(&socket).unwrap();
        client.write(0, &[2; 512]).unwrap();
        client.flush().unwrap();
        drop(client);
        assert_eq!(mapped.stop().code, Some(0));
    }
    assert!(slow.log("ends").is_empty(), "the slow file is not closed yet");
    slow.release();
    assert_eq!(slow.serve.stop().code, Some(0));
}

#[test]
fn many_slow_files_are_closed_outside_of_the_loop() {
    const FILES: usize = 100;
    let slow = Slow::start(FILES);
    let _left = slow.write_and_leave(FILES);
    let (mapped, socket) = slow.map("b", &["disk".to_owned()]);
    let mut client = Client::connect(&socket).unwrap();
    for _ in 0..100 {
        client.read(0, 4096).unwrap();
    }
    assert!(slow.log("ends").is_empty());
    slow.release();
    drop(client);
    assert_eq!(mapped.stop().code, Some(0));
    let until = Instant::now() + TIMEOUT;
    while slow.log("ends").len() < FILES {
        assert!(
            Instant::now() < until,
            "{} of {FILES} were closed",
            slow.log("ends").len()
        );
        thread::sleep(Duration::from_millis(5));
    }
    let threads = slow.log("begins");
    assert!(
        !threads.iter().any(|name| name.starts_with("ferroce-io")),
        "a sync in the loop"
    );
    assert_eq!(slow.serve.stop().code, Some(0));
}

#[test]
fn the_next_writer_of_a_slow_file_waits_until_it_is_closed() {
    let slow = Slow::start(1);
    let _left = slow.write_and_leave(1);
    let socket = slow.dir.path().join("next.sock");
    let options = ["--session", "next", "--device", "slow0"];
    let args = ferroce_tests::device::map_args(fresh_address(), &slow.addr.to_string(), &socket, &options);
    let mut next = Running::start(&args);
    // Another client's opening is behind the first one's at the server.
    drop(slow.map("b", &["disk".to_owned()]));
    assert!(!next.has_ended() && !socket.exists() && slow.log("ends").is_empty());
    slow.release();
    next.event("mapped");
    assert_eq!(slow.log("ends").len(), 1);
    assert_eq!(next.stop().code, Some(0));
    assert_eq!(slow.serve.stop().code, Some(0));
}

#[test]
fn what_a_flush_covers_is_not_synced_again_at_the_close() {
    let slow = Slow::start(1);
    slow.release();
    let (mapped, socket) = slow.map("a", &["slow0".to_owned()]);
    let mut client = Client::connect(&socket).unwrap();
    client.write(0, &[1; 512]).unwrap();
    client.flush().unwrap();
    drop(client);
    assert_eq!(mapped.stop().code, Some(0));
    let log = slow.dir.path().join("log");
    assert_eq!(slow.serve.stop().code, Some(0));
    // Flushes that io_uring can't do are done by these threads.
    let log = fs::read_to_string(log).unwrap_or_default();
    let closes = log.lines().filter(|line| !line.contains("rnbd-io"));
    assert_eq!(closes.count(), 0, "{log}");
}

/// A FIFO without room that nobody reads.
fn stuck_fifo(dir: &Path) -> (PathBuf, File) {
    let path = dir.join("stdout");
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    let mut fifo = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(&path)
        .unwrap();
    loop {
        match fifo.write(&[b'\n'; 4096]) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return (path, fifo),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn a_reader_that_does_not_read_keeps_neither_clients_nor_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (fifo, _reader) = stuck_fifo(dir.path());
    let (addr, disk) = (fresh_address(), image(dir.path(), "disk", &[0; 8192]));
    let mut command = Command::new("sh");
    command
        .args(["-c", "fifo=$1; shift; exec \"$@\" >\"$fifo\"", "sh"])
        .arg(&fifo)
        .arg(ferroce())
        .args(serve_args(
            addr,
            &[format!("disk={}", disk.display())],
            &["--stats-interval", "0.01"],
        ));
    let serve = Running::start_command(command, "serve that nobody reads".into());
    let until = Instant::now() + TIMEOUT;
    while roce_net::holder::port_holders(addr.into(), 4791).is_empty() {
        assert!(Instant::now() < until, "{}", serve.stderr());
        thread::sleep(Duration::from_millis(5));
    }
    let socket = dir.path().join("nbd.sock");
    let (mapped, _) = map(fresh_address(), &addr.to_string(), &socket, &[]);
    Client::connect(&socket).unwrap().read(0, 4096).unwrap();
    assert_eq!(mapped.stop().code, Some(0));
    serve.signal(Signal::SIGINT);
    assert_eq!(serve.end().code, Some(0));
}
