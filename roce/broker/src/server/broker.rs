//! Event loop of the broker.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::IpAddr,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    time::Duration,
};

use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use roce_net::now;
use roce_verbs::Instant;
use rustix::net::SocketFlags;
use slab::Slab;

use super::{
    Config,
    client::{Client, FIRST_WORD},
    ended::Gone,
    gsi::{Arrival, Gsi},
    orphans::Orphans,
    ports::Ports,
    quota::{MAX_NAMELESS, Quotas, Throttle},
    requests::Deferred,
    slots::Slots,
    state::{self, Life, StateFile, boot_time},
    systemd::Notify,
    translations::Translations,
};
use crate::{
    bpf,
    group::{Group, Steering},
    proto::{Connection, Isolation, Place, ToBroker},
    sys,
    track::Tracker,
    wire::{MAX_RECORD, Record, RecvError},
};

/// Largest number of records read from a client before other sources are served.
pub(super) const CLIENT_BUDGET: usize = 128;
/// Largest number of records read from a client whose process has exited. Its socket holds fewer.
pub(super) const LAST_BUDGET: usize = 4096;
/// Time that members of a former broker have to rejoin after a start.
const REJOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a new connection has to join. Until then it keeps the broker running.
const JOIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which the steering programs are attached again. A member that detaches one stops the others for so long.
const REATTACH_INTERVAL: Duration = Duration::from_millis(250);
/// Poll interval while there is work for which no event arrives.
const TICK: Duration = Duration::from_millis(100);

/// Event source; encoded in the poll's tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Source {
    Client(usize),
    Process(usize),
    Gsi(usize),
    /// Served last: a new client may reuse the key of one removed in this round, which may have further events.
    Listener,
}

impl Source {
    const fn token(self) -> Token {
        Token(match self {
            Self::Listener => 0,
            Self::Client(key) => (key << 2) | 1,
            Self::Process(key) => (key << 2) | 2,
            Self::Gsi(key) => (key << 2) | 3,
        })
    }

    const fn of(token: Token) -> Self {
        match token.0 & 3 {
            0 => Self::Listener,
            1 => Self::Client(token.0 >> 2),
            2 => Self::Process(token.0 >> 2),
            _ => Self::Gsi(token.0 >> 2),
        }
    }
}

/// Broker: clients, groups (addresses), slots and connections of exited processes.
pub(super) struct Broker {
    poll: Poll,
    listener: OwnedFd,
    /// Network namespace of the sockets that the broker hands out.
    pub(super) network: Option<u64>,
    pub(super) notify: Notify,
    state: StateFile,
    /// Time after which an unused broker exits. `None`: it never does.
    linger: Option<Duration>,
    /// Time after which an unused group is closed.
    pub(super) idle: Duration,
    shared: bool,
    pub(super) steering: Steering,
    pub(super) isolation: Isolation,
    pub(super) quotas: Quotas,
    throttle: Throttle,
    /// Time when the steering programs were last attached again.
    last_reattached: Instant,
    pub(super) clients: Slab<Client>,
    pub(super) by_place: HashMap<Place, usize>,
    pub(super) groups: Slab<Gsi>,
    /// Groups restored from systemd's file descriptor store whose address no member has requested yet.
    pub(super) restored: Vec<Group>,
    pub(super) slots: Slots,
    pub(super) ports: Ports,
    pub(super) tracker: Tracker,
    pub(super) orphans: Orphans,
    pub(super) deferred: Vec<Deferred>,
    pub(super) contested: Vec<Deferred>,
    /// Requests of this round that become `contested` after it.
    pub(super) newly_contested: Vec<Deferred>,
    pub(super) translations: Translations,
    pub(super) gone: Gone,
    pub(super) counters: BTreeMap<&'static str, u64>,
    pub(super) started: Instant,
    /// Time since when the broker is unused.
    unused_since: Instant,
    /// Sources with more to read. The poll is edge-triggered and does not report them again.
    ready: Vec<Source>,
    /// Accepting failed: connections are pending for which no further event arrives.
    stalled: bool,
    buffer: Vec<u8>,
}

/// Returns bytes from the system's random number generator.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| io::Error::other(e.to_string()))?;
    Ok(bytes)
}

impl Broker {
    pub(super) fn new(config: &Config, listener: OwnedFd, vaults: Vec<OwnedFd>, notify: Notify) -> io::Result<Self> {
        let poll = Poll::new()?;
        watch(&poll, listener.as_raw_fd(), Source::Listener, Interest::READABLE)?;
        let state = StateFile::new(&config.dir);
        let mut slots = match state.read() {
            Some(slots) => slots,
            None => Slots::new(u32::from_le_bytes(random()?), state::namespace()),
        };
        slots.inherit(boot_time(), state::namespace(), state::is_alive);
        let (steering, isolation) = steering(config);
        let restored = vaults.into_iter().filter_map(|vault| Group::adopt(vault).ok());
        let restored = restored.filter(|group| group.steering() == steering).collect();
        let time = now();
        Ok(Self {
            steering,
            isolation,
            quotas: config.quotas,
            throttle: Throttle::default(),
            last_reattached: time,
            idle: config.idle,
            poll,
            network: sys::network(listener.as_fd()),
            listener,
            notify,
            state,
            linger: config.linger,
            shared: config.shared.is_some(),
            clients: Slab::new(),
            by_place: HashMap::new(),
            groups: Slab::new(),
            restored,
            slots,
            ports: Ports::default(),
            tracker: Tracker::default(),
            orphans: Orphans::default(),
            deferred: Vec::new(),
            contested: Vec::new(),
            newly_contested: Vec::new(),
            translations: Translations::default(),
            gone: Gone::default(),
            counters: BTreeMap::new(),
            started: time,
            unused_since: time,
            ready: Vec::new(),
            stalled: false,
            buffer: vec![0; MAX_RECORD],
        })
    }

    /// Notifies systemd that the broker is ready.
    pub(super) fn notify_ready(&self) {
        if let Err(e) = self.notify.say("READY=1", &[]) {
            tracing::warn!("can't notify systemd that the broker is ready: {e}");
        }
    }

    /// Runs the event loop until the broker has been unused for `linger`.
    pub(super) fn run(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(256);
        loop {
            let timeout = self.timeout(now());
            if let Err(e) = self.poll.poll(&mut events, timeout)
                && e.kind() != io::ErrorKind::Interrupted
            {
                return Err(e);
            }
            let mut sources = std::mem::take(&mut self.ready);
            sources.extend(events.iter().map(|event| Source::of(event.token())));
            sources.sort_unstable();
            sources.dedup();
            for source in sources {
                self.serve(source);
            }
            if self.housekeeping(now()) {
                return Ok(());
            }
        }
    }

    fn timeout(&self, now: Instant) -> Option<Duration> {
        if !self.ready.is_empty() || !self.contested.is_empty() {
            return Some(Duration::ZERO);
        }
        let needs_tick = self.stalled
            || !self.deferred.is_empty()
            || !self.slots.absent().is_empty()
            || self.clients.iter().any(|(_, c)| c.place.is_none())
            || self.groups.iter().any(|(_, g)| g.idle_since.is_some())
            || !self.restored.is_empty()
            || self.is_unused();
        let tick = needs_tick.then_some(TICK);
        let next_dreq = self.orphans.next().map(|at| at.saturating_since(now));
        let next_reattach = self.next_reattach().map(|at| at.saturating_since(now));
        [tick, next_dreq, next_reattach].into_iter().flatten().min()
    }

    fn serve(&mut self, source: Source) {
        match source {
            Source::Listener => self.accept(),
            Source::Client(key) => {
                self.flush(key);
                self.serve_client(key, CLIENT_BUDGET);
            }
            Source::Process(key) => self.on_process_exit(key),
            Source::Gsi(key) => {
                let mut arrivals = Vec::new();
                if let Some(gsi) = self.groups.get_mut(key)
                    && gsi.receive(&mut arrivals)
                {
                    self.ready.push(source);
                }
                for arrival in arrivals {
                    self.route(arrival);
                }
            }
        }
    }

    pub(super) fn count(&mut self, name: &'static str) {
        *self.counters.entry(name).or_default() += 1;
    }

    /// Increments a counter and logs a warning, at a limited rate per counter.
    pub(super) fn report(&mut self, counter: &'static str, text: impl FnOnce() -> String) {
        self.count(counter);
        if let Some(suppressed) = self.throttle.pass(now(), counter) {
            tracing::warn!(counter, suppressed, "{}", text());
        }
    }

    fn accept(&mut self) {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
                Err(rustix::io::Errno::AGAIN) => {
                    self.stalled = false;
                    return;
                }
                Err(e) => {
                    // The poll is edge-triggered: retry at each tick, but warn once.
                    if !std::mem::replace(&mut self.stalled, true) {
                        tracing::warn!("a connection can't be accepted: {e}");
                    }
                    return;
                }
            };
            if let Err(e) = self.add_client(socket) {
                tracing::warn!("a new connection is closed: {e}");
            }
        }
    }

    pub(super) fn add_client(&mut self, socket: OwnedFd) -> io::Result<()> {
        let client = Client::new(socket, now(), u64::from_le_bytes(random()?))?;
        if !client.trusted && !self.shared && client.uid != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "it belongs to user {}, and this broker serves one user only",
                    client.uid
                ),
            ));
        }
        let uid = client.uid;
        let nameless = |(_, c): &(usize, &Client)| c.uid == uid && c.place.is_none();
        if self.shared && self.clients.iter().filter(nameless).count() >= MAX_NAMELESS {
            let text =
                || format!("user {uid} has {MAX_NAMELESS} connections without a place, the limit: closing a new one");
            self.report("refused_connects", text);
            return Ok(());
        }
        let entry = self.clients.vacant_entry();
        let key = entry.key();
        let both = Interest::READABLE | Interest::WRITABLE;
        watch(&self.poll, client.socket.as_raw_fd(), Source::Client(key), both)?;
        if let Some(pidfd) = &client.pidfd {
            watch(&self.poll, pidfd.as_raw_fd(), Source::Process(key), Interest::READABLE)?;
        }
        entry.insert(client);
        Ok(())
    }

    fn flush(&mut self, key: usize) {
        if let Some(client) = self.clients.get_mut(key)
            && client.flush().is_err()
        {
            self.remove(key, false);
        }
    }

    pub(super) fn serve_client(&mut self, key: usize, budget: usize) {
        for _ in 0..budget {
            let Some(client) = self.clients.get(key) else { return };
            match client.receive(&mut self.buffer) {
                Ok(record) => self.take_record(key, record),
                Err(RecvError::Empty) => return,
                Err(RecvError::Closed) => return self.remove(key, false),
                Err(RecvError::Malformed(text)) => {
                    tracing::warn!(
                        pid = client.process.pid,
                        "disconnecting a process that sent an invalid record: {text}"
                    );
                    self.count("protocol_errors");
                    return self.remove(key, false);
                }
            }
        }
        self.ready.push(Source::Client(key));
    }

    fn take_record(&mut self, key: usize, record: Record<ToBroker>) {
        match record.message {
            ToBroker::Request { seq, request } => self.on_request(key, seq, request, record.fds),
            ToBroker::Datagram(meta) => {
                // Only members may hand packets over, and only for their own addresses. The source is not verified.
                if self.has_opened(key, meta.local) {
                    self.count("handed_over");
                    self.route(Arrival {
                        meta,
                        bytes: record.payload,
                    });
                }
            }
            ToBroker::Connections { up, down } => self.on_connections(key, &up, &down),
            ToBroker::Spread => self.on_spread(key),
            ToBroker::Goodbye => self.remove(key, true),
        }
    }

    /// Records the connections that a member reports as established or ended.
    pub(super) fn on_connections(&mut self, key: usize, up: &[Connection], down: &[u32]) {
        let Some((place, uid)) = self.clients.get(key).and_then(|c| Some((c.place?, c.uid))) else {
            return;
        };
        for id in down {
            self.tracker.over(place, *id);
        }
        let mut used = self.of_user(uid).map(|place| self.tracker.count(place)).sum::<usize>();
        for conn in up {
            let known = self.tracker.knows(conn.local_id);
            if !known && used >= self.quotas.connections {
                let max = self.quotas.connections;
                let text = || {
                    format!("user {uid} has {max} connections, the limit: not recording another (--max-connections)")
                };
                self.report("refused_connections", text);
            } else if self.has_opened(key, conn.local) && self.tracker.establish(place, *conn) {
                used += usize::from(!known);
            } else {
                self.report("refused_foreign_connections", || {
                    format!("a process of user {uid} reports a connection that is not its own")
                });
            }
        }
    }

    /// A member uses all that it may of its place.
    fn on_spread(&mut self, key: usize) {
        if let Some(place) = self.clients.get(key).and_then(|c| c.place)
            && self.slots.spread(place)
        {
            self.save();
        }
    }

    /// Returns the places of a user's members.
    pub(super) fn of_user(&self, uid: u32) -> impl Iterator<Item = Place> {
        let of_user = self.clients.iter().filter(move |(_, c)| c.uid == uid);
        of_user.filter_map(|(_, c)| c.place)
    }

    /// Returns whether a client has a socket that receives packets to an address.
    fn has_opened(&self, key: usize, addr: IpAddr) -> bool {
        let opened = |c: &Client| {
            c.opened
                .iter()
                .any(|g| self.groups.get(*g).is_some_and(|g| g.covers(addr)))
        };
        self.clients.get(key).is_some_and(|c| c.place.is_some() && opened(c))
    }

    /// Removes a client whose process has exited, after processing the records that it had sent.
    pub(super) fn on_process_exit(&mut self, key: usize) {
        self.serve_client(key, LAST_BUDGET);
        self.remove(key, false);
    }

    /// Removes a client. `clean`: it has sent a Goodbye message.
    pub(super) fn remove(&mut self, key: usize, clean: bool) {
        let Some(client) = self.clients.try_remove(key) else {
            return;
        };
        self.unwatch(client.socket.as_raw_fd());
        if let Some(pidfd) = &client.pidfd {
            self.unwatch(pidfd.as_raw_fd());
        }
        self.forget_requests(key);
        let Some(place) = client.place else { return };
        tracing::info!(pid = client.process.pid, name = client.name, clean, "a process leaves");
        match clean {
            true => self.gone.left(client.page.as_ref()),
            false => self.gone.lost(place, client.page),
        }
        self.by_place.remove(&place);
        self.slots.release(boot_time(), place, clean);
        self.ports.remove_all(place);
        self.release_place(place);
        self.save();
    }

    /// Disconnects the connections of an exited process and takes its sockets back.
    fn release_place(&mut self, place: Place) {
        let now = now();
        for conn in self.tracker.take(place) {
            if !self.orphans.add(now, conn) {
                self.report("ends_not_told", || {
                    "too many connections of exited processes at once: some peers get no DREQ".into()
                });
            }
        }
        for (_, gsi) in &self.groups {
            if let Err(e) = gsi.group.put_back(place.slot) {
                tracing::warn!("can't empty the socket of an exited process: {e}");
            }
        }
    }

    /// Writes the owners of the places to the state file.
    pub(super) fn save(&mut self) {
        if let Err(e) = self.state.write(&self.slots) {
            tracing::warn!("can't write the state file: {e}");
        }
    }

    /// Returns whether members of a former broker may still rejoin or report their connections.
    pub(super) fn is_rejoining(&self, now: Instant) -> bool {
        let waiting = !self.slots.absent().is_empty() || self.clients.iter().any(|(_, c)| c.restoring);
        waiting && now < self.started + REJOIN_TIMEOUT
    }

    /// Adds a new or restored group. `owner` is the user of the process that requested the address.
    pub(super) fn add_group(&mut self, group: Group, owner: u32) -> io::Result<()> {
        let gsi = Gsi::new(group, owner, random()?).map_err(|e| io::Error::other(e.to_string()))?;
        let key = self.groups.vacant_key();
        for fd in gsi.descriptors() {
            watch(&self.poll, fd, Source::Gsi(key), Interest::READABLE)?;
        }
        self.groups.insert(gsi);
        // Packets that arrived before the sockets were registered cause no event.
        self.ready.push(Source::Gsi(key));
        Ok(())
    }

    pub(super) fn unwatch(&self, fd: RawFd) {
        // An error is harmless: the descriptor is closed next.
        let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
    }

    /// Returns when to attach the steering programs again, if a member can detach one.
    fn next_reattach(&self) -> Option<Instant> {
        let detachable = self.steering == Steering::Array && self.clients.iter().any(|(_, c)| !c.opened.is_empty());
        detachable.then(|| self.last_reattached + REATTACH_INTERVAL)
    }

    /// Attaches the steering programs again.
    ///
    /// A member may have detached one. Nothing tells of that: packets then arrive at any socket of the group, of which those
    /// of members drop them.
    fn reattach_steering(&mut self, now: Instant) {
        if self.next_reattach().is_none_or(|at| now < at) {
            return;
        }
        self.last_reattached = now;
        for (_, gsi) in &self.groups {
            if let Err(e) = gsi.group.steer_again() {
                tracing::warn!("can't attach the steering program: {e}");
            }
        }
    }

    /// Returns whether the broker has no members, no absent members, and no DREQs to send.
    ///
    /// Clients that only request statistics don't count.
    fn is_unused(&self) -> bool {
        self.by_place.is_empty() && self.orphans.is_empty() && self.slots.absent().is_empty()
    }

    /// Runs timers and retries. Returns whether the broker must exit because it is unused.
    fn housekeeping(&mut self, now: Instant) -> bool {
        if self.stalled {
            self.accept();
        }
        self.expire_absent(now);
        self.retry_deferred(now);
        self.remove_silent(now);
        for out in self.orphans.poll(now) {
            if let Some(gsi) = self.group_of(out.local).and_then(|key| self.groups.get_mut(key)) {
                gsi.send(&out);
            }
            self.counters
                .entry("tx_dreqs_for_dead")
                .and_modify(|n| *n += 1)
                .or_insert(1);
        }
        self.reattach_steering(now);
        self.close_idle_groups(now);
        if !self.is_unused() {
            self.unused_since = now;
        }
        let over = self.linger.is_some_and(|linger| now >= self.unused_since + linger);
        over && !self.awaits_join(now)
    }

    /// Returns whether a new connection may be about to join.
    fn awaits_join(&self, now: Instant) -> bool {
        let joins = |c: &Client| c.place.is_none() && !c.observes && now < c.since + JOIN_TIMEOUT;
        self.clients.iter().any(|(_, c)| joins(c))
    }

    /// Releases the places of members of a former broker that have exited or, if unknown, did not rejoin in time.
    fn expire_absent(&mut self, now: Instant) {
        if self.slots.absent().is_empty() {
            return;
        }
        let expired = now >= self.started + REJOIN_TIMEOUT;
        // A process in another PID namespace can't be looked up: only rejoining proves that it lives.
        let alive = |p| match state::life(p) {
            Life::Alive => true,
            Life::Dead => false,
            Life::Unknown => !expired,
        };
        let dead = self.slots.bury(boot_time(), alive);
        for place in &dead {
            self.release_place(*place);
        }
        if !dead.is_empty() {
            self.save();
        }
    }

    /// Disconnects clients that have not joined within [`FIRST_WORD`].
    pub(super) fn remove_silent(&mut self, now: Instant) {
        let silent = |c: &Client| c.place.is_none() && now >= c.since + FIRST_WORD;
        let keys: Vec<usize> = self.clients.iter().filter(|(_, c)| silent(c)).map(|(k, _)| k).collect();
        for key in keys {
            self.remove(key, false);
        }
    }
}

/// Chooses the steering program, and with it how members of different users are isolated: only the array isolates them.
fn steering(config: &Config) -> (Steering, Isolation) {
    if config.shared.is_none() {
        return (Steering::Index, Isolation::OneUser);
    }
    match bpf::probe() {
        Ok(()) if config.isolate => {
            tracing::info!("members are isolated: none can receive packets of another");
            (Steering::Array, Isolation::Isolated)
        }
        probed => {
            let why = probed.map_or_else(
                |e| format!("can't load the BPF program, which requires CAP_BPF: {e}"),
                |()| "isolation is disabled by --trust-domain".into(),
            );
            tracing::warn!(
                "members are not isolated: every user of this broker can read the packets of all others ({why})"
            );
            (Steering::Index, Isolation::TrustDomain)
        }
    }
}

fn watch(poll: &Poll, fd: RawFd, source: Source, interest: Interest) -> io::Result<()> {
    poll.registry().register(&mut SourceFd(&fd), source.token(), interest)
}
