//! Checks of send work requests before they are queued.

use roce_verbs::{Payload, QpState, QpType, Selectivity, SendOp, SendWr, Target, WcStatus, legal, wr::PostError};

use crate::{
    context::QpContext,
    sendq::{Checked, Kind, op_info},
};

/// Completion status of an operation that the service does not have.
const UNSUPPORTED: WcStatus = WcStatus::LocalQpOperationError;

impl QpContext {
    /// Checks a send work request behind `queued` others; `ahead` are not queued yet.
    ///
    /// # Errors
    /// The error that posting it returns.
    pub(crate) fn check_post(
        &self,
        wr: &SendWr<'_>,
        target: &Target,
        (queued, ahead): (usize, usize),
    ) -> Result<Checked, PostError> {
        let ahead = match self.state() {
            QpState::Reset | QpState::Init | QpState::Rtr => return Err(PostError::State(self.state())),
            // Work requests are flushed at once and occupy no entry.
            QpState::Err | QpState::Sqe => 0,
            QpState::Rts | QpState::Sqd => ahead,
        };
        if queued + ahead >= self.config().caps.max_send_wr as usize {
            return Err(PostError::QueueFull);
        }
        let checked = self.check_send(wr)?;
        if checked.fault != Some(UNSUPPORTED) {
            self.check_target(op_info(&wr.op).kind, target)?;
        }
        Ok(checked)
    }

    /// Checks a work request's arguments.
    ///
    /// Like hardware it accepts operations that the service does not have, and atomics of other than 8 bytes. These
    /// complete with an error in their turn (IBA 11.6.2).
    fn check_send(&self, wr: &SendWr<'_>) -> Result<Checked, PostError> {
        let kind = op_info(&wr.op).kind;
        let row = legal::operation(wr.op.code());
        let unsupported = !row.services.contains(self.config().qp_type);
        let binds = matches!(wr.op, SendOp::BindWindow(_) | SendOp::FastRegister(_));
        if unsupported && (binds || self.config().qp_type == QpType::XrcTgt) {
            return Err(PostError::Invalid("this transport service does not have the operation"));
        }
        let caps = &self.config().caps;
        let len: u64 = match wr.payload {
            Payload::Sges(sges) => {
                let (given, max) = (sges.len(), caps.max_send_sge as usize);
                if given > max {
                    return Err(PostError::TooManySges { given, max });
                }
                sges.iter().map(|s| u64::from(s.length)).sum()
            }
            Payload::Inline(bytes) => {
                let (given, max) = (bytes.len(), caps.max_inline_data as usize);
                if given > max {
                    return Err(PostError::InlineTooLong { given, max });
                }
                if !row.inline {
                    return Err(PostError::Invalid("this operation takes no inline data"));
                }
                given as u64
            }
        };
        let possible = match kind {
            Kind::Local | Kind::Flush => len == 0,
            _ => len <= u64::from(self.config().max_msg_size.min(1 << 31)),
        };
        if !possible {
            return Err(PostError::Length(len));
        }
        if let SendOp::Flush(flush) = &wr.op
            && (flush.placement.bits() & 0xf == 0 || matches!(flush.selectivity, Selectivity::Reserved(_)))
        {
            return Err(PostError::Invalid(
                "a FLUSH needs a placement type and a selectivity level",
            ));
        }
        let answered = matches!(kind, Kind::Read | Kind::Atomic | Kind::AtomicWrite | Kind::Flush);
        if answered && !unsupported && self.max_rd_atomic() == 0 {
            return Err(PostError::Invalid("max_rd_atomic is 0"));
        }
        let word = matches!(kind, Kind::Atomic | Kind::AtomicWrite);
        let fault = match unsupported {
            true => Some(UNSUPPORTED),
            false => (word && len != 8).then_some(WcStatus::LocalLengthError),
        };
        let len = len as u32;
        Ok(Checked { len, fault })
    }

    /// Checks that the service sends work requests of this kind to such a target.
    fn check_target(&self, kind: Kind, target: &Target) -> Result<(), PostError> {
        let fits = match (self.config().qp_type, target) {
            (QpType::Rc | QpType::Uc, Target::Peer) => true,
            (QpType::Ud | QpType::Gsi, Target::Datagram(to)) => {
                let av = &to.av;
                if av.remote.is_unspecified() || av.local.is_ipv4() != av.remote.is_ipv4() {
                    return Err(PostError::Invalid(
                        "the datagram's remote address is unspecified or of another IP version than the local one",
                    ));
                }
                true
            }
            (QpType::XrcIni, Target::Srq(_)) => true,
            (QpType::XrcIni, Target::Peer) => kind == Kind::Local,
            _ => false,
        };
        match fits {
            true => Ok(()),
            false => Err(PostError::Invalid(
                "this transport service does not send to such a target",
            )),
        }
    }
}
