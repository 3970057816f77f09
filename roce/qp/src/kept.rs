//! Request packets beyond a gap, kept until the gap is closed.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use bitvec::{order::Lsb0, vec::BitVec};
use roce_bth::{Class, Header, Packet};

use crate::{sendq::packets_for, seq::Seq};

/// Bytes that a queue pair's peer may have under way beyond the oldest gap …
const BYTES: usize = 16 << 20;
/// … and packets: a bit of a selective acknowledgement for each.
pub(crate) const PACKETS: u64 = 4096;
/// What a kept packet takes beside its payload.
const OVERHEAD: usize = 256;
/// Bits of a word of the bitmap.
pub(crate) const WORD: u64 = 64;
/// Bytes that all queue pairs of a port may keep unless somebody wishes otherwise.
const PORT_BYTES: usize = 256 << 20;

/// How far beyond the oldest gap packets are kept, PSNs. The peer knows it, too, and sends nothing beyond.
pub(crate) fn reach(mtu: usize) -> u64 {
    ((BYTES / mtu) as u64).min(PACKETS)
}

/// The memory that queue pairs of a port may keep packets in.
#[derive(Debug)]
pub struct KeptBudget {
    max: usize,
    used: AtomicUsize,
}

impl Default for KeptBudget {
    fn default() -> Self {
        Self {
            max: PORT_BYTES,
            used: AtomicUsize::new(0),
        }
    }
}

impl KeptBudget {
    /// Bytes in use.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let before = self.used.fetch_add(bytes, Relaxed);
        let fits = before + bytes <= self.max;
        if !fits {
            self.give(bytes);
        }
        fits
    }

    fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Relaxed);
    }
}

/// A packet.
#[derive(Debug)]
pub(crate) struct Kept {
    header: Header,
    payload: Box<[u8]>,
}

impl Kept {
    pub(crate) fn of(packet: &Packet<'_>) -> Self {
        Self {
            header: packet.header,
            payload: packet.payload.into(),
        }
    }

    pub(crate) fn packet(&self) -> Packet<'_> {
        Packet {
            header: self.header,
            payload: &self.payload,
        }
    }

    fn bytes(&self) -> usize {
        self.payload.len() + OVERHEAD
    }
}

/// What a queue pair keeps.
#[derive(Debug, Default)]
pub(crate) struct KeptPackets {
    packets: BTreeMap<Seq, Kept>,
    /// PSNs that have arrived, from `base` on, a multiple of [`WORD`]. Those before the oldest gap may be missing in it.
    arrived: BitVec<u64, Lsb0>,
    base: Option<Seq>,
    budget: Arc<KeptBudget>,
}

impl KeptPackets {
    pub(crate) fn new(budget: Arc<KeptBudget>) -> Self {
        Self {
            packets: BTreeMap::new(),
            arrived: BitVec::new(),
            base: None,
            budget,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Keeps a packet that is `seq` instead of `expected`. `false`: there is no room, or it is too far away.
    pub(crate) fn keep(&mut self, expected: Seq, seq: Seq, packet: &Packet<'_>, mtu: usize) -> bool {
        let count = match (packet.header.bth.opcode.info().class, packet.header.reth) {
            (Class::ReadRequest, Some(reth)) => u64::from(packets_for(reth.dma_len, mtu)),
            _ => 1,
        };
        if seq.since(expected) >= reach(mtu) || packet.payload.len() > mtu {
            return false;
        }
        if self.packets.contains_key(&seq) {
            return true;
        }
        let kept = Kept::of(packet);
        if !self.budget.take(kept.bytes()) {
            return false;
        }
        self.packets.insert(seq, kept);
        let base = *self.base.get_or_insert_with(|| expected.round_down(WORD));
        let from = seq.since(base) as usize;
        // What a READ asks for may be more than a bitmap holds; the rest of it is no request.
        let to = (seq.since(base) + count).min(PACKETS + 2 * WORD) as usize;
        if self.arrived.len() < to {
            self.arrived.resize(to.next_multiple_of(WORD as usize), false);
        }
        if from < to {
            self.arrived[from..to].fill(true);
        }
        true
    }

    /// Takes out the packet that is expected now.
    pub(crate) fn take(&mut self, expected: Seq) -> Option<Kept> {
        if self.packets.is_empty() {
            return None;
        }
        // What has been executed by a copy that came later.
        while let Some(first) = self.packets.first_entry()
            && *first.key() < expected
        {
            self.budget.give(first.remove().bytes());
        }
        let found = self.packets.remove(&expected);
        if let Some(kept) = &found {
            self.budget.give(kept.bytes());
        }
        found
    }

    /// Puts back what was taken out, which can't be executed yet.
    pub(crate) fn put_back(&mut self, seq: Seq, kept: Kept) {
        if self.budget.take(kept.bytes()) {
            self.packets.insert(seq, kept);
        }
    }

    /// Everything before `expected` was executed.
    pub(crate) fn advance(&mut self, expected: Seq) {
        if self.packets.is_empty() {
            self.forget();
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

    fn forget(&mut self) {
        self.base = None;
        self.arrived = BitVec::new();
    }

    pub(crate) fn clear(&mut self) {
        let bytes = self.packets.values().map(Kept::bytes).sum();
        self.budget.give(bytes);
        self.packets.clear();
        self.forget();
    }

    /// What has arrived: the first PSN that it is about, and a bit for each from there on, the lowest first; in so many bytes at most.
    pub(crate) fn bitmap(&self, room: usize) -> Option<(Seq, &[u64])> {
        let words = self.arrived.as_raw_slice();
        let most = ((PACKETS / WORD) as usize + 1).min(room / size_of::<u64>());
        Some((self.base?, &words[..words.len().min(most)]))
    }
}

impl Drop for KeptPackets {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use roce_bth::{Bth, Opcode, Psn, Qpn, Reth};

    use super::*;

    fn at(n: u64) -> Seq {
        Seq::start(Psn::new(0x00ff_ff00)).plus(n)
    }

    fn write(len: usize) -> (Header, Vec<u8>) {
        let bth = Bth::new(Opcode::RcWriteMiddle, Qpn::new(5), Psn::new(0));
        (Header::new(bth), vec![7; len])
    }

    fn keep(kept: &mut KeptPackets, expected: u64, seq: u64, len: usize) -> bool {
        let (header, payload) = write(len);
        let packet = Packet {
            header,
            payload: &payload,
        };
        kept.keep(at(expected), at(seq), &packet, 1024)
    }

    /// PSNs beyond `from` that the bitmap says have arrived.
    fn arrived(kept: &KeptPackets, from: u64) -> Vec<u64> {
        let Some((base, words)) = kept.bitmap(4096) else {
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
        let budget = Arc::new(KeptBudget::default());
        let mut kept = KeptPackets::new(budget.clone());
        for seq in [2, 5, 3, 200] {
            assert!(keep(&mut kept, 1, seq, 1024));
        }
        assert_eq!(arrived(&kept, 1), [2, 3, 5, 200]);
        assert_eq!(budget.used(), 4 * (1024 + OVERHEAD));
        assert!(kept.take(at(1)).is_none());
        for seq in [2, 3] {
            assert_eq!(kept.take(at(seq)).expect("kept").packet().payload, [7; 1024]);
        }
        kept.advance(at(4));
        assert_eq!(arrived(&kept, 4), [5, 200]);
        // 4 to 150 come in their turn, 5 among them.
        assert!(kept.take(at(151)).is_none());
        kept.advance(at(151));
        assert_eq!(arrived(&kept, 151), [200]);
        assert!(kept.take(at(200)).is_some());
        kept.advance(at(201));
        assert!(kept.is_empty() && kept.bitmap(4096).is_none());
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let budget = Arc::new(KeptBudget {
            max: 3 * (1024 + OVERHEAD),
            ..KeptBudget::default()
        });
        let [mut a, mut b] = [(); 2].map(|()| KeptPackets::new(budget.clone()));
        assert!(keep(&mut a, 0, 1, 1024) && keep(&mut b, 0, 1, 1024) && keep(&mut b, 0, 2, 1024));
        assert!(!keep(&mut a, 0, 2, 1024));
        drop(b);
        assert!(keep(&mut a, 0, 2, 1024));
        assert!(!keep(&mut a, 0, reach(1024), 1024), "too far away");
        assert!(!keep(&mut a, 0, 3, 2000), "longer than the path MTU");
        a.clear();
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_read_covers_the_numbers_of_its_answer() {
        let mut kept = KeptPackets::default();
        let bth = Bth::new(Opcode::RcReadRequest, Qpn::new(5), Psn::new(0));
        let mut header = Header::new(bth);
        header.reth = Some(Reth {
            dma_len: 3000,
            ..Reth::default()
        });
        let mut endless = header;
        endless.reth = Some(Reth {
            dma_len: u32::MAX,
            ..Reth::default()
        });
        assert!(kept.keep(at(0), at(2), &Packet { header, payload: &[] }, 1024));
        assert_eq!(arrived(&kept, 0), [2, 3, 4]);
        assert!(kept.keep(
            at(0),
            at(10),
            &Packet {
                header: endless,
                payload: &[]
            },
            1024
        ));
        assert!(kept.bitmap(4096).expect("bits").1.len() as u64 <= PACKETS / 64 + 1);
    }
}
