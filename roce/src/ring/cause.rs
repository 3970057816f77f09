//! Occasions to write a ring.

use std::fmt::{self, Display, Formatter};

/// Cause of writing a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// Another process asked for it.
    Request,
    /// A signal came.
    Signal,
    /// A queue pair failed.
    QueuePair,
    /// A packet with a wrong ICRC came.
    Icrc,
    /// A path of a session failed.
    Path,
}

impl Cause {
    /// Causes that are trouble.
    pub(super) const BAD: [Self; 3] = [Self::QueuePair, Self::Path, Self::Icrc];

    pub(super) fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl Display for Cause {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Request => "on request",
            Self::Signal => "on a signal",
            Self::QueuePair => "a queue pair failed",
            Self::Icrc => "a packet with a wrong ICRC came",
            Self::Path => "a path failed",
        })
    }
}
