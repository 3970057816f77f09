//! `cargo xtask bench`: measures all benchmarks and writes BENCHMARKS.md with its plots.

mod figure;
mod inner;
mod link;
mod lnet;
mod markdown;
mod plot;
mod progress;
mod rds;
mod shards;
mod tcp;
mod transport;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;

use super::{BlockArgs, Scratch};
use crate::{
    Result,
    cargo::{self, Profile},
    process, tools,
};
use figure::{Columns, Environment, Figure, Form, Part, Series, Spread, Target};
use markdown::{FIGURES, Measurement, PLOTS};

#[derive(Args)]
pub(crate) struct PageArgs {
    /// Two rounds of short measurements, to check that everything works. Writes no page unless --page is given
    #[arg(long)]
    pub(super) quick: bool,
    /// Rounds; each figure is the median of them [default: 5; with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Duration of each measurement, seconds [default: 2; with --quick 0.5]
    #[arg(long, value_parser = seconds)]
    seconds: Option<f64>,
    /// Measure only this part; may be repeated. Parts: bulk, latency, ack, one-sided, programs, operations, sizes, tcp, rds,
    /// lnet, recovery, loss, sharing, scale, shards, block, rxe, instructions
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// Write the figures of all rounds to a JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Directory of BENCHMARKS.md and docs/bench; with --only the other parts stay there as they are [default: this repository, if all
    /// parts are measured without --quick]
    #[arg(long, value_name = "DIR")]
    page: Option<PathBuf>,
    /// Measure nothing: write page, plots and README's table again from docs/bench/figures.json
    #[arg(long, conflicts_with_all = ["quick", "rounds", "seconds", "only", "json"])]
    redraw: bool,
}

fn seconds(text: &str) -> Result<f64> {
    let value: f64 = text.parse().map_err(|e| format!("{e}"))?;
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err("must be a finite number greater than 0".into()),
    }
}

impl PageArgs {
    pub(super) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 2 } else { 5 })
    }

    pub(super) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 0.5 } else { 2.0 })
    }

    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|o| o == part)
    }

    /// Returns the directory to write the page into, if any.
    fn target(&self) -> Option<PathBuf> {
        let whole = !self.quick && self.only.is_empty();
        self.page.clone().or_else(|| whole.then(cargo::workspace_root))
    }
}

/// Name, title, description and plot of each part.
const PARTS: [(&str, &str, &str, Form); 18] = [
    (
        "bulk",
        "Bandwidth",
        "1 MiB operations on loopback, both sides in one process, compared with the ceiling: the same packets through \
         the same sockets, with ICRC and copies but without a protocol (`ferroce bench`).",
        Form::Bars,
    ),
    (
        "latency",
        "Latency",
        "Round trips of 64 bytes on loopback. Both sides polling are compared with a raw UDP ping-pong of the same \
         size (`ferroce bench latency`), and both sides waiting for events with one that sleeps in epoll. Before it \
         sleeps, ferroce polls for up to 100 us as long as that finds packets.",
        Form::Bars,
    ),
    (
        "ack",
        "Acknowledgements while computing",
        "A process under `ferroce run` polls, receives a SEND of 64 bytes, and computes for the given time before it \
         answers and polls again. The time until the SEND completes at its peer is compared with the time to wake a \
         thread: a UDP echo by a thread of the same process that sleeps in epoll. The 99th percentile is compared \
         with the echo's plus 50 us.",
        Form::Bars,
    ),
    (
        "one-sided",
        "One-sided operations to a computing target",
        "WRITEs and READs of 64 bytes to a process under `ferroce run` that polled an empty completion queue 500 \
         times and then computes for 3 ms, compared with the same UDP echo. READs to a process that polled 20 times \
         and then sleeps: with a queue pair in an RNR wait, compared with none. The 99th percentile is compared with \
         the other's plus 200 us.",
        Form::Bars,
    ),
    (
        "programs",
        "Unmodified programs",
        "perftest under `ferroce run`, 64 bytes, and 1 MiB with 16 outstanding, on loopback, compared with `ferroce \
         bench` in two processes. Half a round trip and bandwidth.",
        Form::Bars,
    ),
    (
        "operations",
        "Operations by size and depth",
        "Millions of operations per second of one queue pair on loopback. Most are compared with the ceiling for \
         messages of that size.",
        Form::Bars,
    ),
    (
        "sizes",
        "Sizes",
        "By the size of a message, on loopback: half a round trip of a SEND compared with `fi_pingpong -p tcp`, and \
         bandwidth of WRITEs, 16 outstanding, compared with `iperf3 -l SIZE`.",
        Form::Lines,
    ),
    (
        "tcp",
        "UCX and libfabric over TCP",
        "On loopback: 1 MiB WRITEs compared with `ucx_perftest -t ucp_put_bw` with `UCX_TLS=tcp`, and a ping-pong of \
         SENDs compared with `fi_pingpong -p tcp`.",
        Form::Bars,
    ),
    (
        "rds",
        "RDS",
        "Messages one way between two unmodified programs on loopback (`tests/apps/c/flow.c`): `AF_RDS` sockets under \
         `ferroce run`, with a node for either side, compared with UDP and TCP sockets. Of UDP what has come counts; \
         RDS and TCP lose nothing.",
        Form::Bars,
    ),
    (
        "lnet",
        "LNet",
        "Bulk tests of lnet_selftest on loopback, 1 MiB a request, 8 requests at a time: `ferroce lnet selftest` with \
         `ferroce lnet serve`, two processes, compared with 1 MiB WRITEs in one process (`ferroce bench write`).",
        Form::Bars,
    ),
    (
        "recovery",
        "Goodput over loss",
        "`ib_write_bw` of 1 MiB under `ferroce run` between two network namespaces, on a link of 2 Gb/s with a round \
         trip of 2 ms, a queue of 2 MB and random loss (`ferroce-wire`). Queue pairs connected by RDMA_CM (`-R`) \
         retransmit only what was lost; others use the specification's go-back-N. TCP is iperf3 with the kernel's \
         default congestion control. A program that failed counts as 0.",
        Form::Lines,
    ),
    (
        "loss",
        "Loss",
        "Goodput of 1 MiB WRITEs, and of READs at 2 ms, between two network namespaces on a link of 2 Gb/s with a \
         queue of 2 MB and random loss (`ferroce-wire`), compared with the link without loss; retransmitted packets \
         compared with lost ones. `ferroce map --nbd` on a link of 5 Gb/s compared with nbdkit over TCP: with fio as \
         its client, and behind a second nbdkit, which is the same number of hops as ferroce's.",
        Form::Bars,
    ),
    (
        "sharing",
        "Sharing a link",
        "The same link without random loss. The slower of two ferroce flows compared with the faster, and one ferroce \
         flow compared with the sum of it and a TCP flow (iperf3, the kernel's default congestion control).",
        Form::Bars,
    ),
    (
        "scale",
        "Queue pairs",
        "64-byte WRITEs with 512 outstanding in all, or 64 on each, on several queue pairs, compared with one queue \
         pair; and on 64 of 10,000 connected ones. Memory of one of these with its connection.",
        Form::Bars,
    ),
    (
        "shards",
        "Engines and loops",
        "On loopback, with both sides alike. Two engines of a device compared with one, driven by one thread and by \
         two with a queue pair and a completion queue each, 64 outstanding, or 16 of 1 MiB (`ferroce bench --shards \
         --threads`). Two loops of `ferroce serve`, each with a `ferroce map --nbd`, compared with one loop and one \
         mapping, with 32 outstanding reads of each client.",
        Form::Bars,
    ),
    (
        "block",
        "Block device",
        "`ferroce map --nbd` in front of `ferroce serve` compared with nbdkit over TCP in two hops, the same number \
         (`cargo xtask bench block` measures more loads).",
        Form::Bars,
    ),
    (
        "rxe",
        "rdma_rxe",
        "perftest, and messages one way over `AF_RDS` sockets, between two emulated virtual machines with one \
         processor each: don't compare with the parts above. Over the kernel's rdma_rxe (and its RDS) and over ferroce \
         under `ferroce run`; the client is named first (`cargo xtask interop speed`). Packets are lost in both \
         directions.",
        Form::Bars,
    ),
    (
        "instructions",
        "Instructions",
        "Instructions of both sides together, without sockets, under callgrind: per operation with 16 outstanding, \
         and per packet with its share of the acknowledgements. Compared with two copies of the payload and two \
         ICRCs.",
        Form::Bars,
    ),
];

/// Measures the selected parts, prints the figures and writes the page.
pub(super) fn run(args: &PageArgs) -> Result<()> {
    if args.redraw {
        let dir = args.page.clone().unwrap_or_else(cargo::workspace_root);
        Measurement::read(&dir.join(FIGURES))?.draw(&dir)?;
        println!("wrote the page in {} from {FIGURES}", dir.display());
        return Ok(());
    }
    let unknown = args.only.iter().find(|o| PARTS.iter().all(|(name, ..)| name != o));
    if let Some(unknown) = unknown {
        let names = PARTS.map(|(name, ..)| name).join(", ");
        return Err(format!("unknown part {unknown}: expected one of {names}"));
    }
    let programs = link::Programs {
        ferroce: cargo::build_product(Profile::Release)?,
        wire: cargo::build("ferroce-wire", "ferroce-wire", Profile::Release)?,
    };
    let scratch = Scratch::new(&std::env::temp_dir())?;
    let mut parts = Vec::new();
    for (name, title, about, form) in PARTS {
        if !args.wants(name) {
            continue;
        }
        println!("\n{title}");
        let figures = measure(name, &programs, args, &scratch.0);
        process::check_interrupt()?;
        let part = Part {
            name,
            title,
            about,
            form,
            environment: None,
            figures,
        };
        print(&part);
        parts.push(part);
    }
    let measured = Measurement {
        environment: environment(args),
        parts,
    };
    if let Some(file) = &args.json {
        measured.write(file)?;
    }
    summarize(&measured.parts);
    match args.target() {
        Some(dir) => write_page(&dir, measured, !args.only.is_empty()),
        None => Ok(()),
    }
}

fn summarize(parts: &[Part]) {
    let not_run = parts.iter().filter(|p| p.figures.is_err()).count();
    let figures = parts.iter().filter_map(|p| p.figures.as_ref().ok()).flatten();
    let below = figures.clone().filter(|f| !f.meets_target()).count();
    println!(
        "\n{} figures, {below} below target, {not_run} parts not run",
        figures.count()
    );
}

/// Writes figures, page and plots. Figures of other parts are kept if only some were measured.
fn write_page(dir: &Path, mut measured: Measurement, keep_others: bool) -> Result<()> {
    let (plots, file) = (dir.join(PLOTS), dir.join(FIGURES));
    fs::create_dir_all(&plots).map_err(|e| format!("{}: {e}", plots.display()))?;
    if keep_others && file.exists() {
        measured = measured.merged_into(Measurement::read(&file)?);
    }
    measured.write(&file)?;
    measured.draw(dir)?;
    println!("wrote the page and its plots in {}", dir.display());
    Ok(())
}

fn measure(name: &str, programs: &link::Programs, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    let ferroce = &programs.ferroce;
    match name {
        "bulk" => transport::bulk(ferroce, args),
        "latency" => transport::latency(ferroce, args),
        "operations" => transport::operations(ferroce, args),
        "tcp" => tcp::tcp(ferroce, args),
        "sizes" => tcp::sizes(ferroce, args, scratch),
        "rds" => rds::rds(ferroce, args, scratch),
        "lnet" => lnet::lnet(ferroce, args),
        "shards" => {
            let mut figures = shards::engines(ferroce, args)?;
            figures.extend(shards::loops(ferroce, args, scratch)?);
            Ok(figures)
        }
        "scale" => transport::scale(ferroce, args),
        "block" => block(args),
        "programs" => transport::programs(args, scratch),
        "ack" => progress::acknowledgements(args, scratch),
        "one-sided" => progress::one_sided(args, scratch),
        "instructions" => inner::instructions(args, scratch),
        _ if !tools::may_make_namespaces() => Err("needs network namespaces: run it as root".into()),
        "rxe" => inner::rxe(args, scratch),
        "recovery" => link::recovery(programs, args, scratch),
        "loss" => {
            let mut figures = link::loss(programs, args)?;
            figures.extend(link::disk(programs, args, scratch)?);
            Ok(figures)
        }
        _ => link::sharing(programs, args, scratch),
    }
}

/// Measures the most significant loads of `cargo xtask bench block`.
fn block(args: &PageArgs) -> Result<Vec<Figure>> {
    let only = [
        "4K randread, depth 1",
        "4K randread, depth 32",
        "4K randwrite, depth 32",
        "128K read",
        "128K write",
    ];
    let block = BlockArgs {
        rounds: args.rounds(),
        seconds: args.seconds(),
        size: 256,
        dir: PathBuf::from("/dev/shm"),
        only: only.map(str::to_owned).to_vec(),
        json: None,
    };
    let mut figures = Vec::new();
    for (load, unit, rates) in super::block_rates(&block)? {
        let mut columns = Columns::default();
        for (chain, values) in rates {
            values.iter().for_each(|v| columns.add(chain, *v));
        }
        let figure = columns.figure(&load, unit, "ferroce", "two hops", Target::AtLeast(1.0));
        figures.push(Figure {
            reference: Series {
                name: "nbdkit, two hops".into(),
                ..figure.reference
            },
            ..figure
        });
    }
    Ok(figures)
}

/// Prints the figures of a part.
fn print(part: &Part) {
    match &part.figures {
        Err(reason) => println!("  not run: {reason}"),
        Ok(figures) => figures.iter().for_each(|f| {
            let (ours, other, ratio) = (Spread::of(&f.ferroce), Spread::of(&f.reference.values), f.ratio());
            let verdict = if f.meets_target() { "" } else { "  (below target)" };
            let target = f.target.text();
            let target = if target.is_empty() {
                target
            } else {
                format!(", target: {target}")
            };
            println!(
                "  {:<36} {:>9.3} {}  {}: {:.3}  ratio {:.2} ({:.2} to {:.2}){target}{verdict}",
                f.name, ours.median, f.unit, f.reference.name, other.median, ratio.median, ratio.least, ratio.most
            );
        }),
    }
}

/// Returns the circumstances of a measurement on this machine now.
fn environment(args: &PageArgs) -> Environment {
    let line = |program: &str, args: &[&str]| {
        let output = process::capture(
            program,
            Command::new(program).args(args).current_dir(cargo::workspace_root()),
        );
        output.map_or_else(
            |_| String::new(),
            |o| String::from_utf8_lossy(&o.stdout).trim().to_owned(),
        )
    };
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .unwrap_or_default();
    Environment {
        commit: line("git", &["rev-parse", "--short=12", "HEAD"]),
        date: line("date", &["-u", "+%Y-%m-%d"]),
        kernel: line("uname", &["-sr"]),
        processor: model.trim_start_matches(['\t', ' ', ':']).to_owned(),
        processors: std::thread::available_parallelism().map_or(0, usize::from),
        rounds: args.rounds(),
        seconds: args.seconds(),
    }
}
