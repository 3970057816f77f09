//! Statistics of flows against counts made here, and latencies of packets with known times.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use roce_bth::{Bth, Class, Credits, Header, NakCode, Opcode, Packet, Psn, Qpn, Reth, Service, Syndrome};
use roce_pcap::{
    Capture, Checker, Flow, FlowReport, Flows, MAX_FLOWS, MAX_PORTS, decode,
    judge::{Event, EventKind, Judge},
};

use crate::common::wire::{A, B, QP_A, QP_B, Wire, ack, answer, request, write};

fn flows_of(path: &Path) -> FlowReport {
    let (mut checker, mut flows) = (Checker::new("test"), Flows::new());
    let mut capture = Capture::open(path).unwrap();
    while let Some(frame) = capture.next_frame() {
        checker.frame(&frame.unwrap(), |event, _| flows.event(event));
    }
    flows.finish(checker.judge())
}

fn fixtures() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures");
    let files = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let mut files: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|e| e == "pcap"))
        .collect();
    files.sort();
    assert!(files.len() > 50);
    files
}

/// Counts of one direction: packets from one address to a queue pair.
#[derive(Default, PartialEq, Eq, Debug)]
struct Counted {
    packets: u64,
    bytes: u64,
    messages: u64,
    sent_again: u64,
    rnr_naks: u64,
    sequence_naks: u64,
    fatal_naks: u64,
    ports: BTreeMap<u16, u64>,
}

/// Sender, receiver, and the receiver's queue pair.
type Key = (IpAddr, IpAddr, u32);

/// Counts a capture without the judge. The flag says whether PSNs of requests are comparable: there are no READs.
fn count(path: &Path) -> (BTreeMap<Key, Counted>, bool) {
    let mut counts = BTreeMap::<Key, Counted>::new();
    let (mut seen, mut first, mut comparable) = (BTreeSet::new(), BTreeMap::new(), true);
    let mut capture = Capture::open(path).unwrap();
    while let Some(frame) = capture.next_frame() {
        let frame = frame.unwrap();
        let datagram = decode(frame.link, frame.data).unwrap();
        let Packet { header, payload } = Packet::parse(datagram.payload).unwrap();
        let (bth, info) = (&header.bth, header.bth.opcode.info());
        if bth.dest_qp.value() <= 1 || info.class == Class::Cnp {
            continue;
        }
        let key = (datagram.src.ip(), datagram.dst.ip(), bth.dest_qp.value());
        let counted = counts.entry(key).or_default();
        counted.packets += 1;
        counted.bytes += payload.len() as u64;
        *counted.ports.entry(datagram.src.port()).or_default() += 1;
        let answers = [Class::ReadResponse, Class::Acknowledge, Class::AtomicAcknowledge];
        comparable &= info.class != Class::ReadRequest;
        if !answers.contains(&info.class) {
            // A PSN before the first was sent before the capture.
            let old = bth.psn.diff(*first.entry(key).or_insert(bth.psn)) < 0;
            let again = info.service == Service::Rc && (!seen.insert((key, bth.psn.value())) || old);
            counted.sent_again += u64::from(again);
            counted.messages += u64::from(info.position.ends() && !again);
        }
        match header.aeth().map(|aeth| aeth.syndrome) {
            Some(Syndrome::Rnr(_)) => counted.rnr_naks += 1,
            Some(Syndrome::Nak(NakCode::PsnSequenceError)) => counted.sequence_naks += 1,
            Some(Syndrome::Nak(_)) => counted.fatal_naks += 1,
            _ => {}
        }
    }
    (counts, comparable)
}

fn key(flow: &Flow) -> Key {
    (flow.src.addr, flow.dst.addr, flow.dst.qpn.unwrap())
}

#[test]
fn counts_are_those_of_the_packets() {
    let (mut compared, mut again, mut naks) = (0, 0, 0);
    for path in fixtures() {
        // Its FLUSHes have a wrong ICRC, and are dropped.
        if path.ends_with("annex-a19.pcap") {
            continue;
        }
        let name = path.display();
        let (mut counts, comparable) = count(&path);
        for flow in flows_of(&path).flows.iter().filter(|flow| flow.packets > 0) {
            let counted = counts.remove(&key(flow)).unwrap_or_else(|| panic!("{name}: {flow:?}"));
            assert_eq!(
                (flow.packets, flow.bytes),
                (counted.packets, counted.bytes),
                "{name}: {flow:?}"
            );
            let ports = flow.udp_ports.iter().map(|port| (port.port, port.packets));
            assert_eq!(ports.collect::<BTreeMap<_, _>>(), counted.ports, "{name}");
            if comparable {
                compared += 1;
                again += counted.sent_again;
                let found = (flow.messages, flow.retransmissions);
                assert_eq!(found, (counted.messages, counted.sent_again), "{name}: {flow:?}");
                assert!(flow.first_bytes <= flow.bytes && (flow.first_bytes == flow.bytes || flow.retransmissions > 0));
            }
        }
        // Packets of no flow: none is left.
        assert!(counts.is_empty(), "{name}: {counts:?}");
        // NAKs are counted where the requests are.
        let (counts, _) = count(&path);
        for flow in flows_of(&path).flows {
            let Some(qpn) = flow.src.qpn else { continue };
            let got = counts.get(&(flow.dst.addr, flow.src.addr, qpn));
            let got = got.map_or([0; 3], |c| [c.rnr_naks, c.sequence_naks, c.fatal_naks]);
            assert_eq!(
                [flow.rnr_naks, flow.sequence_naks, flow.fatal_naks],
                got,
                "{name}: {flow:?}"
            );
            naks += got.iter().sum::<u64>();
        }
    }
    assert!(
        compared > 60 && again > 50 && naks > 30,
        "{compared} flows, {again} sent again, {naks} NAKs"
    );
}

#[test]
fn latencies_and_goodput_are_those_of_the_times() {
    let mut wire = Wire::stated();
    wire.send(0, QP_B, write(10, 1000), 1000);
    wire.send(10, QP_A, ack(10, 1), 0);
    // Idle for 90 us, which is not active time.
    wire.send(100, QP_B, write(11, 1000), 1000);
    wire.send(130, QP_A, ack(11, 2), 0);
    let mut read = request(Opcode::RcReadRequest, 12);
    read.reth = Some(Reth {
        dma_len: 2048,
        ..Reth::default()
    });
    wire.send(200, QP_B, read, 0);
    let syndrome = Syndrome::Ack(Credits::INVALID);
    wire.send(210, QP_A, answer(Opcode::RcReadResponseFirst, 12, syndrome, 3), 1024);
    wire.send(250, QP_A, answer(Opcode::RcReadResponseLast, 13, syndrome, 3), 1024);
    let flows = wire.finish();
    let [from_a, from_b] = flows.as_slice() else {
        panic!("{flows:?}")
    };

    assert_eq!((from_a.src.qpn, from_a.dst.qpn), (Some(QP_A), Some(QP_B)));
    assert_eq!((from_a.packets, from_a.messages, from_a.first_bytes), (3, 3, 2000));
    let round_trip = from_a.round_trip.unwrap();
    assert_eq!(
        (round_trip.count, round_trip.min_ns, round_trip.max_ns),
        (2, 10_000, 30_000)
    );
    let read = from_a.read_latency.unwrap();
    assert_eq!(
        [read.count, read.min_ns, read.p50_ns, read.p99_ns, read.max_ns],
        [1, 50_000, 50_000, 50_000, 50_000]
    );
    assert_eq!(
        (from_a.active_ns, from_a.goodput_bits_per_s),
        (40_000, Some(400_000_000))
    );

    assert_eq!((from_b.packets, from_b.messages, from_b.first_bytes), (4, 0, 2048));
    assert_eq!((from_b.round_trip, from_b.read_latency), (None, None));
    assert_eq!(
        (from_b.active_ns, from_b.goodput_bits_per_s),
        (50_000, Some(2048 * 8 * 20_000))
    );
}

#[test]
fn what_is_sent_again_counts_once_for_goodput_and_has_no_latency() {
    let mut wire = Wire::stated();
    wire.send(0, QP_B, write(10, 100), 100);
    wire.send(1, QP_B, write(12, 100), 100);
    wire.send(
        2,
        QP_A,
        answer(Opcode::RcAcknowledge, 11, Syndrome::Nak(NakCode::PsnSequenceError), 1),
        0,
    );
    // It was lost before the capture; the other one comes again.
    wire.send(3, QP_B, write(11, 100), 100);
    wire.send(4, QP_B, write(12, 100), 100);
    wire.ecn = 3;
    wire.send(5, QP_A, ack(12, 3), 0);
    wire.ecn = 0;
    wire.send(6, QP_A, Header::new(Bth::new(Opcode::Cnp, Qpn::new(0), Psn::new(0))), 0);
    let flows = wire.finish();
    let [from_a, from_b] = flows.as_slice() else {
        panic!("{flows:?}")
    };
    assert_eq!((from_a.packets, from_a.bytes, from_a.first_bytes), (4, 400, 300));
    assert_eq!(
        (from_a.retransmissions, from_a.skipped, from_a.sequence_naks),
        (1, 1, 1)
    );
    assert_eq!((from_a.messages, from_a.round_trip, from_a.active_ns), (3, None, 5000));
    assert_eq!((from_a.cnps, from_a.ecn_marks), (1, 0));
    assert_eq!(
        (from_b.packets, from_b.ecn_marks, from_b.sequence_naks, from_b.cnps),
        (3, 1, 0, 0)
    );
}

#[test]
fn conversations_that_turn_out_to_be_one_are_one() {
    let mut wire = Wire::new();
    // The capture begins with an answer whose request it doesn't have: its sender's queue pair is not known.
    wire.send(0, QP_A, ack(9, 7), 0);
    wire.send(10, QP_B, write(10, 64), 64);
    wire.send(15, QP_A, ack(10, 8), 0);
    wire.send(20, QP_B, write(11, 64), 64);
    wire.send(30, QP_A, ack(11, 9), 0);
    let flows = wire.finish();
    let [from_b, from_a] = flows.as_slice() else {
        panic!("{flows:?}")
    };
    assert_eq!((from_a.src.qpn, from_a.dst.qpn), (Some(QP_A), Some(QP_B)));
    assert_eq!(
        (from_a.src.addr, from_a.packets, from_a.messages),
        (A.parse().unwrap(), 2, 2)
    );
    assert_eq!(
        (from_b.src.addr, from_b.packets, from_b.messages),
        (B.parse().unwrap(), 3, 0)
    );
    let round_trip = from_a.round_trip.unwrap();
    assert_eq!((round_trip.count, round_trip.max_ns), (2, 10_000));
    assert_eq!(from_a.time_ns, [1_010_000, 1_020_000]);
}

#[test]
fn ports_beyond_the_bound_are_counted_together() {
    let mut wire = Wire::stated();
    for n in 0..40 {
        wire.port = 50_000 + n as u16 % 20;
        wire.send(u64::from(n), QP_B, write(n, 8), 8);
    }
    let flows = wire.finish();
    assert_eq!(flows[0].udp_ports.len(), MAX_PORTS);
    let counted: u64 = flows[0].udp_ports.iter().map(|port| port.packets).sum();
    assert_eq!((counted, flows[0].other_ports_packets), (32, 8));
}

#[test]
fn flows_beyond_the_bound_are_left_out() {
    let mut flows = Flows::new();
    for conversation in 0..MAX_FLOWS / 2 + 5 {
        flows.event(&Event {
            frame: 1,
            time_ns: 1,
            conversation,
            sender: 0,
            generation: 0,
            src: A.parse().unwrap(),
            src_port: 1,
            congestion: false,
            bytes: 1,
            opcode: Opcode::UdSendOnly,
            kind: EventKind::Datagram,
        });
    }
    let report = flows.finish(&Judge::new());
    assert_eq!((report.packets_left_out, report.flows.len()), (5, 0));
}
