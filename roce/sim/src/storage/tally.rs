//! What a run has done.

use std::collections::BTreeMap;

/// What happened, and how often.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    /// Something happened once more.
    pub(crate) fn note(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    /// It happened, if that is so.
    pub(crate) fn note_if(&mut self, what: &'static str, so: bool) {
        if so {
            self.note(what);
        }
    }

    /// What, and how often.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(what, n)| (*what, *n))
    }
}

/// See the module.
#[derive(Clone, Default, Debug)]
pub(crate) struct Tally {
    pub(crate) packets: u64,
    pub(crate) lost: u64,
    pub(crate) operations: u64,
    pub(crate) succeeded: u64,
    pub(crate) simulated_ns: u64,
    pub(crate) hash: u64,
    pub(crate) coverage: Coverage,
}
