//! Output: lines, trees of fields, JSON.

use std::{
    io::{self, Write},
    net::SocketAddr,
};

use ferroce_dissect::Dissection;
use roce_pcap::{Finding, Icrc};
use roce_verbs::shown;
use serde::Serialize;

use super::{
    line,
    reading::{Packets, Part},
};
use crate::output;

/// Form of the output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Lines,
    Fields,
    Json,
}

/// Prints frames.
pub(super) struct Printer<W> {
    out: W,
    form: Form,
    file: String,
    /// Time that times are relative to.
    origin_ns: Option<u64>,
    frames: u64,
}

/// Packet of a frame, or a frame without one, in JSON.
#[derive(Serialize)]
struct Line<'a> {
    file: &'a str,
    frame: u64,
    time_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    src: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dst: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    conversation: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    icrc: Option<Icrc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    opcode: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dest_qp: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    psn: Option<u32>,
    summary: String,
    repeated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    connection: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exchange: Option<u64>,
    layers: &'a [ferroce_dissect::Layer],
    findings: &'a [Finding],
}

#[derive(Serialize)]
struct AtEnd<'a> {
    file: &'a str,
    findings: &'a [Finding],
}

impl<W: Write> Printer<W> {
    pub(super) const fn new(out: W, form: Form, file: String) -> Self {
        Self {
            out,
            form,
            file,
            origin_ns: None,
            frames: 0,
        }
    }

    /// Sets the time that times are relative to, if there is none.
    pub(super) fn begin(&mut self, time_ns: u64) {
        self.origin_ns.get_or_insert(time_ns);
    }

    /// Prints a frame and its findings.
    pub(super) fn frame(&mut self, packets: &Packets) -> io::Result<()> {
        self.frames += 1;
        if self.form == Form::Json {
            return self.json(packets);
        }
        let origin = self.origin_ns.unwrap_or(packets.time_ns);
        let seconds = (i128::from(packets.time_ns) - i128::from(origin)) as f64 / 1e9;
        if packets.parts.is_empty() {
            writeln!(self.out, "{}", line::of_frame(packets, seconds))?;
        }
        for part in &packets.parts {
            writeln!(self.out, "{}", line::of_part(packets, part, seconds))?;
            if let (Form::Fields, Some(dissection)) = (self.form, &part.dissection) {
                write!(self.out, "{}", line::tree(dissection))?;
            }
        }
        for finding in &packets.reviewed.findings {
            let earlier = match finding.frame == packets.reviewed.index {
                true => String::new(),
                false => format!("frame {}: ", finding.frame),
            };
            writeln!(self.out, "      ^ {earlier}{}", shown(&finding.to_string()))?;
        }
        Ok(())
    }

    fn json(&mut self, packets: &Packets) -> io::Result<()> {
        let findings = packets.reviewed.findings.as_slice();
        if packets.parts.is_empty() {
            let line = self.line(packets, None, findings);
            return writeln!(self.out, "{}", output::json_text(&line));
        }
        for (nth, part) in packets.parts.iter().enumerate() {
            let findings = if nth == 0 { findings } else { &[] };
            let line = self.line(packets, Some(part), findings);
            writeln!(self.out, "{}", output::json_text(&line))?;
        }
        Ok(())
    }

    fn line<'a>(&'a self, packets: &'a Packets, part: Option<&'a Part>, findings: &'a [Finding]) -> Line<'a> {
        let report = packets.report();
        let dissection: Option<&Dissection> = part.and_then(|part| part.dissection.as_ref());
        Line {
            file: &self.file,
            frame: packets.reviewed.index,
            time_ns: packets.time_ns,
            src: report.map(|report| report.src),
            dst: report.map(|report| report.dst),
            conversation: packets.reviewed.conversation,
            icrc: report.map(|report| report.icrc),
            opcode: part.map(|part| part.bth.opcode.info().name),
            dest_qp: part.map(|part| part.bth.dest_qp.value()),
            psn: part.map(|part| part.bth.psn.value()),
            summary: match (dissection, report) {
                (Some(dissection), _) => dissection.summary(),
                (None, Some(report)) => report.summary.to_string(),
                (None, None) => String::new(),
            },
            repeated: part.is_some_and(Part::is_repeated),
            connection: dissection.and_then(|d| d.connection),
            exchange: dissection.and_then(|d| d.exchange).map(|id| id.0),
            layers: dissection.map(|d| d.layers.as_slice()).unwrap_or_default(),
            findings,
        }
    }

    /// Prints findings that show at the end of a capture.
    pub(super) fn findings_at_end(&mut self, findings: &[Finding]) -> io::Result<()> {
        if self.form == Form::Json {
            if findings.is_empty() {
                return Ok(());
            }
            let file = self.file.as_str();
            return writeln!(self.out, "{}", output::json_text(&AtEnd { file, findings }));
        }
        for finding in findings {
            writeln!(
                self.out,
                "at the end: frame {}: {}",
                finding.frame,
                shown(&finding.to_string())
            )?;
        }
        Ok(())
    }

    /// Prints a line as it is.
    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        writeln!(self.out, "{text}")
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Ends the output. Returns how many frames were shown.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        self.out.flush()?;
        Ok(self.frames)
    }
}
