//! Fixed newstyle negotiation, without I/O: bytes of the client in, bytes for it out.

use core::fmt::Write as _;

use roce_verbs::shown;

use crate::{
    block::Geometry,
    nbd::{
        meta::{self, MetaQuery},
        parse::ParseBuffer,
        proto::{self, Framing, info, opt, rep, tx},
        tls::{Security, TlsMode, Verdict},
    },
};

/// Longest option that is read; longer ones are skipped and refused.
const MAX_OPTION: u32 = 16 << 10;
/// Options longer than this end the connection.
const ABSURD_OPTION: u32 = 1 << 20;
/// Bytes of an option before its data: magic number, option, length.
const OPTION_HEAD: usize = 16;
/// Zeroes after the answer to EXPORT_NAME, unless both sides do without.
const ZEROES: usize = 124;

/// A device under a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    /// Name that clients ask for, and that is listed.
    pub name: String,
    /// The device's own name, by which clients may ask as well.
    pub device: String,
    /// Shown to those who ask.
    pub description: String,
    /// Size and limits of the device.
    pub geometry: Geometry,
}

/// Exports of a server. The first that is not withdrawn is the default.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exports(Vec<Option<Export>>);

impl Exports {
    /// These, numbered from 0.
    pub fn new(exports: Vec<Export>) -> Self {
        Self(exports.into_iter().map(Some).collect())
    }

    /// All, in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Export> {
        self.0.iter().flatten()
    }

    /// The export of a number.
    pub fn get(&self, index: usize) -> Option<&Export> {
        self.0.get(index)?.as_ref()
    }

    /// A device is another one than it was.
    pub fn set_geometry(&mut self, index: usize, geometry: Geometry) {
        if let Some(Some(export)) = self.0.get_mut(index) {
            export.geometry = geometry;
        }
    }

    /// One more, with the next number.
    pub fn offer(&mut self, export: Export) {
        self.0.push(Some(export));
    }

    /// Nobody finds it any more; its number stays taken.
    pub fn withdraw(&mut self, index: usize) {
        if let Some(export) = self.0.get_mut(index) {
            *export = None;
        }
    }

    /// The number of the export that a client means: by its name or that of its device, exactly or but for the slash that
    /// begins the path of a URI. No name means the first.
    pub fn find(&self, name: &[u8]) -> Option<usize> {
        let plain = without_slash(name);
        let whose = |matches: &dyn Fn(&Export) -> bool| self.0.iter().position(|e| e.as_ref().is_some_and(matches));
        whose(&|e| e.name.as_bytes() == name)
            .or_else(|| whose(&|e| !name.is_empty() && e.device.as_bytes() == name))
            .or_else(|| whose(&|e| without_slash(e.name.as_bytes()) == plain))
            .or_else(|| whose(&|e| !plain.is_empty() && without_slash(e.device.as_bytes()) == plain))
            .or_else(|| whose(&|_| plain.is_empty()))
    }
}

fn without_slash(name: &[u8]) -> &[u8] {
    name.strip_prefix(b"/").unwrap_or(name)
}

/// Returns the transmission flags ([`tx`]) of an export for a client with this framing.
pub fn transmission_flags(g: &Geometry, framing: Framing) -> u16 {
    let mut f = tx::HAS_FLAGS | tx::SEND_FLUSH | tx::CAN_MULTI_CONN | tx::SEND_CACHE;
    if framing != Framing::Simple {
        f |= tx::SEND_DF;
    }
    if g.read_only {
        return f | tx::READ_ONLY;
    }
    f |= tx::SEND_WRITE_ZEROES | tx::SEND_FAST_ZERO;
    // Without a write cache every write is as good as forced.
    if g.fua || !g.write_cache {
        f |= tx::SEND_FUA;
    }
    if g.max_discard > 0 {
        f |= tx::SEND_TRIM;
    }
    f
}

/// Result of a client's negotiation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Chosen {
    /// The export.
    pub(crate) index: usize,
    /// The transmission flags that it was told.
    pub(crate) flags: u16,
    /// How requests and replies are framed.
    pub(crate) framing: Framing,
    /// It may ask what is allocated.
    pub(crate) allocation: bool,
}

/// Next step after a client's bytes.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// More bytes are needed.
    More,
    /// An option is answered; another may follow.
    Option,
    /// TLS is to begin, when this is answered.
    StartTls,
    /// The client has chosen an export.
    Transmit(Chosen),
    /// The client takes leave.
    Abort,
    /// It makes no sense.
    Bad(String),
}

/// First bytes of a connection, from the server.
pub(crate) fn greeting() -> [u8; 18] {
    let mut b = [0; 18];
    b[..8].copy_from_slice(&proto::INIT_MAGIC.to_be_bytes());
    b[8..16].copy_from_slice(&proto::OPT_MAGIC.to_be_bytes());
    b[16..].copy_from_slice(&(proto::FLAG_FIXED_NEWSTYLE | proto::FLAG_NO_ZEROES).to_be_bytes());
    b
}

/// The state of a negotiation.
#[derive(Debug, Default)]
pub(crate) struct Negotiation {
    security: Security,
    /// The client wants zeroes after an EXPORT_NAME.
    zeroes: bool,
    framing: Framing,
    /// The export for which `base:allocation` was chosen.
    allocation: Option<usize>,
    /// An option that is too long, and how many of its bytes are still to come.
    skipping: Option<(u32, usize)>,
}

impl Negotiation {
    /// With TLS as this says.
    pub(crate) fn new(mode: TlsMode) -> Self {
        Self {
            security: Security::Clear(mode),
            ..Self::default()
        }
    }

    /// Takes the client's flags; [`Next::Option`] when they are in order.
    pub(crate) fn flags(&mut self, input: &mut ParseBuffer) -> Next {
        let Some((flags, _)) = input.unread().split_first_chunk::<4>() else {
            return Next::More;
        };
        let flags = u32::from_be_bytes(*flags);
        input.consume(4);
        let known = u32::from(proto::FLAG_FIXED_NEWSTYLE | proto::FLAG_NO_ZEROES);
        if flags & !known != 0 {
            return Next::Bad(format!("unknown client flags {flags:#x}"));
        }
        self.zeroes = flags & u32::from(proto::FLAG_NO_ZEROES) == 0;
        if flags & u32::from(proto::FLAG_FIXED_NEWSTYLE) == 0 {
            // Such a client can't be asked for TLS, and may not be offered it.
            match self.security {
                Security::Clear(TlsMode::Require) => return Next::Bad("no fixed newstyle, and so no TLS".into()),
                _ => self.security = Security::Clear(TlsMode::Off),
            }
        }
        Next::Option
    }

    /// Takes an option and appends the answer to `out`.
    pub(crate) fn option(&mut self, input: &mut ParseBuffer, exports: &Exports, out: &mut Vec<u8>) -> Next {
        if let Some((option, left)) = self.skipping {
            return self.skip(option, left, input, out);
        }
        let Some((head, rest)) = input.unread().split_first_chunk::<OPTION_HEAD>() else {
            return Next::More;
        };
        let [m0, m1, m2, m3, m4, m5, m6, m7, o0, o1, o2, o3, l0, l1, l2, l3] = *head;
        if u64::from_be_bytes([m0, m1, m2, m3, m4, m5, m6, m7]) != proto::OPT_MAGIC {
            return Next::Bad("option without its magic number".into());
        }
        let option = u32::from_be_bytes([o0, o1, o2, o3]);
        let len = u32::from_be_bytes([l0, l1, l2, l3]);
        if len > ABSURD_OPTION || (option == opt::EXPORT_NAME && len > MAX_OPTION) {
            return Next::Bad(format!("option {option} of {len} bytes"));
        }
        let bytes = len as usize;
        if len > MAX_OPTION {
            input.consume(OPTION_HEAD);
            return self.skip(option, bytes, input, out);
        }
        let Some(data) = rest.get(..bytes) else {
            return Next::More;
        };
        let next = match self.security.judge(option, len) {
            Verdict::Answer => self.answer(option, data, exports, out),
            Verdict::Refuse(kind, why) => {
                reply(out, option, kind, why.as_bytes());
                Next::Option
            }
            // What came along was sent in the clear by whomever, and must not be taken for what TLS has brought.
            Verdict::Start if rest.len() > bytes => Next::Bad("more than STARTTLS before the handshake of TLS".into()),
            Verdict::Start => {
                *self = Self {
                    security: Security::Tls,
                    zeroes: self.zeroes,
                    ..Self::default()
                };
                reply(out, option, rep::ACK, b"");
                Next::StartTls
            }
            Verdict::End => Next::Bad("it asked for an export without TLS".into()),
        };
        input.consume(OPTION_HEAD + bytes);
        next
    }

    /// Whether an option has come in part.
    pub(crate) fn has_begun(&self, input: &ParseBuffer) -> bool {
        self.skipping.is_some() || !input.unread().is_empty()
    }

    fn skip(&mut self, option: u32, left: usize, input: &mut ParseBuffer, out: &mut Vec<u8>) -> Next {
        let left = left - input.skip(left);
        self.skipping = (left > 0).then_some((option, left));
        if left > 0 {
            return Next::More;
        }
        let kind = match self.security.judge(option, MAX_OPTION + 1) {
            Verdict::Refuse(kind, _) => kind,
            _ => rep::ERR_TOO_BIG,
        };
        reply(out, option, kind, b"");
        Next::Option
    }

    fn answer(&mut self, option: u32, data: &[u8], exports: &Exports, out: &mut Vec<u8>) -> Next {
        match option {
            opt::EXPORT_NAME => return self.export_name(data, exports, out),
            opt::ABORT => {
                reply(out, option, rep::ACK, b"");
                return Next::Abort;
            }
            opt::LIST if data.is_empty() => {
                for e in exports.iter() {
                    let mut d = (e.name.len() as u32).to_be_bytes().to_vec();
                    d.extend(e.name.as_bytes());
                    d.extend(e.description.as_bytes());
                    reply(out, option, rep::SERVER, &d);
                }
                reply(out, option, rep::ACK, b"");
            }
            opt::LIST => reply(out, option, rep::ERR_INVALID, b"LIST has no data"),
            opt::INFO | opt::GO => return self.information(option, data, exports, out),
            opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => self.frame(option, data, out),
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => self.contexts(option, data, exports, out),
            _ => reply(out, option, rep::ERR_UNSUP, b"option not supported"),
        }
        Next::Option
    }

    fn export_name(&self, name: &[u8], exports: &Exports, out: &mut Vec<u8>) -> Next {
        let Some((index, e)) = exports.find(name).and_then(|i| Some((i, exports.get(i)?))) else {
            // This old option has no way to say so.
            let mut why = String::from("no export ");
            let _ = write!(why, "\"{}\"", shown(&String::from_utf8_lossy(name)));
            return Next::Bad(why);
        };
        let chosen = self.choose(index, e);
        out.extend(e.geometry.size.to_be_bytes());
        out.extend(chosen.flags.to_be_bytes());
        if self.zeroes {
            out.resize(out.len() + ZEROES, 0);
        }
        Next::Transmit(chosen)
    }

    fn choose(&self, index: usize, export: &Export) -> Chosen {
        Chosen {
            index,
            flags: transmission_flags(&export.geometry, self.framing),
            framing: self.framing,
            allocation: self.allocation == Some(index),
        }
    }

    /// Agrees on how messages are framed. Extended headers stay; what was chosen of contexts before them is void.
    fn frame(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let kind = match (option, self.framing) {
            _ if !data.is_empty() => rep::ERR_INVALID,
            (opt::STRUCTURED_REPLY, Framing::Extended) => rep::ERR_EXT_HEADER_REQD,
            (opt::STRUCTURED_REPLY, _) => {
                self.framing = Framing::Structured;
                rep::ACK
            }
            (_, framing) => {
                if framing != Framing::Extended {
                    (self.framing, self.allocation) = (Framing::Extended, None);
                }
                rep::ACK
            }
        };
        reply(out, option, kind, b"");
    }

    /// Tells or chooses what can be asked of the state of ranges.
    fn contexts(&mut self, option: u32, data: &[u8], exports: &Exports, out: &mut Vec<u8>) {
        let setting = option == opt::SET_META_CONTEXT;
        if setting {
            self.allocation = None;
        }
        if self.framing == Framing::Simple {
            return reply(out, option, rep::ERR_INVALID, b"structured replies come first");
        }
        let Some(query) = MetaQuery::parse(data) else {
            return reply(out, option, rep::ERR_INVALID, b"malformed request for contexts");
        };
        let Some(index) = exports.find(query.name) else {
            return reply(out, option, rep::ERR_UNKNOWN, b"no such export");
        };
        if query.means_allocation(option) {
            if setting {
                self.allocation = Some(index);
            }
            reply(out, option, rep::META_CONTEXT, &meta::allocation(option));
        }
        reply(out, option, rep::ACK, b"");
    }

    /// Answers INFO and GO.
    fn information(&self, option: u32, data: &[u8], exports: &Exports, out: &mut Vec<u8>) -> Next {
        let Some((name, wanted)) = parse_information(data) else {
            reply(out, option, rep::ERR_INVALID, b"malformed request for information");
            return Next::Option;
        };
        let Some((index, e)) = exports.find(name).and_then(|i| Some((i, exports.get(i)?))) else {
            reply(out, option, rep::ERR_UNKNOWN, b"no such export");
            return Next::Option;
        };
        let chosen = self.choose(index, e);
        let mut d = info::EXPORT.to_be_bytes().to_vec();
        d.extend(e.geometry.size.to_be_bytes());
        d.extend(chosen.flags.to_be_bytes());
        reply(out, option, rep::INFO, &d);

        let mut d = info::BLOCK_SIZE.to_be_bytes().to_vec();
        d.extend(e.geometry.logical_block_size.to_be_bytes());
        d.extend(e.geometry.physical_block_size.max(4096).to_be_bytes());
        d.extend(proto::MAX_PAYLOAD.to_be_bytes());
        reply(out, option, rep::INFO, &d);

        for (kind, text) in [(info::NAME, &e.name), (info::DESCRIPTION, &e.description)] {
            let asked = wanted.chunks_exact(2).any(|c| *c == kind.to_be_bytes());
            if asked && !text.is_empty() {
                let mut d = kind.to_be_bytes().to_vec();
                d.extend(text.as_bytes());
                reply(out, option, rep::INFO, &d);
            }
        }
        reply(out, option, rep::ACK, b"");
        match option {
            opt::GO => Next::Transmit(chosen),
            _ => Next::Option,
        }
    }
}

fn reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend(proto::OPT_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// The name in an INFO or GO option, and the kinds of information asked for, two bytes each.
fn parse_information(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = data.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
    let (count, rest) = rest.split_first_chunk::<2>()?;
    let exact = name.len() <= proto::MAX_NAME && rest.len() == 2 * usize::from(u16::from_be_bytes(*count));
    exact.then_some((name, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            size: 1 << 20,
            logical_block_size: 512,
            physical_block_size: 512,
            max_transfer: 128 << 10,
            max_discard: 1 << 20,
            discard_granularity: 4096,
            read_only: false,
            write_cache: true,
            fua: true,
            max_write_zeroes: 0,
            queue_depth: 8,
        }
    }

    fn exports(names: &[(&str, &str)]) -> Exports {
        let export = |(name, device): &(&str, &str)| Export {
            name: (*name).into(),
            device: (*device).into(),
            description: String::new(),
            geometry: geometry(),
        };
        Exports::new(names.iter().map(export).collect())
    }

    #[test]
    fn exports_are_found_by_the_names_that_clients_have_for_them() {
        let e = exports(&[("disk", "images/a"), ("/images/b", "b"), ("b", "/dev/c")]);
        for (name, found) in [
            ("disk", Some(0)),
            ("", Some(0)),
            ("/", Some(0)),
            ("/disk", Some(0)),
            ("images/a", Some(0)),
            ("/images/a", Some(0)),
            ("images/b", Some(1)),
            ("/images/b", Some(1)),
            // A name goes before another device's.
            ("b", Some(2)),
            ("/b", Some(2)),
            ("/dev/c", Some(2)),
            ("dev/c", Some(2)),
            ("//disk", None),
            ("DISK", None),
            ("disk ", None),
        ] {
            assert_eq!(e.find(name.as_bytes()), found, "{name:?}");
        }
        assert_eq!(exports(&[]).find(b""), None);
        assert_eq!(exports(&[("a", ""), ("", "")]).find(b""), Some(1));
    }

    #[test]
    fn exports_come_and_go_and_keep_their_numbers() {
        let mut e = exports(&[("a", "a"), ("b", "b")]);
        e.withdraw(0);
        e.withdraw(7);
        assert_eq!((e.find(b"a"), e.find(b"b"), e.find(b"")), (None, Some(1), Some(1)));
        assert!(e.get(0).is_none());
        e.set_geometry(0, geometry());
        let [again] = &exports(&[("a", "a")]).0[..] else {
            panic!()
        };
        e.offer(again.clone().unwrap());
        assert_eq!((e.find(b"a"), e.find(b"")), (Some(2), Some(1)));
        let listed: Vec<_> = e.iter().map(|export| export.name.as_str()).collect();
        assert_eq!(listed, ["b", "a"]);
        e.withdraw(1);
        e.withdraw(2);
        assert_eq!((e.find(b""), e.iter().count()), (None, 0));
    }

    #[test]
    fn flags_say_what_the_device_can_do() {
        let g = geometry();
        let always = tx::HAS_FLAGS | tx::SEND_FLUSH | tx::CAN_MULTI_CONN | tx::SEND_CACHE;
        let writable = always | tx::SEND_WRITE_ZEROES | tx::SEND_FAST_ZERO;
        assert_eq!(
            transmission_flags(&g, Framing::Simple),
            writable | tx::SEND_FUA | tx::SEND_TRIM
        );
        let read_only = Geometry { read_only: true, ..g };
        assert_eq!(transmission_flags(&read_only, Framing::Simple), always | tx::READ_ONLY);
        let no_fua = Geometry { fua: false, ..g };
        assert_eq!(transmission_flags(&no_fua, Framing::Simple), writable | tx::SEND_TRIM);
        let plain = Geometry {
            write_cache: false,
            max_discard: 0,
            ..no_fua
        };
        assert_eq!(transmission_flags(&plain, Framing::Simple), writable | tx::SEND_FUA);
        for framing in [Framing::Structured, Framing::Extended] {
            assert_eq!(
                transmission_flags(&read_only, framing),
                always | tx::READ_ONLY | tx::SEND_DF
            );
        }
    }

    #[test]
    fn a_name_that_nobody_has_is_shown_without_acting_on_a_terminal() {
        let mut input = ParseBuffer::new();
        let name = b"\x1b[2Jnothing";
        let mut b = proto::OPT_MAGIC.to_be_bytes().to_vec();
        b.extend(opt::EXPORT_NAME.to_be_bytes());
        b.extend((name.len() as u32).to_be_bytes());
        b.extend(name);
        input.room()[..b.len()].copy_from_slice(&b);
        input.filled(b.len());
        let mut out = Vec::new();
        let next = Negotiation::default().option(&mut input, &exports(&[("disk", "")]), &mut out);
        let Next::Bad(why) = next else { panic!("{next:?}") };
        assert_eq!(why, "no export \"\\u{1b}[2Jnothing\"");
        assert!(out.is_empty());
    }
}
