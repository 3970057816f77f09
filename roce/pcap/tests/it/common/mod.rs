//! Frames and capture files built by hand.

pub(crate) mod wire;

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    process::Command,
};

use roce_bth::{Bth, Header, ICRC_LEN, Opcode, Psn, Qpn};
use roce_icrc::{Flow, check_datagram};
use roce_pcap::{Report, check_reader};

pub(crate) fn v4() -> (SocketAddr, SocketAddr) {
    ("10.1.2.3:50000".parse().unwrap(), "10.1.2.4:4791".parse().unwrap())
}

pub(crate) fn v6() -> (SocketAddr, SocketAddr) {
    ("[fd00::3]:50000".parse().unwrap(), "[fd00::4]:4791".parse().unwrap())
}

/// A UC SEND Only with an ICRC of zeros: it needs no answer.
pub(crate) fn packet(payload: &[u8]) -> Vec<u8> {
    let mut bth = Bth::new(Opcode::UcSendOnly, Qpn::new(0x12), Psn::new(0x345));
    bth.pad = (payload.len().wrapping_neg() & 3) as u8;
    let mut bytes = vec![0; 12];
    Header::new(bth).emit(&mut bytes);
    bytes.extend(payload);
    bytes.resize(bytes.len() + usize::from(bth.pad) + ICRC_LEN, 0);
    bytes
}

/// An IP datagram around a packet, sealed when it is long enough.
pub(crate) fn ip_datagram(addresses: (SocketAddr, SocketAddr), id: u16, packet: &[u8]) -> Vec<u8> {
    let mut sealed = packet.to_vec();
    Flow::try_from(addresses).unwrap().seal(id, &mut sealed);
    ip_datagram_sealed(addresses, id, &sealed)
}

/// An IP datagram around a UDP payload as it is.
pub(crate) fn ip_datagram_sealed((src, dst): (SocketAddr, SocketAddr), id: u16, payload: &[u8]) -> Vec<u8> {
    let udp_len = (payload.len() + 8) as u16;
    let mut ip = match (src.ip(), dst.ip()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let mut ip = vec![0x45, 2];
            ip.extend((udp_len + 20).to_be_bytes());
            ip.extend(id.to_be_bytes());
            ip.extend([0x40, 0, 63, 17, 0, 0]);
            ip.extend(a.octets());
            ip.extend(b.octets());
            set_checksum(&mut ip);
            ip
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let mut ip = vec![0x60, 0, 0, 0];
            ip.extend(udp_len.to_be_bytes());
            ip.extend([17, 64]);
            ip.extend(a.octets());
            ip.extend(b.octets());
            ip
        }
        _ => panic!("mixed"),
    };
    ip.extend(src.port().to_be_bytes());
    ip.extend(dst.port().to_be_bytes());
    ip.extend(udp_len.to_be_bytes());
    ip.extend([0, 0]);
    ip.extend(payload);
    ip
}

fn set_checksum(ip: &mut [u8]) {
    let len = usize::from(ip[0] & 15) * 4;
    ip[10..12].fill(0);
    let mut sum: u32 = ip[..len]
        .chunks(2)
        .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    ip[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

/// Makes header checksum and ICRC of an IPv4 datagram right again.
pub(crate) fn reseal(ip: &mut [u8]) {
    set_checksum(ip);
    let icrc = check_datagram(ip).unwrap().computed;
    let at = ip.len() - 4;
    ip[at..].copy_from_slice(&icrc.to_le_bytes());
}

pub(crate) fn ethernet(ether_type: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend(ether_type.to_be_bytes());
    frame.extend(packet);
    frame
}

/// A big-endian microsecond pcap file: frames with their original lengths where that is more.
pub(crate) fn capture_of(link: u32, frames: &[(&[u8], Option<u32>)]) -> Vec<u8> {
    let mut file = vec![0xa1, 0xb2, 0xc3, 0xd4, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0];
    file.extend(96u32.to_be_bytes());
    file.extend(link.to_be_bytes());
    for (frame, original) in frames {
        let len = frame.len() as u32;
        for field in [1_700_000_000, 999_999, len, original.unwrap_or(len)] {
            file.extend(field.to_be_bytes());
        }
        file.extend(*frame);
    }
    file
}

pub(crate) fn report_of(file: &[u8]) -> Report {
    check_reader("test", file, |_| {}).unwrap()
}

/// The output of tshark for a file, with these arguments before its name.
pub(crate) fn tshark(args: &[&str], file: &Path) -> String {
    let out = Command::new("tshark").args(args).arg(file).output();
    let out = out.unwrap_or_else(|e| panic!("tshark: {e}"));
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "tshark {args:?}: {errors}");
    String::from_utf8(out.stdout).unwrap()
}

/// Path of a capture of `pcap-fixtures`.
pub(crate) fn fixture(name: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../pcap-fixtures")
        .join(name)
}
