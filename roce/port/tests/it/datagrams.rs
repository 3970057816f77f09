//! Service ID resolution (SIDR), port spaces, and connections of other transports than RC.

use std::{net::SocketAddr, time::Duration};

use crate::common::{CLIENT, SERVER, World, error, pair::*};
use roce_port::cm::{
    CmConfig, ConnTransport, ConnectArgs, DropReason, Event, ListenArgs, ListenId, Manager, OutMad, ResolveArgs,
    SidrAnswer,
    cma::PortSpace,
    mad::{Attribute, Mad, Message, sidr_status},
    state::State,
};
use roce_verbs::{Instant, QKey, Qpn, provider::VerbsError};

fn listen(w: &mut World, space: PortSpace, transport: Option<ConnTransport>, backlog: u32) -> ListenId {
    let args = ListenArgs {
        addr: None,
        space,
        port: PORT,
        transport,
        backlog,
    };
    w.m[S].listen_for(&args).unwrap()
}

fn question(space: PortSpace) -> ResolveArgs {
    ResolveArgs {
        local: SocketAddr::new(CLIENT, 0),
        remote: SocketAddr::new(SERVER, PORT),
        space,
        private_data: vec![1, 2, 3],
    }
}

#[test]
fn a_question_reaches_the_listener_and_its_answer_comes_back() {
    let mut w = world();
    let l = listen(&mut w, PortSpace::Udp, None, 8);
    let asked = w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    w.settle();
    let Some(Event::SidrRequest {
        listener,
        conn,
        local,
        remote,
        space,
        private_data,
    }) = w.m[S].poll_event()
    else {
        panic!("no question")
    };
    assert_eq!((listener, space, private_data.len()), (l, PortSpace::Udp, 180));
    assert_eq!((local, remote.ip()), (SocketAddr::new(SERVER, PORT), CLIENT));
    assert_eq!(private_data[..4], [1, 2, 3, 0]);
    let answer = SidrAnswer {
        status: sidr_status::SUCCESS,
        qpn: Qpn::new(77),
        qkey: QKey(0x0123_4567),
        private_data: vec![9],
    };
    w.m[S].answer(w.now, conn, &answer).unwrap();
    assert!(matches!(w.m[S].answer(w.now, conn, &answer), Err(VerbsError::State(_))));
    w.settle();
    let Some(Event::Resolved {
        conn,
        status,
        qpn,
        qkey,
        private_data,
        ..
    }) = w.m[C].poll_event()
    else {
        panic!("no answer")
    };
    assert_eq!((conn, status, qpn, qkey), (asked, 0, Qpn::new(77), QKey(0x0123_4567)));
    assert_eq!((private_data.len(), private_data[0]), (136, 9));
    assert!(w.m[C].next_timeout().is_none());
}

#[test]
fn nobody_listens_or_the_consumer_lets_go_of_the_question() {
    let mut w = world();
    // A connection's listener is not asked for datagrams.
    w.m[S].listen(None, PORT, 8).unwrap();
    w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    w.settle();
    let told = w.m[C].poll_event();
    assert!(
        matches!(
            told,
            Some(Event::Resolved {
                status: sidr_status::UNSUPPORTED,
                ..
            })
        ),
        "{told:?}"
    );

    listen(&mut w, PortSpace::Udp, None, 8);
    w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    w.settle();
    let conn = w.m[S].poll_event().unwrap().conn();
    w.m[S].destroy(w.now, conn);
    w.settle();
    let told = w.m[C].poll_event();
    assert!(
        matches!(
            told,
            Some(Event::Resolved {
                status: sidr_status::REJECT,
                ..
            })
        ),
        "{told:?}"
    );
}

#[test]
fn a_lost_answer_is_repeated_without_asking_the_consumer_again() {
    let mut w = world();
    listen(&mut w, PortSpace::Udp, None, 8);
    w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    w.settle();
    let conn = w.m[S].poll_event().unwrap().conn();
    let req = last_sent(&w, Attribute::SidrReq);
    w.m[S].answer(w.now, conn, &SidrAnswer::default()).unwrap();
    // The answer is lost; the consumer is done with it.
    assert!(w.m[S].poll_mad().is_some());
    w.m[S].destroy(w.now, conn);
    again(&mut w, req);
    assert!(w.m[S].poll_event().is_none());
    assert!(matches!(w.m[C].poll_event(), Some(Event::Resolved { .. })));
}

#[test]
fn a_question_without_answer_is_repeated_and_given_up() {
    let mut w = world();
    let asked = w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    let first = w.m[C].poll_mad().unwrap();
    let mut sent = 1;
    while let Some(at) = w.m[C].next_timeout() {
        w.m[C].handle_timeout(at);
        while let Some(mad) = w.m[C].poll_mad() {
            assert_eq!(mad.mad, first.mad);
            sent += 1;
        }
    }
    assert!(sent > 3, "{sent}");
    assert_eq!(w.m[C].poll_event(), Some(unreachable(asked)));
}

#[test]
fn questions_beyond_the_backlog_wait_at_the_asking_side() {
    let mut w = world();
    listen(&mut w, PortSpace::Udp, None, 1);
    for _ in 0..3 {
        w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    }
    w.settle();
    let first = w.m[S].poll_event().unwrap().conn();
    assert!(w.m[S].poll_event().is_none());
    w.m[S].answer(w.now, first, &SidrAnswer::default()).unwrap();
    w.settle();
    w.now = w.now + Duration::from_millis(600);
    w.m[C].handle_timeout(w.now);
    w.settle();
    assert!(matches!(w.m[S].poll_event(), Some(Event::SidrRequest { .. })));
}

#[test]
fn a_flood_of_questions_stays_within_bounds() {
    let mut w = world();
    let mut config = config(9);
    config.max_lingering = 50;
    config.max_half_open_per_peer = 20;
    w.m[S] = Manager::new(config, [7; 32]);
    listen(&mut w, PortSpace::Udp, None, 100);
    // Nobody answers: each evicts the oldest, but not at once, and until there are too many that the consumer has not destroyed.
    for (round, questions) in [25, 20, 60].into_iter().enumerate() {
        w.m[C] = Manager::new(self::config(1), [70 + round as u8; 32]);
        for _ in 0..questions {
            w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
        }
        w.settle();
        w.now = w.now + Duration::from_millis(300);
    }
    let waiting: Vec<_> = std::iter::from_fn(|| w.m[S].poll_event()).map(|e| e.conn()).collect();
    assert_eq!(waiting.len(), 50);
    assert_eq!(w.m[S].counters().displaced_peer, 30);
    assert_eq!(w.m[S].counters().dropped(DropReason::HalfOpenPeer), 5);
    assert_eq!(w.m[S].counters().dropped(DropReason::Connections), 50);
    for (i, conn) in waiting.into_iter().enumerate() {
        let answered = w.m[S].answer(w.now, conn, &SidrAnswer::default());
        assert_eq!(answered.is_ok(), i >= 30, "question {i}");
        w.m[S].destroy(w.now, conn);
    }
    w.settle();
    // Old answers make room for new questions (of somebody who does not repeat the old ones).
    w.m[C] = Manager::new(self::config(1), [77; 32]);
    for _ in 0..100 {
        w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
        w.settle();
        let conn = w.m[S].poll_event().expect("a question").conn();
        w.m[S].answer(w.now, conn, &SidrAnswer::default()).unwrap();
        w.m[S].destroy(w.now, conn);
        w.settle();
    }
    assert!(w.m[S].counters().forgotten >= 50);
}

/// A question of a client at an address of its own.
fn stranger(n: u8) -> OutMad {
    let mut args = question(PortSpace::Udp);
    args.local = SocketAddr::new([11, 0, 0, n].into(), 0);
    let mut m = Manager::new(config(u64::from(n)), [n; 32]);
    m.resolve(Instant::ZERO, &args).unwrap();
    m.poll_mad().unwrap()
}

fn give(w: &mut World, out: &OutMad) {
    w.m[S].handle_mad(w.now, out.remote, out.local, &out.mad);
}

/// A server whose tables are small, with a listener for connections and one for questions.
fn small() -> World {
    let mut w = World::new(1, |guid| CmConfig {
        max_lingering: 4,
        max_connections: 16,
        ..config(guid)
    });
    listen(&mut w, PortSpace::Udp, None, 1);
    listen(&mut w, PortSpace::Tcp, None, 8);
    w
}

/// No event reports that a question has ended: a consumer may keep any number of those.
#[test]
fn questions_that_the_consumer_keeps_leave_room_for_connections() {
    let mut w = small();
    let mut kept = Vec::new();
    for n in 0..40 {
        give(&mut w, &stranger(n));
        if let Some(told) = w.m[S].poll_event() {
            w.m[S].leave_backlog(told.conn());
            if n % 2 == 0 {
                w.m[S].answer(w.now, told.conn(), &SidrAnswer::default()).unwrap();
            }
            kept.push(told.conn());
        }
        w.now = w.now + Duration::from_secs(25);
        w.m[S].handle_timeout(w.now);
    }
    assert!(kept.iter().all(|conn| w.m[S].state(*conn) == Some(State::Over)));
    assert_eq!((kept.len(), w.m[S].usage().connections), (4, 4));
    assert_eq!(w.m[S].counters().dropped(DropReason::Connections), 36);
    requested(&mut w, 0x11);
    w.m[S].connect(w.now, &args(0x12)).unwrap();
    w.m[S].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    // Each that is destroyed makes room for another, also one that still lingers.
    for (n, conn) in kept.into_iter().enumerate() {
        w.m[S].destroy(w.now, conn);
        give(&mut w, &stranger(100 + n as u8));
        let next = w.m[S].poll_event().expect("a question").conn();
        w.m[S].answer(w.now, next, &SidrAnswer::default()).unwrap();
        give(&mut w, &stranger(200 + n as u8));
        assert_eq!(w.m[S].poll_event(), None);
        w.m[S].destroy(w.now, next);
        give(&mut w, &stranger(200 + n as u8));
        let next = w.m[S].poll_event().expect("a question").conn();
        w.m[S].answer(w.now, next, &SidrAnswer::default()).unwrap();
    }
}

#[test]
fn an_answer_is_repeated_while_connections_linger() {
    let mut w = small();
    let ended: Vec<_> = (0..4).map(|n| established(&mut w, 0x10 * (n + 1)).1).collect();
    w.faults.loss = 100;
    for conn in ended {
        w.m[S].destroy(w.now, conn);
    }
    let req = stranger(1);
    give(&mut w, &req);
    let conn = w.m[S].poll_event().unwrap().conn();
    w.m[S].answer(w.now, conn, &SidrAnswer::default()).unwrap();
    w.m[S].destroy(w.now, conn);
    give(&mut w, &req);
    assert_eq!(w.m[S].poll_event(), None, "the consumer has decided");
    assert_eq!(w.m[S].counters().sent(Attribute::SidrRep), 2);
    let usage = w.m[S].usage();
    assert_eq!((usage.lingering, usage.lingering_resolutions), (4, 1));
    assert_eq!(w.m[S].counters().forgotten, 0);
}

#[test]
fn questions_do_not_push_out_the_rejection_of_a_request() {
    let mut w = small();
    let req = lone_req(&mut w, 0x11);
    give(&mut w, &req);
    let (conn, _) = request(&mut w);
    w.m[S].destroy(w.now, conn);
    for n in 0..20 {
        give(&mut w, &stranger(n));
        let conn = w.m[S].poll_event().expect("a question").conn();
        w.m[S].destroy(w.now, conn);
    }
    let usage = w.m[S].usage();
    assert_eq!((usage.lingering, usage.lingering_resolutions), (1, 4));
    give(&mut w, &req);
    assert_eq!(w.m[S].poll_event(), None, "the consumer has decided");
    assert_eq!(w.m[S].counters().sent(Attribute::Rej), 2);
}

#[test]
fn a_question_that_is_not_repeated_waits_for_a_while_only() {
    let mut w = world();
    listen(&mut w, PortSpace::Udp, None, 1);
    w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    let out = w.m[C].poll_mad().unwrap();
    w.m[S].handle_mad(w.now, SERVER, CLIENT, &out.mad);
    let conn = w.m[S].poll_event().unwrap().conn();
    // Repeated, it waits on.
    for _ in 0..3 {
        w.now = w.now + Duration::from_secs(9);
        w.m[S].handle_timeout(w.now);
        w.m[S].handle_mad(w.now, SERVER, CLIENT, &out.mad);
        assert_eq!(w.m[S].counters().expired, 0);
    }
    w.now = w.now + Duration::from_secs(11);
    w.m[S].handle_timeout(w.now);
    assert_eq!((w.m[S].counters().expired, w.m[S].next_timeout()), (1, None));
    // Its place at the listener is free when the consumer has dealt with it.
    w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    let other = w.m[C].poll_mad().unwrap();
    w.m[S].handle_mad(w.now, SERVER, CLIENT, &other.mad);
    assert_eq!(w.m[S].poll_event(), None);
    assert!(matches!(
        w.m[S].answer(w.now, conn, &SidrAnswer::default()),
        Err(VerbsError::State(_))
    ));
    w.m[S].destroy(w.now, conn);
    w.m[S].handle_mad(w.now, SERVER, CLIENT, &other.mad);
    assert!(matches!(w.m[S].poll_event(), Some(Event::SidrRequest { .. })));
    assert_eq!(w.m[S].poll_mad(), None);
}

#[test]
fn numbers_come_from_the_part_that_is_ours() {
    let mut config = config(9);
    config.comm_ids = (0x1230_0000, 0x123f_ffff);
    let mut w = world();
    w.m[C] = Manager::new(config, [8; 32]);
    for qpn in 0..200 {
        w.m[C].connect(w.now, &args(qpn + 10)).unwrap();
        w.m[C].resolve(w.now, &question(PortSpace::Udp)).unwrap();
    }
    let mut seen = std::collections::BTreeSet::new();
    while let Some(out) = w.m[C].poll_mad() {
        let id = match Mad::parse(&out.mad).unwrap().message {
            Message::Req(m) => m.local_comm_id,
            Message::SidrReq(m) => m.request_id,
            other => panic!("{other:?}"),
        };
        assert!((0x1230_0000..=0x123f_ffff).contains(&id), "{id:#x}");
        assert!(seen.insert(id), "{id:#x} twice");
    }
    assert_eq!(seen.len(), 400);
}

#[test]
fn too_much_private_data_is_refused() {
    let mut w = world();
    let mut args = question(PortSpace::Udp);
    args.private_data = vec![0; 181];
    let refused = w.m[C].resolve(w.now, &args);
    assert_eq!(
        error(refused),
        "invalid argument: 181 bytes of private data, at most 180"
    );
}

#[test]
fn each_port_space_has_ports_of_its_own() {
    let mut w = world();
    for space in PortSpace::ALL {
        listen(&mut w, space, None, 1);
    }
    let args = ListenArgs {
        addr: Some(SERVER),
        space: PortSpace::Udp,
        port: PORT,
        transport: None,
        backlog: 1,
    };
    assert!(matches!(w.m[S].listen_for(&args), Err(VerbsError::Address(_))));
}

#[test]
fn transports_are_asked_for_and_checked() {
    for transport in [ConnTransport::Uc, ConnTransport::Xrc] {
        let mut w = world();
        listen(&mut w, PortSpace::Tcp, Some(transport), 8);
        let c = connect_as(&mut w, transport);
        let (s, path) = request(&mut w);
        assert_eq!(path.transport, transport);
        w.m[S].accept(w.now, s, &accept_args(9)).unwrap();
        w.settle();
        let Some(Event::Reply { conn, path, .. }) = w.m[C].poll_event() else {
            panic!("no reply")
        };
        assert_eq!((conn, path.qpn, path.transport), (c, Qpn::new(9), transport));
        let Message::Rep(rep) = Mad::parse(&last_sent(&w, Attribute::Rep).mad).unwrap().message else {
            panic!("not a REP")
        };
        assert_eq!(rep.srq, transport == ConnTransport::Xrc);
    }
    // An RC listener rejects UC with reason 9.
    let mut w = world();
    w.m[S].listen(None, PORT, 8).unwrap();
    connect_as(&mut w, ConnTransport::Uc);
    assert_eq!(last_rej(&w).reason, 9);
}

fn connect_as(w: &mut World, transport: ConnTransport) -> roce_port::cm::ConnId {
    let mut args: ConnectArgs = args(5);
    args.qp.transport = transport;
    let c = w.m[C].connect(w.now, &args).unwrap();
    w.settle();
    c
}
