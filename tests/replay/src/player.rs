//! Our engine in the place of one side.

mod requester;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use roce_bth::{Class, ExtHeader, Header, MAX_HEADER_LEN, NakCode, Opcode, Packet, Syndrome};
use roce_icrc::Flow;
use roce_qp::{CompletionQueue, Counters, Ctx, FreePaces, QpConfig, QueuePair, TxKind, TxSink, Window, WindowConfig};
use roce_verbs::mem::{MemoryTable, Region};
use roce_verbs::{
    AccessFlags, AddressVector, AsyncEvent, Completion, DeviceLimits, Instant, Mtu, Payload, Psn, QpAttr, QpCaps,
    QpType, Qpn, RecvWr, RnrTimer, SendWr, Sge, Target, WcStatus,
};
use serde::Deserialize;

use requester::{Asking, Repetition};

use crate::{
    capture::{Connection, Event, is_request},
    compare::{Answers, Difference, Kind, Sent, align, describe},
    error::Error,
    model::{Model, read_packets, within},
    requests::{Messages, messages},
};

/// Settings that a capture does not show.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Bytes that a receive work request takes.
    pub receive: u32,
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
            receive: 1 << 20,
            retry_cnt: 7,
            timeout: 14,
            rnr_retry: 7,
            joined_late: false,
            ends_early: false,
        }
    }
}

/// What a replay came to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// In the order of the capture.
    pub differences: Vec<Difference>,
    /// Captured packets of the side that ours sent as well, bit for bit.
    pub equal: usize,
    /// Captured packets of the side.
    pub theirs: usize,
    /// Work requests of ours, and how many completed with success.
    pub posted: usize,
    /// Completed with success.
    pub succeeded: usize,
    /// The first status that is not success.
    pub failed: Option<WcStatus>,
    /// Memory that is not what it should be, in words.
    pub wrong_memory: Vec<String>,
}

/// Keeps packets; takes only what it is told to.
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
    side: IpAddr,
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
    /// The SEND that is coming in.
    incoming: Vec<u8>,
    /// PSN that the captured responder expects next, while it works.
    expected: Option<Psn>,
    answers: Answers,
    /// The frame being replayed.
    frame: u64,
    /// Requests of ours, and of the captured side.
    sent: [Vec<Sent>; 2],
    asking: Asking,
    /// The PSN that the captured responder refused with an RNR NAK last.
    not_ready: Option<Psn>,
    msn_offset: Option<u32>,
    outcome: Outcome,
}

/// Puts our engine in the place of the side with this address.
///
/// # Errors
/// When the capture is not such a side's view.
pub fn play(connection: &Connection, side: IpAddr, mtu: usize, settings: &Settings) -> Result<Outcome, Error> {
    let mut player = Player::new(connection, side, mtu, settings)?;
    for index in 0..connection.events.len() {
        let event = &connection.events[index];
        player.frame = event.frame;
        player.outcome.theirs += usize::from(event.src.ip() == side);
        let request = is_request(event.packet().header.bth.opcode);
        match (event.src.ip() == side, request) {
            (true, true) => player.they_request(index),
            (true, false) => player.they_answer(index),
            (false, true) => player.get_request(index),
            (false, false) => player.get_answer(index),
        }
    }
    Ok(player.finish())
}

fn unsuitable(what: &str) -> impl FnOnce(String) -> Error {
    move |e| Error::Unsuitable(format!("{what}: {e}"))
}

impl<'a> Player<'a> {
    fn new(connection: &'a Connection, side: IpAddr, mtu: usize, settings: &'a Settings) -> Result<Self, Error> {
        let (ours, theirs) = match connection.ends {
            [a, b] if a.0 == side => (a, b),
            [a, b] => (b, a),
        };
        let events = &connection.events;
        let messages = messages(
            (0..)
                .zip(events)
                .filter(|(_, e)| e.src.ip() == side && is_request(e.packet().header.bth.opcode)),
            mtu,
        )?;
        let mem = MemoryTable::new([7; 32], &DeviceLimits::software(1));
        let pd = mem.alloc_pd().map_err(|e| Error::Unsuitable(e.to_string()))?;
        let refused = refused(events, side);
        let good = events
            .iter()
            .filter(|e| e.src.ip() != side)
            .map(Event::packet)
            .filter(|p| is_request(p.header.bth.opcode) && refused.is_none_or(|at| p.header.bth.psn.is_before(at)));
        let model = Model::new(&mem, pd, good)?;
        let size: usize = messages
            .by_start
            .values()
            .map(|m| m.data.len().next_multiple_of(8))
            .sum();
        let all = AccessFlags::LOCAL_WRITE;
        let region = |len: usize| {
            mem.alloc_region(pd, len.max(8), all)
                .map_err(|e| Error::Unsuitable(e.to_string()))
        };
        let (local, receive) = (region(size)?, region(settings.receive as usize)?);
        let send_cq = CompletionQueue::new(1, 1 << 16, None);
        let recv_cq = CompletionQueue::new(2, 1 << 16, None);
        let caps = QpCaps {
            max_send_wr: 4096,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let qp = QueuePair::new(QpConfig {
            qpn: Qpn::new(ours.1),
            pd,
            qp_type: QpType::Rc,
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            caps,
            signal_all: true,
            max_msg_size: 1 << 31,
            port_mtu: roce_verbs::Mtu::B4096,
            srq: None,
            xrcd: None,
        })
        .map_err(|e| Error::Unsuitable(e.to_string()))?;
        let wide = 1 << 30;
        let mut player = Self {
            connection,
            side,
            mtu,
            settings,
            mem,
            qp,
            window: Window::new(WindowConfig {
                initial: wide,
                min: wide,
                max: wide,
            }),
            paces: FreePaces::new(None),
            events: VecDeque::new(),
            counters: Counters::default(),
            send_cq,
            recv_cq,
            model,
            messages,
            local,
            local_used: 0,
            reads: Vec::new(),
            receive,
            incoming: Vec::new(),
            expected: None,
            answers: Answers::default(),
            frame: 0,
            sent: [Vec::new(), Vec::new()],
            asking: Asking::default(),
            not_ready: None,
            msn_offset: None,
            outcome: Outcome::default(),
        };
        player.connect(ours, theirs)?;
        Ok(player)
    }

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

    /// Brings the queue pair to RTS with the capture's numbers.
    fn connect(&mut self, ours: (IpAddr, u32), theirs: (IpAddr, u32)) -> Result<(), Error> {
        let mine = |e: &&Event| e.src.ip() == self.side;
        // The lowest: the very first packet may be lost.
        let first = |events: &mut dyn Iterator<Item = &Event>| {
            let asked = events.filter(|e| is_request(e.packet().header.bth.opcode));
            asked
                .map(|e| e.packet().header.bth.psn)
                .reduce(|a, b| if b.is_before(a) { b } else { a })
        };
        let rq_psn = first(&mut self.connection.events.iter().filter(|e| !mine(e)));
        let sq_psn = first(&mut self.connection.events.iter().filter(mine));
        self.asking.first = sq_psn.unwrap_or_default();
        self.expected = rq_psn;
        let rnr = self
            .connection
            .events
            .iter()
            .filter(mine)
            .find_map(|e| match e.packet().header.aeth()?.syndrome {
                Syndrome::Rnr(timer) => Some(timer),
                _ => None,
            });
        let path_mtu = Mtu::from_bytes(self.mtu);
        let path_mtu = path_mtu.ok_or_else(|| unsuitable("queue pair")(format!("path MTU {}", self.mtu)))?;
        let usual = QpAttr::to_rts(AddressVector::new(ours.0, theirs.0), path_mtu, Qpn::new(theirs.1));
        let way = QpAttr {
            rq_psn: Some(rq_psn.unwrap_or_default()),
            sq_psn: Some(sq_psn.unwrap_or_default()),
            max_dest_rd_atomic: Some(16),
            max_rd_atomic: Some(16),
            min_rnr_timer: Some(rnr.unwrap_or(RnrTimer::new(12))),
            timeout: Some(self.settings.timeout),
            retry_cnt: Some(self.settings.retry_cnt),
            rnr_retry: Some(self.settings.rnr_retry),
            // What is refused is refused for the region's rights.
            access: usual
                .access
                .map(|access| access | AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT),
            ..usual
        };
        for attr in way.steps(QpType::Rc) {
            let (qp, mut ctx) = self.ctx(Instant::ZERO);
            qp.modify(&mut ctx, &attr)
                .map_err(|e| unsuitable("queue pair")(e.to_string()))?;
        }
        // What the captured side sends does not depend on the peer's source port, which it never checks.
        self.qp.set_peer_source(0);
        Ok(())
    }

    fn differ(&mut self, index: usize, kind: Kind, detail: String) {
        let frame = self.connection.events[index].frame;
        self.outcome.differences.push(Difference { frame, kind, detail });
    }

    /// A packet of ours is what the captured side sent: then its ICRC must be, too.
    fn same(&mut self, index: usize) {
        let event = &self.connection.events[index];
        let icrc = Flow::try_from((event.src, event.dst)).map(|f| f.compute(event.identification, event.body()));
        match icrc {
            Ok(icrc) if event.bytes.ends_with(&icrc.to_le_bytes()) => self.outcome.equal += 1,
            other => self.differ(index, Kind::Icrc, format!("ours {other:x?}")),
        }
    }

    /// The engine's time at a time of the capture.
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
                    let (frame, kind) = (self.frame, Kind::NotRepeated);
                    if astray {
                        let detail = format!("ours goes on elsewhere: {}", describe(&body));
                        self.outcome.differences.push(Difference { frame, kind, detail });
                    }
                    self.sent[0].push(Sent { frame, body, refused });
                }
                false => {
                    let body = self.with_msn(body);
                    self.answers.ready.push_back((body, duplicate));
                }
            }
        }
        self.sent[0].len() - before
    }

    /// In a capture that begins in the middle, messages are counted from there.
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

    fn post(&mut self, now: Instant, message: &crate::requests::Message, index: usize) {
        let (at, len) = (self.local_used, message.data.len());
        self.local_used += len.next_multiple_of(8);
        if self.local.write(at, &message.data).is_err() {
            self.differ(index, Kind::OnlyTheirRequest, "no memory for a work request".to_owned());
            return;
        }
        if matches!(message.op, roce_verbs::SendOp::Read(_)) {
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
            self.differ(index, Kind::OnlyTheirRequest, format!("ours could not post it: {e}"));
        }
    }

    /// The captured side answered: ours must have as well.
    fn they_answer(&mut self, index: usize) {
        let event = &self.connection.events[index];
        if self.settings.joined_late
            && self.msn_offset.is_none()
            && let Some(theirs) = event.packet().header.aeth()
            && let Some((body, _)) = self.answers.ready.front()
        {
            let mut whole = body.clone();
            whole.extend([0; 4]);
            let ours = Packet::parse(&whole).ok().and_then(|p| p.header.aeth());
            self.msn_offset = ours.map(|a| theirs.msn.offset_from(a.msn));
            let ready: Vec<_> = self.answers.ready.drain(..).collect();
            self.answers.ready = ready.into_iter().map(|(b, d)| (self.with_msn(b), d)).collect();
        }
        let header = event.packet().header;
        let refused_again = header
            .aeth()
            .is_some_and(|a| a.syndrome == Syndrome::Nak(NakCode::PsnSequenceError))
            && self.not_ready == Some(header.bth.psn)
            && self.expected == self.not_ready;
        if let Some(Syndrome::Rnr(_)) = header.aeth().map(|a| a.syndrome) {
            self.not_ready = Some(header.bth.psn);
        }
        let (found, equal) = self.answers.match_one(event.body(), self.expected);
        for (kind, detail) in found {
            let kind = match kind {
                Kind::OnlyTheirAnswer if refused_again => Kind::GapAfterRnr,
                kind => kind,
            };
            self.differ(index, kind, detail);
        }
        if equal {
            self.same(index);
        }
    }

    /// The captured side was sent a request: so is ours.
    fn get_request(&mut self, index: usize) {
        let event = &self.connection.events[index];
        let packet = event.packet();
        let (header, now) = (packet.header, self.now(event.at));
        let info = header.bth.opcode.info();
        let new = Some(header.bth.psn) == self.expected;
        let duplicate = self
            .expected
            .filter(|e| header.bth.psn.is_before(*e))
            .map(|_| header.bth.psn);
        let refusal = self.refusal(index);
        let original = self.preset(index);
        let takes = match info.class {
            Class::Send => info.position.starts(),
            Class::Write => info.has(ExtHeader::Imm),
            _ => false,
        };
        if new && takes && !matches!(refusal, Some(Syndrome::Rnr(_))) && self.qp.recv_queue_len() == 0 {
            self.post_receive(now, index);
        }
        if new && refusal.is_none() {
            self.model.execute(&packet, original);
            let n = match info.class {
                Class::ReadRequest => read_packets(header.reth().map_or(0, |r| r.dma_len), self.mtu),
                _ => 1,
            };
            self.expected = Some(header.bth.psn.add(n));
            if info.class == Class::Send {
                if info.position.starts() {
                    self.incoming.clear();
                }
                self.incoming.extend(packet.payload);
            }
        }
        let translated = self.model.translate(&packet);
        let mut buf = [0; MAX_HEADER_LEN];
        let given = Packet {
            header: translated.view(&mut buf),
            payload: packet.payload,
        };
        let (qp, mut ctx) = self.ctx(now);
        qp.handle_packet(&mut ctx, &given);
        self.poll(now, 0, duplicate);
        self.take_receives();
    }

    fn post_receive(&mut self, now: Instant, index: usize) {
        let sge = Sge {
            addr: self.receive.addr(),
            length: self.settings.receive,
            lkey: self.receive.lkey(),
        };
        let (qp, mut ctx) = self.ctx(now);
        let posted = qp.post_recv(
            &mut ctx,
            &RecvWr {
                wr_id: index as u64,
                sges: &[sge],
            },
        );
        if let Err(e) = posted {
            self.differ(index, Kind::Answer, format!("receive: {e}"));
        }
    }

    /// Compares what a receive got with the SEND's payload.
    fn take_receives(&mut self) {
        let mut done: Vec<Completion> = Vec::new();
        let _ = self.recv_cq.poll(&mut done, 16);
        for completion in done {
            if completion.status == WcStatus::Success && completion.opcode == roce_verbs::WcOpcode::Recv {
                let mut bytes = vec![0; completion.byte_len as usize];
                let read = self.receive.read(0, &mut bytes);
                if read.is_err() || bytes != self.incoming {
                    let text = format!("the SEND before frame index {} was received wrong", completion.wr_id);
                    self.outcome.wrong_memory.push(text);
                }
            }
        }
    }

    /// How the captured side refused the request, if it did so before it got the same again.
    fn refusal(&self, index: usize) -> Option<Syndrome> {
        let events = &self.connection.events;
        let psn = events[index].packet().header.bth.psn;
        let rest = events.iter().skip(index + 1);
        let until = rest.take_while(|e| {
            let header = e.packet().header;
            e.src.ip() == self.side || !is_request(header.bth.opcode) || header.bth.psn != psn
        });
        until
            .filter(|e| e.src.ip() == self.side && e.packet().header.bth.psn == psn)
            .filter_map(|e| e.packet().header.aeth())
            .map(|a| a.syndrome)
            .find(|s| !matches!(s, Syndrome::Ack(_)))
    }

    /// Gives our memory what the captured responder answered with: READ responses, and an atomic's former value.
    fn preset(&mut self, index: usize) -> Option<u64> {
        let events = &self.connection.events;
        let header = events[index].packet().header;
        let psn = header.bth.psn;
        let answers = || {
            let mine = events.iter().skip(index + 1).filter(|e| e.src.ip() == self.side);
            mine.map(|e| (e.packet().header, e.packet().payload.to_vec()))
        };
        match header.bth.opcode.info().class {
            Class::ReadRequest => {
                let reth = header.reth()?;
                let n = read_packets(reth.dma_len, self.mtu);
                let mut seen = BTreeSet::new();
                let found: Vec<_> = answers()
                    .filter(|(h, _)| h.bth.opcode.info().class == Class::ReadResponse && within(h.bth.psn, psn, n))
                    .filter(|(h, _)| seen.insert(h.bth.psn.value()))
                    .collect();
                for (h, payload) in found {
                    let offset = u64::from(h.bth.psn.offset_from(psn)) * self.mtu as u64;
                    self.model.preset(reth.rkey, reth.va.wrapping_add(offset), &payload);
                }
                None
            }
            Class::Atomic if Some(psn) == self.expected => {
                let eth = header.atomic_eth()?;
                let original = answers().find(|(h, _)| h.bth.psn == psn)?.0.atomic_ack()?;
                self.model.preset(eth.rkey, eth.va, &original.to_ne_bytes());
                Some(original)
            }
            _ => None,
        }
    }

    fn finish(mut self) -> Outcome {
        let last = self.connection.events.len().saturating_sub(1);
        for (kind, detail) in self.answers.rest() {
            self.differ(last, kind, detail);
        }
        if !self.settings.ends_early {
            // Nothing comes any more: ours has nothing to send either, but what silence makes it repeat.
            self.poll(self.now(self.connection.events[last].at), usize::MAX, None);
        }
        let aligned = align(&self.sent[1], &self.sent[0]);
        for mut difference in aligned.differences {
            let only_theirs = matches!(difference.kind, Kind::OnlyTheirRequest | Kind::OnlyTheirRepeat);
            if only_theirs && self.asking.refused_before(difference.frame) {
                difference.kind = Kind::AfterRefusal;
            }
            self.outcome.differences.push(difference);
        }
        for index in 0..self.connection.events.len() {
            if aligned.equal.contains(&self.connection.events[index].frame) {
                self.same(index);
            }
        }
        if !self.settings.ends_early {
            self.drain(last);
        }
        let mut done: Vec<Completion> = Vec::new();
        let _ = self.send_cq.poll(&mut done, 1 << 16);
        self.outcome.succeeded = done.iter().filter(|c| c.status == WcStatus::Success).count();
        self.outcome.failed = done.iter().map(|c| c.status).find(|s| *s != WcStatus::Success);
        self.outcome.wrong_memory.extend(self.model.wrong());
        self.check_reads();
        self.outcome
    }

    /// Lets retries run out, if anything is left.
    fn drain(&mut self, last: usize) {
        let mut now = self.now(self.connection.events[last].at);
        for _ in 0..10_000 {
            let Some(at) = self.qp.next_timeout() else { break };
            now = now.max(at);
            let (qp, mut ctx) = self.ctx(now);
            qp.handle_timeout(&mut ctx);
            self.poll(now, usize::MAX, None);
        }
    }

    /// READs must have brought what the captured responses carried.
    fn check_reads(&mut self) {
        let mut responses = BTreeMap::<u32, Vec<u8>>::new();
        for event in self.connection.events.iter().filter(|e| e.src.ip() != self.side) {
            let packet = event.packet();
            if packet.header.bth.opcode.info().class == Class::ReadResponse {
                responses.insert(packet.header.bth.psn.value(), packet.payload.to_vec());
            }
        }
        for (at, len, psn, packets) in std::mem::take(&mut self.reads) {
            let bytes: Vec<u8> = (0..packets)
                .filter_map(|i| responses.get(&psn.add(i).value()))
                .flatten()
                .copied()
                .collect();
            let mut got = vec![0; len];
            let read = self.local.read(at, &mut got);
            if bytes.len() == len && (read.is_err() || got != bytes) {
                let text = format!("the READ at PSN {} brought other bytes", psn.value());
                self.outcome.wrong_memory.push(text);
            }
        }
    }
}

/// The PSN of the first request that the side refused for good.
fn refused(events: &[Event], side: IpAddr) -> Option<Psn> {
    let mine = events.iter().filter(|e| e.src.ip() == side).map(|e| e.packet().header);
    mine.filter_map(|h| Some((h.bth.psn, h.aeth()?.syndrome)))
        .find(|(_, s)| matches!(s, Syndrome::Nak(code) if *code != NakCode::PsnSequenceError))
        .map(|(psn, _)| psn)
}
