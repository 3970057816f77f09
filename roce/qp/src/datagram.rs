//! Network header of a datagram, which is written before its data.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use roce_bth::{ICRC_LEN, Packet};

/// Bytes before the data of each received datagram: a GRH, or an IPv4 header in the last 20 of them (IBTA Annex A17).
pub const GRH_LEN: usize = 40;
const UDP_HEADER: usize = 8;
const IPV4_HEADER: usize = 20;
const PROTOCOL_UDP: u8 = 17;

/// Network header of a received datagram, as far as the driver knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DatagramSource {
    /// Sender's address.
    pub src: IpAddr,
    /// Destination: our address, or a multicast group's.
    pub dst: IpAddr,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit, as far as known.
    pub hop_limit: u8,
    /// IPv4 Identification.
    pub identification: u16,
}

impl DatagramSource {
    /// Creates the header of a datagram of which only the addresses are known.
    pub const fn new(src: IpAddr, dst: IpAddr) -> Self {
        Self {
            src,
            dst,
            traffic_class: 0,
            hop_limit: 64,
            identification: 0,
        }
    }

    /// Returns the type of the header before the data, in ConnectX's numbers. Completions have it in place of a service level;
    /// UCX finds the destination address by it.
    pub(crate) const fn packet_type(&self) -> u8 {
        const ROCE_V2_IPV6: u8 = 1;
        const ROCE_V2_IPV4: u8 = 2;
        match self.src {
            IpAddr::V4(_) => ROCE_V2_IPV4,
            IpAddr::V6(_) => ROCE_V2_IPV6,
        }
    }

    /// Returns the 40 bytes before the data. `None`: the addresses are of different families.
    pub(crate) fn header(&self, packet: &Packet<'_>) -> Option<[u8; GRH_LEN]> {
        let pad = usize::from(packet.header.bth.pad);
        let udp = UDP_HEADER + packet.header.bytes().len() + packet.payload.len() + pad + ICRC_LEN;
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Some(self.ipv4(src, dst, udp)),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Some(self.ipv6(src, dst, udp)),
            _ => None,
        }
    }

    /// Leaves the first 20 bytes unused, as rdma_rxe and hardware do. Programs tell the two apart by this header's checksum
    /// (`ibv_init_ah_from_wc`).
    fn ipv4(&self, src: Ipv4Addr, dst: Ipv4Addr, udp: usize) -> [u8; GRH_LEN] {
        let mut ip = [0; IPV4_HEADER];
        ip[0] = 0x45;
        ip[1] = self.traffic_class;
        ip[2..4].copy_from_slice(&((IPV4_HEADER + udp) as u16).to_be_bytes());
        ip[4..6].copy_from_slice(&self.identification.to_be_bytes());
        // Don't fragment, as all senders of RoCE have it.
        ip[6] = 0x40;
        ip[8] = self.hop_limit;
        ip[9] = PROTOCOL_UDP;
        ip[12..16].copy_from_slice(&src.octets());
        ip[16..20].copy_from_slice(&dst.octets());
        let sum: u32 = ip.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        let mut out = [0; GRH_LEN];
        out[GRH_LEN - IPV4_HEADER..].copy_from_slice(&ip);
        out
    }

    fn ipv6(&self, src: Ipv6Addr, dst: Ipv6Addr, udp: usize) -> [u8; GRH_LEN] {
        let mut out = [0; GRH_LEN];
        let first = 6 << 28 | u32::from(self.traffic_class) << 20;
        out[..4].copy_from_slice(&first.to_be_bytes());
        out[4..6].copy_from_slice(&(udp as u16).to_be_bytes());
        out[6] = PROTOCOL_UDP;
        out[7] = self.hop_limit;
        out[8..24].copy_from_slice(&src.octets());
        out[24..].copy_from_slice(&dst.octets());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 1071: with the checksum the words add up to all ones.
    #[test]
    fn the_checksum_is_right_for_every_sum() {
        let (src, dst) = (Ipv4Addr::new(250, 1, 250, 2), Ipv4Addr::new(240, 1, 2, 3));
        for identification in 0..=u16::MAX {
            let source = DatagramSource {
                src: src.into(),
                dst: dst.into(),
                traffic_class: 3,
                hop_limit: 64,
                identification,
            };
            let header = source.ipv4(src, dst, 100);
            let words = header[GRH_LEN - IPV4_HEADER..].chunks(2);
            let mut sum: u32 = words.map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            assert_eq!(sum, 0xffff, "{identification:#x}");
        }
    }
}
