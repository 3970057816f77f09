//! DREQs that go between other addresses than their connection's.

use std::net::SocketAddr;

use crate::common::{CLIENT, CLIENT_2, SERVER, SERVER_2, World, ms, pair::*};
use roce_port::cm::{
    ConnId, ConnectArgs, DropReason, Event, OutMad,
    mad::{Attribute, Drep, Dreq, Mad, Message},
    state::State,
};
use roce_verbs::Qpn;

/// A connection that the server has ended, with a farewell by the other network; and all that left the server by and by, of which
/// nothing has arrived.
fn cut_off() -> (World, ConnId, ConnId, Mad) {
    let (mut w, _) = listening();
    let (c, s) = established(&mut w, 0x11);
    let args = ConnectArgs {
        local: SocketAddr::new(CLIENT_2, 40_000),
        remote: SocketAddr::new(SERVER_2, PORT),
        ..args(0x22)
    };
    let other = w.m[C].connect(w.now, &args).unwrap();
    w.settle();
    let (by, _) = request(&mut w);
    w.m[S].accept(w.now, by, &accept_args(0x23)).unwrap();
    w.settle();
    assert!(matches!(w.m[C].poll_event(), Some(Event::Reply { .. })));
    let dreq = Mad::new(1, Dreq::default());
    assert!(
        !w.m[S].send_farewell(w.now, by, &dreq),
        "the other network's connection is half-open"
    );
    w.m[C].qp_ready(w.now, other).unwrap();
    w.settle();
    assert!(matches!(w.m[S].poll_event(), Some(Event::Established { .. })));
    assert_eq!(w.m[S].farewell(s), None, "it stands");
    w.m[S].disconnect(w.now, s);
    let dreq = w.m[S].farewell(s).unwrap();
    assert!(w.m[S].send_farewell(w.now, by, &dreq));
    (w, c, s, dreq)
}

/// Collects the MADs that leave the server within so many milliseconds by the other network. The rest is lost.
fn by_the_other(w: &mut World, millis: u64) -> Vec<OutMad> {
    let mut all = Vec::new();
    for _ in 0..millis {
        w.now = w.now + ms(1);
        w.m[S].handle_timeout(w.now);
        all.extend(std::iter::from_fn(|| w.m[S].poll_mad()).filter(|out| out.local == SERVER_2));
    }
    all
}

#[test]
fn it_names_the_connection_and_is_sent_four_times() {
    let (mut w, _, s, dreq) = cut_off();
    let Message::Dreq(m) = dreq.message else {
        panic!("{dreq:?}")
    };
    assert_eq!(m.remote_qpn, Qpn::new(0x11));
    let usual = loop {
        let out = w.m[S].poll_mad().unwrap();
        match out.remote {
            CLIENT => break out,
            _ => assert_eq!((out.local, out.remote, out.mad), (SERVER_2, CLIENT_2, dreq.emit())),
        }
    };
    assert_eq!(usual.mad, dreq.emit(), "the same goes the usual way");
    let sent = by_the_other(&mut w, 20_000);
    assert!((3..=4).contains(&sent.len()), "{}", sent.len());
    assert!(sent.iter().all(|out| (out.remote, out.mad) == (CLIENT_2, dreq.emit())));
    assert_eq!(w.m[S].state(s), Some(State::Over));
    assert_eq!(w.m[S].next_timeout(), None);
}

#[test]
fn its_answer_ends_it() {
    let (mut w, _, _, dreq) = cut_off();
    let Message::Dreq(m) = dreq.message else {
        panic!("{dreq:?}")
    };
    let drep = Drep {
        local_comm_id: m.remote_comm_id,
        remote_comm_id: m.local_comm_id,
        ..Drep::default()
    };
    let other = Drep {
        local_comm_id: m.remote_comm_id ^ 1,
        ..drep
    };
    while w.m[S].poll_mad().is_some() {}
    for (from, drep, most) in [(CLIENT, drep, 1), (CLIENT_2, other, 1), (CLIENT_2, drep, 0)] {
        let bytes = Mad::new(dreq.transaction_id, drep).emit();
        w.m[S].handle_mad(w.now, SERVER_2, from, &bytes);
        let sent = by_the_other(&mut w, if most == 0 { 20_000 } else { 400 });
        assert!(sent.len() <= most, "{from} {drep:?}: {}", sent.len());
        assert_eq!(sent.is_empty(), most == 0);
    }
}

/// Numbers can be seen on the way, so that an address that is not the connection's is not listened to. Our client finds out by itself
/// that a path is dead.
#[test]
fn we_do_not_take_one() {
    let (mut w, c, s, dreq) = cut_off();
    w.m[C].handle_mad(w.now, CLIENT_2, SERVER_2, &dreq.emit());
    w.m[C].handle_mad(w.now, CLIENT, SERVER_2, &dreq.emit());
    assert_eq!((w.m[C].state(c), w.m[C].poll_event()), (Some(State::Established), None));
    assert_eq!(w.m[C].counters().dropped(DropReason::WrongAddress), 2);
    w.m[C].handle_mad(w.now, CLIENT, SERVER, &dreq.emit());
    assert!(matches!(w.m[C].poll_event(), Some(Event::Disconnected { conn, .. }) if conn == c));
    w.settle();
    assert_eq!(w.m[S].state(s), Some(State::Timewait));
    assert_eq!(kind(&last_sent(&w, Attribute::Drep)), Attribute::Drep);
}
