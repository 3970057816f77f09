//! Operations of messages of programs.

use core::ops::Range;
use std::{collections::BTreeMap, sync::Arc};

use rds::{Attachment, Operation, OperationFlags, OperationKind, proto::RdmaCookie};
use rds_local::{AtomicKind, AtomicOp, Op, RdmaOp};
use roce_verbs::provider::Memory;

use crate::memory;

/// `RDS_RDMA_READWRITE`: the peer's memory is written.
const READWRITE: u64 = 1;

/// Memory of programs by the numbers that they have for it.
#[derive(Debug, Default)]
pub(crate) struct Memories(BTreeMap<u64, (u32, Arc<dyn Memory>)>);

impl Memories {
    /// Adds that of a process, by a number that nobody else can know.
    pub(crate) fn add(&mut self, number: u64, process: u32, memory: Arc<dyn Memory>) {
        self.0.insert(number, (process, memory));
    }

    /// The process has no use for it any more.
    pub(crate) fn remove(&mut self, number: u64) {
        self.0.remove(&number);
    }

    /// Returns the memory of a number that a process has sent. A forked child knows its parent's numbers, and has no right to its memory.
    pub(crate) fn get(&self, number: u64, process: u32) -> Option<&Arc<dyn Memory>> {
        let (of, memory) = self.0.get(&number)?;
        (process != 0 && *of == process).then_some(memory)
    }
}

/// Returns what goes with a message of a process; `None`: it is impossible, and libraries refuse it. An operation of a process whose
/// memory is gone fails when its turn comes, so that reports are in order.
pub(crate) fn attachment(op: Op, process: u32, memories: &Memories) -> Option<Attachment> {
    let memory = |number| memories.get(number, process).cloned().unwrap_or_else(memory::none);
    match op {
        Op::None => Some(Attachment::Nothing),
        Op::Dest(cookie) => Some(Attachment::Cookie(RdmaCookie(cookie))),
        Op::Rdma(op) => rdma(&op, memory(op.memory)),
        Op::Atomic(op) => atomic(&op, memory(op.memory)),
    }
}

fn piece(at: u64, len: u64) -> Option<Range<usize>> {
    let end = at.checked_add(len)?;
    Some(usize::try_from(at).ok()?..usize::try_from(end).ok()?)
}

/// The kernel's flags have the same bits.
fn flags(flags: u64) -> OperationFlags {
    OperationFlags::from_bits_truncate(flags as u32)
}

fn rdma(op: &RdmaOp, memory: Arc<dyn Memory>) -> Option<Attachment> {
    let kind = match op.flags & READWRITE {
        0 => OperationKind::Read,
        _ => OperationKind::Write,
    };
    let pieces = op.local.iter().map(|(at, len)| piece(*at, *len));
    Some(Attachment::Operation(Box::new(Operation {
        kind,
        cookie: RdmaCookie(op.cookie),
        remote: op.remote_addr,
        memory,
        pieces: pieces.collect::<Option<_>>()?,
        flags: flags(op.flags),
        token: op.token,
    })))
}

fn atomic(op: &AtomicOp, memory: Arc<dyn Memory>) -> Option<Attachment> {
    const ALL: u64 = u64::MAX;
    let kind = match (op.kind, op.values) {
        (AtomicKind::FetchAdd, [add, ..]) | (AtomicKind::MaskedFetchAdd, [add, 0, ..]) => {
            OperationKind::FetchAdd { add }
        }
        (AtomicKind::CompareSwap, [compare, swap, ..]) | (AtomicKind::MaskedCompareSwap, [compare, swap, ALL, ALL]) => {
            OperationKind::CompareSwap { compare, swap }
        }
        // RoCE has no packets for these.
        (AtomicKind::MaskedFetchAdd | AtomicKind::MaskedCompareSwap, _) => return None,
    };
    Some(Attachment::Operation(Box::new(Operation {
        kind,
        cookie: RdmaCookie(op.cookie),
        remote: op.remote_addr,
        memory,
        pieces: vec![piece(op.local_addr, 8)?],
        flags: flags(op.flags),
        token: op.token,
    })))
}
