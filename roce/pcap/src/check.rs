//! Checks of the frames of a capture: addresses, lengths, headers, ICRCs.

use std::slice::Chunks;

use roce_bth::{ICRC_LEN, MAX_HEADER_LEN, Opcode, Packet, ParseError, Psn, Qpn, ROCE_UDP_PORT};
use roce_icrc::{Flow, check_datagram};
use roce_port::cm::Translation;

use crate::{
    finding::Finding,
    frame::{self, Carrier, Datagram, Dissected, Ip, Undissected},
    frame_error::FrameError,
    reader::Frame,
    report::{FrameReport, Icrc},
    rule::Rule,
    segments::{self, MIN_PACKET, Splitter},
    summary::{Excerpt, FrameSummary},
};

/// Bytes of the UDP header.
const UDP_HEADER_LEN: usize = 8;
/// Most bytes of a packet: the largest path MTU with headers, pad and ICRC.
const MAX_PACKET: usize = 4096 + MAX_HEADER_LEN + ICRC_LEN;

/// Reason why a frame is not judged.
pub(crate) enum Skipped {
    /// Nobody knows whether it is RoCEv2.
    Unread(Finding),
    /// It is not RoCEv2, as far as can be seen.
    Other(Option<Finding>),
}

/// Packets of a frame that a receiver would take, as far as can be seen.
pub(crate) enum Packets<'a> {
    /// None: they are damaged, or can't be told apart.
    None,
    /// One whose ICRC is wrong.
    Damaged(Packet<'a>),
    /// One.
    Whole(Packet<'a>),
    /// The bytes that the capture has of one with so many on the wire.
    Cut(&'a [u8], usize),
    /// The bytes that the capture has of several. How many they are can't be told.
    CutSeveral(&'a [u8]),
    /// The first of several, if it can be read, and the bytes of the others.
    Several(Option<Packet<'a>>, Chunks<'a, u8>),
}

/// Checks a frame by itself.
pub(crate) fn examine<'a>(frame: &Frame<'a>, splitter: &mut Splitter) -> Result<(FrameReport, Packets<'a>), Skipped> {
    match frame::dissect(frame.link, frame.data) {
        Ok(dissected) if dissected.datagram.dst.port() == ROCE_UDP_PORT => Ok(roce_frame(frame, &dissected, splitter)),
        Ok(_) => Err(Skipped::Other(None)),
        Err(unread) => Err(undissected(frame, &unread)),
    }
}

/// Returns what the capture has of a datagram of which it has only the first bytes, if its length can be known.
fn cut_packet<'a>(datagram: &Datagram<'a>) -> Packets<'a> {
    let Datagram { datagram, payload, .. } = *datagram;
    // The UDP header, which says how long it was, is right before the payload.
    let header = datagram.len() - payload.len();
    let udp_len = datagram.get(header - 4..).and_then(<[u8]>::first_chunk);
    let len = udp_len.map_or(0, |len| usize::from(u16::from_be_bytes(*len)));
    match len.checked_sub(UDP_HEADER_LEN) {
        Some(len) if len > MAX_PACKET => Packets::CutSeveral(payload),
        Some(len) if len > payload.len() => Packets::Cut(payload, len),
        _ => Packets::None,
    }
}

/// A frame that could not be taken apart to its end.
fn undissected(frame: &Frame<'_>, unread: &Undissected) -> Skipped {
    let finding = |rule, text: String| Finding::of_file(frame.index, rule, text);
    let text = unread.error.to_string();
    match unread.error {
        FrameError::RoceV1 => Skipped::Other(Some(finding(Rule::FrameRoceV1, text))),
        FrameError::LinkType(_) | FrameError::ErfType(_) => Skipped::Unread(finding(Rule::FrameLinkType, text)),
        FrameError::Tunnel(_) => Skipped::Unread(finding(Rule::FrameTunnel, text)),
        FrameError::Truncated { .. } => {
            let text = match unread.carriers.last() {
                Some(carrier) => format!("what {} carries cannot be told apart: {text}", carrier.name),
                None => format!("cannot be told apart: {text}"),
            };
            let finding = finding(Rule::FrameCut, text);
            match (may_be_cut(frame, &unread.carriers), unread.carriers.is_empty()) {
                (true, _) => Skipped::Unread(finding),
                // The frame itself is too short for anything.
                (false, true) => Skipped::Other(Some(finding)),
                // To the port of a tunnel, and not in it.
                (false, false) => Skipped::Other(None),
            }
        }
        // Later fragments, broken headers of some protocol, ARP and the rest.
        _ => Skipped::Other(None),
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

fn roce_frame<'a>(frame: &Frame<'_>, dissected: &Dissected<'a>, splitter: &mut Splitter) -> (FrameReport, Packets<'a>) {
    let datagram = &dissected.datagram;
    let mut report = FrameReport {
        index: frame.index,
        time_ns: frame.time_ns,
        src: datagram.src,
        dst: datagram.dst,
        tos: match datagram.ip {
            Ip::V4 { tos, .. } => tos,
            Ip::V6 { traffic_class } => traffic_class,
        },
        conversation: None,
        opcode: None,
        opcode_code: None,
        dest_qp: None,
        psn: None,
        payload_len: None,
        summary: FrameSummary::Incomplete(None),
        packets: 1,
        icrc: Icrc::Unchecked,
        findings: vec![],
    };
    if !dissected.carriers.is_empty() {
        report.find(Rule::FrameTunnel, tunnels(&dissected.carriers));
    }
    ip_findings(&mut report, &datagram.ip);
    let packets = match &dissected.problem {
        None => complete_packet(&mut report, datagram, splitter),
        Some(problem) => {
            let rule = match problem {
                FrameError::Truncated { .. } if may_be_cut(frame, &dissected.carriers) => Rule::FrameCut,
                FrameError::Fragment { .. } => Rule::FrameFragment,
                _ => Rule::FrameMalformed,
            };
            let opcode = datagram.payload.first().copied().and_then(Opcode::from_byte);
            report.summary = FrameSummary::Incomplete(opcode);
            report.find(rule, problem.to_string());
            match problem {
                FrameError::Truncated { .. } => cut_packet(datagram),
                _ => Packets::None,
            }
        }
    };
    (report, packets)
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
        report.find(Rule::FrameIpOptions, format!("IPv4 header of {ihl} words, 5 expected"));
    }
    if !dont_fragment {
        report.find(Rule::FrameDfClear, "DF is clear");
    }
    if !checksum_ok {
        report.find(Rule::FrameIpChecksum, "the IPv4 header checksum is wrong");
    }
}

/// Checks ICRC and headers of a datagram that is all there. Returns its packets.
fn complete_packet<'a>(report: &mut FrameReport, datagram: &Datagram<'a>, splitter: &mut Splitter) -> Packets<'a> {
    let (src, dst, id) = (datagram.src, datagram.dst, datagram.identification());
    let Some(checked) = check_datagram(datagram.datagram) else {
        // Too short for a BTH and an ICRC, which the parser puts into words; or with extension headers of IPv6, which
        // senders do not have, so that the ICRC is right without.
        let flow = Flow::try_from((src, dst)).ok();
        if flow.is_some_and(|flow| datagram.payload.len() >= MIN_PACKET && flow.verify(0, datagram.payload)) {
            report.icrc = Icrc::Ok;
        }
        let packet = describe(report, datagram.payload);
        return match report.icrc {
            Icrc::Ok => packet.map_or(Packets::None, Packets::Whole),
            _ => Packets::None,
        };
    };
    if checked.is_ok() {
        report.icrc = Icrc::Ok;
        return describe(report, datagram.payload).map_or(Packets::None, Packets::Whole);
    }
    if let Some(size) = splitter.size(src, dst, id, datagram.payload) {
        return segmented(report, datagram, size);
    }
    report.icrc = Icrc::Bad;
    let packet = describe(report, datagram.payload);
    let text = format!(
        "ICRC {:08x} on the wire, {:08x} computed",
        checked.carried.swap_bytes(),
        checked.computed.swap_bytes()
    );
    report.find(Rule::FrameIcrc, text);
    let flow = Flow::try_from((src, dst)).ok();
    if let Some(found) = flow.and_then(|flow| Translation::of(&flow, Some(id), datagram.payload)) {
        let text = format!("{found}: the ICRC is right for these addresses");
        report.find(Rule::FrameTranslated, text);
    }
    packet.map_or(Packets::None, Packets::Damaged)
}

/// Checks a frame with packets of `size` bytes end to end. Returns them if all ICRCs are right.
fn segmented<'a>(report: &mut FrameReport, datagram: &Datagram<'a>, size: usize) -> Packets<'a> {
    let mut packets = datagram.payload.chunks(size);
    report.packets = packets.len() as u64;
    report.icrc = Icrc::Ok;
    let text = format!("{} packets of up to {size} bytes in one frame", packets.len());
    report.find(Rule::FrameSegments, text);
    for (nth, packet) in packets.clone().enumerate() {
        if !segments::segment_ok(datagram.src, datagram.dst, datagram.identification(), nth, packet) {
            report.icrc = Icrc::Bad;
            let text = format!("packet {} of {}: wrong ICRC", nth + 1, report.packets);
            report.find(Rule::FrameIcrc, text);
        }
    }
    let first = packets.next().and_then(|packet| describe(report, packet));
    match report.icrc {
        Icrc::Ok => Packets::Several(first, packets),
        _ => {
            for (nth, packet) in packets.enumerate() {
                segment(report, nth, packet);
            }
            Packets::None
        }
    }
}

/// Reads one of several packets in a frame, the `nth` behind the first, and reports its faults.
pub(crate) fn segment<'a>(report: &mut FrameReport, nth: usize, packet: &'a [u8]) -> Option<Packet<'a>> {
    let parsed = Packet::parse(packet);
    if let Some((rule, text)) = fault(&parsed) {
        report.find(rule, format!("packet {} of {}: {text}", nth + 2, report.packets));
    }
    parsed.ok()
}

/// Returns the fault of a packet's headers.
fn fault(packet: &Result<Packet<'_>, ParseError>) -> Option<(Rule, String)> {
    match packet {
        Ok(packet) if packet.header.bth.dest_qp == Qpn::SMI => {
            Some((Rule::FrameQp0, "a packet for QP0, which RoCE drops".to_owned()))
        }
        Ok(_) => None,
        Err(e @ ParseError::UnknownOpcode(_)) => Some((Rule::FrameOpcode, e.to_string())),
        Err(e) => Some((Rule::FrameMalformed, e.to_string())),
    }
}

/// Reads a frame's first packet into its report.
fn describe<'a>(report: &mut FrameReport, packet: &'a [u8]) -> Option<Packet<'a>> {
    let parsed = Packet::parse(packet);
    match parsed {
        Ok(packet) => {
            let bth = &packet.header.bth;
            report.opcode = Some(bth.opcode.info().name);
            report.opcode_code = Some(bth.opcode as u8);
            report.dest_qp = Some(bth.dest_qp.value());
            report.psn = Some(Psn::value(bth.psn));
            report.payload_len = Some(packet.payload.len());
            report.summary = FrameSummary::Packet(Excerpt::new(&packet));
        }
        Err(e) => report.summary = FrameSummary::Malformed(e),
    }
    if let Some((rule, text)) = fault(&parsed) {
        report.find(rule, text);
    }
    parsed.ok()
}
