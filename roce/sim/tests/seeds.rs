//! A few simulated networks in every `cargo test`; `cargo xtask sim` runs thousands.

use roce_sim::{Adversary, LEAST_GOODPUT, SimConfig, run, run_many, run_many_storage, run_storage};

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
    (15334, "a message of UC is on its way when all else is done"),
];

/// Likewise of runs with storage.
const NOTABLE_STORAGE: &[(u64, &str)] = &[
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

/// Pairs of runs that show what teaching a peer's Identifications does to it, if strangers may.
const GOODPUT: &[u64] = &[3, 31, 79, 93, 107, 121];

fn small(seed: u64) -> SimConfig {
    SimConfig {
        scale: 40,
        ..SimConfig::new(seed)
    }
}

#[test]
fn notable_seeds_pass() {
    for (seed, what) in NOTABLE {
        if let Err(failure) = run(&SimConfig::new(*seed)) {
            panic!("{failure}\n  notable for: {what}");
        }
    }
}

#[test]
fn some_networks() {
    let (total, failures) = run_many(1..=60, 2, &small(0), |_, _| {});
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
        bottleneck: true,
        ..SimConfig::new(0)
    };
    let (total, failures) = run_many(1..=24, 2, &base, |_, _| {});
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
        let config = SimConfig {
            capture: Some(path.clone()),
            ..small(seed)
        };
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

fn failed(failures: &[roce_sim::Failure]) -> String {
    failures.iter().map(|f| format!("{f}\n")).collect()
}

#[test]
fn an_adversary_that_sees_nothing_changes_nothing() {
    let base = SimConfig {
        adversary: Adversary::Always,
        ..small(0)
    };
    let (total, failures) = run_many(1..=16, 2, &base, |_, _| {});
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.forged > 1000 && total.reflected > 0, "{total:?}");
    assert!(total.at_live > 1000, "{total:?}");
    assert!(total.backlog_drops > 0, "no backlog was full: {total:?}");
}

#[test]
fn packets_of_strangers_at_live_psns_change_nothing() {
    let base = SimConfig {
        strangers: true,
        ..small(0)
    };
    let (total, failures) = run_many(1..=30, 2, &base, |_, _| {});
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.at_live > 10_000, "{total:?}");
}

#[test]
fn copies_of_packets_beyond_a_gap_are_not_executed() {
    let base = SimConfig {
        copies: true,
        ..small(0)
    };
    let (total, failures) = run_many(1..=30, 2, &base, |_, _| {});
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.copies > 20, "{total:?}");
}

#[test]
fn what_is_drawn_does_not_depend_on_the_adversary() {
    let mut peaceful = 0;
    for seed in 1..=4 {
        let drawn = SimConfig {
            adversary: Adversary::Drawn,
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
        goodput: true,
        ..small(0)
    };
    let (total, failures) = run_many(GOODPUT.iter().copied(), 2, &base, |_, _| {});
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert_eq!(total.pairs, GOODPUT.len() as u64);
    let share = total.goodput();
    assert!(share >= LEAST_GOODPUT, "{share:.3} of the goodput is left: {total:?}");
}

#[test]
fn who_sees_everything_harms_one_connection_only() {
    let base = SimConfig {
        observer: true,
        ..small(0)
    };
    let (total, failures) = run_many(1..=16, 2, &base, |_, _| {});
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.meddled > 100, "{total:?}");
}

#[test]
fn clients_get_in_under_a_flood_of_requests() {
    let base = SimConfig {
        admission: true,
        ..small(0)
    };
    let (total, failures) = run_many(1..=6, 2, &base, |_, _| {});
    assert!(failures.is_empty(), "{}", failed(&failures));
    assert!(total.admitted >= 6 && total.forged > 100, "{total:?}");
}

#[test]
fn notable_seeds_with_storage_pass() {
    for (seed, what) in NOTABLE_STORAGE {
        if let Err(failure) = run_storage(&SimConfig::new(*seed)) {
            panic!("{failure}\n  notable for: {what}");
        }
    }
}

#[test]
fn some_servers_with_disks() {
    let (total, failures) = run_many_storage(1..=60, 2, &SimConfig::new(0), |_, _| {});
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
    let base = SimConfig {
        hidden_losses: true,
        ..SimConfig::new(0)
    };
    let (_, failures) = run_many_storage(1..=60, 2, &base, |_, _| {});
    let found = |f: &&roce_sim::Failure| f.text.contains("succeeds over acknowledged writes that are lost");
    assert!(failures.iter().any(|f| found(&f)), "{}", failed(&failures));
    assert!(failures.iter().all(|f| found(&f)), "{}", failed(&failures));
}

#[test]
fn the_same_seed_with_storage_gives_the_same_run() {
    for seed in [5, 6, 7, 8] {
        let run = |seed| run_storage(&small(seed)).unwrap();
        assert_eq!(run(seed), run(seed), "seed {seed}");
        assert_ne!(run(seed).trace_hash, run(seed + 1000).trace_hash);
    }
}
