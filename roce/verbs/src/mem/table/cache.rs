//! Cache of the keys that a queue pair used last: most packets need no lock of the table.

use std::sync::{Arc, Weak};

use crate::{AccessFlags, Sge};
use roce_bth::{Qpn, Reth};

use super::{MemoryTable, entries::Inner};
use crate::mem::{
    error::KeyError,
    object::{Open, PdHandle},
    span::{Mapping, Span},
};

/// Local keys in a cache, and remote ones. Each costs a comparison when another one is used.
const KEYS: usize = 4;

/// Memory that a key opened when it was resolved.
#[derive(Debug)]
struct Cached {
    pd: PdHandle,
    key: u32,
    access: AccessFlags,
    iova: u64,
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

/// Keys of registrations that one queue pair used last. A peer that uses many keys in turn pushes out no local one.
#[derive(Debug, Default)]
pub struct KeyCache {
    local: Recent,
    remote: Recent,
}

/// Keys that were used last, the newest behind.
#[derive(Debug, Default)]
struct Recent(Vec<Cached>);

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
        let access = || Access {
            pd,
            key: sge.lkey.0,
            addr: sge.addr,
            len: sge.length.into(),
            need,
        };
        if let Some(span) = self.local.find(access()) {
            return Ok(span);
        }
        self.local
            .look_up(table, access(), |inner| inner.find_local(pd, sge.lkey))
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
        let access = || Access {
            pd,
            key: reth.rkey.0,
            addr: reth.va,
            len: reth.dma_len.into(),
            need,
        };
        if let Some(span) = self.remote.find(access()) {
            return Ok(span);
        }
        self.remote
            .look_up(table, access(), |inner| inner.find_remote(pd, qpn, reth.rkey))
    }
}

impl Recent {
    /// Resolves a range if the cache has the key, still open, with the rights for the access.
    #[inline(always)] // Its arguments stay in registers.
    fn find(&self, access: Access) -> Option<Span> {
        let mut keys = self.0.iter();
        let cached = keys.find(|c| c.key == access.key && c.pd == access.pd)?;
        if !cached.access.contains(access.need) {
            return None;
        }
        let mapping = cached.mapping.upgrade()?;
        if mapping.is_revoked() {
            return None;
        }
        let offset = usize::try_from(access.addr.wrapping_sub(cached.iova)).ok()?;
        Span::new(mapping, offset, access.len as usize)
    }

    /// Resolves a range by the table, and caches the key.
    #[cold]
    fn look_up(
        &mut self,
        table: &MemoryTable,
        access: Access,
        find: impl FnOnce(&Inner) -> Result<&Open, KeyError>,
    ) -> Result<Span, KeyError> {
        let inner = table.inner.read();
        let open = find(&inner)?;
        let span = open.span(access.addr, access.len, access.need)?;
        // The key of a window or fast registration is mostly used once.
        if open.mapping.is_view() {
            return Ok(span);
        }
        self.0.retain(|c| c.key != access.key || c.pd != access.pd);
        if self.0.len() == KEYS {
            self.0.remove(0);
        }
        self.0.push(Cached {
            pd: access.pd,
            key: access.key,
            access: open.access,
            iova: open.iova,
            mapping: Arc::downgrade(&open.mapping),
        });
        Ok(span)
    }
}
