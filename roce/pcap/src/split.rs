//! A file for each conversation.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs::{self, DirBuilder},
    io::{self, ErrorKind, Read, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use crate::{
    create::{append_private, create_private},
    judge::{Endpoint, Summary},
    pcapng_writer::PcapNgWriter,
    reader::Capture,
    survey::Survey,
};

/// Bytes that wait to be written, of all files together.
const MAX_BUFFERED: usize = 64 << 20;
/// Bytes of a file that wait to be written: at least, and at most.
const BUFFER: (usize, usize) = (1 << 10, 1 << 20);

/// File that [`split`] made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Path.
    pub path: PathBuf,
    /// Conversation; `None`: frames that belong to none.
    pub conversation: Option<usize>,
    /// Frames in it.
    pub frames: u64,
}

/// Writes the frames of each conversation of a surveyed capture to a file of its own in `dir`, and all others to
/// `other.pcapng`. The folder is made, or empty. No more than one file is open at a time.
///
/// # Errors
/// `AlreadyExists` for a folder with files in it; those of the file system.
pub fn split<R: Read>(survey: &Survey, capture: &mut Capture<R>, dir: &Path) -> io::Result<Vec<Part>> {
    make_empty(dir)?;
    let limit = (MAX_BUFFERED / (survey.report().conversations.len() + 1)).clamp(BUFFER.0, BUFFER.1);
    let mut files: BTreeMap<Option<usize>, (PcapNgWriter<Buffered>, Part)> = BTreeMap::new();
    survey.review(capture, |frame, reviewed| {
        // A connection without packets is not in the report.
        let summary = reviewed.conversation.and_then(|index| survey.conversation(index));
        let key = summary.map(|summary| summary.index);
        let (writer, part) = match files.entry(key) {
            Entry::Occupied(file) => file.into_mut(),
            Entry::Vacant(place) => {
                let path = dir.join(summary.map_or_else(|| "other.pcapng".to_owned(), name));
                let writer = PcapNgWriter::new(Buffered::create(&path, limit)?)?;
                let part = Part {
                    path,
                    conversation: key,
                    frames: 0,
                };
                place.insert((writer, part))
            }
        };
        part.frames += 1;
        writer.copy(frame, [])
    })?;
    // `None` is first, and belongs behind the conversations.
    let mut parts = Vec::with_capacity(files.len());
    for (writer, part) in files.into_values() {
        writer.finish()?;
        parts.push(part);
    }
    if parts.first().is_some_and(|part| part.conversation.is_none()) {
        parts.rotate_left(1);
    }
    Ok(parts)
}

/// Makes a folder, or finds it empty.
fn make_empty(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
        other => return other,
    }
    match fs::read_dir(dir)?.next() {
        None => Ok(()),
        Some(_) => Err(io::Error::new(
            ErrorKind::AlreadyExists,
            "the folder is not empty: name a new or an empty one",
        )),
    }
}

/// Name of a conversation's file: index, service and endpoints.
fn name(c: &Summary) -> String {
    let end = |end: &Endpoint| {
        // A colon is no part of a name on some systems.
        let addr = end.addr.to_string().replace(':', "_");
        let qpn = end.qpn.map_or_else(|| "unknown".to_owned(), |qpn| format!("{qpn:#x}"));
        format!("{addr}-{qpn}")
    };
    let service = c.service.to_lowercase();
    format!(
        "{:05}-{service}-{}-{}.pcapng",
        c.index,
        end(&c.ends[0]),
        end(&c.ends[1])
    )
}

/// File that is open only while its buffer is written.
struct Buffered {
    path: PathBuf,
    buffer: Vec<u8>,
    limit: usize,
}

impl Buffered {
    fn create(path: &Path, limit: usize) -> io::Result<Self> {
        create_private(path)?;
        Ok(Self {
            path: path.to_owned(),
            buffer: vec![],
            limit,
        })
    }
}

impl Write for Buffered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= self.limit {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.buffer.is_empty() {
            append_private(&self.path)?.write_all(&self.buffer)?;
            self.buffer.clear();
        }
        Ok(())
    }
}
