//! Messages of lnet_selftest.

use std::collections::BTreeMap;

use lnet::{
    proto::{Body as Kib, ByteOrder, Message as KibMessage, Nid, ProtoError},
    selftest::{
        Name,
        proto::{
            Body, DATA_WORD, Features, FrameworkCounters, LnetCounters, MESSAGE_LEN, Message, Parameters, Pattern,
            RpcCounters, Service, Sid, destinations_to_bytes,
        },
    },
};
use proptest::{collection::vec, prelude::*};

use crate::capture::{Item, read};

const CAPTURES: [&str; 7] = [
    "selftest-ping",
    "brw-read-4k",
    "brw-read-64k",
    "brw-read-3976",
    "brw-write-4k",
    "brw-write-3984",
    "loss",
];

/// Messages of a capture.
fn messages(name: &str) -> Vec<Message> {
    let mut found = Vec::new();
    for item in read(&format!("lnet/{name}.pcap")) {
        let Item::Send(frame, bytes) = item else { continue };
        if let Ok(KibMessage {
            body: Kib::Immediate { payload, .. },
            ..
        }) = KibMessage::parse(&bytes)
            && payload.starts_with(&0xeeb0_f00du32.to_le_bytes())
        {
            let message = Message::parse(payload).unwrap_or_else(|e| panic!("{name} {frame}: {e}"));
            assert_eq!(message.to_bytes(), payload, "{name} {frame}");
            found.push(message);
        }
    }
    found
}

#[test]
fn every_message_of_a_kernel_is_made_again() {
    for name in CAPTURES {
        let mut kinds = BTreeMap::new();
        for message in messages(name) {
            assert_eq!((message.version, message.features), (1, Features::all()), "{name}");
            *kinds.entry(message.body.number()).or_insert(0) += 1;
        }
        for request in [0, 2, 6, 8] {
            assert_eq!(kinds.get(&request), kinds.get(&(request + 1)), "{name}: {kinds:?}");
        }
        assert!(kinds.contains_key(&0), "{name}: {kinds:?}");
    }
}

#[test]
fn the_kernels_say_what_they_test() {
    let test = |name| {
        let found = messages(name).into_iter().find(|m| m.body.number() == 8).unwrap();
        found.test().unwrap()
    };
    assert_eq!(test("selftest-ping"), Parameters::Ping { size: 0, flags: 0 });
    for (name, operation, len) in [
        ("brw-read-64k", Body::READ, 65_536),
        ("brw-read-3976", Body::READ, 3976),
        ("brw-write-3984", Body::WRITE, 3984),
    ] {
        let expected = Parameters::Bulk {
            operation,
            pattern: Pattern::Full as u32,
            len,
            offset: 0,
        };
        assert_eq!(test(name), expected, "{name}");
    }
    let stat = messages("brw-write-4k").into_iter().find(|m| m.body.number() == 7);
    let Some(Body::StatReply { rpc, lnet, .. }) = stat.map(|m| m.body) else {
        panic!()
    };
    let expected = RpcCounters {
        received: 5,
        bulk_get: 8192,
        ..RpcCounters::default()
    };
    assert_eq!(rpc, expected);
    assert_eq!((lnet.sent_bytes, lnet.received_bytes), (688, 9040));
}

/// A message of each type, with different numbers in all fields.
fn each() -> Vec<Body> {
    let sid = Sid {
        nid: Nid::o2ib([10, 1, 0, 2].into()),
        stamp: 0x0102_0304_0506_0708,
    };
    let name = Name::new("a session");
    let (reply_bits, bulk_bits, status) = (0x1122_3344_5566_7788, 0x2122_2324_2526_2728, 71);
    let framework = FrameworkCounters {
        running_ms: 1,
        active_batches: 2,
        zombie_sessions: 3,
        bulk_errors: 4,
        ping_errors: 5,
    };
    let rpc = RpcCounters {
        errors: 6,
        sent: 7,
        received: 8,
        dropped: 9,
        expired: 10,
        bulk_get: 11,
        bulk_put: 12,
    };
    let lnet = LnetCounters {
        messages: 13,
        messages_max: 14,
        errors: 15,
        sent: 16,
        received: 17,
        routed: 18,
        dropped: 19,
        sent_bytes: 20,
        received_bytes: 21,
        routed_bytes: 22,
        dropped_bytes: 23,
    };
    let test = Body::Test {
        reply_bits,
        bulk_bits,
        sid,
        batch: 4,
        service: 11,
        loops: 5,
        concurrency: 6,
        is_client: 1,
        stop_on_error: 2,
        nodes: 7,
        parameters: *b"abcdefghijkl",
    };
    let batch = Body::Batch {
        reply_bits,
        sid,
        batch: 4,
        operation: 1,
        test: 2,
        argument: 3,
    };
    let bulk = Body::Bulk {
        reply_bits,
        bulk_bits,
        operation: 1,
        len: 2,
        pattern: 3,
    };
    let ping = Body::Ping {
        reply_bits,
        magic: 1,
        number: 2,
        seconds: 3,
        nanoseconds: 4,
    };
    vec![
        Body::MakeSession {
            reply_bits,
            sid,
            force: 1,
            name,
        },
        Body::SessionMade {
            status,
            sid,
            timeout: 100,
            name,
        },
        Body::RemoveSession { reply_bits, sid },
        Body::SessionRemoved { status, sid },
        batch,
        Body::BatchReply {
            status,
            sid,
            active: 1,
            time: 2,
        },
        Body::Stat {
            reply_bits,
            sid,
            kind: 1,
        },
        Body::StatReply {
            status,
            sid,
            framework,
            rpc,
            lnet,
        },
        test,
        Body::TestReply { status, sid },
        Body::Debug {
            reply_bits,
            sid,
            flags: 1,
        },
        Body::DebugReply {
            status,
            sid,
            timeout: 100,
            batches: 2,
            name,
        },
        bulk,
        Body::BulkReply { status },
        ping,
        Body::PingReply {
            status,
            magic: 1,
            number: 2,
        },
    ]
}

#[test]
fn every_type_is_read_again_in_both_byte_orders_and_no_truncation_is() {
    for (number, body) in each().into_iter().enumerate() {
        assert_eq!(body.number() as usize, number);
        assert_eq!(body.service().is_none(), body.status().is_some());
        for order in [ByteOrder::Little, ByteOrder::Big] {
            let message = Message {
                order,
                ..Message::new(Features::all(), body)
            };
            let bytes = message.to_bytes();
            assert_eq!(Message::parse(&bytes), Ok(message));
            for len in (0..MESSAGE_LEN).chain([MESSAGE_LEN + 1]) {
                let mut other = bytes.to_vec();
                other.resize(len, 0);
                assert!(matches!(Message::parse(&other), Err(ProtoError::Short { .. })), "{len}");
            }
        }
    }
    let mut bytes = Message::new(Features::all(), each()[0]).to_bytes();
    for (at, value) in [(8, 16), (8, 17), (0, 1)] {
        let before = core::mem::replace(&mut bytes[at], value);
        assert!(Message::parse(&bytes).is_err(), "{at}");
        bytes[at] = before;
    }
    bytes[4] = 2;
    assert_eq!(
        Message::parse(&bytes).unwrap().version,
        2,
        "it is for the receiver to refuse"
    );
}

#[test]
fn fields_are_at_their_offsets() {
    let Some(test) = each().into_iter().find(|body| body.number() == 8) else {
        panic!()
    };
    let bytes = Message::new(Features::all(), test).to_bytes();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!([0, 4, 8, 12, 16, 20].map(u32_at), [0xeeb0_f00d, 1, 8, 0, 0, 1]);
    // Match bits, session, batch, then 32-bit fields but for two of a byte.
    assert_eq!(bytes[24..32], 0x1122_3344_5566_7788u64.to_le_bytes());
    assert_eq!(bytes[40..48], Nid::o2ib([10, 1, 0, 2].into()).0.to_le_bytes());
    assert_eq!([56, 64, 68, 72, 78].map(u32_at), [4, 11, 5, 6, 7]);
    assert_eq!(bytes[76..78], [1, 2]);
    assert_eq!(&bytes[82..94], b"abcdefghijkl");
}

#[test]
fn parameters_depend_on_service_and_features() {
    let bulk = Parameters::Bulk {
        operation: Body::WRITE,
        pattern: 3,
        len: 8192,
        offset: 8,
    };
    let ping = Parameters::Ping { size: 1, flags: 2 };
    for order in [ByteOrder::Little, ByteOrder::Big] {
        for features in [Features::all(), Features::empty()] {
            for parameters in [bulk, ping] {
                let body = Body::Test {
                    reply_bits: 1,
                    bulk_bits: 2,
                    sid: Sid::NONE,
                    batch: 1,
                    service: parameters.service().number(),
                    loops: 1,
                    concurrency: 1,
                    is_client: 1,
                    stop_on_error: 0,
                    nodes: 1,
                    parameters: parameters.to_bytes(order, features),
                };
                let message = Message {
                    order,
                    ..Message::new(features, body)
                };
                let expected = match parameters {
                    // Pages have no offset.
                    Parameters::Bulk {
                        operation,
                        pattern,
                        len,
                        ..
                    } if features.is_empty() => Parameters::Bulk {
                        operation,
                        pattern,
                        len,
                        offset: 0,
                    },
                    other => other,
                };
                assert_eq!(message.test(), Ok(expected));
            }
        }
    }
    assert!(
        Message::new(Features::all(), Body::BulkReply { status: 0 })
            .test()
            .is_err()
    );
}

#[test]
fn nodes_are_twelve_bytes_each() {
    let nodes = [1, 2, 3].map(|last| Nid::o2ib([10, 1, 0, last].into()));
    let bytes = destinations_to_bytes(&nodes);
    assert_eq!(bytes.len(), 36);
    assert_eq!(bytes[12..24], [2, 0, 1, 10, 0, 0, 5, 0, 0x39, 0x30, 0, 0]);
    let message = Message::new(Features::all(), each()[8]);
    assert_eq!(message.destinations(&bytes), nodes);
    assert_eq!(message.destinations(&bytes[..35]), nodes[..2]);
}

#[test]
fn patterns_are_looked_for_where_every_page_size_has_them() {
    let good = DATA_WORD.to_le_bytes().repeat(512);
    let with = |at: usize| {
        let mut data = good.clone();
        data[at] ^= 1;
        data
    };
    let kept = |pattern: Pattern, data: &[u8]| pattern.is_kept(data, ByteOrder::Little);
    for pattern in [Pattern::None, Pattern::Simple, Pattern::Full] {
        assert!(kept(pattern, &good) && kept(pattern, &good[..4093]) && kept(pattern, &good[..3]));
        let wrong = [0, 7, 2048, 4088, 4095].map(|at| kept(pattern, &with(at)));
        let expected = match pattern {
            Pattern::None => [true; 5],
            Pattern::Simple => [false, false, true, false, false],
            Pattern::Full => [false; 5],
        };
        assert_eq!(wrong, expected, "{pattern:?}");
    }
    assert!(!Pattern::Full.is_kept(&good, ByteOrder::Big));
    assert_eq!((0..5).filter_map(Pattern::from_wire).count(), 3);
}

#[test]
fn names_and_services_are_the_kernels() {
    assert_eq!(Name::new("read").to_string(), "read");
    assert_eq!(Name::new(&"x".repeat(40)).to_string(), "x".repeat(31));
    let portals = Service::ALL.map(|service| (service.number(), service.portal()));
    assert_eq!(portals[5..], [(5, 51), (11, 50), (12, 50)]);
}

proptest! {
    #[test]
    fn any_bytes_that_parse_are_emitted_again(mut bytes in vec(any::<u8>(), 160), number in 0u32..18, big in any::<bool>()) {
        let u32_bytes = |n: u32| if big { n.to_be_bytes() } else { n.to_le_bytes() };
        bytes[..4].copy_from_slice(&u32_bytes(0xeeb0_f00d));
        bytes[8..12].copy_from_slice(&u32_bytes(number));
        if let Ok(message) = Message::parse(&bytes) {
            let again = message.to_bytes();
            prop_assert_eq!(Message::parse(&again), Ok(message));
            // The shortest body is a status.
            prop_assert_eq!(&again[20..28], &bytes[20..28]);
            let _ = message.test();
        }
    }
}
