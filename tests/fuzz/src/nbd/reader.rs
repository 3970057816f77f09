//! A second reading of the protocol.

use rnbd::{
    block::{Extent, Geometry},
    nbd::{
        TlsMode,
        proto::{self, BASE_ALLOCATION, Framing, Request, chunk, cmd, cmd_flag, info, opt, rep, tx},
    },
};

use super::{AT_FIRST, Change, NAMES, SIZE, extents};
use crate::input::Input;

/// Reads what was sent and what was answered, side by side.
pub(super) struct Reader<'a> {
    sent: Input<'a>,
    /// Bytes that were sent.
    all: usize,
    answers: Input<'a>,
    geometry: Geometry,
    framing: Framing,
    /// The export whose allocation may be asked for.
    allocation: Option<usize>,
    mode: TlsMode,
    /// Where TLS has begun.
    secured: Option<usize>,
    changes: &'a [(usize, Change)],
    /// Which exports can be chosen.
    there: [bool; NAMES.len()],
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        geometry: Geometry,
        mode: TlsMode,
        changes: &'a [(usize, Change)],
        sent: &'a [u8],
        answers: &'a [u8],
    ) -> Self {
        Self {
            sent: Input(sent),
            all: sent.len(),
            answers: Input(answers),
            geometry,
            framing: Framing::Simple,
            allocation: None,
            mode,
            secured: None,
            changes,
            there: [true, true, false],
        }
    }

    /// Where TLS has begun.
    pub(super) fn secured(&self) -> Option<usize> {
        self.secured
    }

    /// Whether all answers are read.
    pub(super) fn is_done(&self) -> bool {
        self.answers.0.is_empty()
    }

    /// Bytes of what was sent that are read.
    fn at(&self) -> usize {
        self.all - self.sent.0.len()
    }

    /// What has happened to exports before what is read so far was whole.
    fn change(&mut self) {
        while let Some(((at, change), rest)) = self.changes.split_first()
            && *at < self.at()
        {
            self.changes = rest;
            match change {
                Change::Withdraw(index) => self.there[*index] = false,
                Change::Offer => self.there[AT_FIRST] = true,
            }
        }
    }

    /// The export of a name: its own or its device's, with or without a slash before it; no name is the first one's.
    fn find(&self, name: &[u8]) -> Option<usize> {
        let asked = name.strip_prefix(b"/").unwrap_or(name);
        let same = |a: &str| a.strip_prefix('/').unwrap_or(a).as_bytes() == asked;
        let named = |i: usize| same(NAMES[i].0) || same(NAMES[i].1);
        let find = |is: &dyn Fn(usize) -> bool| (0..NAMES.len()).find(|i| self.there[*i] && is(*i));
        find(&named).or_else(|| find(&|_| asked.is_empty()))
    }

    /// The device that is chosen and its transmission flags, if the negotiation comes to that.
    pub(super) fn negotiation(&mut self) -> Option<(usize, u16)> {
        assert_eq!(self.answers.number(8), Some(proto::INIT_MAGIC));
        assert_eq!(self.answers.number(8), Some(proto::OPT_MAGIC));
        assert_eq!(self.answers.number(2), Some(3), "fixed newstyle, no zeroes");
        let flags = self.sent.number(4)?;
        if flags & !3 != 0 {
            return None;
        }
        if flags & 1 == 0 {
            // To such a client TLS can't be offered, nor can it be required of it.
            if self.mode == TlsMode::Require {
                return None;
            }
            self.mode = TlsMode::Off;
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
            self.change();
            match option {
                _ if self.is_kept_out(option) => {
                    if option == opt::EXPORT_NAME {
                        return None;
                    }
                    self.reply(option, rep::ERR_TLS_REQD);
                }
                // What is too long is not even looked at, but for what kind of answer it gets.
                opt::STARTTLS => self.starttls(len),
                _ if too_big => _ = self.reply(option, rep::ERR_TOO_BIG),
                opt::EXPORT_NAME => {
                    let index = self.find(data)?;
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
                opt::LIST if data.is_empty() => self.list(),
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

    fn list(&mut self) {
        for (index, (name, _)) in NAMES.into_iter().enumerate() {
            if self.there[index] {
                let mut entry = Input(self.reply(opt::LIST, rep::SERVER));
                assert_eq!(entry.number(4), Some(name.len() as u64));
                assert_eq!(entry.0, format!("{name}the {name}").as_bytes());
            }
        }
        self.reply(opt::LIST, rep::ACK);
    }

    /// Without TLS, which is required, nothing is answered but leaving and STARTTLS.
    fn is_kept_out(&self, option: u32) -> bool {
        let kept = self.mode == TlsMode::Require && self.secured.is_none();
        kept && !matches!(option, opt::STARTTLS | opt::ABORT)
    }

    /// With TLS all that was agreed on is forgotten, but for the flags at the beginning.
    fn starttls(&mut self, len: usize) {
        let kind = match self.secured {
            Some(_) => rep::ERR_INVALID,
            None if self.mode == TlsMode::Off => rep::ERR_POLICY,
            None if len > 0 => rep::ERR_INVALID,
            None => rep::ACK,
        };
        self.reply(opt::STARTTLS, kind);
        if kind == rep::ACK {
            self.secured = Some(self.at());
            (self.framing, self.allocation) = (Framing::Simple, None);
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
        let Some(index) = self.find(name) else {
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
        let Some(index) = self.find(name) else {
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
    pub(super) fn transmission(&mut self, index: usize, allowed: u16, model: &mut [u8]) -> bool {
        let allocation = self.allocation == Some(index);
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
                    self.states(&q);
                }
                _ => there.fill(0),
            }
        }
        true
    }

    /// The states of a range, as the device says.
    fn states(&mut self, q: &Request) {
        assert_eq!(self.answers.number(4), Some(1), "the context");
        let extents = said(q);
        let wide = if self.framing == Framing::Extended {
            assert_eq!(self.answers.number(4), Some(extents.len() as u64));
            8
        } else {
            4
        };
        for extent in extents {
            assert_eq!(self.answers.number(wide), Some(extent.len));
            assert_eq!(self.answers.number(wide), Some(if extent.hole { 3 } else { 0 }));
        }
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
            (cmd::BLOCK_STATUS, kind) => {
                let count = said(q).len() as u64;
                let status = match extended {
                    true => (chunk::BLOCK_STATUS_EXT, 8 + 16 * count),
                    false => (chunk::BLOCK_STATUS, 4 + 8 * count),
                };
                assert_eq!((kind, len), status);
            }
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
            cmd::WRITE if self.framing == Framing::Extended => cmd_flag::PAYLOAD_LEN,
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

/// What the device says to this request for a state.
fn said(q: &Request) -> Vec<Extent> {
    let one = q.flags & cmd_flag::REQ_ONE != 0;
    extents(q.offset, q.len, if one { 1 } else { usize::MAX })
}
