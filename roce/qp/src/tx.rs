//! Output of packets.

use roce_verbs::{AddressVector, Qpn};

/// Kind of a packet for the sender of packets: retransmissions must not be segmented in hardware, acknowledgements may
/// be ordered before data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TxKind {
    /// A request that is sent for the first time.
    Request,
    /// A request that was sent before.
    Retransmission,
    /// A READ response or atomic acknowledgement.
    Response,
    /// A READ response or atomic acknowledgement that was asked for again.
    Repetition,
    /// An acknowledgement without data.
    Ack,
}

impl TxKind {
    /// Returns whether it may have been sent before.
    pub const fn is_again(self) -> bool {
        matches!(self, Self::Retransmission | Self::Repetition)
    }
}

/// Takes packets. A queue pair reserves room, fills it, and commits; it commits nothing that it failed to fill.
pub trait TxSink {
    /// Room for one packet of `len` bytes: headers, payload and pad, without the ICRC. `None` when full. A reservation
    /// that is not committed is void with the next one.
    fn reserve(&mut self, kind: TxKind, len: usize) -> Option<&mut [u8]>;
    /// Seals the packet reserved last.
    fn commit(&mut self);
    /// Names the receiver of the packets that follow: a datagram queue pair calls it before each. `false`: there is no way
    /// to it, and the work request fails. Connected queue pairs never call it.
    fn direct(&mut self, _to: &AddressVector, _dest: Qpn) -> bool {
        false
    }
}

/// Rest of the work of [`QueuePair::poll_transmit`](crate::QueuePair::poll_transmit).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Poll {
    /// Nothing to send until something happens.
    Idle,
    /// More to send at once: the sink or the turn's budget is used up.
    More,
    /// More to send when the window opens.
    Blocked,
}

/// Result of one attempt to send a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// A packet went out.
    Sent,
    /// The sink is full.
    Full,
    /// Nothing to send on this side.
    Idle,
    /// The window is closed.
    Blocked,
}

#[cfg(test)]
mod tests {
    use core::net::{IpAddr, Ipv4Addr};

    use super::*;

    /// Takes nothing, and knows no datagrams.
    struct Connected;

    impl TxSink for Connected {
        fn reserve(&mut self, _: TxKind, _: usize) -> Option<&mut [u8]> {
            None
        }

        fn commit(&mut self) {}
    }

    #[test]
    fn a_sink_that_knows_no_datagrams_has_no_way_to_anybody() {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert!(!Connected.direct(&AddressVector::new(here, here), Qpn::new(5)));
    }
}
