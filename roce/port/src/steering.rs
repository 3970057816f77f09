//! Which shard of a port a packet is for, when several loops have one each.
//!
//! Each shard is a [`Port`](crate::Port) of its own, and what names its objects on the wire shows which: the top bits of queue pair
//! numbers and communication IDs are the shard's ([`QpnSlot`]). Management datagrams, and whatever is nobody's, go to shard 0.

use roce_bth::Qpn;

use crate::qpn::QpnSlot;

/// How the numbers of an address are spread over its shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Steering {
    shards: u16,
    bits: u8,
}

impl Steering {
    /// The most shards.
    pub const MAX_SHARDS: usize = 64;

    /// For so many shards; `None` unless there are 2 to [`MAX_SHARDS`](Self::MAX_SHARDS).
    pub fn new(shards: usize) -> Option<Self> {
        if !(2..=Self::MAX_SHARDS).contains(&shards) {
            return None;
        }
        Some(Self {
            shards: shards as u16,
            bits: shards.next_power_of_two().trailing_zeros() as u8,
        })
    }

    /// How many.
    pub const fn shards(self) -> usize {
        self.shards as usize
    }

    /// Top bits of a number that name its shard.
    pub const fn bits(self) -> u8 {
        self.bits
    }

    /// The numbers of a shard; `None` when there is none of this number.
    pub const fn slot(self, shard: usize) -> Option<QpnSlot> {
        if shard >= self.shards as usize {
            return None;
        }
        Some(QpnSlot {
            bits: self.bits,
            slot: shard as u16,
        })
    }

    /// Whose a queue pair number is. QP0, QP1, that of multicast and those of no shard are shard 0's.
    pub const fn of_qpn(self, qpn: Qpn) -> usize {
        if qpn.value() == Qpn::MULTICAST.value() {
            return 0;
        }
        self.of(qpn.value() >> (24 - self.bits as u32))
    }

    /// Whose a communication ID, or a SIDR request ID, is. Those of no shard are shard 0's.
    pub const fn of_comm_id(self, id: u32) -> usize {
        self.of(id >> (32 - self.bits as u32))
    }

    const fn of(self, top: u32) -> usize {
        if top < self.shards as u32 { top as usize } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_shard_are_steered_to_it() {
        for shards in 2..=Steering::MAX_SHARDS {
            let steering = Steering::new(shards).unwrap();
            assert!(1 << steering.bits() >= shards && 1 << (steering.bits() - 1) < shards);
            for shard in 0..shards {
                let slot = steering.slot(shard).unwrap();
                assert!(slot.is_valid());
                let (numbers, ids) = (slot.qpns(), slot.comm_ids());
                let last = numbers.last.min(Qpn::MULTICAST.value() - 1);
                for qpn in [numbers.first, last] {
                    assert_eq!(steering.of_qpn(Qpn::new(qpn)), shard, "{qpn:#x} of {shards}");
                }
                assert_eq!([ids.0, ids.1].map(|id| steering.of_comm_id(id)), [shard; 2]);
                // A device has at most 65536 of them.
                assert!(numbers.count() >= 65_536, "{shards}");
            }
            assert_eq!(steering.slot(shards), None);
        }
    }

    #[test]
    fn what_is_nobodys_and_management_are_the_first_shards() {
        for shards in [2, 3, 5, 64] {
            let steering = Steering::new(shards).unwrap();
            for qpn in [Qpn::SMI, Qpn::GSI, Qpn::MULTICAST] {
                assert_eq!(steering.of_qpn(qpn), 0, "{qpn} of {shards}");
            }
        }
        let three = Steering::new(3).unwrap();
        assert_eq!(three.of_qpn(Qpn::new(0xff_fffe)), 0);
        assert_eq!(three.of_comm_id(u32::MAX), 0);
    }

    #[test]
    fn one_shard_is_none() {
        for shards in [0, 1, 65, usize::MAX] {
            assert_eq!(Steering::new(shards), None);
        }
    }
}
