//! Node: all sockets and connections of some addresses.

mod connect;
mod deliver;
mod drive;
mod list;
mod rdma;
mod region;
mod sockets;

use core::net::{IpAddr, SocketAddr};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use roce_verbs::{
    TimerHeap,
    provider::{CmRef, Cx, DeviceIx, MrId, PdId, Provider, QpId, VerbsError},
};
use slab::Slab;

use crate::{
    config::Config,
    conn::{Broken, Connection, Link, LinkId, Phase, Refused},
    counters::Counters,
    key::PairKey,
    proto::{CongestionMap, PORT_V4, PORT_V6},
    socket::{Socket, SocketId},
};

use region::Region;

/// Report of a node to its user.
#[derive(Debug)]
pub enum Output {
    /// A socket has become readable or writable, perhaps; once until [`Node::poll`] is asked.
    Changed(SocketId),
    /// A connection stands.
    Up(PairKey),
    /// A connection, or an attempt to connect, ended. It begins again when there is something to send.
    Down(PairKey, Broken),
    /// A peer counts its messages from the beginning: it was started again. Messages that it has had before may come to it twice.
    Restarted(PairKey),
    /// A port of this node has become congested: its socket has more unread bytes than its receive buffer.
    Congested(SocketAddr),
    /// A peer has congested ports now, and had none.
    PeerCongested(IpAddr),
    /// A connect request was refused.
    Refused {
        /// Its sender.
        peer: IpAddr,
        /// Why.
        why: Refused,
    },
}

/// State of a connection that has to outlive the node, so that after a restart messages come neither twice nor not at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PairState {
    /// Sequence number of the next message to the peer.
    pub next_send: u64,
    /// Sequence number after the highest one that has come from it.
    pub next_receive: u64,
}

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionInfo {
    /// Its name.
    pub key: PairKey,
    /// A queue pair carries it.
    pub is_up: bool,
    /// It is being connected.
    pub is_connecting: bool,
    /// It holds a message until sockets of this node have read.
    pub is_stalled: bool,
    /// Messages that wait to be sent.
    pub waiting: usize,
    /// Messages that the peer has not acknowledged.
    pub unacked: usize,
    /// Sequence numbers.
    pub sequences: PairState,
}

/// Message that a node has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageInfo {
    /// Sequence number of its connection.
    pub sequence: u64,
    /// Bytes of data.
    pub len: usize,
    /// Sender.
    pub from: SocketAddr,
    /// Receiver.
    pub to: SocketAddr,
    /// Type of service of its connection.
    pub tos: u8,
}

/// All sockets and connections of a node's addresses.
///
/// It does nothing by itself. Its user hands it completions and events of the provider, calls [`timeout`](Self::timeout) when
/// [`next_timeout`](Self::next_timeout) says so, takes what it tells from [`poll_output`](Self::poll_output), and ends each turn with
/// [`end_batch`](Self::end_batch), which posts what the turn has brought. Calls for sockets never wait.
#[derive(Debug)]
pub struct Node {
    config: Config,
    addrs: Vec<IpAddr>,
    listeners: Vec<CmRef>,
    /// The listeners are gone, and the connections are going.
    stopping: bool,
    pds: BTreeMap<DeviceIx, PdId>,
    connections: BTreeMap<PairKey, Connection>,
    /// Of connections that were known before this node was started.
    former: BTreeMap<PairKey, PairState>,
    links: Slab<Link>,
    by_qp: BTreeMap<QpId, LinkId>,
    by_cm: BTreeMap<CmRef, LinkId>,
    /// Memory of sockets that peers may use, by address of the node and key.
    regions: BTreeMap<(IpAddr, u32), Region>,
    /// Registrations of regions that are freed.
    freed_regions: Vec<MrId>,
    sockets: Slab<Socket>,
    bound: BTreeMap<SocketAddr, SocketId>,
    /// Congested ports of our addresses.
    maps: BTreeMap<IpAddr, CongestionMap>,
    /// Congested ports of peers.
    peers: BTreeMap<IpAddr, CongestionMap>,
    /// Addresses that have a congested port.
    congested: BTreeSet<IpAddr>,
    /// Maps of peers, and of our addresses when a port is free again.
    maps_received: u64,
    /// Bytes that sockets have not read.
    unread: usize,
    /// Sockets and connections that wait for sockets of this node to read.
    starved: Vec<SocketId>,
    stalled: BTreeSet<PairKey>,
    /// Connections that have something to post.
    dirty: BTreeSet<PairKey>,
    /// Deadlines of connections.
    timers: TimerHeap<PairKey>,
    out: VecDeque<Output>,
    counters: Counters,
}

impl Node {
    /// Listens at these addresses. `former`: what a node at these addresses had when it ended.
    ///
    /// # Errors
    /// When a setting is not possible, or an address is not ours or has an RDS node already.
    pub fn listen(
        cx: &mut Cx<'_>,
        config: Config,
        addrs: &[IpAddr],
        former: impl IntoIterator<Item = (PairKey, PairState)>,
    ) -> Result<Self, VerbsError> {
        config.check().map_err(|e| VerbsError::Invalid(e.into()))?;
        let mut node = Self {
            config,
            addrs: addrs.to_vec(),
            listeners: Vec::new(),
            stopping: false,
            pds: BTreeMap::new(),
            connections: BTreeMap::new(),
            former: former.into_iter().collect(),
            links: Slab::new(),
            by_qp: BTreeMap::new(),
            by_cm: BTreeMap::new(),
            regions: BTreeMap::new(),
            freed_regions: Vec::new(),
            sockets: Slab::new(),
            bound: BTreeMap::new(),
            maps: addrs.iter().map(|addr| (*addr, CongestionMap::default())).collect(),
            peers: BTreeMap::new(),
            congested: BTreeSet::new(),
            maps_received: 0,
            unread: 0,
            starved: Vec::new(),
            stalled: BTreeSet::new(),
            dirty: BTreeSet::new(),
            timers: TimerHeap::default(),
            out: VecDeque::new(),
            counters: Counters::default(),
        };
        for addr in addrs {
            match cx.provider.cm_listen(SocketAddr::new(*addr, port_of(*addr)), 128) {
                Ok(listener) => node.listeners.push(listener),
                Err(e) => {
                    node.listeners
                        .iter()
                        .for_each(|listener| cx.provider.cm_destroy(*listener));
                    return Err(e);
                }
            }
        }
        Ok(node)
    }

    /// Its addresses.
    pub fn addrs(&self) -> &[IpAddr] {
        &self.addrs
    }

    /// Its counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// States of connections that have to outlive it: of its own that have had messages, and of those of former nodes that it has not
    /// needed.
    pub fn pair_states(&self) -> impl Iterator<Item = (PairKey, PairState)> {
        let former = self.former.iter().map(|(key, state)| (*key, *state));
        let used = self.connections.values().filter(|c| !c.is_unused(&self.config));
        used.map(|c| (c.key, c.sequences())).chain(former)
    }

    /// The connections.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.connections.values().map(|connection| {
            let (waiting, unacked) = connection.queue.lens();
            ConnectionInfo {
                key: connection.key,
                is_up: connection.phase.link().is_some(),
                is_connecting: matches!(connection.phase, Phase::Connecting(_) | Phase::Accepting(_)),
                is_stalled: connection.held.is_some(),
                waiting,
                unacked,
                sequences: connection.sequences(),
            }
        })
    }

    /// Returns whether it has nothing to send, and no acknowledgement to wait for.
    pub fn is_idle(&self) -> bool {
        let done = |c: &Connection| c.queue.is_sent() && c.queue.is_acked();
        let operates = |link: &Link| !link.is_closing && !link.operations.is_empty();
        self.connections.values().all(done) && !self.links.iter().any(|(_, link)| operates(link))
    }

    /// Connections that have something to post, or have received something, since [`end_batch`](Self::end_batch). Their states are to be
    /// recorded before their messages are handed out, and before that call.
    pub fn touched(&self) -> impl Iterator<Item = (PairKey, PairState)> + use<'_> {
        let states = self.dirty.iter().filter_map(|key| self.connections.get(key));
        states.map(|connection| (connection.key, connection.sequences()))
    }

    /// State of a connection that has to outlive the node.
    pub fn pair_state(&self, key: PairKey) -> Option<PairState> {
        self.connections.get(&key).map(Connection::sequences)
    }

    /// Returns whether something was asked of it that [`end_batch`](Self::end_batch) has to do.
    pub fn wants_turn(&self) -> bool {
        !self.dirty.is_empty() || !self.freed_regions.is_empty()
    }

    /// The next thing to tell its user.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// Ends all connections. What was not acknowledged may or may not have come. Whatever the provider has to say until they are gone is
    /// still to be handed over; [`is_stopped`](Self::is_stopped) says when.
    pub fn stop(&mut self, cx: &mut Cx<'_>) {
        self.stopping = true;
        self.listeners
            .iter()
            .for_each(|listener| cx.provider.cm_destroy(*listener));
        self.connections.clear();
        self.dirty.clear();
        self.timers = TimerHeap::default();
        let links: Vec<LinkId> = self.links.iter().map(|(id, _)| id).collect();
        for link in links {
            self.close_link(cx.provider, link);
        }
        let regions = core::mem::take(&mut self.regions);
        self.freed_regions.extend(regions.into_values().map(|region| region.mr));
        self.deregister_freed(cx.provider);
        self.free_domains(cx.provider);
    }

    /// Returns whether nothing is left of it in the provider.
    pub fn is_stopped(&self) -> bool {
        self.stopping && self.links.is_empty()
    }

    fn free_domains(&mut self, provider: &mut dyn Provider) {
        if self.is_stopped() {
            for pd in core::mem::take(&mut self.pds).into_values() {
                provider.free_pd(pd);
            }
        }
    }

    /// The connection of a pair, a new one if there is none; `None` if there may be no more.
    fn connection(&mut self, key: PairKey) -> Option<&mut Connection> {
        if !self.connections.contains_key(&key) {
            if self.connections.len() >= self.config.max_connections {
                return None;
            }
            let former = self.former.remove(&key);
            let first = former
                .map_or(0, |former| former.next_send)
                .max(self.config.first_sequence);
            let next = former.map_or(1, |former| former.next_receive);
            let connection = Connection::new(key, &self.config, first, next);
            self.connections.insert(key, connection);
        }
        self.connections.get_mut(&key)
    }

    /// Notes whether a map has a congested port now. Returns whether that is new.
    fn note_map(congested: &mut BTreeSet<IpAddr>, addr: IpAddr, map: &CongestionMap) -> bool {
        match map.is_empty() {
            true => {
                congested.remove(&addr);
                false
            }
            false => congested.insert(addr),
        }
    }

    fn tell(out: &mut VecDeque<Output>, (id, socket): (SocketId, &mut Socket)) {
        if socket.tell() {
            out.push_back(Output::Changed(id));
        }
    }
}

/// RDMA_CM's port of connections from or to an address.
fn port_of(addr: IpAddr) -> u16 {
    match addr {
        IpAddr::V4(_) => PORT_V4,
        IpAddr::V6(_) => PORT_V6,
    }
}
