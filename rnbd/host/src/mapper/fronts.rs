//! The front ends of virtual machines, and the sockets that they come by, one for a device.

use std::{
    io,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
};

use mio::{Interest, Token};
use rnbd::{block::Geometry, client::output::DeviceKey};
use roce::reactor::{Readiness, Sockets, TurnCx};
use roce_net::socket_file::{Access, Kind, SocketFile};
use roce_verbs::Instant;
use roce_verbs::mem::Pages;
use rtrs::{
    client::{LentId, SessionId},
    throttle::{INTERVAL, Throttle},
};
use slab::Slab;

use super::{FIRST_FRONT, FIRST_LISTENER, Rtrs, Service, devices::Stage};
use crate::{
    front::Part,
    map::types::VhostSocket,
    rng::Rng,
    vhost::{Front, FrontRequest, Lender, Surroundings, Watched},
};

/// Tokens of a front end: that of its socket, and those of its rings.
const TOKENS: usize = 1024;

/// Listening socket for the front ends of a device, one at a time.
#[derive(Debug)]
struct VhostListener {
    file: SocketFile,
    device: String,
    /// A connection may be pending.
    accepts: bool,
    /// A front end is connected.
    taken: bool,
}

/// The front ends, and their listeners.
#[derive(Debug)]
pub(super) struct Fronts {
    listeners: Vec<VhostListener>,
    all: Slab<Front>,
    /// Requests that made no sense, of those that are gone.
    malformed: u64,
    /// Log lines of rejected front ends.
    rejected: Throttle,
}

impl Fronts {
    pub(super) fn new() -> Self {
        Self {
            listeners: Vec::new(),
            all: Slab::new(),
            malformed: 0,
            rejected: Throttle::new(INTERVAL),
        }
    }

    /// Makes the sockets, and listens.
    ///
    /// # Errors
    /// Those of [`SocketFile::bind`], and of the loop's descriptors.
    pub(super) fn open(&mut self, sockets: &Sockets<'_>, all: &[VhostSocket]) -> io::Result<()> {
        for (index, socket) in all.iter().enumerate() {
            let file = SocketFile::bind(&socket.path, Kind::Stream, Access::Owner)?;
            file.listener().set_nonblocking(true)?;
            let token = Token(FIRST_LISTENER + index);
            sockets.register(file.as_fd(), token, Interest::READABLE)?;
            self.listeners.push(VhostListener {
                file,
                device: socket.device.clone(),
                accepts: true,
                taken: false,
            });
        }
        Ok(())
    }

    /// Accepts no more.
    pub(super) fn close(&mut self, sockets: &Sockets<'_>) {
        for listener in self.listeners.drain(..) {
            let _ = sockets.deregister(listener.file.as_fd());
        }
    }

    /// A descriptor of theirs is ready.
    pub(super) fn ready(&mut self, token: Token, readiness: Readiness) {
        if let Some(listener) = token.0.checked_sub(FIRST_LISTENER) {
            if let Some(listener) = self.listeners.get_mut(listener) {
                listener.accepts = true;
            }
            return;
        }
        let at = token.0 - FIRST_FRONT;
        let what = match at % TOKENS {
            0 => Watched::Socket,
            // A ring's descriptor that fails says nothing any more.
            _ if !readiness.readable => return,
            ring => Watched::Kick((ring - 1) as u16),
        };
        if let Some(front) = self.all.get_mut(at / TOKENS) {
            front.ready(what);
        }
    }

    /// The next connection to a socket without a front end, and that socket.
    fn next_accepted(&mut self) -> Option<(usize, UnixStream)> {
        for (index, listener) in self
            .listeners
            .iter_mut()
            .enumerate()
            .filter(|(_, listener)| !listener.taken)
        {
            while listener.accepts {
                match listener.file.listener().accept() {
                    Ok((stream, _)) => {
                        listener.taken = true;
                        return Some((index, stream));
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => {
                        // A connection without a descriptor is accepted with the next one.
                        listener.accepts = false;
                        if e.kind() != io::ErrorKind::WouldBlock {
                            tracing::warn!(device = listener.device, "a front end is not let in: {e}");
                        }
                    }
                }
            }
        }
        None
    }

    /// A listener's front end is gone, or was not taken: the next may come.
    fn vacate(&mut self, listener: usize) {
        if let Some(listener) = self.listeners.get_mut(listener) {
            (listener.taken, listener.accepts) = (false, true);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether a device is in use by one.
    pub(super) fn uses(&self, device: DeviceKey) -> bool {
        self.all.iter().any(|(_, front)| front.opener.device() == device)
    }

    /// Whether one could go on at once.
    pub(super) fn has_work(&self) -> bool {
        self.all.iter().any(|(_, front)| front.has_work())
    }

    /// When to work at the latest, for the sake of rings that are polled.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.all.iter().filter_map(|(_, front)| front.next_timeout()).min()
    }

    /// Requests that made no sense.
    pub(super) fn malformed(&self) -> u64 {
        self.malformed + self.all.iter().map(|(_, front)| front.malformed).sum::<u64>()
    }

    /// All of them go, or those of a device.
    pub(super) fn let_go(&mut self, of: Option<DeviceKey>) {
        for (_, front) in &mut self.all {
            if of.is_none_or(|device| device == front.opener.device()) {
                front.let_go();
            }
        }
    }

    /// A device is another one than it was.
    pub(super) fn set_geometry(&mut self, device: DeviceKey, geometry: Geometry) {
        for (_, front) in self.all.iter_mut().filter(|(_, front)| front.opener.device() == device) {
            front.set_geometry(geometry);
        }
    }

    pub(super) fn get_mut(&mut self, front: usize) -> Option<&mut Front> {
        self.all.get_mut(front)
    }

    /// Guests are notified of answers.
    pub(super) fn notify(&mut self) {
        self.all.iter_mut().for_each(|(_, front)| front.notify());
    }
}

/// A front end's surroundings on a loop.
struct Around<'a, 'b> {
    index: usize,
    turn: &'a mut TurnCx<'b, ()>,
    rtrs: &'a mut Rtrs,
    session: Option<SessionId>,
    rng: &'a mut Rng,
}

impl Lender for Around<'_, '_> {
    fn lend(&mut self, memory: Arc<Pages>) -> Result<LentId, String> {
        let session = self.session.ok_or("there is no session")?;
        let lent = self.rtrs.lend_memory(&mut self.rng.cx(self.turn), session, memory);
        lent.map_err(|e| e.to_string())
    }

    fn take_back(&mut self, id: LentId) {
        if let Some(session) = self.session {
            self.rtrs.take_memory_back(&mut self.rng.cx(self.turn), session, id);
        }
    }
}

impl Surroundings for Around<'_, '_> {
    fn watch(&mut self, fd: BorrowedFd<'_>, what: Watched) -> io::Result<()> {
        let (offset, interest) = match what {
            Watched::Socket => (0, Interest::READABLE | Interest::WRITABLE),
            Watched::Kick(ring) => (1 + usize::from(ring), Interest::READABLE),
        };
        let token = Token(FIRST_FRONT + self.index * TOKENS + offset);
        self.turn.sockets.register(fd, token, interest)
    }

    fn forget(&mut self, fd: BorrowedFd<'_>) {
        let _ = self.turn.sockets.deregister(fd);
    }
}

macro_rules! around {
    ($service:expr, $turn:expr, $index:expr) => {
        &mut Around {
            index: $index,
            turn: $turn,
            rtrs: $service.rnbd.rtrs_mut(),
            session: $service.session,
            rng: &mut $service.rng,
        }
    };
}

impl Service {
    /// Accepts front ends.
    pub(super) fn accept_fronts(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        while let Some((listener, stream)) = self.fronts.next_accepted() {
            worked = true;
            self.admit_front(turn, stream, listener);
        }
        worked
    }

    /// Takes an accepted front end.
    fn admit_front(&mut self, turn: &mut TurnCx<'_, ()>, stream: UnixStream, listener: usize) {
        let device = self.fronts.listeners[listener].device.clone();
        let open = |d: &&super::Device| d.what.name == device && d.stage == Stage::Open;
        let found = self.devices.iter().find(open);
        let found = found.and_then(|d| Some((self.rnbd.opener(d.key), device.clone(), d.geometry?)));
        let begun = match found {
            Some(found) => {
                let index = self.fronts.all.vacant_key();
                Front::new(around!(self, turn, index), stream, listener, found)
            }
            None => Err(io::Error::other("the device is not there")),
        };
        match begun {
            Ok(front) => {
                tracing::info!(device, "a front end connected");
                if let Some(device) = self.device(front.opener.device()) {
                    device.users += 1;
                }
                self.fronts.all.insert(front);
            }
            Err(e) => {
                if let Some(suppressed) = self.fronts.rejected.pass(turn.now) {
                    tracing::warn!(device, suppressed, "a front end is rejected: {e}");
                }
                self.fronts.vacate(listener);
            }
        }
    }

    /// Everything that the front ends want.
    pub(super) fn serve_fronts(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        let mut over = Vec::new();
        for index in 0..self.fronts.all.capacity() {
            let Some(front) = self.fronts.all.get_mut(index) else {
                continue;
            };
            let now = turn.now;
            worked |= front.work(around!(self, turn, index), now);
            let opener = front.opener.clone();
            while let Some(request) = self.fronts.all.get_mut(index).and_then(Front::next_request) {
                worked = true;
                let request = FrontRequest {
                    hint: index + request.hint,
                    ..request
                };
                let request = request.owned_by(|slot| Part::Vhost(index, slot));
                self.rnbd.submit(&opener, request);
            }
            if self.fronts.all.get(index).is_some_and(Front::is_over) {
                over.push(index);
            }
        }
        for index in over {
            worked = true;
            let mut front = self.fronts.all.remove(index);
            front.notify();
            self.fronts.malformed += front.malformed;
            self.fronts.vacate(front.listener);
            self.release(Some(front.opener.device()));
            front.part(around!(self, turn, index));
            self.accept_fronts(turn);
        }
        worked
    }
}
