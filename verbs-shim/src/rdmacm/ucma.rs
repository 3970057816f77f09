//! Ids, channels and events of a process.

use std::{collections::HashMap, os::fd::RawFd, time::Instant};

use slab::Slab;

use super::{
    Errno, Result,
    abi::{EventResp, EventType},
    addr::Addr,
    backend::{Backend, Handle},
    context::{Context, Member},
    event::Event,
    ports::Ports,
};
use crate::queue::EventQueue;

/// An event in a channel.
pub(crate) struct Queued {
    /// The id that it counts for: of a connect request the listener.
    pub(crate) id: u32,
    /// The new id of a connect request.
    pub(crate) request: Option<u32>,
    /// The membership that it reports on.
    pub(crate) member: Option<u32>,
    pub(crate) resp: EventResp,
}

impl Queued {
    fn new(id: u32, resp: EventResp) -> Self {
        Self {
            id,
            request: None,
            member: None,
            resp,
        }
    }
}

/// Everything that RDMA_CM keeps for the process. One lock around it is enough: nothing here is on a data path.
pub(crate) struct Ucma<B: Backend> {
    pub(crate) backend: B,
    channels: HashMap<RawFd, EventQueue<Queued>>,
    /// By number, of which low ones are reused, as the kernel does: librdmacm keeps an array by them, which only grows, and has room
    /// for 65,536.
    ids: Slab<Context<B>>,
    /// Ids by the transport's number of their connection.
    keys: HashMap<u64, u32>,
    /// Likewise.
    members: Slab<Member<B>>,
    pub(crate) ports: Ports,
    /// Ids with an attempt to repeat, and when.
    pub(crate) retries: Vec<(Instant, u32)>,
    /// The name of the next address resolution.
    next_ticket: u64,
}

impl<B: Backend> Ucma<B> {
    pub(crate) fn new(backend: B) -> Self {
        Self {
            backend,
            channels: HashMap::new(),
            ids: Slab::new(),
            keys: HashMap::new(),
            members: Slab::new(),
            ports: Ports::default(),
            retries: Vec::new(),
            next_ticket: 0,
        }
    }

    /// Makes an event channel and returns its descriptor.
    ///
    /// # Errors
    /// When the process can't have another descriptor.
    pub(crate) fn open_channel(&mut self) -> Result<RawFd> {
        let channel = EventQueue::new()?;
        let fd = channel.fd();
        // The program closed one of this number in a way that we did not see.
        self.close_channel(fd);
        self.channels.insert(fd, channel);
        Ok(fd)
    }

    /// Whether there are no channels, and thus no ids.
    pub(crate) fn is_idle(&self) -> bool {
        self.channels.is_empty()
    }

    pub(crate) fn has_channel(&self, fd: RawFd) -> bool {
        self.channels.contains_key(&fd)
    }

    /// Whether a channel's descriptor still is its own.
    pub(crate) fn is_intact(&self, fd: RawFd) -> bool {
        self.channels.get(&fd).is_some_and(EventQueue::is_intact)
    }

    /// Restores a channel's descriptor after a read.
    pub(crate) fn was_read(&self, fd: RawFd) {
        if let Some(channel) = self.channels.get(&fd) {
            channel.rearm();
        }
    }

    /// Removes a channel with all its ids. Its descriptor stays open: the caller closes it.
    pub(crate) fn close_channel(&mut self, fd: RawFd) {
        for id in self.ids_with(|ctx| ctx.channel == fd) {
            self.remove(id);
        }
        if let Some(channel) = self.channels.remove(&fd) {
            channel.forget();
        }
    }

    /// Adds an id.
    pub(crate) fn insert(&mut self, ctx: Context<B>) -> u32 {
        let key = ctx.handle.as_ref().map(Handle::key);
        let id = self.ids.insert(ctx) as u32;
        if let Some(key) = key {
            self.keys.insert(key, id);
        }
        id
    }

    /// An id of a channel.
    ///
    /// # Errors
    /// ENOENT when there is none of this number, EINVAL when it is another channel's.
    pub(crate) fn get(&mut self, fd: RawFd, id: u32) -> Result<&mut Context<B>> {
        match self.ids.get_mut(id as usize) {
            Some(ctx) if ctx.channel == fd => Ok(ctx),
            Some(_) => Err(Errno::INVAL.because("the rdma_cm_id is of another event channel")),
            None => Err(Errno::NOENT.because("there is no such rdma_cm_id")),
        }
    }

    /// Returns an id and the transport.
    ///
    /// # Errors
    /// Like [`Ucma::get`].
    pub(crate) fn get_with(&mut self, fd: RawFd, id: u32) -> Result<(&mut Context<B>, &mut B)> {
        self.get(fd, id)?;
        self.parts(id).ok_or(Errno::NOENT)
    }

    /// Returns an id of any channel, and the transport.
    pub(crate) fn parts(&mut self, id: u32) -> Option<(&mut Context<B>, &mut B)> {
        Some((self.ids.get_mut(id as usize)?, &mut self.backend))
    }

    /// The id of a connection of the transport.
    pub(crate) fn by_key(&self, key: u64) -> Option<u32> {
        self.keys.get(&key).copied()
    }

    /// Returns a number for an address resolution.
    pub(crate) fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// Returns the id that waits for an address resolution.
    pub(crate) fn by_ticket(&self, ticket: u64) -> Option<u32> {
        let waits = |ctx: &Context<B>| ctx.resolution.as_ref().is_some_and(|r| r.ticket == ticket);
        self.ids_with(waits).pop()
    }

    fn ids_with(&self, which: impl Fn(&Context<B>) -> bool) -> Vec<u32> {
        let found = self.ids.iter().filter(|(_, ctx)| which(ctx));
        found.map(|(id, _)| id as u32).collect()
    }

    /// Gives an id its listener, connection or resolution.
    pub(crate) fn attach(&mut self, id: u32, handle: B::Handle) {
        self.keys.insert(handle.key(), id);
        let old = self.ids.get_mut(id as usize).and_then(|ctx| ctx.handle.replace(handle));
        if let Some(old) = old {
            self.keys.remove(&old.key());
        }
    }

    pub(crate) fn add_member(&mut self, member: Member<B>) -> u32 {
        self.members.insert(member) as u32
    }

    /// A membership.
    ///
    /// # Errors
    /// ENOENT when there is none of this number.
    pub(crate) fn member(&self, member: u32) -> Result<&Member<B>> {
        self.members.get(member as usize).ok_or(Errno::NOENT)
    }

    /// Takes a membership out.
    pub(crate) fn remove_member(&mut self, member: u32) -> Member<B> {
        self.members.remove(member as usize)
    }

    /// Destroys an id of a channel and returns how many of its events were taken.
    ///
    /// # Errors
    /// Like [`Ucma::get`].
    pub(crate) fn destroy(&mut self, fd: RawFd, id: u32) -> Result<u32> {
        self.get(fd, id)?;
        self.remove(id).ok_or(Errno::NOENT)
    }

    /// Removes an id with its connection and events. Requests that the program has not fetched are removed with their
    /// listener.
    fn remove(&mut self, id: u32) -> Option<u32> {
        let ctx = self.ids.try_remove(id as usize)?;
        if let Some(handle) = &ctx.handle {
            self.keys.remove(&handle.key());
        }
        if ctx.bound {
            self.ports.release(ctx.space as u16, ctx.local.port(), id);
        }
        self.members.retain(|_, member| member.id != id);
        // The number may be another id's soon.
        self.retries.retain(|(_, waiting)| *waiting != id);
        let events = self.retract(ctx.channel, |e| e.id == id || e.request == Some(id));
        let reported = ctx.reported;
        drop(ctx);
        for request in events.iter().filter_map(|e| e.request) {
            self.remove(request);
        }
        Some(reported)
    }

    /// Queues an event of an id, unless librdmacm does not know the id yet (`ucma_event_handler`).
    pub(crate) fn report_event(&mut self, id: u32, event: &Event) {
        let Some(ctx) = self.ids.get(id as usize).filter(|ctx| ctx.uid != 0) else {
            return;
        };
        if event.status != 0 {
            tracing::info!("{}", event.failure(&ctx.local, &ctx.remote));
        }
        self.queue(ctx.channel, Queued::new(id, event.emit_for(ctx, id)));
    }

    /// Queues a connect request: `request` came to `listener`.
    pub(crate) fn report_request(&mut self, listener: u32, request: u32, event: &Event) {
        let Some(ctx) = self.ids.get(listener as usize) else {
            return;
        };
        let event = Queued {
            request: Some(request),
            ..Queued::new(listener, event.emit_for(ctx, request))
        };
        self.queue(ctx.channel, event);
    }

    /// Queues an event of a membership.
    pub(crate) fn report_member(&mut self, member: u32, event: &Event) {
        let Ok(m) = self.member(member) else { return };
        let Some(ctx) = self.ids.get(m.id as usize) else { return };
        let event = Queued {
            member: Some(member),
            ..Queued::new(m.id, event.emit(m.uid, member, true))
        };
        self.queue(ctx.channel, event);
    }

    fn queue(&self, fd: RawFd, event: Queued) {
        if let Some(channel) = self.channels.get(&fd) {
            channel.push(event);
        }
    }

    /// Takes the oldest event of a channel.
    pub(crate) fn take_event(&mut self, fd: RawFd) -> Option<EventResp> {
        let event = self.channels.get(&fd)?.take(false, |_| ()).ok()?.ok()?;
        if let Some(ctx) = self.ids.get_mut(event.id as usize) {
            ctx.reported += 1;
        }
        if let Some(member) = event.member.and_then(|m| self.members.get_mut(m as usize)) {
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
    pub(crate) fn retract(&self, fd: RawFd, which: impl Fn(&Queued) -> bool) -> Vec<Queued> {
        let channel = self.channels.get(&fd);
        channel.map_or_else(Vec::new, |c| c.purge(|| (), which))
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
            if let Some(request) = event.request.and_then(|r| self.ids.get_mut(r as usize)) {
                request.channel = to;
            }
            self.queue(to, event);
        }
        Ok(reported)
    }

    /// Reports to every id with a device that the transport has stopped.
    pub(crate) fn device_gone(&mut self) {
        for id in self.ids_with(|ctx| ctx.cma_dev.is_some()) {
            self.report_event(id, &Event::new(EventType::DeviceRemoval));
        }
    }

    /// Changes a port's owner as its id changed.
    pub(crate) fn update_owner(&mut self, id: u32) {
        let Some(ctx) = self.ids.get(id as usize).filter(|c| c.bound) else {
            return;
        };
        let (space, remote): (u16, Addr) = (ctx.space as u16, ctx.remote);
        let local = ctx.cma_dev.map_or_else(|| ctx.local.at_any(), |_| ctx.local);
        let (reuse, afonly) = (ctx.reuse, ctx.afonly);
        self.ports.update(space, local.port(), id, |o| {
            (o.local, o.remote, o.reuse) = (local, remote, reuse);
            o.afonly = afonly.unwrap_or(o.afonly);
        });
    }

    /// Events waiting in a channel.
    #[cfg(test)]
    pub(crate) fn waiting(&self, fd: RawFd) -> usize {
        self.channels.get(&fd).map_or(0, EventQueue::len)
    }
}
