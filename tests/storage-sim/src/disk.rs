//! A disk with a volatile cache. A block of 512 bytes holds one number, 64 times; 0 are zeroes.

use std::collections::BTreeMap;

use roce_sim::Rng;

/// Bytes of a block.
pub(crate) const BLOCK: usize = 512;
/// Bytes of the number that fills a block.
const WORD: usize = 8;

/// Content of a block.
pub(crate) type Content = u64;

/// Reads blocks out of bytes. `None` for a block that is torn: its numbers differ.
pub(crate) fn contents(bytes: &[u8]) -> Option<Vec<Content>> {
    bytes
        .chunks(BLOCK)
        .map(|block| {
            let (words, rest) = block.as_chunks::<WORD>();
            let first = u64::from_le_bytes(*words.first()?);
            let same = rest.is_empty() && words.iter().all(|w| u64::from_le_bytes(*w) == first);
            same.then_some(first)
        })
        .collect()
}

/// The bytes of blocks.
pub(crate) fn bytes(contents: &[Content]) -> Vec<u8> {
    let words = contents.iter().flat_map(|c| [c.to_le_bytes(); BLOCK / WORD]);
    words.flatten().collect()
}

/// How a disk misbehaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskFaults {
    /// Time that an operation takes, least and most, nanoseconds.
    pub(crate) delay: [u64; 2],
    /// An operation takes so much longer, with this probability.
    pub(crate) stall: (f64, u64),
    pub(crate) read_error: f64,
    pub(crate) write_error: f64,
    pub(crate) flush_error: f64,
}

impl DiskFaults {
    /// How long an operation takes.
    pub(crate) fn duration(&self, rng: &mut Rng) -> u64 {
        let [least, most] = self.delay;
        let (chance, longer) = self.stall;
        let stall = if rng.chance(chance) { rng.range(0, longer) } else { 0 };
        rng.range(least, most) + stall
    }
}

/// A write that is in the cache only.
#[derive(Clone, Copy, Debug)]
struct Cached {
    seq: u64,
    content: Content,
    /// No flush writes it any more.
    dropped: bool,
}

/// Disk with a volatile cache.
#[derive(Debug)]
pub(crate) struct SimDisk {
    durable: Vec<Content>,
    /// By block, oldest first: what a power loss may or may not leave.
    cache: BTreeMap<u64, Vec<Cached>>,
    seq: u64,
    pub(crate) faults: DiskFaults,
    /// No write and no flush of it ever fails.
    sound: bool,
}

impl SimDisk {
    /// Zeroes.
    pub(crate) fn new(blocks: u64, faults: DiskFaults) -> Self {
        Self {
            durable: vec![0; blocks as usize],
            cache: BTreeMap::new(),
            seq: 0,
            sound: faults.write_error + faults.flush_error == 0.0,
            faults,
        }
    }

    pub(crate) fn is_sound(&self) -> bool {
        self.sound
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.durable.len() as u64
    }

    /// Returns the content that a power loss leaves for certain, if anything was written to the block since then.
    pub(crate) fn durable(&self, lba: u64) -> Content {
        self.durable[lba as usize]
    }

    pub(crate) fn read(&self, lba: u64, count: u64) -> Vec<Content> {
        let block = |lba: u64| {
            let cached = self.cache.get(&lba).and_then(|list| list.last());
            cached.map_or(self.durable[lba as usize], |c| c.content)
        };
        (lba..lba + count).map(block).collect()
    }

    pub(crate) fn write(&mut self, lba: u64, contents: &[Content]) {
        for (lba, content) in (lba..).zip(contents) {
            self.seq += 1;
            let (seq, content) = (self.seq, *content);
            self.cache.entry(lba).or_default().push(Cached {
                seq,
                content,
                dropped: false,
            });
        }
    }

    /// A flush covers what has been written by this point.
    pub(crate) fn begin_flush(&self) -> u64 {
        self.seq
    }

    /// A flush has failed: as a system does with dirty pages then, nothing of what is in the cache is written by the next.
    pub(crate) fn fail_sync(&mut self) {
        for cached in self.cache.values_mut().flatten() {
            cached.dropped = true;
        }
    }

    /// Somebody else has the device: what was dropped may be flushed again.
    pub(crate) fn write_again(&mut self) {
        for cached in self.cache.values_mut().flatten() {
            cached.dropped = false;
        }
    }

    /// Makes durable what was written up to `upto`, unless it was dropped.
    pub(crate) fn end_flush(&mut self, upto: u64) {
        self.cache.retain(|lba, list| {
            if let Some(covered) = list.iter().rposition(|c| c.seq <= upto && !c.dropped) {
                self.durable[*lba as usize] = list[covered].content;
                list.drain(..=covered);
            }
            !list.is_empty()
        });
    }

    /// These blocks are durable as they are.
    pub(crate) fn force(&mut self, lba: u64, count: u64) {
        for lba in lba..lba + count {
            if let Some(last) = self.cache.remove(&lba).and_then(|list| list.last().copied()) {
                self.durable[lba as usize] = last.content;
            }
        }
    }

    /// Loses power: each write that was not flushed is there or not, block by block.
    pub(crate) fn lose_power(&mut self, rng: &mut Rng) {
        for (lba, list) in core::mem::take(&mut self.cache) {
            let left = rng.index(list.len() + 1);
            if let Some(cached) = left.checked_sub(1).and_then(|i| list.get(i)) {
                self.durable[lba as usize] = cached.content;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> SimDisk {
        let faults = DiskFaults {
            delay: [0, 0],
            stall: (0.0, 0),
            read_error: 0.0,
            write_error: 0.0,
            flush_error: 0.0,
        };
        SimDisk::new(8, faults)
    }

    #[test]
    fn bytes_and_contents_are_the_same_and_torn_blocks_are_seen() {
        let blocks = [7, 0, u64::MAX];
        let mut raw = bytes(&blocks);
        assert_eq!(raw.len(), 3 * BLOCK);
        assert_eq!(contents(&raw).unwrap(), blocks);
        raw[BLOCK + 100] = 1;
        assert_eq!(contents(&raw), None);
        assert_eq!(contents(&raw[..BLOCK + 3]), None);
    }

    #[test]
    fn only_what_was_written_before_a_flush_began_survives_for_certain() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let mut disk = disk();
            disk.write(1, &[10, 11]);
            let mark = disk.begin_flush();
            disk.write(1, &[20]);
            disk.write(1, &[30]);
            disk.end_flush(mark);
            assert_eq!(disk.read(0, 4), [0, 30, 11, 0]);
            disk.lose_power(&mut Rng::new(seed, 0));
            assert_eq!(disk.read(2, 1), [11]);
            seen.insert(disk.read(1, 1)[0]);
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [10, 20, 30]);
    }

    #[test]
    fn a_flush_after_a_failed_one_saves_only_what_is_new() {
        let mut disk = disk();
        disk.write(1, &[10, 11]);
        disk.fail_sync();
        disk.write(2, &[20]);
        disk.end_flush(disk.begin_flush());
        assert_eq!(disk.read(1, 2), [10, 20]);
        assert_eq!((disk.durable(1), disk.durable(2)), (0, 20));
        disk.write_again();
        disk.end_flush(disk.begin_flush());
        assert_eq!(disk.durable(1), 10);
    }

    #[test]
    fn what_was_forced_is_there() {
        let mut disk = disk();
        disk.write(3, &[5, 6]);
        disk.force(3, 1);
        for seed in 0..16 {
            disk.lose_power(&mut Rng::new(seed, 0));
            assert_eq!(disk.read(3, 1), [5]);
        }
    }
}
