//! The blocks of a pcapng file, one after the other, in memory that does not depend on the file: of interfaces and frames
//! only the options that are used are kept, up to limits, and blocks of no use are read past.

use std::{
    io::{self, BufRead, BufReader, ErrorKind, Read},
    mem,
};

use crate::{
    interface::{self, Interface, MAX_NAME},
    link::{self, Direction},
};

/// Longest frame that is read, bytes: more than IP packets have, merged ones (BIG TCP) included.
pub(crate) const MAX_FRAME: u32 = 1 << 20;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
/// Obsolete.
const PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const INTERFACE_STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;
const MAGIC: u32 = 0x1a2b_3c4d;

const OPT_END: u16 = 0;
const OPT_COMMENT: u16 = 1;
/// Of an interface.
const OPT_NAME: u16 = 2;
const OPT_TSRESOL: u16 = 9;
const OPT_TSOFFSET: u16 = 14;
/// Of a packet.
const OPT_FLAGS: u16 = 2;
const OPT_DROPCOUNT: u16 = 4;
/// Of statistics: dropped by the interface, and by the operating system.
const OPT_IFDROP: u16 = 5;
const OPT_OSDROP: u16 = 7;

/// Comments of a frame that are kept, and their bytes together.
const MAX_COMMENTS: usize = 256;
const MAX_COMMENT_BYTES: usize = 128 << 10;

/// Interfaces of a section that are taken; each frame names one.
pub(crate) const MAX_INTERFACES: usize = 4096;
/// Type, length, and length again at the end.
const FRAMING: u32 = 12;

/// A frame without its bytes.
pub(crate) struct Meta {
    pub(crate) time_ns: u64,
    pub(crate) original_len: u32,
    /// Index of the section's interface.
    pub(crate) interface: u32,
    pub(crate) direction: Option<Direction>,
}

/// Bytes and comments of a frame, whose memory is used again.
#[derive(Default)]
pub(crate) struct Contents {
    pub(crate) data: Vec<u8>,
    pub(crate) comments: Vec<String>,
}

impl Contents {
    fn add_comment(&mut self, text: &[u8]) {
        if self.comments.len() == MAX_COMMENTS {
            return;
        }
        let kept: usize = self.comments.iter().map(String::len).sum();
        if kept + text.len() <= MAX_COMMENT_BYTES {
            self.comments
                .push(as_option(String::from_utf8_lossy(text).into_owned()));
        }
    }
}

/// Cuts a text to the length of an option: characters that stand for broken ones take more bytes than those.
fn as_option(mut text: String) -> String {
    let most = usize::from(u16::MAX);
    if text.len() > most {
        let end = (0..=most).rev().find(|&n| text.is_char_boundary(n));
        text.truncate(end.unwrap_or(0));
    }
    text
}

/// Reason why a file can't be read further.
pub(crate) enum Stop {
    Cut,
    Io(io::Error),
    Corrupt(String),
}

impl From<io::Error> for Stop {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            ErrorKind::UnexpectedEof => Self::Cut,
            // A decompressor's.
            ErrorKind::InvalidData => Self::Corrupt(e.to_string()),
            _ => Self::Io(e),
        }
    }
}

fn corrupt<T>(text: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Corrupt(text.into()))
}

/// The rest of a block's body.
struct Body<'a, R> {
    input: &'a mut BufReader<R>,
    big: bool,
    left: u32,
}

impl<R: Read> Body<'_, R> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), Stop> {
        self.take(u32::try_from(out.len()).unwrap_or(u32::MAX))?;
        Ok(self.input.read_exact(out)?)
    }

    fn u16(&mut self) -> Result<u16, Stop> {
        let bytes = self.array()?;
        Ok(match self.big {
            true => u16::from_be_bytes(bytes),
            false => u16::from_le_bytes(bytes),
        })
    }

    fn u32(&mut self) -> Result<u32, Stop> {
        let bytes = self.array()?;
        Ok(number(bytes, self.big))
    }

    fn u64(&mut self) -> Result<u64, Stop> {
        let bytes = self.array()?;
        Ok(match self.big {
            true => u64::from_be_bytes(bytes),
            false => u64::from_le_bytes(bytes),
        })
    }

    fn take(&mut self, n: u32) -> Result<(), Stop> {
        match self.left.checked_sub(n) {
            Some(left) => self.left = left,
            None => return corrupt("a block is too short for what it should have"),
        }
        Ok(())
    }

    /// Reads past `n` bytes.
    fn skip(&mut self, n: u32) -> Result<(), Stop> {
        self.take(n)?;
        match io::copy(&mut self.input.take(n.into()), &mut io::sink())? {
            read if read == u64::from(n) => Ok(()),
            _ => Err(Stop::Cut),
        }
    }

    /// The code and the length of the next option; `None` behind the last one, and for one longer than the block.
    fn option(&mut self) -> Result<Option<(u16, u16)>, Stop> {
        if self.left < 4 {
            return Ok(None);
        }
        let (code, len) = (self.u16()?, self.u16()?);
        Ok((code != OPT_END && u32::from(len) <= self.left).then_some((code, len)))
    }

    /// Reads past the padding behind `len` bytes.
    fn pad(&mut self, len: u32) -> Result<(), Stop> {
        let padding = len.next_multiple_of(4) - len;
        self.skip(padding.min(self.left))
    }

    /// The bytes of a frame.
    fn frame(&mut self, len: u32, data: &mut Vec<u8>) -> Result<(), Stop> {
        if len > MAX_FRAME {
            return corrupt(format!("a frame of {len} bytes; {MAX_FRAME} are read at most"));
        }
        if len > self.left {
            return corrupt(format!("a frame of {len} bytes in a block that has {} left", self.left));
        }
        data.clear();
        data.resize(len as usize, 0);
        self.fill(data)
    }
}

fn number(bytes: [u8; 4], big: bool) -> u32 {
    match big {
        true => u32::from_be_bytes(bytes),
        false => u32::from_le_bytes(bytes),
    }
}

/// Returns whether nothing follows.
fn at_end(input: &mut impl BufRead) -> io::Result<bool> {
    loop {
        match input.fill_buf() {
            Ok(bytes) => return Ok(bytes.is_empty()),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// A file being read.
pub(crate) struct PcapNg<R> {
    input: BufReader<R>,
    big: bool,
    /// Sections before this one.
    section: u64,
    interfaces: Vec<Interface>,
    /// Dropped frames of the sections before.
    past_drops: Option<u64>,
}

impl<R: Read> PcapNg<R> {
    /// Reads the header of the first section.
    pub(crate) fn new(input: R) -> Result<Self, Stop> {
        let mut this = Self {
            input: BufReader::with_capacity(64 << 10, input),
            big: true,
            section: 0,
            interfaces: vec![],
            past_drops: None,
        };
        this.block(&mut Contents::default())?;
        this.section = 0;
        Ok(this)
    }

    /// The next frame, its bytes in `contents`; `None` at the end of the file.
    pub(crate) fn next(&mut self, contents: &mut Contents) -> Result<Option<Meta>, Stop> {
        while !at_end(&mut self.input)? {
            if let Some(meta) = self.block(contents)? {
                return Ok(Some(meta));
            }
        }
        Ok(None)
    }

    /// Interfaces of the section that have been described so far.
    pub(crate) fn interfaces(&self) -> &[Interface] {
        &self.interfaces
    }

    /// Sections before that of the last frame.
    pub(crate) const fn section(&self) -> u64 {
        self.section
    }

    /// Frames that the file states to have been dropped, as far as it has been read.
    pub(crate) fn dropped(&self) -> Option<u64> {
        let present = self.interfaces.iter().map(Interface::dropped);
        present.fold(self.past_drops, interface::sum)
    }

    /// Reads a block; what it says, if it is a frame.
    fn block(&mut self, contents: &mut Contents) -> Result<Option<Meta>, Stop> {
        let (mut kind, mut len) = ([0; 4], [0; 4]);
        self.input.read_exact(&mut kind)?;
        self.input.read_exact(&mut len)?;
        // Its type is the same in either byte order, which it then tells.
        let section = number(kind, true) == SECTION_HEADER;
        let mut framing = FRAMING;
        if section {
            let mut magic = [0; 4];
            self.input.read_exact(&mut magic)?;
            self.big = match (number(magic, true), number(magic, false)) {
                (MAGIC, _) => true,
                (_, MAGIC) => false,
                _ => return corrupt("a section without its byte order"),
            };
            framing += 4;
        }
        let (kind, len) = (number(kind, self.big), number(len, self.big));
        if len < framing || !len.is_multiple_of(4) {
            return corrupt(format!("a block of {len} bytes"));
        }
        let mut body = Body {
            input: &mut self.input,
            big: self.big,
            left: len - framing,
        };
        let mut meta = None;
        match kind {
            _ if section => {
                start_section(&mut body)?;
                let ended = mem::take(&mut self.interfaces);
                self.past_drops = ended
                    .iter()
                    .map(Interface::dropped)
                    .fold(self.past_drops, interface::sum);
                self.section += 1;
            }
            INTERFACE_DESCRIPTION => add_interface(&mut body, &mut self.interfaces)?,
            INTERFACE_STATISTICS => statistics(&mut body, &mut self.interfaces)?,
            ENHANCED_PACKET => {
                let index = body.u32()?;
                meta = Some(timed(&mut body, &mut self.interfaces, index, contents)?);
            }
            PACKET => {
                let index = body.u16()?.into();
                let drops = body.u16()?;
                // All ones: not known.
                if let Some(interface) = self.interfaces.get_mut(index as usize).filter(|_| drops != u16::MAX) {
                    interface.counted_drops = interface::sum(interface.counted_drops, Some(drops.into()));
                }
                meta = Some(timed(&mut body, &mut self.interfaces, index, contents)?);
            }
            SIMPLE_PACKET => meta = Some(simple(&mut body, &self.interfaces, contents)?),
            // Names, secrets, what others have added.
            _ => {}
        }
        let left = body.left;
        body.skip(left)?;
        let mut again = [0; 4];
        self.input.read_exact(&mut again)?;
        match number(again, self.big) {
            n if n == len => Ok(meta),
            n => corrupt(format!("a block has {len} bytes at its beginning and {n} at its end")),
        }
    }
}

fn start_section<R: Read>(body: &mut Body<'_, R>) -> Result<(), Stop> {
    match body.u16()? {
        1 => Ok(()),
        major => corrupt(format!("version {major} of the format is not known")),
    }
}

fn add_interface<R: Read>(body: &mut Body<'_, R>, interfaces: &mut Vec<Interface>) -> Result<(), Stop> {
    if interfaces.len() == MAX_INTERFACES {
        return corrupt(format!("more than {MAX_INTERFACES} interfaces"));
    }
    let number = body.u16()?;
    body.skip(2)?;
    let mut interface = Interface::new(number, body.u32()?);
    while let Some((code, len)) = body.option()? {
        let before = body.left;
        match (code, usize::from(len)) {
            (OPT_NAME, 1..=MAX_NAME) => {
                let mut name = vec![0; usize::from(len)];
                body.fill(&mut name)?;
                interface.name = Some(String::from_utf8_lossy(&name).into_owned());
            }
            (OPT_TSRESOL, 1) => [interface.resolution] = body.array()?,
            (OPT_TSOFFSET, 8) => interface.offset_secs = body.u64()?,
            _ => {}
        }
        body.skip(u32::from(len) - (before - body.left))?;
        body.pad(len.into())?;
    }
    interfaces.push(interface);
    Ok(())
}

/// Reads numbers of dropped frames, which count from the beginning of the capture.
fn statistics<R: Read>(body: &mut Body<'_, R>, interfaces: &mut [Interface]) -> Result<(), Stop> {
    let index = body.u32()?;
    // The time.
    body.skip(8)?;
    let mut drops = None;
    while let Some((code, len)) = body.option()? {
        match (code, len) {
            (OPT_IFDROP | OPT_OSDROP, 8) => drops = interface::sum(drops, Some(body.u64()?)),
            _ => body.skip(len.into())?,
        }
        body.pad(len.into())?;
    }
    // Statistics of an interface that is not described say nothing of frames.
    if let (Some(interface), Some(_)) = (interfaces.get_mut(index as usize), drops) {
        interface.stated_drops = drops;
    }
    Ok(())
}

fn unknown_interface<T>(index: u32) -> Result<T, Stop> {
    corrupt(format!("a frame of interface {index}, which is not described"))
}

/// Time stamp, lengths, the frame and its options.
fn timed<R: Read>(
    body: &mut Body<'_, R>,
    interfaces: &mut [Interface],
    index: u32,
    contents: &mut Contents,
) -> Result<Meta, Stop> {
    let Some(interface) = interfaces.get_mut(index as usize) else {
        return unknown_interface(index);
    };
    // The high half comes first in either byte order.
    let (high, low) = (body.u32()?, body.u32()?);
    let (len, original_len) = (body.u32()?, body.u32()?);
    body.frame(len, &mut contents.data)?;
    body.pad(len)?;
    let mut meta = Meta {
        time_ns: interface.time_ns(u64::from(high) << 32 | u64::from(low)),
        original_len,
        interface: index,
        direction: link::direction(interface.link, &contents.data),
    };
    contents.comments.clear();
    while let Some((code, len)) = body.option()? {
        match (code, len) {
            (OPT_COMMENT, _) => {
                let mut text = vec![0; len.into()];
                body.fill(&mut text)?;
                contents.add_comment(&text);
            }
            (OPT_FLAGS, 4) => match body.u32()? & 3 {
                1 => meta.direction = Some(Direction::Inbound),
                2 => meta.direction = Some(Direction::Outbound),
                _ => {}
            },
            (OPT_DROPCOUNT, 8) => interface.counted_drops = interface::sum(interface.counted_drops, Some(body.u64()?)),
            _ => body.skip(len.into())?,
        }
        body.pad(len.into())?;
    }
    Ok(meta)
}

fn simple<R: Read>(body: &mut Body<'_, R>, interfaces: &[Interface], contents: &mut Contents) -> Result<Meta, Stop> {
    let Some(interface) = interfaces.first() else {
        return unknown_interface(0);
    };
    let original_len = body.u32()?;
    // The block ends with padding: what was captured follows from the two lengths.
    let snaplen = match interface.snaplen {
        0 => u32::MAX,
        n => n,
    };
    body.frame(original_len.min(snaplen).min(body.left), &mut contents.data)?;
    contents.comments.clear();
    Ok(Meta {
        time_ns: 0,
        original_len,
        interface: 0,
        direction: link::direction(interface.link, &contents.data),
    })
}
