//! Addresses of the program (`struct sockaddr_in`, `struct sockaddr_in6`), with the errors that the kernel's calls have for each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use libc::{c_void, sockaddr, socklen_t};
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes};

use super::user;
use crate::ret::{Errno, Result};

/// `sizeof(struct sockaddr_in)`, `sizeof(struct sockaddr_in6)`.
pub(crate) const V4_LEN: usize = 16;
pub(crate) const V6_LEN: usize = 28;
const INET: u16 = libc::AF_INET as u16;
const INET6: u16 = libc::AF_INET6 as u16;

/// The longer of both structures; the shorter one has the IPv4 address where this has the flow label.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct RawName {
    family: u16,
    port: [u8; 2],
    v4: [u8; 4],
    v6: [u8; 16],
    scope: u32,
}

/// Bytes of a name that the program has passed.
pub(crate) struct Name {
    raw: RawName,
    len: usize,
}

/// Address with a family that RDS knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Parsed {
    V4(Ipv4Addr, u16),
    /// Not a mapped IPv4 address.
    V6(Ipv6Addr, u16, u32),
    /// Fewer bytes than its family has.
    Short,
    /// Another family.
    Other,
}

impl Parsed {
    /// The address.
    pub(crate) fn addr(self) -> Option<SocketAddr> {
        match self {
            Self::V4(ip, port) => Some((ip, port).into()),
            Self::V6(ip, port, scope) => Some(SocketAddrV6::new(ip, port, 0, scope).into()),
            Self::Short | Self::Other => None,
        }
    }
}

impl Name {
    /// Reads a name of the program's.
    pub(crate) fn read(from: *const sockaddr, len: socklen_t) -> Result<Self> {
        let len = usize::try_from(len.cast_signed()).map_err(|_| Errno::INVAL)?;
        if len > size_of::<libc::sockaddr_storage>() {
            return Err(Errno::INVAL);
        }
        let mut raw = RawName::new_zeroed();
        let from: *const c_void = from.cast();
        // As many as there are.
        match len {
            0 => {}
            1..V4_LEN => {
                let bytes = raw.as_mut_bytes();
                for (at, byte) in bytes[..len].iter_mut().enumerate() {
                    *byte = user::read(from.wrapping_byte_add(at))?;
                }
            }
            V4_LEN..V6_LEN => {
                let bytes: [u8; V4_LEN] = user::read(from)?;
                raw.as_mut_bytes()[..V4_LEN].copy_from_slice(&bytes);
            }
            _ => raw = user::read(from)?,
        }
        Ok(Self { raw, len })
    }

    /// The name of a message, in memory that the program has made sure of.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    pub(crate) unsafe fn of_message(from: *const c_void, len: usize) -> Self {
        let mut raw = RawName::new_zeroed();
        let bytes = raw.as_mut_bytes();
        let here = len.min(bytes.len());
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.cast(), bytes.as_mut_ptr(), here) };
        Self { raw, len }
    }

    /// Bytes that the program says it has.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address.
    pub(crate) fn parse(&self) -> Parsed {
        let port = u16::from_be_bytes(self.raw.port);
        match self.raw.family {
            INET if self.len < V4_LEN => Parsed::Short,
            INET => Parsed::V4(self.raw.v4.into(), port),
            INET6 if self.len < V6_LEN => Parsed::Short,
            INET6 => self.as_v6(),
            _ => Parsed::Other,
        }
    }

    /// As an IPv4 address, whatever the family.
    pub(crate) fn as_v4(&self) -> Parsed {
        Parsed::V4(self.raw.v4.into(), u16::from_be_bytes(self.raw.port))
    }

    /// As an IPv6 address, whatever the family.
    pub(crate) fn as_v6(&self) -> Parsed {
        let (ip, port) = (Ipv6Addr::from(self.raw.v6), u16::from_be_bytes(self.raw.port));
        match ip.to_ipv4_mapped() {
            Some(v4) => Parsed::V4(v4, port),
            None => Parsed::V6(ip, port, self.raw.scope),
        }
    }
}

/// Whether an IPv4 address is none of a host's.
pub(crate) fn is_no_host(ip: Ipv4Addr) -> bool {
    ip.is_unspecified() || ip.is_broadcast() || ip.is_multicast()
}

/// Whether an IPv6 address is none of a host's.
pub(crate) fn is_no_host_v6(ip: Ipv6Addr) -> bool {
    ip.is_unspecified() || ip.is_multicast()
}

/// Whether an address is of one link.
pub(crate) fn is_link_local(ip: Ipv6Addr) -> bool {
    ip.is_unicast_link_local()
}

/// Name as the program gets it.
pub(crate) struct Named {
    raw: RawName,
    len: usize,
}

impl Named {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        let (family, v4, v6, scope, len) = match addr {
            SocketAddr::V4(a) => (INET, a.ip().octets(), [0; 16], 0, V4_LEN),
            SocketAddr::V6(a) => (INET6, [0; 4], a.ip().octets(), a.scope_id(), V6_LEN),
        };
        let port = addr.port().to_be_bytes();
        Self {
            raw: RawName {
                family,
                port,
                v4,
                v6,
                scope,
            },
            len,
        }
    }

    /// No address, of the family of another one, if there is one.
    pub(crate) fn none(like: Option<SocketAddr>) -> Self {
        let ip = match like {
            Some(SocketAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        };
        let mut named = Self::new((ip, 0).into());
        if like.is_none() {
            named.raw.family = libc::AF_UNSPEC as u16;
        }
        named
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.raw.as_bytes()[..self.len]
    }

    /// Gives the program the name, as far as it has room for it, and its length.
    ///
    /// # Safety
    /// The program expects a name there.
    pub(crate) unsafe fn write(&self, to: *mut sockaddr, len: *mut socklen_t) -> Result<()> {
        let room = user::read::<i32>(len.cast())?;
        let room = usize::try_from(room).map_err(|_| Errno::INVAL)?;
        let bytes = self.bytes();
        // SAFETY: the caller's promise.
        unsafe {
            user::write(to.cast(), &bytes[..room.min(bytes.len())])?;
            user::write_value(len.cast(), bytes.len() as u32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(addr: &str) -> Parsed {
        let named = Named::new(addr.parse().unwrap());
        let bytes = named.bytes();
        Name::read(bytes.as_ptr().cast(), bytes.len() as u32).unwrap().parse()
    }

    #[test]
    fn addresses_come_back() {
        for addr in ["192.0.2.1:7", "[2001:db8::1]:65535", "[fe80::1%3]:0"] {
            assert_eq!(parsed(addr).addr(), Some(addr.parse().unwrap()));
        }
        assert_eq!(parsed("[::ffff:192.0.2.1]:7"), Parsed::V4([192, 0, 2, 1].into(), 7));
    }

    #[test]
    fn short_ones_and_others_are_told_apart() {
        let named = Named::new("192.0.2.1:7".parse().unwrap());
        let at = |len| Name::read(named.bytes().as_ptr().cast(), len).map(|name| name.parse());
        assert_eq!(at(15), Ok(Parsed::Short));
        assert_eq!(at(1), Ok(Parsed::Short));
        assert_eq!(at(0), Ok(Parsed::Other));
        assert_eq!(at(u32::MAX), Err(Errno::INVAL));
        assert_eq!(at(129), Err(Errno::INVAL));
        assert_eq!(
            Name::read(std::ptr::without_provenance(8), 16).map(|n| n.len()),
            Err(Errno::FAULT)
        );
        assert_eq!(Named::none(None).bytes(), [0; 16]);
        assert_eq!(
            Named::none(Some("[::1]:1".parse().unwrap())).bytes()[..2],
            INET6.to_ne_bytes()
        );
    }
}
