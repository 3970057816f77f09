//! Keys: memory windows, which work requests open and close.

use std::sync::Arc;

use roce_verbs::{
    AccessFlags, Payload, RKey, SendFlags, SendOp, SendWr,
    provider::{DeviceCaps, GrantOf, Granted, KeyKind, Revoked, VerbsError},
    wr::PostError,
};

use crate::{
    advice,
    device::{Mr, Pd},
    post::refused,
    qp::Qp,
    sys::{self, Bind, Kind, Mw, SendList},
};

const NO_KEY: PostError = PostError::Invalid("no such key");
/// Rights that a window may have; the rest are rights of registrations.
const RIGHTS: AccessFlags = AccessFlags::REMOTE_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

/// Key that work requests grant and revoke.
pub(crate) struct Key {
    device: usize,
    pd: Arc<sys::Pd>,
    kind: Kind,
    /// `None` if no new window could be allocated when the former was closed.
    mw: Option<Mw>,
    /// Remote key once everything posted is executed.
    key: RKey,
    granted: bool,
}

/// A byte for a key, another than before.
fn another(byte: u8) -> u8 {
    loop {
        let mut random = [0];
        // Without randomness keys can be guessed, but work.
        if getrandom::fill(&mut random).is_err() {
            return byte.wrapping_add(1);
        }
        if random[0] != byte {
            return random[0];
        }
    }
}

fn next(key: RKey) -> RKey {
    RKey(key.0 & !0xff | u32::from(another(key.0 as u8)))
}

fn local_invalidate(key: RKey, wr_id: u64, flags: SendFlags) -> SendWr<'static> {
    SendWr {
        wr_id,
        op: SendOp::LocalInvalidate(key),
        flags,
        payload: Payload::Sges(&[]),
    }
}

/// Returns the binding to the range of a grant.
fn bind<'a>(mr: &'a Mr, grant: &GrantOf) -> Result<Bind<'a>, PostError> {
    let end = grant.offset.checked_add(grant.len);
    if end.is_none_or(|end| end > mr.len) || grant.len == 0 {
        return Err(PostError::Invalid("the range is outside the region"));
    }
    let addr = mr.addr.wrapping_add(grant.offset as u64);
    if grant.iova.is_some_and(|iova| iova != addr) {
        return Err(PostError::Invalid("a window has the addresses of its region"));
    }
    Ok(Bind {
        mr: &mr.raw,
        addr,
        length: grant.len as u64,
        access: grant.access & RIGHTS,
    })
}

/// Returns the binding that closes a type 1 window. It names the region all the same: librxe reads its key from there.
const fn nothing(mr: &Mr) -> Bind<'_> {
    Bind {
        mr: &mr.raw,
        addr: mr.addr,
        length: 0,
        access: AccessFlags::empty(),
    }
}

impl Key {
    /// Allocates a window of a device with these capabilities.
    pub(crate) fn alloc(pd: &Pd, caps: &DeviceCaps, kind: KeyKind) -> Result<Self, VerbsError> {
        let kind = match kind {
            KeyKind::Window1 if caps.window_1 => Kind::One,
            KeyKind::Window2 if caps.window_2 => Kind::Two,
            _ => return Err(VerbsError::Unsupported("keys of this kind")),
        };
        let mw = Mw::alloc(&pd.raw, kind).map_err(|e| advice::failed("making a memory window", e))?;
        Ok(Self {
            device: pd.device,
            pd: pd.raw.clone(),
            kind,
            key: mw.rkey(),
            mw: Some(mw),
            granted: false,
        })
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
        if [self.device, mr.device] != [qp.device; 2] {
            return Err(PostError::Invalid(
                "the key, the region and the queue pair are of different devices",
            ));
        }
        match self.kind {
            Kind::One => self.post_1(qp, &bind, wr_id)?,
            Kind::Two => self.post_2(qp, list, &bind, wr_id)?,
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
        match self.kind {
            Kind::One => self.post_1(qp, &nothing(mr.ok_or(NO_KEY)?), wr_id)?,
            Kind::Two => {
                let close = local_invalidate(self.key, wr_id, SendFlags::SIGNALED);
                qp.post_send(list, &[close]).map_err(|(_, e)| e)?;
            }
        }
        self.granted = false;
        Ok(Revoked::Queued)
    }

    /// Notes that a SEND with invalidate has closed it.
    pub(crate) fn invalidated(&mut self) {
        self.granted = false;
    }

    /// Posts a type 1 window's binding, which closes what it opened before.
    fn post_1(&mut self, qp: &mut Qp, bind: &Bind<'_>, wr_id: u64) -> Result<(), PostError> {
        let (Some(mw), Some(raw)) = (&mut self.mw, &qp.raw) else {
            return Err(NO_KEY);
        };
        if qp.send.is_full() {
            return Err(PostError::QueueFull);
        }
        let number = qp.send.push(wr_id);
        let posted = raw.post_bind_1(qp.send_id(number), mw, bind);
        if let Err(e) = posted {
            qp.send.unpush(1);
            return Err(refused(&e));
        }
        self.key = mw.rkey();
        Ok(())
    }

    /// Posts a type 2 window's binding, behind its end if it is open: it may be bound only when it is not.
    fn post_2(&mut self, qp: &mut Qp, list: &mut SendList, bind: &Bind<'_>, wr_id: u64) -> Result<(), PostError> {
        list.clear();
        if self.granted {
            if qp.send.is_full() {
                return Err(PostError::QueueFull);
            }
            let number = qp.send.push(wr_id);
            list.push(
                &local_invalidate(self.key, wr_id, SendFlags::empty()),
                qp.send_id(number),
            )?;
        }
        let before = list.len();
        let full = qp.send.is_full();
        let (Some(mw), Some(raw)) = (&mut self.mw, &qp.raw) else {
            qp.send.unpush(before);
            return Err(NO_KEY);
        };
        if full {
            qp.send.unpush(before);
            return Err(PostError::QueueFull);
        }
        let number = qp.send.push(wr_id);
        let key = next(self.key);
        if let Err((accepted, e)) = raw.post_bind_2(list, qp.send_id(number), (mw, key), bind) {
            qp.send.unpush(before + 1 - accepted);
            self.granted &= accepted == 0;
            return Err(refused(&e));
        }
        self.key = key;
        Ok(())
    }

    /// Closes the window at once, by replacing it with a new one: verbs have no other way.
    pub(crate) fn replace(&mut self) {
        self.granted = false;
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
