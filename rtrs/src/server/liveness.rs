//! Liveness of a session's paths: heartbeats, paths that are silent while others of their session are not, and requests that a new path
//! waits for.
//!
//! A path's heartbeat ends it after the time that the configuration says, as a client may be busy, paused or moved. With several
//! paths the client shows by the others that it lives. So while requests come, or are with the user, or a path owes an answer, the server
//! compares the paths that are up every [`LOOK`], and sends a heartbeat by each. One by which nothing has come for [`LOOKS`] of them, while
//! something came by another in each, is given up. A client that is merely slow or paused is so by all of them; and looks are counted,
//! not time, as it may be our own process that was stopped.
//!
//! The disconnect request of a path whose network may be dead leaves by the networks of the other paths too: clients of the kernel wait
//! much longer otherwise.
//!
//! A client whose session was lost may have given up all that it had in the chunks, before the server knows: a path of it may seem to
//! live, with a request that the disk executes. So a path is told of the chunks when all requests have ended that were executed when it
//! asked, except those of paths whose clients have answered a heartbeat since: they have lost no session. Nothing that its client writes
//! then gets into an earlier request, or is done before it.

use core::time::Duration;

use roce_verbs::{Instant, provider::CmRef};
use smallvec::SmallVec;

use crate::{
    Cx, PACKET_LIFETIME, PathError,
    admission::PathKey,
    proto::Imm,
    server::{
        effects::{Effects, Place},
        keepalive::LOOKS,
        path::Path,
        post::ServerWork,
        request::SessionKey,
        session::Session,
        state::PathState,
    },
};

/// Between two comparisons of the paths of a session.
const LOOK: Duration = Duration::from_millis(500);
/// For how long a request makes its session worth comparing. A path that owes an answer then does.
const BUSY: Duration = Duration::from_secs(2);
/// How often that is noted.
const RENEWAL: Duration = Duration::from_secs(1);
/// Answers that a path may owe before comparisons send it no more heartbeats.
const MAX_OWED: u32 = 16;

impl Session {
    /// When [`Session::tick`] wants to be called.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let paths = self.paths.values().filter_map(Path::next_timeout);
        paths.chain(self.awaited.next_timeout()).chain(self.watch.at).min()
    }

    /// A request has come to a session with several paths.
    pub(crate) fn note_request(&mut self, now: Instant, effects: &mut Effects) {
        let until = now + BUSY;
        if until >= self.watch.busy_until + RENEWAL {
            self.watch.busy_until = until;
            self.watch(now, effects);
        }
    }

    /// From now on paths are compared, if several are up.
    fn watch(&mut self, now: Instant, effects: &mut Effects) {
        if self.watch.at.is_none() && self.up().count() > 1 {
            self.watch.at = Some(now + LOOK);
            effects.wake(now + LOOK);
        }
    }

    /// Paths that take requests.
    fn up(&self) -> impl Iterator<Item = &Path> {
        let paths = self.paths.values();
        paths.filter(|path| path.phase.state() == PathState::Connected)
    }

    /// Looks at the clock.
    pub(crate) fn tick(&mut self, now: Instant, effects: &mut Effects) {
        let probe = self.awaited.probe(now);
        for path in self.paths.values_mut() {
            let up = path.phase.state() == PathState::Connected;
            match path.tick(now) {
                Ok(due) if due || probe && up => send_heartbeat(self.key, path, effects),
                Ok(_) => {}
                Err(why) => effects.broken.push_back((self.key, path.id.key, why)),
            }
        }
        self.look(now, effects);
    }

    /// Compares the paths, when it is time, and gives those up that are silent unlike others.
    fn look(&mut self, now: Instant, effects: &mut Effects) {
        let due = self.watch.at.take_if(|at| *at <= now).is_some();
        let busy = self.watch.busy_until > now || self.paths.values().any(|path| path.with_user > 0);
        if busy || self.up().any(|path| path.keepalive.owed > 0) {
            self.watch(now, effects);
        }
        if !due || self.watch.at.is_none() {
            return;
        }
        let alive = self.up().any(|path| path.keepalive.heard);
        let paths = self.paths.values_mut();
        for path in paths.filter(|path| path.phase.state() == PathState::Connected) {
            if path.keepalive.look(alive) {
                let why = PathError::HeartbeatLost(LOOK * LOOKS);
                effects.broken.push_back((self.key, path.id.key, why));
            } else if path.keepalive.owed < MAX_OWED {
                send_heartbeat(self.key, path, effects);
            }
        }
    }

    /// Disconnects a path; if its network may be dead, by those of the other paths too.
    pub(crate) fn disconnect(&self, cx: &mut Cx<'_>, key: PathKey) {
        let Some(path) = self.paths.get(&key) else { return };
        let unheard = matches!(
            path.phase.ending().map(|ending| &ending.why),
            Some(PathError::HeartbeatLost(_) | PathError::Completion { .. })
        );
        let others = self.up().filter(|other| unheard && other.id.key != key);
        let ways = others.filter_map(|other| other.conns().next().map(|conn| conn.cm));
        path.disconnect(cx, &ways.collect::<SmallVec<[CmRef; 4]>>());
    }

    /// A path has asked for the chunks: it waits for the requests that are executed.
    pub(crate) fn await_requests(&mut self, now: Instant, asker: PathKey, effects: &mut Effects) {
        let probe_at = now + PACKET_LIFETIME;
        if self.awaited.begin(asker, self.chunks.all_at_work(), probe_at) {
            effects.wake(probe_at);
        }
    }

    /// Requests may have ended, or have been forgotten.
    pub(crate) fn look_at_awaited(&mut self, effects: &mut Effects) {
        let chunks = &self.chunks;
        if !self.awaited.is_empty() && self.awaited.retain(|_, request| chunks.at_work(request)) {
            effects.settled.push(self.key);
        }
    }

    /// The client of a path has answered a heartbeat.
    pub(crate) fn heartbeat_answered(&mut self, path: PathKey, effects: &mut Effects) {
        if self.awaited.alive(path) {
            effects.settled.push(self.key);
        }
    }
}

/// Sends a path's client a heartbeat, unless one has not left yet.
fn send_heartbeat(session: SessionKey, path: &mut Path, effects: &mut Effects) {
    if path.has_heartbeat() {
        return;
    }
    let place = Place {
        session,
        path: path.id.key,
        cid: 0,
    };
    path.keepalive.owed += 1;
    if let Err(why) = path.push(place, ServerWork::imm(Imm::HbMsg), effects) {
        effects.broken.push_back((session, place.path, why.into()));
    }
}
