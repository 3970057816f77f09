//! Requests to a disk and their results.

use std::{collections::VecDeque, io, ops::Range};

use rnbd::block::{BlockOp, Geometry};

/// Operation on a disk. Offsets and lengths are in bytes, multiples of the logical block size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request {
    /// Read `len` bytes.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: usize,
    },
    /// Write bytes.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes to write. The buffer comes back with the result, for reuse.
        data: Vec<u8>,
        /// Forced unit access: durable when it has ended.
        fua: bool,
    },
    /// Make all completed writes durable.
    Flush,
    /// Tell the server that bytes are not needed any more; reading them gives anything.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Make bytes zero without sending them.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The server may give the space back.
        may_unmap: bool,
    },
}

impl Request {
    pub(crate) fn op(&self) -> BlockOp {
        match self {
            Self::Read { .. } => BlockOp::Read,
            Self::Write { fua, .. } => BlockOp::Write { fua: *fua },
            Self::Flush => BlockOp::Flush,
            Self::Discard { .. } => BlockOp::Discard,
            Self::WriteZeroes { may_unmap, .. } => BlockOp::WriteZeroes {
                fua: false,
                may_unmap: *may_unmap,
            },
        }
    }

    /// First byte, and bytes.
    fn range(&self) -> (u64, u64) {
        match self {
            Self::Read { offset, len } => (*offset, *len as u64),
            Self::Write { offset, data, .. } => (*offset, data.len() as u64),
            Self::Flush => (0, 0),
            Self::Discard { offset, len } | Self::WriteZeroes { offset, len, .. } => (*offset, *len),
        }
    }

    /// Whether a device can do it.
    ///
    /// # Errors
    /// Says why not: `InvalidInput` for the range, or what the device refuses.
    pub(crate) fn check(&self, geometry: &Geometry) -> io::Result<()> {
        let (offset, len) = self.range();
        let invalid = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        if self.op().writes() && geometry.read_only {
            let text = "the disk is open read-only, or read-only at the server";
            return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, text));
        }
        if !geometry.aligned(offset, len) {
            return invalid(format!(
                "{len} bytes at {offset}: both must be multiples of the block size of {} bytes",
                geometry.logical_block_size
            ));
        }
        if !geometry.contains(offset, len) {
            return invalid(format!(
                "{len} bytes at {offset} are beyond the end of the device, which has {} bytes",
                geometry.size
            ));
        }
        Ok(())
    }
}

/// Result of an operation: the bytes of a read, or the data of a write for reuse; else nothing.
pub(crate) type Outcome = io::Result<Vec<u8>>;

/// Destination of a result.
pub(crate) enum Reply {
    /// Into the queue of a loop of the caller's, under this number.
    Queue(u64),
    /// To a thread or task that waits.
    Call(Box<dyn FnOnce(Outcome) + Send>),
}

/// An operation on its way. Data moves in parts of what the server takes at a time, several of which are in flight together.
pub(crate) struct Transfer {
    op: BlockOp,
    offset: u64,
    len: u64,
    data: Vec<u8>,
    /// First byte of the next part.
    next: usize,
    in_flight: usize,
    result: io::Result<()>,
    reply: Reply,
}

impl Transfer {
    pub(crate) fn new(request: Request, reply: Reply) -> Self {
        let op = request.op();
        let (offset, len) = request.range();
        let data = match request {
            Request::Read { len, .. } => vec![0; len],
            Request::Write { data, .. } => data,
            _ => Vec::new(),
        };
        Self {
            op,
            offset,
            len,
            data,
            next: 0,
            in_flight: 0,
            result: Ok(()),
            reply,
        }
    }

    pub(crate) fn op(&self) -> BlockOp {
        self.op
    }

    /// First byte on the device, and bytes.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.offset, self.len)
    }

    /// The part of the data that is to be sent next, of at most `most` bytes.
    pub(crate) fn next_part(&self, most: usize) -> Option<Range<usize>> {
        let end = self.data.len().min(self.next + most.max(1));
        (self.result.is_ok() && self.next < end).then_some(self.next..end)
    }

    /// A part is in flight.
    pub(crate) fn begin(&mut self, part: &Range<usize>) {
        self.next = part.end;
        self.in_flight += 1;
    }

    /// A part has ended.
    pub(crate) fn end(&mut self, result: io::Result<()>) {
        self.in_flight -= 1;
        if result.is_err() && self.result.is_ok() {
            self.result = result;
        }
    }

    /// It can't go on.
    pub(crate) fn fail(&mut self, why: io::Error) {
        self.result = Err(why);
    }

    /// Nothing of it is left to do.
    pub(crate) fn is_over(&self) -> bool {
        self.in_flight == 0 && (self.result.is_err() || self.next == self.data.len())
    }

    /// Bytes of a part.
    pub(crate) fn bytes(&mut self, part: Range<usize>) -> &mut [u8] {
        &mut self.data[part]
    }

    pub(crate) fn finish(self, queue: &mut VecDeque<(u64, Outcome)>) {
        let outcome = self.result.map(|()| self.data);
        match self.reply {
            Reply::Queue(user) => queue.push_back((user, outcome)),
            Reply::Call(call) => call(outcome),
        }
    }
}

impl Reply {
    /// Refuses an operation that did not begin.
    pub(crate) fn refuse(self, why: io::Error, queue: &mut VecDeque<(u64, Outcome)>) {
        match self {
            Self::Queue(user) => queue.push_back((user, Err(why))),
            Self::Call(call) => call(Err(why)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rnbd::Errno;

    use super::*;

    const DISK: Geometry = Geometry {
        size: 8192,
        logical_block_size: 512,
        physical_block_size: 512,
        max_transfer: 1024,
        max_discard: 4096,
        discard_granularity: 512,
        read_only: false,
        write_cache: true,
        fua: true,
        max_write_zeroes: 0,
        queue_depth: 4,
    };

    fn why(request: &Request, geometry: &Geometry) -> String {
        request
            .check(geometry)
            .map_or_else(|e| e.to_string(), |()| String::new())
    }

    #[test]
    fn what_can_not_be_says_why() {
        let read = |offset, len| Request::Read { offset, len };
        assert_eq!(why(&read(512, 7680), &DISK), "");
        assert_eq!(
            why(&read(100, 7), &DISK),
            "7 bytes at 100: both must be multiples of the block size of 512 bytes"
        );
        assert_eq!(
            why(&read(512, 8192), &DISK),
            "8192 bytes at 512 are beyond the end of the device, which has 8192 bytes"
        );
        let read_only = Geometry {
            read_only: true,
            ..DISK
        };
        let discard = Request::Discard { offset: 0, len: 512 };
        assert_eq!(
            discard.check(&read_only).unwrap_err().kind(),
            io::ErrorKind::ReadOnlyFilesystem
        );
        assert_eq!(why(&Request::Flush, &read_only), "");
    }

    #[test]
    fn data_goes_in_parts_and_the_first_error_ends_it() {
        let write = Request::Write {
            offset: 512,
            data: vec![7; 2560],
            fua: false,
        };
        let mut transfer = Transfer::new(write, Reply::Queue(3));
        let mut parts = Vec::new();
        while let Some(part) = transfer.next_part(1024) {
            transfer.begin(&part);
            parts.push(part);
        }
        assert_eq!(parts, [0..1024, 1024..2048, 2048..2560]);
        transfer.end(Ok(()));
        transfer.end(Err(Errno::EIO.into()));
        assert!(!transfer.is_over());
        transfer.end(Err(Errno::ENOSPC.into()));
        assert!(transfer.is_over());
        let mut queue = VecDeque::new();
        transfer.finish(&mut queue);
        let (user, outcome) = queue.pop_front().unwrap();
        assert_eq!((user, outcome.unwrap_err().raw_os_error()), (3, Some(Errno::EIO.raw())));
    }
}
