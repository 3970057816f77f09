//! Packets of one request have one number.

use std::collections::BTreeMap;

use ferroce_dissect::{Dissection, ExchangeId};
use roce_bth::Packet;

use crate::common::{Frame, count, dissect, dissect_packets, frames, summaries};

const BTH_LEN: usize = 12;
/// Length of an RDS header.
const HEADER_LEN: usize = 48;

fn psn(frame: &Frame) -> u32 {
    Packet::parse(&frame.payload).unwrap().header.bth.psn.value()
}

fn set_psn(frame: &mut Frame, psn: u32) {
    frame.payload[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
}

/// Summaries of the frames of each exchange, the transport's headers left out.
fn by_exchange(name: &str) -> BTreeMap<ExchangeId, Vec<String>> {
    let mut all: BTreeMap<ExchangeId, Vec<String>> = BTreeMap::new();
    for dissection in dissect(name) {
        if let Some(id) = dissection.exchange {
            let text: Vec<_> = dissection.layers.iter().map(|l| l.summary.clone()).collect();
            all.entry(id).or_default().push(text.join(" | "));
        }
    }
    all
}

fn has(texts: &[String], part: &str) -> usize {
    texts.iter().filter(|t| t.contains(part)).count()
}

#[test]
fn a_block_request_is_followed_from_its_data_to_the_last_acknowledgement() {
    for name in ["rnbd.pcap", "rnbd-inv-on.pcap", "rnbd-inv-off.pcap", "rnbd-zeroes.pcap"] {
        let (mut writes, mut reads) = (0, 0);
        for (id, texts) in by_exchange(name) {
            let requests = has(&texts, "RTRS read request") + has(&texts, "RTRS write request");
            let responses = has(&texts, "RTRS response");
            assert!(requests <= 1 && responses == requests, "{name} {id}: {texts:#?}");
            if requests == 0 {
                continue;
            }
            assert!(has(&texts, "RC Acknowledge") >= 2, "{name} {id}: {texts:#?}");
            if has(&texts, "RNBD write of") == 1 {
                writes += 1;
                // All packets of the WRITE, not only the one with the immediate value.
                assert_eq!(
                    has(&texts, "RDMA Write First"),
                    has(&texts, "RDMA Write Last with"),
                    "{texts:#?}"
                );
            }
            if has(&texts, "RNBD read of") == 1 {
                reads += 1;
                assert_eq!(has(&texts, "RTRS data"), 1, "{name} {id}: {texts:#?}");
            }
        }
        assert!(writes >= 1 && reads >= 1, "{name}: {writes} writes, {reads} reads");
    }
}

#[test]
fn every_packet_of_a_session_but_heartbeats_belongs_to_a_request() {
    for name in ["rnbd.pcap", "rnbd-inv-off.pcap"] {
        let all = dissect(name);
        let without: Vec<&Dissection> = all.iter().filter(|d| d.exchange.is_none()).collect();
        assert!(
            without.is_empty(),
            "{name}: {:#?}",
            without.iter().map(|d| d.summary()).collect::<Vec<_>>()
        );
    }
}

#[test]
fn an_rdma_operation_of_rds_belongs_to_the_message_behind_it() {
    let all = by_exchange("rds/rdma-write.pcap");
    let with_data: Vec<_> = all.values().filter(|t| has(t, "RDMA Write Last") == 1).collect();
    assert_eq!(with_data.len(), 2);
    assert!(with_data.iter().all(|t| has(t, "after RDMA with key 0x400") == 1));
    let read = by_exchange("rds/rdma-read.pcap");
    let first = read.values().find(|t| has(t, "Read Request") == 1).unwrap();
    assert_eq!(has(first, "Read Response"), 16);
    assert_eq!(has(first, "after RDMA with key 0x600"), 1);
}

#[test]
fn a_retransmitted_message_of_rds_keeps_its_number() {
    let all = by_exchange("rds/loss.pcap");
    let again: Vec<_> = all.values().filter(|t| has(t, "RETRANSMITTED") > 0).collect();
    assert_eq!(again.len(), 24);
    let before = |t: &&&Vec<String>| {
        t.iter()
            .any(|s| s.contains("RDS message") && !s.contains("RETRANSMITTED"))
    };
    assert!(
        again.iter().filter(before).count() >= 8,
        "some were sent before the connection broke"
    );
}

#[test]
fn fragments_and_acknowledgements_of_rds_belong_to_their_message() {
    let all = by_exchange("rds/connect-v6.pcap");
    let long = all
        .values()
        .find(|t| has(t, "5000 bytes, fragment 1 of 2") == 1)
        .unwrap();
    assert_eq!(has(long, "fragment 2 of 2"), 1);
    let v4 = by_exchange("rds/connect-v4.pcap");
    let acked = v4.values().find(|t| has(t, "RDS acknowledgement, ack 1") == 1).unwrap();
    assert_eq!(has(acked, "RDS message seq 1"), 1);
}

#[test]
fn an_acknowledgement_between_two_fragments_of_rds_is_no_part_of_their_message() {
    let before = dissect("rds/connect-v6.pcap");
    let place = |part: &str| before.iter().position(|d| d.summary().contains(part)).unwrap();
    let (first, second) = (place("fragment 1 of 2"), place("fragment 2 of 2"));
    let mut packets = frames("rds/connect-v6.pcap");
    // The second fragment's SEND without sequence number, length, ports, flags and data.
    let mut ack = packets[second].clone();
    let header = &mut ack.payload[BTH_LEN..];
    header[..8].fill(0);
    header[16..26].fill(0);
    ack.payload.drain(BTH_LEN + HEADER_LEN..ack.payload.len() - 4);
    let psn = psn(&ack);
    set_psn(&mut packets[second], psn + 1);
    packets.insert(second, ack);
    let after = dissect_packets(&packets);
    let texts = summaries(&after, "RDS");
    assert_eq!(
        count(&texts, "RDS acknowledgement"),
        count(&summaries(&before, "RDS"), "RDS acknowledgement") + 1
    );
    assert!(after[second + 1].summary().contains("fragment 2 of 2"), "{texts:#?}");
    assert_eq!(after[second + 1].exchange, after[first].exchange);
    assert_eq!(count(&texts, "bytes of data where"), 0, "{texts:#?}");
}

#[test]
fn lnet_transfers_are_followed_by_cookies_and_handles() {
    let ping = by_exchange("lnet/ping.pcap");
    let pings: Vec<_> = ping.values().filter(|t| has(t, "GET 3960") == 1).collect();
    assert_eq!(pings.len(), 3);
    assert!(
        pings
            .iter()
            .all(|t| has(t, "REPLY 48") == 1 && has(t, "Acknowledge") == 2 && t.len() == 4)
    );
    let read = by_exchange("lnet/brw-read-64k.pcap");
    let bulk = read.values().find(|t| has(t, "PUT_REQ") == 1).unwrap();
    for part in [
        "PUT_ACK",
        "PUT_DONE",
        "LNet data by WRITE, 65536 bytes",
        "RDMA Write First",
    ] {
        assert_eq!(has(bulk, part), 1, "{part}: {bulk:#?}");
    }
    assert_eq!(has(bulk, "RDMA Write"), 64);
    let write = by_exchange("lnet/brw-write-4k.pcap");
    let bulk: Vec<_> = write.values().filter(|t| has(t, "GET_REQ") == 1).collect();
    assert!(!bulk.is_empty());
    assert!(
        bulk.iter()
            .all(|t| has(t, "GET_DONE") == 1 && has(t, "RDMA Write") == 4)
    );
}

#[test]
fn a_connection_is_one_exchange() {
    for name in ["rping.pcap", "ucmatose.pcap"] {
        let all = dissect(name);
        let with = |text: &str| {
            all.iter()
                .filter(|d| d.summary().contains(text))
                .map(|d| d.exchange)
                .collect::<Vec<_>>()
        };
        let (req, rep) = (with("CM REQ"), with("CM REP"));
        assert!(!req.is_empty() && req.iter().all(Option::is_some), "{name}");
        assert_eq!(req, rep, "{name}");
        assert_eq!(req, with("CM RTU"), "{name}");
    }
    let sidr = dissect("udaddy.pcap");
    let of = |text: &str| sidr.iter().find(|d| d.summary().contains(text)).unwrap().exchange;
    assert_eq!(of("SIDR_REQ"), of("SIDR_REP"));
    assert!(of("SIDR_REQ").is_some());
}
