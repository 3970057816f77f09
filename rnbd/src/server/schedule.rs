//! Schedule of the disks, without the I/O: order of operations, and which of them a flush answers.

use std::collections::{BTreeMap, VecDeque};

use rtrs::server::request::SessionKey;

use crate::{
    block::BlockOp,
    errno::Errno,
    server::{
        disk::{Op, StoreId},
        queue::{Class, FairQueue, Flushes, QueueLimits},
    },
};

/// An open device.
#[derive(Debug)]
struct Store<P> {
    flushes: Flushes<Box<Op<P>>>,
    /// Operations that have not ended.
    unanswered: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Schedule<P> {
    queue: FairQueue<SessionKey, Box<Op<P>>>,
    stores: BTreeMap<StoreId, Store<P>>,
    next_store: u32,
    ended: VecDeque<Box<Op<P>>>,
}

fn class(op: BlockOp) -> Class {
    match op {
        BlockOp::Read | BlockOp::Write { .. } => Class::Data,
        BlockOp::Flush | BlockOp::Discard | BlockOp::WriteZeroes { .. } | BlockOp::BlockStatus { .. } => Class::Slow,
    }
}

impl<P> Schedule<P> {
    /// Without devices.
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            queue: FairQueue::new(limits),
            stores: BTreeMap::new(),
            next_store: 0,
            ended: VecDeque::new(),
        }
    }

    /// Operations that wait for their turn.
    pub fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    /// Whether no operation waits, is in flight, or has ended and was not taken.
    pub fn is_idle(&self) -> bool {
        self.queue.waiting() == 0 && self.queue.running() == 0 && self.ended.is_empty()
    }

    /// Adds a device. Its number is no other's.
    pub fn open(&mut self) -> StoreId {
        while self.stores.contains_key(&StoreId(self.next_store)) {
            self.next_store = self.next_store.wrapping_add(1);
        }
        let id = StoreId(self.next_store);
        self.next_store = self.next_store.wrapping_add(1);
        let store = Store {
            flushes: Flushes::default(),
            unanswered: 0,
        };
        self.stores.insert(id, store);
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
        let starts = match op.disk.op {
            BlockOp::Flush => store.flushes.request(op),
            _ => Some(op),
        };
        if let Some(op) = starts {
            self.wait(op);
        }
    }

    fn wait(&mut self, op: Box<Op<P>>) {
        self.queue.push(op.id.session, class(op.disk.op), op.disk.len, op);
    }

    /// Takes the next operation to start, if there is room for one. It ends with [`end`](Self::end).
    pub fn start(&mut self) -> Option<Box<Op<P>>> {
        self.queue.pop().map(|(_, _, op)| op)
    }

    /// Ends an operation that was started; `wrote`: it may have changed the device. Operations that came too late for a flush get the
    /// next one.
    pub fn end(&mut self, op: Box<Op<P>>, wrote: bool) {
        self.queue.done(class(op.disk.op));
        // A store stays as long as an operation of it has not ended.
        let Some(store) = self.stores.get_mut(&op.disk.store) else {
            return self.ended.push_back(op);
        };
        store.unanswered -= 1;
        if wrote {
            store.flushes.wrote();
        }
        if op.disk.op != BlockOp::Flush {
            return self.ended.push_back(op);
        }
        let (result, (joined, next)) = (op.result, store.flushes.done());
        store.unanswered -= joined.len();
        self.ended.push_back(op);
        self.ended.extend(joined.into_iter().map(|mut op| {
            op.result = result;
            op
        }));
        if let Some(next) = next {
            self.wait(next);
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

    const A: SessionKey = SessionKey(1);

    fn ask(s: &mut Schedule<()>, chunk: u16, store: StoreId, op: BlockOp) {
        let id = RequestKey {
            session: A,
            chunk,
            serial: 0,
        };
        let op = DiskOp {
            store,
            op,
            offset: 0,
            len: 4096,
            data: 0,
        };
        s.submit(Box::new(Op::new(id, op, None)));
    }

    fn next(s: &mut Schedule<()>) -> Box<Op<()>> {
        s.start().expect("its turn")
    }

    fn end(s: &mut Schedule<()>, mut op: Box<Op<()>>, wrote: bool, result: Result<(), Errno>) {
        op.result = result;
        s.end(op, wrote);
    }

    fn ended(s: &mut Schedule<()>) -> Vec<(u16, Result<(), Errno>)> {
        std::iter::from_fn(|| s.poll())
            .map(|op| (op.id.chunk, op.result))
            .collect()
    }

    #[test]
    fn a_device_stays_as_long_as_an_operation_has_not_ended() {
        let mut s = Schedule::new(QueueLimits::default());
        let (store, other) = (s.open(), s.open());
        assert_ne!(store, other);
        ask(&mut s, 1, store, BlockOp::Read);
        assert!(!s.close(store));
        assert_eq!(s.waiting(), 1);
        let op = next(&mut s);
        assert_eq!((s.waiting(), s.close(store)), (0, false));
        end(&mut s, op, false, Err(Errno::EIO));
        assert_eq!(ended(&mut s), [(1, Err(Errno::EIO))]);
        assert!(s.close(store) && s.is_idle());
        assert!(!s.close(store), "it is closed");
        ask(&mut s, 2, store, BlockOp::Read);
        assert_eq!(ended(&mut s), [(2, Err(Errno::ENXIO))]);
    }

    #[test]
    fn a_flush_after_a_write_is_another_flush() {
        let mut s = Schedule::new(QueueLimits::default());
        let store = s.open();
        ask(&mut s, 1, store, BlockOp::Write { fua: false });
        ask(&mut s, 2, store, BlockOp::Flush);
        ask(&mut s, 3, store, BlockOp::Flush);
        let (one, two) = (next(&mut s), next(&mut s));
        let (write, flush) = if one.disk.op == BlockOp::Flush {
            (two, one)
        } else {
            (one, two)
        };
        end(&mut s, write, true, Ok(()));
        ask(&mut s, 4, store, BlockOp::Flush);
        end(&mut s, flush, false, Err(Errno::EIO));
        let failed = Err(Errno::EIO);
        assert_eq!(ended(&mut s), [(1, Ok(())), (2, failed), (3, failed)]);
        let flush = next(&mut s);
        end(&mut s, flush, false, Ok(()));
        assert_eq!(ended(&mut s), [(4, Ok(()))]);
        assert!(s.close(store) && s.is_idle());
    }
}
