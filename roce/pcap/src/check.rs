//! Checks of the frames of a capture: addresses, lengths, headers, ICRCs.

use std::{io::Read, net::SocketAddr, path::Path};

use roce_bth::{Opcode, Packet, ParseError, Psn, Qpn, ROCE_UDP_PORT};
use roce_icrc::{Flow, check_datagram};
use roce_port::cm::Translation;
use serde::Serialize;

use crate::{
    frame::{self, Carrier, Datagram, Dissected, Ip, Undissected},
    frame_error::FrameError,
    reader::{Capture, Error, Frame},
    segments::{self, MIN_PACKET, Splitter},
    summary,
};

/// How many findings a [`Report`] holds; more are only counted.
pub const MAX_FINDINGS: usize = 10_000;

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A receiver drops the frame, or the file is broken.
    Error,
    /// Worth knowing: the frame may be fine.
    Note,
}

/// Kind of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The ICRC is wrong.
    IcrcBad,
    /// The ICRC is right for other addresses, which the request names as its own: they were translated (NAT).
    Translated,
    /// Lengths or headers contradict each other.
    Malformed,
    /// The opcode is not in IBTA table 38.
    UnknownOpcode,
    /// A fragment of an IP datagram: RoCEv2 packets are not fragmented (IBTA A17.4.5.2).
    Fragment,
    /// An IPv4 header with options: RoCEv2 has none (IBTA A17.4.5.2).
    IpOptions,
    /// A packet for QP0, which RoCE does not have (IBTA A17.9).
    Qp0,
    /// DF is clear.
    DfClear,
    /// The IPv4 header checksum is wrong (a sender that leaves it to the NIC shows this).
    IpChecksum,
    /// The capture cut the frame (`tcpdump -s`), so its ICRC could not be checked.
    Truncated,
    /// Several packets in one frame: captured before segmentation or after GRO.
    Segments,
    /// RoCE version 1.
    RoceV1,
    /// A link type that is not read.
    LinkType,
    /// The packet was carried by others (VXLAN, GRE, IP in IP), or may be, in a tunnel that is not read.
    Tunnel,
    /// The file ends early or contradicts itself; what is behind was not seen.
    File,
}

impl Kind {
    /// How bad it is.
    pub const fn severity(self) -> Severity {
        match self {
            Self::IcrcBad | Self::Malformed | Self::UnknownOpcode | Self::Fragment => Severity::Error,
            Self::IpOptions | Self::Qp0 | Self::File => Severity::Error,
            Self::DfClear | Self::IpChecksum | Self::Truncated | Self::Segments => Severity::Note,
            Self::RoceV1 | Self::LinkType | Self::Tunnel | Self::Translated => Severity::Note,
        }
    }
}

/// Fault or oddity of a capture.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// The frame's number, from 1; for [`Kind::File`] that of the first frame that could not be read.
    pub frame: u64,
    /// Its kind.
    pub kind: Kind,
    /// How bad it is.
    pub severity: Severity,
    /// In words.
    pub text: String,
}

impl Finding {
    fn new(frame: u64, kind: Kind, text: impl Into<String>) -> Self {
        let text = text.into();
        let severity = kind.severity();
        Self {
            frame,
            kind,
            severity,
            text,
        }
    }
}

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
    pub summary: String,
    /// How many RoCEv2 packets are in the frame: more than 1 when it was captured before segmentation or after GRO.
    pub packets: u64,
    /// Whether the ICRC is right; of several packets, whether all are.
    pub icrc: Icrc,
    /// Faults and oddities.
    pub findings: Vec<Finding>,
}

impl FrameReport {
    fn find(&mut self, kind: Kind, text: impl Into<String>) {
        self.findings.push(Finding::new(self.index, kind, text));
    }

    /// Returns whether a receiver would drop it.
    pub fn is_bad(&self) -> bool {
        self.findings.iter().any(|f| f.severity == Severity::Error)
    }
}

/// Verdict on a capture; the worst is greatest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All RoCEv2 frames were checked and are right.
    Good,
    /// Nothing is bad, but some frames could not be checked or read, or there is no RoCEv2 frame.
    #[default]
    NotChecked,
    /// A receiver would drop a frame, or the file breaks off.
    Bad,
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
    /// The first [`MAX_FINDINGS`].
    pub findings: Vec<Finding>,
    /// How many findings there were beyond.
    pub findings_left_out: u64,
}

impl Report {
    const fn judge(&self) -> Verdict {
        if self.bad_frames > 0 || !self.complete {
            Verdict::Bad
        } else if self.unread_frames > 0 || self.icrc_unchecked > 0 || self.roce_frames == 0 {
            Verdict::NotChecked
        } else {
            Verdict::Good
        }
    }

    fn add(&mut self, findings: &[Finding]) {
        let room = MAX_FINDINGS - self.findings.len();
        let kept = room.min(findings.len());
        self.findings.extend_from_slice(&findings[..kept]);
        self.findings_left_out += (findings.len() - kept) as u64;
    }

    fn add_frame(&mut self, frame: &FrameReport) {
        self.roce_frames += 1;
        self.roce_packets += frame.packets;
        match frame.icrc {
            Icrc::Ok => self.icrc_ok += 1,
            Icrc::Bad => self.icrc_bad += 1,
            Icrc::Unchecked => self.icrc_unchecked += 1,
        }
        self.bad_frames += u64::from(frame.is_bad());
        self.add(&frame.findings);
    }
}

/// Checks every frame of a capture file.
///
/// # Errors
/// When the file cannot be opened or is not a capture. A file that breaks off later gives a report with a
/// [`Kind::File`] finding.
pub fn check_file(path: impl AsRef<Path>) -> Result<Report, Error> {
    check_file_with(path, |_| {})
}

/// [`check_file`], handing each RoCEv2 frame to `each` as it is read.
///
/// # Errors
/// Checks a file as [`check_file`] does, and reports each frame.
pub fn check_file_with(path: impl AsRef<Path>, each: impl FnMut(&FrameReport)) -> Result<Report, Error> {
    let name = path.as_ref().display().to_string();
    check(&name, Capture::open(path)?, each)
}

/// [`check_file_with`] for any reader; `name` is what the report calls it.
///
/// # Errors
/// When the bytes are not a capture.
pub fn check_reader(name: &str, reader: impl Read, each: impl FnMut(&FrameReport)) -> Result<Report, Error> {
    check(name, Capture::new(reader)?, each)
}

fn check<R: Read>(name: &str, mut capture: Capture<R>, mut each: impl FnMut(&FrameReport)) -> Result<Report, Error> {
    let mut report = Report {
        file: name.to_owned(),
        complete: true,
        ..Report::default()
    };
    let mut splitter = Splitter::default();
    while let Some(frame) = capture.next_frame() {
        let frame = match frame {
            Ok(frame) => frame,
            Err(e) => {
                report.complete = false;
                report.add(&[Finding::new(report.frames + 1, Kind::File, e.to_string())]);
                break;
            }
        };
        report.frames += 1;
        match examine(&frame, &mut splitter) {
            Examined::Roce(frame) => {
                report.add_frame(&frame);
                each(&frame);
            }
            Examined::Unread(finding) => {
                report.unread_frames += 1;
                report.add(&[finding]);
            }
            Examined::Other(finding) => report.add(finding.as_slice()),
        }
    }
    report.verdict = report.judge();
    Ok(report)
}

enum Examined {
    Roce(Box<FrameReport>),
    /// Nobody knows.
    Unread(Finding),
    /// Not RoCEv2, as far as can be seen.
    Other(Option<Finding>),
}

fn examine(frame: &Frame<'_>, splitter: &mut Splitter) -> Examined {
    match frame::dissect(frame.link, frame.data) {
        Ok(dissected) if dissected.datagram.dst.port() == ROCE_UDP_PORT => {
            Examined::Roce(Box::new(roce_frame(frame, &dissected, splitter)))
        }
        Ok(_) => Examined::Other(None),
        Err(unread) => undissected(frame, &unread),
    }
}

/// A frame that could not be taken apart to its end.
fn undissected(frame: &Frame<'_>, unread: &Undissected) -> Examined {
    let finding = |kind, text: String| Finding::new(frame.index, kind, text);
    let text = unread.error.to_string();
    match unread.error {
        FrameError::RoceV1 => Examined::Other(Some(finding(Kind::RoceV1, text))),
        FrameError::LinkType(_) | FrameError::ErfType(_) => Examined::Unread(finding(Kind::LinkType, text)),
        FrameError::Tunnel(_) => Examined::Unread(finding(Kind::Tunnel, text)),
        FrameError::Truncated { .. } => {
            let text = match unread.carriers.last() {
                Some(carrier) => format!("what {} carries cannot be told apart: {text}", carrier.name),
                None => format!("cannot be told apart: {text}"),
            };
            let finding = finding(Kind::Truncated, text);
            match (may_be_cut(frame, &unread.carriers), unread.carriers.is_empty()) {
                (true, _) => Examined::Unread(finding),
                // The frame itself is too short for anything.
                (false, true) => Examined::Other(Some(finding)),
                // To the port of a tunnel, and not in it.
                (false, false) => Examined::Other(None),
            }
        }
        // Later fragments, broken headers of some protocol, ARP and the rest.
        _ => Examined::Other(None),
    }
}

/// Whether the capture cut the frame, or a switch that made a copy of it may have.
fn may_be_cut(frame: &Frame<'_>, carriers: &[Carrier]) -> bool {
    frame.is_cut() || carriers.iter().any(|carrier| carrier.is_mirror)
}

/// The tunnels that a packet was in, the innermost first.
fn tunnels(carriers: &[Carrier]) -> String {
    let each = carriers.iter().rev();
    let texts: Vec<_> = each
        .map(|c| format!("in {} from {} to {}", c.name, c.src, c.dst))
        .collect();
    texts.join(", ")
}

fn roce_frame(frame: &Frame<'_>, dissected: &Dissected<'_>, splitter: &mut Splitter) -> FrameReport {
    let datagram = &dissected.datagram;
    let mut report = FrameReport {
        index: frame.index,
        time_ns: frame.time_ns,
        src: datagram.src,
        dst: datagram.dst,
        opcode: None,
        opcode_code: None,
        dest_qp: None,
        psn: None,
        payload_len: None,
        summary: String::new(),
        packets: 1,
        icrc: Icrc::Unchecked,
        findings: vec![],
    };
    if !dissected.carriers.is_empty() {
        report.find(Kind::Tunnel, tunnels(&dissected.carriers));
    }
    ip_findings(&mut report, &datagram.ip);
    match &dissected.problem {
        None => complete_packet(&mut report, datagram, splitter),
        Some(problem) => {
            let kind = match problem {
                FrameError::Truncated { .. } if may_be_cut(frame, &dissected.carriers) => Kind::Truncated,
                FrameError::Fragment { .. } => Kind::Fragment,
                _ => Kind::Malformed,
            };
            report.summary = match datagram.payload.first().copied().and_then(Opcode::from_byte) {
                Some(opcode) => format!("{opcode}, incomplete"),
                None => "incomplete".to_owned(),
            };
            report.find(kind, problem.to_string());
        }
    }
    report
}

fn ip_findings(report: &mut FrameReport, ip: &Ip) {
    let Ip::V4 {
        dont_fragment,
        ihl,
        checksum_ok,
        ..
    } = *ip
    else {
        return;
    };
    if ihl != 5 {
        report.find(Kind::IpOptions, format!("IPv4 header of {ihl} words, 5 expected"));
    }
    if !dont_fragment {
        report.find(Kind::DfClear, "DF is clear");
    }
    if !checksum_ok {
        report.find(Kind::IpChecksum, "the IPv4 header checksum is wrong");
    }
}

/// The ICRC and the headers of a datagram that is all there.
fn complete_packet(report: &mut FrameReport, datagram: &Datagram<'_>, splitter: &mut Splitter) {
    let Some(checked) = check_datagram(datagram.datagram) else {
        // Too short for a BTH and an ICRC, which the parser puts into words; or with extension headers of IPv6, which
        // senders do not have, so that the ICRC is right without.
        let flow = Flow::try_from((datagram.src, datagram.dst)).ok();
        if flow.is_some_and(|flow| datagram.payload.len() >= MIN_PACKET && flow.verify(0, datagram.payload)) {
            report.icrc = Icrc::Ok;
        }
        describe(report, datagram.payload);
        return;
    };
    if checked.is_ok() {
        report.icrc = Icrc::Ok;
        describe(report, datagram.payload);
        return;
    }
    let (src, dst, id) = (datagram.src, datagram.dst, datagram.identification());
    if let Some(size) = splitter.size(src, dst, id, datagram.payload) {
        segmented(report, datagram, size);
        return;
    }
    report.icrc = Icrc::Bad;
    describe(report, datagram.payload);
    let text = format!(
        "ICRC {:08x} on the wire, {:08x} computed",
        checked.carried.swap_bytes(),
        checked.computed.swap_bytes()
    );
    report.find(Kind::IcrcBad, text);
    let flow = Flow::try_from((src, dst)).ok();
    if let Some(found) = flow.and_then(|flow| Translation::of(&flow, Some(id), datagram.payload)) {
        let text = format!("{found}: the ICRC is right for these addresses");
        report.find(Kind::Translated, text);
    }
}

/// A frame with packets of `size` bytes end to end.
fn segmented(report: &mut FrameReport, datagram: &Datagram<'_>, size: usize) {
    let packets = datagram.payload.chunks(size);
    report.packets = packets.len() as u64;
    report.icrc = Icrc::Ok;
    let text = format!("{} packets of up to {size} bytes in one frame", packets.len());
    report.find(Kind::Segments, text);
    describe(report, &datagram.payload[..size.min(datagram.payload.len())]);
    for (nth, packet) in packets.enumerate() {
        let place = format!("packet {} of {}", nth + 1, report.packets);
        if !segments::segment_ok(datagram.src, datagram.dst, datagram.identification(), nth, packet) {
            report.icrc = Icrc::Bad;
            let text = format!("{place}: wrong ICRC");
            report.find(Kind::IcrcBad, text);
        }
        // The first has been described.
        if nth > 0
            && let Some((kind, text)) = packet_finding(packet)
        {
            let text = format!("{place}: {text}");
            report.find(kind, text);
        }
    }
}

/// Returns the fault of a packet's headers.
fn packet_finding(packet: &[u8]) -> Option<(Kind, String)> {
    match Packet::parse(packet) {
        Ok(packet) if packet.header.bth.dest_qp == Qpn::SMI => {
            Some((Kind::Qp0, "a packet for QP0, which RoCE drops".to_owned()))
        }
        Ok(_) => None,
        Err(e @ ParseError::UnknownOpcode(_)) => Some((Kind::UnknownOpcode, e.to_string())),
        Err(e) => Some((Kind::Malformed, e.to_string())),
    }
}

fn describe(report: &mut FrameReport, packet: &[u8]) {
    match Packet::parse(packet) {
        Ok(parsed) => {
            let bth = &parsed.header.bth;
            report.opcode = Some(bth.opcode.info().name);
            report.opcode_code = Some(bth.opcode as u8);
            report.dest_qp = Some(bth.dest_qp.value());
            report.psn = Some(Psn::value(bth.psn));
            report.payload_len = Some(parsed.payload.len());
            report.summary = summary::line(&parsed);
        }
        Err(e) => report.summary = e.to_string(),
    }
    if let Some((kind, text)) = packet_finding(packet) {
        report.find(kind, text);
    }
}
