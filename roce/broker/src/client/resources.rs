//! Resources of a member, of which the next broker has to learn.

use std::{collections::HashMap, net::IpAddr, os::fd::OwnedFd, sync::Arc};

use roce_net::OpenSockets;
use roce_port::ConnChange;

use crate::{
    group,
    proto::{Binding, Connection, Reply, Request},
};

/// An address that was opened.
#[derive(Clone)]
pub(super) struct Opened {
    pub(super) addr: IpAddr,
    /// Descriptors for the next broker: the groups' vaults or, when this process has none, its own sockets.
    pub(super) for_next: Vec<Arc<OwnedFd>>,
}

/// Sockets, ports and connections of a member.
#[derive(Default)]
pub(super) struct Resources {
    pub(super) opened: Vec<Opened>,
    /// Sockets that nobody has taken yet: a broker gives a member those of an address once.
    pub(super) given: HashMap<IpAddr, OpenSockets>,
    pub(super) bindings: Vec<Binding>,
    pub(super) established: HashMap<u32, Connection>,
    /// The member uses all parts of its place.
    pub(super) spread: bool,
}

impl Resources {
    /// Records the change of a connection.
    pub(super) fn change(&mut self, change: &ConnChange) {
        let conn = Connection {
            local: change.local,
            remote: change.remote,
            local_id: change.local_id,
            remote_id: change.remote_id,
            remote_qpn: change.remote_qpn.value(),
        };
        match change.established {
            true => self.established.insert(conn.local_id, conn),
            false => self.established.remove(&conn.local_id),
        };
    }

    /// Records what a broker has given.
    pub(super) fn note(&mut self, request: &Request, reply: &Reply, fds: Vec<OwnedFd>) {
        match (request, reply) {
            (Request::Open { addr, .. }, Reply::Opened { addrs, vault }) => self.open(*addr, addrs, *vault, fds),
            (Request::Bind { addr, reuse, .. }, Reply::Bound { service }) => {
                self.bindings.push(Binding::new(*service, *addr, *reuse, true));
            }
            (Request::Listen { service, addr }, Reply::Done) => {
                let ours = |b: &&mut Binding| b.service == *service && b.addr == *addr && !b.listening;
                match self.bindings.iter_mut().find(ours) {
                    Some(binding) => binding.listening = true,
                    None => self.bindings.push(Binding::new(*service, *addr, false, false)),
                }
            }
            _ => {}
        }
    }

    /// Records that a port, or its listener, is given back.
    pub(super) fn release(&mut self, service: u64, addr: Option<IpAddr>, listening: bool) {
        for b in self
            .bindings
            .iter_mut()
            .filter(|b| b.service == service && b.addr == addr)
        {
            if std::mem::take(if listening { &mut b.listening } else { &mut b.bound }) {
                break;
            }
        }
        self.bindings.retain(|b| b.bound || b.listening);
    }

    /// Records the sockets of an address.
    fn open(&mut self, addr: IpAddr, addrs: &[IpAddr], vault: bool, fds: Vec<OwnedFd>) {
        let (mut receivers, mut held) = (Vec::new(), Vec::new());
        let mut fds = fds.into_iter().map(Arc::new);
        while let Some(socket) = fds.next() {
            receivers.push(socket);
            if vault {
                held.extend(fds.next());
            }
        }
        if receivers.is_empty() {
            // One for all addresses, which this process has already, brings what comes to this one.
            let has = |socket: &&Arc<OwnedFd>| group::bound_to(socket).is_some_and(|at| addrs.contains(&at));
            receivers.extend(self.opened.iter().flat_map(|o| &o.for_next).find(has).cloned());
        }
        if receivers.is_empty() {
            return;
        }
        let for_next = if held.is_empty() { &receivers } else { &held }.clone();
        self.opened.push(Opened { addr, for_next });
        self.given.insert(addr, OpenSockets { receivers, held });
    }
}

/// Returns the request that gives back what was given. `None`: that is kept.
pub(super) fn undo(request: &Request, reply: &Reply) -> Option<(u64, Option<IpAddr>, bool)> {
    match (request, reply) {
        (Request::Bind { addr, .. }, Reply::Bound { service }) => Some((*service, *addr, false)),
        (Request::Listen { service, addr }, Reply::Done) => Some((*service, *addr, true)),
        _ => None,
    }
}
