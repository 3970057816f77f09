//! Layout of packets, and the state that every ICRC begins with.

/// Bytes of the ICRC.
pub const ICRC_LEN: usize = 4;

pub(crate) const IPV4_LEN: usize = 20;
pub(crate) const IPV6_LEN: usize = 40;
pub(crate) const UDP_LEN: usize = 8;
/// Bytes of the base transport header.
pub(crate) const BTH_LEN: usize = 12;
/// Index in the BTH of the byte with FECN, BECN and reserved bits, which switches may change.
pub(crate) const BTH_MASKED: usize = 4;
/// The CRC-32 of the eight bytes of ones that stand for an InfiniBand link header.
const CRC_OF_LINK_HEADER: u32 = 0x2144_df1c;

/// Returns a hasher that has processed the eight bytes of ones.
pub(crate) fn start() -> crc32fast::Hasher {
    crc32fast::Hasher::new_with_initial(CRC_OF_LINK_HEADER)
}

/// Returns the packet without its ICRC, and its ICRC. `None` when it is too short to hold a BTH and an ICRC.
pub(crate) fn split(packet: &[u8]) -> Option<(&[u8], u32)> {
    let (body, icrc) = packet.split_last_chunk::<ICRC_LEN>()?;
    (body.len() >= BTH_LEN).then_some((body, u32::from_le_bytes(*icrc)))
}
