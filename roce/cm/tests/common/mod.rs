//! Shared by the tests: CM frames out of captures.
#![allow(dead_code, unreachable_pub, missing_docs)]

use std::net::{IpAddr, Ipv4Addr};

pub const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));
pub const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1));

/// A MAD of a capture.
#[derive(Clone)]
pub struct Captured {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub mad: [u8; 256],
}

/// The MADs on QP1 in a classic little-endian pcap of Ethernet, IPv4 and UDP frames.
pub fn mads(file: &str) -> Vec<Captured> {
    let path = format!("{}/../../pcap-fixtures/{file}", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    assert_eq!(bytes[..4], [0xd4, 0xc3, 0xb2, 0xa1], "{path}: not a little-endian pcap");
    let mut rest = &bytes[24..];
    let mut out = Vec::new();
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        let frame = &rest[16..16 + len];
        rest = &rest[16 + len..];
        let udp_4791 = frame[12..14] == [8, 0] && frame[14] == 0x45 && frame[23] == 17 && frame[36..38] == [18, 183];
        // UD SEND ONLY to QP1.
        if !udp_4791 || frame[42] != 0x64 || frame[47..50] != [0, 0, 1] {
            continue;
        }
        let ip = |at: usize| IpAddr::V4(Ipv4Addr::new(frame[at], frame[at + 1], frame[at + 2], frame[at + 3]));
        assert_eq!(frame.len(), 42 + 12 + 8 + 256 + 4, "{path}: a CM frame's length");
        out.push(Captured {
            src: ip(26),
            dst: ip(30),
            mad: frame[62..318].try_into().unwrap(),
        });
    }
    out
}
