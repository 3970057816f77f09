//! Checks of a request before it is executed, in the order of IBA 9.7.4.1, and the receive work request that it takes.

use std::sync::Arc;

use roce_bth::{Class, ExtHeader, Feth, Packet, Placement, Reth, Selectivity, Service};
use roce_verbs::mem::{PdHandle, Span};
use roce_verbs::{AccessFlags, AsyncEvent, QpType};

use super::{Inbound, Responder, execute::WORD};
use crate::{
    context::{Call, QpContext},
    recvq::ActiveRecv,
    refusal::Refusal,
    sendq::resolve,
    srq::SharedReceiveQueue,
};

impl Responder {
    /// CHK_OP_SEQ: checks that messages are complete and don't overlap.
    #[inline]
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
    #[inline]
    pub(super) fn chk_shared_queue(&mut self, qp: &QpContext, packet: &Packet<'_>) -> Result<(), Refusal> {
        if qp.service() != Service::Xrc || !packet.header.bth.opcode.info().position.starts() {
            return Ok(());
        }
        self.srq = self.named_queue(qp, packet);
        require(self.srq.is_some(), Refusal::SharedQueue)
    }

    pub(super) fn named_queue(&self, qp: &QpContext, packet: &Packet<'_>) -> Option<Arc<SharedReceiveQueue>> {
        qp.config().xrcd.as_ref()?.find(packet.header.xrceth()?.srqn)
    }

    /// Returns the protection domain for checks of the peer's keys.
    pub(super) fn key_domain(&self, qp: &QpContext) -> PdHandle {
        self.srq.as_ref().map_or(qp.config().pd, |srq| srq.pd())
    }

    /// CHK_OP_VALID: checks that the queue pair permits the operation (IBA 9.7.4.1.3).
    #[inline]
    pub(super) fn chk_op_valid(&self, qp: &QpContext, packet: &Packet<'_>) -> Result<(), Refusal> {
        let need = needed_rights(packet).ok_or(Refusal::Operation)?;
        require(qp.access().contains(need), Refusal::Operation)
    }

    /// CHK_RESOURCE: takes a receive work request, or makes room for a response.
    pub(super) fn chk_resource(&mut self, call: &mut Call<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        match info.class {
            Class::Send if info.position.starts() => self.take_receive(call, true),
            // `process` passes only one with immediate data.
            Class::Write => self.take_receive(call, false),
            Class::ReadRequest | Class::Atomic | Class::Flush | Class::AtomicWrite => {
                let max = usize::from(call.qp.attr().max_dest_rd_atomic.unwrap_or(0));
                require(self.replies.make_room(max), Refusal::TooManyRdAtomic)
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

    /// Hides the receive work requests from a packet that would take one. `None` shows them again.
    pub(crate) fn hide_receives(&mut self, qp: &QpContext, packet: Option<&Packet<'_>>) {
        self.hides_receives = packet.is_some_and(|packet| self.would_take_receive(qp, packet));
    }

    /// Takes a receive work request; resolves its memory for a SEND (`with_memory`).
    pub(super) fn take_receive(&mut self, call: &mut Call<'_>, with_memory: bool) -> Result<(), Refusal> {
        if self.hides_receives {
            return Err(Refusal::NoReceive);
        }
        let shared = call.qp.config().srq.as_ref().or(self.srq.as_ref());
        let (wqe, pd) = match shared {
            None => (self.receives.pop().ok_or(Refusal::NoReceive)?, call.qp.config().pd),
            Some(srq) => {
                let (wqe, low) = srq.take().ok_or(Refusal::NoReceive)?;
                if low {
                    call.events.push_back(AsyncEvent::SrqLimitReached(srq.handle()));
                }
                (wqe, srq.pd())
            }
        };
        let list = match with_memory {
            true => resolve(&mut self.keys, call.mem, pd, &wqe.sges, AccessFlags::LOCAL_WRITE),
            false => Some(roce_verbs::mem::SgList::new()),
        };
        let found = list.is_some();
        self.receive = Some(ActiveRecv {
            wqe,
            list: list.unwrap_or_default(),
        });
        require(found, Refusal::LocalProtection)
    }

    /// CHK_LENGTH: checks packet and message lengths (IBA 9.7.4.1.6).
    ///
    /// All packets but the last are full, and the last of several is not empty.
    #[inline]
    pub(super) fn chk_length(&self, qp: &QpContext, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        let len = packet.payload.len();
        let position = info.position;
        let shape = match (position.starts(), position.ends()) {
            (_, false) => len == qp.mtu(),
            (false, true) => len >= 1 && len <= qp.mtu(),
            (true, true) => len <= qp.mtu(),
        };
        let max = qp.config().max_msg_size;
        let reth = packet.header.reth().filter(|reth| reth.dma_len <= max);
        let fits = match info.class {
            Class::Send => {
                let all = len
                    + if let Inbound::Send(before) = self.inbound {
                        before
                    } else {
                        0
                    };
                let room = self.receive.as_ref().map_or(0, |r| r.list.len());
                if shape && all <= max as usize && all > room {
                    return Err(Refusal::ReceiveTooShort);
                }
                all <= max as usize
            }
            Class::Write => {
                let left = match self.inbound {
                    Inbound::Write { received, len, .. } => Some(len - received),
                    _ => reth.map(|reth| reth.dma_len),
                };
                // The last packet completes the message, any other doesn't.
                left.is_some_and(|left| {
                    if position.ends() {
                        len == left as usize
                    } else {
                        len < left as usize
                    }
                })
            }
            Class::ReadRequest => reth.is_some(),
            Class::AtomicWrite => reth.is_some_and(|reth| reth.dma_len == WORD) && len == WORD as usize,
            _ => true,
        };
        require(shape && fits, Refusal::Length)
    }

    /// CHK_RKEY: checks the whole range of a message with its first packet (IBA 9.7.4.1.5).
    #[inline]
    pub(super) fn chk_rkey(&mut self, call: &Call<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let info = packet.header.bth.opcode.info();
        if info.class == Class::Write
            && let Some(reth) = packet.header.reth()
        {
            self.inbound = Inbound::Write {
                span: self.remote_span(call, self.key_domain(call.qp), &reth, AccessFlags::REMOTE_WRITE)?,
                received: 0,
                len: reth.dma_len,
            };
        }
        Ok(())
    }

    /// Resolves memory that the peer names. `None` if it is empty.
    #[inline]
    pub(super) fn remote_span(
        &mut self,
        call: &Call<'_>,
        pd: PdHandle,
        reth: &Reth,
        need: AccessFlags,
    ) -> Result<Option<Span>, Refusal> {
        if reth.dma_len == 0 {
            return Ok(None);
        }
        let span = self.keys.resolve_remote(call.mem, pd, call.qp.qpn(), reth, need);
        span.map(Some).map_err(|_| Refusal::RKey)
    }
}

fn require(ok: bool, refusal: Refusal) -> Result<(), Refusal> {
    if ok { Ok(()) } else { Err(refusal) }
}

/// Returns the rights that a request needs. `None`: a FLUSH whose placement is empty, or with a reserved value in a field.
#[inline]
pub(super) fn needed_rights(packet: &Packet<'_>) -> Option<AccessFlags> {
    Some(match packet.header.bth.opcode.info().class {
        Class::Write | Class::AtomicWrite => AccessFlags::REMOTE_WRITE,
        Class::ReadRequest => AccessFlags::REMOTE_READ,
        Class::Atomic => AccessFlags::REMOTE_ATOMIC,
        Class::Flush => {
            let Feth {
                placement, selectivity, ..
            } = packet.header.feth()?;
            let rights = [
                (Placement::GLOBAL_VISIBILITY, AccessFlags::FLUSH_GLOBAL),
                (Placement::PERSISTENT, AccessFlags::FLUSH_PERSISTENT),
            ];
            let known = rights[0].0.union(rights[1].0);
            if placement == Placement::default() || !known.contains(placement) {
                return None;
            }
            if matches!(selectivity, Selectivity::Reserved(_)) {
                return None;
            }
            let needed = rights.into_iter().filter(|(place, _)| placement.contains(*place));
            needed.map(|(_, right)| right).collect()
        }
        _ => AccessFlags::empty(),
    })
}
