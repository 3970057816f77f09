//! Two readings of a capture: findings of a frame may follow from later ones.

use std::{
    collections::{BTreeMap, HashMap},
    io::Read,
};

use roce_bth::Opcode;

use crate::{
    checker::{Checker, Setup},
    finding::Finding,
    judge::{Endpoint, Event, Observed, Summary},
    reader::{Capture, Error, Frame},
    report::{FrameReport, Report},
};

/// Findings of earlier frames that are remembered; further ones are only counted.
const MAX_LATE: usize = 1 << 20;

/// First reading of a capture: the report, and what belongs to frames but shows later.
pub struct Survey {
    report: Report,
    setup: Setup,
    /// Findings that show at later frames, or at the end, by frame.
    late: BTreeMap<u64, Vec<Finding>>,
    late_kept: usize,
    late_left_out: u64,
    /// Conversations that are a part of others.
    merged: HashMap<usize, usize>,
    /// Conversations that messages of the connection manager belong to, by frame.
    messages: HashMap<u64, usize>,
}

/// Frame in the second reading.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reviewed {
    /// Number, from 1.
    pub index: u64,
    /// Report; `None`: the frame is not RoCEv2, or could not be read.
    pub report: Option<FrameReport>,
    /// All its findings, also those that later frames and the end of the capture show.
    pub findings: Vec<Finding>,
    /// Conversation, as in the survey's report.
    pub conversation: Option<usize>,
    /// Queue pairs of the conversation.
    pub ends: Option<[Endpoint; 2]>,
    /// Opcodes of its packets, each once.
    pub opcodes: Vec<Opcode>,
}

impl Survey {
    /// Reads a capture to its end; `name` is what the report calls it, `setup` what its checkers begin with.
    pub fn new<R: Read>(name: impl Into<String>, setup: &Setup, capture: &mut Capture<R>) -> Self {
        let mut survey = Self {
            report: Report::default(),
            setup: setup.clone(),
            late: BTreeMap::new(),
            late_kept: 0,
            late_left_out: 0,
            merged: HashMap::new(),
            messages: HashMap::new(),
        };
        let mut checker = checker(name, setup);
        let mut last = 0;
        while let Some(frame) = capture.next_frame() {
            match frame {
                Ok(frame) => {
                    last = frame.index;
                    checker.frame(&frame, |_, _| {});
                    survey.keep(checker.take_findings(), |finding| finding.frame != last);
                }
                Err(e) => checker.broken(&e),
            }
        }
        checker.dropped(capture.dropped());
        survey.merged = checker.judge().merged().collect();
        survey.messages = checker.judge().connection_messages().collect();
        let (report, findings) = checker.finish_with_findings();
        survey.keep(findings, |finding| finding.frame <= last);
        survey.report = report;
        survey
    }

    /// Returns the report on the whole capture.
    pub const fn report(&self) -> &Report {
        &self.report
    }

    /// Returns a conversation of the report.
    pub fn conversation(&self, index: usize) -> Option<&Summary> {
        // They are in the order of their indexes.
        let at = self.report.conversations.binary_search_by_key(&index, |c| c.index);
        self.report.conversations.get(at.ok()?)
    }

    /// Returns conversation and endpoint that an event of the second reading with these belongs to: two conversations may turn
    /// out to be one.
    pub fn endpoint_of(&self, conversation: usize, sender: usize) -> (usize, usize) {
        match self.merged.get(&conversation) {
            // It had the requests of the other's second endpoint.
            Some(whole) => (*whole, 1 - sender.min(1)),
            None => (conversation, sender),
        }
    }

    /// Returns how many findings of earlier frames were too many to remember.
    pub const fn findings_left_out(&self) -> u64 {
        self.late_left_out
    }

    /// Reads the capture again, from its beginning, and hands each frame to `each`. Ends where the first reading did.
    ///
    /// # Errors
    /// The first error of `each`.
    pub fn review<R: Read, E>(
        &self,
        capture: &mut Capture<R>,
        mut each: impl FnMut(&Frame<'_>, &Reviewed) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut reviewer = self.reviewer();
        while let Some(Ok(frame)) = capture.next_frame() {
            let reviewed = reviewer.frame(&frame, |_, _| {});
            each(&frame, &reviewed)?;
        }
        Ok(())
    }

    /// Begins the second reading.
    pub fn reviewer(&self) -> Reviewer<'_> {
        Reviewer {
            checker: checker(self.report.file.as_str(), &self.setup),
            survey: Some(self),
        }
    }

    fn keep(&mut self, findings: Vec<Finding>, is_late: impl Fn(&Finding) -> bool) {
        for finding in findings.into_iter().filter(is_late) {
            if self.late_kept < MAX_LATE {
                self.late_kept += 1;
                self.late.entry(finding.frame).or_default().push(finding);
            } else {
                self.late_left_out += 1;
            }
        }
    }
}

fn checker(name: impl Into<String>, setup: &Setup) -> Checker {
    let mut checker = Checker::with(name, setup);
    checker.keep_findings();
    checker
}

/// Second reading of a capture, frame by frame; or the only one, of a capture that goes on.
pub struct Reviewer<'a> {
    checker: Checker,
    survey: Option<&'a Survey>,
}

impl Reviewer<'static> {
    /// Begins the only reading. The findings of a frame are those that show with it, also of earlier frames.
    pub fn live(name: impl Into<String>, setup: &Setup) -> Self {
        Self {
            checker: checker(name, setup),
            survey: None,
        }
    }
}

impl Reviewer<'_> {
    /// Checks the next frame, and calls `each` with its packets that belong to a conversation.
    pub fn frame(&mut self, frame: &Frame<'_>, mut each: impl FnMut(&Event, &Observed<'_>)) -> Reviewed {
        let mut opcodes = vec![];
        let report = self.checker.frame(frame, |event, observed| {
            if !opcodes.contains(&event.opcode) {
                opcodes.push(event.opcode);
            }
            each(event, observed);
        });
        let first = report.as_ref().and_then(|report| report.opcode_code);
        if let Some(opcode) = first
            .and_then(Opcode::from_byte)
            .filter(|first| !opcodes.contains(first))
        {
            opcodes.push(opcode);
        }
        let mut findings = self.checker.take_findings();
        let known = report.as_ref().and_then(|report| report.conversation);
        let (conversation, ends) = match self.survey {
            Some(survey) => {
                findings.retain(|finding| finding.frame == frame.index);
                findings.extend(survey.late.get(&frame.index).into_iter().flatten().cloned());
                let known = known.or_else(|| survey.messages.get(&frame.index).copied());
                let found = known.map(|index| survey.merged.get(&index).copied().unwrap_or(index));
                let summary = found.and_then(|index| survey.conversation(index));
                (found, summary.map(|summary| summary.ends))
            }
            None => {
                let judge = self.checker.judge();
                let found = known.map(|index| judge.conversation_of(index));
                (found, found.and_then(|index| judge.ends(index)))
            }
        };
        Reviewed {
            index: frame.index,
            report,
            findings,
            conversation,
            ends,
            opcodes,
        }
    }

    /// Notes that the capture can't be read further.
    pub fn broken(&mut self, error: &Error) {
        self.checker.broken(error);
    }

    /// Judges what the end shows. Returns the report, and the findings since the last frame.
    pub fn finish(self) -> (Report, Vec<Finding>) {
        self.checker.finish_with_findings()
    }
}
