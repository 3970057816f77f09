//! Path addresses, in the kernel's form and in plain form, and address ranges for access lists.
//!
//! The kernel writes a path as `src,dst` or `src@dst` or only `dst`, each `ip:` and an address (`rtrs_addr_to_sockaddr`);
//! the port is an option of the whole session there. Here `ip:` may be left out, and the destination may bring a port:
//! `1.2.3.4:1234`, `[fe80::1]:1234`. A link-local address may name its interface: `fe80::1%eth0`; which number that is, the
//! caller knows.

use core::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    str::FromStr,
};

/// Why a text is no address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddrError {
    /// `gid:` addresses need native InfiniBand.
    #[error("{0:?}: InfiniBand addresses (gid:) are not possible on RoCE, use ip:")]
    Gid(String),
    /// No address.
    #[error("{0:?} is not an IP address (write 1.2.3.4, [fe80::1], ip:1.2.3.4, each with :port if need be)")]
    Invalid(String),
    /// No such interface.
    #[error("{0:?}: no such network interface")]
    Interface(String),
    /// A port where none may be.
    #[error("{0:?}: the source address has no port")]
    SourcePort(String),
    /// IPv4 on one side, IPv6 on the other.
    #[error("{0:?}: source and destination must both be IPv4 or both IPv6")]
    Family(String),
    /// No range.
    #[error("{0:?} is not an address range (write 10.0.0.0/8, fe80::/10 or a single address)")]
    Range(String),
}

/// The number of the network interface of a name; `None`: there is none.
pub type Interfaces<'a> = &'a dyn Fn(&str) -> Option<u32>;

/// One end of a path: an address, optionally with a port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EndAddr {
    /// The address.
    pub ip: IpAddr,
    /// Number of the interface of a link-local IPv6 address; 0: none is named.
    pub scope: u32,
    /// The port, if one is named.
    pub port: Option<u16>,
}

impl EndAddr {
    /// Reads `ADDR` or `ADDR:PORT`; an IPv6 address with a port is in brackets, and `ip:` may precede it.
    ///
    /// # Errors
    /// When it is not an address, or of an interface that does not exist.
    pub fn parse(text: &str, interfaces: Interfaces<'_>) -> Result<Self, AddrError> {
        if text.starts_with("gid:") {
            return Err(AddrError::Gid(text.into()));
        }
        let bare = text.strip_prefix("ip:").unwrap_or(text);
        let invalid = || AddrError::Invalid(text.into());
        if let Some(rest) = bare.strip_prefix('[') {
            let (inner, tail) = rest.split_once(']').ok_or_else(invalid)?;
            let (v6, scope) = parse_v6(inner, text, interfaces)?;
            let port = match tail.strip_prefix(':') {
                Some(p) => Some(p.parse().map_err(|_| invalid())?),
                None if tail.is_empty() => None,
                None => return Err(invalid()),
            };
            let ip = v6.into();
            return Ok(Self { ip, scope, port });
        }
        let v4 = |ip: Ipv4Addr, port| Self {
            ip: ip.into(),
            scope: 0,
            port,
        };
        if let Ok(ip) = bare.parse::<Ipv4Addr>() {
            return Ok(v4(ip, None));
        }
        if let Ok(addr) = bare.parse::<SocketAddrV4>() {
            return Ok(v4(*addr.ip(), Some(addr.port())));
        }
        let (v6, scope) = parse_v6(bare, text, interfaces)?;
        let (ip, port) = (v6.into(), None);
        Ok(Self { ip, scope, port })
    }

    /// The address with its port, or this one where it names none.
    pub fn socket(&self, port: u16) -> SocketAddr {
        let port = self.port.unwrap_or(port);
        match self.ip {
            IpAddr::V4(ip) => SocketAddrV4::new(ip, port).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, self.scope).into(),
        }
    }
}

fn parse_v6(addr: &str, whole: &str, interfaces: Interfaces<'_>) -> Result<(Ipv6Addr, u32), AddrError> {
    let (ip, zone) = addr.split_once('%').map_or((addr, None), |(ip, zone)| (ip, Some(zone)));
    let ip = ip.parse().map_err(|_| AddrError::Invalid(whole.into()))?;
    let scope = match zone {
        None => 0,
        Some(zone) => {
            let number = zone.parse().ok().or_else(|| interfaces(zone));
            number.ok_or_else(|| AddrError::Interface(zone.into()))?
        }
    };
    Ok((ip, scope))
}

/// Splits a path into source, if it names one, and destination.
pub fn split(path: &str) -> (Option<&str>, &str) {
    match path.split_once([',', '@']) {
        Some((src, dst)) => (Some(src), dst),
        None => (None, path),
    }
}

/// Source and destination of a path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PathAddr {
    /// Our address; `None` leaves it to the routing table.
    pub src: Option<IpAddr>,
    /// The server.
    pub dst: SocketAddr,
}

impl PathAddr {
    /// A path to `dst` from the address that the routing table gives.
    pub const fn to(dst: SocketAddr) -> Self {
        Self { src: None, dst }
    }

    /// Reads `[SRC,]DST` or `[SRC@]DST`; `port` is used when the destination names none.
    ///
    /// # Errors
    /// Says which part is wrong.
    pub fn parse(text: &str, port: u16, interfaces: Interfaces<'_>) -> Result<Self, AddrError> {
        let (src, dst) = split(text);
        let src = match src.map(|src| EndAddr::parse(src, interfaces)).transpose()? {
            Some(EndAddr { port: Some(_), .. }) => return Err(AddrError::SourcePort(text.into())),
            src => src.map(|src| src.ip),
        };
        let dst = EndAddr::parse(dst, interfaces)?.socket(port);
        if src.is_some_and(|s| s.is_ipv4() != dst.is_ipv4()) {
            return Err(AddrError::Family(text.into()));
        }
        Ok(Self { src, dst })
    }
}

impl FromStr for PathAddr {
    type Err = AddrError;

    /// With the default port, [`DEFAULT_PORT`](crate::proto::DEFAULT_PORT), and interfaces by number only.
    fn from_str(s: &str) -> Result<Self, AddrError> {
        Self::parse(s, crate::proto::DEFAULT_PORT, &|_| None)
    }
}

impl fmt::Display for PathAddr {
    /// The kernel's form, without the port: `ip:1.2.3.4@ip:1.2.3.5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(src) = self.src {
            write!(f, "ip:{src}@")?;
        }
        write!(f, "ip:{}", self.dst.ip())
    }
}

/// A range of addresses, `10.0.0.0/8`. An IPv4 range also holds those addresses mapped into IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cidr {
    addr: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// The range of `prefix` bits, at most 32 for IPv4 and 128 for IPv6.
    pub fn new(addr: IpAddr, prefix: u8) -> Option<Self> {
        let max = if addr.is_ipv4() { 32 } else { 128 };
        (prefix <= max).then_some(Self { addr, prefix })
    }

    /// Whether the range holds the address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.addr, ip.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
                (a.to_bits() ^ b.to_bits()) & mask == 0
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
                (a.to_bits() ^ b.to_bits()) & mask == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Cidr {
    type Err = AddrError;

    fn from_str(s: &str) -> Result<Self, AddrError> {
        let range = || AddrError::Range(s.into());
        let (addr, prefix) = s.split_once('/').map_or((s, None), |(a, p)| (a, Some(p)));
        let addr: IpAddr = addr.parse().map_err(|_| range())?;
        let full = if addr.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(full), |p| p.parse().map_err(|_| range()))?;
        Self::new(addr, prefix).ok_or_else(range)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(s: &str) -> PathAddr {
        s.parse().expect(s)
    }

    #[test]
    fn kernel_and_plain_forms_mean_the_same() {
        let want = PathAddr {
            src: Some("10.0.0.1".parse().unwrap()),
            dst: "10.0.0.2:1234".parse().unwrap(),
        };
        for s in [
            "ip:10.0.0.1,ip:10.0.0.2",
            "ip:10.0.0.1@ip:10.0.0.2",
            "10.0.0.1,10.0.0.2",
            "10.0.0.1,ip:10.0.0.2:1234",
        ] {
            assert_eq!(path(s), want, "{s}");
        }
        assert_eq!(want.to_string(), "ip:10.0.0.1@ip:10.0.0.2");
        assert_eq!(path(&want.to_string()), want);
    }

    #[test]
    fn ipv6_with_and_without_port_and_scope() {
        assert_eq!(path("ip:fe80::1").dst, "[fe80::1]:1234".parse().unwrap());
        assert_eq!(path("ip:[fe80::1]").dst, "[fe80::1]:1234".parse().unwrap());
        assert_eq!(path("[fe80::1]:99").dst, "[fe80::1]:99".parse().unwrap());
        assert_eq!(path("ip:fe80::1%7").dst, "[fe80::1%7]:1234".parse().unwrap());
        assert_eq!(path("::1,::2").src, Some("::1".parse().unwrap()));
        // A bare IPv6 address has no port: the last group is part of it.
        assert_eq!(path("fe80::1:1234").dst, "[fe80::1:1234]:1234".parse().unwrap());
        let interfaces = |name: &str| (name == "eth0").then_some(3);
        let named = PathAddr::parse("fe80::1%eth0", 5, &interfaces).unwrap().dst;
        assert_eq!(named, "[fe80::1%3]:5".parse().unwrap());
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(matches!("gid:fe80::1".parse::<PathAddr>(), Err(AddrError::Gid(_))));
        assert!(matches!("host.example".parse::<PathAddr>(), Err(AddrError::Invalid(_))));
        assert!(matches!("".parse::<PathAddr>(), Err(AddrError::Invalid(_))));
        assert!(matches!("[::1".parse::<PathAddr>(), Err(AddrError::Invalid(_))));
        assert!(matches!("[::1]x".parse::<PathAddr>(), Err(AddrError::Invalid(_))));
        assert!(matches!(
            "1.2.3.4:70000".parse::<PathAddr>(),
            Err(AddrError::Invalid(_))
        ));
        assert!(matches!(
            "1.2.3.4:5,1.2.3.5".parse::<PathAddr>(),
            Err(AddrError::SourcePort(_))
        ));
        assert!(matches!("1.2.3.4,::1".parse::<PathAddr>(), Err(AddrError::Family(_))));
        assert!(matches!(
            "fe80::1%no-such-if".parse::<PathAddr>(),
            Err(AddrError::Interface(_))
        ));
    }

    #[test]
    fn ranges() {
        let holds = |range: &str, ip: &str| range.parse::<Cidr>().unwrap().contains(ip.parse().unwrap());
        assert!(holds("10.0.0.0/8", "10.255.1.2"));
        assert!(!holds("10.0.0.0/8", "11.0.0.1"));
        assert!(holds("10.1.2.3", "10.1.2.3") && !holds("10.1.2.3", "10.1.2.2"));
        assert!(holds("0.0.0.0/0", "255.1.2.3") && !holds("0.0.0.0/0", "::1"));
        assert!(holds("10.0.0.0/8", "::ffff:10.1.1.1"));
        assert!(holds("fe80::/10", "febf::1") && !holds("fe80::/10", "fec0::1"));
        assert!(holds("::/0", "fe80::1"));
        for bad in ["10.0.0.0/33", "::/129", "10.0.0/8", "10.0.0.0/", "x"] {
            assert!(bad.parse::<Cidr>().is_err(), "{bad}");
        }
    }
}
