//! The NBD clients of a mapping.

use std::io;

use mio::{Interest, Token};
use rnbd::{
    Errno,
    block::{BlockRequest, Completion},
    client::{Opener, output::DeviceKey},
    nbd::{Backend, End, Export, Exports, Memory, RequestPart},
};
use roce::reactor::TurnCx;
use roce_verbs::Instant;
use rtrs::{
    Cx, Error,
    client::{Buffer, Buffers, SessionId, SessionInfo},
};
use smallvec::SmallVec;
use socket2::Socket;

use super::{
    FIRST_CLIENT, Rnbd, Service,
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
            self.accept_path.left(id);
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

    /// Calls into a client with its backend. Returns the result, and whether it submitted requests; `None`: it is gone.
    pub(super) fn with_client<T>(
        &mut self,
        turn: &mut TurnCx<'_, ()>,
        index: usize,
        f: impl FnOnce(&mut NbdSocket, Instant, &mut ClientBackend<'_>) -> T,
    ) -> Option<(T, bool)> {
        let client = self.clients.get_mut(index)?;
        let now = turn.now;
        let mut backend = ClientBackend {
            client: index,
            opener: client.opener.clone(),
            rnbd: &mut self.rnbd,
            cx: self.rng.cx(turn),
            session: self.session.zip(self.info),
            starved: false,
            worked: false,
        };
        let done = f(client, now, &mut backend);
        let worked = backend.worked;
        if backend.starved && !core::mem::replace(&mut client.starved, true) {
            self.starved.push_back(index);
        }
        Some((done, worked))
    }

    /// Deadlines of clients. Those that have not taken their replies in time after they were released are cut off.
    pub(super) fn client_timeouts(&mut self, turn: &mut TurnCx<'_, ()>) {
        let due = |client: &NbdSocket| client.next_timeout().is_some_and(|at| at <= turn.now);
        let due = self.clients.iter().filter(|(_, client)| due(client));
        let due: SmallVec<[usize; 8]> = due.map(|(index, _)| index).collect();
        let mut cut = 0;
        for index in due {
            self.with_client(turn, index, |client, now, backend| {
                client.connection.timeout(now, backend);
                if client.is_late(now) {
                    client.connection.cut(now, backend);
                    cut += 1;
                }
            });
        }
        if cut > 0 {
            tracing::warn!(clients = cut, "NBD clients did not take their replies in time; cut off");
        }
    }

    /// Serves a client's socket, with so many reads.
    pub(super) fn serve(&mut self, turn: &mut TurnCx<'_, ()>, index: usize, reads: usize) -> bool {
        let mut worked = self.poll_client(turn, index);
        for _ in 0..reads {
            if self.unread == 0 {
                break;
            }
            let read = self.with_client(turn, index, |client, now, backend| client.read(now, backend));
            let Some((Some(bytes), _)) = read else { break };
            self.unread = self.unread.saturating_sub(bytes);
            worked = true;
        }
        worked | self.poll_client(turn, index)
    }

    /// Goes on with what a client has sent: it may have chosen a device, or there may be buffers again.
    fn poll_client(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) -> bool {
        self.look_chosen(turn, index);
        let polled = self.with_client(turn, index, |client, now, backend| client.connection.poll(now, backend));
        polled.is_none_or(|((), worked)| worked)
    }

    /// Sends replies, and removes clients that are over. Returns whether there is more to do: with a reply the next request of the
    /// client may begin, which has been read already, or that of a client that waits for a buffer.
    pub(super) fn reply(&mut self, turn: &mut TurnCx<'_, ()>, bytes: usize) -> bool {
        let (mut sent, mut more) = (false, false);
        let all: SmallVec<[usize; 8]> = self.clients.iter().map(|(index, _)| index).collect();
        for index in all {
            let written = self.with_client(turn, index, |client, now, backend| client.write(now, backend, bytes));
            let Some((wrote, worked)) = written else { continue };
            sent |= wrote;
            more |= worked;
            // An option that was read long ago is looked at when the answers before it have left.
            if self.clients.get(index).is_some_and(NbdSocket::waits_for_device) {
                more |= self.poll_client(turn, index);
            }
            let client = &mut self.clients[index];
            if let Some(interest) = client.other_interest() {
                let token = Token(FIRST_CLIENT + index);
                if let Err(e) = turn.sockets.reregister(client.descriptor(), token, interest) {
                    tracing::warn!("an NBD client can't be watched: {e}");
                    self.with_client(turn, index, |client, now, backend| client.connection.cut(now, backend));
                }
            }
            let client = &mut self.clients[index];
            more |= wrote && client.has_work();
            if client.is_over() {
                self.part(turn, index);
                more = true;
            }
        }
        more || (sent && !self.starved.is_empty())
    }

    fn part(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) {
        let Some(client) = self.clients.try_remove(index) else {
            return;
        };
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
        self.accept_path.left(client.id);
        self.release(client.opener.map(|opener| opener.device()));
    }

    /// Clients that found no buffer try again, in their order.
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
        if let Some(suppressed) = self.log.pass(now) {
            tracing::warn!(suppressed, "an NBD client is rejected: {why}");
        }
    }
}

/// Memory and device of an NBD client, in a turn of the loop.
pub(super) struct ClientBackend<'a> {
    client: usize,
    opener: Option<Opener>,
    rnbd: &'a mut Rnbd,
    cx: Cx<'a>,
    session: Option<(SessionId, SessionInfo)>,
    /// It found no buffer.
    starved: bool,
    /// It got a buffer, or submitted a request.
    worked: bool,
}

impl Memory for ClientBackend<'_> {
    fn take(&mut self, len: usize) -> Result<Option<Buffer>, Errno> {
        let (session, info) = self.session.ok_or(Errno::ECONNABORTED)?;
        // All of one size: the pool of the session can't be cut into pieces that are too small. And the messages of the
        // service connection need some as well.
        let size = len.max(info.max_io_size as usize);
        let most = (info.queue_depth as usize).saturating_sub(4).max(1);
        let lent = self.rnbd.rtrs().buffers(session).map(Buffers::lent);
        let taken = match lent.ok_or(Errno::ECONNABORTED)? < most {
            true => self.rnbd.rtrs_mut().take_buffer(&mut self.cx, session, size),
            false => Err(Error::NoBuffer { len, limit: most }),
        };
        match taken {
            Ok(buffer) => {
                self.worked = true;
                Ok(Some(buffer))
            }
            Err(Error::NoBuffer { .. }) => {
                self.starved = true;
                Ok(None)
            }
            Err(Error::Down(_)) => Err(Errno::ECONNABORTED),
            Err(e) => {
                tracing::warn!("no memory for a request: {e}");
                Err(Errno::ENOMEM)
            }
        }
    }

    fn buffers(&mut self) -> Option<&mut Buffers> {
        let (session, _) = self.session?;
        self.rnbd.rtrs_mut().buffers_mut(session)
    }
}

impl Backend for ClientBackend<'_> {
    fn submit(&mut self, request: BlockRequest<RequestPart>) -> Option<(RequestPart, Completion)> {
        self.worked = true;
        let Some(opener) = &self.opener else {
            return Some((request.user, Completion::new(Err(Errno::ESHUTDOWN), request.data)));
        };
        let client = self.client;
        let request = BlockRequest {
            hint: client,
            ..request.owned_by(|part| Part::Nbd(client, part))
        };
        self.rnbd.submit(opener, request);
        None
    }
}
