//! Reports on frames and files.

use std::net::SocketAddr;

use serde::Serialize;

use crate::{
    finding::Finding, judge::Summary, rule::Rule, severity::Severity, summary::FrameSummary, verdict::Verdict,
};

/// A frame's ICRC.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Icrc {
    /// Right.
    Ok,
    /// Wrong.
    Bad,
    /// Not checkable: the frame is cut, a fragment, or malformed.
    Unchecked,
}

/// A RoCEv2 frame: UDP to port 4791, as such or in a tunnel.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct FrameReport {
    /// From 1, as Wireshark counts.
    pub index: u64,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: SocketAddr,
    /// DSCP and ECN of the IP header.
    pub tos: u8,
    /// Conversation, an index into the report's; `None`: not followed.
    pub conversation: Option<usize>,
    /// The opcode's name, when the packet parses. Of the first packet, if there are several.
    pub opcode: Option<&'static str>,
    /// The opcode's code, likewise.
    pub opcode_code: Option<u8>,
    /// Destination queue pair, likewise.
    pub dest_qp: Option<u32>,
    /// Packet sequence number, likewise.
    pub psn: Option<u32>,
    /// Payload bytes without pad, likewise.
    pub payload_len: Option<usize>,
    /// One line: opcode, queue pair, PSN, extended headers; or why it does not parse.
    pub summary: FrameSummary,
    /// How many RoCEv2 packets are in the frame: more than 1 when it was captured before segmentation or after GRO.
    pub packets: u64,
    /// Whether the ICRC is right; of several packets, whether all are.
    pub icrc: Icrc,
    /// Faults and oddities.
    pub findings: Vec<Finding>,
}

impl FrameReport {
    pub(crate) fn find(&mut self, rule: Rule, text: impl Into<String>) {
        let peers = (self.src.ip(), self.dst.ip());
        self.findings.push(Finding::new(self.index, rule, peers, text));
    }

    /// Returns whether a receiver would drop it: it breaks a rule of frames, not of conversations.
    pub fn is_bad(&self) -> bool {
        let of_frame = self.findings.iter().filter(|finding| finding.conversation.is_none());
        of_frame
            .clone()
            .any(|finding| finding.severity == Severity::Error && finding.rule != Rule::GsiHeader)
    }
}

/// The summary of a file. Its JSON keys are stable.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Report {
    /// The file's name as given.
    pub file: String,
    /// Frames in it.
    pub frames: u64,
    /// Frames that are UDP to port 4791, as such or in a tunnel.
    pub roce_frames: u64,
    /// RoCEv2 packets in those; more than frames where segmentation offloads were at work.
    pub roce_packets: u64,
    /// Frames whose ICRC is right (of all packets in them).
    pub icrc_ok: u64,
    /// Frames whose ICRC is wrong.
    pub icrc_bad: u64,
    /// Frames whose ICRC could not be checked.
    pub icrc_unchecked: u64,
    /// Frames that a receiver would drop, for whatever reason.
    pub bad_frames: u64,
    /// Frames of which it can't be told whether they are RoCEv2: their link type is not read, or they are cut before it shows.
    pub unread_frames: u64,
    /// Whether the file could be read to its end.
    pub complete: bool,
    /// Verdict that follows from these numbers.
    pub verdict: Verdict,
    /// Conversations with their verdicts.
    pub conversations: Vec<Summary>,
    /// Packets of conversations that were too many to follow.
    pub packets_not_followed: u64,
    /// Frames that the capture says it missed.
    pub dropped: Option<u64>,
    /// Findings, each rule once for each peer, at most [`MAX_FINDINGS`](crate::MAX_FINDINGS).
    pub findings: Vec<Finding>,
    /// How many findings there were beyond.
    pub findings_left_out: u64,
}

impl Report {
    /// Draws the verdict from the numbers.
    pub(crate) fn judge(&mut self) {
        let broken = self.findings.iter().any(|finding| finding.severity == Severity::Error);
        let of_conversations = self.conversations.iter().map(|c| c.verdict).max();
        self.verdict = if broken || self.bad_frames > 0 || !self.complete {
            Verdict::Bad
        } else if self.unread_frames > 0
            || self.icrc_unchecked > 0
            || self.roce_frames == 0
            || self.packets_not_followed > 0
        {
            Verdict::NotChecked
        } else {
            of_conversations.unwrap_or(Verdict::Good)
        };
    }

    pub(crate) fn add_frame(&mut self, frame: &FrameReport) {
        self.roce_frames += 1;
        self.roce_packets += frame.packets;
        match frame.icrc {
            Icrc::Ok => self.icrc_ok += 1,
            Icrc::Bad => self.icrc_bad += 1,
            Icrc::Unchecked => self.icrc_unchecked += 1,
        }
        self.bad_frames += u64::from(frame.is_bad());
    }
}
