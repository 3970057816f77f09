//! Reading capture files frame by frame.

use std::{
    fs::File,
    io::{self, Chain, Cursor, ErrorKind, Read},
    path::{Path, PathBuf},
};

use pcap_file::{
    Endianness, PcapError, TsResolution,
    pcap::PcapReader,
    pcapng::{
        Block, PcapNgReader,
        blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption},
    },
};
use thiserror::Error;

use crate::frame::LinkType;

/// Why a capture cannot be read, or not further.
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
        /// What is wrong.
        reason: String,
    },
}

impl Error {
    fn from_pcap(error: PcapError, after: u64) -> Self {
        match error {
            PcapError::IncompleteBuffer => Self::CutOff { after },
            PcapError::IoError(e) if e.kind() == ErrorKind::UnexpectedEof => Self::CutOff { after },
            PcapError::IoError(source) => Self::Read { after, source },
            other => Self::Corrupt {
                after,
                reason: other.to_string(),
            },
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
    /// What the bytes start with.
    pub link: LinkType,
    /// Bytes that the frame had; more than are here when the capture cut it (`tcpdump -s`).
    pub original_len: u32,
    /// The captured bytes.
    pub data: &'a [u8],
}

impl Frame<'_> {
    /// Whether the capture cut the frame.
    pub fn is_cut(&self) -> bool {
        u64::from(self.original_len) > self.data.len() as u64
    }
}

type Rewound<R> = Chain<Cursor<Vec<u8>>, R>;

enum Format<R: Read> {
    Pcap(PcapReader<Rewound<R>>),
    PcapNg {
        reader: PcapNgReader<Rewound<R>>,
        interfaces: Vec<Interface>,
    },
}

/// What a pcapng file says of an interface.
#[derive(Clone, Copy)]
struct Interface {
    link: LinkType,
    snaplen: u32,
    /// The exponent of `if_tsresol`: negative power of 10, or of 2 with the top bit set.
    resolution: u8,
    offset_secs: u64,
}

impl Interface {
    fn new(block: &InterfaceDescriptionBlock<'_>) -> Self {
        let mut interface = Self {
            link: LinkType::from_number(u32::from(block.linktype)),
            snaplen: block.snaplen,
            resolution: 6,
            offset_secs: 0,
        };
        for option in &block.options {
            match option {
                InterfaceDescriptionOption::IfTsResol(exponent) => interface.resolution = *exponent,
                InterfaceDescriptionOption::IfTsOffset(secs) => interface.offset_secs = *secs,
                _ => {}
            }
        }
        interface
    }

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

/// A capture being read: classic pcap of either byte order and resolution, or pcapng.
pub struct Capture<R: Read> {
    format: Format<R>,
    /// Frames returned so far.
    count: u64,
    /// The last frame's bytes.
    data: Vec<u8>,
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
    pub fn new(mut reader: R) -> Result<Self, Error> {
        let mut magic = Vec::with_capacity(4);
        let read = reader.by_ref().take(4).read_to_end(&mut magic);
        read.map_err(|source| Error::Read { after: 0, source })?;
        let known = Self::format_of(&magic)?;
        let rewound = Cursor::new(magic).chain(reader);
        let fail = |e| Error::from_pcap(e, 0);
        let format = match known {
            Known::Pcap => Format::Pcap(PcapReader::new(rewound).map_err(fail)?),
            Known::PcapNg => Format::PcapNg {
                reader: PcapNgReader::new(rewound).map_err(fail)?,
                interfaces: vec![],
            },
        };
        Ok(Self {
            format,
            count: 0,
            data: vec![],
            failed: false,
        })
    }

    fn format_of(magic: &[u8]) -> Result<Known, Error> {
        match magic {
            [0x0a, 0x0d, 0x0d, 0x0a] => Ok(Known::PcapNg),
            [0xa1, 0xb2, 0xc3, 0xd4] | [0xa1, 0xb2, 0x3c, 0x4d] => Ok(Known::Pcap),
            [0xd4, 0xc3, 0xb2, 0xa1] | [0x4d, 0x3c, 0xb2, 0xa1] => Ok(Known::Pcap),
            [] => Err(Error::NotACapture(": it is empty")),
            [0x1f, 0x8b, ..] => Err(Error::NotACapture(": it is compressed, gunzip it first")),
            [0x28, 0xb5, 0x2f, 0xfd] => Err(Error::NotACapture(": it is compressed, unzstd it first")),
            _ => Err(Error::NotACapture("")),
        }
    }

    /// The next frame, or `None` at the end of the file and behind an error.
    pub fn next_frame(&mut self) -> Option<Result<Frame<'_>, Error>> {
        if self.failed {
            return None;
        }
        let next = match &mut self.format {
            Format::Pcap(reader) => next_pcap(reader, &mut self.data),
            Format::PcapNg { reader, interfaces } => next_pcapng(reader, interfaces, &mut self.data),
        };
        match next {
            Ok(None) => None,
            Ok(Some(Meta {
                time_ns,
                link,
                original_len,
            })) => {
                self.count += 1;
                Some(Ok(Frame {
                    index: self.count,
                    time_ns,
                    link,
                    original_len,
                    data: &self.data,
                }))
            }
            Err(e) => {
                self.failed = true;
                Some(Err(Error::from_pcap(e, self.count)))
            }
        }
    }
}

enum Known {
    Pcap,
    PcapNg,
}

/// A frame without its bytes.
struct Meta {
    time_ns: u64,
    link: LinkType,
    original_len: u32,
}

fn next_pcap<R: Read>(reader: &mut PcapReader<R>, data: &mut Vec<u8>) -> Result<Option<Meta>, PcapError> {
    let header = reader.header();
    // The raw packet: the cooked one refuses frames that `tcpdump -s` has cut.
    let Some(packet) = reader.next_raw_packet() else {
        return Ok(None);
    };
    let packet = packet?;
    if packet.incl_len > packet.orig_len {
        return Err(PcapError::InvalidField("a frame with more bytes captured than it had"));
    }
    let nanos = match header.ts_resolution {
        TsResolution::MicroSecond => u64::from(packet.ts_frac) * 1000,
        TsResolution::NanoSecond => u64::from(packet.ts_frac),
    };
    if nanos >= 1_000_000_000 {
        return Err(PcapError::InvalidField(
            "a time stamp with a fraction of more than a second",
        ));
    }
    data.clear();
    data.extend_from_slice(&packet.data);
    Ok(Some(Meta {
        time_ns: u64::from(packet.ts_sec) * 1_000_000_000 + nanos,
        link: LinkType::from_number(u32::from(header.datalink)),
        original_len: packet.orig_len,
    }))
}

fn next_pcapng<R: Read>(
    reader: &mut PcapNgReader<R>,
    interfaces: &mut Vec<Interface>,
    data: &mut Vec<u8>,
) -> Result<Option<Meta>, PcapError> {
    let mut endianness = reader.section().endianness;
    let interface = |interfaces: &[Interface], id: u32| {
        let found = usize::try_from(id).ok().and_then(|id| interfaces.get(id)).copied();
        found.ok_or(PcapError::InvalidInterfaceId(id))
    };
    while let Some(block) = reader.next_block() {
        let (interface, ticks, original_len, bytes) = match &block? {
            Block::SectionHeader(section) => {
                endianness = section.endianness;
                interfaces.clear();
                continue;
            }
            Block::InterfaceDescription(block) => {
                interfaces.push(Interface::new(block));
                continue;
            }
            Block::EnhancedPacket(packet) => {
                let interface = interface(interfaces, packet.interface_id)?;
                // pcap-file takes every tick for a nanosecond.
                let ticks = u64::try_from(packet.timestamp.as_nanos()).unwrap_or(u64::MAX);
                (
                    interface,
                    Some(ticks),
                    packet.original_len,
                    packet.data.clone().into_owned(),
                )
            }
            Block::SimplePacket(packet) => {
                let interface = interface(interfaces, 0)?;
                // Its bytes end with padding: what was captured follows from the two lengths.
                let snaplen = if interface.snaplen == 0 {
                    u32::MAX
                } else {
                    interface.snaplen
                };
                let len = packet.original_len.min(snaplen) as usize;
                let bytes = packet.data.get(..len).unwrap_or(&packet.data).to_vec();
                (interface, None, packet.original_len, bytes)
            }
            Block::Packet(packet) => {
                let interface = interface(interfaces, packet.interface_id.into())?;
                // The high half comes first in either byte order.
                let ticks = match endianness {
                    Endianness::Big => packet.timestamp,
                    Endianness::Little => packet.timestamp.rotate_left(32),
                };
                (
                    interface,
                    Some(ticks),
                    packet.original_len,
                    packet.data.clone().into_owned(),
                )
            }
            _ => continue,
        };
        *data = bytes;
        return Ok(Some(Meta {
            time_ns: ticks.map_or(0, |ticks| interface.time_ns(ticks)),
            link: interface.link,
            original_len,
        }));
    }
    Ok(None)
}
