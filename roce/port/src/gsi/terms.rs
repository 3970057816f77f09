//! Extra terms that peers announce in REQ and REP: UDP source ports and selective acknowledgement.

use core::net::IpAddr;
use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use roce_bth::Qpn;
use roce_cm::{ConnId, RemoteQp};

/// A queue pair of a peer.
type PeerQp = (IpAddr, Qpn);

/// Terms that a peer has announced for its queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Terms {
    /// The peer buffers packets beyond a gap and reports them.
    pub(crate) selective: bool,
    /// UDP source port of all the peer's packets.
    pub(crate) src_port: Option<u16>,
}

impl Terms {
    pub(crate) fn of(path: &RemoteQp) -> Self {
        Self {
            selective: path.keeps_packets,
            src_port: path.src_port,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    by_conn: HashMap<ConnId, PeerQp>,
    by_peer: HashMap<PeerQp, Vec<(ConnId, Terms)>>,
}

impl State {
    fn remove(&mut self, conn: ConnId) {
        let Some(peer) = self.by_conn.remove(&conn) else { return };
        if let Some(terms) = self.by_peer.get_mut(&peer) {
            terms.retain(|(of, _)| *of != conn);
            if terms.is_empty() {
                self.by_peer.remove(&peer);
            }
        }
    }
}

/// Terms of peers' queue pairs, shared by all shards of an address. Leaf lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Announced(Arc<Mutex<State>>);

impl Announced {
    /// Records the terms of a connection whose queue pair the application modifies.
    pub(crate) fn insert(&self, conn: ConnId, path: &RemoteQp) {
        let peer = (path.av.remote.to_canonical(), path.qpn);
        let mut state = self.0.lock();
        state.remove(conn);
        state.by_conn.insert(conn, peer);
        state.by_peer.entry(peer).or_default().push((conn, Terms::of(path)));
    }

    pub(crate) fn remove(&self, conn: ConnId) {
        self.0.lock().remove(conn);
    }

    /// Returns the terms of a peer's queue pair. If connections contradict each other, one may be forged: returns none.
    pub(crate) fn terms(&self, peer: PeerQp) -> Terms {
        let state = self.0.lock();
        let Some([(_, first), others @ ..]) = state.by_peer.get(&peer).map(Vec::as_slice) else {
            return Terms::default();
        };
        match others.iter().all(|(_, terms)| terms == first) {
            true => *first,
            false => Terms::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use roce_bth::Psn;
    use roce_cm::ConnTransport;
    use roce_verbs::{AddressVector, Mtu};

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn path(src_port: Option<u16>) -> RemoteQp {
        RemoteQp {
            av: AddressVector::new(HERE, HERE),
            qpn: Qpn::new(9),
            sq_psn: Psn::new(0),
            mtu: Mtu::B1024,
            responder_resources: 1,
            initiator_depth: 1,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            transport: ConnTransport::Rc,
            flow_control: false,
            srq: false,
            keeps_packets: true,
            src_port,
        }
    }

    #[test]
    fn contradicting_terms_are_ignored() {
        let (known, peer) = (Announced::default(), (HERE, Qpn::new(9)));
        let [a, b] = [ConnId(1), ConnId(2)];
        known.insert(a, &path(Some(1)));
        assert_eq!(known.terms(peer), Terms::of(&path(Some(1))));
        known.insert(b, &path(Some(2)));
        assert_eq!(known.terms(peer), Terms::default());
        known.remove(b);
        assert_eq!(known.terms(peer).src_port, Some(1));
        known.remove(a);
        assert_eq!(known.terms(peer), Terms::default());
    }
}
