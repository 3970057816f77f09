//! A session, as far as devices need to know it.

use rtrs::{
    PathError,
    client::{buffers::Buffer, config::SessionInfo},
};

use super::loss_policy::Timer;

/// A session that has been opened.
#[derive(Debug)]
pub(super) struct Session {
    /// Limits of the session.
    pub(super) info: SessionInfo,
    /// Why there is no path, while there is none.
    pub(super) down: Option<PathError>,
    /// Major protocol version agreed on, since it has a path.
    pub(super) version: Option<u8>,
    /// The version exchange that is under way.
    pub(super) asking: Option<u64>,
    /// For answers, when operations that wait for devices have all other buffers.
    pub(super) reserve: Option<Buffer>,
    /// When to look again whether requests are in flight from before the server [closed](super::recovery) the session's devices.
    /// [`Timer::Off`]: nothing is waited for.
    pub(super) drain: Timer,
}

impl Session {
    /// One that has a path.
    pub(super) fn new(info: SessionInfo) -> Self {
        Self {
            info,
            down: None,
            version: None,
            asking: None,
            reserve: None,
            drain: Timer::Off,
        }
    }

    /// Whether devices can be opened.
    pub(super) fn is_ready(&self) -> bool {
        self.down.is_none() && self.version.is_some()
    }

    /// Whether it has no buffer of its own, and no answer comes in it.
    pub(super) fn lacks_reserve(&self) -> bool {
        self.reserve.is_none()
    }

    /// Whether a version is to be agreed on before devices can be opened.
    pub(super) fn is_to_ask(&self) -> bool {
        let drained = self.drain == Timer::Off;
        self.down.is_none() && self.version.is_none() && self.asking.is_none() && drained
    }
}
