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

/// Addresses of a link mean nothing without their interface, which no GID names.
#[test]
fn link_local_addresses_work_like_others() {
    if ran_in_namespace("link_local_addresses_work_like_others") || !is_inside() {
        return;
    }
    let made = Command::new("ip")
        .args(["link", "add", "pair0", "type", "veth", "peer", "name", "pair1"])
        .output();
    if !made.is_ok_and(|o| o.status.success()) {
        // A kernel without veth.
        return;
    }
    let addresses: [IpAddr; 2] = ["fe80::11".parse().unwrap(), "fe80::22".parse().unwrap()];
    for (name, addr) in ["pair0", "pair1"].into_iter().zip(addresses) {
        ip(&["addr", "add", &format!("{addr}/64"), "dev", name, "nodad"]);
        ip(&["link", "set", name, "up"]);
    }
    let [a, b] = addresses.map(|addr| Side::new(Device::open(DeviceConfig::new(addr)).unwrap()));
    assert_eq!(a.device.gid_table()[0].addr, addresses[0]);
    let (qa, qb) = (a.qp(), b.qp());
    raise(&qa, a.addr(), &qb, b.addr(), [1, 1]);
    raise(&qb, b.addr(), &qa, a.addr(), [1, 1]);
    exercise(&Pair {
        a,
        b,
        qa,
        qb,
        ids: None,
    });
}
