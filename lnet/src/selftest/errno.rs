//! Error numbers of Linux in replies.

pub(super) const NO_ENTRY: u32 = 2;
/// ESRCH.
pub(super) const NO_SESSION: u32 = 3;
pub(super) const NO_MEMORY: u32 = 12;
pub(super) const BUSY: u32 = 16;
pub(super) const INVALID: u32 = 22;
/// EPROTO.
pub(super) const PROTOCOL: u32 = 71;
/// EBADMSG.
pub(super) const BAD_MESSAGE: u32 = 74;
