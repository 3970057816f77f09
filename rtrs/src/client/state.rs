//! The states of a client's path and session, with every legal transition.

use crate::table::Table;

/// States of a path (`enum rtrs_clt_state`, `rtrs_clt_change_state`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PathState {
    /// Its connections are being made.
    Connecting,
    /// Making them failed.
    ConnectingErr,
    /// Waits for the next attempt, and before that for the end of its queue pairs.
    Reconnecting,
    /// Carries requests.
    Connected,
    /// Being taken down for good.
    Closing,
    /// Down until somebody asks for it.
    Closed,
    /// No longer one of the session's.
    Dead,
}

/// Event of a path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PathEvent {
    /// All connections stand and the server's chunks are known.
    Handshaken,
    /// A connection failed, a step took too long, or the peer is silent.
    Broken,
    /// None of its work requests is under way any more.
    Drained,
    /// The next attempt is due.
    RetryDue,
    /// There are no attempts left.
    Exhausted,
    /// The user wants an attempt now.
    ReconnectAsked,
    /// The user, or the loss of the device, takes it down.
    CloseAsked,
    /// The peer has taken leave, or has had the time to.
    Gone,
    /// The user removes it.
    RemoveAsked,
}

/// Action for a path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PathAction {
    /// Connect number 0, then the others, then ask for the chunks.
    BeginHandshake,
    /// One attempt fewer is left.
    CountAttempt,
    /// All attempts are left again.
    ResetAttempts,
    /// Move the queue pairs to error.
    DrainQps,
    /// Tell the peer.
    Disconnect,
    /// Send the requests in flight again by another path, or end them.
    Failover,
    /// Set the time of the next attempt, unless one was asked for.
    ArmRetry,
    /// The next attempt follows as soon as the queue pairs are drained.
    RetryNow,
    /// The queue pairs go.
    DestroyQps,
    /// Tell the session.
    Report,
    /// Take it off the session's list.
    Forget,
}

/// The life of a path, from [`PathState::Connecting`].
pub const PATH: Table<PathState, PathEvent, PathAction> = {
    use PathAction as A;
    use PathEvent as E;
    use PathState as S;
    &[
        (
            S::Connecting,
            E::Handshaken,
            S::Connected,
            &[A::ResetAttempts, A::Report],
        ),
        (S::Connecting, E::Broken, S::ConnectingErr, &[A::DrainQps]),
        // The first attempt of a new path: the session asks to close it instead.
        (
            S::ConnectingErr,
            E::Drained,
            S::Reconnecting,
            &[A::DestroyQps, A::ArmRetry],
        ),
        (S::ConnectingErr, E::ReconnectAsked, S::Reconnecting, &[A::RetryNow]),
        (
            S::Connected,
            E::Broken,
            S::Reconnecting,
            &[A::DrainQps, A::Disconnect, A::Report],
        ),
        (
            S::Connected,
            E::ReconnectAsked,
            S::Reconnecting,
            &[A::DrainQps, A::Disconnect, A::RetryNow, A::Report],
        ),
        (
            S::Reconnecting,
            E::Drained,
            S::Reconnecting,
            &[A::Failover, A::DestroyQps, A::ArmRetry],
        ),
        (S::Reconnecting, E::ReconnectAsked, S::Reconnecting, &[A::RetryNow]),
        (
            S::Reconnecting,
            E::RetryDue,
            S::Connecting,
            &[A::CountAttempt, A::BeginHandshake],
        ),
        (S::Reconnecting, E::Exhausted, S::Closing, &[A::DrainQps, A::Disconnect]),
        (S::Connecting, E::CloseAsked, S::Closing, &[A::DrainQps, A::Disconnect]),
        (
            S::ConnectingErr,
            E::CloseAsked,
            S::Closing,
            &[A::DrainQps, A::Disconnect],
        ),
        (
            S::Reconnecting,
            E::CloseAsked,
            S::Closing,
            &[A::DrainQps, A::Disconnect],
        ),
        (
            S::Connected,
            E::CloseAsked,
            S::Closing,
            &[A::DrainQps, A::Disconnect, A::Report],
        ),
        (S::Closing, E::Drained, S::Closing, &[A::Failover]),
        (S::Closing, E::Gone, S::Closed, &[A::DestroyQps, A::Report]),
        (S::Closed, E::ReconnectAsked, S::Reconnecting, &[A::RetryNow]),
        (S::Closed, E::RemoveAsked, S::Dead, &[A::Forget]),
    ]
};

/// States of a session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum SessionState {
    /// No path has been up yet.
    Opening,
    /// A path is up.
    Open,
    /// None is.
    Disconnected,
    /// Its paths are taken down.
    Closing,
    /// Over.
    Closed,
}

/// Event of a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SessionEvent {
    /// A path is up, and none was.
    PathUp,
    /// The last path that was up is down.
    LastPathDown,
    /// No path that it was to open with came up.
    PathsLost,
    /// The user closes it.
    CloseAsked,
    /// The last path is closed.
    PathsGone,
}

/// Action for a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SessionAction {
    /// Tell the user that it is open.
    Announce,
    /// Tell the user that it can't be opened, and why.
    Fail,
    /// Tell the user that no path is left (`RTRS_CLT_LINK_EV_DISCONNECTED`).
    TellDown,
    /// Tell the user that there is one again (`RTRS_CLT_LINK_EV_RECONNECTED`).
    TellUp,
    /// Take all paths down.
    ClosePaths,
    /// Permits, buffers and registrations go.
    GiveBack,
    /// Tell the user that it is over.
    Tell,
}

/// The life of a session, from [`SessionState::Opening`].
pub const SESSION: Table<SessionState, SessionEvent, SessionAction> = {
    use SessionAction as A;
    use SessionEvent as E;
    use SessionState as S;
    &[
        (S::Opening, E::PathUp, S::Open, &[A::Announce]),
        (S::Opening, E::PathsLost, S::Closed, &[A::GiveBack, A::Fail]),
        (S::Opening, E::CloseAsked, S::Closing, &[A::ClosePaths]),
        (S::Open, E::LastPathDown, S::Disconnected, &[A::TellDown]),
        (S::Open, E::CloseAsked, S::Closing, &[A::ClosePaths]),
        (S::Disconnected, E::PathUp, S::Open, &[A::TellUp]),
        (S::Disconnected, E::CloseAsked, S::Closing, &[A::ClosePaths]),
        (S::Closing, E::PathsGone, S::Closed, &[A::GiveBack, A::Tell]),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{check, step};

    const PATH_STATES: [PathState; 7] = [
        PathState::Connecting,
        PathState::ConnectingErr,
        PathState::Reconnecting,
        PathState::Connected,
        PathState::Closing,
        PathState::Closed,
        PathState::Dead,
    ];

    #[test]
    fn the_transitions_of_a_path_are_the_kernels() {
        use PathState::{Closed, Closing, Connected, Connecting, ConnectingErr, Dead, Reconnecting};
        check::is_sound(PATH, Connecting, &PATH_STATES);
        // `rtrs_clt_change_state`, Linux 6.1.
        let mut kernel = vec![
            (Connecting, Connected),
            (Connecting, ConnectingErr),
            (Connected, Reconnecting),
            (ConnectingErr, Reconnecting),
            (Closed, Reconnecting),
            (Reconnecting, Connecting),
            (Connecting, Closing),
            (ConnectingErr, Closing),
            (Reconnecting, Closing),
            (Connected, Closing),
            (Closing, Closed),
            (Closed, Dead),
        ];
        kernel.sort_unstable();
        assert_eq!(check::edges(PATH), kernel);
    }

    /// Buffers may be given back only when nothing touches them any more.
    #[test]
    fn requests_leave_a_path_only_when_it_is_drained() {
        for (from, event, _, actions) in PATH {
            let leaves = actions.contains(&PathAction::Failover);
            assert!(!leaves || *event == PathEvent::Drained, "{event:?} in {from:?}");
        }
        for state in [PathState::Reconnecting, PathState::Closing] {
            let (_, actions) = step(PATH, state, PathEvent::Drained).unwrap();
            assert!(actions.contains(&PathAction::Failover), "{state:?}");
        }
    }

    #[test]
    fn a_dead_path_stays_dead() {
        assert!(PATH.iter().all(|(from, ..)| *from != PathState::Dead));
    }

    #[test]
    fn a_session_tells_its_user_of_each_end_once() {
        let all = [
            SessionState::Opening,
            SessionState::Open,
            SessionState::Disconnected,
            SessionState::Closing,
            SessionState::Closed,
        ];
        check::is_sound(SESSION, SessionState::Opening, &all);
        for (from, _, to, actions) in SESSION {
            let told = [SessionAction::Fail, SessionAction::Tell];
            let ends = actions.iter().filter(|a| told.contains(a)).count();
            assert_eq!(ends, usize::from(*to == SessionState::Closed), "{from:?} to {to:?}");
        }
    }
}
