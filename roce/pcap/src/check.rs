//! Checks of the frames of a capture: addresses, lengths, headers, ICRCs.

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
    summary,
};

/// Bytes of the UDP header.
const UDP_HEADER_LEN: usize = 8;
/// Most bytes of a packet: the largest path MTU with headers, pad and ICRC.
const MAX_PACKET: usize = 4096 + MAX_HEADER_LEN + ICRC_LEN;

/// Kind of a frame.
pub(crate) enum Examined<'a> {
    /// RoCEv2, with the packets that a receiver would take.
    Roce(Box<FrameReport>, Packets<'a>),
    /// Nobody knows.
    Unread(Finding),
    /// Not RoCEv2, as far as can be seen.
    Other(Option<Finding>),
}

/// Packets of a frame that a receiver would take, as far as can be seen.
pub(crate) enum Packets<'a> {
    /// None: they are damaged, or can't be told apart.
    None,
    /// One whose ICRC is wrong.
    Damaged(&'a [u8]),
    /// One of so many bytes on the wire, of which the capture has these.
    One(&'a [u8], usize),
    /// Packets of this size end to end; the last may be shorter.
    Several(&'a [u8], usize),
}

/// Checks a frame by itself.
pub(crate) fn examine<'a>(frame: &Frame<'a>, splitter: &mut Splitter) -> Examined<'a> {
    match frame::dissect(frame.link, frame.data) {
        Ok(dissected) if dissected.datagram.dst.port() == ROCE_UDP_PORT => {
            let report = roce_frame(frame, &dissected, splitter);
            let packets = packets(&report, &dissected, splitter);
            Examined::Roce(Box::new(report), packets)
        }
        Ok(_) => Examined::Other(None),
        Err(unread) => undissected(frame, &unread),
    }
}

/// Returns the packets of a frame that a receiver would take.
fn packets<'a>(report: &FrameReport, dissected: &Dissected<'a>, splitter: &Splitter) -> Packets<'a> {
    let Datagram { datagram, payload, .. } = dissected.datagram;
    match (&dissected.problem, report.icrc) {
        (None, Icrc::Ok) if report.packets > 1 => Packets::Several(payload, splitter.last_size()),
        (None, Icrc::Ok) => Packets::One(payload, payload.len()),
        (None, Icrc::Bad) if report.packets == 1 => Packets::Damaged(payload),
        (Some(FrameError::Truncated { .. }), _) => {
            // The UDP header, which says how long it was, is right before the payload.
            let header = datagram.len() - payload.len();
            let udp_len = datagram.get(header - 4..).and_then(<[u8]>::first_chunk);
            let len = udp_len.map_or(0, |len| usize::from(u16::from_be_bytes(*len)));
            match len.checked_sub(UDP_HEADER_LEN) {
                Some(len) if len <= MAX_PACKET && len > payload.len() => Packets::One(payload, len),
                _ => Packets::None,
            }
        }
        _ => Packets::None,
    }
}

/// A frame that could not be taken apart to its end.
fn undissected<'a>(frame: &Frame<'_>, unread: &Undissected) -> Examined<'a> {
    let finding = |rule, text: String| Finding::of_file(frame.index, rule, text);
    let text = unread.error.to_string();
    match unread.error {
        FrameError::RoceV1 => Examined::Other(Some(finding(Rule::FrameRoceV1, text))),
        FrameError::LinkType(_) | FrameError::ErfType(_) => Examined::Unread(finding(Rule::FrameLinkType, text)),
        FrameError::Tunnel(_) => Examined::Unread(finding(Rule::FrameTunnel, text)),
        FrameError::Truncated { .. } => {
            let text = match unread.carriers.last() {
                Some(carrier) => format!("what {} carries cannot be told apart: {text}", carrier.name),
                None => format!("cannot be told apart: {text}"),
            };
            let finding = finding(Rule::FrameCut, text);
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
        summary: String::new(),
        packets: 1,
        icrc: Icrc::Unchecked,
        findings: vec![],
    };
    if !dissected.carriers.is_empty() {
        report.find(Rule::FrameTunnel, tunnels(&dissected.carriers));
    }
    ip_findings(&mut report, &datagram.ip);
    match &dissected.problem {
        None => complete_packet(&mut report, datagram, splitter),
        Some(problem) => {
            let rule = match problem {
                FrameError::Truncated { .. } if may_be_cut(frame, &dissected.carriers) => Rule::FrameCut,
                FrameError::Fragment { .. } => Rule::FrameFragment,
                _ => Rule::FrameMalformed,
            };
            report.summary = match datagram.payload.first().copied().and_then(Opcode::from_byte) {
                Some(opcode) => format!("{opcode}, incomplete"),
                None => "incomplete".to_owned(),
            };
            report.find(rule, problem.to_string());
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
        report.find(Rule::FrameIpOptions, format!("IPv4 header of {ihl} words, 5 expected"));
    }
    if !dont_fragment {
        report.find(Rule::FrameDfClear, "DF is clear");
    }
    if !checksum_ok {
        report.find(Rule::FrameIpChecksum, "the IPv4 header checksum is wrong");
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
    report.find(Rule::FrameIcrc, text);
    let flow = Flow::try_from((src, dst)).ok();
    if let Some(found) = flow.and_then(|flow| Translation::of(&flow, Some(id), datagram.payload)) {
        let text = format!("{found}: the ICRC is right for these addresses");
        report.find(Rule::FrameTranslated, text);
    }
}

/// A frame with packets of `size` bytes end to end.
fn segmented(report: &mut FrameReport, datagram: &Datagram<'_>, size: usize) {
    let packets = datagram.payload.chunks(size);
    report.packets = packets.len() as u64;
    report.icrc = Icrc::Ok;
    let text = format!("{} packets of up to {size} bytes in one frame", packets.len());
    report.find(Rule::FrameSegments, text);
    describe(report, &datagram.payload[..size.min(datagram.payload.len())]);
    for (nth, packet) in packets.enumerate() {
        let place = format!("packet {} of {}", nth + 1, report.packets);
        if !segments::segment_ok(datagram.src, datagram.dst, datagram.identification(), nth, packet) {
            report.icrc = Icrc::Bad;
            let text = format!("{place}: wrong ICRC");
            report.find(Rule::FrameIcrc, text);
        }
        // The first has been described.
        if nth > 0
            && let Some((rule, text)) = packet_finding(packet)
        {
            let text = format!("{place}: {text}");
            report.find(rule, text);
        }
    }
}

/// Returns the fault of a packet's headers.
fn packet_finding(packet: &[u8]) -> Option<(Rule, String)> {
    match Packet::parse(packet) {
        Ok(packet) if packet.header.bth.dest_qp == Qpn::SMI => {
            Some((Rule::FrameQp0, "a packet for QP0, which RoCE drops".to_owned()))
        }
        Ok(_) => None,
        Err(e @ ParseError::UnknownOpcode(_)) => Some((Rule::FrameOpcode, e.to_string())),
        Err(e) => Some((Rule::FrameMalformed, e.to_string())),
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
    if let Some((rule, text)) = packet_finding(packet) {
        report.find(rule, text);
    }
}
