//! Entries of the table: the object and memory that each key names, and the checks of a key against its entry.

use std::{
    collections::{HashMap, HashSet},
    hash::BuildHasherDefault,
    sync::{Arc, atomic::Ordering},
};

use crate::{AccessFlags, DeviceLimits, NumberHasher, wr::BindWindow};
use rand_chacha::{ChaCha12Rng, rand_core::RngCore};
use roce_bth::{LKey, Qpn, RKey};

use crate::mem::{
    error::{KeyError, MemError},
    object::{FastRegion, Open, PdHandle, Window, WindowKind},
    span::Mapping,
};

pub(super) type KeyMap<V> = HashMap<u32, V, BuildHasherDefault<NumberHasher>>;
/// Indices of keys.
pub(super) type KeySet = HashSet<u32, BuildHasherDefault<NumberHasher>>;

pub(super) enum Kind {
    Region,
    Fast(Arc<FastRegion>),
    Window(Arc<Window>, BoundTo),
}

/// Binding of a window.
#[derive(Clone, Copy, Default)]
pub(super) struct BoundTo {
    /// Index of the region's key.
    pub(super) region: Option<u32>,
    /// The only queue pair that may use it (type 2).
    pub(super) qpn: Option<Qpn>,
}

pub(super) struct Entry {
    pub(super) pd: PdHandle,
    pub(super) key: u32,
    pub(super) kind: Kind,
    pub(super) open: Option<Open>,
    /// Windows bound to this region.
    pub(super) windows: KeySet,
}

impl Entry {
    /// Returns the memory that is open.
    fn opened(&self) -> Result<&Open, KeyError> {
        self.open.as_ref().ok_or(KeyError::Closed)
    }
}

pub(super) struct Inner {
    pub(super) limits: DeviceLimits,
    pub(super) rng: ChaCha12Rng,
    /// Protection domains with the number of objects in each.
    pub(super) pds: KeyMap<u32>,
    pub(super) next_pd: u32,
    /// By index: the key's upper 24 bits.
    pub(super) entries: KeyMap<Entry>,
    pub(super) regions: u32,
    pub(super) windows: u32,
    /// Type-2 windows bound to queue pairs, by queue pair number.
    pub(super) qp_windows: KeyMap<KeySet>,
}

/// The most keys that fit the 24 bits of index and still leave a random one quick to find.
const MAX_KEYS: usize = 1 << 22;

/// Whether a view of a region may have these rights: what writes needs the region's local write right, and what flushes
/// the region's right to be flushed so.
fn may_open(region: AccessFlags, view: AccessFlags, writes: AccessFlags) -> bool {
    let flushes = AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT;
    (!view.intersects(writes) || region.contains(AccessFlags::LOCAL_WRITE)) && region.contains(view & flushes)
}

impl Inner {
    pub(super) fn hold(&mut self, pd: PdHandle) -> Result<(), MemError> {
        let count = self.pds.get_mut(&pd.0).ok_or(MemError::NotFound)?;
        *count = count
            .checked_add(1)
            .ok_or(MemError::Limit("objects of a protection domain"))?;
        Ok(())
    }

    pub(super) fn release(&mut self, pd: PdHandle) {
        if let Some(count) = self.pds.get_mut(&pd.0) {
            *count = count.saturating_sub(1);
        }
    }

    /// Draws a key whose index is free.
    fn new_key(&mut self) -> Result<u32, MemError> {
        if self.entries.len() >= MAX_KEYS {
            return Err(MemError::Limit("memory keys"));
        }
        loop {
            let key = self.rng.next_u32();
            // 0 and all-ones are customary marks for "no key".
            if key >> 8 != 0 && key >> 8 != 0x00ff_ffff && !self.entries.contains_key(&(key >> 8)) {
                return Ok(key);
            }
        }
    }

    /// Draws a key for a region, or a target of fast registration.
    pub(super) fn new_region_key(&mut self) -> Result<u32, MemError> {
        match self.regions < self.limits.max_mr {
            true => self.new_key(),
            false => Err(MemError::Limit("memory regions")),
        }
    }

    /// Draws a key for a window.
    pub(super) fn new_window_key(&mut self) -> Result<u32, MemError> {
        match self.windows < self.limits.max_mw {
            true => self.new_key(),
            false => Err(MemError::Limit("memory windows")),
        }
    }

    /// The number of objects that count as this kind.
    fn count(&mut self, kind: &Kind) -> &mut u32 {
        match kind {
            Kind::Region | Kind::Fast(_) => &mut self.regions,
            Kind::Window(..) => &mut self.windows,
        }
    }

    pub(super) fn insert(&mut self, pd: PdHandle, key: u32, kind: Kind, open: Option<Open>) -> Result<(), MemError> {
        self.hold(pd)?;
        *self.count(&kind) += 1;
        let entry = Entry {
            pd,
            key,
            kind,
            open,
            windows: KeySet::default(),
        };
        self.entries.insert(key >> 8, entry);
        Ok(())
    }

    /// Takes an object out, closing it. Fails while windows are bound to it.
    pub(super) fn remove(&mut self, key: u32) -> Result<(), MemError> {
        let entry = self.entry(key).map_err(|_| MemError::NotFound)?;
        if !entry.windows.is_empty() {
            return Err(MemError::Busy("memory windows are bound to the region"));
        }
        self.close(key >> 8);
        if let Some(entry) = self.entries.remove(&(key >> 8)) {
            self.release(entry.pd);
            *self.count(&entry.kind) -= 1;
        }
        Ok(())
    }

    /// Closes the windows that are bound to a region.
    pub(super) fn close_windows(&mut self, key: u32) {
        let region = self.entries.get_mut(&(key >> 8)).filter(|e| e.key == key);
        for window in region.map(|e| std::mem::take(&mut e.windows)).unwrap_or_default() {
            self.close(window);
        }
    }

    /// Revokes what is open under an index, and unbinds a window from its region.
    pub(super) fn close(&mut self, index: u32) {
        let Some(entry) = self.entries.get_mut(&index) else {
            return;
        };
        if let Some(open) = entry.open.take() {
            open.mapping.revoke();
        }
        let Kind::Window(_, bound) = &mut entry.kind else {
            return;
        };
        let bound = std::mem::take(bound);
        if let Some(region) = bound.region.and_then(|region| self.entries.get_mut(&region)) {
            region.windows.remove(&index);
        }
        if let Some(qpn) = bound.qpn
            && let Some(windows) = self.qp_windows.get_mut(&qpn.value())
        {
            windows.remove(&index);
            if windows.is_empty() {
                self.qp_windows.remove(&qpn.value());
            }
        }
    }

    /// Binds a window, under this key and to nothing else than before.
    pub(super) fn bind(&mut self, key: RKey, open: Option<Open>, to: BoundTo) {
        let index = key.0 >> 8;
        self.close(index);
        if let Some(region) = to.region.and_then(|region| self.entries.get_mut(&region)) {
            region.windows.insert(index);
        }
        if let Some(qpn) = to.qpn {
            self.qp_windows.entry(qpn.value()).or_default().insert(index);
        }
        if let Some(entry) = self.entries.get_mut(&index)
            && let Kind::Window(window, bound) = &mut entry.kind
        {
            window.key.store(key.0, Ordering::Release);
            (entry.key, entry.open, *bound) = (key.0, open, to);
        }
    }

    /// Opens a fast region under this key.
    pub(super) fn open_fast(&mut self, pd: PdHandle, key: RKey, open: Open) -> Result<(), KeyError> {
        // It gets a new key byte: only the index must match.
        let target = self.entries.get_mut(&(key.0 >> 8)).ok_or(KeyError::Unknown)?;
        if target.pd != pd {
            return Err(KeyError::WrongPd);
        }
        let Kind::Fast(fast) = &target.kind else {
            return Err(KeyError::State);
        };
        if target.open.is_some() || !target.windows.is_empty() {
            return Err(KeyError::State);
        }
        if open.wraps() {
            return Err(KeyError::Range);
        }
        fast.key.store(key.0, Ordering::Release);
        (target.key, target.open) = (key.0, Some(open));
        Ok(())
    }

    pub(super) fn entry(&self, key: u32) -> Result<&Entry, KeyError> {
        let entry = self.entries.get(&(key >> 8)).filter(|e| e.key == key);
        entry.ok_or(KeyError::Unknown)
    }

    /// Returns the object of a key in a protection domain.
    fn find(&self, pd: PdHandle, key: u32) -> Result<&Entry, KeyError> {
        let entry = self.entry(key)?;
        match entry.pd == pd {
            true => Ok(entry),
            false => Err(KeyError::WrongPd),
        }
    }

    /// Returns the object of a key that a queue pair names: of its protection domain, or a type 2A window, which is bound to a queue
    /// pair alone.
    pub(super) fn find_for(&self, pd: PdHandle, rkey: RKey) -> Result<&Entry, KeyError> {
        let entry = self.entry(rkey.0)?;
        let anywhere = matches!(&entry.kind, Kind::Window(w, _) if w.kind == WindowKind::Type2A);
        match entry.pd == pd || anywhere {
            true => Ok(entry),
            false => Err(KeyError::WrongPd),
        }
    }

    /// Returns the memory that a local key opens. Windows have none.
    pub(super) fn find_local(&self, pd: PdHandle, lkey: LKey) -> Result<&Open, KeyError> {
        let entry = self.find(pd, lkey.0)?;
        match entry.kind {
            Kind::Window(..) => Err(KeyError::Unknown),
            _ => entry.opened(),
        }
    }

    /// Returns the memory that a peer's key opens to a queue pair.
    pub(super) fn find_remote(&self, pd: PdHandle, qpn: Qpn, rkey: RKey) -> Result<&Open, KeyError> {
        let entry = self.find_for(pd, rkey)?;
        match entry.kind {
            Kind::Window(_, BoundTo { qpn: Some(owner), .. }) if owner != qpn => Err(KeyError::WrongQp),
            _ => entry.opened(),
        }
    }

    /// Returns the view of a region that a fast registration with these rights opens.
    pub(super) fn fast_view(
        &self,
        pd: PdHandle,
        lkey: LKey,
        addr: u64,
        length: u64,
        access: AccessFlags,
    ) -> Result<Arc<Mapping>, KeyError> {
        let backing = self.find(pd, lkey.0)?;
        if !matches!(backing.kind, Kind::Region) {
            return Err(KeyError::State);
        }
        let backing = backing.opened()?;
        let writes = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if !may_open(backing.access, access, writes) {
            return Err(KeyError::Access);
        }
        backing.view(addr, length)
    }

    /// Returns the view that a window shall open, checked against the region that it is bound to.
    pub(super) fn window_view(&self, pd: PdHandle, args: &BindWindow) -> Result<Open, KeyError> {
        let region = self.find(pd, args.lkey.0)?;
        if matches!(region.kind, Kind::Window(..)) {
            return Err(KeyError::State);
        }
        let region = region.opened()?;
        let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if region.access.contains(AccessFlags::ZERO_BASED)
            || !region.access.contains(AccessFlags::MW_BIND)
            || !may_open(region.access, args.access, writes)
        {
            return Err(KeyError::Access);
        }
        Ok(Open::new(region.view(args.addr, args.length)?, args.addr, args.access))
    }
}
