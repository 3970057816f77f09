//! How a mapping ends.

use rnbd::client::OnLoss;
use roce_reactor::TurnCx;
use rtrs::cx::Cx;

use super::{HOME, Letter, Phase, Service};
use crate::map::MapFailure;

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

    /// No new clients, and no new requests of those that are there, at any loop.
    pub(super) fn drain(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Draining;
        self.entrance.close(&turn.sockets);
        self.fronts.close(&turn.sockets);
        self.fronts.let_go(None);
        if self.place.is_home() {
            // Nobody waits for a lost device then.
            for device in &self.devices {
                if let Err(e) = self.rnbd.set_on_loss(device.key, OnLoss::Error) {
                    tracing::debug!("on loss: {e}");
                }
            }
            self.undrained = self.place.loops.len() - 1;
            (1..=self.undrained).for_each(|other| self.place.tell(other, Letter::Drain));
        }
        let until = turn.now + self.config.grace;
        for (_, client) in &mut self.clients {
            client.let_go(until);
        }
    }

    /// Goes on when the clients are gone.
    pub(super) fn look_drained(&mut self, turn: &mut TurnCx<'_, ()>) {
        if self.phase != Phase::Draining || !self.clients.is_empty() || !self.fronts.is_empty() || self.undrained > 0 {
            return;
        }
        self.phase = Phase::Unmapping;
        if !self.place.is_home() {
            return self.place.tell(HOME, Letter::Drained);
        }
        if self.devices.is_empty() {
            return self.close_session(turn);
        }
        let all: Vec<_> = self.devices.iter().map(|device| device.key).collect();
        for key in all {
            self.end_device(turn, key);
        }
    }

    pub(super) fn session_is_up(&self) -> bool {
        self.session.is_some_and(|session| self.rtrs.state(session).is_ok())
    }

    pub(super) fn close_session(&mut self, turn: &mut TurnCx<'_, ()>) {
        if matches!(self.phase, Phase::Closing | Phase::Ended) {
            return;
        }
        self.phase = Phase::Closing;
        match self.session {
            Some(session) => self.rtrs.close(cx!(turn, self.dice), session),
            None => turn.stop(),
        }
    }

    /// Another loop has failed, and what waits for it would wait for ever. The server is told to go.
    pub(super) fn quit(&mut self, turn: &mut TurnCx<'_, ()>) {
        if let Some(session) = self.session.filter(|_| self.place.is_home()) {
            self.rtrs.close(cx!(turn, self.dice), session);
        }
        self.finish(turn);
    }

    pub(super) fn stop(&mut self, turn: &mut TurnCx<'_, ()>) {
        match self.phase {
            Phase::Opening | Phase::Mapping => self.close_session(turn),
            Phase::Serving => self.drain(turn),
            _ => {}
        }
    }
}
