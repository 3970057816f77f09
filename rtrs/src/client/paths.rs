//! A session's paths: opening it over them, and what its user asks for them meanwhile.

use core::time::Duration;

use roce_verbs::{Instant, provider::DeviceIx};
use smallvec::SmallVec;

use crate::{
    Error, PACKET_LIFETIME,
    addr::PathAddr,
    client::{
        config::{SessionConfig, check_reconnects},
        env::Env,
        path::Path,
        policy::Policy,
        request::Output,
        session::Session,
        stage::{Reached, Step},
        state::{PathEvent, PathState, SessionEvent, SessionState},
        status::{PathCommand, PathCounters, PathId, PathNews, PathStatus},
        terms::Terms,
    },
    proto::Uuid,
};

impl<U> Session<U> {
    /// Tells the user of a path.
    pub(super) fn news(&self, env: &mut Env<'_, '_, U>, index: usize, news: PathNews) {
        let path = self.paths[index].id;
        env.out.push_back(Output::Path {
            session: self.id,
            path,
            news,
        });
    }

    /// The path of a request: one that is up, and has this permit's chunk.
    pub(super) fn pick_path(&mut self, permit: u16) -> Option<usize> {
        let (paths, loads) = (&self.paths, &self.inflight.loads);
        let fits = |index: &usize| paths[*index].is_up() && usize::from(permit) < paths[*index].chunks.len();
        let mut all = (0..paths.len()).filter(fits);
        match self.config.policy {
            _ if paths.len() == 1 => all.next(),
            Policy::RoundRobin => {
                let turn = self.turn.min(paths.len());
                let found = (turn..paths.len()).chain(0..turn).find(fits)?;
                self.turn = found + 1;
                Some(found)
            }
            Policy::MinInflight => all.min_by_key(|index| loads.get(*index).copied().unwrap_or(0)),
            Policy::MinLatency => all.min_by_key(|index| paths[*index].latency.unwrap_or(Duration::MAX)),
        }
    }

    /// Terms that the other paths prescribe: those that are up or nearly so.
    pub(super) fn agreed(&self, index: usize) -> Option<Terms> {
        let counts = |path: &&Path| matches!(path.state(), PathState::Connected | PathState::Connecting);
        self.others(index).filter(counts).find_map(|path| path.terms)
    }

    /// Whether a path beside this one is up.
    pub(super) fn has_other_up(&self, index: usize) -> bool {
        self.others(index).any(Path::is_up)
    }

    pub(super) fn others(&self, index: usize) -> impl Iterator<Item = &Path> {
        let others = self.paths.iter().enumerate().filter(move |(n, _)| *n != index);
        others.map(|(_, path)| path)
    }

    /// When a path may ask for the chunks: when all has come to the server that was sent by paths which were lost with the session.
    /// The server does not let the path in before it is done with that, even if it has not heard of the loss.
    pub(super) fn ask_at(&self, now: Instant) -> Option<Instant> {
        Some(self.lost_at? + PACKET_LIFETIME).filter(|at| *at > now)
    }

    /// The session is lost. A path that has asked for the chunks before may be let in while requests are at work that have ended here:
    /// it begins again.
    pub(super) fn ask_again(&mut self, env: &mut Env<'_, '_, U>) {
        let asked = |path: &Path| path.attempt().step == Step::Informing;
        for index in 0..self.paths.len() {
            if asked(&self.paths[index]) {
                self.paths[index].fail(Error::Overtaken);
                self.settle(env, index);
            }
        }
    }

    /// Whether the server may make the session when this path comes (`first_conn`). With two such paths two servers could each have
    /// half of a session.
    ///
    /// A path that was up once may if no other is up, or as good as that. A server that was started again then does not make a
    /// session beside paths that are not known to be lost yet, as it does for the kernel's client: it has opened no devices.
    ///
    /// Another path may if the session has none by which the server knows it, or will.
    pub(super) fn is_first(&self, index: usize) -> bool {
        let again = self.paths[index].reached >= Reached::Accepted;
        let known = |path: &Path| {
            let connecting = path.state() == PathState::Connecting;
            match again {
                true => path.is_up() || connecting && path.terms.is_some(),
                false => path.state() != PathState::Dead && (path.reached >= Reached::Accepted || path.attempt().first),
            }
        };
        !self.others(index).any(known)
    }

    /// Goes on while the session is being opened: one path after the other, as the kernel does, because the first makes the
    /// session at the server.
    pub(super) fn go_on_opening(&mut self, env: &mut Env<'_, '_, U>) {
        if self.state != SessionState::Opening || self.given_up {
            return;
        }
        let any = self.config.connect_any;
        let enough = any || self.paths.iter().all(|path| path.reached == Reached::Up);
        if enough && self.paths.iter().any(Path::is_up) {
            return self.opened(env);
        }
        let fresh = |path: &Path| matches!(path.reached, Reached::Asked | Reached::Accepted);
        let is_under_way = |path: &Path| fresh(path) && path.state() == PathState::Connecting;
        if self.paths.iter().any(is_under_way) {
            return;
        }
        // One that was up, and is lost, is connected again.
        let lost = self.paths.iter().position(fresh);
        match (
            self.paths.iter().position(|path| path.reached == Reached::Nothing),
            lost,
        ) {
            (Some(next), None) => self.begin_and_settle(env, next),
            (Some(next), _) if any => self.begin_and_settle(env, next),
            // Too few could be connected.
            (_, Some(lost)) => {
                let why = self.paths[lost].why();
                self.failure.get_or_insert(Error::Path(why));
                self.give_up_opening(env);
            }
            (None, None) => {}
        }
    }

    fn opened(&mut self, env: &mut Env<'_, '_, U>) {
        self.meet(env, SessionEvent::PathUp);
        for index in 0..self.paths.len() {
            if self.paths[index].reached == Reached::Nothing {
                self.begin_and_settle(env, index);
            }
        }
    }

    /// The paths go, and when they are gone the user is told.
    fn give_up_opening(&mut self, env: &mut Env<'_, '_, U>) {
        self.given_up = true;
        for index in 0..self.paths.len() {
            self.paths[index].meet(PathEvent::CloseAsked);
            self.settle(env, index);
        }
    }

    fn begin_and_settle(&mut self, env: &mut Env<'_, '_, U>, index: usize) {
        self.begin(env, index);
        self.settle(env, index);
    }

    /// Begins to connect one more path.
    pub(super) fn add_path(&mut self, env: &mut Env<'_, '_, U>, addr: PathAddr) -> Result<PathId, Error> {
        if !matches!(self.state, SessionState::Open | SessionState::Disconnected) {
            return Err(Error::Busy);
        }
        let alive = |path: &&Path| path.state() != PathState::Dead;
        if self.paths.iter().filter(alive).any(|path| path.addr == addr) {
            return Err(Error::PathExists(addr));
        }
        let free = self.paths.iter().position(|path| path.state() == PathState::Dead);
        let index = free.unwrap_or(self.paths.len());
        if index >= SessionConfig::MAX_PATHS {
            return Err(Error::Config("a session has at most 128 paths".into()));
        }
        let id = PathId(self.next_path);
        self.next_path += 1;
        let uuid = Uuid::draw(env.cx.random);
        let path = Path::new(self.id, index as u16, (id, addr, uuid));
        match self.paths.get_mut(index) {
            Some(place) => *place = path,
            None => self.paths.push(path),
        }
        self.paths[index].commands.push(PathCommand::Add);
        self.begin_and_settle(env, index);
        Ok(id)
    }

    /// Takes a command for a path. [`PathNews::Done`] says how it ended.
    pub(super) fn command(&mut self, env: &mut Env<'_, '_, U>, id: PathId, command: PathCommand) -> Result<(), Error> {
        let index = self.path_of(id).ok_or(Error::NoPath)?;
        if !matches!(self.state, SessionState::Open | SessionState::Disconnected) {
            return Err(Error::Busy);
        }
        let path = &mut self.paths[index];
        let event = match (command, path.state()) {
            (PathCommand::Add, _) => return Err(Error::Config("a path is added by its addresses".into())),
            (PathCommand::Reconnect, PathState::Connecting | PathState::Closing) => return Err(Error::Busy),
            (PathCommand::Reconnect, _) => Some(PathEvent::ReconnectAsked),
            (_, PathState::Closing | PathState::Closed) => None,
            _ => Some(PathEvent::CloseAsked),
        };
        path.commands.push(command);
        if let Some(event) = event {
            if path.is_up() {
                path.set_why(crate::PathError::Closed);
            }
            path.meet(event);
        }
        self.settle(env, index);
        Ok(())
    }

    /// Answers what was asked for a path, as far as it has come.
    pub(super) fn answer_commands(&mut self, env: &mut Env<'_, '_, U>, index: usize) {
        let path = &mut self.paths[index];
        match path.state() {
            PathState::Connected => {
                for command in core::mem::take(&mut path.commands) {
                    self.news(env, index, PathNews::Done(command, Ok(())));
                }
            }
            PathState::Closed => {
                let removes = |command: &PathCommand| matches!(command, PathCommand::Add | PathCommand::Remove);
                if path.commands.iter().any(removes) {
                    return self.forget(env, index);
                }
                for command in core::mem::take(&mut path.commands) {
                    let result = match command {
                        PathCommand::Disconnect => Ok(()),
                        _ => Err(Error::Path(self.paths[index].why())),
                    };
                    self.news(env, index, PathNews::Done(command, result));
                }
            }
            _ => {}
        }
    }

    /// A closed path leaves the session.
    fn forget(&mut self, env: &mut Env<'_, '_, U>, index: usize) {
        let path = &mut self.paths[index];
        let (commands, mut failure) = (core::mem::take(&mut path.commands), path.failure.take());
        path.meet(PathEvent::RemoveAsked);
        self.settle(env, index);
        for command in commands {
            let result = match command {
                PathCommand::Add => Err(failure.take().unwrap_or(Error::Path(self.paths[index].why()))),
                PathCommand::Reconnect => Err(Error::NoPath),
                PathCommand::Remove | PathCommand::Disconnect => Ok(()),
            };
            self.news(env, index, PathNews::Done(command, result));
        }
    }

    /// A path is gone: what only it needed of the session's devices goes too, as there may be no end of paths from ever other addresses.
    pub(super) fn free_devices(&mut self, env: &mut Env<'_, '_, U>) {
        let alive = self.paths.iter().filter(|path| path.state() != PathState::Dead);
        let used: SmallVec<[DeviceIx; 4]> = alive.filter_map(|path| path.entered).collect();
        self.inflight.retain_devices(env.cx, &used);
    }

    /// An attempt to connect a path has failed.
    pub(super) fn attempt_failed(&mut self, env: &mut Env<'_, '_, U>, index: usize, error: Error) {
        if matches!(error, Error::Overtaken) {
            tracing::debug!(session = %self.config.name, path = %self.paths[index].addr, "the path is connected again");
            return self.paths[index].retry_at_once();
        }
        tracing::warn!(session = %self.config.name, path = %self.paths[index].addr, %error, "connecting the path failed");
        self.paths[index].count_failure();
        if self.state == SessionState::Opening {
            // What follows of it is decided when the path has come to rest.
            self.failure.get_or_insert(error);
            return;
        }
        let path = &mut self.paths[index];
        let asked = |of| move |command: &PathCommand| *command == of;
        if path.commands.iter().any(asked(PathCommand::Add)) {
            path.meet(PathEvent::CloseAsked);
            path.failure = Some(error);
            return;
        }
        if let Some(at) = path.commands.iter().position(asked(PathCommand::Reconnect)) {
            path.commands.remove(at);
            return self.news(env, index, PathNews::Done(PathCommand::Reconnect, Err(error)));
        }
        self.news(env, index, PathNews::AttemptFailed(error));
    }

    pub(super) fn set_policy(&mut self, env: &mut Env<'_, '_, U>, policy: Policy) {
        self.config.policy = policy;
        if policy == Policy::MinLatency {
            for path in &mut self.paths {
                path.measure(env.cx.now);
            }
        }
    }

    pub(super) fn set_reconnects(&mut self, attempts: u32, delay: Duration) -> Result<(), Error> {
        check_reconnects(attempts)?;
        (self.config.max_reconnects, self.config.reconnect_delay) = (attempts, delay);
        Ok(())
    }

    pub(super) fn statuses(&self) -> Vec<PathStatus> {
        let alive = |(_, path): &(usize, &Path)| path.state() != PathState::Dead;
        let status = |(index, path): (usize, &Path)| {
            let of = path.device.and_then(|device| self.inflight.device(device));
            PathStatus {
                id: path.id,
                addr: path.addr,
                uuid: path.uuid,
                state: path.state(),
                device: path.device,
                hca: of.and_then(|of| of.name.clone()),
                keys: of.map(|of| of.strategy),
                latency: path.latency,
                in_flight: self.inflight.loads.get(index).copied().unwrap_or(0),
                stats: path.stats.clone(),
            }
        };
        self.paths.iter().enumerate().filter(alive).map(status).collect()
    }

    pub(super) fn reset_stats(&mut self, id: PathId, which: PathCounters) -> Result<(), Error> {
        let index = self.path_of(id).ok_or(Error::NoPath)?;
        self.paths[index].stats.reset(which);
        Ok(())
    }

    fn path_of(&self, id: PathId) -> Option<usize> {
        let is = |path: &Path| path.id == id && path.state() != PathState::Dead;
        self.paths.iter().position(is)
    }
}
