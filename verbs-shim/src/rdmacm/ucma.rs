//! Ids, channels and events of a process.

use std::{
    collections::{BTreeSet, HashMap},
    os::fd::RawFd,
    time::Instant,
};

use super::{
    Errno, Result,
    abi::{EventResp, EventType},
    addr::Addr,
    backend::{Backend, Handle},
    channel::{Channel, Queued},
    context::Context,
    event::Event,
    multicast::Member,
    ports::Ports,
};

/// Everything that RDMA_CM keeps for the process. One lock around it is enough: nothing here is on a data path.
pub(crate) struct Ucma<B: Backend> {
    pub(crate) backend: B,
    channels: HashMap<RawFd, Channel>,
    ids: HashMap<u32, Context<B>>,
    /// Ids by the transport's number of their connection.
    keys: HashMap<u64, u32>,
    pub(crate) members: HashMap<u32, Member<B>>,
    pub(crate) ports: Ports,
    /// Ids whose question is to be asked again, and when.
    pub(crate) later: Vec<(Instant, u32)>,
    /// The name of the next address resolution.
    next_ticket: u64,
    id_numbers: Numbers,
    member_numbers: Numbers,
}

/// Numbers of ids or memberships, the lowest that is free first, as the kernel gives them: librdmacm keeps an array by
/// them, which only grows, and has room for 65,536.
#[derive(Default)]
struct Numbers {
    /// The highest that was ever given.
    last: u32,
    /// Free numbers below it.
    free: BTreeSet<u32>,
}

impl Numbers {
    fn take(&mut self) -> u32 {
        self.free.pop_first().unwrap_or_else(|| {
            self.last += 1;
            self.last
        })
    }

    fn give_back(&mut self, number: u32) {
        self.free.insert(number);
    }
}

impl<B: Backend> Ucma<B> {
    pub(crate) fn new(backend: B) -> Self {
        Self {
            backend,
            channels: HashMap::new(),
            ids: HashMap::new(),
            keys: HashMap::new(),
            members: HashMap::new(),
            ports: Ports::default(),
            later: Vec::new(),
            next_ticket: 0,
            id_numbers: Numbers::default(),
            member_numbers: Numbers::default(),
        }
    }

    /// Makes an event channel and returns its descriptor.
    ///
    /// # Errors
    /// When the process can't have another descriptor.
    pub(crate) fn open_channel(&mut self) -> Result<RawFd> {
        let channel = Channel::new()?;
        let fd = channel.fd();
        // The program closed one of this number in a way that we did not see.
        self.close_channel(fd);
        self.channels.insert(fd, channel);
        Ok(fd)
    }

    /// Whether there are no channels, and so no ids.
    pub(crate) fn is_idle(&self) -> bool {
        self.channels.is_empty()
    }

    pub(crate) fn has_channel(&self, fd: RawFd) -> bool {
        self.channels.contains_key(&fd)
    }

    /// Whether a channel's descriptor still is its own.
    pub(crate) fn is_there(&self, fd: RawFd) -> bool {
        self.channels.get(&fd).is_some_and(Channel::is_there)
    }

    /// Somebody has read a channel's descriptor.
    pub(crate) fn was_read(&self, fd: RawFd) {
        if let Some(channel) = self.channels.get(&fd) {
            channel.was_read();
        }
    }

    /// Forgets a channel with all its ids. Its descriptor stays open: the caller closes it.
    pub(crate) fn close_channel(&mut self, fd: RawFd) {
        let ids: Vec<u32> = self
            .ids
            .iter()
            .filter(|(_, c)| c.channel == fd)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.remove(id);
        }
        if let Some(channel) = self.channels.remove(&fd) {
            channel.give_up();
        }
    }

    /// Adds an id.
    pub(crate) fn insert(&mut self, ctx: Context<B>) -> u32 {
        let id = self.id_numbers.take();
        if let Some(handle) = &ctx.handle {
            self.keys.insert(handle.key(), id);
        }
        self.ids.insert(id, ctx);
        id
    }

    /// An id of a channel.
    ///
    /// # Errors
    /// ENOENT when there is none of this number, EINVAL when it is another channel's.
    pub(crate) fn get(&mut self, fd: RawFd, id: u32) -> Result<&mut Context<B>> {
        match self.ids.get_mut(&id) {
            Some(ctx) if ctx.channel == fd => Ok(ctx),
            Some(_) => Err(Errno::INVAL.because("the rdma_cm_id is of another event channel")),
            None => Err(Errno(libc::ENOENT).because("there is no such rdma_cm_id")),
        }
    }

    /// An id and the transport beside it.
    ///
    /// # Errors
    /// Like [`Ucma::get`].
    pub(crate) fn get_with(&mut self, fd: RawFd, id: u32) -> Result<(&mut Context<B>, &mut B)> {
        self.get(fd, id)?;
        self.parts(id).ok_or(Errno(libc::ENOENT))
    }

    /// An id whatever its channel, and the transport beside it.
    pub(crate) fn parts(&mut self, id: u32) -> Option<(&mut Context<B>, &mut B)> {
        Some((self.ids.get_mut(&id)?, &mut self.backend))
    }

    /// The id of a connection of the transport.
    pub(crate) fn by_key(&self, key: u64) -> Option<u32> {
        self.keys.get(&key).copied()
    }

    /// A name for an address resolution.
    pub(crate) fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// The id that waits for an address resolution.
    pub(crate) fn by_ticket(&self, ticket: u64) -> Option<u32> {
        let waits = |ctx: &Context<B>| ctx.resolution.as_ref().is_some_and(|r| r.ticket == ticket);
        self.all().find(|(_, ctx)| waits(ctx)).map(|(id, _)| id)
    }

    /// All ids.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, &Context<B>)> {
        self.ids.iter().map(|(id, ctx)| (*id, ctx))
    }

    /// Gives an id its listener, connection or resolution.
    pub(crate) fn attach(&mut self, id: u32, handle: B::Handle) {
        self.keys.insert(handle.key(), id);
        let old = self.ids.get_mut(&id).and_then(|ctx| ctx.handle.replace(handle));
        if let Some(old) = old {
            self.keys.remove(&old.key());
        }
    }

    pub(crate) fn add_member(&mut self, member: Member<B>) -> u32 {
        let id = self.member_numbers.take();
        self.members.insert(id, member);
        id
    }

    /// Takes a membership out.
    pub(crate) fn remove_member(&mut self, member: u32) -> Option<Member<B>> {
        let found = self.members.remove(&member)?;
        self.member_numbers.give_back(member);
        Some(found)
    }

    /// Destroys an id of a channel and returns how many of its events were taken.
    ///
    /// # Errors
    /// Like [`Ucma::get`].
    pub(crate) fn destroy(&mut self, fd: RawFd, id: u32) -> Result<u32> {
        self.get(fd, id)?;
        self.remove(id).ok_or(Errno(libc::ENOENT))
    }

    /// Ends what an id has, takes its events back, and forgets it. Requests that nobody has seen yet go with their
    /// listener.
    fn remove(&mut self, id: u32) -> Option<u32> {
        let ctx = self.ids.remove(&id)?;
        if let Some(handle) = &ctx.handle {
            self.keys.remove(&handle.key());
        }
        if ctx.bound {
            self.ports.release(ctx.space as u16, ctx.local.port(), id);
        }
        for member in self.members.extract_if(|_, m| m.id == id) {
            self.member_numbers.give_back(member.0);
        }
        // The number may be another id's soon.
        self.later.retain(|(_, waiting)| *waiting != id);
        let events = match self.channels.get_mut(&ctx.channel) {
            Some(channel) => channel.extract(|e| e.id == id || e.request == Some(id)),
            None => Vec::new(),
        };
        let reported = ctx.reported;
        drop(ctx);
        self.id_numbers.give_back(id);
        for request in events.iter().filter_map(|e| e.request) {
            self.remove(request);
        }
        Some(reported)
    }

    /// Queues an event of an id, unless librdmacm does not know the id yet (`ucma_event_handler`).
    pub(crate) fn tell(&mut self, id: u32, event: &Event) {
        let Some(ctx) = self.ids.get(&id).filter(|ctx| ctx.uid != 0) else {
            return;
        };
        if event.status != 0 {
            tracing::info!("{}", event.failure(&ctx.local, &ctx.remote));
        }
        let (fd, resp) = (ctx.channel, event.emit_for(ctx, id));
        self.queue(
            fd,
            Queued {
                id,
                request: None,
                member: None,
                resp,
            },
        );
    }

    /// Queues a connect request: `request` came to `listener`.
    pub(crate) fn tell_request(&mut self, listener: u32, request: u32, event: &Event) {
        let Some(ctx) = self.ids.get(&listener) else { return };
        let (fd, resp) = (ctx.channel, event.emit_for(ctx, request));
        self.queue(
            fd,
            Queued {
                id: listener,
                request: Some(request),
                member: None,
                resp,
            },
        );
    }

    /// Queues an event of a membership.
    pub(crate) fn tell_member(&mut self, member: u32, event: &Event) {
        let Some(m) = self.members.get(&member) else { return };
        let (id, resp) = (m.id, event.emit(m.uid, member, true));
        let Some(ctx) = self.ids.get(&id) else { return };
        self.queue(
            ctx.channel,
            Queued {
                id,
                request: None,
                member: Some(member),
                resp,
            },
        );
    }

    fn queue(&mut self, fd: RawFd, event: Queued) {
        if let Some(channel) = self.channels.get_mut(&fd) {
            channel.push(event);
        }
    }

    /// Takes the oldest event of a channel.
    pub(crate) fn take_event(&mut self, fd: RawFd) -> Option<EventResp> {
        let event = self.channels.get_mut(&fd)?.pop()?;
        if let Some(ctx) = self.ids.get_mut(&event.id) {
            ctx.reported += 1;
        }
        if let Some(member) = event.member.and_then(|m| self.members.get_mut(&m)) {
            member.reported += 1;
        }
        // The backlog counts requests that the program has not fetched (`ucma_get_event`).
        if let Some((ctx, backend)) = event.request.and_then(|request| self.parts(request))
            && let Some(handle) = &ctx.handle
        {
            backend.leave_backlog(handle);
        }
        Some(event.resp)
    }

    /// Takes an id's events out of a channel that fit `which`.
    pub(crate) fn retract(&mut self, fd: RawFd, which: impl Fn(&Queued) -> bool) -> Vec<Queued> {
        self.channels.get_mut(&fd).map_or_else(Vec::new, |c| c.extract(which))
    }

    /// Moves an id from one channel to another and returns how many of its events were taken from the old one.
    ///
    /// # Errors
    /// ENOENT when there is no such id or channel, EINVAL when it is another channel's.
    pub(crate) fn migrate(&mut self, to: RawFd, from: RawFd, id: u32) -> Result<u32> {
        if !self.has_channel(from) {
            return Err(Errno::INVAL);
        }
        let ctx = self.get(from, id)?;
        ctx.channel = to;
        let reported = ctx.reported;
        for event in self.retract(from, |e| e.id == id) {
            if let Some(request) = event.request.and_then(|r| self.ids.get_mut(&r)) {
                request.channel = to;
            }
            self.queue(to, event);
        }
        Ok(reported)
    }

    /// The transport has stopped: every id with a device hears of it.
    pub(crate) fn device_gone(&mut self) {
        let ids: Vec<u32> = self
            .all()
            .filter(|(_, c)| c.place.is_some())
            .map(|(id, _)| id)
            .collect();
        for id in ids {
            self.tell(id, &Event::new(EventType::DeviceRemoval));
        }
    }

    /// Changes a port's owner as its id changed.
    pub(crate) fn update_owner(&mut self, id: u32) {
        let Some(ctx) = self.ids.get(&id).filter(|c| c.bound) else {
            return;
        };
        let (space, remote): (u16, Addr) = (ctx.space as u16, ctx.remote);
        let local = ctx.place.map_or_else(|| ctx.local.at_any(), |_| ctx.local);
        let (reuse, afonly) = (ctx.reuse, ctx.afonly);
        self.ports.update(space, local.port(), id, |o| {
            (o.local, o.remote, o.reuse) = (local, remote, reuse);
            o.afonly = afonly.unwrap_or(o.afonly);
        });
    }

    /// Events waiting in a channel.
    #[cfg(test)]
    pub(crate) fn waiting(&self, fd: RawFd) -> usize {
        self.channels.get(&fd).map_or(0, Channel::len)
    }
}
