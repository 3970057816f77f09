//! Devices that the server has closed although the session is up.
//!
//! A kernel's server closes all devices of a session when the session's last path goes there. If another path is up by the time that
//! the client sees the loss, the session was never down here, and requests are answered with ENOTCONN: they name devices that are not
//! open. So would an operator's order to close one device have it, which can't be told apart there. A server that names its
//! [instance](crate::proto::instance) keeps the session's devices while a path is being connected: there the order counts, and
//! requests fail.
//!
//! The device numbers of before may be given to other devices (`xa_alloc` takes the lowest that is free), so a request that is still
//! in flight could reach another device than it was meant for. Hence no device of the session is opened before all requests of all
//! shards have been answered, and all of its devices are opened again.

use std::collections::BTreeSet;

use roce_verbs::Instant;
use rtrs::client::request::SessionId;

use super::{
    client::{Client, News},
    device::Device,
    letter::{Letter, Word},
    output::DeviceKey,
    patience::{Alarm, RETRY},
    shares::HOME,
    state::DeviceEvent,
};

impl Client {
    /// Handles the answer to a request that its device is not open, of a session that is up.
    pub(super) fn session_stale(&mut self, id: SessionId) {
        if !self.begin_drain(id) {
            return;
        }
        if !self.is_home() {
            return self.letters.push_back((HOME, Letter(Word::Stale(id))));
        }
        tracing::warn!(session = id.0, "the server has closed devices: they are opened again");
        let others: BTreeSet<u16> = (1..=self.others).collect();
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.version = None;
        session.drain.number = session.drain.number.wrapping_add(1);
        let number = session.drain.number;
        let letters = others.iter().map(|to| (*to, Letter(Word::Drain(id, number))));
        self.letters.extend(letters);
        session.drain.missing = others;
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

    /// Stops sending requests to a session's devices. False: it does so already, or there is no session that is up.
    fn begin_drain(&mut self, id: SessionId) -> bool {
        let session = self.sessions.get_mut(&id).filter(|s| s.down.is_none());
        let Some(session) = session.filter(|s| s.drain.check == Alarm::Off) else {
            return false;
        };
        session.drain.check = Alarm::Set(RETRY);
        self.stirred = true;
        // A message that is under way has been sent to the server as it is now, or is a close.
        for key in self.devices_of(id, |d| d.id.is_some() && d.message.is_none()) {
            if let Some(device) = self.devices.get_mut(key.0) {
                device.id = None;
            }
            self.step(key, DeviceEvent::LinkDown, News::Nothing);
        }
        true
    }

    /// Home waits until this shard has no request to a session's devices in flight.
    pub(super) fn drain_asked(&mut self, id: SessionId, number: u32) {
        self.begin_drain(id);
        match self.sessions.get_mut(&id).filter(|s| s.down.is_none()) {
            Some(session) => {
                session.drain.asked = Some(number);
                session.drain.check = Alarm::Set(RETRY);
                self.stirred = true;
                self.report_drained(id);
            }
            // Its requests end with it.
            None => self.letters.push_back((HOME, Letter(Word::Drained(id, number)))),
        }
    }

    /// A shard has no request to a session's devices in flight.
    pub(super) fn drained(&mut self, from: u16, id: SessionId, number: u32) {
        let session = self.sessions.get_mut(&id);
        if let Some(session) = session.filter(|s| s.drain.number == number) {
            session.drain.missing.remove(&from);
        }
    }

    /// Reports to home once nothing is in flight. False: something is.
    fn report_drained(&mut self, id: SessionId) -> bool {
        if self.in_flight(id) {
            return false;
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            let asked = session.drain.asked.take();
            session.drain.check = Alarm::Off;
            let letter = asked.map(|number| (HOME, Letter(Word::Drained(id, number))));
            self.letters.extend(letter);
        }
        true
    }

    /// Whether requests or messages about a session's devices are in flight.
    fn in_flight(&self, id: SessionId) -> bool {
        let of_session = |device: DeviceKey| self.devices.get(device.0).is_some_and(|d| d.session == id);
        self.devices.iter().any(|(_, d)| d.session == id && d.message.is_some()) || self.work.in_flight(of_session)
    }

    /// Opens the devices of sessions again of which nothing is in flight any more.
    pub(super) fn check_drains(&mut self, now: Instant) {
        let sessions = self.sessions.iter_mut();
        let due: Vec<SessionId> = sessions
            .filter_map(|(id, s)| s.drain.check.rings(now).then_some(*id))
            .collect();
        for id in due {
            let missing = self.sessions.get(&id).is_some_and(|s| !s.drain.missing.is_empty());
            let drained = match self.is_home() {
                true => !missing && !self.in_flight(id),
                false => self.report_drained(id),
            };
            match self.sessions.get_mut(&id) {
                Some(session) if !drained => session.drain.check = Alarm::At(now + RETRY),
                _ => self.ask_version(id),
            }
        }
    }
}
