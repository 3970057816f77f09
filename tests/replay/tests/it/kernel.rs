//! What `rdma_rxe` puts on the wire beside or against the specification, shown by the captures. `specs/kernel.md` lists it
//! with what ours does; that ours gets along with it is what `fixtures.rs` and the scenarios of the lab show.

use std::{collections::BTreeMap, net::IpAddr};

use ferroce_replay::{Manifest, fixtures, load};
use roce_bth::{NakCode, Opcode, Position, Psn, Syndrome};
use roce_pcap::{Capture, Ip, decode};
use roce_replay::{Event, is_request};

fn events(name: &str) -> Vec<Event> {
    load(&fixtures().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn opcode(event: &Event) -> Opcode {
    event.packet().header.bth.opcode
}

fn psn(event: &Event) -> Psn {
    event.packet().header.bth.psn
}

fn syndrome(event: &Event) -> Option<Syndrome> {
    event.packet().header.aeth().map(|a| a.syndrome)
}

fn is_rnr(event: &Event) -> bool {
    matches!(syndrome(event), Some(Syndrome::Rnr(_)))
}

fn is_nak(event: &Event, code: NakCode) -> bool {
    syndrome(event) == Some(Syndrome::Nak(code))
}

fn is_ack(event: &Event) -> bool {
    opcode(event) == Opcode::RcAcknowledge && matches!(syndrome(event), Some(Syndrome::Ack(_)))
}

/// Captures of the kernel on both sides, as plain pcap.
fn kernel_captures() -> Vec<String> {
    let others = ["made", "mixed", "scapy"];
    let made = |name: &str| others.iter().any(|o| name.starts_with(o)) || name.ends_with(".pcapng");
    let manifest = Manifest::read().expect("manifest");
    let names: Vec<String> = manifest
        .capture
        .into_iter()
        .map(|c| c.file)
        .filter(|n| !made(n))
        .collect();
    assert!(names.len() > 50);
    names
}

#[test]
fn ip_and_udp_headers() {
    let (mut v4, mut v6) = (0, 0);
    for name in kernel_captures() {
        let mut last = BTreeMap::<IpAddr, (u16, Vec<u8>)>::new();
        let mut capture = Capture::open(fixtures().join(&name)).expect("capture");
        while let Some(frame) = capture.next_frame() {
            let frame = frame.expect("frame");
            let Ok(datagram) = decode(frame.link, frame.data) else {
                continue;
            };
            if datagram.dst.port() != 4791 {
                continue;
            }
            let udp = datagram.datagram.len() - datagram.payload.len() - 8;
            let checksum = &datagram.datagram[udp + 6..udp + 8];
            assert_eq!(checksum, [0, 0], "{name} frame {}", frame.index);
            let Ip::V4 {
                identification,
                dont_fragment,
                ..
            } = datagram.ip
            else {
                v6 += 1;
                continue;
            };
            v4 += 1;
            assert!(dont_fragment, "{name} frame {}", frame.index);
            let before = last.insert(datagram.src.ip(), (identification, datagram.payload.to_vec()));
            // The relay of the lab repeats and swaps packets in some captures.
            let relayed = ["duplicates", "swapped"].iter().any(|n| name.starts_with(n));
            if let Some((before, payload)) = before
                && !relayed
            {
                let step = identification.wrapping_sub(before);
                assert!(
                    (1..0x8000).contains(&step),
                    "{name} frame {}: {before}, {identification}",
                    frame.index
                );
                assert!(payload != datagram.payload || step > 0);
            }
        }
    }
    assert!(v4 > 3000 && v6 > 100, "{v4} {v6}");
}

#[test]
fn an_acknowledgement_is_asked_for_at_the_end_and_after_65_packets() {
    let mut in_the_middle = 0;
    for name in kernel_captures() {
        let mut silent = BTreeMap::<(IpAddr, u32), u32>::new();
        for event in events(&name).iter().filter(|e| is_request(opcode(e))) {
            let bth = event.packet().header.bth;
            let count = silent.entry((event.src.ip(), bth.dest_qp.value())).or_default();
            let ends = matches!(bth.opcode.info().position, Position::Last | Position::Only);
            assert_eq!(
                bth.ack_req,
                ends || *count == 65,
                "{name} frame {}, {count} before",
                event.frame
            );
            in_the_middle += u32::from(bth.ack_req && !ends);
            *count = if bth.ack_req { 0 } else { *count + 1 };
        }
    }
    assert!(in_the_middle > 0, "no message is long enough to show it");
}

#[test]
fn after_an_rnr_nak_a_sequence_gap_is_reported() {
    let events = events("rnr-send.pcap");
    let rnr: Vec<usize> = (0..events.len()).filter(|&i| is_rnr(&events[i])).collect();
    assert!(rnr.len() >= 2);
    for &i in &rnr {
        let next = events[i + 1..]
            .iter()
            .find(|e| e.src == events[i].src)
            .expect("an answer");
        assert!(is_nak(next, NakCode::PsnSequenceError), "frame {}", next.frame);
        assert_eq!(psn(next), psn(&events[i]));
    }
}

#[test]
fn a_write_with_immediate_takes_its_receive_at_the_end_and_comes_again_whole() {
    let events = events("rnr-write-imm.pcap");
    let at = events.iter().position(is_rnr).expect("an RNR NAK");
    let first = psn(&events[0]);
    assert_eq!(opcode(&events[0]), Opcode::RcWriteFirst);
    assert_eq!(
        psn(&events[at]),
        first.add(2),
        "the NAK is for the last of three packets"
    );
    let again: Vec<Psn> = events[at + 1..]
        .iter()
        .filter(|e| is_request(opcode(e)))
        .map(psn)
        .take(3)
        .collect();
    assert_eq!(again, [first, first.add(1), first.add(2)]);
}

#[test]
fn duplicates_are_acknowledged_with_the_last_psn_executed() {
    let events = events("loss-write-ack-server.pcap");
    let first = events.iter().position(is_ack).expect("an acknowledgement");
    let executed = psn(&events[first]);
    let (mut repeated, mut newest) = (0, executed);
    for event in &events[first + 1..] {
        if is_request(opcode(event)) {
            repeated += u32::from(psn(event).diff(executed) <= 0);
            newest = if psn(event).diff(newest) > 0 {
                psn(event)
            } else {
                newest
            };
        } else {
            assert!(psn(event) == executed || psn(event) == newest, "frame {}", event.frame);
        }
    }
    assert!(repeated > 10, "{repeated}");
}

#[test]
fn after_a_timeout_all_is_repeated_although_it_is_acknowledged_meanwhile() {
    let events = events("loss-write-ack-client.pcap");
    let last = psn(events
        .iter()
        .find(|e| opcode(e) == Opcode::RcWriteLast)
        .expect("the last packet"));
    let requests = |e: &&Event| is_request(opcode(e));
    let sent: Vec<Psn> = events.iter().filter(requests).map(psn).collect();
    let len = sent.iter().position(|p| *p == last).expect("there") + 1;
    assert_eq!(sent[len..2 * len], sent[..len], "the whole WRITE twice");
    let acked = events
        .iter()
        .position(|e| is_ack(e) && psn(e) == last)
        .expect("the ACK");
    assert!(events[acked..].iter().filter(requests).any(|e| psn(e).diff(last) <= 0));
}

#[test]
fn a_read_asked_for_again_goes_on_with_a_middle_packet() {
    let events = events("loss-read-response-server.pcap");
    let asked: Vec<usize> = (0..events.len())
        .filter(|&i| opcode(&events[i]) == Opcode::RcReadRequest)
        .collect();
    assert!(
        psn(&events[asked[1]]).diff(psn(&events[asked[0]])) > 0,
        "from the middle"
    );
    let answers = &events[asked[1] + 1..asked[2]];
    assert!(answers.len() > 2);
    let (last, others) = answers.split_last().expect("answers");
    assert!(others.iter().all(|e| opcode(e) == Opcode::RcReadResponseMiddle));
    assert_eq!(opcode(last), Opcode::RcReadResponseLast);
}

#[test]
fn a_read_of_nothing_with_a_bad_key_is_refused_when_it_comes_again() {
    let events = events("mixed-read-nothing-again.pcap");
    let of = |op| events.iter().filter(move |e| opcode(e) == op);
    let asked: Vec<Psn> = of(Opcode::RcReadRequest).map(psn).collect();
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[0], asked[1], "the same request");
    assert_eq!(of(Opcode::RcReadResponseOnly).count(), 1);
    assert!(is_nak(events.last().expect("a NAK"), NakCode::RemoteAccessError));
}

#[test]
fn a_write_that_is_acknowledged_while_it_is_sent_again_is_never_completed() {
    for name in ["mixed-write-ack-jump.pcap", "mixed-write-ack-jump-6.12.pcap"] {
        let events = events(name);
        let of = |op| {
            (0..events.len())
                .filter(|i| opcode(&events[*i]) == op)
                .collect::<Vec<_>>()
        };
        let (answers, ends) = (of(Opcode::RcAcknowledge), of(Opcode::RcWriteLast));
        let ([nak, ack], [first, again]) = (&answers[..], &ends[..]) else {
            panic!("{name}: {answers:?} {ends:?}");
        };
        assert!(is_nak(&events[*nak], NakCode::PsnSequenceError) && first < nak);
        // All of it is acknowledged behind the first packet that comes again.
        assert_eq!((*ack, psn(&events[*ack])), (nak + 2, psn(&events[*first])), "{name}");
        // It goes on to the end, and then waits for ever, with no timer: the agent has seen no completion for 5 s.
        assert_eq!(
            (*again, psn(&events[*again])),
            (events.len() - 1, psn(&events[*first])),
            "{name}"
        );
    }
}

#[test]
fn a_refused_write_may_be_followed_by_one_more_packet() {
    let events = events("nak-write-rkey.pcap");
    let nak = events
        .iter()
        .position(|e| is_nak(e, NakCode::RemoteAccessError))
        .expect("a NAK");
    let after: Vec<Opcode> = events[nak + 1..].iter().map(opcode).collect();
    assert_eq!(after, [Opcode::RcWriteLast]);
}

#[test]
fn a_send_that_is_too_long_is_an_operational_error() {
    let events = events("nak-send-too-long.pcap");
    assert!(events.iter().any(|e| is_nak(e, NakCode::RemoteOperationalError)));
    assert!(!events.iter().any(|e| is_nak(e, NakCode::InvalidRequest)));
}

#[test]
fn the_local_ack_timeout_of_a_connection_is_2_seconds() {
    // With 6.12 and 7.3 it is 0.54 s.
    let code = |name: &str| if name.starts_with("rnbd-zeroes") { 17 } else { 19 };
    let mut requests = 0;
    for name in kernel_captures() {
        let mut capture = Capture::open(fixtures().join(&name)).expect("capture");
        while let Some(frame) = capture.next_frame() {
            let frame = frame.expect("frame");
            let Ok(datagram) = decode(frame.link, frame.data) else {
                continue;
            };
            // A MAD behind BTH and DETH; its attribute, and a REQ's timeout in the upper bits of byte 95 of the message.
            let Some(mad) = datagram.payload.get(20..276) else {
                continue;
            };
            if datagram.payload[0] == Opcode::UdSendOnly as u8 && mad[1] == 7 && mad[16..18] == [0, 0x10] {
                requests += 1;
                assert_eq!(mad[24 + 95] >> 3, code(&name), "{name} frame {}", frame.index);
            }
        }
    }
    assert!(requests >= 6, "{requests}");
}
