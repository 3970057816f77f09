//! Output to a client: answers of the negotiation, then replies; and the account of its requests in flight.

use core::time::Duration;
use std::collections::VecDeque;

use roce_verbs::Instant;
use rtrs::client::buffers::Buffer;
use smallvec::SmallVec;

use crate::{
    block::Extent,
    nbd::{
        memory::{Memory, copy_from, give, zeroes},
        proto::{self, Framing, chunk, cmd, state},
        state::Stall,
    },
};

/// Replies that go out in one call.
const BATCH: usize = 64;
/// Pieces of one call (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;
/// Pause of a client that takes nothing after which its data moves from buffers to the heap.
const PAUSE: Duration = Duration::from_millis(100);

/// Read data on its way out.
#[derive(Debug)]
pub(crate) enum Data {
    /// Still in its buffer.
    Device(Buffer),
    /// Copied.
    Heap(Vec<u8>),
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Self::Device(b) => b.len(),
            Self::Heap(v) => v.len(),
        }
    }
}

/// Bytes to be sent, in their order.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// These.
    Bytes(&'a [u8]),
    /// A part of a buffer.
    Data {
        /// The buffer.
        buffer: &'a Buffer,
        /// First byte in it.
        at: usize,
        /// Bytes.
        len: usize,
    },
}

impl Piece<'_> {
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Data { len, .. } => *len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A reply.
#[derive(Debug)]
pub(crate) struct Reply {
    head: Head,
    data: SmallVec<[Data; 1]>,
    /// Bytes that the request counts for.
    charge: u64,
}

impl Reply {
    /// To a request that counts for `charge` bytes.
    pub(crate) fn new(head: Head, data: SmallVec<[Data; 1]>, charge: u64) -> Self {
        Self { head, data, charge }
    }

    fn len(&self) -> usize {
        self.head.len() + self.data.iter().map(Data::len).sum::<usize>()
    }

    fn lent(&self) -> usize {
        self.data.iter().filter(|d| matches!(d, Data::Device(_))).count()
    }

    /// Gathers the bytes after the first `skip`. `false`: there is no room for all of them.
    fn gather<'a>(&'a self, mut skip: usize, room: usize, out: &mut Vec<Piece<'a>>) -> bool {
        let head = core::iter::once((None, self.head.len()));
        for (data, len) in head.chain(self.data.iter().map(|d| (Some(d), d.len()))) {
            if skip >= len {
                skip -= len;
                continue;
            }
            if out.len() >= room {
                return false;
            }
            out.push(match data {
                None => Piece::Bytes(&self.head[skip..]),
                Some(Data::Heap(bytes)) => Piece::Bytes(&bytes[skip..]),
                Some(Data::Device(buffer)) => Piece::Data {
                    buffer,
                    at: skip,
                    len: len - skip,
                },
            });
            skip = 0;
        }
        true
    }

    fn free(self, memory: &mut dyn Memory) {
        for data in self.data {
            if let Data::Device(buffer) = data {
                give(memory, Some(buffer));
            }
        }
    }
}

/// Limits of a connection's requests in flight: those that were read, and whose replies are not sent yet.
#[derive(Debug)]
pub(crate) struct Account {
    requests: usize,
    bytes: u64,
    max_requests: usize,
    max_bytes: u64,
}

impl Account {
    /// Nothing in flight.
    pub(crate) fn new(max_requests: usize, max_bytes: u64) -> Self {
        Self {
            requests: 0,
            bytes: 0,
            max_requests,
            max_bytes,
        }
    }

    /// The limit of bytes is another one.
    pub(crate) fn set_max_bytes(&mut self, max_bytes: u64) {
        self.max_bytes = max_bytes;
    }

    /// Counts another request. One alone may be larger than the limit.
    ///
    /// # Errors
    /// Limit that the request has to wait for.
    pub(crate) fn admit(&mut self, bytes: u64) -> Result<(), Stall> {
        if self.requests >= self.max_requests {
            return Err(Stall::Requests);
        }
        if self.requests > 0 && self.bytes.saturating_add(bytes) > self.max_bytes {
            return Err(Stall::Bytes);
        }
        self.requests += 1;
        self.bytes += bytes;
        Ok(())
    }

    fn settle(&mut self, reply: &Reply) {
        self.requests = self.requests.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(reply.charge);
    }

    /// Requests and bytes in flight.
    pub(crate) fn in_flight(&self) -> (usize, u64) {
        (self.requests, self.bytes)
    }
}

/// Bytes to send.
#[derive(Debug)]
pub(crate) struct Outbox {
    /// Answers of the negotiation; of these so many bytes are sent.
    text: Vec<u8>,
    text_sent: usize,
    replies: VecDeque<Reply>,
    /// Bytes of the first reply that are sent.
    sent: usize,
    /// Buffers in `replies`.
    lent: usize,
    /// Since when the client has taken nothing.
    since: Instant,
    /// Nothing is sent any more.
    closed: bool,
}

impl Outbox {
    /// With these first bytes.
    pub(crate) fn new(now: Instant, text: &[u8]) -> Self {
        Self {
            text: text.to_vec(),
            text_sent: 0,
            replies: VecDeque::new(),
            sent: 0,
            lent: 0,
            since: now,
            closed: false,
        }
    }

    /// Returns the buffer that answers of the negotiation are appended to.
    pub(crate) fn text(&mut self) -> &mut Vec<u8> {
        &mut self.text
    }

    /// Bytes of the negotiation that are not sent.
    pub(crate) fn unsent_text(&self) -> usize {
        self.text.len() - self.text_sent
    }

    /// Whether nothing is to be sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.unsent_text() == 0 && self.replies.is_empty()
    }

    /// Whether nothing is sent any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Queues a reply.
    pub(crate) fn push(&mut self, now: Instant, reply: Reply, account: &mut Account, memory: &mut dyn Memory) {
        if self.closed {
            account.settle(&reply);
            return reply.free(memory);
        }
        if self.is_empty() {
            self.since = now;
        }
        self.lent += reply.lent();
        self.replies.push_back(reply);
    }

    /// Appends what is to be sent next: the rest of the negotiation, and up to 64 replies. `out` gets 1024 pieces at most.
    pub(crate) fn gather<'a>(&'a self, out: &mut Vec<Piece<'a>>) {
        let text = &self.text[self.text_sent..];
        if !text.is_empty() && out.len() < MAX_PIECES {
            out.push(Piece::Bytes(text));
        }
        let mut skip = self.sent;
        for reply in self.replies.iter().take(BATCH) {
            if !reply.gather(skip, MAX_PIECES, out) {
                return;
            }
            skip = 0;
        }
    }

    /// The client has taken `n` bytes.
    pub(crate) fn sent(&mut self, now: Instant, n: usize, account: &mut Account, memory: &mut dyn Memory) {
        if n > 0 {
            self.since = now;
        }
        let text = n.min(self.unsent_text());
        self.text_sent += text;
        if self.text_sent > self.text.len() / 2 {
            self.text.drain(..self.text_sent);
            self.text_sent = 0;
        }
        self.sent += n - text;
        while let Some(first) = self.replies.front() {
            let len = first.len();
            if self.sent < len {
                return;
            }
            self.sent -= len;
            self.pop(account, memory);
        }
        debug_assert_eq!(self.sent, 0, "more was sent than was there");
        self.sent = 0;
    }

    fn pop(&mut self, account: &mut Account, memory: &mut dyn Memory) {
        let Some(reply) = self.replies.pop_front() else { return };
        account.settle(&reply);
        self.lent -= reply.lent();
        reply.free(memory);
    }

    /// Drops what is there, and what will come.
    pub(crate) fn close(&mut self, account: &mut Account, memory: &mut dyn Memory) {
        self.closed = true;
        self.text = Vec::new();
        (self.text_sent, self.sent) = (0, 0);
        while !self.replies.is_empty() {
            self.pop(account, memory);
        }
    }

    /// When buffers are copied to the heap, if the client takes nothing until then.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        (self.lent > 0).then(|| self.since + PAUSE)
    }

    /// Copies buffers to the heap when it is time. Without memory for that, they stay.
    pub(crate) fn timeout(&mut self, now: Instant, memory: &mut dyn Memory) {
        if self.deadline().is_none_or(|due| due > now) {
            return;
        }
        self.since = now;
        for data in self.replies.iter_mut().flat_map(|reply| &mut reply.data) {
            let Data::Device(buffer) = data else { continue };
            let Some(mut bytes) = zeroes(buffer.len()) else {
                continue;
            };
            copy_from(memory, buffer, &mut bytes);
            if let Data::Device(buffer) = core::mem::replace(data, Data::Heap(bytes)) {
                self.lent -= 1;
                give(memory, Some(buffer));
            }
        }
    }
}

/// Head of a reply: the bytes before its data. The longest is that of extents in an extended chunk.
type Head = SmallVec<[u8; 40]>;

/// Answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// It is done.
    Done,
    /// It has failed: an error of the protocol, not 0.
    Failed(u32),
    /// So many bytes follow, from the request's offset on.
    Data { len: u64 },
    /// So many extents of the context that was chosen follow, from the request's offset on.
    Status { extents: usize },
}

/// The client's number for the context `base:allocation`.
pub(crate) const ALLOCATION_ID: u32 = 1;

/// Header of a request, as far as its reply needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) framing: Framing,
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
}

/// The head of the reply to a request. A reply is one chunk: so `NBD_CMD_FLAG_DF` is always obeyed.
pub(crate) fn head(request: Header, answer: Answer) -> Head {
    let Header {
        framing,
        cookie,
        offset,
        ..
    } = request;
    let in_chunks = match framing {
        Framing::Simple => false,
        Framing::Structured => matches!(request.command, cmd::READ | cmd::BLOCK_STATUS),
        Framing::Extended => true,
    };
    if !in_chunks {
        let error = if let Answer::Failed(error) = answer { error } else { 0 };
        return simple(cookie, error);
    }
    let extended = framing == Framing::Extended;
    let mut body = Head::new();
    let (kind, behind) = match answer {
        Answer::Done => (chunk::NONE, 0),
        Answer::Failed(error) => {
            body.extend_from_slice(&error.to_be_bytes());
            // No text.
            body.extend_from_slice(&[0; 2]);
            (chunk::ERROR, 0)
        }
        Answer::Data { len } => {
            body.extend_from_slice(&offset.to_be_bytes());
            (chunk::OFFSET_DATA, len)
        }
        Answer::Status { extents } => {
            body.extend_from_slice(&ALLOCATION_ID.to_be_bytes());
            let kind = if extended {
                body.extend_from_slice(&(extents as u32).to_be_bytes());
                chunk::BLOCK_STATUS_EXT
            } else {
                chunk::BLOCK_STATUS
            };
            (kind, (extents * extent_len(framing)) as u64)
        }
    };
    let len = body.len() as u64 + behind;
    let mut head = Head::new();
    let magic = if extended {
        proto::EXTENDED_REPLY_MAGIC
    } else {
        proto::STRUCTURED_REPLY_MAGIC
    };
    head.extend_from_slice(&magic.to_be_bytes());
    head.extend_from_slice(&proto::CHUNK_DONE.to_be_bytes());
    head.extend_from_slice(&kind.to_be_bytes());
    head.extend_from_slice(&cookie.to_be_bytes());
    if extended {
        head.extend_from_slice(&offset.to_be_bytes());
        head.extend_from_slice(&len.to_be_bytes());
    } else {
        head.extend_from_slice(&(len as u32).to_be_bytes());
    }
    head.extend_from_slice(&body);
    head
}

fn simple(cookie: u64, error: u32) -> Head {
    let mut head = Head::new();
    head.extend_from_slice(&proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
    head.extend_from_slice(&error.to_be_bytes());
    head.extend_from_slice(&cookie.to_be_bytes());
    head
}

/// Bytes of an extent.
const fn extent_len(framing: Framing) -> usize {
    match framing {
        Framing::Simple | Framing::Structured => 8,
        Framing::Extended => 16,
    }
}

/// The extents of a reply. A compact request is never longer than a compact extent can be.
pub(crate) fn extents(framing: Framing, extents: &[Extent]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(extents.len() * extent_len(framing));
    for extent in extents {
        let flags = [(extent.hole, state::HOLE), (extent.zero, state::ZERO)];
        let set = flags.iter().filter(|(is_set, _)| *is_set);
        let flags = set.fold(0, |all, (_, flag)| all | flag);
        if framing == Framing::Extended {
            bytes.extend_from_slice(&extent.len.to_be_bytes());
            bytes.extend_from_slice(&u64::from(flags).to_be_bytes());
        } else {
            bytes.extend_from_slice(&u32::try_from(extent.len).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(&flags.to_be_bytes());
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use rtrs::client::buffers::Buffers;

    use super::*;
    use crate::errno::Errno;

    struct Nothing;

    impl Memory for Nothing {
        fn take(&mut self, _: usize) -> Result<Option<Buffer>, Errno> {
            Ok(None)
        }

        fn buffers(&mut self) -> Option<&mut Buffers> {
            None
        }
    }

    #[test]
    fn text_that_is_taken_is_not_hoarded() {
        let mut account = Account::new(1, 1);
        let mut out = Outbox::new(Instant::ZERO, &[0; 1000]);
        for _ in 0..10_000 {
            out.text().extend([1; 1000]);
            out.sent(Instant::ZERO, 1000, &mut account, &mut Nothing);
            assert_eq!(out.unsent_text(), 1000);
        }
        assert!(out.text().capacity() < 64 << 10);
        out.sent(Instant::ZERO, 1000, &mut account, &mut Nothing);
        assert!(out.is_empty());
    }

    #[test]
    fn one_request_may_be_larger_than_all_others_together() {
        assert_eq!(Account::new(3, 100).admit(1000), Ok(()));
        let mut account = Account::new(3, 100);
        assert_eq!(account.admit(60), Ok(()));
        assert_eq!(account.admit(41), Err(Stall::Bytes));
        assert_eq!(account.admit(40), Ok(()));
        assert_eq!(account.admit(0), Ok(()), "what moves nothing goes on");
        assert_eq!(account.admit(0), Err(Stall::Requests));
    }
}
