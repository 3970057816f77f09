//! Retransmission: which packets count as lost, and their way to the wire again.
//!
//! A selective ACK names the packets that have arrived. A peer without them drops everything behind a gap, so that its NAK
//! declares all packets lost from the gap on (Go-Back-N). What is lost is retransmitted before new requests are sent.

use roce_verbs::Instant;

use super::{
    Requester,
    phase::{Caution, Event, Probe, RecoveryPhase},
    scoreboard::{Change, Mark},
    transmit::{Request, Unsent},
};
use crate::{
    congestion::Loss,
    context::{Call, QpContext},
    ctx::WaitReason,
    sendq::{Kind, Progress},
    seq::Seq,
    tx::{TxKind, TxSink},
};

/// Reason to declare packets lost from the oldest unacknowledged one on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GoBack {
    /// The peer reported a gap, or responses have one.
    Gap,
    /// No answer within the probe timeout: packets may only be late.
    ProbeTimeout,
    /// No answer within the retransmission timeout or the queue pair's `timeout` attribute: packets count as lost.
    Timeout,
    /// RNR NAK: the peer had no receive work request.
    Rnr,
}

impl GoBack {
    /// Returns whether nothing has come from the peer.
    fn is_silence(self) -> bool {
        matches!(self, Self::ProbeTimeout | Self::Timeout)
    }
}

impl Requester {
    /// Declares packets lost, so that they are retransmitted.
    pub(super) fn go_back(&mut self, call: &mut Call<'_>, reason: GoBack) {
        call.counters.completer_retry_err += u64::from(reason != GoBack::Rnr);
        let caution = Caution {
            // Responses that were dropped can't be only late.
            sent: if self.reads.skipped {
                self.una
            } else {
                self.sent_end(call.qp)
            },
            timed_out: reason == GoBack::Timeout,
        };
        match call.qp.is_selective() {
            true => self.lose_unreported(call, reason),
            false => self.lose_all(call, reason),
        }
        match reason {
            GoBack::ProbeTimeout | GoBack::Timeout => self.phase.on(Event::Silence(caution)),
            GoBack::Gap => self.phase.on(Event::Gap),
            GoBack::Rnr => {}
        }
        self.sample = None;
        self.probe = Probe::None;
        self.timers.base = call.now;
    }

    /// Stops sending until `until`, because the peer has no receive work request.
    pub(super) fn wait_for_receive(&mut self, call: &mut Call<'_>, until: Instant) {
        self.go_back(call, GoBack::Rnr);
        let then = match call.qp.is_selective() {
            true => self.phase.caution(),
            // The peer dropped all later packets, and may still have no receive work request.
            false => Some(Caution {
                sent: self.una,
                timed_out: false,
            }),
        };
        self.phase.on(Event::RnrNak(until, then));
    }

    /// Declares all outstanding packets lost: the peer drops everything after a gap.
    fn lose_all(&mut self, call: &mut Call<'_>, reason: GoBack) {
        let weight = core::mem::take(&mut self.in_flight);
        // Of what is behind a gap, only one packet is known to be lost.
        let lost = if reason == GoBack::Gap {
            weight.min(call.qp.mtu())
        } else {
            0
        };
        call.window.forget(weight - lost);
        match reason {
            GoBack::Rnr | GoBack::ProbeTimeout => {}
            GoBack::Timeout => call.window.on_loss(call.now, Loss::Timeout, 0),
            GoBack::Gap => {
                call.window.on_loss(call.now, Loss::Gap, lost);
                self.rtt.on_loss();
            }
        }
        if !reason.is_silence() {
            self.reads.skipped = false;
        }
        self.scoreboard.lose_all(self.una, self.next);
        self.since_ack_req = 0;
        self.timers.resent = Some((self.una, call.now));
    }

    /// Declares packets lost that no selective ACK has reported.
    fn lose_unreported(&mut self, call: &mut Call<'_>, reason: GoBack) {
        let (una, next) = (self.una, self.next);
        if reason.is_silence() {
            self.lose(call.qp, una, next);
        }
        // Even if it arrived, the oldest packet was not executed, or its response was lost.
        self.scoreboard.lose(una, una);
        let changes = self.scoreboard.take_changes();
        self.account(call, changes, reason == GoBack::Gap);
        if reason == GoBack::Timeout {
            call.window.on_loss(call.now, Loss::Timeout, 0);
        }
    }

    /// Schedules the unanswered rest of the oldest READ or atomic for retransmission.
    pub(super) fn ask_again(&mut self, call: &mut Call<'_>) {
        let una = self.una;
        let Some(index) = self.sq.index_of(una) else { return };
        let end = self.sq.wqes[index].request_end(una).min(self.next);
        self.lose(call.qp, una, end);
        let changes = self.scoreboard.take_changes();
        self.account(call, changes, true);
        self.timers.resent = Some((una, call.now));
        self.sample = None;
        self.timers.base = call.now;
    }

    /// Declares lost all packets of `from..to` that, or whose responses, are in flight.
    fn lose(&mut self, qp: &QpContext, from: Seq, to: Seq) {
        let una = self.una;
        let mut seq = from;
        while seq < to {
            let (_, answered) = self.sq.weigh(seq, qp.mtu());
            if self.scoreboard.mark(seq).is_in_flight(answered) {
                self.scoreboard.lose(una, seq);
            }
            seq = seq.plus(1);
        }
    }

    /// Declares packets lost that were sent before a retransmission that has been answered.
    pub(super) fn lose_overtaken(&mut self, call: &mut Call<'_>) {
        if !self.scoreboard.has_returns() {
            return;
        }
        let (una, sq) = (self.una, &self.sq);
        self.scoreboard.judge_by_returns(una, |at| sq.is_answered(at));
        let changes = self.scoreboard.take_changes();
        self.account(call, changes, true);
    }

    /// Ends sending one packet at a time, after an acknowledgement.
    ///
    /// If it acknowledges more than was retransmitted, the first transmission was only late: the rest is not
    /// retransmitted (as in F-RTO, RFC 5682).
    pub(super) fn end_caution(&mut self, call: &mut Call<'_>, acknowledged: Seq, resent: Seq) {
        if self.phase == RecoveryPhase::Steady {
            return;
        }
        let caution = self.phase.caution();
        self.phase.on(Event::Acknowledged);
        let Some(Caution { sent, timed_out }) = caution.filter(|_| !call.qp.is_selective() && acknowledged > resent)
        else {
            return;
        };
        if timed_out {
            call.counters.spurious_timeouts += 1;
            call.window.on_spurious_timeout();
        }
        let from = self.sent_end(call.qp);
        if sent <= from {
            return;
        }
        let covered = self.sq.wqes.iter().take_while(|w| w.first < sent);
        let weight: usize = covered.map(|w| w.cost(from, sent, call.qp.mtu())).sum();
        call.window.on_sent(weight);
        self.in_flight += weight;
        self.scoreboard.resume(from, sent);
        self.timers.resent = None;
    }

    /// Returns one past the newest packet that may be in flight. Go-Back-N has dropped all later ones.
    pub(super) fn sent_end(&self, qp: &QpContext) -> Seq {
        match qp.is_selective() {
            true => self.next,
            false => self.scoreboard.next_lost(self.una).unwrap_or(self.next),
        }
    }

    /// Returns whether an answer is due. After Go-Back-N none is before something is retransmitted.
    ///
    /// With selective ACKs one always is: the probe that follows retransmits a READ for which the window has no room.
    pub(super) fn awaits_answer(&self, qp: &QpContext) -> bool {
        self.una < self.sent_end(qp)
    }

    /// Returns the lost packet to retransmit next. `None` if no packet is lost, or while nothing may be sent.
    pub(super) fn next_resend(&self, qp: &QpContext) -> Option<Seq> {
        if !qp.is_sending() || self.phase.rnr_until().is_some() {
            return None;
        }
        self.scoreboard.next_resend(self.una, |seq| !self.has_failed(seq))
    }

    fn has_failed(&self, seq: Seq) -> bool {
        let wqe = self.sq.index_of(seq).map(|index| &self.sq.wqes[index]);
        wqe.is_some_and(|wqe| matches!(wqe.progress, Progress::Failed(_)))
    }

    /// Checks whether a lost packet may be retransmitted, except for the window.
    pub(super) fn check_lost(&self, qp: &QpContext, from: Seq) -> Result<(), WaitReason> {
        if self.has_failed(from) {
            return Err(WaitReason::Local);
        }
        if self.phase.caution().is_some() && self.in_flight > 0 {
            return Err(WaitReason::Acks);
        }
        // Without selective ACKs, parts of one READ request are requested again one at a time.
        let Some(index) = self.sq.index_of(from).filter(|_| !qp.is_selective()) else {
            return Ok(());
        };
        let wqe = &self.sq.wqes[index];
        match wqe.kind() == Kind::Read && from > self.una && from > wqe.request_start(from) {
            true => Err(WaitReason::Acks),
            false => Ok(()),
        }
    }

    /// Returns the request packet that retransmits a lost packet.
    pub(super) fn lost_request(&self, call: &Call<'_>, from: Seq) -> Option<Request> {
        let index = self.sq.index_of(from)?;
        let wqe = &self.sq.wqes[index];
        let to = match wqe.kind() {
            Kind::Read => self.lost_run(call, wqe, from),
            _ => from.plus(1),
        };
        Some(Request { index, from, to })
    }

    /// Retransmits a lost packet.
    pub(super) fn resend(&mut self, call: &mut Call<'_>, request: Request, tx: &mut impl TxSink) -> Result<(), Unsent> {
        let Request { index, from, to } = request;
        let wqe = &self.sq.wqes[index];
        self.emit_request(call.qp, (wqe, request), true, TxKind::Retransmission, tx)?;
        call.counters.retransmits += 1;
        self.reads.on_requested(wqe, from, to);
        if self.in_flight == 0 {
            self.timers.base = call.now;
        }
        // After a silence the answer may be to either transmission (Karn's rule); after a reported gap it can't, because the
        // peer has dropped everything behind it.
        if !call.qp.is_selective() && self.sample.is_none() && self.timers.backoff == 0 {
            self.sample = Some((from.plus(1), call.now));
        }
        self.account_resent(call, from, to, false);
        Ok(())
    }

    /// Accounts for a probe: `from..to` of the oldest READ was requested again after a probe timeout.
    pub(super) fn note_probed(&mut self, call: &mut Call<'_>, from: Seq, to: Seq) {
        if call.qp.is_selective() {
            let to = self.first_answered(from, to);
            self.account_resent(call, from, to, true);
        }
    }

    /// Accounts for the retransmission of `from..to`. `probe`: sent after a probe timeout.
    fn account_resent(&mut self, call: &mut Call<'_>, from: Seq, to: Seq, probe: bool) {
        let (una, next) = (self.una, self.next);
        let (mut at, mut more) = (from, 0);
        while at < to {
            let (cost, answered) = self.sq.weigh(at, call.qp.mtu());
            let counted = self.scoreboard.mark(at).is_in_flight(answered);
            more += if counted { 0 } else { cost };
            match probe {
                true => self.scoreboard.on_probed(una, at, next),
                false => self.scoreboard.on_resent(at, next, answered),
            }
            at = at.plus(1);
        }
        call.window.on_sent(more);
        self.in_flight += more;
        let index = self.sq.index_of(from);
        if index.is_none_or(|index| self.sq.wqes[index].kind() != Kind::Read) {
            call.qp.note_sent(more);
        }
    }

    /// Returns the cost of the packets of `una..to` in flight.
    pub(super) fn weight_before(&self, qp: &QpContext, to: Seq) -> usize {
        let (mut seq, mut weight) = (self.una, 0);
        while seq < to {
            let (cost, answered) = self.sq.weigh(seq, qp.mtu());
            if self.scoreboard.mark(seq).is_in_flight(answered) {
                weight += cost;
            }
            seq = seq.plus(1);
        }
        weight
    }

    /// Accounts for state changes of packets. `congested`: losses count as congestion.
    pub(super) fn account(&mut self, call: &mut Call<'_>, changes: Vec<Change>, congested: bool) {
        let (mut acked, mut lost, mut unsent) = (0, 0, 0);
        let mut unsent_upto = self.una;
        for change in &changes {
            let (cost, answered) = self.sq.weigh(change.seq, call.qp.mtu());
            match (change.from.is_in_flight(answered), change.to.is_in_flight(answered)) {
                (true, false) if change.to != Mark::Lost => acked += cost,
                (true, false) if change.seq < unsent_upto => unsent += cost,
                (true, false) => {
                    lost += cost;
                    unsent_upto = self.lost_request_end(change.seq).unwrap_or(unsent_upto);
                }
                // None comes back into flight but by being sent again.
                _ => {}
            }
        }
        self.scoreboard.reuse(changes);
        self.in_flight = self.in_flight.saturating_sub(acked + lost + unsent);
        call.window.forget(unsent);
        if unsent > 0 {
            // Later requests wait for the retransmission, so they don't measure a round trip.
            self.sample = None;
        }
        if acked > 0 {
            call.window.on_acked(call.now, acked, None);
        }
        match lost {
            0 => {}
            _ if congested => {
                self.rtt.on_loss();
                call.window.on_loss(call.now, Loss::Selective, lost);
            }
            _ => call.window.forget(lost),
        }
    }

    /// Returns the end of a READ without any response, if `seq` is its first PSN.
    ///
    /// Then the request was lost, a single packet, and no response was ever sent.
    fn lost_request_end(&self, seq: Seq) -> Option<Seq> {
        let wqe = &self.sq.wqes[self.sq.index_of(seq)?];
        let end = wqe.request_end(seq);
        let is_whole = wqe.kind() == Kind::Read && seq == wqe.request_start(seq);
        (is_whole && self.first_answered(seq, end) == end).then_some(end)
    }
}
