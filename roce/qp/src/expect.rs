//! Which packets a queue pair waits for: what can be told of a packet before anything is done with it.

use roce_bth::{Class, Packet};
use roce_verbs::{QpState, QpType};

use crate::qp::QueuePair;

/// How far a request's PSN may be from the expected one: new packets behind a gap, and copies of recent ones. Somebody who
/// guesses PSNs hits it once in 2^13 times.
const NEAR: i32 = 1024;

impl QueuePair {
    /// Whether a packet's PSN is where this queue pair looks for one: within 1024 of the expected PSN for a request, among
    /// the outstanding ones for a response. That much only somebody knows who sees the connection's packets; a packet of
    /// the peer may still be elsewhere, if many were lost. Nothing is changed, and nothing else of the packet looked at.
    ///
    /// Unreliable connections expect a message after the last one that came, whatever its PSN was (IBA 9.8.2): to be
    /// expected there takes no more than two packets in a row.
    pub fn expects(&self, packet: &Packet<'_>) -> bool {
        let bth = &packet.header.bth;
        match bth.opcode.info().class {
            Class::Cnp => false,
            Class::SelectiveAcknowledge => {
                // It may acknowledge nothing more than was acknowledged before.
                let seq = self.req.una.nearest(bth.psn);
                self.is_sending() && self.req.una.prev() <= seq && seq < self.req.top
            }
            Class::Acknowledge | Class::ReadResponse | Class::AtomicAcknowledge => {
                let seq = self.req.una.nearest(bth.psn);
                self.is_sending() && self.req.una <= seq && seq < self.req.top
            }
            _ => {
                let distance = bth.psn.diff(self.resp.expected.psn());
                self.takes_requests() && (-NEAR..NEAR).contains(&distance)
            }
        }
    }

    /// Whether a packet has come since RTR that was at its place: a request with the expected PSN, an answer to what is
    /// outstanding. The peer has got its queue pair to work, then.
    pub fn heard(&self) -> bool {
        self.resp.established
    }

    /// Whether state and type are ones in which requests are taken.
    pub(crate) fn takes_requests(&self) -> bool {
        let open = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        open && self.config.qp_type != QpType::XrcIni
    }
}
