//! Control of a server.

use std::sync::Arc;

use rnbd::server::listing::DeviceListing;
use roce::reactor::Handle;
use rtrs::server::listing::SessionListing;

use super::{
    refused::Refused,
    reply::{Pending, ServeAnswer, reply},
    request::ServeRequest,
};
use crate::{jobs::Done, server::Command, stats::ServeStats};

/// Handle of a server, from [`Serving::control`](crate::serve::Serving::control). Keeps nothing alive.
#[derive(Clone, Debug)]
pub struct ServeControl {
    loops: Arc<[Handle<Command, Done>]>,
}

impl ServeControl {
    pub(crate) fn new(loops: Arc<[Handle<Command, Done>]>) -> Self {
        Self { loops }
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// ENOENT for an unknown session, path or device; ENODEV when the server has ended.
    pub fn ask(&self, request: ServeRequest) -> Result<ServeAnswer, Refused> {
        match request {
            ServeRequest::Sessions => self.sessions().map(ServeAnswer::Sessions),
            ServeRequest::Devices => self.devices().map(ServeAnswer::Devices),
            ServeRequest::Stats {} => self.stats().map(|stats| ServeAnswer::Stats(Box::new(stats))),
            ServeRequest::CloseSession { .. }
            | ServeRequest::ClosePath { .. }
            | ServeRequest::ForceClose { .. }
            | ServeRequest::ResetPathStats { .. } => {
                // One loop has the session, and the others refuse.
                let (reply, pending) = reply();
                for handle in self.loops.iter() {
                    handle.command(Command::Steer(request, reply.clone()));
                }
                drop(reply);
                pending.wait_for_first()
            }
        }
    }

    /// Sends a request to each loop, and returns their answers in the same order.
    fn send_all(&self, request: ServeRequest) -> Vec<Result<ServeAnswer, Refused>> {
        let send = |handle: &Handle<Command, Done>| {
            let (reply, pending) = reply();
            handle.command(Command::Steer(request, reply));
            pending
        };
        let sent: Vec<_> = self.loops.iter().map(send).collect();
        sent.into_iter().map(Pending::wait).collect()
    }

    /// Sends a request to each loop, and joins what `part` finds in their answers.
    fn collect<T>(
        &self,
        request: ServeRequest,
        part: impl Fn(ServeAnswer) -> Option<Vec<T>>,
    ) -> Result<Vec<T>, Refused> {
        let mut all = Vec::new();
        for answer in self.send_all(request) {
            all.extend(part(answer?).into_iter().flatten());
        }
        Ok(all)
    }

    /// Returns the statistics.
    ///
    /// # Errors
    /// ENODEV when the server has ended.
    pub fn stats(&self) -> Result<ServeStats, Refused> {
        self.stats_by_loop()
            .into_iter()
            .try_fold(ServeStats::default(), |mut sum, part| {
                sum.add(&part?);
                Ok(sum)
            })
    }

    /// Returns the statistics of each loop.
    pub(crate) fn stats_by_loop(&self) -> Vec<Result<ServeStats, Refused>> {
        let part = |answer| match answer {
            ServeAnswer::Stats(part) => *part,
            _ => ServeStats::default(),
        };
        let answers = self.send_all(ServeRequest::Stats {}).into_iter();
        answers.map(|answer| answer.map(part)).collect()
    }

    /// Returns sessions and paths of all loops.
    ///
    /// # Errors
    /// ENODEV when the server has ended.
    pub fn sessions(&self) -> Result<Vec<SessionListing>, Refused> {
        let mut all = self.collect(ServeRequest::Sessions, |answer| match answer {
            ServeAnswer::Sessions(part) => Some(part),
            _ => None,
        })?;
        all.sort_by_key(|session| session.session);
        Ok(all)
    }

    /// Returns the open devices of all sessions.
    ///
    /// # Errors
    /// ENODEV when the server has ended.
    pub fn devices(&self) -> Result<Vec<DeviceListing>, Refused> {
        let mut all = self.collect(ServeRequest::Devices, |answer| match answer {
            ServeAnswer::Devices(part) => Some(part),
            _ => None,
        })?;
        all.sort_by_key(|device| (device.session, device.id));
        Ok(all)
    }
}
