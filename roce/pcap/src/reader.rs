//! Reading capture files frame by frame.

use std::{
    borrow::Cow,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    slice,
};

use pcap_file::{PcapError, TsResolution, pcap::PcapReader};
use thiserror::Error;

use crate::{
    input::{Input, Rewound, peek},
    interface::Interface,
    link::{self, Direction, LinkType},
    pcapng::{Contents, MAX_FRAME, PcapNg, Stop},
};

/// Reason why a capture cannot be read, or not further.
#[derive(Debug, Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Reading failed in the middle.
    #[error("read error after frame {after}: {source}")]
    Read {
        /// Frames read before.
        after: u64,
        /// Why.
        source: io::Error,
    },
    /// The file's first bytes are those of neither format.
    #[error("neither a pcap nor a pcapng file{0}")]
    NotACapture(&'static str),
    /// The file ends in the middle of a frame or a block.
    #[error("the file ends in the middle of what follows frame {after}")]
    CutOff {
        /// Frames read before.
        after: u64,
    },
    /// The file contradicts itself.
    #[error("the file is corrupt behind frame {after}: {reason}")]
    Corrupt {
        /// Frames read before.
        after: u64,
        /// The fault.
        reason: String,
    },
}

impl Error {
    fn new(stop: Stop, after: u64) -> Self {
        match stop {
            Stop::Cut => Self::CutOff { after },
            Stop::Io(source) => Self::Read { after, source },
            Stop::Corrupt(reason) => Self::Corrupt { after, reason },
        }
    }
}

impl From<PcapError> for Stop {
    fn from(e: PcapError) -> Self {
        match e {
            PcapError::IncompleteBuffer => Self::Cut,
            PcapError::IoError(e) => e.into(),
            other => Self::Corrupt(other.to_string()),
        }
    }
}

/// A frame of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame<'a> {
    /// From 1, as Wireshark counts.
    pub index: u64,
    /// Nanoseconds since 1970; 0 where the file does not say.
    pub time_ns: u64,
    /// First header of the bytes.
    pub link: LinkType,
    /// Bytes that the frame had; more than are here when the capture cut it (`tcpdump -s`).
    pub original_len: u32,
    /// The captured bytes.
    pub data: &'a [u8],
    /// Whether it was received or sent, if the file says so: by a flag of pcapng, or in the header of Linux cooked captures.
    pub direction: Option<Direction>,
    interface: u32,
    section: u64,
    interfaces: &'a [Interface],
    comments: &'a [String],
}

impl<'a> Frame<'a> {
    /// Creates a frame that is captured now: number from 1, time in nanoseconds since 1970, bytes that are captured of how many.
    pub const fn live(
        index: u64,
        time_ns: u64,
        interface: &'a Interface,
        data: &'a [u8],
        original_len: u32,
        direction: Option<Direction>,
    ) -> Self {
        Self {
            index,
            time_ns,
            link: interface.link,
            original_len,
            data,
            direction,
            interface: 0,
            section: 0,
            interfaces: slice::from_ref(interface),
            comments: &[],
        }
    }

    /// Returns it with other bytes and another time, and without comments.
    pub(crate) const fn replaced(&self, data: &'a [u8], time_ns: u64) -> Self {
        Self {
            data,
            time_ns,
            comments: &[],
            ..*self
        }
    }

    /// Index of its interface among those of its section.
    pub const fn interface_index(&self) -> u32 {
        self.interface
    }

    /// Sections of a pcapng file before its own: each describes its interfaces again.
    pub const fn section(&self) -> u64 {
        self.section
    }

    /// Interface that it was captured at.
    pub fn interface(&self) -> &'a Interface {
        &self.interfaces[self.interface as usize]
    }

    /// Interfaces of its section that the file describes before it.
    pub const fn interfaces(&self) -> &'a [Interface] {
        self.interfaces
    }

    /// Comments on it in a pcapng file: at most 256, with 128 KiB together.
    pub const fn comments(&self) -> &'a [String] {
        self.comments
    }

    /// Whether the capture cut the frame.
    pub fn is_cut(&self) -> bool {
        u64::from(self.original_len) > self.data.len() as u64
    }
}

enum Format<R: Read> {
    /// With its only interface.
    Pcap(PcapReader<Rewound<Input<R>>>, Interface),
    PcapNg(PcapNg<Rewound<Input<R>>>),
}

/// A capture being read: classic pcap of either byte order and resolution, or pcapng; as such or compressed with gzip or
/// zstd, which its first bytes show. Takes 10 MB of memory at most, whatever the file says: frames of more than 1 MiB
/// and sections of more than 4096 interfaces are errors. The window of a file of zstd is added, 8 MiB for most and at
/// most 128 MiB.
pub struct Capture<R: Read> {
    format: Format<R>,
    /// Frames returned so far.
    count: u64,
    /// Of the last frame.
    contents: Contents,
    /// An error ends the file: nothing behind it can be trusted.
    failed: bool,
}

impl Capture<File> {
    /// Opens a capture file.
    ///
    /// # Errors
    /// When it cannot be opened, or is not a capture.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })?;
        Self::new(file)
    }
}

impl<R: Read> Capture<R> {
    /// Reads a capture's header.
    ///
    /// # Errors
    /// When the bytes are not a capture.
    pub fn new(reader: R) -> Result<Self, Error> {
        let begin = || {
            let input = Input::new(reader)?;
            let is_compressed = input.is_compressed();
            let (magic, input) = peek(input)?;
            Ok((is_compressed, magic, input))
        };
        let (is_compressed, magic, input) = begin().map_err(|e: io::Error| Error::new(e.into(), 0))?;
        let format = match *magic {
            [0x0a, 0x0d, 0x0d, 0x0a] => PcapNg::new(input).map(Format::PcapNg),
            [0xa1, 0xb2, 0xc3, 0xd4]
            | [0xa1, 0xb2, 0x3c, 0x4d]
            | [0xd4, 0xc3, 0xb2, 0xa1]
            | [0x4d, 0x3c, 0xb2, 0xa1] => PcapReader::new(input).map(pcap).map_err(Stop::from),
            _ => return Err(Error::NotACapture(unknown(&magic, is_compressed))),
        };
        Ok(Self {
            format: format.map_err(|stop| Error::new(stop, 0))?,
            count: 0,
            contents: Contents::default(),
            failed: false,
        })
    }

    /// Returns the next frame, or `None` at the end of the file and behind an error.
    pub fn next_frame(&mut self) -> Option<Result<Frame<'_>, Error>> {
        if self.failed {
            return None;
        }
        let next = match &mut self.format {
            Format::Pcap(reader, interface) => next_pcap(reader, interface, &mut self.contents.data),
            Format::PcapNg(reader) => next_pcapng(reader, &mut self.contents),
        };
        match next {
            Ok(frame) => {
                let mut frame = frame?;
                self.count += 1;
                frame.index = self.count;
                Some(Ok(frame))
            }
            Err(stop) => {
                self.failed = true;
                Some(Err(Error::new(stop, self.count)))
            }
        }
    }

    /// Interfaces that have been described so far, of the section that is being read.
    pub fn interfaces(&self) -> &[Interface] {
        match &self.format {
            Format::Pcap(_, interface) => slice::from_ref(interface),
            Format::PcapNg(reader) => reader.interfaces(),
        }
    }

    /// Frames that the file states to have been dropped by the capture, as far as it has been read: programs write the
    /// number to the end of pcapng files. `None` where the file states none, as in classic pcap.
    pub fn dropped(&self) -> Option<u64> {
        match &self.format {
            Format::Pcap(..) => None,
            Format::PcapNg(reader) => reader.dropped(),
        }
    }
}

fn pcap<R: Read>(reader: PcapReader<Rewound<Input<R>>>) -> Format<R> {
    let header = reader.header();
    // The bits above are about the FCS.
    let number = (u32::from(header.datalink) & 0xffff) as u16;
    Format::Pcap(reader, Interface::new(number, header.snaplen))
}

/// More about a file that is no capture.
const fn unknown(magic: &[u8], is_compressed: bool) -> &'static str {
    match *magic {
        [] => ": it is empty",
        _ if is_compressed => ", decompressed",
        [0xfd, b'7', b'z', b'X'] => ": it is compressed with xz; decompress it first",
        [b'B', b'Z', b'h', _] => ": it is compressed with bzip2; decompress it first",
        [0x04, 0x22, 0x4d, 0x18] => ": it is compressed with lz4; decompress it first",
        _ => "",
    }
}

/// Returns the next frame, without its number. `spare` is for bytes that the reader doesn't share.
fn next_pcap<'a, R: Read>(
    reader: &'a mut PcapReader<R>,
    interface: &'a Interface,
    spare: &'a mut Vec<u8>,
) -> Result<Option<Frame<'a>>, Stop> {
    let header = reader.header();
    // The raw packet: the cooked one refuses frames that `tcpdump -s` has cut.
    let Some(packet) = reader.next_raw_packet() else {
        return Ok(None);
    };
    let packet = packet?;
    if packet.incl_len > packet.orig_len {
        return Err(PcapError::InvalidField("a frame with more bytes captured than it had").into());
    }
    if packet.incl_len > MAX_FRAME {
        return Err(PcapError::InvalidField("a frame of more than 1 MiB").into());
    }
    let nanos = match header.ts_resolution {
        TsResolution::MicroSecond => u64::from(packet.ts_frac) * 1000,
        TsResolution::NanoSecond => u64::from(packet.ts_frac),
    };
    if nanos >= 1_000_000_000 {
        return Err(PcapError::InvalidField("a time stamp with a fraction of more than a second").into());
    }
    let data = match packet.data {
        Cow::Borrowed(data) => data,
        Cow::Owned(data) => {
            *spare = data;
            spare
        }
    };
    let time_ns = u64::from(packet.ts_sec) * 1_000_000_000 + nanos;
    let direction = link::direction(interface.link, data);
    Ok(Some(Frame::live(
        0,
        time_ns,
        interface,
        data,
        packet.orig_len,
        direction,
    )))
}

/// Returns the next frame, without its number.
fn next_pcapng<'a, R: Read>(reader: &'a mut PcapNg<R>, contents: &'a mut Contents) -> Result<Option<Frame<'a>>, Stop> {
    let Some(meta) = reader.next(contents)? else {
        return Ok(None);
    };
    let interfaces = reader.interfaces();
    Ok(Some(Frame {
        index: 0,
        time_ns: meta.time_ns,
        link: interfaces[meta.interface as usize].link,
        original_len: meta.original_len,
        data: &contents.data,
        direction: meta.direction,
        interface: meta.interface,
        section: reader.section(),
        interfaces,
        comments: &contents.comments,
    }))
}
