//! Cache of the keys that a queue pair used last: most packets need no lock of the table.

use std::sync::{Arc, Weak};

use roce_bth::{Qpn, Reth};
use roce_verbs::{AccessFlags, Sge};

use super::{
    MemoryTable,
    entries::{Inner, Open},
};
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

/// Access to a range of addresses under a key.
#[derive(Clone, Copy)]
struct Access {
    pd: PdHandle,
    key: u32,
    addr: u64,
    len: u64,
    need: AccessFlags,
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
    fn resolve(&self, access: &Access) -> Option<Span> {
        let cached = self.keys.iter().find(|c| c.key == access.key && c.pd == access.pd)?;
        let offset = access.addr.wrapping_sub(cached.iova);
        if offset > cached.len || access.len > cached.len - offset || !cached.access.contains(access.need) {
            return None;
        }
        let mapping = cached.mapping.upgrade()?;
        match mapping.is_revoked() {
            true => None,
            false => Span::new(mapping, offset as usize, access.len as usize),
        }
    }

    /// Resolves a range by the table, and caches the key.
    #[cold]
    fn look_up(
        &mut self,
        table: &MemoryTable,
        access: &Access,
        find: impl FnOnce(&Inner) -> Result<&Open, KeyError>,
    ) -> Result<Span, KeyError> {
        let inner = table.inner.read();
        let open = find(&inner)?;
        let span = open.span(access.addr, access.len, access.need)?;
        // The key of a window or fast registration is mostly used once.
        if !open.mapping.is_view() {
            self.insert(access.pd, access.key, open);
        }
        Ok(span)
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

/// Keys of registrations that one queue pair used last.
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
        let access = Access {
            pd,
            key: sge.lkey.0,
            addr: sge.addr,
            len: sge.length.into(),
            need,
        };
        match self.local.resolve(&access) {
            Some(span) => Ok(span),
            None => self
                .local
                .look_up(table, &access, |inner| inner.find_local(pd, sge.lkey)),
        }
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
        let access = Access {
            pd,
            key: reth.rkey.0,
            addr: reth.va,
            len: reth.dma_len.into(),
            need,
        };
        match self.remote.resolve(&access) {
            Some(span) => Ok(span),
            None => self
                .remote
                .look_up(table, &access, |inner| inner.find_remote(pd, qpn, reth.rkey)),
        }
    }
}
