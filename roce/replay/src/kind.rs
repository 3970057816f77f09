//! Kinds of differences.

use serde::{Deserialize, Serialize};

/// Kind of a difference between our engine and the captured side.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The same request, but only one of the two asks for an acknowledgement: the requester's choice, in the middle of a
    /// message or where ours does.
    AckRequest,
    /// A message's last packet, with which only the captured side asks for an acknowledgement.
    NoAckRequest,
    /// Positive acknowledgements that only one of the two sent, and that another one covers.
    AckCoalescing,
    /// Ours acknowledges the packet that its NAK asked for, at once; theirs says it later, with something that implies it.
    AckAfterRefusal,
    /// The acknowledgement of a duplicate: ours has the duplicate's PSN, theirs a later one that was executed (IBA C9-105
    /// allows both).
    DuplicateAck,
    /// The same packet but for MigReq, which IBA leaves without meaning on paths that don't migrate.
    MigReq,
    /// An acknowledgement with another credit count.
    Credits,
    /// The answer to a READ that was asked for again from the middle: ours opens a stream (FIRST, ONLY), as the
    /// specification has it, rdma_rxe goes on with the one from before (MIDDLE, LAST). Bytes and PSN are the same.
    ReadResumed,
    /// The captured side reports a sequence gap right after its RNR NAK for the same PSN, before it took a request with
    /// that; ours is silent, as the specification has it.
    GapAfterRnr,
    /// An answer that only the captured side sent.
    OnlyTheirAnswer,
    /// An answer that only ours sent.
    OnlyOurAnswer,
    /// A request that only the captured side ever sent.
    OnlyTheirRequest,
    /// A request that only ours ever sent.
    OnlyOurRequest,
    /// A request that both sent, the captured side once more. How much a requester repeats is its own choice; that it
    /// repeats where it has to is a matter of [`Kind::NotRepeated`].
    OnlyTheirRepeat,
    /// A request that the captured side sent, perhaps once more, after it had got the NAK that ends the connection: it was
    /// in its queue.
    AfterRefusal,
    /// The captured side's requests were refused, or its timer ran out, it repeated them and had success; ours repeats
    /// nothing, or something else.
    NotRepeated,
    /// A request that both sent, ours once more, although nobody refused it.
    OnlyOurRepeat,
    /// A request that both sent, ours once more, because it was refused: of two refusals in a row the captured side heeds
    /// one.
    RepeatedAsTold,
    /// Another answer.
    Answer,
    /// The packets are the same, the ICRCs are not.
    Icrc,
}

impl Kind {
    /// Whether the replay makes a difference of this kind only where it knows that both sides are right. Only these may be
    /// allowed without a number.
    pub const fn proves_itself(self) -> bool {
        matches!(
            self,
            Self::AckRequest
                | Self::AckAfterRefusal
                | Self::DuplicateAck
                | Self::ReadResumed
                | Self::GapAfterRnr
                | Self::OnlyTheirRepeat
                | Self::RepeatedAsTold
                | Self::AfterRefusal
        )
    }

    /// Returns whether both may be right: the specification leaves it to the implementation, or the replay has seen that it does
    /// no harm.
    pub const fn is_choice(self) -> bool {
        self.proves_itself() || matches!(self, Self::MigReq | Self::Credits | Self::AckCoalescing)
    }

    /// Returns its name, which is stable.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AckRequest => "ack-request",
            Self::NoAckRequest => "no-ack-request",
            Self::AckCoalescing => "ack-coalescing",
            Self::AckAfterRefusal => "ack-after-refusal",
            Self::DuplicateAck => "duplicate-ack",
            Self::MigReq => "mig-req",
            Self::Credits => "credits",
            Self::ReadResumed => "read-resumed",
            Self::GapAfterRnr => "gap-after-rnr",
            Self::OnlyTheirAnswer => "only-their-answer",
            Self::OnlyOurAnswer => "only-our-answer",
            Self::OnlyTheirRequest => "only-their-request",
            Self::OnlyOurRequest => "only-our-request",
            Self::OnlyTheirRepeat => "only-their-repeat",
            Self::AfterRefusal => "after-refusal",
            Self::NotRepeated => "not-repeated",
            Self::OnlyOurRepeat => "only-our-repeat",
            Self::RepeatedAsTold => "repeated-as-told",
            Self::Answer => "answer",
            Self::Icrc => "icrc",
        }
    }
}
