//! The connection manager for programs that bring their queue pairs up themselves, and datagram services.

use std::net::SocketAddr;

use crate::common::*;
use roce::{
    AcceptArgs, CmEvent, CmEventKind, ConnParams, ConnTransport, ConnectArgs, Device, EventChannel, Id, ListenArgs,
    LocalQp, Mtu, Payload, PortSpace, Psn, QKey, Qp, QpAttr, QpState, Qpn, RejectReason, RemoteQp, ResolveArgs, SendOp,
    SidrAnswer,
};

const PORT: u16 = 7001;

fn event(cm: &EventChannel) -> CmEvent {
    cm.wait(Some(TIMEOUT)).unwrap().expect("an event")
}

fn listen(cm: &EventChannel, space: PortSpace) -> Id {
    cm.listen(&ListenArgs {
        addr: None,
        space,
        port: PORT,
        transport: (space == PortSpace::Tcp).then_some(ConnTransport::Rc),
        backlog: 8,
    })
    .unwrap()
}

fn connect_args(a: &Side, b: &Side, qp: &Qp, psn: u32) -> ConnectArgs {
    ConnectArgs {
        params: ConnParams {
            private_data: b"question".to_vec(),
            responder_resources: 3,
            initiator_depth: 5,
            ..ConnParams::default()
        },
        qp: LocalQp {
            flow_control: true,
            ..LocalQp::new(qp.qpn(), Psn::new(psn))
        },
        ..ConnectArgs::new(
            SocketAddr::new(a.addr(), 0),
            SocketAddr::new(b.addr(), PORT),
            qp.qpn(),
            Psn::new(psn),
            Mtu::B1024,
        )
    }
}

/// To RTS, as librdmacm does it with what `rdma_init_qp_attr` gives.
fn bring_up(qp: &Qp, path: &RemoteQp, rq_psn: u32) {
    let way = QpAttr {
        rq_psn: Some(Psn::new(rq_psn)),
        sq_psn: Some(path.sq_psn),
        max_dest_rd_atomic: Some(path.responder_resources),
        max_rd_atomic: Some(path.initiator_depth),
        timeout: Some(path.timeout),
        retry_cnt: Some(path.retry_cnt),
        rnr_retry: Some(path.rnr_retry),
        ..QpAttr::to_rts(path.av, path.mtu, path.qpn)
    };
    for to in [QpState::Rtr, QpState::Rts] {
        qp.modify(&way.step(qp.qp_type(), to)).unwrap();
    }
}

#[test]
fn queue_pairs_are_brought_up_by_the_program() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let (ca, cb) = (
        a.device.create_cm_channel().unwrap(),
        b.device.create_cm_channel().unwrap(),
    );
    let listener = listen(&cb, PortSpace::Tcp);
    let (qa, qb) = (a.qp(), b.qp());
    let ia = ca.connect(&connect_args(&a, &b, &qa, 111)).unwrap();

    let asked = event(&cb);
    assert_eq!(asked.listener, Some(listener.handle()));
    let ib = asked.id;
    let CmEventKind::Request {
        private_data,
        path,
        local,
        remote,
        ..
    } = asked.kind
    else {
        panic!("not a request: {:?}", asked.kind)
    };
    assert_eq!(&private_data[..8], b"question");
    assert_eq!((local, remote.ip()), (SocketAddr::new(b.addr(), PORT), a.addr()));
    // What the peer answers is what we may ask, and the other way round.
    assert_eq!((path.initiator_depth, path.responder_resources), (3, 5));
    assert_eq!(
        (path.qpn, path.sq_psn, path.flow_control, path.srq),
        (qa.qpn(), Psn::new(111), true, false)
    );
    bring_up(&qb, &path, 222);
    let params = ConnParams {
        private_data: b"answer".to_vec(),
        responder_resources: 5,
        initiator_depth: 3,
        ..ConnParams::default()
    };
    ib.accept_with(&AcceptArgs::new(qb.qpn(), Psn::new(222), params))
        .unwrap();

    let answered = event(&ca);
    assert_eq!(answered.id.handle(), ia.handle());
    let CmEventKind::Reply { path, private_data, .. } = answered.kind else {
        panic!("not a reply: {:?}", answered.kind)
    };
    assert_eq!(
        (&private_data[..6], path.qpn, path.sq_psn),
        (&b"answer"[..], qb.qpn(), Psn::new(222))
    );
    bring_up(&qa, &path, 111);
    ia.establish().unwrap();
    let done = event(&cb);
    assert!(matches!(done.kind, CmEventKind::Established { .. }) && done.id.handle() == ib.handle());

    let mb = b.mr(64);
    recv(&qb, 1, &[mb.sge(0, 64)]);
    post(&qa, 2, SendOp::Send, Payload::Inline(b"connected"));
    a.good(1);
    b.good(1);
    assert_eq!(contents(&mb, 0, 9), b"connected");

    // Queue pairs are the program's: disconnecting leaves them as they are.
    ia.disconnect().unwrap();
    assert!(matches!(event(&cb).kind, CmEventKind::Disconnected { .. }));
    assert!(matches!(event(&ca).kind, CmEventKind::Disconnected { .. }));
    assert_eq!((qa.state().unwrap(), qb.state().unwrap()), (QpState::Rts, QpState::Rts));
}

#[test]
fn refusals_reach_the_other_side_with_reason_and_data() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let (ca, cb) = (
        a.device.create_cm_channel().unwrap(),
        b.device.create_cm_channel().unwrap(),
    );
    let _listener = listen(&cb, PortSpace::Tcp);
    let (qa, qb) = (a.qp(), b.qp());
    // The passive side refuses the request.
    let ia = ca.connect(&connect_args(&a, &b, &qa, 1)).unwrap();
    let ib = event(&cb).id;
    ib.reject_with(RejectReason::CONSUMER, b"no").unwrap();
    let CmEventKind::Rejected {
        reason, private_data, ..
    } = event(&ca).kind
    else {
        panic!("not rejected")
    };
    assert_eq!((reason, &private_data[..2]), (RejectReason::CONSUMER, &b"no"[..]));
    drop((ia, ib));
    // The active side refuses the reply.
    let ia = ca.connect(&connect_args(&a, &b, &qa, 2)).unwrap();
    let ib = event(&cb).id;
    ib.accept_with(&AcceptArgs::new(qb.qpn(), Psn::new(3), ConnParams::default()))
        .unwrap();
    assert!(matches!(event(&ca).kind, CmEventKind::Reply { .. }));
    ia.reject_with(RejectReason::CONSUMER, b"after all").unwrap();
    let CmEventKind::Rejected { private_data, .. } = event(&cb).kind else {
        panic!("not rejected")
    };
    assert_eq!(&private_data[..9], b"after all");
    assert!(ia.establish().is_err());
    // Nobody listens in another port space.
    let other = ConnectArgs {
        space: PortSpace::Ib,
        ..connect_args(&a, &b, &qa, 4)
    };
    let ia = ca.connect(&other).unwrap();
    let told = event(&ca);
    assert_eq!(told.id.handle(), ia.handle());
    let CmEventKind::Rejected { reason, .. } = told.kind else {
        panic!("not rejected")
    };
    assert_eq!(reason, RejectReason::INVALID_SERVICE_ID);
}

#[test]
fn a_datagram_service_is_resolved() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let (ca, cb) = (
        a.device.create_cm_channel().unwrap(),
        b.device.create_cm_channel().unwrap(),
    );
    let _listener = listen(&cb, PortSpace::Udp);
    let ask = || {
        ca.resolve(&ResolveArgs {
            local: SocketAddr::new(a.addr(), 0),
            remote: SocketAddr::new(b.addr(), PORT),
            space: PortSpace::Udp,
            private_data: b"which one".to_vec(),
        })
        .unwrap()
    };
    let asked = ask();
    let request = event(&cb);
    let CmEventKind::SidrRequest {
        private_data, space, ..
    } = &request.kind
    else {
        panic!("not a question: {:?}", request.kind)
    };
    assert_eq!((&private_data[..9], *space), (&b"which one"[..], PortSpace::Udp));
    let answer = SidrAnswer {
        status: 0,
        qpn: Qpn::new(0x1234),
        qkey: QKey(0x0123_4567),
        private_data: b"this one".to_vec(),
    };
    request.id.answer(&answer).unwrap();
    let told = event(&ca);
    assert_eq!(told.id.handle(), asked.handle());
    let CmEventKind::Resolved {
        status,
        qpn,
        qkey,
        private_data,
        ..
    } = told.kind
    else {
        panic!("not resolved: {:?}", told.kind)
    };
    assert_eq!((status, qpn, qkey), (0, Qpn::new(0x1234), QKey(0x0123_4567)));
    assert_eq!(&private_data[..8], b"this one");
    // A question that is let go of is refused.
    let _asked = ask();
    drop(event(&cb));
    assert!(matches!(event(&ca).kind, CmEventKind::Resolved { status: 2, .. }));
}

#[test]
fn a_listener_that_goes_leaves_the_port_to_others() {
    let device: Device = open();
    let cm = device.create_cm_channel().unwrap();
    let first = listen(&cm, PortSpace::Udp);
    let again = ListenArgs {
        addr: None,
        space: PortSpace::Udp,
        port: PORT,
        transport: None,
        backlog: 1,
    };
    assert!(cm.listen(&again).is_err());
    drop(first);
    cm.listen(&again).unwrap();
}
