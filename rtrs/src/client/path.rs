//! A path: its state, its connections, and what it learned from the server.

use core::time::Duration;
use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use roce_mem::Pages;
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
        flight::Orphan,
        lane::Lane,
        letter::{Joining, Word},
        policy::Policy,
        questions::Questions,
        request::SessionId,
        share::{Others, Share},
        state::{PATH, PathAction, PathEvent, PathState},
        status::{PathCommand, PathId, PathStats},
        terms::Terms,
    },
    heartbeat::{Beat, Heartbeat},
    proto::{Imm, Uuid, info::ChunkAddr},
    table,
};

/// How long a path that is closed waits for the server to confirm.
const LEAVE: Duration = Duration::from_secs(1);
/// How long after its end a path is connected anew that was up and is asked for (`RTRS_RECONNECT_BACKOFF`): the server may be
/// closing it, and refuses it then.
const BACKOFF: Duration = Duration::from_secs(1);

/// Progress of a handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// There is none.
    Idle,
    /// Connection `place` asks for the way to the server.
    Resolving { place: u16 },
    /// Connection `place` waits for the server's answer.
    Connecting { place: u16 },
    /// All connections here stand; those of other shares may not yet, or home waits for the chunks.
    Gathering,
    /// All connections stand. What was lost with the session may still be under way.
    Resting,
    /// The server was asked for its chunks.
    Informing,
}

/// Report of a path to its session.
#[derive(Debug)]
pub(super) enum Report {
    /// The handshake is to begin.
    Begin,
    /// It carries requests; `again` if it has done so before.
    Up { again: bool },
    /// It does so no longer, and why.
    Down(PathError),
    /// An attempt to connect failed.
    Failed(Error),
    /// Its requests have left it.
    Orphans(Vec<Orphan>),
    /// It has nothing on a device that is gone any more.
    LeftDevice,
    /// It is closed.
    Closed,
    /// It is none of the session's any more.
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
    /// Its place in the session.
    pub(super) index: u16,
    pub(super) addr: PathAddr,
    /// Stays the same over reconnects.
    pub(super) uuid: Uuid,
    pub(super) state: PathState,
    pub(super) step: Step,
    /// When the step has taken too long.
    pub(super) step_due: Option<Instant>,
    /// Counts attempts, for the server.
    pub(super) recon_cnt: u16,
    /// It was asked to connect.
    pub(super) begun: bool,
    /// The server may make the session for it (`for_new_clt`).
    pub(super) first: bool,
    /// The server has once accepted connection 0.
    pub(super) ever_accepted: bool,
    /// It has been up.
    pub(super) ever_up: bool,
    /// The session was lost after it was up: its requests were the user's of before, who has been told since that they are over.
    pub(super) outlived: bool,
    pub(super) device: Option<DeviceIx>,
    /// The last device that it led through, which the session keeps what it has on for it.
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
    /// Keys that the server has revoked with a SEND, whose answers are still to come.
    pub(super) revoked: BTreeSet<u32>,
    heartbeat: Heartbeat,
    next_beat: Option<Instant>,
    /// Heartbeats and their answers, since it is up.
    pub(super) questions: Questions,
    pub(super) stats: PathStats,
    /// At home: what its user waits for.
    pub(super) commands: SmallVec<[PathCommand; 1]>,
    /// Why a path that was added could not be connected.
    pub(super) failure: Option<Error>,
    /// Work requests were flushed, and nothing has explained it by then.
    flushed: Option<Instant>,
    /// The server has had the time to take leave.
    leave: Option<Instant>,
    /// Attempts since the path was up.
    attempts: u32,
    retry_at: Option<Instant>,
    /// The next attempt comes after this time, whatever the configuration says.
    retry_in: Option<Duration>,
    /// Why it is not up.
    why: Option<PathError>,
    events: VecDeque<PathEvent>,
    /// At home: where the other shares are with it.
    pub(super) others: Others,
    /// At home: the next attempt waits until nothing of the last is left at other shares.
    unarmed: bool,
    /// At other shares: home has asked for our connections, and is to be told when they are gone.
    pub(super) asked: bool,
}

impl Path {
    pub(super) fn new(session: SessionId, index: u16, joining: Joining, config: &SessionConfig, share: Share) -> Self {
        let Joining { id, addr, uuid } = joining;
        Self {
            session,
            id,
            index,
            addr,
            uuid,
            state: PathState::Connecting,
            step: Step::Idle,
            step_due: None,
            recon_cnt: 0,
            begun: false,
            first: false,
            ever_accepted: false,
            ever_up: false,
            outlived: false,
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
            heartbeat: Heartbeat::new(config.heartbeat),
            next_beat: None,
            questions: Questions::default(),
            stats: PathStats::of_new_path(),
            commands: SmallVec::new(),
            failure: None,
            flushed: None,
            leave: None,
            attempts: 0,
            retry_at: None,
            retry_in: None,
            why: None,
            events: VecDeque::new(),
            others: Others::new(share),
            unarmed: false,
            asked: false,
        }
    }

    /// Requests may take it.
    pub(super) fn is_up(&self) -> bool {
        self.state == PathState::Connected
    }

    /// Why it is not up.
    pub(super) fn why(&self) -> PathError {
        self.why.clone().unwrap_or(PathError::Closed)
    }

    pub(super) fn key(&self, place: u16) -> ConnKey {
        ConnKey {
            session: self.session,
            path: self.index,
            place,
        }
    }

    /// Marks a connection that has work to post when the turn ends.
    pub(super) fn mark_dirty(&mut self, env: &mut Env<'_, '_>, place: u16) {
        let key = self.key(place);
        if let Some(conn) = self.conns.get_mut(usize::from(place))
            && !core::mem::replace(&mut conn.dirty, true)
        {
            env.dirty.push(key);
        }
    }

    pub(super) fn push(&mut self, env: &mut Env<'_, '_>, place: u16, work: Post) {
        if let Some(conn) = self.conns.get_mut(usize::from(place))
            && conn.queue.push(work).is_ok()
        {
            self.mark_dirty(env, place);
        }
    }

    /// The path meets an event. Afterwards [`run`](Self::run) does what follows of it.
    pub(super) fn meet(&mut self, event: PathEvent) {
        self.events.push_back(event);
    }

    /// A path that is up, or is being connected, can't go on.
    pub(super) fn fail(&mut self, error: Error, reports: &mut Vec<Report>) {
        match self.state {
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
                reports.push(Report::Failed(error));
                self.meet(PathEvent::Broken);
            }
            _ => {}
        }
    }

    pub(super) fn fail_path(&mut self, why: PathError, reports: &mut Vec<Report>) {
        self.fail(Error::Path(why), reports);
    }

    /// Does what the events call for.
    pub(super) fn run(
        &mut self,
        env: &mut Env<'_, '_>,
        lane: &mut Lane,
        config: &SessionConfig,
        reports: &mut Vec<Report>,
    ) {
        while let Some(event) = self.events.pop_front() {
            let Some((next, actions)) = table::step(PATH, self.state, event) else {
                // An event that came when the path was beyond it.
                tracing::trace!(state = ?self.state, ?event, "not in this state");
                continue;
            };
            self.state = next;
            for action in actions {
                self.act(env, lane, config, *action, reports);
            }
        }
    }

    fn act(
        &mut self,
        env: &mut Env<'_, '_>,
        lane: &mut Lane,
        config: &SessionConfig,
        action: PathAction,
        reports: &mut Vec<Report>,
    ) {
        match action {
            PathAction::BeginHandshake => reports.push(Report::Begin),
            PathAction::CountAttempt => self.attempts = self.attempts.saturating_add(1),
            PathAction::StopHandshake => (self.step, self.step_due) = (Step::Idle, None),
            // The state says whether requests take it.
            PathAction::Pick => self.attempts = 0,
            PathAction::Unpick => self.flushed = None,
            PathAction::StartHeartbeat => {
                self.heartbeat = Heartbeat::new(config.heartbeat);
                self.questions = Questions::default();
                // One that has not been measured would not be chosen.
                let wait = match config.policy {
                    Policy::MinLatency => Duration::ZERO,
                    _ => config.heartbeat.interval,
                };
                // They go by the service connection.
                self.next_beat = env.share.is_home().then(|| env.cx.now + wait);
            }
            PathAction::StopHeartbeat => self.next_beat = None,
            PathAction::DrainQps => self.drain(env),
            PathAction::Disconnect => self.disconnect(env),
            PathAction::Failover => reports.push(Report::Orphans(lane.orphans(env.cx, self.index, self.device))),
            PathAction::ArmRetry => self.arm_retry(env, config),
            PathAction::RetryNow => self.retry_soon(env),
            PathAction::DestroyQps => {
                self.destroy(env);
                self.leave_lost_device(reports);
            }
            PathAction::Report => self.report(reports),
            PathAction::Forget => reports.push(Report::Forgotten),
        }
    }

    fn report(&mut self, reports: &mut Vec<Report>) {
        reports.push(match self.state {
            PathState::Connected => {
                self.why = None;
                self.outlived = false;
                Report::Up {
                    again: core::mem::replace(&mut self.ever_up, true),
                }
            }
            PathState::Closed => Report::Closed,
            _ => Report::Down(self.why()),
        });
    }

    fn drain(&mut self, env: &mut Env<'_, '_>) {
        self.flushed = None;
        self.tell_down(env);
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

    /// The other shares take it down as well.
    fn tell_down(&self, env: &mut Env<'_, '_>) {
        let (path, for_good) = (self.index, self.leaving());
        for share in env.share.others() {
            if for_good || self.others.has(share) {
                let why = self.why();
                env.tell(share, self.session, Word::Down { path, why, for_good });
            }
        }
    }

    /// Another share has nothing of it any more.
    pub(super) fn share_gone(&mut self, env: &mut Env<'_, '_>, config: &SessionConfig, share: u16) {
        self.others.gone(share);
        let waits = core::mem::take(&mut self.unarmed) && self.state == PathState::Reconnecting;
        if waits {
            self.arm_retry(env, config);
        }
    }

    /// Its device is gone. The attempts that follow find another one, perhaps that one when it is back.
    pub(super) fn lose_device(&mut self, reports: &mut Vec<Report>) {
        self.lost_device = true;
        match self.device {
            Some(_) => self.fail_path(PathError::Cm("the device is gone".into()), reports),
            None => self.leave_lost_device(reports),
        }
    }

    fn leave_lost_device(&mut self, reports: &mut Vec<Report>) {
        if core::mem::take(&mut self.lost_device) {
            self.entered = None;
            reports.push(Report::LeftDevice);
        }
    }

    /// A queue pair has nothing under way any more.
    pub(super) fn drained(&mut self, place: u16) {
        if let Some(conn) = self.conns.get_mut(usize::from(place)) {
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

    /// All queue pairs are drained, and the server has taken leave everywhere: it is over.
    fn look_gone(&mut self) {
        let left = |conn: &Conn| conn.left || !conn.established || self.leave.is_none();
        let over = |conn: &Conn| conn.drained && left(conn);
        if self.leaving() && self.conns.iter().all(over) {
            self.leave = None;
            self.meet(PathEvent::Gone);
        }
    }

    fn leaving(&self) -> bool {
        self.state == PathState::Closing
    }

    fn disconnect(&mut self, env: &mut Env<'_, '_>) {
        for conn in &self.conns {
            env.cx.provider.cm_disconnect(conn.cm);
        }
        self.leave = (self.leaving() && !self.conns.is_empty()).then(|| env.cx.now + LEAVE);
        self.look_gone();
    }

    fn destroy(&mut self, env: &mut Env<'_, '_>) {
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
        (self.step, self.step_due, self.leave) = (Step::Idle, None, None);
        if core::mem::take(&mut self.asked) {
            env.tell_home(self.session, Word::Gone { path: self.index });
        }
    }

    fn arm_retry(&mut self, env: &mut Env<'_, '_>, config: &SessionConfig) {
        if !env.share.is_home() {
            // Home says when.
            return;
        }
        if !self.others.all_gone() {
            self.unarmed = true;
            return;
        }
        if let Some(time) = self.retry_in.take() {
            self.retry_at = Some(env.cx.now + time);
            return;
        }
        if self.attempts >= config.max_reconnects && config.max_reconnects != SessionConfig::FOREVER {
            return self.meet(PathEvent::Exhausted);
        }
        let spread = config.reconnect_delay.as_nanos() as u64 / 2;
        let delay = config.reconnect_delay + Duration::from_nanos(env.cx.below(spread));
        self.retry_at = Some(env.cx.now + delay);
    }

    /// An attempt has failed. A path's first one is none to connect it again.
    pub(super) fn count_failure(&mut self) {
        self.stats.failed_reconnects += u32::from(self.attempts > 0);
    }

    /// The attempt that has failed is followed by another one at once.
    pub(super) fn come_again(&mut self) {
        self.retry_in = Some(Duration::ZERO);
    }

    fn retry_soon(&mut self, env: &mut Env<'_, '_>) {
        self.attempts = 0;
        if !env.share.is_home() {
            // Home says when.
            return;
        }
        self.retry_in = None;
        if self.conns.is_empty() && self.others.all_gone() {
            self.retry_at = Some(env.cx.now);
            return;
        }
        let server_has_it = self.conns.iter().any(|conn| conn.established);
        self.retry_in = Some(if server_has_it { BACKOFF } else { Duration::ZERO });
        // What is left here comes to an end by itself, and is looked at then.
        self.unarmed = self.conns.is_empty();
    }

    /// Anything came from the server.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heartbeat.heard();
        self.questions.heard(now);
    }

    /// The connection manager says that a connection is over.
    pub(super) fn note_left(&mut self, place: u16) {
        if let Some(conn) = self.conns.get_mut(usize::from(place)) {
            conn.left = true;
        }
        self.look_gone();
    }

    /// Asks the server for a sign of life, unless it owes many, or a question has not left yet.
    pub(super) fn ask(&mut self, env: &mut Env<'_, '_>) {
        let waits = |conn: &Conn| conn.queue.beats(Imm::HbMsg) > 0;
        if !self.conns.first().is_some_and(waits) && self.questions.ask(env.cx.now) {
            self.push(env, 0, Post::Imm(Imm::HbMsg));
        }
    }

    /// The heartbeat was answered.
    pub(super) fn measured(&mut self, env: &mut Env<'_, '_>) {
        let (path, time) = (self.index, self.questions.answer(env.cx.now));
        let Some(time) = time else { return };
        for share in env.share.others() {
            env.tell(share, self.session, Word::Latency { path, time });
        }
    }

    /// Its round trip is to be known soon.
    pub(super) fn measure(&mut self, now: Instant) {
        if self.questions.latency.is_none() && self.next_beat.is_some() {
            self.next_beat = Some(now);
        }
    }

    pub(super) fn set_why(&mut self, why: PathError) {
        self.why = Some(why);
    }

    /// A work request was flushed. It tells only that the queue pair is in error: mostly the peer has disconnected, and the
    /// event is on its way; if none comes, something else is wrong.
    pub(super) fn flushed(&mut self, now: Instant) {
        if self.is_up() || self.state == PathState::Connecting {
            self.flushed.get_or_insert(now + FLUSH_GRACE);
        }
    }

    /// It may be time to ask for the chunks.
    pub(super) fn has_rested(&mut self, now: Instant) -> bool {
        self.step == Step::Resting && self.step_due.take_if(|at| *at <= now).is_some()
    }

    /// Does what is due.
    pub(super) fn timeout(&mut self, env: &mut Env<'_, '_>, config: &SessionConfig, reports: &mut Vec<Report>) {
        let now = env.cx.now;
        let due = |at: &mut Option<Instant>| at.take_if(|at| *at <= now).is_some();
        if due(&mut self.step_due) {
            let what = match self.step {
                Step::Informing => "session information",
                _ => "answer to the connection request",
            };
            self.fail(Error::Timeout(what, config.connect_timeout), reports);
        }
        if due(&mut self.flushed) {
            self.fail_path(PathError::Flushed, reports);
        }
        if due(&mut self.leave) {
            self.look_gone();
        }
        if due(&mut self.retry_at) {
            self.meet(PathEvent::RetryDue);
        }
        if due(&mut self.next_beat) {
            // From now, not from the last beat: a process that was stopped must not count its own absence.
            self.next_beat = Some(now + config.heartbeat.interval);
            match self.heartbeat.tick() {
                Beat::Send => self.ask(env),
                Beat::Wait => {}
                Beat::Lost => self.fail_path(PathError::HeartbeatLost(config.heartbeat.patience()), reports),
            }
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let all = [self.step_due, self.flushed, self.leave, self.retry_at, self.next_beat];
        all.into_iter().flatten().min()
    }
}

/// How long flushed work requests may wait for the event that explains them.
const FLUSH_GRACE: Duration = Duration::from_secs(2);
