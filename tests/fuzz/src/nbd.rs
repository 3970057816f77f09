//! What a client of the NBD server sends: negotiation and requests. A second reading of the protocol follows the server's
//! answers, in order, with a copy of the device: no answer that nobody asked for, no data of another place, no effect of
//! what was refused, and nothing that is in order is refused.

use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::Arc,
    thread,
};

use rnbd::{
    Errno,
    block::{BlockDevice, BlockRequest, Done, Geometry, IoBuffer},
    nbd::{
        self, NbdExport,
        proto::{self, Request, cmd, cmd_flag, info, opt, rep, tx},
    },
};
use std::sync::{Condvar, Mutex};

use crate::input::Input;

/// What a socket takes without a reader.
const MAX_INPUT: usize = 32 << 10;
const SIZE: usize = 64 << 10;
const NAMES: [&str; 2] = ["disk", "other"];

/// Lent buffers are counted.
struct Lent(Mutex<u32>, Condvar);

struct Buffer {
    bytes: *mut u8,
    len: usize,
    lent: Arc<Lent>,
}

// SAFETY: the allocation has one owner.
unsafe impl Send for Buffer {}

// SAFETY: an allocation of `len` bytes that lives as long as the value and does not move.
unsafe impl IoBuffer for Buffer {
    fn as_ptr(&self) -> *mut u8 {
        self.bytes
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Buffer {
    fn slice(&mut self) -> &mut [u8] {
        // SAFETY: our own allocation, and no thread but this one has a pointer to it here.
        unsafe { std::slice::from_raw_parts_mut(self.bytes, self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` with this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.bytes, self.len)) });
        *self.lent.0.lock().unwrap() -= 1;
        self.lent.1.notify_all();
    }
}

/// A device in memory that does everything at once and checks what it is asked for.
struct Device {
    geometry: Geometry,
    content: Mutex<Vec<u8>>,
    lent: Arc<Lent>,
}

impl Device {
    fn new(config: u8) -> Self {
        let bit = |n: u8| config >> n & 1 != 0;
        let block = if bit(0) { 4096 } else { 512 };
        Self {
            geometry: Geometry {
                size: SIZE as u64,
                logical_block_size: block,
                physical_block_size: 4096,
                max_transfer: if bit(1) { 4096 } else { 16 << 10 },
                max_discard: if bit(2) { 8192 } else { 0 },
                discard_granularity: 4096,
                read_only: bit(3),
                write_cache: bit(4),
                fua: bit(5),
                fast_zeroes: bit(4),
                queue_depth: if bit(6) { 8 } else { 1 },
            },
            content: Mutex::new((0..SIZE).map(|i| (i / 512) as u8 ^ i as u8).collect()),
            lent: Arc::new(Lent(Mutex::new(0), Condvar::new())),
        }
    }

    fn range(&self, offset: u64, len: u64) -> std::ops::Range<usize> {
        let g = &self.geometry;
        assert!(
            g.contains(offset, len) && g.aligned(offset, len) && len > 0,
            "{len} bytes at {offset}"
        );
        offset as usize..(offset + len) as usize
    }

    fn change(&self, offset: u64, len: u64, fua: bool, with: Option<&[u8]>) {
        assert!(!self.geometry.read_only, "a read-only device is changed");
        assert!(
            !fua || self.geometry.fua || !self.geometry.write_cache,
            "the device can't force"
        );
        let range = self.range(offset, len);
        let mut content = self.content.lock().unwrap();
        match with {
            Some(bytes) => content[range].copy_from_slice(bytes),
            None => content[range].fill(0),
        }
    }
}

impl BlockDevice for Device {
    type Buffer = Buffer;

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn buffer(&self, len: usize) -> Result<Buffer, Errno> {
        let mut n = self.lent.0.lock().unwrap();
        while *n >= self.geometry.queue_depth {
            n = self.lent.1.wait(n).unwrap();
        }
        drop(n);
        self.try_buffer(len)?.ok_or(Errno::EAGAIN)
    }

    fn try_buffer(&self, len: usize) -> Result<Option<Buffer>, Errno> {
        assert!(
            (1..=self.geometry.max_transfer as usize).contains(&len),
            "a buffer of {len} bytes"
        );
        let mut n = self.lent.0.lock().unwrap();
        if *n >= self.geometry.queue_depth {
            return Ok(None);
        }
        *n += 1;
        let bytes = Box::into_raw(vec![0xee; len].into_boxed_slice()).cast();
        let lent = self.lent.clone();
        Ok(Some(Buffer { bytes, len, lent }))
    }

    fn submit(&self, request: BlockRequest<Buffer>, done: Done<Buffer>) {
        match request {
            BlockRequest::Read { offset, mut buffer } => {
                let range = self.range(offset, buffer.len() as u64);
                buffer.slice().copy_from_slice(&self.content.lock().unwrap()[range]);
                done(Ok(()), Some(buffer));
            }
            BlockRequest::Write {
                offset,
                mut buffer,
                fua,
            } => {
                self.change(offset, buffer.len() as u64, fua, Some(buffer.slice()));
                done(Ok(()), Some(buffer));
            }
            BlockRequest::Flush => done(Ok(()), None),
            BlockRequest::Discard { offset, len } => {
                assert!(self.geometry.max_discard > 0, "the device can't discard");
                self.change(offset, len, false, None);
                done(Ok(()), None);
            }
            BlockRequest::WriteZeroes { offset, len, fua, .. } => {
                self.change(offset, len, fua, None);
                done(Ok(()), None);
            }
        }
    }
}

/// What the first byte does not say is sent to a server; see the module.
pub fn run(data: &[u8]) {
    let Some((config, sent)) = data.split_first() else {
        return;
    };
    let sent = &sent[..sent.len().min(MAX_INPUT)];
    let exports = NAMES.map(|name| NbdExport {
        name: name.into(),
        description: format!("the {name}"),
        device: Arc::new(Device::new(*config)),
    });
    let (mut client, server) = UnixStream::pair().expect("a pair of sockets");
    client.write_all(sent).expect("room in a socket");
    client.shutdown(Shutdown::Write).expect("a socket");
    let mut answers = Vec::new();
    thread::scope(|s| {
        let serving = s.spawn(|| {
            // Why it ends is told to the log only.
            let _ = nbd::serve_stream(&server, &exports);
            let _ = server.shutdown(Shutdown::Both);
        });
        client.read_to_end(&mut answers).expect("answers");
        if let Err(panic) = serving.join() {
            std::panic::resume_unwind(panic);
        }
    });
    let geometry = exports[0].device.geometry;
    let mut reader = Reader {
        sent: Input(sent),
        answers: Input(&answers),
        geometry,
    };
    let chosen = reader.negotiation();
    if let Some((index, allowed)) = chosen {
        let mut model = Device::new(*config).content.into_inner().unwrap();
        let whole = reader.transmission(allowed, &mut model);
        let content = exports[index].device.content.lock().unwrap();
        assert!(
            !whole || *content == model,
            "the device has other content than was written"
        );
        let others = exports.iter().enumerate().filter(|(i, _)| *i != index);
        for (_, e) in others {
            let fresh = Device::new(*config).content.into_inner().unwrap();
            assert_eq!(*e.device.content.lock().unwrap(), fresh, "another device was changed");
        }
    }
    assert!(
        reader.answers.0.is_empty(),
        "answers to nothing: {:?}",
        reader.answers.0
    );
    assert_eq!(
        *exports[0].device.lent.0.lock().unwrap(),
        0,
        "a buffer is not given back"
    );
}

/// Reads what was sent and what was answered, side by side.
struct Reader<'a> {
    sent: Input<'a>,
    answers: Input<'a>,
    geometry: Geometry,
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
                    for name in NAMES {
                        let entry = self.reply(option, rep::SERVER);
                        assert_eq!(&entry[4..], name.as_bytes());
                    }
                    self.reply(option, rep::ACK);
                }
                opt::LIST => _ = self.reply(option, rep::ERR_INVALID),
                opt::INFO | opt::GO => {
                    if let Some(chosen) = self.information(option, data) {
                        return Some(chosen);
                    }
                }
                _ => _ = self.reply(option, rep::ERR_UNSUP),
            }
        }
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
    fn transmission(&mut self, allowed: u16, model: &mut [u8]) -> bool {
        while let Some(head) = self.sent.exactly(Request::LEN) {
            let Some(q) = Request::parse(head.try_into().expect("its length")) else {
                return true;
            };
            if q.command == cmd::DISC || (q.command == cmd::WRITE && q.len > proto::MAX_PAYLOAD) {
                return true;
            }
            let written = match q.command {
                cmd::WRITE => match self.sent.exactly(q.len as usize) {
                    Some(bytes) => bytes,
                    None => {
                        self.cut_off(&q);
                        return false;
                    }
                },
                _ => &[],
            };
            let error = self.head(&q).expect("every request is answered");
            if error != 0 {
                assert!(matches!(error, 1 | 22 | 28), "error {error}");
                assert!(!self.in_order(&q, allowed), "{q:?} is refused: {error}");
                continue;
            }
            assert!(!matches!(q.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES) || !self.geometry.read_only);
            if q.command == cmd::FLUSH {
                continue;
            }
            assert!(self.geometry.contains(q.offset, q.len.into()), "{q:?} is done");
            assert!(self.geometry.aligned(q.offset, q.len.into()), "{q:?} is done");
            let there = &mut model[q.offset as usize..q.offset as usize + q.len as usize];
            match q.command {
                cmd::READ => {
                    let data = self.answers.exactly(there.len()).expect("the data of a read");
                    assert_eq!(data, there, "data of a read");
                }
                cmd::WRITE => there.copy_from_slice(written),
                _ => there.fill(0),
            }
        }
        true
    }

    /// The head of the next answer, which is this request's: its error.
    fn head(&mut self, q: &Request) -> Option<u64> {
        if self.answers.0.is_empty() {
            return None;
        }
        assert_eq!(self.answers.number(4), Some(proto::SIMPLE_REPLY_MAGIC.into()));
        let error = self.answers.number(4);
        assert_eq!(self.answers.number(8), Some(q.cookie));
        error
    }

    /// A write whose data ends too early may be answered, with an error.
    fn cut_off(&mut self, q: &Request) {
        let error = self.head(q);
        assert_ne!(error, Some(0), "a write without its data is done");
        self.sent.0 = &[];
    }

    /// Whether a server has no reason to refuse.
    fn in_order(&self, q: &Request, allowed: u16) -> bool {
        let flags = match q.command {
            cmd::WRITE_ZEROES => cmd_flag::NO_HOLE,
            _ => 0,
        };
        let fua = if allowed & tx::SEND_FUA != 0 { cmd_flag::FUA } else { 0 };
        let changes = matches!(q.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES);
        let known = changes || matches!(q.command, cmd::READ | cmd::FLUSH);
        let can = (q.command != cmd::TRIM || allowed & tx::SEND_TRIM != 0) && !(changes && self.geometry.read_only);
        let inside = self.geometry.contains(q.offset, q.len.into()) && self.geometry.aligned(q.offset, q.len.into());
        known && can && q.flags & !(flags | fua) == 0 && (inside || q.command == cmd::FLUSH)
    }
}

/// The export of a name; the empty name is the first one's.
fn find(name: &[u8]) -> Option<usize> {
    let found = NAMES.iter().position(|n| n.as_bytes() == name);
    found.or_else(|| name.is_empty().then_some(0))
}
