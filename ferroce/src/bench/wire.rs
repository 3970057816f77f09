//! Messages between the two sides, in the private data of the connection manager.

use roce::{RKey, RemoteAddr};

use super::Operation;

const MAGIC: [u8; 4] = *b"fBn2";

/// Receives that the passive side posts at the start for SENDs that are `depth` outstanding.
pub(crate) fn receives(depth: u32) -> u32 {
    depth.max(8) * 2
}

/// Returns the address offset in the active side's memory at which a [`Role::Sink`] writes how many receives it has posted so far (64 bits,
/// little-endian): behind the message. No more are sent than that: a receiver that finds no time for a moment would refuse them all, and
/// the measurement would be of the retransmission of refused messages.
pub(crate) fn credit_at(bytes: u32) -> usize {
    (bytes as usize).next_multiple_of(size_of::<u64>())
}

/// Role of the passive side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Memory that is written.
    Target,
    /// Memory that is read.
    Source,
    /// Receives and posts receives, and reports their number.
    Sink,
    /// Answers every WRITE with a WRITE.
    WriteEcho,
    /// Answers every SEND with a SEND.
    SendEcho,
    /// Sleeps until completion events, and answers every WRITE with immediate data with another.
    SleepingWriteEcho,
    /// Sleeps until completion events, and answers every SEND with a SEND.
    SleepingSendEcho,
}

impl Role {
    const ALL: [Self; 7] = [
        Self::Target,
        Self::Source,
        Self::Sink,
        Self::WriteEcho,
        Self::SendEcho,
        Self::SleepingWriteEcho,
        Self::SleepingSendEcho,
    ];

    /// Returns whether its thread sleeps until completion events.
    pub(crate) fn sleeps(self) -> bool {
        matches!(self, Self::SleepingWriteEcho | Self::SleepingSendEcho)
    }

    /// Returns whether there are completions to poll for, or memory to look at.
    pub(crate) fn completes(self) -> bool {
        !matches!(self, Self::Target | Self::Source)
    }

    /// Returns whether it takes messages that consume receives.
    pub(crate) fn receives(self) -> bool {
        self.sleeps() || matches!(self, Self::Sink | Self::SendEcho)
    }

    /// Returns the counterpart of a bandwidth measurement.
    pub(crate) fn of(operation: Operation) -> Self {
        match operation {
            Operation::Read => Self::Source,
            Operation::Send => Self::Sink,
            Operation::Write | Operation::Latency | Operation::Rtrs | Operation::Ceiling => Self::Target,
        }
    }
}

/// Private data of the connect request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) role: Role,
    pub(crate) bytes: u32,
    pub(crate) depth: u32,
    /// Memory of the active side that the roles with answers write to ([`Role::WriteEcho`], [`Role::SleepingWriteEcho`], [`Role::Sink`]).
    pub(crate) memory: RemoteAddr,
}

impl Hello {
    pub(crate) fn emit(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend((self.role as u32).to_be_bytes());
        out.extend(self.bytes.to_be_bytes());
        out.extend(self.depth.to_be_bytes());
        out.extend(emit_memory(self.memory));
        out
    }

    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        let rest = data.strip_prefix(&MAGIC)?;
        Some(Self {
            role: *Role::ALL.get(usize::try_from(be32(rest, 0)?).ok()?)?,
            bytes: be32(rest, 4)?,
            depth: be32(rest, 8)?,
            memory: parse_memory(rest.get(12..)?)?,
        })
    }
}

/// Returns the private data of the accept: the passive side's memory.
pub(crate) fn emit_memory(memory: RemoteAddr) -> Vec<u8> {
    let mut out = memory.addr.to_be_bytes().to_vec();
    out.extend(memory.rkey.0.to_be_bytes());
    out
}

pub(crate) fn parse_memory(data: &[u8]) -> Option<RemoteAddr> {
    Some(RemoteAddr {
        addr: u64::from_be_bytes(*data.first_chunk()?),
        rkey: RKey(be32(data, 8)?),
    })
}

fn be32(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*data.get(at..)?.first_chunk()?))
}

/// Returns the mark of a round in the last byte of a message, below [`ANSWER`].
pub(crate) fn round_mark(round: u64) -> u8 {
    (round % 127) as u8 + 1
}

/// Bit in the marks of answers: each side's memory holds what it sent last, which must not look like a message.
pub(crate) const ANSWER: u8 = 0x80;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_reads_back_and_other_bytes_are_refused() {
        let hello = Hello {
            role: Role::WriteEcho,
            bytes: 64,
            depth: 3,
            memory: RemoteAddr {
                addr: 0x1122_3344_5566_7788,
                rkey: RKey(0x99aa_bbcc),
            },
        };
        let mut bytes = hello.emit();
        assert!(bytes.len() <= 56);
        assert_eq!(Hello::parse(&bytes), Some(hello));
        assert_eq!(Hello::parse(&bytes[..bytes.len() - 1]), None);
        bytes[7] = 99;
        assert_eq!(Hello::parse(&bytes), None);
        assert_eq!(Hello::parse(&[]), None);
    }
}
