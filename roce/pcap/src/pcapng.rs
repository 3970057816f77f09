//! The blocks of a pcapng file, one after the other, in memory that does not depend on the file: of an interface only what
//! frames need is kept, options and blocks of no use are read past.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};

use crate::link::LinkType;

/// Longest frame that is read, bytes: more than IP packets have, merged ones (BIG TCP) included.
pub(crate) const MAX_FRAME: u32 = 1 << 20;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
/// Obsolete.
const PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
const MAGIC: u32 = 0x1a2b_3c4d;

const OPT_END: u16 = 0;
const OPT_TSRESOL: u16 = 9;
const OPT_TSOFFSET: u16 = 14;

/// Interfaces of a section that are taken; each frame names one.
pub(crate) const MAX_INTERFACES: usize = 4096;
/// Type, length, and length again at the end.
const FRAMING: u32 = 12;

/// A frame without its bytes.
pub(crate) struct Meta {
    pub(crate) time_ns: u64,
    pub(crate) link: LinkType,
    pub(crate) original_len: u32,
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

/// Properties of an interface that a file describes.
#[derive(Clone, Copy)]
struct Interface {
    link: LinkType,
    snaplen: u32,
    /// The exponent of `if_tsresol`: negative power of 10, or of 2 with the top bit set.
    resolution: u8,
    offset_secs: u64,
}

impl Interface {
    fn time_ns(&self, ticks: u64) -> u64 {
        const NANOS: u128 = 1_000_000_000;
        let exponent = u32::from(self.resolution & 0x7f);
        let scaled = u128::from(ticks) * NANOS;
        let ns = if self.resolution & 0x80 != 0 {
            scaled.checked_shr(exponent).unwrap_or(0)
        } else {
            10u128.checked_pow(exponent).map_or(0, |unit| scaled / unit)
        };
        // The offset is signed on paper and stored in 64 bits: additions modulo 2^64 do for both.
        let offset = self.offset_secs.wrapping_mul(1_000_000_000);
        u64::try_from(ns).unwrap_or(u64::MAX).wrapping_add(offset)
    }
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
    interfaces: Vec<Interface>,
}

impl<R: Read> PcapNg<R> {
    /// Reads the header of the first section.
    pub(crate) fn new(input: R) -> Result<Self, Stop> {
        let mut this = Self {
            input: BufReader::with_capacity(64 << 10, input),
            big: true,
            interfaces: vec![],
        };
        this.block(&mut vec![])?;
        Ok(this)
    }

    /// The next frame, its bytes in `data`; `None` at the end of the file.
    pub(crate) fn next(&mut self, data: &mut Vec<u8>) -> Result<Option<Meta>, Stop> {
        while !at_end(&mut self.input)? {
            if let Some(meta) = self.block(data)? {
                return Ok(Some(meta));
            }
        }
        Ok(None)
    }

    /// Reads a block; what it says, if it is a frame.
    fn block(&mut self, data: &mut Vec<u8>) -> Result<Option<Meta>, Stop> {
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
            _ if section => start_section(&mut body, &mut self.interfaces)?,
            INTERFACE_DESCRIPTION => add_interface(&mut body, &mut self.interfaces)?,
            ENHANCED_PACKET => {
                let interface = find(&self.interfaces, body.u32()?)?;
                meta = Some(timed(&mut body, interface, data)?);
            }
            PACKET => {
                let interface = find(&self.interfaces, body.u16()?.into())?;
                // The number of dropped packets.
                body.skip(2)?;
                meta = Some(timed(&mut body, interface, data)?);
            }
            SIMPLE_PACKET => meta = Some(simple(&mut body, &self.interfaces, data)?),
            // Names, statistics, secrets, what others have added.
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

fn start_section<R: Read>(body: &mut Body<'_, R>, interfaces: &mut Vec<Interface>) -> Result<(), Stop> {
    interfaces.clear();
    match body.u16()? {
        1 => Ok(()),
        major => corrupt(format!("version {major} of the format is not known")),
    }
}

fn add_interface<R: Read>(body: &mut Body<'_, R>, interfaces: &mut Vec<Interface>) -> Result<(), Stop> {
    if interfaces.len() == MAX_INTERFACES {
        return corrupt(format!("more than {MAX_INTERFACES} interfaces"));
    }
    let link = LinkType::from_number(u32::from(body.u16()?));
    body.skip(2)?;
    let mut interface = Interface {
        link,
        snaplen: body.u32()?,
        resolution: 6,
        offset_secs: 0,
    };
    while body.left >= 4 {
        let (code, len) = (body.u16()?, body.u16()?);
        let mut rest = u32::from(len).next_multiple_of(4);
        match (code, len) {
            (OPT_END, _) => break,
            (OPT_TSRESOL, 1) => {
                [interface.resolution] = body.array()?;
                rest -= 1;
            }
            (OPT_TSOFFSET, 8) => {
                interface.offset_secs = body.u64()?;
                rest -= 8;
            }
            _ => {}
        }
        body.skip(rest)?;
    }
    interfaces.push(interface);
    Ok(())
}

fn find(interfaces: &[Interface], id: u32) -> Result<Interface, Stop> {
    let found = usize::try_from(id).ok().and_then(|id| interfaces.get(id)).copied();
    found.map_or_else(
        || corrupt(format!("a frame of interface {id}, which is not described")),
        Ok,
    )
}

/// Time stamp, lengths and the frame.
fn timed<R: Read>(body: &mut Body<'_, R>, interface: Interface, data: &mut Vec<u8>) -> Result<Meta, Stop> {
    // The high half comes first in either byte order.
    let (high, low) = (body.u32()?, body.u32()?);
    let (len, original_len) = (body.u32()?, body.u32()?);
    body.frame(len, data)?;
    Ok(Meta {
        time_ns: interface.time_ns(u64::from(high) << 32 | u64::from(low)),
        link: interface.link,
        original_len,
    })
}

fn simple<R: Read>(body: &mut Body<'_, R>, interfaces: &[Interface], data: &mut Vec<u8>) -> Result<Meta, Stop> {
    let interface = find(interfaces, 0)?;
    let original_len = body.u32()?;
    // The block ends with padding: what was captured follows from the two lengths.
    let snaplen = match interface.snaplen {
        0 => u32::MAX,
        n => n,
    };
    body.frame(original_len.min(snaplen).min(body.left), data)?;
    Ok(Meta {
        time_ns: 0,
        link: interface.link,
        original_len,
    })
}
