//! Statistics of a port, with stable names.

use roce_bth::ParseError;
use roce_qp::Counters;

use crate::batch::Staged;

macro_rules! port_counters {
    ($( $(#[$doc:meta])* $name:ident, )*) => {
        /// Counters of a port since its creation.
        ///
        /// Each received packet counts in `rx_packets`, a dropped packet also in the counter of its reason.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct PortCounters {
            /// Counters of the queue pairs.
            pub transport: Counters,
            /// Counters of the connection manager.
            pub cm: crate::cm::Counters,
            $( $(#[$doc])* pub $name: u64, )*
        }

        impl PortCounters {
            /// Returns the packets with a wrong partition key, as in port attributes (`bad_pkey_cntr`).
            pub fn pkey_violations(&self) -> u16 {
                u16::try_from(self.drop_pkey).unwrap_or(u16::MAX)
            }

            /// Returns the datagrams with a wrong queue key, as in port attributes (`qkey_viol_cntr`).
            pub fn qkey_violations(&self) -> u16 {
                u16::try_from(self.drop_qkey + self.transport.qkey_violations).unwrap_or(u16::MAX)
            }

            /// Adds another port's counters.
            pub fn add(&mut self, other: &Self) {
                self.transport.add(&other.transport);
                self.cm.add(&other.cm);
                $( self.$name += other.$name; )*
            }

            /// Returns the port's own counters by name, without `transport` and `cm`.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [ $( (stringify!($name), self.$name), )* ].into_iter()
            }
        }
    };
}

port_counters! {
    /// Packets received, before any check.
    rx_packets,
    /// Bytes received, from the BTH to the ICRC.
    rx_bytes,
    /// Datagrams or GRO buffers received.
    rx_datagrams,
    /// Packets staged for sending.
    tx_packets,
    /// Bytes staged for sending, from the BTH to the ICRC.
    tx_bytes,
    /// Packets retransmitted.
    tx_retransmissions,
    /// Management datagrams received and passed to the connection manager.
    rx_mads,
    /// Management datagrams sent.
    tx_mads,
    /// Packets received with a congestion mark (ECN CE) from a switch.
    np_ecn_marked_roce_packets,
    /// Congestion notification packets sent for received packets with a mark.
    np_cnp_sent,
    /// Congestion notification packets received that slowed down a queue pair.
    rp_cnp_handled,
    /// Congestion notification packets ignored: not from a ferroce peer, or the queue pair sends without ECT.
    rp_cnp_ignored,
    /// Packets forwarded to another process or loop that shares the address.
    handed_over,
    /// Dropped: for another loop that shares the address, whose inbox is full.
    drop_handed_over,
    /// Dropped: a connect request of a host that has sent too many (IPv6: a /64), before a loop was chosen for it.
    drop_requests,
    /// Dropped: too short, or headers cut off.
    drop_truncated,
    /// Dropped: opcode not in the table.
    drop_opcode,
    /// Dropped: transport header version not 0.
    drop_version,
    /// Dropped: payload and pad are inconsistent, or don't fit the opcode.
    drop_malformed,
    /// Dropped: destination address not local, or source and destination of different IP versions.
    drop_local_address,
    /// Dropped: to QP0.
    drop_qp0,
    /// Packets delivered to the members of a multicast group.
    rx_multicast,
    /// Dropped: multicast QP with a unicast address, or group without members.
    drop_multicast,
    /// Dropped: unknown destination QP.
    drop_no_qp,
    /// Dropped: transport service other than the queue pair's.
    drop_service,
    /// Dropped: the queue pair has no path yet.
    drop_not_connected,
    /// Dropped: addresses other than those of the queue pair's path.
    drop_peer_address,
    /// Dropped: neither the expected PSN nor the peer's UDP source port on a connected queue pair.
    drop_stranger,
    /// Dropped: partition key other than the default partition's.
    drop_pkey,
    /// Dropped: wrong queue key on QP1.
    drop_qkey,
    /// Dropped: to QP1, but not a datagram of 256 bytes from QP1.
    drop_bad_mad,
    /// Dropped: ICRC wrong.
    icrc_errors,
    /// Of `icrc_errors`: connect requests whose ICRC is right for the addresses in their RDMA_CM header (NAT). Those that exceed
    /// 64 a second are not examined.
    icrc_translated,
    /// Dropped: ICRC correct only for an IPv4 Identification that the peer would not send.
    icrc_implausible,
    /// Peers for which GSO was disabled: they received only the first segment of sends.
    gso_switched_off,
}

/// Counters of a port that show errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorCounts {
    /// [`Counters::qp_failures`].
    pub qp_failures: u64,
    /// [`PortCounters::icrc_errors`].
    pub icrc_errors: u64,
}

impl PortCounters {
    /// Counts a packet that can't be read.
    pub(crate) fn count_unreadable(&mut self, e: &ParseError) {
        *match e {
            ParseError::TooShort { .. } | ParseError::HeaderTruncated { .. } => &mut self.drop_truncated,
            ParseError::UnknownOpcode(_) => &mut self.drop_opcode,
            ParseError::Version(_) => &mut self.drop_version,
            ParseError::PadTooLong { .. } | ParseError::Unaligned(_) | ParseError::UnexpectedPayload { .. } => {
                &mut self.drop_malformed
            }
        } += 1;
    }

    /// Adds the packets that a sink has staged.
    pub(crate) fn count_staged(&mut self, staged: &Staged) {
        self.tx_packets += staged.packets;
        self.tx_bytes += staged.bytes;
        self.tx_retransmissions += staged.retransmissions;
    }
}
