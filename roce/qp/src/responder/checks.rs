//! Checks of a request before it is executed, in the order of IBA 9.7.4.1, and the receive work request that it takes.

use std::sync::Arc;

use roce_bth::{Class, ExtHeader, Packet, Reth, Service};
use roce_mem::{PdHandle, Span};
use roce_verbs::{AccessFlags, AsyncEvent, QpType};

use super::{Inbound, Responder, job::HiddenReceives};
use crate::{
    context::QpContext,
    ctx::Ctx,
    recvq::{ActiveRecv, ReceiveQueue},
    refusal::Refusal,
    replies::Replies,
    rights::flush_rights,
    sendq::resolve,
    srq::SharedReceiveQueue,
};

impl Responder {
    /// CHK_OP_SEQ: checks that messages are complete and don't overlap.
    pub(super) fn chk_op_seq(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        let starts = info.position.starts();
        match (&self.inbound, info.class) {
            (Inbound::Idle, _) if starts => Ok(()),
            (Inbound::Idle, _) => Err(Refusal::MissingFirst),
            (Inbound::Send(_), Class::Send) | (Inbound::Write { .. }, Class::Write) if !starts => Ok(()),
            _ => Err(Refusal::MissingLast),
        }
    }

    /// Finds the shared receive queue that an XRC message names (IBA Annex A14). Its PD applies to keys.
    pub(super) fn chk_shared_queue(&mut self, qp: &QpContext, packet: &Packet<'_>) -> Result<(), Refusal> {
        if qp.service() != Service::Xrc || !packet.header.bth.opcode.info().position.starts() {
            return Ok(());
        }
        self.srq = self.named_queue(qp, packet);
        match self.srq {
            Some(_) => Ok(()),
            None => Err(Refusal::SharedQueue),
        }
    }

    pub(super) fn named_queue(&self, qp: &QpContext, packet: &Packet<'_>) -> Option<Arc<SharedReceiveQueue>> {
        qp.config().xrcd.as_ref()?.find(packet.header.xrceth()?.srqn)
    }

    /// Returns the protection domain for checks of the peer's keys.
    pub(super) fn key_domain(&self, qp: &QpContext) -> PdHandle {
        self.srq.as_ref().map_or(qp.config().pd, |srq| srq.pd())
    }

    /// CHK_OP_VALID: checks that the queue pair permits the operation (IBA 9.7.4.1.3).
    pub(super) fn chk_op_valid(&self, qp: &QpContext, packet: &Packet<'_>) -> Result<(), Refusal> {
        let need = match packet.header.bth.opcode.info().class {
            Class::Flush => flush_rights(packet).ok_or(Refusal::Operation)?,
            Class::Write | Class::AtomicWrite => AccessFlags::REMOTE_WRITE,
            Class::ReadRequest => AccessFlags::REMOTE_READ,
            Class::Atomic => AccessFlags::REMOTE_ATOMIC,
            _ => AccessFlags::empty(),
        };
        match qp.access().contains(need) {
            true => Ok(()),
            false => Err(Refusal::Operation),
        }
    }

    /// CHK_RESOURCE: takes a receive work request, or makes room for a response.
    pub(super) fn chk_resource(
        &mut self,
        qp: &QpContext,
        replies: &mut Replies,
        ctx: &mut Ctx<'_>,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        match info.class {
            Class::Send if info.position.starts() => self.take_receive(qp, ctx, true),
            Class::Write if info.has(ExtHeader::Imm) => self.take_receive(qp, ctx, false),
            Class::ReadRequest | Class::Atomic | Class::Flush | Class::AtomicWrite => {
                let max = usize::from(qp.attr().max_dest_rd_atomic.unwrap_or(0));
                match replies.make_room(max) {
                    true => Ok(()),
                    false => Err(Refusal::TooManyRdAtomic),
                }
            }
            _ => Ok(()),
        }
    }

    /// Returns whether a packet is the expected start of a message that takes a receive work request here, except for its
    /// length and memory. Reliable connected queue pairs only.
    fn would_take_receive(&self, qp: &QpContext, packet: &Packet<'_>) -> bool {
        let info = packet.header.bth.opcode.info();
        let takes = match info.class {
            Class::Send => info.position.starts(),
            Class::Write => info.has(ExtHeader::Imm),
            _ => false,
        };
        takes
            && qp.config().qp_type == QpType::Rc
            && qp.takes_requests()
            && !self.flush.is_running()
            && packet.header.bth.psn == self.expected.psn()
            && self.chk_op_seq(packet).is_ok()
            && self.chk_op_valid(qp, packet).is_ok()
    }

    /// Takes the receive queues away if the packet would find a receive work request in them. `None`: it needs none.
    pub(crate) fn hide_receives(&mut self, qp: &mut QpContext, packet: &Packet<'_>) -> Option<HiddenReceives> {
        self.would_take_receive(qp, packet).then(|| HiddenReceives {
            own: core::mem::replace(&mut self.receives, ReceiveQueue::new(&qp.config().caps)),
            shared: qp.take_srq(),
        })
    }

    /// Gives the receive queues back.
    pub(crate) fn restore_receives(&mut self, qp: &mut QpContext, hidden: HiddenReceives) {
        self.receives = hidden.own;
        qp.restore_srq(hidden.shared);
    }

    /// Takes a receive work request; resolves its memory for a SEND (`with_memory`).
    pub(super) fn take_receive(&mut self, qp: &QpContext, ctx: &mut Ctx<'_>, with_memory: bool) -> Result<(), Refusal> {
        let shared = qp.config().srq.as_ref().or(self.srq.as_ref());
        let (wqe, pd) = match shared {
            None => (self.receives.pop().ok_or(Refusal::NoReceive)?, qp.config().pd),
            Some(srq) => {
                let (wqe, low) = srq.take().ok_or(Refusal::NoReceive)?;
                if low {
                    ctx.events.push_back(AsyncEvent::SrqLimitReached(srq.handle()));
                }
                (wqe, srq.pd())
            }
        };
        let list = match with_memory {
            true => resolve(&mut self.keys, ctx.mem, pd, &wqe.sges, AccessFlags::LOCAL_WRITE),
            false => Some(roce_mem::SgList::new()),
        };
        let found = list.is_some();
        self.receive = Some(ActiveRecv {
            wqe,
            list: list.unwrap_or_default(),
        });
        if found { Ok(()) } else { Err(Refusal::LocalProtection) }
    }

    /// CHK_LENGTH: checks packet and message lengths (IBA 9.7.4.1.6).
    ///
    /// All packets but the last are full, and the last of several is not empty.
    pub(super) fn chk_length(&self, qp: &QpContext, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        let len = packet.payload.len();
        let position = info.position;
        let shape = match (position.starts(), position.ends()) {
            (_, false) => len == qp.mtu(),
            (false, true) => len >= 1 && len <= qp.mtu(),
            (true, true) => len <= qp.mtu(),
        };
        if !shape {
            return Err(Refusal::Length);
        }
        match info.class {
            Class::Send => {
                let before = if let Inbound::Send(n) = self.inbound { n } else { 0 };
                let room = self.receive.as_ref().map_or(0, |r| r.list.len());
                if before + len > qp.config().max_msg_size as usize {
                    return Err(Refusal::Length);
                }
                match before + len <= room {
                    true => Ok(()),
                    false => Err(Refusal::ReceiveTooShort),
                }
            }
            Class::Write => {
                let left = match (&self.inbound, packet.header.reth()) {
                    (Inbound::Write { received, len, .. }, _) => len - received,
                    (_, Some(reth)) if reth.dma_len <= qp.config().max_msg_size => reth.dma_len,
                    _ => return Err(Refusal::Length),
                } as usize;
                // The last packet completes the message, any other doesn't.
                match if position.ends() { len == left } else { len < left } {
                    true => Ok(()),
                    false => Err(Refusal::Length),
                }
            }
            Class::ReadRequest => match packet.header.reth() {
                Some(reth) if reth.dma_len <= qp.config().max_msg_size => Ok(()),
                _ => Err(Refusal::Length),
            },
            Class::AtomicWrite => match packet.header.reth() {
                Some(reth) if reth.dma_len == 8 && len == 8 => Ok(()),
                _ => Err(Refusal::Length),
            },
            _ => Ok(()),
        }
    }

    /// CHK_RKEY: checks the whole range of a message with its first packet (IBA 9.7.4.1.5).
    pub(super) fn chk_rkey(&mut self, qp: &QpContext, ctx: &Ctx<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        if info.class == Class::Write
            && let Some(reth) = packet.header.reth()
        {
            self.inbound = Inbound::Write {
                span: self.remote_span(qp, ctx, self.key_domain(qp), &reth, AccessFlags::REMOTE_WRITE)?,
                received: 0,
                len: reth.dma_len,
            };
        }
        Ok(())
    }

    /// Resolves memory that the peer names. `None` if it is empty.
    pub(super) fn remote_span(
        &mut self,
        qp: &QpContext,
        ctx: &Ctx<'_>,
        pd: PdHandle,
        reth: &Reth,
        need: AccessFlags,
    ) -> Result<Option<Span>, Refusal> {
        if reth.dma_len == 0 {
            return Ok(None);
        }
        let span = self.keys.resolve_remote(ctx.mem, pd, qp.qpn(), reth, need);
        span.map(Some).map_err(|_| Refusal::RKey)
    }
}
