//! Objects by number.

use roce_verbs::provider::{PdId, VerbsError};

/// Error of a full table.
const FULL: VerbsError = VerbsError::Limit("objects of a loop");
const SLOT_BITS: u32 = PdId::SLOT_BITS;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;

/// Backend's objects by the numbers that the fabric gave them.
#[derive(Debug)]
pub struct Table<N, T>(Vec<Option<(N, T)>>);

impl<N, T> Default for Table<N, T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<N: Copy + PartialEq + Into<u32>, T> Table<N, T> {
    fn slot(number: N) -> usize {
        (number.into() & SLOT_MASK) as usize
    }

    /// Inserts the object of a number.
    pub fn insert(&mut self, number: N, object: T) {
        let slot = Self::slot(number);
        if slot >= self.0.len() {
            self.0.resize_with(slot + 1, || None);
        }
        self.0[slot] = Some((number, object));
    }

    /// Returns the object of a number.
    pub fn get(&self, number: N) -> Option<&T> {
        let (of, object) = self.0.get(Self::slot(number))?.as_ref()?;
        (*of == number).then_some(object)
    }

    /// Returns the object of a number for changes.
    pub fn get_mut(&mut self, number: N) -> Option<&mut T> {
        let (of, object) = self.0.get_mut(Self::slot(number))?.as_mut()?;
        (*of == number).then_some(object)
    }

    /// Removes the object of a number.
    pub fn remove(&mut self, number: N) -> Option<T> {
        let place = self.0.get_mut(Self::slot(number))?;
        place.take_if(|(of, _)| *of == number).map(|(_, object)| object)
    }

    /// Returns all objects with their numbers.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (N, &mut T)> {
        self.0.iter_mut().flatten().map(|(number, object)| (*number, object))
    }
}

/// Table that gives the numbers: a slot and its generation, so that the number of a removed object is not valid for the next 4,095
/// objects in its slot.
pub(crate) struct Slots<N, T> {
    objects: Table<N, T>,
    /// Next numbers of free slots.
    free: Vec<N>,
}

impl<N, T> Default for Slots<N, T> {
    fn default() -> Self {
        Self {
            objects: Table::default(),
            free: Vec::new(),
        }
    }
}

impl<N: Copy + PartialEq + From<u32> + Into<u32>, T> Slots<N, T> {
    /// Inserts an object under a new number.
    pub(crate) fn insert(&mut self, object: T) -> Result<N, VerbsError> {
        let slots = self.objects.0.len() as u32;
        let unused = (slots <= SLOT_MASK).then(|| N::from(slots));
        let number = self.free.pop().or(unused).ok_or(FULL)?;
        self.objects.insert(number, object);
        Ok(number)
    }

    /// Returns the object of a number.
    pub(crate) fn get(&self, number: N) -> Option<&T> {
        self.objects.get(number)
    }

    /// Replaces the object of a number.
    pub(crate) fn set(&mut self, number: N, object: T) {
        self.objects.insert(number, object);
    }

    /// Removes the object of a number.
    pub(crate) fn remove(&mut self, number: N) -> Option<T> {
        let object = self.objects.remove(number)?;
        self.free.push(N::from(number.into().wrapping_add(1 << SLOT_BITS)));
        Some(object)
    }

    /// Has the object of a new number made. The number is free again if that fails.
    pub(crate) fn make<R>(
        &mut self,
        object: T,
        make: impl FnOnce(N) -> Result<R, VerbsError>,
    ) -> Result<R, VerbsError> {
        let number = self.insert(object)?;
        make(number).inspect_err(|_| drop(self.remove(number)))
    }

    /// Returns the number of objects.
    pub(crate) fn len(&self) -> usize {
        self.objects.0.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use roce_verbs::provider::QpId;

    use super::*;

    #[test]
    fn the_number_of_a_removed_object_is_not_valid() {
        let mut slots = Slots::default();
        let first: QpId = slots.insert('a').unwrap();
        assert_eq!(slots.remove(first), Some('a'));
        let second: QpId = slots.insert('b').unwrap();
        assert_eq!((first.0, second.0), (0, 1 << SLOT_BITS));
        assert_eq!((slots.get(first), slots.get(second)), (None, Some(&'b')));
        assert_eq!((slots.remove(first), slots.len()), (None, 1));
        assert_eq!(slots.remove(second), Some('b'));
        let mut failed = QpId(0);
        let made = slots.make('c', |id| {
            failed = id;
            Err::<(), _>(FULL)
        });
        assert!(made.is_err());
        assert_eq!((slots.get(failed), slots.len()), (None, 0));
        for _ in 0..5000 {
            let id: QpId = slots.insert('d').unwrap();
            assert_eq!((slots.get(id), id.0 & SLOT_MASK), (Some(&'d'), 0));
            slots.remove(id);
        }
    }

    #[test]
    fn a_table_has_an_object_under_its_whole_number() {
        let mut table = Table::default();
        let (old, new) = (QpId(3), QpId(1 << SLOT_BITS | 3));
        table.insert(new, 'a');
        assert!(table.get(old).is_none() && table.get_mut(old).is_none() && table.remove(old).is_none());
        assert_eq!(table.iter_mut().collect::<Vec<_>>(), [(new, &mut 'a')]);
        assert_eq!((table.remove(new), table.get(new)), (Some('a'), None));
    }
}
