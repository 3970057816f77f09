//! Statistics of a port, with stable names.

use roce_qp::Counters;

use crate::batch::Staged;

macro_rules! port_counters {
    ($( $(#[$doc:meta])* $name:ident, )*) => {
        /// What a port has counted since it was made. Every packet that comes in is counted once in `rx_packets`, and if
        /// it goes no further, once more under its reason.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct PortCounters {
            /// What the queue pairs counted.
            pub transport: Counters,
            /// What the connection manager counted.
            pub cm: roce_cm::Counters,
            $( $(#[$doc])* pub $name: u64, )*
        }

        impl PortCounters {
            /// Packets with a partition key other than ours, as port attributes tell it (`bad_pkey_cntr`).
            pub fn pkey_violations(&self) -> u16 {
                u16::try_from(self.drop_pkey).unwrap_or(u16::MAX)
            }

            /// Datagrams with a queue key other than their queue pair's (`qkey_viol_cntr`).
            pub fn qkey_violations(&self) -> u16 {
                u16::try_from(self.drop_qkey + self.transport.qkey_violations).unwrap_or(u16::MAX)
            }

            /// Adds what another port has counted.
            pub fn add(&mut self, other: &Self) {
                self.transport.add(&other.transport);
                self.cm.add(&other.cm);
                $( self.$name += other.$name; )*
            }

            /// The port's own counters (without `transport` and `cm`) by name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [ $( (stringify!($name), self.$name), )* ].into_iter()
            }
        }
    };
}

port_counters! {
    /// Packets received, before any check.
    rx_packets,
    /// Their bytes from the BTH to the ICRC.
    rx_bytes,
    /// Datagrams or GRO buffers received.
    rx_datagrams,
    /// Packets staged for sending.
    tx_packets,
    /// Their bytes from the BTH to the ICRC.
    tx_bytes,
    /// Packets staged once more.
    tx_retransmissions,
    /// Management datagrams received that reached the connection manager.
    rx_mads,
    /// Management datagrams sent.
    tx_mads,
    /// Received packets that a switch had marked as having met congestion (ECN CE).
    np_ecn_marked_roce_packets,
    /// Congestion notification packets sent, as received ones were marked.
    np_cnp_sent,
    /// Congestion notification packets received, which slow the queue pair.
    rp_cnp_handled,
    /// Congestion notification packets of strangers, of peers that are not ferroce, and to queue pairs whose packets no switch
    /// may mark: they change nothing.
    rp_cnp_ignored,
    /// For another process or loop that shares the address: packets that the kernel had merged behind ours.
    handed_over,
    /// Dropped: for another loop that shares the address, for which too much waits already.
    drop_handed_over,
    /// Dropped: too short, or headers cut off.
    drop_truncated,
    /// Dropped: opcode not in the table.
    drop_opcode,
    /// Dropped: transport header version not 0.
    drop_version,
    /// Dropped: payload and pad do not fit together or to the opcode.
    drop_malformed,
    /// Dropped: not to an address of ours, or sender and receiver of different IP versions.
    drop_local_address,
    /// Dropped: to QP0.
    drop_qp0,
    /// Packets received that went to the members of a multicast group.
    rx_multicast,
    /// Dropped: to the multicast queue pair, but no group's packet, or of a group without members.
    drop_multicast,
    /// Dropped: no such queue pair.
    drop_no_qp,
    /// Dropped: of another transport service than the queue pair's.
    drop_service,
    /// Dropped: the queue pair has no path yet.
    drop_not_connected,
    /// Dropped: not from the peer's address, or not to the path's local one.
    drop_peer_address,
    /// Dropped: to a connected queue pair, off the expected PSN and not from the peer's UDP source port.
    drop_stranger,
    /// Dropped: partition key other than the default partition's.
    drop_pkey,
    /// Dropped: wrong queue key on QP1.
    drop_qkey,
    /// Dropped: on QP1, but not a datagram of 256 bytes from QP1.
    drop_bad_mad,
    /// Dropped: ICRC wrong.
    icrc_errors,
    /// Dropped: ICRC right only with an IPv4 Identification that this peer would not send.
    icrc_implausible,
    /// Peers towards which GSO was switched off because of trains only the first packets came through.
    gso_switched_off,
}

impl PortCounters {
    /// Counts what a sink has staged.
    pub(crate) fn count_staged(&mut self, staged: &Staged) {
        self.tx_packets += staged.packets;
        self.tx_bytes += staged.bytes;
        self.tx_retransmissions += staged.retransmissions;
    }
}
