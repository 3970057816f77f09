//! A front end: what it sends, and what its device is.

use std::{
    collections::VecDeque,
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rnbd::{
    Errno,
    block::Geometry,
    client::output::DeviceKey,
    virtio_blk::{self, feature},
};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserConfigFlags, VhostUserEmpty, VhostUserInflight, VhostUserProtocolFeatures,
    VhostUserSingleMemoryRegion, VhostUserU64, VhostUserVirtioFeatures, VhostUserVringAddr, VhostUserVringState,
};
use vm_memory::ByteValued as _;

use super::{
    MAX_QUEUES,
    inflight::Inflight,
    memory::{GuestMemory, Lender, MAX_REGIONS, MemoryError},
    requests::{Begun, Cache, Ended, FrontRequest, Requests, write_status},
    ring::{Ring, RingError, check_event},
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
    /// What tells of requests in this ring.
    Kick(u16),
}

/// What a front end needs of its loop.
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

/// What a message waits for, which is answered when nothing of that is under way any more.
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
    wire: Wire,
    pub(crate) device: DeviceKey,
    /// The socket that it came by.
    pub(crate) door: usize,
    name: String,
    geometry: Geometry,
    phase: Phase,
    /// What it has chosen.
    features: u64,
    protocol: VhostUserProtocolFeatures,
    writeback: bool,
    memory: GuestMemory,
    rings: Vec<Ring>,
    inflight: Option<Inflight>,
    /// Where it is told of changes.
    channel: Option<UnixStream>,
    waits: Option<(Waiting, Message)>,
    requests: Requests,
    out: VecDeque<FrontRequest>,
    /// Requests that made no sense.
    pub(crate) malformed: u64,
}

/// What we can do of the protocol.
fn protocol_features() -> VhostUserProtocolFeatures {
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
        door: usize,
        device: (DeviceKey, String, Geometry),
    ) -> io::Result<Self> {
        let wire = Wire::new(stream)?;
        around.watch(wire.descriptor(), Watched::Socket)?;
        let (device, name, geometry) = device;
        Ok(Self {
            wire,
            device,
            door,
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

    /// The device's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
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
        let rings = self.waits.is_none() && self.rings.iter().any(Ring::has_work);
        self.phase == Phase::Serving && (rings || self.wire.is_readable())
    }

    /// Reads messages, and takes requests. Returns whether there was something.
    pub(crate) fn work(&mut self, around: &mut dyn Surroundings) -> bool {
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
        worked | self.take()
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

    /// What a message has to wait for: memory is only taken away when nothing is under way with it, and a ring has stopped when all of
    /// it is answered.
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
    fn take(&mut self) -> bool {
        if self.waits.is_some() {
            return false;
        }
        let mut worked = false;
        for index in 0..self.rings.len() {
            for _ in 0..ROUND {
                if !self.rings[index].has_work() {
                    break;
                }
                match self.rings[index].next(self.memory.view()) {
                    Ok(Some((head, chain))) => {
                        worked = true;
                        self.begin(index, head, chain);
                    }
                    Ok(None) => break,
                    Err(e) => self.broken(index, &e),
                }
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

    fn cache(&self) -> Cache {
        match self.features & feature::FLUSH != 0 && self.writeback {
            true => Cache::WriteBack,
            false => Cache::WriteThrough,
        }
    }

    /// What the device was asked for is done.
    pub(crate) fn done(&mut self, slot: usize, result: Result<(), Errno>) {
        match self.requests.done(slot, result) {
            None => {}
            // Nobody is left who would know.
            Some(Begun::Operations(operations)) => self.out.extend(operations),
            Some(Begun::Ended(ended)) => self.ended(&ended),
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

    fn broken(&mut self, ring: usize, why: &RingError) {
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

/// Messages.
impl Front {
    fn handle(&mut self, around: &mut dyn Surroundings, mut message: Message) -> Result<(), FrontError> {
        use FrontendReq as Req;
        let request = message.request;
        match request {
            Req::GET_FEATURES => return self.tell(request, self.offered()),
            Req::GET_PROTOCOL_FEATURES => return self.tell(request, protocol_features().bits()),
            Req::GET_QUEUE_NUM => return self.tell(request, MAX_QUEUES.into()),
            Req::GET_MAX_MEM_SLOTS => return self.tell(request, MAX_REGIONS as u64),
            Req::GET_CONFIG => return self.get_config(&message),
            Req::GET_VRING_BASE => return self.get_base(around, &message),
            Req::GET_INFLIGHT_FD => return self.get_inflight(&message),
            Req::SET_OWNER | Req::RESET_OWNER => message.body::<VhostUserEmpty>().map(drop)?,
            Req::SET_FEATURES => self.set_features(&message)?,
            Req::SET_PROTOCOL_FEATURES => self.set_protocol_features(&message)?,
            Req::SET_CONFIG => self.set_config(&message)?,
            Req::SET_MEM_TABLE => {
                let regions = message.regions()?;
                self.memory.set(around, &regions)?;
                self.look_at_rings();
            }
            Req::ADD_MEM_REG => {
                let region: VhostUserSingleMemoryRegion = message.body()?;
                self.memory.add(around, &region, &message.one_descriptor()?)?;
            }
            Req::REM_MEM_REG => {
                let region: VhostUserSingleMemoryRegion = message.body()?;
                self.memory.remove(around, &region)?;
                self.look_at_rings();
            }
            Req::SET_INFLIGHT_FD => {
                let what: VhostUserInflight = message.body()?;
                let taken = Inflight::take(&what, &message.one_descriptor()?);
                self.inflight = Some(taken.map_err(|e| FrontError::Io(request, e))?);
            }
            Req::SET_BACKEND_REQ_FD => self.channel = Some(message.one_descriptor()?.into()),
            Req::SET_VRING_NUM | Req::SET_VRING_BASE | Req::SET_VRING_ENABLE => self.set_state(&message)?,
            Req::SET_VRING_ADDR => self.set_addresses(&message)?,
            Req::SET_VRING_KICK => self.set_kick(around, &mut message)?,
            Req::SET_VRING_CALL => {
                let (ring, fd) = event(&mut message)?;
                self.ring(ring)?.set_call(fd);
            }
            Req::SET_VRING_ERR => {
                let (ring, fd) = event(&mut message)?;
                self.ring(ring)?.set_err(fd);
            }
            _ => return Err(FrontError::Unknown(request)),
        }
        match message.need_reply && self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            true => self.tell(request, 0),
            false => Ok(()),
        }
    }

    fn tell(&mut self, request: FrontendReq, value: u64) -> Result<(), FrontError> {
        Ok(self.wire.answer(request, &[&value.to_ne_bytes()], None)?)
    }

    fn offered(&self) -> u64 {
        virtio_blk::features(&self.geometry) | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn set_features(&mut self, message: &Message) -> Result<(), FrontError> {
        let features: VhostUserU64 = message.body()?;
        // What a device that has changed would not offer any more may have been taken before.
        if features.value & !(self.offered() | self.features) != 0 {
            return Err(FrontError::Features(features.value));
        }
        self.features = features.value;
        let event_idx = self.features & feature::EVENT_IDX != 0;
        self.rings.iter_mut().for_each(|ring| ring.set_event_idx(event_idx));
        Ok(())
    }

    fn set_protocol_features(&mut self, message: &Message) -> Result<(), FrontError> {
        let features: VhostUserU64 = message.body()?;
        let known = VhostUserProtocolFeatures::from_bits(features.value);
        let known = known.filter(|chosen| protocol_features().contains(*chosen));
        self.protocol = known.ok_or(FrontError::Features(features.value))?;
        Ok(())
    }

    fn config(&self) -> [u8; virtio_blk::CONFIG] {
        virtio_blk::config(&self.geometry, MAX_QUEUES, self.cache() == Cache::WriteBack)
    }

    fn get_config(&mut self, message: &Message) -> Result<(), FrontError> {
        let (head, _) = message.head::<VhostUserConfig>()?;
        let (offset, size) = (head.offset as usize, head.size as usize);
        // What we know nothing of is zero.
        let mut config = self.config().to_vec();
        config.resize(config.len().max(offset + size), 0);
        let flags = VhostUserConfigFlags::from_bits_truncate(head.flags);
        let told = VhostUserConfig::new(head.offset, head.size, flags);
        let body = [told.as_slice(), &config[offset..offset + size]];
        Ok(self.wire.answer(message.request, &body, None)?)
    }

    /// The driver can choose how writes are cached, and nothing else.
    fn set_config(&mut self, message: &Message) -> Result<(), FrontError> {
        let (head, bytes) = message.head::<VhostUserConfig>()?;
        let at = (virtio_blk::WRITEBACK as u32).checked_sub(head.offset);
        if bytes.len() != head.size as usize {
            return Err(WireError::Body(message.request).into());
        }
        let writeback = at.and_then(|at| bytes.get(at as usize));
        if let Some(writeback) = writeback.filter(|_| self.features & feature::CONFIG_WCE != 0) {
            self.writeback = *writeback != 0;
        }
        Ok(())
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring, FrontError> {
        if index >= u32::from(MAX_QUEUES) {
            return Err(FrontError::NoRing(index));
        }
        while self.rings.len() <= index as usize {
            let mut ring = Ring::new().map_err(|e| FrontError::Ring(index, e))?;
            ring.set_event_idx(self.features & feature::EVENT_IDX != 0);
            self.rings.push(ring);
        }
        Ok(&mut self.rings[index as usize])
    }

    /// A ring of which nothing is at work.
    fn idle_ring(&mut self, index: u32, request: FrontendReq) -> Result<&mut Ring, FrontError> {
        let ring = self.ring(index)?;
        match ring.is_stopped() {
            true => Ok(ring),
            false => Err(FrontError::AtWork(request)),
        }
    }

    fn set_state(&mut self, message: &Message) -> Result<(), FrontError> {
        let state: VhostUserVringState = message.body()?;
        let (index, num, request) = (state.index, state.num, message.request);
        match request {
            FrontendReq::SET_VRING_ENABLE => self.ring(index)?.enable(num != 0),
            FrontendReq::SET_VRING_NUM => {
                let set = self.idle_ring(index, request)?.set_size(num);
                set.map_err(|e| FrontError::Ring(index, e))?;
            }
            _ => self.idle_ring(index, request)?.set_base(num as u16),
        }
        Ok(())
    }

    fn set_addresses(&mut self, message: &Message) -> Result<(), FrontError> {
        let addr: VhostUserVringAddr = message.body()?;
        let (index, user) = (addr.index, [addr.descriptor, addr.available, addr.used]);
        let outside = || FrontError::Ring(index, RingError::Outside);
        let [table, available, used] = user.map(|user| self.memory.guest_addr(user));
        let (table, available, used) = (
            table.ok_or_else(outside)?,
            available.ok_or_else(outside)?,
            used.ok_or_else(outside)?,
        );
        // A front end tells of a ring at work again when it begins to log, which is not offered.
        let ring = self.idle_ring(index, message.request)?;
        ring.set_addresses(table, available, used)
            .map_err(|e| FrontError::Ring(index, e))
    }

    fn set_kick(&mut self, around: &mut dyn Surroundings, message: &mut Message) -> Result<(), FrontError> {
        let request = message.request;
        let (index, fd) = event(message)?;
        // A ring that would have to be looked at all the time is not served.
        let kick = fd.ok_or(WireError::Descriptors(request))?;
        let negotiated = self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
        let size = self.ring(index)?.size();
        let inflight = self.inflight.as_ref();
        let inflight = inflight.and_then(|inflight| inflight.of_ring(index as u16, size));
        let what = Watched::Kick(index as u16);
        around
            .watch(kick.as_fd(), what)
            .map_err(|e| FrontError::Io(request, e))?;
        let memory = self.memory.view();
        let ring = &mut self.rings[index as usize];
        let (former, started) = ring.start(memory, kick, inflight);
        if let Some(former) = former {
            around.forget(former.as_fd());
        }
        started.map_err(|e| FrontError::Ring(index, e))?;
        if !negotiated {
            ring.enable(true);
        }
        Ok(())
    }

    fn get_base(&mut self, around: &mut dyn Surroundings, message: &Message) -> Result<(), FrontError> {
        let state: VhostUserVringState = message.body()?;
        let ring = self.ring(state.index)?;
        if let Some(kick) = ring.stop() {
            around.forget(kick.as_fd());
        }
        let (index, base) = (state.index, u32::from(ring.base()));
        let told = VhostUserVringState::new(index, base);
        Ok(self.wire.answer(message.request, &[told.as_slice()], None)?)
    }

    fn get_inflight(&mut self, message: &Message) -> Result<(), FrontError> {
        let wanted: VhostUserInflight = message.body()?;
        let (made, file) = Inflight::make(&wanted).map_err(|e| FrontError::Io(message.request, e))?;
        Ok(self
            .wire
            .answer(message.request, &[made.as_slice()], Some(file.as_fd()))?)
    }

    /// The guest's memory is another one: rings that are not in it any more can't go on.
    fn look_at_rings(&mut self) {
        for ring in 0..self.rings.len() {
            if let Err(e) = self.rings[ring].look(self.memory.view()) {
                self.broken(ring, &e);
            }
        }
    }
}

/// A ring and an event descriptor for it, if it has one.
fn event(message: &mut Message) -> Result<(u32, Option<OwnedFd>), FrontError> {
    const NO_DESCRIPTOR: u64 = 0x100;
    let request = message.request;
    let value = message.body::<VhostUserU64>()?.value;
    let fd = message.descriptor()?;
    if fd.is_some() == (value & NO_DESCRIPTOR != 0) {
        return Err(WireError::Descriptors(request).into());
    }
    if let Some(fd) = &fd {
        check_event(fd).map_err(|e| FrontError::Io(request, e))?;
    }
    Ok(((value & 0xff) as u32, fd))
}
