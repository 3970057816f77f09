//! The passive side: serves the role that each connection asks for.

use std::{
    collections::BTreeMap,
    mem,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use roce::{Completion, Payload, RemoteAddr, SendFlags, SendOp, SendWr};

use super::{
    endpoint::{Endpoint, Event, RECEIVE, Shape, check, mark, parts},
    wire::{ANSWER, Hello, Role, credit_at, receives, round_mark},
};
use crate::output::Failure;

/// Largest memory of a connection.
const MAX_BYTES: u32 = 1 << 30;
/// Largest memory of all connections: anybody may connect.
const MAX_TOTAL: u64 = 4 << 30;
const MAX_DEPTH: u32 = 4096;
const MAX_CONNECTIONS: usize = 20_000;
/// Longest sleep until connection events.
const IDLE: Duration = Duration::from_millis(50);
/// Longest sleep until completions: connect requests wait that long.
const NAP: Duration = Duration::from_millis(2);
/// Polls between looks for connection events.
const POLLS: usize = 256;
/// WRITEs of credit outstanding on a connection, at most.
const MAX_CREDITS: usize = 4;

/// A connection.
struct Peer {
    hello: Hello,
    /// Rounds of a WRITE ping-pong.
    round: u64,
    /// Receives posted so far, and the number last written to the sender.
    posted: u64,
    credit: u64,
    /// WRITEs of credit outstanding.
    credits: usize,
}

/// A listener with its connections.
pub(super) struct Passive {
    endpoint: Box<dyn Endpoint>,
    peers: BTreeMap<u32, Peer>,
    /// Time of the last warning, and the number suppressed since.
    warned: Option<Instant>,
    suppressed: u64,
}

impl Passive {
    pub(super) fn endpoint(&self) -> &dyn Endpoint {
        &*self.endpoint
    }

    pub(super) fn listen(mut endpoint: Box<dyn Endpoint>, addr: SocketAddr) -> Result<Self, Failure> {
        endpoint.listen(addr)?;
        Ok(Self {
            endpoint,
            peers: BTreeMap::new(),
            warned: None,
            suppressed: 0,
        })
    }

    /// Serves until stopped. A failed connection ends alone.
    pub(super) fn run(mut self, stopped: &dyn Fn() -> bool) -> Result<(), Failure> {
        let mut completions = vec![];
        while !stopped() {
            // The memory of targets and sources is written and read without this thread.
            let mut busy = self.peers.values().filter(|p| p.hello.role.completes()).peekable();
            let polls = if busy.peek().is_some() { POLLS } else { 0 };
            let sleep = busy.peek().is_some_and(|p| p.hello.role.sleeps()).then_some(NAP);
            let wait = if polls > 0 { Duration::ZERO } else { IDLE };
            if let Some(event) = self.endpoint.event(wait)? {
                self.on_event(event);
            }
            for _ in 0..polls {
                completions.clear();
                self.endpoint.poll(&mut completions, sleep)?;
                self.work(&completions);
                if sleep.is_some() && completions.is_empty() {
                    break;
                }
            }
            if polls > 0 && sleep.is_none() {
                thread::yield_now();
            }
        }
        tracing::debug!(stats = ?self.endpoint.stats(), "counters");
        self.endpoint.close_all();
        Ok(())
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Ended(number) => {
                self.peers.remove(&number);
                self.endpoint.close(number);
            }
            Event::Request(private_data) => {
                if let Err(why) = self.accept(&private_data) {
                    self.endpoint.reject(b"ferroce bench");
                    self.warn(&why);
                }
            }
        }
    }

    fn accept(&mut self, private_data: &[u8]) -> Result<(), String> {
        let hello = Hello::parse(private_data).filter(|h| h.bytes <= MAX_BYTES && h.depth <= MAX_DEPTH);
        let Some(hello) = hello else {
            return Err("connect request that is no `ferroce bench` of this version: rejected".into());
        };
        if hello.role.sleeps() && !self.endpoint.can_sleep() {
            return Err("connect request with --events: rejected, because this side polls an RDMA device".into());
        }
        let mut busy = self.peers.values().filter(|p| p.hello.role.completes());
        if hello.role.completes() && busy.any(|p| p.hello.role.sleeps() != hello.role.sleeps()) {
            return Err("connect request with --events during a measurement without, or the reverse: rejected".into());
        }
        let total: u64 = self.peers.values().map(|p| u64::from(p.hello.bytes)).sum();
        if self.peers.len() >= MAX_CONNECTIONS || total + u64::from(hello.bytes) > MAX_TOTAL {
            return Err("connect request beyond 20,000 connections or 4 GiB of their memory: rejected".into());
        }
        let accepted = self.endpoint.accept(&Shape::passive(&hello));
        let failed = |e: Failure| format!("accepting a connection failed: {}", e.text().unwrap_or_default());
        let number = accepted.map_err(failed)?;
        let posted = receives(hello.depth).into();
        let peer = Peer {
            hello,
            round: 0,
            posted,
            credit: posted,
            credits: 0,
        };
        self.peers.insert(number, peer);
        Ok(())
    }

    /// Logs one line a second: anybody may connect.
    fn warn(&mut self, what: &str) {
        if self.warned.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            self.suppressed += 1;
            return;
        }
        self.warned = Some(Instant::now());
        tracing::warn!(suppressed = mem::take(&mut self.suppressed), "{what}");
    }

    /// Answers completions, and WRITEs that have arrived.
    fn work(&mut self, completions: &[Completion]) {
        let mut failed = vec![];
        let endpoint = &mut *self.endpoint;
        for group in completions.chunk_by(|a, b| parts(a.wr_id).0 == parts(b.wr_id).0) {
            let (number, _) = parts(group[0].wr_id);
            let Some(peer) = self.peers.get_mut(&number) else {
                continue;
            };
            if let Err(e) = peer.on_completions(endpoint, number, group) {
                failed.push((number, e));
            }
        }
        for (number, peer) in self.peers.iter_mut().filter(|(_, p)| p.hello.role == Role::WriteEcho) {
            if let Err(e) = peer.echo_write(endpoint, *number) {
                failed.push((*number, e));
            }
        }
        for (number, why) in failed {
            tracing::info!("a connection ended: {}", why.text().unwrap_or_default());
            self.peers.remove(&number);
            self.endpoint.close(number);
        }
    }
}

impl Peer {
    fn on_completions(&mut self, endpoint: &mut dyn Endpoint, number: u32, all: &[Completion]) -> Result<(), Failure> {
        all.iter().try_for_each(check)?;
        let received = all.iter().filter(|c| parts(c.wr_id).1 == RECEIVE).count();
        let echo = match self.hello.role {
            Role::SendEcho | Role::SleepingSendEcho => SendOp::Send,
            Role::SleepingWriteEcho => SendOp::WriteWithImm(self.hello.memory, 0),
            Role::Sink => {
                self.credits = self.credits.saturating_sub(all.len() - received);
                endpoint.post_recv(number, received)?;
                self.posted += received as u64;
                return self.write_credit(endpoint, number);
            }
            Role::Target | Role::Source | Role::WriteEcho => return Ok(()),
        };
        for _ in 0..received {
            endpoint.post_recv(number, 1)?;
            self.post(endpoint, number, echo)?;
        }
        Ok(())
    }

    /// Writes the number of receives to the sender, when it is worth a packet.
    fn write_credit(&mut self, endpoint: &mut dyn Endpoint, number: u32) -> Result<(), Failure> {
        let new = self.posted - self.credit;
        if new < u64::from(receives(self.hello.depth)) / 4 || self.credits >= MAX_CREDITS {
            return Ok(());
        }
        let memory = self.hello.memory;
        let to = RemoteAddr {
            addr: memory.addr.wrapping_add(credit_at(self.hello.bytes) as u64),
            ..memory
        };
        self.credit = self.posted;
        self.credits += 1;
        let number_of_receives = self.posted.to_le_bytes();
        let wr = request(number, SendOp::Write(to), Payload::Inline(&number_of_receives));
        endpoint.post_send(number, &[wr])
    }

    fn post(&self, endpoint: &mut dyn Endpoint, number: u32, op: SendOp) -> Result<(), Failure> {
        let sges = [endpoint.sge(number, self.hello.bytes)];
        endpoint.post_send(number, &[request(number, op, Payload::Sges(&sges))])
    }

    /// Answers the WRITE of the round, if it has arrived, with a WRITE of the answer's mark.
    fn echo_write(&mut self, endpoint: &mut dyn Endpoint, number: u32) -> Result<(), Failure> {
        let last = self.hello.bytes.max(1) as usize - 1;
        let mut seen = [0];
        endpoint.read(number, last, &mut seen)?;
        if seen[0] != round_mark(self.round) {
            return Ok(());
        }
        endpoint.write(number, last, &[seen[0] | ANSWER])?;
        self.round += 1;
        self.post(endpoint, number, SendOp::Write(self.hello.memory))
    }
}

fn request(number: u32, op: SendOp, payload: Payload<'_>) -> SendWr<'_> {
    SendWr {
        wr_id: mark(number, 0),
        op,
        flags: SendFlags::SIGNALED,
        payload,
    }
}
