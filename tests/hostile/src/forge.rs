//! Packets of strangers: management datagrams of every kind with a sound ICRC, packets of any opcode, and bytes that are no
//! packet at all.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use roce_bth::{Bth, Deth, ICRC_LEN, Opcode, PKey, Qpn, ROCE_UDP_PORT};
use roce_icrc::Flow;
use roce_port::cm::{
    cma,
    mad::{Attribute, Mad, Message, Req},
};
pub use roce_sim::forge::Identifications;
use roce_sim::{
    Rng,
    forge::{Endpoint, acceptable_req, any_opcode, message, to_gsi},
};
use rtrs::proto::{ConnReq, Uuid};
use zerocopy::IntoBytes;

/// Bytes of a management datagram with BTH, DETH and ICRC.
pub const MAD_PACKET_LEN: usize = Bth::LEN + Deth::LEN + roce_port::cm::mad::MAD_LEN + ICRC_LEN;

/// Connections of a path that shared requests are for.
const CONNECTIONS: u16 = 8;

/// Kind of packet.
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

    /// Returns the attribute of its management datagrams; `None` of [`Kind::Random`].
    const fn attribute(self) -> Option<Attribute> {
        Some(match self {
            Self::Req | Self::StrayReq => Attribute::Req,
            Self::Rep => Attribute::Rep,
            Self::Rtu => Attribute::Rtu,
            Self::Rej => Attribute::Rej,
            Self::Mra => Attribute::Mra,
            Self::Dreq => Attribute::Dreq,
            Self::Drep => Attribute::Drep,
            Self::SidrReq => Attribute::SidrReq,
            Self::SidrRep => Attribute::SidrRep,
            Self::Random => return None,
        })
    }

    /// Kinds that a flood consists of.
    pub const FLOOD: [Self; 6] = [Self::Req, Self::Rep, Self::Dreq, Self::SidrReq, Self::Mra, Self::Random];
}

/// Packet, and the Identification that its ICRC was made with.
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
    rng: Rng,
    identifications: Identifications,
    /// Port of the RTRS server that requests go to.
    pub port: u16,
    /// Codes of the times within which requests promise that their sender answers; `None`: any.
    pub timeout: Option<u8>,
    /// Requests of eight neighbouring addresses are for paths of one session, and those of one address for the connections
    /// of its path. Otherwise each is for a session of its own.
    pub shared: bool,
    /// Requests so far of each address.
    requests: HashMap<IpAddr, u16>,
    /// Top bits that all communication IDs of the receiver get, and how many.
    pub place: Option<(u32, u32)>,
}

impl Forger {
    /// Creates a forger whose requests go to RTRS's usual port, and promise answers within 4.3 s, as the kernel's do.
    pub fn new(seed: u64, identifications: Identifications) -> Self {
        Self {
            rng: Rng::new(seed, 0),
            identifications,
            port: rtrs::proto::DEFAULT_PORT,
            timeout: Some(20),
            shared: false,
            requests: HashMap::new(),
            place: None,
        }
    }

    /// Forges a packet of this kind.
    pub fn packet(&mut self, kind: Kind, flow: &Flow) -> Forged {
        let Some(attribute) = kind.attribute() else {
            let len = self.rng.index(1024);
            return Forged {
                identification: self.rng.number() as u16,
                bytes: self.rng.bytes(len),
            };
        };
        let port = if kind == Kind::StrayReq {
            self.port ^ 0x4000
        } else {
            self.port
        };
        let mad = self.mad(attribute, port, flow.ip.src(), flow.ip.dst());
        let bytes = to_gsi(&mad.emit(), &mut self.rng);
        self.seal(flow, bytes)
    }

    /// Forges a packet of a transport opcode to any queue pair, its headers and its payload being random.
    pub fn transport(&mut self, opcode: Opcode, flow: &Flow) -> Forged {
        let qpn = Qpn::new(self.rng.number() as u32);
        let bytes = any_opcode(opcode, qpn, &mut self.rng);
        self.seal(flow, bytes)
    }

    fn seal(&mut self, flow: &Flow, mut bytes: Vec<u8>) -> Forged {
        let identification = self.identifications.next(&mut self.rng);
        if let Some(identification) = identification {
            flow.seal(identification, &mut bytes);
        }
        Forged {
            identification: identification.unwrap_or_default(),
            bytes,
        }
    }

    /// Draws a communication ID of the receiver.
    fn receiver_id(&mut self) -> u32 {
        let id = self.rng.number() as u32;
        self.place.map_or(id, |(top, bits)| {
            let low = 32 - bits;
            (top << low) | (id & ((1 << low) - 1))
        })
    }

    /// Draws a message with a transaction ID of its own.
    fn mad(&mut self, attribute: Attribute, port: u16, from: IpAddr, to: IpAddr) -> Mad {
        let ids = [self.rng.number() as u32, self.receiver_id()];
        let [from, to] = [from, to].map(|addr| Endpoint {
            addr,
            guid: self.rng.number(),
            port,
            qpns: Vec::new(),
        });
        let message = match attribute {
            Attribute::Req => self.request(&from, &to).into(),
            other => message(other, ids, &from, &to, &mut self.rng),
        };
        let transaction = match attribute {
            // The sender of the request that these answer is in the transaction ID, too.
            Attribute::Rep | Attribute::Drep | Attribute::SidrRep => {
                (u64::from(self.receiver_id()) << 32) | self.rng.number() >> 32
            }
            _ => self.rng.number(),
        };
        Mad::new(transaction, message)
    }

    /// Draws the private data of a REQ as the kernel's RTRS client sends it.
    fn rtrs(&mut self, from: IpAddr) -> ConnReq {
        let addr = match from {
            IpAddr::V4(addr) if self.shared => addr,
            _ => {
                let [path, session] = [(); 2].map(|()| uuid(&mut self.rng));
                return ConnReq::new(0, 2, 1, path, session, true);
            }
        };
        let requests = self.requests.entry(from).or_default();
        let cid = *requests % CONNECTIONS;
        *requests = requests.wrapping_add(1);
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

    /// Draws a REQ as the kernel's RTRS client sends it first: service connection of a new session.
    fn request(&mut self, from: &Endpoint, to: &Endpoint) -> Req {
        let rtrs = self.rtrs(from.addr);
        let drawn = acceptable_req(from, to, &mut self.rng);
        let mut private_data = drawn.private_data;
        private_data[cma::HEADER_LEN..].copy_from_slice(rtrs.as_bytes());
        let mut code = || self.timeout.unwrap_or_else(|| self.rng.index(32) as u8);
        Req {
            remote_cm_response_timeout: code(),
            local_cm_response_timeout: code(),
            responder_resources: 0,
            initiator_depth: 0,
            flow_control: false,
            srq: false,
            retry_count: 7,
            rnr_retry_count: 7,
            pkey: PKey::DEFAULT,
            path_mtu: 3,
            max_cm_retries: 15,
            primary_local_lid: 0xffff,
            primary_remote_lid: 0xffff,
            primary_ack_timeout: 14,
            private_data,
            ..drawn
        }
    }
}

/// Returns a packet's message, if it is a MAD of communication management.
pub fn message_of(packet: &[u8]) -> Option<Message> {
    let mad = packet.get(Bth::LEN + Deth::LEN..)?.get(..roce_port::cm::mad::MAD_LEN)?;
    Mad::parse(mad).ok().map(|mad| mad.message)
}

/// Returns the socket address that packets to an address go to.
pub const fn roce(addr: IpAddr) -> SocketAddr {
    SocketAddr::new(addr, ROCE_UDP_PORT)
}

fn uuid(rng: &mut Rng) -> Uuid {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&rng.bytes(16));
    Uuid(bytes)
}

#[cfg(test)]
mod tests {
    use roce_bth::Packet;
    use roce_icrc::Recovery;
    use roce_port::cm::cma::{PortSpace, ServiceId};

    use super::*;

    fn flow() -> Flow {
        let addr = |s: &str| s.parse::<SocketAddr>().unwrap();
        Flow::try_from((addr("127.1.2.3:5000"), addr("127.4.5.6:4791"))).unwrap()
    }

    #[test]
    fn forged_packets_are_sound() {
        let mut forger = Forger::new(1, Identifications::Counter(65_530));
        let mut last = 65_530_u16;
        for kind in Kind::ALL.into_iter().filter(|k| *k != Kind::Random) {
            let forged = forger.packet(kind, &flow());
            assert_eq!(forged.bytes.len(), MAD_PACKET_LEN);
            assert!((1..=3).contains(&forged.identification.wrapping_sub(last)), "{kind:?}");
            last = forged.identification;
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
        let mut forger = Forger::new(2, Identifications::Fixed(0));
        let Some(Message::Req(req)) = message_of(&forger.packet(Kind::Req, &flow()).bytes) else {
            panic!("no REQ");
        };
        let rtrs = ConnReq::parse(&req.private_data[cma::HEADER_LEN..]).unwrap();
        assert!(rtrs.first_conn());
        assert_eq!(ServiceId(req.service_id).port(PortSpace::Tcp), Some(1234));
    }

    #[test]
    fn shared_requests_are_for_paths_and_connections_of_a_session() {
        let mut forger = Forger::new(4, Identifications::Fixed(0));
        forger.shared = true;
        let mut ask = |from: &str| {
            let [from, to] = [from, "127.0.0.1"].map(|addr| Endpoint {
                addr: addr.parse().unwrap(),
                guid: 0,
                port: 1234,
                qpns: Vec::new(),
            });
            let req = forger.request(&from, &to);
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
        let mut forger = Forger::new(3, Identifications::Random);
        forger.place = Some((0x123, 11));
        for _ in 0..100 {
            let Some(Message::Rep(rep)) = message_of(&forger.packet(Kind::Rep, &flow()).bytes) else {
                panic!("no REP");
            };
            assert_eq!(rep.remote_comm_id >> 21, 0x123);
        }
    }
}
