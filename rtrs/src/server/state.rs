//! The states of a server's path, with every legal transition.

use roce_verbs::Instant;

use crate::{
    PathError,
    heartbeat::{Beat, Heartbeat, HeartbeatConfig},
    table::Table,
};

/// States of a path (`enum rtrs_srv_state`, `__rtrs_srv_change_state`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PathState {
    /// Its connections are being made.
    Connecting,
    /// Takes requests.
    Connected,
    /// Being taken down.
    Closing,
    /// Over.
    Closed,
}

/// Event of a path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PathEvent {
    /// All connections stand, and the client has asked for the chunks by the session's name.
    Named,
    /// A connection failed, the handshake took too long, the client is silent or has left, or the operator closes it.
    Broken,
    /// None of its work requests is under way any more.
    Drained,
    /// No request of it is with the server's user any more; only after it is drained.
    Idle,
}

/// Action for a path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PathAction {
    /// Look after the peer.
    StartHeartbeat,
    /// Requests of it that wait for a chunk are forgotten.
    DropParked,
    /// Tell the user.
    Announce,
    /// Answer with the chunks' addresses and keys.
    PostInfo,
    /// Move the queue pairs to error.
    DrainQps,
    /// Tell the peer.
    Disconnect,
    /// Its place is free.
    TellAdmission,
    /// Answers that have not left are dropped: their client is gone.
    DropAnswers,
    /// Requests of other paths may have the chunks that it held, but for those that the user still works on.
    ReleaseParked,
    /// The queue pairs go, and the path's keys.
    DestroyQps,
    /// Tell the user, and the session.
    Withdraw,
}

/// The life of a path, from [`PathState::Connecting`].
pub const PATH: Table<PathState, PathEvent, PathAction> = {
    use PathAction as A;
    use PathEvent as E;
    use PathState as S;
    &[
        (
            S::Connecting,
            E::Named,
            S::Connected,
            &[A::StartHeartbeat, A::Announce, A::PostInfo],
        ),
        (
            S::Connecting,
            E::Broken,
            S::Closing,
            &[A::DropParked, A::DrainQps, A::Disconnect, A::TellAdmission],
        ),
        (
            S::Connected,
            E::Broken,
            S::Closing,
            &[A::DropParked, A::DrainQps, A::Disconnect, A::TellAdmission],
        ),
        (S::Closing, E::Drained, S::Closing, &[A::DropAnswers, A::ReleaseParked]),
        (S::Closing, E::Idle, S::Closed, &[A::DestroyQps, A::Withdraw]),
    ]
};

/// The heartbeat, and when its next interval begins.
#[derive(Debug)]
pub(crate) struct Pulse {
    heartbeat: Heartbeat,
    next: Instant,
}

/// How a path ends.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) why: PathError,
    /// The user knows of the path.
    pub(crate) was_up: bool,
    /// None of its work requests is in flight.
    pub(crate) drained: bool,
}

/// State of a path, with what belongs to each. [`PATH`] has the transitions.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Its connections are being made.
    Connecting {
        /// The client has asked for the chunks, by the session's name. It is answered when they may be used.
        asked: bool,
    },
    /// Takes requests.
    Connected(Pulse),
    /// Being taken down.
    Closing(Ending),
    /// Over.
    Closed(Ending),
}

impl Phase {
    /// Connected, from this time.
    pub(crate) fn connected(config: HeartbeatConfig, now: Instant) -> Self {
        Self::Connected(Pulse {
            heartbeat: Heartbeat::new(config),
            next: now + config.interval,
        })
    }

    /// The state.
    pub(crate) fn state(&self) -> PathState {
        match self {
            Self::Connecting { .. } => PathState::Connecting,
            Self::Connected(_) => PathState::Connected,
            Self::Closing(_) => PathState::Closing,
            Self::Closed(_) => PathState::Closed,
        }
    }

    /// Whether the client has asked for the chunks, and waits for the answer.
    pub(crate) fn has_asked(&self) -> bool {
        matches!(self, Self::Connecting { asked: true })
    }

    /// How the path ends, if it does.
    pub(crate) fn ending(&self) -> Option<&Ending> {
        match self {
            Self::Closing(ending) | Self::Closed(ending) => Some(ending),
            _ => None,
        }
    }

    /// A packet came from the peer.
    pub(crate) fn heard(&mut self) {
        if let Self::Connected(pulse) = self {
            pulse.heartbeat.heard();
        }
    }

    /// When [`tick`](Self::tick) is due.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        match self {
            Self::Connected(pulse) => Some(pulse.next),
            _ => None,
        }
    }

    /// Looks at the clock. True: a heartbeat is due.
    ///
    /// # Errors
    /// When the peer has been silent for too long.
    pub(crate) fn tick(&mut self, now: Instant) -> Result<bool, PathError> {
        let Self::Connected(pulse) = self else { return Ok(false) };
        if now < pulse.next {
            return Ok(false);
        }
        let config = *pulse.heartbeat.config();
        // From now, not from the last beat: a process that was stopped must not count its own absence.
        pulse.next = now + config.interval;
        match pulse.heartbeat.tick() {
            Beat::Send => Ok(true),
            Beat::Wait => Ok(false),
            Beat::Lost => Err(PathError::HeartbeatLost(config.timeout())),
        }
    }

    /// The path is over.
    pub(crate) fn finish(&mut self) {
        if let Self::Closing(ending) = core::mem::replace(self, Self::Connecting { asked: false }) {
            *self = Self::Closed(ending);
        }
    }

    /// The path ends.
    pub(crate) fn close(&mut self, why: PathError) {
        *self = Self::Closing(Ending {
            why,
            was_up: matches!(self, Self::Connected(_)),
            drained: false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{check, step};

    #[test]
    fn the_transitions_of_a_path_are_the_kernels() {
        use PathState::{Closed, Closing, Connected, Connecting};
        check::is_sound(PATH, Connecting, &[Connecting, Connected, Closing, Closed]);
        // `__rtrs_srv_change_state`, Linux 6.1.
        let kernel = [
            (Connecting, Connected),
            (Connecting, Closing),
            (Connected, Closing),
            (Closing, Closed),
        ];
        assert_eq!(check::edges(PATH), kernel);
    }

    /// Work requests of the dying path still read the chunks.
    #[test]
    fn chunks_change_hands_only_when_the_path_is_drained() {
        for (from, event, _, actions) in PATH {
            let frees = [
                PathAction::DropAnswers,
                PathAction::ReleaseParked,
                PathAction::DestroyQps,
            ];
            if actions.iter().any(|a| frees.contains(a)) {
                assert_eq!(*from, PathState::Closing);
                assert!(
                    [PathEvent::Drained, PathEvent::Idle].contains(event),
                    "{event:?} in {from:?}"
                );
            }
        }
        let (_, actions) = step(PATH, PathState::Closing, PathEvent::Drained).unwrap();
        assert_eq!(actions, [PathAction::DropAnswers, PathAction::ReleaseParked]);
    }

    #[test]
    fn the_user_hears_of_a_path_before_the_client_does_and_once_more_at_its_end() {
        for (_, event, to, actions) in PATH {
            let at = |action| actions.iter().position(|a| *a == action);
            if *to == PathState::Connected {
                assert!(at(PathAction::Announce) < at(PathAction::PostInfo), "{event:?}");
            }
            assert_eq!(
                at(PathAction::Withdraw).is_some(),
                *to == PathState::Closed,
                "{event:?}"
            );
        }
    }
}
