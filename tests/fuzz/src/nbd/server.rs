//! The server, with devices in memory.

use std::time::Duration;

use rnbd::{
    Errno,
    block::{BlockOp, BlockRequest, Completion, Extent, Geometry},
    nbd::{Backend, Connection, End, Export, Exports, Memory, Phase, Piece, RequestPart, TlsMode, Want},
};
use roce_verbs::Instant;
use rtrs::{
    Cx,
    client::buffers::{Buffer, Buffers},
};

use super::{AT_FIRST, Change, NAMES, NEGOTIATION, content, extents};
use crate::provider::Scripted;

/// Longer than a client may keep a buffer that it does not use.
const PAUSE: Duration = Duration::from_millis(150);

/// How a client's bytes are moved.
#[derive(Clone, Copy)]
pub(super) struct Manner {
    /// Bytes of a receiving call during the negotiation.
    pub(super) options: usize,
    /// Those of one after it.
    pub(super) receive: usize,
    /// Bytes of a sending call.
    pub(super) send: usize,
    /// Time passes after each.
    pub(super) pause: bool,
}

impl Manner {
    /// As much as goes.
    pub(super) const AT_ONCE: Self = Self {
        options: usize::MAX,
        receive: usize::MAX,
        send: usize::MAX,
        pause: false,
    };
}

/// A device in memory that does everything at once and checks what it is asked for.
pub(super) struct Device {
    /// The export that the client has chosen.
    chosen: Option<usize>,
    pub(super) geometry: Geometry,
    pub(super) content: [Vec<u8>; NAMES.len()],
    buffers: Buffers,
    /// Without a device: no path leads anywhere.
    provider: Scripted,
    now: Instant,
    requests: u64,
}

impl Memory for Device {
    fn take(&mut self, len: usize) -> Result<Option<Buffer>, Errno> {
        assert!((1..=self.geometry.max_transfer as usize).contains(&len), "{len} bytes");
        if self.buffers.lent() >= self.geometry.queue_depth as usize {
            return Ok(None);
        }
        let mut cx = Cx {
            now: self.now,
            provider: &mut self.provider,
            random: &mut |_| {},
        };
        let len = self.geometry.max_transfer as usize;
        Ok(Some(self.buffers.take(&mut cx, len).expect("memory")))
    }

    fn buffers(&mut self) -> Option<&mut Buffers> {
        Some(&mut self.buffers)
    }
}

impl Backend for Device {
    fn submit(&mut self, q: BlockRequest<RequestPart>) -> Option<(RequestPart, Completion)> {
        self.requests += 1;
        let extents = self.run(&q);
        let completion = Completion {
            extents,
            ..Completion::new(Ok(()), q.data)
        };
        Some((q.user, completion))
    }
}

impl Device {
    /// Does a request. Returns the extents of a block status.
    fn run(&mut self, q: &BlockRequest<RequestPart>) -> Vec<Extent> {
        let g = &self.geometry;
        let index = self.chosen.expect("a choice");
        let range = q.offset as usize..(q.offset + q.len) as usize;
        if q.op != BlockOp::Flush {
            let inside = q.len > 0 && g.contains(q.offset, q.len) && g.aligned(q.offset, q.len);
            assert!(inside, "{} bytes at {}", q.len, q.offset);
        }
        if q.op.writes() {
            assert!(!g.read_only, "a read-only device is changed");
        }
        let there = &mut self.content[index];
        let data = q.data.as_ref();
        assert!(data.is_none_or(|b| b.len() as u64 == q.len));
        let forced = match q.op {
            BlockOp::Read => {
                let buffer = data.expect("a buffer");
                self.buffers.write(buffer, 0, &there[range]).expect("its length");
                false
            }
            BlockOp::Write { fua } => {
                let buffer = data.expect("a buffer");
                self.buffers.read(buffer, 0, &mut there[range]).expect("its length");
                fua
            }
            BlockOp::Flush => false,
            BlockOp::Discard => {
                assert!(g.max_discard > 0, "the device can't discard");
                there[range].fill(0);
                false
            }
            BlockOp::WriteZeroes { fua, .. } => {
                there[range].fill(0);
                fua
            }
            BlockOp::BlockStatus { most } => {
                return extents(q.offset, q.len, most as usize);
            }
        };
        assert!(
            !forced || (g.fua && g.write_cache),
            "the device can't force, or need not"
        );
        Vec::new()
    }
}

/// A connection to the device.
pub(super) struct Server<'a> {
    conn: Connection,
    sent: &'a [u8],
    /// Bytes of it that were received.
    at: usize,
    /// The client sends no more than this before TLS has begun.
    pub(super) wait_at: Option<usize>,
    /// TLS has begun after so many bytes, and so many of answers.
    pub(super) secured: Option<(usize, usize)>,
    /// What is still to happen to exports, and when.
    changes: &'a [(usize, Change)],
    pub(super) answers: Vec<u8>,
    pub(super) device: Device,
}

impl<'a> Server<'a> {
    pub(super) fn new(geometry: Geometry, mode: TlsMode, changes: &'a [(usize, Change)], sent: &'a [u8]) -> Self {
        let exports = (0..AT_FIRST).map(|index| export(index, geometry)).collect();
        Self {
            conn: Connection::with_tls(Instant::ZERO, Exports::new(exports), mode),
            sent,
            at: 0,
            wait_at: None,
            secured: None,
            changes,
            answers: Vec::new(),
            device: Device {
                chosen: None,
                geometry,
                content: NAMES.map(|_| content()),
                buffers: Buffers::new(1 << 20),
                provider: Scripted::new(&[]),
                now: Instant::ZERO,
                requests: 0,
            },
        }
    }

    /// Serves until the connection has ended.
    pub(super) fn serve(&mut self, manner: Manner) {
        loop {
            let mut came = self.poll();
            came |= self.receive(match self.conn.phase() {
                Phase::Transmission => manner.receive,
                _ => manner.options,
            });
            came |= self.poll();
            came |= self.send(manner.send);
            let later = self.device.now + PAUSE;
            if manner.pause && self.conn.phase() >= Phase::Transmission && later < NEGOTIATION {
                self.device.now = later;
                if self.conn.next_timeout().is_some_and(|due| due <= later) {
                    self.conn.timeout(later, &mut self.device);
                }
            }
            if !came && !self.happen() {
                break;
            }
        }
        assert!(self.conn.ended().is_some(), "it waits for something");
        assert_eq!(self.device.buffers.lent(), 0, "a buffer is not given back");
        assert_eq!(self.conn.in_flight(), (0, 0));
    }

    /// Why it has ended.
    pub(super) fn ended(&self) -> &End {
        self.conn.ended().expect("an end")
    }

    /// What happens when all that has come is answered; whether anything did.
    fn happen(&mut self) -> bool {
        if let Some(((at, change), rest)) = self.changes.split_first()
            && *at == self.at
        {
            self.changes = rest;
            match change {
                Change::Withdraw(index) => self.conn.withdraw(*index),
                Change::Offer => self.conn.offer(export(AT_FIRST, self.device.geometry)),
            }
            return true;
        }
        if !self.conn.wants_tls() {
            return false;
        }
        assert_eq!(self.secured, None, "TLS begins once");
        self.secured = Some((self.at, self.answers.len()));
        self.wait_at = None;
        self.conn.tls_established(self.device.now, &mut self.device);
        true
    }

    /// Bytes that the client sends before something happens.
    fn within_reach(&self) -> usize {
        let change = self.changes.first().map(|(at, _)| *at);
        let most = [Some(self.sent.len()), change, self.wait_at]
            .into_iter()
            .flatten()
            .min();
        most.unwrap_or_default().saturating_sub(self.at)
    }

    fn poll(&mut self) -> bool {
        let before = (self.device.buffers.lent(), self.device.requests);
        self.device.chosen = self.conn.export();
        self.conn.poll(self.device.now, &mut self.device);
        before != (self.device.buffers.lent(), self.device.requests)
    }

    /// One receiving call; whether it brought something.
    fn receive(&mut self, max: usize) -> bool {
        let mut n = max.min(self.within_reach());
        if n == 0 && self.at < self.sent.len() {
            return false;
        }
        let sent = &self.sent[self.at..];
        match self.conn.want() {
            Want::Nothing(_) => return false,
            Want::Bytes(room) => {
                n = n.min(room.len());
                room[..n].copy_from_slice(&sent[..n]);
                assert!(!room.is_empty());
            }
            Want::Payload { buffer, at, len, then } => {
                n = n.min(len + then.len());
                let (payload, behind) = sent[..n].split_at(n.min(len));
                let buffers = &self.device.buffers;
                buffers.write(buffer, at, payload).expect("inside the buffer");
                then[..behind.len()].copy_from_slice(behind);
            }
        }
        if n == 0 {
            self.conn.eof(self.device.now, &mut self.device);
        } else {
            self.conn.received(self.device.now, n, &mut self.device);
            self.at += n;
        }
        true
    }

    /// One sending call; whether it took something.
    fn send(&mut self, max: usize) -> bool {
        let mut pieces = Vec::new();
        self.conn.gather(&mut pieces);
        let mut bytes = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Bytes(b) => bytes.extend(b),
                Piece::Data { buffer, at, len } => {
                    let first = bytes.len();
                    bytes.resize(first + len, 0);
                    let read = self.device.buffers.read(buffer, at, &mut bytes[first..]);
                    read.expect("inside the buffer");
                }
            }
        }
        bytes.truncate(max);
        self.conn.sent(self.device.now, bytes.len(), &mut self.device);
        self.answers.extend(&bytes);
        !bytes.is_empty()
    }
}

fn export(index: usize, geometry: Geometry) -> Export {
    let (name, device) = NAMES[index];
    Export {
        name: name.into(),
        device: device.into(),
        description: format!("the {name}"),
        geometry,
    }
}
