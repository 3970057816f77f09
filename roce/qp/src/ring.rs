//! Ring with an entry and a bit for each PSN from a first one on.

use std::collections::VecDeque;

use crate::seq::Seq;

/// Bits in a word.
pub(crate) const WORD: u64 = 64;

/// Entries and bits of consecutive PSNs. Entries beyond the end have the default value, bits are clear.
#[derive(Clone, Debug, Default)]
pub(crate) struct SeqRing<T> {
    /// First PSN. `None`: nothing is stored.
    base: Option<Seq>,
    entries: VecDeque<T>,
    /// Bits from `base`, rounded down to a word, on.
    words: VecDeque<u64>,
}

impl<T: Default + Clone> SeqRing<T> {
    /// Returns the first PSN. `None`: nothing is stored.
    pub(crate) fn base(&self) -> Option<Seq> {
        self.base
    }

    /// Begins at `base`, unless something is stored.
    pub(crate) fn begin(&mut self, base: Seq) {
        self.base.get_or_insert(base);
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns one past the last entry.
    pub(crate) fn end(&self) -> Option<Seq> {
        Some(self.base?.plus(self.entries.len() as u64))
    }

    /// Returns the entry of a PSN, if it was created.
    pub(crate) fn get(&self, seq: Seq) -> Option<&T> {
        let base = self.base.filter(|base| *base <= seq)?;
        self.entries.get(seq.since(base) as usize)
    }

    /// Returns the entry of a PSN. Creates it, and those before it.
    pub(crate) fn entry(&mut self, seq: Seq) -> &mut T {
        let base = *self.base.get_or_insert(seq);
        let index = seq.since(base) as usize;
        if self.entries.len() <= index {
            self.entries.resize(index + 1, T::default());
        }
        &mut self.entries[index]
    }

    /// Returns the first PSN from `from` on with such an entry.
    pub(crate) fn find(&self, from: Seq, is: impl Fn(&T) -> bool) -> Option<Seq> {
        let from = from.max(self.base?);
        let mut entries = self.entries.iter().skip(from.since(self.base?) as usize);
        Some(from.plus(entries.position(is)? as u64))
    }

    /// Stores `n` entries of this value from `base` on, and nothing else.
    pub(crate) fn fill(&mut self, base: Seq, n: usize, value: T) {
        self.base = Some(base);
        self.entries.clear();
        self.entries.resize(n, value);
        self.words.clear();
    }

    /// Gives memory back that many more entries had needed.
    pub(crate) fn trim(&mut self) {
        if self.entries.capacity() > 4 * self.entries.len().max(WORD as usize) {
            self.entries.shrink_to(2 * self.entries.len());
        }
    }

    /// Sets or clears the bits of the PSNs of `from..to`.
    pub(crate) fn set_bits(&mut self, from: Seq, to: Seq, bit: bool) {
        let Some(base) = self.base else { return };
        let start = base.round_down(WORD);
        let (mut at, end) = (from.since(start), to.since(start));
        while at < end {
            let n = (WORD - at % WORD).min(end - at);
            let mask = (u64::MAX >> (WORD - n)) << (at % WORD);
            let index = (at / WORD) as usize;
            if bit && self.words.len() <= index {
                self.words.resize(index + 1, 0);
            }
            match self.words.get_mut(index) {
                Some(word) if bit => *word |= mask,
                Some(word) => *word &= !mask,
                None => return,
            }
            at += n;
        }
    }

    /// Returns the bits of [`WORD`] PSNs from `at`, a multiple of it, on: the first one's is the lowest.
    pub(crate) fn word(&self, at: Seq) -> u64 {
        let start = self.base.map_or(at, |base| base.round_down(WORD));
        let word = self.words.get((at.since(start) / WORD) as usize);
        word.copied().unwrap_or(0)
    }

    /// Returns the number of words.
    pub(crate) fn words(&self) -> usize {
        self.words.len()
    }

    /// Removes and returns the first entry if it is before `seq`.
    pub(crate) fn pop_before(&mut self, seq: Seq) -> Option<T> {
        let base = self.base.filter(|base| *base < seq)?;
        let entry = self.entries.pop_front()?;
        self.advance(base.plus(1));
        Some(entry)
    }

    /// Moves the first PSN to `base`, if that is later. All entries before it have been removed.
    pub(crate) fn advance(&mut self, base: Seq) {
        let Some(before) = self.base.filter(|before| *before < base) else {
            return;
        };
        let words = base.round_down(WORD).since(before.round_down(WORD)) / WORD;
        if words > 0 {
            self.words.drain(..(words as usize).min(self.words.len()));
        }
        self.base = Some(base);
    }
}

#[cfg(test)]
mod tests {
    use roce_bth::Psn;

    use super::*;

    fn at(n: u64) -> Seq {
        Seq::start(Psn::new(0x00ff_ff00)).plus(n)
    }

    #[test]
    fn what_a_far_entry_needed_is_given_back() {
        let mut ring = SeqRing::default();
        ring.begin(at(0));
        *ring.entry(at(4000)) = 1u64;
        assert!(ring.entries.capacity() > 4000);
        while ring.pop_before(at(4000)).is_some() {
            ring.trim();
        }
        assert_eq!(ring.get(at(4000)), Some(&1));
        assert!(
            ring.entries.capacity() <= 4 * WORD as usize,
            "{}",
            ring.entries.capacity()
        );
    }

    #[test]
    fn bits_of_a_range_are_those_of_each_psn() {
        for (from, to) in [(0, 1), (3, 64), (10, 130), (63, 65), (64, 128), (70, 70)] {
            let mut ring = SeqRing::<u8>::default();
            ring.begin(at(5));
            let start = at(5).round_down(WORD);
            let bit = |ring: &SeqRing<u8>, n: u64| ring.word(start.plus(n / WORD * WORD)) >> (n % WORD) & 1 == 1;
            ring.set_bits(start.plus(from), start.plus(to), true);
            assert!(
                (0..192).all(|n| bit(&ring, n) == (from..to).contains(&n)),
                "{from}..{to}"
            );
            ring.set_bits(start.plus(from + 1), start.plus(200), false);
            assert!(
                (0..192).all(|n| bit(&ring, n) == (from..to.min(from + 1)).contains(&n)),
                "{from}..{to}"
            );
        }
    }
}
