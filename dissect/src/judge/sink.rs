//! Memory that a peer writes into, and what has been written.

use ::lnet::proto::RdmaDesc;

/// Ranges of a sink's written bytes that are remembered beyond one for each fragment; a sink with more is not judged further.
const MAX_RANGES: usize = 16;

/// Memory that one side described for one transfer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Sink {
    pub(super) key: u32,
    /// Address and length of each fragment.
    fragments: Vec<(u64, u32)>,
    /// Written ranges, ascending and apart.
    written: Vec<(u64, u64)>,
    bytes: u64,
    /// Not all that was written is known.
    blurred: bool,
}

impl Sink {
    pub(super) fn new(desc: &RdmaDesc<'_>) -> Self {
        Self {
            key: desc.key,
            fragments: desc.frags.iter().map(|f| (f.addr, f.nob)).collect(),
            written: Vec::new(),
            bytes: 0,
            blurred: false,
        }
    }

    /// Fragments, for limits.
    pub(super) const fn fragments(&self) -> usize {
        self.fragments.len()
    }

    /// Notes that WRITEs are missing in the capture.
    pub(super) const fn blur(&mut self) {
        self.blurred = true;
    }

    /// Bytes that were written, if all of it is known.
    pub(super) const fn bytes(&self) -> Option<u64> {
        match self.blurred {
            true => None,
            false => Some(self.bytes),
        }
    }

    /// Notes a WRITE. Returns what is wrong with it.
    pub(super) fn write(&mut self, addr: u64, len: u32) -> Option<String> {
        self.bytes += u64::from(len);
        if len == 0 {
            return None;
        }
        let end = addr.saturating_add(len.into());
        let inside = |(from, nob): &(u64, u32)| addr >= *from && end <= from.saturating_add((*nob).into());
        if !self.fragments.iter().any(inside) {
            let nob: u64 = self.fragments.iter().map(|(_, nob)| u64::from(*nob)).sum();
            return Some(format!(
                "a WRITE of {len} bytes at {addr:#x} is in none of the {} fragments ({nob} bytes) of key {:#x}",
                self.fragments.len(),
                self.key
            ));
        }
        if self.blurred {
            return None;
        }
        // The first range that ends behind the WRITE's beginning.
        let at = self.written.partition_point(|(_, until)| *until <= addr);
        let twice = self.written.get(at).is_some_and(|(from, _)| *from < end);
        if twice {
            return Some(format!(
                "a WRITE of {len} bytes at {addr:#x} with key {:#x}, where it wrote before",
                self.key
            ));
        }
        self.written.insert(at, (addr, end));
        if self.written.len() > 1 {
            self.join();
        }
        if self.written.len() > self.fragments.len() + MAX_RANGES {
            self.blurred = true;
            self.written = Vec::new();
        }
        None
    }

    /// Joins ranges that touch.
    fn join(&mut self) {
        self.written.dedup_by(|next, range| {
            let touch = range.1 == next.0;
            if touch {
                range.1 = next.1;
            }
            touch
        });
    }
}

#[cfg(test)]
mod tests {
    use ::lnet::proto::{Fragment, Fragments};

    use super::*;

    fn sink(fragments: &[Fragment]) -> Sink {
        Sink::new(&RdmaDesc {
            key: 7,
            frags: Fragments::List(fragments),
        })
    }

    #[test]
    fn each_byte_of_a_fragment_is_written_once() {
        let mut sink = sink(&[Fragment { nob: 10, addr: 100 }, Fragment { nob: 10, addr: 200 }]);
        assert_eq!(sink.write(105, 5), None);
        assert_eq!(sink.write(100, 5), None);
        assert_eq!(sink.write(200, 10), None);
        assert_eq!((sink.written.len(), sink.bytes()), (2, Some(20)));
        for (addr, len) in [(104, 1), (100, 10), (209, 1)] {
            let text = sink.write(addr, len).unwrap();
            assert!(text.contains("wrote before"), "{addr} {len}: {text}");
        }
        for (addr, len) in [(99, 1), (105, 6), (200, 11), (u64::MAX, 2)] {
            let text = sink.write(addr, len).unwrap();
            assert!(text.contains("none of the 2 fragments (20 bytes)"), "{text}");
        }
        assert_eq!(sink.write(0, 0), None);
    }

    #[test]
    fn many_pieces_are_not_remembered() {
        let mut sink = sink(&[Fragment { nob: 1000, addr: 0 }]);
        for at in (0..1000).step_by(2) {
            assert_eq!(sink.write(at, 1), None);
            assert!(sink.written.len() <= 1 + MAX_RANGES);
        }
        assert_eq!((sink.write(0, 1), sink.bytes()), (None, None));
        assert!(sink.write(1000, 1).is_some());
    }
}
