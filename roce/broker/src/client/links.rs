//! Which connections are established, as the broker and its successors are told. Packets tell them nothing of that, as anybody
//! may send those; this side's connection manager knows.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use roce_net::EventFd;
use roce_port::{ConnChange, PortChange};

use crate::{
    proto::{Connection, ToBroker},
    sys, wire,
};

/// Connections of one record.
const BATCH: usize = 256;
/// Pause when waiting is not possible.
const RETRY: Duration = Duration::from_millis(10);

#[derive(Default)]
struct State {
    /// The connection to the broker; `None` while there is none.
    link: Option<Arc<OwnedFd>>,
    established: HashMap<u32, Connection>,
    /// Changes not yet reported to the broker, by our communication IDs.
    untold: BTreeSet<u32>,
    /// The member uses all parts of its place, and whether the broker has been told.
    spread: bool,
    spread_told: bool,
    /// There is a broker that has to be told of changes.
    telling: bool,
    /// It had no room: the thread tells it when it has.
    no_room: bool,
}

/// Connections of this member that the broker knows. Its lock is held for moments only, and nothing is waited for under it: a device's lock may be held by
/// whoever takes it.
pub(super) struct Links {
    state: Mutex<State>,
    /// Raised when the broker had no room: the thread waits for that.
    stuck: EventFd,
}

impl Links {
    pub(super) fn new(link: Arc<OwnedFd>) -> io::Result<Self> {
        let state = State {
            link: Some(link),
            telling: true,
            ..State::default()
        };
        Ok(Self {
            state: Mutex::new(state),
            stuck: EventFd::new()?,
        })
    }

    /// The connection to the broker.
    pub(super) fn link(&self) -> Option<Arc<OwnedFd>> {
        self.state.lock().link.clone()
    }

    /// There is another connection to a broker, or none.
    pub(super) fn set_link(&self, link: Option<Arc<OwnedFd>>) {
        let mut state = self.state.lock();
        if link.is_none() {
            state.telling = false;
            state.spread_told = false;
            state.untold.clear();
        }
        state.link = link;
        state.no_room = false;
        if !state.tell() {
            self.stuck.raise();
        }
    }

    /// All that are established, for the next broker: what changes from now on it is told when the connection is set.
    pub(super) fn established(&self) -> Vec<Connection> {
        let mut state = self.state.lock();
        state.untold.clear();
        state.telling = true;
        state.established.values().copied().collect()
    }

    /// Whether the member uses all parts of its place.
    pub(super) fn is_spread(&self) -> bool {
        self.state.lock().spread
    }

    /// The port has changed.
    pub(super) fn change(&self, change: &PortChange) {
        let mut state = self.state.lock();
        match change {
            PortChange::Connection(change) => state.note(change),
            PortChange::Spread => state.spread = true,
        }
        if state.telling && !state.no_room && !state.tell() {
            self.stuck.raise();
        }
    }

    /// Waits until the broker has said something. Tells it what it had no room for when it has.
    pub(super) fn wait(&self, link: &OwnedFd) {
        self.stuck.clear();
        let room = !self.state.lock().tell();
        if let Err(e) = sys::wait_for(link.as_fd(), room, self.stuck.as_fd()) {
            tracing::warn!("waiting for the broker failed: {e}");
            std::thread::sleep(RETRY);
        }
    }
}

impl State {
    /// A connection has been established or is over.
    fn note(&mut self, change: &ConnChange) {
        let conn = Connection {
            local: change.local,
            remote: change.remote,
            local_id: change.local_id,
            remote_id: change.remote_id,
            remote_qpn: change.remote_qpn.value(),
        };
        match change.established {
            true => self.established.insert(conn.local_id, conn),
            false => self.established.remove(&conn.local_id),
        };
        if self.telling {
            self.untold.insert(conn.local_id);
        }
    }

    /// Tells the broker what it has not been told. False: it has no room for all of it.
    fn tell(&mut self) -> bool {
        let Some(link) = &self.link else { return true };
        if self.spread && !self.spread_told {
            let record = wire::encode(&ToBroker::Spread, &[]);
            match record.and_then(|bytes| wire::send(link.as_fd(), &bytes, &[], false)) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.no_room = true;
                    return false;
                }
                // It is gone; the next one is told all.
                Err(_) => return true,
                Ok(()) => self.spread_told = true,
            }
        }
        while !self.untold.is_empty() {
            let batch: Vec<u32> = self.untold.iter().take(BATCH).copied().collect();
            let (mut up, mut down) = (vec![], vec![]);
            for id in &batch {
                match self.established.get(id) {
                    Some(conn) => up.push(*conn),
                    None => down.push(*id),
                }
            }
            let record = wire::encode(&ToBroker::Connections { up, down }, &[]);
            match record.and_then(|bytes| wire::send(link.as_fd(), &bytes, &[], false)) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.no_room = true;
                    return false;
                }
                // It is gone; the next one is told all.
                Err(_) => return true,
                Ok(()) => {}
            }
            for id in &batch {
                self.untold.remove(id);
            }
        }
        self.no_room = false;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::wire::{MAX_RECORD, Record};

    fn change(local_id: u32, established: bool) -> PortChange {
        PortChange::Connection(ConnChange {
            established,
            local: [127, 0, 0, 1].into(),
            remote: [127, 0, 0, 2].into(),
            local_id,
            remote_id: local_id + 1,
            remote_qpn: roce_bth::Qpn::new(7),
        })
    }

    fn links() -> (Links, Arc<OwnedFd>, OwnedFd) {
        let (link, broker) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let link = Arc::new(link);
        (Links::new(link.clone()).unwrap(), link, broker)
    }

    /// All that the broker was told.
    fn told(broker: &OwnedFd) -> (Vec<u32>, Vec<u32>) {
        let (mut ups, mut downs) = (vec![], vec![]);
        let mut buffer = vec![0; MAX_RECORD];
        while let Ok(Record {
            message: ToBroker::Connections { up, down },
            ..
        }) = wire::receive(broker.as_fd(), &mut buffer, false)
        {
            ups.extend(up.iter().map(|c| c.local_id));
            downs.extend(down);
        }
        (ups, downs)
    }

    #[test]
    fn a_broker_without_room_is_told_when_it_has_and_nobody_waits() {
        const ALL: u32 = 20_000;
        let (links, link, broker) = links();
        // Far more than a socket holds; nobody reads.
        (0..ALL).for_each(|id| links.change(&change(id, true)));
        links.change(&change(0, false));
        let mut ups = vec![];
        let mut downs = vec![];
        assert!(!links.state.lock().untold.is_empty());
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    links.wait(&link);
                }
            });
            while ups.len() < ALL as usize || downs.is_empty() {
                let (up, down) = told(&broker);
                ups.extend(up);
                downs.extend(down);
                std::thread::yield_now();
            }
            over.store(true, Ordering::Relaxed);
            links.stuck.raise();
        });
        ups.sort_unstable();
        assert!(ups.into_iter().eq(0..ALL) && downs == [0]);
        assert!(links.state.lock().untold.is_empty());
    }

    #[test]
    fn the_next_broker_is_told_what_stands_and_then_what_changes() {
        let (links, _link, broker) = links();
        (1..4).for_each(|id| links.change(&change(id, true)));
        assert_eq!(told(&broker).0, [1, 2, 3]);
        links.set_link(None);
        links.change(&change(2, false));
        links.change(&change(4, true));
        assert!(links.state.lock().untold.is_empty(), "nobody has to be told");
        let mut all: Vec<u32> = links.established().iter().map(|c| c.local_id).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 3, 4]);
        links.change(&change(1, false));
        let (next, broker) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        links.set_link(Some(Arc::new(next)));
        assert_eq!(told(&broker), (vec![], vec![1]));
    }
}
