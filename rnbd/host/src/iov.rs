//! Reading into registered memory, and writing from it, without a reference to it: a peer may change the bytes at any time.

use std::{io, os::fd::AsRawFd};

use roce_verbs::mem::Pages;

/// Pieces of one call at most: what `readv` and `writev` take.
pub(crate) const MAX_PIECES: usize = 1024;

/// A piece of memory that stays where it is for the time of a call.
#[derive(Clone, Copy)]
pub(crate) struct Piece<'a> {
    base: *mut u8,
    len: usize,
    _life: core::marker::PhantomData<&'a u8>,
}

impl<'a> Piece<'a> {
    /// To be read from.
    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        Self {
            base: bytes.as_ptr().cast_mut(),
            len: bytes.len(),
            _life: core::marker::PhantomData,
        }
    }

    /// To be written to.
    fn of_mut(bytes: &'a mut [u8]) -> Self {
        Self {
            base: bytes.as_mut_ptr(),
            len: bytes.len(),
            _life: core::marker::PhantomData,
        }
    }

    /// Registered memory; cut to what there is.
    pub(crate) fn pages(pages: &'a Pages, at: usize, len: usize) -> Self {
        let at = at.min(pages.len());
        Self {
            base: pages.as_ptr().wrapping_add(at),
            len: len.min(pages.len() - at),
            _life: core::marker::PhantomData,
        }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn raw(&self) -> libc::iovec {
        libc::iovec {
            iov_base: self.base.cast(),
            iov_len: self.len,
        }
    }
}

fn outcome(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Receives: first into registered memory, then behind it.
///
/// # Errors
/// Those of `recv`.
pub(crate) fn receive(socket: &impl AsRawFd, first: Option<Piece<'_>>, then: &mut [u8]) -> io::Result<usize> {
    let mut pieces = [Piece::of_mut(then).raw(); 2];
    let count = match first {
        Some(first) => {
            pieces.swap(0, 1);
            pieces[0] = first.raw();
            2
        }
        None => 1,
    };
    // SAFETY: `count` pieces of memory that is valid for writes and outlives the call; nobody has a reference to the pages, and
    // the slice is borrowed mutably.
    outcome(unsafe { libc::readv(socket.as_raw_fd(), pieces.as_ptr(), count) })
}

/// Sends pieces in their order.
///
/// # Errors
/// Those of `sendmsg`.
pub(crate) fn send(socket: &impl AsRawFd, pieces: &[Piece<'_>]) -> io::Result<usize> {
    let raw: Vec<libc::iovec> = pieces.iter().take(MAX_PIECES).map(Piece::raw).collect();
    // SAFETY: all-zero is a message without address, pieces and control data.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = raw.as_ptr().cast_mut();
    message.msg_iovlen = raw.len() as _;
    // SAFETY: pieces of memory that is valid for reads and outlives the call.
    outcome(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) })
}
