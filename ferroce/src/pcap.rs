//! `ferroce pcap`.

use std::{
    io::{self, BufWriter, Write},
    path::PathBuf,
};

use clap::{Args, Subcommand};
use roce_pcap::{FrameReport, Icrc, Report, Severity, Verdict};
use roce_verbs::shown;
use serde::Serialize;

use crate::output::{self, Failure};

#[derive(Args)]
pub(crate) struct PcapArgs {
    #[command(subcommand)]
    command: PcapCommand,
}

#[derive(Subcommand)]
enum PcapCommand {
    /// Check every RoCEv2 frame of a capture: headers and invariant CRC
    ///
    /// Reads pcap and pcapng. Prints a line for each frame to UDP port 4791, also in VXLAN or GENEVE, with its headers and the
    /// verdict on its ICRC, then findings, then a summary of the file. Frames that can't be decoded (an unknown link
    /// type or tunnel, or a frame that is cut too short) are counted as not read. With --json, one object per file and
    /// line, with at least `file`, `verdict` (`good`, `bad`, `not_checked`), `frames`, `roce_frames`, `icrc_ok`, `icrc_bad` and
    /// `findings` (each with `frame`, `kind`, `severity` and `text`), or `file` and `error` for a file that can't be read.
    #[command(after_help = "\
Examples:
  ferroce pcap check trace.pcapng
  ferroce pcap check --summary *.pcap
  ferroce pcap check --json trace.pcap | jq .icrc_bad
  tcpdump -w - -U udp port 4791 | ferroce pcap check -

Exit status:
  0  every RoCEv2 frame is good
  1  a frame is bad, or a file breaks off
  2  a file can't be read, or wrong usage
  3  nothing is bad, but frames could not be checked or read, or there are none of RoCEv2")]
    Check(CheckArgs),
}

#[derive(Args)]
struct CheckArgs {
    /// The captures; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print only findings and the summary, no line per frame
    #[arg(long, conflicts_with = "json")]
    summary: bool,
    /// Print one JSON object per file, a line each
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &PcapArgs) -> Result<(), Failure> {
    let PcapCommand::Check(args) = &args.command;
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
fn check(args: &CheckArgs, file: &PathBuf) -> Result<Result<Report, String>, Failure> {
    let mut out = BufWriter::new(io::stdout().lock());
    let mut written = Ok(());
    let is_input = file.as_os_str() == "-";
    let each = |frame: &FrameReport| {
        if !args.json && !args.summary && written.is_ok() {
            written = print_frame(&mut out, frame);
            // A reader of a live capture wants each line as it comes.
            if is_input && written.is_ok() {
                written = out.flush();
            }
        }
    };
    let report = match is_input {
        true => roce_pcap::check_reader("-", io::stdin().lock(), each),
        false => roce_pcap::check_file_with(file, each),
    };
    written?;
    let report = match report {
        Ok(report) => report,
        Err(e) => {
            let name = file.display().to_string();
            let text = e.to_string();
            return Ok(Err(if text.contains(&name) {
                text
            } else {
                format!("{name}: {text}")
            }));
        }
    };
    if args.json {
        writeln!(out, "{}", output::json_text(&report))?;
    } else {
        print_summary(&mut out, &report, args.summary)?;
    }
    out.flush()?;
    Ok(Ok(report))
}

fn print_frame(out: &mut impl Write, frame: &FrameReport) -> io::Result<()> {
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
        writeln!(out, "       {}: {}", severity(finding.severity), finding.text)?;
    }
    Ok(())
}

fn print_summary(out: &mut impl Write, report: &Report, with_findings: bool) -> io::Result<()> {
    // With frames, theirs stand there already; those of other frames and of the file do not.
    let of_no_frame = |f: &roce_pcap::Finding| matches!(f.kind, roce_pcap::Kind::File | roce_pcap::Kind::LinkType);
    for finding in &report.findings {
        if with_findings || of_no_frame(finding) {
            writeln!(
                out,
                "frame {}: {}: {}",
                finding.frame,
                severity(finding.severity),
                finding.text
            )?;
        }
    }
    if report.findings_left_out > 0 {
        writeln!(out, "… and {} more findings", report.findings_left_out)?;
    }
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
    writeln!(out, ": {}", verdict(report))
}

/// In words, `good` or all that is not.
fn verdict(report: &Report) -> String {
    let mut faults = vec![];
    if report.bad_frames > 0 {
        faults.push(format!("{} bad frames", report.bad_frames));
    }
    if report.unread_frames > 0 {
        faults.push(format!("{} frames not read", report.unread_frames));
    }
    if !report.complete {
        faults.push("the file breaks off".to_owned());
    }
    if report.roce_frames == 0 {
        faults.push("no RoCEv2 frame".to_owned());
    }
    match report.verdict {
        Verdict::Good => "good".to_owned(),
        Verdict::Bad => faults.join(", "),
        Verdict::NotChecked if faults.is_empty() => "not checked".to_owned(),
        Verdict::NotChecked => format!("not checked: {}", faults.join(", ")),
    }
}

const fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Note => "note",
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
        assert_eq!(verdict(&report), "1 bad frames, 3 frames not read, the file breaks off");
    }
}
