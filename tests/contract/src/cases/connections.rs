//! Connections, and how they do not come about.

use std::net::{IpAddr, SocketAddr};

use roce_verbs::{
    Payload, SendOp,
    provider::{CmKind, CmRef, ConnParams, Event, QpId, RejectReason, VerbsError},
};

use super::cases;
use crate::{Bed, Side};

cases![
    connects_with_private_data,
    a_request_is_refused_with_private_data,
    nobody_listens,
    a_listener_that_goes_refuses_what_waits,
    a_request_that_is_destroyed_is_refused,
    a_disconnect_is_told_to_both,
    destroying_a_connection_tells_the_peer,
    nothing_is_told_of_what_was_destroyed,
    what_is_not_resolved_does_not_connect,
    private_data_has_limits,
    an_address_that_is_not_ours,
    a_port_is_taken_once,
    a_listener_at_all_addresses,
    a_way_without_a_source_address,
    several_connections_by_one_listener,
];

fn rejected(bed: &mut Bed, id: CmRef) -> (RejectReason, Vec<u8>) {
    bed.cm_event(Side::A, id, "a refusal", |kind| match kind {
        CmKind::Rejected { reason, private_data } => Some((*reason, private_data.clone())),
        _ => None,
    })
}

fn disconnected(bed: &mut Bed, side: Side, id: CmRef) {
    bed.cm_event(side, id, "the end", |kind| {
        matches!(kind, CmKind::Disconnected).then_some(())
    });
}

/// A asks B for a connection.
fn ask(bed: &mut Bed, to: SocketAddr, private_data: &[u8]) -> (CmRef, QpId) {
    let id = bed.resolve(to);
    let qp = bed.qp(Side::A);
    let params = ConnParams {
        private_data: private_data.to_vec(),
        ..ConnParams::default()
    };
    bed.provider(Side::A).cm_connect(id, qp, &params).expect("a request");
    (id, qp)
}

fn connects_with_private_data(bed: &mut Bed) {
    let (listener, to) = bed.listen();
    let id = bed.resolve(to);
    let qp = bed.qp(Side::A);
    let asks = ConnParams {
        private_data: b"who is there".to_vec(),
        responder_resources: 3,
        initiator_depth: 5,
        ..ConnParams::default()
    };
    bed.provider(Side::A).cm_connect(id, qp, &asks).expect("a request");
    let of_b = bed.at(Side::B).device;
    let (theirs, data, depths) = bed.wait("a request", |bed| {
        let events = &mut bed.at(Side::B).events;
        let is = |event: &Event| match event {
            Event::Cm {
                id,
                kind:
                    CmKind::ConnectRequest {
                        listener: at,
                        device,
                        private_data,
                        initiator_depth,
                        responder_resources,
                    },
            } if (*at, *device) == (listener, of_b) => {
                Some((*id, private_data.clone(), (*initiator_depth, *responder_resources)))
            }
            _ => None,
        };
        events.pop().as_ref().and_then(is)
    });
    assert_eq!(&data[..12], b"who is there");
    assert!(data[12..].iter().all(|b| *b == 0), "the rest is padding: {data:?}");
    assert_eq!(depths, (3, 5), "READs that A answers, and that it sends");
    let (local, remote) = bed.provider(Side::B).cm_addrs(theirs).expect("its addresses");
    let of_a = bed.addr(Side::A, 0).ip();
    assert_eq!((local, remote.map(|at| at.ip())), (to, Some(of_a)));
    let their_qp = bed.qp(Side::B);
    let accepts = ConnParams {
        private_data: b"me".to_vec(),
        ..ConnParams::default()
    };
    bed.provider(Side::B)
        .cm_accept(theirs, their_qp, &accepts)
        .expect("an accept");
    assert_eq!(&bed.established(Side::A, id)[..2], b"me");
    bed.established(Side::B, theirs);
    let (local, remote) = bed.provider(Side::A).cm_addrs(id).expect("its addresses");
    assert_eq!((local.ip(), remote), (of_a, Some(to)));
    assert!(
        bed.provider(Side::B).cm_accept(theirs, their_qp, &accepts).is_err(),
        "it is accepted"
    );
}

fn a_request_is_refused_with_private_data(bed: &mut Bed) {
    let (listener, to) = bed.listen();
    let (id, qp) = ask(bed, to, b"please");
    let theirs = bed.request(listener);
    let refused = bed.provider(Side::B).cm_reject(theirs, RejectReason::CONSUMER, b"no");
    refused.expect("a refusal");
    let (reason, data) = rejected(bed, id);
    assert_eq!((reason, &data[..2]), (RejectReason::CONSUMER, &b"no"[..]));
    let b = bed.provider(Side::B);
    assert!(b.cm_addrs(theirs).is_none(), "the refused connection is gone");
    assert!(b.cm_reject(theirs, RejectReason::CONSUMER, b"no").is_err());
    // What was refused ends as any other.
    bed.provider(Side::A).drain(qp);
    bed.drained(Side::A, qp);
    bed.provider(Side::A).destroy_qp(qp);
    bed.provider(Side::A).cm_destroy(id);
    // And the listener listens on.
    let (again, _) = ask(bed, to, b"again");
    let theirs = bed.request(listener);
    assert_ne!(again, id);
    bed.provider(Side::B).cm_destroy(theirs);
    rejected(bed, again);
}

fn nobody_listens(bed: &mut Bed) {
    let (listener, to) = bed.listen();
    bed.provider(Side::B).cm_destroy(listener);
    let (id, _) = ask(bed, to, b"");
    assert_eq!(rejected(bed, id).0, RejectReason::INVALID_SERVICE_ID);
}

fn a_listener_that_goes_refuses_what_waits(bed: &mut Bed) {
    let (listener, to) = bed.listen();
    let (id, _) = ask(bed, to, b"");
    // It is there, or on its way; what was not told is not told any more.
    bed.turns_unseen(3);
    bed.provider(Side::B).cm_destroy(listener);
    rejected(bed, id);
    let told = &bed.at(Side::B).events;
    assert!(told.is_empty(), "{told:?}");
}

fn a_request_that_is_destroyed_is_refused(bed: &mut Bed) {
    let (listener, to) = bed.listen();
    let (id, _) = ask(bed, to, b"");
    let theirs = bed.request(listener);
    bed.provider(Side::B).cm_destroy(theirs);
    assert_eq!(rejected(bed, id).0, RejectReason::CONSUMER);
}

fn a_disconnect_is_told_to_both(bed: &mut Bed) {
    let link = bed.connect();
    bed.provider(Side::A).cm_disconnect(link.cm(Side::A));
    bed.provider(Side::A).cm_disconnect(link.cm(Side::A));
    for side in Side::ALL {
        disconnected(bed, side, link.cm(side));
    }
    bed.turns(10);
    for side in Side::ALL {
        let again = bed.at(side).events.iter().any(|event| {
            matches!(
                event,
                Event::Cm {
                    kind: CmKind::Disconnected,
                    ..
                }
            )
        });
        assert!(!again, "it is told once");
    }
    bed.give_back(link);
}

fn destroying_a_connection_tells_the_peer(bed: &mut Bed) {
    let link = bed.connect();
    bed.provider(Side::A).cm_destroy(link.cm(Side::A));
    assert!(bed.provider(Side::A).cm_addrs(link.cm(Side::A)).is_none());
    disconnected(bed, Side::B, link.cm(Side::B));
    bed.give_back(link);
}

fn nothing_is_told_of_what_was_destroyed(bed: &mut Bed) {
    let link = bed.connect();
    bed.provider(Side::A).cm_disconnect(link.cm(Side::A));
    bed.provider(Side::A).cm_destroy(link.cm(Side::A));
    bed.at(Side::A).events.clear();
    disconnected(bed, Side::B, link.cm(Side::B));
    bed.turns(20);
    let of = link.cm(Side::A);
    let told = |event: &Event| matches!(event, Event::Cm { id, .. } if *id == of);
    let events = &bed.at(Side::A).events;
    assert!(!events.iter().any(told), "{events:?}");
    bed.give_back(link);
}

fn what_is_not_resolved_does_not_connect(bed: &mut Bed) {
    let link = bed.connect();
    let qp = bed.qp(Side::A);
    let params = ConnParams::default();
    let a = bed.provider(Side::A);
    // One that stands, and one that is nobody's.
    for id in [link.cm(Side::A), CmRef(0xfff_fffff)] {
        assert!(a.cm_connect(id, qp, &params).is_err());
        assert!(a.cm_accept(id, qp, &params).is_err());
        assert!(a.cm_reject(id, RejectReason::CONSUMER, &[]).is_err());
    }
    let (listener, to) = bed.listen();
    assert!(bed.provider(Side::B).cm_accept(listener, qp, &params).is_err());
    let id = bed.resolve(to);
    let gone = bed.qp(Side::A);
    bed.provider(Side::A).destroy_qp(gone);
    assert!(bed.provider(Side::A).cm_connect(id, gone, &params).is_err());
    // That has not hurt it.
    bed.provider(Side::A).cm_connect(id, qp, &params).expect("a request");
    bed.request(listener);
}

fn private_data_has_limits(bed: &mut Bed) {
    let with = |len: usize| ConnParams {
        private_data: vec![7; len],
        ..ConnParams::default()
    };
    let (listener, to) = bed.listen();
    for (connect, accept) in [(57, 0), (56, 196)] {
        let id = bed.resolve(to);
        let qp = bed.qp(Side::A);
        let asked = bed.provider(Side::A).cm_connect(id, qp, &with(connect));
        if connect == 57 {
            assert!(matches!(asked, Err(VerbsError::Invalid(_))), "{asked:?}");
            continue;
        }
        asked.expect("a request");
        let theirs = bed.request(listener);
        let their_qp = bed.qp(Side::B);
        let b = bed.provider(Side::B);
        assert!(b.cm_reject(theirs, RejectReason::CONSUMER, &[7; 149]).is_err());
        assert!(b.cm_accept(theirs, their_qp, &with(197)).is_err());
        b.cm_accept(theirs, their_qp, &with(accept)).expect("an accept");
        assert_eq!(bed.established(Side::A, id), vec![7; accept]);
    }
}

fn an_address_that_is_not_ours(bed: &mut Bed) {
    // 203.0.113.0/24 is for documentation.
    let foreign = IpAddr::from([203, 0, 113, 7]);
    let at = SocketAddr::new(foreign, 7471);
    assert!(bed.provider(Side::B).cm_listen(at, 1).is_err());
    let (_, to) = bed.listen();
    let found = bed.provider(Side::A).cm_resolve(Some(foreign), to);
    // A connection manager may find it out later.
    if let Ok(id) = found {
        bed.cm_event(Side::A, id, "no way", |kind| {
            matches!(kind, CmKind::Unreachable(_) | CmKind::ConnectError(_)).then_some(())
        });
    }
}

fn a_port_is_taken_once(bed: &mut Bed) {
    let (listener, at) = bed.listen();
    let second = bed.provider(Side::B).cm_listen(at, 1);
    assert!(matches!(second, Err(VerbsError::Address(_))), "{second:?}");
    bed.provider(Side::B).cm_destroy(listener);
    bed.provider(Side::B).cm_listen(at, 1).expect("it is free again");
}

fn a_listener_at_all_addresses(bed: &mut Bed) {
    let any = match bed.addr(Side::B, 0).ip() {
        IpAddr::V4(_) => IpAddr::from([0; 4]),
        IpAddr::V6(_) => IpAddr::from([0; 16]),
    };
    let b = bed.provider(Side::B);
    let listener = b.cm_listen(SocketAddr::new(any, 0), 4).expect("a listener");
    let (local, remote) = b.cm_addrs(listener).expect("its address");
    assert_eq!((local.ip(), remote), (any, None));
    let to = bed.addr(Side::B, local.port());
    assert_ne!(to.port(), 0);
    let taken = bed.provider(Side::B).cm_listen(to, 1);
    assert!(matches!(taken, Err(VerbsError::Address(_))), "{taken:?}");
    let (id, _) = ask(bed, to, b"");
    let theirs = bed.request(listener);
    let their_qp = bed.qp(Side::B);
    let b = bed.provider(Side::B);
    b.cm_accept(theirs, their_qp, &ConnParams::default())
        .expect("an accept");
    assert_eq!(b.cm_addrs(theirs).map(|(local, _)| local), Some(to));
    bed.established(Side::A, id);
    bed.established(Side::B, theirs);
    bed.provider(Side::B).cm_destroy(listener);
    let (id, _) = ask(bed, to, b"");
    assert_eq!(rejected(bed, id).0, RejectReason::INVALID_SERVICE_ID);
}

fn a_way_without_a_source_address(bed: &mut Bed) {
    let (_, to) = bed.listen();
    let a = bed.provider(Side::A);
    let id = a.cm_resolve(None, to).expect("a way");
    let device = bed.cm_event(Side::A, id, "the way", |kind| match kind {
        CmKind::Resolved { device } => Some(*device),
        _ => None,
    });
    let a = bed.provider(Side::A);
    let (local, remote) = a.cm_addrs(id).expect("its addresses");
    let of = &a.devices()[usize::from(device.0)].addrs;
    assert!(of.contains(&local.ip()), "{local} is none of {of:?}");
    assert_eq!(remote, Some(to));
}

fn several_connections_by_one_listener(bed: &mut Bed) {
    let (listener, to) = bed.listen();
    let mut made = Vec::new();
    for n in 0..4u8 {
        let (id, qp) = ask(bed, to, &[n]);
        let theirs = bed.request(listener);
        let their_qp = bed.qp(Side::B);
        let b = bed.provider(Side::B);
        b.cm_accept(theirs, their_qp, &ConnParams::default())
            .expect("an accept");
        bed.established(Side::A, id);
        bed.established(Side::B, theirs);
        made.push((id, qp, theirs, their_qp));
    }
    for (n, (id, qp, _, their_qp)) in made.iter().enumerate() {
        let text = [b'a' + n as u8; 4];
        let to = bed.remote(Side::B, n * 4);
        bed.post(Side::A, *qp, 1, SendOp::Write(to), Payload::Inline(&text));
        bed.success(Side::A, *qp, 1);
        assert_eq!(bed.bytes(Side::B, n * 4, 4), text);
        let numbers = [bed.provider(Side::A).qpn(*qp), bed.provider(Side::B).qpn(*their_qp)];
        assert!(numbers.iter().all(Option::is_some));
        bed.provider(Side::A).cm_disconnect(*id);
    }
    for (id, _, theirs, _) in made {
        disconnected(bed, Side::A, id);
        disconnected(bed, Side::B, theirs);
    }
}
