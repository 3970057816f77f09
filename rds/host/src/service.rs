//! Turns of a node's thread.

use std::sync::Arc;

use rand::{RngCore, rngs::StdRng};
use roce::{
    Completion,
    reactor::{Service, TurnCx},
};
use roce_verbs::{
    Instant,
    provider::{Cx, Event, QpId},
};

use crate::shared::{Command, Register, Shared};

/// Node on its loop.
pub(crate) struct NodeService {
    pub(crate) shared: Arc<Shared>,
    pub(crate) rng: StdRng,
    pub(crate) next_timeout: Option<Instant>,
    pub(crate) stopping: bool,
}

impl NodeService {
    /// Works on the node, if it is there still.
    fn with(&mut self, turn: &mut TurnCx<'_, ()>, f: impl FnOnce(&mut rds::Node, &mut Cx<'_>)) {
        let rng = &mut self.rng;
        let mut cx = Cx {
            now: turn.now,
            provider: turn.device.provider(),
            random: &mut |out: &mut [u8]| rng.fill_bytes(out),
        };
        self.next_timeout = self.shared.in_turn(|state| {
            let node = state.node.as_mut()?;
            f(node, &mut cx);
            node.next_timeout()
        });
    }
}

impl Service for NodeService {
    type Command = Command;
    type Output = ();

    fn command(&mut self, turn: &mut TurnCx<'_, ()>, command: Command) {
        // What there is to post leaves at the turn's end.
        match command {
            Command::Work => {}
            Command::Register(register) => self.with(turn, |node, cx| {
                let Register {
                    socket,
                    memory,
                    rights,
                    answer,
                } = *register;
                let range = 0..memory.len();
                // It is waited for.
                let _ = answer.send(node.register(cx, socket, memory, range, rights));
            }),
            Command::Stop => {
                self.stopping = true;
                self.with(turn, |node, cx| node.stop(cx));
            }
        }
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, ()>, completions: &[(QpId, Completion)]) {
        self.with(turn, |node, cx| {
            for (qp, wc) in completions {
                node.completion(cx, *qp, wc);
            }
        });
    }

    fn event(&mut self, turn: &mut TurnCx<'_, ()>, event: Event) {
        self.with(turn, |node, cx| {
            node.event(cx, &event);
        });
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.with(turn, |node, cx| node.timeout(cx));
    }

    fn end(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.with(turn, |node, cx| node.end_batch(cx));
        if self.stopping {
            let stopped = self
                .shared
                .in_turn(|state| state.node.as_ref().is_none_or(rds::Node::is_stopped));
            if stopped {
                turn.stop();
            }
        }
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.next_timeout
    }
}
