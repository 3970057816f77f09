//! Paths on which a round trip takes longer than the first pause before a probe: the round trip is learnt, and used.

use std::time::Duration;

use roce_qp::WindowConfig;
use roce_verbs::{Mtu, SendOp};

use crate::harness::*;

const MS: Duration = Duration::from_millis(1);
const LONG: Duration = Duration::from_secs(600);
const OPERATIONS: u64 = 128;
const LEN: usize = 64 << 10;

/// Which operations, and towards which kind of peer.
#[derive(Clone, Copy, Debug)]
struct Load {
    reads: bool,
    keeps: bool,
}

const LOADS: [Load; 4] = [
    Load {
        reads: false,
        keeps: false,
    },
    Load {
        reads: false,
        keeps: true,
    },
    Load {
        reads: true,
        keeps: false,
    },
    Load {
        reads: true,
        keeps: true,
    },
];

fn pair(load: Load) -> Pair {
    Pair::new(Setup {
        mtu: Mtu::B4096,
        timeout: 18,
        rd_atomic: 16,
        window: WindowConfig::default(),
        keeps: load.keeps,
        caps: roce_verbs::QpCaps {
            max_send_wr: OPERATIONS as u32,
            ..Setup::default().caps
        },
        ..Setup::default()
    })
}

/// Transfers 8 MiB; of the packets that go the way of the data those are lost whose numbers (from 0) `lost` has. Returns how many round
/// trips it takes.
fn transfer(p: &mut Pair, load: Load, lost: &[usize]) -> f64 {
    let (here, there) = (p.a.filled(LEN, 1), p.b.filled(LEN, 1));
    for i in 0..OPERATIONS {
        let op = match load.reads {
            true => SendOp::Read(at(&there, 0)),
            false => SendOp::Write(at(&there, 0)),
        };
        p.a.send(i, op, &[sge(&here, 0, LEN)]);
    }
    let (begun, mut n) = (p.now, 0);
    let data = if load.reads { Dir::BtoA } else { Dir::AtoB };
    p.run_with(LONG, |dir, _| {
        n += usize::from(dir == data);
        match dir == data && lost.contains(&(n - 1)) {
            true => Fate::Drop,
            false => Fate::Deliver,
        }
    });
    let done = p.a.completions();
    assert_eq!(done.iter().filter(|c| c.is_ok()).count() as u64, OPERATIONS, "{load:?}");
    assert_eq!(p.a.window.in_flight(), 0);
    p.now.saturating_since(begun).as_secs_f64() / (p.delay * 2).as_secs_f64()
}

#[test]
fn a_path_is_filled_however_long_it_is() {
    for load in LOADS {
        for one_way in [2, 6, 12, 25, 50, 100, 150] {
            let mut p = pair(load);
            p.delay = MS * one_way;
            let round_trips = transfer(&mut p, load, &[]);
            let again = p.a.counters.retransmits;
            assert!(
                round_trips < 16.0,
                "{load:?}, {one_way} ms: {round_trips} round trips, {again} packets again"
            );
            // One probe or two for each doubling of the pause, and what a timeout that proves unfounded sends.
            assert!(again <= 64, "{load:?}, {one_way} ms: {again} packets sent again");
        }
    }
}

#[test]
fn what_is_lost_before_the_round_trip_is_known_does_not_keep_the_window_small() {
    for load in LOADS {
        for one_way in [6, 10, 25, 50] {
            // The first of all, the last of the first flight, in the second flight, and probes.
            for lost in [vec![0], vec![15], vec![14, 15, 16], vec![20], vec![16, 17, 44, 45]] {
                let mut p = pair(load);
                p.delay = MS * one_way;
                let round_trips = transfer(&mut p, load, &lost);
                assert!(
                    round_trips < 40.0,
                    "{load:?}, {one_way} ms, {lost:?} lost: {round_trips} round trips"
                );
            }
        }
    }
}

#[test]
fn a_path_that_becomes_longer_is_learnt_anew() {
    for load in LOADS {
        let mut p = pair(load);
        p.delay = MS / 10;
        transfer(&mut p, load, &[]);
        p.delay = MS * 40;
        let before = p.a.counters.retransmits;
        let round_trips = transfer(&mut p, load, &[]);
        let again = p.a.counters.retransmits - before;
        // It is taken for a queue at first, and the window kept small.
        assert!(
            round_trips < 60.0,
            "{load:?}: {round_trips} round trips, {again} packets again"
        );
        assert!(again <= 300, "{load:?}: {again} packets sent again");
    }
}
