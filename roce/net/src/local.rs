//! Port and datapath, for one thread: moves packets between the two. The caller decides which thread runs it and what wakes it.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
};

use roce_bth::ROCE_UDP_PORT;
use roce_fault::Network;
use roce_port::{
    ErrorCounts, Forwarded, HandedOver, Port, PortCounters, Recipient, Recipients, RxMeta, TxBatch, TxConfig,
};
use roce_verbs::Instant;

use crate::{
    clock,
    datapath::{Datapath, DatapathCounters, Received, Tap, Trouble, Undeliverable, packets},
    faulty::Faulty,
};

/// Bytes of the staging slab, which one round of system calls sends.
const BATCH_BYTES: usize = 256 << 10;
/// Largest number of full send batches in one flush, so that peers with large windows do not hold up the caller.
const SEND_ROUNDS: usize = 16;
/// Largest number of times in a row that a due timer is put off because packets wait. Endless packets must not stop timers.
const MAX_DEFERRED: u32 = 64;

/// Forwards a packet that is not for the port which received it.
pub type Forward<'a> = &'a dyn Fn(Recipient, &RxMeta, &[u8]) -> Forwarded;

/// Result of a flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// Everything is sent.
    Done,
    /// More is to be sent than one flush sends.
    More,
    /// The send buffer is full.
    Blocked,
}

/// Configuration of a [`LocalDriver`].
#[derive(Default)]
pub struct LocalConfig {
    /// Capture of all packets.
    pub tap: Option<Box<dyn Tap>>,
    /// Recipients of packets, if others share the address.
    pub recipients: Option<Recipients>,
    /// Faults on demand.
    pub faults: Option<Network>,
}

/// A port and its datapath, without a lock or a thread: the loop that owns it receives, runs timers and sends. Nothing is
/// sent but by [`flush`](Self::flush), so what a turn of the loop posts goes out together.
///
/// ```text
/// loop {
///     let more = driver.receive(now, 128, &|_, _, _| Forwarded::Lost).more;
///     driver.run_timers(now, more);
///     // Poll completion queues and the port's events; post work requests.
///     let flushed = driver.flush(now);
///     if !more && flushed != Flush::More {
///         // Wait until a descriptor is readable, or next_timeout.
///     }
/// }
/// ```
pub struct LocalDriver {
    port: Port,
    path: Box<dyn Datapath>,
    batch: TxBatch,
    /// Trains of the batch that are sent already, when the send buffer was full.
    sent: usize,
    /// Times in a row that packets waited while a timer was due.
    deferred: u32,
    /// Time of the last datagram, as the port knows it.
    read: Instant,
    tap: Option<Box<dyn Tap>>,
    /// Errors of the port that the tap knows of.
    errors: ErrorCounts,
    /// Recipients of packets at a shared address.
    recipients: Option<Recipients>,
    /// A connect request waits for an answer, and ICMP errors are kept.
    hears: bool,
    /// Faults on demand, if the configuration permits them.
    faults: Option<Box<Faulty>>,
}

/// Delivers a datagram to the port.
#[inline]
fn deliver(faults: &mut Option<Box<Faulty>>, port: &mut Port, now: Instant, meta: &RxMeta, bytes: &[u8]) {
    match faults {
        None => port.handle_datagram(now, meta, bytes),
        Some(faults) => faults.receive(port, now, meta, bytes),
    }
}

impl LocalDriver {
    /// Puts a port on a datapath.
    pub fn new(port: Port, path: Box<dyn Datapath>, config: LocalConfig) -> Self {
        let caps = path.capabilities();
        let batch = TxBatch::new(TxConfig {
            gso: caps.max_segments > 1,
            max_segments: caps.max_segments,
            max_train_bytes: caps.max_train_bytes,
            capacity: BATCH_BYTES,
        });
        Self {
            port,
            path,
            batch,
            sent: 0,
            deferred: 0,
            read: Instant::ZERO,
            tap: config.tap,
            errors: ErrorCounts::default(),
            recipients: config.recipients,
            hears: false,
            faults: config.faults.map(|network| Box::new(Faulty::new(network))),
        }
    }

    /// Returns the port.
    pub fn port(&mut self) -> &mut Port {
        &mut self.port
    }

    /// Receives about `budget` packets. Those that are not, or not certainly, for the port go to `forward`.
    pub fn receive(&mut self, now: Instant, budget: usize, forward: Forward<'_>) -> Received {
        let (tap, recipients, read) = (&mut self.tap, &self.recipients, &mut self.read);
        let (faults, port) = (&mut self.faults, &mut self.port);
        let mut received = self.path.receive(budget, &mut |meta: &RxMeta, bytes: &[u8]| {
            // It may have come after `now`, when this thread did not run: it would seem to have been under way for less long than it was.
            let now = clock::now().max(now);
            *read = now;
            capture_datagram(tap, meta, bytes);
            match recipients {
                Some(of) if packets(meta, bytes).any(|p| of.of(meta.local, p) != Recipient::This) => {
                    for packet in packets(meta, bytes) {
                        let meta = RxMeta {
                            segment_len: 0,
                            ..*meta
                        };
                        let forwarded = match of.of(meta.local, packet) {
                            Recipient::This => Forwarded::Back,
                            other => forward(other, &meta, packet),
                        };
                        match forwarded {
                            Forwarded::Back => deliver(faults, port, now, &meta, packet),
                            forwarded => port.count_forwarded(forwarded, packet.len()),
                        }
                    }
                }
                _ => deliver(faults, port, now, meta, bytes),
            }
        });
        if self.hears {
            self.path.undeliverable(&mut |e: &Undeliverable<'_>| {
                port.handle_undeliverable(now, e.remote, e.quoted, e.why);
                // What comes of it is to be reported, as of a datagram.
                received.datagrams += 1;
            });
        }
        received
    }

    /// Processes a datagram that did not come through the datapath. All checks are made.
    pub(crate) fn inject(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) {
        capture_datagram(&mut self.tap, meta, bytes);
        deliver(&mut self.faults, &mut self.port, now, meta, bytes);
    }

    /// Processes a packet that reached the socket of another shard or process. All checks are made.
    pub fn handed_over(&mut self, now: Instant, packet: &HandedOver) {
        match packet.captured {
            true => deliver(&mut self.faults, &mut self.port, now, &packet.meta, &packet.bytes),
            false => self.inject(now, &packet.meta, &packet.bytes),
        }
    }

    /// Returns the latest time to run timers or to flush.
    pub fn next_timeout(&mut self) -> Option<Instant> {
        let at = self.port.poll_timeout();
        match &self.faults {
            None => at,
            Some(faults) => [at, faults.next_due()].into_iter().flatten().min(),
        }
    }

    /// Runs due timers, unless packets are waiting (`more`), which may stop them. Returns whether one was run.
    pub fn run_timers(&mut self, now: Instant, more: bool) -> bool {
        let now = now.max(self.read);
        let port = &mut self.port;
        let arrived = self.faults.as_mut().is_some_and(|faults| faults.run_due(port, now));
        let due = port.is_timeout_due(now);
        self.deferred = if due && more { self.deferred + 1 } else { 0 };
        if !due || (more && self.deferred <= MAX_DEFERRED) {
            return arrived;
        }
        self.deferred = 0;
        port.handle_timeout(now) | arrived
    }

    /// Makes memory persistent as peers have requested, then sends the packets that are due.
    pub fn flush(&mut self, now: Instant) -> Flush {
        self.port.persist_here(now);
        self.send(now)
    }

    /// Sends the packets that are due.
    pub(crate) fn send(&mut self, now: Instant) -> Flush {
        let flushed = self.send_batches(now);
        if let Some(tap) = &mut self.tap {
            let errors = self.port.error_counts();
            let before = std::mem::replace(&mut self.errors, errors);
            if errors.qp_failures > before.qp_failures {
                tap.trouble(Trouble::QueuePair);
            }
            if errors.icrc_errors > before.icrc_errors {
                tap.trouble(Trouble::Icrc);
            }
        }
        flushed
    }

    fn send_batches(&mut self, now: Instant) -> Flush {
        let mut now = now.max(self.read);
        // Before a request leaves: the error may be there when the system call returns.
        if self.hears != self.port.awaits_answer() {
            self.hears = !self.hears;
            self.path.hear_undeliverable(self.hears);
        }
        if !self.send_faulty(now) {
            return Flush::Blocked;
        }
        for round in 0..SEND_ROUNDS {
            let mut more = true;
            if self.batch.is_empty() {
                if round > 0 {
                    // A batch takes long enough to seem to have been under way for longer than it was.
                    now = clock::now().max(now);
                }
                more = self.port.poll_transmit(now, &mut self.batch);
                self.batch.group();
                if self.batch.is_empty() {
                    return Flush::Done;
                }
                let faults = self.faults.as_mut();
                if faults.is_some_and(|faults| faults.take_batch(&self.port, now, &mut self.batch))
                    && !self.send_faulty(now)
                {
                    return Flush::Blocked;
                }
                if self.tap.is_some() {
                    for train in self.batch.trains() {
                        let from = SocketAddr::new(train.local, train.src_port);
                        capture(&mut self.tap, from, train.remote, train.packets());
                    }
                }
            }
            let sent = self.path.send(&mut self.batch.trains().skip(self.sent));
            if sent.blocked {
                self.sent += sent.trains;
                return Flush::Blocked;
            }
            self.sent = 0;
            self.batch.clear();
            if !more {
                return Flush::Done;
            }
        }
        Flush::More
    }

    /// Sends the packets that faults have held back and that are due. Returns false if the send buffer is full.
    fn send_faulty(&mut self, now: Instant) -> bool {
        match &mut self.faults {
            None => true,
            Some(faults) => faults.send_due(now, &mut *self.path, &mut self.tap),
        }
    }

    /// Returns the descriptors to watch for input: packets, or room after [`Flush::Blocked`]. Those that were there before come
    /// first, in the same order, as long as they live.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.path.descriptors()
    }

    /// Receives what is sent to a multicast group on the interface that has the local address, until as many
    /// [`leave`](Self::leave)s. Afterwards there may be another descriptor.
    pub(crate) fn join(&mut self, group: IpAddr, local: IpAddr) -> io::Result<()> {
        self.path.join(group, local)
    }

    /// Undoes one [`join`](Self::join).
    pub(crate) fn leave(&mut self, group: IpAddr, local: IpAddr) {
        self.path.leave(group, local);
    }

    /// Returns the counters of the port and its datapath.
    pub fn counters(&self) -> (PortCounters, DatapathCounters) {
        (self.port.counters(), self.path.counters())
    }

    /// Returns the port, and the counters of its datapath without a system call.
    pub(crate) fn published(&self) -> (&Port, DatapathCounters) {
        (&self.port, self.path.own_counters())
    }

    /// Ends the capture, because the device may be held for longer.
    pub(crate) fn end_tap(&mut self) {
        self.tap = None;
    }
}

/// Captures packets: the i-th has index i.
fn capture<'a>(
    tap: &mut Option<Box<dyn Tap>>,
    from: SocketAddr,
    to: SocketAddr,
    packets: impl Iterator<Item = &'a [u8]>,
) {
    let Some(tap) = tap else { return };
    for (index, packet) in packets.enumerate() {
        tap.packet(from, to, index as u16, packet);
    }
}

fn capture_datagram(tap: &mut Option<Box<dyn Tap>>, meta: &RxMeta, bytes: &[u8]) {
    let to = SocketAddr::new(meta.local, ROCE_UDP_PORT);
    capture(tap, meta.remote, to, packets(meta, bytes));
}
