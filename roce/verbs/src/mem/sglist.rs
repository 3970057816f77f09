//! Scatter/gather lists.

use std::cell::Cell;

use smallvec::SmallVec;

use crate::mem::{error::AccessError, span::Span};

/// Spans read and written as one run of bytes.
///
/// Offsets may be given in any order; going forward costs nothing extra, because the place of the last access is
/// remembered.
#[derive(Clone, Debug, Default)]
pub struct SgList {
    spans: SmallVec<[Span; 1]>,
    len: usize,
    /// Index of the span of the last access, and the offset of its first byte.
    hint: Cell<(u32, usize)>,
}

impl From<Span> for SgList {
    /// A list of one span.
    #[inline]
    fn from(span: Span) -> Self {
        Self {
            len: span.len(),
            spans: SmallVec::from_buf([span]),
            hint: Cell::default(),
        }
    }
}

impl SgList {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a span.
    pub fn push(&mut self, span: Span) {
        if !span.is_empty() {
            self.len += span.len();
            self.spans.push(span);
        }
    }

    /// Total bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Calls `f(span, offset in span, position in the run, bytes)` for the pieces of a range.
    fn for_range(
        &self,
        offset: usize,
        len: usize,
        mut f: impl FnMut(&Span, usize, usize, usize) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        if len == 0 {
            return Ok(());
        }
        if offset > self.len || len > self.len - offset {
            return Err(AccessError::Revoked);
        }
        let (mut index, mut start) = self.hint.get();
        if start > offset {
            (index, start) = (0, 0);
        }
        let mut done = 0;
        while let Some(span) = self.spans.get(index as usize) {
            let within = offset + done - start;
            if within < span.len() {
                let n = (span.len() - within).min(len - done);
                f(span, within, done, n)?;
                done += n;
                if done == len {
                    self.hint.set((index, start));
                    return Ok(());
                }
            }
            start += span.len();
            index += 1;
        }
        Err(AccessError::Revoked)
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When memory was taken back or is missing, or the range leaves the list. Some bytes may have been copied.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        let len = out.len();
        self.for_range(offset, len, |span, within, at, n| {
            span.read(within, &mut out[at..at + n])
        })
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When memory was taken back or is missing, or the range leaves the list. Some bytes may have been copied.
    pub fn write_at(&self, offset: usize, data: &[u8]) -> Result<(), AccessError> {
        self.for_range(offset, data.len(), |span, within, at, n| {
            span.write(within, &data[at..at + n])
        })
    }
}
