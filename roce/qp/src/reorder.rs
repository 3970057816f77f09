//! Reorder buffer: holds request packets beyond a gap until the gap closes.
//!
//! Accepts packets from the peer's UDP source port only ([`Origin`](crate::Origin)). Even a forger that knows the port
//! can't replace the peer's packet: if two copies differ, neither is executed and the peer has to resend the packet.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use bitvec::{order::Lsb0, vec::BitVec};
use roce_bth::{Bth, Class, HeaderView, Packet};

use crate::{sendq::packets_for, seq::Seq};

/// Largest payload buffered per queue pair, bytes beyond the oldest gap.
const BYTES: usize = 16 << 20;
/// Largest number of packets beyond the oldest gap; each has a bit in a selective ACK.
pub(crate) const PACKETS: u64 = 4096;
/// Initial reach beyond the newest buffered packet, PSNs. It grows with what the peer had outstanding.
const INITIAL_REACH: u64 = 64;
/// Memory of a buffered packet besides its payload, bytes.
const OVERHEAD: usize = 256;
/// Bits in a word of the bitmap.
pub(crate) const WORD: u64 = 64;
/// Memory for the buffered packets of all queue pairs in a process, bytes.
const PROCESS_BYTES: usize = 256 << 20;

/// Returns the largest window, PSNs beyond the oldest gap. A selective ACK peer sends nothing beyond it.
pub(crate) fn max_window(mtu: usize) -> u64 {
    ((BYTES / mtu) as u64).min(PACKETS)
}

/// Memory limit for buffered packets, shared by queue pairs.
#[derive(Debug)]
pub struct ReorderBudget {
    max: usize,
    used: AtomicUsize,
}

impl Default for ReorderBudget {
    fn default() -> Self {
        Self {
            max: PROCESS_BYTES,
            used: AtomicUsize::new(0),
        }
    }
}

impl ReorderBudget {
    /// Returns this process's budget. All loops share it, so a client of several loops gets no more.
    pub fn of_process() -> Arc<Self> {
        static BUDGET: LazyLock<Arc<ReorderBudget>> = LazyLock::new(Arc::default);
        BUDGET.clone()
    }

    /// Returns the bytes in use.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let before = self.used.fetch_add(bytes, Relaxed);
        let fits = before + bytes <= self.max;
        if !fits {
            self.release(bytes);
        }
        fits
    }

    fn release(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Relaxed);
    }
}

/// Owned copy of a packet.
#[derive(Debug)]
pub(crate) struct BufferedPacket {
    bth: Bth,
    /// Length of the headers, bytes.
    head: usize,
    /// Headers and payload.
    bytes: Box<[u8]>,
}

impl BufferedPacket {
    pub(crate) fn of(packet: &Packet<'_>) -> Self {
        let head = packet.header.bytes();
        Self {
            bth: packet.header.bth,
            head: head.len(),
            bytes: [head, packet.payload].concat().into(),
        }
    }

    pub(crate) fn packet(&self) -> Packet<'_> {
        let (head, payload) = self.bytes.split_at(self.head);
        Packet {
            header: HeaderView::new(self.bth, head),
            payload,
        }
    }

    fn bytes(&self) -> usize {
        self.bytes.len() - self.head + OVERHEAD
    }

    /// Returns whether a copy has the same effect.
    ///
    /// Flags and the length of a READ may differ: a retransmission requests an acknowledgement, or the rest of a READ.
    fn is_same(&self, other: &Packet<'_>) -> bool {
        let own = self.packet();
        let (a, b) = (own.header, other.header);
        let is_read = a.bth.opcode.info().class == Class::ReadRequest;
        let place = |h: HeaderView<'_>| h.reth().map(|r| (r.va, r.rkey, if is_read { 0 } else { r.dma_len }));
        let rest = |h: HeaderView<'_>| (h.imm(), h.ieth(), h.atomic_eth(), h.xrceth(), h.feth());
        a.bth.opcode == b.bth.opcode && place(a) == place(b) && rest(a) == rest(b) && own.payload == other.payload
    }
}

/// Slot of a PSN beyond the gap.
#[derive(Debug)]
enum Slot {
    Packet(BufferedPacket),
    /// Two copies differ: one of them is forged.
    Conflict,
}

impl Slot {
    fn bytes(&self) -> usize {
        match self {
            Self::Packet(packet) => packet.bytes(),
            Self::Conflict => 0,
        }
    }
}

/// Packets beyond the gap of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct ReorderBuffer {
    slots: BTreeMap<Seq, Slot>,
    /// Bitmap of arrived PSNs from `base` on. Bits before the oldest gap may be clear.
    arrived: BitVec<u64, Lsb0>,
    /// First PSN of the bitmap, a multiple of [`WORD`].
    base: Option<Seq>,
    /// Largest number of PSNs that the peer is known to have had outstanding.
    outstanding: u64,
    budget: Arc<ReorderBudget>,
}

impl ReorderBuffer {
    pub(crate) fn new(budget: Arc<ReorderBudget>) -> Self {
        let mut buffer = Self::default();
        buffer.budget = budget;
        buffer
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Records how many PSNs the peer had outstanding, all executed by now.
    pub(crate) fn note_outstanding(&mut self, psns: u64) {
        self.outstanding = self.outstanding.max(psns);
    }

    /// Returns the end of the accepted PSNs: no further ahead than the peer ever had outstanding.
    fn limit(&self, expected: Seq, mtu: usize) -> Seq {
        let newest = self.slots.last_key_value().map_or(expected, |(seq, _)| *seq);
        let reach = self.outstanding.max(INITIAL_REACH);
        newest.max(expected).plus(reach).min(expected.plus(max_window(mtu)))
    }

    /// Buffers a packet at `seq` while `expected` is missing.
    ///
    /// Returns false if it drops the packet: too far ahead, out of memory, or different from another copy.
    pub(crate) fn insert(&mut self, expected: Seq, seq: Seq, packet: &Packet<'_>, mtu: usize) -> bool {
        if seq >= self.limit(expected, mtu) || packet.payload.len() > mtu {
            return false;
        }
        match self.slots.get(&seq) {
            None => {}
            Some(Slot::Packet(copy)) if copy.is_same(packet) => return true,
            Some(Slot::Packet(_)) => {
                self.reject_copies(seq, mtu);
                return false;
            }
            Some(Slot::Conflict) => return false,
        }
        let buffered = BufferedPacket::of(packet);
        if !self.budget.take(buffered.bytes()) {
            return false;
        }
        self.slots.insert(seq, Slot::Packet(buffered));
        self.base.get_or_insert_with(|| expected.round_down(WORD));
        self.mark(seq, packet, mtu, true);
        true
    }

    /// Drops a packet after a different copy arrived, and marks it as missing.
    fn reject_copies(&mut self, seq: Seq, mtu: usize) {
        if let Some(Slot::Packet(copy)) = self.slots.insert(seq, Slot::Conflict) {
            self.budget.release(copy.bytes());
            self.mark(seq, &copy.packet(), mtu, false);
        }
    }

    /// Sets or clears the bits of a packet's PSNs.
    fn mark(&mut self, seq: Seq, packet: &Packet<'_>, mtu: usize, arrived: bool) {
        let Some(base) = self.base else { return };
        let count = match (packet.header.bth.opcode.info().class, packet.header.reth()) {
            (Class::ReadRequest, Some(reth)) => u64::from(packets_for(reth.dma_len, mtu)),
            _ => 1,
        };
        let from = seq.since(base) as usize;
        // The PSNs of a READ may exceed the bitmap; the peer has no requests there.
        let to = (seq.since(base) + count).min(PACKETS + 2 * WORD) as usize;
        if self.arrived.len() < to {
            self.arrived.resize(to.next_multiple_of(WORD as usize), false);
        }
        if from < to {
            self.arrived[from..to].fill(arrived);
        }
    }

    /// Removes and returns the expected packet.
    pub(crate) fn take(&mut self, expected: Seq) -> Option<BufferedPacket> {
        // Earlier packets were executed from copies that arrived in order.
        while let Some(first) = self.slots.first_entry()
            && *first.key() < expected
        {
            self.budget.release(first.remove().bytes());
        }
        let slot = self.slots.remove(&expected)?;
        self.budget.release(slot.bytes());
        match slot {
            Slot::Packet(packet) => Some(packet),
            Slot::Conflict => None,
        }
    }

    /// Buffers a taken packet again that can't be executed yet.
    pub(crate) fn put_back(&mut self, seq: Seq, packet: BufferedPacket) {
        if self.budget.take(packet.bytes()) {
            self.slots.insert(seq, Slot::Packet(packet));
        }
    }

    /// Removes the bits of executed packets, those before `expected`.
    pub(crate) fn advance(&mut self, expected: Seq) {
        if self.slots.is_empty() {
            self.clear_bitmap();
            return;
        }
        let Some(base) = self.base else { return };
        let to = expected.round_down(WORD);
        let bits = (to.since(base) as usize).min(self.arrived.len());
        if bits > 0 {
            self.arrived.drain(..bits);
            self.base = Some(to);
        }
    }

    fn clear_bitmap(&mut self) {
        self.base = None;
        self.arrived = BitVec::new();
    }

    pub(crate) fn clear(&mut self) {
        let bytes = self.slots.values().map(Slot::bytes).sum();
        self.budget.release(bytes);
        self.slots.clear();
        self.clear_bitmap();
    }

    /// Returns the bitmap's first PSN and at most `room` bytes, lowest PSN first.
    pub(crate) fn bitmap(&self, room: usize) -> Option<(Seq, &[u64])> {
        let words = self.arrived.as_raw_slice();
        let most = ((PACKETS / WORD) as usize + 1).min(room / size_of::<u64>());
        Some((self.base?, &words[..words.len().min(most)]))
    }
}

impl Drop for ReorderBuffer {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use roce_bth::{Header, MAX_HEADER_LEN, Opcode, Psn, Qpn, Reth};

    use super::*;

    fn at(n: u64) -> Seq {
        Seq::start(Psn::new(0x00ff_ff00)).plus(n)
    }

    fn insert_filled(buffer: &mut ReorderBuffer, expected: u64, seq: u64, len: usize, fill: u8) -> bool {
        let header = Header::new(Bth::new(Opcode::RcWriteMiddle, Qpn::new(5), Psn::new(0)));
        let (payload, mut head) = (vec![fill; len], [0; MAX_HEADER_LEN]);
        let packet = Packet {
            header: header.view(&mut head),
            payload: &payload,
        };
        buffer.insert(at(expected), at(seq), &packet, 1024)
    }

    fn insert(buffer: &mut ReorderBuffer, expected: u64, seq: u64, len: usize) -> bool {
        insert_filled(buffer, expected, seq, len, 7)
    }

    /// Creates a buffer whose peer has had a full window outstanding.
    fn wide(budget: &Arc<ReorderBudget>) -> ReorderBuffer {
        let mut buffer = ReorderBuffer::new(budget.clone());
        buffer.note_outstanding(PACKETS);
        buffer
    }

    /// Returns the PSNs from `from` on that the bitmap reports.
    fn arrived(buffer: &ReorderBuffer, from: u64) -> Vec<u64> {
        let Some((base, words)) = buffer.bitmap(4096) else {
            return Vec::new();
        };
        let set = |n: &u64| {
            let bit = at(*n).since(base);
            words.get((bit / 64) as usize).is_some_and(|w| w >> (bit % 64) & 1 == 1)
        };
        (from..from + PACKETS).filter(set).collect()
    }

    #[test]
    fn packets_come_out_when_they_are_expected() {
        let budget = Arc::new(ReorderBudget::default());
        let mut buffer = wide(&budget);
        for seq in [2, 5, 3, 200] {
            assert!(insert(&mut buffer, 1, seq, 1024));
        }
        assert_eq!(arrived(&buffer, 1), [2, 3, 5, 200]);
        assert_eq!(budget.used(), 4 * (1024 + OVERHEAD));
        assert!(buffer.take(at(1)).is_none());
        for seq in [2, 3] {
            assert_eq!(buffer.take(at(seq)).expect("buffered").packet().payload, [7; 1024]);
        }
        buffer.advance(at(4));
        assert_eq!(arrived(&buffer, 4), [5, 200]);
        // 4 to 150 arrive in order, 5 among them.
        assert!(buffer.take(at(151)).is_none());
        buffer.advance(at(151));
        assert_eq!(arrived(&buffer, 151), [200]);
        assert!(buffer.take(at(200)).is_some());
        buffer.advance(at(201));
        assert!(buffer.is_empty() && buffer.bitmap(4096).is_none());
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn no_more_is_buffered_than_there_is_room_for() {
        let budget = Arc::new(ReorderBudget {
            max: 3 * (1024 + OVERHEAD),
            ..ReorderBudget::default()
        });
        let [mut a, mut b] = [(); 2].map(|()| wide(&budget));
        assert!(insert(&mut a, 0, 1, 1024) && insert(&mut b, 0, 1, 1024) && insert(&mut b, 0, 2, 1024));
        assert!(!insert(&mut a, 0, 2, 1024));
        drop(b);
        assert!(insert(&mut a, 0, 2, 1024));
        assert!(!insert(&mut a, 0, max_window(1024), 1024), "too far away");
        assert!(!insert(&mut a, 0, 3, 2000), "longer than the path MTU");
        a.clear();
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn packets_further_ahead_than_the_peer_has_had_outstanding_are_dropped() {
        for (outstanding, reach) in [(0, INITIAL_REACH), (100, 100), (1 << 20, PACKETS)] {
            let mut buffer = ReorderBuffer::default();
            buffer.note_outstanding(outstanding);
            assert!(!insert(&mut buffer, 0, reach, 4), "{outstanding}");
            assert!(insert(&mut buffer, 0, reach - 1, 4), "{outstanding}");
            let next = 2 * reach - 2;
            assert_eq!(insert(&mut buffer, 0, next, 4), next < PACKETS, "{outstanding}");
            assert!(!insert(&mut buffer, 0, PACKETS, 4), "{outstanding}");
        }
    }

    #[test]
    fn a_read_covers_the_psns_of_its_response() {
        let mut buffer = ReorderBuffer::default();
        let mut insert_read = |seq, dma_len| {
            let mut header = Header::new(Bth::new(Opcode::RcReadRequest, Qpn::new(5), Psn::new(0)));
            header.reth = Some(Reth {
                dma_len,
                ..Reth::default()
            });
            let mut head = [0; MAX_HEADER_LEN];
            let header = header.view(&mut head);
            let inserted = buffer.insert(at(0), at(seq), &Packet { header, payload: &[] }, 1024);
            (inserted, arrived(&buffer, 0))
        };
        assert_eq!(insert_read(2, 3000), (true, vec![2, 3, 4]));
        assert!(insert_read(2, 1000).0, "a part again");
        assert!(insert_read(10, u32::MAX).0);
        assert!(buffer.bitmap(4096).expect("bits").1.len() as u64 <= PACKETS / 64 + 1);
    }

    proptest! {
        /// If two copies differ, neither is returned nor reported in the bitmap.
        #[test]
        fn differing_copies_are_never_executed(copies in proptest::collection::vec((1u64..8, 0u8..2), 0..24)) {
            let budget = Arc::new(ReorderBudget::default());
            let mut buffer = ReorderBuffer::new(budget.clone());
            for (seq, fill) in &copies {
                insert_filled(&mut buffer, 0, *seq, 16, *fill);
            }
            let reported = arrived(&buffer, 0);
            for seq in 1..8 {
                let mut fills: Vec<u8> = copies.iter().filter(|(s, _)| *s == seq).map(|(_, fill)| *fill).collect();
                fills.dedup();
                let expected = if let [fill] = fills[..] { Some(vec![fill; 16]) } else { None };
                prop_assert_eq!(reported.contains(&seq), expected.is_some());
                let out = buffer.take(at(seq)).map(|p| p.packet().payload.to_vec());
                prop_assert_eq!(out, expected);
            }
            prop_assert_eq!(budget.used(), 0);
        }
    }
}
