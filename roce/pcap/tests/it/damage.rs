//! Damage to captures of kernels, and the rule that each kind of it breaks.

use std::net::SocketAddr;

use roce_bth::{Opcode, Packet, Psn};
use roce_pcap::{Fault, Report, Rule, Severity, Verdict, check_reader};

use crate::{
    common::{capture_of, ethernet, fixture, ip_datagram, packet, report_of, reseal, v4},
    sent::{self, Sent, written},
};

impl Sent {
    fn set_opcode(&mut self, opcode: Opcode) {
        self.bytes[0] = opcode as u8;
    }

    /// MSN of an AETH right behind the BTH.
    fn set_msn(&mut self, msn: u32) {
        self.bytes[13..16].copy_from_slice(&msn.to_be_bytes()[1..]);
    }

    fn set_syndrome(&mut self, syndrome: u8) {
        self.bytes[12] = syndrome;
    }

    fn set_dma_len(&mut self, len: u32) {
        self.bytes[24..28].copy_from_slice(&len.to_be_bytes());
    }
}

fn load(name: &str) -> Vec<Sent> {
    sent::load(&fixture(name))
}

fn judge(packets: &[Sent]) -> Report {
    check_reader("damaged", &written(packets)[..], |_| {}).unwrap()
}

/// Returns captures with each damage, and what it is.
pub(crate) fn damaged_captures() -> impl Iterator<Item = (String, Vec<u8>)> {
    DAMAGES.iter().map(|(name, what, damage, _, _)| {
        let mut packets = load(&format!("{name}.pcap"));
        damage(&mut packets);
        (format!("{name}: {what}"), written(&packets))
    })
}

/// Index of the `nth` packet with an opcode, from 0.
fn find(packets: &[Sent], opcode: Opcode, nth: usize) -> usize {
    let mut all = packets
        .iter()
        .enumerate()
        .filter(|(_, packet)| packet.opcode() == opcode);
    all.nth(nth).unwrap_or_else(|| panic!("no {opcode} number {nth}")).0
}

type Damage = fn(&mut Vec<Sent>);

const ACK: Opcode = Opcode::RcAcknowledge;

/// Capture, what is done to it, the rule that is broken, who is at fault: 1 the requester's host (10.77.0.2), 0 the responder's.
#[rustfmt::skip]
const DAMAGES: &[(&str, &str, Damage, Rule, Option<u8>)] = &[
    ("verbs-ops", "a request with the PSN before it", |p| { let at = find(p, Opcode::RcSendOnlyImm, 1); p[at].set_psn(0xff_fff5); }, Rule::PsnReused, Some(2)),
    ("verbs-ops", "a request that reuses the last PSN of a READ", |p| { let at = find(p, Opcode::RcSendFirst, 2); p[at].set_psn(0x0d); }, Rule::ReadSpanReused, Some(2)),
    ("verbs-ops", "a request that reuses the first PSN of a READ", |p| { let at = find(p, Opcode::RcSendFirst, 2); p[at].set_psn(0x0c); }, Rule::ReadSpanReused, Some(2)),
    ("loss-write-server", "a gap that is never filled", |p| {
        let nak = p.iter().position(is_gap_nak).unwrap();
        let psn = p[nak].psn();
        let mut tail = p.split_off(nak + 1);
        tail.retain(|s| s.opcode() != ACK && s.psn() != psn);
        // Sent again once it may have been lost again.
        p.extend(tail.clone());
        p.extend(tail);
    }, Rule::PsnSkipped, Some(2)),
    ("rping", "a first request with another PSN than was agreed, behind it", |p| shift(p, 2, -100), Rule::PsnStart, Some(2)),
    ("rping", "a first request with another PSN than was agreed, far ahead", |p| shift(p, 2, 100_000), Rule::PsnStart, Some(2)),
    ("loss-write-client", "a repeated packet with other bytes", |p| { let at = again(p); let last = p[at].bytes.len() - 6; p[at].bytes[last] ^= 1; }, Rule::RepeatDiffers, Some(2)),
    ("loss-write-client", "a repeated packet with another opcode", |p| { let at = again(p); p[at].set_opcode(Opcode::RcSendMiddle); }, Rule::PsnReused, Some(2)),
    ("verbs-ops", "MIDDLE without FIRST", |p| { let at = find(p, Opcode::RcSendFirst, 2); p[at].set_opcode(Opcode::RcSendMiddle); }, Rule::OpcodeSequence, Some(2)),
    ("verbs-ops", "FIRST in the middle of a message", |p| { let at = find(p, Opcode::RcSendMiddle, 1); p[at].set_opcode(Opcode::RcSendFirst); }, Rule::OpcodeSequence, Some(2)),
    ("verbs-ops", "ONLY in the middle of a message", |p| { let at = find(p, Opcode::RcSendMiddle, 1); p[at].set_opcode(Opcode::RcSendOnly); }, Rule::OpcodeSequence, Some(2)),
    ("verbs-ops", "LAST of another operation", |p| { let at = find(p, Opcode::RcSendLast, 1); p[at].set_opcode(Opcode::RcWriteLast); }, Rule::OpcodeSequence, Some(2)),
    ("verbs-ops", "a READ in the middle of a message", |p| { let (from, to) = (find(p, Opcode::RcReadRequest, 3), find(p, Opcode::RcSendMiddle, 0)); p[to].bytes = p[from].bytes.clone(); p[to].set_psn(0x0f); }, Rule::OpcodeSequence, Some(2)),
    ("verbs-ops", "a UC packet to an RC queue pair", |p| { let at = find(p, Opcode::RcSendOnly, 1); p[at].set_opcode(Opcode::UcSendOnly); }, Rule::OpcodeService, Some(2)),
    ("verbs-ops", "a MIDDLE that is too short", |p| { let at = find(p, Opcode::RcSendMiddle, 0); p[at].set_payload(1020); }, Rule::PayloadLength, Some(2)),
    ("verbs-ops", "a LAST longer than the path MTU", |p| { let at = find(p, Opcode::RcSendLast, 1); p[at].set_payload(1028); }, Rule::PayloadLength, Some(2)),
    ("verbs-ops", "a LAST without payload", |p| { let at = find(p, Opcode::RcSendLast, 1); p[at].set_payload(0); }, Rule::PayloadLength, Some(2)),
    ("rping", "a FIRST of another length than the agreed path MTU", |p| { let at = find(p, Opcode::RcWriteFirst, 0); p[at].set_payload(512); }, Rule::PayloadLength, Some(1)),
    ("verbs-ops", "a WRITE shorter than its RETH says", |p| { let at = find(p, Opcode::RcWriteFirst, 0); p[at].set_dma_len(2000); }, Rule::WriteLength, Some(2)),
    ("verbs-ops", "a WRITE longer than its RETH says", |p| { let at = find(p, Opcode::RcWriteFirst, 0); p[at].set_dma_len(1000); }, Rule::WriteLength, Some(2)),
    ("verbs-ops", "a READ of more than 2^31 bytes", |p| { let at = find(p, Opcode::RcReadRequest, 1); p[at].set_dma_len(0x8000_0001); }, Rule::RethLength, Some(2)),
    ("rping", "more READs than the initiator depth", |p| {
        // Responder resources and initiator depth of REQ and REP.
        for at in [35, 39] { p[0].bytes[20 + 24 + at] = 0; }
        for at in [24, 25] { p[1].bytes[20 + 24 + at] = 0; }
    }, Rule::ReadDepth, Some(1)),
    ("loss-read-response-server", "a READ asked for again at another address", |p| { let at = find(p, Opcode::RcReadRequest, 1); p[at].bytes[19] ^= 4; }, Rule::ReadRetry, Some(2)),
    ("loss-read-response-server", "a READ asked for again with another length", |p| { let at = find(p, Opcode::RcReadRequest, 1); let len = u32::from_be_bytes(p[at].bytes[24..28].try_into().unwrap()); p[at].set_dma_len(len + 4); }, Rule::ReadRetry, Some(2)),
    ("atomic-fa", "an atomic at an odd address", |p| { let at = find(p, Opcode::RcFetchAdd, 0); p[at].bytes[19] |= 4; }, Rule::AtomicAlignment, Some(2)),
    ("rnr-send", "a repetition long before the RNR NAK's time", |p| { let nak = p.iter().position(is_rnr).unwrap(); let psn = p[nak].psn(); let at = p.iter().skip(nak).position(|s| s.psn() == psn && s.opcode() != ACK).unwrap() + nak; let time = p[nak].time_ns + 1000; p[at].time_ns = time; p[nak].set_syndrome(0x20 | 20); }, Rule::RnrEarly, Some(2)),
    ("nak-write-rkey", "a new request long after a fatal NAK", |p| { let mut last = p.last().unwrap().clone(); let new = p.iter().filter(|s| s.opcode() != ACK).map(Sent::psn).max().unwrap() + 1; last.set_opcode(Opcode::RcSendOnly); last.set_payload(8); last.set_psn(new); last.time_ns = p.last().unwrap().time_ns + 1_000_000_000; p.push(last); }, Rule::RequestAfterNak, Some(2)),
    ("rping", "a request after the disconnect", |p| { let mut late = p[find(p, Opcode::RcSendOnly, 0)].clone(); let psn = p.iter().rfind(|s| s.src.ip() == late.src.ip() && s.opcode() == Opcode::RcSendOnly).unwrap().psn() + 1; late.set_psn(psn); late.time_ns = p.last().unwrap().time_ns + 1_000_000_000; p.push(late); }, Rule::RequestAfterDisconnect, Some(2)),
    ("verbs-ops", "a request that is never answered", |p| { let cut = find(p, Opcode::RcSendOnlyImm, 1); p.truncate(cut + 1); for n in 1..4 { let mut again = p[cut].clone(); again.time_ns += n * 200_000_000; p.push(again); } }, Rule::NoAnswer, Some(1)),
    ("verbs-ops", "an answer after two seconds", |p| { let at = find(p, ACK, 3); for packet in &mut p[at..] { packet.time_ns += 2_000_000_000; } }, Rule::Stall, None),
    ("verbs-ops", "an acknowledgement of what was never sent, before everything", |p| { let at = find(p, ACK, 6); p[at].set_psn(0xff_ff00); }, Rule::AckGhost, Some(1)),
    ("verbs-ops", "an acknowledgement ahead of what was sent", |p| { let at = find(p, ACK, 2); let psn = p[at].psn() + 1; p[at].set_psn(psn); }, Rule::AckGhost, Some(1)),
    ("verbs-ops", "a READ response ahead of what was sent", |p| { let at = find(p, Opcode::RcReadResponseOnly, 1); let psn = p[at].psn() + 1; p[at].set_psn(psn); }, Rule::AckGhost, Some(1)),
    ("verbs-ops", "an acknowledgement in place of a READ response", |p| { let at = find(p, Opcode::RcReadResponseOnly, 1); p.remove(at); }, Rule::AckPassesRead, Some(1)),
    ("verbs-ops", "an MSN that is too high", |p| { let at = find(p, ACK, 5); p[at].set_msn(0x99); }, Rule::Msn, Some(1)),
    ("verbs-ops", "an MSN that goes back", |p| { let at = find(p, ACK, 5); p[at].set_msn(1); }, Rule::Msn, Some(1)),
    ("verbs-ops", "an MSN that is wrong in a READ response", |p| { let at = find(p, Opcode::RcReadResponseOnly, 2); p[at].set_msn(0x70); }, Rule::Msn, Some(1)),
    ("rnr-send", "an MSN that is wrong in an RNR NAK", |p| { let at = p.iter().position(is_rnr).unwrap(); p[at].set_msn(0x70); let mut ack = p[at].clone(); ack.set_syndrome(0x1f); p.insert(at, ack); }, Rule::NakAcknowledged, Some(1)),
    ("verbs-ops", "a reserved syndrome", |p| { let at = find(p, ACK, 5); p[at].set_syndrome(0x9f); }, Rule::Syndrome, Some(1)),
    ("verbs-ops", "a reserved NAK code", |p| { let at = find(p, ACK, 5); p[at].set_syndrome(0x6f); }, Rule::Syndrome, Some(1)),
    ("loss-write-server", "a sequence NAK for what was acknowledged", |p| { let at = p.iter().position(is_gap_nak).unwrap(); let psn = p[at].psn().wrapping_sub(1) & 0xff_ffff; let mut ack = p[at].clone(); ack.set_syndrome(0x1f); p.insert(at, ack); p[at + 1].set_psn(psn); }, Rule::NakAcknowledged, Some(1)),
    ("loss-write-server", "a sequence NAK twice for one gap", |p| { let at = p.iter().position(is_gap_nak).unwrap(); let nak = p[at].clone(); p.insert(at, nak); }, Rule::NakRepeated, Some(1)),
    ("verbs-ops", "a request that is refused", |p| { let at = find(p, ACK, 5); p[at].set_syndrome(0x62); p.truncate(at + 1); }, Rule::NakFatal, None),
    ("verbs-ops", "an answer after a fatal NAK", |p| { let at = find(p, ACK, 5); p[at].set_syndrome(0x62); }, Rule::AnswerAfterNak, Some(1)),
    ("verbs-ops", "an RNR NAK of a WRITE", |p| { let at = find(p, Opcode::RcWriteOnly, 1) + 1; p[at].set_syndrome(0x25); }, Rule::RnrWithoutReceive, Some(1)),
    ("rnr-send", "a sequence NAK for what an RNR NAK refused", |_| {}, Rule::NakAfterRnr, Some(1)),
    ("rnr-exceeded", "RNR NAKs until the requester gives up", |_| {}, Rule::RnrUnresolved, Some(1)),
    ("verbs-ops", "a READ response to a SEND", |p| { let from = p[find(p, Opcode::RcReadResponseOnly, 1)].clone(); let at = find(p, ACK, 4); let psn = p[at].psn(); p[at] = from; p[at].set_psn(psn); }, Rule::ResponseUnrequested, Some(1)),
    ("atomic-fa", "an atomic acknowledgement of a SEND", |p| { let at = find(p, Opcode::RcFetchAdd, 0); p[at].set_opcode(Opcode::RcSendOnly); p[at].set_payload(28); }, Rule::ResponseUnrequested, Some(1)),
    ("verbs-ops", "a READ response LAST in place of ONLY", |p| { let at = find(p, Opcode::RcReadResponseOnly, 2); p[at].set_opcode(Opcode::RcReadResponseLast); }, Rule::ResponseSequence, Some(1)),
    ("read-bw", "two MIDDLEs of a READ in the wrong order by opcode", |p| { let at = find(p, Opcode::RcReadResponseMiddle, 0); p[at].set_opcode(Opcode::RcReadResponseLast); p[at].bytes.splice(12..12, [0x1f, 0, 0, 0]); }, Rule::ResponseSequence, Some(1)),
    ("read-bw", "a READ response MIDDLE that is too short", |p| { let at = find(p, Opcode::RcReadResponseMiddle, 0); p[at].set_payload(1000); }, Rule::ResponseLength, Some(1)),
    ("verbs-ops", "a last READ response with too many bytes", |p| { let at = find(p, Opcode::RcReadResponseLast, 0); p[at].set_payload(200); }, Rule::ResponseLength, Some(1)),
    ("loss-read-response-server", "a READ resumed with MIDDLE", |_| {}, Rule::ResponseResumed, Some(1)),
    ("read-bw", "READs answered in the wrong order", |p| { swap_reads(p); }, Rule::ResponseOrder, Some(1)),
    ("read-bw", "a READ response twice", |p| { let at = find(p, Opcode::RcReadResponseMiddle, 1); let twice = p[at].clone(); p.insert(at + 1, twice); }, Rule::ResponseRepeated, None),
    ("rping", "a management datagram with another Q_Key", |p| { p[0].bytes[15] ^= 1; }, Rule::GsiHeader, Some(2)),
    ("rping", "a management datagram to QP1 by another service", |p| { let at = find(p, Opcode::RcSendOnly, 1); p[at].bytes[5..8].copy_from_slice(&[0, 0, 1]); }, Rule::GsiHeader, None),
    ("rping", "a REQ that names another address", |p| { p[0].bytes[20 + 24 + 71] ^= 1; }, Rule::CmAddress, Some(2)),
    ("rping", "a REP deeper than its REQ", |p| { p[1].bytes[20 + 24 + 25] = 200; }, Rule::CmDepth, Some(1)),
    ("rping", "a REQ with a path MTU that does not exist", |p| { p[0].bytes[20 + 24 + 50] |= 0xf0; }, Rule::CmMtu, Some(2)),
    ("rping", "a REQ that nobody answers", |p| { p.truncate(1); let mut again = p[0].clone(); again.time_ns += 4_000_000_000; p.push(again); }, Rule::CmNoAnswer, Some(1)),
    ("cm-reject", "a REQ that is rejected", |_| {}, Rule::CmRejected, None),
    ("verbs-ops", "a packet to QP0", |p| { p[0].bytes[5..8].fill(0); }, Rule::FrameQp0, Some(2)),
    ("verbs-ops", "an unknown opcode", |p| { p[0].bytes[0] = 0x1f; }, Rule::FrameOpcode, Some(2)),
    ("verbs-ops", "transport header version 1", |p| { p[0].bytes[1] |= 1; }, Rule::FrameMalformed, Some(2)),
    ("verbs-ops", "more pad than payload", |p| { p[0].bytes[1] |= 0x30; }, Rule::FrameMalformed, Some(2)),
    ("send-bw-ud", "a datagram of 5000 bytes", |p| { p[0].set_payload(5000); }, Rule::DatagramLength, None),
];

fn is_rnr(packet: &Sent) -> bool {
    packet.opcode() == ACK && packet.bytes[12] >> 5 == 1
}

fn is_gap_nak(packet: &Sent) -> bool {
    packet.opcode() == ACK && packet.bytes[12] == 0x60
}

/// Index of the first request packet that was sent before.
fn again(packets: &[Sent]) -> usize {
    let mut seen = std::collections::HashSet::new();
    let is_again = |packet: &Sent| packet.opcode() != ACK && !seen.insert((packet.src, packet.psn()));
    packets.iter().position(is_again).unwrap()
}

/// Moves the PSNs of one host's requests, and of the answers to them.
fn shift(packets: &mut [Sent], host: u8, by: i64) {
    for packet in packets {
        let IpHost(sender) = IpHost::of(packet);
        let opcode = packet.opcode();
        let answer = matches!(
            opcode,
            Opcode::RcAcknowledge
                | Opcode::RcReadResponseFirst
                | Opcode::RcReadResponseMiddle
                | Opcode::RcReadResponseLast
                | Opcode::RcReadResponseOnly
        );
        if opcode != Opcode::UdSendOnly && answer != (sender == host) {
            let psn = (i64::from(packet.psn()) + by) as u32 & 0xff_ffff;
            packet.set_psn(psn);
        }
    }
}

/// Last byte of the sender's address.
struct IpHost(u8);

impl IpHost {
    fn of(packet: &Sent) -> Self {
        match packet.src.ip() {
            std::net::IpAddr::V4(ip) => Self(ip.octets()[3]),
            std::net::IpAddr::V6(ip) => Self(ip.octets()[15]),
        }
    }
}

/// Puts the answer to the second of two outstanding READs before that to the first.
fn swap_reads(packets: &mut Vec<Sent>) {
    let requests: Vec<u32> = packets
        .iter()
        .filter(|packet| packet.opcode() == Opcode::RcReadRequest)
        .map(Sent::psn)
        .take(3)
        .collect();
    let is_answer = |packet: &Sent, n: usize| {
        packet.opcode() != Opcode::RcReadRequest
            && Psn::new(packet.psn()).offset_from(Psn::new(requests[n])) < requests[n + 1].wrapping_sub(requests[n])
    };
    let first: Vec<Sent> = packets.iter().filter(|p| is_answer(p, 0)).cloned().collect();
    let after = packets.iter().rposition(|p| is_answer(p, 1)).unwrap();
    packets.splice(after + 1..after + 1, first);
    let mut to_drop = packets.iter().filter(|p| is_answer(p, 0)).count() / 2;
    packets.retain(|p| {
        let dropped = to_drop > 0 && is_answer(p, 0);
        to_drop -= usize::from(dropped);
        !dropped
    });
}

fn broken(report: &Report) -> Vec<Rule> {
    report.findings.iter().map(|finding| finding.rule).collect()
}

#[test]
fn each_damage_breaks_its_rule() {
    let mut wrong = vec![];
    for (name, what, damage, rule, fault) in DAMAGES {
        let mut packets = load(&format!("{name}.pcap"));
        damage(&mut packets);
        let report = judge(&packets);
        let Some(finding) = report.findings.iter().find(|finding| finding.rule == *rule) else {
            let found: Vec<_> = report.findings.iter().map(|f| (f.rule.id(), &f.text)).collect();
            wrong.push(format!("{name}: {what}: {} expected, found {found:?}", rule.id()));
            continue;
        };
        let host = finding.at_fault.map(|ip| match ip {
            std::net::IpAddr::V4(ip) => ip.octets()[3],
            std::net::IpAddr::V6(_) => 0,
        });
        if fault.is_some_and(|fault| host != Some(fault)) {
            wrong.push(format!("{name}: {what}: at fault is {host:?}: {finding:?}"));
        }
        if finding.severity == Severity::Error && report.verdict != Verdict::Bad {
            wrong.push(format!("{name}: {what}: the verdict is {:?}", report.verdict));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn captures_without_damage_break_no_rule_but_the_kernels() {
    let known: [(&str, &[Rule]); 6] = [
        ("rds", &[Rule::NakAfterRnr]),
        ("rnr-send", &[Rule::NakAfterRnr]),
        ("rnr-send-slow", &[Rule::NakAfterRnr]),
        ("duplicates-client", &[Rule::ResponseRepeated]),
        ("loss-read-response-client", &[Rule::ResponseResumed]),
        ("loss-read-response-server", &[Rule::ResponseResumed]),
    ];
    for entry in std::fs::read_dir(fixture("")).unwrap() {
        let path = entry.unwrap().path();
        let Some(name) = path
            .file_name()
            .and_then(|name| name.to_str())
            .filter(|n| n.ends_with(".pcap"))
        else {
            continue;
        };
        let report = roce_pcap::check_file(&path).unwrap();
        let found: Vec<Rule> = report
            .findings
            .iter()
            .filter(|f| f.severity > Severity::Note && f.fault != Fault::Capture)
            .map(|f| f.rule)
            .collect();
        let stem = name.trim_end_matches(".pcap");
        let expected: &[Rule] = match stem {
            "annex-a19" => &[Rule::FrameIcrc],
            // A stall that was made public.
            "made-read-span" => &[Rule::ReadSpanReused, Rule::AckGhost],
            "retry-exceeded-client" => &[Rule::NoAnswer],
            "rnr-exceeded" => &[Rule::RnrUnresolved],
            _ => known.iter().find(|(n, _)| *n == stem).map_or(&[], |(_, rules)| rules),
        };
        assert_eq!(found, expected, "{name}: {:?}", report.findings);
    }
}

#[test]
fn every_rule_of_conversations_has_its_damage() {
    for rule in Rule::ALL {
        let of_frames = rule.id().starts_with("frame-") || rule == Rule::FileBroken;
        // Theirs are in dissect/tests.
        let upper = rule.id().starts_with("rds-") || rule.id().starts_with("lnet-");
        let shown = DAMAGES.iter().any(|(_, _, _, shown, _)| *shown == rule) || rule == Rule::EcnUnanswered;
        assert!(
            of_frames || upper || shown,
            "{} has no damage that breaks it",
            rule.id()
        );
    }
}

/// Packets between two hosts that nobody captured: home-made peer 192.0.2.1 and rdma_rxe at 192.0.2.2.
struct Script {
    packets: Vec<Sent>,
    now_ns: u64,
}

impl Script {
    fn new() -> Self {
        Self {
            packets: vec![],
            now_ns: 1_700_000_000_000_000_000,
        }
    }

    fn send(&mut self, host: u8, opcode: Opcode, psn: u32, extended: &[u8], payload: usize) {
        let addr = |n: u8| SocketAddr::from(([192, 0, 2, n], if n == host { 50_000 } else { 4791 }));
        let mut bytes = vec![0; 12];
        bytes[0] = opcode as u8;
        bytes[2..4].fill(0xff);
        bytes[7] = 0x20 + (3 - host);
        bytes[8] = u8::from(opcode.info().position.ends()) << 7;
        bytes.extend(extended);
        bytes.resize(bytes.len() + payload + 4, 0);
        self.now_ns += 20_000;
        let (src, dst) = (addr(host), addr(3 - host));
        let mut packet = Sent {
            time_ns: self.now_ns,
            src,
            dst,
            id: 0,
            bytes,
        };
        packet.set_psn(psn);
        self.packets.push(packet);
    }
}

/// Two stalls that people made public: a home-made peer counts a READ of three packets as two, and rdma_rxe answers the request
/// that it takes for a duplicate with PSN 0xffffff, because READs do not move its `ack_psn`.
#[test]
fn the_two_public_stalls() {
    let reth = |len: u32| [&[0; 8][..], &[0, 0, 1, 0], &len.to_be_bytes()].concat();
    for known_mtu in [true, false] {
        let mut script = Script::new();
        if known_mtu {
            script.send(1, Opcode::RcWriteFirst, 0xff_fffe, &reth(1028), 1024);
            script.send(1, Opcode::RcWriteLast, 0xff_ffff, &[], 4);
            script.send(2, Opcode::RcAcknowledge, 0xff_ffff, &[0x1f, 0, 0, 1], 0);
        }
        let msn = u8::from(known_mtu);
        script.send(1, Opcode::RcReadRequest, 0, &reth(2400), 0);
        script.send(2, Opcode::RcReadResponseFirst, 0, &[0x1f, 0, 0, msn + 1], 1024);
        script.send(2, Opcode::RcReadResponseMiddle, 1, &[], 1024);
        script.send(2, Opcode::RcReadResponseLast, 2, &[0x1f, 0, 0, msn + 1], 352);
        // The SEND takes the READ's last PSN.
        script.send(1, Opcode::RcSendOnly, 2, &[], 64);
        let ghost = if known_mtu { 0xff_fff0 } else { 0xff_ffff };
        script.send(2, Opcode::RcAcknowledge, ghost, &[0x1f, 0, 0, msn + 1], 0);
        script.now_ns += 146_000_000_000;
        script.send(1, Opcode::RcSendOnly, 2, &[], 64);
        let report = judge(&script.packets);
        let by = |rule| {
            report
                .findings
                .iter()
                .find(|f| f.rule == rule)
                .map(|f| (f.frame, f.at_fault))
        };
        let host = |n: u8| Some(std::net::IpAddr::from([192, 0, 2, n]));
        let first = if known_mtu { 3 } else { 0 };
        assert_eq!(
            by(Rule::ReadSpanReused),
            Some((first + 5, host(1))),
            "{:?}",
            report.findings
        );
        assert_eq!(by(Rule::AckGhost), Some((first + 6, host(2))), "{:?}", report.findings);
        assert_eq!(report.verdict, Verdict::Bad);
        assert!(broken(&report).len() <= 4, "{:?}", report.findings);
    }
}

/// A capture that begins in the middle, or lacks a direction or packets, breaks no rule.
#[test]
fn what_a_capture_lacks_is_held_against_nobody() {
    for name in [
        "verbs-ops",
        "rping",
        "read-bw",
        "write-bw-bidir",
        "rc-pingpong-big",
        "rnbd",
        "atomic-cs",
        "send-bw-rc",
    ] {
        let packets = load(&format!("{name}.pcap"));
        let serious = |packets: &[Sent]| {
            let report = judge(packets);
            report
                .findings
                .into_iter()
                .filter(|f| f.severity == Severity::Error)
                .collect::<Vec<_>>()
        };
        for from in (1..packets.len()).step_by(packets.len() / 20 + 1) {
            assert_eq!(serious(&packets[from..]), [], "{name} from frame {}", from + 1);
        }
        for host in [1, 2] {
            let side: Vec<Sent> = packets.iter().filter(|p| IpHost::of(p).0 == host).cloned().collect();
            assert_eq!(serious(&side), [], "{name}, only from host {host}");
        }
        for lost in 0..packets.len().min(60) {
            let mut some = packets.clone();
            some.remove(lost);
            assert_eq!(serious(&some), [], "{name} without frame {}", lost + 1);
        }
        assert!(Packet::parse(&packets[0].bytes).is_ok());
    }
}

/// A queue pair number that belongs to a new queue pair after a pause: the same PSNs from another source port.
#[test]
fn a_new_owner_of_a_queue_pair_number_begins_again() {
    let mut packets = load("verbs-ops.pcap");
    let old_port = packets[0].src.port();
    let mut first = packets[find(&packets, Opcode::RcSendOnly, 1)].clone();
    // The PSN of a READ of the old owner.
    first.set_psn(0x0c);
    first.time_ns = packets.last().unwrap().time_ns + 8_000_000_000;
    first.src.set_port(50_001);
    packets.push(first);
    let serious: Vec<_> = judge(&packets)
        .findings
        .into_iter()
        .filter(|f| f.severity == Severity::Error)
        .collect();
    assert_eq!(serious, []);
    // Its peer answers another queue pair.
    let at = find(&packets, ACK, 0);
    let mut answer = Sent {
        time_ns: packets.last().unwrap().time_ns + 1000,
        ..packets[at].clone()
    };
    answer.set_psn(0x0c);
    answer.bytes[5..8].copy_from_slice(&[0, 0, 0x99]);
    let mut second = packets.last().unwrap().clone();
    second.set_opcode(Opcode::RcSendOnlyImm);
    second.bytes.splice(12..12, [0; 4]);
    second.set_psn(0x0d);
    second.time_ns += 2000;
    let mut same_port = packets.clone();
    same_port.pop();
    second.src.set_port(old_port);
    same_port.extend([answer, second]);
    let serious: Vec<_> = judge(&same_port)
        .findings
        .into_iter()
        .filter(|f| f.severity == Severity::Error)
        .collect();
    assert_eq!(serious, []);
    // From the same port it is the old one's.
    packets.last_mut().unwrap().src.set_port(old_port);
    assert_eq!(judge(&packets).verdict, Verdict::Bad);
}

#[test]
fn congestion_without_notification_is_the_receivers() {
    let frames: Vec<Vec<u8>> = (0..70u8)
        .map(|n| {
            let mut marked = packet(b"marked");
            marked[11] = n;
            let mut ip = ip_datagram(v4(), 1, &marked);
            ip[1] |= 3;
            reseal(&mut ip);
            ethernet(0x0800, &ip)
        })
        .collect();
    let report = report_of(&capture_of(
        1,
        &frames.iter().map(|frame| (&frame[..], None)).collect::<Vec<_>>(),
    ));
    let found: Vec<_> = report.findings.iter().map(|f| (f.rule, f.at_fault)).collect();
    assert_eq!(
        found,
        [(Rule::EcnUnanswered, Some(v4().1.ip()))],
        "{:?}",
        report.findings
    );
    let fewer: Vec<_> = frames[..60].iter().map(|frame| (&frame[..], None)).collect();
    assert_eq!(broken(&report_of(&capture_of(1, &fewer))), []);
}
