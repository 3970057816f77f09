//! Send queue: work requests with their PSNs.

use std::collections::VecDeque;

use roce_bth::{Class, Opcode};
use roce_mem::{AccessError, KeyCache, KeyError, MemoryTable, PdHandle, SgList};
use roce_verbs::{AccessFlags, Payload, SendFlags, SendOp, SendWr, Sge, Target, WcOpcode, WcStatus};
use smallvec::SmallVec;

use crate::seq::Seq;

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
struct OpRow {
    kind: Kind,
    wc: WcOpcode,
    packets: [Opcode; 4],
}

const fn op_row(kind: Kind, wc: WcOpcode, packets: [Opcode; 4]) -> OpRow {
    OpRow { kind, wc, packets }
}

use Opcode as O;

static SEND: OpRow = op_row(
    Kind::Send,
    WcOpcode::Send,
    [O::RcSendFirst, O::RcSendMiddle, O::RcSendLast, O::RcSendOnly],
);
static SEND_IMM: OpRow = op_row(
    Kind::Send,
    WcOpcode::Send,
    [O::RcSendFirst, O::RcSendMiddle, O::RcSendLastImm, O::RcSendOnlyImm],
);
static SEND_INV: OpRow = op_row(
    Kind::Send,
    WcOpcode::Send,
    [O::RcSendFirst, O::RcSendMiddle, O::RcSendLastInv, O::RcSendOnlyInv],
);
static WRITE: OpRow = op_row(
    Kind::Write,
    WcOpcode::RdmaWrite,
    [O::RcWriteFirst, O::RcWriteMiddle, O::RcWriteLast, O::RcWriteOnly],
);
static WRITE_IMM: OpRow = op_row(
    Kind::Write,
    WcOpcode::RdmaWrite,
    [O::RcWriteFirst, O::RcWriteMiddle, O::RcWriteLastImm, O::RcWriteOnlyImm],
);
static READ: OpRow = op_row(Kind::Read, WcOpcode::RdmaRead, [O::RcReadRequest; 4]);
static COMPARE_SWAP: OpRow = op_row(Kind::Atomic, WcOpcode::CompareSwap, [O::RcCompareSwap; 4]);
static FETCH_ADD: OpRow = op_row(Kind::Atomic, WcOpcode::FetchAdd, [O::RcFetchAdd; 4]);
static ATOMIC_WRITE: OpRow = op_row(Kind::AtomicWrite, WcOpcode::AtomicWrite, [O::RcAtomicWrite; 4]);
static FLUSH: OpRow = op_row(Kind::Flush, WcOpcode::Flush, [O::RcFlush; 4]);
static INVALIDATE: OpRow = op_row(Kind::Local, WcOpcode::LocalInvalidate, [O::RcSendOnly; 4]);
static REGISTER: OpRow = op_row(Kind::Local, WcOpcode::FastRegister, [O::RcSendOnly; 4]);
static BIND: OpRow = op_row(Kind::Local, WcOpcode::BindWindow, [O::RcSendOnly; 4]);

const fn op_info(op: &SendOp) -> &'static OpRow {
    match op {
        SendOp::Send => &SEND,
        SendOp::SendWithImm(_) => &SEND_IMM,
        SendOp::SendWithInv(_) => &SEND_INV,
        SendOp::Write(_) => &WRITE,
        SendOp::WriteWithImm(..) => &WRITE_IMM,
        SendOp::Read(_) => &READ,
        SendOp::CompareSwap { .. } => &COMPARE_SWAP,
        SendOp::FetchAdd { .. } => &FETCH_ADD,
        SendOp::LocalInvalidate(_) => &INVALIDATE,
        SendOp::FastRegister(_) => &REGISTER,
        SendOp::BindWindow(_) => &BIND,
        SendOp::AtomicWrite(_) => &ATOMIC_WRITE,
        SendOp::Flush(_) => &FLUSH,
    }
}

/// Returns the kind of an operation.
pub(crate) const fn kind_of(op: &SendOp) -> Kind {
    op_info(op).kind
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
pub(crate) fn resolve(
    keys: &mut KeyCache,
    mem: &MemoryTable,
    pd: PdHandle,
    sges: &[Sge],
    need: AccessFlags,
) -> Option<SgList> {
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

impl SendWqe {
    pub(crate) fn kind(&self) -> Kind {
        op_info(&self.op).kind
    }

    pub(crate) fn wc_opcode(&self) -> WcOpcode {
        op_info(&self.op).wc
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

    /// Returns whether the response's data is written to local memory.
    pub(crate) fn is_answered_with_data(&self) -> bool {
        matches!(self.kind(), Kind::Read | Kind::Atomic)
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
        let row = &op_info(&self.op).packets;
        match (index == 0, index + 1 >= u64::from(self.packets)) {
            (true, true) => row[3],
            (true, false) => row[0],
            (false, false) => row[1],
            (false, true) => row[2],
        }
    }

    /// Returns offset and length of the part of the message that belongs to PSN `index`.
    pub(crate) fn slice(&self, index: u64, mtu: usize) -> (usize, usize) {
        let len = self.len as usize;
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

/// Weight of a packet beside its payload: headers, and the receiver's bookkeeping for one datagram.
pub(crate) const PACKET_OVERHEAD: usize = 512;

/// Send queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    pub(crate) wqes: VecDeque<SendWqe>,
    /// Destination of each, in queue pairs without a peer or with a choice of queues there; else empty.
    targets: VecDeque<Target>,
    /// First PSN of the next work request.
    pub(crate) tail: Seq,
}

/// Queues longer than this free memory when they become empty.
pub(crate) const KEEP_CAPACITY: usize = 32;

impl SendQueue {
    pub(crate) fn new(first: Seq) -> Self {
        Self {
            wqes: VecDeque::new(),
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

    /// Appends a work request with its target.
    pub(crate) fn push_to(&mut self, wr: &SendWr<'_>, target: Target, checked: Checked, mtu: usize) {
        if matches!(target, Target::Datagram(_)) && checked.len as usize > mtu {
            // A datagram that is too long is not sent, without an error (IBA C10-93.1.1).
            self.push_packets(wr, checked, 0);
        } else {
            self.push(wr, checked, mtu);
        }
        self.targets.push_back(target);
    }

    /// Appends a checked work request.
    pub(crate) fn push(&mut self, wr: &SendWr<'_>, checked: Checked, mtu: usize) {
        let packets = match kind_of(&wr.op) {
            _ if checked.fault.is_some() => 0,
            Kind::Local => 0,
            _ => packets_for(checked.len, mtu),
        };
        self.push_packets(wr, checked, packets);
    }

    fn push_packets(&mut self, wr: &SendWr<'_>, checked: Checked, packets: u32) {
        let Checked { len, fault } = checked;
        self.wqes.push_back(SendWqe {
            wr_id: wr.wr_id,
            op: wr.op,
            flags: wr.flags,
            progress: Progress::Posted,
            fault,
            key_error: None,
            len,
            packets,
            stride: match kind_of(&wr.op) {
                Kind::Read => packets,
                _ => 1,
            },
            first: self.tail,
            data: Data::new(&wr.payload),
        });
        self.tail = self.tail.plus(u64::from(packets));
    }

    /// Removes the oldest work request.
    pub(crate) fn pop(&mut self) {
        self.wqes.pop_front();
        self.targets.pop_front();
        if self.wqes.is_empty() && self.wqes.capacity() > KEEP_CAPACITY {
            self.wqes.shrink_to(KEEP_CAPACITY);
            self.targets.shrink_to(KEEP_CAPACITY);
        }
    }
}

/// Returns the number of packets of a message, at least one.
pub(crate) fn packets_for(len: u32, mtu: usize) -> u32 {
    len.div_ceil(mtu as u32).max(1)
}
