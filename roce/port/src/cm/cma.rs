//! RDMA_CM's additions to communication management (IBA Annex A11; `cma.c`): IP addresses in the private data, and service IDs made
//! from port numbers.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Bytes of the header (`struct cma_hdr`).
pub const HEADER_LEN: usize = 36;

/// Port spaces (`enum rdma_ucm_port_space`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum PortSpace {
    /// Datagrams of an IPoIB interface's partition.
    Ipoib = 0x0002,
    /// Reliable connections.
    Tcp = 0x0106,
    /// Datagrams.
    Udp = 0x0111,
    /// Queue pairs of any type.
    Ib = 0x013f,
}

impl PortSpace {
    /// All.
    pub const ALL: [Self; 4] = [Self::Ipoib, Self::Tcp, Self::Udp, Self::Ib];

    /// Returns the port space with this number (`enum rdma_ucm_port_space`).
    pub fn from_number(n: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|s| *s as u16 == n)
    }

    /// Returns whether its services are resolved to queue pairs that take datagrams, and not connected to.
    pub const fn is_datagram(self) -> bool {
        matches!(self, Self::Udp | Self::Ipoib)
    }
}

/// Service ID: the addressee of a REQ (IBA 12.7.3).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ServiceId(pub u64);

impl ServiceId {
    /// Creates the service ID of a port (`rdma_get_service_id`).
    pub const fn new(space: PortSpace, port: u16) -> Self {
        Self(((space as u64) << 16) | port as u64)
    }

    /// Returns the port space, if it is one of RDMA_CM's.
    pub fn space(self) -> Option<PortSpace> {
        PortSpace::from_number(u16::try_from(self.0 >> 16).ok()?)
    }

    /// Returns the port, if the service ID is of this port space.
    pub const fn port(self, space: PortSpace) -> Option<u16> {
        if self.0 >> 16 == space as u64 {
            Some(self.0 as u16)
        } else {
            None
        }
    }
}

/// Header that a REQ's or SIDR_REQ's private data starts with (`struct cma_hdr`): version 0, IP version, port, two
/// 16-byte addresses (an IPv4 address in the last four bytes).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CmaHeader {
    /// The sender's port.
    pub port: u16,
    /// The sender's address.
    pub src: IpAddr,
    /// The receiver's address. Both have the family of `src`; another one is written as unspecified.
    pub dst: IpAddr,
}

impl CmaHeader {
    /// Creates the header of a request from one address to another.
    pub(crate) const fn new(local: SocketAddr, remote: SocketAddr) -> Self {
        Self {
            port: local.port(),
            src: local.ip(),
            dst: remote.ip(),
        }
    }

    /// Returns whether the header names these addresses.
    pub(crate) fn names(&self, src: IpAddr, dst: IpAddr) -> bool {
        (self.src.to_canonical(), self.dst.to_canonical()) == (src, dst)
    }

    /// Parses the first 36 bytes of private data. `None`: they are no header of version 0 with IPv4 or IPv6 addresses.
    pub fn parse(data: &[u8]) -> Option<Self> {
        let head: &[u8; HEADER_LEN] = data.first_chunk()?;
        let words = |at: usize| -> [u8; 16] { std::array::from_fn(|i| head[at + i]) };
        let address = |at: usize| -> Option<IpAddr> {
            let [.., a, b, c, d] = words(at);
            match head[1] >> 4 {
                4 => Some(Ipv4Addr::new(a, b, c, d).into()),
                6 => Some(Ipv6Addr::from(words(at)).into()),
                _ => None,
            }
        };
        Some(Self {
            port: u16::from_be_bytes([head[2], head[3]]),
            src: address(4)?,
            dst: address(20)?,
        })
        .filter(|_| head[0] == 0)
    }

    /// Returns the bytes.
    pub fn emit(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[1] = if self.src.is_ipv4() { 4 << 4 } else { 6 << 4 };
        out[2..4].copy_from_slice(&self.port.to_be_bytes());
        for (at, ip) in [(4, self.src), (20, self.dst)] {
            match ip {
                IpAddr::V4(v4) if self.src.is_ipv4() => out[at + 12..at + 16].copy_from_slice(&v4.octets()),
                IpAddr::V6(v6) if self.src.is_ipv6() => out[at..at + 16].copy_from_slice(&v6.octets()),
                _ => {}
            }
        }
        out
    }
}

/// Returns the flow label that rdma_cm gives a RoCEv2 path (`cma_get_roce_udp_flow_label`): 20 bits from both ports.
pub const fn flow_label(src_port: u16, dst_port: u16) -> u32 {
    (src_port as u32 * 31 + dst_port as u32) & 0x000f_ffff
}
