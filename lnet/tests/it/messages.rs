//! Messages of o2iblnd and headers of LNet.

use lnet::proto::{
    Body, ByteOrder, Checksum, Completion, ConnParams, Fragment, Fragments, HEAD_LEN, Handle, LnetHdr, MAX_FRAGS,
    MAX_IMMEDIATE, MAX_MSG, MAX_PAYLOAD, Message, MsgType, Nid, Operation, PID_LUSTRE, ProtoError, RdmaDesc, checksum,
    peek,
};
use proptest::{collection::vec, prelude::*};
use zerocopy::{FromBytes, IntoBytes};

const GET: Operation = Operation::Get {
    return_md: Handle {
        interface: 1,
        object: 2,
    },
    match_bits: 3,
    portal: 4,
    src_offset: 5,
    sink_length: 6,
};

fn nid(last: u8) -> Nid {
    Nid::o2ib([10, 1, 0, last].into())
}

/// A message of each type.
fn each(order: ByteOrder, check: impl Fn(Message<'_>)) {
    let hdr = LnetHdr::new(nid(1), nid(2), 0, &GET);
    let list = [
        Fragment {
            nob: 7,
            addr: 0x1122_3344_5566_7788,
        },
        Fragment { nob: 21, addr: 9 },
    ];
    let desc = RdmaDesc {
        key: 0xa65d,
        frags: Fragments::List(&list),
    };
    let params = ConnParams {
        queue_depth: 8,
        max_frags: 257,
        max_msg_size: 4096,
    };
    let done = Completion {
        cookie: 0xabc,
        status: -61,
    };
    let bodies = [
        Body::ConnReq(params),
        Body::ConnAck(params),
        Body::Noop,
        Body::Immediate {
            hdr: &hdr,
            payload: b"payload",
        },
        Body::PutReq { hdr: &hdr, cookie: 77 },
        Body::PutNak(done),
        Body::PutAck {
            src_cookie: 77,
            dst_cookie: 78,
            desc,
        },
        Body::PutDone(done),
        Body::GetReq {
            hdr: &hdr,
            cookie: 77,
            desc,
        },
        Body::GetDone(done),
    ];
    let kinds: Vec<MsgType> = bodies.iter().map(Body::kind).collect();
    assert_eq!(kinds, MsgType::ALL);
    for body in bodies {
        check(Message {
            order,
            credits: 3,
            src_stamp: 0x0102_0304_0506_0708,
            dst_stamp: 0x1112_1314_1516_1718,
            ..Message::new(nid(2), nid(1), body)
        });
    }
}

#[test]
fn every_type_is_read_again_in_both_byte_orders() {
    for order in [ByteOrder::Little, ByteOrder::Big] {
        each(order, |message| {
            let bytes = message.to_bytes();
            let read = Message::parse(&bytes).unwrap();
            assert_eq!(read, message);
            assert_eq!(read.to_bytes(), bytes);
            let head = peek(&bytes).unwrap();
            assert_eq!((head.order, head.version), (order, 0x12));
            assert_eq!(MsgType::from_wire(head.kind), Some(message.body.kind()));
            // Padding of the CM does not count.
            let padded = [&bytes[..], &[0; 40]].concat();
            assert_eq!(Message::parse(&padded), Ok(message));
        });
    }
}

#[test]
fn every_truncation_is_an_error() {
    each(ByteOrder::Little, |message| {
        let bytes = message.to_bytes();
        for len in 0..bytes.len() {
            assert!(Message::parse(&bytes[..len]).is_err(), "{len}");
            // The message says that it is so short.
            let mut short = bytes[..len].to_vec();
            if len >= 12 {
                short[8..12].copy_from_slice(&(len as u32).to_le_bytes());
                let read = Message::parse(&short);
                match message.body {
                    // The payload may have any length.
                    Body::Immediate { .. } if len >= 120 => assert!(read.is_ok()),
                    _ => assert!(read.is_err(), "{:?} {len}", message.body.kind()),
                }
            }
        }
    });
}

#[test]
fn lengths_are_the_kernels() {
    let lens = std::cell::RefCell::new(vec![]);
    each(ByteOrder::Little, |m| lens.borrow_mut().push(m.to_bytes().len()));
    // IMMEDIATE with 7 bytes, descriptors with 2 fragments.
    let expected = [56, 56, 48, 127, 128, 60, 72 + 24, 60, 136 + 24, 60];
    assert_eq!(lens.into_inner(), expected);
    assert_eq!((MAX_IMMEDIATE, LnetHdr::LEN, HEAD_LEN), (3976, 72, 48));
    assert_eq!(136 - 8 + RdmaDesc::len_for(MAX_FRAGS as usize), 3220);
    assert_eq!(HEAD_LEN + 16 + RdmaDesc::len_for(MAX_FRAGS as usize), 3156);
    assert_eq!(MAX_MSG, HEAD_LEN + LnetHdr::LEN + MAX_IMMEDIATE);
}

#[test]
fn fields_are_at_their_offsets() {
    let mut bytes: Vec<u8> = (0..200).collect();
    bytes[..8].copy_from_slice(&[0x91, 0x1b, 0xe9, 0x0b, 0x12, 0, 0xd6, 9]);
    bytes[8..12].copy_from_slice(&160u32.to_le_bytes());
    bytes[132..136].copy_from_slice(&2u32.to_le_bytes());
    // The type of the LNet header.
    bytes[72..76].copy_from_slice(&2u32.to_le_bytes());
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let m = Message::parse(&bytes).unwrap();
    assert_eq!((m.credits, m.checksum), (9, u32_at(12)));
    assert_eq!((m.src.0, m.src_stamp), (u64_at(16), u64_at(24)));
    assert_eq!((m.dst.0, m.dst_stamp), (u64_at(32), u64_at(40)));
    let Body::GetReq { hdr, cookie, desc } = m.body else {
        panic!("{m:?}")
    };
    assert_eq!((hdr.dst().0, hdr.src().0), (u64_at(48), u64_at(56)));
    assert_eq!((hdr.dst_pid.get(), hdr.src_pid.get()), (u32_at(64), u32_at(68)));
    assert_eq!(hdr.payload_length.get(), u32_at(76));
    let expected = Operation::Get {
        return_md: Handle {
            interface: u64_at(80),
            object: u64_at(88),
        },
        match_bits: u64_at(96),
        portal: u32_at(104),
        src_offset: u32_at(108),
        sink_length: u32_at(112),
    };
    assert_eq!(hdr.operation(), Ok(expected));
    assert_eq!((cookie, desc.key), (u64_at(120), u32_at(128)));
    let frags: Vec<Fragment> = desc.frags.iter().collect();
    let at = |at: usize| Fragment {
        nob: u32_at(at),
        addr: u64_at(at + 4),
    };
    assert_eq!(frags, [at(136), at(148)]);
    assert_eq!(desc.nob(), u64::from(frags[0].nob) + u64::from(frags[1].nob));
    assert_eq!(m.to_bytes(), bytes[..160]);
}

#[test]
fn operations_are_at_their_offsets() {
    let bytes: [u8; 72] = std::array::from_fn(|i| i as u8);
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let md = Handle {
        interface: u64_at(32),
        object: u64_at(40),
    };
    let of = |kind: u32| {
        let mut bytes = bytes;
        bytes[24..28].copy_from_slice(&kind.to_le_bytes());
        LnetHdr::read_from_bytes(&bytes).unwrap()
    };
    let expected = [
        Operation::Ack {
            dst_md: md,
            match_bits: u64_at(48),
            mlength: u32_at(56),
        },
        Operation::Put {
            ack_md: md,
            match_bits: u64_at(48),
            hdr_data: u64_at(56),
            portal: u32_at(64),
            offset: u32_at(68),
        },
        Operation::Get {
            return_md: md,
            match_bits: u64_at(48),
            portal: u32_at(56),
            src_offset: u32_at(60),
            sink_length: u32_at(64),
        },
        Operation::Reply { dst_md: md },
        Operation::Hello {
            incarnation: u64_at(32),
            kind: u32_at(40),
        },
    ];
    for (kind, expected) in (0..).zip(expected) {
        let hdr = of(kind);
        assert_eq!(hdr.operation(), Ok(expected));
        let again = LnetHdr::new(nid(1), nid(2), 0, &expected);
        assert_eq!(again.operation(), Ok(expected), "{}", expected.name());
        assert_eq!(
            (again.dst(), again.src(), again.src_pid.get()),
            (nid(1), nid(2), PID_LUSTRE)
        );
    }
    assert!(matches!(of(5).operation(), Err(ProtoError::Type { found: 5, .. })));
}

#[test]
fn headers_are_checked_as_by_a_receiver() {
    let put = Operation::Put {
        ack_md: Handle::NONE,
        match_bits: 0,
        hdr_data: 0,
        portal: 0,
        offset: 0,
    };
    let reply = Operation::Reply { dst_md: Handle::NONE };
    let hello = Operation::Hello {
        incarnation: 0,
        kind: 0,
    };
    for (operation, payload, ok) in [
        (put, MAX_PAYLOAD, true),
        (put, MAX_PAYLOAD + 1, false),
        (reply, 0, true),
        (reply, MAX_PAYLOAD + 1, false),
        (GET, 0, true),
        (GET, 1, false),
        (hello, 0, false),
    ] {
        let hdr = LnetHdr::new(nid(1), nid(2), payload, &operation);
        assert_eq!(hdr.check().is_ok(), ok, "{operation:?} {payload}");
    }
}

#[test]
fn other_versions_types_magics_and_counts_are_refused() {
    let noop = Message::new(nid(1), nid(2), Body::Noop).to_bytes();
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = noop.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    assert_eq!(Message::parse(&with(4, &[0x11, 0])), Err(ProtoError::Version1));
    assert_eq!(peek(&with(4, &[0x11, 0])).unwrap().version, 0x11);
    assert_eq!(Message::parse(&with(4, &[0x13, 0])), Err(ProtoError::Version(0x13)));
    let other = with(6, &[0xee]);
    assert!(matches!(
        Message::parse(&other),
        Err(ProtoError::Type { found: 0xee, .. })
    ));
    // Magic of other LNet drivers.
    let lnet = with(0, &0x4572_6963u32.to_le_bytes());
    assert!(matches!(
        Message::parse(&lnet),
        Err(ProtoError::Magic { found: 0x4572_6963, .. })
    ));
    for (nob, ok) in [(47u32, false), (48, true), (49, false), (0, false), (u32::MAX, false)] {
        assert_eq!(Message::parse(&with(8, &nob.to_le_bytes())).is_ok(), ok, "{nob}");
    }
    for (count, ok) in [(0, false), (1, true), (257, true), (258, false)] {
        let list = vec![Fragment { nob: 1, addr: 1 }; count];
        let desc = RdmaDesc {
            key: 1,
            frags: Fragments::List(&list),
        };
        let body = Body::PutAck {
            src_cookie: 1,
            dst_cookie: 2,
            desc,
        };
        let bytes = Message::new(nid(1), nid(2), body).to_bytes();
        assert_eq!(Message::parse(&bytes).is_ok(), ok, "{count} fragments");
    }
}

#[test]
fn bytes_behind_a_body_are_kept() {
    let mut bytes = Message::new(nid(1), nid(2), Body::Noop).to_bytes();
    bytes[8] = 50;
    bytes.extend([7, 8, 9]);
    let message = Message::parse(&bytes).unwrap();
    assert_eq!(message.trailing, [7, 8]);
    assert_eq!(message.to_bytes(), bytes[..50]);
}

#[test]
fn checksums_are_of_both_kinds_of_char() {
    // LNET.md, computed: CONNREQ of 10.1.0.2 to 10.1.0.1.
    let params = ConnParams {
        queue_depth: 8,
        max_frags: 257,
        max_msg_size: 4096,
    };
    let mut message = Message::new(nid(2), nid(1), Body::ConnReq(params));
    message.src_stamp = 0x0006_4000_0000_0001;
    let bytes = message.to_bytes();
    assert_eq!(
        (checksum(&bytes, true), checksum(&bytes, false)),
        (0x5b06_063b, 0xfc86_063b)
    );
    assert_eq!(message.judge_checksum(), Checksum::None);
    message.seal(true);
    assert_eq!(
        (message.checksum, message.judge_checksum()),
        (0x5b06_063b, Checksum::Signed)
    );
    message.seal(false);
    assert_eq!(message.judge_checksum(), Checksum::Unsigned);
    assert_eq!(Message::parse(&message.to_bytes()).unwrap().checksum, 0xfc86_063b);
    message.checksum = 1;
    assert_eq!(message.judge_checksum(), Checksum::Wrong);
    assert_eq!(checksum(&[0; 48], true), 1, "0 stands for none");

    let hdr = LnetHdr::new(nid(1), nid(2), 3, &GET);
    let immediate = |payload| Message::new(nid(2), nid(1), Body::Immediate { hdr: &hdr, payload });
    let mut zeros = immediate(&[0; 3]);
    zeros.seal(true);
    let payload = Message {
        checksum: zeros.checksum,
        ..immediate(&[1, 2, 3])
    };
    assert_eq!(payload.judge_checksum(), Checksum::ZeroPayload);
}

#[test]
fn nids_are_written_as_by_lustre() {
    for (nid, text) in [
        (Nid(0x0005_0000_0a01_0002), "10.1.0.2@o2ib"),
        (Nid::new(5, 3, [10, 1, 0, 2].into()), "10.1.0.2@o2ib3"),
        (Nid::new(2, 0, [10, 1, 0, 2].into()), "10.1.0.2@tcp"),
    ] {
        assert_eq!(nid.to_string(), text);
        assert_eq!(text.parse(), Ok(nid));
    }
    assert_eq!("10.1.0.2".parse(), Ok(nid(2)));
    assert_eq!(Nid::new(9, 0, [0, 0, 0, 0].into()).to_string(), "0@lo");
    assert_eq!(Nid::new(77, 1, [1, 2, 3, 4].into()).to_string(), "1.2.3.4@<77>1");
    for wrong in ["10.1.0@o2ib", "10.1.0.2@ib", "10.1.0.2@o2ibx", "10.1.0.2@o2ib70000", ""] {
        assert!(wrong.parse::<Nid>().is_err(), "{wrong}");
    }
}

proptest! {
    #[test]
    fn any_bytes_that_parse_are_emitted_again(
        mut bytes in vec(any::<u8>(), 48..300),
        kind in 0usize..10,
        big in any::<bool>(),
        nob in 48u32..300,
        frags in 0u32..12,
    ) {
        let number = |n: u32| if big { n.to_be_bytes() } else { n.to_le_bytes() };
        bytes[..4].copy_from_slice(&number(0x0be9_1b91));
        let version = if big { [0, 0x12] } else { [0x12, 0] };
        bytes[4..6].copy_from_slice(&version);
        bytes[6] = MsgType::ALL[kind] as u8;
        bytes[8..12].copy_from_slice(&number(nob));
        let at = if kind == 6 { 68 } else { 132 };
        if let Some(count) = bytes.get_mut(at..at + 4) {
            count.copy_from_slice(&number(frags));
        }
        if let Ok(message) = Message::parse(&bytes) {
            prop_assert_eq!(message.to_bytes(), &bytes[..nob as usize]);
            message.judge_checksum();
            if let Some(hdr) = message.body.hdr() {
                prop_assert_eq!(hdr.as_bytes(), &bytes[48..120]);
                let _ = hdr.check();
            }
        }
    }
}
