//! Programs of others that were written for libibverbs and librdmacm, run as they are under `ferroce run`, both sides on
//! this host and at one address. `cargo xtask apps` builds what this needs and runs it.

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
mod report;
mod rsocket;
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

use crate::{
    cases::Case,
    process::Setup,
    report::{Outcome, Report},
};

/// Any failure, with the text that the user shall read.
pub(crate) type Result<T, E = String> = std::result::Result<T, E>;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Set {
    /// Each service, operation and kind of program once: what each change has to pass
    Ci,
    /// Everything
    Full,
}

#[derive(Parser)]
#[command(
    name = "cargo xtask apps",
    bin_name = "cargo xtask apps",
    about = "Runs unmodified RDMA programs over ferroce, both sides on this host",
    after_help = "Exit status: 0 all that could be run passed, 1 something failed, 2 wrong usage. Cases whose program is not \
                  installed are listed as not run, with Debian's or PyPI's package."
)]
struct Cli {
    /// List the cases and stop
    #[arg(long)]
    list: bool,
    /// Only cases whose name contains this; several times: any of them
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// How many cases
    #[arg(long, value_enum, default_value_t = Set::Full)]
    set: Set,
    /// Write the outcomes to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The program `ferroce`, with libferroce_verbs.so beside it
    #[arg(long, value_name = "PROGRAM")]
    ferroce: Option<PathBuf>,
    /// Address of both sides
    #[arg(long, default_value = "127.0.0.1")]
    addr: std::net::Ipv4Addr,
    /// Address of both sides, of the cases of IPv6
    #[arg(long, default_value = "::1")]
    addr6: std::net::Ipv6Addr,
    /// Run the programs as this user; only root can choose, and takes `nobody` unless it says `--user root`
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Run the programs without `ferroce run`, with LD_LIBRARY_PATH alone
    #[arg(long)]
    directory: bool,
    /// Measure speed instead: ib_send_lat, ib_write_lat and ib_write_bw beside `ferroce bench`, pinned and unpinned
    #[arg(long, conflicts_with_all = ["list", "only", "set", "directory"])]
    speed: bool,
    /// With --speed: how often each is measured; the median counts
    #[arg(long, requires = "speed", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// With --speed: not pinned
    #[arg(long, requires = "speed")]
    unpinned: bool,
    /// For that many minutes run long ping-pongs of SENDs (captured) and of UDP datagrams in turns on busy processors, and explain
    /// the slowest rounds. Captures go to $TMPDIR, of which they take some 60 MB: best in memory
    #[arg(long, value_name = "MINUTES", conflicts_with_all = ["list", "only", "set", "directory", "speed"])]
    stalls: Option<f64>,
    /// With --stalls: rounds of each ping-pong
    #[arg(long, requires = "stalls", default_value_t = 40_000, value_parser = clap::value_parser!(u32).range(1000..=200_000))]
    rounds: u32,
    /// With --stalls: threads that keep processors busy
    #[arg(long, requires = "stalls", default_value_t = 4)]
    load: usize,
    /// Say what failing programs printed, in full
    #[arg(long, short)]
    verbose: bool,
}

fn chosen(cli: &Cli) -> Vec<Case> {
    let mut all = matrix::all();
    all.retain(|case| cli.set == Set::Full || case.ci);
    if cli.directory {
        all.retain(|case| !case.directory && !directory::needs_preload(case));
        all = all.into_iter().map(Case::by_directory).collect();
    }
    all.retain(|case| cli.only.is_empty() || cli.only.iter().any(|text| case.name.contains(text.as_str())));
    all
}

/// Names that no case has: whoever gives one shall not take the others' success for its.
fn unknown<'a>(cli: &'a Cli, cases: &[Case]) -> Vec<&'a str> {
    let has = |name: &str| cases.iter().any(|case| case.name.contains(name));
    cli.only.iter().map(String::as_str).filter(|name| !has(name)).collect()
}

/// `ferroce` beside this program.
fn beside() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(|e| format!("finding this program: {e}"))?;
    let found = own.with_file_name("ferroce");
    match found.is_file() {
        true => Ok(found),
        false => Err(format!(
            "{} is not there: build it, or name it with --ferroce",
            found.display()
        )),
    }
}

fn setup(cli: &Cli) -> Result<Setup> {
    let ferroce = cli.ferroce.clone().map_or_else(beside, Ok)?;
    process::catch_signals()?;
    let addrs = [cli.addr.into(), cli.addr6.into()];
    Setup::new(&ferroce, addrs, cli.user.as_deref())
}

/// Says which cases there are. A reader that has seen enough (`| head`) is no failure.
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
    let cases = chosen(cli);
    if cli.list {
        return list(&cases).map(|()| true);
    }
    let unknown = unknown(cli, &cases);
    if cases.is_empty() || !unknown.is_empty() {
        return Err(format!(
            "no case has that name: {}; --list shows all",
            unknown.join(", ")
        ));
    }
    let setup = setup(cli)?;
    let mut report = Report::default();
    for case in &cases {
        let outcome = match case.missing() {
            Some(why) => Outcome::NotRun(why),
            None => setup.run(case),
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

    use super::{Cli, chosen, unknown};

    #[test]
    fn each_name_that_is_asked_for_has_to_be_one() {
        let cli = Cli::try_parse_from(["apps", "--only", "pingpong", "--only", "no-such-thing"])
            .unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(unknown(&cli, &chosen(&cli)), ["no-such-thing"]);
    }

    #[test]
    fn the_sets_are_named_as_those_of_the_other_suites() {
        let of = |set| chosen(&Cli::try_parse_from(["apps", "--set", set]).unwrap_or_else(|e| panic!("{e}"))).len();
        let (ci, full) = (of("ci"), of("full"));
        assert!(0 < ci && ci < full, "{ci} {full}");
    }
}
