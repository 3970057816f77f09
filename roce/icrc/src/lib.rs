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
mod prefix;
mod solver;

pub use datagram::{Checked, check_datagram};
pub use flow::{Flow, IpPair, MixedFamilies, Recovery};
pub use prefix::IcrcPrefix;
pub use solver::IdSolver;

/// Bytes of the ICRC.
pub const ICRC_LEN: usize = 4;

const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;
/// Bytes of the base transport header.
const BTH_LEN: usize = 12;
/// Index in the BTH of the byte with FECN, BECN and reserved bits, which switches may change.
const BTH_MASKED: usize = 4;
/// The CRC-32 of the eight bytes of ones that stand for an InfiniBand link header.
const CRC_OF_LINK_HEADER: u32 = 0x2144_df1c;

/// Returns a hasher that has processed the eight bytes of ones.
fn start() -> crc32fast::Hasher {
    crc32fast::Hasher::new_with_initial(CRC_OF_LINK_HEADER)
}

/// Returns the packet without its ICRC, and its ICRC. `None` when it is too short to hold a BTH and an ICRC.
fn split(packet: &[u8]) -> Option<(&[u8], u32)> {
    let (body, icrc) = packet.split_last_chunk::<ICRC_LEN>()?;
    (body.len() >= BTH_LEN).then_some((body, u32::from_le_bytes(*icrc)))
}
