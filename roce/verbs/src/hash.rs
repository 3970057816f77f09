//! Fast hashers for keys that are looked up for every packet.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Unseeded hasher for our own random numbers (queue pairs, memory keys). A peer that could choose the keys could make
/// them collide.
#[derive(Clone, Copy, Debug, Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u32(u32::from(*b) ^ (self.0 as u32));
        }
    }

    fn write_u32(&mut self, n: u32) {
        let x = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = x ^ (x >> 32);
    }
}

/// Seeded hasher for IP addresses, which peers choose.
#[derive(Clone, Debug)]
pub struct AddressHashes(u64);

impl Default for AddressHashes {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for AddressHashes {
    type Hasher = AddressHasher;

    fn build_hasher(&self) -> AddressHasher {
        AddressHasher(self.0)
    }
}

/// Hasher of [`AddressHashes`]: multiplies each word and folds the product.
#[derive(Clone, Debug)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u64(&mut self, n: u64) {
        let product = u128::from(self.0 ^ n) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::HashMap, net::IpAddr};

    #[test]
    fn neighbouring_addresses_spread_and_seeds_differ() {
        let hashes = AddressHashes::default();
        let v4 = (0..4096u32).map(|i| IpAddr::from((0x0a00_0000 + i).to_be_bytes()));
        let v6 = (0..4096u128).map(|i| IpAddr::from(((0xfe80 << 112) + i).to_be_bytes()));
        for addresses in [v4.collect::<Vec<_>>(), v6.collect()] {
            // Hash tables take the low bits for the bucket and the top seven to compare.
            for shift in [0, 57] {
                let mut buckets = HashMap::new();
                for address in &addresses {
                    *buckets.entry(hashes.hash_one(address) >> shift & 0x7f).or_insert(0) += 1;
                }
                assert!(buckets.values().all(|n| (8..128).contains(n)), "{shift}: {buckets:?}");
            }
        }
        let one = IpAddr::from([10, 0, 0, 1]);
        assert_ne!(hashes.hash_one(one), AddressHashes::default().hash_one(one));
    }
}
