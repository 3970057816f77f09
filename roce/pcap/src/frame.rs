//! From a captured frame to the innermost UDP datagram in it.

use std::net::{IpAddr, SocketAddr};

use etherparse::{EtherType, IpNumber, Ipv4HeaderSlice, Ipv6HeaderSlice, UdpHeaderSlice, checksum::Sum16BitWords};
use roce_bth::ROCE_UDP_PORT;

use crate::{
    frame_error::{FrameError, need},
    link::{self, LinkType},
    tunnel::{self, Carried, Inner},
};

const UDP_HEADER_LEN: usize = 8;
/// Ethertype of RoCE version 1, which has no IP header.
const ETHERTYPE_ROCE_V1: u16 = 0x8915;
/// Most tunnel packets around a datagram that are read.
const MAX_CARRIERS: usize = 4;
/// Most extension headers of IPv6 that are skipped.
const MAX_EXTENSIONS: usize = 8;

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

/// Takes a frame apart, down to the UDP datagram in the innermost tunnel.
///
/// # Errors
/// When it is not a complete, unfragmented UDP datagram.
pub fn decode(link: LinkType, frame: &[u8]) -> Result<Datagram<'_>, FrameError> {
    let dissected = dissect(link, frame).map_err(|unread| unread.error)?;
    match dissected.problem {
        Some(problem) => Err(problem),
        None => Ok(dissected.datagram),
    }
}

/// Tunnel packet around a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Carrier {
    /// Kind of the tunnel.
    pub(crate) name: &'static str,
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    /// Whether a switch made it as a copy of a frame (ERSPAN), which it may have cut.
    pub(crate) is_mirror: bool,
}

/// Beginning of a header in a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Layer {
    /// Ethernet header in a tunnel.
    Ethernet(usize),
    /// Network layer, behind link headers, tags and labels.
    Network(usize),
    /// IP header.
    Ip(IpLayer),
}

/// IP header in a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IpLayer {
    pub(crate) at: usize,
    /// Beginning of the payload.
    pub(crate) payload: usize,
    /// End of the packet, which may be behind that of the frame.
    pub(crate) end: usize,
    /// Protocol of the payload.
    pub(crate) protocol: u8,
    /// Offset in the packet that it is a fragment of.
    pub(crate) fragment: Option<u16>,
}

impl Layer {
    /// Returns it with offsets in a frame of which it begins at `by`.
    const fn moved(self, by: usize) -> Self {
        match self {
            Self::Ethernet(at) => Self::Ethernet(at + by),
            Self::Network(at) => Self::Network(at + by),
            Self::Ip(ip) => Self::Ip(IpLayer {
                at: ip.at + by,
                payload: ip.payload + by,
                end: ip.end + by,
                ..ip
            }),
        }
    }
}

/// A datagram whose UDP header at least is there, and its fault.
pub(crate) struct Dissected<'a> {
    /// With the payload as far as it goes.
    pub(crate) datagram: Datagram<'a>,
    pub(crate) problem: Option<FrameError>,
    /// Tunnels that it is in, the outermost first.
    pub(crate) carriers: Vec<Carrier>,
}

/// Reason why a frame has no datagram that can be read, and how far it was read.
pub(crate) struct Undissected {
    pub(crate) error: FrameError,
    /// Tunnels before the fault, the outermost first.
    pub(crate) carriers: Vec<Carrier>,
}

/// [`decode`], but a datagram that is cut off or a first fragment is returned with its problem.
pub(crate) fn dissect(link: LinkType, frame: &[u8]) -> Result<Dissected<'_>, Undissected> {
    let mut carriers = vec![];
    match innermost(link, frame, &mut carriers, |_, _| {}) {
        Ok((datagram, problem)) => Ok(Dissected {
            datagram,
            problem,
            carriers,
        }),
        Err(error) => Err(Undissected { error, carriers }),
    }
}

/// Returns the headers of a frame as far as they can be read.
pub(crate) fn layers(link: LinkType, frame: &[u8]) -> Vec<Layer> {
    let mut layers = vec![];
    let _ = innermost(link, frame, &mut vec![], |part, layer| {
        let at = part.as_ptr().addr().checked_sub(frame.as_ptr().addr());
        layers.extend(at.filter(|&at| at <= frame.len()).map(|at| layer.moved(at)));
    });
    layers
}

type Found<'a> = (Datagram<'a>, Option<FrameError>);

/// Finds the innermost datagram. Adds the tunnels on the way, and calls `see` with each header: the part of the frame that it
/// begins, and its layer with offsets in that part.
fn innermost<'a>(
    link: LinkType,
    frame: &'a [u8],
    carriers: &mut Vec<Carrier>,
    mut see: impl FnMut(&[u8], Layer),
) -> Result<Found<'a>, FrameError> {
    let mut layer = link::network_layer(link, frame)?;
    loop {
        see(layer.1, Layer::Network(0));
        let packet = match layer {
            (EtherType::IPV4, bytes) => ipv4(bytes)?,
            (EtherType::IPV6, bytes) => ipv6(bytes)?,
            (EtherType(ETHERTYPE_ROCE_V1), _) => return Err(FrameError::RoceV1),
            (EtherType(other), _) => return Err(FrameError::NotIp(other)),
        };
        see(packet.bytes, Layer::Ip(packet.layer()));
        let carried = match packet.contents()? {
            Contents::Datagram(datagram, problem) => return Ok((datagram, problem)),
            Contents::Tunnel(carried) => carried,
        };
        if carriers.len() == MAX_CARRIERS {
            return Err(FrameError::Tunnel("more than 4 tunnels"));
        }
        carriers.push(Carrier {
            name: carried.name,
            src: packet.src,
            dst: packet.dst,
            is_mirror: carried.is_mirror,
        });
        if let Inner::Ethernet(bytes) = carried.inner {
            see(bytes, Layer::Ethernet(0));
        }
        layer = carried.inner.network_layer()?;
    }
}

/// An IP packet whose headers are there.
struct IpPacket<'a> {
    src: IpAddr,
    dst: IpAddr,
    ip: Ip,
    /// Protocol of the payload.
    protocol: IpNumber,
    bytes: &'a [u8],
    /// Beginning of the payload.
    at: usize,
    /// Length that the header states.
    total: usize,
    fragment: Option<FrameError>,
}

enum Contents<'a> {
    Datagram(Datagram<'a>, Option<FrameError>),
    Tunnel(Carried<'a>),
}

impl<'a> IpPacket<'a> {
    /// Its header, with offsets in the packet.
    const fn layer(&self) -> IpLayer {
        IpLayer {
            at: 0,
            payload: self.at,
            end: self.total,
            protocol: self.protocol.0,
            fragment: match self.fragment {
                Some(FrameError::Fragment { offset, .. }) => Some(offset),
                _ => None,
            },
        }
    }

    /// The payload as far as it goes, without link-layer padding.
    fn payload(&self) -> &'a [u8] {
        let end = self.bytes.len().min(self.total);
        self.bytes.get(self.at..end).unwrap_or_default()
    }

    fn contents(&self) -> Result<Contents<'a>, FrameError> {
        let carried = match self.protocol {
            IpNumber::UDP => return self.udp(),
            IpNumber::GRE => self.unfragmented(tunnel::in_gre(self.payload()))?,
            IpNumber::IPV4 | IpNumber::IPV6 => {
                let ether_type = match self.protocol {
                    IpNumber::IPV4 => EtherType::IPV4,
                    _ => EtherType::IPV6,
                };
                let inner = Inner::Network(ether_type, self.payload());
                self.unfragmented(Ok(Carried::new("IP in IP", inner)))?
            }
            other => return Err(FrameError::NotUdp(other.0)),
        };
        Ok(Contents::Tunnel(carried))
    }

    /// The contents of a tunnel packet, unless it is a fragment: those are not put together.
    fn unfragmented(&self, carried: Result<Carried<'a>, FrameError>) -> Result<Carried<'a>, FrameError> {
        match self.fragment {
            Some(_) => Err(FrameError::Tunnel("a fragment of a tunnel packet")),
            None => carried,
        }
    }

    fn udp(&self) -> Result<Contents<'a>, FrameError> {
        if let Some(fragment @ FrameError::Fragment { offset: 1.., .. }) = &self.fragment {
            return Err(fragment.clone());
        }
        let payload = self.payload();
        need("UDP header", UDP_HEADER_LEN, payload)?;
        let header =
            UdpHeaderSlice::from_slice(payload).map_err(|e| FrameError::Malformed(format!("UDP header: {e}")))?;
        let (port, contents) = (header.destination_port(), &payload[UDP_HEADER_LEN..]);
        if port != ROCE_UDP_PORT
            && let Some(carried) = tunnel::in_udp(port, contents)
        {
            return self.unfragmented(Ok(carried)).map(Contents::Tunnel);
        }
        let (udp_len, room) = (usize::from(header.length()), self.total - self.at);
        let problem = if self.fragment.is_some() {
            self.fragment.clone()
        } else if udp_len != room {
            let text = format!("UDP length {udp_len} in an IP payload of {room} bytes");
            Some(FrameError::Malformed(text))
        } else {
            need("UDP payload", room, payload).err()
        };
        let datagram = Datagram {
            src: SocketAddr::new(self.src, header.source_port()),
            dst: SocketAddr::new(self.dst, port),
            ip: self.ip,
            datagram: &self.bytes[..self.bytes.len().min(self.total)],
            payload: contents,
        };
        Ok(Contents::Datagram(datagram, problem))
    }
}

fn ipv4(bytes: &[u8]) -> Result<IpPacket<'_>, FrameError> {
    need("IPv4 header", 20, bytes)?;
    let header_len = usize::from(bytes[0] & 0x0f) * 4;
    if header_len >= 20 {
        need("IPv4 header", header_len, bytes)?;
    }
    let header = Ipv4HeaderSlice::from_slice(bytes).map_err(|e| FrameError::Malformed(format!("IPv4 header: {e}")))?;
    let total = usize::from(header.total_len());
    if total < header_len {
        let text = format!("IPv4 total length {total} is less than its header's {header_len}");
        return Err(FrameError::Malformed(text));
    }
    let (offset, more) = (header.fragments_offset().byte_offset(), header.more_fragments());
    let ip = Ip::V4 {
        identification: header.identification(),
        dont_fragment: header.dont_fragment(),
        ihl: header.ihl(),
        tos: bytes[1],
        checksum_ok: Sum16BitWords::new().add_slice(header.slice()).ones_complement() == 0,
    };
    Ok(IpPacket {
        src: header.source_addr().into(),
        dst: header.destination_addr().into(),
        ip,
        protocol: header.protocol(),
        bytes,
        at: header_len,
        total,
        fragment: (offset != 0 || more).then_some(FrameError::Fragment { offset, more }),
    })
}

fn ipv6(bytes: &[u8]) -> Result<IpPacket<'_>, FrameError> {
    need("IPv6 header", 40, bytes)?;
    let header = Ipv6HeaderSlice::from_slice(bytes).map_err(|e| FrameError::Malformed(format!("IPv6 header: {e}")))?;
    let mut packet = IpPacket {
        src: header.source_addr().into(),
        dst: header.destination_addr().into(),
        ip: Ip::V6 {
            traffic_class: header.traffic_class(),
        },
        protocol: header.next_header(),
        bytes,
        at: 40,
        total: 40 + usize::from(header.payload_length()),
        fragment: None,
    };
    for _ in 0..MAX_EXTENSIONS {
        if !skip_extension(&mut packet)? {
            break;
        }
    }
    match packet.total.checked_sub(packet.at) {
        Some(_) => Ok(packet),
        None => {
            let text = format!(
                "IPv6 extension headers of {} bytes in a payload of {}",
                packet.at - 40,
                packet.total - 40
            );
            Err(FrameError::Malformed(text))
        }
    }
}

/// Skips the extension header at the beginning of the payload; whether there was one that more may follow.
fn skip_extension(packet: &mut IpPacket<'_>) -> Result<bool, FrameError> {
    const FIXED: usize = 8;
    let (bytes, at) = (packet.bytes, packet.at);
    let len = match packet.protocol {
        IpNumber::IPV6_HEADER_HOP_BY_HOP | IpNumber::IPV6_ROUTE_HEADER | IpNumber::IPV6_DESTINATION_OPTIONS => {
            need("IPv6 extension header", at + FIXED, bytes)?;
            FIXED + usize::from(bytes[at + 1]) * 8
        }
        IpNumber::IPV6_FRAGMENTATION_HEADER => FIXED,
        _ => return Ok(false),
    };
    need("IPv6 extension header", at + len, bytes)?;
    let is_fragment = packet.protocol == IpNumber::IPV6_FRAGMENTATION_HEADER;
    packet.protocol = IpNumber(bytes[at]);
    packet.at += len;
    if !is_fragment {
        return Ok(true);
    }
    let field = u16::from_be_bytes([bytes[at + 2], bytes[at + 3]]);
    let (offset, more) = (field & !7, field & 1 != 0);
    // One fragment that is the whole packet is none (RFC 6946).
    if offset != 0 || more {
        packet.fragment = Some(FrameError::Fragment { offset, more });
    }
    // In a later fragment it is payload.
    Ok(offset == 0)
}
