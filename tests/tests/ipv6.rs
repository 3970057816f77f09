//! IPv6: in a network namespace of its own, as loopback has one IPv6 address only.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use ferroce_tests::{device::image, ferroce, nbd::Client, pattern, process::Running};

/// A namespace with two IPv6 addresses; it ends with its holder.
struct Namespace(Child);

impl Namespace {
    fn new() -> Self {
        let script = "ip link set lo up && ip addr add fd00::1/128 dev lo && ip addr add fd00::2/128 dev lo && echo ready && \
                      exec sleep 600";
        let mut holder = Command::new("unshare")
            .args(["-n", "sh", "-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        let mut line = String::new();
        let out = holder.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("readable");
        assert_eq!(
            line, "ready\n",
            "no network namespace: is this root, and is iproute2 there?"
        );
        Self(holder)
    }

    fn run(&self, args: &[&str]) -> Running {
        let mut command = Command::new("nsenter");
        command
            .arg("-n")
            .arg("-t")
            .arg(self.0.id().to_string())
            .arg(ferroce())
            .args(args);
        Running::start_command(command, format!("{args:?}"))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs the right to make a network namespace"]
fn a_device_over_ipv6() {
    let namespace = Namespace::new();
    let dir = tempfile::tempdir().unwrap();
    let want = pattern(1, 8 << 20);
    let export = format!("disk={}", image(dir.path(), "disk.img", &want).display());
    let mut serve = namespace.run(&["serve", "--json", "--listen", "fd00::1", "--export", &export]);
    serve.event("listening");
    let socket = dir.path().join("nbd.sock");
    let nbd = socket.to_str().unwrap();
    let path = ["--path", "ip:fd00::2,ip:fd00::1"];
    let args = ["map", "--json", "--session", "s", "--device", "disk", "--nbd", nbd];
    let mut map = namespace.run(&[&args[..], &path[..]].concat());
    map.event("mapped");
    let mut client = Client::connect(&socket).unwrap();
    assert!(client.read(0, want.len()).unwrap() == want);
    client.write(4096, &pattern(2, 1 << 20)).unwrap();
    client.flush().unwrap();
    assert!(client.read(4096, 1 << 20).unwrap() == pattern(2, 1 << 20));
    let done = map.stop();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let summary = done.json().pop().unwrap();
    assert_eq!(summary["icrc_errors"], 0);
    assert_eq!(serve.stop().code, Some(0));
}
