//! Multicast groups: who is a member, and the sockets of devices that are bound to one address.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
};

use socket2::{InterfaceIndexOrAddress, SockRef, Socket};

use crate::{
    iface,
    socket::{configure_receiver, new_socket},
};

/// Membership of a group on an interface.
struct Joined {
    /// How often it was joined.
    count: usize,
    /// By the group's own socket, not by the one for all addresses.
    own: bool,
}

/// All memberships of a datapath. A host's other processes and devices may be members of the same groups.
#[derive(Default)]
pub(crate) struct Groups {
    /// By group and interface.
    joined: BTreeMap<(IpAddr, u32), Joined>,
    /// Sockets that are bound to a group, oldest first.
    sockets: Vec<(IpAddr, Socket)>,
}

impl Groups {
    /// Joins on the interface that has `local`, by the socket `main` if there is one for all addresses.
    pub(crate) fn join(
        &mut self,
        group: IpAddr,
        local: IpAddr,
        main: Option<BorrowedFd<'_>>,
        port: u16,
    ) -> io::Result<()> {
        if !group.is_multicast() || group.is_ipv4() != local.is_ipv4() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let index = iface::index_of(local)?;
        if let Some(joined) = self.joined.get_mut(&(group, index)) {
            joined.count += 1;
            return Ok(());
        }
        let own = match main.map(|main| membership(&main, group, index, true)) {
            None => self.join_own(group, index, port, false).map(|()| true)?,
            // A socket is in so many groups and no more (`net.ipv4.igmp_max_memberships`: 20).
            Some(Err(e)) if FULL.contains(&e.raw_os_error()) => {
                self.join_own(group, index, port, true).map(|()| true).map_err(|_| e)?
            }
            Some(done) => done.map(|()| false)?,
        };
        self.joined.insert((group, index), Joined { count: 1, own });
        Ok(())
    }

    /// Joins by a socket that is bound to the group, `beside` one that is bound to all addresses.
    fn join_own(&mut self, group: IpAddr, index: u32, port: u16, beside: bool) -> io::Result<()> {
        if let Some((_, socket)) = self.sockets.iter().find(|(g, _)| *g == group) {
            return membership(socket, group, index, true);
        }
        let socket = new_socket(group).map_err(io::Error::other)?;
        // Every process that has joined gets a copy of each packet.
        socket.set_reuse_address(true)?;
        // Sockets for all addresses let those of the same user be bound beside them in this way only.
        socket.set_reuse_port(beside)?;
        configure_receiver(&socket, group)?;
        socket.bind(&SocketAddr::new(group, port).into())?;
        membership(&socket, group, index, true)?;
        self.sockets.push((group, socket));
        Ok(())
    }

    /// Takes back one join. On an interface that is gone the kernel has ended it already.
    pub(crate) fn leave(&mut self, group: IpAddr, local: IpAddr, main: Option<BorrowedFd<'_>>) {
        let known = iface::index_of(local).ok();
        let mut all = self.joined.iter_mut();
        let found = all.find(|((g, i), _)| *g == group && known.is_none_or(|k| k == *i));
        let Some((&(_, index), joined)) = found else { return };
        joined.count -= 1;
        if joined.count > 0 {
            return;
        }
        let own = joined.own;
        self.joined.remove(&(group, index));
        if own && !self.joined.iter().any(|((g, _), joined)| *g == group && joined.own) {
            return self.sockets.retain(|(g, _)| *g != group);
        }
        let by_own = self.sockets().find(|(g, _)| own && *g == group);
        if let Some(socket) = by_own.map(|(_, socket)| socket).or(main) {
            let _ = membership(&socket, group, index, false);
        }
    }

    /// The groups that were joined.
    pub(crate) fn all(&self) -> impl Iterator<Item = IpAddr> {
        self.joined.keys().map(|(group, _)| *group)
    }

    /// The groups that have sockets of their own.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = (IpAddr, BorrowedFd<'_>)> {
        self.sockets.iter().map(|(group, socket)| (*group, socket.as_fd()))
    }
}

/// Errors of a socket that is in as many groups as it may be.
const FULL: [Option<i32>; 2] = [Some(libc::ENOBUFS), Some(libc::ENOMEM)];

fn membership(socket: &impl AsFd, group: IpAddr, index: u32, on: bool) -> io::Result<()> {
    let socket = SockRef::from(socket);
    let interface = InterfaceIndexOrAddress::Index(index);
    match (group, on) {
        (IpAddr::V4(g), true) => socket.join_multicast_v4_n(&g, &interface),
        (IpAddr::V4(g), false) => socket.leave_multicast_v4_n(&g, &interface),
        (IpAddr::V6(g), true) => socket.join_multicast_v6(&g, index),
        (IpAddr::V6(g), false) => socket.leave_multicast_v6(&g, index),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use socket2::{Domain, Protocol, Type};

    use super::*;

    #[test]
    fn groups_that_one_socket_does_not_take_get_sockets_of_their_own() {
        const GROUPS: usize = 40;
        let main = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).unwrap();
        main.set_reuse_port(true).unwrap();
        main.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into()).unwrap();
        let port = main.local_addr().unwrap().as_socket().unwrap().port();
        let most = std::fs::read_to_string("/proc/sys/net/ipv4/igmp_max_memberships").unwrap();
        let most: usize = most.trim().parse().unwrap();
        let local = IpAddr::from(Ipv4Addr::LOCALHOST);
        let group = |n: usize| IpAddr::from(Ipv4Addr::new(239, 77, 9, n as u8));
        let mut groups = Groups::default();
        for n in 0..GROUPS {
            groups.join(group(n), local, Some(main.as_fd()), port).unwrap();
            groups.join(group(n), local, Some(main.as_fd()), port).unwrap();
        }
        assert_eq!(groups.sockets().count(), GROUPS.saturating_sub(most));

        let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        SockRef::from(&sender)
            .set_multicast_if_v4(&Ipv4Addr::LOCALHOST)
            .unwrap();
        sender.send_to(b"last", (group(GROUPS - 1), port)).unwrap();
        if let Some((own, socket)) = groups.sockets.last() {
            assert_eq!(*own, group(GROUPS - 1));
            socket.set_nonblocking(false).unwrap();
            let mut buffer = [std::mem::MaybeUninit::uninit(); 8];
            assert_eq!(socket.recv(&mut buffer).unwrap(), 4);
        }

        for n in 0..GROUPS {
            groups.leave(group(n), local, Some(main.as_fd()));
        }
        assert_eq!(groups.sockets().count(), GROUPS.saturating_sub(most));
        for n in 0..GROUPS {
            groups.leave(group(n), local, Some(main.as_fd()));
        }
        assert_eq!((groups.sockets().count(), groups.joined.len()), (0, 0));
        groups.join(group(0), local, Some(main.as_fd()), port).unwrap();
        assert_eq!(groups.sockets().count(), 0);
    }
}
