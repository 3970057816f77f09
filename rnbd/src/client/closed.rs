//! Devices that the server has closed although the session is up.
//!
//! A kernel's server closes all devices of a session when the session's last path goes there. If another path is up by the time that
//! the client sees the loss, the session was never down here, and requests are answered with ENOTCONN: they name devices that are not
//! open. So would an operator's order to close one device have it, which can't be told apart there. A server that names its
//! [instance](crate::proto::instance) keeps the session's devices while a path is being connected: there the order counts, and
//! requests fail.
//!
//! The device numbers of before may be given to other devices (`xa_alloc` takes the lowest that is free), so a request that is still
//! in flight could reach another device than it was meant for. Hence no device of the session is opened before all requests have been
//! answered, and all of its devices are opened again.

use roce_verbs::Instant;
use rtrs::client::request::SessionId;

use super::{
    client::{Client, News},
    device::Device,
    output::DeviceKey,
    patience::{Alarm, RETRY},
    state::DeviceEvent,
    transport::Transport,
};

impl<F, T: Transport<F>> Client<F, T> {
    /// Handles the answer to a request that its device is not open, of a session that is up: stops sending requests to the session's
    /// devices.
    pub(super) fn session_stale(&mut self, id: SessionId) {
        let session = self.sessions.get_mut(&id).filter(|s| s.down.is_none());
        let Some(session) = session.filter(|s| s.drain == Alarm::Off) else {
            return;
        };
        tracing::warn!(session = id.0, "the server has closed devices: they are opened again");
        session.drain = Alarm::Set(RETRY);
        session.version = None;
        self.stirred = true;
        // A message that is under way has been sent to the server as it is now, or is a close.
        for key in self.devices_of(id, |d| d.id.is_some() && d.message.is_none()) {
            if let Some(device) = self.devices.get_mut(key.0) {
                device.id = None;
            }
            self.step(key, DeviceEvent::LinkDown, News::Nothing);
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
            .filter_map(|(id, s)| s.drain.rings(now).then_some(*id))
            .collect();
        for id in due {
            let drained = !self.uses_devices(id);
            match self.sessions.get_mut(&id) {
                Some(session) if !drained => session.drain = Alarm::At(now + RETRY),
                _ => self.ask_version(id),
            }
        }
    }
}
