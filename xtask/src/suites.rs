//! The test suites and the simulator.

use std::{fmt, path::Path, process::Stdio, time::Instant};

use clap::{Args, ValueEnum};

use crate::{
    Result, SimArgs, apps,
    cargo::{self, Profile},
    interop, process, tools,
};

/// How much of each suite runs.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Set {
    /// What CI has time for
    Ci,
    /// 20,000 simulated networks, 4096 cases a property, every scenario of the lab (about an hour)
    Full,
}

/// Seeds of the simulator with --quick, in the set `ci` and in the set `full`; a quarter of the runs have an adversary, and
/// beside some there are runs with an observer, of a server under a flood, and pairs that compare goodput.
const SIM_SEEDS: [u64; 3] = [100, 2000, 20_000];
/// Cases of each property that does not say how many itself, in the set `full`.
const FULL_CASES: (&str, &str) = ("PROPTEST_CASES", "4096");

/// Ignored tests that make a namespace, to mount a file system or for addresses.
const PRIVILEGED: [&str; 2] = [
    "a_full_disk_is_an_error_and_what_was_flushed_stays",
    "a_device_over_ipv6",
];

/// Ignored tests that only root can run, as they need several users or a set-uid program: package, file, how many.
const SEVERAL_USERS: [(&str, &str, u64); 3] = [
    ("roce-broker", "isolation", 7),
    ("roce-broker", "environment", 1),
    ("roce-net", "environment", 1),
];

/// Tests of the lab's cleaning up in the set `ci`, the cheapest (a quarter of a minute together): a run that is interrupted,
/// and one that fails.
const CI_CLEANUP: [&str; 2] = ["ctrl_c_while_a_guest_boots", "a_scenario_that_fails"];

#[derive(Args, Clone)]
pub(crate) struct TestArgs {
    /// How much of each suite; end-to-end and real-clients are the same in both
    #[arg(long, value_enum, default_value_t = Set::Ci)]
    set: Set,
    /// Unit tests and a few simulated networks only
    #[arg(long, conflicts_with = "set")]
    quick: bool,
    /// Exit with 0 although a suite could not be run
    #[arg(long)]
    allow_not_run: bool,
    /// Only these suites
    #[arg(long = "suite", value_name = "NAME", value_parser = ["unit", "sim", "end-to-end", "real-clients", "apps", "interop"])]
    suites: Vec<String>,
}

/// What a suite came to.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Tests (or whole suites, as 1) that could not be run, with the reason.
    pub(crate) not_run: Vec<(u64, String)>,
    /// Left out on purpose, by an option.
    left_out: Option<&'static str>,
    pub(crate) failures: Vec<String>,
}

impl Tally {
    pub(crate) fn not_run(why: String) -> Self {
        Self {
            not_run: vec![(1, why)],
            ..Self::default()
        }
    }

    fn left_out(why: &'static str) -> Self {
        Self {
            left_out: Some(why),
            ..Self::default()
        }
    }

    /// Counts a list of outcomes: objects with `name`, `result`, `detail` and perhaps `optional`.
    pub(crate) fn from_json(file: &Path) -> Result<Self> {
        let named = |e: &dyn fmt::Display| format!("{}: {e}", file.display());
        let text = std::fs::read_to_string(file).map_err(|e| named(&e))?;
        let outcomes: serde_json::Value = serde_json::from_str(&text).map_err(|e| named(&e))?;
        let mut tally = Self::default();
        let counted = outcomes.as_array().into_iter().flatten();
        for o in counted.filter(|o| o["optional"] != true) {
            let text = |key: &str| o[key].as_str().unwrap_or_default();
            match text("result") {
                "passed" => tally.passed += 1,
                "failed" => {
                    tally.failed += 1;
                    tally.failures.push(text("name").to_owned());
                }
                _ => {
                    let why = text("detail").lines().next().unwrap_or("?");
                    tally.not_run.push((1, format!("{}: {why}", text("name"))));
                }
            }
        }
        Ok(tally)
    }

    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.not_run.extend(other.not_run);
        self.failures.extend(other.failures);
    }

    fn not_run_count(&self) -> u64 {
        self.not_run.iter().map(|(n, _)| n).sum()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = self.left_out {
            return write!(f, "left out ({why})");
        }
        write!(
            f,
            "{} passed, {} failed, {} not run",
            self.passed,
            self.failed,
            self.not_run_count()
        )?;
        let reasons: Vec<_> = self.not_run.iter().map(|(_, why)| why.as_str()).collect();
        if reasons.is_empty() {
            Ok(())
        } else {
            write!(f, " ({})", reasons.join("; "))
        }
    }
}

/// Runs the suites and prints the result; the last line is `N passed, M failed, K not run`.
pub(crate) fn run(args: &TestArgs) -> Result<()> {
    let chosen = |name: &str| args.suites.is_empty() || args.suites.iter().any(|s| s == name);
    let mut results = Vec::new();
    for (name, in_quick) in [
        ("unit", true),
        ("sim", true),
        ("end-to-end", false),
        ("real-clients", false),
        ("apps", false),
        ("interop", false),
    ] {
        process::check_interrupt()?;
        let started = Instant::now();
        let tally = if !chosen(name) {
            Tally::left_out("--suite")
        } else if args.quick && !in_quick {
            Tally::left_out("--quick")
        } else {
            println!("\n=== suite {name}");
            suite(name, args)?
        };
        results.push((name, tally, started.elapsed()));
    }
    println!("\n=== results");
    let (mut passed, mut failed, mut not_run) = (0, 0, 0);
    for (name, tally, took) in &results {
        println!("suite {name}: {tally}  [{:.0} s]", took.as_secs_f64());
        for failure in &tally.failures {
            println!("  FAILED {failure}");
        }
        passed += tally.passed;
        failed += tally.failed;
        not_run += tally.not_run_count();
    }
    println!("{passed} passed, {failed} failed, {not_run} not run");
    if failed > 0 {
        return Err("tests failed".into());
    }
    if not_run > 0 && !args.allow_not_run {
        return Err("some tests could not be run (see above); --allow-not-run accepts that".into());
    }
    Ok(())
}

fn suite(name: &str, args: &TestArgs) -> Result<Tally> {
    let full = args.set == Set::Full;
    match name {
        "unit" => {
            let cases = full.then_some(FULL_CASES);
            let others = [
                "--workspace",
                "--exclude",
                "ferroce-tests",
                "--exclude",
                "ferroce-hostile",
            ];
            let mut tally = cargo_test(&others, &[], cases.as_slice())?;
            tally.add(several_users()?);
            Ok(tally)
        }
        "sim" => simulate(&SimArgs {
            seeds: SIM_SEEDS[if args.quick { 0 } else { 1 + usize::from(full) }],
            seed: None,
            jobs: None,
            adversary: false,
            observer: false,
            rest: Vec::new(),
        }),
        "end-to-end" => {
            let bin = cargo::build("ferroce", "ferroce", Profile::Release)?;
            let bin = bin.to_string_lossy();
            let both = ["-p", "ferroce-tests", "-p", "ferroce-hostile"];
            cargo_test(&both, &[], &[("FERROCE_BIN", &bin)])
        }
        "apps" => apps::suite(full),
        "interop" => lab(full),
        _ => {
            let needed: Vec<_> = tools::EXT4.into_iter().chain(tools::NBD_CLIENTS).collect();
            if let Err(why) = tools::ensure(&needed) {
                return Ok(Tally::not_run(why));
            }
            let bin = cargo::build("ferroce", "ferroce", Profile::Release)?;
            let bin = bin.to_string_lossy();
            real_clients(&bin)
        }
    }
}

/// What several users can do to each other: ignored tests that only root can run. Those of the broker also need a kernel to
/// load programs into.
fn several_users() -> Result<Tally> {
    let mut tally = Tally::default();
    for (package, file, count) in SEVERAL_USERS {
        if tools::may_make_namespaces() {
            tally.add(cargo_test(&["-p", package, "--test", file], &["--ignored"], &[])?);
        } else {
            let why = format!("{package}, {file}: no right to be several users: not root");
            tally.not_run.push((count, why));
        }
    }
    Ok(tally)
}

/// The scenarios, and whether the lab leaves nothing behind.
fn lab(full: bool) -> Result<Tally> {
    let mut tally = interop::suite(if full { "full" } else { "ci" })?;
    if tally.passed == 0 {
        // Not root, or no packages: no guest would boot.
        return Ok(tally);
    }
    let mut harness = vec!["--ignored", "--test-threads", "1"];
    if !full {
        harness.push("--exact");
        harness.extend(CI_CLEANUP);
    }
    tally.add(cargo_test(
        &["-p", "ferroce-interop", "--test", "cleanup"],
        &harness,
        &[],
    )?);
    Ok(tally)
}

/// Ignored tests: they need programs of others, or the right to make namespaces.
fn real_clients(bin: &str) -> Result<Tally> {
    let what = ["-p", "rnbd", "-p", "ferroce-tests"];
    let env = [("FERROCE_BIN", bin)];
    if tools::may_make_namespaces() {
        return cargo_test(&what, &["--ignored"], &env);
    }
    let skip: Vec<&str> = PRIVILEGED.iter().flat_map(|name| ["--skip", name]).collect();
    let mut tally = cargo_test(&what, &[&["--ignored"], &skip[..]].concat(), &env)?;
    tally.not_run.push((
        PRIVILEGED.len() as u64,
        "no right to make namespaces: not root".to_owned(),
    ));
    Ok(tally)
}

/// Runs `cargo test`, shows its output and counts. Ignored tests do not count here: they are a suite of their own.
fn cargo_test(what: &[&str], harness: &[&str], env: &[(&str, &str)]) -> Result<Tally> {
    let mut command = cargo::command();
    command
        .args(["test", "--locked", "--no-fail-fast"])
        .args(what)
        .arg("--")
        .args(harness);
    command.envs(env.iter().copied()).stdout(Stdio::piped());
    println!(
        "+ cargo test --locked --no-fail-fast {} -- {}",
        what.join(" "),
        harness.join(" ")
    );
    let mut child = process::Guard::spawn("cargo test", &mut command)?;
    let mut tally = Tally::default();
    let status = child.for_each_line(|line| {
        println!("{line}");
        read_harness_line(line, &mut tally);
    })?;
    if !status.success() && tally.failed == 0 {
        tally.failed = 1;
        tally.failures.push(format!("cargo test ended with {status}"));
    }
    Ok(tally)
}

/// Counts one line of libtest's output.
fn read_harness_line(line: &str, tally: &mut Tally) {
    if let Some(rest) = line.strip_prefix("test result: ") {
        let number = |word: &str| {
            let before = rest
                .split([';', '.'])
                .map(str::trim)
                .find_map(|p| p.strip_suffix(word))?;
            before.trim().parse::<u64>().ok()
        };
        tally.passed += number("passed").unwrap_or(0);
        tally.failed += number("failed").unwrap_or(0);
    } else if let Some(name) = line.strip_prefix("test ").and_then(|l| l.strip_suffix(" ... FAILED")) {
        tally.failures.push(name.to_owned());
    }
}

/// `cargo xtask sim`.
pub(crate) fn sim(args: &SimArgs) -> Result<()> {
    let tally = simulate(args)?;
    println!("{} passed, {} failed", tally.passed, tally.failed);
    if tally.failed == 0 {
        Ok(())
    } else {
        Err(tally.failures.join("\n"))
    }
}

/// Runs the simulator's program; each seed counts as a test.
fn simulate(args: &SimArgs) -> Result<Tally> {
    let bin = cargo::build("roce-sim", "roce-sim", Profile::Release)?;
    let mut command = std::process::Command::new(&bin);
    command.arg("--seeds").arg(args.seeds.to_string());
    if let Some(seed) = args.seed {
        command.arg("--seed").arg(seed.to_string());
    }
    if let Some(jobs) = args.jobs {
        command.arg("--jobs").arg(jobs.to_string());
    }
    for (option, wanted) in [("--adversary", args.adversary), ("--observer", args.observer)] {
        if wanted {
            command.arg(option);
        }
    }
    command.args(&args.rest).stdout(Stdio::piped());
    let mut child = process::Guard::spawn("roce-sim", &mut command)?;
    let mut tally = Tally::default();
    let mut counted = false;
    let status = child.for_each_line(|line| {
        println!("{line}");
        if let Some((passed, failed)) = read_totals(line) {
            counted = true;
            (tally.passed, tally.failed) = (passed, failed);
        }
    })?;
    if !status.success() || !counted {
        tally.failed = tally.failed.max(1);
        tally.failures.push(format!("roce-sim ended with {status}"));
    }
    Ok(tally)
}

/// Reads `N passed, M failed`, wherever it stands in a line.
fn read_totals(line: &str) -> Option<(u64, u64)> {
    let before = |word: &str| line.split(word).next()?.split_whitespace().next_back()?.parse().ok();
    (line.contains(" passed") && line.contains(" failed")).then_some((before(" passed")?, before(" failed")?))
}

#[cfg(test)]
mod tests {
    use super::{Tally, read_harness_line, read_totals};

    #[test]
    fn harness_lines_are_counted() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 7 filtered out; finished in 0.01s",
            "test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ] {
            read_harness_line(line, &mut tally);
        }
        assert_eq!(
            (tally.passed, tally.failed, tally.failures),
            (17, 1, vec!["a::c".to_owned()])
        );
    }

    #[test]
    fn totals_are_found() {
        assert_eq!(read_totals("sim: 200 passed, 3 failed, 12.0 s"), Some((200, 3)));
        assert_eq!(read_totals("200 passed"), None);
    }
}
