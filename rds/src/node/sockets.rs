//! Calls for sockets. None waits.

use core::net::SocketAddr;

use super::Node;
use crate::{
    addr::{check_peer, is_unicast},
    conn::{Outgoing, Prepared, Ticket},
    error::Error,
    key::PairKey,
    proto::{Extension, MAX_MESSAGE},
    rdma::{Attachment, Operation, OperationFlags, RdmaStatus},
    socket::{Message, Readiness, Received, Socket, SocketId},
};

/// Lowest port that a socket may have: 0 is the ping's, 1 the node's.
const LOWEST_PORT: u16 = 2;

/// Address without the interface: a node has each address once.
fn unscoped(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip(), addr.port())
}

impl Node {
    /// Creates a socket.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn socket(&mut self) -> Result<SocketId, Error> {
        if self.sockets.len() >= self.config.max_sockets {
            return Err(Error::Limit);
        }
        let id = self.sockets.insert(Socket::new(&self.config));
        Ok(SocketId(id as u32))
    }

    pub(super) fn get(&mut self, id: SocketId) -> Result<&mut Socket, Error> {
        self.sockets.get_mut(id.0 as usize).ok_or(Error::BadSocket)
    }

    /// Closes a socket. Its messages that were not acknowledged may or may not have come: those for peers to which there is no link are
    /// dropped.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn close(&mut self, id: SocketId) -> Result<(), Error> {
        self.get(id)?;
        for connection in self.connections.values_mut() {
            match connection.phase.link() {
                Some(_) => connection.queue.orphan(id),
                None => connection.queue.cancel(id, None, |_| {}),
            }
        }
        for (_, link) in &mut self.links {
            link.operations.forget(id);
        }
        self.free_regions_of(id);
        self.release_port(id)?;
        let socket = self.sockets.remove(id.0 as usize);
        self.was_read(socket.unread());
        Ok(())
    }

    /// Socket that has a port.
    pub fn bound_to(&self, addr: SocketAddr) -> Option<SocketId> {
        self.bound.get(&unscoped(addr)).copied()
    }

    /// Frees the port of a socket whose program can't receive any more. Messages that it has sent still leave, in its name.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn release_port(&mut self, id: SocketId) -> Result<(), Error> {
        let (bound, freed) = self.get(id)?.stop_receiving();
        if let Some(bound) = bound.filter(|bound| self.bound.get(bound) == Some(&id)) {
            self.bound.remove(&bound);
            self.port_changed(bound, freed);
        }
        Ok(())
    }

    /// Binds a socket to an address of the node. Port 0: a free one, which `random` chooses. Returns the address.
    ///
    /// # Errors
    /// [`Error::Invalid`] of an address that is none, of port 1, and of a socket that is bound; [`Error::NotOurs`];
    /// [`Error::InUse`].
    pub fn bind(&mut self, id: SocketId, to: SocketAddr, random: u16) -> Result<SocketAddr, Error> {
        if self.get(id)?.bound.is_some() || !is_unicast(to.ip()) || to.port() == 1 {
            return Err(Error::Invalid);
        }
        if !self.addrs.contains(&to.ip()) {
            return Err(Error::NotOurs);
        }
        let mut bound = unscoped(to);
        let free = |port: &u16| *port >= LOWEST_PORT && !self.bound.contains_key(&SocketAddr::new(to.ip(), *port));
        let port = match to.port() {
            0 => (0..=u16::MAX).map(|n| random.wrapping_add(n)).find(free),
            port => Some(port).filter(free),
        };
        bound.set_port(port.ok_or(Error::InUse)?);
        self.bound.insert(bound, id);
        self.get(id)?.bound = Some(bound);
        Ok(bound)
    }

    /// Sets where a socket's messages go that name no destination. It does not limit whose messages come.
    ///
    /// # Errors
    /// [`Error::NoAddress`], [`Error::Invalid`].
    pub fn connect(&mut self, id: SocketId, to: SocketAddr) -> Result<(), Error> {
        check_peer(to)?;
        self.get(id)?.peer = Some(to);
        Ok(())
    }

    /// Address of a socket, and that of [`connect`](Self::connect).
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn names(&self, id: SocketId) -> Result<(Option<SocketAddr>, Option<SocketAddr>), Error> {
        let socket = self.sockets.get(id.0 as usize).ok_or(Error::BadSocket)?;
        Ok((socket.bound, socket.peer))
    }

    /// Sets the type of service, once, of a socket that is bound and has sent nothing.
    ///
    /// # Errors
    /// [`Error::State`] of a socket that is not bound, [`Error::Invalid`] of another.
    pub fn set_tos(&mut self, id: SocketId, tos: u8) -> Result<(), Error> {
        let socket = self.get(id)?;
        if socket.bound.is_none() {
            return Err(Error::State);
        }
        if core::mem::replace(&mut socket.tos_is_fixed, true) {
            return Err(Error::Invalid);
        }
        socket.tos = tos;
        Ok(())
    }

    /// Sets the buffer sizes, effective bytes; `None`: as before.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_buffers(&mut self, id: SocketId, send: Option<usize>, recv: Option<usize>) -> Result<(), Error> {
        let socket = self.get(id)?;
        socket.send_buffer = send.unwrap_or(socket.send_buffer);
        socket.recv_buffer = recv.unwrap_or(socket.recv_buffer);
        Ok(())
    }

    /// Switches reports of ports that refused the socket and are free again on or off (`RDS_CONG_MONITOR`).
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn set_congestion_monitor(&mut self, id: SocketId, on: bool) -> Result<(), Error> {
        self.get(id)?.set_monitor(on);
        Ok(())
    }

    /// Queues a message, to where the socket is connected if no destination is named. That there is no connection is no error: it is begun.
    ///
    /// # Errors
    /// [`Error::NotConnected`], [`Error::Family`], [`Error::TooLong`], [`Error::Congested`], [`Error::WouldBlock`],
    /// [`Error::Limit`].
    pub fn send(&mut self, id: SocketId, to: Option<SocketAddr>, data: &[u8]) -> Result<(), Error> {
        self.send_with(id, to, data, Attachment::Nothing)
    }

    /// Queues a message with memory of ours that the receiver may use, or with an operation that is done before the message arrives.
    ///
    /// Messages with an operation are not sent again over another connection: the operation is reported as
    /// [`Dropped`](crate::RdmaStatus::Dropped) then.
    ///
    /// # Errors
    /// As [`send`](Self::send), and those of the operation: [`Error::TooLong`], [`Error::Invalid`], [`Error::Fault`];
    /// [`Error::WouldBlock`] also while the socket has [`Config::max_operations`](crate::Config::max_operations);
    /// [`Error::Unsupported`] for atomics on memory of this node's own process.
    pub fn send_with(
        &mut self,
        id: SocketId,
        to: Option<SocketAddr>,
        data: &[u8],
        attachment: Attachment,
    ) -> Result<(), Error> {
        let (_, to) = self.route(id, to, data.len())?;
        self.check_congestion(id, to)
            .inspect_err(|_| self.note_congestion(false))?;
        self.queue_with(id, Some(to), data, attachment)
    }

    /// Returns from where to where a message goes.
    fn route(&mut self, id: SocketId, to: Option<SocketAddr>, len: usize) -> Result<(SocketAddr, SocketAddr), Error> {
        let socket = self.get(id)?;
        let (from, to) = socket.bound.zip(to.or(socket.peer)).ok_or(Error::NotConnected)?;
        if from.is_ipv4() != to.is_ipv4() {
            return Err(Error::Family);
        }
        if len > socket.send_buffer || len > MAX_MESSAGE as usize {
            return Err(Error::TooLong);
        }
        Ok((from, unscoped(to)))
    }

    /// Checks whether the port of a destination is congested. If it is, the socket is a waiting one from now on: it is told when ports are
    /// free.
    ///
    /// # Errors
    /// [`Error::Congested`].
    pub fn check_congestion(&mut self, id: SocketId, to: SocketAddr) -> Result<(), Error> {
        let is_ours = self.addrs.contains(&to.ip());
        let maps = if is_ours { &self.maps } else { &self.peers };
        if maps.get(&to.ip()).is_some_and(|map| map.is_congested(to.port())) {
            let maps = self.maps_received;
            self.get(id)?.refused_by(to.port(), maps);
            for connection in self.connections.values_mut().filter(|c| c.key.remote == to.ip()) {
                connection.map_wanted = true;
                self.dirty.insert(connection.key);
            }
            return Err(Error::Congested);
        }
        Ok(())
    }

    /// Counts a program that has been refused for congestion, or waits.
    pub fn note_congestion(&mut self, waits: bool) {
        match waits {
            true => self.counters.cong_send_blocked += 1,
            false => self.counters.cong_send_error += 1,
        }
    }

    /// Returns whether some port is congested, of peers or of this node.
    pub fn some_port_is_congested(&self) -> bool {
        !self.congested.is_empty()
    }

    /// Queues a message whatever the state of the destination's port, which was asked for earlier.
    ///
    /// # Errors
    /// As of [`send`](Self::send), without [`Error::Congested`].
    pub fn queue(&mut self, id: SocketId, to: Option<SocketAddr>, data: &[u8]) -> Result<(), Error> {
        self.queue_with(id, to, data, Attachment::Nothing)
    }

    /// Queues a message with what goes with it, whatever the state of the destination's port.
    ///
    /// # Errors
    /// As of [`send_with`](Self::send_with), without [`Error::Congested`].
    pub fn queue_with(
        &mut self,
        id: SocketId,
        to: Option<SocketAddr>,
        data: &[u8],
        attachment: Attachment,
    ) -> Result<(), Error> {
        let (from, to) = self.route(id, to, data.len())?;
        let socket = self.get(id)?;
        let operates = matches!(attachment, Attachment::Operation(_));
        if let Attachment::Operation(operation) = &attachment {
            operation.check()?;
        }
        let operation = match &attachment {
            Attachment::Operation(operation) => Some((operation.kind, operation.bytes())),
            _ => None,
        };
        if socket.unacked >= socket.send_buffer || operates && socket.is_operating_fully() {
            self.counters.send_queue_full += 1;
            return Err(Error::WouldBlock);
        }
        let tos = socket.tos;
        socket.tos_is_fixed = true;
        if self.addrs.contains(&to.ip()) {
            self.send_here(id, (from, to), data, &attachment)?;
            self.counters.count_queued(data.len(), operation);
            return Ok(());
        }
        let key = PairKey {
            local: from.ip(),
            remote: to.ip(),
            tos,
        };
        let (ports, len) = ((from.port(), to.port()), data.len());
        let socket = self.get(id)?;
        let is_half_full = socket.unacked + len >= socket.send_buffer / 2;
        let message = outgoing((id, socket), ports, data, attachment);
        let connection = self.connection(key).ok_or(Error::Limit)?;
        connection.queue.push(message, is_half_full);
        let socket = self.get(id)?;
        socket.unacked += len;
        socket.operations += usize::from(operates);
        self.counters.count_queued(len, operation);
        self.dirty.insert(key);
        Ok(())
    }

    /// Delivers a message to another socket of this node, after its operation.
    fn send_here(
        &mut self,
        id: SocketId,
        (from, to): (SocketAddr, SocketAddr),
        data: &[u8],
        attachment: &Attachment,
    ) -> Result<(), Error> {
        let mut cookie = None;
        match attachment {
            Attachment::Nothing => {}
            Attachment::Cookie(of) => cookie = Some(*of),
            Attachment::Operation(operation) => {
                if self.unread + data.len() > self.config.max_unread {
                    self.starved.push(id);
                    return Err(Error::WouldBlock);
                }
                let is_done = self.operate_here(id, to, operation)?;
                if !is_done || operation.flags.contains(OperationFlags::SILENT) && data.is_empty() {
                    return Ok(());
                }
            }
        }
        let (from, to, data) = match to.port() {
            // A ping.
            0 => {
                self.counters.recv_ping += 1;
                self.counters.send_pong += 1;
                (to, from, Vec::new())
            }
            _ => (from, to, data.to_vec()),
        };
        let message = Message {
            from,
            data,
            cookie,
            sequence: 0,
        };
        self.deliver(to, message).map_err(|_| {
            self.starved.push(id);
            Error::WouldBlock
        })
    }

    /// Bytes of a socket were read, or are gone with it.
    fn was_read(&mut self, len: usize) {
        self.unread -= len;
        self.counters.recv_bytes_freed_fromsock += len as u64;
        self.dirty.append(&mut self.stalled);
        for id in core::mem::take(&mut self.starved) {
            if let Some(socket) = self.sockets.get_mut(id.0 as usize) {
                Self::tell(&mut self.out, (id, socket));
            }
        }
    }

    /// Receives what is next.
    ///
    /// # Errors
    /// [`Error::WouldBlock`].
    pub fn receive(&mut self, id: SocketId) -> Result<Received, Error> {
        let received = self.take(id)?;
        if let Received::Message(message) = &received {
            self.read(id, message.data.len())?;
        }
        Ok(received)
    }

    /// Takes what is next on behalf of a program that has not read it: a message counts for congestion until [`read`](Self::read).
    ///
    /// # Errors
    /// [`Error::WouldBlock`].
    pub fn take(&mut self, id: SocketId) -> Result<Received, Error> {
        let received = self.get(id)?.pop().ok_or(Error::WouldBlock)?;
        if let Received::Message(message) = &received {
            self.counters.recv_delivered += 1;
            self.counters.copy_to_user += message.data.len() as u64;
        }
        Ok(received)
    }

    /// So many bytes of messages that were [taken](Self::take) are read.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn read(&mut self, id: SocketId, len: usize) -> Result<(), Error> {
        let socket = self.get(id)?;
        let bound = socket.bound;
        let (len, change) = socket.read(len);
        self.was_read(len);
        if let Some(bound) = bound {
            self.port_changed(bound, change);
        }
        Ok(())
    }

    /// Returns what is next, and leaves it there.
    ///
    /// # Errors
    /// [`Error::WouldBlock`].
    pub fn peek(&mut self, id: SocketId) -> Result<Received, Error> {
        self.get(id)?.peek().ok_or(Error::WouldBlock)
    }

    /// Returns whether a socket's send buffer has room.
    pub fn is_writable(&self, id: SocketId) -> bool {
        let socket = self.sockets.get(id.0 as usize);
        socket.is_some_and(|socket| socket.unacked < socket.send_buffer && !socket.is_operating_fully())
    }

    /// Returns what a socket can do without waiting. From now on [`Output::Changed`](super::Output::Changed) tells of changes.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn poll(&mut self, id: SocketId) -> Result<Readiness, Error> {
        let maps = self.maps_received;
        Ok(self.get(id)?.poll(maps))
    }

    /// Messages of a socket that peers have not acknowledged, and operations of it that devices work on.
    ///
    /// # Errors
    /// [`Error::BadSocket`].
    pub fn unacked(&mut self, id: SocketId) -> Result<usize, Error> {
        let of = |connection: &crate::conn::Connection| connection.queue.messages_of(id);
        let operations = self.operating(id)?;
        Ok(self.connections.values().map(of).sum::<usize>() + operations)
    }

    /// Drops a socket's messages to an address that were not acknowledged (`RDS_CANCEL_SENT_TO`). They may or may not have come. Of their
    /// operations those that have begun are still done: [`operating`](Self::operating) says until when their memory is used.
    ///
    /// # Errors
    /// [`Error::NotConnected`] of a socket that is not bound.
    pub fn cancel_sent_to(&mut self, id: SocketId, to: SocketAddr) -> Result<(), Error> {
        self.get(id)?.bound.ok_or(Error::NotConnected)?;
        let socket = &mut self.sockets[id.0 as usize];
        for connection in self.connections.values_mut().filter(|c| c.key.remote == to.ip()) {
            connection.queue.cancel(id, Some(to.port()), |message| {
                socket.unacked -= message.data.len();
                if let Some(ticket) = message.ticket() {
                    socket.operation_ended(ticket.notice(RdmaStatus::Canceled));
                }
            });
        }
        for (_, link) in self.links.iter_mut().filter(|(_, link)| link.key.remote == to.ip()) {
            for ticket in link.operations.cancel(id, to.port()) {
                socket.operation_ended(ticket.notice(RdmaStatus::Canceled));
            }
        }
        Self::tell(&mut self.out, (id, socket));
        Ok(())
    }
}

/// Returns a message of a socket with what goes with it.
fn outgoing((id, socket): (SocketId, &Socket), ports: (u16, u16), data: &[u8], attachment: Attachment) -> Outgoing {
    let mut message = Outgoing::new(Some(id), ports, data.into());
    match attachment {
        Attachment::Nothing => {}
        Attachment::Cookie(cookie) => message.extend(Extension::RdmaDest(cookie)),
        Attachment::Operation(operation) => {
            let Operation {
                cookie, flags, token, ..
            } = *operation;
            if !operation.kind.is_atomic() {
                message.extend(Extension::Rdma { rkey: cookie.rkey() });
            }
            message.is_silent = flags.contains(OperationFlags::SILENT) && data.is_empty();
            let on_success = flags.contains(OperationFlags::NOTIFY);
            let ticket = Ticket {
                socket: id,
                port: ports.1,
                token,
                on_success,
                on_failure: on_success || socket.reports_errors,
            };
            message.operation = Some(Box::new(Prepared {
                operation: *operation,
                ticket: Some(ticket),
            }));
        }
    }
    message
}
