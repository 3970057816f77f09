//! Requests of clients.

use std::{net::IpAddr, os::fd::OwnedFd};

use roce_net::now;
use roce_verbs::Instant;

use super::{
    broker::{Broker, random},
    slots::{Process, Tenant},
    state::{self, boot_time},
};
use crate::{
    page::PageFile,
    proto::{
        Binding, Connection, Isolation, MAX_SHOWN, Place, ProcessReport, Refusal, Rejoin, Reply, Request, SLOTS,
        Statistics, VERSION,
    },
};

/// Requests of one client that wait.
pub(super) const MAX_DEFERRED: usize = 64;
/// The longest name of a process that is kept, characters.
pub(crate) const MAX_NAME: usize = 64;

/// A request that waits: for members of a former broker, or for processes to leave whose end is not known yet.
pub(super) struct Deferred {
    client: usize,
    seq: u64,
    request: Request,
}

/// How a request comes out.
pub(super) enum Outcome {
    Reply(Reply, Vec<OwnedFd>),
    /// Try again when the members of a former broker are back.
    Later,
    /// Somebody else has it. Try once more when all that was to be read is read: who has it may be gone.
    InUse(Refusal, String),
    /// The user has as much as it may have: the counter, and what its process is told.
    OverQuota(&'static str, String),
    /// The statistics, in as many replies as they take.
    Statistics,
    /// The client is gone.
    Pending,
}

pub(super) fn refused(why: Refusal, text: impl Into<String>) -> Outcome {
    Outcome::Reply(Reply::Refused { why, text: text.into() }, vec![])
}

fn done() -> Outcome {
    Outcome::Reply(Reply::Done, vec![])
}

/// Returns a member's page, which it may have had before, and a descriptor of it for the member. Neither, if the system refuses: then
/// nothing is known of what the member counts.
fn hand_out(former: Option<PageFile>) -> (Option<PageFile>, Vec<OwnedFd>) {
    let page = former.map_or_else(PageFile::new, Ok);
    match page.and_then(|page| Ok((page.for_member()?, page))) {
        Ok((theirs, page)) => (Some(page), vec![theirs]),
        Err(e) => {
            tracing::warn!("can't make a page for a process's counters: {e}");
            (None, vec![])
        }
    }
}

impl Broker {
    pub(super) fn on_request(&mut self, client: usize, seq: u64, request: Request, fds: Vec<OwnedFd>) {
        let outcome = self.handle(client, &request, fds);
        let waiting = || self.deferred.iter().chain(&self.contested).chain(&self.newly_contested);
        match outcome {
            Outcome::InUse(..) | Outcome::Later if waiting().filter(|d| d.client == client).count() >= MAX_DEFERRED => {
                let text = format!("{MAX_DEFERRED} requests of this process wait already");
                let why = Refusal::Internal;
                self.reply(client, seq, Reply::Refused { why, text }, vec![]);
            }
            Outcome::InUse(..) => self.newly_contested.push(Deferred { client, seq, request }),
            other => self.conclude(client, seq, request, other),
        }
    }

    fn conclude(&mut self, client: usize, seq: u64, request: Request, outcome: Outcome) {
        match outcome {
            Outcome::Reply(reply, fds) => self.reply(client, seq, reply, fds),
            Outcome::Later => self.deferred.push(Deferred { client, seq, request }),
            Outcome::InUse(why, text) => self.reply(client, seq, Reply::Refused { why, text }, vec![]),
            Outcome::OverQuota(counter, text) => {
                self.report(counter, || text.clone());
                let why = Refusal::Quota;
                self.reply(client, seq, Reply::Refused { why, text }, vec![]);
            }
            Outcome::Statistics => self.reply_statistics(client, seq),
            Outcome::Pending => {}
        }
    }

    fn reply(&mut self, client: usize, seq: u64, reply: Reply, fds: Vec<OwnedFd>) {
        let sent = self.clients.get_mut(client).map(|c| c.reply(seq, reply, fds));
        if let Some(Err(e)) = sent {
            tracing::info!("a process is given up: {e}");
            self.remove(client, false);
        }
    }

    pub(super) fn retry_deferred(&mut self, _now: Instant) {
        for d in std::mem::take(&mut self.deferred) {
            self.on_request(d.client, d.seq, d.request, vec![]);
        }
        // What was sent before a request was is read by the next round at the latest.
        let newly_contested = std::mem::take(&mut self.newly_contested);
        let contested = std::mem::replace(&mut self.contested, newly_contested);
        if !contested.is_empty() {
            self.remove_dead();
        }
        for d in contested {
            let outcome = self.handle(d.client, &d.request, vec![]);
            self.conclude(d.client, d.seq, d.request, outcome);
        }
    }

    /// Processes that have ended, although no event has told yet.
    fn remove_dead(&mut self) {
        let dead = self.clients.iter().filter(|(_, c)| !state::is_alive(c.process));
        let keys: Vec<usize> = dead.map(|(key, _)| key).collect();
        for key in keys {
            self.on_process_exit(key);
        }
    }

    fn handle(&mut self, client: usize, request: &Request, fds: Vec<OwnedFd>) -> Outcome {
        let place = self.clients.get(client).and_then(|c| c.place);
        match (request, place) {
            (Request::Hello { version, name, rejoin }, None) => self.hello(client, *version, name, *rejoin),
            (Request::Statistics, _) => {
                self.clients.get_mut(client).into_iter().for_each(|c| c.observes = true);
                Outcome::Statistics
            }
            (
                Request::Restore {
                    bindings,
                    connections,
                    done,
                },
                Some(place),
            ) if self.clients.get(client).is_some_and(|c| c.restoring) => {
                self.restore(client, place, bindings, connections);
                if let Some(c) = self.clients.get_mut(client) {
                    c.restoring &= !done;
                }
                Outcome::Reply(Reply::Done, vec![])
            }
            (Request::Open { addr, again }, Some(place)) => self.open(client, place, *addr, *again, fds),
            (Request::Bind { service, addr, reuse }, Some(place)) => self.bind(client, place, *service, *addr, *reuse),
            (Request::Unbind { service, addr }, Some(place)) => {
                self.ports.unbind(place, *service, *addr);
                done()
            }
            (Request::Listen { service, addr }, Some(place)) => self.listen(client, place, *service, *addr),
            (Request::Unlisten { service, addr }, Some(place)) => {
                self.ports.unlisten(place, *service, *addr);
                done()
            }
            _ => refused(Refusal::Invalid, "not at this point"),
        }
    }

    fn hello(&mut self, client: usize, version: u32, name: &str, rejoin: Option<Rejoin>) -> Outcome {
        let Some(c) = self.clients.get_mut(client) else {
            return Outcome::Pending;
        };
        if version != VERSION {
            let text = format!("the broker speaks version {VERSION} of its protocol, not {version}: end it");
            return refused(Refusal::Version, text);
        }
        if c.network != self.network {
            let own = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
            let text = format!(
                "the broker (process {}) serves another network namespace ({}): leave FERROCE_BROKER_DIR out, or give each network \
                 namespace a directory of its own",
                std::process::id(),
                own.display()
            );
            return refused(Refusal::Address, text);
        }
        let (process, uid, trusted) = (c.process, c.uid, c.trusted);
        c.name = name.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
        let token = match (rejoin, random()) {
            (Some(rejoin), _) => rejoin.token,
            (None, Ok(bytes)) => u64::from_le_bytes(bytes),
            (None, Err(e)) => return refused(Refusal::Internal, e.to_string()),
        };
        let tenant = Tenant { process, uid, token };
        if let (None, Some(text)) = (rejoin, self.over_quota(uid)) {
            return Outcome::OverQuota("refused_places", text);
        }
        // A broker that has lost its state takes the word of its own user's processes.
        let unknown = trusted && self.isolation == Isolation::OneUser;
        let place = match rejoin {
            Some(rejoin) => Some((rejoin.place, rejoin.parts))
                .filter(|(place, parts)| self.slots.reclaim(*place, tenant, *parts, unknown)),
            None => self
                .slots
                .allocate(boot_time(), tenant, self.quotas.whole(self.isolation)),
        };
        let Some((place, parts)) = place else {
            return match rejoin {
                Some(_) => refused(
                    Refusal::PlaceTaken,
                    "the numbers that the process has are another's now",
                ),
                None => Outcome::InUse(Refusal::Full, format!("all {} places are taken", SLOTS - 1)),
            };
        };
        let former = match rejoin {
            Some(_) => self.gone.returns(place),
            None => {
                self.gone.replaced(place);
                None
            }
        };
        let (page, theirs) = hand_out(former);
        if let Some(c) = self.clients.get_mut(client) {
            c.place = Some(place);
            c.page = page;
            c.restoring = rejoin.is_some();
            tracing::info!(
                pid = process.pid,
                name = c.name,
                ?place,
                rejoin = rejoin.is_some(),
                "a process joins"
            );
        }
        self.by_place.insert(place, client);
        self.save();
        Outcome::Reply(Reply::Welcome { place, token, parts }, theirs)
    }

    /// Returns why a user may not have another place.
    fn over_quota(&self, uid: u32) -> Option<String> {
        let (has, resting) = self.slots.of_user(boot_time(), uid);
        if has >= self.quotas.places {
            Some(format!(
                "user {uid} has {has} processes here, and may not have more (--max-places)"
            ))
        } else if resting >= self.quotas.resting() {
            Some(format!(
                "user {uid} has had {resting} processes killed within a minute, whose numbers rest"
            ))
        } else {
            None
        }
    }

    fn restore(&mut self, client: usize, place: Place, bindings: &[Binding], connections: &[Connection]) {
        let Some(process) = self.clients.get(client).map(|c| c.process) else {
            return;
        };
        for binding in bindings {
            if self.has_all_ports(client) || !self.ports.restore(place, process, binding.clone()) {
                let text = self.port_text(process, binding.service, binding.addr);
                tracing::warn!(
                    pid = process.pid,
                    ?place,
                    "a process is not given back what it had: {text}"
                );
            }
        }
        self.on_connections(client, connections, &[]);
    }

    /// Explains to a process that a port is taken, and by which process.
    fn port_text(&self, process: Process, service: u64, addr: Option<IpAddr>) -> String {
        let at = addr.map_or_else(|| "all addresses".to_owned(), |a| a.to_string());
        let holder = self.ports.holder(process, service, addr);
        let holder = holder.and_then(|place| self.clients.get(*self.by_place.get(&place)?));
        let taken = match holder {
            Some(c) if c.process == process => "taken by this process".to_owned(),
            Some(c) if c.process.pid == 0 => format!("taken by {} in another container", c.name),
            Some(c) => format!("taken by {} (process {})", c.name, c.process.pid),
            None => "taken".to_owned(),
        };
        format!(
            "port {} of {at} (service ID {service:#018x}) is {taken}",
            service as u16
        )
    }

    /// Whether the user of a client may not have more ports.
    fn has_all_ports(&self, client: usize) -> bool {
        let Some(uid) = self.clients.get(client).map(|c| c.uid) else {
            return true;
        };
        let ports = self.of_user(uid).map(|place| self.ports.count(place));
        ports.sum::<usize>() >= self.quotas.ports
    }

    fn too_many_ports(&self, client: usize) -> Outcome {
        let uid = self.clients.get(client).map_or(0, |c| c.uid);
        let most = self.quotas.ports;
        let text = format!("user {uid} has {most} ports, and may not have more (--max-ports)");
        Outcome::OverQuota("refused_ports", text)
    }

    fn bind(&mut self, client: usize, place: Place, service: u64, addr: Option<IpAddr>, reuse: bool) -> Outcome {
        if self.is_rejoining(now()) {
            return Outcome::Later;
        }
        let Some(process) = self.clients.get(client).map(|c| c.process) else {
            return Outcome::Pending;
        };
        if self.has_all_ports(client) {
            return self.too_many_ports(client);
        }
        let start = match random() {
            Ok(bytes) => u16::from_le_bytes(bytes),
            Err(e) => return refused(Refusal::Internal, e.to_string()),
        };
        match self.ports.bind(place, process, service, addr, reuse, start) {
            Ok(service) => Outcome::Reply(Reply::Bound { service }, vec![]),
            Err(_) => Outcome::InUse(Refusal::PortInUse, self.port_text(process, service, addr)),
        }
    }

    fn listen(&mut self, client: usize, place: Place, service: u64, addr: Option<IpAddr>) -> Outcome {
        if self.is_rejoining(now()) {
            return Outcome::Later;
        }
        let Some(process) = self.clients.get(client).map(|c| c.process) else {
            return Outcome::Pending;
        };
        if self.has_all_ports(client) && !self.ports.has(place, service, addr) {
            return self.too_many_ports(client);
        }
        match self.ports.listen(place, process, service, addr) {
            Ok(()) => done(),
            Err(_) => Outcome::InUse(Refusal::PortInUse, self.port_text(process, service, addr)),
        }
    }

    /// Forgets the requests of a client that is gone.
    pub(super) fn forget_requests(&mut self, client: usize) {
        self.deferred.retain(|d| d.client != client);
        self.contested.retain(|d| d.client != client);
        self.newly_contested.retain(|d| d.client != client);
    }

    fn reply_statistics(&mut self, client: usize, seq: u64) {
        let mut parts = self.statistics().parts().into_iter().peekable();
        while let Some(part) = parts.next() {
            let more = parts.peek().is_some();
            self.reply(client, seq, Reply::Statistics { part, more }, vec![]);
        }
    }

    fn statistics(&self) -> Statistics {
        let mut processes: Vec<ProcessReport> = self
            .by_place
            .iter()
            .filter_map(|(place, key)| {
                let c = self.clients.get(*key)?;
                Some(ProcessReport {
                    pid: c.process.pid,
                    uid: c.uid,
                    name: c.name.clone(),
                    place: *place,
                    connections: self.tracker.count(*place) as u64,
                    bindings: self.ports.of(*place).into_iter().take(MAX_SHOWN).collect(),
                    report: c.page.as_ref().and_then(PageFile::read),
                })
            })
            .collect();
        processes.sort_by_key(|p| (p.pid, p.place));
        let (ended, ended_unknown) = self.gone.sums();
        Statistics {
            pid: std::process::id(),
            isolation: self.isolation,
            addrs: self.groups.iter().map(|(_, g)| g.group.addr()).collect(),
            processes,
            ended,
            ended_unknown,
            counters: self.counters.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect(),
            translated: self.translations.last(now()),
        }
    }
}
