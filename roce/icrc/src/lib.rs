//! The invariant CRC of RoCEv2 (IBTA volume 1, 7.8.1 and A17.9.4): a CRC-32 over the IP datagram with the fields that
//! may change on the way taken as ones, eight bytes of ones in front, stored in the last four bytes of the UDP payload.
//!
//! A UDP socket neither sets nor sees the IPv4 Identification, which the CRC covers. [`Flow::recover`] finds it: CRC-32
//! is linear, so the difference between the ICRC that came and the one computed with a guess is a linear image of the
//! 16 unknown bits. A corrupt packet has a difference with no such preimage, except one in 2^16.
//!
//! It knows addresses, ports and bytes, but no opcode and no peer: `roce-port` remembers which Identifications a peer uses.
//! "Packet" means the UDP payload throughout: BTH, extended headers, payload, pad, ICRC. ICRC values are `u32`s whose
//! *little-endian* bytes stand on the wire. Peer bytes of any length are safe to pass: a packet that is too short is not valid.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod datagram;
mod flow;
mod gf2;
mod layout;
mod prefix;
mod solver;

pub use datagram::{Checked, check_datagram};
pub use flow::{Flow, IpPair, MixedFamilies, Recovery};
pub use layout::ICRC_LEN;
pub use prefix::IcrcPrefix;
pub use solver::IdSolver;
