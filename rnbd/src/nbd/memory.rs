//! Memory for a connection's payload: the session's buffers, or the heap.

use rtrs::client::buffers::{Buffer, Buffers};

use crate::errno::Errno;

/// The buffers of a session.
pub trait Memory {
    /// Takes a buffer of at least `len` bytes. `None`: all are in use; [`poll`](super::Connection::poll) asks again.
    ///
    /// # Errors
    /// The request's error: there will be no buffer.
    fn take(&mut self, len: usize) -> Result<Option<Buffer>, Errno>;

    /// The session's buffers; `None` when the session is gone, and they with it.
    fn buffers(&mut self) -> Option<&mut Buffers>;
}

/// Gives a buffer back.
pub(crate) fn give(memory: &mut dyn Memory, buffer: Option<Buffer>) {
    if let (Some(buffer), Some(buffers)) = (buffer, memory.buffers()) {
        buffers.give(buffer);
    }
}

/// Copies bytes from the beginning of a buffer.
pub(crate) fn copy_from(memory: &mut dyn Memory, buffer: &Buffer, out: &mut [u8]) {
    if let Some(Err(e)) = memory.buffers().map(|buffers| buffers.read(buffer, 0, out)) {
        tracing::error!("a copy outside its buffer: {e}");
    }
}

/// Copies bytes into a buffer.
pub(crate) fn copy_to(memory: &mut dyn Memory, buffer: &Buffer, at: usize, data: &[u8]) {
    if let Some(Err(e)) = memory.buffers().map(|buffers| buffers.write(buffer, at, data)) {
        tracing::error!("a copy outside its buffer: {e}");
    }
}

/// Zeroes in the heap, or `None` without memory for them.
pub(crate) fn zeroes(len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).ok()?;
    bytes.resize(len, 0);
    Some(bytes)
}
