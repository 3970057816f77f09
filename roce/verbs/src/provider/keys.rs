//! Remote keys that are granted and taken back.

use roce_bth::RKey;

use super::ids::MrId;
use crate::attr::AccessFlags;

/// Object that a key belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KeyKind {
    /// A fast registration.
    FastRegistration,
    /// A type 1 window.
    Window1,
    /// A type 2 window.
    Window2,
}

/// Memory that a key shall open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrantOf {
    /// The registration.
    pub mr: MrId,
    /// First byte within it.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// The address that the peer uses for the first byte; `None`: the registration's own.
    pub iova: Option<u64>,
    /// The rights.
    pub access: AccessFlags,
}

/// A key that was granted. What of it a renewal can change is random and never what it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Granted {
    /// The key is valid already.
    Now(RKey),
    /// A work request was posted; it holds for what is posted behind it.
    Queued(RKey),
}

impl Granted {
    /// The key.
    pub const fn rkey(self) -> RKey {
        match self {
            Self::Now(key) | Self::Queued(key) => key,
        }
    }
}

/// A key that is taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Revoked {
    /// The peer can't use it any more.
    Now,
    /// A work request was posted; with its completion the peer can't.
    Queued,
}
