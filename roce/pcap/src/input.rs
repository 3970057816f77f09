//! Bytes of a capture file, decompressed.

use std::{
    io::{self, BufReader, Chain, Cursor, ErrorKind, Read},
    mem,
};

use flate2::read::MultiGzDecoder;
use zstd::stream::read::Decoder as ZstdDecoder;

/// Largest window of zstd that is read, as a power of two: 128 MiB, as the program `zstd` reads without options.
const WINDOW_LOG: u32 = 27;
/// Most bytes of one read. The reader of pcap files has a buffer of 8 MB, of which it then uses a part that stays in the
/// processor's cache.
const MAX_READ: usize = 256 << 10;

/// Bytes with the first ones put back.
pub(crate) type Rewound<R> = Chain<Cursor<Vec<u8>>, R>;

/// Reads the first four bytes (or all, of fewer), and returns them with a reader that begins with them.
pub(crate) fn peek<R: Read>(mut reader: R) -> io::Result<(Vec<u8>, Rewound<R>)> {
    let mut magic = Vec::with_capacity(4);
    reader.by_ref().take(4).read_to_end(&mut magic)?;
    let rewound = Cursor::new(magic.clone()).chain(reader);
    Ok((magic, rewound))
}

/// A file's bytes, which are decompressed if their first ones say that they are compressed.
pub(crate) enum Input<R: Read> {
    Plain(Rewound<R>),
    Gzip(Box<MultiGzDecoder<Source<Rewound<R>>>>),
    Zstd(ZstdDecoder<'static, BufReader<Source<Rewound<R>>>>),
}

impl<R: Read> Input<R> {
    pub(crate) fn new(reader: R) -> io::Result<Self> {
        let (magic, rewound) = peek(reader)?;
        Ok(match *magic {
            [0x1f, 0x8b, ..] => Self::Gzip(Box::new(MultiGzDecoder::new(Source::new(rewound)))),
            // A frame, or a skippable one, with which parallel compressors begin.
            [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => {
                let mut decoder = ZstdDecoder::new(Source::new(rewound))?;
                decoder.window_log_max(WINDOW_LOG)?;
                Self::Zstd(decoder)
            }
            _ => Self::Plain(rewound),
        })
    }

    pub(crate) const fn is_compressed(&self) -> bool {
        !matches!(self, Self::Plain(_))
    }
}

impl<R: Read> Read for Input<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let (read, source) = match self {
            Self::Plain(reader) => {
                let len = out.len().min(MAX_READ);
                return reader.read(&mut out[..len]);
            }
            Self::Gzip(decoder) => (decoder.read(out), decoder.get_mut()),
            Self::Zstd(decoder) => (decoder.read(out), decoder.get_mut().get_mut()),
        };
        read.map_err(|e| source.explain(e))
    }
}

/// Compressed bytes; remembers whether reading them failed, which is not the decoder's fault.
pub(crate) struct Source<R> {
    reader: R,
    failed: bool,
}

impl<R> Source<R> {
    const fn new(reader: R) -> Self {
        Self { reader, failed: false }
    }

    /// A decoder's error: `InvalidData` for its own, `UnexpectedEof` at the end of the file.
    fn explain(&mut self, e: io::Error) -> io::Error {
        let failed = mem::take(&mut self.failed);
        if failed || e.kind() == ErrorKind::UnexpectedEof {
            return e;
        }
        let text = e.to_string();
        let limit = match text.contains("too much memory") {
            true => format!("; windows of up to {} MiB are read", 1u32 << (WINDOW_LOG - 20)),
            false => String::new(),
        };
        io::Error::new(ErrorKind::InvalidData, format!("compressed data: {text}{limit}"))
    }
}

impl<R: Read> Read for Source<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(out);
        self.failed = read.is_err();
        read
    }
}
