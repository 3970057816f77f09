//! Socket addresses in commands and answers.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use super::{
    Errno,
    abi::{SOCKADDR_IN6, STORAGE},
};

/// `AF_IB`, the family of InfiniBand addresses.
pub(crate) const AF_IB: u16 = 27;
/// `struct sockaddr_ib`.
pub(crate) const SOCKADDR_IB: usize = 48;

const SIZE_IN: usize = 16;

/// A `sockaddr_ib`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct IbAddr {
    pub(crate) pkey: u16,
    pub(crate) gid: [u8; 16],
    pub(crate) sid: u64,
    pub(crate) sid_mask: u64,
}

/// An address that a command names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Addr {
    /// IPv4 or IPv6.
    Ip(SocketAddr),
    /// InfiniBand.
    Ib(IbAddr),
}

fn chunk<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Errno> {
    bytes
        .get(at..)
        .and_then(|b| b.first_chunk::<N>())
        .copied()
        .ok_or(Errno::INVAL)
}

/// The family; 0 is none.
pub(crate) fn family(bytes: &[u8]) -> u16 {
    bytes.first_chunk::<2>().map_or(0, |b| u16::from_ne_bytes(*b))
}

impl Addr {
    /// Reads a `sockaddr_in`, `sockaddr_in6` or `sockaddr_ib`.
    ///
    /// # Errors
    /// EINVAL for other families and when bytes are missing.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Errno> {
        match i32::from(family(bytes)) {
            libc::AF_INET => {
                let port = u16::from_be_bytes(chunk(bytes, 2)?);
                let ip = Ipv4Addr::from(chunk::<4>(bytes, 4)?);
                Ok(Self::Ip(SocketAddrV4::new(ip, port).into()))
            }
            libc::AF_INET6 => {
                let port = u16::from_be_bytes(chunk(bytes, 2)?);
                let flow = u32::from_be_bytes(chunk(bytes, 4)?);
                let ip = Ipv6Addr::from(chunk::<16>(bytes, 8)?);
                let scope = u32::from_ne_bytes(chunk(bytes, 24)?);
                Ok(Self::Ip(SocketAddrV6::new(ip, port, flow, scope).into()))
            }
            f if f == i32::from(AF_IB) => Ok(Self::Ib(IbAddr {
                pkey: u16::from_be_bytes(chunk(bytes, 2)?),
                gid: chunk(bytes, 8)?,
                sid: u64::from_be_bytes(chunk(bytes, 24)?),
                sid_mask: u64::from_be_bytes(chunk(bytes, 32)?),
            })),
            _ => Err(Errno::INVAL),
        }
    }

    /// Like [`Addr::parse`], for a command that states the size, which must be the family's.
    pub(crate) fn parse_sized(bytes: &[u8], size: u16) -> Result<Self, Errno> {
        let addr = Self::parse(bytes)?;
        match addr.size() == usize::from(size) {
            true => Ok(addr),
            false => Err(Errno::INVAL),
        }
    }

    /// Bytes of the C structure.
    pub(crate) const fn size(&self) -> usize {
        match self {
            Self::Ip(SocketAddr::V4(_)) => SIZE_IN,
            Self::Ip(SocketAddr::V6(_)) => SOCKADDR_IN6,
            Self::Ib(_) => SOCKADDR_IB,
        }
    }

    /// The C structure, in a `sockaddr_storage`.
    pub(crate) fn emit(&self) -> [u8; STORAGE] {
        let mut out = [0; STORAGE];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        match self {
            Self::Ip(SocketAddr::V4(a)) => {
                put(0, &(libc::AF_INET as u16).to_ne_bytes());
                put(2, &a.port().to_be_bytes());
                put(4, &a.ip().octets());
            }
            Self::Ip(SocketAddr::V6(a)) => {
                put(0, &(libc::AF_INET6 as u16).to_ne_bytes());
                put(2, &a.port().to_be_bytes());
                put(4, &a.flowinfo().to_be_bytes());
                put(8, &a.ip().octets());
                put(24, &a.scope_id().to_ne_bytes());
            }
            Self::Ib(a) => {
                put(0, &AF_IB.to_ne_bytes());
                put(2, &a.pkey.to_be_bytes());
                put(8, &a.gid);
                put(24, &a.sid.to_be_bytes());
                put(32, &a.sid_mask.to_be_bytes());
            }
        }
        out
    }

    /// The C structure in the 28 bytes of the older answers (InfiniBand addresses are cut).
    pub(crate) fn emit_in6(&self) -> [u8; SOCKADDR_IN6] {
        let all = self.emit();
        core::array::from_fn(|i| all[i])
    }

    /// The IP address and port.
    pub(crate) const fn ip(&self) -> Option<SocketAddr> {
        match self {
            Self::Ip(a) => Some(*a),
            Self::Ib(_) => None,
        }
    }

    /// Whether it names no particular host.
    pub(crate) fn is_any(&self) -> bool {
        match self {
            Self::Ip(a) => a.ip().is_unspecified(),
            Self::Ib(a) => a.gid == [0; 16],
        }
    }

    /// The port; of an InfiniBand address the part of the service ID that its mask covers.
    pub(crate) fn port(&self) -> u16 {
        match self {
            Self::Ip(a) => a.port(),
            Self::Ib(a) => (a.sid & a.sid_mask) as u16,
        }
    }

    /// The same address with another port.
    pub(crate) fn with_port(mut self, port: u16) -> Self {
        match &mut self {
            Self::Ip(a) => a.set_port(port),
            Self::Ib(a) => {
                a.sid = (a.sid & !0xffff) | u64::from(port);
                a.sid_mask |= 0xffff;
            }
        }
        self
    }

    /// The unspecified address of the same family, port 0.
    pub(crate) fn any_like(&self) -> Self {
        match self {
            Self::Ip(SocketAddr::V4(_)) => Self::Ip((Ipv4Addr::UNSPECIFIED, 0).into()),
            Self::Ip(SocketAddr::V6(_)) => Self::Ip((Ipv6Addr::UNSPECIFIED, 0).into()),
            Self::Ib(_) => Self::Ib(IbAddr::default()),
        }
    }

    /// The same port at no particular host.
    pub(crate) fn at_any(&self) -> Self {
        self.any_like().with_port(self.port())
    }

    /// Whether both are of one family.
    pub(crate) fn same_family(&self, other: &Self) -> bool {
        self.size() == other.size()
    }

    /// Whether both name the same host.
    pub(crate) fn same_host(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Ip(a), Self::Ip(b)) => a.ip() == b.ip(),
            (Self::Ib(a), Self::Ib(b)) => a.gid == b.gid,
            _ => false,
        }
    }

    /// The GID that stands for it (`rdma_ip2gid`).
    pub(crate) fn gid(&self) -> [u8; 16] {
        match self {
            Self::Ip(a) => gid(a.ip()),
            Self::Ib(a) => a.gid,
        }
    }
}

/// The GID of an address: IPv4 addresses are mapped into IPv6 (`rdma_ip2gid`).
pub(crate) fn gid(ip: IpAddr) -> [u8; 16] {
    roce::gids::gid_of(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were() {
        for text in ["10.1.2.3:7471", "[fe80::1%3]:7471", "[::]:0", "0.0.0.0:65535"] {
            let addr = Addr::Ip(text.parse().unwrap());
            assert_eq!(Addr::parse(&addr.emit()), Ok(addr), "{text}");
            assert_eq!(Addr::parse(&addr.emit_in6()), Ok(addr), "{text}");
            assert!(Addr::parse_sized(&addr.emit(), addr.size() as u16).is_ok());
            assert!(Addr::parse_sized(&addr.emit(), addr.size() as u16 + 1).is_err());
        }
        let ib = Addr::Ib(IbAddr {
            pkey: 0xffff,
            gid: [7; 16],
            sid: 0x0106_1d2f,
            sid_mask: u64::MAX,
        });
        assert_eq!(Addr::parse(&ib.emit()), Ok(ib));
        assert_eq!((ib.size(), ib.port()), (48, 0x1d2f));
    }

    #[test]
    fn broken_addresses_are_refused() {
        assert_eq!(Addr::parse(&[]), Err(Errno::INVAL));
        assert_eq!(Addr::parse(&[0; 128]), Err(Errno::INVAL));
        let v6 = Addr::Ip("[::1]:1".parse().unwrap()).emit();
        assert_eq!(Addr::parse(&v6[..27]), Err(Errno::INVAL));
        assert!(Addr::parse(&v6[..28]).is_ok());
    }

    #[test]
    fn gids_are_mapped() {
        let v4 = gid("1.2.3.4".parse().unwrap());
        assert_eq!(v4[10..], [0xff, 0xff, 1, 2, 3, 4]);
        assert_eq!(v4[..10], [0; 10]);
    }
}
