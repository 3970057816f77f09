//! Every field of every header, and every check of the parser.

use crate::spec::{any_header, fields, row, service, table};
use proptest::{collection::vec, prelude::*};
use roce_bth::{
    BTH_LEN, Bth, ExtHeader as E, Header, HeaderView, ICRC_LEN, MAX_HEADER_LEN, Opcode, Packet, ParseError, Position,
    Psn, Qpn, Service,
};

/// A packet with payload filled up to whole words, the pad count set, and an ICRC of zeros.
fn packet(mut header: Header, payload: &[u8]) -> (Header, Vec<u8>) {
    let info = header.bth.opcode.info();
    let payload = if info.payload { payload } else { &[] };
    header.bth.pad = (payload.len().wrapping_neg() & 3) as u8;
    let mut bytes = vec![0xee; header.wire_len()];
    assert_eq!(header.emit(&mut bytes), bytes.len());
    bytes.extend(payload);
    bytes.resize(bytes.len() + usize::from(header.bth.pad) + ICRC_LEN, 0);
    (header, bytes)
}

/// Decides by the specification, from the second copy of its table, whether these bytes are a packet.
fn expected(bytes: &[u8]) -> Result<usize, ParseError> {
    let have = bytes.len();
    if have < 16 {
        return Err(ParseError::TooShort { need: 16, have });
    }
    let Some(row) = row(bytes[0]) else {
        return Err(ParseError::UnknownOpcode(bytes[0]));
    };
    let opcode = Opcode::from_byte(bytes[0]).unwrap();
    if bytes[1] & 0x0f != 0 {
        return Err(ParseError::Version(bytes[1] & 0x0f));
    }
    let need = row.header_len() + 4;
    if have < need {
        return Err(ParseError::HeaderTruncated { opcode, need, have });
    }
    let rest = have - need;
    let pad = (bytes[1] >> 4) & 3;
    if !rest.is_multiple_of(4) {
        Err(ParseError::Unaligned(rest))
    } else if rest != 0 && !row.payload {
        Err(ParseError::UnexpectedPayload { opcode, len: rest })
    } else if usize::from(pad) > rest {
        Err(ParseError::PadTooLong { pad, have: rest })
    } else {
        Ok(rest - usize::from(pad))
    }
}

/// Parses, compares with [`expected`], and emits what was parsed.
fn check_bytes(bytes: &[u8]) {
    match (Packet::parse(bytes), expected(bytes)) {
        (Err(e), Err(want)) => assert_eq!(e, want, "{bytes:02x?}"),
        (Ok(p), Ok(payload_len)) => {
            let header = Header::from(p.header);
            let header_len = header.wire_len();
            assert_eq!(p.header.bytes(), &bytes[..header_len]);
            assert_eq!(p.payload, &bytes[header_len..header_len + payload_len]);
            let mut out = [0xaa; MAX_HEADER_LEN];
            assert_eq!(header.emit(&mut out), header_len);
            let mut want = bytes[..header_len].to_vec();
            if p.header.bth.opcode == Opcode::Cnp {
                // The reserved bytes of a CNP are sent as zeros, whatever came.
                want[BTH_LEN..].fill(0);
            }
            assert_eq!(out[..header_len], want, "{bytes:02x?}");
            assert!(out[header_len..].iter().all(|&b| b == 0xaa), "wrote behind the headers");
        }
        (got, want) => panic!("{got:?} instead of {want:?} for {bytes:02x?}"),
    }
}

#[test]
fn the_opcode_table_is_the_specifications_for_all_256_codes() {
    let mut defined = 0;
    for code in 0..=255u8 {
        match (Opcode::from_byte(code), row(code)) {
            (None, None) => {}
            (Some(opcode), Some(row)) => {
                defined += 1;
                let info = opcode.info();
                assert_eq!(opcode as u8, code);
                assert_eq!(info.service, service(code), "{opcode}");
                assert_eq!((info.class, info.position), (row.class, row.position), "{opcode}");
                let ends = [Position::First, Position::Last].map(|at| [at, Position::Only].contains(&row.position));
                assert_eq!([info.position.starts(), info.position.ends()], ends, "{opcode}");
                assert_eq!(info.payload, row.payload, "{opcode}");
                assert_eq!(info.header_len, row.header_len(), "{opcode}");
                assert!(info.header_len <= MAX_HEADER_LEN, "{opcode}");
                let headers = [
                    (E::Deth, 'd'),
                    (E::Xrceth, 'x'),
                    (E::Feth, 'f'),
                    (E::Reth, 'r'),
                    (E::AtomicEth, 't'),
                    (E::Aeth, 'a'),
                    (E::AtomicAckEth, 'k'),
                    (E::Imm, 'i'),
                    (E::Ieth, 'v'),
                ];
                for (header, letter) in headers {
                    assert_eq!(info.has(header), row.headers.contains(letter), "{opcode} {header:?}");
                }
                assert_eq!(opcode.to_string(), info.name);
            }
            (opcode, row) => panic!("{code:#04x}: {opcode:?}, in the specification: {}", row.is_some()),
        }
    }
    assert_eq!(defined, table().len());
    assert_eq!(defined, Opcode::ALL.len());
    let names: std::collections::HashSet<_> = Opcode::ALL.iter().map(|o| o.info().name).collect();
    assert_eq!(names.len(), defined, "two opcodes of one name");
    assert_eq!(
        Opcode::ALL.iter().map(|o| o.info().header_len).max(),
        Some(MAX_HEADER_LEN)
    );
}

#[test]
fn an_operation_has_the_same_code_in_each_service() {
    let services = [
        (Service::Rc, 0x00),
        (Service::Uc, 0x20),
        (Service::Ud, 0x60),
        (Service::Xrc, 0xa0),
    ];
    for (service, bits) in services {
        for opcode in Opcode::ALL {
            let code = bits | (*opcode as u8 & 0x1f);
            let there = opcode.in_service(service).map(|opcode| opcode as u8);
            assert_eq!(there, row(code).map(|_| code), "{opcode} in {service:?}");
            // RC queue pairs have selective acknowledgements too.
            let accepted =
                opcode.info().service == service || (*opcode, service) == (Opcode::SelectiveAck, Service::Rc);
            assert_eq!(opcode.info().is_of(service), accepted, "{opcode} in {service:?}");
        }
    }
}

#[test]
fn headers_that_a_capture_cut_off_are_missing() {
    let mut bytes = vec![0; MAX_HEADER_LEN];
    let mut header = Header::new(Bth::new(Opcode::RcWriteOnly, Qpn::new(5), Psn::new(7)));
    header.reth = Some(Default::default());
    let len = header.emit(&mut bytes);
    for kept in 0..bytes.len() {
        let view = HeaderView::of_cut(&bytes[..kept]);
        if kept < BTH_LEN {
            let error = ParseError::TooShort {
                need: BTH_LEN,
                have: kept,
            };
            assert_eq!(view.unwrap_err(), error);
            continue;
        }
        let view = view.unwrap();
        assert_eq!(
            (view.bth, view.reth().is_some()),
            (header.bth, kept >= len),
            "{kept} bytes"
        );
        assert_eq!(view.bytes().len(), kept.min(len));
    }
    bytes[1] |= 1;
    assert_eq!(HeaderView::of_cut(&bytes).unwrap_err(), ParseError::Version(1));
}

#[test]
fn opcode_numbers_by_name() {
    // Names that the engine uses, against the numbers of IBTA table 38.
    assert_eq!(Opcode::RcSendOnly as u8, 0x04);
    assert_eq!(Opcode::RcWriteOnlyImm as u8, 0x0b);
    assert_eq!(Opcode::RcReadRequest as u8, 0x0c);
    assert_eq!(Opcode::RcAcknowledge as u8, 0x11);
    assert_eq!(Opcode::RcAtomicAcknowledge as u8, 0x12);
    assert_eq!(Opcode::RcCompareSwap as u8, 0x13);
    assert_eq!(Opcode::RcFetchAdd as u8, 0x14);
    assert_eq!(Opcode::RcSendLastInv as u8, 0x16);
    assert_eq!(Opcode::RcSendOnlyInv as u8, 0x17);
    assert_eq!(Opcode::UcSendOnly as u8, 0x24);
    assert_eq!(Opcode::UdSendOnly as u8, 0x64);
    assert_eq!(Opcode::UdSendOnlyImm as u8, 0x65);
}

#[test]
fn each_parse_error_has_its_packet_and_names_the_check() {
    let (_, good) = packet(
        Header::new(Bth::new(Opcode::RcSendOnly, Qpn::new(2), Psn::new(3))),
        b"12345",
    );
    assert!(Packet::parse(&good).is_ok());
    let fail = |bytes: &[u8]| {
        check_bytes(bytes);
        let e = Packet::parse(bytes).unwrap_err();
        (e, e.to_string())
    };

    let (e, text) = fail(&good[..15]);
    assert_eq!(e, ParseError::TooShort { need: 16, have: 15 });
    assert!(text.contains("15"), "{text}");

    let mut bad = good.clone();
    bad[0] = 0x15;
    let (e, text) = fail(&bad);
    assert_eq!(e, ParseError::UnknownOpcode(0x15));
    assert!(text.contains("0x15"), "{text}");

    let mut bad = good.clone();
    bad[1] |= 1;
    assert_eq!(fail(&bad).0, ParseError::Version(1));

    let mut bad = good.clone();
    bad[0] = Opcode::RcWriteFirst as u8;
    let (e, text) = fail(&bad[..20]);
    assert_eq!(
        e,
        ParseError::HeaderTruncated {
            opcode: Opcode::RcWriteFirst,
            need: 32,
            have: 20
        }
    );
    assert!(text.contains("RC RDMA Write First"), "{text}");

    assert_eq!(fail(&good[..good.len() - 1]).0, ParseError::Unaligned(7));

    let (_, mut bad) = packet(
        Header::new(Bth::new(Opcode::RcReadRequest, Qpn::new(2), Psn::new(3))),
        &[],
    );
    bad.extend([0; 8]);
    let (e, text) = fail(&bad);
    assert_eq!(
        e,
        ParseError::UnexpectedPayload {
            opcode: Opcode::RcReadRequest,
            len: 8
        }
    );
    assert!(text.contains("RC RDMA Read Request"), "{text}");

    let mut bad = good[..16].to_vec();
    bad[1] = 0x30;
    assert_eq!(fail(&bad).0, ParseError::PadTooLong { pad: 3, have: 0 });
}

#[test]
#[should_panic(expected = "out of range")]
fn emitting_into_too_short_a_buffer_is_the_callers_bug() {
    Header::new(Bth::new(Opcode::RcSendOnly, Qpn::new(2), Psn::new(3))).emit(&mut [0; 11]);
}

#[test]
fn a_missing_extended_header_is_written_as_zeros() {
    for &opcode in Opcode::ALL {
        let header = Header::new(Bth::new(opcode, Qpn::new(0x123456), Psn::new(0x654321)));
        let mut bytes = vec![0xff; header.wire_len()];
        header.emit(&mut bytes);
        assert_eq!(
            bytes[..12],
            [opcode as u8, 0, 0xff, 0xff, 0, 0x12, 0x34, 0x56, 0, 0x65, 0x43, 0x21]
        );
        assert!(bytes[12..].iter().all(|&b| b == 0), "{opcode}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn headers_and_payload_read_back(header in any_header(), payload in vec(any::<u8>(), 0..70)) {
        let (header, bytes) = packet(header, &payload);
        let parsed = Packet::parse(&bytes).unwrap();
        prop_assert_eq!(Header::from(parsed.header), header);
        if header.bth.opcode.info().payload {
            prop_assert_eq!(parsed.payload, &payload[..]);
        } else {
            prop_assert!(parsed.payload.is_empty());
        }
        check_bytes(&bytes);
    }

    /// Setting a field changes exactly the bits that the specification gives it, and reads back.
    #[test]
    fn each_field_has_its_bits_and_no_others(header in any_header(), value: u64) {
        let opcode = header.bth.opcode;
        let row = row(opcode as u8).unwrap();
        let mut before = vec![0; header.wire_len()];
        header.emit(&mut before);
        for field in fields() {
            let part = if field.part == 'b' { Some(0) } else { row.offset(field.part) };
            let Some(part) = part else { continue };
            let value = value & (u64::MAX >> (64 - field.bits));
            let mut changed = header;
            (field.set)(&mut changed, value);
            let mut after = vec![0; header.wire_len()];
            changed.emit(&mut after);
            // The wire's bits of the field, first bit highest, are the value; all others stay.
            let first = part * 8 + field.first_bit;
            let mut on_wire = 0u64;
            for bit in 0..after.len() * 8 {
                let is = |b: &[u8]| b[bit / 8] >> (7 - bit % 8) & 1;
                if (first..first + field.bits).contains(&bit) {
                    on_wire = on_wire << 1 | u64::from(is(&after));
                } else {
                    prop_assert_eq!(is(&after), is(&before), "{} of {} touched bit {}", field.name, opcode, bit);
                }
            }
            prop_assert_eq!(on_wire, value, "{} of {}", field.name, opcode);
            // Pad and its payload: enough bytes behind for any pad count, where there may be any.
            if field.name == "pad" && !row.payload {
                continue;
            }
            if !row.payload {
                after[1] &= !0x30;
            }
            after.resize(after.len() + if row.payload { 4 } else { 0 } + ICRC_LEN, 0);
            let parsed = Packet::parse(&after).unwrap();
            prop_assert_eq!((field.get)(&parsed.header.into()), value, "{} of {}", field.name, opcode);
        }
    }

    #[test]
    fn arbitrary_bytes_parse_as_specified_and_emit_unchanged(bytes in vec(any::<u8>(), 0..90)) {
        check_bytes(&bytes);
    }

    /// As above, but with a defined opcode, version 0 and whole words, so that most get through.
    #[test]
    fn plausible_bytes_parse_as_specified_and_emit_unchanged(
        header in any_header(), cut in 0usize..30, words in 0usize..4, fill in vec(any::<u8>(), 64),
    ) {
        let mut bytes = vec![0; header.wire_len()];
        header.emit(&mut bytes);
        bytes.extend(&fill[..words * 4 + ICRC_LEN]);
        check_bytes(&bytes);
        bytes.truncate(bytes.len().saturating_sub(cut));
        check_bytes(&bytes);
    }
}

/// A deterministic stand-in for the fuzz target, on every test run.
#[test]
fn a_hundred_thousand_random_and_mutated_packets() {
    use rand::{Rng, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(0x4791);
    let mut accepted = 0;
    for i in 0..100_000u32 {
        let mut bytes = vec![0; rng.random_range(0..160)];
        rng.fill(&mut bytes[..]);
        if i % 4 != 0 && bytes.len() >= 2 {
            bytes[0] = Opcode::ALL[rng.random_range(0..Opcode::ALL.len())] as u8;
            bytes[1] &= 0xf0;
            let header_len = row(bytes[0]).unwrap().header_len();
            bytes.resize(header_len + ICRC_LEN + 4 * rng.random_range(0..8), 0x5a);
            for _ in 0..rng.random_range(0..3) {
                let at = rng.random_range(0..bytes.len());
                match rng.random_range(0..4) {
                    0 => bytes[at] ^= 1 << rng.random_range(0..8),
                    1 => bytes.truncate(at),
                    2 => bytes.insert(at, rng.random()),
                    _ => bytes[at] = rng.random(),
                }
                if bytes.is_empty() {
                    break;
                }
            }
        }
        check_bytes(&bytes);
        accepted += u32::from(Packet::parse(&bytes).is_ok());
    }
    assert!(
        accepted > 10_000,
        "only {accepted} packets got through: the generator is too wild to test much"
    );
}
