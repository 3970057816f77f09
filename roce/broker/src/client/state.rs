//! State of a member at its broker, which the next broker gets.

use std::{collections::HashMap, net::IpAddr, os::fd::OwnedFd, sync::Arc};

use roce_net::OpenSockets;

use crate::{
    group,
    proto::{Binding, Reply, Request},
    wire::Record,
};

/// Requests that are given up while the broker lives and does not answer; of more it keeps what it gives.
pub(super) const MAX_GIVEN_UP: usize = 1024;

/// An address that was opened.
pub(super) struct Opened {
    pub(super) addr: IpAddr,
    /// Descriptors for the next broker: the groups' vaults or, when this process has none, its own sockets.
    pub(super) for_next: Vec<Arc<OwnedFd>>,
}

#[derive(Default)]
pub(super) struct State {
    /// The connection; `None` while there is none.
    pub(super) link: Option<Arc<OwnedFd>>,
    /// Counts connections: answers of a former one don't come any more.
    pub(super) epoch: u64,
    pub(super) seq: u64,
    /// Requests that somebody waits for the answers of.
    pub(super) awaited: HashMap<u64, Request>,
    pub(super) replies: HashMap<u64, Record<Reply>>,
    /// Requests that nobody waits for any more, whose answers must be undone.
    pub(super) given_up: HashMap<u64, Request>,
    pub(super) opened: Vec<Opened>,
    /// Sockets that nobody has taken yet: a broker gives a member those of an address once.
    pub(super) given: HashMap<IpAddr, OpenSockets>,
    pub(super) bindings: Vec<Binding>,
    /// The next broker is being told of `bindings` as they were: what is given back meanwhile it is told when that is done.
    pub(super) restoring: bool,
    pub(super) closing: bool,
}

impl State {
    /// A broker has given sockets of an address. The next one will be told.
    pub(super) fn open(&mut self, addr: IpAddr, reply: &Reply, fds: Vec<OwnedFd>) {
        let Reply::Opened { vault, addrs } = reply else { return };
        let (mut receivers, mut held) = (Vec::new(), Vec::new());
        let mut fds = fds.into_iter().map(Arc::new);
        while let Some(socket) = fds.next() {
            receivers.push(socket);
            if *vault {
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

    /// Nobody waits for the answer to a request any more.
    pub(super) fn give_up(&mut self, seq: u64) {
        if let Some(request) = self.awaited.remove(&seq)
            && self.given_up.len() < MAX_GIVEN_UP
        {
            self.given_up.insert(seq, request);
        }
    }

    /// Writes down what a broker has done.
    pub(super) fn note(&mut self, request: &Request, reply: &Reply) {
        match (request, reply) {
            (Request::Bind { addr, reuse, .. }, Reply::Bound { service }) => self.bindings.push(Binding {
                service: *service,
                addr: *addr,
                reuse: *reuse,
                bound: true,
                listening: false,
            }),
            (Request::Listen { service, addr }, Reply::Done) => {
                let ours = |b: &&mut Binding| b.service == *service && b.addr == *addr && !b.listening;
                match self.bindings.iter_mut().find(ours) {
                    Some(binding) => binding.listening = true,
                    None => self.bindings.push(Binding {
                        service: *service,
                        addr: *addr,
                        reuse: false,
                        bound: false,
                        listening: true,
                    }),
                }
            }
            _ => {}
        }
    }
}

/// Returns the request that undoes one whose caller has given up.
pub(super) fn undo(request: &Request, reply: &Reply) -> Option<Request> {
    match (request, reply) {
        (Request::Bind { addr, .. }, Reply::Bound { service }) => Some(Request::Unbind {
            service: *service,
            addr: *addr,
        }),
        (Request::Listen { service, addr }, Reply::Done) => Some(Request::Unlisten {
            service: *service,
            addr: *addr,
        }),
        _ => None,
    }
}

/// Returns the requests that give back the bindings in `told` that are not in `left`.
pub(super) fn given_back(told: &[Binding], left: &[Binding]) -> Vec<Request> {
    let count = |all: &[Binding], of: &Binding, which: fn(&Binding) -> bool| {
        let same = all
            .iter()
            .filter(|b| b.service == of.service && b.addr == of.addr && which(b));
        same.count()
    };
    let mut out = Vec::new();
    for (n, b) in told.iter().enumerate() {
        // The n-th of several like it is over when fewer are left.
        let is_over = |which: fn(&Binding) -> bool| which(b) && count(&told[..=n], b, which) > count(left, b, which);
        let (service, addr) = (b.service, b.addr);
        if is_over(|b| b.listening) {
            out.push(Request::Unlisten { service, addr });
        }
        if is_over(|b| b.bound) {
            out.push(Request::Unbind { service, addr });
        }
    }
    out
}
