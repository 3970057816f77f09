//! Detection of a path that is idle while others are not.
//!
//! The heartbeat fails a path only after seconds: a server may be busy, paused or migrated, and with one path nothing is gained by
//! failing it sooner. With several the others show that the server is alive. So while requests are in flight, a heartbeat is sent by
//! each path that is up every [`LOOK`]. A path that leaves one unanswered for 0.4 s, or longer if its round trip is long, and
//! by which no other message has arrived in that time, fails if the server has answered a later heartbeat by another path. A
//! server that is merely slow is slow by all of them.
//!
//! A path whose port goes down fails at once if another path is up.
//!
//! Further heartbeats are sent while some are unanswered: what arrives behind a lost answer makes our queue pair request that (a NAK),
//! while the server's timeout may be seconds.

use core::time::Duration;

use roce_verbs::{Instant, provider::DeviceIx};

use crate::{
    PathError,
    client::{env::Env, path::Path, session::Session},
};

/// Time between two comparisons of the paths.
const LOOK: Duration = Duration::from_millis(100);

impl<U> Session<U> {
    /// Requests are in flight: from now on paths are compared, if there are several.
    pub(super) fn watch(&mut self, env: &mut Env<'_, '_, U>) {
        if self.look_at.is_some() || self.paths.iter().filter(|path| path.is_up()).count() < 2 {
            return;
        }
        self.look_at = Some(env.cx.now + LOOK);
    }

    /// Compares the paths, when it is time, and fails those that are idle while others are not.
    pub(super) fn compare_paths(&mut self, env: &mut Env<'_, '_, U>) {
        let now = env.cx.now;
        if self.look_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        let busy = self.inflight.loads.iter().any(|load| *load > 0);
        let open = self
            .paths
            .iter()
            .any(|path| path.up().is_some_and(|up| up.keepalive.is_open()));
        if !busy && !open {
            return;
        }
        self.watch(env);
        if self.look_at.is_none() {
            return;
        }
        for index in 0..self.paths.len() {
            let Some(time) = self.idle_while_others_live(index, now) else {
                continue;
            };
            self.paths[index].fail_path(PathError::HeartbeatLost(time));
            self.settle(env, index);
        }
        for path in self.paths.iter_mut().filter(|path| path.is_up()) {
            path.send_heartbeat(env);
        }
    }

    /// The port of a device went down. Its paths fail at once if another path is up: then nothing is gained by waiting.
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
                self.paths[index].fail_path(PathError::PortDown);
                self.settle(env, index);
            }
        }
    }

    fn idle_while_others_live(&self, index: usize, now: Instant) -> Option<Duration> {
        let (since, time) = self.paths[index].up()?.keepalive.idle(now)?;
        let is_alive = |other: &Path| other.up().is_some_and(|up| up.keepalive.proves_alive(since));
        let others = self.paths.iter().enumerate().filter(|(other, _)| *other != index);
        others.into_iter().any(|(_, other)| is_alive(other)).then_some(time)
    }
}
