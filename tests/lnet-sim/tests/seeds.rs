//! A few nodes of LNet in every `cargo test`; `cargo xtask sim --lnet` runs thousands.

use ferroce_lnet_sim::run;
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
        "both connected at once",
        "connection lost",
        "connection without progress",
        "crash",
        "forged request to connect",
        "one-way cut",
        "operation failed",
        "partition",
        "ping",
        "process that stands still",
        "selftest: batch runs",
        "selftest: data fetched",
        "selftest: data sent",
        "selftest: session removed",
    ] {
        assert!(total.coverage.contains_key(what), "no {what} in 40 runs: {total:?}");
    }
}

#[test]
fn a_seed_gives_the_same_run_each_time() {
    let run = || run(&RunConfig::new(7)).unwrap();
    assert_eq!(run(), run());
}
