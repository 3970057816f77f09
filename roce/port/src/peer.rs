//! State of each address that queue pairs are connected to.

use std::collections::{HashMap, VecDeque};

use core::net::IpAddr;
use roce_bth::Qpn;
use roce_icrc::{Flow, IcrcPrefix};
use roce_qp::{Window, WindowConfig};
use roce_verbs::{AddressHashes, AddressVector};
use slab::Slab;

use crate::{
    batch::TxPath,
    gso::Gso,
    ident::{IdentTracker, Strangers},
};

/// State of one address.
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

/// Index of a peer in [`Peers`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PeerKey(usize);

/// Network path of a connected queue pair.
pub(crate) struct QpPath {
    pub(crate) peer: PeerKey,
    pub(crate) av: AddressVector,
    pub(crate) tx: TxPath,
    pub(crate) dest: Qpn,
    /// UDP source port of the peer's last packet, and the ICRC prefix of packets from there.
    pub(crate) rx: Option<(u16, IcrcPrefix)>,
}

impl QpPath {
    /// Returns the ICRC prefix of the peer's packets in a flow.
    pub(crate) fn rx_prefix(&mut self, flow: &Flow) -> IcrcPrefix {
        match self.rx {
            Some((port, prefix)) if port == flow.src_port => prefix,
            _ => self.rx.insert((flow.src_port, flow.prefix())).1,
        }
    }
}

/// Table of peers. An entry lives as long as a queue pair has it in its path.
pub(crate) struct Peers {
    slab: Slab<Peer>,
    by_addr: HashMap<IpAddr, usize, AddressHashes>,
    config: WindowConfig,
}

impl Peers {
    pub(crate) fn new(config: WindowConfig) -> Self {
        Self {
            slab: Slab::new(),
            by_addr: HashMap::default(),
            config,
        }
    }

    /// Returns the peer with this address and counts one more queue pair of it.
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

    /// Counts one queue pair less; the last one removes the peer.
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

    /// Returns whether trains are known to arrive at an address as they were sealed.
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
