//! Headers, extension headers, congestion maps.

use proptest::{collection::vec, prelude::*};
use rds::proto::{
    BITMAP_LEN, BitmapFragment, CongestionMap, EXT_LEN, Extension, Flags, Fragment, Header, Kind, MAX_FRAGMENT,
    MAX_MESSAGE, ProtoError, RdmaCookie, RdmaDirection, pack,
};
use zerocopy::IntoBytes;

/// Header of the kernel with an extension, as in rdma-write frame 46, without its checksum.
const OF_KERNEL: [u8; 48] = [
    0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 0x0f, 0xa1, 0x0f, 0xa2, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0,
    0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

#[test]
fn fields_are_at_their_offsets() {
    let mut bytes: [u8; 48] = std::array::from_fn(|i| i as u8 + 1);
    let (header, rest) = Header::peek(&bytes).unwrap();
    assert!(rest.is_empty());
    assert_eq!(header.sequence.get(), 0x0102_0304_0506_0708);
    assert_eq!(header.ack.get(), 0x090a_0b0c_0d0e_0f10);
    assert_eq!(header.len.get(), 0x1112_1314);
    assert_eq!((header.sport.get(), header.dport.get()), (0x1516, 0x1718));
    assert_eq!((header.flags().bits(), header.credit), (0x19, 0x1a));
    assert_eq!(header.checksum(), 0x1f20);
    let mut sealed = *header;
    sealed.seal();
    assert!(sealed.checksum_ok());
    assert_eq!(sealed.as_bytes()[..30], bytes[..30]);
    assert_eq!(sealed.as_bytes()[32..], bytes[32..]);
    // Ones' complement sum of all words.
    bytes.copy_from_slice(sealed.as_bytes());
    let sum: u32 = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
}

#[test]
fn every_changed_byte_is_a_wrong_checksum() {
    let header = Header::new(7, 6, 5000, (4001, 4002), Flags::ACK_REQUIRED | Flags::RETRANSMITTED);
    for at in (0..48).filter(|at| !(30..32).contains(at)) {
        let mut bytes = header.as_bytes().to_vec();
        bytes[at] ^= 0x10;
        assert!(
            matches!(Header::parse(&bytes), Err(ProtoError::Checksum { .. })),
            "byte {at}"
        );
        // 0 stands for no checksum.
        bytes[30..32].fill(0);
        assert!(Header::parse(&bytes).is_ok(), "byte {at}");
    }
}

#[test]
fn every_truncation_is_an_error() {
    let mut bytes = Header::new(1, 0, 3, (1, 2), Flags::empty()).as_bytes().to_vec();
    bytes.extend(*b"abc");
    for len in 0..bytes.len() {
        let short = Fragment::parse(&bytes[..len], 0).unwrap_err();
        match short {
            ProtoError::Short { len: l, need: 48, .. } => assert_eq!((l, len < 48), (len, true)),
            ProtoError::Fragment {
                len: l, expected: 3, ..
            } => assert_eq!(l + 48, len),
            other => panic!("{other}"),
        }
    }
    let fragment = Fragment::parse(&bytes, 0).unwrap();
    let mut again = Vec::new();
    fragment.emit(&mut again);
    assert_eq!(fragment.data, b"abc");
    assert_eq!(again, bytes);
}

#[test]
fn fragments_have_the_lengths_that_the_message_demands() {
    for (len, sizes) in [
        (0, &[0][..]),
        (1, &[1]),
        (4096, &[4096]),
        (4097, &[4096, 1]),
        (10_000, &[4096, 4096, 1808]),
    ] {
        let header = Header::new(1, 0, len, (1, 2), Flags::empty());
        let found: Vec<usize> = (0..header.fragments()).map(|i| header.fragment_len(i)).collect();
        assert_eq!(found, sizes);
        for (index, size) in sizes.iter().enumerate() {
            let bytes = [header.as_bytes(), &vec![0; *size]].concat();
            assert!(Fragment::parse(&bytes, index as u32).is_ok());
            assert!(Fragment::parse(&[&bytes[..], &[0]].concat(), index as u32).is_err());
            assert!(Fragment::parse(&bytes, sizes.len() as u32).is_err());
        }
    }
    let long = Header::new(1, 0, MAX_MESSAGE + 1, (1, 2), Flags::empty());
    let bytes = [long.as_bytes(), &[0; MAX_FRAGMENT]].concat();
    assert!(matches!(Fragment::parse(&bytes, 0), Err(ProtoError::TooLong { .. })));
    let huge = Header::new(1, 0, u32::MAX, (1, 2), Flags::empty());
    assert_eq!((huge.fragments(), huge.fragment_len(u32::MAX)), (1 << 20, 0));
}

#[test]
fn a_fragment_of_another_message_is_found() {
    let first = Header::new(3, 1, 5000, (10, 20), Flags::ACK_REQUIRED);
    let mut same = Header::new(3, 9, 5000, (10, 20), Flags::empty());
    same.credit = 5;
    assert_eq!(same.continues(&first, 1), Ok(()));
    for (field, other) in [
        ("sequence", Header::new(4, 1, 5000, (10, 20), Flags::empty())),
        ("length", Header::new(3, 1, 5001, (10, 20), Flags::empty())),
        ("source port", Header::new(3, 1, 5000, (11, 20), Flags::empty())),
        ("destination port", Header::new(3, 1, 5000, (10, 21), Flags::empty())),
    ] {
        assert_eq!(
            other.continues(&first, 1),
            Err(ProtoError::Mismatch { field, index: 1 })
        );
    }
}

#[test]
fn kinds_are_told_apart() {
    let of = |sequence, len, ports, flags| Header::new(sequence, 9, len, ports, flags).kind();
    assert_eq!(Header::bitmap(3).kind(), Kind::Bitmap);
    assert_eq!(Header::ack_only(3).kind(), Kind::Ack);
    assert_eq!(of(1, 0, (4001, 0), Flags::ACK_REQUIRED), Kind::Ping);
    assert_eq!(of(1, 0, (0, 4001), Flags::empty()), Kind::Pong);
    assert_eq!(of(1, 5, (4001, 4002), Flags::empty()), Kind::Data);
    // The kernel compares the flags with 1: with a second one it is data.
    assert_eq!(
        of(0, 8192, (0, 0), Flags::CONG_BITMAP | Flags::ACK_REQUIRED),
        Kind::Data
    );
}

#[test]
fn extensions_are_at_their_offsets_and_packed_again() {
    let all = [
        (Extension::Version(0x0102_0304), vec![1, 1, 2, 3, 4]),
        (Extension::Rdma { rkey: 0x400 }, vec![2, 0, 0, 4, 0]),
        (
            Extension::RdmaDest(RdmaCookie::new(0x300, 0x64)),
            vec![3, 0, 0, 3, 0, 0, 0, 0, 0x64],
        ),
        (
            Extension::RdmaBytes {
                bytes: 0x2000,
                direction: RdmaDirection::Write,
            },
            vec![4, 0, 0, 0x20, 0, 1, 0, 0, 0],
        ),
        (Extension::Paths(8), vec![5, 0, 8]),
        (Extension::Generation(7), vec![6, 0, 0, 0, 7]),
        (Extension::SportIndex(3), vec![8, 3]),
    ];
    for (extension, bytes) in &all {
        let packed = pack(&[*extension]).unwrap();
        assert_eq!(packed[..bytes.len()], bytes[..]);
        assert!(packed[bytes.len()..].iter().all(|b| *b == 0));
        assert_eq!(extension.wire_len(), bytes.len());
        let mut header = Header::default();
        header.set_extensions(packed);
        assert_eq!(header.extensions().collect::<Vec<_>>(), [*extension]);
        // All truncated data ends the list: the type in the last bytes, one byte too few behind it.
        if bytes.len() > 1 {
            let mut cut = [9; EXT_LEN];
            let at = EXT_LEN + 1 - bytes.len();
            cut[at..].copy_from_slice(&bytes[..bytes.len() - 1]);
            header.set_extensions(cut);
            let found: Vec<_> = header.extensions().collect();
            assert_eq!(found, vec![Extension::Unknown(9); at]);
        }
    }
    let (header, _) = Header::peek(&OF_KERNEL).unwrap();
    assert_eq!(
        header.extensions().collect::<Vec<_>>(),
        [Extension::Rdma { rkey: 0x400 }]
    );
    let too_many = [all[3].0, all[2].0];
    assert_eq!(pack(&too_many), Err(ProtoError::ExtensionSpace { need: 18, have: 16 }));
    assert_eq!(pack(&[Extension::Unknown(9)]), Err(ProtoError::ExtensionType(9)));
}

#[test]
fn types_of_16_and_more_end_the_list() {
    let mut header = Header::default();
    header.set_extensions([9, 2, 0, 0, 0, 1, 16, 5, 0, 1, 0, 0, 0, 0, 0, 0]);
    let mut list = header.extensions();
    assert_eq!(list.next(), Some(Extension::Unknown(9)));
    assert_eq!(list.next(), Some(Extension::Rdma { rkey: 1 }));
    assert_eq!(list.next(), None);
    assert_eq!(list.rest()[..4], [16, 5, 0, 1]);
}

#[test]
fn cookies_are_key_and_offset() {
    let cookie = RdmaCookie::new(0x400, 0x64);
    assert_eq!(cookie, RdmaCookie(0x64_0000_0400));
    assert_eq!(
        (cookie.rkey(), cookie.offset(), cookie.address(1000)),
        (0x400, 0x64, 0x44c)
    );
}

#[test]
fn a_map_travels_in_two_fragments() {
    let mut map = CongestionMap::default();
    for port in [0, 7, 8, 4002, 32_767, 32_768, 65_535] {
        assert!(map.set(port, true) && !map.set(port, true));
    }
    // Port 4002 is bit 2 of byte 500.
    assert_eq!(map.fragment(0).unwrap().bytes()[500], 4);
    let mut copy = CongestionMap::default();
    copy.set(9, true);
    for index in 0..2 {
        copy.replace(&map.fragment(index).unwrap());
    }
    assert_eq!(copy, map);
    assert!(map.fragment(2).is_none());
    let ports: Vec<u16> = (0..2)
        .flat_map(|i| map.fragment(i).unwrap().ports().collect::<Vec<_>>())
        .collect();
    assert_eq!(ports, map.ports().collect::<Vec<_>>());
    assert!(ports.iter().all(|p| map.is_congested(*p)) && !map.is_congested(9));
    for (index, len) in [(0, 4095), (0, 4097), (2, 4096), (u32::MAX, 0)] {
        assert!(BitmapFragment::parse(index, &vec![0; len]).is_err());
    }
}

#[test]
fn freed_ports_are_told_modulo_64() {
    let (mut before, mut now) = (CongestionMap::default(), CongestionMap::default());
    before.set(4002, true);
    before.set(70, true);
    now.set(70, true);
    now.set(5, true);
    assert_eq!(now.freed_since(&before), 1 << (4002 % 64));
    assert_eq!(before.freed_since(&now), 1 << 5);
}

proptest! {
    #[test]
    fn any_header_is_emitted_again(bytes in vec(any::<u8>(), 0..200), index in 0u32..4) {
        if let Ok((header, rest)) = Header::peek(&bytes) {
            prop_assert_eq!([header.as_bytes(), rest].concat(), bytes.clone());
            let known: Vec<Extension> = header.extensions().take_while(|e| !matches!(e, Extension::Unknown(_))).collect();
            let packed = pack(&known).unwrap();
            let mut again = Header::default();
            again.set_extensions(packed);
            prop_assert_eq!(again.extensions().collect::<Vec<_>>(), known);
            prop_assert!(header.fragments() >= 1);
        }
        if let Ok(fragment) = Fragment::parse(&bytes, index) {
            let mut again = Vec::new();
            fragment.emit(&mut again);
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn any_map_is_read_again(ports in vec(any::<u16>(), 0..50)) {
        let mut map = CongestionMap::default();
        for port in &ports {
            map.set(*port, true);
        }
        let mut expected = ports;
        expected.sort_unstable();
        expected.dedup();
        prop_assert_eq!(map.ports().collect::<Vec<_>>(), expected);
        prop_assert_eq!(map.fragment(0).unwrap().bytes().len() * 2, BITMAP_LEN);
    }
}
