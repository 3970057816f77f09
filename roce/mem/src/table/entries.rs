//! Entries of the table: the object and memory that each key names, and the checks of a key against its entry.

use std::{
    collections::{HashMap, HashSet},
    hash::BuildHasherDefault,
    sync::{Arc, atomic::Ordering},
};

use rand_chacha::{ChaCha12Rng, rand_core::RngCore};
use roce_bth::{LKey, Qpn, RKey};
use roce_verbs::{AccessFlags, NumberHasher, wr::BindWindow};

use crate::{
    error::{KeyError, MemError},
    object::{FastRegion, PdHandle, Window, WindowKind},
    span::{Mapping, Span},
};

pub(super) type KeyMap<V> = HashMap<u32, V, BuildHasherDefault<NumberHasher>>;
/// Indices of keys.
pub(super) type KeySet = HashSet<u32, BuildHasherDefault<NumberHasher>>;

/// Memory that a key opens at the moment.
pub(super) struct Open {
    pub(super) mapping: Arc<Mapping>,
    pub(super) iova: u64,
    pub(super) access: AccessFlags,
}

impl Open {
    /// Checks an access to a range of addresses.
    pub(super) fn span(&self, addr: u64, len: u64, need: AccessFlags) -> Result<Span, KeyError> {
        if !self.access.contains(need) {
            return Err(KeyError::Access);
        }
        let (offset, len) = self.offset(addr, len)?;
        Span::new(self.mapping.clone(), offset, len).ok_or(KeyError::Range)
    }

    /// Offset and length within the mapping of a range of addresses.
    fn offset(&self, addr: u64, len: u64) -> Result<(usize, usize), KeyError> {
        let size = self.mapping.len() as u64;
        let offset = addr.checked_sub(self.iova).ok_or(KeyError::Range)?;
        if offset > size || len > size - offset {
            return Err(KeyError::Range);
        }
        // Both are at most `size`, which came from a usize.
        Ok((offset as usize, len as usize))
    }
}

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

pub(super) struct Inner {
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

pub(super) fn check_access(access: AccessFlags, persistent: bool) -> Result<(), MemError> {
    let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    if access.intersects(writes) && !access.contains(AccessFlags::LOCAL_WRITE) {
        return Err(MemError::Access);
    }
    match access.contains(AccessFlags::FLUSH_PERSISTENT) && !persistent {
        true => Err(MemError::NotPersistent),
        false => Ok(()),
    }
}

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

    /// A random key whose index is free.
    pub(super) fn new_key(&mut self) -> Result<u32, MemError> {
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

    pub(super) fn insert(&mut self, pd: PdHandle, key: u32, kind: Kind, open: Option<Open>) -> Result<(), MemError> {
        self.hold(pd)?;
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

    /// Takes an entry out, closing it. Fails while windows are bound to it.
    pub(super) fn remove(&mut self, key: u32) -> Result<Entry, MemError> {
        let entry = self.entries.get(&(key >> 8)).ok_or(MemError::NotFound)?;
        if !entry.windows.is_empty() {
            return Err(MemError::Busy("memory windows are bound to the region"));
        }
        self.close(key >> 8);
        let entry = self.entries.remove(&(key >> 8)).ok_or(MemError::NotFound)?;
        self.release(entry.pd);
        Ok(entry)
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

    /// Notes the binding of an open window.
    pub(super) fn bind(&mut self, index: u32, to: BoundTo) {
        if let Some(region) = to.region.and_then(|region| self.entries.get_mut(&region)) {
            region.windows.insert(index);
        }
        if let Some(qpn) = to.qpn {
            self.qp_windows.entry(qpn.value()).or_default().insert(index);
        }
        if let Some(Entry {
            kind: Kind::Window(_, bound),
            ..
        }) = self.entries.get_mut(&index)
        {
            *bound = to;
        }
    }

    pub(super) fn find(&self, pd: PdHandle, key: u32) -> Result<&Entry, KeyError> {
        let entry = self
            .entries
            .get(&(key >> 8))
            .filter(|e| e.key == key)
            .ok_or(KeyError::Unknown)?;
        if entry.pd != pd {
            return Err(KeyError::WrongPd);
        }
        Ok(entry)
    }

    /// Like [`Inner::find`] for an object that gets a new key byte: only the index must match.
    fn find_index(&self, pd: PdHandle, key: RKey) -> Result<&Entry, KeyError> {
        let entry = self.entries.get(&(key.0 >> 8)).ok_or(KeyError::Unknown)?;
        if entry.pd != pd {
            return Err(KeyError::WrongPd);
        }
        Ok(entry)
    }
}

impl Inner {
    /// Returns the view of a region that a fast registration with these rights opens.
    pub(super) fn view(
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
        let backing = backing.open.as_ref().ok_or(KeyError::Closed)?;
        let writes = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if !may_open(backing.access, access, writes) {
            return Err(KeyError::Access);
        }
        let (offset, len) = backing.offset(addr, length)?;
        backing.mapping.derive(offset, len).ok_or(KeyError::Range)
    }

    /// Opens a fast region under this key.
    pub(super) fn open_fast(&mut self, pd: PdHandle, key: RKey, open: Open) -> Result<(), KeyError> {
        let target = self.find_index(pd, key)?;
        if !matches!(target.kind, Kind::Fast(_)) || target.open.is_some() || !target.windows.is_empty() {
            return Err(KeyError::State);
        }
        let len = open.mapping.len() as u64;
        if len > 0 && open.iova.checked_add(len - 1).is_none() {
            return Err(KeyError::Range);
        }
        let target = self.entries.get_mut(&(key.0 >> 8)).ok_or(KeyError::Unknown)?;
        target.key = key.0;
        if let Kind::Fast(fast) = &target.kind {
            fast.key.store(key.0, Ordering::Release);
        }
        target.open = Some(open);
        Ok(())
    }

    /// The object of a key that a queue pair names: of its protection domain, or a type 2A window, which is bound to a queue
    /// pair alone.
    pub(super) fn find_for(&self, pd: PdHandle, rkey: RKey) -> Result<&Entry, KeyError> {
        let entry = self.entries.get(&(rkey.0 >> 8)).filter(|e| e.key == rkey.0);
        let entry = entry.ok_or(KeyError::Unknown)?;
        let anywhere = matches!(&entry.kind, Kind::Window(w, _) if w.kind == WindowKind::Type2A);
        match entry.pd == pd || anywhere {
            true => Ok(entry),
            false => Err(KeyError::WrongPd),
        }
    }

    /// Returns the memory that a local key opens. Windows have none.
    pub(super) fn find_local(&self, pd: PdHandle, lkey: LKey) -> Result<&Open, KeyError> {
        let entry = self.find(pd, lkey.0)?;
        if matches!(entry.kind, Kind::Window(..)) {
            return Err(KeyError::Unknown);
        }
        entry.open.as_ref().ok_or(KeyError::Closed)
    }

    /// Returns the memory that a peer's key opens to a queue pair.
    pub(super) fn find_remote(&self, pd: PdHandle, qpn: Qpn, rkey: RKey) -> Result<&Open, KeyError> {
        let entry = self.find_for(pd, rkey)?;
        if let Kind::Window(_, BoundTo { qpn: Some(owner), .. }) = entry.kind
            && owner != qpn
        {
            return Err(KeyError::WrongQp);
        }
        entry.open.as_ref().ok_or(KeyError::Closed)
    }

    /// Returns the view that a window shall open, checked against the region that it is bound to.
    pub(super) fn window_view(&self, pd: PdHandle, args: &BindWindow, zero: bool) -> Result<Open, KeyError> {
        let region = self.find(pd, args.lkey.0)?;
        if matches!(region.kind, Kind::Window(..)) {
            return Err(KeyError::State);
        }
        let region = region.open.as_ref().ok_or(KeyError::Closed)?;
        if region.access.contains(AccessFlags::ZERO_BASED) || !region.access.contains(AccessFlags::MW_BIND) {
            return Err(KeyError::Access);
        }
        let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if !may_open(region.access, args.access, writes) {
            return Err(KeyError::Access);
        }
        let (offset, len) = region.offset(args.addr, args.length)?;
        Ok(Open {
            mapping: region.mapping.derive(offset, len).ok_or(KeyError::Range)?,
            iova: if zero { 0 } else { args.addr },
            access: args.access,
        })
    }
}
