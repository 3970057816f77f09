//! A turn of a host's loop: what a state machine is handed, in the order in which loops do it.

use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

use super::node::Node;
use crate::Check;

/// Rounds of a turn.
const ROUNDS: u32 = 10_000;
/// Completions of a round.
const COMPLETIONS: usize = 64;

/// State machines of a host, such as either side of RTRS and what works above it.
pub trait Machines {
    /// Begins the turn.
    ///
    /// # Errors
    /// When a rule is broken.
    fn begin(&mut self, _: &mut Cx<'_>) -> Check {
        Ok(())
    }

    /// Handles a completion.
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion);
    /// Handles an event.
    fn event(&mut self, cx: &mut Cx<'_>, event: &Event);
    /// Does what is due.
    fn timeout(&mut self, cx: &mut Cx<'_>);

    /// Passes on what the machines have for each other, and does what they want.
    ///
    /// # Errors
    /// When a rule is broken.
    fn work(&mut self, cx: &mut Cx<'_>) -> Check;

    /// Ends the turn: posts what there is.
    fn end_batch(&mut self, cx: &mut Cx<'_>);
    /// Returns when something is due.
    fn next_timeout(&self) -> Option<Instant>;
}

/// Runs a turn of a host's machines. Returns when the next is due.
///
/// # Errors
/// When a rule is broken.
pub fn of_host(
    node: &mut Node,
    now: Instant,
    random: &mut dyn FnMut(&mut [u8]),
    machines: &mut impl Machines,
) -> Result<Option<Instant>, String> {
    let mut provider = node.provider(now);
    let mut cx = Cx {
        now,
        provider: &mut provider,
        random,
    };
    take(&mut cx, machines)
}

/// Hands completions and events over, until there are no more. Returns when the next turn is due.
fn take<M: Machines>(cx: &mut Cx<'_>, machines: &mut M) -> Result<Option<Instant>, String> {
    machines.begin(cx)?;
    let (mut wcs, mut ended) = (Vec::new(), false);
    for _ in 0..ROUNDS {
        let polled = cx.provider.poll_completions(&mut wcs, COMPLETIONS);
        polled.map_err(|e| e.to_string())?;
        let event = if wcs.is_empty() { cx.provider.poll_event() } else { None };
        let idle = wcs.is_empty() && event.is_none();
        if ended && idle {
            return Ok(machines.next_timeout());
        }
        for (qp, wc) in wcs.drain(..) {
            machines.completion(cx, qp, &wc);
        }
        if let Some(event) = event {
            machines.event(cx, &event);
        }
        machines.timeout(cx);
        machines.work(cx)?;
        if idle {
            machines.end_batch(cx);
            machines.work(cx)?;
        }
        ended = idle;
    }
    Err("a turn without end".into())
}
