//! Paths that ask for the chunks while requests are at work: whether their clients have given those up (see [`awaited`](super::awaited)).

use roce_verbs::Instant;

use crate::{
    PACKET_LIFETIME,
    admission::PathKey,
    server::{
        awaited::Probe, effects::Effects, path::Path, phase::Phase, session::Session, silence::ask, state::PathState,
    },
};

impl Session {
    /// A path asks for the chunks.
    pub(crate) fn begin_to_wait(&mut self, now: Instant, asker: PathKey, effects: &mut Effects) {
        let waits = self.await_requests(asker);
        let Some(path) = self.paths.get_mut(&asker) else { return };
        if waits {
            let due = now + PACKET_LIFETIME;
            if let Some(probe) = path.phase.probe() {
                *probe = Probe::Due(due);
            }
            effects.wake = effects.wake.into_iter().chain([due]).min();
        }
    }

    /// Asks the clients of the other paths for a sign of life, if it is time. What was sent before a path asked has come by then.
    pub(super) fn probe(&mut self, now: Instant, effects: &mut Effects) {
        let mut due = false;
        for path in self.paths.values_mut() {
            if let Some(probe) = path.phase.probe()
                && matches!(probe, Probe::Due(at) if *at <= now)
            {
                *probe = Probe::Asked;
                due = true;
            }
        }
        let key = self.key;
        let up = |path: &&mut Path| path.phase.state() == PathState::Connected;
        for path in self.paths.values_mut().filter(|path| due && up(path)) {
            ask(key, path, effects);
        }
    }

    /// The client of a path has answered a question.
    pub(super) fn answered_probe(&mut self, path: PathKey, effects: &mut Effects) {
        let asked = |asker: &&Path| matches!(asker.phase, Phase::Connecting(Some(Probe::Asked)));
        let askers: Vec<PathKey> = self.paths.values().filter(asked).map(|asker| asker.id.key).collect();
        for asker in askers {
            self.spare(asker, path, effects);
        }
    }
}
