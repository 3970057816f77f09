//! MADs that overtake one another, or come after the end.

use crate::common::{CLIENT, SERVER, World, ms, pair::*};
use roce_port::cm::{
    Event, RejectReason,
    mad::{Attribute, Subject},
    state::State,
};
use roce_verbs::Qpn;

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
            assert_eq!(w.m[S].usage().connections, 0);
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

/// Somebody who sees nothing, but puts the client's address on his packets and guesses its GUID and queue pair number: the
/// kernel makes the one of the network card's address and counts the other up.
#[test]
fn guessed_numbers_neither_end_a_connection_nor_keep_one_from_being_made() {
    let (mut w, _) = listening();
    let (c1, s1) = established(&mut w, 0x11);
    // Before the client asks, while it is being answered, and after.
    let forge = |w: &mut World, qpn: u32, id: u32| {
        let req = last_sent(w, Attribute::Req);
        let forged = with_req(req, |r| {
            r.local_qpn = Qpn::new(qpn);
            r.local_comm_id = id;
        });
        w.m[S].handle_mad(w.now, SERVER, CLIENT, &forged.mad);
    };
    forge(&mut w, 0x12, 1);
    let forged = w.m[S].poll_event();
    assert!(matches!(forged, Some(Event::Request { .. })), "{forged:?}");
    let (c2, s2) = requested(&mut w, 0x12);
    forge(&mut w, 0x12, 2);
    w.m[S].accept(w.now, s2, &accept_args(0x22)).unwrap();
    w.settle();
    assert!(matches!(w.m[C].poll_event(), Some(Event::Reply { conn, .. }) if conn == c2));
    forge(&mut w, 0x12, 3);
    w.m[C].qp_ready(w.now, c2).unwrap();
    w.settle();
    for id in 4..20 {
        forge(&mut w, 0x11, id);
        forge(&mut w, 0x12, id + 100);
        w.run_for(ms(500));
    }
    for (side, conn) in [(C, c1), (C, c2), (S, s1), (S, s2)] {
        assert_eq!(w.m[side].state(conn), Some(State::Established), "{side} {conn:?}");
    }
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
