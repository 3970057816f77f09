//! Addresses: a common prefix stays one, and so does the kind (loopback, multicast, link-local, private).

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use super::secret::{Domain, Secret};

/// Addresses that are remembered, so that their bits are not computed again.
const MAX_CACHED: usize = 1 << 16;

/// Other addresses for addresses.
pub(super) struct Addresses {
    secret: Secret,
    cache: HashMap<IpAddr, IpAddr>,
}

impl Addresses {
    pub(super) fn new(secret: Secret) -> Self {
        Self {
            secret,
            cache: HashMap::new(),
        }
    }

    pub(super) fn ip(&mut self, ip: IpAddr) -> IpAddr {
        if let Some(known) = self.cache.get(&ip) {
            return *known;
        }
        let mapped = match ip {
            IpAddr::V4(v4) => self.v4(v4).into(),
            IpAddr::V6(v6) => self.v6(v6).into(),
        };
        if self.cache.len() >= MAX_CACHED {
            self.cache.clear();
        }
        self.cache.insert(ip, mapped);
        mapped
    }

    /// Replaces an address of 4 or 16 bytes.
    pub(super) fn replace(&mut self, bytes: &mut [u8]) {
        if let Ok(v4) = <[u8; 4]>::try_from(&*bytes)
            && let IpAddr::V4(new) = self.ip(Ipv4Addr::from(v4).into())
        {
            bytes.copy_from_slice(&new.octets());
        } else if let Ok(v6) = <[u8; 16]>::try_from(&*bytes)
            && let IpAddr::V6(new) = self.ip(Ipv6Addr::from(v6).into())
        {
            bytes.copy_from_slice(&new.octets());
        } else {
            bytes.fill(0);
        }
    }

    /// Replaces a MAC address by a locally administered one. Group addresses stay such, and broadcast and zero as they are.
    pub(super) fn replace_mac(&self, bytes: &mut [u8]) {
        if bytes.iter().all(|byte| *byte == 0) || bytes.iter().all(|byte| *byte == 0xff) {
            return;
        }
        let new: [u8; 6] = self.secret.bytes(Domain::Mac, &[bytes]);
        let kept = match bytes {
            [0x01, 0, 0x5e, ..] => 3,
            [0x33, 0x33, ..] => 2,
            _ => 0,
        };
        let group = bytes.first().copied().unwrap_or(0) & 1;
        for (at, byte) in bytes.iter_mut().enumerate().skip(kept) {
            *byte = new[at % new.len()];
        }
        if kept == 0
            && let Some(first) = bytes.first_mut()
        {
            *first = *first & !1 | 2 | group;
        }
    }

    /// Replaces the GUID of an adapter, which may be made of a MAC address.
    pub(super) fn replace_guid(&self, bytes: &mut [u8]) {
        if bytes.iter().any(|byte| *byte != 0) {
            let new: [u8; 8] = self.secret.bytes(Domain::Guid, &[bytes]);
            bytes.iter_mut().zip(new).for_each(|(byte, new)| *byte = new);
        }
    }

    fn v4(&self, ip: Ipv4Addr) -> Ipv4Addr {
        let kept = kept_v4(ip);
        let mut bits = u32::from(ip);
        // One that would be of another kind is mapped again: a permutation stays one on the addresses of a kind.
        loop {
            bits = self.permute(Domain::AddressV4, u128::from(bits), 32, kept) as u32;
            let new = Ipv4Addr::from(bits);
            if kept_v4(new) == kept {
                return new;
            }
        }
    }

    fn v6(&self, ip: Ipv6Addr) -> Ipv6Addr {
        if let Some(v4) = ip.to_ipv4_mapped() {
            return self.v4(v4).to_ipv6_mapped();
        }
        let kept = kept_v6(ip);
        let mut bits = u128::from(ip);
        loop {
            bits = self.permute(Domain::AddressV6, bits, 128, kept);
            let new = Ipv6Addr::from(bits);
            if kept_v6(new) == kept && new.to_ipv4_mapped().is_none() {
                return new;
            }
        }
    }

    /// Flips each bit behind the first `kept` by the bits before it, so that addresses with a common prefix keep one of that length.
    fn permute(&self, domain: Domain, bits: u128, len: u32, kept: u32) -> u128 {
        let mut out = bits;
        for at in kept..len {
            let shift = len - at;
            let prefix = if shift >= 128 { 0 } else { bits >> shift };
            let [byte] = self.secret.bytes(domain, &[&[at as u8], &prefix.to_be_bytes()]);
            out ^= u128::from(byte & 1) << (shift - 1);
        }
        out
    }
}

/// Bits of an IPv4 address that say its kind, and stay.
const fn kept_v4(ip: Ipv4Addr) -> u32 {
    match ip.octets() {
        [0, ..] if ip.is_unspecified() => 32,
        [255, 255, 255, 255] => 32,
        [0 | 127, ..] => 9,
        [10, ..] => 8,
        [172, 16..=31, ..] => 12,
        [192, 168, ..] => 16,
        [169, 254, ..] => 17,
        [224..=255, ..] => 4,
        [192..=223, ..] => 3,
        [128..=191, ..] => 2,
        _ => 1,
    }
}

/// Bits of an IPv6 address that say its kind, and stay.
const fn kept_v6(ip: Ipv6Addr) -> u32 {
    match ip.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => 128,
        [0xfe80..=0xfebf, ..] => 64,
        [0xff00..=0xffff, ..] => 16,
        [0xfc00..=0xfdff, ..] => 8,
        [0x2000..=0x3fff, ..] => 3,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn addresses() -> Addresses {
        Addresses::new(Secret::new([3; 32]))
    }

    fn common(a: IpAddr, b: IpAddr) -> u32 {
        match (a, b) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u32::from(a) ^ u32::from(b)).leading_zeros(),
            (IpAddr::V6(a), IpAddr::V6(b)) => (u128::from(a) ^ u128::from(b)).leading_zeros(),
            _ => panic!("{a} {b}"),
        }
    }

    #[test]
    fn prefixes_stay_prefixes() {
        let mut addresses = addresses();
        for (a, b) in [
            ("10.1.2.3", "10.1.2.200"),
            ("10.1.2.3", "10.9.2.3"),
            ("192.168.7.1", "192.168.9.1"),
            ("2001:db8::1", "2001:db8::2"),
            ("2001:db8:1::1", "2001:db8:2::1"),
            ("fe80::1:2", "fe80::2:2"),
            ("::ffff:10.1.2.3", "::ffff:10.1.3.3"),
        ] {
            let [a, b]: [IpAddr; 2] = [a, b].map(|text| text.parse().unwrap());
            let (x, y) = (addresses.ip(a), addresses.ip(b));
            assert_eq!(common(a, b), common(x, y), "{a} {b}: {x} {y}");
            assert!(x != a && y != b, "{a} {b}: {x} {y}");
        }
    }

    #[test]
    fn a_mapped_address_is_the_ipv4_address() {
        let mut addresses = addresses();
        let IpAddr::V4(v4) = addresses.ip("10.77.0.1".parse().unwrap()) else {
            panic!()
        };
        let mapped = addresses.ip("::ffff:10.77.0.1".parse().unwrap());
        assert_eq!(mapped, IpAddr::V6(v4.to_ipv6_mapped()));
    }

    #[test]
    fn kinds_stay_and_no_two_addresses_become_one() {
        let mut addresses = addresses();
        let mut seen = HashSet::new();
        // All first and second bytes: every kind, and every border between kinds.
        for high in 0..=u16::MAX {
            let [a, b] = high.to_be_bytes();
            let ip = Ipv4Addr::new(a, b, 7, 9);
            let IpAddr::V4(new) = addresses.ip(ip.into()) else {
                panic!()
            };
            assert!(seen.insert(new), "{ip}");
            let kind = |ip: Ipv4Addr| (ip.is_loopback(), ip.is_private(), ip.is_link_local(), ip.is_multicast());
            assert_eq!(kind(ip), kind(new), "{ip} {new}");
        }
        for same in ["0.0.0.0", "255.255.255.255", "::", "::1"] {
            let same: IpAddr = same.parse().unwrap();
            assert_eq!(addresses.ip(same), same);
        }
    }

    #[test]
    fn macs_stay_unicast_or_group() {
        let addresses = addresses();
        for mac in [[2, 0, 10, 77, 0, 1], [1, 0, 0x5e, 1, 2, 3], [0x33, 0x33, 0, 0, 0, 1]] {
            let mut new = mac;
            addresses.replace_mac(&mut new);
            assert_ne!(new, mac);
            assert_eq!(new[0] & 1, mac[0] & 1);
        }
        for mac in [[0; 6], [0xff; 6]] {
            let mut new = mac;
            addresses.replace_mac(&mut new);
            assert_eq!(new, mac);
        }
    }
}
