//! A server in several shares, each with the disks of its own loop.
//!
//! A session's home opens and closes its devices. When one is open, all other shares that have connections of the session are told,
//! and the client is answered when each has it too: its requests may come to any. Closing goes the other way: home's part of a
//! device, with which what was written becomes durable, is the last to be closed.

use std::collections::BTreeSet;

use roce_verbs::Instant;
use rtrs::server::request::SessionKey;

use super::{
    action::{Action, Ticket},
    device::Device,
    disk::StoreId,
    parts::{Coming, Letter, Message, Original, Part, Parts},
    server::{Job, Server},
    session::{OpenRequest, Session},
};
use crate::errno::Errno;

impl Server {
    /// The next letter, and the share that it is for. Letters to a share have to come there in their order, and after what RTRS had
    /// to tell that share before.
    pub fn poll_letter(&mut self) -> Option<(usize, Letter)> {
        self.letters.pop_front()
    }

    /// A letter of another share has come.
    pub fn letter(&mut self, now: Instant, from: usize, letter: Letter) {
        match letter.0 {
            Message::Device {
                session,
                id,
                device,
                store,
                geometry,
            } => {
                let of = (from, device);
                let coming = Coming {
                    of,
                    session,
                    id,
                    geometry,
                };
                self.take_over(coming, store);
            }
            Message::Known(device, result) => self.known(now, from, device, result),
            Message::Close(device) => self.close_part((from, device)),
            Message::Closed(device) => {
                if let Some(d) = self.devices.get_mut(device) {
                    d.parts.open.remove(&from);
                }
                self.close_if_unused(device);
            }
            Message::Resized(device, size) => {
                if let Some(d) = self.devices.get_mut(device) {
                    d.geometry.size = size;
                }
            }
        }
    }

    fn write(&mut self, to: usize, message: Message) {
        self.letters.push_back((to, Letter(message)));
    }

    /// Whether this share has a session's devices.
    pub(super) fn is_home(&self, session: SessionKey) -> bool {
        self.share.of_session(session) == self.share.index()
    }

    /// A device is open, and the client's number for it `id`. True: it can be answered at once; else when all shares have it.
    pub(super) fn tell_shares(&mut self, open: &OpenRequest, id: u32, device: u64) -> bool {
        let session = self.sessions.get(&open.request.session);
        let others = session.map_or_else(BTreeSet::new, |session| session.shares.clone());
        let Some(d) = self.devices.get_mut(device).filter(|_| !others.is_empty()) else {
            return true;
        };
        d.parts = Parts {
            unknown: others.clone(),
            open: others.clone(),
            waits: Some((id, open.clone())),
            failed: None,
        };
        for share in others {
            self.tell_share(share, open.request.session, id, device);
        }
        false
    }

    fn tell_share(&mut self, share: usize, session: SessionKey, id: u32, device: u64) {
        let Some(d) = self.devices.get(device) else { return };
        let (store, geometry) = (d.store, d.geometry);
        self.write(
            share,
            Message::Device {
                session,
                id,
                device,
                store,
                geometry,
            },
        );
    }

    /// A path of a session is up, with so many connections. Shares that no other path has led to get the session's devices.
    pub(super) fn path_up(&mut self, key: SessionKey, connections: u16) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let all = self.share.others_of_path(connections);
        let new: Vec<usize> = all.filter(|share| session.shares.insert(*share)).collect();
        if new.is_empty() {
            return;
        }
        for (id, device) in session.devices().collect::<Vec<_>>() {
            let Some(d) = self.devices.get_mut(device).filter(|d| !d.is_closing()) else {
                continue;
            };
            d.parts.unknown.extend(&new);
            d.parts.open.extend(&new);
            for share in &new {
                self.tell_share(*share, key, id, device);
            }
        }
    }

    /// No more requests for a device will come.
    pub(super) fn close_parts(&mut self, device: u64) {
        let Some(d) = self.devices.get(device) else { return };
        for share in d.parts.open.clone() {
            self.write(share, Message::Close(device));
        }
    }

    /// A share has a device, or can't.
    fn known(&mut self, now: Instant, from: usize, device: u64, result: Result<(), Errno>) {
        let Some(d) = self.devices.get_mut(device) else { return };
        d.parts.unknown.remove(&from);
        d.parts.failed = d.parts.failed.or(result.err());
        if !d.parts.unknown.is_empty() {
            return;
        }
        let Some((id, open)) = d.parts.waits.take() else { return };
        let (failed, closing) = (d.parts.failed, d.is_closing());
        let key = open.request.session;
        match failed {
            // The session has ended meanwhile.
            _ if closing => self.answer(open.request, Err(Errno::ENODEV)),
            None => self.open_succeeded(&open, id, device),
            Some(e) => {
                if let Some(session) = self.sessions.get_mut(&key) {
                    session.leave(id);
                }
                self.finish_device(device, None);
                self.open_refused(now, &open, e);
            }
        }
        if !closing && let Some(session) = self.sessions.get_mut(&key) {
            session.end_open();
        }
        self.next_open(now, key);
    }

    /// Home has a device: it is wanted here too.
    fn take_over(&mut self, coming: Coming, store: StoreId) {
        let (of, session) = (coming.of, coming.session);
        if !self.sessions.contains_key(&session) {
            return self.write(of.0, Message::Known(of.1, Err(Errno::ENODEV)));
        }
        self.parts.insert(of, Part::Coming { closing: false });
        let ticket = Ticket(self.jobs.insert(Job::TakeOver(Box::new(coming))));
        self.actions.push_back(Action::TakeOver {
            ticket,
            home: of.0,
            store,
        });
    }

    /// A device of another share has a name at this loop's disks, or can't have one.
    pub fn taken_over(&mut self, ticket: Ticket, result: Result<StoreId, Errno>) {
        let Some(Job::TakeOver(coming)) = self.jobs.remove(ticket.0) else {
            return;
        };
        let Coming {
            of,
            session,
            id,
            geometry,
        } = *coming;
        let closing = matches!(self.parts.get(&of), Some(Part::Coming { closing: true }));
        match result {
            Ok(store) => {
                let device = self.devices.insert(Device::part(store, geometry, of));
                self.parts.insert(of, Part::Here { device, session, id });
                // The number may be another device's by now.
                if let Some(session) = self.sessions.get_mut(&session).filter(|_| !closing) {
                    session.put(id, device);
                }
            }
            Err(_) => {
                self.parts.remove(&of);
            }
        }
        self.write(of.0, Message::Known(of.1, result.map(drop)));
        if closing {
            self.close_part(of);
        }
    }

    /// Home closes a device.
    fn close_part(&mut self, of: Original) {
        match self.parts.get_mut(&of) {
            Some(Part::Coming { closing }) => *closing = true,
            Some(Part::Here { device, session, id }) => {
                let (device, session, id) = (*device, *session, *id);
                if self.sessions.get(&session).and_then(|s| s.device(id)) == Some(device) {
                    self.sessions.get_mut(&session).and_then(|s: &mut Session| s.leave(id));
                }
                self.finish_device(device, None);
            }
            Some(Part::Going) => {}
            None => self.write(of.0, Message::Closed(of.1)),
        }
    }

    /// A part was found to be larger than before.
    pub(super) fn tell_size(&mut self, of: Original, size: u64) {
        self.write(of.0, Message::Resized(of.1, size));
    }

    /// A part is not used any more: it is being closed.
    pub(super) fn part_goes(&mut self, of: Original) {
        self.parts.insert(of, Part::Going);
    }

    /// A part has been closed.
    pub(super) fn part_closed(&mut self, of: Original) {
        self.parts.remove(&of);
        self.write(of.0, Message::Closed(of.1));
    }
}
