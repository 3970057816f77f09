//! The NBD clients of a mapping.

use std::io;

use mio::{Interest, Token};
use rnbd::{
    Errno,
    client::output::DeviceKey,
    nbd::{End, Export, Exports},
};
use roce::reactor::TurnCx;
use roce_verbs::Instant;
use rtrs::{Error, PathError};
use smallvec::SmallVec;
use socket2::Socket;

use super::{
    FIRST_CLIENT, Service,
    devices::{Device, Stage},
};
use crate::{front::Part, nbd::NbdSocket};

/// Reads from one client's socket in a round.
pub(super) const READS: usize = 16;

/// A device as NBD clients see it, if it has been opened.
fn export(device: &Device) -> Option<Export> {
    Some(Export {
        name: device.what.name.clone(),
        device: device.what.name.clone(),
        description: String::new(),
        geometry: device.geometry?,
    })
}

impl Service {
    /// Takes an accepted client, which finds the devices that are open.
    pub(super) fn admit(&mut self, turn: &mut TurnCx<'_, ()>, stream: Socket, id: u64) {
        if let Err(e) = self.begin(turn, stream, id) {
            self.turn_away(turn.now, &e);
            self.entrance.left(id);
        }
    }

    fn begin(&mut self, turn: &mut TurnCx<'_, ()>, stream: Socket, id: u64) -> io::Result<()> {
        let open = self.devices.iter().filter(|device| device.stage == Stage::Open);
        let (keys, exports): (Vec<_>, Vec<_>) = open.filter_map(|d| Some((d.key, export(d)?))).unzip();
        if keys.is_empty() {
            return Err(io::Error::other("no device is there"));
        }
        let entry = self.clients.vacant_entry();
        let token = Token(FIRST_CLIENT + entry.key());
        let socket = NbdSocket::new(
            turn.now,
            (stream, id),
            self.config.tls.clone(),
            Exports::new(exports),
            keys,
        );
        turn.sockets.register(socket.descriptor(), token, Interest::READABLE)?;
        entry.insert(socket);
        Ok(())
    }

    /// A device can be chosen, also by those who have come already.
    pub(super) fn offer(&mut self, key: DeviceKey) {
        let Some(device) = self.devices.iter().find(|device| device.key == key) else {
            return;
        };
        if let Some(export) = export(device) {
            for (_, client) in &mut self.clients {
                client.offer(key, export.clone());
            }
        }
    }

    /// A device can't be chosen any more, and those who have it go.
    pub(super) fn withdraw(&mut self, now: Instant, key: DeviceKey) {
        let until = now + self.config.grace;
        self.fronts.let_go(Some(key));
        for (_, client) in &mut self.clients {
            client.withdraw(key);
            if client.device() == Some(key) {
                client.let_go(until);
            }
        }
    }

    /// A client or front end no longer uses a device.
    pub(super) fn release(&mut self, device: Option<DeviceKey>) {
        if let Some(device) = device.and_then(|key| self.device(key)) {
            device.users = device.users.saturating_sub(1);
        }
    }

    /// Cuts off clients that have not taken their replies in time after they were released.
    pub(super) fn cut_off(&mut self, now: Instant) {
        let late = self
            .clients
            .iter_mut()
            .filter_map(|(_, client)| client.is_late(now).then_some(client));
        let mut clients = 0;
        for client in late {
            client.connection.cut(now);
            clients += 1;
        }
        if clients > 0 {
            tracing::warn!(clients, "NBD clients did not take their replies in time; cut off");
        }
    }

    /// Everything that a client's socket and its requests need, with so many reads from the socket.
    pub(super) fn serve(&mut self, turn: &mut TurnCx<'_, ()>, index: usize, reads: usize) -> bool {
        let mut worked = false;
        for _ in 0..reads {
            worked |= self.poll_client(turn, index);
            let Some(client) = self.clients.get_mut(index) else {
                return true;
            };
            if self.unread == 0 {
                break;
            }
            let buffers = self.session.and_then(|session| self.rnbd.rtrs().buffers(session));
            match client.read(turn.now, buffers) {
                Some(bytes) => self.unread = self.unread.saturating_sub(bytes),
                None => break,
            }
            worked = true;
        }
        worked |= self.poll_client(turn, index);
        worked
    }

    /// Handles the requests of a connection: buffers, copies, operations.
    fn poll_client(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) -> bool {
        let (Some(session), Some(info)) = (self.session, self.info) else {
            return false;
        };
        self.look_chosen(turn.now, index);
        // All of one size: the pool of the session can't be cut into pieces that are too small. And the messages of the
        // service connection need some as well.
        let size = info.max_io_size as usize;
        let most = (info.queue_depth as usize).saturating_sub(4).max(1);
        let mut worked = false;
        loop {
            let Some(client) = self.clients.get_mut(index) else {
                return true;
            };
            let mut moved = false;
            while let Some(buffer) = client.next_free() {
                moved = true;
                self.rnbd.rtrs_mut().give_buffer(session, buffer);
            }
            if let Some(buffers) = self.rnbd.rtrs().buffers(session) {
                client.copy(buffers);
            }
            while let Some(len) = client.connection.poll_need() {
                let taken = match self.rnbd.rtrs().buffers(session) {
                    Some(buffers) if buffers.lent() < most => {
                        self.rnbd
                            .rtrs_mut()
                            .take_buffer(&mut self.rng.cx(turn), session, size.max(len))
                    }
                    Some(buffers) => Err(Error::NoBuffer {
                        len,
                        limit: buffers.limit(),
                    }),
                    None => Err(Error::Down(PathError::Closed)),
                };
                match taken {
                    Ok(buffer) => {
                        moved = true;
                        client.connection.give(turn.now, buffer);
                    }
                    Err(Error::NoBuffer { .. }) => {
                        client.connection.lack();
                        if !core::mem::replace(&mut client.starved, true) {
                            self.starved.push_back(index);
                        }
                        break;
                    }
                    Err(Error::Down(_)) => client.connection.refuse(turn.now, Errno::ECONNABORTED),
                    Err(e) => {
                        tracing::warn!("no memory for a request: {e}");
                        client.connection.refuse(turn.now, Errno::ENOMEM);
                    }
                }
            }
            while let Some((opener, request)) = client.next_request() {
                moved = true;
                let front = Part::Nbd(index, request.key);
                let forcing = request.forces.then(|| opener.forcing());
                self.rnbd.submit(
                    forcing.as_ref().unwrap_or(opener),
                    front,
                    request.op,
                    request.offset,
                    request.len,
                    request.data,
                    index,
                );
            }
            if !moved {
                return worked;
            }
            worked = true;
        }
    }

    /// Sends replies, and lets go of clients that are done. Returns whether there is more to do for it: what a client has taken
    /// may let its next requests begin, which have been read already, or those of one that waits for a buffer.
    pub(super) fn reply(&mut self, turn: &mut TurnCx<'_, ()>, bytes: usize) -> bool {
        let mut taken: SmallVec<[usize; 8]> = SmallVec::new();
        let mut gone = Vec::new();
        for (index, client) in &mut self.clients {
            let buffers = self.session.and_then(|session| self.rnbd.rtrs().buffers(session));
            if client.write(turn.now, buffers, bytes) {
                taken.push(index);
            }
            if let Some(interest) = client.other_interest() {
                let token = Token(FIRST_CLIENT + index);
                if let Err(e) = turn.sockets.reregister(client.descriptor(), token, interest) {
                    tracing::warn!("an NBD client can't be watched: {e}");
                    client.connection.cut(turn.now);
                }
            }
            while let Some(buffer) = client.next_free() {
                if let Some(session) = self.session {
                    self.rnbd.rtrs_mut().give_buffer(session, buffer);
                }
            }
            if client.is_over() {
                gone.push(index);
            }
        }
        let mut more = !gone.is_empty() || (!taken.is_empty() && !self.starved.is_empty());
        for index in gone {
            self.part(turn, index);
        }
        for index in taken {
            more |= self.poll_client(turn, index);
            more |= self.clients.get_mut(index).is_some_and(NbdSocket::has_work);
        }
        more
    }

    fn part(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) {
        let Some(mut client) = self.clients.try_remove(index) else {
            return;
        };
        while let Some(buffer) = client.next_free() {
            self.give(Some(buffer));
        }
        match client.connection.ended() {
            // That is for its operator to know, or for ours.
            Some(End::Tls(why)) if client.opener.is_none() => {
                let origin = client.origin();
                self.turn_away(turn.now, &io::Error::other(format!("{origin}TLS: {why}")));
            }
            Some(end) if end.is_fault() => tracing::debug!("NBD client: {}{end}", client.origin()),
            _ => {}
        }
        self.starved.retain(|waits| *waits != index);
        self.handshakes.forget(index);
        let _ = turn.sockets.deregister(client.descriptor());
        self.entrance.left(client.id);
        self.release(client.opener.map(|opener| opener.device()));
    }

    /// Clients that found no buffer ask again, in their order.
    pub(super) fn feed(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        for _ in 0..self.starved.len() {
            let Some(index) = self.starved.pop_front() else { break };
            if let Some(client) = self.clients.get_mut(index) {
                client.starved = false;
                worked |= self.poll_client(turn, index);
            }
        }
        worked
    }

    /// A client is rejected, or evicted.
    pub(super) fn turn_away(&mut self, now: Instant, why: &io::Error) {
        self.turned_away += 1;
        if let Some(more) = self.log.pass(now) {
            tracing::warn!(more, "an NBD client is rejected: {why}");
        }
    }
}
