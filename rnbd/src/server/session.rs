//! A client's session: which devices it has open, and in which order it opens them.

use core::net::SocketAddr;
use std::collections::{BTreeMap, VecDeque};

use rtrs::server::request::RequestKey;

use crate::proto::MsgOpen;

/// A request to open a device.
#[derive(Clone, Debug)]
pub(super) struct OpenRequest {
    /// To be answered.
    pub(super) request: RequestKey,
    /// Offset of the answer in the session's memory; there is room for it.
    pub(super) at: usize,
    /// Request of the client.
    pub(super) message: MsgOpen,
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    /// The name that the client gave.
    pub(super) name: String,
    /// The client's address.
    pub(super) peer: SocketAddr,
    /// Open devices by the number that the client has for them: the server's key.
    devices: BTreeMap<u32, u64>,
    next: u32,
    /// Opened one after the other: the same name twice gives the same device.
    waiting: VecDeque<OpenRequest>,
    opening: bool,
}

impl Session {
    /// One without devices, of which the first gets the number `first`.
    pub(super) fn new(name: String, peer: SocketAddr, first: u32) -> Self {
        Self {
            name,
            peer,
            devices: BTreeMap::new(),
            next: first,
            waiting: VecDeque::new(),
            opening: false,
        }
    }

    /// The server's key of an open device.
    pub(super) fn device(&self, id: u32) -> Option<u64> {
        self.devices.get(&id).copied()
    }

    /// All open devices: the client's number and the server's key.
    pub(super) fn devices(&self) -> impl Iterator<Item = (u32, u64)> {
        self.devices.iter().map(|(id, key)| (*id, *key))
    }

    /// How many devices are open.
    pub(super) fn open(&self) -> usize {
        self.devices.len()
    }

    /// A device has been opened. Returns its number.
    pub(super) fn enter(&mut self, key: u64) -> u32 {
        // Numbers are not used again at once, so that a late request can't reach another device.
        while self.devices.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = id.wrapping_add(1);
        self.devices.insert(id, key);
        id
    }

    /// A device is to be closed: its number means nothing any more.
    pub(super) fn leave(&mut self, id: u32) -> Option<u64> {
        self.devices.remove(&id)
    }

    /// A device is to be opened when those before it are.
    pub(super) fn wait(&mut self, open: OpenRequest) {
        self.waiting.push_back(open);
    }

    /// The next to be opened, if none is being opened. From then on one is, until [`end_open`](Self::end_open).
    pub(super) fn begin_open(&mut self) -> Option<OpenRequest> {
        if self.opening {
            return None;
        }
        let open = self.waiting.pop_front()?;
        self.opening = true;
        Some(open)
    }

    /// The open that was [begun](Self::begin_open) with can't go on: it stays the next.
    pub(super) fn put_back(&mut self, open: OpenRequest) {
        self.waiting.push_front(open);
        self.opening = false;
    }

    /// The open under way has ended.
    pub(super) fn end_open(&mut self) {
        self.opening = false;
    }

    /// The session has ended: what it waits with.
    pub(super) fn into_waiting(self) -> impl Iterator<Item = OpenRequest> {
        self.waiting.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_not_used_again_at_once_and_never_twice_at_a_time() {
        let mut session = Session::new("s".into(), ([127, 0, 0, 1], 1).into(), 0);
        assert_eq!([session.enter(10), session.enter(11)], [0, 1]);
        assert_eq!((session.leave(0), session.leave(0)), (Some(10), None));
        assert_eq!(session.enter(12), 2);
        session.next = u32::MAX;
        assert_eq!(
            [session.enter(13), session.enter(14), session.enter(15)],
            [u32::MAX, 0, 3]
        );
        assert_eq!((session.device(0), session.open()), (Some(14), 5));
    }
}
