//! One connection, and all of them with their indices and timers.

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rand_chacha::{ChaCha8Rng, rand_core::RngCore};
use roce_verbs::{Instant, Mtu, Qpn};

use super::{
    half_open::{Displaced, HalfOpen},
    rate::{PeerGroup, TokenBucket},
    state::State,
    validation::AddressValidation,
};
use crate::{
    mad::MAD_LEN,
    types::{CmConfig, ConnChange, ConnId, ConnTransport, DropReason, ListenId, RemoteQp},
};

/// A pause, up to a quarter shorter by a random number: what is refused together for want of room shall not come back
/// together. The longest pause is the peer's, and kept.
pub(super) fn jittered(rng: &mut ChaCha8Rng, pause: Duration, longest: Duration) -> Duration {
    match pause < longest {
        true => pause - pause / 4 * (rng.next_u32() >> 24) / 256,
        false => longest,
    }
}

/// A message that awaits an answer.
pub(super) struct Exchange {
    pub(super) mad: [u8; MAD_LEN],
    /// Retransmissions left.
    pub(super) retries: u8,
    /// The next pause.
    pub(super) pause: Duration,
    /// The peer asked for time, which is running.
    pub(super) extended: bool,
    /// How often it may still ask.
    pub(super) extensions: u8,
    /// When to give up whatever is left.
    pub(super) deadline: Instant,
}

/// A connection.
pub(super) struct Conn {
    pub(super) state: State,
    /// We sent the REQ.
    pub(super) active: bool,
    /// Destroyed by the consumer; the number tells the order.
    pub(super) detached: Option<u64>,
    /// The consumer has been told that it ended.
    pub(super) end_told: bool,
    /// Listener that the request arrived at (passive).
    pub(super) listener: Option<ListenId>,
    /// The request counts towards the listener's backlog.
    pub(super) in_backlog: bool,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) local_id: u32,
    /// Known from the REQ (passive) or REP (active) on.
    pub(super) remote_id: Option<u32>,
    pub(super) remote_guid: u64,
    /// Transaction of the establishment; after a DREQ of the peer's, of that.
    pub(super) transaction_id: u64,
    /// Zero (QP0) until the consumer accepts.
    pub(super) local_qpn: Qpn,
    /// The peer's queue pair, known with `remote_id`.
    pub(super) peer: Option<RemoteQp>,
    /// Terms of the REQ.
    pub(super) offer: Offer,
    /// We told the peer with an MRA that our answer takes time.
    pub(super) granted: bool,
    /// When it was made.
    pub(super) since: Instant,
    /// Limits messages to a peer whose address is not proven.
    pub(super) validation: AddressValidation,
    /// Repetitions of the peer's request that are answered.
    pub(super) repeats: TokenBucket,
    /// Longest pause between retransmissions, and how many.
    pub(super) max_pause: Duration,
    pub(super) max_retries: u8,
    pub(super) exchange: Option<Box<Exchange>>,
    /// The REJ to repeat in [`State::Refused`].
    pub(super) rejection: Option<Box<[u8; MAD_LEN]>>,
    /// The REP that the peer answered (passive).
    pub(super) reply: Option<Box<[u8; MAD_LEN]>>,
    pub(super) timer: Option<Instant>,
}

impl Conn {
    pub(super) fn group(&self) -> PeerGroup {
        PeerGroup::of(self.remote.ip())
    }
}

/// Terms of an active connection's REQ that are needed again when the REP comes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) mtu: Mtu,
    pub(super) transport: ConnTransport,
    pub(super) retry_count: u8,
    pub(super) traffic_class: u8,
}

/// Names a peer's object: its address, channel adapter and number.
type RemoteKey<T> = (IpAddr, u64, T);

/// All connections of a manager. Ordered maps: keys come from peers, and runs must repeat.
#[derive(Default)]
pub(super) struct Connections {
    conns: BTreeMap<ConnId, Conn>,
    by_local_id: BTreeMap<u32, ConnId>,
    by_remote_id: BTreeMap<RemoteKey<u32>, ConnId>,
    by_remote_qp: BTreeMap<RemoteKey<Qpn>, ConnId>,
    timers: BTreeSet<(Instant, ConnId)>,
    /// Destroyed ones, oldest first; before all others those whose peer's address has not proved itself.
    detached: BTreeMap<(bool, u64), ConnId>,
    half_open: HalfOpen,
    /// REQs of ours that wait for an answer.
    requests: usize,
    next_id: u64,
    next_detached: u64,
    /// Changes to report: connections that were established or are over; `None` if nobody asks.
    changes: Option<VecDeque<ConnChange>>,
}

impl Connections {
    pub(super) fn new(report_changes: bool) -> Self {
        Self {
            changes: report_changes.then(VecDeque::new),
            ..Self::default()
        }
    }

    pub(super) fn poll_change(&mut self) -> Option<ConnChange> {
        self.changes.as_mut()?.pop_front()
    }

    /// Takes note of a change of state (`None`: it is forgotten).
    fn note(&mut self, id: ConnId, before: State, after: Option<State>) {
        let Some(changes) = &mut self.changes else { return };
        let Some(c) = self.conns.get(&id) else { return };
        let stands = |s: State| matches!(s, State::Established | State::DreqSent);
        let established = after == Some(State::Established) && before != State::Established;
        let over = stands(before) && !after.is_some_and(stands);
        if let (true, Some(remote_id), Some(peer)) = (established || over, c.remote_id, c.peer) {
            changes.push_back(ConnChange {
                established,
                local: c.local.ip(),
                remote: c.remote.ip(),
                local_id: c.local_id,
                remote_id,
                remote_qpn: peer.qpn,
            });
        }
    }

    pub(super) fn len(&self) -> usize {
        self.conns.len()
    }

    /// REQs of ours that wait for an answer.
    pub(super) fn requests(&self) -> usize {
        self.requests
    }

    /// Half-open connections: all, and the most of one address.
    pub(super) fn half_open(&self) -> (usize, usize) {
        self.half_open.counts()
    }

    /// Destroyed connections that are kept.
    pub(super) fn lingering(&self) -> usize {
        self.detached.len()
    }

    /// Whether there is room for one more request of `peer` at a listener, and who gives way to it.
    pub(super) fn room_for(
        &self,
        peer: PeerGroup,
        listener: ListenId,
        backlog: u32,
        config: &CmConfig,
    ) -> Result<Displaced, DropReason> {
        self.half_open.room_for(peer, listener, backlog, config)
    }

    /// The request does not wait for the consumer any more.
    pub(super) fn leave_backlog(&mut self, id: ConnId) {
        let Some(c) = self.conns.get_mut(&id) else { return };
        if core::mem::take(&mut c.in_backlog)
            && let Some(listener) = c.listener
        {
            self.half_open.backlogs.free(listener, c.group());
        }
    }

    /// The peer has shown that it receives what we send.
    pub(super) fn prove(&mut self, id: ConnId) {
        let Some(c) = self.conns.get_mut(&id).filter(|c| !c.validation.is_proven()) else {
            return;
        };
        c.validation.prove();
        let group = c.group();
        if let Some(seq) = c.detached {
            self.detached.remove(&(false, seq));
            self.detached.insert((true, seq), id);
        }
        if let Some(peer) = c.peer.filter(|_| c.state.holds_qp()) {
            self.by_remote_qp.insert((c.remote.ip(), c.remote_guid, peer.qpn), id);
        }
        self.half_open.prove(id, group);
    }

    pub(super) fn get(&self, id: ConnId) -> Option<&Conn> {
        self.conns.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: ConnId) -> Option<&mut Conn> {
        self.conns.get_mut(&id)
    }

    pub(super) fn by_local_id(&self, id: u32) -> Option<ConnId> {
        self.by_local_id.get(&id).copied()
    }

    pub(super) fn by_remote_id(&self, peer: IpAddr, guid: u64, id: u32) -> Option<ConnId> {
        self.by_remote_id.get(&(peer, guid, id)).copied()
    }

    pub(super) fn by_remote_qp(&self, peer: IpAddr, guid: u64, qpn: Qpn) -> Option<ConnId> {
        self.by_remote_qp.get(&(peer, guid, qpn)).copied()
    }

    /// A name that nothing else of the manager has.
    pub(super) fn fresh_id(&mut self) -> ConnId {
        let id = ConnId(self.next_id);
        self.next_id += 1;
        id
    }

    pub(super) fn insert(&mut self, conn: Conn) -> ConnId {
        let id = self.fresh_id();
        self.by_local_id.insert(conn.local_id, id);
        let state = conn.state;
        if let Some(listener) = conn.listener.filter(|_| conn.in_backlog) {
            self.half_open.backlogs.take(listener, conn.group());
        }
        self.conns.insert(id, conn);
        self.index_remote(id);
        self.count(id, state, true);
        id
    }

    /// Makes the connection findable by what is known of the peer.
    pub(super) fn index_remote(&mut self, id: ConnId) {
        let Some(c) = self.conns.get(&id) else { return };
        let (Some(remote_id), Some(peer)) = (c.remote_id, c.peer) else {
            return;
        };
        let (ip, guid, qpn) = (c.remote.ip(), c.remote_guid, peer.qpn);
        self.by_remote_id.insert((ip, guid, remote_id), id);
        // What somebody says who has not shown that the address is his keeps nobody from the queue pair.
        if c.validation.is_proven() {
            self.by_remote_qp.insert((ip, guid, qpn), id);
        }
    }

    /// Enters a state: leaves the counts and indices that it has no part in, and stops timer and retransmission.
    /// [`State::Over`] of a destroyed connection removes it.
    pub(super) fn enter(&mut self, id: ConnId, state: State) {
        let Some(c) = self.conns.get_mut(&id) else { return };
        let before = core::mem::replace(&mut c.state, state);
        c.exchange = None;
        self.note(id, before, Some(state));
        let Some(c) = self.conns.get(&id) else { return };
        let gone = state == State::Over && c.detached.is_some();
        self.count(id, before, false);
        self.count(id, state, true);
        self.set_timer(id, None);
        if !state.holds_qp() {
            self.forget_qp(id);
        }
        if state == State::Over {
            self.forget_ids(id);
        }
        if gone {
            self.remove(id);
        }
    }

    /// Gives a connection that no peer's number is known of another communication ID.
    pub(super) fn renumber(&mut self, id: ConnId, local_id: u32) {
        self.forget_ids(id);
        if let Some(c) = self.conns.get_mut(&id) {
            c.local_id = local_id;
            self.by_local_id.insert(local_id, id);
        }
    }

    pub(super) fn set_timer(&mut self, id: ConnId, at: Option<Instant>) {
        let Some(c) = self.conns.get_mut(&id) else { return };
        if let Some(old) = core::mem::replace(&mut c.timer, at) {
            self.timers.remove(&(old, id));
        }
        if let Some(at) = at {
            self.timers.insert((at, id));
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Takes the earliest timer that is due.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<ConnId> {
        let (at, id) = *self.timers.first()?;
        if at > now {
            return None;
        }
        self.set_timer(id, None);
        Some(id)
    }

    /// Marks the connection as destroyed by the consumer.
    pub(super) fn detach(&mut self, id: ConnId) {
        let Some(c) = self.conns.get_mut(&id) else { return };
        if c.detached.is_none() {
            c.detached = Some(self.next_detached);
            self.detached.insert((c.validation.is_proven(), self.next_detached), id);
            self.next_detached += 1;
        }
    }

    /// The destroyed connection to forget first, when there are more than `max`.
    pub(super) fn excess_detached(&self, max: usize) -> Option<ConnId> {
        (self.detached.len() > max).then(|| self.detached.first_key_value().map(|(_, id)| *id))?
    }

    /// Forgets the connection altogether.
    pub(super) fn remove(&mut self, id: ConnId) {
        let Some(state) = self.conns.get(&id).map(|c| c.state) else {
            return;
        };
        self.note(id, state, None);
        self.count(id, state, false);
        self.leave_backlog(id);
        self.set_timer(id, None);
        self.forget_qp(id);
        self.forget_ids(id);
        if let Some(c) = self.conns.remove(&id)
            && let Some(seq) = c.detached
        {
            self.detached.remove(&(c.validation.is_proven(), seq));
        }
    }

    fn forget_qp(&mut self, id: ConnId) {
        let Some(c) = self.conns.get(&id) else { return };
        if let Some(peer) = c.peer {
            let key = (c.remote.ip(), c.remote_guid, peer.qpn);
            if self.by_remote_qp.get(&key) == Some(&id) {
                self.by_remote_qp.remove(&key);
            }
        }
    }

    fn forget_ids(&mut self, id: ConnId) {
        let Some(c) = self.conns.get(&id) else { return };
        if self.by_local_id.get(&c.local_id) == Some(&id) {
            self.by_local_id.remove(&c.local_id);
        }
        if let Some(remote_id) = c.remote_id {
            let key = (c.remote.ip(), c.remote_guid, remote_id);
            if self.by_remote_id.get(&key) == Some(&id) {
                self.by_remote_id.remove(&key);
            }
        }
    }

    /// Counts a connection in or out of what is half-open, or of our requests.
    fn count(&mut self, id: ConnId, state: State, enter: bool) {
        if state.is_request() {
            match enter {
                true => self.requests += 1,
                false => self.requests -= 1,
            }
        }
        let Some(c) = self.conns.get(&id).filter(|_| state.is_half_open()) else {
            return;
        };
        match enter {
            true => self.half_open.enter(id, c.group(), c.validation.is_proven()),
            false => self.half_open.leave(id, c.group()),
        }
    }
}
