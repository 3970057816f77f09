//! Congestion maps: a bit for each port of an address, set while the port's socket has more data than it may hold.

use core::fmt;

use super::{
    error::ProtoError,
    limits::{BITMAP_FRAGMENTS, BITMAP_LEN, MAX_FRAGMENT},
};

/// Part of a map, as one SEND carries it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BitmapFragment<'a> {
    index: u32,
    bits: &'a [u8; MAX_FRAGMENT],
}

impl<'a> BitmapFragment<'a> {
    /// Reads the data of fragment `index`.
    ///
    /// # Errors
    /// When there is no such fragment, or it has another length.
    pub fn parse(index: u32, data: &'a [u8]) -> Result<Self, ProtoError> {
        let bits = <&[u8; MAX_FRAGMENT]>::try_from(data);
        match bits {
            Ok(bits) if index < BITMAP_FRAGMENTS => Ok(Self { index, bits }),
            _ => Err(ProtoError::Fragment {
                index,
                message: BITMAP_LEN as u32,
                len: data.len(),
                expected: if index < BITMAP_FRAGMENTS { MAX_FRAGMENT } else { 0 },
            }),
        }
    }

    /// Number of the fragment, from 0.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The data.
    pub fn bytes(&self) -> &'a [u8; MAX_FRAGMENT] {
        self.bits
    }

    /// Congested ports of this part, ascending.
    pub fn ports(&self) -> impl Iterator<Item = u16> + use<'a> {
        let first = self.index as usize * MAX_FRAGMENT * 8;
        ports(self.bits, first)
    }
}

/// Returns the set bits of bytes, the first of which is bit `first` of the map. Bits count from the least significant one.
fn ports(bytes: &[u8], first: usize) -> impl Iterator<Item = u16> + use<'_> {
    let set = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0);
    set.flat_map(move |(at, byte)| {
        let bits = (0..8).filter(move |bit| byte >> bit & 1 != 0);
        bits.map(move |bit| (first + at * 8 + bit) as u16)
    })
}

/// Congestion map of an address.
#[derive(Clone, PartialEq, Eq)]
pub struct CongestionMap {
    bits: Box<[u8; BITMAP_LEN]>,
}

impl Default for CongestionMap {
    fn default() -> Self {
        Self {
            bits: Box::new([0; BITMAP_LEN]),
        }
    }
}

impl CongestionMap {
    /// Sets or clears the bit of a port. Returns whether it was the other way.
    pub fn set(&mut self, port: u16, congested: bool) -> bool {
        let (byte, bit) = (&mut self.bits[usize::from(port / 8)], 1 << (port % 8));
        let before = *byte & bit != 0;
        *byte = if congested { *byte | bit } else { *byte & !bit };
        before != congested
    }

    /// Returns whether a port is congested.
    pub fn is_congested(&self, port: u16) -> bool {
        self.bits[usize::from(port / 8)] >> (port % 8) & 1 != 0
    }

    /// Returns whether no port is congested.
    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(|byte| *byte == 0)
    }

    /// Congested ports, ascending.
    pub fn ports(&self) -> impl Iterator<Item = u16> + use<'_> {
        ports(&self.bits[..], 0)
    }

    /// Data of fragment `index`, if there is such a fragment.
    pub fn fragment(&self, index: u32) -> Option<BitmapFragment<'_>> {
        let part = self.bits.chunks_exact(MAX_FRAGMENT).nth(index as usize)?;
        BitmapFragment::parse(index, part).ok()
    }

    /// Replaces a part with what a fragment says.
    pub fn replace(&mut self, fragment: &BitmapFragment<'_>) {
        let at = fragment.index as usize * MAX_FRAGMENT;
        self.bits[at..at + MAX_FRAGMENT].copy_from_slice(fragment.bits);
    }

    /// Ports that are congested in `before` and not in this map, as bits of the port modulo 64: the form of the kernel's
    /// `RDS_CMSG_CONG_UPDATE`.
    pub fn freed_since(&self, before: &Self) -> u64 {
        let freed = |(new, old): (&[u8], &[u8])| {
            let word = |b: &[u8]| b.iter().rev().fold(0u64, |w, b| w << 8 | u64::from(*b));
            word(old) & !word(new)
        };
        let words = self.bits.chunks_exact(8).zip(before.bits.chunks_exact(8));
        words.map(freed).fold(0, |all, word| all | word)
    }
}

impl fmt::Debug for CongestionMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.ports()).finish()
    }
}
