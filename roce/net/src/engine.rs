//! A port in motion for threads that share it: the state that the port's lock protects.

use std::{sync::Arc, time::Duration};

use roce_port::{ConnChange, ConnId, Port, PortCmEvent, RxMeta};
use roce_verbs::{AsyncEvent, Instant, PathMtus};

use crate::{
    clock,
    datapath::Received,
    handover::{Moves, Watch},
    inbox::Inbox,
    links::LinkChange,
    motor::{Flush, Motor},
    persist::{Persister, Report},
    wake::Wake,
};

/// Packets, about, that are handled before they are answered, and before others may have the lock: eight merged buffers.
/// More would leave a sender with a window of 1 MiB idle, less would cost it more acknowledgements.
const BUDGET: usize = 128;
/// Packets that may wait in a socket: more than a usual receive buffer has room for.
const ALL_THAT_WAITS: usize = 4096;
/// When to try again after the send buffer was full.
const BLOCKED_RETRY: Duration = Duration::from_micros(200);

/// What another engine of the device has for this one.
#[derive(Debug)]
pub enum Message {
    /// A packet that came by its socket.
    Packet(RxMeta, Vec<u8>),
    /// The first packet of a connection's peer has come to its queue pair, which is there ([`Port::poll_first_packet`]).
    FirstPacket(ConnId),
}

/// Receives what a port has to tell, under the port's lock: an implementation must not call a driver, but for [`Driver::stop`], and takes
/// only locks under which nobody else does.
///
/// [`Driver::stop`]: crate::Driver::stop
pub trait EventSink: Send + Sync {
    /// A connection event. False: nobody is there for it; a connect request is then rejected.
    fn cm_event(&self, event: PortCmEvent) -> bool;
    /// An asynchronous event.
    fn async_event(&self, event: AsyncEvent);
    /// The device has stopped: whoever waits is to be told.
    fn closed(&self);
    /// A connection has been established or is over, if the port was asked to tell. Comes before the event of it.
    fn conn_change(&self, _change: ConnChange) {}
    /// A packet for another process that shares the address.
    fn stray(&self, _meta: &RxMeta, _bytes: &[u8]) {}
    /// For the engine that has the connections ([`Message::FirstPacket`]).
    fn first_packet(&self, _conn: ConnId) {}
    /// Interfaces changed. Unlike the others called without the port's lock. Returns what they carry now, if it can tell.
    fn links(&self, _changes: Vec<(String, LinkChange)>) -> Option<PathMtus> {
        None
    }
}

/// A program that has got something is given so long to answer it.
const ANSWER: Duration = Duration::from_micros(50);
/// Answers in time, in a row, until answers are waited for.
const ANSWERS: u32 = 16;

/// Datagrams that come at once in a dialogue, at most: an acknowledgement, and what it is to answer.
const TURN: usize = 2;

/// Whether a program answers single packets at once. Then the acknowledgement waits for its answer and goes with it, so that a peer that
/// polls until it is acknowledged, and spins on memory after that, finds both by polling: nobody has to be woken any more.
#[derive(Default)]
struct Dialogue {
    /// When something to be answered came, and nothing was posted since.
    since: Option<Instant>,
    /// Answers in time, in a row.
    answers: u32,
}

impl Dialogue {
    /// So many datagrams have come, and left nothing to be sent but acknowledgements, or something else. True: these shall wait.
    fn waits(&mut self, now: Instant, datagrams: usize, acknowledges: bool) -> bool {
        let late = self.since.is_some_and(|at| now.saturating_since(at) > ANSWER);
        if late || datagrams > TURN {
            *self = Self::default();
        }
        if datagrams > 0 && acknowledges {
            self.since.get_or_insert(now);
        }
        acknowledges && self.since.is_some() && self.answers >= ANSWERS
    }

    /// The program has posted something.
    fn answered(&mut self, now: Instant) {
        if let Some(at) = self.since.take() {
            let in_time = now.saturating_since(at) <= ANSWER;
            self.answers = if in_time { self.answers.saturating_add(1) } else { 0 };
        }
    }
}

/// See the module.
pub(crate) struct Engine {
    pub(crate) port: Port,
    pub(crate) motor: Motor,
    sink: Arc<dyn EventSink>,
    wake: Arc<Wake>,
    persister: Arc<Persister>,
    /// Whom that tells.
    pub(crate) report: Option<Arc<Report>>,
    /// What other engines of the device have for this one.
    inbox: Option<Arc<Inbox<Message>>>,
    /// Something may be to be sent since the last pass ([`Engine::pass_in_program`]).
    owes: bool,
    trickle: Trickle,
    dialogue: Dialogue,
    /// What has come so far, packets that came merged counted once.
    datagrams: u64,
}

/// Whether a program that polls finds single datagrams with nothing behind them, as in a ping-pong.
#[derive(Default)]
struct Trickle {
    /// So many in a row.
    singles: u32,
    /// The last pass found something.
    found: bool,
}

impl Trickle {
    /// Singles in a row until it is believed.
    const SURE: u32 = 8;

    fn budget(&self) -> usize {
        if self.singles >= Self::SURE { 1 } else { BUDGET }
    }

    fn note(&mut self, datagrams: usize) {
        let single = datagrams == 1 && !self.found;
        match datagrams {
            0 => {}
            _ if single => self.singles = self.singles.saturating_add(1),
            _ => self.singles = 0,
        }
        self.found = datagrams > 0;
    }
}

impl Moves for Engine {
    /// Receives, runs timers that are due when no packet is left that could be what they wait for, and sends.
    fn pass(&mut self, now: Instant) -> bool {
        let received = self.take_in(now, BUDGET);
        let acknowledges = self.port.owes_only_acknowledgements();
        if self.dialogue.waits(now, received.datagrams, acknowledges) {
            self.settle_quietly(now);
            self.wake.set_alarm(now, now + ANSWER);
            return false;
        }
        let unsent = self.settle(now);
        received.more || unsent
    }

    /// When packets have come nothing is sent in this pass: the program may have data to send that goes out with the
    /// acknowledgements, and ahead of them. Never twice in a row.
    fn pass_in_program(&mut self, now: Instant) -> bool {
        let before = self.port.received();
        let received = self.take_in(now, self.trickle.budget());
        self.trickle.note(received.datagrams);
        if self.port.received() == before || self.owes {
            self.settle(now) || received.more
        } else {
            self.owes = true;
            self.settle_quietly(now);
            received.more
        }
    }

    fn keep_time(&mut self, now: Instant) -> bool {
        match self.port.is_timeout_due(now) {
            // What it waits for may have arrived.
            true => self.pass(now),
            false => self.settle(now),
        }
    }

    fn received(&self) -> u64 {
        self.port.received()
    }

    fn datagrams(&self) -> u64 {
        self.datagrams
    }
}

impl Engine {
    pub(crate) fn new(
        port: Port,
        motor: Motor,
        sink: Arc<dyn EventSink>,
        wake: Arc<Wake>,
        persister: Arc<Persister>,
        inbox: Option<Arc<Inbox<Message>>>,
    ) -> Self {
        Self {
            port,
            motor,
            sink,
            wake,
            persister,
            report: None,
            inbox,
            owes: false,
            trickle: Trickle::default(),
            dialogue: Dialogue::default(),
            datagrams: 0,
        }
    }

    /// The part of a pass that sends nothing.
    fn take_in(&mut self, now: Instant, budget: usize) -> Received {
        let sink = &self.sink;
        let stray = |meta: &RxMeta, bytes: &[u8]| sink.stray(meta, bytes);
        let received = self.motor.receive(&mut self.port, now, budget, &stray);
        self.datagrams += received.datagrams as u64;
        self.take_messages(now);
        self.motor.run_timers(&mut self.port, now, received.more);
        received
    }

    /// Receives what has arrived; there is a bound, as peers can send for ever. The time afterwards.
    pub(crate) fn catch_up(&mut self, now: Instant) -> Instant {
        self.take_in(now, ALL_THAT_WAITS);
        clock::now().max(now)
    }

    /// Takes what other engines have.
    fn take_messages(&mut self, now: Instant) {
        let Some(inbox) = &self.inbox else { return };
        // Of those only the number is known.
        (0..inbox.take_lost()).for_each(|_| self.port.count_lost(0));
        for message in inbox.take() {
            match message {
                // The capture has it.
                Message::Packet(meta, bytes) => self.port.handle_datagram(now, &meta, &bytes),
                Message::FirstPacket(conn) => self.port.cm_notify(now, conn),
            }
        }
    }

    /// A call of a program, which may post something.
    pub(crate) fn call<R>(&mut self, now: Instant, call: impl FnOnce(&mut Port, Instant) -> R) -> R {
        self.dialogue.answered(now);
        let result = call(&mut self.port, now);
        self.settle_in_passing(now);
        result
    }

    /// Takes one datagram that did not come through the datapath.
    pub(crate) fn take_datagram(&mut self, now: Instant, bytes: &[u8], meta: &RxMeta) {
        self.motor.take_datagram(&mut self.port, now, bytes, meta);
    }

    /// What follows every call of the port: events are told, packets sent, the alarm clock set. True: more is to be sent.
    pub(crate) fn settle(&mut self, now: Instant) -> bool {
        self.owes = false;
        // Telling comes first: who has nobody for a connect request rejects it.
        self.tell(now);
        let flushed = self.motor.flush(&mut self.port, now);
        if flushed == Flush::Blocked {
            self.wake.set_alarm(now, now + BLOCKED_RETRY);
        }
        // Sending makes events too: a local request that ends in an error.
        self.settle_quietly(now);
        flushed == Flush::More
    }

    /// The same; what is left is the background thread's.
    pub(crate) fn settle_in_passing(&mut self, now: Instant) {
        if self.settle(now) {
            self.wake.set_alarm(now, now);
        }
    }

    /// Events only, and the alarm clock: for calls that can't have made anything to send.
    pub(crate) fn settle_quietly(&mut self, now: Instant) {
        self.tell(now);
        // While the thread stands back the program runs timers, and the alarm that there is says when to look after it.
        if self.wake.watching() != Watch::Nothing
            && let Some(at) = self.port.poll_timeout()
        {
            self.wake.set_alarm(now, at);
        }
    }

    fn tell(&mut self, now: Instant) {
        while let Some(change) = self.port.poll_conn_change() {
            self.sink.conn_change(change);
        }
        while let Some(event) = self.port.poll_cm_event() {
            let request = event.request();
            let taken = self.sink.cm_event(event);
            if let (Some((_, conn)), false) = (request, taken) {
                // Destroying a waiting request rejects it.
                self.port.cm_destroy(now, conn);
            }
        }
        while let Some(conn) = self.port.poll_first_packet() {
            self.sink.first_packet(conn);
        }
        while let Some(event) = self.port.poll_async_event() {
            self.sink.async_event(event);
        }
        while let Some(job) = self.port.poll_persist() {
            if let Some(report) = &self.report {
                self.persister.push(job, report);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(n: u64) -> Instant {
        Instant::from_nanos(n * 1000)
    }

    /// One that has answered so many times in time, the last at 1 ms.
    fn practised(times: u32) -> Dialogue {
        let mut dialogue = Dialogue::default();
        for _ in 0..times {
            dialogue.waits(us(990), 1, true);
            dialogue.answered(us(1000));
        }
        dialogue
    }

    #[test]
    fn answers_are_waited_for_when_they_have_come_in_time() {
        let waits = |mut dialogue: Dialogue| dialogue.waits(us(1010), 1, true);
        assert!(!waits(practised(ANSWERS - 1)));
        assert!(waits(practised(ANSWERS)));
        let mut late = practised(ANSWERS);
        late.waits(us(2000), 1, true);
        late.answered(us(2051));
        assert!(!waits(late));
    }

    #[test]
    fn they_are_waited_for_so_long_and_not_when_much_comes() {
        let mut dialogue = practised(ANSWERS);
        assert!(dialogue.waits(us(2000), 1, true) && dialogue.waits(us(2050), 0, true));
        assert!(!dialogue.waits(us(2051), 0, true), "it has stayed away");
        assert!(!practised(ANSWERS).waits(us(2000), 3, true));
        // Acknowledgements from the peer are nothing to answer.
        let mut dialogue = practised(ANSWERS);
        assert!(!dialogue.waits(us(2000), 1, false) && dialogue.waits(us(2060), 2, true));
        // What follows does not make it wait longer.
        let mut dialogue = practised(ANSWERS);
        assert!(dialogue.waits(us(2000), 1, true) && dialogue.waits(us(2040), 1, true));
        assert!(!dialogue.waits(us(2051), 1, true));
    }

    #[test]
    fn single_datagrams_are_a_trickle_until_two_come_at_once() {
        let mut trickle = Trickle::default();
        for _ in 0..Trickle::SURE {
            assert_eq!(trickle.budget(), BUDGET);
            trickle.note(1);
            trickle.note(0);
        }
        assert_eq!(trickle.budget(), 1);
        trickle.note(1);
        trickle.note(1);
        assert_eq!(trickle.budget(), BUDGET, "the second one had waited");
    }
}
