//! Event loop of a port: moves packets between the port and its datapath. The caller decides which thread runs it and what wakes it.

use std::net::SocketAddr;

use roce_bth::ROCE_UDP_PORT;
use roce_fault::Network;
use roce_port::{Forwarded, HandedOver, Port, Recipient, Recipients, RxMeta, Train, TxBatch, TxConfig};
use roce_verbs::Instant;

use crate::{
    clock,
    datapath::{Burst, Datagram, Datapath, Received, Tap, Undeliverable},
    faulty::Faulty,
};

/// Largest number of full send batches in one flush, so that peers with large windows do not hold up the caller.
const SEND_ROUNDS: usize = 16;
/// Largest number of times in a row that a due timer is put off because packets wait. Endless packets must not stop timers.
const MAX_DEFERRED: u32 = 64;

impl<'a> From<Train<'a>> for Burst<'a> {
    fn from(train: Train<'a>) -> Self {
        Self {
            local: train.local,
            remote: train.remote,
            src_port: train.src_port,
            traffic_class: train.tos,
            hop_limit: train.ttl,
            segment_len: train.segment_len,
            bytes: train.bytes,
        }
    }
}

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

/// Datapath of a port, with its send batch.
pub(crate) struct Motor {
    pub(crate) path: Box<dyn Datapath>,
    batch: TxBatch,
    /// Bursts of the batch that are sent already, when the send buffer was full.
    sent: usize,
    /// Times in a row that packets waited while a timer was due.
    deferred: u32,
    /// Time of the last datagram, as the port knows it.
    read: Instant,
    tap: Option<Box<dyn Tap>>,
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

fn packets<'a>(d: &Datagram<'a>) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    d.bytes.chunks(d.segment_len.max(1))
}

impl Motor {
    /// Creates the event loop of a port. `batch_bytes`: size of the staging slab, which one round of system calls sends.
    pub(crate) fn new(
        path: Box<dyn Datapath>,
        tap: Option<Box<dyn Tap>>,
        batch_bytes: usize,
        recipients: Option<Recipients>,
        faults: Option<Network>,
    ) -> Self {
        let caps = path.capabilities();
        let batch = TxBatch::new(TxConfig {
            gso: caps.max_segments > 1,
            max_segments: caps.max_segments,
            max_train_bytes: caps.max_burst_bytes,
            capacity: batch_bytes,
        });
        Self {
            path,
            batch,
            sent: 0,
            deferred: 0,
            read: Instant::ZERO,
            tap,
            recipients,
            hears: false,
            faults: faults.map(|network| Box::new(Faulty::new(network))),
        }
    }

    /// Receives about `budget` packets. Those that are not, or not certainly, for the port go to `forward`.
    pub(crate) fn receive(&mut self, port: &mut Port, now: Instant, budget: usize, forward: Forward<'_>) -> Received {
        let (tap, recipients, read) = (&mut self.tap, &self.recipients, &mut self.read);
        let faults = &mut self.faults;
        let mut received = self.path.receive(budget, &mut |d: &Datagram<'_>| {
            // It may have come after `now`, when this thread did not run: it would seem to have been under way for less long than it was.
            let now = clock::now().max(now);
            *read = now;
            if let Some(tap) = tap {
                tap_datagram(tap.as_mut(), d);
            }
            let meta = RxMeta {
                local: d.local,
                remote: d.remote,
                identification: d.identification,
                segment_len: d.segment_len,
                tos: d.traffic_class,
                hop_limit: d.hop_limit,
            };
            match recipients {
                Some(of) if packets(d).any(|p| of.of(d.local, p) != Recipient::This) => {
                    for packet in packets(d) {
                        let meta = RxMeta { segment_len: 0, ..meta };
                        let forwarded = match of.of(d.local, packet) {
                            Recipient::This => Forwarded::Back,
                            other => forward(other, &meta, packet),
                        };
                        match forwarded {
                            Forwarded::Back => deliver(faults, port, now, &meta, packet),
                            forwarded => port.count_forwarded(forwarded, packet.len()),
                        }
                    }
                }
                _ => deliver(faults, port, now, &meta, d.bytes),
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

    /// Processes a datagram that did not come through the datapath.
    pub(crate) fn take_datagram(&mut self, port: &mut Port, now: Instant, bytes: &[u8], meta: &RxMeta) {
        if let Some(tap) = &mut self.tap {
            tap_datagram(
                tap.as_mut(),
                &Datagram {
                    local: meta.local,
                    remote: meta.remote,
                    identification: meta.identification,
                    segment_len: match meta.segment_len {
                        0 => bytes.len(),
                        len => len,
                    },
                    traffic_class: meta.tos,
                    hop_limit: meta.hop_limit,
                    bytes,
                },
            );
        }
        deliver(&mut self.faults, port, now, meta, bytes);
    }

    /// Processes a packet that reached the socket of another shard or process.
    pub(crate) fn handed_over(&mut self, port: &mut Port, now: Instant, packet: &HandedOver) {
        match packet.captured {
            true => deliver(&mut self.faults, port, now, &packet.meta, &packet.bytes),
            false => self.take_datagram(port, now, &packet.bytes, &packet.meta),
        }
    }

    /// Returns the latest time to run timers or to flush.
    pub(crate) fn next_timeout(&self, port: &mut Port) -> Option<Instant> {
        let at = port.poll_timeout();
        match &self.faults {
            None => at,
            Some(faults) => [at, faults.next_due()].into_iter().flatten().min(),
        }
    }

    /// Runs due timers, unless packets are waiting (`more`), which may stop them. Returns whether one was run.
    pub(crate) fn run_timers(&mut self, port: &mut Port, now: Instant, more: bool) -> bool {
        let now = now.max(self.read);
        let arrived = self.faults.as_mut().is_some_and(|faults| faults.run_due(port, now));
        let due = port.is_timeout_due(now);
        self.deferred = if due && more { self.deferred + 1 } else { 0 };
        if !due || (more && self.deferred <= MAX_DEFERRED) {
            return arrived;
        }
        self.deferred = 0;
        port.handle_timeout(now) | arrived
    }

    /// Sends the packets that are due.
    pub(crate) fn flush(&mut self, port: &mut Port, now: Instant) -> Flush {
        let mut now = now.max(self.read);
        // Before a request leaves: the error may be there when the system call returns.
        if self.hears != port.awaits_answer() {
            self.hears = !self.hears;
            self.path.hear_undeliverable(self.hears);
        }
        if let Some(faults) = &mut self.faults
            && !faults.send_due(now, &mut *self.path, &mut self.tap)
        {
            return Flush::Blocked;
        }
        for round in 0..SEND_ROUNDS {
            let mut more = true;
            if self.batch.is_empty() {
                if round > 0 {
                    // A batch takes long enough to seem to have been under way for longer than it was.
                    now = clock::now().max(now);
                }
                more = port.poll_transmit(now, &mut self.batch);
                if self.batch.is_empty() {
                    return Flush::Done;
                }
                if let Some(faults) = &mut self.faults
                    && faults.take_batch(port, now, &mut self.batch)
                {
                    if !faults.send_due(now, &mut *self.path, &mut self.tap) {
                        return Flush::Blocked;
                    }
                    if !more {
                        return Flush::Done;
                    }
                    continue;
                }
                self.tap_batch();
            }
            if !self.send_batch() {
                return Flush::Blocked;
            }
            if !more {
                return Flush::Done;
            }
        }
        Flush::More
    }

    /// Sends the rest of the batch. Returns false if the send buffer is full.
    fn send_batch(&mut self) -> bool {
        let mut bursts = self.batch.trains().skip(self.sent).map(Burst::from);
        let sent = self.path.send(&mut bursts);
        drop(bursts);
        if sent.blocked {
            self.sent += sent.bursts;
            return false;
        }
        self.sent = 0;
        self.batch.clear();
        true
    }

    /// Ends the capture, because the device may be held for longer.
    pub(crate) fn end_tap(&mut self) {
        self.tap = None;
    }

    fn tap_batch(&mut self) {
        let Some(tap) = &mut self.tap else { return };
        for train in self.batch.trains() {
            let from = SocketAddr::new(train.local, train.src_port);
            for (i, packet) in train.packets().enumerate() {
                tap.packet(from, train.remote, i as u16, packet);
            }
        }
    }
}

fn tap_datagram(tap: &mut dyn Tap, d: &Datagram<'_>) {
    let to = SocketAddr::new(d.local, ROCE_UDP_PORT);
    for (i, packet) in packets(d).enumerate() {
        tap.packet(d.remote, to, i as u16, packet);
    }
}
