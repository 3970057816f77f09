//! UDP source ports of a connection's peer, which forgers must guess besides the PSN.
//!
//! RoCE has no authentication. But a forger that can't see a connection's packets doesn't know their source port.
//! Other processes on the peer's host can't bind it. So packets off the expected PSN are accepted only from that port.
//! Ferroce peers name their port in the REQ and REP. That of others is learned from packets at exactly the expected
//! PSN, which one forgery in 2^24 hits.

use roce_bth::Class;

use crate::seq::Seq;

/// Sender of a packet as far as its PSN and UDP source port show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The port is the peer's, or the service permits no check.
    Peer,
    /// The PSN is the expected one, but the port is not known: [`QueuePair::learn_source`](crate::QueuePair::learn_source) decides.
    Unproven,
    /// Neither matches: count and drop the packet.
    Stranger,
}

/// UDP source ports known of the peer.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) enum Sources {
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
pub(crate) enum Direction {
    Request,
    Response,
}

impl Direction {
    pub(crate) fn of(class: Class) -> Self {
        match class {
            Class::Acknowledge | Class::SelectiveAcknowledge | Class::ReadResponse | Class::AtomicAcknowledge => {
                Self::Response
            }
            _ => Self::Request,
        }
    }
}

impl Sources {
    /// Returns the port that the peer named in its REQ or REP, if it did.
    pub(crate) fn agreed_port(&self) -> Option<u16> {
        match *self {
            Self::Agreed(port) => Some(port),
            Self::Nothing | Self::Learned { .. } => None,
        }
    }

    /// Returns whether a port is known for a direction.
    pub(crate) fn knows(&self, direction: Direction) -> bool {
        match *self {
            Self::Nothing => false,
            Self::Agreed(_) => true,
            Self::Learned { ports, .. } => ports[direction as usize].is_some(),
        }
    }

    /// Returns whether packets from a port are the peer's.
    pub(crate) fn is_peers(&self, port: u16, direction: Direction) -> bool {
        match *self {
            Self::Nothing => false,
            Self::Agreed(agreed) => agreed == port,
            Self::Learned { ports, .. } => ports[direction as usize] == Some(port),
        }
    }

    /// Learns a port seen at the expected PSN. Returns false while the port is not trusted.
    pub(crate) fn learn(&mut self, port: u16, direction: Direction, at: Seq) -> bool {
        let (mut ports, rival) = match *self {
            Self::Agreed(agreed) => return agreed == port,
            Self::Nothing => ([None; 2], None),
            Self::Learned { ports, rival } => (ports, rival),
        };
        let known = &mut ports[direction as usize];
        let trusted = known.is_none_or(|known| known == port) || rival == Some((port, at));
        if trusted {
            *known = Some(port);
        }
        let rival = (!trusted).then_some((port, at));
        *self = Self::Learned { ports, rival };
        trusted
    }
}
