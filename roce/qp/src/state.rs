//! Refusals of the legality tables as errors of modify.

use roce_verbs::{
    QpAttrMask, QpState, QpType,
    legal::{Illegal, check_transition},
};

use crate::ctx::ModifyError;

/// Checks a transition and the set of attributes that comes with it.
pub(crate) fn check(qp_type: QpType, from: QpState, to: QpState, mask: QpAttrMask) -> Result<(), ModifyError> {
    check_transition(qp_type, from, to, mask).map_err(|e| match e {
        Illegal::Transition => ModifyError::Transition { from, to },
        Illegal::Missing(which) => ModifyError::Missing(which),
        Illegal::NotAllowed(which) => ModifyError::NotAllowed(which),
    })
}
