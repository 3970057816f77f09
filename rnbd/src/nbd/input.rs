//! Reading a client's socket: headers through a small buffer, payload straight to where it belongs.

use std::{
    io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

/// How long to wait for bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    Forever,
    Until(Instant),
}

/// Waits until a descriptor is ready for `events`; `false` when the time ran out.
pub(crate) fn poll_fd(fd: RawFd, events: i16, timeout: Option<Duration>) -> io::Result<bool> {
    let ms = timeout.map_or(-1, |t| i32::try_from(t.as_millis().max(1)).unwrap_or(i32::MAX));
    let mut p = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one element.
    match unsafe { libc::poll(&raw mut p, 1, ms) } {
        0 => Ok(false),
        n if n > 0 => Ok(true),
        _ => match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::Interrupted => Ok(true),
            e => Err(e),
        },
    }
}

/// Receives at most `len` bytes at `ptr`.
///
/// # Safety
/// `ptr` is valid for writes of `len` bytes.
unsafe fn recv(fd: RawFd, ptr: *mut u8, len: usize, flags: i32) -> io::Result<usize> {
    loop {
        // SAFETY: the caller's memory.
        let n = unsafe { libc::recv(fd, ptr.cast(), len, flags) };
        match usize::try_from(n) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => return Ok(n),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}

/// The receiving side of a connection.
#[derive(Debug)]
pub(crate) struct Input<'a> {
    stream: &'a UnixStream,
    /// Small: what a write's header read brings of its payload is copied once more.
    buf: Box<[u8; 4096]>,
    start: usize,
    end: usize,
}

impl<'a> Input<'a> {
    pub(crate) fn new(stream: &'a UnixStream) -> Self {
        Self {
            stream,
            buf: Box::new([0; 4096]),
            start: 0,
            end: 0,
        }
    }

    fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// Fills the whole of `out`. `Ok(false)` for an end of the stream before its first byte.
    pub(crate) fn read_exact_or_end(&mut self, out: &mut [u8], wait: Wait) -> io::Result<bool> {
        let mut done = 0;
        while done < out.len() {
            if self.buffered() == 0 {
                match self.refill(wait) {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::UnexpectedEof && done == 0 => return Ok(false),
                    Err(e) => return Err(e),
                }
            }
            let n = self.buffered().min(out.len() - done);
            out[done..done + n].copy_from_slice(&self.buf[self.start..self.start + n]);
            self.start += n;
            done += n;
        }
        Ok(true)
    }

    /// Fills the whole of `out`.
    pub(crate) fn read_exact(&mut self, out: &mut [u8], wait: Wait) -> io::Result<()> {
        if self.read_exact_or_end(out, wait)? || out.is_empty() {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }

    fn refill(&mut self, wait: Wait) -> io::Result<()> {
        if let Wait::Until(t) = wait {
            let left = t.saturating_duration_since(Instant::now());
            if left.is_zero() || !poll_fd(self.stream.as_raw_fd(), libc::POLLIN, Some(left))? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        // SAFETY: our own buffer.
        self.end = unsafe { recv(self.stream.as_raw_fd(), self.buf.as_mut_ptr(), self.buf.len(), 0)? };
        self.start = 0;
        Ok(())
    }

    /// Throws `n` bytes away.
    pub(crate) fn skip(&mut self, mut n: u64, wait: Wait) -> io::Result<()> {
        while n > 0 {
            if self.buffered() == 0 {
                self.refill(wait)?;
            }
            let k = (self.buffered() as u64).min(n);
            self.start += k as usize;
            n -= k;
        }
        Ok(())
    }

    /// Receives up to `len` bytes at `ptr`, what is buffered first; `Ok(0)` when none came for `patience`
    /// (`None`: waits for ever).
    ///
    /// # Safety
    /// `ptr` is valid for writes of `len` bytes.
    pub(crate) unsafe fn read_raw(
        &mut self,
        ptr: *mut u8,
        len: usize,
        patience: Option<Duration>,
    ) -> io::Result<usize> {
        let n = self.buffered().min(len);
        if n > 0 {
            // SAFETY: `n` bytes of our buffer into the caller's memory, which is another.
            unsafe { std::ptr::copy_nonoverlapping(self.buf.as_ptr().add(self.start), ptr, n) };
            self.start += n;
            return Ok(n);
        }
        let fd = self.stream.as_raw_fd();
        let Some(patience) = patience else {
            // SAFETY: the caller's memory.
            return unsafe { recv(fd, ptr, len, 0) };
        };
        let until = Instant::now() + patience;
        loop {
            // SAFETY: as above.
            match unsafe { recv(fd, ptr, len, libc::MSG_DONTWAIT) } {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                r => return r,
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !poll_fd(fd, libc::POLLIN, Some(left))? {
                return Ok(0);
            }
        }
    }
}
