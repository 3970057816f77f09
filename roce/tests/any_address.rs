//! A device on every address of the host. No other device can be open beside it, so it gets a network namespace of its
//! own where one can be made.

mod common;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use common::*;
use roce::{Device, DeviceConfig};

#[test]
fn both_ip_versions_and_the_right_local_address() {
    if !ran_in_namespace("both_ip_versions_and_the_right_local_address") {
        let _only = ferroce_loopback::only_one();
        exercise_all_addresses();
    }
}

/// Exercises a device on all addresses, whose port no other process in this network namespace has.
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
