//! Mappings of files that others may truncate, and that must go on even so.

use core::{
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
};

use super::handler;

/// Puts zeroed memory in the place of a mapping whose file has become too short, at the first access behind the file's end. The access
/// goes on, be it of whatever code; the owner of the mapping finds out by [`Guard::is_hit`].
#[derive(Debug)]
pub struct Guard(&'static Slot);

/// A mapping as the signal handler finds it. Slots are never freed, but used again.
#[derive(Debug, Default)]
struct Slot {
    /// First byte; 0: it guards nothing.
    start: AtomicUsize,
    len: AtomicUsize,
    /// It was replaced.
    hit: AtomicBool,
    taken: AtomicBool,
    next: AtomicPtr<Slot>,
}

/// The first of all slots.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

fn all() -> impl Iterator<Item = &'static Slot> {
    let from = |at: &AtomicPtr<Slot>| {
        // SAFETY: slots are leaked when they are made, and complete when they are linked.
        unsafe { at.load(Ordering::Acquire).as_ref() }
    };
    core::iter::successors(from(&SLOTS), move |slot| from(&slot.next))
}

/// Makes another slot.
fn link() -> &'static Slot {
    let slot: &'static Slot = Box::leak(Box::new(Slot {
        taken: AtomicBool::new(true),
        ..Slot::default()
    }));
    let mut first = SLOTS.load(Ordering::Acquire);
    loop {
        slot.next.store(first, Ordering::Relaxed);
        let this = ptr::from_ref(slot).cast_mut();
        match SLOTS.compare_exchange_weak(first, this, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return slot,
            Err(other) => first = other,
        }
    }
}

impl Guard {
    /// Guards a mapping.
    ///
    /// # Safety
    /// `len` bytes from `start` on are a mapping of the caller's own, on whole pages of its file system, that may be replaced until the
    /// guard is dropped.
    pub unsafe fn new(start: *mut u8, len: usize) -> Self {
        handler::install();
        let free = |slot: &&'static Slot| !slot.taken.swap(true, Ordering::AcqRel);
        let slot = all().find(free).unwrap_or_else(link);
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

/// Replaces the guarded mapping that an address lies in. Returns false if there is none. Async-signal-safe: atomics and one system
/// call.
pub(super) fn replace(addr: usize) -> bool {
    for slot in all() {
        let start = slot.start.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Relaxed);
        if start == 0 || !(start..start.saturating_add(len)).contains(&addr) {
            continue;
        }
        slot.hit.store(true, Ordering::Release);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: who has just touched the mapping keeps it alive, so all of the range is its own and nothing else is replaced.
        let at = unsafe {
            libc::mmap(
                ptr::with_exposed_provenance_mut(start),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        return at != libc::MAP_FAILED;
    }
    false
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::FromRawFd};

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
