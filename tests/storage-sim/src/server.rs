//! The server's host: RTRS, RNBD, and disks that take their time.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rnbd::{
    Errno,
    block::Geometry,
    proto::{AccessMode, ClientMsg, instance::Instance},
    server::{
        Limits, Server as Rnbd,
        action::{Identity, OpenRefused, Opened, Output, Ticket},
        disk::StoreId,
        fair_queue::QueueLimits,
        transport::Transport,
    },
};
use roce_verbs::{
    Instant,
    mem::{MemError, Pages},
};
use rtrs::{
    Cx,
    server::{
        Server as Rtrs, ServerConfig,
        request::{Output as RtrsOutput, Request, RequestKey, SessionKey, Ticket as MemoryTicket},
    },
};

use roce_sim::{Check, Coverage, Notes, Rng};

use crate::{
    client::honest,
    disk::{BLOCK, SimDisk},
    engine::{Engine, RunId},
    ledger::{Ledger, Life},
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
    pub(crate) rnbd: Rnbd<Engine>,
    sessions: BTreeMap<SessionKey, Option<Life>>,
    answers: Answers,
    plan: ServerPlan,
    notes: Notes,
}

/// Checks of the server's answers.
#[derive(Debug, Default)]
struct Answers {
    /// Requests that RTRS has handed over and that are not answered.
    asked: BTreeSet<RequestKey>,
    /// Requests that came before a request to close their device.
    closes: BTreeMap<RequestKey, Vec<RequestKey>>,
    /// The device of a block request, as its client names it.
    about: BTreeMap<RequestKey, u32>,
    /// The first mistake.
    wrong: OnceCell<String>,
}

impl Answers {
    /// Remembers a request, and which block requests come before a close.
    fn request(&mut self, request: &Request) -> Check {
        let key = request.key;
        let in_use = |other: &RequestKey| (other.session, other.chunk) == (key.session, key.chunk);
        if self.asked.iter().any(in_use) {
            return Err(format!("{key:?} is in a chunk that is worked on"));
        }
        self.asked.insert(key);
        match ClientMsg::parse(&request.header) {
            Ok(ClientMsg::Io(m)) => {
                self.about.insert(key, m.device_id.get());
            }
            Ok(ClientMsg::Close(m)) => {
                let about = |(of, device): (&RequestKey, &u32)| {
                    (of.session == key.session && *device == m.device_id.get()).then_some(*of)
                };
                self.closes.insert(key, self.about.iter().filter_map(about).collect());
            }
            _ => {}
        }
        Ok(())
    }

    fn answer(&mut self, request: RequestKey) -> Check {
        if !self.asked.remove(&request) {
            return Err(format!("{request:?} is answered twice"));
        }
        self.about.remove(&request);
        let before = self.closes.remove(&request).unwrap_or_default();
        match before.iter().find(|key| self.asked.contains(key)) {
            Some(key) => Err(format!("{request:?}, a close, is answered before {key:?}")),
            None => Ok(()),
        }
    }

    fn note(&self, checked: Check) {
        if let Err(text) = checked {
            let _ = self.wrong.set(text);
        }
    }
}

/// RTRS below RNBD, with checks.
struct Checked<'a, 'b> {
    rtrs: &'a mut Rtrs,
    cx: &'a mut Cx<'b>,
    answers: &'a mut Answers,
    notes: &'a Notes,
}

impl Transport for Checked<'_, '_> {
    fn now(&self) -> Instant {
        self.cx.now
    }

    fn memory(&self, session: SessionKey) -> Option<&Arc<Pages>> {
        let memory = self.rtrs.memory(session);
        if memory.is_none() {
            let text = format!("an operation of {session:?}, which is gone");
            self.answers.note(Err(text));
        }
        memory
    }

    fn write(&mut self, request: RequestKey, at: usize, bytes: &[u8]) -> bool {
        if !self.answers.asked.contains(&request) {
            let text = format!("an answer is written after {request:?} was answered");
            self.answers.note(Err(text));
        }
        let memory = self.rtrs.memory(request.session);
        let written = memory.is_some_and(|memory| memory.write(at, bytes).is_ok());
        if !written {
            let text = format!("an answer of {request:?} outside the session's memory");
            self.answers.note(Err(text));
        }
        written
    }

    fn answer(&mut self, request: RequestKey, errno: i32) {
        self.notes.print(self.cx.now.as_nanos(), || {
            format!("server: {request:?} is answered {errno}")
        });
        let checked = self.answers.answer(request);
        self.answers.note(checked);
        self.rtrs.answer(self.cx, request, errno);
    }
}

/// RTRS below RNBD, and RNBD.
macro_rules! parts {
    ($self:expr, $cx:expr) => {
        (
            &mut Checked {
                rtrs: &mut $self.rtrs,
                cx: $cx,
                answers: &mut $self.answers,
                notes: &$self.notes,
            },
            &mut $self.rnbd,
        )
    };
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
            rnbd: Rnbd::new(Limits::default(), Engine::new(plan.limits, plan.garbage)),
            sessions: BTreeMap::new(),
            answers: Answers::default(),
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
                self.on_output(cx, output, env)?;
            }
            let (transport, rnbd) = parts!(self, cx);
            moved |= rnbd.poll_disks(transport);
            while let Some(output) = self.rnbd.poll_output() {
                moved = true;
                self.act(cx, output, env)?;
            }
            self.verdict()?;
            if !moved {
                break;
            }
        }
        let ServerEnv {
            disks,
            rng,
            plan,
            coverage,
            ..
        } = env;
        let engine = self.rnbd.disks_mut();
        coverage.note_if("one flush for several", engine.joined);
        engine.pump(disks, rng, |after, id| plan.push((after, Job::Io(id))))
    }

    /// Returns the first mistake of the server.
    fn verdict(&mut self) -> Check {
        self.rnbd.disks_mut().verdict()?;
        self.answers.wrong.take().map_or(Ok(()), Err)
    }

    fn on_output(&mut self, cx: &mut Cx<'_>, output: RtrsOutput, env: &mut ServerEnv<'_>) -> Check {
        let now = cx.now;
        if !matches!(output, RtrsOutput::Free(_)) {
            self.notes.print(now.as_nanos(), || format!("server: {output:?}"));
        }
        match &output {
            RtrsOutput::SessionOpened(opened) => {
                self.sessions.insert(opened.session, life(&opened.name));
            }
            RtrsOutput::SessionClosed { session, .. } => {
                let Some(life) = self.sessions.remove(session) else {
                    return Err(format!("{session:?} is closed, which was not open"));
                };
                if let Some(key) = self.answers.asked.iter().find(|key| key.session == *session) {
                    return Err(format!("{session:?} is closed before {key:?} is answered"));
                }
                if let Some(life) = life {
                    env.ledger.session_over(now.as_nanos(), life);
                }
            }
            RtrsOutput::PathDown { why, .. } => honest(why)?,
            RtrsOutput::Request(request) => {
                if !self.sessions.contains_key(&request.key.session) {
                    return Err(format!("{:?} is of no session", request.key));
                }
                self.answers.request(request)?;
            }
            RtrsOutput::Allocate { ticket, bytes } => {
                let after = env.rng.range(1_000, 3_000_000);
                env.plan.push((after, Job::Allocate(*ticket, *bytes)));
            }
            _ => {}
        }
        let (transport, rnbd) = parts!(self, cx);
        rnbd.rtrs(transport, output);
        Ok(())
    }

    fn act(&mut self, cx: &Cx<'_>, output: Output, env: &mut ServerEnv<'_>) -> Check {
        match output {
            Output::Rtrs(_) => return Ok(()),
            Output::Open {
                ticket, ref name, mode, ..
            } => {
                let after = env.rng.range(1_000, 20_000_000);
                env.plan.push((after, Job::Open(ticket, name.clone(), mode)));
            }
            Output::Close { ticket, store } => {
                self.rnbd.disks_mut().begin_close(store)?;
                let after = env.rng.range(1_000, 20_000_000);
                env.plan.push((after, Job::Close(ticket, store)));
            }
        }
        self.notes.print(cx.now.as_nanos(), || format!("server: {output:?}"));
        Ok(())
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
                let (transport, rnbd) = parts!(self, cx);
                rnbd.opened(transport, ticket, opened);
            }
            Job::Close(ticket, store) => {
                self.rnbd.disks_mut().close(store, env.disks);
                let (transport, rnbd) = parts!(self, cx);
                rnbd.closed(transport, ticket);
            }
            Job::Io(id) => {
                let ServerEnv {
                    disks,
                    ledger,
                    rng,
                    coverage,
                    ..
                } = env;
                let engine = self.rnbd.disks_mut();
                engine.finish(id, disks, ledger, rng, coverage)?;
                let (transport, rnbd) = parts!(self, cx);
                rnbd.poll_disks(transport);
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
        if mode.writable() && self.rnbd.disks().is_written(device) {
            env.coverage.note("device taken");
            return Err(OpenRefused {
                errno: Errno::EPERM,
                identity: Some(identity),
            });
        }
        let size = env.disks[device].blocks() * BLOCK as u64;
        let longest = (self.plan.longest * BLOCK as u64).min(size);
        Ok(Opened {
            store: self.rnbd.disks_mut().open(device, mode.writable(), env.disks),
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
        let engine = self.rnbd.disks();
        match (
            self.rnbd.is_idle(),
            engine.is_idle(),
            self.answers.asked.len(),
            sessions,
        ) {
            (true, true, 0, (0, 0)) => Ok(()),
            left => Err(format!(
                "the server is not empty: idle, disks idle, requests, sessions: {left:?}"
            )),
        }
    }
}
