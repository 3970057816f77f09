//! Addresses that attacks may be aimed at.

use std::{fs, io, net::IpAddr};

/// Which addresses packets may go to and, being answered, may come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aim {
    anywhere: bool,
}

impl Aim {
    /// Loopback addresses only.
    pub const LOOPBACK: Self = Self { anywhere: false };

    /// Any address, because this process is in a network namespace that somebody made for it: not that of all the
    /// processes above it, up to process 1.
    ///
    /// # Errors
    /// When it is in theirs, or that can't be told.
    pub fn in_namespace() -> io::Result<Self> {
        let ours = fs::read_link("/proc/self/ns/net")?;
        let mut pid = std::process::id();
        while let Some(parent) = parent_of(pid) {
            // A process that must not be looked at says nothing.
            if fs::read_link(format!("/proc/{parent}/ns/net")).is_ok_and(|theirs| theirs != ours) {
                return Ok(Self { anywhere: true });
            }
            pid = parent;
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "this is the host's network namespace: make another one (unshare -n)",
        ))
    }

    /// Checks an address.
    ///
    /// # Errors
    /// When packets must not go there.
    pub fn check(self, addr: IpAddr) -> io::Result<()> {
        if self.anywhere || addr.to_canonical().is_loopback() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{addr} is no loopback address: forged packets don't leave this host"),
        ))
    }
}

/// The process that a process was started by; process 1 has none.
fn parent_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("PPid:"))?;
    line.trim().parse().ok().filter(|parent| *parent != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_allowed_on_the_hosts_network() {
        for addr in ["127.0.0.1", "127.255.3.4", "::1", "::ffff:127.0.0.1"] {
            assert!(Aim::LOOPBACK.check(addr.parse().unwrap()).is_ok(), "{addr}");
        }
        for addr in ["10.77.0.1", "0.0.0.0", "::", "fd77::1", "192.0.2.1", "::ffff:192.0.2.1"] {
            assert!(Aim::LOOPBACK.check(addr.parse().unwrap()).is_err(), "{addr}");
        }
    }

    #[test]
    fn the_hosts_namespace_is_refused() {
        // Whoever runs tests in a namespace has made one.
        let ours = fs::read_link("/proc/self/ns/net").unwrap();
        let mut above = std::iter::successors(parent_of(std::process::id()), |p| parent_of(*p));
        let made = above.any(|p| fs::read_link(format!("/proc/{p}/ns/net")).is_ok_and(|n| n != ours));
        assert_eq!(Aim::in_namespace().is_ok(), made);
    }
}
