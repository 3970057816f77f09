//! Address handles: the way to the receiver of a datagram.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use roce_qp::GRH_LEN;
use roce_verbs::{AddressVector, Completion, Datagram, QKey, Qpn, WcFlags, provider::VerbsError};

use crate::{
    device::{Counted, Device},
    memory::Pd,
};

/// Bytes of an IPv4 header without options.
const IPV4_LEN: usize = 20;
/// Hop limit of answers (`ib_init_ah_attr_from_wc`).
const REPLY_HOP_LIMIT: u8 = 0xff;

/// An address handle. Datagrams copy its path, so it may be dropped while they wait.
#[derive(Clone, Debug)]
pub struct AddressHandle {
    av: AddressVector,
    pd: Pd,
    _counted: Arc<Counted>,
}

impl AddressHandle {
    /// The path.
    pub fn path(&self) -> AddressVector {
        self.av
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// The target of a work request: a queue pair at the end of the path, and the key that it must have.
    pub fn to(&self, qpn: Qpn, qkey: QKey) -> Datagram {
        Datagram { av: self.av, qpn, qkey }
    }
}

/// The network header of a received datagram, which stands before its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NetworkHeader {
    /// The sender's address.
    pub source: IpAddr,
    /// The address that it was sent to: ours, or a multicast group's.
    pub destination: IpAddr,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// Flow label (IPv6).
    pub flow_label: u32,
}

impl NetworkHeader {
    /// Reads the 40 bytes: an IPv4 header with a right checksum in the last 20 (IBTA A17.4.5.2), else a GRH.
    pub fn parse(bytes: &[u8; GRH_LEN]) -> Self {
        let words = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| bytes[at + i]));
        let v4 = &bytes[GRH_LEN - IPV4_LEN..];
        if v4[0] == 0x45 && checksum_is_right(v4) {
            return Self {
                source: Ipv4Addr::from(words(32)).into(),
                destination: Ipv4Addr::from(words(36)).into(),
                traffic_class: v4[1],
                flow_label: 0,
            };
        }
        let gid = |at: usize| Ipv6Addr::from(std::array::from_fn::<u8, 16, _>(|i| bytes[at + i]));
        Self {
            source: IpAddr::V6(gid(8)).to_canonical(),
            destination: IpAddr::V6(gid(24)).to_canonical(),
            traffic_class: (words(0) >> 20) as u8,
            flow_label: words(0) & 0x000f_ffff,
        }
    }
}

fn checksum_is_right(header: &[u8]) -> bool {
    let sum: u32 = header
        .chunks_exact(2)
        .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
        .sum();
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

impl Device {
    /// Makes an address handle (`ibv_create_ah`). The remote address may be a multicast group's.
    ///
    /// # Errors
    /// At the device's limit, or when the path leads nowhere or does not start here.
    pub fn create_ah(&self, pd: &Pd, av: &AddressVector) -> Result<AddressHandle, VerbsError> {
        pd.check(&self.0)?;
        let mut av = *av;
        if av.local.is_unspecified() {
            av.local = self.0.local_for(av.remote)?;
        }
        Ok(AddressHandle {
            av: self.0.engines.first().with_quiet(|port, _| port.path(&av))??,
            pd: pd.clone(),
            _counted: self.0.ahs.take(self.0.limits.max_ah, "address handles")?,
        })
    }

    /// The path back to the sender of a datagram (`ibv_init_ah_from_wc`); `header` is what stands before its data. What
    /// was sent to a group is answered from any address that fits.
    ///
    /// # Errors
    /// When the completion has no network header.
    pub fn reply_path(&self, completion: &Completion, header: &[u8; GRH_LEN]) -> Result<AddressVector, VerbsError> {
        if !completion.flags.contains(WcFlags::GRH) {
            return Err(VerbsError::Invalid("the completion has no network header".into()));
        }
        let header = NetworkHeader::parse(header);
        let local = match header.destination.is_multicast() {
            true => self.0.local_for(header.source)?,
            false => header.destination,
        };
        Ok(AddressVector {
            hop_limit: REPLY_HOP_LIMIT,
            traffic_class: header.traffic_class,
            ..AddressVector::new(local, header.source)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_header_are_told_apart() {
        let mut v6 = [0u8; GRH_LEN];
        v6[..4].copy_from_slice(&0x6120_0007u32.to_be_bytes());
        v6[23] = 1;
        v6[24..].copy_from_slice(&Ipv6Addr::LOCALHOST.octets());
        let parsed = NetworkHeader::parse(&v6);
        assert_eq!(
            (parsed.source, parsed.destination),
            (
                IpAddr::from([0u16, 0, 0, 0, 0, 0, 0, 1]),
                IpAddr::V6(Ipv6Addr::LOCALHOST)
            )
        );
        assert_eq!((parsed.traffic_class, parsed.flow_label), (0x12, 7));

        let mut v4 = [0u8; GRH_LEN];
        v4[20..].copy_from_slice(&[0x45, 9, 0, 100, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        let sum: u32 = v4[20..]
            .chunks(2)
            .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
            .sum();
        let check = !(((sum & 0xffff) + (sum >> 16)) as u16);
        v4[30..32].copy_from_slice(&check.to_be_bytes());
        let parsed = NetworkHeader::parse(&v4);
        assert_eq!(
            (parsed.source, parsed.destination),
            (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]))
        );
        assert_eq!(parsed.traffic_class, 9);
    }
}
