//! Tables of what is legal: which transitions a queue pair of each service makes and which attributes each needs and takes
//! (IBA table 91; the man page of `ibv_modify_qp`; the kernel's `ib_modify_qp_is_ok`), and which operations a send queue
//! of each service takes (IBA table 95 and Annexes A14 and A19; `rxe_wr_opcode_info`).

use crate::{
    attr::{QpAttrMask as M, QpState, QpType},
    wr::WrOpcode,
};

/// Set of transport services.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Services(u8);

const fn services(types: &[QpType]) -> Services {
    let mut bits = 0;
    let mut i = 0;
    while i < types.len() {
        bits |= 1 << types[i] as u8;
        i += 1;
    }
    Services(bits)
}

impl Services {
    /// Returns whether the set has queue pairs of this type.
    #[inline]
    pub const fn contains(self, qp_type: QpType) -> bool {
        self.0 & 1 << qp_type as u8 != 0
    }
}

use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
use QpType::{Gsi, Rc, Uc, Ud, XrcIni, XrcTgt};

const ALL: Services = services(&QpType::ALL);
const ALL_BUT_GSI: Services = services(&[Rc, Uc, Ud, XrcIni, XrcTgt]);
/// All that send.
const SENDERS: Services = services(&[Rc, Uc, Ud, Gsi, XrcIni]);
const CONNECTED: Services = services(&[Rc, Uc, XrcIni, XrcTgt]);
const CONNECTED_SENDERS: Services = services(&[Rc, Uc, XrcIni]);
const DATAGRAM: Services = services(&[Ud, Gsi]);
const RELIABLE: Services = services(&[Rc, XrcIni, XrcTgt]);
/// Reliable services with a requester.
const REQUESTERS: Services = services(&[Rc, XrcIni]);
/// Reliable services with a responder.
const RESPONDERS: Services = services(&[Rc, XrcTgt]);

/// Attributes, each with the services that it is for.
type Rule = &'static [(M, Services)];

const NONE: Rule = &[];

const INIT: Rule = &[
    (M::PKEY_INDEX, ALL),
    (M::PORT, ALL_BUT_GSI),
    (M::ACCESS_FLAGS, CONNECTED),
    (M::QKEY, DATAGRAM),
];

const RTR: Rule = &[
    (M::AV, CONNECTED),
    (M::PATH_MTU, CONNECTED),
    (M::DEST_QPN, CONNECTED),
    (M::RQ_PSN, CONNECTED),
    (M::MAX_DEST_RD_ATOMIC, RESPONDERS),
    (M::MIN_RNR_TIMER, RESPONDERS),
];
const RTR_OPTIONAL: Rule = &[
    (M::PKEY_INDEX, ALL),
    (M::ACCESS_FLAGS, CONNECTED),
    (M::QKEY, DATAGRAM),
    (M::ALT_PATH, CONNECTED),
];

const RTS: Rule = &[
    (M::SQ_PSN, ALL),
    (M::TIMEOUT, RELIABLE),
    (M::RETRY_CNT, REQUESTERS),
    (M::RNR_RETRY, REQUESTERS),
    (M::MAX_RD_ATOMIC, REQUESTERS),
];
const RTS_OPTIONAL: Rule = &[
    (M::CUR_STATE, ALL),
    (M::ACCESS_FLAGS, CONNECTED),
    (M::QKEY, DATAGRAM),
    (M::ALT_PATH, CONNECTED),
    (M::PATH_MIG_STATE, CONNECTED),
    (M::MIN_RNR_TIMER, RESPONDERS),
];

const DRAINED: Rule = &[
    (M::PKEY_INDEX, ALL),
    (M::ACCESS_FLAGS, CONNECTED),
    (M::QKEY, DATAGRAM),
    (M::AV, CONNECTED),
    (M::ALT_PATH, CONNECTED),
    (M::PATH_MIG_STATE, CONNECTED),
    (M::PORT, RELIABLE),
    (M::TIMEOUT, RELIABLE),
    (M::RETRY_CNT, REQUESTERS),
    (M::RNR_RETRY, REQUESTERS),
    (M::MAX_RD_ATOMIC, REQUESTERS),
    (M::MAX_DEST_RD_ATOMIC, RESPONDERS),
    (M::MIN_RNR_TIMER, RESPONDERS),
];

/// Reliable connections never enter SQE by themselves: from there they take nothing.
const RECOVERED: Rule = &[
    (M::CUR_STATE, services(&[Uc, Ud, Gsi])),
    (M::ACCESS_FLAGS, services(&[Uc])),
    (M::QKEY, DATAGRAM),
];

/// The table: required and optional attributes of each legal transition.
const fn rules(from: QpState, to: QpState) -> Option<(Rule, Rule)> {
    Some(match (from, to) {
        (_, Reset) | (Init | Rtr | Rts | Sqd | Sqe | Err, Err) => (NONE, NONE),
        (Reset, Init) => (INIT, NONE),
        (Init, Init) => (NONE, INIT),
        (Init, Rtr) => (RTR, RTR_OPTIONAL),
        (Rtr, Rts) => (RTS, RTS_OPTIONAL),
        (Rts | Sqd, Rts) => (NONE, RTS_OPTIONAL),
        (Rts, Sqd) => (NONE, &[(M::EN_SQD_ASYNC_NOTIFY, ALL)]),
        (Sqd, Sqd) => (NONE, DRAINED),
        (Sqe, Rts) => (NONE, RECOVERED),
        _ => return None,
    })
}

/// Attributes of one legal transition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transition {
    /// Attributes that must be given.
    pub required: M,
    /// Attributes that may be given.
    pub optional: M,
}

/// Returns the attributes of a transition. `None` if there is no such transition.
pub fn transition(qp_type: QpType, from: QpState, to: QpState) -> Option<Transition> {
    let (required, optional) = rules(from, to)?;
    let of_type = |rule: Rule| {
        rule.iter()
            .filter(|(_, s)| s.contains(qp_type))
            .map(|(m, _)| *m)
            .collect()
    };
    Some(Transition {
        required: of_type(required),
        optional: of_type(optional),
    })
}

/// Reason why a transition is not legal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Illegal {
    /// No such transition.
    Transition,
    /// Required attributes are missing.
    Missing(M),
    /// Attributes are given that the transition does not take.
    NotAllowed(M),
}

/// Checks a transition and the set of attributes given with it.
///
/// # Errors
/// If there is no such transition, an attribute is missing, or one is not allowed.
pub fn check_transition(qp_type: QpType, from: QpState, to: QpState, mask: M) -> Result<(), Illegal> {
    let transition = transition(qp_type, from, to).ok_or(Illegal::Transition)?;
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

/// Rules of one operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operation {
    /// Services that have it.
    pub services: Services,
    /// It sends local bytes, so they may be given inline.
    pub inline: bool,
}

/// Returns an operation's rules. rdma_rxe lists SEND with invalidate for UC and UD too, for which there is no packet; it does local
/// invalidation and fast registration on RC only, which the specification allows on every connected service.
pub const fn operation(op: WrOpcode) -> Operation {
    let (services, inline) = match op {
        WrOpcode::RdmaWrite | WrOpcode::RdmaWriteWithImm => (CONNECTED_SENDERS, true),
        WrOpcode::Send | WrOpcode::SendWithImm => (SENDERS, true),
        WrOpcode::SendWithInv | WrOpcode::AtomicWrite => (REQUESTERS, true),
        WrOpcode::RdmaRead | WrOpcode::CompareSwap | WrOpcode::FetchAdd | WrOpcode::Flush => (REQUESTERS, false),
        WrOpcode::LocalInvalidate | WrOpcode::BindWindow | WrOpcode::FastRegister => (CONNECTED_SENDERS, false),
    };
    Operation { services, inline }
}

/// Returns whether a send queue of this type takes the operation.
pub fn is_legal(qp_type: QpType, op: WrOpcode) -> bool {
    operation(op).services.contains(qp_type)
}

#[cfg(test)]
mod tests {
    use super::*;

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
                    let mine = transition(qp_type, from, to).map(|t| (t.required.bits(), t.optional.bits()));
                    let kernel = KERNEL.iter().find(|k| (k.0, k.1) == (from, to));
                    let kernel = kernel.map(|k| (k.2[column], k.3[column]));
                    assert_eq!(mine, kernel, "{qp_type:?} from {from:?} to {to:?}");
                }
            }
        }
    }

    #[test]
    fn each_attribute_alone_decides() {
        for qp_type in QpType::ALL {
            for &(from, to, ..) in KERNEL {
                let t = transition(qp_type, from, to).unwrap();
                let check = |mask| check_transition(qp_type, from, to, mask);
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
