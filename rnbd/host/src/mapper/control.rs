//! Requests to a mapping while it runs.

use std::{collections::BTreeMap, time::Duration};

use rnbd::{
    Errno,
    client::{OnLoss, output::DeviceKey, state::DeviceState},
};
use roce::reactor::TurnCx;
use rtrs::{
    Error,
    addr::PathAddr,
    client::{PathCommand, PathCounters, PathId, PathStatus, SessionConfig, SessionId},
    proto::DEFAULT_PORT,
};

use super::{
    Phase, Service,
    devices::{Device, Stage, refused},
};
use crate::control::{
    MapAnswer, MapDevice, MapListing, MapRequest, MappedDevice, MappedPath, Refused, Reply, signed_attempts,
};

/// Pending commands.
#[derive(Default)]
pub(super) struct PendingCommands {
    /// Addresses of paths, those included that are removed but still referenced by queued events.
    addrs: BTreeMap<PathId, PathAddr>,
    paths: Vec<(PathId, PathCommand, Reply<MapAnswer>)>,
    remaps: Vec<(DeviceKey, Reply<MapAnswer>)>,
    /// The last path was taken down because somebody wanted it: the mapping is there for another.
    pub(super) pathless: bool,
}

impl PendingCommands {
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

    /// An attempt to open a device again has ended.
    pub(super) fn remapped(&mut self, device: DeviceKey, result: &Result<(), Refused>) {
        for (_, reply) in self.remaps.extract_if(.., |(key, _)| *key == device) {
            reply.send(result.clone().map(|()| MapAnswer::Done));
        }
    }
}

fn not_mapped(name: &str) -> Refused {
    Refused::new(Errno::ENOENT, format!("device {name:?} is not mapped"))
}

impl Service {
    /// Complies with a request, or sees to it that it is answered later.
    pub(super) fn control(&mut self, turn: &mut TurnCx<'_, ()>, request: MapRequest, reply: Reply<MapAnswer>) {
        let done = match request {
            MapRequest::AddPath { path } => return self.add_path(turn, path, reply),
            MapRequest::RemovePath { path } => return self.path_command(turn, path, PathCommand::Remove, reply),
            MapRequest::Disconnect { path } => return self.path_command(turn, path, PathCommand::Disconnect, reply),
            MapRequest::Reconnect { path } => return self.path_command(turn, path, PathCommand::Reconnect, reply),
            MapRequest::Map(device) => return self.map_asked(device, reply),
            MapRequest::Remap { device } => return self.remap(&device, reply),
            MapRequest::Unmap { device, force } => return self.unmap_asked(turn, &device, force, reply),
            MapRequest::List {} => return reply.send(self.listing().map(|l| MapAnswer::Listing(Box::new(l)))),
            MapRequest::Stats {} => return reply.send(Ok(MapAnswer::Stats(Box::new(self.stats(turn))))),
            MapRequest::ResetPathStats { path, which } => self.reset_path_stats(path, which),
            MapRequest::SetPolicy { policy } => self.there().and_then(|session| {
                let set = self.rnbd.rtrs_mut().set_policy(&mut self.rng.cx(turn), session, policy);
                set.map_err(Refused::from)
            }),
            MapRequest::SetReconnects { attempts, delay } => self.set_reconnects(turn, attempts, delay),
            MapRequest::SetOnLoss { on_loss } => self.set_on_loss(on_loss).map_err(Refused::from),
            MapRequest::Resize { device, sectors } => self.key_of(&device).and_then(|device| {
                let set = self.rnbd.resize(device, sectors);
                set.map_err(Refused::from)
            }),
        };
        reply.send(done.map(|()| MapAnswer::Done));
    }

    fn there(&self) -> Result<SessionId, Refused> {
        self.session.ok_or_else(|| Errno::ENODEV.into())
    }

    /// The reconnect settings, before the session is open those that it is opened with.
    fn reconnects(&self) -> (u32, Duration) {
        let config = &self.config.session;
        let set = self.session.and_then(|session| self.rnbd.rtrs().reconnects(session));
        set.unwrap_or((config.max_reconnects, config.reconnect_delay))
    }

    fn set_reconnects(
        &mut self,
        turn: &mut TurnCx<'_, ()>,
        attempts: Option<i64>,
        delay: Option<Duration>,
    ) -> Result<(), Refused> {
        let session = self.there()?;
        let (old_attempts, old_delay) = self.reconnects();
        let attempts = match attempts {
            None => old_attempts,
            Some(-1) => SessionConfig::FOREVER,
            // Too many for it are refused by the session.
            Some(attempts) => u32::try_from(attempts).map_err(|_| Errno::EINVAL)?,
        };
        let delay = delay.unwrap_or(old_delay);
        Ok(self
            .rnbd
            .rtrs_mut()
            .set_reconnects(&mut self.rng.cx(turn), session, attempts, delay)?)
    }

    fn path_at(&self, addr: PathAddr) -> Result<(SessionId, PathId), Refused> {
        let session = self.there()?;
        let mut all = self.rnbd.rtrs().paths(session);
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
                let text = format!("several paths lead to {}: name one with our address, too", addr.dst);
                Err(Refused::new(Errno::EINVAL, text))
            }
        }
    }

    fn add_path(&mut self, turn: &mut TurnCx<'_, ()>, addr: PathAddr, reply: Reply<MapAnswer>) {
        let added = self.there().and_then(|session| {
            let added = self.rnbd.rtrs_mut().add_path(&mut self.rng.cx(turn), session, addr);
            added.map_err(Refused::from)
        });
        match added {
            Ok(path) => {
                self.pending.addrs.insert(path, addr);
                self.pending.paths.push((path, PathCommand::Add, reply));
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
            let taken = self
                .rnbd
                .rtrs_mut()
                .path_command(&mut self.rng.cx(turn), session, path, command);
            taken.map(|()| path).map_err(Refused::from)
        });
        match taken {
            Ok(path) => self.pending.paths.push((path, command, reply)),
            Err(refused) => reply.send(Err(refused)),
        }
    }

    fn reset_path_stats(&mut self, addr: PathAddr, which: PathCounters) -> Result<(), Refused> {
        let (session, path) = self.path_at(addr)?;
        Ok(self.rnbd.rtrs_mut().reset_path_stats(session, path, which)?)
    }

    fn key_of(&self, name: &str) -> Result<DeviceKey, Refused> {
        let device = self.devices.iter().find(|device| device.what.name == name);
        device.map(|device| device.key).ok_or_else(|| not_mapped(name))
    }

    /// It has not come so far that its devices can be told to come or go, or is past that.
    fn not_serving(&self) -> Option<Errno> {
        match self.phase {
            Phase::Opening | Phase::Mapping => Some(Errno::EBUSY),
            Phase::Serving => None,
            _ => Some(Errno::EALREADY),
        }
    }

    /// For the devices that there are, but for those that are being unmapped, and those that come.
    fn set_on_loss(&mut self, on_loss: OnLoss) -> Result<(), Errno> {
        if !matches!(self.phase, Phase::Mapping | Phase::Serving) {
            return Err(Errno::ENODEV);
        }
        self.on_loss = on_loss;
        let staying = |device: &&Device| matches!(device.stage, Stage::Opening | Stage::Open);
        for device in self.devices.iter().filter(staying) {
            self.rnbd.set_on_loss(device.key, on_loss)?;
        }
        Ok(())
    }

    fn map_asked(&mut self, what: MapDevice, reply: Reply<MapAnswer>) {
        let session = match self.not_serving() {
            Some(Errno::EALREADY) => Err(Errno::ESHUTDOWN.into()),
            Some(errno) => Err(errno.into()),
            None if self.key_of(&what.name).is_ok() => {
                let text = format!("device {:?} is mapped already", what.name);
                Err(Refused::new(Errno::EEXIST, text))
            }
            None => self.there(),
        };
        match session {
            Ok(session) => self.map_device(session, what, Some(reply)),
            Err(refused) => reply.send(Err(refused)),
        }
    }

    fn remap(&mut self, name: &str, reply: Reply<MapAnswer>) {
        let device = match self.phase {
            Phase::Opening => Err(Errno::EBUSY.into()),
            _ => self.key_of(name),
        };
        let asked = device.and_then(|device| {
            let asked = self.rnbd.remap(device);
            asked.map(|()| device).map_err(Refused::from)
        });
        match asked {
            Ok(device) => self.pending.remaps.push((device, reply)),
            Err(refused) => reply.send(Err(refused)),
        }
    }

    fn unmap_asked(&mut self, turn: &mut TurnCx<'_, ()>, name: &str, force: bool, reply: Reply<MapAnswer>) {
        if let Some(errno) = self.not_serving() {
            return reply.send(Err(errno.into()));
        }
        let device = self.devices.iter().find(|device| device.what.name == name);
        let key = device
            .ok_or_else(|| not_mapped(name))
            .and_then(|device| match device.stage {
                Stage::Opening => Err(Errno::EBUSY.into()),
                Stage::Open if device.users > 0 && !force => Err(Errno::EBUSY.into()),
                Stage::Open => Ok(device.key),
                Stage::Leaving | Stage::Flushing | Stage::Closing => Err(Errno::EALREADY.into()),
            });
        match key {
            Ok(key) => self.unmap_device(turn, key, force, reply),
            Err(refused) => reply.send(Err(refused)),
        }
    }

    /// All is over: whoever waits for the end of a device is told.
    pub(super) fn answer_unmapping(&mut self) {
        for device in &mut self.devices {
            if let Some(reply) = device.unmapping.take() {
                let failed = self.failure.as_ref().map(refused);
                reply.send(failed.map_or(Ok(MapAnswer::Done), Err));
            }
        }
    }

    /// Returns the listing.
    fn listing(&self) -> Result<MapListing, Refused> {
        let session = self.there()?;
        let config = &self.config.session;
        let (max_reconnects, reconnect_delay) = self.reconnects();
        let paths = self.rnbd.rtrs().paths(session).into_iter();
        Ok(MapListing {
            session: config.name.clone(),
            port: config.paths.first().map_or(DEFAULT_PORT, |path| path.dst.port()),
            queue_depth: self.info.map(|info| info.queue_depth),
            max_io_bytes: self.info.map(|info| info.max_io_size),
            new_rkeys: self.info.map(|info| info.new_rkeys),
            policy: self.rnbd.rtrs().policy(session).unwrap_or(config.policy),
            max_reconnects: signed_attempts(max_reconnects),
            reconnect_delay,
            paths: paths.map(MappedPath::from).collect(),
            devices: self.devices_listed(),
        })
    }

    fn devices_listed(&self) -> Vec<MappedDevice> {
        if self.phase == Phase::Opening {
            let device = |what: &MapDevice| MappedDevice::new(what.clone(), self.on_loss);
            return self.config.devices.iter().map(device).collect();
        }
        let listed = self.devices.iter().map(|device| MappedDevice {
            state: self.rnbd.state(device.key).unwrap_or(DeviceState::Init),
            bytes: device.geometry.map(|g| g.size),
            block_size: device.geometry.map(|g| g.logical_block_size),
            read_only: device.geometry.map(|g| g.read_only),
            on_loss: self.rnbd.on_loss(device.key).unwrap_or(self.on_loss),
            counters: self.rnbd.counters(device.key).unwrap_or_default(),
            waiting: self.rnbd.waiting(device.key),
            clients: self
                .clients
                .iter()
                .filter(|(_, client)| client.device() == Some(device.key))
                .count(),
            ..MappedDevice::new(device.what.clone(), self.on_loss)
        });
        listed.collect()
    }
}
