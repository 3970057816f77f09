//! Lengths.

/// Bytes of data in a fragment at most (`RDS_FRAG_SIZE`).
pub const MAX_FRAGMENT: usize = 4096;
/// Bytes of the longest message (`RDS_MAX_MSG_SIZE`). The kernel refuses longer ones from its programs.
pub const MAX_MESSAGE: u32 = 1 << 20;
/// Bytes of a congestion map: 65,536 bits.
pub const BITMAP_LEN: usize = 8192;
/// SENDs that carry a congestion map.
pub const BITMAP_FRAGMENTS: u32 = (BITMAP_LEN / MAX_FRAGMENT) as u32;
