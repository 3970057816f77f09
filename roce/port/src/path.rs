//! Network paths of packets.

use roce_bth::ROCE_UDP_PORT;
use roce_icrc::{Flow, IcrcPrefix, IpPair};

/// Network path of a queue pair's packets, with the flow that their ICRCs cover.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TxPath {
    pub(crate) flow: Flow,
    pub(crate) prefix: IcrcPrefix,
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
}

impl TxPath {
    /// Creates the path of packets between two addresses from this UDP source port.
    pub(crate) fn new(ip: IpPair, src_port: u16, tos: u8, ttl: u8) -> Self {
        let flow = Flow {
            ip,
            src_port,
            dst_port: ROCE_UDP_PORT,
        };
        Self {
            prefix: flow.prefix(),
            flow,
            tos,
            ttl,
        }
    }
}
