//! State behind the driver's lock: a port, its datapath, and where events go.

use std::{sync::Arc, time::Duration};

use roce_port::{CmEventKind, Forwarded, FromShard, Port, PortChange, QpCommand, Recipient, RxMeta, ToShard};
use roce_verbs::{AsyncEvent, Instant, PathMtus};

use crate::{
    clock,
    datapath::{DatapathCounters, Received},
    inbox::Inbox,
    links::LinkChange,
    motor::{Flush, Motor},
    persist::{Persister, Report},
    progress::{Advance, LEASE, Work},
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

/// Receives a port's events under the port's lock. An implementation must not call a driver, except [`Driver::stop`], and acquires leaf
/// locks only.
///
/// [`Driver::stop`]: crate::Driver::stop
pub trait EventSink: Send + Sync {
    /// Takes a connection event. False: it has no receiver; a connect request is then rejected.
    fn cm_event(&self, event: CmEventKind) -> bool;
    /// Takes an asynchronous event.
    fn async_event(&self, event: AsyncEvent);
    /// Wakes all waiting threads: the device has stopped.
    fn closed(&self);
    /// Reports a change that other processes at the address have to know, if the port is configured so. Comes before the event of it.
    fn port_change(&self, _change: PortChange) {}
    /// Forwards a packet that is not for the port which received it.
    fn forward(&self, _to: Recipient, _meta: &RxMeta, _bytes: &[u8]) -> Forwarded {
        Forwarded::Process
    }
    /// Takes a command for the engine that has a queue pair.
    fn command(&self, _command: QpCommand) {}
    /// Takes a report for the engine that has the connections.
    fn report(&self, _report: FromShard) {}
    /// Publishes counters to other processes, if the driver is configured so.
    fn publish(&self, _port: &Port, _path: &DatapathCounters) {}
    /// Reports changes of interfaces, without the port's lock. Returns the path MTUs that they carry now, if known.
    fn links(&self, _changes: Vec<(String, LinkChange)>) -> Option<PathMtus> {
        None
    }
}

/// Port, datapath and event sink behind the driver's lock.
pub(crate) struct Engine {
    pub(crate) port: Port,
    pub(crate) motor: Motor,
    sink: Arc<dyn EventSink>,
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

impl Advance for Engine {
    fn pass(&mut self, now: Instant) -> Work {
        let (work, _) = self.receive_and_send(now, BUDGET);
        self.publish(now, work == Work::None);
        self.soon = self.arm_timer(now);
        self.with_timer(work)
    }

    fn poll(&mut self, now: Instant) -> Work {
        let before = self.datagrams;
        let budget = if self.singles >= SINGLES { 1 } else { BUDGET };
        let (work, idle) = self.receive_and_send(now, budget);
        self.note_found(self.datagrams - before);
        self.publish(now, false);
        if !idle {
            self.soon = self.arm_timer(now);
        }
        self.with_timer(work)
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
        port: Port,
        motor: Motor,
        sink: Arc<dyn EventSink>,
        wake: Arc<Wake>,
        persister: Arc<Persister>,
        inbox: Option<Arc<Inbox<ToShard>>>,
        publishes: bool,
    ) -> Self {
        Self {
            port,
            motor,
            sink,
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

    /// Makes a pass but for arming the timer. Returns the work that is left, and whether there was nothing to do.
    fn receive_and_send(&mut self, now: Instant, budget: usize) -> (Work, bool) {
        let received = self.take_in(now, budget);
        let idle = received.datagrams == 0 && !self.unsent && !self.worked;
        let unsent = !idle && self.flush(now);
        let work = if received.more || unsent {
            Work::More
        } else {
            Work::None
        };
        (work, idle)
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

    fn with_timer(&self, work: Work) -> Work {
        match (work, self.soon) {
            (Work::None, true) => Work::Soon,
            (work, _) => work,
        }
    }

    /// Receives and runs timers; sends nothing.
    fn take_in(&mut self, now: Instant, budget: usize) -> Received {
        let sink = &self.sink;
        let forward = |to: Recipient, meta: &RxMeta, bytes: &[u8]| sink.forward(to, meta, bytes);
        let received = self.motor.receive(&mut self.port, now, budget, &forward);
        self.datagrams += received.datagrams as u64;
        self.worked = self.take_messages(now);
        self.worked |= self.motor.run_timers(&mut self.port, now, received.more);
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
        (0..inbox.take_lost()).for_each(|_| self.port.count_forwarded(Forwarded::Lost, 0));
        let messages = inbox.take();
        let any = !messages.is_empty();
        for message in messages {
            match message {
                ToShard::Packet(packet) => self.motor.handed_over(&mut self.port, now, &packet),
                ToShard::Command(command) => self.port.handle_command(now, command),
                ToShard::Report(report) => self.port.handle_report(now, report),
            }
        }
        any
    }

    /// Makes a call of a program, which may post something.
    pub(crate) fn call<R>(&mut self, now: Instant, call: impl FnOnce(&mut Port, Instant) -> R) -> R {
        // The connections of the program's queue pairs may have ended.
        self.take_messages(now);
        let result = call(&mut self.port, now);
        self.flush_once(now);
        result
    }

    /// Takes one datagram that did not come through the datapath.
    pub(crate) fn take_datagram(&mut self, now: Instant, bytes: &[u8], meta: &RxMeta) {
        self.motor.take_datagram(&mut self.port, now, bytes, meta);
    }

    /// Reports events and sends. True: more is to be sent.
    pub(crate) fn flush(&mut self, now: Instant) -> bool {
        // Before sending: a connect request that nobody takes is rejected.
        self.report(now);
        let flushed = self.motor.flush(&mut self.port, now);
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
            self.port.set_path_mtus(mtus);
        }
        self.unpublished = self.publishes;
    }

    /// Publishes the counters if they may have changed: in a pause, when nothing is left to do, otherwise at an interval.
    pub(crate) fn publish(&mut self, now: Instant, pause: bool) {
        if self.unpublished && (pause || now >= self.publish_at) {
            self.unpublished = false;
            self.publish_at = now + PUBLISH;
            self.sink.publish(&self.port, &self.motor.path.own_counters());
        }
    }

    /// Arms the timer in a thread that does not call again.
    fn wake_soon(&mut self, now: Instant) {
        self.publish(now, false);
        if self.arm_timer(now) {
            let at = if self.wake.is_watching() { SOON } else { LEASE };
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
        let timeout = self.motor.next_timeout(&mut self.port).into_iter();
        let Some(at) = timeout.chain(publish_at).min() else {
            return false;
        };
        let soon = at < now + SOON;
        if !soon {
            let earliest = if self.wake.is_watching() { now } else { now + LEASE };
            self.wake.wake_by(now, at.max(earliest));
        }
        soon
    }

    fn report(&mut self, now: Instant) {
        self.unpublished = self.publishes;
        while let Some(change) = self.port.poll_change() {
            self.sink.port_change(change);
        }
        while let Some(event) = self.port.poll_cm_event(now) {
            let request = event.request();
            let taken = self.sink.cm_event(event);
            if let (Some((_, conn)), false) = (request, taken) {
                // Destroying a waiting request rejects it.
                self.port.cm_destroy(now, conn);
            }
        }
        while let Some(command) = self.port.poll_command() {
            self.sink.command(command);
        }
        while let Some(report) = self.port.poll_report() {
            self.sink.report(report);
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
