//! Request packets: headers and payload of one packet.

use roce_bth::{AtomicEth, Bth, Deth, ExtHeader, Feth, HeaderWriter, OpcodeInfo, Reth, XrcEth};
use roce_verbs::{Instant, RemoteAddr, SendFlags, SendOp, Target, WcStatus};

use super::Requester;
use crate::{
    context::QpContext,
    sendq::{Kind, SendWqe},
    seq::Seq,
    tx::{TxKind, TxSink},
};

/// Reason why a packet was not sent: no space, an error that completes the work request, or pacing.
pub(super) enum Unsent {
    Full,
    Fault(WcStatus),
    /// Pacing permits no packet before this time.
    Paced(Instant),
}

/// A request packet: index of its work request in the send queue, and its PSNs; of a READ, those of the response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(super) index: usize,
    pub(super) from: Seq,
    /// One past the last PSN.
    pub(super) to: Seq,
}

impl Requester {
    /// Writes a request packet.
    pub(super) fn emit_request(
        &self,
        qp: &QpContext,
        request: Request,
        ack_req: bool,
        kind: TxKind,
        tx: &mut impl TxSink,
    ) -> Result<(), Unsent> {
        let Request { index, from, to } = request;
        let (wqe, target) = (&self.sq.wqes[index], self.sq.target(index));
        let index = from.since(wqe.first);
        let opcode = qp.wire(wqe.opcode(index));
        let info = opcode.info();
        let (offset, len) = wqe.payload(index, qp.mtu());
        let (end, last_len) = wqe.slice(to.prev().since(wqe.first), qp.mtu());
        let pad = len.wrapping_neg() & 3;
        let mut peer = qp.peer();
        if let Target::Datagram(to) = target {
            peer = to.qpn;
            if !tx.direct(&to.av, peer) {
                return Err(Unsent::Fault(WcStatus::LocalQpOperationError));
            }
        }
        let mut bth = Bth::new(opcode, peer, from.psn());
        bth.ack_req = ack_req;
        bth.pad = pad as u8;
        bth.solicited = wqe.flags.contains(SendFlags::SOLICITED)
            && info.position.ends()
            && (wqe.kind() == Kind::Send || info.has(ExtHeader::Imm));
        let head = info.header_len;
        let out = tx.reserve(kind, head + len + pad).ok_or(Unsent::Full)?;
        let mut header = HeaderWriter::new(&bth, out);
        write_extended(&mut header, info, wqe, offset, end + last_len);
        write_target(qp, &mut header, target);
        if len > 0 {
            let filled = wqe.data.read_at(offset, &mut out[head..head + len]);
            filled.map_err(|_| Unsent::Fault(WcStatus::LocalProtectionError))?;
            out[head + len..].fill(0);
        }
        tx.commit();
        Ok(())
    }
}

/// Writes the DETH of a datagram or the XRCETH of an XRC message.
fn write_target(qp: &QpContext, header: &mut HeaderWriter<'_>, target: &Target) {
    match *target {
        Target::Peer => {}
        Target::Datagram(to) => header.deth(Deth {
            qkey: if to.qkey.is_controlled() { qp.qkey() } else { to.qkey },
            reserved: 0,
            src_qp: qp.qpn(),
        }),
        Target::Srq(srqn) => header.xrceth(XrcEth { reserved: 0, srqn }),
    }
}

/// Writes the extended headers of a request. `offset..end` is the part of the message that a READ requests, bytes.
fn write_extended(header: &mut HeaderWriter<'_>, info: &OpcodeInfo, wqe: &SendWqe, offset: usize, end: usize) {
    if info.has(ExtHeader::Reth) {
        let RemoteAddr { addr, rkey } = match wqe.op {
            SendOp::Write(to) | SendOp::WriteWithImm(to, _) | SendOp::Read(to) | SendOp::AtomicWrite(to) => to,
            SendOp::Flush(flush) => flush.remote,
            _ => RemoteAddr::default(),
        };
        header.reth(Reth {
            va: addr.wrapping_add(offset as u64),
            rkey,
            dma_len: match (wqe.kind(), &wqe.op) {
                (Kind::Read, _) => (end - offset) as u32,
                (_, SendOp::Flush(flush)) => flush.length,
                _ => wqe.len,
            },
        });
    }
    match wqe.op {
        // Only the last packet of a message has them.
        SendOp::SendWithImm(imm) | SendOp::WriteWithImm(_, imm) => header.imm(imm),
        SendOp::SendWithInv(key) => header.ieth(key),
        SendOp::Flush(flush) => header.feth(Feth {
            placement: flush.placement,
            selectivity: flush.selectivity,
            reserved: 0,
        }),
        SendOp::CompareSwap { remote, compare, swap } => header.atomic_eth(AtomicEth {
            va: remote.addr,
            rkey: remote.rkey,
            swap_add: swap,
            compare,
        }),
        SendOp::FetchAdd { remote, add } => header.atomic_eth(AtomicEth {
            va: remote.addr,
            rkey: remote.rkey,
            swap_add: add,
            compare: 0,
        }),
        _ => {}
    }
}
