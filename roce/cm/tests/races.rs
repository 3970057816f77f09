//! MADs that overtake one another, or come after the end.

mod common;

use common::pair::*;
use roce_cm::{
    Event, RejectReason,
    mad::{Attribute, Subject},
    state::State,
};

#[test]
fn dreq_overtakes_the_rep() {
    let (mut w, _) = listening();
    let (c, s) = requested(&mut w, 0x11);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    let rep = w.m[S].poll_mad().unwrap();
    w.m[S].disconnect(w.now, s);
    w.settle();
    // The client learns that it is over, and says so.
    assert!(
        matches!(w.m[C].poll_event(), Some(Event::Rejected { conn, reason: RejectReason::CONSUMER, .. }) if conn == c)
    );
    assert_eq!(
        w.m[S].poll_event(),
        Some(Event::Disconnected {
            conn: s,
            timed_out: false
        })
    );
    assert_eq!(
        (w.m[C].state(c), w.m[S].state(s)),
        (Some(State::Timewait), Some(State::Timewait))
    );
    // The REP comes at last: no connection on one side only.
    again(&mut w, rep);
    assert_eq!(w.m[C].poll_event(), None);
    assert_eq!((last_rej(&w).reason, last_rej(&w).subject), (6, Subject::Rep));
}

#[test]
fn dreq_with_another_queue_pair_does_not_end_an_attempt() {
    let (mut w, _) = listening();
    let (c, s) = requested(&mut w, 0x11);
    w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
    w.m[S].poll_mad().unwrap();
    w.m[S].disconnect(w.now, s);
    let mut dreq = w.m[S].poll_mad().unwrap();
    dreq.mad[24 + 10] ^= 1;
    again(&mut w, dreq);
    assert_eq!((w.m[C].state(c), w.m[C].poll_event()), (Some(State::ReqSent), None));
}

/// A client that connects while the server gives up: the RTU comes to the closed connection.
#[test]
fn rtu_after_the_end_is_rejected() {
    for forgotten in [false, true] {
        let (mut w, _) = listening();
        let (c, s) = replied(&mut w, 0x11);
        w.faults.loss = 100;
        w.m[C].qp_ready(w.now, c).unwrap();
        w.pump();
        let rtu = last_sent(&w, Attribute::Rtu);
        while w.m[S].state(s) != Some(State::Timewait) {
            let at = w.next_event().unwrap();
            w.advance(at);
        }
        if forgotten {
            w.run_dry();
            w.m[S].destroy(w.now, s);
            assert_eq!(w.m[S].connections(), 0);
        }
        w.faults.loss = 0;
        assert_eq!(w.m[C].state(c), Some(State::Established));
        again(&mut w, rtu);
        assert_eq!(
            w.m[C].poll_event(),
            Some(Event::Disconnected {
                conn: c,
                timed_out: false
            }),
            "forgotten: {forgotten}"
        );
    }
}

#[test]
fn rtu_for_a_rejected_reply() {
    let (mut w, _) = listening();
    let (c, s) = replied(&mut w, 0x11);
    w.m[C].qp_ready(w.now, c).unwrap();
    let rtu = w.m[C].poll_mad().unwrap();
    // The server's view of the peer is torn down by a REQ for the same queue pair.
    let req = last_sent(&w, Attribute::Req);
    again(&mut w, with_req(req, |r| r.local_comm_id ^= 0x5555));
    assert_eq!(last_rej(&w).reason, 10);
    assert!(matches!(w.m[S].poll_event(), Some(Event::Rejected { conn, .. }) if conn == s));
    again(&mut w, rtu);
    // The DREQ that followed has ended the client's side.
    assert_eq!(
        w.m[C].poll_event(),
        Some(Event::Disconnected {
            conn: c,
            timed_out: false
        })
    );
    w.run_dry();
    assert_eq!(
        (w.m[C].state(c), w.m[S].state(s)),
        (Some(State::Over), Some(State::Over))
    );
}

/// Both sides end an attempt in the same moment, at every stage of it.
#[test]
fn both_end_an_attempt_at_once() {
    for stage in 0..3 {
        let (mut w, _) = listening();
        let (c, s) = match stage {
            0 => requested(&mut w, 0x11),
            1 => {
                let (c, s) = requested(&mut w, 0x11);
                w.m[S].accept(w.now, s, &accept_args(0x22)).unwrap();
                (c, s)
            }
            _ => replied(&mut w, 0x11),
        };
        w.m[C].disconnect(w.now, c);
        w.m[S].disconnect(w.now, s);
        w.run_dry();
        for (side, conn) in [(C, c), (S, s)] {
            let ends: Vec<_> = std::iter::from_fn(|| w.m[side].poll_event())
                .filter(|e| !matches!(e, Event::TimewaitExit { .. }))
                .collect();
            assert_eq!(
                ends,
                [Event::Disconnected { conn, timed_out: false }],
                "stage {stage} side {side}"
            );
            assert_eq!(w.m[side].state(conn), Some(State::Over), "stage {stage} side {side}");
        }
    }
}
