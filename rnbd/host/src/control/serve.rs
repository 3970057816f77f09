//! Steering a server.

use std::sync::Arc;

use rnbd::{Errno, server::listing::DeviceListing};
use roce_reactor::Handle;
use rtrs::{
    admission::PathKey,
    server::{Share, listing::SessionListing, request::SessionKey},
};

use super::{Pending, Refused, answer};
use crate::{jobs::Done, serve::ServeStats, server::Command};

/// Request to a server. Refused with ENOENT when there is no such session, path or device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServeRequest {
    /// Its sessions and their paths.
    Sessions,
    /// The devices that are open.
    Devices,
    /// Disconnects a session. Its end is told as an event, when its requests have been answered.
    CloseSession(SessionKey),
    /// Disconnects a path; its client may connect it again (the kernel's `disconnect`).
    ClosePath(SessionKey, PathKey),
    /// Closes a device for a session, by the client's number for it (the kernel's `force_close`).
    ForceClose(SessionKey, u32),
    /// Sets a path's counters to zero (`stats/rdma`).
    ResetPathStats(SessionKey, PathKey),
    /// Returns the statistics.
    Stats,
}

/// Answer of a server.
#[derive(Clone, Debug)]
pub enum ServeAnswer {
    /// It is done.
    Done,
    /// To [`ServeRequest::Sessions`].
    Sessions(Vec<SessionListing>),
    /// To [`ServeRequest::Devices`].
    Devices(Vec<DeviceListing>),
    /// To [`ServeRequest::Stats`].
    Stats(Box<ServeStats>),
}

/// Steers a server; from [`Serving::control`](crate::serve::Serving::control). It keeps nothing alive.
#[derive(Clone, Debug)]
pub struct ServeControl {
    loops: Arc<[Handle<Command, Done>]>,
}

impl ServeControl {
    pub(crate) fn new(loops: Arc<[Handle<Command, Done>]>) -> Self {
        Self { loops }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// ENOENT when there is no such thing, ENODEV when the server has ended.
    pub fn ask(&self, request: ServeRequest) -> Result<ServeAnswer, Refused> {
        match request {
            ServeRequest::Sessions => self.sessions().map(ServeAnswer::Sessions),
            ServeRequest::Devices => self.devices().map(ServeAnswer::Devices),
            ServeRequest::Stats => self.stats().map(|stats| ServeAnswer::Stats(Box::new(stats))),
            ServeRequest::CloseSession(session)
            | ServeRequest::ClosePath(session, _)
            | ServeRequest::ForceClose(session, _) => self.tell(self.home(session), request).wait(),
            ServeRequest::ResetPathStats(session, _) => {
                let home = self.home(session);
                let mut answers = self.tell_all(request);
                // Other loops may have nothing of the path.
                match answers.get(home) {
                    Some(_) => answers.swap_remove(home),
                    None => Err(Errno::ENOENT.into()),
                }
            }
        }
    }

    fn home(&self, session: SessionKey) -> usize {
        let share = Share::new(0, self.loops.len()).unwrap_or(Share::WHOLE);
        share.of_session(session)
    }

    fn tell(&self, index: usize, request: ServeRequest) -> Pending<ServeAnswer> {
        let (reply, pending) = answer();
        if let Some(handle) = self.loops.get(index) {
            handle.command(Command::Steer(request, reply));
        }
        pending
    }

    fn tell_all(&self, request: ServeRequest) -> Vec<Result<ServeAnswer, Refused>> {
        let asked: Vec<_> = (0..self.loops.len()).map(|index| self.tell(index, request)).collect();
        asked.into_iter().map(Pending::wait).collect()
    }

    /// Returns the statistics.
    ///
    /// # Errors
    /// ENODEV when the server has ended.
    pub fn stats(&self) -> Result<ServeStats, Refused> {
        let mut sum = ServeStats::default();
        for answer in self.tell_all(ServeRequest::Stats) {
            if let ServeAnswer::Stats(part) = answer? {
                sum.add(&part);
            }
        }
        Ok(sum)
    }

    /// Sessions and paths, all loops together.
    ///
    /// # Errors
    /// ENODEV when the server has ended.
    pub fn sessions(&self) -> Result<Vec<SessionListing>, Refused> {
        let mut parts = Vec::new();
        for answer in self.tell_all(ServeRequest::Sessions) {
            if let ServeAnswer::Sessions(part) = answer? {
                parts.push(part);
            }
        }
        Ok(SessionListing::merge(parts))
    }

    /// Devices that are open, of all sessions.
    ///
    /// # Errors
    /// ENODEV when the server has ended.
    pub fn devices(&self) -> Result<Vec<DeviceListing>, Refused> {
        let mut all = Vec::new();
        for answer in self.tell_all(ServeRequest::Devices) {
            if let ServeAnswer::Devices(part) = answer? {
                all.extend(part);
            }
        }
        all.sort_by_key(|device| (device.session, device.id));
        Ok(all)
    }
}
