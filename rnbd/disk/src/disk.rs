//! The disks of a loop: what sessions ask of them, in a fair order, each operation its own way.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
};

use rnbd::{
    Errno,
    block::BlockOp,
    server::{
        disk::{DiskOp, IoTicket, StoreId},
        queue::QueueLimits,
        schedule::{Begun, Ended, Schedule, UnderWay},
    },
};
use roce_mem::Pages;
use rtrs::server::request::SessionKey;
use slab::Slab;

use crate::{
    exports::OpenExport,
    file_system::FileSystem,
    image::{Image, Look},
    job::{Job, Outcome},
    pool::Pool,
    probe::{Way, Ways},
    ring::Ring,
    sys,
    task::Task,
    writing::Bell,
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

/// An operation that has had its turn.
#[derive(Debug)]
struct Flight {
    under_way: UnderWay,
    way: Way,
    /// It is among the store's writes that are under way.
    entered: bool,
    /// It writes parts of blocks, and so is to be the only write.
    alone: bool,
    /// When neither the ring nor the pool has it.
    job: Option<Job>,
}

#[derive(Debug)]
struct Store {
    export: OpenExport,
    ways: Ways,
    /// The file's size as of a turn.
    look: (u64, Look),
    /// The device's, as was told.
    size: u64,
    /// Writes that wait for one that is to be alone, or are it, in their order.
    held: VecDeque<usize>,
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

    /// Lets a write begin, if it may; else `bell` is rung when another loop's write is over that it perhaps waits for.
    fn enter(&self, alone: bool, bell: &Arc<Bell>) -> bool {
        let image = self.export.image();
        let bell = image.shared.load(Relaxed).then_some(bell);
        !image.is_direct() || image.writing.enter(alone, bell)
    }

    /// A write that has begun is over.
    fn leave(&self) {
        let image = self.export.image();
        if image.is_direct() {
            image.writing.leave();
        }
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

/// The open devices of one loop, and what is under way on them. It is used in the thread that made it. Dropping it waits
/// for what is under way.
///
/// After [`start`](Self::start), and when [`descriptor`](Self::descriptor) is readable, the loop calls
/// [`pump`](Self::pump), and again in its next turn as long as that returns true.
pub struct Disk {
    config: DiskConfig,
    // The operations that these two have are waited for.
    ring: RingState,
    pool: Option<Pool>,
    /// Rung when a write is over that held ones may have waited for.
    bell: Arc<Bell>,
    /// Watches all three.
    epoll: OwnedFd,
    stores: BTreeMap<StoreId, Store>,
    schedule: Schedule<Arc<Pages>>,
    flights: Slab<Flight>,
    /// Flights whose next call is to be made.
    ready: VecDeque<usize>,
    /// Over before they had their turn.
    over: Vec<Ended>,
    /// Devices that were found to have another size than before.
    resized: Vec<StoreId>,
    /// Calls of [`pump`](Self::pump).
    turn: u64,
    outcomes: Vec<Outcome>,
    counters: DiskCounters,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("stores", &self.stores.len())
            .field("waiting", &self.schedule.waiting())
            .field("flights", &self.flights.len())
            .finish_non_exhaustive()
    }
}

impl Disk {
    /// Without stores.
    ///
    /// # Errors
    /// When the system gives no descriptor.
    pub fn new(config: DiskConfig) -> io::Result<Self> {
        let (epoll, bell) = (sys::epoll()?, Bell::new()?);
        sys::watch(&epoll, &*bell)?;
        Ok(Self {
            ring: RingState::Unopened,
            pool: None,
            bell,
            epoll,
            stores: BTreeMap::new(),
            schedule: Schedule::new(config.limits),
            flights: Slab::new(),
            ready: VecDeque::new(),
            over: Vec::new(),
            resized: Vec::new(),
            turn: 0,
            outcomes: Vec::new(),
            counters: DiskCounters::default(),
            config,
        })
    }

    /// Readable when something is over that [`pump`](Self::pump) does not know of yet. It is the same all the time.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Whether anything was asked for that is not over.
    pub fn is_busy(&self) -> bool {
        self.schedule.waiting() > 0 || !self.flights.is_empty() || !self.over.is_empty()
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

    /// A device that has another size than was known, and its size in bytes. It is found by operations beyond the old end, and by
    /// [`note_sizes`](Self::note_sizes).
    pub fn poll_resized(&mut self) -> Option<(StoreId, u64)> {
        while let Some(id) = self.resized.pop() {
            if let Some(store) = self.stores.get(&id) {
                return Some((id, store.size));
            }
        }
        None
    }

    /// The ways of a device's operations.
    pub fn ways(&self, id: StoreId) -> Option<Ways> {
        self.stores.get(&id).map(|s| s.ways)
    }

    /// Gives a device back, to be closed where waiting for the disk does no harm. `None`: there is no such device, or
    /// something that was asked of it is not over.
    pub fn take(&mut self, id: StoreId) -> Option<OpenExport> {
        if !self.schedule.close(id) {
            return None;
        }
        self.stores.remove(&id).map(|s| s.export)
    }

    /// Asks for an operation, which [`pump`](Self::pump) starts and ends. The data of reads and writes lies in `memory`, the
    /// session's, which is kept until the operation is over. A flush covers the writes that were over before.
    ///
    /// How it may end: EINVAL when the data is outside the memory; ENXIO without such a store; EIO beyond the end of the
    /// device or of a file that was truncated meanwhile, and for ever, as far as flushes and FUA are concerned, after a
    /// sync has failed; EROFS; EOPNOTSUPP for discards that the device can't do; ENOSPC when the disk below a sparse image is
    /// full; what else the system says. Part of the bytes of a write that failed may have been written.
    pub fn start(&mut self, session: SessionKey, ticket: IoTicket, op: DiskOp, memory: &Arc<Pages>) {
        if let Err(e) = self.schedule.start(session, ticket, op, memory) {
            self.over.push((ticket, Err(e)));
        }
    }

    /// A session is gone: what it waits with ends with ECONNABORTED, what is under way in its own time, and its memory is
    /// let go of after that. A flush that others wait for, too, is run.
    pub fn forget(&mut self, session: SessionKey) {
        self.schedule.forget(session, &mut self.over);
        if let RingState::Open(ring) = &mut self.ring {
            ring.forget(session);
        }
    }

    /// Starts what has its turn, and appends what is over to `done`. What is copied in the loop is taken from `budget`; when
    /// that is spent the rest waits. Returns whether there is more to do at once; else
    /// [`descriptor`](Self::descriptor) tells when.
    ///
    /// What a file's size is, is asked once in each call at most.
    pub fn pump(&mut self, budget: &mut Budget, done: &mut Vec<Ended>) -> bool {
        self.turn += 1;
        done.append(&mut self.over);
        self.ask_again();
        self.end(done);
        let mut stopped = true;
        for _ in 0..ROUNDS {
            self.begin(budget, done);
            if let RingState::Open(ring) = &mut self.ring {
                ring.submit();
            }
            let ended = self.end(done);
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

    /// Writes that are held begin, if another loop's that they waited for is over.
    fn ask_again(&mut self) {
        if self.bell.silence() {
            let held = self.stores.iter().filter(|(_, store)| !store.held.is_empty());
            let held: Vec<StoreId> = held.map(|(id, _)| *id).collect();
            held.into_iter().for_each(|store| self.let_in(store));
        }
    }

    /// Starts operations and goes on with them, as far as there is room and the budget reaches.
    fn begin(&mut self, budget: &mut Budget, done: &mut Vec<Ended>) {
        while !budget.is_spent() {
            // One after the other, so that a long operation does not keep those that wait.
            let next = self.schedule.begin();
            let launched = next.is_some();
            if let Some(begun) = next {
                self.launch(begun, done);
            }
            match self.ready.pop_front() {
                Some(key) => self.go_on(key, budget, done),
                None if launched => budget.charge(0),
                None => return,
            }
        }
    }

    /// An operation has its turn: it is checked, and ready to begin, or held.
    fn launch(&mut self, begun: Begun<Arc<Pages>>, done: &mut Vec<Ended>) {
        let Begun { under_way, op, memory } = begun;
        let session = under_way.session();
        let mut flight = Flight {
            under_way,
            way: Way::Pool,
            entered: false,
            alone: false,
            job: None,
        };
        let Some(store) = self.stores.get_mut(&op.store) else {
            return self.finish(flight, Err(Errno::ENXIO), done);
        };
        if store.look.0 != self.turn {
            store.look = (self.turn, Look::default());
        }
        let image = store.export.share().clone();
        let task = Task::new(&image, &op, memory.as_ref(), &mut store.look.1);
        if store.is_resized() {
            self.resized.push(op.store);
        }
        let task = match task {
            Ok(Some(task)) => task,
            Ok(None) => return self.finish(flight, Ok(()), done),
            Err(e) => return self.finish(flight, Err(e), done),
        };
        flight.way = store.way(op.op);
        flight.alone = task.is_patch();
        let writes = task.writes();
        let entry = self.flights.vacant_entry();
        let key = entry.key();
        flight.job = Some(Job {
            key,
            session,
            image,
            task,
        });
        flight.entered = writes && store.held.is_empty() && store.enter(flight.alone, &self.bell);
        if writes && !flight.entered {
            store.held.push_back(key);
        } else {
            self.ready.push_back(key);
        }
        entry.insert(flight);
    }

    /// Makes the next call of an operation, or lets somebody else make it.
    fn go_on(&mut self, key: usize, budget: &mut Budget, done: &mut Vec<Ended>) {
        let Some(flight) = self.flights.get_mut(key) else {
            return;
        };
        let Some(mut job) = flight.job.take() else { return };
        let cost = match flight.way {
            // Somebody else copies.
            Way::Pool => 0,
            Way::Ring if job.image.is_direct() => 0,
            Way::InPlace | Way::TryNow | Way::Ring => job.task.call().cost(),
        };
        let over = match flight.way {
            Way::InPlace => {
                self.counters.in_place += 1;
                let result = job.task.make_call(&job.image);
                let over = job.task.returned(&job.image, result);
                if over.is_none() {
                    // A long one takes several turns.
                    flight.job = Some(job);
                    self.ready.push_back(key);
                    return budget.charge(cost);
                }
                over
            }
            Way::TryNow => {
                let over = job.task.read_now(&job.image);
                self.counters.at_once += u64::from(over.is_some());
                over.or_else(|| self.pass_on(job))
            }
            Way::Ring | Way::Pool => self.pass_on(job),
        };
        budget.charge(cost);
        if let Some(result) = over {
            self.ended(key, result, done);
        }
    }

    /// Gives a job to the ring, or to a thread. `Some`: it could not be started.
    fn pass_on(&mut self, job: Job) -> Option<Result<(), Errno>> {
        let by_ring = self.flights.get(job.key).is_some_and(|f| f.way != Way::Pool);
        if let RingState::Open(ring) = &mut self.ring
            && by_ring
            && Ring::has(&job.task.call())
        {
            self.counters.ring += 1;
            ring.start(job);
            return None;
        }
        self.counters.pool += 1;
        self.pool().and_then(|pool| pool.start(job)).err().map(Err)
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

    /// Takes what the ring and the pool have done; returns how much.
    fn end(&mut self, done: &mut Vec<Ended>) -> usize {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        if let RingState::Open(ring) = &mut self.ring {
            ring.take(&mut outcomes);
        }
        if let Some(pool) = &self.pool {
            pool.take(&mut outcomes);
        }
        let count = outcomes.len();
        for Outcome { key, result } in outcomes.drain(..) {
            self.ended(key, result, done);
        }
        self.outcomes = outcomes;
        count
    }

    fn ended(&mut self, key: usize, result: Result<(), Errno>, done: &mut Vec<Ended>) {
        if let Some(flight) = self.flights.try_remove(key) {
            self.finish(flight, result, done);
        }
    }

    /// An operation is over: who asked for it is told, and who waits for it goes on.
    fn finish(&mut self, flight: Flight, result: Result<(), Errno>, done: &mut Vec<Ended>) {
        let Flight { under_way, entered, .. } = flight;
        if entered {
            self.leave(under_way.store());
        }
        self.counters.flushes += u64::from(under_way.is_flush());
        self.schedule.done(under_way, entered, result, done);
    }

    /// A write of a store is over; those that it kept waiting are ready.
    fn leave(&mut self, store: StoreId) {
        if let Some(store) = self.stores.get(&store) {
            store.leave();
        }
        self.let_in(store);
    }

    /// Writes that were held begin, as far as they may.
    fn let_in(&mut self, store: StoreId) {
        let Some(store) = self.stores.get_mut(&store) else {
            return;
        };
        while let Some(&key) = store.held.front() {
            let next = self.flights.get_mut(key);
            let Some(next) = next.filter(|next| store.enter(next.alone, &self.bell)) else {
                return;
            };
            next.entered = true;
            store.held.pop_front();
            self.ready.push_back(key);
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Their operations end first.
        self.ring = RingState::Missing;
        self.pool = None;
        for (_, flight) in &self.flights {
            if let Some(store) = self.stores.get(&flight.under_way.store())
                && flight.entered
            {
                store.leave();
            }
        }
        for store in self.stores.values().filter(|s| !s.held.is_empty()) {
            store.export.image().writing.give_up();
        }
    }
}
