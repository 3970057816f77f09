//! A disk with a thread of its own, for tasks.

use std::{io, sync::Arc};

use futures_channel::oneshot;
use rnbd::block::Geometry;
use rtrs::addr::PathAddr;

use crate::{
    disk::Shared,
    error::OpenError,
    options::DiskOptions,
    request::{Outcome, Request},
};

/// Block device of a server, to read and write from tasks of any runtime.
///
/// As [`Disk`](crate::Disk), with futures; the disk's thread wakes the task. An operation has begun when the method is called, and goes
/// on if its future is dropped. Buffers are passed by value and come back, so that nothing is borrowed meanwhile.
///
/// [`close`](Self::close) it: the drop of the last handle does not wait, so that the end of the process may come before the last
/// flush.
#[derive(Clone, Debug)]
pub struct AsyncDisk(Arc<Detached>);

/// Lets the thread go without waiting.
#[derive(Debug)]
struct Detached(Shared);

impl Drop for Detached {
    fn drop(&mut self) {
        self.0.detach();
    }
}

impl AsyncDisk {
    /// Opens a device of a server to read and write, with [usual options](DiskOptions::new).
    ///
    /// # Errors
    /// As [`Disk::open`](crate::Disk::open).
    pub async fn open(path: PathAddr, session: &str, device: &str) -> Result<Self, OpenError> {
        DiskOptions::new(path, session, device).open_async().await
    }

    /// Returns size, block size and abilities as they are now.
    pub fn geometry(&self) -> Geometry {
        let geometry = self.0.0.status().geometry();
        geometry.expect("a disk that is open has one")
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.geometry().size
    }

    /// Begins an operation.
    fn call(&self, request: Request) -> impl Future<Output = Outcome> + Send + 'static {
        let (send, outcome) = oneshot::channel();
        let shared = self.0.clone();
        shared.0.submit(request, move |outcome| {
            // The future may be gone.
            let _ = send.send(outcome);
        });
        async move { outcome.await.unwrap_or_else(|_| Err(shared.0.status().why_closed())) }
    }

    /// Reads `len` bytes from `offset` on.
    ///
    /// # Errors
    /// See [`Disk`](crate::Disk).
    pub fn read_at(&self, len: usize, offset: u64) -> impl Future<Output = io::Result<Vec<u8>>> + Send + 'static {
        self.call(Request::Read { offset, len })
    }

    /// Writes `data` from `offset` on, and returns it for reuse.
    ///
    /// # Errors
    /// See [`Disk`](crate::Disk).
    pub fn write_at(&self, data: Vec<u8>, offset: u64) -> impl Future<Output = io::Result<Vec<u8>>> + Send + 'static {
        let fua = false;
        self.call(Request::Write { offset, data, fua })
    }

    /// Writes `data` from `offset` on, makes it durable (forced unit access), and returns it for reuse.
    ///
    /// # Errors
    /// See [`Disk`](crate::Disk).
    pub fn write_durable_at(
        &self,
        data: Vec<u8>,
        offset: u64,
    ) -> impl Future<Output = io::Result<Vec<u8>>> + Send + 'static {
        let fua = true;
        self.call(Request::Write { offset, data, fua })
    }

    /// Makes all writes durable that have ended.
    ///
    /// # Errors
    /// As [`Disk::flush`](crate::Disk::flush).
    pub async fn flush(&self) -> io::Result<()> {
        self.call(Request::Flush).await.map(drop)
    }

    /// Tells the server that `len` bytes from `offset` on are not needed any more. Reading them gives anything.
    ///
    /// # Errors
    /// As [`Disk::discard`](crate::Disk::discard).
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.call(Request::Discard { offset, len }).await.map(drop)
    }

    /// Makes `len` bytes from `offset` on zero without sending them.
    ///
    /// # Errors
    /// See [`Disk`](crate::Disk).
    pub async fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        let may_unmap = true;
        self.call(Request::WriteZeroes { offset, len, may_unmap })
            .await
            .map(drop)
    }

    /// Closes the disk for all handles: ends what is in flight, flushes, and disconnects from the server.
    ///
    /// # Errors
    /// As [`Disk::close`](crate::Disk::close).
    pub async fn close(self) -> Result<(), OpenError> {
        let (send, closed) = oneshot::channel();
        self.0.0.close(move |result| {
            // The future may be gone.
            let _ = send.send(result);
        });
        closed.await.unwrap_or_else(|_| Err(self.0.0.status().end()))
    }
}

impl DiskOptions {
    /// Opens the disk, which has a thread of its own.
    ///
    /// # Errors
    /// As [`Disk::open`](crate::Disk::open).
    pub async fn open_async(self) -> Result<AsyncDisk, OpenError> {
        let (send, opened) = oneshot::channel();
        let on_open = move |result| {
            // The future may be gone.
            let _ = send.send(result);
        };
        let shared = Detached(Shared::start(self, Box::new(on_open))?);
        match opened.await {
            Ok(Ok(_)) => Ok(AsyncDisk(Arc::new(shared))),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(shared.0.status().end()),
        }
    }
}
