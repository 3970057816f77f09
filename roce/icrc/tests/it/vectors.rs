//! Packets whose ICRC somebody else made: Scapy's vectors and the kernel's captures.

use std::{
    fs::File,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

use pcap_file::pcap::PcapReader;
use roce_icrc::{Flow, IdSolver, IpPair, Recovery, check_datagram};

/// Scapy `test/contrib/roce.uts`, "RoCE layer": a UC SEND Only, with the headers it is built from.
fn scapy_uc() -> (Flow, u16, Vec<u8>) {
    let flow = Flow {
        ip: IpPair::V4 {
            src: Ipv4Addr::new(192, 168, 0, 7),
            dst: Ipv4Addr::new(192, 168, 0, 7),
        },
        src_port: 49152,
        dst_port: 4791,
    };
    let mut packet = vec![0x24, 0x60, 0xff, 0xff];
    packet.extend(211u32.to_be_bytes());
    packet.extend(13_571_856u32.to_be_bytes());
    packet.extend(b"F0\x81\x8b\xe2\x895\xd9\x0e\x9a\x95PT\x01\xbe\x88^P\x00\x00");
    // Scapy's number is the wire's bytes read big-endian.
    packet.extend(0x78f3_53f3u32.to_be_bytes());
    (flow, 1144, packet)
}

/// Scapy, "RoCE CNP captured on ConnectX-4 Lx": the datagram without its Ethernet header.
const CNP: &str = "45c2 003c 718c 4000 4011 9161 0a00 1101 0a00 1201 0000 12b7 0028 0000 8100 ffff 4000 \
                   0118 0000 0000 0000 0000 0000 0000 0000 0000 0000 0000 82fd 002a";

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .bytes()
        .filter_map(|b| char::from(b).to_digit(16).map(|d| d as u8))
        .collect();
    digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect()
}

#[test]
fn scapy_uc_send_only() {
    let (flow, id, packet) = scapy_uc();
    assert_eq!(flow.compute(id, &packet[..32]).to_le_bytes(), [0x78, 0xf3, 0x53, 0xf3]);
    assert!(flow.verify(id, &packet));
    assert_eq!(flow.recover(&packet, 0), Recovery::Exact(id));
    let mut sealed = packet.clone();
    sealed[32..].fill(0);
    flow.seal(id, &mut sealed);
    assert_eq!(sealed, packet);
}

#[test]
fn scapy_connectx_cnp() {
    let datagram = hex(CNP);
    let checked = check_datagram(&datagram).unwrap();
    assert!(checked.is_ok());
    assert_eq!(checked.carried.to_le_bytes(), [0x82, 0xfd, 0x00, 0x2a]);
    let flow = Flow {
        ip: IpPair::V4 {
            src: Ipv4Addr::new(10, 0, 17, 1),
            dst: Ipv4Addr::new(10, 0, 18, 1),
        },
        src_port: 0,
        dst_port: 4791,
    };
    assert_eq!(flow.recover(&datagram[28..], 0), Recovery::Exact(0x718c));
}

/// Every UDP datagram to or from port 4791 of a capture with Ethernet frames and plain 20-byte IPv4 headers, as the kernel makes them.
fn roce_datagrams(path: &Path) -> Vec<Vec<u8>> {
    let mut reader = PcapReader::new(File::open(path).unwrap()).unwrap();
    let mut found = vec![];
    while let Some(packet) = reader.next_packet() {
        let frame = packet.unwrap().data.into_owned();
        let ip = &frame[14..];
        if frame[12..14] == [8, 0] && ip[9] == 17 && ip[22..24] == 4791u16.to_be_bytes() {
            let len = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
            found.push(ip[..len].to_vec());
        }
    }
    found
}

fn flow_of(datagram: &[u8]) -> (Flow, u16) {
    let address = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&datagram[at..at + 4]).unwrap());
    let number = |at: usize| u16::from_be_bytes([datagram[at], datagram[at + 1]]);
    let flow = Flow {
        ip: IpPair::V4 {
            src: address(12),
            dst: address(16),
        },
        src_port: number(20),
        dst_port: number(22),
    };
    (flow, number(4))
}

#[test]
fn every_kernel_frame_verifies_and_its_identification_is_recovered() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures");
    let mut frames = 0;
    let mut solver = IdSolver::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        // In that one rdma_rxe's FLUSHes have a wrong ICRC.
        if path.extension().is_none_or(|e| e != "pcap") || path.ends_with("annex-a19.pcap") {
            continue;
        }
        for datagram in roce_datagrams(&path) {
            let (flow, id) = flow_of(&datagram);
            let packet = &datagram[28..];
            frames += 1;
            let at = format!("{} roce frame {frames}", path.display());
            assert!(check_datagram(&datagram).unwrap().is_ok(), "{at}");
            assert!(flow.verify(id, packet), "{at}");
            for hint in [0, id, id.wrapping_sub(1), !id] {
                assert_eq!(flow.recover(packet, hint), Recovery::Exact(id), "{at}");
                assert_eq!(
                    flow.recover_with(&mut solver, packet, hint),
                    Recovery::Exact(id),
                    "{at}"
                );
            }
            let mut sealed = packet.to_vec();
            sealed[packet.len() - 4..].fill(0);
            flow.seal(id, &mut sealed);
            assert_eq!(sealed, packet, "{at}");
        }
    }
    assert!(frames > 1700, "only {frames} RoCE frames in the fixtures");
}

/// Flips each bit of a datagram and compares whether the ICRC still holds with what the specification masks.
fn flip_each_bit(datagram: &[u8], masked: impl Fn(usize) -> u8, structural: impl Fn(usize) -> bool) {
    assert!(check_datagram(datagram).unwrap().is_ok());
    for at in 0..datagram.len() {
        for bit in 0..8 {
            let mut bad = datagram.to_vec();
            bad[at] ^= 1 << bit;
            let ok = check_datagram(&bad).is_some_and(|c| c.is_ok());
            if structural(at) {
                // Version, header length, fragment bits, protocol: not even a datagram to check.
                assert!(!ok, "byte {at} bit {bit}");
            } else {
                assert_eq!(ok, masked(at) & (1 << bit) != 0, "byte {at} bit {bit}");
            }
        }
    }
}

#[test]
fn ipv4_single_bit_corruption_is_caught_exactly_where_covered() {
    let datagram = hex(CNP);
    // TOS, TTL, header checksum, UDP checksum, FECN/BECN byte.
    let masked = |at| {
        if matches!(at, 1 | 8 | 10 | 11 | 26 | 27 | 32) {
            0xff
        } else {
            0
        }
    };
    flip_each_bit(&datagram, masked, |at| matches!(at, 0 | 6 | 7 | 9));
}

#[test]
fn ipv6_single_bit_corruption_is_caught_exactly_where_covered() {
    let flow = Flow {
        ip: IpPair::V6 {
            src: "fe80::1".parse::<Ipv6Addr>().unwrap(),
            dst: "fe80::2".parse::<Ipv6Addr>().unwrap(),
        },
        src_port: 51_000,
        dst_port: 4791,
    };
    let mut packet: Vec<u8> = (0..64).collect();
    flow.seal(0, &mut packet);
    let mut datagram = vec![0x62, 0x34, 0x56, 0x78, 0, 72, 17, 64];
    datagram.extend(flow.src().ip().as_octets_vec());
    datagram.extend(flow.dst().ip().as_octets_vec());
    datagram.extend(flow.src_port.to_be_bytes());
    datagram.extend(flow.dst_port.to_be_bytes());
    datagram.extend([0, 72, 0xab, 0xcd]);
    datagram.extend(&packet);
    let masked = |at| match at {
        0 => 0x0f,
        // Traffic class and flow label, hop limit, UDP checksum, FECN/BECN byte.
        1..=3 | 7 | 46 | 47 | 52 => 0xff,
        _ => 0,
    };
    flip_each_bit(&datagram, masked, |at| at == 6);
    assert!(flow.verify(99, &packet));
    assert_eq!(flow.recover(&packet, 5), Recovery::Exact(5));
    packet[20] ^= 1;
    assert!(!flow.verify(0, &packet));
    assert_eq!(flow.recover(&packet, 5), Recovery::Corrupt);
}

trait Octets {
    fn as_octets_vec(&self) -> Vec<u8>;
}

impl Octets for IpAddr {
    fn as_octets_vec(&self) -> Vec<u8> {
        match self {
            IpAddr::V4(a) => a.octets().to_vec(),
            IpAddr::V6(a) => a.octets().to_vec(),
        }
    }
}

#[test]
fn flow_catches_single_bits_with_the_identification_known() {
    let (flow, id, packet) = scapy_uc();
    let mut passed = 0;
    for at in 0..packet.len() {
        for bit in 0..8 {
            let mut bad = packet.clone();
            bad[at] ^= 1 << bit;
            assert_eq!(flow.verify(id, &bad), at == 4, "byte {at} bit {bit}");
            if at == 4 {
                assert_eq!(flow.recover(&bad, id), Recovery::Exact(id), "masked bit {bit}");
                continue;
            }
            // With it unknown one corrupt packet in 2^16 passes, as one with another Identification.
            match flow.recover(&bad, id) {
                Recovery::Corrupt => {}
                Recovery::Exact(other) => {
                    assert_ne!(other, id, "byte {at} bit {bit}");
                    passed += 1;
                }
            }
        }
    }
    assert!(passed <= 1, "{passed} of 280 corrupt packets passed");
}

#[test]
fn only_whole_datagrams_of_udp_are_checked() {
    let with = |at: usize, byte: u8| {
        let mut datagram = hex(CNP);
        datagram[at] = byte;
        check_datagram(&datagram)
    };
    assert!(with(0, 0x45).is_some());
    assert!(with(0, 0x46).is_some(), "four bytes of options");
    assert_eq!(with(0, 0x44), None, "a header of 16 bytes");
    assert_eq!(with(6, 0x20), None, "more fragments follow");
    assert_eq!(with(7, 1), None, "the second fragment");
    assert_eq!(with(9, 6), None, "TCP");
}
