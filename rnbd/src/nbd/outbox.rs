//! Replies of one connection on their way to the client, and the account of what it has in flight.

use std::{
    collections::VecDeque,
    io,
    os::{fd::AsRawFd, unix::net::UnixStream},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};

use super::input::poll_fd;
use crate::block::IoBuffer;

/// Replies that go out in one system call.
const BATCH: usize = 64;
/// Elements of one system call (`UIO_MAXIOV`).
const MAX_IOV: usize = 1024;
/// A client that takes nothing for so long no longer keeps buffers of the device: its data moves to the heap.
const PATIENCE: Duration = Duration::from_millis(100);

/// Read data on its way out.
pub(crate) enum Data<B> {
    /// Still in the device's buffer.
    Device(B),
    /// Copied.
    Heap(Vec<u8>),
}

impl<B: IoBuffer> Data<B> {
    fn raw(&self) -> (*const u8, usize) {
        match self {
            Self::Device(b) => (b.as_ptr(), b.len()),
            Self::Heap(v) => (v.as_ptr(), v.len()),
        }
    }

    /// Gives the device its buffer back. Without memory for a copy it stays.
    fn detach(&mut self) {
        if let Self::Device(b) = self {
            let mut v = Vec::new();
            if v.try_reserve_exact(b.len()).is_ok() {
                // SAFETY: reserved above; the buffer is `len` bytes long; then all of them are set.
                unsafe {
                    std::ptr::copy_nonoverlapping(b.as_ptr(), v.as_mut_ptr(), b.len());
                    v.set_len(b.len());
                }
                *self = Self::Heap(v);
            }
        }
    }
}

/// A simple reply.
pub(crate) struct Reply<B> {
    pub(crate) header: [u8; 16],
    pub(crate) data: Vec<Data<B>>,
    /// Bytes that the request counted for.
    pub(crate) charge: u64,
}

struct State<B> {
    replies: VecDeque<Reply<B>>,
    /// Requests read and not yet answered, and their bytes.
    requests: usize,
    bytes: u64,
    /// No more requests will come.
    input_ended: bool,
    /// The client can't be written to any more.
    broken: bool,
}

/// Between completions and the writing thread.
pub(crate) struct Outbox<B> {
    state: Mutex<State<B>>,
    /// For the writer.
    work: Condvar,
    /// For the reader.
    room: Condvar,
    max_requests: usize,
    max_bytes: u64,
}

impl<B: IoBuffer> Outbox<B> {
    pub(crate) fn new(max_requests: usize, max_bytes: u64) -> Self {
        let state = State {
            replies: VecDeque::new(),
            requests: 0,
            bytes: 0,
            input_ended: false,
            broken: false,
        };
        Self {
            state: Mutex::new(state),
            work: Condvar::new(),
            room: Condvar::new(),
            max_requests,
            max_bytes,
        }
    }

    /// Waits until a request of `bytes` may be started and counts it. `false` when there is nobody to answer.
    pub(crate) fn admit(&self, bytes: u64) -> bool {
        let mut s = self.state.lock();
        while !s.broken && s.requests > 0 && (s.requests >= self.max_requests || s.bytes + bytes > self.max_bytes) {
            self.room.wait(&mut s);
        }
        s.requests += 1;
        s.bytes += bytes;
        if s.broken {
            s.requests -= 1;
            s.bytes -= bytes;
        }
        !s.broken
    }

    /// Queues the reply of an admitted request.
    pub(crate) fn push(&self, reply: Reply<B>) {
        let mut s = self.state.lock();
        s.replies.push_back(reply);
        self.work.notify_one();
    }

    /// No more requests.
    pub(crate) fn end_of_input(&self) {
        self.state.lock().input_ended = true;
        self.work.notify_one();
    }

    /// The writing thread: until the input has ended and everything is answered.
    pub(crate) fn write_all(&self, stream: &UnixStream) {
        while let Some(batch) = self.next_batch() {
            let (requests, bytes) = (batch.len(), batch.iter().map(|r| r.charge).sum::<u64>());
            let broken = self.state.lock().broken;
            if !broken && let Err(e) = self.send(stream, batch) {
                tracing::debug!("an NBD client went away: {e}");
                self.state.lock().broken = true;
                // Wakes the reader if it waits for the client.
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
            let mut s = self.state.lock();
            s.requests -= requests;
            s.bytes -= bytes;
            self.room.notify_one();
        }
    }

    fn next_batch(&self) -> Option<Vec<Reply<B>>> {
        let mut s = self.state.lock();
        loop {
            if !s.replies.is_empty() {
                let n = s.replies.len().min(BATCH);
                return Some(s.replies.drain(..n).collect());
            }
            if s.input_ended && s.requests == 0 {
                return None;
            }
            self.work.wait(&mut s);
        }
    }

    fn send(&self, stream: &UnixStream, mut batch: Vec<Reply<B>>) -> io::Result<()> {
        let total: usize = batch
            .iter()
            .map(|r| 16 + r.data.iter().map(|d| d.raw().1).sum::<usize>())
            .sum();
        let mut sent = 0;
        while sent < total {
            match send_some(stream, &batch, sent) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    while !poll_fd(stream.as_raw_fd(), libc::POLLOUT, Some(PATIENCE))? {
                        let queued = &mut self.state.lock().replies;
                        batch
                            .iter_mut()
                            .chain(queued)
                            .flat_map(|r| &mut r.data)
                            .for_each(Data::detach);
                    }
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// One `sendmsg` of what follows the first `skip` bytes of the batch.
fn send_some<B: IoBuffer>(stream: &UnixStream, batch: &[Reply<B>], mut skip: usize) -> io::Result<usize> {
    let parts = batch
        .iter()
        .flat_map(|r| std::iter::once((r.header.as_ptr(), r.header.len())).chain(r.data.iter().map(Data::raw)));
    let mut iov: Vec<libc::iovec> = Vec::with_capacity(batch.len() * 2);
    for (ptr, len) in parts {
        if skip >= len {
            skip -= len;
            continue;
        }
        // SAFETY: `skip` is inside the part.
        let base = unsafe { ptr.add(skip) };
        iov.push(libc::iovec {
            iov_base: base.cast_mut().cast(),
            iov_len: len - skip,
        });
        skip = 0;
        if iov.len() == MAX_IOV {
            break;
        }
    }
    // SAFETY: all-zero is a valid `msghdr`.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = iov.as_mut_ptr();
    msg.msg_iovlen = iov.len() as _;
    // SAFETY: every element describes memory that `batch` keeps alive.
    let n = unsafe {
        libc::sendmsg(
            stream.as_raw_fd(),
            &raw const msg,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        )
    };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}
