//! What is counted of a path.

use rtrs::{
    Direction, Error,
    client::{PathCommand, PathCounters, PathId, PathNews, PathStats, Policy, SessionConfig, state::PathState},
    stats::RdmaStats,
};

use crate::{
    host::KeyMode,
    hosts::{Pair, addresses},
    paths::LONG,
    server,
};

impl Pair {
    /// Times that a path came up again, and attempts that failed.
    fn reconnects(&self, path: usize) -> (i32, u32) {
        let stats = &self.statuses()[path].stats;
        (stats.reconnects, stats.failed_reconnects)
    }

    /// Attempts to connect a path that have been told of as failed.
    fn failures(&mut self, path: PathId) -> u32 {
        let failed = |news: &PathNews| {
            matches!(
                news,
                PathNews::AttemptFailed(_) | PathNews::Done(PathCommand::Reconnect, Err(_))
            )
        };
        let told = self
            .news
            .iter()
            .filter(|(of, news)| *of == path && failed(news))
            .count();
        self.news.clear();
        told as u32
    }

    fn reset(&mut self, path: usize, which: PathCounters) {
        let (session, path) = (self.session(), self.statuses()[path].id);
        self.client.reset_path_stats(session, path, which).unwrap();
    }

    /// The second way is cut, and stays so for a while.
    fn cut_second(&mut self) {
        self.cut_off = vec![addresses(1)[1]];
        self.pass(LONG);
        assert_ne!(self.statuses()[1].state, PathState::Connected);
    }

    fn mend(&mut self) {
        self.cut_off.clear();
        self.pass(LONG);
        assert_eq!(self.states(), [PathState::Connected; 2]);
    }
}

/// A session over two ways, the second of which is cut when it is opened.
fn half() -> Pair {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    let paths = pair.ways(2);
    pair.cut_off = vec![addresses(1)[1]];
    pair.ask_open(|config| {
        config.paths = paths;
        config.connect_any = true;
        config.max_reconnects = SessionConfig::FOREVER;
    });
    pair.pass(LONG);
    pair
}

#[test]
fn reconnects_are_counted_as_in_the_kernel() {
    let mut pair = half();
    let second = pair.statuses()[1].id;
    let mut failures = pair.failures(second);
    assert!(failures > 2, "{failures}");
    failures -= 1;
    assert_eq!(pair.reconnects(0), (0, 0));
    assert_eq!(pair.reconnects(1), (-1, failures), "the first attempt does not count");
    pair.mend();
    failures += pair.failures(second);
    assert_eq!(pair.reconnects(1), (0, failures));
    pair.cut_second();
    pair.mend();
    failures += pair.failures(second);
    assert_eq!(pair.reconnects(1), (1, failures));

    // By hand: the attempt counts as any other.
    pair.command(second, PathCommand::Disconnect).unwrap();
    pair.pass(LONG);
    assert_eq!(pair.failures(second), 0);
    assert_eq!(pair.reconnects(1), (1, failures));
    pair.cut_off = vec![addresses(1)[1]];
    pair.command(second, PathCommand::Reconnect).unwrap();
    pair.pass(LONG);
    pair.mend();
    failures += pair.failures(second);
    assert_eq!(pair.reconnects(1), (2, failures));
    assert_eq!(pair.reconnects(0), (0, 0));
    pair.told.clear();
    pair.close();
    pair.assert_empty();
}

#[test]
fn after_a_reset_each_time_that_a_path_comes_up_counts() {
    let mut pair = half();
    pair.reset(1, PathCounters::Reconnects);
    assert_eq!(pair.reconnects(1), (0, 0));
    pair.mend();
    assert_eq!(pair.reconnects(1).0, 1, "the first time, too");
    pair.reset(1, PathCounters::Reconnects);
    pair.cut_second();
    pair.mend();
    assert_eq!(pair.reconnects(1).0, 1);
    assert_eq!(pair.reconnects(0), (0, 0));
    pair.told.clear();
    pair.close();
    pair.assert_empty();
}

/// Counts of a path, by processor.
fn migrations(pair: &Pair, path: usize) -> [Vec<u64>; 2] {
    let moved = pair.statuses()[path].stats.cpu_migration.clone();
    [moved.from, moved.to]
}

#[test]
fn an_answer_on_another_processor_is_counted() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(2, |config| config.policy = Policy::RoundRobin);
    pair.hold = true;
    pair.client.set_cpu(3);
    pair.send(0..4, Direction::Write);
    pair.client.set_cpu(1);
    pair.send(4..6, Direction::Read);
    pair.release();
    pair.settle();
    pair.assert_done(0..6);
    assert_eq!(migrations(&pair, 0), [vec![0, 0, 0, 2], vec![0, 2]]);
    assert_eq!(migrations(&pair, 1), [vec![0, 0, 0, 2], vec![0, 2]]);

    // What goes by another path was sent there last.
    pair.hold = true;
    pair.send(6..8, Direction::Write);
    pair.client.set_cpu(2);
    pair.cut_off = vec![addresses(1)[1]];
    pair.pass(LONG);
    assert_eq!(pair.in_flight(), [2, 0]);
    pair.client.set_cpu(0);
    pair.release();
    pair.pass(LONG);
    pair.assert_done(6..8);
    assert_eq!(migrations(&pair, 0), [vec![0, 1, 1, 2], vec![2, 2]]);
    assert_eq!(migrations(&pair, 1), [vec![0, 0, 0, 2], vec![0, 2]]);
    pair.reset(0, PathCounters::CpuMigration);
    assert_eq!(migrations(&pair, 0), [vec![], vec![]]);
    pair.close();
    pair.assert_empty();
}

#[test]
fn counters_are_reset_alone_or_all_together() {
    use PathCounters::{All, CpuMigration, Rdma, Reconnects};
    for which in [Rdma, Reconnects, CpuMigration, All] {
        let mut pair = Pair::new(KeyMode::Instant, server(true));
        pair.open_ways(2, |config| config.policy = Policy::RoundRobin);
        pair.cut_second();
        pair.mend();
        // The answers of the first come on another processor; then requests go over to the first path, and stay in flight.
        pair.hold = true;
        pair.send(0..4, Direction::Write);
        pair.client.set_cpu(1);
        pair.release();
        pair.settle();
        pair.assert_done(0..4);
        pair.hold = true;
        pair.send(4..8, Direction::Read);
        pair.cut_second();
        assert_eq!(pair.in_flight(), [4, 0]);
        let before = [0, 1].map(|path| pair.statuses()[path].stats.clone());
        assert_eq!((before[0].failovers, before[1].reconnects), (2, 1));
        assert_ne!(before[1].failed_reconnects, 0);
        for (path, before) in before.into_iter().enumerate() {
            assert!(before.rdma.reads > 0 && before.rdma.writes > 0 && before.cpu_migration.from == [2]);
            let reset = |of| which == of || which == All;
            let expected = PathStats {
                rdma: if reset(Rdma) { RdmaStats::default() } else { before.rdma },
                failovers: if reset(Rdma) { 0 } else { before.failovers },
                reconnects: if reset(Reconnects) { 0 } else { before.reconnects },
                failed_reconnects: if reset(Reconnects) { 0 } else { before.failed_reconnects },
                cpu_migration: match reset(CpuMigration) {
                    true => Default::default(),
                    false => before.cpu_migration,
                },
            };
            pair.reset(path, which);
            assert_eq!(pair.statuses()[path].stats, expected, "{which:?}");
        }
        // Which the kernel sets to 0, too (`rtrs_clt_reset_all_stats`), and below that when they end.
        assert_eq!(pair.in_flight(), [4, 0]);
        pair.release();
        pair.mend();
        pair.assert_done(4..8);
        assert_eq!(pair.in_flight(), [0, 0]);
        pair.close();
        pair.assert_empty();
    }
}

#[test]
fn a_path_that_is_added_begins_with_nothing_counted() {
    let mut pair = Pair::new(KeyMode::Instant, server(true));
    pair.open_ways(1, |_| ());
    let mut nowhere = pair.ways(2)[1];
    nowhere.dst.set_port(9);
    pair.add(nowhere).unwrap();
    assert_eq!(pair.reconnects(1), (-1, 0));
    pair.settle();
    assert!(matches!(
        pair.outcome(PathCommand::Add),
        Some(Err(Error::Rejected { .. }))
    ));
    // Its place goes to the next.
    let way = pair.ways(2)[1];
    pair.add(way).unwrap();
    pair.settle();
    assert!(matches!(pair.outcome(PathCommand::Add), Some(Ok(()))));
    assert_eq!(pair.reconnects(1), (0, 0));
    pair.close();
    pair.assert_empty();
}
