//! Headers of tunnels: VXLAN (RFC 7348) and GENEVE (RFC 8926) in UDP, GRE (RFC 2784, RFC 2890), and ERSPAN in GRE.

use etherparse::EtherType;

use crate::{
    frame_error::{FrameError, need},
    link::{self, LinkType},
};

const VXLAN_PORT: u16 = 4789;
/// Linux's own default, from before the number was assigned.
const VXLAN_PORT_LINUX: u16 = 8472;
const GENEVE_PORT: u16 = 6081;
/// The flag without which a VXLAN header has no network identifier.
const VXLAN_I: u8 = 0x08;

/// Protocol type of Ethernet frames, of GRE and GENEVE.
const TRANSPARENT_BRIDGING: u16 = 0x6558;
const ERSPAN_I_II: u16 = 0x88be;
const ERSPAN_III: u16 = 0x22eb;

const GRE_CHECKSUM: u16 = 0x8000;
const GRE_ROUTING: u16 = 0x4000;
const GRE_KEY: u16 = 0x2000;
const GRE_SEQUENCE: u16 = 0x1000;
const GRE_VERSION: u16 = 0x0007;

/// Contents of a tunnel packet.
#[derive(Clone, Copy)]
pub(crate) enum Inner<'a> {
    Ethernet(&'a [u8]),
    Network(EtherType, &'a [u8]),
}

impl<'a> Inner<'a> {
    /// Of a protocol type, which is an ethertype but for bridged frames.
    fn of_type(protocol: u16, bytes: &'a [u8]) -> Self {
        match protocol {
            TRANSPARENT_BRIDGING => Self::Ethernet(bytes),
            other => Self::Network(EtherType(other), bytes),
        }
    }

    pub(crate) fn network_layer(self) -> Result<(EtherType, &'a [u8]), FrameError> {
        match self {
            Self::Ethernet(frame) => link::network_layer(LinkType::Ethernet, frame),
            Self::Network(ether_type, bytes) => link::skip_tags(ether_type, bytes),
        }
    }
}

/// A tunnel packet without its headers.
pub(crate) struct Carried<'a> {
    pub(crate) name: &'static str,
    /// Whether a switch made it as a copy of a frame, which it may have cut.
    pub(crate) is_mirror: bool,
    pub(crate) inner: Inner<'a>,
}

impl<'a> Carried<'a> {
    pub(crate) const fn new(name: &'static str, inner: Inner<'a>) -> Self {
        Self {
            name,
            is_mirror: false,
            inner,
        }
    }

    const fn mirrored(name: &'static str, inner: Inner<'a>) -> Self {
        Self {
            name,
            is_mirror: true,
            inner,
        }
    }
}

/// The tunnel packet in the payload of a datagram to `port`, if it is one.
pub(crate) fn in_udp(port: u16, payload: &[u8]) -> Option<Carried<'_>> {
    let header = payload.first_chunk::<8>()?;
    match port {
        VXLAN_PORT | VXLAN_PORT_LINUX if header[0] & VXLAN_I != 0 => {
            Some(Carried::new("VXLAN", Inner::Ethernet(&payload[8..])))
        }
        GENEVE_PORT if header[0] >> 6 == 0 => {
            let protocol = u16::from_be_bytes([header[2], header[3]]);
            let known = [TRANSPARENT_BRIDGING, EtherType::IPV4.0, EtherType::IPV6.0];
            if !known.contains(&protocol) {
                return None;
            }
            let options = usize::from(header[0] & 0x3f) * 4;
            let inner = Inner::of_type(protocol, payload.get(8 + options..)?);
            Some(Carried::new("GENEVE", inner))
        }
        _ => None,
    }
}

/// The contents of a GRE packet.
pub(crate) fn in_gre(packet: &[u8]) -> Result<Carried<'_>, FrameError> {
    need("GRE header", 4, packet)?;
    let flags = u16::from_be_bytes([packet[0], packet[1]]);
    let protocol = u16::from_be_bytes([packet[2], packet[3]]);
    if flags & GRE_VERSION != 0 {
        return Err(FrameError::Tunnel("GRE of another version than 0 (PPTP for instance)"));
    }
    if flags & GRE_ROUTING != 0 {
        return Err(FrameError::Tunnel("GRE with source routing"));
    }
    let has_sequence = flags & GRE_SEQUENCE != 0;
    // The checksum comes with two reserved bytes.
    let optional = [GRE_CHECKSUM, GRE_KEY, GRE_SEQUENCE].map(|flag| usize::from(flags & flag != 0) * 4);
    let len = 4 + optional.iter().sum::<usize>();
    need("GRE header", len, packet)?;
    let rest = &packet[len..];
    match protocol {
        ERSPAN_I_II if has_sequence => {
            need("ERSPAN header", 8, rest)?;
            Ok(Carried::mirrored("ERSPAN II", Inner::Ethernet(&rest[8..])))
        }
        // Type I has no header of its own, and GRE without options.
        ERSPAN_I_II => Ok(Carried::mirrored("ERSPAN I", Inner::Ethernet(rest))),
        ERSPAN_III => erspan_iii(rest),
        other => Ok(Carried::new("GRE", Inner::of_type(other, rest))),
    }
}

fn erspan_iii(packet: &[u8]) -> Result<Carried<'_>, FrameError> {
    const NAME: &str = "ERSPAN III";
    need("ERSPAN header", 12, packet)?;
    let has_subheader = packet[11] & 1 != 0;
    let len = if has_subheader { 20 } else { 12 };
    need("ERSPAN header", len, packet)?;
    let rest = &packet[len..];
    match packet[10] >> 2 & 0x1f {
        0 => Ok(Carried::mirrored(NAME, Inner::Ethernet(rest))),
        // An IP packet.
        2 => Ok(Carried::mirrored(NAME, Inner::Network(link::by_version(rest)?, rest))),
        _ => Err(FrameError::Tunnel("ERSPAN III of neither Ethernet nor IP")),
    }
}
