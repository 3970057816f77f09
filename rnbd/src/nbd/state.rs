//! The phases of a connection, with every legal transition, and how it may end.

use rtrs::table::Table;

/// Phases of a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Phase {
    /// The server's greeting is out; the client's flags are to come.
    Greeting,
    /// The client asks for options, of which one chooses the export.
    Options,
    /// TLS is to begin: its handshake comes next, which is not for the connection to see.
    Handshake,
    /// As [`Options`](Self::Options), with TLS.
    Secured,
    /// Requests and replies.
    Transmission,
    /// Nothing more is read. What was asked is done and answered.
    Draining,
    /// Over: no request is under way, and nothing is left to send.
    Ended,
}

/// Event of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PhaseEvent {
    /// The client's flags are in order.
    Flags,
    /// TLS is agreed on.
    StartTls,
    /// The handshake of TLS is done.
    Secured,
    /// The client has chosen an export.
    Chosen,
    /// The client has left, or what it sends makes no sense any more.
    InputEnded,
    /// Nothing can be sent any more, or shall be.
    Cut,
    /// All requests are answered and all answers are sent.
    Idle,
}

/// Action of a connection's state machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PhaseAction {
    /// The terms of the export that the client was given hold.
    TakeTerms,
    /// Read no more; what has arrived only in part is given up.
    StopReading,
    /// Send no more.
    DropReplies,
    /// Log why it ended.
    Report,
}

/// The life of a connection, from [`Phase::Greeting`].
pub const PHASES: Table<Phase, PhaseEvent, PhaseAction> = {
    use Phase as P;
    use PhaseAction as A;
    use PhaseEvent as E;
    &[
        (P::Greeting, E::Flags, P::Options, &[]),
        (P::Greeting, E::InputEnded, P::Draining, &[A::StopReading]),
        (P::Greeting, E::Cut, P::Draining, &[A::StopReading, A::DropReplies]),
        (P::Options, E::StartTls, P::Handshake, &[]),
        (P::Options, E::Chosen, P::Transmission, &[A::TakeTerms]),
        (P::Options, E::InputEnded, P::Draining, &[A::StopReading]),
        (P::Options, E::Cut, P::Draining, &[A::StopReading, A::DropReplies]),
        (P::Handshake, E::Secured, P::Secured, &[]),
        (P::Handshake, E::InputEnded, P::Draining, &[A::StopReading]),
        (P::Handshake, E::Cut, P::Draining, &[A::StopReading, A::DropReplies]),
        (P::Secured, E::Chosen, P::Transmission, &[A::TakeTerms]),
        (P::Secured, E::InputEnded, P::Draining, &[A::StopReading]),
        (P::Secured, E::Cut, P::Draining, &[A::StopReading, A::DropReplies]),
        (P::Transmission, E::InputEnded, P::Draining, &[A::StopReading]),
        (P::Transmission, E::Cut, P::Draining, &[A::StopReading, A::DropReplies]),
        (P::Draining, E::Cut, P::Draining, &[A::DropReplies]),
        (P::Draining, E::Idle, P::Ended, &[A::Report]),
    ]
};

/// Why nothing is read from the client: it is made to wait.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stall {
    /// [`poll`](super::Connection::poll) comes first.
    Work,
    /// The client has not taken the answers to earlier options.
    Answers,
    /// The next bytes are the handshake of TLS.
    Handshake,
    /// As many requests are under way as may be.
    Requests,
    /// As many bytes are under way as may be.
    Bytes,
    /// A buffer is needed.
    Buffers,
    /// Nothing more is read from this client.
    Closing,
}

/// Why a connection ended.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum End {
    /// The client left as it should, or at least between two messages.
    #[error("it has left")]
    Left,
    /// The server was asked to stop.
    #[error("the server stops")]
    Stopped,
    /// The client left in the middle of a message.
    #[error("it left in the middle of {0}")]
    CutShort(&'static str),
    /// The client does not keep to the protocol.
    #[error("{0}")]
    Protocol(String),
    /// TLS has failed: its handshake, or later.
    #[error("TLS: {0}")]
    Tls(String),
    /// The negotiation took too long.
    #[error("it did not finish its negotiation in time")]
    TimedOut,
    /// The socket failed, or the client did not take its answers before the server stopped.
    #[error("nothing can be sent to it")]
    Broken,
}

impl End {
    /// Whether the client did something wrong, which is worth a line in the log.
    pub const fn is_fault(&self) -> bool {
        !matches!(self, Self::Left | Self::Stopped | Self::Broken)
    }
}

#[cfg(test)]
mod tests {
    use rtrs::table::step;

    use super::*;

    const ALL: [Phase; 7] = [
        Phase::Greeting,
        Phase::Options,
        Phase::Handshake,
        Phase::Secured,
        Phase::Transmission,
        Phase::Draining,
        Phase::Ended,
    ];

    #[test]
    fn each_transition_stands_once_and_leads_forward() {
        for (i, (from, event, to, _)) in PHASES.iter().enumerate() {
            assert!(from <= to, "{event:?} in {from:?}");
            let twice = PHASES[..i].iter().any(|(p, e, ..)| p == from && e == event);
            assert!(!twice, "{event:?} in {from:?} stands twice");
        }
        for phase in &ALL[1..] {
            assert!(PHASES.iter().any(|(from, _, to, _)| to == phase && from != phase));
        }
    }

    #[test]
    fn every_phase_but_the_last_can_be_cut_and_leads_to_the_end() {
        for phase in &ALL[..6] {
            let (next, actions) = step(PHASES, *phase, PhaseEvent::Cut).unwrap();
            assert_eq!(next, Phase::Draining);
            // After a cut nobody is answered.
            assert_eq!(actions.last(), Some(&PhaseAction::DropReplies));
        }
        assert!(PHASES.iter().all(|(from, ..)| *from != Phase::Ended));
    }

    #[test]
    fn it_ends_only_when_nothing_is_under_way() {
        for (from, event, to, _) in PHASES {
            assert_eq!(*to == Phase::Ended, *event == PhaseEvent::Idle, "{from:?}");
        }
    }
}
