//! Extra terms exchanged in REQ and REP: UDP source ports and selective acknowledgement.

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

/// UDP source port of one of our queue pairs.
#[derive(Clone, Copy, Debug)]
struct Source {
    port: u16,
    /// A REQ or REP has named the port: the peer drops packets from any other.
    promised: bool,
}

#[derive(Debug, Default)]
struct State {
    sources: HashMap<Qpn, Source>,
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

/// Terms of both sides, shared by all ports at an address. Leaf lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Handshakes(Arc<Mutex<State>>);

impl Handshakes {
    /// Sets the source port of a new local queue pair.
    pub(crate) fn add_source(&self, qpn: Qpn, port: u16) {
        let source = Source { port, promised: false };
        self.0.lock().sources.insert(qpn, source);
    }

    pub(crate) fn remove_source(&self, qpn: Qpn) {
        self.0.lock().sources.remove(&qpn);
    }

    /// Returns the source port of a local queue pair. Changes it to `requested` first, unless it is promised.
    pub(crate) fn source(&self, qpn: Qpn, requested: Option<u16>) -> Option<u16> {
        let mut state = self.0.lock();
        let source = state.sources.get_mut(&qpn)?;
        if let Some(port) = requested.filter(|_| !source.promised) {
            source.port = port;
        }
        Some(source.port)
    }

    /// Fixes and returns a local queue pair's source port for a REQ or REP.
    pub(crate) fn promise(&self, qpn: Qpn) -> Option<u16> {
        let mut state = self.0.lock();
        let source = state.sources.get_mut(&qpn)?;
        source.promised = true;
        Some(source.port)
    }

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
        let (known, peer) = (Handshakes::default(), (HERE, Qpn::new(9)));
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

    #[test]
    fn a_promised_port_stays() {
        let (known, qpn) = (Handshakes::default(), Qpn::new(5));
        assert_eq!((known.source(qpn, Some(3)), known.promise(qpn)), (None, None));
        known.add_source(qpn, 1);
        assert_eq!(known.source(qpn, None), Some(1));
        assert_eq!((known.source(qpn, Some(2)), known.promise(qpn)), (Some(2), Some(2)));
        assert_eq!(known.source(qpn, Some(3)), Some(2));
        known.remove_source(qpn);
        assert_eq!(known.promise(qpn), None);
    }
}
