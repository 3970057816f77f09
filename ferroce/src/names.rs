//! Hosts of options: addresses, and names that the system's resolver turns into addresses.
//!
//! Reading an option checks only how it is written. Names are resolved when a command or a task starts, in its own thread and once: the
//! resolver may block for as long as `resolv.conf` says (5 s for each server and attempt by default).

use std::{
    collections::BTreeMap,
    fmt, io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    str::FromStr,
};

use parking_lot::Mutex;
use roce::iface;
use rtrs::addr::{AddrError, EndAddr, PathAddr, split};

use crate::output::Failure;

/// Longest host name in DNS, bytes.
const MAX_NAME: usize = 253;

/// A host: an address, or a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Host {
    /// An address; its port is not used.
    Addr(EndAddr),
    /// A name to be resolved.
    Name(String),
}

/// A host, optionally with a port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Endpoint {
    pub(crate) host: Host,
    /// The port, if one is named.
    pub(crate) port: Option<u16>,
}

/// A path of RTRS: destination, optionally with a port, and optionally a source without one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Path {
    src: Option<Host>,
    dst: Endpoint,
}

/// Number of the interface of this name.
fn interface(name: &str) -> Option<u32> {
    nix::net::if_::if_nametoindex(name).ok()
}

/// Whether a text is written as host names are. One whose last label is a number would be an address.
fn is_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        (1..=63).contains(&label.len()) && !label.starts_with('-') && label.bytes().all(plain)
    };
    let last = name.rsplit('.').next().unwrap_or_default();
    name.len() <= MAX_NAME && name.split('.').all(is_label) && !last.bytes().all(|b| b.is_ascii_digit())
}

impl FromStr for Endpoint {
    type Err = String;

    /// Reads `HOST` or `HOST:PORT`; an IPv6 address with a port is in brackets.
    fn from_str(text: &str) -> Result<Self, String> {
        match EndAddr::parse(text, &interface) {
            Ok(addr) => {
                return Ok(Self {
                    port: addr.port,
                    host: Host::Addr(addr),
                });
            }
            Err(AddrError::Invalid(_)) => {}
            Err(e) => return Err(e.to_string()),
        }
        let bare = text.strip_prefix("ip:").unwrap_or(text);
        let (name, port) = match bare.split_once(':') {
            Some((name, port)) => (name, port.parse().ok().map(Some)),
            None => (bare, Some(None)),
        };
        match port {
            Some(port) if is_name(name) => Ok(Self {
                host: Host::Name(name.to_owned()),
                port,
            }),
            _ => Err(format!(
                "{text:?} is neither an IP address nor a host name (write 192.0.2.7, [2001:db8::7] or store.example, each with :PORT if \
                 need be)"
            )),
        }
    }
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse()? {
            Endpoint { host, port: None } => Ok(host),
            _ => Err(format!("{text:?}: there is no port here")),
        }
    }
}

impl FromStr for Path {
    type Err = String;

    /// Reads `[SRC,]DST` or `[SRC@]DST`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (src, dst) = split(text);
        let src = match src.map(Endpoint::from_str).transpose()? {
            Some(Endpoint { port: Some(_), .. }) => return Err(AddrError::SourcePort(text.into()).to_string()),
            src => src.map(|src| src.host),
        };
        let dst: Endpoint = dst.parse()?;
        if let (Some(Host::Addr(src)), Host::Addr(dst)) = (&src, &dst.host)
            && src.ip.is_ipv4() != dst.ip.is_ipv4()
        {
            return Err(AddrError::Family(text.into()).to_string());
        }
        Ok(Self { src, dst })
    }
}

impl From<Endpoint> for Path {
    fn from(dst: Endpoint) -> Self {
        Self { src: None, dst }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Addr(addr) => addr.ip.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl Endpoint {
    /// The endpoint as text, with its port or this one.
    pub(crate) fn with_port(&self, port: u16) -> String {
        match &self.host {
            Host::Addr(addr) => addr.socket(port).to_string(),
            Host::Name(name) => format!("{name}:{}", self.port.unwrap_or(port)),
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(src) = &self.src {
            write!(f, "{src},")?;
        }
        self.dst.host.fmt(f)
    }
}

/// Preference among the addresses of a name of this host: one that others reach before link-local ones and loopback.
fn rank(addr: IpAddr) -> u8 {
    match addr {
        addr if addr.is_loopback() => 2,
        IpAddr::V6(addr) if addr.is_unicast_link_local() => 1,
        IpAddr::V4(addr) if addr.is_link_local() => 1,
        _ => 0,
    }
}

fn look_up(name: &str) -> io::Result<Vec<SocketAddr>> {
    let mut found = Vec::new();
    for addr in (name, 0).to_socket_addrs()? {
        if !found.contains(&addr) {
            found.push(addr);
        }
    }
    match found.is_empty() {
        true => Err(io::Error::other("it has no address")),
        false => Ok(found),
    }
}

/// Resolves names, each once: it keeps its addresses for as long as the command or task runs.
#[derive(Default)]
pub(crate) struct Resolver(Mutex<BTreeMap<String, Vec<SocketAddr>>>);

impl Resolver {
    /// All addresses of a host, the preferred first. Blocks while a name is resolved.
    fn all(&self, host: &Host, port: u16) -> Result<Vec<SocketAddr>, Failure> {
        let name = match host {
            Host::Addr(addr) => return Ok(vec![EndAddr { port: None, ..*addr }.socket(port)]),
            Host::Name(name) => name,
        };
        let known = self.0.lock().get(name).cloned();
        let mut found = match known {
            Some(known) => known,
            None => {
                // Without the lock, as it may take long.
                let found = look_up(name).map_err(|e| {
                    let why = e.to_string();
                    let why = why
                        .strip_prefix("failed to lookup address information: ")
                        .unwrap_or(&why);
                    Failure::failed(format!(
                        "can't resolve {name}: {why} (`getent hosts {name}` shows what this host knows of it)"
                    ))
                })?;
                tracing::info!("{name} is {found:?}");
                self.0.lock().entry(name.clone()).or_insert(found).clone()
            }
        };
        found.iter_mut().for_each(|addr| addr.set_port(port));
        Ok(found)
    }

    /// The addresses of this host that an endpoint stands for, to listen at: of a name, those that others reach if it has such.
    ///
    /// # Errors
    /// When a name can't be resolved, or has no address of this host.
    pub(crate) fn own(&self, endpoint: &Endpoint, port: u16) -> Result<Vec<SocketAddr>, Failure> {
        self.own_host(&endpoint.host, endpoint.port.unwrap_or(port))
    }

    fn own_host(&self, host: &Host, port: u16) -> Result<Vec<SocketAddr>, Failure> {
        let mut found = self.all(host, port)?;
        let Host::Name(name) = host else {
            return Ok(found);
        };
        let all: Vec<String> = found.iter().map(|addr| addr.ip().to_string()).collect();
        found.retain(|addr| iface::interface_of(addr.ip()).is_ok());
        let Some(best) = found.iter().map(|addr| rank(addr.ip())).min() else {
            return Err(Failure::failed(format!(
                "{name} is {}, not an address of this host (`ip addr` lists them)",
                all.join(" and ")
            )));
        };
        found.retain(|addr| rank(addr.ip()) == best);
        if found[0].ip().is_loopback() && name != "localhost" {
            tracing::warn!("{name} is {} here: only this host reaches it", found[0].ip());
        }
        Ok(found)
    }

    /// The address of this host that a host option stands for: the first.
    ///
    /// # Errors
    /// As [`own`](Self::own).
    pub(crate) fn own_addr(&self, host: &Host) -> Result<IpAddr, Failure> {
        Ok(self.own_host(host, 0)?[0].ip())
    }

    /// The first address of a peer.
    ///
    /// # Errors
    /// When a name can't be resolved.
    pub(crate) fn peer(&self, host: &Host) -> Result<IpAddr, Failure> {
        Ok(self.all(host, 0)?[0].ip())
    }

    /// The addresses of a path. Its source is the path's own, or the one of `ours` with the IP version of the destination, or is left
    /// to the routing table. Of a name with several addresses the first one that fits is taken.
    ///
    /// # Errors
    /// When a name can't be resolved, or source and destination differ in IP version.
    pub(crate) fn path(&self, path: &Path, port: u16, ours: &[IpAddr]) -> Result<PathAddr, Failure> {
        let dsts = self.all(&path.dst.host, path.dst.port.unwrap_or(port))?;
        let srcs = match &path.src {
            Some(Host::Addr(addr)) => vec![addr.ip],
            Some(name) => self.own_host(name, 0)?.iter().map(SocketAddr::ip).collect(),
            None => ours.to_vec(),
        };
        let fitting = |dst: &SocketAddr| srcs.iter().copied().find(|src| src.is_ipv4() == dst.is_ipv4());
        let found = dsts.iter().find_map(|dst| Some((fitting(dst)?, *dst)));
        match (found, &path.src) {
            (Some((src, dst)), _) => Ok(PathAddr { src: Some(src), dst }),
            (None, Some(_)) => Err(Failure::usage(AddrError::Family(path.to_string()).to_string())),
            (None, None) => Ok(PathAddr::to(dsts[0])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(text: &str) -> Result<String, String> {
        Ok(text.parse::<Endpoint>()?.with_port(7))
    }

    #[test]
    fn hosts_are_addresses_or_names_with_or_without_a_port() {
        for (text, is) in [
            ("192.0.2.1", "192.0.2.1:7"),
            ("192.0.2.1:9", "192.0.2.1:9"),
            ("192.0.2.1:0", "192.0.2.1:0"),
            ("ip:192.0.2.1", "192.0.2.1:7"),
            ("2001:db8::1", "[2001:db8::1]:7"),
            ("[2001:db8::1]", "[2001:db8::1]:7"),
            ("[2001:db8::1]:9", "[2001:db8::1]:9"),
            ("store", "store:7"),
            ("ip:store", "store:7"),
            ("store-1.example.:9", "store-1.example.:9"),
            ("1and1.example", "1and1.example:7"),
        ] {
            assert_eq!(endpoint(text).as_deref(), Ok(is), "{text}");
        }
        for wrong in [
            "",
            ":9",
            "store:",
            "store:70000",
            "store:x",
            "-store",
            "a..b",
            "a b",
            "a/b",
            "/run/nbd.sock",
            "192.0.2",
            "192.0.2.300",
            "[::1",
            "ip:1234",
            &"a".repeat(64),
        ] {
            let e = endpoint(wrong).unwrap_err();
            assert!(e.contains("neither an IP address nor a host name"), "{wrong}: {e}");
        }
        assert!(endpoint("gid:fe80::1").unwrap_err().contains("InfiniBand"));
        assert!(endpoint("fe80::1%no-such-if").unwrap_err().contains("no-such-if"));
        assert!("store:9".parse::<Host>().unwrap_err().contains("no port"));
        let SocketAddr::V6(lo) = Resolver::default().all(&"fe80::1%lo".parse().unwrap(), 7).unwrap()[0] else {
            panic!("IPv6")
        };
        assert!(lo.scope_id() > 0);
    }

    #[test]
    fn paths_have_names_on_either_side() {
        for text in ["store", "store:9", "192.0.2.1,store", "ip:us@ip:store", "us,192.0.2.7"] {
            assert!(text.parse::<Path>().is_ok(), "{text}");
        }
        for (wrong, word) in [
            ("us:5,store", "no port"),
            ("192.0.2.1,::1", "both"),
            ("a b,store", "neither"),
            ("us,", "neither"),
        ] {
            let e = wrong.parse::<Path>().unwrap_err();
            assert!(e.contains(word), "{wrong}: {e}");
        }
    }

    /// A resolver that has resolved these names.
    fn known(known: &[(&str, &[&str])]) -> Resolver {
        let addr = |addr: &&str| SocketAddr::new(addr.parse().unwrap(), 0);
        let entry = |(name, addrs): &(&str, &[&str])| ((*name).to_owned(), addrs.iter().map(addr).collect());
        Resolver(Mutex::new(known.iter().map(entry).collect()))
    }

    #[test]
    fn source_and_destination_have_one_ip_version() {
        let resolver = known(&[
            ("both", &["2001:db8::7", "192.0.2.7"]),
            ("v6", &["2001:db8::7"]),
            ("localhost", &["127.0.0.1"]),
        ]);
        let path = |text: &str, ours: &[&str]| {
            let ours: Vec<IpAddr> = ours.iter().map(|addr| addr.parse().unwrap()).collect();
            let path = resolver.path(&text.parse().unwrap(), 1234, &ours);
            path.map(|path| (path.src.map(|src| src.to_string()), path.dst.to_string()))
        };
        for (text, ours, src, dst) in [
            ("both", &[][..], None, "[2001:db8::7]:1234"),
            ("both:9", &["192.0.2.1"], Some("192.0.2.1"), "192.0.2.7:9"),
            (
                "both",
                &["192.0.2.1", "2001:db8::1"],
                Some("2001:db8::1"),
                "[2001:db8::7]:1234",
            ),
            ("192.0.2.5,both", &["2001:db8::1"], Some("192.0.2.5"), "192.0.2.7:1234"),
            ("localhost,both", &[], Some("127.0.0.1"), "192.0.2.7:1234"),
            ("v6", &["192.0.2.1"], None, "[2001:db8::7]:1234"),
        ] {
            let src = src.map(str::to_owned);
            assert_eq!(path(text, ours).unwrap(), (src, dst.to_owned()), "{text}");
        }
        let e = path("192.0.2.1,v6", &[]).unwrap_err();
        assert!(e.text().unwrap().contains("must both be IPv4 or both IPv6"), "{e:?}");
    }

    #[test]
    fn a_name_of_this_host_has_an_address_of_it() {
        let resolver = known(&[
            ("elsewhere", &["192.0.2.7", "2001:db8::7"]),
            ("mixed", &["192.0.2.7", "127.0.0.3"]),
        ]);
        let own = |text: &str| {
            let own = resolver.own(&text.parse().unwrap(), 1234)?;
            Ok::<_, Failure>(own.iter().map(SocketAddr::to_string).collect::<Vec<_>>())
        };
        assert_eq!(own("mixed").unwrap(), ["127.0.0.3:1234"]);
        let e = own("elsewhere").unwrap_err();
        let said = "elsewhere is 192.0.2.7 and 2001:db8::7, not an address of this host";
        assert!(e.text().unwrap().contains(said), "{e:?}");
        // Whoever names an address may mean one that the host will have.
        assert_eq!(own("192.0.2.7").unwrap(), ["192.0.2.7:1234"]);
    }
}
