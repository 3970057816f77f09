//! Checks of whole captures: each frame by itself, and the conversations.

use std::{io::Read, mem, path::Path};

use roce_bth::Qpn;

use crate::{
    check::{Packets, Skipped, examine, segment},
    finding::{Finding, Findings},
    judge::{Event, Judge, Meta, NewUpperJudge, Observed, Stated},
    reader::{Capture, Error, Frame},
    report::{FrameReport, Report},
    rule::Rule,
    segments::Splitter,
};

/// Facts and judges that a [`Checker`] begins with.
#[derive(Clone, Default, Debug)]
pub struct Setup {
    /// Queue pairs that the user names.
    pub stated: Vec<Stated>,
    /// Judge of the protocols above the transport; `None`: they are not judged.
    pub upper: Option<NewUpperJudge>,
}

/// Checks the frames of a capture one by one, in the capture's order.
#[derive(Default)]
pub struct Checker {
    report: Report,
    findings: Findings,
    splitter: Splitter,
    judge: Judge,
    /// All findings since they were taken, if they are to be kept.
    kept: Option<Vec<Finding>>,
}

impl Checker {
    /// Creates a checker of the transport; `name` is what its report calls the capture.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            report: Report {
                file: name.into(),
                complete: true,
                ..Report::default()
            },
            ..Self::default()
        }
    }

    /// Creates a checker; `name` is what its report calls the capture.
    pub fn with(name: impl Into<String>, setup: &Setup) -> Self {
        let mut checker = Self::new(name);
        if let Some(new) = setup.upper {
            checker.judge.set_upper(new());
        }
        setup.stated.iter().for_each(|stated| checker.judge.state(stated));
        checker
    }

    /// Keeps all findings for [`Checker::take_findings`], also those that a report only counts.
    pub fn keep_findings(&mut self) {
        self.kept.get_or_insert_default();
    }

    /// Returns the findings since the last call, also of earlier frames.
    pub fn take_findings(&mut self) -> Vec<Finding> {
        self.kept.as_mut().map(mem::take).unwrap_or_default()
    }

    /// Returns the judge of the conversations.
    pub const fn judge(&self) -> &Judge {
        &self.judge
    }

    /// Adds a finding. Returns whether it is the first of its rule and peer.
    fn add(&mut self, finding: &Finding) -> bool {
        if let Some(kept) = &mut self.kept {
            kept.push(finding.clone());
        }
        self.findings.add(finding)
    }

    /// Checks a frame, and calls `event` with each of its packets that belongs to a conversation. Returns a report if it is
    /// RoCEv2; its findings are those of the frame, and those of conversations that it shows.
    pub fn frame(&mut self, frame: &Frame<'_>, mut event: impl FnMut(&Event, &Observed<'_>)) -> Option<FrameReport> {
        self.report.frames += 1;
        let (mut report, packets) = match examine(frame, &mut self.splitter) {
            Ok(examined) => examined,
            Err(Skipped::Unread(finding)) => {
                self.report.unread_frames += 1;
                self.add(&finding);
                return None;
            }
            Err(Skipped::Other(finding)) => {
                if let Some(finding) = finding {
                    self.add(&finding);
                }
                return None;
            }
        };
        self.follow(&mut report, packets, &mut event);
        self.report.add_frame(&report);
        report.findings.append(&mut self.judge.take_findings());
        for finding in &mut report.findings {
            finding.is_first = self.add(finding);
        }
        Some(report)
    }

    /// Gives a frame's packets to the judge.
    fn follow(
        &mut self,
        report: &mut FrameReport,
        packets: Packets<'_>,
        event: &mut impl FnMut(&Event, &Observed<'_>),
    ) {
        let meta = Meta {
            frame: report.index,
            time_ns: report.time_ns,
            src: report.src,
            dst: report.dst.ip(),
            ecn: report.tos & 3,
        };
        let mut judged = |o: Observed<'_>| {
            // A receiver drops it.
            if o.header.bth.dest_qp == Qpn::SMI {
                return None;
            }
            let found = self.judge.packet(&o)?;
            event(&found, &o);
            Some(found.conversation)
        };
        report.conversation = match packets {
            Packets::None => None,
            Packets::Damaged(packet) => self.judge.damaged(&Observed::new(meta, packet)),
            Packets::Whole(packet) => judged(Observed::new(meta, packet)),
            Packets::Cut(bytes, len) => Observed::cut(meta, bytes, len).ok().and_then(judged),
            Packets::CutSeveral(bytes) => {
                let first = Observed::cut(meta, bytes, bytes.len()).ok();
                first.and_then(|first| self.judge.unread(&first))
            }
            Packets::Several(first, rest) => {
                let mut conversation = first.and_then(|packet| judged(Observed::new(meta, packet)));
                for (nth, bytes) in rest.enumerate() {
                    let packet = segment(report, nth, bytes);
                    let found = packet.and_then(|packet| judged(Observed::new(meta, packet)));
                    conversation = conversation.or(found);
                }
                conversation
            }
        };
    }

    /// Notes that the capture can't be read further.
    pub fn broken(&mut self, error: &Error) {
        self.report.complete = false;
        let finding = Finding::of_file(self.report.frames + 1, Rule::FileBroken, error.to_string());
        self.add(&finding);
    }

    /// Notes how many frames the capture says it missed.
    pub const fn dropped(&mut self, frames: Option<u64>) {
        self.report.dropped = frames;
    }

    /// Judges what the end shows, and returns the report.
    pub fn finish(self) -> Report {
        self.finish_with_findings().0
    }

    /// Judges what the end shows, and returns the report, and the findings since they were taken, if they are kept.
    pub fn finish_with_findings(mut self) -> (Report, Vec<Finding>) {
        self.judge.finish();
        for mut finding in self.judge.take_findings() {
            finding.at_end = true;
            self.add(&finding);
        }
        self.report.conversations = self.judge.conversations();
        self.findings
            .map_conversations(|index| self.judge.conversation_of(index));
        self.report.packets_not_followed = self.judge.not_followed();
        (self.report.findings, self.report.findings_left_out) = self.findings.into_parts();
        self.report.judge();
        (self.report, self.kept.unwrap_or_default())
    }
}

/// Checks a capture file.
///
/// # Errors
/// When the file cannot be opened or is not a capture. A file that breaks off later gives a report with a
/// [`Rule::FileBroken`] finding.
pub fn check_file(path: impl AsRef<Path>) -> Result<Report, Error> {
    check_file_with(path, |_| {})
}

/// [`check_file`], handing each RoCEv2 frame to `each` as it is read.
///
/// # Errors
/// As [`check_file`].
pub fn check_file_with(path: impl AsRef<Path>, each: impl FnMut(&FrameReport)) -> Result<Report, Error> {
    let name = path.as_ref().display().to_string();
    Ok(check(Checker::new(name), Capture::open(path)?, each))
}

/// [`check_file_with`] for any reader; `name` is what the report calls it.
///
/// # Errors
/// When the bytes are not a capture.
pub fn check_reader(name: &str, reader: impl Read, each: impl FnMut(&FrameReport)) -> Result<Report, Error> {
    Ok(check(Checker::new(name), Capture::new(reader)?, each))
}

/// Checks the rest of a capture with a checker that may know more.
pub fn check<R: Read>(mut checker: Checker, mut capture: Capture<R>, mut each: impl FnMut(&FrameReport)) -> Report {
    while let Some(frame) = capture.next_frame() {
        match frame {
            Ok(frame) => {
                if let Some(report) = checker.frame(&frame, |_, _| {}) {
                    each(&report);
                }
            }
            Err(e) => checker.broken(&e),
        }
    }
    checker.dropped(capture.dropped());
    checker.finish()
}
