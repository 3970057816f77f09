//! UDP source ports of a connection's peer, which a sender of forged packets has to guess beside the PSN.
//!
//! RoCE has no authentication, but who can't see a connection's packets does not know the port they leave from, and who shares
//! the peer's host can't bind it. So a packet off the expected PSN counts only if it comes from that port. Peers of ours name
//! theirs in the REQ and REP; of others it is learned from packets at exactly the expected PSN (one forgery in 2^24).

use roce_bth::{Class, Packet};
use roce_verbs::QpState;

use crate::{qp::QueuePair, reorder::PACKETS, seq::Seq};

/// PSNs before the oldest outstanding one that a congestion notification may still be about.
const RECENT_REQUESTS: u64 = 1024;

/// Who a packet may be from, by its PSN and UDP source port alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The port is the peer's, or the service does not let one tell.
    Peer,
    /// The PSN is exactly the expected one, but the port is not known to be the peer's:
    /// [`QueuePair::learn_source`] decides.
    Unproven,
    /// Neither is right: drop the packet without any trace but a counter.
    Stranger,
}

/// Known ports of the peer.
#[derive(Clone, Copy, Default, Debug)]
enum Known {
    /// None yet.
    #[default]
    Nothing,
    /// The port that the peer named in its REQ or REP; packets from any other are forged.
    Agreed(u16),
    /// Ports of the peer's requests and of its responses, which hardware may tell apart.
    Learned {
        /// By [`Direction`].
        ports: [Option<u16>; 2],
        /// Another port that was seen once at this expected PSN. A peer that changed its port sends the packet again.
        rival: Option<(u16, Seq)>,
    },
}

/// Which of the peer's engines sent a packet.
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

/// Source ports from which this queue pair takes packets.
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

    /// Takes a port that was seen at the expected PSN. `false`: it is not believed yet.
    fn learn(&mut self, port: u16, direction: Direction, at: Seq) -> bool {
        let (mut ports, rival) = match self.0 {
            Known::Agreed(agreed) => return agreed == port,
            Known::Nothing => ([None; 2], None),
            Known::Learned { ports, rival } => (ports, rival),
        };
        let known = &mut ports[direction as usize];
        let believed = known.is_none_or(|known| known == port) || rival == Some((port, at));
        if believed {
            *known = Some(port);
        }
        let rival = (!believed).then_some((port, at));
        self.0 = Known::Learned { ports, rival };
        believed
    }
}

impl QueuePair {
    /// Sets the port that the peer named for its packets. To be called in RTR.
    pub fn set_peer_source(&mut self, port: u16) {
        self.sources = Sources(Known::Agreed(port));
    }

    /// Judges a packet by its PSN and UDP source port. Nothing is changed, and nothing else of the packet looked at.
    pub fn origin(&self, packet: &Packet<'_>, port: u16) -> Origin {
        let class = packet.header.bth.opcode.info().class;
        if class == Class::Cnp {
            let known = matches!(self.sources.0, Known::Agreed(agreed) if agreed == port);
            return match known && self.is_recent(packet) {
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
            // A message of an unreliable connection may begin at any PSN (IBA 9.8.2): the first one may have been lost.
            _ if !self.reliable && !self.sources.knows(direction) => Origin::Peer,
            _ => Origin::Stranger,
        }
    }

    /// Whether the PSN of a congestion notification is that of a packet that has left here lately. Peers of ours put the
    /// marked packet's there; in the specification a notification has none, and a guessed port would be enough to forge one.
    fn is_recent(&self, packet: &Packet<'_>) -> bool {
        let psn = packet.header.bth.psn;
        let request = self.req.una.nearest(psn);
        let response = self.resp.expected.nearest(psn);
        let requested = request.plus(RECENT_REQUESTS) >= self.req.una && request < self.req.top;
        let responded = response.plus(PACKETS) >= self.resp.expected && response < self.resp.expected;
        requested || responded
    }

    /// Learns the port of an [`Origin::Unproven`] packet whose ICRC is right. `false`: the peer has used another port before;
    /// drop the packet, and believe its repetition.
    pub fn learn_source(&mut self, packet: &Packet<'_>, port: u16) -> bool {
        let direction = Direction::of(packet.header.bth.opcode.info().class);
        self.exact(packet)
            .is_some_and(|at| self.sources.learn(port, direction, at))
    }

    /// Whether the port of responses is known. Until then one request packet is outstanding at a time, so that only one PSN is
    /// answered.
    pub(crate) fn knows_responder(&self) -> bool {
        !self.reliable || self.sources.knows(Direction::Response)
    }

    /// The PSN of a packet that is exactly at the expected one: of a response, the oldest outstanding.
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
