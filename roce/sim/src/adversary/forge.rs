//! Packets that an off-path attacker can make.

use std::net::{IpAddr, SocketAddr};

use roce_bth::{
    Aeth, AtomicEth, Bth, Class, Deth, Header, Msn, Opcode, Position, Psn, QKey, Qpn, RKey, ROCE_UDP_PORT, Reth, Srqn,
    Syndrome, XrcEth,
};
use roce_cm::{
    RejectReason,
    cma::{CmaHeader, HEADER_LEN, PortSpace, ServiceId},
    mad::{Attribute, Drep, Dreq, Mad, Message, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq, Subject, Transport},
};
use roce_icrc::Flow;

use rtrs::proto::ConnReq;
use zerocopy::IntoBytes;

use super::live::{Direction, Target};
use crate::{admission::uuid, rng::Rng, world::LISTEN_PORT};

/// Claimed sender or receiver of a packet, as the attacker knows it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) addr: IpAddr,
    /// GUID of the adapter: made of its MAC address, so it is no secret.
    pub(super) guid: u64,
    /// Queue pairs that take datagrams. SIDR gives anybody their numbers, but not their queue keys.
    pub(super) datagram_qpns: Vec<Qpn>,
    /// Connected queue pairs.
    pub(super) connected: Vec<Target>,
    /// Numbers of queue pairs that are connected, or are being connected.
    pub(super) qpns: Vec<Qpn>,
}

/// Kind of packets of a campaign.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// Management datagrams of this kind, or of any.
    Mads(Option<Attribute>),
    /// Any opcode to any queue pair.
    Opcodes,
    /// Any opcode to a connected queue pair, in its peer's name, at or around a PSN in use.
    Connected,
    /// Packets to QP1 that are no management datagrams.
    Gsi,
    /// Datagrams with a queue key that is not the receiver's.
    Datagrams,
    /// Packets to the multicast queue pair.
    Multicast,
    /// Congestion notifications.
    Cnps,
    /// Truncated packets, and noise.
    Garbage,
    /// Requests for sessions that look like a real client's.
    Sessions,
    /// Requests to connect that the listener's program is given, and is slow to answer.
    Backlog,
    /// All of these in turns.
    Everything,
}

const KINDS: [What; 8] = [
    What::Mads(None),
    What::Opcodes,
    What::Connected,
    What::Gsi,
    What::Datagrams,
    What::Multicast,
    What::Cnps,
    What::Garbage,
];

impl What {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        match rng.index(12) {
            0 | 1 => Self::Mads(Some(Attribute::Req)),
            2 => Self::Mads(Some(rng.pick(&Attribute::ALL))),
            3 | 4 => Self::Mads(None),
            5 => Self::Everything,
            6 => Self::Connected,
            _ => rng.pick(&KINDS),
        }
    }
}

/// Forges one packet, with four bytes for its ICRC.
pub(super) fn packet(what: What, from: &Place, to: &Place, rng: &mut Rng) -> Vec<u8> {
    match what {
        What::Mads(kind) => {
            let kind = kind.unwrap_or_else(|| rng.pick(&Attribute::ALL));
            let mut mad = Mad::new(rng.next(), message(kind, from, to, rng));
            if rng.chance(0.05) {
                mad.attribute_modifier = rng.next() as u32;
            }
            to_gsi(&mad.emit(), rng)
        }
        What::Sessions => {
            let mad = Mad::new(rng.next(), session(from, to, rng));
            to_gsi(&mad.emit(), rng)
        }
        What::Backlog => {
            let mad = Mad::new(rng.next(), acceptable(req(from, to, rng), rng));
            to_gsi(&mad.emit(), rng)
        }
        What::Opcodes => {
            let opcode = rng.pick(Opcode::ALL);
            any_opcode(opcode, Qpn::new(rng.next() as u32), rng)
        }
        What::Connected => connected(from, to, rng),
        What::Gsi => match rng.index(4) {
            0 => any_opcode(rng.pick(Opcode::ALL), Qpn::GSI, rng),
            1 => datagram(Qpn::GSI, QKey(rng.next() as u32), 256, rng),
            2 => {
                let len = rng.range(0, 80) as usize * 4;
                datagram(Qpn::GSI, QKey::GSI, len, rng)
            }
            _ => datagram(Qpn::GSI, QKey::GSI, 256, rng),
        },
        What::Datagrams => {
            let qpn = match to.datagram_qpns.as_slice() {
                [] => Qpn::new(rng.next() as u32),
                known => rng.pick(known),
            };
            // Bit 31 is set in no program's key, so no guess is right.
            let qkey = QKey(rng.next() as u32 | 1 << 31);
            let len = rng.range(0, 256) as usize * 4;
            datagram(qpn, qkey, len, rng)
        }
        What::Multicast => {
            let len = rng.range(0, 64) as usize * 4;
            datagram(Qpn::MULTICAST, QKey(rng.next() as u32), len, rng)
        }
        What::Cnps => any_opcode(Opcode::Cnp, Qpn::new(rng.next() as u32), rng),
        What::Garbage => {
            if rng.chance(0.5) {
                let len = rng.range(0, 400) as usize;
                return rng.bytes(len);
            }
            let mut whole = packet(What::Mads(None), from, to, rng);
            let keep = rng.index(whole.len());
            whole.truncate(keep);
            whole
        }
        What::Everything => {
            let kind = rng.pick(&KINDS);
            packet(kind, from, to, rng)
        }
    }
}

/// Writes the ICRC that is right with this Identification.
pub(super) fn seal(src: SocketAddr, dst: IpAddr, identification: u16, packet: &mut [u8]) {
    if let Ok(flow) = Flow::try_from((src, SocketAddr::new(dst, ROCE_UDP_PORT))) {
        flow.seal(identification, packet);
    }
}

pub(super) fn with_payload(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; header.wire_len() + payload.len() + roce_bth::ICRC_LEN];
    let at = header.emit(&mut bytes);
    bytes[at..at + payload.len()].copy_from_slice(payload);
    bytes
}

/// Wraps a MAD into a UD SEND with the right keys for QP1.
pub(super) fn to_gsi(mad: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(rng.next() as u32)));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    with_payload(&header, mad)
}

fn datagram(qpn: Qpn, qkey: QKey, len: usize, rng: &mut Rng) -> Vec<u8> {
    let opcode = rng.pick(&[Opcode::UdSendOnly, Opcode::UdSendOnlyImm]);
    let mut header = Header::new(Bth::new(opcode, qpn, Psn::new(rng.next() as u32)));
    header.bth.solicited = rng.chance(0.3);
    header.deth = Some(Deth {
        qkey,
        reserved: 0,
        src_qp: rng.pick(&[Qpn::GSI, Qpn::new(rng.clone().next() as u32)]),
    });
    with_payload(&header, &rng.bytes(len))
}

/// Draws the headers of a well-formed packet: fields that mean something, as far as one can guess.
fn any_header(opcode: Opcode, qpn: Qpn, rng: &mut Rng) -> Header {
    let mut header = Header::new(Bth::new(opcode, qpn, Psn::new(rng.next() as u32)));
    header.bth.ack_req = rng.chance(0.5);
    header.bth.becn = rng.chance(0.1);
    header.reth = Some(Reth {
        va: rng.next(),
        rkey: RKey(rng.next() as u32),
        dma_len: rng.pick(&[0, 1024, u32::MAX]),
    });
    header.aeth = Some(Aeth {
        syndrome: Syndrome::from_byte(rng.pick(&[0x1f, 0x21, 0x60, 0x61, 0x62, 0x63, 0xff])),
        msn: Msn::new(rng.next() as u32),
    });
    header.deth = Some(Deth {
        qkey: QKey(rng.next() as u32 | 1 << 31),
        reserved: 0,
        src_qp: Qpn::new(rng.next() as u32),
    });
    header
}

/// Forges a well-formed packet of an opcode.
pub(super) fn any_opcode(opcode: Opcode, qpn: Qpn, rng: &mut Rng) -> Vec<u8> {
    let header = any_header(opcode, qpn, rng);
    let len = match opcode.info().payload {
        true => rng.pick(&[0, 4, 256, 1024]),
        false => 0,
    };
    with_payload(&header, &rng.bytes(len))
}

/// Byte that fills forged payloads. No program writes eight of them in a row.
pub(crate) const MARK: u8 = 0x5a;

/// Distance of most guesses from a PSN in use.
const NEAR: u64 = 5000;

const SENDS: [Opcode; 7] = [
    Opcode::RcSendFirst,
    Opcode::RcSendMiddle,
    Opcode::RcSendLast,
    Opcode::RcSendLastImm,
    Opcode::RcSendOnly,
    Opcode::RcSendOnlyImm,
    Opcode::RcSendOnlyInv,
];
const WRITES: [Opcode; 6] = [
    Opcode::RcWriteFirst,
    Opcode::RcWriteMiddle,
    Opcode::RcWriteLast,
    Opcode::RcWriteLastImm,
    Opcode::RcWriteOnly,
    Opcode::RcWriteOnlyImm,
];
const READ_RESPONSES: [Opcode; 4] = [
    Opcode::RcReadResponseFirst,
    Opcode::RcReadResponseMiddle,
    Opcode::RcReadResponseLast,
    Opcode::RcReadResponseOnly,
];
const OTHER_REQUESTS: [Opcode; 5] = [
    Opcode::RcReadRequest,
    Opcode::RcCompareSwap,
    Opcode::RcFetchAdd,
    Opcode::RcFlush,
    Opcode::RcAtomicWrite,
];

/// Draws the opcode of a packet to a connected queue pair.
fn connected_opcode(xrc: bool, rng: &mut Rng) -> Opcode {
    let opcode = match rng.index(20) {
        0..=3 => rng.pick(&SENDS),
        4..=7 => rng.pick(&WRITES),
        8 | 9 => rng.pick(&OTHER_REQUESTS),
        10..=12 => rng.pick(&READ_RESPONSES),
        13..=15 => Opcode::RcAcknowledge,
        16 => Opcode::RcAtomicAcknowledge,
        17 => return Opcode::SelectiveAck,
        18 => return Opcode::Cnp,
        _ => return rng.pick(Opcode::ALL),
    };
    // The services differ in the top bits.
    Opcode::from_byte(opcode as u8 | 0xa0).filter(|_| xrc).unwrap_or(opcode)
}

/// Draws a PSN at or around a live one.
fn guess_psn(live: Psn, rng: &mut Rng) -> Psn {
    match rng.index(10) {
        0 => live,
        1 => live.next(),
        2..=4 => live.add(rng.range(1, 64) as u32),
        5 | 6 => live.add(rng.range(1, NEAR) as u32),
        7 => live.sub(rng.range(1, NEAR) as u32),
        8 => live.add(rng.range(64, 4200) as u32),
        _ => Psn::new(rng.next() as u32),
    }
}

/// Forges a packet to a connected queue pair in its peer's name, at or around the PSNs that are in use.
fn connected(from: &Place, to: &Place, rng: &mut Rng) -> Vec<u8> {
    let known: Vec<Target> = to.connected.iter().copied().filter(|t| t.peer == from.addr).collect();
    if known.is_empty() {
        return any_opcode(rng.pick(Opcode::ALL), Qpn::new(rng.next() as u32), rng);
    }
    let target = rng.pick(&known);
    let opcode = connected_opcode(target.xrc, rng);
    let direction = Direction::of(opcode) as usize;
    let live = target.last[direction]
        .or(target.last[1 - direction])
        .unwrap_or_default();
    let psn = guess_psn(live, rng);
    let payload = connected_payload(opcode, psn, target.mtu, rng);
    let mut header = any_header(opcode, target.qpn, rng);
    header.bth.psn = psn;
    header.bth.ack_req = rng.chance(0.5);
    header.bth.becn = false;
    header.bth.pad = payload.len().wrapping_neg() as u8 & 3;
    if let Some((va, rkey)) = target.memory.filter(|_| rng.chance(0.7)) {
        let at = va + 8 * rng.range(0, 100);
        header.reth = Some(Reth {
            va: at,
            rkey,
            dma_len: match opcode.info().position {
                Position::Only if opcode.info().payload => payload.len() as u32,
                _ => rng.pick(&[8, target.mtu, 2 * target.mtu, 4 * target.mtu]) as u32,
            },
        });
        header.atomic_eth = Some(AtomicEth {
            va: at,
            rkey,
            swap_add: u64::from_ne_bytes([MARK; 8]),
            compare: 0,
        });
        header.ieth = Some(rkey);
    }
    header.imm = Some(u32::from_ne_bytes([MARK; 4]));
    header.xrceth = Some(XrcEth {
        reserved: 0,
        srqn: Srqn::new(100 + rng.range(0, 2) as u32),
    });
    let mut padded = payload;
    padded.resize(padded.len().next_multiple_of(4), 0);
    with_payload(&header, &padded)
}

/// Draws a payload of a length that goes with the opcode: of marks, or for selective acknowledgements a bitmap.
fn connected_payload(opcode: Opcode, psn: Psn, mtu: usize, rng: &mut Rng) -> Vec<u8> {
    let info = opcode.info();
    if !info.payload {
        return Vec::new();
    }
    if info.class == Class::SelectiveAcknowledge {
        let expected = psn.add(rng.range(0, 64) as u32);
        let mut payload = expected.value().to_be_bytes().to_vec();
        for _ in 0..rng.range(0, 4) {
            payload.extend(rng.pick(&[u64::MAX, 1 << 63, u64::MAX << 32]).to_le_bytes());
        }
        return payload;
    }
    let len = match info.position {
        Position::First | Position::Middle if rng.chance(0.9) => mtu,
        Position::Last => rng.range(1, mtu as u64) as usize,
        // Four bytes are the shortest payload, with which a packet has 20.
        _ if info.class == Class::AtomicWrite => 8,
        _ => rng.pick(&[0, 4, 8, 64, mtu - 1, mtu]),
    };
    vec![MARK; len]
}

/// Draws a communication ID. Peers draw theirs at random, so no guess is better than another.
fn comm_id(rng: &mut Rng) -> u32 {
    let small = rng.range(0, 64) as u32;
    let any = rng.next() as u32;
    if rng.chance(0.2) { small } else { any }
}

fn guid(of: &Place, rng: &mut Rng) -> u64 {
    let any = rng.next();
    if rng.chance(0.5) { of.guid } else { any }
}

fn subject(rng: &mut Rng) -> Subject {
    rng.pick(&[Subject::Req, Subject::Rep, Subject::Other])
}

fn message(kind: Attribute, from: &Place, to: &Place, rng: &mut Rng) -> Message {
    let (local_comm_id, remote_comm_id) = (comm_id(rng), comm_id(rng));
    let qpn = Qpn::new(rng.next() as u32);
    match kind {
        Attribute::Req => req(from, to, rng).into(),
        Attribute::Mra => Mra {
            local_comm_id,
            remote_comm_id,
            subject: subject(rng),
            service_timeout: rng.pick(&[0, 20, 31]),
            ..Mra::default()
        }
        .into(),
        Attribute::Rej => {
            let mut info = [0; 72];
            info[..8].copy_from_slice(&guid(from, rng).to_be_bytes());
            Rej {
                local_comm_id,
                remote_comm_id,
                subject: subject(rng),
                info_length: rng.pick(&[0, 8, 72]),
                reason: rng.pick(&[RejectReason::TIMEOUT.0, RejectReason::CONSUMER.0, 6, 10, 0xffff]),
                info,
                ..Rej::default()
            }
            .into()
        }
        Attribute::Rep => Rep {
            local_comm_id,
            remote_comm_id,
            local_qpn: qpn,
            starting_psn: Psn::new(rng.next() as u32),
            local_ca_guid: guid(from, rng),
            ..Rep::default()
        }
        .into(),
        Attribute::Rtu => Rtu {
            local_comm_id,
            remote_comm_id,
            ..Rtu::default()
        }
        .into(),
        Attribute::Dreq => Dreq {
            local_comm_id,
            remote_comm_id,
            remote_qpn: qpn,
            ..Dreq::default()
        }
        .into(),
        Attribute::Drep => Drep {
            local_comm_id,
            remote_comm_id,
            ..Drep::default()
        }
        .into(),
        Attribute::SidrReq => {
            let space = rng.pick(&[PortSpace::Udp, PortSpace::Ipoib, PortSpace::Ib, PortSpace::Tcp]);
            let mut private_data = [0; 216];
            private_data[..HEADER_LEN].copy_from_slice(&cma_header(from, to, rng));
            SidrReq {
                request_id: local_comm_id,
                service_id: ServiceId::new(space, LISTEN_PORT).0,
                private_data,
                ..SidrReq::default()
            }
            .into()
        }
        Attribute::SidrRep => SidrRep {
            request_id: remote_comm_id,
            qpn,
            ..SidrRep::default()
        }
        .into(),
    }
}

fn cma_header(from: &Place, to: &Place, rng: &mut Rng) -> [u8; HEADER_LEN] {
    CmaHeader {
        port: rng.next() as u16,
        src: from.addr,
        dst: to.addr,
    }
    .emit()
}

/// Forges a request to connect that mostly looks like a client's, with timeouts up to the largest.
pub(super) fn req(from: &Place, to: &Place, rng: &mut Rng) -> Req {
    let mut private_data = [0; 92];
    private_data[..HEADER_LEN].copy_from_slice(&cma_header(from, to, rng));
    // Small numbers, as the simulator's programs send them.
    let (conn, life) = (rng.range(0, 4) as u32, rng.range(1, 6) as u32);
    private_data[HEADER_LEN..HEADER_LEN + 4].copy_from_slice(&conn.to_be_bytes());
    private_data[HEADER_LEN + 4..HEADER_LEN + 8].copy_from_slice(&life.to_be_bytes());
    if rng.chance(0.5) {
        let noise = rng.bytes(40);
        private_data[HEADER_LEN + 8..HEADER_LEN + 48].copy_from_slice(&noise);
    }
    let (unknown, listening) = (rng.next(), rng.chance(0.9));
    // In the peer's name, of a queue pair that it has, from a port that it does not send from.
    let local_qpn = match from.qpns[..] {
        [_, ..] if rng.chance(0.5) => rng.pick(&from.qpns),
        _ => Qpn::new(rng.next() as u32),
    };
    // There ferroce reads the port.
    let src_port = if rng.chance(0.5) { rng.next() as u16 } else { 0 };
    Req {
        local_comm_id: comm_id(rng),
        service_id: if listening {
            ServiceId::new(PortSpace::Tcp, LISTEN_PORT).0
        } else {
            unknown
        },
        local_ca_guid: guid(from, rng),
        local_qkey: QKey(src_port.into()),
        local_qpn,
        responder_resources: rng.next() as u8,
        initiator_depth: rng.next() as u8,
        remote_cm_response_timeout: rng.pick(&[0, 1, 20, 31]),
        transport: rng.pick(&[Transport::Rc, Transport::Rc, Transport::Rc, Transport::Uc]),
        flow_control: rng.chance(0.5),
        starting_psn: Psn::new(rng.next() as u32),
        local_cm_response_timeout: rng.pick(&[0, 0, 1, 8, 20, 31]),
        retry_count: rng.range(0, 7) as u8,
        path_mtu: rng.pick(&[1, 1, 2, 3, 5, 0]),
        rnr_retry_count: rng.range(0, 7) as u8,
        max_cm_retries: rng.pick(&[0, 1, 15, 15]),
        srq: rng.chance(0.2),
        primary_local_gid: from.addr.into(),
        primary_remote_gid: to.addr.into(),
        primary_ack_timeout: rng.range(0, 31) as u8,
        primary_traffic_class: rng.next() as u8,
        primary_hop_limit: 64,
        private_data,
        ..Req::default()
    }
}

/// Forges a request for a session's first or further connection, as RTRS clients send it.
fn session(from: &Place, to: &Place, rng: &mut Rng) -> Req {
    let (path, session) = (uuid(rng), uuid(rng));
    let cid = rng.pick(&[0, 0, 0, 1]);
    let hello = ConnReq::new(cid, rng.pick(&[3, 3, 2, 65]), 0, path, session, true);
    let mut asked = req(from, to, rng);
    asked.private_data[HEADER_LEN..].copy_from_slice(hello.as_bytes());
    acceptable(asked, rng)
}

/// Makes a request one that no connection manager has a reason to refuse.
fn acceptable(asked: Req, rng: &mut Rng) -> Req {
    Req {
        local_comm_id: rng.next() as u32 | 1,
        service_id: ServiceId::new(PortSpace::Tcp, LISTEN_PORT).0,
        path_mtu: 1,
        transport: Transport::Rc,
        ..asked
    }
}

/// IPv4 Identifications that a campaign's packets are sealed with: near and far from those that peers send.
#[derive(Clone, Copy, Debug)]
pub(super) enum Idents {
    Zero,
    Small,
    Fixed(u16),
    Counter(u16),
    Random,
    /// All ICRCs are wrong.
    Unsealed,
}

impl Idents {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        match rng.index(10) {
            0 | 1 => Self::Zero,
            2 => Self::Small,
            3 => Self::Fixed(rng.next() as u16),
            4..=6 => Self::Counter(rng.next() as u16),
            7 | 8 => Self::Random,
            _ => Self::Unsealed,
        }
    }

    /// Returns the next packet's, or `None` if it is not sealed.
    pub(super) fn next(&mut self, rng: &mut Rng) -> Option<u16> {
        match self {
            Self::Zero => Some(0),
            Self::Small => Some(rng.range(0, 127) as u16),
            Self::Fixed(id) => Some(*id),
            Self::Counter(next) => {
                *next = next.wrapping_add(rng.range(1, 3) as u16);
                Some(*next)
            }
            Self::Random => Some(rng.next() as u16),
            Self::Unsealed => None,
        }
    }
}
