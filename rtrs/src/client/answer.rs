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
pub(super) struct Answers<'a, 'b, 'c> {
    pub(super) path: &'a mut Path,
    pub(super) env: &'a mut Env<'b, 'c>,
    pub(super) lane: &'a mut Lane,
}

impl Answers<'_, '_, '_> {
    /// A work request has succeeded. Messages with session information are the handshake's.
    pub(super) fn completion(&mut self, place: u16, mark: Mark, wc: &Completion) -> Result<(), PathError> {
        match mark.kind {
            MarkKind::Send => self.reclaim(place),
            MarkKind::Revoke => {
                self.reclaim(place);
                self.key_ended(mark.index);
            }
            MarkKind::Recv => {
                let message = self.taken(place, mark.index, wc)?;
                self.path.heard(self.env.cx.now);
                self.received(place, wc, message)?;
            }
            MarkKind::Info => return Err(PathError::Unexpected("a second information response")),
        }
        Ok(())
    }

    /// A signalled send is done: there is room for what waits.
    pub(super) fn reclaim(&mut self, place: u16) {
        let Some(conn) = self.path.conns.get_mut(usize::from(place)) else {
            return;
        };
        conn.queue.reclaim();
        if conn.queue.is_ready() {
            self.path.mark_dirty(self.env, place);
        }
    }

    /// A receive has been used; it goes back with the turn. Returns the key message that it brought.
    fn taken(&mut self, place: u16, index: u32, wc: &Completion) -> Result<Option<RkeyRsp>, PathError> {
        if let Some(conn) = self.path.conns.get_mut(usize::from(place)) {
            conn.used.push(index);
            self.path.mark_dirty(self.env, place);
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

    fn received(&mut self, place: u16, wc: &Completion, message: Option<RkeyRsp>) -> Result<(), PathError> {
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
            (Imm::IoRsp(reply), message) => self.reply(place, reply, message),
            (Imm::HbMsg, None) => {
                self.path.push(self.env, place, Post::Imm(Imm::HbAck));
                Ok(())
            }
            (Imm::HbAck, None) => {
                self.path.measured(self.env);
                Ok(())
            }
            (Imm::IoReq(_), _) => Err(PathError::Unexpected("a request from the server")),
            (_, Some(_)) => Err(PathError::Unexpected("a key response with a heartbeat")),
        }
    }

    fn reply(&mut self, place: u16, reply: IoReply, message: Option<RkeyRsp>) -> Result<(), PathError> {
        let permit = reply.msg_id.wrapping_sub(self.lane.first);
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
            .filter(|f| f.waits == Waits::Answer && f.path == path && f.place == place);
        let flight = flight.ok_or(PathError::Unexpected("an answer to no request"))?;
        self.path.stats.cpu_migration.count(flight.cpu, self.env.cpu);
        if let Some(m) = message {
            chunk.rkey = m.rkey.get();
        }
        let permit = permit as u16;
        // What counts is that the key is gone, not that the answer says so.
        if flight.key.is_some_and(|key| !self.path.revoked.remove(&key.0)) {
            flight.turn(Waits::Revocation(reply.errno));
            return self.revoke(place, permit, reply.errno);
        }
        self.finish(permit, reply.errno);
        Ok(())
    }

    /// Takes the key of a read's buffer back, which the server has not revoked.
    fn revoke(&mut self, place: u16, permit: u16, errno: u16) -> Result<(), PathError> {
        let instant = self
            .path
            .device
            .and_then(|d| self.lane.domain(d))
            .is_some_and(|d| d.instant);
        if !instant {
            self.path.push(self.env, place, Post::Revoke(permit));
            return Ok(());
        }
        let key = post::key_of(self.path, self.lane, permit)?;
        let qp = self.path.conns.get(usize::from(place)).and_then(|conn| conn.qp);
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
        let (now, out): (_, &mut VecDeque<Output>) = (self.env.cx.now, self.env.out);
        self.lane.finish(now, permit, status(errno), out);
    }
}

fn status(errno: u16) -> Result<(), IoError> {
    match errno {
        0 => Ok(()),
        e => Err(IoError::Remote(e.into())),
    }
}
