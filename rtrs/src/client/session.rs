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
        handshake::Handshake,
        inflight::InFlightTable,
        path::{Path, Report},
        request::{Output, SessionId, Submission},
        stage::Reached,
        state::{PathEvent, PathState, SESSION, SessionAction, SessionEvent, SessionState},
        status::{PathId, PathNews},
    },
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
    /// Limits of its paths; known once one has been up.
    pub(super) info: Option<SessionInfo>,
    /// By index. A dead path's index is reused by the next that is added.
    pub(super) paths: Vec<Path>,
    /// Path whose turn it is, if they take turns.
    pub(super) turn: usize,
    /// Number of the next path.
    pub(super) next_path: u32,
    pub(super) inflight: InFlightTable<U>,
    /// It could not be opened, and its paths are being closed.
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
    /// Starts to connect its paths.
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
            turn: 0,
            next_path: paths.len() as u32,
            paths,
            given_up: false,
            config,
            inflight: InFlightTable::new(id),
            failure: None,
            why: PathError::Closed,
            lost_at: None,
            look_at: None,
        };
        session.go_on_opening(env);
        session
    }

    /// Whether requests are taken; the reason why not.
    pub(super) fn state(&self) -> Result<(), PathError> {
        match self.state {
            SessionState::Open => Ok(()),
            _ => Err(self.why.clone()),
        }
    }

    /// Whether it is closed; its user may still hold buffers.
    pub(super) fn is_closed(&self) -> bool {
        self.state == SessionState::Closed
    }

    /// Permits that its requests have.
    pub(super) fn permits(&self) -> usize {
        self.inflight.permits.held()
    }

    pub(super) fn buffers(&self) -> &Buffers {
        &self.inflight.buffers
    }

    /// The buffers, to prepare requests. They may be prepared while no path is up.
    pub(super) fn usable_buffers(&mut self) -> Result<&mut Buffers, Error> {
        match self.state {
            SessionState::Open | SessionState::Disconnected => Ok(&mut self.inflight.buffers),
            _ => Err(Error::Down(self.why.clone())),
        }
    }

    pub(super) fn close(&mut self, env: &mut Env<'_, '_, U>) {
        self.meet(env, SessionEvent::CloseAsked);
    }

    /// Takes a request. One that can't be sent ends at once.
    pub(super) fn submit(&mut self, env: &mut Env<'_, '_, U>, request: Submission<U>) {
        let too_long = |what, len, max: u32| IoError::TooLong {
            what,
            len,
            max: max as usize,
        };
        let (header, data) = (request.header.len(), request.data.as_ref().map_or(0, Buffer::len));
        let error = match self.info.filter(|_| self.state == SessionState::Open) {
            None => IoError::Path(self.why.clone()),
            Some(info) if header > info.max_user_header as usize => {
                too_long("user header", header, info.max_user_header)
            }
            Some(info) if data > info.max_io_size as usize => too_long("data", data, info.max_io_size),
            Some(_) => {
                self.inflight.waiting.push_back(request);
                self.start(env);
                return self.watch(env);
            }
        };
        env.out.push_back(request.done(self.id, Err(error)));
    }

    /// Sends requests that wait, as far as there are permits and a path.
    fn start(&mut self, env: &mut Env<'_, '_, U>) {
        while !self.inflight.waiting.is_empty() && self.paths.iter().any(Path::is_up) {
            let Some(permit) = self.inflight.permits.take(env.cx.now) else {
                return;
            };
            let Some(path) = self.pick_path(permit) else {
                return self.inflight.permits.give(permit);
            };
            if let Some(request) = self.inflight.waiting.pop_front() {
                self.inflight.insert(permit, request);
                self.send(env, path, permit);
            }
        }
    }

    /// Sends a request of the in-flight table by a path.
    fn send(&mut self, env: &mut Env<'_, '_, U>, path: usize, permit: u16) {
        let Some(request) = self.inflight.get(permit).map(|entry| &entry.request) else {
            return;
        };
        let headers = self.inflight.headers.as_ref();
        let written = headers.map(|headers| headers.write(permit, 0, &request.header));
        if !matches!(written, Some(Ok(()))) {
            // The sizes were checked: those of the path differ from the session's.
            let (what, len, max) = ("user header", request.header.len(), 0);
            let error = IoError::TooLong { what, len, max };
            return self.inflight.end(permit, Err(error), env.out);
        }
        let path = &mut self.paths[path];
        let io = path.conns.len().saturating_sub(1).max(1);
        let cid = match request.con {
            ConType::Admin => 0,
            ConType::Io(hint) => 1 + (hint % io) as u16,
        };
        let slots = self.inflight.slots(path.device, request.direction);
        let bytes = request.header.len() + request.data.as_ref().map_or(0, Buffer::len);
        path.stats.rdma.count(request.direction, bytes as u64);
        self.inflight.launch(permit, path.index, cid, env.cpu);
        path.push(env, cid, Post::Request { permit, slots });
    }

    /// A work request of one of its connections has completed.
    pub(super) fn completion(&mut self, env: &mut Env<'_, '_, U>, path: u16, cid: u16, wc: &Completion) {
        let index = usize::from(path);
        let Some(path) = self.paths.get_mut(index) else { return };
        if !matches!(path.state(), PathState::Connecting | PathState::Connected) {
            // It was in flight when the path went down.
            return;
        }
        let was_up = path.is_up();
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
                path.received(env.cx.now);
                self.handshake(env, index).information(wc)
            }
            Some(mark) => Answers {
                path,
                env,
                inflight: &mut self.inflight,
            }
            .completion(cid, mark, wc)
            .map_err(Error::Path),
        };
        match done {
            // The way of nearly all completions.
            Ok(()) if was_up && self.inflight.waiting.is_empty() => {}
            Ok(()) => self.settle(env, index),
            Err(e) => {
                self.paths[index].fail(e);
                self.settle(env, index);
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
            inflight: &mut self.inflight,
            config: &self.config,
            uuid: self.uuid,
        }
    }

    pub(super) fn begin(&mut self, env: &mut Env<'_, '_, U>, index: usize) {
        let first = self.is_first(index);
        let path = &mut self.paths[index];
        path.reached = path.reached.max(Reached::Asked);
        if let Some(attempt) = path.attempt_mut() {
            attempt.first = first;
        }
        let mut handshake = self.handshake(env, index);
        let begun = handshake.begin();
        handshake.settle(begun);
    }

    /// An event of one of its connections.
    pub(super) fn cm_event(&mut self, env: &mut Env<'_, '_, U>, path: u16, cid: u16, kind: CmKind) {
        let index = usize::from(path);
        let Some(path) = self.paths.get_mut(index) else { return };
        if matches!(
            kind,
            CmKind::Disconnected | CmKind::Rejected { .. } | CmKind::Unreachable(_) | CmKind::ConnectError(_)
        ) {
            path.disconnected(cid);
        }
        match (path.state(), kind) {
            (PathState::Connecting, CmKind::Disconnected) | (PathState::Connected, CmKind::Disconnected) => {
                path.fail_path(PathError::PeerDisconnected);
            }
            (PathState::Connecting, kind) => {
                let mut handshake = self.handshake(env, index);
                let done = handshake.event(cid, kind);
                handshake.settle(done);
            }
            (PathState::Connected, kind) => {
                let why = match kind {
                    CmKind::ConnectError(text) => text,
                    CmKind::Rejected { reason, .. } => format!("rejected: {reason}"),
                    CmKind::Unreachable(why) => format!("unreachable: {why}"),
                    CmKind::AddressChange => "our address is gone".into(),
                    _ => return,
                };
                path.fail_path(PathError::Cm(why));
            }
            _ => {}
        }
        self.settle(env, index);
    }

    pub(super) fn drained(&mut self, env: &mut Env<'_, '_, U>, path: u16, cid: u16) {
        let index = usize::from(path);
        if let Some(path) = self.paths.get_mut(index) {
            path.drained(cid);
            self.settle(env, index);
        }
    }

    /// A device is removed. Its paths reconnect by the device that has their address then; the kernel's client closes them.
    pub(super) fn device_removed(&mut self, env: &mut Env<'_, '_, U>, device: DeviceIx) {
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if path.entered == Some(device) {
                path.lose_device();
                self.settle(env, index);
            }
        }
    }

    pub(super) fn timeout(&mut self, env: &mut Env<'_, '_, U>) {
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if path.next_timeout().is_some_and(|due| due <= env.cx.now) {
                if path.may_ask(env.cx.now) {
                    let mut handshake = self.handshake(env, index);
                    let done = handshake.connected();
                    handshake.settle(done);
                }
                let path = &mut self.paths[index];
                path.timeout(env, &self.config);
                self.settle(env, index);
            }
        }
        self.compare_paths(env);
        let resend = self.inflight.release_held(env.cx.now, env.out);
        if !resend.is_empty() {
            let why = self.why.clone();
            self.send_again(env, resend, &why);
        }
        // Permits may have come out of quarantine.
        self.start(env);
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let quarantine = self
            .inflight
            .permits
            .next_timeout()
            .filter(|_| !self.inflight.waiting.is_empty());
        let looks = self
            .look_at
            .into_iter()
            .chain(quarantine)
            .chain(self.inflight.next_timeout());
        self.paths.iter().filter_map(Path::next_timeout).chain(looks).min()
    }

    /// Does the actions of a path's events, and handles its reports.
    pub(super) fn settle(&mut self, env: &mut Env<'_, '_, U>, index: usize) {
        loop {
            let path = &mut self.paths[index];
            path.run(env, &mut self.inflight, &self.config);
            let reports = core::mem::take(&mut path.reports);
            if reports.is_empty() {
                break;
            }
            for report in reports {
                self.report(env, index, report);
            }
        }
        if !self.paths[index].commands.is_empty() {
            self.answer_commands(env, index);
        }
        self.go_on_opening(env);
        self.start(env);
    }

    fn report(&mut self, env: &mut Env<'_, '_, U>, index: usize, report: Report) {
        match report {
            Report::Begin => self.begin(env, index),
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
                self.inflight.path_forgotten(index as u16);
                self.free_devices(env);
            }
            Report::LeftDevice => self.free_devices(env),
            Report::RequestsLost { permits, outlived } => self.requests_lost(env, index, permits, outlived),
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
            // A server refuses it while it executes requests of its former connections.
            self.inflight.path_gone(index as u16);
        }
        let path = &self.paths[index];
        let Some(terms) = path.terms else { return };
        let info = terms.info(self.config.max_user_header);
        self.info = Some(info);
        let full = Buffers::bytes_for(info.max_io_size as usize, info.queue_depth as usize);
        self.inflight
            .buffers
            .set_limit(self.config.buffer_bytes.unwrap_or(full));
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
        for permit in self.inflight.take_unsent() {
            self.inflight.end_unanswered(env.cx.now, permit, &why, env.out);
        }
        self.fail_waiting(env);
    }

    /// Without a path what waits for a permit has nowhere to go.
    fn fail_waiting(&mut self, env: &mut Env<'_, '_, U>) {
        for request in core::mem::take(&mut self.inflight.waiting) {
            let end = request.done(self.id, Err(IoError::Path(self.why.clone())));
            env.out.push_back(end);
        }
    }

    /// Requests of a drained path that have no answer go by another path, or end. A resent request keeps its permit: in the same chunk
    /// the server can't execute it a first time after the second, with another request in between.
    fn requests_lost(&mut self, env: &mut Env<'_, '_, U>, index: usize, mut permits: Vec<u16>, outlived: bool) {
        let why = self.paths[index].why();
        // With the session the server has closed what its user had open there: even if another path is up by now, a request may mean
        // something else.
        if outlived {
            for permit in permits {
                self.inflight.end_unanswered(env.cx.now, permit, &why, env.out);
            }
            return;
        }
        // The last packets of a path that was in order are under way now.
        if matches!(why, PathError::Closed) && self.has_other_up(index) {
            self.inflight.hold_reads(&mut permits);
        }
        self.send_again(env, permits, &why);
    }

    /// Sends requests by another path, if there is one.
    fn send_again(&mut self, env: &mut Env<'_, '_, U>, permits: Vec<u16>, why: &PathError) {
        let mut taken = vec![0; self.paths.len()];
        for permit in permits {
            let Some(path) = self.pick_path(permit) else {
                self.inflight.end_unanswered(env.cx.now, permit, why, env.out);
                continue;
            };
            taken[path] += 1;
            self.paths[path].stats.failovers += 1;
            self.send(env, path, permit);
        }
        for (path, requests) in taken.into_iter().enumerate().filter(|(_, n)| *n > 0) {
            self.news(env, path, PathNews::TookOver(requests));
        }
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
                self.inflight.fail_held(env.out);
                self.inflight.close(env.cx);
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
            self.settle(env, index);
        }
        // All of them may have been closed before.
        self.look_over(env);
    }
}

#[cfg(test)]
mod tests;
