//! Keys that are granted and taken back: at once, or by work requests as hardware does it.

use roce_verbs::mem::{KeyError, MemoryTable, PdHandle, Renewable, RenewedKey, WindowKind};
use roce_verbs::{
    AccessFlags, Payload, Qpn, RKey, SendFlags, SendOp, SendWr, Sge,
    provider::{GrantOf, Granted, KeyId, KeyKind, PdId, QpId, Revoked, VerbsError},
    wr::{FastRegister, PostError},
};
use smallvec::SmallVec;

use super::{Of, Qp, Soft, log_failed, mem_error};
use crate::fabric::{
    backend::{Backend as _, Keys},
    ports::Ports,
};

const NO_KEY: PostError = PostError::Invalid("no such key");
const OUTSIDE: PostError = PostError::Invalid("the range is outside the region");
const NOT_LIKE_THIS: PostError = PostError::Invalid("the key can't be granted like this");

/// Remote key.
pub(super) struct Key {
    port: usize,
    pd: PdHandle,
    renewed: RenewedKey,
    /// Queue pair that it was granted through last.
    through: Option<QpId>,
}

impl Key {
    fn set(&mut self, key: RKey, granted: bool) {
        (self.renewed.posted.key, self.renewed.posted.granted) = (key, granted);
    }
}

/// Does at once what a work request for a key would do.
fn execute(mem: &MemoryTable, pd: PdHandle, qpn: Qpn, op: &SendOp) -> Result<(), PostError> {
    let done = match op {
        SendOp::FastRegister(args) => mem.fast_register(pd, args),
        SendOp::BindWindow(args) => mem.bind_window(pd, qpn, args),
        SendOp::LocalInvalidate(key) => {
            // The peer may have closed it already (SEND with invalidate).
            let _ = mem.invalidate(pd, qpn, *key);
            Ok(())
        }
        _ => Ok(()),
    };
    done.map_err(|e| refused(qpn, &e))
}

fn refused(qpn: Qpn, e: &KeyError) -> PostError {
    tracing::debug!(%qpn, "a key was not granted: {e}");
    NOT_LIKE_THIS
}

impl<P: Ports> Soft<P> {
    /// Returns the range of a grant, still without a key.
    fn range(&self, grant: &GrantOf) -> Result<FastRegister, PostError> {
        let mr = self.mrs.get(grant.mr);
        let region = &mr.ok_or(PostError::Invalid("no such registration"))?.object;
        let end = grant.offset.checked_add(grant.len);
        if end.is_none_or(|end| end > region.len()) {
            return Err(OUTSIDE);
        }
        let addr = region.addr().wrapping_add(grant.offset as u64);
        Ok(FastRegister {
            key: RKey::default(),
            lkey: region.lkey(),
            addr,
            length: grant.len as u64,
            iova: grant.iova.unwrap_or(addr),
            access: grant.access,
        })
    }

    /// Returns a key in its current state, the queue pair to use it with, and the memory table of both.
    fn key(&mut self, qp: QpId, id: KeyId) -> Result<(&mut Key, Qp, &MemoryTable), PostError> {
        let qp = *self.qps.get(qp).ok_or(PostError::NoQueuePair)?;
        let key = self.keys.get_mut(id).ok_or(NO_KEY)?;
        Ok((key, qp, self.ports.memory(qp.port)))
    }

    fn set_granted(&mut self, id: KeyId, next: RKey, through: QpId) {
        if let Some(key) = self.keys.get_mut(id) {
            key.set(next, true);
            key.through = Some(through);
        }
    }

    /// Executes operations on a key: at once, or by work requests, of which the last is signalled.
    fn perform(&mut self, through: QpId, id: KeyId, ops: &[SendOp], wr_id: u64) -> Result<(), PostError> {
        if self.config.instant_keys {
            let qp = self.qps.get(through).ok_or(PostError::NoQueuePair)?;
            let mem = self.ports.memory(qp.port);
            return ops.iter().try_for_each(|op| execute(mem, qp.pd, qp.qpn, op));
        }
        let wr = |(i, op): (usize, &SendOp)| SendWr {
            wr_id,
            op: *op,
            flags: match i + 1 == ops.len() {
                true => SendFlags::SIGNALED,
                false => SendFlags::empty(),
            },
            payload: Payload::Sges(&[]),
        };
        let wrs: SmallVec<[_; 2]> = ops.iter().enumerate().map(wr).collect();
        self.post_send(through, &wrs).map_err(|(done, e)| {
            // The end of the former key alone may have been taken.
            if let Some(key) = self.keys.get_mut(id).filter(|_| done > 0) {
                key.renewed.posted.granted = false;
            }
            e
        })
    }

    fn qpn_of(&self, qp: Option<QpId>) -> Qpn {
        qp.and_then(|qp| self.qpn(qp)).unwrap_or_default()
    }

    /// Returns whether a key opens memory for writes of peers.
    pub(crate) fn opens(&self, key: KeyId) -> bool {
        let Some(key) = self.keys.get(key) else {
            return false;
        };
        let mem = self.ports.memory(key.port);
        let open = mem.resolve_whole(
            key.pd,
            self.qpn_of(key.through),
            key.renewed.posted.key,
            AccessFlags::REMOTE_WRITE,
        );
        open.is_ok_and(|span| !span.is_empty())
    }

    pub(crate) fn grant_list(&mut self, through: QpId, id: KeyId, pieces: &[GrantOf]) -> Result<Granted, PostError> {
        if !self.config.instant_keys {
            return Err(PostError::Invalid(
                "keys that are granted by work requests open one piece of memory",
            ));
        }
        let ranges = pieces.iter().map(|piece| self.range(piece));
        let ranges: Vec<FastRegister> = ranges.collect::<Result<_, _>>()?;
        let first = *ranges.first().ok_or(PostError::Invalid("a key for nothing"))?;
        let sge = |range: &FastRegister| {
            Ok(Sge {
                addr: range.addr,
                length: u32::try_from(range.length).map_err(|_| OUTSIDE)?,
                lkey: range.lkey,
            })
        };
        let sges: Vec<Sge> = ranges.iter().map(sge).collect::<Result<_, _>>()?;
        let (key, qp, mem) = self.key(through, id)?;
        if !matches!(key.renewed.object, Renewable::Fast(_)) {
            return Err(PostError::Invalid(
                "only fast registrations open several pieces of memory",
            ));
        }
        let posted = &mut key.renewed.posted;
        if posted.granted {
            execute(mem, qp.pd, qp.qpn, &SendOp::LocalInvalidate(posted.key))?;
        }
        let next = posted.next(mem);
        let made = mem.fast_register_list(qp.pd, next, &sges, first.iova, first.access);
        made.map_err(|e| refused(qp.qpn, &e))?;
        self.set_granted(id, next, through);
        Ok(Granted::Now(next))
    }
}

impl<P: Ports> Keys for Soft<P> {
    fn alloc_key(&mut self, pd: PdId, kind: KeyKind, id: KeyId) -> Result<(), VerbsError> {
        let &Of { port, object: pd, .. } = self.pd(pd)?;
        let mem = self.ports.memory(port);
        let window = |kind| mem.alloc_window(pd, kind).map(Renewable::Window);
        let made = match kind {
            KeyKind::FastRegistration if self.config.fast_registration => mem.alloc_fast(pd).map(Renewable::Fast),
            KeyKind::Window1 if self.config.windows => window(WindowKind::Type1),
            KeyKind::Window2 if self.config.windows => window(WindowKind::Type2),
            _ => return Err(VerbsError::Unsupported("keys of this kind")),
        };
        let key = Key {
            port,
            pd,
            renewed: RenewedKey::new(made.map_err(mem_error)?),
            through: None,
        };
        self.keys.insert(id, key);
        Ok(())
    }

    fn free_key(&mut self, key: KeyId) {
        if let Some(key) = self.keys.remove(key) {
            log_failed("releasing a key", key.renewed.release(self.ports.memory(key.port)));
        }
    }

    fn grant(&mut self, through: QpId, id: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError> {
        let at = self.range(grant)?;
        let (key, _, mem) = self.key(through, id)?;
        let (next, ops) = key.renewed.grant(mem, at);
        self.perform(through, id, &ops, wr_id)?;
        self.set_granted(id, next, through);
        Ok(match self.config.instant_keys {
            true => Granted::Now(next),
            false => Granted::Queued(next),
        })
    }

    fn revoke(&mut self, through: QpId, id: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        let (key, _, mem) = self.key(through, id)?;
        if !key.renewed.posted.granted {
            return Ok(Revoked::Now);
        }
        let (after, close) = key.renewed.revoke(mem);
        self.perform(through, id, &[close], wr_id)?;
        if let Some(key) = self.keys.get_mut(id) {
            key.set(after, false);
        }
        Ok(match self.config.instant_keys {
            true => Revoked::Now,
            false => Revoked::Queued,
        })
    }

    /// The work request that was to take it back may have been flushed.
    fn close_key(&mut self, id: KeyId) {
        let through = self.keys.get(id).and_then(|key| key.through);
        let qpn = self.qpn_of(through);
        let Some(key) = self.keys.get_mut(id) else { return };
        let mem = self.ports.memory(key.port);
        let before = key.renewed.posted.key;
        let (after, close) = key.renewed.revoke(mem);
        // It may be closed already, as a type 2 window is when its queue pair is gone.
        let done = execute(mem, key.pd, qpn, &close);
        key.set(if done.is_ok() { after } else { before }, false);
    }
}
