//! What processes that share an address need: numbers of their own, sockets that are open already, somebody who is told of
//! listeners, and datagrams that others received.

mod common;

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::*;
use roce::{
    Device, DeviceConfig, OpenSockets, Payload, Provider, QpnSlot, QueuePair, RxMeta, SendOp, Services, VerbsError,
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
