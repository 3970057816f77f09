//! Reasons to refuse a request, and the statuses that they have at both sides.

use roce_bth::NakCode;
use roce_verbs::{AsyncEvent, Qpn, WcStatus};

/// Returns the status that a NAK causes at the requester (IBA table 58). A sequence error causes none.
pub(crate) const fn nak_status(code: NakCode) -> Option<WcStatus> {
    match code {
        NakCode::PsnSequenceError => None,
        NakCode::InvalidRequest => Some(WcStatus::RemoteInvalidRequestError),
        NakCode::RemoteAccessError => Some(WcStatus::RemoteAccessError),
        NakCode::RemoteOperationalError => Some(WcStatus::RemoteOperationError),
        NakCode::InvalidRdRequest => Some(WcStatus::RemoteInvalidRdRequest),
    }
}

/// Reason why a request is not executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// No receive work request is posted.
    NoReceive,
    /// Middle or last packet without a first.
    MissingFirst,
    /// New message before the last packet of the previous one.
    MissingLast,
    /// The queue pair does not permit the operation.
    Operation,
    /// More READs and atomics than negotiated.
    TooManyRdAtomic,
    /// Payload length wrong for its position in the message.
    Length,
    /// The message is longer than the receive work request.
    ReceiveTooShort,
    /// Invalid key, range or access, or revoked memory.
    RKey,
    /// Misaligned atomic.
    Misaligned,
    /// The memory of the receive work request can't be written.
    LocalProtection,
    /// A SEND may not invalidate its key.
    Invalidate,
    /// The shared receive queue is not in the XRC domain.
    SharedQueue,
    /// Memory could not be made persistent.
    Persist,
}

impl Refusal {
    /// Returns the status that the peer's work request gets; of those that the peer is not told of, our own.
    pub(crate) fn status(self) -> WcStatus {
        let row = self.row();
        row.nak.and_then(nak_status).unwrap_or(row.status)
    }

    /// Returns its effects on both sides (IBA table 57 and 9.9.3; `rxe_resp.c`).
    pub(crate) const fn row(self) -> RefusalRow {
        match self {
            Self::NoReceive => invalid("no receive is posted"),
            Self::MissingFirst => invalid("its first packet is missing"),
            Self::MissingLast => invalid("the message before lacks its last packet"),
            Self::Operation => invalid("the operation or its fields are not valid for this queue pair"),
            Self::TooManyRdAtomic => invalid("more READs and atomics at once than max_dest_rd_atomic"),
            Self::Length => invalid("its length does not fit its packets, or the path MTU of the two sides differs"),
            Self::Misaligned => invalid("the address is not a multiple of 8"),
            Self::ReceiveTooShort => RefusalRow {
                status: WcStatus::LocalLengthError,
                ..invalid("it is longer than the receive")
            },
            // The status concerns the receive of an RDMA WRITE with immediate data (IBA 11.6.2).
            Self::RKey => RefusalRow {
                nak: Some(NakCode::RemoteAccessError),
                status: WcStatus::LocalAccessError,
                event: AsyncEvent::QpAccessError,
                text: "its memory was deregistered, unmapped or protected meanwhile",
            },
            Self::SharedQueue => RefusalRow {
                event: AsyncEvent::QpAccessError,
                ..invalid("the XRC domain has no shared receive queue of the number that it names")
            },
            Self::Persist => RefusalRow {
                nak: Some(NakCode::RemoteOperationalError),
                status: WcStatus::LocalQpOperationError,
                event: AsyncEvent::QpFatal,
                text: "the memory could not be made persistent",
            },
            Self::LocalProtection => RefusalRow {
                nak: Some(NakCode::RemoteOperationalError),
                status: WcStatus::LocalProtectionError,
                event: AsyncEvent::QpFatal,
                text: "the memory of the receive is not accessible",
            },
            Self::Invalidate => RefusalRow {
                nak: None,
                ..invalid("it may not invalidate the key that it names")
            },
        }
    }
}

/// Effects of a refusal.
pub(crate) struct RefusalRow {
    /// NAK for the peer. `None`: acknowledge the request, only our side fails (class J).
    pub(crate) nak: Option<NakCode>,
    /// Status of the receive work request, if the message has taken one.
    pub(crate) status: WcStatus,
    /// Event if it has taken none.
    pub(crate) event: fn(Qpn) -> AsyncEvent,
    /// Reason in words.
    pub(crate) text: &'static str,
}

/// Returns the effects of an invalid request.
const fn invalid(text: &'static str) -> RefusalRow {
    RefusalRow {
        nak: Some(NakCode::InvalidRequest),
        status: WcStatus::RemoteInvalidRequestError,
        event: AsyncEvent::QpRequestError,
        text,
    }
}
