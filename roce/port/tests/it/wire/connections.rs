//! The connection manager behind the port: what happens to queue pairs.

use roce_bth::Packet;
use roce_icrc::Flow;
use roce_port::{ListenId, Port, PortSpace};
use roce_verbs::{
    SendOp, WcStatus,
    provider::{RejectReason, VerbsError},
};

use super::*;

pub(crate) const SERVICE: u16 = 7000;

pub(crate) fn connect(a: &mut Host, b: &Host, qpn: Qpn, text: &[u8]) -> ConnId {
    let (local, remote) = ((a.addr, 0).into(), (b.addr, SERVICE).into());
    a.port.connect_qp(a.now, local, remote, qpn, params(text)).unwrap()
}

fn request(events: &[CmEventKind]) -> (ListenId, ConnId, Vec<u8>) {
    match events {
        [
            CmEventKind::Request {
                listener,
                conn,
                private_data,
                ..
            },
        ] => (*listener, *conn, private_data.clone()),
        other => panic!("not one request: {other:?}"),
    }
}

/// A connection up to the REP on the wire: hosts, queue pairs, connections.
fn accepted() -> (Host, Host, [Qpn; 2], [ConnId; 2]) {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let listener = b.port.cm_listen(&ListenArgs::new(None, SERVICE, 10)).unwrap();
    let (qa, qb) = (a.qp(), b.qp());
    let ca = connect(&mut a, &b, qa, b"hello");
    a.take().iter().for_each(|d| b.give(d));
    let (at_listener, cb, data) = request(&b.events());
    assert_eq!(at_listener, listener);
    assert_eq!(&data[..5], b"hello");
    b.port.accept_qp(b.now, cb, qb, params(b"welcome")).unwrap();
    assert_eq!(b.port.qp_state(qb), Some(QpState::Rts));
    (a, b, [qa, qb], [ca, cb])
}

fn established() -> (Host, Host, [Qpn; 2], [ConnId; 2]) {
    let (mut a, mut b, qps, conns) = accepted();
    exchange(&mut a, &mut b);
    match &a.events()[..] {
        [CmEventKind::Established { conn, private_data }] => {
            assert_eq!(*conn, conns[0]);
            assert_eq!(&private_data[..7], b"welcome");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(b.events()[..], [CmEventKind::Established { .. }]));
    (a, b, qps, conns)
}

#[test]
fn what_was_received_is_acknowledged_before_the_disconnect() {
    let (mut a, mut b, [qa, qb], [_, cb]) = established();
    acquaint(&mut a, &mut b, qa, qb);
    let (src, dst) = (a.region(3000), b.region(3000));
    b.receive(qb, 7, &dst);
    a.send(qa, 1, SendOp::Send, &src, 3000);
    a.take().iter().for_each(|d| b.give(d));
    assert!(b.completions()[0].is_ok());
    b.port.cm_disconnect(b.now, cb);
    exchange(&mut a, &mut b);
    assert_eq!(a.port.qp_state(qa), Some(QpState::Err));
    let done = a.completions();
    assert!(matches!(&done[..], [one] if one.is_ok()), "{done:?}");
}

#[test]
fn connected_queue_pairs_carry_data_and_disconnect_flushes_them() {
    let (mut a, mut b, [qa, qb], [ca, cb]) = established();
    let (src, dst) = (a.region(3000), b.region(3000));
    src.write(0, &noise(3000)).unwrap();
    b.receive(qb, 7, &dst);
    b.receive(qb, 8, &dst);
    a.send(qa, 1, SendOp::Send, &src, 3000);
    exchange(&mut a, &mut b);
    assert_eq!(contents(&dst), noise(3000));
    assert!(a.completions()[0].is_ok() && b.completions()[0].is_ok());

    a.port.cm_disconnect(a.now, ca);
    assert_eq!(a.port.qp_state(qa), Some(QpState::Err));
    exchange(&mut a, &mut b);
    assert_eq!(b.port.qp_state(qb), Some(QpState::Err));
    let flushed = b.completions();
    assert_eq!(
        (flushed.len(), flushed[0].wr_id, flushed[0].status),
        (1, 8, WcStatus::FlushError)
    );
    let timed_out = false;
    assert_eq!(a.events(), [CmEventKind::Disconnected { conn: ca, timed_out }]);
    assert_eq!(b.events(), [CmEventKind::Disconnected { conn: cb, timed_out }]);
    // A second time nothing happens.
    a.port.cm_disconnect(a.now, ca);
    assert!(a.take().is_empty());
    // The numbers of both queue pairs rest until the last packet must have died.
    for (host, conn) in [(&mut a, ca), (&mut b, cb)] {
        let mut left = None;
        while let Some(t) = host.port.poll_timeout() {
            host.now = t;
            host.port.handle_timeout(t);
            left = host.events().pop().or(left);
        }
        assert_eq!(left, Some(CmEventKind::TimewaitExit { conn }));
    }
}

/// The address of any other peer may be anybody's.
#[test]
fn a_dreq_goes_by_the_way_of_another_connection_only_if_that_stands() {
    let (mut cut_off, _, _, [gone, _]) = established();
    let farewell = |port: &Port, conn| port.cm().unwrap().farewell(conn);
    assert_eq!(farewell(&cut_off.port, gone), None);
    cut_off.port.cm_disconnect(cut_off.now, gone);
    let dreq = farewell(&cut_off.port, gone).unwrap();

    let (_a, mut b, _, [_, half_open]) = accepted();
    b.take();
    assert!(!b.port.cm_send_farewell(b.now, half_open, &dreq));
    assert!(b.take().is_empty());
    let (_a, mut b, _, [_, stands]) = established();
    assert!(b.port.cm_send_farewell(b.now, stands, &dreq));
    assert_eq!(b.take().len(), 1);
}

#[test]
fn the_first_packet_says_as_much_as_the_rtu() {
    let (mut a, mut b, [qa, qb], _) = accepted();
    let memory = b.region(64);
    b.receive(qb, 1, &memory);
    b.take().iter().for_each(|d| a.give(d));
    assert!(matches!(a.events()[..], [CmEventKind::Established { .. }]));
    let rtu = a.take();
    assert_eq!(rtu.len(), 1);
    let src = a.region(64);
    a.send(qa, 1, SendOp::Send, &src, 64);
    a.take().iter().for_each(|d| b.give(d));
    assert!(matches!(b.events()[..], [CmEventKind::Established { .. }]));
    assert_eq!(b.completions().len(), 1);
    // The RTU that was late changes nothing.
    b.give(&rtu[0]);
    assert!(b.events().is_empty());
}

/// A packet that is not where the queue pair expects one may be anybody's.
#[test]
fn a_packet_with_a_guessed_psn_does_not_say_as_much_as_the_rtu() {
    let (mut a, mut b, [qa, qb], _) = accepted();
    let memory = b.region(64);
    b.receive(qb, 1, &memory);
    b.take().iter().for_each(|d| a.give(d));
    let rtu = a.take();
    let src = a.region(64);
    a.send(qa, 1, SendOp::Send, &src, 64);
    let packet = a.take().remove(0);
    let psn = Packet::parse(&packet.bytes).unwrap().header.bth.psn;
    for ahead in [5, 100_000, 1 << 23, (1 << 24) - 5000] {
        let mut forged = packet.clone();
        forged.bytes[9..12].copy_from_slice(&psn.add(ahead).value().to_be_bytes()[1..]);
        let flow = Flow::try_from((forged.src, SocketAddr::new(forged.dst, ROCE))).unwrap();
        flow.seal(0, &mut forged.bytes);
        b.give(&forged);
        assert!(b.events().is_empty(), "{ahead} ahead");
    }
    assert_eq!(b.port.counters().icrc_errors, 0);
    b.give(&rtu[0]);
    assert!(matches!(b.events()[..], [CmEventKind::Established { .. }]));
    b.give(&packet);
    assert_eq!(b.completions().len(), 1);
}

#[test]
fn a_reject_carries_reason_and_data_and_fails_the_queue_pair() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    b.port.cm_listen(&ListenArgs::new(Some(b.addr), SERVICE, 10)).unwrap();
    let qa = a.qp();
    let ca = connect(&mut a, &b, qa, b"");
    let memory = a.region(64);
    a.receive(qa, 5, &memory);
    a.take().iter().for_each(|d| b.give(d));
    let (_, cb, _) = request(&b.events());
    b.port.cm_reject(b.now, cb, RejectReason::CONSUMER, b"full").unwrap();
    exchange(&mut a, &mut b);
    match &a.events()[..] {
        [
            CmEventKind::Rejected {
                conn,
                reason,
                private_data,
                ..
            },
        ] => {
            assert_eq!((*conn, *reason), (ca, RejectReason::CONSUMER));
            assert_eq!(&private_data[..4], b"full");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(a.port.qp_state(qa), Some(QpState::Err));
    assert_eq!(a.completions()[0].status, WcStatus::FlushError);
    assert!(b.events().is_empty());
}

#[test]
fn a_path_mtu_that_the_passive_side_can_not_do_is_not_the_connections() {
    let mut a = Host::with(1, |c| c.mtus = Mtu::B4096.into());
    let mut b = Host::new(2);
    b.port.cm_listen(&ListenArgs::new(None, SERVICE, 10)).unwrap();
    let (qa, qb) = (a.qp(), b.qp());
    connect(&mut a, &b, qa, b"");
    // The first request is refused, the second one has the MTU that the refusal names.
    exchange(&mut a, &mut b);
    let (_, cb, _) = request(&b.events());
    b.port.accept_qp(b.now, cb, qb, params(b"")).unwrap();
    exchange(&mut a, &mut b);
    for (host, qp) in [(&a, qa), (&b, qb)] {
        assert_eq!(host.port.query_qp(qp).unwrap().path_mtu, Some(Mtu::B1024));
    }
    assert!(matches!(a.events()[..], [CmEventKind::Established { .. }]));
    assert!(matches!(b.events()[..], [CmEventKind::Established { .. }]));
    // The other way round the smaller MTU is the connection's.
    let (mut a, mut b) = (b, a);
    b.port.cm_listen(&ListenArgs::new(None, SERVICE, 10)).unwrap();
    let (qa, qb) = (a.qp(), b.qp());
    connect(&mut a, &b, qa, b"");
    a.take().iter().for_each(|d| b.give(d));
    let (_, cb, _) = request(&b.events());
    b.port.accept_qp(b.now, cb, qb, params(b"")).unwrap();
    assert_eq!(b.port.query_qp(qb).unwrap().path_mtu, Some(Mtu::B1024));
}

#[test]
fn nobody_listening_is_told_at_once_and_silence_in_the_end() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let qa = a.qp();
    connect(&mut a, &b, qa, b"");
    exchange(&mut a, &mut b);
    match &a.events()[..] {
        [CmEventKind::Rejected { reason, .. }] => assert_eq!(*reason, RejectReason::INVALID_SERVICE_ID),
        other => panic!("{other:?}"),
    }
    let qa = a.qp();
    let conn = connect(&mut a, &b, qa, b"");
    let begin = a.now;
    let mut tries = 0;
    let events = loop {
        tries += a.take().len();
        let events = a.events();
        if !events.is_empty() {
            break events;
        }
        a.now = a.port.poll_timeout().unwrap();
        a.port.handle_timeout(a.now);
    };
    assert_eq!(
        events,
        [CmEventKind::Unreachable {
            conn,
            why: roce_verbs::provider::NoAnswer::Timeout
        }]
    );
    assert!(
        tries > 3 && a.now.saturating_since(begin).as_secs() <= 15,
        "{tries} tries"
    );
    assert_eq!(a.port.qp_state(qa), Some(QpState::Err));
}

#[test]
fn a_queue_pair_has_one_connection_at_a_time() {
    let (mut a, b, [qa, _], _) = established();
    let (local, remote) = ((a.addr, 0).into(), (b.addr, SERVICE).into());
    let again = a.port.connect_qp(a.now, local, remote, qa, params(b""));
    assert!(matches!(again, Err(VerbsError::Busy(_))), "{again:?}");
}

#[test]
fn destroying_a_connection_or_its_queue_pair_first_is_both_fine() {
    for conn_first in [true, false] {
        let (mut a, mut b, [qa, qb], [ca, _]) = established();
        if conn_first {
            a.port.cm_destroy(a.now, ca);
            a.port.destroy_qp(a.now, qa).unwrap();
        } else {
            a.port.destroy_qp(a.now, qa).unwrap();
            a.port.cm_destroy(a.now, ca);
        }
        exchange(&mut a, &mut b);
        assert_eq!(b.port.qp_state(qb), Some(QpState::Err), "the peer is told");
        assert!(matches!(b.events()[..], [CmEventKind::Disconnected { .. }]));
        assert!(a.events().is_empty(), "nothing comes after destroy");
    }
}

#[test]
fn a_listener_needs_an_address_of_ours_and_a_free_port() {
    let mut a = Host::new(1);
    assert!(matches!(
        a.port.cm_listen(&ListenArgs::new(Some(ip(9)), SERVICE, 1)),
        Err(VerbsError::Address(_))
    ));
    let id = a.port.cm_listen(&ListenArgs::new(Some(a.addr), SERVICE, 1)).unwrap();
    assert!(a.port.cm_listen(&ListenArgs::new(Some(a.addr), SERVICE, 1)).is_err());
    a.port.cm_unlisten(id);
    a.port.cm_listen(&ListenArgs::new(Some(a.addr), SERVICE, 1)).unwrap();
}

#[test]
fn queue_pairs_that_are_not_connected_are_refused_and_others_say_what_they_are() {
    use roce_verbs::provider::VerbsError;
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let local = SocketAddr::new(a.addr, 0);
    let remote = SocketAddr::new(b.addr, SERVICE);
    let ud = QpInit {
        qp_type: QpType::Ud,
        ..a.init()
    };
    let ud = a.port.create_qp(ud).unwrap();
    let refused = a.port.connect_qp(a.now, local, remote, ud, params(b""));
    assert!(matches!(refused, Err(VerbsError::Invalid(_))), "{refused:?}");
    // An unreliable connection: the request says so, and the queue pair comes up with what it takes.
    let uc = |h: &Host| QpInit {
        qp_type: QpType::Uc,
        ..h.init()
    };
    let (qa, qb) = (uc(&a), uc(&b));
    let (qa, qb) = (a.port.create_qp(qa).unwrap(), b.port.create_qp(qb).unwrap());
    b.port
        .cm_listen(&ListenArgs {
            addr: None,
            space: PortSpace::Tcp,
            port: SERVICE,
            transport: Some(roce_port::ConnTransport::Uc),
            backlog: 1,
        })
        .unwrap();
    a.port.connect_qp(a.now, local, remote, qa, params(b"uc")).unwrap();
    exchange(&mut a, &mut b);
    let events = b.events();
    let [CmEventKind::Request { conn, path, .. }] = events.as_slice() else {
        panic!("{events:?}")
    };
    assert_eq!((path.transport, path.qpn), (roce_port::ConnTransport::Uc, qa));
    let args = roce_port::AcceptArgs::new(qb, Psn::new(5), params(b""));
    b.port.cm_accept(b.now, *conn, &args).unwrap();
    exchange(&mut a, &mut b);
    assert!(matches!(a.events().as_slice(), [CmEventKind::Established { .. }]));
    assert_eq!(a.port.qp_state(qa), Some(QpState::Rts));
    assert!(matches!(b.events().as_slice(), [CmEventKind::Established { .. }]));
}
