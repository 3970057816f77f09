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
    udp::{configure_receiver, new_socket},
};

/// A socket that is bound to a group's address.
struct GroupSocket {
    group: IpAddr,
    socket: Socket,
    /// Interfaces on which it has joined.
    joined: usize,
}

/// All memberships of a datapath. A host's other processes and devices may be members of the same groups.
#[derive(Default)]
pub(crate) struct Groups {
    /// How often a group was joined on an interface.
    counts: BTreeMap<(IpAddr, u32), usize>,
    sockets: Vec<GroupSocket>,
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
        let count = self.counts.entry((group, index)).or_insert(0);
        if *count == 0 {
            let done = match main {
                Some(main) => membership(&SockRef::from(&main), group, index, true),
                None => join_own(&mut self.sockets, group, index, port),
            };
            if let Err(e) = done {
                self.counts.remove(&(group, index));
                return Err(e);
            }
        }
        *count += 1;
        Ok(())
    }

    /// Takes back one join. On an interface that is gone the kernel has ended it already.
    pub(crate) fn leave(&mut self, group: IpAddr, local: IpAddr, main: Option<BorrowedFd<'_>>) {
        let known = iface::index_of(local).ok();
        let key = self
            .counts
            .keys()
            .find(|(g, i)| *g == group && known.is_none_or(|k| k == *i));
        let Some(key) = key.copied() else { return };
        let Some(count) = self.counts.get_mut(&key) else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.counts.remove(&key);
        match self.sockets.iter().position(|s| s.group == group) {
            Some(at) => {
                let own = &mut self.sockets[at];
                own.joined -= 1;
                if own.joined == 0 {
                    self.sockets.remove(at);
                } else {
                    let _ = membership(&SockRef::from(&own.socket), group, key.1, false);
                }
            }
            None => {
                if let Some(main) = main {
                    let _ = membership(&SockRef::from(&main), group, key.1, false);
                }
            }
        }
    }

    /// The groups that have sockets of their own.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = (IpAddr, BorrowedFd<'_>)> {
        self.sockets.iter().map(|s| (s.group, s.socket.as_fd()))
    }
}

fn join_own(sockets: &mut Vec<GroupSocket>, group: IpAddr, index: u32, port: u16) -> io::Result<()> {
    if let Some(own) = sockets.iter_mut().find(|s| s.group == group) {
        membership(&SockRef::from(&own.socket), group, index, true)?;
        own.joined += 1;
        return Ok(());
    }
    let socket = new_socket(group).map_err(io::Error::other)?;
    // Every process that has joined gets a copy of each packet.
    socket.set_reuse_address(true)?;
    configure_receiver(&socket, group, false)?;
    socket.bind(&SocketAddr::new(group, port).into())?;
    membership(&SockRef::from(&socket), group, index, true)?;
    sockets.push(GroupSocket {
        group,
        socket,
        joined: 1,
    });
    Ok(())
}

fn membership(socket: &SockRef<'_>, group: IpAddr, index: u32, on: bool) -> io::Result<()> {
    let interface = InterfaceIndexOrAddress::Index(index);
    match (group, on) {
        (IpAddr::V4(g), true) => socket.join_multicast_v4_n(&g, &interface),
        (IpAddr::V4(g), false) => socket.leave_multicast_v4_n(&g, &interface),
        (IpAddr::V6(g), true) => socket.join_multicast_v6(&g, index),
        (IpAddr::V6(g), false) => socket.leave_multicast_v6(&g, index),
    }
}
