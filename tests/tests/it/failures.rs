//! Everything that can go wrong ends in a clear message, and no acknowledged and flushed write is lost.

use std::{fs, net::UdpSocket, os::unix::fs::FileExt, path::Path, process::Command, sync::mpsc, thread, time::Instant};

use ferroce_tests::{
    device::{Pair, image, map, map_args, map_when_free, serve, serve_args},
    ferroce, fresh_address,
    nbd::{self, Client, EIO, ENOSPC, ESHUTDOWN, Error},
    pattern,
    process::{Finished, Running, TIMEOUT, run},
};
use nix::sys::signal::Signal;

const MIB: usize = 1 << 20;

/// Checks that a command failed with status 1 and a message with all these words, and without a panic.
fn assert_error(done: &Finished, words: &[&str]) {
    assert_eq!(done.code, Some(1), "{}\n{}", done.stdout, done.stderr);
    assert!(
        done.stderr.lines().any(|l| l.starts_with("error: ")),
        "no message: {}",
        done.stderr
    );
    assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
    for word in words {
        assert!(done.stderr.contains(word), "`{word}` is not in: {}", done.stderr);
    }
}

fn map_fails(dst: &str, more: &[&str], words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd.sock");
    let done = run(&map_args(fresh_address(), dst, &socket, more));
    assert_error(&done, words);
    assert!(!socket.exists(), "no socket without a device");
}

#[test]
fn an_address_that_is_not_ours() {
    let dir = tempfile::tempdir().unwrap();
    let export = format!("disk={}", image(dir.path(), "i", &[0; 4096]).display());
    // TEST-NET-3: nobody has it.
    let args = ["serve", "--addr", "203.0.113.77", "--export", &export];
    assert_error(&run(&args), &["203.0.113.77", "ip addr"]);
    let socket = dir.path().join("nbd.sock");
    let args = map_args("203.0.113.77".parse().unwrap(), "127.0.0.1", &socket, &[]);
    assert_error(&run(&args), &["203.0.113.77"]);
}

#[test]
fn nobody_is_at_the_address() {
    let nobody = fresh_address().to_string();
    map_fails(
        &nobody,
        &["--connect-timeout", "3600"],
        &[&nobody, "UDP port 4791 is unreachable", "ferroce doctor --peer"],
    );
}

#[test]
fn ctrl_c_ends_the_wait_for_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, silent) = (fresh_address(), fresh_address());
    // Where nobody has the port, the wait would end by itself.
    let _deaf = UdpSocket::bind((silent, 4791)).unwrap();
    let args = map_args(
        ours,
        &silent.to_string(),
        &dir.path().join("s"),
        &["--connect-timeout", "3600"],
    );
    let map = Running::start(&args);
    let until = Instant::now() + TIMEOUT;
    // Looking by binding it could keep the program from it.
    while roce_net::holder::port_holders(ours.into(), 4791).is_empty() {
        assert!(Instant::now() < until, "{}", map.stderr());
        thread::sleep(std::time::Duration::from_millis(5));
    }
    map.signal(Signal::SIGINT);
    let done = map.end();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(done.json().pop().unwrap()["event"], "summary");
}

#[test]
fn nobody_listens_at_the_port() {
    let dir = tempfile::tempdir().unwrap();
    let disk = image(dir.path(), "i", &[0; 4096]);
    let server = fresh_address();
    let (_serve, _) = serve(server, &[format!("disk={}", disk.display())], &[]);
    map_fails(
        &format!("{server}:4321"),
        &[],
        &[&format!("{server}:4321"), "nobody listens"],
    );
}

#[test]
fn a_server_with_a_smaller_path_mtu_decides_it() {
    let dir = tempfile::tempdir().unwrap();
    let disk = image(dir.path(), "i", &[0; 4096]);
    let server = fresh_address();
    let (_serve, _) = serve(server, &[format!("disk={}", disk.display())], &["--mtu", "512"]);
    let socket = dir.path().join("nbd.sock");
    let (map, _) = map(fresh_address(), &server.to_string(), &socket, &["--mtu", "4096"]);
    let mut client = Client::connect(&socket).unwrap();
    let data = pattern(3, 4096);
    client.write(0, &data).unwrap();
    assert!(client.read(0, 4096).unwrap() == data);
    drop(client);
    assert_eq!(map.stop().code, Some(0));
}

#[test]
fn an_export_that_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let disk = image(dir.path(), "i", &[0; 4096]);
    let server = fresh_address();
    let (_serve, _) = serve(server, &[format!("disk={},ro", disk.display())], &[]);
    let dst = server.to_string();
    map_fails(&dst, &["--device", "other"], &["other", &dst]);
    // Read-write of a read-only export.
    map_fails(&dst, &[], &["disk", "--ro"]);
}

#[test]
fn a_second_writer_is_refused() {
    let pair = Pair::start(&[0; 4096], "", &[], &[]);
    map_fails(&pair.server.to_string(), &["--session", "second"], &["disk"]);
    assert_eq!(pair.map.stop().code, Some(0), "the first one is not disturbed");
}

#[test]
fn a_client_that_is_not_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let disk = image(dir.path(), "i", &[0; 4096]);
    let server = fresh_address();
    let (_serve, _) = serve(
        server,
        &[format!("disk={}", disk.display())],
        &["--allow", "127.0.0.1/32"],
    );
    map_fails(&server.to_string(), &[], &[&server.to_string(), "not allow"]);
}

#[test]
fn port_4791_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let disk = image(dir.path(), "i", &[0; 4096]);
    let addr = fresh_address();
    let _holder = UdpSocket::bind((addr, 4791)).unwrap();
    let us = format!("process {}", std::process::id());
    let done = run(&serve_args(addr, &[format!("disk={}", disk.display())], &[]));
    assert_error(&done, &["4791", &addr.to_string(), &us]);
    let done = run(&map_args(addr, "127.0.0.1", &dir.path().join("s"), &[]));
    assert_error(&done, &["4791", &addr.to_string(), &us]);
}

#[test]
fn an_export_that_can_not_be_opened() {
    let missing = "disk=/nonexistent/image";
    let done = run(&serve_args(fresh_address(), &[missing.to_owned()], &[]));
    assert_error(&done, &["/nonexistent/image"]);
    let dir = tempfile::tempdir().unwrap();
    let done = run(&serve_args(
        fresh_address(),
        &[format!("disk={}", dir.path().display())],
        &[],
    ));
    assert_error(&done, &[dir.path().to_str().unwrap()]);
}

/// `ferroce serve` of a 64 MiB image that has 4 MiB of disk: on a file system of its own, or where a user may not mount
/// one, under a limit for file sizes.
fn serve_without_space(addr: std::net::Ipv4Addr, dir: &Path) -> Running {
    let mount = "mount -t tmpfs -o size=4m tmpfs \"$0\"";
    let root = nix::unistd::geteuid().is_root();
    let namespace: &[&str] = if root { &["-m"] } else { &["-r", "-m"] };
    let tried = Command::new("unshare")
        .args(namespace)
        .args(["sh", "-c", mount])
        .arg(dir)
        .output();
    let (mut command, script) = if tried.is_ok_and(|o| o.status.success()) {
        let mut command = Command::new("unshare");
        command.args(namespace).arg("sh");
        (
            command,
            format!("{mount} && truncate -s 64M \"$0/disk.img\" && exec \"$@\""),
        )
    } else {
        // Blocks of 512 bytes.
        let script = "truncate -s 64M \"$0/disk.img\" && ulimit -f 8192 && exec \"$@\"";
        (Command::new("sh"), script.to_owned())
    };
    let export = format!("disk={}/disk.img", dir.display());
    command
        .arg("-c")
        .arg(script)
        .arg(dir)
        .arg(ferroce())
        .args(serve_args(addr, &[export], &[]));
    Running::start_command(command, "serve without space".into())
}

#[test]
fn an_export_larger_than_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let server = fresh_address();
    let mut serve = serve_without_space(server, dir.path());
    serve.event("listening");
    let socket = dir
        .path()
        .parent()
        .unwrap()
        .join(format!("ferroce-space-{}.sock", std::process::id()));
    let (map, _) = map(fresh_address(), &server.to_string(), &socket, &[]);
    let mut client = Client::connect(&socket).unwrap();
    client.write(0, &pattern(1, MIB)).unwrap();
    client.flush().unwrap();
    let refused = (1..64).find_map(|n| client.write(n * MIB as u64, &pattern(n, MIB)).err());
    // RNBD carries no error numbers but EIO; what the disk said stands in the server's log.
    assert!(matches!(refused, Some(Error::Refused(ENOSPC | EIO))), "{refused:?}");
    assert!(
        client.read(0, MIB).unwrap() == pattern(1, MIB),
        "what is there is still served"
    );
    assert_eq!(map.stop().code, Some(0));
    let done = serve.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(done.stderr.contains("disk.img"), "the image is named: {}", done.stderr);
    assert!(
        done.stderr.contains("space") || done.stderr.contains("large"),
        "and the reason: {}",
        done.stderr
    );
}

#[test]
fn an_image_truncated_while_served() {
    let want = pattern(1, 8 * MIB);
    let pair = Pair::start(&want, "", &[], &[]);
    let mut client = pair.client();
    assert!(client.read(6 * MIB as u64, MIB).unwrap() == want[6 * MIB..7 * MIB]);
    fs::OpenOptions::new()
        .write(true)
        .open(&pair.image)
        .unwrap()
        .set_len(4 * MIB as u64)
        .unwrap();
    let beyond = client.read(6 * MIB as u64, MIB);
    assert!(matches!(beyond, Err(Error::Refused(EIO))), "{beyond:?}");
    assert!(
        client.read(0, 4 * MIB).unwrap() == want[..4 * MIB],
        "what is there is still served"
    );
    client.write(0, &pattern(2, 4096)).unwrap();
    client.flush().unwrap();
    assert!(fs::read(&pair.image).unwrap()[..4096] == pattern(2, 4096));
    assert_eq!(pair.map.stop().code, Some(0));
    let done = pair.serve.stop();
    assert_eq!(done.code, Some(0));
    assert!(done.stderr.contains("disk.img"), "the image is named: {}", done.stderr);
}

/// Blocks of a copy, and how many of them are flushed before somebody is killed.
const BLOCK: usize = 32 << 10;
const BEFORE: u64 = 20;
/// A minute of flushed writes does not fill it. Sparse: a flush must not wait for zeroes.
const LARGE: usize = 4 << 30;

/// Writes and flushes until it fails, telling `go` after a few blocks; how many were flushed, and how it failed.
fn write_until_it_fails(client: &mut Client, go: &mpsc::Sender<()>) -> (u64, nbd::Error) {
    let end = Instant::now() + TIMEOUT;
    let mut flushed = 0;
    loop {
        assert!(Instant::now() < end, "writes go on although the peer is dead");
        let offset = flushed * BLOCK as u64;
        match client
            .write(offset, &pattern(flushed + 1, BLOCK))
            .and_then(|()| client.flush())
        {
            Ok(()) => flushed += 1,
            Err(e) => return (flushed, e),
        }
        if flushed == BEFORE {
            go.send(()).unwrap();
        }
    }
}

fn assert_flushed(image: &Path, blocks: u64) {
    assert!(blocks >= BEFORE);
    let file = fs::File::open(image).unwrap();
    let mut bytes = vec![0; BLOCK];
    for n in 0..blocks {
        file.read_exact_at(&mut bytes, n * BLOCK as u64).unwrap();
        assert!(
            bytes == pattern(n + 1, BLOCK),
            "block {n} of {blocks} was flushed and is not there"
        );
    }
}

#[test]
fn the_server_is_killed_in_the_middle_of_a_copy() {
    let pair = Pair::sparse(LARGE, &["--max-reconnects", "0"]);
    let mut client = pair.client();
    let (serve, image) = (pair.serve, pair.image.clone());
    let (go, killer) = mpsc::channel();
    let writer = thread::spawn(move || write_until_it_fails(&mut client, &go));
    killer.recv().unwrap();
    serve.signal(Signal::SIGKILL);
    let (flushed, error) = writer.join().unwrap();
    assert!(
        matches!(error, Error::Refused(EIO | ESHUTDOWN) | Error::Connection(_)),
        "{error:?}"
    );
    assert_flushed(&image, flushed);
    // The mapping process says what happened, and ends.
    let done = pair.map.end();
    assert_error(&done, &["127."]);
    assert!(!pair.socket.exists());
}

#[test]
fn an_idle_mapping_notices_that_the_server_is_dead() {
    let pair = Pair::start(&[0; 4096], "", &[], &["--max-reconnects", "0"]);
    pair.serve.signal(Signal::SIGKILL);
    assert_error(&pair.map.end(), &[&pair.server.to_string()]);
}

#[test]
fn the_server_ends_orderly_under_a_mapping() {
    let pair = Pair::start(&[0; 4096], "", &[], &["--max-reconnects", "0"]);
    assert_eq!(pair.serve.stop().code, Some(0));
    assert_error(&pair.map.end(), &[&pair.server.to_string()]);
}

#[test]
fn the_client_is_killed_and_the_next_one_gets_the_device() {
    let mut pair = Pair::start_sparse(LARGE);
    let mut client = pair.client();
    let map_pid = nix::unistd::Pid::from_raw(pair.map.id() as i32);
    let (go, killer) = mpsc::channel();
    let killer = thread::spawn(move || {
        killer.recv().unwrap();
        nix::sys::signal::kill(map_pid, Signal::SIGKILL).unwrap();
    });
    let (flushed, error) = write_until_it_fails(&mut client, &go);
    killer.join().unwrap();
    assert!(matches!(error, Error::Connection(_)), "{error:?}");
    let gone = pair.serve.event("session_closed");
    assert_eq!(gone["session"], "test", "{gone}");
    assert_flushed(&pair.image, flushed);
    // The writer's right is free again, for the same session name.
    let (second, _) = map_when_free(fresh_address(), &pair.server.to_string(), &pair.socket, &[]);
    let mut client = pair.client();
    assert!(client.read(0, BLOCK).unwrap() == pattern(1, BLOCK));
    client.write(0, &pattern(99, BLOCK)).unwrap();
    assert_eq!(second.stop().code, Some(0));
    assert_eq!(pair.serve.stop().code, Some(0));
    let mut first = vec![0; BLOCK];
    fs::File::open(&pair.image)
        .unwrap()
        .read_exact_at(&mut first, 0)
        .unwrap();
    assert!(first == pattern(99, BLOCK), "an orderly end flushes");
}
