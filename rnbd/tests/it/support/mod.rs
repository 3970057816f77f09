//! NBD connections without sockets: clients as queues of bytes, buffers of a session, and a device in memory.

#[path = "../../../../rtrs/tests/support/provider.rs"]
mod provider;

use std::{collections::VecDeque, ops::Range, time::Duration};

use provider::Scripted;
use rnbd::{
    Errno,
    block::{self, BlockOp, BlockRequest, Completion, Extent, Geometry},
    nbd::{
        Backend, Connection, End, Export, Exports, Phase, Piece, RequestPart, Stall, TlsMode, Want,
        proto::{self, Framing, Request, opt},
    },
};
use roce_verbs::Instant;
use rtrs::{
    Cx,
    client::buffers::{Buffer, Buffers},
};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;

/// Bytes that a device has at most; beyond them its requests have to fail.
const MAX_CONTENT: usize = 128 * MIB;

/// A device of 4 MiB with a write cache that can do everything.
pub(crate) const GEOMETRY: Geometry = Geometry {
    size: 4 << 20,
    logical_block_size: 512,
    physical_block_size: 4096,
    max_transfer: 64 << 10,
    max_discard: 1 << 20,
    discard_granularity: 4096,
    read_only: false,
    write_cache: true,
    fua: true,
    max_write_zeroes: 0,
    queue_depth: 16,
};

/// The buffers of a session, all of one size, as a client of RNBD has them.
pub(crate) struct Memory {
    buffers: Buffers,
    /// Without a device: buffers need none before a path leads through one.
    provider: Scripted,
    size: usize,
    /// So many may be lent at a time.
    pub(crate) depth: usize,
    /// There are no buffers at all.
    pub(crate) refuses: Option<Errno>,
}

impl Memory {
    pub(crate) fn new(size: usize, depth: usize) -> Self {
        Self {
            buffers: Buffers::new(Buffers::bytes_for(size, depth)),
            provider: Scripted::new(&[]),
            size,
            depth,
            refuses: None,
        }
    }

    pub(crate) fn take(&mut self) -> Option<Buffer> {
        if self.buffers.lent() >= self.depth {
            return None;
        }
        let mut cx = Cx {
            now: Instant::ZERO,
            provider: &mut self.provider,
            random: &mut |_| {},
        };
        Some(self.buffers.take(&mut cx, self.size).expect("memory"))
    }

    pub(crate) fn give(&mut self, buffer: Buffer) {
        self.buffers.give(buffer);
    }

    pub(crate) fn lent(&self) -> usize {
        self.buffers.lent()
    }

    pub(crate) fn read(&self, buffer: &Buffer, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.buffers.read(buffer, at, &mut out).expect("inside the buffer");
        out
    }

    pub(crate) fn write(&self, buffer: &Buffer, at: usize, data: &[u8]) {
        self.buffers.write(buffer, at, data).expect("inside the buffer");
    }
}

/// A request as a device saw it, with the data of a write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    pub(crate) op: BlockOp,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) data: Vec<u8>,
}

/// Error with which a device refuses a request.
pub(crate) type Fails = fn(&Seen) -> Option<Errno>;

/// A device, the buffers to reach it with, and time.
pub(crate) struct World {
    pub(crate) memory: Memory,
    pub(crate) geometry: Geometry,
    pub(crate) content: Vec<u8>,
    /// Holes of the device, in order.
    pub(crate) holes: Vec<Range<u64>>,
    pub(crate) seen: Vec<Seen>,
    /// Requests that fail.
    pub(crate) fails: Fails,
    /// How often it has lost writes.
    pub(crate) losses: u64,
    pub(crate) now: Instant,
}

pub(crate) fn byte_at(i: usize) -> u8 {
    (i / 512) as u8 ^ (i / 7) as u8
}

impl World {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            memory: Memory::new(geometry.max_transfer as usize, geometry.queue_depth as usize),
            geometry,
            content: (0..(geometry.size as usize).min(MAX_CONTENT)).map(byte_at).collect(),
            holes: Vec::new(),
            seen: Vec::new(),
            fails: |_| None,
            losses: 0,
            now: Instant::ZERO,
        }
    }

    pub(crate) fn exports(&self) -> Exports {
        let export = |name: &str, device: &str| Export {
            name: name.into(),
            device: device.into(),
            description: format!("the {name}"),
            geometry: self.geometry,
        };
        Exports::new(vec![export("disk", "images/a"), export("other", "images/b")])
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    /// Extents of a range, as the device reports them.
    fn extents(&self, offset: u64, len: u64, most: u32) -> Vec<Extent> {
        let (mut at, end) = (offset, offset + len);
        let mut all = Vec::new();
        for hole in &self.holes {
            let (from, to) = (hole.start.clamp(at, end), hole.end.clamp(at, end));
            all.extend([Extent::data(from - at), Extent::hole(to - from)]);
            at = to;
        }
        all.push(Extent::data(end - at));
        let mut joined = Vec::new();
        all.retain(|extent| extent.len > 0);
        all.into_iter().for_each(|extent| block::append(&mut joined, extent));
        joined.truncate(most as usize);
        joined
    }

    fn run(&mut self, q: &BlockRequest<RequestPart>) -> Result<(), Errno> {
        let g = &self.geometry;
        let mut seen = Seen {
            op: q.op,
            offset: q.offset,
            len: q.len,
            data: Vec::new(),
        };
        if let (BlockOp::Write { .. }, Some(buffer)) = (q.op, &q.data) {
            seen.data = self.memory.read(buffer, 0, buffer.len());
        }
        let moves = matches!(q.op, BlockOp::Read | BlockOp::Write { .. });
        assert_eq!(q.data.is_some(), moves, "{seen:?}");
        if let Some(buffer) = &q.data {
            assert_eq!(buffer.len() as u64, q.len);
            assert!((1..=u64::from(g.max_transfer)).contains(&q.len), "{} bytes", q.len);
        }
        if q.op != BlockOp::Flush {
            assert!(q.len > 0 && g.contains(q.offset, q.len) && g.aligned(q.offset, q.len));
        }
        assert!(!(q.op.writes() && g.read_only), "a read-only device is changed");
        let forced = matches!(
            q.op,
            BlockOp::Write { fua: true } | BlockOp::WriteZeroes { fua: true, .. }
        );
        assert!(!forced || (g.fua && g.write_cache), "nobody needs to force this device");
        self.seen.push(seen.clone());
        if let Some(e) = (self.fails)(&seen) {
            return Err(e);
        }
        let range = q.offset as usize..(q.offset + q.len) as usize;
        match (q.op, &q.data) {
            (BlockOp::Read, Some(buffer)) => self.memory.write(buffer, 0, &self.content[range]),
            (BlockOp::Write { .. }, _) => self.content[range].copy_from_slice(&seen.data),
            (BlockOp::Discard | BlockOp::WriteZeroes { .. }, _) => self.content[range].fill(0),
            _ => {}
        }
        Ok(())
    }

    /// Does a request.
    fn complete(&mut self, q: BlockRequest<RequestPart>) -> (RequestPart, Completion) {
        let result = self.run(&q);
        let extents = match q.op {
            BlockOp::BlockStatus { most } if result.is_ok() => self.extents(q.offset, q.len, most),
            _ => Vec::new(),
        };
        let completion = Completion {
            result,
            data: q.data,
            extents,
            losses: self.losses,
        };
        (q.user, completion)
    }
}

/// Memory and device of a connection in a call.
struct Device<'a> {
    world: &'a mut World,
    /// Requests go here instead of being done.
    held: Option<&'a mut VecDeque<BlockRequest<RequestPart>>>,
}

impl rnbd::nbd::Memory for Device<'_> {
    fn take(&mut self, len: usize) -> Result<Option<Buffer>, Errno> {
        if let Some(e) = self.world.memory.refuses {
            return Err(e);
        }
        let taken = self.world.memory.take();
        assert!(taken.as_ref().is_none_or(|buffer| len <= buffer.capacity()));
        Ok(taken)
    }

    fn buffers(&mut self) -> Option<&mut Buffers> {
        Some(&mut self.world.memory.buffers)
    }
}

impl Backend for Device<'_> {
    fn submit(&mut self, request: BlockRequest<RequestPart>) -> Option<(RequestPart, Completion)> {
        match &mut self.held {
            Some(held) => held.push_back(request),
            None => return Some(self.world.complete(request)),
        }
        None
    }
}

/// One client and the connection that serves it.
pub(crate) struct Peer {
    pub(crate) conn: Connection,
    /// Bytes that the client has sent and nobody has received.
    pub(crate) socket: VecDeque<u8>,
    /// The client sends no more.
    pub(crate) closed: bool,
    eof: bool,
    /// The client takes what it is sent: so much.
    pub(crate) takes: usize,
    /// Bytes that it received.
    pub(crate) answers: Vec<u8>,
    /// Requests are kept back here instead of being done.
    pub(crate) hold: bool,
    pub(crate) held: VecDeque<BlockRequest<RequestPart>>,
    /// How its requests are framed.
    pub(crate) framing: Framing,
    cookie: u64,
}

impl Peer {
    pub(crate) fn new(world: &World) -> Self {
        Self::with_tls(world, TlsMode::Off)
    }

    pub(crate) fn with_tls(world: &World, mode: TlsMode) -> Self {
        Self {
            conn: Connection::with_tls(world.now, world.exports(), mode),
            socket: VecDeque::new(),
            closed: false,
            eof: false,
            takes: usize::MAX,
            answers: Vec::new(),
            hold: false,
            held: VecDeque::new(),
            framing: Framing::Simple,
            cookie: 0,
        }
    }

    /// One that has come to transmission.
    pub(crate) fn go(world: &mut World) -> Self {
        let mut peer = Self::new(world);
        peer.send(&3u32.to_be_bytes());
        peer.option(opt::GO, &information("", &[]));
        peer.settle(world);
        peer.answers.clear();
        assert_eq!(peer.conn.export(), Some(0));
        peer
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.socket.extend(bytes);
    }

    pub(crate) fn option(&mut self, option: u32, data: &[u8]) {
        self.send(&option_bytes(option, data));
    }

    /// Sends a request; its cookie.
    pub(crate) fn request(&mut self, command: u16, flags: u16, offset: usize, len: usize, data: &[u8]) -> u64 {
        self.cookie += 1;
        let q = Request {
            flags,
            command,
            cookie: self.cookie,
            offset: offset as u64,
            len: len as u64,
        };
        match self.framing {
            Framing::Simple | Framing::Structured => self.send(&q.to_bytes()),
            Framing::Extended => self.send(&q.to_extended_bytes()),
        }
        self.send(data);
        self.cookie
    }

    /// One receiving call of at most `max` bytes; how many it brought.
    pub(crate) fn receive(&mut self, world: &mut World, max: usize) -> usize {
        let mut all = max.min(self.socket.len());
        match self.conn.want() {
            Want::Nothing(_) => return 0,
            Want::Bytes(room) => {
                assert!(!room.is_empty(), "a call that can bring nothing");
                all = all.min(room.len());
                for (to, from) in room.iter_mut().zip(self.socket.drain(..all)) {
                    *to = from;
                }
            }
            Want::Payload { buffer, at, len, then } => {
                assert!(len > 0 && at + len <= buffer.len());
                all = all.min(len + then.len());
                let bytes: Vec<u8> = self.socket.drain(..all).collect();
                let (payload, behind) = bytes.split_at(all.min(len));
                world.memory.write(buffer, at, payload);
                then[..behind.len()].copy_from_slice(behind);
            }
        }
        if all > 0 {
            self.call(world, |conn, now, device| conn.received(now, all, device));
        } else if self.closed && self.socket.is_empty() && !self.eof {
            self.eof = true;
            self.call(world, |conn, now, device| conn.eof(now, device));
        }
        all
    }

    /// Calls into the connection.
    pub(crate) fn call<T>(
        &mut self,
        world: &mut World,
        f: impl FnOnce(&mut Connection, Instant, &mut dyn Backend) -> T,
    ) -> T {
        let now = world.now;
        let held = self.hold.then_some(&mut self.held);
        f(&mut self.conn, now, &mut Device { world, held })
    }

    /// One sending call of at most `max` bytes; how many it took.
    pub(crate) fn transmit(&mut self, world: &mut World, max: usize) -> usize {
        let mut pieces = Vec::new();
        self.conn.gather(&mut pieces);
        assert!(pieces.len() <= 1024 && pieces.iter().all(|p| !p.is_empty()));
        assert_eq!(self.conn.has_output(), !pieces.is_empty());
        let max = max.min(self.takes);
        let mut bytes = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Bytes(b) => bytes.extend(b),
                Piece::Data { buffer, at, len } => bytes.extend(world.memory.read(buffer, at, len)),
            }
            if bytes.len() >= max {
                break;
            }
        }
        bytes.truncate(max);
        if self.takes != usize::MAX {
            self.takes -= bytes.len();
        }
        self.call(world, |conn, now, device| conn.sent(now, bytes.len(), device));
        self.answers.extend(&bytes);
        bytes.len()
    }

    /// Goes on with what has come; whether a buffer was taken or a request begun.
    pub(crate) fn poll(&mut self, world: &mut World) -> bool {
        let before = (world.memory.lent(), world.seen.len(), self.held.len());
        self.call(world, |conn, now, device| conn.poll(now, device));
        before != (world.memory.lent(), world.seen.len(), self.held.len())
    }

    /// A request ends like this.
    pub(crate) fn done(&mut self, world: &mut World, part: RequestPart, completion: Completion) {
        self.call(world, |conn, now, device| conn.done(now, part, completion, device));
    }

    /// The device does the oldest request that is held back.
    pub(crate) fn finish_one(&mut self, world: &mut World) {
        let q = self.held.pop_front().expect("a request");
        let (part, completion) = world.complete(q);
        self.done(world, part, completion);
    }

    /// Everything that can happen without time passing.
    pub(crate) fn settle(&mut self, world: &mut World) {
        self.settle_in(world, &mut || usize::MAX, &mut || usize::MAX);
    }

    /// The same, in receiving and sending calls of so many bytes.
    pub(crate) fn settle_in(
        &mut self,
        world: &mut World,
        receive: &mut dyn FnMut() -> usize,
        transmit: &mut dyn FnMut() -> usize,
    ) {
        loop {
            let mut came = self.poll(world);
            let eof = self.eof;
            came |= self.receive(world, receive()) > 0 || eof != self.eof;
            came |= self.poll(world);
            came |= self.transmit(world, transmit()) > 0;
            if !came {
                return;
            }
        }
    }

    /// Time passes, and the connection is told when it wants to be.
    pub(crate) fn pass(&mut self, world: &mut World, time: Duration) {
        world.pass(time);
        if self.conn.next_timeout().is_some_and(|due| due <= world.now) {
            self.call(world, |conn, now, device| conn.timeout(now, device));
        }
        self.poll(world);
    }

    /// The next simple reply: error and cookie.
    pub(crate) fn reply(&mut self) -> (u32, u64) {
        let head = self.take(16);
        assert_eq!(head[..4], proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        (error, u64::from_be_bytes(head[8..].try_into().unwrap()))
    }

    /// The next bytes that the client took.
    pub(crate) fn take(&mut self, n: usize) -> Vec<u8> {
        assert!(self.answers.len() >= n, "{} bytes instead of {n}", self.answers.len());
        self.answers.drain(..n).collect()
    }

    /// Sends a request, and the error of its reply.
    pub(crate) fn ask(&mut self, world: &mut World, command: u16, flags: u16, offset: usize, len: usize) -> u32 {
        let data = match command {
            proto::cmd::WRITE => vec![0x5a; len],
            _ => Vec::new(),
        };
        let cookie = self.request(command, flags, offset, len, &data);
        self.settle(world);
        let (error, of) = self.reply();
        assert_eq!(of, cookie);
        error
    }
}

pub(crate) fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut b = proto::OPT_MAGIC.to_be_bytes().to_vec();
    b.extend(option.to_be_bytes());
    b.extend((data.len() as u32).to_be_bytes());
    b.extend(data);
    b
}

/// The data of INFO and GO.
pub(crate) fn information(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut b = (name.len() as u32).to_be_bytes().to_vec();
    b.extend(name.as_bytes());
    b.extend((wanted.len() as u16).to_be_bytes());
    b.extend(wanted.iter().flat_map(|w| w.to_be_bytes()));
    b
}

/// A connection whose flags are exchanged.
pub(crate) fn connect(world: &mut World) -> Peer {
    connect_with(world, TlsMode::Off)
}

/// The same with TLS as this says.
pub(crate) fn connect_with(world: &mut World, mode: TlsMode) -> Peer {
    let mut peer = Peer::with_tls(world, mode);
    peer.send(&3u32.to_be_bytes());
    peer.settle(world);
    let hello = peer.take(18);
    assert_eq!(hello[..16], *b"NBDMAGICIHAVEOPT");
    assert_eq!(hello[16..], [0, 3]);
    assert_eq!(peer.conn.phase(), Phase::Options);
    peer
}

/// Why the connection has ended: after it nothing is left.
pub(crate) fn ended_well(peer: &mut Peer, world: &mut World) -> End {
    peer.settle(world);
    let end = peer.conn.ended().expect("an end").clone();
    assert!(!peer.conn.has_output());
    assert_eq!(peer.conn.in_flight(), (0, 0));
    assert_eq!(peer.conn.next_timeout(), None);
    assert!(matches!(peer.conn.want(), Want::Nothing(Stall::Closing)));
    end
}

/// Why nothing is received.
pub(crate) fn stall(peer: &mut Peer) -> Option<Stall> {
    match peer.conn.want() {
        Want::Nothing(stall) => Some(stall),
        _ => None,
    }
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(crate) fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let text = |t: &str| [&(t.len() as u32).to_be_bytes(), t.as_bytes()].concat();
    let mut b = text(name);
    b.extend((queries.len() as u32).to_be_bytes());
    b.extend(queries.iter().flat_map(|q| text(q)));
    b
}

/// The next option reply: option, kind, data.
pub(crate) fn option_reply(peer: &mut Peer) -> (u32, u32, Vec<u8>) {
    let head = peer.take(20);
    assert_eq!(head[..8], proto::OPT_REPLY_MAGIC.to_be_bytes());
    let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
    (number(8), number(12), peer.take(number(16) as usize))
}
