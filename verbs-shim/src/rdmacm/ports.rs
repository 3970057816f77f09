//! Port numbers of this process: which id has bound which (`cma_get_port` and below). What other processes listen on shows
//! when one listens.

use std::{collections::HashMap, net::IpAddr, ops::RangeInclusive, sync::OnceLock};

use super::{Errno, Result, addr::Addr};

/// Ports below this are the superuser's (`PROT_SOCK`).
const UNPRIVILEGED: u16 = 1024;

/// An id with a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) id: u32,
    pub(crate) local: Addr,
    pub(crate) remote: Addr,
    /// Shares the port with others that do.
    pub(crate) reuse: bool,
    /// Leaves the other IP version's port to others.
    pub(crate) afonly: bool,
}

/// The ports in use, by port space.
#[derive(Default)]
pub(crate) struct Ports {
    owners: HashMap<(u16, u16), Vec<Owner>>,
}

/// Returns the range that the system takes ephemeral ports from.
fn ephemeral() -> RangeInclusive<u16> {
    static RANGE: OnceLock<(u16, u16)> = OnceLock::new();
    let (low, high) = *RANGE.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let mut numbers = text.split_whitespace().filter_map(|n| n.parse::<u16>().ok());
        match (numbers.next(), numbers.next()) {
            (Some(low), Some(high)) if low > 0 && low <= high => (low, high),
            _ => (32_768, 60_999),
        }
    });
    low..=high
}

/// Returns a number that can't be guessed.
pub(crate) fn random() -> u32 {
    let mut bytes = [0u8; 4];
    // SAFETY: writes at most four bytes into a local.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), 4, 0) };
    if got != 4 {
        tracing::warn!("the system has no random numbers");
    }
    u32::from_ne_bytes(bytes)
}

fn both_set(a: u16, b: u16) -> bool {
    a != 0 && b != 0
}

impl Owner {
    /// The addresses of the port, as [`roce_port::cm::ListenArgs::addr`] has them.
    pub(crate) fn scope(&self) -> Option<IpAddr> {
        let ip = self.local.ip()?.ip();
        Some(ip).filter(|ip| !ip.is_unspecified() || self.afonly)
    }

    /// Whether two may have one ephemeral port: something of their addresses differs (`cma_port_is_unique`).
    fn differs(&self, other: &Self) -> bool {
        let hosts = |a: &Addr, b: &Addr| !a.is_any() && !b.is_any() && !a.same_host(b);
        (both_set(self.remote.port(), other.remote.port()) && self.remote.port() != other.remote.port())
            || hosts(&self.local, &other.local)
            || hosts(&self.remote, &other.remote)
    }

    /// Checks whether `self` may share the port with `other` (`cma_check_port`).
    fn check_beside(&self, other: &Self, reuse: bool) -> Result<()> {
        if (reuse && other.reuse) || (self.afonly && other.afonly && !self.local.same_family(&other.local)) {
            return Ok(());
        }
        if self.local.is_any() || other.local.is_any() {
            return Err(Errno(libc::EADDRNOTAVAIL).because("another id of this process has the port, at every address"));
        }
        match self.local.same_host(&other.local) {
            true => Err(Errno(libc::EADDRINUSE).because("another id of this process has the address and port")),
            false => Ok(()),
        }
    }
}

impl Ports {
    /// Gives an id the port of its local address, or an ephemeral one if that is 0. Returns the port.
    ///
    /// # Errors
    /// EADDRINUSE or EADDRNOTAVAIL when others have it, EACCES when it is the superuser's.
    pub(crate) fn bind(&mut self, space: u16, owner: Owner) -> Result<u16> {
        let port = match owner.local.port() {
            0 => self.pick(space, &owner)?,
            port => {
                if port < UNPRIVILEGED && !rustix::process::geteuid().is_root() {
                    return Err(Errno(libc::EACCES).because("ports below 1024 are the superuser's"));
                }
                self.check(space, port, &owner, owner.reuse)?;
                port
            }
        };
        let local = owner.local.with_port(port);
        let owners = self.owners.entry((space, port)).or_default();
        owners.push(Owner { local, ..owner });
        Ok(port)
    }

    fn pick(&self, space: u16, owner: &Owner) -> Result<u16> {
        let range = ephemeral();
        let (low, count) = (u32::from(*range.start()), u32::from(range.end() - range.start()) + 1);
        let start = random() % count;
        (0..count)
            .map(|i| (low + (start + i) % count) as u16)
            .find(|port| {
                let others = self.owners.get(&(space, *port)).map_or(&[][..], Vec::as_slice);
                others.iter().all(|o| owner.differs(o))
            })
            .ok_or_else(|| Errno(libc::EADDRNOTAVAIL).because("no ephemeral port is free"))
    }

    fn check(&self, space: u16, port: u16, owner: &Owner, reuse: bool) -> Result<()> {
        let others = self.owners.get(&(space, port)).map_or(&[][..], Vec::as_slice);
        others
            .iter()
            .filter(|o| o.id != owner.id)
            .try_for_each(|o| owner.check_beside(o, reuse))
    }

    /// An id that shares its port is about to listen: from now on the port is its own.
    ///
    /// # Errors
    /// Like [`Ports::bind`], when it is still shared.
    pub(crate) fn claim(&mut self, space: u16, port: u16, id: u32) -> Result<()> {
        let Some(owner) = self.owner(space, port, id) else {
            return Ok(());
        };
        if owner.reuse {
            self.check(space, port, &owner, false)?;
            self.update(space, port, id, |o| o.reuse = false);
        }
        Ok(())
    }

    /// Returns the owner by which an id has a port.
    pub(crate) fn owner(&self, space: u16, port: u16, id: u32) -> Option<Owner> {
        self.owners.get(&(space, port))?.iter().find(|o| o.id == id).copied()
    }

    /// Changes what is known of an owner.
    pub(crate) fn update(&mut self, space: u16, port: u16, id: u32, change: impl FnOnce(&mut Owner)) {
        let owners = self.owners.get_mut(&(space, port));
        if let Some(owner) = owners.and_then(|all| all.iter_mut().find(|o| o.id == id)) {
            change(owner);
        }
    }

    /// Takes an id's port back.
    pub(crate) fn release(&mut self, space: u16, port: u16, id: u32) {
        let Some(owners) = self.owners.get_mut(&(space, port)) else {
            return;
        };
        owners.retain(|o| o.id != id);
        if owners.is_empty() {
            self.owners.remove(&(space, port));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: u16 = 0x0106;

    fn owner(id: u32, local: &str) -> Owner {
        let local = Addr::Ip(local.parse().unwrap());
        Owner {
            id,
            local,
            remote: local.any_like(),
            reuse: false,
            afonly: true,
        }
    }

    #[test]
    fn a_port_has_one_owner_per_address() {
        let mut ports = Ports::default();
        assert_eq!(ports.bind(SPACE, owner(1, "127.0.0.1:7471")), Ok(7471));
        assert_eq!(
            ports.bind(SPACE, owner(2, "127.0.0.1:7471")),
            Err(Errno(libc::EADDRINUSE))
        );
        assert_eq!(
            ports.bind(SPACE, owner(2, "0.0.0.0:7471")),
            Err(Errno(libc::EADDRNOTAVAIL))
        );
        assert_eq!(ports.bind(SPACE, owner(2, "127.0.0.2:7471")), Ok(7471));
        assert_eq!(
            ports.bind(0x0111, owner(3, "127.0.0.1:7471")),
            Ok(7471),
            "another port space"
        );
        assert_eq!(
            ports.bind(SPACE, owner(4, "[::1]:7471")),
            Ok(7471),
            "another IP version"
        );
        ports.release(SPACE, 7471, 1);
        assert_eq!(ports.bind(SPACE, owner(5, "127.0.0.1:7471")), Ok(7471));
    }

    #[test]
    fn who_shares_a_port_may_not_listen_on_it() {
        let mut ports = Ports::default();
        let shared = |id| Owner {
            reuse: true,
            ..owner(id, "127.0.0.1:7471")
        };
        assert_eq!(ports.bind(SPACE, shared(1)), Ok(7471));
        assert_eq!(ports.bind(SPACE, shared(2)), Ok(7471));
        assert_eq!(ports.claim(SPACE, 7471, 1), Err(Errno(libc::EADDRINUSE)));
        ports.release(SPACE, 7471, 2);
        assert_eq!(ports.claim(SPACE, 7471, 1), Ok(()));
        assert_eq!(ports.bind(SPACE, shared(3)), Err(Errno(libc::EADDRINUSE)));
    }

    #[test]
    fn ephemeral_ports_are_different_ones() {
        let mut ports = Ports::default();
        let mut seen = std::collections::HashSet::new();
        for id in 0..1000 {
            let port = ports.bind(SPACE, owner(id, "127.0.0.1:0")).unwrap();
            assert!(ephemeral().contains(&port));
            assert!(seen.insert(port), "port {port} given twice");
        }
    }
}
