//! Queue in a ring of slots that are reused.

use core::ops::{Index, IndexMut};

/// Slots of a queue with its first entry.
const FIRST_SLOTS: usize = 4;
/// Queues with more slots free memory when they become empty.
pub(crate) const KEEP_CAPACITY: usize = 32;

/// First-in, first-out queue of large entries.
///
/// Entries are written in place, into slots whose entries have left: copying an entry into the queue and out of it costs more than
/// filling it.
#[derive(Debug, Default)]
pub(crate) struct SlotQueue<T> {
    /// None, or a power of two.
    slots: Vec<T>,
    /// Slot of the oldest entry.
    head: usize,
    len: usize,
}

impl<T: Default> SlotQueue<T> {
    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no entries.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the slot of the entry at an index.
    #[inline]
    fn slot(&self, index: usize) -> usize {
        self.head.wrapping_add(index) & self.slots.len().wrapping_sub(1)
    }

    /// Returns the entry at an index.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        match index < self.len {
            true => self.slots.get(self.slot(index)),
            false => None,
        }
    }

    /// Returns the oldest entry.
    #[inline]
    pub(crate) fn front(&self) -> Option<&T> {
        self.get(0)
    }

    /// Iterates over the entries, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        let (wrapped, first) = self.slots.split_at(self.head);
        first.iter().chain(wrapped).take(self.len)
    }

    /// Returns the index of the first entry for which `is_before` is false. It is true for all entries before that one.
    pub(crate) fn partition_point(&self, is_before: impl Fn(&T) -> bool) -> usize {
        let (mut from, mut to) = (0, self.len);
        while from < to {
            let middle = from.midpoint(to);
            match is_before(&self[middle]) {
                true => from = middle + 1,
                false => to = middle,
            }
        }
        from
    }

    /// Appends an entry, which the caller fills. It is as its slot's last entry was left.
    #[inline]
    pub(crate) fn push(&mut self) -> &mut T {
        if self.len == self.slots.len() {
            self.grow();
        }
        let slot = self.slot(self.len);
        self.len += 1;
        &mut self.slots[slot]
    }

    #[cold]
    fn grow(&mut self) {
        self.slots.rotate_left(self.head);
        self.head = 0;
        let slots = (2 * self.slots.len()).max(FIRST_SLOTS);
        self.slots.resize_with(slots, T::default);
    }

    /// Removes the oldest entry. `vacate` drops what the entry owns: the slot may stay unused for long.
    #[inline]
    pub(crate) fn pop(&mut self, vacate: impl FnOnce(&mut T)) {
        if self.is_empty() {
            return;
        }
        vacate(&mut self.slots[self.head]);
        self.head = self.slot(1);
        self.len -= 1;
        if self.is_empty() {
            // The first slots are those that a cache still holds.
            self.head = 0;
            if self.slots.len() > KEEP_CAPACITY {
                self.shrink();
            }
        }
    }

    #[cold]
    fn shrink(&mut self) {
        self.slots.truncate(KEEP_CAPACITY);
        self.slots.shrink_to_fit();
    }
}

impl<T: Default> Index<usize> for SlotQueue<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: usize) -> &T {
        assert!(index < self.len, "entry {index} of {}", self.len);
        &self.slots[self.slot(index)]
    }
}

impl<T: Default> IndexMut<usize> for SlotQueue<T> {
    #[inline]
    fn index_mut(&mut self, index: usize) -> &mut T {
        assert!(index < self.len, "entry {index} of {}", self.len);
        let slot = self.slot(index);
        &mut self.slots[slot]
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::Arc};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_holds_what_a_queue_holds(steps in prop::collection::vec((0usize..80, 0usize..80), 1..12)) {
            let (mut queue, mut model, mut next) = (SlotQueue::default(), VecDeque::new(), 0u64);
            for (pushed, popped) in steps {
                for _ in 0..pushed {
                    *queue.push() = next;
                    model.push_back(next);
                    next += 1;
                }
                for _ in 0..popped {
                    queue.pop(|_| {});
                    model.pop_front();
                }
                prop_assert!(queue.iter().eq(&model));
                prop_assert_eq!((queue.len(), queue.is_empty()), (model.len(), model.is_empty()));
                prop_assert_eq!(queue.front(), model.front());
                prop_assert_eq!(queue.get(queue.len()), None);
                for (index, entry) in model.iter().enumerate() {
                    prop_assert_eq!(&queue[index], entry);
                    prop_assert_eq!(queue.partition_point(|other| other < entry), index);
                }
                prop_assert!(!queue.is_empty() || queue.slots.len() <= KEEP_CAPACITY);
            }
        }
    }

    #[test]
    fn an_entry_that_left_owns_nothing() {
        let (mut queue, shared) = (SlotQueue::<Option<Arc<()>>>::default(), Arc::new(()));
        *queue.push() = Some(shared.clone());
        queue.pop(|entry| *entry = None);
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}
