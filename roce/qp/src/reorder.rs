//! Reorder buffer: holds request packets beyond a gap until the gap closes.
//!
//! Accepts packets from the peer's UDP source port only ([`Origin`](crate::Origin)). Even a forger that knows the port
//! can't replace the peer's packet: if two copies differ, neither is executed and the peer has to resend the packet.

use std::sync::{
    Arc, LazyLock,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use roce_bth::{Bth, Class, HeaderView, Packet};

use crate::{
    ring::{SeqRing, WORD},
    sendq::packets_for,
    seq::Seq,
};

/// Largest number of packets beyond the oldest gap: each has a bit in a selective ACK. A selective ACK peer sends nothing beyond them. At
/// the largest MTU their payload is 16 MiB.
pub(crate) const PACKETS: u64 = 4096;
/// Initial reach beyond the newest buffered packet, PSNs. It grows with what the peer had outstanding.
const INITIAL_REACH: u64 = 64;
/// Memory of a buffered packet besides its payload, bytes.
const OVERHEAD: usize = 256;
/// Memory of each PSN up to the newest buffered one, bytes.
const SLOT: usize = size_of::<Slot>();
/// Memory for the buffered packets of all queue pairs in a process, bytes.
const PROCESS_BYTES: usize = 256 << 20;

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
#[derive(Clone, Debug)]
pub(crate) struct BufferedPacket {
    bth: Bth,
    /// Headers and payload.
    bytes: Box<[u8]>,
}

impl BufferedPacket {
    pub(crate) fn of(packet: &Packet<'_>) -> Self {
        Self {
            bth: packet.header.bth,
            bytes: [packet.header.bytes(), packet.payload].concat().into(),
        }
    }

    pub(crate) fn packet(&self) -> Packet<'_> {
        let (head, payload) = self.bytes.split_at(self.bth.opcode.info().header_len);
        Packet {
            header: HeaderView::new(self.bth, head),
            payload,
        }
    }

    /// Returns the memory that it takes, bytes.
    fn cost(&self) -> usize {
        self.bytes.len() + OVERHEAD
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
#[derive(Clone, Default, Debug)]
enum Slot {
    #[default]
    Empty,
    Packet(BufferedPacket),
    /// Two copies differ: one of them is forged.
    Conflict,
}

impl Slot {
    /// Returns its memory, bytes.
    fn cost(&self) -> usize {
        match self {
            Self::Packet(packet) => SLOT + packet.cost(),
            Self::Empty | Self::Conflict => SLOT,
        }
    }
}

/// Packets beyond the gap of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct ReorderBuffer {
    /// Slots, the last one in use, and bits for the PSNs that have arrived. Those before the oldest gap may be clear.
    ring: SeqRing<Slot>,
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
        self.ring.len() == 0
    }

    /// Records how many PSNs the peer had outstanding, all executed by now.
    pub(crate) fn note_outstanding(&mut self, psns: u64) {
        self.outstanding = self.outstanding.max(psns);
    }

    /// Returns the end of the accepted PSNs: no further ahead than the peer ever had outstanding.
    fn limit(&self, expected: Seq) -> Seq {
        let newest = self.ring.end().map_or(expected, Seq::prev).max(expected);
        let reach = self.outstanding.max(INITIAL_REACH);
        newest.plus(reach).min(expected.plus(PACKETS))
    }

    /// Buffers a packet at `seq` while `expected` is missing.
    ///
    /// Returns false if it drops the packet: too far ahead, out of memory, or different from another copy.
    pub(crate) fn insert(&mut self, expected: Seq, seq: Seq, packet: &Packet<'_>, mtu: usize) -> bool {
        if seq >= self.limit(expected) || packet.payload.len() > mtu {
            return false;
        }
        match self.ring.get(seq) {
            Some(Slot::Packet(copy)) if copy.is_same(packet) => true,
            Some(Slot::Packet(_)) => {
                self.reject_copies(seq, mtu);
                false
            }
            Some(Slot::Conflict) => false,
            Some(Slot::Empty) | None => {
                let stored = self.store(expected, seq, BufferedPacket::of(packet));
                if stored {
                    self.mark(seq, packet, mtu, true);
                }
                stored
            }
        }
    }

    /// Stores a packet in an empty slot. Returns false without memory for it.
    fn store(&mut self, expected: Seq, seq: Seq, packet: BufferedPacket) -> bool {
        let new_slots = seq.plus(1).since(self.ring.end().unwrap_or(expected));
        let stored = self.budget.take(packet.cost() + new_slots as usize * SLOT);
        if stored {
            self.ring.begin(expected);
            *self.ring.entry(seq) = Slot::Packet(packet);
        }
        stored
    }

    /// Drops a packet after a different copy arrived, and marks it as missing.
    fn reject_copies(&mut self, seq: Seq, mtu: usize) {
        if let Slot::Packet(copy) = core::mem::replace(self.ring.entry(seq), Slot::Conflict) {
            self.budget.release(copy.cost());
            self.mark(seq, &copy.packet(), mtu, false);
        }
    }

    /// Sets or clears the bits of a packet's PSNs.
    fn mark(&mut self, seq: Seq, packet: &Packet<'_>, mtu: usize, arrived: bool) {
        let count = match (packet.header.bth.opcode.info().class, packet.header.reth()) {
            (Class::ReadRequest, Some(reth)) => u64::from(packets_for(reth.dma_len, mtu)),
            _ => 1,
        };
        // The PSNs of a READ may exceed the bitmap; the peer has no requests there.
        self.ring.set_bits(seq, seq.plus(count.min(PACKETS)), arrived);
    }

    /// Removes and returns the expected packet.
    pub(crate) fn take(&mut self, expected: Seq) -> Option<BufferedPacket> {
        self.advance(expected);
        self.ring.get(expected)?;
        match core::mem::take(self.ring.entry(expected)) {
            Slot::Packet(packet) => {
                self.budget.release(packet.cost());
                Some(packet)
            }
            Slot::Empty | Slot::Conflict => None,
        }
    }

    /// Buffers a taken packet again that can't be executed yet.
    pub(crate) fn put_back(&mut self, seq: Seq, packet: BufferedPacket) {
        self.store(seq, seq, packet);
    }

    /// Removes what is before `expected`: such packets were executed, perhaps from copies that arrived in order.
    pub(crate) fn advance(&mut self, expected: Seq) {
        while let Some(slot) = self.ring.pop_before(expected) {
            self.budget.release(slot.cost());
        }
        self.ring.advance(expected);
        self.ring.trim();
        // Or only the slot is left whose packet was taken.
        if self.ring.len() <= 1 && !matches!(self.ring.get(expected), Some(Slot::Packet(_))) {
            self.clear();
        }
    }

    pub(crate) fn clear(&mut self) {
        while let Some(slot) = self.ring.end().and_then(|end| self.ring.pop_before(end)) {
            self.budget.release(slot.cost());
        }
        self.ring = SeqRing::default();
    }

    /// Returns the words of the bitmap in at most `room` bytes, the one with `expected` first. The lowest PSN is the lowest bit.
    pub(crate) fn bitmap(&self, expected: Seq, room: usize) -> impl ExactSizeIterator<Item = u64> {
        let most = ((PACKETS / WORD) as usize + 1).min(room / size_of::<u64>());
        let start = expected.round_down(WORD);
        (0..self.ring.words().min(most)).map(move |index| self.ring.word(start.plus(index as u64 * WORD)))
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
        let words: Vec<u64> = buffer.bitmap(at(from), 4096).collect();
        let set = |n: &u64| {
            let bit = at(*n).since(at(from).round_down(WORD));
            words.get((bit / 64) as usize).is_some_and(|w| w >> (bit % 64) & 1 == 1)
        };
        (from..from + PACKETS).filter(set).collect()
    }

    /// Returns the memory of so many full packets in so many slots.
    fn memory(packets: usize, slots: usize) -> usize {
        packets * (12 + 1024 + OVERHEAD) + slots * SLOT
    }

    #[test]
    fn packets_come_out_when_they_are_expected() {
        let budget = Arc::new(ReorderBudget::default());
        let mut buffer = wide(&budget);
        for seq in [2, 5, 3, 200] {
            assert!(insert(&mut buffer, 1, seq, 1024));
        }
        assert_eq!(arrived(&buffer, 1), [2, 3, 5, 200]);
        assert_eq!(budget.used(), memory(4, 200));
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
        assert!(buffer.is_empty() && buffer.bitmap(at(201), 4096).len() == 0);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn no_more_is_buffered_than_there_is_room_for() {
        let budget = Arc::new(ReorderBudget {
            max: memory(3, 5),
            ..ReorderBudget::default()
        });
        let [mut a, mut b] = [(); 2].map(|()| wide(&budget));
        assert!(insert(&mut a, 0, 1, 1024) && insert(&mut b, 0, 1, 1024) && insert(&mut b, 0, 2, 1024));
        assert!(!insert(&mut a, 0, 2, 1024));
        drop(b);
        assert!(insert(&mut a, 0, 2, 1024));
        assert!(!insert(&mut a, 0, PACKETS, 1024), "too far away");
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
        let (inserted, all) = insert_read(10, u32::MAX);
        assert!(inserted && all.last() == Some(&(PACKETS - 1)));
        // What is stored, not what is reported of it, which has a bound of its own.
        assert!(buffer.ring.words() as u64 <= PACKETS / WORD + 1);
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
            buffer.advance(at(8));
            prop_assert_eq!(budget.used(), 0);
        }
    }

    #[test]
    fn a_bitmap_has_65_words_at_most_and_no_more_than_there_is_room_for() {
        let mut buffer = wide(&Arc::default());
        // 8 PSNs after a multiple of 64.
        assert!(insert(&mut buffer, 8, 8 + PACKETS - 1, 4));
        assert_eq!(buffer.bitmap(at(8), 4096).len(), 65);
        assert_eq!(buffer.bitmap(at(8), 255).len(), 31);
        // A READ's responses may go beyond it.
        let mut buffer = wide(&Arc::default());
        let mut header = Header::new(Bth::new(Opcode::RcReadRequest, Qpn::new(5), Psn::new(0)));
        header.reth = Some(Reth {
            dma_len: 1 << 30,
            ..Reth::default()
        });
        let mut head = [0; MAX_HEADER_LEN];
        let packet = Packet {
            header: header.view(&mut head),
            payload: &[],
        };
        assert!(buffer.insert(at(8), at(4000), &packet, 1024));
        assert!(buffer.ring.words() > 65);
        assert_eq!(buffer.bitmap(at(8), 4096).len(), 65);
    }

    /// A retransmission may differ in some fields only.
    #[test]
    fn copies_that_differ_are_told_apart() {
        let reth = Reth {
            va: 8,
            dma_len: 16,
            ..Reth::default()
        };
        let of = |opcode, reth: Option<Reth>, imm: Option<u32>, ack_req, payload: &'static [u8]| {
            let mut bth = Bth::new(opcode, Qpn::new(5), Psn::new(0));
            bth.ack_req = ack_req;
            let mut header = Header::new(bth);
            (header.reth, header.imm) = (reth, imm);
            (header, payload)
        };
        let (write, read) = (Opcode::RcWriteOnlyImm, Opcode::RcReadRequest);
        let longer = Reth { dma_len: 17, ..reth };
        let other = Reth { va: 9, ..reth };
        let first = of(write, Some(reth), Some(1), false, &[1; 4]);
        for (a, b, is_same) in [
            (&first, of(write, Some(reth), Some(1), true, &[1; 4]), true),
            (&first, of(write, Some(reth), Some(1), true, &[2; 4]), false),
            (&first, of(write, Some(reth), Some(2), true, &[1; 4]), false),
            (&first, of(write, Some(longer), Some(1), true, &[1; 4]), false),
            (&first, of(write, Some(other), Some(1), true, &[1; 4]), false),
            (&first, of(Opcode::RcWriteOnly, Some(reth), None, true, &[1; 4]), false),
            (
                &of(Opcode::RcSendOnly, None, None, false, &[1; 4]),
                of(Opcode::RcSendLast, None, None, false, &[1; 4]),
                false,
            ),
            (
                &of(read, Some(reth), None, false, &[]),
                of(read, Some(longer), None, true, &[]),
                true,
            ),
            (
                &of(read, Some(reth), None, false, &[]),
                of(read, Some(other), None, true, &[]),
                false,
            ),
        ] {
            let mut heads = [[0; MAX_HEADER_LEN]; 2];
            let [x, y] = &mut heads;
            let own = BufferedPacket::of(&Packet {
                header: a.0.view(x),
                payload: a.1,
            });
            let copy = Packet {
                header: b.0.view(y),
                payload: b.1,
            };
            assert_eq!(own.is_same(&copy), is_same, "{:?}", b.0);
        }
    }
}
