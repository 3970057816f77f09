//! What each block of a device may hold.

use std::{collections::BTreeMap, ops::Range, time::Instant};

use ferroce_tests::pattern;

/// Bytes of a block: what is written and judged as a whole.
pub(crate) const BLOCK: usize = 4096;

/// What a block holds: the number of the write, 0 for zeroes.
pub(crate) type Version = u32;

/// What a write of this number puts into a block.
fn content(seed: u64, block: u64, version: Version) -> Vec<u8> {
    if version == 0 {
        return vec![0; BLOCK];
    }
    let mixed = seed ^ block.rotate_left(32) ^ u64::from(version).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let mut bytes = pattern(mixed, BLOCK);
    // So that what comes from elsewhere can be told from what never was.
    bytes[..8].copy_from_slice(&block.to_le_bytes());
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// The blocks of one writer. Only it writes them.
pub(crate) struct Model {
    seed: u64,
    blocks: Range<u64>,
    /// What each holds.
    certain: Vec<Version>,
    /// Writes that may or may not have reached a block, which then holds one of these or what is certain.
    doubtful: BTreeMap<u64, Vec<Version>>,
    /// Blocks to which a write is under way that nobody waits for, and when it has ended at the latest.
    abandoned: BTreeMap<u64, Instant>,
    /// The last write.
    last: Version,
}

impl Model {
    /// Blocks of zeroes.
    pub(crate) fn new(seed: u64, blocks: Range<u64>) -> Self {
        Self {
            seed,
            certain: vec![0; (blocks.end - blocks.start) as usize],
            blocks,
            doubtful: BTreeMap::new(),
            abandoned: BTreeMap::new(),
            last: 0,
        }
    }

    pub(crate) fn blocks(&self) -> Range<u64> {
        self.blocks.clone()
    }

    /// Blocks of which it is not certain what they hold.
    pub(crate) fn in_doubt(&self) -> usize {
        self.doubtful.len()
    }

    /// Whether no write to these blocks is under way, so that the next one is the last one.
    pub(crate) fn is_quiet(&mut self, blocks: Range<u64>, now: Instant) -> bool {
        self.abandoned.retain(|_, until| *until > now);
        self.abandoned.range(blocks).next().is_none()
    }

    /// A new write to these blocks; its bytes and number.
    pub(crate) fn compose(&mut self, blocks: Range<u64>) -> (Vec<u8>, Version) {
        self.last += 1;
        let bytes = blocks.flat_map(|block| content(self.seed, block, self.last)).collect();
        (bytes, self.last)
    }

    /// A write was acknowledged.
    pub(crate) fn written(&mut self, blocks: Range<u64>, version: Version) {
        for block in blocks {
            self.certain[(block - self.blocks.start) as usize] = version;
            self.doubtful.remove(&block);
        }
    }

    /// A write failed, or nobody waited for its end.
    pub(crate) fn doubt(&mut self, blocks: Range<u64>, version: Version) {
        for block in blocks {
            self.doubtful.entry(block).or_default().push(version);
        }
    }

    /// A write to these blocks may be under way, which has ended by then.
    pub(crate) fn wait_for(&mut self, blocks: Range<u64>, until: Instant) {
        self.abandoned.extend(blocks.map(|block| (block, until)));
    }

    /// Judges what was read from these blocks.
    pub(crate) fn check(&self, blocks: Range<u64>, bytes: &[u8]) -> Result<(), String> {
        for (block, bytes) in blocks.zip(bytes.chunks(BLOCK)) {
            let certain = self.certain[(block - self.blocks.start) as usize];
            let doubtful = self.doubtful.get(&block).map_or(&[][..], Vec::as_slice);
            let mut allowed = [certain].into_iter().chain(doubtful.iter().copied());
            if !allowed.any(|version| content(self.seed, block, version) == bytes) {
                return Err(format!(
                    "block {block} holds {}, where {certain} was written last, and perhaps {doubtful:?}",
                    self.describe(bytes)
                ));
            }
        }
        Ok(())
    }

    /// What these bytes are.
    fn describe(&self, bytes: &[u8]) -> String {
        if bytes.iter().all(|byte| *byte == 0) {
            return "zeroes".into();
        }
        let (block, version) = bytes.split_at(8);
        let block = u64::from_le_bytes(block.try_into().expect("8 bytes"));
        let version = u32::from_le_bytes(version[..4].try_into().expect("4 bytes"));
        match content(self.seed, block, version) == bytes {
            true => format!("write {version} to block {block}"),
            false => format!("bytes that nobody wrote as a whole (they begin as write {version} to block {block})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_was_acknowledged_is_there_and_nothing_else() {
        let mut model = Model::new(3, 10..20);
        assert_eq!(model.check(10..20, &vec![0; 10 * BLOCK]), Ok(()));
        let (old, n) = model.compose(12..14);
        model.written(12..14, n);
        assert_eq!(model.check(12..14, &old), Ok(()));
        assert!(model.check(12..13, &[0; BLOCK]).unwrap_err().contains("holds zeroes"));
        let (new, n) = model.compose(12..14);
        assert!(model.check(12..14, &new).unwrap_err().contains("write 2 to block 12"));
        model.written(12..14, n);
        assert!(model.check(12..14, &old).unwrap_err().contains("write 1 to block 12"));
        // At another place, or half of each.
        assert!(model.check(13..14, &new[..BLOCK]).is_err());
        let torn = [&new[..BLOCK / 2], &old[BLOCK / 2..BLOCK]].concat();
        assert!(model.check(12..13, &torn).unwrap_err().contains("nobody wrote"));
    }

    #[test]
    fn a_block_in_doubt_holds_one_of_its_writes_until_the_next_one() {
        let mut model = Model::new(3, 0..4);
        let (first, n) = model.compose(0..2);
        model.written(0..2, n);
        let (second, n) = model.compose(1..3);
        model.doubt(1..3, n);
        assert_eq!(model.in_doubt(), 2);
        assert_eq!(model.check(1..2, &first[BLOCK..]), Ok(()));
        assert_eq!(model.check(1..3, &second), Ok(()));
        let (third, n) = model.compose(1..2);
        model.written(1..2, n);
        assert_eq!(model.check(1..2, &third), Ok(()));
        assert!(model.check(1..2, &second[..BLOCK]).is_err());
        assert_eq!(model.in_doubt(), 1);
    }

    #[test]
    fn an_abandoned_write_is_waited_for() {
        let mut model = Model::new(3, 0..4);
        let (now, after) = (Instant::now(), Duration::from_secs(1));
        let (bytes, n) = model.compose(1..2);
        model.doubt(1..2, n);
        model.wait_for(1..2, now + after);
        assert!(model.is_quiet(2..4, now) && !model.is_quiet(0..2, now));
        assert_eq!(model.check(1..2, &bytes), Ok(()));
        assert!(model.is_quiet(0..2, now + after));
    }
}
