//! Mappings of files that others may truncate, and that must go on even so.

use core::sync::atomic::Ordering;

use super::{
    handler,
    slots::{self, Slot},
};

/// Puts zeroed memory in the place of a mapping whose file has become too short, at the first access behind the file's end. The access
/// goes on, be it of whatever code; the owner of the mapping finds out by [`Guard::is_hit`].
#[derive(Debug)]
pub struct Guard(&'static Slot);

impl Guard {
    /// Guards a mapping.
    ///
    /// # Safety
    /// `len` bytes from `start` on are a mapping of the caller's own, on whole pages of its file system, that may be replaced until the
    /// guard is dropped.
    pub unsafe fn new(start: *mut u8, len: usize) -> Self {
        handler::install();
        let free = |slot: &&'static Slot| !slot.taken.swap(true, Ordering::AcqRel);
        let slot = slots::all().find(free).unwrap_or_else(slots::link);
        slot.hit.store(false, Ordering::Relaxed);
        slot.len.store(len, Ordering::Relaxed);
        slot.start.store(start.expose_provenance(), Ordering::Release);
        Self(slot)
    }

    /// Whether the mapping was replaced.
    pub fn is_hit(&self) -> bool {
        self.0.hit.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
        self.0.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::FromRawFd, ptr};

    use super::*;

    #[test]
    fn a_truncated_file_is_replaced_for_any_code_and_nothing_else() {
        let len = 4 * 4096;
        let map = || {
            // SAFETY: a new file and a new mapping.
            let (file, at) = unsafe {
                let fd = libc::memfd_create(c"guard".as_ptr(), libc::MFD_CLOEXEC);
                let file = File::from_raw_fd(fd);
                file.set_len(len as u64).unwrap();
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                (file, libc::mmap(ptr::null_mut(), len, rights, libc::MAP_SHARED, fd, 0))
            };
            assert_ne!(at, libc::MAP_FAILED);
            (file, at.cast::<u8>())
        };
        let ((file, at), (_other, beside)) = (map(), map());
        // SAFETY: the two mappings, which nothing else uses, and which stay.
        unsafe {
            let (guard, stays) = (Guard::new(at, len), Guard::new(beside, len));
            at.write_volatile(1);
            beside.write_volatile(2);
            file.set_len(4096).unwrap();
            assert!(!guard.is_hit(), "nothing has touched it");
            assert_eq!(at.add(8192).read_volatile(), 0);
            assert!(guard.is_hit() && !stays.is_hit());
            at.add(len - 1).write_volatile(3);
            assert_eq!((at.read_volatile(), beside.read_volatile()), (0, 2));
            // The slot is used again, for another mapping.
            let slot = ptr::from_ref(guard.0);
            drop(guard);
            let again = Guard::new(at, len);
            assert_eq!((ptr::from_ref(again.0), again.is_hit()), (slot, false));
        }
    }
}
