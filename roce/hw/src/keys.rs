//! Keys: memory windows, which work requests open and close.

use roce_verbs::{
    AccessFlags, Payload, RKey, SendFlags, SendOp, SendWr,
    provider::{GrantOf, Granted, KeyId, KeyKind, MrId, PdId, QpId, Revoked, VerbsError},
    wr::PostError,
};

use crate::{
    advice,
    device::{FULL, HwDevice, Mr},
    post::refused,
    qp::Qp,
    sys::{self, Bind, Kind, Mw, SendList},
};

const NO_KEY: PostError = PostError::Invalid("no such key");
/// What a window may be opened for; the rest are rights of registrations.
const RIGHTS: AccessFlags = AccessFlags::REMOTE_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

/// A key.
pub(crate) struct Key {
    device: usize,
    pd: std::sync::Arc<sys::Pd>,
    kind: Kind,
    /// Gone if a new one could not be had when the former was closed.
    mw: Option<Mw>,
    /// What it is called once everything posted is executed.
    key: RKey,
    granted: bool,
    /// What it opens.
    mr: Option<MrId>,
    /// The queue pair that a type 2 window was bound by, whether it is open still or not.
    qp: Option<QpId>,
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

/// What is to be opened.
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

/// What closes a type 1 window. It names the region all the same: librxe reads its key from there.
const fn nothing(mr: &Mr) -> Bind<'_> {
    Bind {
        mr: &mr.raw,
        addr: mr.addr,
        length: 0,
        access: AccessFlags::empty(),
    }
}

impl Key {
    pub(crate) const fn device(&self) -> usize {
        self.device
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

    /// Has a new window in place of the former, which is closed with that.
    fn renew(&mut self) {
        self.granted = false;
        (self.mr, self.qp) = (None, None);
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

impl HwDevice {
    pub(crate) fn make_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError> {
        let pd = self.pd(pd)?;
        let caps = &self.caps[pd.device];
        let kind = match kind {
            KeyKind::Window1 if caps.window_1 => Kind::One,
            KeyKind::Window2 if caps.window_2 => Kind::Two,
            _ => return Err(VerbsError::Unsupported("keys of this kind")),
        };
        let mw = Mw::alloc(&pd.raw, kind).map_err(|e| advice::failed("making a memory window", e))?;
        let key = Key {
            device: pd.device,
            pd: pd.raw.clone(),
            kind,
            key: mw.rkey(),
            mw: Some(mw),
            granted: false,
            mr: None,
            qp: None,
        };
        self.keys.insert(key).ok_or(FULL)
    }

    pub(crate) fn end_key(&mut self, id: KeyId) {
        if let Some(key) = self.keys.remove(id) {
            self.opened.remove(&key.key.0);
        }
    }

    pub(crate) fn grant_key(
        &mut self,
        qp_id: QpId,
        id: KeyId,
        grant: &GrantOf,
        wr_id: u64,
    ) -> Result<Granted, PostError> {
        self.sender(qp_id)?;
        let no_mr = PostError::Invalid("no such registration");
        let mr = self.mrs.get(grant.mr).ok_or(no_mr)?;
        let bind = bind(mr, grant)?;
        let (Some(qp), Some(key)) = (self.qps.get_mut(qp_id), self.keys.get_mut(id)) else {
            return Err(NO_KEY);
        };
        if [key.device, mr.device] != [qp.device; 2] {
            return Err(PostError::Invalid(
                "the key, the region and the queue pair are of different devices",
            ));
        }
        let former = key.key;
        match key.kind {
            Kind::One => key.post_1(qp, &bind, wr_id)?,
            Kind::Two => {
                key.post_2(qp, &mut self.sends, &bind, wr_id)?;
                self.opened.remove(&former.0);
                self.opened.insert(key.key.0, id);
            }
        }
        (key.granted, key.mr, key.qp) = (true, Some(grant.mr), Some(qp_id));
        Ok(Granted::Queued(key.key))
    }

    pub(crate) fn revoke_key(&mut self, qp: QpId, id: KeyId, wr_id: u64) -> Result<Revoked, PostError> {
        if self.qps.get(qp).is_none() {
            return Err(PostError::NoQueuePair);
        }
        if !self.keys.get(id).ok_or(NO_KEY)?.granted {
            return Ok(Revoked::Now);
        }
        self.sender(qp)?;
        let (Some(of), Some(key)) = (self.qps.get_mut(qp), self.keys.get_mut(id)) else {
            return Err(NO_KEY);
        };
        match key.kind {
            Kind::One => {
                let mr = key.mr.and_then(|mr| self.mrs.get(mr)).ok_or(NO_KEY)?;
                key.post_1(of, &nothing(mr), wr_id)?;
            }
            Kind::Two => {
                let close = local_invalidate(key.key, wr_id, SendFlags::SIGNALED);
                self.send(qp, &[close]).map_err(|(_, e)| e)?;
            }
        }
        if let Some(key) = self.keys.get_mut(id) {
            key.granted = false;
            self.opened.remove(&key.key.0);
        }
        Ok(Revoked::Queued)
    }

    /// A SEND with invalidate has closed a type 2 window.
    pub(crate) fn closed_by_peer(&mut self, rkey: RKey) {
        let id = self.opened.remove(&rkey.0);
        if let Some(key) = id.and_then(|id| self.keys.get_mut(id)) {
            key.granted = false;
        }
    }

    /// The same, at once: there is no such thing but giving the window up. The work request that was to take the key back may have been
    /// flushed.
    pub(crate) fn shut_key(&mut self, id: KeyId) {
        if let Some(key) = self.keys.get_mut(id).filter(|key| key.mr.is_some()) {
            self.opened.remove(&key.key.0);
            key.renew();
        }
    }

    /// Gives up the type 2 windows that were bound by a queue pair which is about to end: rdma_rxe waits for them, 50 s long.
    pub(crate) fn close_keys_through(&mut self, qp: QpId) {
        let bound = |key: &&mut Key| key.qp == Some(qp) && key.kind == Kind::Two;
        for key in self.keys.iter_mut().filter(bound) {
            self.opened.remove(&key.key.0);
            key.renew();
        }
    }

    /// Closes what opens a registration that is about to end. A window that was closed by a work request that is under way is bound
    /// still.
    pub(crate) fn close_keys_of(&mut self, mr: MrId) {
        for key in self.keys.iter_mut().filter(|key| key.mr == Some(mr)) {
            self.opened.remove(&key.key.0);
            key.renew();
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
