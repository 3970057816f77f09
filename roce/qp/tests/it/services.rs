//! Work requests that can be posted and can't be done: every operation on every service, as rdma_rxe, mlx5 and irdma.

use roce_bth::{Placement, Selectivity};
use roce_qp::XrcDomain;
use roce_verbs::{
    AccessFlags, LKey, Payload, QpState, QpType, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge, Srqn, Target,
    WcOpcode, WcStatus, legal,
    wr::{BindWindow, FastRegister, Flush, PostError, WrOpcode},
};

use crate::harness::*;

const WORD: RemoteAddr = RemoteAddr {
    addr: 64,
    rkey: RKey(0x100),
};

fn operation(code: WrOpcode) -> SendOp {
    match code {
        WrOpcode::RdmaWrite => SendOp::Write(WORD),
        WrOpcode::RdmaWriteWithImm => SendOp::WriteWithImm(WORD, 1),
        WrOpcode::Send => SendOp::Send,
        WrOpcode::SendWithImm => SendOp::SendWithImm(1),
        WrOpcode::RdmaRead => SendOp::Read(WORD),
        WrOpcode::CompareSwap => SendOp::CompareSwap {
            remote: WORD,
            compare: 0,
            swap: 1,
        },
        WrOpcode::FetchAdd => SendOp::FetchAdd { remote: WORD, add: 1 },
        WrOpcode::LocalInvalidate => SendOp::LocalInvalidate(RKey(0x100)),
        WrOpcode::BindWindow => SendOp::BindWindow(BindWindow {
            key: RKey(0x100),
            lkey: LKey(0x200),
            addr: 0,
            length: 8,
            access: AccessFlags::REMOTE_READ,
        }),
        WrOpcode::SendWithInv => SendOp::SendWithInv(RKey(0x100)),
        WrOpcode::Flush => SendOp::Flush(Flush {
            remote: WORD,
            length: 8,
            placement: Placement::GLOBAL_VISIBILITY,
            selectivity: Selectivity::Range,
        }),
        WrOpcode::AtomicWrite => SendOp::AtomicWrite(WORD),
        WrOpcode::FastRegister => SendOp::FastRegister(FastRegister {
            key: RKey(0x100),
            lkey: LKey(0x200),
            addr: 0,
            length: 8,
            iova: 0,
            access: AccessFlags::REMOTE_READ,
        }),
    }
}

fn list(code: WrOpcode, sge: Sge) -> Vec<Sge> {
    match code {
        WrOpcode::LocalInvalidate | WrOpcode::BindWindow | WrOpcode::Flush | WrOpcode::FastRegister => vec![],
        _ => vec![sge],
    }
}

fn targets(qp_type: QpType) -> Vec<Target> {
    match qp_type {
        QpType::Ud | QpType::Gsi => vec![datagram(B, QKEY), Target::Peer],
        QpType::XrcIni => vec![Target::Srq(Srqn::new(5))],
        _ => vec![Target::Peer],
    }
}

/// A queue pair of a service in RTS.
fn side(qp_type: QpType) -> Side {
    let setup = Setup::default();
    let mut side = Side::with(A, &setup, |c| {
        c.qp_type = qp_type;
        c.xrcd = (qp_type == QpType::XrcTgt).then(XrcDomain::new);
    });
    side.bring_up(&setup, B, 5, 6);
    side
}

fn wr<'a>(wr_id: u64, op: SendOp, sges: &'a [Sge]) -> SendWr<'a> {
    SendWr {
        wr_id,
        op,
        flags: SendFlags::empty(),
        payload: Payload::Sges(sges),
    }
}

/// An operation that the service lacks is queued and fails in its turn; work requests behind it are flushed. A
/// bind is refused at once, as rdma_rxe and irdma do.
#[test]
fn operations_that_a_service_lacks_complete_in_error() {
    let mut lacking = 0;
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud, QpType::Gsi, QpType::XrcIni] {
        for code in WrOpcode::ALL.into_iter().filter(|op| !legal::is_legal(qp_type, *op)) {
            for target in targets(qp_type) {
                let what = format!("{code:?} on {qp_type:?} to {target:?}");
                let mut s = side(qp_type);
                let src = s.region(8);
                let sges = list(code, sge(&src, 0, 8));
                let good = targets(qp_type)[0];
                s.try_send_to(&wr(1, SendOp::Send, &[sge(&src, 0, 8)]), good).unwrap();
                let posted = s.try_send_to(&wr(2, operation(code), &sges), target);
                if matches!(code, WrOpcode::BindWindow | WrOpcode::FastRegister) {
                    assert!(matches!(posted, Err(PostError::Invalid(_))), "{what}: {posted:?}");
                    continue;
                }
                assert_eq!(posted, Ok(()), "{what}");
                s.try_send_to(&wr(3, SendOp::Send, &[sge(&src, 0, 8)]), good).unwrap();
                assert_eq!(s.drain().len(), 1, "{what}: what comes before it is sent");
                let ended: Vec<_> = s.completions().iter().map(|c| (c.wr_id, c.status)).collect();
                let expected = [
                    (1, WcStatus::Success),
                    (2, WcStatus::LocalQpOperationError),
                    (3, WcStatus::FlushError),
                ];
                assert_eq!(ended, expected, "{what}");
                assert_eq!(s.qp.state(), QpState::Sqe, "{what}");
                lacking += 1;
            }
        }
    }
    // UC: READ, atomics, SEND with invalidate, FLUSH, ATOMIC WRITE. UD and GSI also WRITEs and invalidation, to two targets.
    assert_eq!(lacking, 6 + 2 * 2 * 9);
}

#[test]
fn a_receiving_end_has_no_send_queue() {
    let mut s = side(QpType::XrcTgt);
    for code in WrOpcode::ALL {
        let posted = s.try_send(&wr(1, operation(code), &[]));
        assert!(matches!(posted, Err(PostError::Invalid(_))), "{code:?}: {posted:?}");
    }
}

/// An atomic's list has 8 bytes, in however many pieces; any other is found out when the work request is processed.
#[test]
fn atomics_that_are_not_of_eight_bytes_are_local_length_errors() {
    let atomics = [WrOpcode::CompareSwap, WrOpcode::FetchAdd, WrOpcode::AtomicWrite];
    for code in atomics {
        for lens in [&[][..], &[0], &[4], &[7], &[9], &[16], &[8, 8], &[4, 5]] {
            let mut p = Pair::new(Setup {
                signal_all: false,
                caps: two_elements(),
                ..Setup::default()
            });
            let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
            let sges: Vec<Sge> = lens.iter().map(|len| sge(&src, 0, *len)).collect();
            let op = at_word(operation(code), at(&dst, 0));
            p.a.try_send(&wr(1, op, &sges)).unwrap();
            p.a.try_send(&wr(2, SendOp::Write(at(&dst, 0)), &[])).unwrap();
            p.run();
            let done = p.a.completions();
            let ended: Vec<_> = done.iter().map(|c| (c.wr_id, c.status)).collect();
            assert_eq!(
                ended,
                [(1, WcStatus::LocalLengthError), (2, WcStatus::FlushError)],
                "{code:?} {lens:?}"
            );
            assert_ne!(done[0].opcode, WcOpcode::Send);
            assert_eq!(p.a.qp.state(), QpState::Err);
            assert_eq!((p.b.qp.state(), bytes(&dst, 0, 64)), (QpState::Rts, vec![0; 64]));
        }
        let mut p = Pair::new(Setup {
            caps: two_elements(),
            ..Setup::default()
        });
        let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
        let op = at_word(operation(code), at(&dst, 0));
        p.a.send(1, op, &[sge(&src, 0, 3), sge(&src, 8, 5)]);
        p.run();
        assert_eq!(p.a.completions()[0].status, WcStatus::Success, "{code:?}");
    }
}

fn two_elements() -> roce_verbs::QpCaps {
    roce_verbs::QpCaps {
        max_send_sge: 2,
        ..roce_verbs::QpCaps::default()
    }
}

fn at_word(op: SendOp, to: RemoteAddr) -> SendOp {
    match op {
        SendOp::CompareSwap { compare, swap, .. } => SendOp::CompareSwap {
            remote: to,
            compare,
            swap,
        },
        SendOp::FetchAdd { add, .. } => SendOp::FetchAdd { remote: to, add },
        SendOp::AtomicWrite(_) => SendOp::AtomicWrite(to),
        other => other,
    }
}

/// Requests sent before one that fails are still acknowledged and complete first.
#[test]
fn a_fault_waits_for_what_was_posted_before_it() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(4096, 1), p.b.region(4096));
    let word = at(&dst, 0);
    p.a.send(1, SendOp::Write(word), &[sge(&src, 0, 4096)]);
    p.a.send(2, SendOp::Read(word), &[sge(&src, 0, 4096)]);
    p.a.send(3, SendOp::FetchAdd { remote: word, add: 1 }, &[sge(&src, 0, 16)]);
    p.a.send(4, SendOp::Read(word), &[sge(&src, 0, 8)]);
    p.run();
    let ended: Vec<_> = p.a.completions().iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(
        ended,
        [
            (1, WcStatus::Success),
            (2, WcStatus::Success),
            (3, WcStatus::LocalLengthError),
            (4, WcStatus::FlushError)
        ]
    );
}
