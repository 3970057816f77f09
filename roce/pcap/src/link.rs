//! From a captured frame to the network layer: link types, tags and labels.

use etherparse::{EtherType, Ethernet2HeaderSlice, SingleVlanHeaderSlice};

use crate::frame_error::{FrameError, need};

/// Most 802.1Q and 802.1ad tags that are skipped.
const MAX_TAGS: usize = 4;
const MPLS: [EtherType; 2] = [EtherType(0x8847), EtherType(0x8848)];
/// Most labels of MPLS that are skipped.
const MAX_LABELS: usize = 8;

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
    /// Extensible Record Format of Endace's capture cards.
    Erf,
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
            197 => Self::Erf,
            276 => Self::LinuxSll2,
            other => Self::Other(other),
        }
    }
}

/// Way of a frame through the interface at which it was captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Direction {
    /// Received.
    Inbound,
    /// Sent.
    Outbound,
}

/// The direction that a link header states.
pub(crate) fn direction(link: LinkType, frame: &[u8]) -> Option<Direction> {
    let packet_type = match link {
        LinkType::LinuxSll => u16::from_be_bytes(*frame.first_chunk()?),
        LinkType::LinuxSll2 => u16::from(*frame.get(10)?),
        _ => return None,
    };
    match packet_type {
        // To this host, to all, to a group, to another host.
        0..=3 => Some(Direction::Inbound),
        4 => Some(Direction::Outbound),
        _ => None,
    }
}

/// The ethertype of the network layer and the bytes from there on.
pub(crate) fn network_layer(link: LinkType, frame: &[u8]) -> Result<(EtherType, &[u8]), FrameError> {
    let cooked = |type_at: usize, len: usize| {
        need("Linux cooked header", len, frame)?;
        let ether_type = u16::from_be_bytes([frame[type_at], frame[type_at + 1]]);
        Ok((EtherType(ether_type), &frame[len..]))
    };
    let (ether_type, rest) = match link {
        LinkType::Ethernet => ethernet(frame)?,
        LinkType::LinuxSll => cooked(14, 16)?,
        LinkType::LinuxSll2 => cooked(0, 20)?,
        LinkType::RawIp => (by_version(frame)?, frame),
        LinkType::Loopback => {
            need("loopback header", 4, frame)?;
            // The numbers of families differ between systems, and so does their byte order.
            (by_version(&frame[4..])?, &frame[4..])
        }
        LinkType::Erf => erf(frame)?,
        LinkType::Other(number) => return Err(FrameError::LinkType(number)),
    };
    skip_tags(ether_type, rest)
}

fn ethernet(frame: &[u8]) -> Result<(EtherType, &[u8]), FrameError> {
    need("Ethernet header", 14, frame)?;
    let header =
        Ethernet2HeaderSlice::from_slice(frame).map_err(|e| FrameError::Malformed(format!("Ethernet header: {e}")))?;
    Ok((header.ether_type(), &frame[14..]))
}

/// Skips VLAN tags and MPLS labels.
pub(crate) fn skip_tags(mut ether_type: EtherType, mut rest: &[u8]) -> Result<(EtherType, &[u8]), FrameError> {
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
    if MPLS.contains(&ether_type) {
        return behind_labels(rest);
    }
    Ok((ether_type, rest))
}

/// The IP packet behind a stack of MPLS labels (RFC 3032).
fn behind_labels(mut rest: &[u8]) -> Result<(EtherType, &[u8]), FrameError> {
    for _ in 0..MAX_LABELS {
        need("MPLS label", 4, rest)?;
        let is_last = rest[2] & 1 != 0;
        rest = &rest[4..];
        if is_last {
            need("IP header", 1, rest)?;
            // Labels do not say what they carry.
            let ether_type = by_version(rest).map_err(|_| FrameError::Tunnel("an MPLS pseudowire"))?;
            return Ok((ether_type, rest));
        }
    }
    Err(FrameError::Tunnel("MPLS with more than 8 labels"))
}

pub(crate) fn by_version(packet: &[u8]) -> Result<EtherType, FrameError> {
    need("IP header", 1, packet)?;
    match packet[0] >> 4 {
        4 => Ok(EtherType::IPV4),
        6 => Ok(EtherType::IPV6),
        version => Err(FrameError::Malformed(format!("IP version {version}"))),
    }
}

/// Flag of an ERF header that another one follows.
const ERF_MORE: u8 = 0x80;

/// The end of a record's ERF header and extension headers.
pub(crate) fn erf_header(record: &[u8]) -> Result<usize, FrameError> {
    need("ERF header", 16, record)?;
    let mut follows = record[8] & ERF_MORE != 0;
    let mut at = 16;
    while follows {
        need("ERF extension header", at + 8, record)?;
        follows = record[at] & ERF_MORE != 0;
        at += 8;
    }
    Ok(at)
}

/// A record of Endace's format: a header of 16 bytes, extension headers of 8, and what its type says.
fn erf(record: &[u8]) -> Result<(EtherType, &[u8]), FrameError> {
    let rest = &record[erf_header(record)?..];
    match record[8] & !ERF_MORE {
        // Ethernet, with colours or hashes in the place of a counter; two bytes of offset and padding.
        2 | 11 | 16 | 20 => {
            need("ERF Ethernet padding", 2, rest)?;
            ethernet(&rest[2..])
        }
        22 => Ok((EtherType::IPV4, rest)),
        23 => Ok((EtherType::IPV6, rest)),
        27 => Err(FrameError::NoPacket("an ERF record of metadata")),
        48 => Err(FrameError::NoPacket("ERF padding")),
        other => Err(FrameError::ErfType(other)),
    }
}
