//! FLUSHes to persistence that take their time: what comes behind them waits, and nothing else does.

use std::{sync::Arc, time::Duration};

use roce_bth::Selectivity;
use roce_verbs::mem::Region;
use roce_verbs::{QpAttr, QpState, SendOp, WcStatus};

use crate::{
    harness::*,
    memory_placement::{Log, PERSISTENT, all, flush, ids, persistent},
};

const MS: Duration = Duration::from_millis(1);

/// Of peers that keep packets and tell, that keep them, and that do not.
fn setups() -> [Setup; 3] {
    let plain = Setup {
        access: all(),
        ..Setup::default()
    };
    let (keeps, quiet) = (
        Setup {
            keeps: true,
            ..plain.clone()
        },
        Setup {
            quiet: true,
            ..plain.clone()
        },
    );
    [keeps, quiet, plain]
}

/// A FLUSH of what `b` has, which is under way.
fn begun(setup: Setup, log: &Arc<Log>) -> (Pair, Arc<Region>) {
    let mut p = Pair::new(setup);
    p.b.is_slow = true;
    let dst = persistent(&p.b, 4096, all(), log);
    p.a.send(1, flush(&dst, 0, 64, PERSISTENT, Selectivity::Range), &[]);
    (p, dst)
}

fn ranges(log: &Log) -> Vec<(usize, usize)> {
    log.ranges.lock().unwrap().clone()
}

#[test]
fn what_is_behind_a_flush_waits_for_its_end() {
    for (setup, kept) in setups().into_iter().zip([true, true, false]) {
        let log = Arc::new(Log::default());
        let (mut p, dst) = begun(setup, &log);
        let (src, back, got) = (p.a.filled(3000, 3), p.a.region(3000), p.b.region(3000));
        p.b.recv(9, &[sge(&got, 0, 3000)]);
        p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 3000)]);
        p.a.send(3, SendOp::Read(at(&dst, 0)), &[sge(&back, 0, 3000)]);
        p.a.send(4, SendOp::Send, &[sge(&src, 0, 3000)]);
        p.run_with(MS * 5, |_, _| Fate::Deliver);
        assert!(p.a.completions().is_empty() && p.b.received().is_empty());
        assert!(bytes(&dst, 0, 3000).iter().all(|b| *b == 0) && ranges(&log).is_empty());
        assert!(p.b.persist() && !p.b.persist());
        p.run();
        assert_eq!(ids(&p.a.completions()), [1, 2, 3, 4].map(|id| (id, WcStatus::Success)));
        assert_eq!((ranges(&log), p.b.received().len()), (vec![(0, 64)], 1));
        assert_eq!(
            [bytes(&dst, 0, 3000), bytes(&back, 0, 3000), bytes(&got, 0, 3000)],
            [pattern(3000, 3), pattern(3000, 3), pattern(3000, 3)]
        );
        if kept {
            assert_eq!((p.a.counters.retransmits, p.b.counters.dropped_requests), (0, 0));
        }
    }
}

#[test]
fn what_is_lost_behind_a_flush_is_made_good() {
    for setup in setups() {
        let log = Arc::new(Log::default());
        let (mut p, dst) = begun(setup, &log);
        let src = p.a.filled(4000, 3);
        for i in 0..20 {
            p.a.send(2 + i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 4000)]);
        }
        p.a.send(30, flush(&dst, 64, 64, PERSISTENT, Selectivity::Range), &[]);
        let mut n = 0;
        for _ in 0..40 {
            p.run_with(MS * 50, |_, _| {
                n += 1;
                if n % 7 == 3 { Fate::Drop } else { Fate::Deliver }
            });
            p.b.persist();
        }
        let done = p.a.completions();
        assert!(done.len() == 22 && done.iter().all(|c| c.is_ok()), "{done:?}");
        assert_eq!(ranges(&log), [(0, 64), (64, 64)], "each once");
        assert_eq!(bytes(&dst, 0, 4000), pattern(4000, 3));
    }
}

#[test]
fn a_flush_that_fails_ends_the_connection_before_what_is_behind_it() {
    for setup in setups() {
        let log = Arc::new(Log {
            broken: true,
            ..Log::default()
        });
        let (mut p, dst) = begun(setup, &log);
        let src = p.a.filled(64, 3);
        p.a.send(2, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
        p.run_with(MS, |_, _| Fate::Deliver);
        assert!(p.b.persist());
        p.run();
        let expected = [(1, WcStatus::RemoteOperationError), (2, WcStatus::FlushError)];
        assert_eq!(ids(&p.a.completions()), expected);
        assert!(bytes(&dst, 0, 64).iter().all(|b| *b == 0));
        assert_eq!(p.b.qp.state(), QpState::Err);
    }
}

#[test]
fn memory_that_is_taken_back_meanwhile_is_not_touched() {
    let log = Arc::new(Log::default());
    let [setup, ..] = setups();
    let (mut p, dst) = begun(setup, &log);
    p.run_with(MS, |_, _| Fate::Deliver);
    p.b.mem.deregister(&dst).unwrap();
    assert!(p.b.persist());
    p.run();
    assert_eq!(ids(&p.a.completions()), [(1, WcStatus::RemoteAccessError)]);
    assert!(ranges(&log).is_empty());
}

#[test]
fn a_former_life_s_flush_is_not_taken_for_that_of_the_next() {
    let log = Arc::new(Log::default());
    let [setup, ..] = setups();
    let (mut p, dst) = begun(setup.clone(), &log);
    p.run_with(MS, |_, _| Fate::Deliver);
    let former = p.b.qp.take_persist_job().unwrap();
    for side in [&mut p.a, &mut p.b] {
        side.modify(&QpAttr {
            state: Some(QpState::Reset),
            ..QpAttr::default()
        });
    }
    p.a.bring_up(&setup, B, setup.psn, setup.psn);
    p.b.bring_up(&setup, A, setup.psn, setup.psn);
    p.a.send(5, flush(&dst, 8, 8, PERSISTENT, Selectivity::Range), &[]);
    p.run_with(MS, |_, _| Fate::Deliver);
    p.b.end_persist_job(&former);
    p.run_with(MS, |_, _| Fate::Deliver);
    assert!(p.a.completions().is_empty());
    assert!(p.b.persist());
    p.run();
    assert_eq!(ids(&p.a.completions()), [(5, WcStatus::Success)]);
}

#[test]
fn what_was_buffered_behind_a_flush_before_it_began_waits_too() {
    let [setup, ..] = setups();
    let log = Arc::new(Log::default());
    let mut p = Pair::new(setup);
    p.b.is_slow = true;
    let dst = persistent(&p.b, 4096, all(), &log);
    let src = p.a.filled(8, 3);
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 8)]);
    p.a.send(2, flush(&dst, 0, 8, PERSISTENT, Selectivity::Range), &[]);
    p.a.send(3, SendOp::Write(at(&dst, 8)), &[sge(&src, 0, 8)]);
    let sent = p.a.drain();
    [1, 2, 0].iter().for_each(|n: &usize| p.b.handle(&sent[*n].1));
    let written = [pattern(8, 3), vec![0; 8]].concat();
    assert_eq!(bytes(&dst, 0, 16), written);
    assert!(p.b.persist());
    p.run();
    assert_eq!(bytes(&dst, 8, 8), pattern(8, 3));
}
