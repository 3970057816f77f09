//! A part of a write on its way from the client into a buffer, or into the heap when the client pauses.

use core::time::Duration;
use std::collections::VecDeque;

use roce_verbs::Instant;
use rtrs::client::buffers::Buffer;

use crate::nbd::{
    copy::{BufferCopy, zeroes},
    parse::ParseBuffer,
};

/// A client that stops in the middle of a write for so long does not keep the buffer meanwhile.
const PATIENCE: Duration = Duration::from_millis(100);

/// Destination of a part's bytes.
#[derive(Debug)]
enum Place {
    /// No buffer yet.
    Nowhere,
    /// Into the buffer.
    Device {
        buffer: Buffer,
        filled: usize,
        /// When the last bytes came.
        since: Instant,
    },
    /// The bytes in the buffer are copied, then the buffer goes back.
    Leaving {
        buffer: Buffer,
        bytes: Vec<u8>,
        filled: usize,
    },
    /// Into the heap.
    Heap { bytes: Vec<u8>, filled: usize },
    /// All is in the heap, and is to be copied into the buffer; or was.
    Loading {
        buffer: Buffer,
        bytes: Vec<u8>,
        copied: bool,
    },
}

/// Requirement of a part that it waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Need {
    /// A buffer.
    Buffer,
    /// Bytes of the client.
    Bytes,
    /// A copy that is to be polled for.
    Copy,
    /// Nothing: it is in its buffer.
    Nothing,
}

/// Destination of received bytes.
#[derive(Debug)]
pub(crate) enum Target<'a> {
    /// Into a buffer.
    Buffer(&'a Buffer, usize),
    /// Here.
    Bytes(&'a mut [u8]),
}

/// A part of a write.
#[derive(Debug)]
pub(crate) struct Part {
    len: usize,
    place: Place,
}

impl Part {
    /// A part of `len` bytes, of which none has come.
    pub(crate) fn new(len: usize) -> Self {
        Self {
            len,
            place: Place::Nowhere,
        }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the requirement, with this input behind the bytes received so far.
    pub(crate) fn need(&self, input: &ParseBuffer) -> Need {
        match &self.place {
            Place::Nowhere => Need::Buffer,
            Place::Device { filled, .. } if *filled == self.len => Need::Nothing,
            Place::Device { .. } if input.unread().is_empty() => Need::Bytes,
            Place::Device { .. } | Place::Leaving { .. } | Place::Loading { copied: false, .. } => Need::Copy,
            Place::Heap { filled, .. } if *filled == self.len => Need::Buffer,
            Place::Heap { .. } => Need::Bytes,
            Place::Loading { copied: true, .. } => Need::Nothing,
        }
    }

    /// Bytes of it that are still to be consumed.
    pub(crate) fn left(&self) -> usize {
        match &self.place {
            Place::Nowhere => self.len,
            Place::Device { filled, .. } | Place::Leaving { filled, .. } | Place::Heap { filled, .. } => {
                self.len - filled
            }
            Place::Loading { .. } => 0,
        }
    }

    /// Here is the buffer, which is as long as the part. One that is not needed comes back.
    pub(crate) fn give(&mut self, now: Instant, buffer: Buffer) -> Option<Buffer> {
        let len = self.len;
        match &mut self.place {
            Place::Nowhere => {
                self.place = Place::Device {
                    buffer,
                    filled: 0,
                    since: now,
                };
            }
            Place::Heap { bytes, filled } if *filled == len => {
                let bytes = core::mem::take(bytes);
                self.place = Place::Loading {
                    buffer,
                    bytes,
                    copied: false,
                };
            }
            _ => return Some(buffer),
        }
        None
    }

    /// Returns the destination of the rest; only while it needs bytes.
    pub(crate) fn target(&mut self) -> Option<Target<'_>> {
        match &mut self.place {
            Place::Device { buffer, filled, .. } => Some(Target::Buffer(buffer, *filled)),
            Place::Heap { bytes, filled } => Some(Target::Bytes(bytes.get_mut(*filled..)?)),
            _ => None,
        }
    }

    /// `n` bytes were received; how many of them lie behind the part.
    pub(crate) fn received(&mut self, now: Instant, n: usize) -> usize {
        let took = n.min(self.left());
        match &mut self.place {
            Place::Device { filled, since, .. } => {
                *filled += took;
                *since = now;
            }
            Place::Heap { filled, .. } => *filled += took,
            _ => return n,
        }
        n - took
    }

    /// Takes what has come already, if that needs no copy by others.
    pub(crate) fn absorb(&mut self, input: &mut ParseBuffer) {
        if let Place::Heap { bytes, filled } = &mut self.place {
            let n = input.unread().len().min(self.len - *filled);
            bytes[*filled..*filled + n].copy_from_slice(&input.unread()[..n]);
            *filled += n;
            input.consume(n);
        }
    }

    /// The copy that it needs. It counts as made.
    pub(crate) fn poll_copy<'a>(
        &'a mut self,
        input: &'a mut ParseBuffer,
        free: &'a mut VecDeque<Buffer>,
    ) -> Option<BufferCopy<'a>> {
        if let Place::Leaving { bytes, filled, .. } = &mut self.place {
            let heap = Place::Heap {
                bytes: core::mem::take(bytes),
                filled: *filled,
            };
            if let Place::Leaving { buffer, .. } = core::mem::replace(&mut self.place, heap) {
                free.push_back(buffer);
            }
            let Place::Heap { bytes, filled } = &mut self.place else {
                return None;
            };
            return Some(BufferCopy::Read {
                buffer: free.back()?,
                at: 0,
                out: bytes.get_mut(..*filled)?,
            });
        }
        match &mut self.place {
            Place::Device { buffer, filled, .. } => {
                let n = input.unread().len().min(self.len - *filled);
                if n == 0 {
                    return None;
                }
                input.consume(n);
                *filled += n;
                Some(BufferCopy::Write {
                    buffer,
                    at: *filled - n,
                    data: input.consumed(n),
                })
            }
            Place::Loading { buffer, bytes, copied } if !*copied => {
                *copied = true;
                Some(BufferCopy::Write {
                    buffer,
                    at: 0,
                    data: bytes,
                })
            }
            _ => None,
        }
    }

    /// When the buffer is taken from it, if nothing comes until then.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.place {
            Place::Device { filled, since, .. } if *filled < self.len => Some(*since + PATIENCE),
            _ => None,
        }
    }

    /// Looks whether that time has come. Without memory for what has come, the buffer stays.
    pub(crate) fn timeout(&mut self, now: Instant, free: &mut VecDeque<Buffer>) {
        if self.deadline().is_none_or(|due| due > now) {
            return;
        }
        let place = core::mem::replace(&mut self.place, Place::Nowhere);
        let Place::Device { buffer, filled, .. } = place else {
            self.place = place;
            return;
        };
        self.place = match zeroes(self.len) {
            None => Place::Device {
                buffer,
                filled,
                since: now,
            },
            Some(bytes) if filled == 0 => {
                free.push_back(buffer);
                Place::Heap { bytes, filled }
            }
            Some(bytes) => Place::Leaving { buffer, bytes, filled },
        };
    }

    /// Its buffer, filled or not.
    pub(crate) fn into_buffer(self) -> Option<Buffer> {
        match self.place {
            Place::Device { buffer, .. } | Place::Leaving { buffer, .. } | Place::Loading { buffer, .. } => {
                Some(buffer)
            }
            Place::Nowhere | Place::Heap { .. } => None,
        }
    }
}
