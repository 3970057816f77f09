//! `cargo xtask bench`: speed beside that of others, measured in one run and in turns, because machines and their load differ.

mod chain;
mod load;
mod page;
mod usage;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::{
    Result,
    cargo::{self, Profile},
    process,
    tools::{self, Tool},
};
use chain::{Chain, Kind, Programs};
use load::{Figures, LOADS, Load};
use usage::Usage;

const NEEDED: [Tool; 3] = [
    Tool::new("fio", "fio"),
    Tool::new("nbdcopy", "libnbd-bin"),
    Tool::new("nbdkit", "nbdkit"),
];
const MIB: u64 = 1 << 20;

/// The page of benchmarks, or one of its parts at length.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    page: page::PageArgs,
    #[command(subcommand)]
    task: Option<BenchTask>,
}

/// Measurement.
#[derive(Subcommand)]
pub(crate) enum BenchTask {
    /// A mapped device beside NBD over TCP: `ferroce map` and `serve`, nbdkit in two hops and in one, and a bare chain
    ///
    /// fio's nbd engine and nbdcopy, on an image in memory. `two hops` is nbdkit's nbd plugin on a unix socket in front of nbdkit
    /// over TCP, a chain like ours; `one hop` nbdkit over TCP; `bare` two loops of ours that pass requests on in UDP
    /// datagrams without any protocol, up to 32 KiB: about what this machine can do. Installs fio, nbdkit and
    /// nbdcopy if they are missing. Prints for each load the medians, our ratio to each of the others, and what a request took of
    /// the processors and of context switches in either process of the chain.
    Block(BlockArgs),
}

#[derive(Args)]
pub(crate) struct BlockArgs {
    /// Each figure is the median of so many rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each of fio's runs
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// MiB of the image, of which there are two
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..))]
    size: u64,
    /// Folder of the images, in memory
    #[arg(long, default_value = "/dev/shm")]
    dir: PathBuf,
    /// Only loads whose name contains this; several times: any of them
    #[arg(long)]
    only: Vec<String>,
    /// Write all figures of all rounds to a file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Runs a benchmark.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    match &args.task {
        None => page::run(&args.page),
        Some(BenchTask::Block(args)) => block(args),
    }
}

/// One measurement.
struct Sample {
    figures: Figures,
    /// Of each process of the chain, while the load ran.
    used: Vec<(&'static str, Usage)>,
}

/// Resources that are released at the end.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir_all(&self.0) {
            eprintln!("warning: {} was not removed: {e}", self.0.display());
        }
    }
}

impl Scratch {
    fn new(parent: &Path) -> Result<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let n = MADE.fetch_add(1, Ordering::Relaxed);
        let dir = parent.join(format!("ferroce-bench-{}-{n}", std::process::id()));
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        Ok(Self(dir))
    }
}

fn block(args: &BlockArgs) -> Result<()> {
    let mut all = Vec::new();
    measure_block(args, |load, samples| {
        print(load, samples);
        all.push(to_json(load, samples));
    })?;
    match &args.json {
        Some(file) => {
            let text = serde_json::to_string_pretty(&all).map_err(|e| e.to_string())?;
            fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))
        }
        None => Ok(()),
    }
}

/// Of each load: its name, the unit of its rates, and these of each chain and round.
type BlockRates = Vec<(String, &'static str, Vec<(&'static str, Vec<f64>)>)>;

fn block_rates(args: &BlockArgs) -> Result<BlockRates> {
    let mut all = Vec::new();
    measure_block(args, |load, samples| {
        let rates = |s: &[Sample]| s.iter().map(|s| rate(load, &s.figures)).collect();
        let chains = samples.iter().map(|(kind, of_kind)| (kind.name(), rates(of_kind)));
        all.push((load.name().to_owned(), unit(load), chains.collect()));
    })?;
    Ok(all)
}

fn measure_block(args: &BlockArgs, mut each: impl FnMut(Load, &[(Kind, Vec<Sample>)])) -> Result<()> {
    let loads: Vec<Load> = LOADS
        .into_iter()
        .filter(|l| args.only.is_empty() || args.only.iter().any(|o| l.name().contains(o.as_str())))
        .collect();
    if loads.is_empty() {
        let names = LOADS.map(|l| l.name()).join(", ");
        return Err(format!("no load is called like that; there are: {names}"));
    }
    tools::ensure(&NEEDED)?;
    let programs = Programs {
        ferroce: cargo::build("ferroce", "ferroce", Profile::Release)?,
        bare: cargo::build("ferroce-bare", "ferroce-bare", Profile::Release)?,
    };
    let (images, sockets) = (Scratch::new(&args.dir)?, Scratch::new(&std::env::temp_dir())?);
    let (image, copy) = (images.0.join("disk.img"), images.0.join("copy.img"));
    for file in [&image, &copy] {
        fill(file, args.size * MIB)?;
    }
    // All are there from the beginning; only one at a time has something to do.
    let mut chains = Vec::new();
    for kind in Kind::ALL {
        chains.push(Chain::start(kind, &programs, &image, &sockets.0)?);
    }
    for load in loads {
        let samples = measure(args, load, &mut chains, &copy)?;
        each(load, &samples);
    }
    Ok(())
}

/// A file without holes.
fn fill(file: &Path, bytes: u64) -> Result<()> {
    use std::io::Write;
    let fail = |e| format!("{}: {e}", file.display());
    let mut out = fs::File::create(file).map_err(fail)?;
    let pattern: Vec<u8> = (0..MIB).map(|i| ((i * 31) >> 3) as u8).collect();
    for _ in 0..bytes / MIB {
        process::check_interrupt()?;
        out.write_all(&pattern).map_err(fail)?;
    }
    Ok(())
}

/// The samples of each chain that takes this load, in rounds.
fn measure(args: &BlockArgs, load: Load, chains: &mut [Chain], copy: &Path) -> Result<Vec<(Kind, Vec<Sample>)>> {
    let mut samples: Vec<(Kind, Vec<Sample>)> = Vec::new();
    for round in 0..args.rounds {
        for chain in chains.iter_mut().filter(|c| c.kind.takes(load.block())) {
            process::check_interrupt()?;
            let before = chain.usage()?;
            let figures = load.run(&chain.uri, copy, args.seconds);
            chain.check()?;
            let figures = figures.map_err(|e| format!("{}: {e}", chain.kind.name()))?;
            let after = chain.usage()?;
            let used = after.iter().zip(&before).map(|(now, then)| (now.0, now.1 - then.1));
            let used = used.collect();
            if round == 0 {
                samples.push((chain.kind, Vec::new()));
            }
            if let Some((_, of_kind)) = samples.iter_mut().find(|(kind, _)| *kind == chain.kind) {
                of_kind.push(Sample { figures, used });
            }
        }
    }
    Ok(samples)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn unit(load: Load) -> &'static str {
    if load.counts() { "k/s" } else { "GB/s" }
}

/// Requests a second in thousands, or GB/s.
fn rate(load: Load, figures: &Figures) -> f64 {
    match load.counts() {
        true => figures.requests / figures.seconds / 1e3,
        false => figures.bytes / figures.seconds / 1e9,
    }
}

fn print(load: Load, samples: &[(Kind, Vec<Sample>)]) {
    let unit = unit(load);
    println!("\n{}", load.name());
    let rate_of = |s: &[Sample]| median(s.iter().map(|s| rate(load, &s.figures)));
    let p50_of = |s: &[Sample]| median(s.iter().filter_map(|s| s.figures.p50));
    let Some((_, ours)) = samples.iter().find(|(kind, _)| *kind == Kind::Ferroce) else {
        return;
    };
    for (kind, of_kind) in samples {
        let mut line = format!("  {:<9} {:>8.2} {unit:<4}", kind.name(), rate_of(of_kind));
        let p50 = p50_of(of_kind);
        if p50.is_finite() {
            let p99 = median(of_kind.iter().filter_map(|s| s.figures.p99));
            line += &format!("  p50 {p50:>7.1} us  p99 {p99:>8.1} us");
        }
        if *kind != Kind::Ferroce {
            line += &format!("  ferroce: {:.2} x", rate_of(ours) / rate_of(of_kind));
            if p50.is_finite() {
                line += &format!(", p50 {:.2} x", p50_of(ours) / p50);
            }
        }
        println!("{line}");
        for (i, (name, _)) in of_kind[0].used.iter().enumerate() {
            println!("{}", used(load, name, of_kind, i));
        }
    }
}

/// Resources that a process of a chain has used for a request, or for a MiB.
fn used(load: Load, name: &str, samples: &[Sample], process: usize) -> String {
    let (per, unit): (fn(&Figures) -> f64, _) = match load.counts() {
        true => (|f| f.requests, "request"),
        false => (|f| f.bytes / MIB as f64, "MiB"),
    };
    let of = |what: fn(&Usage) -> f64| median(samples.iter().map(|s| what(&s.used[process].1) / per(&s.figures)));
    let threads = samples.iter().map(|s| s.used[process].1.threads).max().unwrap_or(0);
    let (us, switches) = (of(|u| u.seconds * 1e6), of(|u| u.switches as f64));
    format!("    {name:<8} {us:>7.1} us of processor and {switches:.2} context switches a {unit}, {threads} threads")
}

fn to_json(load: Load, samples: &[(Kind, Vec<Sample>)]) -> Value {
    let sample = |s: &Sample| {
        let used = s.used.iter().map(|(name, u)| {
            json!({ "process": name, "cpu_seconds": u.seconds, "context_switches": u.switches, "threads": u.threads })
        });
        json!({
            "requests": s.figures.requests,
            "bytes": s.figures.bytes,
            "seconds": s.figures.seconds,
            "p50_us": s.figures.p50,
            "p99_us": s.figures.p99,
            "processes": used.collect::<Vec<_>>(),
        })
    };
    let chains = samples
        .iter()
        .map(|(kind, all)| json!({ "chain": kind.name(), "rounds": all.iter().map(sample).collect::<Vec<_>>() }));
    json!({ "load": load.name(), "chains": chains.collect::<Vec<_>>() })
}
