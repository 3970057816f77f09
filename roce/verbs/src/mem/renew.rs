//! Keys that are renewed.

use crate::RKey;

use crate::mem::table::MemoryTable;

/// The key that a fast region or window has once everything posted is executed.
#[derive(Debug)]
pub struct PostedKey {
    /// The key.
    pub key: RKey,
    /// It has been granted, and not been revoked since.
    pub granted: bool,
    /// Random bytes for the next keys, lowest first, and how many are left.
    random: u64,
    left: u8,
}

impl PostedKey {
    /// That of a new object.
    pub const fn new(key: RKey) -> Self {
        Self {
            key,
            granted: false,
            random: 0,
            left: 0,
        }
    }

    /// A key to renew it with: the consumer's byte is random, and another than before. The other three are the object's
    /// index, which lasts as long as the object (IBA 10.6.3.3).
    pub fn next(&mut self, mem: &MemoryTable) -> RKey {
        loop {
            if self.left == 0 {
                (self.random, self.left) = (mem.random(), 8);
            }
            let byte = (self.random & 0xff) as u32;
            (self.random, self.left) = (self.random >> 8, self.left - 1);
            if byte != self.key.0 & 0xff {
                return RKey(self.key.0 & !0xff | byte);
            }
        }
    }
}
