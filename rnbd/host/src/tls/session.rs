//! The TLS of a client's connection.

use std::{
    io::{self, BufRead, Write},
    sync::Arc,
};

use rustls::{ServerConfig, ServerConnection};

/// Received bytes that wait to be decrypted, at most.
const RECEIVED: usize = 64 << 10;
/// Bytes that are encrypted at a time. There are never more on their way to a socket, but for what encryption adds.
pub(crate) const ENCRYPTED: usize = 64 << 10;

/// Decrypted input.
#[derive(Debug)]
pub(crate) enum Plain<'a> {
    /// These bytes; [`consume`](Session::consume) takes them away.
    Bytes(&'a [u8]),
    /// Nothing yet: more is to be received.
    More,
    /// Nothing, and nothing will.
    End,
}

/// The TLS of a client: bytes of its socket in, bytes of it out, and those of NBD between. It holds few of either.
pub(crate) struct Session {
    connection: ServerConnection,
    /// Received, and not decrypted yet.
    received: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes that are decrypted and not taken.
    plain: usize,
    /// The client has said that nothing follows.
    ended: bool,
    /// To be encrypted together.
    gathered: Vec<u8>,
    /// The client was told that nothing follows.
    closed: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

impl Session {
    /// One whose handshake is to come.
    pub(super) fn new(config: Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        let mut connection = ServerConnection::new(config)?;
        // What is encrypted is bounded here.
        connection.set_buffer_limit(None);
        Ok(Self {
            connection,
            received: vec![0; RECEIVED].into_boxed_slice(),
            start: 0,
            end: 0,
            plain: 0,
            ended: false,
            gathered: Vec::new(),
            closed: false,
        })
    }

    /// The handshake is not over.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Whether received data could go on.
    pub(crate) fn has_unread(&self) -> bool {
        self.plain > 0 || self.start < self.end
    }

    /// Returns the room for received data. There is some when [`next`](Self::next) wants more.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        &mut self.received[self.end..]
    }

    /// So many bytes are in the room.
    pub(crate) fn filled(&mut self, n: usize) {
        self.end += n;
    }

    /// Goes on with what has come. While it is shaking hands, there is nothing but [`Plain::More`] and [`Plain::End`].
    ///
    /// # Errors
    /// Those of TLS: what is to be sent then tells the client.
    pub(crate) fn next(&mut self) -> Result<Plain<'_>, rustls::Error> {
        while self.plain == 0 && self.start < self.end {
            let mut rest = &self.received[self.start..self.end];
            let read = self.connection.read_tls(&mut rest);
            self.start += read.map_err(|e| rustls::Error::General(e.to_string()))?;
            let state = self.connection.process_new_packets()?;
            self.plain = state.plaintext_bytes_to_read();
            if state.peer_has_closed() {
                // What follows is not the client's.
                (self.start, self.ended) = (self.end, true);
            }
        }
        if self.plain == 0 {
            return Ok(if self.ended { Plain::End } else { Plain::More });
        }
        match self.connection.reader().into_first_chunk() {
            Ok(bytes) => Ok(Plain::Bytes(bytes)),
            Err(e) => Err(rustls::Error::General(e.to_string())),
        }
    }

    /// The first `n` bytes of what was there are taken.
    pub(crate) fn consume(&mut self, n: usize) {
        self.connection.reader().consume(n);
        self.plain = self.plain.saturating_sub(n);
    }

    /// Encrypts what this gathers, at most [`ENCRYPTED`] bytes; how many that were.
    pub(crate) fn encrypt(&mut self, gather: impl FnOnce(&mut Vec<u8>)) -> io::Result<usize> {
        self.gathered.clear();
        gather(&mut self.gathered);
        self.connection.writer().write_all(&self.gathered)?;
        Ok(self.gathered.len())
    }

    /// Nothing follows: says so to the client, once.
    pub(crate) fn close(&mut self) {
        if !core::mem::replace(&mut self.closed, true) {
            self.connection.send_close_notify();
        }
    }

    /// Whether there is something to send.
    pub(crate) fn has_output(&self) -> bool {
        self.connection.wants_write()
    }

    /// Sends some of it.
    ///
    /// # Errors
    /// Those of `to`.
    pub(crate) fn send(&mut self, to: &mut dyn Write) -> io::Result<usize> {
        self.connection.write_tls(to)
    }
}
