//! `ferroce-interop`: boots stock Debian kernels in virtual machines and runs our transport against theirs.

mod beside;
mod capture;
mod connects;
mod facts;
mod far;
mod guest;
mod lab;
mod peer_mode;
mod peer_report;
mod relay;
mod report;
mod run;
mod scenarios;
#[cfg(test)]
mod specs;
mod speed;

use std::{
    fs,
    io::{self, Write as _},
    net::IpAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::atomic::Ordering,
};

use clap::{Parser, ValueEnum};

use guest::Kernel;
use lab::{Places, RunDir};
use report::{Outcome, Verdict};
use roce::DatapathKind;
use scenarios::Scenario;

/// Whatever ends a scenario.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Which scenarios run.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Set {
    /// Each kind, direction, service and fault once: what each change has to pass.
    Ci,
    /// All.
    Full,
}

/// Which kernels run in the guests.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Kernels {
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
    #[value(name = "7.3")]
    V7_3,
    All,
}

/// Runs our transport against the kernel's in virtual machines. Needs root and Debian's package archive.
///
/// With --peer it runs against another host instead, whatever RDMA device that has: operations, connection manager, IPv6,
/// RNR, exhausted retries and refused accesses, and with a kit (`cargo xtask kit`) on both hosts the provider contract and sessions
/// of RTRS over that device. Its other half is a script: `--peer-script > ferroce-peer.sh`, copied there and run as `bash
/// ferroce-peer.sh ADDRESS`; --ssh does both. The report (Markdown and JSON), captures and logs are put into a folder and packed.
#[derive(Parser, Debug)]
#[command(
    name = "cargo xtask interop",
    bin_name = "cargo xtask interop",
    version,
    args_conflicts_with_subcommands = true,
    max_term_width = 100
)]
#[command(
    after_help = "Exit status: 0 all passed, 1 a scenario failed or was not run, 2 wrong usage, 130 interrupted."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Option<Task>,
    /// Only scenarios whose name contains this; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Which scenarios run
    #[arg(long, value_enum, default_value_t = Set::Full)]
    set: Set,
    /// The kernels that run in the guests; not all scenarios are there for each [default: 6.1 in
    /// the short set, else all]
    #[arg(long, value_enum)]
    kernel: Option<Kernels>,
    /// List the scenarios with their directions and guests, and stop
    #[arg(long)]
    list: bool,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the table of results (Markdown) to this file
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Run nothing: make the tables of results that an earlier run has written with --json; given
    /// again, of scenarios that were run again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["list", "peer", "json", "only"])]
    from: Vec<PathBuf>,
    /// Put the short table of results into this file, between its marks
    #[arg(long, value_name = "README")]
    readme: Option<PathBuf>,
    /// The lab's folder, kept between runs
    #[arg(long, global = true, value_name = "FOLDER", default_value = "target/lab")]
    lab: PathBuf,
    /// Output and captures [default: logs in the lab's folder, logs-2 … while another run uses that]
    #[arg(long, global = true, value_name = "FOLDER")]
    logs: Option<PathBuf>,
    /// Keep the captures of scenarios that passed, too
    #[arg(long)]
    keep: bool,
    /// Sockets that our programs use here: `raw` and `packet` show what the kernel makes of Identifications of our own and UDP checksum 0.
    /// Scenarios in which several of our programs share an address are for `udp` alone, those in which ours has all addresses
    /// (`paths-*-kernel-client`) not for `packet`: they fail with others
    #[arg(long, value_name = "udp|raw|packet", default_value = "udp")]
    datapath: DatapathKind,
    /// The ferroce program [default: beside this one]
    #[arg(long, global = true, value_name = "PROGRAM")]
    ferroce: Option<PathBuf>,
    /// Another host to run against, where the other half (--peer-script) runs: an address, or a name (its IPv4 address if
    /// it has one)
    #[arg(long, value_name = "HOST", value_parser = peer_mode::resolve)]
    peer: Option<IpAddr>,
    /// Its IPv6 address, or a name that has one, for the scenarios over IPv6, if --peer is its IPv4 address
    #[arg(long, requires = "peer", value_name = "HOST", value_parser = peer_mode::resolve_v6)]
    peer_v6: Option<IpAddr>,
    /// The RDMA device there, which has to have that address: `mlx5_0`
    #[arg(long, requires = "peer", value_name = "NAME")]
    device: Option<String>,
    /// A device of the kernel's RNBD server there, by the name that a client gives; its first 32 MiB are overwritten
    #[arg(long, requires = "peer", value_name = "DEVICE")]
    rnbd: Option<String>,
    /// TCP port of the other half
    #[arg(long, value_name = "PORT", default_value_t = 7001)]
    peer_port: u16,
    /// How long to wait for the other half, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    peer_wait: u64,
    /// Start the other half there by ssh
    #[arg(long, requires = "peer", value_name = "[USER@]HOST")]
    ssh: Option<String>,
    /// The program for that, with options
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes")]
    rsh: String,
    /// Print the script that is the other half, and stop
    #[arg(long)]
    peer_script: bool,
    /// The conformance kit to try in the lab (`cargo xtask kit`) [default: of `cargo xtask interop` one that it makes, where
    /// the scenario is among those that run]
    #[arg(long, value_name = "FILE")]
    kit: Option<PathBuf>,
    /// The program whose disk in memory is compared with one behind NBD (tests/ublk) [default: of `cargo xtask interop` one that it
    /// builds, where the scenario is among those that run]
    #[arg(long, value_name = "FILE")]
    ublk: Option<PathBuf>,
    /// A checkout of Lustre, from which LNet is built for the guests' kernels: the scenarios `lnet-*` run, which else do not
    #[arg(long, value_name = "FOLDER", conflicts_with = "peer")]
    lustre: Option<PathBuf>,
    /// Only what runs beside the rest: for the second process of a run
    #[arg(long, hide = true)]
    beside: bool,
}

/// What else there is to do.
#[derive(clap::Subcommand, Debug)]
enum Task {
    /// Make short captures of kernel-to-kernel traffic, for `pcap-fixtures`, and compare our engine with them
    Capture(capture::Args),
    /// Measure perftest and RDS sockets between two guests, over rdma_rxe and over our transport, in turns
    Speed(speed::Args),
}

impl Cli {
    /// The kernels that scenarios may run on. Another host has its own.
    fn kernels(&self) -> Vec<Kernel> {
        match self.kernel {
            _ if self.peer.is_some() => vec![Kernel::V6_1],
            Some(Kernels::V6_1) => vec![Kernel::V6_1],
            Some(Kernels::V6_12) => vec![Kernel::V6_12],
            Some(Kernels::V7_3) => vec![Kernel::V7_3],
            Some(Kernels::All) => Kernel::ALL.to_vec(),
            None => match self.set {
                Set::Ci => vec![Kernel::V6_1],
                Set::Full => Kernel::ALL.to_vec(),
            },
        }
    }
}

fn canonical(path: &Path) -> Result<PathBuf, Error> {
    fs::canonicalize(path).map_err(|e| format!("{}: {e}", path.display()).into())
}

fn places(cli: &Cli, run: &mut RunDir) -> Result<Places, Error> {
    let lab = match cli.peer {
        // Which has no use for one.
        Some(_) => run.path.clone(),
        None => {
            fs::create_dir_all(&cli.lab)?;
            fs::canonicalize(&cli.lab)?
        }
    };
    let me = std::env::current_exe()?;
    let beside = |name: &str| me.with_file_name(name);
    let logs = match (&cli.logs, cli.peer) {
        (Some(logs), _) => logs.clone(),
        (None, Some(peer)) => peer_report::folder(peer)?,
        (None, None) => run.logs(&lab)?,
    };
    fs::create_dir_all(&logs)?;
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab");
    let ferroce = cli.ferroce.clone().unwrap_or_else(|| beside("ferroce"));
    Ok(Places {
        lab,
        logs: fs::canonicalize(logs)?,
        scripts,
        run: run.path.clone(),
        ferroce: canonical(&ferroce)?,
        peer: beside("ferroce-lab"),
        hostile: beside("ferroce-hostile"),
        contract: beside("provider-contract"),
        rdma: beside("ferroce-rdma"),
        kit: cli.kit.clone(),
        ublk: cli.ublk.clone(),
        lustre: cli.lustre.as_deref().map(canonical).transpose()?,
        keep: cli.keep,
        datapath: cli.datapath,
    })
}

fn catch_signals() -> Result<(), Error> {
    for signal in [
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGHUP,
    ] {
        // SAFETY: the handler only stores into an atomic.
        unsafe { signal_hook::low_level::register(signal, || lab::STOP.store(true, Ordering::Relaxed))? };
    }
    Ok(())
}

fn task(cli: &Cli, task: &Task) -> Result<(), Error> {
    catch_signals()?;
    let mut run = RunDir::new()?;
    let places = places(cli, &mut run)?;
    match task {
        Task::Capture(args) => capture::run(args, &places),
        Task::Speed(args) => speed::run(args, &places),
    }
}

/// Runs what was chosen; what could not be run is in the result as such.
fn scenarios(cli: &Cli, chosen: Vec<Scenario>) -> Result<Vec<Outcome>, Error> {
    let (elsewhere, here): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|s| s.elsewhere.is_some());
    let mut outcomes = match here.is_empty() {
        true => Vec::new(),
        false => in_the_lab(cli, here)?,
    };
    for s in &elsewhere {
        let why = s.elsewhere.unwrap_or_default().to_owned();
        let mut outcome = Outcome::new(s, Verdict::NotRun, 0.0, why);
        // It counts for who asks for it.
        outcome.optional = cli.only.is_empty();
        println!(
            "{}{}",
            outcome.line(),
            if outcome.optional { " (does not count)" } else { "" }
        );
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

fn in_the_lab(cli: &Cli, chosen: Vec<Scenario>) -> Result<Vec<Outcome>, Error> {
    catch_signals()?;
    let order: Vec<String> = chosen.iter().map(|s| s.name.clone()).collect();
    let (here, waiting) = beside::split(cli, chosen);
    let mut dir = RunDir::new()?;
    let mut outcomes = Vec::new();
    let why = places(cli, &mut dir).and_then(|places| run::all(cli, &places, &here, &waiting, &mut outcomes));
    // Whatever came of it when the user stopped the run.
    let why = lab::check_stop().and(why);
    if let Err(e) = &why {
        eprintln!("ferroce-interop: {e}");
    }
    let reason = why.err().map(|e| e.to_string()).unwrap_or_default();
    for s in here.iter().chain(&waiting) {
        if !outcomes.iter().any(|o| o.name == s.name) {
            outcomes.push(Outcome::new(s, Verdict::NotRun, 0.0, reason.clone()));
        }
    }
    outcomes.sort_by_key(|o| order.iter().position(|name| *name == o.name));
    Ok(outcomes)
}

/// The results of earlier runs; of a scenario the last.
fn earlier(files: &[PathBuf]) -> Result<Vec<Outcome>, Error> {
    let mut all: Vec<Outcome> = Vec::new();
    for file in files {
        let named = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
        let text = fs::read_to_string(file).map_err(|e| named(&e))?;
        let outcomes: Vec<Outcome> = serde_json::from_str(&text).map_err(|e| named(&e))?;
        for outcome in outcomes {
            match all.iter_mut().find(|o| o.name == outcome.name) {
                Some(before) => *before = outcome,
                None => all.push(outcome),
            }
        }
    }
    Ok(all)
}

fn write_results(cli: &Cli, outcomes: &[Outcome]) -> Result<(), Error> {
    if let Some(file) = &cli.json {
        fs::write(file, serde_json::to_string_pretty(outcomes)? + "\n")
            .map_err(|e| format!("{}: {e}", file.display()))?;
    }
    if let Some(file) = &cli.table {
        fs::write(file, report::table(outcomes)).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    if let Some(file) = &cli.readme {
        let named = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
        let text = fs::read_to_string(file).map_err(|e| named(&e))?;
        let text = report::readme(&text, outcomes).map_err(|e| named(&e))?;
        fs::write(file, text).map_err(|e| named(&e))?;
    }
    Ok(())
}

/// The scenarios that the options name.
fn chosen(cli: &Cli) -> Vec<Scenario> {
    let mut chosen = scenarios::all();
    if cli.peer.is_some() {
        // Its MTU is what it is.
        chosen.iter_mut().for_each(|s| s.name = s.name.replace("-mtu1500", ""));
    }
    if cli.lustre.is_some() {
        chosen.iter_mut().for_each(Scenario::with_lustre);
    }
    chosen.retain(|s| {
        let named = cli.only.is_empty() || cli.only.iter().any(|o| s.name.contains(o));
        let here = if cli.peer.is_some() { s.peer } else { !s.peer_only };
        let kernel = cli.kernels().contains(&s.shape.kernel);
        named && here && kernel && (cli.set == Set::Full || s.ci) && (!cli.beside || s.waits)
    });
    chosen
}

/// Names that no scenario has: whoever gives one shall not take the others' success for its.
fn unknown<'a>(cli: &'a Cli, chosen: &[Scenario]) -> Vec<&'a str> {
    let has = |name: &str| chosen.iter().any(|s| s.name.contains(name));
    cli.only.iter().map(String::as_str).filter(|name| !has(name)).collect()
}

fn run_cli(cli: &Cli) -> Result<ExitCode, Error> {
    if let Some(what) = &cli.command {
        return task(cli, what).map(|()| ExitCode::SUCCESS);
    }
    if cli.peer_script {
        print!("{}", peer_mode::script());
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = chosen(cli);
    if cli.list {
        return list(&chosen);
    }
    if !cli.from.is_empty() {
        return summary(cli, &earlier(&cli.from)?);
    }
    if chosen.is_empty() || !unknown(cli, &chosen).is_empty() {
        let names = unknown(cli, &chosen).join(", ");
        eprintln!(
            "ferroce-interop: no scenario{}{} has such a name{}{names}; --list shows them",
            if cli.set == Set::Ci { " of the set ci" } else { "" },
            if cli.peer.is_some() { " for a peer" } else { "" },
            if names.is_empty() { "" } else { ": " },
        );
        return Ok(ExitCode::from(2));
    }
    summary(cli, &scenarios(cli, chosen)?)
}

/// Says which scenarios there are. A reader that has seen enough (`| head`) is no failure.
fn list(chosen: &[Scenario]) -> Result<ExitCode, Error> {
    let mut out = io::stdout().lock();
    for s in chosen {
        let why = s.elsewhere.map(|why| format!(" (not run: {why})")).unwrap_or_default();
        match writeln!(out, "{:<40} {}; {}{why}", s.name, s.direction.text(), s.setting()) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => break,
            written => written.map_err(|e| format!("can't write the list: {e}"))?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes what was asked for, and says how it went.
fn summary(cli: &Cli, outcomes: &[Outcome]) -> Result<ExitCode, Error> {
    write_results(cli, outcomes)?;
    let count = |r| outcomes.iter().filter(|o| o.result == r && !o.optional).count();
    let (passed, failed, missing) = (count(Verdict::Passed), count(Verdict::Failed), count(Verdict::NotRun));
    if !cli.beside {
        println!("interop: {passed} passed, {failed} failed, {missing} not run");
    }
    Ok(match (lab::STOP.load(Ordering::Relaxed), failed + missing > 0) {
        (true, _) => ExitCode::from(130),
        (false, true) => ExitCode::FAILURE,
        (false, false) => ExitCode::SUCCESS,
    })
}

fn main() -> ExitCode {
    run_cli(&Cli::parse()).unwrap_or_else(|e| {
        eprintln!("ferroce-interop: {e}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::{Cli, Verdict, chosen, earlier, scenarios, unknown};

    #[test]
    fn each_name_that_is_asked_for_has_to_be_one() {
        let cli = Cli::parse_from(["ferroce-interop", "--only", "rping", "--only", "no-such-thing"]);
        assert_eq!(unknown(&cli, &chosen(&cli)), ["no-such-thing"]);
        let cli = Cli::parse_from(["ferroce-interop", "--only", "rping"]);
        assert!(unknown(&cli, &chosen(&cli)).is_empty());
    }

    #[test]
    fn kernels_are_those_that_are_asked_for() {
        let series = |args: &[&str]| -> std::collections::BTreeSet<&str> {
            let cli = Cli::parse_from([&["ferroce-interop"], args].concat());
            chosen(&cli).iter().map(|s| s.shape.kernel.series()).collect()
        };
        assert_eq!(series(&[]), ["6.1", "6.12", "7.3"].into());
        assert_eq!(series(&["--set", "ci"]), ["6.1"].into());
        assert_eq!(series(&["--kernel", "all"]), ["6.1", "6.12", "7.3"].into());
        assert_eq!(
            series(&["--set", "ci", "--kernel", "all"]),
            ["6.1", "6.12", "7.3"].into()
        );
        assert_eq!(series(&["--kernel", "6.12"]), ["6.12"].into());
        assert_eq!(series(&["--kernel", "7.3"]), ["7.3"].into());
        assert_eq!(series(&["--kernel", "6.1"]), ["6.1"].into());
        assert_eq!(series(&["--peer", "127.0.0.1"]), ["6.1"].into());
    }

    #[test]
    fn of_a_scenario_that_was_run_again_the_last_result_counts() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = |name: &str, results: &[(&str, &str)]| {
            let outcome = |(name, result): &(&str, &str)| {
                serde_json::json!({
                    "name": name, "number": 1, "direction": "both", "guest": "1 CPU", "result": result,
                    "seconds": 1.0, "detail": "", "optional": false,
                })
            };
            let path = dir.path().join(name);
            let all: Vec<_> = results.iter().map(outcome).collect();
            std::fs::write(&path, serde_json::json!(all).to_string()).expect("a file");
            path
        };
        let first = file("first", &[("a", "passed"), ("b", "failed"), ("c", "not run")]);
        let again = file("again", &[("b", "passed")]);
        let outcomes = earlier(&[first, again]).expect("outcomes");
        let results: Vec<_> = outcomes.iter().map(|o| (o.name.as_str(), o.result)).collect();
        assert_eq!(
            results,
            [("a", Verdict::Passed), ("b", Verdict::Passed), ("c", Verdict::NotRun)]
        );
        let bad = dir.path().join("none");
        assert!(earlier(&[bad]).is_err());
    }

    #[test]
    fn a_device_is_a_scenario_that_the_lab_does_not_run() {
        let cli = |args: &[&str]| Cli::parse_from([&["ferroce-interop"], args].concat());
        assert!(chosen(&cli(&["--list"])).iter().any(|s| s.name == "hardware-peer"));
        let asked = cli(&["--only", "hardware-peer"]);
        let outcomes = scenarios(&asked, chosen(&asked)).expect("outcomes");
        let [outcome] = &outcomes[..] else {
            panic!("{outcomes:?}")
        };
        assert_eq!((outcome.result, outcome.optional), (Verdict::NotRun, false));
        assert_eq!(outcome.detail, "no --peer HOST");
        assert!(
            chosen(&cli(&["--peer", "127.0.0.1"]))
                .iter()
                .all(|s| s.elsewhere.is_none())
        );
    }
}
