//! The order of the disks' operations, without the I/O: bounded, and fair between sessions; and which of them a flush answers.

use std::collections::{BTreeMap, VecDeque};

use rtrs::server::request::SessionKey;

use crate::{
    block::BlockOp,
    errno::Errno,
    server::disk::{Op, StoreId},
};

/// Limits of the operations in flight.
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

/// Least that an operation counts for, bytes: small ones are not free.
const LEAST: u64 = 4096;

/// Whether the cost of an operation has nothing to do with its bytes.
fn is_slow(op: BlockOp) -> bool {
    !matches!(op, BlockOp::Read | BlockOp::Write { .. })
}

/// Operations of a session that wait.
#[derive(Debug)]
struct Line<P> {
    waiting: VecDeque<Box<Op<P>>>,
    /// Bytes that it may still start in this turn.
    credit: u64,
}

/// The sessions that wait with one class of operations, in turns (deficit round robin).
#[derive(Debug)]
struct Lines<P> {
    by_session: BTreeMap<SessionKey, Line<P>>,
    /// Sessions that wait; the first has its turn.
    turns: VecDeque<SessionKey>,
}

impl<P> Default for Lines<P> {
    fn default() -> Self {
        Self {
            by_session: BTreeMap::new(),
            turns: VecDeque::new(),
        }
    }
}

impl<P> Lines<P> {
    fn push(&mut self, op: Box<Op<P>>) {
        let session = op.id.session;
        let line = self.by_session.entry(session).or_insert_with(|| {
            self.turns.push_back(session);
            Line {
                waiting: VecDeque::new(),
                credit: 0,
            }
        });
        line.waiting.push_back(op);
    }

    fn pop(&mut self, quantum: u64) -> Option<Box<Op<P>>> {
        loop {
            let session = *self.turns.front()?;
            let line = self.by_session.get_mut(&session)?;
            let next = &line.waiting.front()?.disk;
            let cost = match is_slow(next.op) {
                true => LEAST,
                false => next.len.max(LEAST),
            };
            if cost > line.credit {
                line.credit += quantum;
                self.turns.rotate_left(1);
                continue;
            }
            line.credit -= cost;
            let op = line.waiting.pop_front();
            if line.waiting.is_empty() {
                // Who has nothing to start saves nothing up.
                self.by_session.remove(&session);
                self.turns.pop_front();
            }
            return op;
        }
    }
}

/// An open device.
#[derive(Debug)]
struct Store<P> {
    /// Operations that have not ended.
    unanswered: usize,
    /// A flush waits for its turn or is in flight; there is one at most.
    flushing: bool,
    /// A write has ended since it began, so that it need not cover it.
    written: bool,
    /// Requests that this flush answers, too.
    joined: Vec<Box<Op<P>>>,
    /// Requests for the next one.
    waiting: Vec<Box<Op<P>>>,
}

impl<P> Default for Store<P> {
    fn default() -> Self {
        Self {
            unanswered: 0,
            flushing: false,
            written: false,
            joined: Vec::new(),
            waiting: Vec::new(),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Schedule<P> {
    limits: QueueLimits,
    data: Lines<P>,
    slow: Lines<P>,
    /// Operations that wait for their turn.
    waiting: usize,
    /// Operations in flight.
    running: u32,
    running_slow: u32,
    /// The class that has its turn, when both wait.
    next_slow: bool,
    stores: BTreeMap<StoreId, Store<P>>,
    next_store: u32,
    ended: VecDeque<Box<Op<P>>>,
}

impl<P> Schedule<P> {
    /// Without devices.
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits,
            data: Lines::default(),
            slow: Lines::default(),
            waiting: 0,
            running: 0,
            running_slow: 0,
            next_slow: false,
            stores: BTreeMap::new(),
            next_store: 0,
            ended: VecDeque::new(),
        }
    }

    /// Operations that wait for their turn.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether no operation waits, is in flight, or has ended and was not taken.
    pub fn is_idle(&self) -> bool {
        self.waiting == 0 && self.running == 0 && self.ended.is_empty()
    }

    /// Adds a device. Its number is no other's.
    pub fn open(&mut self) -> StoreId {
        while self.stores.contains_key(&StoreId(self.next_store)) {
            self.next_store = self.next_store.wrapping_add(1);
        }
        let id = StoreId(self.next_store);
        self.next_store = self.next_store.wrapping_add(1);
        self.stores.insert(id, Store::default());
        id
    }

    /// Removes a device. False: there is no such device, or an operation of it has not ended.
    pub fn close(&mut self, id: StoreId) -> bool {
        let idle = self.stores.get(&id).is_some_and(|store| store.unanswered == 0);
        if idle {
            self.stores.remove(&id);
        }
        idle
    }

    /// Queues an operation. A flush covers the writes that had ended before, and may be answered with another that does. Without such
    /// a device it ends with ENXIO.
    pub fn submit(&mut self, mut op: Box<Op<P>>) {
        let Some(store) = self.stores.get_mut(&op.disk.store) else {
            op.result = Err(Errno::ENXIO);
            return self.ended.push_back(op);
        };
        store.unanswered += 1;
        if op.disk.op == BlockOp::Flush && core::mem::replace(&mut store.flushing, true) {
            return match store.written {
                true => store.waiting.push(op),
                false => store.joined.push(op),
            };
        }
        self.push(op);
    }

    fn push(&mut self, op: Box<Op<P>>) {
        self.waiting += 1;
        match is_slow(op.disk.op) {
            true => self.slow.push(op),
            false => self.data.push(op),
        }
    }

    /// Takes the next operation to start, if there is room for one. It ends with [`end`](Self::end).
    pub fn start(&mut self) -> Option<Box<Op<P>>> {
        if self.running >= self.limits.slots {
            return None;
        }
        let quantum = self.limits.quantum;
        let room = self.running_slow < self.limits.slow;
        let mut slow = || room.then(|| self.slow.pop(quantum)).flatten();
        let mut data = || self.data.pop(quantum);
        let op = match self.next_slow {
            true => slow().or_else(data),
            false => data().or_else(slow),
        }?;
        let is_slow = is_slow(op.disk.op);
        self.next_slow = !is_slow;
        self.waiting -= 1;
        self.running += 1;
        self.running_slow += u32::from(is_slow);
        Some(op)
    }

    /// Ends an operation that was started; `wrote`: it may have changed the device. Operations that came too late for a flush get the
    /// next one.
    pub fn end(&mut self, op: Box<Op<P>>, wrote: bool) {
        self.running = self.running.saturating_sub(1);
        self.running_slow = self.running_slow.saturating_sub(is_slow(op.disk.op).into());
        // A store stays as long as an operation of it has not ended.
        let Some(store) = self.stores.get_mut(&op.disk.store) else {
            return self.ended.push_back(op);
        };
        store.unanswered -= 1;
        if wrote {
            store.written = store.flushing;
        }
        if op.disk.op != BlockOp::Flush {
            return self.ended.push_back(op);
        }
        let result = op.result;
        let joined = core::mem::take(&mut store.joined);
        store.unanswered -= joined.len();
        self.ended.push_back(op);
        self.ended.extend(joined.into_iter().map(|mut op| {
            op.result = result;
            op
        }));
        let mut waiting = core::mem::take(&mut store.waiting).into_iter();
        let next = waiting.next();
        store.joined = waiting.collect();
        (store.flushing, store.written) = (next.is_some(), false);
        if let Some(next) = next {
            self.push(next);
        }
    }

    /// Takes an operation that has ended.
    pub fn poll(&mut self) -> Option<Box<Op<P>>> {
        self.ended.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use rtrs::server::request::RequestKey;

    use super::*;
    use crate::server::disk::DiskOp;

    const LIMITS: QueueLimits = QueueLimits {
        slots: 8,
        slow: 2,
        quantum: 64 << 10,
    };
    const A: SessionKey = SessionKey(1);
    const B: SessionKey = SessionKey(2);

    type Order = Schedule<()>;

    fn queue() -> (Order, StoreId) {
        let mut s = Order::new(LIMITS);
        let store = s.open();
        (s, store)
    }

    fn submit(s: &mut Order, session: SessionKey, chunk: u16, store: StoreId, (op, len): (BlockOp, u64)) {
        let id = RequestKey {
            session,
            chunk,
            serial: 0,
        };
        let op = DiskOp {
            store,
            op,
            offset: 0,
            len,
            data: 0,
        };
        s.submit(Box::new(Op::new(id, op, None)));
    }

    const READ: (BlockOp, u64) = (BlockOp::Read, 4096);
    const WRITE: (BlockOp, u64) = (BlockOp::Write { fua: false }, 4096);
    const FLUSH: (BlockOp, u64) = (BlockOp::Flush, 0);
    const DISCARD: (BlockOp, u64) = (BlockOp::Discard, 1 << 30);

    fn next(s: &mut Order) -> Op<()> {
        *s.start().expect("its turn")
    }

    fn started(s: &mut Order) -> Vec<Op<()>> {
        std::iter::from_fn(|| s.start()).map(|op| *op).collect()
    }

    fn end(s: &mut Order, mut op: Op<()>, wrote: bool, result: Result<(), Errno>) {
        op.result = result;
        s.end(Box::new(op), wrote);
    }

    fn ended(s: &mut Order) -> Vec<(u16, Result<(), Errno>)> {
        std::iter::from_fn(|| s.poll())
            .map(|op| (op.id.chunk, op.result))
            .collect()
    }

    #[test]
    fn one_sessions_flood_does_not_starve_another() {
        let (mut s, store) = queue();
        for i in 0..10_000 {
            submit(&mut s, A, i, store, (BlockOp::Read, 1 << 20));
        }
        submit(&mut s, B, 0, store, READ);
        let mut started = 0;
        loop {
            let op = next(&mut s);
            started += 1;
            if op.id.session == B {
                break;
            }
            end(&mut s, op, false, Ok(()));
        }
        assert!(started <= 2, "{started} operations of a came first");
    }

    #[test]
    fn bytes_are_shared_whatever_the_sizes() {
        let (mut s, store) = queue();
        for i in 0..10_000 {
            submit(&mut s, A, i, store, (BlockOp::Read, 128 << 10));
            submit(&mut s, B, i, store, READ);
        }
        let mut bytes = BTreeMap::new();
        for _ in 0..5000 {
            let op = next(&mut s);
            *bytes.entry(op.id.session).or_insert(0u64) += op.disk.len;
            end(&mut s, op, false, Ok(()));
        }
        let (large, small) = (bytes[&A], bytes[&B]);
        assert!(large.abs_diff(small) <= 256 << 10, "{large} and {small}");
    }

    #[test]
    fn slow_ones_leave_slots_for_data_and_all_is_bounded() {
        let (mut s, store) = queue();
        for i in 0..100 {
            submit(&mut s, A, i, store, DISCARD);
        }
        let mut slow = started(&mut s);
        assert_eq!(slow.len() as u32, LIMITS.slow);
        for i in 0..100 {
            submit(&mut s, B, i, store, READ);
        }
        let data = started(&mut s);
        assert!(data.iter().all(|op| op.disk.op == BlockOp::Read));
        assert_eq!((slow.len() + data.len()) as u32, LIMITS.slots);
        end(&mut s, slow.remove(0), true, Ok(()));
        // Both wait and both have room: each class has its turn.
        assert_eq!(next(&mut s).disk.op, BlockOp::Discard);
    }

    #[test]
    fn a_session_keeps_its_order() {
        let (mut s, store) = queue();
        for i in 0..5 {
            submit(&mut s, A, i, store, READ);
        }
        assert_eq!(s.waiting(), 5);
        let order: Vec<u16> = started(&mut s).iter().map(|op| op.id.chunk).collect();
        assert_eq!((&order[..], s.waiting()), (&[0, 1, 2, 3, 4][..], 0));
    }

    #[test]
    fn a_device_stays_as_long_as_an_operation_has_not_ended() {
        let (mut s, store) = queue();
        assert_ne!(store, s.open());
        submit(&mut s, A, 1, store, READ);
        assert!(!s.close(store));
        assert_eq!(s.waiting(), 1);
        let op = next(&mut s);
        assert_eq!((s.waiting(), s.close(store)), (0, false));
        end(&mut s, op, false, Err(Errno::EIO));
        assert_eq!(ended(&mut s), [(1, Err(Errno::EIO))]);
        assert!(s.close(store) && s.is_idle());
        assert!(!s.close(store), "it is closed");
        submit(&mut s, A, 2, store, READ);
        assert_eq!(ended(&mut s), [(2, Err(Errno::ENXIO))]);
    }

    #[test]
    fn a_flush_answers_only_what_it_covers() {
        let (mut s, store) = queue();
        submit(&mut s, A, 1, store, WRITE);
        submit(&mut s, A, 2, store, FLUSH);
        submit(&mut s, A, 3, store, FLUSH);
        let mut both = started(&mut s);
        both.sort_by_key(|op| op.id.chunk);
        let [write, flush] = <[_; 2]>::try_from(both).expect("nothing was written since the first began");
        end(&mut s, write, true, Ok(()));
        submit(&mut s, A, 4, store, FLUSH);
        submit(&mut s, A, 5, store, FLUSH);
        assert!(s.start().is_none());
        let failed = Err(Errno::EIO);
        end(&mut s, flush, false, failed);
        assert_eq!(ended(&mut s), [(1, Ok(())), (2, failed), (3, failed)]);
        let flush = next(&mut s);
        submit(&mut s, A, 6, store, FLUSH);
        assert!(s.start().is_none(), "begun after all that was written");
        end(&mut s, flush, false, Ok(()));
        assert_eq!(ended(&mut s), [4, 5, 6].map(|chunk| (chunk, Ok(()))));
        submit(&mut s, A, 7, store, FLUSH);
        let flush = next(&mut s);
        end(&mut s, flush, false, Ok(()));
        assert_eq!(ended(&mut s), [(7, Ok(()))]);
        assert!(s.close(store) && s.is_idle());
    }
}
