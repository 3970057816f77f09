//! The marks of work requests.

/// Purpose of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MarkKind {
    /// A receive; the index is its buffer.
    Recv,
    /// A send that only accounts for slots (or failed).
    Send,
    /// The end of a key; the index is the chunk or request.
    Revoke,
    /// The receive of a message with session information.
    Info,
}

impl MarkKind {
    /// For the report of a failure.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Recv => "receive",
            Self::Send => "send",
            Self::Revoke => "key revocation",
            Self::Info => "receive of session information",
        }
    }
}

/// Content of `wr_id`. The connection is known by the queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Mark {
    /// Purpose.
    pub kind: MarkKind,
    /// Number within its kind.
    pub index: u32,
}

impl Mark {
    /// A mark.
    pub const fn new(kind: MarkKind, index: u32) -> Self {
        Self { kind, index }
    }

    /// As `wr_id`.
    pub const fn encode(self) -> u64 {
        let kind: u64 = match self.kind {
            MarkKind::Recv => 1,
            MarkKind::Send => 2,
            MarkKind::Revoke => 3,
            MarkKind::Info => 4,
        };
        kind << 32 | self.index as u64
    }

    /// Out of a `wr_id`; `None` of one that is not ours.
    pub const fn decode(wr_id: u64) -> Option<Self> {
        let kind = match wr_id >> 32 {
            1 => MarkKind::Recv,
            2 => MarkKind::Send,
            3 => MarkKind::Revoke,
            4 => MarkKind::Info,
            _ => return None,
        };
        Some(Self::new(kind, wr_id as u32))
    }

    /// Name of a completed work request, for the report of a failure.
    pub fn what(wr_id: u64) -> &'static str {
        Self::decode(wr_id).map_or("work request", |mark| mark.kind.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_back_and_others_are_told_apart() {
        for kind in [MarkKind::Recv, MarkKind::Send, MarkKind::Revoke, MarkKind::Info] {
            let mark = Mark::new(kind, u32::MAX);
            assert_eq!(Mark::decode(mark.encode()), Some(mark));
        }
        for foreign in [0, 5 << 32, u64::MAX] {
            assert_eq!(Mark::decode(foreign), None);
        }
    }
}
