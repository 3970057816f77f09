//! Connections: requests, refusals, and ids that move between channels.

use super::*;

#[test]
fn an_active_id_goes_from_address_to_connection() {
    let mut p = Program::new();
    let id = p.routed(0xa0, PortSpace::Tcp);
    assert_eq!(
        p.qp_attr(id, QpState::Init).unwrap().access,
        0,
        "no rights before the connection"
    );
    p.connect(id, b"hi").unwrap();
    assert_eq!(p.log.take(), ["connect 10.0.0.9:7471 Rc hi -> 1"]);
    assert!(p.qp_attr(id, QpState::Rtr).is_err(), "the peer is not known yet");
    p.report(1, reply(b"answer"));
    let event = p.expect(EventType::ConnectResponse);
    assert_eq!((event.uid, event.id, event.status), (0xa0, id, 0));
    let param = conn_param(&event);
    assert_eq!(
        (param.qp_num, param.responder_resources, param.initiator_depth),
        (0x4321, 3, 4)
    );
    assert_eq!(&param.private_data[..usize::from(param.private_data_len)], b"answer");

    let init = p.qp_attr(id, QpState::Init).unwrap();
    assert_eq!(init.access, 0b1110);
    let rtr = p.qp_attr(id, QpState::Rtr).unwrap();
    let mask = QpAttrMask::from_bits(rtr.mask).unwrap();
    assert!(mask.contains(QpAttrMask::AV | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN | QpAttrMask::MAX_DEST_RD_ATOMIC));
    assert_eq!((rtr.dest_qp_num, rtr.path_mtu, rtr.max_dest_rd_atomic), (0x4321, 2, 3));
    assert_eq!(
        (rtr.ah_attr.sgid_index, rtr.ah_attr.is_global, rtr.ah_attr.port_num),
        (2, 1, 1)
    );
    assert_eq!(rtr.ah_attr.dgid, sockaddr("10.0.0.9:0").gid());
    let rts = p.qp_attr(id, QpState::Rts).unwrap();
    assert_eq!(
        (rts.sq_psn, rts.timeout, rts.retry_cnt, rts.rnr_retry),
        (0xabc, 19, 6, 5)
    );
    assert_eq!(rts.max_rd_atomic, 4);

    p.accept(id, 0, 0).unwrap();
    assert_eq!(p.log.take(), ["establish 1"]);
    p.simple(Cmd::Disconnect, id, 0).unwrap();
    p.report(
        1,
        CmEventKind::Disconnected {
            conn: CONN,
            timed_out: true,
        },
    );
    let end = p.expect(EventType::Disconnected);
    assert_eq!(end.status.cast_signed(), -libc::ETIMEDOUT, "as IB_CM_DREQ_ERROR");
    p.report(
        1,
        CmEventKind::Disconnected {
            conn: CONN,
            timed_out: false,
        },
    );
    assert!(p.event().is_none(), "only once");
    p.report(1, CmEventKind::TimewaitExit { conn: CONN });
    p.expect(EventType::TimewaitExit);
    assert!(p.qp_attr(id, QpState::Rts).is_err(), "over");
    assert_eq!(p.destroy(id), 5, "events that were taken");
    assert_eq!(p.log.take(), ["disconnect 1", "end 1"]);
}

#[test]
fn a_request_is_nobodys_until_it_is_accepted() {
    let mut p = Program::new();
    let (listener, key) = p.listener(0xb0, PortSpace::Tcp);
    let conn = p.request(key);
    p.log.take();
    let event = p.expect(EventType::ConnectRequest);
    assert_eq!(p.log.take(), [format!("out of the backlog {conn}")]);
    let id = event.id;
    assert_eq!(event.uid, 0xb0, "the listener's");
    assert_ne!(id, listener);
    assert_eq!(conn_param(&event).private_data_len, 5);
    let query = p.run(Cmd::QueryRoute, Bytes::default().u64(1).u32(id).u32(0)).unwrap();
    let route = QueryRouteResp::read_from_bytes(&query).unwrap();
    assert_eq!((route.num_paths, route.port_num, route.ibdev_index), (1, 1, 4));
    assert_eq!(Addr::parse(&route.dst_addr), Ok(sockaddr("10.0.0.9:5000")));
    assert_eq!(route.ib_route[0].mtu, 2);

    // librdmacm brings its queue pair up before it accepts.
    assert_eq!(p.qp_attr(id, QpState::Rtr).unwrap().dest_qp_num, 0x4321);
    assert_eq!(p.qp_attr(id, QpState::Rts).unwrap().sq_psn, 0xabc);
    p.report(
        conn,
        CmEventKind::Unreachable {
            conn: CONN,
            why: roce::NoAnswer::Timeout,
        },
    );
    assert!(p.event().is_none(), "librdmacm does not know the id yet");
    p.log.take();
    p.accept(id, 0xb1, 1).unwrap();
    assert_eq!(p.log.take(), [format!("accept {conn} Qpn(0x000077)")]);
    p.report(
        conn,
        CmEventKind::Established {
            conn: CONN,
            private_data: Vec::new(),
        },
    );
    assert_eq!(p.expect(EventType::Established).uid, 0xb1);
    assert_eq!(p.destroy(listener), 1, "the request counts for the listener");
    assert_eq!(p.destroy(id), 1);
}

#[test]
fn requests_that_nobody_saw_go_with_their_listener() {
    let mut p = Program::new();
    let (listener, key) = p.listener(0xb0, PortSpace::Tcp);
    let conn = p.request(key);
    p.log.take();
    assert_eq!(p.destroy(listener), 0);
    let log = p.log.take();
    assert!(
        log.contains(&format!("end {conn}")) && log.contains(&format!("end {key}")),
        "{log:?}"
    );
    assert_eq!(p.ucma.waiting(p.fd), 0);
    // One that comes for a listener that is gone is refused.
    let late = p.request(key);
    assert!(p.log.take().contains(&format!("end {late}")));
}

#[test]
fn a_refusal_carries_reason_and_data() {
    let mut p = Program::new();
    let id = p.routed(1, PortSpace::Tcp);
    p.connect(id, b"").unwrap();
    p.report(
        1,
        CmEventKind::Rejected {
            conn: CONN,
            reason: RejectReason::CONSUMER,
            info: Vec::new(),
            private_data: vec![7; 148],
        },
    );
    let event = p.expect(EventType::Rejected);
    assert_eq!(event.status, 28);
    assert_eq!(conn_param(&event).private_data_len, 148);

    let (_, key) = p.listener(2, PortSpace::Tcp);
    let conn = p.request(key);
    let request = p.expect(EventType::ConnectRequest).id;
    p.log.take();
    let reject = |reason: u8| {
        let mut data = [0; 256];
        data[..2].copy_from_slice(b"no");
        Bytes::default().u32(request).raw(&[2, reason, 0, 0]).raw(&data)
    };
    assert_eq!(
        p.run(Cmd::Reject, reject(4)),
        Err(Errno::INVAL),
        "not a program's reason"
    );
    p.run(Cmd::Reject, reject(0)).unwrap();
    p.run(Cmd::Reject, reject(35)).unwrap();
    assert_eq!(
        p.log.take(),
        [format!("reject {conn} 28 no"), format!("reject {conn} 35 no")]
    );
}

#[test]
fn who_connects_too_early_asks_again() {
    let mut p = Program::new();
    let id = p.routed(1, PortSpace::Tcp);
    p.connect(id, b"").unwrap();
    let nobody = || CmEventKind::Rejected {
        conn: CONN,
        reason: RejectReason::INVALID_SERVICE_ID,
        info: Vec::new(),
        private_data: Vec::new(),
    };
    p.log.take();
    let before = Instant::now();
    p.report(1, nobody());
    assert!(p.event().is_none());
    let at = p.ucma.retry_due(before).expect("something is planned");
    assert_eq!(p.log.take(), [""; 0], "not at once");
    assert_eq!(p.ucma.retry_due(at), None);
    assert_eq!(p.log.take(), ["connect 10.0.0.9:7471 Rc  -> 2", "end 1"]);
    // The answer to the second question counts, and there is an end to asking.
    for last in 2..200 {
        let before = Instant::now();
        p.report(last, nobody());
        let Some(event) = p.event() else {
            let at = p.ucma.retry_due(before).expect("something is planned");
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            p.ucma.retry_due(at);
            continue;
        };
        assert_eq!((event.event, event.status), (EventType::Rejected as u32, 8));
        assert_eq!(p.ucma.retry_due(Instant::now()), None);
        return;
    }
    panic!("no end to asking");
}

#[test]
fn an_accept_that_fails_refuses_the_peer() {
    let mut p = Program::new();
    let (_, key) = p.listener(2, PortSpace::Tcp);
    let conn = p.request(key);
    let request = p.expect(EventType::ConnectRequest).id;
    p.log.take();
    p.ucma.backend.fail.set(Some(Errno::INVAL));
    assert_eq!(p.accept(request, 3, 1), Err(Errno::INVAL));
    assert_eq!(p.log.take(), [format!("reject {conn} 28 ")]);
}

#[test]
fn an_id_moves_to_another_channel_with_its_events() {
    let mut p = Program::new();
    let id = p.create(9, PortSpace::Tcp);
    p.resolve(id, "10.0.0.9:7471").unwrap();
    let other = p.ucma.open_channel().unwrap();
    let body = Bytes::default().u64(1).u32(id).u32(p.fd as u32);
    assert_eq!(p.run_on(other, Cmd::MigrateId, body).unwrap(), 0u32.to_ne_bytes());
    assert_eq!((p.ucma.waiting(p.fd), p.ucma.waiting(other)), (0, 1));
    assert_eq!(
        p.simple(Cmd::ResolveRoute, id, 0),
        Err(Errno::INVAL),
        "the old channel's no more"
    );
    assert_eq!(p.ucma.take_event(other).unwrap().uid, 9);
    p.ucma.close_channel(other);
    assert_eq!(
        p.simple(Cmd::ResolveRoute, id, 0),
        Err(Errno::NOENT),
        "it went with its channel"
    );
}
