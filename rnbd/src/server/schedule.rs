//! Schedule of the disks, without the I/O: order of operations, flushes, and who is notified of their end.

use std::collections::BTreeMap;

use rtrs::server::request::SessionKey;

use crate::{
    block::BlockOp,
    errno::Errno,
    server::{
        disk::{DiskOp, IoTicket, StoreId},
        queue::{Class, FairQueue, Flushes, QueueLimits},
    },
};

/// An operation that is over, and how it ended.
pub type Ended = (IoTicket, Result<(), Errno>);

/// Whom an operation is for.
#[derive(Clone, Copy, Debug)]
enum Who {
    Ticket(IoTicket),
    /// Operations that the store's flush is for.
    Flush,
}

/// An operation that waits for its turn.
#[derive(Debug)]
struct Waiting<M> {
    who: Who,
    op: DiskOp,
    /// Memory of operations with data in it.
    memory: Option<M>,
}

/// An operation that has its turn. It ends with [`Schedule::done`].
#[derive(Debug)]
pub struct Begun<M> {
    /// Names it.
    pub under_way: UnderWay,
    /// Operation.
    pub op: DiskOp,
    /// The memory of the data, if there is any.
    pub memory: Option<M>,
}

/// Names an operation that was started, until it is over.
#[derive(Debug)]
#[must_use = "an operation that does not end keeps its place"]
pub struct UnderWay {
    who: Who,
    session: SessionKey,
    store: StoreId,
    class: Class,
}

impl UnderWay {
    /// The session that it is started for.
    pub fn session(&self) -> SessionKey {
        self.session
    }

    /// The device that it works on.
    pub fn store(&self) -> StoreId {
        self.store
    }

    /// Whether it is a flush.
    pub fn is_flush(&self) -> bool {
        matches!(self.who, Who::Flush)
    }
}

/// An open device.
#[derive(Debug, Default)]
struct Store {
    flushes: Flushes<IoTicket>,
    /// Requests that are not answered.
    unanswered: usize,
}

/// See the module. `M` is the handle of a session's memory.
#[derive(Debug)]
pub struct Schedule<M> {
    queue: FairQueue<SessionKey, Waiting<M>>,
    /// Operations in the queue.
    waiting: usize,
    stores: BTreeMap<StoreId, Store>,
    next_store: u32,
}

impl<M: Clone> Schedule<M> {
    /// Without devices.
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            queue: FairQueue::new(limits),
            waiting: 0,
            stores: BTreeMap::new(),
            next_store: 0,
        }
    }

    /// Operations that have not had their turn.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// A device is open. Its number is no other's.
    pub fn open(&mut self) -> StoreId {
        while self.stores.contains_key(&StoreId(self.next_store)) {
            self.next_store = self.next_store.wrapping_add(1);
        }
        let id = StoreId(self.next_store);
        self.next_store = self.next_store.wrapping_add(1);
        self.stores.insert(id, Store::default());
        id
    }

    /// Forgets a device. False: there is no such device, or something that was asked of it is not over.
    pub fn close(&mut self, id: StoreId) -> bool {
        let idle = self.stores.get(&id).is_some_and(|store| store.unanswered == 0);
        if idle {
            self.stores.remove(&id);
        }
        idle
    }

    /// Asks for an operation. A flush covers the writes that were over before, and may be answered with another that does.
    ///
    /// # Errors
    /// ENXIO when the device is not open.
    pub fn start(&mut self, session: SessionKey, ticket: IoTicket, op: DiskOp, memory: &M) -> Result<(), Errno> {
        let store = self.stores.get_mut(&op.store).ok_or(Errno::ENXIO)?;
        store.unanswered += 1;
        let (who, begins) = match op.op {
            BlockOp::Flush => (Who::Flush, store.flushes.request(ticket)),
            _ => (Who::Ticket(ticket), true),
        };
        if begins {
            let memory = op.data_len().map(|_| memory.clone());
            self.wait(session, Waiting { who, op, memory });
        }
        Ok(())
    }

    fn wait(&mut self, session: SessionKey, waiting: Waiting<M>) {
        let class = match waiting.op.op {
            BlockOp::Read | BlockOp::Write { .. } => Class::Data,
            BlockOp::Flush | BlockOp::Discard | BlockOp::WriteZeroes { .. } | BlockOp::BlockStatus { .. } => {
                Class::Slow
            }
        };
        self.queue.push(session, class, waiting.op.len, waiting);
        self.waiting += 1;
    }

    /// A session is gone: what it waits with ends with ECONNABORTED, in `ended`. A flush that others wait for, too, is run, and
    /// what is under way ends in its own time.
    pub fn forget(&mut self, session: SessionKey, ended: &mut Vec<Ended>) {
        let dropped = self.queue.forget(session);
        self.waiting -= dropped.len();
        for waiting in dropped {
            match waiting.who {
                Who::Flush => self.wait(session, waiting),
                Who::Ticket(ticket) => {
                    if let Some(store) = self.stores.get_mut(&waiting.op.store) {
                        store.unanswered -= 1;
                    }
                    ended.push((ticket, Err(Errno::ECONNABORTED)));
                }
            }
        }
    }

    /// The next operation to start, if there is room for one.
    pub fn begin(&mut self) -> Option<Begun<M>> {
        let (session, class, waiting) = self.queue.pop()?;
        self.waiting -= 1;
        let Waiting { who, op, memory } = waiting;
        let store = op.store;
        Some(Begun {
            under_way: UnderWay {
                who,
                session,
                store,
                class,
            },
            op,
            memory,
        })
    }

    /// An operation is over; `wrote`: the device may be another than before. All for whom it was are in `ended`; who came too late
    /// for a flush gets the next one.
    pub fn done(&mut self, over: UnderWay, wrote: bool, result: Result<(), Errno>, ended: &mut Vec<Ended>) {
        self.queue.done(over.class);
        // A store stays as long as something of it is not answered.
        let mut store = self.stores.get_mut(&over.store);
        if let Some(store) = store.as_mut().filter(|_| wrote) {
            store.flushes.wrote();
        }
        match (over.who, store) {
            (Who::Ticket(ticket), store) => {
                if let Some(store) = store {
                    store.unanswered -= 1;
                }
                ended.push((ticket, result));
            }
            (Who::Flush, Some(store)) => {
                let (answered, again) = store.flushes.done();
                store.unanswered -= answered.len();
                ended.extend(answered.into_iter().map(|ticket| (ticket, result)));
                if again {
                    self.flush_again(&over);
                }
            }
            (Who::Flush, None) => {}
        }
    }

    /// The flush of those who came too late for the one that has ended.
    fn flush_again(&mut self, over: &UnderWay) {
        let op = DiskOp {
            store: over.store,
            op: BlockOp::Flush,
            offset: 0,
            len: 0,
            data: 0,
        };
        let (who, memory) = (Who::Flush, None);
        self.wait(over.session, Waiting { who, op, memory });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SessionKey = SessionKey(1);
    const B: SessionKey = SessionKey(2);

    fn ask(s: &mut Schedule<char>, session: SessionKey, ticket: u64, store: StoreId, op: BlockOp) {
        let op = DiskOp {
            store,
            op,
            offset: 0,
            len: 4096,
            data: 0,
        };
        s.start(session, IoTicket(ticket), op, &'m').unwrap();
    }

    fn begin(s: &mut Schedule<char>) -> UnderWay {
        s.begin().expect("its turn").under_way
    }

    fn end(s: &mut Schedule<char>, over: UnderWay, wrote: bool, result: Result<(), Errno>) -> Vec<Ended> {
        let mut ended = Vec::new();
        s.done(over, wrote, result, &mut ended);
        ended
    }

    #[test]
    fn memory_goes_along_with_data_only() {
        let mut s = Schedule::new(QueueLimits::default());
        let store = s.open();
        for (op, memory) in [
            (BlockOp::Read, Some('m')),
            (BlockOp::Write { fua: false }, Some('m')),
            (BlockOp::BlockStatus { most: 1 }, Some('m')),
            (BlockOp::Flush, None),
            (BlockOp::Discard, None),
        ] {
            ask(&mut s, A, 0, store, op);
            let begun = s.begin().unwrap();
            assert_eq!((begun.op.op, begun.memory), (op, memory));
            assert_eq!(end(&mut s, begun.under_way, op.writes(), Ok(())).len(), 1);
        }
    }

    #[test]
    fn a_device_stays_as_long_as_something_is_not_answered() {
        let mut s = Schedule::new(QueueLimits::default());
        let (store, other) = (s.open(), s.open());
        assert_ne!(store, other);
        ask(&mut s, A, 1, store, BlockOp::Read);
        assert!(!s.close(store));
        assert_eq!(s.waiting(), 1);
        let over = begin(&mut s);
        assert_eq!((s.waiting(), s.close(store)), (0, false));
        assert_eq!(
            end(&mut s, over, false, Err(Errno::EIO)),
            [(IoTicket(1), Err(Errno::EIO))]
        );
        assert!(s.close(store));
        assert!(!s.close(store), "it is closed");
        let op = DiskOp {
            store,
            op: BlockOp::Read,
            offset: 0,
            len: 512,
            data: 0,
        };
        assert_eq!(s.start(A, IoTicket(2), op, &'m'), Err(Errno::ENXIO));
    }

    #[test]
    fn who_comes_after_a_write_gets_the_next_flush() {
        let mut s = Schedule::new(QueueLimits::default());
        let store = s.open();
        ask(&mut s, A, 1, store, BlockOp::Write { fua: false });
        ask(&mut s, A, 2, store, BlockOp::Flush);
        ask(&mut s, B, 3, store, BlockOp::Flush);
        let (write, flush) = (begin(&mut s), begin(&mut s));
        assert!(s.begin().is_none() && flush.is_flush());
        assert_eq!(end(&mut s, write, true, Ok(())), [(IoTicket(1), Ok(()))]);
        ask(&mut s, B, 4, store, BlockOp::Flush);
        assert!(s.begin().is_none(), "one at a time");
        let failed = Err(Errno::EIO);
        assert_eq!(
            end(&mut s, flush, false, failed),
            [(IoTicket(2), failed), (IoTicket(3), failed)]
        );
        let again = begin(&mut s);
        assert!(again.is_flush() && !s.close(store));
        assert_eq!(end(&mut s, again, false, Ok(())), [(IoTicket(4), Ok(()))]);
        assert!(s.close(store));
    }

    #[test]
    fn a_session_that_is_gone_keeps_nobody_waiting() {
        let mut s = Schedule::new(QueueLimits::default());
        let store = s.open();
        ask(&mut s, A, 1, store, BlockOp::Read);
        ask(&mut s, A, 2, store, BlockOp::Flush);
        ask(&mut s, B, 3, store, BlockOp::Flush);
        let mut ended = Vec::new();
        s.forget(A, &mut ended);
        assert_eq!(ended, [(IoTicket(1), Err(Errno::ECONNABORTED))]);
        let flush = begin(&mut s);
        assert_eq!(
            end(&mut s, flush, false, Ok(())),
            [(IoTicket(2), Ok(())), (IoTicket(3), Ok(()))]
        );
        assert!(s.waiting() == 0 && s.close(store));
    }
}
