//! The memory of a virtual machine, as its front end has told of it.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use roce_verbs::mem::Pages;
use roce_verbs::provider::Memory;
use rtrs::client::{LentId, LentPiece};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::mapped::Mapped;

/// Regions at most; QEMU asks for it, and plugs in no more memory than that.
pub(crate) const MAX_REGIONS: usize = 64;

/// Owner of a session, with which memory is registered.
pub(crate) trait Lender {
    /// Registers memory.
    ///
    /// # Errors
    /// Says why it can't be.
    fn lend(&mut self, memory: Arc<Pages>) -> Result<LentId, String>;
    /// Ends a registration, which no request is under way with.
    fn take_back(&mut self, id: LentId);
}

/// Reason why a region can't be a virtual machine's memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("the memory can't be mapped: {0}")]
    Map(#[from] io::Error),
    #[error("the memory can't be registered: {0}")]
    Register(String),
    #[error("regions of memory that overlap")]
    Overlap,
    #[error("more than {MAX_REGIONS} regions of memory")]
    TooMany,
    #[error("no such region of memory")]
    Unknown,
}

#[derive(Debug)]
struct Region {
    /// First byte, as the guest counts.
    guest: u64,
    len: u64,
    /// First byte, as the front end counts.
    user: u64,
    mapped: Arc<Mapped>,
    view: Arc<GuestRegionMmap>,
    lent: LentId,
}

impl Region {
    fn new(lender: &mut dyn Lender, what: &VhostUserMemoryRegion, file: &OwnedFd) -> Result<Self, MemoryError> {
        let (guest, len, user, offset) = (what.guest_phys_addr, what.memory_size, what.user_addr, what.mmap_offset);
        let mapped = Mapped::new(file.as_fd(), offset, len)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: all of a mapping that `mapped` keeps, and the region is never without it.
        let raw = unsafe { MmapRegion::build_raw(mapped.start(), mapped.size(), prot, libc::MAP_SHARED) };
        let raw = raw.map_err(io::Error::other)?;
        let view = GuestRegionMmap::new(raw, GuestAddress(guest)).ok_or(MemoryError::Overlap)?;
        let memory: Arc<dyn Memory> = mapped.clone();
        let pages = Pages::of(&memory).map_err(io::Error::other)?;
        let lent = lender.lend(pages).map_err(MemoryError::Register)?;
        Ok(Self {
            guest,
            len,
            user,
            mapped,
            view: Arc::new(view),
            lent,
        })
    }

    /// Bytes from a guest's address to the region's end.
    fn left(&self, guest: u64) -> Option<u64> {
        let within = guest.checked_sub(self.guest)?;
        self.len.checked_sub(within).filter(|left| *left > 0)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct GuestMemory {
    /// By guest address.
    regions: Vec<Region>,
    /// The same for the parts that read descriptors. Its regions are mapped as long as ours are.
    view: GuestMemoryMmap,
}

impl GuestMemory {
    /// All of it as another one: nothing is under way with what was before.
    ///
    /// # Errors
    /// When it can't be; then nothing is left of either.
    pub(crate) fn set(
        &mut self,
        lender: &mut dyn Lender,
        regions: &[(VhostUserMemoryRegion, OwnedFd)],
    ) -> Result<(), MemoryError> {
        self.clear(lender);
        for (what, file) in regions {
            if let Err(e) = self.add(lender, what, file) {
                self.clear(lender);
                return Err(e);
            }
        }
        Ok(())
    }

    /// One more region.
    ///
    /// # Errors
    /// When it can't be; the others stay.
    pub(crate) fn add(
        &mut self,
        lender: &mut dyn Lender,
        what: &VhostUserMemoryRegion,
        file: &OwnedFd,
    ) -> Result<(), MemoryError> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(MemoryError::TooMany);
        }
        let region = Region::new(lender, what, file)?;
        let lent = region.lent;
        let at = self.regions.partition_point(|other| other.guest < region.guest);
        self.regions.insert(at, region);
        match self.renewed() {
            Some(view) => self.view = view,
            None => {
                self.regions.remove(at);
                lender.take_back(lent);
                return Err(MemoryError::Overlap);
            }
        }
        Ok(())
    }

    /// One region less: nothing is under way with it.
    ///
    /// # Errors
    /// When there is none like that.
    pub(crate) fn remove(&mut self, lender: &mut dyn Lender, what: &VhostUserMemoryRegion) -> Result<(), MemoryError> {
        let (guest, len, user) = (what.guest_phys_addr, what.memory_size, what.user_addr);
        let like = |region: &Region| (region.guest, region.len, region.user) == (guest, len, user);
        let at = self.regions.iter().position(like).ok_or(MemoryError::Unknown)?;
        let region = self.regions.remove(at);
        // Without one that overlapped none do now.
        self.view = self.renewed().unwrap_or_default();
        lender.take_back(region.lent);
        Ok(())
    }

    /// No memory: nothing is under way with it.
    pub(crate) fn clear(&mut self, lender: &mut dyn Lender) {
        self.view = GuestMemoryMmap::default();
        for region in self.regions.drain(..) {
            lender.take_back(region.lent);
        }
    }

    fn renewed(&self) -> Option<GuestMemoryMmap> {
        if self.regions.is_empty() {
            return Some(GuestMemoryMmap::default());
        }
        let regions = self.regions.iter().map(|region| region.view.clone()).collect();
        GuestMemoryMmap::from_arc_regions(regions).ok()
    }

    /// Returns the view that descriptors are read through.
    pub(crate) fn view(&self) -> &GuestMemoryMmap {
        &self.view
    }

    /// A guest's address for one of the front end's; `None` when it is not in the guest's memory.
    pub(crate) fn guest_addr(&self, user: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|region| {
            let within = user.checked_sub(region.user).filter(|within| *within < region.len)?;
            Some(GuestAddress(region.guest + within))
        })
    }

    /// Appends where bytes of the guest lie; `false` when not all of them are in its memory.
    pub(crate) fn pieces(&self, at: GuestAddress, len: u32, pieces: &mut Vec<LentPiece>) -> bool {
        let (mut at, mut left) = (at.0, len);
        while left > 0 {
            let found = self.regions.iter().find_map(|r| Some((r, r.left(at)?)));
            let Some((region, there)) = found else { return false };
            let len = there.min(left.into()) as u32;
            pieces.push(LentPiece {
                memory: region.lent,
                offset: (at - region.guest) as usize,
                len,
            });
            left -= len;
            // Regions end before the last address.
            at += u64::from(len);
        }
        true
    }

    /// The file behind some of it has become shorter.
    pub(crate) fn is_gone(&self) -> bool {
        self.regions.iter().any(|region| region.mapped.is_gone())
    }
}
