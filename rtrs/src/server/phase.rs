//! State of a path, with what belongs to each state.

use roce_verbs::Instant;

use crate::{
    PathError,
    heartbeat::{Beat, Heartbeat, HeartbeatConfig},
    server::{awaited::Probe, state::PathState},
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

/// See the module. [`PATH`](super::state::PATH) has the transitions.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Its connections are being made. With a probe once the client has asked for the chunks, by the session's name: it is answered when
    /// they may be used.
    Connecting(Option<Probe>),
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
            Self::Connecting(_) => PathState::Connecting,
            Self::Connected(_) => PathState::Connected,
            Self::Closing(_) => PathState::Closing,
            Self::Closed(_) => PathState::Closed,
        }
    }

    /// Whether the client has asked for the chunks, and waits for the answer.
    pub(crate) fn has_asked(&self) -> bool {
        matches!(self, Self::Connecting(Some(_)))
    }

    /// The probe of a client that waits for the chunks.
    pub(crate) fn probe(&mut self) -> Option<&mut Probe> {
        match self {
            Self::Connecting(probe) => probe.as_mut(),
            _ => None,
        }
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
            Self::Connecting(Some(Probe::Due(at))) => Some(*at),
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
            Beat::Lost => Err(PathError::HeartbeatLost(config.patience())),
        }
    }

    /// The path is over.
    pub(crate) fn finish(&mut self) {
        if let Self::Closing(ending) = core::mem::replace(self, Self::Connecting(None)) {
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
