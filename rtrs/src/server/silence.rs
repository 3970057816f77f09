//! Heartbeats, and paths that are silent while others of their session are not.
//!
//! A path's heartbeat ends it after the time that the configuration says, as a client may be busy, paused or moved. With several
//! paths it shows by the others that it lives. So when requests have come of late, or are with the user, or a path owes an answer, the server
//! looks at the paths that are up every [`LOOK`], and asks each. One by which nothing has come for [`LOOKS`] of them, while something
//! came by another in each, is given up. A client that is merely slow or paused is so by all of them; and looks are counted, not time, as
//! it may be our own process that was stopped.
//!
//! Whose network may be dead is told so by the networks of the other paths: clients of the kernel wait much longer otherwise.

use core::time::Duration;

use roce_verbs::{Instant, provider::CmRef};
use smallvec::SmallVec;

use crate::{
    PathError,
    admission::PathKey,
    cx::Cx,
    proto::Imm,
    server::{
        effects::{Effects, Place},
        path::Path,
        post::ServerWork,
        request::SessionKey,
        session::Session,
        signs::LOOKS,
        state::PathState,
    },
};

/// Between two looks at the paths of a session.
const LOOK: Duration = Duration::from_millis(500);
/// For how long a request makes its session worth looking at. A path that owes an answer then does.
const BUSY: Duration = Duration::from_secs(2);
/// How often that is noted.
const RENEWAL: Duration = Duration::from_secs(1);
/// Answers that a path may owe before looks do not ask it any more.
const MAX_OWED: u32 = 16;

impl Session {
    /// When [`Session::tick`] wants to be called.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let paths = self.paths.values().filter_map(Path::next_timeout);
        paths.chain(self.watch.at).min()
    }

    /// A request has come.
    pub(crate) fn note_request(&mut self, now: Instant, effects: &mut Effects) {
        let until = now + BUSY;
        if self.paths.len() < 2 || until < self.watch.busy_until + RENEWAL {
            return;
        }
        self.watch.busy_until = until;
        self.watch(now, effects);
    }

    /// From now on paths are looked at, if several are up.
    fn watch(&mut self, now: Instant, effects: &mut Effects) {
        if self.watch.at.is_none() && self.up().count() > 1 {
            self.watch.at = Some(now + LOOK);
            effects.wake = effects.wake.into_iter().chain(self.watch.at).min();
        }
    }

    /// Paths that take requests.
    fn up(&self) -> impl Iterator<Item = &Path> {
        self.paths
            .values()
            .filter(|path| path.phase.state() == PathState::Connected)
    }

    /// Looks at the clock.
    pub(crate) fn tick(&mut self, now: Instant, effects: &mut Effects) {
        let key = self.key;
        for path in self.paths.values_mut() {
            match path.tick(now) {
                Ok(true) => ask(key, path, effects),
                Ok(false) => {}
                Err(why) => effects.broken.push_back((key, path.id.key, why)),
            }
        }
        self.probe(now, effects);
        self.look(now, effects);
    }

    /// Compares the paths, when it is time, and gives those up that are silent beside others.
    fn look(&mut self, now: Instant, effects: &mut Effects) {
        let due = self.watch.at.take_if(|at| *at <= now).is_some();
        let busy = self.watch.busy_until > now || self.paths.values().any(|path| path.with_user > 0);
        if busy || self.up().any(|path| path.signs.owed > 0) {
            self.watch(now, effects);
        }
        if !due || self.watch.at.is_none() {
            return;
        }
        let (key, life) = (self.key, self.up().any(|path| path.signs.heard));
        let up = self
            .paths
            .values_mut()
            .filter(|path| path.phase.state() == PathState::Connected);
        for path in up {
            if path.signs.look(life) {
                let why = PathError::HeartbeatLost(LOOK * LOOKS);
                effects.broken.push_back((key, path.id.key, why));
            } else if path.signs.owed < MAX_OWED {
                ask(key, path, effects);
            }
        }
    }

    /// Takes leave of a path's client; if its network may be dead, by those of the other paths too.
    pub(crate) fn disconnect(&self, cx: &mut Cx<'_>, key: PathKey) {
        let Some(path) = self.paths.get(&key) else { return };
        let unheard = matches!(
            path.phase.ending().map(|ending| &ending.why),
            Some(PathError::HeartbeatLost(_) | PathError::Completion { .. })
        );
        let others = self.up().filter(|other| unheard && other.id.key != key);
        let ways: SmallVec<[CmRef; 4]> = others
            .filter_map(|other| other.conns().next().map(|conn| conn.cm))
            .collect();
        path.disconnect(cx, &ways);
    }
}

/// Asks a path's client for a sign of life, unless a question has not left yet.
pub(super) fn ask(session: SessionKey, path: &mut Path, effects: &mut Effects) {
    let place = Place {
        session,
        path: path.id.key,
        cid: 0,
    };
    if path.asks() {
        return;
    }
    path.signs.owed += 1;
    match path.push(0, ServerWork::imm(Imm::HbMsg)) {
        Ok(true) => effects.dirty.push(place),
        Ok(false) => {}
        Err(why) => effects.broken.push_back((session, place.path, why.into())),
    }
}
