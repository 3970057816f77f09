//! Events that runs have met.

use std::collections::BTreeMap;

/// Events of a run, and how often each happened.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Coverage(BTreeMap<&'static str, u64>);

/// Number of runs with each event, and of the events.
pub type RunsWith = BTreeMap<&'static str, [u64; 2]>;

impl Coverage {
    /// Counts an event.
    pub fn note(&mut self, event: &'static str) {
        *self.0.entry(event).or_default() += 1;
    }

    /// Counts an event if it happened.
    pub fn note_if(&mut self, event: &'static str, happened: bool) {
        if happened {
            self.note(event);
        }
    }

    /// Returns each event with the number of runs, which is one, and of its occurrences.
    pub fn runs(&self) -> RunsWith {
        self.0.iter().map(|(event, n)| (*event, [1, *n])).collect()
    }

    /// Returns events and numbers of runs as a line for people.
    pub fn text(total: &RunsWith) -> String {
        let events = total.iter().map(|(event, [runs, _])| format!("{event} {runs}"));
        events.collect::<Vec<_>>().join(", ")
    }

    /// Adds runs to others.
    pub fn sum(total: &mut RunsWith, other: &RunsWith) {
        for (event, [runs, times]) in other {
            let sum = total.entry(event).or_default();
            *sum = [sum[0] + runs, sum[1] + times];
        }
    }
}
