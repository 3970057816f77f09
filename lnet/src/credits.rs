//! Credits of a connection, version 2: receive buffers of the peer that messages may be sent into, and ours that it may have again.

use thiserror::Error;

use crate::{info::CreditInfo, planted::Planted};

/// Out-of-band messages (NOOP) that may be on their way, each with a receive buffer beyond the credits.
pub(crate) const OUT_OF_BAND: u16 = 2;

/// Receive buffers of a connection of this depth: one for each credit, one for each answer that was asked for, and those out of band.
pub(crate) const fn receives(depth: u16) -> u32 {
    2 * depth as u32 + OUT_OF_BAND as u32
}

/// A peer that counts otherwise than we do. The connection can't go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum CreditError {
    /// It gives back more than there are.
    #[error("the peer gives back {given} credits on top of {have}, of {depth}")]
    Returned {
        /// Credits that the message gives back.
        given: u8,
        /// Credits that we had.
        have: u16,
        /// All that there are.
        depth: u16,
    },
    /// It sends without one.
    #[error("the peer has sent a message without a credit")]
    Overdrawn,
}

/// Fate of the receive buffer of a message that costs its sender a credit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Settled {
    /// The credit goes back with the next message.
    Returned,
    /// The buffer waits for the PUT_DONE, which returns the credit.
    Kept,
}

/// The ledger of a connection. What the peer may send, what is to be given back and what PUT_DONEs will bring add up to the depth.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Credits {
    depth: u16,
    /// Credits to give back from which on a NOOP does so.
    high_water: u16,
    /// Messages that we may send.
    available: u16,
    /// Answers that we may ask for: each has a receive buffer of ours waiting.
    reserved: u16,
    /// Messages that the peer may send.
    theirs: u16,
    /// Credits to give back.
    outstanding: u16,
    planted: Planted,
}

impl Credits {
    /// Returns the ledger of a new connection. `depth`: 1 to 255.
    pub(crate) const fn new(depth: u16, high_water: u16) -> Self {
        Self {
            depth,
            high_water,
            available: depth,
            reserved: depth,
            theirs: depth,
            outstanding: 0,
            planted: Planted::Nothing,
        }
    }

    /// Returns the ledger with a bug.
    pub(crate) const fn with(mut self, planted: Planted) -> Self {
        self.planted = planted;
        self
    }

    /// Its state, to be shown.
    pub(crate) const fn info(&self) -> CreditInfo {
        CreditInfo {
            depth: self.depth,
            available: self.available,
            reserved: self.reserved,
            theirs: self.theirs,
            outstanding: self.outstanding,
        }
    }

    /// Takes the place for an answer; returns whether there was one.
    pub(crate) fn reserve(&mut self) -> bool {
        let is_free = self.reserved > 0;
        self.reserved -= u16::from(is_free);
        is_free || self.planted == Planted::NoReserve
    }

    /// An answer has come.
    pub(crate) fn answered(&mut self) {
        self.reserved = (self.reserved + 1).min(self.depth);
    }

    /// Returns whether a message that costs a credit may be sent.
    pub(crate) const fn may_send(&self) -> bool {
        self.available > 0
    }

    /// Returns whether so much is to be given back that a message for it alone is due.
    pub(crate) const fn is_high(&self) -> bool {
        self.outstanding >= self.high_water
    }

    /// Returns whether a NOOP takes a credit. In version 2 it does not.
    pub(crate) fn noop_costs(&self) -> bool {
        self.planted == Planted::NoopCosts && self.may_send()
    }

    /// A message leaves. Returns the credits that it gives back.
    pub(crate) fn sent(&mut self, costs: bool) -> u8 {
        self.available -= u16::from(costs);
        let given = core::mem::take(&mut self.outstanding);
        self.theirs += given;
        given as u8
    }

    /// A message gives back credits.
    pub(crate) fn returned(&mut self, given: u8) -> Result<(), CreditError> {
        let have = self.available;
        let sum = have + u16::from(given);
        if sum > self.depth {
            let depth = self.depth;
            return Err(CreditError::Returned { given, have, depth });
        }
        self.available = sum;
        Ok(())
    }

    /// A message has come that costs the peer a credit.
    pub(crate) fn received(&mut self) -> Result<(), CreditError> {
        self.theirs = self.theirs.checked_sub(1).ok_or(CreditError::Overdrawn)?;
        Ok(())
    }

    /// Its receive buffer is posted again.
    pub(crate) fn settle(&mut self, settled: Settled) {
        let is_returned = settled == Settled::Returned || self.planted == Planted::PutReqReturns;
        self.outstanding += u16::from(is_returned);
    }

    /// A PUT_DONE has come, and its buffer is posted again.
    pub(crate) fn put_done(&mut self) {
        self.outstanding += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_depth_8_eight_messages_leave_and_the_ninth_waits() {
        let mut ours = Credits::new(8, 4);
        for _ in 0..8 {
            assert!(ours.may_send());
            assert_eq!(ours.sent(true), 0);
        }
        assert!(!ours.may_send());
        ours.returned(8).unwrap();
        assert!(ours.may_send());
    }

    #[test]
    fn more_credits_than_there_are_and_messages_without_one_are_errors() {
        let mut ours = Credits::new(8, 4);
        let error = ours.returned(9).unwrap_err();
        assert_eq!(error.to_string(), "the peer gives back 9 credits on top of 8, of 8");
        for _ in 0..8 {
            ours.received().unwrap();
            ours.settle(Settled::Returned);
        }
        assert_eq!(ours.received(), Err(CreditError::Overdrawn));
        assert_eq!(ours.sent(false), 8);
        ours.received().unwrap();
    }

    #[test]
    fn a_put_gives_its_credit_back_once_and_with_its_end() {
        let mut ours = Credits::new(2, 1);
        ours.received().unwrap();
        ours.settle(Settled::Kept);
        assert!(!ours.is_high());
        assert_eq!(ours.sent(false), 0, "PUT_ACK");
        ours.put_done();
        assert!(ours.is_high());
        assert_eq!(ours.sent(true), 1);
    }

    #[test]
    fn answers_are_asked_for_only_where_they_have_room() {
        let mut ours = Credits::new(2, 1);
        assert!(ours.reserve() && ours.reserve() && !ours.reserve());
        ours.answered();
        assert!(ours.reserve() && !ours.reserve());
    }
}
