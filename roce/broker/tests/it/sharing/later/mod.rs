//! Addresses that loops get while they run.

use std::{net::SocketAddr, sync::Arc};

use roce::{
    Arrival, LocalDevice, Placement, RejectReason,
    verbs::provider::{CmKind, Event},
};

use super::*;

struct First;

impl Placement for First {
    fn place(&self, _: &Arrival<'_>) -> usize {
        0
    }
}

/// Turns the loops until a connection request has come to the first, which refuses it.
fn refuse_one(loops: &mut [LocalDevice]) {
    let deadline = Instant::now() + TIMEOUT;
    let mut refused = false;
    while !refused {
        assert!(Instant::now() < deadline, "no request");
        for device in loops.iter_mut() {
            device.receive(roce::now(), 64);
            device.run_timers(roce::now(), false);
            while let Some(event) = device.provider().poll_event() {
                if let Event::Cm {
                    id,
                    kind: CmKind::ConnectRequest { .. },
                } = event
                {
                    refused = true;
                    let rejected = device.provider().cm_reject(id, RejectReason::CONSUMER, b"");
                    rejected.unwrap();
                }
            }
            device.flush(roce::now());
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_address_that_comes_later_goes_with_the_loops_to_the_next_broker() {
    const FIRST: [u8; 4] = [127, 45, 61, 1];
    const LATER: [u8; 4] = [127, 45, 61, 2];
    for count in [1, 2] {
        let place = Place::new();
        let config = DeviceConfig::new(FIRST.into());
        let opened = LocalDevice::open_shared(&[config], count, Arc::new(First), &place.how());
        let mut loops = opened.unwrap();
        let opener = loops[0].opener();
        let opened = thread::spawn(move || opener.open(LATER.into()));
        for (device, new) in loops.iter_mut().zip(opened.join().unwrap().unwrap()) {
            assert_eq!(device.attach(new).0, 1);
        }
        let later = SocketAddr::new(LATER.into(), 7000);
        loops[0].provider().cm_listen(later, 4).unwrap();
        let text = later.ip().to_string();
        let mut client = place.start(&text, false);
        client.expect("open");
        for round in 0..2 {
            client.say(&format!("connect {text} 7000"));
            refuse_one(&mut loops);
            assert!(client.expect("event").starts_with("Rejected"), "{round}");
            let old = place.statistics();
            kill(old.pid);
            place.until("another broker has all", |s| {
                s.pid != old.pid && s.processes.len() == count + 1
            });
        }
        // Nobody else gets the port while they have it, and then somebody does.
        let taken = std::net::UdpSocket::bind((later.ip(), 4791));
        assert_eq!(taken.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
        client.quit();
        drop(loops);
        place.until_gone();
        std::net::UdpSocket::bind((later.ip(), 4791)).unwrap();
    }
}

#[test]
fn an_address_that_can_not_be_opened_may_be_tried_again() {
    let place = Place::new();
    let config = DeviceConfig::new([127, 45, 61, 3].into());
    let mut loops = LocalDevice::open_shared(&[config], 2, Arc::new(First), &place.how()).unwrap();
    let opener = loops[0].opener();
    let later: IpAddr = [127, 45, 61, 4].into();
    let holder = std::net::UdpSocket::bind((later, 4791)).unwrap();
    let refused = opener.open(later).unwrap_err().to_string();
    assert!(
        refused.contains("127.45.61.4") && refused.contains("taken"),
        "{refused}"
    );
    assert!(!opener.has(later));
    drop(holder);
    let opened = opener.open(later).unwrap();
    assert!(opener.open(later).is_err(), "it is open");
    for (device, new) in loops.iter_mut().zip(opened) {
        device.attach(new);
    }
    drop(loops);
    assert!(opener.open([127, 45, 61, 5].into()).is_err(), "there is no loop");
    place.until_gone();
}
