//! From a capture to the reliable connections in it.

use std::{collections::BTreeMap, io::Read};

use roce_bth::{Class, ICRC_LEN, Packet, ROCE_UDP_PORT, Service};
use roce_pcap::{
    Capture, Datagram, FrameReport, Icrc, Survey, decode,
    judge::{Observed, Origin},
};
use roce_verbs::Instant;

use crate::connection::{Connection, Event};

/// Most bytes of packets that [`read`] keeps, with what it notes of each. Connections beyond are not replayed.
pub const MAX_BYTES: usize = 128 << 20;

/// Room before the first packet, so that nothing happens at time zero; nanoseconds.
const START_NS: u64 = 1_000_000_000;
/// Longest time of a capture that counts: a century.
const MAX_NS: u64 = 100 * 365 * 86_400 * 1_000_000_000;

/// Reads the reliable connections of a surveyed capture, from its beginning.
///
/// Each [`Connection::lack`] says whether it can be replayed; what began before the capture is left out.
pub fn read<R: Read>(survey: &Survey, capture: &mut Capture<R>) -> Vec<Connection> {
    let mut reading = Reading {
        connections: BTreeMap::new(),
        damaged: BTreeMap::new(),
        start: None,
        room: MAX_BYTES,
    };
    let mut reviewer = survey.reviewer();
    while let Some(Ok(frame)) = capture.next_frame() {
        let start = *reading.start.get_or_insert(frame.time_ns);
        let elapsed = frame.time_ns.saturating_sub(start).min(MAX_NS);
        let at = Instant::from_nanos(START_NS + elapsed);
        let datagram = decode(frame.link, frame.data).ok();
        let dst_port = datagram.as_ref().map(|datagram| datagram.dst.port());
        let payload = datagram.as_ref().map_or(&[][..], |datagram| datagram.payload);
        let mut rest = payload;
        let reviewed = reviewer.frame(&frame, |event, observed| {
            let (index, sender) = survey.endpoint_of(event.conversation, event.sender);
            let (bytes, behind) = rest.split_at(wire_len(observed).min(rest.len()));
            rest = behind;
            // The Identification is that of the frame.
            let alone = datagram.as_ref().filter(|_| bytes.len() == payload.len());
            let event = Event {
                frame: event.frame,
                at,
                sender,
                src: observed.meta.src,
                dst: (observed.meta.dst, dst_port.unwrap_or(ROCE_UDP_PORT)).into(),
                identification: alone.map(|datagram| datagram.identification()),
                bytes: vec![],
            };
            reading.packet(survey, index, event, (observed, bytes));
        });
        let damaged = reviewed
            .report
            .filter(|report| report.icrc == Icrc::Bad && report.packets == 1);
        if let (Some(report), Some(datagram)) = (damaged, datagram) {
            reading.damaged(&report, &datagram, at, reviewed.conversation);
        }
    }
    let mut connections: Vec<_> = reading.connections.into_values().collect();
    for connection in &mut connections {
        connection.add_accepted(reading.damaged.remove(&connection.index).unwrap_or_default());
        connection.is_trimmed = !connection.from_start && connection.trim();
    }
    connections
}

/// Returns the bytes of a packet from the BTH to the ICRC.
fn wire_len(observed: &Observed<'_>) -> usize {
    let pad = usize::from(observed.header.bth.pad);
    observed.header.bytes().len() + observed.payload_len + pad + ICRC_LEN
}

/// Connections so far.
struct Reading {
    connections: BTreeMap<usize, Connection>,
    /// Packets with a wrong ICRC.
    damaged: BTreeMap<usize, Vec<Event>>,
    /// Time of the first frame.
    start: Option<u64>,
    /// Bytes that may still be kept.
    room: usize,
}

impl Reading {
    /// Adds a packet, of which the frame has these bytes.
    fn packet(&mut self, survey: &Survey, index: usize, mut event: Event, (observed, bytes): (&Observed<'_>, &[u8])) {
        let info = observed.header.bth.opcode.info();
        let Some(summary) = survey.conversation(index).filter(|summary| summary.service == "RC") else {
            return;
        };
        let connection = self.connections.entry(index).or_insert_with(|| Connection {
            index,
            ends: summary.ends,
            mtu: summary.mtu.map(|mtu| mtu as usize),
            from_start: summary.origin == Origin::ConnectionManager,
            is_trimmed: false,
            events: vec![],
            lack: None,
        });
        let is_whole = Packet::parse(bytes).is_ok_and(|packet| packet.header.bytes() == observed.header.bytes());
        let size = bytes.len() + size_of::<Event>();
        let lack = if info.class == Class::SelectiveAcknowledge {
            "selective acknowledgements, which ferroce's ends agree on, are not replayed".to_owned()
        } else if info.service != Service::Rc {
            return;
        } else if !is_whole {
            format!("frame {} is cut: capture whole packets (tcpdump -s 0)", event.frame)
        } else if size > self.room {
            format!(
                "the capture has more than {} MiB of packets: `ferroce pcap split` makes a file of each connection",
                MAX_BYTES >> 20
            )
        } else if connection.lack.is_some() {
            return;
        } else {
            self.room -= size;
            event.bytes = bytes.to_vec();
            connection.events.push(event);
            return;
        };
        if connection.lack.is_none() {
            let kept = connection.events.iter().map(|e| e.bytes.len() + size_of::<Event>());
            self.room += kept.sum::<usize>();
            connection.events = vec![];
            connection.lack = Some(lack);
        }
    }

    /// Notes a packet with a wrong ICRC.
    fn damaged(&mut self, report: &FrameReport, datagram: &Datagram<'_>, at: Instant, index: Option<usize>) {
        let Some(connection) = index.and_then(|index| self.connections.get(&index)) else {
            return;
        };
        let sender = (0..2).find(|sender| {
            let [from, to] = [*sender, 1 - *sender].map(|end| connection.ends[end]);
            from.addr == report.src.ip() && to.addr == report.dst.ip() && to.qpn == report.dest_qp
        });
        let size = datagram.payload.len() + size_of::<Event>();
        if let Some(sender) = sender.filter(|_| size <= self.room)
            && Packet::parse(datagram.payload).is_ok_and(|p| p.header.bth.opcode.info().service == Service::Rc)
        {
            self.room -= size;
            self.damaged.entry(connection.index).or_default().push(Event {
                frame: report.index,
                at,
                sender,
                src: report.src,
                dst: report.dst,
                identification: Some(datagram.identification()),
                bytes: datagram.payload.to_vec(),
            });
        }
    }
}
