//! Counters of members that are gone.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
};

use crate::proto::{Ended, MAX_COUNTERS, Place, Report};

/// Sets of addresses that sums are kept for.
pub(crate) const MAX_SETS: usize = 64;
/// Members that are gone without a goodbye and might come back.
const MAX_LOST: usize = 64;

/// The sums of one set of addresses.
#[derive(Clone, Default)]
struct Sums {
    processes: u64,
    counters: BTreeMap<String, u64>,
}

/// Counters of members that are gone. Reports must be [bounded](Report::bounded).
#[derive(Clone, Default)]
pub(super) struct Gone {
    by_addrs: BTreeMap<Vec<IpAddr>, Sums>,
    unknown: u64,
    /// Members whose connection ended without a goodbye, the latest last: one whose process lives joins again, and then is
    /// not gone.
    lost: VecDeque<(Place, Option<Report>)>,
}

impl Gone {
    /// A member has left, and does not come back. `report`: what it told last.
    pub(super) fn left(&mut self, report: Option<Report>) {
        let is_full = self.by_addrs.len() >= MAX_SETS;
        let Some(report) = report.filter(|r| !is_full || self.by_addrs.contains_key(&r.addrs)) else {
            self.unknown += 1;
            return;
        };
        let sums = self.by_addrs.entry(report.addrs).or_default();
        sums.processes += 1;
        for (name, n) in report.counters {
            if let Some(sum) = sums.counters.get_mut(&name) {
                *sum = sum.saturating_add(n);
            } else if sums.counters.len() < MAX_COUNTERS {
                sums.counters.insert(name, n);
            }
        }
    }

    /// The connection of the member at `place` has ended, and mostly its process.
    pub(super) fn lost(&mut self, place: Place, report: Option<Report>) {
        if self.lost.len() >= MAX_LOST
            && let Some((_, first)) = self.lost.pop_front()
        {
            self.left(first);
        }
        self.lost.push_back((place, report));
    }

    /// The member at `place` is back. Returns what it had told last.
    pub(super) fn returns(&mut self, place: Place) -> Option<Report> {
        let at = self.lost.iter().position(|(p, _)| *p == place)?;
        self.lost.remove(at)?.1
    }

    /// Somebody else has the place now: who had it does not come back.
    pub(super) fn replaced(&mut self, place: Place) {
        if let Some(at) = self.lost.iter().position(|(p, _)| *p == place)
            && let Some((_, report)) = self.lost.remove(at)
        {
            self.left(report);
        }
    }

    /// The sums, and how many members are not in them.
    pub(super) fn sums(&self) -> (Vec<Ended>, u64) {
        let mut all = self.clone();
        for (_, report) in std::mem::take(&mut all.lost) {
            all.left(report);
        }
        let ended = all.by_addrs.into_iter().map(|(addrs, sums)| Ended {
            addrs,
            processes: sums.processes,
            counters: sums.counters,
        });
        (ended.collect(), all.unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(addr: u32, counters: &[(&str, u64)]) -> Option<Report> {
        Some(Report {
            addrs: vec![IpAddr::from(addr.to_be_bytes())],
            counters: counters.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect(),
            ..Report::default()
        })
    }

    fn place(n: usize) -> Place {
        Place {
            slot: (n / 16) as u8,
            generation: (n % 16) as u8,
        }
    }

    #[test]
    fn sums_are_kept_by_address_and_stop_at_the_largest_value() {
        let mut gone = Gone::default();
        gone.left(report(1, &[("a", 5), ("b", u64::MAX)]));
        gone.left(report(1, &[("a", 6), ("b", 1), ("c", 1)]));
        gone.left(report(2, &[("a", 7)]));
        gone.left(None);
        let (sums, unknown) = gone.sums();
        assert_eq!(unknown, 1);
        let text: Vec<_> = sums
            .iter()
            .map(|e| (e.processes, format!("{:?}", e.counters)))
            .collect();
        let expected = [
            (2, format!(r#"{{"a": 11, "b": {}, "c": 1}}"#, u64::MAX)),
            (1, r#"{"a": 7}"#.to_owned()),
        ];
        assert_eq!(text, expected);
    }

    #[test]
    fn neither_names_nor_addresses_grow_without_bound() {
        let mut gone = Gone::default();
        for n in 0..10 * MAX_COUNTERS {
            gone.left(report(0, &[(&format!("c{n}"), 1), ("c0", 1)]));
        }
        let (sums, _) = gone.sums();
        assert_eq!(sums[0].counters.len(), MAX_COUNTERS);
        assert_eq!(
            sums[0].counters["c0"],
            10 * MAX_COUNTERS as u64,
            "those that are kept are right"
        );
        for addr in 1..2 * MAX_SETS as u32 {
            gone.left(report(addr, &[("a", 1)]));
        }
        gone.left(report(1, &[("a", 1)]));
        let (sums, unknown) = gone.sums();
        assert_eq!((sums.len(), unknown), (MAX_SETS, MAX_SETS as u64));
        assert_eq!(sums[1].counters["a"], 2);
    }

    #[test]
    fn who_comes_back_is_counted_once() {
        let mut gone = Gone::default();
        gone.lost(place(20), report(1, &[("a", 5)]));
        gone.lost(place(21), report(1, &[("a", 6)]));
        gone.lost(place(22), None);
        let sum = |gone: &Gone| gone.sums().0.first().map(|e| (e.processes, e.counters["a"]));
        assert_eq!((sum(&gone), gone.sums().1), (Some((2, 11)), 1));
        assert_eq!(gone.returns(place(20)), report(1, &[("a", 5)]));
        assert_eq!(gone.returns(place(20)), None);
        assert_eq!(gone.returns(place(22)), None);
        assert_eq!((sum(&gone), gone.sums().1), (Some((1, 6)), 0));
        gone.replaced(place(21));
        assert_eq!(gone.returns(place(21)), None);
        assert_eq!(sum(&gone), Some((1, 6)));
        for n in 30..30 + 3 * MAX_LOST {
            gone.lost(place(n), report(1, &[("a", 1)]));
        }
        assert_eq!(gone.lost.len(), MAX_LOST);
        assert_eq!(sum(&gone), Some((1 + 3 * MAX_LOST as u64, 6 + 3 * MAX_LOST as u64)));
    }
}
