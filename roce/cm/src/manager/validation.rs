//! Address validation: whoever sends in another's name shall not have us flood the owner of the address (RFC 9000, 8.1).
//!
//! A REQ is one packet, and anybody can put any source address on it. Until that address has shown that it receives what
//! we send, by naming our communication ID or by a packet at its place on the queue pair (both numbers are random), no
//! more than [`AMPLIFICATION`] MADs go there for each that came; MADs are all of one length. Of these our timers and our
//! consumer send [`MAX_REPS`] REPs and [`MAX_DREQS`] DREQ at most; the others answer repetitions of the REQ, one each.
//!
//! After one REQ that is three REPs and nothing else: what a real client loses is the REP or its own RTU, and each REP is
//! a new try of both. A DREQ in the place of the third would only end what the third would have connected. (A client that
//! holds itself connected nevertheless hears of the end when it sends something: its RTU gets a REJ, its data no answer.)
//! A client that has repeated its REQ gets the DREQ as well.

use core::time::Duration;

use crate::mad::Attribute;

/// MADs that may go to an address for each that came from it.
const AMPLIFICATION: u32 = 3;
/// REPs that are sent unasked.
const MAX_REPS: u8 = 3;
/// DREQs.
const MAX_DREQS: u8 = 1;

/// Why a MAD is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    /// It answers the MAD at hand.
    Answer,
    /// A timer has expired, or the consumer wants it.
    Own,
}

/// Whether the address of a connection's peer has shown that it receives what we send, and what may go there until then.
#[derive(Clone, Debug)]
pub(super) struct AddressValidation {
    proven: bool,
    /// MADs that may still be sent.
    credit: u32,
    reps: u8,
    dreqs: u8,
}

impl AddressValidation {
    /// Returns the credit of a connection that a REQ asked for: its first MAD has come.
    pub(super) const fn requested() -> Self {
        Self {
            proven: false,
            credit: AMPLIFICATION,
            reps: 0,
            dreqs: 0,
        }
    }

    /// Returns the credit of a connection that we asked for: no stranger has us send its REQs, and every answer names our ID.
    pub(super) const fn initiated() -> Self {
        Self {
            proven: true,
            ..Self::requested()
        }
    }

    pub(super) const fn is_proven(&self) -> bool {
        self.proven
    }

    pub(super) const fn prove(&mut self) {
        self.proven = true;
    }

    /// The REQ came again.
    pub(super) const fn on_repeat(&mut self) {
        self.credit = self.credit.saturating_add(AMPLIFICATION);
    }

    /// Whether a MAD may be sent.
    pub(super) fn allows(&self, attribute: Attribute, cause: Cause) -> bool {
        let within = match (attribute, cause) {
            (Attribute::Rep, Cause::Own) => self.reps < MAX_REPS,
            (Attribute::Dreq, _) => self.dreqs < MAX_DREQS,
            _ => true,
        };
        self.proven || (within && self.credit > 0)
    }

    /// Whether a MAD may be sent; it is counted if so.
    pub(super) fn take(&mut self, attribute: Attribute, cause: Cause) -> bool {
        if !self.allows(attribute, cause) {
            return false;
        }
        self.credit = self.credit.saturating_sub(1);
        match (attribute, cause) {
            (Attribute::Rep, Cause::Own) => self.reps = self.reps.saturating_add(1),
            (Attribute::Dreq, _) => self.dreqs = self.dreqs.saturating_add(1),
            _ => {}
        }
        true
    }
}

/// The longest pause between retransmissions to a peer that names its response timeout: never below our own first one,
/// or a peer that names nothing would get all of them at once.
pub(super) fn longest_pause(named: Duration, first_retry: Duration) -> Duration {
    named.max(first_retry)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(v: &mut AddressValidation, attribute: Attribute, cause: Cause, tries: u32) -> u32 {
        (0..tries).map(|_| u32::from(v.take(attribute, cause))).sum()
    }

    #[test]
    fn one_request_pays_for_three_replies() {
        let mut v = AddressValidation::requested();
        assert_eq!(sent(&mut v, Attribute::Rep, Cause::Own, 20), 3);
        assert_eq!(sent(&mut v, Attribute::Dreq, Cause::Own, 20), 0);
        assert_eq!(sent(&mut v, Attribute::Rej, Cause::Answer, 20), 0);
    }

    #[test]
    fn repetitions_pay_for_their_answers_and_one_dreq() {
        let mut v = AddressValidation::requested();
        assert_eq!(sent(&mut v, Attribute::Rep, Cause::Own, 20), 3);
        v.on_repeat();
        assert!(v.take(Attribute::Rep, Cause::Answer));
        assert_eq!(
            sent(&mut v, Attribute::Rep, Cause::Own, 20),
            0,
            "timers have had theirs"
        );
        assert_eq!(sent(&mut v, Attribute::Dreq, Cause::Own, 20), 1);
        assert_eq!(sent(&mut v, Attribute::Rep, Cause::Answer, 20), 1, "3 for each in all");
    }

    #[test]
    fn who_has_proved_itself_or_was_asked_gets_everything() {
        let mut v = AddressValidation::requested();
        v.prove();
        assert_eq!(sent(&mut v, Attribute::Dreq, Cause::Own, 16), 16);
        let mut v = AddressValidation::initiated();
        assert_eq!(sent(&mut v, Attribute::Req, Cause::Own, 16), 16);
    }

    #[test]
    fn the_pause_that_a_peer_names_has_a_floor() {
        let first = Duration::from_millis(250);
        assert_eq!(longest_pause(Duration::from_nanos(4096), first), first);
        assert_eq!(longest_pause(Duration::from_secs(4), first), Duration::from_secs(4));
    }
}
