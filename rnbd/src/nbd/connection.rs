//! One client of an NBD server, without I/O.

use core::time::Duration;

use roce_verbs::Instant;
use rtrs::{client::buffers::Buffer, table};

use crate::{
    block::{Completion, Geometry},
    errno::Errno,
    nbd::{
        handshake::{Chosen, Export, Exports, Negotiation, Next, greeting},
        parse::ParseBuffer,
        payload::Target,
        reply::Piece,
        request::{Backend, RequestPart},
        state::{End, PHASES, Phase, PhaseAction, PhaseEvent, Stall},
        tls::TlsMode,
        transmission::{Stop, Transmission},
    },
};

/// Time for the negotiation.
const HANDSHAKE_TIME: Duration = Duration::from_secs(30);
/// Unsent answers of the negotiation, in bytes, from which on no more options are read.
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
    /// Nothing, for this reason. The end of the stream may still be reported.
    Nothing(Stall),
}

/// One client.
///
/// It is given what the client sends, submits requests to a [`Backend`], takes their [completions](Self::done), and says what to send.
/// Payload is not copied: a write's is received into the buffer that it is written from, a read's is sent from the buffer that it was
/// read into. [`want`](Self::want) says what to receive and [`gather`](Self::gather) what to send; then
/// [`received`](Self::received) and [`sent`](Self::sent) say how much was. [`poll`](Self::poll) goes on when buffers are free again, or
/// the geometry has changed.
///
/// After the client has [chosen an export](Self::export) nothing is done before the next [`poll`](Self::poll), so that its loop can get
/// the device.
///
/// With TLS this is the stream inside it. When [`wants_tls`](Self::wants_tls), its loop does the handshake, and reports
/// [`tls_established`](Self::tls_established), after which nothing is sent in clear text, or [`tls_failed`](Self::tls_failed).
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
    /// Nothing follows what is in `input`, and why.
    eof: Option<End>,
    /// Why the transmission takes no more bytes.
    stalled: Option<Stall>,
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
            stalled: None,
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
            Phase::Transmission => self.stalled,
            Phase::Draining | Phase::Ended => Some(Stall::Closing),
        }
    }

    /// Whether the client asks without taking the answers.
    fn is_talked_at(&self) -> bool {
        self.transmission.out().unsent_text() >= MAX_UNSENT_TEXT
    }

    /// `n` bytes were received where [`want`](Self::want) said.
    pub fn received(&mut self, now: Instant, n: usize, backend: &mut dyn Backend) {
        self.transmission.set_now(now);
        let behind = self.transmission.received(n);
        self.input.filled(behind);
        self.advance(backend);
    }

    /// Continues with what has arrived.
    pub fn poll(&mut self, now: Instant, backend: &mut dyn Backend) {
        // Its loop has the device now.
        self.stalled.take_if(|stall| *stall == Stall::Work);
        self.go_on(now, backend);
    }

    fn go_on(&mut self, now: Instant, backend: &mut dyn Backend) {
        self.transmission.set_now(now);
        self.advance(backend);
    }

    /// The client sends no more. What it has sent is executed and answered.
    pub fn eof(&mut self, now: Instant, backend: &mut dyn Backend) {
        self.eof.get_or_insert(End::Left);
        self.go_on(now, backend);
    }

    /// The server stops: nothing more is received. What has arrived whole is executed and answered. So that what lies in the socket
    /// is answered as well, its receiving side can be shut down and read to its end instead ([`eof`](Self::eof)).
    pub fn stop(&mut self, now: Instant, backend: &mut dyn Backend) {
        self.eof.get_or_insert(End::Stopped);
        self.go_on(now, backend);
    }

    /// The socket has failed, or the client's time is over: nothing more is sent. Requests that the device has are waited for.
    pub fn cut(&mut self, now: Instant, backend: &mut dyn Backend) {
        self.cut_off(End::Broken, backend);
        self.poll(now, backend);
    }

    /// The handshake of TLS begins now: all clear text has been sent. What is received from here on is not the connection's.
    pub fn wants_tls(&self) -> bool {
        self.phase == Phase::Handshake && !self.has_output()
    }

    /// The TLS handshake is complete: all bytes pass through TLS from here on. No effect unless the connection
    /// [wants](Self::wants_tls) it.
    pub fn tls_established(&mut self, now: Instant, backend: &mut dyn Backend) {
        if self.wants_tls() {
            self.step(PhaseEvent::Secured, backend);
        }
        self.poll(now, backend);
    }

    /// TLS has failed, and with it the connection: as [`cut`](Self::cut).
    pub fn tls_failed(&mut self, now: Instant, why: String, backend: &mut dyn Backend) {
        self.cut_off(End::Tls(why), backend);
        self.poll(now, backend);
    }

    /// A request has ended.
    pub fn done(&mut self, now: Instant, part: RequestPart, completion: Completion, backend: &mut dyn Backend) {
        self.transmission.set_now(now);
        self.transmission.done(part, completion, backend);
        self.advance(backend);
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
    pub fn sent(&mut self, now: Instant, n: usize, backend: &mut dyn Backend) {
        self.transmission.set_now(now);
        self.transmission.sent(n, backend);
        if self.chosen.is_some() && self.transmission.out().unsent_text() == 0 {
            self.deadline = None;
        }
        self.advance(backend);
    }

    /// When [`timeout`](Self::timeout) is to be called at the latest.
    pub fn next_timeout(&self) -> Option<Instant> {
        [self.deadline, self.transmission.deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Checks deadlines.
    pub fn timeout(&mut self, now: Instant, backend: &mut dyn Backend) {
        self.transmission.set_now(now);
        if self.deadline.is_some_and(|due| due <= now) {
            self.cut_off(End::TimedOut, backend);
        }
        self.transmission.timeout(backend);
        self.advance(backend);
    }

    /// Why it has ended, once it has: nothing is under way, and the socket may be closed.
    pub fn ended(&self) -> Option<&End> {
        self.end.as_ref().filter(|_| self.phase == Phase::Ended)
    }

    fn step(&mut self, event: PhaseEvent, backend: &mut dyn Backend) {
        let Some((next, actions)) = table::step(PHASES, self.phase, event) else {
            debug_assert!(false, "{event:?} in {:?}", self.phase);
            return;
        };
        self.phase = next;
        for action in actions {
            self.act(*action, backend);
        }
    }

    fn act(&mut self, action: PhaseAction, backend: &mut dyn Backend) {
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
                self.transmission.give_up(why, backend);
            }
            PhaseAction::DropReplies => self.transmission.close_output(backend),
            PhaseAction::Report => {
                self.deadline = None;
                if let Some(end) = self.end.as_ref().filter(|e| e.is_fault()) {
                    tracing::debug!("NBD client: {end}");
                }
            }
        }
    }

    /// Reading ends, for this reason.
    fn finish(&mut self, why: End, backend: &mut dyn Backend) {
        self.end.get_or_insert(why);
        self.step(PhaseEvent::InputEnded, backend);
    }

    fn cut_off(&mut self, why: End, backend: &mut dyn Backend) {
        if self.phase != Phase::Ended {
            self.end.get_or_insert(why);
            self.deadline = None;
            self.step(PhaseEvent::Cut, backend);
        }
    }

    /// More bytes of this are needed. If the client has left, none will arrive.
    fn starved(&mut self, what: &'static str, begun: bool, backend: &mut dyn Backend) {
        if let Some(why) = self.eof.clone() {
            let why = match why {
                End::Left if begun => End::CutShort(what),
                why => why,
            };
            self.finish(why, backend);
        }
    }

    /// Works on what has arrived, as far as it goes.
    fn advance(&mut self, backend: &mut dyn Backend) {
        match self.phase {
            Phase::Greeting | Phase::Options | Phase::Secured => {
                while self.negotiate(backend) {}
                if self.phase == Phase::Handshake {
                    self.starved("the handshake of TLS", true, backend);
                }
            }
            Phase::Handshake => self.starved("the handshake of TLS", true, backend),
            // Until the next poll.
            Phase::Transmission if self.stalled == Some(Stall::Work) => {}
            Phase::Transmission => {
                self.stalled = None;
                match self.transmission.run(&mut self.input, backend) {
                    Stop::Stall(stall) => self.stalled = Some(stall),
                    Stop::Input(what, begun) => self.starved(what, begun, backend),
                    Stop::End(why) => self.finish(why, backend),
                }
            }
            Phase::Draining | Phase::Ended => {}
        }
        if self.phase == Phase::Draining && self.transmission.is_idle() {
            self.step(PhaseEvent::Idle, backend);
        }
    }

    /// One step of the negotiation. Returns whether another one may follow.
    fn negotiate(&mut self, backend: &mut dyn Backend) -> bool {
        let greeting = self.phase == Phase::Greeting;
        let negotiates = matches!(self.phase, Phase::Greeting | Phase::Options | Phase::Secured);
        if !negotiates || self.is_talked_at() {
            return false;
        }
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
                self.starved("the negotiation", begun, backend);
                return false;
            }
            Next::Option if greeting => self.step(PhaseEvent::Flags, backend),
            Next::Option => {}
            Next::StartTls => self.step(PhaseEvent::StartTls, backend),
            Next::Transmit(chosen) => {
                self.chosen = Some(chosen);
                self.stalled = Some(Stall::Work);
                self.step(PhaseEvent::Chosen, backend);
            }
            Next::Abort => self.finish(End::Left, backend),
            Next::Bad(why) => self.finish(End::Protocol(why), backend),
        }
        true
    }
}
