//! Faults on demand, between a port and its datapath.

use std::{collections::VecDeque, net::SocketAddr};

use roce_bth::{Opcode, Qpn};
use roce_fault::{Direction, Fate, Network, Packet, Passage, QpRef, UnderWay, flip};
use roce_icrc::Flow;
use roce_port::{Port, RxMeta, Train, TxBatch};
use roce_verbs::Instant;

use crate::{
    datapath::{Datapath, Tap, packets},
    outgoing::Outgoing,
};

/// Memory of packets that are under way, bytes: what does not fit is lost, as in a full queue.
const MAX_HELD: usize = 64 << 20;
/// Congestion Experienced (RFC 3168).
const ECN_CE: u8 = 3;
/// Offset of the BTH's byte that the ICRC does not cover (FECN, BECN and reserved bits).
const UNCOVERED: usize = 4;
/// Offset of the DETH's source queue pair in a datagram without other extended headers, bytes.
const DETH_SRC_QP: usize = 12 + 5;

/// Packet on its way in.
struct Incoming {
    meta: RxMeta,
    rnr: bool,
    bytes: Vec<u8>,
}

impl Incoming {
    fn deliver(&self, port: &mut Port, now: Instant) {
        match self.rnr {
            true => port.handle_packet_without_receive(now, &self.meta, &self.bytes),
            false => port.handle_datagram(now, &self.meta, &self.bytes),
        }
    }
}

/// Network faults of one port, and its packets under way.
pub(crate) struct Faulty {
    network: Network,
    out: UnderWay<Outgoing>,
    /// Packets that are due; the socket may be full.
    ready: VecDeque<Outgoing>,
    into: UnderWay<Incoming>,
    held: usize,
}

/// Flips a bit that the ICRC covers.
fn damage(bytes: &mut [u8], random: u64) {
    match bytes.split_at_mut_checked(UNCOVERED + 1) {
        Some((_, covered)) => flip(covered, random),
        None => flip(bytes, random),
    }
}

fn time(at: std::time::Duration) -> Instant {
    Instant::ZERO + at
}

fn since_zero(now: Instant) -> std::time::Duration {
    now.saturating_since(Instant::ZERO)
}

/// The number at an offset of 24 bits.
fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    let [a, b, c] = *bytes.get(at..)?.first_chunk()?;
    Some(u32::from_be_bytes([0, a, b, c]))
}

fn queue_pair(port: &Port, qpn: u32) -> QpRef {
    let serial = port.qp_serial(Qpn::new(qpn)).unwrap_or(0);
    QpRef { qpn, serial }
}

/// Our queue pair of a packet that is sent. Datagrams name it themselves: their trains may be several queue pairs'.
fn sender(of_train: Qpn, bytes: &[u8]) -> u32 {
    let datagram = [Opcode::UdSendOnly as u8, Opcode::UdSendOnlyImm as u8];
    let named = bytes.first().filter(|opcode| datagram.contains(opcode));
    named
        .and_then(|_| number_at(bytes, DETH_SRC_QP))
        .unwrap_or(of_train.value())
}

impl Faulty {
    pub(crate) fn new(network: Network) -> Self {
        Self {
            network,
            out: UnderWay::default(),
            ready: VecDeque::new(),
            into: UnderWay::default(),
            held: 0,
        }
    }

    /// Keeps a packet's bytes if there is memory.
    fn hold(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        if self.held + bytes.len() > MAX_HELD {
            self.network.count_overflow();
            return None;
        }
        self.held += bytes.len();
        Some(bytes.to_vec())
    }

    /// Takes the packets of a batch. Returns false if there are no faults: the batch is to be sent as it is.
    pub(crate) fn take_batch(&mut self, port: &Port, now: Instant, batch: &mut TxBatch) -> bool {
        // Packets that wait for the socket go first.
        if !self.network.is_active() && self.ready.is_empty() {
            return false;
        }
        for (train, qpn) in batch.trains().zip(batch.senders()) {
            for (index, bytes) in train.packets().enumerate() {
                let qp = queue_pair(port, sender(qpn, bytes));
                self.take(qp, now, &train, index as u16, bytes);
            }
        }
        batch.clear();
        true
    }

    fn take(&mut self, qp: QpRef, now: Instant, train: &Train<'_>, index: u16, bytes: &[u8]) {
        let packet = Packet {
            direction: Direction::Tx,
            qp,
            peer: train.remote.ip(),
            traffic_class: train.tos,
            bytes,
        };
        let unchanged = Passage {
            due: since_zero(now),
            marked: false,
            damage: None,
        };
        let fate = self.network.judge(now, &packet);
        let passages = fate.map_or([Some(unchanged), None], |fate| fate.passages);
        for passage in passages.into_iter().flatten() {
            let Some(mut bytes) = self.hold(bytes) else { continue };
            let from = SocketAddr::new(train.local, train.src_port);
            // Alone it gets Identification 0.
            if index > 0
                && let Ok(flow) = Flow::try_from((from, train.remote))
            {
                flow.seal(0, &mut bytes);
            }
            if let Some(random) = passage.damage {
                damage(&mut bytes, random);
            }
            let tos = train.tos | if passage.marked { ECN_CE } else { 0 };
            let out = Outgoing::new(&Train { tos, ..*train }, bytes);
            // What is not held back stays in its order.
            if passage.due <= since_zero(now) {
                self.ready.push_back(out);
            } else {
                self.out.push(passage.due, out);
            }
        }
    }

    /// Sends what is due. Returns false if the send buffer is full.
    pub(crate) fn send_due(&mut self, now: Instant, path: &mut dyn Datapath, tap: &mut Option<Box<dyn Tap>>) -> bool {
        while let Some(packet) = self.out.pop(since_zero(now)) {
            self.ready.push_back(packet);
        }
        while !self.ready.is_empty() {
            let sent = path.send(&mut self.ready.iter().map(Outgoing::train));
            for packet in self.ready.drain(..sent.trains) {
                let packet = packet.train();
                self.held -= packet.bytes.len();
                if let Some(tap) = tap {
                    let from = SocketAddr::new(packet.local, packet.src_port);
                    tap.packet(from, packet.remote, 0, packet.bytes);
                }
            }
            if sent.blocked {
                return false;
            }
        }
        true
    }

    /// Passes on what was received.
    pub(crate) fn receive(&mut self, port: &mut Port, now: Instant, meta: &RxMeta, bytes: &[u8]) {
        if !self.network.is_active() {
            return port.handle_datagram(now, meta, bytes);
        }
        for (index, packet) in packets(meta, bytes).enumerate() {
            let identification = meta.identification.map(|id| id.wrapping_add(index as u16));
            let meta = RxMeta {
                segment_len: 0,
                identification,
                ..*meta
            };
            self.receive_packet(port, now, &meta, packet);
        }
    }

    fn receive_packet(&mut self, port: &mut Port, now: Instant, meta: &RxMeta, bytes: &[u8]) {
        let packet = Packet {
            direction: Direction::Rx,
            qp: queue_pair(port, number_at(bytes, 5).unwrap_or(0)),
            peer: meta.remote.ip(),
            traffic_class: meta.tos,
            bytes,
        };
        let Some(Fate { passages, rnr }) = self.network.judge(now, &packet) else {
            return port.handle_datagram(now, meta, bytes);
        };
        for passage in passages.into_iter().flatten() {
            let Some(mut bytes) = self.hold(bytes) else { continue };
            if let Some(random) = passage.damage {
                damage(&mut bytes, random);
            }
            let tos = meta.tos | if passage.marked { ECN_CE } else { 0 };
            let packet = Incoming {
                meta: RxMeta { tos, ..*meta },
                rnr,
                bytes,
            };
            if passage.due <= since_zero(now) {
                self.held -= packet.bytes.len();
                packet.deliver(port, now);
            } else {
                self.into.push(passage.due, packet);
            }
        }
    }

    /// Passes on what arrives now. Returns whether anything is due, in either direction.
    pub(crate) fn run_due(&mut self, port: &mut Port, now: Instant) -> bool {
        let mut any = self.out.next_due().is_some_and(|due| due <= since_zero(now));
        while let Some(packet) = self.into.pop(since_zero(now)) {
            self.held -= packet.bytes.len();
            packet.deliver(port, now);
            any = true;
        }
        any
    }

    /// Returns when the next packet under way arrives.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let due = [self.out.next_due(), self.into.next_due()].into_iter().flatten().min();
        due.map(time)
    }
}
