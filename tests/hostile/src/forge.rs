//! Packets of nobody: management datagrams of every kind with a sound ICRC, and bytes that are no packet at all.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};
use roce_bth::{Bth, Deth, Header, ICRC_LEN, Opcode, PKey, Psn, QKey, Qpn, ROCE_UDP_PORT};
use roce_cm::{
    cma::{self, CmaHeader, PortSpace, ServiceId},
    mad::{Attribute, Drep, Dreq, Mad, Message, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq, Subject, Transport},
};
use roce_icrc::Flow;
use rtrs::proto::{ConnReq, Uuid};
use zerocopy::IntoBytes;

/// BTH, DETH, MAD, ICRC.
pub const MAD_PACKET_LEN: usize = Bth::LEN + Deth::LEN + roce_cm::mad::MAD_LEN + ICRC_LEN;

/// Connections of a path that shared requests are for.
const CONNECTIONS: u16 = 8;

/// What to send.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, clap::ValueEnum)]
pub enum Kind {
    /// A connect request to the RTRS server, with private data that it accepts.
    Req,
    /// A connect request to a port where nobody listens.
    StrayReq,
    /// A reply that nobody asked for.
    Rep,
    /// "Ready to use" of no connection.
    Rtu,
    /// A rejection.
    Rej,
    /// "Wait" of no connection.
    Mra,
    /// A request to end no connection.
    Dreq,
    /// The answer to that.
    Drep,
    /// A request for a datagram service.
    SidrReq,
    /// The answer to that.
    SidrRep,
    /// Random bytes of any length.
    Random,
}

impl Kind {
    /// All.
    pub const ALL: [Self; 11] = [
        Self::Req,
        Self::StrayReq,
        Self::Rep,
        Self::Rtu,
        Self::Rej,
        Self::Mra,
        Self::Dreq,
        Self::Drep,
        Self::SidrReq,
        Self::SidrRep,
        Self::Random,
    ];

    /// What a flood is made of.
    pub const FLOOD: [Self; 6] = [Self::Req, Self::Rep, Self::Dreq, Self::SidrReq, Self::Mra, Self::Random];
}

/// Which IPv4 Identifications the ICRCs of packets are made with. A receiver behind a UDP socket does not see the header:
/// any number can be claimed, whatever the header has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// Always this: 0 is what the header of a UDP socket's packet has.
    Fixed(u16),
    /// Counts up from this.
    Counter(u16),
    /// Anything.
    Random,
}

/// A packet and the Identification that its ICRC was made with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Forged {
    /// To be written into the header by whoever can.
    pub identification: u16,
    /// The UDP payload.
    pub bytes: Vec<u8>,
}

/// Makes packets, the same ones from the same seed.
#[derive(Debug)]
pub struct Forger {
    rng: StdRng,
    claim: Claim,
    psn: u32,
    /// Port of the RTRS server that requests go to.
    pub port: u16,
    /// Codes of the times within which requests say that their sender answers; `None`: any.
    pub timeout: Option<u8>,
    /// Requests of eight neighbouring addresses are for paths of one session, and those of one address for the connections
    /// of its path. Otherwise each is for a session of its own.
    pub shared: bool,
    /// Requests so far of each address.
    asked: HashMap<IpAddr, u16>,
    /// Top bits that all communication IDs of the receiver get, and how many.
    pub place: Option<(u32, u32)>,
}

impl Forger {
    /// A forger whose requests go to RTRS's usual port, and promise answers within 4.3 s, as the kernel's do.
    pub fn new(seed: u64, claim: Claim) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            claim,
            psn: 0,
            port: rtrs::proto::DEFAULT_PORT,
            timeout: Some(20),
            shared: false,
            asked: HashMap::new(),
            place: None,
        }
    }

    /// A packet of this kind.
    pub fn packet(&mut self, kind: Kind, flow: &Flow) -> Forged {
        match kind {
            Kind::Random => self.random_bytes(),
            _ => {
                let mad = self.mad(kind, flow.ip.src(), flow.ip.dst());
                self.wrap(flow, &mad.emit())
            }
        }
    }

    /// A packet of a transport opcode to any queue pair, its headers and its payload being random.
    pub fn transport(&mut self, opcode: Opcode, flow: &Flow) -> Forged {
        let info = opcode.info();
        let payload = if info.payload {
            4 * self.rng.random_range(0..64)
        } else {
            0
        };
        let mut bytes = vec![0; info.header_len + payload];
        self.rng.fill_bytes(&mut bytes);
        let psn = self.next_psn();
        let bth = Header::new(Bth::new(opcode, Qpn::new(self.rng.random()), psn));
        let mut head = [0; roce_bth::MAX_HEADER_LEN];
        bth.emit(&mut head);
        bytes[..Bth::LEN].copy_from_slice(&head[..Bth::LEN]);
        self.seal(flow, bytes)
    }

    /// Wraps a MAD: UD SEND ONLY from QP1 to QP1.
    pub fn wrap(&mut self, flow: &Flow, mad: &[u8]) -> Forged {
        let psn = self.next_psn();
        let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, psn));
        header.deth = Some(Deth {
            qkey: QKey::GSI,
            reserved: 0,
            src_qp: Qpn::GSI,
        });
        let mut bytes = vec![0; roce_bth::MAX_HEADER_LEN.max(MAD_PACKET_LEN)];
        let at = header.emit(&mut bytes);
        bytes.truncate(at);
        bytes.extend(mad);
        self.seal(flow, bytes)
    }

    fn seal(&mut self, flow: &Flow, mut bytes: Vec<u8>) -> Forged {
        let identification = match &mut self.claim {
            Claim::Fixed(id) => *id,
            Claim::Counter(next) => {
                let id = *next;
                *next = id.wrapping_add(1);
                id
            }
            Claim::Random => self.rng.random(),
        };
        bytes.extend([0; ICRC_LEN]);
        flow.seal(identification, &mut bytes);
        Forged { identification, bytes }
    }

    fn next_psn(&mut self) -> Psn {
        self.psn = self.psn.wrapping_add(1);
        Psn::new(self.psn)
    }

    fn random_bytes(&mut self) -> Forged {
        let mut bytes = vec![0; self.rng.random_range(0..1024)];
        self.rng.fill_bytes(&mut bytes);
        Forged {
            identification: self.rng.random(),
            bytes,
        }
    }

    /// A communication ID of the receiver's.
    fn theirs(&mut self) -> u32 {
        let id: u32 = self.rng.random();
        self.place.map_or(id, |(top, bits)| {
            let low = 32 - bits;
            (top << low) | (id & ((1 << low) - 1))
        })
    }

    /// A message of this kind ([`Kind::Random`]: a REJ) with a transaction ID of its own.
    pub fn mad(&mut self, kind: Kind, from: IpAddr, to: IpAddr) -> Mad {
        let message = self.message(kind, from, to);
        let transaction = match message.attribute() {
            // Who sent the request that these answer is told by the transaction ID, too.
            Attribute::Rep | Attribute::Drep | Attribute::SidrRep => {
                (u64::from(self.theirs()) << 32) | u64::from(self.rng.next_u32())
            }
            _ => self.rng.random(),
        };
        Mad::new(transaction, message)
    }

    fn message(&mut self, kind: Kind, from: IpAddr, to: IpAddr) -> Message {
        let (ours, theirs) = (self.rng.random(), self.theirs());
        let subject = Subject::Req;
        match kind {
            Kind::Req => self.request(self.port, from, to).into(),
            Kind::StrayReq => self.request(self.port ^ 0x4000, from, to).into(),
            Kind::Rep => Rep {
                local_comm_id: ours,
                remote_comm_id: theirs,
                local_qpn: self.qpn(),
                starting_psn: Psn::new(self.rng.random()),
                rnr_retry_count: 7,
                ..Rep::default()
            }
            .into(),
            Kind::Rtu => Rtu {
                local_comm_id: ours,
                remote_comm_id: theirs,
                ..Rtu::default()
            }
            .into(),
            Kind::Rej | Kind::Random => Rej {
                local_comm_id: ours,
                remote_comm_id: theirs,
                subject,
                reason: 28,
                ..Rej::default()
            }
            .into(),
            Kind::Mra => Mra {
                local_comm_id: ours,
                remote_comm_id: theirs,
                subject,
                service_timeout: 31,
                ..Mra::default()
            }
            .into(),
            Kind::Dreq => Dreq {
                local_comm_id: ours,
                remote_comm_id: theirs,
                remote_qpn: self.qpn(),
                ..Dreq::default()
            }
            .into(),
            Kind::Drep => Drep {
                local_comm_id: ours,
                remote_comm_id: theirs,
                ..Drep::default()
            }
            .into(),
            Kind::SidrReq => self.resolution(from, to).into(),
            Kind::SidrRep => SidrRep {
                request_id: theirs,
                qpn: self.qpn(),
                ..SidrRep::default()
            }
            .into(),
        }
    }

    fn qpn(&mut self) -> Qpn {
        Qpn::new(self.rng.random_range(2..0xff_ffff))
    }

    fn head(&mut self, from: IpAddr, to: IpAddr) -> CmaHeader {
        CmaHeader {
            port: self.rng.random_range(32_768..61_000),
            src: from,
            dst: to,
        }
    }

    /// The private data of a REQ as the kernel's RTRS client sends it.
    fn rtrs(&mut self, from: IpAddr) -> ConnReq {
        let addr = match from {
            IpAddr::V4(addr) if self.shared => addr,
            _ => return ConnReq::new(0, 2, 1, Uuid(self.rng.random()), Uuid(self.rng.random()), true),
        };
        let asked = self.asked.entry(from).or_default();
        let cid = *asked % CONNECTIONS;
        *asked = asked.wrapping_add(1);
        let uuid = |of: u32| Uuid(u128::from(of).to_be_bytes());
        ConnReq::new(
            cid,
            CONNECTIONS,
            1,
            uuid(addr.to_bits()),
            uuid(addr.to_bits() >> 3),
            true,
        )
    }

    /// A REQ as the kernel's RTRS client sends it first: service connection of a new session.
    fn request(&mut self, port: u16, from: IpAddr, to: IpAddr) -> Req {
        let rtrs = self.rtrs(from);
        let head = self.head(from, to);
        let mut private_data = [0; 92];
        private_data[..cma::HEADER_LEN].copy_from_slice(&head.emit());
        private_data[cma::HEADER_LEN..].copy_from_slice(rtrs.as_bytes());
        let mut code = || self.timeout.unwrap_or_else(|| self.rng.random_range(0..32));
        let (remote_cm_response_timeout, local_cm_response_timeout) = (code(), code());
        Req {
            local_comm_id: self.rng.random(),
            service_id: ServiceId::new(PortSpace::Tcp, port).0,
            local_ca_guid: self.rng.random(),
            local_qpn: self.qpn(),
            remote_cm_response_timeout,
            local_cm_response_timeout,
            transport: Transport::Rc,
            starting_psn: Psn::new(self.rng.random()),
            retry_count: 7,
            rnr_retry_count: 7,
            pkey: PKey::DEFAULT,
            path_mtu: 3,
            max_cm_retries: 15,
            primary_local_lid: 0xffff,
            primary_remote_lid: 0xffff,
            primary_local_gid: from.into(),
            primary_remote_gid: to.into(),
            primary_hop_limit: 64,
            primary_ack_timeout: 14,
            private_data,
            ..Req::default()
        }
    }

    fn resolution(&mut self, from: IpAddr, to: IpAddr) -> SidrReq {
        let mut private_data = [0; 216];
        private_data[..cma::HEADER_LEN].copy_from_slice(&self.head(from, to).emit());
        SidrReq {
            request_id: self.rng.random(),
            pkey: PKey::DEFAULT,
            service_id: ServiceId::new(PortSpace::Udp, self.port).0,
            private_data,
        }
    }
}

/// A packet's message, if it is a MAD of communication management.
pub fn message_of(packet: &[u8]) -> Option<Message> {
    let mad = packet.get(Bth::LEN + Deth::LEN..)?.get(..roce_cm::mad::MAD_LEN)?;
    Mad::parse(mad).ok().map(|mad| mad.message)
}

/// Where packets to an address go.
pub const fn roce(addr: IpAddr) -> SocketAddr {
    SocketAddr::new(addr, ROCE_UDP_PORT)
}

#[cfg(test)]
mod tests {
    use roce_bth::Packet;
    use roce_icrc::Recovery;

    use super::*;

    fn flow() -> Flow {
        let addr = |s: &str| s.parse::<SocketAddr>().unwrap();
        Flow::try_from((addr("127.1.2.3:5000"), addr("127.4.5.6:4791"))).unwrap()
    }

    #[test]
    fn forged_packets_are_sound() {
        let mut forger = Forger::new(1, Claim::Counter(65_530));
        for (n, kind) in Kind::ALL.into_iter().filter(|k| *k != Kind::Random).enumerate() {
            let forged = forger.packet(kind, &flow());
            assert_eq!(forged.bytes.len(), MAD_PACKET_LEN);
            assert_eq!(forged.identification, 65_530_u16.wrapping_add(n as u16));
            assert_eq!(
                flow().recover(&forged.bytes, 0),
                Recovery::Exact(forged.identification),
                "{kind:?}"
            );
            let packet = Packet::parse(&forged.bytes).unwrap();
            assert_eq!(packet.header.bth.dest_qp, Qpn::GSI);
            assert!(message_of(&forged.bytes).is_some(), "{kind:?}");
        }
        for opcode in Opcode::ALL {
            let forged = forger.transport(*opcode, &flow());
            assert!(flow().verify(forged.identification, &forged.bytes), "{opcode:?}");
            assert!(Packet::parse(&forged.bytes).is_ok(), "{opcode:?}");
        }
    }

    #[test]
    fn a_request_is_what_an_rtrs_server_takes() {
        let mut forger = Forger::new(2, Claim::Fixed(0));
        let Some(Message::Req(req)) = message_of(&forger.packet(Kind::Req, &flow()).bytes) else {
            panic!("no REQ");
        };
        let rtrs = ConnReq::parse(&req.private_data[cma::HEADER_LEN..]).unwrap();
        assert!(rtrs.first_conn());
        assert_eq!(ServiceId(req.service_id).port(PortSpace::Tcp), Some(1234));
    }

    #[test]
    fn shared_requests_are_for_paths_and_connections_of_a_session() {
        let mut forger = Forger::new(4, Claim::Fixed(0));
        forger.shared = true;
        let mut ask = |from: &str| {
            let to = "127.0.0.1".parse().unwrap();
            let req = forger.request(1234, from.parse().unwrap(), to);
            *ConnReq::parse(&req.private_data[cma::HEADER_LEN..]).unwrap()
        };
        let (first, second, third) = (ask("127.1.0.1"), ask("127.1.0.2"), ask("127.1.0.1"));
        assert_eq!(first.session_uuid, second.session_uuid);
        assert_ne!(first.path_uuid, second.path_uuid);
        assert_eq!(
            (first.path_uuid, first.cid.get(), third.cid.get()),
            (third.path_uuid, 0, 1)
        );
        assert_ne!(ask("127.1.0.9").session_uuid, first.session_uuid);
    }

    #[test]
    fn communication_ids_begin_as_they_are_told_to() {
        let mut forger = Forger::new(3, Claim::Random);
        forger.place = Some((0x123, 11));
        for _ in 0..100 {
            let Some(Message::Rep(rep)) = message_of(&forger.packet(Kind::Rep, &flow()).bytes) else {
                panic!("no REP");
            };
            assert_eq!(rep.remote_comm_id >> 21, 0x123);
        }
    }
}
