//! The work requests of the server.

use roce_verbs::{
    AccessFlags, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    provider::{Grant, MemoryRegion, Provider, QueuePair},
    wr::{Payload, PostError},
};
use zerocopy::IntoBytes;

use super::{
    path::{Path, SrvConn},
    request::Answer,
};
use crate::{
    conn::{GRANT_SLOTS, Posted, Poster, Work, WrId, WrKind},
    proto::{Imm, InfoRsp, IoReply, RkeyRsp, SgDesc},
};

/// What the server posts.
#[derive(Clone, Copy, Debug)]
pub(super) enum ServerWork {
    /// Takes the key of a chunk back, to work on its request.
    Revoke(u16),
    /// The answer to a request.
    Answer(Answer),
    /// A heartbeat message.
    Imm(Imm),
    /// Opens so many chunks and tells the client where they are.
    Info(u32),
}

impl Work for ServerWork {
    fn cost(&self) -> u32 {
        match self {
            // Data, end of the destination's key, new key of the chunk, answer.
            Self::Answer(_) => 3 + GRANT_SLOTS,
            Self::Revoke(_) | Self::Imm(_) => 1,
            // Posted once, into an empty queue that is made large enough; these chunks have no former key.
            Self::Info(chunks) => chunks + 1,
        }
    }

    fn heartbeat(&self) -> Option<Imm> {
        match self {
            Self::Imm(imm) => Some(*imm),
            _ => None,
        }
    }
}

fn wr<'a>(cid: u16, op: SendOp, flags: SendFlags, payload: Payload<'a>) -> SendWr<'a> {
    SendWr {
        wr_id: WrId::new(WrKind::Send, cid, 0).encode(),
        op,
        flags,
        payload,
    }
}

const EMPTY: Payload<'static> = Payload::Sges(&[]);

impl<P: Provider> Poster<P, ServerWork> for Path<P> {
    fn post(&self, conn: &SrvConn<P>, work: &ServerWork, last: SendFlags) -> Result<Posted, PostError> {
        let (count, signalled) = match work {
            ServerWork::Revoke(msg_id) => {
                self.post_revoke(conn, *msg_id)?;
                (1, true)
            }
            ServerWork::Answer(answer) => {
                let count = self.post_answer(conn, answer, last)?;
                (count, last.contains(SendFlags::SIGNALED))
            }
            ServerWork::Imm(imm) => {
                let op = SendOp::WriteWithImm(RemoteAddr::default(), imm.encode());
                conn.qp
                    .post_send(&[wr(conn.cid, op, last, EMPTY)])
                    .map_err(|(_, e)| e)?;
                (1, last.contains(SendFlags::SIGNALED))
            }
            ServerWork::Info(_) => (self.post_info(conn)?, true),
        };
        Ok(Posted { count, signalled })
    }
}

impl<P: Provider> Path<P> {
    fn post_revoke(&self, conn: &SrvConn<P>, msg_id: u16) -> Result<(), PostError> {
        let region = self.chunks[usize::from(msg_id)].revocable.as_ref();
        let region = region.ok_or(PostError::Invalid("the chunk has no revocable key"))?;
        let mark = WrId::new(WrKind::Revoke, conn.cid, msg_id.into());
        conn.qp.post_revoke(region, mark.encode(), SendFlags::SIGNALED)
    }

    /// Gives a chunk a new key.
    fn post_grant(&self, conn: &SrvConn<P>, msg_id: usize) -> Result<RKey, PostError> {
        let region = self.chunks[msg_id].revocable.as_ref();
        let region = region.ok_or(PostError::Invalid("the chunk has no revocable key"))?;
        let size = self.layout.chunk_size() as usize;
        let grant = Grant {
            region: &self.session.chunks,
            offset: msg_id * size,
            len: size,
            access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
        };
        let mark = WrId::new(WrKind::Send, conn.cid, 0).encode();
        conn.qp.post_grant(region, &grant, mark, SendFlags::empty())
    }

    fn chunk_addr(&self, msg_id: usize) -> u64 {
        self.session.chunks.addr() + msg_id as u64 * u64::from(self.layout.chunk_size())
    }

    /// Data, SEND with invalidate, new key, and the answer: as a SEND that brings the new key, or as an empty RDMA
    /// WRITE; both with the immediate value.
    fn post_answer(&self, conn: &SrvConn<P>, answer: &Answer, last: SendFlags) -> Result<u32, PostError> {
        let msg_id = usize::from(answer.msg_id);
        let mut count = 1;
        let mut send = |wr: SendWr<'_>| {
            count += 1;
            conn.qp.post_send(&[wr]).map_err(|(_, e)| e)
        };
        let none = SendFlags::empty();
        if let Some(dest) = answer.dest.filter(|_| answer.errno == 0) {
            let sge = Sge {
                addr: self.chunk_addr(msg_id),
                length: dest.len.get(),
                lkey: self.session.chunks.lkey(),
            };
            let remote = RemoteAddr {
                addr: dest.addr.get(),
                rkey: RKey(dest.key.get()),
            };
            send(wr(conn.cid, SendOp::Write(remote), none, Payload::Sges(&[sge])))?;
        }
        if let Some(dest) = answer.dest.filter(|_| answer.need_inval) {
            send(wr(conn.cid, SendOp::SendWithInv(RKey(dest.key.get())), none, EMPTY))?;
        }
        let imm = Imm::IoRsp(IoReply {
            msg_id: answer.msg_id.into(),
            errno: answer.errno,
            invalidated: answer.need_inval,
        });
        self.release_chunk(msg_id);
        if !self.config().always_invalidate {
            let op = SendOp::WriteWithImm(RemoteAddr::default(), imm.encode());
            conn.qp
                .post_send(&[wr(conn.cid, op, last, EMPTY)])
                .map_err(|(_, e)| e)?;
            return Ok(count);
        }
        let key = self.post_grant(conn, msg_id)?;
        let message = RkeyRsp::new(answer.msg_id, key.0);
        let op = SendOp::SendWithImm(imm.encode());
        conn.qp
            .post_send(&[wr(conn.cid, op, last, Payload::Inline(message.as_bytes()))])
            .map_err(|(_, e)| e)?;
        Ok(count + GRANT_SLOTS)
    }

    /// Opens the chunks and sends their addresses: a piece per chunk, or one piece for all when the key never changes.
    fn post_info(&self, conn: &SrvConn<P>) -> Result<u32, PostError> {
        let size = self.layout.chunk_size();
        let mut desc = Vec::with_capacity(self.chunks.len());
        let mut count = 1;
        if self.config().always_invalidate {
            for msg_id in 0..self.chunks.len() {
                let key = self.post_grant(conn, msg_id)?;
                desc.push(SgDesc::new(self.chunk_addr(msg_id), key.0, size));
                count += 1;
            }
        } else {
            let key = self.session.chunks.rkey();
            desc.push(SgDesc::new(self.chunk_addr(0), key.0, size * self.layout.queue_depth()));
        }
        let bytes = InfoRsp::new(desc).to_bytes();
        let info = &self.info;
        let offset = crate::proto::InfoReq::LEN;
        let written = info.write(offset, &bytes);
        written.map_err(|_| PostError::Invalid("the information response does not fit"))?;
        let sges = [Sge {
            addr: info.addr() + offset as u64,
            length: bytes.len() as u32,
            lkey: info.lkey(),
        }];
        let wr = wr(conn.cid, SendOp::Send, SendFlags::SIGNALED, Payload::Sges(&sges));
        conn.qp.post_send(&[wr]).map_err(|(_, e)| e)?;
        Ok(count)
    }
}
