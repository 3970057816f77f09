//! Datagrams: resolution of service IDs, and multicast groups.

use super::*;

#[test]
fn datagram_ids_are_resolved() {
    let mut p = Program::new();
    let id = p.routed(5, PortSpace::Udp);
    let attr = p.qp_attr(id, QpState::Init).unwrap();
    assert_eq!(attr.qkey, 0x0123_4567);
    assert!(QpAttrMask::from_bits(attr.mask).unwrap().contains(QpAttrMask::QKEY));
    p.connect(id, b"q").unwrap();
    assert_eq!(p.log.take(), ["resolve 10.0.0.9:7471 Udp -> 1"]);
    let answer = |status, qkey| CmEventKind::Resolved {
        conn: CONN,
        status,
        qpn: Qpn::new(0x55),
        qkey: roce::verbs::QKey(qkey),
        info: Vec::new(),
        private_data: vec![1; 136],
    };
    p.report(1, answer(sidr_status::SUCCESS, 0x0123_4567));
    let event = p.expect(EventType::Established);
    let ud = ud_param(&event);
    assert_eq!((ud.qp_num, ud.qkey, ud.private_data_len), (0x55, 0x0123_4567, 136));
    assert_eq!(
        (ud.ah_attr.dgid, ud.ah_attr.sgid_index),
        (sockaddr("10.0.0.9:0").gid(), 2)
    );
    p.report(1, answer(sidr_status::SUCCESS, 1));
    assert_eq!(
        p.expect(EventType::AddrError).status,
        -libc::EINVAL as u32,
        "another Q_Key"
    );
    p.report(1, answer(sidr_status::REJECT, 0));
    assert_eq!(p.expect(EventType::Unreachable).status, 2);
}

/// libfabric's server binds to `localhost`.
#[test]
fn a_datagram_listener_answers() {
    let mut p = Program::new();
    let (_, key) = p.listener(6, PortSpace::Udp);
    for (accept, fails) in [(true, false), (true, true), (false, false)] {
        let conn = p.ucma.backend.thing("ask".into()).unwrap();
        let number = conn.key;
        let event = CmEventKind::SidrRequest {
            listener: ListenId(0),
            conn: CONN,
            local: "10.0.0.1:7471".parse().unwrap(),
            remote: "10.0.0.9:5000".parse().unwrap(),
            space: PortSpace::Udp,
            private_data: vec![2; 180],
        };
        p.ucma.on_report(Report::Cm {
            key,
            new: Some(conn),
            event,
        });
        let event = p.expect(EventType::ConnectRequest);
        assert_eq!(ud_param(&event).private_data_len, 180);
        p.log.take();
        if fails {
            p.ucma.backend.fail.set(Some(Errno::INVAL));
            assert_eq!(p.accept(event.id, 7, 1), Err(Errno::INVAL));
            assert_eq!(p.log.take(), [format!("answer {number} 2 Qpn(0x000000)")]);
        } else if accept {
            p.accept(event.id, 7, 1).unwrap();
            assert_eq!(p.log.take(), [format!("answer {number} 0 Qpn(0x000077)")]);
        } else {
            let body = Bytes::default().u32(event.id).raw(&[0; 4]).raw(&[0; 256]);
            p.run(Cmd::Reject, body).unwrap();
            assert_eq!(p.log.take(), [format!("answer {number} 2 Qpn(0x000000)")]);
        }
    }
}

#[test]
fn groups_are_joined_and_left() {
    let mut p = Program::new();
    let id = p.create(8, PortSpace::Udp);
    let join = |id: u32, group: &str| {
        let addr = sockaddr(group);
        Bytes::default()
            .u64(1)
            .u64(0xcc)
            .u32(id)
            .u16(addr.size() as u16)
            .u16(0)
            .raw(&addr.emit())
    };
    assert_eq!(
        p.run(Cmd::JoinMcast, join(id, "239.1.2.3:0")),
        Err(Errno::INVAL),
        "no device yet"
    );
    let body = Bytes::default().u64(0).raw(&sockaddr("10.0.0.1:0").emit_in6()).u32(id);
    p.run(Cmd::BindIp, body).unwrap();
    assert_eq!(
        p.run(Cmd::JoinMcast, join(id, "10.0.0.7:0")),
        Err(Errno::INVAL),
        "not a group"
    );
    let member = p.number(Cmd::JoinMcast, join(id, "239.1.2.3:0"));
    let event = p.expect(EventType::MulticastJoin);
    assert_eq!((event.uid, event.id), (0xcc, member));
    let ud = ud_param(&event);
    assert_eq!((ud.qp_num, ud.qkey), (0x00ff_ffff, 0x0123_4567));
    assert_eq!(ud.ah_attr.dgid, sockaddr("239.1.2.3:0").gid());
    let left = p.number(Cmd::LeaveMcast, Bytes::default().u64(1).u32(member).u32(0));
    assert_eq!(left, 1);
    let log = p.log.take();
    assert_eq!(log[1..], ["join 10.0.0.1 239.1.2.3 false -> 2", "end 2"]);
    assert_eq!(p.destroy(id), 1, "the join counts for the id as well");
}
