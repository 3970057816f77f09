//! Devices of processes that share an address: numbers of their own, sockets that are open already, a registry of
//! listeners, and datagrams that others received.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::common::*;
use roce::{
    AddressVector, Device, DeviceConfig, OpenSockets, Payload, Psn, QKey, Qp, QpAttr, QpCaps, QpOptions, QpState,
    QpType, Qpn, QpnSlot, RxMeta, SendFlags, SendOp, SendRequest, SendWr, Services, Target, VerbsError,
};
use socket2::{Domain, Socket, Type};

fn with_slot(slot: u16) -> DeviceConfig {
    DeviceConfig {
        qpn_slot: Some(QpnSlot { bits: 6, slot }),
        ..config()
    }
}

#[test]
fn queue_pair_numbers_name_the_slot() {
    for slot in [0u16, 1, 63] {
        let side = Side::new(Device::open(with_slot(slot)).unwrap());
        for _ in 0..20 {
            let qpn = side.qp().qpn().value();
            assert_eq!(qpn >> 18, u32::from(slot), "{qpn:#x}");
            assert!(qpn > 1 && qpn < 0xff_ffff);
        }
    }
    assert!(matches!(Device::open(with_slot(64)), Err(VerbsError::Invalid(_))));
}

/// More than it has numbers, faster than any of these can rest.
#[test]
fn a_process_of_several_makes_and_ends_as_many_queue_pairs_as_it_likes() {
    let config = DeviceConfig {
        qpn_slot: Some(QpnSlot { bits: 11, slot: 77 }),
        ..config()
    };
    let side = Side::new(Device::open(config).unwrap());
    let kept = side.qp();
    for i in 0..20_000 {
        let qpn = side.qp().qpn();
        assert_eq!(qpn.value() >> 13, 77);
        assert_ne!(qpn, kept.qpn(), "{i}");
    }
}

#[derive(Debug, Default)]
struct Book(Mutex<Vec<(u64, Option<IpAddr>)>>);

impl Services for Book {
    fn claim(&self, service_id: u64, addr: Option<IpAddr>) -> Result<(), VerbsError> {
        let mut book = self.0.lock().unwrap();
        if book.contains(&(service_id, addr)) {
            return Err(VerbsError::Address("another process listens there".into()));
        }
        book.push((service_id, addr));
        Ok(())
    }

    fn release(&self, service_id: u64, addr: Option<IpAddr>) {
        self.0.lock().unwrap().retain(|e| *e != (service_id, addr));
    }
}

#[test]
fn listeners_are_claimed_and_released() {
    let book = Arc::new(Book::default());
    let side = Side::new(
        Device::open(DeviceConfig {
            services: Some(book.clone()),
            ..config()
        })
        .unwrap(),
    );
    let addr = SocketAddr::new(side.addr(), 7000);
    let entry = (0x0106_1b58, Some(side.addr()));
    let listener = side.device.listen(&side.channel, addr, 1).unwrap();
    assert_eq!(*book.0.lock().unwrap(), [entry]);
    assert!(side.device.listen(&side.channel, addr, 1).is_err());
    assert_eq!(
        *book.0.lock().unwrap(),
        [entry],
        "a refused one does not release the other's"
    );
    drop(listener);
    assert!(book.0.lock().unwrap().is_empty());
    // Another process has it.
    book.0.lock().unwrap().push(entry);
    assert!(matches!(
        side.device.listen(&side.channel, addr, 1),
        Err(VerbsError::Address(_))
    ));
}

/// A datagram queue pair in RTS.
fn ud(side: &Side) -> Qp {
    let options = QpOptions {
        qp_type: QpType::Ud,
        send_cq: Some(&side.cq),
        recv_cq: Some(&side.cq),
        srq: None,
        xrcd: None,
        caps: QpCaps::default(),
        signal_all: false,
    };
    let qp = side.device.create_qp_as(Some(&side.pd), &options).unwrap();
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let first = state == QpState::Init;
        let attr = QpAttr {
            state: Some(state),
            pkey_index: first.then_some(0),
            port: first.then_some(1),
            qkey: first.then_some(9),
            sq_psn: (state == QpState::Rts).then_some(Psn::new(1)),
            ..QpAttr::default()
        };
        qp.modify(&attr).unwrap();
    }
    qp
}

/// Devices that share all addresses of a host: each gets what is sent to the groups that it has joined, once.
#[test]
#[ignore = "makes a network namespace"]
fn groups_are_joined_by_each_process_for_itself() {
    if !is_in_namespace_of("sharing::groups_are_joined_by_each_process_for_itself") {
        return;
    }
    let all: IpAddr = Ipv4Addr::UNSPECIFIED.into();
    let local: IpAddr = Ipv4Addr::LOCALHOST.into();
    let sockets: Vec<_> = (0..3).map(|_| of_group(all)).collect();
    let sides: Vec<_> = sockets
        .into_iter()
        .map(|socket| {
            let sockets = OpenSockets {
                receivers: vec![Arc::new(OwnedFd::from(socket))],
                held: vec![],
            };
            Side::new(
                Device::open(DeviceConfig {
                    sockets: Some(sockets),
                    ..DeviceConfig::new(all)
                })
                .unwrap(),
            )
        })
        .collect();
    let group: IpAddr = Ipv4Addr::new(239, 7, 7, 7).into();
    let qps: Vec<_> = sides.iter().map(ud).collect();
    let memory: Vec<_> = sides.iter().map(|s| s.mr(4096)).collect();
    for i in 0..3 {
        recv(&qps[i], 1, &[memory[i].sge(0, 2048)]);
        recv(&qps[i], 2, &[memory[i].sge(2048, 2048)]);
    }
    // The third is no member.
    for qp in &qps[..2] {
        qp.attach_mcast(group, local).unwrap();
    }
    let there = sides[2]
        .device
        .create_ah(&sides[2].pd, &AddressVector::new(local, group))
        .unwrap();
    let request = SendRequest {
        wr: SendWr {
            wr_id: 3,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Inline(b"members"),
        },
        target: Target::Datagram(there.to(Qpn::MULTICAST, QKey(9))),
    };
    qps[2].post_requests(&[request]).unwrap();
    assert_eq!(sides[2].good(1)[0].wr_id, 3);
    for i in 0..2 {
        assert_eq!(sides[i].good(1)[0].wr_id, 1);
        assert_eq!(contents(&memory[i], 40, 7), b"members");
    }
    std::thread::sleep(Duration::from_millis(200));
    for side in &sides {
        let mut more = vec![];
        side.cq.poll(&mut more, 1).unwrap();
        assert!(more.is_empty(), "{more:?}");
    }
}

fn of_group(addr: IpAddr) -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&SocketAddr::new(addr, 4791).into()).unwrap();
    socket
}

/// Two sockets have the address; the kernel gives each about half of the flows. The device has one, the test the other,
/// and hands over what comes there.
#[test]
fn datagrams_that_others_received_are_as_good() {
    let addr = address();
    let (ours, theirs) = (of_group(addr), of_group(addr));
    let sockets = OpenSockets {
        receivers: vec![Arc::new(OwnedFd::from(theirs))],
        held: vec![],
    };
    let device = Device::open(DeviceConfig {
        sockets: Some(sockets),
        ..DeviceConfig::new(addr)
    })
    .unwrap();
    let relay = UdpSocket::from(ours);
    relay.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let forwarding = std::thread::spawn({
        let (device, stop) = (device.clone(), stop.clone());
        move || {
            let (mut buffer, mut count) = (vec![0; 65_536], 0);
            while !stop.load(Ordering::Relaxed) {
                if let Ok((len, from)) = relay.recv_from(&mut buffer) {
                    count += 1;
                    // The device may be closing.
                    let _ = device.inject(&buffer[..len], &RxMeta::new(addr, from));
                }
            }
            count
        }
    });
    // Several peers, so that the kernel's choice can't be the same for all of them.
    let b = Side::new(device);
    let at = SocketAddr::new(addr, 7000);
    let listener = b.device.listen(&b.channel, at, 8).unwrap();
    let (mut regions, mut pairs) = (vec![], vec![]);
    for _ in 0..12 {
        let a = Side::new(open());
        let (qa, qb) = (a.qp(), b.qp());
        let ids = connect(&a, &b, &qa, &qb, at);
        let mr = b.mr(4096);
        post(
            &qa,
            1,
            SendOp::Write(remote(&mr, 0)),
            Payload::Inline(b"by either socket"),
        );
        a.good(1);
        assert_eq!(contents(&mr, 0, 16), b"by either socket");
        regions.push(mr);
        pairs.push((a, qa, qb, ids));
    }
    drop((listener, pairs));
    stop.store(true, Ordering::Relaxed);
    let count = forwarding.join().unwrap();
    assert!(count > 0, "nothing came by the other socket");
    let rx = b.device.stats().port;
    assert!(rx.rx_packets > count, "{rx:?}");
    b.device.close();
    let meta = RxMeta::new(addr, SocketAddr::new(addr, 0xc000));
    assert!(matches!(b.device.inject(&[0; 40], &meta), Err(VerbsError::Closed)));
}
