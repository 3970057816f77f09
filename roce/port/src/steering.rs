//! Recipients of packets at an address that several shards or processes have.
//!
//! The top bits of queue pair numbers and communication IDs name the shard ([`QpnSlot`]), which is a [`Port`](crate::Port). The first
//! shard has the GSI. With a broker the GSI and unknown numbers are other processes'; without one unknown numbers are the first
//! shard's, which counts them.

use core::net::IpAddr;
use std::sync::Arc;

use roce_bth::Qpn;

use crate::qpn::QpnSlot;

/// Assignment of all numbers of an address to its shards, by their top bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Steering {
    shards: u16,
    bits: u8,
}

impl Steering {
    /// Largest number of shards.
    pub const MAX_SHARDS: usize = 64;

    /// Creates the assignment to 2 to [`MAX_SHARDS`](Self::MAX_SHARDS) shards; `None` for any other number.
    pub fn new(shards: usize) -> Option<Self> {
        if !(2..=Self::MAX_SHARDS).contains(&shards) {
            return None;
        }
        Some(Self {
            shards: shards as u16,
            bits: shards.next_power_of_two().trailing_zeros() as u8,
        })
    }

    /// Returns the number of shards.
    pub const fn shards(self) -> usize {
        self.shards as usize
    }

    /// Returns the number of top bits that name a shard.
    pub const fn bits(self) -> u8 {
        self.bits
    }

    /// Returns the numbers of a shard; `None` if there is no such shard.
    pub const fn slot(self, shard: usize) -> Option<QpnSlot> {
        if shard >= self.shards as usize {
            return None;
        }
        Some(QpnSlot {
            bits: self.bits,
            slot: shard as u16,
        })
    }

    /// Returns the shard that has a queue pair number. The first has QP0, QP1, that of multicast and those of no shard.
    pub const fn of_qpn(self, qpn: Qpn) -> usize {
        if qpn.value() == Qpn::MULTICAST.value() {
            return 0;
        }
        self.of(qpn.value() >> (24 - self.bits as u32))
    }

    /// Returns the shard that has a communication ID or SIDR request ID. The first has those of no shard.
    pub const fn of_comm_id(self, id: u32) -> usize {
        self.of(id >> (32 - self.bits as u32))
    }

    const fn of(self, top: u32) -> usize {
        if top < self.shards as u32 { top as usize } else { 0 }
    }
}

/// Assignment of an address's numbers to the shards of this process.
#[derive(Clone, Debug)]
pub enum Numbers {
    /// The shards have all numbers. Those of none belong to the first.
    All(Steering),
    /// The shards have these places; all other numbers belong to other processes.
    Places(Arc<[QpnSlot]>),
}

impl Numbers {
    /// Returns the number of shards.
    pub fn shards(&self) -> usize {
        match self {
            Self::All(steering) => steering.shards(),
            Self::Places(places) => places.len(),
        }
    }

    /// Returns the shard that has a queue pair number. `None`: another process has it.
    pub fn of_qpn(&self, qpn: Qpn) -> Option<usize> {
        let has = |slot: &QpnSlot| (slot.qpns().first..=slot.qpns().last).contains(&qpn.value());
        match self {
            Self::All(steering) => Some(steering.of_qpn(qpn)),
            Self::Places(places) => places.iter().position(has),
        }
    }

    /// Returns the shard that has a communication ID of ours. Unknown ones go to the first, which counts them.
    pub fn of_comm_id(&self, id: u32) -> usize {
        let has = |slot: &QpnSlot| {
            let (first, last) = slot.comm_ids();
            (first..=last).contains(&id)
        };
        match self {
            Self::All(steering) => steering.of_comm_id(id),
            Self::Places(places) => places.iter().position(has).unwrap_or(0),
        }
    }
}

/// Recipient of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recipient {
    /// The shard that received it.
    This,
    /// A shard of this process; the receiving shard itself, if the packet is for another address of its loop.
    Shard(usize),
    /// The GSI, which the receiving shard has.
    Gsi,
    /// Another process.
    Process,
}

/// Result of forwarding a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Forwarded {
    /// The packet is for the shard that received it after all.
    Back,
    /// A shard of this process, whose socket it should have reached, gets it.
    Shard,
    /// The shard of its connection gets a datagram of the GSI.
    Placed,
    /// Another process gets it.
    Process,
    /// The shard's inbox is full.
    Lost,
    /// Connect request beyond its host's limit.
    Refused,
}

/// Recipients of the packets that reach the socket of one shard.
///
/// The kernel delivers by queue pair number too, but packets of one sender that it has merged go where the first of them goes.
#[derive(Clone, Debug)]
pub struct Recipients {
    numbers: Numbers,
    shard: usize,
    addr: Option<IpAddr>,
}

impl Recipients {
    /// Creates the recipients of a shard's packets. With `addr`, packets to another address are not for the shard.
    pub const fn new(numbers: Numbers, shard: usize, addr: Option<IpAddr>) -> Self {
        Self { numbers, shard, addr }
    }

    /// Returns the numbers of the address.
    pub const fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// Returns the recipient of a packet to a local address. Packets that are too short to name a queue pair stay.
    pub fn of(&self, local: IpAddr, packet: &[u8]) -> Recipient {
        let Some(qpn) = dest_qpn(packet) else {
            return Recipient::This;
        };
        let shard = match (&self.numbers, qpn) {
            (Numbers::All(_), Qpn::GSI) if self.shard == 0 => return Recipient::Gsi,
            // Each process that has joined the group gets a copy.
            (Numbers::Places(_), Qpn::MULTICAST) => Some(self.shard),
            (numbers, qpn) => numbers.of_qpn(qpn),
        };
        let elsewhere = self.addr.is_some_and(|addr| addr != local) && !local.is_multicast();
        match shard {
            None => Recipient::Process,
            Some(shard) if shard == self.shard && !elsewhere => Recipient::This,
            Some(shard) => Recipient::Shard(shard),
        }
    }
}

/// Returns the destination queue pair of a packet, unless it is too short.
pub fn dest_qpn(packet: &[u8]) -> Option<Qpn> {
    let [_, _, _, _, _, a, b, c] = packet.first_chunk()?;
    Some(Qpn::new(u32::from_be_bytes([0, *a, *b, *c])))
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

    const HERE: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(192, 0, 2, 1));

    fn packet(qpn: u32) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
        bytes
    }

    fn places(slots: &[u16]) -> Numbers {
        let slots = slots.iter().map(|slot| QpnSlot { bits: 7, slot: *slot });
        Numbers::Places(slots.collect())
    }

    #[test]
    fn packets_for_other_shards_are_told_by_their_number() {
        use Recipient::{Gsi, Shard, This};
        let numbers = Numbers::All(Steering::new(3).unwrap());
        let shards = [0, 1, 2].map(|shard| Recipients::new(numbers.clone(), shard, None));
        for (qpn, recipients) in [
            (0x00_0002, [This, Shard(0), Shard(0)]),
            (0x7f_ffff, [Shard(1), This, Shard(1)]),
            (0x80_0000, [Shard(2), Shard(2), This]),
            // Nobody's, QP1, multicast.
            (0xc0_0000, [This, Shard(0), Shard(0)]),
            (1, [Gsi, Shard(0), Shard(0)]),
            (0xff_ffff, [This, Shard(0), Shard(0)]),
        ] {
            assert_eq!(
                shards.each_ref().map(|of| of.of(HERE, &packet(qpn))),
                recipients,
                "{qpn:#x}"
            );
        }
        assert_eq!(shards[1].of(HERE, &[0; 7]), This, "too short to be anybody's");
    }

    #[test]
    fn packets_for_other_processes_are_told_by_their_number() {
        use Recipient::{Process, Shard, This};
        let numbers = places(&[3, 9]);
        let [three, nine] = [3, 9].map(|slot| QpnSlot { bits: 7, slot }.qpns());
        let shards = [0, 1].map(|shard| Recipients::new(numbers.clone(), shard, None));
        for (qpn, recipients) in [
            (three.first, [This, Shard(0)]),
            (three.last, [This, Shard(0)]),
            (nine.first, [Shard(1), This]),
            (three.last + 1, [Process; 2]),
            // The broker has the GSI.
            (1, [Process; 2]),
            (0, [Process; 2]),
            (0xff_ffff, [This; 2]),
        ] {
            assert_eq!(
                shards.each_ref().map(|of| of.of(HERE, &packet(qpn))),
                recipients,
                "{qpn:#x}"
            );
        }
    }

    #[test]
    fn packets_for_another_address_are_not_the_shards() {
        let qpn = QpnSlot { bits: 7, slot: 3 }.qpns().first;
        let (own, all) = (
            Recipients::new(places(&[3]), 0, Some(HERE)),
            Recipients::new(places(&[3]), 0, None),
        );
        let there = IpAddr::from([192, 0, 2, 2]);
        let of = |own: &Recipients, local| own.of(local, &packet(qpn));
        assert_eq!(
            [of(&own, HERE), of(&own, there)],
            [Recipient::This, Recipient::Shard(0)]
        );
        assert_eq!(own.of([224, 0, 0, 9].into(), &packet(0xff_ffff)), Recipient::This);
        assert_eq!([of(&all, HERE), of(&all, there)], [Recipient::This; 2]);
    }

    #[test]
    fn communication_ids_name_the_shard() {
        let numbers = places(&[3, 9]);
        for (n, slot) in [3, 9].map(|slot| QpnSlot { bits: 7, slot }).iter().enumerate() {
            let (first, last) = slot.comm_ids();
            assert_eq!([first, last].map(|id| numbers.of_comm_id(id)), [n; 2]);
        }
        assert_eq!(numbers.of_comm_id(0), 0, "it counts unknown ones");
    }

    #[test]
    fn one_shard_is_none() {
        for shards in [0, 1, 65, usize::MAX] {
            assert_eq!(Steering::new(shards), None);
        }
    }
}
