//! Inode numbers. A path keeps its number as long as the tree is mounted.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

/// The root's number, as FUSE has it.
pub(crate) const ROOT: u64 = 1;

struct Known {
    path: Arc<str>,
    /// Look-ups of the kernel.
    lookups: u64,
}

/// The inodes that the kernel knows: those it has not forgotten.
pub(crate) struct Inodes(HashMap<u64, Known>);

impl Default for Inodes {
    fn default() -> Self {
        let root = Known {
            path: "".into(),
            lookups: 1,
        };
        Self(HashMap::from([(ROOT, root)]))
    }
}

impl Inodes {
    /// The number of a path.
    pub(crate) fn number(&self, path: &str) -> u64 {
        if path.is_empty() {
            return ROOT;
        }
        let mut hasher = DefaultHasher::new();
        path.hash(&mut hasher);
        let mut number = hasher.finish();
        // Two known paths never have one number.
        while number <= ROOT || self.0.get(&number).is_some_and(|known| *known.path != *path) {
            number = number.wrapping_add(1);
        }
        number
    }

    /// The number of a path that the kernel looks up.
    pub(crate) fn look_up(&mut self, path: &str) -> u64 {
        let number = self.number(path);
        let known = self.0.entry(number).or_insert_with(|| Known {
            path: path.into(),
            lookups: 0,
        });
        known.lookups += 1;
        number
    }

    /// The path of a number that the kernel has looked up.
    pub(crate) fn path(&self, number: u64) -> Option<Arc<str>> {
        self.0.get(&number).map(|known| known.path.clone())
    }

    /// Forgets look-ups of the kernel.
    pub(crate) fn forget(&mut self, number: u64, lookups: u64) {
        if number == ROOT {
            return;
        }
        if let Some(known) = self.0.get_mut(&number) {
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups == 0 {
                self.0.remove(&number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_keeps_its_number_and_what_is_forgotten_is_gone() {
        let mut inodes = Inodes::default();
        assert_eq!((inodes.number(""), inodes.path(ROOT).as_deref()), (ROOT, Some("")));
        let number = inodes.look_up("class/rtrs-client");
        assert_eq!(inodes.look_up("class/rtrs-client"), number);
        assert_ne!(inodes.look_up("class/rtrs-server"), number);
        inodes.forget(number, 1);
        assert_eq!(inodes.path(number).as_deref(), Some("class/rtrs-client"));
        inodes.forget(number, 1);
        assert_eq!(inodes.path(number), None);
        assert_eq!(
            inodes.look_up("class/rtrs-client"),
            number,
            "also when it is looked up again"
        );
        inodes.forget(ROOT, 7);
        inodes.forget(99, 1);
        assert_eq!(inodes.0.len(), 3);
    }

    #[test]
    fn two_paths_never_share_a_number() {
        let mut inodes = Inodes::default();
        let number = inodes.number("block");
        let other = Known {
            path: "class".into(),
            lookups: 1,
        };
        inodes.0.insert(number, other);
        assert_eq!(inodes.look_up("block"), number.wrapping_add(1));
        assert_eq!(inodes.path(number).as_deref(), Some("class"));
    }
}
