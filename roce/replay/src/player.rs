//! Our engine in the place of one side.

mod finish;
mod index;
mod requester;
mod responder;
mod setup;

use std::{collections::VecDeque, sync::Arc};

use roce_bth::{Header, Opcode, Packet};
use roce_icrc::Flow;
use roce_qp::{CompletionQueue, Counters, Ctx, FreePaces, QueuePair, TxKind, TxSink, Window};
use roce_verbs::mem::{MemoryTable, Region};
use roce_verbs::{AsyncEvent, Completion, Instant, Payload, Psn, SendOp, SendWr, Sge, Target, WcStatus};
use serde::Deserialize;

use index::Index;
use requester::{Asking, Repetition};

use crate::{
    compare::{Answers, Difference, Sent, Texts, describe},
    connection::{Connection, is_request},
    error::Error,
    kind::Kind,
    model::{MAX_MEMORY, Model},
    requests::{Message, Messages},
};

/// Entries of a completion queue.
const CQ_LEN: usize = 1 << 16;

/// Settings that a capture does not show.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Bytes that a receive work request takes; `None`: as many as the longest SEND has, 1 MiB at least.
    pub receive: Option<u32>,
    /// Retries of the requester.
    pub retry_cnt: u8,
    /// Local ACK timeout code of our queue pair.
    pub timeout: u8,
    /// RNR retries of the requester; 7: for ever.
    pub rnr_retry: u8,
    /// The capture begins in the middle of the connection: message sequence numbers are compared from there.
    pub joined_late: bool,
    /// The capture ends before the connection does: work requests may be left.
    pub ends_early: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            receive: None,
            retry_cnt: 7,
            timeout: 14,
            rnr_retry: 7,
            joined_late: false,
            ends_early: false,
        }
    }
}

/// Result of a replay.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Differences: of answers, then of requests.
    pub differences: Vec<Difference>,
    /// Captured packets of the side that ours sent as well, bit for bit.
    pub equal: usize,
    /// Captured packets of the side.
    pub theirs: usize,
    /// Work requests of ours.
    pub posted: usize,
    /// Completed with success.
    pub succeeded: usize,
    /// The first status that is not success.
    pub failed: Option<WcStatus>,
    /// Memory that is not what it should be, in words.
    pub wrong_memory: Vec<String>,
    /// Messages that the peer had sent before the capture, if [`Settings::joined_late`] let them be found.
    pub messages_before: u32,
}

/// Sink that keeps packets, and takes as many requests as it is told to.
#[derive(Default)]
struct Sink {
    sent: Vec<Vec<u8>>,
    pending: Vec<u8>,
    /// Requests that may still be sent.
    requests: usize,
}

impl TxSink for Sink {
    fn reserve(&mut self, kind: TxKind, len: usize) -> Option<&mut [u8]> {
        if matches!(kind, TxKind::Request | TxKind::Retransmission) && self.requests == 0 {
            return None;
        }
        self.pending = vec![0xee; len];
        Some(&mut self.pending)
    }

    fn commit(&mut self) {
        let bytes = std::mem::take(&mut self.pending);
        if Opcode::from_byte(bytes[0]).is_some_and(is_request) {
            self.requests = self.requests.saturating_sub(1);
        }
        self.sent.push(bytes);
    }
}

struct Player<'a> {
    connection: &'a Connection,
    side: usize,
    index: Index,
    mtu: usize,
    settings: &'a Settings,
    mem: MemoryTable,
    qp: QueuePair,
    window: Window,
    paces: FreePaces,
    events: VecDeque<AsyncEvent>,
    counters: Counters,
    send_cq: Arc<CompletionQueue>,
    recv_cq: Arc<CompletionQueue>,
    model: Model,
    messages: Messages,
    /// Bytes of our work requests; each has its own.
    local: Arc<Region>,
    local_used: usize,
    /// READs: where their bytes land, and first PSN and number of responses.
    reads: Vec<(usize, usize, Psn, u32)>,
    receive: Arc<Region>,
    receive_len: u32,
    /// The SEND that is coming in, unless the captured side refused it.
    incoming: Option<Vec<u8>>,
    /// PSN that the captured responder expects next, while it works.
    expected: Option<Psn>,
    answers: Answers,
    /// Bytes of answers of ours that were not compared when they were counted last.
    answers_len: usize,
    /// The frame being replayed, and its packet's index.
    frame: u64,
    at: usize,
    /// Requests of ours, and of the captured side.
    sent: [Vec<Sent>; 2],
    asking: Asking,
    /// The PSN that the captured responder refused with an RNR NAK last.
    not_ready: Option<Psn>,
    msn_offset: Option<u32>,
    outcome: Outcome,
}

/// Puts our engine in the place of the endpoint with this index.
///
/// # Errors
/// The error says what the capture lacks for a replay.
pub fn play(connection: &Connection, side: usize, mtu: usize, settings: &Settings) -> Result<Outcome, Error> {
    connection.check(side, mtu)?;
    let mut player = Player::new(connection, side, mtu, settings)?;
    for (at, event) in connection.events.iter().enumerate() {
        (player.frame, player.at) = (event.frame, at);
        player.outcome.theirs += usize::from(event.sender == side);
        match (event.sender == side, event.is_request()) {
            (true, true) => player.they_request(at),
            (true, false) => player.they_answer(at),
            (false, true) => player.get_request(at),
            (false, false) => player.get_answer(at),
        }
        player.take_sends();
        if player.answers_len > MAX_MEMORY as usize {
            return Err(Error(format!(
                "from frame {} on, ours answers much that the capture has no answer to: answers are missing there",
                player.frame
            )));
        }
    }
    Ok(player.finish())
}

impl Player<'_> {
    fn ctx(&mut self, now: Instant) -> (&mut QueuePair, Ctx<'_>) {
        let ctx = Ctx {
            now,
            mem: &self.mem,
            window: &mut self.window,
            paces: &mut self.paces,
            events: &mut self.events,
            counters: &mut self.counters,
        };
        (&mut self.qp, ctx)
    }

    fn differ(&mut self, index: usize, kind: Kind, (expected, ours): Texts) {
        let frame = self.connection.events[index].frame;
        self.outcome.differences.push(Difference {
            frame,
            kind,
            expected,
            ours,
        });
    }

    /// Counts a packet of ours that is what the captured side sent. Then its ICRC must be, too.
    fn same(&mut self, index: usize) {
        let event = &self.connection.events[index];
        let flow = Flow::try_from((event.src, event.dst)).ok();
        let icrc = flow
            .zip(event.identification)
            .map(|(flow, id)| flow.compute(id, event.body()));
        match icrc.map(u32::to_le_bytes) {
            Some(icrc) if !event.bytes.ends_with(&icrc) => {
                let carried = &event.bytes[event.body().len()..];
                let texts = (Some(format!("ICRC {carried:02x?}")), Some(format!("ICRC {icrc:02x?}")));
                self.differ(index, Kind::Icrc, texts);
            }
            _ => self.outcome.equal += 1,
        }
    }

    /// Counts the work requests that have completed.
    fn take_sends(&mut self) {
        let mut done: Vec<Completion> = Vec::new();
        let _ = self.send_cq.poll(&mut done, CQ_LEN);
        for completion in done {
            match completion.status {
                WcStatus::Success => self.outcome.succeeded += 1,
                failed => drop(self.outcome.failed.get_or_insert(failed)),
            }
        }
    }

    /// Returns the engine's time at a time of the capture.
    fn now(&self, at: Instant) -> Instant {
        at + self.asking.ahead
    }

    /// Polls our engine; it may send `requests` requests, whose number is returned. Answers go to their queue, as answers to
    /// the duplicate of a PSN or not.
    fn poll(&mut self, now: Instant, requests: usize, duplicate: Option<Psn>) -> usize {
        let mut sink = Sink {
            requests,
            ..Sink::default()
        };
        let (qp, mut ctx) = self.ctx(now);
        qp.poll_transmit(&mut ctx, &mut sink);
        let before = self.sent[0].len();
        for body in sink.sent {
            match Opcode::from_byte(body[0]).is_some_and(is_request) {
                true => {
                    let Repetition { refused, astray } = self.asking.sent(&body, self.mtu);
                    if astray {
                        let expected = "the packet that was refused, again".to_owned();
                        self.differ(self.at, Kind::NotRepeated, (Some(expected), Some(describe(&body))));
                    }
                    self.sent[0].push(Sent {
                        frame: self.frame,
                        index: self.at,
                        body,
                        refused,
                    });
                }
                false => {
                    let body = self.with_msn(body);
                    self.answers_len += body.len();
                    self.answers.ready.push_back((body, duplicate));
                }
            }
        }
        self.sent[0].len() - before
    }

    /// Counts the messages of an answer from the beginning of a capture that begins in the middle.
    fn with_msn(&self, mut body: Vec<u8>) -> Vec<u8> {
        let mut whole = body.clone();
        whole.extend([0; 4]);
        if let (Some(offset), Ok(packet)) = (self.msn_offset, Packet::parse(&whole)) {
            let mut header = Header::from(packet.header);
            if let Some(aeth) = &mut header.aeth {
                aeth.msn = aeth.msn.add(offset);
                header.emit(&mut body);
            }
        }
        body
    }

    fn post(&mut self, now: Instant, message: &Message, index: usize) {
        let (at, len) = (self.local_used, message.data.len());
        self.local_used += len.next_multiple_of(8);
        if self.local.write(at, &message.data).is_err() {
            self.differ(
                index,
                Kind::OnlyTheirRequest,
                (None, Some("nothing, for want of memory".to_owned())),
            );
            return;
        }
        if matches!(message.op, SendOp::Read(_)) {
            self.reads.push((at, len, message.psn, message.packets));
        }
        let sge = Sge {
            addr: self.local.addr() + at as u64,
            length: len as u32,
            lkey: self.local.lkey(),
        };
        let wr = SendWr {
            wr_id: index as u64,
            op: message.op,
            flags: message.flags,
            payload: Payload::Sges(std::slice::from_ref(&sge)),
        };
        self.outcome.posted += 1;
        let (qp, mut ctx) = self.ctx(now);
        if let Err(e) = qp.post_send(&mut ctx, &wr, Target::Peer, usize::MAX) {
            self.differ(
                index,
                Kind::OnlyTheirRequest,
                (None, Some(format!("nothing: it can't be posted: {e}"))),
            );
        }
    }
}
