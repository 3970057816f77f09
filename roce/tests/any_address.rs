//! A device on every address of the host. No other device can be open beside it, so it gets a network namespace of its
//! own where one can be made.

mod common;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::Command,
};

use common::*;
use roce::{Device, DeviceConfig, Provider};

/// Set where this program runs again, inside of the namespace.
const INSIDE: &str = "FERROCE_TEST_INSIDE_NAMESPACE";

#[test]
fn both_ip_versions_and_the_right_local_address() {
    let unshare = |args: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net"]).args(args);
        command
    };
    let possible = unshare(&["ip", "link", "set", "lo", "up"]).output();
    if std::env::var_os(INSIDE).is_some() || !possible.is_ok_and(|o| o.status.success()) {
        let _only = ferroce_loopback::only_one();
        return exercise_all_addresses();
    }
    let program = std::env::current_exe().unwrap();
    let again = unshare(&[
        "sh",
        "-c",
        "ip link set lo up && exec \"$0\" --exact \"$1\" --nocapture",
    ])
    .arg(program)
    .arg("both_ip_versions_and_the_right_local_address")
    .env(INSIDE, "1")
    .output()
    .unwrap();
    let text = String::from_utf8_lossy(&again.stdout);
    assert!(
        again.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&again.stderr)
    );
    assert!(text.contains("1 passed"), "{text}");
}

/// What the test is about; the port is this network namespace's alone.
fn exercise_all_addresses() {
    let device = Device::open(DeviceConfig::new(Ipv6Addr::UNSPECIFIED.into())).unwrap();
    let addresses: [IpAddr; 3] = [
        Ipv4Addr::LOCALHOST.into(),
        Ipv4Addr::new(127, 0, 0, 5).into(),
        Ipv6Addr::LOCALHOST.into(),
    ];
    for (i, ip) in addresses.into_iter().enumerate() {
        let (a, b) = (Side::new(device.clone()), Side::new(device.clone()));
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 7000 + i as u16);
        let _listener = b.device.listen(&b.channel, any, 8).unwrap();
        let (qa, qb) = (a.qp(), b.qp());
        let (ia, ib) = connect(&a, &b, &qa, &qb, SocketAddr::new(ip, any.port()));
        exercise(&Pair {
            a,
            b,
            qa,
            qb,
            ids: Some([ia, ib]),
        });
    }
    assert_eq!(device.stats().path.tx_errors, 0);
}
