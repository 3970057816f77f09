//! `cargo xtask bench`: the page of benchmarks, BENCHMARKS.md with its plots.

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

/// Of the JSON. It changes when a reader would have to.
const SCHEMA: u32 = 1;
const PAGE: &str = "BENCHMARKS.md";
const PLOTS: &str = "docs/bench";
/// What was found out about figures that are not as they should be, written by hand.
const NOTES: &str = "docs/bench/notes.md";

#[derive(Args)]
pub(crate) struct PageArgs {
    /// Two rounds and short measurements: to see that all of it works. Writes no page unless --page is given
    #[arg(long)]
    pub(super) quick: bool,
    /// Each figure is the median of so many rounds [default: 5; with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Seconds of each measurement [default: 2; with --quick 0.5]
    #[arg(long, value_parser = seconds)]
    seconds: Option<f64>,
    /// Only parts with this name; several times: these. They are bulk, latency, ack, one-sided, programs, operations, tcp,
    /// loss, sharing, scale, shards, block, rxe and instructions
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// Write all figures of all rounds to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Folder to write BENCHMARKS.md and docs/bench into [default: this repository, if all is measured at full length]
    #[arg(long, value_name = "DIR")]
    page: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<f64> {
    let value: f64 = text.parse().map_err(|e| format!("{e}"))?;
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err("more than nothing".into()),
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

    /// Where the page goes, if anywhere.
    fn target(&self) -> Option<PathBuf> {
        let whole = !self.quick && self.only.is_empty();
        self.page.clone().or_else(|| whole.then(cargo::workspace_root))
    }
}

/// What is measured: name, title and description of each part.
const PARTS: [(&str, &str, &str); 14] = [
    (
        "bulk",
        "Bandwidth",
        "1 MiB operations on loopback, both sides in one process, beside the ceiling: the same packets through the same sockets, with \
         ICRC and copies but without a protocol (`ferroce bench`).",
    ),
    (
        "latency",
        "Latency",
        "Round trips of 64 bytes on loopback, both sides polling, beside a bare UDP ping-pong of the same size (`ferroce bench latency`); \
         and both sides waiting for events, beside one that sleeps in epoll: ours
         looks for packets for up to 50 us, as long as that pays, before it sleeps. Less is better.",
    ),
    (
        "ack",
        "Acknowledgements while computing",
        "A process under `ferroce run` polls, receives a SEND of 64 bytes, and computes for the given time before it answers and polls again. \
         Measured is the time until the SEND completes at its peer, compared with the time that the machine takes to wake a thread: a UDP echo \
         by a thread of the same process that sleeps in epoll. 99th percentiles are compared with the echo's plus 50 us. Less is better.",
    ),
    (
        "one-sided",
        "One-sided operations to a computing target",
        "WRITEs and READs of 64 bytes to a process under `ferroce run` that polled an empty completion queue 500 times and then computes for \
         3 ms, compared with the same UDP echo. And READs to a process that polled 20 times and then sleeps: with a queue pair in an \
         RNR wait, compared with none. 99th percentiles are compared with the other's plus 200 us. Less is better.",
    ),
    (
        "programs",
        "Unmodified programs",
        "perftest under `ferroce run`, 64 bytes, and 1 MiB with 16 outstanding, on loopback, beside `ferroce bench` in two processes. \
         Half a round trip, of which less is better, and bandwidth.",
    ),
    (
        "operations",
        "Operations by size and depth",
        "Millions of operations per second of one queue pair on loopback. Beside most of them is the ceiling for messages of that size.",
    ),
    (
        "tcp",
        "UCX and libfabric over TCP",
        "On loopback: 1 MiB WRITEs beside `ucx_perftest -t ucp_put_bw` with `UCX_TLS=tcp`, and SENDs back and forth beside `fi_pingpong -p tcp`, \
         of which less is better.",
    ),
    (
        "loss",
        "Loss",
        "Goodput of 1 MiB WRITEs, and of READs at 2 ms, between two network namespaces on a link of 2 Gb/s with a queue of 2 MB that loses packets at random \
         (`ferroce-wire`), beside that without loss; packets that were sent again beside those that were lost. And `ferroce map \
         --nbd` on one of 5 Gb/s beside nbdkit over TCP, to which fio speaks itself, and behind a second nbdkit, which is a chain like \
         ours.",
    ),
    (
        "sharing",
        "Sharing a link",
        "The same link without random losses. The slower of two of ours beside the faster, and one of ours beside what it and a TCP flow \
         (iperf3, the kernel's default congestion control) get together.",
    ),
    (
        "scale",
        "Queue pairs",
        "64-byte WRITEs with 512 outstanding in all, on so many queue pairs, beside one queue pair; and on 64 of 10,000 that are connected. And what one \
         of these takes, with its connection.",
    ),
    (
        "shards",
        "Engines and loops",
        "On loopback, both ends of a kind. Two engines of a program's device beside one, by one thread and by two with a queue pair and a \
         completion queue each, 64 outstanding, or 16 of 1 MiB (`ferroce bench --shards --threads`). And two loops of `ferroce map --nbd` and `ferroce serve` beside one, with 32 reads \
         outstanding of each client.",
    ),
    (
        "block",
        "Block device",
        "`ferroce map --nbd` in front of `ferroce serve` beside nbdkit over TCP in two hops, a chain like ours (`cargo xtask bench block` \
         has more of it).",
    ),
    (
        "rxe",
        "rdma_rxe",
        "perftest between two virtual machines with one processor each (emulated: compare nothing here with what is above), over \
         the kernel's rdma_rxe and over ours under `ferroce run`; the client first (`cargo xtask interop speed`). Packets are lost in both \
         directions.",
    ),
    (
        "instructions",
        "Instructions",
        "What both ends take together, without sockets, under callgrind: of an operation with 16 outstanding, and of a packet with its \
         part of the acknowledgements. Beside it two copies of the payload and two ICRCs.",
    ),
];

/// Measures all parts and writes what came of it.
pub(super) fn run(args: &PageArgs) -> Result<()> {
    let unknown = args.only.iter().find(|o| PARTS.iter().all(|(name, ..)| name != o));
    if let Some(unknown) = unknown {
        let names = PARTS.map(|(name, ..)| name).join(", ");
        return Err(format!("no part is called {unknown}; there are: {names}"));
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
        tell(&part);
        parts.push(part);
    }
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&to_json(args, &parts)).map_err(|e| e.to_string())?;
        fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    if let Some(dir) = args.target() {
        write_page(&dir, args, &parts)?;
        println!("\n{} and its plots are written", dir.join(PAGE).display());
    }
    let not_run = parts.iter().filter(|p| p.figures.is_err()).count();
    let figures = parts.iter().filter_map(|p| p.figures.as_ref().ok()).flatten();
    let missed = figures.clone().filter(|f| !f.is_reached()).count();
    println!(
        "\n{} figures, {missed} not as meant, {not_run} parts not run",
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

/// The loads of `cargo xtask bench block` that tell most.
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

fn tell(part: &Part) {
    match &part.figures {
        Err(reason) => println!("  not run: {reason}"),
        Ok(figures) => figures.iter().for_each(|f| {
            let (ours, other, ratio) = (Spread::of(&f.ours), Spread::of(&f.beside.values), f.ratio());
            let verdict = if f.is_reached() { "" } else { "  (missed)" };
            let aim = f.aim.text();
            let aim = if aim.is_empty() { aim } else { format!(", meant: {aim}") };
            println!(
                "  {:<36} {:>9.3} {}  {}: {:.3}  ratio {:.2} ({:.2} to {:.2}){aim}{verdict}",
                f.name, ours.median, f.unit, f.beside.name, other.median, ratio.median, ratio.least, ratio.most
            );
        }),
    }
}

/// The machine and the commit.
fn surroundings() -> Value {
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
        "surroundings": surroundings(),
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
    let text = markdown(&surroundings(), (args.rounds(), args.seconds()), parts, &notes);
    fs::write(&page, text).map_err(|e| format!("{}: {e}", page.display()))
}

fn markdown(at: &Value, (rounds, seconds): (u32, f64), parts: &[Part], notes: &str) -> String {
    let mut page = String::new();
    let of = |key: &str| at[key].as_str().unwrap_or_default().to_owned();
    let _ = write!(
        page,
        "# Benchmarks\n\nWritten by `cargo xtask bench` on {} at commit {}: {} ({} processors), {}. Machines and their load differ, so each \
         figure is beside another that was measured in the same rounds, in turns: {rounds} rounds of {seconds} s. A ratio is the median \
         of those of the rounds, with the least and the most.\n",
        of("date"),
        of("commit"),
        of("processor"),
        at["processors"],
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
            "\n![{title}]({PLOTS}/{name}.svg)\n\n| | ours | beside it | | ratio | meant |\n| --- | --: | --- | --: | --: | --- |\n"
        );
        for f in figures {
            let (ours, other, ratio) = (Spread::of(&f.ours), Spread::of(&f.beside.values), f.ratio());
            let missed = if f.is_reached() { "" } else { ", **missed**" };
            let _ = writeln!(
                page,
                "| {} | {:.3} {unit} | {} | {:.3} {unit} | {:.2} ({:.2} to {:.2}) | {}{missed} |",
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
    fn the_page_says_what_is_missed_and_what_was_not_run() {
        let text = markdown(
            &json!({ "commit": "abc", "processors": 2 }),
            (3, 1.0),
            &parts(),
            "## Notes\n",
        );
        assert!(
            text.contains(
                "| WRITE | 0.900 GB/s | ceiling | 1.000 GB/s | 0.80 (0.75 to 0.95) | at least 0.9, **missed** |"
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
