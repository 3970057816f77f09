//! Counters of a manager, with stable names.

use crate::cm::{drops::DropReason, mad::Attribute};

macro_rules! counters {
    ($( $(#[$doc:meta])* $name:ident, )*) => {
        /// Counters of a manager.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Counters {
            /// Received, sent and retried, by attribute.
            mads: [[u64; Attribute::ALL.len()]; 3],
            dropped: [u64; DropReason::ALL.len()],
            $( $(#[$doc])* pub $name: u64, )*
        }

        impl Counters {
            /// Iterates over all counters with stable names for reports.
            pub fn named(&self) -> impl Iterator<Item = (String, u64)> {
                let mads = ["received", "sent", "retried"].into_iter().zip(self.mads);
                let mads = mads.flat_map(|(prefix, n)| {
                    let attributes = Attribute::ALL.into_iter().zip(n);
                    attributes.map(move |(a, n)| (format!("cm_{prefix}_{}", a.name()), n))
                });
                let dropped = DropReason::ALL.into_iter().zip(self.dropped);
                let others = [
                    ("rejects_sent", self.sent(Attribute::Rej)),
                    $( (stringify!($name), self.$name), )*
                ];
                mads.chain(dropped.map(|(r, n)| (format!("cm_drop_{}", r.name()), n)))
                    .chain(others.map(|(name, n)| (format!("cm_{name}"), n)))
            }

            /// Adds another manager's counters.
            pub fn add(&mut self, other: &Self) {
                let ours = self.mads.as_flattened_mut().iter_mut().chain(&mut self.dropped);
                let theirs = other.mads.as_flattened().iter().chain(&other.dropped);
                ours.zip(theirs).for_each(|(a, b)| *a += b);
                $( self.$name += other.$name; )*
            }
        }
    };
}

counters! {
    /// Stale connections ended because the peer reused their queue pair or communication ID.
    stale,
    /// MRAs that extended a timer.
    extended,
    /// REQs, REPs and DREQs without an answer.
    timeouts,
    /// REQs and SIDR_REQs that ICMP reported as undeliverable.
    undeliverable,
    /// Lingering connections removed early to make room.
    forgotten,
    /// Half-open connections and SIDR requests evicted for newer ones of other addresses.
    displaced,
    /// Half-open connections and SIDR requests evicted for newer ones of the same address.
    displaced_peer,
    /// Requests that expired before the consumer answered.
    expired,
    /// MADs not sent because the peer address is unverified.
    withheld,
}

impl Counters {
    /// Returns the number of MADs received with this attribute.
    pub fn received(&self, a: Attribute) -> u64 {
        self.mads[0][a.index()]
    }

    /// Returns the number of MADs sent with this attribute, including retransmissions.
    pub fn sent(&self, a: Attribute) -> u64 {
        self.mads[1][a.index()]
    }

    /// Returns the number of MADs with this attribute retransmitted after a timeout.
    pub fn retried(&self, a: Attribute) -> u64 {
        self.mads[2][a.index()]
    }

    /// Returns the number of MADs dropped for this reason.
    pub fn dropped(&self, r: DropReason) -> u64 {
        self.dropped[r as usize]
    }

    pub(crate) fn count_received(&mut self, a: Attribute) {
        self.mads[0][a.index()] += 1;
    }

    pub(crate) fn count_sent(&mut self, a: Attribute) {
        self.mads[1][a.index()] += 1;
    }

    pub(crate) fn count_retried(&mut self, a: Attribute) {
        self.mads[2][a.index()] += 1;
    }

    pub(crate) fn count_drop(&mut self, r: DropReason) {
        self.dropped[r as usize] += 1;
    }
}
