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
        let row = refusal_row(self);
        row.nak.and_then(nak_status).unwrap_or(row.status)
    }

    /// Returns the reason in words.
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::NoReceive => "no receive is posted",
            Self::MissingFirst => "its first packet is missing",
            Self::MissingLast => "the message before lacks its last packet",
            Self::Operation => "the operation or its fields are not valid for this queue pair",
            Self::TooManyRdAtomic => "more READs and atomics at once than max_dest_rd_atomic",
            Self::Length => "its length does not fit its packets, or the path MTU of the two sides differs",
            Self::ReceiveTooShort => "it is longer than the receive",
            Self::RKey => "its memory is not accessible",
            Self::Misaligned => "the address is not a multiple of 8",
            Self::LocalProtection => "the memory of the receive is not accessible",
            Self::Invalidate => "it may not invalidate the key that it names",
            Self::SharedQueue => "the XRC domain has no shared receive queue of the number that it names",
            Self::Persist => "the memory could not be made persistent",
        }
    }
}

/// Effects of a refusal on both sides (IBA table 57 and 9.9.3; `rxe_resp.c`).
pub(crate) struct RefusalRow {
    /// NAK for the peer. `None`: acknowledge the request, only our side fails (class J).
    pub(crate) nak: Option<NakCode>,
    /// Status of the receive work request, if the message has taken one.
    pub(crate) status: WcStatus,
    /// Event if it has taken none.
    pub(crate) event: fn(Qpn) -> AsyncEvent,
}

pub(crate) const fn refusal_row(refusal: Refusal) -> RefusalRow {
    let invalid = RefusalRow {
        nak: Some(NakCode::InvalidRequest),
        status: WcStatus::RemoteInvalidRequestError,
        event: AsyncEvent::QpRequestError,
    };
    match refusal {
        Refusal::NoReceive
        | Refusal::MissingFirst
        | Refusal::MissingLast
        | Refusal::Operation
        | Refusal::TooManyRdAtomic
        | Refusal::Length
        | Refusal::Misaligned => invalid,
        Refusal::ReceiveTooShort => RefusalRow {
            status: WcStatus::LocalLengthError,
            ..invalid
        },
        // The status concerns the receive of an RDMA WRITE with immediate data (IBA 11.6.2).
        Refusal::RKey => RefusalRow {
            nak: Some(NakCode::RemoteAccessError),
            status: WcStatus::LocalAccessError,
            event: AsyncEvent::QpAccessError,
        },
        Refusal::SharedQueue => RefusalRow {
            event: AsyncEvent::QpAccessError,
            ..invalid
        },
        Refusal::Persist => RefusalRow {
            nak: Some(NakCode::RemoteOperationalError),
            status: WcStatus::LocalQpOperationError,
            event: AsyncEvent::QpFatal,
        },
        Refusal::LocalProtection => RefusalRow {
            nak: Some(NakCode::RemoteOperationalError),
            status: WcStatus::LocalProtectionError,
            event: AsyncEvent::QpFatal,
        },
        Refusal::Invalidate => RefusalRow {
            nak: None,
            status: WcStatus::RemoteInvalidRequestError,
            event: AsyncEvent::QpRequestError,
        },
    }
}
