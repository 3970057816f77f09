//! Frames that hold several packets.
//!
//! A capture on a sending host sees UDP GSO sends, and one on a receiving host sees what GRO merged, as one big UDP
//! datagram: packets of one size (the last may be smaller) end to end, under one IP header. The size is not in the
//! frame; it is the one at which the first packet's ICRC is right.

use std::net::SocketAddr;

use roce_bth::{BTH_LEN, ICRC_LEN, MAX_HEADER_LEN};
use roce_icrc::{Flow, Recovery};

/// The longest packet: the largest path MTU with headers, ICRC, and pad.
const MAX_PACKET: usize = 4096 + MAX_HEADER_LEN + ICRC_LEN;
/// Shortest packet.
pub(crate) const MIN_PACKET: usize = BTH_LEN + ICRC_LEN;

/// Finds segment sizes; remembers the last, which the next frame of the same transfer most likely has.
#[derive(Default)]
pub(crate) struct Splitter {
    last: usize,
}

impl Splitter {
    /// Returns the size that was found last.
    pub(crate) const fn last_size(&self) -> usize {
        self.last
    }

    /// The segment size of `payload`, when it begins with a packet whose ICRC is right and has more behind it.
    pub(crate) fn size(
        &mut self,
        src: SocketAddr,
        dst: SocketAddr,
        identification: u16,
        payload: &[u8],
    ) -> Option<usize> {
        let flow = Flow::try_from((src, dst)).ok()?;
        let fits = |size: usize| size < payload.len() && flow.verify(identification, &payload[..size]);
        let longest = MAX_PACKET.min(payload.len().saturating_sub(MIN_PACKET));
        let found = Some(self.last)
            .filter(|&size| size >= MIN_PACKET && fits(size))
            // Packets are whole 4-byte words.
            .or_else(|| (MIN_PACKET..=longest).step_by(4).find(|&size| fits(size)))?;
        self.last = found;
        Some(found)
    }
}

/// Whether a segment's ICRC is right: segment `nth` has the first one's Identification plus `nth` when a sender's kernel
/// or NIC split it, and may have the same when the receiver's merged packets that all had Identification 0.
pub(crate) fn segment_ok(src: SocketAddr, dst: SocketAddr, first: u16, nth: usize, packet: &[u8]) -> bool {
    let Ok(flow) = Flow::try_from((src, dst)) else {
        return false;
    };
    let counted = first.wrapping_add(nth as u16);
    match flow.recover(packet, counted) {
        Recovery::Exact(id) => id == counted || id == first,
        Recovery::Corrupt => false,
    }
}
