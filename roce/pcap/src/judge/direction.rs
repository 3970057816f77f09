//! Direction: the requests of one endpoint and the answers to them.

use std::collections::VecDeque;

use roce_bth::{NakCode, Psn};

use super::{message::Message, spans::Spans};

/// Number that PSNs are unwrapped from, so that none is negative.
const ORIGIN: i64 = 1 << 24;

/// How the beginning of a direction is known.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum Beginning {
    /// The capture may have begun in the middle.
    #[default]
    Unknown,
    /// The peer named the first PSN when the connection was made.
    Named,
}

/// Answer beyond everything that was sent: the capture missed requests, or it is a ghost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Beyond {
    pub(super) psn: i64,
    pub(super) frame: u64,
    pub(super) what: &'static str,
    /// Older requests were sent again since: the requester has not sent that PSN, or does not take the answer.
    pub(super) doubted: bool,
}

impl Beyond {
    pub(super) const fn new(psn: i64, frame: u64, what: &'static str) -> Self {
        Self {
            psn,
            frame,
            what,
            doubted: false,
        }
    }
}

/// NAK for a gap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GapNak {
    pub(super) psn: i64,
    pub(super) frame: u64,
    pub(super) time_ns: u64,
    /// The requester has sent that PSN again.
    pub(super) resent: bool,
}

/// RNR NAK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rnr {
    pub(super) psn: i64,
    pub(super) frame: u64,
    pub(super) time_ns: u64,
    pub(super) wait_ns: u64,
}

/// Fatal NAK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Refused {
    pub(super) psn: i64,
    pub(super) frame: u64,
    pub(super) time_ns: u64,
    pub(super) code: NakCode,
}

/// Completed messages by an answer: `lowest..=highest` is what may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MsnBase {
    /// MSN minus the messages that the capture shows, modulo 2^24.
    pub(super) offset: u32,
    /// PSNs before it that were not seen: they may have ended messages, which `offset` includes.
    pub(super) holes: i64,
}

/// Requests of one endpoint and the answers to them.
#[derive(Default, Debug)]
pub(super) struct Direction {
    pub(super) beginning: Beginning,
    /// First PSN: as named, or the first that was seen.
    pub(super) first: i64,
    /// PSN of the next new request; `None`: nothing is known.
    pub(super) next: Option<i64>,
    /// The last request is a READ of which the number of PSNs is not known yet.
    pub(super) loose: bool,
    /// There are READs of which the number of PSNs is not certain.
    pub(super) assumed: bool,
    pub(super) spans: Spans,
    pub(super) message: Message,
    /// Everything before this PSN is acknowledged.
    pub(super) acked: i64,
    pub(super) msn: Option<MsnBase>,
    /// First PSNs of READs and atomics that are not answered.
    pub(super) open: VecDeque<i64>,
    pub(super) beyond: Option<Beyond>,
    pub(super) gap_nak: Option<GapNak>,
    pub(super) rnr: Option<Rnr>,
    pub(super) refused: Option<Refused>,
    /// A packet came later than those behind it: it was overtaken, or lost before the capture and sent again.
    pub(super) is_lossy: bool,
    /// An acknowledgement came later than one of more: the network swaps them.
    pub(super) swaps_answers: bool,
    /// Request packets, and those that were sent before.
    pub(super) requests: u64,
    pub(super) repeated: u64,
    /// A request with a wrong ICRC was seen: peers that take such packets answer it.
    pub(super) damaged: bool,
    /// PSN of the last RNR NAK, and how many there were of it.
    pub(super) rnrs: (i64, u32),
    /// PSNs that were acknowledged although the capture does not show them.
    pub(super) missed: u64,
    /// How often [`Direction::restart`] was called.
    pub(super) generation: u32,
    /// Packets without their whole headers or payload.
    pub(super) cut: u64,
    /// Frames with several packets that the capture cut.
    pub(super) unread_frames: u64,
    pub(super) last_ns: u64,
    /// Time of the last answer.
    pub(super) answered_ns: u64,
}

impl Direction {
    /// Sets the first PSN as the peer named it.
    pub(super) fn begin(&mut self, psn: Psn) {
        let first = ORIGIN + i64::from(psn.value());
        *self = Self {
            beginning: Beginning::Named,
            first,
            next: Some(first),
            acked: first,
            message: Message::Between,
            msn: Some(MsnBase { offset: 0, holes: 0 }),
            ..Self::default()
        };
    }

    /// Forgets the requests: the queue pair was connected again.
    pub(super) fn restart(&mut self) {
        *self = Self {
            requests: self.requests,
            repeated: self.repeated,
            missed: self.missed,
            cut: self.cut,
            unread_frames: self.unread_frames,
            generation: self.generation + 1,
            ..Self::default()
        };
    }

    /// Returns the PSN unwrapped: the number next to what is expected.
    pub(super) fn unwrap(&self, psn: Psn) -> i64 {
        match self.next {
            Some(next) => next + i64::from(psn.diff(wrap(next))),
            None => ORIGIN + i64::from(psn.value()),
        }
    }

    /// Returns whether an answer with this PSN can belong to these requests.
    pub(super) fn awaits(&self, psn: Psn) -> bool {
        let psn = self.unwrap(psn);
        self.next.is_some_and(|next| psn < next) && psn >= self.acked.max(self.first)
    }

    /// Returns how many messages end before a PSN of a request that is remembered, or before the next request's; and how many
    /// PSNs before it were not seen.
    pub(super) fn completed(&self, psn: i64) -> Option<(i64, i64)> {
        let span = self.spans.find(psn).and_then(|at| self.spans.get(at));
        match span {
            Some(span) => Some((span.ends_before, span.holes_before)),
            None => {
                let last = self.spans.iter().next_back()?;
                Some((last.ends_before + i64::from(last.ends), last.holes_before))
            }
        }
    }
}

/// Wraps an unwrapped PSN.
pub(super) const fn wrap(psn: i64) -> Psn {
    Psn::new((psn & 0x00ff_ffff) as u32)
}
