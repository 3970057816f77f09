//! Keys: memory windows, which work requests open and close.

use std::sync::Arc;

use roce_verbs::{
    AccessFlags, RKey, SendFlags,
    provider::{DeviceCaps, GrantOf, Granted, KeyKind, MrId, QpId, Revoked, VerbsError},
    wr::PostError,
};

use crate::{
    advice,
    device::Pd,
    qp::{Qp, local_invalidate},
    sys::{self, Bind, Mr, Mw, SendList},
};

pub(crate) const NO_KEY: PostError = PostError::Invalid("no such key");
/// Rights that a window may have; the rest are rights of registrations.
const RIGHTS: AccessFlags = AccessFlags::REMOTE_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

/// Key that work requests grant and revoke.
pub(crate) struct Key {
    pub(crate) device: usize,
    pd: Arc<sys::Pd>,
    kind: KeyKind,
    /// `None` if no new window could be allocated when the former was closed.
    mw: Option<Mw>,
    /// Remote key once everything posted is executed.
    key: RKey,
    granted: bool,
    /// Registration that it was bound to last.
    pub(crate) mr: Option<MrId>,
    /// Queue pair that it was bound through last.
    pub(crate) qp: Option<QpId>,
}

/// Returns the key with another last byte.
fn next(key: RKey) -> RKey {
    let mut random = [key.0 as u8];
    while random[0] == key.0 as u8 {
        // Without randomness keys can be guessed, but work.
        if getrandom::fill(&mut random).is_err() {
            random[0] = (key.0 as u8).wrapping_add(1);
        }
    }
    RKey(key.0 & !0xff | u32::from(random[0]))
}

/// Returns the binding to the range of a grant.
fn bind<'a>(mr: &'a Mr, grant: &GrantOf) -> Result<Bind<'a>, PostError> {
    let end = grant.offset.checked_add(grant.len);
    if end.is_none_or(|end| end > mr.len()) || grant.len == 0 {
        return Err(PostError::Invalid("the range is outside the region"));
    }
    let addr = mr.addr().wrapping_add(grant.offset as u64);
    if grant.iova.is_some_and(|iova| iova != addr) {
        return Err(PostError::Invalid("a window has the addresses of its region"));
    }
    Ok(Bind {
        mr,
        addr,
        length: grant.len as u64,
        access: grant.access & RIGHTS,
    })
}

impl Key {
    /// Allocates a window of a device with these capabilities.
    pub(crate) fn alloc(pd: &Pd, caps: &DeviceCaps, kind: KeyKind) -> Result<Self, VerbsError> {
        match kind {
            KeyKind::Window1 if caps.window_1 => {}
            KeyKind::Window2 if caps.window_2 => {}
            _ => return Err(VerbsError::Unsupported("keys of this kind")),
        }
        let mw = Mw::alloc(&pd.raw, kind).map_err(|e| advice::failed("making a memory window", e))?;
        Ok(Self {
            device: pd.device,
            pd: pd.raw.clone(),
            kind,
            key: mw.rkey(),
            mw: Some(mw),
            granted: false,
            mr: None,
            qp: None,
        })
    }

    pub(crate) fn rkey(&self) -> RKey {
        self.key
    }

    /// Returns whether it ends with its queue pair, and SEND with invalidate closes it.
    pub(crate) fn is_window_2(&self) -> bool {
        self.kind == KeyKind::Window2
    }

    /// Posts a binding to a range of a registration.
    pub(crate) fn grant(
        &mut self,
        qp: &mut Qp,
        mr: &Mr,
        list: &mut SendList,
        grant: &GrantOf,
        wr_id: u64,
    ) -> Result<Granted, PostError> {
        qp.check_sends()?;
        let bind = bind(mr, grant)?;
        let mw = self.mw.as_mut().ok_or(NO_KEY)?;
        if self.kind == KeyKind::Window1 {
            qp.post_bind_1(mw, &bind, wr_id)?;
            self.key = mw.rkey();
        } else {
            let (open, next) = (self.granted.then_some(self.key), next(self.key));
            let posted = qp.post_bind_2(list, (mw, open, next), &bind, wr_id);
            posted.map_err(|(closed, e)| {
                self.granted &= !closed;
                e
            })?;
            self.key = next;
        }
        self.granted = true;
        Ok(Granted::Queued(self.key))
    }

    /// Posts what closes it. `mr`: the registration it was bound to last.
    pub(crate) fn revoke(
        &mut self,
        qp: &mut Qp,
        mr: Option<&Mr>,
        list: &mut SendList,
        wr_id: u64,
    ) -> Result<Revoked, PostError> {
        if !self.granted {
            return Ok(Revoked::Now);
        }
        qp.check_sends()?;
        if self.kind == KeyKind::Window1 {
            let (mw, mr) = (self.mw.as_mut().ok_or(NO_KEY)?, mr.ok_or(NO_KEY)?);
            // It names the region all the same: librxe reads its key from there.
            let nothing = Bind {
                mr,
                addr: mr.addr(),
                length: 0,
                access: AccessFlags::empty(),
            };
            qp.post_bind_1(mw, &nothing, wr_id)?;
            self.key = mw.rkey();
        } else {
            let close = local_invalidate(self.key, wr_id, SendFlags::SIGNALED);
            qp.post_send(list, &[close]).map_err(|(_, e)| e)?;
        }
        self.granted = false;
        Ok(Revoked::Queued)
    }

    /// Notes that a SEND with invalidate has closed it.
    pub(crate) fn invalidated(&mut self) {
        self.granted = false;
    }

    /// Closes the window at once, by replacing it with a new one: verbs have no other way.
    pub(crate) fn replace(&mut self) {
        (self.granted, self.mr, self.qp) = (false, None, None);
        self.mw = None;
        match Mw::alloc(&self.pd, self.kind) {
            Ok(mw) => {
                self.key = mw.rkey();
                self.mw = Some(mw);
            }
            Err(e) => tracing::error!("no new memory window in place of one that was closed: {e}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{RKey, next};

    #[test]
    fn a_renewed_key_differs_in_its_last_byte_alone() {
        let mut key = RKey(0x0012_34ff);
        for _ in 0..1000 {
            let new = next(key);
            assert_eq!(new.0 >> 8, 0x1234);
            assert_ne!(new, key);
            key = new;
        }
    }
}
