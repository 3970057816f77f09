//! The fuzzer's bytes, taken from the front.

/// The bytes that are left.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    /// The next byte; 0 when there are none.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    /// A number from one byte, below `n`; 0 if that is 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    /// At most `n` bytes.
    pub(crate) fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head
    }

    /// Exactly `n` bytes, or `None` and nothing is taken.
    pub(crate) fn exactly(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    /// A big-endian number of `n` bytes, at most 8; `None` if there are fewer left.
    pub(crate) fn number(&mut self, n: usize) -> Option<u64> {
        Some(self.exactly(n)?.iter().fold(0, |sum, b| sum << 8 | u64::from(*b)))
    }

    /// Like [`number`](Self::number), with zeros where bytes are missing.
    pub(crate) fn number_or_zeros(&mut self, n: usize) -> u64 {
        (0..n).fold(0, |sum, _| sum << 8 | u64::from(self.byte()))
    }

    /// At most as many bytes as the next byte says.
    pub(crate) fn short(&mut self) -> &'a [u8] {
        let n = self.byte();
        self.take(usize::from(n))
    }
}
