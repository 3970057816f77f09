//! A part of a write on its way from the client into a buffer, or into the heap when the client pauses.

use core::time::Duration;

use roce_verbs::Instant;
use rtrs::client::buffers::Buffer;

use crate::nbd::{
    memory::{Memory, copy_from, copy_to, give, zeroes},
    parse::ParseBuffer,
};

/// Pause of a client in the middle of a write after which its buffer is freed for others.
const PAUSE: Duration = Duration::from_millis(100);

/// Place of a part's bytes.
#[derive(Debug)]
enum Place {
    /// No buffer yet.
    Nowhere,
    /// In the buffer.
    Device {
        buffer: Buffer,
        filled: usize,
        /// When the last bytes arrived.
        since: Instant,
    },
    /// In the heap.
    Heap { bytes: Vec<u8>, filled: usize },
}

/// Requirement of a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Need {
    /// A buffer.
    Buffer,
    /// Bytes of the client.
    Bytes,
    /// Nothing: it is in its buffer.
    Nothing,
}

/// Destination of received bytes.
#[derive(Debug)]
pub(crate) enum Target<'a> {
    /// From this byte of a buffer on.
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
    /// A part of `len` bytes, of which none has arrived.
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

    /// Returns the requirement.
    pub(crate) fn need(&self) -> Need {
        match &self.place {
            Place::Nowhere => Need::Buffer,
            Place::Device { filled, .. } if *filled == self.len => Need::Nothing,
            Place::Heap { filled, .. } if *filled == self.len => Need::Buffer,
            Place::Device { .. } | Place::Heap { .. } => Need::Bytes,
        }
    }

    /// Bytes that have not arrived.
    pub(crate) fn left(&self) -> usize {
        match &self.place {
            Place::Nowhere => self.len,
            Place::Device { filled, .. } | Place::Heap { filled, .. } => self.len - filled,
        }
    }

    /// Takes the buffer that it needs, which is as long as the part.
    pub(crate) fn give(&mut self, now: Instant, buffer: Buffer, memory: &mut dyn Memory) {
        let mut filled = 0;
        if let Place::Heap { bytes, filled: all } = &self.place {
            copy_to(memory, &buffer, 0, bytes);
            filled = *all;
        }
        self.place = Place::Device {
            buffer,
            filled,
            since: now,
        };
    }

    /// Returns the destination of the rest; only while it needs bytes.
    pub(crate) fn target(&mut self) -> Option<Target<'_>> {
        match &mut self.place {
            Place::Device { buffer, filled, .. } => Some(Target::Buffer(buffer, *filled)),
            Place::Heap { bytes, filled } => Some(Target::Bytes(bytes.get_mut(*filled..)?)),
            Place::Nowhere => None,
        }
    }

    /// `n` bytes were received. Returns how many of them lie behind the part.
    pub(crate) fn received(&mut self, now: Instant, n: usize) -> usize {
        let took = n.min(self.left());
        match &mut self.place {
            Place::Device { filled, since, .. } => {
                *filled += took;
                *since = now;
            }
            Place::Heap { filled, .. } => *filled += took,
            Place::Nowhere => return n,
        }
        n - took
    }

    /// Takes bytes of it that were received with a request.
    pub(crate) fn absorb(&mut self, input: &mut ParseBuffer, memory: &mut dyn Memory) {
        let n = input.unread().len().min(self.left());
        let bytes = &input.unread()[..n];
        match &mut self.place {
            Place::Device { buffer, filled, .. } => {
                copy_to(memory, buffer, *filled, bytes);
                *filled += n;
            }
            Place::Heap { bytes: to, filled } => {
                to[*filled..*filled + n].copy_from_slice(bytes);
                *filled += n;
            }
            Place::Nowhere => return,
        }
        input.consume(n);
    }

    /// When its buffer is freed, if nothing arrives until then.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.place {
            Place::Device { filled, since, .. } if *filled < self.len => Some(*since + PAUSE),
            _ => None,
        }
    }

    /// Moves to the heap when it is time. Without memory for that, the buffer stays.
    pub(crate) fn timeout(&mut self, now: Instant, memory: &mut dyn Memory) {
        if self.deadline().is_none_or(|due| due > now) {
            return;
        }
        let Place::Device { buffer, filled, since } = &mut self.place else {
            return;
        };
        let Some(mut bytes) = zeroes(self.len) else {
            *since = now;
            return;
        };
        copy_from(memory, buffer, &mut bytes[..*filled]);
        let heap = Place::Heap { bytes, filled: *filled };
        let before = core::mem::replace(&mut self.place, heap);
        give(memory, Self { len: 0, place: before }.into_buffer());
    }

    /// Its buffer, filled or not.
    pub(crate) fn into_buffer(self) -> Option<Buffer> {
        match self.place {
            Place::Device { buffer, .. } => Some(buffer),
            Place::Nowhere | Place::Heap { .. } => None,
        }
    }
}
