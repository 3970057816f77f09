//! A disk with a thread of its own, for callers that block.

use std::{
    fmt, io,
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread::{Builder, JoinHandle},
};

use rnbd::block::Geometry;
use roce::reactor::{Handle, Reactor, ReactorConfig};
use rtrs::addr::PathAddr;

use crate::{
    error::OpenError,
    options::DiskOptions,
    request::{Outcome, Reply, Request},
    service::{Command, DiskService, OnOpen, Status},
};

/// The thread of a disk, and how to reach it.
pub(crate) struct Shared {
    handle: Handle<Command, ()>,
    status: Status,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("geometry", &self.status.geometry())
            .finish()
    }
}

impl Shared {
    /// Starts the thread, which opens the disk and calls `on_open`.
    pub(crate) fn start(mut options: DiskOptions, on_open: OnOpen) -> Result<Self, OpenError> {
        let config = ReactorConfig {
            spin: options.spin,
            ..ReactorConfig::default()
        };
        let reactor = Reactor::<DiskService>::new(config)?;
        let (handle, status) = (reactor.handle(), Status::default());
        let known = status.clone();
        let run = move || {
            // A broker may take some time to answer.
            let device = match options.open_device() {
                Ok(device) => device,
                Err(e) => return on_open(Err(e)),
            };
            let mut on_open = Some(on_open);
            let ran = reactor.run(device, |turn| {
                let on_open = on_open.take().unwrap_or_else(|| Box::new(drop));
                DiskService::new(options, known.clone(), on_open, turn)
            });
            if let Err(e) = ran {
                tracing::error!("{e}");
                known.fail(&e.into());
            }
        };
        let thread = Builder::new().name("rnbd-disk".into()).spawn(run)?;
        Ok(Self {
            handle,
            status,
            thread: Some(thread),
        })
    }

    /// Begins an operation. `reply` is dropped uncalled if the disk has ended.
    pub(crate) fn submit(&self, request: Request, reply: impl FnOnce(Outcome) + Send + 'static) {
        let reply = Reply::Call(Box::new(reply));
        self.handle.command(Command::Do(request, reply));
    }

    pub(crate) fn status(&self) -> &Status {
        &self.status
    }

    /// Begins to close. `reply` is called when that is done, or dropped uncalled if the disk has ended or is being closed already.
    pub(crate) fn close(&self, reply: impl FnOnce(Result<(), OpenError>) + Send + 'static) {
        self.handle.command(Command::Close(Some(Box::new(reply))));
    }

    /// Lets the thread end by itself.
    pub(crate) fn detach(&mut self) {
        self.handle.command(Command::Close(None));
        self.thread = None;
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.handle.command(Command::Close(None));
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

/// Block device of a server, to read and write from any thread.
///
/// Clones are handles of the same disk. Operations of several threads are in flight together; those of one thread are done one after
/// another. The disk is closed with [`close`](Self::close), which says whether all that was written is durable, or with the last
/// handle, which waits for that too.
///
/// Offsets and lengths must be multiples of the [logical block size](Geometry::logical_block_size). An operation either does all of it
/// or fails. Errors have the number that the server gave, or the kind `InvalidInput` with a text for a range that can't be; while no
/// path is up they are `ConnectionAborted`, unless [`on_loss`](DiskOptions::on_loss) has operations wait.
#[derive(Clone, Debug)]
pub struct Disk(Arc<Shared>);

impl Disk {
    /// Opens a device of a server to read and write, with [usual options](DiskOptions::new). Waits until it is open.
    ///
    /// `session` is the name by which the server knows this client: no two may have the same.
    ///
    /// # Errors
    /// When our address can't be used, the server does not answer or refuses, or has no such device.
    pub fn open(path: PathAddr, session: &str, device: &str) -> Result<Self, OpenError> {
        DiskOptions::new(path, session, device).open()
    }

    /// Returns size, block size and abilities as they are now.
    pub fn geometry(&self) -> Geometry {
        let geometry = self.0.status().geometry();
        geometry.expect("a disk that is open has one")
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.geometry().size
    }

    fn call(&self, request: Request) -> Outcome {
        let (send, outcome): (Sender<Outcome>, _) = channel();
        self.0.submit(request, move |outcome| {
            // It is waited for below.
            let _ = send.send(outcome);
        });
        outcome.recv().unwrap_or_else(|_| Err(self.0.status().why_closed()))
    }

    /// Fills `buf` with the bytes from `offset` on.
    ///
    /// # Errors
    /// See [`Disk`].
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let data = self.call(Request::Read { offset, len: buf.len() })?;
        buf.copy_from_slice(&data);
        Ok(())
    }

    /// Writes `data` from `offset` on. It is durable after a [`flush`](Self::flush) that begins when this has returned.
    ///
    /// # Errors
    /// See [`Disk`].
    pub fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.write(data, offset, false)
    }

    /// Writes `data` from `offset` on, and makes it durable (forced unit access).
    ///
    /// # Errors
    /// See [`Disk`].
    pub fn write_durable_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.write(data, offset, true)
    }

    fn write(&self, data: &[u8], offset: u64, fua: bool) -> io::Result<()> {
        let data = data.to_vec();
        self.call(Request::Write { offset, data, fua }).map(drop)
    }

    /// Makes all writes durable that have returned.
    ///
    /// # Errors
    /// See [`Disk`]. `EIO` if the server may have lost writes that it had acknowledged: the server's machine has restarted since.
    pub fn flush(&self) -> io::Result<()> {
        self.call(Request::Flush).map(drop)
    }

    /// Tells the server that `len` bytes from `offset` on are not needed any more. Reading them gives anything.
    ///
    /// # Errors
    /// See [`Disk`]. `Unsupported` if the device has no discard.
    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.call(Request::Discard { offset, len }).map(drop)
    }

    /// Makes `len` bytes from `offset` on zero without sending them.
    ///
    /// # Errors
    /// See [`Disk`].
    pub fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        let may_unmap = true;
        self.call(Request::WriteZeroes { offset, len, may_unmap }).map(drop)
    }

    /// Closes the disk for all handles: ends what is in flight, flushes, and disconnects from the server.
    ///
    /// # Errors
    /// When the last flush fails, or the session was lost before.
    pub fn close(self) -> Result<(), OpenError> {
        let (send, closed) = channel();
        self.0.close(move |result| {
            // It is waited for below.
            let _ = send.send(result);
        });
        closed.recv().unwrap_or_else(|_| Err(self.0.status().end()))
    }
}

impl DiskOptions {
    /// Opens the disk and waits until it is open. It has a thread of its own.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open(self) -> Result<Disk, OpenError> {
        let (send, opened) = channel();
        let on_open = move |result| {
            // It is waited for below.
            let _ = send.send(result);
        };
        let shared = Shared::start(self, Box::new(on_open))?;
        match opened.recv() {
            Ok(Ok(_)) => Ok(Disk(Arc::new(shared))),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(shared.status().end()),
        }
    }
}
