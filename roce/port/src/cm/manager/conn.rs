//! One connection or resolution, and all of them with their indices and timers.

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rand_chacha::{ChaCha8Rng, rand_core::RngCore};
use roce_verbs::{Instant, Qpn};

use super::{rate::TokenBucket, state::State, validation::AddressValidation};
use crate::cm::{
    drops::DropReason,
    half_open::{Backlogs, Displaced, HalfOpen, peer_group},
    mad::MAD_LEN,
    types::{CmConfig, ConnChange, ConnId, ListenArgs, ListenId, RemoteQp, Usage},
};

/// Returns a pause, shortened by a random number up to a quarter: requests that were dropped together for lack of room must not be
/// repeated together. The longest pause is the peer's, and kept.
pub(super) fn jittered(rng: &mut ChaCha8Rng, pause: Duration, longest: Duration) -> Duration {
    match pause < longest {
        true => pause - pause / 4 * (rng.next_u32() >> 24) / 256,
        false => longest,
    }
}

/// Message that awaits an answer.
pub(super) struct Exchange {
    pub(super) mad: [u8; MAD_LEN],
    /// Retransmissions left.
    pub(super) retries: u8,
    /// Next pause.
    pub(super) pause: Duration,
    /// The time that the peer has requested by an MRA is running.
    pub(super) extended: bool,
    /// MRAs that the peer may still send.
    pub(super) extensions: u8,
    /// Time when the exchange fails, whatever retries are left.
    pub(super) deadline: Instant,
}

/// Connection, or resolution of a service ID (SIDR).
pub(super) struct Conn {
    /// Given by [`Connections::register`].
    pub(super) id: ConnId,
    pub(super) state: State,
    /// Place in the order in which the consumer destroyed connections; `None`: it still has this one.
    pub(super) detached: Option<u64>,
    /// The consumer has the event of its end.
    pub(super) end_reported: bool,
    /// Listener that got the request. `None`: the request is ours.
    pub(super) listener: Option<ListenId>,
    /// The request counts towards the listener's backlog.
    pub(super) in_backlog: bool,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// Our communication ID or request ID; 0: none.
    pub(super) local_id: u32,
    /// The peer's. Known from the REQ (passive) or REP (active) on.
    pub(super) remote_id: Option<u32>,
    pub(super) remote_guid: u64,
    /// Transaction of the request.
    pub(super) transaction_id: u64,
    /// Service ID of a resolution; 0: this is a connection.
    pub(super) service_id: u64,
    /// Zero (QP0) until the consumer accepts.
    pub(super) local_qpn: Qpn,
    /// The peer's queue pair. Until the REP (active): what our REQ says about it.
    pub(super) peer: RemoteQp,
    /// The peer knows from an MRA that our answer takes time.
    pub(super) granted: bool,
    /// Time of creation.
    pub(super) since: Instant,
    /// Limits messages to an unverified peer address.
    pub(super) validation: AddressValidation,
    /// Rate of answers to repetitions of the peer's request.
    pub(super) repeats: TokenBucket,
    /// Longest pause between retransmissions, and their number.
    pub(super) max_pause: Duration,
    pub(super) max_retries: u8,
    pub(super) exchange: Option<Box<Exchange>>,
    /// Our answer, for repetitions: the REP of an established connection (passive), a REJ or a SIDR_REP.
    pub(super) answer: Option<Box<[u8; MAD_LEN]>>,
    pub(super) timer: Option<Instant>,
}

impl Conn {
    /// Creates a connection or resolution without numbers, in its first state.
    pub(super) fn new(now: Instant, state: State, (local, remote): (SocketAddr, SocketAddr), peer: RemoteQp) -> Self {
        Self {
            id: ConnId(0),
            state,
            detached: None,
            end_reported: false,
            listener: None,
            in_backlog: false,
            local,
            remote,
            local_id: 0,
            remote_id: None,
            remote_guid: 0,
            transaction_id: 0,
            service_id: 0,
            local_qpn: Qpn::default(),
            peer,
            granted: false,
            since: now,
            validation: AddressValidation::new(state.is_request()),
            repeats: TokenBucket::default(),
            max_pause: Duration::ZERO,
            max_retries: 0,
            exchange: None,
            answer: None,
            timer: None,
        }
    }

    /// Returns whether the request is ours.
    pub(super) fn is_active(&self) -> bool {
        self.listener.is_none()
    }

    /// Returns whether this is a resolution. No service ID of a port space is 0.
    pub(super) fn is_resolution(&self) -> bool {
        self.service_id != 0
    }

    /// Returns whether this is a resolution that a peer requested and the consumer has not destroyed.
    fn is_held_resolution(&self) -> bool {
        self.is_resolution() && !self.is_active() && self.detached.is_none()
    }

    /// Returns our and the peer's communication ID; 0 if it is unknown.
    pub(super) fn ids(&self) -> (u32, u32) {
        (self.local_id, self.remote_id.unwrap_or(0))
    }

    /// Returns the addresses that share limits with the peer's.
    pub(super) fn peer_group(&self) -> IpAddr {
        peer_group(self.remote.ip())
    }

    /// Returns the key of the peer's number, once that is known.
    fn id_key(&self) -> Option<Key> {
        let (peer, id) = (self.remote.ip(), self.remote_id?);
        Some(match self.is_resolution() {
            true => Key::Question(peer, self.transaction_id, id),
            false => Key::RemoteId(peer, self.remote_guid, id),
        })
    }

    fn qp_key(&self) -> Key {
        Key::RemoteQp(self.remote.ip(), self.remote_guid, self.peer.qpn)
    }
}

/// Number by which a connection or resolution is found; the peer's numbers with its address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// Our communication ID or request ID.
    LocalId(u32),
    /// The peer's channel adapter and communication ID.
    RemoteId(IpAddr, u64, u32),
    /// The peer's channel adapter and queue pair. An unverified address keeps no other connection from the queue pair.
    RemoteQp(IpAddr, u64, Qpn),
    /// Transaction and request ID of a peer's SIDR_REQ.
    Question(IpAddr, u64, u32),
}

/// Connections and resolutions of a manager. Ordered maps: keys come from peers, and runs must repeat.
///
/// A step takes its connection out of the table ([`take`](Self::take), [`put`](Self::put)), which indexes it meanwhile.
#[derive(Default)]
pub(super) struct Connections {
    conns: BTreeMap<ConnId, Conn>,
    index: BTreeMap<Key, ConnId>,
    timers: BTreeSet<(Instant, ConnId)>,
    /// Destroyed connections, and destroyed resolutions: apart, so that a flood of one kind evicts none of the other. Oldest first;
    /// before all others those with an unverified peer address.
    detached: [BTreeMap<(bool, u64), ConnId>; 2],
    /// Number of resolutions that peers requested and the consumer has not destroyed.
    held_resolutions: usize,
    half_open: HalfOpen,
    /// SIDR requests that wait for the consumer. None verifies an address: nothing answers our answer.
    questions: HalfOpen,
    backlogs: Backlogs,
    /// Number of our requests that wait for an answer.
    requests: usize,
    next_id: u64,
    next_detached: u64,
    /// Connections that were established or have ended; `None` if changes are not reported.
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

    /// Queues a change of state to be reported. `after`: `None` if the connection is removed.
    fn note(&mut self, c: &Conn, before: State, after: Option<State>) {
        let Some(changes) = &mut self.changes else { return };
        let stands = |s: State| matches!(s, State::Established | State::DreqSent);
        let established = after == Some(State::Established) && before != State::Established;
        let over = stands(before) && !after.is_some_and(stands);
        if let (true, Some(remote_id)) = (established || over, c.remote_id) {
            changes.push_back(ConnChange {
                established,
                local: c.local.ip(),
                remote: c.remote.ip(),
                local_id: c.local_id,
                remote_id,
                remote_qpn: c.peer.qpn,
            });
        }
    }

    pub(super) fn len(&self) -> usize {
        self.conns.len()
    }

    /// Returns the number of our requests that wait for an answer.
    pub(super) fn requests(&self) -> usize {
        self.requests
    }

    /// Returns the amount of state that is kept here.
    pub(super) fn usage(&self) -> Usage {
        let (half_open, half_open_of_peer) = self.half_open.counts();
        let [lingering, lingering_resolutions] = self.detached.each_ref().map(BTreeMap::len);
        Usage {
            connections: self.len(),
            half_open,
            half_open_of_peer,
            lingering,
            lingering_resolutions,
            held_resolutions: self.held_resolutions,
            ..Usage::default()
        }
    }

    /// Returns the request that a new one of `peer` in `state` evicts.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(super) fn room_for(
        &self,
        state: State,
        peer: IpAddr,
        (listener, args): (ListenId, ListenArgs),
        config: &CmConfig,
    ) -> Result<Displaced, DropReason> {
        let is_question = state == State::SidrReceived;
        // A resolution that has ended occupies memory until the consumer destroys it. Strangers must not fill the table with those.
        let full = is_question && self.held_resolutions >= config.max_lingering;
        if full || self.len() >= config.max_connections {
            return Err(DropReason::Connections);
        }
        self.backlogs.check(listener, peer, args.backlog)?;
        let requests = if is_question { &self.questions } else { &self.half_open };
        requests.displaced_by(peer, config.max_half_open, config.max_half_open_per_peer)
    }

    /// Removes a request from its listener's backlog.
    pub(super) fn leave_backlog(&mut self, c: &mut Conn) {
        if core::mem::take(&mut c.in_backlog)
            && let Some(listener) = c.listener
        {
            self.backlogs.free(listener, c.peer_group());
        }
    }

    /// Marks the peer's address as verified: the peer receives what we send.
    pub(super) fn prove(&mut self, c: &mut Conn) {
        if c.validation.is_proven() {
            return;
        }
        c.validation.prove();
        if c.state.holds_qp() {
            self.index.insert(c.qp_key(), c.id);
        }
        self.half_open.prove(c.id.0, c.peer_group());
        if let Some(seq) = c.detached {
            let pool = &mut self.detached[usize::from(c.is_resolution())];
            pool.remove(&(false, seq));
            pool.insert((true, seq), c.id);
        }
    }

    pub(super) fn get(&self, id: ConnId) -> Option<&Conn> {
        self.conns.get(&id)
    }

    /// Returns a connection or resolution unless the consumer has destroyed it.
    pub(super) fn attached(&self, id: ConnId) -> Option<&Conn> {
        self.get(id).filter(|c| c.detached.is_none())
    }

    /// Takes a connection or resolution out, for changes. [`put`](Self::put) follows.
    pub(super) fn take(&mut self, id: ConnId) -> Option<Conn> {
        self.conns.remove(&id)
    }

    /// Takes a connection or resolution out unless the consumer has destroyed it.
    pub(super) fn take_attached(&mut self, id: ConnId) -> Option<Conn> {
        self.attached(id)?;
        self.take(id)
    }

    /// Puts a connection or resolution in, or back. One that has ended and been destroyed is removed.
    pub(super) fn put(&mut self, c: Conn) {
        match c.state == State::Over && c.detached.is_some() {
            true => self.remove(c),
            false => drop(self.conns.insert(c.id, c)),
        }
    }

    pub(super) fn find(&self, key: Key) -> Option<ConnId> {
        self.index.get(&key).copied()
    }

    /// Returns the connection, or our resolution (`asked`), with this number of ours.
    pub(super) fn by_local_id(&self, id: u32, asked: bool) -> Option<ConnId> {
        let found = self.find(Key::LocalId(id))?;
        let is_asked = self.get(found).is_some_and(|c| c.state == State::SidrSent);
        (is_asked == asked).then_some(found)
    }

    /// Gives a new connection or resolution its ID, and indexes and counts it. [`put`](Self::put) follows.
    pub(super) fn register(&mut self, mut c: Conn) -> Conn {
        c.id = ConnId(self.next_id);
        self.next_id += 1;
        if c.local_id != 0 {
            self.index.insert(Key::LocalId(c.local_id), c.id);
        }
        if let Some(listener) = c.listener {
            c.in_backlog = true;
            self.backlogs.take(listener, c.peer_group());
        }
        self.index.extend(c.id_key().map(|key| (key, c.id)));
        self.held_resolutions += usize::from(c.is_held_resolution());
        self.count(&c, c.state, true);
        c
    }

    /// Makes an active connection findable by the peer's numbers, which its REP has named.
    pub(super) fn index_remote(&mut self, c: &Conn) {
        let keys = c.id_key().into_iter().chain([c.qp_key()]);
        self.index.extend(keys.map(|key| (key, c.id)));
    }

    /// Enters a state: leaves the counts and indices that it has no part in, and stops timer and retransmission.
    pub(super) fn enter(&mut self, c: &mut Conn, state: State) {
        let before = core::mem::replace(&mut c.state, state);
        c.exchange = None;
        self.note(c, before, Some(state));
        self.count(c, before, false);
        self.count(c, state, true);
        self.set_timer(c, None);
        if !state.holds_qp() {
            self.unindex(c, c.qp_key());
        }
        if state == State::Over {
            self.forget_ids(c);
        }
    }

    /// Gives a connection that no peer's number is known of another communication ID.
    pub(super) fn renumber(&mut self, c: &mut Conn, local_id: u32) {
        self.forget_ids(c);
        c.local_id = local_id;
        self.index.insert(Key::LocalId(local_id), c.id);
    }

    pub(super) fn set_timer(&mut self, c: &mut Conn, at: Option<Instant>) {
        if let Some(old) = core::mem::replace(&mut c.timer, at) {
            self.timers.remove(&(old, c.id));
        }
        self.timers.extend(at.map(|at| (at, c.id)));
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Takes the connection or resolution of the earliest timer that is due. [`put`](Self::put) follows.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Conn> {
        let (_, id) = *self.timers.first().filter(|(at, _)| *at <= now)?;
        let mut c = self.take(id)?;
        self.set_timer(&mut c, None);
        Some(c)
    }

    /// Marks the connection or resolution as destroyed by the consumer.
    pub(super) fn detach(&mut self, c: &mut Conn) {
        self.held_resolutions -= usize::from(c.is_held_resolution());
        c.detached = Some(self.next_detached);
        let key = (c.validation.is_proven(), self.next_detached);
        self.detached[usize::from(c.is_resolution())].insert(key, c.id);
        self.next_detached += 1;
    }

    /// Removes the oldest destroyed connection or resolution if there are more than `max` of its kind. Returns whether there were.
    pub(super) fn forget_excess(&mut self, max: usize) -> bool {
        let excess = self.detached.iter().find(|pool| pool.len() > max);
        let oldest = excess.and_then(|pool| pool.first_key_value()).map(|(_, id)| *id);
        oldest.and_then(|id| self.take(id)).map(|c| self.remove(c)).is_some()
    }

    /// Removes a connection that was taken out.
    pub(super) fn remove(&mut self, mut c: Conn) {
        self.note(&c, c.state, None);
        self.count(&c, c.state, false);
        self.leave_backlog(&mut c);
        self.set_timer(&mut c, None);
        self.unindex(&c, c.qp_key());
        self.forget_ids(&c);
        self.held_resolutions -= usize::from(c.is_held_resolution());
        if let Some(seq) = c.detached {
            self.detached[usize::from(c.is_resolution())].remove(&(c.validation.is_proven(), seq));
        }
    }

    /// Removes a key unless it is another connection's.
    fn unindex(&mut self, c: &Conn, key: Key) {
        if self.find(key) == Some(c.id) {
            self.index.remove(&key);
        }
    }

    fn forget_ids(&mut self, c: &Conn) {
        self.unindex(c, Key::LocalId(c.local_id));
        if let Some(key) = c.id_key() {
            self.unindex(c, key);
        }
    }

    /// Counts a connection in or out of the peers' requests, or of ours.
    fn count(&mut self, c: &Conn, state: State, enter: bool) {
        let half_open = match state {
            _ if state.is_request() => {
                return match enter {
                    true => self.requests += 1,
                    false => self.requests -= 1,
                };
            }
            _ if state.is_half_open() => &mut self.half_open,
            State::SidrReceived => &mut self.questions,
            _ => return,
        };
        match enter {
            true => half_open.enter(c.id.0, c.peer_group(), c.validation.is_proven()),
            false => half_open.leave(c.id.0, c.peer_group()),
        }
    }
}
