//! Messages of the server over a path that is up.

use roce_verbs::{Completion, WcFlags, WcOpcode, provider::Revoked};

use crate::{
    IoError, PathError,
    client::{
        conn::Post,
        env::Env,
        inflight::{InFlightTable, Waits},
        path::Path,
    },
    mark::{Mark, MarkKind},
    proto::{Imm, IoReply, ProtoError, RkeyRsp},
};

/// A path with its session's requests.
pub(super) struct Answers<'a, 'b, 'c, U> {
    pub(super) path: &'a mut Path,
    pub(super) env: &'a mut Env<'b, 'c, U>,
    pub(super) inflight: &'a mut InFlightTable<U>,
}

impl<U> Answers<'_, '_, '_, U> {
    /// Handles a work request that has succeeded. Messages with session information are the handshake's.
    pub(super) fn completion(&mut self, cid: u16, mark: Mark, wc: &Completion) -> Result<(), PathError> {
        match mark.kind {
            MarkKind::Send => self.reclaim(cid),
            MarkKind::Revoke => {
                self.reclaim(cid);
                self.key_revoked(mark.index);
            }
            MarkKind::Recv => return self.received(cid, mark.index, wc),
            MarkKind::Info => return Err(PathError::Unexpected("a second information response")),
        }
        Ok(())
    }

    /// A signalled send is complete: there is room for more.
    fn reclaim(&mut self, cid: u16) {
        let Some(conn) = self.path.conns.get_mut(usize::from(cid)) else {
            return;
        };
        conn.queue.reclaim();
        if conn.queue.is_ready() {
            self.path.mark_dirty(self.env, cid);
        }
    }

    /// Handles a message. Its receive is posted again with the turn.
    fn received(&mut self, cid: u16, index: u32, wc: &Completion) -> Result<(), PathError> {
        if let Some(conn) = self.path.conns.get_mut(usize::from(cid)) {
            conn.used.push(index);
            self.path.mark_dirty(self.env, cid);
        }
        let with_imm = wc.flags.contains(WcFlags::WITH_IMM);
        let message = match wc.opcode == WcOpcode::Recv && with_imm {
            true => Some(self.key_message(index, wc)?),
            false => None,
        };
        self.path.received(self.env.cx.now);
        if wc.flags.contains(WcFlags::WITH_INV) {
            if self.path.revoked.len() >= self.inflight.depth() {
                return Err(PathError::Unexpected("more keys revoked than requests in flight"));
            }
            self.path.revoked.insert(wc.invalidated.0);
            return Ok(());
        }
        if !with_imm {
            return Err(PathError::Unexpected("a SEND without immediate value"));
        }
        match (Imm::decode(wc.imm)?, message) {
            (Imm::IoRsp(reply), message) => return self.reply(cid, reply, message),
            (Imm::HbMsg, None) => self.path.push(self.env, cid, Post::Imm(Imm::HbAck)),
            (Imm::HbAck, None) => {
                let now = self.env.cx.now;
                let time = self.path.up_mut().and_then(|up| up.keepalive.answer(now));
                self.path.latency = time.or(self.path.latency);
            }
            (Imm::IoReq(_), _) => return Err(PathError::Unexpected("a request from the server")),
            (_, Some(_)) => return Err(PathError::Unexpected("a key response with a heartbeat")),
        }
        Ok(())
    }

    /// The key response in a receive.
    fn key_message(&self, index: u32, wc: &Completion) -> Result<RkeyRsp, PathError> {
        let region = self.path.key_messages.as_ref();
        let region = region.ok_or(PathError::Unexpected("a key response without NEW_RKEY"))?;
        let mut bytes = [0; RkeyRsp::LEN];
        let len = (wc.byte_len as usize).min(RkeyRsp::LEN);
        // The index is from our own mark, so it is inside the region.
        let _ = region.pages.read(index as usize * RkeyRsp::LEN, &mut bytes[..len]);
        Ok(*RkeyRsp::parse(&bytes[..len])?)
    }

    fn reply(&mut self, cid: u16, reply: IoReply, message: Option<RkeyRsp>) -> Result<(), PathError> {
        let chunk = self.path.chunks.get_mut(reply.msg_id as usize);
        let chunk = chunk.ok_or(ProtoError::field(
            "message number",
            reply.msg_id,
            "a permit of the connection",
        ))?;
        if message.is_some_and(|m| u32::from(m.buf_id.get()) != reply.msg_id) {
            return Err(PathError::Unexpected("a key response for another request"));
        }
        let (path, permit) = (self.path.index, reply.msg_id as u16);
        let entry = self.inflight.get_mut(permit);
        let entry = entry.filter(|e| matches!(e.waits, Waits::Answer) && (e.path, e.cid) == (path, cid));
        let entry = entry.ok_or(PathError::Unexpected("an answer to no request"))?;
        self.path.stats.cpu_migration.count(entry.cpu, self.env.cpu);
        if let Some(m) = message {
            chunk.rkey = m.rkey.get();
        }
        // What counts is that the key is revoked, not that the answer says so.
        if entry.key.is_some_and(|key| !self.path.revoked.remove(&key.0)) {
            entry.waits = Waits::Revocation(reply.errno);
            return self.revoke(cid, permit, reply.errno);
        }
        self.finish(permit, reply.errno);
        Ok(())
    }

    /// Revokes the key of a read's buffer, which the server has not.
    fn revoke(&mut self, cid: u16, permit: u16, errno: u16) -> Result<(), PathError> {
        let device = self.path.device.and_then(|device| self.inflight.device(device));
        if device.is_none_or(|device| !device.instant) {
            self.path.push(self.env, cid, Post::Revoke(permit));
            return Ok(());
        }
        let key = self.inflight.key_of(self.path.device, permit)?;
        let qp = self.path.conns.get(usize::from(cid)).and_then(|conn| conn.qp);
        let Some(qp) = qp else { return Ok(()) };
        let mark = Mark::new(MarkKind::Revoke, permit.into());
        if self.env.cx.provider.revoke(qp, key, mark.encode())? == Revoked::Now {
            self.finish(permit, errno);
        }
        Ok(())
    }

    fn key_revoked(&mut self, permit: u32) {
        let Ok(permit) = u16::try_from(permit) else { return };
        let path = self.path.index;
        let entry = self.inflight.get_mut(permit).filter(|entry| entry.path == path);
        if let Some(Waits::Revocation(errno)) = entry.map(|entry| &entry.waits) {
            let errno = *errno;
            self.finish(permit, errno);
        }
    }

    fn finish(&mut self, permit: u16, errno: u16) {
        let result = IoError::of_reply(errno);
        self.inflight.finish(self.env.cx.now, permit, result, self.env.out);
    }
}
