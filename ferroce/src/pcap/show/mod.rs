//! `ferroce pcap show`.

mod context;
mod follow;
mod line;
mod printer;
mod reading;
mod wanted;

use std::{
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use ferroce_dissect::ProtocolJudge;
use roce_pcap::{Capture, Frame, Report, judge::Stated};

use self::{
    context::Context,
    printer::{Form, Printer},
    reading::Reading,
    wanted::{LayerName, Wanted},
};
use super::{choice::Choice, source::Source, stated};
use crate::output::{self, Failure};

/// Show the packets of a capture, with the judge's findings below their frames
///
/// A line has the number of the frame, seconds since the first frame, sender, receiver and its queue pair, opcode and PSN, and the
/// innermost layer: extended headers, a message of the connection manager, or of RTRS, RNBD, RDS or LNet. Lines are cut at 120
/// columns; --fields shows all fields with their offsets. Options of different kinds must all hold; of one option that is given
/// several times, one value.
///
/// A file is read twice, so that findings that later frames or the end show are below the frames that break the rule. Standard
/// input is shown as it comes: findings are below the frames that show them.
///
/// With --json, one object per packet and line: `file`, `frame`, `time_ns`, `src`, `dst`, `conversation`, `icrc`, `summary`,
/// `exchange` (the number of the request that the packet belongs to), `layers` with their fields, and `findings`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce pcap show trace.pcap
  ferroce pcap show --bad --context 5 trace.pcap
  ferroce pcap show --fields --from 35 --to 35 trace.pcap
  ferroce pcap show --qp 0x24 --layer rnbd trace.pcap
  ferroce pcap show --follow 35 trace.pcap
  tcpdump -w - -U udp port 4791 | ferroce pcap show -

Exit status:
  0  frames were shown
  1  a capture breaks off (the frames before are shown)
  2  a file can't be read, or wrong usage
  3  no frame matches")]
pub(super) struct ShowArgs {
    /// The captures; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Show all fields of each packet, with offset and length
    #[arg(long, conflicts_with = "json")]
    fields: bool,
    /// Print one JSON object per packet and line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    choice: Choice,
    /// Frames with this layer; `cm` is all messages of the connection manager
    #[arg(long, value_name = "LAYER")]
    layer: Vec<LayerName>,
    /// Show also so many frames of the same conversation before and after each frame that matches
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    context: usize,
    /// Show only the request or message that this frame belongs to, with times since its first packet, and its latency
    #[arg(long, value_name = "FRAME", conflicts_with = "context")]
    follow: Option<u64>,
    /// Names two queue pairs whose connection the capture doesn't show, as `--qp` of `pcap check`
    #[arg(long, value_name = "QP", value_parser = stated::parse)]
    stated: Vec<Stated>,
}

impl ShowArgs {
    const fn form(&self) -> Form {
        match (self.json, self.fields) {
            (true, _) => Form::Json,
            (false, true) => Form::Fields,
            (false, false) => Form::Lines,
        }
    }
}

/// Runs the command.
pub(super) fn run(args: &ShowArgs) -> Result<(), Failure> {
    let wanted = Wanted {
        selection: args.choice.selection()?,
        layers: args.layer.clone(),
    };
    let (mut shown, mut broken) = (0u64, None);
    for (nth, file) in args.files.iter().enumerate() {
        let mut out = BufWriter::new(io::stdout().lock());
        if args.files.len() > 1 && !args.json {
            let space = if nth > 0 { "\n" } else { "" };
            writeln!(out, "{space}{}:", roce_verbs::shown(&file.display().to_string()))?;
        }
        let mut printer = Printer::new(out, args.form(), file.display().to_string());
        let report = match args.follow {
            Some(frame) => follow_frame(args, file, frame, &wanted, &mut printer)?,
            None if file.as_os_str() == "-" => show_live(args, &wanted, &mut printer)?,
            None => show_file(args, file, &wanted, &mut printer)?,
        };
        shown += printer.finish()?;
        broken = broken.or_else(|| breaks_off(&report));
    }
    match (broken, shown) {
        (Some(text), _) => Err(Failure::failed(text)),
        (None, 0) => Err(Failure::with_status(3, "no frame matches")),
        _ => Ok(()),
    }
}

/// Describes where a capture breaks off.
fn breaks_off(report: &Report) -> Option<String> {
    if report.complete {
        return None;
    }
    let finding = report.findings.iter().find(|f| f.rule == roce_pcap::Rule::FileBroken);
    let why = finding.map_or("it breaks off", |finding| finding.text.as_str());
    Some(format!(
        "{}: {why}; the {} frames before are shown",
        report.file, report.frames
    ))
}

/// Shows a file in its second reading.
fn show_file(
    args: &ShowArgs,
    file: &Path,
    wanted: &Wanted,
    printer: &mut Printer<impl Write>,
) -> Result<Report, Failure> {
    let mut source = Source::open(file)?;
    let survey = source.survey(&args.stated)?;
    let mut reading = Reading::new(survey.reviewer());
    let mut context = Context::new(args.context);
    let mut capture = source.capture()?;
    while let Some(Ok(frame)) = capture.next_frame() {
        show_frame(&frame, &mut reading, &mut context, wanted, printer)?;
    }
    Ok(survey.report().clone())
}

/// Shows standard input as it comes.
fn show_live(args: &ShowArgs, wanted: &Wanted, printer: &mut Printer<impl Write>) -> Result<Report, Failure> {
    let mut capture = Capture::new(io::stdin().lock()).map_err(|e| Failure::with_status(2, format!("-: {e}")))?;
    let mut reading = Reading::new(roce_pcap::Reviewer::live("-", &ProtocolJudge::setup(&args.stated)));
    let mut context = Context::new(args.context);
    while let Some(frame) = capture.next_frame() {
        match frame {
            Ok(frame) => {
                show_frame(&frame, &mut reading, &mut context, wanted, printer)?;
                printer.flush()?;
            }
            Err(e) => reading.broken(&e),
        }
    }
    let (report, mut findings) = reading.finish();
    findings.retain(|finding| wanted.has_finding(finding));
    printer.findings_at_end(&findings)?;
    Ok(report)
}

fn show_frame(
    frame: &Frame<'_>,
    reading: &mut Reading<'_>,
    context: &mut Context,
    wanted: &Wanted,
    printer: &mut Printer<impl Write>,
) -> io::Result<()> {
    printer.begin(frame.time_ns);
    let packets = reading.frame(frame);
    if packets.is_empty() {
        return Ok(());
    }
    let matches = wanted.matches(&packets);
    for packets in context.take(packets, matches) {
        printer.frame(&packets)?;
    }
    Ok(())
}

/// Shows the request or message that a frame belongs to.
fn follow_frame(
    args: &ShowArgs,
    file: &Path,
    frame: u64,
    wanted: &Wanted,
    printer: &mut Printer<impl Write>,
) -> Result<Report, Failure> {
    let mut source = Source::open(file)?;
    let survey = source.survey(&args.stated)?;
    let one = follow::find(&survey, &mut source.capture()?, frame).map_err(Failure::failed)?;
    let one = follow::span(&survey, &mut source.capture()?, one);
    let mut total = follow::Total::new(&one);
    let mut reading = Reading::new(survey.reviewer());
    let mut capture = source.capture()?;
    while let Some(Ok(frame)) = capture.next_frame() {
        let mut packets = reading.frame(&frame);
        packets.parts.retain(|part| one.has(part));
        if packets.parts.is_empty() {
            continue;
        }
        printer.begin(frame.time_ns);
        packets.parts.iter().for_each(|part| total.add(&packets, part));
        if wanted.matches(&packets) {
            printer.frame(&packets)?;
        }
    }
    match args.json {
        true => printer.text(&output::json_text(&total))?,
        false => printer.text(&total.to_string())?,
    }
    Ok(survey.report().clone())
}
