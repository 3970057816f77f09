//! Messages of peers that are no kernels, and changed bytes.

use ferroce_dissect::{Base, Dissection, Dissector, Field};
use proptest::{collection::vec, prelude::*};
use roce_bth::Packet;

use crate::common::{Frame, count, dissect, frames, summaries};

#[test]
fn wrong_messages_are_shown_with_the_reason() {
    let rds = dissect("rds/odd-breaks.pcap");
    let texts = summaries(&rds, "RDS");
    for part in [
        "header checksum",
        "RDS header: 40 bytes, needs 48",
        "100 bytes of data where 4096 belong",
    ] {
        assert!(count(&texts, part) >= 1, "{part}: {texts:#?}");
    }
    assert!(rds.iter().any(|d| !d.not_understood().is_empty()));
    let lnet = summaries(&dissect("lnet/odd-messages.pcap"), "LNet");
    for part in [
        "o2iblnd message type 0xee is not defined",
        "120 bytes, needs 200",
        "fragments of a descriptor 0",
        "fragments of a descriptor 258",
        "an ACK or GET has no data",
        "LNet header type 0x9 is not defined",
        "checksum wrong",
        "LNet IMMEDIATE of version 1 (0x11)",
    ] {
        assert!(count(&lnet, part) >= 1, "{part}: {lnet:#?}");
    }
    let requests = summaries(&dissect("lnet/odd-requests.pcap"), "LNet");
    for part in [
        "CONNREQ of version 1",
        "version 0x13",
        "magic",
        "reject: too many fragments (RDMA_FRAGS)",
        "reject: queue too deep (MSG_QUEUE_SIZE)",
        "reject: request not acceptable (FATAL)",
    ] {
        assert!(count(&requests, part) >= 1, "{part}: {requests:#?}");
    }
    let rejects = summaries(&dissect("rds/odd-rejects.pcap"), "RDS");
    assert!(
        count(&rejects, "RDS reject 1") >= 1 && count(&rejects, "RDS reject 16777216") == 1,
        "{rejects:#?}"
    );
}

fn within(field: &Field, len: usize) {
    assert!(
        field.offset <= len && field.len <= len - field.offset,
        "{field:?} in {len} bytes"
    );
    for child in &field.children {
        within(child, len);
    }
}

/// Checks that fields are inside the packet.
fn check(dissection: &Dissection, len: usize) {
    for layer in dissection.layers.iter().filter(|l| l.base == Base::Packet) {
        for field in &layer.fields {
            within(field, len);
        }
    }
    assert!(!dissection.summary().is_empty());
    assert!(serde_json::to_string(dissection).is_ok());
}

#[test]
fn fields_are_inside_their_packets() {
    for name in [
        "rnbd.pcap",
        "rds/rdma-write.pcap",
        "lnet/odd-messages.pcap",
        "lnet/odd-requests.pcap",
        "udaddy.pcap",
    ] {
        let mut dissector = Dissector::new();
        for frame in frames(name) {
            let dissection = dissector.packet(&frame.meta, &Packet::parse(&frame.payload).unwrap());
            check(&dissection, frame.payload.len());
        }
    }
}

/// Change of a packet: its frame, place and byte.
type Change = (prop::sample::Index, prop::sample::Index, u8);

fn changed(name: &str, most: usize, changes: &[Change], lost: &[prop::sample::Index]) {
    let mut all: Vec<Frame> = frames(name);
    all.truncate(most);
    for (frame, place, byte) in changes {
        let frame = frame.get(&all).meta.frame;
        let frame = all.iter_mut().find(|f| f.meta.frame == frame).unwrap();
        let place = place.index(frame.payload.len());
        frame.payload[place] = *byte;
    }
    for index in lost {
        if all.len() > 1 {
            all.remove(index.index(all.len()));
        }
    }
    let mut dissector = Dissector::new();
    for frame in &all {
        if let Ok(packet) = Packet::parse(&frame.payload) {
            check(&dissector.packet(&frame.meta, &packet), frame.payload.len());
        }
    }
}

proptest! {
    #[test]
    fn changed_packets_never_panic(
        which in 0usize..8,
        changes in vec(any::<Change>(), 0..60),
        lost in vec(any::<prop::sample::Index>(), 0..10),
    ) {
        let names = [
            "rnbd.pcap",
            "rnbd-zeroes.pcap",
            "rds/ping.pcap",
            "rds/rdma-write-7.3-7.3.pcap",
            "lnet/discover.pcap",
            "lnet/brw-read-4k.pcap",
            "lnet/odd-messages.pcap",
            "udaddy.pcap",
        ];
        changed(names[which], 80, &changes, &lost);
    }
}
