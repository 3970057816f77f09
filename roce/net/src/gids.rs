//! Which interfaces are devices, and the table of GIDs of one: its IP addresses at fixed places.

use std::{
    io,
    net::{IpAddr, Ipv6Addr},
};

use crate::iface::{Interface, interfaces};

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

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Interfaces that are devices: those that are up and have an address. A link-local one, which every interface has, does not
/// count.
///
/// First come interfaces that lead to other hosts, then loopback, last what has no link: programs that are told no device take
/// the first, which should reach other hosts, or else work on this one. Within each group they are in the kernel's order.
pub fn device_names(all: &[Interface]) -> Vec<&str> {
    let counts = |ip: &IpAddr| !ip.is_unspecified() && !is_link_local(*ip);
    let mut devices: Vec<&Interface> = all.iter().filter(|i| i.up && i.addresses.iter().any(counts)).collect();
    // The kernel lists IPv4 addresses first.
    devices.sort_by_key(|i| (rank(i), !i.addresses.iter().any(|ip| ip.is_ipv4() && counts(ip))));
    devices.iter().map(|i| i.name.as_str()).collect()
}

/// Place of an interface among devices.
fn rank(interface: &Interface) -> u8 {
    match (interface.loopback, interface.running) {
        (true, _) => 1,
        (false, true) => 0,
        (false, false) => 2,
    }
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

    /// The addresses of an interface as they are now, in the table's order: IPv4, IPv6, and last what reaches neighbours
    /// only, because programs that are told no index take the first. (rdma_rxe has a link-local one first.)
    ///
    /// # Errors
    /// When the kernel can't tell, or there is no such interface.
    pub fn addresses(interface: &str) -> io::Result<Vec<IpAddr>> {
        let found = interfaces()?.into_iter().find(|i| i.name == interface);
        let mut all = found.ok_or(io::ErrorKind::NotFound)?.addresses;
        all.retain(|ip| !ip.is_unspecified());
        Ok(in_order(all))
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

    /// Returns the index of an address.
    pub fn index_of(&self, ip: IpAddr) -> Option<usize> {
        self.slots.iter().position(|s| *s == Some(ip))
    }

    /// All entries with their indices.
    pub fn iter(&self) -> impl Iterator<Item = (usize, IpAddr)> {
        self.slots.iter().enumerate().filter_map(|(i, s)| Some((i, (*s)?)))
    }
}

fn in_order(mut mine: Vec<IpAddr>) -> Vec<IpAddr> {
    mine.sort_by_key(|ip| (ip.is_ipv6(), is_link_local(*ip)));
    mine.dedup();
    mine
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_comes_first_and_link_local_addresses_last() {
        let ips = [
            "2001:db8::5",
            "10.0.0.1",
            "fe80::5054:ff:fe12:3456",
            "fe80::7",
            "10.0.0.2",
        ];
        let ips: Vec<IpAddr> = ips.iter().map(|t| t.parse().unwrap()).collect();
        let ordered = in_order(ips.clone());
        assert_eq!(ordered, [ips[1], ips[4], ips[0], ips[2], ips[3]]);
        assert_eq!(gid_of(ips[1])[10..], [0xff, 0xff, 10, 0, 0, 1]);
        assert!(ips.iter().all(|ip| ip_of(&gid_of(*ip)) == *ip));
    }

    #[test]
    fn interfaces_with_addresses_are_devices_and_those_to_other_hosts_are_first() {
        let have = |name: &str, up, addresses: &[&str]| Interface {
            name: name.into(),
            index: 1,
            loopback: name == "lo",
            up,
            running: up && name != "docker0",
            addresses: addresses.iter().map(|ip| ip.parse().unwrap()).collect(),
        };
        let all = [
            have("lo", true, &["127.0.0.1"]),
            have("down0", false, &["10.0.0.1"]),
            have("veth7", true, &["fe80::7"]),
            have("docker0", true, &["172.17.0.1"]),
            have("eth2", true, &["2001:db8::2"]),
            have("eth0", true, &["fe80::1", "10.0.0.2", "10.0.0.3"]),
            have("eth1", true, &["10.0.1.2"]),
        ];
        assert_eq!(device_names(&all), ["eth0", "eth1", "eth2", "lo", "docker0"]);
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
