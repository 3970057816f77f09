//! Classification of packets before they are processed: by PSN and UDP source port. Nothing here changes PSN state.

use roce_bth::{Class, Packet};

use crate::{
    qp::QueuePair,
    reorder::PACKETS,
    seq::Seq,
    source::{Direction, Origin, Sources},
};

/// PSNs before the oldest outstanding one that a congestion notification may name.
const RECENT_REQUESTS: u64 = 1024;

impl QueuePair {
    /// Returns whether a packet's PSN is where this queue pair expects one: within 1024 of the expected PSN for a request,
    /// among the outstanding ones for a response.
    ///
    /// Only an observer of the connection's packets knows that much. A packet of the peer may still be elsewhere, if many
    /// were lost. Looks at nothing else of the packet.
    ///
    /// Unreliable connections expect a message after the last one that came, whatever its PSN was (IBA 9.8.2): to be
    /// expected there takes no more than two packets in a row.
    pub fn expects(&self, packet: &Packet<'_>) -> bool {
        let bth = &packet.header.bth;
        let (una, top) = (self.requester.una(), self.requester.next());
        match bth.opcode.info().class {
            Class::Cnp => false,
            Class::SelectiveAcknowledge => {
                // It may acknowledge nothing more than was acknowledged before.
                let seq = una.nearest(bth.psn);
                self.context.is_sending() && una.prev() <= seq && seq < top
            }
            Class::Acknowledge | Class::ReadResponse | Class::AtomicAcknowledge => {
                let seq = una.nearest(bth.psn);
                self.context.is_sending() && una <= seq && seq < top
            }
            _ => self.responder.expects(&self.context, bth.psn),
        }
    }

    /// Returns whether an in-order packet has arrived since RTR: a request with the expected PSN, or an answer to an
    /// outstanding request. Then the peer's queue pair works.
    pub fn heard(&self) -> bool {
        self.context.is_established()
    }

    /// Sets the port that the peer named in its REQ or REP. Call in RTR.
    pub fn set_peer_source(&mut self, port: u16) {
        *self.context.sources_mut() = Sources::Agreed(port);
    }

    /// Classifies a packet by its opcode, PSN and UDP source port alone. Changes no state.
    pub fn origin(&self, packet: &Packet<'_>, port: u16) -> Origin {
        let class = packet.header.bth.opcode.info().class;
        if class == Class::Cnp {
            let is_agreed = self.context.sources().agreed_port() == Some(port);
            return match is_agreed && self.is_recent(packet) {
                true => Origin::Peer,
                false => Origin::Stranger,
            };
        }
        let direction = Direction::of(class);
        let sources = self.context.sources();
        if sources.is_peers(port, direction) {
            return Origin::Peer;
        }
        match sources.agreed_port() {
            Some(_) => Origin::Stranger,
            None if self.exact(packet).is_some() => Origin::Unproven,
            // A UC message may start at any PSN (IBA 9.8.2), because earlier packets may have been lost.
            None if !self.context.is_reliable() && !sources.knows(direction) => Origin::Peer,
            None => Origin::Stranger,
        }
    }

    /// Returns whether a congestion notification's PSN is that of a recently sent packet.
    ///
    /// Ferroce peers put the marked packet's PSN there. In the specification a notification has none, so that a guessed
    /// port would be enough to forge one.
    fn is_recent(&self, packet: &Packet<'_>) -> bool {
        let psn = packet.header.bth.psn;
        let (una, expected) = (self.requester.una(), self.responder.expected());
        let (request, response) = (una.nearest(psn), expected.nearest(psn));
        let requested = request.plus(RECENT_REQUESTS) >= una && request < self.requester.next();
        let responded = response.plus(PACKETS) >= expected && response < expected;
        requested || responded
    }

    /// Learns the port of an [`Origin::Unproven`] packet with a correct ICRC.
    ///
    /// Returns false if the peer used another port before. Drop the packet then: its retransmission is accepted.
    pub fn learn_source(&mut self, packet: &Packet<'_>, port: u16) -> bool {
        let direction = Direction::of(packet.header.bth.opcode.info().class);
        self.exact(packet)
            .is_some_and(|at| self.context.sources_mut().learn(port, direction, at))
    }

    /// Returns a packet's PSN if it is exactly the expected one; of a response, the oldest outstanding.
    fn exact(&self, packet: &Packet<'_>) -> Option<Seq> {
        let bth = &packet.header.bth;
        match Direction::of(bth.opcode.info().class) {
            Direction::Request => {
                let expected = self.responder.expected();
                (self.context.takes_requests() && expected.psn() == bth.psn).then_some(expected)
            }
            Direction::Response => {
                let una = self.requester.una();
                let outstanding = una < self.requester.next() && una.psn() == bth.psn;
                (self.context.is_sending() && outstanding).then_some(una)
            }
        }
    }
}
