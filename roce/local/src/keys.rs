//! Keys that are granted and taken back: at once, or by work requests as hardware does it.

use roce_mem::{PdHandle, PostedKey, WindowKind};
use roce_verbs::{
    AccessFlags, Payload, Qpn, SendFlags, SendOp, SendWr, Sge,
    provider::{GrantOf, Granted, KeyId, KeyKind, Provider as _, QpId, Revoked, VerbsError},
    wr::PostError,
};

use crate::{
    fabric::{Fabric, mem_error},
    objects::{KeyObject, Range, SoftKey},
    ports::Ports,
    tables::{Key, Mr, NO_KEY, NO_MR},
};

const OUTSIDE: PostError = PostError::Invalid("the range is outside the region");
const NOT_LIKE_THIS: PostError = PostError::Invalid("the key can't be granted like this");

impl<P: Ports> Fabric<P> {
    pub(crate) fn alloc_soft_key(&self, port: usize, pd: PdHandle, kind: KeyKind) -> Result<SoftKey, VerbsError> {
        let mem = self.ports.memory(port);
        let there = match kind {
            KeyKind::FastRegistration => self.config.fast_registration,
            KeyKind::Window1 | KeyKind::Window2 => self.config.windows,
        };
        if !there {
            return Err(VerbsError::Unsupported("keys of this kind"));
        }
        let window = |kind| mem.alloc_window(pd, kind).map(KeyObject::Window);
        let object = match kind {
            KeyKind::FastRegistration => mem.alloc_fast(pd).map(KeyObject::Fast),
            KeyKind::Window1 => window(WindowKind::Type1),
            KeyKind::Window2 => window(WindowKind::Type2),
        };
        let object = object.map_err(mem_error)?;
        let key = match &object {
            KeyObject::Fast(fast) => fast.rkey(),
            KeyObject::Window(window) => window.rkey(),
        };
        Ok(SoftKey {
            port,
            pd,
            object,
            posted: PostedKey::new(key),
            through: None,
            shared: None,
            borrowed: false,
        })
    }

    pub(crate) fn free_soft_key(&self, key: &SoftKey) {
        if key.borrowed {
            return;
        }
        let mem = self.ports.memory(key.port);
        let done = match &key.object {
            KeyObject::Fast(fast) => mem.dealloc_fast(fast),
            KeyObject::Window(window) => mem.dealloc_window(window),
        };
        if let Err(e) = done {
            tracing::error!("releasing a key failed: {e}");
        }
    }

    fn soft_key(&mut self, id: KeyId) -> Option<&mut SoftKey> {
        match self.tables.keys.get_mut(id) {
            Some(Key::Soft(key)) => Some(key),
            _ => None,
        }
    }

    /// Returns the range of the granted bytes.
    fn range(&self, grant: &GrantOf) -> Result<Range, PostError> {
        let Some(Mr::Soft { region, .. }) = self.tables.mrs.get(grant.mr) else {
            return Err(NO_MR);
        };
        let end = grant.offset.checked_add(grant.len);
        if end.is_none_or(|end| end > region.len()) {
            return Err(OUTSIDE);
        }
        let addr = region.addr().wrapping_add(grant.offset as u64);
        Ok(Range {
            lkey: region.lkey(),
            addr,
            length: grant.len as u64,
            iova: grant.iova.unwrap_or(addr),
        })
    }

    pub(crate) fn grant_key(&mut self, qp: QpId, id: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        let at = self.range(grant)?;
        let (port, qpn, _) = self.soft_qp(qp).ok_or(PostError::NoQueuePair)?;
        let mem = self.ports.memory(port).clone();
        let key = self.soft_key(id).ok_or(NO_KEY)?;
        key.refresh();
        let next = key.posted.next(&mem);
        let open = key.open(next, &at, grant.access);
        // A type 1 window may be bound anew; the others are closed first.
        let close = (key.posted.granted && !key.is_window_1()).then_some(SendOp::LocalInvalidate(key.posted.key));
        let granted = match self.config.instant_keys {
            true => {
                for op in close.iter().chain([&open]) {
                    self.execute(qp, qpn, op)?;
                }
                Granted::Now(next)
            }
            false => {
                self.post_keys(qp, id, close.as_slice(), open, wr_id)?;
                Granted::Queued(next)
            }
        };
        if let Some(key) = self.soft_key(id) {
            (key.posted.key, key.posted.granted, key.through) = (next, true, Some(qp));
            key.publish();
        }
        Ok(granted)
    }

    pub(crate) fn grant_pieces(&mut self, qp: QpId, id: KeyId, pieces: &[GrantOf]) -> Result<Granted, PostError> {
        if !self.config.instant_keys {
            return Err(PostError::Invalid(
                "keys that are granted by work requests open one piece of memory",
            ));
        }
        let ranges = pieces.iter().map(|piece| self.range(piece));
        let ranges: Vec<Range> = ranges.collect::<Result<_, _>>()?;
        let (Some(first), Some(Range { iova, .. })) = (pieces.first(), ranges.first()) else {
            return Err(PostError::Invalid("a key for nothing"));
        };
        let sge = |range: &Range| {
            let length = u32::try_from(range.length).map_err(|_| OUTSIDE)?;
            Ok::<_, PostError>(Sge {
                addr: range.addr,
                length,
                lkey: range.lkey,
            })
        };
        let sges: Vec<Sge> = ranges.iter().map(sge).collect::<Result<_, _>>()?;
        let (port, qpn, pd) = self.soft_qp(qp).ok_or(PostError::NoQueuePair)?;
        let mem = self.ports.memory(port).clone();
        let key = self.soft_key(id).ok_or(NO_KEY)?;
        if !matches!(key.object, KeyObject::Fast(_)) {
            return Err(PostError::Invalid(
                "only fast registrations open several pieces of memory",
            ));
        }
        key.refresh();
        if key.posted.granted {
            // The peer may have closed it already.
            let _ = mem.invalidate(pd, qpn, key.posted.key);
        }
        let next = key.posted.next(&mem);
        mem.fast_register_list(pd, next, &sges, *iova, first.access)
            .map_err(|e| {
                tracing::debug!(%qpn, "a key was not granted: {e}");
                NOT_LIKE_THIS
            })?;
        (key.posted.key, key.posted.granted, key.through) = (next, true, Some(qp));
        key.publish();
        Ok(Granted::Now(next))
    }

    /// Posts the end of the former key and what comes after it; the last is signalled.
    fn post_keys(&mut self, qp: QpId, id: KeyId, before: &[SendOp], last: SendOp, wr_id: u64) -> Result<(), PostError> {
        let wr = |op, flags| SendWr {
            wr_id,
            op,
            flags,
            payload: Payload::Sges(&[]),
        };
        let mut wrs: Vec<_> = before.iter().map(|op| wr(*op, SendFlags::empty())).collect();
        wrs.push(wr(last, SendFlags::SIGNALED));
        self.post_send(qp, &wrs).map_err(|(done, e)| {
            // The end of the former key alone may have been taken.
            if let Some(key) = self.soft_key(id).filter(|_| done > 0) {
                key.posted.granted = false;
                key.publish();
            }
            e
        })
    }

    pub(crate) fn revoke_key(&mut self, qp: QpId, id: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        let (port, qpn, _) = self.soft_qp(qp).ok_or(PostError::NoQueuePair)?;
        let mem = self.ports.memory(port).clone();
        let key = self.soft_key(id).ok_or(NO_KEY)?;
        key.refresh();
        if !key.posted.granted {
            return Ok(Revoked::Now);
        }
        let next = key.posted.next(&mem);
        let (close, renewed) = (key.close(next), key.is_window_1());
        let revoked = match self.config.instant_keys {
            true => {
                self.execute(qp, qpn, &close)?;
                Revoked::Now
            }
            false => {
                self.post_keys(qp, id, &[], close, wr_id)?;
                Revoked::Queued
            }
        };
        if let Some(key) = self.soft_key(id) {
            key.posted.granted = false;
            if renewed {
                key.posted.key = next;
            }
            key.publish();
        }
        Ok(revoked)
    }

    /// Does at once what a work request for a key would do.
    fn execute(&self, qp: QpId, qpn: Qpn, op: &SendOp) -> Result<(), PostError> {
        let (port, _, pd) = self.soft_qp(qp).ok_or(PostError::NoQueuePair)?;
        let mem = self.ports.memory(port);
        let done = match op {
            SendOp::FastRegister(args) => mem.fast_register(pd, args),
            SendOp::BindWindow(args) => mem.bind_window(pd, qpn, args),
            SendOp::LocalInvalidate(key) => match mem.invalidate(pd, qpn, *key) {
                // The peer has closed it already (SEND with invalidate).
                Err(_) => Ok(()),
                done => done,
            },
            _ => Ok(()),
        };
        done.map_err(|e| {
            tracing::debug!(%qpn, "a key was not granted: {e}");
            NOT_LIKE_THIS
        })
    }

    /// Returns whether a software device's key opens memory for writes of peers: for tests of who grants and takes back.
    pub fn opens(&self, key: KeyId) -> bool {
        let Some(Key::Soft(key)) = self.tables.keys.get(key) else {
            return false;
        };
        let qpn = key.through.and_then(|qp| self.qpn(qp)).unwrap_or_default();
        let mem = self.ports.memory(key.port);
        let open = mem.resolve_whole(key.pd, qpn, key.current(), AccessFlags::REMOTE_WRITE);
        open.is_ok_and(|span| !span.is_empty())
    }

    /// Closes a key whatever has become of the queue pair that it was granted through. The work request that was to take it back may
    /// have been flushed.
    pub(crate) fn shut_key(&mut self, id: KeyId) {
        let Some(through) = self.soft_key(id).map(|key| key.through) else {
            return;
        };
        let qpn = through.and_then(|qp| self.qpn(qp)).unwrap_or_default();
        let Some(Key::Soft(key)) = self.tables.keys.get_mut(id) else {
            return;
        };
        let mem = self.ports.memory(key.port);
        key.refresh();
        let next = key.posted.next(mem);
        match key.close(next) {
            // It may be closed already, as a type 2 window is when its queue pair is gone.
            SendOp::LocalInvalidate(rkey) => drop(mem.invalidate(key.pd, qpn, rkey)),
            SendOp::BindWindow(args) if mem.bind_window(key.pd, qpn, &args).is_ok() => key.posted.key = next,
            _ => {}
        }
        key.posted.granted = false;
        key.publish();
    }
}
