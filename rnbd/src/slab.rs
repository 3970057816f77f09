//! Values under numbers of which none has named another value before.

/// Values by number: the slot in the low 32 bits, above it how many values came before.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: slab::Slab<(u32, T)>,
    inserted: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: slab::Slab::new(),
            inserted: 0,
        }
    }
}

fn number(serial: u32, slot: usize) -> u64 {
    u64::from(serial) << 32 | slot as u64
}

impl<T> Slab<T> {
    /// Keeps a value, and gives it its number.
    pub(crate) fn insert(&mut self, value: T) -> u64 {
        self.inserted = self.inserted.wrapping_add(1);
        number(self.inserted, self.slots.insert((self.inserted, value)))
    }

    /// The value, unless it is gone.
    pub(crate) fn get(&self, key: u64) -> Option<&T> {
        let (serial, value) = self.slots.get(key as u32 as usize)?;
        (u64::from(*serial) == key >> 32).then_some(value)
    }

    /// The value, to change it, unless it is gone.
    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        let (serial, value) = self.slots.get_mut(key as u32 as usize)?;
        (u64::from(*serial) == key >> 32).then_some(value)
    }

    /// Takes the value out, unless it is gone.
    pub(crate) fn remove(&mut self, key: u64) -> Option<T> {
        self.get(key)?;
        let (_, value) = self.slots.try_remove(key as u32 as usize)?;
        Some(value)
    }

    /// All values with their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let numbered = self.slots.iter();
        numbered.map(|(slot, (serial, value))| (number(*serial, slot), value))
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Slab;

    #[test]
    fn a_number_names_one_value_only() {
        let mut slab = Slab::default();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.get(a), slab.get(b), slab.len()), (Some(&'a'), Some(&'b'), 2));
        assert_eq!(slab.remove(a), Some('a'));
        let c = slab.insert('c');
        assert_eq!(slab.get_mut(a), None);
        assert_eq!((slab.remove(a), slab.get(a)), (None, None));
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(c, &'c'), (b, &'b')]);
        assert_eq!((slab.remove(c), slab.remove(c), slab.len()), (Some('c'), None, 1));
        for unknown in [0, u64::MAX, 7] {
            assert_eq!(slab.get(unknown), None);
        }
    }
}
