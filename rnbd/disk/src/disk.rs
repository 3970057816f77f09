//! The disks of a loop: what sessions ask of them, in a fair order, each operation its own way.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
};

use rnbd::{
    Errno,
    block::BlockOp,
    server::{
        disk::{Disks, Op, StoreId},
        fair_queue::{QueueLimits, Schedule},
    },
};
use rtrs::server::request::SessionKey;

use crate::{
    exports::OpenExport,
    file_system::FileSystem,
    image::{Image, Look},
    op::{Io, Part, Task},
    pool::Pool,
    probe::{Way, Ways},
    ring::Ring,
    sys,
};

/// Times that one [`Disk::pump`] starts what there is room for, when it is over at once.
const ROUNDS: usize = 4;

/// Settings of a [`Disk`].
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// How much is under way at a time. The ring has as many entries as there are slots.
    pub limits: QueueLimits,
    /// Threads where there is no io_uring.
    pub threads: usize,
    /// The ways of all stores, for measurements and tests; `None`: as each file needs it.
    pub ways: Option<Ways>,
    /// Opens the ring, when the first store needs it.
    pub ring: fn(entries: u32) -> io::Result<Ring>,
}

impl Default for DiskConfig {
    fn default() -> Self {
        Self {
            limits: QueueLimits::default(),
            threads: 4,
            ways: None,
            ring: Ring::open,
        }
    }
}

/// Budget for disks of a turn of the loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Budget {
    /// Bytes.
    pub bytes: u64,
    /// Operations.
    pub operations: u32,
}

impl Default for Budget {
    /// Creates the limits of a whole turn.
    fn default() -> Self {
        Self {
            bytes: 1 << 20,
            operations: 64,
        }
    }
}

impl Budget {
    /// Whether there is nothing left.
    pub fn is_spent(&self) -> bool {
        self.bytes == 0 || self.operations == 0
    }

    fn charge(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.operations = self.operations.saturating_sub(1);
    }
}

/// Counters of a [`Disk`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskCounters {
    /// System calls made in the loop, for files in memory.
    pub in_place: u64,
    /// Reads that found everything in the page cache.
    pub at_once: u64,
    /// Operations given to io_uring.
    pub ring: u64,
    /// System calls for them.
    pub ring_calls: u64,
    /// Transfers through registered memory.
    pub ring_fixed: u64,
    /// Operations given to threads.
    pub pool: u64,
    /// Flushes that were run; several requests may be answered with one.
    pub flushes: u64,
}

#[derive(Debug)]
struct Store {
    export: OpenExport,
    ways: Ways,
    /// The file's size as of a turn.
    look: (u64, Look),
    /// The device's, as was told.
    size: u64,
    /// Writes in flight past the page cache.
    writing: u32,
    /// One of them writes parts of blocks: it reads the blocks and writes them back, so it must be the only one.
    alone: bool,
    /// Writes that wait for one that must be alone, or are it, in their order.
    held: VecDeque<Io>,
}

impl Store {
    fn way(&self, op: BlockOp) -> Way {
        match op {
            BlockOp::Read => self.ways.read,
            BlockOp::Flush => self.ways.flush,
            BlockOp::BlockStatus { .. } => self.ways.status,
            BlockOp::Write { .. } | BlockOp::Discard | BlockOp::WriteZeroes { .. } => self.ways.write,
        }
    }

    /// Whether its size is not what was told: it is told now.
    fn is_resized(&mut self) -> bool {
        let image = self.export.image();
        let size = image.geometry().size;
        let before = core::mem::replace(&mut self.size, size);
        if before != size {
            tracing::info!(image = image.label(), before, bytes = size, "device has another size");
        }
        before != size
    }

    /// Starts a write, if it may.
    fn enter(&mut self, alone: bool) -> bool {
        if !self.export.image().is_direct() {
            return true;
        }
        let may = if alone { self.writing == 0 } else { !self.alone };
        if may {
            (self.writing, self.alone) = (self.writing + 1, alone);
        }
        may
    }

    /// Ends a write that has started.
    fn leave(&mut self) {
        (self.writing, self.alone) = (self.writing.saturating_sub(1), false);
    }
}

#[derive(Debug)]
enum RingState {
    /// Nothing has needed it.
    Unopened,
    Open(Box<Ring>),
    /// The system has none.
    Missing,
}

/// The open devices of one loop, and their operations. It is used in the thread that made it. Dropping it waits for operations in flight.
///
/// After [`submit`](Disks::submit), and when [`descriptor`](Self::descriptor) is readable, the loop calls
/// [`pump`](Self::pump), and again in its next turn as long as that returns true; then [`poll`](Disks::poll) returns operations that have
/// ended.
pub struct Disk {
    config: DiskConfig,
    // Dropping these waits for their operations.
    ring: RingState,
    pool: Option<Pool>,
    /// Watches both.
    epoll: OwnedFd,
    stores: BTreeMap<StoreId, Store>,
    schedule: Schedule<Part>,
    /// Operations whose next call is to be made.
    ready: VecDeque<Io>,
    /// Devices that were found to have another size than before.
    resized: Vec<StoreId>,
    /// Calls of [`pump`](Self::pump).
    turn: u64,
    /// Room for the next operations that the ring and the pool have ended.
    ended: Vec<Io>,
    counters: DiskCounters,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("stores", &self.stores.len())
            .field("waiting", &self.schedule.waiting())
            .field("ready", &self.ready.len())
            .finish_non_exhaustive()
    }
}

impl Disk {
    /// Without stores.
    ///
    /// # Errors
    /// When the system gives no descriptor.
    pub fn new(config: DiskConfig) -> io::Result<Self> {
        Ok(Self {
            ring: RingState::Unopened,
            pool: None,
            epoll: sys::epoll()?,
            stores: BTreeMap::new(),
            schedule: Schedule::new(config.limits),
            ready: VecDeque::new(),
            resized: Vec::new(),
            turn: 0,
            ended: Vec::new(),
            counters: DiskCounters::default(),
            config,
        })
    }

    /// Readable when an operation has ended that [`pump`](Self::pump) does not know of yet. It is the same all the time.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Whether an operation was submitted that [`poll`](Disks::poll) has not returned.
    pub fn is_busy(&self) -> bool {
        !self.schedule.is_idle()
    }

    /// Returns the counters.
    pub fn counters(&self) -> DiskCounters {
        match &self.ring {
            RingState::Open(ring) => DiskCounters {
                ring_calls: ring.calls(),
                ring_fixed: ring.fixed(),
                ..self.counters
            },
            RingState::Unopened | RingState::Missing => self.counters,
        }
    }

    /// Takes an open device. Its number is no other's.
    pub fn add(&mut self, export: OpenExport) -> StoreId {
        let traits = export.image().traits();
        let ways = self.config.ways.unwrap_or_else(|| Ways::of(traits));
        let ways = match ways.need_ring() && !self.has_ring() {
            true => ways.without_ring(),
            false => ways,
        };
        let store = Store {
            size: export.image().geometry().size,
            export,
            ways,
            look: (0, Look::default()),
            writing: 0,
            alone: false,
            held: VecDeque::new(),
        };
        tracing::debug!(image = store.export.image().label(), ?ways, "disk");
        let id = self.schedule.open();
        self.stores.insert(id, store);
        id
    }

    /// Opens the ring, if that was not tried before.
    fn has_ring(&mut self) -> bool {
        if matches!(self.ring, RingState::Unopened) {
            self.ring = match self.open_ring() {
                Ok(ring) => RingState::Open(Box::new(ring)),
                Err(e) => {
                    let threads = self.config.threads;
                    tracing::warn!("no io_uring ({e}): up to {threads} threads wait for the disks");
                    RingState::Missing
                }
            };
        }
        matches!(self.ring, RingState::Open(_))
    }

    fn open_ring(&self) -> io::Result<Ring> {
        let entries = self.config.limits.slots.clamp(1, 4096);
        let ring = (self.config.ring)(entries)?;
        sys::watch(&self.epoll, &ring.descriptor())?;
        Ok(ring)
    }

    /// The device itself.
    pub fn store(&self, id: StoreId) -> Option<&OpenExport> {
        self.stores.get(&id).map(|s| &s.export)
    }

    /// Whether any device is open.
    pub fn has_stores(&self) -> bool {
        !self.stores.is_empty()
    }

    /// The images of all open devices, for a thread that [looks at their sizes](Image::look_at_size).
    pub fn images(&self) -> impl Iterator<Item = (FileSystem, Weak<Image>)> {
        let image = |store: &Store| (store.export.file_system(), Arc::downgrade(store.export.share()));
        self.stores.values().map(image)
    }

    /// Notes the devices that have another size since it was last looked at. Makes no system call.
    pub fn note_sizes(&mut self) {
        for (id, store) in &mut self.stores {
            if store.is_resized() {
                self.resized.push(*id);
            }
        }
    }

    /// The ways of a device's operations.
    pub fn ways(&self, id: StoreId) -> Option<Ways> {
        self.stores.get(&id).map(|s| s.ways)
    }

    /// Gives a device back, to be closed where waiting for the disk does no harm. `None`: there is no such device, or
    /// an operation of it has not ended.
    pub fn take(&mut self, id: StoreId) -> Option<OpenExport> {
        if !self.schedule.close(id) {
            return None;
        }
        self.stores.remove(&id).map(|s| s.export)
    }

    /// Starts operations whose turn it is, and takes those that have ended. What is copied in the loop is taken from `budget`; when
    /// that is spent the rest waits. Returns whether there is more to do at once; else
    /// [`descriptor`](Self::descriptor) tells when.
    ///
    /// What a file's size is, is asked once in each call at most.
    pub fn pump(&mut self, budget: &mut Budget) -> bool {
        self.turn += 1;
        self.end();
        let mut stopped = true;
        for _ in 0..ROUNDS {
            self.begin(budget);
            if let RingState::Open(ring) = &mut self.ring {
                ring.submit();
            }
            let ended = self.end();
            if budget.is_spent() {
                break;
            }
            if ended == 0 {
                stopped = false;
                break;
            }
        }
        let behind = match &mut self.ring {
            RingState::Open(ring) => ring.is_behind(),
            RingState::Unopened | RingState::Missing => false,
        };
        behind || !self.ready.is_empty() || (stopped && self.schedule.waiting() > 0)
    }

    /// Starts operations and goes on with them, as far as there is room and the budget reaches.
    fn begin(&mut self, budget: &mut Budget) {
        while !budget.is_spent() {
            // One after the other, so that a long operation does not keep those that wait.
            let next = self.schedule.start();
            let launched = next.is_some();
            if let Some(op) = next {
                self.launch(op);
            }
            match self.ready.pop_front() {
                Some(op) => self.go_on(op, budget),
                None if launched => budget.charge(0),
                None => return,
            }
        }
    }

    /// Checks an operation whose turn it is: it is ready, or held.
    fn launch(&mut self, mut op: Io) {
        let Some(store) = self.stores.get_mut(&op.disk.store) else {
            return self.finish(op, Err(Errno::ENXIO));
        };
        if store.look.0 != self.turn {
            store.look = (self.turn, Look::default());
        }
        let task = Task::new(store.export.share(), &op.disk, op.memory.as_ref(), &mut store.look.1);
        if store.is_resized() {
            self.resized.push(op.disk.store);
        }
        let task = match task {
            Ok(Some(task)) => task,
            Ok(None) => return self.finish(op, Ok(())),
            Err(e) => return self.finish(op, Err(e)),
        };
        let writes = op.disk.op.writes();
        let entered = writes && store.held.is_empty() && store.enter(task.is_patch());
        op.part = Part {
            way: store.way(op.disk.op),
            entered,
            task: Some(task),
        };
        match writes && !entered {
            true => store.held.push_back(op),
            false => self.ready.push_back(op),
        }
    }

    /// Makes the next call of an operation, or passes it on.
    fn go_on(&mut self, mut op: Io, budget: &mut Budget) {
        let Some(task) = op.part.task.as_mut() else {
            return self.finish(op, Err(Errno::EIO));
        };
        let cost = match op.part.way {
            // Another thread copies.
            Way::Pool => 0,
            Way::Ring if task.image.is_direct() => 0,
            Way::InPlace | Way::TryNow | Way::Ring => task.call().cost(),
        };
        budget.charge(cost);
        match op.part.way {
            Way::InPlace => {
                self.counters.in_place += 1;
                match task.advance() {
                    Some(result) => self.finish(op, result),
                    // A long one takes several turns.
                    None => self.ready.push_back(op),
                }
            }
            Way::TryNow => match task.read_now() {
                Some(result) => {
                    self.counters.at_once += 1;
                    self.finish(op, result);
                }
                None => self.pass_on(op),
            },
            Way::Ring | Way::Pool => self.pass_on(op),
        }
    }

    /// Gives an operation to the ring, or to a thread.
    fn pass_on(&mut self, op: Io) {
        let call = op.part.task.as_ref().map(Task::call);
        if let RingState::Open(ring) = &mut self.ring
            && op.part.way != Way::Pool
            && call.is_some_and(|call| Ring::has(&call))
        {
            self.counters.ring += 1;
            return ring.start(op);
        }
        self.counters.pool += 1;
        match self.pool() {
            Ok(pool) => {
                if let Err(op) = pool.start(op) {
                    let result = op.result;
                    self.finish(op, result);
                }
            }
            Err(e) => self.finish(op, Err(e)),
        }
    }

    /// The threads, of which there is one for what the ring lacks.
    fn pool(&mut self) -> Result<&mut Pool, Errno> {
        if self.pool.is_none() {
            let threads = match self.ring {
                RingState::Open(_) => 1,
                RingState::Unopened | RingState::Missing => self.config.threads,
            };
            let pool = Pool::new(threads)?;
            sys::watch(&self.epoll, pool.eventfd())?;
            self.pool = Some(pool);
        }
        self.pool.as_mut().ok_or(Errno::ENOMEM)
    }

    /// Takes what the ring and the pool have ended; returns how much.
    fn end(&mut self) -> usize {
        let mut ended = std::mem::take(&mut self.ended);
        if let RingState::Open(ring) = &mut self.ring {
            ring.take(&mut ended);
        }
        if let Some(pool) = &self.pool {
            pool.take(&mut ended);
        }
        let count = ended.len();
        for op in ended.drain(..) {
            let result = op.result;
            self.finish(op, result);
        }
        self.ended = ended;
        count
    }

    /// An operation has ended: operations that wait for it go on.
    fn finish(&mut self, mut op: Io, result: Result<(), Errno>) {
        let entered = op.part.entered;
        if entered {
            self.leave(op.disk.store);
        }
        self.counters.flushes += u64::from(op.disk.op == BlockOp::Flush);
        // Releases the file.
        op.part = Part::default();
        op.result = result;
        self.schedule.end(op, entered);
    }

    /// A write of a store is over; those that it kept waiting are ready.
    fn leave(&mut self, store: StoreId) {
        let Some(store) = self.stores.get_mut(&store) else {
            return;
        };
        store.leave();
        while let Some(mut next) = store.held.pop_front() {
            if !store.enter(next.part.task.as_ref().is_some_and(Task::is_patch)) {
                return store.held.push_front(next);
            }
            next.part.entered = true;
            self.ready.push_back(next);
        }
    }
}

/// An operation ends with EINVAL when the data is outside the memory; ENXIO without such a store; EIO beyond the end of the
/// device or of a file that was truncated meanwhile, and for ever, as far as flushes and FUA are concerned, after a
/// sync has failed; EROFS; EOPNOTSUPP for discards that the device can't do; ENOSPC when the disk below a sparse image is
/// full; any other error of the system. Part of the bytes of a write that failed may have been written.
impl Disks for Disk {
    type Part = Part;

    fn submit(&mut self, op: Box<Op<Part>>) {
        self.schedule.submit(op);
    }

    fn poll(&mut self) -> Option<Box<Op<Part>>> {
        self.schedule.poll()
    }

    /// Found by operations beyond the old end, and by [`note_sizes`](Self::note_sizes).
    fn poll_resized(&mut self) -> Option<(StoreId, u64)> {
        while let Some(id) = self.resized.pop() {
            if let Some(store) = self.stores.get(&id) {
                return Some((id, store.size));
            }
        }
        None
    }

    fn forget(&mut self, session: SessionKey) {
        if let RingState::Open(ring) = &mut self.ring {
            ring.forget(session);
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Their operations end first.
        self.ring = RingState::Missing;
        self.pool = None;
    }
}
