//! Bytes that scripts are about: different in each packet and at each offset, so that misplaced ones are seen.

/// Returns the byte at an offset of the payload that the script sends with a PSN.
pub(crate) const fn of_psn(psn: u32, offset: usize) -> u8 {
    mix(psn ^ 0x0100_0000, offset as u32)
}

/// Returns the byte that a region has at an offset in the beginning.
pub(crate) const fn of_region(region: usize, offset: u64) -> u8 {
    mix(region as u32 ^ 0x0200_0000, offset as u32)
}

const fn mix(stream: u32, offset: u32) -> u8 {
    let mixed = (stream.wrapping_mul(0x9e37_79b1) ^ offset).wrapping_mul(0x85eb_ca6b);
    (mixed ^ mixed >> 15).to_be_bytes()[1]
}
