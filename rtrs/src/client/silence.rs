//! Paths that are silent while others are not.
//!
//! The heartbeat of a path ends it after seconds, as a server may be busy, paused or moved, and with one path nothing is gained by
//! giving it up sooner. With several the server shows by the others that it lives. So while requests are under way, all paths that are
//! up are asked every [`LOOK`]. One that leaves a question unanswered for 0.4 s, and longer if its answers usually take long, and
//! by which nothing else has come in that time, is given up if the server has meanwhile answered a later question by another path. A
//! server that is merely slow is slow by all of them.
//!
//! A path whose port goes down is given up without a question, if another is up.
//!
//! A path is asked again while it owes answers: what comes behind a lost answer makes our queue pair ask for that (a NAK), while the
//! server's timeout may be seconds.

use core::time::Duration;

use roce_verbs::{Instant, provider::DeviceIx};

use crate::{
    PathError,
    client::{env::Env, path::Path, session::Session},
};

/// Between two looks at the paths.
const LOOK: Duration = Duration::from_millis(100);

impl<U> Session<U> {
    /// Requests are under way: from now on paths are compared, if there are several.
    pub(super) fn watch(&mut self, env: &mut Env<'_, '_, U>) {
        if self.look_at.is_some() || self.paths.iter().filter(|path| path.is_up()).count() < 2 {
            return;
        }
        self.look_at = Some(env.cx.now + LOOK);
    }

    /// Compares the paths, when it is time, and gives those up that are silent beside others.
    pub(super) fn compare_paths(&mut self, env: &mut Env<'_, '_, U>) {
        let now = env.cx.now;
        if self.look_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        let busy = self.lane.loads.iter().any(|load| *load > 0);
        let open = self
            .paths
            .iter()
            .any(|path| path.up().is_some_and(|up| up.questions.is_open()));
        if !busy && !open {
            return;
        }
        self.watch(env);
        if self.look_at.is_none() {
            return;
        }
        for index in 0..self.paths.len() {
            let Some(time) = self.silent_beside_others(index, now) else {
                continue;
            };
            let mut reports = Vec::new();
            self.paths[index].fail_path(PathError::HeartbeatLost(time), &mut reports);
            self.settle(env, index, reports);
        }
        for path in self.paths.iter_mut().filter(|path| path.is_up()) {
            path.ask(env);
        }
    }

    /// The port of a device went down. Its paths are given up at once if another path is up: then nothing is gained by waiting.
    pub(super) fn port_down(&mut self, env: &mut Env<'_, '_, U>, device: DeviceIx) {
        let by_it = |path: &Path| path.is_up() && path.device == Some(device);
        if !self
            .paths
            .iter()
            .any(|path| path.is_up() && path.device != Some(device))
        {
            return;
        }
        for index in 0..self.paths.len() {
            if by_it(&self.paths[index]) {
                let mut reports = Vec::new();
                self.paths[index].fail_path(PathError::PortDown, &mut reports);
                self.settle(env, index, reports);
            }
        }
    }

    fn silent_beside_others(&self, index: usize, now: Instant) -> Option<Duration> {
        let (since, time) = self.paths[index].up()?.questions.silent(now)?;
        let lives = |other: &Path| other.up().is_some_and(|up| up.questions.proves_life(since));
        let others = self.paths.iter().enumerate().filter(|(other, _)| *other != index);
        others.into_iter().any(|(_, other)| lives(other)).then_some(time)
    }
}
