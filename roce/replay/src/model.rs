//! Memory of the responder: regions of ours for the keys of the capture, and what they must contain in the end.

use std::{collections::BTreeMap, sync::Arc};

use roce_bth::{Class, Header, HeaderView, Packet};
use roce_verbs::mem::{FastRegion, MemoryTable, PdHandle, Region};
use roce_verbs::{AccessFlags, RKey, wr::FastRegister};

use crate::error::Error;

/// Most bytes of all regions.
pub(crate) const MAX_MEMORY: u64 = 256 << 20;
const PAGE: u64 = 4096;

/// Key of the capture and the memory that stands for it.
#[derive(Debug)]
struct Mapped {
    /// The captured address of the region's first byte.
    base: u64,
    region: Arc<Region>,
    /// The key that peers use: the region's, or a revocable one.
    rkey: RKey,
    _fast: Option<Arc<FastRegion>>,
    shadow: Vec<u8>,
}

/// Destination of the message that is coming in.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    key: RKey,
    va: u64,
}

/// Memory of the responder.
#[derive(Debug, Default)]
pub(crate) struct Model {
    places: BTreeMap<u32, Mapped>,
    cursor: Option<Cursor>,
}

/// Returns the range that a request names: key, address, length.
fn range(header: HeaderView<'_>) -> Option<(RKey, u64, u64)> {
    match (header.reth(), header.atomic_eth()) {
        (Some(r), _) => Some((r.rkey, r.va, u64::from(r.dma_len))),
        (_, Some(a)) => Some((a.rkey, a.va, 8)),
        _ => None,
    }
}

impl Model {
    /// Makes regions for all keys that requests use successfully. Keys that a SEND invalidates become revocable.
    pub(crate) fn new<'a>(
        mem: &MemoryTable,
        pd: PdHandle,
        good: impl Iterator<Item = Packet<'a>>,
    ) -> Result<Self, Error> {
        let mut ranges = BTreeMap::<u32, (u64, u64)>::new();
        let mut revoked = Vec::new();
        for packet in good {
            revoked.extend(packet.header.ieth().map(|k| k.0));
            if let Some((key, va, len)) = range(packet.header)
                && len > 0
            {
                let end = va.saturating_add(len);
                let entry = ranges.entry(key.0).or_insert((va, end));
                *entry = (entry.0.min(va), entry.1.max(end));
            }
        }
        for key in &revoked {
            ranges.entry(*key).or_insert((0, PAGE));
        }
        let all = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_ATOMIC
            | AccessFlags::FLUSH_GLOBAL;
        let mut model = Self::default();
        let mut room = MAX_MEMORY;
        for (key, (start, end)) in ranges {
            let base = start & !(PAGE - 1);
            room = room.checked_sub(end - base).ok_or_else(|| {
                Error(format!(
                    "the addresses of key {key:#x} span {} bytes; a replay has {} MiB of memory",
                    end - base,
                    MAX_MEMORY >> 20
                ))
            })?;
            let failed = |e: &dyn std::fmt::Display| Error(format!("memory for key {key:#x}: {e}"));
            let len = (end - base) as usize;
            let region = mem.alloc_region(pd, len, all).map_err(|e| failed(&e))?;
            let (mut rkey, mut fast) = (region.rkey(), None);
            if revoked.contains(&key) {
                let target = mem.alloc_fast(pd).map_err(|e| failed(&e))?;
                rkey = target.rkey();
                let args = FastRegister {
                    key: rkey,
                    lkey: region.lkey(),
                    addr: region.addr(),
                    length: len as u64,
                    iova: region.addr(),
                    access: all,
                };
                mem.fast_register(pd, &args).map_err(|e| failed(&e))?;
                fast = Some(target);
            }
            let shadow = vec![0; len];
            let place = Mapped {
                base,
                region,
                rkey,
                _fast: fast,
                shadow,
            };
            model.places.insert(key, place);
        }
        Ok(model)
    }

    /// Returns a request with keys and addresses of ours. Keys that stand for nothing stay as they are: they are wrong here too.
    pub(crate) fn translate(&self, packet: &Packet<'_>) -> Header {
        let mut header = Header::from(packet.header);
        let here = |key: RKey, va: u64| match self.places.get(&key.0) {
            Some(p) => (p.rkey, va.wrapping_sub(p.base).wrapping_add(p.region.addr())),
            None => (key, va),
        };
        if let Some(reth) = &mut header.reth {
            (reth.rkey, reth.va) = here(reth.rkey, reth.va);
        }
        if let Some(eth) = &mut header.atomic_eth {
            (eth.rkey, eth.va) = here(eth.rkey, eth.va);
        }
        if let Some(key) = &mut header.ieth {
            *key = here(*key, 0).0;
        }
        header
    }

    /// Writes bytes that the captured responder is known to have had.
    pub(crate) fn preset(&mut self, key: RKey, va: u64, bytes: &[u8]) {
        if let Some(place) = self.places.get_mut(&key.0) {
            let at = va.wrapping_sub(place.base) as usize;
            if let Some(shadow) = place.shadow.get_mut(at..at.saturating_add(bytes.len())) {
                shadow.copy_from_slice(bytes);
                let _ = place.region.write(at, bytes);
            }
        }
    }

    /// Applies a request that was accepted for the first time.
    pub(crate) fn execute(&mut self, packet: &Packet<'_>, original: Option<u64>) {
        let (header, info) = (packet.header, packet.header.bth.opcode.info());
        match info.class {
            Class::Write => {
                if let Some(reth) = header.reth() {
                    self.cursor = Some(Cursor {
                        key: reth.rkey,
                        va: reth.va,
                    });
                }
                if let Some(cursor) = &mut self.cursor {
                    let (key, va) = (cursor.key, cursor.va);
                    cursor.va = va.wrapping_add(packet.payload.len() as u64);
                    self.store(key, va, packet.payload);
                }
            }
            Class::AtomicWrite => {
                if let Some(reth) = header.reth() {
                    self.store(reth.rkey, reth.va, packet.payload);
                }
            }
            Class::Atomic => {
                let (Some(eth), Some(original)) = (header.atomic_eth(), original) else {
                    return;
                };
                let new = match header.bth.opcode {
                    roce_bth::Opcode::RcFetchAdd => original.wrapping_add(eth.swap_add),
                    _ if original == eth.compare => eth.swap_add,
                    _ => original,
                };
                self.store(eth.rkey, eth.va, &new.to_ne_bytes());
            }
            _ => {}
        }
    }

    fn store(&mut self, key: RKey, va: u64, bytes: &[u8]) {
        if let Some(place) = self.places.get_mut(&key.0) {
            let at = va.wrapping_sub(place.base) as usize;
            if let Some(shadow) = place.shadow.get_mut(at..at.saturating_add(bytes.len())) {
                shadow.copy_from_slice(bytes);
            }
        }
    }

    /// Describes the keys whose memory is not what it should be.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for (key, place) in &self.places {
            let mut bytes = vec![0; place.shadow.len()];
            let read = place.region.read(0, &mut bytes);
            if let Some(at) = bytes.iter().zip(&place.shadow).position(|(a, b)| a != b) {
                wrong.push(format!("memory of key {key:#x} differs from offset {at} on ({read:?})"));
            }
        }
        wrong
    }
}

/// Returns how many PSNs a READ takes.
pub(crate) fn read_packets(len: u32, mtu: usize) -> u32 {
    len.div_ceil(mtu as u32).max(1)
}
