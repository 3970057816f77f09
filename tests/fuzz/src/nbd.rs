//! What a client of the NBD server sends: negotiation and requests. A second reading of the protocol follows the server's
//! answers, in order, with a copy of the device: no answer that nobody asked for, no data of another place, no effect of
//! what was refused, and nothing that is in order is refused. However the bytes are cut, the answers are the same.

use std::time::Duration;

use rnbd::{
    block::{BlockOp, Geometry},
    nbd::{
        BufferCopy, Connection, Export, Exports, NbdRequest, Phase, Piece, Want,
        proto::{self, BASE_ALLOCATION, Framing, Request, chunk, cmd, cmd_flag, info, opt, rep, tx},
    },
};
use roce_verbs::Instant;
use rtrs::{
    client::buffers::{Buffer, Buffers},
    cx::Cx,
};

use crate::{input::Input, provider::Scripted};

const MAX_INPUT: usize = 32 << 10;
const SIZE: usize = 64 << 10;
/// Exports and their devices.
const NAMES: [(&str, &str); 2] = [("disk", "/images/a"), ("other", "b")];
/// Longer than a client may keep a buffer that it does not use.
const PAUSE: Duration = Duration::from_millis(150);
/// When a negotiation has to be over, its answers taken.
const NEGOTIATION: Instant = Instant::from_nanos(30_000_000_000);

fn geometry(config: u8) -> Geometry {
    let bit = |n: u8| config >> n & 1 != 0;
    Geometry {
        size: SIZE as u64,
        logical_block_size: if bit(0) { 4096 } else { 512 },
        physical_block_size: 4096,
        max_transfer: if bit(1) { 4096 } else { 16 << 10 },
        max_discard: if bit(2) { 8192 } else { 0 },
        discard_granularity: 4096,
        read_only: bit(3),
        write_cache: bit(4),
        fua: bit(5),
        max_write_zeroes: if bit(4) { 1 << 30 } else { 0 },
        queue_depth: if bit(6) { 8 } else { 1 },
    }
}

fn content() -> Vec<u8> {
    (0..SIZE).map(|i| (i / 512) as u8 ^ i as u8).collect()
}

/// How a client's bytes are moved.
#[derive(Clone, Copy)]
struct Manner {
    /// Bytes of a receiving call.
    receive: usize,
    /// Bytes of a sending call.
    send: usize,
    /// Time passes after each.
    pause: bool,
}

/// A connection with a device in memory that does everything at once and checks what it is asked for.
struct Server<'a> {
    conn: Connection,
    sent: &'a [u8],
    answers: Vec<u8>,
    geometry: Geometry,
    content: [Vec<u8>; 2],
    buffers: Buffers,
    /// Without a device: no path leads anywhere.
    provider: Scripted,
    now: Instant,
}

impl<'a> Server<'a> {
    fn new(geometry: Geometry, sent: &'a [u8]) -> Self {
        let exports = NAMES.map(|(name, device)| Export {
            name: name.into(),
            device: device.into(),
            description: format!("the {name}"),
            geometry,
        });
        Self {
            conn: Connection::new(Instant::ZERO, Exports::new(exports.into())),
            sent,
            answers: Vec::new(),
            geometry,
            content: [content(), content()],
            buffers: Buffers::new(1 << 20),
            provider: Scripted::new(&[]),
            now: Instant::ZERO,
        }
    }

    fn buffer(&mut self) -> Option<Buffer> {
        if self.buffers.lent() >= self.geometry.queue_depth as usize {
            return None;
        }
        let mut cx = Cx {
            now: self.now,
            provider: &mut self.provider,
            random: &mut |_| {},
        };
        let len = self.geometry.max_transfer as usize;
        Some(self.buffers.take(&mut cx, len).expect("memory"))
    }

    /// Serves until the connection has ended.
    fn serve(&mut self, manner: Manner) {
        loop {
            let mut came = self.poll();
            came |= self.receive(manner.receive);
            came |= self.poll();
            came |= self.send(manner.send);
            let later = self.now + PAUSE;
            if manner.pause && self.conn.phase() >= Phase::Transmission && later < NEGOTIATION {
                self.now = later;
                if self.conn.next_timeout().is_some_and(|due| due <= self.now) {
                    self.conn.timeout(self.now);
                }
            }
            if !came {
                break;
            }
        }
        assert!(self.conn.ended().is_some(), "it waits for something");
        assert_eq!(self.buffers.lent(), 0, "a buffer is not given back");
        assert_eq!(self.conn.in_flight(), (0, 0));
    }

    fn poll(&mut self) -> bool {
        let mut any = false;
        loop {
            let mut came = false;
            while let Some(len) = self.conn.poll_need() {
                assert!((1..=self.geometry.max_transfer as usize).contains(&len), "{len} bytes");
                let Some(buffer) = self.buffer() else {
                    self.conn.lack();
                    break;
                };
                self.conn.give(self.now, buffer);
                came = true;
            }
            while let Some(copy) = self.conn.poll_copy() {
                let copied = match copy {
                    BufferCopy::Write { buffer, at, data } => self.buffers.write(buffer, at, data),
                    BufferCopy::Read { buffer, at, out } => self.buffers.read(buffer, at, out),
                };
                copied.expect("inside the buffer");
                came = true;
            }
            while let Some(q) = self.conn.poll_request() {
                self.run(q);
                came = true;
            }
            while let Some(buffer) = self.conn.poll_free() {
                self.buffers.give(buffer);
                came = true;
            }
            if !came {
                return any;
            }
            any = true;
        }
    }

    fn run(&mut self, q: NbdRequest) {
        let g = &self.geometry;
        let index = self.conn.export().expect("a choice");
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
        };
        assert!(
            !forced || (g.fua && g.write_cache),
            "the device can't force, or need not"
        );
        self.conn.done(self.now, q.key, Ok(()), q.data);
    }

    /// One receiving call; whether it brought something.
    fn receive(&mut self, max: usize) -> bool {
        let mut n = max.min(self.sent.len());
        match self.conn.want() {
            Want::Nothing(_) => return false,
            Want::Bytes(room) => {
                n = n.min(room.len());
                room[..n].copy_from_slice(&self.sent[..n]);
                assert!(!room.is_empty());
            }
            Want::Payload { buffer, at, len, then } => {
                n = n.min(len + then.len());
                let (payload, behind) = self.sent[..n].split_at(n.min(len));
                self.buffers.write(buffer, at, payload).expect("inside the buffer");
                then[..behind.len()].copy_from_slice(behind);
            }
        }
        if n == 0 {
            self.conn.eof(self.now);
        } else {
            self.conn.received(self.now, n);
            self.sent = &self.sent[n..];
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
                    let read = self.buffers.read(buffer, at, &mut bytes[first..]);
                    read.expect("inside the buffer");
                }
            }
        }
        bytes.truncate(max);
        self.conn.sent(self.now, bytes.len());
        self.answers.extend(&bytes);
        !bytes.is_empty()
    }
}

/// What the first byte does not say is sent to a server; see the module.
pub fn run(data: &[u8]) {
    let Some((config, sent)) = data.split_first() else {
        return;
    };
    let sent = &sent[..sent.len().min(MAX_INPUT)];
    let geometry = geometry(*config);
    let mut server = Server::new(geometry, sent);
    server.serve(Manner {
        receive: usize::MAX,
        send: usize::MAX,
        pause: false,
    });
    let mut slowly = Server::new(geometry, sent);
    slowly.serve(Manner {
        receive: 1 + sent.len() % 97,
        send: 1 + sent.len() % 1009,
        pause: config >> 7 != 0,
    });
    assert!(server.answers == slowly.answers, "other answers when the bytes are cut");
    assert!(server.content == slowly.content, "other content when the bytes are cut");

    let mut reader = Reader {
        sent: Input(sent),
        answers: Input(&server.answers),
        geometry,
        framing: Framing::Simple,
        allocation: None,
    };
    let chosen = reader.negotiation();
    let mut models = [content(), content()];
    if let Some((index, allowed)) = chosen {
        let allocation = reader.allocation == Some(index);
        let whole = reader.transmission(allowed, allocation, &mut models[index]);
        if !whole {
            models[index].clone_from(&server.content[index]);
        }
    }
    assert!(
        server.content == models,
        "the devices have other content than was written"
    );
    assert!(
        reader.answers.0.is_empty(),
        "answers to nothing: {:?}",
        reader.answers.0
    );
}

/// Reads what was sent and what was answered, side by side.
struct Reader<'a> {
    sent: Input<'a>,
    answers: Input<'a>,
    geometry: Geometry,
    framing: Framing,
    /// The export whose allocation may be asked for.
    allocation: Option<usize>,
}

impl<'a> Reader<'a> {
    /// The device that is chosen and its transmission flags, if the negotiation comes to that.
    fn negotiation(&mut self) -> Option<(usize, u16)> {
        assert_eq!(self.answers.number(8), Some(proto::INIT_MAGIC));
        assert_eq!(self.answers.number(8), Some(proto::OPT_MAGIC));
        assert_eq!(self.answers.number(2), Some(3), "fixed newstyle, no zeroes");
        let flags = self.sent.number(4)?;
        if flags & !3 != 0 {
            return None;
        }
        loop {
            if self.sent.number(8)? != proto::OPT_MAGIC {
                return None;
            }
            let (option, len) = (self.sent.number(4)? as u32, self.sent.number(4)? as usize);
            let too_big = len > 16 << 10;
            if len > 1 << 20 || (option == opt::EXPORT_NAME && too_big) {
                return None;
            }
            let data = self.sent.exactly(len)?;
            match option {
                _ if too_big => _ = self.reply(option, rep::ERR_TOO_BIG),
                opt::EXPORT_NAME => {
                    let index = find(data)?;
                    let (size, allowed) = (self.answers.number(8), self.answers.number(2));
                    assert_eq!(size, Some(SIZE as u64));
                    if flags & 2 == 0 {
                        let zeroes = self.answers.exactly(124).expect("124 zeroes");
                        assert!(zeroes.iter().all(|b| *b == 0));
                    }
                    return Some((index, allowed? as u16));
                }
                opt::ABORT => {
                    self.reply(option, rep::ACK);
                    return None;
                }
                opt::LIST if data.is_empty() => {
                    for (name, _) in NAMES {
                        let mut entry = Input(self.reply(option, rep::SERVER));
                        assert_eq!(entry.number(4), Some(name.len() as u64));
                        assert_eq!(entry.0, format!("{name}the {name}").as_bytes());
                    }
                    self.reply(option, rep::ACK);
                }
                opt::LIST => _ = self.reply(option, rep::ERR_INVALID),
                opt::INFO | opt::GO => {
                    if let Some(chosen) = self.information(option, data) {
                        return Some(chosen);
                    }
                }
                opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => self.frame(option, data),
                opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => self.contexts(option, data),
                _ => _ = self.reply(option, rep::ERR_UNSUP),
            }
        }
    }

    fn frame(&mut self, option: u32, data: &[u8]) {
        let extended = self.framing == Framing::Extended;
        if !data.is_empty() {
            self.reply(option, rep::ERR_INVALID);
        } else if option == opt::EXTENDED_HEADERS {
            self.reply(option, rep::ACK);
            self.framing = Framing::Extended;
            self.allocation = self.allocation.filter(|_| extended);
        } else if extended {
            self.reply(option, rep::ERR_EXT_HEADER_REQD);
        } else {
            self.reply(option, rep::ACK);
            self.framing = Framing::Structured;
        }
    }

    fn contexts(&mut self, option: u32, data: &[u8]) {
        let setting = option == opt::SET_META_CONTEXT;
        if setting {
            self.allocation = None;
        }
        let mut data = Input(data);
        let name = data.number(4).and_then(|n| data.exactly(n as usize));
        let name = name.filter(|n| n.len() <= proto::MAX_NAME);
        let count = data.number(4);
        let mut queries = Vec::new();
        for _ in 0..count.unwrap_or(0) {
            match data.number(4).and_then(|n| data.exactly(n as usize)) {
                Some(query) => queries.push(query),
                None => {
                    self.reply(option, rep::ERR_INVALID);
                    return;
                }
            }
        }
        let (Some(name), Some(count), true) = (name, count, data.0.is_empty() && self.framing != Framing::Simple)
        else {
            self.reply(option, rep::ERR_INVALID);
            return;
        };
        let Some(index) = find(name) else {
            self.reply(option, rep::ERR_UNKNOWN);
            return;
        };
        let asked = |q: &&[u8]| *q == BASE_ALLOCATION.as_bytes() || !setting && *q == b"base:";
        if !setting && count == 0 || queries.iter().any(asked) {
            let mut context = Input(self.reply(option, rep::META_CONTEXT));
            assert_eq!(context.number(4), Some(setting.into()));
            assert_eq!(context.0, BASE_ALLOCATION.as_bytes());
            self.allocation = setting.then_some(index).or(self.allocation);
        }
        self.reply(option, rep::ACK);
    }

    /// The next answer is to this option and of this kind; its data.
    fn reply(&mut self, option: u32, kind: u32) -> &'a [u8] {
        assert_eq!(self.answers.number(8), Some(proto::OPT_REPLY_MAGIC));
        assert_eq!(self.answers.number(4), Some(option.into()));
        assert_eq!(self.answers.number(4), Some(kind.into()), "answer to option {option}");
        let len = self.answers.number(4).expect("a length");
        self.answers.exactly(len as usize).expect("the data of an answer")
    }

    fn information(&mut self, option: u32, data: &[u8]) -> Option<(usize, u16)> {
        let mut data = Input(data);
        let name = data.number(4).and_then(|n| data.exactly(n as usize));
        let wanted = data.number(2).filter(|n| data.0.len() as u64 == 2 * n);
        let (Some(name), Some(_)) = (name.filter(|n| n.len() <= proto::MAX_NAME), wanted) else {
            self.reply(option, rep::ERR_INVALID);
            return None;
        };
        let Some(index) = find(name) else {
            self.reply(option, rep::ERR_UNKNOWN);
            return None;
        };
        let mut export = Input(self.reply(option, rep::INFO));
        assert_eq!(export.number(2), Some(info::EXPORT.into()));
        assert_eq!(export.number(8), Some(SIZE as u64));
        let allowed = export.number(2)? as u16;
        let mut block = Input(self.reply(option, rep::INFO));
        assert_eq!(block.number(2), Some(info::BLOCK_SIZE.into()));
        assert_eq!(block.number(4), Some(self.geometry.logical_block_size.into()));
        let wanted: Vec<_> = data.0.chunks(2).map(|c| u16::from_be_bytes([c[0], c[1]])).collect();
        for kind in [info::NAME, info::DESCRIPTION] {
            if wanted.contains(&kind) {
                let text = self.reply(option, rep::INFO);
                assert_eq!(text[..2], kind.to_be_bytes());
            }
        }
        self.reply(option, rep::ACK);
        (option == opt::GO).then_some((index, allowed))
    }

    /// Follows the requests. `false` if the last one was cut off: it may have been done in part.
    fn transmission(&mut self, allowed: u16, allocation: bool, model: &mut [u8]) -> bool {
        while let Some(head) = self.sent.exactly(self.framing.request_len()) {
            let Some(q) = Request::parse(head, self.framing).expect("its length") else {
                return true;
            };
            let announced = self.framing == Framing::Extended && q.flags & cmd_flag::PAYLOAD_LEN != 0;
            let payload = if q.command == cmd::WRITE || announced { q.len } else { 0 };
            if q.command == cmd::DISC || payload > proto::MAX_PAYLOAD.into() {
                return true;
            }
            let Some(written) = self.sent.exactly(payload as usize) else {
                self.cut_off(&q);
                return false;
            };
            let error = self.head(&q).expect("every request is answered");
            if error != 0 {
                assert!(matches!(error, 1 | 22 | 28 | 95), "error {error}");
                assert!(!self.in_order(&q, allowed, allocation), "{q:?} is refused: {error}");
                continue;
            }
            let changes = matches!(q.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
            assert!(!changes || !self.geometry.read_only);
            if q.command == cmd::FLUSH {
                continue;
            }
            assert!(self.geometry.contains(q.offset, q.len), "{q:?} is done");
            assert!(self.geometry.aligned(q.offset, q.len), "{q:?} is done");
            let there = &mut model[q.offset as usize..q.offset as usize + q.len as usize];
            match q.command {
                cmd::READ => {
                    let data = self.answers.exactly(there.len()).expect("the data of a read");
                    assert_eq!(data, there, "data of a read");
                }
                cmd::WRITE => there.copy_from_slice(written),
                cmd::CACHE => {}
                cmd::BLOCK_STATUS => {
                    assert!(allocation, "a state that nobody may ask for");
                    self.extent(q.len);
                }
                _ => there.fill(0),
            }
        }
        true
    }

    /// The state of a range, of which nothing more is known than that it may have data.
    fn extent(&mut self, len: u64) {
        assert_eq!(self.answers.number(4), Some(1), "the context");
        let wide = if self.framing == Framing::Extended {
            assert_eq!(self.answers.number(4), Some(1), "one extent");
            8
        } else {
            4
        };
        assert_eq!(self.answers.number(wide), Some(len));
        assert_eq!(self.answers.number(wide), Some(0));
    }

    /// The head of the next answer, which is this request's, up to the data: its error.
    fn head(&mut self, q: &Request) -> Option<u64> {
        if self.answers.0.is_empty() {
            return None;
        }
        let chunks = match self.framing {
            Framing::Simple => false,
            Framing::Structured => matches!(q.command, cmd::READ | cmd::BLOCK_STATUS),
            Framing::Extended => true,
        };
        if chunks {
            return Some(self.chunk(q));
        }
        assert_eq!(self.answers.number(4), Some(proto::SIMPLE_REPLY_MAGIC.into()));
        let error = self.answers.number(4);
        assert_eq!(self.answers.number(8), Some(q.cookie));
        error
    }

    fn chunk(&mut self, q: &Request) -> u64 {
        let extended = self.framing == Framing::Extended;
        let magic = if extended {
            proto::EXTENDED_REPLY_MAGIC
        } else {
            proto::STRUCTURED_REPLY_MAGIC
        };
        assert_eq!(self.answers.number(4), Some(magic.into()));
        assert_eq!(self.answers.number(2), Some(proto::CHUNK_DONE.into()));
        let kind = self.answers.number(2).expect("a type") as u16;
        assert_eq!(self.answers.number(8), Some(q.cookie));
        if extended {
            assert_eq!(self.answers.number(8), Some(q.offset));
        }
        let len = self.answers.number(if extended { 8 } else { 4 }).expect("a length");
        let status = if extended {
            (chunk::BLOCK_STATUS_EXT, 24)
        } else {
            (chunk::BLOCK_STATUS, 12)
        };
        match (q.command, kind) {
            (_, chunk::ERROR) => {
                let error = self.answers.number(4).expect("an error");
                assert!(error != 0 && len == 6, "error {error} of {len} bytes");
                assert_eq!(self.answers.number(2), Some(0), "no text");
                return error;
            }
            (cmd::READ, chunk::OFFSET_DATA) => {
                assert_eq!((self.answers.number(8), len), (Some(q.offset), 8 + q.len));
            }
            (cmd::BLOCK_STATUS, kind) => assert_eq!((kind, len), status),
            (_, kind) => {
                assert_eq!((kind, len), (chunk::NONE, 0), "{q:?}");
                assert!(q.command != cmd::READ || q.len == 0, "{q:?} has no data");
            }
        }
        0
    }

    /// A write whose data ends too early may be answered, with an error.
    fn cut_off(&mut self, q: &Request) {
        let error = self.head(q);
        assert_ne!(error, Some(0), "a write without its data is done");
        self.sent.0 = &[];
    }

    /// Whether a server has no reason to refuse.
    fn in_order(&self, q: &Request, allowed: u16, allocation: bool) -> bool {
        let df = if allowed & tx::SEND_DF != 0 { cmd_flag::DF } else { 0 };
        let flags = match q.command {
            cmd::WRITE_ZEROES if self.geometry.max_write_zeroes > 0 => cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO,
            cmd::WRITE_ZEROES => cmd_flag::NO_HOLE,
            cmd::READ => df,
            cmd::WRITE => cmd_flag::PAYLOAD_LEN,
            cmd::BLOCK_STATUS => cmd_flag::REQ_ONE,
            _ => 0,
        };
        let fua = if allowed & tx::SEND_FUA != 0 { cmd_flag::FUA } else { 0 };
        let changes = matches!(q.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
        let known = changes || matches!(q.command, cmd::READ | cmd::FLUSH | cmd::CACHE | cmd::BLOCK_STATUS);
        let can = match q.command {
            _ if changes && self.geometry.read_only => false,
            cmd::TRIM => allowed & tx::SEND_TRIM != 0,
            cmd::BLOCK_STATUS => allocation && q.len > 0,
            _ => true,
        };
        let inside = self.geometry.contains(q.offset, q.len) && self.geometry.aligned(q.offset, q.len);
        known && can && q.flags & !(flags | fua) == 0 && (inside || q.command == cmd::FLUSH)
    }
}

/// The export of a name: its own or its device's, with or without a slash before it; no name is the first one's.
fn find(name: &[u8]) -> Option<usize> {
    let asked = name.strip_prefix(b"/").unwrap_or(name);
    let same = |a: &str| a.strip_prefix('/').unwrap_or(a).as_bytes() == asked;
    let found = NAMES.iter().position(|(name, device)| same(name) || same(device));
    found.or_else(|| asked.is_empty().then_some(0))
}
