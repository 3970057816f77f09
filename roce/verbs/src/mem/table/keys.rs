//! Use of keys: resolving them for work requests and peers, and the work requests that open and close them.

use crate::{
    AccessFlags, Sge,
    wr::{BindWindow, FastRegister},
};
use roce_bth::{LKey, Qpn, RKey};
use smallvec::SmallVec;

use super::{
    MemoryTable,
    entries::{BoundTo, Kind},
};
use crate::mem::{
    error::KeyError,
    object::{Open, PdHandle, WindowKind},
    span::{Mapping, Span},
};

impl MemoryTable {
    /// Checks a local scatter/gather element. `need` is empty for reading and [`AccessFlags::LOCAL_WRITE`] for writing.
    ///
    /// # Errors
    /// When key, domain, range or rights don't fit; windows have no local key.
    pub fn resolve_local(&self, pd: PdHandle, sge: &Sge, need: AccessFlags) -> Result<Span, KeyError> {
        let inner = self.inner.read();
        inner.find_local(pd, sge.lkey)?.span(sge.addr, sge.length.into(), need)
    }

    /// Checks a range that a peer names (IBA C9-81 ff.). Don't ask for 0 bytes: their key is not checked (C9-88).
    ///
    /// # Errors
    /// When key, domain, queue pair, range or rights don't fit.
    pub fn resolve_remote(
        &self,
        pd: PdHandle,
        qpn: Qpn,
        rkey: RKey,
        addr: u64,
        len: u32,
        need: AccessFlags,
    ) -> Result<Span, KeyError> {
        let inner = self.inner.read();
        inner.find_remote(pd, qpn, rkey)?.span(addr, len.into(), need)
    }

    /// Returns address and length of what is open under a key now, for the text of an error. `None` if nothing is.
    pub fn open_range(&self, key: u32) -> Option<(u64, u64)> {
        let inner = self.inner.read();
        let open = inner.entry(key).ok()?.open.as_ref()?;
        Some((open.iova, open.len()))
    }

    /// Checks a key that a peer wants everything flushed behind, and returns all that it opens.
    ///
    /// # Errors
    /// When key, domain, queue pair or rights don't fit.
    pub fn resolve_whole(&self, pd: PdHandle, qpn: Qpn, rkey: RKey, need: AccessFlags) -> Result<Span, KeyError> {
        let inner = self.inner.read();
        let open = inner.find_remote(pd, qpn, rkey)?;
        open.span(open.iova, open.len(), need)
    }

    /// Executes a fast registration: from now on the key opens the range of the backing region.
    ///
    /// # Errors
    /// When the target is open already (invalidate it first), or backing region, range or rights don't fit.
    pub fn fast_register(&self, pd: PdHandle, args: &FastRegister) -> Result<(), KeyError> {
        let piece = (args.lkey, args.addr, args.length);
        self.open_fast(pd, args.key, [piece], args.iova, args.access)
    }

    /// The same with several pieces of regions, each given as a local element: from now on the key opens them as one range, from
    /// the address `iova` on (zero with [`AccessFlags::ZERO_BASED`]), in this order.
    ///
    /// # Errors
    /// As [`MemoryTable::fast_register`]; also with the right to atomics, which pieces have no order for.
    pub fn fast_register_list(
        &self,
        pd: PdHandle,
        key: RKey,
        pieces: &[Sge],
        iova: u64,
        access: AccessFlags,
    ) -> Result<(), KeyError> {
        if access.contains(AccessFlags::REMOTE_ATOMIC) {
            return Err(KeyError::Access);
        }
        let pieces = pieces.iter().map(|piece| (piece.lkey, piece.addr, piece.length.into()));
        self.open_fast(pd, key, pieces, iova, access)
    }

    fn open_fast(
        &self,
        pd: PdHandle,
        key: RKey,
        pieces: impl IntoIterator<Item = (LKey, u64, u64)>,
        iova: u64,
        access: AccessFlags,
    ) -> Result<(), KeyError> {
        let mut inner = self.inner.write();
        let view = |(lkey, addr, length)| inner.fast_view(pd, lkey, addr, length, access);
        let mut views = pieces.into_iter().map(view).collect::<Result<SmallVec<[_; 1]>, _>>()?;
        let mapping = match views.len() {
            1 => views.remove(0),
            _ => Mapping::scattered(views).ok_or(KeyError::Range)?,
        };
        inner.open_fast(pd, key, Open::new(mapping, iova, access))
    }

    /// Executes a window bind (IBA 10.6.7.2, C10-72 to C10-75).
    ///
    /// # Errors
    /// When window or region can't be bound like this; the window stays as it was.
    pub fn bind_window(&self, pd: PdHandle, qpn: Qpn, args: &BindWindow) -> Result<(), KeyError> {
        let mut inner = self.inner.write();
        let target = inner.entries.get(&(args.key.0 >> 8)).ok_or(KeyError::Unknown)?;
        let Kind::Window(window, _) = &target.kind else {
            return Err(KeyError::State);
        };
        let kind = window.kind;
        if target.pd != pd && kind != WindowKind::Type2A {
            return Err(KeyError::WrongPd);
        }
        if kind.is_type2() && (target.open.is_some() || args.length == 0) {
            return Err(KeyError::State);
        }
        if kind == WindowKind::Type1 && args.access.contains(AccessFlags::ZERO_BASED) {
            return Err(KeyError::Access);
        }
        let open = match args.length {
            0 => None,
            _ => Some(inner.window_view(pd, args)?),
        };
        let to = BoundTo {
            region: open.is_some().then_some(args.lkey.0 >> 8),
            qpn: kind.is_type2().then_some(qpn),
        };
        inner.bind(args.key, open, to);
        Ok(())
    }

    /// Closes a fast region or a type-2 window: a local invalidate, or a SEND with invalidate from a peer
    /// (IBA 10.6.7.2.6). A window must belong to the queue pair `qpn`.
    ///
    /// # Errors
    /// When the key does not name such an object, or windows are bound to the region.
    pub fn invalidate(&self, pd: PdHandle, qpn: Qpn, rkey: RKey) -> Result<(), KeyError> {
        let mut inner = self.inner.write();
        let entry = inner.find_for(pd, rkey)?;
        match &entry.kind {
            Kind::Region => return Err(KeyError::State),
            Kind::Fast(_) if !entry.windows.is_empty() => return Err(KeyError::State),
            Kind::Window(window, _) if window.kind == WindowKind::Type1 => return Err(KeyError::State),
            Kind::Window(_, to) if to.qpn.is_some_and(|owner| owner != qpn) => return Err(KeyError::WrongQp),
            Kind::Fast(_) | Kind::Window(..) => {}
        }
        inner.close(rkey.0 >> 8);
        Ok(())
    }

    /// Closes the type-2 windows of a queue pair that is going away.
    pub fn forget_qp(&self, qpn: Qpn) {
        let mut inner = self.inner.write();
        for index in inner.qp_windows.remove(&qpn.value()).unwrap_or_default() {
            inner.close(index);
        }
    }
}
