//! A front end: what it sends, and what its device is.

use std::{
    collections::VecDeque,
    io,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
};

use rnbd::{
    block::{Completion, Geometry},
    client::Opener,
    virtio_blk::{self, feature},
};
use roce_verbs::Instant;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures, VhostUserVringState};

use crate::front::FrontEnd;

use super::{
    inflight::Inflight,
    memory::{GuestMemory, Lender, MemoryError},
    requests::{Begun, Cache, Ended, FrontRequest, Requests, write_status},
    ring::{Ring, RingError},
    wire::{Message, Wire, WireError, tell_config_change},
};

/// Requests that are taken from a ring in a round.
const ROUND: usize = 64;
/// Messages that are read in a round.
const MESSAGES: usize = 32;

/// A descriptor of a front end that the loop watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Watched {
    Socket,
    /// Notification of requests in this ring.
    Kick(u16),
}

/// Services of the loop that a front end needs.
pub(crate) trait Surroundings: Lender {
    /// Watches a descriptor, edge-triggered.
    ///
    /// # Errors
    /// Those of `epoll_ctl`.
    fn watch(&mut self, fd: BorrowedFd<'_>, what: Watched) -> io::Result<()>;
    /// Watches it no longer.
    fn forget(&mut self, fd: BorrowedFd<'_>);
}

/// Why a front end is cut off.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrontError {
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Memory(#[from] MemoryError),
    #[error("ring {0}: {1}")]
    Ring(u32, RingError),
    #[error("there is no ring {0}")]
    NoRing(u32),
    #[error("{0:?} for a ring that is at work")]
    AtWork(FrontendReq),
    #[error("{0:?}: {1}")]
    Io(FrontendReq, io::Error),
    #[error("{0:?}, which was not offered")]
    Unknown(FrontendReq),
    #[error("features {0:#x}, which were not offered")]
    Features(u64),
    #[error("the file of its memory has become shorter")]
    MemoryGone,
}

impl FrontError {
    /// It has left.
    pub(crate) fn is_end(&self) -> bool {
        matches!(self, Self::Wire(WireError::Gone))
    }
}

/// Event that a message waits for, which is answered when nothing of that is in flight any more.
#[derive(Debug)]
enum Waiting {
    Ring(usize),
    All,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Phase {
    Serving,
    /// Nothing more is taken; it goes when all is answered.
    Leaving,
    /// It is gone, or cut off: nothing is answered any more.
    Gone,
}

/// A front end.
#[derive(Debug)]
pub(crate) struct Front {
    pub(super) wire: Wire,
    pub(crate) opener: Opener,
    /// The socket that it came by.
    pub(crate) listener: usize,
    name: String,
    pub(super) geometry: Geometry,
    phase: Phase,
    /// Features that it has chosen.
    pub(super) features: u64,
    pub(super) protocol: VhostUserProtocolFeatures,
    pub(super) writeback: bool,
    pub(super) memory: GuestMemory,
    pub(super) rings: Vec<Ring>,
    pub(super) inflight: Option<Inflight>,
    /// Channel for notifications of changes.
    pub(super) channel: Option<UnixStream>,
    waits: Option<(Waiting, Message)>,
    requests: Requests,
    out: VecDeque<FrontRequest>,
    /// Requests that made no sense.
    pub(crate) malformed: u64,
}

/// Returns the supported protocol features.
pub(super) fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
}

impl Front {
    /// A front end that has come by a socket.
    ///
    /// # Errors
    /// When the loop can't watch it.
    pub(crate) fn new(
        around: &mut dyn Surroundings,
        stream: UnixStream,
        listener: usize,
        device: (Opener, String, Geometry),
    ) -> io::Result<Self> {
        let wire = Wire::new(stream)?;
        around.watch(wire.descriptor(), Watched::Socket)?;
        let (opener, name, geometry) = device;
        Ok(Self {
            wire,
            opener,
            listener,
            name,
            geometry,
            phase: Phase::Serving,
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            writeback: true,
            memory: GuestMemory::default(),
            rings: Vec::new(),
            inflight: None,
            channel: None,
            waits: None,
            requests: Requests::default(),
            out: VecDeque::new(),
            malformed: 0,
        })
    }

    /// A descriptor is ready.
    pub(crate) fn ready(&mut self, what: Watched) {
        match what {
            Watched::Socket => self.wire.ready(),
            Watched::Kick(ring) => {
                if let Some(ring) = self.rings.get_mut(usize::from(ring)) {
                    ring.kicked();
                }
            }
        }
    }

    /// Nothing more is taken, and it goes.
    pub(crate) fn let_go(&mut self) {
        if self.phase == Phase::Serving {
            self.phase = Phase::Leaving;
        }
    }

    /// It is over: nothing of it is under way.
    pub(crate) fn is_over(&self) -> bool {
        self.phase != Phase::Serving && self.requests.is_empty()
    }

    /// The device is another one than it was.
    pub(crate) fn set_geometry(&mut self, geometry: Geometry) {
        self.geometry = geometry;
        if let Some(channel) = &self.channel
            && let Err(e) = tell_config_change(channel)
        {
            tracing::warn!(
                device = self.name,
                "a front end can't be told that its device has changed: {e}"
            );
        }
    }

    /// The next thing that the device is asked for.
    pub(crate) fn next_request(&mut self) -> Option<FrontRequest> {
        self.out.pop_front()
    }

    /// Whether it could go on at once.
    pub(crate) fn has_work(&self) -> bool {
        let rings = || self.rings.iter().any(Ring::has_work);
        let listens = || match &self.waits {
            Some((waiting, _)) => !self.is_under_way(waiting),
            None => rings() || self.wire.is_readable(),
        };
        let goes_on = self.phase == Phase::Serving && listens();
        goes_on || !self.out.is_empty() || self.is_over()
    }

    /// When to work at the latest, for the sake of rings that are polled.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let looks = self.phase == Phase::Serving && self.waits.is_none();
        let rings = self.rings.iter().filter(|_| looks);
        rings.filter_map(Ring::next_look).min()
    }

    /// Reads messages, and takes requests. Returns whether there was something.
    pub(crate) fn work(&mut self, around: &mut dyn Surroundings, now: Instant) -> bool {
        if self.phase != Phase::Serving {
            return false;
        }
        let mut worked = false;
        for _ in 0..MESSAGES {
            match self.message(around) {
                Ok(true) => worked = true,
                Ok(false) => break,
                Err(e) => {
                    self.cut(&e);
                    return true;
                }
            }
        }
        worked | self.take(now)
    }

    fn cut(&mut self, why: &FrontError) {
        self.phase = Phase::Gone;
        match why.is_end() {
            true => tracing::info!(device = self.name, "a front end has left"),
            false => tracing::warn!(device = self.name, "a front end is cut off: {why}"),
        }
    }

    /// Reads a message, or answers one that has waited. `false`: there is none.
    fn message(&mut self, around: &mut dyn Surroundings) -> Result<bool, FrontError> {
        if self.memory.is_gone() || self.inflight.as_ref().is_some_and(Inflight::is_gone) {
            return Err(FrontError::MemoryGone);
        }
        let message = match self.waits.take() {
            Some((waiting, message)) if self.is_under_way(&waiting) => {
                self.waits = Some((waiting, message));
                return Ok(false);
            }
            Some((_, message)) => message,
            None => match self.wire.read()? {
                None => return Ok(false),
                Some(message) => match self.must_wait(&message)? {
                    Some(waiting) if self.is_under_way(&waiting) => {
                        self.waits = Some((waiting, message));
                        return Ok(true);
                    }
                    _ => message,
                },
            },
        };
        // Rings that are stopped, or not in the memory any more, notify of nothing.
        self.notify();
        self.handle(around, message)?;
        Ok(true)
    }

    fn is_under_way(&self, what: &Waiting) -> bool {
        match what {
            Waiting::All => !self.requests.is_empty(),
            Waiting::Ring(ring) => self.rings.get(*ring).is_some_and(|ring| ring.under_way > 0),
        }
    }

    /// Returns what a message has to wait for: memory is only taken away when nothing is in flight with it, and a ring has stopped when
    /// all of it is answered.
    fn must_wait(&self, message: &Message) -> Result<Option<Waiting>, FrontError> {
        Ok(match message.request {
            FrontendReq::SET_MEM_TABLE | FrontendReq::REM_MEM_REG | FrontendReq::SET_INFLIGHT_FD => Some(Waiting::All),
            FrontendReq::GET_VRING_BASE => {
                let state: VhostUserVringState = message.body()?;
                Some(Waiting::Ring(state.index as usize))
            }
            _ => None,
        })
    }

    /// Takes requests from rings.
    fn take(&mut self, now: Instant) -> bool {
        if self.waits.is_some() {
            return false;
        }
        let mut worked = false;
        for index in 0..self.rings.len() {
            self.rings[index].begin_look();
            let found = self.take_of(index);
            self.rings[index].end_look(now, found);
            worked |= found;
        }
        worked
    }

    fn take_of(&mut self, ring: usize) -> bool {
        let mut worked = false;
        for _ in 0..ROUND {
            if !self.rings[ring].has_work() {
                break;
            }
            match self.rings[ring].next(self.memory.view()) {
                Ok(Some((head, chain))) => {
                    worked = true;
                    self.begin(ring, head, chain);
                }
                Ok(None) => break,
                Err(e) => self.broken(ring, &e),
            }
        }
        worked
    }

    fn begin(&mut self, ring: usize, head: u16, chain: Option<super::chain::Chain>) {
        let Some(chain) = chain else {
            // It has no place for a status.
            self.malformed += 1;
            return self.answer(ring, head, 0);
        };
        let cache = self.cache();
        let (memory, geometry) = (&self.memory, &self.geometry);
        match self.requests.begin(ring, &chain, memory, geometry, &self.name, cache) {
            Begun::Operations(operations) => self.out.extend(operations),
            Begun::Ended(ended) => {
                self.malformed += u64::from(ended.outcome != virtio_blk::Status::Ok);
                self.ended(&ended);
            }
        }
    }

    pub(super) fn cache(&self) -> Cache {
        match self.features & feature::FLUSH != 0 && self.writeback {
            true => Cache::WriteBack,
            false => Cache::WriteThrough,
        }
    }

    fn ended(&mut self, ended: &Ended) {
        if self.phase != Phase::Gone && !write_status(&self.memory, ended) {
            tracing::debug!(device = self.name, "the place of a status is not there any more");
        }
        self.answer(ended.ring, ended.head, ended.written);
    }

    fn answer(&mut self, ring: usize, head: u16, written: u32) {
        let Some(of) = self.rings.get_mut(ring) else { return };
        of.ended(head);
        if self.phase == Phase::Gone {
            return;
        }
        if let Err(e) = of.answer(self.memory.view(), head, written) {
            self.broken(ring, &e);
        }
    }

    pub(super) fn broken(&mut self, ring: usize, why: &RingError) {
        self.malformed += 1;
        tracing::warn!(device = self.name, ring, "a guest has made nonsense of a ring: {why}");
        self.rings[ring].broken();
    }

    /// Notifies the guest of answers.
    pub(crate) fn notify(&mut self) {
        if self.phase == Phase::Gone {
            return;
        }
        for ring in 0..self.rings.len() {
            if let Err(e) = self.rings[ring].notify(self.memory.view()) {
                self.broken(ring, &e);
            }
        }
    }

    /// It goes, and takes its memory along.
    pub(crate) fn part(mut self, around: &mut dyn Surroundings) {
        around.forget(self.wire.descriptor());
        for ring in &mut self.rings {
            if let Some(kick) = ring.stop() {
                around.forget(kick.as_fd());
            }
        }
        self.memory.clear(around);
    }
}

impl<Backend: ?Sized> FrontEnd<Backend> for Front {
    /// Its slot.
    type Request = usize;

    fn complete(&mut self, _: Instant, slot: usize, completion: Completion, _: &mut Backend) {
        // Its data is the guest's own.
        match self.requests.done(slot, completion.result, completion.losses) {
            None => {}
            // Nobody is left to report to.
            Some(Begun::Operations(operations)) => self.out.extend(operations),
            Some(Begun::Ended(ended)) => self.ended(&ended),
        }
    }
}
