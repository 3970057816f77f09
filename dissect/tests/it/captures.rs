//! Messages that the captures show, as their descriptions say.

use std::fs;

use ferroce_dissect::Service;

use crate::common::{count, dissect, fixtures, summaries};

/// Captures with a peer that is no kernel.
fn is_odd(name: &str) -> bool {
    name.contains("odd-")
}

fn all_captures() -> Vec<String> {
    let mut names = Vec::new();
    for folder in ["", "rds/", "lnet/"] {
        for entry in fs::read_dir(fixtures().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "pcap") {
                names.push(format!("{folder}{}", path.file_name().unwrap().to_str().unwrap()));
            }
        }
    }
    names.sort();
    assert!(names.len() > 80, "fixtures are missing");
    names
}

#[test]
fn everything_in_a_kernels_capture_is_understood() {
    for name in all_captures().iter().filter(|name| !is_odd(name)) {
        for dissection in dissect(name) {
            let unknown = dissection.not_understood();
            let at = format!("{name} frame {}: {}", dissection.frame, dissection.summary());
            assert!(unknown.is_empty(), "{at}: {unknown:?}");
            assert!(
                !dissection.layers.is_empty() && !dissection.summary().is_empty(),
                "{at}"
            );
        }
    }
}

#[test]
fn every_message_of_a_known_protocol_has_an_exchange() {
    for name in all_captures().iter().filter(|name| !is_odd(name)) {
        for dissection in dissect(name) {
            let known = matches!(dissection.service, Some(Service::Rtrs | Service::Rds | Service::Lnet));
            let lost = dissection.summary().contains("beginning is missing");
            let heartbeat = dissection.summary().contains("heartbeat");
            let class = dissection.layers[0].summary.clone();
            let request = !["Acknowledge", "Read Response"].iter().any(|c| class.contains(c));
            if known && request && !lost && !heartbeat {
                let at = format!("{name} frame {}", dissection.frame);
                assert!(dissection.exchange.is_some(), "{at}: {}", dissection.summary());
            }
        }
    }
}

#[test]
fn rnbd_writes_reads_and_answers() {
    let all = dissect("rnbd.pcap");
    let (rtrs, rnbd) = (summaries(&all, "RTRS"), summaries(&all, "RNBD"));
    assert_eq!(count(&rtrs, "connection request, connection 0 of 2"), 1);
    assert_eq!(count(&rtrs, "connection request, connection 1 of 2"), 1);
    assert_eq!(count(&rtrs, "connection response, queue depth 512"), 2);
    assert_eq!(count(&rtrs, "information request, session name \"s1\""), 1);
    assert_eq!(count(&rtrs, "information response, 512 pieces"), 1);
    assert_eq!(count(&rnbd, "session information, version 2"), 1);
    assert_eq!(count(&rnbd, "session information answer, version 2"), 1);
    assert_eq!(count(&rnbd, "open of \"newroot/dev/ram0\", rw"), 1);
    assert_eq!(count(&rnbd, "open answer, device 0, 67108864 bytes"), 1);
    let requests = count(&rtrs, "RTRS read request") + count(&rtrs, "RTRS write request");
    assert_eq!(count(&rtrs, "RTRS response, chunk"), requests);
    assert_eq!(count(&rtrs, "OK, request in frame"), requests);
    assert!(requests > 10);
    // 256 KiB are written and read back.
    let bytes = |what: &str| -> u64 {
        let of = rnbd
            .iter()
            .filter_map(|s| s.strip_prefix(what)?.split(' ').next()?.parse::<u64>().ok());
        of.sum()
    };
    assert_eq!(bytes("RNBD write of "), 256 << 10);
    assert!(bytes("RNBD read of ") >= 256 << 10);
}

#[test]
fn rnbd_flushes_zeroes_and_closes() {
    let all = dissect("rnbd-zeroes.pcap");
    let rnbd = summaries(&all, "RNBD");
    assert_eq!(count(&rnbd, "RNBD flush"), 2, "{rnbd:#?}");
    assert_eq!(count(&rnbd, "RNBD write zeroes"), 1, "{rnbd:#?}");
    let all = dissect("rnbd-unmap.pcap");
    // The capture begins within the session.
    assert_eq!(count(&summaries(&all, "RNBD"), "RNBD close of device 0"), 1);
    assert!(all.iter().any(|d| d.summary().contains("CM DREQ")));
}

#[test]
fn rds_pings_are_answered() {
    let rds = summaries(&dissect("rds/ping.pcap"), "RDS");
    assert_eq!((count(&rds, "RDS ping"), count(&rds, "RDS pong")), (5, 5));
    assert_eq!(count(&rds, "congestion map"), 4);
    assert_eq!(count(&rds, "ports none"), 4);
    assert_eq!(count(&rds, "RDS acknowledgement"), 1);
    assert_eq!(count(&rds, "port 4001 to 9999, 10 bytes"), 1);
    assert_eq!(count(&rds, "10.77.0.1 to 10.77.0.2 version 3.1 tos 0"), 1);
}

#[test]
fn rds_shows_congestion_and_type_of_service() {
    let rds = summaries(&dissect("rds/congestion.pcap"), "RDS");
    assert_eq!(count(&rds, "ports 4002"), 3);
    let tos = summaries(&dissect("rds/tos.pcap"), "RDS");
    for service in [0, 8, 200] {
        assert_eq!(count(&tos, &format!("version 3.1 tos {service}")), 2, "{service}");
    }
    let v6 = summaries(&dissect("rds/connect-v6.pcap"), "RDS");
    assert_eq!(count(&v6, "fd77::1 to fd77::2 version 3.1"), 1);
    assert_eq!(count(&v6, "5000 bytes, fragment 2 of 2"), 1, "{v6:#?}");
}

#[test]
fn rds_loss_is_repaired() {
    let all = dissect("rds/loss.pcap");
    let rds = summaries(&all, "RDS");
    // Messages 38 to 61 come again over the next connection.
    assert_eq!(count(&rds, "RETRANSMITTED"), 24);
    assert!(all.iter().filter(|d| d.repeated).count() > 20);
    assert!(all.iter().any(|d| d.summary().contains("nak, PSN sequence error")));
    assert!(all.iter().any(|d| d.summary().contains("CM REJ")));
}

#[test]
fn rdma_of_rds_is_named() {
    let all = dissect("rds/rdma-write-7.3-7.3.pcap");
    let rds = summaries(&all, "RDS");
    assert_eq!(count(&rds, "offers memory rkey 0x300 offset 0x64"), 1);
    assert_eq!(count(&rds, "after RDMA with key 0x300, 8192 bytes written"), 1);
    assert_eq!(count(&rds, "after RDMA with key 0x300, 2000 bytes written"), 1);
    assert_eq!(count(&rds, "data by WRITE, 8192 bytes"), 1);
}

/// Messages of a session of lnet_selftest with one test, of two requests.
fn selftest_messages_are_named(summaries: &[String], test: &str, requests: [&str; 2]) {
    for service in ["make session", "remove session", "statistics", "test"] {
        let named = |kind: &str| count(summaries, &format!("selftest {service} {kind}"));
        assert_eq!((named("request"), named("reply, status 0")), (1, 1), "{service}");
    }
    for request in requests {
        assert!(
            count(summaries, &format!("selftest {test} request: {request}")) > 0,
            "{summaries:#?}"
        );
    }
    let named = |kind: &str| count(summaries, &format!("selftest {test} {kind}"));
    assert_eq!((named("request"), named("reply, status 0")), (2, 2));
    assert_eq!(count(summaries, "selftest"), 12);
}

#[test]
fn lnet_messages_have_the_kernels_names() {
    let of = |name: &str| summaries(&dissect(&format!("lnet/{name}.pcap")), "LNet");
    let ping = of("ping");
    assert_eq!(
        count(&ping, "CONNREQ, queue depth 8, 257 fragments, messages of 4096 bytes"),
        1
    );
    assert_eq!(count(&ping, "CONNACK"), 1);
    assert_eq!(count(&ping, "IMMEDIATE GET 3960 bytes portal 0"), 3);
    assert_eq!(count(&ping, "REPLY 48 bytes, ping information: 0@lo 10.77.0."), 3);
    let discover = of("discover");
    assert_eq!(
        count(&discover, "PUT 48 bytes portal 0 match 0x8000000000000000, ACK wanted"),
        3
    );
    assert_eq!(count(&discover, "IMMEDIATE ACK 48 bytes"), 3);
    let read = of("brw-read-64k");
    for kind in ["PUT_REQ", "PUT_ACK", "PUT_DONE"] {
        assert_eq!(count(&read, kind), 1, "{kind}");
    }
    let data = count(&read, "65536 bytes") - count(&read, "read 65536 bytes");
    assert_eq!(data, 4, "{read:#?}");
    assert_eq!(count(&read, "selftest bulk request: read 65536 bytes"), 1);
    let write = of("brw-write-3984");
    assert_eq!((count(&write, "GET_REQ"), count(&write, "GET_DONE")), (1, 1));
    assert_eq!(count(&of("keepalive"), "NOOP"), 2);
    selftest_messages_are_named(&of("selftest-ping"), "ping", ["number 0", "number 1"]);
    selftest_messages_are_named(&of("brw-write-4k"), "bulk", ["write 4096 bytes"; 2]);
    assert_eq!(count(&of("peer-credits-8-42"), "CONNACK, queue depth 8"), 1);
    assert_eq!(
        count(&of("restart-killed"), "reject: wrong incarnation (CONN_STALE)"),
        1
    );
    assert_eq!(count(&of("cksum"), "made over zeros instead of the payload"), 2);
}

#[test]
fn other_services_and_the_connection_manager_are_named() {
    let rping = summaries(&dissect("rping.pcap"), "CM");
    for text in ["CM REQ", "(TCP port 7174)", "CM REP", "CM RTU", "CM DREQ", "CM DREP"] {
        assert!(count(&rping, text) >= 1, "{text}: {rping:#?}");
    }
    let udaddy = dissect("udaddy.pcap");
    let cm = summaries(&udaddy, "CM");
    assert!(
        count(&cm, "CM SIDR_REQ") >= 1 && count(&cm, "status 0 (queue pair is valid)") >= 1,
        "{cm:#?}"
    );
    let reject = summaries(&dissect("cm-reject.pcap"), "CM");
    assert_eq!(
        count(&reject, "invalid service ID: nothing listens there (8)"),
        1,
        "{reject:#?}"
    );
    let ucmatose = dissect("ucmatose.pcap");
    assert!(ucmatose.iter().any(|d| d.service == Some(Service::Other)));
}

#[test]
fn messages_of_services_without_a_dissector_are_named() {
    use ferroce_dissect::Dissector;
    use roce_bth::Packet;

    // The ucmatose capture, as if it were NVMe: its REQs name another port.
    let mut dissector = Dissector::new();
    let mut named = 0;
    for mut frame in crate::common::frames("ucmatose.pcap") {
        let mad = 20..20 + 256;
        if frame.payload[0] == 0x64 && frame.payload[mad.start + 17] == 0x10 {
            frame.payload[mad.start + 24 + 14..mad.start + 24 + 16].copy_from_slice(&4420u16.to_be_bytes());
        }
        let dissection = dissector.packet(&frame.meta, &Packet::parse(&frame.payload).unwrap());
        if let Some(layer) = dissection.layer("NVMe/RDMA") {
            assert!(layer.summary.starts_with("NVMe/RDMA message of "), "{}", layer.summary);
            assert_eq!(dissection.service, Some(Service::Nvme));
            named += 1;
        }
    }
    assert!(named >= 1);
}
