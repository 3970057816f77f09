//! ACK extended transport header (IBTA 9.7.5.2).

use core::{fmt, time::Duration};

use crate::{
    psn::Msn,
    wire::{Wire, header, wire},
};

/// Reason why a responder refuses a request (IBTA table 47).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum NakCode {
    /// A gap in the PSNs.
    PsnSequenceError = 0,
    /// A malformed or unsupported request, or one that does not fit the receive buffer.
    InvalidRequest = 1,
    /// A bad rkey, range or permission.
    RemoteAccessError = 2,
    /// The responder failed locally.
    RemoteOperationalError = 3,
    /// Reliable datagram only.
    InvalidRdRequest = 4,
}

impl NakCode {
    /// Reads a code; `None` for reserved values.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        Some(match bits {
            0 => Self::PsnSequenceError,
            1 => Self::InvalidRequest,
            2 => Self::RemoteAccessError,
            3 => Self::RemoteOperationalError,
            4 => Self::InvalidRdRequest,
            _ => return None,
        })
    }
}

impl fmt::Display for NakCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PsnSequenceError => "PSN sequence error",
            Self::InvalidRequest => "invalid request",
            Self::RemoteAccessError => "remote access error",
            Self::RemoteOperationalError => "remote operational error",
            Self::InvalidRdRequest => "invalid RD request",
        })
    }
}

/// The 5-bit RNR NAK timer code (IBTA table 46): 0 is the longest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct RnrTimer(u8);

/// Waiting times by code, in units of 10 microseconds.
const RNR_TENS_OF_US: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

impl RnrTimer {
    /// The code's low five bits.
    pub const fn new(code: u8) -> Self {
        Self(code & 0x1f)
    }

    /// The code, below 32.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns the least time that the requester waits.
    pub const fn duration(self) -> Duration {
        Duration::from_micros(RNR_TENS_OF_US[self.0 as usize] as u64 * 10)
    }
}

/// End-to-end credits of an ACK: a 5-bit code (IBTA table 45). 31 means that credits are not in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Credits(u8);

impl Credits {
    /// The responder does not count credits.
    pub const INVALID: Self = Self(0x1f);

    /// The code's low five bits.
    pub const fn new(code: u8) -> Self {
        Self(code & 0x1f)
    }

    /// The code, below 32.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The number of receive work requests that the code stands for, or `None` when credits are not in use.
    pub const fn count(self) -> Option<u32> {
        // Codes go 0, 1, 2, 3, 4, 6, 8, 12, 16 …: a power of two, then one and a half times it.
        match self.0 {
            31 => None,
            c @ 0..=2 => Some(c as u32),
            c if c % 2 == 1 => Some(3 << ((c - 3) / 2)),
            c => Some(1 << (c / 2)),
        }
    }
}

/// Meaning of an AETH.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Syndrome {
    /// All requests up to the packet's PSN are done.
    Ack(Credits),
    /// No receive work request was posted: retry after this time.
    Rnr(RnrTimer),
    /// The request at the packet's PSN was refused.
    Nak(NakCode),
    /// A reserved code point, kept as it came.
    Reserved(u8),
}

impl Syndrome {
    /// Reads the syndrome byte.
    pub const fn from_byte(byte: u8) -> Self {
        let low = byte & 0x1f;
        match byte >> 5 {
            0 => Self::Ack(Credits(low)),
            1 => Self::Rnr(RnrTimer(low)),
            3 => match NakCode::from_bits(low) {
                Some(code) => Self::Nak(code),
                None => Self::Reserved(byte),
            },
            _ => Self::Reserved(byte),
        }
    }

    /// The syndrome byte.
    pub const fn to_byte(self) -> u8 {
        match self {
            Self::Ack(credits) => credits.0,
            Self::Rnr(timer) => 0x20 | timer.0,
            Self::Nak(code) => 0x60 | code as u8,
            Self::Reserved(byte) => byte,
        }
    }
}

impl fmt::Display for Syndrome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ack(credits) => match credits.count() {
                Some(count) => write!(f, "ack, {count} credits"),
                None => f.write_str("ack"),
            },
            Self::Rnr(timer) => write!(f, "rnr-nak, wait {:?}", timer.duration()),
            Self::Nak(code) => write!(f, "nak, {code}"),
            Self::Reserved(byte) => write!(f, "reserved syndrome {byte:#04x}"),
        }
    }
}

wire! {
    Syndrome = u8[1]: Self::from_byte, Self::to_byte;
}

header! {
    /// ACK extended transport header: 4 bytes.
    Aeth[4] {
        /// Acknowledgement, RNR NAK or NAK.
        syndrome: Syndrome[1],
        /// Messages that the responder has completed.
        msn: Msn[3],
    }
}
