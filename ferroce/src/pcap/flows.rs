//! `ferroce pcap flows`.

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use roce_pcap::{
    Flow, FlowReport, Flows, Latency, UdpPort,
    judge::{Endpoint, Event, Observed, Stated},
};
use roce_verbs::shown;
use serde::Serialize;

use super::{
    stated,
    stream::{Stream, end},
    table,
};
use crate::output::{self, Failure};

/// Measure the flows of a capture: goodput, latency, retransmissions, NAKs, congestion
///
/// Prints a row for each direction of each connection: packets and payload that a queue pair sent, and the answers that its
/// requests got. GOODPUT is the payload of first transmissions over the time in which it was outstanding. ROUND TRIP is the
/// time from a request to its acknowledgement, READ from a READ to its last response; both leave out what was sent again,
/// and show minimum, median, 99th percentile and maximum. The capture's place decides what they measure: near the requester all of
/// network and responder, near the responder only the responder.
///
/// AGAIN counts requests and READ responses that were sent again, MISSING the PSNs that requests left out, SEQ NAK the NAKs for such
/// gaps, CNP the congestion notifications that the queue pair got, ECN its packets that experienced congestion.
///
/// Standard input may be a capture that is still being taken: the table follows at its end, or after ctrl-C.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce pcap flows trace.pcapng
  tcpdump -w - -U udp port 4791 | ferroce pcap flows -
  ferroce pcap flows --json trace.pcap | jq '.flows[] | select(.retransmissions > 0)'
  ferroce pcap flows --csv --per-frame trace.pcap > packets.csv

Exit status:
  0  done
  1  a file breaks off; what came before is printed
  2  a file can't be read, or wrong usage")]
pub(super) struct FlowsArgs {
    /// The captures; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print one JSON object per file, a line each
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print comma-separated values: a row for each flow
    #[arg(long)]
    csv: bool,
    /// With --csv, print a row for each packet instead; with --json, an object for each packet before that of the file
    ///
    /// Packets that belong to a connection: those of the connection manager have no row.
    #[arg(long)]
    per_frame: bool,
    /// Names two queue pairs whose connection the capture doesn't show
    ///
    /// As in `ferroce pcap check`.
    #[arg(long, value_name = "QP", value_parser = stated::parse)]
    qp: Vec<Stated>,
}

/// Runs the command.
pub(super) fn run(args: &FlowsArgs) -> Result<(), Failure> {
    if args.per_frame && !args.json && !args.csv {
        return Err(Failure::usage("--per-frame needs --csv or --json"));
    }
    let mut out = BufWriter::new(io::stdout().lock());
    if args.csv {
        let head = if args.per_frame { PACKET_COLUMNS } else { FLOW_COLUMNS };
        writeln!(out, "{head}")?;
    }
    let mut status = 0;
    for file in &args.files {
        let problem = match measure(args, file, &mut out)? {
            Measured::Whole => continue,
            Measured::BreaksOff(text) => {
                status = status.max(1);
                format!("{}: breaks off: {text}", shown(&file.display().to_string()))
            }
            Measured::Unreadable(text) => {
                status = 2;
                if args.json {
                    let unreadable = serde_json::json!({"file": file.display().to_string(), "error": &text});
                    writeln!(out, "{}", output::json_text(&unreadable))?;
                }
                text
            }
        };
        out.flush()?;
        let _ = writeln!(io::stderr(), "error: {problem}");
    }
    out.flush()?;
    match status {
        0 => Ok(()),
        status => Err(Failure::reported(status)),
    }
}

/// Result for a file.
enum Measured {
    Whole,
    BreaksOff(String),
    Unreadable(String),
}

/// Report on a file, as JSON.
#[derive(Serialize)]
struct FileFlows<'a> {
    file: &'a str,
    complete: bool,
    frames: u64,
    roce_packets: u64,
    /// Packets of connections that were too many to follow or count.
    packets_not_followed: u64,
    flows: &'a [Flow],
}

/// Measures a file, and prints.
fn measure(args: &FlowsArgs, file: &Path, out: &mut impl Write) -> Result<Measured, Failure> {
    let stream = match Stream::open(file)? {
        Ok(stream) => stream,
        Err(text) => return Ok(Measured::Unreadable(text)),
    };
    let name = file.display().to_string();
    let mut flows = Flows::new();
    let mut written = Ok(());
    let (checker, broken) = stream.follow(&args.qp, |event, observed| {
        flows.event(event);
        if args.per_frame && written.is_ok() {
            let packet = PacketRow::new(event, observed);
            written = match args.json {
                true => writeln!(out, "{}", output::json_text(&packet)),
                false => packet.print(out, &name),
            };
        }
    });
    written?;
    let FlowReport {
        flows,
        packets_left_out,
    } = flows.finish(checker.judge());
    let report = checker.finish();
    let file = FileFlows {
        file: &name,
        complete: broken.is_none(),
        frames: report.frames,
        roce_packets: report.roce_packets,
        packets_not_followed: report.packets_not_followed + packets_left_out,
        flows: &flows,
    };
    match (args.json, args.csv, args.per_frame) {
        (true, ..) => writeln!(out, "{}", output::json_text(&file))?,
        (_, true, true) => {}
        (_, true, false) => flows.iter().try_for_each(|flow| print_csv(out, &name, flow))?,
        _ => print_table(out, &file)?,
    }
    Ok(broken.map_or(Measured::Whole, Measured::BreaksOff))
}

fn print_table(out: &mut impl Write, file: &FileFlows<'_>) -> io::Result<()> {
    let head = [
        "#",
        "SERVICE",
        "FROM",
        "TO",
        "PACKETS",
        "BYTES",
        "MESSAGES",
        "GOODPUT",
        "ROUND TRIP min/p50/p99/max",
        "READ min/p50/p99/max",
        "AGAIN",
        "MISSING",
        "RNR NAK",
        "SEQ NAK",
        "CNP",
        "ECN",
        "UDP PORTS",
    ];
    let rows: Vec<_> = file.flows.iter().map(row).collect();
    table::print(out, head, &rows)?;
    write!(
        out,
        "{}: {} frames, {} RoCEv2 packets, {} flows",
        shown(file.file),
        file.frames,
        file.roce_packets,
        rows.len()
    )?;
    if file.packets_not_followed > 0 {
        write!(
            out,
            "; {} packets of too many connections are left out",
            file.packets_not_followed
        )?;
    }
    writeln!(out)
}

fn row(flow: &Flow) -> [String; 17] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    [
        flow.conversation.to_string(),
        match &flow.name {
            Some(name) => format!("{} {name}", flow.service),
            None => flow.service.to_owned(),
        },
        end(&flow.src),
        end(&flow.dst),
        flow.packets.to_string(),
        output::bytes(flow.bytes),
        flow.messages.to_string(),
        or_dash(flow.goodput_bits_per_s.map(bit_rate)),
        or_dash(flow.round_trip.as_ref().map(latency)),
        or_dash(flow.read_latency.as_ref().map(latency)),
        flow.retransmissions.to_string(),
        flow.skipped.to_string(),
        flow.rnr_naks.to_string(),
        flow.sequence_naks.to_string(),
        flow.cnps.to_string(),
        flow.ecn_marks.to_string(),
        ports(flow),
    ]
}

/// The first ports, with packets if there are several.
fn ports(flow: &Flow) -> String {
    let shown = match flow.udp_ports.as_slice() {
        [] => return "-".to_owned(),
        [only] if flow.other_ports_packets == 0 => return only.port.to_string(),
        ports => &ports[..ports.len().min(3)],
    };
    let text: Vec<_> = shown.iter().map(port).collect();
    match flow.udp_ports.len() - shown.len() {
        _ if flow.other_ports_packets > 0 => format!("{} and many more", text.join(" ")),
        0 => text.join(" "),
        more => format!("{} and {more} more", text.join(" ")),
    }
}

fn port(UdpPort { port, packets }: &UdpPort) -> String {
    format!("{port}:{packets}")
}

/// Minimum, median, 99th percentile and maximum.
fn latency(latency: &Latency) -> String {
    let Latency {
        min_ns,
        p50_ns,
        p99_ns,
        max_ns,
        ..
    } = *latency;
    [min_ns, p50_ns, p99_ns, max_ns].map(time).join("/")
}

/// Time with three digits: `12.3us`.
fn time(ns: u64) -> String {
    scaled(ns as f64, &[("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)])
}

/// Bits per second with three digits: `1.25Gbit/s`.
fn bit_rate(bits: u64) -> String {
    const UNITS: [(&str, f64); 4] = [("bit/s", 1.0), ("kbit/s", 1e3), ("Mbit/s", 1e6), ("Gbit/s", 1e9)];
    scaled(bits as f64, &UNITS)
}

/// Writes a value in the largest unit in which it is at least 1.
fn scaled(value: f64, units: &[(&str, f64)]) -> String {
    let fits = |(_, unit): &&(&str, f64)| value >= *unit;
    let (name, unit) = units.iter().rfind(fits).or(units.first()).copied().unwrap_or(("", 1.0));
    let value = value / unit;
    let digits = match value {
        _ if unit <= 1.0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{name}")
}

/// Names of the columns of [`print_csv`].
const FLOW_COLUMNS: &str = "file,conversation,service,name,src,src_qp,dst,dst_qp,first_ns,last_ns,packets,bytes,messages,\
    first_bytes,active_ns,goodput_bits_per_s,round_trip_count,round_trip_min_ns,round_trip_p50_ns,round_trip_p99_ns,\
    round_trip_max_ns,read_latency_count,read_latency_min_ns,read_latency_p50_ns,read_latency_p99_ns,read_latency_max_ns,\
    retransmissions,skipped,rnr_naks,sequence_naks,fatal_naks,cnps,ecn_marks,udp_ports,other_ports_packets";

fn print_csv(out: &mut impl Write, file: &str, flow: &Flow) -> io::Result<()> {
    let optional = |n: Option<u64>| n.map(|n| n.to_string()).unwrap_or_default();
    let qp = |end: &Endpoint| optional(end.qpn.map(u64::from));
    let latency = |latency: Option<Latency>| match latency {
        Some(l) => [l.count, l.min_ns, l.p50_ns, l.p99_ns, l.max_ns]
            .map(|n| n.to_string())
            .join(","),
        None => ",,,,".to_owned(),
    };
    let numbers = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    let fields = [
        field(file),
        flow.conversation.to_string(),
        flow.service.to_owned(),
        field(flow.name.as_deref().unwrap_or_default()),
        flow.src.addr.to_string(),
        qp(&flow.src),
        flow.dst.addr.to_string(),
        qp(&flow.dst),
        numbers(&flow.time_ns),
        numbers(&[
            flow.packets,
            flow.bytes,
            flow.messages,
            flow.first_bytes,
            flow.active_ns,
        ]),
        optional(flow.goodput_bits_per_s),
        latency(flow.round_trip),
        latency(flow.read_latency),
        numbers(&[flow.retransmissions, flow.skipped, flow.rnr_naks, flow.sequence_naks]),
        numbers(&[flow.fatal_naks, flow.cnps, flow.ecn_marks]),
        flow.udp_ports.iter().map(port).collect::<Vec<_>>().join(" "),
        flow.other_ports_packets.to_string(),
    ];
    writeln!(out, "{}", fields.join(","))
}

/// Quotes a field of comma-separated values (RFC 4180); a terminal is shown no control characters.
fn field(text: &str) -> String {
    let safe = if text.contains(char::is_control) {
        text.escape_debug().to_string()
    } else {
        text.to_owned()
    };
    match safe.contains([',', '"']) {
        true => format!("\"{}\"", safe.replace('"', "\"\"")),
        false => safe,
    }
}

/// Names of the columns of [`PacketRow::print`].
const PACKET_COLUMNS: &str = "file,frame,time_ns,src,dst,dest_qp,opcode,psn,bytes,kind,latency_ns";

/// Packet of a connection.
#[derive(Serialize)]
struct PacketRow {
    frame: u64,
    time_ns: u64,
    src: std::net::IpAddr,
    dst: std::net::IpAddr,
    dest_qp: u32,
    opcode: &'static str,
    psn: u32,
    bytes: usize,
    kind: &'static str,
    latency_ns: Option<u64>,
}

impl PacketRow {
    fn new(event: &Event, observed: &Observed<'_>) -> Self {
        let bth = &observed.header.bth;
        Self {
            frame: event.frame,
            time_ns: event.time_ns,
            src: event.src,
            dst: observed.meta.dst,
            dest_qp: bth.dest_qp.value(),
            opcode: bth.opcode.info().name,
            psn: bth.psn.value(),
            bytes: event.bytes,
            kind: event.kind.name(),
            latency_ns: event.kind.latency_ns(),
        }
    }

    fn print(&self, out: &mut impl Write, file: &str) -> io::Result<()> {
        write!(
            out,
            "{},{},{},{},{},",
            field(file),
            self.frame,
            self.time_ns,
            self.src,
            self.dst
        )?;
        write!(
            out,
            "{},{},{},{},{},",
            self.dest_qp, self.opcode, self.psn, self.bytes, self.kind
        )?;
        writeln!(out, "{}", self.latency_ns.map(|n| n.to_string()).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_three_digits_and_the_unit_that_fits() {
        let times = [0, 999, 1000, 12_340, 123_400, 999_600, 1_234_567, 2_000_000_000];
        assert_eq!(
            times.map(time),
            ["0ns", "999ns", "1.00us", "12.3us", "123us", "1000us", "1.23ms", "2.00s"]
        );
        assert_eq!(bit_rate(1_250_000_000), "1.25Gbit/s");
        assert_eq!(bit_rate(0), "0bit/s");
    }

    #[test]
    fn fields_are_quoted_where_they_must_be() {
        assert_eq!(field("a b"), "a b");
        assert_eq!(field("a,\"b\""), "\"a,\"\"b\"\"\"");
        assert_eq!(field("a\u{1b}[2J\n"), "a\\u{1b}[2J\\n");
    }
}
