//! Messages of one direction of a connection, put together from their packets.
//!
//! A message is dissected when its last packet is first seen. Packets that come again are known by their PSN, whether the sender goes
//! back to a lost packet and repeats all that followed, or only what is missing.

use std::{borrow::Cow, collections::VecDeque};

use roce_bth::{Class, Packet, Psn, Reth};

use crate::exchange::ExchangeId;

/// Bytes kept from the beginning of a message.
const HEAD: usize = 24 << 10;
/// Bytes kept from the end of a longer message.
const TAIL: usize = 8 << 10;
/// Messages that are being put together at most.
const MAX_PARTS: usize = 4;
/// Messages that are remembered for their repetitions and acknowledgements.
const MAX_DONE: usize = 256;
/// PSNs behind which a remembered message is of a former round of the counter.
const ROUND: u32 = 1 << 22;
/// PSNs that a message may be ahead of another that is complete later.
const AHEAD: u32 = 1 << 16;

/// Bytes of a message: all, or its beginning and end.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    len: usize,
}

impl Buffer {
    fn push(&mut self, bytes: &[u8]) {
        self.len = self.len.saturating_add(bytes.len());
        let (head, rest) = bytes.split_at(bytes.len().min(HEAD - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        let over = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..over);
    }

    fn kept(&self) -> usize {
        self.head.len() + self.tail.len()
    }

    /// Returns bytes of the message, if they were kept.
    fn get(&self, at: usize, len: usize) -> Option<Cow<'_, [u8]>> {
        let end = at.checked_add(len)?;
        if let Some(bytes) = self.head.get(at..end) {
            return Some(bytes.into());
        }
        let tail_at = self.len.checked_sub(self.tail.len())?;
        let gap = tail_at != self.head.len();
        if end > self.len || (gap && at < tail_at) {
            return None;
        }
        let from_head = self.head.get(at..).unwrap_or_default();
        let skip = at.saturating_sub(tail_at);
        let from_tail = self.tail.iter().skip(skip).take(end - at.max(tail_at));
        Some(from_head.iter().chain(from_tail).copied().collect::<Vec<u8>>().into())
    }
}

/// Bytes of a complete message.
#[derive(Debug)]
pub(crate) enum Bytes<'a> {
    /// Of a packet, at this offset.
    Packet(&'a [u8], usize),
    /// Of several.
    Several(Buffer),
}

/// Complete message.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub(crate) class: Class,
    /// Header of a WRITE.
    pub(crate) reth: Option<Reth>,
    /// Immediate data.
    pub(crate) imm: Option<u32>,
    /// Key that the message revokes.
    pub(crate) ieth: Option<u32>,
    pub(crate) bytes: Bytes<'a>,
    /// Packets of the message.
    pub(crate) packets: u32,
    range: (Psn, Psn),
    /// Exchange of the message's first packet.
    pub(crate) exchange: Option<ExchangeId>,
}

impl Message<'_> {
    /// Bytes of the message.
    pub(crate) fn len(&self) -> usize {
        match &self.bytes {
            Bytes::Packet(bytes, _) => bytes.len(),
            Bytes::Several(buffer) => buffer.len,
        }
    }

    /// Offset of the message's byte 0 from the base of its layers.
    pub(crate) fn origin(&self) -> usize {
        match self.bytes {
            Bytes::Packet(_, at) => at,
            Bytes::Several(_) => 0,
        }
    }

    /// Returns bytes of the message, if they were kept.
    pub(crate) fn get(&self, at: usize, len: usize) -> Option<Cow<'_, [u8]>> {
        match &self.bytes {
            Bytes::Packet(bytes, _) => bytes.get(at..at.checked_add(len)?).map(Cow::Borrowed),
            Bytes::Several(buffer) => buffer.get(at, len),
        }
    }

    /// Returns the beginning of the message, as far as it was kept: all of messages of at most 24 KiB.
    pub(crate) fn head(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Packet(bytes, _) => bytes,
            Bytes::Several(buffer) => &buffer.head,
        }
    }
}

/// Message that was complete.
#[derive(Clone, Copy, Debug)]
struct Done {
    first: Psn,
    last: Psn,
    exchange: Option<ExchangeId>,
}

/// Message that is being put together.
#[derive(Debug)]
struct Part {
    first: Psn,
    next: Psn,
    class: Class,
    reth: Option<Reth>,
    buffer: Buffer,
    exchange: Option<ExchangeId>,
}

/// Answer to a packet.
#[derive(Debug)]
pub(crate) enum Step<'a> {
    /// The packet completes a message.
    Whole(Message<'a>),
    /// First or middle packet of a message, which has so many bytes up to here.
    Part {
        /// Bytes.
        len: usize,
        /// First packet, which was not seen before.
        starts: bool,
        /// The packet was seen before.
        repeated: bool,
    },
    /// The message was complete before.
    Repeated,
    /// Packets before it are missing.
    Lost,
}

/// Direction of a connection.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    parts: Vec<Part>,
    done: VecDeque<Done>,
}

/// Returns whether `psn` is in `first..=last`.
fn within(psn: Psn, first: Psn, last: Psn) -> bool {
    psn.offset_from(first) <= last.offset_from(first)
}

impl Flow {
    /// Takes a packet of a SEND or WRITE. `at` is the offset of its payload.
    pub(crate) fn push<'a>(&mut self, packet: &Packet<'a>, at: usize) -> Step<'a> {
        let header = packet.header;
        let psn = header.bth.psn;
        let info = header.bth.opcode.info();
        if self.done.iter().any(|d| within(psn, d.first, d.last)) {
            return Step::Repeated;
        }
        let known = self
            .parts
            .iter()
            .find(|p| p.next != psn && within(psn, p.first, p.next));
        if let Some(part) = known {
            return Step::Part {
                len: part.buffer.len,
                starts: false,
                repeated: true,
            };
        }
        if info.position.starts() {
            if info.position.ends() {
                return Step::Whole(Message {
                    class: info.class,
                    reth: header.reth(),
                    imm: header.imm(),
                    ieth: header.ieth().map(|key| key.0),
                    bytes: Bytes::Packet(packet.payload, at),
                    packets: 1,
                    range: (psn, psn),
                    exchange: None,
                });
            }
            self.start(packet);
        } else {
            return self.go_on(packet);
        }
        Step::Part {
            len: packet.payload.len(),
            starts: true,
            repeated: false,
        }
    }

    fn start(&mut self, packet: &Packet<'_>) {
        let psn = packet.header.bth.psn;
        let mut buffer = Buffer::default();
        buffer.push(packet.payload);
        // The connection has room for 64 KiB: half of it in this direction.
        let kept = |parts: &[Part]| parts.iter().map(|p| p.buffer.kept()).sum::<usize>();
        while !self.parts.is_empty() && (self.parts.len() >= MAX_PARTS || kept(&self.parts) > HEAD) {
            self.parts.remove(0);
        }
        self.parts.push(Part {
            first: psn,
            next: psn.next(),
            class: packet.header.bth.opcode.info().class,
            reth: packet.header.reth(),
            buffer,
            exchange: None,
        });
    }

    fn go_on<'a>(&mut self, packet: &Packet<'a>) -> Step<'a> {
        let header = packet.header;
        let (psn, info) = (header.bth.psn, header.bth.opcode.info());
        let Some(index) = self.parts.iter().position(|p| p.next == psn && p.class == info.class) else {
            return Step::Lost;
        };
        let part = &mut self.parts[index];
        part.buffer.push(packet.payload);
        part.next = psn.next();
        if !info.position.ends() {
            let len = part.buffer.len;
            self.limit(index);
            return Step::Part {
                len,
                starts: false,
                repeated: false,
            };
        }
        let part = self.parts.remove(index);
        Step::Whole(Message {
            class: part.class,
            reth: part.reth,
            imm: header.imm(),
            ieth: header.ieth().map(|key| key.0),
            packets: psn.offset_from(part.first) + 1,
            range: (part.first, psn),
            exchange: part.exchange,
            bytes: Bytes::Several(part.buffer),
        })
    }

    /// Drops other parts if all together have more bytes than a message may keep.
    fn limit(&mut self, growing: usize) {
        let mut kept: usize = self.parts.iter().map(|p| p.buffer.kept()).sum();
        let mut index = 0;
        self.parts.retain(|part| {
            let (this, own) = (index, part.buffer.kept());
            index += 1;
            let keep = this == growing || kept <= HEAD + TAIL;
            if !keep {
                kept -= own;
            }
            keep
        });
    }

    /// Remembers the exchange of the message whose first packet was pushed last.
    pub(crate) fn set_exchange(&mut self, exchange: Option<ExchangeId>) {
        if let Some(part) = self.parts.last_mut() {
            part.exchange = exchange;
        }
    }

    /// Remembers a complete message.
    pub(crate) fn finish(&mut self, message: &Message<'_>, exchange: Option<ExchangeId>) {
        self.remember(message.range, exchange);
    }

    /// Remembers a request of one packet whose answers have these PSNs.
    pub(crate) fn remember(&mut self, (first, last): (Psn, Psn), exchange: Option<ExchangeId>) {
        self.done.retain(|done| {
            let behind = last.offset_from(done.last);
            behind <= ROUND || behind >= (1 << 24) - AHEAD
        });
        while self.done.len() >= MAX_DONE {
            self.done.pop_front();
        }
        self.done.push_back(Done { first, last, exchange });
    }

    /// Returns whether a message with this PSN was complete.
    pub(crate) fn is_done(&self, psn: Psn) -> bool {
        self.done.iter().any(|d| within(psn, d.first, d.last))
    }

    /// Returns the exchange of the message that a packet with this PSN belongs to.
    pub(crate) fn exchange(&self, psn: Psn) -> Option<ExchangeId> {
        let done = self.done.iter().rev().find(|d| within(psn, d.first, d.last));
        let part = || self.parts.iter().find(|p| within(psn, p.first, p.next));
        done.map_or_else(|| part()?.exchange, |done| done.exchange)
    }
}

#[cfg(test)]
mod tests {
    use roce_bth::{Bth, Header, MAX_HEADER_LEN, Opcode, Qpn};

    use super::*;

    /// Pushes a packet with this payload and returns a letter for the answer, with the message's length.
    fn push(flow: &mut Flow, opcode: Opcode, psn: u32, payload: &[u8]) -> (char, usize) {
        let header = Header::new(Bth::new(opcode, Qpn::new(2), Psn::new(psn)));
        let mut bytes = [0; MAX_HEADER_LEN];
        let packet = Packet {
            header: header.view(&mut bytes),
            payload,
        };
        match flow.push(&packet, 12) {
            Step::Whole(message) => {
                flow.finish(&message, Some(ExchangeId(psn.into())));
                ('w', message.len())
            }
            Step::Part {
                len, repeated: true, ..
            } => ('r', len),
            Step::Part { len, .. } => ('p', len),
            Step::Repeated => ('d', 0),
            Step::Lost => ('l', 0),
        }
    }

    #[test]
    fn messages_are_put_together_around_the_end_of_the_counter() {
        let mut flow = Flow::default();
        let (first, middle, last) = (Opcode::RcSendFirst, Opcode::RcSendMiddle, Opcode::RcSendLast);
        assert_eq!(push(&mut flow, first, 0xff_fffe, &[1; 4]), ('p', 4));
        assert_eq!(push(&mut flow, middle, 0xff_ffff, &[2; 4]), ('p', 8));
        assert_eq!(push(&mut flow, last, 0, &[3; 2]), ('w', 10));
        assert_eq!(flow.exchange(Psn::new(0xff_ffff)), Some(ExchangeId(0)));
        assert_eq!(push(&mut flow, Opcode::RcSendOnly, 1, &[]), ('w', 0));
        assert_eq!(push(&mut flow, middle, 0xff_ffff, &[2; 4]), ('d', 0));
        assert_eq!(flow.exchange(Psn::new(2)), None);
    }

    #[test]
    fn a_sender_that_goes_back_repeats_what_is_there() {
        let mut flow = Flow::default();
        let (first, middle, last) = (Opcode::RcSendFirst, Opcode::RcSendMiddle, Opcode::RcSendLast);
        // 11 is lost on the way to the capture.
        assert_eq!(push(&mut flow, first, 10, &[0; 4]), ('p', 4));
        assert_eq!(push(&mut flow, middle, 12, &[0; 4]), ('l', 0));
        assert_eq!(push(&mut flow, last, 13, &[0; 4]), ('l', 0));
        assert_eq!(push(&mut flow, Opcode::RcSendOnly, 14, &[0; 4]), ('w', 4));
        assert_eq!(push(&mut flow, first, 10, &[0; 4]), ('r', 4));
        assert_eq!(push(&mut flow, middle, 11, &[0; 4]), ('p', 8));
        assert_eq!(push(&mut flow, middle, 12, &[0; 4]), ('p', 12));
        assert_eq!(push(&mut flow, last, 13, &[0; 4]), ('w', 16));
        assert_eq!(push(&mut flow, Opcode::RcSendOnly, 14, &[0; 4]), ('d', 0));
    }

    #[test]
    fn long_messages_keep_their_ends() {
        let mut flow = Flow::default();
        let payload: Vec<u8> = (0..4096u32).map(|n| (n % 251) as u8).collect();
        push(&mut flow, Opcode::RcSendFirst, 0, &payload);
        for psn in 1..100 {
            push(&mut flow, Opcode::RcSendMiddle, psn, &payload);
            let kept: usize = flow.parts.iter().map(|p| p.buffer.kept()).sum();
            assert!(kept <= HEAD + TAIL);
        }
        let buffer = &flow.parts[0].buffer;
        let all: Vec<u8> = payload.iter().copied().cycle().take(100 * 4096).collect();
        assert_eq!(buffer.get(5, 100).as_deref(), Some(&all[5..105]));
        assert_eq!(
            buffer.get(all.len() - 8000, 8000).as_deref(),
            Some(&all[all.len() - 8000..])
        );
        for (at, len) in [
            (HEAD - 1, 2),
            (200_000, 1),
            (all.len() - 1, 2),
            (usize::MAX, 2),
            (all.len() - TAIL - 1, 2),
        ] {
            assert_eq!(buffer.get(at, len), None, "{at} {len}");
        }
    }

    #[test]
    fn head_and_tail_without_a_gap_are_one() {
        let mut buffer = Buffer::default();
        let bytes: Vec<u8> = (0..HEAD + 100).map(|n| (n % 251) as u8).collect();
        buffer.push(&bytes);
        for (at, len) in [
            (0, bytes.len()),
            (HEAD - 3, 10),
            (HEAD, 100),
            (HEAD + 99, 1),
            (bytes.len(), 0),
        ] {
            assert_eq!(buffer.get(at, len).as_deref(), Some(&bytes[at..at + len]), "{at} {len}");
        }
    }

    #[test]
    fn a_later_round_of_the_counter_is_not_a_repetition() {
        let mut flow = Flow::default();
        for psn in (0..1 << 24).step_by(1 << 18) {
            assert_eq!(push(&mut flow, Opcode::RcSendOnly, psn, &[]), ('w', 0));
        }
        assert_eq!(push(&mut flow, Opcode::RcSendOnly, 0, &[]), ('w', 0));
    }

    #[test]
    fn memory_is_bounded() {
        let mut flow = Flow::default();
        for n in 0..10_000 {
            push(&mut flow, Opcode::RcSendFirst, n * 7, &[0; 4096]);
            push(&mut flow, Opcode::RcSendOnly, n * 7 + 3, &[0; 4096]);
        }
        assert!(flow.parts.len() <= MAX_PARTS && flow.done.len() <= MAX_DONE);
    }
}
