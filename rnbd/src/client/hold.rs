//! Sizes, loss policies and timers of devices, and buffers reserved for answers.

use roce_verbs::Instant;
use rtrs::{
    client::{
        buffers::{Buffer, MIN_BYTES},
        config::SessionInfo,
        request::SessionId,
    },
    cx::Cx,
};

use super::{
    client::Client,
    device::Device,
    memory,
    output::{DeviceKey, Output},
    patience::{Alarm, OnLoss, RETRY},
    session::Session,
    state::{DeviceEvent, DeviceState},
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
        if device.patience.on_loss() == on_loss {
            return Ok(());
        }
        device
            .patience
            .set(on_loss, device.state == DeviceState::MappedDisconnected);
        self.stirred = true;
        if on_loss == OnLoss::Error {
            device.again = Alarm::Off;
            self.work.fail_held(key, Errno::ECONNABORTED);
            self.finish();
        } else if device.state == DeviceState::MappedDisconnected && device.message.is_none() {
            self.try_later(key);
        }
        Ok(())
    }

    /// Returns the loss policy of a device; `None` when it is gone.
    pub fn on_loss(&self, key: DeviceKey) -> Option<OnLoss> {
        self.devices.get(key.0).map(|d| d.patience.on_loss())
    }

    /// Operations that wait for this device, or will, when it is lost.
    pub fn waiting(&self, key: DeviceKey) -> usize {
        self.work.waiting(key)
    }

    /// The server has refused to open it again: that may be different in a while, if the server has just started, or has still to do
    /// with the session that was lost.
    pub(super) fn try_later(&mut self, key: DeviceKey) {
        let device = self.devices.get_mut(key.0).filter(|d| d.waits());
        if let Some(device) = device {
            device.again = Alarm::Set(RETRY);
            self.stirred = true;
        }
    }

    /// When [`timeout`](Self::timeout) wants to be called.
    pub fn next_timeout(&self) -> Option<Instant> {
        let devices = self.devices.iter().map(|(_, d)| [d.patience.end(), d.again.at()]);
        let drains = self.sessions.values().map(|s| s.drain.at());
        let others = drains.chain([self.work.next_timeout()]);
        devices.flatten().chain(others).flatten().min()
    }

    /// Looks whether a time has come.
    pub fn timeout(&mut self, now: Instant) {
        for key in self.all_devices(|d| d.patience.end().is_some_and(|at| at <= now)) {
            if self.devices.get_mut(key.0).is_some_and(|d| d.patience.ends(now)) {
                tracing::warn!(device = self.name(key), "the device has been lost for too long");
                self.work.fail_held(key, Errno::ECONNABORTED);
            }
        }
        self.finish();
        self.check_drains(now);
        for key in self.all_devices(|d| d.again.at().is_some_and(|at| at <= now)) {
            self.open_again(key, now);
        }
        if self.work.alarm().rings(now) {
            for key in self.all_devices(|d| d.state == DeviceState::Mapped) {
                self.work.resume(key);
            }
            if self.work.holds() {
                *self.work.alarm() = Alarm::At(now + RETRY);
            }
        }
    }

    fn open_again(&mut self, key: DeviceKey, now: Instant) {
        let Some(device) = self.devices.get_mut(key.0) else {
            return;
        };
        if !device.again.rings(now) {
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
    /// Starts the alarms that were set, and looks after the reserves.
    pub(super) fn look_around(&mut self, cx: &mut Cx<'_>) {
        self.stirred = false;
        self.work.alarm().start(cx.now);
        let keys = self.all_devices(|_| true);
        for key in keys {
            if let Some(device) = self.devices.get_mut(key.0) {
                device.patience.alarm().start(cx.now);
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
                    (_, Ok(None)) => self.stirred = true,
                    _ => {}
                }
            }
        }
    }

    /// Whether operations of a session's devices may come to have all buffers.
    fn keeps_reserve(&self, id: SessionId) -> bool {
        let waits = |d: &Device| d.session == id && d.patience.on_loss() != OnLoss::Error;
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
