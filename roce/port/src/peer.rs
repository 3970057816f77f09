//! What the port knows about each address that queue pairs are connected to.

use std::collections::{HashMap, VecDeque};

use core::net::IpAddr;
use roce_bth::Qpn;
use roce_qp::{Window, WindowConfig};
use slab::Slab;

use crate::{
    batch::Staged,
    ident::{IdentTracker, Strangers},
};

/// So many segments at a place other than the first must have gone out before their fate is judged.
const GSO_TRIAL: u64 = 64;

/// Whether trains of several packets reach a peer with the Identifications that they were sealed with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gso {
    /// Trains go out, and are watched.
    Trial { followers: u64, retransmissions: u64 },
    /// A flight with followers was acknowledged without any retransmission.
    Proven,
    /// Next to nothing but the first packets and retransmissions came through.
    Off,
}

/// One address.
pub(crate) struct Peer {
    pub(crate) addr: IpAddr,
    pub(crate) window: Window,
    pub(crate) ident: IdentTracker,
    pub(crate) strangers: Strangers,
    /// Queue pairs that wait for the window, oldest first.
    pub(crate) blocked: VecDeque<Qpn>,
    queue_pairs: usize,
    gso: Gso,
}

impl Peer {
    /// Whether trains of several packets may be sent.
    pub(crate) fn gso(&self) -> bool {
        self.gso != Gso::Off
    }

    /// Whether trains are known to arrive as they were sealed.
    pub(crate) fn gso_proven(&self) -> bool {
        self.gso == Gso::Proven
    }

    /// Notes what was staged. True when this switched GSO off: hardware segmentation of some interfaces numbers the
    /// Identifications otherwise than they were sealed, and then all but the first packet of each train are lost.
    pub(crate) fn on_staged(&mut self, staged: Staged) -> bool {
        let Gso::Trial {
            followers,
            retransmissions,
        } = &mut self.gso
        else {
            return false;
        };
        *followers += staged.followers;
        *retransmissions += staged.retransmissions;
        if *followers >= GSO_TRIAL && *retransmissions >= *followers {
            self.gso = Gso::Off;
            return true;
        }
        false
    }

    /// Notes that nothing is in flight any more.
    pub(crate) fn on_drained(&mut self) {
        if let Gso::Trial {
            followers,
            retransmissions,
        } = &self.gso
            && *retransmissions == 0
            && *followers > 0
        {
            self.gso = Gso::Proven;
        }
    }
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
                gso: Gso::Trial {
                    followers: 0,
                    retransmissions: 0,
                },
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
        self.find(addr).is_some_and(|key| self.slab[key.0].gso_proven())
    }

    pub(crate) fn find(&self, addr: IpAddr) -> Option<PeerKey> {
        self.by_addr.get(&addr).copied().map(PeerKey)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.slab.iter().map(|(_, p)| p)
    }
}
