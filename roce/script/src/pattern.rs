//! Bytes that scripts are about: different in each packet and at each offset, so that misplaced ones are seen.

/// Returns the byte at an offset of the payload that the script sends with a PSN.
pub(crate) const fn of_psn(psn: u32, offset: usize) -> u8 {
    mix(psn ^ 0x0100_0000, offset as u32)
}

/// Returns the byte that a region has at an offset in the beginning: that of `fill` with [`seed`] in the agent's protocol
/// (tests/interop/README.md).
pub(crate) const fn of_region(region: usize, offset: u64) -> u8 {
    let mut x = seed(region)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(offset / 8);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)).to_le_bytes()[(offset % 8) as usize]
}

/// Returns the seed of a region's bytes.
pub(crate) const fn seed(region: usize) -> u64 {
    region as u64 + 1
}

const fn mix(stream: u32, offset: u32) -> u8 {
    let mixed = (stream.wrapping_mul(0x9e37_79b1) ^ offset).wrapping_mul(0x85eb_ca6b);
    (mixed ^ mixed >> 15).to_be_bytes()[1]
}
