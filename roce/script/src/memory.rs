//! Regions of the host: their names, addresses and keys.

use roce_bth::RKey;
use roce_verbs::mem::Region;

use crate::{
    pattern,
    script::Setup,
    value::{Data, Place, Source},
};

/// Address and key of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Area {
    pub(crate) addr: u64,
    pub(crate) rkey: RKey,
}

impl Area {
    /// Returns those of a region of the engine.
    pub(crate) fn of(region: &Region) -> Self {
        Self {
            addr: region.addr(),
            rkey: region.rkey(),
        }
    }
}

/// Regions of the host with their names.
#[derive(Debug)]
pub(crate) struct Memory {
    regions: Vec<(String, Area)>,
    mtu: usize,
}

impl Memory {
    /// Names the regions of a script, which are in the order of its `qp` lines.
    pub(crate) fn new(setup: &Setup, areas: impl IntoIterator<Item = Area>) -> Self {
        Self {
            regions: setup.names.iter().cloned().zip(areas).collect(),
            mtu: setup.mtu.bytes(),
        }
    }

    /// Returns the address that a place stands for.
    pub(crate) fn address(&self, place: Place) -> u64 {
        let base = place.region.map_or(0, |index| self.regions[index].1.addr);
        base.wrapping_add(place.offset)
    }

    /// Returns the key that a place stands for.
    pub(crate) fn key(&self, place: Place) -> RKey {
        let base = place.region.map_or(0, |index| self.regions[index].1.rkey.0);
        RKey(base.wrapping_add(place.offset as u32))
    }

    /// Returns an address as a script names it, of the region with this key.
    pub(crate) fn show_address(&self, key: RKey, va: u64) -> String {
        match self.regions.iter().find(|(_, region)| region.rkey == key) {
            Some((name, region)) => match va.wrapping_sub(region.addr) as i64 {
                offset if offset >= 0 => format!("{name}+{offset}"),
                offset => format!("{name}{offset}"),
            },
            None => format!("{va:#x}"),
        }
    }

    /// Returns a key as a script names it.
    pub(crate) fn show_key(&self, key: RKey) -> String {
        let named = self.regions.iter().find(|(_, region)| region.rkey == key);
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
}
