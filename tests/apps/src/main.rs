//! Runs unmodified programs written for libibverbs and librdmacm under `ferroce run`, both sides on this host.
//!
//! `cargo xtask apps` builds everything needed and runs it.

mod capture;
mod cases;
mod collectives;
mod crates;
mod dapl;
mod directory;
mod engines;
mod everywhere;
mod killed;
mod lifetime;
mod matrix;
mod memcheck;
mod migration;
mod process;
mod python;
mod rds;
mod report;
mod rsocket;
mod run;
mod scripts;
mod site;
mod speed;
mod stalls;
mod storage;
mod wheels;

use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Parser, ValueEnum};

use cases::Case;
use process::Setup;
use report::{Outcome, Report};

/// Result with an error text for the user.
pub(crate) type Result<T, E = String> = std::result::Result<T, E>;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Set {
    /// Every service, operation and kind of program once; run for each change
    Ci,
    /// All cases
    Full,
}

#[derive(Parser)]
#[command(
    name = "cargo xtask apps",
    bin_name = "cargo xtask apps",
    about = "Runs unmodified RDMA programs over ferroce, both sides on this host",
    after_help = "Exit status: 0 all cases that could be run passed, 1 a case failed, 2 usage error. Cases whose program \
                  is not installed are listed as not run, with the Debian or PyPI package to install."
)]
struct Cli {
    /// List the cases and exit
    #[arg(long)]
    list: bool,
    /// Run only cases whose name contains this; may be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Set of cases
    #[arg(long, value_enum, default_value_t = Set::Full)]
    set: Set,
    /// Write the outcomes to a JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Path of `ferroce`, with libferroce_verbs.so in the same directory [default: next to this program]
    #[arg(long, value_name = "PROGRAM")]
    ferroce: Option<PathBuf>,
    /// IPv4 address of both sides
    #[arg(long, default_value = "127.0.0.1")]
    addr: std::net::Ipv4Addr,
    /// Address of both sides in IPv6 cases
    #[arg(long, default_value = "::1")]
    addr6: std::net::Ipv6Addr,
    /// Run the programs as this user; requires root, for which the default is `nobody`
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Run the programs with LD_LIBRARY_PATH instead of `ferroce run`
    #[arg(long)]
    directory: bool,
    /// Measure speed instead: ib_send_lat, ib_write_lat and ib_write_bw compared with `ferroce bench`, pinned and not
    #[arg(long, conflicts_with_all = ["list", "only", "set", "directory"])]
    speed: bool,
    /// With --speed: measurements of each program, of which the median is reported
    #[arg(long, requires = "speed", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// With --speed: don't pin the programs to processors
    #[arg(long, requires = "speed")]
    unpinned: bool,
    /// Look for stalls instead: for this many minutes, run ping-pongs of SENDs (captured) and of UDP datagrams
    /// alternately on busy processors, and explain the slowest rounds. Captures take about 60 MB of $TMPDIR, preferably
    /// in memory
    #[arg(long, value_name = "MINUTES", conflicts_with_all = ["list", "only", "set", "directory", "speed"])]
    stalls: Option<f64>,
    /// With --stalls: rounds of each ping-pong
    #[arg(long, requires = "stalls", default_value_t = 40_000, value_parser = clap::value_parser!(u32).range(1000..=200_000))]
    rounds: u32,
    /// With --stalls: number of threads that keep processors busy
    #[arg(long, requires = "stalls", default_value_t = 4)]
    load: usize,
    /// Print the whole output of failed programs
    #[arg(long, short)]
    verbose: bool,
}

fn selected(cli: &Cli) -> Vec<Case> {
    let mut all = matrix::all();
    all.retain(|case| cli.set == Set::Full || case.ci);
    if cli.directory {
        all.retain(|case| !case.directory && !directory::needs_preload(case));
        all = all.into_iter().map(Case::by_directory).collect();
    }
    all.retain(|case| cli.only.is_empty() || cli.only.iter().any(|text| case.name.contains(text.as_str())));
    all
}

/// Returns the `--only` texts that match no case, so that a typo is not taken for success.
fn unknown<'a>(cli: &'a Cli, cases: &[Case]) -> Vec<&'a str> {
    let has = |name: &str| cases.iter().any(|case| case.name.contains(name));
    cli.only.iter().map(String::as_str).filter(|name| !has(name)).collect()
}

/// Returns `ferroce` in the directory of this program.
fn default_ferroce() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(|e| format!("finding this program: {e}"))?;
    let found = own.with_file_name("ferroce");
    match found.is_file() {
        true => Ok(found),
        false => Err(format!(
            "{} does not exist: build it, or give its path with --ferroce",
            found.display()
        )),
    }
}

fn setup(cli: &Cli) -> Result<Setup> {
    let ferroce = cli.ferroce.clone().map_or_else(default_ferroce, Ok)?;
    process::catch_signals()?;
    let addrs = [cli.addr.into(), cli.addr6.into()];
    Setup::new(&ferroce, addrs, cli.user.as_deref())
}

/// Prints the cases. A closed pipe (`| head`) is no error.
fn list(cases: &[Case]) -> Result<()> {
    let mut out = io::stdout().lock();
    for case in cases {
        match writeln!(out, "{:<40} {}", case.name, case.summary()) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => break,
            written => written.map_err(|e| format!("can't write the list: {e}"))?,
        }
    }
    Ok(())
}

fn run(cli: &Cli) -> Result<bool> {
    if cli.speed {
        let setup = setup(cli)?;
        let done = speed::run(&setup, cli.turns, !cli.unpinned, cli.json.as_deref());
        setup.finish();
        return done.map(|()| true);
    }
    if let Some(minutes) = cli.stalls {
        let setup = setup(cli)?;
        let done = stalls::run(&setup, minutes, cli.rounds, cli.load);
        setup.finish();
        return done.map(|()| true);
    }
    let cases = selected(cli);
    if cli.list {
        return list(&cases).map(|()| true);
    }
    let unknown = unknown(cli, &cases);
    if cases.is_empty() || !unknown.is_empty() {
        return Err(format!("no case name contains {}: see --list", unknown.join(", ")));
    }
    let setup = setup(cli)?;
    let mut report = Report::default();
    for case in &cases {
        let outcome = match case.missing() {
            Some(why) => Outcome::NotRun(why),
            None => run::run(&setup, case),
        };
        if process::interrupted() {
            setup.finish();
            return Err("interrupted".into());
        }
        report.add(case, outcome, &setup.take_retried(), cli.verbose);
    }
    setup.finish();
    report.print_summary();
    if let Some(file) = &cli.json {
        report.write_json(file)?;
    }
    Ok(report.all_well())
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::{Cli, selected, unknown};

    #[test]
    fn each_requested_name_must_match_a_case() {
        let cli = Cli::try_parse_from(["apps", "--only", "pingpong", "--only", "no-such-thing"])
            .unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(unknown(&cli, &selected(&cli)), ["no-such-thing"]);
    }

    #[test]
    fn the_sets_have_the_names_of_other_suites() {
        let of = |set| selected(&Cli::try_parse_from(["apps", "--set", set]).unwrap_or_else(|e| panic!("{e}"))).len();
        let (ci, full) = (of("ci"), of("full"));
        assert!(0 < ci && ci < full, "{ci} {full}");
    }
}
