//! An NBD client's socket.

mod secure;

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
};

use mio::Interest;
use rnbd::{
    block::{Completion, Geometry},
    client::{Opener, output::DeviceKey},
    nbd::{self, Backend, Connection, End, Export, Exports, Phase, RequestPart, TlsMode, Want},
};
use roce::reactor::Readiness;
use roce_verbs::Instant;
use rtrs::client::Buffers;
use smallvec::SmallVec;
use socket2::Socket;

use crate::{
    front::FrontEnd,
    iov::{self, Piece},
    tls::{Session, Tls},
};

/// Bytes of a local client's send buffer, as far as the system allows. That of TCP grows as the network needs it.
const SEND_BUFFER: usize = 1 << 20;

/// A client.
#[derive(Debug)]
pub(crate) struct NbdSocket {
    stream: Socket,
    /// Names it in the accept path.
    pub(crate) id: u64,
    /// Its address, if it has come by TCP.
    peer: Option<SocketAddr>,
    pub(crate) connection: Connection,
    /// TLS to begin with, if it may.
    tls: Option<Tls>,
    /// TLS has begun: all that the socket brings and takes goes through this.
    session: Option<Box<Session>>,
    readable: bool,
    writable: bool,
    /// Room to write is watched for. Else each reply that a client reads would wake the loop.
    watches_room: bool,
    /// The client sends no more, so that nothing will tell of what a short read has left.
    closed: bool,
    /// No buffer could be had for it.
    pub(crate) starved: bool,
    /// Half-open, it has sent something and waits for its turn.
    pub(crate) queued: bool,
    /// The devices behind its exports, by their numbers.
    devices: Vec<DeviceKey>,
    /// The device that it has chosen, once it counts as a user of that.
    pub(crate) opener: Option<Opener>,
    /// It is let go, and cut off then.
    until: Option<Instant>,
    /// It was.
    is_cut: bool,
    /// The socket takes nothing any more.
    is_broken: bool,
}

impl NbdSocket {
    /// A client, by its connection and number, that finds these exports, which are those of these devices.
    pub(crate) fn new(
        now: Instant,
        (stream, id): (Socket, u64),
        tls: Option<Tls>,
        exports: Exports,
        devices: Vec<DeviceKey>,
    ) -> Self {
        let peer = stream.peer_addr().ok().and_then(|peer| peer.as_socket());
        if peer.is_none() {
            // Several long replies fit, so that the client can read one while the next is on its way.
            if let Err(e) = stream.set_send_buffer_size(SEND_BUFFER) {
                tracing::debug!("the send buffer of an NBD client stays as it is: {e}");
            }
        }
        let mode = tls.as_ref().map_or(TlsMode::Off, Tls::mode);
        Self {
            stream,
            id,
            peer,
            connection: Connection::with_tls(now, exports, mode),
            tls,
            session: None,
            readable: true,
            writable: true,
            watches_room: false,
            closed: false,
            starved: false,
            queued: false,
            devices,
            opener: None,
            until: None,
            is_cut: false,
            is_broken: false,
        }
    }

    /// Returns the client's address, as the beginning of a sentence.
    pub(crate) fn origin(&self) -> String {
        self.peer.map_or_else(String::new, |peer| format!("{peer}: "))
    }

    /// The device that it has chosen.
    pub(crate) fn device(&self) -> Option<DeviceKey> {
        self.connection
            .export()
            .and_then(|index| self.devices.get(index).copied())
    }

    fn export_of(&self, device: DeviceKey) -> Option<usize> {
        self.devices.iter().position(|key| *key == device)
    }

    /// One more that it can choose.
    pub(crate) fn offer(&mut self, device: DeviceKey, export: Export) {
        self.devices.push(device);
        self.connection.offer(export);
    }

    /// It can't choose this one any more.
    pub(crate) fn withdraw(&mut self, device: DeviceKey) {
        if let Some(export) = self.export_of(device) {
            self.connection.withdraw(export);
        }
    }

    /// A device is another one than it was.
    pub(crate) fn set_geometry(&mut self, device: DeviceKey, geometry: Geometry) {
        if let Some(export) = self.export_of(device) {
            self.connection.set_geometry(export, geometry);
        }
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(crate) fn ready(&mut self, readiness: Readiness) {
        self.readable |= readiness.readable || readiness.closed;
        self.writable |= readiness.writable || readiness.closed;
        self.closed |= readiness.closed;
    }

    /// Returns the interest to watch for from here on, if it has changed.
    pub(crate) fn other_interest(&mut self) -> Option<Interest> {
        let blocked = !self.writable && self.has_output();
        if blocked == self.watches_room {
            return None;
        }
        self.watches_room = blocked;
        Some(match blocked {
            true => Interest::READABLE | Interest::WRITABLE,
            false => Interest::READABLE,
        })
    }

    /// Whether there is something to send.
    fn has_output(&self) -> bool {
        self.connection.has_output() || self.session.as_ref().is_some_and(|session| session.has_output())
    }

    /// It could read or write at once.
    pub(crate) fn has_work(&mut self) -> bool {
        (self.writable && self.has_output()) || self.can_read()
    }

    /// It has sent something, as far as is known, that can be read.
    pub(crate) fn can_read(&mut self) -> bool {
        let unread = self.session.as_ref().is_some_and(|session| session.has_unread());
        (self.readable || unread) && (self.in_handshake() || !matches!(self.connection.want(), Want::Nothing(_)))
    }

    /// It does not use a device yet.
    pub(crate) fn is_half_open(&self) -> bool {
        self.opener.is_none()
    }

    /// It has chosen a device, which it has not been given yet.
    pub(crate) fn waits_for_device(&self) -> bool {
        self.is_half_open() && self.device().is_some()
    }

    /// Whether the next bytes are for the handshake of TLS.
    fn in_handshake(&self) -> bool {
        self.session.is_some() && self.connection.phase() == Phase::Handshake
    }

    /// Nothing is under way, and nothing left that the client would take: its socket may be closed.
    pub(crate) fn is_over(&self) -> bool {
        let Some(end) = self.connection.ended() else {
            return false;
        };
        // Nobody waits for what is to tell why.
        let given_up = self.is_broken || self.is_cut || matches!(end, End::Broken | End::TimedOut | End::Tls(_));
        given_up || !self.has_output()
    }

    /// It is let go: it can send no more, what lies in the socket is read to its end, and it has until then to take its replies.
    pub(crate) fn let_go(&mut self, until: Instant) {
        if self.until.is_none() {
            let _ = self.stream.shutdown(std::net::Shutdown::Read);
            self.readable = true;
            self.until = Some(until);
        }
    }

    /// Whether its time is over. That is said once.
    pub(crate) fn is_late(&mut self, now: Instant) -> bool {
        let late = self.until.is_some_and(|until| until <= now) && !self.is_cut;
        self.is_cut |= late;
        late
    }

    /// When it wants to be looked at.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let until = self.until.filter(|_| !self.is_cut);
        [self.connection.next_timeout(), until].into_iter().flatten().min()
    }

    /// Reads once. The bytes it got, 0 at the end of the stream; `None`: there is nothing to read, or it does not want to.
    pub(crate) fn read(&mut self, now: Instant, backend: &mut dyn Backend) -> Option<usize> {
        if self.session.is_some() {
            return self.read_secured(now, backend);
        }
        if !self.readable {
            return None;
        }
        let (received, wanted) = match self.connection.want() {
            Want::Bytes(room) => (iov::receive(&self.stream, None, room), room.len()),
            Want::Payload { buffer, at, len, then } => {
                let (pages, start) = backend.buffers()?.pages(buffer)?;
                let piece = Piece::pages(pages, start + at, len);
                let wanted = len + then.len();
                (iov::receive(&self.stream, Some(piece), then), wanted)
            }
            Want::Nothing(_) => return None,
        };
        let n = match self.received(now, received, wanted, backend) {
            Received::Bytes(n) => n,
            Received::Nothing => return None,
            Received::Again => return Some(0),
        };
        match n {
            0 => self.connection.eof(now, backend),
            n => self.connection.received(now, n, backend),
        }
        Some(n)
    }

    /// Handles the result of a call that was to receive so many bytes.
    fn received(
        &mut self,
        now: Instant,
        received: io::Result<usize>,
        wanted: usize,
        backend: &mut dyn Backend,
    ) -> Received {
        match received {
            Ok(n) => {
                // A stream that gave less than was asked for is empty; it will be told when there is more.
                self.readable = n > 0 && (self.closed || n >= wanted);
                Received::Bytes(n)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Received::Nothing
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Received::Again,
            Err(e) => {
                self.fail(now, &e, backend);
                Received::Again
            }
        }
    }

    /// The socket has failed.
    fn fail(&mut self, now: Instant, e: &io::Error, backend: &mut dyn Backend) {
        tracing::debug!("NBD client: {}{e}", self.origin());
        (self.readable, self.writable, self.is_broken) = (false, false, true);
        self.connection.cut(now, backend);
    }

    /// Sends once. Bytes that went, and that were to go.
    fn send(&self, buffers: Option<&Buffers>, most: usize) -> (io::Result<usize>, usize) {
        let mut pieces = Vec::new();
        self.connection.gather(&mut pieces);
        let mut raw: SmallVec<[Piece<'_>; 16]> = SmallVec::new();
        let mut total = 0;
        for piece in pieces.iter().filter_map(|piece| locate(piece, buffers)) {
            if total >= most {
                break;
            }
            total += piece.len();
            raw.push(piece);
        }
        (iov::send(&self.stream, &raw), total)
    }

    /// Sends what there is to send, as far as the socket takes it, until it is `most` bytes or somewhat more. Returns whether
    /// anything went.
    pub(crate) fn write(&mut self, now: Instant, backend: &mut dyn Backend, most: usize) -> bool {
        if self.session.is_some() {
            return self.write_secured(now, backend, most);
        }
        let mut sent = 0;
        while self.writable && self.connection.has_output() && sent < most {
            let (done, total) = self.send(backend.buffers().as_deref(), most);
            match done {
                Ok(n) => {
                    sent += n;
                    self.writable = n >= total;
                    self.connection.sent(now, n, backend);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.fail(now, &e, backend);
                    return true;
                }
            }
        }
        if self.connection.wants_tls() {
            self.begin_tls(now, backend);
        }
        sent > 0
    }
}

impl FrontEnd<dyn Backend + '_> for NbdSocket {
    type Request = RequestPart;

    fn complete(
        &mut self,
        now: Instant,
        request: RequestPart,
        completion: Completion,
        backend: &mut (dyn Backend + '_),
    ) {
        self.connection.done(now, request, completion, backend);
    }
}

/// Result of a receiving call.
enum Received {
    /// Bytes; none at the end of the stream.
    Bytes(usize),
    /// Nothing: more will be told.
    Nothing,
    /// Nothing, but that may be otherwise at once.
    Again,
}

/// Returns the memory of a piece.
fn locate<'a>(piece: &nbd::Piece<'a>, buffers: Option<&'a Buffers>) -> Option<Piece<'a>> {
    match piece {
        nbd::Piece::Bytes(bytes) => Some(Piece::of(bytes)),
        nbd::Piece::Data { buffer, at, len } => {
            let (pages, start) = buffers?.pages(buffer)?;
            Some(Piece::pages(pages, start + at, *len))
        }
    }
}
