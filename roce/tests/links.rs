//! Interfaces and addresses that come and go, in a network namespace of the test's own.

mod common;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    process::Command,
    time::{Duration, Instant},
};

use common::*;
use roce::{AsyncEvent, Device, DeviceConfig};

fn ip(args: &[&str]) {
    let done = Command::new("ip").args(args).output().unwrap();
    assert!(
        done.status.success(),
        "ip {args:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

/// Waits for an event of this kind; others may come before it.
fn expect(device: &Device, wanted: AsyncEvent) {
    let until = Instant::now() + PATIENCE;
    let mut seen = vec![];
    while !seen.contains(&wanted) {
        assert!(Instant::now() < until, "no {wanted:?} but {seen:?}");
        match device.async_event().unwrap() {
            Some(event) => seen.push(event),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn the_port_follows_its_interface_and_the_gids_its_addresses() {
    if ran_in_namespace("the_port_follows_its_interface_and_the_gids_its_addresses") || !is_inside() {
        return;
    }
    let device = Device::open(DeviceConfig::new(Ipv6Addr::UNSPECIFIED.into())).unwrap();
    let (new, local): (IpAddr, IpAddr) = (Ipv4Addr::new(10, 9, 8, 7).into(), Ipv4Addr::LOCALHOST.into());
    assert!(device.gid_index(local).is_some() && device.gid_index(new).is_none());
    ip(&["addr", "add", "10.9.8.7/24", "dev", "lo"]);
    expect(&device, AsyncEvent::GidChange);
    let index = device.gid_index(new).unwrap();
    ip(&["addr", "del", "10.9.8.7/24", "dev", "lo"]);
    expect(&device, AsyncEvent::GidChange);
    assert_eq!(device.query_gid(index).unwrap(), [0; 16]);

    assert!(device.query_port().active);
    ip(&["link", "set", "lo", "down"]);
    expect(&device, AsyncEvent::PortError);
    let port = device.query_port();
    assert!(!port.active && port.phys_state == 3, "{port:?}");
    let downed = device
        .hw_counters()
        .iter()
        .find(|(n, _)| *n == "link_downed")
        .unwrap()
        .1;
    assert_eq!(downed, 1);
    ip(&["link", "set", "lo", "up"]);
    expect(&device, AsyncEvent::PortActive);
    assert!(device.query_port().active);
}
