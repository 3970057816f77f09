//! A path: its state, its connections, and what it learned from the server.

use core::time::Duration;
use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use roce_verbs::mem::Pages;
use roce_verbs::{
    Instant,
    provider::{CqId, DeviceIx, MrInfo, PdId},
};
use smallvec::SmallVec;

use crate::{
    Error, PathError,
    addr::PathAddr,
    client::{
        config::SessionConfig,
        conn::{Conn, Post},
        env::{ConnKey, Env},
        inflight::InFlightTable,
        request::SessionId,
        stage::{Attempt, Reached, Retry, State, Step, Up},
        state::{PATH, PathAction, PathEvent, PathState},
        status::{PathCommand, PathId, PathStats},
        terms::Terms,
    },
    heartbeat::Beat,
    proto::{Imm, Uuid, info::ChunkAddr},
    table,
};

/// How long a path that is closed waits for the server to disconnect.
const DISCONNECT_TIME: Duration = Duration::from_secs(1);
/// Delay of a requested reconnect of a path that was up (`RTRS_RECONNECT_BACKOFF`): while the server closes the path it refuses
/// it.
const BACKOFF: Duration = Duration::from_secs(1);

/// Report of a path to its session.
#[derive(Debug)]
pub(super) enum Report {
    /// The handshake has to begin.
    Begin,
    /// It carries requests; `again` if it has done so before.
    Up { again: bool },
    /// It does not any more, and why.
    Down(PathError),
    /// An attempt to connect failed.
    Failed(Error),
    /// Requests that it has not answered. `outlived`: the session was lost while they were in flight.
    RequestsLost { permits: Vec<u16>, outlived: bool },
    /// Its resources on a removed device are freed.
    LeftDevice,
    /// It is closed.
    Closed,
    /// It was removed from the session.
    Forgotten,
}

/// Registered memory of a path.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) pages: Arc<Pages>,
    pub(super) mr: MrInfo,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) session: SessionId,
    pub(super) id: PathId,
    /// Its index in the session.
    pub(super) index: u16,
    pub(super) addr: PathAddr,
    /// Stays the same over reconnects.
    pub(super) uuid: Uuid,
    pub(super) state: State,
    pub(super) reached: Reached,
    /// Counts attempts, for the server.
    pub(super) recon_cnt: u16,
    pub(super) device: Option<DeviceIx>,
    /// The last device that it used, whose resources the session keeps for it.
    pub(super) entered: Option<DeviceIx>,
    /// The device is gone.
    lost_device: bool,
    pub(super) pd: Option<PdId>,
    pub(super) cq: Option<CqId>,
    pub(super) conns: Vec<Conn>,
    pub(super) terms: Option<Terms>,
    /// Addresses of the server's chunks, with their current keys.
    pub(super) chunks: Vec<ChunkAddr>,
    /// Buffers of key responses: 8 bytes per posted receive. `None` if the server sends none.
    pub(super) key_messages: Option<Region>,
    /// Request and response of the session's information.
    pub(super) information: Option<Region>,
    /// Keys that the server has revoked with a SEND, before it answers their requests.
    pub(super) revoked: BTreeSet<u32>,
    /// Round trip of the last heartbeat since the path is up.
    pub(super) latency: Option<Duration>,
    pub(super) stats: PathStats,
    /// Pending commands.
    pub(super) commands: SmallVec<[PathCommand; 1]>,
    /// Why an added path could not be connected.
    pub(super) failure: Option<Error>,
    /// Attempts since the path was up.
    attempts: u32,
    /// Why it is not up.
    why: Option<PathError>,
    events: VecDeque<PathEvent>,
    /// For the session, which takes them when it [settles](super::session::Session::settle) the path.
    pub(super) reports: Vec<Report>,
}

impl Path {
    pub(super) fn new(session: SessionId, index: u16, (id, addr, uuid): (PathId, PathAddr, Uuid)) -> Self {
        Self {
            session,
            id,
            index,
            addr,
            uuid,
            state: State::Connecting(Attempt::default()),
            reached: Reached::Nothing,
            recon_cnt: 0,
            device: None,
            entered: None,
            lost_device: false,
            pd: None,
            cq: None,
            conns: Vec::new(),
            terms: None,
            chunks: Vec::new(),
            key_messages: None,
            information: None,
            revoked: BTreeSet::new(),
            latency: None,
            stats: PathStats::of_new_path(),
            commands: SmallVec::new(),
            failure: None,
            attempts: 0,
            why: None,
            events: VecDeque::new(),
            reports: Vec::new(),
        }
    }

    pub(super) fn state(&self) -> PathState {
        self.state.name()
    }

    /// Requests may take it.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, State::Connected(_))
    }

    pub(super) fn up(&self) -> Option<&Up> {
        match &self.state {
            State::Connected(up) => Some(up),
            _ => None,
        }
    }

    pub(super) fn up_mut(&mut self) -> Option<&mut Up> {
        match &mut self.state {
            State::Connected(up) => Some(up),
            _ => None,
        }
    }

    pub(super) fn attempt_mut(&mut self) -> Option<&mut Attempt> {
        match &mut self.state {
            State::Connecting(attempt) => Some(attempt),
            _ => None,
        }
    }

    /// The attempt to connect that is in progress, or one that has not begun.
    pub(super) fn attempt(&self) -> Attempt {
        match self.state {
            State::Connecting(attempt) => attempt,
            _ => Attempt::default(),
        }
    }

    /// Why it is not up.
    pub(super) fn why(&self) -> PathError {
        self.why.clone().unwrap_or(PathError::Closed)
    }

    pub(super) fn key(&self, cid: u16) -> ConnKey {
        ConnKey {
            session: self.session,
            path: self.index,
            cid,
        }
    }

    /// Marks a connection that has work to post at the end of the turn.
    pub(super) fn mark_dirty<U>(&mut self, env: &mut Env<'_, '_, U>, cid: u16) {
        let key = self.key(cid);
        if let Some(conn) = self.conns.get_mut(usize::from(cid))
            && !core::mem::replace(&mut conn.dirty, true)
        {
            env.dirty.push(key);
        }
    }

    pub(super) fn push<U>(&mut self, env: &mut Env<'_, '_, U>, cid: u16, work: Post) {
        if let Some(conn) = self.conns.get_mut(usize::from(cid))
            && conn.queue.push(work).is_ok()
        {
            self.mark_dirty(env, cid);
        }
    }

    /// Queues an event. [`run`](Self::run) does the actions.
    pub(super) fn meet(&mut self, event: PathEvent) {
        self.events.push_back(event);
    }

    /// A path that is up, or is being connected, can't go on.
    pub(super) fn fail(&mut self, error: Error) {
        match self.state() {
            PathState::Connected => {
                let why = match error {
                    Error::Path(why) => why,
                    Error::Verbs(e) => e.into(),
                    other => PathError::Cm(other.to_string()),
                };
                self.why = Some(why);
                self.meet(PathEvent::Broken);
            }
            PathState::Connecting => {
                self.why = Some(match &error {
                    Error::Path(why) => why.clone(),
                    other => PathError::Cm(other.to_string()),
                });
                self.reports.push(Report::Failed(error));
                self.meet(PathEvent::Broken);
            }
            _ => {}
        }
    }

    pub(super) fn fail_path(&mut self, why: PathError) {
        self.fail(Error::Path(why));
    }

    /// Does the actions of queued events.
    pub(super) fn run<U>(&mut self, env: &mut Env<'_, '_, U>, inflight: &mut InFlightTable<U>, config: &SessionConfig) {
        while let Some(event) = self.events.pop_front() {
            let Some((next, actions)) = table::step(PATH, self.state(), event) else {
                // The path was past it.
                tracing::trace!(state = ?self.state(), ?event, "not in this state");
                continue;
            };
            self.state.enter(next, env.cx.now, config);
            for action in actions {
                self.act(env, inflight, config, *action);
            }
        }
    }

    fn act<U>(
        &mut self,
        env: &mut Env<'_, '_, U>,
        inflight: &mut InFlightTable<U>,
        config: &SessionConfig,
        action: PathAction,
    ) {
        match action {
            PathAction::BeginHandshake => self.reports.push(Report::Begin),
            PathAction::CountAttempt => self.attempts = self.attempts.saturating_add(1),
            PathAction::ResetAttempts => self.attempts = 0,
            PathAction::DrainQps => self.drain(env),
            PathAction::Disconnect => self.disconnect(env),
            // The path may close before its session takes the report.
            PathAction::Failover => self.reports.push(Report::RequestsLost {
                permits: inflight.path_lost(env.cx, self.index, self.device, env.out),
                outlived: self.state.outlived(),
            }),
            PathAction::ArmRetry => self.arm_retry(env, config),
            PathAction::RetryNow => self.retry_soon(env),
            PathAction::DestroyQps => {
                self.destroy(env);
                self.leave_lost_device();
            }
            PathAction::Report => self.report(),
            PathAction::Forget => self.reports.push(Report::Forgotten),
        }
    }

    fn report(&mut self) {
        let report = match self.state() {
            PathState::Connected => {
                (self.why, self.latency) = (None, None);
                let again = core::mem::replace(&mut self.reached, Reached::Up) == Reached::Up;
                Report::Up { again }
            }
            PathState::Closed => Report::Closed,
            _ => Report::Down(self.why()),
        };
        self.reports.push(report);
    }

    fn drain<U>(&mut self, env: &mut Env<'_, '_, U>) {
        for conn in &mut self.conns {
            conn.queue.close();
            conn.used.clear();
            match conn.qp {
                Some(qp) if !conn.drained => env.cx.provider.drain(qp),
                Some(_) => {}
                None => conn.drained = true,
            }
        }
        self.look_drained();
    }

    /// Its device is removed. Later attempts find another one, or the same when it is back.
    pub(super) fn lose_device(&mut self) {
        self.lost_device = true;
        match self.device {
            Some(_) => self.fail_path(PathError::Cm("the device is gone".into())),
            None => self.leave_lost_device(),
        }
    }

    fn leave_lost_device(&mut self) {
        if core::mem::take(&mut self.lost_device) {
            self.entered = None;
            self.reports.push(Report::LeftDevice);
        }
    }

    /// A queue pair is drained.
    pub(super) fn drained(&mut self, cid: u16) {
        if let Some(conn) = self.conns.get_mut(usize::from(cid)) {
            conn.drained = true;
        }
        self.look_drained();
    }

    fn look_drained(&mut self) {
        if self.conns.iter().all(|conn| conn.drained) {
            self.meet(PathEvent::Drained);
            self.look_gone();
        }
    }

    /// Closed when all queue pairs are drained, and the server has disconnected all of them.
    fn look_gone(&mut self) {
        let State::Closing { until, .. } = &mut self.state else {
            return;
        };
        let over = |conn: &Conn| conn.drained && (conn.left || !conn.established || until.is_none());
        if self.conns.iter().all(over) {
            *until = None;
            self.meet(PathEvent::Gone);
        }
    }

    fn disconnect<U>(&mut self, env: &mut Env<'_, '_, U>) {
        for conn in &self.conns {
            env.cx.provider.cm_disconnect(conn.cm);
        }
        if let State::Closing { until, .. } = &mut self.state {
            *until = (!self.conns.is_empty()).then(|| env.cx.now + DISCONNECT_TIME);
        }
        self.look_gone();
    }

    fn destroy<U>(&mut self, env: &mut Env<'_, '_, U>) {
        for conn in self.conns.drain(..) {
            env.names.remove_cm(conn.cm);
            env.cx.provider.cm_destroy(conn.cm);
            if let Some(qp) = conn.qp {
                env.names.remove_qp(qp);
                env.cx.provider.destroy_qp(qp);
            }
        }
        if let Some(cq) = self.cq.take() {
            env.cx.provider.destroy_cq(cq);
        }
        for region in self.key_messages.take().into_iter().chain(self.information.take()) {
            env.cx.provider.deregister(region.mr.id);
        }
        self.revoked.clear();
        (self.device, self.pd) = (None, None);
    }

    fn arm_retry<U>(&mut self, env: &mut Env<'_, '_, U>, config: &SessionConfig) {
        if let State::Reconnecting {
            retry: Retry::After(time),
            ..
        } = self.state
        {
            return self.state.set_retry(Retry::At(env.cx.now + time));
        }
        if self.attempts >= config.max_reconnects && config.max_reconnects != SessionConfig::FOREVER {
            return self.meet(PathEvent::Exhausted);
        }
        let spread = config.reconnect_delay.as_nanos() as u64 / 2;
        let delay = config.reconnect_delay + Duration::from_nanos(env.cx.below(spread));
        self.state.set_retry(Retry::At(env.cx.now + delay));
    }

    /// Counts a failed attempt. A path's first attempt is no reconnect.
    pub(super) fn count_failure(&mut self) {
        self.stats.failed_reconnects += u32::from(self.attempts > 0);
    }

    /// The next attempt follows at once.
    pub(super) fn retry_at_once(&mut self) {
        if !matches!(
            self.state,
            State::Reconnecting {
                retry: Retry::At(_),
                ..
            }
        ) {
            self.state.set_retry(Retry::After(Duration::ZERO));
        }
    }

    fn retry_soon<U>(&mut self, env: &mut Env<'_, '_, U>) {
        self.attempts = 0;
        let server_has_it = self.conns.iter().any(|conn| conn.established);
        self.state.set_retry(match server_has_it {
            _ if self.conns.is_empty() => Retry::At(env.cx.now),
            true => Retry::After(BACKOFF),
            false => Retry::After(Duration::ZERO),
        });
    }

    /// A message has arrived.
    pub(super) fn received(&mut self, now: Instant) {
        if let Some(up) = self.up_mut() {
            up.heartbeat.heard();
            up.keepalive.received(now);
        }
    }

    /// A connection is disconnected.
    pub(super) fn disconnected(&mut self, cid: u16) {
        if let Some(conn) = self.conns.get_mut(usize::from(cid)) {
            conn.left = true;
        }
        self.look_gone();
    }

    /// Sends a heartbeat, unless many are unanswered, or one is still queued.
    pub(super) fn send_heartbeat<U>(&mut self, env: &mut Env<'_, '_, U>) {
        let waits = |conn: &Conn| conn.queue.beats(Imm::HbMsg) > 0;
        if self.conns.first().is_some_and(waits) {
            return;
        }
        if self.up_mut().is_some_and(|up| up.keepalive.ask(env.cx.now)) {
            self.push(env, 0, Post::Imm(Imm::HbMsg));
        }
    }

    /// Its round trip will be measured soon.
    pub(super) fn measure(&mut self, now: Instant) {
        let measured = self.latency.is_some();
        if let Some(up) = self.up_mut().filter(|_| !measured) {
            up.next_beat = now;
        }
    }

    pub(super) fn set_why(&mut self, why: PathError) {
        self.why = Some(why);
    }

    /// A work request was flushed: the queue pair is in error. Mostly the peer has disconnected, and the event follows; if none does,
    /// something else is wrong.
    pub(super) fn flushed(&mut self, now: Instant) {
        if let State::Connected(Up { flushed, .. }) | State::Connecting(Attempt { flushed, .. }) = &mut self.state {
            flushed.get_or_insert(now + FLUSH_GRACE);
        }
    }

    /// Whether it is time to request the chunks.
    pub(super) fn may_ask(&mut self, now: Instant) -> bool {
        let resting = self.attempt_mut().filter(|attempt| attempt.step == Step::Resting);
        resting.is_some_and(|attempt| attempt.due.take_if(|at| *at <= now).is_some())
    }

    /// Handles expired deadlines.
    pub(super) fn timeout<U>(&mut self, env: &mut Env<'_, '_, U>, config: &SessionConfig) {
        let now = env.cx.now;
        let due = |at: &mut Option<Instant>| at.take_if(|at| *at <= now).is_some();
        match &mut self.state {
            State::Connecting(attempt) => {
                let (late, flushed) = (due(&mut attempt.due), due(&mut attempt.flushed));
                let what = match attempt.step {
                    Step::Informing => "session information",
                    _ => "answer to the connection request",
                };
                if late {
                    self.fail(Error::Timeout(what, config.connect_timeout));
                }
                if flushed {
                    self.fail_path(PathError::Flushed);
                }
            }
            State::Connected(up) => {
                if due(&mut up.flushed) {
                    self.fail_path(PathError::Flushed);
                }
                self.beat(env, config);
            }
            State::Reconnecting { retry, .. } => {
                if matches!(*retry, Retry::At(at) if at <= now) {
                    *retry = Retry::Configured;
                    self.meet(PathEvent::RetryDue);
                }
            }
            State::Closing { until, .. } => {
                let waited = due(until);
                if waited {
                    self.look_gone();
                }
            }
            _ => {}
        }
    }

    /// Sends the heartbeat that is due, or misses its answer.
    fn beat<U>(&mut self, env: &mut Env<'_, '_, U>, config: &SessionConfig) {
        let now = env.cx.now;
        let Some(up) = self.up_mut().filter(|up| up.next_beat <= now) else {
            return;
        };
        // From now, not from the last beat: a process that was stopped must not count its own absence.
        up.next_beat = now + config.heartbeat.interval;
        match up.heartbeat.tick() {
            Beat::Send => self.send_heartbeat(env),
            Beat::Wait => {}
            Beat::Lost => self.fail_path(PathError::HeartbeatLost(config.heartbeat.timeout())),
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.state.next_timeout()
    }
}

/// How long flushed work requests may wait for the event that explains them.
const FLUSH_GRACE: Duration = Duration::from_secs(2);
