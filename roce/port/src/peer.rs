//! State of each address that queue pairs are connected to.

use std::collections::{HashMap, VecDeque};

use core::{net::IpAddr, time::Duration};
use roce_bth::Qpn;
use roce_icrc::{Flow, IcrcPrefix};
use roce_qp::{Window, WindowConfig};
use roce_verbs::{AddressHashes, AddressVector, Instant};
use slab::Slab;

use crate::{
    gso::Gso,
    ident::{IdentTracker, Strangers},
    path::TxPath,
};

/// Time for which a peer's state outlives its last queue pair: the next one begins with the known round trip, window and GSO proof.
const MEMORY: Duration = Duration::from_secs(60);
/// Peers without queue pairs, at most. The oldest is forgotten for a new one.
const MAX_IDLE: usize = 1024;

/// State of one address.
pub(crate) struct Peer {
    pub(crate) addr: IpAddr,
    pub(crate) window: Window,
    pub(crate) ident: IdentTracker,
    pub(crate) strangers: Strangers,
    /// Queue pairs that wait for the window, oldest first.
    pub(crate) blocked: VecDeque<Qpn>,
    queue_pairs: usize,
    /// Time when the last queue pair left, if there is none.
    idle_since: Option<Instant>,
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
    #[inline]
    pub(crate) fn rx_prefix(&mut self, flow: &Flow) -> &mut IcrcPrefix {
        if self.rx.as_ref().is_some_and(|(port, _)| *port != flow.src_port) {
            self.rx = None;
        }
        let (_, prefix) = self.rx.get_or_insert_with(|| (flow.src_port, flow.prefix()));
        prefix
    }
}

/// Table of peers. An entry lives as long as a queue pair has it in its path, and for [`MEMORY`] afterwards.
pub(crate) struct Peers {
    slab: Slab<Peer>,
    /// Peers that lost their last queue pair, oldest first, with the time. Some have a queue pair again.
    idle: VecDeque<(Instant, IpAddr)>,
    by_addr: HashMap<IpAddr, usize, AddressHashes>,
    config: WindowConfig,
}

impl Peers {
    pub(crate) fn new(config: WindowConfig) -> Self {
        Self {
            slab: Slab::new(),
            idle: VecDeque::new(),
            by_addr: HashMap::default(),
            config,
        }
    }

    /// Returns the peer with this address and counts one more queue pair of it.
    pub(crate) fn join(&mut self, now: Instant, addr: IpAddr) -> PeerKey {
        self.forget_idle(now);
        let key = *self.by_addr.entry(addr).or_insert_with(|| {
            self.slab.insert(Peer {
                addr,
                window: Window::new(self.config),
                ident: IdentTracker::default(),
                strangers: Strangers::default(),
                blocked: VecDeque::new(),
                queue_pairs: 0,
                idle_since: None,
                gso: Gso::default(),
            })
        });
        let peer = &mut self.slab[key];
        if peer.idle_since.take().is_some() {
            // The host may have been started again since: its Identifications too.
            peer.ident = IdentTracker::default();
            peer.strangers = Strangers::default();
        }
        peer.queue_pairs += 1;
        PeerKey(key)
    }

    /// Counts one queue pair less.
    pub(crate) fn leave(&mut self, now: Instant, key: PeerKey) {
        let peer = &mut self.slab[key.0];
        peer.queue_pairs -= 1;
        if peer.queue_pairs == 0 {
            peer.blocked.clear();
            peer.idle_since = Some(now);
            self.idle.push_back((now, peer.addr));
        }
        self.forget_idle(now);
    }

    /// Removes peers that have had no queue pair for long, or that are too many.
    fn forget_idle(&mut self, now: Instant) {
        while let Some((since, addr)) = self.idle.front().copied() {
            if self.idle.len() <= MAX_IDLE && now.saturating_since(since) < MEMORY {
                return;
            }
            self.idle.pop_front();
            // One that had a queue pair meanwhile is in the list again, if at all.
            if let Some(key) = self.by_addr.get(&addr)
                && self.slab[*key].idle_since == Some(since)
            {
                self.slab.remove(*key);
                self.by_addr.remove(&addr);
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * SECOND)
    }

    fn addr(n: u32) -> IpAddr {
        IpAddr::V4((0x0a00_0000 + n).into())
    }

    fn peers() -> Peers {
        Peers::new(WindowConfig::default())
    }

    #[test]
    fn a_peer_is_remembered_for_a_minute_after_its_last_queue_pair() {
        let mut peers = peers();
        let key = peers.join(at(1), addr(1));
        peers.get_mut(key).window.on_sent(1);
        peers.join(at(2), addr(1));
        peers.leave(at(3), key);
        peers.leave(at(4), key);
        assert_eq!(peers.join(at(63), addr(1)), key);
        assert_eq!(peers.get(key).window.in_flight(), 1, "the same window");
        peers.leave(at(70), key);
        // The first entry of the list is over, the peer is not.
        peers.join(at(129), addr(2));
        assert!(peers.find(addr(1)).is_some());
        peers.join(at(130), addr(3));
        assert!(peers.find(addr(1)).is_none());
    }

    #[test]
    fn peers_without_queue_pairs_are_bounded() {
        let mut peers = peers();
        for n in 0..MAX_IDLE as u32 + 10 {
            let key = peers.join(at(1), addr(n));
            peers.leave(at(1), key);
        }
        assert_eq!((peers.iter().count(), peers.idle.len()), (MAX_IDLE, MAX_IDLE));
        assert!(peers.find(addr(9)).is_none());
        for _ in 0..2 * MAX_IDLE {
            let key = peers.join(at(1), addr(20));
            peers.leave(at(1), key);
        }
        assert!(peers.idle.len() <= MAX_IDLE);
    }
}
