//! The work requests of the client.

use core::sync::atomic::Ordering;

use roce_verbs::{
    AccessFlags, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    provider::{Grant, MemoryRegion, Provider, QueuePair},
    wr::{Payload, PostError},
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::path::{ClientConn, Flight, Path, Slot, Waits};
use crate::{
    Direction,
    conn::{GRANT_SLOTS, Posted, Poster, Work, WrId, WrKind},
    proto::{Imm, MsgFlags, RdmaRead, RdmaWrite, SgDesc},
};

/// What the client posts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClientWork {
    /// The request of a slot.
    Request(u16),
    /// The end of the key of a slot's buffer.
    Revoke(u16),
    /// A heartbeat message.
    Imm(Imm),
    /// The information request.
    Info(Sge),
}

impl Work for ClientWork {
    fn cost(&self) -> u32 {
        match self {
            Self::Request(_) => GRANT_SLOTS + 1,
            Self::Revoke(_) | Self::Imm(_) | Self::Info(_) => 1,
        }
    }

    fn heartbeat(&self) -> Option<Imm> {
        match self {
            Self::Imm(imm) => Some(*imm),
            _ => None,
        }
    }
}

/// Posts during the handshake, when there is no path yet.
pub(super) struct InfoPoster;

impl<P: Provider> Poster<P, ClientWork> for InfoPoster {
    fn post(&self, conn: &ClientConn<P>, work: &ClientWork, _last: SendFlags) -> Result<Posted, PostError> {
        let ClientWork::Info(sge) = work else {
            return Err(PostError::Invalid(
                "only the information request is sent in the handshake",
            ));
        };
        let sges = [*sge];
        conn.qp
            .post_send(&[super::handshake::info_wr(&sges, conn.cid)])
            .map_err(|(_, e)| e)?;
        Ok(Posted {
            count: 1,
            signalled: true,
        })
    }
}

impl<P: Provider> Poster<P, ClientWork> for Path<P> {
    fn post(&self, conn: &ClientConn<P>, work: &ClientWork, last: SendFlags) -> Result<Posted, PostError> {
        let signalled = last.contains(SendFlags::SIGNALED);
        match work {
            ClientWork::Request(msg_id) => {
                let slot = &self.slots[usize::from(*msg_id)];
                let mut flight = slot.flight.lock();
                // A path that goes down ends its requests, also those that wait for room.
                let Some(flight) = flight.as_mut() else {
                    return Ok(Posted {
                        count: 0,
                        signalled: false,
                    });
                };
                let count = self.post_request(conn, *msg_id, slot, flight, last)?;
                Ok(Posted { count, signalled })
            }
            ClientWork::Revoke(msg_id) => {
                let region = self.slots[usize::from(*msg_id)].revocable.as_ref();
                let region = region.ok_or(PostError::Invalid("the slot has no revocable key"))?;
                let mark = WrId::new(WrKind::Revoke, conn.cid, u32::from(*msg_id));
                conn.qp.post_revoke(region, mark.encode(), SendFlags::SIGNALED)?;
                Ok(Posted {
                    count: 1,
                    signalled: true,
                })
            }
            ClientWork::Imm(imm) => {
                let op = SendOp::WriteWithImm(RemoteAddr::default(), imm.encode());
                conn.qp.post_send(&[wr(conn.cid, op, last, &[])]).map_err(|(_, e)| e)?;
                Ok(Posted { count: 1, signalled })
            }
            ClientWork::Info(_) => InfoPoster.post(conn, work, last),
        }
    }
}

fn wr<'a>(cid: u16, op: SendOp, flags: SendFlags, sges: &'a [Sge]) -> SendWr<'a> {
    SendWr {
        wr_id: WrId::new(WrKind::Send, cid, 0).encode(),
        op,
        flags,
        payload: Payload::Sges(sges),
    }
}

impl<P: Provider> Path<P> {
    /// Posts a request; returns the slots of the send queue that it takes.
    fn post_request(
        &self,
        conn: &ClientConn<P>,
        msg_id: u16,
        slot: &Slot<P>,
        flight: &mut Flight<P>,
        last: SendFlags,
    ) -> Result<u32, PostError> {
        let data = flight.request.data.as_ref().map(|b| b.sge()).filter(|s| s.length > 0);
        let data_len = data.map_or(0, |s| s.length);
        let usr_len = flight.usr_len;
        let mut sges: SmallVec<[Sge; 2]> = SmallVec::new();
        let mut count = 1;
        let (message, offset) = match flight.request.direction {
            Direction::Write => {
                sges.extend(data);
                (RdmaWrite::new(usr_len).as_bytes().to_vec(), 0)
            }
            Direction::Read => {
                let desc = match data {
                    Some(sge) => {
                        let key = self.open_buffer(conn, slot, flight)?;
                        count += GRANT_SLOTS * u32::from(flight.key.is_some());
                        Some(SgDesc::new(sge.addr, key.0, sge.length))
                    }
                    None => None,
                };
                let flags = if flight.key.is_some() {
                    MsgFlags::NEED_INVAL
                } else {
                    MsgFlags::empty()
                };
                let head = RdmaRead::new(usr_len, flags, u16::from(desc.is_some()));
                ([head.as_bytes(), desc.as_slice().as_bytes()].concat(), data_len)
            }
        };
        let at = usize::from(msg_id) * self.header_stride;
        let written = self.headers.write(at + usize::from(usr_len), &message);
        written.map_err(|_| PostError::Invalid("the request's header does not fit"))?;
        sges.push(Sge {
            addr: self.headers.addr() + at as u64,
            length: u32::from(usr_len) + message.len() as u32,
            lkey: self.headers.lkey(),
        });
        let imm = Imm::IoReq(self.layout.pack(msg_id.into(), data_len + u32::from(usr_len)));
        let remote = RemoteAddr {
            addr: slot.addr + u64::from(offset),
            rkey: RKey(slot.rkey.load(Ordering::Acquire)),
        };
        let op = SendOp::WriteWithImm(remote, imm.encode());
        flight.waits = Waits::Answer;
        conn.qp
            .post_send(&[wr(conn.cid, op, last, &sges)])
            .map_err(|(_, e)| e)?;
        Ok(count)
    }

    /// The key under which the server may write a read's buffer: its own, or one for this request only.
    fn open_buffer(&self, conn: &ClientConn<P>, slot: &Slot<P>, flight: &mut Flight<P>) -> Result<RKey, PostError> {
        let Some(buffer) = flight.request.data.as_ref() else {
            return Err(PostError::Invalid("a read without a buffer"));
        };
        let (region, offset) = buffer.region();
        let Some(revocable) = &slot.revocable else {
            return Ok(region.rkey());
        };
        let grant = Grant {
            region,
            offset,
            len: buffer.len(),
            access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
        };
        let mark = WrId::new(WrKind::Send, conn.cid, 0).encode();
        let key = conn.qp.post_grant(revocable, &grant, mark, SendFlags::empty())?;
        flight.key = Some(key);
        Ok(key)
    }
}
