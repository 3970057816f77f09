//! State of a path with what belongs to it. `state.rs` has the legal transitions.

use core::time::Duration;

use roce_verbs::Instant;

use crate::{
    client::{config::SessionConfig, keepalive::Keepalive, policy::Policy, state::PathState},
    heartbeat::Heartbeat,
};

/// Progress of a handshake.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum Step {
    /// It has not begun.
    #[default]
    Idle,
    /// Connection `cid` asks for the way to the server.
    Resolving { cid: u16 },
    /// Connection `cid` waits for the server's answer.
    Connecting { cid: u16 },
    /// All connections stand. What was lost with the session may still be under way.
    Resting,
    /// The server was asked for its chunks.
    Informing,
}

/// An attempt to connect.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Attempt {
    pub(super) step: Step,
    /// When the step has taken too long.
    pub(super) due: Option<Instant>,
    /// The server may make the session for it (`for_new_clt`).
    pub(super) first: bool,
    /// Work requests were flushed, and nothing has explained it by then.
    pub(super) flushed: Option<Instant>,
}

/// Keepalive of a path that is up.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) heartbeat: Heartbeat,
    pub(super) next_beat: Instant,
    /// Heartbeats and their answers.
    pub(super) keepalive: Keepalive,
    /// See [`Attempt`].
    pub(super) flushed: Option<Instant>,
}

impl Up {
    pub(super) fn new(now: Instant, config: &SessionConfig, flushed: Option<Instant>) -> Self {
        // One that has not been measured would not be chosen.
        let wait = match config.policy {
            Policy::MinLatency => Duration::ZERO,
            _ => config.heartbeat.interval,
        };
        Self {
            heartbeat: Heartbeat::new(config.heartbeat),
            next_beat: now + wait,
            keepalive: Keepalive::default(),
            flushed,
        }
    }
}

/// Time of the next attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Retry {
    /// As configured, once the queue pairs are drained.
    Configured,
    /// So long after the queue pairs are drained.
    After(Duration),
    At(Instant),
}

/// State of a path; [`PathState`] names it.
#[derive(Debug)]
pub(super) enum State {
    Connecting(Attempt),
    ConnectingErr(Retry),
    Connected(Up),
    Reconnecting {
        retry: Retry,
        /// The session was lost since the path was up: its user has been told that requests of before are over.
        outlived: bool,
    },
    Closing {
        /// The server has this time to disconnect.
        until: Option<Instant>,
        /// See above.
        outlived: bool,
    },
    Closed,
    Dead,
}

impl State {
    pub(super) fn name(&self) -> PathState {
        match self {
            Self::Connecting(_) => PathState::Connecting,
            Self::ConnectingErr(_) => PathState::ConnectingErr,
            Self::Connected(_) => PathState::Connected,
            Self::Reconnecting { .. } => PathState::Reconnecting,
            Self::Closing { .. } => PathState::Closing,
            Self::Closed => PathState::Closed,
            Self::Dead => PathState::Dead,
        }
    }

    /// Goes to the next state, or stays in this one with what belongs to it.
    pub(super) fn enter(&mut self, next: PathState, now: Instant, config: &SessionConfig) {
        if self.name() == next {
            return;
        }
        let (mut retry, mut flushed, mut outlived) = (Retry::Configured, None, false);
        match self {
            Self::Connecting(attempt) => flushed = attempt.flushed,
            Self::ConnectingErr(of) => retry = *of,
            Self::Reconnecting { outlived: of, .. } => outlived = *of,
            Self::Connected(_) | Self::Closing { .. } | Self::Closed | Self::Dead => {}
        }
        *self = match next {
            PathState::Connecting => Self::Connecting(Attempt::default()),
            PathState::ConnectingErr => Self::ConnectingErr(Retry::Configured),
            PathState::Connected => Self::Connected(Up::new(now, config, flushed)),
            PathState::Reconnecting => Self::Reconnecting { retry, outlived },
            PathState::Closing => Self::Closing { until: None, outlived },
            PathState::Closed => Self::Closed,
            PathState::Dead => Self::Dead,
        };
    }

    /// Sets the time of the next attempt.
    pub(super) fn set_retry(&mut self, time: Retry) {
        if let Self::ConnectingErr(retry) | Self::Reconnecting { retry, .. } = self {
            *retry = time;
        }
    }

    /// The session is lost.
    pub(super) fn session_lost(&mut self) {
        if let Self::Reconnecting { outlived, .. } | Self::Closing { outlived, .. } = self {
            *outlived = true;
        }
    }

    pub(super) fn outlived(&self) -> bool {
        matches!(
            self,
            Self::Reconnecting { outlived: true, .. } | Self::Closing { outlived: true, .. }
        )
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        match self {
            Self::Connecting(attempt) => attempt.due.into_iter().chain(attempt.flushed).min(),
            Self::Connected(up) => up.flushed.into_iter().chain([up.next_beat]).min(),
            Self::Reconnecting {
                retry: Retry::At(at), ..
            } => Some(*at),
            Self::Closing { until, .. } => *until,
            Self::ConnectingErr(_) | Self::Reconnecting { .. } | Self::Closed | Self::Dead => None,
        }
    }
}

/// How far a path has ever come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Reached {
    Nothing,
    /// It was asked to connect.
    Asked,
    /// The server has accepted connection 0.
    Accepted,
    /// It has been up.
    Up,
}
