//! The life of a queue pair, as data: which transitions exist, and which attributes each needs and takes
//! (IBA table 91; the man page of ibv_modify_qp; the kernel's `ib_modify_qp_is_ok`).

use roce_verbs::{QpAttrMask as M, QpState, QpType};

use crate::ctx::ModifyError;

/// One legal transition of one transport service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transition {
    pub(crate) from: QpState,
    pub(crate) to: QpState,
    pub(crate) required: M,
    pub(crate) optional: M,
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

/// The transitions of a transport service.
pub(crate) const fn transitions(qp_type: QpType) -> &'static [Transition] {
    match qp_type {
        QpType::Rc => RC,
        QpType::Uc => UC,
        QpType::Ud => UD,
    }
}

/// Checks a transition and the set of attributes that comes with it.
pub(crate) fn check(qp_type: QpType, from: QpState, to: QpState, mask: M) -> Result<(), ModifyError> {
    let found = transitions(qp_type).iter().find(|t| t.from == from && t.to == to);
    let transition = found.ok_or(ModifyError::Transition { from, to })?;
    let missing = transition.required - mask;
    if !missing.is_empty() {
        return Result::Err(ModifyError::Missing(missing));
    }
    let extra = mask - transition.required - transition.optional - M::STATE;
    if !extra.is_empty() {
        return Result::Err(ModifyError::NotAllowed(extra));
    }
    Ok(())
}
