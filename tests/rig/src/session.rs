//! Sessions.

use core::fmt;
use std::sync::{
    Arc,
    mpsc::{Receiver, channel},
};

use roce_verbs::mem::Pages;
use roce_verbs::provider::RangeError;
use rtrs::{
    Direction, Error, IoError, PathError,
    client::{Buffer, Client, ConType, SessionConfig, SessionId, SessionInfo, Submission},
};

use crate::host::{Host, Opening, Pending, Seat};

/// How a request ended.
#[derive(Debug)]
pub struct Outcome {
    /// Success, the server's error number, or what broke.
    pub result: Result<(), IoError>,
    /// The request's buffer.
    pub data: Option<IoBuffer>,
}

/// A registered buffer; it goes back when dropped.
pub struct IoBuffer {
    host: Host,
    session: SessionId,
    /// Only gone while it is given away.
    buffer: Option<Buffer>,
    pages: Arc<Pages>,
    start: usize,
}

impl fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoBuffer")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl IoBuffer {
    fn new(host: &Host, client: &Client, session: SessionId, buffer: Buffer) -> Option<Self> {
        let (pages, start) = client.buffers(session)?.pages(&buffer)?;
        Some(Self {
            host: host.weak(),
            session,
            pages: pages.clone(),
            start,
            buffer: Some(buffer),
        })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::len)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn check(&self, offset: usize, len: usize) -> Result<(), RangeError> {
        match offset.checked_add(len).is_some_and(|end| end <= self.len()) {
            true => Ok(()),
            false => Err(RangeError {
                offset,
                len,
                size: self.len(),
            }),
        }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range is outside.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError> {
        self.check(offset, out.len())?;
        self.pages.read(self.start + offset, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range is outside.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        self.check(offset, data.len())?;
        self.pages.write(self.start + offset, data)
    }

    fn take(mut self) -> Option<Buffer> {
        self.buffer.take()
    }
}

impl Drop for IoBuffer {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            let session = self.session;
            self.host.run(move |m, _| m.client.give_buffer(session, buffer));
        }
    }
}

/// A session. Clones are the same; it is closed by [`Session::close`], or with its host.
#[derive(Clone, Debug)]
pub struct Session {
    host: Host,
    id: SessionId,
    info: SessionInfo,
}

impl Session {
    /// Opens a session and waits for that.
    ///
    /// # Errors
    /// Why it can't be opened.
    pub fn open(host: &Host, config: SessionConfig) -> Result<Self, Error> {
        let (tell, opened) = channel();
        let seat = host.ask(move |m, turn| {
            let opening: Opening = Box::new(move |result| {
                let _ = tell.send(result);
            });
            let id = m.with(turn, |client, _, cx| client.open(cx, config))?;
            let seat = Seat {
                opening: Some(opening),
                ..Seat::default()
            };
            m.seats.insert(id, seat);
            Ok::<_, Error>(id)
        });
        let id = seat?;
        let info = opened.recv().expect("opening ends")?;
        Ok(Self {
            host: host.clone(),
            id,
            info,
        })
    }

    /// What it can do.
    pub fn info(&self) -> SessionInfo {
        self.info
    }

    /// Whether requests can be sent.
    ///
    /// # Errors
    /// Why not.
    pub fn state(&self) -> Result<(), PathError> {
        let id = self.id;
        self.host.ask(move |m, _| m.client.state(id))
    }

    /// A buffer of `len` bytes.
    ///
    /// # Errors
    /// When the session's memory is used up.
    pub fn alloc_buffer(&self, len: usize) -> Result<IoBuffer, Error> {
        let (id, host) = (self.id, self.host.weak());
        self.host.ask(move |m, turn| {
            let buffer = m.with(turn, |client, _, cx| client.take_buffer(cx, id, len))?;
            Ok(IoBuffer::new(&host, &m.client, id, buffer).expect("the session has memory"))
        })
    }

    /// Sends a request; `done` is called on the loop.
    pub fn request(
        &self,
        con: ConType,
        direction: Direction,
        header: &[u8],
        data: Option<IoBuffer>,
        done: impl FnOnce(Outcome) + Send + 'static,
    ) {
        let (id, host, header) = (self.id, self.host.weak(), header.into());
        let data = data.and_then(IoBuffer::take);
        self.host.run(move |m, turn| {
            let Some(seat) = m.seats.get_mut(&id) else {
                return done(Outcome {
                    result: Err(IoError::Path(PathError::Closed)),
                    data: None,
                });
            };
            let tag = seat.next_tag;
            seat.next_tag += 1;
            let pending: Pending = Box::new(move |client, result, data| {
                let data = data.and_then(|data| IoBuffer::new(&host, client, id, data));
                done(Outcome { result, data });
            });
            seat.requests.insert(tag, pending);
            let submission = Submission {
                tag,
                con,
                direction,
                header,
                data,
            };
            m.with(turn, |client, _, cx| client.submit(cx, id, submission));
        });
    }

    /// Sends a request; what to wait for.
    pub fn begin(
        &self,
        con: ConType,
        direction: Direction,
        header: &[u8],
        data: Option<IoBuffer>,
    ) -> Receiver<Outcome> {
        let (tell, outcome) = channel();
        self.request(con, direction, header, data, move |o| {
            let _ = tell.send(o);
        });
        outcome
    }

    /// Sends a request and waits for its end.
    pub fn call(&self, con: ConType, direction: Direction, header: &[u8], data: Option<IoBuffer>) -> Outcome {
        self.begin(con, direction, header, data)
            .recv()
            .expect("every request ends")
    }

    /// Ends it and waits for that.
    pub fn close(&self) {
        let (id, (tell, closed)) = (self.id, channel());
        self.host.run(move |m, turn| {
            if let Some(seat) = m.seats.get_mut(&id) {
                seat.on_closed.push(Box::new(move || {
                    let _ = tell.send(());
                }));
                m.with(turn, |client, _, cx| client.close(cx, id));
            }
        });
        // Nothing comes of a session that is gone.
        let _ = closed.recv();
    }
}
