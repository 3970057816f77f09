//! Cache of the keys that a queue pair used last: most packets need no lock of the table.

use std::sync::{Arc, Weak};

use roce_bth::{Qpn, Reth};
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
    pd: PdHandle,
    key: u32,
    access: AccessFlags,
    iova: u64,
    /// Bytes from `iova` on.
    len: u64,
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
    #[inline]
    fn resolve(&self, pd: PdHandle, key: u32, addr: u64, len: u64, need: AccessFlags) -> Option<Span> {
        let cached = self.keys.iter().find(|cached| cached.key == key && cached.pd == pd)?;
        let offset = addr.wrapping_sub(cached.iova);
        if offset > cached.len || len > cached.len - offset || !cached.access.contains(need) {
            return None;
        }
        let mapping = cached.mapping.upgrade()?;
        match mapping.is_revoked() {
            true => None,
            false => Span::new(mapping, offset as usize, len as usize),
        }
    }

    fn insert(&mut self, pd: PdHandle, key: u32, open: &Open) {
        let cached = Cached {
            pd,
            key,
            access: open.access,
            iova: open.iova,
            len: open.mapping.len() as u64,
            mapping: Arc::downgrade(&open.mapping),
        };
        match self.keys.iter().position(|cached| cached.key == key && cached.pd == pd) {
            Some(same) => self.keys[same] = cached,
            None if self.keys.len() < KEYS => self.keys.push(cached),
            None => {
                self.keys[self.oldest] = cached;
                self.oldest = (self.oldest + 1) % KEYS;
            }
        }
    }
}

/// Keys that one queue pair used last.
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
    #[inline]
    pub fn resolve_local(
        &mut self,
        table: &MemoryTable,
        pd: PdHandle,
        sge: &Sge,
        need: AccessFlags,
    ) -> Result<Span, KeyError> {
        let cached = self.local.resolve(pd, sge.lkey.0, sge.addr, sge.length.into(), need);
        match cached {
            Some(span) => Ok(span),
            None => self.look_up_local(table, pd, sge, need),
        }
    }

    #[cold]
    fn look_up_local(
        &mut self,
        table: &MemoryTable,
        pd: PdHandle,
        sge: &Sge,
        need: AccessFlags,
    ) -> Result<Span, KeyError> {
        let inner = table.inner.read();
        let open = inner.find_local(pd, sge.lkey)?;
        let span = open.span(sge.addr, sge.length.into(), need)?;
        self.local.insert(pd, sge.lkey.0, open);
        Ok(span)
    }

    /// Does the same as [`MemoryTable::resolve_remote`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn resolve_remote(
        &mut self,
        table: &MemoryTable,
        pd: PdHandle,
        qpn: Qpn,
        reth: &Reth,
        need: AccessFlags,
    ) -> Result<Span, KeyError> {
        let cached = self.remote.resolve(pd, reth.rkey.0, reth.va, reth.dma_len.into(), need);
        match cached {
            Some(span) => Ok(span),
            None => self.look_up_remote(table, pd, qpn, reth, need),
        }
    }

    #[cold]
    fn look_up_remote(
        &mut self,
        table: &MemoryTable,
        pd: PdHandle,
        qpn: Qpn,
        reth: &Reth,
        need: AccessFlags,
    ) -> Result<Span, KeyError> {
        let inner = table.inner.read();
        let open = inner.find_remote(pd, qpn, reth.rkey)?;
        let span = open.span(reth.va, reth.dma_len.into(), need)?;
        self.remote.insert(pd, reth.rkey.0, open);
        Ok(span)
    }
}
