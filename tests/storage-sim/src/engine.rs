//! The server's work on its disks: in the order, and with the answers, of the real one (`rnbd::server::fair_queue`), and done when the
//! disk has had its time.

use std::collections::BTreeMap;

use rnbd::{
    Errno,
    block::{self, BlockOp, Extent},
    proto::status,
    server::{
        disk::{DiskOp, Disks, Op, StoreId},
        fair_queue::{QueueLimits, Schedule},
        sync::{Covered, SyncState},
    },
};
use roce_verbs::mem::Pages;
use rtrs::server::request::{RequestKey, SessionKey};

use roce_sim::{Coverage, Rng};

use crate::{
    disk::{BLOCK, SimDisk, bytes, contents},
    ledger::Ledger,
};

/// Bytes of memory that a read has not filled yet.
const UNREAD: u8 = 0xdb;

/// Names what the disk works on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct RunId(u64);

/// State of an operation that the disk works on.
#[derive(Debug)]
pub(crate) struct Work {
    /// The bytes of a write, if they were taken at its start.
    early: Option<Vec<u8>>,
    /// Blocks that a flush covers.
    mark: u64,
    /// Changes that a flush covers; `None` of an operation that was never started.
    covers: Option<Covered>,
    /// Result of the checks at its beginning.
    checked: Result<(), Errno>,
}

impl Default for Work {
    fn default() -> Self {
        Self {
            early: None,
            mark: 0,
            covers: None,
            checked: Ok(()),
        }
    }
}

/// A device that a session has open.
#[derive(Debug)]
struct Store {
    device: usize,
    writes: bool,
    sync: SyncState,
}

/// Engine of the server's disks.
#[derive(Debug)]
pub(crate) struct Engine {
    schedule: Schedule<Work>,
    stores: BTreeMap<StoreId, Store>,
    running: BTreeMap<RunId, Box<Op<Work>>>,
    next_run: u64,
    /// Session and offset of the data of each request that has not ended.
    data: BTreeMap<RequestKey, (SessionKey, usize)>,
    /// The first mistake of the server.
    wrong: Option<String>,
    /// A flush has answered several requests.
    pub(crate) joined: bool,
    /// Memory holds garbage while it is read into.
    garbage: bool,
}

impl Engine {
    pub(crate) fn new(limits: QueueLimits, garbage: bool) -> Self {
        Self {
            schedule: Schedule::new(limits),
            stores: BTreeMap::new(),
            running: BTreeMap::new(),
            next_run: 0,
            data: BTreeMap::new(),
            wrong: None,
            joined: false,
            garbage,
        }
    }

    /// Nothing is open or under way.
    pub(crate) fn is_idle(&self) -> bool {
        let idle = self.stores.is_empty() && self.running.is_empty() && self.data.is_empty();
        idle && self.schedule.is_idle()
    }

    /// Whether somebody has the device open for writing.
    pub(crate) fn is_written(&self, device: usize) -> bool {
        self.stores.values().any(|s| s.device == device && s.writes)
    }

    pub(crate) fn open(&mut self, device: usize, writes: bool, disks: &mut [SimDisk]) -> StoreId {
        if writes {
            disks[device].write_again();
        }
        let id = self.schedule.open();
        let store = Store {
            device,
            writes,
            sync: SyncState::default(),
        };
        self.stores.insert(id, store);
        id
    }

    /// A device is to be closed.
    pub(crate) fn begin_close(&mut self, store: StoreId) -> Result<(), String> {
        match self.schedule.close(store) {
            true => Ok(()),
            false => Err(format!(
                "{store:?} is closed while an operation is under way, or is not open"
            )),
        }
    }

    /// Closes a device: what was written becomes durable, if no flush has failed.
    pub(crate) fn close(&mut self, store: StoreId, disks: &mut [SimDisk]) {
        if let Some(store) = self.stores.remove(&store).filter(|s| s.sync.wants_sync()) {
            let disk = &mut disks[store.device];
            disk.end_flush(disk.begin_flush());
        }
    }

    /// Checks an operation of the server.
    fn check(&mut self, op: &Op<Work>) -> Result<(), String> {
        let (session, disk) = (op.id.session, &op.disk);
        let memory = op.memory.as_ref().ok_or("an operation without memory")?;
        let has_data = disk.data_len().is_some();
        if has_data && self.data.values().any(|of| *of == (session, disk.data)) {
            return Err(format!(
                "two requests of {session:?} work with the chunk at {}",
                disk.data
            ));
        }
        if has_data && self.data.insert(op.id, (session, disk.data)).is_some() {
            return Err(format!("{:?} is in flight twice", op.id));
        }
        if let (BlockOp::Read | BlockOp::BlockStatus { .. }, Some(len), true) = (disk.op, disk.data_len(), self.garbage)
        {
            let garbage = memory.write(disk.data, &vec![UNREAD; len as usize]);
            garbage.map_err(|e| format!("a read to outside the session's memory: {e}"))?;
        }
        match self.stores.contains_key(&disk.store) {
            true => Ok(()),
            false => Err(format!("an operation on {:?}, which is not open", disk.store)),
        }
    }

    /// Returns the first mistake of the server.
    pub(crate) fn verdict(&mut self) -> Result<(), String> {
        self.wrong.take().map_or(Ok(()), Err)
    }

    /// Starts what has its turn. `plan` gets what ends when.
    pub(crate) fn pump(
        &mut self,
        disks: &[SimDisk],
        rng: &mut Rng,
        mut plan: impl FnMut(u64, RunId),
    ) -> Result<(), String> {
        while let Some(mut op) = self.schedule.start() {
            let Some(store) = self.stores.get(&op.disk.store) else {
                return Err("an operation on a device that was closed under it".into());
            };
            let disk = &disks[store.device];
            let early = match &op.memory {
                Some(memory) if matches!(op.disk.op, BlockOp::Write { .. }) && rng.chance(0.5) => {
                    Some(taken(memory, &op.disk)?)
                }
                _ => None,
            };
            let checked = store.sync.check(op.disk.op);
            if op.disk.op.writes() {
                store.sync.change_begins();
            }
            let id = RunId(self.next_run);
            self.next_run += 1;
            plan(disk.faults.duration(rng), id);
            op.part = Work {
                early,
                mark: disk.begin_flush(),
                covers: Some(store.sync.sync_begins()),
                checked,
            };
            self.running.insert(id, op);
        }
        Ok(())
    }

    /// The disk is done with an operation.
    pub(crate) fn finish(
        &mut self,
        id: RunId,
        disks: &mut [SimDisk],
        ledger: &Ledger,
        rng: &mut Rng,
        coverage: &mut Coverage,
    ) -> Result<(), String> {
        let Some(mut op) = self.running.remove(&id) else {
            return Ok(());
        };
        let Some(store) = self.stores.get(&op.disk.store) else {
            return Err("an operation on a device that was closed under it".into());
        };
        let result = match op.part.checked {
            Ok(()) => operate(&op, store, &mut disks[store.device], ledger, rng)?,
            Err(e) => Err(e),
        };
        let what = op.disk.op;
        match (what, &result) {
            (BlockOp::Flush, Ok(())) => op
                .part
                .covers
                .into_iter()
                .for_each(|covered| store.sync.sync_ends(covered)),
            (what, Ok(())) if what.writes() && what.makes_durable() => store.sync.change_is_durable(),
            (what, _) if what.writes() => store.sync.change_ends(),
            _ => {}
        }
        op.result = result.and_then(|()| store.sync.check(what));
        if op.result.is_err() {
            coverage.note("disk error");
        }
        self.schedule.end(op, what.writes());
        Ok(())
    }
}

impl Disks for Engine {
    type Part = Work;

    fn submit(&mut self, op: Box<Op<Work>>) {
        let checked = self.check(&op);
        self.wrong = self.wrong.take().or(checked.err());
        self.schedule.submit(op);
    }

    fn poll(&mut self) -> Option<Box<Op<Work>>> {
        let mut op = self.schedule.poll()?;
        self.data.remove(&op.id);
        let started = core::mem::take(&mut op.part).covers.is_some();
        self.joined |= op.disk.op == BlockOp::Flush && !started;
        Some(op)
    }
}

/// Carries out an operation on the disk.
fn operate(
    work: &Op<Work>,
    store: &Store,
    disk: &mut SimDisk,
    ledger: &Ledger,
    rng: &mut Rng,
) -> Result<Result<(), Errno>, String> {
    let (op, device) = (&work.disk, store.device);
    let (lba, count) = (op.offset / BLOCK as u64, op.len / BLOCK as u64);
    if op.op != BlockOp::Flush && op.offset.saturating_add(op.len) > disk.blocks() * BLOCK as u64 {
        return Ok(Err(Errno::EIO));
    }
    if op.op.writes() && !store.writes {
        return Err("a change of a device that was opened read-only".into());
    }
    match op.op {
        BlockOp::Read | BlockOp::BlockStatus { .. } => {
            if rng.chance(disk.faults.read_error) {
                return Ok(Err(Errno::EIO));
            }
            let answer = match op.op {
                BlockOp::BlockStatus { most } => status::answer(&extents(disk, lba, count), most),
                _ => bytes(&disk.read(lba, count)),
            };
            if let Some(memory) = &work.memory {
                let written = memory.write(op.data, &answer);
                written.map_err(|e| format!("an answer to outside the session's memory: {e}"))?;
            }
        }
        BlockOp::Write { fua } => return write(work, store, disk, ledger, rng, fua),
        BlockOp::Flush => {
            if rng.chance(disk.faults.flush_error) {
                store.sync.sync_failed();
                disk.fail_sync();
                return Ok(Err(Errno::EIO));
            }
            disk.end_flush(work.part.mark);
        }
        BlockOp::Discard => {
            ledger.allow_zeroes(device, lba, count)?;
            for lba in lba..lba + count {
                if rng.chance(0.5) {
                    disk.write(lba, &[0]);
                }
            }
        }
        BlockOp::WriteZeroes { fua, .. } => {
            ledger.allow_zeroes(device, lba, count)?;
            disk.write(lba, &vec![0; count as usize]);
            if fua {
                disk.force(lba, count);
            }
        }
    }
    Ok(Ok(()))
}

/// Writes whole blocks, whose contents the ledger must know; or some of them, and fails.
fn write(
    work: &Op<Work>,
    store: &Store,
    disk: &mut SimDisk,
    ledger: &Ledger,
    rng: &mut Rng,
    fua: bool,
) -> Result<Result<(), Errno>, String> {
    let (lba, count) = (work.disk.offset / BLOCK as u64, work.disk.len / BLOCK as u64);
    let bytes = match (&work.part.early, &work.memory) {
        (Some(bytes), _) => bytes.clone(),
        (None, Some(memory)) => taken(memory, &work.disk)?,
        (None, None) => return Err("a write without memory".into()),
    };
    let Some(new) = contents(&bytes) else {
        return Err(format!("blocks {lba} to {} would be torn", lba + count));
    };
    for (lba, content) in (lba..).zip(&new) {
        ledger.allow(store.device, lba, *content)?;
    }
    if rng.chance(disk.faults.write_error) {
        disk.write(lba, &new[..rng.index(new.len() + 1)]);
        if fua {
            store.sync.durable_write_failed(Errno::EIO);
            disk.fail_sync();
        }
        return Ok(Err(Errno::EIO));
    }
    disk.write(lba, &new);
    if fua {
        disk.force(lba, count);
    }
    Ok(Ok(()))
}

/// Blocks of zeroes are holes.
fn extents(disk: &SimDisk, lba: u64, count: u64) -> Vec<Extent> {
    let mut all = Vec::new();
    for content in disk.read(lba, count) {
        let len = BLOCK as u64;
        block::append(
            &mut all,
            match content {
                0 => Extent::hole(len),
                _ => Extent::data(len),
            },
        );
    }
    all
}

/// The bytes of a write.
fn taken(memory: &Pages, op: &DiskOp) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; op.len as usize];
    let read = memory.read(op.data, &mut bytes);
    read.map_err(|e| format!("a write from outside the session's memory: {e}"))?;
    Ok(bytes)
}
