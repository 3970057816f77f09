//! Bytes that have come from a client and are not understood yet.

use crate::nbd::proto::{Request, cmd};

/// Bytes that are kept at most. An option with its data fits.
pub(crate) const CAPACITY: usize = 64 << 10;
/// Bytes that are read ahead of a client that writes much at a time: what comes along of the next payload has to be copied.
const AHEAD_OF_LARGE: usize = 4096;
/// A write's payload up to this is copied rather than read by a call of its own.
const SMALL: u64 = 16 << 10;

/// Bytes in their order, filled at the end and consumed at the front.
#[derive(Debug)]
pub(crate) struct ParseBuffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// How far it is filled.
    limit: usize,
}

impl ParseBuffer {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self {
            bytes: vec![0; CAPACITY].into_boxed_slice(),
            start: 0,
            end: 0,
            limit: CAPACITY,
        }
    }

    /// Bytes that were filled in and are not consumed.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// The first `n` bytes are done with.
    pub(crate) fn consume(&mut self, n: usize) {
        self.start = self.start.saturating_add(n).min(self.end);
    }

    /// Throws at most `n` bytes away, and tells how many.
    pub(crate) fn skip(&mut self, n: usize) -> usize {
        let n = n.min(self.unread().len());
        self.consume(n);
        n
    }

    /// Room for more bytes. There is some as long as less than an option with its data is unread.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let limit = if self.end < self.limit { self.limit } else { CAPACITY };
        &mut self.bytes[self.end..limit]
    }

    /// So many bytes are in the room.
    pub(crate) fn filled(&mut self, n: usize) {
        self.end = self.end.saturating_add(n).min(CAPACITY);
    }

    /// The client has sent this request: others like it may follow.
    pub(crate) fn expect_more_like(&mut self, q: &Request) {
        self.limit = match q.command {
            cmd::WRITE if q.len > SMALL => AHEAD_OF_LARGE,
            _ => CAPACITY,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(command: u16, len: u64) -> Request {
        Request {
            flags: 0,
            command,
            cookie: 7,
            offset: 0,
            len,
        }
    }

    #[test]
    fn bytes_come_out_as_they_went_in_wherever_they_are_cut() {
        let mut input = ParseBuffer::new();
        let (mut put, mut got) = (0u32, 0u32);
        for i in 0..10_000usize {
            let room = input.room();
            let n = (i * 7919 % 9000).min(room.len());
            for b in &mut room[..n] {
                *b = ((put * 31) >> 3) as u8;
                put += 1;
            }
            input.filled(n);
            let n = (i * 104_729 % 9100).min(input.unread().len());
            for b in &input.unread()[..n] {
                assert_eq!(*b, ((got * 31) >> 3) as u8, "byte {got}");
                got += 1;
            }
            input.consume(n);
        }
        assert!(got > 1 << 20);
        assert_eq!(input.unread().len(), (put - got) as usize);
    }

    #[test]
    fn little_is_read_ahead_of_large_writes_and_much_of_small_requests() {
        let mut input = ParseBuffer::new();
        input.expect_more_like(&request(cmd::WRITE, SMALL + 512));
        assert_eq!(input.room().len(), AHEAD_OF_LARGE);
        input.filled(27);
        assert_eq!(input.room().len(), AHEAD_OF_LARGE - 27);
        input.expect_more_like(&request(cmd::WRITE, SMALL));
        assert_eq!(input.room().len(), CAPACITY - 27);
        input.expect_more_like(&request(cmd::READ, SMALL + 512));
        assert_eq!(input.room().len(), CAPACITY - 27);
    }
}
