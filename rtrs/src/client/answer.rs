//! Messages of the server over a path that is up.

use std::collections::VecDeque;

use roce_verbs::{Completion, WcFlags, WcOpcode, provider::Revoked};

use crate::{
    IoError, PathError,
    client::{conn::Post, env::Env, flight::Waits, lane::Lane, path::Path, post, request::Output},
    mark::{Mark, MarkKind},
    proto::{Imm, IoReply, ProtoError, RkeyRsp},
};

/// A path with its session's requests.
pub(super) struct Answers<'a, 'b, 'c, U> {
    pub(super) path: &'a mut Path,
    pub(super) env: &'a mut Env<'b, 'c, U>,
    pub(super) lane: &'a mut Lane<U>,
}

impl<U> Answers<'_, '_, '_, U> {
    /// A work request has succeeded. Messages with session information are the handshake's.
    pub(super) fn completion(&mut self, cid: u16, mark: Mark, wc: &Completion) -> Result<(), PathError> {
        match mark.kind {
            MarkKind::Send => self.reclaim(cid),
            MarkKind::Revoke => {
                self.reclaim(cid);
                self.key_ended(mark.index);
            }
            MarkKind::Recv => {
                let message = self.taken(cid, mark.index, wc)?;
                self.path.heard(self.env.cx.now);
                self.received(cid, wc, message)?;
            }
            MarkKind::Info => return Err(PathError::Unexpected("a second information response")),
        }
        Ok(())
    }

    /// A signalled send is done: there is room for what waits.
    pub(super) fn reclaim(&mut self, cid: u16) {
        let Some(conn) = self.path.conns.get_mut(usize::from(cid)) else {
            return;
        };
        conn.queue.reclaim();
        if conn.queue.is_ready() {
            self.path.mark_dirty(self.env, cid);
        }
    }

    /// A receive has been used; it goes back with the turn. Returns the key message that it brought.
    fn taken(&mut self, cid: u16, index: u32, wc: &Completion) -> Result<Option<RkeyRsp>, PathError> {
        if let Some(conn) = self.path.conns.get_mut(usize::from(cid)) {
            conn.used.push(index);
            self.path.mark_dirty(self.env, cid);
        }
        if wc.opcode != WcOpcode::Recv || !wc.flags.contains(WcFlags::WITH_IMM) {
            return Ok(None);
        }
        let region = self.path.key_messages.as_ref();
        let region = region.ok_or(PathError::Unexpected("a key response without NEW_RKEY"))?;
        let mut bytes = [0; RkeyRsp::LEN];
        let len = (wc.byte_len as usize).min(RkeyRsp::LEN);
        // The index came back in our own mark, so it is inside the region.
        let _ = region.pages.read(index as usize * RkeyRsp::LEN, &mut bytes[..len]);
        Ok(Some(*RkeyRsp::parse(&bytes[..len])?))
    }

    fn received(&mut self, cid: u16, wc: &Completion, message: Option<RkeyRsp>) -> Result<(), PathError> {
        if wc.flags.contains(WcFlags::WITH_INV) {
            if self.path.revoked.len() >= self.lane.flights.len() {
                return Err(PathError::Unexpected("more keys revoked than requests in flight"));
            }
            self.path.revoked.insert(wc.invalidated.0);
            return Ok(());
        }
        if !wc.flags.contains(WcFlags::WITH_IMM) {
            return Err(PathError::Unexpected("a SEND without immediate value"));
        }
        match (Imm::decode(wc.imm)?, message) {
            (Imm::IoRsp(reply), message) => self.reply(cid, reply, message),
            (Imm::HbMsg, None) => {
                self.path.push(self.env, cid, Post::Imm(Imm::HbAck));
                Ok(())
            }
            (Imm::HbAck, None) => {
                let now = self.env.cx.now;
                let time = self.path.up_mut().and_then(|up| up.questions.answer(now));
                self.path.latency = time.or(self.path.latency);
                Ok(())
            }
            (Imm::IoReq(_), _) => Err(PathError::Unexpected("a request from the server")),
            (_, Some(_)) => Err(PathError::Unexpected("a key response with a heartbeat")),
        }
    }

    fn reply(&mut self, cid: u16, reply: IoReply, message: Option<RkeyRsp>) -> Result<(), PathError> {
        let permit = reply.msg_id;
        let chunk = self.path.chunks.get_mut(permit as usize);
        let chunk = chunk.ok_or(ProtoError::field(
            "message number",
            reply.msg_id,
            "a permit of the connection",
        ))?;
        if message.is_some_and(|m| u32::from(m.buf_id.get()) != reply.msg_id) {
            return Err(PathError::Unexpected("a key response for another request"));
        }
        let path = self.path.index;
        let flight = self.lane.flights.get_mut(permit as usize);
        let flight = flight
            .and_then(Option::as_mut)
            .filter(|f| f.waits == Waits::Answer && f.path == path && f.cid == cid);
        let flight = flight.ok_or(PathError::Unexpected("an answer to no request"))?;
        self.path.stats.cpu_migration.count(flight.cpu, self.env.cpu);
        if let Some(m) = message {
            chunk.rkey = m.rkey.get();
        }
        let permit = permit as u16;
        // What counts is that the key is gone, not that the answer says so.
        if flight.key.is_some_and(|key| !self.path.revoked.remove(&key.0)) {
            flight.turn(Waits::Revocation(reply.errno));
            return self.revoke(cid, permit, reply.errno);
        }
        self.finish(permit, reply.errno);
        Ok(())
    }

    /// Takes the key of a read's buffer back, which the server has not revoked.
    fn revoke(&mut self, cid: u16, permit: u16, errno: u16) -> Result<(), PathError> {
        let instant = self
            .path
            .device
            .and_then(|d| self.lane.domain(d))
            .is_some_and(|d| d.instant);
        if !instant {
            self.path.push(self.env, cid, Post::Revoke(permit));
            return Ok(());
        }
        let key = post::key_of(self.path, self.lane, permit)?;
        let qp = self.path.conns.get(usize::from(cid)).and_then(|conn| conn.qp);
        let Some(qp) = qp else { return Ok(()) };
        let mark = Mark::new(MarkKind::Revoke, permit.into());
        if self.env.cx.provider.revoke(qp, key, mark.encode())? == Revoked::Now {
            self.finish(permit, errno);
        }
        Ok(())
    }

    fn key_ended(&mut self, permit: u32) {
        let flight = self.lane.flights.get(permit as usize).and_then(Option::as_ref);
        if let Some(Waits::Revocation(errno)) = flight.filter(|f| f.path == self.path.index).map(|f| f.waits) {
            self.finish(permit as u16, errno);
        }
    }

    fn finish(&mut self, permit: u16, errno: u16) {
        let (now, out): (_, &mut VecDeque<Output<U>>) = (self.env.cx.now, self.env.out);
        self.lane.finish(now, permit, status(errno), out);
    }
}

fn status(errno: u16) -> Result<(), IoError> {
    match errno {
        0 => Ok(()),
        e => Err(IoError::Remote(e.into())),
    }
}
