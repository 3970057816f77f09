//! The accounting of a send queue.
//!
//! Most sends are unsignalled. A slot is free again only when a signalled send behind it completes, so the queue counts slots,
//! signals often enough, and keeps work that finds no room until there is some.

use std::collections::VecDeque;

use roce_verbs::{QpState, wr::PostError};
use smallvec::SmallVec;

use crate::proto::Imm;

/// Smallest send queue that works.
pub const MIN_SEND_WR: u32 = 32;

/// Heartbeats of a kind that may wait: the answers to all questions that a peer may be owed at a time.
const MAX_BEATS: usize = 32;

/// Item to post, which knows how many slots it takes at most.
pub trait Work {
    /// Slots that it takes at most; a quarter of the queue or less.
    fn cost(&self) -> u32;

    /// Whether its completion is wanted for its own sake.
    fn signalled(&self) -> bool {
        false
    }

    /// The heartbeat message, if it is one. The peer decides how many of them there are to answer.
    fn heartbeat(&self) -> Option<Imm>;
}

/// Work that fits, in the order in which it came, and whether its last work request is to be signalled.
pub type Fitting<W> = SmallVec<[(W, bool); 32]>;

/// See the module.
#[derive(Debug)]
pub struct SendQueue<W> {
    size: u32,
    free: u32,
    /// Posted since the last signalled one.
    open: u32,
    /// Slots that each signalled send gives back, oldest first.
    signalled: VecDeque<u32>,
    waiting: VecDeque<W>,
    closed: bool,
}

impl<W: Work> SendQueue<W> {
    /// An empty one of so many slots.
    pub fn new(size: u32) -> Self {
        Self {
            size,
            free: size,
            open: 0,
            signalled: VecDeque::new(),
            waiting: VecDeque::new(),
            closed: false,
        }
    }

    /// Adds work. Of heartbeats few of a kind may wait: a peer that asks without end and acknowledges nothing must not fill the
    /// memory. All other work is bounded by the chunks.
    ///
    /// # Errors
    /// When the queue is closed: the connection is being taken down.
    pub fn push(&mut self, work: W) -> Result<(), PostError> {
        if self.closed {
            return Err(PostError::State(QpState::Err));
        }
        if work.heartbeat().is_none_or(|beat| self.beats(beat) < MAX_BEATS) {
            self.waiting.push_back(work);
        }
        Ok(())
    }

    /// Heartbeats of this kind that wait.
    pub fn beats(&self, beat: Imm) -> usize {
        self.waiting.iter().filter(|w| w.heartbeat() == Some(beat)).count()
    }

    /// Takes out what fits. Its slots are taken; what it did not need is given back by [`unused`](Self::unused).
    pub fn take(&mut self) -> Fitting<W> {
        let mut out = Fitting::new();
        while let Some(cost) = self.waiting.front().map(Work::cost).filter(|cost| *cost <= self.free) {
            let Some(work) = self.waiting.pop_front() else { break };
            self.free -= cost;
            self.open += cost;
            // A quarter of the queue may be without a signal, so that there is always one under way when it is full.
            let signal = work.signalled() || self.open >= self.size / 4;
            if signal {
                self.signalled.push_back(core::mem::take(&mut self.open));
            }
            out.push((work, signal));
        }
        out
    }

    /// Work that was taken needed so many slots fewer. To be called before more is taken.
    pub fn unused(&mut self, slots: u32) {
        let from = match self.open {
            // It was part of the last signalled batch.
            0 => self.signalled.back_mut(),
            _ => Some(&mut self.open),
        };
        if let Some(count) = from {
            let slots = slots.min(*count);
            *count -= slots;
            self.free += slots;
        }
    }

    /// A signalled send is done: the slots up to it are free.
    pub fn reclaim(&mut self) {
        let slots = self.signalled.pop_front().unwrap_or(0);
        self.free = (self.free + slots).min(self.size);
    }

    /// Whether something waits that fits.
    pub fn is_ready(&self) -> bool {
        self.waiting.front().is_some_and(|w| w.cost() <= self.free)
    }

    /// Takes nothing more. What waits is given back.
    pub fn close(&mut self) -> VecDeque<W> {
        self.closed = true;
        core::mem::take(&mut self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(PartialEq, Debug)]
    enum Thing {
        Beat(Imm),
        Answer(u32),
    }

    impl Work for Thing {
        fn cost(&self) -> u32 {
            match self {
                Self::Beat(_) => 1,
                Self::Answer(cost) => *cost,
            }
        }

        fn heartbeat(&self) -> Option<Imm> {
            match self {
                Self::Beat(imm) => Some(*imm),
                Self::Answer(_) => None,
            }
        }
    }

    #[test]
    fn of_a_peer_that_asks_for_signs_of_life_without_end_few_answers_wait() {
        let mut queue = SendQueue::new(MIN_SEND_WR);
        queue.push(Thing::Beat(Imm::HbMsg)).unwrap();
        for _ in 0..1000 {
            queue.push(Thing::Beat(Imm::HbAck)).unwrap();
        }
        queue.push(Thing::Answer(1)).unwrap();
        assert_eq!((queue.beats(Imm::HbMsg), queue.beats(Imm::HbAck)), (1, MAX_BEATS));
        assert_eq!(queue.waiting.len(), 2 + MAX_BEATS);
        assert_eq!(queue.waiting.back(), Some(&Thing::Answer(1)));
    }

    #[test]
    fn nothing_is_posted_beyond_the_queue_and_a_full_one_always_has_a_signal_under_way() {
        let mut queue = SendQueue::new(MIN_SEND_WR);
        // The slots of what is under way, and which of it is signalled.
        let mut posted: VecDeque<(u32, bool)> = VecDeque::new();
        for round in 0..1000u32 {
            for _ in 0..round % 7 {
                queue.push(Thing::Answer(1 + round % 3)).unwrap();
            }
            let taken = queue.take();
            posted.extend(taken.iter().map(|(work, signal)| (work.cost(), *signal)));
            assert!(
                posted.iter().map(|(cost, _)| cost).sum::<u32>() <= MIN_SEND_WR,
                "{round}"
            );
            if !queue.waiting.is_empty() {
                assert!(posted.iter().any(|(_, signal)| *signal), "stuck in round {round}");
            }
            if round % 3 == 0
                && let Some(signal) = posted.iter().position(|(_, signal)| *signal)
            {
                posted.drain(..=signal);
                queue.reclaim();
            }
        }
    }

    #[test]
    fn what_was_not_needed_is_free_at_once() {
        let mut queue = SendQueue::new(MIN_SEND_WR);
        queue.push(Thing::Answer(3)).unwrap();
        assert_eq!(queue.take().len(), 1);
        queue.unused(2);
        assert_eq!((queue.free, queue.open), (MIN_SEND_WR - 1, 1));
        for _ in 0..4 {
            queue.push(Thing::Answer(2)).unwrap();
        }
        let signals: Vec<bool> = queue.take().into_iter().map(|(_, signal)| signal).collect();
        assert_eq!(signals, [false, false, false, true]);
        queue.unused(1);
        queue.reclaim();
        assert_eq!(queue.free, MIN_SEND_WR);
    }

    #[test]
    fn a_closed_queue_gives_back_what_waits_and_takes_no_more() {
        let mut queue = SendQueue::new(MIN_SEND_WR);
        queue.push(Thing::Answer(1)).unwrap();
        assert_eq!(queue.close(), [Thing::Answer(1)]);
        assert!(matches!(
            queue.push(Thing::Answer(2)),
            Err(PostError::State(QpState::Err))
        ));
        assert!(queue.take().is_empty());
    }
}
