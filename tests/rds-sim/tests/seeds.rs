//! A few nodes of RDS in every `cargo test`; `cargo xtask sim --rds` runs thousands.

use ferroce_rds_sim::{RACES, RdsStats, run, run_overloaded, run_race};
use roce_sim::{Failure, RunConfig, run_many};

/// Seeds that once showed a bug. A change of what a seed draws takes their meaning away.
const NOTABLE: &[(u64, &str)] = &[
    (118, "a message for which the node has no room is counted as received"),
    (
        264,
        "a peer dies while its port is congested, and nobody asks the next one for its map",
    ),
    (
        465,
        "a sender that waits for a map does not notice that the peer has died",
    ),
    (
        1,
        "two nodes ask each other for acknowledgements of their pings for ever",
    ),
    (
        1169,
        "a socket that is refused after a map has come, and polled, is not told of the next map",
    ),
    (
        2267,
        "nobody notices the end of a peer that had taken everything and acknowledged nothing",
    ),
    (
        2320,
        "a node that is started again forgets peers that it has not spoken to when it is started once more",
    ),
];

fn run_seeds(seeds: impl IntoIterator<Item = u64>) -> (RdsStats, Vec<Failure>) {
    run_many(seeds, 2, |seed| run(&RunConfig::new(seed)), |_| {})
}

#[test]
fn notable_seeds_pass() {
    for (seed, what) in NOTABLE {
        if let Err(failure) = run(&RunConfig::new(*seed)) {
            panic!("{failure}\n  notable for: {what}");
        }
    }
}

#[test]
fn some_nodes_and_programs() {
    let (total, failures) = run_seeds(1..=40);
    let failed: String = failures.iter().map(|f| format!("{f}\n")).collect();
    assert!(failures.is_empty(), "{failed}");
    assert_eq!(total.runs, 40);
    // The runs must have met what they are for.
    for what in [
        "both connected at once",
        "canceled",
        "cookie",
        "connection lost",
        "connection replaced",
        "crash",
        "destination congested",
        "memory taken back",
        "message behind an operation",
        "no socket",
        "one-way cut",
        "operation canceled",
        "operation done",
        "operation dropped",
        "operation failed",
        "operation refused",
        "partition",
        "socket closed",
        "socket full",
        "told of ports that are free again",
    ] {
        assert!(total.coverage.contains_key(what), "no {what} in 40 runs: {total:?}");
    }
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    let run = || run(&RunConfig::new(7)).unwrap();
    assert_eq!(run(), run());
}

/// A part of all orders, spread over them.
#[test]
fn who_connects_at_once_gets_one_connection() {
    let (total, failures) = run_many(
        (0..RACES).step_by(125),
        2,
        |seed| run_race(&RunConfig::new(seed)),
        |_| {},
    );
    let failed: String = failures.iter().map(|f| format!("{f}\n")).collect();
    assert!(failures.is_empty(), "{failed}");
    assert!(total.coverage.contains_key("both connected at once"), "{total:?}");
}

/// Either waits for the other's answers for longer than that takes, so an attempt is not given up for the next one for ever.
#[test]
fn an_overloaded_kernel_gets_a_connection() {
    let (_, failures) = run_many(0..16, 2, |seed| run_overloaded(&RunConfig::new(seed)), |_| {});
    let failed: String = failures.iter().map(|f| format!("{f}\n")).collect();
    assert!(failures.is_empty(), "{failed}");
}

#[test]
fn the_program_says_how_many_orders_there_are() {
    assert_eq!(RACES, 28_125);
}

#[test]
fn captures_break_no_rule_of_rds() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = String::new();
    for seed in 1..=8 {
        let path = dir.path().join(format!("{seed}.pcap"));
        let mut config = RunConfig::new(seed);
        config.capture = Some(path.clone());
        run(&config).unwrap();
        let report = ferroce_dissect::check_file(&path).unwrap();
        assert!(report.conversations.iter().any(|c| c.name.as_deref() == Some("RDS")));
        for f in report.findings.iter().filter(|f| f.rule.id().starts_with("rds-")) {
            wrong += &format!("{seed}: frame {} x{}: {f}\n", f.frame, f.count);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
