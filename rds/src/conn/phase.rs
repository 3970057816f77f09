//! States of a connection to a peer, and the transitions between them.

use roce_verbs::Instant;

use super::link::LinkId;

/// State of a pair. A link that is left is being closed by itself, whatever comes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// Not connected. We connect when there is something to send, from this time on.
    Down(Instant),
    /// We have begun to connect.
    Connecting(LinkId),
    /// We have accepted, and wait for the peer's last word.
    Accepting(LinkId),
    /// Connected.
    Up {
        /// The connection.
        link: LinkId,
        /// One that the peer has begun since, which it may not know how to use: it takes over once it is established.
        next: Option<LinkId>,
    },
}

/// Decision about a connect request of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// Accept, and leave this link first.
    Accept {
        /// Attempt that it takes the place of.
        instead_of: Option<LinkId>,
    },
    /// Refuse: our own attempt goes on, or theirs, after a random time.
    Reject,
}

impl Phase {
    /// Answers a connect request. Both connecting at once: the one with the greater address accepts (the kernel rejects in any case).
    pub(crate) fn answer(self, ours_is_greater: bool) -> Answer {
        match self {
            Self::Down(_) => Answer::Accept { instead_of: None },
            Self::Connecting(link) if ours_is_greater => Answer::Accept { instead_of: Some(link) },
            Self::Connecting(_) => Answer::Reject,
            // It would not ask again if it had got our answer.
            Self::Accepting(link) => Answer::Accept { instead_of: Some(link) },
            Self::Up { next, .. } => Answer::Accept { instead_of: next },
        }
    }

    /// The state after a connect request was accepted on this link.
    pub(crate) fn accepted(self, new: LinkId) -> Self {
        match self {
            Self::Up { link, .. } => Self::Up { link, next: Some(new) },
            _ => Self::Accepting(new),
        }
    }

    /// The state after a link was established, and the link that it replaces. `None`: it is none of this connection's any more.
    pub(crate) fn established(self, new: LinkId) -> Option<(Self, Option<LinkId>)> {
        let up = Self::Up { link: new, next: None };
        match self {
            Self::Connecting(link) | Self::Accepting(link) if link == new => Some((up, None)),
            Self::Up { link, next } if next == Some(new) => Some((up, Some(link))),
            _ => None,
        }
    }

    /// The state after a link has failed; a connection may begin from `due` on. `None`: the link is none of this connection's any more.
    pub(crate) fn lost(self, gone: LinkId, due: Instant) -> Option<Self> {
        match self {
            Self::Connecting(link) | Self::Accepting(link) if link == gone => Some(Self::Down(due)),
            Self::Up { link, next: None } if link == gone => Some(Self::Down(due)),
            Self::Up { link, next: Some(next) } if link == gone => Some(Self::Accepting(next)),
            Self::Up { link, next } if next == Some(gone) => Some(Self::Up { link, next: None }),
            _ => None,
        }
    }

    /// The link that carries messages.
    pub(crate) fn link(self) -> Option<LinkId> {
        match self {
            Self::Up { link, .. } => Some(link),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Instant = Instant::ZERO;
    const UP: Phase = Phase::Up { link: 1, next: None };
    const WITH_NEXT: Phase = Phase::Up { link: 1, next: Some(2) };

    #[test]
    fn who_connects_at_once_is_decided_by_the_address() {
        for greater in [true, false] {
            let accept = |instead_of| Answer::Accept { instead_of };
            assert_eq!(Phase::Down(T).answer(greater), accept(None));
            let connecting = if greater { accept(Some(1)) } else { Answer::Reject };
            assert_eq!(Phase::Connecting(1).answer(greater), connecting);
            assert_eq!(Phase::Accepting(1).answer(greater), accept(Some(1)));
            // The connection stays until the new one is proven.
            assert_eq!(UP.answer(greater), accept(None));
            assert_eq!(WITH_NEXT.answer(greater), accept(Some(2)));
        }
    }

    #[test]
    fn transitions() {
        let table: [(Phase, Phase, Option<Phase>, Option<Phase>); 4] = [
            // From; accepted on 3; established 1; lost 1.
            (Phase::Down(T), Phase::Accepting(3), None, None),
            (
                Phase::Connecting(1),
                Phase::Accepting(3),
                Some(UP),
                Some(Phase::Down(T)),
            ),
            (Phase::Accepting(1), Phase::Accepting(3), Some(UP), Some(Phase::Down(T))),
            (UP, Phase::Up { link: 1, next: Some(3) }, None, Some(Phase::Down(T))),
        ];
        for (from, accepted, established, lost) in table {
            assert_eq!(from.accepted(3), accepted, "{from:?}");
            assert_eq!(from.established(1).map(|(phase, _)| phase), established, "{from:?}");
            assert_eq!(from.lost(1, T), lost, "{from:?}");
            // Links of others change nothing.
            assert_eq!((from.established(9), from.lost(9, T)), (None, None), "{from:?}");
        }
        let second = Phase::Up { link: 2, next: None };
        assert_eq!(WITH_NEXT.established(2), Some((second, Some(1))));
        assert_eq!(WITH_NEXT.lost(1, T), Some(Phase::Accepting(2)));
        assert_eq!(WITH_NEXT.lost(2, T), Some(UP));
    }
}
