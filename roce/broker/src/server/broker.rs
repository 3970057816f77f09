//! Event loop of the broker.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use roce_net::now;
use roce_verbs::Instant;
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::SocketFlags,
};
use slab::Slab;

use super::{
    client::{Client, FIRST_WORD},
    config::Config,
    ended::Gone,
    gsi::Gsi,
    orphans::Orphans,
    ports::Ports,
    quota::{MAX_NAMELESS, Throttle},
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

/// Source of events.
#[derive(Clone, Copy)]
enum Source {
    Client(usize),
    Process(usize),
    Gsi(usize),
    Listener,
}

/// Broker: clients, groups (addresses), slots and connections of exited processes.
pub(super) struct Broker {
    pub(super) config: Config,
    listener: OwnedFd,
    /// Network namespace of the sockets that the broker hands out.
    pub(super) network: Option<u64>,
    pub(super) notify: Notify,
    state: StateFile,
    pub(super) steering: Steering,
    throttle: Throttle,
    /// Time when the steering programs were last attached again.
    last_reattached: Instant,
    pub(super) clients: Slab<Client>,
    pub(super) groups: Slab<Gsi>,
    /// Groups restored from systemd's file descriptor store whose address no member has requested yet.
    pub(super) restored: Vec<Group>,
    pub(super) slots: Slots,
    pub(super) ports: Ports,
    pub(super) tracker: Tracker,
    pub(super) orphans: Orphans,
    pub(super) translations: Translations,
    pub(super) gone: Gone,
    pub(super) counters: BTreeMap<&'static str, u64>,
    pub(super) started: Instant,
    /// Time since when the broker is unused.
    unused_since: Instant,
    /// Accepting failed: connections are pending, and are tried again at each tick.
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
        let state = StateFile::new(&config.dir);
        let mut slots = match state.read() {
            Some(slots) => slots,
            None => Slots::new(u32::from_le_bytes(random()?), state::namespace()),
        };
        slots.inherit(boot_time(), state::namespace(), state::is_alive);
        let steering = steering(config);
        let restored = vaults.into_iter().filter_map(|vault| Group::adopt(vault).ok());
        let restored = restored.filter(|group| group.steering() == steering).collect();
        let time = now();
        Ok(Self {
            config: config.clone(),
            steering,
            throttle: Throttle::default(),
            last_reattached: time,
            network: sys::network(listener.as_fd()),
            listener,
            notify,
            state,
            clients: Slab::new(),
            groups: Slab::new(),
            restored,
            slots,
            ports: Ports::default(),
            tracker: Tracker::default(),
            orphans: Orphans::default(),
            translations: Translations::default(),
            gone: Gone::default(),
            counters: BTreeMap::new(),
            started: time,
            unused_since: time,
            stalled: false,
            buffer: vec![0; MAX_RECORD],
        })
    }

    /// Returns whom the members have to trust.
    pub(super) fn isolation(&self) -> Isolation {
        match self.steering {
            Steering::Array => Isolation::Isolated,
            Steering::Index if self.config.shared.is_some() => Isolation::TrustDomain,
            Steering::Index => Isolation::OneUser,
        }
    }

    /// Notifies systemd that the broker is ready.
    pub(super) fn notify_ready(&self) {
        if let Err(e) = self.notify.say("READY=1", &[]) {
            tracing::warn!("can't notify systemd that the broker is ready: {e}");
        }
    }

    /// Runs the event loop until the broker has been unused for `linger`.
    pub(super) fn run(&mut self) -> io::Result<()> {
        loop {
            for source in self.poll()? {
                self.serve(source);
            }
            if self.housekeeping(now()) {
                return Ok(());
            }
        }
    }

    /// Waits for events. Returns their sources, the listener last: a new client may have the key of one that is removed in this round.
    fn poll(&self) -> io::Result<Vec<Source>> {
        let mut all = Vec::new();
        for (key, client) in &self.clients {
            all.push((Source::Client(key), client.socket.as_fd(), client.interest()));
            let pidfd = client.pidfd.iter();
            all.extend(pidfd.map(|fd| (Source::Process(key), fd.as_fd(), PollFlags::IN)));
        }
        for (key, gsi) in &self.groups {
            let fds = gsi.descriptors().into_iter();
            all.extend(fds.map(|fd| (Source::Gsi(key), fd, PollFlags::IN)));
        }
        if !self.stalled {
            all.push((Source::Listener, self.listener.as_fd(), PollFlags::IN));
        }
        let fds = all.iter().map(|(_, fd, events)| PollFd::from_borrowed_fd(*fd, *events));
        let mut fds: Vec<PollFd<'_>> = fds.collect();
        let timeout = self.timeout(now()).and_then(|t| Timespec::try_from(t).ok());
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(vec![]),
            Err(e) => return Err(e.into()),
        }
        let ready = all.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|((source, ..), _)| *source).collect())
    }

    fn timeout(&self, now: Instant) -> Option<Duration> {
        let mut waiting = self.clients.iter().flat_map(|(_, c)| &c.waiting);
        if waiting.any(|w| w.last_in.is_some()) {
            return Some(Duration::ZERO);
        }
        let needs_tick = self.stalled
            || !self.slots.absent().is_empty()
            || self
                .clients
                .iter()
                .any(|(_, c)| c.place.is_none() || !c.waiting.is_empty())
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
                let mut packets = Vec::new();
                if let Some(gsi) = self.groups.get_mut(key) {
                    gsi.receive(&mut packets);
                }
                for (meta, bytes) in packets {
                    self.route(&meta, &bytes);
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
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => {
                    self.stalled = false;
                    return;
                }
                Err(e) => {
                    // Retried at each tick. Warn once.
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
        let shared = self.config.shared.is_some();
        if !client.trusted && !shared && client.uid != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "it belongs to user {}, and this broker serves one user only",
                    client.uid
                ),
            ));
        }
        let uid = client.uid;
        if shared && self.of_user(uid).filter(|c| c.place.is_none()).count() >= MAX_NAMELESS {
            let text =
                || format!("user {uid} has {MAX_NAMELESS} connections without a place, the limit: closing a new one");
            self.report("refused_connects", text);
            return Ok(());
        }
        self.clients.insert(client);
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
    }

    fn take_record(&mut self, key: usize, record: Record<ToBroker>) {
        match record.message {
            ToBroker::Request { seq, request } => self.on_request(key, seq, request, record.fds),
            ToBroker::Datagram(meta) => {
                // Only members may hand packets over, and only for their own addresses. The source is not verified.
                if self.has_opened(key, meta.local) {
                    self.count("handed_over");
                    self.route(&meta, &record.payload);
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
        for conn in down.iter().filter_map(|id| self.clients[key].connections.remove(id)) {
            self.tracker.over(&conn);
        }
        let mut used = self.of_user(uid).map(|c| c.connections.len()).sum::<usize>();
        for conn in up {
            let known = self.clients[key].connections.contains_key(&conn.local_id);
            if !known && used >= self.config.quotas.connections {
                let max = self.config.quotas.connections;
                let text = || {
                    format!("user {uid} has {max} connections, the limit: not recording another (--max-connections)")
                };
                self.report("refused_connections", text);
            } else if place.covers(Place::of_comm_id(conn.local_id)) && self.has_opened(key, conn.local) {
                used += usize::from(!known);
                if let Some(former) = self.clients[key].connections.insert(conn.local_id, *conn) {
                    self.tracker.over(&former);
                }
                self.tracker.establish(conn);
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

    /// Returns the clients of a user.
    pub(super) fn of_user(&self, uid: u32) -> impl Iterator<Item = &Client> {
        let all = self.clients.iter().map(|(_, client)| client);
        all.filter(move |c| c.uid == uid)
    }

    /// Returns the client that has a place, or the whole slot that it is in.
    pub(super) fn member_at(&self, place: Place) -> Option<usize> {
        let has = |c: &Client| c.place.is_some_and(|own| own.covers(place));
        self.clients.iter().find(|(_, c)| has(c)).map(|(key, _)| key)
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
        let Some(place) = client.place else { return };
        tracing::info!(pid = client.process.pid, name = client.name, clean, "a process leaves");
        match clean {
            true => self.gone.left(client.page.as_ref()),
            false => self.gone.lost(place, client.page),
        }
        self.slots.release(boot_time(), place, clean);
        self.ports.remove_all(place);
        self.tracker.forget(place);
        let now = now();
        for conn in client.connections.into_values() {
            self.tracker.over(&conn);
            if !self.orphans.add(now, conn) {
                self.report("ends_not_told", || {
                    "too many connections of exited processes at once: some peers get no DREQ".into()
                });
            }
        }
        self.put_back(place);
        self.save();
    }

    /// Takes the sockets of a place back.
    fn put_back(&self, place: Place) {
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

    /// Adds a new or restored group. Returns its key. `owner` is the user of the process that requested the address.
    pub(super) fn add_group(&mut self, group: Group, owner: u32) -> io::Result<usize> {
        let gsi = Gsi::new(group, owner, random()?).map_err(|e| io::Error::other(e.to_string()))?;
        Ok(self.groups.insert(gsi))
    }

    /// Returns when to attach the steering programs again, if a member can detach one.
    fn next_reattach(&self) -> Option<Instant> {
        let detachable = self.steering == Steering::Array && self.clients.iter().any(|(_, c)| !c.opened.is_empty());
        detachable.then(|| self.last_reattached + REATTACH_INTERVAL)
    }

    /// Attaches the steering programs again.
    ///
    /// A member may have detached one, which causes no event. Packets then arrive at any socket of the group, and those of members drop
    /// them.
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
        let has_members = self.clients.iter().any(|(_, c)| c.place.is_some());
        !has_members && self.orphans.is_empty() && self.slots.absent().is_empty()
    }

    /// Runs timers and retries. Returns whether the broker must exit because it is unused.
    fn housekeeping(&mut self, now: Instant) -> bool {
        if self.stalled {
            self.accept();
        }
        self.expire_absent(now);
        self.retry_waiting();
        self.remove_silent(now);
        for out in self.orphans.poll(now) {
            if let Some(gsi) = self.group_of(out.local).and_then(|key| self.groups.get_mut(key)) {
                gsi.send(&out);
            }
            self.count("tx_dreqs_for_dead");
        }
        self.reattach_steering(now);
        self.close_idle_groups(now);
        if !self.is_unused() {
            self.unused_since = now;
        }
        let over = self
            .config
            .linger
            .is_some_and(|linger| now >= self.unused_since + linger);
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
            self.put_back(*place);
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
fn steering(config: &Config) -> Steering {
    if config.shared.is_none() {
        return Steering::Index;
    }
    let why = match bpf::probe() {
        Ok(()) if config.isolate => {
            tracing::info!("members are isolated: none can receive packets of another");
            return Steering::Array;
        }
        Ok(()) => "isolation is disabled by --trust-domain".into(),
        Err(e) => format!("can't load the BPF program, which requires CAP_BPF: {e}"),
    };
    tracing::warn!("members are not isolated: every user of this broker can read the packets of all others ({why})");
    Steering::Index
}
