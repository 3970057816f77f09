//! ICMP errors about requests, true and forged.

use std::net::IpAddr;

use crate::common::{CLIENT, SERVER, World, pair::*};
use roce_port::cm::{Event, ResolveArgs, cma::PortSpace, mad::MAD_LEN, state::State};
use roce_verbs::provider::NoAnswer;

const CLOSED: NoAnswer = NoAnswer::PortUnreachable;

fn undeliverable(w: &mut World, remote: IpAddr, quoted: &[u8]) -> bool {
    w.m[C].handle_undeliverable(w.now, remote, quoted, CLOSED)
}

#[test]
fn an_error_that_quotes_a_request_ends_its_wait_at_once() {
    let mut w = world();
    let c = connect(&mut w, 0x11);
    let other = connect(&mut w, 0x12);
    assert!(w.m[C].awaits_answer());
    let req = w.m[C].poll_mad().unwrap();
    // Some routers quote 64 bytes of the packet only.
    assert!(undeliverable(&mut w, SERVER, &req.mad[..28]));
    assert_eq!(w.m[C].poll_event(), Some(Event::Unreachable { conn: c, why: CLOSED }));
    assert_eq!(w.m[C].poll_event(), None);
    assert!(!undeliverable(&mut w, SERVER, &req.mad), "it has ended");
    assert_eq!(
        w.m[C].state(other),
        Some(State::ReqSent),
        "another attempt to the same host waits on"
    );
    assert_eq!(w.m[C].counters().undeliverable, 1);
    w.m[C].destroy(w.now, c);
    w.m[C].destroy(w.now, other);
    assert!(!w.m[C].awaits_answer());
    while w.m[C].poll_mad().is_some() {}
    w.run_dry();
    assert_eq!(w.m[C].usage().connections, 0);
}

#[test]
fn what_does_not_quote_the_request_changes_nothing() {
    let mut w = world();
    let c = connect(&mut w, 0x11);
    let req = w.m[C].poll_mad().unwrap().mad;
    assert!(!undeliverable(&mut w, CLIENT, &req), "sent to another host");
    for len in 0..28 {
        assert!(!undeliverable(&mut w, SERVER, &req[..len]), "{len} bytes");
    }
    // Each bit of the header, the transaction ID and the communication ID counts.
    for bit in 0..28 * 8 {
        let mut forged: [u8; MAD_LEN] = req;
        forged[bit / 8] ^= 1 << (bit % 8);
        assert!(!undeliverable(&mut w, SERVER, &forged), "bit {bit}");
    }
    assert_eq!(w.m[C].state(c), Some(State::ReqSent));
    assert_eq!(w.m[C].poll_event(), None);
}

#[test]
fn a_request_that_was_answered_once_is_not_ended_by_an_error() {
    let (mut w, _) = listening();
    let c = connect(&mut w, 0x11);
    let req = w.m[C].poll_mad().unwrap().mad;
    w.m[S].handle_mad(w.now, SERVER, CLIENT, &req);
    w.m[S].handle_mad(w.now, SERVER, CLIENT, &req);
    w.settle();
    assert_eq!(
        w.m[C].state(c),
        Some(State::ReqExtended),
        "its repetition was answered by an MRA"
    );
    assert!(!undeliverable(&mut w, SERVER, &req));
    let (s, _) = request(&mut w);
    w.m[S].accept(w.now, s, &accept_args(0x21)).unwrap();
    w.settle();
    for state in [State::RepReceived, State::Established] {
        assert_eq!(w.m[C].state(c), Some(state));
        assert!(!w.m[C].awaits_answer());
        assert!(!undeliverable(&mut w, SERVER, &req), "{state:?}");
        let _ = w.m[C].qp_ready(w.now, c);
        w.settle();
    }
}

#[test]
fn an_error_that_quotes_a_question_ends_its_wait() {
    let mut w = world();
    let asked = ResolveArgs {
        local: std::net::SocketAddr::new(CLIENT, 0),
        remote: std::net::SocketAddr::new(SERVER, PORT),
        space: PortSpace::Udp,
        private_data: Vec::new(),
    };
    let asked = w.m[C].resolve(w.now, &asked).unwrap();
    assert!(w.m[C].awaits_answer());
    let req = w.m[C].poll_mad().unwrap().mad;
    let mut forged = req;
    forged[8] ^= 1;
    assert!(!undeliverable(&mut w, SERVER, &forged), "another transaction");
    assert!(!undeliverable(&mut w, CLIENT, &req), "sent to another host");
    assert!(undeliverable(&mut w, SERVER, &req));
    assert_eq!(
        w.m[C].poll_event(),
        Some(Event::Unreachable {
            conn: asked,
            why: CLOSED
        })
    );
    assert!(!w.m[C].awaits_answer());
    assert!(!undeliverable(&mut w, SERVER, &req));
}
