//! The devices of a mapping, from their opening to their end.

use rnbd::{
    Errno,
    block::{BlockRequest, Geometry},
    client::{
        OnLoss, Unmap,
        error::MapError,
        output::{DeviceKey, LossCause, Output},
        state::DeviceState,
    },
};
use roce::reactor::TurnCx;
use rtrs::{IoError, client::SessionId};
use smallvec::SmallVec;

use super::{Phase, Service};
use crate::{
    control::{MapAnswer, MapDevice, Refused, Reply},
    front::Part,
    map::types::{MapEvent, MapFailure, MapNews},
};

/// How far a device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// The server is asked to open it.
    Opening,
    /// NBD clients can choose it.
    Open,
    /// Nobody can choose it any more, and its clients are released.
    Leaving,
    /// It is flushed.
    Flushing,
    /// It is being closed.
    Closing,
}

/// A device.
pub(super) struct Device {
    pub(super) what: MapDevice,
    pub(super) key: DeviceKey,
    pub(super) stage: Stage,
    /// `None` until it is open.
    pub(super) geometry: Option<Geometry>,
    /// NBD clients and front ends that use it.
    pub(super) users: usize,
    /// It is closed at any price.
    forced: bool,
    /// Reply to the request for it while the mapping runs.
    mapping: Option<Reply<MapAnswer>>,
    /// Reply to the request for its end.
    pub(super) unmapping: Option<Reply<MapAnswer>>,
    /// Why its end is no good one.
    failure: Option<MapFailure>,
}

impl Device {
    fn new(what: MapDevice, key: DeviceKey, stage: Stage, geometry: Option<Geometry>) -> Self {
        Self {
            what,
            key,
            stage,
            geometry,
            users: 0,
            forced: false,
            mapping: None,
            unmapping: None,
            failure: None,
        }
    }

    fn name(&self) -> String {
        self.what.name.clone()
    }
}

/// Answer to a request that ended with this failure.
pub(super) fn refused(failure: &MapFailure) -> Refused {
    Refused::new(failure.errno(), failure.to_string())
}

/// Finding them.
impl Service {
    pub(super) fn device(&mut self, key: DeviceKey) -> Option<&mut Device> {
        self.devices.iter_mut().find(|device| device.key == key)
    }

    pub(super) fn name_of(&self, key: DeviceKey) -> Option<String> {
        self.devices.iter().find(|d| d.key == key).map(Device::name)
    }
}

/// Outputs of RNBD.
impl Service {
    pub(super) fn device_told(&mut self, turn: &mut TurnCx<'_, ()>, output: Output<Part>) {
        match output {
            Output::Mapped(key, geometry) => self.device_is_there(turn, key, geometry),
            Output::MapFailed(key, error) if self.rnbd.state(key).is_some() => {
                let refused = Refused::new(error.errno(), error.to_string());
                self.pending.remapped(key, &Err(refused));
                if let Some(device) = self.name_of(key) {
                    self.tell(MapNews::NotRemapped { device, error });
                }
            }
            Output::MapFailed(key, error) => self.device_refused(turn, key, error),
            Output::WritesLost { device, writes, cause } => self.writes_lost(device, writes, cause),
            Output::Geometry(key, geometry) => self.device_changed(key, geometry),
            Output::State(key, DeviceState::Mapped) => {
                self.pending.remapped(key, &Ok(()));
                if let Some(device) = self.name_of(key) {
                    self.tell(MapNews::Remapped { device });
                }
            }
            Output::State(..) => {}
            Output::Unmapped(key, result) => self.device_unmapped(turn, key, result),
            // The session's and its requests'.
            _ => {}
        }
    }

    /// A device is open: clients are accepted when all those are that it begins with.
    fn device_is_there(&mut self, turn: &mut TurnCx<'_, ()>, key: DeviceKey, geometry: Geometry) {
        let Some(device) = self.device(key).filter(|d| d.stage == Stage::Opening) else {
            return;
        };
        (device.stage, device.geometry) = (Stage::Open, Some(geometry));
        let mapping = device.mapping.take();
        match self.phase {
            Phase::Mapping if self.devices.iter().all(|d| d.stage == Stage::Open) => self.all_mapped(turn),
            Phase::Serving => {
                self.offer(key);
                self.tell_mapped(key);
            }
            _ => {}
        }
        if let Some(reply) = mapping {
            reply.send(Ok(MapAnswer::Done));
        }
    }

    pub(super) fn tell_mapped(&self, key: DeviceKey) {
        let device = self.devices.iter().find(|device| device.key == key);
        if let (Some(info), Some(device)) = (self.info, device)
            && let Some(geometry) = device.geometry
        {
            let device = device.what.clone();
            self.tell.send(MapEvent::Mapped { device, geometry, info });
        }
    }

    /// One that had not been open could not be opened, and is gone.
    fn device_refused(&mut self, turn: &mut TurnCx<'_, ()>, key: DeviceKey, error: MapError) {
        let Some(at) = self.devices.iter().position(|device| device.key == key) else {
            return;
        };
        let device = self.devices.remove(at);
        if let Some(reply) = device.mapping {
            reply.send(Err(Refused::new(error.errno(), error.to_string())));
            return self.look_deviceless(turn);
        }
        let name = device.what.name;
        self.failure.get_or_insert(MapFailure::Map { device: name, error });
        self.close_session(turn);
    }

    fn writes_lost(&mut self, key: DeviceKey, writes: u64, cause: LossCause) {
        let Some(device) = self.name_of(key) else { return };
        tracing::error!(
            device,
            writes,
            "acknowledged writes may be lost, the next flush of each client fails: {cause}"
        );
        self.tell(MapNews::WritesLost { device, writes, cause });
    }

    fn device_changed(&mut self, key: DeviceKey, geometry: Geometry) {
        let Some(device) = self.device(key) else { return };
        device.geometry = Some(geometry);
        let device = device.name();
        self.tell(MapNews::Changed { device, geometry });
        self.fronts.set_geometry(key, geometry);
        for (_, client) in &mut self.clients {
            client.set_geometry(key, geometry);
        }
    }
}

/// Their beginning and their end.
impl Service {
    /// Asks the server for a device.
    pub(super) fn map_device(&mut self, session: SessionId, what: MapDevice, reply: Option<Reply<MapAnswer>>) {
        let key = self.rnbd.map(session, &what.name, what.mode);
        if let Err(e) = self.rnbd.set_on_loss(key, self.on_loss) {
            // It is told why it could not be mapped.
            tracing::debug!("on loss: {e}");
        }
        let device = Device::new(what, key, Stage::Opening, None);
        self.devices.push(Device {
            mapping: reply,
            ..device
        });
    }

    /// Closes an open device on request.
    pub(super) fn unmap_device(
        &mut self,
        turn: &mut TurnCx<'_, ()>,
        key: DeviceKey,
        force: bool,
        reply: Reply<MapAnswer>,
    ) {
        let Some(device) = self.device(key) else { return };
        (device.stage, device.forced, device.unmapping) = (Stage::Leaving, force, Some(reply));
        // Nobody waits for a lost device then.
        if let Err(e) = self.rnbd.set_on_loss(key, OnLoss::Error) {
            tracing::debug!("on loss: {e}");
        }
        self.withdraw(turn.now, key);
        if force {
            self.close_device(turn, key);
        }
        self.look_left(turn);
    }

    /// Goes on with devices that nobody uses any more.
    pub(super) fn look_left(&mut self, turn: &mut TurnCx<'_, ()>) {
        let leaving = self.devices.iter().filter(|d| d.stage == Stage::Leaving);
        let keys: SmallVec<[DeviceKey; 4]> = leaving.map(|d| d.key).collect();
        for key in keys {
            if !self.fronts.uses(key) && !self.clients.iter().any(|(_, client)| client.device() == Some(key)) {
                self.end_device(turn, key);
            }
        }
    }

    /// Nobody uses a device any more: what was written is made durable, and it is closed.
    pub(super) fn end_device(&mut self, turn: &mut TurnCx<'_, ()>, key: DeviceKey) {
        // What went wrong with another device is no reason.
        let own = |why: &MapFailure| matches!(why, MapFailure::Flush { .. } | MapFailure::Close { .. });
        let hopeless = self.failure.as_ref().is_some_and(|why| !own(why));
        let Some(device) = self.device(key) else { return };
        if matches!(device.stage, Stage::Flushing | Stage::Closing) {
            return;
        }
        let writable = device.geometry.is_some_and(|g| !g.read_only);
        if hopeless || device.forced || !writable {
            return self.close_device(turn, key);
        }
        device.stage = Stage::Flushing;
        let opener = self.rnbd.opener(key);
        let flush = BlockRequest::flush(Part::Flush(key));
        self.rnbd.submit(&opener, flush);
    }

    pub(super) fn flushed(&mut self, turn: &mut TurnCx<'_, ()>, key: DeviceKey, result: Result<(), Errno>) {
        if let (Err(errno), Some(device)) = (result, self.device(key)) {
            let name = device.name();
            device.failure.get_or_insert(MapFailure::Flush { device: name, errno });
        }
        self.close_device(turn, key);
    }

    fn close_device(&mut self, turn: &mut TurnCx<'_, ()>, key: DeviceKey) {
        let Some(device) = self.device(key) else { return };
        device.stage = Stage::Closing;
        let how = match device.forced {
            true => Unmap::Force,
            false => Unmap::Normal { in_use: false },
        };
        if let Some(reply) = device.mapping.take() {
            reply.send(Err(Errno::ESHUTDOWN.into()));
        }
        if let Err(e) = self.rnbd.unmap(key, how) {
            tracing::debug!("unmap: {e}");
            self.device_unmapped(turn, key, Ok(()));
        }
    }

    /// A device is closed, and gone.
    fn device_unmapped(&mut self, turn: &mut TurnCx<'_, ()>, key: DeviceKey, result: Result<(), IoError>) {
        let Some(at) = self.devices.iter().position(|device| device.key == key) else {
            return;
        };
        let mut device = self.devices.remove(at);
        let name = device.name();
        // With the session the server closes whatever is open.
        let over = !self.session_is_up() || matches!(self.phase, Phase::Closing | Phase::Ended);
        if let (Err(error), false) = (result, over || device.forced) {
            let device_of = name.clone();
            device.failure.get_or_insert(MapFailure::Close {
                device: device_of,
                error,
            });
        }
        if let Some(reply) = device.unmapping.take() {
            let why = device.failure.as_ref().or(self.failure.as_ref());
            let outcome = why.map_or(Ok(()), |why| Err(refused(why)));
            reply.send(outcome.clone().map(|()| MapAnswer::Done));
            let why = outcome.err().map(|refused| refused.text);
            self.tell(MapNews::Unmapped { device: name, why });
        }
        if let Some(failure) = device.failure {
            tracing::warn!("{failure}");
            // While others go on, it concerns only who has asked for it; else it is how the mapping ends.
            if self.devices.is_empty() || self.phase != Phase::Serving {
                self.failure.get_or_insert(failure);
            }
        }
        self.look_deviceless(turn);
    }

    /// A mapping without devices ends.
    fn look_deviceless(&mut self, turn: &mut TurnCx<'_, ()>) {
        if self.devices.is_empty() {
            match self.phase {
                Phase::Serving => self.drain(turn),
                Phase::Unmapping => self.close_session(turn),
                _ => {}
            }
        }
    }
}
