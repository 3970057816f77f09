//! Peers' queue pairs that keep packets beyond a gap.

use core::net::IpAddr;
use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use roce_bth::Qpn;
use roce_cm::ConnId;

/// A queue pair of a peer.
type PeerQp = (IpAddr, Qpn);

#[derive(Debug, Default)]
struct Known {
    by_conn: HashMap<ConnId, PeerQp>,
    all: HashMap<PeerQp, usize>,
}

impl Known {
    fn remove(&mut self, conn: ConnId) {
        if let Some(peer) = self.by_conn.remove(&conn)
            && let Some(count) = self.all.get_mut(&peer)
        {
            *count -= 1;
            if *count == 0 {
                self.all.remove(&peer);
            }
        }
    }
}

/// Queue pairs of peers that have said so, for as long as their connections are known. Ports that share an address share it: the
/// connection may be another's.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keepers(Arc<Mutex<Known>>);

impl Keepers {
    pub(crate) fn has(&self, peer: PeerQp) -> bool {
        self.0.lock().all.contains_key(&peer)
    }

    pub(crate) fn insert(&self, conn: ConnId, peer: PeerQp) {
        let mut known = self.0.lock();
        known.remove(conn);
        known.by_conn.insert(conn, peer);
        *known.all.entry(peer).or_default() += 1;
    }

    pub(crate) fn remove(&self, conn: ConnId) {
        self.0.lock().remove(conn);
    }
}
