//! A few nodes of LNet in every `cargo test`; `cargo xtask sim --lnet` runs thousands.

use ferroce_lnet_sim::{Full, Traffic, run, run_full, run_planted};
use lnet::Planted;
use roce_sim::{RunConfig, run_many};

#[test]
fn some_nodes_and_programs() {
    let (total, failures) = run_many(1..=40, 2, |seed| run(&RunConfig::new(seed)), |_| {});
    let failed: String = failures.iter().map(|f| format!("{f}\n")).collect();
    assert!(failures.is_empty(), "{failed}");
    assert_eq!(total.runs, 40);
    // The runs must have met what they are for.
    for what in [
        "GET served",
        "all hosts without credits",
        "both connected at once",
        "connection lost",
        "connection without progress",
        "crash",
        "forged request to connect",
        "one-way cut",
        "operation failed",
        "partition",
        "no credit left",
        "no place for an answer left",
        "ping",
        "process that stands still",
        "selftest: as many requests of a peer as may be",
        "selftest: batch runs",
        "selftest: data fetched",
        "selftest: data sent",
        "selftest: session removed",
        "stranger: damaged request",
        "stranger: flood",
        "stranger: guessed match bits",
        "stranger: large test",
        "stranger: repeated request",
        "stranger: request for data",
        "stranger: request of a host",
        "stranger: request to the framework",
    ] {
        assert!(total.coverage.contains_key(what), "no {what} in 40 runs: {total:?}");
    }
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    let run = || run(&RunConfig::new(7)).unwrap();
    assert_eq!(run(), run());
}

/// Depths of both hosts.
const DEPTHS: [[u16; 2]; 9] = [
    [2, 2],
    [2, 255],
    [8, 42],
    [3, 3],
    [4, 4],
    [8, 8],
    [42, 42],
    [128, 128],
    [255, 255],
];

#[test]
fn hosts_that_are_full_of_puts_do_not_stop_each_other() {
    for traffic in [Traffic::Puts, Traffic::Both] {
        let seeds = 1..=DEPTHS.len() as u64;
        let full = |seed: u64| Full {
            depths: DEPTHS[seed as usize - 1],
            traffic,
        };
        let (total, failures) = run_many(seeds, 2, |seed| run_full(&RunConfig::new(seed), &full(seed)), |_| {});
        let failed: String = failures.iter().map(|f| format!("{f}\n")).collect();
        assert!(failures.is_empty(), "{traffic:?}: {failed}");
        assert_eq!(total.begun, total.done);
        let [runs, _] = total.coverage["all hosts without credits"];
        assert_eq!(runs, 9, "{traffic:?}: {total:?}");
    }
}

#[test]
fn planted_bugs_are_found() {
    for planted in [Planted::PutReqReturns, Planted::NoReserve, Planted::NoopCosts] {
        // Nobody needs their captures.
        let config = |seed| RunConfig {
            pcap_dir: Some("/nonexistent".into()),
            ..RunConfig::new(seed)
        };
        let is_found = (1..=40).any(|seed| run_planted(&config(seed), planted).is_err());
        assert!(is_found, "{planted:?} is not found in 40 runs");
    }
}
