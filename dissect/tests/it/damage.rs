//! Damage to captures of kernels, and the rule of RDS or LNet that each kind of it breaks.

use std::collections::BTreeMap;

use roce_bth::Opcode;
use roce_pcap::{Rule, Severity};

use crate::{
    packets::Sent,
    sent::{header, judge, last_byte, load, payload, private, seal},
};

type Damage = fn(&mut Vec<Sent>);

/// Capture, what is done to it, the rule that is broken, host at fault.
#[rustfmt::skip]
const DAMAGES: &[(&str, &str, Damage, Rule, Option<u8>)] = &[
    ("rds/connect-v4", "a request of version 2.1", |p| private(p, 1, |d| d[8] = 2), Rule::RdsVersion, Some(1)),
    ("rds/connect-v4", "a request of version 4 without a common minor version", |p| private(p, 1, |d| { d[8] = 4; d[11] = 4; }), Rule::RdsVersion, Some(1)),
    ("rds/connect-v4", "an answer of version 4.1", |p| private(p, 2, |d| d[8] = 4), Rule::RdsVersion, Some(2)),
    ("rds/connect-v6", "an answer of version 3.0", |p| private(p, 2, |d| d[33] = 0), Rule::RdsVersion, Some(2)),
    ("rds/connect-v4", "a request to another address", |p| private(p, 1, |d| d[7] = 9), Rule::RdsPrivate, Some(1)),
    ("rds/connect-v6", "a request from another address", |p| private(p, 1, |d| d[15] = 9), Rule::RdsPrivate, Some(1)),
    ("rds/connect-v4", "an answer with another type of service", |p| private(p, 2, |d| d[12] = 8), Rule::RdsPrivate, Some(2)),
    ("rds/connect-v4", "an answer from another address", |p| private(p, 2, |d| d[3] = 9), Rule::RdsPrivate, Some(2)),
    ("rds/race", "a reject in the other byte order", |p| private(p, 3, |d| d[..4].copy_from_slice(&[0, 0, 0, 1])), Rule::RdsReject, Some(1)),
    ("rds/race", "a reject with 2", |p| private(p, 4, |d| d[0] = 2), Rule::RdsReject, Some(2)),
    ("rds/connect-v4", "a message of more bytes than its SEND has", |p| header(p, 34, |h| h[19] = 65), Rule::RdsLength, Some(1)),
    ("rds/connect-v4", "a SEND that is cut", |p| p[33].set_payload(111), Rule::RdsLength, Some(1)),
    ("rds/connect-v4", "a SEND of 40 bytes", |p| p[33].set_payload(40), Rule::RdsLength, Some(1)),
    ("rds/connect-v4", "a message of more than 1 MiB", |p| header(p, 34, |h| { h[17] = 0x10; h[19] = 1; }), Rule::RdsLength, Some(1)),
    ("rds/connect-v4", "an acknowledgement with data", |p| p[31].set_payload(52), Rule::RdsLength, Some(1)),
    ("rds/connect-v6", "a last fragment that is too short", |p| p[42].set_payload(900), Rule::RdsLength, Some(1)),
    ("rds/connect-v4", "a checksum that is wrong", |p| payload(p, 34, |h| h[30] ^= 1), Rule::RdsChecksum, Some(1)),
    ("rds/connect-v6", "another port without another checksum", |p| payload(p, 38, |h| h[23] ^= 1), Rule::RdsChecksum, Some(1)),
    ("rds/connect-v6", "a second fragment with another sequence number", |p| header(p, 43, |h| h[7] += 1), Rule::RdsFragment, Some(1)),
    ("rds/connect-v6", "a second fragment to another port", |p| header(p, 43, |h| h[23] ^= 1), Rule::RdsFragment, Some(1)),
    ("rds/connect-v6", "a second fragment of another length", |p| header(p, 43, |h| h[19] ^= 1), Rule::RdsFragment, Some(1)),
    ("rds/congestion", "a second half of a map with other ports", |p| header(p, 77, |h| h[21] = 1), Rule::RdsFragment, Some(2)),
    ("rds/connect-v4", "a sequence number twice", |p| header(p, 34, |h| h[7] = 1), Rule::RdsSequence, Some(1)),
    ("rds/loss", "a sequence number that goes back", |p| header(p, 43, |h| h[7] = 3), Rule::RdsSequence, Some(1)),
    ("rds/connect-v4", "sequence number 0", |p| header(p, 34, |h| h[7] = 0), Rule::RdsSequence, Some(1)),
    ("rds/loss", "messages that are sent again as new ones", |p| for frame in (258..305).step_by(2) { header(p, frame, |h| h[24] = 2); }, Rule::RdsRepeat, Some(1)),
    ("rds/loss", "a new connection that begins with 5", |p| header(p, 258, |h| { h[24] = 0; h[7] = 5; }), Rule::RdsRepeat, Some(1)),
    ("rds/loss", "a new connection that begins with 1", |p| header(p, 258, |h| { h[24] = 2; h[7] = 1; }), Rule::RdsRestart, None),
    ("rds/odd-rejects", "modules that are loaded again", |_| {}, Rule::RdsRestart, None),
    ("rds/loss", "an acknowledgement of a message before it is sent", |p| header(p, 65, |h| h[15] = 11), Rule::RdsAckFuture, Some(2)),
    ("rds/loss", "a message that acknowledges one that does not exist", |p| header(p, 34, |h| h[8] = 1), Rule::RdsAckFuture, Some(1)),
    ("rds/ping", "a pong that acknowledges one that does not exist", |p| header(p, 36, |h| h[14] = 1), Rule::RdsAckFuture, Some(2)),
    ("rds/connect-v4", "an acknowledgement that goes back", |p| header(p, 34, |h| h[15] = 0), Rule::RdsAckBack, Some(1)),
    ("rds/loss", "an acknowledgement of 9 after 10", |p| header(p, 97, |h| h[15] = 9), Rule::RdsAckBack, Some(2)),
    ("rds/congestion", "a sender that never asks", |p| many(p, 190), Rule::RdsAckAsked, Some(1)),
    ("rds/connect-v6", "a node that never asks for its pings", |p| many(p, 34), Rule::RdsAckAsked, Some(1)),
    ("rds/connect-v4", "a message that is not solicited", |p| p[33].bytes[1] &= 0x7f, Rule::RdsSolicited, Some(1)),
    ("rds/connect-v4", "an acknowledgement that is not solicited", |p| p[31].bytes[1] &= 0x7f, Rule::RdsSolicited, Some(1)),
    ("rds/connect-v4", "a map that is not solicited", |p| p[26].bytes[1] &= 0x7f, Rule::RdsSolicited, Some(2)),
    ("rds/congestion", "a map with another flag", |p| for frame in [72, 77] { header(p, frame, |h| h[24] = 3); }, Rule::RdsMap, Some(2)),
    ("rds/congestion", "a map of half the length", |p| for frame in [72, 77] { header(p, frame, |h| h[18..20].copy_from_slice(&[0x10, 0])); }, Rule::RdsMap, Some(2)),
    ("rds/congestion", "a map with a sequence number", |p| for frame in [72, 77] { header(p, frame, |h| h[7] = 7); }, Rule::RdsMapNumbers, Some(2)),
    ("rds/congestion", "a map with ports", |p| for frame in [72, 77] { header(p, frame, |h| h[21] = 7); }, Rule::RdsMapNumbers, Some(2)),
    // Port 4002 is congested from frame 69 on.
    ("rds/congestion", "a message to a congested port", |p| { header(p, 70, |h| h[22..24].copy_from_slice(&4002u16.to_be_bytes())); for packet in &mut p[69..] { packet.time_ns += 1_000_000_000; } }, Rule::RdsCongested, Some(1)),
    ("rds/congestion", "a port that is not freed before its message", |p| still_congested(p), Rule::RdsCongested, Some(1)),
    ("lnet/ping", "an unknown type", |p| payload(p, 6, |m| m[6] = 0xee), Rule::LnetFormat, Some(2)),
    ("lnet/ping", "a length beyond what came", |p| payload(p, 6, |m| m[8] += 1), Rule::LnetFormat, Some(2)),
    ("lnet/ping", "a GET with data", |p| payload(p, 4, |m| m[48 + 28] = 8), Rule::LnetFormat, Some(1)),
    ("lnet/ping", "a REPLY of more data than there is", |p| payload(p, 6, |m| m[48 + 28] += 1), Rule::LnetFormat, Some(2)),
    ("lnet/brw-read-4k", "a descriptor without fragments", |p| payload(p, 24, |m| m[48 + 20] = 0), Rule::LnetFormat, Some(1)),
    ("lnet/ping", "a request to connect of another type", |p| private(p, 1, |d| d[6] = 0xc1), Rule::LnetFormat, Some(1)),
    ("lnet/ping", "an answer without magic", |p| private(p, 2, |d| d[0] = 0), Rule::LnetFormat, Some(2)),
    ("lnet/ping", "a checksum that is wrong", |p| payload(p, 4, |m| m[12] = 0x4d), Rule::LnetChecksum, Some(1)),
    ("lnet/ping", "a request to connect with a wrong checksum", |p| private(p, 1, |d| d[13] = 1), Rule::LnetChecksum, Some(1)),
    ("lnet/cksum", "a checksum over zeros", |_| {}, Rule::LnetChecksum, Some(2)),
    ("lnet/ping", "an answer with a deeper queue", |p| private(p, 2, |d| d[48] = 16), Rule::LnetParameters, Some(2)),
    ("lnet/ping", "an answer with more fragments", |p| private(p, 2, |d| d[50] += 1), Rule::LnetParameters, Some(2)),
    ("lnet/ping", "a request for a queue of nothing", |p| private(p, 1, |d| d[48] = 0), Rule::LnetParameters, Some(1)),
    ("lnet/ping", "an answer of version 1", |p| private(p, 2, |d| d[4] = 0x11), Rule::LnetParameters, Some(2)),
    ("lnet/ping", "a message from another node", |p| payload(p, 6, |m| m[16] ^= 8), Rule::LnetNid, Some(2)),
    ("lnet/ping", "a message to another network", |p| payload(p, 8, |m| m[36] = 1), Rule::LnetNid, Some(1)),
    ("lnet/ping", "an answer to another node", |p| private(p, 2, |d| d[32] ^= 8), Rule::LnetNid, Some(2)),
    ("lnet/ping", "a message of a former incarnation", |p| payload(p, 6, |m| m[24] -= 1), Rule::LnetStamp, Some(2)),
    ("lnet/ping", "a message to a former incarnation", |p| payload(p, 8, |m| m[41] ^= 1), Rule::LnetStamp, Some(1)),
    ("lnet/ping", "an answer to another incarnation", |p| private(p, 2, |d| d[40] ^= 1), Rule::LnetStamp, Some(2)),
    ("lnet/brw-read-4k", "a queue of one", |p| private(p, 2, |d| d[48] = 1), Rule::LnetCredits, Some(2)),
    ("lnet/brw-write-4k", "a queue of five, and credits that never come back", |p| { private(p, 2, |d| d[48] = 5); no_credits(p); }, Rule::LnetCredits, Some(2)),
    ("lnet/ping", "more credits than were taken", |p| payload(p, 6, |m| m[7] = 2), Rule::LnetCredits, Some(2)),
    ("lnet/brw-read-4k", "a PUT_DONE that returns 200 credits", |p| payload(p, 30, |m| m[7] = 200), Rule::LnetCredits, Some(2)),
    ("lnet/brw-read-4k", "a PUT_DONE with another cookie", |p| payload(p, 30, |m| m[49] = 1), Rule::LnetCookie, Some(2)),
    ("lnet/brw-read-4k", "a PUT_ACK of another PUT_REQ", |p| payload(p, 24, |m| m[49] = 1), Rule::LnetCookie, Some(1)),
    ("lnet/brw-write-4k", "a GET_DONE with another cookie", |p| payload(p, 29, |m| m[49] = 1), Rule::LnetCookie, Some(1)),
    ("lnet/brw-write-4k", "a GET_DONE with the cookie of the one before", |p| { let cookie = p[28].payload()[48..56].to_vec(); p[41].payload()[48..56].copy_from_slice(&cookie); }, Rule::LnetCookie, Some(1)),
    ("lnet/brw-read-4k", "a WRITE with another key", |p| key(p, 2, |reth| reth[10] ^= 1), Rule::LnetSink, Some(2)),
    ("lnet/brw-write-4k", "a WRITE beyond the memory", |p| key(p, 1, |reth| reth[7] ^= 4), Rule::LnetSink, Some(1)),
    ("lnet/brw-write-4k", "a WRITE with the key of the transfer before", |p| { let writes = writes(p, 1); let first = p[writes[0]].bytes[12..24].to_vec(); p[writes[1]].bytes[12..24].copy_from_slice(&first); }, Rule::LnetSink, Some(1)),
    ("lnet/brw-read-4k", "a WRITE twice", |p| twice(p, 2), Rule::LnetSink, Some(2)),
    ("lnet/brw-write-4k", "a WRITE twice", |p| twice(p, 1), Rule::LnetSink, Some(1)),
    ("lnet/brw-read-4k", "a PUT_DONE of fewer bytes", |p| payload(p, 30, |m| m[56] = 1), Rule::LnetBytes, Some(2)),
    ("lnet/brw-write-4k", "a GET_DONE of more bytes", |p| payload(p, 29, |m| m[58] = 1), Rule::LnetBytes, Some(1)),
    ("lnet/brw-write-4k", "a GET_DONE without data", |p| { let at = writes(p, 1)[0]; p.drain(at..at + 4); let gap = 4; for packet in &mut p[at..] { later(packet, 1, gap); } }, Rule::LnetBytes, Some(1)),
];

/// Sends the message of a frame again and again, with the next sequence numbers and PSNs, in place of what follows.
fn many(packets: &mut Vec<Sent>, frame: usize) {
    packets.truncate(frame);
    for n in 1..=150 {
        let mut next = packets[frame - 1].clone();
        next.set_psn(next.psn() + n);
        next.time_ns += u64::from(n) * 1_000_000;
        let header = next.payload();
        header[7] += n as u8;
        seal(header);
        packets.push(next);
    }
}

/// Leaves port 4002 congested in the map of frames 129 to 139, before message 13 to it.
fn still_congested(packets: &mut [Sent]) {
    let bit = |packets: &mut [Sent], frame: usize| payload(packets, frame, |bytes| bytes[48 + 500] |= 1 << 2);
    for frame in 129..=134 {
        if packets[frame - 1].opcode() == Opcode::RcSendFirst {
            bit(packets, frame);
        }
    }
}

/// Clears the credits that all messages return.
fn no_credits(packets: &mut [Sent]) {
    for frame in 1..=packets.len() {
        if packets[frame - 1].opcode() == Opcode::RcSendOnly {
            payload(packets, frame, |m| m[7] = 0);
        }
    }
}

/// Indexes of the packets of a host that begin a WRITE.
fn writes(packets: &[Sent], host: u8) -> Vec<usize> {
    let is = |p: &Sent| p.opcode() == Opcode::RcWriteFirst && p.host() == host;
    packets
        .iter()
        .enumerate()
        .filter(|(_, p)| is(p))
        .map(|(at, _)| at)
        .collect()
}

/// Changes the RETH of a host's first WRITE.
fn key(packets: &mut [Sent], host: u8, change: impl Fn(&mut [u8])) {
    let at = writes(packets, host)[0];
    change(&mut packets[at].bytes[12..28]);
}

/// Sends a host's first WRITE again, with new PSNs.
fn twice(packets: &mut Vec<Sent>, host: u8) {
    let at = writes(packets, host)[0];
    let mut again = packets[at..at + 4].to_vec();
    for packet in &mut packets[at + 4..] {
        later(packet, host, -4);
    }
    for packet in &mut again {
        later(packet, host, -4);
    }
    packets.splice(at + 4..at + 4, again);
}

/// Takes `by` from the PSN of a packet that a host requested or is answered.
fn later(packet: &mut Sent, host: u8, by: i32) {
    let answer = packet.opcode() == Opcode::RcAcknowledge;
    if answer != (packet.host() == host) {
        let psn = packet.psn() as i32 - by;
        packet.set_psn(psn as u32 & 0xff_ffff);
    }
}

#[test]
fn each_damage_breaks_its_rule() {
    let mut wrong = vec![];
    for (name, what, damage, rule, fault) in DAMAGES {
        let mut packets = load(name);
        damage(&mut packets);
        let findings = judge(&packets);
        let found: Vec<_> = findings
            .iter()
            .map(|f| (f.frame, f.rule.id(), f.at_fault, &f.text))
            .collect();
        match findings.iter().find(|finding| finding.rule == *rule) {
            None => wrong.push(format!("{name}: {what}: {} expected, found {found:?}", rule.id())),
            Some(finding) if finding.at_fault.map(last_byte) != *fault => {
                wrong.push(format!("{name}: {what}: {fault:?} is at fault, found {found:?}"));
            }
            Some(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_rule_has_two_kinds_of_damage() {
    let mut kinds = BTreeMap::new();
    for (_, _, _, rule, _) in DAMAGES {
        *kinds.entry(rule.id()).or_insert(0) += 1;
    }
    for rule in Rule::ALL {
        let upper = rule.id().starts_with("rds-") || rule.id().starts_with("lnet-");
        assert!(!upper || kinds.get(rule.id()).is_some_and(|n| *n >= 2), "{}", rule.id());
    }
}

/// Captures of kernels of which nothing but what they do is found.
const WHOLE: &[&str] = &[
    "rds/connect-v4",
    "rds/connect-v6",
    "rds/ping",
    "rds/tos",
    "rds/congestion",
    "rds/race",
    "rds/rdma-write",
    "rds/rdma-read",
    "rds/rdma-use-once",
    "rds/rdma-write-7.3-7.3",
    "lnet/ping",
    "lnet/discover",
    "lnet/selftest-ping",
    "lnet/brw-read-4k",
    "lnet/brw-write-4k",
    "lnet/brw-read-3976",
    "lnet/brw-write-3984",
    "lnet/keepalive",
    "lnet/conns-per-peer-2",
    "lnet/restart-killed",
];

/// A capture that begins in the middle, or lacks a direction or frames, or has two frames in the wrong order, breaks no rule.
#[test]
fn what_a_capture_lacks_is_held_against_nobody() {
    let mut wrong = vec![];
    let mut check = |packets: &[Sent], what: String| {
        let findings = judge(packets);
        if !findings.is_empty() {
            wrong.push(format!("{what}: {findings:?}"));
        }
    };
    for name in WHOLE {
        let packets = load(name);
        check(&packets, (*name).to_owned());
        for from in (1..packets.len()).step_by(packets.len() / 20 + 1) {
            check(&packets[from..], format!("{name} from frame {}", from + 1));
        }
        for host in [1, 2] {
            let side: Vec<Sent> = packets.iter().filter(|p| p.host() == host).cloned().collect();
            check(&side, format!("{name}, only from host {host}"));
        }
        for at in 0..packets.len() {
            for lost in [1, 2, 5] {
                let mut some = packets.clone();
                some.drain(at..(at + lost).min(packets.len()));
                check(&some, format!("{name} without {lost} frames from {}", at + 1));
            }
            if at > 0 && packets[at].host() != packets[at - 1].host() {
                let mut swapped = packets.clone();
                swapped.swap(at - 1, at);
                if packets[at].time_ns - packets[at - 1].time_ns < 500_000 {
                    check(&swapped, format!("{name}, frames {at} and {} swapped", at + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Of messages 7 to 10 a packet of the first is lost, and the peer keeps the others: it acknowledges all when that packet has come again,
/// and before the others do.
#[test]
fn messages_that_a_peer_has_kept_may_be_acknowledged() {
    let whole = load("rds/loss");
    let kept = [49, 51, 52, 59, 60, 62, 63];
    let behind = [53, 54, 57, 65, 66, 55, 56, 58];
    let mut packets = whole[..48].to_vec();
    for (step, frame) in (1..).zip(kept.into_iter().chain(behind)) {
        let mut packet = whole[frame - 1].clone();
        packet.time_ns = whole[47].time_ns + step * 50_000;
        packets.push(packet);
    }
    let findings = judge(&packets);
    assert!(findings.is_empty(), "{findings:?}");
    header(&mut packets, 48 + kept.len() + 4, |h| h[15] = 11);
    let findings = judge(&packets);
    assert!(findings.iter().any(|f| f.rule == Rule::RdsAckFuture), "{findings:?}");
}

/// Message 39 is lost, the peer keeps 40 to 61, and has 39 from a packet that the capture lacks when the connection ends: it acknowledges
/// them over the next one.
#[test]
fn messages_that_a_peer_has_kept_may_be_acknowledged_over_the_next_connection() {
    let whole = load("rds/loss");
    let before = (1..=170).chain((172..=230).filter(|frame| whole[frame - 1].src.ip() == whole[0].src.ip()));
    let after = (231..=259).chain(306..=310).chain(260..=305);
    let frames: Vec<usize> = before.chain(after).collect();
    let mut packets: Vec<_> = (0u64..)
        .zip(&frames)
        .map(|(step, frame)| {
            let mut packet = whole[frame - 1].clone();
            packet.time_ns = whole[0].time_ns + step * 50_000;
            packet
        })
        .collect();
    let at = packets.len() - 50;
    header(&mut packets, at, |h| h[15] = 44);
    let findings = judge(&packets);
    assert!(!findings.iter().any(|f| f.rule == Rule::RdsAckFuture), "{findings:?}");
    header(&mut packets, at, |h| h[15] = 62);
    let findings = judge(&packets);
    assert!(findings.iter().any(|f| f.rule == Rule::RdsAckFuture), "{findings:?}");
}

#[test]
fn severities_are_those_of_the_specification() {
    let notes: Vec<_> = Rule::ALL
        .into_iter()
        .filter(|rule| rule.id().starts_with("rds-") && rule.severity() == Severity::Note)
        .collect();
    assert_eq!(notes, [Rule::RdsRestart, Rule::RdsAckBack]);
}
