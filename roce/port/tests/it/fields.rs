//! Every field of every message: reads back, leaves the other bits alone, sits where the specification puts it.

use proptest::prelude::*;
use roce_port::cm::{
    DropReason,
    cma::{CmaHeader, flow_label},
    mad::{Attribute, FieldSpec, Mad, Message, Mra, Rej, Rep, Req, SidrRep, Subject, Transport},
};
use roce_verbs::{Psn, QKey, Qpn};

fn bits(f: &FieldSpec) -> impl Iterator<Item = usize> {
    let (first, width) = (f.first_bit(), f.width);
    first..first + width
}

fn get(bytes: &[u8; 256], bit: usize) -> bool {
    bytes[bit / 8] & (0x80 >> (bit % 8)) != 0
}

fn set(bytes: &mut [u8; 256], bit: usize, to: bool) {
    let mask = 0x80 >> (bit % 8);
    bytes[bit / 8] = if to {
        bytes[bit / 8] | mask
    } else {
        bytes[bit / 8] & !mask
    };
}

/// Arbitrary bytes as a valid MAD of this kind: header put right, checked fields made acceptable.
fn valid(attribute: Attribute, mut bytes: [u8; 256]) -> [u8; 256] {
    bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
    bytes[16..18].copy_from_slice(&(attribute as u16).to_be_bytes());
    for f in Message::fields(attribute) {
        match f.name {
            "subject" => set(&mut bytes, f.first_bit(), false),
            "info_length" => set(&mut bytes, f.first_bit() + f.width - 7, false),
            _ => {}
        }
        if f.name == "info_length" && f.width == 8 {
            set(&mut bytes, f.first_bit(), false);
        }
    }
    bytes
}

#[test]
fn fields_don_t_overlap_and_private_data_fills_the_mad() {
    for attribute in Attribute::ALL {
        let mut taken = [0u8; 256];
        for f in Message::fields(attribute) {
            for bit in bits(f) {
                assert!(bit >= 24 * 8, "{attribute:?} {}", f.name);
                assert!(!get(&taken, bit), "{attribute:?} {} overlaps", f.name);
                set(&mut taken, bit, true);
            }
        }
        let last = Message::fields(attribute).last().unwrap();
        assert_eq!(
            (last.name, last.first_bit() + last.width),
            ("private_data", 256 * 8),
            "{attribute:?}"
        );
    }
}

fn any_mad() -> impl Strategy<Value = [u8; 256]> {
    prop::array::uniform32(any::<[u8; 8]>()).prop_map(|words| {
        let mut out = [0; 256];
        out.copy_from_slice(words.as_flattened());
        out
    })
}

proptest! {
    #[test]
    fn reads_back(which in 0..9usize, bytes in any_mad()) {
        let attribute = Attribute::ALL[which];
        let bytes = valid(attribute, bytes);
        let mad = Mad::parse(&bytes).unwrap();
        let out = mad.emit();
        prop_assert_eq!(Mad::parse(&out), Ok(mad));
        let mut expected = [0; 256];
        expected[..4].copy_from_slice(&bytes[..4]);
        for range in [8..18, 20..24] {
            expected[range.clone()].copy_from_slice(&bytes[range]);
        }
        for bit in Message::fields(attribute).iter().flat_map(bits) {
            set(&mut expected, bit, get(&bytes, bit));
        }
        prop_assert_eq!(out, expected);
    }

    #[test]
    fn one_field_changes_alone(which in 0..9usize, field in any::<prop::sample::Index>(), a in any_mad(), b in any_mad()) {
        let attribute = Attribute::ALL[which];
        let fields = Message::fields(attribute);
        let f = &fields[field.index(fields.len())];
        let (a, b) = (valid(attribute, a), valid(attribute, b));
        let mut changed = a;
        for bit in bits(f) {
            set(&mut changed, bit, get(&b, bit));
        }
        let (before, after) = (Mad::parse(&a).unwrap().emit(), Mad::parse(&changed).unwrap().emit());
        for bit in 0..256 * 8 {
            let expected = if bits(f).any(|x| x == bit) { get(&b, bit) } else { get(&before, bit) };
            prop_assert_eq!(get(&after, bit), expected, "{} bit {}", f.name, bit);
        }
    }

    #[test]
    fn anything_is_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(mad) = Mad::parse(&bytes) {
            prop_assert_eq!(Mad::parse(&mad.emit()), Ok(mad));
        }
        let _ = CmaHeader::parse(&bytes);
    }

    #[test]
    fn header_round_trip(port: u16, v4: bool, src: [u8; 16], dst: [u8; 16]) {
        let ip = |b: [u8; 16]| -> std::net::IpAddr {
            if v4 { <[u8; 4]>::try_from(&b[..4]).unwrap().into() } else { b.into() }
        };
        let h = CmaHeader { port, src: ip(src), dst: ip(dst) };
        prop_assert_eq!(CmaHeader::parse(&h.emit()), Some(h));
    }
}

/// The bytes at a place behind the common header.
fn at(mad: &[u8; 256], byte: usize, len: usize) -> &[u8] {
    &mad[24 + byte..24 + byte + len]
}

#[test]
fn places_of_what_captures_don_t_show() {
    let req = Req {
        vendor_id: 0x0a_0b0c,
        local_qkey: QKey(0x1122_3344),
        local_eecn: 0x51_5253,
        remote_eecn: 0x61_6263,
        transport: Transport::Extended,
        flow_control: true,
        rdc_exists: true,
        srq: true,
        extended_transport: 5,
        primary_flow_label: 0xabcde,
        primary_packet_rate: 0x2f,
        primary_sl: 0xa,
        primary_subnet_local: true,
        alternate_local_lid: 0x7172,
        alternate_remote_lid: 0x7374,
        alternate_local_gid: [0x81; 16].into(),
        alternate_remote_gid: [0x82; 16].into(),
        alternate_flow_label: 0x12345,
        alternate_packet_rate: 0x11,
        alternate_traffic_class: 0x91,
        alternate_hop_limit: 0x92,
        alternate_sl: 0x5,
        alternate_subnet_local: true,
        alternate_ack_timeout: 0x15,
        sap_supported: true,
        ..Req::default()
    };
    let mad = Mad::new(0x0102_0304_0506_0708, req).emit();
    assert_eq!(
        mad[..24],
        [
            1, 7, 2, 3, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0x10, 0, 0, 0, 0, 0, 0
        ]
    );
    assert_eq!(at(&mad, 4, 4), [0, 0x0a, 0x0b, 0x0c]);
    assert_eq!(at(&mad, 28, 4), [0x11, 0x22, 0x33, 0x44]);
    assert_eq!(at(&mad, 36, 8), [0x51, 0x52, 0x53, 0, 0x61, 0x62, 0x63, 0b0000_0111]);
    assert_eq!(at(&mad, 50, 2), [0x08, 0b0000_1101]);
    assert_eq!(at(&mad, 88, 8), [0xab, 0xcd, 0xe0, 0x2f, 0, 0, 0xa8, 0]);
    assert_eq!(at(&mad, 96, 4), [0x71, 0x72, 0x73, 0x74]);
    assert_eq!(
        (at(&mad, 100, 16), at(&mad, 116, 16)),
        (&[0x81; 16][..], &[0x82; 16][..])
    );
    assert_eq!(at(&mad, 132, 8), [0x12, 0x34, 0x50, 0x11, 0x91, 0x92, 0x58, 0xac]);

    let mra = Mra {
        local_comm_id: 0x0102_0304,
        remote_comm_id: 0x0506_0708,
        subject: Subject::Rep,
        service_timeout: 24,
        private_data: [0xee; 222],
    };
    let mad = Mad::new(0, mra).emit();
    assert_eq!(mad[16..18], [0, 0x11]);
    assert_eq!(at(&mad, 0, 11), [1, 2, 3, 4, 5, 6, 7, 8, 0x40, 0xc0, 0xee]);

    let rej = Rej {
        subject: Subject::Other,
        info_length: 72,
        reason: 0x0102,
        info: [0xaa; 72],
        private_data: [0xbb; 148],
        ..Rej::default()
    };
    let mad = Mad::new(0, rej).emit();
    assert_eq!(at(&mad, 8, 5), [0x80, 72 << 1, 1, 2, 0xaa]);
    assert_eq!((at(&mad, 83, 2), mad[255]), (&[0xaa, 0xbb][..], 0xbb));

    let rep = Rep {
        local_qkey: QKey(0x1122_3344),
        vendor_id_high: 0xa1,
        local_eecn: 0x51_5253,
        vendor_id_middle: 0xa2,
        starting_psn: Psn::new(0x61_6263),
        vendor_id_low: 0xa3,
        failover_accepted: 2,
        flow_control: true,
        srq: true,
        ..Rep::default()
    };
    let mad = Mad::new(0, rep).emit();
    assert_eq!(
        at(&mad, 8, 20),
        [
            0x11,
            0x22,
            0x33,
            0x44,
            0,
            0,
            0,
            0xa1,
            0x51,
            0x52,
            0x53,
            0xa2,
            0x61,
            0x62,
            0x63,
            0xa3,
            0,
            0,
            0b0000_0101,
            0b0001_0000
        ]
    );

    let sidr = SidrRep {
        request_id: 0x0102_0304,
        status: 2,
        info_length: 3,
        vendor_id_high: 0xa1a2,
        qpn: Qpn::new(0x11_1213),
        vendor_id_low: 0xa3,
        service_id: 0x2122_2324_2526_2728,
        qkey: QKey(0x3132_3334),
        info: [0xaa; 72],
        private_data: [0xbb; 136],
    };
    let mad = Mad::new(0, sidr).emit();
    assert_eq!(at(&mad, 0, 12), [1, 2, 3, 4, 2, 3, 0xa1, 0xa2, 0x11, 0x12, 0x13, 0xa3]);
    assert_eq!(
        at(&mad, 12, 13),
        [
            0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x31, 0x32, 0x33, 0x34, 0xaa
        ]
    );
    assert_eq!(at(&mad, 95, 2), [0xaa, 0xbb]);
}

#[test]
fn errors_name_the_check() {
    let good = Mad::new(1, Rej::default()).emit();
    assert!(Mad::parse(&good).is_ok());
    let with = |byte: usize, value: u8| {
        let mut b = good;
        b[byte] = value;
        Mad::parse(&b)
    };
    assert_eq!(Mad::parse(&good[..255]), Err(DropReason::Length));
    assert_eq!(with(0, 2), Err(DropReason::Header));
    assert_eq!(with(1, 3), Err(DropReason::Header));
    assert_eq!(with(2, 1), Err(DropReason::Header));
    assert_eq!(with(3, 0x81), Err(DropReason::Header));
    // LAP: not on RoCE.
    assert_eq!(with(17, 0x19), Err(DropReason::Attribute));
    assert_eq!(with(24 + 8, 0xc0), Err(DropReason::Field));
    assert_eq!(with(24 + 9, 73 << 1), Err(DropReason::Field));
    // One field is wrong at a time: nothing but its own check refuses it.
    let cma = CmaHeader {
        port: 1,
        src: [10, 0, 0, 1].into(),
        dst: [10, 0, 0, 2].into(),
    };
    let bytes = cma.emit();
    let parse_with = |byte: usize, value: u8| {
        let mut b = bytes;
        b[byte] = value;
        CmaHeader::parse(&b)
    };
    assert_eq!(CmaHeader::parse(&bytes), Some(cma));
    assert_eq!(CmaHeader::parse(&bytes[..35]), None);
    assert_eq!(parse_with(0, 1), None, "version");
    assert_eq!(parse_with(1, 0), None, "IP version");
}

#[test]
fn flow_labels() {
    // From rping.pcap.
    assert_eq!(flow_label(0xd1b6, 7174), 0x98110);
    assert_eq!(flow_label(u16::MAX, u16::MAX), 0xfffe0);
}
