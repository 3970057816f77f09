//! Turns of a machine's thread.

use std::sync::Arc;

use rand::{RngCore, rngs::StdRng};
use roce::{
    Completion,
    reactor::{Service, TurnCx},
};
use roce_verbs::{
    Instant,
    provider::{Cx, Event, QpId, VerbsError},
};

use crate::{
    machine::Machine,
    shared::{Command, Shared, Turned},
};

/// Machine on its loop.
pub(crate) struct MachineService<M: Machine> {
    shared: Arc<Shared<M>>,
    rng: StdRng,
    next_timeout: Option<Instant>,
    stopping: bool,
}

impl<M: Machine> MachineService<M> {
    pub(crate) fn new(shared: Arc<Shared<M>>, rng: StdRng) -> Self {
        Self {
            shared,
            rng,
            next_timeout: None,
            stopping: false,
        }
    }

    /// Makes the machine.
    ///
    /// # Errors
    /// Errors of `make`.
    pub(crate) fn begin(
        &mut self,
        turn: &mut TurnCx<'_, ()>,
        make: impl FnOnce(&mut Cx<'_>) -> Result<M, VerbsError>,
    ) -> Result<(), VerbsError> {
        let rng = &mut self.rng;
        let mut cx = Cx {
            now: turn.now,
            provider: turn.device.provider(),
            random: &mut |out: &mut [u8]| rng.fill_bytes(out),
        };
        let machine = make(&mut cx)?;
        self.next_timeout = machine.next_timeout();
        self.shared.begin(machine);
        Ok(())
    }

    /// Works on the machine, if it is there still.
    fn with(&mut self, turn: &mut TurnCx<'_, ()>, f: impl FnOnce(&mut M, &mut Cx<'_>)) -> Turned {
        let rng = &mut self.rng;
        let mut cx = Cx {
            now: turn.now,
            provider: turn.device.provider(),
            random: &mut |out: &mut [u8]| rng.fill_bytes(out),
        };
        let turned = self.shared.in_turn(|machine| f(machine, &mut cx));
        self.next_timeout = turned.next_timeout;
        turned
    }
}

impl<M: Machine> Service for MachineService<M> {
    type Command = Command<M>;
    type Output = ();

    fn command(&mut self, turn: &mut TurnCx<'_, ()>, command: Command<M>) {
        // What there is to post leaves at the turn's end.
        match command {
            Command::Flush => {}
            Command::Run(work) => {
                self.with(turn, work);
            }
            Command::Stats(to) => {
                // It may wait for them no more.
                let _ = to.send(turn.stats());
            }
            Command::Stop => {
                self.stopping = true;
                self.with(turn, |machine, cx| machine.stop(cx));
            }
        }
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, ()>, completions: &[(QpId, Completion)]) {
        self.with(turn, |machine, cx| {
            for (qp, wc) in completions {
                machine.completion(cx, *qp, wc);
            }
        });
    }

    fn event(&mut self, turn: &mut TurnCx<'_, ()>, event: Event) {
        self.with(turn, |machine, cx| machine.event(cx, &event));
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.with(turn, |machine, cx| machine.timeout(cx));
    }

    fn end(&mut self, turn: &mut TurnCx<'_, ()>) {
        let turned = self.with(turn, |machine, cx| machine.end_batch(cx));
        if turned.wants_turn {
            // What its reports have led to is posted in another turn.
            self.shared.command(Command::Flush);
        }
        if self.stopping && turned.is_stopped {
            turn.stop();
        }
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.next_timeout
    }
}
