//! UDP source ports of a connection's peer, which forgers must guess besides the PSN.
//!
//! RoCE has no authentication. But a forger that can't see a connection's packets doesn't know their source port.
//! Other processes on the peer's host can't bind it. So packets off the expected PSN are accepted only from that port.
//! Ferroce peers name their port in the REQ and REP. That of others is learned from packets at exactly the expected
//! PSN, which one forgery in 2^24 hits.

use roce_bth::{Class, Packet};
use roce_verbs::QpState;

use crate::{qp::QueuePair, reorder::PACKETS, seq::Seq};

/// PSNs before the oldest outstanding one that a congestion notification may name.
const RECENT_REQUESTS: u64 = 1024;

/// Sender of a packet as far as its PSN and UDP source port show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The port is the peer's, or the service permits no check.
    Peer,
    /// The PSN is the expected one, but the port is not known: [`QueuePair::learn_source`] decides.
    Unproven,
    /// Neither matches: count and drop the packet.
    Stranger,
}

/// UDP source ports known of the peer.
#[derive(Clone, Copy, Default, Debug)]
enum Known {
    /// None yet.
    #[default]
    Nothing,
    /// Port named in the peer's REQ or REP. Packets from any other are forged.
    Agreed(u16),
    /// Learned ports of the peer's requests and responses, which differ for some hardware.
    Learned {
        /// Indexed by [`Direction`].
        ports: [Option<u16>; 2],
        /// Another port seen once at this expected PSN. A peer that changed its port resends the packet.
        rival: Option<(u16, Seq)>,
    },
}

/// Direction of a packet: from the peer's requester or its responder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Request,
    Response,
}

impl Direction {
    fn of(class: Class) -> Self {
        match class {
            Class::Acknowledge | Class::SelectiveAcknowledge | Class::ReadResponse | Class::AtomicAcknowledge => {
                Self::Response
            }
            _ => Self::Request,
        }
    }
}

/// Source ports from which a queue pair accepts packets.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Sources(Known);

impl Sources {
    fn knows(&self, direction: Direction) -> bool {
        match self.0 {
            Known::Nothing => false,
            Known::Agreed(_) => true,
            Known::Learned { ports, .. } => ports[direction as usize].is_some(),
        }
    }

    fn is_peers(&self, port: u16, direction: Direction) -> bool {
        match self.0 {
            Known::Nothing => false,
            Known::Agreed(agreed) => agreed == port,
            Known::Learned { ports, .. } => ports[direction as usize] == Some(port),
        }
    }

    /// Learns a port seen at the expected PSN. Returns false while the port is not trusted.
    fn learn(&mut self, port: u16, direction: Direction, at: Seq) -> bool {
        let (mut ports, rival) = match self.0 {
            Known::Agreed(agreed) => return agreed == port,
            Known::Nothing => ([None; 2], None),
            Known::Learned { ports, rival } => (ports, rival),
        };
        let known = &mut ports[direction as usize];
        let trusted = known.is_none_or(|known| known == port) || rival == Some((port, at));
        if trusted {
            *known = Some(port);
        }
        let rival = (!trusted).then_some((port, at));
        self.0 = Known::Learned { ports, rival };
        trusted
    }
}

impl QueuePair {
    /// Sets the port that the peer named in its REQ or REP. Call in RTR.
    pub fn set_peer_source(&mut self, port: u16) {
        self.sources = Sources(Known::Agreed(port));
    }

    /// Classifies a packet by its opcode, PSN and UDP source port alone. Changes no state.
    pub fn origin(&self, packet: &Packet<'_>, port: u16) -> Origin {
        let class = packet.header.bth.opcode.info().class;
        if class == Class::Cnp {
            let is_agreed = matches!(self.sources.0, Known::Agreed(agreed) if agreed == port);
            return match is_agreed && self.is_recent(packet) {
                true => Origin::Peer,
                false => Origin::Stranger,
            };
        }
        let direction = Direction::of(class);
        if self.sources.is_peers(port, direction) {
            return Origin::Peer;
        }
        match self.sources.0 {
            Known::Agreed(_) => Origin::Stranger,
            _ if self.exact(packet).is_some() => Origin::Unproven,
            // A UC message may start at any PSN (IBA 9.8.2), because earlier packets may have been lost.
            _ if !self.reliable && !self.sources.knows(direction) => Origin::Peer,
            _ => Origin::Stranger,
        }
    }

    /// Returns whether a congestion notification's PSN is that of a recently sent packet.
    ///
    /// Ferroce peers put the marked packet's PSN there. In the specification a notification has none, so that a guessed
    /// port would be enough to forge one.
    fn is_recent(&self, packet: &Packet<'_>) -> bool {
        let psn = packet.header.bth.psn;
        let request = self.req.una.nearest(psn);
        let response = self.resp.expected.nearest(psn);
        let requested = request.plus(RECENT_REQUESTS) >= self.req.una && request < self.req.top;
        let responded = response.plus(PACKETS) >= self.resp.expected && response < self.resp.expected;
        requested || responded
    }

    /// Learns the port of an [`Origin::Unproven`] packet with a correct ICRC.
    ///
    /// Returns false if the peer used another port before. Drop the packet then: its retransmission is accepted.
    pub fn learn_source(&mut self, packet: &Packet<'_>, port: u16) -> bool {
        let direction = Direction::of(packet.header.bth.opcode.info().class);
        self.exact(packet)
            .is_some_and(|at| self.sources.learn(port, direction, at))
    }

    /// Returns whether the port of responses is known. Until then only one request packet may be outstanding.
    pub(crate) fn knows_responder(&self) -> bool {
        !self.reliable || self.sources.knows(Direction::Response)
    }

    /// Returns a packet's PSN if it is exactly the expected one; of a response, the oldest outstanding.
    fn exact(&self, packet: &Packet<'_>) -> Option<Seq> {
        let bth = &packet.header.bth;
        match Direction::of(bth.opcode.info().class) {
            Direction::Request => {
                let expected = self.resp.expected;
                (self.takes_requests() && expected.psn() == bth.psn).then_some(expected)
            }
            Direction::Response => {
                let una = self.req.una;
                let sending = matches!(self.state, QpState::Rts | QpState::Sqd);
                (sending && una < self.req.top && una.psn() == bth.psn).then_some(una)
            }
        }
    }
}
