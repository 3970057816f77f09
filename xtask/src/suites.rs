//! The test suites, and what CI runs.

use std::{
    cell::OnceCell,
    thread,
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};

use crate::{
    Result, apps,
    cargo::{self, Built, Profile},
    demo, dist,
    harness::{self, Job},
    interop, lint,
    long::{self, Long},
    process, results,
    sim::{self, Simulator},
    tally::{self, Tally},
    test_program::TestProgram,
    tools,
};

/// Size of each suite.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Set {
    /// The part that CI has time for
    Ci,
    /// 20,000 simulated networks, 4096 cases a property, every scenario of the lab, every program, ten minutes of forged
    /// packets, and ten of cuts and restarts (more than an hour)
    Full,
}

/// Seeds of the simulator, the same ones each time and fresh ones, with --quick, in the set `ci` and in the set `full`; a
/// quarter of the runs have an adversary, and beside some there are runs with an observer, and pairs that compare goodput.
const SIM_SEEDS: [(u64, u64); 3] = [(100, 20), (120, 40), (20_000, 2000)];
/// Likewise of the simulator of storage, where beside a quarter of the runs there is one of a server under a flood.
const STORAGE_SEEDS: [(u64, u64); 3] = [(60, 20), (120, 60), (4000, 400)];
/// Likewise of the simulator of RDS.
const RDS_SEEDS: [(u64, u64); 3] = [(40, 10), (40, 30), (5000, 500)];
/// Likewise of the simulator of LNet.
const LNET_SEEDS: [(u64, u64); 3] = [(20, 10), (20, 20), (5000, 500)];
/// Cases of each property without a number of its own, in the set `full`.
const FULL_CASES: (&str, &str) = ("PROPTEST_CASES", "4096");

/// The provider contract and `--rdma` over roce-hw, on our verbs library. They are built where libibverbs and librdmacm are. Ignored
/// tests make namespaces.
const OVER_LIBRARY: [(&str, &str); 2] = [("ferroce-contract", "library"), ("ferroce-contract", "rdma")];

/// Returns the suite of a program's tests that are not ignored.
fn suite_of(program: &TestProgram) -> &'static str {
    match &*program.package {
        _ if program.is_one_of(&OVER_LIBRARY) => HARDWARE,
        // Two processes of the program, and attacks on them.
        "ferroce-hostile" | "ferroce-tests" => END_TO_END,
        // Replays what the fuzz targets have found.
        "ferroce-fuzz-targets" => SIM,
        _ => UNIT,
    }
}

/// Programs whose tests judge speed, or floods: nothing else may run next to them. Package and program.
const ALONE: [(&str, &str); 4] = [
    ("ferroce-hostile", "broker"),
    ("ferroce-hostile", "strangers"),
    ("ferroce-tests", "bench"),
    ("rtrs", "flood"),
];

/// Packages whose ignored tests need other programs, or privileges.
const CLIENTS_OF: &[&str] = &[
    "roce-pcap",
    "rnbd-disk",
    "rnbd-host",
    "ferroce-lnet-sim",
    "ferroce-tests",
    "ferroce-wire",
];
/// Tests of those that make a namespace, mount a file system, set up a loop device or run as several users.
const PRIVILEGED: &[&str] = &[
    "a_block_device_has_its_own_geometry",
    "a_block_device_is_written_discarded_and_zeroed",
    "a_cut_network_is_left_for_the_other_and_taken_again",
    "a_cut_wire_is_silent_and_a_mended_one_is_not",
    "a_device_over_ipv6",
    "a_device_over_raw_and_packet_sockets",
    "a_full_disk_is_an_error_and_what_was_flushed_stays",
    "a_host_where_nobody_listens_ends_the_wait_at_once",
    "a_lossy_wire_loses_what_it_counts",
    "a_path_whose_interface_goes_down_is_left_before_it_is_missed",
    "a_program_that_takes_all_addresses_comes_beside_those_that_have_some",
    "a_read_only_block_device_is_not_opened_for_writing",
    "a_request_with_translated_addresses_is_reported_wherever_it_is_dropped",
    "a_socket_is_its_owners_and_its_groups",
    "a_socket_that_another_user_serves_is_not_used",
    "a_storage_host_comes_beside_a_program_that_has_all_addresses",
    "addresses_of_both_ip_versions_come_and_go_at_several_loops",
    "closing_an_image_file_makes_it_durable",
    "commands_of_pages_run",
    "containers_of_a_pod_are_told_how_to_share_an_address",
    "flaps_leave_nothing_behind",
    "flush_and_fua_leave_nothing_behind_in_memory",
    "flush_and_fua_reach_the_servers_device",
    "frames_of_a_vlan_are_tagged",
    "hosts_have_names",
    "hosts_on_a_cable_use_any_datapath",
    "members_of_the_group_start_what_the_file_allows",
    "one_member_of_the_group_does_not_hold_the_places_of_others",
    "programs_in_containers_on_one_bridge_use_each_other",
    "the_ceiling_over_raw_and_packet_sockets_has_sound_packets",
    "the_daemon_runs_as_a_user_of_its_own",
    "two_names_of_one_block_device_have_one_writer",
    "what_goes_into_a_wire_comes_out_on_the_same_network",
    "without_the_capability_the_error_names_it",
];

/// Tests of those that mount a FUSE file system.
const MOUNTING: &[&str] = &[
    "a_tree_is_its_owners_and_its_groups",
    "a_write_that_waits_holds_up_nobody_and_can_be_interrupted",
    "one_member_leaves_open_files_for_others",
    "programs_find_the_tree_under_sys",
    "the_mounted_tree_is_the_kernels",
    "the_mounted_tree_is_what_ctl_shows",
    "the_place_is_taken_over_from_the_dead_and_from_nobody_else",
    "writes_are_orders_and_nothing_can_be_made",
];

/// Tests of those that need systemd.
const OF_UNITS: &[&str] = &["units_are_hardened"];

/// Ignored tests that only root can run, as they need several users, a set-uid program or a namespace: package and program.
const AS_ROOT: [(&str, &str); 3] = [("roce", "it"), ("roce-broker", "it"), ("roce-net", "it")];

/// Ignored tests that the lab leaves nothing behind.
const CLEANUP: (&str, &str) = ("ferroce-interop", "cleanup");
/// Tests of those in the set `ci`, the cheapest (15 s together): an interrupted run, and a failed one.
const CI_CLEANUP: [&str; 2] = ["ctrl_c_while_a_guest_boots", "a_scenario_that_fails"];

/// Ignored functions that are no tests, but processes that tests start.
const HELPERS: [(&str, &str, &str); 2] = [
    ("roce-broker", "it", "isolation::member"),
    ("roce-broker", "it", "sharing::member::member"),
];

/// Ignored tests of [`HARDWARE`] that only the full set has time for.
const FULL_ONLY: [&str; 1] = ["a_session_under_valgrind"];

/// Builds before the suites: of the programs, and of the tests.
const BUILD: [&str; 2] = ["build", "build tests"];
const LINT: &str = "lint";
const UNIT: &str = "unit";
const SIM: &str = "sim";
const END_TO_END: &str = "end-to-end";
const REAL_CLIENTS: &str = "real-clients";
const HARDWARE: &str = "roce-hw";
const APPS: &str = "apps";
const PACKAGES: &str = "packages";
const LAB: &str = "interop";
const FLOOD: &str = "flood";
const SOAK: &str = "soak";
/// Suites of the full set only.
const LONG: [(&str, Long); 2] = [(FLOOD, long::FLOOD), (SOAK, long::SOAK)];
/// All suites, in the order of the table.
const SUITES: [&str; 10] = [
    UNIT,
    SIM,
    END_TO_END,
    REAL_CLIENTS,
    HARDWARE,
    APPS,
    PACKAGES,
    LAB,
    FLOOD,
    SOAK,
];
/// Number of suites with --quick, the first ones.
const QUICK: usize = 2;

#[derive(Args, Clone)]
pub(crate) struct TestArgs {
    /// How much of each suite; end-to-end and real-clients are the same in both, flood and soak are in the full set only
    #[arg(long, value_enum, default_value_t = Set::Ci)]
    set: Set,
    /// Unit tests and a few simulated networks only
    #[arg(long, conflicts_with = "set")]
    quick: bool,
    /// Exit with 0 although a suite could not be run
    #[arg(long)]
    allow_not_run: bool,
    /// Write the results of the suites that run to docs/results.json and into the pages that quote them
    #[arg(long, conflicts_with = "quick")]
    record: bool,
    /// Only these suites
    #[arg(long = "suite", value_name = "NAME", value_parser = SUITES)]
    suites: Vec<String>,
}

impl TestArgs {
    const fn full(&self) -> bool {
        matches!(self.set, Set::Full)
    }

    const fn set_name(&self) -> &'static str {
        match self.set {
            Set::Ci => "ci",
            Set::Full => "full",
        }
    }

    /// Returns the other programs that the suites need, without the lab's.
    fn needed(&self) -> Vec<tools::Tool> {
        let clients = self.runs(REAL_CLIENTS).then(client_tools);
        let unit = self.runs(UNIT).then(tools::of_unit);
        let hardware = self.runs(HARDWARE).then(tools::of_hardware);
        let apps = self.runs(APPS).then(|| apps::needed(self.full()));
        [clients, unit, hardware, apps]
            .into_iter()
            .flatten()
            .flatten()
            .collect()
    }

    fn runs(&self, suite: &str) -> bool {
        SUITES
            .iter()
            .position(|s| *s == suite)
            .is_some_and(|i| self.left_out(i).is_none())
    }

    /// Returns why a suite does not run.
    fn left_out(&self, index: usize) -> Option<&'static str> {
        let asked = self.suites.iter().any(|s| s == SUITES[index]);
        if !asked && !self.suites.is_empty() {
            Some("--suite")
        } else if self.quick && index >= QUICK {
            Some("--quick")
        } else if LONG.iter().any(|(name, _)| *name == SUITES[index]) && !asked && !self.full() {
            Some("--set full has it")
        } else {
            None
        }
    }
}

/// A suite, its result, and its duration.
type Row = (&'static str, Tally, Duration);

/// Runs the suites and prints the result; the last line is `N passed, M failed, K not run`.
pub(crate) fn test(args: &TestArgs) -> Result<()> {
    run(args, false)
}

/// [`test()`], and the lints.
pub(crate) fn ci(args: &TestArgs) -> Result<()> {
    run(args, true)
}

fn run(args: &TestArgs, lints: bool) -> Result<()> {
    let begin = Instant::now();
    let mut rows = Vec::new();
    let clippy = lints.then(cargo::compile_with_clippy);
    match build(args, &mut rows)? {
        Some(programs) => suites(args, clippy, &programs, &mut rows)?,
        // Nothing to run; the other lints say more of what is wrong.
        None if lints => rows.push(timed(LINT, || Ok(lint::beside_clippy()))?),
        None => {}
    }
    let left_out = (0..SUITES.len()).filter_map(|i| Some((SUITES[i], args.left_out(i)?)));
    rows.extend(left_out.map(|(name, why)| (name, Tally::left_out(why), Duration::ZERO)));
    let order = BUILD.into_iter().chain([LINT]).chain(SUITES);
    let order: Vec<_> = order.collect();
    rows.sort_by_key(|(name, ..)| order.iter().position(|n| n == name));
    if args.record {
        let ran = rows
            .iter()
            .filter(|(name, ..)| SUITES.iter().any(|suite| suite == name) && args.runs(name));
        results::record(args.set_name(), ran.map(|(name, tally, _)| (*name, tally)))?;
    }
    report(&rows, args, begin.elapsed())
}

/// Builds the programs under test, and installs what the suites need at the same time.
fn build(args: &TestArgs, rows: &mut Vec<Row>) -> Result<Option<Built>> {
    let mut made = None;
    // The build itself depends on these.
    let _ = args.runs(HARDWARE) && tools::ensure(&tools::of_hardware()).is_ok();
    let row = timed(BUILD[0], || {
        let programs = thread::scope(|scope| {
            // The suite that needs a tool reports that it can't be installed.
            scope.spawn(|| {
                let _ = args.needed().is_empty() || tools::ensure(&args.needed()).is_ok();
                args.runs(LAB)
                    .then(|| process::at_lowest_priority(|| interop::prepare(args.set_name())))
            });
            match args.full() {
                // As users have it.
                true => cargo::build_programs(Profile::Release),
                false => cargo::build_programs(Profile::Dev),
            }
        });
        made = Some(programs?);
        Ok(Tally::one_passed())
    })?;
    rows.push(row);
    Ok(made)
}

/// Builds the tests, and checks that each belongs to a suite.
fn build_tests(rows: &mut Vec<Row>) -> Result<Option<Built>> {
    let mut made = None;
    let row = timed(BUILD[1], || {
        let built = cargo::build_tests()?;
        let mut tally = Tally::one_passed();
        unclaimed(&built.tests)?.into_iter().for_each(|text| tally.fail(text));
        made = Some(built);
        Ok(tally)
    })?;
    rows.push(row);
    Ok(made)
}

/// Runs the selected suites. The lab's guests and the tests wait much, so the compiler and the simulator run next to them, at the
/// lowest priority.
fn suites(args: &TestArgs, clippy: Option<Result<()>>, programs: &Built, rows: &mut Vec<Row>) -> Result<()> {
    let tests = OnceCell::new();
    thread::scope(|scope| {
        let early: Vec<_> = early(args)
            .map(|name| scope.spawn(move || timed(name, || with_programs(name, args, programs))))
            .collect();
        let built = process::at_lowest_priority(|| build_tests(rows))?;
        let built = tests.get_or_init(|| built).as_ref();
        let stage = built.map(|built| Stage::new(args, programs, built));
        let warnings = programs.warnings + built.map_or(0, |b| b.warnings);
        let beside = scope.spawn(move || process::at_lowest_priority(|| computing(clippy, warnings, stage)));
        for thread in early {
            rows.push(joined(thread)?);
        }
        if let Some(stage) = stage {
            stage.beside(rows)?;
        }
        rows.extend(joined(beside)?);
        stage.map_or(Ok(()), |stage| stage.alone(rows))
    })
}

/// Runs the lints, if requested, and the simulator.
fn computing(clippy: Option<Result<()>>, warnings: usize, stage: Option<Stage<'_>>) -> Result<Vec<Row>> {
    let lint = clippy.map(|clippy| timed(LINT, || Ok(lints(clippy, warnings))));
    let stage = stage.filter(|s| s.args.runs(SIM));
    let sim = stage.map(|stage| timed(SIM, || stage.sim()));
    lint.into_iter().chain(sim).collect()
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().map_err(|_| "the thread of a suite panicked")?
}

/// Returns the suites that start before the tests are built: the lab, packages, and in the full set, where they take as long, `apps`.
fn early(args: &TestArgs) -> impl Iterator<Item = &'static str> {
    [LAB, PACKAGES, APPS]
        .into_iter()
        .filter(|name| args.runs(name) && (*name != APPS || args.full()))
}

fn with_programs(name: &str, args: &TestArgs, programs: &Built) -> Result<Tally> {
    match name {
        LAB => interop::suite(programs, args.set_name()),
        PACKAGES => process::at_lowest_priority(|| dist::check::suite(programs)),
        _ => apps::suite(programs, args.full()),
    }
}

/// Runs all lints; `warnings`: of clippy, in the builds.
fn lints(clippy: Result<()>, warnings: usize) -> Tally {
    let mut tally = lint::beside_clippy();
    tally.expect(clippy.and_then(|()| match warnings {
        0 => Ok(()),
        n => Err(format!("clippy has {n} warnings, see the builds")),
    }));
    tally
}

/// Adds the result of a suite, or of its second half.
fn add(rows: &mut Vec<Row>, (name, tally, took): Row) {
    match rows.iter_mut().find(|(n, ..)| *n == name) {
        Some((_, half, time)) => {
            half.add(tally);
            *time += took;
        }
        None => rows.push((name, tally, took)),
    }
}

/// Runs a suite. Its error counts as a failure; the other suites still run.
fn timed(name: &'static str, suite: impl FnOnce() -> Result<Tally>) -> Result<Row> {
    process::check_interrupt()?;
    println!("\n=== {name}");
    let begin = Instant::now();
    let tally = suite().unwrap_or_else(|text| {
        println!("{text}");
        let mut tally = Tally::default();
        tally.fail(text);
        tally
    });
    process::check_interrupt()?;
    Ok((name, tally, begin.elapsed()))
}

fn report(rows: &[Row], args: &TestArgs, took: Duration) -> Result<()> {
    println!("\n=== results\n{}", tally::HEAD);
    let mut all = Tally::default();
    for (name, tally, took) in rows {
        print!("{}", tally.row(name, took.as_secs_f64()));
        all.passed += tally.passed;
        all.failed += tally.failed;
        all.not_run.extend(tally.not_run.iter().cloned());
    }
    let (failed, not_run) = (all.failed, all.not_run_count());
    println!("all of it took {:.0} s", took.as_secs_f64());
    println!("{} passed, {failed} failed, {not_run} not run", all.passed);
    if failed > 0 {
        return Err("tests failed".into());
    }
    if not_run > 0 && !args.allow_not_run {
        return Err("some tests could not be run (see above); --allow-not-run accepts that".into());
    }
    Ok(())
}

/// Programs and tests of the suites.
#[derive(Clone, Copy)]
struct Stage<'a> {
    args: &'a TestArgs,
    /// The programs under test.
    programs: &'a Built,
    tests: &'a [TestProgram],
}

impl<'a> Stage<'a> {
    fn new(args: &'a TestArgs, programs: &'a Built, built: &'a Built) -> Self {
        let tests = &built.tests;
        Self { args, programs, tests }
    }

    /// Runs suites after the lab, next to other tests.
    fn beside(&self, rows: &mut Vec<Row>) -> Result<()> {
        // Not root, or no packages: no guest would boot.
        if rows.iter().any(|(name, lab, _)| *name == LAB && lab.passed > 0) {
            add(rows, timed(LAB, || self.cleanup())?);
        }
        // Most of it waits, or computes on one processor.
        thread::scope(|scope| {
            let threads = [UNIT, END_TO_END, HARDWARE, REAL_CLIENTS, APPS]
                .map(|name| scope.spawn(move || self.run_each(&[name], false)));
            for thread in threads {
                joined(thread)?.into_iter().for_each(|row| add(rows, row));
            }
            Ok::<_, String>(())
        })
    }

    /// Runs suites that need the machine to themselves.
    fn alone(&self, rows: &mut Vec<Row>) -> Result<()> {
        let last = self.run_each(&[UNIT, END_TO_END, FLOOD, SOAK], true)?;
        last.into_iter().for_each(|row| add(rows, row));
        Ok(())
    }

    /// Runs the selected suites among these.
    fn run_each(&self, names: &[&'static str], alone: bool) -> Result<Vec<Row>> {
        let chosen = names.iter().filter(|n| self.args.runs(n));
        let chosen = chosen.filter(|n| early(self.args).all(|e| e != **n));
        chosen.map(|name| timed(name, || self.suite(name, alone))).collect()
    }

    fn suite(&self, name: &str, alone: bool) -> Result<Tally> {
        match name {
            UNIT if alone => self.unit_programs(alone),
            UNIT => self.unit(),
            END_TO_END => self.programs_of(name, alone, &[("FERROCE_BIN", &self.ferroce()?)]),
            APPS => with_programs(name, self.args, self.programs),
            REAL_CLIENTS => self.real_clients(),
            HARDWARE => self.hardware(),
            _ => match LONG.iter().find(|(long, _)| *long == name) {
                Some((_, long)) => long.suite(self.programs),
                None => Err(format!("no suite {name}")),
            },
        }
    }

    /// The tests of a suite that are not ignored and run alone, or beside others.
    fn programs_of(&self, suite: &str, alone: bool, env: &[(&str, &str)]) -> Result<Tally> {
        let programs = self.tests.iter().filter(|t| suite_of(t) == suite);
        let chosen = programs.filter(|t| t.is_one_of(&ALONE) == alone);
        harness::run(chosen.map(Job::all).collect::<Result<_>>()?, env)
    }

    fn ferroce(&self) -> Result<String> {
        Ok(self.programs.program("ferroce")?.to_string_lossy().into_owned())
    }

    fn unit_programs(&self, alone: bool) -> Result<Tally> {
        let cases = self.args.full().then_some(FULL_CASES);
        self.programs_of(UNIT, alone, cases.as_slice())
    }

    fn unit(&self) -> Result<Tally> {
        let mut tally = self.unit_programs(false)?;
        tally.add(self.as_root()?);
        tally.add(harness::doc_tests()?);
        Ok(tally)
    }

    fn sim(&self) -> Result<Tally> {
        let mut tally = self.programs_of(SIM, false, &[])?;
        let set = if self.args.quick {
            0
        } else {
            1 + usize::from(self.args.full())
        };
        let all = [SIM_SEEDS, STORAGE_SEEDS, RDS_SEEDS, LNET_SEEDS];
        for (simulator, seeds) in Simulator::ALL.into_iter().zip(all) {
            let (fixed, fresh) = seeds[set];
            let program = self.programs.program(simulator.program())?;
            tally.add(sim::suite(program, simulator, fixed, fresh)?);
        }
        Ok(tally)
    }

    /// Runs the ignored tests that only root can run. Those of the broker also need a kernel that loads BPF programs.
    fn as_root(&self) -> Result<Tally> {
        let mut tally = Tally::default();
        for (package, file) in AS_ROOT {
            let program = find(self.tests, package, file)?;
            let names = ignored(program)?;
            if tools::may_make_namespaces() {
                tally.add(harness::run(vec![Job::ignored(program, names)], &[])?);
            } else {
                let why = format!("{package}, {file}: no right to be several users or to make namespaces: not root");
                tally.not_run.push((names.len() as u64, why));
            }
        }
        Ok(tally)
    }

    /// Runs the ignored tests that need other programs, or privileges.
    fn real_clients(&self) -> Result<Tally> {
        if let Err(why) = tools::ensure(&client_tools()) {
            return Ok(Tally::not_run(why));
        }
        let mut jobs = Vec::new();
        let rights: [(&[&str], bool, &str); 3] = [
            (PRIVILEGED, tools::may_make_namespaces(), tools::NO_NAMESPACES),
            (MOUNTING, tools::may_mount_fuse(), tools::NO_FUSE),
            (OF_UNITS, tools::may_analyze_units(), tools::NO_SYSTEMD),
        ];
        let mut present = Vec::new();
        for program in self.tests.iter().filter(|t| CLIENTS_OF.contains(&t.package.as_str())) {
            let names = ignored(program)?;
            present.extend(names.iter().cloned());
            let may = |name: &String| {
                rights
                    .iter()
                    .all(|(named, may, _)| *may || !named.contains(&function(name)))
            };
            jobs.push(Job::ignored(program, names.into_iter().filter(may).collect()));
        }
        rights.iter().try_for_each(|(named, ..)| all_there(named, &present))?;
        let mut tally = harness::run(jobs, &[("FERROCE_BIN", &self.ferroce()?)])?;
        let without = rights.iter().filter(|(_, may, _)| !may);
        tally
            .not_run
            .extend(without.map(|(named, _, why)| (named.len() as u64, (*why).to_owned())));
        tally.add(demo::suite(self.programs.program("ferroce")?)?);
        Ok(tally)
    }

    /// Runs roce-hw on our own verbs library, which every machine has.
    fn hardware(&self) -> Result<Tally> {
        let tools = tools::ensure(&tools::of_hardware()).and_then(|()| tools::may_build_hardware());
        if let Err(why) = tools {
            return Ok(Tally::not_run(why));
        }
        let mut jobs = Vec::new();
        let mut not_run = Vec::new();
        for program in self.tests.iter().filter(|t| t.is_one_of(&OVER_LIBRARY)) {
            jobs.push(Job::all(program)?);
            let mut ignored = ignored(program)?;
            ignored.retain(|name| self.args.full() || !FULL_ONLY.contains(&name.as_str()));
            match tools::may_make_namespaces() {
                _ if ignored.is_empty() => {}
                true => jobs.push(Job::ignored(program, ignored)),
                false => not_run.push((ignored.len() as u64, tools::NO_NAMESPACES.to_owned())),
            }
        }
        let mut tally = harness::run(jobs, &[("FERROCE_BIN", &self.ferroce()?)])?;
        tally.not_run.extend(not_run);
        Ok(tally)
    }

    /// Checks that the lab leaves nothing behind.
    fn cleanup(&self) -> Result<Tally> {
        let program = find(self.tests, CLEANUP.0, CLEANUP.1)?;
        let mut names = ignored(program)?;
        all_there(&CI_CLEANUP, &names)?;
        if !self.args.full() {
            names.retain(|n| CI_CLEANUP.contains(&n.as_str()));
        }
        harness::run(vec![Job::ignored(program, names).one_by_one()], &[])
    }
}

fn client_tools() -> Vec<tools::Tool> {
    let clients = tools::EXT4.into_iter().chain(tools::NBD_CLIENTS);
    let more = [
        tools::QEMU,
        tools::PERFTEST,
        tools::VALGRIND,
        tools::RPING,
        tools::IPTABLES,
        tools::IBVERBS,
        tools::OPENSSL,
        tools::TSHARK,
    ];
    clients.chain(more).collect()
}

fn find<'a>(tests: &'a [TestProgram], package: &str, file: &str) -> Result<&'a TestProgram> {
    let found = tests.iter().find(|t| t.package == package && t.target == file);
    found.ok_or_else(|| format!("{package} has no test {file}"))
}

/// Returns the ignored tests of a program, without [`HELPERS`].
fn ignored(program: &TestProgram) -> Result<Vec<String>> {
    let mut names = program.ignored()?;
    names.retain(|name| !HELPERS.contains(&(program.package.as_str(), program.target.as_str(), name.as_str())));
    Ok(names)
}

/// Returns the name of a test without its modules.
fn function(test: &str) -> &str {
    test.rsplit("::").next().unwrap_or(test)
}

/// Checks that the tests that a suite names exist.
fn all_there(named: &[&str], present: &[String]) -> Result<()> {
    let gone: Vec<_> = named
        .iter()
        .filter(|n| !present.iter().any(|p| function(p) == **n))
        .copied()
        .collect();
    match gone.is_empty() {
        true => Ok(()),
        false => Err(format!("no test has this name: {}", gone.join(", "))),
    }
}

/// Returns ignored tests that no suite runs, and programs of suites that don't exist.
fn unclaimed(tests: &[TestProgram]) -> Result<Vec<String>> {
    let named = || AS_ROOT.into_iter().chain([CLEANUP]);
    let helpers = HELPERS.iter().map(|(package, file, _)| (*package, *file));
    let mut stray: Vec<String> = named()
        .chain(helpers)
        .chain(ALONE)
        .filter_map(|(package, file)| find(tests, package, file).err())
        .collect();
    let elsewhere = |t: &&TestProgram| CLIENTS_OF.contains(&t.package.as_str()) || t.is_one_of(&OVER_LIBRARY);
    for program in tests.iter().filter(|t| !elsewhere(t)) {
        let (name, ignored) = (format!("{} {}", program.package, program.target), ignored(program)?);
        let claimed = named().any(|(package, file)| program.package == package && program.target == file);
        match (claimed, ignored.is_empty()) {
            (true, true) => stray.push(format!("{name}: no test is ignored")),
            (false, false) => stray.push(format!("{name}: in no suite: {}", ignored.join(", "))),
            _ => {}
        }
    }
    Ok(stray)
}
