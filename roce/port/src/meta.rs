//! Metadata of received datagrams.

use core::net::{IpAddr, SocketAddr};

use roce_bth::ROCE_UDP_PORT;
use roce_icrc::{Flow, IdSolver, IpPair, Recovery};

/// Metadata of a received datagram.
#[derive(Clone, Copy, Debug)]
pub struct RxMeta {
    /// Destination address (`IP_PKTINFO`).
    pub local: IpAddr,
    /// Sender's address and UDP port.
    pub remote: SocketAddr,
    /// IPv4 Identification of the first packet. `None` from a UDP socket, which hides the IP header.
    pub identification: Option<u16>,
    /// Bytes of each packet but the last in a GRO buffer (`UDP_GRO`); 0 for a single packet.
    pub segment_len: usize,
    /// TOS or traffic class (`IP_RECVTOS`), 0 if unknown.
    pub tos: u8,
    /// TTL or hop limit (`IP_RECVTTL`), 0 if unknown.
    pub hop_limit: u8,
}

impl RxMeta {
    /// Creates the metadata of a single datagram with only its addresses known.
    pub const fn new(local: IpAddr, remote: SocketAddr) -> Self {
        Self {
            local,
            remote,
            identification: None,
            segment_len: 0,
            tos: 0,
            hop_limit: 0,
        }
    }

    /// Returns the flow of the packets. `None` if the addresses have different IP versions.
    pub(crate) fn flow(&self) -> Option<Flow> {
        Some(Flow {
            ip: IpPair::try_from((self.remote.ip(), self.local)).ok()?,
            src_port: self.remote.port(),
            dst_port: ROCE_UDP_PORT,
        })
    }

    /// Returns whether the ICRC of a single packet is right. IPv4 Identifications that the socket does not show are recovered.
    pub fn is_sound(&self, solver: &mut IdSolver, bytes: &[u8]) -> bool {
        self.flow().is_some_and(|flow| match self.identification {
            Some(id) => flow.verify(id, bytes),
            None => matches!(flow.recover_with(solver, bytes, 0), Recovery::Exact(_)),
        })
    }
}
