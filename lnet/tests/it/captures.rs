//! The kernel's messages, read and emitted again byte for byte.

use std::collections::BTreeMap;

use lnet::proto::{
    Body, Checksum, Features, LnetHdr, Message, MsgType, NiStatus, Operation, PORT, PingInfo, ProtoError, Reject, Why,
};
use zerocopy::IntoBytes;

use crate::capture::{Cm, Item, read};

/// Captures with kernels on both sides.
const KERNELS: [&str; 15] = [
    "ping",
    "discover",
    "selftest-ping",
    "brw-read-4k",
    "brw-read-64k",
    "brw-read-3976",
    "brw-write-4k",
    "brw-write-3984",
    "peer-credits-8-42",
    "keepalive",
    "cksum",
    "conns-per-peer-2",
    "restart-killed",
    "loss",
    "versions-race-both-reject-2.17-2.15",
];

/// Makes a message again from what it says.
fn check(at: &str, bytes: &[u8]) -> MsgType {
    let message = Message::parse(bytes).unwrap_or_else(|e| panic!("{at}: {e}"));
    let again = message.to_bytes();
    assert_eq!(again, bytes[..again.len()], "{at}");
    assert!(bytes[again.len()..].iter().all(|b| *b == 0), "{at}");
    assert!(message.trailing.is_empty(), "{at}");
    if let Some(hdr) = message.body.hdr() {
        let operation = hdr.check().unwrap_or_else(|e| panic!("{at}: {e}"));
        let ours = LnetHdr::new(hdr.dst(), hdr.src(), hdr.payload_length.get(), &operation);
        // The bytes that a REPLY, GET or ACK does not use are zeros, too.
        assert_eq!(ours.as_bytes(), hdr.as_bytes(), "{at}");
        assert_eq!((hdr.src(), hdr.dst()), (message.src, message.dst), "{at}");
    }
    message.body.kind()
}

#[test]
fn every_message_of_a_kernel_is_made_again() {
    for name in KERNELS {
        let mut kinds = BTreeMap::new();
        for item in read(&format!("lnet/{name}.pcap")) {
            match item {
                Item::Private(frame, Cm::Rej, _, data) => {
                    // Of the connection manager, not of o2iblnd, if it is all zeros.
                    if data.iter().any(|b| *b != 0) {
                        let reject = Reject::parse(&data).unwrap_or_else(|e| panic!("{name} {frame}: {e}"));
                        assert_eq!(reject.to_bytes(), data[..Reject::LEN], "{name} {frame}");
                        assert!(reject.why.name().is_some());
                    }
                }
                Item::Private(frame, cm, port, data) => {
                    assert!(cm != Cm::Req || port == PORT, "{name} {frame}");
                    let kind = check(&format!("{name} frame {frame}"), &data);
                    let expected = if cm == Cm::Req {
                        MsgType::ConnReq
                    } else {
                        MsgType::ConnAck
                    };
                    assert_eq!(kind, expected, "{name} frame {frame}");
                }
                Item::Send(frame, bytes) => {
                    let kind = check(&format!("{name} frame {frame}"), &bytes);
                    *kinds.entry(kind).or_insert(0) += 1;
                }
            }
        }
        assert!(!kinds.is_empty(), "{name}");
        let of = |kind| kinds.get(&kind).copied().unwrap_or(0);
        assert_eq!(of(MsgType::PutReq), of(MsgType::PutDone), "{name}");
        assert_eq!(of(MsgType::PutReq), of(MsgType::PutAck), "{name}");
        assert_eq!(of(MsgType::GetReq), of(MsgType::GetDone), "{name}");
        let expected = match name {
            "keepalive" => of(MsgType::Noop) == 2,
            "brw-read-4k" | "brw-read-64k" => of(MsgType::PutReq) > 0,
            "brw-write-4k" | "brw-write-3984" | "loss" => of(MsgType::GetReq) > 0,
            "brw-read-3976" => of(MsgType::PutReq) == 0,
            _ => true,
        };
        assert!(expected, "{name}: {kinds:?}");
    }
}

#[test]
fn ping_information_is_made_again() {
    let mut found = 0;
    for item in read("lnet/ping.pcap") {
        let Item::Send(_, bytes) = item else { continue };
        let message = Message::parse(&bytes).unwrap();
        let Body::Immediate { hdr, payload } = message.body else {
            panic!("{message:?}")
        };
        if let Ok(Operation::Reply { .. }) = hdr.operation() {
            let info = PingInfo::parse(payload).unwrap();
            assert_eq!(info.features, Features::from_bits_truncate(0x1e));
            let interfaces: Vec<NiStatus> = info.interfaces().collect();
            assert_eq!(interfaces[0].nid.to_string(), "0@lo");
            assert_eq!(interfaces[1].nid, message.src);
            let again = PingInfo::emit(info.order, info.features, info.pid, &interfaces, info.rest());
            assert_eq!(again, payload);
            found += 1;
        }
    }
    assert_eq!(found, 3);
}

#[test]
fn checksums_are_those_that_the_capture_shows() {
    let mut judged = Vec::new();
    for item in read("lnet/cksum.pcap") {
        let (Item::Send(_, bytes) | Item::Private(_, Cm::Req | Cm::Rep, _, bytes)) = item else {
            continue;
        };
        judged.push(Message::parse(&bytes).unwrap().judge_checksum());
    }
    assert!(
        judged.iter().filter(|j| **j == Checksum::Signed).count() >= 3,
        "{judged:?}"
    );
    assert!(judged.contains(&Checksum::ZeroPayload), "{judged:?}");
    assert!(
        !judged.contains(&Checksum::None) && !judged.contains(&Checksum::Wrong),
        "{judged:?}"
    );
}

#[test]
fn rejects_of_odd_requests_have_the_reasons_of_the_kernel() {
    let mut counts = BTreeMap::new();
    let mut refused = Vec::new();
    for item in read("lnet/odd-requests.pcap") {
        match item {
            Item::Private(_, Cm::Rej, _, data) => {
                *counts.entry(Reject::parse(&data).unwrap().why.0).or_insert(0) += 1;
            }
            Item::Private(_, Cm::Req, _, data) => refused.extend(Message::parse(&data).err()),
            _ => {}
        }
    }
    let reasons = [Why::FATAL, Why::CONN_STALE, Why::RDMA_FRAGS, Why::MSG_QUEUE_SIZE];
    assert!(reasons.iter().all(|why| counts.contains_key(&why.0)), "{counts:?}");
    assert!(refused.contains(&ProtoError::Version1), "{refused:?}");
    assert!(refused.contains(&ProtoError::Version(0x13)), "{refused:?}");
    assert!(
        refused.iter().any(|e| matches!(e, ProtoError::Magic { .. })),
        "{refused:?}"
    );
}
