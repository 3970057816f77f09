//! Instance of a device: where acknowledged writes lie that no flush has made durable. An extension of RNBD between a client and a
//! server of ours; `docs/reference/instance.md` has its bytes.
//!
//! A client that opens a device again compares the instance with the one before. Another one means that such writes may be gone:
//! the server's machine has restarted, another machine or file has taken the place, or a sync has failed in between.

use core::num::NonZeroU32;

/// Names what holds a device's acknowledged writes, whatever process serves them. Two are equal only if nothing was lost in between,
/// but for one chance in 2^32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Instance(NonZeroU32);

impl Instance {
    /// The instance that these parts name together: the system's boot, the file, and the like.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        // FNV-1a, since equal parts must give an equal number in every process and version.
        const PRIME: u64 = 0x100_0000_01b3;
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for part in parts {
            let len = (part.len() as u64).to_le_bytes();
            for byte in len.iter().chain(part) {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
            }
        }
        let folded = (hash ^ hash >> 32) as u32;
        Self(NonZeroU32::new(folded).unwrap_or(NonZeroU32::MIN))
    }

    /// The instance of this number; `None` for 0, which an older server of ours sends.
    pub fn from_wire(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(Self)
    }

    /// Its number, not 0.
    pub fn to_wire(self) -> u32 {
        self.0.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_parts_name_the_same_instance_and_no_others_do() {
        let of = |parts: &[&[u8]]| Instance::of(parts.iter().copied());
        // A server of another version has to find the same number.
        assert_eq!(of(&[b"boot", b"file"]).to_wire(), 0x123e_7856);
        let all: [&[&[u8]]; 6] = [
            &[],
            &[b""],
            &[b"boot", b"file"],
            &[b"bootf", b"ile"],
            &[b"file", b"boot"],
            &[b"boot", b"file", b"1"],
        ];
        for (i, parts) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|other| of(other) != of(parts)), "{parts:?}");
        }
    }

    #[test]
    fn zero_is_no_instance() {
        assert_eq!(Instance::from_wire(0), None);
        let one = Instance::of([b"x".as_slice()]);
        assert_eq!(Instance::from_wire(one.to_wire()), Some(one));
    }
}
