//! Cache of the keys that a queue pair used last: most packets need no lock of the table.

use std::sync::{Arc, Weak};

use roce_bth::{Qpn, RKey};
use roce_verbs::{AccessFlags, Sge};

use super::{MemoryTable, entries::Open};
use crate::{
    error::KeyError,
    object::PdHandle,
    span::{Mapping, Span},
};

/// Keys of a kind in a cache. Each costs a comparison when another one is used.
const KEYS: usize = 4;

/// Memory that a key opened when it was resolved.
#[derive(Debug)]
struct Cached {
    key: u32,
    access: AccessFlags,
    iova: u64,
    /// Closing a key revokes its mapping. A cache does not keep memory alive.
    mapping: Weak<Mapping>,
}

/// Keys of one kind, used last.
#[derive(Debug, Default)]
struct Recent {
    keys: Vec<Cached>,
    /// Index of the key to replace next.
    oldest: usize,
}

impl Recent {
    /// Resolves a range if the key is cached, still open, and permits the access.
    fn resolve(&self, key: u32, addr: u64, len: u64, need: AccessFlags) -> Option<Span> {
        let cached = self.keys.iter().find(|cached| cached.key == key)?;
        let mapping = cached.mapping.upgrade().filter(|mapping| !mapping.is_revoked())?;
        let open = Open {
            mapping,
            iova: cached.iova,
            access: cached.access,
        };
        open.into_span(addr, len, need).ok()
    }

    fn insert(&mut self, key: u32, open: &Open) {
        let cached = Cached {
            key,
            access: open.access,
            iova: open.iova,
            mapping: Arc::downgrade(&open.mapping),
        };
        match self.keys.iter().position(|cached| cached.key == key) {
            Some(same) => self.keys[same] = cached,
            None if self.keys.len() < KEYS => self.keys.push(cached),
            None => {
                self.keys[self.oldest] = cached;
                self.oldest = (self.oldest + 1) % KEYS;
            }
        }
    }
}

/// Keys that a queue pair used last. Its protection domain and number must not change while it has one.
#[derive(Debug, Default)]
pub struct KeyCache {
    local: Recent,
    remote: Recent,
}

impl KeyCache {
    /// Does the same as [`MemoryTable::resolve_local`].
    ///
    /// # Errors
    /// As there.
    pub fn resolve_local(
        &mut self,
        table: &MemoryTable,
        pd: PdHandle,
        sge: &Sge,
        need: AccessFlags,
    ) -> Result<Span, KeyError> {
        let (key, len) = (sge.lkey.0, u64::from(sge.length));
        if let Some(span) = self.local.resolve(key, sge.addr, len, need) {
            return Ok(span);
        }
        let inner = table.inner.read();
        let open = inner.find_local(pd, sge.lkey)?;
        let span = open.span(sge.addr, len, need)?;
        self.local.insert(key, open);
        Ok(span)
    }

    /// Does the same as [`MemoryTable::resolve_remote`].
    ///
    /// # Errors
    /// As there.
    #[expect(clippy::too_many_arguments, reason = "those of the table's method")]
    pub fn resolve_remote(
        &mut self,
        table: &MemoryTable,
        pd: PdHandle,
        qpn: Qpn,
        rkey: RKey,
        addr: u64,
        len: u32,
        need: AccessFlags,
    ) -> Result<Span, KeyError> {
        if let Some(span) = self.remote.resolve(rkey.0, addr, len.into(), need) {
            return Ok(span);
        }
        let inner = table.inner.read();
        let open = inner.find_remote(pd, qpn, rkey)?;
        let span = open.span(addr, len.into(), need)?;
        self.remote.insert(rkey.0, open);
        Ok(span)
    }
}
