//! Registered buffers of a session, lent to requests; whoever finds none waits.

use std::{fmt, sync::Arc};

use parking_lot::{Condvar, Mutex};
use roce_verbs::provider::Provider;
use rtrs::client::{IoBuffer, Session};

use crate::{block, errno::Errno};

/// The buffers of a session. All are of one size, so that the pool of the session can't be cut into pieces that are
/// too small; those in use come first again, so few are ever touched by a light load.
pub(super) struct Buffers<P: Provider> {
    session: Session<P>,
    lent: Mutex<usize>,
    returned: Condvar,
}

impl<P: Provider> Buffers<P> {
    pub(super) fn new(session: Session<P>) -> Arc<Self> {
        let me = Arc::new(Self {
            session,
            lent: Mutex::new(0),
            returned: Condvar::new(),
        });
        let weak = Arc::downgrade(&me);
        me.session.on_down(move |_| {
            if let Some(me) = weak.upgrade() {
                // Under the lock: nobody is between looking at the session and waiting.
                let _lent = me.lent.lock();
                me.returned.notify_all();
            }
        });
        me
    }

    /// Largest buffer, bytes.
    fn max(&self) -> usize {
        self.session.info().max_io_size as usize
    }

    /// As many as requests can be in flight.
    pub(super) fn limit(&self) -> usize {
        // Slabs are rounded up and the service connection's requests need some as well.
        (self.session.info().queue_depth as usize).saturating_sub(4).max(1)
    }

    fn take(&self, len: usize, wait: bool) -> Result<Option<IoBuffer<P>>, Errno> {
        if len == 0 || len > self.max() {
            return Err(Errno::EINVAL);
        }
        let mut lent = self.lent.lock();
        loop {
            self.session.state().map_err(|_| Errno::ECONNABORTED)?;
            if *lent < self.limit() {
                match self.session.alloc_buffer(self.max()) {
                    Ok(mut b) => {
                        b.set_len(len);
                        *lent += 1;
                        return Ok(Some(b));
                    }
                    Err(rtrs::Error::NoBuffer { .. }) if *lent > 0 => {}
                    Err(rtrs::Error::Down(_)) => return Err(Errno::ECONNABORTED),
                    Err(_) => return Err(Errno::ENOMEM),
                }
            }
            if !wait {
                return Ok(None);
            }
            self.returned.wait(&mut lent);
        }
    }

    pub(super) fn lend(self: &Arc<Self>, len: usize, wait: bool) -> Result<Option<DeviceBuffer<P>>, Errno> {
        Ok(self.take(len, wait)?.map(|buffer| DeviceBuffer {
            buffer,
            lent: Lent(self.clone()),
        }))
    }
}

/// A registered buffer for one read or write.
pub struct DeviceBuffer<P: Provider> {
    // Dropped in this order: the memory is back when the account says so.
    buffer: IoBuffer<P>,
    lent: Lent<P>,
}

impl<P: Provider> DeviceBuffer<P> {
    /// The session's buffer, and its account while it is with the session.
    pub(super) fn take_apart(self) -> (IoBuffer<P>, Lent<P>) {
        (self.buffer, self.lent)
    }

    /// Copies the start of the buffer; `false` when it is shorter.
    pub(super) fn copy_out(&self, out: &mut [u8]) -> bool {
        self.buffer.read(0, out).is_ok()
    }

    pub(super) fn put_together(buffer: IoBuffer<P>, lent: Lent<P>) -> Self {
        Self { buffer, lent }
    }
}

/// One of the buffers that may be lent at a time.
pub(super) struct Lent<P: Provider>(Arc<Buffers<P>>);

impl<P: Provider> Drop for Lent<P> {
    fn drop(&mut self) {
        *self.0.lent.lock() -= 1;
        self.0.returned.notify_one();
    }
}

// SAFETY: the session's buffer keeps its registered memory, of at least `len` bytes, as long as it lives.
unsafe impl<P: Provider> block::IoBuffer for DeviceBuffer<P> {
    fn as_ptr(&self) -> *mut u8 {
        self.buffer.as_ptr()
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }
}

impl<P: Provider> fmt::Debug for DeviceBuffer<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("buffer", &self.buffer)
            .finish_non_exhaustive()
    }
}
