//! Time in which payload is outstanding.

use roce_bth::{Class, NakCode, Position, Service};

use crate::judge::{Event, EventKind};

/// Outstanding requests of one endpoint.
#[derive(Default, Debug)]
pub(super) struct Outstanding {
    /// PSN behind the last SEND or WRITE.
    data: i64,
    /// PSN behind the last READ.
    read: i64,
    /// Everything before this PSN is answered.
    answered: i64,
    /// Requests are never answered: an unreliable service.
    unanswered: bool,
}

impl Outstanding {
    /// Takes a request of this endpoint.
    pub(super) fn request(&mut self, event: &Event) {
        let EventKind::Request { psn, psns, .. } = event.kind else {
            self.unanswered |= matches!(event.kind, EventKind::Datagram);
            return;
        };
        let info = event.opcode.info();
        self.unanswered |= info.service == Service::Uc;
        match info.class {
            Class::Send | Class::Write | Class::AtomicWrite => self.data = self.data.max(psn + psns),
            Class::ReadRequest => self.read = self.read.max(psn + psns),
            _ => {}
        }
    }

    /// Takes an answer to this endpoint's requests.
    pub(super) fn answer(&mut self, event: &Event) {
        let info = event.opcode.info();
        let upto = match event.kind {
            // It names packets beyond a gap.
            _ if info.class == Class::SelectiveAcknowledge => return,
            EventKind::Ack { psn, .. } => psn + 1,
            EventKind::ReadResponse { psn, .. } => {
                if matches!(info.position, Position::First | Position::Middle) {
                    // The judge may not know how long the READ is.
                    self.read = self.read.max(psn + 2);
                }
                psn + 1
            }
            EventKind::Nak { psn, code } => {
                if code != NakCode::PsnSequenceError {
                    // The connection ends: nothing else will be answered.
                    (self.data, self.read) = (psn, psn);
                }
                psn
            }
            EventKind::Rnr { psn, .. } => psn,
            _ => return,
        };
        self.answered = self.answered.max(upto);
    }

    /// Returns whether payload that this endpoint sends is outstanding.
    pub(super) const fn sends(&self) -> bool {
        self.unanswered || self.data > self.answered
    }

    /// Returns whether its service is unreliable.
    pub(super) const fn is_unanswered(&self) -> bool {
        self.unanswered
    }

    /// Returns whether payload that this endpoint reads is outstanding.
    pub(super) const fn reads(&self) -> bool {
        self.read > self.answered
    }
}

/// Sum of the time in which a direction is active.
#[derive(Default, Debug)]
pub(super) struct Activity {
    /// Time of the last packet, if the direction is active since.
    since: Option<u64>,
    pub(super) total_ns: u64,
}

impl Activity {
    /// Goes on to the time of a packet, after which the direction is active or not.
    pub(super) fn advance(&mut self, now_ns: u64, active: bool) {
        if let Some(since) = self.since {
            self.total_ns += now_ns.saturating_sub(since);
        }
        self.since = active.then(|| self.since.map_or(now_ns, |since| since.max(now_ns)));
    }
}
