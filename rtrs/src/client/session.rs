//! A session: its paths, and the requests that go by them.

use roce_verbs::{
    Completion, Instant, WcStatus,
    provider::{CmKind, DeviceIx},
};

use crate::{
    Error, IoError, PathError,
    client::{
        answer::Answers,
        buffers::{Buffer, Buffers},
        config::{ConType, SessionConfig, SessionInfo},
        conn::Post,
        env::Env,
        flight::{Flight, Orphan, Waits},
        handshake::Handshake,
        lane::Lane,
        path::{Path, Report},
        permits::Rest,
        post,
        request::{Output, SessionId, Submission},
        state::{PathEvent, PathState, SESSION, SessionAction, SessionEvent, SessionState},
    },
    cx::Cx,
    mark::{Mark, MarkKind},
    proto::Uuid,
    table,
};

/// See the module.
#[derive(Debug)]
pub(super) struct Session {
    id: SessionId,
    uuid: Uuid,
    config: SessionConfig,
    state: SessionState,
    /// What its paths can do in common; known once one has been up.
    info: Option<SessionInfo>,
    paths: Vec<Path>,
    lane: Lane,
    /// Why it could not be opened.
    failure: Option<Error>,
    /// Why the last path went.
    why: PathError,
}

impl Session {
    /// Begins to connect its path.
    pub(super) fn open(env: &mut Env<'_, '_>, id: SessionId, config: SessionConfig) -> Self {
        let (uuid, path) = (Uuid::draw(env.cx.random), Uuid::draw(env.cx.random));
        let path = Path::new(id, 0, config.path, path, true, &config);
        let mut session = Self {
            id,
            uuid,
            config,
            state: SessionState::Opening,
            info: None,
            paths: vec![path],
            lane: Lane::new(id),
            failure: None,
            why: PathError::Closed,
        };
        let mut reports = Vec::new();
        session.begin(env, 0, &mut reports);
        session.settle(env, 0, reports);
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
        if let Err(why) = self.state() {
            return Err(Error::Down(why));
        }
        self.lane.buffers.take(cx, len)
    }

    pub(super) fn give_buffer(&mut self, buffer: Buffer) {
        self.lane.give(buffer);
    }

    pub(super) fn close(&mut self, env: &mut Env<'_, '_>) {
        self.meet(env, SessionEvent::CloseAsked);
    }

    /// Takes a request, or gives it back with the reason.
    #[expect(clippy::result_large_err, reason = "the request comes back as it is")]
    pub(super) fn submit(&mut self, env: &mut Env<'_, '_>, request: Submission) -> Result<(), (Submission, IoError)> {
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
        Ok(())
    }

    /// Starts what waits, as far as there are permits and a path.
    fn start(&mut self, env: &mut Env<'_, '_>) {
        while !self.lane.waiting.is_empty() {
            let Some(path) = self.paths.iter().position(Path::is_up) else {
                return;
            };
            let Some(permit) = self.lane.permits.take(env.cx.now) else {
                return;
            };
            let Some(request) = self.lane.waiting.pop_front() else {
                return;
            };
            self.send(env, path, permit, request, None);
        }
    }

    fn send(&mut self, env: &mut Env<'_, '_>, path: usize, permit: u16, request: Submission, rest: Option<Rest<u16>>) {
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
        self.lane.flights[usize::from(permit)] = Some(Flight::new(request, path.index, cid, rest));
        path.push(env, cid, Post::Request { permit, slots });
    }

    /// A work request of one of its connections has completed.
    pub(super) fn completion(&mut self, env: &mut Env<'_, '_>, path: u16, cid: u16, wc: &Completion) {
        let index = usize::from(path);
        let Some(path) = self.paths.get_mut(index) else { return };
        if !matches!(path.state, PathState::Connecting | PathState::Connected) {
            // What was under way when it went down.
            return;
        }
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
                path.heard();
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
            Ok(()) if self.state == SessionState::Open && self.lane.waiting.is_empty() => {}
            Ok(()) => self.settle(env, index, reports),
            Err(e) => {
                self.paths[index].fail(e, &mut reports);
                self.settle(env, index, reports);
            }
        }
    }

    fn handshake<'a, 'b, 'c>(&'a mut self, env: &'a mut Env<'b, 'c>, index: usize) -> Handshake<'a, 'b, 'c> {
        Handshake {
            path: &mut self.paths[index],
            env,
            lane: &mut self.lane,
            config: &self.config,
            uuid: self.uuid,
        }
    }

    fn begin(&mut self, env: &mut Env<'_, '_>, index: usize, reports: &mut Vec<Report>) {
        let mut handshake = self.handshake(env, index);
        let begun = handshake.begin();
        handshake.settle(begun, reports);
    }

    /// An event of one of its connections.
    pub(super) fn cm_event(&mut self, env: &mut Env<'_, '_>, path: u16, cid: u16, kind: CmKind) {
        let index = usize::from(path);
        let Some(path) = self.paths.get_mut(index) else { return };
        let mut reports = Vec::new();
        if matches!(
            kind,
            CmKind::Disconnected | CmKind::Rejected { .. } | CmKind::Unreachable | CmKind::ConnectError(_)
        ) {
            path.note_left(cid);
        }
        match (path.state, kind) {
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
                    CmKind::Rejected { reason, .. } => format!("rejected: {reason:?}"),
                    CmKind::Unreachable => "unreachable".into(),
                    CmKind::AddressChange => "our address is gone".into(),
                    _ => return,
                };
                path.fail_path(PathError::Cm(why), &mut reports);
            }
            _ => {}
        }
        self.settle(env, index, reports);
    }

    pub(super) fn drained(&mut self, env: &mut Env<'_, '_>, path: u16, cid: u16) {
        let index = usize::from(path);
        if let Some(path) = self.paths.get_mut(index) {
            path.drained(cid);
            self.settle(env, index, Vec::new());
        }
    }

    /// A device is gone, and its paths with it: for good.
    pub(super) fn device_removed(&mut self, env: &mut Env<'_, '_>, device: DeviceIx) {
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if path.device == Some(device) {
                path.set_why(PathError::Cm("the device was removed".into()));
                path.meet(PathEvent::CloseAsked);
                self.settle(env, index, Vec::new());
            }
        }
    }

    /// Posts what a connection has.
    pub(super) fn post(&mut self, env: &mut Env<'_, '_>, path: u16, cid: u16) {
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

    pub(super) fn timeout(&mut self, env: &mut Env<'_, '_>) {
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if path.next_timeout().is_some_and(|due| due <= env.cx.now) {
                let mut reports = Vec::new();
                path.timeout(env, &self.config, &mut reports);
                self.settle(env, index, reports);
            }
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
        self.paths.iter().filter_map(Path::next_timeout).chain(rest).min()
    }

    /// Does what a path's events call for, there and here.
    fn settle(&mut self, env: &mut Env<'_, '_>, index: usize, mut reports: Vec<Report>) {
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
        self.start(env);
    }

    fn report(&mut self, env: &mut Env<'_, '_>, index: usize, report: Report, reports: &mut Vec<Report>) {
        match report {
            Report::Begin => self.begin(env, index, reports),
            Report::Up => self.path_up(env, index),
            Report::Down(why) => {
                self.log_down(index, &why);
                self.path_down(env, why);
            }
            Report::Failed(error) => self.attempt_failed(index, error),
            Report::Orphans(orphans) => self.orphaned(env, index, orphans),
            Report::Closed => {
                if self.paths[index].parted {
                    self.lane.path_gone(index as u16);
                }
                self.path_closed(env, index);
            }
        }
    }

    fn path_up(&mut self, env: &mut Env<'_, '_>, index: usize) {
        let path = &self.paths[index];
        let Some(terms) = path.terms else { return };
        let info = terms.info(self.config.max_user_header);
        self.info = Some(info);
        let full = Buffers::bytes_for(info.max_io_size as usize, info.queue_depth as usize);
        self.lane.buffers.set_limit(self.config.buffer_bytes.unwrap_or(full));
        tracing::info!(session = %self.config.name, path = %path.addr, ?info, "path is up");
        self.meet(env, SessionEvent::PathUp);
    }

    fn log_down(&self, index: usize, why: &PathError) {
        let (session, path) = (&self.config.name, &self.paths[index].addr);
        match why {
            PathError::Closed => tracing::info!(%session, %path, "path closed"),
            why => tracing::warn!(%session, %path, error = %why, "path lost"),
        }
    }

    fn path_down(&mut self, env: &mut Env<'_, '_>, why: PathError) {
        if self.paths.iter().any(Path::is_up) {
            return;
        }
        self.why = why;
        self.meet(env, SessionEvent::LastPathDown);
        self.fail_waiting(env);
    }

    /// Without a path what waits for a permit has nowhere to go.
    fn fail_waiting(&mut self, env: &mut Env<'_, '_>) {
        for request in core::mem::take(&mut self.lane.waiting) {
            self.lane.told(request, Err(IoError::Path(self.why.clone())), env.out);
        }
    }

    fn attempt_failed(&mut self, index: usize, error: Error) {
        let path = &mut self.paths[index];
        if self.state == SessionState::Opening {
            self.failure.get_or_insert(error);
            return path.meet(PathEvent::CloseAsked);
        }
        tracing::warn!(session = %self.config.name, path = %path.addr, %error, "reconnecting failed");
    }

    /// Requests whose path is drained go by another, or end. What is sent again keeps its permit: in the same chunk the server
    /// can't do it a first time after it has done it a second time, and something else in between.
    fn orphaned(&mut self, env: &mut Env<'_, '_>, index: usize, orphans: Vec<Orphan>) {
        let why = self.paths[index].why();
        for Orphan { permit, flight } in orphans {
            let result = match flight.waits {
                // It was answered; the key ended with the queue pair.
                Waits::Revocation(0) => Ok(()),
                Waits::Revocation(errno) => Err(IoError::Remote(errno.into())),
                Waits::Room | Waits::Answer => match self.way_for(permit) {
                    Some(path) => {
                        self.send(env, path, permit, flight.request, flight.rest);
                        continue;
                    }
                    None => Err(IoError::Path(why.clone())),
                },
            };
            self.lane.release(permit, flight.rest);
            self.lane.told(flight.request, result, env.out);
        }
    }

    /// A path that is up, and has this permit's chunk.
    fn way_for(&self, permit: u16) -> Option<usize> {
        let has = |path: &Path| path.is_up() && usize::from(permit) < path.chunks.len();
        self.paths.iter().position(has)
    }

    fn path_closed(&mut self, env: &mut Env<'_, '_>, index: usize) {
        if self.paths.iter().any(|path| path.state != PathState::Closed) {
            return;
        }
        if self.state == SessionState::Open || self.state == SessionState::Opening {
            self.why = self.paths[index].why();
        }
        match self.state {
            SessionState::Opening => self.meet(env, SessionEvent::PathsLost),
            // It was closed without having been lost: by its device.
            SessionState::Open => self.meet(env, SessionEvent::LastPathDown),
            SessionState::Closing => self.meet(env, SessionEvent::PathsGone),
            SessionState::Disconnected | SessionState::Closed => {}
        }
        self.fail_waiting(env);
    }

    fn meet(&mut self, env: &mut Env<'_, '_>, event: SessionEvent) {
        let Some((next, actions)) = table::step(SESSION, self.state, event) else {
            return;
        };
        self.state = next;
        for action in actions {
            self.act(env, *action);
        }
    }

    fn act(&mut self, env: &mut Env<'_, '_>, action: SessionAction) {
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
            SessionAction::GiveBack => self.lane.close(env.cx),
            SessionAction::Tell => env.out.push_back(Output::Closed(self.id)),
        }
    }

    fn close_paths(&mut self, env: &mut Env<'_, '_>) {
        self.why = PathError::Closed;
        self.fail_waiting(env);
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if path.is_up() {
                path.set_why(PathError::Closed);
                tracing::info!(session = %self.config.name, path = %path.addr, "path closed");
            }
            path.meet(PathEvent::CloseAsked);
            self.settle(env, index, Vec::new());
        }
        // All of them may have been closed before.
        if self.paths.iter().all(|path| path.state == PathState::Closed) {
            self.meet(env, SessionEvent::PathsGone);
        }
    }
}

#[cfg(test)]
mod tests;
