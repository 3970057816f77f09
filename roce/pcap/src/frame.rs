//! From a captured frame to the UDP datagram in it.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    EtherType, Ethernet2HeaderSlice, IpNumber, Ipv4HeaderSlice, Ipv6HeaderSlice, SingleVlanHeaderSlice, UdpHeaderSlice,
};
use thiserror::Error;

const UDP_HEADER_LEN: usize = 8;
/// Ethertype of RoCE version 1, which has no IP header.
const ETHERTYPE_ROCE_V1: u16 = 0x8915;
/// The most 802.1Q and 802.1ad tags that are skipped.
const MAX_TAGS: usize = 4;
const IPV6_FRAGMENT: u8 = 44;

/// First header of a capture's frames (the numbers are those of <https://www.tcpdump.org/linktypes.html>).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum LinkType {
    /// Ethernet II, with or without 802.1Q and 802.1ad tags.
    Ethernet,
    /// An IPv4 or IPv6 header at once.
    RawIp,
    /// Linux cooked capture, version 1 (`tcpdump -i any` of old).
    LinuxSll,
    /// Linux cooked capture, version 2.
    LinuxSll2,
    /// BSD loopback: four bytes of address family.
    Loopback,
    /// Any other.
    Other(u16),
}

impl LinkType {
    /// From the number in a capture file's header; the FCS bits above the low 16 are ignored.
    pub const fn from_number(number: u32) -> Self {
        match (number & 0xffff) as u16 {
            1 => Self::Ethernet,
            // 12 and 14 are what the BSDs wrote before the number was agreed on.
            12 | 14 | 101 | 228 | 229 => Self::RawIp,
            0 | 108 => Self::Loopback,
            113 => Self::LinuxSll,
            276 => Self::LinuxSll2,
            other => Self::Other(other),
        }
    }
}

/// Why a frame is not a whole UDP datagram.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum FrameError {
    /// The link type is one that this crate does not read.
    #[error("link type {0} is not supported")]
    LinkType(u16),
    /// The frame holds no IP packet.
    #[error("ethertype {0:#06x} is not IP")]
    NotIp(u16),
    /// RoCE version 1.
    #[error("RoCE version 1 (ethertype 0x8915), which has no IP header")]
    RoceV1,
    /// The IP packet holds no UDP datagram.
    #[error("IP protocol {0} is not UDP")]
    NotUdp(u8),
    /// A tunnel that this crate does not read.
    #[error("in {0}, which is not read")]
    Tunnel(&'static str),
    /// The frame ends before a header or the payload does.
    #[error("{layer} needs {need} bytes, {have} are there")]
    Truncated {
        /// Which header, or the payload.
        layer: &'static str,
        /// Bytes that it takes.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// A header contradicts itself.
    #[error("{0}")]
    Malformed(String),
    /// A part of a datagram.
    #[error("fragment at offset {offset}{}", if *.more { ", more follow" } else { "" })]
    Fragment {
        /// In bytes.
        offset: u16,
        /// Whether it is not the last.
        more: bool,
    },
}

/// Fields of the IP header beside the addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Ip {
    /// IPv4.
    V4 {
        /// Identification.
        identification: u16,
        /// Whether DF is set.
        dont_fragment: bool,
        /// Header length in 32-bit words: 5 without options.
        ihl: u8,
        /// DSCP and ECN.
        tos: u8,
        /// Whether the header checksum is right.
        checksum_ok: bool,
    },
    /// IPv6.
    V6 {
        /// DSCP and ECN.
        traffic_class: u8,
    },
}

/// A UDP datagram in its frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram<'a> {
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: SocketAddr,
    /// The rest of the IP header.
    pub ip: Ip,
    /// The IP datagram, from its first byte to its last, without link-layer padding.
    pub datagram: &'a [u8],
    /// The UDP payload.
    pub payload: &'a [u8],
}

impl Datagram<'_> {
    /// The IPv4 Identification; 0 for IPv6, which has none.
    pub const fn identification(&self) -> u16 {
        match self.ip {
            Ip::V4 { identification, .. } => identification,
            Ip::V6 { .. } => 0,
        }
    }
}

/// Takes a frame apart.
///
/// # Errors
/// When it is not a complete, unfragmented UDP datagram.
pub fn decode(link: LinkType, frame: &[u8]) -> Result<Datagram<'_>, FrameError> {
    let dissected = dissect(link, frame)?;
    match dissected.problem {
        Some(problem) => Err(problem),
        None => Ok(dissected.datagram),
    }
}

/// A datagram whose UDP header at least is there, and what is wrong with the rest.
pub(crate) struct Dissected<'a> {
    /// With the payload as far as it goes.
    pub(crate) datagram: Datagram<'a>,
    pub(crate) problem: Option<FrameError>,
}

/// [`decode`], but a datagram that is cut off or a first fragment is returned with its problem.
pub(crate) fn dissect(link: LinkType, frame: &[u8]) -> Result<Dissected<'_>, FrameError> {
    let (ether_type, packet) = network_layer(link, frame)?;
    match ether_type {
        EtherType::IPV4 => ipv4(packet),
        EtherType::IPV6 => ipv6(packet),
        EtherType(ETHERTYPE_ROCE_V1) => Err(FrameError::RoceV1),
        EtherType(other) => Err(FrameError::NotIp(other)),
    }
}

fn need(layer: &'static str, need: usize, bytes: &[u8]) -> Result<(), FrameError> {
    let have = bytes.len();
    if have < need {
        return Err(FrameError::Truncated { layer, need, have });
    }
    Ok(())
}

/// The ethertype and what follows it.
fn network_layer(link: LinkType, frame: &[u8]) -> Result<(EtherType, &[u8]), FrameError> {
    let cooked = |type_at: usize, len: usize| {
        need("Linux cooked header", len, frame)?;
        let ether_type = u16::from_be_bytes([frame[type_at], frame[type_at + 1]]);
        Ok((EtherType(ether_type), &frame[len..]))
    };
    let (mut ether_type, mut rest) = match link {
        LinkType::Ethernet => {
            need("Ethernet header", 14, frame)?;
            let header = Ethernet2HeaderSlice::from_slice(frame)
                .map_err(|e| FrameError::Malformed(format!("Ethernet header: {e}")))?;
            (header.ether_type(), &frame[14..])
        }
        LinkType::LinuxSll => cooked(14, 16)?,
        LinkType::LinuxSll2 => cooked(0, 20)?,
        LinkType::RawIp => (by_version(frame)?, frame),
        LinkType::Loopback => {
            need("loopback header", 4, frame)?;
            (by_version(&frame[4..])?, &frame[4..])
        }
        LinkType::Other(number) => return Err(FrameError::LinkType(number)),
    };
    let tags = [
        EtherType::VLAN_TAGGED_FRAME,
        EtherType::PROVIDER_BRIDGING,
        EtherType::VLAN_DOUBLE_TAGGED_FRAME,
    ];
    for _ in 0..MAX_TAGS {
        if !tags.contains(&ether_type) {
            break;
        }
        need("802.1Q tag", 4, rest)?;
        ether_type = SingleVlanHeaderSlice::from_slice(rest)
            .map_err(|e| FrameError::Malformed(format!("802.1Q tag: {e}")))?
            .ether_type();
        rest = &rest[4..];
    }
    Ok((ether_type, rest))
}

fn by_version(packet: &[u8]) -> Result<EtherType, FrameError> {
    need("IP header", 1, packet)?;
    match packet[0] >> 4 {
        4 => Ok(EtherType::IPV4),
        6 => Ok(EtherType::IPV6),
        version => Err(FrameError::Malformed(format!("IP version {version}"))),
    }
}

/// Returns the error for an IP packet that holds no UDP.
fn not_udp(protocol: IpNumber) -> FrameError {
    match protocol {
        IpNumber::IPV4 | IpNumber::IPV6 => FrameError::Tunnel("IP in IP"),
        IpNumber::GRE => FrameError::Tunnel("GRE (ERSPAN for instance)"),
        other => FrameError::NotUdp(other.0),
    }
}

fn ipv4(packet: &[u8]) -> Result<Dissected<'_>, FrameError> {
    need("IPv4 header", 20, packet)?;
    let header_len = usize::from(packet[0] & 0x0f) * 4;
    if header_len >= 20 {
        need("IPv4 header", header_len, packet)?;
    }
    let header = Ipv4HeaderSlice::from_slice(packet).map_err(|e| FrameError::Malformed(format!("IPv4 header: {e}")))?;
    if header.protocol() != IpNumber::UDP {
        return Err(not_udp(header.protocol()));
    }
    let total = usize::from(header.total_len());
    if total < header_len {
        let text = format!("IPv4 total length {total} is less than its header's {header_len}");
        return Err(FrameError::Malformed(text));
    }
    let (offset, more) = (header.fragments_offset().byte_offset(), header.more_fragments());
    if offset != 0 {
        return Err(FrameError::Fragment { offset, more });
    }
    let ip = Ip::V4 {
        identification: header.identification(),
        dont_fragment: header.dont_fragment(),
        ihl: header.ihl(),
        tos: packet[1],
        checksum_ok: header.to_header().calc_header_checksum() == header.header_checksum(),
    };
    let addresses = (header.source_addr().into(), header.destination_addr().into());
    let mut dissected = udp(packet, addresses, ip, header_len, total)?;
    if more {
        dissected.problem = Some(FrameError::Fragment { offset, more });
    }
    Ok(dissected)
}

fn ipv6(packet: &[u8]) -> Result<Dissected<'_>, FrameError> {
    need("IPv6 header", 40, packet)?;
    let header = Ipv6HeaderSlice::from_slice(packet).map_err(|e| FrameError::Malformed(format!("IPv6 header: {e}")))?;
    match header.next_header() {
        IpNumber::UDP => {}
        IpNumber(IPV6_FRAGMENT) => {
            need("IPv6 fragment header", 48, packet)?;
            if packet[40] != IpNumber::UDP.0 {
                return Err(FrameError::NotUdp(packet[40]));
            }
            let field = u16::from_be_bytes([packet[42], packet[43]]);
            return Err(FrameError::Fragment {
                offset: field & !7,
                more: field & 1 != 0,
            });
        }
        other => return Err(not_udp(other)),
    }
    let ip = Ip::V6 {
        traffic_class: header.traffic_class(),
    };
    let addresses = (header.source_addr().into(), header.destination_addr().into());
    let total = 40 + usize::from(header.payload_length());
    udp(packet, addresses, ip, 40, total)
}

/// The UDP header at `at` of an IP packet that says it is `total` bytes long.
fn udp(
    packet: &[u8],
    (src, dst): (IpAddr, IpAddr),
    ip: Ip,
    at: usize,
    total: usize,
) -> Result<Dissected<'_>, FrameError> {
    let ip_payload = &packet[at..packet.len().min(total.max(at))];
    need("UDP header", UDP_HEADER_LEN, ip_payload)?;
    let header =
        UdpHeaderSlice::from_slice(ip_payload).map_err(|e| FrameError::Malformed(format!("UDP header: {e}")))?;
    let udp_len = usize::from(header.length());
    let problem = if udp_len != total - at {
        let text = format!("UDP length {udp_len} in an IP payload of {} bytes", total - at);
        Some(FrameError::Malformed(text))
    } else {
        need("UDP payload", total - at, ip_payload).err()
    };
    let datagram = Datagram {
        src: SocketAddr::new(src, header.source_port()),
        dst: SocketAddr::new(dst, header.destination_port()),
        ip,
        datagram: &packet[..packet.len().min(total)],
        payload: &ip_payload[UDP_HEADER_LEN..],
    };
    Ok(Dissected { datagram, problem })
}
