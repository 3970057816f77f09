//! `ferroce pcap check`.

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use ferroce_dissect::ProtocolJudge;
use roce_pcap::{
    Capture, Checker, Finding, FrameReport, Icrc, Report, Verdict,
    judge::{Stated, Summary},
};
use roce_verbs::shown;
use serde::Serialize;

use super::{
    stated,
    stream::{end, named},
    table,
};
use crate::output::{self, Failure};

/// Judge the conversations of a capture: which rule is broken, in which frame, and by whom
///
/// Reads pcap and pcapng, also compressed with gzip or zstd. Checks each RoCEv2 frame by itself (headers, lengths, invariant CRC),
/// follows every connection, and prints findings: severity, rule, a sentence, and who is at fault. The same finding of a
/// peer is printed once, with a count. A table of queue pairs with their verdicts follows, and a line for the file. A
/// capture may begin in the middle, lack a direction or frames, or have cut ones: it is judged by what can be known, and
/// what could not be checked is said. RDS and LNet have rules of their own; those of others end with the transport.
///
/// With --json, one object per file and line: `file`, `verdict` (`good`, `bad`, `not_checked`), counters, `findings` and
/// `conversations`; or `file` and `error` for a file that can't be read.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce pcap check trace.pcapng
  ferroce pcap check --frames trace.pcap
  ferroce pcap check --json trace.pcap | jq '.findings[] | {frame, rule, at_fault, text}'
  tcpdump -w - -U udp port 4791 | ferroce pcap check -
  ferroce pcap check --qp 10.0.0.1:0x12=peer:10.0.0.2:0x15,mtu:1024 trace.pcap

Exit status:
  0  everything was checked and is good
  1  something is bad, or a file breaks off
  2  a file can't be read, or wrong usage
  3  nothing is bad, but something could not be checked or read, or nothing is RoCEv2")]
pub(super) struct CheckArgs {
    /// The captures; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print a line for each frame: headers and ICRC
    #[arg(long)]
    frames: bool,
    /// Print one JSON object per file, a line each; with --frames one per frame before it
    #[arg(long)]
    json: bool,
    /// Names two queue pairs whose connection the capture doesn't show
    ///
    /// ADDRESS:QPN=peer:ADDRESS:QPN, then what is known: mtu:BYTES, psn:PSN and peer-psn:PSN (of the first request of each), depth:N
    /// (outstanding READs).
    #[arg(long, value_name = "QP", value_parser = stated::parse)]
    qp: Vec<Stated>,
}

/// Runs the command.
pub(super) fn run(args: &CheckArgs) -> Result<(), Failure> {
    let (mut worst, mut unreadable) = (Verdict::Good, false);
    for file in &args.files {
        match check(args, file)? {
            Ok(report) => worst = worst.max(report.verdict),
            Err(text) => {
                unreadable = true;
                if args.json {
                    let file = file.display().to_string();
                    output::json(&Unreadable { file, error: &text })?;
                }
                // The message names the file.
                let _ = writeln!(io::stderr(), "error: {text}");
            }
        }
    }
    match worst {
        _ if unreadable => Err(Failure::reported(2)),
        Verdict::Good => Ok(()),
        Verdict::Bad => Err(Failure::reported(1)),
        Verdict::NotChecked => Err(Failure::reported(3)),
    }
}

#[derive(Serialize)]
struct Unreadable<'a> {
    file: String,
    error: &'a str,
}

/// Checks one file and prints; the inner error is the file's.
fn check(args: &CheckArgs, file: &Path) -> Result<Result<Report, String>, Failure> {
    let live = file.as_os_str() == "-";
    let name = file.display().to_string();
    let checker = Checker::with(name.clone(), &ProtocolJudge::setup(&args.qp));
    let report = if live {
        Capture::new(io::stdin().lock()).map(|capture| judge(args, checker, capture, true))
    } else {
        Capture::open(file).map(|capture| judge(args, checker, capture, false))
    };
    match report {
        Ok(report) => report.map(Ok),
        Err(e) => Ok(Err(named(&name, &e))),
    }
}

fn judge<R: io::Read>(args: &CheckArgs, checker: Checker, capture: Capture<R>, live: bool) -> Result<Report, Failure> {
    let mut out = BufWriter::new(io::stdout().lock());
    let mut written = Ok(());
    let report = roce_pcap::check(checker, capture, |frame| {
        if written.is_ok() {
            written = print_frame(&mut out, args, frame, live);
        }
    });
    written?;
    if args.json {
        writeln!(out, "{}", output::json_text(&report))?;
    } else {
        print_report(&mut out, &report, live)?;
    }
    out.flush()?;
    Ok(report)
}

/// Prints a frame, or the findings that a live capture has just shown.
fn print_frame(out: &mut impl Write, args: &CheckArgs, frame: &FrameReport, live: bool) -> io::Result<()> {
    match (args.frames, args.json) {
        (true, true) => writeln!(out, "{}", output::json_text(frame))?,
        (true, false) => frame_line(out, frame)?,
        (false, false) if live => {
            for finding in frame.findings.iter().filter(|finding| finding.is_first) {
                print_finding(out, finding)?;
            }
        }
        _ => return Ok(()),
    }
    // A reader of a live capture wants each line as it comes.
    if live { out.flush() } else { Ok(()) }
}

fn frame_line(out: &mut impl Write, frame: &FrameReport) -> io::Result<()> {
    let verdict = match frame.icrc {
        Icrc::Ok => "icrc ok",
        Icrc::Bad => "ICRC BAD",
        Icrc::Unchecked => "icrc ?",
    };
    writeln!(
        out,
        "{:>6} {:.6} {} > {} {} [{verdict}]",
        frame.index,
        frame.time_ns as f64 / 1e9,
        frame.src,
        frame.dst,
        frame.summary
    )?;
    for finding in &frame.findings {
        writeln!(
            out,
            "       {} {}: {}",
            finding.severity.word(),
            finding.rule.id(),
            finding.text
        )?;
    }
    Ok(())
}

fn print_finding(out: &mut impl Write, finding: &Finding) -> io::Result<()> {
    write!(out, "frame {}: {finding}", finding.frame)?;
    if finding.count > 1 {
        write!(out, " ({} times, last in frame {})", finding.count, finding.last_frame)?;
    }
    writeln!(out)
}

fn print_report(out: &mut impl Write, report: &Report, live: bool) -> io::Result<()> {
    for finding in &report.findings {
        // A live capture's were printed as they came, but for their counts and those of its end.
        if !live || finding.count > 1 || finding.at_end {
            print_finding(out, finding)?;
        }
    }
    if report.findings_left_out > 0 {
        writeln!(out, "… and {} more findings", report.findings_left_out)?;
    }
    print_conversations(out, &report.conversations)?;
    write!(
        out,
        "{}: {} frames, {} RoCEv2 ({} packets), ICRC {} ok, {} bad",
        shown(&report.file),
        report.frames,
        report.roce_frames,
        report.roce_packets,
        report.icrc_ok,
        report.icrc_bad
    )?;
    if report.icrc_unchecked > 0 {
        write!(out, ", {} not checkable", report.icrc_unchecked)?;
    }
    if let Some(dropped) = report.dropped.filter(|n| *n > 0) {
        write!(out, ", {dropped} dropped by the capture")?;
    }
    writeln!(out, ": {}", verdict(report))
}

fn print_conversations(out: &mut impl Write, conversations: &[Summary]) -> io::Result<()> {
    let rows: Vec<[String; 7]> = conversations
        .iter()
        .map(|c| {
            let not_checked = c.not_checked.join(", ");
            let verdict = match (c.verdict, c.errors) {
                (Verdict::Bad, n) => format!("bad: {n} errors"),
                (Verdict::NotChecked, _) => format!("not checked: {not_checked}"),
                (Verdict::Good, _) if c.warnings > 0 => format!("good, {} warnings", c.warnings),
                (Verdict::Good, _) => "good".to_owned(),
            };
            [
                c.name
                    .clone()
                    .map_or_else(|| c.service.to_owned(), |name| format!("{} {name}", c.service)),
                end(&c.ends[0]),
                end(&c.ends[1]),
                c.mtu.map_or_else(|| "-".to_owned(), |mtu| mtu.to_string()),
                format!("{}/{}", c.packets[0], c.packets[1]),
                format!("{}/{}", c.repeated[0], c.repeated[1]),
                verdict,
            ]
        })
        .collect();
    let head = ["SERVICE", "QP", "QP", "MTU", "PACKETS", "AGAIN", "VERDICT"];
    table::print(out, head, &rows)
}

/// In words, `good` or all that is not.
fn verdict(report: &Report) -> String {
    let mut faults = vec![];
    if report.bad_frames > 0 {
        faults.push(format!("{} bad frames", report.bad_frames));
    }
    let bad = report
        .conversations
        .iter()
        .filter(|c| c.verdict == Verdict::Bad)
        .count();
    if bad > 0 {
        faults.push(format!("{bad} bad conversations"));
    }
    if report.unread_frames > 0 {
        faults.push(format!("{} frames not read", report.unread_frames));
    }
    if report.packets_not_followed > 0 {
        faults.push(format!(
            "{} packets of too many conversations",
            report.packets_not_followed
        ));
    }
    if !report.complete {
        faults.push("the file breaks off".to_owned());
    }
    if report.roce_frames == 0 {
        faults.push("no RoCEv2 frame".to_owned());
    }
    match report.verdict {
        Verdict::Good => "good".to_owned(),
        Verdict::Bad if faults.is_empty() => "bad".to_owned(),
        Verdict::Bad => format!("bad: {}", faults.join(", ")),
        Verdict::NotChecked if faults.is_empty() => "not checked".to_owned(),
        Verdict::NotChecked => format!("not checked: {}", faults.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_read_and_is_right_is_good() {
        let mut report = Report {
            complete: true,
            ..Report::default()
        };
        assert_eq!(verdict(&report), "not checked: no RoCEv2 frame");
        report.roce_frames = 5;
        assert_eq!(verdict(&report), "not checked");
        report.verdict = Verdict::Good;
        assert_eq!(verdict(&report), "good");
        (report.verdict, report.unread_frames) = (Verdict::NotChecked, 3);
        assert_eq!(verdict(&report), "not checked: 3 frames not read");
        (report.verdict, report.bad_frames, report.complete) = (Verdict::Bad, 1, false);
        assert_eq!(
            verdict(&report),
            "bad: 1 bad frames, 3 frames not read, the file breaks off"
        );
    }
}
