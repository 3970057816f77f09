//! Copies between buffers and the memory of a connection. A buffer is only a number here: who knows its memory makes them.

use rtrs::client::buffers::Buffer;

/// A copy to be made before anything else is asked of the connection.
#[derive(Debug)]
pub enum BufferCopy<'a> {
    /// Bytes into a buffer.
    Write {
        /// Destination.
        buffer: &'a Buffer,
        /// First byte in the buffer.
        at: usize,
        /// The bytes.
        data: &'a [u8],
    },
    /// Bytes out of a buffer.
    Read {
        /// Source.
        buffer: &'a Buffer,
        /// First byte in the buffer.
        at: usize,
        /// To be filled.
        out: &'a mut [u8],
    },
}

/// Zeroes in the heap, or `None` without memory for them.
pub(crate) fn zeroes(len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).ok()?;
    bytes.resize(len, 0);
    Some(bytes)
}
