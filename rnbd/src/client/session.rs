//! A session, as far as devices need to know it.

use std::collections::BTreeSet;

use rtrs::{
    PathError,
    client::{buffers::Buffer, config::SessionInfo},
};

use super::patience::Alarm;

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
    /// Requests to devices that the server has closed.
    pub(super) drain: Drain,
}

/// Requests from before the server [closed](super::closed) a session's devices, as far as they are in flight.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// When to look whether there are any left. [`Alarm::Off`]: nothing is waited for.
    pub(super) check: Alarm,
    /// Number of the drain at home, so that reports of an earlier one are ignored.
    pub(super) number: u32,
    /// At home: shards that have not reported that they have none.
    pub(super) missing: BTreeSet<u16>,
    /// At other shards: the drain that home waits for.
    pub(super) asked: Option<u32>,
}

impl Drain {
    /// The session is down, which ends its requests.
    pub(super) fn stop(&mut self) {
        self.check = Alarm::Off;
        self.missing.clear();
        self.asked = None;
    }
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
            drain: Drain::default(),
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
        let drained = self.drain.check == Alarm::Off;
        self.down.is_none() && self.version.is_none() && self.asking.is_none() && drained
    }
}
