//! From a capture to the reliable connections in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
};

use roce_bth::{Class, ICRC_LEN, Opcode, Packet, Service};
use roce_pcap::{Capture, decode};
use roce_verbs::Instant;

use crate::error::Error;

/// An RC packet of a capture.
#[derive(Clone, Debug)]
pub struct Event {
    /// The frame's number in the capture, from 1.
    pub frame: u64,
    /// When it was captured, from the capture's first frame on.
    pub at: Instant,
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: SocketAddr,
    /// IPv4 Identification.
    pub identification: u16,
    /// BTH to ICRC.
    pub bytes: Vec<u8>,
}

impl Event {
    /// The packet. It was checked when it was read.
    ///
    /// # Panics
    /// Never for events of [`load`].
    pub fn packet(&self) -> Packet<'_> {
        Packet::parse(&self.bytes).expect("checked when it was read")
    }

    /// Its bytes without the ICRC.
    pub fn body(&self) -> &[u8] {
        &self.bytes[..self.bytes.len() - ICRC_LEN]
    }
}

/// One reliable connection: both ends, and its packets in the order of the capture.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Address and queue pair number of each end.
    pub ends: [(IpAddr, u32); 2],
    /// Its packets.
    pub events: Vec<Event>,
}

/// Whether a packet is a request (else it is an answer).
pub fn is_request(opcode: Opcode) -> bool {
    matches!(
        opcode.info().class,
        Class::Send | Class::Write | Class::ReadRequest | Class::Atomic | Class::AtomicWrite | Class::Flush
    )
}

/// Reads the RC packets of a capture.
///
/// # Errors
/// When it can't be read, or a frame is cut.
pub fn load(path: &Path) -> Result<Vec<Event>, Error> {
    let mut capture = Capture::open(path)?;
    let mut events = Vec::new();
    let mut start = None;
    while let Some(frame) = capture.next_frame() {
        let frame = frame?;
        let start = *start.get_or_insert(frame.time_ns);
        let Ok(datagram) = decode(frame.link, frame.data) else {
            continue;
        };
        if datagram.dst.port() != 4791 {
            continue;
        }
        let packet = Packet::parse(datagram.payload)
            .map_err(|e| Error::Unsuitable(format!("{} frame {}: {e}", path.display(), frame.index)))?;
        if packet.header.bth.opcode.info().service == Service::Rc {
            events.push(Event {
                frame: frame.index,
                // A second of room, so that nothing happens at time zero.
                at: Instant::from_nanos(1_000_000_000 + frame.time_ns.saturating_sub(start)),
                src: datagram.src,
                dst: datagram.dst,
                identification: datagram.identification(),
                bytes: datagram.payload.to_vec(),
            });
        }
    }
    Ok(events)
}

type FlowKey = (IpAddr, IpAddr, u32);

fn key(event: &Event) -> FlowKey {
    (
        event.src.ip(),
        event.dst.ip(),
        event.packet().header.bth.dest_qp.value(),
    )
}

/// PSNs that a flow's requests take, and PSNs that its answers carry.
#[derive(Default)]
struct Flow {
    asked: BTreeSet<u32>,
    answered: BTreeSet<u32>,
}

/// Stands for a number that the capture does not tell.
const NO_NUMBER: u32 = 0x80_0000;

/// Sorts packets into connections: two flows belong together when one answers the other.
pub fn connections(events: &[Event], mtu: usize) -> Vec<Connection> {
    let mut flows = BTreeMap::<FlowKey, Flow>::new();
    for event in events {
        let header = event.packet().header;
        let flow = flows.entry(key(event)).or_default();
        if is_request(header.bth.opcode) {
            let n = header.reth().filter(|_| header.bth.opcode == Opcode::RcReadRequest);
            let n = n.map_or(1, |r| r.dma_len.div_ceil(mtu as u32).max(1));
            flow.asked.extend((0..n).map(|i| header.bth.psn.add(i).value()));
        } else {
            flow.answered.insert(header.bth.psn.value());
        }
    }
    let mut found = Vec::new();
    let mut free: BTreeSet<FlowKey> = flows.keys().copied().collect();
    while let Some(one) = free.pop_first() {
        let common = |other: &FlowKey| {
            let (f, g) = (&flows[&one], &flows[other]);
            f.asked.intersection(&g.answered).count() + g.asked.intersection(&f.answered).count()
        };
        let other = free
            .iter()
            .filter(|k| (k.0, k.1) == (one.1, one.0) && common(k) > 0)
            .max_by_key(|k| common(k))
            .copied();
        // Without an answer the sender's own number is unknown; nobody needs it then.
        let sender = other.map_or(NO_NUMBER, |other| other.2);
        if let Some(other) = other {
            free.remove(&other);
        }
        let belongs = |e: &&Event| key(e) == one || Some(key(e)) == other;
        found.push(Connection {
            ends: [(one.0, sender), (one.1, one.2)],
            events: events.iter().filter(belongs).cloned().collect(),
        });
    }
    found
}
