//! Recovery phase: how the requester sends while packets may be lost.
//!
//! | event | Steady | Cautious | Rnr |
//! | --- | --- | --- | --- |
//! | `Silence` | Cautious | Cautious | never: the timers don't run |
//! | `Gap` | Steady | Steady | never: it is a stale report |
//! | `MissingResponse` | Steady | Cautious | Rnr |
//! | `RnrNak` | Rnr | Rnr | never: it is a stale report |
//! | `RnrOver` | never | never | Cautious or Steady |
//! | `Acknowledged` | Steady | Steady | Steady |
//! | `Arrived` | Steady | Steady | Rnr |

use roce_verbs::Instant;

use crate::{
    sendq::{Kind, SendWqe},
    seq::Seq,
};

/// Reason to send one packet at a time until the peer answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Caution {
    /// All packets before it were sent before and may have arrived.
    pub(super) sent: Seq,
    /// A timeout has declared them lost.
    pub(super) timed_out: bool,
}

/// Recovery phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RecoveryPhase {
    /// Sends as the window permits.
    Steady,
    /// Sends one packet at a time until the peer answers, after a probe timeout or an RNR NAK.
    Cautious(Caution),
    /// Sends nothing before `until`, after an RNR NAK; then as `then` requires.
    Rnr { until: Instant, then: Option<Caution> },
}

/// Event that may change the phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// A probe timeout has declared packets lost.
    Silence(Caution),
    /// The peer reported a gap: it answers, and drops everything behind the gap.
    Gap,
    /// The response of a request before an acknowledged one is missing. Everything from this PSN on must be resent.
    MissingResponse(Seq),
    /// RNR NAK: the peer has no receive work request until this time.
    RnrNak(Instant, Option<Caution>),
    /// The RNR time is over.
    RnrOver,
    /// The oldest packet was acknowledged.
    Acknowledged,
    /// A selective ACK or a response beyond a gap has arrived.
    Arrived,
}

impl RecoveryPhase {
    /// Returns the phase after an event. `None`: the event can't happen in this phase.
    fn after(self, event: Event) -> Option<Self> {
        Some(match (self, event) {
            (Self::Steady, Event::Silence(caution)) => Self::Cautious(caution),
            (Self::Cautious(before), Event::Silence(caution)) => Self::Cautious(Caution {
                timed_out: before.timed_out || caution.timed_out,
                ..before
            }),
            (Self::Steady | Self::Cautious(_), Event::Gap) => Self::Steady,
            (Self::Steady, Event::MissingResponse(_)) => Self::Steady,
            (Self::Cautious(caution), Event::MissingResponse(sent)) => Self::Cautious(Caution { sent, ..caution }),
            (Self::Rnr { until, then }, Event::MissingResponse(sent)) => {
                let then = then.map(|caution| Caution { sent, ..caution });
                Self::Rnr { until, then }
            }
            (Self::Steady | Self::Cautious(_), Event::RnrNak(until, then)) => Self::Rnr { until, then },
            (Self::Rnr { then, .. }, Event::RnrOver) => then.map_or(Self::Steady, Self::Cautious),
            (_, Event::Acknowledged) => Self::Steady,
            (Self::Steady | Self::Cautious(_), Event::Arrived) => Self::Steady,
            (Self::Rnr { until, .. }, Event::Arrived) => Self::Rnr { until, then: None },
            (Self::Rnr { .. }, Event::Silence(_) | Event::Gap | Event::RnrNak(..))
            | (Self::Steady | Self::Cautious(_), Event::RnrOver) => return None,
        })
    }

    /// Moves to the phase after an event.
    pub(super) fn on(&mut self, event: Event) {
        let after = self.after(event);
        debug_assert!(after.is_some(), "{event:?} in {self:?}");
        *self = after.unwrap_or(*self);
    }

    /// Returns the caution in force, or that follows.
    pub(super) fn caution(&self) -> Option<Caution> {
        match *self {
            Self::Steady => None,
            Self::Cautious(caution) => Some(caution),
            Self::Rnr { then, .. } => then,
        }
    }

    /// Returns the time before which nothing is sent after an RNR NAK.
    pub(super) fn rnr_until(&self) -> Option<Instant> {
        match *self {
            Self::Rnr { until, .. } => Some(until),
            Self::Steady | Self::Cautious(_) => None,
        }
    }
}

/// Probe: a packet sent again after the first silence, so that the peer acknowledges all packets or reports a gap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probe {
    None,
    /// To be sent.
    Due,
    /// The newest packet was sent again at this time. A selective ACK that answers it reports all packets before it.
    Sent(Instant),
}

/// Recovery of READs.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct ReadRecovery {
    /// READs were requested again in parts, so that responses may end at any packet.
    pub(super) in_parts: bool,
    /// End of the part that the last probe requested. A further probe timeout at that PSN means that the rest is lost.
    pub(super) probed: Option<Seq>,
    /// Responses beyond a gap were dropped since the last go-back. They must be requested again.
    pub(super) skipped: bool,
}

impl ReadRecovery {
    /// Records that a READ was requested again.
    pub(super) fn on_requested(&mut self, wqe: &SendWqe, from: Seq, to: Seq) {
        self.in_parts |= wqe.kind() == Kind::Read && to < wqe.request_end(from);
    }
}

#[cfg(test)]
mod tests {
    use roce_bth::Psn;
    use roce_verbs::SendOp;

    use super::*;
    use crate::sendq::op_info;

    #[test]
    fn each_event_leads_to_the_phases_of_the_table() {
        let sent = Seq::start(Psn::new(7));
        let caution = Caution { sent, timed_out: true };
        let until = Instant::from_nanos(1);
        let phases = [
            RecoveryPhase::Steady,
            RecoveryPhase::Cautious(caution),
            RecoveryPhase::Rnr { until, then: None },
            RecoveryPhase::Rnr {
                until,
                then: Some(caution),
            },
        ];
        let name = |phase: Option<RecoveryPhase>| match phase {
            None => "-",
            Some(RecoveryPhase::Steady) => "S",
            Some(RecoveryPhase::Cautious(_)) => "C",
            Some(RecoveryPhase::Rnr { .. }) => "R",
        };
        for (event, expected) in [
            (Event::Silence(caution), ["C", "C", "-", "-"]),
            (Event::Gap, ["S", "S", "-", "-"]),
            (Event::MissingResponse(sent), ["S", "C", "R", "R"]),
            (Event::RnrNak(until, None), ["R", "R", "-", "-"]),
            (Event::RnrOver, ["-", "-", "S", "C"]),
            (Event::Acknowledged, ["S", "S", "S", "S"]),
            (Event::Arrived, ["S", "S", "R", "R"]),
        ] {
            assert_eq!(phases.map(|phase| name(phase.after(event))), expected, "{event:?}");
        }
    }

    #[test]
    fn a_timeout_is_remembered_until_the_peer_answers() {
        let caution = |n, timed_out| Caution {
            sent: Seq::start(Psn::new(n)),
            timed_out,
        };
        let mut phase = RecoveryPhase::Steady;
        phase.on(Event::Silence(caution(7, true)));
        phase.on(Event::Silence(caution(9, false)));
        assert_eq!(phase.caution(), Some(caution(7, true)));
        phase.on(Event::MissingResponse(Seq::start(Psn::new(3))));
        assert_eq!(phase.caution(), Some(caution(3, true)));
        phase.on(Event::Acknowledged);
        assert_eq!(phase.caution(), None);
    }

    #[test]
    fn a_timeout_among_silences_counts_and_a_missing_response_moves_what_may_have_arrived() {
        let caution = |n, timed_out| Caution {
            sent: Seq::start(Psn::new(n)),
            timed_out,
        };
        let mut phase = RecoveryPhase::Steady;
        phase.on(Event::Silence(caution(7, false)));
        phase.on(Event::Silence(caution(9, true)));
        assert_eq!(phase.caution(), Some(caution(7, true)));
        phase.on(Event::RnrNak(Instant::from_nanos(1), Some(caution(8, false))));
        phase.on(Event::MissingResponse(Seq::start(Psn::new(3))));
        assert_eq!(phase.caution(), Some(caution(3, false)));
    }

    #[test]
    fn responses_come_in_parts_after_less_than_a_request_of_a_read_was_repeated() {
        let first = Seq::start(Psn::new(7));
        let remote = roce_verbs::RemoteAddr::default();
        for (op, from, to, in_parts) in [
            // Two requests of four responses each.
            (SendOp::Read(remote), 0, 4, false),
            (SendOp::Read(remote), 0, 3, true),
            (SendOp::Read(remote), 2, 4, false),
            (SendOp::Read(remote), 4, 8, false),
            (SendOp::Read(remote), 5, 7, true),
            (SendOp::Write(remote), 0, 1, false),
            (SendOp::Write(remote), 2, 3, false),
        ] {
            let wqe = SendWqe {
                op,
                row: op_info(&op),
                packets: 8,
                stride: 4,
                first,
                ..SendWqe::default()
            };
            let mut reads = ReadRecovery::default();
            reads.on_requested(&wqe, first.plus(from), first.plus(to));
            assert_eq!(reads.in_parts, in_parts, "{op:?} {from}..{to}");
            // It stays so.
            reads.in_parts = true;
            reads.on_requested(&wqe, first, first.plus(8));
            assert!(reads.in_parts);
        }
    }
}
