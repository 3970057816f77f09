//! Send queue: work requests with their PSNs.

use std::collections::VecDeque;

use roce_bth::{Class, Opcode, Psn};
use roce_verbs::mem::{AccessError, KeyCache, KeyError, MemoryTable, PdHandle, SgList};
use roce_verbs::{AccessFlags, Payload, RemoteAddr, SendFlags, SendOp, Sge, Target, WcOpcode, WcStatus};
use smallvec::SmallVec;

use crate::{
    seq::Seq,
    slots::{KEEP_CAPACITY, SlotQueue},
};

/// Kind of a send work request, as far as packets go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Send,
    Write,
    Read,
    Atomic,
    /// 8 bytes to the peer, with a response.
    AtomicWrite,
    Flush,
    /// Executed locally, without a packet.
    Local,
}

/// One row per operation: kind, completion opcode, and the opcodes of its packets (first, middle, last, only).
#[derive(Debug)]
pub(crate) struct OpRow {
    pub(crate) kind: Kind,
    wc: WcOpcode,
    packets: [Opcode; 4],
}

/// Returns a row whose packets all have one opcode.
const fn single(kind: Kind, wc: WcOpcode, packet: Opcode) -> OpRow {
    let packets = [packet; 4];
    OpRow { kind, wc, packets }
}

/// Returns the row of a SEND with these last and only packets.
const fn send(last: Opcode, only: Opcode) -> OpRow {
    OpRow {
        kind: Kind::Send,
        wc: WcOpcode::Send,
        packets: [O::RcSendFirst, O::RcSendMiddle, last, only],
    }
}

/// Returns the row of a WRITE with these last and only packets.
const fn write(last: Opcode, only: Opcode) -> OpRow {
    OpRow {
        kind: Kind::Write,
        wc: WcOpcode::RdmaWrite,
        packets: [O::RcWriteFirst, O::RcWriteMiddle, last, only],
    }
}

use Opcode as O;

/// Returns the row of an operation.
pub(crate) const fn op_info(op: &SendOp) -> &'static OpRow {
    use {Kind as K, WcOpcode as W};
    match op {
        SendOp::Send => const { &send(O::RcSendLast, O::RcSendOnly) },
        SendOp::SendWithImm(_) => const { &send(O::RcSendLastImm, O::RcSendOnlyImm) },
        SendOp::SendWithInv(_) => const { &send(O::RcSendLastInv, O::RcSendOnlyInv) },
        SendOp::Write(_) => const { &write(O::RcWriteLast, O::RcWriteOnly) },
        SendOp::WriteWithImm(..) => const { &write(O::RcWriteLastImm, O::RcWriteOnlyImm) },
        SendOp::Read(_) => const { &single(K::Read, W::RdmaRead, O::RcReadRequest) },
        SendOp::CompareSwap { .. } => const { &single(K::Atomic, W::CompareSwap, O::RcCompareSwap) },
        SendOp::FetchAdd { .. } => const { &single(K::Atomic, W::FetchAdd, O::RcFetchAdd) },
        SendOp::AtomicWrite(_) => const { &single(K::AtomicWrite, W::AtomicWrite, O::RcAtomicWrite) },
        SendOp::Flush(_) => const { &single(K::Flush, W::Flush, O::RcFlush) },
        SendOp::LocalInvalidate(_) => const { &single(K::Local, W::LocalInvalidate, O::RcSendOnly) },
        SendOp::FastRegister(_) => const { &single(K::Local, W::FastRegister, O::RcSendOnly) },
        SendOp::BindWindow(_) => const { &single(K::Local, W::BindWindow, O::RcSendOnly) },
    }
}

/// Local bytes of a work request.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    /// Not resolved yet: a fast registration queued before may make the keys valid.
    Sges(SmallVec<[Sge; 1]>),
    /// Resolved when the work request started.
    List(SgList),
    /// Copied when the work request was posted.
    Inline(SmallVec<[u8; 32]>),
}

impl Default for Data {
    /// No bytes.
    fn default() -> Self {
        Self::Sges(SmallVec::new())
    }
}

impl Data {
    pub(crate) fn new(payload: &Payload<'_>) -> Self {
        match payload {
            Payload::Sges(sges) => Self::Sges(SmallVec::from_slice(sges)),
            Payload::Inline(bytes) => Self::Inline(SmallVec::from_slice(bytes)),
        }
    }

    /// Copies a range out.
    pub(crate) fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        match self {
            Self::List(list) => list.read_at(offset, out),
            Self::Inline(bytes) => {
                let src = offset.checked_add(out.len()).and_then(|end| bytes.get(offset..end));
                out.copy_from_slice(src.ok_or(AccessError::Revoked)?);
                Ok(())
            }
            Self::Sges(_) => Err(AccessError::Revoked),
        }
    }

    /// Copies a range in.
    pub(crate) fn write_at(&self, offset: usize, data: &[u8]) -> Result<(), AccessError> {
        match self {
            Self::List(list) => list.write_at(offset, data),
            _ => Err(AccessError::Revoked),
        }
    }
}

/// Resolves scatter/gather elements. `None` if one is invalid.
#[inline(always)] // A list is long to copy.
pub(crate) fn resolve(
    keys: &mut KeyCache,
    mem: &MemoryTable,
    pd: PdHandle,
    sges: &[Sge],
    need: AccessFlags,
) -> Option<SgList> {
    if let [sge] = sges {
        // The key of an empty element is not checked.
        return match sge.length {
            0 => Some(SgList::new()),
            _ => Some(SgList::from(keys.resolve_local(mem, pd, sge, need).ok()?)),
        };
    }
    let mut list = SgList::new();
    for sge in sges.iter().filter(|s| s.length > 0) {
        list.push(keys.resolve_local(mem, pd, sge, need).ok()?);
    }
    Some(list)
}

/// Progress of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    Posted,
    /// Its memory is resolved; packets of it may have been sent.
    Started,
    /// Local operation, done.
    Executed,
    /// Failed locally. Completes with the error after everything before it.
    Failed(WcStatus),
}

/// Result of checking a send work request that can be queued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    /// Bytes.
    pub(crate) len: u32,
    /// Status that it fails with in its turn.
    pub(crate) fault: Option<WcStatus>,
}

/// A send work request in the queue.
#[derive(Debug)]
pub(crate) struct SendWqe {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    pub(crate) row: &'static OpRow,
    pub(crate) flags: SendFlags,
    pub(crate) progress: Progress,
    /// Status that it fails with in its turn.
    pub(crate) fault: Option<WcStatus>,
    /// Error of a failed local operation.
    pub(crate) key_error: Option<KeyError>,
    pub(crate) len: u32,
    /// Number of PSNs; 0 for local operations and datagrams that are too long.
    pub(crate) packets: u32,
    /// PSNs of each request packet: of a READ, the responses that one requests (the last may request fewer). Fixed once the
    /// first is sent, because a repeated request must be part of the original.
    pub(crate) stride: u32,
    /// First PSN.
    pub(crate) first: Seq,
    pub(crate) data: Data,
}

impl Default for SendWqe {
    fn default() -> Self {
        let op = SendOp::Send;
        Self {
            wr_id: 0,
            row: op_info(&op),
            op,
            flags: SendFlags::empty(),
            progress: Progress::Posted,
            fault: None,
            key_error: None,
            len: 0,
            packets: 0,
            stride: 0,
            first: Seq::start(Psn::new(0)),
            data: Data::default(),
        }
    }
}

impl SendWqe {
    pub(crate) fn kind(&self) -> Kind {
        self.row.kind
    }

    pub(crate) fn wc_opcode(&self) -> WcOpcode {
        self.row.wc
    }

    /// Returns whether the responder answers it with a response of its own: READ, atomics, FLUSH and ATOMIC WRITE.
    pub(crate) fn has_response(&self) -> bool {
        let answered = matches!(self.kind(), Kind::Read | Kind::Atomic | Kind::AtomicWrite | Kind::Flush);
        answered && self.fault.is_none()
    }

    /// Returns whether it completes a receive of the peer.
    pub(crate) fn completes_receive(&self) -> bool {
        self.kind() == Kind::Send || matches!(self.op, SendOp::WriteWithImm(..))
    }

    /// Returns the rights that it needs to its local memory: the response's data is written there.
    pub(crate) fn local_rights(&self) -> AccessFlags {
        match self.kind() {
            Kind::Read | Kind::Atomic => AccessFlags::LOCAL_WRITE,
            _ => AccessFlags::empty(),
        }
    }

    /// Returns the memory that it names at the peer.
    pub(crate) fn remote(&self) -> Option<RemoteAddr> {
        match self.op {
            SendOp::Write(to) | SendOp::WriteWithImm(to, _) | SendOp::Read(to) | SendOp::AtomicWrite(to) => Some(to),
            SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. } => Some(remote),
            SendOp::Flush(flush) => Some(flush.remote),
            _ => None,
        }
    }

    /// Returns offset and length of the payload of packet `index`.
    pub(crate) fn payload(&self, index: u64, mtu: usize) -> (usize, usize) {
        let (offset, len) = self.slice(index, mtu);
        match self.kind() {
            Kind::Send | Kind::Write | Kind::AtomicWrite => (offset, len),
            _ => (offset, 0),
        }
    }

    /// Returns one past the last PSN.
    pub(crate) fn end(&self) -> Seq {
        self.first.plus(u64::from(self.packets))
    }

    /// Returns the opcode of packet `index`.
    pub(crate) fn opcode(&self, index: u64) -> Opcode {
        let [first, middle, last, only] = self.row.packets;
        match index {
            _ if self.packets <= 1 => only,
            0 => first,
            _ if index + 1 < u64::from(self.packets) => middle,
            _ => last,
        }
    }

    /// Returns offset and length of the part of the message that belongs to PSN `index`.
    pub(crate) fn slice(&self, index: u64, mtu: usize) -> (usize, usize) {
        let len = self.len as usize;
        if self.packets == 1 {
            return (0, len);
        }
        let offset = (index as usize).saturating_mul(mtu).min(len);
        (offset, (len - offset).min(mtu))
    }

    /// Returns the index of the request packet that `seq` belongs to; past the end, the number of request packets.
    fn request_index(&self, seq: Seq) -> u64 {
        let stride = u64::from(self.stride.max(1));
        match seq >= self.end() {
            true => u64::from(self.packets).div_ceil(stride),
            false => seq.since(self.first) / stride,
        }
    }

    /// Returns the first PSN of the request packet that `seq` belongs to.
    pub(crate) fn request_start(&self, seq: Seq) -> Seq {
        self.first.plus(self.request_index(seq) * u64::from(self.stride))
    }

    /// Returns one past the last PSN that the request packet at `seq` covers.
    pub(crate) fn request_end(&self, seq: Seq) -> Seq {
        self.request_start(seq).plus(u64::from(self.stride)).min(self.end())
    }

    /// Returns the number of requests that are answered when the oldest outstanding PSN moves from `from` to `to`.
    pub(crate) fn answered(&self, from: Seq, to: Seq) -> u32 {
        match self.has_response() {
            true => (self.request_index(to) - self.request_index(from.max(self.first))) as u32,
            false => 0,
        }
    }

    /// Returns the weight of the packets `from..to` in the window.
    #[inline]
    pub(crate) fn cost(&self, from: Seq, to: Seq, mtu: usize) -> usize {
        let (from, to) = (from.max(self.first), to.min(self.end()));
        let n = to.since(from);
        if n == 0 {
            return 0;
        }
        if self.packets == 1 {
            return self.len as usize + PACKET_OVERHEAD;
        }
        let a = self.slice(from.since(self.first), mtu).0;
        let (b, last) = self.slice(to.since(self.first) - 1, mtu);
        b + last - a + n as usize * PACKET_OVERHEAD
    }

    /// Returns whether a packet of this class may answer the work request.
    pub(crate) fn expects(&self, class: Class) -> bool {
        match class {
            Class::ReadResponse => matches!(self.kind(), Kind::Read | Kind::AtomicWrite | Kind::Flush),
            Class::AtomicAcknowledge => self.kind() == Kind::Atomic,
            _ => false,
        }
    }
}

/// Weight of a packet in the window beside its payload, bytes: headers, and the receiver's bookkeeping for one datagram.
pub const PACKET_OVERHEAD: usize = 512;

/// Send queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    pub(crate) wqes: SlotQueue<SendWqe>,
    /// Destination of each, in queue pairs without a peer or with a choice of queues there; else empty.
    pub(crate) targets: VecDeque<Target>,
    /// First PSN of the next work request.
    pub(crate) tail: Seq,
}

impl SendQueue {
    pub(crate) fn new(first: Seq) -> Self {
        Self {
            wqes: SlotQueue::default(),
            targets: VecDeque::new(),
            tail: first,
        }
    }

    /// Returns the destination of the work request at an index.
    pub(crate) fn target(&self, index: usize) -> &Target {
        self.targets.get(index).unwrap_or(&Target::Peer)
    }

    /// Returns the index of the work request with this PSN.
    pub(crate) fn index_of(&self, seq: Seq) -> Option<usize> {
        let index = self.wqes.partition_point(|w| w.end() <= seq);
        self.wqes.get(index).filter(|w| w.first <= seq)?;
        Some(index)
    }

    /// Returns a packet's cost in the window, and whether it has a response.
    pub(crate) fn weigh(&self, seq: Seq, mtu: usize) -> (usize, bool) {
        let Some(index) = self.index_of(seq) else {
            return (0, false);
        };
        let wqe = &self.wqes[index];
        (wqe.cost(seq, seq.plus(1), mtu), wqe.has_response())
    }

    /// Returns whether a packet has a response: it belongs to a READ, atomic, FLUSH or ATOMIC WRITE.
    pub(crate) fn is_answered(&self, seq: Seq) -> bool {
        self.index_of(seq).is_some_and(|index| self.wqes[index].has_response())
    }

    /// Removes the oldest work request.
    pub(crate) fn pop(&mut self) {
        self.wqes.pop(|wqe| wqe.data = Data::default());
        self.targets.pop_front();
        if self.targets.is_empty() && self.targets.capacity() > KEEP_CAPACITY {
            self.targets.shrink_to(KEEP_CAPACITY);
        }
    }
}

/// Returns the number of packets of a message, at least one.
pub(crate) fn packets_for(len: u32, mtu: usize) -> u32 {
    len.div_ceil(mtu as u32).max(1)
}
