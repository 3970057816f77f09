//! `ferroce pcap replay`.

use std::{
    io::{self, BufWriter, Write},
    net::IpAddr,
    path::PathBuf,
};

use clap::Args;
use roce_pcap::judge::{Endpoint, Stated};
use roce_replay::{Connection, Difference, Settings, play};
use roce_verbs::shown;
use serde::Serialize;

use super::{source::Source, stated, stream::end};
use crate::output::{self, Failure};

/// Differences that are printed of a side without --all.
const PRINTED: usize = 20;
/// Path MTU where every message fits into a packet, so that no packet shows it.
const UNKNOWN_MTU: usize = 4096;

/// Replay the connections of a capture on ferroce's transport, and compare what it sends
///
/// Takes the place of each side of each reliable connection in turn: the transport gets what that side got, when it got it, and must
/// send what that side sent, bit for bit. Prints a line for each side, and for a difference the frame, what the captured
/// side sent, and what ours did. So a capture of two other implementations shows where ferroce's behaves differently, and one of
/// ferroce whether this version still does the same.
///
/// As the responder, ours has memory with the bytes that the capture shows, and a receive for each message that took one. As
/// the requester, it has work requests like those that the capture shows, and sends when the captured side did; its timers run out
/// when the captured side repeats itself.
///
/// Differences that the specification permits are choices: which packets ask for an acknowledgement,
/// which acknowledgements are merged, how much is repeated, credits, the migration bit. Choices are counted; --all prints
/// them.
///
/// Both directions of a connection are needed, with whole packets and without gaps. A side that can't be replayed has a line
/// with the reason. A capture may begin in the middle of a connection: messages that began before are left out. What was lost between
/// capture and a host makes that host's side differ: if packets were lost, name the host where the capture was taken with --side.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce pcap replay trace.pcapng
  ferroce pcap replay --all --side 10.0.0.1 trace.pcap
  ferroce pcap replay --json trace.pcap | jq '.connections[].sides[] | select(.verdict == \"differs\")'
  ferroce pcap replay --qp 10.0.0.1:0x12=peer:10.0.0.2:0x15,mtu:1024 trace.pcap

Exit status:
  0  everything that was replayed is the same
  1  a side differs, or the file breaks off
  2  the file can't be read, or wrong usage
  3  nothing could be replayed")]
pub(super) struct ReplayArgs {
    /// The capture; `-` is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print all differences, choices too, instead of the first 20 of each side
    #[arg(long)]
    all: bool,
    /// Print one JSON object, with all differences and choices
    #[arg(long, conflicts_with = "all")]
    json: bool,
    /// Take only the place of endpoints with this address: the host where the capture was taken
    #[arg(long, value_name = "ADDRESS")]
    side: Option<IpAddr>,
    /// Names two queue pairs whose connection the capture doesn't show, for its path MTU
    ///
    /// As in `ferroce pcap check`.
    #[arg(long, value_name = "QP", value_parser = stated::parse)]
    qp: Vec<Stated>,
}

/// Verdict on a side or on the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Same,
    Differs,
    NotReplayed,
}

/// Report on a file.
#[derive(Serialize)]
struct FileReport<'a> {
    file: &'a str,
    complete: bool,
    verdict: Verdict,
    connections: Vec<ConnectionReport>,
}

/// Report on a connection.
#[derive(Serialize)]
struct ConnectionReport {
    conversation: usize,
    ends: [Endpoint; 2],
    mtu: Option<usize>,
    sides: Vec<SideReport>,
}

/// Report on one side of a connection.
#[derive(Serialize)]
struct SideReport {
    /// Endpoint in whose place ours was.
    end: Endpoint,
    peer: Endpoint,
    verdict: Verdict,
    /// Why it was not replayed.
    reason: Option<String>,
    /// Facts that the capture does not tell.
    notes: Vec<String>,
    packets: usize,
    equal: usize,
    differences: Vec<Difference>,
    choices: Vec<Difference>,
    /// Memory that is not what the capture's packets make it.
    wrong_memory: Vec<String>,
}

/// Runs the command.
pub(super) fn run(args: &ReplayArgs) -> Result<(), Failure> {
    let name = args.file.display().to_string();
    let mut source = Source::open(&args.file)?;
    let survey = source.survey(&args.qp)?;
    let connections = roce_replay::read(&survey, &mut source.capture()?);
    let reports: Vec<_> = connections.iter().map(|c| replay(c, args.side)).collect();
    let verdicts = || reports.iter().flat_map(|c| &c.sides).map(|side| side.verdict);
    let verdict = match (
        verdicts().any(|v| v == Verdict::Differs),
        verdicts().any(|v| v == Verdict::Same),
    ) {
        (true, _) => Verdict::Differs,
        (false, true) => Verdict::Same,
        (false, false) => Verdict::NotReplayed,
    };
    let report = FileReport {
        file: &name,
        complete: survey.report().complete,
        verdict,
        connections: reports,
    };
    if args.json {
        output::json(&report)?;
    } else {
        let mut out = BufWriter::new(io::stdout().lock());
        print(&mut out, &report, args.all)?;
        out.flush()?;
    }
    if !report.complete {
        return Err(Failure::failed(format!(
            "{}: breaks off; the {} frames before were replayed",
            shown(&name),
            survey.report().frames
        )));
    }
    match verdict {
        Verdict::Same => Ok(()),
        Verdict::Differs => Err(Failure::reported(1)),
        Verdict::NotReplayed => Err(Failure::reported(3)),
    }
}

/// Replays both sides of a connection, or those with an address.
fn replay(connection: &Connection, only: Option<IpAddr>) -> ConnectionReport {
    let chosen = (0..2).filter(|side| only.is_none_or(|addr| connection.ends[*side].addr == addr));
    let sides = chosen.map(|side| replay_side(connection, side)).collect();
    ConnectionReport {
        conversation: connection.index,
        ends: connection.ends,
        mtu: connection.mtu,
        sides,
    }
}

fn replay_side(connection: &Connection, side: usize) -> SideReport {
    let settings = Settings {
        joined_late: !connection.from_start,
        ..Settings::default()
    };
    let mut report = SideReport {
        end: connection.ends[side],
        peer: connection.ends[1 - side],
        verdict: Verdict::NotReplayed,
        reason: None,
        notes: vec![],
        packets: 0,
        equal: 0,
        differences: vec![],
        choices: vec![],
        wrong_memory: vec![],
    };
    if connection.mtu.is_none() {
        let text = format!("the path MTU is not known: {UNKNOWN_MTU} (--qp states another)");
        report.notes.push(text);
    }
    let outcome = match play(connection, side, connection.mtu.unwrap_or(UNKNOWN_MTU), &settings) {
        Ok(outcome) => outcome,
        Err(e) => {
            report.reason = Some(e.to_string());
            return report;
        }
    };
    if connection.is_trimmed {
        report
            .notes
            .push("the capture begins in the middle of messages, which are left out".to_owned());
    }
    if outcome.messages_before > 0 {
        let text = format!("the capture begins after {} messages", outcome.messages_before);
        report.notes.push(text);
    }
    (report.packets, report.equal) = (outcome.theirs, outcome.equal);
    (report.choices, report.differences) = outcome.differences.into_iter().partition(|d| d.kind.is_choice());
    report.differences.sort_by_key(|difference| difference.frame);
    report.choices.sort_by_key(|choice| choice.frame);
    report.wrong_memory = outcome.wrong_memory;
    report.verdict = match report.differences.is_empty() && report.wrong_memory.is_empty() {
        true => Verdict::Same,
        false => Verdict::Differs,
    };
    report
}

fn print(out: &mut impl Write, report: &FileReport<'_>, all: bool) -> io::Result<()> {
    let (mut same, mut differs, mut left_out) = (0, 0, 0);
    for connection in &report.connections {
        for side in &connection.sides {
            match side.verdict {
                Verdict::Same => same += 1,
                Verdict::Differs => differs += 1,
                Verdict::NotReplayed => left_out += 1,
            }
            print_side(out, side, all)?;
        }
    }
    let file = shown(report.file);
    if report.connections.is_empty() {
        return writeln!(out, "{file}: no reliable connection");
    }
    writeln!(
        out,
        "{file}: {} connections: {same} sides the same, {differs} differ, {left_out} not replayed",
        report.connections.len()
    )
}

fn print_side(out: &mut impl Write, side: &SideReport, all: bool) -> io::Result<()> {
    write!(out, "in place of {}, to {}: ", end(&side.end), end(&side.peer))?;
    let (differences, choices) = (side.differences.len(), side.choices.len());
    let result = match (&side.reason, side.verdict) {
        (Some(reason), _) => format!("not replayed: {reason}"),
        (_, Verdict::Differs) => format!("differs: {differences} differences in {} packets", side.packets),
        _ => format!("same: {} packets", side.packets),
    };
    match choices {
        0 => writeln!(out, "{result}")?,
        n => writeln!(out, "{result}, {n} choices")?,
    }
    for note in &side.notes {
        writeln!(out, "  note: {note}")?;
    }
    let limit = if all { usize::MAX } else { PRINTED };
    for difference in side.differences.iter().take(limit) {
        print_difference(out, difference)?;
    }
    if differences > limit {
        writeln!(
            out,
            "  … and {} more differences: --all prints them",
            differences - limit
        )?;
    }
    for text in &side.wrong_memory {
        writeln!(out, "  {text}")?;
    }
    if all {
        for choice in &side.choices {
            write!(out, "  choice:")?;
            print_difference(out, choice)?;
        }
    }
    Ok(())
}

fn print_difference(out: &mut impl Write, difference: &Difference) -> io::Result<()> {
    let text = |side: &Option<String>| side.as_deref().unwrap_or("nothing").to_owned();
    writeln!(out, "  frame {} {}", difference.frame, difference.kind.name())?;
    writeln!(out, "    expected {}", text(&difference.expected))?;
    writeln!(out, "    ours     {}", text(&difference.ours))
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::ExitCode};

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../pcap-fixtures")
            .join(name)
    }

    fn reports(name: &str) -> Vec<ConnectionReport> {
        let mut source = Source::open(&fixture(name)).unwrap();
        let survey = source.survey(&[]).unwrap();
        let connections = roce_replay::read(&survey, &mut source.capture().unwrap());
        connections.iter().map(|c| replay(c, None)).collect()
    }

    #[test]
    fn the_exit_status_tells_same_different_unreadable_and_nothing_apart() {
        for (name, code) in [
            ("verbs-ops.pcap", None::<u8>),
            ("nak-send-too-long.pcap", Some(1)),
            ("README.md", Some(2)),
            ("ud-pingpong.pcap", Some(3)),
        ] {
            let args = ReplayArgs {
                file: fixture(name),
                all: true,
                json: false,
                side: None,
                qp: vec![],
            };
            let status = run(&args).err().map(Failure::report);
            assert_eq!(
                format!("{status:?}"),
                format!("{:?}", code.map(ExitCode::from)),
                "{name}"
            );
        }
    }

    #[test]
    fn a_difference_names_the_frame_and_both_packets() {
        let connections = reports("nak-send-too-long.pcap");
        let differing = connections[0]
            .sides
            .iter()
            .find(|side| side.verdict == Verdict::Differs);
        let [difference] = &differing.unwrap().differences[..] else {
            panic!("{} differences", differing.unwrap().differences.len());
        };
        let (expected, ours) = (
            difference.expected.as_deref().unwrap(),
            difference.ours.as_deref().unwrap(),
        );
        assert!(expected.contains("nak, remote operational error"), "{expected}");
        assert!(ours.contains("RC Acknowledge") && ours.contains(" ack "), "{ours}");
        assert_eq!(difference.frame, 4);
    }

    #[test]
    fn what_a_capture_lacks_is_said() {
        // Packets were lost between the client and the capture.
        let of_server = reports("loss-write-server.pcap");
        let reasons: Vec<_> = of_server[0].sides.iter().map(|side| side.reason.as_deref()).collect();
        assert!(
            matches!(reasons[..], [Some(why), None] if why.contains("not this side's view")),
            "{reasons:?}"
        );
        let mut connections = {
            let mut source = Source::open(&fixture("verbs-ops.pcap")).unwrap();
            let survey = source.survey(&[]).unwrap();
            roce_replay::read(&survey, &mut source.capture().unwrap())
        };
        connections[0].events.retain(|event| event.sender == 0);
        connections[0].mtu = None;
        let report = replay(&connections[0], None);
        for side in &report.sides {
            let reason = side.reason.as_deref().unwrap();
            assert!(reason.ends_with("both directions are needed"), "{reason}");
            assert!(side.notes[0].contains("path MTU is not known"));
        }
    }
}
