//! IPv6: in a network namespace of its own, as loopback has one IPv6 address only.

use ferroce_tests::{device::image, nbd::Client, network::Namespace, pattern};

#[test]
#[ignore = "needs the right to make a network namespace"]
fn a_device_over_ipv6() {
    let namespace = Namespace::new("ip addr add fd00::1/128 dev lo && ip addr add fd00::2/128 dev lo");
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
