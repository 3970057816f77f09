//! Numbers that several messages share.

use core::ops::Range;

/// TCP port space number of o2iblnd.
pub const PORT: u16 = 987;
/// Magic number (`IBLND_MSG_MAGIC`).
pub const MAGIC: u32 = 0x0be9_1b91;
/// Version 1, of Lustre 1.6 and 1.8.
pub const VERSION_1: u16 = 0x11;
/// Version 2.
pub const VERSION_2: u16 = 0x12;
/// Bytes before the body of a message.
pub const HEAD_LEN: usize = 48;
/// Bytes of a message at most.
pub const MAX_MSG: usize = 4096;
/// Bytes of the checksum field.
pub(crate) const CHECKSUM_AT: Range<usize> = 12..16;
