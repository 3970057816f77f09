//! The order in which the disk gets what sessions ask for, without I/O: bounded, and fair between sessions.

use std::collections::{BTreeMap, VecDeque};

/// How much is under way at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueLimits {
    /// Operations.
    pub slots: u32,
    /// Most slow operations among them, so that flushes do not starve reads.
    pub slow: u32,
    /// Bytes that a session may have started before it is another's turn.
    pub quantum: u64,
}

impl Default for QueueLimits {
    fn default() -> Self {
        Self {
            slots: 256,
            slow: 64,
            quantum: 128 << 10,
        }
    }
}

/// Cost of an operation for the disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Class {
    /// Reads and writes.
    Data,
    /// Flushes, discards, ranges of zeroes and block status, whose cost has nothing to do with their bytes.
    Slow,
}

/// Least that an operation counts for, bytes: small ones are not free.
const LEAST: u64 = 4096;

#[derive(Debug)]
struct Line<T> {
    waiting: VecDeque<(u64, T)>,
    /// Bytes that it may still start in this turn.
    credit: u64,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            credit: 0,
        }
    }
}

/// The sessions that wait with one class of operations, in turns (deficit round robin).
#[derive(Debug)]
struct Lines<K, T> {
    by_session: BTreeMap<K, Line<T>>,
    /// Sessions that wait; the first has its turn.
    turns: VecDeque<K>,
}

impl<K: Ord + Copy, T> Lines<K, T> {
    fn new() -> Self {
        Self {
            by_session: BTreeMap::new(),
            turns: VecDeque::new(),
        }
    }

    fn push(&mut self, session: K, bytes: u64, operation: T) {
        let line = self.by_session.entry(session).or_default();
        if line.waiting.is_empty() {
            self.turns.push_back(session);
        }
        line.waiting.push_back((bytes.max(LEAST), operation));
    }

    fn pop(&mut self, quantum: u64) -> Option<(K, T)> {
        loop {
            let session = *self.turns.front()?;
            let line = self.by_session.get_mut(&session)?;
            let cost = line.waiting.front()?.0;
            if cost > line.credit {
                line.credit += quantum;
                self.turns.rotate_left(1);
                continue;
            }
            line.credit -= cost;
            let (_, operation) = line.waiting.pop_front()?;
            if line.waiting.is_empty() {
                // Who has nothing to start saves nothing up.
                self.by_session.remove(&session);
                self.turns.pop_front();
            }
            return Some((session, operation));
        }
    }
}

/// Operations that wait for the disk.
#[derive(Debug)]
pub struct FairQueue<K, T> {
    limits: QueueLimits,
    data: Lines<K, T>,
    slow: Lines<K, T>,
    /// Operations in the queue.
    waiting: usize,
    /// Operations in flight.
    running: u32,
    running_slow: u32,
    /// The class that has its turn, when both wait.
    next_slow: bool,
}

impl<K: Ord + Copy, T> FairQueue<K, T> {
    /// An empty one.
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits,
            data: Lines::new(),
            slow: Lines::new(),
            waiting: 0,
            running: 0,
            running_slow: 0,
            next_slow: false,
        }
    }

    /// Adds an operation of a session.
    pub fn push(&mut self, session: K, class: Class, bytes: u64, operation: T) {
        self.waiting += 1;
        match class {
            Class::Data => self.data.push(session, bytes, operation),
            Class::Slow => self.slow.push(session, 0, operation),
        }
    }

    /// The next operation to start, if there is room for one. It occupies a slot until [`done`](Self::done).
    pub fn pop(&mut self) -> Option<(K, Class, T)> {
        if self.running >= self.limits.slots {
            return None;
        }
        let room = self.running_slow < self.limits.slow;
        let order = match self.next_slow {
            true => [Class::Slow, Class::Data],
            false => [Class::Data, Class::Slow],
        };
        let quantum = self.limits.quantum;
        let (session, class, operation) = order.into_iter().find_map(|class| {
            let (session, operation) = match class {
                Class::Data => self.data.pop(quantum)?,
                Class::Slow if room => self.slow.pop(quantum)?,
                Class::Slow => return None,
            };
            Some((session, class, operation))
        })?;
        self.next_slow = class == Class::Data;
        self.waiting -= 1;
        self.running += 1;
        self.running_slow += u32::from(class == Class::Slow);
        Some((session, class, operation))
    }

    /// An operation that was started has ended.
    pub fn done(&mut self, class: Class) {
        self.running = self.running.saturating_sub(1);
        self.running_slow = self.running_slow.saturating_sub(u32::from(class == Class::Slow));
    }

    /// Operations in flight.
    pub fn running(&self) -> u32 {
        self.running
    }

    /// Operations that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }
}

/// Flushes of one store: at most one runs, and its result answers others.
#[derive(Debug)]
pub struct Flushes<T> {
    running: bool,
    /// A write has ended since the running one was started, so that it need not cover it.
    written: bool,
    /// Requests that the running one answers, too.
    joined: Vec<T>,
    /// Requests for the next one.
    waiting: Vec<T>,
}

impl<T> Default for Flushes<T> {
    fn default() -> Self {
        Self {
            running: false,
            written: false,
            joined: Vec::new(),
            waiting: Vec::new(),
        }
    }
}

impl<T> Flushes<T> {
    /// A flush is requested. Returns it if it must be started.
    pub fn request(&mut self, flush: T) -> Option<T> {
        if !core::mem::replace(&mut self.running, true) {
            return Some(flush);
        }
        match self.written {
            true => self.waiting.push(flush),
            false => self.joined.push(flush),
        }
        None
    }

    /// A write of the store has ended.
    pub fn wrote(&mut self) {
        self.written = self.running;
    }

    /// The running one has ended. Returns those that it answers, too, and the next to start.
    pub fn done(&mut self) -> (Vec<T>, Option<T>) {
        let answered = core::mem::take(&mut self.joined);
        let mut waiting = core::mem::take(&mut self.waiting).into_iter();
        let next = waiting.next();
        self.joined.extend(waiting);
        (self.running, self.written) = (next.is_some(), false);
        (answered, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: QueueLimits = QueueLimits {
        slots: 8,
        slow: 2,
        quantum: 64 << 10,
    };

    #[test]
    fn one_sessions_flood_does_not_starve_another() {
        let mut queue = FairQueue::new(LIMITS);
        for i in 0..10_000 {
            queue.push('a', Class::Data, 1 << 20, i);
        }
        queue.push('b', Class::Data, 4096, 0);
        let mut started = 0;
        while let Some((session, class, _)) = queue.pop() {
            started += 1;
            queue.done(class);
            if session == 'b' {
                break;
            }
        }
        assert!(started <= 2, "{started} operations of a came first");
    }

    #[test]
    fn bytes_are_shared_whatever_the_sizes() {
        let mut queue = FairQueue::new(LIMITS);
        for i in 0..10_000 {
            queue.push("large", Class::Data, 128 << 10, i);
            queue.push("small", Class::Data, 4096, i);
        }
        let mut bytes = BTreeMap::new();
        for _ in 0..5000 {
            let (session, class, _) = queue.pop().unwrap();
            *bytes.entry(session).or_insert(0u64) += if session == "large" { 128 << 10 } else { 4096 };
            queue.done(class);
        }
        let (large, small) = (bytes["large"], bytes["small"]);
        assert!(large.abs_diff(small) <= 256 << 10, "{large} and {small}");
    }

    #[test]
    fn slow_ones_leave_slots_for_data_and_all_is_bounded() {
        let mut queue = FairQueue::new(LIMITS);
        for i in 0..100 {
            queue.push('a', Class::Slow, 0, i);
        }
        let started: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(started.len() as u32, LIMITS.slow);
        for i in 0..100 {
            queue.push('b', Class::Data, 4096, i);
        }
        let started: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert!(started.iter().all(|(_, class, _)| *class == Class::Data));
        assert_eq!(queue.running(), LIMITS.slots);
        queue.done(Class::Slow);
        // Both wait and both have room: each class has its turn.
        assert_eq!(queue.pop().map(|(.., class, _)| class), Some(Class::Slow));
    }

    #[test]
    fn a_session_keeps_its_order() {
        let mut queue = FairQueue::new(LIMITS);
        for i in 0..5 {
            queue.push('a', Class::Data, 512, i);
        }
        assert_eq!(queue.waiting(), 5);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(.., i)| i).collect();
        assert_eq!(order, [0, 1, 2, 3, 4]);
        assert_eq!((queue.waiting(), queue.running()), (0, 5));
    }

    #[test]
    fn a_flush_answers_only_what_it_covers() {
        let mut flushes = Flushes::default();
        assert_eq!(flushes.request(1), Some(1));
        assert_eq!(flushes.request(2), None, "nothing was written since the first began");
        flushes.wrote();
        assert_eq!((flushes.request(3), flushes.request(4)), (None, None));
        assert_eq!(flushes.done(), (vec![2], Some(3)));
        assert_eq!(flushes.request(5), None, "begun after all that was written");
        assert_eq!(flushes.done(), (vec![4, 5], None));
        flushes.wrote();
        assert_eq!(flushes.request(6), Some(6));
        assert_eq!(flushes.done(), (vec![], None));
    }
}
