//! Paths that ask for the chunks while requests are at work: whether their clients have given those up (see [`awaited`](super::awaited)).

use roce_verbs::Instant;

use crate::{
    PACKET_LIFETIME,
    admission::PathKey,
    cx::Cx,
    server::{
        awaited::Probe,
        effects::Effects,
        letter::{Message, Part},
        path::Path,
        server::Server,
        session::Session,
        silence::ask,
        state::PathState,
    },
};

impl Session {
    /// At home: a path asks for the chunks. All shares look what is at work.
    pub(crate) fn begin_to_wait(&mut self, now: Instant, asker: PathKey, effects: &mut Effects) {
        let waits = self.await_requests(asker);
        let part = Part {
            session: self.key,
            path: asker,
        };
        for share in &self.told {
            effects.write(*share, Message::Settle(part));
        }
        let unsettled = self.told.clone();
        let Some(path) = self.paths.get_mut(&asker) else { return };
        path.unsettled = unsettled;
        if waits || !path.unsettled.is_empty() {
            let due = now + PACKET_LIFETIME;
            path.probe = Probe::Due(due);
            effects.wake = effects.wake.into_iter().chain([due]).min();
        }
    }

    /// At home: whether a path waits for requests that were at work when it asked.
    pub(crate) fn waits(&self, path: &Path) -> bool {
        self.awaits(path.id.key) || !path.unsettled.is_empty()
    }

    /// Asks the clients of the other paths for a sign of life, if it is time. What was sent before a path asked has come by then.
    pub(super) fn probe(&mut self, now: Instant, effects: &mut Effects) {
        let mut due = false;
        for path in self.paths.values_mut() {
            if matches!(path.probe, Probe::Due(at) if at <= now) {
                path.probe = Probe::Asked;
                due = true;
            }
        }
        let key = self.key;
        let up = |path: &&mut Path| path.state == PathState::Connected;
        for path in self.paths.values_mut().filter(|path| due && up(path)) {
            ask(key, path, effects);
        }
    }

    /// The client of a path has answered a question.
    pub(super) fn answered_probe(&mut self, path: PathKey, effects: &mut Effects) {
        let asked = |asker: &&Path| asker.probe == Probe::Asked && asker.state == PathState::Connecting;
        let askers: Vec<PathKey> = self.paths.values().filter(asked).map(|asker| asker.id.key).collect();
        for asker in askers {
            self.spare(asker, path, effects);
            for share in &self.told {
                let part = Part {
                    session: self.key,
                    path: asker,
                };
                effects.write(*share, Message::Spare(part, path));
            }
        }
    }
}

impl Server {
    /// Home wants to know when the requests are over that are at work here, for a path that asks for the chunks.
    pub(super) fn settle_for(&mut self, home: usize, part: Part) {
        let session = self.sessions.get_mut(&part.session);
        if !session.is_some_and(|session| session.await_requests(part.path)) {
            self.effects.write(home, Message::Settled(part));
        }
    }

    /// All that was at work for a path that has asked is over, at a share.
    pub(super) fn share_settled(&mut self, cx: &mut Cx<'_>, from: usize, part: Part) {
        if let Some(path) = self.path_mut(part.session, part.path) {
            path.unsettled.remove(&from);
        }
        self.name_waiting(cx, part.session);
    }

    /// Requests are over here that paths have waited for, or need not be waited for.
    pub(super) fn look_at_settled(&mut self, cx: &mut Cx<'_>) {
        for part in core::mem::take(&mut self.effects.settled) {
            match self.sessions.get(&part.session).map(|session| session.home) {
                Some(None) => self.name_waiting(cx, part.session),
                Some(Some(home)) => self.effects.write(home, Message::Settled(part)),
                None => {}
            }
        }
    }
}
