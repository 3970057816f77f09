//! Kinds of packets.

use roce_bth::{NakCode, Opcode};

/// Kind of a packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// By its opcode.
    Opcode(Opcode),
    /// Acknowledgement.
    Ack,
    /// NAK with a code.
    Nak(NakCode),
    /// RNR NAK.
    Rnr,
    /// Code that may be undefined.
    Code(u8),
    /// The UDP payload without ICRC.
    Raw(Vec<u8>),
    /// Any packet.
    Any,
}

impl Kind {
    /// Returns the opcode. `None`: none, or any.
    pub(crate) const fn opcode(&self) -> Option<Opcode> {
        match self {
            Self::Opcode(opcode) => Some(*opcode),
            Self::Ack | Self::Nak(_) | Self::Rnr => Some(Opcode::RcAcknowledge),
            Self::Code(_) | Self::Raw(_) | Self::Any => None,
        }
    }
}
