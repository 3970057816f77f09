//! Writes of all clients: a number fills a block, and belongs to one write of one block.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    disk::{Content, SimDisk},
    history::History,
};

/// A client in one of its lives: a session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Life {
    pub(crate) client: usize,
    pub(crate) life: u32,
}

/// A change of a range of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) device: usize,
    pub(crate) lba: u64,
    pub(crate) count: u64,
}

/// Stage of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Its client waits for the answer.
    Begun,
    /// Its client has lost the session; the server may still do it.
    Lost,
    /// Nothing of it may happen any more.
    Over,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    change: Change,
    life: Life,
    begin: u64,
    zeroes: bool,
    stage: Stage,
}

/// All changes, and what they make of the devices.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) devices: Vec<History>,
    changes: BTreeMap<u64, Entry>,
    /// Which change a number belongs to, and which block.
    contents: BTreeMap<Content, (u64, u64)>,
    /// Changes that have not ended.
    open: BTreeSet<u64>,
    next: u64,
    /// Until when the server has done all that it does for a session.
    over: BTreeMap<Life, u64>,
    /// Clients that send again what was lost.
    holders: BTreeSet<usize>,
}

impl Ledger {
    pub(crate) fn new(devices: impl Iterator<Item = u64>) -> Self {
        Self {
            devices: devices.map(History::new).collect(),
            changes: BTreeMap::new(),
            contents: BTreeMap::new(),
            open: BTreeSet::new(),
            next: 0,
            over: BTreeMap::new(),
            holders: BTreeSet::new(),
        }
    }

    /// Operations of this client outlive the loss of its session.
    pub(crate) fn add_holder(&mut self, client: usize) {
        self.holders.insert(client);
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A client sends a write; the numbers for its blocks.
    pub(crate) fn write(&mut self, now: u64, life: Life, change: Change) -> (u64, Vec<Content>) {
        let id = self.number();
        let contents: Vec<Content> = (0..change.count)
            .map(|i| {
                let content = self.number();
                self.contents.insert(content, (id, change.lba + i));
                content
            })
            .collect();
        self.begin(now, id, life, change, &contents, false);
        (id, contents)
    }

    /// A client sends something that leaves zeroes.
    pub(crate) fn zero(&mut self, now: u64, life: Life, change: Change) -> u64 {
        let id = self.number();
        self.begin(now, id, life, change, &vec![0; change.count as usize], true);
        id
    }

    fn begin(&mut self, now: u64, id: u64, life: Life, change: Change, contents: &[Content], zeroes: bool) {
        self.devices[change.device].begin(now, id, change.lba, contents);
        let entry = Entry {
            change,
            life,
            begin: now,
            zeroes,
            stage: Stage::Begun,
        };
        self.changes.insert(id, entry);
        self.open.insert(id);
    }

    /// Ends a change that was answered.
    pub(crate) fn end(&mut self, now: u64, id: u64, success: bool, durable: bool) {
        if let Some(entry) = self.changes.get_mut(&id) {
            entry.stage = Stage::Over;
            self.open.remove(&id);
            let Change { device, lba, count } = entry.change;
            self.devices[device].end(now, id, lba, count, success, durable);
        }
    }

    /// Its client will not learn how it ended. It may have sent it (again) at any time after `since`.
    pub(crate) fn lose(&mut self, now: u64, id: u64, since: u64) {
        let Some(entry) = self.changes.get_mut(&id) else { return };
        entry.stage = Stage::Lost;
        let begin = entry.begin.max(since);
        if self.over.get(&entry.life).is_some_and(|over| begin <= *over) {
            self.settle(now, id);
        }
    }

    fn settle(&mut self, now: u64, id: u64) {
        let Some(entry) = self.changes.get_mut(&id).filter(|e| e.stage == Stage::Lost) else {
            return;
        };
        entry.stage = Stage::Over;
        self.open.remove(&id);
        let Change { device, lba, count } = entry.change;
        self.devices[device].settle(now, id, lba, count);
    }

    /// The server does nothing more of what a session has asked for so far.
    pub(crate) fn session_over(&mut self, now: u64, life: Life) {
        self.over.insert(life, now);
        for id in self.open.clone() {
            if self.changes.get(&id).is_some_and(|entry| entry.life == life) {
                self.settle(now, id);
            }
        }
    }

    /// The server has crashed: it does nothing more of what anybody has asked for so far.
    pub(crate) fn server_over(&mut self, now: u64) {
        let lives: BTreeSet<Life> = self.changes.values().map(|e| e.life).collect();
        for life in lives {
            self.session_over(now, life);
        }
    }

    /// The server's machine has lost power: it has crashed, and what was not durable may be gone.
    pub(crate) fn lose_power(&mut self, now: u64) {
        let held = |id: &&u64| {
            let entry = self.changes.get(id);
            entry.is_some_and(|e| e.stage == Stage::Begun && self.holders.contains(&e.life.client))
        };
        let held: BTreeSet<u64> = self.open.iter().filter(held).copied().collect();
        for device in &mut self.devices {
            device.lose_power(now, |id| held.contains(&id));
        }
    }

    /// Checks that flushed blocks are there, also if power were lost at this moment.
    ///
    /// # Errors
    /// When it is not.
    pub(crate) fn check_durable(&mut self, device: usize, disk: &SimDisk, lba: u64, count: u64) -> Result<(), String> {
        (lba..lba + count)
            .try_for_each(|lba| self.devices[device].check_durable(lba, disk.durable(lba)))
            .map_err(|e| format!("device {device}: {e}"))
    }

    /// The server makes this range zero.
    ///
    /// # Errors
    /// When nobody wants that.
    pub(crate) fn allow_zeroes(&self, device: usize, lba: u64, count: u64) -> Result<(), String> {
        let wanted = self.open.iter().filter_map(|id| self.changes.get(id)).any(|entry| {
            let c = entry.change;
            entry.zeroes && c.device == device && c.lba <= lba && lba + count <= c.lba + c.count
        });
        match wanted {
            true => Ok(()),
            false => Err(format!(
                "{count} blocks from {lba} of device {device} become zero, which nobody has asked for"
            )),
        }
    }

    /// The server's disk writes this block now.
    ///
    /// # Errors
    /// When nobody wants that.
    pub(crate) fn allow(&self, device: usize, lba: u64, content: Content) -> Result<(), String> {
        if content == 0 {
            return self.allow_zeroes(device, lba, 1);
        }
        let text = |what: &str| {
            Err(format!(
                "{content:#x} is written to block {lba} of device {device}: {what}"
            ))
        };
        let Some((id, of)) = self.contents.get(&content) else {
            return text("nobody has sent it");
        };
        match self.changes.get(id) {
            Some(entry) if entry.change.device != device || *of != lba => text("it is for another place"),
            Some(entry) if entry.stage == Stage::Over => text("its write is over long since"),
            Some(_) => Ok(()),
            None => text("nobody has sent it"),
        }
    }
}
