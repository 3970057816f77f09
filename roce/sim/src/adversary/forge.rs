//! What somebody who only knows addresses and the protocol can put into a packet.

use std::net::{IpAddr, SocketAddr};

use roce_bth::{Aeth, Bth, Deth, Header, Msn, Opcode, Psn, QKey, Qpn, RKey, ROCE_UDP_PORT, Reth, Syndrome};
use roce_cm::{
    RejectReason,
    cma::{CmaHeader, HEADER_LEN, PortSpace, ServiceId},
    mad::{Attribute, Drep, Dreq, Mad, Message, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq, Subject, Transport},
};
use roce_icrc::Flow;

use rtrs::proto::ConnReq;
use zerocopy::IntoBytes;

use crate::{admission::uuid, rng::Dice, world::LISTEN_PORT};

/// Whom a packet pretends to come from or goes to.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) addr: IpAddr,
    /// The adapter's GUID: made of its MAC address, so anybody may know it.
    pub(super) guid: u64,
    /// Queue pairs that take datagrams: whoever asks (SIDR) is told their numbers, but not their queue keys.
    pub(super) datagram_qpns: Vec<Qpn>,
    /// Connected queue pairs.
    pub(super) connected: Vec<Guessed>,
}

/// A queue pair whose number was guessed: 2^24 packets make sure of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guessed {
    pub(super) peer: IpAddr,
    pub(super) qpn: Qpn,
    /// The last PSNs of requests and of answers to it. Guesses stay away from them: each hits a window of some hundred PSNs
    /// once in 2^16 times, and who hits it may do what the peer may.
    pub(super) live: [u32; 2],
}

/// The packets of a campaign.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// Management datagrams of this kind, or of any.
    Mads(Option<Attribute>),
    /// Any opcode to any queue pair.
    Opcodes,
    /// Any opcode to a connected queue pair, in its peer's name, with a guessed PSN.
    Connected,
    /// To QP1, but no management datagram.
    Gsi,
    /// Datagrams with a queue key that is not the receiver's.
    Datagrams,
    /// To the multicast queue pair.
    Multicast,
    /// Congestion notifications.
    Cnps,
    /// Whole packets cut off, and noise.
    Garbage,
    /// Requests for sessions that look like a real client's.
    Sessions,
    /// One after the other of all of these.
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
    pub(super) fn draw(dice: &mut Dice) -> Self {
        match dice.index(12) {
            0 | 1 => Self::Mads(Some(Attribute::Req)),
            2 => Self::Mads(Some(dice.pick(&Attribute::ALL))),
            3 | 4 => Self::Mads(None),
            5 => Self::Everything,
            6 => Self::Connected,
            _ => dice.pick(&KINDS),
        }
    }
}

/// One packet without its ICRC (four bytes are left for it).
pub(super) fn packet(what: What, from: &Place, to: &Place, dice: &mut Dice) -> Vec<u8> {
    match what {
        What::Mads(kind) => {
            let kind = kind.unwrap_or_else(|| dice.pick(&Attribute::ALL));
            let mut mad = Mad::new(dice.next(), message(kind, from, to, dice));
            if dice.chance(0.05) {
                mad.attribute_modifier = dice.next() as u32;
            }
            to_gsi(&mad.emit(), dice)
        }
        What::Sessions => {
            let mad = Mad::new(dice.next(), session(from, to, dice));
            to_gsi(&mad.emit(), dice)
        }
        What::Opcodes => {
            let opcode = dice.pick(Opcode::ALL);
            any_opcode(opcode, Qpn::new(dice.next() as u32), dice)
        }
        What::Connected => guess(from, to, dice),
        What::Gsi => match dice.index(4) {
            0 => any_opcode(dice.pick(Opcode::ALL), Qpn::GSI, dice),
            1 => datagram(Qpn::GSI, QKey(dice.next() as u32), 256, dice),
            2 => {
                let len = dice.range(0, 80) as usize * 4;
                datagram(Qpn::GSI, QKey::GSI, len, dice)
            }
            _ => datagram(Qpn::GSI, QKey::GSI, 256, dice),
        },
        What::Datagrams => {
            let qpn = match to.datagram_qpns.as_slice() {
                [] => Qpn::new(dice.next() as u32),
                known => dice.pick(known),
            };
            // Bit 31 is set in no program's key, so no guess is right.
            let qkey = QKey(dice.next() as u32 | 1 << 31);
            let len = dice.range(0, 256) as usize * 4;
            datagram(qpn, qkey, len, dice)
        }
        What::Multicast => {
            let len = dice.range(0, 64) as usize * 4;
            datagram(Qpn::MULTICAST, QKey(dice.next() as u32), len, dice)
        }
        What::Cnps => any_opcode(Opcode::Cnp, Qpn::new(dice.next() as u32), dice),
        What::Garbage => {
            if dice.chance(0.5) {
                let len = dice.range(0, 400) as usize;
                return dice.bytes(len);
            }
            let mut whole = packet(What::Mads(None), from, to, dice);
            let keep = dice.index(whole.len());
            whole.truncate(keep);
            whole
        }
        What::Everything => {
            let kind = dice.pick(&KINDS);
            packet(kind, from, to, dice)
        }
    }
}

/// Writes the ICRC as it is right with this Identification.
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

/// A UD SEND with the right keys for QP1.
pub(super) fn to_gsi(mad: &[u8], dice: &mut Dice) -> Vec<u8> {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(dice.next() as u32)));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    with_payload(&header, mad)
}

fn datagram(qpn: Qpn, qkey: QKey, len: usize, dice: &mut Dice) -> Vec<u8> {
    let opcode = dice.pick(&[Opcode::UdSendOnly, Opcode::UdSendOnlyImm]);
    let mut header = Header::new(Bth::new(opcode, qpn, Psn::new(dice.next() as u32)));
    header.bth.solicited = dice.chance(0.3);
    header.deth = Some(Deth {
        qkey,
        reserved: 0,
        src_qp: dice.pick(&[Qpn::GSI, Qpn::new(dice.clone().next() as u32)]),
    });
    with_payload(&header, &dice.bytes(len))
}

/// A well-formed packet of an opcode with fields that mean something, as far as one can guess.
pub(super) fn any_opcode(opcode: Opcode, qpn: Qpn, dice: &mut Dice) -> Vec<u8> {
    let mut header = Header::new(Bth::new(opcode, qpn, Psn::new(dice.next() as u32)));
    header.bth.ack_req = dice.chance(0.5);
    header.bth.becn = dice.chance(0.1);
    header.reth = Some(Reth {
        va: dice.next(),
        rkey: RKey(dice.next() as u32),
        dma_len: dice.pick(&[0, 1024, u32::MAX]),
    });
    header.aeth = Some(Aeth {
        syndrome: Syndrome::from_byte(dice.pick(&[0x1f, 0x21, 0x60, 0x61, 0x62, 0x63, 0xff])),
        msn: Msn::new(dice.next() as u32),
    });
    header.deth = Some(Deth {
        qkey: QKey(dice.next() as u32 | 1 << 31),
        reserved: 0,
        src_qp: Qpn::new(dice.next() as u32),
    });
    let len = match opcode.info().payload {
        true => dice.pick(&[0, 4, 256, 1024]),
        false => 0,
    };
    with_payload(&header, &dice.bytes(len))
}

/// How far guessed PSNs are from the live ones.
const FAR: u32 = 1 << 17;

fn guess(from: &Place, to: &Place, dice: &mut Dice) -> Vec<u8> {
    let opcode = dice.pick(Opcode::ALL);
    let known: Vec<Guessed> = to.connected.iter().copied().filter(|g| g.peer == from.addr).collect();
    if known.is_empty() {
        return any_opcode(opcode, Qpn::new(dice.next() as u32), dice);
    }
    let target = dice.pick(&known);
    let mut bytes = any_opcode(opcode, target.qpn, dice);
    let psn = loop {
        let psn = dice.next() as u32 & 0x00ff_ffff;
        let far = |live: u32| {
            let distance = psn.wrapping_sub(live) & 0x00ff_ffff;
            (FAR..(1 << 24) - FAR).contains(&distance)
        };
        if target.live.into_iter().all(far) {
            break psn;
        }
    };
    bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
    bytes
}

/// A communication ID: peers draw theirs at random, so no guess is better than another.
fn comm_id(dice: &mut Dice) -> u32 {
    let small = dice.range(0, 64) as u32;
    let any = dice.next() as u32;
    if dice.chance(0.2) { small } else { any }
}

fn guid(of: &Place, dice: &mut Dice) -> u64 {
    let any = dice.next();
    if dice.chance(0.5) { of.guid } else { any }
}

fn subject(dice: &mut Dice) -> Subject {
    dice.pick(&[Subject::Req, Subject::Rep, Subject::Other])
}

fn message(kind: Attribute, from: &Place, to: &Place, dice: &mut Dice) -> Message {
    let (local_comm_id, remote_comm_id) = (comm_id(dice), comm_id(dice));
    let qpn = Qpn::new(dice.next() as u32);
    match kind {
        Attribute::Req => req(from, to, dice).into(),
        Attribute::Mra => Mra {
            local_comm_id,
            remote_comm_id,
            subject: subject(dice),
            service_timeout: dice.pick(&[0, 20, 31]),
            ..Mra::default()
        }
        .into(),
        Attribute::Rej => {
            let mut info = [0; 72];
            info[..8].copy_from_slice(&guid(from, dice).to_be_bytes());
            Rej {
                local_comm_id,
                remote_comm_id,
                subject: subject(dice),
                info_length: dice.pick(&[0, 8, 72]),
                reason: dice.pick(&[RejectReason::TIMEOUT.0, RejectReason::CONSUMER.0, 6, 10, 0xffff]),
                info,
                ..Rej::default()
            }
            .into()
        }
        Attribute::Rep => Rep {
            local_comm_id,
            remote_comm_id,
            local_qpn: qpn,
            starting_psn: Psn::new(dice.next() as u32),
            local_ca_guid: guid(from, dice),
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
            let space = dice.pick(&[PortSpace::Udp, PortSpace::Ipoib, PortSpace::Ib, PortSpace::Tcp]);
            let mut private_data = [0; 216];
            private_data[..HEADER_LEN].copy_from_slice(&cma_header(from, to, dice));
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

fn cma_header(from: &Place, to: &Place, dice: &mut Dice) -> [u8; HEADER_LEN] {
    CmaHeader {
        port: dice.next() as u16,
        src: from.addr,
        dst: to.addr,
    }
    .emit()
}

/// A request to connect that looks like a client's, mostly, and asks for as much patience as the fields hold.
pub(super) fn req(from: &Place, to: &Place, dice: &mut Dice) -> Req {
    let mut private_data = [0; 92];
    private_data[..HEADER_LEN].copy_from_slice(&cma_header(from, to, dice));
    // What the simulator's programs send: small numbers, as session messages are.
    let (conn, life) = (dice.range(0, 4) as u32, dice.range(1, 6) as u32);
    private_data[HEADER_LEN..HEADER_LEN + 4].copy_from_slice(&conn.to_be_bytes());
    private_data[HEADER_LEN + 4..HEADER_LEN + 8].copy_from_slice(&life.to_be_bytes());
    if dice.chance(0.5) {
        let noise = dice.bytes(40);
        private_data[HEADER_LEN + 8..HEADER_LEN + 48].copy_from_slice(&noise);
    }
    let (stranger, heard) = (dice.next(), dice.chance(0.9));
    Req {
        local_comm_id: comm_id(dice),
        service_id: if heard {
            ServiceId::new(PortSpace::Tcp, LISTEN_PORT).0
        } else {
            stranger
        },
        local_ca_guid: guid(from, dice),
        local_qpn: Qpn::new(dice.next() as u32),
        responder_resources: dice.next() as u8,
        initiator_depth: dice.next() as u8,
        remote_cm_response_timeout: dice.pick(&[0, 1, 20, 31]),
        transport: dice.pick(&[Transport::Rc, Transport::Rc, Transport::Rc, Transport::Uc]),
        flow_control: dice.chance(0.5),
        starting_psn: Psn::new(dice.next() as u32),
        local_cm_response_timeout: dice.pick(&[0, 0, 1, 8, 20, 31]),
        retry_count: dice.range(0, 7) as u8,
        path_mtu: dice.pick(&[1, 1, 2, 3, 5, 0]),
        rnr_retry_count: dice.range(0, 7) as u8,
        max_cm_retries: dice.pick(&[0, 1, 15, 15]),
        srq: dice.chance(0.2),
        primary_local_gid: from.addr.into(),
        primary_remote_gid: to.addr.into(),
        primary_ack_timeout: dice.range(0, 31) as u8,
        primary_traffic_class: dice.next() as u8,
        primary_hop_limit: 64,
        private_data,
        ..Req::default()
    }
}

/// A request for a session's first connection, or another one, as RTRS clients send it.
fn session(from: &Place, to: &Place, dice: &mut Dice) -> Req {
    let (path, session) = (uuid(dice), uuid(dice));
    let cid = dice.pick(&[0, 0, 0, 1]);
    let hello = ConnReq::new(cid, dice.pick(&[3, 3, 2, 65]), 0, path, session, true);
    let mut asked = req(from, to, dice);
    asked.private_data[HEADER_LEN..].copy_from_slice(hello.as_bytes());
    Req {
        local_comm_id: dice.next() as u32 | 1,
        service_id: ServiceId::new(PortSpace::Tcp, LISTEN_PORT).0,
        path_mtu: 1,
        transport: Transport::Rc,
        ..asked
    }
}

/// Which IPv4 Identifications a campaign's packets are sealed with: what peers are known to send, near and far from it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Idents {
    Zero,
    Small,
    Fixed(u16),
    Counter(u16),
    Random,
    /// No ICRC is right.
    Unsealed,
}

impl Idents {
    pub(super) fn draw(dice: &mut Dice) -> Self {
        match dice.index(10) {
            0 | 1 => Self::Zero,
            2 => Self::Small,
            3 => Self::Fixed(dice.next() as u16),
            4..=6 => Self::Counter(dice.next() as u16),
            7 | 8 => Self::Random,
            _ => Self::Unsealed,
        }
    }

    /// The next packet's, `None` if it is not sealed.
    pub(super) fn next(&mut self, dice: &mut Dice) -> Option<u16> {
        match self {
            Self::Zero => Some(0),
            Self::Small => Some(dice.range(0, 127) as u16),
            Self::Fixed(id) => Some(*id),
            Self::Counter(next) => {
                *next = next.wrapping_add(dice.range(1, 3) as u16);
                Some(*next)
            }
            Self::Random => Some(dice.next() as u16),
            Self::Unsealed => None,
        }
    }
}
