//! What is asked of a loop of a mapping while it runs.

use std::collections::BTreeMap;

use rnbd::{Errno, client::Unmap};
use roce_reactor::TurnCx;
use rtrs::{
    Error,
    addr::PathAddr,
    client::{PathCommand, PathCounters, PathId, PathStatus, SessionId},
    cx::Cx,
};

use super::{Letter, Phase, Service};
use crate::{
    control::{
        Refused, Reply,
        map::{MapAnswer, MapListing, MapRequest, MappedDevice},
    },
    map::MapFailure,
};

/// What is under way for those who steer. All of it is at home.
#[derive(Default)]
pub(super) struct Orders {
    /// Where paths lead, also such as are gone from the list but not out of everybody's mouth.
    addrs: BTreeMap<PathId, PathAddr>,
    paths: Vec<(PathId, PathCommand, Reply<MapAnswer>)>,
    remaps: Vec<Reply<MapAnswer>>,
    unmap: Option<Reply<MapAnswer>>,
    /// The device is closed at any price.
    pub(super) forced: bool,
    /// The last path was taken down because somebody wanted it: the mapping is there for another.
    pub(super) pathless: bool,
}

impl Orders {
    pub(super) fn opened(&mut self, paths: &[PathStatus]) {
        self.addrs = paths.iter().map(|path| (path.id, path.addr)).collect();
    }

    pub(super) fn addr(&self, path: PathId) -> Option<PathAddr> {
        self.addrs.get(&path).copied()
    }

    /// Whether somebody has asked for this path to be taken down, or it was only an attempt to add it.
    pub(super) fn wants_closed(&self, path: PathId) -> bool {
        let closes = |command: &PathCommand| *command != PathCommand::Reconnect;
        self.paths.iter().any(|(id, command, _)| *id == path && closes(command))
    }

    /// A command for a path has ended.
    pub(super) fn path_done(&mut self, path: PathId, command: PathCommand, result: Result<(), Error>) {
        if (command == PathCommand::Remove && result.is_ok()) || (command == PathCommand::Add && result.is_err()) {
            self.addrs.remove(&path);
        }
        let asked = self.paths.iter().position(|(id, c, _)| (*id, *c) == (path, command));
        let Some(asked) = asked else { return };
        let answer = match (command, result) {
            (_, Ok(())) => Ok(MapAnswer::Done),
            (_, Err(e @ (Error::Busy | Error::NoPath))) => Err(e.into()),
            // As `rtrs_clt_reconnect_from_sysfs` says it, whatever the reason.
            (PathCommand::Reconnect, Err(e)) => Err(Refused::new(Errno::ENOTCONN, e.to_string())),
            (_, Err(e)) => Err(e.into()),
        };
        self.paths.remove(asked).2.send(answer);
    }

    /// An attempt to open the device again has ended.
    pub(super) fn remapped(&mut self, result: &Result<(), Refused>) {
        for reply in self.remaps.drain(..) {
            reply.send(result.clone().map(|()| MapAnswer::Done));
        }
    }
}

/// The error number of an end that is no good one.
fn errno(failure: &MapFailure) -> Errno {
    match failure {
        MapFailure::Session(e) => Errno::from_wire(e.errno()),
        MapFailure::Map(e) => e.errno(),
        MapFailure::Lost(_) => Errno::ECONNABORTED,
        MapFailure::Flush(e) => *e,
        MapFailure::Close(e) => Errno::from_wire(e.errno()),
        MapFailure::Socket(_) | MapFailure::Loop(_) => Errno::EIO,
    }
}

impl Service {
    /// Complies with a request, or sees to it that it is answered later.
    pub(super) fn steer(&mut self, turn: &mut TurnCx<'_, ()>, request: MapRequest, reply: Reply<MapAnswer>) {
        let done = match request {
            MapRequest::AddPath(addr) => return self.add_path(turn, addr, reply),
            MapRequest::RemovePath(addr) => return self.path_command(turn, addr, PathCommand::Remove, reply),
            MapRequest::Disconnect(addr) => return self.path_command(turn, addr, PathCommand::Disconnect, reply),
            MapRequest::Reconnect(addr) => return self.path_command(turn, addr, PathCommand::Reconnect, reply),
            MapRequest::Remap => return self.remap(reply),
            MapRequest::Unmap { force } => return self.unmap_asked(turn, force, reply),
            MapRequest::List => return reply.send(self.listing().map(|l| MapAnswer::Listing(Box::new(l)))),
            MapRequest::Stats => return reply.send(Ok(MapAnswer::Stats(Box::new(self.stats(turn))))),
            MapRequest::ResetPathStats(addr, which) => self.reset_path_stats(addr, which),
            MapRequest::SetPolicy(policy) => self.there().and_then(|session| {
                let set = self.rtrs.set_policy(cx!(turn, self.dice), session, policy);
                set.map_err(Refused::from)
            }),
            MapRequest::SetReconnects { attempts, delay } => self.there().and_then(|session| {
                let set = self.rtrs.set_reconnects(cx!(turn, self.dice), session, attempts, delay);
                set.map_err(Refused::from)
            }),
            MapRequest::SetOnLoss(on_loss) => {
                let device = self.device.ok_or(Errno::ENODEV);
                let set = device.and_then(|device| self.rnbd.set_on_loss(device, on_loss));
                set.map_err(Refused::from)
            }
            MapRequest::Resize(sectors) => {
                let device = self.device.ok_or(Errno::ENOENT);
                let set = device.and_then(|device| self.rnbd.resize(device, sectors));
                set.map_err(Refused::from)
            }
        };
        reply.send(done.map(|()| MapAnswer::Done));
    }

    fn there(&self) -> Result<SessionId, Refused> {
        self.session.ok_or_else(|| Errno::ENODEV.into())
    }

    fn path_at(&self, addr: PathAddr) -> Result<(SessionId, PathId), Refused> {
        let session = self.there()?;
        let mut all = self.rtrs.paths(session);
        all.retain(|path| path.addr.dst.ip() == addr.dst.ip() && addr.src.is_none_or(|src| path.addr.src == Some(src)));
        // As a path is listed, and the kernel names it, it has no port.
        if all.iter().any(|path| path.addr.dst == addr.dst) {
            all.retain(|path| path.addr.dst == addr.dst);
        }
        let mut found = all.iter();
        match (found.next(), found.next()) {
            (Some(path), None) => Ok((session, path.id)),
            (None, _) => Err(Error::NoPath.into()),
            (Some(_), Some(_)) => {
                let text = format!("several paths lead to {}: say which by our address, too", addr.dst);
                Err(Refused::new(Errno::EINVAL, text))
            }
        }
    }

    fn add_path(&mut self, turn: &mut TurnCx<'_, ()>, addr: PathAddr, reply: Reply<MapAnswer>) {
        let added = self.there().and_then(|session| {
            let added = self.rtrs.add_path(cx!(turn, self.dice), session, addr);
            added.map_err(Refused::from)
        });
        match added {
            Ok(path) => {
                self.orders.addrs.insert(path, addr);
                self.orders.paths.push((path, PathCommand::Add, reply));
            }
            Err(refused) => reply.send(Err(refused)),
        }
    }

    fn path_command(
        &mut self,
        turn: &mut TurnCx<'_, ()>,
        addr: PathAddr,
        command: PathCommand,
        reply: Reply<MapAnswer>,
    ) {
        let taken = self.path_at(addr).and_then(|(session, path)| {
            let taken = self.rtrs.path_command(cx!(turn, self.dice), session, path, command);
            taken.map(|()| path).map_err(Refused::from)
        });
        match taken {
            Ok(path) => self.orders.paths.push((path, command, reply)),
            Err(refused) => reply.send(Err(refused)),
        }
    }

    fn reset_path_stats(&mut self, addr: PathAddr, which: PathCounters) -> Result<(), Refused> {
        let (session, path) = self.path_at(addr)?;
        Ok(self.rtrs.reset_path_stats(session, path, which)?)
    }

    fn remap(&mut self, reply: Reply<MapAnswer>) {
        let device = self.device.ok_or(Errno::EBUSY);
        match device.and_then(|device| self.rnbd.remap(device)) {
            Ok(()) => self.orders.remaps.push(reply),
            Err(e) => reply.send(Err(e.into())),
        }
    }

    fn unmap_asked(&mut self, turn: &mut TurnCx<'_, ()>, force: bool, reply: Reply<MapAnswer>) {
        let refused = match self.phase {
            Phase::Opening | Phase::Mapping => Some(Errno::EBUSY),
            Phase::Serving if !force && self.entrance.is_in_use() => Some(Errno::EBUSY),
            Phase::Serving => None,
            _ => Some(Errno::EALREADY),
        };
        if let Some(errno) = refused {
            return reply.send(Err(errno.into()));
        }
        self.orders.unmap = Some(reply);
        self.orders.forced = force;
        self.drain(turn);
        if force {
            self.count();
            self.phase = Phase::Unmapping;
            let unmapped = self.device.map(|device| self.rnbd.unmap(device, Unmap::Force));
            if !matches!(unmapped, Some(Ok(()))) {
                self.close_session(turn);
            }
        }
    }

    /// The device is closed, or all is over.
    pub(super) fn unmapped(&mut self) {
        if let Some(reply) = self.orders.unmap.take() {
            reply.send(match &self.failure {
                None => Ok(MapAnswer::Done),
                Some(failure) => Err(Refused::new(errno(failure), failure.to_string())),
            });
        }
    }

    /// What this loop has of it all.
    fn listing(&self) -> Result<MapListing, Refused> {
        let session = self.there();
        let session = match self.place.is_home() {
            true => Some(session?),
            // It may not have heard of it yet.
            false => session.ok(),
        };
        let reconnects = session.and_then(|session| self.rtrs.reconnects(session));
        let config = &self.config.session;
        let (max_reconnects, reconnect_delay) = reconnects.unwrap_or((config.max_reconnects, config.reconnect_delay));
        let device = self.device;
        let counters = device.and_then(|device| self.rnbd.counters(device)).or(self.counted);
        Ok(MapListing {
            session: config.name.clone(),
            info: self.info,
            policy: session.and_then(|s| self.rtrs.policy(s)).unwrap_or(config.policy),
            max_reconnects,
            reconnect_delay,
            paths: session.map_or_else(Vec::new, |session| self.rtrs.paths(session)),
            device: MappedDevice {
                name: self.config.device.clone(),
                mode: self.config.mode,
                state: device.and_then(|device| self.rnbd.state(device)),
                geometry: self.geometry,
                on_loss: device
                    .and_then(|device| self.rnbd.on_loss(device))
                    .unwrap_or(self.config.on_loss),
                counters: counters.unwrap_or_default(),
                waiting: device.map_or(0, |device| self.rnbd.waiting(device)),
                clients: self.clients.len(),
            },
        })
    }

    /// Other loops are told to take no more requests.
    pub(super) fn drain_others(&mut self) {
        if self.place.is_home() {
            self.undrained = self.place.loops.len() - 1;
            (1..=self.undrained).for_each(|other| self.place.tell(other, Letter::Drain));
        }
    }
}
