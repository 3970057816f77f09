//! Bytes that have come from a client and are not understood yet, and what requests are refused.

use crate::{
    block::Geometry,
    errno::Errno,
    nbd::proto::{self, Framing, Request, cmd, cmd_flag, tx},
};

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

/// Checks a request against the protocol, and names the error. `told` are the transmission flags that the client
/// knows, `framing` is what it has asked for, `allocation` whether it may ask what is allocated; the device may have become
/// another one since.
pub(crate) fn check(q: &Request, told: u16, framing: Framing, allocation: bool, g: &Geometry) -> Result<(), Errno> {
    let known = match q.command {
        cmd::WRITE_ZEROES => cmd_flag::FUA | cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
        cmd::READ if told & tx::SEND_DF != 0 => cmd_flag::FUA | cmd_flag::DF,
        cmd::WRITE if framing == Framing::Extended => cmd_flag::FUA | cmd_flag::PAYLOAD_LEN,
        cmd::BLOCK_STATUS => cmd_flag::FUA | cmd_flag::REQ_ONE,
        _ => cmd_flag::FUA,
    };
    let fua_unknown = q.flags & cmd_flag::FUA != 0 && told & (tx::SEND_FUA | tx::READ_ONLY) == 0;
    if q.flags & !known != 0 || fua_unknown {
        return Err(Errno::EINVAL);
    }
    let changes = matches!(q.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
    if changes && g.read_only {
        return Err(Errno::EPERM);
    }
    let (offset, len) = (q.offset, q.len);
    match q.command {
        cmd::FLUSH => return Ok(()),
        cmd::READ if q.len > proto::MAX_PAYLOAD.into() => return Err(Errno::EINVAL),
        cmd::BLOCK_STATUS if !allocation || len == 0 => return Err(Errno::EINVAL),
        cmd::WRITE_ZEROES if q.flags & cmd_flag::FAST_ZERO != 0 && g.max_write_zeroes == 0 => {
            return Err(Errno::EOPNOTSUPP);
        }
        cmd::TRIM if told & tx::SEND_TRIM == 0 => return Err(Errno::EINVAL),
        cmd::TRIM if g.max_discard == 0 => return Err(Errno::EOPNOTSUPP),
        cmd::READ | cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES | cmd::CACHE | cmd::BLOCK_STATUS => {}
        _ => return Err(Errno::EINVAL),
    }
    if !g.contains(offset, len) {
        let full = matches!(q.command, cmd::WRITE | cmd::WRITE_ZEROES);
        return Err(if full { Errno::ENOSPC } else { Errno::EINVAL });
    }
    if g.aligned(offset, len) {
        Ok(())
    } else {
        Err(Errno::EINVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 20;
    const GEOMETRY: Geometry = Geometry {
        size: SIZE,
        logical_block_size: 512,
        physical_block_size: 4096,
        max_transfer: 128 << 10,
        max_discard: 1 << 20,
        discard_granularity: 4096,
        read_only: false,
        write_cache: true,
        fua: true,
        max_write_zeroes: 0,
        queue_depth: 8,
    };
    const TOLD: u16 = tx::HAS_FLAGS | tx::SEND_FLUSH | tx::SEND_FUA | tx::SEND_TRIM | tx::SEND_WRITE_ZEROES;

    fn request(command: u16, flags: u16, offset: u64, len: u64) -> Request {
        Request {
            flags,
            command,
            cookie: 7,
            offset,
            len,
        }
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_error_that_the_protocol_names() {
        let refused = |command, flags, offset, len| {
            let q = request(command, flags, offset, len);
            check(&q, TOLD, Framing::Structured, true, &GEOMETRY).err()
        };
        let (fua, no_hole) = (cmd_flag::FUA, cmd_flag::NO_HOLE);
        for (command, flags, offset, len, error) in [
            (cmd::READ, 0, 0, 512, None),
            (cmd::READ, fua, SIZE - 512, 512, None),
            (cmd::READ, 0, SIZE, 512, Some(Errno::EINVAL)),
            (cmd::READ, 0, u64::MAX - 511, 512, Some(Errno::EINVAL)),
            (cmd::READ, 0, SIZE - 512, 1024, Some(Errno::EINVAL)),
            (cmd::READ, 0, 1, 512, Some(Errno::EINVAL)),
            (cmd::READ, 0, 0, 100, Some(Errno::EINVAL)),
            (
                cmd::READ,
                0,
                0,
                u64::from(proto::MAX_PAYLOAD) + 512,
                Some(Errno::EINVAL),
            ),
            (cmd::READ, cmd_flag::DF, 0, 512, Some(Errno::EINVAL)),
            (cmd::CACHE, 0, 0, SIZE, None),
            (cmd::CACHE, 0, 512, SIZE, Some(Errno::EINVAL)),
            (cmd::BLOCK_STATUS, cmd_flag::REQ_ONE, 0, SIZE, None),
            (cmd::BLOCK_STATUS, 0, 0, 0, Some(Errno::EINVAL)),
            (cmd::WRITE_ZEROES, cmd_flag::FAST_ZERO, 0, 512, Some(Errno::EOPNOTSUPP)),
            (cmd::READ, no_hole, 0, 512, Some(Errno::EINVAL)),
            (cmd::WRITE, fua, 0, 512, None),
            (cmd::WRITE, 1 << 4, 0, 512, Some(Errno::EINVAL)),
            (cmd::WRITE, cmd_flag::PAYLOAD_LEN, 0, 512, Some(Errno::EINVAL)),
            (cmd::WRITE, 0, SIZE, 512, Some(Errno::ENOSPC)),
            (cmd::WRITE, 0, 100, 512, Some(Errno::EINVAL)),
            (cmd::WRITE_ZEROES, fua | no_hole, 0, 512, None),
            (cmd::WRITE_ZEROES, 0, SIZE, 512, Some(Errno::ENOSPC)),
            (cmd::TRIM, fua, 0, 512, None),
            (cmd::TRIM, 0, SIZE, 512, Some(Errno::EINVAL)),
            // Where, and how much, does not matter.
            (cmd::FLUSH, 0, u64::MAX, 3, None),
            (cmd::FLUSH, no_hole, 0, 0, Some(Errno::EINVAL)),
            (8, 0, 0, 0, Some(Errno::EINVAL)),
            (99, 0, 0, 512, Some(Errno::EINVAL)),
        ] {
            assert_eq!(
                refused(command, flags, offset, len),
                error,
                "{command} {flags} {offset} {len}"
            );
        }
        for command in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
            assert_eq!(refused(command, 0, SIZE, 0), None, "nothing at the end");
        }
    }

    #[test]
    fn what_counts_is_what_the_client_was_told_and_what_the_device_is() {
        let error = |q: Request, told, g: &Geometry| check(&q, told, Framing::Structured, false, g).err();
        let read_only = Geometry {
            read_only: true,
            ..GEOMETRY
        };
        for command in [cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
            let q = request(command, 0, 0, 512);
            assert_eq!(error(q, TOLD, &read_only), Some(Errno::EPERM), "{command}");
        }
        let told = tx::HAS_FLAGS | tx::READ_ONLY;
        // Harmless, and some clients do it.
        assert_eq!(error(request(cmd::READ, cmd_flag::FUA, 0, 512), told, &read_only), None);
        let write = request(cmd::WRITE, cmd_flag::FUA, 0, 512);
        assert_eq!(error(write, TOLD & !tx::SEND_FUA, &GEOMETRY), Some(Errno::EINVAL));
        let trim = request(cmd::TRIM, 0, 0, 512);
        assert_eq!(error(trim, TOLD & !tx::SEND_TRIM, &GEOMETRY), Some(Errno::EINVAL));
        let cannot = Geometry {
            max_discard: 0,
            ..GEOMETRY
        };
        assert_eq!(error(trim, TOLD, &cannot), Some(Errno::EOPNOTSUPP));
        let fast = Geometry {
            max_write_zeroes: 1 << 20,
            ..GEOMETRY
        };
        let zero = request(cmd::WRITE_ZEROES, cmd_flag::FAST_ZERO | cmd_flag::NO_HOLE, 0, 512);
        assert_eq!(error(zero, TOLD, &fast), None);
        let read = request(cmd::READ, cmd_flag::DF, 0, 512);
        assert_eq!(error(read, TOLD | tx::SEND_DF, &GEOMETRY), None);
        let status = request(cmd::BLOCK_STATUS, 0, 0, 512);
        assert_eq!(error(status, TOLD, &GEOMETRY), Some(Errno::EINVAL));
        let smaller = Geometry { size: 4096, ..GEOMETRY };
        assert_eq!(
            error(request(cmd::READ, 0, 8192, 512), TOLD, &smaller),
            Some(Errno::EINVAL)
        );
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
        input.expect_more_like(&request(cmd::WRITE, 0, 0, SMALL + 512));
        assert_eq!(input.room().len(), AHEAD_OF_LARGE);
        input.filled(27);
        assert_eq!(input.room().len(), AHEAD_OF_LARGE - 27);
        input.expect_more_like(&request(cmd::WRITE, 0, 0, SMALL));
        assert_eq!(input.room().len(), CAPACITY - 27);
        input.expect_more_like(&request(cmd::READ, 0, 0, SMALL + 512));
        assert_eq!(input.room().len(), CAPACITY - 27);
    }
}
