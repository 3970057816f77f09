//! A client's socket with TLS: what comes is decrypted on its way to the connection, what goes is copied together and encrypted.

use std::io::{self, IoSlice, Write};

use rnbd::nbd::{self, Backend, Connection, Want};
use roce_verbs::{Instant, provider::RangeError};
use rtrs::client::Buffers;
use smallvec::SmallVec;
use socket2::Socket;

use super::{NbdSocket, Received};
use crate::{
    iov::{self, Piece},
    tls::{ENCRYPTED, Plain, Tls},
};

impl NbdSocket {
    /// TLS begins.
    pub(super) fn begin_tls(&mut self, now: Instant, backend: &mut dyn Backend) {
        match self.tls.as_ref().map(Tls::session) {
            Some(Ok(session)) => self.session = Some(Box::new(session)),
            Some(Err(e)) => self.connection.tls_failed(now, e.to_string(), backend),
            None => self.connection.tls_failed(now, "it was not offered".into(), backend),
        }
    }

    /// As [`read`](Self::read).
    pub(super) fn read_secured(&mut self, now: Instant, backend: &mut dyn Backend) -> Option<usize> {
        let handshake = self.in_handshake();
        let session = self.session.as_mut()?;
        let mut want = self.connection.want();
        if !handshake && matches!(want, Want::Nothing(_)) {
            return None;
        }
        match session.next() {
            Ok(Plain::Bytes(bytes)) => {
                // What came with the end of the handshake is for the connection only when that is over.
                let taken = if handshake {
                    0
                } else {
                    deliver(&mut want, bytes, backend)?
                };
                session.consume(taken);
                if taken > 0 {
                    self.connection.received(now, taken, backend);
                }
                self.look_established(now, backend);
                Some(taken)
            }
            Ok(Plain::End) => {
                self.look_established(now, backend);
                self.connection.eof(now, backend);
                Some(0)
            }
            Ok(Plain::More) => {
                self.look_established(now, backend);
                self.fill(now, backend)
            }
            Err(e) => {
                self.connection.tls_failed(now, e.to_string(), backend);
                Some(0)
            }
        }
    }

    /// The connection goes on when the handshake is over.
    fn look_established(&mut self, now: Instant, backend: &mut dyn Backend) {
        if self.in_handshake() && self.session.as_ref().is_some_and(|session| !session.is_handshaking()) {
            self.connection.tls_established(now, backend);
        }
    }

    /// Receives what is to be decrypted.
    fn fill(&mut self, now: Instant, backend: &mut dyn Backend) -> Option<usize> {
        if !self.readable {
            return None;
        }
        let session = self.session.as_mut()?;
        let room = session.room();
        let (received, wanted) = (iov::receive(&self.stream, None, room), room.len());
        match self.received(now, received, wanted, backend) {
            Received::Bytes(0) => self.connection.eof(now, backend),
            Received::Bytes(n) => self.session.as_mut()?.filled(n),
            Received::Nothing => return None,
            Received::Again => {}
        }
        // It counts when it is decrypted.
        Some(0)
    }

    /// As [`write`](Self::write). The connection is told that something is sent when it is encrypted: so much, and no more, is on its
    /// way between.
    pub(super) fn write_secured(&mut self, now: Instant, backend: &mut dyn Backend, most: usize) -> bool {
        let (mut moved, mut sent) = (false, 0);
        loop {
            moved |= self.push(now, backend);
            let Some(session) = self.session.as_mut().filter(|session| !session.has_output()) else {
                return moved;
            };
            if self.connection.ended().is_some() {
                // That leaves something to send, once.
                session.close();
                if !session.has_output() {
                    return moved;
                }
                continue;
            }
            if !self.writable || session.is_handshaking() || !self.connection.has_output() || sent >= most {
                return moved;
            }
            let connection = &self.connection;
            match session.encrypt(|out| gather(connection, backend.buffers().as_deref(), out)) {
                Ok(0) => return moved,
                Ok(n) => {
                    (moved, sent) = (true, sent + n);
                    self.connection.sent(now, n, backend);
                }
                Err(e) => {
                    self.fail(now, &e, backend);
                    return true;
                }
            }
        }
    }

    /// Sends what is encrypted, as far as the socket takes it. Returns whether anything went.
    fn push(&mut self, now: Instant, backend: &mut dyn Backend) -> bool {
        let mut moved = false;
        while let Some(session) = self.session.as_mut().filter(|session| session.has_output()) {
            if !self.writable {
                break;
            }
            match session.send(&mut Out(&self.stream)) {
                Ok(n) => moved |= n > 0,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.fail(now, &e, backend);
                    return true;
                }
            }
        }
        moved
    }
}

/// Puts bytes where the connection wants them, as many as it does; how many.
fn deliver(want: &mut Want<'_>, bytes: &[u8], backend: &mut dyn Backend) -> Option<usize> {
    match want {
        Want::Bytes(room) => {
            let n = room.len().min(bytes.len());
            room[..n].copy_from_slice(&bytes[..n]);
            Some(n)
        }
        Want::Payload { buffer, at, len, .. } => {
            let n = bytes.len().min(*len);
            logged(backend.buffers()?.write(buffer, *at, &bytes[..n]));
            Some(n)
        }
        Want::Nothing(_) => Some(0),
    }
}

/// Copies what is to be sent next, so much that it makes whole records.
fn gather(connection: &Connection, buffers: Option<&Buffers>, out: &mut Vec<u8>) {
    let mut pieces = Vec::new();
    connection.gather(&mut pieces);
    for piece in &pieces {
        let (begin, len) = (out.len(), piece.len().min(ENCRYPTED - out.len()));
        match piece {
            nbd::Piece::Bytes(bytes) => out.extend_from_slice(&bytes[..len]),
            nbd::Piece::Data { buffer, at, .. } => {
                let Some(buffers) = buffers else { return };
                out.resize(begin + len, 0);
                logged(buffers.read(buffer, *at, &mut out[begin..]));
            }
        }
    }
}

fn logged(copied: Result<(), RangeError>) {
    if let Err(e) = copied {
        tracing::error!("a copy outside its buffer: {e}");
    }
}

/// A socket to write to, which raises no signal.
struct Out<'a>(&'a Socket);

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        iov::send(self.0, &[Piece::of(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let pieces: SmallVec<[Piece<'_>; 16]> = slices.iter().map(|slice| Piece::of(slice)).collect();
        iov::send(self.0, &pieces)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
