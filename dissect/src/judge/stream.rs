//! SENDs and WRITEs of one queue pair, in the order in which its peer executes them.

use roce_bth::{Class, Reth};
use roce_pcap::judge::{Event, EventKind, Observed};

/// Bytes of a SEND that are kept: those of the largest one of RDS, 48 + 4096, and a few more.
const MAX_KEPT: usize = 4160;

/// SEND or WRITE that is complete.
#[derive(Debug)]
pub(super) struct Whole<'a> {
    /// Header of a WRITE.
    pub(super) reth: Option<Reth>,
    /// Bytes of a SEND, as many as were kept.
    pub(super) bytes: &'a [u8],
    /// Bytes of it on the wire.
    pub(super) len: usize,
    pub(super) solicited: bool,
    /// Frame of its last packet.
    pub(super) frame: u64,
    /// Time of its first packet, nanoseconds since 1970.
    pub(super) first_ns: u64,
    /// Its last PSN.
    pub(super) psn: i64,
}

/// SEND or WRITE of which packets are missing.
#[derive(Default, Debug)]
struct Part {
    reth: Option<Reth>,
    bytes: Vec<u8>,
    len: usize,
    first_ns: u64,
}

/// Answer of [`Stream::take`] to a request packet.
#[derive(Default, Debug)]
pub(super) struct Taken<'a> {
    /// Packets before this one are missing in the capture.
    pub(super) gap: bool,
    /// The packet is the next one.
    pub(super) in_order: bool,
    /// Message that it completes.
    pub(super) message: Option<Whole<'a>>,
}

/// Proof that an answer gives of what its sender has received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Proof {
    /// Nothing new.
    None,
    /// All that the capture shows, and nothing more.
    All,
    /// Packets that are missing in the capture.
    Gap,
}

/// Requests of one queue pair.
///
/// Packets that come too early are passed over: the peer drops them too, or keeps them, and the missing one comes again. If the peer
/// acknowledges more than the capture shows, the missing packets were not captured.
#[derive(Default, Debug)]
pub(super) struct Stream {
    /// PSN of the next packet; `None` before the first.
    next: Option<i64>,
    generation: u32,
    /// All packets since the first of the connection are there.
    whole: bool,
    /// First PSN that the last READ may have left to the next request.
    read_from: Option<i64>,
    part: Option<Part>,
    /// Time of the last packet that was sent again or refused.
    trouble_ns: u64,
    /// Bytes of the last SEND of several packets.
    buffer: Vec<u8>,
}

impl Stream {
    /// Returns whether nothing is missing since the beginning of the connection. `named`: the capture has that.
    pub(super) const fn is_whole(&self, named: bool) -> bool {
        match self.next {
            Some(_) => self.whole,
            None => named,
        }
    }

    /// Time of the last packet that was sent again or refused, nanoseconds since 1970.
    pub(super) const fn trouble_ns(&self) -> u64 {
        self.trouble_ns
    }

    /// Takes a request packet. `named`: the connection's beginning is known, its first packet is that with the named PSN.
    pub(super) fn take<'a>(&'a mut self, event: &Event, o: &Observed<'a>, named: bool) -> Taken<'a> {
        let EventKind::Request {
            psn,
            psns,
            repeated,
            skipped,
            ..
        } = event.kind
        else {
            return Taken::default();
        };
        let gap = match self.next.filter(|_| event.generation == self.generation) {
            None => {
                let begins = named && skipped == 0 && !repeated && event.generation == 0;
                self.whole = begins;
                self.generation = event.generation;
                !begins
            }
            Some(next) if psn == next => false,
            // It takes fewer PSNs than were thought.
            Some(_) if !repeated && self.read_from.is_some_and(|from| psn >= from) => true,
            Some(next) => {
                if psn < next {
                    self.trouble_ns = event.time_ns;
                }
                return Taken::default();
            }
        };
        if gap {
            self.lose();
        }
        self.next = Some(psn + psns.max(1));
        self.read_from = None;
        let mut taken = Taken {
            gap,
            in_order: true,
            message: None,
        };
        match event.opcode.info().class {
            Class::Send | Class::Write => match o.payload {
                Some(payload) => taken.message = self.push(event, o, (psn, payload)),
                None => {
                    self.lose();
                    taken.gap = true;
                }
            },
            Class::ReadRequest => (self.part, self.read_from) = (None, Some(psn + 1)),
            _ => self.part = None,
        }
        taken
    }

    fn push<'a>(&'a mut self, event: &Event, o: &Observed<'a>, (psn, payload): (i64, &'a [u8])) -> Option<Whole<'a>> {
        let info = event.opcode.info();
        let is_send = info.class == Class::Send;
        if info.position.starts() {
            self.part = Some(Part {
                reth: o.header.reth().filter(|_| !is_send),
                bytes: std::mem::take(&mut self.buffer),
                len: 0,
                first_ns: event.time_ns,
            });
        }
        let whole = info.position.starts() && info.position.ends();
        let part = self.part.as_mut()?;
        if info.position.starts() {
            part.bytes.clear();
        }
        part.len += payload.len();
        if is_send && !whole {
            let room = MAX_KEPT - part.bytes.len();
            part.bytes.extend_from_slice(&payload[..payload.len().min(room)]);
        }
        if !info.position.ends() {
            return None;
        }
        let part = self.part.take()?;
        self.buffer = part.bytes;
        Some(Whole {
            reth: part.reth,
            bytes: match (is_send, whole) {
                (true, true) => payload,
                (true, false) => &self.buffer,
                (false, _) => &[],
            },
            len: part.len,
            solicited: o.header.bth.solicited,
            frame: event.frame,
            first_ns: part.first_ns,
            psn,
        })
    }

    /// Takes an answer of the peer to these requests.
    pub(super) fn answered(&mut self, event: &Event) -> Proof {
        let (last, exact) = match event.kind {
            EventKind::Ack { psn, .. } => (psn, true),
            EventKind::ReadResponse { psn, .. } => (psn, false),
            // Of a packet that will come again.
            _ if self.next.is_none() => return Proof::None,
            // The peer waits for this one.
            EventKind::Nak { psn, .. } => (psn - 1, true),
            // The peer has got this one, and refused it.
            EventKind::Rnr { psn, .. } => {
                self.trouble_ns = event.time_ns;
                (psn - 1, false)
            }
            _ => return Proof::None,
        };
        let Some(next) = self.next.filter(|next| last < *next) else {
            self.lose();
            self.next = Some(last + 1);
            return Proof::Gap;
        };
        match exact && last + 1 == next {
            true => Proof::All,
            false => Proof::None,
        }
    }

    fn lose(&mut self) {
        self.whole = false;
        self.part = None;
    }
}
