//! A session: its paths, and the requests that go by them.

use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    Completion, Instant, WcStatus,
    provider::{CmKind, DeviceIx},
};

use crate::{
    Error, IoError, PathError,
    client::{
        answer::Answers,
        buffers::{Buffer, Buffers, LentId},
        config::{ConType, SessionConfig, SessionInfo},
        conn::Post,
        env::Env,
        flight::{Again, Flight, Orphan, Waits},
        handshake::Handshake,
        lane::Lane,
        path::{Path, Report},
        permits::Rest,
        pick::Picker,
        post,
        request::{Output, SessionId, Submission},
        stage::Reached,
        state::{PathEvent, PathState, SESSION, SessionAction, SessionEvent, SessionState},
        status::{PathId, PathNews},
    },
    cx::Cx,
    mark::{Mark, MarkKind},
    proto::Uuid,
    table,
};

/// See the module.
#[derive(Debug)]
pub(super) struct Session<U> {
    pub(super) id: SessionId,
    uuid: Uuid,
    pub(super) config: SessionConfig,
    pub(super) state: SessionState,
    /// Abilities of its paths; known once one has been up.
    info: Option<SessionInfo>,
    /// By place. One that is dead leaves its place to the next that is added.
    pub(super) paths: Vec<Path>,
    pub(super) picker: Picker,
    /// Number of the next path.
    pub(super) next_path: u32,
    pub(super) lane: Lane<U>,
    /// It could not be opened, and its paths are taken down.
    pub(super) given_up: bool,
    /// Why it could not be opened.
    pub(super) failure: Option<Error>,
    /// Why the last path went.
    why: PathError,
    /// When its last path went.
    pub(super) lost_at: Option<Instant>,
    /// When paths are compared next.
    pub(super) look_at: Option<Instant>,
}

impl<U> Session<U> {
    /// Begins to connect its paths.
    pub(super) fn open(env: &mut Env<'_, '_, U>, id: SessionId, config: SessionConfig) -> Self {
        let uuid = Uuid::draw(env.cx.random);
        let paths = config.paths.iter().zip(0..).map(|(addr, index)| {
            let what = (PathId::of_opening(index), *addr, Uuid::draw(env.cx.random));
            Path::new(id, index, what)
        });
        let paths: Vec<Path> = paths.collect();
        let mut session = Self {
            id,
            uuid,
            state: SessionState::Opening,
            info: None,
            picker: Picker::default(),
            next_path: paths.len() as u32,
            paths,
            given_up: false,
            config,
            lane: Lane::new(id),
            failure: None,
            why: PathError::Closed,
            lost_at: None,
            look_at: None,
        };
        session.go_on_opening(env);
        session
    }

    pub(super) fn info(&self) -> Option<SessionInfo> {
        self.info
    }

    /// Whether requests are taken; the reason why not.
    pub(super) fn state(&self) -> Result<(), PathError> {
        match self.state {
            SessionState::Open => Ok(()),
            _ => Err(self.why.clone()),
        }
    }

    /// Nothing is left of it but buffers that its user still holds.
    pub(super) fn is_closed(&self) -> bool {
        self.state == SessionState::Closed
    }

    /// Permits that its requests have.
    pub(super) fn permits(&self) -> usize {
        self.lane.permits.held()
    }

    pub(super) fn buffers(&self) -> &Buffers {
        &self.lane.buffers
    }

    pub(super) fn buffers_mut(&mut self) -> &mut Buffers {
        &mut self.lane.buffers
    }

    pub(super) fn take_buffer(&mut self, cx: &mut Cx<'_>, len: usize) -> Result<Buffer, Error> {
        // While no path is up, requests may be made ready for the time when one is.
        if !matches!(self.state, SessionState::Open | SessionState::Disconnected) {
            return Err(Error::Down(self.why.clone()));
        }
        self.lane.buffers.take(cx, len)
    }

    pub(super) fn lend_memory(&mut self, cx: &mut Cx<'_>, memory: Arc<Pages>) -> Result<LentId, Error> {
        if !matches!(self.state, SessionState::Open | SessionState::Disconnected) {
            return Err(Error::Down(self.why.clone()));
        }
        Ok(self.lane.buffers.lend(cx, memory)?)
    }

    pub(super) fn give_buffer(&mut self, buffer: Buffer) {
        self.lane.give(buffer);
    }

    pub(super) fn close(&mut self, env: &mut Env<'_, '_, U>) {
        self.meet(env, SessionEvent::CloseAsked);
    }

    /// Takes a request, or gives it back with the reason.
    #[expect(clippy::result_large_err, reason = "the request comes back as it is")]
    pub(super) fn submit(
        &mut self,
        env: &mut Env<'_, '_, U>,
        request: Submission<U>,
    ) -> Result<(), (Submission<U>, IoError)> {
        let Some(info) = self.info.filter(|_| self.state == SessionState::Open) else {
            return Err((request, IoError::Path(self.why.clone())));
        };
        let too_long = |what, len, max: u32| IoError::TooLong {
            what,
            len,
            max: max as usize,
        };
        let (header, data) = (request.header.len(), request.data.as_ref().map_or(0, Buffer::len));
        if header > info.max_user_header as usize {
            return Err((request, too_long("user header", header, info.max_user_header)));
        }
        if data > info.max_io_size as usize {
            return Err((request, too_long("data", data, info.max_io_size)));
        }
        self.lane.waiting.push_back(request);
        self.start(env);
        self.watch(env);
        Ok(())
    }

    /// Starts what waits, as far as there are permits and a path.
    fn start(&mut self, env: &mut Env<'_, '_, U>) {
        while !self.lane.waiting.is_empty() {
            if !self.paths.iter().any(Path::is_up) {
                return;
            }
            let Some(permit) = self.lane.permits.take(env.cx.now) else {
                return;
            };
            // Without a way it stays the next.
            let way = self.way_for(permit);
            let next = way.and_then(|path| Some((path, self.lane.waiting.pop_front()?)));
            let Some((path, request)) = next else {
                return self.lane.permits.give(permit);
            };
            self.send(env, path, permit, request, None);
        }
    }

    fn send(
        &mut self,
        env: &mut Env<'_, '_, U>,
        path: usize,
        permit: u16,
        request: Submission<U>,
        rest: Option<Rest<u16>>,
    ) {
        let header = self.lane.headers.as_ref().map(|h| h.write(permit, 0, &request.header));
        if !matches!(header, Some(Ok(()))) {
            // The sizes were checked: the path has another idea of them than the session.
            self.lane.release(permit, rest);
            let (len, max) = (request.header.len(), 0);
            let error = IoError::TooLong {
                what: "user header",
                len,
                max,
            };
            return self.lane.told(request, Err(error), env.out);
        }
        let path = &mut self.paths[path];
        let io = path.conns.len().saturating_sub(1).max(1);
        let cid = match request.con {
            ConType::Admin => 0,
            ConType::Io(hint) => 1 + (hint % io) as u16,
        };
        let slots = post::slots(&self.lane, path.device, request.direction);
        let bytes = request.header.len() + request.data.as_ref().map_or(0, Buffer::len);
        path.stats.rdma.count(request.direction, bytes as u64);
        self.lane
            .launch(permit, Flight::new(request, path.index, cid, env.cpu, rest));
        path.push(env, cid, Post::Request { permit, slots });
    }

    /// A work request of one of its connections has completed.
    pub(super) fn completion(&mut self, env: &mut Env<'_, '_, U>, path: u16, cid: u16, wc: &Completion) {
        let index = usize::from(path);
        let Some(path) = self.paths.get_mut(index) else { return };
        if !matches!(path.state(), PathState::Connecting | PathState::Connected) {
            // What was under way when it went down.
            return;
        }
        let was_up = path.is_up();
        let mut reports = Vec::new();
        if wc.status == WcStatus::FlushError {
            return path.flushed(env.cx.now);
        }
        let done = match Mark::decode(wc.wr_id) {
            _ if !wc.is_ok() => Err(Error::Path(PathError::Completion {
                what: Mark::what(wc.wr_id),
                status: wc.status,
            })),
            None => Err(Error::Path(PathError::Unexpected("a completion without our mark"))),
            Some(mark) if mark.kind == MarkKind::Info => {
                path.heard(env.cx.now);
                self.handshake(env, index).information(wc)
            }
            Some(mark) => Answers {
                path,
                env,
                lane: &mut self.lane,
            }
            .completion(cid, mark, wc)
            .map_err(Error::Path),
        };
        match done {
            // The way of nearly all completions.
            Ok(()) if was_up && self.lane.waiting.is_empty() => {}
            Ok(()) => self.settle(env, index, reports),
            Err(e) => {
                self.paths[index].fail(e, &mut reports);
                self.settle(env, index, reports);
            }
        }
    }

    fn handshake<'a, 'b, 'c>(&'a mut self, env: &'a mut Env<'b, 'c, U>, index: usize) -> Handshake<'a, 'b, 'c, U> {
        Handshake {
            agreed: self.agreed(index),
            others_up: self.has_other_up(index),
            ask_at: self.ask_at(env.cx.now),
            path: &mut self.paths[index],
            env,
            lane: &mut self.lane,
            config: &self.config,
            uuid: self.uuid,
        }
    }

    pub(super) fn begin(&mut self, env: &mut Env<'_, '_, U>, index: usize, reports: &mut Vec<Report<U>>) {
        let first = self.is_first(index);
        let path = &mut self.paths[index];
        path.reached = path.reached.max(Reached::Asked);
        if let Some(attempt) = path.attempt_mut() {
            attempt.first = first;
        }
        let mut handshake = self.handshake(env, index);
        let begun = handshake.begin();
        handshake.settle(begun, reports);
    }

    /// An event of one of its connections.
    pub(super) fn cm_event(&mut self, env: &mut Env<'_, '_, U>, path: u16, cid: u16, kind: CmKind) {
        let index = usize::from(path);
        let Some(path) = self.paths.get_mut(index) else { return };
        let mut reports = Vec::new();
        if matches!(
            kind,
            CmKind::Disconnected | CmKind::Rejected { .. } | CmKind::Unreachable(_) | CmKind::ConnectError(_)
        ) {
            path.note_left(cid);
        }
        match (path.state(), kind) {
            (PathState::Connecting, CmKind::Disconnected) | (PathState::Connected, CmKind::Disconnected) => {
                path.fail_path(PathError::PeerDisconnected, &mut reports);
            }
            (PathState::Connecting, kind) => {
                let mut handshake = self.handshake(env, index);
                let done = handshake.event(cid, kind);
                handshake.settle(done, &mut reports);
            }
            (PathState::Connected, kind) => {
                let why = match kind {
                    CmKind::ConnectError(text) => text,
                    CmKind::Rejected { reason, .. } => format!("rejected: {reason}"),
                    CmKind::Unreachable(why) => format!("unreachable: {why}"),
                    CmKind::AddressChange => "our address is gone".into(),
                    _ => return,
                };
                path.fail_path(PathError::Cm(why), &mut reports);
            }
            _ => {}
        }
        self.settle(env, index, reports);
    }

    pub(super) fn drained(&mut self, env: &mut Env<'_, '_, U>, path: u16, cid: u16) {
        let index = usize::from(path);
        if let Some(path) = self.paths.get_mut(index) {
            path.drained(cid);
            self.settle(env, index, Vec::new());
        }
    }

    /// A device is gone. Its paths try again, by whatever device has their address then; the kernel's client closes them.
    pub(super) fn device_removed(&mut self, env: &mut Env<'_, '_, U>, device: DeviceIx) {
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if path.entered == Some(device) {
                let mut reports = Vec::new();
                path.lose_device(&mut reports);
                self.settle(env, index, reports);
            }
        }
    }

    /// Posts what a connection has.
    pub(super) fn post(&mut self, env: &mut Env<'_, '_, U>, path: u16, cid: u16) {
        let index = usize::from(path);
        let Some(path) = self.paths.get_mut(index) else { return };
        if let Some(conn) = path.conns.get_mut(usize::from(cid)) {
            conn.dirty = false;
        }
        if let Err(e) = post::post(env.cx, path, &mut self.lane, cid) {
            let mut reports = Vec::new();
            path.fail_path(PathError::Post(e), &mut reports);
            self.settle(env, index, reports);
        }
    }

    pub(super) fn timeout(&mut self, env: &mut Env<'_, '_, U>) {
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if path.next_timeout().is_some_and(|due| due <= env.cx.now) {
                let mut reports = Vec::new();
                if path.has_rested(env.cx.now) {
                    let mut handshake = self.handshake(env, index);
                    let done = handshake.connected();
                    handshake.settle(done, &mut reports);
                }
                let path = &mut self.paths[index];
                path.timeout(env, &self.config, &mut reports);
                self.settle(env, index, reports);
            }
        }
        self.compare_paths(env);
        let again = self.lane.let_go(env.cx.now, env.out);
        if !again.is_empty() {
            let why = self.why.clone();
            self.send_again(env, again, &why);
        }
        // Permits may have rested long enough.
        self.start(env);
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let rest = self
            .lane
            .permits
            .next_timeout()
            .filter(|_| !self.lane.waiting.is_empty());
        let looks = self.look_at.into_iter().chain(rest).chain(self.lane.next_timeout());
        self.paths.iter().filter_map(Path::next_timeout).chain(looks).min()
    }

    /// Does what a path's events call for, there and here.
    pub(super) fn settle(&mut self, env: &mut Env<'_, '_, U>, index: usize, mut reports: Vec<Report<U>>) {
        loop {
            let path = &mut self.paths[index];
            path.run(env, &mut self.lane, &self.config, &mut reports);
            if reports.is_empty() {
                break;
            }
            for report in core::mem::take(&mut reports) {
                self.report(env, index, report, &mut reports);
            }
        }
        if !self.paths[index].commands.is_empty() {
            self.answer_commands(env, index);
        }
        self.go_on_opening(env);
        self.start(env);
    }

    fn report(&mut self, env: &mut Env<'_, '_, U>, index: usize, report: Report<U>, reports: &mut Vec<Report<U>>) {
        match report {
            Report::Begin => self.begin(env, index, reports),
            Report::Up { again } => self.path_up(env, index, again),
            Report::Down(why) => {
                let (session, path) = (&self.config.name, &self.paths[index].addr);
                match &why {
                    PathError::Closed => tracing::info!(%session, %path, "path closed"),
                    why => tracing::warn!(%session, %path, error = %why, "path lost"),
                }
                self.news(env, index, PathNews::Down(why.clone()));
                self.path_down(env, why);
            }
            Report::Failed(error) => self.attempt_failed(env, index, error),
            Report::Forgotten => {
                self.lane.path_forgotten(index as u16);
                self.leave_devices(env);
            }
            Report::LeftDevice => self.leave_devices(env),
            Report::Orphans { orphans, outlived } => self.orphaned(env, index, orphans, outlived),
            Report::Closed => {
                let why = self.paths[index].why();
                self.news(env, index, PathNews::Closed(why));
                // With the last path the session may go, and of that nothing is told after its end.
                if !self.paths[index].commands.is_empty() {
                    self.answer_commands(env, index);
                }
                self.path_closed(env, index);
            }
        }
    }

    fn path_up(&mut self, env: &mut Env<'_, '_, U>, index: usize, again: bool) {
        if again {
            // A server refuses it as long as it is at work for the connections that were before.
            self.lane.path_gone(index as u16);
        }
        let path = &self.paths[index];
        let Some(terms) = path.terms else { return };
        let info = terms.info(self.config.max_user_header);
        self.info = Some(info);
        let full = Buffers::bytes_for(info.max_io_size as usize, info.queue_depth as usize);
        self.lane.buffers.set_limit(self.config.buffer_bytes.unwrap_or(full));
        tracing::info!(session = %self.config.name, path = %path.addr, ?info, "path is up");
        self.paths[index].stats.reconnects += 1;
        self.news(env, index, PathNews::Up { again });
        self.watch(env);
        // `go_on_opening` opens the session.
        if self.state != SessionState::Opening {
            self.meet(env, SessionEvent::PathUp);
        }
    }

    fn path_down(&mut self, env: &mut Env<'_, '_, U>, why: PathError) {
        // There may be nothing left to compare.
        self.look_at = None;
        self.watch(env);
        if self.paths.iter().any(Path::is_up) {
            return;
        }
        self.why = why;
        self.lost_at = Some(env.cx.now);
        for path in &mut self.paths {
            path.state.session_lost();
        }
        self.ask_again(env);
        self.meet(env, SessionEvent::LastPathDown);
        let why = self.why.clone();
        for request in self.lane.unsent() {
            self.ended(env, request, &why);
        }
        self.fail_waiting(env);
    }

    /// Without a path what waits for a permit has nowhere to go.
    fn fail_waiting(&mut self, env: &mut Env<'_, '_, U>) {
        for request in core::mem::take(&mut self.lane.waiting) {
            self.lane.told(request, Err(IoError::Path(self.why.clone())), env.out);
        }
    }

    /// Requests whose path is drained go by another, or end. What is sent again keeps its permit: in the same chunk the server
    /// can't do it a first time after it has done it a second time, and something else in between.
    fn orphaned(&mut self, env: &mut Env<'_, '_, U>, index: usize, orphans: Vec<Orphan<U>>, outlived: bool) {
        let why = self.paths[index].why();
        // Of a path that was in order its last packets are under way now.
        let closed = matches!(why, PathError::Closed) && self.has_other_up(index);
        let mut again = Vec::new();
        for Orphan { permit, flight } in orphans {
            let Flight {
                request, waits, rest, ..
            } = flight;
            let result = match waits {
                // It was answered; the key ended with the queue pair.
                Waits::Revocation(0) => Ok(()),
                Waits::Revocation(errno) => Err(IoError::Remote(errno.into())),
                Waits::Room | Waits::Answer => {
                    again.push(Again { permit, request, rest });
                    continue;
                }
            };
            self.lane.release(permit, rest);
            self.lane.told(request, result, env.out);
        }
        // With the session the server has closed what its user had open there: even if another path is up by now, a request may mean
        // something else.
        if outlived {
            return again.into_iter().for_each(|request| self.ended(env, request, &why));
        }
        if closed {
            again = self.lane.hold(again);
        }
        self.send_again(env, again, &why);
    }

    /// Sends requests by another path, if there is one.
    fn send_again(&mut self, env: &mut Env<'_, '_, U>, requests: Vec<Again<U>>, why: &PathError) {
        let mut taken = vec![0; self.paths.len()];
        for request in requests {
            let Some(path) = self.way_for(request.permit) else {
                self.ended(env, request, why);
                continue;
            };
            taken[path] += 1;
            self.paths[path].stats.failovers += 1;
            self.send(env, path, request.permit, request.request, request.rest);
        }
        for (path, requests) in taken.into_iter().enumerate().filter(|(_, n)| *n > 0) {
            self.news(env, path, PathNews::TookOver(requests));
        }
    }

    /// A request ends with its path.
    fn ended(&mut self, env: &mut Env<'_, '_, U>, request: Again<U>, why: &PathError) {
        let Again { permit, request, rest } = request;
        self.lane.release_unanswered(env.cx.now, permit, rest);
        self.lane.told(request, Err(IoError::Path(why.clone())), env.out);
    }

    /// A path that is up, and has this permit's chunk.
    fn way_for(&mut self, permit: u16) -> Option<usize> {
        self.picker
            .pick(self.config.policy, &self.paths, &self.lane.loads, permit)
    }

    fn path_closed(&mut self, env: &mut Env<'_, '_, U>, index: usize) {
        if !self.all_closed() {
            return;
        }
        if self.state == SessionState::Opening {
            self.why = self.paths[index].why();
        }
        self.look_over(env);
        self.fail_waiting(env);
    }

    fn all_closed(&self) -> bool {
        let over = |path: &Path| matches!(path.state(), PathState::Closed | PathState::Dead);
        self.paths.iter().all(over)
    }

    /// The session ends when nothing is left of its paths.
    fn look_over(&mut self, env: &mut Env<'_, '_, U>) {
        if !self.all_closed() {
            return;
        }
        match self.state {
            SessionState::Opening => self.meet(env, SessionEvent::PathsLost),
            SessionState::Closing => self.meet(env, SessionEvent::PathsGone),
            _ => {}
        }
    }

    pub(super) fn meet(&mut self, env: &mut Env<'_, '_, U>, event: SessionEvent) {
        let Some((next, actions)) = table::step(SESSION, self.state, event) else {
            return;
        };
        self.state = next;
        for action in actions {
            self.act(env, *action);
        }
    }

    fn act(&mut self, env: &mut Env<'_, '_, U>, action: SessionAction) {
        let info = self.info;
        match action {
            SessionAction::Announce => env.out.extend(info.map(|info| Output::Opened(self.id, info))),
            SessionAction::TellUp => env.out.extend(info.map(|info| Output::Up(self.id, info))),
            SessionAction::TellDown => env.out.push_back(Output::Down(self.id, self.why.clone())),
            SessionAction::Fail => {
                let error = self.failure.take();
                let error = error.unwrap_or_else(|| Error::Path(self.why.clone()));
                env.out.push_back(Output::OpenFailed(self.id, error));
            }
            SessionAction::ClosePaths => self.close_paths(env),
            SessionAction::GiveBack => {
                self.lane.let_all_go(env.out);
                self.lane.close(env.cx);
            }
            SessionAction::Tell => env.out.push_back(Output::Closed(self.id)),
        }
    }

    fn close_paths(&mut self, env: &mut Env<'_, '_, U>) {
        self.why = PathError::Closed;
        self.fail_waiting(env);
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if path.is_up() {
                path.set_why(PathError::Closed);
            }
            path.meet(PathEvent::CloseAsked);
            self.settle(env, index, Vec::new());
        }
        // All of them may have been closed before.
        self.look_over(env);
    }
}

#[cfg(test)]
mod tests;
