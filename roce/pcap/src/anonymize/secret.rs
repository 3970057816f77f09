//! Keyed functions: without the key nobody can tell what a value was.

use sha2::{Digest, Sha256};

/// Rounds of the permutation of 32-bit numbers.
const ROUNDS: u8 = 6;

/// Kind of a value, so that equal values of two kinds become different ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Domain {
    AddressV4 = 1,
    AddressV6,
    Mac,
    Guid,
    RKey,
    Address,
    Immediate,
    Operand,
    Payload,
}

/// Key of a run.
#[derive(Clone)]
pub(super) struct Secret([u8; 32]);

impl Secret {
    pub(super) const fn new(key: [u8; 32]) -> Self {
        Self(key)
    }

    /// Returns the key of a text.
    pub(super) fn of(seed: &str) -> [u8; 32] {
        Sha256::digest(seed).into()
    }

    /// Keyed hash of a value.
    pub(super) fn hash(&self, domain: Domain, parts: &[&[u8]]) -> [u8; 32] {
        let mut hasher = Sha256::new();
        hasher.update(self.0);
        hasher.update([domain as u8]);
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize().into()
    }

    /// First bytes of a keyed hash.
    pub(super) fn bytes<const N: usize>(&self, domain: Domain, parts: &[&[u8]]) -> [u8; N] {
        let hash = self.hash(domain, parts);
        std::array::from_fn(|i| hash[i % hash.len()])
    }

    /// Another number for each 32-bit number: a Feistel network of two halves.
    pub(super) fn permute(&self, domain: Domain, value: u32) -> u32 {
        let (mut left, mut right) = ((value >> 16) as u16, value as u16);
        for round in 0..ROUNDS {
            let [a, b] = self.bytes(domain, &[&[round], &right.to_le_bytes()]);
            (left, right) = (right, left ^ u16::from_le_bytes([a, b]));
        }
        u32::from(left) << 16 | u32::from(right)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn different_numbers_stay_different() {
        let secret = Secret::new([7; 32]);
        let permuted: HashSet<u32> = (0..4096).map(|n| secret.permute(Domain::RKey, n << 8)).collect();
        assert_eq!(permuted.len(), 4096);
        assert_ne!(secret.permute(Domain::RKey, 5), secret.permute(Domain::Immediate, 5));
        assert_ne!(
            secret.permute(Domain::RKey, 5),
            Secret::new([8; 32]).permute(Domain::RKey, 5)
        );
    }
}
