//! Limits of what strangers can make a manager send, store and do: a stranger may put any source address on a MAD, but sees no answer.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use crate::common::{CLIENT, SERVER, World, ms, pair::*};
use roce_port::cm::{
    CmConfig, ConnId, DropReason, Event, Manager, OutMad, RateLimit, RejectReason,
    mad::{Attribute, Mad, Message, Rtu},
    state::State,
};
use roce_verbs::Instant;

/// A REQ of a client at `from`, that never hears an answer.
fn forged(from: IpAddr, n: u32) -> OutMad {
    let to: IpAddr = if from.is_ipv4() {
        SERVER
    } else {
        "fd00::1".parse().unwrap()
    };
    let mut m = Manager::new(config(u64::from(n) << 8), [n as u8; 32]);
    let mut a = args(0x100 + n);
    (a.local, a.remote) = (SocketAddr::new(from, 40_000), SocketAddr::new(to, PORT));
    m.connect(Instant::ZERO, &a).unwrap();
    m.poll_mad().unwrap()
}

fn stranger(n: u32) -> IpAddr {
    let [_, a, b, c] = n.to_be_bytes();
    [11, a, b, c].into()
}

fn give(w: &mut World, out: &OutMad) {
    w.m[S].handle_mad(w.now, out.remote, out.local, &out.mad);
}

/// Lets the server's timers run, `for_` long; when and what it has sent.
fn timers(w: &mut World, for_: Duration) -> Vec<(Instant, Attribute)> {
    let end = w.now + for_;
    let mut sent = Vec::new();
    loop {
        while let Some(out) = w.m[S].poll_mad() {
            sent.push((w.now, kind(&out)));
        }
        let Some(at) = w.m[S].next_timeout().filter(|at| *at <= end) else {
            w.now = end;
            return sent;
        };
        w.now = w.now.max(at);
        w.m[S].handle_timeout(w.now);
    }
}

fn kinds(sent: &[(Instant, Attribute)]) -> Vec<Attribute> {
    sent.iter().map(|(_, a)| *a).collect()
}

fn ends(w: &mut World) -> Vec<Event> {
    std::iter::from_fn(|| w.m[S].poll_event()).collect()
}

const TEN_MINUTES: Duration = Duration::from_secs(600);

#[test]
fn a_lone_request_gets_three_replies_and_no_sooner_than_our_own_pause() {
    use Attribute::Rep;
    for code in [0, 5, 16, 20, 31] {
        let (mut w, _) = listening();
        let req = with_req(forged(CLIENT, 1), |r| r.local_cm_response_timeout = code);
        give(&mut w, &req);
        let (s, _) = request(&mut w);
        w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
        let sent = timers(&mut w, TEN_MINUTES);
        assert_eq!(kinds(&sent), [Rep, Rep, Rep], "code {code}");
        let first_retry = config(1).first_retry;
        for pair in sent.windows(2) {
            assert!(
                pair[1].0.saturating_since(pair[0].0) >= first_retry,
                "code {code}: {sent:?}"
            );
        }
        let told = ends(&mut w);
        assert_eq!(told, [unreachable(s), Event::TimewaitExit { conn: s }]);
        assert!(w.m[S].counters().withheld > 0);
        w.m[S].destroy(w.now, s);
        assert_eq!(w.m[S].usage().connections, 0);
    }
}

#[test]
fn each_repetition_is_answered_and_pays_for_the_dreq() {
    use Attribute::{Dreq, Rep};
    let (mut w, _) = listening();
    let req = forged(CLIENT, 1);
    give(&mut w, &req);
    let (s, _) = request(&mut w);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    assert_eq!(kinds(&timers(&mut w, ms(2000))), [Rep, Rep, Rep]);
    for _ in 0..2 {
        give(&mut w, &req);
        assert_eq!(kinds(&timers(&mut w, ms(1000))), [Rep], "one for one");
    }
    assert_eq!(kinds(&timers(&mut w, TEN_MINUTES)), [Dreq]);
}

#[test]
fn a_peer_that_repeats_its_request_may_answer_as_late_as_it_says() {
    // An overloaded host repeats its REQ by a timer, and gets to the REP after half a minute.
    let (mut w, _) = listening();
    let req = lone_req(&mut w, 0x11);
    give(&mut w, &req);
    let (s, _) = request(&mut w);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    let rep = w.m[S].poll_mad().unwrap();
    timers(&mut w, ms(6400));
    give(&mut w, &req);
    timers(&mut w, Duration::from_secs(24));
    w.m[C].handle_mad(w.now, rep.remote, rep.local, &rep.mad);
    let Some(Event::Reply { conn, .. }) = w.m[C].poll_event() else {
        panic!("no reply");
    };
    w.m[C].qp_ready(w.now, conn).unwrap();
    w.settle();
    assert!(matches!(ends(&mut w)[..], [Event::Established { conn, .. }] if conn == s));
}

#[test]
fn a_peer_that_repeats_its_request_and_never_answers_is_given_up() {
    let (mut w, _) = listening();
    let req = forged(CLIENT, 1);
    give(&mut w, &req);
    let (s, _) = request(&mut w);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    timers(&mut w, ms(1000));
    give(&mut w, &req);
    timers(&mut w, Duration::from_secs(75));
    assert_eq!(ends(&mut w)[0], unreachable(s));
}

#[test]
fn a_consumer_that_ends_what_it_accepted_says_so_once() {
    use Attribute::{Dreq, Rep};
    let (mut w, _) = listening();
    give(&mut w, &forged(CLIENT, 1));
    let (s, _) = request(&mut w);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    w.m[S].destroy(w.now, s);
    assert_eq!(kinds(&timers(&mut w, TEN_MINUTES)), [Rep, Dreq]);
    assert_eq!(w.m[S].usage().connections, 0);
}

#[test]
fn a_client_that_lost_its_rtu_gets_on() {
    // By a REP that comes again.
    let (mut w, _) = listening();
    let (c, s) = replied(&mut w, 0x11);
    w.faults.loss = 100;
    w.m[C].qp_ready(w.now, c).unwrap();
    w.pump();
    w.faults.loss = 0;
    w.run_for(ms(400));
    assert_eq!(
        w.m[S].poll_event(),
        Some(Event::Established {
            conn: s,
            private_data: vec![]
        })
    );

    // By data, long after the last REP.
    let (mut w, _) = listening();
    let (c, s) = replied(&mut w, 0x11);
    w.faults.loss = 100;
    w.m[C].qp_ready(w.now, c).unwrap();
    w.run_for(ms(5000));
    w.faults.loss = 0;
    w.m[S].communication_established(w.now, s);
    assert_eq!(
        w.m[S].poll_event(),
        Some(Event::Established {
            conn: s,
            private_data: vec![]
        })
    );
    // The address is proven: a DREQ has all its retries.
    w.faults.loss = 100;
    w.m[S].disconnect(w.now, s);
    w.run_for(ms(20_000));
    assert!(w.m[S].counters().sent(Attribute::Dreq) > 3);
}

#[test]
fn a_client_that_lost_all_replies_repeats_its_request() {
    let (mut w, _) = listening();
    let (c, s) = requested(&mut w, 0x11);
    w.faults.loss = 100;
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    w.run_for(ms(6000));
    assert_eq!(w.m[S].counters().sent(Attribute::Rep), 3);
    w.faults.loss = 0;
    w.run_for(ms(3000));
    assert!(matches!(w.m[C].poll_event(), Some(Event::Reply { conn, .. }) if conn == c));
}

#[test]
fn an_rtu_after_the_dreq_brings_its_retries_back() {
    let (mut w, _) = listening();
    let (c, s) = replied(&mut w, 0x11);
    w.m[C].qp_ready(w.now, c).unwrap();
    let rtu = w.m[C].poll_mad().unwrap();
    // The first DREQ is lost.
    w.m[S].disconnect(w.now, s);
    assert!(w.m[S].poll_mad().is_some());
    w.run_for(ms(3000));
    assert_eq!(w.m[S].counters().sent(Attribute::Dreq), 1);
    give(&mut w, &rtu);
    w.run_for(ms(6000));
    let told = Event::Disconnected {
        conn: c,
        timed_out: false,
    };
    assert_eq!(w.m[C].poll_event(), Some(told));
}

/// Small limits.
fn tight() -> World {
    let mut w = World::new(1, |guid| CmConfig {
        max_half_open: 6,
        max_half_open_per_peer: 3,
        max_connections: 12,
        ..config(guid)
    });
    w.m[S].listen(None, PORT, 8).unwrap();
    w
}

fn accept(w: &mut World) -> ConnId {
    let (s, _) = request(w);
    w.m[S].accept(w.now, s, &accept_args(0x1000 + s.0 as u32)).unwrap();
    while w.m[S].poll_mad().is_some() {}
    s
}

#[test]
fn the_oldest_unproven_gives_way_first_within_its_address() {
    let mut w = tight();
    let mut of_11 = Vec::new();
    for n in 0..3 {
        give(&mut w, &forged(stranger(11), n));
        of_11.push(accept(&mut w));
    }
    // A busy host gets its time to answer.
    give(&mut w, &forged(stranger(11), 3));
    assert_eq!(w.m[S].counters().dropped(DropReason::HalfOpenPeer), 1);
    w.now = w.now + config(1).first_retry;
    give(&mut w, &forged(stranger(11), 3));
    assert_eq!(w.m[S].poll_event(), Some(unreachable(of_11[0])));
    accept(&mut w);
    assert_eq!((w.m[S].counters().displaced_peer, w.m[S].counters().displaced), (1, 0));
    w.m[S].destroy(w.now, of_11[0]);
    for n in 4..7 {
        give(&mut w, &forged(stranger(n), n));
        accept(&mut w);
    }
    give(&mut w, &forged(stranger(20), 20));
    assert_eq!(w.m[S].poll_event(), Some(unreachable(of_11[1])));
    accept(&mut w);
    assert_eq!((w.m[S].counters().displaced_peer, w.m[S].counters().displaced), (1, 1));
    assert_eq!(w.m[S].state(of_11[1]), Some(State::Over));
    let sent = kinds(&timers(&mut w, ms(0)));
    assert!(sent.iter().all(|a| *a == Attribute::Rep), "nobody is told: {sent:?}");
}

#[test]
fn what_has_proved_itself_never_gives_way_to_strangers() {
    let mut w = tight();
    // One that is established, one that has asked for more time with an MRA.
    let (_, up) = established(&mut w, 0x11);
    let (c, s) = replied(&mut w, 0x12);
    let rep = last_sent(&w, Attribute::Rep);
    again(&mut w, rep);
    assert_eq!(w.m[S].state(s), Some(State::RepExtended));
    for n in 0..2000 {
        give(&mut w, &forged(stranger(n), n));
        while let Some(e) = w.m[S].poll_event() {
            match e {
                Event::Request { conn, .. } if n % 2 == 0 => {
                    let _ = w.m[S].accept(w.now, conn, &accept_args(0x1000 + conn.0 as u32));
                }
                Event::Request { .. } => {}
                end => w.m[S].destroy(w.now, end.conn()),
            }
        }
        while w.m[S].poll_mad().is_some() {}
    }
    assert!(w.m[S].counters().displaced > 1000);
    assert_eq!(w.m[S].state(up), Some(State::Established));
    assert_eq!(w.m[S].state(s), Some(State::RepExtended));
    w.m[C].qp_ready(w.now, c).unwrap();
    w.settle();
    assert_eq!(w.m[S].state(s), Some(State::Established));
}

#[test]
fn a_client_gets_in_under_a_flood_from_other_addresses() {
    let mut w = World::new(1, config);
    w.m[S].listen(None, PORT, 64).unwrap();
    let c = connect(&mut w, 0x11);
    let mut tries = 0;
    // 20,000 requests a second, round trips of 2 ms, a consumer that accepts all.
    for n in 0..40_000u32 {
        if w.m[C].state(c) == Some(State::Established) {
            tries = n;
            break;
        }
        w.now = w.now + Duration::from_micros(50);
        give(&mut w, &forged(stranger(n), n));
        w.advance(w.now);
        while let Some(e) = w.m[S].poll_event() {
            match e {
                Event::Request { conn, .. } => {
                    w.m[S]
                        .accept(w.now, conn, &accept_args(0x1000 + conn.0 as u32))
                        .unwrap();
                }
                Event::Unreachable { conn, .. } => w.m[S].destroy(w.now, conn),
                _ => {}
            }
        }
        if let Some(Event::Reply { conn, .. }) = w.m[C].poll_event() {
            w.m[C].qp_ready(w.now, conn).unwrap();
        }
    }
    assert_eq!(w.m[C].state(c), Some(State::Established));
    assert!(tries < 40_000, "within 2 s");
}

#[test]
fn a_request_waits_as_long_as_its_peer_may() {
    // Whoever asks but once has given up after the time that everybody tries for.
    let (mut w, _) = listening();
    give(&mut w, &forged(CLIENT, 1));
    let (s, _) = request(&mut w);
    assert_eq!(timers(&mut w, config(1).give_up), []);
    let end = ends(&mut w);
    assert!(matches!(end[..], [Event::Rejected { conn, reason: RejectReason::TIMEOUT, .. }] if conn == s));
    assert_eq!((w.m[S].state(s), w.m[S].counters().expired), (Some(State::Over), 1));
    // Whoever asks again is told to wait, and waits.
    let req = forged(CLIENT, 2);
    give(&mut w, &req);
    let (s, _) = request(&mut w);
    w.now = w.now + ms(400);
    give(&mut w, &req);
    assert_eq!(kinds(&timers(&mut w, Duration::from_secs(75))), [Attribute::Mra]);
    assert_eq!(w.m[S].state(s), Some(State::ReqReceived));
    assert_eq!(timers(&mut w, TEN_MINUTES), []);
    assert_eq!(w.m[S].state(s), Some(State::Over));
}

#[test]
fn strangers_that_have_given_up_do_not_keep_the_backlog_nor_fill_the_events() {
    let mut w = World::new(1, config);
    w.m[S].listen(None, PORT, 8).unwrap();
    // The consumer takes nothing for an hour. What it is told meanwhile is bounded.
    for n in 0..3600 {
        give(&mut w, &forged(stranger(n), n));
        timers(&mut w, Duration::from_secs(1));
    }
    let told = ends(&mut w);
    assert_eq!(
        told.len(),
        20,
        "8 requests and a quarter more, and that they have ended"
    );
    // As soon as it turns to them there is room for others.
    for e in told {
        if let Event::Request { conn, .. } = e {
            assert!(w.m[S].accept(w.now, conn, &accept_args(0x22)).is_err());
        }
    }
    give(&mut w, &forged(stranger(1), 1));
    request(&mut w);
}

#[test]
fn one_address_fills_the_backlog_and_leaves_the_reserve_to_others() {
    for backlog in [1, 4, 8, 32, 128] {
        let mut w = World::new(1, config);
        w.m[S].listen(None, PORT, backlog).unwrap();
        for n in 0..backlog + 20 {
            give(&mut w, &forged(stranger(1), n));
        }
        assert_eq!(ends(&mut w).len(), backlog as usize);
        assert_eq!(w.m[S].counters().dropped(DropReason::BacklogPeer), 20);
        give(&mut w, &forged(CLIENT, 500));
        request(&mut w);
    }
}

/// As in the kernel, where a request leaves the backlog when the program fetches it (`ucma_get_event`).
#[test]
fn requests_that_the_consumer_takes_over_leave_the_backlog() {
    let mut w = World::new(1, config);
    w.m[S].listen(None, PORT, 1).unwrap();
    let mut taken = Vec::new();
    for n in 0..40 {
        let req = forged(stranger(1), n);
        give(&mut w, &req);
        let (s, _) = request(&mut w);
        give(&mut w, &forged(stranger(1), 100 + n));
        assert_eq!(w.m[S].counters().dropped(DropReason::BacklogPeer), u64::from(n) + 1);
        w.m[S].leave_backlog(s);
        w.m[S].leave_backlog(s);
        taken.push(s);
    }
    for s in taken {
        w.m[S].accept(w.now, s, &accept_args(0x1000 + s.0 as u32)).unwrap();
    }
    // Each of them counted once: the backlog is not below zero.
    give(&mut w, &forged(stranger(1), 200));
    request(&mut w);
    give(&mut w, &forged(stranger(1), 201));
    assert_eq!(w.m[S].counters().dropped(DropReason::BacklogPeer), 41);
}

fn slow_rate() -> World {
    let mut w = World::new(1, |guid| CmConfig {
        mad_rate: RateLimit {
            per_second: 100,
            burst: 20,
        },
        ..config(guid)
    });
    w.m[S].listen(None, PORT, 1024).unwrap();
    w
}

/// An RTU for a connection that there is not.
fn stray(from: IpAddr, n: u32) -> OutMad {
    let rtu = Rtu {
        local_comm_id: n,
        remote_comm_id: !n,
        ..Rtu::default()
    };
    OutMad {
        local: from,
        remote: SERVER,
        mad: Mad::new(u64::from(n), rtu).emit(),
    }
}

#[test]
fn an_address_has_a_rate_and_a_burst_of_its_own() {
    let mut w = slow_rate();
    for n in 0..100 {
        give(&mut w, &stray(CLIENT, n));
    }
    assert_eq!(w.m[S].counters().sent(Attribute::Rej), 20);
    assert_eq!(w.m[S].counters().dropped(DropReason::Rate), 80);
    give(&mut w, &stray(stranger(1), 1));
    assert_eq!(w.m[S].counters().sent(Attribute::Rej), 21);
    w.now = w.now + ms(100);
    for n in 0..100 {
        give(&mut w, &stray(CLIENT, n));
    }
    assert_eq!(w.m[S].counters().sent(Attribute::Rej), 31);
}

#[test]
fn an_ipv6_network_is_one_address() {
    // An on-link sender can use all link-local addresses.
    for network in ["fd00:0:0:7", "fe80:0:0:0"] {
        let address = |n: u32| format!("{network}::{n:x}").parse::<IpAddr>().unwrap();
        let mut w = slow_rate();
        for n in 1..=100 {
            w.m[S].handle_mad(w.now, address(0xffff), address(n), &stray(CLIENT, n).mad);
        }
        assert_eq!(w.m[S].counters().dropped(DropReason::Rate), 80, "{network}");

        let mut w = tight();
        for n in 1..=4 {
            give(&mut w, &forged(address(n), n));
        }
        assert_eq!(w.m[S].usage().half_open_of_peer, 3, "{network}");
        assert_eq!(w.m[S].counters().dropped(DropReason::HalfOpenPeer), 1, "{network}");

        let mut w = World::new(1, config);
        w.m[S].listen(None, PORT, 1).unwrap();
        for n in 1..=4 {
            give(&mut w, &forged(address(n), n));
        }
        assert_eq!(w.m[S].counters().dropped(DropReason::BacklogPeer), 3, "{network}");
    }
}

/// Somebody floods in the name of a peer that has connections and is making one.
#[test]
fn a_flood_in_a_peers_name_does_not_starve_what_it_has() {
    let mut w = slow_rate();
    let (c, s) = established(&mut w, 0x11);
    let (c2, s2) = requested(&mut w, 0x12);
    let req = last_sent(&w, Attribute::Req);
    let flood = |w: &mut World| (0..100).for_each(|n| give(w, &stray(CLIENT, n)));
    flood(&mut w);
    assert!(w.m[S].counters().dropped(DropReason::Rate) > 0);
    // A repetition of a request that is known, a RTU, a DREQ.
    give(&mut w, &req);
    assert_eq!(w.m[S].counters().sent(Attribute::Mra), 1);
    w.m[S].accept(w.now, s2, &accept_args(0x33)).unwrap();
    w.settle();
    w.m[C].qp_ready(w.now, c2).unwrap();
    flood(&mut w);
    w.settle();
    assert_eq!(w.m[S].state(s2), Some(State::Established));
    w.m[C].disconnect(w.now, c);
    flood(&mut w);
    w.settle();
    assert_eq!(w.m[S].state(s), Some(State::Timewait));
}

#[test]
fn repetitions_of_one_request_have_a_rate() {
    let (mut w, _) = listening();
    let req = forged(CLIENT, 1);
    for _ in 0..1000 {
        give(&mut w, &req);
    }
    assert_eq!(w.m[S].counters().sent(Attribute::Mra), 16);
    assert_eq!(w.m[S].counters().dropped(DropReason::Rate), 983);
}

#[test]
fn connections_in_all_are_bounded() {
    let mut w = tight();
    for n in 0..12 {
        give(&mut w, &forged(stranger(n), n));
        let s = accept(&mut w);
        w.m[S].communication_established(w.now, s);
        assert_eq!(
            w.m[S].poll_event(),
            Some(Event::Established {
                conn: s,
                private_data: vec![]
            })
        );
    }
    give(&mut w, &forged(stranger(50), 50));
    assert_eq!(w.m[S].counters().dropped(DropReason::Connections), 1);
    assert!(w.m[S].connect(w.now, &args(1)).is_err());
}

/// A connection that ended is remembered for its peer, unless strangers' own are too many: those go first.
#[test]
fn strangers_do_not_push_out_what_lingers_for_a_peer() {
    let mut w = World::new(1, |guid| CmConfig {
        max_lingering: 4,
        ..config(guid)
    });
    w.m[S].listen(None, PORT, 8).unwrap();
    let (_, s) = established(&mut w, 0x11);
    w.faults.loss = 100;
    w.m[S].destroy(w.now, s);
    w.pump();
    for n in 0..50 {
        give(&mut w, &forged(stranger(n), n));
        let (conn, _) = request(&mut w);
        w.m[S].destroy(w.now, conn);
        w.pump();
    }
    assert_eq!(w.m[S].usage().connections, 4);
    w.faults.loss = 0;
    w.run_for(ms(2000));
    assert!(
        matches!(w.m[C].poll_event(), Some(Event::Disconnected { .. })),
        "the DREQ came again until it was answered"
    );
}

#[test]
fn all_is_counted_by_name() {
    let mut w = slow_rate();
    (0..100).for_each(|n| give(&mut w, &stray(CLIENT, n)));
    let named: std::collections::BTreeMap<_, _> = w.m[S].counters().named().collect();
    assert_eq!((named["cm_received_rtu"], named["cm_drop_rate"]), (100, 80));
    assert_eq!((named["cm_sent_rej"], named["cm_withheld"]), (20, 0));
    assert!(matches!(
        Mad::parse(&stray(CLIENT, 1).mad).unwrap().message,
        Message::Rtu(_)
    ));
}
