//! The table of GIDs of an interface: its IP addresses at fixed places, in rdma_rxe's order (`roce_gid_mgmt.c`).

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
};

use crate::iface::{Interface, interface_addresses, interfaces};

/// Entries of a table (`RXE_PORT_GID_TBL_LEN`).
pub const TABLE_LEN: usize = 1024;

/// The GID of an address: the address itself, IPv4 mapped into IPv6 (IBTA A17.9.1).
pub fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address of a GID.
pub fn ip_of(gid: &[u8; 16]) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(*gid)).to_canonical()
}

/// The interface's own link-local address, made of its hardware address (EUI-64): the default GID.
fn eui64(mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    let words = [[a ^ 2, b], [c, 0xff], [0xfe, d], [e, f]].map(u16::from_be_bytes);
    Ipv6Addr::new(0xfe80, 0, 0, 0, words[0], words[1], words[2], words[3])
}

/// Addresses by index. An address that goes leaves its place empty, for the next that comes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GidTable {
    slots: Vec<Option<IpAddr>>,
}

impl GidTable {
    /// The table of these addresses, in this order.
    pub fn new(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        Self {
            slots: addresses.into_iter().take(TABLE_LEN).map(Some).collect(),
        }
    }

    /// The addresses of an interface as they are now: the default GID if the interface has that address, then IPv4, then
    /// the rest of IPv6.
    ///
    /// # Errors
    /// When the kernel can't tell, or there is no such interface.
    pub fn addresses(interface: &str) -> io::Result<Vec<IpAddr>> {
        let all = interfaces()?;
        let link = all.iter().find(|i| i.name == interface);
        let link = link.ok_or(io::ErrorKind::NotFound)?;
        let mine: Vec<IpAddr> = interface_addresses()?
            .into_iter()
            .filter(|a| a.name == interface)
            .map(|a| a.ip)
            .collect();
        Ok(in_order(link, mine))
    }

    /// Brings the table up to date with the addresses that there are: known ones keep their places. Says whether
    /// something changed.
    pub fn follow(&mut self, addresses: &[IpAddr]) -> bool {
        let before = self.slots.clone();
        for slot in &mut self.slots {
            if slot.is_some_and(|ip| !addresses.contains(&ip)) {
                *slot = None;
            }
        }
        for ip in addresses {
            if self.index_of(*ip).is_some() {
                continue;
            }
            match self.slots.iter().position(|s| s.is_none()) {
                Some(free) => self.slots[free] = Some(*ip),
                None if self.slots.len() < TABLE_LEN => self.slots.push(Some(*ip)),
                None => {}
            }
        }
        self.slots != before
    }

    /// The address at an index; `None` when the place is empty.
    pub fn get(&self, index: usize) -> Option<IpAddr> {
        self.slots.get(index).copied().flatten()
    }

    /// Where an address is.
    pub fn index_of(&self, ip: IpAddr) -> Option<usize> {
        self.slots.iter().position(|s| *s == Some(ip))
    }

    /// All entries with their indices.
    pub fn iter(&self) -> impl Iterator<Item = (usize, IpAddr)> {
        self.slots.iter().enumerate().filter_map(|(i, s)| Some((i, (*s)?)))
    }
}

fn in_order(link: &Interface, mut mine: Vec<IpAddr>) -> Vec<IpAddr> {
    let default = IpAddr::V6(eui64(link.mac));
    mine.sort_by_key(|ip| (*ip != default, ip.is_ipv6()));
    mine.dedup();
    mine
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_gid_comes_first_then_ipv4_then_ipv6() {
        let link = Interface {
            name: "eth0".into(),
            index: 2,
            mac: [0x52, 0x54, 0, 0x12, 0x34, 0x56],
            loopback: false,
            up: true,
            running: true,
        };
        let ips = [
            "2001:db8::5",
            "10.0.0.1",
            "fe80::5054:ff:fe12:3456",
            "fe80::7",
            "10.0.0.2",
        ];
        let ips: Vec<IpAddr> = ips.iter().map(|t| t.parse().unwrap()).collect();
        let ordered = in_order(&link, ips.clone());
        assert_eq!(ordered, [ips[2], ips[1], ips[4], ips[0], ips[3]]);
        assert_eq!(gid_of(ips[1])[10..], [0xff, 0xff, 10, 0, 0, 1]);
        assert!(ips.iter().all(|ip| ip_of(&gid_of(*ip)) == *ip));
    }

    #[test]
    fn addresses_keep_their_places() {
        let [a, b, c, d] = [1, 2, 3, 4].map(|n| IpAddr::from([10, 0, 0, n]));
        let mut table = GidTable::new([a, b, c]);
        assert!(!table.follow(&[c, a, b]));
        assert!(table.follow(&[a, c]));
        assert_eq!((table.get(1), table.get(2), table.get(3)), (None, Some(c), None));
        assert!(table.follow(&[a, c, d, b]));
        assert_eq!((table.index_of(d), table.index_of(b)), (Some(1), Some(3)));
        assert_eq!(table.iter().count(), 4);
    }

    #[test]
    fn the_loopback_interface_has_its_address() {
        assert!(
            GidTable::addresses("lo")
                .unwrap()
                .contains(&IpAddr::from([127, 0, 0, 1]))
        );
        assert!(GidTable::addresses("no such one").is_err());
    }
}
