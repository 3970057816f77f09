//! The broker's event loop, and what it does with packets.

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
    requests::{Deferred, Question},
    slots::Slots,
    state::{self, Life, StateFile, boot_time},
    systemd::Notify,
};
use crate::{
    bpf,
    group::{Group, Steering},
    proto::{Connection, Isolation, MAX_GROUPS, Meta, Place, ToBroker, ToClient},
    sys,
    track::Tracker,
    wire::{MAX_RECORD, Record, RecvError},
};

/// Where management datagrams have their class, method and transaction ID (IBA 13.4.3).
const MAD_CLASS: usize = 1;
const MAD_METHOD: usize = 3;
const MAD_TRANSACTION: usize = 8;
/// The method is an answer.
const METHOD_RESPONSE: u8 = 0x80;
/// Records of one client in a row.
pub(super) const CLIENT_BUDGET: usize = 128;
/// Records of one whose process has ended: more than its socket holds.
const LAST_BUDGET: usize = 4096;
/// How long members of a former broker are waited for.
const SETTLE: Duration = Duration::from_secs(5);
/// How long groups stay open for members of a former broker that live and do not come back.
const ABSENCE: Duration = Duration::from_secs(60);
/// Who has connected may be about to join for so long.
const NEWCOMER: Duration = Duration::from_secs(2);
/// How often a steering program is attached anew at most.
const STEER: Duration = Duration::from_secs(1);
/// How often is looked after what no event tells.
const TICK: Duration = Duration::from_millis(100);

/// What a token of the poll stands for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Source {
    Client(usize),
    Process(usize),
    Gsi(usize),
    /// The last: a new client may get the key of one that is removed before, of which there may be more events.
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

/// See the module.
pub(super) struct Broker {
    poll: Poll,
    listener: OwnedFd,
    /// Network namespace of the sockets that it hands out.
    pub(super) network: Option<u64>,
    pub(super) notify: Notify,
    state: StateFile,
    linger: Option<Duration>,
    /// How long a group stays open that nobody uses.
    idle: Duration,
    shared: bool,
    pub(super) steering: Steering,
    pub(super) isolation: Isolation,
    pub(super) quotas: Quotas,
    throttle: Throttle,
    /// When steering programs were attached anew last.
    steered: Instant,
    pub(super) clients: Slab<Client>,
    pub(super) by_place: HashMap<Place, usize>,
    pub(super) groups: Slab<Gsi>,
    /// Vaults that systemd kept, until their address is asked for.
    pub(super) kept: Vec<Group>,
    pub(super) slots: Slots,
    pub(super) ports: Ports,
    pub(super) tracker: Tracker,
    orphans: Orphans,
    pub(super) deferred: Vec<Deferred>,
    pub(super) contested: Vec<Deferred>,
    /// Becomes `contested` after this round.
    pub(super) asked_now: Vec<Deferred>,
    pub(super) questions: Vec<Question>,
    pub(super) gone: Gone,
    pub(super) counters: BTreeMap<&'static str, u64>,
    pub(super) started: Instant,
    /// Since when there was nothing to do.
    unused_since: Instant,
    /// Sources with more to read, although the poll does not tell again.
    again: Vec<Source>,
    /// Connections wait that could not be accepted.
    stalled: bool,
    buffer: Vec<u8>,
}

/// Bytes from the system's random number generator.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| io::Error::other(e.to_string()))?;
    Ok(bytes)
}

impl Broker {
    pub(super) fn new(config: &Config, listener: OwnedFd, kept: Vec<OwnedFd>, notify: Notify) -> io::Result<Self> {
        let poll = Poll::new()?;
        watch(&poll, listener.as_raw_fd(), Source::Listener, Interest::READABLE)?;
        let state = StateFile::new(&config.dir);
        let mut slots = match state.read() {
            Some(slots) => slots,
            None => Slots::new(u32::from_le_bytes(random()?), state::namespace()),
        };
        slots.inherit(boot_time(), state::namespace(), state::is_alive);
        let (steering, isolation) = steering(config);
        let kept = kept.into_iter().filter_map(|vault| Group::adopt(vault).ok());
        let kept = kept.filter(|group| group.steering() == steering).collect();
        let time = now();
        Ok(Self {
            steering,
            isolation,
            quotas: config.quotas,
            throttle: Throttle::default(),
            steered: time,
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
            kept,
            slots,
            ports: Ports::default(),
            tracker: Tracker::default(),
            orphans: Orphans::default(),
            deferred: Vec::new(),
            contested: Vec::new(),
            asked_now: Vec::new(),
            questions: Vec::new(),
            gone: Gone::default(),
            counters: BTreeMap::new(),
            started: time,
            unused_since: time,
            again: Vec::new(),
            stalled: false,
            buffer: vec![0; MAX_RECORD],
        })
    }

    /// Tells systemd.
    pub(super) fn ready(&self) {
        if let Err(e) = self.notify.say("READY=1", &[]) {
            tracing::warn!("systemd can't be told that the broker is ready: {e}");
        }
    }

    /// Serves until nobody needs it.
    pub(super) fn run(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(256);
        loop {
            let timeout = self.timeout(now());
            if let Err(e) = self.poll.poll(&mut events, timeout)
                && e.kind() != io::ErrorKind::Interrupted
            {
                return Err(e);
            }
            let mut sources = std::mem::take(&mut self.again);
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
        if !self.again.is_empty() || !self.contested.is_empty() {
            return Some(Duration::ZERO);
        }
        let restless = self.stalled
            || !self.deferred.is_empty()
            || !self.questions.is_empty()
            || !self.slots.absent().is_empty()
            || self.clients.iter().any(|(_, c)| c.place.is_none())
            || self.groups.iter().any(|(_, g)| g.idle_since.is_some())
            || !self.kept.is_empty()
            || self.is_unused();
        let tick = restless.then_some(TICK);
        let orphan = self.orphans.next().map(|at| at.saturating_since(now));
        tick.into_iter().chain(orphan).min()
    }

    fn serve(&mut self, source: Source) {
        match source {
            Source::Listener => self.accept(),
            Source::Client(key) => {
                self.flush(key);
                self.serve_client(key, CLIENT_BUDGET);
            }
            Source::Process(key) => self.lose(key),
            Source::Gsi(key) => {
                let mut arrivals = Vec::new();
                if let Some(gsi) = self.groups.get_mut(key)
                    && gsi.receive(&mut arrivals)
                {
                    self.again.push(source);
                }
                for arrival in arrivals {
                    self.check_steering(&arrival.bytes);
                    self.route(arrival);
                }
            }
        }
    }

    pub(super) fn count(&mut self, name: &'static str) {
        *self.counters.entry(name).or_default() += 1;
    }

    /// Counts something, and writes one line of it in a while.
    pub(super) fn report(&mut self, counter: &'static str, text: impl FnOnce() -> String) {
        self.count(counter);
        if let Some(left_out) = self.throttle.pass(now(), counter) {
            tracing::warn!(counter, left_out, "{}", text());
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
                    // The poll does not tell again of those that wait.
                    if !std::mem::replace(&mut self.stalled, true) {
                        tracing::warn!("a connection can't be accepted: {e}");
                    }
                    return;
                }
            };
            if let Err(e) = self.add_client(socket) {
                tracing::warn!("a new connection is given up: {e}");
            }
        }
    }

    pub(super) fn add_client(&mut self, socket: OwnedFd) -> io::Result<()> {
        let client = Client::new(socket, now(), u64::from_le_bytes(random()?))?;
        if !client.trusted && !self.shared && client.uid != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("it is user {}'s", client.uid),
            ));
        }
        let uid = client.uid;
        let nameless = |(_, c): &(usize, &Client)| c.uid == uid && c.place.is_none();
        if self.shared && self.clients.iter().filter(nameless).count() >= MAX_NAMELESS {
            let text = || format!("user {uid} has {MAX_NAMELESS} connections without a place: no more are taken");
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
                        "a process is given up, as it sends garbage: {text}"
                    );
                    self.count("protocol_errors");
                    return self.remove(key, false);
                }
            }
        }
        self.again.push(Source::Client(key));
    }

    fn take_record(&mut self, key: usize, record: Record<ToBroker>) {
        match record.message {
            ToBroker::Request { seq, request } => self.on_request(key, seq, request, record.fds),
            ToBroker::Datagram(meta) => {
                // Only members hand packets over, and only such that came to an address of theirs. Who sent them can't be
                // verified.
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
            ToBroker::Goodbye => self.remove(key, true),
        }
    }

    /// A member tells what has become of its connections.
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
                let most = self.quotas.connections;
                let text = || format!("user {uid} has {most} connections: more are not recorded (--max-connections)");
                self.report("refused_connections", text);
            } else if self.has_opened(key, conn.local) && self.tracker.establish(place, *conn) {
                used += usize::from(!known);
            } else {
                self.report("refused_foreign_connections", || {
                    format!("user {uid} tells of a connection that is not its process's")
                });
            }
        }
    }

    /// The places of a user's members.
    pub(super) fn of_user(&self, uid: u32) -> impl Iterator<Item = Place> {
        let of_user = self.clients.iter().filter(move |(_, c)| c.uid == uid);
        of_user.filter_map(|(_, c)| c.place)
    }

    /// Whether a client has a socket that packets to an address arrive at.
    fn has_opened(&self, key: usize, addr: IpAddr) -> bool {
        let opened = |c: &Client| {
            c.opened
                .iter()
                .any(|g| self.groups.get(*g).is_some_and(|g| g.covers(addr)))
        };
        self.clients.get(key).is_some_and(|c| c.place.is_some() && opened(c))
    }

    /// The process at the other end of a connection has ended. What it had said before is heard.
    pub(super) fn lose(&mut self, key: usize) {
        self.serve_client(key, LAST_BUDGET);
        self.remove(key, false);
    }

    /// A connection has ended.
    pub(super) fn remove(&mut self, key: usize, clean: bool) {
        let Some(client) = self.clients.try_remove(key) else {
            return;
        };
        self.unwatch(client.socket.as_raw_fd());
        if let Some(pidfd) = &client.pidfd {
            self.unwatch(pidfd.as_raw_fd());
        }
        self.forget_questions(key);
        let Some(place) = client.place else { return };
        tracing::info!(pid = client.process.pid, name = client.name, clean, "a process leaves");
        match clean {
            true => self.gone.left(client.last),
            false => self.gone.lost(place, client.last),
        }
        self.by_place.remove(&place);
        self.slots.release(boot_time(), place, clean);
        self.ports.remove_all(place);
        self.bury(place);
        self.save();
    }

    /// What is to be done for a place whose process is gone.
    fn bury(&mut self, place: Place) {
        let now = now();
        for conn in self.tracker.take(place) {
            if !self.orphans.add(now, conn) {
                self.report("ends_not_told", || {
                    "too many connections end at once: not all peers are told".into()
                });
            }
        }
        for (_, gsi) in &self.groups {
            if let Err(e) = gsi.group.put_back(place.slot) {
                tracing::warn!("the socket of a process that left can't be emptied: {e}");
            }
        }
    }

    /// Writes down who has which place.
    pub(super) fn save(&mut self) {
        if let Err(e) = self.state.write(&self.slots) {
            tracing::warn!("the state can't be written: {e}");
        }
    }

    /// Whether members of a former broker may still come back, or tell what they had.
    pub(super) fn is_settling(&self, now: Instant) -> bool {
        let waiting = !self.slots.absent().is_empty() || self.clients.iter().any(|(_, c)| c.restoring);
        waiting && now < self.started + SETTLE
    }

    /// Adds a group whose vault came from somewhere, or that was just opened. `owner`: whose user's process wanted it.
    pub(super) fn add_group(&mut self, group: Group, owner: u32) -> io::Result<()> {
        let gsi = Gsi::new(group, owner, random()?).map_err(|e| io::Error::other(e.to_string()))?;
        let key = self.groups.vacant_key();
        for fd in gsi.descriptors() {
            watch(&self.poll, fd, Source::Gsi(key), Interest::READABLE)?;
        }
        self.groups.insert(gsi);
        // What waits since before it was watched is told now.
        self.again.push(Source::Gsi(key));
        Ok(())
    }

    fn unwatch(&self, fd: RawFd) {
        // It is closed right after.
        let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
    }

    /// A packet that is a member's came to slot 0. It may have been merged behind one for QP1; or a member has detached the
    /// steering program, and all packets go anywhere.
    fn check_steering(&mut self, bytes: &[u8]) {
        if self.steering == Steering::Array && matches!(target(bytes), Target::Member(_)) {
            self.steer_again(now());
        }
    }

    fn steer_again(&mut self, now: Instant) {
        if now < self.steered + STEER {
            return;
        }
        self.steered = now;
        for (_, gsi) in &self.groups {
            if let Err(e) = gsi.group.steer_again() {
                tracing::warn!("the steering program can't be attached: {e}");
            }
        }
    }

    /// A packet that slot 0 received or that a member handed over.
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
                    return self.count("icrc_errors");
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
        if self.is_settling(now) {
            // It may be for a member that has not come back, or not said yet what it had. The peer asks again.
            return self.count("drop_settling");
        }
        if let Some(gsi) = self.groups.get_mut(group) {
            gsi.answer(now, meta, mad);
        }
        self.count("answered_mads");
    }

    /// Whose a message of the connection manager is.
    fn owner(&self, meta: &Meta, message: &Message) -> Option<Place> {
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

    /// The place of the member whose numbers those of `place` are.
    fn member_at(&self, place: Place) -> Option<Place> {
        let candidates = [place, Place::whole(place.slot)];
        candidates.into_iter().find(|p| self.by_place.contains_key(p))
    }

    /// Passes a packet on to the process that it is for.
    fn forward(&mut self, place: Place, meta: &Meta, bytes: &[u8]) {
        let key = self.member_at(place).and_then(|place| self.by_place.get(&place));
        let Some(client) = key.and_then(|key| self.clients.get(*key)) else {
            return self.count("drop_no_process");
        };
        let sent = client.try_send(&ToClient::Datagram(*meta), bytes);
        self.count(if sent { "forwarded" } else { "drop_process_busy" });
    }

    /// No member is there, nor was a moment ago, and nobody is left to be told anything. Who only asks does not keep the broker.
    fn is_unused(&self) -> bool {
        self.by_place.is_empty() && self.orphans.is_empty() && self.slots.absent().is_empty()
    }

    /// What no event tells. True: the broker is not needed any more.
    fn housekeeping(&mut self, now: Instant) -> bool {
        if self.stalled {
            self.accept();
        }
        self.settle_absent(now);
        self.retry_deferred(now);
        self.end_questions(now);
        self.give_up_silent(now);
        for out in self.orphans.poll(now) {
            if let Some(gsi) = self.group_of(out.local).and_then(|key| self.groups.get_mut(key)) {
                gsi.send(&out);
            }
            self.counters
                .entry("tx_dreqs_for_dead")
                .and_modify(|n| *n += 1)
                .or_insert(1);
        }
        self.steer_again(now);
        self.close_idle_groups(now);
        if !self.is_unused() {
            self.unused_since = now;
        }
        let over = self.linger.is_some_and(|linger| now >= self.unused_since + linger);
        over && !self.awaits_newcomer(now)
    }

    /// Somebody has connected and may be about to join.
    fn awaits_newcomer(&self, now: Instant) -> bool {
        let joins = |c: &Client| c.place.is_none() && !c.observes && now < c.since + NEWCOMER;
        self.clients.iter().any(|(_, c)| joins(c))
    }

    fn settle_absent(&mut self, now: Instant) {
        if self.slots.absent().is_empty() {
            return;
        }
        let settled = now >= self.started + SETTLE;
        // Of a process that can't be seen only its coming back tells that it lives.
        let alive = |p| match state::life(p) {
            Life::Alive => true,
            Life::Dead => false,
            Life::Unknown => !settled,
        };
        let dead = self.slots.bury(boot_time(), alive);
        for place in &dead {
            self.bury(*place);
        }
        if !dead.is_empty() {
            self.save();
        }
    }

    pub(super) fn give_up_silent(&mut self, now: Instant) {
        let silent = |c: &Client| c.place.is_none() && now >= c.since + FIRST_WORD;
        let keys: Vec<usize> = self.clients.iter().filter(|(_, c)| silent(c)).map(|(k, _)| k).collect();
        for key in keys {
            self.remove(key, false);
        }
    }

    /// A group that nobody uses is closed, so that a program may have the port alone.
    fn close_idle_groups(&mut self, now: Instant) {
        let absent = !self.slots.absent().is_empty() && now < self.started + ABSENCE;
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
        // What systemd kept is of use while those may come back that had it.
        if !absent && !self.is_settling(now) && now >= self.started + self.idle {
            for group in std::mem::take(&mut self.kept) {
                self.withdraw(group.addr());
            }
        }
    }

    /// Whether nobody uses a group.
    fn is_idle(&self, key: usize) -> bool {
        let used = self.clients.iter().any(|(_, c)| c.opened.contains(&key));
        let owed = |g: &Gsi| self.orphans.needs(|local| g.covers(local));
        !used && !self.groups.get(key).is_some_and(owed)
    }

    fn close_group(&mut self, key: usize) {
        let Some(gsi) = self.groups.try_remove(key) else { return };
        tracing::info!(addr = %gsi.group.addr(), "an address is closed");
        for fd in gsi.descriptors() {
            self.unwatch(fd);
        }
        self.withdraw(gsi.group.addr());
    }

    /// Closes at once those of the groups that nobody uses. What is asked for goes before what might be.
    pub(super) fn close_unused(&mut self, which: impl Fn(&Gsi) -> bool) {
        if !self.slots.absent().is_empty() {
            return;
        }
        let keys = self.groups.iter().filter(|(_, g)| which(g)).map(|(key, _)| key);
        let keys: Vec<usize> = keys.filter(|key| self.is_idle(*key)).collect();
        keys.into_iter().for_each(|key| self.close_group(key));
    }

    /// How many addresses are open for a user: it uses them, or had them opened and nobody uses them.
    pub(super) fn groups_of(&self, uid: u32) -> usize {
        let uses = |key: &usize| self.clients.iter().any(|(_, c)| c.uid == uid && c.opened.contains(key));
        let counts = |(key, g): &(usize, &Gsi)| uses(key) || (g.owner == uid && self.is_idle(*key));
        self.groups.iter().filter(counts).count()
    }

    /// Makes room for another group of a user. The refusal's counter and text, if there is none.
    pub(super) fn make_room(&mut self, uid: u32) -> Result<(), (&'static str, String)> {
        if self.groups_of(uid) >= self.quotas.addresses {
            self.close_unused(|g| g.owner == uid);
        }
        if self.groups_of(uid) >= self.quotas.addresses {
            let most = self.quotas.addresses;
            let text = format!("user {uid} has {most} addresses open, and may not have more (--max-addresses)");
            return Err(("refused_addresses", text));
        }
        if self.groups.len() >= MAX_GROUPS {
            self.close_unused(|_| true);
        }
        match self.groups.len() < MAX_GROUPS {
            true => Ok(()),
            false => Err((
                "refused_addresses",
                format!("the broker has {MAX_GROUPS} addresses open"),
            )),
        }
    }

    /// Keeps a group's vault with systemd.
    pub(super) fn deposit(&self, group: &Group) {
        if let Err(e) = self.notify.keep(group.addr(), group.vault()) {
            tracing::warn!("systemd does not keep the sockets: {e}");
        }
    }

    /// Has systemd drop it.
    fn withdraw(&self, addr: IpAddr) {
        if let Err(e) = self.notify.drop_kept(addr) {
            tracing::warn!("systemd is not told that sockets are closed: {e}");
        }
    }
}

/// How packets are steered, and whom members trust with that. Between users only the array keeps them apart.
fn steering(config: &Config) -> (Steering, Isolation) {
    if config.shared.is_none() {
        return (Steering::Index, Isolation::OneUser);
    }
    match bpf::probe() {
        Ok(()) if config.isolate => {
            tracing::info!("members are isolated: none can receive what is another's");
            (Steering::Array, Isolation::Isolated)
        }
        probed => {
            let why = probed.map_or_else(|e| format!("{e}: it takes CAP_BPF"), |()| "so it was asked for".into());
            tracing::warn!(
                "whoever may use this broker can read the packets of all others: it can't load the program that keeps them \
                 apart ({why})"
            );
            (Steering::Index, Isolation::TrustDomain)
        }
    }
}

/// Whose an answer of a management class other than communication management is.
fn transaction_owner(mad: &[u8]) -> Option<Place> {
    let high: &[u8; 4] = mad.get(MAD_TRANSACTION..)?.first_chunk()?;
    let answer = mad.get(MAD_METHOD)? & METHOD_RESPONSE != 0;
    let place = Place::of_comm_id(u32::from_be_bytes(*high));
    (answer && place.is_valid()).then_some(place)
}

fn watch(poll: &Poll, fd: RawFd, source: Source, interest: Interest) -> io::Result<()> {
    poll.registry().register(&mut SourceFd(&fd), source.token(), interest)
}
