//! Flows: statistics of each direction of a capture's conversations, from the judge's events.

mod activity;
mod histogram;

use std::collections::{BTreeMap, btree_map::Entry};

use roce_bth::NakCode;
use serde::Serialize;

use crate::judge::{Endpoint, Event, EventKind, Judge};
use activity::{Activity, Outstanding};
use histogram::Histogram;
pub use histogram::Latency;

/// Flows that are counted; packets of further ones are left out.
pub const MAX_FLOWS: usize = 1 << 14;
/// UDP source ports that are counted for each flow.
pub const MAX_PORTS: usize = 16;

/// UDP source port of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct UdpPort {
    /// Port.
    pub port: u16,
    /// Packets from it.
    pub packets: u64,
}

/// Statistics of one direction of a conversation: packets of one queue pair, and the answers that its requests got. Its JSON
/// keys are stable.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Flow {
    /// Conversation, as [`Report::conversations`](crate::Report::conversations) has it.
    pub conversation: usize,
    /// Transport service: `RC`, `UC`, `UD`, `XRC`.
    pub service: &'static str,
    /// Name of the service that was asked for, by service ID or private data.
    pub name: Option<String>,
    /// Sender.
    pub src: Endpoint,
    /// Receiver.
    pub dst: Endpoint,
    /// Time of its first and last packet, nanoseconds since 1970.
    pub time_ns: [u64; 2],
    /// Packets that it sent, acknowledgements too.
    pub packets: u64,
    /// Payload that it sent, repetitions too, bytes.
    pub bytes: u64,
    /// Messages and READs that it requested.
    pub messages: u64,
    /// Payload of first transmissions of its requests and READ responses, bytes.
    pub first_bytes: u64,
    /// Time in which such payload was outstanding: sent and not acknowledged, or requested and not answered. Of an unreliable
    /// service, the time from its first to its last packet. Nanoseconds.
    pub active_ns: u64,
    /// `first_bytes` over `active_ns`, bits per second.
    pub goodput_bits_per_s: Option<u64>,
    /// Time from a request packet that was sent once to its acknowledgement.
    pub round_trip: Option<Latency>,
    /// Time from a READ that was sent once to its last response.
    pub read_latency: Option<Latency>,
    /// Request packets and READ responses that it sent again.
    pub retransmissions: u64,
    /// PSNs that its requests left out: lost before the capture, or not captured.
    pub skipped: u64,
    /// RNR NAKs that its requests got.
    pub rnr_naks: u64,
    /// NAKs for a gap in its PSNs.
    pub sequence_naks: u64,
    /// Other NAKs that its requests got: they end the connection.
    pub fatal_naks: u64,
    /// Congestion notification packets that it got.
    pub cnps: u64,
    /// Packets it sent that experienced congestion (ECN).
    pub ecn_marks: u64,
    /// Source ports of its packets, the most frequent first.
    pub udp_ports: Vec<UdpPort>,
    /// Packets from further ports: at most [`MAX_PORTS`] are told apart.
    pub other_ports_packets: u64,
}

/// Flows of a capture. Its JSON keys are stable.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct FlowReport {
    /// Flows by conversation, and in it the first packet's sender first.
    pub flows: Vec<Flow>,
    /// Packets of flows beyond [`MAX_FLOWS`].
    pub packets_left_out: u64,
}

/// Counts the packets of flows. Takes the events of a [`Judge`] in their order.
#[derive(Default, Debug)]
pub struct Flows {
    /// By conversation; of each endpoint.
    tallies: BTreeMap<usize, [Tally; 2]>,
    left_out: u64,
}

/// Counters of one flow.
#[derive(Default, Debug)]
struct Tally {
    time_ns: Option<[u64; 2]>,
    packets: u64,
    bytes: u64,
    messages: u64,
    first_bytes: u64,
    outstanding: Outstanding,
    activity: Activity,
    round_trip: Histogram,
    read_latency: Histogram,
    retransmissions: u64,
    skipped: u64,
    rnr_naks: u64,
    sequence_naks: u64,
    fatal_naks: u64,
    cnps: u64,
    ecn_marks: u64,
    ports: Vec<UdpPort>,
    other_ports: u64,
}

impl Flows {
    /// Creates statistics of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a packet.
    pub fn event(&mut self, event: &Event) {
        let full = self.tallies.len() >= MAX_FLOWS / 2;
        let pair = match self.tallies.entry(event.conversation) {
            Entry::Vacant(_) if full => {
                self.left_out += 1;
                return;
            }
            entry => entry.or_default().each_mut(),
        };
        let (sent, got) = match (event.sender, pair) {
            (0, [first, second]) => (first, second),
            (_, [first, second]) => (second, first),
        };
        sent.sent(event);
        got.got(event);
        let active = sent.outstanding.sends() || got.outstanding.reads();
        sent.activity.advance(event.time_ns, active);
        // An unreliable direction ends with its own last packet.
        if !got.outstanding.is_unanswered() {
            let active = got.outstanding.sends() || sent.outstanding.reads();
            got.activity.advance(event.time_ns, active);
        }
    }

    /// Returns the statistics; `judge` is the one of which the events are.
    pub fn finish(self, judge: &Judge) -> FlowReport {
        let mut tallies = BTreeMap::<(usize, usize), Tally>::new();
        for (conversation, pair) in self.tallies {
            for (sender, tally) in pair.into_iter().enumerate() {
                let known = tallies.entry(judge.endpoint_of(conversation, sender)).or_default();
                known.merge(tally);
            }
        }
        let mut flows = vec![];
        for summary in judge.conversations() {
            for sender in 0..2 {
                if let Some(tally) = tallies.remove(&(summary.index, sender)).filter(|t| !t.is_empty()) {
                    let ends = [summary.ends[sender], summary.ends[1 - sender]];
                    flows.push(tally.flow(summary.index, summary.service, summary.name.clone(), ends));
                }
            }
        }
        FlowReport {
            flows,
            packets_left_out: self.left_out,
        }
    }
}

impl Tally {
    /// Counts a packet that this side sent.
    fn sent(&mut self, event: &Event) {
        let bytes = event.bytes as u64;
        self.packets += 1;
        self.bytes += bytes;
        self.ecn_marks += u64::from(event.congestion);
        let [first, last] = self.time_ns.unwrap_or([event.time_ns; 2]);
        self.time_ns = Some([first.min(event.time_ns), last.max(event.time_ns)]);
        self.add_port(UdpPort {
            port: event.src_port,
            packets: 1,
        });
        self.outstanding.request(event);
        match event.kind {
            EventKind::Request {
                repeated,
                skipped,
                ends,
                ..
            } => {
                self.skipped += skipped.unsigned_abs();
                self.retransmissions += u64::from(repeated);
                if !repeated {
                    self.first_bytes += bytes;
                    self.messages += u64::from(ends);
                }
            }
            EventKind::ReadResponse { repeated, .. } => {
                self.retransmissions += u64::from(repeated);
                self.first_bytes += if repeated { 0 } else { bytes };
            }
            EventKind::Datagram => {
                self.first_bytes += bytes;
                self.messages += 1;
            }
            _ => {}
        }
    }

    /// Counts a packet that this side got.
    fn got(&mut self, event: &Event) {
        self.outstanding.answer(event);
        match event.kind {
            EventKind::Ack {
                round_trip_ns: Some(time),
                ..
            } => self.round_trip.add(time),
            EventKind::ReadResponse {
                latency_ns: Some(time), ..
            } => self.read_latency.add(time),
            EventKind::Nak {
                code: NakCode::PsnSequenceError,
                ..
            } => self.sequence_naks += 1,
            EventKind::Nak { .. } => self.fatal_naks += 1,
            EventKind::Rnr { .. } => self.rnr_naks += 1,
            EventKind::Cnp => self.cnps += 1,
            _ => {}
        }
    }

    fn add_port(&mut self, added: UdpPort) {
        match self.ports.iter().position(|known| known.port == added.port) {
            Some(at) => self.ports[at].packets += added.packets,
            None if self.ports.len() < MAX_PORTS => self.ports.push(added),
            None => self.other_ports += added.packets,
        }
    }

    /// Adds the tally of a conversation that turned out to be a part of this one.
    fn merge(&mut self, other: Self) {
        self.time_ns = match (self.time_ns, other.time_ns) {
            (Some(a), Some(b)) => Some([a[0].min(b[0]), a[1].max(b[1])]),
            (a, b) => a.or(b),
        };
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.messages += other.messages;
        self.first_bytes += other.first_bytes;
        self.activity.total_ns += other.activity.total_ns;
        self.round_trip.merge(&other.round_trip);
        self.read_latency.merge(&other.read_latency);
        self.retransmissions += other.retransmissions;
        self.skipped += other.skipped;
        self.rnr_naks += other.rnr_naks;
        self.sequence_naks += other.sequence_naks;
        self.fatal_naks += other.fatal_naks;
        self.cnps += other.cnps;
        self.ecn_marks += other.ecn_marks;
        self.other_ports += other.other_ports;
        other.ports.into_iter().for_each(|port| self.add_port(port));
    }

    /// Returns whether nothing was sent, and no request answered.
    const fn is_empty(&self) -> bool {
        self.packets == 0 && self.rnr_naks == 0 && self.sequence_naks == 0 && self.fatal_naks == 0 && self.cnps == 0
    }

    fn flow(
        mut self,
        conversation: usize,
        service: &'static str,
        name: Option<String>,
        [src, dst]: [Endpoint; 2],
    ) -> Flow {
        self.ports
            .sort_by_key(|known| (std::cmp::Reverse(known.packets), known.port));
        let active_ns = self.activity.total_ns;
        let goodput = u128::from(self.first_bytes) * 8_000_000_000 / u128::from(active_ns.max(1));
        Flow {
            conversation,
            service,
            name,
            src,
            dst,
            time_ns: self.time_ns.unwrap_or_default(),
            packets: self.packets,
            bytes: self.bytes,
            messages: self.messages,
            first_bytes: self.first_bytes,
            active_ns,
            goodput_bits_per_s: (active_ns > 0 && self.first_bytes > 0)
                .then(|| u64::try_from(goodput).unwrap_or(u64::MAX)),
            round_trip: self.round_trip.latency(),
            read_latency: self.read_latency.latency(),
            retransmissions: self.retransmissions,
            skipped: self.skipped,
            rnr_naks: self.rnr_naks,
            sequence_naks: self.sequence_naks,
            fatal_naks: self.fatal_naks,
            cnps: self.cnps,
            ecn_marks: self.ecn_marks,
            udp_ports: self.ports,
            other_ports_packets: self.other_ports,
        }
    }
}
