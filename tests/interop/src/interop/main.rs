//! `ferroce-interop`: boots stock Debian kernels in virtual machines and runs our transport against theirs.

mod capture;
mod guest;
mod lab;
mod relay;
mod scenarios;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use clap::{Parser, ValueEnum};
use serde::Serialize;

use guest::Guest;
use lab::{Net, Proc};
use scenarios::{ALL, Ctx, Scenario};

/// Whatever ends a scenario.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Which scenarios run.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Set {
    /// A few of each kind.
    Ci,
    /// All.
    Full,
}

/// Runs our transport against the kernel's in virtual machines. Needs root and Debian's package archive.
#[derive(Parser, Debug)]
#[command(version)]
#[command(args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Task>,
    /// Only scenarios whose name contains this; may be given several times.
    #[arg(long)]
    only: Vec<String>,
    /// Which scenarios run.
    #[arg(long, value_enum, default_value_t = Set::Full)]
    set: Set,
    /// List the scenarios and stop.
    #[arg(long)]
    list: bool,
    /// Write the results to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The lab's folder, kept between runs.
    #[arg(long, global = true, default_value = "target/lab")]
    lab: PathBuf,
    /// Keep the captures of scenarios that passed, too.
    #[arg(long)]
    keep: bool,
    /// The ferroce program (default: beside this one).
    #[arg(long, global = true)]
    ferroce: Option<PathBuf>,
}

/// What else there is to do.
#[derive(clap::Subcommand, Debug)]
enum Task {
    /// Make short captures of kernel-to-kernel traffic, for `pcap-fixtures`.
    Capture(capture::Args),
}

/// How a scenario ended.
#[derive(Serialize, Debug)]
struct Outcome {
    name: String,
    /// `passed`, `failed` or `not run`.
    result: &'static str,
    seconds: f64,
    detail: String,
}

struct Places {
    lab: PathBuf,
    logs: PathBuf,
    scripts: PathBuf,
    ferroce: PathBuf,
    peer: PathBuf,
    keep: bool,
}

fn places(cli: &Cli) -> Result<Places, Error> {
    fs::create_dir_all(&cli.lab)?;
    let lab = fs::canonicalize(&cli.lab)?;
    let me = std::env::current_exe()?;
    let beside = |name: &str| me.with_file_name(name);
    let logs = lab.join("logs");
    fs::create_dir_all(&logs)?;
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab");
    let ferroce = cli.ferroce.clone().unwrap_or_else(|| beside("ferroce"));
    Ok(Places {
        lab,
        logs,
        scripts,
        ferroce: fs::canonicalize(ferroce)?,
        peer: beside("ferroce-lab"),
        keep: cli.keep,
    })
}

/// Runs one scenario with a capture of the wire, which is checked afterwards.
fn run_one(s: &Scenario, places: &Places, guest: &Guest) -> Result<String, Error> {
    let dir = places.logs.join(s.name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir)?;
    let pcap = dir.join("wire.pcap");
    let mut dump = Command::new("tcpdump");
    dump.args([
        "-i",
        &format!("tap{}", guest.id),
        "--immediate-mode",
        "-B",
        "32768",
        "-s",
        "0",
        "-U",
        "-w",
    ])
    .arg(&pcap);
    dump.args(["udp", "port", "4791"]);
    let mut dump = Proc::spawn("tcpdump", &mut dump, &dir)?;
    dump.wait_for("listening", Duration::from_secs(10))?;
    guest.netem(s.netem)?;
    let mut ctx = Ctx {
        guest,
        dir: dir.clone(),
        lab: places.lab.clone(),
        ferroce: places.ferroce.clone(),
        peer: places.peer.clone(),
        lossy: s.netem.is_some(),
    };
    let result = (s.run)(&mut ctx);
    guest.netem(None)?;
    dump.interrupt();
    dump.finish(Duration::from_secs(10))?;
    let detail = result?;
    let mut check = Command::new(&places.ferroce);
    check.args(["pcap", "check", "--json"]).arg(&pcap);
    let text = Proc::spawn("pcap-check", &mut check, &dir)?.finish(Duration::from_secs(120))?;
    let report: serde_json::Value = serde_json::from_str(text.lines().next().unwrap_or_default())?;
    let (frames, bad) = (report["roce_frames"].as_u64().unwrap_or(0), report["icrc_bad"].as_u64());
    if frames == 0 || bad != Some(0) {
        return Err(format!("pcap check: {text}").into());
    }
    if !places.keep {
        let _ = fs::remove_file(&pcap);
    }
    Ok(format!("{detail}; {frames} frames, ICRC of all correct"))
}

fn run_all(cli: &Cli, chosen: &[&Scenario]) -> Result<Vec<Outcome>, Error> {
    let places = places(cli)?;
    lab::prepare(&places.scripts, &places.lab)?;
    let net = Net::up(2)?;
    catch_signals()?;
    let mut guest: Option<Guest> = None;
    let mut outcomes = Vec::new();
    for s in chosen {
        let t0 = Instant::now();
        if guest.as_ref().is_none_or(|g| g.shape != s.shape) {
            drop(guest.take());
            net.set_mtu(s.shape.mtu)?;
            let script = places.scripts.join("guest.sh");
            guest = Some(Guest::boot(
                1,
                s.shape,
                &places.lab,
                &script,
                &places.peer,
                &places.logs,
            )?);
        }
        let Some(g) = guest.as_mut() else { continue };
        let (result, detail) = match run_one(s, &places, g) {
            Ok(detail) => ("passed", detail),
            Err(e) if lab::STOP.load(Ordering::Relaxed) => return Err(e),
            Err(e) => ("failed", e.to_string()),
        };
        let seconds = t0.elapsed().as_secs_f64();
        println!("{:<34} {result:<8} {seconds:6.1} s  {detail}", s.name);
        if result == "failed" {
            // A guest that has seen a failure may be in any state: the next scenario gets a fresh one.
            println!("  guest console (end):\n{}", tail(&g.console(), 15));
            g.kill();
            guest = None;
        }
        outcomes.push(Outcome {
            name: s.name.to_owned(),
            result,
            seconds,
            detail,
        });
    }
    Ok(outcomes)
}

fn catch_signals() -> Result<(), Error> {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // SAFETY: the handler only stores into an atomic.
        unsafe { signal_hook::low_level::register(signal, || lab::STOP.store(true, Ordering::Relaxed))? };
    }
    Ok(())
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Task::Capture(args)) = &cli.command {
        return match places(&cli).and_then(|p| capture::run(args, &p)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("ferroce-interop: {e}");
                ExitCode::FAILURE
            }
        };
    }
    let wanted = |s: &&Scenario| {
        (cli.set == Set::Full || s.ci) && (cli.only.is_empty() || cli.only.iter().any(|o| s.name.contains(o)))
    };
    let chosen: Vec<&Scenario> = ALL.iter().filter(wanted).collect();
    if cli.list {
        chosen.iter().for_each(|s| println!("{}", s.name));
        return ExitCode::SUCCESS;
    }
    if chosen.is_empty() {
        eprintln!("ferroce-interop: no scenario has such a name; --list shows them");
        return ExitCode::from(2);
    }
    let outcomes = run_all(&cli, &chosen).unwrap_or_else(|e| {
        eprintln!("ferroce-interop: {e}");
        Vec::new()
    });
    let count = |r: &str| outcomes.iter().filter(|o| o.result == r).count();
    let (passed, failed) = (count("passed"), count("failed"));
    let missing = chosen.len() - outcomes.len();
    if let Some(file) = &cli.json {
        let text = serde_json::to_string_pretty(&outcomes).unwrap_or_default();
        if let Err(e) = fs::write(file, text) {
            eprintln!("ferroce-interop: {}: {e}", file.display());
            return ExitCode::FAILURE;
        }
    }
    println!("interop: {passed} passed, {failed} failed, {missing} not run");
    if failed == 0 && missing == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
