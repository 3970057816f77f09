//! Cost of losses: time and packets that a transfer takes, by operation, loss and kind of peer, as in `tests/losses.txt`.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path, time::Duration};

use roce_bth::Packet;
use roce_qp::WindowConfig;
use roce_verbs::{Mtu, SendOp};

use crate::harness::*;

const MTU: usize = 256;
/// Weight of a packet in the window, bytes.
const PACKET: usize = MTU + 512;
const LONG: Duration = Duration::from_secs(600);

/// Peers: one that drops what is beyond a gap, one of which we buffer such packets unasked, and one with selective ACKs.
const PEERS: [(&str, bool, bool); 3] = [
    ("go-back-N", false, false),
    ("buffered", true, false),
    ("selective", false, true),
];

/// Operations: name, and the lengths in packets of each message, with the kind of its work request.
const LOADS: [(&str, &[(Kind, usize)]); 7] = [
    ("a WRITE of 40 packets", &[(Kind::Write, 40)]),
    ("10 SENDs of 3 packets", &[(Kind::Send, 3); 10]),
    ("a READ of 40 packets", &[(Kind::Read, 40)]),
    ("8 READs of 5 packets", &[(Kind::Read, 5); 8]),
    ("12 atomics", &[(Kind::Atomic, 1); 12]),
    (
        "READs between WRITEs",
        &[(Kind::Write, 6), (Kind::Read, 7), (Kind::Write, 6), (Kind::Read, 7)],
    ),
    (
        "one of each, three times",
        &[
            (Kind::Send, 2),
            (Kind::Read, 3),
            (Kind::Atomic, 1),
            (Kind::Write, 4),
            (Kind::Read, 1),
            (Kind::Send, 1),
            (Kind::Atomic, 1),
            (Kind::Write, 1),
            (Kind::Read, 9),
            (Kind::Send, 4),
        ],
    ),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Send,
    Read,
    Atomic,
}

/// A packet on its way: its number in its direction, from 0, and how often its PSN was sent that way before.
struct Sent {
    dir: Dir,
    n: usize,
    before: usize,
}

/// Name of a loss, and the fate of a packet.
type Loss = (&'static str, fn(&Sent) -> Fate);

const LOSSES: [Loss; 20] = [
    ("none", |_| Fate::Deliver),
    ("the first request", |s| lost(s.is_request(0..1))),
    ("the last request", |s| lost(s.dir == Dir::AtoB && s.n + 1 == FULL)),
    ("a request", |s| lost(s.is_request(4..5))),
    ("a request, twice", |s| {
        lost(s.is_request(2..3) || s.dir == Dir::AtoB && s.before == 1)
    }),
    ("two requests", |s| lost(s.is_request(3..4) || s.is_request(7..8))),
    ("four requests in a row", |s| lost(s.is_request(2..6))),
    ("all requests after the second, once", |s| {
        lost(s.is_request(2..FULL) && s.before == 0)
    }),
    ("every fifth request", |s| lost(s.is_request(0..60) && s.n % 5 == 4)),
    ("the first answer", |s| lost(s.is_answer(0..1))),
    ("an answer", |s| lost(s.is_answer(3..4))),
    ("an answer, twice", |s| {
        lost(s.is_answer(2..3) || s.dir == Dir::BtoA && s.before == 1)
    }),
    ("four answers in a row", |s| lost(s.is_answer(1..5))),
    ("all answers after the second, once", |s| {
        lost(s.is_answer(2..FULL) && s.before == 0)
    }),
    ("every third answer", |s| lost(s.is_answer(0..60) && s.n % 3 == 2)),
    ("every seventh packet", |s| lost(s.n < 100 && s.n % 7 == 3)),
    ("all packets behind the second, once", |s| {
        lost(s.n >= 2 && s.before == 0)
    }),
    ("none; a request is two late", |s| late(s.is_request(3..4), 2)),
    ("none; a request is nine late", |s| late(s.is_request(3..4), 9)),
    ("none; every fourth packet comes twice", |s| match s.n % 4 {
        1 => Fate::Twice,
        _ => Fate::Deliver,
    }),
];

/// Milliseconds in which no packet arrives. What is retransmitted in them is lost, too.
const OUTAGES: [u64; 4] = [5, 50, 200, 700];

/// Number of requests of the longest load.
const FULL: usize = 40;

impl Sent {
    fn is_request(&self, which: core::ops::Range<usize>) -> bool {
        self.dir == Dir::AtoB && which.contains(&self.n)
    }

    fn is_answer(&self, which: core::ops::Range<usize>) -> bool {
        self.dir == Dir::BtoA && which.contains(&self.n)
    }
}

fn lost(is: bool) -> Fate {
    if is { Fate::Drop } else { Fate::Deliver }
}

fn late(is: bool, packets: usize) -> Fate {
    if is { Fate::Late(packets) } else { Fate::Deliver }
}

/// A connection over which some messages have gone, with a window of 24 packets.
fn pair(quiet: bool, keeps: bool) -> Pair {
    let mut p = Pair::new(Setup {
        mtu: Mtu::B256,
        rd_atomic: 4,
        quiet,
        keeps,
        window: WindowConfig {
            initial: 24 * PACKET,
            min: 8 * PACKET,
            max: 48 * PACKET,
        },
        ..Setup::default()
    });
    let (src, dst) = (p.a.filled(MTU, 1), p.b.region(MTU));
    for n in 0..4 {
        p.a.send(n, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, MTU)]);
        p.run();
    }
    assert_eq!(p.a.completions().len(), 4);
    p
}

/// Runs a load, during an outage first, and checks that everything has arrived. Returns its cost: microseconds, packets of both ways,
/// packets sent again.
fn cost(p: &mut Pair, load: &[(Kind, usize)], outage: Duration, fate: fn(&Sent) -> Fate) -> String {
    let others = p.a.window.in_flight();
    let total: usize = load.iter().map(|(_, packets)| packets * MTU).sum();
    let (here, there) = (p.a.filled(total, 3), p.b.filled(total, 5));
    let (results, sum) = (p.a.region(8 * load.len()), p.b.region(8));
    let mut place = 0;
    for (id, (kind, packets)) in (0..).zip(load) {
        let len = packets * MTU;
        let local = [sge(&here, place, len)];
        match kind {
            Kind::Write => p.a.send(id, SendOp::Write(at(&there, place)), &local),
            Kind::Read => p.a.send(id, SendOp::Read(at(&there, place)), &local),
            Kind::Send => {
                p.b.recv(id, &[sge(&there, place, len)]);
                p.a.send(id, SendOp::Send, &local);
            }
            Kind::Atomic => {
                let (remote, result) = (at(&sum, 0), [sge(&results, 8 * id as usize, 8)]);
                p.a.send(id, SendOp::FetchAdd { remote, add: 1 }, &result);
            }
        }
        place += len;
    }
    let (begun, mut seen, mut count) = (p.now, BTreeMap::new(), [0; 2]);
    if !outage.is_zero() {
        p.run_with(outage, |dir, _| {
            count[dir as usize] += 1;
            Fate::Drop
        });
    }
    p.run_with(LONG, |dir, packet: &Packet<'_>| {
        let before = seen.entry((dir as u8, packet.header.bth.psn.value())).or_insert(0);
        let sent = Sent {
            dir,
            n: count[dir as usize],
            before: *before,
        };
        (*before, count[dir as usize]) = (*before + 1, count[dir as usize] + 1);
        fate(&sent)
    });
    check(p, load, [&here, &there], others);
    let took = Duration::from_nanos(p.now.as_nanos() - begun.as_nanos());
    // Timeouts double. None is longer than the quarter of a second that takes a retry.
    let most = outage + outage.clamp(Duration::from_millis(32), Duration::from_millis(250));
    assert!(
        outage.is_zero() || took < most + Duration::from_millis(1),
        "{took:?} for an outage of {outage:?}"
    );
    let c = (&p.a.counters, &p.b.counters);
    format!(
        "{:6} us {:3}+{:3}, {:2}+{:2} again, {} {} {}",
        took.as_micros(),
        count[0],
        count[1],
        c.0.retransmits,
        c.1.retransmits,
        c.0.tail_probes,
        c.0.timeouts,
        c.0.spurious_timeouts,
    )
}

/// Checks that all of a load has completed once and is in memory, and that nothing is left in the window but what is of others.
fn check(p: &Pair, load: &[(Kind, usize)], [here, there]: [&roce_verbs::mem::Region; 2], others: usize) {
    let done = p.a.completions();
    let ids: Vec<u64> = done.iter().map(|c| c.wr_id).collect();
    assert!(done.iter().all(|c| c.is_ok()));
    assert_eq!(ids, (0..load.len() as u64).collect::<Vec<_>>());
    let sends = load.iter().filter(|(kind, _)| *kind == Kind::Send).count();
    assert_eq!(p.b.received().len(), sends);
    let mut place = 0;
    for (kind, packets) in load {
        let len = packets * MTU;
        let salt = if *kind == Kind::Read { 5 } else { 3 };
        let expected = &pattern(place + len, salt)[place..];
        if *kind != Kind::Atomic {
            assert_eq!(bytes(here, place, len), expected);
            assert_eq!(bytes(there, place, len), expected);
        }
        place += len;
    }
    assert_eq!((p.a.qp.in_flight(), p.b.qp.in_flight()), (0, 0));
    assert_eq!((p.a.window.in_flight(), p.b.window.in_flight()), (others, 0));
}

/// A higher figure is a regression; `UPDATE_GOLDEN=1` writes lower ones.
#[test]
fn a_loss_costs_what_it_must() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/losses.txt");
    let updates = std::env::var_os("UPDATE_GOLDEN").is_some();
    let golden = fs::read_to_string(&path).unwrap_or_default();
    let mut expected = golden.lines();
    let mut text = String::new();
    let mut next = |line: String| {
        if !updates {
            let case = text.lines().rfind(|line| !line.starts_with(' '));
            assert_eq!(expected.next(), Some(line.as_str()), "{case:?}");
        }
        writeln!(text, "{line}").unwrap();
    };
    for (load, messages) in LOADS {
        for (loss, fate) in LOSSES {
            next(format!("{load}; lost: {loss}"));
            for (peer, quiet, keeps) in PEERS {
                next(format!(
                    "    {peer:9} {}",
                    cost(&mut pair(quiet, keeps), messages, Duration::ZERO, fate)
                ));
            }
        }
        for outage in OUTAGES.map(Duration::from_millis) {
            next(format!("{load}; lost: all packets for {outage:?}"));
            for (peer, quiet, keeps) in PEERS {
                let cost = cost(&mut pair(quiet, keeps), messages, outage, |_| Fate::Deliver);
                next(format!("    {peer:9} {cost}"));
            }
        }
    }
    if updates {
        fs::write(&path, &text).expect("tests/losses.txt");
    }
    assert!(updates || expected.next().is_none());
}

/// Packets counted twice for one queue pair would be missing for another one.
#[test]
fn a_loss_leaves_the_part_of_other_queue_pairs_in_the_window_as_it_was() {
    for (_, messages) in LOADS {
        for (_, fate) in LOSSES {
            for (_, quiet, keeps) in PEERS {
                let mut p = pair(quiet, keeps);
                p.a.window.on_sent(4 * PACKET);
                cost(&mut p, messages, Duration::ZERO, fate);
            }
        }
    }
}
