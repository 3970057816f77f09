//! State of the process, and what each turn does.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use rand::{RngCore, rngs::StdRng};
use rds_local::SocketKey;
use roce::reactor::{Interest, Token, TurnCx};
use roce_net::socket_file::SocketFile;
use roce_verbs::{Instant, provider::Cx};
use rustix::net::sockopt::set_socket_passcred;
use slab::Slab;

use crate::{
    address::Address,
    config::Config,
    event::{Events, NodeEvent},
    info::Source,
    opening::{self, Opened},
    operation::Memories,
    program::{Counts, MAX_PACKET, Next, Program},
    quota::Quotas,
    stats::NodeStats,
};

/// Token of the listener. An entry's is its index and 1.
pub(crate) const LISTENER: Token = Token(0);
/// Connections that are accepted in a turn.
const ACCEPTS: usize = 64;
/// Time after which a program that has read something has counted it.
const RECHECK: Duration = Duration::from_millis(2);
/// Time that disconnecting may take at the end.
const GOODBYE: Duration = Duration::from_secs(3);

/// Request that a client waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pending {
    /// None: the next one may be read.
    Nothing,
    /// A bind, until its address is open.
    Bind,
    /// A free port of a destination.
    Port {
        /// Entry of the socket.
        socket: usize,
        to: SocketAddr,
    },
}

/// Control connection of a program.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) socket: OwnedFd,
    pub(crate) process: u32,
    pub(crate) pending: Pending,
    pub(crate) readable: bool,
    /// Number of the process's memory.
    pub(crate) memory: Option<u64>,
}

/// Descriptor that is watched.
#[derive(Debug)]
pub(crate) enum Entry {
    Client(Client),
    Program(Box<Program>),
}

/// Bind that waits for its address: client, socket.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) client: usize,
    pub(crate) key: SocketKey,
    pub(crate) addr: SocketAddr,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) config: Config,
    /// `None` while it ends: who comes then starts the next one.
    listener: Option<SocketFile>,
    is_accepting: bool,
    pub(crate) entries: Slab<Entry>,
    pub(crate) keys: BTreeMap<SocketKey, usize>,
    pub(crate) addrs: BTreeMap<IpAddr, Address>,
    pub(crate) opening: BTreeMap<IpAddr, Vec<Waiting>>,
    /// Clients that wait for a port.
    pub(crate) waiting: BTreeSet<usize>,
    pub(crate) quotas: Quotas,
    pub(crate) memories: Memories,
    pub(crate) counts: Counts,
    pub(crate) refused: u64,
    pub(crate) events: Events,
    pub(crate) rng: StdRng,
    pub(crate) scratch: Vec<u8>,
    /// Entries that have something to do.
    pub(crate) ready: BTreeSet<usize>,
    recheck: BTreeSet<usize>,
    recheck_at: Option<Instant>,
    /// When it ends, unless a program comes.
    idle_until: Option<Instant>,
    /// When it ends in any case.
    pub(crate) stopping: Option<Instant>,
}

/// Calls with the context of a turn.
pub(crate) fn with_cx<R>(turn: &mut TurnCx<'_, Opened>, rng: &mut StdRng, f: impl FnOnce(&mut Cx<'_>) -> R) -> R {
    f(&mut Cx {
        now: turn.now,
        provider: turn.device.provider(),
        random: &mut |out: &mut [u8]| rng.fill_bytes(out),
    })
}

impl Server {
    /// Serves a socket.
    pub(crate) fn new(
        turn: &mut TurnCx<'_, Opened>,
        config: Config,
        listener: SocketFile,
        (rng, events): (StdRng, Events),
    ) -> Self {
        // What is accepted asks, too; what was connected before does once it is accepted.
        if let Err(e) = set_socket_passcred(listener.listener(), true) {
            tracing::warn!("RDMA of programs is refused, as the system does not say who sends: {e}");
        }
        if let Err(e) = turn.sockets.register(listener.as_fd(), LISTENER, Interest::READABLE) {
            tracing::error!("the socket can't be watched: {e}");
            turn.stop();
        }
        Self {
            config,
            listener: Some(listener),
            is_accepting: true,
            entries: Slab::new(),
            keys: BTreeMap::new(),
            addrs: BTreeMap::new(),
            opening: BTreeMap::new(),
            waiting: BTreeSet::new(),
            quotas: Quotas::default(),
            memories: Memories::default(),
            counts: Counts::default(),
            refused: 0,
            events,
            rng,
            scratch: vec![0; MAX_PACKET + 1],
            ready: BTreeSet::new(),
            recheck: BTreeSet::new(),
            recheck_at: None,
            idle_until: None,
            stopping: None,
        }
    }

    /// A descriptor is ready.
    pub(crate) fn note_ready(&mut self, token: Token, readable: bool, writable: bool) {
        if token == LISTENER {
            self.is_accepting = true;
            return;
        }
        let index = token.0 - 1;
        match self.entries.get_mut(index) {
            Some(Entry::Client(client)) => client.readable |= readable,
            Some(Entry::Program(program)) => {
                program.readable |= readable;
                program.recheck |= writable;
            }
            None => return,
        }
        self.ready.insert(index);
    }

    fn accept(&mut self, turn: &TurnCx<'_, Opened>) {
        for _ in 0..ACCEPTS {
            let Some(file) = self.listener.as_ref().filter(|_| self.is_accepting) else {
                return;
            };
            match file.listener().accept() {
                Ok((socket, _)) => self.add_client(turn, socket.into()),
                Err(e) => {
                    self.is_accepting = false;
                    if e.kind() != io::ErrorKind::WouldBlock {
                        tracing::warn!("a program can't be accepted: {e}");
                    }
                }
            }
        }
    }

    fn add_client(&mut self, turn: &TurnCx<'_, Opened>, socket: OwnedFd) {
        let Ok((process, uid)) = roce_broker::peer_credentials(socket.as_fd()) else {
            return;
        };
        let own = rustix::process::geteuid().as_raw();
        if uid != own {
            self.refused += 1;
            tracing::info!("process {process} of user {uid} is refused");
            return;
        }
        if !self.quotas.add_connection(process, &self.config.limits) {
            return self.limit_reached(turn, process, "connections to the node");
        }
        // Without it the process gets no RDMA.
        let _ = set_socket_passcred(&socket, true);
        let client = Client {
            socket,
            process,
            pending: Pending::Nothing,
            readable: true,
            memory: None,
        };
        if self.add(turn, Entry::Client(client)).is_none() {
            self.quotas.remove_connection(process);
        }
    }

    /// A process is refused for a limit.
    pub(crate) fn limit_reached(&mut self, turn: &TurnCx<'_, Opened>, process: u32, what: &'static str) {
        self.refused += 1;
        self.events.report(turn.now, NodeEvent::Limit { process, what });
    }

    /// Adds an entry and watches it.
    pub(crate) fn add(&mut self, turn: &TurnCx<'_, Opened>, entry: Entry) -> Option<usize> {
        let slot = self.entries.vacant_entry();
        let index = slot.key();
        let (fd, interest) = match &entry {
            Entry::Client(client) => (client.socket.as_fd(), Interest::READABLE),
            Entry::Program(program) => (program.end.as_fd(), Interest::READABLE | Interest::WRITABLE),
        };
        if let Err(e) = turn.sockets.register(fd, Token(index + 1), interest) {
            tracing::warn!("a program's descriptor can't be watched: {e}");
            return None;
        }
        slot.insert(entry);
        self.ready.insert(index);
        Some(index)
    }

    /// Removes an entry, and what hangs on it.
    pub(crate) fn close(&mut self, turn: &TurnCx<'_, Opened>, index: usize) {
        let Some(entry) = self.entries.try_remove(index) else {
            return;
        };
        self.ready.remove(&index);
        self.recheck.remove(&index);
        self.waiting.remove(&index);
        match entry {
            Entry::Client(client) => {
                let _ = turn.sockets.deregister(client.socket.as_fd());
                self.quotas.remove_connection(client.process);
                if let Some(number) = client.memory {
                    self.memories.remove(number);
                }
                for waiting in self.opening.values_mut() {
                    waiting.retain(|waiting| waiting.client != index);
                }
            }
            Entry::Program(program) => {
                let _ = turn.sockets.deregister(program.end.as_fd());
                self.keys.remove(&program.key);
                self.quotas.remove_socket(program.process, program.reserved());
                if let Some((addr, id)) = program.at
                    && let Some(address) = self.addrs.get_mut(&addr)
                {
                    address.sockets.remove(&id);
                    let _ = address.node.close(id);
                }
                // Clients that wait for it hear that it is gone.
                self.ready.extend(self.waiting_for(index));
            }
        }
    }

    /// Closes the sockets of a process that it has closed, though the events for that come later. Returns whether there were any.
    pub(crate) fn close_hung_up(&mut self, turn: &mut TurnCx<'_, Opened>, process: u32) -> bool {
        let gone = |(index, entry): (usize, &Entry)| match entry {
            Entry::Program(program) if program.process == process && program.is_hung_up() => Some(index),
            _ => None,
        };
        let gone: Vec<usize> = self.entries.iter().filter_map(gone).collect();
        for index in &gone {
            if let Some(Entry::Program(program)) = self.entries.get_mut(*index) {
                program.readable = true;
            }
            self.read_program(turn, *index);
        }
        !gone.is_empty()
    }

    /// Clients that wait until a socket may send.
    pub(crate) fn waiting_for(&self, socket: usize) -> Vec<usize> {
        let is_of = |index: &usize| match self.entries.get(*index) {
            Some(Entry::Client(client)) => matches!(client.pending, Pending::Port { socket: of, .. } if of == socket),
            _ => false,
        };
        self.waiting.iter().copied().filter(is_of).collect()
    }

    pub(crate) fn report_open(&mut self, turn: &mut TurnCx<'_, Opened>, addr: IpAddr) {
        let mut devices = turn.device.provider().devices().iter();
        let owner = devices.find(|caps| caps.addrs.contains(&addr));
        let device = owner.and_then(|caps| caps.name.as_deref()).map(str::to_owned);
        self.events.report(turn.now, NodeEvent::Opened { addr, device });
    }

    /// Opens an address, unless it is open or about to be.
    pub(crate) fn open(&mut self, turn: &mut TurnCx<'_, Opened>, addr: IpAddr) {
        if self.addrs.contains_key(&addr) {
            self.report_open(turn, addr);
        } else if let std::collections::btree_map::Entry::Vacant(entry) = self.opening.entry(addr) {
            entry.insert(Vec::new());
            opening::open(turn, &self.config, addr);
        }
    }

    /// Returns the present numbers.
    pub(crate) fn stats(&self, turn: &mut TurnCx<'_, Opened>) -> NodeStats {
        NodeStats {
            counters: self.counters(),
            own_counters: self.own_counters(),
            sockets: self.keys.len(),
            connections: self.connections(),
            unread: self.addrs.values().map(|address| address.node.unread_bytes()).sum(),
            turns: turn.stats(),
        }
    }

    /// Does what is due.
    pub(crate) fn timeout(&mut self, turn: &mut TurnCx<'_, Opened>) {
        let now = turn.now;
        for address in self.addrs.values_mut() {
            if address.node.next_timeout().is_some_and(|at| at <= now) {
                address.record();
                with_cx(turn, &mut self.rng, |cx| address.node.timeout(cx));
            }
        }
        if self.recheck_at.is_some_and(|at| at <= now) {
            self.recheck_at = None;
            self.ready.append(&mut self.recheck);
        }
    }

    /// Ends a turn: takes what programs send, records, hands out what has come, and posts.
    pub(crate) fn end_turn(&mut self, turn: &mut TurnCx<'_, Opened>) {
        self.accept(turn);
        self.take_changes(turn.now);
        let ready = std::mem::take(&mut self.ready);
        for index in &ready {
            match self.entries.get_mut(*index) {
                Some(Entry::Client(_)) => self.serve(turn, *index),
                Some(Entry::Program(_)) => self.read_program(turn, *index),
                None => {}
            }
        }
        // Before anything of this turn is handed out or posted.
        self.addrs.values_mut().for_each(Address::record);
        for index in &ready {
            self.write_program(turn, *index);
        }
        for address in self.addrs.values_mut() {
            with_cx(turn, &mut self.rng, |cx| address.node.end_batch(cx));
        }
        self.take_changes(turn.now);
        self.show_congestion();
        self.end_if_idle(turn);
    }

    fn take_changes(&mut self, now: Instant) {
        for address in self.addrs.values_mut() {
            self.ready.extend(address.take_outputs(now, &mut self.events));
        }
    }

    fn read_program(&mut self, turn: &mut TurnCx<'_, Opened>, index: usize) {
        let Some(Entry::Program(program)) = self.entries.get_mut(index) else {
            return;
        };
        let address = program.at.and_then(|(addr, _)| self.addrs.get_mut(&addr));
        let node = address.map(|address| &mut address.node);
        let next = program.send(node, &self.memories, &mut self.scratch, &mut self.counts);
        self.go_on(turn, index, next);
        for client in self.waiting_for(index) {
            self.serve(turn, client);
        }
    }

    fn write_program(&mut self, turn: &TurnCx<'_, Opened>, index: usize) {
        let Some(Entry::Program(program)) = self.entries.get_mut(index) else {
            return;
        };
        let Some((addr, id)) = program.at else { return };
        let Some(address) = self.addrs.get_mut(&addr) else {
            return;
        };
        let is_unread = program.note_read(&mut address.node);
        let next = program.receive(&mut address.node);
        if std::mem::take(&mut program.recheck) && is_unread {
            self.recheck.insert(index);
            self.recheck_at.get_or_insert(turn.now + RECHECK);
        }
        // From now on changes are reported again.
        if address
            .node
            .poll(id)
            .is_ok_and(|now| now.uncongested && now.was_refused)
        {
            program.wake();
        }
        self.go_on(turn, index, next);
    }

    fn go_on(&mut self, turn: &TurnCx<'_, Opened>, index: usize, next: Next) {
        match next {
            Next::Wait => {}
            Next::More => drop(self.ready.insert(index)),
            Next::Close => self.close(turn, index),
        }
    }

    /// Pages of sockets say whether their programs have to ask before they send.
    fn show_congestion(&mut self) {
        for address in self.addrs.values_mut() {
            let is_congested = address.node.some_port_is_congested();
            if std::mem::replace(&mut address.is_congested, is_congested) == is_congested {
                continue;
            }
            for index in address.sockets.values() {
                if let Some(Entry::Program(program)) = self.entries.get(*index) {
                    program.page.set_some_port_is_congested(is_congested);
                }
            }
        }
    }

    /// Ends some time after the last program, when peers have what was sent.
    fn end_if_idle(&mut self, turn: &mut TurnCx<'_, Opened>) {
        if let Some(deadline) = self.stopping {
            let is_done = self.addrs.values().all(|address| address.node.is_stopped());
            if is_done || turn.now >= deadline {
                turn.stop();
            }
            return;
        }
        let Some(linger) = self.config.linger else { return };
        if !self.entries.is_empty() || !self.opening.is_empty() {
            self.idle_until = None;
            return;
        }
        let until = *self.idle_until.get_or_insert(turn.now + linger);
        let is_flushed = || self.addrs.values().all(|address| address.node.is_idle());
        if turn.now >= until && (is_flushed() || turn.now >= until + self.config.flush) {
            self.stop(turn);
        }
    }

    /// Begins to end.
    pub(crate) fn stop(&mut self, turn: &mut TurnCx<'_, Opened>) {
        if self.stopping.is_none() {
            self.stopping = Some(turn.now + GOODBYE);
            if let Some(file) = self.listener.take() {
                let _ = turn.sockets.deregister(file.as_fd());
            }
            for address in self.addrs.values_mut() {
                with_cx(turn, &mut self.rng, |cx| address.node.stop(cx));
            }
        }
    }

    /// When [`timeout`](Self::timeout) or the end of a turn is due.
    pub(crate) fn next_timeout(&self, now: Instant) -> Option<Instant> {
        let of_nodes = self.addrs.values().filter_map(|address| address.node.next_timeout());
        // When the first time has passed, peers are waited for.
        let idle = self
            .idle_until
            .map(|until| if until > now { until } else { until + self.config.flush });
        of_nodes
            .chain(self.recheck_at)
            .chain(idle.filter(|_| self.stopping.is_none()))
            .chain(self.stopping)
            .min()
    }
}
