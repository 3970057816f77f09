//! Packets that are sent again, and those that are not: answers that come twice, long READs, windows that have shrunk.

use std::time::Duration;

use roce_bth::{Packet, Reth};
use roce_qp::{Loss, WindowConfig};
use roce_verbs::SendOp;

use crate::harness::*;

const MTU: usize = 1024;

/// A pair that has measured a round trip.
fn warm(keeps: bool) -> Pair {
    let mut p = Pair::new(Setup {
        keeps,
        window: WindowConfig {
            initial: 512 << 10,
            min: 16 << 10,
            max: 1 << 20,
        },
        ..Setup::default()
    });
    write(&mut p, 1);
    p.run();
    p.a.completions();
    p
}

fn write(p: &mut Pair, packets: usize) {
    let (src, dst) = (p.a.filled(MTU * packets, 1), p.b.region(MTU * packets));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, MTU * packets)]);
}

fn packets(side: &mut Side) -> Vec<Vec<u8>> {
    side.drain().into_iter().map(|(_, bytes)| bytes).collect()
}

/// Lets the next timer of A expire. Returns what it sends, and how long that took.
fn expire(p: &mut Pair) -> (Vec<Vec<u8>>, Duration) {
    let before = p.a.now;
    p.a.now = p.a.qp.next_timeout().expect("a timer").max(before);
    p.a.timeout();
    let took = Duration::from_nanos(p.a.now.as_nanos() - before.as_nanos());
    (packets(&mut p.a), took)
}

fn reth(bytes: &[u8]) -> Option<Reth> {
    Packet::parse(bytes).expect("a packet").header.reth()
}

#[test]
fn a_peer_that_is_slow_is_not_probed_sooner() {
    let mut p = warm(false);
    for n in 0..4 {
        write(&mut p, 1);
        let sent = packets(&mut p.a);
        let (probe, took) = expire(&mut p);
        assert_eq!(
            (sent.len(), probe.len(), took),
            (1, 1, Duration::from_millis(16)),
            "{n}"
        );
        // Both answers come: the probe was needless.
        for bytes in [&sent[0], &probe[0]] {
            p.b.handle(bytes);
            packets(&mut p.b).iter().for_each(|bytes| p.a.handle(bytes));
        }
        assert_eq!(p.a.completions().len(), 1);
    }
}

#[test]
fn a_gap_that_is_reported_twice_is_repaired_once() {
    let mut p = warm(false);
    write(&mut p, 4);
    let sent = packets(&mut p.a);
    [0, 2].iter().for_each(|n| p.b.handle(&sent[*n]));
    let nak = packets(&mut p.b);
    assert_eq!(nak.len(), 1);
    p.a.handle(&nak[0]);
    assert_eq!(packets(&mut p.a).len(), 3);
    p.a.handle(&nak[0]);
    assert!(packets(&mut p.a).is_empty());
    assert_eq!(p.a.counters.retransmits, 3);
}

/// All of its answers may be on their way, and would be sent twice. A peer with selective ACKs reports what it has kept. Where packets were
/// lost before, silences are shorter.
#[test]
fn a_long_read_is_asked_for_again_only_after_silences() {
    for (keeps, lossy, silences) in [(false, false, 1), (true, false, 1), (false, true, 4), (true, true, 1)] {
        let mut p = warm(keeps);
        if lossy {
            write(&mut p, 4);
            let sent = packets(&mut p.a);
            [0, 2, 3].iter().for_each(|n| p.b.handle(&sent[*n]));
            p.run();
            assert_eq!(p.a.completions().len(), 1);
        }
        let len = 100 * MTU;
        let (src, dst) = (p.b.filled(len, 1), p.a.region(len));
        p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, len)]);
        let asked = packets(&mut p.a);
        assert_eq!(asked.len(), 1);
        for n in 0..silences {
            assert!(expire(&mut p).0.is_empty(), "keeps {keeps}, lossy {lossy}, silence {n}");
        }
        let (again, _) = expire(&mut p);
        assert_eq!(again.len(), 1, "keeps {keeps}, lossy {lossy}");
        assert_eq!(reth(&again[0]), reth(&asked[0]), "keeps {keeps}, lossy {lossy}");
    }
}

/// To the peer it may be new: a shorter one would count as a message of its own.
#[test]
fn a_read_that_may_be_unknown_to_the_peer_is_asked_for_unchanged_however_small_the_window() {
    for keeps in [false, true] {
        let mut p = warm(keeps);
        let len = 40 * MTU;
        let (src, dst) = (p.b.filled(len, 1), p.a.region(len));
        p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, len)]);
        let asked = packets(&mut p.a);
        // Other queue pairs have losses.
        for _ in 0..20 {
            let now = p.a.now;
            p.a.window.on_loss(now, Loss::Timeout, 0);
            p.a.now = now + Duration::from_micros(500);
        }
        let mut again = vec![];
        while again.is_empty() {
            again = expire(&mut p).0;
        }
        assert_eq!(reth(&again[0]), reth(&asked[0]), "keeps {keeps}");
    }
}
