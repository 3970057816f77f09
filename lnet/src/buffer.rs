//! Memory of users of a node.

use std::sync::Arc;

use roce_verbs::mem::Pages;

/// Bytes of a user's memory.
#[derive(Clone, Debug)]
pub struct Buffer {
    memory: Arc<Pages>,
    offset: usize,
    len: usize,
}

impl Buffer {
    /// All of this memory.
    pub fn all(memory: Arc<Pages>) -> Self {
        let len = memory.len();
        Self { memory, offset: 0, len }
    }

    /// New memory, zeroed. `None`: there is not so much, or `len` is 0.
    pub fn allocate(len: usize) -> Option<Self> {
        Pages::allocate(len).ok().map(|memory| Self { memory, offset: 0, len })
    }

    /// A part of it; `None`: it is not within.
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        let is_within = offset.checked_add(len).is_some_and(|end| end <= self.len);
        is_within.then(|| Self {
            memory: self.memory.clone(),
            offset: self.offset + offset,
            len,
        })
    }

    /// Bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy of what is there.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len];
        match self.memory.read(self.offset, &mut out) {
            Ok(()) => out,
            Err(_) => Vec::new(),
        }
    }

    /// Copies bytes to its beginning, as many as there is room for; returns how many.
    pub fn write(&self, data: &[u8]) -> usize {
        let data = &data[..data.len().min(self.len)];
        match self.memory.write(self.offset, data) {
            Ok(()) => data.len(),
            Err(_) => 0,
        }
    }

    /// The memory, and where in it the bytes begin.
    pub(crate) fn place(&self) -> (&Arc<Pages>, usize) {
        (&self.memory, self.offset)
    }
}
