//! Sums of the counters of members that have ended.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
};

use crate::{
    page::PageFile,
    proto::{Ended, Place},
};

/// Largest number of sets of addresses that sums are kept for.
pub(crate) const MAX_SETS: usize = 64;
/// Largest number of members that are gone without a goodbye and might come back.
const MAX_LOST: usize = 64;

/// Sums of members that don't come back.
#[derive(Clone, Default)]
struct Totals {
    by_addrs: BTreeMap<Vec<IpAddr>, Ended>,
    unknown: u64,
}

impl Totals {
    fn add(&mut self, page: Option<&PageFile>) {
        let is_full = self.by_addrs.len() >= MAX_SETS;
        let report = page.and_then(PageFile::read);
        let Some(report) = report.filter(|r| !is_full || self.by_addrs.contains_key(&r.addrs)) else {
            self.unknown += 1;
            return;
        };
        let sums = self.by_addrs.entry(report.addrs.clone()).or_default();
        sums.addrs = report.addrs;
        sums.processes += 1;
        for (name, n) in report.counters {
            let sum = sums.counters.entry(name).or_default();
            *sum = sum.saturating_add(n);
        }
    }
}

/// Members that are gone.
#[derive(Default)]
pub(super) struct Gone {
    totals: Totals,
    /// Members whose connection ended without a goodbye, the latest last: one whose process lives joins again, and then is
    /// not gone. Until then it counts on in its page.
    lost: VecDeque<(Place, Option<PageFile>)>,
}

impl Gone {
    /// Counts a member that has left, and does not come back.
    pub(super) fn left(&mut self, page: Option<&PageFile>) {
        self.totals.add(page);
    }

    /// Keeps the page of the member at `place`, whose connection has ended, and mostly its process.
    pub(super) fn lost(&mut self, place: Place, page: Option<PageFile>) {
        if self.lost.len() >= MAX_LOST
            && let Some((_, first)) = self.lost.pop_front()
        {
            self.left(first.as_ref());
        }
        self.lost.push_back((place, page));
    }

    fn take(&mut self, place: Place) -> Option<Option<PageFile>> {
        let at = self.lost.iter().position(|(p, _)| *p == place)?;
        self.lost.remove(at).map(|(_, page)| page)
    }

    /// Forgets the member at `place`, which is back. Returns its page.
    pub(super) fn returns(&mut self, place: Place) -> Option<PageFile> {
        self.take(place).flatten()
    }

    /// Counts the former member at `place`, which another one has now.
    pub(super) fn replaced(&mut self, place: Place) {
        if let Some(page) = self.take(place) {
            self.left(page.as_ref());
        }
    }

    /// Returns the sums, and the number of members that are not in them.
    pub(super) fn sums(&self) -> (Vec<Ended>, u64) {
        let mut all = self.totals.clone();
        self.lost.iter().for_each(|(_, page)| all.add(page.as_ref()));
        (all.by_addrs.into_values().collect(), all.unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{COUNTERS, Page, Snapshot};

    /// Page of a member that has published its first counters.
    fn page(addr: u32, first: &[u64]) -> Option<PageFile> {
        let mut file = PageFile::new().unwrap();
        file.add_address(IpAddr::from(addr.to_be_bytes()));
        let mut counters = [0; COUNTERS.len()];
        counters[..first.len()].copy_from_slice(first);
        let status = Snapshot {
            mtu: 1024,
            queue_pairs: 1,
            counters,
        };
        Page::map(&file.for_member().unwrap()).unwrap().publish(&status);
        Some(file)
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
        gone.left(page(1, &[5, u64::MAX]).as_ref());
        gone.left(page(1, &[6, 1, 1]).as_ref());
        gone.left(page(2, &[7]).as_ref());
        gone.left(None);
        gone.left(Some(&PageFile::new().unwrap()));
        let (sums, unknown) = gone.sums();
        assert_eq!(unknown, 2, "no page, and nothing in it");
        let first = |e: &Ended| [0, 1, 2].map(|n| e.counters[COUNTERS[n]]);
        let sums: Vec<_> = sums.iter().map(|e| (e.processes, first(e))).collect();
        assert_eq!(sums, [(2, [11, u64::MAX, 1]), (1, [7, 0, 0])]);
    }

    #[test]
    fn sets_of_addresses_are_bounded() {
        let mut gone = Gone::default();
        for addr in 0..2 * MAX_SETS as u32 {
            gone.left(page(addr, &[1]).as_ref());
        }
        gone.left(page(1, &[1]).as_ref());
        let (sums, unknown) = gone.sums();
        assert_eq!((sums.len(), unknown), (MAX_SETS, MAX_SETS as u64));
        assert_eq!(sums[1].counters[COUNTERS[0]], 2);
    }

    #[test]
    fn who_comes_back_is_counted_once() {
        let mut gone = Gone::default();
        gone.lost(place(20), page(1, &[5]));
        gone.lost(place(21), page(1, &[6]));
        gone.lost(place(22), None);
        let sum = |gone: &Gone| gone.sums().0.first().map(|e| (e.processes, e.counters[COUNTERS[0]]));
        assert_eq!((sum(&gone), gone.sums().1), (Some((2, 11)), 1));
        let back = gone.returns(place(20)).and_then(|page| page.read()).unwrap();
        assert_eq!(back.counters[COUNTERS[0]], 5);
        assert!(gone.returns(place(20)).is_none());
        assert!(gone.returns(place(22)).is_none());
        assert_eq!((sum(&gone), gone.sums().1), (Some((1, 6)), 0));
        gone.replaced(place(21));
        assert!(gone.returns(place(21)).is_none());
        assert_eq!(sum(&gone), Some((1, 6)));
        for n in 30..30 + 3 * MAX_LOST {
            gone.lost(place(n), page(1, &[1]));
        }
        assert_eq!(gone.lost.len(), MAX_LOST);
        assert_eq!(sum(&gone), Some((1 + 3 * MAX_LOST as u64, 6 + 3 * MAX_LOST as u64)));
    }
}
