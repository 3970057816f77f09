//! The UDP datapath against itself over loopback: what leaves in one train arrives with the Identifications that it was
//! sealed with, whatever the kernel does in between.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use roce_icrc::Flow;
use roce_net::{DEFAULT_HOP_LIMIT, Datapath, Train, UdpConfig, UdpDatapath, packets};

const PORT: u16 = 4791;

fn address() -> IpAddr {
    ferroce_loopback::address().into()
}

fn open(addr: IpAddr, gso: bool, gro: bool) -> UdpDatapath {
    UdpDatapath::open(&UdpConfig {
        addr,
        gso,
        gro,
        ..UdpConfig::default()
    })
    .unwrap()
}

/// Packets of one length with distinct bytes, sealed with Identifications from 0 on.
fn sealed(flow: &Flow, count: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![];
    for i in 0..count {
        let mut packet: Vec<u8> = (0..len).map(|j| (i * 31 + j) as u8).collect();
        flow.seal(i as u16, &mut packet);
        bytes.extend(packet);
    }
    bytes
}

struct Arrived {
    from: SocketAddr,
    to: IpAddr,
    traffic_class: u8,
    packet: Vec<u8>,
}

/// Receives until `count` packets have come or were dropped.
fn receive(path: &mut UdpDatapath, count: usize) -> Vec<Arrived> {
    let mut out = vec![];
    let until = Instant::now() + Duration::from_secs(60);
    while out.len() as u64 + path.counters().rx_buffer_drops < count as u64 {
        assert!(Instant::now() < until, "{} of {count} came", out.len());
        path.receive(1000, &mut |meta, bytes| {
            out.extend(packets(meta, bytes).map(|packet| Arrived {
                from: meta.remote,
                to: meta.local,
                traffic_class: meta.tos,
                packet: packet.to_vec(),
            }));
        });
    }
    out
}

fn exchange(a: IpAddr, b: IpAddr, gso: bool, gro: bool) {
    let (mut tx, mut rx) = (open(a, gso, true), open(b, true, gro));
    for src_port in tx.capabilities().src_ports.iter().copied().chain([PORT]) {
        let remote = SocketAddr::new(b, PORT);
        let flow = Flow::try_from((SocketAddr::new(a, src_port), remote)).unwrap();
        let count = if gso { 15 } else { 1 };
        let bytes = sealed(&flow, count, 4112);
        let train = Train {
            local: a,
            remote,
            src_port,
            tos: 0x20,
            ttl: DEFAULT_HOP_LIMIT - 1,
            segment_len: 4112,
            bytes: &bytes,
        };
        let sent = tx.send(&mut [train, train].into_iter());
        assert_eq!((sent.trains, sent.blocked), (2, false));
        let arrived = receive(&mut rx, 2 * count);
        assert_eq!(arrived.len(), 2 * count, "from port {src_port}");
        for (i, p) in arrived.iter().enumerate() {
            assert_eq!((p.from, p.to, p.traffic_class), (SocketAddr::new(a, src_port), b, 0x20));
            assert!(flow.verify((i % count) as u16, &p.packet), "packet {i}");
        }
    }
    let counters = tx.counters();
    assert_eq!(counters.tx_unsegmented + counters.tx_errors, 0);
}

#[test]
fn trains_arrive_merged() {
    exchange(address(), address(), true, true);
}

#[test]
fn trains_arrive_one_by_one() {
    exchange(address(), address(), true, false);
}

#[test]
fn single_packets_arrive() {
    exchange(address(), address(), false, true);
    exchange(address(), address(), false, false);
}

#[test]
fn ipv6_to_itself() {
    let _only = ferroce_loopback::only_one();
    let addr = Ipv6Addr::LOCALHOST.into();
    let mut path = open(addr, true, true);
    let remote = SocketAddr::new(addr, PORT);
    let src_port = path.capabilities().src_ports[0];
    let flow = Flow::try_from((SocketAddr::new(addr, src_port), remote)).unwrap();
    let bytes = sealed(&flow, 10, 1040);
    let train = Train {
        local: addr,
        remote,
        src_port,
        tos: 0,
        ttl: DEFAULT_HOP_LIMIT,
        segment_len: 1040,
        bytes: &bytes,
    };
    path.send(&mut std::iter::once(train));
    let arrived = receive(&mut path, 10);
    assert_eq!(arrived.len(), 10);
    assert!(arrived.iter().all(|p| flow.verify(0, &p.packet)));
}

#[test]
fn a_refused_train_goes_out_packet_by_packet_and_sealed_again() {
    let (a, b) = (address(), address());
    let (mut tx, mut rx) = (open(a, true, true), open(b, true, true));
    let remote = SocketAddr::new(b, PORT);
    let src_port = tx.capabilities().src_ports[1];
    let flow = Flow::try_from((SocketAddr::new(a, src_port), remote)).unwrap();
    // More segments than any kernel takes.
    let bytes = sealed(&flow, 300, 32);
    let train = Train {
        local: a,
        remote,
        src_port,
        tos: 0,
        ttl: DEFAULT_HOP_LIMIT,
        segment_len: 32,
        bytes: &bytes,
    };
    tx.send(&mut std::iter::once(train));
    assert_eq!(tx.counters().tx_unsegmented, 1);
    let arrived = receive(&mut rx, 300);
    assert_eq!(arrived.len(), 300);
    assert!(arrived.iter().all(|p| flow.verify(0, &p.packet)));
    // For a while nothing is segmented towards this destination, but still towards others.
    let few = Train {
        bytes: &bytes[..320],
        ..train
    };
    tx.send(&mut std::iter::once(few));
    let arrived = receive(&mut rx, 10);
    assert!(arrived.iter().all(|p| flow.verify(0, &p.packet)));
    let c = address();
    let mut other = open(c, true, true);
    let remote = SocketAddr::new(c, PORT);
    let flow = Flow::try_from((SocketAddr::new(a, src_port), remote)).unwrap();
    let bytes = sealed(&flow, 10, 32);
    let train = Train {
        remote,
        bytes: &bytes,
        ..train
    };
    tx.send(&mut std::iter::once(train));
    let arrived = receive(&mut other, 10);
    assert_eq!(arrived.len(), 10);
    for (i, p) in arrived.iter().enumerate() {
        assert!(flow.verify(i as u16, &p.packet), "packet {i}");
    }
    assert_eq!(tx.counters().tx_unsegmented, 2);
}

#[test]
fn what_cannot_be_sent_is_counted_under_its_reason() {
    let a = address();
    let mut tx = open(a, true, true);
    let bytes = [0; 64];
    let to = |remote: [u8; 4], src_port| Train {
        local: a,
        remote: SocketAddr::new(remote.into(), PORT),
        src_port,
        tos: 0,
        ttl: DEFAULT_HOP_LIMIT,
        segment_len: 64,
        bytes: &bytes,
    };
    let port = tx.capabilities().src_ports[0];
    let trains = [
        // Broadcasts are not allowed to a plain socket.
        to([255, 255, 255, 255], port),
        // No socket has this port, so no ICRC would be right.
        to([127, 0, 0, 1], 1),
    ];
    let sent = tx.send(&mut trains.into_iter());
    assert_eq!((sent.trains, sent.blocked), (2, false), "lost, as on a network");
    let counters = tx.counters();
    assert_eq!((counters.tx_forbidden, counters.tx_errors), (1, 1), "{counters:?}");
}

#[test]
fn packets_that_overflow_the_receive_buffer_are_counted() {
    let (a, b) = (address(), address());
    let small = UdpConfig {
        addr: b,
        receive_buffer: 8 << 10,
        ..UdpConfig::default()
    };
    let (mut tx, mut rx) = (open(a, true, true), UdpDatapath::open(&small).unwrap());
    let granted = rx.capabilities().receive_buffer;
    assert!(granted < 64 << 10, "{granted}");
    let bytes = [0; 4112];
    let train = Train {
        local: a,
        remote: SocketAddr::new(b, PORT),
        src_port: PORT,
        tos: 0,
        ttl: DEFAULT_HOP_LIMIT,
        segment_len: 4112,
        bytes: &bytes,
    };
    tx.send(&mut std::iter::repeat_n(train, 100));
    let arrived = receive(&mut rx, 100).len();
    let dropped = rx.counters().rx_buffer_drops;
    assert!(dropped > 0 && arrived as u64 + dropped == 100, "{arrived} + {dropped}");
}

/// A train of one packet to a group, from any of the sender's ports.
fn to_group(group: IpAddr, from: IpAddr, tx: &UdpDatapath) -> (SocketAddr, Vec<u8>) {
    let src_port = tx.capabilities().src_ports[0];
    let remote = SocketAddr::new(group, PORT);
    let flow = Flow::try_from((SocketAddr::new(from, src_port), remote)).unwrap();
    (SocketAddr::new(from, src_port), sealed(&flow, 1, 64))
}

fn send_to_group(tx: &mut UdpDatapath, group: IpAddr, from: IpAddr) -> Vec<u8> {
    let (local, bytes) = to_group(group, from, tx);
    let train = Train {
        local: local.ip(),
        remote: SocketAddr::new(group, PORT),
        src_port: local.port(),
        tos: 0,
        ttl: DEFAULT_HOP_LIMIT,
        segment_len: bytes.len(),
        bytes: &bytes,
    };
    tx.send(&mut [train].into_iter());
    assert_eq!(tx.counters().tx_bursts, 1, "{:?}", tx.counters());
    bytes
}

/// A group that no other test has.
fn group() -> IpAddr {
    let [_, rest @ ..] = ferroce_loopback::address().octets();
    Ipv4Addr::from([239, rest[0], rest[1], rest[2]]).into()
}

#[test]
fn every_member_of_a_group_gets_what_is_sent_to_it() {
    let (a, b, c) = (address(), address(), address());
    let (mut tx, mut one, mut two) = (open(a, true, true), open(b, true, true), open(c, true, true));
    let group = group();
    one.join(group, b).unwrap();
    two.join(group, c).unwrap();
    two.join(group, c).unwrap();
    let sent = send_to_group(&mut tx, group, a);
    for rx in [&mut one, &mut two] {
        let got = receive(rx, 1);
        assert_eq!(got.len(), 1);
        assert_eq!((got[0].from.ip(), got[0].to, &got[0].packet), (a, group, &sent));
        // That of all addresses, that of management datagrams, that for room, and that of the group.
        assert_eq!(rx.descriptors().len(), 4);
    }
    // Joined twice, left once: still a member; then no more.
    two.leave(group, c);
    one.leave(group, b);
    let d = address();
    let mut tx = open(d, true, true);
    send_to_group(&mut tx, group, d);
    assert_eq!(receive(&mut two, 1).len(), 1);
    // The kernel gives a datagram to all members in one go.
    let mut came = 0;
    one.receive(1000, &mut |_, _| came += 1);
    assert_eq!(came, 0);
    assert_eq!(one.descriptors().len(), 3);
}

#[test]
fn groups_that_are_none_are_refused() {
    let a = address();
    let mut path = open(a, true, true);
    assert!(path.join(Ipv4Addr::new(10, 0, 0, 1).into(), a).is_err());
    assert!(path.join(group(), Ipv4Addr::new(203, 0, 113, 77).into()).is_err());
    assert_eq!(path.descriptors().len(), 3);
}

#[test]
fn sockets_that_are_open_already_are_taken_over() {
    use std::os::fd::OwnedFd;
    let addr = address();
    let socket = std::net::UdpSocket::bind((addr, PORT)).unwrap();
    let sockets = roce_net::OpenSockets {
        receivers: vec![std::sync::Arc::new(OwnedFd::from(socket))],
        held: vec![],
    };
    let mut rx = UdpDatapath::from_sockets(&UdpConfig::default(), &sockets).unwrap();
    drop(sockets);
    let from = address();
    let mut tx = open(from, true, true);
    let src_port = tx.capabilities().src_ports[0];
    let remote = SocketAddr::new(addr, PORT);
    let flow = Flow::try_from((SocketAddr::new(from, src_port), remote)).unwrap();
    let bytes = sealed(&flow, 3, 100);
    tx.send(
        &mut [Train {
            local: from,
            remote,
            src_port,
            tos: 0,
            ttl: DEFAULT_HOP_LIMIT,
            segment_len: bytes.len() / 3,
            bytes: &bytes,
        }]
        .into_iter(),
    );
    assert_eq!(receive(&mut rx, 3).len(), 3);
    assert!(UdpDatapath::from_sockets(&UdpConfig::default(), &roce_net::OpenSockets::default()).is_err());
}
