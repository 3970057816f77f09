//! A few servers and clients with storage in every `cargo test`; `cargo xtask sim --storage` runs thousands.

use ferroce_storage_sim::{StorageConfig, StorageStats, run};
use roce_sim::{Failure, RunConfig, run_many};

/// Seeds that reach what few others do (README.md), or that once showed a bug. A change of what a seed draws takes their
/// meaning away: a bug found in earnest gets a test of its own as well.
const NOTABLE: &[(u64, &str)] = &[
    (
        224,
        "the acknowledgement of a client's information request is lost, and its answer is not",
    ),
    (
        3253,
        "a session is closed while its user still has the buffer of an answer, and gives it back in another way",
    ),
    (
        17,
        "a path is taken down with a read in flight, whose message comes after the one that went by another path",
    ),
    (
        15997,
        "a read gives the zeroes of a write that is still under way, where a discard that is over may have left some",
    ),
];

fn usual(seed: u64) -> StorageConfig {
    StorageConfig::new(RunConfig::new(seed))
}

fn small(seed: u64) -> StorageConfig {
    StorageConfig::new(RunConfig {
        scale: 40,
        ..RunConfig::new(seed)
    })
}

/// Runs seeds on two threads, with the options of `base`.
fn run_seeds(seeds: impl IntoIterator<Item = u64>, base: &StorageConfig) -> (StorageStats, Vec<Failure>) {
    run_many(seeds, 2, |seed| run(&base.with_seed(seed)), |_| {})
}

fn failed(failures: &[Failure]) -> String {
    failures.iter().map(|f| format!("{f}\n")).collect()
}

#[test]
fn notable_seeds_pass() {
    for (seed, what) in NOTABLE {
        if let Err(failure) = run(&usual(*seed)) {
            panic!("{failure}\n  notable for: {what}");
        }
    }
}

#[test]
fn some_servers_with_disks() {
    let (total, failures) = run_seeds(1..=60, &usual(0));
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert_eq!(total.runs, 60);
    // The runs must have met what they are for.
    for what in [
        "always_invalidate",
        "block status",
        "client crash",
        "close while a request is on its way",
        "device closed and opened again",
        "device opened after reconnecting",
        "device taken",
        "different MTUs",
        "discard",
        "disk error",
        "flush failed",
        "hole",
        "instant keys at a client",
        "instant keys at the server",
        "invalidate_reads",
        "moved to another host",
        "no always_invalidate",
        "no invalidate_reads",
        "no memory",
        "one flush for several",
        "operation lost",
        "partition",
        "path held back",
        "power failure",
        "queued keys at a client",
        "queued keys at the server",
        "read-only device",
        "request parked",
        "server crash",
        "session closed by its user",
        "failover",
        "held operations",
        "network cut",
        "path added",
        "path came back",
        "path ended by the server",
        "path removed",
        "policy changed",
        "several connections",
        "several devices of a session",
        "several paths",
        "short read",
        "stall and cut",
        "slow disk",
        "write by two paths",
        "write with FUA",
        "write with PREFLUSH",
        "write zeroes",
        "zeroes as data",
        "server names no instance",
        "writes reported lost",
        "lost writes told",
    ] {
        assert!(total.coverage.contains_key(what), "no {what} in 60 runs: {total:?}");
    }
}

#[test]
fn a_flush_that_succeeds_over_lost_writes_is_found() {
    let base = StorageConfig {
        hidden_losses: true,
        ..usual(0)
    };
    let (_, failures) = run_seeds(1..=60, &base);
    let found = |f: &&Failure| f.text.contains("succeeds over acknowledged writes that are lost");
    assert!(failures.iter().any(|f| found(&f)), "{}", failed(&failures));
    assert!(failures.iter().all(|f| found(&f)), "{}", failed(&failures));
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [5, 6, 7, 8] {
        let run = |seed| ferroce_storage_sim::run(&small(seed)).unwrap();
        assert_eq!(run(seed), run(seed), "seed {seed}");
        assert_ne!(run(seed).trace_hash, run(seed + 1000).trace_hash);
    }
}

#[test]
fn clients_are_accepted_under_a_flood_of_requests() {
    let base = StorageConfig {
        admission: true,
        ..usual(0)
    };
    let (total, failures) = run_seeds(1..=6, &base);
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.admitted >= 6 && total.forged > 100, "{total:?}");
}
