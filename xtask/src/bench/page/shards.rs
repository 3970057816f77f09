//! Several engines of a device, and several loops: one flow must not lose by them, and several have to gain.

use std::path::Path;

use super::{
    PageArgs,
    figure::{Columns, Figure, Target},
    transport::{Row, rounds},
};
use crate::{
    Result,
    bench::{MIB, NEEDED, fill, load::run_fio},
    peers::Ferroce,
    tools,
};

/// One flow with two of them, at least so much of one flow with one.
const ONE_FLOW: Target = Target::AtLeast(0.9);
const TWO_FLOWS: Target = Target::AtLeast(1.0);

/// Engines of a program's device, on both sides.
pub(super) fn engines(ferroce: &Path, args: &PageArgs) -> Result<Vec<Figure>> {
    let small: [Row; 4] = [
        ("1 thread, 1 engine", "write", &["-s", "64", "-d", "64"]),
        (
            "1 thread, 2 engines",
            "write",
            &["-s", "64", "-d", "64", "--shards", "2"],
        ),
        (
            "2 threads, 1 engine",
            "write",
            &["-s", "64", "-d", "64", "--threads", "2"],
        ),
        (
            "2 threads, 2 engines",
            "write",
            &["-s", "64", "-d", "64", "--threads", "2", "--shards", "2"],
        ),
    ];
    let large: [Row; 4] = [
        ("1 thread, 1 engine", "write", &[]),
        ("1 thread, 2 engines", "write", &["--shards", "2"]),
        ("2 threads, 1 engine", "write", &["--threads", "2"]),
        ("2 threads, 2 engines", "write", &["--threads", "2", "--shards", "2"]),
    ];
    let mut figures = Vec::new();
    for (name, unit, rows, pointer, scale) in [
        ("64 B WRITE", "M/s", small, "/msgs_per_s", 1e6),
        ("1 MiB WRITE", "GB/s", large, "/gbytes_per_s", 1.0),
    ] {
        let columns = rounds(ferroce, args, &rows, pointer, scale)?;
        for ([ours, reference], target) in [
            (["1 thread, 2 engines", "1 thread, 1 engine"], ONE_FLOW),
            (["2 threads, 2 engines", "2 threads, 1 engine"], TWO_FLOWS),
        ] {
            figures.push(columns.figure(&format!("{name}, {ours}"), unit, ours, reference, target));
        }
    }
    Ok(figures)
}

/// `ferroce serve` with so many loops, and as many mappings.
struct Chain {
    sockets: Vec<String>,
    processes: Vec<Ferroce>,
}

impl Chain {
    fn start(ferroce: &Path, image: &Path, scratch: &Path, loops: usize) -> Result<Self> {
        let server = format!("127.0.7.{loops}0");
        let threads = loops.to_string();
        let [a, b] = ["a", "b"].map(|name| format!("{name}={},ro", image.display()));
        let serve = ["serve", "--json", "--threads", &threads, "--addr", &server];
        let serve = [&serve[..], &["--export", &a, "--export", &b]].concat();
        let mut serve = Ferroce::start("ferroce serve", ferroce, &serve)?;
        serve.wait_for("listening")?;
        let (mut sockets, mut processes) = (Vec::new(), vec![serve]);
        for mapping in 1..=loops {
            let session = format!("loops{loops}-{mapping}");
            let socket = scratch.join(format!("{session}.sock"));
            let (path, socket) = (format!("127.0.7.{loops}{mapping},{server}"), socket.to_string_lossy());
            let map = [
                "map",
                "--json",
                "--session",
                &session,
                "--path",
                &path,
                "--nbd",
                &socket,
            ];
            let map = [&map[..], &["--device", "a,ro", "--device", "b,ro"]].concat();
            let mut map = Ferroce::start("ferroce map", ferroce, &map)?;
            map.wait_for("mapped")?;
            sockets.push(socket.into_owned());
            processes.push(map);
        }
        Ok(Self { sockets, processes })
    }

    /// Thousands of 4 KiB reads a second, 32 outstanding on each of these devices.
    fn reads(&mut self, devices: &[&str], seconds: f64) -> Result<f64> {
        let ways = devices.iter().zip(self.sockets.iter().cycle());
        let uris = ways.map(|(device, socket)| format!("nbd+unix:///{device}?socket={socket}"));
        let uris: Vec<String> = uris.collect();
        let uris: Vec<&str> = uris.iter().map(String::as_str).collect();
        let got = run_fio(&uris, "randread", 4 << 10, 32, seconds)?;
        self.processes.iter_mut().try_for_each(Ferroce::check)?;
        Ok(got.requests / got.seconds / 1e3)
    }
}

/// Loops of `ferroce serve` with a mapping each, and one NBD client or two.
pub(super) fn loops(ferroce: &Path, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&NEEDED)?;
    let image = scratch.join("loops.img");
    fill(&image, 64 * MIB)?;
    let chain = |loops| Chain::start(ferroce, &image, scratch, loops);
    let mut chains = [("1 loop", chain(1)?), ("2 loops", chain(2)?)];
    let clients = [
        ("1 client", &["a"][..], ONE_FLOW),
        ("2 clients", &["a", "b"][..], TWO_FLOWS),
    ];
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        for (name, devices, _) in &clients {
            for (loops, chain) in &mut chains {
                columns.add(&format!("{name}, {loops}"), chain.reads(devices, args.seconds())?);
            }
        }
    }
    let figure = |(name, _, target): (&str, &[&str], Target)| {
        let [ours, reference] = ["2 loops", "1 loop"].map(|loops| format!("{name}, {loops}"));
        columns.figure(&format!("RNBD, 4 KiB reads, {ours}"), "k/s", &ours, &reference, target)
    };
    Ok(clients.map(figure).into())
}
