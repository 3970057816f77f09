//! Interfaces of a capture.

use crate::link::LinkType;

/// Longest name of an interface that is kept, bytes; Linux has 15.
pub(crate) const MAX_NAME: usize = 255;

/// Interface that a capture's frames were taken at, as the file describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    pub(crate) link: LinkType,
    pub(crate) number: u16,
    pub(crate) snaplen: u32,
    pub(crate) name: Option<String>,
    /// Resolution of its time stamps, the exponent of `if_tsresol`: negative power of 10, or of 2 with the top bit set.
    pub(crate) resolution: u8,
    pub(crate) offset_secs: u64,
    /// Dropped frames of the last statistics.
    pub(crate) stated_drops: Option<u64>,
    /// Dropped frames that frames count before themselves, added up.
    pub(crate) counted_drops: Option<u64>,
}

impl Interface {
    /// An interface whose time stamps are in microseconds.
    pub(crate) const fn new(number: u16, snaplen: u32) -> Self {
        Self {
            link: LinkType::from_number(number as u32),
            number,
            snaplen,
            name: None,
            resolution: 6,
            offset_secs: 0,
            stated_drops: None,
            counted_drops: None,
        }
    }

    /// Creates an interface of this host, for frames that are captured now. `number` is one of
    /// <https://www.tcpdump.org/linktypes.html>.
    pub fn live(number: u16, name: impl Into<String>) -> Self {
        Self {
            name: Some(name.into()),
            ..Self::new(number, 0)
        }
    }

    /// First header of its frames.
    pub const fn link(&self) -> LinkType {
        self.link
    }

    /// Number of the link type in the file; several have the same headers.
    pub const fn link_number(&self) -> u16 {
        self.number
    }

    /// Bytes of a frame that are captured at most; 0 is no limit.
    pub const fn snaplen(&self) -> u32 {
        self.snaplen
    }

    /// Name on the capturing host.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Frames that the capture states to have dropped, up to the last frame or statistics that were read.
    pub fn dropped(&self) -> Option<u64> {
        self.stated_drops.max(self.counted_drops)
    }

    pub(crate) fn time_ns(&self, ticks: u64) -> u64 {
        const NANOS: u128 = 1_000_000_000;
        let exponent = u32::from(self.resolution & 0x7f);
        let scaled = u128::from(ticks) * NANOS;
        let ns = if self.resolution & 0x80 != 0 {
            scaled.checked_shr(exponent).unwrap_or(0)
        } else {
            10u128.checked_pow(exponent).map_or(0, |unit| scaled / unit)
        };
        // The offset is signed on paper and stored in 64 bits: additions modulo 2^64 do for both.
        let offset = self.offset_secs.wrapping_mul(1_000_000_000);
        u64::try_from(ns).unwrap_or(u64::MAX).wrapping_add(offset)
    }
}

/// The sum of two numbers of which either may be unknown.
pub(crate) fn sum(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.saturating_add(b)),
        (a, b) => a.or(b),
    }
}
