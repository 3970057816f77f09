//! Next hops of frames: interface and link addresses, from the kernel's tables.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use pnet::datalink::{self, MacAddr};
use roce_verbs::Instant;

use super::frame::LinkHeader;
use crate::{
    iface,
    neighbours::{self, Neighbours},
    sys::{Origin, RoomWatch},
};

/// Time for which a next hop is not looked up again: routes and link addresses change.
const AGE: Duration = Duration::from_secs(1);
/// The most next hops that are remembered; beyond them all are looked up again.
const MOST: usize = 1024;

/// First receiver of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// To this host.
    Here,
    /// Out of an interface, with this header.
    Link(u32, LinkHeader),
    /// To a neighbour whose link address the kernel is finding out.
    Unresolved,
}

/// Finds next hops.
pub(crate) struct Hops {
    neighbours: Neighbours,
    vlan: Option<u16>,
    known: HashMap<(IpAddr, IpAddr), (Instant, Next)>,
    /// Readable when the link address of a neighbour may have been found.
    changed: RoomWatch,
}

impl Hops {
    /// # Errors
    /// When the system has no netlink or no descriptor left.
    pub(crate) fn new(vlan: Option<u16>) -> io::Result<Self> {
        Ok(Self {
            neighbours: Neighbours::new()?,
            vlan,
            known: HashMap::new(),
            changed: RoomWatch::new()?,
        })
    }

    /// Returns the next hop of packets between two addresses.
    ///
    /// # Errors
    /// When there is no route.
    pub(crate) fn next(&mut self, now: Instant, local: IpAddr, remote: IpAddr) -> io::Result<Next> {
        if let Some((since, next)) = self.known.get(&(local, remote))
            && now.saturating_since(*since) < AGE
        {
            return Ok(*next);
        }
        let next = self.look_up(local, remote)?;
        if next != Next::Unresolved {
            if self.known.len() >= MOST {
                self.known.clear();
            }
            self.known.insert((local, remote), (now, next));
        }
        Ok(next)
    }

    fn look_up(&self, local: IpAddr, remote: IpAddr) -> io::Result<Next> {
        if remote.is_multicast() {
            return self.link(iface::index_of(local)?, group_address(remote));
        }
        let remote = match remote {
            IpAddr::V6(v6) if Origin::needs_scope(remote) => {
                SocketAddrV6::new(v6, 0, 0, iface::index_of(local)?).into()
            }
            _ => SocketAddr::new(remote, 0),
        };
        let Some(hop) = self.neighbours.first_hop(local, remote)? else {
            return Ok(Next::Here);
        };
        let known = self.neighbours.link_address(&hop)?;
        if known.is_none_or(|known| known.stale) {
            // The kernel does not see what leaves by a packet socket: it would neither find the address nor confirm it.
            neighbours::solicit(local, remote)?;
        }
        match known {
            Some(known) => self.link(hop.interface, known.bytes.into()),
            None => Ok(Next::Unresolved),
        }
    }

    fn link(&self, index: u32, destination: MacAddr) -> io::Result<Next> {
        let source = link_address(index).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let header = LinkHeader {
            source,
            destination,
            vlan: self.vlan,
        };
        Ok(Next::Link(index, header))
    }

    /// Makes the descriptor readable when the state of a neighbour has changed.
    pub(crate) fn watch_changes(&mut self) {
        if let Err(e) = self.changed.arm_input(self.neighbours.as_fd()) {
            // The next packet that leaves looks again.
            tracing::warn!("epoll_ctl of a netlink socket failed: {e}");
        }
    }

    /// Returns whether the state of a neighbour has changed since the last call. What changes from now on makes the descriptor readable.
    pub(crate) fn take_change(&mut self) -> bool {
        let changed = self.changed.clear();
        if changed {
            self.neighbours.forget_changes();
            self.watch_changes();
        }
        changed
    }

    /// Ends that: the descriptor is not readable until [`watch_changes`](Self::watch_changes).
    pub(crate) fn ignore_changes(&mut self) {
        self.changed.disarm(self.neighbours.as_fd());
    }
}

impl AsFd for Hops {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.changed.as_fd()
    }
}

/// Returns the link address of an interface.
pub(crate) fn link_address(index: u32) -> Option<MacAddr> {
    let mut all = datalink::interfaces().into_iter();
    all.find(|interface| interface.index == index)?.mac
}

/// Returns the link address of a group (RFC 1112 and RFC 2464).
fn group_address(group: IpAddr) -> MacAddr {
    match group {
        IpAddr::V4(v4) => {
            let [_, b, c, d] = v4.octets();
            MacAddr(1, 0, 0x5e, b & 0x7f, c, d)
        }
        IpAddr::V6(v6) => {
            let [.., a, b, c, d] = v6.octets();
            MacAddr(0x33, 0x33, a, b, c, d)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_is_reached_without_a_link() {
        let mut hops = Hops::new(None).unwrap();
        for (local, remote) in [("127.0.0.1", "127.9.8.7"), ("::1", "::1")] {
            let next = hops.next(Instant::ZERO, local.parse().unwrap(), remote.parse().unwrap());
            assert_eq!(next.unwrap(), Next::Here);
        }
    }

    #[test]
    fn groups_have_link_addresses_of_their_own() {
        let of = |group: &str| group_address(group.parse().unwrap()).to_string();
        assert_eq!(of("239.129.2.3"), "01:00:5e:01:02:03");
        assert_eq!(of("ff0e::1:2.3.4.5"), "33:33:02:03:04:05");
    }
}
