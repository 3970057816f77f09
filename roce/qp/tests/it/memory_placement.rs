//! ATOMIC WRITE and FLUSH (IBTA Annex A19).

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use roce_bth::{Class, Feth, Opcode, Placement, Selectivity};
use roce_verbs::mem::{MemError, NewRegion, Persist, Region};
use roce_verbs::{
    AccessFlags, AsyncEvent, Completion, Flush, Payload, Qpn, RKey, SendFlags, SendOp, SendWr, WcOpcode, WcStatus,
};

use crate::harness::*;

pub(crate) const GLOBAL: Placement = Placement::GLOBAL_VISIBILITY;
pub(crate) const PERSISTENT: Placement = Placement::PERSISTENT;

/// Remembers what was made persistent.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) ranges: Mutex<Vec<(usize, usize)>>,
    pub(crate) broken: bool,
}

impl Persist for Log {
    fn persist(&self, offset: usize, len: usize) -> bool {
        self.ranges.lock().unwrap().push((offset, len));
        !self.broken
    }
}

pub(crate) fn all() -> AccessFlags {
    ALL | AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT
}

/// Page-like memory that is "persistent", leaked so that it outlives every region.
pub(crate) fn persistent(side: &Side, len: usize, access: AccessFlags, log: &Arc<Log>) -> Arc<Region> {
    let memory: &'static mut [u64] = vec![0u64; len / 8].leak();
    let ptr = memory.as_mut_ptr().cast();
    let new = NewRegion {
        pd: side.pd,
        ptr,
        len,
        iova: ptr as u64,
        access,
        persist: Some(log.clone()),
    };
    // SAFETY: leaked above and never touched but through the region.
    unsafe { side.mem.register(&new) }.unwrap()
}

fn pair(access: AccessFlags) -> Pair {
    Pair::new(Setup {
        access,
        ..Setup::default()
    })
}

pub(crate) fn flush(
    region: &Region,
    offset: usize,
    length: u32,
    placement: Placement,
    selectivity: Selectivity,
) -> SendOp {
    SendOp::Flush(Flush {
        remote: at(region, offset),
        length,
        placement,
        selectivity,
    })
}

pub(crate) fn ids(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

#[test]
fn an_atomic_write_lands_and_is_answered_like_a_read_of_nothing() {
    for inline in [false, true] {
        let mut p = pair(ALL);
        let (src, dst) = (p.a.filled(8, 5), p.b.region(64));
        let data = pattern(8, 5);
        let sges = [sge(&src, 0, 8)];
        let payload = if inline {
            Payload::Inline(&data)
        } else {
            Payload::Sges(&sges)
        };
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::AtomicWrite(at(&dst, 16)),
            flags: SendFlags::SIGNALED,
            payload,
        };
        p.a.try_send(&wr).unwrap();
        let mut seen = Vec::new();
        p.run_with(Duration::from_secs(1), |_, packet| {
            seen.push((packet.header.bth.opcode, packet.payload.len()));
            Fate::Deliver
        });
        assert_eq!(seen, [(Opcode::RcAtomicWrite, 8), (Opcode::RcReadResponseOnly, 0)]);
        assert_eq!(bytes(&dst, 16, 8), data);
        let sent = p.a.completions();
        assert_eq!(
            (ids(&sent), sent[0].opcode),
            (vec![(1, WcStatus::Success)], WcOpcode::AtomicWrite)
        );
    }
}

#[test]
fn atomic_writes_are_done_once_however_often_they_come() {
    let mut p = pair(ALL);
    let (one, two, dst) = (p.a.filled(8, 1), p.a.filled(8, 2), p.b.region(8));
    p.a.send(1, SendOp::AtomicWrite(at(&dst, 0)), &[sge(&one, 0, 8)]);
    p.a.send(2, SendOp::AtomicWrite(at(&dst, 0)), &[sge(&two, 0, 8)]);
    let packets = p.a.drain();
    for i in [0, 1, 0] {
        p.b.handle(&packets[i].1);
    }
    assert_eq!(
        bytes(&dst, 0, 8),
        pattern(8, 2),
        "the late copy of the first changes nothing"
    );
    let answers: Vec<_> =
        p.b.headers()
            .iter()
            .map(|h| (h.bth.opcode.info().class, h.bth.psn.value()))
            .collect();
    let psn = p.setup.psn;
    // The replay of the first goes out before the answer of the second, whose turn is later.
    assert_eq!(answers, [(Class::ReadResponse, psn), (Class::ReadResponse, psn + 1)]);
    assert_eq!(p.b.counters.duplicate_request, 1);
}

#[test]
fn lost_requests_and_answers_are_made_good_in_order() {
    let mut p = pair(all());
    let log = Arc::new(Log::default());
    let dst = persistent(&p.b, 4096, all(), &log);
    let src = p.a.filled(4096, 1);
    let word = p.a.filled(8, 9);
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 4096)]);
    p.a.send(2, flush(&dst, 0, 4096, PERSISTENT, Selectivity::Range), &[]);
    p.a.send(3, SendOp::AtomicWrite(at(&dst, 64)), &[sge(&word, 0, 8)]);
    p.a.send(4, flush(&dst, 64, 8, GLOBAL.union(PERSISTENT), Selectivity::Range), &[]);
    let mut n = 0;
    p.run_with(Duration::from_secs(60), |_, _| {
        n += 1;
        if n % 3 == 0 { Fate::Drop } else { Fate::Deliver }
    });
    assert_eq!(ids(&p.a.completions()), [1, 2, 3, 4].map(|id| (id, WcStatus::Success)));
    let mut expected = pattern(4096, 1);
    expected[64..72].copy_from_slice(&pattern(8, 9));
    assert_eq!(bytes(&dst, 0, 4096), expected);
    assert_eq!(
        *log.ranges.lock().unwrap(),
        [(0, 4096), (64, 8)],
        "each once, after what came before"
    );
}

#[test]
fn a_flush_covers_the_range_or_all_of_the_region() {
    let mut p = pair(all());
    let log = Arc::new(Log::default());
    let dst = persistent(&p.b, 4096, all(), &log);
    p.a.send(1, flush(&dst, 100, 50, PERSISTENT, Selectivity::Range), &[]);
    p.a.send(2, flush(&dst, 0, 0, PERSISTENT, Selectivity::Region), &[]);
    p.a.send(3, flush(&dst, 9000, 7, PERSISTENT, Selectivity::Region), &[]);
    p.a.send(4, flush(&dst, 8, 8, GLOBAL, Selectivity::Range), &[]);
    p.a.send(5, flush(&dst, 8, 0, PERSISTENT, Selectivity::Range), &[]);
    p.run();
    let sent = p.a.completions();
    assert_eq!(ids(&sent), [1, 2, 3, 4, 5].map(|id| (id, WcStatus::Success)));
    assert!(sent.iter().all(|c| c.opcode == WcOpcode::Flush));
    assert_eq!(*log.ranges.lock().unwrap(), [(100, 50), (0, 4096), (0, 4096)]);
}

#[test]
fn the_header_says_what_was_asked() {
    let mut p = pair(all());
    let dst = p.b.region(64);
    p.a.send(1, flush(&dst, 8, 16, GLOBAL, Selectivity::Region), &[]);
    let header = p.a.headers()[0];
    assert_eq!(header.bth.opcode, Opcode::RcFlush);
    let reth = header.reth.unwrap();
    assert_eq!((reth.va, reth.rkey, reth.dma_len), (dst.addr() + 8, dst.rkey(), 16));
    let feth = Feth {
        placement: GLOBAL,
        selectivity: Selectivity::Region,
        reserved: 0,
    };
    assert_eq!(header.feth, Some(feth));
}

#[test]
fn flushes_need_their_rights_on_queue_pair_and_region() {
    let both = AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT;
    for placement in [GLOBAL, PERSISTENT, GLOBAL.union(PERSISTENT)] {
        let need = {
            let mut need = AccessFlags::empty();
            need.set(AccessFlags::FLUSH_GLOBAL, placement.contains(GLOBAL));
            need.set(AccessFlags::FLUSH_PERSISTENT, placement.contains(PERSISTENT));
            need
        };
        for on_qp in [
            AccessFlags::empty(),
            AccessFlags::FLUSH_GLOBAL,
            AccessFlags::FLUSH_PERSISTENT,
            both,
        ] {
            for on_region in [
                AccessFlags::empty(),
                AccessFlags::FLUSH_GLOBAL,
                AccessFlags::FLUSH_PERSISTENT,
                both,
            ] {
                for selectivity in [Selectivity::Range, Selectivity::Region] {
                    let mut p = pair(ALL | on_qp);
                    let log = Arc::new(Log::default());
                    let dst = persistent(&p.b, 64, ALL | on_region, &log);
                    p.a.send(1, flush(&dst, 0, 8, placement, selectivity), &[]);
                    p.run();
                    let (status, event) = if !on_qp.contains(need) {
                        let event = AsyncEvent::QpRequestError(Qpn::new(B));
                        (WcStatus::RemoteInvalidRequestError, Some(event))
                    } else if !on_region.contains(need) {
                        (
                            WcStatus::RemoteAccessError,
                            Some(AsyncEvent::QpAccessError(Qpn::new(B))),
                        )
                    } else {
                        (WcStatus::Success, None)
                    };
                    assert_eq!(
                        ids(&p.a.completions()),
                        [(1, status)],
                        "{placement:?} {on_qp:?} {on_region:?}"
                    );
                    assert_eq!(p.b.events, event.into_iter().collect::<Vec<_>>());
                }
            }
        }
    }
}

#[test]
fn bad_ranges_and_keys_are_access_errors() {
    for (offset, len, twist, selectivity) in [
        (60, 5, 0, Selectivity::Range),
        (0, 65, 0, Selectivity::Range),
        (0, 8, 0x100, Selectivity::Range),
        (0, 8, 0x100, Selectivity::Region),
    ] {
        let mut p = pair(all());
        let dst =
            p.b.mem
                .alloc_region(p.b.pd, 64, ALL | AccessFlags::FLUSH_GLOBAL)
                .unwrap();
        let SendOp::Flush(mut args) = flush(&dst, offset, len, GLOBAL, selectivity) else {
            unreachable!()
        };
        args.remote.rkey = RKey(args.remote.rkey.0 ^ twist);
        p.a.send(1, SendOp::Flush(args), &[]);
        p.run();
        assert_eq!(ids(&p.a.completions()), [(1, WcStatus::RemoteAccessError)]);
    }
}

#[test]
fn persistence_that_fails_is_an_operational_error() {
    let mut p = pair(all());
    let log = Arc::new(Log {
        broken: true,
        ..Log::default()
    });
    let dst = persistent(&p.b, 64, all(), &log);
    p.a.send(1, flush(&dst, 0, 8, PERSISTENT, Selectivity::Range), &[]);
    p.run();
    assert_eq!(ids(&p.a.completions()), [(1, WcStatus::RemoteOperationError)]);
    assert_eq!(p.b.events, [AsyncEvent::QpFatal(Qpn::new(B))]);
}

#[test]
fn only_persistent_memory_gives_the_right_to_persistence() {
    let side = Side::new(A, &Setup::default());
    let made = side.mem.alloc_region(side.pd, 64, ALL | AccessFlags::FLUSH_PERSISTENT);
    assert_eq!(made.unwrap_err(), MemError::NotPersistent);
    assert!(
        side.mem
            .alloc_region(side.pd, 64, ALL | AccessFlags::FLUSH_GLOBAL)
            .is_ok()
    );
}

#[test]
fn atomic_writes_are_checked() {
    // Alignment, right of the queue pair, right of the region, key, range.
    let no_write = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
    for (qp, region, offset, twist, status) in [
        (ALL, ALL, 4, 0, WcStatus::RemoteInvalidRequestError),
        (no_write, ALL, 8, 0, WcStatus::RemoteInvalidRequestError),
        (ALL, no_write, 8, 0, WcStatus::RemoteAccessError),
        (ALL, ALL, 8, 0x100, WcStatus::RemoteAccessError),
        (ALL, ALL, 64, 0, WcStatus::RemoteAccessError),
    ] {
        let mut p = pair(qp);
        let src = p.a.filled(8, 1);
        let dst = p.b.mem.alloc_region(p.b.pd, 64, region).unwrap();
        let mut to = at(&dst, offset);
        to.rkey.0 ^= twist;
        p.a.send(1, SendOp::AtomicWrite(to), &[sge(&src, 0, 8)]);
        p.run();
        assert_eq!(ids(&p.a.completions()), [(1, status)]);
        assert_eq!(bytes(&dst, 0, 64), [0; 64]);
    }
    // On the wire: 8 bytes, and a RETH that says so.
    for (payload, dma_len) in [(4, 8), (8, 4), (12, 8), (8, 12), (0, 8)] {
        let mut p = pair(ALL);
        let dst = p.b.region(64);
        let raw = Raw::new(Opcode::RcAtomicWrite, B, p.setup.psn)
            .reth(dst.addr(), dst.rkey(), dma_len)
            .payload(&vec![1; payload]);
        p.b.handle(&raw.bytes());
        assert_eq!(p.b.events, [AsyncEvent::QpRequestError(Qpn::new(B))]);
        assert_eq!(bytes(&dst, 0, 64), [0; 64]);
    }
}

#[test]
fn flushes_that_ask_for_what_there_is_not_are_refused() {
    let known = Feth {
        placement: GLOBAL,
        selectivity: Selectivity::Range,
        reserved: 0,
    };
    for feth in [
        Feth {
            placement: Placement::default(),
            ..known
        },
        Feth {
            placement: Placement::from_bits_retain(4),
            ..known
        },
        // Beyond the header's four bits: none at all on the wire.
        Feth {
            placement: Placement::from_bits_retain(16),
            ..known
        },
        Feth {
            selectivity: Selectivity::Reserved(2),
            ..known
        },
    ] {
        let mut p = pair(all());
        let dst =
            p.b.mem
                .alloc_region(p.b.pd, 64, ALL | AccessFlags::FLUSH_GLOBAL)
                .unwrap();
        let mut raw = Raw::new(Opcode::RcFlush, B, p.setup.psn).reth(dst.addr(), dst.rkey(), 8);
        raw.header.feth = Some(feth);
        p.b.handle(&raw.bytes());
        assert_eq!(p.b.events, [AsyncEvent::QpRequestError(Qpn::new(B))], "{feth:?}");
        // And not accepted from the program.
        let op = SendOp::Flush(Flush {
            remote: at(&dst, 0),
            length: 8,
            placement: feth.placement,
            selectivity: feth.selectivity,
        });
        let wr = SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&[]),
        };
        let accepted = p.a.try_send(&wr).is_ok();
        assert_eq!(accepted, feth.placement == Placement::from_bits_retain(4));
    }
}

#[test]
fn they_count_as_reads_do() {
    // One resource: the second waits for the answer of the first; a fence waits as well.
    let mut p = Pair::new(Setup {
        rd_atomic: 1,
        access: all(),
        ..Setup::default()
    });
    let dst =
        p.b.mem
            .alloc_region(p.b.pd, 64, ALL | AccessFlags::FLUSH_GLOBAL)
            .unwrap();
    let src = p.a.filled(8, 1);
    p.a.send(1, SendOp::AtomicWrite(at(&dst, 0)), &[sge(&src, 0, 8)]);
    p.a.send(2, flush(&dst, 0, 8, GLOBAL, Selectivity::Range), &[]);
    p.a.send_flags(
        3,
        SendOp::Write(at(&dst, 8)),
        &[sge(&src, 0, 8)],
        SendFlags::FENCE | SendFlags::SIGNALED,
    );
    assert_eq!(p.a.headers().len(), 1);
    assert_eq!(p.a.qp.wait_reason(), roce_qp::WaitReason::RdAtomic);
    let mut order = Vec::new();
    let mut p = {
        let mut q = Pair::new(p.setup.clone());
        let dst =
            q.b.mem
                .alloc_region(q.b.pd, 64, ALL | AccessFlags::FLUSH_GLOBAL)
                .unwrap();
        let src = q.a.filled(8, 1);
        q.a.send(1, SendOp::AtomicWrite(at(&dst, 0)), &[sge(&src, 0, 8)]);
        q.a.send(2, flush(&dst, 0, 8, GLOBAL, Selectivity::Range), &[]);
        q.a.send_flags(
            3,
            SendOp::Write(at(&dst, 8)),
            &[sge(&src, 0, 8)],
            SendFlags::FENCE | SendFlags::SIGNALED,
        );
        q
    };
    p.run_with(Duration::from_secs(1), |_, packet| {
        order.push(packet.header.bth.opcode.info().class);
        Fate::Deliver
    });
    assert_eq!(
        order,
        [
            Class::AtomicWrite,
            Class::ReadResponse,
            Class::Flush,
            Class::ReadResponse,
            Class::Write,
            Class::Acknowledge
        ]
    );
    assert_eq!(ids(&p.a.completions()), [1, 2, 3].map(|id| (id, WcStatus::Success)));
}
