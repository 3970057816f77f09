//! `ferroce pcap plot`.

mod latency;
mod marks;
mod overview;
mod panel;
mod scale;
mod sequence;
mod svg;
mod throughput;
mod time;

use std::{
    fs,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use roce_pcap::{
    Checker, Setup,
    judge::{Event, Observed, Stated},
};
use roce_verbs::shown;

use self::{
    overview::{Chosen, Overview},
    panel::Picture,
};
use super::{source::Source, stated};
use crate::output::{self, Failure};

/// Draw a connection of a capture as an SVG picture: PSNs, latency or goodput over time
///
/// The sequence picture shows each packet by time and PSN: requests, READ responses, the line of acknowledgements, and marked by
/// colour what was sent again, gaps, NAKs, and RNR NAKs with the time that they ask to wait. Browsers name frame and PSN of such a
/// mark under the pointer. A picture has a panel for each direction with requests. However long the capture is, the picture is
/// small: marks in one place become one, and the legend has the numbers. Pauses much longer than all else are cut out of the time axis.
///
/// The picture follows the light or dark colour scheme of its reader.
#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce pcap plot trace.pcapng -o sequence.svg
  ferroce pcap plot trace.pcapng --kind latency --conversation 3 -o latency.svg
  ferroce pcap plot trace.pcapng --kind throughput | rsvg-convert > throughput.png

`ferroce pcap flows` lists the conversations with their numbers.")]
pub(super) struct PlotArgs {
    /// The capture; `-` is standard input, which is kept in a temporary file until the end
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The picture; without it standard output, unless that is a terminal
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Conversation, by its number in `pcap flows` [default: the one with most packets]
    #[arg(long, value_name = "N")]
    conversation: Option<usize>,
    /// Quantity to draw over time
    #[arg(long, value_enum, default_value_t)]
    kind: Kind,
    /// Draw for a dark background, whatever the reader's colour scheme is
    #[arg(long)]
    dark: bool,
    /// Names two queue pairs whose connection the capture doesn't show, as in `pcap check`
    #[arg(long, value_name = "QP", value_parser = stated::parse)]
    qp: Vec<Stated>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Kind {
    /// PSNs: requests, responses, acknowledgements, losses
    #[default]
    Sequence,
    /// Round trips and latencies of READs
    Latency,
    /// Goodput, and payload that was sent again
    Throughput,
}

/// Runs the command.
pub(super) fn run(args: &PlotArgs) -> Result<(), Failure> {
    if args.output.is_none() && io::stdout().is_terminal() {
        return Err(Failure::usage(
            "standard output is a terminal: name a file for the picture with -o, or pipe it to a program",
        ));
    }
    let mut source = Source::open(&args.file)?;
    if let Some(path) = &args.output {
        source.refuse(path)?;
    }
    let picture = draw(&mut source, &args.file, args)?;
    match &args.output {
        Some(path) => fs::write(path, picture).map_err(|e| Failure::failed(format!("{}: {e}", path.display()))),
        None => output::text(&picture),
    }
}

/// Draws a conversation of a capture.
fn draw(source: &mut Source, file: &Path, args: &PlotArgs) -> Result<String, Failure> {
    let mut overview = Overview::default();
    let (checker, broken) = read(source, &args.qp, |event, _| overview.event(event))?;
    let name = shown(&file.display().to_string()).to_string();
    if let Some(why) = broken {
        tracing::warn!("{name}: {why}; the picture shows the frames before");
    }
    let chosen = overview.choose(checker.judge(), args.conversation);
    let chosen = chosen.map_err(|e| Failure::failed(format!("{name}: {e}")))?;
    let mut picture: Box<dyn Picture> = match args.kind {
        Kind::Sequence => Box::new(sequence::Sequence::new(&chosen)),
        Kind::Latency => Box::new(latency::Latencies::new(&chosen)),
        Kind::Throughput => Box::new(throughput::Throughput::new(&chosen)),
    };
    read(source, &args.qp, |event, _| {
        if let Some(event) = chosen.event(checker.judge(), event) {
            picture.event(&event);
        }
    })?;
    let file = file.file_name().map_or(name.clone(), |name| name.display().to_string());
    let title = title(&file, &chosen);
    let panels = picture.finish();
    if panels.is_empty() {
        let lacks = match args.kind {
            Kind::Sequence => "no packets with PSNs",
            Kind::Latency => "no request that was answered and sent once",
            Kind::Throughput => "no payload",
        };
        let text = format!("{name}: conversation {} has {lacks}", chosen.index);
        return Err(Failure::failed(text));
    }
    Ok(svg::document(&title, &panels, args.dark))
}

fn title(file: &str, chosen: &Chosen) -> String {
    let service = match &chosen.name {
        Some(name) => format!("{} {name}", chosen.service),
        None => chosen.service.to_owned(),
    };
    format!("{}, conversation {} ({service})", shown(file), chosen.index)
}

/// Reads the capture, and calls `each` with every packet of a conversation. Returns the checker, and why the capture breaks
/// off, if it does.
fn read(
    source: &mut Source,
    stated: &[Stated],
    mut each: impl FnMut(&Event, &Observed<'_>),
) -> Result<(Checker, Option<String>), Failure> {
    let setup = Setup {
        stated: stated.to_vec(),
        upper: None,
    };
    let mut checker = Checker::with("", &setup);
    let mut capture = source.capture()?;
    while let Some(frame) = capture.next_frame() {
        match frame {
            Ok(frame) => drop(checker.frame(&frame, &mut each)),
            Err(e) => return Ok((checker, Some(e.to_string()))),
        }
    }
    Ok((checker, None))
}

#[cfg(test)]
mod tests;
