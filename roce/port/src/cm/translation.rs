//! Proof of address translation (NAT).
//!
//! RoCE's ICRC covers addresses and ports, so a translated packet is dropped as corrupt. A connect request also carries its sender's
//! addresses, in its RDMA_CM header. If its ICRC is right for those instead of the packet's, they were translated on the way. Nothing
//! is done with such a request but to report it.

use core::{
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce_bth::{Opcode, Packet, Qpn};
use roce_icrc::{Flow, IpPair, Recovery};
use roce_verbs::Instant;

use crate::cm::{
    cma::CmaHeader,
    mad::{Mad, Message},
};

/// Requests with a wrong ICRC that are examined in a [`WINDOW`]: each costs up to eight checksums of 280 bytes.
const MAX_EXAMINED: u32 = 64;
const WINDOW: Duration = Duration::from_secs(1);
/// Pause between two reports.
const REPORT_PAUSE: Duration = Duration::from_secs(10);

/// A request whose addresses or source port were translated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Translation {
    /// Sender's own address and UDP port.
    pub sent_from: SocketAddr,
    /// Address that it sent to.
    pub sent_to: IpAddr,
    /// Address and UDP port that the packet came from.
    pub came_from: SocketAddr,
    /// Address that it came to.
    pub came_to: IpAddr,
}

impl Translation {
    /// Cause and remedy, as a sentence for users.
    pub const ADVICE: &'static str = "RoCE's checksum (ICRC) covers the addresses and ports, so these packets are dropped: connect the two \
                                      without address translation (NAT), for containers by the host's network, macvlan, or routes \
                                      between their networks";

    /// Examines a packet whose ICRC is wrong. `None`: it is no connect request, or its ICRC is wrong for its own addresses too.
    ///
    /// `identification` is the packet's IPv4 Identification if it is known. If not, one corrupt request in some 10,000 passes for a
    /// translated one.
    pub fn of(flow: &Flow, identification: Option<u16>, packet: &[u8]) -> Option<Self> {
        let header = request_header(packet)?;
        let (src, dst) = (flow.ip.src(), flow.ip.dst());
        let (own, peer) = (header.src.to_canonical(), header.dst.to_canonical());
        let mut pairs = [(own, peer), (own, dst), (src, peer), (src, dst)]
            .into_iter()
            .filter_map(|pair| IpPair::try_from(pair).ok())
            .map(|ip| Flow { ip, ..*flow });
        let same_port = pairs.clone().filter(|sent| sent != flow);
        let addresses = |sent: &Flow| match identification {
            Some(id) => sent.verify(id, packet),
            None => matches!(sent.recover(packet, 0), Recovery::Exact(_)),
        };
        let sent = same_port.into_iter().find(addresses).or_else(|| {
            // The kernel sends single packets that must not be fragmented with Identification 0.
            pairs.find_map(|sent| {
                let src_port = sent.recover_source_port(identification.unwrap_or(0), packet)?;
                Some(Flow { src_port, ..sent })
            })
        })?;
        Some(Self {
            sent_from: sent.src(),
            sent_to: sent.ip.dst(),
            came_from: flow.src(),
            came_to: dst,
        })
    }
}

impl fmt::Display for Translation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sent_from,
            sent_to,
            came_from,
            came_to,
        } = self;
        match (sent_from.ip() == came_from.ip(), sent_to == came_to) {
            (false, true) => write!(f, "translated from {} to {}", sent_from.ip(), came_from.ip()),
            (true, true) => write!(f, "UDP source port translated from {sent_from} to {came_from}"),
            (true, false) => write!(
                f,
                "from {}, translated on the way to {sent_to}: it came to {came_to}",
                sent_from.ip()
            ),
            (false, false) => write!(
                f,
                "translated from {} to {}, and on the way to {sent_to}: it came to {came_to}",
                sent_from.ip(),
                came_from.ip()
            ),
        }
    }
}

/// Returns the RDMA_CM header of a REQ or SIDR_REQ to QP1.
fn request_header(packet: &[u8]) -> Option<CmaHeader> {
    let parsed = Packet::parse(packet).ok()?;
    let bth = &parsed.header.bth;
    if (bth.opcode, bth.dest_qp) != (Opcode::UdSendOnly, Qpn::GSI) {
        return None;
    }
    match Mad::parse(parsed.payload).ok()?.message {
        Message::Req(req) => CmaHeader::parse(&req.private_data),
        Message::SidrReq(req) => CmaHeader::parse(&req.private_data),
        _ => None,
    }
}

/// Looks for translated requests among packets with a wrong ICRC, which anybody can send: bounds what that costs, and how often it is
/// reported.
#[derive(Debug, Default)]
pub struct TranslationWatch {
    /// Start of the window, and requests examined in it.
    window: Option<(Instant, u32)>,
    reported: Option<Instant>,
}

impl TranslationWatch {
    /// Examines a packet to QP1 whose ICRC is wrong. Returns its translation, and whether that is to be reported now.
    pub fn examine(
        &mut self,
        now: Instant,
        flow: &Flow,
        identification: Option<u16>,
        packet: &[u8],
    ) -> Option<(Translation, bool)> {
        let (begun, examined) = self
            .window
            .filter(|(begun, _)| now < *begun + WINDOW)
            .unwrap_or((now, 0));
        if examined >= MAX_EXAMINED {
            return None;
        }
        self.window = Some((begun, examined + 1));
        let found = Translation::of(flow, identification, packet)?;
        let due = self.reported.is_none_or(|at| now >= at + REPORT_PAUSE);
        if due {
            self.reported = Some(now);
        }
        Some((found, due))
    }
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, vec::Vec};

    use roce_bth::{ICRC_LEN, Psn, ROCE_UDP_PORT};
    use roce_verbs::Mtu;

    use super::*;
    use crate::cm::{
        cma::PortSpace,
        datagram,
        manager::Manager,
        types::{CmConfig, ConnectArgs, ResolveArgs},
    };

    const INSIDE: Ipv4Addr = Ipv4Addr::new(172, 17, 0, 2);
    const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 168, 1, 5);
    const SERVER: Ipv4Addr = Ipv4Addr::new(192, 168, 1, 9);
    const HIDDEN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 3);

    fn flow(src: Ipv4Addr, src_port: u16, dst: Ipv4Addr) -> Flow {
        let ip = IpPair::V4 { src, dst };
        let dst_port = ROCE_UDP_PORT;
        Flow { ip, src_port, dst_port }
    }

    /// A request as it leaves its sender, with an Identification.
    fn request(sent: &Flow, identification: u16, question: bool) -> Vec<u8> {
        let mut manager = Manager::new(CmConfig::new(7, Mtu::B1024), [9; 32]);
        let (local, remote) = (SocketAddr::new(sent.ip.src(), 0), SocketAddr::new(sent.ip.dst(), 18515));
        if question {
            let args = ResolveArgs {
                local,
                remote,
                space: PortSpace::Udp,
                private_data: Vec::new(),
            };
            manager.resolve(Instant::ZERO, &args).unwrap();
        } else {
            let args = ConnectArgs::new(local, remote, Qpn::new(77), Psn::new(5), Mtu::B1024);
            manager.connect(Instant::ZERO, &args).unwrap();
        }
        let mad = manager.poll_mad().unwrap().mad;
        let mut bytes = std::vec![0; datagram::PACKET_LEN + ICRC_LEN];
        datagram::write(Psn::new(1), &mad, &mut bytes);
        sent.seal(identification, &mut bytes);
        bytes
    }

    fn seen(sent: &Flow, came: &Flow, identification: u16, known: bool) -> Option<std::string::String> {
        let texts = [false, true].map(|question| {
            let packet = request(sent, identification, question);
            let found = Translation::of(came, known.then_some(identification), &packet);
            found.map(|t| std::format!("{t}"))
        });
        assert_eq!(texts[0], texts[1], "requests and questions alike");
        let [text, _] = texts;
        text
    }

    #[test]
    fn each_kind_of_translation_is_proved() {
        let sent = flow(INSIDE, 50_000, SERVER);
        let masqueraded = flow(ROUTER, 50_000, SERVER);
        let expected = "translated from 172.17.0.2 to 192.168.1.5";
        for known in [false, true] {
            assert_eq!(seen(&sent, &masqueraded, 0, known).unwrap(), expected);
            assert_eq!(seen(&sent, &masqueraded, 0x1234, known).unwrap(), expected);
            let to = "from 172.17.0.2, translated on the way to 192.168.1.9: it came to 10.0.0.3";
            assert_eq!(seen(&sent, &flow(INSIDE, 50_000, HIDDEN), 7, known).unwrap(), to);
            let both = "translated from 172.17.0.2 to 192.168.1.5, and on the way to 192.168.1.9: it came to 10.0.0.3";
            assert_eq!(seen(&sent, &flow(ROUTER, 50_000, HIDDEN), 7, known).unwrap(), both);
            // Masquerading with random ports.
            assert_eq!(seen(&sent, &flow(ROUTER, 1024, SERVER), 0, known).unwrap(), expected);
            let port = "UDP source port translated from 172.17.0.2:50000 to 172.17.0.2:1024";
            assert_eq!(seen(&sent, &flow(INSIDE, 1024, SERVER), 0, known).unwrap(), port);
        }
    }

    #[test]
    fn a_corrupt_request_is_not_a_translated_one() {
        let (sent, came) = (flow(INSIDE, 50_000, SERVER), flow(ROUTER, 50_000, SERVER));
        let good = request(&sent, 0, false);
        let mut proved = 0;
        // Behind the headers and before the ICRC.
        for bit in 160 * 8..276 * 8 {
            let mut packet = good.clone();
            packet[bit / 8] ^= 1 << (bit % 8);
            proved += u32::from(Translation::of(&came, None, &packet).is_some());
            assert_eq!(
                Translation::of(&came, Some(0), &packet).filter(|t| t.sent_from.port() == 50_000),
                None
            );
        }
        assert!(proved <= 2, "{proved} of 928");
        assert_eq!(Translation::of(&came, None, &good[..200]), None);
        assert_eq!(Translation::of(&came, None, &[]), None);
    }

    #[test]
    fn a_flood_is_examined_and_reported_at_a_bounded_rate() {
        let (sent, came) = (flow(INSIDE, 50_000, SERVER), flow(ROUTER, 50_000, SERVER));
        let packet = request(&sent, 0, false);
        let mut watch = TranslationWatch::default();
        let (mut found, mut reported) = (0, 0);
        for step in 0..20_000u64 {
            let now = Instant::ZERO + Duration::from_millis(step);
            let seen = watch.examine(now, &came, None, &packet);
            found += u32::from(seen.is_some());
            reported += u32::from(seen.is_some_and(|(_, report)| report));
        }
        assert_eq!((found, reported), (20 * MAX_EXAMINED, 2));
    }
}
