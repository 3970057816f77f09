//! Floods of strangers at the broker that processes share an address by.

use std::{
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use ferroce_hostile::{
    aim::Aim,
    attack::{Control, Victim, flood},
    forge::{Forger, Identifications, Kind},
    origin::Origin,
};
use ferroce_tests::{ferroce, fresh_address, process::TIMEOUT};
use roce::{Device, DeviceConfig, JoinConfig, QpCaps, QpInit};

/// Bits of a queue pair number, and of a communication ID, that say which process it belongs to, as long as few share the
/// numbers.
const PLACE_BITS: u32 = 7;
/// Packets that once filled the table of one process.
const REPLIES: u64 = 17_000;

/// Returns the place that the device's numbers belong to.
fn place(device: &Device) -> u32 {
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(4, None, 0).unwrap();
    let init = QpInit {
        send_cq: &cq,
        recv_cq: &cq,
        caps: QpCaps::default(),
        signal_all: true,
    };
    device.create_qp(&pd, &init).unwrap().qpn().value() >> (24 - PLACE_BITS)
}

#[test]
fn replies_that_nobody_asked_for_end_no_connections() {
    let dir = tempfile::tempdir().unwrap();
    let how = JoinConfig {
        dir: dir.path().join("run"),
        program: Some(ferroce().to_owned()),
        name: "test".into(),
    };
    let shared: IpAddr = fresh_address().into();
    let open = || Device::open_shared(DeviceConfig::new(shared), &how).unwrap();
    let (leaves, stays) = (open(), open());
    let from: IpAddr = fresh_address().into();
    let mut victim = Victim::at(Aim::LOOPBACK, from).unwrap();
    let origins = [Origin::bind(Aim::LOOPBACK, from).unwrap()];
    let mut forger = Forger::new(5, Identifications::Fixed(0));
    forger.place = Some((place(&leaves), PLACE_BITS));
    let control = Control::default();
    flood(
        &[shared],
        &origins,
        &[Kind::Rep],
        &mut forger,
        8000.0,
        Some(REPLIES),
        &control,
    )
    .unwrap();
    thread::sleep(Duration::from_millis(500));
    let before = victim.look().unwrap().clone();
    assert!(before.packets <= REPLIES, "{before:?}");
    drop(leaves);
    // Six times each, the last after some seconds: until it has been quiet for longer than the pause between two.
    let (started, mut last, mut seen) = (Instant::now(), Instant::now(), before.clone());
    while last.elapsed() < Duration::from_secs(6) && started.elapsed() < TIMEOUT {
        let now = victim.look().unwrap();
        if *now != seen {
            (seen, last) = (now.clone(), Instant::now());
        }
        thread::sleep(Duration::from_millis(5));
    }
    let ended = seen.messages.get("dreq").copied().unwrap_or(0);
    println!("{REPLIES} REPs: before the process left {before:?}, afterwards {ended} DREQs");
    // A connection that nobody has is not ended.
    assert!(ended <= 6, "{ended} DREQs for connections that never were");
    drop(stays);
}
