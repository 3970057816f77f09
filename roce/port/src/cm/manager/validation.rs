//! Address validation: a sender with a forged source address must not have us flood the owner of the address (RFC 9000, 8.1).
//!
//! A REQ is one packet, and anybody can put any source address on it. An address is verified when its owner names our communication ID,
//! or a packet has an expected PSN of the queue pair (both numbers are random). Until then at most [`AMPLIFICATION`] MADs go there for
//! each that came; all MADs have one length. Timers and the consumer send at most [`MAX_REPS`] REPs and [`MAX_DREQS`] DREQ of these;
//! the others answer repetitions of the REQ, one each.
//!
//! After one REQ that is three REPs and nothing else: a real client loses the REP or its own RTU, and each REP is a new try of both. A
//! DREQ instead of the third would only end the connection that the third would establish. (A client that still believes that it is
//! connected learns of the end when it sends something: its RTU gets a REJ, its data no answer.) A client that has repeated its REQ
//! gets the DREQ as well.

use crate::cm::mad::Attribute;

/// MADs to an unverified address for each that came from it.
const AMPLIFICATION: u32 = 3;
/// REPs that timers and the consumer send.
const MAX_REPS: u8 = 3;
/// DREQs in all.
const MAX_DREQS: u8 = 1;

/// Cause of an outgoing MAD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    /// Answer to a received MAD.
    Answer,
    /// Timer or call of the consumer.
    Own,
}

/// Verification of a connection's peer address, and the limits until then.
#[derive(Clone, Debug)]
pub(super) struct AddressValidation {
    proven: bool,
    /// MADs that may still be sent.
    credit: u32,
    reps: u8,
    dreqs: u8,
}

impl AddressValidation {
    /// Creates the limits of a connection or resolution. `initiated`: the request is ours, and every answer names our ID.
    ///
    /// Else one MAD has come so far.
    pub(super) const fn new(initiated: bool) -> Self {
        Self {
            proven: initiated,
            credit: AMPLIFICATION,
            reps: 0,
            dreqs: 0,
        }
    }

    pub(super) const fn is_proven(&self) -> bool {
        self.proven
    }

    pub(super) const fn prove(&mut self) {
        self.proven = true;
    }

    /// Adds the credit of a repeated REQ.
    pub(super) const fn on_repeat(&mut self) {
        self.credit = self.credit.saturating_add(AMPLIFICATION);
    }

    /// Returns whether a MAD may be sent.
    pub(super) fn allows(&self, attribute: Attribute, cause: Cause) -> bool {
        let within = match (attribute, cause) {
            (Attribute::Rep, Cause::Own) => self.reps < MAX_REPS,
            (Attribute::Dreq, _) => self.dreqs < MAX_DREQS,
            _ => true,
        };
        self.proven || (within && self.credit > 0)
    }

    /// Returns whether a MAD may be sent, and counts it if so.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(v: &mut AddressValidation, attribute: Attribute, cause: Cause, tries: u32) -> u32 {
        (0..tries).map(|_| u32::from(v.take(attribute, cause))).sum()
    }

    #[test]
    fn one_request_pays_for_three_replies() {
        let mut v = AddressValidation::new(false);
        assert_eq!(sent(&mut v, Attribute::Rep, Cause::Own, 20), 3);
        assert_eq!(sent(&mut v, Attribute::Dreq, Cause::Own, 20), 0);
        assert_eq!(sent(&mut v, Attribute::Rej, Cause::Answer, 20), 0);
    }

    #[test]
    fn repetitions_pay_for_their_answers_and_one_dreq() {
        let mut v = AddressValidation::new(false);
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
        let mut v = AddressValidation::new(false);
        v.prove();
        assert_eq!(sent(&mut v, Attribute::Dreq, Cause::Own, 16), 16);
        let mut v = AddressValidation::new(true);
        assert_eq!(sent(&mut v, Attribute::Req, Cause::Own, 16), 16);
    }
}
