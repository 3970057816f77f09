//! Addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::error::ProtocolError;

const NONE: u16 = 0;
const INET: u16 = 2;
const INET6: u16 = 10;

/// An address and port as bytes, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawAddr {
    family: u16,
    port: u16,
    scope: u32,
    ip: [u8; 16],
}

impl From<Option<SocketAddr>> for RawAddr {
    fn from(addr: Option<SocketAddr>) -> Self {
        let Some(addr) = addr else { return Self::default() };
        let mut raw = Self {
            port: addr.port(),
            ..Self::default()
        };
        match addr {
            SocketAddr::V4(v4) => {
                raw.family = INET;
                raw.ip[..4].copy_from_slice(&v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                raw.family = INET6;
                raw.scope = v6.scope_id();
                raw.ip = v6.ip().octets();
            }
        }
        raw
    }
}

impl RawAddr {
    /// The address; `None` when there is none.
    ///
    /// # Errors
    /// [`ProtocolError::Family`].
    pub fn get(self) -> Result<Option<SocketAddr>, ProtocolError> {
        let [a, b, c, d, ..] = self.ip;
        match self.family {
            NONE => Ok(None),
            INET => Ok(Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::new(a, b, c, d)), self.port))),
            INET6 => {
                let ip = Ipv6Addr::from(self.ip);
                Ok(Some(SocketAddrV6::new(ip, self.port, 0, self.scope).into()))
            }
            other => Err(ProtocolError::Family(other)),
        }
    }

    /// The address, which has to be there.
    ///
    /// # Errors
    /// [`ProtocolError::Family`], [`ProtocolError::NoAddress`].
    pub fn required(self) -> Result<SocketAddr, ProtocolError> {
        self.get()?.ok_or(ProtocolError::NoAddress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back() {
        let all = ["192.0.2.1:7", "[2001:db8::1]:65535", "[fe80::1%3]:0"];
        for addr in all.map(|text| text.parse::<SocketAddr>().unwrap()) {
            assert_eq!(RawAddr::from(Some(addr)).get(), Ok(Some(addr)));
        }
        assert_eq!(RawAddr::from(None).get(), Ok(None));
        assert_eq!(RawAddr::default().required(), Err(ProtocolError::NoAddress));
        let unix = RawAddr {
            family: 1,
            ..RawAddr::default()
        };
        assert_eq!(unix.get(), Err(ProtocolError::Family(1)));
    }
}
