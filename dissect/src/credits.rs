//! Credits of LNet over o2iblnd: how many messages each side may send before the other returns some (`ibc_credits`).

use lnet::proto::{Body, Message as Kib};

/// Credits that both sides of a connection have left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Credits {
    depth: u16,
    left: [u16; 2],
}

/// Error of a sender, or messages that the capture lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Imbalance {
    /// It returns more credits than were taken; only so many were.
    Returned { taken: u16 },
    /// It had no credit left.
    NoneLeft,
}

impl Credits {
    /// Creates the credits of a new connection. `depth`: its queue depth.
    pub(crate) const fn new(depth: u16) -> Self {
        Self {
            depth,
            left: [depth; 2],
        }
    }

    /// Returns the queue depth.
    pub(crate) const fn depth(&self) -> u16 {
        self.depth
    }

    /// Returns how many a side has left.
    pub(crate) const fn left(&self, side: usize) -> u16 {
        self.left[side]
    }

    /// Counts what a message of a side returns to the other one, and takes. Returns what is wrong with either.
    pub(crate) fn count(&mut self, sender: usize, kib: &Kib<'_>) -> [Option<Imbalance>; 2] {
        let peer = &mut self.left[1 - sender];
        let taken = self.depth - *peer;
        let returned = u16::from(kib.credits);
        *peer += returned.min(taken);
        let own = &mut self.left[sender];
        let takes = takes_credit(&kib.body);
        let none_left = takes && *own == 0;
        *own = own.saturating_sub(takes.into());
        [
            (returned > taken).then_some(Imbalance::Returned { taken }),
            none_left.then_some(Imbalance::NoneLeft),
        ]
    }
}

/// Returns whether a message takes a credit: it needs a receive buffer that the peer has for requests.
pub(crate) const fn takes_credit(body: &Body<'_>) -> bool {
    matches!(body, Body::Immediate { .. } | Body::PutReq { .. } | Body::GetReq { .. })
}
