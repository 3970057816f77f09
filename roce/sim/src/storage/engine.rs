//! The server's work on its disks: queued as the real one does it, and done when the disk has had its time.

use std::{collections::BTreeMap, sync::Arc};

use rnbd::{
    Errno,
    block::BlockOp,
    server::{
        disk::{DiskOp, IoTicket, StoreId},
        queue::{Class, FairQueue, Flushes, QueueLimits},
    },
};
use roce_mem::Pages;
use rtrs::server::request::SessionKey;

use crate::{
    rng::Dice,
    storage::{
        disk::{BLOCK, SimDisk, bytes, contents},
        ledger::Ledger,
        tally::Coverage,
    },
};

/// What lies where a read is still under way.
const UNREAD: u8 = 0xdb;

/// Names what the disk works on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct RunId(u64);

/// Whom an operation is for.
#[derive(Clone, Copy, Debug)]
enum Who {
    Ticket(IoTicket),
    /// Those that the store's flush is for.
    Flush,
}

#[derive(Debug)]
struct Waiting {
    who: Who,
    op: DiskOp,
    memory: Option<Arc<Pages>>,
}

/// An operation that the disk works on.
#[derive(Debug)]
struct Running {
    session: SessionKey,
    class: Class,
    work: Waiting,
    /// The bytes of a write, if they were taken at its start.
    early: Option<Vec<u8>>,
    /// What a flush covers.
    mark: u64,
}

/// A device that a session has open.
#[derive(Debug)]
struct Store {
    device: usize,
    writes: bool,
    /// A flush failed: none succeeds any more.
    latched: bool,
    flushes: Flushes<IoTicket>,
    unanswered: usize,
}

/// What came of an operation.
pub(crate) type Ended = (IoTicket, Result<(), Errno>);

/// See the module.
#[derive(Debug)]
pub(crate) struct Engine {
    queue: FairQueue<SessionKey, Waiting>,
    stores: BTreeMap<StoreId, Store>,
    next_store: u32,
    running: BTreeMap<RunId, Running>,
    next_run: u64,
    /// Where in which session's memory the data of requests is that are not over.
    data: BTreeMap<IoTicket, (SessionKey, usize)>,
}

impl Engine {
    pub(crate) fn new(limits: QueueLimits) -> Self {
        Self {
            queue: FairQueue::new(limits),
            stores: BTreeMap::new(),
            next_store: 0,
            running: BTreeMap::new(),
            next_run: 0,
            data: BTreeMap::new(),
        }
    }

    /// Nothing is open or under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.stores.is_empty() && self.running.is_empty() && self.data.is_empty()
    }

    /// Whether somebody has the device open for writing.
    pub(crate) fn is_written(&self, device: usize) -> bool {
        self.stores.values().any(|s| s.device == device && s.writes)
    }

    pub(crate) fn open(&mut self, device: usize, writes: bool) -> StoreId {
        let id = StoreId(self.next_store);
        self.next_store += 1;
        let store = Store {
            device,
            writes,
            latched: false,
            flushes: Flushes::default(),
            unanswered: 0,
        };
        self.stores.insert(id, store);
        id
    }

    /// Whether a device may be closed.
    pub(crate) fn check_close(&self, store: StoreId) -> Result<(), String> {
        match self.stores.get(&store) {
            Some(Store { unanswered: 0, .. }) => Ok(()),
            Some(_) => Err(format!("{store:?} is closed while an operation is under way")),
            None => Err(format!("{store:?} is closed, which is not open")),
        }
    }

    /// Closes a device: what was written becomes durable, if no flush has failed.
    pub(crate) fn close(&mut self, store: StoreId, disks: &mut [SimDisk]) {
        if let Some(store) = self.stores.remove(&store).filter(|s| s.writes && !s.latched) {
            let disk = &mut disks[store.device];
            disk.end_flush(disk.begin_flush());
        }
    }

    /// Takes an operation. The data lies in the session's memory.
    pub(crate) fn start(
        &mut self,
        session: SessionKey,
        ticket: IoTicket,
        op: DiskOp,
        memory: Arc<Pages>,
    ) -> Result<(), String> {
        let Some(store) = self.stores.get_mut(&op.store) else {
            return Err(format!("an operation on {:?}, which is not open", op.store));
        };
        store.unanswered += 1;
        let has_data = matches!(op.op, BlockOp::Read | BlockOp::Write { .. });
        if has_data && self.data.values().any(|of| *of == (session, op.data)) {
            return Err(format!(
                "two requests of {session:?} work with the chunk at {}",
                op.data
            ));
        }
        if has_data && self.data.insert(ticket, (session, op.data)).is_some() {
            return Err(format!("{ticket:?} is under way twice"));
        }
        if op.op == BlockOp::Read {
            let garbage = memory.write(op.data, &vec![UNREAD; op.len as usize]);
            garbage.map_err(|e| format!("a read to outside the session's memory: {e}"))?;
        }
        let (who, begins) = match op.op {
            BlockOp::Flush => (Who::Flush, store.flushes.request(ticket)),
            _ => (Who::Ticket(ticket), true),
        };
        if begins {
            let memory = has_data.then_some(memory);
            self.wait(session, Waiting { who, op, memory });
        }
        Ok(())
    }

    fn wait(&mut self, session: SessionKey, waiting: Waiting) {
        let class = match waiting.op.op {
            BlockOp::Read | BlockOp::Write { .. } => Class::Data,
            BlockOp::Flush | BlockOp::Discard | BlockOp::WriteZeroes { .. } => Class::Slow,
        };
        self.queue.push(session, class, waiting.op.len, waiting);
    }

    /// Starts what has its turn. `plan` gets what ends when.
    pub(crate) fn pump(
        &mut self,
        disks: &[SimDisk],
        dice: &mut Dice,
        mut plan: impl FnMut(u64, RunId),
    ) -> Result<(), String> {
        while let Some((session, class, work)) = self.queue.pop() {
            let Some(store) = self.stores.get(&work.op.store) else {
                return Err("an operation on a device that was closed under it".into());
            };
            let disk = &disks[store.device];
            let early = match &work.memory {
                Some(memory) if matches!(work.op.op, BlockOp::Write { .. }) && dice.chance(0.5) => {
                    Some(taken(memory, &work.op)?)
                }
                _ => None,
            };
            let id = RunId(self.next_run);
            self.next_run += 1;
            plan(disk.faults.duration(dice), id);
            let mark = disk.begin_flush();
            self.running.insert(
                id,
                Running {
                    session,
                    class,
                    work,
                    early,
                    mark,
                },
            );
        }
        Ok(())
    }

    /// The disk is done with an operation. Returns whom that ends.
    pub(crate) fn finish(
        &mut self,
        id: RunId,
        disks: &mut [SimDisk],
        ledger: &Ledger,
        dice: &mut Dice,
        coverage: &mut Coverage,
    ) -> Result<Vec<Ended>, String> {
        let Some(running) = self.running.remove(&id) else {
            return Ok(Vec::new());
        };
        let Some(store) = self.stores.get_mut(&running.work.op.store) else {
            return Err("an operation on a device that was closed under it".into());
        };
        let result = operate(&running, store, &mut disks[store.device], ledger, dice)?;
        if result.is_err() {
            coverage.note("disk error");
        }
        self.queue.done(running.class);
        if running.work.op.op.writes() {
            store.flushes.wrote();
        }
        let (ended, again) = match running.work.who {
            Who::Ticket(ticket) => (vec![ticket], false),
            Who::Flush => store.flushes.done(),
        };
        if ended.len() > 1 {
            coverage.note("one flush for several");
        }
        store.unanswered -= ended.len();
        if again {
            self.wait(running.session, running.work);
        }
        for ticket in &ended {
            self.data.remove(ticket);
        }
        Ok(ended.into_iter().map(|ticket| (ticket, result)).collect())
    }
}

fn operate(
    running: &Running,
    store: &mut Store,
    disk: &mut SimDisk,
    ledger: &Ledger,
    dice: &mut Dice,
) -> Result<Result<(), Errno>, String> {
    let (op, device) = (&running.work.op, store.device);
    let (lba, count) = (op.offset / BLOCK as u64, op.len / BLOCK as u64);
    if op.op != BlockOp::Flush && op.offset.saturating_add(op.len) > disk.blocks() * BLOCK as u64 {
        return Ok(Err(Errno::EIO));
    }
    if op.op.writes() && !store.writes {
        return Err("a change of a device that was opened read-only".into());
    }
    match op.op {
        BlockOp::Read => {
            if dice.chance(disk.faults.read_error) {
                return Ok(Err(Errno::EIO));
            }
            if let Some(memory) = &running.work.memory {
                let read = memory.write(op.data, &bytes(&disk.read(lba, count)));
                read.map_err(|e| format!("a read to outside the session's memory: {e}"))?;
            }
        }
        BlockOp::Write { fua } => {
            let bytes = match (&running.early, &running.work.memory) {
                (Some(bytes), _) => bytes.clone(),
                (None, Some(memory)) => taken(memory, op)?,
                (None, None) => return Err("a write without memory".into()),
            };
            let Some(new) = contents(&bytes) else {
                return Err(format!("blocks {lba} to {} would be torn", lba + count));
            };
            for (lba, content) in (lba..).zip(&new) {
                ledger.allow(device, lba, *content)?;
            }
            if dice.chance(disk.faults.write_error) {
                // Some of it may be there.
                disk.write(lba, &new[..dice.index(new.len() + 1)]);
                return Ok(Err(Errno::EIO));
            }
            disk.write(lba, &new);
            return Ok(forced(store, disk, lba, count, fua));
        }
        BlockOp::Flush => {
            store.latched |= dice.chance(disk.faults.flush_error);
            if store.latched {
                return Ok(Err(Errno::EIO));
            }
            disk.end_flush(running.mark);
        }
        BlockOp::Discard => {
            ledger.allow_zeroes(device, lba, count)?;
            for lba in lba..lba + count {
                if dice.chance(0.5) {
                    disk.write(lba, &[0]);
                }
            }
        }
        BlockOp::WriteZeroes { fua, .. } => {
            ledger.allow_zeroes(device, lba, count)?;
            disk.write(lba, &vec![0; count as usize]);
            return Ok(forced(store, disk, lba, count, fua));
        }
    }
    Ok(Ok(()))
}

/// The bytes of a write.
fn taken(memory: &Pages, op: &DiskOp) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; op.len as usize];
    let read = memory.read(op.data, &mut bytes);
    read.map_err(|e| format!("a write from outside the session's memory: {e}"))?;
    Ok(bytes)
}

fn forced(store: &Store, disk: &mut SimDisk, lba: u64, count: u64, fua: bool) -> Result<(), Errno> {
    match (fua, store.latched) {
        (true, true) => Err(Errno::EIO),
        (true, false) => {
            disk.force(lba, count);
            Ok(())
        }
        (false, _) => Ok(()),
    }
}
