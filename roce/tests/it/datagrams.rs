//! Unreliable datagrams: what is received and what stands before it, keys, groups, and the program's own QP1.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use crate::common::*;
use roce::{
    AddressHandle, AddressVector, Completion, Device, DeviceConfig, Mr, NetworkHeader, Payload, PostError, Psn, QKey,
    Qp, QpAttr, QpCaps, QpOptions, QpState, QpType, Qpn, RecvWr, SendFlags, SendOp, SendRequest, SendWr, Target,
    VerbsError, WcFlags, WcOpcode, WcStatus,
};

const QKEY: QKey = QKey(0x1111_1111);
const GRH: usize = 40;

fn make(side: &Side, qp_type: QpType) -> Result<Qp, VerbsError> {
    side.device.create_qp_as(
        Some(&side.pd),
        &QpOptions {
            qp_type,
            send_cq: Some(&side.cq),
            recv_cq: Some(&side.cq),
            srq: None,
            xrcd: None,
            caps: QpCaps::default(),
            signal_all: false,
        },
    )
}

/// Brings a datagram queue pair to RTS.
fn raise_ud(qp: &Qp, qkey: Option<QKey>) {
    let init = QpAttr {
        state: Some(QpState::Init),
        pkey_index: Some(0),
        port: Some(1),
        qkey: qkey.map(|k| k.0),
        ..QpAttr::default()
    };
    let to = |state| QpAttr {
        state: Some(state),
        ..QpAttr::default()
    };
    qp.modify(&init).unwrap();
    qp.modify(&to(QpState::Rtr)).unwrap();
    let rts = QpAttr {
        sq_psn: Some(Psn::new(77)),
        ..to(QpState::Rts)
    };
    qp.modify(&rts).unwrap();
}

fn ud(side: &Side) -> Qp {
    let qp = make(side, QpType::Ud).unwrap();
    raise_ud(&qp, Some(QKEY));
    qp
}

fn ah(from: &Side, to: IpAddr) -> AddressHandle {
    let av = AddressVector {
        traffic_class: 0x28,
        ..AddressVector::new(from.addr(), to)
    };
    from.device.create_ah(&from.pd, &av).unwrap()
}

fn send(qp: &Qp, to: &AddressHandle, dest: Qpn, qkey: QKey, op: SendOp, payload: Payload<'_>) {
    let request = SendRequest {
        wr: SendWr {
            wr_id: 5,
            op,
            flags: SendFlags::SIGNALED,
            payload,
        },
        target: Target::Datagram(to.to(dest, qkey)),
    };
    qp.post_requests(&[request]).unwrap();
}

fn header(mr: &Mr, offset: usize) -> [u8; GRH] {
    contents(mr, offset, GRH).try_into().unwrap()
}

/// No completion for a while, in which one that was wrong would have come.
fn nothing(side: &Side) {
    std::thread::sleep(Duration::from_millis(200));
    let mut out: Vec<Completion> = vec![];
    side.cq.poll(&mut out, 1).unwrap();
    assert!(out.is_empty(), "{out:?}");
}

#[test]
fn datagrams_go_back_and_forth_by_the_header_that_comes_with_them() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let (qa, qb) = (ud(&a), ud(&b));
    let (ma, mb) = (a.mr(8192), b.mr(8192));
    for (round, len) in [0usize, 1, 3, 100, 4096].into_iter().enumerate() {
        let data = pattern(len, round as u8);
        mb.write(0, &[0xee; GRH]).unwrap();
        recv(&qb, 1, &[mb.sge(0, GRH + len)]);
        recv(&qa, 2, &[ma.sge(0, GRH + len)]);
        ma.write(4096, &data).unwrap();
        let there = ah(&a, b.addr());
        let sges = [ma.sge(4096, len)];
        send(
            &qa,
            &there,
            qb.qpn(),
            QKEY,
            SendOp::SendWithImm(9),
            Payload::Sges(&sges),
        );
        assert_eq!(a.good(1)[0].opcode, WcOpcode::Send);
        let got = b.good(1)[0];
        assert_eq!((got.wr_id, got.opcode, got.imm), (1, WcOpcode::Recv, 9));
        assert_eq!(
            (got.byte_len as usize, got.src_qp, got.qpn),
            (GRH + len, qa.qpn(), qb.qpn())
        );
        assert_eq!(got.flags, WcFlags::GRH | WcFlags::WITH_IMM);
        assert_eq!(contents(&mb, GRH, len), data);
        // IPv4: the header is in the last 20 of the 40 bytes, complete and with a right checksum.
        let before = header(&mb, 0);
        assert_eq!(before[20], 0x45);
        let parsed = NetworkHeader::parse(&before);
        assert_eq!(
            (parsed.source, parsed.destination, parsed.traffic_class),
            (a.addr(), b.addr(), 0x28)
        );
        let total = usize::from(u16::from_be_bytes([before[22], before[23]]));
        assert_eq!(total, 20 + 8 + 12 + 8 + 4 + len.next_multiple_of(4) + 4);

        // Back by what came along.
        let path = b.device.reply_path(&got, &before).unwrap();
        let back = b.device.create_ah(&b.pd, &path).unwrap();
        assert_eq!((back.path().local, back.path().remote), (b.addr(), a.addr()));
        send(
            &qb,
            &back,
            got.src_qp,
            QKEY,
            SendOp::Send,
            Payload::Sges(&[mb.sge(GRH, len)]),
        );
        b.good(1);
        let got = a.good(1)[0];
        assert_eq!((got.wr_id, got.src_qp), (2, qb.qpn()));
        assert_eq!(contents(&ma, GRH, len), data);
    }
}

#[test]
fn over_ipv6_the_header_is_a_grh() {
    let _only = ferroce_loopback::only_one();
    let v6: IpAddr = std::net::Ipv6Addr::LOCALHOST.into();
    let side = Side::new(Device::open(DeviceConfig::new(v6)).expect("IPv6 on this host"));
    let (qa, qb) = (ud(&side), ud(&side));
    let mr = side.mr(4096);
    recv(&qb, 1, &[mb_sge(&mr)]);
    send(
        &qa,
        &ah(&side, v6),
        qb.qpn(),
        QKEY,
        SendOp::Send,
        Payload::Inline(b"hello"),
    );
    let done = side.good(2);
    let got = done.iter().find(|c| c.opcode == WcOpcode::Recv).unwrap();
    assert_eq!(got.byte_len as usize, GRH + 5);
    let before = header(&mr, 0);
    assert_eq!(before[0] >> 4, 6);
    let parsed = NetworkHeader::parse(&before);
    assert_eq!(
        (parsed.source, parsed.destination, parsed.traffic_class),
        (v6, v6, 0x28)
    );
    assert_eq!(contents(&mr, GRH, 5), b"hello");
}

fn mb_sge(mr: &Mr) -> roce::Sge {
    mr.sge(0, 1024)
}

#[test]
fn a_wrong_key_is_dropped_and_counted() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let (qa, qb) = (ud(&a), ud(&b));
    let mr = b.mr(1024);
    recv(&qb, 1, &[mr.sge(0, 1024)]);
    let there = ah(&a, b.addr());
    send(&qa, &there, qb.qpn(), QKey(7), SendOp::Send, Payload::Inline(b"wrong"));
    a.good(1);
    eventually(|| b.device.stats().port.qkey_violations() == 1);
    let mut out = vec![];
    assert_eq!(b.cq.poll(&mut out, 1).unwrap(), 0, "{out:?}");
    // With the top bit the sender's own key is used (IBA 10.2.5).
    send(
        &qa,
        &there,
        qb.qpn(),
        QKey(0x8000_0000),
        SendOp::Send,
        Payload::Inline(b"right"),
    );
    a.good(1);
    b.good(1);
    assert_eq!(contents(&mr, GRH, 5), b"right");
}

#[test]
fn without_a_receive_or_room_datagrams_vanish_and_nothing_breaks() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let (qa, qb) = (ud(&a), ud(&b));
    let there = ah(&a, b.addr());
    let mr = b.mr(1024);
    send(&qa, &there, qb.qpn(), QKEY, SendOp::Send, Payload::Inline(b"nobody"));
    a.good(1);
    nothing(&b);
    recv(&qb, 1, &[mr.sge(0, GRH + 3)]);
    send(&qa, &there, qb.qpn(), QKEY, SendOp::Send, Payload::Inline(b"too long"));
    send(&qa, &there, qb.qpn(), QKEY, SendOp::Send, Payload::Inline(b"fit"));
    a.good(2);
    assert_eq!(b.good(1)[0].byte_len as usize, GRH + 3);
    assert_eq!(contents(&mr, GRH, 3), b"fit");
}

#[test]
fn what_a_datagram_queue_pair_cannot_send_is_refused() {
    let a = Side::new(open());
    let qp = ud(&a);
    let there = ah(&a, a.addr());
    let mr = a.mr(8192);
    let refused = |op, target, payload| {
        let wr = SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::SIGNALED,
            payload,
        };
        qp.post_requests(&[SendRequest { wr, target }]).unwrap_err()
    };
    let to = Target::Datagram(there.to(qp.qpn(), QKEY));
    let (done, why) = refused(SendOp::Send, Target::Peer, Payload::Inline(b"x"));
    assert!(done == 0 && matches!(why, PostError::Invalid(_)), "{why:?}");
    let too_long = [mr.sge(0, 4097)];
    let wr = SendWr {
        wr_id: 1,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&too_long),
    };
    // Longer than the port's MTU: nothing is sent, and nothing is said about it (IBA C10-93.1.1).
    let before = a.device.stats().port.tx_packets;
    qp.post_requests(&[SendRequest { wr, target: to }]).unwrap();
    a.good(1);
    assert_eq!(a.device.stats().port.tx_packets, before);
    let nowhere = AddressVector::new(a.addr(), Ipv4Addr::UNSPECIFIED.into());
    assert!(matches!(
        a.device.create_ah(&a.pd, &nowhere),
        Err(VerbsError::Address(_))
    ));
    let elsewhere = AddressVector::new(Ipv4Addr::new(203, 0, 113, 1).into(), a.addr());
    assert!(matches!(
        a.device.create_ah(&a.pd, &elsewhere),
        Err(VerbsError::Address(_))
    ));
    // What the service lacks is posted, and ends in the completion. The queue pair is in error then.
    let write = SendWr {
        wr_id: 2,
        op: SendOp::Write(remote(&mr, 0)),
        flags: SendFlags::SIGNALED,
        payload: Payload::Inline(b"x"),
    };
    qp.post_requests(&[SendRequest { wr: write, target: to }]).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::LocalQpOperationError);
}

fn group(n: u8) -> IpAddr {
    let pid = std::process::id();
    Ipv4Addr::from([239, 100 + n, (pid >> 8) as u8, pid as u8]).into()
}

#[test]
fn a_group_s_packets_reach_all_members_on_the_host() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let group = group(1);
    let sender = ud(&a);
    let mut members = vec![ud(&b), ud(&b), ud(&a)];
    let others = ud(&b);
    let memory = [b.mr(1024), b.mr(1024), a.mr(1024)];
    for ((qp, mr), side) in members.iter().zip(&memory).zip([&b, &b, &a]) {
        qp.attach_mcast(group, side.addr()).unwrap();
        // A second time changes nothing.
        qp.attach_mcast(group, side.addr()).unwrap();
        recv(qp, 1, &[mr.sge(0, 1024)]);
    }
    let spare = b.mr(1024);
    recv(&others, 9, &[spare.sge(0, 1024)]);
    let there = ah(&a, group);
    send(
        &sender,
        &there,
        Qpn::MULTICAST,
        QKEY,
        SendOp::Send,
        Payload::Inline(b"to all"),
    );
    let mut got = b.good(2);
    got.sort_by_key(|c| c.qpn != members[0].qpn());
    assert_eq!((got[0].qpn, got[1].qpn), (members[0].qpn(), members[1].qpn()));
    // The send's own completion and the member beside the sender.
    let own = a.good(2);
    assert!(
        own.iter()
            .any(|c| c.qpn == members[2].qpn() && c.opcode == WcOpcode::Recv)
    );
    for mr in &memory {
        assert_eq!(contents(mr, GRH, 6), b"to all");
        assert_eq!(NetworkHeader::parse(&header(mr, 0)).destination, group);
    }
    nothing(&b);

    // Who leaves gets no more.
    members[0].detach_mcast(group).unwrap();
    assert!(members[0].detach_mcast(group).is_err());
    assert!(members[0].mcast_groups().is_empty());
    for (qp, mr) in members.iter().zip(&memory).take(2) {
        recv(qp, 2, &[mr.sge(0, 1024)]);
    }
    drop(members.pop());
    send(
        &sender,
        &there,
        Qpn::MULTICAST,
        QKEY,
        SendOp::Send,
        Payload::Inline(b"again"),
    );
    a.good(1);
    assert_eq!(b.good(1)[0].wr_id, 2);
    nothing(&b);
}

#[test]
fn only_datagram_queue_pairs_join_and_only_groups() {
    let a = Side::new(open());
    assert!(a.qp().attach_mcast(group(2), a.addr()).is_err());
    let qp = ud(&a);
    assert!(matches!(
        qp.attach_mcast(a.addr(), a.addr()),
        Err(VerbsError::Address(_))
    ));
    assert!(qp.mcast_groups().is_empty());
    let member = a.device.join_group(group(2), a.addr()).unwrap();
    assert_eq!(member.group(), group(2));
    assert!(a.device.join_group(a.addr(), a.addr()).is_err());
}

#[test]
fn the_program_s_own_qp1_gets_what_is_not_the_connection_manager_s() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let gsi = |side: &Side| {
        let qp = make(side, QpType::Gsi).unwrap();
        let init = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            qkey: Some(QKey::GSI.0),
            ..QpAttr::default()
        };
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            ..QpAttr::default()
        };
        let rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(Psn::new(1)),
            ..QpAttr::default()
        };
        for attr in [init, rtr, rts] {
            qp.modify(&attr).unwrap();
        }
        qp
    };
    let (qa, qb) = (gsi(&a), gsi(&b));
    assert_eq!((qa.qpn(), qb.qpn()), (Qpn::GSI, Qpn::GSI));
    assert!(matches!(make(&a, QpType::Gsi), Err(VerbsError::Busy(_))));
    let mr = b.mr(1024);
    qb.post_recv(&[RecvWr {
        wr_id: 1,
        sges: &[mr.sge(0, 1024)],
    }])
    .unwrap();
    // A performance management query: base version 1, class 4.
    let mut mad = [0u8; 256];
    mad[..4].copy_from_slice(&[1, 4, 1, 1]);
    send(
        &qa,
        &ah(&a, b.addr()),
        Qpn::GSI,
        QKey::GSI,
        SendOp::Send,
        Payload::Inline(&mad),
    );
    a.good(1);
    let got = b.good(1)[0];
    assert_eq!((got.src_qp, got.byte_len), (Qpn::GSI, 296));
    assert_eq!(contents(&mr, GRH, 256), mad);
    // Connections are made all the same.
    let addr = std::net::SocketAddr::new(b.addr(), 7000);
    let _listener = b.device.listen(&b.channel, addr, 8).unwrap();
    let (ca, cb) = (a.qp(), b.qp());
    connect(&a, &b, &ca, &cb, addr);
}
