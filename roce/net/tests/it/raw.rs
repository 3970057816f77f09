//! Raw IP and packet sockets against each other and against UDP sockets, over loopback.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use roce_icrc::Flow;
use roce_net::{
    AnySource, DEFAULT_HOP_LIMIT, Datapath, DatapathKind, OpenError, Train, UdpConfig, open_shards, packets,
};
use roce_port::Steering;
use roce_verbs::provider::NoAnswer;

const PORT: u16 = 4791;
const KINDS: [DatapathKind; 3] = [
    DatapathKind::Udp,
    DatapathKind::Raw,
    DatapathKind::Packet { vlan: None },
];

fn address() -> IpAddr {
    ferroce_loopback::address().into()
}

fn config(addr: IpAddr) -> UdpConfig {
    UdpConfig {
        addr,
        ..UdpConfig::default()
    }
}

fn open(kind: DatapathKind, addr: IpAddr) -> Box<dyn Datapath> {
    open_shards(kind, &config(addr), None).unwrap().remove(0)
}

/// Packets to a queue pair, of one length, sealed with Identifications from 0 on.
fn sealed(flow: &Flow, qpn: u32, count: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![];
    for i in 0..count {
        let mut packet: Vec<u8> = (0..len).map(|j| (i * 31 + j) as u8).collect();
        packet[2..4].copy_from_slice(&[0xff, 0xff]);
        packet[4..8].copy_from_slice(&qpn.to_be_bytes());
        flow.seal(i as u16, &mut packet);
        bytes.extend(packet);
    }
    bytes
}

struct Arrived {
    from: SocketAddr,
    to: IpAddr,
    tos: u8,
    hop_limit: u8,
    identification: Option<u16>,
    packet: Vec<u8>,
}

/// Receives until `count` packets have come.
fn receive(path: &mut dyn Datapath, count: usize) -> Vec<Arrived> {
    let mut out = vec![];
    let until = Instant::now() + Duration::from_secs(60);
    while out.len() < count {
        assert!(Instant::now() < until, "{} of {count} came", out.len());
        path.receive(1000, &mut |meta, bytes| {
            out.extend(packets(meta, bytes).enumerate().map(|(i, packet)| Arrived {
                from: meta.remote,
                to: meta.local,
                tos: meta.tos,
                hop_limit: meta.hop_limit,
                identification: meta.identification.map(|id| id + i as u16),
                packet: packet.to_vec(),
            }));
        });
    }
    out
}

fn train<'a>(local: SocketAddr, to: IpAddr, segment_len: usize, bytes: &'a [u8]) -> Train<'a> {
    Train {
        local: local.ip(),
        remote: SocketAddr::new(to, PORT),
        src_port: local.port(),
        tos: 0xb9,
        ttl: DEFAULT_HOP_LIMIT - 1,
        segment_len,
        bytes,
    }
}

/// Sends trains of many lengths from all ports of a datapath, and checks what arrives.
fn exchange(tx: &mut dyn Datapath, a: IpAddr, rx: &mut dyn Datapath, b: IpAddr, shows_identification: bool) {
    let caps = tx.capabilities();
    for src_port in caps.src_ports.into_iter().chain(caps.mad_port).chain([PORT]) {
        let from = SocketAddr::new(a, src_port);
        let flow = Flow::try_from((from, SocketAddr::new(b, PORT))).unwrap();
        for (count, len) in [(1, 16), (1, 4112), (15, 4112), (40, 64), (3, 1040)] {
            let bytes = sealed(&flow, 0x11, count, len);
            let train = train(from, b, len, &bytes);
            let sent = tx.send(&mut [train, train].into_iter());
            assert_eq!((sent.trains, sent.blocked), (2, false));
            for (i, p) in receive(rx, 2 * count).iter().enumerate() {
                let id = (i % count) as u16;
                assert_eq!((p.from, p.to), (from, b));
                assert_eq!((p.tos, p.hop_limit), (0xb9, DEFAULT_HOP_LIMIT - 1));
                assert!(flow.verify(id, &p.packet), "packet {i} of {count}, {len} bytes");
                if shows_identification {
                    assert_eq!(p.identification, Some(id));
                }
            }
        }
    }
    let counters = tx.counters();
    assert_eq!(counters.tx_errors + counters.tx_unsegmented, 0, "{counters:?}");
    assert_eq!(rx.counters().rx_malformed, 0);
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn each_kind_of_datapath_reaches_each_other() {
    for from in KINDS {
        for to in KINDS {
            let (a, b) = (address(), address());
            let (mut tx, mut rx) = (open(from, a), open(to, b));
            exchange(&mut *tx, a, &mut *rx, b, to != DatapathKind::Udp);
        }
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn ipv6_of_each_kind_to_itself() {
    let _only = ferroce_loopback::only_one();
    let here = IpAddr::from(Ipv6Addr::LOCALHOST);
    for kind in &KINDS[1..] {
        let mut path = open(*kind, here);
        let caps = path.capabilities();
        let from = SocketAddr::new(here, caps.src_ports[0]);
        let flow = Flow::try_from((from, SocketAddr::new(here, PORT))).unwrap();
        for (count, len) in [(1, 16), (15, 4112), (40, 64)] {
            let bytes = sealed(&flow, 0x11, count, len);
            path.send(&mut [train(from, here, len, &bytes)].into_iter());
            for p in receive(&mut *path, count) {
                assert_eq!(
                    (p.from, p.to, p.tos, p.hop_limit),
                    (from, here, 0xb9, DEFAULT_HOP_LIMIT - 1)
                );
                assert!(flow.verify(0, &p.packet));
            }
        }
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn all_addresses_have_one_raw_datapath_and_no_packet_datapath() {
    let _only = ferroce_loopback::only_one();
    let all = IpAddr::from(Ipv4Addr::UNSPECIFIED);
    let refused = open_shards(DatapathKind::Packet { vlan: None }, &config(all), None)
        .err()
        .unwrap();
    assert!(
        refused.to_string().contains("needs an address of one interface"),
        "{refused}"
    );
    let (a, b) = (address(), address());
    let mut path = open_shards(DatapathKind::Raw, &config(all), None);
    // Another test may have an address.
    if let Ok(path) = &mut path {
        let from = SocketAddr::new(a, path[0].capabilities().src_ports[0]);
        let flow = Flow::try_from((from, SocketAddr::new(b, PORT))).unwrap();
        let bytes = sealed(&flow, 0x11, 2, 64);
        path[0].send(&mut [train(from, b, 64, &bytes)].into_iter());
        for (i, p) in receive(&mut *path[0], 2).iter().enumerate() {
            assert_eq!((p.from, p.to), (from, b));
            assert!(flow.verify(i as u16, &p.packet));
        }
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn the_address_is_taken_and_nobody_hears_that_its_port_is_closed() {
    for kind in &KINDS[1..] {
        let addr = address();
        let mut path = open(*kind, addr);
        for other in KINDS {
            let again = open_shards(other, &config(addr), None);
            assert!(matches!(again, Err(OpenError::PortTaken { .. })));
        }
        let sender = UdpSocket::bind((addr, 0)).unwrap();
        sender.connect((addr, PORT)).unwrap();
        for _ in 0..3 {
            // An ICMP error about one would be the next one's.
            sender.send(&[0; 32]).unwrap();
        }
        assert_eq!(receive(&mut *path, 3).len(), 3);
        drop(path);
        sender.send(&[0; 32]).unwrap();
        assert!(sender.send(&[0; 32]).is_err(), "now there is nobody");
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn others_packets_do_not_arrive() {
    for kind in &KINDS[1..] {
        let (ours, theirs) = (address(), address());
        let mut path = open(*kind, ours);
        let sender = UdpSocket::bind((theirs, 0)).unwrap();
        for to in [(theirs, PORT), (ours, PORT + 1), (theirs, PORT + 1)] {
            sender.send_to(&[1; 32], to).unwrap();
        }
        sender.send_to(&[2; 32], (ours, PORT)).unwrap();
        let got = receive(&mut *path, 1);
        assert_eq!((got.len(), &got[0].packet[..]), (1, &[2; 32][..]));
        assert_eq!(path.counters().rx_malformed, 0);
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn shards_get_the_packets_of_their_queue_pairs() {
    for kind in &KINDS[1..] {
        let (a, b) = (address(), address());
        let steering = Steering::new(3).unwrap();
        let mut shards = open_shards(*kind, &config(b), Some(steering)).unwrap();
        for sender in KINDS {
            let mut tx = open(sender, a);
            let from = SocketAddr::new(a, tx.capabilities().src_ports[0]);
            let flow = Flow::try_from((from, SocketAddr::new(b, PORT))).unwrap();
            for (shard, path) in shards.iter_mut().enumerate() {
                let qpn = steering.slot(shard).unwrap().qpns().first;
                let bytes = sealed(&flow, qpn, 10, 1040);
                tx.send(&mut [train(from, b, 1040, &bytes)].into_iter());
                assert_eq!(receive(&mut **path, 10).len(), 10);
            }
            for path in &mut shards {
                let mut more = 0;
                path.receive(100, &mut |_, _| more += 1);
                assert_eq!(more, 0);
            }
        }
        // All of them leave from their own ports.
        let mut ports: Vec<u16> = shards.iter().flat_map(|path| path.capabilities().src_ports).collect();
        let count = ports.len();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), count);
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn groups_are_received_while_they_are_joined() {
    let (a, b) = (address(), address());
    let (mut tx, mut rx) = (open(DatapathKind::Raw, a), open(DatapathKind::Raw, b));
    let [_, x, y, z] = ferroce_loopback::address().octets();
    let group = IpAddr::from([239, x, y, z]);
    let from = SocketAddr::new(a, tx.capabilities().src_ports[0]);
    let mut send = |to: IpAddr, mark: u32| {
        let flow = Flow::try_from((from, SocketAddr::new(to, PORT))).unwrap();
        let bytes = sealed(&flow, mark, 1, 64);
        tx.send(&mut [train(from, to, 64, &bytes)].into_iter());
        bytes
    };
    send(group, 1);
    rx.join(group, b).unwrap();
    let second = send(group, 2);
    let got = receive(&mut *rx, 1);
    assert_eq!((got.len(), got[0].to, &got[0].packet), (1, group, &second));
    rx.leave(group, b);
    send(group, 3);
    let last = send(b, 4);
    assert_eq!(receive(&mut *rx, 1)[0].packet, last);
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn icmp_errors_about_requests_are_heard() {
    for kind in &KINDS[1..] {
        let (a, nobody) = (address(), address());
        let mut path = open(*kind, a);
        path.hear_undeliverable(true);
        let from = SocketAddr::new(a, path.capabilities().mad_port.unwrap());
        let flow = Flow::try_from((from, SocketAddr::new(nobody, PORT))).unwrap();
        let bytes = sealed(&flow, 1, 1, 280);
        path.send(&mut [train(from, nobody, 280, &bytes)].into_iter());
        let mut heard = vec![];
        let until = Instant::now() + Duration::from_secs(60);
        while heard.is_empty() {
            assert!(Instant::now() < until, "nothing is heard");
            path.undeliverable(&mut |e| heard.push((e.remote, e.why, e.quoted.to_vec())));
        }
        assert_eq!(heard, [(nobody, NoAnswer::PortUnreachable, bytes)]);
    }
}

/// The sender of a packet may be any address of the network, and its port and Identification any numbers.
#[test]
fn packets_of_any_source_arrive_as_they_were_made() {
    let v4 = (address(), ferroce_loopback::address().into());
    for (to, from) in [
        v4,
        (IpAddr::from(Ipv6Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)),
    ] {
        let _only = to.is_ipv6().then(ferroce_loopback::only_one);
        let mut path = open(DatapathKind::Raw, to);
        let (from, to) = (SocketAddr::new(from, 50_000), SocketAddr::new(to, PORT));
        let sender = AnySource::open(to.is_ipv6()).unwrap();
        let packet = sealed(&Flow::try_from((from, to)).unwrap(), 7, 1, 64);
        sender.send(from, to, 0xbeef, &packet).unwrap();
        let arrived = &receive(&mut *path, 1)[0];
        assert_eq!((arrived.from, arrived.to, &arrived.packet), (from, to.ip(), &packet));
        assert_eq!(arrived.identification, to.is_ipv4().then_some(0xbeef));
    }
    let other = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 1);
    let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), PORT);
    assert!(AnySource::open(false).unwrap().send(other, to, 0, &[0; 16]).is_err());
}
