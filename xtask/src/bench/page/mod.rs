//! `cargo xtask bench`: measures all benchmarks and writes BENCHMARKS.md with its plots.

mod figure;
mod inner;
mod link;
mod plot;
mod progress;
mod shards;
mod tcp;
mod transport;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;
use serde_json::{Value, json};

use super::{BlockArgs, Scratch};
use crate::{
    Result,
    cargo::{self, Profile},
    process, tools,
};
use figure::{Aim, Columns, Figure, Part, Spread};

/// Version of the JSON schema. Incremented by changes that break readers.
const SCHEMA: u32 = 1;
const PAGE: &str = "BENCHMARKS.md";
const PLOTS: &str = "docs/bench";
/// Handwritten notes on the figures below target.
const NOTES: &str = "docs/bench/notes.md";

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
    /// Measure only this part; may be repeated. Parts: bulk, latency, ack, one-sided, programs, operations, tcp, loss,
    /// sharing, scale, shards, block, rxe, instructions
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// Write the figures of all rounds to a JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Directory of BENCHMARKS.md and docs/bench [default: this repository, if all parts are measured without --quick]
    #[arg(long, value_name = "DIR")]
    page: Option<PathBuf>,
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

/// Name, title and description of each part.
const PARTS: [(&str, &str, &str); 14] = [
    (
        "bulk",
        "Bandwidth",
        "1 MiB operations on loopback, both sides in one process, compared with the ceiling: the same packets through \
         the same sockets, with ICRC and copies but without a protocol (`ferroce bench`).",
    ),
    (
        "latency",
        "Latency",
        "Round trips of 64 bytes on loopback. Both sides polling are compared with a raw UDP ping-pong of the same \
         size (`ferroce bench latency`), and both sides waiting for events with one that sleeps in epoll. Before it \
         sleeps, ferroce polls for up to 50 us as long as that finds packets. Less is better.",
    ),
    (
        "ack",
        "Acknowledgements while computing",
        "A process under `ferroce run` polls, receives a SEND of 64 bytes, and computes for the given time before it \
         answers and polls again. The time until the SEND completes at its peer is compared with the time to wake a \
         thread: a UDP echo by a thread of the same process that sleeps in epoll. The 99th percentile is compared \
         with the echo's plus 50 us. Less is better.",
    ),
    (
        "one-sided",
        "One-sided operations to a computing target",
        "WRITEs and READs of 64 bytes to a process under `ferroce run` that polled an empty completion queue 500 \
         times and then computes for 3 ms, compared with the same UDP echo. READs to a process that polled 20 times \
         and then sleeps: with a queue pair in an RNR wait, compared with none. The 99th percentile is compared with \
         the other's plus 200 us. Less is better.",
    ),
    (
        "programs",
        "Unmodified programs",
        "perftest under `ferroce run`, 64 bytes, and 1 MiB with 16 outstanding, on loopback, compared with `ferroce \
         bench` in two processes. Half a round trip, of which less is better, and bandwidth.",
    ),
    (
        "operations",
        "Operations by size and depth",
        "Millions of operations per second of one queue pair on loopback. Most are compared with the ceiling for \
         messages of that size.",
    ),
    (
        "tcp",
        "UCX and libfabric over TCP",
        "On loopback: 1 MiB WRITEs compared with `ucx_perftest -t ucp_put_bw` with `UCX_TLS=tcp`, and a ping-pong of \
         SENDs compared with `fi_pingpong -p tcp`, of which less is better.",
    ),
    (
        "loss",
        "Loss",
        "Goodput of 1 MiB WRITEs, and of READs at 2 ms, between two network namespaces on a link of 2 Gb/s with a \
         queue of 2 MB and random loss (`ferroce-wire`), compared with the link without loss; retransmitted packets \
         compared with lost ones. `ferroce map --nbd` on a link of 5 Gb/s compared with nbdkit over TCP: with fio as \
         its client, and behind a second nbdkit, which is the same number of hops as ferroce's.",
    ),
    (
        "sharing",
        "Sharing a link",
        "The same link without random loss. The slower of two ferroce flows compared with the faster, and one ferroce \
         flow compared with the sum of it and a TCP flow (iperf3, the kernel's default congestion control).",
    ),
    (
        "scale",
        "Queue pairs",
        "64-byte WRITEs with 512 outstanding in all, on several queue pairs, compared with one queue pair; and on 64 \
         of 10,000 connected ones. Memory of one of these with its connection.",
    ),
    (
        "shards",
        "Engines and loops",
        "On loopback, with both sides alike. Two engines of a device compared with one, driven by one thread and by \
         two with a queue pair and a completion queue each, 64 outstanding, or 16 of 1 MiB (`ferroce bench --shards \
         --threads`). Two loops of `ferroce map --nbd` and `ferroce serve` compared with one, with 32 outstanding \
         reads of each client.",
    ),
    (
        "block",
        "Block device",
        "`ferroce map --nbd` in front of `ferroce serve` compared with nbdkit over TCP in two hops, the same number \
         (`cargo xtask bench block` measures more loads).",
    ),
    (
        "rxe",
        "rdma_rxe",
        "perftest between two emulated virtual machines with one processor each: don't compare with the parts above. \
         Over the kernel's rdma_rxe and over ferroce under `ferroce run`; the client is named first (`cargo xtask \
         interop speed`). Packets are lost in both directions.",
    ),
    (
        "instructions",
        "Instructions",
        "Instructions of both sides together, without sockets, under callgrind: per operation with 16 outstanding, \
         and per packet with its share of the acknowledgements. Compared with two copies of the payload and two \
         ICRCs.",
    ),
];

/// Measures the selected parts, prints the figures and writes the page.
pub(super) fn run(args: &PageArgs) -> Result<()> {
    let unknown = args.only.iter().find(|o| PARTS.iter().all(|(name, ..)| name != o));
    if let Some(unknown) = unknown {
        let names = PARTS.map(|(name, ..)| name).join(", ");
        return Err(format!("unknown part {unknown}: expected one of {names}"));
    }
    let programs = link::Programs {
        ferroce: cargo::build("ferroce", "ferroce", Profile::Release)?,
        wire: cargo::build("ferroce-wire", "ferroce-wire", Profile::Release)?,
    };
    let scratch = Scratch::new(&std::env::temp_dir())?;
    let mut parts = Vec::new();
    for (name, title, about) in PARTS {
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
            figures,
        };
        print(&part);
        parts.push(part);
    }
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&to_json(args, &parts)).map_err(|e| e.to_string())?;
        fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    if let Some(dir) = args.target() {
        write_page(&dir, args, &parts)?;
        println!("\nwrote {} and its plots", dir.join(PAGE).display());
    }
    let not_run = parts.iter().filter(|p| p.figures.is_err()).count();
    let figures = parts.iter().filter_map(|p| p.figures.as_ref().ok()).flatten();
    let below = figures.clone().filter(|f| !f.is_reached()).count();
    println!(
        "\n{} figures, {below} below target, {not_run} parts not run",
        figures.count()
    );
    Ok(())
}

fn measure(name: &str, programs: &link::Programs, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    let ferroce = &programs.ferroce;
    match name {
        "bulk" => transport::bulk(ferroce, args),
        "latency" => transport::latency(ferroce, args),
        "operations" => transport::operations(ferroce, args),
        "tcp" => tcp::tcp(ferroce, args),
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
        figures.push(Figure {
            name: load.clone(),
            ..columns.figure("", unit, "ferroce", "two hops", Aim::AtLeast(1.0))
        });
    }
    Ok(figures)
}

/// Prints the figures of a part.
fn print(part: &Part) {
    match &part.figures {
        Err(reason) => println!("  not run: {reason}"),
        Ok(figures) => figures.iter().for_each(|f| {
            let (ours, other, ratio) = (Spread::of(&f.ours), Spread::of(&f.beside.values), f.ratio());
            let verdict = if f.is_reached() { "" } else { "  (below target)" };
            let target = f.aim.text();
            let target = if target.is_empty() {
                target
            } else {
                format!(", target: {target}")
            };
            println!(
                "  {:<36} {:>9.3} {}  {}: {:.3}  ratio {:.2} ({:.2} to {:.2}){target}{verdict}",
                f.name, ours.median, f.unit, f.beside.name, other.median, ratio.median, ratio.least, ratio.most
            );
        }),
    }
}

/// Returns commit, date, kernel and processor of the measurement.
fn environment() -> Value {
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
    json!({
        "commit": line("git", &["rev-parse", "--short=12", "HEAD"]),
        "date": line("date", &["-u", "+%Y-%m-%d"]),
        "kernel": line("uname", &["-sr"]),
        "processor": model.trim_start_matches(['\t', ' ', ':']),
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
    })
}

fn to_json(args: &PageArgs, parts: &[Part]) -> Value {
    let part = |p: &Part| match &p.figures {
        Ok(figures) => json!({
            "name": p.name,
            "figures": figures.iter().map(Figure::to_json).collect::<Vec<_>>(),
        }),
        Err(reason) => json!({ "name": p.name, "not_run": reason }),
    };
    json!({
        "schema": SCHEMA,
        "surroundings": environment(),
        "rounds": args.rounds(),
        "seconds": args.seconds(),
        "parts": parts.iter().map(part).collect::<Vec<_>>(),
    })
}

fn write_page(dir: &Path, args: &PageArgs, parts: &[Part]) -> Result<()> {
    let plots = dir.join(PLOTS);
    fs::create_dir_all(&plots).map_err(|e| format!("{}: {e}", plots.display()))?;
    for part in parts.iter().filter(|p| p.figures.is_ok()) {
        plot::draw(part, &plots.join(format!("{}.svg", part.name)))?;
    }
    let notes = fs::read_to_string(cargo::workspace_root().join(NOTES)).unwrap_or_default();
    let page = dir.join(PAGE);
    let text = markdown(&environment(), (args.rounds(), args.seconds()), parts, &notes);
    fs::write(&page, text).map_err(|e| format!("{}: {e}", page.display()))
}

fn markdown(environment: &Value, (rounds, seconds): (u32, f64), parts: &[Part], notes: &str) -> String {
    let mut page = String::new();
    let of = |key: &str| environment[key].as_str().unwrap_or_default().to_owned();
    let _ = write!(
        page,
        "# Benchmarks\n\nWritten by `cargo xtask bench` on {} at commit {}: {} ({} processors), {}. Machines and their \
         load differ, so each figure is compared with another one measured alternately: {rounds} rounds of {seconds} s. \
         A ratio is the median over the rounds, with minimum and maximum.\n",
        of("date"),
        of("commit"),
        of("processor"),
        environment["processors"],
        of("kernel"),
    );
    for part in parts {
        let _ = write!(page, "\n## {}\n\n{}\n", part.title, part.about);
        let figures = match &part.figures {
            Err(reason) => {
                let _ = write!(page, "\nnot run: {}\n", reason.lines().next().unwrap_or_default());
                continue;
            }
            Ok(figures) => figures,
        };
        let (name, title) = (part.name, part.title);
        let _ = write!(
            page,
            "\n![{title}]({PLOTS}/{name}.svg)\n\n| | ferroce | compared with | | ratio | target |\n\
             | --- | --: | --- | --: | --: | --- |\n"
        );
        for f in figures {
            let (ours, other, ratio) = (Spread::of(&f.ours), Spread::of(&f.beside.values), f.ratio());
            let verdict = if f.is_reached() { "" } else { ", **below target**" };
            let _ = writeln!(
                page,
                "| {} | {:.3} {unit} | {} | {:.3} {unit} | {:.2} ({:.2} to {:.2}) | {}{verdict} |",
                f.name,
                ours.median,
                f.beside.name,
                other.median,
                ratio.median,
                ratio.least,
                ratio.most,
                f.aim.text(),
                unit = f.unit,
            );
        }
    }
    if !notes.trim().is_empty() {
        let _ = write!(page, "\n{}\n", notes.trim());
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Vec<Part> {
        let mut columns = Columns::default();
        for (ours, other) in [(0.8, 1.0), (0.95, 1.0), (0.9, 1.2)] {
            columns.add("WRITE", ours);
            columns.add("ceiling", other);
        }
        let figures = Ok(vec![columns.figure(
            "WRITE",
            "GB/s",
            "WRITE",
            "ceiling",
            Aim::AtLeast(0.9),
        )]);
        let (name, title, about) = PARTS[0];
        let not_run = Part {
            name: "loss",
            title: "Loss",
            about: "",
            figures: Err("needs root".into()),
        };
        vec![
            Part {
                name,
                title,
                about,
                figures,
            },
            not_run,
        ]
    }

    #[test]
    fn the_page_marks_figures_below_target_and_parts_not_run() {
        let text = markdown(
            &json!({ "commit": "abc", "processors": 2 }),
            (3, 1.0),
            &parts(),
            "## Notes\n",
        );
        assert!(
            text.contains(
                "| WRITE | 0.900 GB/s | ceiling | 1.000 GB/s | 0.80 (0.75 to 0.95) | at least 0.9, **below target** |"
            ),
            "{text}"
        );
        assert!(text.contains("not run: needs root") && text.contains("docs/bench/bulk.svg"));
        assert!(text.ends_with("## Notes\n"));
    }

    #[test]
    fn plots_have_a_bar_for_each_figure() {
        let dir = Scratch::new(&std::env::temp_dir()).unwrap();
        let file = dir.0.join("bulk.svg");
        plot::draw(&parts()[0], &file).unwrap();
        let svg = fs::read_to_string(file).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("WRITE / ceiling"), "{svg}");
    }
}
