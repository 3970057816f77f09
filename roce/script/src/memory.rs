//! Regions of the host.

use std::sync::Arc;

use roce_bth::RKey;
use roce_verbs::mem::{MemError, MemoryTable, PdHandle, Region};

use crate::{
    pattern,
    script::Setup,
    value::{Data, Place, Source},
};

/// Regions of the host with their names.
#[derive(Debug)]
pub(crate) struct Memory {
    regions: Vec<(String, Arc<Region>)>,
    mtu: usize,
}

impl Memory {
    /// Creates the regions of a script.
    pub(crate) fn new(mem: &MemoryTable, pd: PdHandle, setup: &Setup) -> Result<Self, MemError> {
        let mut regions = Vec::new();
        for (index, (name, spec)) in setup.names.iter().zip(&setup.regions).enumerate() {
            let region = mem.alloc_region(pd, spec.len, spec.access)?;
            let bytes: Vec<u8> = (0..spec.len as u64).map(|at| pattern::of_region(index, at)).collect();
            region.write(0, &bytes).map_err(|_| MemError::Range(spec.len as u64))?;
            regions.push((name.clone(), region));
        }
        let mtu = setup.mtu.bytes();
        Ok(Self { regions, mtu })
    }

    pub(crate) fn region(&self, index: usize) -> &Region {
        &self.regions[index].1
    }

    /// Returns the address that a place stands for.
    pub(crate) fn address(&self, place: Place) -> u64 {
        let base = place.region.map_or(0, |index| self.region(index).addr());
        base.wrapping_add(place.offset)
    }

    /// Returns the key that a place stands for.
    pub(crate) fn key(&self, place: Place) -> RKey {
        let base = place.region.map_or(0, |index| self.region(index).rkey().0);
        RKey(base.wrapping_add(place.offset as u32))
    }

    /// Returns an address as a script names it, of the region with this key.
    pub(crate) fn show_address(&self, key: RKey, va: u64) -> String {
        match self.regions.iter().find(|(_, region)| region.rkey() == key) {
            Some((name, region)) => match va.wrapping_sub(region.addr()) as i64 {
                offset if offset >= 0 => format!("{name}+{offset}"),
                offset => format!("{name}{offset}"),
            },
            None => format!("{va:#x}"),
        }
    }

    /// Returns a key as a script names it.
    pub(crate) fn show_key(&self, key: RKey) -> String {
        let named = self.regions.iter().find(|(_, region)| region.rkey() == key);
        named.map_or_else(|| format!("{:#x}", key.0), |(name, _)| name.clone())
    }

    /// Returns the bytes of a payload; those of PSN `usual` if it names none. `None`: only its length is known.
    pub(crate) fn bytes(&self, data: &Data, usual: Option<u32>) -> Option<Vec<u8>> {
        let source = data.source.clone().or_else(|| usual.map(Source::Psn))?;
        let offsets = 0..data.len;
        Some(match source {
            // A packet longer than the path MTU has no successor whose bytes it could repeat.
            Source::Psn(psn) if usual.is_some() => offsets.map(|at| pattern::of_psn(psn, at)).collect(),
            Source::Psn(first) => offsets
                .map(|at| pattern::of_psn(first.wrapping_add((at / self.mtu) as u32) & 0x00ff_ffff, at % self.mtu))
                .collect(),
            Source::Region(index, offset) => offsets
                .map(|at| pattern::of_region(index, offset.wrapping_add(at as u64)))
                .collect(),
            Source::Fill(byte) => vec![byte; data.len],
            Source::Bytes(bytes) => bytes,
        })
    }

    /// Reads bytes of a region.
    pub(crate) fn read(&self, place: Place, len: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; len];
        let index = place.region.unwrap_or(0);
        let at = usize::try_from(place.offset).unwrap_or(usize::MAX);
        let read = self.region(index).read(at, &mut bytes);
        read.map_err(|e| e.to_string())?;
        Ok(bytes)
    }
}
