//! Portals for tests: memory that peers write, and data that they read.

use std::{fs, path::PathBuf};

use lnet_host::{Attached, Buffer, Entry, EntryId, EntryOptions, LnetNode};

use crate::{event::Event, output::Failure, units};

/// Bytes of a portal whose option does not say.
const USUAL: usize = 1 << 20;
/// Portals of lnet_selftest.
const SELFTEST: core::ops::RangeInclusive<u32> = 50..=52;

/// Memory that peers write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sink {
    portal: u32,
    len: usize,
}

/// Data that peers read.
#[derive(Clone, Debug)]
pub(super) struct Source {
    portal: u32,
    data: Data,
}

#[derive(Clone, Debug)]
enum Data {
    Zeros(usize),
    File(PathBuf),
}

fn split(text: &str) -> Result<(u32, Option<&str>), String> {
    let (portal, rest) = match text.split_once(':') {
        Some((portal, rest)) => (portal, Some(rest)),
        None => (text, None),
    };
    match portal.parse() {
        // Portal 0 is that of pings.
        Ok(portal @ 1..) => Ok((portal, rest)),
        _ => Err(format!("{portal:?} is not a portal: a number from 1 on")),
    }
}

/// Bytes of memory, at least one.
fn len(text: &str) -> Result<usize, String> {
    match units::memory(text)? {
        0 => Err("0 bytes".into()),
        len => Ok(len),
    }
}

/// Reads `PORTAL[:SIZE]`.
pub(super) fn sink(text: &str) -> Result<Sink, String> {
    let (portal, rest) = split(text)?;
    let len = rest.map_or(Ok(USUAL), len)?;
    Ok(Sink { portal, len })
}

/// Reads `PORTAL[:FILE|:SIZE]`. A file whose name is a number is `./NAME`.
pub(super) fn source(text: &str) -> Result<Source, String> {
    let (portal, rest) = split(text)?;
    let data = match rest {
        None => Data::Zeros(USUAL),
        Some(rest) => len(rest).map_or_else(|_| Data::File(rest.into()), Data::Zeros),
    };
    Ok(Source { portal, data })
}

/// Returns the portal and the file of a source's text, if it names a file.
pub(crate) fn source_file(text: &str) -> Option<(u32, &str)> {
    match source(text) {
        Ok(Source {
            portal,
            data: Data::File(_),
        }) => Some((portal, split(text).ok()?.1?)),
        _ => None,
    }
}

impl Source {
    /// Checks that its file is there.
    fn check(&self) -> Result<(), Failure> {
        match &self.data {
            Data::Zeros(_) => Ok(()),
            Data::File(path) => fs::metadata(path)
                .map(drop)
                .map_err(|e| Failure::failed(format!("{}: {e}", path.display()))),
        }
    }

    fn memory(&self) -> Result<Buffer, Failure> {
        match &self.data {
            Data::Zeros(len) => allocate(*len),
            Data::File(path) => {
                let name = path.display();
                let bytes = fs::read(path).map_err(|e| Failure::failed(format!("{name}: {e}")))?;
                if bytes.is_empty() {
                    return Err(Failure::usage(format!("{name} is empty")));
                }
                let memory = allocate(bytes.len())?;
                memory.write(&bytes);
                Ok(memory)
            }
        }
    }
}

fn allocate(len: usize) -> Result<Buffer, Failure> {
    Buffer::allocate(len).ok_or_else(|| Failure::failed(format!("no memory for {len} bytes")))
}

/// Portals of a node.
pub(super) struct Portals(Vec<(u32, &'static str, Attached)>);

impl Portals {
    /// Checks that they are different ones, and none of lnet_selftest.
    pub(super) fn check((sinks, sources): (&[Sink], &[Source]), has_selftest: bool) -> Result<(), Failure> {
        let portals = sinks.iter().map(|sink| sink.portal);
        let all: Vec<u32> = portals.chain(sources.iter().map(|source| source.portal)).collect();
        if let Some(portal) = units::twice(&all) {
            return Err(Failure::usage(format!("portal {portal} is there twice")));
        }
        if let Some(portal) = all.iter().find(|portal| has_selftest && SELFTEST.contains(portal)) {
            let text = format!("portal {portal} is one of lnet_selftest, which --no-selftest turns off");
            return Err(Failure::usage(text));
        }
        sources.iter().try_for_each(Source::check)
    }

    /// Attaches them, for all match bits.
    pub(super) fn attach(
        node: &LnetNode,
        (sinks, sources): (&[Sink], &[Source]),
        has_selftest: bool,
    ) -> Result<Self, Failure> {
        Self::check((sinks, sources), has_selftest)?;
        let attach = |portal, right, memory| {
            let entry = Entry {
                portal,
                from: None,
                match_bits: 0,
                ignore_bits: u64::MAX,
                options: right | EntryOptions::MANAGE_REMOTE | EntryOptions::TRUNCATE,
                memory,
                uses: None,
            };
            node.attach(entry).map_err(Failure::of)
        };
        let mut attached = Vec::new();
        for sink in sinks {
            let entry = attach(sink.portal, EntryOptions::PUT, allocate(sink.len)?)?;
            attached.push((sink.portal, "sink", entry));
        }
        for source in sources {
            let entry = attach(source.portal, EntryOptions::GET, source.memory()?)?;
            attached.push((source.portal, "source", entry));
        }
        Ok(Self(attached))
    }

    /// Portal of an entry.
    pub(super) fn portal_of(&self, entry: EntryId) -> Option<u32> {
        let found = self.0.iter().find(|(_, _, attached)| attached.id() == entry);
        found.map(|(portal, ..)| *portal)
    }

    /// Returns the counts of each, as events.
    pub(super) fn counts(&self) -> Result<Vec<Event>, Failure> {
        let counts = |(portal, kind, attached): &(u32, &'static str, Attached)| {
            let counts = attached.counts().map_err(Failure::of)?;
            Ok(Event::LnetPortal {
                portal: *portal,
                kind,
                done: counts.done,
                bytes: counts.bytes,
                failed: counts.failed,
            })
        };
        self.0.iter().map(counts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_a_portal_and_its_memory() {
        let sink = |text| sink(text).map(|sink| (sink.portal, sink.len));
        assert_eq!([sink("60"), sink("61:4k")], [Ok((60, 1 << 20)), Ok((61, 4096))]);
        for wrong in ["", "0", "x:4k", "60:0", "60:x", "-1"] {
            assert!(sink(wrong).is_err(), "{wrong}");
        }
        let data = |text| source(text).map(|source| format!("{:?}", source.data));
        let file = |name: &str| Ok(format!("{:?}", Data::File(name.into())));
        assert_eq!(data("60:8k"), Ok("Zeros(8192)".into()));
        assert_eq!([data("60:./8"), data("60:a:b")], [file("./8"), file("a:b")]);
        assert!(source("0:8k").is_err());
        assert_eq!(["60:8k", "60:a:b"].map(source_file), [None, Some((60, "a:b"))]);
    }
}
