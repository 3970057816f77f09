//! A port, its datapath and what is on the way between them: the state that the port's lock protects.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use roce_bth::{Qpn, ROCE_UDP_PORT};
use roce_port::{ConnChange, Port, PortCmEvent, QpnRange, RxMeta, Train, TxBatch, TxConfig};
use roce_verbs::{AsyncEvent, Instant, PathMtus};

use crate::{
    datapath::{Burst, Datagram, Datapath},
    links::LinkChange,
    wake::Wake,
};

/// Full send batches of one pass: a bound for how long a caller can be held up by what its peers let it send.
const SEND_ROUNDS: usize = 16;
/// So many passes may find both a timer that is due and packets waiting before the timer runs all the same: packets that
/// never end must not stop the clock.
const MAX_DEFERRED: u32 = 64;
/// When to try again after the send buffer was full.
const BLOCKED_RETRY: Duration = Duration::from_micros(200);

/// Receives what a port has to tell, under the port's lock: an implementation must not call the driver, and takes only
/// locks under which nobody else does.
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
    /// Interfaces changed. Unlike the others called without the port's lock. Returns what they carry now, if it can tell.
    fn links(&self, _changes: Vec<(String, LinkChange)>) -> Option<PathMtus> {
        None
    }
}

/// Sees every packet, under the port's lock.
pub trait Tap: Send {
    /// A packet that was sent, or received (before any check); `index` is its place in a segmented send or merged
    /// buffer.
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]);
}

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

/// See the module.
pub(crate) struct Engine {
    pub(crate) port: Port,
    pub(crate) path: Box<dyn Datapath>,
    batch: TxBatch,
    /// Bursts of the batch that are sent already, when the send buffer was full.
    sent: usize,
    /// Passes in a row that left packets waiting while a timer was due.
    deferred: u32,
    pub(crate) sink: Arc<dyn EventSink>,
    tap: Option<Box<dyn Tap>>,
    wake: Arc<Wake>,
    own: Option<OwnNumbers>,
}

/// The queue pair numbers of this process, when others share the address. The kernel gives a packet to the right process
/// by its number; but several that it has merged, of one sender, go where the first one goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OwnNumbers(pub(crate) QpnRange);

impl OwnNumbers {
    /// Whether a packet is another process's. Those for QP1 are too: the broker knows whose, and forwards them.
    fn is_stray(&self, packet: &[u8]) -> bool {
        let Some([_, _, _, _, _, a, b, c]) = packet.first_chunk() else {
            return false;
        };
        let qpn = u32::from_be_bytes([0, *a, *b, *c]);
        qpn != Qpn::MULTICAST.value() && !(self.0.first..=self.0.last).contains(&qpn)
    }
}

fn packets<'a>(d: &Datagram<'a>) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    d.bytes.chunks(d.segment_len.max(1))
}

impl Engine {
    pub(crate) fn new(
        port: Port,
        path: Box<dyn Datapath>,
        sink: Arc<dyn EventSink>,
        tap: Option<Box<dyn Tap>>,
        wake: Arc<Wake>,
        batch_bytes: usize,
        own: Option<OwnNumbers>,
    ) -> Self {
        let caps = path.capabilities();
        let batch = TxBatch::new(TxConfig {
            gso: caps.max_segments > 1,
            max_segments: caps.max_segments,
            max_train_bytes: caps.max_burst_bytes,
            capacity: batch_bytes,
        });
        Self {
            port,
            path,
            batch,
            sent: 0,
            deferred: 0,
            sink,
            tap,
            wake,
            own,
        }
    }

    /// Receives about `budget` packets, runs timers that are due when no packet is left that could be what they wait for,
    /// and sends. True: more is waiting.
    pub(crate) fn pass(&mut self, now: Instant, budget: usize) -> bool {
        let (port, tap, own, sink) = (&mut self.port, &mut self.tap, &self.own, &self.sink);
        let received = self.path.receive(budget, &mut |d: &Datagram<'_>| {
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
            match own {
                Some(own) if packets(d).any(|p| own.is_stray(p)) => {
                    for packet in packets(d) {
                        let meta = RxMeta { segment_len: 0, ..meta };
                        if own.is_stray(packet) {
                            port.count_stray(packet);
                            sink.stray(&meta, packet);
                        } else {
                            port.handle_datagram(now, &meta, packet);
                        }
                    }
                }
                _ => port.handle_datagram(now, &meta, d.bytes),
            }
        });
        let due = self.timer_due(now);
        self.deferred = if due && received.more { self.deferred + 1 } else { 0 };
        if due && (!received.more || self.deferred > MAX_DEFERRED) {
            self.deferred = 0;
            self.port.handle_timeout(now);
        }
        let unsent = self.settle(now);
        received.more || unsent
    }

    /// Takes one datagram that did not come through the datapath.
    pub(crate) fn take_datagram(&mut self, now: Instant, bytes: &[u8], meta: &RxMeta) {
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
        self.port.handle_datagram(now, meta, bytes);
    }

    pub(crate) fn timer_due(&mut self, now: Instant) -> bool {
        self.port.poll_timeout().is_some_and(|at| at <= now)
    }

    /// What follows every call of the port: events are told, packets sent, the alarm clock set. True: more is to be sent.
    pub(crate) fn settle(&mut self, now: Instant) -> bool {
        let unsent = self.transmit(now);
        self.tell(now);
        if let Some(at) = self.port.poll_timeout() {
            self.wake.set_alarm(now, at);
        }
        unsent
    }

    /// Events only, and the alarm clock: for calls that can't have made anything to send.
    pub(crate) fn settle_quietly(&mut self, now: Instant) {
        self.tell(now);
        if let Some(at) = self.port.poll_timeout() {
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
        while let Some(event) = self.port.poll_async_event() {
            self.sink.async_event(event);
        }
    }

    fn transmit(&mut self, now: Instant) -> bool {
        for _ in 0..SEND_ROUNDS {
            let mut more = true;
            if self.batch.is_empty() {
                more = self.port.poll_transmit(now, &mut self.batch);
                if self.batch.is_empty() {
                    return false;
                }
                self.tap_batch();
            }
            if !self.send_batch() {
                self.wake.set_alarm(now, now + BLOCKED_RETRY);
                return false;
            }
            if !more {
                return false;
            }
        }
        true
    }

    /// Sends what is left of the batch. False: the send buffer is full.
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
        if self.batch.config().gso && !self.path.segmentation() {
            self.batch.set_gso(false);
        }
        true
    }

    /// Nothing is seen any more; the tap ends its work here, as others may hold the device for longer.
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
    for (i, packet) in d.bytes.chunks(d.segment_len.max(1)).enumerate() {
        tap.packet(d.remote, to, i as u16, packet);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_for_other_processes_are_told_by_their_number() {
        let own = OwnNumbers(QpnRange {
            first: 0x02_0000,
            last: 0x02_1fff,
        });
        let packet = |qpn: u32| {
            let mut bytes = [0; 16];
            bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
            bytes
        };
        for (qpn, stray) in [
            (0x02_0000, false),
            (0x02_1fff, false),
            (0x02_2000, true),
            (1, true),
            (0xff_ffff, false),
        ] {
            assert_eq!(own.is_stray(&packet(qpn)), stray, "{qpn:#x}");
        }
        assert!(!own.is_stray(&[0; 7]), "too short to be anybody's");
    }
}
