//! Node: all that is reached by one NID.

mod connect;
mod drive;
mod jobs;
mod receive;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use roce_verbs::{
    Instant, TimerHeap,
    provider::{CmRef, Cx, DeviceIx, PdId, Provider, QpId, VerbsError},
};
use slab::Slab;

use crate::{
    buffer::Buffer,
    config::Config,
    conn::{ConnId, Connection, Cookie, Tx},
    event::{EntryId, Failure, JobId, Output},
    handshake::Identity,
    info::{ConnectionInfo, Counters},
    operation::{Get, Job},
    peer::Peer,
    portal::{Entry, Portals},
    proto::{Nid, PING_MATCH_BITS, PING_PORTAL, PORT},
};

/// All connections, portals and operations of a NID.
///
/// It does nothing by itself. Its user hands it completions and events of the provider, calls [`timeout`](Self::timeout) when
/// [`next_timeout`](Self::next_timeout) says so, takes what it tells from [`poll_output`](Self::poll_output), and ends each turn with
/// [`end_batch`](Self::end_batch), which posts what the turn has brought.
#[derive(Debug)]
pub struct Node {
    config: Config,
    us: Identity,
    listener: CmRef,
    stopping: bool,
    pds: BTreeMap<DeviceIx, PdId>,
    peers: BTreeMap<Nid, Peer>,
    conns: Slab<Connection>,
    by_qp: BTreeMap<QpId, ConnId>,
    by_cm: BTreeMap<CmRef, ConnId>,
    portals: Portals,
    jobs: BTreeMap<JobId, Job>,
    next_job: u64,
    next_cookie: Cookie,
    counters: Counters,
    /// Connections that have something to post, and peers that may want one.
    dirty: BTreeSet<ConnId>,
    waking: BTreeSet<Nid>,
    /// When to begin to connect again.
    retries: TimerHeap<Nid>,
    /// When to look for what has waited too long.
    look_at: Instant,
    out: VecDeque<Output>,
}

impl Node {
    /// Listens at a NID, whose address has to be one of the provider's. `incarnation`: greater than those of all nodes that were there
    /// before, as microseconds since 1970 are.
    ///
    /// # Errors
    /// When a setting is not possible, or the address is not ours or has a node already.
    pub fn listen(cx: &mut Cx<'_>, config: Config, nid: Nid, incarnation: u64) -> Result<Self, VerbsError> {
        config.check().map_err(|e| VerbsError::Invalid(e.into()))?;
        let listener = cx.provider.cm_listen((nid.address(), PORT).into(), 128)?;
        Ok(Self {
            look_at: cx.now + config.interval(),
            config,
            us: Identity {
                nid,
                stamp: incarnation,
            },
            listener,
            stopping: false,
            pds: BTreeMap::new(),
            peers: BTreeMap::new(),
            conns: Slab::new(),
            by_qp: BTreeMap::new(),
            by_cm: BTreeMap::new(),
            portals: Portals::default(),
            jobs: BTreeMap::new(),
            next_job: 1,
            next_cookie: 1,
            counters: Counters::default(),
            dirty: BTreeSet::new(),
            waking: BTreeSet::new(),
            retries: TimerHeap::default(),
            out: VecDeque::new(),
        })
    }

    /// Its NID.
    pub const fn nid(&self) -> Nid {
        self.us.nid
    }

    /// The connections.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.conns.iter().map(|(_, conn)| conn.info())
    }

    /// Counts since its start.
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// Operations that have not ended.
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// The next thing to tell its user.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// Lets operations of peers use memory.
    pub fn attach(&mut self, entry: Entry) -> EntryId {
        self.portals.attach(entry)
    }

    /// No operation begins on an entry from here on. [`Output::Unlinked`] says when all have ended.
    pub fn detach(&mut self, entry: EntryId) {
        if self.portals.detach(entry) {
            self.out.push_back(Output::Unlinked(entry));
        }
    }

    /// Begins to ask a node what it is: [`PingInfo`](crate::proto::PingInfo), as much of it as there is room for in `sink`.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn ping(&mut self, now: Instant, peer: Nid, sink: Buffer) -> Result<JobId, Failure> {
        let what = Get {
            peer,
            portal: PING_PORTAL,
            match_bits: PING_MATCH_BITS,
            offset: 0,
            sink,
        };
        self.get(now, &what)
    }

    /// Ends all connections. Whatever the provider has to say until they are gone is still to be handed over;
    /// [`is_stopped`](Self::is_stopped) says when.
    pub fn stop(&mut self, cx: &mut Cx<'_>) {
        self.stopping = true;
        cx.provider.cm_destroy(self.listener);
        let conns: Vec<ConnId> = self.conns.iter().map(|(id, _)| id).collect();
        for conn in conns {
            self.lose(cx.provider, conn, Failure::Stopping);
        }
        for peer in core::mem::take(&mut self.peers).into_values() {
            self.fail_all(peer.queue, &Failure::Stopping);
        }
        self.give_up(&Failure::Stopping, |_, _| true);
        self.free_domains(cx.provider);
    }

    /// Returns whether nothing is left of it in the provider.
    pub fn is_stopped(&self) -> bool {
        self.stopping && self.conns.is_empty()
    }

    fn free_domains(&mut self, provider: &mut dyn Provider) {
        if self.is_stopped() {
            for pd in core::mem::take(&mut self.pds).into_values() {
                provider.free_pd(pd);
            }
        }
    }

    fn fail_all(&mut self, queue: impl IntoIterator<Item = Tx>, why: &Failure) {
        for tx in queue {
            self.ended(tx.of(), Err(why.clone()));
        }
    }

    fn cookie(&mut self) -> Cookie {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        cookie
    }
}
