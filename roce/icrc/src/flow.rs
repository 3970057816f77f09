//! Flow of packets: addresses and ports, which their ICRCs cover.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// IP addresses of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum IpPair {
    /// IPv4.
    V4 {
        /// Sender.
        src: Ipv4Addr,
        /// Receiver.
        dst: Ipv4Addr,
    },
    /// IPv6.
    V6 {
        /// Sender.
        src: Ipv6Addr,
        /// Receiver.
        dst: Ipv6Addr,
    },
}

/// Error: one address is IPv4 and the other IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MixedFamilies;

impl core::fmt::Display for MixedFamilies {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("source and destination are of different IP versions")
    }
}

impl core::error::Error for MixedFamilies {}

impl TryFrom<(IpAddr, IpAddr)> for IpPair {
    type Error = MixedFamilies;

    /// Takes source and destination. IPv4-mapped IPv6 addresses (as in GIDs) count as IPv4, which is on the wire.
    fn try_from((src, dst): (IpAddr, IpAddr)) -> Result<Self, MixedFamilies> {
        match (src.to_canonical(), dst.to_canonical()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Ok(Self::V4 { src, dst }),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Ok(Self::V6 { src, dst }),
            _ => Err(MixedFamilies),
        }
    }
}

impl IpPair {
    /// Returns the sender.
    pub const fn src(self) -> IpAddr {
        match self {
            Self::V4 { src, .. } => IpAddr::V4(src),
            Self::V6 { src, .. } => IpAddr::V6(src),
        }
    }

    /// Returns the receiver.
    pub const fn dst(self) -> IpAddr {
        match self {
            Self::V4 { dst, .. } => IpAddr::V4(dst),
            Self::V6 { dst, .. } => IpAddr::V6(dst),
        }
    }
}

/// Result of [`Flow::recover`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Recovery {
    /// The ICRC is right with this Identification only. IPv6 has none: returns the hint.
    Exact(u16),
    /// The ICRC is right with no Identification.
    Corrupt,
}

/// Header fields outside the UDP payload that the ICRC covers, without the Identification.
///
/// Assumes IPv4 headers of 20 bytes, unfragmented, with DF set, as RoCEv2 prescribes (IBTA A17.4.5.2) and a UDP socket
/// sends with `IP_PMTUDISC_PROBE`. [`crate::check_datagram`] takes the header as it came instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Flow {
    /// Addresses.
    pub ip: IpPair,
    /// UDP source port.
    pub src_port: u16,
    /// UDP destination port.
    pub dst_port: u16,
}

impl TryFrom<(SocketAddr, SocketAddr)> for Flow {
    type Error = MixedFamilies;

    /// Takes sender and receiver.
    fn try_from((src, dst): (SocketAddr, SocketAddr)) -> Result<Self, MixedFamilies> {
        Ok(Self {
            ip: (src.ip(), dst.ip()).try_into()?,
            src_port: src.port(),
            dst_port: dst.port(),
        })
    }
}

impl Flow {
    /// Returns the sender's address and port.
    pub const fn src(&self) -> SocketAddr {
        SocketAddr::new(self.ip.src(), self.src_port)
    }

    /// Returns the receiver's address and port.
    pub const fn dst(&self) -> SocketAddr {
        SocketAddr::new(self.ip.dst(), self.dst_port)
    }
}
