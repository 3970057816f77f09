//! State of each address that queue pairs are connected to.

use std::collections::{HashMap, VecDeque};

use core::net::IpAddr;
use roce_bth::Qpn;
use roce_qp::{Window, WindowConfig};
use slab::Slab;

use crate::{
    gso::Gso,
    ident::{IdentTracker, Strangers},
};

/// One address.
pub(crate) struct Peer {
    pub(crate) addr: IpAddr,
    pub(crate) window: Window,
    pub(crate) ident: IdentTracker,
    pub(crate) strangers: Strangers,
    /// Queue pairs that wait for the window, oldest first.
    pub(crate) blocked: VecDeque<Qpn>,
    queue_pairs: usize,
    pub(crate) gso: Gso,
}

/// A peer's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PeerKey(usize);

/// All peers; one lives as long as a queue pair has it in its path.
pub(crate) struct Peers {
    slab: Slab<Peer>,
    by_addr: HashMap<IpAddr, usize>,
    config: WindowConfig,
}

impl Peers {
    pub(crate) fn new(config: WindowConfig) -> Self {
        Self {
            slab: Slab::new(),
            by_addr: HashMap::new(),
            config,
        }
    }

    /// The peer with this address, for one more queue pair.
    pub(crate) fn join(&mut self, addr: IpAddr) -> PeerKey {
        let key = *self.by_addr.entry(addr).or_insert_with(|| {
            self.slab.insert(Peer {
                addr,
                window: Window::new(self.config),
                ident: IdentTracker::default(),
                strangers: Strangers::default(),
                blocked: VecDeque::new(),
                queue_pairs: 0,
                gso: Gso::default(),
            })
        });
        self.slab[key].queue_pairs += 1;
        PeerKey(key)
    }

    /// One queue pair less.
    pub(crate) fn leave(&mut self, key: PeerKey) {
        let peer = &mut self.slab[key.0];
        peer.queue_pairs -= 1;
        if peer.queue_pairs == 0 {
            self.by_addr.remove(&peer.addr);
            self.slab.remove(key.0);
        }
    }

    pub(crate) fn get(&self, key: PeerKey) -> &Peer {
        &self.slab[key.0]
    }

    pub(crate) fn get_mut(&mut self, key: PeerKey) -> &mut Peer {
        &mut self.slab[key.0]
    }

    /// Whether trains are known to arrive at an address as they were sealed.
    pub(crate) fn gso_proven(&self, addr: IpAddr) -> bool {
        self.find(addr).is_some_and(|key| self.slab[key.0].gso.is_proven())
    }

    pub(crate) fn find(&self, addr: IpAddr) -> Option<PeerKey> {
        self.by_addr.get(&addr).copied().map(PeerKey)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.slab.iter().map(|(_, p)| p)
    }
}
