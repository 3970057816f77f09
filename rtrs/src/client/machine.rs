//! All sessions of a loop.

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    AsyncEvent, Completion, Instant,
    provider::{Event, QpId},
};

use crate::{
    Cx, Error, IoError, PathError,
    addr::PathAddr,
    client::{
        buffers::{Buffer, Buffers, LentId},
        config::{SessionConfig, SessionInfo},
        env::{ConnKey, Env, Names},
        policy::Policy,
        request::{Output, SessionId, Submission},
        session::Session,
        status::{PathCommand, PathCounters, PathId, PathStatus},
    },
};

/// The client's side of RTRS: sessions with servers. `U` is its user's part of each request, which comes back with the answer.
///
/// It does nothing by itself. Whoever drives it hands it completions and events of the provider, calls
/// [`timeout`](Self::timeout) when [`next_timeout`](Self::next_timeout) says so, takes what it tells from
/// [`poll_output`](Self::poll_output), and ends each turn with [`end_batch`](Self::end_batch), which posts what the turn has
/// brought.
#[derive(Debug)]
pub struct Client<U = u64> {
    sessions: BTreeMap<SessionId, Session<U>>,
    next: u32,
    names: Names,
    out: VecDeque<Output<U>>,
    dirty: Vec<ConnKey>,
    /// Closed, but for buffers that their user still has.
    closed: Vec<SessionId>,
    cpu: u16,
}

impl<U> Default for Client<U> {
    fn default() -> Self {
        Self {
            sessions: BTreeMap::new(),
            next: 0,
            names: Names::default(),
            out: VecDeque::new(),
            dirty: Vec::new(),
            closed: Vec::new(),
            cpu: 0,
        }
    }
}

impl<U> Client<U> {
    /// Without a session.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins to open a session; [`Output::Opened`] or [`Output::OpenFailed`] follows.
    ///
    /// # Errors
    /// When the configuration is not possible.
    pub fn open(&mut self, cx: &mut Cx<'_>, config: SessionConfig) -> Result<SessionId, Error> {
        config.check()?;
        let id = SessionId(self.next);
        self.next = self.next.wrapping_add(1);
        let (sessions, mut env) = self.parts(cx);
        let session = Session::open(&mut env, id, config);
        sessions.insert(id, session);
        self.sweep(id);
        Ok(id)
    }

    /// Closes a session: requests in flight end with an error, then comes [`Output::Closed`].
    pub fn close(&mut self, cx: &mut Cx<'_>, session: SessionId) {
        self.with(cx, session, Session::close);
    }

    /// The processor that the loop runs on, until it says another. It is only for [`PathStats::cpu_migration`](super::PathStats).
    pub fn set_cpu(&mut self, cpu: u16) {
        self.cpu = cpu;
    }

    /// Abilities of a session; `None` until it is open.
    pub fn info(&self, session: SessionId) -> Option<SessionInfo> {
        self.sessions.get(&session)?.info
    }

    /// Whether a session takes requests.
    ///
    /// # Errors
    /// Why not.
    pub fn state(&self, session: SessionId) -> Result<(), PathError> {
        let session = self.sessions.get(&session).ok_or(PathError::Closed)?;
        session.state()
    }

    /// Adds a path to a session that is open, or has lost all of its paths. [`PathNews::Done`](super::PathNews::Done) says whether it
    /// came up; if not it is gone again.
    ///
    /// # Errors
    /// When the session has it already, has as many as it may have, or is being opened or closed.
    pub fn add_path(&mut self, cx: &mut Cx<'_>, session: SessionId, addr: PathAddr) -> Result<PathId, Error> {
        self.in_session(cx, session, |s, env| s.add_path(env, addr))
    }

    /// Asks something for a path. [`PathNews::Done`](super::PathNews::Done) says how it ended.
    ///
    /// # Errors
    /// When there is no such path, or it can't be asked that now ([`Error::Busy`]).
    pub fn path_command(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionId,
        path: PathId,
        command: PathCommand,
    ) -> Result<(), Error> {
        self.in_session(cx, session, |s, env| s.command(env, path, command))
    }

    /// Changes how paths are chosen, from the next request on.
    ///
    /// # Errors
    /// When there is no such session.
    pub fn set_policy(&mut self, cx: &mut Cx<'_>, session: SessionId, policy: Policy) -> Result<(), Error> {
        self.in_session(cx, session, |s, env| {
            s.set_policy(env, policy);
            Ok(())
        })
    }

    /// Changes how often and after which time a lost path is connected again, from its next loss or failure on.
    ///
    /// # Errors
    /// When there may not be so many attempts, or there is no such session.
    pub fn set_reconnects(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionId,
        attempts: u32,
        delay: Duration,
    ) -> Result<(), Error> {
        self.in_session(cx, session, |s, _| s.set_reconnects(attempts, delay))
    }

    /// The paths of a session.
    pub fn paths(&self, session: SessionId) -> Vec<PathStatus> {
        self.sessions.get(&session).map_or_else(Vec::new, Session::statuses)
    }

    /// How a session's paths are chosen.
    pub fn policy(&self, session: SessionId) -> Option<Policy> {
        self.sessions.get(&session).map(|session| session.config.policy)
    }

    /// How often at most, and after which time, a lost path of a session is connected again.
    pub fn reconnects(&self, session: SessionId) -> Option<(u32, Duration)> {
        let config = &self.sessions.get(&session)?.config;
        Some((config.max_reconnects, config.reconnect_delay))
    }

    /// Sets counters of a path to zero. What is in flight is none of them.
    ///
    /// # Errors
    /// When there is no such path.
    pub fn reset_path_stats(&mut self, session: SessionId, path: PathId, which: PathCounters) -> Result<(), Error> {
        let session = self.sessions.get_mut(&session).ok_or(Error::NoPath)?;
        session.reset_stats(path, which)
    }

    fn in_session<T>(
        &mut self,
        cx: &mut Cx<'_>,
        session: SessionId,
        f: impl FnOnce(&mut Session<U>, &mut Env<'_, '_, U>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut done = Err(Error::Down(PathError::Closed));
        self.with(cx, session, |s, env| done = f(s, env));
        done
    }

    /// Permits that requests of a session have: of those that were sent and have not ended.
    pub fn permits(&self, session: SessionId) -> usize {
        self.sessions.get(&session).map_or(0, Session::permits)
    }

    /// Sessions that are open, are being opened, or have buffers that their user still holds.
    pub fn sessions(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }

    /// A registered buffer of `len` bytes (content undefined). It has to be given back, or submitted.
    ///
    /// # Errors
    /// [`Error::NoBuffer`] when the session's memory is used up, [`Error::Down`] when it is not open yet, or is
    /// being closed; that no path is up is no reason.
    pub fn take_buffer(&mut self, cx: &mut Cx<'_>, session: SessionId, len: usize) -> Result<Buffer, Error> {
        let found = self.sessions.get_mut(&session);
        found
            .ok_or(Error::Down(PathError::Closed))?
            .usable_buffers()?
            .take(cx, len)
    }

    /// Gives a buffer back to its session.
    pub fn give_buffer(&mut self, session: SessionId, buffer: Buffer) {
        if let Some(buffers) = self.buffers_mut(session) {
            buffers.give(buffer);
        }
        self.sweep(session);
    }

    /// Registers memory of somebody else with a session ([`Buffers::lend`]).
    ///
    /// # Errors
    /// As there; [`Error::Down`] when the session is not open yet, or is being closed.
    pub fn lend_memory(&mut self, cx: &mut Cx<'_>, session: SessionId, memory: Arc<Pages>) -> Result<LentId, Error> {
        let found = self.sessions.get_mut(&session);
        let buffers = found.ok_or(Error::Down(PathError::Closed))?.usable_buffers()?;
        Ok(buffers.lend(cx, memory)?)
    }

    /// Ends the registration of memory that was lent to a session, which no request under way has a buffer of.
    pub fn take_memory_back(&mut self, cx: &mut Cx<'_>, session: SessionId, memory: LentId) {
        if let Some(buffers) = self.buffers_mut(session) {
            buffers.take_back(cx, memory);
        }
    }

    /// The memory of a session's buffers.
    pub fn buffers(&self, session: SessionId) -> Option<&Buffers> {
        self.sessions.get(&session).map(Session::buffers)
    }

    /// The buffers themselves, for who takes and gives back many.
    pub fn buffers_mut(&mut self, session: SessionId) -> Option<&mut Buffers> {
        self.sessions
            .get_mut(&session)
            .map(|session| &mut session.inflight.buffers)
    }

    /// Sends a request: the user's header and, for a write, the data of the buffer; for a read its answer lands there. It ends
    /// with [`Output::Done`], exactly once, also if it can't be sent.
    pub fn submit(&mut self, cx: &mut Cx<'_>, session: SessionId, request: Submission<U>) {
        let (sessions, mut env) = self.parts(cx);
        match sessions.get_mut(&session) {
            Some(found) => found.submit(&mut env, request),
            None => env
                .out
                .push_back(request.done(session, Err(IoError::Path(PathError::Closed)))),
        }
    }

    /// A work request has completed. False: the queue pair is none of this client's.
    pub fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) -> bool {
        let Some(key) = self.names.qp(qp) else { return false };
        self.with(cx, key.session, |s, env| s.completion(env, key.path, key.cid, wc));
        true
    }

    /// Handles an event. False: not to this client, or not to it alone.
    pub fn event(&mut self, cx: &mut Cx<'_>, event: &Event) -> bool {
        match event {
            Event::Cm { id, kind } => {
                let Some(key) = self.names.cm(*id) else { return false };
                let kind = kind.clone();
                self.with(cx, key.session, |s, env| s.cm_event(env, key.path, key.cid, kind));
                true
            }
            Event::Drained(qp) => {
                let Some(key) = self.names.qp(*qp) else { return false };
                self.with(cx, key.session, |s, env| s.drained(env, key.path, key.cid));
                true
            }
            Event::DeviceRemoved(device) => {
                self.each(cx, |s, env| s.device_removed(env, *device));
                false
            }
            Event::Async(device, AsyncEvent::PortError) => {
                self.each(cx, |s, env| s.port_down(env, *device));
                false
            }
            // A queue pair that fails flushes.
            Event::Async(..) => false,
        }
    }

    /// The end of a turn: receives go back, and what waits is posted.
    pub fn end_batch(&mut self, cx: &mut Cx<'_>) {
        while !self.dirty.is_empty() {
            for key in core::mem::take(&mut self.dirty) {
                self.with(cx, key.session, |s, env| s.post(env, key.path, key.cid));
            }
        }
        // The last buffers may have gone back by `buffers_mut`.
        for id in core::mem::take(&mut self.closed) {
            self.sweep(id);
        }
    }

    /// Does what is due.
    pub fn timeout(&mut self, cx: &mut Cx<'_>) {
        let now = cx.now;
        let due = |s: &Session<U>| s.next_timeout().is_some_and(|due| due <= now);
        if self.sessions.values().any(due) {
            self.each(cx, |s, env| s.timeout(env));
        }
    }

    /// When to call [`timeout`](Self::timeout); `None`: nothing will be due by itself.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.sessions.values().filter_map(Session::next_timeout).min()
    }

    /// The next thing to tell the user.
    pub fn poll_output(&mut self) -> Option<Output<U>> {
        self.out.pop_front()
    }

    /// The sessions, and what they work with.
    fn parts<'a, 'b>(&'a mut self, cx: &'a mut Cx<'b>) -> (&'a mut BTreeMap<SessionId, Session<U>>, Env<'a, 'b, U>) {
        let env = Env {
            cx,
            names: &mut self.names,
            out: &mut self.out,
            dirty: &mut self.dirty,
            cpu: self.cpu,
        };
        (&mut self.sessions, env)
    }

    fn with(&mut self, cx: &mut Cx<'_>, id: SessionId, f: impl FnOnce(&mut Session<U>, &mut Env<'_, '_, U>)) {
        let (sessions, mut env) = self.parts(cx);
        if let Some(session) = sessions.get_mut(&id) {
            f(session, &mut env);
            if session.is_closed() {
                self.sweep(id);
            }
        }
    }

    fn each(&mut self, cx: &mut Cx<'_>, f: impl Fn(&mut Session<U>, &mut Env<'_, '_, U>)) {
        let ids: Vec<_> = self.sessions.keys().copied().collect();
        for id in ids {
            self.with(cx, id, &f);
        }
    }

    /// Forgets a session of which nothing is left.
    fn sweep(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id).filter(|s| s.is_closed()) else {
            return;
        };
        match session.buffers().lent() {
            0 => drop(self.sessions.remove(&id)),
            _ if self.closed.contains(&id) => {}
            _ => self.closed.push(id),
        }
    }
}
