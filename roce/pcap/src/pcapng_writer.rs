//! Writing pcapng files: frames of any link type, with comments, also as copies of those of another capture.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
};

use crate::{create::create_private, interface::Interface, link::Direction, pcapng::MAX_FRAME, reader::Frame};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const INTERFACE_STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;
const MAGIC: u32 = 0x1a2b_3c4d;
/// Version 1.0 of the format: major number in the low half.
const VERSION: u32 = 1;

const OPT_END: u16 = 0;
const OPT_COMMENT: u16 = 1;
/// Program that wrote a section.
const OPT_USERAPPL: u16 = 4;
/// Of an interface: name, and resolution of time stamps.
const OPT_NAME: u16 = 2;
const OPT_TSRESOL: u16 = 9;
const NANOSECONDS: u8 = 9;
/// Of a packet: direction among others.
const OPT_FLAGS: u16 = 2;
const OPT_IFDROP: u16 = 5;

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text.into())
}

/// A frame to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record<'a> {
    /// Number that [`PcapNgWriter::interface`] returned.
    pub interface: u32,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// Bytes that the frame had, if the capture cut it.
    pub original_len: u32,
    /// The captured bytes.
    pub data: &'a [u8],
    /// Whether it was received or sent, if that is known.
    pub direction: Option<Direction>,
}

/// Interfaces of a section of the capture that is being copied.
struct Copied {
    section: u64,
    /// Their numbers here.
    numbers: Vec<u32>,
}

/// Writes a pcapng file, little-endian on every machine, with time stamps in nanoseconds. Each block is one write.
pub struct PcapNgWriter<W: Write> {
    writer: W,
    block: Vec<u8>,
    /// Interfaces of the section so far.
    interfaces: u32,
    copied: Option<Copied>,
    /// Interfaces of copied frames lose their names.
    nameless: bool,
}

impl PcapNgWriter<BufWriter<File>> {
    /// Makes a file that only its owner may read. Call [`PcapNgWriter::flush`] at the end to learn of errors.
    ///
    /// # Errors
    /// As [`create_private`].
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::new(BufWriter::new(create_private(path)?))
    }
}

impl<W: Write> PcapNgWriter<W> {
    /// Writes the header of the first section.
    ///
    /// # Errors
    /// The underlying writer's.
    pub fn new(writer: W) -> io::Result<Self> {
        let mut this = Self {
            writer,
            block: vec![],
            interfaces: 0,
            copied: None,
            nameless: false,
        };
        this.section()?;
        Ok(this)
    }

    /// Begins a section: interfaces that were described before are not part of it. Call it between copies of two captures.
    ///
    /// # Errors
    /// The underlying writer's.
    pub fn section(&mut self) -> io::Result<()> {
        self.interfaces = 0;
        self.copied = None;
        // The length of the section is not known.
        self.begin(SECTION_HEADER, &[MAGIC, VERSION, u32::MAX, u32::MAX]);
        self.option(OPT_USERAPPL, b"ferroce")?;
        self.end()
    }

    /// Describes an interface, and returns its number. `link` is one of <https://www.tcpdump.org/linktypes.html>, and
    /// `snaplen` 0 without a limit.
    ///
    /// # Errors
    /// `InvalidInput` for a name of more than 65,535 bytes; else the underlying writer's.
    pub fn interface(&mut self, link: u16, snaplen: u32, name: Option<&str>) -> io::Result<u32> {
        self.begin(INTERFACE_DESCRIPTION, &[link.into(), snaplen]);
        if let Some(name) = name {
            self.option(OPT_NAME, name.as_bytes())?;
        }
        self.option(OPT_TSRESOL, &[NANOSECONDS])?;
        self.end()?;
        self.interfaces += 1;
        Ok(self.interfaces - 1)
    }

    /// Writes a frame with any number of comments on it.
    ///
    /// # Errors
    /// `InvalidInput` for an interface that is not described, a frame of more than 1 MiB, or a comment of more than 65,535
    /// bytes; else the underlying writer's.
    pub fn write<'c>(&mut self, record: &Record<'_>, comments: impl IntoIterator<Item = &'c str>) -> io::Result<()> {
        if record.interface >= self.interfaces {
            let text = format!(
                "a frame of interface {}, {} are described",
                record.interface, self.interfaces
            );
            return Err(invalid(text));
        }
        let len = u32::try_from(record.data.len()).ok().filter(|&len| len <= MAX_FRAME);
        let len = len.ok_or_else(|| invalid(format!("a frame of {} bytes", record.data.len())))?;
        let (high, low) = ((record.time_ns >> 32) as u32, record.time_ns as u32);
        self.begin(
            ENHANCED_PACKET,
            &[record.interface, high, low, len, record.original_len],
        );
        self.padded(record.data);
        for comment in comments {
            self.option(OPT_COMMENT, comment.as_bytes())?;
        }
        if let Some(direction) = record.direction {
            let flags: u32 = match direction {
                Direction::Inbound => 1,
                Direction::Outbound => 2,
            };
            self.option(OPT_FLAGS, &flags.to_le_bytes())?;
        }
        self.end()
    }

    /// Writes a frame of another capture with its time, lengths, interface, direction and comments, and more comments behind
    /// those. Interfaces are described, and sections begun, as in that capture.
    ///
    /// # Errors
    /// As [`PcapNgWriter::write`].
    pub fn copy<'c>(&mut self, frame: &Frame<'c>, more: impl IntoIterator<Item = &'c str>) -> io::Result<()> {
        let interface = self.copied_interface(frame)?;
        let record = Record {
            interface,
            time_ns: frame.time_ns,
            original_len: frame.original_len,
            data: frame.data,
            direction: frame.direction,
        };
        let comments = frame.comments().iter().map(String::as_str);
        self.write(&record, comments.chain(more))
    }

    /// Leaves out the names of the interfaces of frames that are copied.
    pub const fn omit_names(&mut self) {
        self.nameless = true;
    }

    /// Writes how many frames an interface dropped from its beginning to `time_ns`.
    ///
    /// # Errors
    /// `InvalidInput` for an interface that is not described; else the underlying writer's.
    pub fn dropped(&mut self, interface: u32, time_ns: u64, frames: u64) -> io::Result<()> {
        if interface >= self.interfaces {
            let text = format!("statistics of interface {interface}, {} are described", self.interfaces);
            return Err(invalid(text));
        }
        self.begin(
            INTERFACE_STATISTICS,
            &[interface, (time_ns >> 32) as u32, time_ns as u32],
        );
        self.option(OPT_IFDROP, &frames.to_le_bytes())?;
        self.end()
    }

    /// Writes how many frames the interfaces dropped that copied frames are of, as their capture states it so far.
    ///
    /// # Errors
    /// The underlying writer's.
    pub fn copy_drops(&mut self, interfaces: &[Interface], time_ns: u64) -> io::Result<()> {
        let numbers = self
            .copied
            .as_ref()
            .map_or_else(Vec::new, |copied| copied.numbers.clone());
        for (number, interface) in numbers.into_iter().zip(interfaces) {
            if let Some(frames) = interface.dropped() {
                self.dropped(number, time_ns, frames)?;
            }
        }
        Ok(())
    }

    /// Flushes the underlying writer.
    ///
    /// # Errors
    /// The underlying writer's.
    pub fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Flushes and returns the underlying writer.
    ///
    /// # Errors
    /// The underlying writer's.
    pub fn finish(mut self) -> io::Result<W> {
        self.writer.flush()?;
        Ok(self.writer)
    }

    /// The number here of the interface of another capture's frame.
    fn copied_interface(&mut self, frame: &Frame<'_>) -> io::Result<u32> {
        let section = frame.section();
        if self.copied.as_ref().is_some_and(|copied| copied.section != section) {
            self.section()?;
        }
        let mut numbers = self.copied.take().map_or_else(Vec::new, |copied| copied.numbers);
        for interface in frame.interfaces().iter().skip(numbers.len()) {
            numbers.push(self.describe(interface)?);
        }
        let number = numbers[frame.interface_index() as usize];
        self.copied = Some(Copied { section, numbers });
        Ok(number)
    }

    fn describe(&mut self, interface: &Interface) -> io::Result<u32> {
        let name = interface.name().filter(|_| !self.nameless);
        self.interface(interface.link_number(), interface.snaplen(), name)
    }

    /// Begins a block with these fields.
    fn begin(&mut self, kind: u32, fields: &[u32]) {
        self.block.clear();
        // The length comes at the end.
        for field in [kind, 0].iter().chain(fields) {
            self.block.extend(field.to_le_bytes());
        }
    }

    fn padded(&mut self, bytes: &[u8]) {
        self.block.extend_from_slice(bytes);
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }

    fn option(&mut self, code: u16, value: &[u8]) -> io::Result<()> {
        let len = u16::try_from(value.len());
        let len = len.map_err(|_| invalid(format!("a text of {} bytes, an option has 65535 at most", value.len())))?;
        self.block.extend(code.to_le_bytes());
        self.block.extend(len.to_le_bytes());
        self.padded(value);
        Ok(())
    }

    /// Ends the options and the block, and writes it.
    fn end(&mut self) -> io::Result<()> {
        self.option(OPT_END, &[])?;
        let len = u32::try_from(self.block.len() + 4).map_err(|_| invalid("comments of 4 GiB"))?;
        self.block.extend(len.to_le_bytes());
        self.block[4..8].copy_from_slice(&len.to_le_bytes());
        self.writer.write_all(&self.block)
    }
}
