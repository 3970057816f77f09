//! Output to a client: answers of the negotiation, then replies; and the account of its in-flight requests.

use core::time::Duration;
use std::collections::VecDeque;

use roce_verbs::Instant;
use rtrs::client::buffers::Buffer;
use smallvec::SmallVec;

use crate::nbd::{
    copy::{BufferCopy, zeroes},
    framing::Head,
    state::Stall,
};

/// Replies that go out in one call.
const BATCH: usize = 64;
/// Pieces of one call (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;
/// A client that takes nothing for so long no longer keeps buffers: its data moves to the heap.
const PATIENCE: Duration = Duration::from_millis(100);

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
    header: Head,
    data: SmallVec<[Data; 1]>,
    /// Bytes that the request counts for.
    charge: u64,
}

impl Reply {
    /// To a request that counts for `charge` bytes.
    pub(crate) fn new(header: Head, data: SmallVec<[Data; 1]>, charge: u64) -> Self {
        Self { header, data, charge }
    }

    fn len(&self) -> usize {
        self.header.len() + self.data.iter().map(Data::len).sum::<usize>()
    }

    fn lent(&self) -> usize {
        self.data.iter().filter(|d| matches!(d, Data::Device(_))).count()
    }

    /// Gathers the bytes after the first `skip`. `false`: there is no room for all of them.
    fn gather<'a>(&'a self, mut skip: usize, room: usize, out: &mut Vec<Piece<'a>>) -> bool {
        let header = core::iter::once((None, self.header.len()));
        for (data, len) in header.chain(self.data.iter().map(|d| (Some(d), d.len()))) {
            if skip >= len {
                skip -= len;
                continue;
            }
            if out.len() >= room {
                return false;
            }
            out.push(match data {
                None => Piece::Bytes(&self.header[skip..]),
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

    fn free(self, free: &mut impl Extend<Buffer>) {
        free.extend(self.data.into_iter().filter_map(|d| match d {
            Data::Device(buffer) => Some(buffer),
            Data::Heap(_) => None,
        }));
    }
}

/// In-flight requests of a connection: read, and replies not sent yet.
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

    /// Returns what another request has to wait for. One alone may be larger than the limit.
    pub(crate) fn blocked(&self, bytes: u64) -> Option<Stall> {
        if self.requests >= self.max_requests {
            return Some(Stall::Requests);
        }
        let full = self.requests > 0 && self.bytes.saturating_add(bytes) > self.max_bytes;
        full.then_some(Stall::Bytes)
    }

    /// Counts a request.
    pub(crate) fn admit(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes += bytes;
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
    /// Since when the client has taken nothing of what is there.
    since: Instant,
    /// The next reply whose buffers are to be copied to the heap.
    spill: Option<usize>,
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
            spill: None,
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
    pub(crate) fn push(&mut self, now: Instant, reply: Reply, account: &mut Account, free: &mut impl Extend<Buffer>) {
        if self.closed {
            account.settle(&reply);
            return reply.free(free);
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
    pub(crate) fn sent(&mut self, now: Instant, n: usize, account: &mut Account, free: &mut impl Extend<Buffer>) {
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
            self.pop(account, free);
        }
        debug_assert_eq!(self.sent, 0, "more was sent than was there");
        self.sent = 0;
    }

    fn pop(&mut self, account: &mut Account, free: &mut impl Extend<Buffer>) {
        let Some(reply) = self.replies.pop_front() else { return };
        account.settle(&reply);
        self.lent -= reply.lent();
        self.spill = self.spill.map(|i| i.saturating_sub(1));
        reply.free(free);
    }

    /// Drops what is there, and what will come.
    pub(crate) fn close(&mut self, account: &mut Account, free: &mut impl Extend<Buffer>) {
        self.closed = true;
        self.text = Vec::new();
        (self.text_sent, self.sent, self.spill) = (0, 0, None);
        while !self.replies.is_empty() {
            self.pop(account, free);
        }
    }

    /// When the client's buffers are to be copied, if it takes nothing until then.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        (self.lent > 0 && self.spill.is_none()).then(|| self.since + PATIENCE)
    }

    /// Looks whether that time has come.
    pub(crate) fn timeout(&mut self, now: Instant) {
        if self.deadline().is_some_and(|due| due <= now) {
            self.spill = Some(0);
            // What has no memory for a copy, and what is queued from here on, has its time.
            self.since = now;
        }
    }

    /// The next copy that gives a buffer back. Without memory for it, the buffer stays.
    pub(crate) fn poll_spill<'a>(&'a mut self, free: &'a mut VecDeque<Buffer>) -> Option<BufferCopy<'a>> {
        let (reply, part, bytes) = loop {
            let i = self.spill?;
            let Some(reply) = self.replies.get(i) else {
                self.spill = None;
                return None;
            };
            let lent = reply.data.iter().position(|d| matches!(d, Data::Device(_)));
            let copy = lent.and_then(|part| Some((part, zeroes(reply.data.get(part)?.len())?)));
            match copy {
                Some((part, bytes)) => break (i, part, bytes),
                None => self.spill = Some(i + 1),
            }
        };
        let place = self.replies.get_mut(reply)?.data.get_mut(part)?;
        if let Data::Device(buffer) = core::mem::replace(place, Data::Heap(bytes)) {
            self.lent -= 1;
            free.push_back(buffer);
        }
        match (place, free.back()) {
            (Data::Heap(out), Some(buffer)) => Some(BufferCopy::Read { buffer, at: 0, out }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_is_taken_is_not_hoarded() {
        let mut account = Account::new(1, 1);
        let mut free = VecDeque::new();
        let mut out = Outbox::new(Instant::ZERO, &[0; 1000]);
        for _ in 0..10_000 {
            out.text().extend([1; 1000]);
            out.sent(Instant::ZERO, 1000, &mut account, &mut free);
            assert_eq!(out.unsent_text(), 1000);
        }
        assert!(out.text().capacity() < 64 << 10);
        out.sent(Instant::ZERO, 1000, &mut account, &mut free);
        assert!(out.is_empty());
    }

    #[test]
    fn one_request_may_be_larger_than_all_others_together() {
        let mut account = Account::new(3, 100);
        assert_eq!(account.blocked(1000), None);
        account.admit(60);
        assert_eq!(account.blocked(41), Some(Stall::Bytes));
        assert_eq!(account.blocked(40), None);
        account.admit(40);
        assert_eq!(account.blocked(0), None, "what moves nothing goes on");
        account.admit(0);
        assert_eq!(account.blocked(0), Some(Stall::Requests));
    }
}
