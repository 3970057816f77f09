//! A port that its owner's loop drives.

use std::{io, net::IpAddr, os::fd::BorrowedFd};

use roce_fault::Network;
use roce_port::{HandedOver, Port, PortCounters, Recipients, RxMeta};
use roce_verbs::Instant;

use crate::{
    datapath::{Datapath, DatapathCounters, Tap},
    motor::{Flush, Forward, Motor},
};

/// Configuration of a [`LocalDriver`].
#[derive(Default)]
pub struct LocalConfig {
    /// Bytes of the staging slab: what is sent with one round of system calls; 0: 256 KiB.
    pub batch_bytes: usize,
    /// Sees all packets.
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
///     let more = driver.receive(now, 128, &|_, _, _| Forwarded::Lost);
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
    motor: Motor,
}

impl LocalDriver {
    /// Puts a port on a datapath.
    pub fn new(port: Port, path: Box<dyn Datapath>, config: LocalConfig) -> Self {
        let batch = match config.batch_bytes {
            0 => 256 << 10,
            bytes => bytes,
        };
        let motor = Motor::new(path, config.tap, batch, config.recipients, config.faults);
        Self { port, motor }
    }

    /// Returns the port.
    pub fn port(&mut self) -> &mut Port {
        &mut self.port
    }

    /// Receives about `budget` packets. Those that are not, or not certainly, for the port go to `forward`. Returns whether more are waiting.
    pub fn receive(&mut self, now: Instant, budget: usize, forward: Forward<'_>) -> bool {
        self.motor.receive(&mut self.port, now, budget, forward).more
    }

    /// Takes a datagram that reached the host by another socket as if the network had brought it. All checks are made.
    pub fn inject(&mut self, now: Instant, datagram: &[u8], meta: &RxMeta) {
        self.motor.take_datagram(&mut self.port, now, datagram, meta);
    }

    /// Takes a packet that reached the socket of another shard or process. All checks are made.
    pub fn handed_over(&mut self, now: Instant, packet: &HandedOver) {
        self.motor.handed_over(&mut self.port, now, packet);
    }

    /// Runs timers that are due, unless packets wait (`more`) that could be what they wait for.
    pub fn run_timers(&mut self, now: Instant, more: bool) {
        self.motor.run_timers(&mut self.port, now, more);
    }

    /// Makes memory persistent as peers have requested, then sends the packets that are due.
    pub fn flush(&mut self, now: Instant) -> Flush {
        self.port.persist_here(now);
        self.motor.flush(&mut self.port, now)
    }

    /// Returns the latest time to call [`run_timers`](Self::run_timers).
    pub fn next_timeout(&mut self) -> Option<Instant> {
        self.motor.next_timeout(&mut self.port)
    }

    /// Returns the descriptors to watch for input: packets, or room after [`Flush::Blocked`]. Those that were there before come
    /// first, in the same order, as long as they live.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.motor.path.descriptors()
    }

    /// Receives what is sent to a multicast group on the interface that has the local address, until as many
    /// [`leave`](Self::leave)s. Afterwards there may be another descriptor.
    ///
    /// # Errors
    /// When the system refuses, or the datapath can't.
    pub fn join(&mut self, group: IpAddr, local: IpAddr) -> io::Result<()> {
        self.motor.path.join(group, local)
    }

    /// Takes back one [`join`](Self::join).
    pub fn leave(&mut self, group: IpAddr, local: IpAddr) {
        self.motor.path.leave(group, local);
    }

    /// Returns the counters of the port and its datapath.
    pub fn counters(&self) -> (PortCounters, DatapathCounters) {
        (self.port.counters(), self.motor.path.counters())
    }
}
