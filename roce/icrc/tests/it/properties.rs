//! Properties that hold for packets of any content and length.

use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::{collection::vec, prelude::*};
use roce_icrc::{Flow, ICRC_LEN, IdSolver, IpPair, Recovery, check_datagram};

fn flow() -> impl Strategy<Value = Flow> {
    let pair = prop_oneof![
        any::<(u32, u32)>().prop_map(|(src, dst)| IpPair::V4 {
            src: Ipv4Addr::from_bits(src),
            dst: Ipv4Addr::from_bits(dst),
        }),
        any::<(u128, u128)>().prop_map(|(src, dst)| IpPair::V6 {
            src: Ipv6Addr::from_bits(src),
            dst: Ipv6Addr::from_bits(dst),
        }),
    ];
    (pair, any::<u16>(), any::<u16>()).prop_map(|(ip, src_port, dst_port)| Flow { ip, src_port, dst_port })
}

/// Returns the bytes that the ICRC of a packet covers, as the specification lists them.
fn message(flow: &Flow, id: u16, body: &[u8]) -> Vec<u8> {
    let udp_len = (body.len() + 12) as u16;
    let mut message = vec![0xff; 8];
    match flow.ip {
        IpPair::V4 { src, dst } => {
            message.extend([0x45, 0xff]);
            message.extend(udp_len.wrapping_add(20).to_be_bytes());
            message.extend(id.to_be_bytes());
            message.extend([0x40, 0, 0xff, 17, 0xff, 0xff]);
            message.extend(src.octets());
            message.extend(dst.octets());
        }
        IpPair::V6 { src, dst } => {
            message.extend([0x6f, 0xff, 0xff, 0xff]);
            message.extend(udp_len.to_be_bytes());
            message.extend([17, 0xff]);
            message.extend(src.octets());
            message.extend(dst.octets());
        }
    }
    message.extend(flow.src_port.to_be_bytes());
    message.extend(flow.dst_port.to_be_bytes());
    message.extend(udp_len.to_be_bytes());
    message.extend([0xff, 0xff]);
    let bth = message.len();
    message.extend(body);
    if let Some(masked) = message.get_mut(bth + 4) {
        *masked = 0xff;
    }
    message
}

/// The definition, bit by bit, with nothing shared with the crate.
fn reference(flow: &Flow, id: u16, body: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in message(flow, id, body) {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ if crc & 1 != 0 { 0xedb8_8320 } else { 0 };
        }
    }
    !crc
}

proptest! {
    #[test]
    fn matches_the_definition(flow in flow(), id: u16, body in vec(any::<u8>(), 0..600)) {
        prop_assert_eq!(flow.compute(id, &body), reference(&flow, id, &body));
    }

    #[test]
    fn one_prefix_serves_all_identifications_and_lengths(
        flow in flow(), packets in vec((any::<[u16; 2]>(), any::<u8>(), 0usize..70_000), 1..8),
    ) {
        let mut prefix = flow.prefix();
        let pairs = packets.into_iter().flat_map(|(ids, fill, len)| ids.map(|id| (id, fill, len)));
        for (id, fill, len) in pairs {
            let mut packet = vec![fill; len + ICRC_LEN];
            prefix.seal(id, &mut packet);
            let (body, icrc) = packet.split_last_chunk().unwrap();
            prop_assert_eq!(u32::from_le_bytes(*icrc), crc32fast::hash(&message(&flow, id, body)), "{} bytes", len);
        }
    }

    #[test]
    fn sealed_packets_verify_and_give_their_identification(
        flow in flow(), id: u16, hint: u16, mut packet in vec(any::<u8>(), 16..5000),
    ) {
        flow.seal(id, &mut packet);
        prop_assert!(flow.verify(id, &packet));
        let mut solver = IdSolver::new();
        let found = if matches!(flow.ip, IpPair::V4 { .. }) { id } else { hint };
        prop_assert_eq!(flow.recover(&packet, hint), Recovery::Exact(found));
        prop_assert_eq!(flow.recover_with(&mut solver, &packet, hint), Recovery::Exact(found));
        // A second time, now from the cache.
        prop_assert_eq!(flow.recover_with(&mut solver, &packet, !hint), Recovery::Exact(
            if matches!(flow.ip, IpPair::V4 { .. }) { id } else { !hint }
        ));
    }

    #[test]
    fn a_source_port_that_is_not_known_is_found(
        flow in flow(), id: u16, guess: u16, mut packet in vec(any::<u8>(), 16..3000), bad: u8,
    ) {
        flow.seal(id, &mut packet);
        let guessed = Flow { src_port: guess, ..flow };
        prop_assert_eq!(guessed.recover_source_port(id, &packet), Some(flow.src_port));
        prop_assert_eq!(guessed.recover_source_port(id, &packet[..15]), None);
        packet[0] ^= bad;
        if let Some(src_port) = guessed.recover_source_port(id, &packet) {
            let found = Flow { src_port, ..flow };
            prop_assert!(found.verify(id, &packet));
        }
    }

    /// An Identification that recovery calls exact verifies, and no other one does.
    #[test]
    fn recovery_of_garbage_agrees_with_verification(flow in flow(), packet in vec(any::<u8>(), 0..100), hint: u16) {
        if let Recovery::Exact(id) = flow.recover(&packet, hint) {
            prop_assert!(flow.verify(id, &packet));
        } else {
            prop_assert!(!flow.verify(hint, &packet));
        }
    }

    #[test]
    fn no_length_panics(flow in flow(), id: u16, mut packet in vec(any::<u8>(), 0..20)) {
        flow.compute(id, &packet);
        let before = packet.clone();
        flow.seal(id, &mut packet);
        if packet.len() < 4 {
            prop_assert_eq!(&packet, &before);
        }
        if packet.len() < 16 {
            prop_assert!(!flow.verify(id, &packet));
            prop_assert_eq!(flow.recover(&packet, id), Recovery::Corrupt);
        }
    }

    #[test]
    fn arbitrary_datagrams_do_not_panic(mut bytes in vec(any::<u8>(), 0..120), version in prop_oneof![Just(0x45u8), Just(0x4f), Just(0x40), Just(0x60), any::<u8>()]) {
        if let Some(first) = bytes.first_mut() {
            *first = version;
        }
        check_datagram(&bytes);
    }
}

/// Each length and each Identification once, for both IP versions.
#[test]
fn every_length_and_every_identification_match_the_definition() {
    let flows = [
        ("10.1.2.3:50000", "10.4.5.6:4791"),
        ("[fe80::1]:50000", "[fe80::2]:4791"),
    ]
    .map(|(src, dst)| Flow::try_from((src.parse().unwrap(), dst.parse().unwrap())).unwrap());
    let bytes: Vec<u8> = (0..65_536u32).map(|i| ((i * 31) >> 3) as u8).collect();
    for flow in flows {
        for len in 0..=bytes.len() {
            let body = &bytes[..len];
            assert_eq!(
                flow.compute(7, body),
                crc32fast::hash(&message(&flow, 7, body)),
                "{len} bytes"
            );
        }
        for id in 0..=u16::MAX {
            let body = &bytes[..24];
            assert_eq!(
                flow.compute(id, body),
                crc32fast::hash(&message(&flow, id, body)),
                "{id:#06x}"
            );
        }
    }
}

#[test]
fn too_long_for_a_datagram_is_no_panic() {
    let flow = Flow::try_from(("10.0.0.1:1".parse().unwrap(), "10.0.0.2:4791".parse().unwrap())).unwrap();
    let mut packet = vec![0; 200_000];
    flow.seal(0, &mut packet);
    flow.recover(&packet, 1);
}

#[test]
fn mapped_addresses_are_ipv4_and_families_do_not_mix() {
    let mapped = Flow::try_from(("[::ffff:10.0.0.1]:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap())).unwrap();
    assert_eq!(mapped.src(), "10.0.0.1:1".parse().unwrap());
    let mixed = Flow::try_from(("[fe80::1]:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap()));
    assert!(mixed.unwrap_err().to_string().contains("different IP versions"));
}
