//! Captures that begin within connections.

use ferroce_dissect::{Dissection, Dissector, Service};
use roce_bth::Packet;

use crate::common::{count, dissect, frames, summaries};

/// Dissects a capture without the frames before `first`.
fn from(name: &str, first: u64) -> Vec<Dissection> {
    let mut dissector = Dissector::new();
    let all = frames(name).into_iter().filter(|f| f.meta.frame >= first);
    all.map(|f| dissector.packet(&f.meta, &Packet::parse(&f.payload).unwrap()))
        .collect()
}

/// Checks that all messages of a protocol are shown as if the capture were whole. Only numbers of exchanges and chunks may differ, and
/// LNet's credits are counted from the connection request on.
fn same_messages(name: &str, layer: &str, first: u64, known_from: u64) {
    let whole = dissect(name);
    let part = from(name, first);
    let texts = |all: &[Dissection]| -> Vec<(u64, String)> {
        let known = all.iter().filter(|d| d.frame >= known_from);
        known
            .filter_map(|d| Some((d.frame, d.layer(layer)?.summary.clone())))
            .map(|(frame, text)| match text.rsplit_once(", ") {
                Some((before, last)) if last.ends_with("credits left") => (frame, before.to_owned()),
                _ => (frame, text),
            })
            .collect()
    };
    let (whole, part) = (texts(&whole), texts(&part));
    assert!(!whole.is_empty());
    assert_eq!(whole, part, "{name}");
}

#[test]
fn rds_and_lnet_are_recognized_by_their_messages() {
    same_messages("rds/ping.pcap", "RDS", 15, 34);
    same_messages("rds/rdma-write.pcap", "RDS", 34, 34);
    same_messages("lnet/discover.pcap", "LNet", 4, 4);
    same_messages("lnet/brw-read-4k.pcap", "LNet", 4, 4);
    same_messages("lnet/brw-write-4k.pcap", "LNet", 4, 4);
    let rds = from("rds/ping.pcap", 15);
    assert!(rds.iter().all(|d| d.service.is_none_or(|s| s == Service::Rds)));
    let conns: Vec<_> = rds.iter().filter_map(|d| d.connection).collect();
    assert!(
        conns.iter().all(|c| *c == conns[0]),
        "both directions are one connection"
    );
}

#[test]
fn transfers_of_lnet_are_followed_without_the_connection_request() {
    let all = from("lnet/brw-read-4k.pcap", 4);
    let of = |text: &str| {
        let found = all.iter().find(|d| d.summary().contains(text));
        found.unwrap_or_else(|| panic!("{text}")).exchange
    };
    assert!(of("PUT_REQ").is_some());
    for text in ["PUT_ACK", "LNet data by WRITE", "PUT_DONE"] {
        assert_eq!(of(text), of("PUT_REQ"), "{text}");
    }
}

#[test]
fn block_requests_are_recognized_within_a_session() {
    for (name, first) in [("rnbd.pcap", 46), ("rnbd-inv-off.pcap", 49), ("rnbd-zeroes.pcap", 60)] {
        let all = from(name, first);
        let (rtrs, rnbd) = (summaries(&all, "RTRS"), summaries(&all, "RNBD"));
        let requests = count(&rtrs, "RTRS read request") + count(&rtrs, "RTRS write request");
        let answers = count(&rtrs, "OK, request in frame");
        assert!(
            requests > 3 && requests - answers <= 1,
            "{name}: {requests} requests, {answers} answers: {rtrs:#?}"
        );
        assert_eq!(count(&rnbd, "RNBD "), requests, "{name}");
        assert!(all.iter().all(|d| d.not_understood().is_empty()), "{name}");
        // The division of immediates is found out from the first answers.
        assert!(count(&rtrs, "request, chunk not known") < requests, "{name}: {rtrs:#?}");
        let whole = summaries(&dissect(name), "RTRS");
        let last = |all: &[String]| all.iter().rfind(|s| s.contains(" request, chunk")).cloned();
        assert_eq!(last(&rtrs), last(&whole), "{name}");
    }
}

#[test]
fn other_programs_are_not_mistaken() {
    for name in [
        "rc-pingpong-4k.pcap",
        "send-bw-rc.pcap",
        "verbs-ops.pcap",
        "write-bw.pcap",
        "rnr-write-imm.pcap",
        "made-connectx.pcap",
    ] {
        for dissection in dissect(name) {
            assert_eq!(dissection.service, None, "{name} {}", dissection.summary());
        }
    }
}
