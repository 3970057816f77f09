//! Requests of clients.

use std::{net::IpAddr, os::fd::OwnedFd};

use roce_net::now;

use super::{
    broker::{Broker, random},
    client::{Client, Waiting},
    slots::{Process, Tenant},
    state::{self, boot_time},
};
use crate::{
    page::PageFile,
    proto::{
        Binding, Grant, Isolation, MAX_SHOWN, Place, ProcessReport, Refusal, Reply, Request, SLOTS, Statistics, VERSION,
    },
};

/// Largest number of waiting requests of one client.
pub(super) const MAX_WAITING_REQUESTS: usize = 64;
/// Longest name of a process that is kept, characters.
pub(crate) const MAX_NAME: usize = 64;

/// Reason for which a request is not done, or not now.
pub(super) enum Hold {
    Refused(Refusal, String),
    /// Try again when the members of a former broker are back.
    Later,
    /// Another process has it. Try again when all received records are processed: that process may have exited.
    InUse(Refusal, String),
}

/// Reply to a request, and the descriptors with it.
pub(super) type Outcome = Result<(Reply, Vec<OwnedFd>), Hold>;

/// Client that has a place.
#[derive(Clone, Copy)]
pub(super) struct Member {
    pub(super) key: usize,
    pub(super) place: Place,
    pub(super) process: Process,
    pub(super) uid: u32,
    /// Runs as the broker's own user.
    pub(super) trusted: bool,
}

pub(super) fn refused<T>(why: Refusal, text: impl Into<String>) -> Result<T, Hold> {
    Err(Hold::Refused(why, text.into()))
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
        let last_in = None;
        let request = Waiting { seq, request, last_in };
        self.attempt(client, request, fds);
    }

    /// Handles a request, which waits if it can't be done yet.
    fn attempt(&mut self, client: usize, mut waiting: Waiting, fds: Vec<OwnedFd>) {
        if matches!(waiting.request, Request::Statistics) {
            return self.reply_statistics(client, waiting.seq);
        }
        let outcome = self.handle(client, &waiting.request, fds);
        let Some(c) = self.clients.get_mut(client) else { return };
        let (why, text) = match outcome {
            Ok((reply, fds)) => return self.reply(client, waiting.seq, reply, fds),
            Err(Hold::Refused(why, text)) => (why, text),
            Err(Hold::InUse(why, text)) if waiting.last_in == Some(0) => (why, text),
            Err(_) if c.waiting.len() >= MAX_WAITING_REQUESTS => {
                let text = format!("{MAX_WAITING_REQUESTS} requests of this process wait already");
                (Refusal::Internal, text)
            }
            Err(hold) => {
                // Messages that were sent before the request was are read by the next round at the latest.
                waiting.last_in = matches!(hold, Hold::InUse(..)).then_some(1);
                return c.waiting.push(waiting);
            }
        };
        self.reply(client, waiting.seq, Reply::Refused { why, text }, vec![]);
    }

    fn reply(&mut self, client: usize, seq: u64, reply: Reply, fds: Vec<OwnedFd>) {
        let sent = self.clients.get_mut(client).map(|c| c.reply(seq, reply, fds));
        if let Some(Err(e)) = sent {
            tracing::info!("a process is given up: {e}");
            self.remove(client, false);
        }
    }

    /// Tries again what waits.
    pub(super) fn retry_waiting(&mut self) {
        if self.clients.iter().all(|(_, c)| c.waiting.is_empty()) {
            return;
        }
        let all = self.clients.iter_mut();
        let all: Vec<_> = all.map(|(key, c)| (key, std::mem::take(&mut c.waiting))).collect();
        if all
            .iter()
            .flat_map(|(_, waiting)| waiting)
            .any(|w| w.last_in == Some(0))
        {
            self.remove_dead();
        }
        for (key, waiting) in all {
            for mut one in waiting {
                match (one.last_in, self.clients.get_mut(key)) {
                    (Some(rounds @ 1..), Some(client)) => {
                        one.last_in = Some(rounds - 1);
                        client.waiting.push(one);
                    }
                    _ => self.attempt(key, one, vec![]),
                }
            }
        }
    }

    /// Removes processes that have exited without an event so far.
    fn remove_dead(&mut self) {
        let dead = self.clients.iter().filter(|(_, c)| !state::is_alive(c.process));
        let keys: Vec<usize> = dead.map(|(key, _)| key).collect();
        for key in keys {
            self.on_process_exit(key);
        }
    }

    fn handle(&mut self, key: usize, request: &Request, fds: Vec<OwnedFd>) -> Outcome {
        let Some(c) = self.clients.get_mut(key) else {
            return refused(Refusal::Invalid, "the process is gone");
        };
        let (restoring, place) = (c.restoring, c.place);
        let not_now = || refused(Refusal::Invalid, "not at this point");
        let Some(place) = place else {
            return match request {
                Request::Hello { version, name, rejoin } => self.hello(key, *version, name, *rejoin),
                _ => not_now(),
            };
        };
        let member = Member {
            key,
            place,
            process: c.process,
            uid: c.uid,
            trusted: c.trusted,
        };
        match request {
            Request::Restore(bindings) if restoring => self.restore(&member, bindings),
            Request::Restored => c.restoring = false,
            Request::Open { addr, again } => return self.open(&member, *addr, *again, fds),
            Request::Bind { service, addr, reuse } => return self.bind(&member, *service, *addr, *reuse),
            Request::Listen { service, addr } => self.listen(&member, *service, *addr)?,
            Request::Release {
                service,
                addr,
                listening,
            } => self.ports.release(place, *service, *addr, *listening),
            _ => return not_now(),
        }
        Ok((Reply::Done, vec![]))
    }

    fn hello(&mut self, key: usize, version: u32, name: &str, rejoin: Option<Grant>) -> Outcome {
        let c = &mut self.clients[key];
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
        c.name = name.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
        let (process, uid, trusted) = (c.process, c.uid, c.trusted);
        let given = match rejoin {
            None => {
                self.check_places(uid)?;
                let token = u64::from_le_bytes(number()?);
                let tenant = Tenant { process, uid, token };
                let whole = self.config.quotas.whole(self.isolation());
                let Some((place, parts)) = self.slots.allocate(boot_time(), tenant, whole) else {
                    let text = format!("all {} places are taken", SLOTS - 1);
                    return Err(Hold::InUse(Refusal::Full, text));
                };
                self.gone.replaced(place);
                Grant { place, token, parts }
            }
            Some(given) => {
                let token = given.token;
                let tenant = Tenant { process, uid, token };
                // A broker that has lost its state takes the word of its own user's processes.
                let unknown = trusted && self.isolation() == Isolation::OneUser;
                if !self.slots.reclaim(given.place, tenant, given.parts, unknown) {
                    let text = "the numbers that the process has are another's now";
                    return refused(Refusal::PlaceTaken, text);
                }
                given
            }
        };
        let place = given.place;
        let former = rejoin.and_then(|_| self.gone.returns(place));
        let (page, theirs) = hand_out(former);
        let c = &mut self.clients[key];
        (c.place, c.page, c.restoring) = (Some(place), page, rejoin.is_some());
        let (pid, name, rejoin) = (process.pid, &c.name, rejoin.is_some());
        tracing::info!(pid, name, ?place, rejoin, "a process joins");
        self.save();
        Ok((Reply::Welcome(given), theirs))
    }

    /// Refuses something beyond a quota.
    pub(super) fn over_quota<T>(&mut self, counter: &'static str, text: String) -> Result<T, Hold> {
        self.report(counter, || text.clone());
        refused(Refusal::Quota, text)
    }

    /// Checks that a user may have another place.
    fn check_places(&mut self, uid: u32) -> Result<(), Hold> {
        let (has, resting) = self.slots.of_user(boot_time(), uid);
        let text = if has >= self.config.quotas.places {
            format!("user {uid} has {has} processes here, and may not have more (--max-places)")
        } else if resting >= self.config.quotas.resting() {
            format!("user {uid} has had {resting} processes killed within a minute, whose numbers rest")
        } else {
            return Ok(());
        };
        self.over_quota("refused_places", text)
    }

    fn restore(&mut self, member: &Member, bindings: &[Binding]) {
        let Member {
            process, place, uid, ..
        } = *member;
        for binding in bindings {
            if self.has_all_ports(uid) || !self.ports.restore(place, process, binding.clone()) {
                let text = self.port_text(process, binding.service, binding.addr);
                let pid = process.pid;
                tracing::warn!(pid, ?place, "a process is not given back what it had: {text}");
            }
        }
    }

    /// Explains to a process that a port is taken, and by which process.
    fn port_text(&self, process: Process, service: u64, addr: Option<IpAddr>) -> String {
        let at = addr.map_or_else(|| "all addresses".to_owned(), |a| a.to_string());
        let holder = self.ports.holder(process, service, addr);
        let holder = holder.and_then(|place| self.clients.get(self.member_at(place)?));
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

    fn port_in_use(&self, process: Process, service: u64, addr: Option<IpAddr>) -> Hold {
        Hold::InUse(Refusal::PortInUse, self.port_text(process, service, addr))
    }

    /// Returns whether a user may not have more ports.
    fn has_all_ports(&self, uid: u32) -> bool {
        let ports = self.of_user(uid).filter_map(|c| Some(self.ports.count(c.place?)));
        ports.sum::<usize>() >= self.config.quotas.ports
    }

    /// Checks that a member may be given a port now.
    fn check_ports(&mut self, uid: u32, needs_one: bool) -> Result<(), Hold> {
        if self.is_rejoining(now()) {
            return Err(Hold::Later);
        }
        if !needs_one || !self.has_all_ports(uid) {
            return Ok(());
        }
        let most = self.config.quotas.ports;
        let text = format!("user {uid} has {most} ports, and may not have more (--max-ports)");
        self.over_quota("refused_ports", text)
    }

    fn bind(&mut self, member: &Member, service: u64, addr: Option<IpAddr>, reuse: bool) -> Outcome {
        let Member { place, process, .. } = *member;
        self.check_ports(member.uid, true)?;
        let start = u16::from_le_bytes(number()?);
        match self.ports.bind(place, process, service, addr, reuse, start) {
            Some(service) => Ok((Reply::Bound { service }, vec![])),
            None => Err(self.port_in_use(process, service, addr)),
        }
    }

    fn listen(&mut self, member: &Member, service: u64, addr: Option<IpAddr>) -> Result<(), Hold> {
        let Member { place, process, .. } = *member;
        self.check_ports(member.uid, !self.ports.has(place, service, addr))?;
        match self.ports.listen(place, process, service, addr) {
            true => Ok(()),
            false => Err(self.port_in_use(process, service, addr)),
        }
    }

    fn reply_statistics(&mut self, client: usize, seq: u64) {
        self.clients.get_mut(client).into_iter().for_each(|c| c.observes = true);
        let mut parts = self.statistics().parts().into_iter().peekable();
        while let Some(part) = parts.next() {
            let more = parts.peek().is_some();
            self.reply(client, seq, Reply::Statistics { part, more }, vec![]);
        }
    }

    fn statistics(&self) -> Statistics {
        let report = |c: &Client| {
            let place = c.place?;
            Some(ProcessReport {
                pid: c.process.pid,
                uid: c.uid,
                name: c.name.clone(),
                place,
                connections: c.connections.len() as u64,
                bindings: self.ports.of(place).into_iter().take(MAX_SHOWN).collect(),
                report: c.page.as_ref().and_then(PageFile::read),
            })
        };
        let mut processes: Vec<_> = self.clients.iter().filter_map(|(_, c)| report(c)).collect();
        processes.sort_by_key(|p| (p.pid, p.place));
        let (ended, ended_unknown) = self.gone.sums();
        Statistics {
            pid: std::process::id(),
            isolation: self.isolation(),
            addrs: self.groups.iter().map(|(_, g)| g.group.addr()).collect(),
            processes,
            ended,
            ended_unknown,
            counters: self.counters.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect(),
            translated: self.translations.last(now()),
        }
    }
}

/// Returns random bytes for a request.
fn number<const N: usize>() -> Result<[u8; N], Hold> {
    random().map_err(|e| Hold::Refused(Refusal::Internal, e.to_string()))
}
