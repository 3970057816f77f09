//! The server's host: RTRS, RNBD, and disks that take their time.

use std::collections::{BTreeMap, BTreeSet};

use rnbd::{
    Errno,
    block::Geometry,
    proto::{AccessMode, ClientMsg, instance::Instance},
    server::{
        Limits, Server as Rnbd,
        action::{Action, Identity, OpenRefused, Opened, Ticket},
        disk::StoreId,
        queue::QueueLimits,
    },
};
use roce_mem::{MemError, Pages};
use roce_verbs::Instant;
use rtrs::{
    cx::Cx,
    server::{
        Server as Rtrs, ServerConfig,
        request::{Output, Request, RequestKey, SessionKey, Ticket as MemoryTicket},
    },
};

use roce_sim::{Check, Notes, Rng};

use crate::{
    client::honest,
    disk::{BLOCK, SimDisk},
    engine::{Engine, RunId},
    ledger::{Ledger, Life},
    tally::Coverage,
};

/// Work of the server's helper threads.
#[derive(Debug)]
pub(crate) enum Job {
    Allocate(MemoryTicket, usize),
    Open(Ticket, Vec<u8>, AccessMode),
    Close(Ticket, StoreId),
    Io(RunId),
}

/// A job and when it ends.
pub(crate) type Planned = (u64, Job);

/// Plan of the server above RTRS.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerPlan {
    pub(crate) limits: QueueLimits,
    /// No memory for a new session, with this probability.
    pub(crate) no_memory: f64,
    /// Disks support WRITE_ZEROES.
    pub(crate) zeroes: bool,
    /// Longest discard or range of zeroes, blocks.
    pub(crate) longest: u64,
    /// Memory holds garbage while its disks read into it.
    pub(crate) garbage: bool,
    /// Instances that it names to clients.
    pub(crate) names: Names,
}

/// Which instance a server names: where it keeps what was acknowledged and not flushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Names {
    /// None, as the kernel's server.
    None,
    /// That of this boot: another one after each power failure.
    Boot(u32),
    /// One instance also after a power failure, for a test of the rules.
    Same,
}

impl Names {
    /// `hides`: the server says nothing of power failures.
    pub(crate) fn draw(hides: bool, rng: &mut Rng) -> Self {
        match hides {
            true => Self::Same,
            false if rng.chance(0.15) => Self::None,
            false => Self::Boot(0),
        }
    }

    /// Its power has failed.
    pub(crate) fn boot_again(&mut self) {
        if let Self::Boot(boot) = self {
            *boot += 1;
        }
    }

    fn instance(self, device: usize) -> Option<Instance> {
        let boot = match self {
            Self::None => return None,
            Self::Boot(boot) => boot,
            Self::Same => 0,
        };
        Some(Instance::of([
            boot.to_le_bytes().as_slice(),
            (device as u64).to_le_bytes().as_slice(),
        ]))
    }
}

/// State of the world that the server works with.
pub(crate) struct ServerEnv<'a> {
    pub(crate) disks: &'a mut [SimDisk],
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) rng: &'a mut Rng,
    pub(crate) coverage: &'a mut Coverage,
    pub(crate) plan: Vec<Planned>,
}

/// Host of the server: its state machines and the engine of its disks.
pub(crate) struct ServerSide {
    pub(crate) rtrs: Rtrs,
    pub(crate) rnbd: Rnbd,
    engine: Engine,
    sessions: BTreeMap<SessionKey, Option<Life>>,
    /// Requests that RTRS has handed over and that are not answered.
    asked: BTreeSet<RequestKey>,
    /// Requests that came before a request to close their device.
    closes: BTreeMap<RequestKey, Vec<RequestKey>>,
    /// The device of a block request, as its client names it.
    about: BTreeMap<RequestKey, u32>,
    plan: ServerPlan,
    notes: Notes,
}

/// The session that a name stands for.
fn life(name: &str) -> Option<Life> {
    let (client, life) = name.strip_prefix('c')?.split_once('-')?;
    Some(Life {
        client: client.parse().ok()?,
        life: life.parse().ok()?,
    })
}

impl ServerSide {
    pub(crate) fn new(cx: &mut Cx<'_>, config: ServerConfig, plan: ServerPlan, notes: Notes) -> Self {
        let (rtrs, _) = Rtrs::listen(cx, config).expect("the port is free");
        Self {
            rtrs,
            rnbd: Rnbd::new(Limits::default()),
            engine: Engine::new(plan.limits, plan.garbage),
            sessions: BTreeMap::new(),
            asked: BTreeSet::new(),
            closes: BTreeMap::new(),
            about: BTreeMap::new(),
            plan,
            notes,
        }
    }

    /// Takes what RTRS has to tell, and plans what RNBD wants.
    pub(crate) fn work(&mut self, cx: &mut Cx<'_>, env: &mut ServerEnv<'_>) -> Check {
        loop {
            let mut moved = false;
            while let Some(output) = self.rtrs.poll_output() {
                moved = true;
                self.on_output(cx.now, output, env)?;
            }
            while let Some(action) = self.rnbd.poll_action() {
                moved = true;
                self.act(cx, action, env)?;
            }
            while let Some((ticket, result)) = self.engine.poll_over() {
                moved = true;
                self.rnbd.io_done(ticket, result);
            }
            if !moved {
                break;
            }
        }
        let ServerEnv { disks, rng, plan, .. } = env;
        self.engine
            .pump(disks, rng, |after, id| plan.push((after, Job::Io(id))))
    }

    fn on_output(&mut self, now: Instant, output: Output, env: &mut ServerEnv<'_>) -> Check {
        if !matches!(output, Output::Free(_)) {
            self.notes.print(now.as_nanos(), || format!("server: {output:?}"));
        }
        match &output {
            Output::SessionOpened(opened) => {
                self.sessions.insert(opened.session, life(&opened.name));
            }
            Output::SessionClosed { session, .. } => {
                let Some(life) = self.sessions.remove(session) else {
                    return Err(format!("{session:?} is closed, which was not open"));
                };
                if let Some(key) = self.asked.iter().find(|key| key.session == *session) {
                    return Err(format!("{session:?} is closed before {key:?} is answered"));
                }
                self.engine.forget(*session);
                if let Some(life) = life {
                    env.ledger.session_over(now.as_nanos(), life);
                }
            }
            Output::PathDown { why, .. } => honest(why)?,
            Output::Request(request) => {
                let in_use = |key: &RequestKey| (key.session, key.chunk) == (request.key.session, request.key.chunk);
                if self.asked.iter().any(in_use) {
                    return Err(format!("{:?} is in a chunk that is worked on", request.key));
                }
                if !self.sessions.contains_key(&request.key.session) {
                    return Err(format!("{:?} is of no session", request.key));
                }
                self.asked.insert(request.key);
                self.look(request);
            }
            _ => {}
        }
        if let Some(Output::Allocate { ticket, bytes }) = self.rnbd.rtrs(now, output) {
            let after = env.rng.range(1_000, 3_000_000);
            env.plan.push((after, Job::Allocate(ticket, bytes)));
        }
        Ok(())
    }

    /// Remembers which block requests come before a close.
    fn look(&mut self, request: &Request) {
        match ClientMsg::parse(&request.header) {
            Ok(ClientMsg::Io(m)) => {
                self.about.insert(request.key, m.device_id.get());
            }
            Ok(ClientMsg::Close(m)) => {
                let about = |(key, device): (&RequestKey, &u32)| {
                    (key.session == request.key.session && *device == m.device_id.get()).then_some(*key)
                };
                self.closes
                    .insert(request.key, self.about.iter().filter_map(about).collect());
            }
            _ => {}
        }
    }

    fn act(&mut self, cx: &mut Cx<'_>, action: Action, env: &mut ServerEnv<'_>) -> Check {
        self.notes.print(cx.now.as_nanos(), || format!("server: {action:?}"));
        match action {
            Action::Answer(request, errno) => self.answer(cx, request, errno)?,
            Action::AnswerWith { request, at, message } => {
                self.write(request, at, &message)?;
                self.answer(cx, request, 0)?;
            }
            Action::Zero { request, from, len } => self.write(request, from, &vec![0; len])?,
            Action::Open { ticket, name, mode, .. } => {
                let after = env.rng.range(1_000, 20_000_000);
                env.plan.push((after, Job::Open(ticket, name, mode)));
            }
            Action::Close { ticket, store } => {
                self.engine.begin_close(store)?;
                let after = env.rng.range(1_000, 20_000_000);
                env.plan.push((after, Job::Close(ticket, store)));
            }
            Action::TakeOver { .. } => return Err("a device is taken over where there is one share".into()),
            Action::Io(ticket, session, op) => match self.rtrs.memory(session) {
                Some(memory) => self.engine.start(session, ticket, op, memory)?,
                // A session that is gone is answered to nobody.
                None => return Err(format!("an operation of {session:?}, which is gone")),
            },
        }
        Ok(())
    }

    fn answer(&mut self, cx: &mut Cx<'_>, request: RequestKey, errno: i32) -> Check {
        if !self.asked.remove(&request) {
            return Err(format!("{request:?} is answered twice"));
        }
        self.about.remove(&request);
        let before = self.closes.remove(&request).unwrap_or_default();
        if let Some(key) = before.iter().find(|key| self.asked.contains(key)) {
            return Err(format!("{request:?}, a close, is answered before {key:?}"));
        }
        self.rtrs.answer(cx, request, errno);
        Ok(())
    }

    fn write(&self, request: RequestKey, at: usize, bytes: &[u8]) -> Check {
        if !self.asked.contains(&request) {
            return Err(format!("an answer is written after {request:?} was answered"));
        }
        let memory = self.rtrs.memory(request.session);
        let memory = memory.ok_or_else(|| format!("{request:?} has no memory"))?;
        let written = memory.write(at, bytes);
        written.map_err(|e| format!("an answer outside the session's memory: {e}"))
    }

    /// A job has come to its end.
    pub(crate) fn finish(&mut self, cx: &mut Cx<'_>, job: Job, env: &mut ServerEnv<'_>) -> Check {
        match job {
            Job::Allocate(ticket, bytes) => {
                let none = env.rng.chance(self.plan.no_memory);
                env.coverage.note_if("no memory", none);
                let memory = match none {
                    true => Err(MemError::Limit("memory")),
                    false => Pages::allocate(bytes),
                };
                self.rtrs.ready(cx, ticket, memory);
            }
            Job::Open(ticket, name, mode) => {
                let opened = self.open(&name, mode, env);
                self.rnbd.opened(cx.now, ticket, opened);
            }
            Job::Close(ticket, store) => {
                self.engine.close(store, env.disks);
                self.rnbd.closed(cx.now, ticket);
            }
            Job::Io(id) => {
                let ServerEnv {
                    disks,
                    ledger,
                    rng,
                    coverage,
                    ..
                } = env;
                for (ticket, result) in self.engine.finish(id, disks, ledger, rng, coverage)? {
                    self.rnbd.io_done(ticket, result);
                }
            }
        }
        Ok(())
    }

    fn open(&mut self, name: &[u8], mode: AccessMode, env: &mut ServerEnv<'_>) -> Result<Opened, OpenRefused> {
        let device = core::str::from_utf8(name).ok().and_then(|n| n.strip_prefix('d'));
        let device = device
            .and_then(|n| n.parse::<usize>().ok())
            .filter(|n| *n < env.disks.len());
        let device = device.ok_or(OpenRefused::from(Errno::ENOENT))?;
        let identity = Identity(name.to_vec());
        if mode.writable() && self.engine.is_written(device) {
            env.coverage.note("device taken");
            return Err(OpenRefused {
                errno: Errno::EPERM,
                identity: Some(identity),
            });
        }
        let size = env.disks[device].blocks() * BLOCK as u64;
        let longest = (self.plan.longest * BLOCK as u64).min(size);
        Ok(Opened {
            store: self.engine.open(device, mode.writable(), env.disks),
            geometry: Geometry {
                size,
                logical_block_size: BLOCK as u32,
                physical_block_size: 4096,
                max_transfer: 1 << 20,
                max_discard: longest,
                discard_granularity: BLOCK as u32,
                read_only: !mode.writable(),
                write_cache: true,
                fua: true,
                max_write_zeroes: if self.plan.zeroes { longest } else { 0 },
                queue_depth: 64,
            },
            identity,
            label: format!("disk {device}"),
            instance: self.plan.names.instance(device),
        })
    }

    /// The server's operator ends a session. False: there is none.
    pub(crate) fn end_a_session(&mut self, cx: &mut Cx<'_>, rng: &mut Rng) -> bool {
        let keys: Vec<SessionKey> = self.sessions.keys().copied().collect();
        if !keys.is_empty() {
            self.rtrs.close_session(cx, keys[rng.index(keys.len())]);
        }
        !keys.is_empty()
    }

    /// The server's operator ends a path. False: there is none.
    pub(crate) fn end_a_path(&mut self, cx: &mut Cx<'_>, rng: &mut Rng) -> bool {
        let listing = self.rtrs.listing();
        let paths = listing.iter().flat_map(|s| s.paths.iter().map(|p| (s.session, p.path)));
        let paths: Vec<_> = paths.collect();
        match paths.is_empty() {
            true => false,
            false => {
                let (session, path) = paths[rng.index(paths.len())];
                self.rtrs.close_path(cx, session, path)
            }
        }
    }

    /// Memory is there for everybody.
    pub(crate) fn have_memory(&mut self) {
        self.plan.no_memory = 0.0;
    }

    /// Whether nothing is left of any session.
    pub(crate) fn check_empty(&self) -> Check {
        let sessions = (self.sessions.len(), self.rtrs.sessions().len());
        match (self.rnbd.is_idle(), self.engine.is_idle(), self.asked.len(), sessions) {
            (true, true, 0, (0, 0)) => Ok(()),
            left => Err(format!(
                "the server is not empty: idle, disks idle, requests, sessions: {left:?}"
            )),
        }
    }
}
