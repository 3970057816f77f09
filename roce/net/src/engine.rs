//! State behind the driver's lock: a port, its datapath, and where events go.

use std::{sync::Arc, time::Duration};

use roce_port::{Forwarded, Port, Recipient, RxMeta, ToShard};
use roce_verbs::{Instant, PathMtus};

use crate::{
    clock,
    datapath::Received,
    inbox::Inbox,
    local::{Flush, LocalDriver},
    persist::{Persister, Report},
    progress::{Advance, Environment as _, LEASE, Progress, Work},
    wake::Wake,
};

/// Packets, about, that one pass receives: eight merged buffers. More would leave a sender with a window of 1 MiB idle, fewer would cost
/// it more acknowledgements.
const BUDGET: usize = 128;
/// Polls in a row that find a single datagram, after which they look for one only: in a ping-pong each further look delays the answer.
const SINGLES: u32 = 8;
/// Packets that a socket holds, at most: more than a usual receive buffer has room for.
const SOCKET_BUDGET: usize = 4096;
/// Time up to which the progress thread waits for a timer awake. Arming a near timer takes 20 to 50 us in virtual machines.
const SOON: Duration = Duration::from_micros(50);
/// Interval at which counters are published while there is no pause.
const PUBLISH: Duration = Duration::from_millis(100);

/// Port, datapath and event sink behind the driver's lock.
pub(crate) struct Engine {
    pub(crate) driver: LocalDriver,
    wake: Arc<Wake>,
    persister: Arc<Persister>,
    /// Callback of the persister.
    pub(crate) report: Option<Arc<Report>>,
    /// Messages of other engines of the device.
    inbox: Option<Arc<Inbox<ToShard>>>,
    /// Whether the last flush left something to send.
    unsent: bool,
    /// Whether messages or timers of this pass may have left something to send.
    worked: bool,
    /// Whether a timer expires too soon to be armed.
    soon: bool,
    /// Datagrams received so far; merged packets count once.
    datagrams: u64,
    /// Polls in a row that found a single datagram, and whether the last poll found any.
    singles: u32,
    found: bool,
    /// Whether counters are published, whether they have changed since, and when to publish them at the latest.
    publishes: bool,
    unpublished: bool,
    publish_at: Instant,
}

/// Engine that threads share.
pub(crate) type Shared = Progress<Engine, Wake>;

impl Advance for Engine {
    fn pass(&mut self, now: Instant, polls: bool) -> Work {
        let before = self.datagrams;
        let budget = if polls && self.singles >= SINGLES { 1 } else { BUDGET };
        let received = self.take_in(now, budget);
        let idle = received.datagrams == 0 && !self.unsent && !self.worked;
        let unsent = !idle && self.flush(now);
        let left = received.more || unsent;
        if polls {
            self.note_found(self.datagrams - before);
        }
        self.publish(now, !polls && !left);
        // Timers that a poller's last pass has left are still armed.
        if !(polls && idle) {
            self.soon = self.arm_timer(now);
        }
        match (left, self.soon) {
            (true, _) => Work::More,
            (false, true) => Work::Soon,
            (false, false) => Work::None,
        }
    }

    fn arm(&mut self, now: Instant) {
        self.wake_soon(now);
    }

    fn datagrams(&self) -> u64 {
        self.datagrams
    }
}

impl Engine {
    pub(crate) fn new(
        driver: LocalDriver,
        wake: Arc<Wake>,
        persister: Arc<Persister>,
        inbox: Option<Arc<Inbox<ToShard>>>,
        publishes: bool,
    ) -> Self {
        Self {
            driver,
            wake,
            persister,
            report: None,
            inbox,
            unsent: false,
            worked: false,
            soon: false,
            datagrams: 0,
            singles: 0,
            found: false,
            publishes,
            unpublished: publishes,
            publish_at: Instant::ZERO,
        }
    }

    /// Counts polls that find a single datagram after one that found none.
    fn note_found(&mut self, datagrams: u64) {
        let single = datagrams == 1 && !self.found;
        match datagrams {
            0 => {}
            _ if single => self.singles = self.singles.saturating_add(1),
            _ => self.singles = 0,
        }
        self.found = datagrams > 0;
    }

    /// Receives and runs timers; sends nothing.
    fn take_in(&mut self, now: Instant, budget: usize) -> Received {
        let sink = self.wake.sink();
        let forward = |to: Recipient, meta: &RxMeta, bytes: &[u8]| sink.forward(to, meta, bytes);
        let received = self.driver.receive(now, budget, &forward);
        self.datagrams += received.datagrams as u64;
        self.worked = self.take_messages(now);
        self.worked |= self.driver.run_timers(now, received.more);
        received
    }

    /// Receives what has arrived, up to a bound, as peers can send for ever. Returns the time afterwards.
    pub(crate) fn catch_up(&mut self, now: Instant) -> Instant {
        self.take_in(now, SOCKET_BUDGET);
        clock::now().max(now)
    }

    /// Takes messages of other engines. False: there is none.
    fn take_messages(&mut self, now: Instant) -> bool {
        let Some(inbox) = &self.inbox else { return false };
        // Of lost packets only the number is known.
        (0..inbox.take_lost()).for_each(|_| self.driver.port().count_forwarded(Forwarded::Lost, 0));
        let messages = inbox.take();
        let any = !messages.is_empty();
        for message in messages {
            match message {
                ToShard::Packet(packet) => self.driver.handed_over(now, &packet),
                ToShard::Command(command) => self.driver.port().handle_command(now, command),
                ToShard::Report(report) => self.driver.port().handle_report(now, report),
            }
        }
        any
    }

    /// Makes a call of a program, which may post something.
    pub(crate) fn call<R>(&mut self, now: Instant, call: impl FnOnce(&mut Port, Instant) -> R) -> R {
        // The connections of the program's queue pairs may have ended.
        self.take_messages(now);
        let result = call(self.driver.port(), now);
        self.flush_once(now);
        result
    }

    /// Reports events and sends. True: more is to be sent.
    pub(crate) fn flush(&mut self, now: Instant) -> bool {
        // Before sending: a connect request that nobody takes is rejected.
        self.report(now);
        let flushed = self.driver.send(now);
        self.unsent = flushed != Flush::Done;
        // Sending makes events too: a local request that ends in an error.
        self.report(now);
        flushed == Flush::More
    }

    /// Follows a call of the port: reports, sends, and leaves the rest to the progress thread.
    pub(crate) fn flush_once(&mut self, now: Instant) {
        if self.flush(now) {
            self.wake.wake_by(now, now);
        }
        self.wake_soon(now);
    }

    /// Follows a call of the port that leaves nothing to send: reports events and arms the timer.
    pub(crate) fn report_only(&mut self, now: Instant) {
        self.report(now);
        self.wake_soon(now);
    }

    /// Takes the path MTUs that the interfaces carry now, if known, after something about them has changed.
    pub(crate) fn links_changed(&mut self, mtus: Option<PathMtus>) {
        if let Some(mtus) = mtus {
            self.driver.port().set_path_mtus(mtus);
        }
        self.unpublished = self.publishes;
    }

    /// Publishes the counters if they may have changed: in a pause, when nothing is left to do, otherwise at an interval.
    pub(crate) fn publish(&mut self, now: Instant, pause: bool) {
        if self.unpublished && (pause || now >= self.publish_at) {
            self.unpublished = false;
            self.publish_at = now + PUBLISH;
            let (port, path) = self.driver.published();
            self.wake.sink().publish(port, &path);
        }
    }

    /// Arms the timer in a thread that does not call again.
    fn wake_soon(&mut self, now: Instant) {
        self.publish(now, false);
        if self.arm_timer(now) {
            let at = if self.wake.watches_sockets() { SOON } else { LEASE };
            self.wake.wake_by(now, now + at);
        }
    }

    /// Wakes the progress thread for the port's next timer. While it is parked it wakes up at the end of the lease anyway. True: the timer
    /// expires so soon that waiting for it costs less than arming it.
    fn arm_timer(&mut self, now: Instant) -> bool {
        // The thread looks at the timers when it wakes at the end of the lease.
        if self.wake.is_parked() {
            return false;
        }
        let publish_at = self.unpublished.then_some(self.publish_at);
        let timeout = self.driver.next_timeout().into_iter();
        let Some(at) = timeout.chain(publish_at).min() else {
            return false;
        };
        let soon = at < now + SOON;
        if !soon {
            let earliest = if self.wake.watches_sockets() { now } else { now + LEASE };
            self.wake.wake_by(now, at.max(earliest));
        }
        soon
    }

    fn report(&mut self, now: Instant) {
        self.unpublished = self.publishes;
        let (port, sink) = (self.driver.port(), self.wake.sink());
        while let Some(change) = port.poll_change() {
            sink.port_change(change);
        }
        while let Some(event) = port.poll_cm_event(now) {
            let request = event.request();
            let taken = sink.cm_event(event);
            if let (Some((_, conn)), false) = (request, taken) {
                // Destroying a waiting request rejects it.
                port.cm_destroy(now, conn);
            }
        }
        while let Some(command) = port.poll_command() {
            sink.command(command);
        }
        while let Some(report) = port.poll_report() {
            sink.report(report);
        }
        while let Some(event) = port.poll_async_event() {
            sink.async_event(event);
        }
        while let Some(job) = port.poll_persist() {
            if let Some(report) = &self.report {
                self.persister.push(job, report);
            }
        }
    }
}
