//! Interfaces and addresses that come and go, in a network namespace of the test's own.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    process::Command,
    time::{Duration, Instant},
};

use crate::common::*;
use roce::{AddressVector, AsyncEvent, Device, DeviceConfig, LinkState, Mtu, QpAttr, QpState, QpType, VerbsError};

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
    let until = Instant::now() + TIMEOUT;
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
#[ignore = "makes a network namespace"]
fn events_follow_interfaces_and_addresses() {
    if !is_in_namespace_of("links::events_follow_interfaces_and_addresses") {
        return;
    }
    let device = Device::open(DeviceConfig::new(Ipv6Addr::UNSPECIFIED.into())).unwrap();
    // A label is no interface.
    ip(&["addr", "add", "10.9.8.7/24", "dev", "lo", "label", "lo:one"]);
    expect(&device, AsyncEvent::GidChange);
    let all = roce::iface::interfaces().unwrap();
    let names: Vec<&str> = all.iter().map(|i| i.name.as_str()).collect();
    assert_eq!((names, all[0].index), (vec!["lo"], 1));
    assert!(all[0].addresses.contains(&Ipv4Addr::new(10, 9, 8, 7).into()));
    ip(&["addr", "del", "10.9.8.7/24", "dev", "lo"]);
    expect(&device, AsyncEvent::GidChange);

    assert!(LinkState::of(None).active);
    ip(&["link", "set", "lo", "down"]);
    expect(&device, AsyncEvent::PortError);
    let link = LinkState::of(None);
    assert!(!link.active && link.phys_state == 3, "{link:?}");
    let downed = device
        .hw_counters()
        .iter()
        .find(|(n, _)| *n == "link_downed")
        .unwrap()
        .1;
    assert_eq!(downed, 1);
    ip(&["link", "set", "lo", "up"]);
    expect(&device, AsyncEvent::PortActive);
    assert!(LinkState::of(None).active);
}

/// Addresses of a link mean nothing without their interface, which no GID names.
#[test]
#[ignore = "makes a network namespace"]
fn link_local_addresses_work_like_others() {
    if !is_in_namespace_of("links::link_local_addresses_work_like_others") {
        return;
    }
    let made = Command::new("ip")
        .args(["link", "add", "pair0", "type", "veth", "peer", "name", "pair1"])
        .output();
    assert!(made.is_ok_and(|o| o.status.success()), "a pair of veth interfaces");
    let addresses: [IpAddr; 2] = ["fe80::11".parse().unwrap(), "fe80::22".parse().unwrap()];
    for (name, addr) in ["pair0", "pair1"].into_iter().zip(addresses) {
        ip(&["addr", "add", &format!("{addr}/64"), "dev", name, "nodad"]);
        ip(&["link", "set", name, "up"]);
    }
    let [a, b] = addresses.map(|addr| Side::new(Device::open(DeviceConfig::new(addr)).unwrap()));
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

/// Brings a new queue pair to RTS on a path from an address to itself.
fn reach(side: &Side, addr: IpAddr, mtu: Mtu) -> Result<(), VerbsError> {
    let qp = side.qp();
    let way = QpAttr::to_rts(AddressVector::new(addr, addr), mtu, qp.qpn());
    let states = [QpState::Rtr, QpState::Rts];
    states
        .into_iter()
        .try_for_each(|to| qp.modify(&way.step(QpType::Rc, to)))
}

#[test]
#[ignore = "makes a network namespace"]
fn a_path_carries_what_the_interface_of_its_own_address_does() {
    if !is_in_namespace_of("links::a_path_carries_what_the_interface_of_its_own_address_does") {
        return;
    }
    let made = Command::new("ip")
        .args([
            "link", "add", "pair0", "mtu", "1500", "type", "veth", "peer", "name", "pair1",
        ])
        .output();
    assert!(made.is_ok_and(|o| o.status.success()), "a pair of veth interfaces");
    let (wire, lo): (IpAddr, IpAddr) = (Ipv4Addr::new(10, 9, 7, 1).into(), Ipv4Addr::LOCALHOST.into());
    ip(&["addr", "add", "10.9.7.1/24", "dev", "pair0"]);
    for name in ["pair0", "pair1"] {
        ip(&["link", "set", name, "up"]);
    }
    let side = Side::new(Device::open(DeviceConfig::new(Ipv6Addr::UNSPECIFIED.into())).unwrap());
    let from = |ip| side.device.mtu_from(ip).unwrap();
    assert_eq!((from(lo), from(wire)), (Mtu::B4096, Mtu::B1024));
    reach(&side, lo, Mtu::B4096).unwrap();
    reach(&side, Ipv4Addr::new(127, 8, 0, 1).into(), Mtu::B4096).unwrap();
    reach(&side, wire, Mtu::B1024).unwrap();
    assert!(reach(&side, wire, Mtu::B2048).is_err());

    ip(&["link", "set", "pair0", "mtu", "9000"]);
    let until = Instant::now() + TIMEOUT;
    while from(wire) != Mtu::B4096 {
        assert!(Instant::now() < until, "still {:?}", from(wire));
        std::thread::sleep(Duration::from_millis(5));
    }
    reach(&side, wire, Mtu::B4096).unwrap();

    // Others run; this one's failure counts.
    ip(&["link", "set", "pair0", "down"]);
    let downed = || {
        side.device
            .hw_counters()
            .iter()
            .find(|(n, _)| *n == "link_downed")
            .unwrap()
            .1
    };
    while downed() == 0 {
        assert!(Instant::now() < until, "no link went down");
        std::thread::sleep(Duration::from_millis(5));
    }
}
