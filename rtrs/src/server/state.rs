//! The states of a server's path and of a session's chunks, with every legal transition.

use crate::table::Table;

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

/// States of a chunk, which is the session's: a request may come by another path than the one before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ChunkState {
    /// The client's.
    Idle,
    /// The client's key is being taken back.
    Revoking,
    /// The server's user works on it.
    User,
    /// The answer is on its way.
    Answering,
}

/// Event of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ChunkEvent {
    /// A request came, and its key must be taken back first.
    Asked,
    /// A request came, and the key stays, or has been taken back at once.
    AskedOpen,
    /// The key is taken back.
    Revoked,
    /// The user has answered.
    Answered,
    /// The user has answered, and the request's path is gone: none of its work requests is under way.
    AnsweredInVain,
    /// The answer has left.
    Sent,
    /// The request's path is gone, and none of its work requests is under way.
    PathGone,
}

/// The life of a chunk, from [`ChunkState::Idle`].
pub const CHUNK: Table<ChunkState, ChunkEvent, ()> = {
    use ChunkEvent as E;
    use ChunkState as S;
    &[
        (S::Idle, E::Asked, S::Revoking, &[]),
        (S::Idle, E::AskedOpen, S::User, &[]),
        (S::Revoking, E::Revoked, S::User, &[]),
        (S::Revoking, E::PathGone, S::Idle, &[]),
        (S::User, E::Answered, S::Answering, &[]),
        // Not with the path: the user still works on it.
        (S::User, E::AnsweredInVain, S::Idle, &[]),
        (S::Answering, E::Sent, S::Idle, &[]),
        (S::Answering, E::PathGone, S::Idle, &[]),
    ]
};

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

    #[test]
    fn a_chunk_that_the_user_has_is_not_taken_away_with_the_path() {
        let all = [
            ChunkState::Idle,
            ChunkState::Revoking,
            ChunkState::User,
            ChunkState::Answering,
        ];
        check::is_sound(CHUNK, ChunkState::Idle, &all);
        assert_eq!(step(CHUNK, ChunkState::User, ChunkEvent::PathGone), None);
        for state in [ChunkState::Revoking, ChunkState::User, ChunkState::Answering] {
            for event in [ChunkEvent::Asked, ChunkEvent::AskedOpen] {
                assert_eq!(step(CHUNK, state, event), None, "a second request for {state:?}");
            }
        }
    }
}
