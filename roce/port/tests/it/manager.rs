//! The manager, case by case.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use crate::common::{CLIENT, SERVER, World, error, ms, pair::*};
use roce_port::cm::{
    CmConfig, ConnId, ConnectArgs, DropReason, Event, Manager, OutMad, RejectReason,
    cma::CmaHeader,
    mad::{Attribute, Mad, Message, Rej, Req, Subject, Transport},
    state::State,
};
use roce_verbs::{Mtu, Qpn, provider::VerbsError};

/// Client and server learn of a disconnect that was answered.
#[track_caller]
fn both_are_disconnected(w: &mut World, client: ConnId, server: ConnId) {
    for (side, conn) in [(C, client), (S, server)] {
        let told = Event::Disconnected { conn, timed_out: false };
        assert_eq!(w.m[side].poll_event(), Some(told));
    }
}

/// Event of a server whose RTU has arrived.
fn rtu_arrived(conn: ConnId) -> Event {
    let private_data = vec![];
    Event::Established { conn, private_data }
}

#[test]
fn queue_pairs_are_known_once_the_peer_has_named_its_own() {
    let (mut w, _) = listening();
    let (c, s) = requested(&mut w, 0x11);
    let numbers = |m: &Manager, conn| m.queue_pairs(conn).map(|(ours, peer)| (ours, peer.qpn));
    assert_eq!(numbers(&w.m[C], c), None);
    assert_eq!(numbers(&w.m[S], s), Some((Qpn::new(0), Qpn::new(0x11))));
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    w.settle();
    assert_eq!(numbers(&w.m[S], s), Some((Qpn::new(0x22), Qpn::new(0x11))));
    assert_eq!(numbers(&w.m[C], c), Some((Qpn::new(0x11), Qpn::new(0x22))));

    // The REP is lost. The DREQ names no queue pair of its sender.
    let (c, s) = requested(&mut w, 0x12);
    w.m[S].accept(w.now, s, &accept_args(0x23)).unwrap();
    while w.m[S].poll_mad().is_some() {}
    w.m[S].disconnect(w.now, s);
    w.settle();
    assert_eq!(w.m[C].state(c), Some(State::Timewait));
    assert_eq!(numbers(&w.m[C], c), None);
}

#[test]
fn connect_accept_disconnect() {
    let (mut w, listener) = listening();
    let mut a = args(0x11);
    a.params.private_data = b"hello".to_vec();
    (a.params.responder_resources, a.params.initiator_depth) = (3, 20);
    let c = w.m[C].connect(w.now, &a).unwrap();
    w.settle();
    let Some(Event::Request {
        listener: l,
        conn: s,
        local,
        remote,
        private_data,
        path,
    }) = w.m[S].poll_event()
    else {
        panic!("no request")
    };
    assert_eq!((l, local, remote), (listener, a.remote, a.local));
    assert_eq!((private_data.len(), &private_data[..6]), (56, &b"hello\0"[..]));
    assert_eq!((path.responder_resources, path.initiator_depth), (20, 3));
    assert_eq!(
        (path.qpn, path.sq_psn, path.mtu),
        (a.qp.qpn, a.qp.start_psn, Mtu::B1024)
    );

    let mut reply = accept_args(0x22);
    reply.params.private_data = vec![9; 196];
    reply.params.initiator_depth = 16;
    reply.params.responder_resources = 16;
    let negotiated = w.m[S].accept_path(s, &reply.params).unwrap();
    assert_eq!((negotiated.responder_resources, negotiated.initiator_depth), (16, 3));
    w.m[S].accept(w.now, s, &reply).unwrap();
    w.settle();
    match w.m[C].poll_event() {
        Some(Event::Reply {
            conn,
            path,
            private_data,
        }) => {
            assert_eq!((conn, path.qpn, path.sq_psn), (c, reply.qp.qpn, reply.qp.start_psn));
            // The client answers what the server sends, and the other way round.
            assert_eq!((path.responder_resources, path.initiator_depth), (3, 16));
            assert_eq!(private_data, vec![9; 196]);
        }
        other => panic!("{other:?}"),
    }
    w.m[C].qp_ready(w.now, c).unwrap();
    w.settle();
    assert_eq!(w.m[S].poll_event(), Some(rtu_arrived(s)));
    assert_eq!(
        (w.m[C].next_timeout(), w.m[S].next_timeout()),
        (None, None),
        "nothing to wait for"
    );

    w.m[S].disconnect(w.now, s);
    w.settle();
    both_are_disconnected(&mut w, c, s);
    w.run_dry();
    assert_eq!(w.m[C].poll_event(), Some(Event::TimewaitExit { conn: c }));
    assert_eq!(w.m[S].poll_event(), Some(Event::TimewaitExit { conn: s }));
    w.m[C].destroy(w.now, c);
    w.m[S].destroy(w.now, s);
    assert_eq!((w.m[C].usage().connections, w.m[S].usage().connections), (0, 0));
    assert_eq!(kinds_from(&w, C), [Attribute::Req, Attribute::Rtu, Attribute::Drep]);
    assert_eq!(kinds_from(&w, S), [Attribute::Rep, Attribute::Dreq]);
}

#[test]
fn unanswered_request_is_repeated_and_given_up() {
    let mut w = world();
    w.faults.loss = 100;
    let start = w.now;
    let c = connect(&mut w, 0x11);
    w.run_dry();
    assert_eq!(w.m[C].poll_event(), Some(unreachable(c)));
    let n = w.m[C].counters().retried(Attribute::Req);
    // 0.25, 0.5, 1, 2, 4 s and what is left of the 10 s.
    assert_eq!(n, 5);
    let rej = last_rej(&w);
    assert_eq!((rej.reason, rej.subject, rej.info_length), (4, Subject::Other, 8));
    assert_eq!(rej.info[..8], 0xfe00_0000_0000_0001u64.to_be_bytes());
    // The end is the last timer: the REJ is kept for 2 * 4.3 s.
    assert!(w.now.saturating_since(start) < Duration::from_secs(20));
    w.m[C].destroy(w.now, c);
    assert_eq!(w.m[C].usage().connections, 0);
}

/// A kernel that makes what a connection needs before it answers may take longer than the manager is patient by itself.
#[test]
fn who_connects_says_how_long_to_wait() {
    let (mut w, _) = listening();
    let mut a = args(0x11);
    a.params.timeout = Some(Duration::from_secs(30));
    w.faults.loss = 100;
    let c = w.m[C].connect(w.now, &a).unwrap();
    w.run_for(Duration::from_secs(25));
    assert_eq!(w.m[C].poll_event(), None);
    w.faults.loss = 0;
    w.run_for(Duration::from_secs(4));
    let (s, _) = request(&mut w);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    w.settle();
    assert!(matches!(w.m[C].poll_event(), Some(Event::Reply { conn, .. }) if conn == c));

    w.faults.loss = 100;
    let start = w.now;
    a.qp.qpn = Qpn::new(0x12);
    let c = w.m[C].connect(w.now, &a).unwrap();
    while w.m[C].state(c) == Some(State::ReqSent) {
        let at = w.next_event().unwrap();
        w.advance(at);
    }
    assert_eq!(w.now.saturating_since(start), Duration::from_secs(30));
}

#[test]
fn retries_as_the_kernel_times_them() {
    let mut w = World::new(1, |guid| CmConfig {
        first_retry: Duration::from_secs(60),
        give_up: Duration::from_secs(3600),
        ..config(guid)
    });
    w.faults.loss = 100;
    let c = connect(&mut w, 0x11);
    let start = w.now;
    w.pump();
    let at = w.m[C].next_timeout().unwrap();
    // 4.096 us * (2^20 + 2 * 2^18).
    assert_eq!(
        at.saturating_since(start),
        Duration::from_nanos(4096 * ((1 << 20) + (2 << 18)))
    );
    while w.m[C].state(c) == Some(State::ReqSent) {
        let at = w.next_event().unwrap();
        w.advance(at);
    }
    assert_eq!(w.m[C].counters().retried(Attribute::Req), 15);
    assert_eq!(w.m[C].counters().timeouts, 1);
}

#[test]
fn duplicate_request_gets_an_mra_while_the_consumer_decides() {
    let (mut w, _) = listening();
    let (c, s) = requested(&mut w, 0x11);
    let req = last_sent(&w, Attribute::Req);
    assert_eq!(kinds_from(&w, S), []);
    again(&mut w, req);
    assert_eq!(kinds_from(&w, S), [Attribute::Mra]);
    assert_eq!(w.m[S].poll_event(), None, "one request only");
    assert_eq!(w.m[C].state(c), Some(State::ReqExtended));
    // 2^24 and 2^19 times 4.096 us.
    let granted = Duration::from_nanos(4096 * ((1 << 24) + (1 << 19)));
    let left = w.m[C].next_timeout().unwrap().saturating_since(w.now);
    assert!(left <= granted && left > granted - ms(10), "{left:?}");
    // A second one while the first runs changes nothing.
    let timer = w.m[C].next_timeout();
    w.now = w.now + ms(500);
    let mra = last_sent(&w, Attribute::Mra);
    again(&mut w, mra);
    assert_eq!(w.m[C].next_timeout(), timer);
    assert_eq!(w.m[C].counters().extended, 1);
    // The consumer may take longer than the whole give-up time.
    w.run_for(Duration::from_secs(200));
    assert_eq!(w.m[C].state(c), Some(State::ReqExtended));
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    w.settle();
    assert!(matches!(w.m[C].poll_event(), Some(Event::Reply { .. })));
}

#[test]
fn mras_don_t_extend_for_ever() {
    let (mut w, _) = listening();
    let (c, _) = requested(&mut w, 0x11);
    let start = w.now;
    while w.m[C].state(c) != Some(State::Refused) {
        let at = w.next_event().unwrap();
        w.advance(at);
    }
    assert_eq!(w.m[C].counters().extended, 4);
    assert!(w.now.saturating_since(start) < Duration::from_secs(300));
    assert!(matches!(w.m[C].poll_event(), Some(Event::Unreachable { .. })));
    // The server learns that its request was taken back.
    w.settle();
    assert!(matches!(
        w.m[S].poll_event(),
        Some(Event::Rejected {
            reason: RejectReason::TIMEOUT,
            ..
        })
    ));
}

#[test]
fn duplicates_are_answered_again_without_an_event() {
    let (mut w, _) = listening();
    let (c, s) = requested(&mut w, 0x11);
    let req = last_sent(&w, Attribute::Req);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    // REP sent: a late REQ gets the same REP.
    again(&mut w, req);
    let reps: Vec<_> = w.sent.iter().filter(|o| kind(o) == Attribute::Rep).collect();
    assert_eq!((reps.len(), reps[0] == reps[1]), (2, true));
    assert!(matches!(w.m[C].poll_event(), Some(Event::Reply { .. })));
    assert_eq!(w.m[C].poll_event(), None);
    // The second REP met a client that is still busy: MRA.
    let mra = Mad::parse(&last_sent(&w, Attribute::Mra).mad).unwrap();
    assert!(matches!(mra.message, Message::Mra(m) if m.subject == Subject::Rep));
    assert_eq!(w.m[S].state(s), Some(State::RepExtended));
    w.m[C].qp_ready(w.now, c).unwrap();
    w.settle();
    assert_eq!(w.m[S].poll_event(), Some(rtu_arrived(s)));
    // REP after the RTU: RTU again, and the server takes no notice.
    let rep = last_sent(&w, Attribute::Rep);
    again(&mut w, rep);
    assert_eq!(kinds_from(&w, C).iter().filter(|a| **a == Attribute::Rtu).count(), 2);
    again(&mut w, req);
    assert_eq!((w.m[S].poll_event(), w.m[C].poll_event()), (None, None));
    // DREQ: DREP each time.
    w.m[C].disconnect(w.now, c);
    w.settle();
    let dreq = last_sent(&w, Attribute::Dreq);
    for _ in 0..3 {
        again(&mut w, dreq);
    }
    assert_eq!(
        w.m[S].poll_event(),
        Some(Event::Disconnected {
            conn: s,
            timed_out: false
        })
    );
    assert_eq!(w.m[S].poll_event(), None);
    let dreps: Vec<_> = w.sent.iter().filter(|o| kind(o) == Attribute::Drep).collect();
    assert_eq!((dreps.len(), dreps.windows(2).all(|p| p[0] == p[1])), (4, true));
    // A REQ in timewait is stale.
    again(&mut w, req);
    assert_eq!((last_rej(&w).reason, last_rej(&w).subject), (10, Subject::Req));
    // And when all is forgotten a DREQ is still answered.
    w.run_dry();
    w.m[S].destroy(w.now, s);
    assert_eq!(w.m[S].usage().connections, 0);
    again(&mut w, dreq);
    let drep = last_sent(&w, Attribute::Drep);
    assert_eq!(drep.mad, dreps_first(&w).mad);
}

fn dreps_first(w: &World) -> OutMad {
    *w.sent.iter().find(|o| kind(o) == Attribute::Drep).unwrap()
}

#[test]
fn reject_with_reason_and_private_data() {
    let (mut w, _) = listening();
    let (c, s) = requested(&mut w, 0x11);
    let req = last_sent(&w, Attribute::Req);
    assert_eq!(
        error(w.m[S].reject(w.now, s, RejectReason::CONSUMER, &[1; 149])),
        "invalid argument: 149 bytes of private data, at most 148"
    );
    w.m[S].reject(w.now, s, RejectReason::CONSUMER, b"no").unwrap();
    w.settle();
    match w.m[C].poll_event() {
        Some(Event::Rejected {
            conn,
            reason,
            info,
            private_data,
        }) => {
            assert_eq!((conn, reason, info), (c, RejectReason::CONSUMER, vec![]));
            assert_eq!((private_data.len(), &private_data[..3]), (148, &b"no\0"[..]));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(last_rej(&w).subject, Subject::Req);
    // Had the REJ been lost, the REQ would come again, and get it again; the consumer is not asked twice.
    again(&mut w, req);
    assert_eq!(w.m[S].poll_event(), None);
    let rejs: Vec<_> = w.sent.iter().filter(|o| kind(o) == Attribute::Rej).collect();
    assert_eq!((rejs.len(), rejs[0] == rejs[1]), (2, true));
    assert_eq!(
        error(w.m[S].accept(w.now, s, &accept_args(1))),
        "wrong state: not possible in connection state Refused"
    );
    w.run_dry();
    assert_eq!(
        (w.m[C].state(c), w.m[S].state(s)),
        (Some(State::Over), Some(State::Over))
    );
    assert_eq!(w.m[C].poll_event(), None);
}

#[test]
fn mtu_that_we_can_t_do() {
    let mut w = World::new(1, |guid| {
        CmConfig::new(guid, if guid & 0xf == 2 { Mtu::B1024 } else { Mtu::B4096 })
    });
    w.m[S].listen(None, PORT, 8).unwrap();
    let c = w.m[C]
        .connect(
            w.now,
            &ConnectArgs {
                mtu: Mtu::B2048,
                ..args(0x11)
            },
        )
        .unwrap();
    let first = w.m[C].poll_mad().unwrap();
    w.m[S].handle_mad(w.now, SERVER, CLIENT, &first.mad);
    let refusal = w.m[S].poll_mad().unwrap();
    w.m[C].handle_mad(w.now, CLIENT, SERVER, &refusal.mad);
    match Mad::parse(&refusal.mad).unwrap().message {
        Message::Rej(rej) => assert_eq!((rej.reason, rej.info_length, rej.info[0]), (26, 1, Mtu::B1024 as u8)),
        other => panic!("{other:?}"),
    }
    // The client asks again with what the server can do, and what still comes for its first request concerns nobody.
    w.m[C].handle_mad(w.now, CLIENT, SERVER, &refusal.mad);
    w.settle();
    assert_eq!(w.m[C].poll_event(), None);
    let (s, path) = request(&mut w);
    assert_eq!(path.mtu, Mtu::B1024);
    w.m[S].accept(w.now, s, &accept_args(0x21)).unwrap();
    w.settle();
    match w.m[C].poll_event() {
        Some(Event::Reply { conn, path, .. }) => assert_eq!((conn, path.mtu), (c, Mtu::B1024)),
        other => panic!("{other:?}"),
    }
    w.m[C].qp_ready(w.now, c).unwrap();
    w.settle();
    assert_eq!(w.m[S].poll_event(), Some(rtu_arrived(s)));
    let req = lone_req(&mut w, 0x12);
    for code in [0, 4, 5, 6, 15] {
        again(&mut w, with_req(req, |r| r.path_mtu = code));
        assert_eq!(
            (last_rej(&w).reason, last_rej(&w).info[0], last_rej(&w).info_length),
            (26, 3, 1),
            "code {code}"
        );
    }
    again(&mut w, with_req(req, |r| r.path_mtu = 3));
    assert_eq!(request(&mut w).1.mtu, Mtu::B1024);
}

#[test]
fn requests_that_can_t_be() {
    let (mut w, _) = listening();
    let req = lone_req(&mut w, 0x11);
    let elsewhere: IpAddr = [10, 9, 9, 9].into();
    type Change = Box<dyn Fn(&mut Req)>;
    let cases: Vec<(u16, Change)> = vec![
        (8, Box::new(|r| r.service_id ^= 1)),
        // The same port in the port space of datagrams.
        (8, Box::new(|r| r.service_id ^= 0x0106_0000 ^ 0x0111_0000)),
        (9, Box::new(|r| r.transport = Transport::Uc)),
        (9, Box::new(|r| r.transport = Transport::Extended)),
        (12, Box::new(move |r| r.primary_local_gid = elsewhere)),
        (12, Box::new(move |r| r.primary_remote_gid = elsewhere)),
        (
            12,
            Box::new(move |r| {
                let h = CmaHeader {
                    port: 1,
                    src: elsewhere,
                    dst: SERVER,
                };
                r.private_data[..36].copy_from_slice(&h.emit());
            }),
        ),
        (28, Box::new(|r| r.private_data[0] = 1)),
        (28, Box::new(|r| r.private_data[1] = 0x50)),
    ];
    for (i, (reason, change)) in cases.iter().enumerate() {
        again(&mut w, with_req(req, change));
        let rej = last_rej(&w);
        assert_eq!(
            (rej.reason, rej.subject, rej.local_comm_id),
            (*reason, Subject::Req, 0),
            "case {i}"
        );
        assert_eq!(w.m[S].counters().sent(Attribute::Rej), i as u64 + 1);
    }
    again(&mut w, with_req(req, |r| r.local_comm_id = 0));
    assert_eq!(w.m[S].counters().dropped(DropReason::Field), 1);
    assert_eq!(w.m[S].poll_event(), None);
    assert_eq!(w.m[S].usage().connections, 0);
    again(&mut w, req);
    request(&mut w);
}

/// RoCE has no LIDs: no request is rejected for them (reasons 13 and 19).
#[test]
fn lids_of_a_request_are_ignored() {
    for lid in [0, 1, 0xbfff, 0xc000, 0xffff] {
        let (mut w, _) = listening();
        let req = lone_req(&mut w, 0x11);
        let changed = with_req(req, |r| {
            (r.primary_local_lid, r.primary_remote_lid) = (lid, lid ^ 1);
            (r.alternate_local_lid, r.alternate_remote_lid) = (lid ^ 2, lid ^ 3);
        });
        again(&mut w, changed);
        request(&mut w);
        assert_eq!(w.m[S].counters().sent(Attribute::Rej), 0, "{lid:#x}");
    }
}

/// As the kernel's: such a number says nothing about the request.
#[test]
fn a_request_without_a_queue_pair_is_answered_as_any() {
    for qpn in [0, 1, 0xff_ffff].map(Qpn::new) {
        let (mut w, _) = listening();
        let req = lone_req(&mut w, 0x11);
        let to_nobody = with_req(req, |r| (r.service_id, r.local_qpn) = (r.service_id ^ 1, qpn));
        again(&mut w, to_nobody);
        assert_eq!((last_rej(&w).reason, last_rej(&w).subject), (8, Subject::Req));
        again(&mut w, with_req(req, |r| r.local_qpn = qpn));
        assert_eq!(request(&mut w).1.qpn, qpn);
    }
}

#[test]
fn listeners_by_address() {
    let mut w = world();
    let other: IpAddr = [10, 77, 0, 9].into();
    let on_other = w.m[S].listen(Some(other), PORT, 1).unwrap();
    assert!(matches!(
        w.m[S].listen(Some(other), PORT, 1),
        Err(VerbsError::Address(_))
    ));
    assert!(matches!(w.m[S].listen(None, PORT, 1), Err(VerbsError::Address(_))));
    connect(&mut w, 0x11);
    w.settle();
    assert_eq!(last_rej(&w).reason, 8);
    let here = w.m[S].listen(Some(SERVER), PORT, 1).unwrap();
    connect(&mut w, 0x12);
    w.settle();
    assert!(matches!(w.m[S].poll_event(), Some(Event::Request { listener, .. }) if listener == here));
    w.m[S].unlisten(here);
    w.m[S].unlisten(on_other);
    w.m[S].listen(None, PORT, 1).unwrap();
}

#[test]
fn each_ip_version_has_its_listeners() {
    let mut w = world();
    let (v4, v6): (IpAddr, IpAddr) = (Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into());
    let of_v6 = w.m[S].listen(Some(v6), PORT, 1).unwrap();
    connect(&mut w, 0x11);
    w.settle();
    assert_eq!(last_rej(&w).reason, 8, "nobody listens on IPv4");
    let of_v4 = w.m[S].listen(Some(v4), PORT, 1).unwrap();
    for taken in [None, Some(v4), Some(v6), Some(SERVER)] {
        assert!(
            matches!(w.m[S].listen(taken, PORT, 1), Err(VerbsError::Address(_))),
            "{taken:?}"
        );
    }
    connect(&mut w, 0x12);
    w.settle();
    assert!(matches!(w.m[S].poll_event(), Some(Event::Request { listener, .. }) if listener == of_v4));
    w.m[S].unlisten(of_v6);
}

#[test]
fn stale_queue_pair_number() {
    let (mut w, _) = listening();
    let (c, s) = established(&mut w, 0x11);
    // The client's host restarts: it knows nothing of the connection and uses the queue pair number again.
    let guid = 0xfe00_0000_0000_0001;
    w.m[C] = Manager::new(config(guid), [99; 32]);
    let c2 = connect(&mut w, 0x11);
    w.settle();
    assert_eq!(w.m[S].counters().stale, 1);
    match w.m[C].poll_event() {
        Some(Event::Rejected { conn, reason, .. }) => {
            assert_eq!((conn, reason), (c2, RejectReason::STALE_CONNECTION));
        }
        other => panic!("{other:?}"),
    }
    // The old connection was ended with a DREQ, which the restarted host answers without knowing it.
    assert_eq!(
        w.m[S].poll_event(),
        Some(Event::Disconnected {
            conn: s,
            timed_out: false
        })
    );
    assert_eq!(w.m[S].state(s), Some(State::Timewait));
    // Now there is room for it.
    w.run_dry();
    let (_, s2) = requested_after(&mut w, 0x11);
    assert_ne!(s, s2);
    let _ = c;
}

fn requested_after(w: &mut World, qpn: u32) -> (ConnId, ConnId) {
    while w.m[S].poll_event().is_some() {}
    requested(w, qpn)
}

#[test]
fn stale_communication_id() {
    let (mut w, _) = listening();
    let (_, s) = established(&mut w, 0x11);
    let req = last_sent(&w, Attribute::Req);
    again(&mut w, with_req(req, |r| r.local_qpn = Qpn::new(0x77)));
    assert_eq!(last_rej(&w).reason, 10);
    assert_eq!(w.m[S].counters().stale, 1);
    // The client was asked, and still has the connection.
    assert_eq!(kinds_from(&w, S).last(), Some(&Attribute::Rep));
    assert_eq!(
        (w.m[S].state(s), w.m[S].next_timeout()),
        (Some(State::Established), None)
    );
    // A client that doesn't (a kernel's) and says nothing has restarted.
    w.faults.loss = 100;
    again(&mut w, with_req(req, |r| r.local_qpn = Qpn::new(0x78)));
    while w.m[S].state(s) == Some(State::Established) {
        let at = w.next_event().unwrap();
        w.advance(at);
    }
    assert_eq!(kind(&last_sent(&w, Attribute::Dreq)), Attribute::Dreq);
    w.faults.loss = 0;
    w.run_for(ms(2000));
    assert_eq!(w.m[S].state(s), Some(State::Timewait));
    assert_eq!(
        w.m[S].poll_event(),
        Some(Event::Disconnected {
            conn: s,
            timed_out: false
        })
    );
}

#[test]
fn another_host_can_t_make_a_connection_stale_or_end_it() {
    let (mut w, _) = listening();
    let (c, s) = established(&mut w, 0x11);
    let villain: IpAddr = [10, 77, 0, 66].into();
    let mut attempts = vec![last_sent(&w, Attribute::Req), last_sent(&w, Attribute::Rtu)];
    // It has seen the wire and knows all numbers.
    w.m[C].disconnect(w.now, c);
    w.pump();
    attempts.push(last_sent(&w, Attribute::Dreq));
    let rtu = Mad::parse(&last_sent(&w, Attribute::Rtu).mad).unwrap();
    let Message::Rtu(ids) = rtu.message else { panic!() };
    for (reason, subject) in [
        (4, Subject::Other),
        (10, Subject::Other),
        (28, Subject::Rep),
        (10, Subject::Req),
    ] {
        let mut rej = Rej {
            local_comm_id: ids.local_comm_id,
            remote_comm_id: ids.remote_comm_id,
            subject,
            reason,
            info_length: 8,
            ..Rej::default()
        };
        rej.info[..8].copy_from_slice(&0xfe00_0000_0000_0001u64.to_be_bytes());
        attempts.push(OutMad {
            mad: Mad::new(1, rej).emit(),
            ..attempts[0]
        });
    }
    for a in attempts {
        w.m[S].handle_mad(w.now, SERVER, villain, &a.mad);
        assert_eq!(w.m[S].state(s), Some(State::Established));
    }
    assert_eq!(w.m[S].poll_event(), None);
    assert!(w.m[S].counters().dropped(DropReason::WrongAddress) >= 4);
}

#[test]
fn wrong_queue_pair_in_a_dreq() {
    let (mut w, _) = listening();
    let (c, s) = established(&mut w, 0x11);
    w.m[C].disconnect(w.now, c);
    let out = w.m[C].poll_mad().unwrap();
    let mut mad = Mad::parse(&out.mad).unwrap();
    if let Message::Dreq(d) = &mut mad.message {
        d.remote_qpn = Qpn::new(0x99);
    }
    again(&mut w, OutMad { mad: mad.emit(), ..out });
    assert_eq!(w.m[S].counters().dropped(DropReason::WrongQp), 1);
    assert_eq!(w.m[S].state(s), Some(State::Established));
}

#[test]
fn both_disconnect_at_once() {
    let (mut w, _) = listening();
    let (c, s) = established(&mut w, 0x11);
    w.m[C].disconnect(w.now, c);
    w.m[S].disconnect(w.now, s);
    w.m[S].disconnect(w.now, s);
    w.settle();
    both_are_disconnected(&mut w, c, s);
    w.run_dry();
    assert_eq!(w.m[C].poll_event(), Some(Event::TimewaitExit { conn: c }));
    assert_eq!(w.m[S].poll_event(), Some(Event::TimewaitExit { conn: s }));
    assert_eq!(kinds_from(&w, C).iter().filter(|a| **a == Attribute::Dreq).count(), 1);
}

#[test]
fn disconnect_from_a_dead_peer() {
    let (mut w, _) = listening();
    let (c, _) = established(&mut w, 0x11);
    w.faults.loss = 100;
    let start = w.now;
    w.m[C].disconnect(w.now, c);
    while w.m[C].state(c) == Some(State::DreqSent) {
        let at = w.next_event().unwrap();
        w.advance(at);
    }
    assert_eq!(
        w.m[C].poll_event(),
        Some(Event::Disconnected {
            conn: c,
            timed_out: true
        })
    );
    assert!(w.now.saturating_since(start) <= Duration::from_secs(11));
}

#[test]
fn reply_without_rtu_ends_with_rej_and_dreq() {
    let (mut w, _) = listening();
    let (c, s) = replied(&mut w, 0x11);
    // The client has asked for time, so that the server knows that it hears.
    let rep = last_sent(&w, Attribute::Rep);
    again(&mut w, rep);
    assert_eq!(w.m[S].state(s), Some(State::RepExtended));
    w.m[C].qp_ready(w.now, c).unwrap();
    // The RTU and all that follow are lost, for as long as the server tries.
    w.faults.loss = 100;
    while w.m[S].poll_event() != Some(unreachable(s)) {
        let at = w.next_event().unwrap();
        w.advance(at);
    }
    assert_eq!((last_rej(&w).reason, last_rej(&w).subject), (4, Subject::Other));
    assert_eq!(w.m[S].state(s), Some(State::DreqSent));
    w.faults.loss = 0;
    w.run_dry();
    assert_eq!(
        w.m[C].poll_event(),
        Some(Event::Disconnected {
            conn: c,
            timed_out: false
        })
    );
    assert_eq!(w.m[S].poll_event(), Some(Event::TimewaitExit { conn: s }));
}

#[test]
fn data_before_the_rtu_establishes() {
    let (mut w, _) = listening();
    let (c, s) = replied(&mut w, 0x11);
    w.faults.loss = 100;
    w.m[C].qp_ready(w.now, c).unwrap();
    w.pump();
    w.m[S].communication_established(w.now, s);
    w.m[S].communication_established(w.now, s);
    assert_eq!(w.m[S].poll_event(), Some(rtu_arrived(s)));
    assert_eq!(w.m[S].poll_event(), None);
    assert_eq!(w.m[S].next_timeout(), None);
}

#[test]
fn queue_pair_that_can_t_be_brought_up() {
    let (mut w, _) = listening();
    let (c, s) = replied(&mut w, 0x11);
    w.m[C].reject(w.now, c, RejectReason::NO_QP, &[]).unwrap();
    w.settle();
    assert!(
        matches!(w.m[S].poll_event(), Some(Event::Rejected { conn, reason: RejectReason::NO_QP, .. }) if conn == s)
    );
    assert_eq!(last_rej(&w).subject, Subject::Rep);
    assert_eq!(
        error(w.m[C].qp_ready(w.now, c)),
        "wrong state: not possible in connection state Refused"
    );
    // A late REP gets the same REJ.
    let rep = last_sent(&w, Attribute::Rep);
    again(&mut w, rep);
    assert_eq!(w.m[C].counters().sent(Attribute::Rej), 2);
}

#[test]
fn reply_to_nobody_is_rejected() {
    let (mut w, _) = listening();
    let (c, s) = requested(&mut w, 0x11);
    w.m[C] = Manager::new(config(5), [5; 32]);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    w.settle();
    assert!(matches!(
        w.m[S].poll_event(),
        Some(Event::Rejected {
            reason: RejectReason(6),
            ..
        })
    ));
    let _ = c;
}

#[test]
fn reply_that_names_a_queue_pair_in_use() {
    let (mut w, _) = listening();
    let (c1, s1) = established(&mut w, 0x11);
    let (c2, s2) = requested(&mut w, 0x12);
    w.m[S].accept(w.now, s2, &accept_args(0x12)).unwrap();
    w.settle();
    assert_eq!(w.m[C].counters().stale, 1);
    assert!(
        matches!(w.m[C].poll_event(), Some(Event::Rejected { conn, reason: RejectReason::STALE_CONNECTION, .. }) if conn == c2)
    );
    assert_eq!(
        w.m[C].poll_event(),
        Some(Event::Disconnected {
            conn: c1,
            timed_out: false
        })
    );
    let mut at_server: Vec<_> = std::iter::from_fn(|| w.m[S].poll_event()).collect();
    at_server.sort_by_key(Event::conn);
    assert_eq!(
        at_server[0],
        Event::Disconnected {
            conn: s1,
            timed_out: false
        }
    );
    assert!(matches!(at_server[1], Event::Rejected { conn, reason: RejectReason::STALE_CONNECTION, .. } if conn == s2));
}

#[test]
fn destroy_in_every_state_tells_the_peer_and_leaves_nothing() {
    for stage in 0..7 {
        for side in [C, S] {
            let (mut w, _) = listening();
            let (c, s) = match stage {
                0 => {
                    let c = connect(&mut w, 0x11);
                    (c, None)
                }
                1 => {
                    let (c, s) = requested(&mut w, 0x11);
                    (c, Some(s))
                }
                2 => {
                    let (c, s) = requested(&mut w, 0x11);
                    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
                    (c, Some(s))
                }
                3 => {
                    let (c, s) = replied(&mut w, 0x11);
                    (c, Some(s))
                }
                4 => {
                    let (c, s) = established(&mut w, 0x11);
                    (c, Some(s))
                }
                5 => {
                    let (c, s) = established(&mut w, 0x11);
                    w.m[C].disconnect(w.now, c);
                    (c, Some(s))
                }
                _ => {
                    let (c, s) = established(&mut w, 0x11);
                    w.m[C].disconnect(w.now, c);
                    w.settle();
                    (c, Some(s))
                }
            };
            let conns = [Some(c), s];
            let Some(mine) = conns[side] else { continue };
            w.m[side].destroy(w.now, mine);
            assert_eq!(w.m[side].state(mine), None);
            w.m[side].destroy(w.now, mine);
            w.m[side].disconnect(w.now, mine);
            assert_eq!(
                error(w.m[side].qp_ready(w.now, mine)),
                "wrong state: no such connection"
            );
            // The other side answers whatever it is asked.
            w.settle();
            let other = 1 - side;
            while let Some(e) = w.m[other].poll_event() {
                match e {
                    Event::Request { conn, .. } => drop(w.m[other].accept(w.now, conn, &accept_args(0x22))),
                    Event::Reply { conn, .. } => drop(w.m[other].qp_ready(w.now, conn)),
                    _ => {}
                }
                w.settle();
            }
            w.run_dry();
            assert_eq!(w.m[side].poll_event(), None, "stage {stage} side {side}");
            assert_eq!(w.m[side].usage().connections, 0, "stage {stage} side {side}");
            if let Some(theirs) = conns[other] {
                assert!(
                    matches!(w.m[other].state(theirs), Some(State::Over)),
                    "stage {stage} side {side}: the peer is in {:?}",
                    w.m[other].state(theirs)
                );
                w.m[other].destroy(w.now, theirs);
            }
        }
    }
}
