//! Events of a capture of RDS: connections that were established, and SENDs put together from their packets.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use rds::proto::{Header, Kind, PORT_V4, PORT_V6, Private};
use roce_bth::{Class, Packet, Psn, Service, Syndrome};
use roce_pcap::{Capture, Ip, decode};

use crate::error::Error;

/// Connection of two addresses.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) connector: IpAddr,
    pub(super) acceptor: IpAddr,
    /// Queue pairs of both.
    qps: [u32; 2],
    /// Type of service.
    pub(super) tos: u8,
    /// Private data of REQ and REP; of a connection that is older than the capture there is none.
    pub(super) private: Option<[Vec<u8>; 2]>,
    /// REP and RTU were seen, or what stands for the RTU.
    is_replied: bool,
    is_confirmed: bool,
}

/// SEND that was seen whole.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) link: usize,
    pub(super) from: IpAddr,
    /// Frame of its last packet, when it was sent first.
    pub(super) frame: u64,
    pub(super) bytes: Vec<u8>,
}

impl Sent {
    pub(super) fn header(&self) -> Option<&Header> {
        Header::peek(&self.bytes).ok().map(|(header, _)| header)
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        self.header().map(Header::kind)
    }
}

/// Event of the capture. Numbers are those of [`Record::links`] and [`Record::sent`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// The connector's REQ.
    Request(usize),
    /// The acceptor's REP.
    Reply(usize),
    /// The connector's RTU, or its first packet.
    Confirm(usize),
    /// Either side's DREQ.
    End(usize),
    /// First packet of a SEND.
    Begin(usize),
    /// The receiver's acknowledgement of a SEND.
    Arrive(usize),
}

/// Capture.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) links: Vec<Link>,
    pub(super) sent: Vec<Sent>,
    /// Events with their times, nanoseconds.
    pub(super) events: Vec<(u64, What)>,
}

/// MAD of the connection manager, as far as it tells what becomes of connections.
struct Mad<'a>(&'a [u8]);

impl Mad<'_> {
    const REQ: u8 = 0x10;
    const REP: u8 = 0x13;
    const RTU: u8 = 0x14;
    const DREQ: u8 = 0x15;

    fn attribute(&self) -> u8 {
        self.0[17]
    }

    fn word(&self, at: usize) -> u32 {
        let word = &self.0[24 + at..24 + at + 4];
        word.iter().fold(0, |value, byte| value << 8 | u32::from(*byte))
    }

    fn local(&self) -> u32 {
        self.word(0)
    }

    fn remote(&self) -> u32 {
        self.word(4)
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        self.0[24 + at..24 + at + len].to_vec()
    }
}

/// Packets of one direction of a connection.
#[derive(Default)]
struct Stream {
    /// SEND that is being put together: its number, next PSN, bytes.
    part: Option<(usize, Psn, Vec<u8>)>,
    /// First PSNs of SENDs that have begun, with their numbers.
    begun: BTreeMap<u32, usize>,
    /// Whole SENDs that are not acknowledged: last PSN and number.
    unacked: Vec<(Psn, usize)>,
    whole: BTreeSet<usize>,
}

/// Connections of a capture by their numbers in the connection manager's messages.
#[derive(Default)]
struct Reader {
    record: Record,
    /// By the connector and its number.
    by_connector: BTreeMap<(IpAddr, u32), usize>,
    /// By either side and its number.
    by_id: BTreeMap<(IpAddr, u32), usize>,
    /// By address and queue pair of the receiver.
    streams: BTreeMap<(IpAddr, u32), Stream>,
    frame: u64,
    time_ns: u64,
    /// Of the IP header.
    tos: u8,
}

/// RDMA_CM's port of an address.
pub(super) fn port_of(addr: IpAddr) -> u16 {
    match addr {
        IpAddr::V4(_) => PORT_V4,
        IpAddr::V6(_) => PORT_V6,
    }
}

/// Type of service in a request's private data.
fn tos(connector: IpAddr, private: &[u8]) -> u8 {
    Private::parse(port_of(connector), private).map_or(0, |private| private.common().tos)
}

impl Reader {
    fn event(&mut self, what: What) {
        self.record.events.push((self.time_ns, what));
    }

    fn mad(&mut self, from: IpAddr, to: IpAddr, mad: &Mad<'_>) {
        match mad.attribute() {
            Mad::REQ if !self.by_connector.contains_key(&(from, mad.local())) => {
                let id = self.record.links.len();
                self.by_connector.insert((from, mad.local()), id);
                self.by_id.insert((from, mad.local()), id);
                let private = [mad.bytes(140 + 36, 56), Vec::new()];
                self.record.links.push(Link {
                    connector: from,
                    acceptor: to,
                    qps: [mad.word(32) >> 8, 0],
                    tos: tos(from, &private[0]),
                    private: Some(private),
                    is_replied: false,
                    is_confirmed: false,
                });
                self.event(What::Request(id));
            }
            Mad::REP => {
                let Some(&id) = self.by_connector.get(&(to, mad.remote())) else {
                    return;
                };
                let link = &mut self.record.links[id];
                if std::mem::replace(&mut link.is_replied, true) {
                    return;
                }
                link.qps[1] = mad.word(12) >> 8;
                if let Some(private) = &mut link.private {
                    private[1] = mad.bytes(36, 196);
                }
                self.by_id.insert((from, mad.local()), id);
                self.event(What::Reply(id));
            }
            Mad::RTU => {
                if let Some(&id) = self.by_id.get(&(from, mad.local())) {
                    self.confirm(id);
                }
            }
            Mad::DREQ => {
                if let Some(&id) = self.by_id.get(&(from, mad.local()))
                    && !self.record.events.iter().any(|(_, what)| *what == What::End(id))
                {
                    self.event(What::End(id));
                }
            }
            _ => {}
        }
    }

    fn confirm(&mut self, id: usize) {
        let link = &mut self.record.links[id];
        if link.is_replied && !std::mem::replace(&mut link.is_confirmed, true) {
            self.event(What::Confirm(id));
        }
    }

    /// The connection of which a queue pair is an end; the last one, as numbers may come again.
    fn link(&self, end: IpAddr, qp: u32) -> Option<usize> {
        self.record
            .links
            .iter()
            .rposition(|link| (link.connector, link.qps[0]) == (end, qp) || (link.acceptor, link.qps[1]) == (end, qp))
    }

    /// Connection that is older than the capture: its ends are learned from their packets.
    fn older(&mut self, from: IpAddr, to: IpAddr, qp: u32) -> usize {
        let tos = self.tos;
        let is_it = |link: &Link| link.private.is_none() && link.tos == tos;
        let known = self.record.links.iter().position(is_it);
        let id = known.unwrap_or_else(|| {
            self.record.links.push(Link {
                connector: from,
                acceptor: to,
                qps: [0, 0],
                tos,
                private: None,
                is_replied: true,
                is_confirmed: true,
            });
            self.record.links.len() - 1
        });
        let link = &mut self.record.links[id];
        let end = usize::from(link.acceptor == to);
        link.qps[end] = qp;
        id
    }

    fn packet(&mut self, from: IpAddr, to: IpAddr, packet: &Packet<'_>) {
        let bth = packet.header.bth;
        let (info, qp) = (bth.opcode.info(), bth.dest_qp.value());
        let id = self.link(to, qp).unwrap_or_else(|| self.older(from, to, qp));
        if self.record.links[id].connector == from {
            self.confirm(id);
        }
        if let Some(aeth) = packet.header.aeth() {
            let end = match aeth.syndrome {
                Syndrome::Ack(_) => bth.psn.next(),
                _ => bth.psn,
            };
            let link = &self.record.links[id];
            // What the receiver of this answer has sent, which goes to the other end.
            let other = match link.connector == to {
                true => (link.acceptor, link.qps[1]),
                false => (link.connector, link.qps[0]),
            };
            self.acknowledged(other, end);
        }
        if info.class == Class::Send {
            self.send((from, id), (to, qp), packet);
        }
    }

    fn acknowledged(&mut self, stream: (IpAddr, u32), end: Psn) {
        let Some(stream) = self.streams.get_mut(&stream) else {
            return;
        };
        let unacked = std::mem::take(&mut stream.unacked);
        let (arrived, rest): (Vec<_>, Vec<_>) = unacked.into_iter().partition(|(last, _)| last.is_before(end));
        stream.unacked = rest;
        for (_, number) in arrived {
            self.event(What::Arrive(number));
        }
    }

    fn send(&mut self, (from, link): (IpAddr, usize), to: (IpAddr, u32), packet: &Packet<'_>) {
        let bth = packet.header.bth;
        let position = bth.opcode.info().position;
        let stream = self.streams.entry(to).or_default();
        let mut begins = None;
        if position.starts() {
            let next = self.record.sent.len();
            let number = *stream.begun.entry(bth.psn.value()).or_insert(next);
            if number == next {
                begins = Some(number);
                self.record.sent.push(Sent {
                    link,
                    from,
                    frame: self.frame,
                    bytes: Vec::new(),
                });
            }
            stream.part = Some((number, bth.psn, Vec::new()));
        }
        if let Some((number, next, bytes)) = stream.part.as_mut().filter(|(_, next, _)| *next == bth.psn) {
            *next = bth.psn.next();
            bytes.extend_from_slice(packet.payload);
            if position.ends() && stream.whole.insert(*number) {
                let sent = &mut self.record.sent[*number];
                (sent.frame, sent.bytes) = (self.frame, std::mem::take(bytes));
                stream.unacked.push((bth.psn, *number));
            }
        }
        if let Some(number) = begins {
            self.event(What::Begin(number));
        }
    }

    /// Leaves out attempts to connect that came to nothing, and SENDs that were never whole.
    fn done(self) -> Record {
        let Record { links, sent, events } = self.record;
        let stands = |id: &usize| links[*id].is_confirmed;
        let counts = |what: &What| match what {
            What::Request(id) | What::Reply(id) | What::Confirm(id) | What::End(id) => stands(id),
            What::Begin(n) | What::Arrive(n) => !sent[*n].bytes.is_empty() && stands(&sent[*n].link),
        };
        let events = events.into_iter().filter(|(_, what)| counts(what)).collect();
        Record { links, sent, events }
    }
}

/// Reads a capture.
///
/// # Errors
/// When it can't be read.
pub(super) fn read(path: &Path) -> Result<Record, Error> {
    let mut capture = Capture::open(path)?;
    let mut reader = Reader::default();
    while let Some(frame) = capture.next_frame() {
        let frame = frame?;
        (reader.frame, reader.time_ns) = (frame.index, frame.time_ns);
        let Ok(datagram) = decode(frame.link, frame.data) else {
            continue;
        };
        let Ok(packet) = Packet::parse(datagram.payload) else {
            continue;
        };
        let (from, to) = (datagram.src.ip(), datagram.dst.ip());
        reader.tos = match datagram.ip {
            Ip::V4 { tos, .. } => tos,
            Ip::V6 { traffic_class } => traffic_class,
        };
        match packet.header.bth.opcode.info().service {
            Service::Ud if packet.payload.len() >= 256 => reader.mad(from, to, &Mad(packet.payload)),
            Service::Rc => reader.packet(from, to, &packet),
            _ => {}
        }
    }
    Ok(reader.done())
}
