//! Destinations towards which the system has refused a segmented send.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use roce_verbs::Instant;

/// For so long packets go out one by one: routes, interfaces and their settings change.
const MEMORY: Duration = Duration::from_secs(10);
/// The most destinations that are remembered; beyond them each refusal costs a system call.
const MOST: usize = 1024;

/// Destinations, each with the time when segmentation is tried again. A refusal depends on the route (its MTU, what the
/// interface computes), so it says nothing of other destinations.
#[derive(Debug, Default)]
pub(crate) struct Unsegmented {
    until: HashMap<IpAddr, Instant>,
}

impl Unsegmented {
    /// A segmented send was refused. True: it is the first of late.
    pub(crate) fn on_refused(&mut self, now: Instant, to: IpAddr) -> bool {
        if self.until.len() >= MOST {
            self.until.retain(|_, until| *until > now);
        }
        let full = self.until.len() >= MOST && !self.until.contains_key(&to);
        !full
            && self
                .until
                .insert(to, now + MEMORY)
                .is_none_or(|until| until + MEMORY < now)
    }

    /// Whether nothing was refused of late: what nearly all sends ask.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.until.is_empty()
    }

    /// Whether packets to a destination go out one by one.
    pub(crate) fn has(&mut self, now: Instant, to: IpAddr) -> bool {
        match self.until.get(&to) {
            Some(until) if *until > now => true,
            Some(_) => {
                self.until.remove(&to);
                false
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn ip(n: u32) -> IpAddr {
        Ipv4Addr::from_bits(n).into()
    }

    fn at(secs: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(secs)
    }

    #[test]
    fn a_refusal_concerns_its_destination_for_a_while() {
        let mut table = Unsegmented::default();
        assert!(table.on_refused(at(1), ip(7)));
        assert!(!table.on_refused(at(2), ip(7)), "it was told before");
        assert!(table.has(at(11), ip(7)) && !table.has(at(3), ip(8)));
        assert!(!table.has(at(12), ip(7)) && table.is_empty());
    }

    #[test]
    fn it_holds_no_more_than_so_many() {
        let mut table = Unsegmented::default();
        for n in 0..5000 {
            table.on_refused(at(1), ip(n));
        }
        assert_eq!(table.until.len(), MOST);
        table.on_refused(at(20), ip(9999));
        assert!(table.has(at(21), ip(9999)) && table.until.len() == 1);
    }
}
