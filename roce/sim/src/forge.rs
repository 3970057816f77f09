//! Forged packets: management datagrams of every kind, and packets of any opcode, with ICRCs for chosen Identifications.
//! For the simulator's adversaries, and for attacks on programs (`tests/hostile`).

use std::net::{IpAddr, SocketAddr};

use roce_bth::{Aeth, Bth, Deth, Header, Msn, Opcode, Psn, QKey, Qpn, RKey, ROCE_UDP_PORT, Reth, Syndrome};
use roce_icrc::Flow;
use roce_port::cm::{
    RejectReason,
    cma::{CmaHeader, HEADER_LEN, PortSpace, ServiceId},
    mad::{Attribute, Drep, Dreq, Message, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq, Subject, Transport},
};

use crate::rng::Rng;

/// Bytes of private data that a program puts into a request to connect.
pub const PRIVATE_LEN: usize = 92 - HEADER_LEN;

/// Claimed sender or receiver of management datagrams, as an attacker knows it.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its address.
    pub addr: IpAddr,
    /// GUID of the adapter: made of its MAC address, so it is no secret.
    pub guid: u64,
    /// Number in the TCP port space that its program listens on.
    pub port: u16,
    /// Numbers of queue pairs that are connected, or are being connected.
    pub qpns: Vec<Qpn>,
}

/// Writes the ICRC that is right with an Identification.
pub fn seal(src: SocketAddr, dst: IpAddr, identification: u16, packet: &mut [u8]) {
    if let Ok(flow) = Flow::try_from((src, SocketAddr::new(dst, ROCE_UDP_PORT))) {
        flow.seal(identification, packet);
    }
}

/// Builds a packet, with four bytes for its ICRC.
pub fn with_payload(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; header.wire_len() + payload.len() + roce_bth::ICRC_LEN];
    let at = header.emit(&mut bytes);
    bytes[at..at + payload.len()].copy_from_slice(payload);
    bytes
}

/// Wraps a MAD into a UD SEND with the right keys for QP1.
pub fn to_gsi(mad: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(rng.number() as u32)));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    with_payload(&header, mad)
}

/// Draws the headers of a well-formed packet: fields that mean something, as far as one can guess.
pub(crate) fn any_header(opcode: Opcode, qpn: Qpn, rng: &mut Rng) -> Header {
    let mut header = Header::new(Bth::new(opcode, qpn, Psn::new(rng.number() as u32)));
    header.bth.ack_req = rng.chance(0.5);
    header.bth.becn = rng.chance(0.1);
    header.reth = Some(Reth {
        va: rng.number(),
        rkey: RKey(rng.number() as u32),
        dma_len: rng.pick(&[0, 1024, u32::MAX]),
    });
    header.aeth = Some(Aeth {
        syndrome: Syndrome::from_byte(rng.pick(&[0x1f, 0x21, 0x60, 0x61, 0x62, 0x63, 0xff])),
        msn: Msn::new(rng.number() as u32),
    });
    header.deth = Some(Deth {
        qkey: QKey(rng.number() as u32 | 1 << 31),
        reserved: 0,
        src_qp: Qpn::new(rng.number() as u32),
    });
    header
}

/// Forges a well-formed packet of an opcode.
pub fn any_opcode(opcode: Opcode, qpn: Qpn, rng: &mut Rng) -> Vec<u8> {
    let header = any_header(opcode, qpn, rng);
    let len = match opcode.info().payload {
        true => rng.pick(&[0, 4, 256, 1024]),
        false => 0,
    };
    with_payload(&header, &rng.bytes(len))
}

/// Draws a communication ID. Peers draw theirs at random, so no guess is better than another.
pub(crate) fn comm_id(rng: &mut Rng) -> u32 {
    let small = rng.range(0, 64) as u32;
    let any = rng.number() as u32;
    if rng.chance(0.2) { small } else { any }
}

fn guid(of: &Endpoint, rng: &mut Rng) -> u64 {
    let any = rng.number();
    if rng.chance(0.5) { of.guid } else { any }
}

fn subject(rng: &mut Rng) -> Subject {
    rng.pick(&[Subject::Req, Subject::Rep, Subject::Other])
}

/// Draws a message. `ids` are the communication IDs of its sender and of its receiver.
pub fn message(kind: Attribute, ids: [u32; 2], from: &Endpoint, to: &Endpoint, rng: &mut Rng) -> Message {
    let [local_comm_id, remote_comm_id] = ids;
    let qpn = Qpn::new(rng.number() as u32);
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
            starting_psn: Psn::new(rng.number() as u32),
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
            sidr_req(local_comm_id, space, from, to, rng).into()
        }
        Attribute::SidrRep => SidrRep {
            request_id: remote_comm_id,
            qpn,
            ..SidrRep::default()
        }
        .into(),
    }
}

/// Forges a question for the queue pair of a service in a port space.
pub(crate) fn sidr_req(request_id: u32, space: PortSpace, from: &Endpoint, to: &Endpoint, rng: &mut Rng) -> SidrReq {
    let mut private_data = [0; 216];
    private_data[..HEADER_LEN].copy_from_slice(&cma_header(from, to, rng));
    SidrReq {
        request_id,
        service_id: ServiceId::new(space, to.port).0,
        private_data,
        ..SidrReq::default()
    }
}

fn cma_header(from: &Endpoint, to: &Endpoint, rng: &mut Rng) -> [u8; HEADER_LEN] {
    CmaHeader {
        port: rng.number() as u16,
        src: from.addr,
        dst: to.addr,
    }
    .emit()
}

/// Forges a request to connect that mostly looks like a client's, with timeouts up to the largest.
pub(crate) fn req(from: &Endpoint, to: &Endpoint, rng: &mut Rng) -> Req {
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
    let (unknown, listening) = (rng.number(), rng.chance(0.9));
    // In the peer's name, of a queue pair that it has, from a port that it does not send from.
    let local_qpn = match from.qpns[..] {
        [_, ..] if rng.chance(0.5) => rng.pick(&from.qpns),
        _ => Qpn::new(rng.number() as u32),
    };
    // There ferroce reads the port.
    let src_port = if rng.chance(0.5) { rng.number() as u16 } else { 0 };
    Req {
        local_comm_id: comm_id(rng),
        service_id: if listening {
            ServiceId::new(PortSpace::Tcp, to.port).0
        } else {
            unknown
        },
        local_ca_guid: guid(from, rng),
        local_qkey: QKey(src_port.into()),
        local_qpn,
        responder_resources: rng.number() as u8,
        initiator_depth: rng.number() as u8,
        remote_cm_response_timeout: rng.pick(&[0, 1, 20, 31]),
        transport: rng.pick(&[Transport::Rc, Transport::Rc, Transport::Rc, Transport::Uc]),
        flow_control: rng.chance(0.5),
        starting_psn: Psn::new(rng.number() as u32),
        local_cm_response_timeout: rng.pick(&[0, 0, 1, 8, 20, 31]),
        retry_count: rng.range(0, 7) as u8,
        path_mtu: rng.pick(&[1, 1, 2, 3, 5, 0]),
        rnr_retry_count: rng.range(0, 7) as u8,
        max_cm_retries: rng.pick(&[0, 1, 15, 15]),
        srq: rng.chance(0.2),
        primary_local_gid: from.addr,
        primary_remote_gid: to.addr,
        primary_ack_timeout: rng.range(0, 31) as u8,
        primary_traffic_class: rng.number() as u8,
        primary_hop_limit: 64,
        private_data,
        ..Req::default()
    }
}

/// Forges a request to connect that no connection manager has a reason to reject.
pub fn acceptable_req(from: &Endpoint, to: &Endpoint, rng: &mut Rng) -> Req {
    let drawn = req(from, to, rng);
    Req {
        local_comm_id: rng.number() as u32 | 1,
        service_id: ServiceId::new(PortSpace::Tcp, to.port).0,
        path_mtu: 1,
        transport: Transport::Rc,
        ..drawn
    }
}

/// IPv4 Identifications that a campaign's packets are sealed with: near and far from those that peers send.
#[derive(Clone, Copy, Debug)]
pub enum Identifications {
    /// Always 0, as in the header of a UDP socket's packet.
    Zero,
    /// Random numbers below 128.
    Small,
    /// Always this one.
    Fixed(u16),
    /// Increasing from this one.
    Counter(u16),
    /// Random numbers.
    Random,
    /// None: all ICRCs are wrong.
    Unsealed,
}

impl Identifications {
    /// Draws a way to choose them.
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        match rng.index(10) {
            0 | 1 => Self::Zero,
            2 => Self::Small,
            3 => Self::Fixed(rng.number() as u16),
            4..=6 => Self::Counter(rng.number() as u16),
            7 | 8 => Self::Random,
            _ => Self::Unsealed,
        }
    }

    /// Returns the next packet's, or `None` if it is not sealed.
    pub fn next(&mut self, rng: &mut Rng) -> Option<u16> {
        match self {
            Self::Zero => Some(0),
            Self::Small => Some(rng.range(0, 127) as u16),
            Self::Fixed(id) => Some(*id),
            Self::Counter(next) => {
                *next = next.wrapping_add(rng.range(1, 3) as u16);
                Some(*next)
            }
            Self::Random => Some(rng.number() as u16),
            Self::Unsealed => None,
        }
    }
}
