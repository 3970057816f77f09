//! Headers that the kernel does not make: Ethernet, IP and UDP, written and read with `pnet`.
//!
//! The UDP checksum is 0, as rdma_rxe and RDMA adapters send it: the ICRC covers all that the checksum would.

use std::net::{IpAddr, SocketAddr};

use pnet::{
    datalink::MacAddr,
    packet::{
        ethernet::{EtherType, EtherTypes, EthernetPacket, MutableEthernetPacket},
        ip::IpNextHeaderProtocols,
        ipv4::{Ipv4Flags, Ipv4Packet, MutableIpv4Packet, checksum},
        ipv6::{Ipv6Packet, MutableIpv6Packet},
        udp::{MutableUdpPacket, UdpPacket},
        vlan::{ClassOfService, MutableVlanPacket},
    },
};
use roce_bth::ROCE_UDP_PORT;
use roce_port::{RxMeta, Train};

use super::merged;
use crate::sys::MAX_HEAD;

/// Bytes of each header, without options.
const ETHERNET: usize = 14;
const VLAN_TAG: usize = 4;
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;

/// Link addresses of a frame, and its VLAN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LinkHeader {
    pub(crate) source: MacAddr,
    pub(crate) destination: MacAddr,
    pub(crate) vlan: Option<u16>,
}

impl LinkHeader {
    /// Writes the headers of a frame with one packet. Returns their length.
    pub(crate) fn write(&self, head: &mut [u8; MAX_HEAD], packet: &Train<'_>, identification: u16) -> usize {
        let kind = match packet.local {
            IpAddr::V4(_) => EtherTypes::Ipv4,
            IpAddr::V6(_) => EtherTypes::Ipv6,
        };
        let link = self.write_link(head, kind);
        link + write_ip(&mut head[link..], packet, identification)
    }

    fn write_link(&self, head: &mut [u8], kind: EtherType) -> usize {
        if let Some(mut ethernet) = MutableEthernetPacket::new(head) {
            ethernet.set_destination(self.destination);
            ethernet.set_source(self.source);
            ethernet.set_ethertype(if self.vlan.is_some() { EtherTypes::Vlan } else { kind });
        }
        let Some(id) = self.vlan else { return ETHERNET };
        if let Some(mut tag) = MutableVlanPacket::new(&mut head[ETHERNET..]) {
            tag.set_priority_code_point(ClassOfService(0));
            tag.set_vlan_identifier(id);
            tag.set_ethertype(kind);
        }
        ETHERNET + VLAN_TAG
    }
}

/// Writes the IP and UDP headers of a packet. Returns their length.
pub(super) fn write_ip(head: &mut [u8], packet: &Train<'_>, identification: u16) -> usize {
    match (packet.local, packet.remote.ip()) {
        (IpAddr::V4(_), IpAddr::V4(_)) => write_ipv4(head, packet, identification),
        _ => {
            write_ipv6(head, packet);
            IPV6 + write_udp(&mut head[IPV6..], packet)
        }
    }
}

/// Writes the IPv4 and UDP headers of a packet, with Don't Fragment and this Identification. Returns their length.
pub(crate) fn write_ipv4(head: &mut [u8], packet: &Train<'_>, identification: u16) -> usize {
    if let (Some(mut ip), IpAddr::V4(source), IpAddr::V4(destination)) =
        (MutableIpv4Packet::new(head), packet.local, packet.remote.ip())
    {
        ip.set_version(4);
        ip.set_header_length((IPV4 / 4) as u8);
        ip.set_dscp(packet.tos >> 2);
        ip.set_ecn(packet.tos & 3);
        ip.set_total_length((IPV4 + UDP + packet.bytes.len()) as u16);
        ip.set_identification(identification);
        ip.set_flags(Ipv4Flags::DontFragment);
        ip.set_ttl(packet.ttl);
        ip.set_next_level_protocol(IpNextHeaderProtocols::Udp);
        ip.set_source(source);
        ip.set_destination(destination);
        let sum = checksum(&ip.to_immutable());
        ip.set_checksum(sum);
    }
    IPV4 + write_udp(&mut head[IPV4..], packet)
}

fn write_ipv6(head: &mut [u8], packet: &Train<'_>) {
    if let (Some(mut ip), IpAddr::V6(source), IpAddr::V6(destination)) =
        (MutableIpv6Packet::new(head), packet.local, packet.remote.ip())
    {
        ip.set_version(6);
        ip.set_traffic_class(packet.tos);
        ip.set_payload_length((UDP + packet.bytes.len()) as u16);
        ip.set_next_header(IpNextHeaderProtocols::Udp);
        ip.set_hop_limit(packet.ttl);
        ip.set_source(source);
        ip.set_destination(destination);
    }
}

/// Writes the UDP header of a packet. Returns its length.
pub(crate) fn write_udp(head: &mut [u8], packet: &Train<'_>) -> usize {
    if let Some(mut udp) = MutableUdpPacket::new(head) {
        udp.set_source(packet.src_port);
        udp.set_destination(packet.remote.port());
        udp.set_length((UDP + packet.bytes.len()) as u16);
    }
    UDP
}

/// Returns the datagram of a frame, whose VLAN tag the kernel has taken off. `None`: it is none for RoCE, or malformed.
pub(crate) fn read_frame(frame: &[u8]) -> Option<(RxMeta, &[u8])> {
    let kind = EthernetPacket::new(frame)?.get_ethertype();
    let ip = frame.get(ETHERNET..)?;
    match kind {
        EtherTypes::Ipv4 => read_ipv4(ip),
        EtherTypes::Ipv6 => read_ipv6(ip),
        _ => None,
    }
}

/// Returns the datagram of an IPv4 packet without options, which is not a fragment.
pub(crate) fn read_ipv4(bytes: &[u8]) -> Option<(RxMeta, &[u8])> {
    const FRAGMENT: u8 = Ipv4Flags::MoreFragments;
    let ip = Ipv4Packet::new(bytes)?;
    let whole = ip.get_version() == 4
        && usize::from(ip.get_header_length()) * 4 == IPV4
        && ip.get_flags() & FRAGMENT == 0
        && ip.get_fragment_offset() == 0
        && ip.get_next_level_protocol() == IpNextHeaderProtocols::Udp;
    if !whole || ip.get_checksum() != checksum(&ip) {
        return None;
    }
    let end = usize::from(ip.get_total_length());
    let meta = RxMeta {
        identification: Some(ip.get_identification()),
        tos: ip.get_dscp() << 2 | ip.get_ecn(),
        hop_limit: ip.get_ttl(),
        ..RxMeta::new(ip.get_destination().into(), (ip.get_source(), 0).into())
    };
    read_udp(bytes.get(IPV4..end)?, meta)
}

/// Returns the datagram of an IPv6 packet without extension headers.
fn read_ipv6(bytes: &[u8]) -> Option<(RxMeta, &[u8])> {
    let ip = Ipv6Packet::new(bytes)?;
    if ip.get_version() != 6 || ip.get_next_header() != IpNextHeaderProtocols::Udp {
        return None;
    }
    let end = IPV6 + usize::from(ip.get_payload_length());
    let meta = RxMeta {
        tos: ip.get_traffic_class(),
        hop_limit: ip.get_hop_limit(),
        ..RxMeta::new(ip.get_destination().into(), (ip.get_source(), 0).into())
    };
    read_udp(bytes.get(IPV6..end)?, meta)
}

/// Returns the datagram of a UDP header and what follows. `meta`: all that is known but the sender's port and the length of merged
/// packets.
pub(crate) fn read_udp(bytes: &[u8], meta: RxMeta) -> Option<(RxMeta, &[u8])> {
    let udp = UdpPacket::new(bytes)?;
    if udp.get_destination() != ROCE_UDP_PORT {
        return None;
    }
    // Frames are padded to 60 bytes.
    let payload = bytes.get(UDP..usize::from(udp.get_length()))?;
    let mut meta = RxMeta {
        remote: SocketAddr::new(meta.remote.ip(), udp.get_source()),
        ..meta
    };
    meta.segment_len = merged::segment_len(&meta, payload);
    Some((meta, payload))
}

#[cfg(test)]
mod tests {
    use roce_icrc::Flow;

    use super::*;

    const LINK: LinkHeader = LinkHeader {
        source: MacAddr(2, 0, 0, 0, 0, 1),
        destination: MacAddr(2, 0, 0, 0, 0, 2),
        vlan: None,
    };

    fn packet<'a>(local: &str, remote: &str, bytes: &'a [u8]) -> Train<'a> {
        Train {
            local: local.parse().unwrap(),
            remote: SocketAddr::new(remote.parse().unwrap(), ROCE_UDP_PORT),
            src_port: 0xc123,
            tos: 0xb9,
            ttl: 63,
            segment_len: bytes.len(),
            bytes,
        }
    }

    fn frame(link: &LinkHeader, packet: &Train<'_>) -> Vec<u8> {
        let mut head = [0; MAX_HEAD];
        let len = link.write(&mut head, packet, 7);
        [&head[..len], packet.bytes].concat()
    }

    fn sealed(local: &str, remote: &str) -> Vec<u8> {
        let mut bytes = vec![0x5a; 60];
        let to = SocketAddr::new(remote.parse().unwrap(), ROCE_UDP_PORT);
        let flow = Flow::try_from((SocketAddr::new(local.parse().unwrap(), 0xc123), to)).unwrap();
        flow.seal(7, &mut bytes);
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        for (local, remote, id) in [
            ("192.0.2.1", "192.0.2.2", Some(7)),
            ("2001:db8::1", "2001:db8::2", None),
        ] {
            let bytes = sealed(local, remote);
            let packet = packet(local, remote, &bytes);
            let mut frame = frame(&LINK, &packet);
            // As Ethernet pads short frames.
            frame.extend([0; 9]);
            let (meta, payload) = read_frame(&frame).unwrap();
            assert_eq!(payload, bytes);
            let expected = RxMeta {
                identification: id,
                tos: 0xb9,
                hop_limit: 63,
                ..RxMeta::new(packet.remote.ip(), SocketAddr::new(packet.local, 0xc123))
            };
            assert_eq!(format!("{meta:?}"), format!("{expected:?}"));
        }
    }

    #[test]
    fn the_bytes_are_as_on_the_wire() {
        let link = LinkHeader {
            vlan: Some(100),
            ..LINK
        };
        let got = frame(&link, &packet("192.0.2.1", "192.0.2.2", &[1, 2, 3, 4]));
        let expected = [
            &[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x81, 0, 0, 100, 8, 0][..],
            &[
                0x45, 0xb9, 0, 32, 0, 7, 0x40, 0, 63, 17, 0xb7, 0x09, 192, 0, 2, 1, 192, 0, 2, 2,
            ],
            &[0xc1, 0x23, 0x12, 0xb7, 0, 12, 0, 0, 1, 2, 3, 4],
        ]
        .concat();
        assert_eq!(got, expected);
    }

    #[test]
    fn malformed_frames_are_refused() {
        for (local, remote) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
            let bytes = sealed(local, remote);
            let whole = frame(&LINK, &packet(local, remote, &bytes));
            assert!(read_frame(&whole).is_some());
            for len in 0..whole.len() {
                assert!(read_frame(&whole[..len]).is_none(), "{len} of {} bytes", whole.len());
            }
            let spoiled = |at: usize, value: u8| {
                let mut frame = whole.clone();
                frame[at] = value;
                read_frame(&frame).is_none()
            };
            assert!(spoiled(12, 0x81), "another EtherType");
            assert!(spoiled(ETHERNET, 0x46), "another version, or options");
            let (protocol, udp) = match local.contains('.') {
                true => (ETHERNET + 9, ETHERNET + IPV4),
                false => (ETHERNET + 6, ETHERNET + IPV6),
            };
            assert!(spoiled(protocol, 6), "TCP");
            assert!(spoiled(udp + 2, 0x13), "another port");
            assert!(spoiled(udp + 4, 0xff), "longer than the packet");
            assert!(spoiled(udp + 5, 7), "shorter than its header");
        }
        let bytes = sealed("192.0.2.1", "192.0.2.2");
        let whole = frame(&LINK, &packet("192.0.2.1", "192.0.2.2", &bytes));
        for (at, value) in [(ETHERNET + 6, 0x60), (ETHERNET + 7, 1), (ETHERNET + 8, 1)] {
            let mut frame = whole.clone();
            frame[at] = value;
            assert!(read_frame(&frame).is_none(), "a fragment, or a wrong checksum");
        }
    }
}
