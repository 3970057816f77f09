//! Opening, closing and dropping: clear errors, nothing left behind.

mod common;

use std::{net::UdpSocket, time::Duration};

use common::*;
use roce::{ConnParams, Device, DeviceConfig, Mtu, Payload, QpInit, RemoteAddr, SendOp, VerbsError};

#[test]
fn a_taken_port_names_its_holder() {
    let config = config();
    let _holder = UdpSocket::bind((config.addr, 4791)).unwrap();
    let text = Device::open(config.clone()).unwrap_err().to_string();
    assert!(
        text.contains("4791") && text.contains(&config.addr.to_string()) && text.contains("open_shared"),
        "{text}"
    );
    assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
}

#[test]
fn an_address_of_nobody_here_is_refused() {
    let text = Device::open(DeviceConfig::new([192, 0, 2, 77].into()))
        .unwrap_err()
        .to_string();
    assert!(text.contains("192.0.2.77 is not an address of this host"), "{text}");
}

#[test]
fn a_device_can_be_opened_again() {
    let config = config();
    for _ in 0..3 {
        drop(Device::open(config.clone()).unwrap());
    }
}

#[test]
fn the_default_path_mtu_is_what_loopback_carries() {
    assert_eq!(open().mtu(), Mtu::B4096);
}

#[test]
fn objects_of_two_devices_do_not_mix() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let init = QpInit {
        send_cq: &b.cq,
        recv_cq: &b.cq,
        caps: roce::QpCaps::default(),
        signal_all: false,
    };
    assert!(a.device.create_qp(&a.pd, &init).is_err());
    assert!(a.device.alloc_mr(&b.pd, 64, ALL).is_err());
    let (qb, addr) = (b.qp(), std::net::SocketAddr::new(b.addr(), 1));
    assert!(
        a.device
            .connect(&a.channel, None, addr, &qb, ConnParams::default())
            .is_err()
    );
    assert!(a.device.listen(&b.channel, addr, 1).is_err());
}

#[test]
fn closing_wakes_whoever_waits() {
    let a = Side::new(open());
    let channel = a.device.create_channel().unwrap();
    let device = a.device.clone();
    std::thread::scope(|scope| {
        let one = scope.spawn(|| channel.wait(None));
        let two = scope.spawn(|| a.channel.wait(None));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!device.is_closed());
        device.close();
        assert!(device.is_closed());
        assert!(matches!(one.join().unwrap(), Err(VerbsError::Closed)));
        assert!(matches!(two.join().unwrap(), Err(VerbsError::Closed)));
    });
    assert!(matches!(a.cq.poll(&mut vec![], 1), Err(VerbsError::Closed)));
    let init = QpInit {
        send_cq: &a.cq,
        recv_cq: &a.cq,
        caps: roce::QpCaps::default(),
        signal_all: false,
    };
    assert!(matches!(a.device.create_qp(&a.pd, &init), Err(VerbsError::Closed)));
    assert!(a.device.async_event().is_err());
}

#[test]
fn handles_may_be_dropped_in_any_order() {
    let p = pair();
    let mb = p.b.mr(64);
    let Pair { a, b, qa, qb, ids } = p;
    drop(b);
    drop(a.device);
    drop(ids);
    drop(qb);
    drop(mb);
    drop(a.cq);
    drop(qa);
    drop(a.pd);
    drop(a.channel);
}

#[test]
fn sides_may_die_while_data_flows() {
    for _ in 0..5 {
        let p = pair();
        let (ma, mb) = (p.a.mr(1 << 20), p.b.mr(1 << 20));
        let target = RemoteAddr {
            addr: mb.addr(),
            rkey: mb.rkey(),
        };
        for i in 0..16 {
            post(&p.qa, i, SendOp::Write(target), Payload::Sges(&[ma.sge(0, 1 << 20)]));
        }
        let Pair { a, b, qa, qb, ids } = p;
        drop(mb);
        drop((b, qb));
        drop((a, qa, ids));
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident_pages() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Everything that can be made on two connected devices.
fn cycle(a: &Side, b: &Side, addr: std::net::SocketAddr) {
    let channel = b.device.create_channel().unwrap();
    let cq = b.device.create_cq(16, Some(&channel), 1).unwrap();
    let (ma, mb) = (a.mr(8192), b.mr(8192));
    let revocable = b.device.alloc_revocable(&b.pd).unwrap();
    let window = b.device.alloc_mw(&b.pd).unwrap();
    let (qa, qb) = (a.qp(), b.qp());
    let (ia, ib) = connect(a, b, &qa, &qb, addr);
    let target = RemoteAddr {
        addr: mb.addr(),
        rkey: mb.rkey(),
    };
    post(&qa, 1, SendOp::Write(target), Payload::Sges(&[ma.sge(0, 8192)]));
    a.good(1);
    drop((ia, ib, qa, qb, cq, channel, revocable, window));
    // What the other side's drop made: events of connections whose handles are gone.
    while b.channel.wait(Some(Duration::ZERO)).unwrap().is_some() {}
    while a.channel.wait(Some(Duration::ZERO)).unwrap().is_some() {}
}

#[test]
fn a_thousand_cycles_leave_nothing_behind() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let addr = std::net::SocketAddr::new(b.addr(), 7000);
    let _listener = b.device.listen(&b.channel, addr, 64).unwrap();
    for _ in 0..100 {
        cycle(&a, &b, addr);
    }
    let (files, pages) = (open_files(), resident_pages());
    for _ in 0..1000 {
        cycle(&a, &b, addr);
    }
    // Other tests of this binary open devices at the same time: a few files may differ, not hundreds.
    assert!(open_files() < files + 200, "{files} then {}", open_files());
    let grown = resident_pages().saturating_sub(pages) * 4096;
    assert!(grown < 64 << 20, "{grown} bytes more after a thousand cycles");
}

/// One small packet makes a server set aside a session's chunks: that must not cost it the memory at once.
#[test]
fn memory_that_nobody_has_touched_is_not_occupied() {
    const BYTES: usize = 256 << 20;
    let device = open();
    let pd = device.alloc_pd().unwrap();
    let before = resident_pages();
    let mr = device.alloc_mr(&pd, BYTES, ALL).unwrap();
    assert_eq!(mr.addr() % 4096, 0);
    mr.write(BYTES - 3, b"end").unwrap();
    let mut seen = [1; 8];
    mr.read(BYTES - 8, &mut seen).unwrap();
    assert_eq!(&seen, b"\0\0\0\0\0end");
    let grown = resident_pages().saturating_sub(before) * 4096;
    assert!(grown < BYTES / 4, "{grown} bytes");
}

#[test]
fn a_capture_holds_what_was_sent_with_good_icrcs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("device.pcap");
    let captured = DeviceConfig {
        pcap: Some(file.clone()),
        ..config()
    };
    let p = connected(captured, config());
    let (ma, mb) = (p.a.mr(20_000), p.b.mr(20_000));
    let target = RemoteAddr {
        addr: mb.addr(),
        rkey: mb.rkey(),
    };
    post(&p.qa, 1, SendOp::Write(target), Payload::Sges(&[ma.sge(0, 20_000)]));
    p.a.good(1);
    // All of the connection, five packets and what acknowledged them: as it would be if the process were killed now.
    let report = roce_pcap::check_file(&file).unwrap();
    assert!(report.complete && report.icrc_ok > 5 + 3, "{report:?}");
    drop((p, ma, mb));
    let report = roce_pcap::check_file(&file).unwrap();
    assert!(report.icrc_ok >= 5 + 3, "{report:?}");
    assert_eq!(report.icrc_bad, 0, "{report:?}");
}
