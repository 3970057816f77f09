//! Datagrams and unreliable connections: which way they go, in which trains, and who gets them.

use roce_bth::{Bth, Deth, Header, Opcode, PKey, QKey};
use roce_port::PortCounters;
use roce_verbs::{AsyncEvent, Datagram as To, QpAttr, SendRequest, SrqAttr, Target, provider::VerbsError};

use super::{
    drops::{sealed, source},
    *,
};

const QKEY: QKey = QKey(0x77);

pub(crate) fn group(last: u8) -> IpAddr {
    IpAddr::from([239, 0, 0, last])
}

fn of_type(host: &mut Host, qp_type: QpType) -> Qpn {
    let init = QpInit { qp_type, ..host.init() };
    host.port.create_qp(init).unwrap()
}

/// A datagram queue pair in RTS.
pub(crate) fn ud(host: &mut Host) -> Qpn {
    let qpn = of_type(host, QpType::Ud);
    let nobody = AddressVector::new(host.addr, host.addr);
    let way = QpAttr {
        qkey: Some(QKEY.0),
        sq_psn: Some(Psn::new(1)),
        ..QpAttr::to_rts(nobody, Mtu::B1024, Qpn::new(0))
    };
    for attr in way.steps(QpType::Ud) {
        host.port.modify_qp(host.now, qpn, &attr).unwrap();
    }
    qpn
}

fn post_to(host: &mut Host, qpn: Qpn, dests: &[(IpAddr, Qpn)], len: usize) {
    let data = noise(len);
    let requests: Vec<_> = dests
        .iter()
        .map(|(to, dest)| SendRequest {
            wr: SendWr {
                wr_id: 1,
                op: SendOp::Send,
                flags: SendFlags::SIGNALED,
                payload: Payload::Inline(&data),
            },
            target: Target::Datagram(To {
                av: AddressVector::new(host.addr, *to),
                qpn: *dest,
                qkey: QKEY,
            }),
        })
        .collect();
    host.port.post_requests(host.now, qpn, &requests).unwrap();
}

/// Address and packets of each train.
fn shape(out: &[Datagram]) -> Vec<(IpAddr, usize)> {
    out.iter().map(|d| (d.dst, d.segments)).collect()
}

#[test]
fn each_datagram_goes_its_own_way() {
    let mut a = Host::new(1);
    let qpn = ud(&mut a);
    let q = Qpn::new(5);
    post_to(
        &mut a,
        qpn,
        &[(ip(2), q), (ip(3), q), (ip(2), q), (group(1), Qpn::MULTICAST)],
        64,
    );
    let expected = [(ip(2), 1), (ip(3), 1), (ip(2), 1), (group(1), 1)];
    assert_eq!(shape(&a.take()), expected);
    assert_eq!(a.completions().len(), 4);
}

#[test]
fn each_peer_has_its_pace() {
    let mut a = Host::new(1);
    let (first, second) = (ud(&mut a), ud(&mut a));
    let send = |a: &mut Host, qpn, to, n: usize| {
        for _ in 0..n {
            post_to(a, qpn, &[(ip(to), Qpn::new(5))], 200);
        }
        a.take().iter().map(|d| d.segments).sum::<usize>()
    };
    let mut sent = 0;
    while send(&mut a, first, 2, 1) == 1 {
        sent += 1;
    }
    assert!((100..1000).contains(&sent), "{sent} until the burst is used up");
    assert_eq!(send(&mut a, second, 2, 1), 0, "it is one for all queue pairs");
    let third = ud(&mut a);
    assert_eq!(send(&mut a, third, 3, 16), 16, "another peer does not wait for it");
    // What waits goes out in time.
    a.now = a.port.poll_timeout().unwrap();
    a.port.handle_timeout(a.now);
    assert_eq!(send(&mut a, third, 3, 0), 2);
}

#[test]
fn trains_of_datagrams_only_go_where_they_are_known_to_arrive() {
    let mut a = Host::new(1);
    let qpn = ud(&mut a);
    let dest = Qpn::new(5);
    // To nobody known: one by one.
    post_to(&mut a, qpn, &[(ip(2), dest); 4], 64);
    assert_eq!(shape(&a.take()), [(ip(2), 1); 4]);
    // On this host: together, but never two receivers in one.
    let (me, other) = (a.addr, Qpn::new(6));
    post_to(&mut a, qpn, &[(me, dest), (me, dest), (me, other), (me, other)], 64);
    assert_eq!(shape(&a.take()), [(me, 2), (me, 2)]);
    // To a peer that has acknowledged trains: together.
    let mut b = Host::new(2);
    let (qa, qb) = (a.qp(), b.qp());
    a.raise(qa, b.addr, qb);
    b.raise(qb, a.addr, qa);
    let (ma, mb) = (a.region(64 << 10), b.region(64 << 10));
    a.send(qa, 1, SendOp::Write(remote(&mb)), &ma, 64 << 10);
    exchange(&mut a, &mut b);
    a.completions();
    post_to(&mut a, qpn, &[(b.addr, dest); 4], 64);
    assert_eq!(shape(&a.take()), [(b.addr, 4)]);
}

#[test]
fn unreliable_connections_send_their_packets_one_by_one_to_other_hosts() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (qa, qb) = (of_type(&mut a, QpType::Uc), of_type(&mut b, QpType::Uc));
    for (host, qpn, peer, dest) in [(&mut a, qa, ip(2), qb), (&mut b, qb, ip(1), qa)] {
        let way = QpAttr {
            access: Some(RIGHTS),
            rq_psn: Some(Psn::new(9)),
            sq_psn: Some(Psn::new(9)),
            ..QpAttr::to_rts(AddressVector::new(host.addr, peer), Mtu::B1024, dest)
        };
        for attr in way.steps(QpType::Uc) {
            host.port.modify_qp(host.now, qpn, &attr).unwrap();
        }
    }
    let (ma, mb) = (a.region(5000), b.region(5000));
    ma.write(0, &noise(5000)).unwrap();
    a.send(qa, 1, SendOp::Write(remote(&mb)), &ma, 5000);
    let out = a.take();
    assert_eq!(shape(&out), [(ip(2), 1); 5]);
    out.iter().for_each(|d| b.give(d));
    assert_eq!(contents(&mb), noise(5000));
    assert_eq!(a.completions().len(), 1);
    assert!(b.take().is_empty(), "nothing is acknowledged");
    assert!(a.port.in_flight().all(|(_, bytes)| bytes == 0));
    // As for reliable connections, only the peer is listened to.
    let mut stranger = out[0].clone();
    stranger.src = SocketAddr::new(ip(9), 0xc000);
    b.give(&stranger);
    assert_eq!(b.port.counters().drop_peer_address, 1);
}

pub(crate) fn datagram(dest: Qpn) -> Header {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, dest, Psn::new(1)));
    header.deth = Some(Deth {
        qkey: QKEY,
        reserved: 0,
        src_qp: Qpn::new(9),
    });
    header
}

/// Delivers a packet to a host whose datagram queue pair is a member of group 1 and has a receive.
fn counted(make: impl FnOnce(&Host, &Host, Qpn) -> Datagram) -> (PortCounters, usize) {
    let (a, mut b) = (Host::new(1), Host::new(2));
    let qb = ud(&mut b);
    assert!(b.port.attach_mcast(qb, group(1)).unwrap());
    let memory = b.region(128);
    b.receive(qb, 1, &memory);
    let packet = make(&a, &b, qb);
    b.give(&packet);
    (b.port.counters(), b.completions().len())
}

#[test]
fn good_ones_arrive() {
    let (_, n) = counted(|a, b, q| sealed(source(a), b.addr, &datagram(q), b"data"));
    assert_eq!(n, 1);
    let (c, n) = counted(|a, _, _| sealed(source(a), group(1), &datagram(Qpn::MULTICAST), b"data"));
    assert_eq!((n, c.rx_multicast), (1, 1));
}

#[test]
fn others_are_dropped_under_their_reasons() {
    let no_partition = |q| {
        let mut header = datagram(q);
        header.bth.pkey = PKey(0x1234);
        header
    };
    let wrong_key = |q| {
        let mut header = datagram(q);
        if let Some(deth) = &mut header.deth {
            deth.qkey = QKey(8);
        }
        header
    };
    let connected = |q| Header::new(Bth::new(Opcode::RcSendOnly, q, Psn::new(1)));
    let (c, n) = counted(|a, b, q| sealed(source(a), b.addr, &no_partition(q), b"data"));
    assert_eq!((n, c.drop_pkey, c.pkey_violations()), (0, 1, 1));
    let (c, n) = counted(|a, b, q| sealed(source(a), b.addr, &wrong_key(q), b"data"));
    assert_eq!((n, c.qkey_violations()), (0, 1));
    let (c, n) = counted(|a, b, q| sealed(source(a), b.addr, &connected(q), b"data"));
    assert_eq!((n, c.drop_service), (0, 1));
    // The multicast queue pair at an address of ours, or another queue pair at a group's.
    let (c, n) = counted(|a, b, _| sealed(source(a), b.addr, &datagram(Qpn::MULTICAST), b"data"));
    assert_eq!((n, c.drop_multicast), (0, 1));
    let (c, n) = counted(|a, _, q| sealed(source(a), group(1), &datagram(q), b"data"));
    assert_eq!((n, c.drop_local_address), (0, 1));
    let (c, n) = counted(|a, _, _| sealed(source(a), group(2), &datagram(Qpn::MULTICAST), b"data"));
    assert_eq!((n, c.drop_multicast), (0, 1));
    let (c, n) = counted(|a, _, _| sealed(source(a), group(1), &connected(Qpn::MULTICAST), b"data"));
    assert_eq!((n, c.drop_service), (0, 1));
    let (c, n) = counted(|a, _, _| sealed(source(a), group(1), &wrong_key(Qpn::MULTICAST), b"data"));
    assert_eq!((n, c.qkey_violations()), (0, 1));
    let (c, n) = counted(|a, _, _| {
        let mut bad = sealed(source(a), group(1), &datagram(Qpn::MULTICAST), b"data");
        // Two bytes apart, so that no Identification makes up for it.
        for at in [20, 23] {
            bad.bytes[at] ^= 0x55;
        }
        bad
    });
    assert_eq!((n, c.icrc_errors), (0, 1));
}

#[test]
fn members_are_counted_and_leave_with_their_queue_pair() {
    let mut a = Host::with(1, |c| {
        c.limits.max_mcast_grp = 2;
        c.limits.max_mcast_qp_attach = 2;
        c.limits.max_total_mcast_qp_attach = 3;
    });
    let [p, q, r] = [(); 3].map(|()| ud(&mut a));
    assert!(a.port.attach_mcast(p, group(1)).unwrap());
    assert!(!a.port.attach_mcast(p, group(1)).unwrap());
    assert!(a.port.attach_mcast(q, group(1)).unwrap());
    assert!(matches!(a.port.attach_mcast(r, group(1)), Err(VerbsError::Limit(_))));
    assert!(a.port.attach_mcast(r, group(2)).unwrap());
    assert!(matches!(a.port.attach_mcast(r, group(3)), Err(VerbsError::Limit(_))));
    assert!(matches!(a.port.attach_mcast(q, group(2)), Err(VerbsError::Limit(_))));
    a.port.destroy_qp(a.now, p).unwrap();
    assert!(a.port.attach_mcast(q, group(2)).unwrap());
    assert_eq!(a.port.mcast_groups(q), [group(1), group(2)]);
    assert!(a.port.detach_mcast(r, group(1)).is_err());
    assert!(a.port.attach_mcast(q, ip(9)).is_err());
    let rc = a.qp();
    assert!(matches!(a.port.attach_mcast(rc, group(1)), Err(VerbsError::Invalid(_))));
}

#[test]
fn a_shared_queue_serves_several_queue_pairs_and_tells_of_its_limit() {
    use roce_qp::{SharedReceiveQueue, SrqConfig};
    let mut b = Host::new(2);
    let srq = SharedReceiveQueue::new(SrqConfig {
        handle: 6,
        number: roce_verbs::Srqn::new(6),
        pd: b.pd,
        srq_type: roce_verbs::SrqType::Basic,
        attr: SrqAttr {
            max_wr: 4,
            max_sge: 1,
            limit: 1,
        },
        cq: None,
    });
    let memory = b.region(64);
    let sges = [Sge {
        addr: memory.addr(),
        length: 64,
        lkey: memory.lkey(),
    }];
    srq.post(&RecvWr { wr_id: 4, sges: &sges }).unwrap();
    let mut a = Host::new(1);
    let qa = a.qp();
    let qb = b
        .port
        .create_qp(QpInit {
            srq: Some(srq.clone()),
            ..b.init()
        })
        .unwrap();
    a.raise(qa, b.addr, qb);
    b.raise(qb, a.addr, qa);
    let ma = a.region(64);
    a.send(qa, 1, SendOp::Send, &ma, 64);
    exchange(&mut a, &mut b);
    let got = b.completions();
    assert_eq!((got.len(), got[0].wr_id, got[0].qpn), (1, 4, qb));
    let events: Vec<_> = std::iter::from_fn(|| b.port.poll_async_event()).collect();
    assert!(events.contains(&AsyncEvent::SrqLimitReached(6)), "{events:?}");
}

#[test]
fn management_datagrams_of_other_classes_are_the_program_s() {
    let (a, mut b) = (Host::new(1), Host::new(2));
    let mut header = datagram(Qpn::GSI);
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    let mut mad = [0u8; 256];
    mad[..4].copy_from_slice(&[1, 4, 1, 1]);
    let packet = sealed(source(&a), b.addr, &header, &mad);
    // Nobody is there for it: the connection manager counts it as none of its own.
    b.give(&packet);
    let gsi = of_type(&mut b, QpType::Gsi);
    assert_eq!(gsi, Qpn::GSI);
    let second = QpInit {
        qp_type: QpType::Gsi,
        ..b.init()
    };
    assert!(matches!(b.port.create_qp(second), Err(VerbsError::Busy(_))));
    for (state, psn) in [(QpState::Init, None), (QpState::Rtr, None), (QpState::Rts, Some(1))] {
        let first = state == QpState::Init;
        let attr = QpAttr {
            state: Some(state),
            pkey_index: first.then_some(0),
            qkey: first.then_some(QKey::GSI.0),
            sq_psn: psn.map(Psn::new),
            ..QpAttr::default()
        };
        b.port.modify_qp(b.now, gsi, &attr).unwrap();
    }
    let memory = b.region(512);
    b.receive(gsi, 1, &memory);
    b.give(&packet);
    assert_eq!(b.completions().len(), 1);
    assert_eq!(contents(&memory)[40..296], mad);
    b.port.destroy_qp(b.now, gsi).unwrap();
    assert_eq!(of_type(&mut b, QpType::Gsi), Qpn::GSI);
}
