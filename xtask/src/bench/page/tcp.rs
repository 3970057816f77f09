//! Programs that bring their own transport, over TCP: UCX and libfabric.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use super::{
    PageArgs,
    figure::{Columns, Figure, Series, Target},
    link::{IPERF, iperf_goodput},
    transport::{bench, number},
};
use crate::{
    Result,
    process::{self, Guard},
    tools::{self, Tool},
};

const NEEDED: [Tool; 2] = [
    Tool::new("ucx_perftest", "ucx-utils"),
    Tool::new("fi_pingpong", "libfabric-bin"),
];
/// Of 1 MiB, for each second of a measurement.
const UCX_MESSAGES: f64 = 3000.0;

/// Bytes of libfabric's messages, as `ferroce bench` and people write it, and how many there are in a second of measuring.
const PINGS: [(&str, &str, f64); 2] = [("64", "64 B", 60_000.0), ("1048576", "1 MiB", 1500.0)];

/// UCX and libfabric over TCP on the same loopback.
pub(super) fn tcp(ferroce: &Path, args: &PageArgs) -> Result<Vec<Figure>> {
    tools::ensure(&NEEDED)?;
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        let lines = bench(ferroce, &["write"], args.seconds())?;
        columns.add("WRITE", number(&lines, "write", "/gbytes_per_s")?);
        columns.add("put_bw of UCX", ucx_put(args.seconds())?);
        for (bytes, name, per_second) in PINGS {
            let lines = bench(ferroce, &["latency", "--size", bytes], args.seconds())?;
            columns.add(&ours(name), number(&lines, "send_lat", "/latency_us/p50")? / 2.0);
            columns.add(&fabric(name), fabric_ping(bytes, per_second * args.seconds())?);
        }
    }
    let ping = |name: &str, target| columns.figure(&ours(name), "us", &ours(name), &fabric(name), target);
    let put = Target::AtLeast(1.3);
    Ok(vec![
        columns.figure("WRITE of 1 MiB", "GB/s", "WRITE", "put_bw of UCX", put),
        ping(PINGS[0].1, Target::None),
        ping(PINGS[1].1, Target::None),
    ])
}

/// Sizes of the plot over sizes: bytes, their name, and round trips of libfabric per second of measurement.
const SIZES: [(&str, &str, f64); 6] = [
    ("64", "64 B", 20_000.0),
    ("1024", "1 KiB", 20_000.0),
    ("4096", "4 KiB", 20_000.0),
    ("16384", "16 KiB", 10_000.0),
    ("65536", "64 KiB", 5000.0),
    ("1048576", "1 MiB", 500.0),
];

/// Bandwidth and latency by size: WRITEs and a ping-pong of SENDs, and the same over TCP (iperf3 and libfabric).
pub(super) fn sizes(ferroce: &Path, args: &PageArgs, scratch: &Path) -> Result<Vec<Figure>> {
    tools::ensure(&[NEEDED[1], IPERF])?;
    let report = scratch.join("sizes.json");
    let mut columns = Columns::default();
    for _ in 0..args.rounds() {
        for (bytes, size, per_second) in SIZES {
            let lines = bench(ferroce, &["write", "--size", bytes], args.seconds())?;
            columns.add(&format!("WRITE, {size}"), number(&lines, "write", "/gbytes_per_s")?);
            columns.add(&format!("iperf3, {size}"), iperf(bytes, args.seconds(), &report)?);
            let lines = bench(ferroce, &["latency", "--size", bytes], args.seconds())?;
            columns.add(&ours(size), number(&lines, "send_lat", "/latency_us/p50")? / 2.0);
            columns.add(&fabric(size), fabric_ping(bytes, per_second * args.seconds())?);
        }
    }
    let figure = |panel: &str, size: &str, unit, (ferroce, reference): (&str, &str)| {
        let compared = columns.figure("", unit, ferroce, reference, Target::None);
        Figure {
            name: format!("{panel}, {size}"),
            reference: Series {
                name: "TCP".into(),
                ..compared.reference
            },
            ..compared
        }
    };
    let latency = SIZES.map(|(_, size, _)| figure("latency", size, "us", (&ours(size), &fabric(size))));
    let bandwidth = |(_, size, _): (&str, &str, f64)| {
        let columns = (format!("WRITE, {size}"), format!("iperf3, {size}"));
        figure("bandwidth", size, "GB/s", (&columns.0, &columns.1))
    };
    Ok(latency.into_iter().chain(SIZES.map(bandwidth)).collect())
}

/// Bandwidth of iperf3 over loopback with writes of a size, GB/s.
fn iperf(bytes: &str, seconds: f64, report: &Path) -> Result<f64> {
    const PORT: &str = "15201";
    let mut server = process::command("iperf3");
    server.args(["-s", "-1", "-B", "127.0.0.1", "-p", PORT]);
    let mut client = process::command("iperf3");
    client.args([
        "-c",
        "127.0.0.1",
        "-p",
        PORT,
        "-l",
        bytes,
        "-J",
        "-t",
        &seconds.ceil().to_string(),
    ]);
    let text = against("iperf3", server, &mut client)?;
    std::fs::write(report, text).map_err(|e| format!("{}: {e}", report.display()))?;
    Ok(iperf_goodput(report)? / 1e3)
}

fn ours(size: &str) -> String {
    format!("SEND of {size}, half a round trip")
}

fn fabric(size: &str) -> String {
    format!("fi_pingpong, {size}")
}

/// Output of a program as the client of itself.
fn against(name: &str, mut server: Command, client: &mut Command) -> Result<String> {
    let mut server = Guard::spawn(name, server.stdout(Stdio::null()).stderr(Stdio::null()))?;
    // It does not report when it listens.
    std::thread::sleep(Duration::from_millis(500));
    let output = process::capture(name, client);
    server.stop()?;
    Ok(String::from_utf8_lossy(&output?.stdout).into_owned())
}

/// Microseconds that a message of libfabric's takes.
fn fabric_ping(bytes: &str, iterations: f64) -> Result<f64> {
    let iterations = iterations.ceil().to_string();
    let ping = || {
        let mut command = process::command("fi_pingpong");
        command.args(["-p", "tcp", "-e", "msg", "-I", &iterations, "-S", bytes]);
        command
    };
    let text = against("fi_pingpong", ping(), ping().arg("127.0.0.1"))?;
    fabric_time(&text).ok_or_else(|| format!("fi_pingpong printed no time: {text}"))
}

/// The last column but one of the last line.
fn fabric_time(text: &str) -> Option<f64> {
    let words: Vec<_> = text.lines().last()?.split_whitespace().collect();
    words.get(words.len().checked_sub(2)?)?.parse().ok()
}

fn ucx_put(seconds: f64) -> Result<f64> {
    let ucx = || {
        let mut command = process::command("ucx_perftest");
        command.env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", "lo").arg("-f");
        command
    };
    let messages = (UCX_MESSAGES * seconds).ceil().to_string();
    let mut client = ucx();
    client.args([
        "127.0.0.1",
        "-t",
        "ucp_put_bw",
        "-s",
        "1048576",
        "-w",
        "100",
        "-n",
        &messages,
    ]);
    let text = against("ucx_perftest", ucx(), &mut client)?;
    ucx_bandwidth(&text).ok_or_else(|| format!("ucx_perftest printed no bandwidth: {text}"))
}

/// The overall bandwidth, GB/s, of the last line of numbers: iterations, three latencies (or fewer), MB/s average and overall,
/// messages per second twice. UCX's MB are of 2^20 bytes.
fn ucx_bandwidth(text: &str) -> Option<f64> {
    let mut numbers = text.lines().filter_map(|line| {
        let words = line.split_whitespace().skip_while(|w| w.parse::<f64>().is_err());
        words.map(|w| w.parse::<f64>().ok()).collect::<Option<Vec<f64>>>()
    });
    let last = numbers.rfind(|n| n.len() >= 6)?;
    Some(last[last.len() - 3] * 1.048_576e-3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ucx_prints_its_bandwidth_in_the_last_line() {
        let text = "+--------------+\n|    Stage     |\nFinal:                  6000      0.000   412.301   412.301     2425.41    2425.41        2425        2425\n";
        let got = ucx_bandwidth(text).unwrap();
        assert!((got - 2.543).abs() < 0.001, "{got}");
        assert_eq!(ucx_bandwidth("nothing"), None);
    }

    #[test]
    fn libfabric_prints_the_time_of_a_message() {
        let text = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                    64      20k     =20k     2.4m        0.25s     10.41       6.15       0.16\n";
        assert_eq!(fabric_time(text), Some(6.15));
        assert_eq!(fabric_time("no\n"), None);
    }
}
