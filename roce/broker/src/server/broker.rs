//! Event loop of the broker, and its routing of packets to members.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::IpAddr,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    time::Duration,
};

use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use roce_cm::mad::{Mad, Message};
use roce_net::now;
use roce_verbs::Instant;
use rustix::net::SocketFlags;
use slab::Slab;

use super::{
    Config,
    client::{Client, FIRST_WORD},
    ended::Gone,
    gsi::{Arrival, Gsi, Target, target},
    orphans::Orphans,
    ports::Ports,
    quota::{MAX_NAMELESS, Quotas, Throttle},
    requests::{Deferred, StatisticsQuery},
    slots::Slots,
    state::{self, Life, StateFile, boot_time},
    systemd::Notify,
    translations::Translations,
};
use crate::{
    bpf,
    group::{Group, Steering},
    proto::{Connection, Isolation, MAX_GROUPS, Meta, Place, ToBroker, ToClient},
    sys,
    track::Tracker,
    wire::{MAX_RECORD, Record, RecvError},
};

/// Offsets of management class, method and transaction ID in a MAD, bytes (IBA 13.4.3).
const MAD_CLASS: usize = 1;
const MAD_METHOD: usize = 3;
const MAD_TRANSACTION: usize = 8;
/// Response bit of a MAD's method.
const METHOD_RESPONSE: u8 = 0x80;
/// Largest number of records read from a client before other sources are served.
pub(super) const CLIENT_BUDGET: usize = 128;
/// Largest number of records read from a client whose process has exited. Its socket holds fewer.
const LAST_BUDGET: usize = 4096;
/// Time that members of a former broker have to rejoin after a start.
const REJOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after a start for which groups stay open for living members of a former broker that have not rejoined.
const ABSENT_TIMEOUT: Duration = Duration::from_secs(60);
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
    idle: Duration,
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
    orphans: Orphans,
    pub(super) deferred: Vec<Deferred>,
    pub(super) contested: Vec<Deferred>,
    /// Requests of this round that become `contested` after it.
    pub(super) newly_contested: Vec<Deferred>,
    pub(super) queries: Vec<StatisticsQuery>,
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
            queries: Vec::new(),
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
            || !self.queries.is_empty()
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
            ToBroker::Report { token, report } => self.on_report(key, token, report),
            ToBroker::Exiting => self.on_exiting(key),
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
        self.forget_queries(key);
        let Some(place) = client.place else { return };
        tracing::info!(pid = client.process.pid, name = client.name, clean, "a process leaves");
        match clean {
            true => self.gone.left(client.last),
            false => self.gone.lost(place, client.last),
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

    fn unwatch(&self, fd: RawFd) {
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

    /// Routes a packet that slot 0 received or a member handed over.
    fn route(&mut self, arrival: Arrival) {
        let Arrival { meta, bytes } = arrival;
        match target(&bytes) {
            Target::Nobody(counter) => self.count(counter),
            Target::Member(place) => self.forward(place, &meta, &bytes),
            Target::Gsi(mad) => {
                let Some(key) = self.group_of(meta.local) else {
                    return self.count("drop_local_address");
                };
                if !self.groups.get_mut(key).is_some_and(|gsi| gsi.is_sound(&meta, &bytes)) {
                    self.count("icrc_errors");
                    return self.look_for_translation(&meta, &bytes, mad.as_slice());
                }
                self.route_mad(key, &meta, &bytes, mad.as_slice());
            }
        }
    }

    fn route_mad(&mut self, group: usize, meta: &Meta, bytes: &[u8], mad: &[u8]) {
        if mad.get(MAD_CLASS) != Some(&roce_cm::mad::CLASS) {
            return match transaction_owner(mad) {
                Some(place) => self.forward(place, meta, bytes),
                None => self.count("drop_bad_mad"),
            };
        }
        let Ok(parsed) = Mad::parse(mad) else {
            return self.count("drop_bad_mad");
        };
        let message = parsed.message;
        self.count("rx_mads");
        let remote = meta.remote.ip();
        if self.tracker.admit(now(), remote, &message).is_err() {
            return self.count("drop_requests");
        }
        if let Some(place) = self.owner(meta, &message).and_then(|p| self.member_at(p)) {
            self.tracker.forwarded(now(), place, remote, &message);
            return self.forward(place, meta, bytes);
        }
        if self.orphans.observe(remote, &message) {
            return;
        }
        let now = now();
        if self.is_rejoining(now) {
            // It may be for a member that has not rejoined or reported its connections. The peer retries.
            return self.count("drop_settling");
        }
        if let Some(gsi) = self.groups.get_mut(group) {
            gsi.answer(now, meta, mad);
        }
        self.count("answered_mads");
    }

    /// Returns the place that a connection manager message is for.
    pub(super) fn owner(&self, meta: &Meta, message: &Message) -> Option<Place> {
        let by_id = |id: u32| Some(Place::of_comm_id(id)).filter(|p| p.is_valid());
        let by_service = |service: u64| {
            self.ports
                .listener(service, meta.local, |p| self.by_place.contains_key(&p))
        };
        match message {
            Message::Req(m) => {
                let known = self.tracker.owner(now(), meta.remote.ip(), message);
                known.or_else(|| by_service(m.service_id))
            }
            Message::SidrReq(m) => by_service(m.service_id),
            Message::SidrRep(m) => by_id(m.request_id),
            Message::Rej(m) => by_id(m.remote_comm_id).or_else(|| self.tracker.owner(now(), meta.remote.ip(), message)),
            Message::Mra(m) => by_id(m.remote_comm_id),
            Message::Rep(m) => by_id(m.remote_comm_id),
            Message::Rtu(m) => by_id(m.remote_comm_id),
            Message::Dreq(m) => by_id(m.remote_comm_id),
            Message::Drep(m) => by_id(m.remote_comm_id),
        }
    }

    /// Returns the place of the member that owns the numbers of `place`: that generation, or its whole slot.
    fn member_at(&self, place: Place) -> Option<Place> {
        let candidates = [place, Place::whole(place.slot)];
        candidates.into_iter().find(|p| self.by_place.contains_key(p))
    }

    /// Forwards a packet to the member at a place.
    pub(super) fn forward(&mut self, place: Place, meta: &Meta, bytes: &[u8]) {
        let key = self.member_at(place).and_then(|place| self.by_place.get(&place));
        let Some(client) = key.and_then(|key| self.clients.get(*key)) else {
            return self.count("drop_no_process");
        };
        let sent = client.try_send(&ToClient::Datagram(*meta), bytes);
        self.count(if sent { "forwarded" } else { "drop_process_busy" });
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
        self.end_queries(now);
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

    /// Closes groups unused for `idle`, so that a program without the broker can bind the port.
    fn close_idle_groups(&mut self, now: Instant) {
        let absent = !self.slots.absent().is_empty() && now < self.started + ABSENT_TIMEOUT;
        let idle: Vec<(usize, bool)> = self
            .groups
            .iter()
            .map(|(key, _)| (key, !absent && self.is_idle(key)))
            .collect();
        for (key, idle) in idle {
            let Some(gsi) = self.groups.get_mut(key) else { continue };
            gsi.idle_since = if idle { gsi.idle_since.or(Some(now)) } else { None };
        }
        let over = |g: &Gsi| g.idle_since.is_some_and(|since| now >= since + self.idle);
        let keys: Vec<usize> = self.groups.iter().filter(|(_, g)| over(g)).map(|(k, _)| k).collect();
        keys.into_iter().for_each(|key| self.close_group(key));
        // Restored groups are useful only as long as their former members may rejoin.
        if !absent && !self.is_rejoining(now) && now >= self.started + self.idle {
            for group in std::mem::take(&mut self.restored) {
                self.remove_vault(group.addr());
            }
        }
    }

    /// Returns whether no client has sockets of a group and no DREQ must be sent from it.
    fn is_idle(&self, key: usize) -> bool {
        let used = self.clients.iter().any(|(_, c)| c.opened.contains(&key));
        let has_dreqs = |g: &Gsi| self.orphans.needs(|local| g.covers(local));
        !used && !self.groups.get(key).is_some_and(has_dreqs)
    }

    fn close_group(&mut self, key: usize) {
        let Some(gsi) = self.groups.try_remove(key) else { return };
        tracing::info!(addr = %gsi.group.addr(), "closing an address");
        for fd in gsi.descriptors() {
            self.unwatch(fd);
        }
        self.remove_vault(gsi.group.addr());
    }

    /// Closes the selected groups that are unused, to make room for a requested one.
    ///
    /// Closes none while members of a former broker may rejoin.
    pub(super) fn close_unused(&mut self, which: impl Fn(&Gsi) -> bool) {
        if !self.slots.absent().is_empty() {
            return;
        }
        let keys = self.groups.iter().filter(|(_, g)| which(g)).map(|(key, _)| key);
        let keys: Vec<usize> = keys.filter(|key| self.is_idle(*key)).collect();
        keys.into_iter().for_each(|key| self.close_group(key));
    }

    /// Returns the number of groups that count for a user: those it uses, and unused ones that it requested.
    pub(super) fn groups_of(&self, uid: u32) -> usize {
        let uses = |key: &usize| self.clients.iter().any(|(_, c)| c.uid == uid && c.opened.contains(key));
        let counts = |(key, g): &(usize, &Gsi)| uses(key) || (g.owner == uid && self.is_idle(*key));
        self.groups.iter().filter(counts).count()
    }

    /// Makes room for another group of a user by closing unused ones.
    ///
    /// # Errors
    /// Counter and text of the refusal, if the user's quota or the broker's limit is exhausted.
    pub(super) fn make_room(&mut self, uid: u32) -> Result<(), (&'static str, String)> {
        if self.groups_of(uid) >= self.quotas.addresses {
            self.close_unused(|g| g.owner == uid);
        }
        if self.groups_of(uid) >= self.quotas.addresses {
            let max = self.quotas.addresses;
            let text = format!("user {uid} has {max} addresses open, which is its limit (--max-addresses)");
            return Err(("refused_addresses", text));
        }
        if self.groups.len() >= MAX_GROUPS {
            self.close_unused(|_| true);
        }
        match self.groups.len() < MAX_GROUPS {
            true => Ok(()),
            false => Err((
                "refused_addresses",
                format!("the broker has {MAX_GROUPS} addresses open, which is its limit"),
            )),
        }
    }

    /// Stores a group's vault in systemd's file descriptor store.
    pub(super) fn store_vault(&self, group: &Group) {
        if let Err(e) = self.notify.keep(group.addr(), group.vault()) {
            tracing::warn!("can't store the sockets with systemd: {e}");
        }
    }

    /// Removes a group's vault from systemd's file descriptor store.
    fn remove_vault(&self, addr: IpAddr) {
        if let Err(e) = self.notify.drop_kept(addr) {
            tracing::warn!("can't remove closed sockets from systemd's store: {e}");
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

/// Returns the place that a response of another management class is for, by its transaction ID. `None` for requests.
fn transaction_owner(mad: &[u8]) -> Option<Place> {
    let high: &[u8; 4] = mad.get(MAD_TRANSACTION..)?.first_chunk()?;
    let is_response = mad.get(MAD_METHOD)? & METHOD_RESPONSE != 0;
    let place = Place::of_comm_id(u32::from_be_bytes(*high));
    (is_response && place.is_valid()).then_some(place)
}

fn watch(poll: &Poll, fd: RawFd, source: Source, interest: Interest) -> io::Result<()> {
    poll.registry().register(&mut SourceFd(&fd), source.token(), interest)
}
