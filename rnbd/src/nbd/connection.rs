//! One client of an NBD server, without I/O.

use core::time::Duration;

use roce_verbs::Instant;
use rtrs::{client::buffers::Buffer, table};

use crate::{
    block::{Extent, Geometry},
    errno::Errno,
    nbd::{
        copy::BufferCopy,
        handshake::{Chosen, Export, Exports, Negotiation, Next, greeting},
        parse::ParseBuffer,
        payload::Target,
        pending::{NbdRequest, PendingKey},
        reply::Piece,
        state::{End, PHASES, Phase, PhaseAction, PhaseEvent, Stall},
        tls::TlsMode,
        transmission::{Step, Transmission},
    },
};

/// A client has to finish its negotiation in this time.
const HANDSHAKE_TIME: Duration = Duration::from_secs(30);
/// Answers of the negotiation that a client may leave lying before no more of its options are read, bytes.
const MAX_UNSENT_TEXT: usize = 64 << 10;

/// Bytes that a connection wants to receive.
#[derive(Debug)]
pub enum Want<'a> {
    /// Bytes, at most as many as fit.
    Bytes(&'a mut [u8]),
    /// Payload straight into a buffer, and what follows it behind: one call with two pieces (`readv`).
    Payload {
        /// Destination of the payload.
        buffer: &'a Buffer,
        /// First byte in the buffer.
        at: usize,
        /// Bytes of payload that are still to come for this buffer.
        len: usize,
        /// Destination of the bytes behind these.
        then: &'a mut [u8],
    },
    /// Nothing, for this reason. The end of the stream may be told all the same.
    Nothing(Stall),
}

/// One client.
///
/// It is given what the client sends and says what is to be sent. Requests come out of it and their results go
/// into it. Payload is not copied: a write's is received into the buffer that it is written from, a read's is sent from the
/// buffer that it was read into. Buffers are only numbers here; whoever does the I/O knows their memory.
///
/// After each call that brings something in ([`received`](Connection::received), [`eof`](Connection::eof),
/// [`give`](Connection::give), [`done`](Connection::done), [`sent`](Connection::sent), [`timeout`](Connection::timeout) and
/// their like) everything is polled until nothing comes any more, in any order:
/// - [`poll_need`](Connection::poll_need): a buffer is needed, which is given, lacking for now, or refused;
/// - [`poll_copy`](Connection::poll_copy): bytes are to be copied into or out of a buffer, at once;
/// - [`poll_request`](Connection::poll_request): a request to the device;
/// - [`poll_free`](Connection::poll_free): a buffer goes back to the session;
///
/// then [`want`](Connection::want) tells what to receive and [`gather`](Connection::gather) what to send.
///
/// With TLS all of that is what is in it. When [`wants_tls`](Connection::wants_tls) says so, whoever does the I/O makes the handshake, and
/// says [`tls_established`](Connection::tls_established), after which nothing goes in the clear, or [`tls_failed`](Connection::tls_failed).
#[derive(Debug)]
pub struct Connection {
    phase: Phase,
    /// Why it ends, once that is known.
    end: Option<End>,
    exports: Exports,
    negotiation: Negotiation,
    /// When the negotiation has to be over, all answers taken.
    deadline: Option<Instant>,
    /// Result of the negotiation.
    chosen: Option<Chosen>,
    input: ParseBuffer,
    /// Nothing comes after what is in `input`, and why.
    eof: Option<End>,
    transmission: Transmission,
}

impl Connection {
    /// A client that has just connected.
    pub fn new(now: Instant, exports: Exports) -> Self {
        Self {
            phase: Phase::Greeting,
            end: None,
            exports,
            negotiation: Negotiation::default(),
            deadline: Some(now + HANDSHAKE_TIME),
            chosen: None,
            input: ParseBuffer::new(),
            eof: None,
            transmission: Transmission::new(now, &greeting()),
        }
    }

    /// The same with TLS as this says.
    pub fn with_tls(now: Instant, exports: Exports, mode: TlsMode) -> Self {
        Self {
            negotiation: Negotiation::new(mode),
            ..Self::new(now, exports)
        }
    }

    /// How far it has come.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The number of the export that the client has chosen: requests are for its device.
    pub fn export(&self) -> Option<usize> {
        self.chosen.map(|chosen| chosen.index)
    }

    /// Requests that were read and whose replies are not sent, and bytes of their payload.
    pub fn in_flight(&self) -> (usize, u64) {
        self.transmission.in_flight()
    }

    /// A device is another one than it was: later requests are checked and split by this, and who chooses it from now on is told. A
    /// client that has chosen it before keeps the size that it was told, since NBD has no way to tell it another: what is beyond the
    /// end of a device that has shrunk is refused (ENOSPC for writes, EINVAL for others), and what a device has grown by is out of
    /// reach until the client connects again.
    pub fn set_geometry(&mut self, export: usize, geometry: Geometry) {
        self.exports.set_geometry(export, geometry);
        if self.export() == Some(export) {
            self.transmission.set_geometry(geometry);
        }
    }

    /// One more export, with the next number, for a client that has not chosen yet.
    pub fn offer(&mut self, export: Export) {
        self.exports.offer(export);
    }

    /// An export can't be chosen any more. A client that has chosen it is not let go by this: see [`stop`](Self::stop).
    pub fn withdraw(&mut self, export: usize) {
        self.exports.withdraw(export);
    }

    /// Returns what to receive. When a call has brought `n` bytes, [`received`](Self::received) comes before any other call.
    pub fn want(&mut self) -> Want<'_> {
        self.advance();
        if let Some(stall) = self.stall() {
            return Want::Nothing(stall);
        }
        match self.transmission.target() {
            Some((Target::Buffer(buffer, at), len)) => Want::Payload {
                buffer,
                at,
                len,
                then: self.input.room(),
            },
            Some((Target::Bytes(bytes), _)) => Want::Bytes(bytes),
            None => Want::Bytes(self.input.room()),
        }
    }

    /// Why nothing is to be received.
    fn stall(&self) -> Option<Stall> {
        if self.eof.is_some() {
            return Some(Stall::Closing);
        }
        match self.phase {
            Phase::Greeting => None,
            Phase::Options | Phase::Secured => self.is_talked_at().then_some(Stall::Answers),
            Phase::Handshake => Some(Stall::Handshake),
            Phase::Transmission => self.transmission.stall(&self.input),
            Phase::Draining | Phase::Ended => Some(Stall::Closing),
        }
    }

    /// Whether the client asks without taking the answers.
    fn is_talked_at(&self) -> bool {
        self.transmission.out().unsent_text() >= MAX_UNSENT_TEXT
    }

    /// `n` bytes have come where [`want`](Self::want) said.
    pub fn received(&mut self, now: Instant, n: usize) {
        self.transmission.set_now(now);
        let behind = self.transmission.received(n, &self.input);
        self.input.filled(behind);
        self.advance();
    }

    /// The client sends no more: what it has sent is done and answered.
    pub fn eof(&mut self, now: Instant) {
        self.end_of_input(now, End::Left);
    }

    /// The server stops: nothing more is received. What has come whole is done and answered. So that what lies in the socket
    /// is answered as well, its receiving side can be shut down and read to its end instead ([`eof`](Self::eof)).
    pub fn stop(&mut self, now: Instant) {
        self.end_of_input(now, End::Stopped);
    }

    fn end_of_input(&mut self, now: Instant, why: End) {
        self.transmission.set_now(now);
        self.eof.get_or_insert(why);
        self.advance();
    }

    /// The socket has failed, or there is no more time for the client: nothing more is sent. Requests that the device has
    /// begun with are waited for.
    pub fn cut(&mut self, now: Instant) {
        self.transmission.set_now(now);
        self.cut_off(End::Broken);
        self.advance();
    }

    /// The handshake of TLS is to begin: what is said in the clear has been sent. What comes from here on is not the connection's.
    pub fn wants_tls(&self) -> bool {
        self.phase == Phase::Handshake && !self.has_output()
    }

    /// Marks the TLS handshake as done: all bytes pass through TLS from here on. Nothing follows from it unless the
    /// connection [wants](Self::wants_tls) it.
    pub fn tls_established(&mut self, now: Instant) {
        self.transmission.set_now(now);
        if self.wants_tls() {
            self.step(PhaseEvent::Secured);
        }
        self.advance();
    }

    /// TLS has failed, and with it the connection: as [`cut`](Self::cut).
    pub fn tls_failed(&mut self, now: Instant, why: String) {
        self.transmission.set_now(now);
        self.cut_off(End::Tls(why));
        self.advance();
    }

    /// Bytes of a buffer that is needed. To be followed by [`give`](Self::give), [`lack`](Self::lack) or
    /// [`refuse`](Self::refuse).
    pub fn poll_need(&mut self) -> Option<usize> {
        self.advance();
        self.transmission.need(&self.input)
    }

    /// Here is a buffer. One that is not needed, or is too small, comes out of [`poll_free`](Self::poll_free).
    pub fn give(&mut self, now: Instant, buffer: Buffer) {
        self.transmission.set_now(now);
        self.advance();
        self.transmission.give(buffer, &self.input);
        self.advance();
    }

    /// There is no buffer for now; it is asked for again. What would have to hold some buffers while it waits for more goes
    /// another way: two clients could each hold what the other waits for.
    pub fn lack(&mut self) {
        self.transmission.lack();
        self.advance();
    }

    /// There is no buffer, and will be none: the request fails.
    pub fn refuse(&mut self, now: Instant, e: Errno) {
        self.transmission.set_now(now);
        self.transmission.refuse(e, &self.input);
        self.advance();
    }

    /// A copy that is to be made before any other call.
    pub fn poll_copy(&mut self) -> Option<BufferCopy<'_>> {
        self.advance();
        self.transmission.poll_copy(&mut self.input)
    }

    /// The next request. A read or write that is longer than the device's largest transfer comes in parts.
    pub fn poll_request(&mut self) -> Option<NbdRequest> {
        self.advance();
        self.transmission.poll_request()
    }

    /// A request is over that is no [block status](Self::status). Its buffer comes along unless it was lost.
    ///
    /// `losses`: how often the device had lost acknowledged writes by then.
    pub fn done(
        &mut self,
        now: Instant,
        key: PendingKey,
        result: Result<(), Errno>,
        data: Option<Buffer>,
        losses: u64,
    ) {
        self.transmission.set_now(now);
        self.transmission.done(key, result, data, losses);
        self.advance();
    }

    /// A block status is over. The device need not tell of all of the range, and if it tells of nothing, all may be data.
    pub fn status(&mut self, now: Instant, key: PendingKey, result: Result<&[Extent], Errno>) {
        self.transmission.set_now(now);
        self.transmission.status(key, result);
        self.advance();
    }

    /// Appends what is to be sent next: up to 64 replies, and until `out` has 1024 pieces.
    pub fn gather<'a>(&'a self, out: &mut Vec<Piece<'a>>) {
        self.transmission.out().gather(out);
    }

    /// Whether something is to be sent.
    pub fn has_output(&self) -> bool {
        !self.transmission.out().is_empty()
    }

    /// The first `n` bytes of what [`gather`](Self::gather) gave are sent.
    pub fn sent(&mut self, now: Instant, n: usize) {
        self.transmission.set_now(now);
        self.transmission.sent(n);
        if self.chosen.is_some() && self.transmission.out().unsent_text() == 0 {
            self.deadline = None;
        }
        self.advance();
    }

    /// A buffer that goes back to the session. They come out when the connection has [ended](Self::ended), too.
    pub fn poll_free(&mut self) -> Option<Buffer> {
        self.advance();
        self.transmission.poll_free()
    }

    /// When [`timeout`](Self::timeout) is to be called at the latest.
    pub fn next_timeout(&self) -> Option<Instant> {
        [self.deadline, self.transmission.deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Looks whether a time has come.
    pub fn timeout(&mut self, now: Instant) {
        self.transmission.set_now(now);
        if self.deadline.is_some_and(|due| due <= now) {
            self.cut_off(End::TimedOut);
        }
        self.transmission.timeout();
        self.advance();
    }

    /// Why it has ended, once it has: nothing is under way, and the socket may be closed.
    pub fn ended(&self) -> Option<&End> {
        self.end.as_ref().filter(|_| self.phase == Phase::Ended)
    }

    fn step(&mut self, event: PhaseEvent) {
        let Some((next, actions)) = table::step(PHASES, self.phase, event) else {
            debug_assert!(false, "{event:?} in {:?}", self.phase);
            return;
        };
        self.phase = next;
        for action in actions {
            self.act(*action);
        }
    }

    fn act(&mut self, action: PhaseAction) {
        match action {
            PhaseAction::TakeTerms => {
                if let Some(chosen) = &self.chosen
                    && let Some(export) = self.exports.get(chosen.index)
                {
                    self.transmission.set_terms(chosen, export.geometry.size);
                    self.transmission.set_geometry(export.geometry);
                }
            }
            PhaseAction::StopReading => {
                let stopped = self.eof == Some(End::Stopped);
                let why = if stopped { Errno::ESHUTDOWN } else { Errno::EIO };
                self.transmission.give_up(why);
            }
            PhaseAction::DropRequests => self.transmission.drop_requests(),
            PhaseAction::DropReplies => self.transmission.close_output(),
            PhaseAction::Report => {
                self.deadline = None;
                if let Some(end) = self.end.as_ref().filter(|e| e.is_fault()) {
                    tracing::debug!("NBD client: {end}");
                }
            }
        }
    }

    /// Reading ends, for this reason.
    fn finish(&mut self, why: End) {
        self.end.get_or_insert(why);
        self.step(PhaseEvent::InputEnded);
    }

    fn cut_off(&mut self, why: End) {
        if self.phase != Phase::Ended {
            self.end.get_or_insert(why);
            self.deadline = None;
            self.step(PhaseEvent::Cut);
        }
    }

    /// More bytes of this are needed. If the client has left, none will come.
    fn starved(&mut self, what: &'static str, begun: bool) -> bool {
        if let Some(why) = self.eof.clone() {
            self.finish(match why {
                End::Left if begun => End::CutShort(what),
                why => why,
            });
        }
        false
    }

    /// Goes as far as what has come allows.
    fn advance(&mut self) {
        self.transmission.settle();
        let mut on = true;
        while on {
            on = match self.phase {
                Phase::Greeting | Phase::Options | Phase::Secured => self.negotiate(),
                Phase::Handshake => self.starved("the handshake of TLS", true),
                Phase::Transmission => self.transmit(),
                Phase::Draining | Phase::Ended => false,
            };
        }
        if self.phase == Phase::Draining && self.transmission.is_idle() {
            self.step(PhaseEvent::Idle);
        }
    }

    /// One step of the negotiation. `false`: it can't go on.
    fn negotiate(&mut self) -> bool {
        if self.is_talked_at() {
            return false;
        }
        let greeting = self.phase == Phase::Greeting;
        let next = match greeting {
            true => self.negotiation.flags(&mut self.input),
            false => {
                let out = self.transmission.text();
                self.negotiation.option(&mut self.input, &self.exports, out)
            }
        };
        match next {
            Next::More => {
                let begun = greeting || self.negotiation.has_begun(&self.input);
                return self.starved("the negotiation", begun);
            }
            Next::Option if greeting => self.step(PhaseEvent::Flags),
            Next::Option => {}
            Next::StartTls => self.step(PhaseEvent::StartTls),
            Next::Transmit(chosen) => {
                self.chosen = Some(chosen);
                self.step(PhaseEvent::Chosen);
            }
            Next::Abort => self.finish(End::Left),
            Next::Bad(why) => self.finish(End::Protocol(why)),
        }
        true
    }

    /// One step of the transmission. `false`: it can't go on.
    fn transmit(&mut self) -> bool {
        match self.transmission.work(&mut self.input) {
            Step::On => true,
            Step::Wait => false,
            Step::Starved(what, begun) => self.starved(what, begun),
            Step::End(why) => {
                self.finish(why);
                true
            }
        }
    }
}
