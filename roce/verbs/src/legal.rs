//! What is legal, as data: which transitions a queue pair of each service makes and which attributes each needs and takes
//! (IBA table 91; the man page of ibv_modify_qp; the kernel's `ib_modify_qp_is_ok`), and which operations a send queue
//! of each service takes (IBA table 95 and Annexes A14 and A19; `rxe_wr_opcode_info`).

use crate::{
    attr::{QpAttrMask as M, QpState, QpType},
    wr::WrOpcode,
};

/// One legal transition of one transport service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transition {
    /// State before.
    pub from: QpState,
    /// State after.
    pub to: QpState,
    /// Attributes that must be given.
    pub required: M,
    /// Attributes that may be given.
    pub optional: M,
}

const fn row(from: QpState, to: QpState, required: &[M], optional: &[M]) -> Transition {
    Transition {
        from,
        to,
        required: union(required),
        optional: union(optional),
    }
}

const fn union(masks: &[M]) -> M {
    let mut bits = 0;
    let mut i = 0;
    while i < masks.len() {
        bits |= masks[i].bits();
        i += 1;
    }
    M::from_bits_retain(bits)
}

use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};

const INIT: &[M] = &[M::PKEY_INDEX, M::PORT, M::ACCESS_FLAGS];

/// Reliable connection.
const RC: &[Transition] = &[
    row(Reset, Reset, &[], &[]),
    row(Reset, Init, INIT, &[]),
    row(Init, Reset, &[], &[]),
    row(Init, Err, &[], &[]),
    row(Init, Init, &[], INIT),
    row(
        Init,
        Rtr,
        &[
            M::AV,
            M::PATH_MTU,
            M::DEST_QPN,
            M::RQ_PSN,
            M::MAX_DEST_RD_ATOMIC,
            M::MIN_RNR_TIMER,
        ],
        &[M::ALT_PATH, M::ACCESS_FLAGS, M::PKEY_INDEX],
    ),
    row(Rtr, Reset, &[], &[]),
    row(Rtr, Err, &[], &[]),
    row(
        Rtr,
        Rts,
        &[M::TIMEOUT, M::RETRY_CNT, M::RNR_RETRY, M::SQ_PSN, M::MAX_RD_ATOMIC],
        &[
            M::CUR_STATE,
            M::ALT_PATH,
            M::ACCESS_FLAGS,
            M::MIN_RNR_TIMER,
            M::PATH_MIG_STATE,
        ],
    ),
    row(Rts, Reset, &[], &[]),
    row(Rts, Err, &[], &[]),
    row(
        Rts,
        Rts,
        &[],
        &[
            M::CUR_STATE,
            M::ACCESS_FLAGS,
            M::ALT_PATH,
            M::PATH_MIG_STATE,
            M::MIN_RNR_TIMER,
        ],
    ),
    row(Rts, Sqd, &[], &[M::EN_SQD_ASYNC_NOTIFY]),
    row(Sqd, Reset, &[], &[]),
    row(Sqd, Err, &[], &[]),
    row(
        Sqd,
        Rts,
        &[],
        &[
            M::CUR_STATE,
            M::ALT_PATH,
            M::ACCESS_FLAGS,
            M::MIN_RNR_TIMER,
            M::PATH_MIG_STATE,
        ],
    ),
    row(
        Sqd,
        Sqd,
        &[],
        &[
            M::PORT,
            M::AV,
            M::TIMEOUT,
            M::RETRY_CNT,
            M::RNR_RETRY,
            M::MAX_RD_ATOMIC,
            M::MAX_DEST_RD_ATOMIC,
            M::ALT_PATH,
            M::ACCESS_FLAGS,
            M::PKEY_INDEX,
            M::MIN_RNR_TIMER,
            M::PATH_MIG_STATE,
        ],
    ),
    // A reliable connection never enters SQE by itself; the way out exists for every service.
    row(Sqe, Reset, &[], &[]),
    row(Sqe, Err, &[], &[]),
    row(Sqe, Rts, &[], &[]),
    row(Err, Reset, &[], &[]),
    row(Err, Err, &[], &[]),
];

/// Unreliable connection.
const UC: &[Transition] = &[
    row(Reset, Reset, &[], &[]),
    row(Reset, Init, INIT, &[]),
    row(Init, Reset, &[], &[]),
    row(Init, Err, &[], &[]),
    row(Init, Init, &[], INIT),
    row(
        Init,
        Rtr,
        &[M::AV, M::PATH_MTU, M::DEST_QPN, M::RQ_PSN],
        &[M::ALT_PATH, M::ACCESS_FLAGS, M::PKEY_INDEX],
    ),
    row(Rtr, Reset, &[], &[]),
    row(Rtr, Err, &[], &[]),
    row(
        Rtr,
        Rts,
        &[M::SQ_PSN],
        &[M::CUR_STATE, M::ALT_PATH, M::ACCESS_FLAGS, M::PATH_MIG_STATE],
    ),
    row(Rts, Reset, &[], &[]),
    row(Rts, Err, &[], &[]),
    row(
        Rts,
        Rts,
        &[],
        &[M::CUR_STATE, M::ACCESS_FLAGS, M::ALT_PATH, M::PATH_MIG_STATE],
    ),
    row(Rts, Sqd, &[], &[M::EN_SQD_ASYNC_NOTIFY]),
    row(Sqd, Reset, &[], &[]),
    row(Sqd, Err, &[], &[]),
    row(
        Sqd,
        Rts,
        &[],
        &[M::CUR_STATE, M::ALT_PATH, M::ACCESS_FLAGS, M::PATH_MIG_STATE],
    ),
    row(
        Sqd,
        Sqd,
        &[],
        &[M::AV, M::ALT_PATH, M::ACCESS_FLAGS, M::PKEY_INDEX, M::PATH_MIG_STATE],
    ),
    row(Sqe, Reset, &[], &[]),
    row(Sqe, Err, &[], &[]),
    row(Sqe, Rts, &[], &[M::CUR_STATE, M::ACCESS_FLAGS]),
    row(Err, Reset, &[], &[]),
    row(Err, Err, &[], &[]),
];

/// Unreliable datagram.
const UD: &[Transition] = &[
    row(Reset, Reset, &[], &[]),
    row(Reset, Init, &[M::PKEY_INDEX, M::PORT, M::QKEY], &[]),
    row(Init, Reset, &[], &[]),
    row(Init, Err, &[], &[]),
    row(Init, Init, &[], &[M::PKEY_INDEX, M::PORT, M::QKEY]),
    row(Init, Rtr, &[], &[M::PKEY_INDEX, M::QKEY]),
    row(Rtr, Reset, &[], &[]),
    row(Rtr, Err, &[], &[]),
    row(Rtr, Rts, &[M::SQ_PSN], &[M::CUR_STATE, M::QKEY]),
    row(Rts, Reset, &[], &[]),
    row(Rts, Err, &[], &[]),
    row(Rts, Rts, &[], &[M::CUR_STATE, M::QKEY]),
    row(Rts, Sqd, &[], &[M::EN_SQD_ASYNC_NOTIFY]),
    row(Sqd, Reset, &[], &[]),
    row(Sqd, Err, &[], &[]),
    row(Sqd, Rts, &[], &[M::CUR_STATE, M::QKEY]),
    row(Sqd, Sqd, &[], &[M::PKEY_INDEX, M::QKEY]),
    row(Sqe, Reset, &[], &[]),
    row(Sqe, Err, &[], &[]),
    row(Sqe, Rts, &[], &[M::CUR_STATE, M::QKEY]),
    row(Err, Reset, &[], &[]),
    row(Err, Err, &[], &[]),
];

/// The sending end of an extended reliable connection: it has no responder.
const XRC_INI: &[Transition] = &[
    row(Reset, Reset, &[], &[]),
    row(Reset, Init, INIT, &[]),
    row(Init, Reset, &[], &[]),
    row(Init, Err, &[], &[]),
    row(Init, Init, &[], INIT),
    row(
        Init,
        Rtr,
        &[M::AV, M::PATH_MTU, M::DEST_QPN, M::RQ_PSN],
        &[M::ALT_PATH, M::ACCESS_FLAGS, M::PKEY_INDEX],
    ),
    row(Rtr, Reset, &[], &[]),
    row(Rtr, Err, &[], &[]),
    row(
        Rtr,
        Rts,
        &[M::TIMEOUT, M::RETRY_CNT, M::RNR_RETRY, M::SQ_PSN, M::MAX_RD_ATOMIC],
        &[M::CUR_STATE, M::ALT_PATH, M::ACCESS_FLAGS, M::PATH_MIG_STATE],
    ),
    row(Rts, Reset, &[], &[]),
    row(Rts, Err, &[], &[]),
    row(
        Rts,
        Rts,
        &[],
        &[M::CUR_STATE, M::ACCESS_FLAGS, M::ALT_PATH, M::PATH_MIG_STATE],
    ),
    row(Rts, Sqd, &[], &[M::EN_SQD_ASYNC_NOTIFY]),
    row(Sqd, Reset, &[], &[]),
    row(Sqd, Err, &[], &[]),
    row(
        Sqd,
        Rts,
        &[],
        &[M::CUR_STATE, M::ALT_PATH, M::ACCESS_FLAGS, M::PATH_MIG_STATE],
    ),
    row(
        Sqd,
        Sqd,
        &[],
        &[
            M::PORT,
            M::AV,
            M::TIMEOUT,
            M::RETRY_CNT,
            M::RNR_RETRY,
            M::MAX_RD_ATOMIC,
            M::ALT_PATH,
            M::ACCESS_FLAGS,
            M::PKEY_INDEX,
            M::PATH_MIG_STATE,
        ],
    ),
    row(Sqe, Reset, &[], &[]),
    row(Sqe, Err, &[], &[]),
    row(Sqe, Rts, &[], &[]),
    row(Err, Reset, &[], &[]),
    row(Err, Err, &[], &[]),
];

/// The receiving end of an extended reliable connection: it has no requester.
const XRC_TGT: &[Transition] = &[
    row(Reset, Reset, &[], &[]),
    row(Reset, Init, INIT, &[]),
    row(Init, Reset, &[], &[]),
    row(Init, Err, &[], &[]),
    row(Init, Init, &[], INIT),
    row(
        Init,
        Rtr,
        &[
            M::AV,
            M::PATH_MTU,
            M::DEST_QPN,
            M::RQ_PSN,
            M::MAX_DEST_RD_ATOMIC,
            M::MIN_RNR_TIMER,
        ],
        &[M::ALT_PATH, M::ACCESS_FLAGS, M::PKEY_INDEX],
    ),
    row(Rtr, Reset, &[], &[]),
    row(Rtr, Err, &[], &[]),
    row(
        Rtr,
        Rts,
        &[M::TIMEOUT, M::SQ_PSN],
        &[
            M::CUR_STATE,
            M::ALT_PATH,
            M::ACCESS_FLAGS,
            M::MIN_RNR_TIMER,
            M::PATH_MIG_STATE,
        ],
    ),
    row(Rts, Reset, &[], &[]),
    row(Rts, Err, &[], &[]),
    row(
        Rts,
        Rts,
        &[],
        &[
            M::CUR_STATE,
            M::ACCESS_FLAGS,
            M::ALT_PATH,
            M::PATH_MIG_STATE,
            M::MIN_RNR_TIMER,
        ],
    ),
    row(Rts, Sqd, &[], &[M::EN_SQD_ASYNC_NOTIFY]),
    row(Sqd, Reset, &[], &[]),
    row(Sqd, Err, &[], &[]),
    row(
        Sqd,
        Rts,
        &[],
        &[
            M::CUR_STATE,
            M::ALT_PATH,
            M::ACCESS_FLAGS,
            M::MIN_RNR_TIMER,
            M::PATH_MIG_STATE,
        ],
    ),
    row(
        Sqd,
        Sqd,
        &[],
        &[
            M::PORT,
            M::AV,
            M::TIMEOUT,
            M::MAX_DEST_RD_ATOMIC,
            M::ALT_PATH,
            M::ACCESS_FLAGS,
            M::PKEY_INDEX,
            M::MIN_RNR_TIMER,
            M::PATH_MIG_STATE,
        ],
    ),
    row(Sqe, Reset, &[], &[]),
    row(Sqe, Err, &[], &[]),
    row(Sqe, Rts, &[], &[]),
    row(Err, Reset, &[], &[]),
    row(Err, Err, &[], &[]),
];

/// The general service interface: as datagrams, on a port that is given.
const GSI: &[Transition] = &[
    row(Reset, Reset, &[], &[]),
    row(Reset, Init, &[M::PKEY_INDEX, M::QKEY], &[]),
    row(Init, Reset, &[], &[]),
    row(Init, Err, &[], &[]),
    row(Init, Init, &[], &[M::PKEY_INDEX, M::QKEY]),
    row(Init, Rtr, &[], &[M::PKEY_INDEX, M::QKEY]),
    row(Rtr, Reset, &[], &[]),
    row(Rtr, Err, &[], &[]),
    row(Rtr, Rts, &[M::SQ_PSN], &[M::CUR_STATE, M::QKEY]),
    row(Rts, Reset, &[], &[]),
    row(Rts, Err, &[], &[]),
    row(Rts, Rts, &[], &[M::CUR_STATE, M::QKEY]),
    row(Rts, Sqd, &[], &[M::EN_SQD_ASYNC_NOTIFY]),
    row(Sqd, Reset, &[], &[]),
    row(Sqd, Err, &[], &[]),
    row(Sqd, Rts, &[], &[M::CUR_STATE, M::QKEY]),
    row(Sqd, Sqd, &[], &[M::PKEY_INDEX, M::QKEY]),
    row(Sqe, Reset, &[], &[]),
    row(Sqe, Err, &[], &[]),
    row(Sqe, Rts, &[], &[M::CUR_STATE, M::QKEY]),
    row(Err, Reset, &[], &[]),
    row(Err, Err, &[], &[]),
];

/// The transitions of a transport service.
pub const fn transitions(qp_type: QpType) -> &'static [Transition] {
    match qp_type {
        QpType::Rc => RC,
        QpType::Uc => UC,
        QpType::Ud => UD,
        QpType::Gsi => GSI,
        QpType::XrcIni => XRC_INI,
        QpType::XrcTgt => XRC_TGT,
    }
}

/// Why a transition is not legal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Illegal {
    /// There is no such transition.
    Transition,
    /// Attributes that it needs are missing.
    Missing(M),
    /// Attributes that it does not take are given.
    NotAllowed(M),
}

/// Checks a transition and the set of attributes that comes with it.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_transition(qp_type: QpType, from: QpState, to: QpState, mask: M) -> Result<(), Illegal> {
    let found = transitions(qp_type).iter().find(|t| t.from == from && t.to == to);
    let transition = found.ok_or(Illegal::Transition)?;
    let missing = transition.required - mask;
    if !missing.is_empty() {
        return Result::Err(Illegal::Missing(missing));
    }
    let extra = mask - transition.required - transition.optional - M::STATE;
    if !extra.is_empty() {
        return Result::Err(Illegal::NotAllowed(extra));
    }
    Ok(())
}

/// One operation: which services' send queues take it, and whether its payload may be inline.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operation {
    /// The operation.
    pub op: WrOpcode,
    /// Services of queue pairs for which it is legal.
    pub services: &'static [QpType],
    /// It sends local bytes, so they may be given inline.
    pub inline: bool,
}

const fn op(op: WrOpcode, services: &'static [QpType], inline: bool) -> Operation {
    Operation { op, services, inline }
}

const SENDERS: &[QpType] = &[QpType::Rc, QpType::Uc, QpType::Ud, QpType::Gsi, QpType::XrcIni];
const CONNECTED: &[QpType] = &[QpType::Rc, QpType::Uc, QpType::XrcIni];
const RELIABLE: &[QpType] = &[QpType::Rc, QpType::XrcIni];

/// Every operation, in the order of [`WrOpcode::ALL`]. rdma_rxe lists SEND with invalidate for UC and UD too, for which
/// there is no packet; it does local invalidation and fast registration on RC only, which the specification allows on
/// every connected service.
pub static OPERATIONS: [Operation; 13] = [
    op(WrOpcode::RdmaWrite, CONNECTED, true),
    op(WrOpcode::RdmaWriteWithImm, CONNECTED, true),
    op(WrOpcode::Send, SENDERS, true),
    op(WrOpcode::SendWithImm, SENDERS, true),
    op(WrOpcode::RdmaRead, RELIABLE, false),
    op(WrOpcode::CompareSwap, RELIABLE, false),
    op(WrOpcode::FetchAdd, RELIABLE, false),
    op(WrOpcode::LocalInvalidate, CONNECTED, false),
    op(WrOpcode::BindWindow, CONNECTED, false),
    op(WrOpcode::SendWithInv, RELIABLE, true),
    op(WrOpcode::Flush, RELIABLE, false),
    op(WrOpcode::AtomicWrite, RELIABLE, true),
    op(WrOpcode::FastRegister, CONNECTED, false),
];

/// An operation's row.
pub fn operation(op: WrOpcode) -> &'static Operation {
    &OPERATIONS[match op {
        WrOpcode::Flush => 10,
        WrOpcode::AtomicWrite => 11,
        WrOpcode::FastRegister => 12,
        numbered => numbered as usize,
    }]
}

/// Whether a send queue of this type takes the operation.
pub fn is_legal(qp_type: QpType, op: WrOpcode) -> bool {
    operation(op).services.contains(&qp_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_its_row() {
        for (row, op) in OPERATIONS.iter().zip(WrOpcode::ALL) {
            assert_eq!(row.op, op);
            assert_eq!(operation(op), row);
        }
    }

    /// The matrix once more, by operation: R C U G X (initiator), and T, which sends nothing.
    #[test]
    fn operations_by_service_are_the_specifications() {
        let expected = [
            (WrOpcode::RdmaWrite, "RCX"),
            (WrOpcode::RdmaWriteWithImm, "RCX"),
            (WrOpcode::Send, "RCUGX"),
            (WrOpcode::SendWithImm, "RCUGX"),
            (WrOpcode::RdmaRead, "RX"),
            (WrOpcode::CompareSwap, "RX"),
            (WrOpcode::FetchAdd, "RX"),
            (WrOpcode::LocalInvalidate, "RCX"),
            (WrOpcode::BindWindow, "RCX"),
            (WrOpcode::SendWithInv, "RX"),
            (WrOpcode::Flush, "RX"),
            (WrOpcode::AtomicWrite, "RX"),
            (WrOpcode::FastRegister, "RCX"),
        ];
        let letter = |t| match t {
            QpType::Rc => 'R',
            QpType::Uc => 'C',
            QpType::Ud => 'U',
            QpType::Gsi => 'G',
            QpType::XrcIni => 'X',
            QpType::XrcTgt => 'T',
        };
        assert_eq!(expected.len(), WrOpcode::ALL.len());
        for (op, services) in expected {
            for qp_type in QpType::ALL {
                assert_eq!(
                    is_legal(qp_type, op),
                    services.contains(letter(qp_type)),
                    "{op:?} on {qp_type:?}"
                );
            }
        }
    }

    /// `qp_state_table` of the kernel's `core/verbs.c`, written down again from its values: state by state, the attribute
    /// bits that are required and optional. Services in the order of [`QpType::ALL`]: RC, UC, UD, GSI, XRC INI, XRC TGT.
    const KERNEL: &[(QpState, QpState, [u32; 6], [u32; 6])] = &[
        (Reset, Reset, [0; 6], [0; 6]),
        (Reset, Init, [0x38, 0x38, 0x70, 0x50, 0x38, 0x38], [0; 6]),
        (Init, Reset, [0; 6], [0; 6]),
        (Init, Err, [0; 6], [0; 6]),
        (Init, Init, [0; 6], [0x38, 0x38, 0x70, 0x50, 0x38, 0x38]),
        (
            Init,
            Rtr,
            [0x12_9180, 0x10_1180, 0, 0, 0x10_1180, 0x12_9180],
            [0x4018, 0x4018, 0x50, 0x50, 0x4018, 0x4018],
        ),
        (Rtr, Reset, [0; 6], [0; 6]),
        (Rtr, Err, [0; 6], [0; 6]),
        (
            Rtr,
            Rts,
            [0x1_2e00, 0x1_0000, 0x1_0000, 0x1_0000, 0x1_2e00, 0x1_0200],
            [0x4_c00a, 0x4_400a, 0x42, 0x42, 0x4_400a, 0x4_c00a],
        ),
        (Rts, Reset, [0; 6], [0; 6]),
        (Rts, Err, [0; 6], [0; 6]),
        (Rts, Rts, [0; 6], [0x4_c00a, 0x4_400a, 0x42, 0x42, 0x4_400a, 0x4_c00a]),
        (Rts, Sqd, [0; 6], [4; 6]),
        (Sqd, Reset, [0; 6], [0; 6]),
        (Sqd, Err, [0; 6], [0; 6]),
        (Sqd, Rts, [0; 6], [0x4_c00a, 0x4_400a, 0x42, 0x42, 0x4_400a, 0x4_c00a]),
        (Sqd, Sqd, [0; 6], [0x6_eeb8, 0x4_4098, 0x50, 0x50, 0x4_6eb8, 0x6_c2b8]),
        (Sqe, Reset, [0; 6], [0; 6]),
        (Sqe, Err, [0; 6], [0; 6]),
        (Sqe, Rts, [0; 6], [0, 0xa, 0x42, 0x42, 0, 0]),
        (Err, Reset, [0; 6], [0; 6]),
        (Err, Err, [0; 6], [0; 6]),
    ];

    const STATES: [QpState; 7] = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];

    #[test]
    fn transitions_are_the_kernels() {
        for (column, qp_type) in QpType::ALL.into_iter().enumerate() {
            for from in STATES {
                for to in STATES {
                    let mine = transitions(qp_type).iter().find(|t| (t.from, t.to) == (from, to));
                    let kernel = KERNEL.iter().find(|k| (k.0, k.1) == (from, to));
                    let mine = mine.map(|t| (t.required.bits(), t.optional.bits()));
                    let kernel = kernel.map(|k| (k.2[column], k.3[column]));
                    assert_eq!(mine, kernel, "{qp_type:?} from {from:?} to {to:?}");
                }
            }
        }
    }

    #[test]
    fn each_attribute_alone_decides() {
        for qp_type in QpType::ALL {
            for t in transitions(qp_type) {
                let check = |mask| check_transition(qp_type, t.from, t.to, mask);
                assert_eq!(check(t.required), Ok(()));
                assert_eq!(check(t.required | t.optional | M::STATE), Ok(()));
                for bit in M::all().iter() {
                    let (has, may) = (t.required.contains(bit), t.optional.contains(bit));
                    if has {
                        assert_eq!(check(t.required - bit), Result::Err(Illegal::Missing(bit)));
                    } else if may || bit == M::STATE {
                        assert_eq!(check(t.required | bit), Ok(()));
                    } else {
                        assert_eq!(check(t.required | bit), Result::Err(Illegal::NotAllowed(bit)));
                    }
                }
            }
            assert_eq!(
                check_transition(qp_type, Reset, Rts, M::all()),
                Result::Err(Illegal::Transition)
            );
        }
    }
}
