//! Messages about devices between the owner shard (home) of a client and the other shards.

use super::{
    client::{Client, News},
    device::Device,
    letter::{Letter, Opening, Word},
    output::DeviceKey,
    state::DeviceEvent,
};
use crate::proto::MsgOpenRsp;

/// The share that devices are mapped at.
pub(super) const HOME: u16 = 0;

impl Client {
    pub(super) fn is_home(&self) -> bool {
        self.index == HOME
    }

    /// The shares that know a device are told something of it.
    pub(super) fn tell_holders(&mut self, key: DeviceKey, word: impl Fn() -> Word) {
        if let Some(device) = self.devices.get(key.0) {
            let letters = device.holders.iter().map(|to| (*to, Letter(word())));
            self.letters.extend(letters);
        }
    }

    /// Home is told that nothing of a device is left here.
    pub(super) fn tell_released(&mut self, home: DeviceKey) {
        self.letters.push_back((HOME, Letter(Word::Released(home))));
    }

    /// The next letter to another share, and to which.
    pub fn poll_letter(&mut self) -> Option<(u16, Letter)> {
        self.letters.pop_front()
    }

    /// A letter of share `from` to this one. What RTRS had to tell here when it came has been [handed over](Self::rtrs).
    pub fn letter(&mut self, from: u16, letter: Letter) {
        match letter.0 {
            Word::Opened(opening) => self.opened_at_home(*opening),
            Word::Release { device, force } => {
                // Or it went with its session, and home has been told.
                if let Some(key) = self.here(device) {
                    if let Some(device) = self.devices.get_mut(key.0) {
                        device.forced = force;
                    }
                    self.step(key, DeviceEvent::UnmapAsked, News::Nothing);
                }
            }
            Word::Resized(device, size) => {
                if let Some(key) = self.here(device) {
                    self.change_size(key, size);
                }
            }
            Word::OnLoss(device, on_loss) => {
                if let Some(key) = self.here(device) {
                    self.change_on_loss(key, on_loss);
                }
            }
            Word::Released(key) => {
                if let Some(device) = self.devices.get_mut(key.0) {
                    device.holders.remove(&from);
                    self.settle(key);
                }
            }
            Word::Stale(id) => self.session_stale(id),
            Word::Drain(id, number) => self.drain_asked(id, number),
            Word::Drained(id, number) => self.drained(from, id, number),
        }
    }

    /// The server has opened it: the other shares may use it.
    pub(super) fn tell_opened(&mut self, key: DeviceKey, answer: MsgOpenRsp) {
        let Some(device) = self.devices.get_mut(key.0).filter(|_| self.index == HOME) else {
            return;
        };
        let opening = Opening {
            device: key,
            session: device.session,
            name: device.name.clone(),
            mode: device.mode,
            on_loss: device.patience.on_loss(),
            losses: device.losses.clone(),
            answer,
        };
        for share in 1..=self.others {
            device.holders.insert(share);
            let word = Word::Opened(Box::new(opening.clone()));
            self.letters.push_back((share, Letter(word)));
        }
    }

    /// Returns the key here of a device that home knows as `home`.
    fn here(&self, home: DeviceKey) -> Option<DeviceKey> {
        let mut known = self.devices.iter();
        known.find_map(|(key, d)| (d.home == Some(home)).then_some(DeviceKey(key)))
    }

    fn opened_at_home(&mut self, opening: Opening) {
        let (id, home) = (opening.session, opening.device);
        let Some(session) = self.sessions.get(&id) else {
            // It has ended here before it has there.
            return self.tell_released(home);
        };
        let down = session.down.clone();
        let key = self.here(home).unwrap_or_else(|| {
            let device = Device {
                home: Some(home),
                losses: opening.losses,
                ..Device::new(id, opening.name, opening.mode)
            };
            DeviceKey(self.devices.insert(device))
        });
        self.change_on_loss(key, opening.on_loss);
        self.step(key, DeviceEvent::Opened, News::Opened(opening.answer));
        if let Some(why) = down {
            // Here the path was lost sooner than home knew; it will be opened again.
            self.devices_lost(id, &why, DeviceEvent::LinkDown);
        }
    }
}
