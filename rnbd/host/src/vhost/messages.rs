//! Handlers of a front end's messages.

use std::os::fd::{AsFd as _, OwnedFd};

use rnbd::virtio_blk::{self, feature};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserConfigFlags, VhostUserEmpty, VhostUserInflight, VhostUserProtocolFeatures,
    VhostUserSingleMemoryRegion, VhostUserU64, VhostUserVirtioFeatures, VhostUserVringAddr, VhostUserVringState,
};
use vm_memory::ByteValued as _;

use super::{
    MAX_QUEUES,
    front::{Front, FrontError, Surroundings, Watched, protocol_features},
    inflight::Inflight,
    memory::MAX_REGIONS,
    requests::Cache,
    ring::{Ring, RingError, check_event},
    wire::{Message, WireError},
};

impl Front {
    /// Does what a message says, and answers it.
    ///
    /// # Errors
    /// When it is not as it should be: the front end is cut off.
    pub(super) fn handle(&mut self, around: &mut dyn Surroundings, mut message: Message) -> Result<(), FrontError> {
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
        // Without a descriptor the ring is polled.
        let (index, kick) = event(message)?;
        let negotiated = self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
        let size = self.ring(index)?.size();
        let inflight = self.inflight.as_ref();
        let inflight = inflight.and_then(|inflight| inflight.of_ring(index as u16, size));
        if let Some(kick) = &kick {
            around
                .watch(kick.as_fd(), Watched::Kick(index as u16))
                .map_err(|e| FrontError::Io(request, e))?;
        }
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
