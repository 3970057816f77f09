//! Objects by number.

use roce_verbs::provider::{CmRef, CqId, KeyId, MrId, PdId, QpId};

/// Table of objects whose numbers are a slot and its generation: the number of a removed object is not valid for the next 4,095
/// objects in its slot.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

/// Number that consists of a slot and a generation.
pub(crate) trait Number: Copy {
    /// Creates the number of a slot's object, with as much of the generation as fits.
    fn new(slot: u32, generation: u32) -> Self;
    /// Returns the slot.
    fn slot(self) -> u32;
    /// Returns the generation.
    fn generation(self) -> u32;
}

macro_rules! numbers {
    ($($name:ty),*) => {$(
        impl Number for $name {
            fn new(slot: u32, generation: u32) -> Self {
                <$name>::new(slot, generation)
            }
            fn slot(self) -> u32 {
                <$name>::slot(self)
            }
            fn generation(self) -> u32 {
                <$name>::generation(self)
            }
        }
    )*};
}

numbers!(CmRef, CqId, KeyId, MrId, PdId, QpId);

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slots<T> {
    /// Limit of the bits that a number has for the slot.
    const MOST: usize = 1 << PdId::SLOT_BITS;

    /// Inserts an object. `None` if no number is left.
    pub(crate) fn insert<N: Number>(&mut self, object: T) -> Option<N> {
        if let Some(slot) = self.free.pop() {
            let (generation, place) = &mut self.slots[slot as usize];
            *place = Some(object);
            return Some(N::new(slot, *generation));
        }
        if self.slots.len() >= Self::MOST {
            return None;
        }
        self.slots.push((0, Some(object)));
        Some(N::new(self.slots.len() as u32 - 1, 0))
    }

    /// Inserts an object that is made for its number. `None` if no number is left, or no object was made.
    pub(crate) fn insert_with<N: Number>(&mut self, make: impl FnOnce(N) -> Option<T>) -> Option<N> {
        let slot = self.free.last().map_or(self.slots.len(), |slot| *slot as usize);
        if slot >= Self::MOST {
            return None;
        }
        let generation = self.slots.get(slot).map_or(0, |place| place.0);
        let object = make(N::new(slot as u32, generation))?;
        self.insert(object)
    }

    fn place<N: Number>(&self, number: N) -> Option<&(u32, Option<T>)> {
        let place = self.slots.get(number.slot() as usize)?;
        // As much of the generation as the number has.
        (N::new(0, place.0).generation() == number.generation()).then_some(place)
    }

    /// Returns the object of a number.
    pub(crate) fn get<N: Number>(&self, number: N) -> Option<&T> {
        self.place(number)?.1.as_ref()
    }

    /// Returns the object of a number for changes.
    pub(crate) fn get_mut<N: Number>(&mut self, number: N) -> Option<&mut T> {
        self.place(number)?;
        self.slots[number.slot() as usize].1.as_mut()
    }

    /// Removes the object of a number.
    pub(crate) fn remove<N: Number>(&mut self, number: N) -> Option<T> {
        self.place(number)?;
        let (generation, place) = &mut self.slots[number.slot() as usize];
        let object = place.take()?;
        *generation = generation.wrapping_add(1);
        self.free.push(number.slot());
        Some(object)
    }

    /// Returns the number of objects.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns all objects, by slot.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|(_, object)| object.as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::{QpId, Slots};

    #[test]
    fn the_number_of_what_is_gone_is_nobodys() {
        let mut slots = Slots::default();
        let first: QpId = slots.insert('a').unwrap();
        assert_eq!(slots.remove(first), Some('a'));
        let second: QpId = slots.insert('b').unwrap();
        assert_eq!((first.slot(), second.slot()), (0, 0));
        assert_eq!((slots.get(first), slots.get(second)), (None, Some(&'b')));
        assert_eq!((slots.remove(first), slots.len()), (None, 1));
        assert_eq!(slots.remove(second), Some('b'));
        let made_for = |number: QpId| (number.slot() == 0).then_some('d');
        let third: QpId = slots.insert_with(made_for).unwrap();
        assert_eq!((slots.get(third), third.slot()), (Some(&'d'), 0));
        assert_eq!(slots.insert_with(made_for), None, "it has made nothing for the next");
        assert_eq!(slots.iter_mut().collect::<Vec<_>>(), [&'d']);
        slots.remove(third);
        for _ in 0..5000 {
            let id: QpId = slots.insert('c').unwrap();
            assert_eq!(slots.get_mut(id), Some(&mut 'c'));
            slots.remove(id);
        }
    }
}
