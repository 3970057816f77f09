//! Our engine as the requester: what it is allowed to send when, and which of the captured answers it gets.
//!
//! Two requesters that do right do not send the same packets: when and how much one repeats is its own choice, and the
//! machine that a capture was made on was slow now and then. So the captured answers are not given blindly:
//!
//! - Each request of the captured side allows ours one request. When the captured side goes back without being told to,
//!   its timer has run out, and ours is made to: the engine's clock is put forward to it. So it is when a pause after an RNR
//!   NAK is over.
//! - A refusal (RNR NAK, sequence gap) is ours only if ours has sent what it refuses: else it answers a repetition that ours
//!   chose not to send.
//! - What was refused, and everything behind it, was dropped, and must be sent again. An acknowledgement (or a response, or
//!   a refusal of a later packet) is given when ours has done that. If ours is not that far, because it sends one packet and
//!   waits where the captured side sent all, it gets an acknowledgement of what it has sent: the captured responder had
//!   taken it. If it does not go on then, or not with what was refused after an RNR NAK, that is a difference
//!   ([`Kind::NotRepeated`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use roce_bth::{Aeth, Bth, Class, Credits, Header, MAX_HEADER_LEN, Msn, NakCode, Opcode, Packet, Psn, Syndrome};
use roce_verbs::{Instant, Qpn};

use super::Player;
use crate::{compare::Sent, kind::Kind, model::read_packets};

/// Timers that may run out before something is sent: silence has stages.
const STAGES: usize = 4;

/// Requests of both sides so far. PSNs are counted from `first`.
#[derive(Debug, Default)]
pub(super) struct Asking {
    pub(super) first: Psn,
    /// How far the engine's clock is ahead of the capture's.
    pub(super) ahead: Duration,
    /// How often each side sent each PSN: ours, and the captured side.
    ours: BTreeMap<u32, u32>,
    theirs: BTreeMap<u32, u32>,
    /// PSNs that ours has sent, and that were not refused since.
    under_way: BTreeSet<u32>,
    /// PSNs before it are acknowledged.
    acknowledged: u32,
    /// Packet that the captured side sent last.
    last: Option<u32>,
    /// The captured side has got a reason to go back.
    told: bool,
    /// Ours got an RNR NAK for this PSN and has sent nothing since.
    pausing: Option<u32>,
    /// The frame of the NAK that ends the connection.
    refused: Option<u64>,
}

/// Repetition by a request of ours.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Repetition {
    /// It was sent before, and refused since.
    pub(super) refused: bool,
    /// It is the first one after the pause of an RNR NAK, and not what that refused.
    pub(super) astray: bool,
}

/// Returns the PSN of a request, and how many it takes.
fn extent(packet: &Packet<'_>, mtu: usize) -> (Psn, u32) {
    let bth = packet.header.bth;
    let n = match (bth.opcode, packet.header.reth()) {
        (Opcode::RcReadRequest, Some(reth)) => read_packets(reth.dma_len, mtu),
        _ => 1,
    };
    (bth.psn, n)
}

impl Asking {
    fn offset(&self, psn: Psn) -> u32 {
        psn.offset_from(self.first)
    }

    /// Notes a request that ours sent.
    pub(super) fn sent(&mut self, body: &[u8], mtu: usize) -> Repetition {
        let whole = [body, &[0; 4]].concat();
        let Ok(packet) = Packet::parse(&whole) else {
            return Repetition::default();
        };
        let (psn, n) = extent(&packet, mtu);
        let from = self.offset(psn);
        let refused = self.ours.contains_key(&from) && !self.under_way.contains(&from);
        for at in from..from.saturating_add(n) {
            *self.ours.entry(at).or_default() += 1;
            self.under_way.insert(at);
        }
        let astray = self.pausing.take().is_some_and(|due| due != from);
        Repetition { refused, astray }
    }

    /// Returns whether a NAK has ended the connection.
    pub(super) fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Returns whether this frame is behind the NAK that ends the connection.
    pub(super) fn refused_before(&self, frame: u64) -> bool {
        self.refused.is_some_and(|at| frame > at)
    }

    /// Returns the captured side's first packet before `end` that ours has yet to send, or to send again.
    fn missing(&self, end: u32) -> Option<u32> {
        let due = self.theirs.range(self.acknowledged..end.max(self.acknowledged));
        due.map(|(at, _)| *at).find(|at| !self.under_way.contains(at))
    }

    /// Returns whether ours has sent what the captured responder reports a gap for: something behind it, as often as the captured
    /// side.
    fn caused_gap(&self, at: u32) -> bool {
        let mut behind = self.theirs.range(at.saturating_add(1)..);
        behind.any(|(at, n)| self.ours.get(at).is_some_and(|ours| ours >= n))
    }

    /// Notes that everything from there on was dropped.
    fn drop_from(&mut self, at: u32) {
        self.under_way.split_off(&at);
    }
}

impl Player<'_> {
    /// Lets ours send a request, because the captured side sent one.
    pub(super) fn they_request(&mut self, index: usize) {
        let event = &self.connection.events[index];
        let (at, packet) = (event.at, event.packet());
        if let Some(message) = self.messages.by_start.remove(&index) {
            self.post(self.now(at), &message, index);
        }
        self.sent[1].push(Sent {
            frame: event.frame,
            index,
            body: event.body().to_vec(),
            refused: false,
        });
        let asking = &mut self.asking;
        let psn = asking.offset(extent(&packet, self.mtu).0);
        let goes_back = asking.last.is_some_and(|last| psn <= last);
        asking.last = Some(psn);
        *asking.theirs.entry(psn).or_default() += 1;
        let told = asking.told;
        asking.told &= !goes_back;
        if self.poll(self.now(at), 1, None) > 0 {
            return;
        }
        // What is acknowledged was repeated in vain, and after the end ours is silent.
        let vain = psn < self.asking.acknowledged || self.asking.refused.is_some();
        if goes_back && !vain && (!told || self.asking.pausing.is_some()) && !self.run_timer(at) {
            let expected = format!("PSN {} again, because the timer ran out", packet.header.bth.psn);
            self.differ(index, Kind::NotRepeated, (Some(expected), None));
        }
    }

    /// Lets the engine's timers run out until it sends a request: after an RNR NAK it is one timer.
    fn run_timer(&mut self, at: Instant) -> bool {
        for _ in 0..if self.asking.pausing.is_some() { 1 } else { STAGES } {
            let now = self.now(at);
            let Some(due) = self.qp.next_timeout() else {
                return false;
            };
            self.asking.ahead += due.saturating_since(now);
            let now = self.now(at);
            let (qp, mut ctx) = self.ctx(now);
            qp.handle_timeout(&mut ctx);
            if self.poll(now, 1, None) > 0 {
                return true;
            }
        }
        false
    }

    /// Gives ours an answer that the captured side got, if it is one to what ours sent.
    pub(super) fn get_answer(&mut self, index: usize) {
        let event = &self.connection.events[index];
        let packet = event.packet();
        let (psn, class) = (packet.header.bth.psn, packet.header.bth.opcode.info().class);
        let at = self.asking.offset(psn);
        match packet.header.aeth().map(|a| a.syndrome) {
            Some(Syndrome::Rnr(_)) => {
                self.asking.told = true;
                if self.asking.under_way.contains(&at) {
                    self.give_acknowledging(index, at);
                    self.asking.drop_from(at);
                    self.asking.pausing = Some(at);
                }
            }
            Some(Syndrome::Nak(NakCode::PsnSequenceError)) => {
                self.asking.told = true;
                if self.asking.caused_gap(at) {
                    self.give_acknowledging(index, at);
                    self.asking.drop_from(at);
                }
            }
            Some(Syndrome::Nak(_)) => {
                self.give_acknowledging(index, at);
                self.asking.refused.get_or_insert(event.frame);
            }
            // A response of which one before is missing is not taken, and the captured side asks again.
            _ if class == Class::ReadResponse && self.asking.acknowledged < at && !opens(&packet) => {
                self.asking.told = true;
                self.give(index);
            }
            _ => self.give_acknowledging(index, at.saturating_add(1)),
        }
    }

    /// Gives ours an answer that acknowledges all PSNs before `end`, once ours has sent them.
    fn give_acknowledging(&mut self, index: usize, end: u32) {
        let at = self.connection.events[index].at;
        // An old one acknowledges nothing; what it says is the engine's to judge.
        if end > self.asking.acknowledged && end < 1 << 23 {
            self.catch_up(at, end);
            let missing = self.asking.missing(end);
            if let Some(psn) = missing.filter(|psn| self.asking.ours.contains_key(psn)) {
                let expected = format!("PSN {} again, which was refused", self.asking.first.add(psn));
                self.differ(index, Kind::NotRepeated, (Some(expected), None));
            }
            self.asking.acknowledged = end;
        }
        self.give(index);
    }

    fn give(&mut self, index: usize) {
        let event = &self.connection.events[index];
        let (packet, now) = (event.packet(), self.now(event.at));
        let (qp, mut ctx) = self.ctx(now);
        qp.handle_packet(&mut ctx, &packet);
    }

    /// Lets ours send what the captured side has sent before `end`, acknowledging what is there already.
    fn catch_up(&mut self, at: Instant, end: u32) {
        while let Some(missing) = self.asking.missing(end) {
            let mut sent = self.poll(self.now(at), 1, None);
            if sent == 0 && self.asking.pausing.is_some() {
                sent = usize::from(self.run_timer(at));
            }
            if sent == 0 && missing > self.asking.acknowledged {
                self.acknowledge(at, missing - 1);
                sent = self.poll(self.now(at), 1, None);
            }
            if sent == 0 {
                return;
            }
        }
    }

    /// Acknowledges everything up to this PSN, which is not one of a READ: the captured responder has it.
    fn acknowledge(&mut self, at: Instant, psn: u32) {
        let (ours, psn) = (self.qp.qpn(), self.asking.first.add(psn));
        let mut header = Header::new(Bth::new(Opcode::RcAcknowledge, Qpn::new(ours.value()), psn));
        header.aeth = Some(Aeth {
            syndrome: Syndrome::Ack(Credits::INVALID),
            msn: Msn::default(),
        });
        let mut buf = [0; MAX_HEADER_LEN];
        let packet = Packet {
            header: header.view(&mut buf),
            payload: &[],
        };
        let now = self.now(at);
        let (qp, mut ctx) = self.ctx(now);
        qp.handle_packet(&mut ctx, &packet);
        self.asking.acknowledged = self.asking.acknowledged.max(self.asking.offset(psn) + 1);
    }
}

fn opens(packet: &Packet<'_>) -> bool {
    packet.header.bth.opcode.info().position.starts()
}
