//! Recovery of lost devices: loss policies, timers, devices that the server has closed, and buffers reserved for answers.
//!
//! # Devices that the server has closed although the session is up
//!
//! A kernel's server closes all devices of a session when the session's last path closes there. If another path is up when the client
//! sees the loss, the session was never down here, and requests are answered with ENOTCONN: their devices are not open. The same
//! follows when an administrator closes one device there, which can't be told apart. A server that names its
//! [instance](crate::proto::instance) keeps the session's devices while a path is being connected: there the administrator's
//! command counts, and requests fail.
//!
//! The former device numbers may be given to other devices (`xa_alloc` takes the lowest that is free), so a request in flight could
//! reach another device. Hence no device of the session is opened before all requests have been answered, and all of its devices are
//! opened again.

use roce_verbs::Instant;
use rtrs::{
    Cx,
    client::{
        buffers::{Buffer, MIN_BYTES},
        config::SessionInfo,
        request::SessionId,
    },
};

use super::{
    client::{Client, EventData},
    device::Device,
    loss_policy::{OnLoss, RETRY, Timer},
    memory,
    output::Output,
    session::Session,
    state::{DeviceEvent, DeviceKey, DeviceState},
    transport::Transport,
};
use crate::{block::Geometry, errno::Errno, proto::SECTOR};

/// Sizes and limits.
impl<F, T: Transport<F>> Client<F, T> {
    /// Sets the size of a mapped device, as the kernel's `resize` does: the server is not asked, and has the last word about what is
    /// done there. Ends with [`Output::Geometry`], and holds until the device is opened again.
    ///
    /// # Errors
    /// ENOENT unless the device is mapped; EINVAL when there are not so many bytes.
    pub fn resize(&mut self, key: DeviceKey, sectors: u64) -> Result<(), Errno> {
        let device = self.devices.get_mut(key.0);
        let device = device.filter(|d| d.state == DeviceState::Mapped).ok_or(Errno::ENOENT)?;
        let size = sectors.checked_mul(SECTOR).ok_or(Errno::EINVAL)?;
        let geometry = device.resize(size);
        self.changed(key, geometry);
        Ok(())
    }

    fn changed(&mut self, key: DeviceKey, geometry: Option<Geometry>) {
        self.outputs.extend(geometry.map(|g| Output::Geometry(key, g)));
    }

    /// A session can do more or less than it could, while it is up: its devices' limits follow.
    pub fn session_changed(&mut self, id: SessionId, info: SessionInfo) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.info = info;
        for key in self.devices_of(id, |d| d.state != DeviceState::Unmapped) {
            let geometry = self.devices.get_mut(key.0).and_then(|d| d.limit(&info));
            self.changed(key, geometry);
        }
    }

    /// RTRS says that a session can move no more than this at a time.
    pub(super) fn shrink(&mut self, id: SessionId, max: usize) {
        let info = self.sessions.get(&id).map(|s| s.info);
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        if let Some(info) = info.filter(|info| max > 0 && max < info.max_io_size) {
            self.session_changed(
                id,
                SessionInfo {
                    max_io_size: max,
                    ..info
                },
            );
        }
    }
}

/// Lost devices.
impl<F, T: Transport<F>> Client<F, T> {
    /// Sets the loss policy of a device, [`OnLoss::Error`] by default.
    ///
    /// # Errors
    /// ENODEV when there is no such device.
    pub fn set_on_loss(&mut self, key: DeviceKey, on_loss: OnLoss) -> Result<(), Errno> {
        let device = self.devices.get_mut(key.0).ok_or(Errno::ENODEV)?;
        if device.loss_policy.on_loss() == on_loss {
            return Ok(());
        }
        device
            .loss_policy
            .set(on_loss, device.state == DeviceState::MappedDisconnected);
        self.needs_upkeep = true;
        if on_loss == OnLoss::Error {
            device.again = Timer::Off;
            self.operations.fail_held(key, Errno::ECONNABORTED);
            self.finish();
        } else if device.state == DeviceState::MappedDisconnected && device.message.is_none() {
            self.try_later(key);
        }
        Ok(())
    }

    /// Returns the loss policy of a device; `None` when it is gone.
    pub fn on_loss(&self, key: DeviceKey) -> Option<OnLoss> {
        self.devices.get(key.0).map(|d| d.loss_policy.on_loss())
    }

    /// Operations that wait for this device, or will, when it is lost.
    pub fn waiting(&self, key: DeviceKey) -> usize {
        self.operations.waiting(key)
    }

    /// The server has refused to open it again: that may be different in a while, if the server has just started, or has still to do
    /// with the session that was lost.
    pub(super) fn try_later(&mut self, key: DeviceKey) {
        let device = self.devices.get_mut(key.0).filter(|d| d.waits());
        if let Some(device) = device {
            device.again = Timer::Set(RETRY);
            self.needs_upkeep = true;
        }
    }

    /// When [`timeout`](Self::timeout) wants to be called.
    pub fn next_timeout(&self) -> Option<Instant> {
        let devices = self.devices.iter().map(|(_, d)| [d.loss_policy.end(), d.again.at()]);
        let drains = self.sessions.values().map(|s| s.drain.at());
        let others = drains.chain([self.operations.next_timeout()]);
        devices.flatten().chain(others).flatten().min()
    }

    /// Looks whether a time has come.
    pub fn timeout(&mut self, now: Instant) {
        for key in self.all_devices(|d| d.loss_policy.end().is_some_and(|at| at <= now)) {
            if self.devices.get_mut(key.0).is_some_and(|d| d.loss_policy.ends(now)) {
                tracing::warn!(device = self.name(key), "the device has been lost for too long");
                self.operations.fail_held(key, Errno::ECONNABORTED);
            }
        }
        self.finish();
        self.check_drains(now);
        for key in self.all_devices(|d| d.again.at().is_some_and(|at| at <= now)) {
            self.open_again(key, now);
        }
        if self.operations.retry.is_due(now) {
            for key in self.all_devices(|d| d.state == DeviceState::Mapped) {
                self.operations.resume(key);
            }
            if self.operations.holds() {
                self.operations.retry = Timer::At(now + RETRY);
            }
        }
    }

    fn open_again(&mut self, key: DeviceKey, now: Instant) {
        let Some(device) = self.devices.get_mut(key.0) else {
            return;
        };
        if !device.again.is_due(now) {
            return;
        }
        let idle = device.state == DeviceState::MappedDisconnected && device.message.is_none();
        let session = device.session;
        let up = self.sessions.get(&session).is_some_and(|s| s.down.is_none());
        if idle
            && up
            && let Some(device) = self.devices.get_mut(key.0)
        {
            device.unasked = true;
            self.open_when_ready(session, key, DeviceEvent::RemapAsked);
        }
    }

    fn all_devices(&self, which: impl Fn(&Device) -> bool) -> Vec<DeviceKey> {
        let all = self.devices.iter().filter(|(_, d)| which(d));
        all.map(|(key, _)| DeviceKey(key)).collect()
    }
}

/// Buffers for answers.
impl<F, T: Transport<F>> Client<F, T> {
    /// Starts the timers that were set, and looks after the reserves.
    pub(super) fn upkeep(&mut self, cx: &mut Cx<'_>) {
        self.needs_upkeep = false;
        self.operations.retry.start(cx.now);
        let keys = self.all_devices(|_| true);
        for key in keys {
            if let Some(device) = self.devices.get_mut(key.0) {
                device.loss_policy.timer().start(cx.now);
                device.again.start(cx.now);
            }
        }
        for session in self.sessions.values_mut() {
            session.drain.start(cx.now);
        }
        let sessions: Vec<SessionId> = self.sessions.keys().copied().collect();
        for id in sessions {
            if !self.keeps_reserve(id) {
                self.drop_reserve(id);
            } else if self.sessions.get(&id).is_some_and(Session::lacks_reserve) {
                let taken = memory::for_answer(cx, &mut self.rtrs, id, MIN_BYTES, MIN_BYTES);
                let session = self.sessions.get_mut(&id);
                match (session, taken) {
                    (Some(session), Ok(Some(buffer))) => session.reserve = Some(buffer),
                    // One may come back.
                    (_, Ok(None)) => self.needs_upkeep = true,
                    _ => {}
                }
            }
        }
    }

    /// Whether operations of a session's devices may come to have all buffers.
    fn keeps_reserve(&self, id: SessionId) -> bool {
        let waits = |d: &Device| d.session == id && d.loss_policy.on_loss() != OnLoss::Error;
        self.devices.iter().any(|(_, d)| waits(d))
    }

    /// A buffer that an answer came in is not needed any more.
    pub(super) fn give_answer_buffer(&mut self, id: SessionId, buffer: Buffer) {
        let keeps = self.keeps_reserve(id);
        match self.sessions.get_mut(&id).filter(|s| keeps && s.reserve.is_none()) {
            Some(session) => session.reserve = Some(buffer),
            None => memory::give(&mut self.rtrs, id, buffer),
        }
    }

    pub(super) fn drop_reserve(&mut self, id: SessionId) {
        let reserve = self.sessions.get_mut(&id).and_then(|s| s.reserve.take());
        if let Some(buffer) = reserve {
            memory::give(&mut self.rtrs, id, buffer);
        }
    }
}

/// Devices that the server has closed.
impl<F, T: Transport<F>> Client<F, T> {
    /// Handles the answer to a request that its device is not open, of a session that is up: stops sending requests to the session's
    /// devices.
    pub(super) fn session_stale(&mut self, id: SessionId) {
        let session = self.sessions.get_mut(&id).filter(|s| s.down.is_none());
        let Some(session) = session.filter(|s| s.drain == Timer::Off) else {
            return;
        };
        tracing::warn!(session = id.0, "the server has closed devices: they are opened again");
        session.drain = Timer::Set(RETRY);
        session.version = None;
        self.needs_upkeep = true;
        // A message that is under way has been sent to the server as it is now, or is a close.
        for key in self.devices_of(id, |d| d.id.is_some() && d.message.is_none()) {
            if let Some(device) = self.devices.get_mut(key.0) {
                device.id = None;
            }
            self.step(key, DeviceEvent::LinkDown, EventData::Nothing);
        }
    }

    /// Looks whether the number of a device that was opened is another one's, too: that one is closed, and has not been used since.
    pub(super) fn check_number(&mut self, key: DeviceKey) {
        let Some(device) = self.devices.get(key.0).filter(|d| d.id.is_some()) else {
            return;
        };
        let (session, id) = (device.session, device.id);
        let is_it = |d: &Device| (d.session, d.id) == (session, id);
        let twice = self.devices.iter().any(|(other, d)| other != key.0 && is_it(d));
        if twice {
            self.session_stale(session);
        }
    }

    /// Whether requests or messages about a session's devices are in flight.
    fn uses_devices(&self, id: SessionId) -> bool {
        let mut devices = self.devices.iter().filter(|(_, d)| d.session == id);
        devices.any(|(_, d)| d.message.is_some() || d.in_flight > 0)
    }

    /// Opens the devices of sessions again of which nothing is in flight any more.
    pub(super) fn check_drains(&mut self, now: Instant) {
        let sessions = self.sessions.iter_mut();
        let due: Vec<SessionId> = sessions
            .filter_map(|(id, s)| s.drain.is_due(now).then_some(*id))
            .collect();
        for id in due {
            let drained = !self.uses_devices(id);
            match self.sessions.get_mut(&id) {
                Some(session) if !drained => session.drain = Timer::At(now + RETRY),
                _ => self.ask_version(id),
            }
        }
    }
}
