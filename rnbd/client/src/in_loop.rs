//! A disk in a loop of the caller's.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, RawFd},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use rnbd::block::Geometry;
use roce::reactor::{Driven, Handle, Reactor, ReactorConfig, Turned};

use crate::{
    error::OpenError,
    options::DiskOptions,
    request::{Reply, Request},
    service::{Command, DiskService, Status},
};

/// Event of a disk in the caller's loop.
#[derive(Debug)]
pub enum DiskEvent {
    /// Operations are taken from now on.
    Opened(Geometry),
    /// An operation has ended.
    Done {
        /// The caller's number for it.
        user: u64,
        /// The bytes of a read, or the data of a write for reuse; else nothing.
        result: io::Result<Vec<u8>>,
    },
    /// The disk has ended: it could not be opened, was closed, or is lost for good. Nothing follows.
    Closed(Result<(), OpenError>),
}

/// Block device of a server without a thread of its own: a loop of the caller's drives it by one descriptor.
///
/// ```no_run
/// # use std::{os::fd::{AsRawFd, RawFd}, time::Duration};
/// # fn wait_readable(fd: RawFd, timeout: Option<Duration>) {}
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use rnbd_client::{DiskEvent, DiskOptions, Request};
///
/// let mut disk = DiskOptions::new("192.0.2.7".parse()?, "backup", "disk").open_in_loop()?;
/// loop {
///     let timeout = disk.turn()?;
///     while let Some(event) = disk.next_event() {
///         match event {
///             DiskEvent::Opened(_) => disk.submit(1, Request::Read { offset: 0, len: 4096 }),
///             DiskEvent::Done { user: 1, result } => {
///                 println!("{} bytes", result?.len());
///                 disk.close();
///             }
///             DiskEvent::Done { .. } => {}
///             DiskEvent::Closed(result) => return Ok(result?),
///         }
///     }
///     // By poll, epoll, mio or a runtime, next to the caller's own descriptors.
///     wait_readable(disk.as_raw_fd(), timeout);
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct DiskLoop {
    driven: Driven<DiskService>,
    handle: Handle<Command, ()>,
    status: Status,
    opened: Receiver<Result<Geometry, OpenError>>,
    events: VecDeque<DiskEvent>,
    ended: bool,
}

impl DiskOptions {
    /// Begins to open the disk in the caller's loop. [`DiskEvent::Opened`] follows, or [`DiskEvent::Closed`] with the reason.
    ///
    /// Waits for a broker, if there is one ([`share_address`](Self::share_address)).
    ///
    /// # Errors
    /// When our address can't be used.
    pub fn open_in_loop(mut self) -> Result<DiskLoop, OpenError> {
        let device = self.open_device()?;
        let reactor = Reactor::<DiskService>::new(ReactorConfig::default())?;
        let (send, opened) = channel();
        let (handle, status) = (reactor.handle(), Status::default());
        let known = status.clone();
        let on_open = move |result| {
            // The disk may be gone.
            let _ = send.send(result);
        };
        let driven = reactor.drive(device, |turn| DiskService::new(self, known, Box::new(on_open), turn))?;
        Ok(DiskLoop {
            driven,
            handle,
            status,
            opened,
            events: VecDeque::new(),
            ended: false,
        })
    }
}

impl DiskLoop {
    /// Runs one turn, without waiting. Returns how long the caller may wait for the descriptor before the next; `None`: for ever.
    ///
    /// # Errors
    /// When the system fails. The disk has ended then.
    pub fn turn(&mut self) -> io::Result<Option<Duration>> {
        if self.ended {
            return Ok(None);
        }
        let turned = self.driven.turn();
        match self.opened.try_recv() {
            Ok(Ok(geometry)) => self.events.push_back(DiskEvent::Opened(geometry)),
            Ok(Err(e)) => self.end(Err(e)),
            Err(_) => {}
        }
        self.take_results();
        match turned {
            Ok(Turned::Wait(timeout)) => Ok(timeout),
            Ok(Turned::Stopped) => {
                let failure = self.driven.service().take_failure();
                self.end(failure.map_or(Ok(()), Err));
                Ok(None)
            }
            Err(e) => {
                self.status.fail(&e.into());
                self.ended = true;
                Err(self.status.why_closed())
            }
        }
    }

    fn end(&mut self, result: Result<(), OpenError>) {
        if !self.ended {
            self.take_results();
            self.ended = true;
            self.events.push_back(DiskEvent::Closed(result));
        }
    }

    fn take_results(&mut self) {
        let results = self.driven.service().results.drain(..);
        let results: Vec<_> = results.map(|(user, result)| DiskEvent::Done { user, result }).collect();
        self.events.extend(results);
    }

    /// Takes the next event.
    pub fn next_event(&mut self) -> Option<DiskEvent> {
        self.events.pop_front()
    }

    /// Submits an operation, which the next [`turn`](Self::turn) begins: call it before waiting. It ends with [`DiskEvent::Done`].
    pub fn submit(&mut self, user: u64, request: Request) {
        self.driven.service().submit(request, Reply::Queue(user));
        self.take_results();
    }

    /// Begins to close, with the next turn: ends what is in flight, flushes, and disconnects from the server.
    /// [`DiskEvent::Closed`] follows.
    pub fn close(&mut self) {
        self.handle.command(Command::Close(None));
    }

    /// Returns size, block size and abilities as they are now; `None` until the disk is open.
    pub fn geometry(&self) -> Option<Geometry> {
        self.status.geometry()
    }
}

impl AsRawFd for DiskLoop {
    /// The descriptor that is readable when a turn has something to do. It is the disk's own: not to be read or closed.
    fn as_raw_fd(&self) -> RawFd {
        self.driven.as_raw_fd()
    }
}
