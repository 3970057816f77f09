//! A few simulated networks in every `cargo test`; `cargo xtask sim` runs thousands.

use roce_pcap::{Rule, Severity, check_file};
use roce_sim::{Failure, LEAST_GOODPUT, RunConfig, Runs, SimConfig, Stats, run, run_many};

/// Seeds that reach what few others do (README.md), or that once showed a bug. A change of what a seed draws takes their
/// meaning away: a bug found in earnest gets a test of its own as well.
const NOTABLE: &[(u64, &str)] = &[
    (
        529,
        "a requester with few RNR retries, and a peer that posts no receives any more",
    ),
    (830, "the same"),
    (
        1470,
        "a queue pair that was reset while it waited for the window, and then had to wait again",
    ),
    (3329, "the same"),
    (
        75_842_497_846_521,
        "a requester without retries on a network that swaps packets and loses none",
    ),
    (15334, "a message of UC is on its way when all else is done"),
];

/// Pairs of runs that show what teaching a peer's Identifications does to it, if strangers may.
const GOODPUT: &[u64] = &[3, 31, 79, 93, 107, 121];

fn small(seed: u64) -> SimConfig {
    SimConfig::new(RunConfig {
        scale: 40,
        ..RunConfig::new(seed)
    })
}

/// Runs seeds on two threads, with the options of `base`.
fn run_seeds(seeds: impl IntoIterator<Item = u64>, base: &SimConfig) -> (Stats, Vec<Failure>) {
    run_many(seeds, 2, |seed| run(&base.with_seed(seed)), |_| {})
}

#[test]
fn notable_seeds_pass() {
    for (seed, what) in NOTABLE {
        if let Err(failure) = run(&SimConfig::new(RunConfig::new(*seed))) {
            panic!("{failure}\n  notable for: {what}");
        }
    }
}

#[test]
fn some_networks() {
    let (total, failures) = run_seeds(1..=60, &small(0));
    assert!(failures.is_empty(), "{}", failures[0]);
    assert_eq!(total.runs, 60);
    // The runs must have met what they are for.
    for (what, n) in [
        ("lost packets", total.lost),
        ("doubled packets", total.duplicated),
        ("overtaken packets", total.reordered),
        ("damaged packets", total.corrupted),
        ("damage found by the ICRC", total.icrc_errors),
        ("overflows", total.overflowed),
        ("retransmissions", total.retransmissions),
        ("RNR NAKs", total.rnr_naks),
        ("messages", total.messages),
        ("messages of other services", total.service_messages),
        ("faulty operations", total.faulty_operations),
        ("missing pages", total.missing_pages),
        ("disturbances", total.disturbances),
        ("repairs", total.repairs),
        ("connections managed", total.cm_events),
    ] {
        assert!(n > 0, "no {what} in 60 runs: {total:?}");
    }
    for status in [
        "FlushError",
        "RemoteAccessError",
        "RemoteInvalidRequestError",
        "LocalProtectionError",
    ] {
        let met = total.errors.contains_key(status);
        assert!(met, "no {status} in 60 runs: {:?}", total.errors);
    }
}

#[test]
fn queues_that_overflow_cost_a_bounded_share_of_retransmissions() {
    let base = SimConfig {
        runs: Runs::Narrow,
        ..SimConfig::new(RunConfig::new(0))
    };
    let (total, failures) = run_seeds(1..=24, &base);
    assert!(failures.is_empty(), "{}", failures[0]);
    assert!(total.overflowed > 1000, "{total:?}");
    assert_eq!((total.lost, total.corrupted), (0, 0));
    let share = total.retransmissions as f64 / total.packets as f64;
    assert!(share < 0.1, "{share:.3} of all packets are retransmissions: {total:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [5, 6, 7, 8] {
        let (a, b) = (run(&small(seed)).unwrap(), run(&small(seed)).unwrap());
        assert_eq!(a, b, "seed {seed}");
        assert_ne!(a.trace_hash, run(&small(seed + 1000)).unwrap().trace_hash);
    }
}

#[test]
fn what_the_ports_send_is_sound_to_an_independent_check() {
    let dir = std::env::temp_dir();
    for seed in [11, 12, 13, 14] {
        let path = dir.join(format!("roce-sim-test-{}-{seed}.pcap", std::process::id()));
        let mut config = small(seed);
        config.run.capture = Some(path.clone());
        let stats = run(&config).unwrap();
        let report = roce_pcap::check_file(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(report.frames, stats.packets, "seed {seed}");
        assert_eq!(report.icrc_ok, stats.packets, "seed {seed}");
        assert_eq!(
            report.verdict,
            roce_pcap::Verdict::Good,
            "seed {seed}: {:?}",
            report.findings
        );
    }
}

fn failed(failures: &[Failure]) -> String {
    failures.iter().map(|f| format!("{f}\n")).collect()
}

#[test]
fn an_adversary_that_sees_nothing_changes_nothing() {
    let base = SimConfig {
        runs: Runs::Attacked,
        ..small(0)
    };
    let (total, failures) = run_seeds(1..=16, &base);
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.forged > 1000 && total.reflected > 0, "{total:?}");
    assert!(total.at_live > 1000, "{total:?}");
    assert!(total.backlog_drops > 0, "no backlog was full: {total:?}");
    // A request that waits names the peer of a queue pair that programs connect without one.
    let attacked = |seed| {
        let config = SimConfig {
            runs: Runs::Attacked,
            ..SimConfig::new(RunConfig::new(seed))
        };
        run(&config).unwrap_or_else(|failure| panic!("{failure}"))
    };
    attacked(1766);
    let stats = attacked(131);
    assert!(
        stats.question_drops > 0,
        "no program held all the questions that it may: {stats:?}"
    );
}

#[test]
fn packets_of_strangers_at_live_psns_change_nothing() {
    let base = SimConfig {
        runs: Runs::Strangers,
        ..small(0)
    };
    let (total, failures) = run_seeds(1..=30, &base);
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.at_live > 10_000, "{total:?}");
}

#[test]
fn copies_of_packets_beyond_a_gap_are_not_executed() {
    let base = SimConfig {
        runs: Runs::Copies,
        ..small(0)
    };
    let (total, failures) = run_seeds(1..=30, &base);
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.copies > 20, "{total:?}");
}

#[test]
fn what_is_drawn_does_not_depend_on_the_adversary() {
    let mut peaceful = 0;
    for seed in 1..=4 {
        let drawn = SimConfig {
            runs: Runs::Drawn,
            ..small(seed)
        };
        let with = run(&drawn).unwrap();
        if with.forged + with.meddled + with.admitted + with.pairs == 0 {
            assert_eq!(with, run(&small(seed)).unwrap(), "seed {seed}");
            peaceful += 1;
        }
    }
    assert!(peaceful > 0);
}

#[test]
fn goodput_stays_under_attack() {
    let base = SimConfig {
        runs: Runs::Goodput,
        ..small(0)
    };
    let (total, failures) = run_seeds(GOODPUT.iter().copied(), &base);
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert_eq!(total.pairs, GOODPUT.len() as u64);
    let share = total.goodput();
    assert!(share >= LEAST_GOODPUT, "{share:.3} of the goodput is left: {total:?}");
}

#[test]
fn who_sees_everything_harms_one_connection_only() {
    let base = SimConfig {
        runs: Runs::Observed,
        ..small(0)
    };
    let (total, failures) = run_seeds(1..=16, &base);
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.meddled > 100, "{total:?}");
}

/// Rules that the simulator's programs break, or that it makes look broken.
const EXPECTED: [Rule; 2] = [
    // Programs misalign atomics on purpose.
    Rule::AtomicAlignment,
    // A queue pair is reset and connected to another peer at once, without the connection manager: a capture does not show that.
    Rule::AckGhost,
];

#[test]
fn the_judge_finds_no_fault_with_peaceful_runs() {
    let dir = tempfile::tempdir().unwrap();
    let judged = |seed| {
        let path = dir.path().join(format!("{seed}.pcap"));
        let mut config = small(seed);
        config.run.capture = Some(path.clone());
        let stats = run(&config)?;
        let report = check_file(&path).unwrap();
        let faults = report.findings.iter().filter(|f| f.severity == Severity::Error);
        let unexpected: Vec<String> = faults
            .filter(|f| !EXPECTED.contains(&f.rule))
            .map(|f| format!("seed {seed}, frame {}: {f}", f.frame))
            .collect();
        std::fs::remove_file(&path).unwrap();
        assert!(unexpected.is_empty(), "{}", unexpected.join("\n"));
        assert!(report.complete && report.icrc_bad == 0, "seed {seed}");
        Ok(stats)
    };
    let (total, failures) = run_many(1..=250, 2, judged, |_| {});
    assert!(failures.is_empty(), "{}", failures[0]);
    assert_eq!(total.runs, 250);
    assert!(total.lost > 0 && total.retransmissions > 0);
}
