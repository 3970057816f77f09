//! How a mapping ends.

use rnbd::client::OnLoss;
use roce::reactor::TurnCx;

use super::{Phase, Service};
use crate::map::types::MapFailure;

impl Service {
    /// It is over, for this reason, unless there was one before.
    pub(super) fn end_with(&mut self, turn: &mut TurnCx<'_, ()>, why: MapFailure) {
        self.failure.get_or_insert(why);
        self.finish(turn);
    }

    /// The loop ends with this turn.
    pub(super) fn finish(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Ended;
        self.answer_unmapping();
        turn.stop();
    }

    /// No new clients, and no new requests of those that are there.
    pub(super) fn drain(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Draining;
        self.accept_path.close(&turn.sockets);
        self.fronts.close(&turn.sockets);
        self.fronts.let_go(None);
        // Nobody waits for a lost device then.
        for device in &self.devices {
            if let Err(e) = self.rnbd.set_on_loss(device.key, OnLoss::Error) {
                tracing::debug!("on loss: {e}");
            }
        }
        let until = turn.now + self.config.grace;
        for (_, client) in &mut self.clients {
            client.let_go(until);
        }
    }

    /// Goes on when the clients are gone.
    pub(super) fn look_drained(&mut self, turn: &mut TurnCx<'_, ()>) {
        if self.phase != Phase::Draining || !self.clients.is_empty() || !self.fronts.is_empty() {
            return;
        }
        self.phase = Phase::Unmapping;
        if self.devices.is_empty() {
            return self.close_session(turn);
        }
        let all: Vec<_> = self.devices.iter().map(|device| device.key).collect();
        for key in all {
            self.end_device(turn, key);
        }
    }

    pub(super) fn session_is_up(&self) -> bool {
        self.session
            .is_some_and(|session| self.rnbd.rtrs().state(session).is_ok())
    }

    pub(super) fn close_session(&mut self, turn: &mut TurnCx<'_, ()>) {
        if matches!(self.phase, Phase::Closing | Phase::Ended) {
            return;
        }
        self.phase = Phase::Closing;
        match self.session {
            Some(session) => self.rnbd.rtrs_mut().close(&mut self.rng.cx(turn), session),
            None => turn.stop(),
        }
    }

    pub(super) fn stop(&mut self, turn: &mut TurnCx<'_, ()>) {
        match self.phase {
            Phase::Opening | Phase::Mapping => self.close_session(turn),
            Phase::Serving => self.drain(turn),
            _ => {}
        }
    }
}
