//! Objects by number.

/// A table of objects whose numbers are a slot and its generation, so that the number of an object that is gone is nobody's
/// for the next 4,095 that take its slot.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

/// What a number is made of.
pub(crate) trait Number: Copy {
    fn new(slot: u32, generation: u32) -> Self;
    fn slot(self) -> u32;
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

use roce_verbs::provider::{CmRef, CqId, KeyId, MrId, PdId, QpId};
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
    /// Room for how many a number has bits.
    const MOST: usize = 1 << PdId::SLOT_BITS;

    /// `None` when there is no number left.
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

    fn place<N: Number>(&self, number: N) -> Option<&(u32, Option<T>)> {
        let place = self.slots.get(number.slot() as usize)?;
        // As much of the generation as the number has.
        (N::new(0, place.0).generation() == number.generation()).then_some(place)
    }

    pub(crate) fn get<N: Number>(&self, number: N) -> Option<&T> {
        self.place(number)?.1.as_ref()
    }

    pub(crate) fn get_mut<N: Number>(&mut self, number: N) -> Option<&mut T> {
        self.place(number)?;
        self.slots[number.slot() as usize].1.as_mut()
    }

    pub(crate) fn remove<N: Number>(&mut self, number: N) -> Option<T> {
        self.place(number)?;
        let (generation, place) = &mut self.slots[number.slot() as usize];
        let object = place.take()?;
        *generation = generation.wrapping_add(1);
        self.free.push(number.slot());
        Some(object)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use roce_verbs::provider::QpId;

    use super::Slots;

    #[test]
    fn the_number_of_what_is_gone_is_nobodys() {
        let mut slots = Slots::default();
        let first: QpId = slots.insert('a').unwrap();
        assert_eq!(slots.remove(first), Some('a'));
        let second: QpId = slots.insert('b').unwrap();
        assert_eq!((first.slot(), second.slot()), (0, 0));
        assert_eq!((slots.get(first), slots.get(second)), (None, Some(&'b')));
        assert_eq!((slots.remove(first), slots.len()), (None, 1));
        for _ in 0..5000 {
            let id: QpId = slots.insert('c').unwrap();
            assert_eq!(slots.get_mut(id), Some(&mut 'c'));
            slots.remove(id);
        }
    }
}
