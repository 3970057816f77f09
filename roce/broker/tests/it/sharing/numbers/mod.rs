//! Queue pairs of a member: as many at once as the device says.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr},
};

use roce::{Cq, Device, DeviceConfig, QpCaps, QpInit};

use super::Place;

/// Addresses of these tests' own.
const ADDR: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 45, 17, 1));
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 45, 17, 2));

fn init(cq: &Cq) -> QpInit<'_> {
    QpInit {
        send_cq: cq,
        recv_cq: cq,
        caps: QpCaps::default(),
        signal_all: false,
    }
}

#[test]
fn a_process_has_sixty_thousand_queue_pairs_at_once() {
    let place = Place::new();
    let device = Device::open_shared(DeviceConfig::new(ADDR), &place.how()).unwrap();
    assert!(device.limits().max_qp >= 60_000);
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16, None, 0).unwrap());
    let qps: Vec<_> = (0..60_000)
        .map(|i| device.create_qp(&pd, &init(&cq)).unwrap_or_else(|e| panic!("{i}: {e}")))
        .collect();
    let numbers: HashSet<u32> = qps.iter().map(|qp| qp.qpn().value()).collect();
    assert_eq!(numbers.len(), qps.len());
    let own = place.statistics().processes[0].place.numbers().qpns();
    assert!(numbers.iter().all(|n| (own.first..=own.last).contains(n)));
}

#[test]
fn processes_that_have_come_and_gone_leave_as_many_numbers_to_the_next_one() {
    let place = Place::new();
    let open = || Device::open_shared(DeviceConfig::new(OTHER), &place.how()).unwrap();
    let most = open().limits().max_qp;
    // They are at most 127 at a time, and their numbers rest for a minute.
    for n in 0..140 {
        let device = open();
        assert_eq!(device.limits().max_qp, most, "after {n} others");
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16, None, 0).unwrap());
        device.create_qp(&pd, &init(&cq)).unwrap();
    }
    let all: Vec<_> = (0..60).map(|_| open()).collect();
    assert!(
        all.iter().all(|device| device.limits().max_qp == most),
        "many at a time"
    );
    let (last, mut numbers) = (&all[59], HashSet::new());
    let (pd, cq) = (last.alloc_pd().unwrap(), last.create_cq(16, None, 0).unwrap());
    let qps: Vec<_> = (0..10_000).map(|_| last.create_qp(&pd, &init(&cq)).unwrap()).collect();
    assert!(qps.iter().all(|qp| numbers.insert(qp.qpn())));
}
